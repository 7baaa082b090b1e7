"""CUDA graphs: what is captured once computes with new numbers in the same memory at every replay."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from inputs import cumulative, draw, draw_qkv, draw_tokens
from torch import Tensor

import tilewise
from tilewise.nn import Attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
DEVICE = "cuda"
BF16 = torch.bfloat16
Inputs = dict[str, Tensor]


def captured(call: Callable[[], list[Tensor]]) -> Callable[[], list[Tensor]]:
    """Captures a call that reads and writes the same memory each time; what is returned replays it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # kernels are compiled and workspaces made before
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()

    def replay() -> list[Tensor]:
        for t in results:
            t.fill_(float("nan"))  # nothing is left from before
        graph.replay()
        return results

    return replay


def wide(seed: int, d: int = 64, dtype: torch.dtype = BF16, length: int = 300) -> Inputs:
    given = draw_qkv(2, length, length, (4, 2), d, dtype=dtype)
    return {name: t + draw(*t.shape, dtype=dtype, seed=seed) for name, t in given.items()}


def packed(seed: int, *lengths: int) -> Inputs:
    tokens = draw_tokens(300, 300, (4, 2), 64, 64, BF16)
    drawn = {name: t + draw(*t.shape, dtype=BF16, seed=seed) for name, t in tokens.items()}
    cu = cumulative(list(lengths))
    return {**drawn, "cu_seqlens_q": cu, "cu_seqlens_k": cu.clone()}


def with_rest(seed: int) -> Inputs:
    return {
        **wide(seed, dtype=torch.float16),
        "bias": draw(4, 300, 300, seed=seed),
        "alibi_slopes": draw(4, seed=seed).abs(),
        "sinks": draw(4, seed=seed),
    }


def ranged(seed: int) -> Inputs:
    first = torch.randint(0, 100, (2, 300), generator=torch.Generator().manual_seed(seed))
    start, end = first.int(), (3 * first + 1).int()
    return {**wide(seed, dtype=torch.float32), "start": start, "end": end}


def in_range(start: Tensor, end: Tensor, **rest: Any) -> Any:
    return tilewise.attention(key_range=(start, end), **rest)


def dropped(seed: int) -> Inputs:
    return {**wide(seed), "dropout_seed": torch.tensor(seed)}


dense, varlen = tilewise.attention, tilewise.attention_varlen
# What is called, and the numbers for the capture and for a replay.
CALLS: dict[str, tuple[Callable[..., Any], Inputs, Inputs]] = {
    "causal": (functools.partial(dense, causal=True), wide(11), wide(12)),
    "head dim 128": (functools.partial(dense, causal=True), wide(11, 128), wide(12, 128)),
    "odd head dim": (dense, wide(11, 37, torch.float32), wide(12, 37, torch.float32)),
    "float64": (dense, wide(11, 16, torch.float64), wide(12, 16, torch.float64)),
    "window and softcap": (
        functools.partial(dense, window_size=(70, 5), softcap=4.0),
        wide(11),
        wide(12),
    ),
    "bias, alibi, sinks": (functools.partial(dense, causal=True), with_rest(11), with_rest(12)),
    "ranges": (in_range, ranged(11), ranged(12)),
    "other dropout": (
        functools.partial(dense, causal=True, dropout_p=0.2),
        dropped(11),
        dropped(12),
    ),
    "other lengths": (
        functools.partial(varlen, max_seqlen_q=300, max_seqlen_k=300, causal=True),
        packed(11, 100, 150, 50),
        packed(12, 7, 0, 290),
    ),
}


def moved(inputs: Inputs, grads: bool) -> Inputs:
    """On the device; floating ones require grad."""
    return {
        name: t.to(DEVICE, copy=True).requires_grad_(grads and t.is_floating_point())
        for name, t in inputs.items()
    }


@pytest.mark.parametrize("name", CALLS)
def test_forward(name: str) -> None:
    call, first, second = CALLS[name]
    static, other = moved(first, False), moved(second, False)
    want = [call(**given, return_lse=True) for given in (other, moved(first, False))]
    replay = captured(lambda: list(call(**static, return_lse=True)))
    for given, (out, lse) in zip((other, moved(first, False)), want, strict=True):
        for key, t in static.items():
            t.copy_(given[key])
        got = replay()
        assert torch.equal(got[0], out)
        assert torch.equal(got[1], lse)


