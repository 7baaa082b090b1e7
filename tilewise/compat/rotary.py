"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), as flash_attn applies it."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.results import accumulation_dtype


def rotated(x: Tensor, cos: Tensor, sin: Tensor, position: Tensor, interleaved: bool) -> Tensor:
    """x with the first 2 · width of its channels turned, in pairs, by the angles of its positions.

    Args:
        x: (…, heads, head_dim).
        cos, sin: (positions, width), width ≤ head_dim / 2.
        position: (…,), integer; tokens' rows of cos and sin.
        interleaved: pairs are channels (0, 1), (2, 3), …; else (0, width), (1, width + 1), ….

    Returns:
        A tensor of x's shape and dtype; computed in float32 (float64 for float64).

    Raises:
        ValueError: cos and sin do not fit x or each other, or have no row for a position.

    Example:
        >>> from tilewise.compat.rotary import rotated
        >>> angle = torch.tensor([0.0, torch.pi / 2]).unsqueeze(1)
        >>> x = torch.tensor([1.0, 2.0, 9.0]).expand(2, 1, 3)  # two tokens of one head
        >>> rotated(x, angle.cos(), angle.sin(), torch.arange(2), True).round().squeeze(1)
        tensor([[ 1.,  2.,  9.],
                [-2.,  1.,  9.]])
    """
    for name, t in (("rotary_cos", cos), ("rotary_sin", sin)):
        if not isinstance(t, Tensor) or not t.is_floating_point() or t.device != x.device:
            got = f"{t.dtype} on {t.device}" if isinstance(t, Tensor) else type(t).__name__
            raise ValueError(f"{name} must be a floating tensor on {x.device}, got {got}")
    if cos.ndim != 2 or cos.shape != sin.shape or 2 * cos.shape[1] > x.shape[-1]:
        raise ValueError(
            "rotary_cos and rotary_sin must be (positions, rotary_dim / 2) with rotary_dim ≤ head_dim = "
            f"{x.shape[-1]}, got {tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    if position.numel():
        low, high = int(position.min()), int(position.max())
        if low < 0 or high >= cos.shape[0]:
            raise ValueError(
                f"rotary_cos and rotary_sin must have a row for each position from {low} to {high}, "
                f"got {cos.shape[0]} rows"
            )
    width, wide = cos.shape[1], accumulation_dtype(x.dtype)
    cos, sin = (t[position].unsqueeze(-2).to(wide) for t in (cos, sin))
    turning, rest = x.split((2 * width, x.shape[-1] - 2 * width), -1)
    shape, pair = ((width, 2), -1) if interleaved else ((2, width), -2)
    a, b = turning.to(wide).unflatten(-1, shape).unbind(pair)
    turned = torch.stack((a * cos - b * sin, a * sin + b * cos), pair).flatten(-2)
    return torch.cat((turned.to(x.dtype), rest), -1)
