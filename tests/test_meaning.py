"""What attention means, line by line of the design, on the reference and the tiled backend."""

import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from dense64 import (
    INF,
    TOLERANCE,
    attention64,
    check,
    close,
    gathered,
    gradients,
    in_range,
    keep64,
    paged64,
    philox,
    varlen64,
    visible,
)
from inputs import draw, draw_qkv, draw_tokens, set_tiles
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

import tilewise
from tilewise import random as bits
from tilewise.backends import flash, tiles
from tilewise.spec import Band, KeyRange, Problem, Scores

torch.set_num_threads(1)

NAN = math.nan
HALVES = [torch.bfloat16, torch.float16]
FLOATS = [torch.float32, *HALVES]
DTYPES = [torch.float64, *FLOATS]


def everything(b: int, hq: int, sq: int, sk: int, dtype: torch.dtype = torch.float32) -> Any:
    """Every option at once: the leaves among them, and the rest."""
    leaves = {
        "bias": draw(b, hq, sq, sk, seed=11).to(dtype),
        "alibi_slopes": draw(b, hq, seed=12).abs().to(dtype),
        "sinks": draw(hq, seed=13).to(dtype),
    }
    options = {
        "causal": True,
        "window_size": (sk // 2, None),
        "key_range": (torch.tensor([[sk // 5]]), torch.full((b, 1), sk - 2)),
        "mask": draw(1, hq, sq, sk, seed=14) > -1,
        "softcap": 2.5,
        "scale": 0.7,
    }
    return leaves, options


# ---------------------------------------------------------------------------------------------
# The order in which a logit comes about, and where rows stand


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
def test_everything_at_once(attend, dtype, heads, small_tiles):
    leaves = draw_qkv(2, 37, 50, heads, 12, 7, dtype)
    more, options = everything(2, heads[0], 37, 50, dtype)
    check(attend, attention64, leaves | more, **options)
    keep = keep64(0.3, 5, 2, heads[0], 37, 50)
    dropped = functools.partial(attend, dropout_p=0.3, dropout_seed=5)
    theirs = functools.partial(attention64, keep=keep)
    check(dropped, theirs, leaves | more, factor=2, **options)


def test_order_by_hand(attend):
    """One row and two keys, with numbers that no other order of the steps gives."""
    q, k = torch.tensor([[2.0]]), torch.tensor([[3.0], [1.0]])
    v = torch.tensor([[1.0], [0.0]])
    logits = []
    for j, key in enumerate([3.0, 1.0]):
        s = 0.5 * 2 * key  # scale
        s = 1.5 * math.tanh(s / 1.5)  # softcap
        s -= 0.25 * abs(1 - j)  # alibi: the row stands at 1
        s += [0.125, -0.5][j]  # bias
        logits.append(s)
    weights = [math.exp(s) for s in logits]
    total = sum(weights) + math.exp(0.75)  # sink
    out, lse = attend(
        *(t[None, :, None] for t in (q, k, v)),
        scale=0.5,
        softcap=1.5,
        alibi_slopes=torch.tensor([0.25]),
        bias=torch.tensor([0.125, -0.5]),
        sinks=torch.tensor([0.75]),
    )
    assert out.item() == pytest.approx(weights[0] / total, rel=1e-6)
    assert lse.item() == pytest.approx(math.log(total), rel=1e-6)


@pytest.mark.parametrize("align", ["bottom-right", "top-left"])
@pytest.mark.parametrize("lengths", [(5, 5), (3, 8), (8, 3), (1, 40), (40, 1), (33, 70)])
def test_align(attend, align, lengths, small_tiles):
    sq, sk = lengths
    for options in (
        {"causal": True},
        {"window_size": (2, 1)},
        {"window_size": (None, 3)},
        {"window_size": (4, None), "causal": True},
        {"alibi_slopes": draw(2, seed=3).abs()},
    ):
        leaves = draw_qkv(2, sq, sk, (2, 1), 8)
        check(attend, attention64, leaves, align=align, **options)


def test_align_is_bottom_right_unless_told(attend):
    leaves = draw_qkv(1, 3, 8, 1, 8)
    default = attend(**leaves, causal=True)
    for given, equal in (("bottom-right", True), ("top-left", False)):
        other = attend(**leaves, causal=True, align=given)
        assert torch.equal(default[0], other[0]) is equal


def test_query_heads_share_key_heads_in_order(attend):
    q = torch.zeros(1, 1, 6, 4)
    v = torch.arange(3.0).view(1, 1, 3, 1)
    out, _ = attend(q, torch.zeros(1, 1, 3, 4), v)
    assert out.flatten().tolist() == [0, 0, 1, 1, 2, 2]


def test_default_scale(attend):
    for d in (1, 7, 64):
        leaves = draw_qkv(1, 3, 5, 2, d, 6)
        want = attend(**leaves, scale=d**-0.5)
        assert torch.equal(attend(**leaves)[0], want[0])
    leaves = draw_qkv(1, 9, 9, 2, 8)
    for scale in (-0.5, 0.0, 3.0):
        check(attend, attention64, leaves, scale=scale, causal=True)


# ---------------------------------------------------------------------------------------------
# One key interval per row


def problem(sq: int, sk: int, band: Band, key_range: KeyRange | None = None) -> Problem:
    b = 1 if key_range is None else max(t.shape[0] for t in key_range)
    q, k = torch.zeros(b, sq, 1, 1), torch.zeros(b, sk, 1, 1)
    return Problem(q, k, k, band, Scores(1.0), key_range)


SIDES = (None, 0, 1, 2, 3, 7)


def bands() -> Iterator[tuple[int, int, Band, Tensor]]:
    """All small bands, with the matrix of what they let be seen."""
    for sq, sk, align in itertools.product(range(7), range(7), ("bottom-right", "top-left")):
        for left, right in itertools.product(SIDES, SIDES):
            seen = visible(sq, sk, False, align, (left, right))
            yield sq, sk, Band(left, right, align), seen


def check_bounds(p: Problem, seen: Tensor, tight: bool) -> None:
    """seen is (B, Sq, Sk)."""
    sq, sk = seen.shape[1:]
    anywhere, everywhere = seen.any(0).tolist(), seen.all(0).tolist()
    for i0 in range(sq):
        for i1 in range(i0 + 1, sq + 1):
            first, full_first, full_last, last = p.bounds(i0, i1)
            some = [j for j in range(sk) if any(anywhere[i][j] for i in range(i0, i1))]
            whole = [j for j in range(sk) if all(everywhere[i][j] for i in range(i0, i1))]
            assert all(first <= j < last for j in some), "a visible key lies outside"
            full = range(full_first, full_last)
            assert set(full) <= set(whole), "a partial tile would be called full"
            assert 0 <= first <= sk
            assert 0 <= last <= sk
            if tight and some:
                assert (first, last) == (some[0], some[-1] + 1)
                assert set(full) == set(whole)


def test_bands_and_their_bounds_exhaustively():
    for sq, sk, band, seen in bands():
        p = problem(sq, sk, band)
        lo, hi = p.interval(0, sq)
        j = torch.arange(sk)
        assert torch.equal((j >= lo[..., None]) & (j < hi[..., None]), seen[None])
        check_bounds(p, seen[None], tight=True)


def test_ranges_and_their_bounds_exhaustively():
    rng = random.Random(0)
    for sq, sk, band, seen in bands():
        shape = (rng.choice((1, 2)), rng.choice((1, sq)))
        start = torch.tensor(
            [[rng.randint(-2, sk + 2) for _ in range(shape[1])] for _ in range(shape[0])]
        ).reshape(shape)
        end = torch.tensor(
            [[rng.randint(-2, sk + 3) for _ in range(max(sq, 1))] for _ in range(2)]
        )[:, :sq]
        if rng.random() < 0.5:
            start = start.int()
        p = problem(sq, sk, band, KeyRange(start, end))
        want = seen & in_range(start, end, 2, sq, sk)[:, 0]
        lo, hi = p.interval(0, sq)
        assert lo.numel() == 0 or (lo >= 0).all()
        assert hi.numel() == 0 or (hi <= sk).all()
        j = torch.arange(sk)
        got = (j >= lo[..., None]) & (j < hi[..., None])
        assert torch.equal(got.expand(2, sq, sk), want)
        check_bounds(p, want, tight=False)


def weights(call: Callable[..., Any], b: int, sq: int, sk: int, **options: Any) -> Tensor:
    """Visible keys of each row, (B, Sq, Sk), from q = 0 and v = 1 at one key each."""
    q = torch.zeros(b, sq, 1, 2)
    v = torch.eye(sk).expand(b, sk, sk)[:, :, None] if sk else torch.zeros(b, 0, 1, 1)
    out, lse = call(q, torch.zeros(b, sk, 1, 2), v, **options)
    count = lse[:, 0].exp().round()
    if not sk:
        assert (count == 0).all()
        return torch.zeros(b, sq, 0)
    seen = out[:, :, 0] * count[..., None]
    assert torch.equal(seen.round().sum(-1), count)
    close(seen, seen.round())
    return seen.round()


def test_small_masks_exhaustively(attend, monkeypatch):
    """Causal, windows, ranges and masks intersect, over all small sizes and in small tiles."""
    set_tiles(monkeypatch, 2, 2)
    rng = random.Random(1)
    for sq, sk in itertools.product(range(1, 7), range(7)):
        for align, causal in itertools.product(("bottom-right", "top-left"), (False, True)):
            for _ in range(3):
                window = (rng.choice(SIDES), rng.choice(SIDES))
                options: dict[str, Any] = {"align": align, "causal": causal, "window_size": window}
                want = visible(sq, sk, **options).expand(2, sq, sk)
                if rng.random() < 0.6:
                    start = torch.randint(-1, sk + 1, (rng.choice((1, 2)), rng.choice((1, sq))))
                    end = torch.randint(0, sk + 2, (2, sq))
                    options["key_range"] = (start, end)
                    want = want & in_range(start, end, 2, sq, sk)[:, 0]
                if rng.random() < 0.5:
                    mask = torch.rand(rng.choice((1, 2)), 1, rng.choice((1, sq)), sk) < 0.7
                    options["mask"] = mask
                    want = want & mask[:, 0]
                got = weights(attend, 2, sq, sk, **options)
                assert torch.equal(got, want.float()), (sq, sk, options)


@pytest.mark.parametrize("size", [64, 65, 130])
def test_masks_at_the_edges_of_tiles(attend, size, small_tiles):
    for sq, sk in ((size, size), (size - 31, size), (size, size - 31), (1, size)):
        for align, window in itertools.product(
            ("bottom-right", "top-left"),
            ((None, 0), (0, 0), (15, 0), (16, 0), (17, 3), (31, 32), (None, 15), (33, None)),
        ):
            options = {"align": align, "window_size": window}
            got = weights(attend, 1, sq, sk, **options)
            assert torch.equal(got[0], visible(sq, sk, **options).float())


SKIPPING: dict[str, tuple[dict[str, Any], Tensor]] = {
    "causal": ({"causal": True}, torch.ones(160, 160).tril() > 0),
    "window": ({"window_size": (20, 10)}, visible(160, 160, window_size=(20, 10))),
    "range": (
        {"key_range": (torch.full((1, 1), 70), torch.full((1, 1), 90))},
        ((torch.arange(160) >= 70) & (torch.arange(160) < 90)).expand(160, 160),
    ),
    "mask": ({}, torch.block_diag(*[torch.ones(32, 32)] * 5) > 0),
    "nothing": ({"mask": torch.zeros(1, dtype=torch.bool)}, torch.zeros(160, 160) > 0),
}


@pytest.mark.parametrize("kind", SKIPPING)
def test_tiles_that_no_row_sees_are_skipped(monkeypatch, kind):
    set_tiles(monkeypatch, 16, 16)
    options, seen = SKIPPING[kind]
    options = options or {"mask": seen}
    computed = []
    logits = tiles.Tiles.logits

    def counted(self: Any, q: Tensor, k: Tensor, at: Any, *rest: Any) -> Any:
        computed.append(at)
        return logits(self, q, k, at, *rest)

    monkeypatch.setattr(tiles.Tiles, "logits", counted)
    leaves = {n: t.requires_grad_() for n, t in draw_qkv(1, 160, 160, 1, 8).items()}
    out = tilewise.attention(**leaves, backend="tiled", **options)
    visible_tiles = sum(bool(tile.any()) for rows in seen.split(16) for tile in rows.split(16, 1))
    # Blocks of keys begin where a block of rows begins to see, so there may be one more for it.
    assert len(computed) <= visible_tiles + (10 if kind in ("window", "range") else 0)
    assert all(seen[at.i0 : at.i1, at.j0 : at.j1].any() for at in computed)
    computed.clear()
    out.sum().backward()
    assert len(computed) <= visible_tiles
    assert all(seen[at.i0 : at.i1, at.j0 : at.j1].any() for at in computed)


def test_ranges_of_every_shape(attend, small_tiles):
    leaves = draw_qkv(3, 20, 40, (2, 1), 8)
    for (b, s), dtype in itertools.product(
        ((1, 1), (3, 1), (1, 20), (3, 20)), (torch.int32, torch.int64)
    ):
        start = torch.randint(-5, 30, (b, s), dtype=dtype)
        end = torch.randint(0, 50, (3, 20), dtype=dtype)
        check(attend, attention64, leaves, key_range=(start, end))
    check(attend, attention64, leaves, key_range=(torch.tensor(3), torch.randint(0, 50, (20,))))


def test_ends_of_a_range_may_be_ints(attend):
    leaves = draw_qkv(3, 20, 40, (2, 1), 8)
    ends = torch.randint(0, 50, (3, 20))
    for given in ((0, ends), (ends, 40), (-3, 17), (5, 5)):
        tensors = tuple(torch.as_tensor(end) for end in given)
        results = (attend(**leaves, key_range=pair) for pair in (given, tensors))
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other)


def test_masks_of_every_shape(attend, small_tiles):
    leaves = draw_qkv(2, 19, 35, (4, 2), 8)
    full = (2, 4, 19, 35)
    for which in itertools.product((False, True), repeat=4):
        shape = [n if keep else 1 for n, keep in zip(full, which, strict=True)]
        mask = torch.rand(shape) < 0.6
        check(attend, attention64, leaves, mask=mask, causal=True)
    for ndim in range(4):
        check(attend, attention64, leaves, mask=torch.rand(full[4 - ndim :]) < 0.6)


# ---------------------------------------------------------------------------------------------
# Rows without a key


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["causal", "range", "mask", "bias", "no keys"])
@pytest.mark.parametrize("sink", [False, True])
def test_empty_rows(attend, dtype, kind, sink, small_tiles):
    sq, sk = 40, 0 if kind == "no keys" else 24
    options: dict[str, Any] = {
        "causal": {"causal": True},
        "range": {"key_range": (torch.zeros(1, 1).int(), (torch.arange(40) - 15)[None])},
        "mask": {"mask": (torch.arange(40) > 15)[:, None]},
        "bias": {},
        "no keys": {"mask": torch.ones(40, 1, dtype=torch.bool)},
    }[kind]
    leaves = draw_qkv(2, sq, sk, (4, 2), 8, dtype=dtype)
    leaves["alibi_slopes"] = draw(4, dtype=dtype, seed=4).abs()
    leaves["bias"] = draw(40, 1, dtype=dtype, seed=5)
    if kind == "bias":
        leaves["bias"][:16] = -INF
    if sink:
        leaves["sinks"] = draw(4, dtype=dtype, seed=6)
    out, lse, grads = check(attend, attention64, leaves, **options)
    empty = slice(0, 40 if kind == "no keys" else 16)
    assert (out[:, empty] == 0).all()
    assert (grads["q"][:, empty] == 0).all()
    assert (grads["bias"][empty] == 0).all()
    if sink:
        assert torch.equal(
            lse[0, :, empty].double(), leaves["sinks"].double()[:, None].expand_as(lse[0, :, empty])
        )
    else:
        assert (lse[:, :, empty] == -INF).all()
    assert all(g.isfinite().all() for g in grads.values())


def test_dsink_of_an_empty_row_is_dlse(attend):
    leaves = {**draw_qkv(1, 3, 0, 2, 8), "sinks": draw(2, seed=6)}
    dlse = draw(1, 2, 3, seed=7)
    grads = gradients(attend, leaves, draw(1, 3, 2, 8, seed=8), dlse)[2]
    close(grads["sinks"], dlse[0].sum(-1))


@pytest.mark.parametrize("upstream", [NAN, INF])
def test_what_arrives_at_an_empty_row_goes_nowhere(attend, upstream, small_tiles):
    leaves = {**draw_qkv(1, 40, 24, 2, 8), "bias": draw(40, 24, seed=5), "alibi_slopes": draw(2)}
    dout, dlse = draw(1, 40, 2, 8, seed=8), draw(1, 2, 40, seed=7)

    def grads() -> dict[str, Tensor]:
        x = {n: t.detach().requires_grad_() for n, t in leaves.items()}
        out, lse = attend(**x, causal=True)
        return dict(
            zip(x, torch.autograd.grad((out, lse), list(x.values()), (dout, dlse)), strict=True)
        )

    want = grads()
    dout[:, :16], dlse[:, :, :16] = upstream, upstream
    for name, gradient in grads().items():
        close(gradient, want[name])


# ---------------------------------------------------------------------------------------------
# NaN and infinity where nobody may see them

# 30 rows, 50 keys: the options, the keys that no row sees and the rows that see no key.
HIDDEN: dict[str, tuple[dict[str, Any], list[int], list[int]]] = {
    "range": (
        {"key_range": (torch.full((1, 1), 4), torch.full((1, 30), 45))},
        [0, 1, 2, 3, *range(45, 50)],
        [],
    ),
    "ranges per row": (
        {
            "key_range": (
                torch.arange(30)[None] + 3,
                torch.where(torch.arange(30) % 7 == 0, 0, torch.arange(30) + 10)[None],
            )
        },
        [0, 1, 2, 3, *range(39, 50)],
        list(range(0, 30, 7)),
    ),
    "key mask": ({"mask": torch.arange(50) % 7 != 0}, list(range(0, 50, 7)), []),
    "mask": (
        {"mask": (torch.arange(50) < 40) & (torch.arange(30) % 3 > 0)[:, None]},
        list(range(40, 50)),
        list(range(0, 30, 3)),
    ),
    "window": (
        {"window_size": (2, 3), "align": "top-left"},
        list(range(33, 50)),
        [],
    ),
    "causal": ({"causal": True, "align": "top-left"}, list(range(30, 50)), []),
    "bias": (
        {"bias": torch.zeros(30, 50).masked_fill(torch.arange(50) % 4 == 1, -INF)},
        list(range(1, 50, 4)),
        [],
    ),
    "bias and mask": (
        {
            "bias": torch.zeros(50).masked_fill(torch.arange(50) < 10, -INF),
            "mask": torch.arange(50) < 30,
        },
        [*range(10), *range(30, 50)],
        [],
    ),
}
STRANGE = [NAN, INF, -INF]


def spoiled(leaves: dict[str, Tensor], keys: list[int], rows: list[int], value: float) -> Any:
    out = {n: t.clone() for n, t in leaves.items()}
    out["k"][:, keys], out["v"][:, keys] = value, value
    out["q"][:, rows] = value
    return out


@pytest.mark.parametrize("kind", HIDDEN)
@pytest.mark.parametrize(
    ("value", "extra", "dtype"),
    [
        *((value, "plain", torch.float32) for value in STRANGE),
        (NAN, "everything", torch.float32),
        (INF, "everything", torch.bfloat16),
    ],
)
def test_hidden_values_never_leak(attend, kind, value, extra, dtype, small_tiles):
    options, keys, rows = HIDDEN[kind]
    options = dict(options)
    leaves = draw_qkv(2, 30, 50, (4, 2), 8, 6, dtype)
    if "bias" in options:
        leaves["bias"] = options.pop("bias")
    if extra == "everything":
        leaves["alibi_slopes"] = draw(4, seed=4).abs()
        leaves["sinks"] = draw(4, seed=6)
        options |= {"softcap": 3.0, "dropout_p": 0.2, "dropout_seed": 4}
    dout, dlse = draw(2, 30, 4, 6, seed=8), draw(2, 4, 30, seed=7)
    want = gradients(attend, leaves, dout, dlse, **options)
    got = gradients(attend, spoiled(leaves, keys, rows, value), dout, dlse, **options)
    close(got[0], want[0])
    close(got[1], want[1])
    for name in leaves:
        close(got[2][name], want[2][name], dtype, 4)
    assert (got[2]["k"][:, keys] == 0).all()
    assert (got[2]["v"][:, keys] == 0).all()
    assert (got[2]["q"][:, rows] == 0).all()


@pytest.mark.parametrize("kind", HIDDEN)
def test_hidden_values_never_leak_into_higher_derivatives(attend, kind):
    options, keys, rows = HIDDEN[kind]
    leaves = draw_qkv(1, 30, 50, (2, 1), 4, 3)
    moves = tuple(draw(*t.shape, seed=20 + i) for i, t in enumerate(leaves.values()))

    def derivatives(x: dict[str, Tensor]) -> list[Tensor]:
        tensors = tuple(t.detach().requires_grad_() for t in x.values())
        out, lse = attend(*tensors, **options)
        lse = torch.where(lse == -INF, 0.0, lse)
        first = torch.autograd.grad(out.sum() + lse.sum(), tensors, create_graph=True)
        loss = sum((g * m).sum() for g, m in zip(first, moves, strict=True))
        second = torch.autograd.grad(loss, tensors)
        plain = tuple(t.detach() for t in tensors)
        _, tangents = torch.func.jvp(lambda *t: attend(*t, **options), plain, moves)
        # The tangent of lse = −inf may be anything finite.
        return [*first, *second, tangents[0]]

    want = derivatives(leaves)
    for got, clean in zip(derivatives(spoiled(leaves, keys, rows, NAN)), want, strict=True):
        close(got, clean, factor=10)


@pytest.mark.parametrize("value", STRANGE)
def test_packed_tokens_of_no_sequence_never_leak(packed, value, small_tiles):
    leaves = draw_tokens(40, 60, (4, 2), 8, 6, torch.float32)
    cu_q, cu_k = [0, 7, 7, 31], [0, 20, 33, 50]
    options = {"cu_seqlens_q": torch.tensor(cu_q), "cu_seqlens_k": torch.tensor(cu_k)}
    dout, dlse = draw(40, 4, 6, seed=8), draw(4, 40, seed=7)
    x = {n: t.clone() for n, t in leaves.items()}
    x["q"][31:] = value
    for name in ("k", "v"):
        x[name][50:], x[name][20:33] = value, value  # sequence 1 has no queries
    dout[31:], dlse[:, 31:] = value, value
    got = [t.detach().requires_grad_() for t in x.values()]
    out, lse = packed(*got, causal=True, **options)
    grads = torch.autograd.grad((out, lse), got, (dout, dlse))
    assert (out[31:] == 0).all()
    assert (lse[:, 31:] == -INF).all()
    want, want_lse = varlen64(**leaves, cu_q=cu_q, cu_k=cu_k, causal=True)
    close(out, want, torch.float32)
    close(lse, want_lse, torch.float32)
    clean = gradients(
        functools.partial(varlen64, cu_q=cu_q, cu_k=cu_k),
        {n: t.double() for n, t in leaves.items()},
        dout.nan_to_num(0, 0, 0).double(),
        dlse.nan_to_num(0, 0, 0).double(),
        causal=True,
    )[2]
    for gradient, name in zip(grads, leaves, strict=True):
        close(gradient, clean[name], torch.float32, 4)
    assert (grads[0][31:] == 0).all()


@pytest.mark.parametrize("value", STRANGE)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (5, 0)}], ids=str)
def test_unseen_slots_and_pages_never_leak(paged, value, options):
    q, used = draw(3, 2, 4, 8), [13, 0, 32]
    k, v = draw(20, 4, 2, 8, seed=1), draw(20, 4, 2, 6, seed=2)
    table = torch.randperm(20)[: 3 * 6].reshape(3, 6)
    table = pad(table, (0, 2))
    table[2] = torch.randperm(20)[:8]
    want = paged64(q, k, v, table, used, **options)
    seen = torch.zeros(20, 4, dtype=torch.bool)
    for b, n in enumerate(used):
        first = max(0, n - 7) if "window_size" in options else 0
        for j in range(first, n):
            seen[table[b, j // 4], j % 4] = True
    k[~seen], v[~seen] = value, value
    # What lies past the tokens in use is not read, so the table may hold anything there.
    table[0, 4:], table[1] = -1, 10**6
    for dtype in (torch.int32, torch.int64):
        out, lse = paged(q, k, v, table.to(dtype), torch.tensor(used, dtype=dtype), **options)
        close(out, want[0], torch.float32)
        close(lse, want[1], torch.float32)


@pytest.mark.parametrize("value", STRANGE)
@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("kind", ["causal", "mask", "bias"])
def test_what_some_rows_see_stays_with_them(attend, value, which, kind, small_tiles):
    s, bad = 50, 20
    sees = torch.zeros(s, s, dtype=torch.bool)
    options: dict[str, Any] = {"causal": True}
    if kind != "causal":
        sees = torch.rand(s, s) < 0.5
        sees[:, 0] = True
        options = {"mask": sees}
        if kind == "bias":
            options = {"bias": torch.zeros(s, s).masked_fill(~sees, -INF)}
    else:
        sees = visible(s, s, True)
    leaves = draw_qkv(1, s, s, (2, 1), 8, 6)
    dout, dlse = draw(1, s, 2, 6, seed=8), draw(1, 2, s, seed=7)
    want = gradients(attend, leaves, dout, dlse, **options)
    leaves[which][:, bad] = value
    got = gradients(attend, leaves, dout, dlse, **options)
    affected = sees[:, bad]
    clean = ~affected
    close(got[0][:, clean], want[0][:, clean])
    close(got[1][:, :, clean], want[1][:, :, clean])
    close(got[2]["q"][:, clean], want[2]["q"][:, clean], factor=4)
    # Keys that none of the affected rows sees get a clean gradient.
    apart = ~(sees & affected[:, None]).any(0)
    for name in ("k", "v"):
        close(got[2][name][:, apart], want[2][name][:, apart], factor=4)
    if which == "v":
        assert (~got[0][:, affected].isfinite()).all()
        close(got[1], want[1])
    elif value != value:
        assert got[0][:, affected].isnan().all()
        assert got[1][:, :, affected].isnan().all()


def test_a_visible_nan_propagates(attend, small_tiles):
    for name in ("q", "k", "v"):
        leaves = draw_qkv(1, 30, 30, 1, 8)
        leaves[name][0, 3, 0, 2] = NAN
        out, lse = attend(**leaves)
        if name == "q":
            assert out[:, 3].isnan().all()
            assert out.isnan().sum() == 8
        elif name == "k":
            assert out.isnan().all()
            assert lse.isnan().all()
        else:
            assert out[..., 2].isnan().all()
            assert out.isnan().sum() == 30
            assert lse.isfinite().all()


# ---------------------------------------------------------------------------------------------
# The lowest number, and large ones


@pytest.mark.parametrize("dtype", DTYPES)
def test_finfo_min_is_a_number(attend, dtype, small_tiles):
    lowest = torch.finfo(dtype).min
    leaves = draw_qkv(2, 20, 40, (2, 1), 8, dtype=dtype)
    bias = torch.zeros(20, 40, dtype=dtype)
    bias[3] = lowest  # a row full of it: where it swallows q · k, a uniform softmax
    bias[5, 7:] = lowest
    bias[6, :39] = lowest
    out, lse, grads = check(attend, attention64, leaves, lse_gradient=False, bias=bias)
    if dtype != torch.float16:
        v = leaves["v"].double()
        close(out[:, 3], v.mean(1).expand(2, 2, 8), dtype)
    assert lse[:, :, 3].isfinite().all()
    assert all(g.isfinite().all() for g in grads.values())
    # In a mask of its own dtype −inf hides, also beside it.
    bias[3, 20:] = -INF
    out, lse, _ = check(attend, attention64, leaves, lse_gradient=False, bias=bias)
    if dtype != torch.float16:
        close(out[:, 3], v[:, :20].mean(1).expand(2, 2, 8), dtype)


def test_lowest_bias_that_overflows_with_the_product(attend):
    """lowest + s is −inf in the dtype of the sum: even so the row is not empty by a bias alone."""
    lowest = torch.finfo(torch.float32).min
    leaves = draw_qkv(1, 4, 6, 1, 8)
    bias = torch.full((4, 6), lowest)
    out, lse = attend(**leaves, bias=bias)
    close(out, leaves["v"].mean(1, keepdim=True).expand(1, 4, 1, 8))
    assert lse.isfinite().all()


def large(kind: str, size: float, sign: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Leaves whose logits are sign · size + c with small whole c: exact in float32, lse is not."""
    sq, sk, d = 3, 40, 4
    c = torch.randint(-3, 4, (sk,)).double()
    root = math.sqrt(size)
    q = torch.zeros(1, sq, 1, d, dtype=torch.float64)
    k = torch.zeros(1, sk, 1, d, dtype=torch.float64)
    q[..., 0], q[..., 1] = root, torch.tensor([[[1.0], [2.0], [-1.0]]])
    k[..., 0], k[..., 1] = sign * root, c[None, :, None]
    leaves = {"q": q, "k": k, "v": draw(1, sk, 1, 5, dtype=torch.float64, seed=3)}
    if kind == "bias":
        q[..., 0] = 0.0
        leaves["bias"] = torch.full((sk,), sign * size, dtype=torch.float64)
    if kind == "sink":
        leaves["sinks"] = torch.tensor([sign * size + 2], dtype=torch.float64)
    return {n: t.to(dtype if n in "qkv" else torch.float32) for n, t in leaves.items()}


def check_large(attend: Any, leaves: dict[str, Tensor], **options: Any) -> None:
    """As `check`, but gradients may be off by a rounding of their terms, large by column."""
    dout = draw(*leaves["q"].shape[:-1], leaves["v"].shape[-1], seed=8).to(leaves["q"].dtype)
    dlse = torch.zeros(leaves["q"].shape[0], leaves["q"].shape[2], leaves["q"].shape[1])
    got = gradients(attend, leaves, dout, dlse, **options)
    wide = {n: t.double() for n, t in leaves.items()}
    want = gradients(attention64, wide, dout.double(), dlse, **options)
    close(got[0], want[0], factor=4)
    close(got[1], want[1], torch.float32)
    size = 10 * TOLERANCE[leaves["q"].dtype] * (dout.double().abs().max() * wide["v"].abs().max())
    columns = {
        "q": size * options.get("scale", 1.0) * wide["k"].abs().amax((0, 1, 2)),
        "k": size * options.get("scale", 1.0) * wide["q"].abs().amax((0, 1, 2)),
    }
    for name, gradient in got[2].items():
        error = (gradient.double() - want[2][name]).abs()
        assert (error <= columns.get(name, size) + size).all(), f"{name}: {error.max()}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["product", "bias", "sink"])
@pytest.mark.parametrize("size", [2.0**10, 2.0**14, 2.0**20])
@pytest.mark.parametrize("sign", [1, -1])
def test_small_differences_of_large_logits(attend, dtype, kind, size, sign, monkeypatch):
    set_tiles(monkeypatch, 2, 16)
    check_large(attend, large(kind, size, sign, dtype), scale=1.0)


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("size", [300, 600, 900])
def test_lse_keeps_what_its_rounding_takes(attend, size, small, request):
    """Logits near a thousand, exact in float32: their lse is not, and would cost a part in 10⁵."""
    if small:
        request.getfixturevalue("small_tiles")
    q, k = torch.zeros(1, 64, 1, 2), torch.ones(1, 50, 1, 2)
    q[..., 0], q[..., 1] = size, torch.randint(-8, 9, (64, 1)) / 8
    k[..., 1] = torch.randint(-8, 9, (50, 1)) / 4
    leaves = {"q": q, "k": k, "v": draw(1, 50, 1, 2)}
    dout = torch.ones(1, 64, 1, 2)
    got = gradients(attend, leaves, dout, None, scale=1.0)[2]
    wide = {n: t.double() for n, t in leaves.items()}
    want = gradients(attention64, wide, dout.double(), None, scale=1.0)[2]
    assert ((got["v"] - want["v"]).abs() <= 3e-6 * want["v"].abs()).all()
    # Terms of dq reach a few units; what a row loses of delta alone shows in their sum.
    assert ((got["q"] - want["q"]).abs() <= 5e-6 * want["q"].abs().max()).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("magnitude", [1e4, 1e8, 1e15, 1e30])
def test_random_large_logits(attend, dtype, magnitude, small_tiles):
    root = math.sqrt(magnitude)
    leaves = {n: t.to(dtype) for n, t in draw_qkv(1, 40, 50, (2, 1), 8).items()}
    leaves["q"], leaves["k"] = leaves["q"] * root, leaves["k"] * root
    check_large(attend, leaves, causal=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("exponent", [7, 13, 25, 50, 60])
@pytest.mark.parametrize("sign", [1, -1])
def test_ties_of_large_logits(attend, dtype, exponent, sign, monkeypatch):
    """Equal logits share the row whatever their size: lse + log 2 may not be a float any more."""
    set_tiles(monkeypatch, 2, 4)
    base = draw(1, 1, 1, 8, dtype=torch.bfloat16) * 2.0**exponent
    q = base.expand(1, 3, 1, 8)
    k = torch.cat([base, 0 * base, -base, base, -base, base], 1) * sign
    leaves = {"q": q.to(dtype), "k": k.to(dtype), "v": draw(1, 6, 1, 8, seed=3).to(dtype)}
    check_large(attend, leaves)
    tied = [0, 3, 5] if sign == 1 else [2, 4]
    out, _ = attend(**leaves)
    close(out[0, :, 0], leaves["v"][0, tied, 0].double().mean(0).expand(3, 8), dtype)


def test_products_past_the_largest_float(backend):
    if backend == "reference":
        return  # computes in float32, where these products are infinite
    base = draw(1, 1, 1, 8) * 1e25
    k = torch.cat([base, 0 * base, -base, base], 1)
    leaves = {"q": base, "k": k, "v": draw(1, 4, 1, 8, seed=3)}
    out, grads = gradients(
        lambda **x: tilewise.attention(**x, return_lse=True, backend=backend),
        leaves,
        draw(1, 1, 1, 8, seed=4),
        None,
    )[::2]
    close(out[0, 0, 0], leaves["v"][0, [0, 3], 0].mean(0))
    close(grads["v"][0, :, 0], draw(1, 8, seed=4) * torch.tensor([0.5, 0, 0, 0.5])[:, None])


def test_folding_to_base_2_does_not_overflow(attend):
    """A logit near the largest float times log2 e would be infinite."""
    q = torch.full((1, 1, 1, 1), 2.0**63)
    k = torch.tensor([2.0**64, 2.0**63, 2.0**64]).view(1, 3, 1, 1)  # up to 2¹²⁷
    leaves = {"q": q, "k": k, "v": draw(1, 3, 1, 4)}
    for sign in (1, -1):
        leaves["q"] = sign * q
        out, lse = attend(**leaves, scale=1.0)
        v = leaves["v"][0, :, 0]
        want = (v[0] + v[2]) / 2 if sign == 1 else v[1]
        close(out[0, 0, 0], want)
        assert lse.isfinite().all()


# ---------------------------------------------------------------------------------------------
# Dropout


KNOWN = [
    # Counter and key, and what Philox-4x32 makes of them in 7 and in 10 rounds (Random123).
    (
        [0, 0, 0, 0],
        [0, 0],
        "5f6fb709 0d893f64 4f121f81 4f730a48",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        [0xFFFFFFFF] * 4,
        [0xFFFFFFFF] * 2,
        "5207ddc2 45165e59 4d8ee751 8c52f662",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        "4dfccaba 190a87f0 c47362ba b6b5242a",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


@pytest.mark.parametrize(("counter", "key", "seven", "ten"), KNOWN)
def test_philox_is_philox(counter, key, seven, ten):
    seed = key[0] | key[1] << 32
    seed -= 2**64 if seed >= 2**63 else 0
    for rounds, want in ((7, seven), (10, ten)):
        words = [int(word, 16) for word in want.split()]
        assert list(philox(tuple(counter), tuple(key), rounds)) == words
        counters = tuple(torch.tensor([c]) for c in counter)
        assert [int(w) for w in bits.philox(counters, torch.tensor(seed), rounds)] == words


def kept(call: Callable[..., Any], b: int, h: int, s: int, sk: int, **options: Any) -> Tensor:
    """What dropout keeps of (B, H, S, Sk) uniform probabilities."""
    q, k = torch.zeros(b, s, h, 2), torch.zeros(b, sk, h, 2)
    v = torch.eye(sk).view(1, sk, 1, sk).expand(b, sk, h, sk)
    return call(q, k, v, **options)[0].transpose(1, 2) * sk


@pytest.mark.parametrize("seed", [0, 1, -1, 2**40 + 3, -(2**62), 2**63 - 1])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_keeps_what_the_definition_keeps(attend, seed, p, small_tiles):
    want = keep64(p, seed, 2, 3, 9, 13)
    for given in (seed, torch.tensor(seed), torch.tensor([seed])):
        close(kept(attend, 2, 3, 9, 13, dropout_p=p, dropout_seed=given), want, torch.float32)


def test_dropout_does_not_depend_on_how_it_is_computed(attend, packed, paged, monkeypatch):
    options = {"dropout_p": 0.4, "dropout_seed": 12}
    b, h, s, sk = 3, 2, 17, 22
    want = keep64(0.4, 12, b, h, s, sk)
    for rows, keys in ((1, 1), (2, 7), (16, 3), (512, 1024)):
        set_tiles(monkeypatch, rows, keys)
        close(kept(attend, b, h, s, sk, **options), want, torch.float32)
    q, k = torch.zeros(b, s, h, 2), torch.zeros(b, sk, h, 2)
    v = torch.eye(sk).view(1, sk, 1, sk).expand(b, sk, h, sk)
    head_major = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    close(attend(*head_major, **options)[0].transpose(1, 2) * sk, want, torch.float32)
    # Key heads shared by query heads: the bits are the query head's.
    close(
        attend(q, k[:, :, :1], v[:, :, :1], **options)[0].transpose(1, 2) * sk, want, torch.float32
    )
    cu_q, cu_k = torch.arange(b + 1) * s, torch.arange(b + 1) * sk
    out, _ = packed(*(t.flatten(0, 1) for t in (q, k, v)), cu_q, cu_k, **options)
    close(out.unflatten(0, (b, s)).transpose(1, 2) * sk, want, torch.float32)
    pages = [t.flatten(0, 1).unflatten(0, (-1, 11)) for t in (k, v)]
    table = torch.arange(b * 2).reshape(b, 2)
    out, _ = paged(q, *pages, table, torch.full((b,), sk), **options)
    close(out.transpose(1, 2) * sk, want, torch.float32)


def test_dropout_of_ragged_sequences(packed, attend):
    """Rows and keys are numbered inside their sequence, as in a padded batch."""
    options = {"dropout_p": 0.4, "dropout_seed": 12}
    lengths_q, lengths_k = [5, 0, 9], [7, 3, 4]
    cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0) for n in (lengths_q, lengths_k))
    leaves = draw_tokens(14, 14, (2, 1), 8, 8, torch.float32)
    keep = [
        keep64(0.4, 12, 1, 2, n, m, number=s)
        for s, (n, m) in enumerate(zip(lengths_q, lengths_k, strict=True))
    ]
    check(
        functools.partial(packed, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **options),
        functools.partial(varlen64, cu_q=cu_q.tolist(), cu_k=cu_k.tolist(), keep=keep),
        leaves,
        factor=2,
    )
    padded = [torch.zeros(3, 9, 2, 8), torch.zeros(3, 7, 1, 8), torch.zeros(3, 7, 1, 8)]
    for s in range(3):
        padded[0][s, : lengths_q[s]] = leaves["q"][cu_q[s] : cu_q[s + 1]]
        padded[1][s, : lengths_k[s]] = leaves["k"][cu_k[s] : cu_k[s + 1]]
        padded[2][s, : lengths_k[s]] = leaves["v"][cu_k[s] : cu_k[s + 1]]
    key_range = (torch.zeros(3, 1).int(), torch.tensor(lengths_k)[:, None])
    want, _ = attend(*padded, key_range=key_range, **options)
    got, _ = packed(**leaves, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **options)
    for s in range(3):
        close(got[cu_q[s] : cu_q[s + 1]], want[s, : lengths_q[s]])


def test_dropout_statistics(attend):
    b, h, s = 4, 4, 64
    for p in (0.1, 0.5, 0.8):
        kept_ones = kept(attend, b, h, s, s, dropout_p=p, dropout_seed=3) > 0
        deviation = math.sqrt(p * (1 - p))
        for dims in ((0, 1, 2, 3), (1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2)):
            share = kept_ones.float().mean(dims)
            count = kept_ones.numel() / share.numel()
            assert ((share - (1 - p)).abs() < 5 * deviation / math.sqrt(count)).all()
        # Neighbours, heads, batch entries and seeds know nothing of each other.
        other = kept(attend, b, h, s, s, dropout_p=p, dropout_seed=4) > 0
        for a, c in (
            (kept_ones[..., 1:], kept_ones[..., :-1]),
            (kept_ones[..., 1:, :], kept_ones[..., :-1, :]),
            (kept_ones[:, 1:], kept_ones[:, :-1]),
            (kept_ones[1:], kept_ones[:-1]),
            (kept_ones, kept_ones.mT),
            (kept_ones, other),
        ):
            agree = (a == c).float().mean().item()
            assert agree == pytest.approx(p * p + (1 - p) ** 2, abs=0.02 if a is not c.mT else 0.03)


def test_dropout_seed_from_the_generator(attend):
    leaves = draw_qkv(1, 20, 20, 2, 8)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, second = (attend(**leaves, dropout_p=0.5)[0] for _ in range(2))
    assert not torch.equal(first, second)
    torch.set_rng_state(state)
    assert torch.equal(attend(**leaves, dropout_p=0.5)[0], first)
    # Nothing is drawn where nothing is dropped, or where the seed is given.
    for options in ({"dropout_p": 0.0}, {"dropout_p": 0.5, "dropout_seed": 3}, {}):
        state = torch.get_rng_state()
        attend(**leaves, **options)
        assert torch.equal(torch.get_rng_state(), state)


def test_dropout_of_nothing_and_of_everything(attend, small_tiles):
    leaves = draw_qkv(2, 20, 40, 2, 8)
    dout, dlse = draw(2, 20, 2, 8), draw(2, 2, 20)
    plain = gradients(attend, leaves, dout, dlse)
    none = gradients(attend, leaves, dout, dlse, dropout_p=0.0, dropout_seed=3)
    for a, b in zip((*plain[:2], *plain[2].values()), (*none[:2], *none[2].values()), strict=True):
        assert torch.equal(a, b)
    out, lse, grads = gradients(attend, leaves, dout, dlse, dropout_p=1, dropout_seed=3)
    assert (out == 0).all()
    close(lse, plain[1])
    assert (grads["v"] == 0).all()
    want = gradients(attend, leaves, None, dlse)[2]
    close(grads["q"], want["q"])
    close(grads["k"], want["k"])


# ---------------------------------------------------------------------------------------------
# Gradients of lse and of what adds to scores


@pytest.mark.parametrize("dtype", DTYPES)
def test_lse_is_differentiable(attend, dtype, small_tiles):
    leaves = draw_qkv(2, 37, 50, (4, 2), 12, 7, dtype)
    more, options = everything(2, 4, 37, 50, dtype)
    del more["sinks"]
    leaves |= more
    dlse = draw(2, 4, 37, dtype=torch.float64, seed=3)
    got = gradients(attend, leaves, None, dlse, **options)[2]
    wide = {n: t.double() for n, t in leaves.items()}
    want = gradients(attention64, wide, None, dlse, **options)[2]
    for name in leaves:
        close(got[name], want[name], dtype, 4)
    assert (got["v"] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bias_gradient_in_every_shape(attend, dtype, small_tiles):
    full = (2, 4, 19, 35)
    shapes = [
        [n if keep else 1 for n, keep in zip(full, which, strict=True)]
        for which in itertools.product((False, True), repeat=4)
    ]
    shapes += [list(full[4 - ndim :]) for ndim in range(4)]
    shapes += [[19, 1], [4, 1, 35], [1], [1, 1, 1]]
    for shape in shapes:
        for bias_dtype in {torch.float32, dtype}:
            leaves = draw_qkv(2, 19, 35, (4, 2), 8, dtype=dtype)
            leaves["bias"] = draw(*shape, dtype=bias_dtype, seed=9)
            check(attend, attention64, leaves, causal=True, factor=2)


def test_bias_gradient_of_an_expanded_bias(attend):
    leaves = {**draw_qkv(2, 9, 12, 4, 8), "bias": draw(12, seed=9)}

    def expanded(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda q, k, v, bias: function(q, k, v, bias=bias.expand(2, 4, 9, 12))

    check(expanded(attend), expanded(attention64), leaves)


@pytest.mark.parametrize("shape", list(itertools.product((1, 4), (1, 17), (1, 9))))
def test_packed_bias_in_every_shape(packed, shape, small_tiles):
    cu_q, cu_k = [0, 3, 3, 16], [0, 9, 14, 16]
    leaves = draw_tokens(17, 16, (4, 2), 8, 6, torch.float32)
    leaves["bias"] = draw(*shape, seed=9)
    options = {
        "mask": torch.rand(shape[::-1]).permute(2, 1, 0) < 0.8,
        "key_range": (torch.tensor([1]), torch.arange(17) % 8),
        "softcap": 3.0,
        "align": "top-left",
    }
    for slopes in (draw(4, seed=4).abs(), draw(3, 4, seed=4).abs()):
        leaves["alibi_slopes"] = slopes
        check(
            packed,
            functools.partial(varlen64, cu_q=cu_q, cu_k=cu_k),
            leaves,
            our_options={"cu_seqlens_q": torch.tensor(cu_q), "cu_seqlens_k": torch.tensor(cu_k)},
            **options,
        )


@pytest.mark.parametrize("slopes", [(4,), (2, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slopes_and_sinks_of_every_shape(attend, slopes, dtype, small_tiles):
    for own in (torch.float32, dtype):
        leaves = draw_qkv(2, 19, 35, (4, 2), 8, dtype=dtype)
        leaves["alibi_slopes"] = draw(*slopes, dtype=own, seed=3).abs()
        leaves["sinks"] = draw(4, dtype=own, seed=4)
        check(attend, attention64, leaves, factor=2)


def test_paged_options(paged):
    """What adds to scores, over pages: one batch entry at a time is the definition."""
    b, sq, hq, pages, size = 3, 5, 4, 7, 4
    k, v = draw(30, size, 2, 8, seed=1), draw(30, size, 2, 6, seed=2)
    q, table = draw(b, sq, hq, 8), torch.randperm(30)[: b * pages].reshape(b, pages)
    used = [28, 0, 9]
    more, options = everything(b, hq, sq, pages * size)
    options["key_range"] = (torch.randint(0, 4, (b, sq)), torch.randint(3, 28, (b, sq)))
    out, lse = paged(q, k, v, table, torch.tensor(used), **more, **options)
    for e, n in enumerate(used):
        one = slice(e, e + 1)
        own = {
            **options,
            "key_range": tuple(t[one] for t in options["key_range"]),
            "mask": options["mask"][..., :n],
            "bias": more["bias"][one, ..., :n],
            "alibi_slopes": more["alibi_slopes"][one],
            "sinks": more["sinks"],
        }
        keys, values = (gathered(t, table[e].tolist(), n) for t in (k, v))
        want, want_lse = attention64(q[one], keys, values, **own)
        close(out[one], want, torch.float32)
        close(lse[one], want_lse, torch.float32)


# ---------------------------------------------------------------------------------------------
# Plain calls, which PyTorch's own kernel may serve


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The tiled backend, for calls that PyTorch's kernel is to serve."""
    monkeypatch.setattr(flash, "onednn_wins", lambda: False)
    monkeypatch.setattr(flash, "FEWEST_ROWS_OF_A_GROUP", 1)

    def call(**arguments: Any) -> tuple[Tensor, Tensor]:
        assert "kernel" in tilewise.explain(**arguments, backend="tiled").config
        return tilewise.attention(**arguments, return_lse=True, backend="tiled")

    return call


PLAIN_SIZES = [(16, 16), (17, 40), (40, 17), (1, 300), (130, 130), (257, 200)]


@pytest.mark.parametrize("lengths", PLAIN_SIZES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lse_gradient", [False, True])
def test_plain_calls(kernel, lengths, causal, dtype, lse_gradient):
    if lengths[0] == 1 and dtype == torch.bfloat16:
        lengths = (33, 33)
    options = {"causal": causal, "align": "top-left", "lse_gradient": lse_gradient}
    for heads, head_major in (((2, 2), False), ((6, 2), True)):
        leaves = draw_qkv(2, *lengths, heads, 24, dtype=dtype, head_major=head_major)
        check(kernel, attention64, leaves, **options)
        check(kernel, attention64, leaves, scale=0.7, **options)


@pytest.mark.parametrize("value", STRANGE)
@pytest.mark.parametrize("which", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("where", [0, 16, 39])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strange_values_in_plain_calls(kernel, value, which, where, causal, dtype):
    """NaN and infinities go where the reference lets them go, to the last gradient."""
    leaves = draw_qkv(1, 40, 40, (2, 1), 8, dtype=dtype)
    dout = draw(1, 40, 2, 8, seed=8).to(dtype)
    {**leaves, "dout": dout}[which][0, where, 0, 3] = value
    reference = functools.partial(tilewise.attention, return_lse=True, backend="reference")
    results = []
    for call in (kernel, reference):
        x = {n: t.detach().requires_grad_() for n, t in leaves.items()}
        out, lse = call(**x, causal=causal)
        results.append((out, lse, *torch.autograd.grad(out, list(x.values()), dout)))
    for got, want in zip(*results, strict=True):
        close(got, want, dtype, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", STRANGE)
def test_hidden_values_in_plain_calls(kernel, dtype, value):
    leaves = draw_qkv(2, 20, 50, (2, 1), 8, dtype=dtype)
    options = {"causal": True, "align": "top-left"}
    dout, dlse = draw(2, 20, 2, 8, seed=8), draw(2, 2, 20, seed=7)
    want = gradients(kernel, leaves, dout, dlse, **options)
    got = gradients(kernel, spoiled(leaves, list(range(20, 50)), [], value), dout, dlse, **options)
    close(got[0], want[0])
    close(got[1], want[1])
    for name in leaves:
        close(got[2][name], want[2][name], dtype, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("magnitude", [1.0, 30.0, 1e3, 1e8, 1e30])
def test_large_logits_in_plain_calls(kernel, dtype, magnitude):
    root = math.sqrt(magnitude)
    leaves = draw_qkv(1, 40, 40, (2, 1), 8, dtype=dtype)
    leaves["q"], leaves["k"] = leaves["q"] * root, leaves["k"] * root
    leaves["k"][:, 20:] = leaves["k"][:, :20]  # a tie in many rows
    check_large(kernel, leaves, causal=True)


def test_plain_calls_rerun_bit_for_bit(kernel):
    leaves = draw_qkv(2, 130, 130, (4, 2), 16)
    dout = draw(2, 130, 4, 16)
    runs = [gradients(kernel, leaves, dout, None, causal=True) for _ in range(2)]
    for a, b in zip(*((*run[:2], *run[2].values()) for run in runs), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("width", [1, 3, 8, 17, 64, 100])
def test_plain_calls_of_any_width_and_strides(kernel, width):
    leaves = draw_qkv(1, 33, 47, 2, width)
    check(kernel, attention64, leaves)
    spread = {n: torch.cat([t, t], -1)[..., width:] for n, t in leaves.items()}
    check(kernel, attention64, spread)
    every_second = {n: torch.cat([t, t], 1)[:, ::2] for n, t in leaves.items()}
    check(kernel, attention64, every_second)
    shared = {**leaves, "k": leaves["k"][:, :, :1].expand(1, 47, 2, width)}
    check(kernel, attention64, shared)


# ---------------------------------------------------------------------------------------------
# Zero sizes


@pytest.mark.parametrize("zero", ["B", "Sq", "Sk", "H", "Sq Sk", "B H", "Hq alone"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("extra", [False, True])
def test_zero_sizes(attend, zero, dtype, extra):
    zeros = zero.split()
    b, sq, sk = (0 if name in zeros else n for name, n in (("B", 2), ("Sq", 3), ("Sk", 5)))
    hq = 0 if "H" in zeros or "Hq" in zeros else 4
    hkv = 0 if "H" in zeros else 2
    leaves = draw_qkv(b, sq, sk, (hq, hkv), 8, 6, dtype)
    options: dict[str, Any] = {}
    if extra:
        more, options = everything(b, hq, sq, sk, dtype)
        leaves |= more
        options |= {"key_range": (torch.zeros(b, sq).int(), torch.ones(b, sq).int())}
    out, lse, grads = check(attend, attention64, leaves, **options)
    assert out.shape == (b, sq, hq, 6)
    assert lse.shape == (b, hq, sq)
    if extra:
        dropped = attend(**leaves, **options, dropout_p=0.5)
        assert dropped[0].shape == out.shape
    assert all(g.shape == leaves[n].shape for n, g in grads.items())


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0], [3, 0]], ids=str)
@pytest.mark.parametrize("total", [0, 5])
def test_packed_zero_sizes(packed, lengths, total):
    if sum(lengths) > total:
        return
    cu = [0, *itertools.accumulate(lengths)]
    for heads in ((4, 2), (0, 0)):
        leaves = draw_tokens(total, total, heads, 8, 6, torch.float32)
        _, _, grads = check(
            packed,
            functools.partial(varlen64, cu_q=cu, cu_k=cu),
            leaves,
            our_options={f"cu_seqlens_{s}": torch.tensor(cu) for s in "qk"},
            causal=True,
        )
        for gradient in grads.values():
            assert (gradient[cu[-1] :] == 0).all()


@pytest.mark.parametrize("zero", ["B", "Sq", "H", "pages", "lengths", "columns"])
def test_paged_zero_sizes(paged, zero):
    b = 0 if zero == "B" else 2
    q = draw(b, 0 if zero == "Sq" else 3, 0 if zero == "H" else 4, 8)
    count = 0 if zero == "pages" else 6
    k, v = draw(count, 4, 0 if zero == "H" else 2, 8), draw(count, 4, 0 if zero == "H" else 2, 6)
    table = torch.arange(6).reshape(2, 3)[:b, : 0 if zero == "columns" else 3]
    used = [0, 0] if zero in ("pages", "lengths", "columns") else [5, 12]
    out, lse = paged(q, k, v, table, torch.tensor(used[:b], dtype=torch.int64), causal=True)
    assert out.shape == (*q.shape[:-1], 6)
    assert lse.shape == (b, q.shape[2], q.shape[1])
    if zero in ("pages", "lengths", "columns"):
        assert (out == 0).all()
        assert (lse == -INF).all()


# ---------------------------------------------------------------------------------------------
# Packed and paged calls are many dense ones


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"causal": True, "window_size": (6, 0)}], ids=str
)
@pytest.mark.parametrize("align", ["bottom-right", "top-left"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_sequences(packed, options, align, dtype, small_tiles):
    cu_q, cu_k = [0, 1, 36, 36, 60], [0, 33, 40, 70, 101]
    check(
        packed,
        functools.partial(varlen64, cu_q=cu_q, cu_k=cu_k),
        draw_tokens(65, 110, (4, 2), 12, 7, dtype),
        our_options={"cu_seqlens_q": torch.tensor(cu_q), "cu_seqlens_k": torch.tensor(cu_k)},
        align=align,
        **options,
    )


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"causal": True, "window_size": (6, 0)}], ids=str
)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_pages(paged, options, page_size):
    used = [37, 1, 48]
    pages = 48 // page_size
    k, v = (
        draw(3 * pages + 2, page_size, 2, 8, seed=1),
        draw(3 * pages + 2, page_size, 2, 6, seed=2),
    )
    table = torch.randperm(3 * pages + 2)[: 3 * pages].reshape(3, pages)
    for sq in (1, 5):
        q = draw(3, sq, 4, 8)
        want = paged64(q, k, v, table, used, **options)
        for splits in (None, 1, 2, 7):
            out, lse = paged(q, k, v, table, torch.tensor(used), num_splits=splits, **options)
            close(out, want[0], torch.float32)
            close(lse, want[1], torch.float32)


def test_pages_that_left_the_window_need_no_number(paged):
    q, k, v = draw(1, 2, 2, 8), draw(5, 4, 1, 8, seed=1), draw(5, 4, 1, 8, seed=2)
    table = torch.tensor([[-1, 10**6, 3, 1, 0]])
    options = {"window_size": (6, 0)}
    full = torch.tensor([[2, 4, 3, 1, 0]])
    for used in (17, 20):
        want = paged64(q, k, v, full, [used], **options)
        out, lse = paged(q, k, v, table, torch.tensor([used]), **options)
        close(out, want[0], torch.float32)
        close(lse, want[1], torch.float32)


def test_pages_may_be_shared(paged):
    k, v = draw(4, 4, 1, 8, seed=1), draw(4, 4, 1, 8, seed=2)
    table = torch.tensor([[0, 1, 2], [0, 1, 3], [2, 2, 2]])
    want = paged64(draw(3, 1, 2, 8), k, v, table, [12, 9, 11])
    out, _ = paged(draw(3, 1, 2, 8), k, v, table, torch.tensor([12, 9, 11]))
    close(out, want[0], torch.float32)


# ---------------------------------------------------------------------------------------------
# Autocast, determinism, accuracy, merge


@pytest.mark.parametrize("low", HALVES)
def test_autocast(backend, low):
    leaves = draw_qkv(2, 9, 12, (4, 2), 8)
    extra = {"bias": draw(9, 12, seed=4), "sinks": draw(4, seed=5), "alibi_slopes": draw(4, seed=6)}
    leaves |= extra

    def call(x: dict[str, Tensor]) -> Tensor:
        return tilewise.attention(**x, causal=True, backend=backend)

    def grads(x: dict[str, Tensor], cast: bool) -> list[Tensor]:
        x = {n: t.detach().requires_grad_() for n, t in x.items()}
        if cast:
            with torch.autocast("cpu", dtype=low):
                out = call(x)
        else:
            out = call({n: t.to(low) if n in "qkv" else t for n, t in x.items()})
        assert out.dtype == low
        return [out, *torch.autograd.grad(out.sum(), list(x.values()))]

    for got, want in zip(grads(leaves, True), grads(leaves, False), strict=True):
        assert torch.equal(got, want)
    for name, gradient in zip(leaves, grads(leaves, True)[1:], strict=True):
        assert gradient.dtype == torch.float32, name
    with torch.autocast("cpu", dtype=low):
        q, k, v = (t.transpose(1, 2) for t in draw_qkv(2, 9, 12, 4, 8).values())
        assert scaled_dot_product_attention(q, k, v).dtype == call(leaves).dtype
        mixed = {**leaves, "k": leaves["k"].to(low)}
        assert call(mixed).dtype == low
        wide = {n: t.double() for n, t in draw_qkv(2, 9, 12, 4, 8).items()}
        assert call(wide).dtype == torch.float64
        assert (
            tilewise.attention(**leaves, return_lse=True, backend=backend)[1].dtype == torch.float32
        )
        with torch.autocast("cpu", enabled=False):
            assert call(leaves).dtype == torch.float32
        tokens = draw_tokens(9, 9, (4, 2), 8, 8, torch.float32)
        cu = torch.tensor([0, 4, 9])
        assert tilewise.attention_varlen(**tokens, cu_seqlens_q=cu, cu_seqlens_k=cu).dtype == low
        pages = draw(4, 4, 2, 8)
        table, used = torch.tensor([[0, 1], [2, 3]]), torch.tensor([5, 8])
        out = tilewise.attention_paged(leaves["q"], pages, pages, table, used)
        assert out.dtype == low


@pytest.mark.parametrize("deterministic", [None, True, False])
def test_reruns_are_equal_bit_for_bit(attend, deterministic, small_tiles):
    leaves = draw_qkv(2, 37, 50, (4, 2), 12, 7)
    more, options = everything(2, 4, 37, 50)
    options |= {"dropout_p": 0.3, "dropout_seed": 5, "deterministic": deterministic}
    dout, dlse = draw(2, 37, 4, 7), draw(2, 4, 37)
    runs = [gradients(attend, leaves | more, dout, dlse, **options) for _ in range(3)]
    for run in runs[1:]:
        for a, b in zip(
            (*run[:2], *run[2].values()), (*runs[0][:2], *runs[0][2].values()), strict=True
        ):
            assert torch.equal(a, b)


def test_the_inputs_stay_as_they_are(attend, small_tiles):
    leaves = draw_qkv(2, 37, 50, (4, 2), 12, 7, torch.float64)
    more, options = everything(2, 4, 37, 50, torch.float64)
    given = leaves | more | {"mask": options.pop("mask")}
    copies = {n: t.clone() for n, t in given.items()}
    leaves = {n: t.requires_grad_() if t.is_floating_point() else t for n, t in given.items()}
    out, lse = attend(**leaves, **options)
    results = out.detach().clone(), lse.detach().clone()
    dout, dlse = draw(*out.shape, dtype=torch.float64), draw(*lse.shape, dtype=torch.float64)
    upstream = dout.clone(), dlse.clone()
    torch.autograd.grad((out, lse), [t for t in leaves.values() if t.requires_grad], (dout, dlse))
    for name, t in copies.items():
        assert torch.equal(given[name].detach(), t)
    assert torch.equal(out, results[0])
    assert torch.equal(lse, results[1])
    assert torch.equal(dout, upstream[0])
    assert torch.equal(dlse, upstream[1])


@pytest.mark.parametrize("lengths", [(300, 300), (129, 257), (1, 1000), (257, 31)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_float64_is_exact_to_1e_12(attend, lengths, causal):
    leaves = draw_qkv(1, *lengths, (4, 2), 24, 16, torch.float64)
    more, options = everything(1, 4, *lengths, torch.float64)
    check(attend, attention64, leaves, causal=causal, factor=1)
    check(attend, attention64, leaves | more, **(options | {"causal": causal}))


@pytest.mark.parametrize("dtype", DTYPES)
def test_merge_joins_any_parts(attend, dtype):
    leaves = draw_qkv(2, 9, 20, (4, 2), 8, 6, dtype)

    def merged(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        parts = [attend(q, k[:, p], v[:, p]) for p in (slice(0, 3), slice(3, 3), slice(3, 20))]
        out, lse = parts[0]
        for part in parts[1:]:
            out, lse = tilewise.merge(out, lse, *part)
        return out, lse

    check(merged, attention64, leaves, factor=2)


def test_merge_of_empty_parts_and_of_strange_ones():
    out, lse = draw(1, 3, 2, 4), draw(1, 2, 3)
    nothing = torch.full((1, 2, 3), -INF)
    for rest in (torch.zeros_like(out), torch.full_like(out, NAN)):
        for got in (
            tilewise.merge(out, lse, rest, nothing),
            tilewise.merge(rest, nothing, out, lse),
        ):
            assert torch.equal(got[0], out)
            assert torch.equal(got[1], lse)
        got = tilewise.merge(rest, nothing, rest, nothing)
        assert (got[0] == 0).all()
        assert (got[1] == -INF).all()
    huge = tilewise.merge(out, lse + 1e30, out + 2, lse * 0 + 1e30)
    assert huge[0].isfinite().all()


@pytest.mark.parametrize("shape", [(3, 2, 4), (5, 3, 2, 4), (2, 5, 3, 2, 4), (3, 4)], ids=str)
def test_merge_of_any_leading_shape(shape):
    lse_shape = (3,) if len(shape) == 2 else (*shape[:-3], shape[-2], shape[-3])
    given = [draw(*s, dtype=torch.float64, seed=i) for i, s in enumerate([shape, lse_shape] * 2)]
    out, lse = tilewise.merge(*given)
    a, b = given[1].exp(), given[3].exp()
    close(lse, (a + b).log())

    def beside(t: Tensor) -> Tensor:
        return (t.transpose(-1, -2) if t.ndim > 1 else t)[..., None]

    close(out, (beside(a) * given[0] + beside(b) * given[2]) / beside(a + b))
    tensors = [t.requires_grad_() for t in given]
    assert torch.autograd.gradcheck(tilewise.merge, tensors, fast_mode=True)
    assert torch.autograd.gradgradcheck(tilewise.merge, tensors, fast_mode=True)


@pytest.mark.parametrize("wanted", list(itertools.product((False, True), repeat=3)))
def test_gradients_of_some_of_the_scores(attend, wanted, small_tiles):
    """Those that nobody wants change nothing of the others."""
    leaves = draw_qkv(2, 19, 35, (4, 2), 8)
    scores = {"bias": draw(4, 19, 35), "alibi_slopes": draw(2, 4).abs(), "sinks": draw(4)}
    dout = draw(2, 19, 4, 8, seed=5)

    def run(which: tuple[bool, ...]) -> list[Any]:
        given = {n: t.detach().requires_grad_() for n, t in leaves.items()}
        given |= {
            n: t.detach().requires_grad_(on)
            for (n, t), on in zip(scores.items(), which, strict=True)
        }
        attend(**given, causal=True)[0].backward(dout)
        return [t.grad for t in given.values()]

    for got, want, is_wanted in zip(
        run(wanted), run((True,) * 3), (*(True,) * 3, *wanted), strict=True
    ):
        assert (got is not None) == is_wanted
        assert got is None or torch.allclose(got, want, rtol=1e-5, atol=1e-6)
