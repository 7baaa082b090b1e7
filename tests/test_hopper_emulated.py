"""The Hopper backward kernels in the emulator: its numbers, and that its warpgroups neither wait for each
other for ever nor overwrite what another still reads."""

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import emulator
import pytest
import torch
from torch import Tensor

import tilewise
from tilewise import repeated
from tilewise.arguments import problem_of
from tilewise.backends import hidden, hopper, reference
from tilewise.kernels import hopper_pipeline, replay
from tilewise.kernels.score import Rows
from tilewise.results import Gradients, Result
from tilewise.spec import Problem, sequences

NAN = float("nan")


class Shape(NamedTuple):
    b: int = 1
    sq: int = 200
    sk: int = 300
    hq: int = 2
    hkv: int = 1
    d: int = 64
    dv: int = 64


def tensors(shape: Shape, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    """q, k, v and dout."""
    b, sq, sk, hq, hkv, d, dv = shape
    sizes = ((b, sq, hq, d), (b, sk, hkv, d), (b, sk, hkv, dv), (b, sq, hq, dv))
    return tuple(torch.randn(size).to(dtype) for size in sizes)


def check(
    shape: Shape,
    seed: int,
    of_lse: bool = False,
    laid_out: Callable[[Tensor], Tensor] = lambda t: t,
    of_scores: tuple[str, ...] = (),
    **options: Any,
) -> None:
    """Against the definition, beside NaN wherever no row sees a key or no key is seen. `laid_out`: the same
    numbers in another layout; `of_scores`: whose gradients are wanted, too."""
    torch.manual_seed(seed)
    q, k, v, dout = tensors(shape)
    exact = problem_of(q.double(), k.double(), v.double(), **options)
    if not hopper._some_key_seen(exact):
        return
    result = reference.forward(exact)
    dlse = torch.randn(result.lse.shape) if of_lse else None
    exact_dlse = None if dlse is None else dlse.double()
    wanted = reference.backward(exact, result, dout.double(), exact_dlse, of_scores)
    rows, keys = seen(exact)
    for t, there in ((q, rows), (dout, rows), (k, keys), (v, keys)):
        t[~there] = NAN
    if dlse is not None and exact.scores.sinks is None:
        dlse.transpose(1, 2)[~rows] = NAN
    result = result._replace(lse=result.lse.float())
    q, k, v, dout = map(laid_out, (q, k, v, dout))
    got = emulator.backward(problem_of(q, k, v, **options), result, dout, dlse, seed, of_scores)
    for found, there in ((got.q, rows), (got.k, keys), (got.v, keys)):
        assert (found[~there] == 0).all()
    compare(got, wanted)


def compare(got: Gradients, wanted: Gradients) -> None:
    for name in ("q", "k", "v"):
        found, want = getattr(got, name), getattr(wanted, name)
        # What is stored is rounded to bfloat16; delta, and the sums of dq, to float32.
        room = 2**-8 * want.abs() + 1e-4 * want.abs().max() + 2e-5
        assert ((found.double() - want).abs() <= room).all(), name
    for name in ("alibi_slopes", "sinks"):
        found, want = (getattr(g.scores, name) for g in (got, wanted))
        assert (found is None) == (want is None)
        if found is not None:
            room = 1e-4 + 1e-5 * want.abs().max()
            assert ((found - want).abs() <= room).all(), name


def seen(problem: Problem) -> tuple[Tensor, Tensor]:
    """Which rows see a key, and which keys are seen: (B, S) each."""
    b, sq, sk = problem.q.shape[0], problem.q.shape[1], problem.k.shape[1]
    lo, hi = (t.expand(b, -1)[..., None] for t in problem.interval(0, sq))
    pairs = (torch.arange(sk) >= lo) & (torch.arange(sk) < hi)
    return pairs.any(2), pairs.any(1)


def documents(*lengths: int) -> tuple[Tensor, Tensor]:
    """A key_range (1, S) of documents one after the other, each of which sees itself alone."""
    ends = torch.tensor([*itertools.accumulate(lengths)])
    numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return (ends - torch.tensor(lengths))[numbers][None], ends[numbers][None]


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        (Shape(), {}),
        (Shape(sq=128, sk=128, hq=1), {}),  # two steps
        (Shape(sq=1, sk=1), {}),  # one
        (Shape(sq=640, sk=128, d=128, dv=128), {"causal": True}),
        (Shape(sq=640, sk=128, d=128, dv=128), {"causal": True, "align": "top-left"}),
        (Shape(sq=64, sk=500, hq=6, hkv=2), {"causal": True, "align": "top-left"}),
        (Shape(sq=3, sk=500, hq=4), {"causal": True}),
        (Shape(b=2, sq=300, sk=200, d=8, dv=40), {"window_size": (0, 0)}),
        (Shape(b=2, sq=400, sk=400, d=96, dv=8), {"window_size": (70, 130)}),
        (Shape(sq=333, sk=257), {"window_size": (2**62, 5), "softcap": 3.0}),
        (Shape(sq=257, sk=333, dv=128), {"window_size": (None, 2**62), "scale": -0.3}),
        # Wide: gradients of keys and of queries by two kernels.
        (Shape(d=256, dv=256), {}),
        (Shape(sq=64, sk=64, hq=1, d=256, dv=256), {}),  # one step
        (Shape(sq=128, sk=64, hq=1, d=256, dv=256), {}),  # two
        (Shape(sq=330, sk=128, hq=4, d=256, dv=256), {"causal": True, "align": "top-left"}),
        (Shape(b=2, sq=257, sk=200, d=192, dv=192), {"window_size": (70, 130)}),
        (Shape(sq=130, sk=200, d=192, dv=128), {"causal": True, "softcap": 3.0}),
        (Shape(sq=130, sk=200, d=64, dv=256), {"window_size": (0, 0)}),
        (Shape(sq=130, sk=200, d=256, dv=64), {"window_size": (2**62, 5), "scale": -0.3}),
    ],
)
@pytest.mark.parametrize(("of_lse", "deterministic"), [(False, False), (True, False), (True, True)])
def test_gradients(
    shape: Shape, options: dict[str, Any], of_lse: bool, deterministic: bool
) -> None:
    check(shape, sum(shape) + of_lse, of_lse, deterministic=deterministic, **options)


