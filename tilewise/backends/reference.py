"""The specification: the formula of `dense.py` on all rows at once, O(n²) in memory.

Served only when it is asked for by name. It computes in float64; `dtype` and `rounded` imitate a
lower precision, for the peer whose error is the tests' yardstick (see `testing.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from tilewise import dense
from tilewise.results import (
    SCORE_NAMES,
    Gradients,
    Result,
    accumulation_dtype,
    result_shapes,
    zero_gradients,
)
from tilewise.spec import Problem, sequences

SPLITS_LSE = ()


def unsupported(problem: Problem) -> list[str]:
    return []


def config(problem: Problem) -> dict[str, Any]:
    return {}


def forward(
    problem: Problem,
    dtype: torch.dtype = torch.float64,
    rounded: Callable[[Tensor], Tensor] = dense.exact,
) -> Result:
    """out, laid out like q, and lse."""
    out_shape, lse_shape = result_shapes(problem)
    out = problem.q.new_zeros(out_shape)
    lse = problem.q.new_full(lse_shape, float("-inf"), dtype=accumulation_dtype(problem.q.dtype))
    for sequence in sequences(problem):
        p = sequence.problem
        o, m = dense.forward(*dense.block(p, dtype, 0, p.q.shape[1]), dense.masked_product, rounded)
        sequence.of_q(out).copy_(o.transpose(1, 2))
        sequence.of_lse(lse).copy_(m)
    return Result(out, lse, lse.new_empty(0))


def backward(
    problem: Problem,
    result: Result,
    dout: Tensor,
    dlse: Tensor | None,
    wanted: Collection[str] = SCORE_NAMES,
    dtype: torch.dtype = torch.float64,
    rounded: Callable[[Tensor], Tensor] = dense.exact,
) -> Gradients:
    """Gradients of what was given; `result` is computed anew, as befits a definition."""
    grads = zero_gradients(problem, wanted)
    for sequence in sequences(problem):
        p = sequence.problem
        dense.backward_in_blocks(
            p,
            sequence.of_q(dout),
            None if dlse is None else sequence.of_lse(dlse),
            grads.of(sequence),
            dtype,
            step=max(1, p.q.shape[1]),
            rounded=rounded,
        )
    return grads.finished(problem)
