"""The formula of attention on a block of query rows against all keys, in plain PyTorch.

This is the definition that everything else is held to. All rows at once make the reference backend;
a few rows at a time, it is O(n) in memory and serves where exactness or generality matters more than
speed: the tiled backend's exact path, and every derivative beyond the first.

Tensors here have heads first, (B, H, S, D), key heads already repeated for their query heads, and
the dtype of the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.random import keep_mask, keep_scale
from tilewise.results import Gradients
from tilewise.spec import Dropout, Problem, rows_of

NEG_INF = float("-inf")
# How many scores a block of rows may hold: a few MB, whatever the length.
BLOCK_SCORES = 1 << 18


class Operands(NamedTuple):
    """What is differentiated: q (B, Hq, n, D) and bias hold the block's rows, the rest is whole."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None


class Rows(NamedTuple):
    """The block's rows: interval lo ≤ j < hi (B or 1, n), number i of each (n,), mask."""

    lo: Tensor
    hi: Tensor
    number: Tensor
    mask: Tensor | None


class Formula(NamedTuple):
    """The constants of the formula; `offset` is where row 0 stands among the keys."""

    scale: float
    softcap: float | None
    offset: int
    dropout: Dropout | None


class BlockGradients(NamedTuple):
    """Gradients of `Operands`."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None


Product = Callable[[Tensor, Tensor, Tensor], Tensor]


def exact(t: Tensor) -> Tensor:
    """No rounding."""
    return t


def plain_product(a: Tensor, b: Tensor, seen: Tensor) -> Tensor:
    """a @ b; entries of a that are not seen are 0, so a NaN they meet in b leaks."""
    return a @ b


def masked_product(a: Tensor, b: Tensor, seen: Tensor) -> Tensor:
    """Σ_j a[i, j] b[j, :] over the seen j alone: a hidden b[j] may be NaN or Inf and changes nothing."""
    out = a @ b
    if bool(out.isfinite().all()):
        return out
    finite = b.isfinite()
    out = a @ b.where(finite, 0)
    strange = (~finite).any(-1) & seen.any(-2)
    chunk = max(1, BLOCK_SCORES // max(1, out.numel()))
    for keys in strange.flatten(0, -2).any(0).nonzero().flatten().split(chunk):
        rest = b[..., keys, :].masked_fill(finite[..., keys, :], 0).unsqueeze(-3)
        terms = a[..., keys].unsqueeze(-1) * rest
        out = out + terms.where(seen[..., keys].unsqueeze(-1), 0).sum(-2)
    return out


def forward(
    x: Operands,
    rows: Rows,
    formula: Formula,
    product: Product = plain_product,
    rounded: Callable[[Tensor], Tensor] = exact,
) -> tuple[Tensor, Tensor]:
    """out (B, Hq, n, Dv) and lse (B, Hq, n) of a block of rows; differentiable with `plain_product`.

    `rounded` is applied to the scores, the probabilities and the result: it imitates a low precision.
    """
    p, lse, seen, _, _ = _probabilities(x, rows, formula, rounded)
    keep = _keep(x, rows, formula.dropout)
    if keep is not None:
        p = p * keep
    return rounded(product(rounded(p), x.v, seen)), lse


def backward(
    x: Operands,
    rows: Rows,
    formula: Formula,
    dout: Tensor,
    dlse: Tensor | None,
    product: Product = masked_product,
    rounded: Callable[[Tensor], Tensor] = exact,
) -> BlockGradients:
    """Gradients of a block of rows; those of k, v, alibi_slopes and sinks are the block's share.

    The probabilities are normalised anew, so nothing is lost where lse is too large for its dtype.
    """
    p, _, seen, slope_of_cap, p_sink = _probabilities(x, rows, formula, rounded)
    keep = _keep(x, rows, formula.dropout)
    dp = rounded(dout @ x.v.transpose(-1, -2))
    kept = p
    if keep is not None:
        kept, dp = p * keep, dp * keep
    delta = (p * dp).where(seen, 0).sum(-1, keepdim=True)
    if dlse is not None:
        delta = delta - dlse.unsqueeze(-1)
    ds = (p * (dp - delta)).where(seen, 0)
    draw = rounded(ds if slope_of_cap is None else (ds * slope_of_cap).where(seen, 0))
    seen_by = seen.transpose(-1, -2)
    dslopes = None
    if x.alibi_slopes is not None:
        dslopes = -(ds * _distance(rows, formula.offset, x.k.shape[2], ds.dtype)).sum((-1, -2))
        if x.alibi_slopes.ndim == 1:
            dslopes = dslopes.sum(0)
    dsinks = None
    if x.sinks is not None:
        dsinks = -(p_sink * delta).sum((0, 2, 3))
    return BlockGradients(
        q=product(draw, x.k, seen) * formula.scale,
        k=product(draw.transpose(-1, -2), x.q, seen_by) * formula.scale,
        v=product(rounded(kept).transpose(-1, -2), dout, seen_by),
        bias=None if x.bias is None else ds.sum_to_size(x.bias.shape),
        alibi_slopes=dslopes,
        sinks=dsinks,
    )


def _probabilities(
    x: Operands, rows: Rows, formula: Formula, rounded: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """P before dropout, lse, which entries are seen, d(capped)/d(raw) and the sink's probability."""
    sk = x.k.shape[2]
    seen = in_interval(rows, sk).unsqueeze(1)
    if rows.mask is not None:
        seen = seen & rows.mask
    s = rounded(x.q @ x.k.transpose(-1, -2)) * formula.scale
    slope_of_cap = None
    if formula.softcap is not None:
        t = torch.tanh(s / formula.softcap)
        s, slope_of_cap = formula.softcap * t, 1 - t * t
    if x.alibi_slopes is not None:
        slopes = x.alibi_slopes.unsqueeze(-1).unsqueeze(-1)
        s = s - slopes * _distance(rows, formula.offset, sk, s.dtype)
    if x.bias is not None:
        s = s + x.bias
        seen = seen & (x.bias != NEG_INF)
    s = s.masked_fill(~seen, NEG_INF)
    seen = s != NEG_INF

    # The maximum only keeps exp in range: the result does not depend on it, nor does a derivative.
    m = s.detach().amax(-1, keepdim=True) if sk else s.new_full((*s.shape[:-1], 1), NEG_INF)
    sink = None if x.sinks is None else x.sinks.view(1, -1, 1, 1)
    if sink is not None:
        m = torch.maximum(m, sink.detach())
    m = m.masked_fill(m == NEG_INF, 0)
    p = torch.exp(s - m)
    total = p.sum(-1, keepdim=True)
    p_sink = torch.zeros_like(m) if sink is None else torch.exp(sink - m)
    total = total + p_sink
    empty = total == 0
    safe = total.masked_fill(empty, 1)
    lse = (m + safe.log()).masked_fill(empty, NEG_INF).squeeze(-1)
    return p / safe, lse, seen, slope_of_cap, p_sink / safe