@pytest.fixture
def many_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all heads of 64 columns at most, tiles of 256 keys, where they may have them at all."""
    monkeypatch.setattr(hopper, "_FEWEST_TILES", 0)
    monkeypatch.setattr(hopper, "_FEWEST_KEYS", 0)


@pytest.mark.usefixtures("many_keys")
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        (Shape(sq=200, sk=512), {}),
        (Shape(sq=64, sk=256, hq=1), {}),  # one step
        (Shape(sq=1, sk=256, d=8, dv=40), {}),
        (Shape(b=2, sq=512, sk=512), {"causal": True}),
        (Shape(sq=512, sk=512, hq=4, hkv=2), {"causal": True}),
        (Shape(sq=300, sk=768), {"causal": True}),
        (Shape(sq=700, sk=256), {"causal": True, "align": "top-left"}),
        (Shape(sq=400, sk=512), {"window_size": (None, 70), "sinks": torch.ones(2)}),
        (Shape(sq=56, sk=600), {"window_size": (None, 200), "align": "top-left"}),
    ],
)
def test_tiles_of_many_keys(shape: Shape, options: dict[str, Any]) -> None:
    problem = problem_of(*tensors(shape)[:3], **options)
    assert hopper._backward_plan(problem, ()).keys == 256
    check(shape, sum(shape), True, **options)


@pytest.mark.usefixtures("many_keys")
@pytest.mark.parametrize("seed", range(3))
def test_any_tiles_of_many_keys(seed: int) -> None:
    dice = random.Random(seed)
    lengths = (1, 63, 64, 65, 127, 128, 129, 192, 255, 256, 257, 320, 500, 600)
    for number in range(5):
        hkv = dice.choice((1, 1, 2))
        d, dv = (dice.choice((8, 40, 64)) for _ in range(2))
        hq, sk = hkv * dice.choice((1, 1, 2)), dice.choice((256, 512, 768))
        shape = Shape(dice.choice((1, 1, 2)), dice.choice(lengths), sk, hq, hkv, d, dv)
        right = dice.choice((None, 0, 0, 1, 63, 64, 100, 192, 256, dice.randint(0, 300)))
        align = dice.choice(("top-left", "bottom-right"))
        check(shape, 100 * seed + number, window_size=(None, right), align=align)


@pytest.mark.usefixtures("many_keys")
@pytest.mark.parametrize("off", [-64, 64])
def test_halves_of_tiles_begin_where_they_should(off: int) -> None:
    shape = Shape(sq=512, sk=512, hq=1)
    torch.manual_seed(0)
    q, k, v, dout = tensors(shape)
    problem = problem_of(q, k, v, causal=True)
    result = reference.forward(problem_of(q.double(), k.double(), v.double(), causal=True))
    result = result._replace(lse=result.lse.float())

    def moved(work: Any, *given: Any) -> Any:
        return work.first + emulator.Number(128 + off)

    wanted = emulator.backward(problem, result, dout, None)
    got = emulator.backward(problem, result, dout, None, first_of_second_half=moved)
    # Earlier, more is computed than has to be; later, pairs are left out.
    assert torch.allclose(got.k, wanted.k, rtol=1e-2, atol=1e-2) == (off < 0)


def test_marks_of_pairs() -> None:
    """16 of a row in one number, which the emulator passes on as they are elsewhere."""
    given = emulator._globals(lambda: emulator.Program(0, random.Random(0)))
    for name in ("marked", "unmarked", "partial_row_sums"):
        del given[name]
    marked, unmarked = (
        emulator.emulated(function, given, {})
        for function in (hopper_pipeline.marked, hopper_pipeline.unmarked)
    )
    torch.manual_seed(0)
    chosen, like = torch.rand(64, 64) < 0.5, torch.zeros(64, 64)
    marks = marked(chosen, like)
    assert marks.shape == (64, 4)
    assert marks.max() < 2**16
    assert torch.equal(unmarked(marks, like), chosen)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        (Shape(sq=400, sk=400), {"key_range": documents(3, 130, 200, 1, 66)}),
        (Shape(sq=460, sk=460, d=128), {"key_range": documents(280, 180), "causal": True}),
        (Shape(sq=150, sk=150, d=128, dv=128), {"key_range": documents(*50 * (3,))}),
        (Shape(sq=300, sk=300, d=192), {"key_range": documents(130, 1, 169), "softcap": 3.0}),
        (Shape(sq=200, sk=300, d=256, dv=256), {"key_range": (70, 131), "causal": True}),
        # None sees keys 140 … 150; rows 3 … see nothing.
        (
            Shape(2, 150, 150, 4, 2),
            {"key_range": (torch.tensor([[0], [151]]), torch.tensor([[140], [999]]))},
        ),
        (Shape(sq=130, sk=500, hq=6, hkv=2), {"key_range": (-5, 10**12), "window_size": (70, 5)}),
        (
            Shape(sq=200, sk=200),
            {"key_range": documents(90, 110), "alibi_slopes": torch.ones(2), "causal": True},
        ),
    ],
)
def test_key_range(shape: Shape, options: dict[str, Any], deterministic: bool) -> None:
    start, end = map(torch.as_tensor, options["key_range"])
    options = {**options, "key_range": (start, end), "deterministic": deterministic}
    check(shape, sum(shape), True, **options)
    if not deterministic:
        options = {
            "alibi_slopes": torch.rand(shape.hq) / 9,
            "sinks": torch.ones(shape.hq),
            **options,
        }
        check(shape, 1, True, of_scores=("alibi_slopes", "sinks"), **options)


@pytest.mark.parametrize("seed", range(5))
def test_any_key_range(seed: int) -> None:
    """Drawn row by row: between what rows see lies what they do not."""
    dice = random.Random(seed)
    torch.manual_seed(seed)
    for number in range(3):
        b, hkv = dice.choice((1, 2)), dice.choice((1, 2))
        d, dv = (dice.choice((64, 64, 128, 136)) for _ in range(2))
        sq, sk = (dice.choice((1, 63, 64, 65, 130, 200)) for _ in range(2))
        shape = Shape(b, sq, sk, hkv * dice.choice((1, 2)), hkv, d, dv)
        start = torch.randint(-5, sk, (dice.choice((1, b)), dice.choice((1, sq))))
        longest = dice.choice((1, 5, 80, 300))
        options = {
            "key_range": (start, start + torch.randint(-2, longest, start.shape)),
            "window_size": dice.choice(((None, None), (None, 0), (70, 30))),
            "align": dice.choice(("top-left", "bottom-right")),
            "deterministic": dice.random() < 0.4,
        }
        check(shape, 100 * seed + number, dice.random() < 0.5, **options)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        (Shape(hq=4, hkv=2), {"alibi_slopes": torch.tensor([0.5, 0.1, 0.0, -0.2])}),
        (Shape(sq=150, d=192, dv=256), {"alibi_slopes": torch.tensor([[0.5, -0.1]])}),
        (Shape(b=2, sq=150), {"alibi_slopes": torch.rand(2, 2), "causal": True, "softcap": 3.0}),
        (Shape(b=2, hq=4), {"sinks": torch.tensor([0.5, -2.0, 90.0, 1.0])}),
        (Shape(sq=300, sk=100), {"sinks": torch.tensor([1.0, 3.0]), "causal": True}),
        (Shape(sq=300, sk=100, d=192), {"sinks": torch.tensor([1.0, 3.0]), "window_size": (5, 3)}),
        (
            Shape(d=128, dv=128, sq=200, sk=200),
            {"sinks": torch.ones(2), "alibi_slopes": torch.ones(2), "window_size": (60, 3)},
        ),
    ],
)
@pytest.mark.parametrize(("of_lse", "deterministic"), [(False, False), (True, False), (True, True)])
def test_slopes_and_sinks(
    shape: Shape, options: dict[str, Any], of_lse: bool, deterministic: bool
) -> None:
    check(shape, sum(shape), of_lse, deterministic=deterministic, **options)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        (Shape(b=2, hq=4), {"sinks": torch.tensor([0.5, -2.0, 90.0, 1.0])}),
        (Shape(sq=300, sk=100, dv=128), {"sinks": torch.tensor([1.0, 3.0]), "causal": True}),
        (Shape(sq=100, sk=300), {"sinks": torch.tensor([1.0, -3.0]), "window_size": (5, 3)}),
        (Shape(d=192, hq=6, hkv=2), {"sinks": torch.randn(6), "causal": True, "softcap": 3.0}),
        (
            Shape(d=128, dv=128, sq=200, sk=200),
            {"sinks": torch.ones(2), "alibi_slopes": torch.ones(2), "window_size": (60, 3)},
        ),
        (Shape(sq=200, sk=70), {"sinks": torch.ones(2), "causal": True, "align": "top-left"}),
    ],
)
@pytest.mark.parametrize("of_lse", [False, True])
def test_gradients_of_sinks(shape: Shape, options: dict[str, Any], of_lse: bool) -> None:
    """Which rows that see nothing have a part in, by their lse."""
    check(shape, sum(shape), of_lse, of_scores=("sinks",), **options)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        (Shape(b=2, hq=4), {"alibi_slopes": torch.tensor([0.5, 0.1, 0.0, -0.01])}),
        (Shape(2, 300, 100, 2, 2, dv=128), {"alibi_slopes": torch.rand(2, 2), "causal": True}),
        (
            Shape(sq=100),
            {"alibi_slopes": torch.rand(2), "window_size": (5, 3), "align": "top-left"},
        ),
        (Shape(d=192, hq=6, hkv=2), {"alibi_slopes": torch.rand(6), "softcap": 3.0}),
        (
            Shape(d=128, dv=128, sq=200, sk=200),
            {"sinks": torch.ones(2), "alibi_slopes": torch.rand(1, 2), "window_size": (60, 3)},
        ),
    ],
)
@pytest.mark.parametrize("of_lse", [False, True])
def test_gradients_of_slopes(shape: Shape, options: dict[str, Any], of_lse: bool) -> None:
    check(shape, sum(shape), of_lse, of_scores=("alibi_slopes",), **options)
    if "sinks" in options:
        check(shape, sum(shape), of_lse, of_scores=("alibi_slopes", "sinks"), **options)


@pytest.mark.parametrize("name", ["alibi_slopes", "sinks"])
@pytest.mark.parametrize("packed", [False, True])
def test_gradients_of_scores_do_not_show_how_out_was_rounded(packed: bool, name: str) -> None:
    """As they would, were it not for the sums of dS."""
    torch.manual_seed(0)
    q, k, v, dout = tensors(Shape(sq=1000, sk=1000))
    v, dout = v / 8 + 3, dout / 8 + 1
    v, dout = v.bfloat16(), dout.bfloat16()
    given = {"alibi_slopes": torch.tensor([0.002, 0.01]), "sinks": torch.tensor([1.0, 2.0])}
    options: dict[str, Any] = {name: given[name], "causal": True}
    if packed:
        q, k, v, dout = q[0], k[0], v[0], dout[0]
        cu = torch.tensor([0, 700, 1000], dtype=torch.int32)
        options |= {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
    exact = problem_of(q.double(), k.double(), v.double(), **options)
    result = reference.forward(exact)
    wanted = reference.backward(exact, result, dout.double(), None, (name,))
    rounded = result._replace(out=result.out.bfloat16(), lse=result.lse.float())
    problem = problem_of(q, k, v, **options)

    def error(**instead: Callable[..., Any]) -> float:
        got = emulator.backward(problem, rounded, dout, None, 0, (name,), **instead)
        found, want = (getattr(g.scores, name) for g in (got, wanted))
        return float((found - want).abs().max() / want.abs().max())

    assert error() <= 1e-5
    # Without what corrects it: Σ dS; or by distance Σ P, which alone has no negative terms.
    signed = name == "alibi_slopes"

    def left(p: Tensor) -> Tensor:
        return p.sum(1, keepdim=True) * (signed and bool((p < 0).any()))

    assert error(partial_row_sums=left) > 1e-4


@pytest.mark.parametrize(
    ("widths", "deterministic"),
    [
        ((8, 40, 64, 72, 96, 128), False),
        ((8, 40, 64, 72, 96, 128), True),
        ((8, 64, 136, 192, 200, 256), False),
    ],
)
@pytest.mark.parametrize("seed", range(6))
def test_any_shape_and_band(seed: int, widths: tuple[int, ...], deterministic: bool) -> None:
    dice = random.Random(seed)
    lengths = (1, 2, 3, 63, 64, 65, 127, 128, 129, 191, 192, 193, 256, 257, 320, 400)
    for number in range(6):
        hkv = dice.choice((1, 1, 2))
        d, dv = (dice.choice(widths) for _ in range(2))
        shape = Shape(
            dice.choice((1, 1, 2)),
            *dice.choices((*lengths, dice.randint(1, 420)), k=2),
            hkv * dice.choice((1, 1, 2, 3)),
            *(hkv, d, dv),
        )
        sides = (None, 0, 1, 30, 64, 127, 128, 200, 1000, dice.randint(0, 400))
        options = {
            "window_size": tuple(dice.choices(sides, k=2)),
            "align": dice.choice(("top-left", "bottom-right")),
            "softcap": dice.choice((None, None, 3.0)),
            "deterministic": deterministic,
        }
        check(shape, 100 * seed + number, dice.random() < 0.5, **options)


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window_size": (70, 0)}, {"window_size": (20, 130), "softcap": 3.0}],
)
@pytest.mark.parametrize(
    ("lengths", "past"),
    [
        ((5,), 0),
        ((130, 1, 0, 64, 200, 65), 3),
        ((0, 0, 33), 140),
        ((7,) * 20, 0),
        ((128, 256), 0),
    ],
)
@pytest.mark.parametrize(
    ("d", "dv", "deterministic"), [(64, 40, False), (64, 40, True), (256, 136, False)]
)
def test_packed(
    lengths: tuple[int, ...],
    past: int,
    options: dict[str, Any],
    d: int,
    dv: int,
    deterministic: bool,
) -> None:
    check_packed(lengths, None, past, d, dv, deterministic=deterministic, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": True, "align": "top-left", "sinks": torch.tensor([0.5, -2.0, 90.0, 1.0])},
        {"window_size": (20, 130), "softcap": 3.0},
        {"window_size": (3, 2), "align": "top-left"},
    ],
)
@pytest.mark.parametrize(
    ("lengths", "others", "past"),
    [
        ((5,), (9,), 0),
        ((130, 1, 0, 64, 200, 0, 65), (3, 200, 70, 0, 130, 0, 64), 3),
        ((0, 0, 33), (0, 7, 0), 140),
        ((300, 40), (1, 300), 0),
    ],
)
@pytest.mark.parametrize(
    ("d", "dv", "deterministic"),
    [(64, 40, False), (128, 128, False), (64, 40, True), (256, 136, False)],
)
def test_packed_of_two_lengths(
    lengths: tuple[int, ...],
    others: tuple[int, ...],
    past: int,
    options: dict[str, Any],
    d: int,
    dv: int,
    deterministic: bool,
) -> None:
    """Some sequences see nothing, or are seen by none; others in part."""
    check_packed(lengths, others, past, d, dv, deterministic=deterministic, **options)


def test_packed_sinks() -> None:
    check_packed((70, 0, 130), None, 3, 64, 64, causal=True, sinks=torch.randn(4))


@pytest.mark.parametrize(("d", "deterministic"), [(64, False), (128, True), (256, False)])
@pytest.mark.parametrize("slopes", [torch.rand(4), torch.rand(7, 4)])
def test_packed_slopes(slopes: Tensor, d: int, deterministic: bool) -> None:
    options = {"alibi_slopes": slopes, "deterministic": deterministic}
    check_packed((130, 1, 0, 64, 200, 0, 65), None, 3, d, 64, **options)
    others = (3, 200, 70, 0, 130, 0, 64)
    check_packed((130, 1, 0, 64, 200, 0, 65), others, 3, d, 64, causal=True, **options)


def test_what_sees_nothing_has_to_be_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "with_zeros", lambda problem, dout, dlse, *_: (problem, dout, dlse))
    hidden_at_ends = (torch.full((1, 200), 70), torch.full((1, 200), 131))
    for deterministic in (False, True):
        with pytest.raises(AssertionError):
            check(Shape(sq=200), 0, key_range=hidden_at_ends, deterministic=deterministic)
        with pytest.raises(AssertionError):
            check_packed((130, 40), (3, 200), 0, 64, 64, causal=True, deterministic=deterministic)


def check_packed(
    lengths: tuple[int, ...],
    others: tuple[int, ...] | None,
    past: int,
    d: int,
    dv: int,
    **options: Any,
) -> None:
    """Sequences side by side, of k of `others` lengths if given, with NaN in tokens past the last, and
    wherever no row sees a key or no key is seen. Slopes and sinks have a gradient."""
    torch.manual_seed(len(lengths))
    cu_q = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    cu_k = cu_q
    if others is not None:
        cu_k = torch.tensor([0, *itertools.accumulate(others)], dtype=torch.int32)
    shape = Shape(1, int(cu_q[-1]) + past, int(cu_k[-1]) + past, 4, 2, d, dv)
    q, k, v, dout = (t[0] for t in tensors(shape))
    options = {**options, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    exact = problem_of(q.double(), k.double(), v.double(), **options)
    result = reference.forward(exact)
    dlse = torch.randn(result.lse.shape)
    of_scores = ("alibi_slopes", "sinks")
    wanted = reference.backward(exact, result, dout.double(), dlse.double(), of_scores)
    rows, keys = (torch.zeros(len(t), dtype=torch.bool) for t in (q, k))
    for sequence in sequences(exact):
        assert sequence.queries is not None
        assert sequence.keys is not None
        rows[sequence.queries], keys[sequence.keys] = (t[0] for t in seen(sequence.problem))
    for t, there in ((q, rows), (dout, rows), (k, keys), (v, keys)):
        t[~there] = NAN
    real = torch.arange(len(q)) < cu_q[-1]
    dlse.T[~(rows if exact.scores.sinks is None else real)] = NAN
    result = result._replace(lse=result.lse.float())
    problem = problem_of(q, k, v, **options)
    assert not hopper._backward_unsupported(problem)
    there = hidden.seen_tokens(problem)
    assert (there is None) == (others is None)
    if there is not None:
        assert torch.equal(there[0], rows)
        assert torch.equal(there[1], keys)
    got = emulator.backward(problem, result, dout, dlse, past, of_scores)
    for found, there in ((got.q, rows), (got.k, keys), (got.v, keys)):
        assert (found[~there] == 0).all()
    compare(got, wanted)


@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("packed", [False, True])
def test_deterministic_gradients_are_not_summed_in_memory(width: int, packed: bool) -> None:
    """Where sums would be in any order: each is one program's."""
    q, k, v, dout = tensors(Shape(sq=300, sk=300, hq=4, hkv=2, d=width, dv=width))
    options: dict[str, Any] = {"causal": True}
    if packed:
        q, k, v, dout = q[0], k[0], v[0], dout[0]
        cu = torch.tensor([0, 70, 300], dtype=torch.int32)
        options |= {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
    result = reference.forward(problem_of(q.double(), k.double(), v.double(), **options))
    result = result._replace(lse=result.lse.float())

    def summed(*given: object) -> None:
        raise AssertionError("summed in memory")

    def found(seed: int, deterministic: bool) -> Any:
        problem = problem_of(q, k, v, deterministic=deterministic, **options)
        return emulator.backward(problem, result, dout, None, seed, add_to=summed)

    first, second = (found(seed, True) for seed in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first[:3], second[:3], strict=True))
    if width <= 128:
        with pytest.raises(AssertionError, match="summed in memory"):
            found(0, False)


