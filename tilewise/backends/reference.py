"""The specification: the formula of `dense.py` on all rows at once, O(n²) in memory.

Served only when it is asked for by name. `rounded` imitates a low precision: the tests run the
formula in bfloat16 as the peer whose error is the yardstick (see `testing.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tilewise import dense
from tilewise.results import (
    Gradients,
    accumulation_dtype,
    empty_result,
    zero_gradients,
)
from tilewise.spec import Problem, sequences


def unsupported(problem: Problem) -> list[str]:
    return []


def config(problem: Problem) -> dict[str, Any]:
    return {}


def forward(
    problem: Problem, rounded: Callable[[Tensor], Tensor] = dense.exact
) -> tuple[Tensor, Tensor]:
    """out, laid out like q, and lse."""
    dtype = accumulation_dtype(problem.q.dtype)
    out, lse = empty_result(problem)
    for sequence in sequences(problem):
        p = sequence.problem
        o, m = dense.forward(*dense.block(p, dtype, 0, p.q.shape[1]), dense.masked_product, rounded)
        sequence.of_q(out).copy_(o.transpose(1, 2))
        sequence.of_lse(lse).copy_(m)
    return out, lse


def backward(
    problem: Problem,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    bias_grad: bool = True,
    rounded: Callable[[Tensor], Tensor] = dense.exact,
) -> Gradients:
    """Gradients of what was given; `out` and `lse` are recomputed, as a definition should."""
    dtype = accumulation_dtype(problem.q.dtype)
    grads = zero_gradients(problem, bias_grad)
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
