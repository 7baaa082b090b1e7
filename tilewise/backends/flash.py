"""PyTorch's flash kernel for the CPU, for the plain calls where it beats tiles made of products.

It is tiled and O(n) like ours, and C++: it wins where calls are short, and where torch.mm already
runs at the processor's speed (see `products.py`). Its results are used only when they can be trusted:
it knows no hidden NaN, gives 0 for some NaN queries, and keeps one rounded lse.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilewise.backends.products import keep_freed_memory, onednn_wins
from tilewise.results import Gradients, Result, products_overflow
from tilewise.spec import Problem, Scores

# Up to so many scores a head, a call into C++ beats a loop in Python on every CPU seen.
SHORT = 200 * 200
# With fewer keys a NaN query may come out as 0.
FEWEST_KEYS = 16
# It wants a key head for each query head: copies, which few rows do not repay.
FEWEST_ROWS_OF_A_GROUP = 128
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
        and sq >= fewest_rows(q.dtype)
        and sk >= FEWEST_KEYS
        and (heads == kv_heads or sq >= FEWEST_ROWS_OF_A_GROUP)
        and b * heads > 0
        and not any(t._is_zerotensor() for t in (q, k, v))  # they have no memory to read
        and q.stride(3) == k.stride(3) == v.stride(3) == 1
        and _is_causal(problem) is not None
        and (sq * sk <= SHORT or not onednn_wins())
    )


def fewest_rows(dtype: torch.dtype) -> float:
    """From how many query rows on the kernel is good at a dtype; with AMX at all of low precision."""
    if dtype == torch.float32 or (dtype != torch.float64 and torch.cpu._is_amx_tile_supported()):
        return 1
    return 16 if dtype == torch.bfloat16 else math.inf


def _is_causal(problem: Problem) -> bool | None:
    """The kernel's flag, or None for a band that it does not know."""
    left, right, _ = problem.band
    if left is None and right is None:
        return False
    sq, sk = problem.q.shape[1], problem.k.shape[1]
    if left is None and right == 0 and problem.band.offset(sq, sk) == 0:
        return True
    return False if problem.bounds(0, sq)[1:3] == (0, sk) else None


def serves_backward(problem: Problem, dlse: Tensor | None) -> bool:
    """Whether the backward kernel serves as well, and is as exact as it should be."""
    if dlse is not None or not serves(problem):
        return False
    low = problem.q.dtype != torch.float32
    rows = problem.q.shape[1]
    return not low or (fewest_rows(problem.q.dtype) == 1 and rows <= MOST_ROWS_IN_LOW_PRECISION)


def forward(problem: Problem) -> Result | None:
    """The result, or None where it is not to be trusted."""
    operands = _heads_first(problem.q, *_expanded(problem))
    if fewest_rows(problem.q.dtype) > 1:
        # There it converts blocks of what it reads, some of them often: faster where rows lie together.
        keep_freed_memory()
        operands = tuple(t.contiguous() for t in operands)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *operands,
        0.0,
        bool(_is_causal(problem)),
        scale=problem.scores.scale,
    )
    out, lse = out.transpose(1, 2).contiguous(), lse.contiguous()
    if products_overflow(problem) or not (_moderate(lse) and math.isfinite(float(out.sum()))):
        return None
    return Result(out, lse, torch.zeros_like(lse))


def backward(problem: Problem, result: Result, dout: Tensor) -> Gradients | None:
    """The gradients, or None where they are not to be trusted."""
    if products_overflow(problem) or not _moderate(result.lse):
        return None
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *_heads_first(dout.contiguous(), problem.q, *_expanded(problem), result.out),
        result.lse,
        0.0,
        bool(_is_causal(problem)),
        scale=problem.scores.scale,
    )
    if not math.isfinite(sum(float(g.sum()) for g in grads)):
        return None
    q, k, v = (g.transpose(1, 2).contiguous() for g in grads)
    if problem.groups > 1:
        k, v = (g.unflatten(2, (-1, problem.groups)).sum(3) for g in (k, v))
    return Gradients(q, k, v, Scores(problem.scores.scale))


def _expanded(problem: Problem) -> tuple[Tensor, Tensor]:
    """k and v with a head for each query head."""
    k, v, groups = problem.k, problem.v, problem.groups
    if groups == 1:
        return k, v
    return k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)


def _heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.transpose(1, 2) for t in tensors)


def _moderate(lse: Tensor) -> bool:
    low, high = torch.aminmax(lse)
    return float(low) > -LARGEST_LSE and float(high) < LARGEST_LSE