def within(*more: int) -> Callable[[Tensor], Tensor]:
    """A part of a tensor that is so much larger, its end."""

    def laid_out(t: Tensor) -> Tensor:
        room = torch.full([n + m for n, m in zip(t.shape, more, strict=True)], NAN, dtype=t.dtype)
        return room[tuple(slice(m, None) for m in more)].copy_(t)

    return laid_out


@pytest.mark.parametrize(
    "laid_out",
    [
        lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        lambda t: t.transpose(2, 3).contiguous().transpose(2, 3),
        lambda t: t.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
        within(0, 0, 0, 8),
        within(1, 70, 3, 0),
        within(0, 0, 0, 1),
        within(0, 0, 0, 4),
    ],
)
def test_any_layout(laid_out: Callable[[Tensor], Tensor]) -> None:
    check(Shape(b=2, d=40, dv=96), 1, laid_out=laid_out, causal=True)
    check(Shape(sq=1, hq=1), 2, laid_out=laid_out)


def test_a_gradient_that_is_one_number() -> None:
    """Such as that of a sum or a mean."""
    q, k, v, _ = tensors(Shape())
    problem = problem_of(q, k, v, causal=True)
    exact = problem_of(q.double(), k.double(), v.double(), causal=True)
    result = reference.forward(exact)
    result = result._replace(lse=result.lse.float())
    one, zeros = torch.ones((), dtype=q.dtype), torch.zeros(())
    for dout in (one.expand(result.out.shape), one.expand(1, 200, 1, 64).contiguous()):
        whole = dout.expand(result.out.shape)
        got = emulator.backward(problem, result, whole, zeros.expand(result.lse.shape))
        want = emulator.backward(problem, result, whole.contiguous(), None)
        assert all(torch.equal(a, b) for a, b in zip(got[:3], want[:3], strict=True))


