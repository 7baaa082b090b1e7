"""Tiles in PyTorch: what runs on a CPU, and on any device that PyTorch knows. O(n) in memory.

A dense problem is cut into parts (batch entries × key heads), a part into tiles of query rows × keys.
The query heads that share a key head lie side by side as rows of one product, so a part's operands
are (N, rows, D) and (N, keys, D) with N = batch entries · key heads and row r = query r // G, head
r % G of the group. A tile's scores are made in one product, turned into probabilities in place, and
used up by the next; tile sizes keep them in the cache.

Two paths lead to the same result. The fast one folds the scale into base-2 exponents and multiplies
hidden probabilities, which are 0, with whatever their values hold. Its result says when that was not
good enough — something is not finite, or lse is so large that rounding it matters — and those rows
are computed again by the exact formula of `dense.py`, a few rows at a time in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise import dense
from tilewise.backends.products import product_for
from tilewise.random import keep_mask, keep_scale
from tilewise.results import (
    Gradients,
    Result,
    accumulation_dtype,
    empty_result,
    zero_gradients,
)
from tilewise.spec import ALL, Bounds, Problem, Scores, part_of, sequences

LOG2E = math.log2(math.e)
NEG_INF = float("-inf")
# A tile holds this many scores, 2 MB of float32. A band's edge wastes half a tile, so it has smaller ones.
TILE_SCORES, TILE_SCORES_IN_BAND = 512 * 1024, 256 * 1024
ROWS, ROWS_IN_BAND = 512, 256
# Beyond this |lse|, rounding the scores loses more than a part in 10⁴ of exp(s − lse).
LARGEST_LSE = 1024.0
SPLITS_LSE = True


def unsupported(problem: Problem) -> list[str]:
    return []


def config(problem: Problem) -> dict[str, Any]:
    """The sides of a tile, and where its products are computed."""
    banded = problem.band.left is not None or problem.band.right is not None
    rows = ROWS_IN_BAND if banded else ROWS
    area = TILE_SCORES_IN_BAND if banded else TILE_SCORES
    product = product_for(accumulation_dtype(problem.q.dtype), problem.q.device)
    return {"rows": rows, "keys": area // rows, "product": product.name}


def forward(problem: Problem) -> Result:
    """out, laid out like q, and lse."""
    result = empty_result(problem, SPLITS_LSE)
    for sequence in sequences(problem):
        whole = result.of(sequence)
        for batch, heads, kv_heads in _parts(sequence.problem):
            part = sequence.problem.part(batch, kv_heads)
            _forward_part(part, whole.part(batch, heads))
    return result


def backward(
    problem: Problem,
    result: Result,
    dout: Tensor,
    dlse: Tensor | None,
    bias_grad: bool = True,
) -> Gradients:
    """Gradients of q, k, v and of the bias (if wanted), slopes and sinks that there are."""
    grads = zero_gradients(problem, bias_grad)
    for sequence in sequences(problem):
        whole, do, g = result.of(sequence), sequence.of_q(dout), grads.of(sequence)
        dm = None if dlse is None else sequence.of_lse(dlse)
        for batch, heads, kv_heads in _parts(sequence.problem):
            _backward_part(
                sequence.problem.part(batch, kv_heads),
                whole.part(batch, heads),
                do[batch, :, heads],
                None if dm is None else dm[batch, heads],
                g.part(batch, kv_heads, sequence.problem.groups),
            )
    return grads.finished(problem)


def _parts(problem: Problem) -> Iterator[tuple[slice, slice, slice]]:
    """Batch entries, query heads and key heads that are worked on at once: enough to fill a tile."""
    b, sq, _, _ = problem.q.shape
    _, sk, hkv, _ = problem.k.shape
    g = problem.groups
    if not (b and sq and hkv and g):
        return
    wanted = max(1, TILE_SCORES // max(1, sq * g * sk))
    heads = min(hkv, wanted)
    batches = max(1, wanted // hkv)
    for b0 in range(0, b, batches):
        for h0 in range(0, hkv, heads):
            h1 = min(h0 + heads, hkv)
            yield slice(b0, min(b0 + batches, b)), slice(h0 * g, h1 * g), slice(h0, h1)


class _Where(NamedTuple):
    """A tile: rows i0 … i1 − 1, keys j0 … j1 − 1."""

    i0: int
    i1: int
    j0: int
    j1: int


class _Edges(NamedTuple):
    """What a block of rows sees: its bounds and, where they are not all, lo ≤ j < hi of each row."""

    bounds: Bounds
    lo: Tensor
    hi: Tensor


class _Tiles:
    """The tiles of one part: its sizes, views of its tensors, and what both passes do to a tile.

    A grid is a view (batch, key heads, queries, G, …) of a stack (N, rows, …).
    """

    def __init__(self, part: Problem) -> None:
        self.part = part
        self.dtype = accumulation_dtype(part.q.dtype)
        self.product = product_for(self.dtype, part.q.device)
        self.batch, self.queries, _, width = part.q.shape
        self.kv_heads, self.groups = part.k.shape[2], part.groups
        self.stack = self.batch * self.kv_heads
        s = part.scores
        # Where nothing comes between, scores stay raw and the scale is folded into the exponent.
        self.plain = s.scale > 0 and s.softcap is None and s.alibi_slopes is None and s.bias is None
        self.exponent = (s.scale if self.plain else 1.0) * LOG2E
        banded = part.band.left is not None or part.band.right is not None
        rows = ROWS_IN_BAND if banded else ROWS
        self.step = min(max(1, rows // self.groups), self.queries)
        area = TILE_SCORES_IN_BAND if banded else TILE_SCORES
        taller = max(self.step * self.groups, width, part.v.shape[-1])
        self.key_step = max(1, area // (self.stack * taller))

    def query_blocks(self) -> list[tuple[int, int]]:
        n = self.queries
        return [(i0, min(i0 + self.step, n)) for i0 in range(0, n, self.step)]

    def key_blocks(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        for j0 in range(first, last, self.key_step):
            yield j0, min(j0 + self.key_step, last)

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
        """(batch, keys, Hkv, D) as a stack (N, keys, D) in the dtype of the arithmetic."""
        return t.transpose(1, 2).reshape(self.stack, -1, t.shape[-1]).to(self.dtype)

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

    def tile_of(self, t: Tensor, at: _Where) -> Tensor:
        """The tile of a bias or mask, as a grid that broadcasts where it does."""
        t = part_of(t, ALL, ALL, slice(at.i0, at.i1), slice(at.j0, at.j1))
        heads = (1, 1) if t.shape[1] == 1 else (self.kv_heads, self.groups)
        return t.unflatten(1, heads).transpose(2, 3)

    def distance(self, at: _Where) -> Tensor:
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

    def edges(self, i0: int, i1: int) -> _Edges:
        lo, hi = (t.view(-1, 1, i1 - i0, 1, 1) for t in self.part.interval(i0, i1))
        return _Edges(self.part.bounds(i0, i1), lo, hi)

    def hidden_by_mask(self, at: _Where) -> bool:
        """Whether the boolean mask hides the whole tile."""
        mask = self.part.scores.mask
        return mask is not None and not bool(self.tile_of(mask, at).any())

    def logits(
        self, q: Tensor, k: Tensor, at: _Where, edges: _Edges, scratch: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Scores (N, rows, keys), −inf where hidden, and with a softcap the slope of the cap.

        They are raw, q · k, where the problem is plain, and final logits elsewhere.
        """
        scores = self.part.scores
        s = self.product.nt(q, k, scratch)
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

    def _hide(self, grid: Tensor, at: _Where, edges: _Edges) -> None:
        """−inf outside the rows' intervals and the mask; a full tile is left alone."""
        bounds, device = edges.bounds, grid.device
        late = max(bounds.full_last, at.j0)
        if late < at.j1:
            keys = torch.arange(late, at.j1, device=device)
            grid[..., late - at.j0 :].masked_fill_(keys >= edges.hi, NEG_INF)
        early = min(bounds.full_first, at.j1)
        if early > at.j0:
            keys = torch.arange(at.j0, early, device=device)
            grid[..., : early - at.j0].masked_fill_(keys < edges.lo, NEG_INF)
        if self.part.scores.mask is not None:
            mask = self.tile_of(self.part.scores.mask, at)
            if not bool(mask.all()):
                grid.masked_fill_(~mask, NEG_INF)

    def exponentials(self, s: Tensor, shift: Tensor) -> Tensor:
        """2^(c·s + shift) in place, c being `exponent`: one pass for scale, base and maximum."""
        return torch.add(shift, s, alpha=self.exponent, out=s).exp2_()

    def kept(self, p: Tensor, at: _Where) -> Tensor | None:
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


