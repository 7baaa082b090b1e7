"""A Problem as kernels take it: the values of `kernels/score.py` from those of `spec.py`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilewise.random import keep_scale
from tilewise.spec import Problem

LOG2E = math.log2(math.e)


def power_of_two(n: int) -> int:
    """The one that holds n, at least the 16 of a matrix instruction."""
    return max(16, 1 << (n - 1).bit_length())


def spec(problem: Problem) -> Any:
    """A `score.Spec`."""
    from tilewise.kernels import score

    q, k, packed = problem.q, problem.k, problem.packed
    tokens = 0 if packed else 1
    sq, sk = q.shape[tokens], k.shape[tokens]
    sizes = score.Sizes(sq, sk, q.shape[-2], k.shape[-2], problem.groups)
    band = score.Band(*sides(problem), score.constexpr(problem.band.align == "bottom-right"))
    key_range, dropout = problem.key_range, problem.dropout
    if dropout is not None and round(dropout.p * 2**32) == 0:
        dropout = None  # rarer than one in 2³²: nothing is dropped
    start, end = (None, None) if key_range is None else map(_row_lines, key_range)
    hides = problem.scores.mask is not None or problem.scores.bias is not None
    banded = sides(problem) != (None, None)
    return score.Spec(
        sizes,
        band,
        _scores(problem),
        start,
        end,
        None if dropout is None else _dropout(dropout.p, dropout.seed, _number_for(q.dtype)),
        None if packed is None else _packed(*packed[:2]),
        score.constexpr(hides),
        score.constexpr(hides or banded or key_range is not None or packed is not None),
    )


def sides(problem: Problem) -> tuple[int | None, int | None]:
    """left and right of the band; one that reaches past every position hides nothing and is None."""
    tokens = 0 if problem.packed else 1
    far = problem.q.shape[tokens] + problem.k.shape[tokens]
    left, right = (n if n is not None and n < far else None for n in problem.band[:2])
    return left, right


def folded(problem: Problem) -> bool:
    """Whether logits stay raw products (Scores.FOLDED)."""
    s = problem.scores
    plain = s.softcap is None and s.alibi_slopes is None and s.bias is None
    # unit · m is carried, which must not overflow where the logit itself does not; its rounding, and that of
    # lse in its unit, is seen in float32 alone.
    return plain and 0 < s.scale * LOG2E <= 1 and problem.q.element_size() < 4


def _scores(problem: Problem) -> Any:
    from tilewise.kernels import score

    s = problem.scores
    number = _number_for(problem.q.dtype)
    slopes: Any = s.alibi_slopes
    if slopes is not None:
        slopes = score.Lines(
            slopes, slopes.stride(0) if slopes.ndim == 2 else 0, slopes.stride(-1), 0
        )
    return score.Scores(
        scale=number(s.scale),
        unit=number(s.scale * LOG2E) if folded(problem) else score.LOG2E,
        softcap=None if s.softcap is None else number(s.softcap),
        slopes=slopes,
        bias=None if s.bias is None else grid(s.bias),
        mask=None if s.mask is None else grid(s.mask),
        sinks=None if s.sinks is None else s.sinks.contiguous(),
        FOLDED=score.constexpr(folded(problem)),
        KEEPS_INF=score.constexpr(s.scale > 0 and s.softcap is None),
    )


def _number_for(dtype: torch.dtype) -> Callable[[float], Any]:
    """How a number reaches a kernel: as an argument it is rounded to float32, so float64 compiles it in."""
    from tilewise.kernels.score import constexpr

    return constexpr if dtype == torch.float64 else float


def _dropout(p: float, seed: Tensor, number: Callable[[float], Any]) -> Any:
    from tilewise.kernels.score import Dropout

    return Dropout(seed, round(p * 2**32) - 1, number(keep_scale(p)))


def _packed(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Any:
    from tilewise.kernels.score import Packed, constexpr

    count = cu_seqlens_q.shape[0] - 1
    search = constexpr(min(1024, power_of_two(max(1, count))))
    return Packed(cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous(), count, search)


def most_tiles(problem: Problem, t: Tensor, block: int) -> int:
    """Tiles of so many tokens of t, of one head: of all batch entries, or as many as packed sequences may
    need."""
    tiles = -(-t.shape[-3] // block)
    if problem.packed is None:
        return tiles * t.shape[0]
    return tiles + problem.packed.cu_seqlens_q.shape[0]


def tokens(t: Tensor) -> Any:
    """(B, S, H, D), packed (total, H, D)."""
    from tilewise.kernels.score import Tokens

    batch = t.stride(0) if t.ndim == 4 else 0
    row, head, column = t.stride()[-3:]
    return Tokens(t, batch, row, head, column)


def lines(t: Tensor | None) -> Any:
    """(B, H, S), packed (H, total); None of none."""
    from tilewise.kernels.score import Lines

    if t is None:
        return None
    return Lines(t, t.stride(0) if t.ndim == 3 else 0, t.stride(-2), t.stride(-1))


def _row_lines(t: Tensor) -> Any:
    """(B or 1, S or 1), packed (total or 1,)."""
    from tilewise.kernels.score import Lines

    strides = [0 if n == 1 else stride for n, stride in zip(t.shape, t.stride(), strict=True)]
    return Lines(t, strides[0] if t.ndim == 2 else 0, 0, strides[-1])


def grid(t: Tensor) -> Any:
    """(B, Hq, Sq, Sk), packed (Hq, total_q, columns), each or 1."""
    from tilewise.kernels.score import Grid, constexpr

    strides = [0 if n == 1 else stride for n, stride in zip(t.shape, t.stride(), strict=True)]
    batch = strides[0] if t.ndim == 4 else 0
    head, row, column = strides[-3:]
    by_row, by_column = (constexpr(n != 1) for n in t.shape[-2:])
    return Grid(t, batch, head, row, column, t.shape[-1], by_row, by_column)
