"""The two FlashAttention functions that courses on language-model systems ask for.

Both are autograd Functions, called as ``.apply(Q, K, V, is_causal)`` on Q (batch, n, d), K (batch, m, d) and
V (batch, m, dv), and save L, of shape (batch, n), beside Q, K, V and O. Causal is key ≤ query.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilewise import dispatch
from tilewise.arguments import dense_problem
from tilewise.results import Result
from tilewise.spec import Problem
from tilewise.textbook import FlashAttention

__all__ = ["FlashAttentionPyTorch", "FlashAttentionTriton"]

FlashAttentionPyTorch = FlashAttention


class FlashAttentionTriton(torch.autograd.Function):
    """The same function as `FlashAttentionPyTorch`, by the Triton backend's kernels.

    Raises:
        ValueError: the backend cannot serve, as on a CPU; with all of its reasons.

    Example:
        >>> Q, K, V = (torch.randn(2, 5, 16) for _ in range(3))
        >>> if torch.cuda.is_available():
        ...     O = FlashAttentionTriton.apply(Q.cuda(), K.cuda(), V.cuda(), True)
    """

    @staticmethod
    def forward(ctx: Any, Q: Tensor, K: Tensor, V: Tensor, is_causal: bool = False) -> Tensor:
        problem = _one_head(Q, K, V, is_causal)
        backend = dispatch.backend(dispatch.choose(problem, "triton").backend)
        out, lse, low = backend.forward(problem)
        O, L = out.squeeze(-2), lse.squeeze(-2)
        # Under autocast the problem's dtype is not that of what came.
        Q, K, V = (t.squeeze(-2) for t in problem[:3])
        ctx.save_for_backward(Q, K, V, O, L, low)
        ctx.is_causal = is_causal
        return O

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dO: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        Q, K, V, O, L, low = ctx.saved_tensors
        result = Result(O.unsqueeze(-2), L.unsqueeze(-2), low)
        problem = _one_head(Q, K, V, ctx.is_causal)
        g = dispatch.backend("triton").backward(problem, result, dO.unsqueeze(-2), None)
        return g.q.squeeze(-2), g.k.squeeze(-2), g.v.squeeze(-2), None


def _one_head(Q: Tensor, K: Tensor, V: Tensor, is_causal: bool) -> Problem:
    for name, t in (("Q", Q), ("K", K), ("V", V)):
        if not isinstance(t, Tensor) or t.ndim != 3:
            got = tuple(t.shape) if isinstance(t, Tensor) else type(t).__name__
            raise ValueError(f"{name} must be a tensor (batch, n, d), got {got}")
    q, k, v = (t.unsqueeze(-2) for t in (Q, K, V))
    return dense_problem(q, k, v, causal=is_causal, align="top-left")
