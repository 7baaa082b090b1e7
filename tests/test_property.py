"""Any call within the interface, drawn by hypothesis, is the float64 definition."""

import functools
from typing import Any, NamedTuple

import pytest
import torch
from dense64 import (
    INF,
    attention64,
    check,
    close,
    gathered,
    gradients,
    in_range,
    keep64,
    varlen64,
    visible,
)
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from inputs import set_tiles
from torch import Tensor

import tilewise

torch.set_num_threads(1)

examples = functools.partial(
    settings,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
LENGTHS = st.one_of(st.integers(0, 3), st.integers(4, 40))
SIDES = st.one_of(st.none(), st.integers(0, 3), st.integers(0, 45))


def normal(data: st.DataObject, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**20)))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def uniform(data: st.DataObject, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**20)))
    return torch.rand(shape, generator=generator)


def strided(data: st.DataObject, t: Tensor) -> Tensor:
    """t with other strides: permuted, padded, every second of a wider one."""
    kind = data.draw(st.sampled_from(["as is", "permuted", "slice", "every second"]))
    if kind == "permuted":
        order = data.draw(st.permutations(range(t.ndim)))
        back = sorted(range(t.ndim), key=order.__getitem__)
        return t.permute(order).contiguous().permute(back)
    dim = data.draw(st.integers(0, t.ndim - 1))
    if kind == "slice":
        wide = torch.cat([t.narrow(dim, 0, 0), t, t], dim)
        return wide.narrow(dim, t.shape[dim], t.shape[dim])
    if kind == "every second":
        wide = torch.stack([t, -t], dim + 1).flatten(dim, dim + 1)
        return wide[(slice(None),) * dim + (slice(None, None, 2),)]
    return t


def expanded(data: st.DataObject, t: Tensor) -> Tensor:
    """t, or one of its slices along a dimension standing for all of them (stride 0)."""
    if not data.draw(st.booleans()) or 0 in t.shape:
        return t
    return t.narrow(data.draw(st.integers(0, t.ndim - 1)), 0, 1).expand(t.shape)


def part_of_shape(data: st.DataObject, *full: int) -> list[int]:
    """A shape that broadcasts to `full`."""
    kept = [n if data.draw(st.booleans()) else 1 for n in full]
    ones = next((i for i, n in enumerate(kept) if n != 1), len(kept))
    return kept[data.draw(st.integers(0, ones)) :]


class Sizes(NamedTuple):
    b: int
    sq: int
    sk: int
    hkv: int
    groups: int
    d: int
    dv: int
    dtype: torch.dtype

    @property
    def hq(self) -> int:
        return self.hkv * self.groups


@st.composite
def sizes(draw: st.DrawFn) -> Sizes:
    width = st.integers(1, 17)
    return Sizes(
        draw(st.integers(1, 3)),
        draw(LENGTHS),
        draw(LENGTHS),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 4)),
        draw(width),
        draw(width),
        draw(st.sampled_from(DTYPES)),
    )


def drawn_operands(data: st.DataObject, s: Sizes) -> dict[str, Tensor]:
    shapes = {
        "q": (s.b, s.sq, s.hq, s.d),
        "k": (s.b, s.sk, s.hkv, s.d),
        "v": (s.b, s.sk, s.hkv, s.dv),
    }
    return {
        name: expanded(data, strided(data, normal(data, *shape, dtype=s.dtype)))
        for name, shape in shapes.items()
    }


def drawn_band(data: st.DataObject) -> dict[str, Any]:
    return {
        "causal": data.draw(st.booleans()),
        "align": data.draw(st.sampled_from(["bottom-right", "top-left"])),
        "window_size": data.draw(st.tuples(SIDES, SIDES)),
    }


