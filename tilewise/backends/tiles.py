"""Tiles of a dense problem: their sizes, views of the tensors, and what every pass does to a tile.

The query heads that share a key head lie side by side as rows of one product, so the operands of a
part (some batch entries and key heads) are stacks (N, rows, D) and (N, keys, D) with N = batch entries
· key heads, and row r is query r // G, head r % G of the group. The same numbers as a grid (batch, key
heads, queries, G, keys) are a view, in which masks, biases and slopes broadcast.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.backends.products import product_for
from tilewise.random import keep_mask, keep_scale
from tilewise.results import accumulation_dtype, scores_overflow
from tilewise.spec import ALL, Bounds, Problem, part_of

LOG2E = math.log2(math.e)
NEG_INF = float("-inf")
# A tile holds this many scores, 2 MB of float32. A band's edge wastes half a tile, so it has smaller ones.
TILE_SCORES, TILE_SCORES_IN_BAND = 512 * 1024, 256 * 1024
ROWS, ROWS_IN_BAND = 512, 256


def tile_shape(problem: Problem) -> tuple[int, int]:
    """Rows of a tile and its number of scores."""
    if problem.band.left is None and problem.band.right is None:
        return ROWS, TILE_SCORES
    return ROWS_IN_BAND, TILE_SCORES_IN_BAND


def parts(problem: Problem) -> Iterator[tuple[slice, slice, slice]]:
    """Batch entries, query heads and key heads that are worked on at once: enough to fill a tile."""
    b, sq, _, _ = problem.q.shape
    _, sk, hkv, _ = problem.k.shape
    g = problem.groups
    if not (b and sq and hkv and g):
        return
    _, area = tile_shape(problem)
    wanted = max(1, area // max(1, sq * g * sk))
    heads = min(hkv, wanted)
    batches = max(1, wanted // hkv)
    for b0 in range(0, b, batches):
        for h0 in range(0, hkv, heads):
            h1 = min(h0 + heads, hkv)
            yield slice(b0, min(b0 + batches, b)), slice(h0 * g, h1 * g), slice(h0, h1)


def few_rows(part: Problem) -> bool:
    """Whether a part's keys have more elements than scores: reading them is then most of the work."""
    return part.q.shape[1] * part.groups < part.k.shape[3]


class Where(NamedTuple):
    """A tile: rows i0 … i1 − 1, keys j0 … j1 − 1."""

    i0: int
    i1: int
    j0: int
    j1: int


class Edges(NamedTuple):
    """What a block of rows sees: its bounds, whether they leave a question, and with a key range
    lo ≤ j < hi by row."""

    bounds: Bounds
    partial: bool
    lo: Tensor | None = None
    hi: Tensor | None = None


