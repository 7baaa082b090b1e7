"""`scaled_dot_product_attention` with torch's signature and meaning, computed by tilewise."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from tilewise.api import attention
from tilewise.arguments import autocast_is_on


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """As torch.nn.functional.scaled_dot_product_attention, in O(n) memory with any mask and dtype.

    A row that sees no key gives 0. Dropout is applied whenever dropout_p > 0, as torch does; which
    probabilities it drops is tilewise's choice, not torch's.

    Args:
        query: (…, Hq, Sq, D), float64, float32, bfloat16 or float16. (S, D) and (H, S, D) are fine.
        key: (…, Hk, Sk, D).
        value: (…, Hk, Sk, Dv). Leading dimensions of the three broadcast, heads too.
        attn_mask: broadcastable to (…, Hq, Sq, Sk). bool: True may attend; float32 or query's dtype: added
            to the logits, differentiable. Or a torch.nn.attention.bias.CausalBias, of which nothing is built.
        dropout_p: probability of dropping each probability.
        is_causal: row i sees keys 0 … i (top-left, whatever the lengths).
        scale: the default is 1 / √D.
        enable_gqa: Hq may be a multiple of the heads of key and value, each key head serving the query
            heads that follow each other.

    Returns:
        (…, Hq, Sq, Dv).

    Raises:
        ValueError: attn_mask and is_causal together; shapes, dtypes or devices that do not fit; a scale that
            requires a gradient.

    Example:
        >>> from tilewise.compat.sdpa import scaled_dot_product_attention
        >>> q, k = torch.randn(2, 8, 5, 64), torch.randn(2, 2, 7, 64)
        >>> scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True).shape
        torch.Size([2, 8, 5, 64])
    """
    tensors = (query, key, value, attn_mask)
    if (
        not _is_causal_bias(attn_mask)
        and not torch.compiler.is_compiling()
        and has_torch_function(tensors)
    ):
        # Subclasses and modes may have a word, as in torch's functions.
        options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
        operands = (*tensors, dropout_p, is_causal)
        return handle_torch_function(scaled_dot_product_attention, tensors, *operands, **options)
    given = {"query": query, "key": key, "value": value}
    _check_operands(given)
    if attn_mask is not None and is_causal:
        raise ValueError(
            "attn_mask and is_causal must not both be given: put the triangle in the mask"
        )
    if isinstance(scale, Tensor) and scale.requires_grad:
        raise ValueError("scale must be a number, got a tensor that requires a gradient")
    align = "top-left"
    if _is_causal_bias(attn_mask):
        is_causal, align, attn_mask = True, _alignment(attn_mask, query, key), None
    if enable_gqa:
        lead = _broadcast(given, 3)
        key, value = _grouped(query, key, value)
        leads = [(*lead, t.shape[-3]) for t in (query, key, value)]
    else:
        leads = [_broadcast(given, 2)] * 3
    q, k, v = (_native(t, lead) for t, lead in zip((query, key, value), leads, strict=True))
    out = attention(
        q,
        k,
        v,
        causal=is_causal,
        align=align,
        dropout_p=dropout_p,
        scale=float(scale) if isinstance(scale, Tensor) else scale,
        **_mask(attn_mask, query, (*leads[0], query.shape[-2], key.shape[-2])),
    )
    return out.transpose(1, 2).reshape(*leads[0], query.shape[-2], value.shape[-1])


def _is_causal_bias(mask: Any) -> bool:
    # To import its module takes seconds, and whoever has one did.
    loaded = sys.modules.get("torch.nn.attention.bias")
    return loaded is not None and isinstance(mask, loaded.CausalBias)


def _alignment(bias: Any, query: Tensor, key: Tensor) -> str:
    wanted = (bias.seq_len_q, bias.seq_len_kv)
    if wanted != (query.shape[-2], key.shape[-2]):
        raise ValueError(
            f"attn_mask must be a CausalBias of the lengths {(query.shape[-2], key.shape[-2])}, got {wanted}"
        )
    return "bottom-right" if bias.variant.name == "LOWER_RIGHT" else "top-left"


def _check_operands(given: dict[str, Tensor]) -> None:
    for name, t in given.items():
        if not isinstance(t, Tensor) or t.is_nested or t.ndim < 2:
            raise ValueError(
                f"{name} must be a tensor (…, heads, seqlen, head_dim), got {_what(t)}"
            )
    query, key, value = (tuple(t.shape) for t in given.values())
    if query[-1] != key[-1]:
        raise ValueError(f"query and key must have the same head dim, got {query} and {key}")
    if key[-2] != value[-2]:
        raise ValueError(f"key and value must have the same length, got {key} and {value}")


def _what(t: Any) -> str:
    if not isinstance(t, Tensor):
        return type(t).__name__
    return "a nested tensor" if t.is_nested else str(tuple(t.shape))


def _broadcast(given: dict[str, Tensor], own: int) -> tuple[int, ...]:
    """What the dimensions before the last `own` ones broadcast to."""
    if all(t.shape[:-own] == given["query"].shape[:-own] for t in given.values()):
        return tuple(given["query"].shape[:-own])
    try:
        return tuple(torch.broadcast_shapes(*(t.shape[:-own] for t in given.values())))
    except RuntimeError:
        shapes = ", ".join(str(tuple(t.shape)) for t in given.values())
        hint = " (or to be grouped by enable_gqa)" if own == 2 else ""
        raise ValueError(
            f"query, key and value must broadcast in all but their last {own} dimensions{hint}, "
            f"got {shapes}"
        ) from None


def _grouped(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """key and value with the same number of heads, which divides that of query."""
    if min(t.ndim for t in (query, key, value)) < 3:
        raise ValueError(
            "enable_gqa must be given tensors (…, heads, seqlen, head_dim), got "
            f"{tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}"
        )
    hq, hk, hv = (t.shape[-3] for t in (query, key, value))
    if any(hq % h if h else hq for h in (hk, hv)):
        raise ValueError(
            "enable_gqa must be given a query whose heads are a multiple of those of key and value, "
            f"got {hq}, {hk} and {hv} heads"
        )
    if hk == hv:
        return key, value
    return key.repeat_interleave(hq // hk, -3), value.repeat_interleave(hq // hv, -3)


def _native(t: Tensor, lead: tuple[int, ...]) -> Tensor:
    """(…, H, S, D) as (B, S, H, D): a view where there is one batch dimension."""
    *batch, heads = lead or (1,)
    t = t.expand(*lead, *t.shape[-2:])
    return t.reshape(math.prod(batch), heads, *t.shape[-2:]).transpose(1, 2)


def _mask(mask: Tensor | None, query: Tensor, scores: tuple[int, ...]) -> dict[str, Any]:
    """attn_mask as a mask or bias of `attention`; scores is (…, Hq, Sq, Sk)."""
    if mask is None:
        return {}
    if not isinstance(mask, Tensor):
        raise ValueError(f"attn_mask must be a tensor, got {type(mask).__name__}")
    kinds = {torch.bool, torch.float32, query.dtype}
    if autocast_is_on(query.device):
        kinds |= {torch.bfloat16, torch.float16}
    if mask.dtype not in kinds:
        raise ValueError(
            f"attn_mask must be bool, float32 or of query's dtype, {query.dtype}, got {mask.dtype}"
        )
    sizes = (1,) * (len(scores) - mask.ndim) + tuple(mask.shape)
    if len(sizes) > len(scores) or any(
        1 != n != size for n, size in zip(sizes, scores, strict=True)
    ):
        raise ValueError(
            f"attn_mask must broadcast to (…, heads, query length, key length) = {scores}, got "
            f"{tuple(mask.shape)}"
        )
    if len(scores) > 4:
        batch = (1,) * (len(scores) - 3) if math.prod(sizes[:-3]) == 1 else scores[:-3]
        mask = mask.expand(*batch, *sizes[-3:]).reshape(math.prod(batch), *sizes[-3:])
    return {"mask" if mask.dtype == torch.bool else "bias": mask}


_lock = threading.Lock()
_blocks = 0
_replaced: Any = None


@contextmanager
def replace() -> Iterator[None]:
    """Within the block, torch.nn.functional.scaled_dot_product_attention is this module's.

    For code that one cannot edit and that looks the function up in torch.nn.functional when it calls it
    (a name imported from there earlier stays what it was). It holds for the whole process. Blocks may
    nest and overlap, in one thread or several: the first to enter replaces, the last to leave puts back
    what was there, after an exception too.

    Example:
        >>> import torch.nn.functional as F
        >>> from tilewise.compat import sdpa
        >>> with sdpa.replace():
        ...     F.scaled_dot_product_attention is sdpa.scaled_dot_product_attention
        True
        >>> F.scaled_dot_product_attention is sdpa.scaled_dot_product_attention
        False
    """
    global _blocks, _replaced
    functional: Any = torch.nn.functional
    with _lock:
        if _blocks == 0:
            _replaced = functional.scaled_dot_product_attention
            functional.scaled_dot_product_attention = scaled_dot_product_attention
        _blocks += 1
    try:
        yield
    finally:
        with _lock:
            _blocks -= 1
            if _blocks == 0:
                functional.scaled_dot_product_attention, _replaced = _replaced, None
