"""What comes out of a backend: the result's tensors, and gradients while they are summed."""

from __future__ import annotations

import functools
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.spec import Problem, Scores, Sequence


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and of lse: float32, and float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def result_shapes(problem: Problem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of out, laid out like q, and of lse."""
    q = problem.q.shape
    out = (*q[:-1], problem.v.shape[-1])
    return out, (q[1], q[0]) if problem.packed is not None else (q[0], q[2], q[1])


@functools.cache
def nothing(device: torch.device, dtype: torch.dtype) -> Tensor:
    """The lse_low of a backend that has none."""
    # It is saved for a backward pass, whatever the first call was.
    with torch.inference_mode(False):
        return torch.empty(0, device=device, dtype=dtype)


# Sums of products and scales up to here are far from float32's limits.
LARGEST_PRODUCT, LARGEST_SCALE = 1e36, 1e20
# The score tensors that have gradients, in the order in which they are passed around.
SCORE_NAMES = ("bias", "alibi_slopes", "sinks")


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Our own products choose their dtypes: autocast has had its say about the arguments."""
    kind = device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return nullcontext()
    return torch.autocast(kind, enabled=False)


def products_overflow(problem: Problem) -> bool:
    """Whether scale · q · k or a step on the way may leave float32, or an operand is not finite."""
    q, k, scale = problem.q, problem.k, problem.scores.scale
    if q.dtype == torch.float64 or not (q.numel() and k.numel()):
        return False
    if q.dtype == torch.float16:
        return abs(scale) > LARGEST_SCALE
    return _overflow(_largest(q) * _largest(k) * q.shape[-1], scale)


def scores_overflow(scores: Tensor, scale: float) -> bool:
    """The same of products that were made: a sum that left float32 on the way is not finite."""
    return scores.numel() > 0 and _overflow(_largest(scores), scale)


def _largest(t: Tensor) -> float:
    """The largest magnitude; NaN if there is one."""
    low, high = torch.aminmax(t)
    return max(-float(low), float(high))


def _overflow(product: float, scale: float) -> bool:
    return abs(scale) > LARGEST_SCALE or not product * max(1.0, abs(scale)) < LARGEST_PRODUCT


class Result(NamedTuple):
    """What a forward pass leaves for a backward one.

    `lse_low` is what rounding took from lse, so that exp(s − lse − lse_low) is as exact as s; in dtypes
    that are not in its SPLITS_LSE a backend does without and leaves it empty, of size 0.
    """

    out: Tensor
    lse: Tensor
    lse_low: Tensor

    def of(self, sequence: Sequence) -> Result:
        """The views that belong to one sequence; of a backend that splits lse."""
        return Result(
            sequence.of_q(self.out), sequence.of_lse(self.lse), sequence.of_lse(self.lse_low)
        )

    def part(self, batch: slice, heads: slice) -> Result:
        """The views that belong to a part of a dense problem."""
        lse, low = (t[batch, heads] for t in self[1:])
        return Result(self.out[batch, :, heads], lse, low)

    @staticmethod
    def rounded(out: Tensor, lse: Tensor, dtype: torch.dtype) -> Result:
        """From a float64 lse."""
        high = lse.to(dtype)
        if dtype == torch.float64:
            return Result(out, high, torch.zeros_like(high))
        low = (lse - high).masked_fill_(high == float("-inf"), 0)
        return Result(out, high, low.to(dtype))


class Gradients(NamedTuple):
    """Gradients of q, k, v in their own dtype; those of bias, slopes and sinks in `scores`, as sums
    over sequences and heads, in the accumulation dtype until `finished`."""

    q: Tensor
    k: Tensor
    v: Tensor
    scores: Scores

    def of(self, sequence: Sequence) -> Gradients:
        """The views that belong to one sequence."""
        return Gradients(
            sequence.of_q(self.q),
            sequence.of_k(self.k),
            sequence.of_k(self.v),
            sequence.of_scores(self.scores),
        )

    def part(self, batch: slice, kv_heads: slice, groups: int) -> Gradients:
        """The views that belong to a part of a dense problem (see `Problem.part`)."""
        heads = slice(kv_heads.start * groups, kv_heads.stop * groups)
        return Gradients(
            self.q[batch, :, heads],
            self.k[batch, :, kv_heads],
            self.v[batch, :, kv_heads],
            self.scores.part(batch, heads),
        )

    def finished(self, problem: Problem) -> Gradients:
        """With the gradients of bias, slopes and sinks in the dtype of what was given."""
        given, sums = problem.scores, self.scores

        def cast(gradient: Tensor | None, like: Tensor | None) -> Tensor | None:
            return None if gradient is None or like is None else gradient.to(like.dtype)

        return self._replace(
            scores=sums._replace(
                bias=cast(sums.bias, given.bias),
                alibi_slopes=cast(sums.alibi_slopes, given.alibi_slopes),
                sinks=cast(sums.sinks, given.sinks),
            )
        )


def zero_gradients(problem: Problem, wanted: Collection[str] = SCORE_NAMES) -> Gradients:
    """Zeros to add to; `wanted` names the scores whose gradients are."""
    s = problem.scores
    dtype = accumulation_dtype(problem.q.dtype)

    def zeros(name: str) -> Tensor | None:
        t = getattr(s, name)
        if t is None or name not in wanted:
            return None
        return torch.zeros(t.shape, dtype=dtype, device=t.device)

    return Gradients(
        problem.q.new_zeros(problem.q.shape),
        problem.k.new_zeros(problem.k.shape),
        problem.v.new_zeros(problem.v.shape),
        Scores(
            s.scale,
            bias=zeros("bias"),
            alibi_slopes=zeros("alibi_slopes"),
            sinks=zeros("sinks"),
        ),
    )
