"""torch.compile, torch.export, vmap and activation checkpoints around attention."""

import copy
import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from dense64 import close, gradients
from inputs import cumulative, draw, draw_qkv, draw_tokens
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import tilewise

torch.set_num_threads(1)


def test_b63_compiled_lengths_that_fill_no_tile(attend):
    """https://github.com/SandAI-org/MagiAttention/issues/137"""
    torch.compiler.reset()
    run = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for s, head_major in ((128, True), (196, True), (256, False), (257, False)):
        leaves = draw_qkv(1, s, s, 2, 16, 8, torch.bfloat16, head_major)
        dout, dlse = draw(1, s, 2, 8, dtype=torch.bfloat16), draw(1, 2, s)
        got = gradients(run, leaves, dout, dlse, causal=True)
        want = gradients(attend, leaves, dout, dlse, causal=True)
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])
        for name in leaves:
            close(got[2][name], want[2][name])


def test_b63_one_graph_for_all_lengths(attend):
    torch.compiler.reset()
    graphs = []

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    run = torch.compile(attend, backend=count, fullgraph=True, dynamic=True)
    for s in (128, 196, 256, 257):
        leaves = draw_qkv(2, s, s + 3, 2, 16)
        for ours, eager in zip(
            run(**leaves, causal=True), attend(**leaves, causal=True), strict=True
        ):
            assert torch.equal(ours, eager)
    assert len(graphs) == 1


def test_b63_compiled_packed(packed):
    torch.compiler.reset()
    run = torch.compile(packed, backend="aot_eager", fullgraph=True, dynamic=True)
    for lengths in ([3, 130, 1], [5, 0, 77], [200]):
        total = sum(lengths)
        cu = cumulative(lengths)
        leaves = draw_tokens(total, total, (4, 2), 16, 8, torch.float32)
        dout = draw(total, 4, 8)
        options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "causal": True}
        got = gradients(run, leaves, dout, None, **options)
        want = gradients(packed, leaves, dout, None, **options)
        assert torch.equal(got[0], want[0])
        for name in leaves:
            close(got[2][name], want[2][name])


def test_b63_exported():
    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
            return tilewise.attention(q, k, v, causal=True, softcap=5.0, return_lse=True)

    leaves = tuple(draw_qkv(2, 9, 12, (4, 2), 8, 4).values())
    program = torch.export.export(Layer(), leaves).module()
    for ours, eager in zip(program(*leaves), Layer()(*leaves), strict=True):
        assert torch.equal(ours, eager)


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_b63_traced_by_make_fx(backend, mode):
    leaves = tuple(draw_qkv(1, 8, 8, 2, 4).values())
    call = functools.partial(tilewise.attention, causal=True, backend=backend)
    graph = make_fx(lambda *x: call(*x), tracing_mode=mode)(*leaves)
    targets = [node.target for node in graph.graph.nodes]
    assert torch.ops.tilewise.forward.default in targets
    close(graph(*leaves), call(*leaves))


def arguments(backend: str, **changes: Any) -> list[Any]:
    """The arguments of torch.ops.tilewise.forward, by the names in its schema."""
    schema = torch.ops.tilewise.forward.default._schema
    given: dict[str, Any] = {
        **draw_qkv(2, 7, 9, (4, 2), 8, 6),
        "scale": 0.3,
        "softcap": None,
        "dropout_p": 0.0,
        "align": "bottom-right",
        "deterministic": False,
        "backend": backend,
        **changes,
    }
    return [given.get(a.name) for a in schema.arguments]


OPERATOR_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything": {
        "bias": draw(1, 4, 1, 9, seed=3),
        "alibi_slopes": draw(4, seed=4),
        "sinks": draw(4, seed=5),
        "mask": torch.ones(1, 1, 7, 9, dtype=torch.bool).tril(2),
        "softcap": 4.0,
        "window_left": 5,
        "window_right": 1,
        "key_start": torch.zeros(1, 1, dtype=torch.int32),
        "key_end": torch.full((2, 7), 8, dtype=torch.int32),
        "dropout_seed": torch.tensor(5),
        "dropout_p": 0.3,
    },
    "head-major": draw_qkv(2, 7, 9, (4, 2), 8, 6, head_major=True),
    "packed": {
        **draw_tokens(7, 9, (4, 2), 8, 6, torch.float32),
        "cu_seqlens_q": torch.tensor([0, 3, 6]),
        "cu_seqlens_k": torch.tensor([0, 0, 9]),
        "max_seqlen_q": 3,
    },
}
CHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)


