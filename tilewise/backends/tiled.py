"""Tiles in PyTorch: what runs on a CPU, and on any device that PyTorch knows. O(n) in memory.

A dense problem is cut into parts (batch entries × key heads), a part into tiles of query rows × keys.
The query heads that share a key head lie side by side as rows of one product, so a part's operands
are (N, rows, D) and (N, keys, D) with N = batch entries · key heads and row r = query r // G, head
r % G of the group. A tile's scores are made in one product, turned into probabilities in place, and
used up by the next; tile sizes keep them in the cache.

Plain calls go to PyTorch's own flash kernel where that is faster (`flash.py`). For all others, two
paths lead to the same result. The fast one folds the scale into base-2 exponents and multiplies
hidden probabilities, which are 0, with whatever their values hold. Its result says when that was not
good enough — something is not finite, or lse is so large that rounding it matters — and those rows
are computed again by the exact formula of `dense.py`, a few rows at a time in float64.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise import dense
from tilewise.arguments import DTYPES
from tilewise.backends import flash
from tilewise.backends.bands import cut_of, pieces
from tilewise.backends.products import product_for
from tilewise.backends.tiles import LOG2E, NEG_INF, Tiles, Where, few_rows, parts, tile_shape
from tilewise.results import (
    SCORE_NAMES,
    Gradients,
    Result,
    accumulation_dtype,
    products_overflow,
    result_shapes,
    zero_gradients,
)
from tilewise.spec import Problem, Scores, sequences

# Beyond this |lse|, rounding the scores loses more than a part in 10⁴ of exp(s − lse).
LARGEST_LSE = 1024.0
SPLITS_LSE = DTYPES


def unsupported(problem: Problem) -> list[str]:
    return []


def config(problem: Problem) -> dict[str, Any]:
    """The sides of a tile, and where its products are computed."""
    if flash.serves(problem):
        return {"kernel": "PyTorch's flash kernel"}
    rows, scores = tile_shape(problem)
    shape: dict[str, Any] = {"rows": rows, "keys": scores // rows}
    if problem.packed is None and problem.paged is None and problem.q.numel():
        cut = cut_of(problem.part(slice(0, 1), slice(0, 1)))
        if cut is not None:
            rows = cut.queries * problem.groups
            shape = {"blocks": scores // (rows * cut.keys), "rows": rows, "keys": cut.keys}
    product = product_for(accumulation_dtype(problem.q.dtype), problem.q.device)
    shape["product"] = product.name
    if problem.q.is_cpu:
        shape["PyTorch's kernel"] = f"no ({', '.join(_not_plain(problem)) or 'tiles are faster'})"
    return shape


def _not_plain(problem: Problem) -> list[str]:
    """What PyTorch's flash kernel does not know, or not well enough."""
    q, k, v = problem.q, problem.k, problem.v
    scores, band = problem.scores, problem.band
    dense = problem.packed is None and problem.paged is None
    other_band = dense and flash._is_causal(problem) is None
    window = band.left is not None or band.right not in (None, 0)
    asked = {
        **{name: getattr(scores, name) is not None for name in scores._fields if name != "scale"},
        "scale": scores.scale <= 0,
        "key_range": problem.key_range is not None,
        "dropout": problem.dropout is not None,
        "packed": problem.packed is not None,
        "pages": problem.paged is not None,
        "window": other_band and window,
        "causal, lengths differ": other_band and not window,
        "float64": q.dtype == torch.float64,
        "Dv is not D": q.shape[-1] != v.shape[-1],
        "few keys": dense and k.shape[1] < flash.FEWEST_KEYS,
        "strides": any(t.stride(-1) != 1 for t in (q, k, v)),
    }
    return [name for name, there in asked.items() if there]


def forward(problem: Problem) -> Result:
    """out, laid out like q, and lse."""
    if flash.serves(problem):
        result = flash.forward(problem)
        if result is not None:
            return result
    out_shape, lse_shape = result_shapes(problem)
    out = problem.q.new_zeros(out_shape)
    lse = problem.q.new_full(lse_shape, NEG_INF, dtype=torch.float64)
    for sequence in sequences(problem):
        o, m = sequence.of_q(out), sequence.of_lse(lse)
        for batch, heads, kv_heads in parts(sequence.problem):
            part = sequence.problem.part(batch, kv_heads)
            _forward_part(part, o[batch, :, heads], m[batch, heads])
    return Result.rounded(out, lse, accumulation_dtype(out.dtype))