def _forward_part(part: Problem, result: Result) -> None:
    """Writes the result of one part."""
    tiles = _Tiles(part)
    blocks, scratch = tiles.query_blocks(), tiles.scratch()
    # Keys that several query blocks will read are converted once; others as they pass by.
    k, v = (t.to(tiles.dtype) if len(blocks) > 1 else t for t in (part.k, part.v))
    for i0, i1 in blocks:
        out, lse = _forward_rows(tiles, i0, i1, k, v, scratch)
        if _trustworthy(part, out, lse, i0, i1):
            rows = result.rows(i0, i1)
            tiles.query_grid(rows.out).copy_(tiles.grid(out))
            rows.set_lse(tiles.of_lse(lse))
        else:
            for r0, r1, exact_out, exact_lse in dense.forward_in_blocks(part, i0, i1, torch.float64):
                rows = result.rows(r0, r1)
                rows.out.copy_(exact_out)
                rows.set_lse(exact_lse)


def _forward_rows(
    tiles: _Tiles, i0: int, i1: int, k: Tensor, v: Tensor, scratch: Tensor
) -> tuple[Tensor, Tensor]:
    """out (N, rows, Dv) and float64 lse (N, rows, 1) of rows i0 … i1 − 1 by the online softmax."""
    q = tiles.query_stack(tiles.part.q[:, i0:i1])
    edges = tiles.edges(i0, i1)
    m = q.new_full((*q.shape[:2], 1), NEG_INF)
    # A row without a key so far has m = −inf and shift = +inf.
    shift, l = torch.full_like(m, -NEG_INF), torch.zeros_like(m)
    acc = None
    for j0, j1 in tiles.key_blocks(edges.bounds.first, edges.bounds.last):
        at = _Where(i0, i1, j0, j1)
        if tiles.hidden_by_mask(at):
            continue
        s, _ = tiles.logits(q, tiles.key_stack(k[:, j0:j1]), at, edges, scratch)
        m = torch.maximum(m, s.amax(-1, keepdim=True))
        shift_before, shift = shift, m * -tiles.exponent
        base = shift.masked_fill(m == NEG_INF, 0)
        p = tiles.exponentials(s, base)
        # By the shifts themselves, which are rounded, so that old and new terms have one base.
        rebase = torch.sub(base, shift_before).exp2_()
        l = l.mul_(rebase).add_(p.sum(-1, keepdim=True))
        kept = tiles.kept(p, at)
        if kept is not None:
            p.mul_(kept)
        values = tiles.key_stack(v[:, j0:j1])
        if acc is None:
            acc = tiles.product.nn(p, values)
        else:
            tiles.product.add_nn(acc.mul_(rebase), p, values)
    if acc is None:
        acc = q.new_zeros((*q.shape[:2], v.shape[-1]))
    return _normalised(acc, shift, l, tiles.sink_stack(q.shape[1]))