@pytest.mark.parametrize("name", CALLS)
def test_forward_and_backward(name: str) -> None:
    call, first, second = CALLS[name]
    static, other = moved(first, True), moved(second, True)

    def step(given: Inputs) -> list[Tensor]:
        out, lse = call(**given, return_lse=True, deterministic=True)
        loss = out.float().square().sum() + lse.clamp(-9, 9).sum()
        leaves = [t for t in given.values() if t.requires_grad]
        return [out.detach(), *torch.autograd.grad(loss, leaves)]

    want = step(other)
    assert all(t.isfinite().all() for t in want)
    replay = captured(lambda: step(static))
    with torch.no_grad():
        for key, t in static.items():
            t.copy_(other[key])
    for got, expected in zip(replay(), want, strict=True):
        assert torch.equal(got, expected)


def test_every_replay_drops_anew() -> None:
    """Without a seed, bits come from torch's generator, which goes on at every replay."""
    given = moved(wide(11), False)
    replay = captured(lambda: [dense(**given, dropout_p=0.5)])
    torch.manual_seed(3)
    a, b = replay()[0].clone(), replay()[0].clone()
    torch.manual_seed(3)
    assert torch.equal(replay()[0], a)
    assert not torch.equal(a, b)


def layer(**options: Any) -> Attention:
    torch.manual_seed(0)
    given = {"rotary": "half", "qk_norm": True, "causal": True, "deterministic": True, **options}
    return Attention(128, 4, 2, device=DEVICE, dtype=BF16, **given)


def test_a_module_is_trained() -> None:
    """torch.cuda.make_graphed_callables: a graph for the forward pass, one for the backward pass."""
    plain = layer(window_size=(50, None))
    graphed = layer(window_size=(50, None))
    x, y = (draw(2, 130, 128, dtype=BF16, seed=seed).to(DEVICE) for seed in (1, 2))
    call = torch.cuda.make_graphed_callables(graphed, (x.clone().requires_grad_(),))
    results = []
    for model, run in ((plain, plain), (graphed, call)):
        model.zero_grad()
        given = y.clone().requires_grad_()
        out = run(given)
        out.float().square().sum().backward()
        results.append([out.detach(), given.grad, *(p.grad for p in model.parameters())])
    for got, want in zip(results[1], results[0], strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("window", [None, 20])
def test_a_step_with_a_static_cache(window: int | None) -> None:
    """The step at one place of the row: the tokens before it and its own are other ones."""
    model = layer(window_size=(window, None)).eval()
    with torch.no_grad():
        rows = draw(2, 2, 40, 128, dtype=BF16).to(DEVICE).unbind(1)
        cache, x = model.new_cache(2, 64), rows[0][:, 39:].clone()
        model(rows[0][:, :39], cache=cache)

        def step() -> list[Tensor]:
            cache.length = 39
            return [model(x, cache=cache)]

        replay = captured(step)
        cache.length = 0
        model(rows[1][:, :39], cache=cache)
        x.copy_(rows[1][:, 39:])
        got = replay()[0].clone()
        assert torch.equal(got, step()[0])
        torch.testing.assert_close(got, model(rows[1])[:, 39:], rtol=2e-2, atol=2e-2)


def test_steps_whose_length_is_in_memory() -> None:
    """One graph for all steps: the place to write to and how many keys there are lie in tensors."""
    q, k, v = (t.to(DEVICE) for t in draw_qkv(2, 30, 30, (4, 2), 64, dtype=BF16).values())
    want = dense(q, k, v, causal=True)
    keys, values = (
        torch.full((2, 64, 2, 64), float("nan"), device=DEVICE, dtype=BF16) for _ in "kv"
    )
    place = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    new = [t[:, :1].clone() for t in (q, k, v)]
    start = torch.zeros(1, 1, dtype=torch.int64, device=DEVICE)

    def step() -> list[Tensor]:
        keys.index_copy_(1, place, new[1])
        values.index_copy_(1, place, new[2])
        return [dense(new[0], keys, values, key_range=(start, place.view(1, 1) + 1))]

    replay = captured(step)
    for i in range(30):
        place.fill_(i)
        for t, row in zip(new, (q, k, v), strict=True):
            t.copy_(row[:, i : i + 1])
        torch.testing.assert_close(replay()[0], want[:, i : i + 1], rtol=2e-2, atol=2e-2)


def test_compiled_with_graphs() -> None:
    """torch.compile(mode="reduce-overhead") captures by itself, training included."""
    torch.compiler.reset()
    model = layer(window_size=(50, None))
    x = draw(2, 130, 128, dtype=BF16).to(DEVICE)
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    results = []
    for run in (model, compiled, compiled, compiled):
        model.zero_grad(set_to_none=True)
        torch.compiler.cudagraph_mark_step_begin()
        out = run(x)
        out.float().square().mean().backward()
        results.append([out.detach().clone(), *(p.grad.clone() for p in model.parameters())])
    for got in results[1:]:
        for t, want in zip(got, results[0], strict=True):
            error = (t.float() - want.float()).norm() / want.float().norm()
            assert error < 0.02  # inductor rounds where eager code does not