def backward(
    problem: Problem,
    result: Result,
    dout: Tensor,
    dlse: Tensor | None,
    wanted: Collection[str] = SCORE_NAMES,
) -> Gradients:
    """Gradients of q, k, v and of the bias, slopes and sinks that there are, of those if wanted."""
    if dlse is None and flash.serves(problem):
        gradients = flash.backward(problem, result, dout)
        if gradients is not None:
            return gradients
    grads = zero_gradients(problem, wanted)
    for sequence in sequences(problem):
        whole, do, g = result.of(sequence), sequence.of_q(dout), grads.of(sequence)
        dm = None if dlse is None else sequence.of_lse(dlse)
        for batch, heads, kv_heads in parts(sequence.problem):
            _backward_part(
                sequence.problem.part(batch, kv_heads),
                whole.part(batch, heads),
                do[batch, :, heads],
                None if dm is None else dm[batch, heads],
                g.part(batch, kv_heads, sequence.problem.groups),
            )
    return grads.finished(problem)


def _forward_part(part: Problem, out: Tensor, lse: Tensor) -> None:
    """Writes out (b, Sq, Hq, Dv) and float64 lse (b, Hq, Sq) of one part."""
    cut = cut_of(part)
    watched = cut is None and few_rows(part)
    if not watched and products_overflow(part):
        _forward_exactly(part, 0, part.q.shape[1], out, lse)
        return
    if cut is None:
        _forward_tiles(part, out, lse, watched)
        return
    for piece in pieces(part, cut):
        o, m = piece.of_rows(out), piece.of_lse(lse)
        for blocks, _, heads in parts(piece.problem):
            _forward_tiles(piece.problem.part(blocks, heads), o[blocks], m[blocks])


def _forward_tiles(part: Problem, out: Tensor, lse: Tensor, watched: bool = False) -> None:
    tiles = Tiles(part, watched)
    scratch = tiles.scratch()
    k, v = tiles.key_stack(part.k), tiles.key_stack(part.v)
    for i0, i1 in tiles.query_blocks():
        o, m = _forward_rows(tiles, i0, i1, k, v, scratch)
        if _trustworthy(o, m):
            tiles.query_grid(out[:, i0:i1]).copy_(tiles.grid(o))
            tiles.lse_grid(lse[:, :, i0:i1]).copy_(tiles.grid(m).squeeze(-1))
        else:
            _forward_exactly(part, i0, i1, out, lse)


def _forward_exactly(part: Problem, i0: int, i1: int, out: Tensor, lse: Tensor) -> None:
    for r0, r1, exact, exact_lse in dense.forward_in_blocks(part, i0, i1, torch.float64):
        out[:, r0:r1], lse[:, :, r0:r1] = exact, exact_lse


def _forward_rows(
    tiles: Tiles, i0: int, i1: int, k: Tensor, v: Tensor, scratch: Tensor
) -> tuple[Tensor, Tensor]:
    """out (N, rows, Dv) and float64 lse (N, rows, 1) of rows i0 … i1 − 1 by the online softmax."""
    q = tiles.query_stack(tiles.part.q[:, i0:i1])
    edges = tiles.edges(i0, i1)
    so_far = None
    for j0, j1 in tiles.key_blocks(edges.bounds.first, edges.bounds.last, tiles.key_step):
        at = Where(i0, i1, j0, j1)
        if tiles.hidden_by_mask(at):
            continue
        s, _ = tiles.logits(q, k[:, j0:j1], at, edges, scratch)
        m = s.amax(-1, keepdim=True)
        if so_far is not None:
            m = torch.maximum(m, so_far.m)
        # A row without a key so far has m = −inf; its terms, all 0, need any base.
        base = torch.mul(m, -tiles.exponent).clamp_(max=torch.finfo(m.dtype).max)
        p = tiles.exponentials(s, base)
        l = p.sum(-1, keepdim=True)
        kept = tiles.kept(p, at)
        if kept is not None:
            p.mul_(kept)
        values = v[:, j0:j1]
        if so_far is None:
            acc = tiles.product.nn(p, values)
        else:
            # By the bases themselves, which are rounded, so that old and new terms have one base.
            rebase = torch.sub(base, so_far.base).exp2_()
            l.add_(so_far.l.mul_(rebase))
            acc = so_far.acc.mul_(rebase)
            tiles.product.add_nn(acc, p, values)
        so_far = _Running(m, base, l, acc)
    if so_far is None:
        nothing = q.new_zeros((*q.shape[:2], v.shape[-1] + 1))
        l, acc = nothing[..., :1], nothing[..., 1:]
        so_far = _Running(l + NEG_INF, l, l, acc)
    return _normalised(so_far, tiles.sink_stack(q.shape[1]))


