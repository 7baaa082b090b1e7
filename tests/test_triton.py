"""The Triton backend in Triton's interpreter: every case, and what hides in a kernel's corners."""

from __future__ import annotations

import itertools
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from inputs import cumulative, draw, draw_qkv, draw_tokens
from interpreter import interpreted, tiles
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import tilewise
from tilewise import ops
from tilewise.arguments import problem_of
from tilewise.backends import triton as backend
from tilewise.kernels import twins
from tilewise.testing import (
    CASES,
    Call,
    Case,
    evaluate,
    expect,
    judge,
    make_call,
    mask_probe,
    ramp_call,
    steep_calls,
)
from tilewise.tuning.search import poisoned

SERVED = [case for case in CASES if case.layout != "paged"]
FP32, FP16 = torch.float32, torch.float16

pytestmark = [
    pytest.mark.filterwarnings(f"ignore::{kind}:triton")
    for kind in ("DeprecationWarning", "RuntimeWarning")
]


@pytest.fixture(scope="module", autouse=True)
def _interpreted() -> Iterator[None]:
    with interpreted():
        yield


def right(call: Call, dtype: torch.dtype) -> None:
    """Every result passes, computed in new memory that is full of NaN."""
    with poisoned():
        results = evaluate(call, "triton")
    gold, peer = expect(call)
    verdicts = [judge(name, t, gold[name], peer[name], dtype) for name, t in results.items()]
    assert all(v.passed for v in verdicts), [str(v) for v in verdicts if not v.passed]


def same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name in got:
        assert torch.equal(got[name], want[name]), name


# ------------------------------------------------------------------ cases


@pytest.mark.parametrize("case", SERVED, ids=str)
def test_case(case: Case) -> None:
    with tiles(128, 128):
        right(make_call(case, FP32), FP32)


@pytest.mark.parametrize("case", SERVED[::3], ids=str)
def test_case_in_half_precision(case: Case) -> None:
    with tiles(64, 128):
        right(make_call(case, FP16), FP16)


@pytest.mark.parametrize("name", ["plain", "everything"])
def test_case_in_double_precision(name: str) -> None:
    (case,) = (case for case in CASES if case.name == name)
    with tiles(128, 128):
        right(make_call(case, torch.float64), torch.float64)


MANY_TILES = [
    case._replace(
        batch=1,
        sq=min(case.sq, 40),
        sk=min(case.sk, 70),
        heads=2,
        kv_heads=1,
        head_dim=16,
        value_dim=16,
        lengths=((5, 9), (0, 7), (18, 40), (3, 0), (1, 1), (20, 5)) if case.lengths else (),
    )
    for case in SERVED
    if "window" in case.name
    or case.name
    in (
        "causal",
        "causal, top-left",
        "documents",
        "padding",
        "padding, causal",
        "mask of queries and keys",
        "bias of queries",
        "dropout, causal",
        "packed, causal",
        "packed, bias",
    )
]


@pytest.mark.parametrize("case", MANY_TILES, ids=str)
def test_many_small_tiles(case: Case) -> None:
    with tiles(16, 32):
        right(make_call(case, FP32), FP32)


@pytest.mark.parametrize("case", [c for c in MANY_TILES if c.layout == "dense"], ids=str)
def test_lengths_of_whole_tiles(case: Case) -> None:
    """No tile reaches past the end of a sequence: what has edges then has them from its options alone."""
    with tiles(16, 32):
        right(make_call(case._replace(sq=48, sk=64), FP32), FP32)


@pytest.mark.parametrize(("sq", "sk"), [(7, 19), (65, 130), (90, 50)])
@pytest.mark.parametrize("align", ["bottom-right", "top-left"])
@pytest.mark.parametrize("window", [(None, 0), (3, 0), (5, 2), (40, None)])
def test_mask_probe(window: tuple[int | None, int | None], align: str, sq: int, sk: int) -> None:
    with tiles(32, 16):
        got, counts = mask_probe(sq, sk, backend="triton", window_size=window, align=align)
    assert torch.equal(got.round(), counts)
    assert (got - counts).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [FP32, FP16])