class Tiles:
    """The tiles of one part: its sizes, views of its tensors, and what both passes do to a tile.

    A grid is a view (batch, key heads, queries, G, …) of a stack (N, rows, …).
    """

    def __init__(self, part: Problem, watched: bool = False) -> None:
        """`watched`: it is the scores that will tell of an overflow; nobody looked at the operands."""
        self.part, self.watched = part, watched
        self.dtype = accumulation_dtype(part.q.dtype)
        self.product = product_for(self.dtype, part.q.device)
        self._band_edges: dict[tuple[int, int, int, bool], Tensor] = {}
        self.batch, self.queries, _, width = part.q.shape
        self.kv_heads, self.groups = part.k.shape[2], part.groups
        self.stack = self.batch * self.kv_heads
        s = part.scores
        # Where nothing comes between, scores stay raw and the scale is folded into the exponent.
        self.plain = s.scale > 0 and s.softcap is None and s.alibi_slopes is None and s.bias is None
        self.exponent = (s.scale if self.plain else 1.0) * LOG2E
        rows, area = tile_shape(part)
        self.step = min(max(1, rows // self.groups), self.queries)
        tall = self.step * self.groups
        self.key_step = max(1, area // (self.stack * tall))
        # A backward pass holds keys and their gradients: where rows are few, it is they that fill it.
        taller = max(tall, (width + part.v.shape[-1]) // 4)
        self.backward_step = max(1, area // (self.stack * taller))

    def query_blocks(self) -> list[tuple[int, int]]:
        n = self.queries
        return [(i0, min(i0 + self.step, n)) for i0 in range(0, n, self.step)]

    def key_blocks(self, first: int, last: int, step: int) -> Iterator[tuple[int, int]]:
        for j0 in range(first, last, step):
            yield j0, min(j0 + step, last)

    def scratch(self) -> Tensor:
        """Room for the scores of one tile."""
        keys = min(self.key_step, self.part.k.shape[1])
        rows = self.step * self.groups
        return self.part.q.new_empty(self.stack * rows * keys, dtype=self.dtype)

    def query_grid(self, t: Tensor) -> Tensor:
        """The grid of a tensor (batch, queries, Hq, D)."""
        b, n, _, width = t.shape
        return t.view(b, n, self.kv_heads, self.groups, width).permute(0, 2, 1, 3, 4)

    def lse_grid(self, t: Tensor) -> Tensor:
        """The grid of a tensor (batch, Hq, queries)."""
        b, _, n = t.shape
        return t.view(b, self.kv_heads, self.groups, n).permute(0, 1, 3, 2)

    def grid(self, t: Tensor) -> Tensor:
        """The grid of a stack (N, rows, D)."""
        _, rows, width = t.shape
        return t.view(self.batch, self.kv_heads, rows // self.groups, self.groups, width)

    def query_stack(self, t: Tensor) -> Tensor:
        """(batch, queries, Hq, D) as a stack (N, rows, D) in the dtype of the arithmetic."""
        return self.query_grid(t).reshape(self.stack, -1, t.shape[-1]).to(self.dtype)

    def key_stack(self, t: Tensor) -> Tensor:
        """(batch, keys, Hkv, D) as a stack (N, keys, D), if possible a view.

        They are converted at once, or by the products where they are more than their scores.
        """
        stack = t.transpose(1, 2).reshape(self.stack, -1, t.shape[-1])
        return stack if few_rows(self.part) else stack.to(self.dtype)

    def of_lse(self, t: Tensor) -> Tensor:
        """A stack (N, rows, 1) as (batch, Hq, queries)."""
        return self.grid(t).squeeze(-1).permute(0, 1, 3, 2).flatten(1, 2)

    def lse_stack(self, t: Tensor) -> Tensor:
        """(batch, Hq, queries) as a stack (N, rows, 1)."""
        return self.lse_grid(t).reshape(self.stack, -1, 1)

    def sink_stack(self, rows: int) -> Tensor | None:
        """The sinks beside each row, (N, rows, 1)."""
        sinks = self.part.scores.sinks
        if sinks is None:
            return None
        grid = sinks.to(self.dtype).view(1, self.kv_heads, 1, self.groups)
        n = rows // self.groups
        return grid.expand(self.batch, -1, n, -1).reshape(self.stack, rows, 1)

    def tile_of(self, t: Tensor, at: Where) -> Tensor:
        """The tile of a bias or mask, as a grid that broadcasts where it does."""
        t = part_of(t, ALL, ALL, slice(at.i0, at.i1), slice(at.j0, at.j1))
        heads = (1, 1) if t.shape[1] == 1 else (self.kv_heads, self.groups)
        return t.unflatten(1, heads).transpose(2, 3)

    def distance(self, at: Where) -> Tensor:
        """|i + offset − j|, (queries, 1, keys)."""
        device = self.part.q.device
        offset = self.part.band.offset(self.queries, self.part.k.shape[1])
        i = torch.arange(at.i0 + offset, at.i1 + offset, device=device)
        j = torch.arange(at.j0, at.j1, device=device)
        return (i.view(-1, 1, 1) - j).abs().to(self.dtype)

    def slopes(self) -> Tensor | None:
        """The alibi slopes as a grid (batch or 1, key heads, 1, G, 1)."""
        slopes = self.part.scores.alibi_slopes
        if slopes is None:
            return None
        return slopes.to(self.dtype).view(-1, self.kv_heads, 1, self.groups, 1)

    def edges(self, i0: int, i1: int) -> Edges:
        bounds = self.part.bounds(i0, i1)
        partial = bounds.full_first > bounds.first or bounds.full_last < bounds.last
        if not partial or self.part.key_range is None:
            return Edges(bounds, partial)
        lo, hi = (t.view(-1, 1, i1 - i0, 1, 1) for t in self.part.interval(i0, i1))
        return Edges(bounds, partial, lo, hi)

    def hidden_by_mask(self, at: Where) -> bool:
        """Whether the boolean mask hides the whole tile."""
        mask = self.part.scores.mask
        return mask is not None and not bool(self.tile_of(mask, at).any())

    def logits(
        self, q: Tensor, k: Tensor, at: Where, edges: Edges, scratch: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Scores (N, rows, keys), −inf where hidden, and with a softcap the slope of the cap.

        They are raw, q · k, where the problem is plain, and final logits elsewhere.
        """
        scores = self.part.scores
        s = self.product.nt(q, k, scratch)
        if self.watched and scores_overflow(s, scores.scale):
            s.fill_(math.nan)  # no result
        grid = self.grid(s)
        slope = None
        if not self.plain:
            s.mul_(scores.scale)
            if scores.softcap is not None:
                s.div_(scores.softcap).tanh_()
                slope = 1 - s * s
                s.mul_(scores.softcap)
            slopes = self.slopes()
            if slopes is not None:
                grid.sub_(slopes * self.distance(at))
            if scores.bias is not None:
                grid.add_(self.tile_of(scores.bias, at))
        self._hide(grid, at, edges)
        return s, slope

    def _hide(self, grid: Tensor, at: Where, edges: Edges) -> None:
        """−inf outside the rows' intervals and the mask; a full tile is left alone."""
        late, early = max(edges.bounds.full_last, at.j0), min(edges.bounds.full_first, at.j1)
        if edges.partial and late < at.j1:
            self._hide_edge(grid[..., late - at.j0 :], at.i0, late, edges.hi, early=False)
        if edges.partial and early > at.j0:
            self._hide_edge(grid[..., : early - at.j0], at.i0, at.j0, edges.lo, early=True)
        if self.part.scores.mask is not None:
            mask = self.tile_of(self.part.scores.mask, at)
            if not bool(mask.all()):
                grid.masked_fill_(~mask, NEG_INF)

    def _hide_edge(self, grid: Tensor, i0: int, j0: int, limit: Tensor | None, early: bool) -> None:
        """−inf at the keys from j0 on that come before (`early`) or after what a row sees."""
        if limit is not None:
            keys = torch.arange(j0, j0 + grid.shape[-1], device=grid.device)
            grid.masked_fill_(keys < limit if early else keys >= limit, NEG_INF)
            return
        # The edge of a band looks the same in every block: key b of row a is hidden by b − a alone.
        left, right, _ = self.part.band
        position = i0 + self.part.band.offset(self.queries, self.part.k.shape[1]) - j0
        first = position - (left or 0) if early else position + (right or 0) + 1
        n, width = grid.shape[2], grid.shape[4]
        shape = (n, width, first, early)
        if shape not in self._band_edges:
            edge = grid.new_full((n, width), NEG_INF)
            edge = (edge.tril_(first - 1) if early else edge.triu_(first)).unsqueeze(1)
            if len(self._band_edges) == 8:
                self._band_edges.clear()
            self._band_edges[shape] = edge
        grid.add_(self._band_edges[shape])

    def exponentials(self, s: Tensor, shift: Tensor) -> Tensor:
        """2^(c·s + shift) in place, c being `exponent`: one pass for scale, base and maximum."""
        return torch.add(shift, s, alpha=self.exponent, out=s).exp2_()

    def kept(self, p: Tensor, at: Where) -> Tensor | None:
        """Which probabilities dropout keeps, as 0 and 1 / (1 − p) in a stack like p."""
        dropout, device = self.part.dropout, p.device
        if dropout is None:
            return None
        head = torch.arange(self.kv_heads * self.groups, device=device) + dropout.head
        entry = torch.arange(self.batch, device=device) + dropout.sequence
        keep = keep_mask(
            dropout.p,
            dropout.seed,
            entry.view(-1, 1, 1, 1, 1),
            head.view(self.kv_heads, 1, self.groups, 1),
            torch.arange(at.i0, at.i1, device=device).view(-1, 1, 1),
            range(at.j0, at.j1),
        )
        return (keep.to(self.dtype) * keep_scale(dropout.p)).view(p.shape)
