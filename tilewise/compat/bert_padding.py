"""flash_attn.bert_padding: from padded batches to packed tokens and back."""

from __future__ import annotations

import torch
from torch import Tensor


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

    Example:
        >>> from tilewise.compat.bert_padding import unpad_input
        >>> mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
        >>> tokens, indices, cu_seqlens, longest, used = unpad_input(torch.randn(2, 3, 4), mask)
        >>> indices.tolist(), cu_seqlens.tolist(), longest
        ([0, 1, 3], [0, 2, 3], 2)
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.numel() else 0
    used = attention_mask.sum(-1, dtype=torch.int32)
    tokens = index_first_axis(hidden_states.flatten(0, 1), indices)
    return tokens, indices, cu_seqlens, longest, used


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse of `unpad_input`: tokens (total, …) as (batch, seqlen, …), 0 where there is none.

    Example:
        >>> from tilewise.compat.bert_padding import pad_input
        >>> pad_input(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([0, 1, 3]), 2, 3).squeeze(-1)
        tensor([[1., 2., 0.],
                [3., 0., 0.]])
    """
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(
        0, (batch, seqlen)
    )


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

    Example:
        >>> from tilewise.compat.bert_padding import index_put_first_axis
        >>> index_put_first_axis(torch.tensor([[1], [2]]), torch.tensor([2, 0]), 3).tolist()
        [[2], [0], [1]]
    """
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)