def test_ramp(dtype: torch.dtype) -> None:
    with tiles(32, 16):
        right(ramp_call(33, 150, dtype), dtype)


STEEP = steep_calls(40, 90)


@pytest.mark.parametrize("name", STEEP)
def test_gradients_do_not_see_how_lse_is_rounded(name: str) -> None:
    with tiles(16, 32):
        right(STEEP[name], FP32)


@pytest.mark.parametrize(("layout", "end"), [("dense", 70), ("packed", 48)])
def test_nor_where_a_hidden_nan_has_tiles_computed_again(layout: str, end: int) -> None:
    function, given = STEEP[f"steep, {layout}, plain"]
    ends = torch.full((1,) if layout == "packed" else (1, 1), end)
    given = {**given, "key_range": (torch.zeros_like(ends), ends)}
    for name in ("k", "v"):
        given[name] = given[name].index_fill(-3, torch.tensor(70), float("nan"))
    with tiles(16, 32):
        right(Call(function, given), FP32)


@pytest.mark.parametrize("dtype", [FP16, FP32, torch.float64], ids=str)
@pytest.mark.parametrize("layout", ["dense", "packed"])
def test_fakes_are_laid_out_like_results(layout: str, dtype: torch.dtype) -> None:
    problem = STEEP[f"steep, {layout}, sinks"].problem(lambda t: t.to(dtype))
    given = ops._flatten(problem, "triton")
    real = torch.ops.tilewise.forward(*given)
    with FakeTensorMode() as mode:
        given = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in given]
        fake = torch.ops.tilewise.forward(*given)
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


def test_chosen_where_it_serves() -> None:
    q = draw(1, 5, 2, 8)
    assert tilewise.explain(q, q, q).backend == "triton"
    wide = draw(1, 1, 1, 513)
    with pytest.raises(ValueError, match="head dims go up to 512, got 513"):
        tilewise.attention(wide, wide, wide, backend="triton")
    low = q.bfloat16()
    with pytest.raises(ValueError, match="interpreter computes bfloat16 wrongly"):
        tilewise.attention(low, low, low, backend="triton")
    with pytest.raises(ValueError, match="pages are not served"):
        evaluate(make_call(next(case for case in CASES if case.layout == "paged")), "triton")


# ------------------------------------------------------------------ what a tile sees


ROWS = 16
LENGTHS = range(10)
SIDES = (0, 1, 2, 4, 20)