def in_interval(rows: Rows, sk: int) -> Tensor:
    """lo ≤ j < hi, (B or 1, n, Sk)."""
    keys = torch.arange(sk, device=rows.lo.device)
    return (keys >= rows.lo.unsqueeze(-1)) & (keys < rows.hi.unsqueeze(-1))


def _distance(rows: Rows, offset: int, sk: int, dtype: torch.dtype) -> Tensor:
    """|i + offset − j|, (n, Sk)."""
    keys = torch.arange(sk, device=rows.number.device)
    return ((rows.number + offset).unsqueeze(-1) - keys).abs().to(dtype)


def _keep(x: Operands, rows: Rows, dropout: Dropout | None) -> Tensor | None:
    """0 where dropout drops, 1 / (1 − p) where it keeps: (B, Hq, n, Sk)."""
    if dropout is None:
        return None
    batch, heads = x.q.shape[:2]
    device = rows.number.device
    keep = keep_mask(
        dropout.p,
        dropout.seed,
        torch.arange(dropout.sequence, dropout.sequence + batch, device=device).view(-1, 1, 1, 1),
        torch.arange(dropout.head, dropout.head + heads, device=device).view(-1, 1, 1),
        rows.number.view(-1, 1),
        range(x.k.shape[2]),
    )
    return keep.to(x.q.dtype) * keep_scale(dropout.p)