class _Running(NamedTuple):
    """The state of the online softmax: with p = 2^(c·s + base), l = Σ p and acc = Σ p·v."""

    m: Tensor
    base: Tensor
    l: Tensor
    acc: Tensor


def _normalised(finished: _Running, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """out and float64 lse of finished rows, with the sink's share in the sum."""
    m, base, l, acc = finished
    # l is about 1 or more, unless the row is empty or all of its terms vanished in rounding: then its
    # base is huge, and lse says so.
    l = l.clamp(min=torch.finfo(l.dtype).tiny)
    lse = l.double().log().sub_(base, alpha=math.log(2)).masked_fill_(m == NEG_INF, NEG_INF)
    if sink is not None:
        total = torch.logaddexp(lse, sink.double())
        l = l * (total - lse).exp_().to(l.dtype)
        lse = total
    return acc.div_(l), lse


def _trustworthy(out: Tensor, lse: Tensor) -> bool:
    """Whether the fast path's rows are right: finite, lse moderate or that of an empty row."""
    if not math.isfinite(float(out.sum())):
        return False
    low, high = (float(t) for t in torch.aminmax(lse))
    if low > -LARGEST_LSE and high < LARGEST_LSE:
        return True
    return low == NEG_INF and _moderate(lse)


def _moderate(lse: Tensor) -> bool:
    """Whether exp(s − lse) is accurate: every lse is −inf or moderate, none is NaN."""
    return bool(((lse.abs() < LARGEST_LSE) | (lse == NEG_INF)).all())


def _backward_part(
    part: Problem, result: Result, dout: Tensor, dlse: Tensor | None, grads: Gradients
) -> None:
    """Writes the gradients of q, k, v of one part and adds those of bias, slopes and sinks."""
    sums = _zero_like(grads.scores)
    fast = _moderate(result.lse) and not products_overflow(part)
    if not (fast and _backward_fast(part, result, dout, dlse, grads, sums)):
        sums = _zero_like(grads.scores)
        step = dense.rows_at_once(part.q.shape[0] * part.q.shape[2], part.k.shape[1])
        exact = grads._replace(scores=sums)
        dense.backward_in_blocks(part, dout, dlse, exact, torch.float64, step)
    for name in SCORE_NAMES:
        total, share = getattr(grads.scores, name), getattr(sums, name)
        if total is not None:
            total.add_(share)


def _backward_fast(
    part: Problem,
    result: Result,
    dout: Tensor,
    dlse: Tensor | None,
    grads: Gradients,
    sums: Scores,
) -> bool:
    """By tiles, of the part or of its pieces. Says whether the result is finite."""
    cut = cut_of(part)
    if cut is None:
        return _backward_tiles(part, result, dout, dlse, grads, sums)
    dk, dv = (_sum_of(g) for g in (grads.k, grads.v))
    for piece in pieces(part, cut):
        out, do, dq = (piece.of_rows(t) for t in (result.out, dout, grads.q))
        lse, low = piece.of_lse(result.lse), piece.of_lse(result.lse_low)
        dm = None if dlse is None else piece.of_lse(dlse)
        for blocks, _, heads in parts(piece.problem):
            problem = piece.problem.part(blocks, heads)
            share = Gradients(
                dq[blocks], torch.empty_like(problem.k), torch.empty_like(problem.v), sums
            )
            done = _backward_tiles(
                problem,
                Result(out[blocks], lse[blocks], low[blocks]),
                do[blocks],
                None if dm is None else dm[blocks],
                share,
                sums,
            )
            if not done:
                return False
            piece.add_to_keys(dk, share.k, blocks)
            piece.add_to_keys(dv, share.v, blocks)
    for gradient, total in ((grads.k, dk), (grads.v, dv)):
        if gradient is not total:
            gradient.copy_(total)
    return True


def _sum_of(gradient: Tensor) -> Tensor:
    """Zeros to add to: the gradient itself, or one in the dtype of the arithmetic."""
    dtype = accumulation_dtype(gradient.dtype)
    return gradient if gradient.dtype == dtype else torch.zeros_like(gradient, dtype=dtype)


def _zero_like(scores: Scores) -> Scores:
    given = {name: getattr(scores, name) for name in SCORE_NAMES}
    zeros: dict[str, Any] = {n: torch.zeros_like(t) for n, t in given.items() if t is not None}
    return scores._replace(**zeros)


def _backward_tiles(
    part: Problem,
    result: Result,
    dout: Tensor,
    dlse: Tensor | None,
    grads: Gradients,
    sums: Scores,
) -> bool:
    """The fast backward: key blocks outside, query blocks inside. Says whether its result is finite."""
    tiles = Tiles(part)
    dtype, scale = tiles.dtype, part.scores.scale
    sums_of_rows = sums.alibi_slopes is not None or sums.sinks is not None
    delta = _delta(tiles, result.out, dout, sums_of_rows)
    if dlse is not None:
        delta = delta - tiles.lse_stack(dlse)
    shift, factor = _shift_and_factor(tiles, result)
    sink = tiles.sink_stack(shift.shape[1])
    if sink is not None and sums.sinks is not None:
        p_sink = torch.exp2(torch.add(shift, sink, alpha=LOG2E)) * factor
        sums.sinks.sub_(tiles.grid(p_sink * delta).sum((0, 2, 4)).flatten())

    # P = factor · 2^(c·s + shift) is a factor of both dV and dS: it goes into dO and delta.
    delta_p = delta * factor
    blocks = [(i0, i1, tiles.edges(i0, i1)) for i0, i1 in tiles.query_blocks()]
    q, do = (t.to(dtype) if len(blocks) > 1 else t for t in (part.q, dout))
    all_k, all_v = tiles.key_stack(part.k), tiles.key_stack(part.v)
    dq = _sum_of(grads.q)
    scratch, scratch_dp = tiles.scratch(), tiles.scratch()
    total = 0.0
    for start, stop in tiles.key_blocks(0, part.k.shape[1], tiles.backward_step):
        k, v = (t[:, start:stop].to(dtype) for t in (all_k, all_v))
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        for i0, i1, edges in blocks:
            j0, j1 = max(start, edges.bounds.first), min(stop, edges.bounds.last)
            at = Where(i0, i1, j0, j1)
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


def _shift_and_factor(tiles: Tiles, result: Result) -> tuple[Tensor, Tensor]:
    """−(lse + lse_low) · log2 e as a rounded number and 2^(what rounding took), each (N, rows, 1).

    An empty row's shift is −inf: 2^−inf = 0, it has no probabilities.
    """
    lse = tiles.lse_stack(result.lse).double() + tiles.lse_stack(result.lse_low)
    exact = lse.masked_fill_(lse == NEG_INF, -NEG_INF).mul_(-LOG2E)
    shift = exact.to(tiles.dtype)
    low = (exact - shift).masked_fill_(exact == NEG_INF, 0)
    return shift, low.exp2_().to(tiles.dtype)


def _delta(tiles: Tiles, out: Tensor, dout: Tensor, summed: bool) -> Tensor:
    """rowsum(dO ∘ O) beside each row, (N, rows, 1).

    The gradients of slopes and sinks are sums over all rows, in which O's rounding to a low precision
    would show: for them (`summed`) O is computed once more.
    """
    part = tiles.part
    anew = summed and out.dtype != tiles.dtype
    scratch = tiles.scratch() if anew else None
    k, v = tiles.key_stack(part.k), tiles.key_stack(part.v)
    deltas = []
    for i0, i1 in tiles.query_blocks():
        if scratch is not None:
            o, _ = _forward_rows(tiles, i0, i1, k, v, scratch)
        else:
            o = tiles.query_stack(out[:, i0:i1])
        deltas.append((tiles.query_stack(dout[:, i0:i1]) * o).sum(-1, keepdim=True))
    return torch.cat(deltas, 1)


def _add_score_gradients(tiles: Tiles, ds: Tensor, at: Where, sums: Scores) -> None:
    """Adds a tile's share of the gradients of bias and slopes."""
    if sums.bias is not None:
        tile = tiles.tile_of(sums.bias, at)
        tile.add_(tiles.grid(ds).sum_to_size(tile.shape))
    if sums.alibi_slopes is not None:
        slopes = -(tiles.grid(ds) * tiles.distance(at)).sum((2, 4)).flatten(1)
        sums.alibi_slopes.add_(slopes.sum(0) if sums.alibi_slopes.ndim == 1 else slopes)
