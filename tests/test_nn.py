"""The module: a plain formula in float64, the cache, packing, and what PyTorch does with modules."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tilewise.nn import Attention, KVCache, rotate

torch.set_num_threads(1)

WIDTH, HEADS, KV_HEADS = 24, 6, 2


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def module(**changes: Any) -> Attention:
    """In float64, with norms that are not 1."""
    torch.manual_seed(1)
    given = {"num_kv_heads": KV_HEADS, "dtype": torch.float64, **changes}
    layer = Attention(WIDTH, HEADS, **given)
    for name, parameter in layer.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 1, 0.3)
    return layer


def turned(x: Tensor, base: float, pairs: str) -> Tensor:
    """Rotary positions by complex numbers, x (B, H, S, D)."""
    half = x.shape[-1] // 2
    powers = torch.tensor([base ** (-2 * i / x.shape[-1]) for i in range(half)], dtype=x.dtype)
    angle = torch.arange(x.shape[2]).unsqueeze(-1) * powers
    if pairs == "interleaved":
        z = torch.view_as_complex(x.unflatten(-1, (half, 2)).contiguous())
        return torch.view_as_real(z * torch.exp(1j * angle)).flatten(-2)
    z = torch.complex(x[..., :half], x[..., half:]) * torch.exp(1j * angle)
    return torch.cat([z.real, z.imag], -1)


def by_formula(layer: Attention, x: Tensor, seen: Tensor) -> Tensor:
    """The whole module with the n×n matrix written out; `seen` broadcasts to (B, H, S, S)."""
    w = {name: parameter.detach() for name, parameter in layer.named_parameters()}

    def heads(name: str) -> Tensor:
        y = x @ w[f"{name}_proj.weight"].T + w.get(f"{name}_proj.bias", 0)
        y = y.unflatten(-1, (-1, layer.head_dim)).transpose(1, 2)
        if f"{name}_norm.weight" in w:
            y = y * (y.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w[f"{name}_norm.weight"]
        if name != "v" and layer.rotary:
            y = turned(y, layer.rotary_base, layer.rotary)
        return y.repeat_interleave(HEADS // y.shape[1], 1)

    q, k, v = map(heads, "qkv")
    s = q @ k.mT / layer.head_dim**0.5
    if cap := layer.options.get("softcap"):
        s = cap * torch.tanh(s / cap)
    p = torch.softmax(s.masked_fill(~seen, float("-inf")), -1)
    out = (p @ v).transpose(1, 2).flatten(-2)
    return out @ w["o_proj.weight"].T + w.get("o_proj.bias", 0)


def visible(length: int, left: int | None = None, causal: bool = True) -> Tensor:
    i, j = torch.arange(length).unsqueeze(-1), torch.arange(length)
    seen = (j <= i) if causal else torch.ones(length, length, dtype=torch.bool)
    return seen if left is None else seen & (j >= i - left)


CASES: dict[str, tuple[dict[str, Any], Tensor]] = {
    "plain": ({"num_kv_heads": None}, visible(11, causal=False)),
    "causal": ({"causal": True}, visible(11)),
    "multi-query": ({"num_kv_heads": 1, "causal": True, "bias": True}, visible(11)),
    "half": ({"causal": True, "rotary": "half"}, visible(11)),
    "interleaved": (
        {"causal": True, "rotary": "interleaved", "rotary_base": 50.0},
        visible(11),
    ),
    "everything": (
        {
            "head_dim": 10,
            "bias": True,
            "qk_norm": True,
            "rotary": "half",
            "rotary_base": 500.0,
            "causal": True,
            "window_size": (4, None),
            "softcap": 3.0,
        },
        visible(11, 4),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_plain_formula(case: str, device: str) -> None:
    options, seen = CASES[case]
    layer, x = module(**options), draw(2, 11, WIDTH)
    want = by_formula(layer, x, seen)
    out = layer.to(device)(x.to(device)).cpu()
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)


def test_gradients(device: str) -> None:
    layer = module(head_dim=4, bias=True, qk_norm=True, rotary="interleaved", causal=True)
    layer.to(device)
    names, values = zip(*layer.named_parameters(), strict=True)

    def run(x: Tensor, *weights: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, weights, strict=True)), (x,))

    x = draw(1, 4, WIDTH).to(device).requires_grad_()
    assert torch.autograd.gradcheck(run, (x, *values), fast_mode=True)
    assert len(names) == 10


@pytest.mark.parametrize("case", [case for case in CASES if case != "plain"])
def test_the_cache_continues_the_row(case: str, device: str) -> None:
    layer = module(**CASES[case][0]).to(device).eval()
    x = draw(2, 11, WIDTH).to(device)
    with torch.no_grad():
        whole = layer(x)
        cache = layer.new_cache(batch=2, capacity=12)
        cache.k.fill_(torch.nan)  # what is not written is not read
        cache.v.fill_(torch.nan)
        parts = [layer(part, cache=cache) for part in x.split([5, 1, 1, 3, 1], 1)]
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-12, atol=1e-12)
        assert cache.length == 11
        cache.length = 6  # forgets
        torch.testing.assert_close(layer(x[:, 6:9], cache=cache), whole[:, 6:9])


def test_a_cache_of_rows_padded_on_the_left(device: str) -> None:
    layer = module(rotary="half", causal=True).to(device).eval()
    x, pad = draw(2, 9, WIDTH).to(device), torch.tensor([[3], [0]], device=device)
    with torch.no_grad():
        alone = layer(x[:1, 3:])
        cache = layer.new_cache(2, 9)
        parts = [
            layer(part, cache=cache, key_range=(pad, torch.full_like(pad, 9)))
            for part in x.split([6, 1, 2], 1)
        ]
    torch.testing.assert_close(torch.cat(parts, 1)[:1, 3:], alone)
    assert torch.cat(parts, 1)[0, :3].abs().max() == 0  # rows that see nothing


def test_padding_on_the_right(device: str) -> None:
    layer = module(rotary="interleaved", qk_norm=True).to(device)
    x, lengths = draw(2, 9, WIDTH).to(device), torch.tensor([[9], [4]], device=device)
    x[1, 4:] = torch.nan
    out = layer(x, key_range=(torch.zeros_like(lengths), lengths))
    torch.testing.assert_close(out[1:, :4], layer(x[1:, :4]))
    torch.testing.assert_close(out[:1], layer(x[:1]))


def test_packed_sequences(device: str) -> None:
    layer = module(rotary="half", causal=True, window_size=(3, None)).to(device)
    x = draw(12, WIDTH).to(device)
    cu = torch.tensor([0, 5, 5, 6, 12], dtype=torch.int32, device=device)
    alone = [layer(part[None])[0] for part in x.split([5, 1, 6])]
    torch.testing.assert_close(layer(x, cu_seqlens=cu), torch.cat(alone), rtol=1e-12, atol=1e-12)


def test_positions_of_packed_sequences_start_anew(device: str) -> None:
    """An angle of 50,000 in float32 would be off by a thousandth."""
    layer = module(rotary="half", causal=True, window_size=(9, None), dtype=torch.float32)
    torch.nn.init.normal_(layer.to(device).q_proj.weight)
    x = draw(50_010, WIDTH, seed=2).float().to(device)
    with torch.no_grad():
        together = layer(x, cu_seqlens=torch.tensor([0, 50_000, 50_010], device=device))
        torch.testing.assert_close(together[50_000:], layer(x[None, 50_000:])[0])


def test_options_of_a_call() -> None:
    layer = module(causal=True)
    x = draw(2, 11, WIDTH)
    seen = draw(11, 11, seed=3) > 0
    seen.fill_diagonal_(True)
    torch.testing.assert_close(layer(x, mask=seen), by_formula(layer, x, seen & visible(11)))
    want = by_formula(layer, x, visible(11, causal=False))
    torch.testing.assert_close(layer(x, causal=False), want)
    sinks = torch.full((HEADS,), 50.0)
    assert layer(x, sinks=sinks).abs().max() < 1e-12  # they take it all


def test_dropout_counts_in_training_only(device: str) -> None:
    layer = module(dropout_p=0.5, causal=True).to(device)
    x = draw(2, 11, WIDTH).to(device)
    trained = [layer(x, dropout_seed=seed) for seed in (1, 1, 2)]
    assert torch.equal(trained[0], trained[1])
    assert not torch.equal(trained[0], trained[2])
    layer.eval()
    want = by_formula(copy.deepcopy(layer).cpu(), x.cpu(), visible(11))
    torch.testing.assert_close(layer(x).cpu(), want)
    assert layer(x, dropout_p=1.0).abs().max() == 0  # a call that asks for it gets it


def test_copies_and_files(device: str) -> None:
    layer = module(**CASES["everything"][0]).to(device)
    x = draw(2, 11, WIDTH).to(device)
    want = layer(x)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for twin in (
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        torch.load(file, weights_only=False),
    ):
        assert torch.equal(twin(x), want)
    other = module(**CASES["everything"][0]).to(device)
    torch.nn.init.zeros_(other.q_proj.weight)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), want)

    cache = layer.new_cache(2, 4)
    with torch.no_grad():
        layer(x[:, :3], cache=cache)
        for twin in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
            assert torch.equal(layer(x[:, 3:4], cache=twin), layer(x[:, 3:4], cache=cache))
            cache.length = 3


def test_backends_and_dtypes() -> None:
    layer, x = module(rotary="half", backend="reference"), draw(1, 5, WIDTH)
    torch.testing.assert_close(layer(x), module(rotary="half")(x))
    with pytest.raises(ValueError, match="backend must be"):
        module(backend="none")(x)
    low = Attention(WIDTH, HEADS, rotary="half", dtype=torch.bfloat16)
    assert low(x.bfloat16()).dtype == torch.bfloat16
    assert low.new_cache(1, 2).k.dtype == torch.bfloat16
    assert low.new_cache(1, 2, torch.float32).k.dtype == torch.float32
    meta = Attention(WIDTH, HEADS, rotary="half", device="meta")
    assert meta(x.float().to("meta")).shape == x.shape


def test_rotation_is_computed_in_float32() -> None:
    x, positions = draw(1, 3, 2, 8).bfloat16(), torch.tensor([0, 1000, 30000])
    for pairs in ("half", "interleaved"):
        exact = rotate(x.double(), positions, pairs=pairs)
        assert (rotate(x, positions, pairs=pairs) - exact).abs().max() < 0.02
        each = torch.stack([positions, positions.flip(0)])
        both = rotate(x.expand(2, -1, -1, -1), each, pairs=pairs)
        assert torch.equal(both[:1], rotate(x, positions, pairs=pairs))
        assert torch.equal(both[1:], rotate(x, positions.flip(0), pairs=pairs))


def test_what_it_says_of_itself() -> None:
    text = repr(module(rotary="half", causal=True))
    assert "num_heads=6, num_kv_heads=2, rotary='half', causal=True" in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 4}, "num_kv_heads must divide num_heads = 6, got 4"),
        *(
            ({name: size}, f"{name} must be an int of at least 1, got")
            for name in ("num_kv_heads", "head_dim")
            for size in (0, -2, 2.0, "4", True)
        ),
        ({"rotary": "whole"}, "rotary must be"),
        ({"rotary": "half", "head_dim": 5}, "head_dim must be even"),
        ({"align": "top-left"}, "align is no option"),
        ({"casual": True}, "casual is no option of this module; there are causal,"),
        ({"mask": torch.ones(2, 2, dtype=torch.bool)}, "mask is a tensor"),
        ({"key_range": (torch.zeros(1), torch.ones(1))}, "key_range is a tensor"),
    ],
)
def test_constructor_errors(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        module(**changes)


def test_errors() -> None:
    with pytest.raises(ValueError, match="num_heads must divide embed_dim = 10"):
        Attention(10, 3)
    for sizes in ((0, 1), (24, 0), (24.0, 2), (24, True)):
        with pytest.raises(ValueError, match="must be an int of at least 1"):
            Attention(*sizes)
    layer, x, cu = module(), draw(2, 5, WIDTH), torch.tensor([0, 5])
    for given in ([1.0], None, 3):
        with pytest.raises(ValueError, match=r"x must have shape .* got (list|NoneType|int)"):
            layer(given)
        if given is not None:
            with pytest.raises(ValueError, match=r"cache must be a KVCache .* got (list|int)"):
                layer(x, cache=given)
    for batch, capacity in ((-1, 3), (1, -1), (1, 2.5), (True, 1)):
        with pytest.raises(ValueError, match=r"(batch|capacity) must be an int of at least 0"):
            layer.new_cache(batch, capacity)
    with pytest.raises(ValueError, match=r"x must have shape \(B, S, embed_dim\)"):
        layer(x[0])
    with pytest.raises(ValueError, match=r"x must have shape \(total, embed_dim\) with cu_seqlens"):
        layer(x, cu_seqlens=cu)
    with pytest.raises(ValueError, match="embed_dim = 24, got"):
        layer(x[..., :5])
    with pytest.raises(ValueError, match="align is no option"):
        layer(x, align="top-left")
    cache = layer.new_cache(2, 7)
    with pytest.raises(ValueError, match="cannot have cu_seqlens"):
        layer(x[0], cu_seqlens=cu, cache=cache)
    with pytest.raises(ValueError, match="cache is for inference"):
        layer(x, cache=cache)
    with torch.no_grad():
        with pytest.raises(ValueError, match="keys must have shape"):
            layer(x[:1], cache=cache)
        layer(x, cache=cache)
        with pytest.raises(ValueError, match="room for 7 tokens, got 5 more than 5"):
            layer(x, cache=cache)
        assert cache.length == 5
        layer(x[:, :2], cache=cache)
        with pytest.raises(ValueError, match="room for 7 tokens, got 1 more than 7"):
            layer(x[:, :1], cache=cache)
    with pytest.raises(ValueError, match="even head dim"):
        rotate(draw(1, 2, 1, 3), torch.arange(2))
    wide = KVCache(torch.zeros(1, 4, 2, 8), torch.zeros(1, 4, 2, 6))
    with pytest.raises(ValueError, match="values must have shape"):
        wide.append(torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 2, 8))
    assert wide.length == 0
    assert tilewise.nn.Attention is Attention


def test_a_call_that_is_refused_leaves_no_tokens():
    layer = Attention(16, 2).eval()
    cache = layer.new_cache(1, 8)
    x = torch.randn(1, 3, 16)
    with torch.no_grad():
        layer(x, cache=cache, causal=True)
        with pytest.raises(ValueError, match="window_size"):
            layer(x, cache=cache, causal=True, window_size=(-1, 0))
    assert cache.length == 3


@pytest.mark.parametrize("rotary", [None, "half"])
def test_lengths_that_do_not_fit(rotary):
    layer, x = Attention(16, 2, rotary=rotary), torch.randn(9, 16)
    empty = torch.tensor([], dtype=torch.int32)
    for wrong in ([0, 4, 9], torch.tensor([[0, 4, 9]]), torch.tensor([0.0, 9.0]), empty):
        with pytest.raises(ValueError, match="cu_seqlens must"):
            layer(x, cu_seqlens=wrong)