def _normalised(acc: Tensor, shift: Tensor, l: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """out and float64 lse of finished rows, whose sums l are of 2^(c·s + shift), and the sink's."""
    lse = l.double().log().sub_(shift.double(), alpha=math.log(2))
    empty = l == 0
    if sink is not None:
        total = torch.logaddexp(lse, sink.double())
        l = l * (total - lse).exp_().to(l.dtype)
        lse = total
    return acc.div_(l.masked_fill_(empty, 1)), lse


def _trustworthy(part: Problem, out: Tensor, lse: Tensor, i0: int, i1: int) -> bool:
    """Whether the fast path's rows are right: finite, lse moderate, and −inf only in empty rows."""
    if not math.isfinite(float(out.sum())):
        return False
    if float(lse.amin()) == NEG_INF and not _empties_explained(part, lse, i0, i1):
        return False
    return _moderate(lse)


def _moderate(lse: Tensor) -> bool:
    """Whether exp(s − lse) is accurate: every lse is −inf or moderate, none is NaN."""
    return bool(((lse.abs() < LARGEST_LSE) | (lse == NEG_INF)).all())


def _empties_explained(part: Problem, lse: Tensor, i0: int, i1: int) -> bool:
    """Whether no row has lse = −inf because its logits overflowed."""
    s = part.scores
    if s.mask is not None or s.bias is not None:
        if part.k.numel() == 0:
            return True
        largest = float(part.q.abs().amax()) * float(part.k.abs().amax())
        return largest * part.q.shape[-1] * max(1.0, abs(s.scale)) < 1e37
    lo, hi = part.interval(i0, i1)
    grid = (part.q.shape[0], part.k.shape[2], i1 - i0, part.groups)
    empty = (hi <= lo).view(-1, 1, i1 - i0, 1).expand(grid)
    return torch.equal(empty.reshape(lse.shape), lse == NEG_INF)


def _backward_part(
    part: Problem, result: Result, dout: Tensor, dlse: Tensor | None, grads: Gradients
) -> None:
    """Writes the gradients of q, k, v of one part and adds those of bias, slopes and sinks."""
    sums = _zero_like(grads.scores)
    if not (_moderate(result.lse) and _backward_tiles(part, result, dout, dlse, grads, sums)):
        sums = _zero_like(grads.scores)
        step = dense.rows_at_once(part.q.shape[0] * part.q.shape[2], part.k.shape[1])
        exact = grads._replace(scores=sums)
        dense.backward_in_blocks(part, dout, dlse, exact, torch.float64, step)
    for total, share in zip(grads.scores, sums, strict=True):
        if isinstance(total, Tensor):
            total.add_(share)


def _zero_like(scores: Scores) -> Scores:
    return Scores(*(torch.zeros_like(t) if isinstance(t, Tensor) else t for t in scores))


def _backward_tiles(
    part: Problem,
    result: Result,
    dout: Tensor,
    dlse: Tensor | None,
    grads: Gradients,
    sums: Scores,
) -> bool:
    """The fast backward: key blocks outside, query blocks inside. Says whether its result is finite."""
    tiles = _Tiles(part)
    dtype, scale = tiles.dtype, part.scores.scale
    delta = _delta(tiles, result.out, dout)
    if dlse is not None:
        delta = delta - tiles.lse_stack(dlse)
    shift, factor = _shift_and_factor(tiles, result)
    if sums.sinks is not None:
        sink = tiles.sink_stack(shift.shape[1])
        p_sink = torch.exp2(torch.add(shift, sink, alpha=LOG2E)) * factor
        sums.sinks.sub_(tiles.grid(p_sink * delta).sum((0, 2, 4)).flatten())

    # P = factor · 2^(c·s + shift) is a factor of both dV and dS: it goes into dO and delta.
    delta_p = delta * factor
    blocks = [(i0, i1, tiles.edges(i0, i1)) for i0, i1 in tiles.query_blocks()]
    q, do = (t.to(dtype) if len(blocks) > 1 else t for t in (part.q, dout))
    dq = grads.q if grads.q.dtype == dtype else torch.zeros_like(grads.q, dtype=dtype)
    scratch, scratch_dp = tiles.scratch(), tiles.scratch()
    total = 0.0
    for start, stop in tiles.key_blocks(0, part.k.shape[1]):
        k, v = (tiles.key_stack(t[:, start:stop]) for t in (part.k, part.v))
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        for i0, i1, edges in blocks:
            j0, j1 = max(start, edges.bounds.first), min(stop, edges.bounds.last)
            at = _Where(i0, i1, j0, j1)
            if j0 >= j1 or tiles.hidden_by_mask(at):
                continue
            rows = slice(i0 * tiles.groups, i1 * tiles.groups)
            keys = slice(j0 - start, j1 - start)
            q_i, do_i = tiles.query_stack(q[:, i0:i1]), tiles.query_stack(do[:, i0:i1])
            do_i = do_i * factor[:, rows]
            s, slope = tiles.logits(q_i, k[:, keys], at, edges, scratch)
            p = tiles.exponentials(s, shift[:, rows])
            dp = tiles.product.nt(do_i, v[:, keys], scratch_dp)
            kept = tiles.kept(p, at)
            if kept is not None:
                dp.mul_(kept)
            ds = dp.sub_(delta_p[:, rows]).mul_(p)
            if kept is not None:
                p.mul_(kept)
            tiles.product.add_tn(dv[:, keys], p, do_i)
            _add_score_gradients(tiles, ds, at, sums)
            if slope is not None:
                ds.mul_(slope)
            tiles.product.add_tn(dk[:, keys], ds, q_i)
            dq_i = tiles.grid(tiles.product.nn(ds, k[:, keys]))
            tiles.query_grid(dq[:, i0:i1]).add_(dq_i, alpha=scale)
        dk.mul_(scale)
        for gradient, block in ((grads.k, dk), (grads.v, dv)):
            grid = block.view(tiles.batch, tiles.kv_heads, *block.shape[1:])
            gradient[:, start:stop].transpose(1, 2).copy_(grid)
            total += float(block.sum())
    if dq is not grads.q:
        grads.q.copy_(dq)
    return math.isfinite(total + float(dq.sum()))


def _shift_and_factor(tiles: _Tiles, result: Result) -> tuple[Tensor, Tensor]:
    """−(lse + lse_low) · log2 e as a rounded number and 2^(what rounding took), each (N, rows, 1).

    An empty row's shift is −inf: 2^−inf = 0, it has no probabilities.
    """
    lse = tiles.lse_stack(result.lse).double() + tiles.lse_stack(result.lse_low)
    exact = lse.masked_fill_(lse == NEG_INF, -NEG_INF).mul_(-LOG2E)
    shift = exact.to(tiles.dtype)
    low = (exact - shift).masked_fill_(exact == NEG_INF, 0)
    return shift, low.exp2_().to(tiles.dtype)


def _delta(tiles: _Tiles, out: Tensor, dout: Tensor) -> Tensor:
    """rowsum(dO ∘ O) beside each row, (N, rows, 1).

    The gradients of slopes and sinks are sums over all rows, in which O's rounding to a low precision
    would show: for them O is computed once more.
    """
    part = tiles.part
    sums = part.scores.alibi_slopes is not None or part.scores.sinks is not None
    anew = sums and out.dtype != tiles.dtype
    scratch = tiles.scratch() if anew else None
    deltas = []
    for i0, i1 in tiles.query_blocks():
        if scratch is not None:
            o, _ = _forward_rows(tiles, i0, i1, part.k, part.v, scratch)
        else:
            o = tiles.query_stack(out[:, i0:i1])
        deltas.append((tiles.query_stack(dout[:, i0:i1]) * o).sum(-1, keepdim=True))
    return torch.cat(deltas, 1)


def _add_score_gradients(tiles: _Tiles, ds: Tensor, at: _Where, sums: Scores) -> None:
    """Adds a tile's share of the gradients of bias and slopes."""
    if sums.bias is not None:
        tile = tiles.tile_of(sums.bias, at)
        tile.add_(tiles.grid(ds).sum_to_size(tile.shape))
    if sums.alibi_slopes is not None:
        slopes = -(tiles.grid(ds) * tiles.distance(at)).sum((2, 4)).flatten(1)
        sums.alibi_slopes.add_(slopes.sum(0) if sums.alibi_slopes.ndim == 1 else slopes)
