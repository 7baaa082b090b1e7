"""What PyTorch does around an operator: compile, export, torch.func, checkpoints, autocast, many processes.

tests/test_transforms.py has the operators themselves and functions of them; here are modules, transforms
inside torch.compile, and training in more than one process. All but the last on each device;
tests/test_cuda_graphs.py has what only a GPU has.
"""

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.distributed as dist
from dense64 import close
from inputs import cumulative, draw, draw_qkv, draw_tokens
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounter
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

import tilewise
from tilewise.nn import Attention

torch.set_num_threads(1)

WIDTH = 16


@pytest.fixture(autouse=True)
def _forget_compiled_code():
    torch.compiler.reset()


def layers(device: str = "cpu", count: int = 1, **options: Any) -> torch.nn.Sequential:
    torch.manual_seed(0)
    given = {"rotary": "half", "qk_norm": True, "causal": True, "deterministic": True, **options}
    model = torch.nn.Sequential(*(Attention(WIDTH, 4, 2, **given) for _ in range(count)))
    return model.to(device)


def on(device: str, tree: Any) -> Any:
    return tree_map_only(Tensor, lambda t: t.to(device), tree)


def results(module: torch.nn.Module, call: Callable[[Tensor], Tensor], x: Tensor) -> dict[str, Any]:
    """The output and all gradients of one step from seed 3."""
    module.zero_grad()
    x = x.detach().requires_grad_()
    torch.manual_seed(3)
    out = call(x)
    out.float().square().mean().backward()
    grads = {name: p.grad.clone() for name, p in module.named_parameters()}
    return {"out": out.detach(), "x": x.grad, **grads}


def assert_equal(a: dict[str, Any], b: dict[str, Any]) -> None:
    for name, t in a.items():
        assert torch.equal(t, b[name]), name


# ------------------------------------------------------------------ torch.compile, export, AOT autograd


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_a_compiled_module_trains_the_same(dropout_p: float, device: str) -> None:
    model = layers(device, dropout_p=dropout_p, window_size=(4, None))
    x = draw(2, 11, WIDTH).to(device)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    want = results(model, model, x)
    for name, t in results(model, compiled, x).items():
        close(t, want[name])


def count_graphs(call: Callable[..., Any], inputs: list[tuple[Any, ...]]) -> int:
    counter = CompileCounter()
    compiled = torch.compile(call, backend=counter, fullgraph=True)
    for given in inputs:
        got, want = compiled(*copy.deepcopy(given)), call(*given)
        assert torch.equal(got, want)
    return counter.frame_count


LENGTHS = (5, 9, 16, 33, 64, 100)


def qkv(length: int, batch: int = 2) -> tuple[Tensor, ...]:
    return tuple(draw_qkv(batch, length, length, (4, 2), 8).values())


