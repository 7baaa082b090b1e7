"""A kernel that gives, for many problems at once, what kernels/score.py says of their rows and tiles.

To be imported where Triton is interpreted: what kernels take for numbers are vectors here, one element for
each problem.
"""

import triton
import triton.language as tl

from tilewise.kernels import score


@triton.jit
def probe(
    problems,
    start,
    end,
    out,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr,
):
    """problems: (6, N) with sq, sk, left, right and a tile's first and last row or key + 1; start, end:
    (N, ROWS) or None; out: (2 · ROWS + 12, N) for lo, hi, then the bounds of the tile of rows, the bounds of
    the tile of keys, and the walks of the former in steps of 2."""
    n = tl.arange(0, N)
    sq = tl.load(problems + n)
    sk = tl.load(problems + N + n)
    left = tl.load(problems + 2 * N + n) if LEFT else None
    right = tl.load(problems + 3 * N + n) if RIGHT else None
    i0 = tl.load(problems + 4 * N + n)
    i1 = tl.load(problems + 5 * N + n)
    zero = n * 0
    offset = sk - sq if BOTTOM_RIGHT else zero
    at = score.Place(zero, True, zero, 0, n.to(tl.int64) * ROWS, 0, sq, sk, offset)
    band = score.Band(left, right, BOTTOM_RIGHT)
    first = None if start is None else score.Lines(start, 0, 0, 1)
    last = None if end is None else score.Lines(end, 0, 0, 1)
    spec = score.Spec(None, band, None, first, last, None, None, False, True)

    numbers = tl.arange(0, ROWS)[:, None] + zero[None, :]
    rows = score.interval(numbers, at, spec)
    at_rows = out + numbers * N + n[None, :]
    tl.store(at_rows, rows.lo)
    tl.store(at_rows + ROWS * N, rows.hi)
    out += 2 * ROWS * N
    edges = score.bounds(i0, i1, numbers, at, spec)
    _store(edges, out, n, N)
    _store(score.bounds_of_keys(i0, i1, at, spec), out + 4 * N, n, N)
    _store(score.walks(edges, 2, False), out + 8 * N, n, N)


@triton.jit
def places(
    cu_seqlens_q, cu_seqlens_k, count, total_q, total_k, out, tiles, KEYS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """out: (2, tiles): the first token of each tile along the queries (KEYS: the keys), and the one after the
    last token of its sequence. Grid: (tiles,)."""
    tile = tl.program_id(0)
    sizes = score.Sizes(total_q, total_k, 1, 1, 1)
    packed = score.Packed(cu_seqlens_q, cu_seqlens_k, count, 16)
    spec = score.Spec(
        sizes, score.Band(None, None, False), None, None, None, None, packed, False, True
    )
    at = score.place(tile, tile, spec, BLOCK, KEYS)
    start, length = (at.start_k, at.sk) if KEYS else (at.start_q, at.sq)
    tl.store(out + tile, start + at.tile_start)
    tl.store(out + tiles + tile, start + length)


@triton.jit
def _store(edges, out, n, N: tl.constexpr):
    tl.store(out + n, edges.first)
    tl.store(out + N + n, edges.full_first)
    tl.store(out + 2 * N + n, edges.full_last)
    tl.store(out + 3 * N + n, edges.last)
