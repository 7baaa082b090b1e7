"""The functions of FlashAttention-3 (its module flash_attn_interface) under their own names.

They differ from those of flash_attn 2 in the order of the arguments, in having neither dropout nor
ALiBi, and in what return_attn_probs returns: (out, softmax_lse). What arguments mean is said in
`tilewise.compat.flash_attn`. learnable_sink and its other name s_aux, which FlashAttention-4 and forks
add, are taken by keyword.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tilewise.compat.flash_attn import NO_WINDOW, Window
from tilewise.compat.flash_attn import flash_attn_qkvpacked_func as qkvpacked
from tilewise.compat.flash_calls import dense, packed
from tilewise.compat.kvcache import with_kvcache

__all__ = [
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = NO_WINDOW,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    learnable_sink: Tensor | None = None,
    s_aux: Tensor | None = None,
) -> Any:
    """Attention of q (B, Sq, Hq, D), k (B, Sk, Hkv, D) and v (B, Sk, Hkv, Dv).

    Example:
        >>> from tilewise.compat.flash_attn_3 import flash_attn_func
        >>> q = torch.randn(2, 10, 8, 64)
        >>> out, lse = flash_attn_func(q, q, q, 0.1, True, return_attn_probs=True)
        >>> out.shape, lse.shape
        (torch.Size([2, 10, 8, 64]), torch.Size([2, 8, 10]))
    """
    return dense(
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        causal=causal,
        qv=qv,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        deterministic=deterministic,
        sm_margin=sm_margin,
        return_softmax_lse=return_attn_probs,
        learnable_sink=learnable_sink,
        s_aux=s_aux,
    )


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = NO_WINDOW,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    learnable_sink: Tensor | None = None,
    s_aux: Tensor | None = None,
) -> Any:
    """`flash_attn_func` of qkv (B, S, 3, H, D), or of (B, S, Hq + 2 Hkv, D) with num_heads_q = Hq.

    Example:
        >>> from tilewise.compat.flash_attn_3 import flash_attn_qkvpacked_func
        >>> flash_attn_qkvpacked_func(torch.randn(2, 10, 12, 64), num_heads_q=8).shape
        torch.Size([2, 10, 8, 64])
    """
    return qkvpacked(
        qkv,
        softmax_scale=softmax_scale,
        causal=causal,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        deterministic=deterministic,
        num_heads_q=num_heads_q,
        sm_margin=sm_margin,
        return_softmax_lse=return_attn_probs,
        learnable_sink=learnable_sink,
        s_aux=s_aux,
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None,
    max_seqlen_k: int | Tensor | None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = NO_WINDOW,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    learnable_sink: Tensor | None = None,
    s_aux: Tensor | None = None,
) -> Any:
    """Attention of sequences laid end to end: q (total_q, Hq, D), k and v (total_k, Hkv, D or Dv).

    Example:
        >>> from tilewise.compat.flash_attn_3 import flash_attn_varlen_func
        >>> q, cu = torch.randn(10, 8, 64), torch.tensor([0, 3, 10])
        >>> flash_attn_varlen_func(q, q, q, cu, cu, 7, 7, seqused_k=torch.tensor([2, 7])).shape
        torch.Size([10, 8, 64])
    """
    return packed(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        softmax_scale=softmax_scale,
        causal=causal,
        qv=qv,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        deterministic=deterministic,
        sm_margin=sm_margin,
        return_softmax_lse=return_attn_probs,
        learnable_sink=learnable_sink,
        s_aux=s_aux,
    )


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = NO_WINDOW,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    learnable_sink: Tensor | None = None,
    s_aux: Tensor | None = None,
) -> Any:
    """Attention to a cache, after writing new tokens to it in place; for inference.

    Example:
        >>> from tilewise.compat.flash_attn_3 import flash_attn_with_kvcache
        >>> pages = torch.zeros(6, 4, 2, 64)
        >>> q, new = torch.randn(1, 3, 8, 64), torch.randn(1, 3, 2, 64)
        >>> table = torch.tensor([[5, 2]])
        >>> cache = (pages, pages.clone(), new, new)
        >>> flash_attn_with_kvcache(q, *cache, cache_seqlens=3, page_table=table, causal=True).shape
        torch.Size([1, 3, 8, 64])
        >>> torch.equal(pages[2, :2], new[0, 1:])
        True
    """
    return with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        rotary_cos,
        rotary_sin,
        cache_seqlens,
        cache_batch_idx,
        cache_leftpad,
        None,
        page_table=page_table,
        qv=qv,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k_new=cu_seqlens_k_new,
        max_seqlen_q=max_seqlen_q,
        rotary_seqlens=rotary_seqlens,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        rotary_interleaved=rotary_interleaved,
        scheduler_metadata=scheduler_metadata,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        sm_margin=sm_margin,
        return_softmax_lse=return_softmax_lse,
        learnable_sink=learnable_sink,
        s_aux=s_aux,
    )
