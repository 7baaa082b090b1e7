"""flash_attn.bert_padding: from padded batches to packed tokens and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.arguments import INDEX_DTYPES


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The tokens of a padded batch laid end to end.

    Args:
        hidden_states: (B, S, …).
        attention_mask: (B, S), bool or integer, 1 where there is a token.
        unused_mask: (B, S), 1 where there is a token that is kept but does not count.

    Returns:
        The tokens (total, …); their indices (total,) in the flattened batch; cu_seqlens (B + 1,) int32;
        the longest sequence; the counting tokens of each sequence (B,) int32.

    Raises:
        ValueError: a mask's shape is not that of the batch, or a token is in both masks.

    Example:
        >>> from tilewise.compat.bert_padding import unpad_input
        >>> mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
        >>> tokens, indices, cu_seqlens, longest, used = unpad_input(torch.randn(2, 3, 4), mask)
        >>> indices.tolist(), cu_seqlens.tolist(), longest
        ([0, 1, 3], [0, 2, 3], 2)
    """
    _check_tensor("hidden_states", hidden_states, "(B, S, …)", 2)
    batch = hidden_states.shape[:2]
    for name, mask in (("attention_mask", attention_mask), ("unused_mask", unused_mask)):
        if name == "attention_mask" or mask is not None:
            _check_mask(name, mask, batch, hidden_states.device)
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    if unused_mask is not None and bool((kept > 1).any()):
        raise ValueError("unused_mask must be 0 where attention_mask is 1, got 1 in both")
    lengths = kept.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.numel() else 0
    used = attention_mask.sum(-1, dtype=torch.int32)
    tokens = index_first_axis(hidden_states.flatten(0, 1), indices)
    return tokens, indices, cu_seqlens, longest, used


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse of `unpad_input`: tokens (total, …) as (batch, seqlen, …), 0 where there is none.

    Raises:
        ValueError: indices are not one for each token, or lie outside of batch · seqlen.

    Example:
        >>> from tilewise.compat.bert_padding import pad_input
        >>> pad_input(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([0, 1, 3]), 2, 3).squeeze(-1)
        tensor([[1., 2., 0.],
                [3., 0., 0.]])
    """
    for name, n in (("batch", batch), ("seqlen", seqlen)):
        if not isinstance(n, int) or isinstance(n, bool) or n < 0:
            raise ValueError(f"{name} must be an int of at least 0, got {n!r}")
    padded = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return padded.view(batch, seqlen, *hidden_states.shape[1:])


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """input[indices]: rows of the first dimension.

    Example:
        >>> from tilewise.compat.bert_padding import index_first_axis
        >>> index_first_axis(torch.tensor([[1], [2], [3]]), torch.tensor([2, 0])).tolist()
        [[3], [1]]
    """
    return input[indices]


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Zeros (first_axis_dim, …) whose rows `indices` are `values`.

    Raises:
        ValueError: indices are not one for each row of values, or lie outside.

    Example:
        >>> from tilewise.compat.bert_padding import index_put_first_axis
        >>> index_put_first_axis(torch.tensor([[1], [2]]), torch.tensor([2, 0]), 3).tolist()
        [[2], [0], [1]]
    """
    _check_tensor("values", values, "(total, …)", 1)
    _check_tensor("indices", indices, "(total,)", 1)
    if indices.dtype not in INDEX_DTYPES or indices.shape != values.shape[:1]:
        raise ValueError(
            f"indices must be int32 or int64, one for each of {values.shape[0]} tokens, got "
            f"{indices.dtype} {tuple(indices.shape)}"
        )
    if indices.device != values.device:
        raise ValueError(f"indices must be on {values.device}, got {indices.device}")
    looked_at = indices.is_cpu and not torch.compiler.is_compiling()
    if looked_at and bool(((indices < 0) | (indices >= first_axis_dim)).any()):
        raise ValueError(
            f"indices must be from 0 to {first_axis_dim - 1}, got {int(indices.min())} to "
            f"{int(indices.max())}"
        )
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices.long(), values)


def _check_tensor(name: str, t: Any, shape: str, least: int) -> None:
    if not isinstance(t, Tensor) or t.ndim < least:
        got = tuple(t.shape) if isinstance(t, Tensor) else type(t).__name__
        raise ValueError(f"{name} must be a tensor {shape}, got {got}")


def _check_mask(name: str, mask: Any, batch: torch.Size, device: torch.device) -> None:
    _check_tensor(name, mask, "(B, S)", 2)
    if mask.shape != batch or mask.device != device:
        raise ValueError(
            f"{name} must be (B, S) = {tuple(batch)} on {device}, got {tuple(mask.shape)} on "
            f"{mask.device}"
        )
    if bool(((mask != 0) & (mask != 1)).any()):
        raise ValueError(f"{name} must hold 0 and 1 only, got {mask.unique().tolist()}")