@pytest.mark.parametrize(
    ("shape", "options", "replayed"),
    [
        (Shape(), {}, True),
        (Shape(b=2, sq=300, sk=300, d=96, dv=8), {"causal": True}, True),
        (Shape(sq=3, hq=6, hkv=2, d=128), {"window_size": (None, 9)}, True),
        (Shape(sq=70, sk=70, d=192), {"causal": True}, True),
        (Shape(sq=200, sk=300, d=128), {"causal": True, "deterministic": True}, True),
        # What no row sees is cleared by PyTorch.
        (Shape(), {"window_size": (9, None)}, False),
    ],
)
@pytest.mark.parametrize("of_lse", [False, True])
def test_launches_made_again(
    shape: Shape, options: dict[str, Any], replayed: bool, of_lse: bool
) -> None:
    """On other tensors, and where new memory holds NaN: the sums begin with 0 again."""
    settled = repeated.Settled(problem_of(*tensors(shape)[:3], **options), "hopper")
    again = None
    for seed in range(3):
        torch.manual_seed(seed)
        q, k, v, dout = tensors(shape)
        exact = problem_of(q.double(), k.double(), v.double(), **options)
        result = reference.forward(exact)
        dlse = torch.randn(result.lse.shape) if of_lse else None
        given = (q, k, v, result.out.to(q.dtype), result.lse.float(), torch.empty(0), dout)
        if dlse is not None:
            given = (*given, dlse)
        with emulator.emulating(seed):
            if again is None:
                found, again = replay.recorded(settled._backward, 0, *given)
            else:
                found = again(*given)
        dlse = None if dlse is None else dlse.double()
        wanted = reference.backward(exact, result, dout.double(), dlse)
        for got, want in zip(found, wanted[:3], strict=True):
            room = 2**-6 * (want.abs() + want.abs().max())  # out was rounded, too
            assert ((got.double() - want).abs() <= room).all()
        if not replayed:
            assert again is None
            break
        assert again is not None
        assert not again.shares


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Calls are served as on such a GPU: by the definition forward, backward by the emulator."""

    def forward(problem: Problem) -> Result:
        q, k, v = (t.double() for t in problem[:3])
        found = reference.forward(problem._replace(q=q, k=k, v=v))
        return Result(found.out.to(problem.q.dtype), found.lse.float(), torch.empty(0))

    monkeypatch.setattr(hopper, "_wrong_machine", lambda device: [])
    monkeypatch.setattr(hopper, "forward", forward)
    real, calls = hopper.backward, []

    def backward(*given: Any) -> Any:
        calls.append(given)
        with emulator.emulating():
            return real(*given)

    monkeypatch.setattr(hopper, "backward", backward)
    repeated.forget()
    yield
    repeated.forget()
    assert calls


def gradients(backend: str, *operands: Tensor) -> tuple[Tensor, ...]:
    out, lse = tilewise.attention(*operands, causal=True, backend=backend, return_lse=True)
    loss = out.float().square().sum() + lse.sin().sum()
    return torch.autograd.grad(loss, operands, create_graph=True)


def of_samples(backend: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """By vmap: k is the same for all, so that its batch has a stride of 0; v's samples lie inside."""

    def loss(*operands: Tensor) -> Tensor:
        return tilewise.attention(*operands, causal=True, backend=backend).float().square().sum()

    qs, vs = torch.stack([q, 2 * q, -q]), torch.stack([v, -v, v * v], 2)
    return torch.vmap(torch.func.grad(loss, (0, 1, 2)), (0, None, 2))(qs, k, vs)