def in_a_range(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    return tilewise.attention(q, k, v, key_range=(torch.zeros_like(lengths), lengths))


def in_a_window(q: Tensor, k: Tensor, v: Tensor, left: int) -> Tensor:
    return tilewise.attention(q, k, v, causal=True, window_size=(left, None))


def packed(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int) -> Tensor:
    return tilewise.attention_varlen(q, k, v, cu, cu, longest, longest, causal=True)


RANGES = [(*qkv(n), torch.tensor([[n], [n // 2]])) for n in LENGTHS]
WINDOWS = [(*qkv(n), n // 3) for n in LENGTHS]
PACKS = [
    (*draw_tokens(3 * n, 3 * n, (4, 2), 8, 8, torch.float32).values(), cumulative([n, *parts]), n)
    for n, parts in zip(LENGTHS, ([3, 7], [18], [20, 12], [66], [64, 3, 61], [200]), strict=True)
]


@pytest.mark.parametrize(
    ("call", "inputs"), [(in_a_range, RANGES), (in_a_window, WINDOWS), (packed, PACKS)]
)
def test_lengths_make_no_storm_of_graphs(call: Any, inputs: list[Any], device: str) -> None:
    """One for the first length, one for all."""
    assert count_graphs(call, on(device, inputs)) == 2


def test_a_module_makes_no_storm_of_graphs(device: str) -> None:
    model = layers(device)
    inputs = [(draw(2, n, WIDTH),) for n in LENGTHS]
    assert count_graphs(model, on(device, inputs)) == 2
    torch.compiler.reset()
    layer = model[0].eval()
    with torch.no_grad():
        cache = layer.new_cache(batch=1, capacity=20)

        def step(x: Tensor, cache: tilewise.nn.KVCache) -> Tensor:
            return layer(x, cache=cache)

        counter = CompileCounter()
        compiled = torch.compile(step, backend=counter, fullgraph=True)
        x = draw(1, 12, WIDTH).to(device)
        steps = [compiled(x[:, i : i + 1], cache) for i in range(12)]
        close(torch.cat(steps, 1), layer(x))
        assert counter.frame_count == 2


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_module_takes_other_lengths(strict: bool, device: str, tmp_path: Path) -> None:
    model = layers(device, window_size=(6, None))
    length = torch.export.Dim("length", min=2, max=512)
    x = draw(2, 9, WIDTH).to(device)
    program = torch.export.export(model, (x,), dynamic_shapes=({1: length},), strict=strict)
    torch.export.save(program, tmp_path / "program.pt2")
    loaded = torch.export.load(tmp_path / "program.pt2").module()
    for n in (2, 9, 70):
        x = draw(2, n, WIDTH).to(device)
        close(loaded(x), model(x))


def test_aot_autograd_keeps_one_operator_and_nothing_quadratic(device: str) -> None:
    graphs: dict[str, torch.fx.GraphModule] = {}

    def keep(name: str) -> Callable[..., Any]:
        def compiler(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            graphs[name] = graph
            return graph.forward

        return compiler

    backend = aot_autograd(fw_compiler=keep("forward"), bw_compiler=keep("backward"))
    x = [t.requires_grad_() for t in on(device, qkv(96, batch=1))]
    out = torch.compile(tilewise.attention, backend=backend, fullgraph=True)(*x, causal=True)
    out.square().sum().backward()
    for name, graph in graphs.items():
        targets = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        assert [t for t in targets if "tilewise" in t] == [f"tilewise.{name}.default"]
    (output,) = (node for node in graphs["forward"].graph.nodes if node.op == "output")
    saved = [node.meta["val"] for node in output.args[0]]
    assert len(saved) == 1 + 3 + 3  # out; q, k, v; out, lse and its rest
    assert max(t.numel() for t in saved) == x[0].numel() < 96 * 96


# ------------------------------------------------------------------ torch.func


def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    return tilewise.attention(q, k, v, causal=True, softcap=3.0, sinks=sinks)


def loss(*x: Tensor) -> Tensor:
    return attend(*x).square().sum()


def tangent(*x: Tensor) -> Any:
    return jvp(attend, x, tuple(torch.ones_like(t) for t in x))


TRANSFORMED: dict[str, Callable[..., Any]] = {
    "grad": grad(loss, (0, 1, 2, 3)),
    "grad of grad": grad(lambda *x: grad(loss)(*x).square().sum(), (0, 1)),
    "vjp": lambda *x: vjp(attend, *x)[1](torch.ones_like(x[0])),
    "jvp": tangent,
    "jvp of grad": lambda *x: jvp(lambda q: grad(loss)(q, *x[1:]), x[:1], x[:1]),
    "hessian": hessian(loss, 3),
    "jacrev": jacrev(attend, 1),
    "jacfwd": jacfwd(attend, 2),
    "vmap": attend,
    "vmap of grad": grad(loss, (0, 1, 2, 3)),
    "vmap of jvp": tangent,
    "grad of vmap": grad(lambda *x: vmap(loss)(*x).sum(), (0, 1, 3)),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_transforms(name: str, device: str) -> None:
    """Eagerly against autograd or differences; inside torch.compile against eager ones."""
    drawn = (draw(3, *shape, dtype=torch.float64, seed=i) for i, shape in enumerate(SHAPES))
    samples = on(device, tuple(drawn))
    call, given = TRANSFORMED[name], tuple(t[0] for t in samples)
    if "vmap" in name:
        given = samples
        call = call if name == "grad of vmap" else vmap(call)
    want = tree_leaves(call(*given))
    expected = EXPECTED[name](*given)
    assert len(want) == len(expected)
    for a, b in zip(want, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    if name in COMPILED:
        got = torch.compile(call, backend="aot_eager", fullgraph=True)(*given)
        for a, b in zip(tree_leaves(got), want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


# One of each nesting of reverse mode, forward mode and batches; each takes seconds.
COMPILED = ("grad", "grad of grad", "jvp", "hessian", "vmap of grad", "grad of vmap")
SHAPES = ((1, 4, 2, 4), (1, 4, 2, 4), (1, 4, 2, 4), (2,))


def plain_grads(
    function: Callable[..., Tensor], argnums: tuple[int, ...], *x: Tensor
) -> list[Tensor]:
    """By autograd, without torch.func."""
    leaves = [t.detach().requires_grad_() for t in x]
    return list(torch.autograd.grad(function(*leaves), [leaves[i] for i in argnums]))


def directional(function: Callable[..., Tensor], x: Any, moves: Any, step: float = 1e-6) -> Tensor:
    ahead = function(*(t + step * m for t, m in zip(x, moves, strict=True)))
    behind = function(*(t - step * m for t, m in zip(x, moves, strict=True)))
    return (ahead - behind) / (2 * step)


def jacobian(function: Callable[..., Tensor], argnum: int, *x: Tensor) -> Tensor:
    """By differences: the output's shape, then the argument's."""
    columns = []
    for unit in torch.eye(x[argnum].numel(), dtype=torch.float64, device=x[argnum].device):
        moves = [torch.zeros_like(t) for t in x]
        moves[argnum] = unit.view_as(x[argnum])
        columns.append(directional(function, x, moves))
    return torch.stack(columns, -1).unflatten(-1, x[argnum].shape)


def first_gradient(argnum: int) -> Callable[..., Tensor]:
    return lambda *x: plain_grads(loss, (argnum,), *x)[0]


def squared_gradient(*x: Tensor) -> Tensor:
    (g,) = torch.autograd.grad(loss(*x), x[0], create_graph=True)
    return g.square().sum()


def each(function: Callable[..., list[Tensor]], *x: Tensor) -> list[Tensor]:
    found = [function(*sample) for sample in zip(*x, strict=True)]
    return [torch.stack(parts) for parts in zip(*found, strict=True)]


def moved(*x: Tensor) -> list[Tensor]:
    return [attend(*x), directional(attend, x, [torch.ones_like(t) for t in x])]


ALL = (0, 1, 2, 3)
EXPECTED: dict[str, Callable[..., list[Tensor]]] = {
    "grad": functools.partial(plain_grads, loss, ALL),
    "grad of grad": functools.partial(plain_grads, squared_gradient, (0, 1)),
    "vjp": functools.partial(plain_grads, lambda *x: attend(*x).sum(), ALL),
    "jvp": moved,
    "jvp of grad": lambda *x: [
        first_gradient(0)(*x),
        directional(lambda q: first_gradient(0)(q, *x[1:]), x[:1], x[:1]),
    ],
    "hessian": lambda *x: [jacobian(first_gradient(3), 3, *x)],
    "jacrev": lambda *x: [jacobian(attend, 1, *x)],
    "jacfwd": lambda *x: [jacobian(attend, 2, *x)],
    "vmap": functools.partial(each, lambda *x: [attend(*x)]),
    "vmap of grad": functools.partial(each, functools.partial(plain_grads, loss, ALL)),
    "vmap of jvp": functools.partial(each, moved),
    "grad of vmap": functools.partial(each, functools.partial(plain_grads, loss, (0, 1, 3))),
}


def test_dual_numbers_pass_through_compiled_code(device: str) -> None:
    """Not only through torch.func: a tangent is never dropped."""
    drawn = (draw(*shape, dtype=torch.float64, seed=i) for i, shape in enumerate(SHAPES))
    x = on(device, tuple(drawn))
    want = directional(attend, x[:1] + x[1:], [x[1], *(torch.zeros_like(t) for t in x[1:])])
    for call in (attend, torch.compile(attend, backend="aot_eager")):
        with forward_ad.dual_level():
            out = call(forward_ad.make_dual(x[0], x[1]), *x[1:])
            torch.testing.assert_close(forward_ad.unpack_dual(out).tangent, want)


# ------------------------------------------------------------------ checkpoints and autocast


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_of_a_module(reentrant: bool, device: str) -> None:
    model, x = layers(device, 2, dropout_p=0.3), draw(2, 11, WIDTH).to(device)

    def checkpointed(x: Tensor) -> Tensor:
        for layer in model:
            x = checkpoint(layer, x, use_reentrant=reentrant)
        return x

    assert_equal(results(model, model, x), results(model, checkpointed, x))


def test_checkpoints_inside_compiled_code(device: str) -> None:
    """Beside eager code, whose numbers compiled code draws on a GPU only when it is told to."""
    torch.compiler.reset()
    model, x = layers(device, dropout_p=0.3), draw(2, 11, WIDTH).to(device)
    checkpointed = functools.partial(checkpoint, model, use_reentrant=False)
    compiled = torch.compile(checkpointed, backend="aot_eager", fullgraph=True)
    want = results(model, model, x)
    with torch._inductor.config.patch(fallback_random=True):
        got = results(model, compiled, x)
    for name, t in got.items():
        close(t, want[name])


def test_compiled_checkpoints_recompute_what_was_dropped(device: str) -> None:
    """Whatever numbers are drawn: out is linear in v, so that ⟨out, w⟩ = ⟨v, dv⟩ where both passes drop the
    same."""
    torch.compiler.reset()
    q, k, v, w = (draw(2, 11, 4, 16, seed=i).to(device) for i in range(4))
    v.requires_grad_()

    def attend(v: Tensor) -> Tensor:
        return tilewise.attention(q, k, v, dropout_p=0.5)

    def checkpointed(v: Tensor) -> Tensor:
        return checkpoint(attend, v, use_reentrant=False)

    compiled = torch.compile(checkpointed, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        out = compiled(v)
        (dv,) = torch.autograd.grad((out * w).sum(), v)
        close((v * dv).sum(), (out * w).sum())


@pytest.mark.parametrize(
    ("low", "compiled"),
    [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, False)],
)
def test_autocast_of_a_module(low: torch.dtype, compiled: bool, device: str) -> None:
    model, x = layers(device), draw(2, 11, WIDTH).to(device)
    call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model

    def cast(x: Tensor) -> Tensor:
        with torch.autocast(device, dtype=low):
            return call(x)

    want, got = results(model, model, x), results(model, cast, x)
    assert got["out"].dtype == low
    for name, t in got.items():
        assert name == "out" or t.dtype == torch.float32
        error = (t.float() - want[name]).norm() / want[name].norm()
        assert 0 < error < 8 * torch.finfo(low).eps, name


# ------------------------------------------------------------------ operators


@pytest.fixture
def served_by(device: str) -> str:
    """The backend that works there."""
    return "triton" if device == "cuda" else "tiled"


def operator_arguments(backend: str, **given: Any) -> list[Any]:
    defaults = {
        "scale": 0.3,
        "dropout_p": 0.0,
        "align": "bottom-right",
        "deterministic": True,
        "backend": backend,
    }
    schema = torch.ops.tilewise.forward.default._schema
    return [{**defaults, **given}.get(a.name) for a in schema.arguments]


MORE_PROBLEMS: dict[str, Callable[[], dict[str, Any]]] = {
    "bfloat16, grouped heads": lambda: draw_qkv(2, 7, 9, (4, 2), 8, 6, torch.bfloat16),
    "float64, alibi of batch and heads": lambda: {
        **draw_qkv(2, 7, 9, (4, 2), 8, 6, torch.float64),
        "alibi_slopes": draw(2, 4, dtype=torch.float64).abs(),
    },
    "float16 with a float32 bias": lambda: {
        **draw_qkv(2, 7, 9, (4, 2), 8, 6, torch.float16),
        "bias": draw(2, 1, 7, 1),
    },
    "no keys, sinks": lambda: {**draw_qkv(2, 3, 0, (4, 2), 8, 6), "sinks": draw(4)},
    "no queries": lambda: draw_qkv(2, 0, 5, (4, 2), 8, 6),
    "packed, everything": lambda: {
        **draw_tokens(7, 9, (4, 2), 8, 6, torch.float32),
        "cu_seqlens_q": torch.tensor([0, 3, 6]),
        "cu_seqlens_k": torch.tensor([0, 4, 9]),
        "bias": draw(4, 7, 5),
        "alibi_slopes": draw(2, 4).abs(),
        "sinks": draw(4),
        "key_start": torch.zeros(1, dtype=torch.int64),
        "key_end": torch.full((7,), 4),
        "window_left": 2,
        "dropout_p": 0.2,
        "dropout_seed": torch.tensor(3),
    },
}


@pytest.mark.parametrize("name", MORE_PROBLEMS)
def test_opcheck_of_more_problems(name: str, device: str, served_by: str) -> None:
    given = on(device, operator_arguments(served_by, **MORE_PROBLEMS[name]()))
    out = torch.ops.tilewise.forward(*given)
    dout = torch.randn_like(out[0])
    backward = [dout, None, *out, "bias alibi_slopes sinks", *given]
    torch.library.opcheck(torch.ops.tilewise.backward.default, backward)
    for t in given[:6]:
        if t is not None:
            t.requires_grad_()
    torch.library.opcheck(torch.ops.tilewise.forward.default, given)


def test_opcheck_of_pages(device: str) -> None:
    pages = draw(5, 4, 2, 8)
    given = operator_arguments(
        "tiled",
        q=draw(2, 3, 4, 8),
        k=pages,
        v=pages,
        page_table=torch.tensor([[4, 0], [1, 3]], dtype=torch.int32),
        seqused_k=torch.tensor([7, 5], dtype=torch.int32),
        window_right=0,
    )
    torch.library.opcheck(torch.ops.tilewise.forward.default, on(device, given))


# ------------------------------------------------------------------ two processes


def train_in_two_processes(rank: int, path: str) -> None:
    """Each takes half of the batch; their mean gradient is that of the whole batch."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    model, x = layers(count=2, window_size=(5, None)), draw(4, 11, WIDTH)
    model(x).square().mean().backward()
    want = {name: p.grad for name, p in model.named_parameters()}
    half = x.chunk(2)[rank]

    replicated = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(model))
    replicated.zero_grad()
    replicated(half).square().mean().backward()
    for name, p in replicated.module.named_parameters():
        torch.testing.assert_close(p.grad, want[name])

    mesh = init_device_mesh("cpu", (2,))
    for policy, tolerance in ((MixedPrecisionPolicy(), 1e-5), (HALF_PRECISION, 0.05)):
        sharded = copy.deepcopy(model)
        sharded.zero_grad()
        for layer in sharded:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(sharded, mesh=mesh, mp_policy=policy)
        sharded(half).float().square().mean().backward()
        for name, p in sharded.named_parameters():
            assert p.to_local().shape[0] == want[name].shape[0] // 2  # it is sharded
            error = (p.grad.full_tensor() - want[name]).norm() / want[name].norm()
            assert error < tolerance, name
    dist.destroy_process_group()


HALF_PRECISION = torch.distributed.fsdp.MixedPrecisionPolicy(
    param_dtype=torch.bfloat16, reduce_dtype=torch.float32
)


def test_ddp_and_fsdp(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(train_in_two_processes, (str(tmp_path / "meet"),), nprocs=2)
