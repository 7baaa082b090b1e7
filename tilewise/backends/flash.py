"""PyTorch's flash kernel for the CPU, for the plain calls where it beats tiles made of products.

It is tiled and O(n) like ours, and C++: it wins where calls are short, and where torch.mm already
runs at the processor's speed (see `products.py`). Where it is not good at a low precision, it gets
float32 numbers, a few heads at a time that stay in the cache. Its results are used only when they can
be trusted: it knows no hidden NaN, gives 0 for some NaN queries, and keeps one rounded lse.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from tilewise.backends.products import CONVERTED, keep_freed_memory, onednn_wins
from tilewise.backends.tiles import parts
from tilewise.results import Gradients, Result, products_overflow, result_shapes, zero_gradients
from tilewise.spec import Problem, Scores

# Up to so many scores a head, a call into C++ beats a loop in Python on every CPU seen.
SHORT = 200 * 200
# With fewer keys a NaN query may come out as 0.
FEWEST_KEYS = 16
# It wants a key head for each query head: copies, which few rows do not repay.
FEWEST_ROWS_OF_A_GROUP = 128
# Nor do few rows repay a conversion of their keys.
FEWEST_CONVERTED_ROWS = 16
# Its backward pass sums in the dtype of the inputs: in a low precision, too long a sum is inexact.
MOST_ROWS_IN_LOW_PRECISION = 2048
# exp(s − lse) from one float32 lse is as exact as a float32 can be expected to be up to here.
LARGEST_LSE = 16.0


def serves(problem: Problem) -> bool:
    """Whether the kernel knows what is asked for and is the faster way."""
    q, k, v = problem.q, problem.k, problem.v
    scale, *asked = problem.scores
    elsewhere = (problem.key_range, problem.dropout, problem.packed, problem.paged)
    if not q.is_cpu or scale <= 0 or any(t is not None for t in (*asked, *elsewhere)):
        return False
    (b, sq, heads, width), (_, sk, kv_heads, value_width) = q.shape, v.shape
    return (
        width == value_width
        and q.dtype != torch.float64
        and (sq >= FEWEST_CONVERTED_ROWS or is_good_at(q.dtype))
        and sk >= FEWEST_KEYS
        and (heads == kv_heads or sq >= FEWEST_ROWS_OF_A_GROUP)
        and b * heads > 0
        and not any(t._is_zerotensor() for t in (q, k, v))  # they have no memory to read
        and q.stride(3) == k.stride(3) == v.stride(3) == 1
        and _is_causal(problem) is not None
        and (sq * sk <= SHORT or not onednn_wins())
    )


def is_good_at(dtype: torch.dtype) -> bool:
    """Whether the kernel is fast at a dtype; with AMX at those of low precision."""
    return dtype == torch.float32 or torch.cpu._is_amx_tile_supported()


def _is_causal(problem: Problem) -> bool | None:
    """The kernel's flag, or None for a band that it does not know."""
    left, right, _ = problem.band
    if left is None and right is None:
        return False
    sq, sk = problem.q.shape[1], problem.k.shape[1]
    if left is None and right == 0 and problem.band.offset(sq, sk) == 0:
        return True
    return False if problem.bounds(0, sq)[1:3] == (0, sk) else None


def forward(problem: Problem) -> Result | None:
    """The result, or None where it is not to be trusted."""
    if products_overflow(problem):
        return None
    q, k, v = problem[:3]
    if is_good_at(q.dtype):
        out, lse = (t.contiguous() for t in _forward(problem, q, k, v))
    else:
        out_shape, lse_shape = result_shapes(problem)
        out, lse = q.new_empty(out_shape), q.new_empty(lse_shape, dtype=torch.float32)
        for batch, heads, kv_heads in _converted_at_once(problem):
            out[batch, :, heads], lse[batch, heads] = _forward(
                problem,
                _in_float32(q[batch, :, heads]),
                _in_float32(k[batch, :, kv_heads]),
                _in_float32(v[batch, :, kv_heads]),
            )
    if not (_moderate(lse) and math.isfinite(float(out.sum()))):
        return None
    return Result(out, lse, torch.zeros_like(lse))


def backward(problem: Problem, result: Result, dout: Tensor) -> Gradients | None:
    """The gradients, or None where they are not to be trusted."""
    if products_overflow(problem) or not _moderate(result.lse):
        return None
    dtype, rows = problem.q.dtype, problem.q.shape[1]
    if dtype == torch.float32 or (is_good_at(dtype) and rows <= MOST_ROWS_IN_LOW_PRECISION):
        return _backward(problem, result, dout)
    whole = zero_gradients(problem)
    for batch, heads, kv_heads in _converted_at_once(problem):
        part, of_part = problem.part(batch, kv_heads), result.part(batch, heads)
        gradients = _backward(
            part._replace(q=_in_float32(part.q), k=_in_float32(part.k), v=_in_float32(part.v)),
            of_part._replace(out=_in_float32(of_part.out)),
            _in_float32(dout[batch, :, heads]),
        )
        if gradients is None:
            return None
        of_whole = whole.part(batch, kv_heads, problem.groups)
        for total, share in zip(of_whole[:3], gradients[:3], strict=True):
            total.copy_(share)
    return whole


def _converted_at_once(problem: Problem) -> Iterator[tuple[slice, slice, slice]]:
    keep_freed_memory()
    (_, sq, _, width), sk = problem.q.shape, problem.k.shape[1]
    return parts(problem, CONVERTED // (max(sq * problem.groups, sk) * width))


def _in_float32(t: Tensor) -> Tensor:
    """Rows of a few heads, which lie apart, are copied much faster than they are converted."""
    return t.contiguous().float()


def _forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *_heads_first(q, *_expanded(k, v, problem.groups)),
        0.0,
        bool(_is_causal(problem)),
        scale=problem.scores.scale,
    )
    return out.transpose(1, 2), lse


def _backward(problem: Problem, result: Result, dout: Tensor) -> Gradients | None:
    k, v = _expanded(problem.k, problem.v, problem.groups)
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *_heads_first(dout.contiguous(), problem.q, k, v, result.out),
        result.lse,
        0.0,
        bool(_is_causal(problem)),
        scale=problem.scores.scale,
    )
    if not math.isfinite(sum(float(g.sum()) for g in grads)):
        return None
    dq, dk, dv = (g.transpose(1, 2).contiguous() for g in grads)
    if problem.groups > 1:
        dk, dv = (g.unflatten(2, (-1, problem.groups)).sum(3) for g in (dk, dv))
    return Gradients(dq, dk, dv, Scores(problem.scores.scale))


def _expanded(k: Tensor, v: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """k and v with a head for each query head."""
    if groups == 1:
        return k, v
    return k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)


def _heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.transpose(1, 2) for t in tensors)


def _moderate(lse: Tensor) -> bool:
    low, high = torch.aminmax(lse)
    return float(low) > -LARGEST_LSE and float(high) < LARGEST_LSE