@pytest.mark.parametrize(
    ("backend", "case"),
    [*(("tiled", case) for case in OPERATOR_CASES), ("reference", "everything")],
)
@pytest.mark.parametrize("gradient", [False, True])
def test_b63_operators_keep_their_word(backend, case, gradient):
    changes = copy.deepcopy(OPERATOR_CASES[case])
    given = arguments(backend, **changes)
    if gradient:
        for t in given[:6]:
            if t is not None:
                t.requires_grad_()
    torch.library.opcheck(torch.ops.tilewise.forward.default, given, test_utils=CHECKS)
    if gradient:
        return
    results = torch.ops.tilewise.forward(*given)
    dout, dlse = draw(*results[0].shape, seed=11), draw(*results[1].shape, seed=12)
    for cotangent in (dlse, None):
        torch.library.opcheck(
            torch.ops.tilewise.backward.default,
            [dout, cotangent, *results, "bias alibi_slopes sinks", *given],
            test_utils=CHECKS,
        )


def test_b63_fakes_have_the_strides_of_results(backend):
    for changes in OPERATOR_CASES.values():
        given = arguments(backend, **changes)
        real = torch.ops.tilewise.forward(*given)
        real += torch.ops.tilewise.backward(
            real[0], real[1], *real, "bias alibi_slopes sinks", *given
        )
        with FakeTensorMode() as mode:
            given = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in given]
            fake = torch.ops.tilewise.forward(*given)
            fake += torch.ops.tilewise.backward(
                fake[0], fake[1], *fake, "bias alibi_slopes sinks", *given
            )
        for a, b in zip(real, fake, strict=True):
            assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


class Layer(torch.nn.Module):
    """Projections and attention of one sample (L, width)."""

    def __init__(self, backend: str, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (torch.nn.Linear(16, 8 * h) for h in (4, 2, 2))
        self.options = {"backend": backend, **options}

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, 8))[None] for f in (self.q, self.k, self.v))
        return tilewise.attention(q, k, v, **self.options).mean()


@pytest.mark.parametrize("extra", ["none", "sinks", "mask"])
def test_b66_vmap_of_a_layer(backend, extra):
    """https://github.com/ml-explore/mlx/issues/3383"""
    options: dict[str, Any] = {
        "none": {},
        "sinks": {"sinks": torch.tensor([1.0, 2, 3, 4]), "alibi_slopes": tilewise.alibi_slopes(4)},
        "mask": {"mask": torch.ones(4, 4, dtype=torch.bool).tril()},
    }[extra]
    layer = Layer(backend, **options)
    x = draw(3, 4, 16)
    vmap, grad = torch.func.vmap, torch.func.grad
    close(vmap(layer)(x), torch.stack([layer(a) for a in x]))
    close(vmap(grad(layer))(x), torch.stack([grad(layer)(a) for a in x]))
    # Gradients of each sample with respect to the shared weights.
    weights = dict(layer.named_parameters())

    def loss(w: dict[str, Tensor], a: Tensor) -> Tensor:
        return torch.func.functional_call(layer, w, (a,))

    got = vmap(grad(loss), in_dims=(None, 0))(weights, x)
    for name in weights:
        close(got[name], torch.stack([grad(loss)(weights, a)[name] for a in x]))