@pytest.mark.parametrize("ranges", [False, True], ids=["band", "key_range"])
@pytest.mark.parametrize("align", ["bottom-right", "top-left"])
@pytest.mark.parametrize("right", [False, True], ids=["", "right"])
@pytest.mark.parametrize("left", [False, True], ids=["", "left"])
def test_what_a_tile_sees_as_the_specification_has_it(
    left: bool, right: bool, align: str, ranges: bool
) -> None:
    """Every small problem, every tile of two rows or keys."""
    from bounds_probe import probe

    sizes = [(sq, sk) for sq, sk in itertools.product(LENGTHS, LENGTHS) if sq]
    sides = itertools.product(SIDES if left else (0,), SIDES if right else (0,))
    listed = [
        (sq, sk, a, b, i0, i1)
        for (sq, sk), (a, b) in itertools.product(sizes, sides)
        for i0, i1 in ((0, min(3, sq)), (sq // 2, sq), (sq - 1, sq))
    ]
    problems = torch.tensor(listed, dtype=torch.int32)
    count, width = len(listed), 1 << (len(listed) - 1).bit_length()
    start = torch.randint(-2, 8, (count, ROWS))
    end = (start + torch.randint(-3, 9, (count, ROWS))).int()
    out = torch.full((2 * ROWS + 12, width), -7, dtype=torch.int32)
    padded = torch.nn.functional.pad(problems.T, (0, width - count)).contiguous()
    spaced = [torch.nn.functional.pad(t, (0, 0, 0, width - count)) for t in (start, end)]
    given = spaced if ranges else (None, None)
    probe[(1,)](padded, *given, out, width, ROWS, left, right, align == "bottom-right")
    columns = out[:, :count].T.tolist()
    for (sq, sk, a, b, i0, i1), got, lo, hi in zip(listed, columns, start, end, strict=True):
        window = (a if left else None, b if right else None)
        q, k = torch.empty(1, sq, 1, 1), torch.empty(1, sk, 1, 1)
        options: dict[str, Any] = {"window_size": window, "align": align}
        if ranges:
            options["key_range"] = (lo[None, :sq], hi[None, :sq])
        problem = problem_of(q, k, k, **options)
        wanted = list(map(range, *(t[0].tolist() for t in problem.interval(0, sq))))
        assert list(map(range, got[:sq], got[ROWS : ROWS + sq])) == wanted  # empty ones are equal
        assert got[2 * ROWS : 2 * ROWS + 4] == list(problem.bounds(i0, i1))
        j1 = min(i1, sk)
        if i0 < j1 and not ranges:
            seen = [range(max(keys.start, i0), min(keys.stop, j1)) for keys in wanted]
            check_rows_of_keys(got[2 * ROWS + 4 : 2 * ROWS + 8], seen, j1 - i0, i1 <= sk)
        check_walks(got[2 * ROWS + 8 :], problem.bounds(i0, i1))


def check_rows_of_keys(got: list[int], seen: list[range], width: int, inside: bool) -> None:
    """`seen`: by row, what it sees of a tile of keys; the bounds are as tight as can be."""
    first, full_first, full_last, last = got
    some = [i for i, keys in enumerate(seen) if keys]
    every = [i for i, keys in enumerate(seen) if len(keys) == width]
    if inside:
        assert some == list(range(first, last))
        assert every == list(range(full_first, full_last))


def check_walks(got: list[int], bounds: Any, block: int = 2) -> None:
    """Walks in steps of 2: each step once, and in full where every row sees both of its keys."""
    first, full_first, full_last, last = got
    full = list(range(full_first, full_last, block))
    steps = [*range(first, full_first, block), *full, *range(full_last, last, block)]
    assert steps == list(range(bounds.first // block * block, bounds.last, block))
    whole = range(bounds.full_first, bounds.full_last)
    assert full == [j for j in steps if j in whole and j + block - 1 in whole]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each tensor that tiles are read of, whether that is by a descriptor."""
    found: list[bool] = []
    make = backend._tma

    def recorded(t: Tensor, block: int) -> Any:
        found.append((tma := make(t, block)) is not None)
        return tma

    monkeypatch.setattr(backend, "_tma", recorded)
    return found


@pytest.mark.parametrize(("rows", "head_dim"), [(40, 32), (40, 80), (41, 32)])
def test_descriptors_change_nothing(
    monkeypatch: pytest.MonkeyPatch, made: list[bool], rows: int, head_dim: int
) -> None:
    """Nor where lines of lse have none, whose lengths are no multiple of 16 bytes."""
    case = Case("", batch=1, sq=rows, sk=70, heads=2, kv_heads=1, head_dim=head_dim)
    for options in ({}, {"causal": True}, {"window_size": (45, 40)}):
        call = make_call(case._replace(options=lambda make, options=options: options), FP32)
        with tiles(32, 32):
            monkeypatch.setattr(backend, "_SHORTEST_TMA", 512)
            without = evaluate(call, "triton")
            assert not any(made)
            monkeypatch.setattr(backend, "_SHORTEST_TMA", 33)
            same(evaluate(call, "triton"), without)
        assert sum(made) == 6  # k and v forward, k and v, q and dout backward
        made.clear()


def test_lines_that_copies_may_not_begin_at_have_no_descriptor() -> None:
    """In shared memory one stage follows the other, and copies begin at multiples of 128 bytes."""
    q, line = torch.empty(1, 600, 1, 16), torch.empty(1, 1, 600)
    cu = cumulative([600])
    dense = problem_of(q, q, q)
    packed = problem_of(q[0], q[0], q[0], cu_seqlens_q=cu, cu_seqlens_k=cu)
    for problem, given in ((dense, line), (packed, line[0])):
        assert [backend._line_tmas(problem, n, given, None) for n in (8, 16)] == [(None, None)] * 2
        assert all(backend._line_tmas(problem, n, given)[0] is not None for n in (32, 64))


@pytest.mark.parametrize("dtype", [FP16, FP32], ids=str)
def test_lines_of_packed_rows_begin_with_a_tile(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """In memory copies begin at multiples of 16 bytes, and packed sequences anywhere: of lines that are laid
    out as the rows are, there is no descriptor."""
    monkeypatch.setattr(backend, "_SHORTEST_TMA", 33)
    shapes: list[Any] = []
    make = backend._line_tmas

    def recorded(problem: Any, block: int, *lines: Tensor | None) -> tuple[Any, ...]:
        shapes.extend(None if t is None else t.shape for t in lines)
        return make(problem, block, *lines)

    monkeypatch.setattr(backend, "_line_tmas", recorded)
    call = ragged_call("causal", dtype)
    with tiles(64, 64):
        right(call, dtype)
    tiled = (2, 64 * (-(-call.arguments["q"].shape[0] // 64) + len(RAGGED) + 1))
    assert shapes == [tiled, tiled, None]  # the last is what float32 rounds off


# ------------------------------------------------------------------ what is hidden, what is written


def hidden_calls() -> dict[str, tuple[dict[str, Any], slice]]:
    """Options of a call of 40 rows and 90 keys, and the keys that they hide from every row."""
    keys = torch.arange(90)
    gap = slice(33, 71)
    in_gap = (keys >= 33) & (keys < 71)
    ends = torch.full((1, 1), 50)
    return {
        "key_range": ({"key_range": (torch.zeros_like(ends), ends)}, slice(50, 90)),
        "key_range from": ({"key_range": (ends, torch.full((1, 1), 90))}, slice(0, 50)),
        "mask": ({"mask": ~in_gap}, gap),
        "mask of pairs": ({"mask": ~in_gap & (draw(40, 90) > 0)}, gap),
        "bias": ({"bias": draw(90).masked_fill(in_gap, float("-inf"))}, gap),
        "bias of pairs": ({"bias": draw(2, 40, 90).masked_fill(in_gap, float("-inf"))}, gap),
        "window": ({"window_size": (3, 0)}, slice(0, 47)),
        "window, top-left": ({"window_size": (None, 2), "align": "top-left"}, slice(42, 90)),
    }


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("how", hidden_calls())
def test_what_no_row_sees_reaches_nothing(how: str, value: float) -> None:
    options, hidden = hidden_calls()[how]
    x = draw_qkv(1, 40, 90, (2, 1))
    results = []
    for filling in (0.0, value):
        for name in ("k", "v"):
            x[name][:, hidden] = filling
        with tiles(16, 32):
            results.append(evaluate(Call(tilewise.attention, {**x, **options}), "triton"))
    same(results[1], results[0])
    assert all(t.isfinite().all() for t in results[1].values())
    assert results[1]["dk"][:, hidden].count_nonzero() == 0
    assert results[1]["dv"][:, hidden].count_nonzero() == 0


def test_rows_that_see_nothing_may_be_nan() -> None:
    x = draw_qkv(1, 50, 30, (2, 1))
    x["q"][:, :20] = float("nan")
    with tiles(16, 16):
        results = evaluate(Call(tilewise.attention, {**x, "causal": True}), "triton")
    lse = results.pop("lse")
    assert (lse[..., :20] == float("-inf")).all()
    assert all(t.isfinite().all() for t in (lse[..., 20:], *results.values()))
    assert results["out"][:, :20].count_nonzero() == results["dq"][:, :20].count_nonzero() == 0


def test_tokens_of_no_sequence_may_be_nan() -> None:
    lengths = [9, 0, 20]
    x = draw_tokens(40, 40, (2, 1), 16, 16, FP32)
    for t in x.values():
        t[29:] = float("nan")
    cu = cumulative(lengths)
    call = Call(tilewise.attention_varlen, {**x, "cu_seqlens_q": cu, "cu_seqlens_k": cu})
    with tiles(16, 16), poisoned():
        results = evaluate(call, "triton")
    assert (results["lse"][:, 29:] == float("-inf")).all()
    for name in ("out", "dq", "dk", "dv"):
        assert results[name].isfinite().all(), name
        assert results[name][29:].count_nonzero() == 0, name


def test_nan_that_is_seen_is_told() -> None:
    x = draw_qkv(1, 20, 20)
    x["v"][:, 5] = float("nan")
    with tiles(16, 16):
        out = tilewise.attention(**x, causal=True, backend="triton")
    assert out[:, 5:].isnan().all()


@pytest.mark.parametrize("steps", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(
    ("options", "settled"),
    [({}, False), ({"alibi_slopes": torch.ones(2)}, False), ({}, True)],
    ids=["plain", "alibi", "settled"],
)
def test_a_graph_lives_no_longer_than_its_outputs(
    options: dict[str, Any], settled: bool, steps: bool
) -> None:
    """What all calls share must not become part of one's graph. Where tiles are chosen, none is settled."""
    given = [draw(1, 20, 2, 16, seed=i).requires_grad_() for i in range(3)]
    with nullcontext() if settled else tiles(32, 32):
        out = tilewise.attention(*given, **options, backend="triton")
        if steps:
            out.sum().backward()
    alive = [weakref.ref(t) for t in given]
    del given, out
    assert [ref() for ref in alive] == [None] * 3


# ------------------------------------------------------------------ dropout


def dropped(call: Callable[..., Tensor], **options: Any) -> Tensor:
    """Which of 32 keys are dropped: with equal logits and one-hot values they show in the output."""
    heads, keys = 4, 32
    q = torch.zeros(2, 40, heads, 16)
    k, v = torch.zeros(2, keys, heads, 16), torch.eye(keys).view(1, keys, 1, keys)
    return call(q=q, k=k, v=v.expand(2, keys, heads, keys), dropout_p=0.4, **options) == 0


def of_packed(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    cu_q, cu_k = (cumulative([t.shape[1]] * len(t)) for t in (q, k))
    out = tilewise.attention_varlen(
        *(t.flatten(0, 1) for t in (q, k, v)), cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **options
    )
    return out.view(len(q), -1, *out.shape[1:])


@pytest.mark.parametrize("seed", [0, -1, 2**40 + 3])
@pytest.mark.parametrize("call", [tilewise.attention, of_packed])
def test_dropout_drops_what_it_drops_on_a_cpu(call: Callable[..., Tensor], seed: int) -> None:
    want = dropped(tilewise.attention, dropout_seed=seed, backend="reference")
    with tiles(32, 16):
        assert torch.equal(dropped(call, dropout_seed=seed, backend="triton"), want)
    assert 0.3 < want.double().mean() < 0.5


@pytest.mark.parametrize("p", [1e-12, 1.0])
def test_dropout_of_nothing_and_of_all(p: float) -> None:
    x = draw_qkv(1, 20, 20)
    with tiles(32, 32):
        out = tilewise.attention(**x, dropout_p=p, dropout_seed=0, backend="triton")
        plain = tilewise.attention(**x, backend="triton")
    assert torch.equal(out, plain if p < 0.5 else torch.zeros_like(plain))


# ------------------------------------------------------------------ packed sequences


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("keys", [False, True])
def test_tiles_of_any_lengths_lie_inside(keys: bool, dtype: torch.dtype) -> None:
    """Lengths on a GPU cannot be refused: whatever they are, nothing is read or written outside."""
    from bounds_probe import places

    dice, block = random.Random(0), 8
    for _ in range(60):
        total, count = dice.choice((1, 17, 64)), dice.choice((0, 1, 2, 5))
        ends = (0, 3, 20, total, total + 9, -5, -99, -(2**31), 2**31 - 1)
        cu = [torch.tensor(dice.choices(ends, k=count + 1), dtype=dtype) for _ in range(2)]
        tiles = -(-total // block) + count + 1
        out = torch.full((2, tiles), -1, dtype=torch.int64)
        places[(tiles,)](*cu, count, total, total, out, tiles, keys, block)
        first, end = out
        assert (first >= 0).all(), cu
        assert ((end >= 0) & (end <= total)).all(), cu


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 7], [5, 0, 20, 0], [1] * 9])
def test_sequences(lengths: list[int], dtype: torch.dtype) -> None:
    x = draw_tokens(27, 27, (2, 1), 16, 16, FP32)
    cu = cumulative(lengths, dtype)
    options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "causal": True}
    with tiles(16, 16):
        right(Call(tilewise.attention_varlen, {**x, **options}), FP32)


def test_more_sequences_than_are_looked_up_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise.kernels.score import constexpr

    pack = twins._packed
    monkeypatch.setattr(twins, "_packed", lambda *cu: pack(*cu)._replace(SEARCH=constexpr(16)))
    cu_q, cu_k = cumulative([1, 2, 0] * 7), cumulative([2, 0, 1] * 7)
    x = draw_tokens(21, 21, (1, 1), 16, 16, FP32)
    with tiles(16, 16):
        call = Call(tilewise.attention_varlen, {**x, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k})
        right(call, FP32)


RAGGED = (1, 37, 0, 64, 65, 190, 0, 0, 40)
PACKED_OPTIONS: dict[str, Callable[[int], dict[str, Any]]] = {
    "full": lambda rows: {},
    "causal": lambda rows: {"causal": True},
    "window": lambda rows: {"window_size": (70, 5), "align": "top-left"},
    "mask": lambda rows: {"mask": draw(1, rows, 190) > -1.5, "causal": True},
    "bias": lambda rows: {"bias": draw(2, rows, 190)},
    "bias of keys": lambda rows: {"bias": draw(1, 1, 190)},
    "scores": lambda rows: {
        "alibi_slopes": draw(len(RAGGED), 2).abs(),
        "sinks": draw(2),
        "softcap": 2.0,
        "dropout_p": 0.2,
        "dropout_seed": 3,
    },
    "all dropped": lambda rows: {"dropout_p": 1.0, "dropout_seed": 3},
}


def ragged_call(how: str, dtype: torch.dtype, q_lengths: tuple[int, ...] = RAGGED) -> Call:
    """Sequences of those lengths, their keys of RAGGED's, and five tokens that belong to none."""
    rows, keys = sum(q_lengths) + 5, sum(RAGGED) + 5
    x = draw_tokens(rows, keys, (2, 1), 32, 16, dtype)
    cu = {"cu_seqlens_q": cumulative([*q_lengths]), "cu_seqlens_k": cumulative([*RAGGED])}
    options = {
        name: t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t
        for name, t in PACKED_OPTIONS[how](rows).items()
    }
    return Call(tilewise.attention_varlen, {**x, **cu, **options})


@pytest.mark.parametrize("how", PACKED_OPTIONS)
def test_descriptors_of_packed_tokens(
    monkeypatch: pytest.MonkeyPatch, made: list[bool], how: str
) -> None:
    """Tiles at the end of a sequence then hold rows of the next one, and nothing of that is seen."""
    call = ragged_call(how, FP32)
    with tiles(64, 64):
        without = evaluate(call, "triton")
        assert not any(made)
        monkeypatch.setattr(backend, "_SHORTEST_TMA", 33)
        same(evaluate(call, "triton"), without)
        assert sum(made) == 6
        right(call, FP32)


@pytest.mark.parametrize(
    ("how", "dtype"), [*((how, FP32) for how in PACKED_OPTIONS), ("full", FP16), ("scores", FP16)]
)
def test_nothing_of_another_sequence_reaches_one(
    monkeypatch: pytest.MonkeyPatch, made: list[bool], how: str, dtype: torch.dtype
) -> None:
    """Of every second sequence, and of what belongs to none, everything is NaN or infinite."""
    monkeypatch.setattr(backend, "_SHORTEST_TMA", 33)
    problem = ragged_call(how, dtype, (37, 64, 3, 1, 65, 100, 0, 7, 40)).problem()
    of_q, of_k = (
        sequence_of(cu, t.shape[0])
        for cu, t in zip(problem.packed[:2], (problem.q, problem.k), strict=True)
    )
    rows = of_q.shape[0]
    dout, dlse = draw(rows, 2, 16, dtype=dtype, seed=7), draw(rows, 2, seed=8)

    def computed(clean: Callable[[Tensor], Tensor], value: float) -> dict[str, Tensor]:
        """Everything of the sequences that are not clean has that value."""
        given = [
            (problem.q, of_q),
            (dout, of_q),
            (dlse, of_q),
            (problem.k, of_k),
            (problem.v, of_k),
        ]
        q, of_out, of_lse, k, v = (
            t.where(clean(sequences).view(-1, *[1] * (t.ndim - 1)), value) for t, sequences in given
        )
        mine = problem._replace(q=q, k=k, v=v)
        with tiles(64, 64), poisoned():
            result = backend.forward(mine)
            g = backend.backward(mine, result, of_out, of_lse.T)
        return {"out": result.out, "lse": result.lse.T, "dq": g.q, "dk": g.k, "dv": g.v}

    want = computed(lambda sequences: sequences >= 0, 0.0)
    for value, odd in ((float("nan"), 0), (float("inf"), 1)):

        def clean(sequences: Tensor, odd: int = odd) -> Tensor:
            return (sequences % 2 == odd) & (sequences < len(RAGGED))

        for name, t in computed(clean, value).items():
            ours = clean(of_k if name in ("dk", "dv") else of_q)
            assert torch.equal(t[ours], want[name][ours]), (name, value)
    assert all(made)


def sequence_of(cu: Tensor, tokens: int) -> Tensor:
    """The number of each token's sequence; past the last, that of sequences."""
    return torch.bucketize(torch.arange(tokens), cu[1:].long(), right=True)


# ------------------------------------------------------------------ shapes


@pytest.mark.parametrize("shape", [(66000, 1, 1, 4), (1, 1, 66000, 4)], ids=["batch", "heads"])
def test_more_programs_than_sixteen_bits_count(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    """The grid has one dimension, the only one that goes past 65,535. Interpreting them all takes minutes:
    only the programs that are asked for are counted."""
    grids: list[tuple[int, ...]] = []

    class Kernel:
        __name__ = "kernel"

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            grids.append(grid)
            return lambda *arguments, **options: None

    from tilewise.kernels import backward, forward

    monkeypatch.setattr(forward, "forward_kernel", Kernel())
    for name in ("delta_kernel", "queries_kernel", "keys_kernel"):
        monkeypatch.setattr(backward, name, Kernel())
    q = torch.zeros(shape)
    evaluate(Call(tilewise.attention, {"q": q, "k": q, "v": q}), "triton")
    assert grids == [(66000,)] * 4


@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("columns", [1, 30])
def test_bias_of_every_shape(rows: int, columns: int) -> None:
    case = Case("", batch=2, sq=20, sk=30, heads=2, kv_heads=1, head_dim=16, value_dim=16)
    leading = [(2, 2), (2, 1), (1, 2), (1, 1), (2,), ()]
    for shape in leading:
        bias = draw(*shape, rows, columns)
        call = make_call(case, FP32)
        with tiles(32, 32):
            right(call._replace(arguments={**call.arguments, "bias": bias}), FP32)


@pytest.mark.parametrize(
    "shape", [(), (1, 1), (20, 1), (30,), (2, 1, 1, 1), (1, 2, 20, 1)], ids=str
)
def test_mask_of_every_shape(shape: tuple[int, ...]) -> None:
    x = draw_qkv(2, 20, 30, (2, 1))
    for mask in (draw(*shape) < 0.5, torch.zeros(shape, dtype=torch.bool)):
        with tiles(32, 32):
            right(Call(tilewise.attention, {**x, "mask": mask, "causal": True}), FP32)


@pytest.mark.parametrize("shape", list(itertools.product((2, 1), (31, 1), (20, 1))), ids=str)
def test_packed_bias_of_every_shape(shape: tuple[int, ...]) -> None:
    x = draw_tokens(31, 31, (2, 1), 16, 16, FP32)
    cu = cumulative([5, 20, 3])
    options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "bias": draw(*shape), "causal": True}
    with tiles(16, 16):
        right(Call(tilewise.attention_varlen, {**x, **options}), FP32)


@pytest.mark.parametrize("zero", ["batch", "sq", "sk", "heads"])
def test_zero_sizes(zero: str) -> None:
    sizes = {"batch": 1, "sq": 3, "sk": 4, "heads": 2} | {zero: 0}
    b, sq, sk, h = sizes.values()
    extras = {"bias": draw(h, sq, sk), "sinks": draw(h), "alibi_slopes": draw(h)}
    for options in ({}, extras):
        right(Call(tilewise.attention, {**draw_qkv(b, sq, sk, h), **options}), FP32)


def test_strides() -> None:
    wide = draw(2, 20, 3, 2, 32)
    projection = {n: wide[:, :, i, :, :16] for i, n in enumerate("qkv")}
    every_second = {n: wide[:, :, i, :, ::2] for i, n in enumerate("qkv")}
    one_key_head = {n: projection[n][:, :, :1].expand(2, 20, 2, 16) for n in "qkv"}
    for x in (projection, every_second, one_key_head):
        options = {"window_size": (12, 5), "mask": (draw(20, 40) > -1)[:, ::2]}
        plain = {name: t.contiguous() for name, t in x.items()}
        with tiles(32, 32):
            strided, dense = (
                evaluate(Call(tilewise.attention, {**given, **options}), "triton")
                for given in (x, plain)
            )
        same(strided, dense)


@pytest.mark.parametrize("wanted", [(), ("bias",), ("alibi_slopes",), ("sinks",)])
def test_gradients_of_some_of_the_scores(wanted):
    """Those that nobody wants are not computed, and change nothing of the others."""
    leaves = draw_qkv(1, 40, 70, (2, 1), 16)
    scores = {"bias": draw(2, 40, 1), "alibi_slopes": draw(2).abs(), "sinks": draw(2)}
    problem = problem_of(**leaves, **scores, causal=True)
    result, dout = backend.forward(problem), draw(1, 40, 2, 16, seed=5)
    got = backend.backward(problem, result, dout, None, wanted)
    want = backend.backward(problem, result, dout, None)
    assert all(torch.equal(a, b) for a, b in zip(got[:3], want[:3], strict=True))
    for name in scores:
        a, b = (getattr(g.scores, name) for g in (got, want))
        assert (a is not None) == (name in wanted)
        assert a is None or torch.equal(a, b)