def drawn_options(
    data: st.DataObject, s: Sizes, rows: tuple[int, ...], grid: tuple[int, ...], batch: int
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What may be given besides: floating tensors, and the rest."""
    own = st.sampled_from([torch.float32, s.dtype])
    leaves: dict[str, Tensor] = {}
    options = drawn_band(data)
    if data.draw(st.booleans()):
        bounds = []
        for _ in range(2):
            dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
            bounds.append((uniform(data, *part_of_shape(data, *rows)) * (s.sk + 6) - 3).to(dtype))
        options["key_range"] = (bounds[0] // 2, bounds[1])
    if data.draw(st.booleans()):
        options["mask"] = uniform(data, *part_of_shape(data, *grid)) < 0.7
    if data.draw(st.booleans()):
        shape = part_of_shape(data, *grid)
        bias = normal(data, *shape, dtype=data.draw(own))
        hidden = data.draw(st.sampled_from([0.0, 0.3]))
        bias = bias.masked_fill(uniform(data, *shape) < hidden, -INF)
        leaves["bias"] = strided(data, bias) if shape else bias
    if data.draw(st.booleans()):
        shape = [(s.hq,), (batch, s.hq)][data.draw(st.integers(0, 1))]
        leaves["alibi_slopes"] = normal(data, *shape, dtype=data.draw(own)) * 0.1
    if data.draw(st.booleans()):
        leaves["sinks"] = normal(data, s.hq, dtype=data.draw(own))
    options["softcap"] = data.draw(st.sampled_from([None, None, 0.5, 4.0]))
    options["scale"] = data.draw(st.sampled_from([None, None, 0.0, -0.3, 0.8]))
    return leaves, options


def check_small(data: st.DataObject, *arguments: Any, **options: Any) -> None:
    """`check` in tiles so small that there are many."""
    rows, keys = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 24))
    with pytest.MonkeyPatch.context() as patch:
        set_tiles(patch, rows, keys)
        check(*arguments, factor=2, seed=3, **options)


tiled = functools.partial(tilewise.attention, return_lse=True, backend="tiled")
reference = functools.partial(tilewise.attention, return_lse=True, backend="reference")


@examples(max_examples=60)
@given(st.data(), sizes())
def test_tiled_is_the_definition(data, s):
    leaves = drawn_operands(data, s)
    grid = (s.b, s.hq, s.sq, s.sk)
    more, options = drawn_options(data, s, (s.b, s.sq), grid, s.b)
    check_small(data, tiled, attention64, leaves | more, **options)


@examples(max_examples=40)
@given(st.data(), sizes())
def test_the_reference_is_the_definition(data, s):
    leaves = drawn_operands(data, s)
    grid = (s.b, s.hq, s.sq, s.sk)
    more, options = drawn_options(data, s, (s.b, s.sq), grid, s.b)
    check(reference, attention64, leaves | more, factor=2, **options)


@examples(max_examples=60)
@given(
    st.data(),
    sizes(),
    st.lists(st.tuples(st.integers(0, 17), st.integers(0, 17)), min_size=1, max_size=5),
    st.integers(0, 3),
)
def test_packed_is_the_definition(data, s, lengths, rest):
    cu_q, cu_k = ([0], [0])
    for n, m in lengths:
        cu_q.append(cu_q[-1] + n)
        cu_k.append(cu_k[-1] + m)
    total_q, total_k = cu_q[-1] + rest, cu_k[-1] + data.draw(st.integers(0, 3))
    longest = max(m for _, m in lengths)
    one = s._replace(b=1, sq=total_q, sk=total_k)
    leaves = {name: strided(data, t[0]) for name, t in drawn_operands(data, one).items()}
    grid = (s.hq, total_q, longest + data.draw(st.integers(0, 2)))
    more, options = drawn_options(data, one._replace(sk=longest), (total_q,), grid, len(lengths))
    dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
    cu = {
        "cu_seqlens_q": torch.tensor(cu_q, dtype=dtype),
        "cu_seqlens_k": torch.tensor(cu_k, dtype=dtype),
        "max_seqlen_k": data.draw(st.one_of(st.none(), st.integers(0, 50))),
    }
    check_small(
        data,
        functools.partial(tilewise.attention_varlen, return_lse=True, backend="tiled"),
        functools.partial(varlen64, cu_q=cu_q, cu_k=cu_k),
        leaves | more,
        our_options=cu,
        **options,
    )


@examples(max_examples=60)
@given(st.data(), sizes(), st.integers(1, 6), st.integers(1, 5))
def test_pages_are_the_definition(data, s, page_size, pages):
    room = page_size * pages
    used = [data.draw(st.integers(0, room)) for _ in range(s.b)]
    count = s.b * pages + 2
    leaves = drawn_operands(data, s)
    k = strided(data, normal(data, count, page_size, s.hkv, s.d, dtype=s.dtype))
    v = strided(data, normal(data, count, page_size, s.hkv, s.dv, dtype=s.dtype))
    table = torch.argsort(uniform(data, count))[: s.b * pages].reshape(s.b, pages)
    grid = (s.b, s.hq, s.sq, room)
    more, options = drawn_options(data, s._replace(sk=room), (s.b, s.sq), grid, s.b)
    with pytest.MonkeyPatch.context() as patch:
        set_tiles(patch, data.draw(st.integers(1, 12)), data.draw(st.integers(1, 24)))
        out, lse = tilewise.attention_paged(
            leaves["q"],
            k,
            v,
            table,
            torch.tensor(used),
            return_lse=True,
            backend=data.draw(st.sampled_from(["tiled", "reference"])),
            num_splits=data.draw(st.one_of(st.none(), st.integers(1, 4))),
            **more,
            **options,
        )
    for b, n in enumerate(used):
        own = dict(options)
        if "key_range" in own:
            own["key_range"] = tuple(t.expand(s.b, s.sq)[b : b + 1] for t in options["key_range"])
        for name in ("mask", "bias"):
            t = options.get(name, more.get(name))
            if t is not None:
                own[name] = t.expand(grid)[b : b + 1, ..., :n]
        if "alibi_slopes" in more:
            own["alibi_slopes"] = more["alibi_slopes"].expand(s.b, s.hq)[b : b + 1]
        own["sinks"] = more.get("sinks")
        keys, values = (gathered(t, table[b].tolist(), n) for t in (k, v))
        want, want_lse = attention64(leaves["q"][b : b + 1], keys, values, **own)
        close(out[b : b + 1], want, s.dtype, 2)
        close(lse[b : b + 1], want_lse, max(s.dtype, torch.float32, key=lambda t: t.itemsize))


@examples(max_examples=40)
@given(st.data(), sizes(), st.floats(0.05, 0.9), st.integers(-(2**63), 2**63 - 1))
def test_dropout_is_the_definition(data, s, p, seed):
    s = s._replace(sq=min(s.sq, 12), sk=min(s.sk, 14), groups=min(s.groups, 2))
    keep = keep64(p, seed, s.b, s.hq, s.sq, s.sk)
    check_small(
        data,
        functools.partial(tiled, dropout_p=p, dropout_seed=seed),
        functools.partial(attention64, keep=keep),
        drawn_operands(data, s),
        **drawn_band(data),
    )


@examples(max_examples=60)
@given(st.data(), sizes(), st.sampled_from([float("nan"), INF, -INF]))
def test_what_nothing_sees_does_not_matter(data, s, value):
    leaves = {name: t.clone() for name, t in drawn_operands(data, s).items()}
    band = drawn_band(data)
    start = (uniform(data, s.b, s.sq) * s.sk).int()
    end = (uniform(data, s.b, s.sq) * (s.sk + 4)).int()
    mask = (uniform(data, s.b, 1, 1, s.sk) < 0.7) & (uniform(data, s.b, 1, s.sq, 1) < 0.8)
    seen = visible(s.sq, s.sk, **band) & in_range(start, end, s.b, s.sq, s.sk) & mask
    options = {**band, "key_range": (start, end), "mask": mask}
    if data.draw(st.booleans()):
        options |= {"bias": torch.zeros(s.b, 1, s.sq, s.sk).masked_fill(~mask, -INF), "mask": None}
    hidden, idle = ~seen[:, 0].any(1), ~seen[:, 0].any(2)
    assume(bool(hidden.any()) or bool(idle.any()))
    dout, dlse = normal(data, s.b, s.sq, s.hq, s.dv), normal(data, s.b, s.hq, s.sq)
    backend = data.draw(st.sampled_from([tiled, reference]))
    with pytest.MonkeyPatch.context() as patch:
        set_tiles(patch, data.draw(st.integers(1, 12)), data.draw(st.integers(1, 24)))
        want = gradients(backend, leaves, dout, dlse, **options)
        leaves["k"][hidden] = leaves["v"][hidden] = value
        leaves["q"][idle] = value
        got = gradients(backend, leaves, dout, dlse, **options)
    close(got[0], want[0], s.dtype, 2)
    close(got[1], want[1])
    for name in leaves:
        close(got[2][name], want[2][name], s.dtype, 4)
    assert (got[2]["k"][hidden] == 0).all()
    assert (got[2]["v"][hidden] == 0).all()
    assert (got[2]["q"][idle] == 0).all()


@examples(max_examples=40)
@given(st.data(), sizes())
def test_parts_merge_into_the_whole(data, s):
    leaves = drawn_operands(data, s)
    cuts = sorted(data.draw(st.lists(st.integers(0, s.sk), max_size=3)))
    band = drawn_band(data)
    seen = visible(s.sq, s.sk, **band)

    def merged(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        total = None
        for j0, j1 in zip([0, *cuts], [*cuts, s.sk], strict=True):
            part = tiled(q, k[:, j0:j1], v[:, j0:j1], mask=seen[:, j0:j1])
            total = part if total is None else tilewise.merge(*total, *part)
        return total

    theirs = functools.partial(attention64, **band)
    check_small(data, merged, theirs, leaves)


@examples(max_examples=25)
@given(st.data(), sizes())
def test_second_derivatives_are_the_definition(data, s):
    s = s._replace(b=min(s.b, 2), sq=min(s.sq, 9), sk=min(s.sk, 9), d=min(s.d, 4), dv=min(s.dv, 4))
    s = s._replace(dtype=torch.float64)
    leaves = drawn_operands(data, s)
    more, options = drawn_options(data, s, (s.b, s.sq), (s.b, s.hq, s.sq, s.sk), s.b)
    leaves |= more
    moves = [normal(data, *t.shape) for t in leaves.values()]
    dout, dlse = normal(data, s.b, s.sq, s.hq, s.dv), normal(data, s.b, s.hq, s.sq)

    def second(function: Any) -> list[Tensor]:
        x = [t.detach().requires_grad_() for t in leaves.values()]
        out, lse = function(**dict(zip(leaves, x, strict=True)), **options)
        loss = (out * dout).sum() + (lse.masked_fill(lse == -INF, 0.0) * dlse).sum()
        first = torch.autograd.grad(loss, x, create_graph=True, materialize_grads=True)
        finite = [torch.where(t.isfinite(), g, 0.0) for t, g in zip(x, first, strict=True)]
        total = sum((g * m).sum() for g, m in zip(finite, moves, strict=True))
        grads = torch.autograd.grad(total, x, materialize_grads=True)
        return [*first, *grads]

    def forward_mode(function: Any) -> list[Tensor]:
        out, tangents = torch.func.jvp(
            lambda *x: function(**dict(zip(leaves, x, strict=True)), **options),
            tuple(t.clone() for t in leaves.values()),  # torch wants no strides of 0 here
            tuple(moves),
        )
        return [tangents[0], torch.where(out[1] == -INF, 0.0, tangents[1])]

    for derivative in (second, forward_mode):
        for ours, theirs in zip(derivative(tiled), derivative(attention64), strict=True):
            close(ours, theirs, factor=100)
