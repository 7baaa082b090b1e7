"""A narrow band as a batch of short problems.

Where each row sees a window of its own, a tile of many rows is hidden for the most part, and one of few
rows is little work for a call. So the rows whose windows are whole are cut into short blocks, each with
the keys that it sees: a dense problem whose batch entries are the blocks. They all look alike, and many
of them fit into one tile. Their keys overlap in memory: they are views, nothing is copied.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from tilewise.backends.tiles import tile_shape
from tilewise.results import accumulation_dtype
from tilewise.spec import Band, Problem

# Rows of a block; query heads that share a key head lie side by side.
ROWS = 64
# Fewer blocks are not worth it, nor are windows so wide that fewer fill a tile.
FEWEST_BLOCKS = 4


class Piece(NamedTuple):
    """Consecutive rows of a part with one batch entry and key head, as a problem of their own.

    Its batch entries are blocks of rows from `first` on, and their keys from `first_key` on.
    """

    problem: Problem
    first: int
    first_key: int

    def of_rows(self, t: Tensor) -> Tensor:
        """The blocks of a tensor laid out like the part's q: (blocks, queries, Hq, D)."""
        blocks, queries = self.problem.q.shape[:2]
        return t[0, self.first : self.first + blocks * queries].unflatten(0, (blocks, queries))

    def of_lse(self, t: Tensor) -> Tensor:
        """The blocks of a tensor laid out like the part's lse: (blocks, Hq, queries)."""
        blocks, queries = self.problem.q.shape[:2]
        rows = t[0, :, self.first : self.first + blocks * queries]
        return rows.unflatten(1, (blocks, queries)).transpose(0, 1)

    def add_to_keys(self, total: Tensor, share: Tensor, blocks: slice) -> None:
        """Adds what belongs to the keys of some blocks to a tensor laid out like the part's k."""
        queries, keys = self.problem.q.shape[1], share.shape[1]
        first = self.first_key + blocks.start * queries
        for j0 in range(0, keys, queries):  # so much of them does not overlap
            part = share[:, j0 : j0 + queries]
            blocks_of = _overlapping(total, first + j0, part.shape[0], part.shape[1], queries)
            blocks_of.add_(part)


class Cut(NamedTuple):
    """Where a part is cut: `blocks` of `queries` rows each, which see `keys`, from row `first` on."""

    first: int
    blocks: int
    queries: int
    keys: int


def cut_of(part: Problem) -> Cut | None:
    """How a part with a narrow band is cut; None if that is not worthwhile."""
    left, right, _ = part.band
    s = part.scores
    others = (s.mask, s.bias, s.alibi_slopes, part.key_range, part.dropout)
    (b, sq, _, _), (_, sk, kv_heads, _) = part.q.shape, part.k.shape
    if b * kv_heads != 1 or left is None or right is None or any(t is not None for t in others):
        return None
    queries = max(1, ROWS // part.groups)
    keys = queries + left + right
    offset = part.band.offset(sq, sk)
    first, last = max(0, left - offset), min(sq, sk - right - offset)
    blocks = (last - first) // queries
    _, scores = tile_shape(part)
    fitting = scores // (queries * part.groups * keys)
    if min(blocks, fitting) < FEWEST_BLOCKS:
        return None
    return Cut(last - blocks * queries, blocks, queries, keys)


def pieces(part: Problem, cut: Cut) -> list[Piece]:
    """The blocks, and what rows there are before and after them."""
    dtype = accumulation_dtype(part.q.dtype)
    whole = part._replace(k=part.k.to(dtype), v=part.v.to(dtype))  # many blocks read them
    first, blocks, queries, _ = cut
    last = first + blocks * queries
    cuts = ((0, 1, first), (first, blocks, queries), (last, 1, part.q.shape[1] - last))
    return [_piece(whole, *c) for c in cuts if c[2]]


def _piece(part: Problem, first: int, blocks: int, queries: int) -> Piece:
    left, right, _ = part.band
    assert left is not None
    assert right is not None
    first_key, _, _, stop = part.bounds(first, first + queries)
    offset = first + part.band.offset(part.q.shape[1], part.k.shape[1]) - first_key
    k, v = (_overlapping(t, first_key, blocks, stop - first_key, queries) for t in (part.k, part.v))
    q = part.q[0, first : first + blocks * queries].unflatten(0, (blocks, queries))
    band = Band(left - offset, right + offset, "top-left")
    return Piece(part._replace(q=q, k=k, v=v, band=band), first, first_key)


def _overlapping(t: Tensor, first: int, blocks: int, keys: int, step: int) -> Tensor:
    """(blocks, keys, 1, D): in a (1, Sk, 1, D) tensor, the keys of blocks that begin `step` apart."""
    span = t[0, first : first + (blocks - 1) * step + keys]
    return span.unfold(0, keys, step).permute(0, 3, 1, 2)