def test_b66_vmap_of_some_arguments(attend):
    q, mask = draw(3, 2, 5, 4, 8), draw(3, 2, 1, 5, 6, seed=4) > 0
    k, v = draw(2, 6, 2, 8, seed=1), draw(2, 6, 2, 8, seed=2)
    vmap = torch.func.vmap

    def call(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return attend(q, k, v, mask=mask)

    for dims in [(0, None, None, 0), (None, None, None, 0), (0, None, None, None)]:
        given = (q if dims[0] == 0 else q[0], k, v, mask if dims[3] == 0 else mask[0])
        got = vmap(call, in_dims=dims)(*given)
        loop = [
            call(*(t[i] if d == 0 else t for t, d in zip(given, dims, strict=True)))
            for i in range(3)
        ]
        for a, b in zip(got, zip(*loop, strict=True), strict=True):
            close(a, torch.stack(b))
    # The mapped dimension may be any, and maps may nest.
    got = vmap(call, in_dims=(1, None, None, None))(q.movedim(0, 1), k, v, mask[0])
    for a, b in zip(got, zip(*[call(x, k, v, mask[0]) for x in q], strict=True), strict=True):
        close(a, torch.stack(b))
    pairs = torch.stack([q, q + 1])
    got = vmap(vmap(call, in_dims=(0, None, None, None)), in_dims=(0, None, None, None))(
        pairs, k, v, mask[0]
    )[0]
    close(got, torch.stack([torch.stack([call(x, k, v, mask[0])[0] for x in y]) for y in pairs]))


def test_b66_vmap_of_packed(packed):
    q = draw(3, 7, 4, 8)
    k, v = draw(9, 2, 8, seed=1), draw(9, 2, 8, seed=2)
    cu_q, cu_k = torch.tensor([0, 3, 7]), torch.tensor([0, 5, 9])
    got = torch.func.vmap(lambda x: packed(x, k, v, cu_q, cu_k))(q)
    loop = [packed(x, k, v, cu_q, cu_k) for x in q]
    for a, b in zip(got, zip(*loop, strict=True), strict=True):
        close(a, torch.stack(b))


def test_b66_vmap_and_dropout(attend):
    x = draw(1, 5, 2, 8).expand(4, 1, 5, 2, 8)

    def call(t: Tensor) -> Tensor:
        return attend(t, t, t, dropout_p=0.5)[0]

    with pytest.raises(RuntimeError, match="random"):
        torch.func.vmap(call)(x)
    same = torch.func.vmap(call, randomness="same")(x)
    assert all(torch.equal(t, same[0]) for t in same)
    different = torch.func.vmap(call, randomness="different")(x)
    assert not any(torch.equal(t, different[0]) for t in different[1:])
    fixed = torch.func.vmap(lambda t: attend(t, t, t, dropout_p=0.5, dropout_seed=9)[0])(x)
    close(fixed[2], attend(x[2], x[2], x[2], dropout_p=0.5, dropout_seed=9)[0])


def dropped_layer(backend: str) -> Callable[[Tensor], Tensor]:
    def layer(x: Tensor) -> Tensor:
        x = x * 1.5
        return tilewise.attention(x, x, x, causal=True, dropout_p=0.2, backend=backend) * 2

    return layer


@pytest.mark.parametrize("reentrant", [False, True])
def test_b67_checkpoints_recompute_the_same_bits(backend, reentrant):
    """https://github.com/allenai/OLMo-core/pull/828"""
    layer = dropped_layer(backend)
    results = []
    for wrap in (layer, functools.partial(checkpoint, layer, use_reentrant=reentrant)):
        x = draw(2, 20, 2, 8).requires_grad_()
        torch.manual_seed(3)
        out = wrap(wrap(x))
        out.square().sum().backward()
        results.append((out, x.grad, torch.rand(3)))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_b67_selective_checkpoints(backend):
    layer = dropped_layer(backend)
    x = draw(2, 20, 2, 8).requires_grad_()

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        ours = op is torch.ops.tilewise.forward.default
        return CheckpointPolicy.MUST_SAVE if ours else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    wrapped = functools.partial(checkpoint, layer, use_reentrant=False, context_fn=contexts)
    results = []
    for call in (layer, wrapped):
        torch.manual_seed(3)
        out = call(x)
        results.append((out, *torch.autograd.grad(out.square().sum(), x)))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_b67_the_seed_comes_from_torch_alone(attend):
    leaves = draw_qkv(1, 20, 20, 2, 8)
    outs = []
    for python_seed in (1, 2):
        random.seed(python_seed)
        torch.manual_seed(11)
        outs.append([attend(**leaves, dropout_p=0.5)[0] for _ in range(2)])
    assert torch.equal(outs[0][0], outs[1][0])
    assert torch.equal(outs[0][1], outs[1][1])
    assert not torch.equal(outs[0][0], outs[0][1])
