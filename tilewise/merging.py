"""Merging partial results: attention over a union of key sets from attention over each."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.results import accumulation_dtype


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over keys A and B together, from the results over A and over B.

    With w = exp(lse − max), out = (w_a·out_a + w_b·out_b) / (w_a + w_b) and
    lse = max + log(w_a + w_b): the online-softmax step (Milakov & Gimelshein 2018) on whole results.
    A part with lse = −inf saw no key and contributes nothing, whatever its out holds.
    Differentiable in all four arguments.

    Args:
        out_a, out_b: (..., S, H, Dv), or (..., S, Dv) with an lse of one dimension; one shape.
        lse_a, lse_b: (..., H, S) natural logarithms, as `attention` returns them: (B, H, S) for out
            (B, S, H, Dv), (H, total) for packed (total, H, Dv), (S,) for (S, Dv).

    Returns:
        out in the dtype of out_a, and lse in the dtype of lse_a. Two empty parts give 0 and −inf.

    Raises:
        ValueError: the shapes do not belong together.

    Example:
        >>> import tilewise
        >>> q, k, v = (torch.randn(1, n, 2, 8) for n in (3, 10, 10))
        >>> a = tilewise.attention(q, k[:, :4], v[:, :4], return_lse=True)
        >>> b = tilewise.attention(q, k[:, 4:], v[:, 4:], return_lse=True)
        >>> out, lse = tilewise.merge(*a, *b)
        >>> torch.allclose(out, tilewise.attention(q, k, v), atol=1e-5)
        True
    """
    _check_shapes(out_a, lse_a, out_b, lse_b)
    dtype = torch.promote_types(accumulation_dtype(out_a.dtype), lse_a.dtype)
    a, b = lse_a.to(dtype), lse_b.to(dtype)
    m = torch.maximum(a, b).detach()
    m = m.masked_fill(m == float("-inf"), 0)
    weight_a, weight_b = torch.exp(a - m), torch.exp(b - m)
    total = weight_a + weight_b
    empty = total == 0
    safe = total.masked_fill(empty, 1)
    lse = (m + safe.log()).masked_fill(empty, float("-inf"))

    def share(out: Tensor, weight: Tensor) -> Tensor:
        w = _beside_out(weight / safe)
        # A part without weight may hold anything, NaN included.
        return w * out.to(dtype).masked_fill(w == 0, 0)

    return (share(out_a, weight_a) + share(out_b, weight_b)).to(out_a.dtype), lse.to(lse_a.dtype)


def _beside_out(lse: Tensor) -> Tensor:
    """(..., H, S) as (..., S, H, 1), or (S,) as (S, 1)."""
    return (lse.transpose(-1, -2) if lse.ndim > 1 else lse).unsqueeze(-1)


def _check_shapes(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    given = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    for name, t in given.items():
        if not isinstance(t, Tensor) or not t.is_floating_point():
            got = t.dtype if isinstance(t, Tensor) else type(t).__name__
            raise ValueError(f"{name} must be a floating-point tensor, got {got}")
    if out_a.shape != out_b.shape:
        raise ValueError(
            f"out_b must have the shape of out_a, {tuple(out_a.shape)}, got {tuple(out_b.shape)}"
        )
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        if lse.ndim == 0 or _beside_out(lse).shape[:-1] != out_a.shape[:-1]:
            rows = tuple(out_a.shape[:-1])
            wanted = rows if len(rows) == 1 else (*rows[:-2], rows[-1], rows[-2])
            raise ValueError(f"{name} must have shape {wanted}, got {tuple(lse.shape)}")