def of_batched_gradients(backend: str, *operands: Tensor) -> tuple[Tensor, ...]:
    out = tilewise.attention(*operands, causal=True, backend=backend)
    douts = torch.stack([out.detach(), -out.detach(), out.detach() ** 2])
    return torch.autograd.grad(out, operands, douts, is_grads_batched=True)


def of_sums(backend: str, *operands: Tensor) -> tuple[Tensor, ...]:
    out = tilewise.attention(*operands, backend=backend)
    return torch.autograd.grad(out.sum(), operands)


def of_tensors_laid_out_anew(backend: str, *operands: Tensor) -> tuple[Tensor, ...]:
    hook = torch.autograd.graph.saved_tensors_hooks(
        lambda t: t, lambda t: t.mT.contiguous().mT if t.ndim == 4 else t
    )
    with hook:
        return gradients(backend, *operands)


def of_gradients(backend: str, *operands: Tensor) -> tuple[Tensor, ...]:
    loss = sum(g.float().cos().sum() for g in gradients(backend, *operands))
    return torch.autograd.grad(loss, operands)


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(
    "found",
    [
        gradients,
        of_samples,
        of_batched_gradients,
        of_sums,
        of_tensors_laid_out_anew,
        of_gradients,
    ],
)
def test_through_pytorch(found: Callable[..., tuple[Tensor, ...]]) -> None:
    torch.manual_seed(0)
    operands = [t.requires_grad_() for t in tensors(Shape(sq=65, sk=130))[:3]]
    for got, want in zip(found("hopper", *operands), found("reference", *operands), strict=True):
        room = 2**-6 * (want.abs() + want.abs().max()) + 1e-3
        assert ((got - want).abs() <= room).all()


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("key_range", [None, (torch.tensor(3), torch.tensor(100))])
@pytest.mark.parametrize("names", [("sinks",), ("alibi_slopes",), ("alibi_slopes", "sinks")])
def test_scores_through_pytorch(names: tuple[str, ...], key_range: Any) -> None:
    torch.manual_seed(0)
    operands = [t.requires_grad_() for t in tensors(Shape(sq=65, sk=130))[:3]]
    given = {
        "sinks": torch.tensor([0.5, 2.0], dtype=operands[0].dtype, requires_grad=True),
        "alibi_slopes": torch.tensor([0.01, 0.1], requires_grad=True),
    }
    scores = {name: given[name] for name in names}
    leaves = (*operands, *scores.values())
    options: dict[str, Any] = {"key_range": key_range, **scores}
    chosen = tilewise.explain(*operands, backend="hopper", **options)
    assert chosen.config["gradients"] == "by hopper"

    def found(backend: str) -> tuple[Tensor, ...]:
        out, lse = tilewise.attention(*operands, backend=backend, return_lse=True, **options)
        return torch.autograd.grad(out.float().square().sum() + lse.sin().sum(), leaves)

    for got, want in zip(found("hopper"), found("reference"), strict=True):
        assert got.dtype == want.dtype
        assert ((got - want).abs() <= 2**-6 * (want.abs() + want.abs().max()) + 1e-3).all()


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(
    "hooks",
    [(lambda t: t, torch.clone), (torch.clone, lambda t: t), (torch.Tensor.numpy, torch.tensor)],
)
def test_saved_tensors_made_anew_leave_self_attention_what_it_is(hooks: tuple[Any, Any]) -> None:
    """As by offloading: gradients of packed sequences that attend to themselves stay Hopper's, as `explain`
    says; Triton's kernels could not run here."""
    torch.manual_seed(0)
    whole = [t[0].requires_grad_() for t in tensors(Shape(sq=140, sk=140))[:3]]
    cu = torch.tensor([0, 70, 140], dtype=torch.int32)
    options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "causal": True}
    chosen = tilewise.explain(*whole, **options, backend="hopper")
    assert chosen.config["gradients"] == "by hopper"

    def packed(t: Tensor) -> Any:
        return hooks[0](t) if t.dtype == torch.int32 else t

    def unpacked(t: Any) -> Tensor:
        return t if isinstance(t, Tensor) and t.is_floating_point() else hooks[1](t)

    with torch.autograd.graph.saved_tensors_hooks(packed, unpacked):
        got = tilewise.attention_varlen(*whole, **options, backend="hopper")
    want = tilewise.attention_varlen(*whole, **options, backend="reference")
    grads = [torch.autograd.grad(out.float().square().sum(), whole) for out in (got, want)]
    for a, b in zip(*grads, strict=True):
        assert ((a - b).abs() <= 2**-6 * (b.abs() + b.abs().max()) + 1e-3).all()