def block(problem: Problem, dtype: torch.dtype, i0: int, i1: int) -> tuple[Operands, Rows, Formula]:
    """Rows i0 … i1 − 1 of a dense problem, as the functions above take them."""
    s = problem.scores

    def keys(t: Tensor) -> Tensor:
        return t.to(dtype).transpose(1, 2).repeat_interleave(problem.groups, 1)

    def cast(t: Tensor | None) -> Tensor | None:
        return None if t is None else t.to(dtype)

    x = Operands(
        q=problem.q[:, i0:i1].to(dtype).transpose(1, 2),
        k=keys(problem.k),
        v=keys(problem.v),
        bias=None if s.bias is None else rows_of(s.bias, 2, i0, i1).to(dtype),
        alibi_slopes=cast(s.alibi_slopes),
        sinks=cast(s.sinks),
    )
    rows = Rows(
        *problem.interval(i0, i1),
        number=torch.arange(i0, i1, device=problem.q.device),
        mask=None if s.mask is None else rows_of(s.mask, 2, i0, i1),
    )
    return x, rows, formula_of(problem)


def formula_of(problem: Problem) -> Formula:
    offset = problem.band.offset(problem.q.shape[1], problem.k.shape[1])
    return Formula(problem.scores.scale, problem.scores.softcap, offset, problem.dropout)


def rows_at_once(batch_heads: int, sk: int) -> int:
    """How many query rows against all keys keep a block within `BLOCK_SCORES`."""
    return max(1, BLOCK_SCORES // max(1, batch_heads * sk))


def row_blocks(i0: int, i1: int, step: int) -> Iterator[tuple[int, int]]:
    for start in range(i0, i1, step):
        yield start, min(start + step, i1)


def forward_in_blocks(
    problem: Problem, i0: int, i1: int, dtype: torch.dtype
) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """Rows i0 … i1 − 1 of a dense problem a few at a time: (r0, r1, out like q, lse)."""
    b, _, hq, _ = problem.q.shape
    for r0, r1 in row_blocks(i0, i1, rows_at_once(b * hq, problem.k.shape[1])):
        o, m = forward(*block(problem, dtype, r0, r1), masked_product)
        yield r0, r1, o.transpose(1, 2), m


def backward_in_blocks(
    problem: Problem,
    dout: Tensor,
    dlse: Tensor | None,
    grads: Gradients,
    dtype: torch.dtype,
    step: int,
    rounded: Callable[[Tensor], Tensor] = exact,
) -> None:
    """Writes the gradients of q, k, v of a dense problem and adds those of the scores' tensors."""
    b, sq, _, _ = problem.q.shape
    _, sk, hkv, _ = problem.k.shape
    dk = problem.k.new_zeros((b, hkv, sk, problem.k.shape[-1]), dtype=dtype)
    dv = problem.v.new_zeros((b, hkv, sk, problem.v.shape[-1]), dtype=dtype)
    sums = grads.scores
    for r0, r1 in row_blocks(0, sq, step):
        g = backward(
            *block(problem, dtype, r0, r1),
            dout[:, r0:r1].to(dtype).transpose(1, 2),
            None if dlse is None else dlse[:, :, r0:r1].to(dtype),
            masked_product,
            rounded,
        )
        grads.q[:, r0:r1] = g.q.transpose(1, 2)
        dk += g.k.unflatten(1, (hkv, problem.groups)).sum(2)
        dv += g.v.unflatten(1, (hkv, problem.groups)).sum(2)
        if sums.bias is not None and g.bias is not None:
            rows_of(sums.bias, 2, r0, r1).add_(g.bias)
        if sums.alibi_slopes is not None and g.alibi_slopes is not None:
            sums.alibi_slopes.add_(g.alibi_slopes)
        if sums.sinks is not None and g.sinks is not None:
            sums.sinks.add_(g.sinks)
    grads.k.copy_(dk.transpose(1, 2))
    grads.v.copy_(dv.transpose(1, 2))