def nothing(*given: object) -> None:
    pass


def sees_all(rows: Tensor, at: Any, spec: Any) -> Rows:
    return Rows(rows, 0 * rows, 0 * rows + 1000)


FAULTS: dict[str, Callable[..., Any]] = {
    "wait_full": nothing,
    "wait_empty": nothing,
    "give_back": nothing,
    "hand_to_threads": nothing,
    "pass_turn": nothing,
    "open_turns": nothing,
    "pairs_seen": lambda along, *_: along == along,
    "interval": sees_all,
    "close_turns": lambda group: group == 1 and emulator.named_barrier("sync", 0),
}
# What is not called where dQ is summed, or where it has a kernel of its own.
NOT_CALLED = {(64, False): ("interval",), (64, True): ("hand_to_threads",), (256, False): ()}


@pytest.mark.parametrize(
    ("width", "deterministic", "fault"),
    [
        (*kernels, fault)
        for kernels, left_out in NOT_CALLED.items()
        for fault in FAULTS
        if fault not in left_out
    ],
)
def test_the_emulator_finds_faults(width: int, deterministic: bool, fault: str) -> None:
    real = emulator.backward

    def faulty(*given: Any) -> Any:
        return real(*given, **{fault: FAULTS[fault]})

    shape = Shape(sq=500, sk=200, d=width, dv=width)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulator, "backward", faulty)
        with pytest.raises(AssertionError):
            check(shape, 0, causal=True, deterministic=deterministic)
