"""The functions of flash_attn 2 under their own names, computed by tilewise.

They take flash_attn 2's arguments in its order, and by keyword those that FlashAttention-3, 4 and
their forks add: see docs/migrating.md. `tilewise.compat.flash_attn_3` has FlashAttention-3's order.

What is the same in all of them: softmax_scale defaults to 1 / √D; causal and windows stand at the bottom
right; window_size is (left, right), inclusive, −1 (or None) open; softcap > 0 is a cap, 0.0 is none;
alibi_slopes is (Hq,) or (B, Hq). learnable_sink, of which s_aux is another name, is (Hq,).
attention_chunk > 0 lets a row see the keys of its own chunk of that size. qv (…, Hq, Dv) adds qv · v to
a logit. num_splits, pack_gqa, sm_margin and scheduler_metadata only schedule. q_descale, k_descale and
v_descale belong to float8 and must be None.

`install()` makes `import flash_attn` find these functions where flash-attn is not installed; so does
``python -m tilewise.compat.flash_attn install-shim``, for good.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tilewise.compat.flash_calls import (
    also_takes,
    check_tensor,
    dense,
    is_count,
    options_of,
    packed,
)
from tilewise.compat.kvcache import with_kvcache
from tilewise.compat.stand_in import install, main, uninstall

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "install",
    "uninstall",
]

Window = tuple[int | None, int | None]
NO_WINDOW = (-1, -1)


@also_takes(dense, options_of)
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **extras: Any,
) -> Any:
    """Attention of (B, S, H, D) tensors; grouped key heads and a head dim of v's own are fine.

    Args:
        q: (B, Sq, Hq, D), float64, float32, bfloat16 or float16.
        k: (B, Sk, Hkv, D).
        v: (B, Sk, Hkv, Dv).
        dropout_p: 0.0 to evaluate.
        softmax_scale, causal, window_size, softcap, alibi_slopes: see the module.
        deterministic: the same bits in every run.
        return_attn_probs: return (out, softmax_lse, S_dmask).
        **extras: return_softmax_lse: return (out, softmax_lse); learnable_sink, s_aux, attention_chunk, qv,
            num_splits, pack_gqa, sm_margin: see the module.

    Returns:
        out (B, Sq, Hq, Dv). softmax_lse is (B, Hq, Sq), −inf for a row without a key. S_dmask is empty
        without dropout; with dropout it holds the probabilities (B, Hq, Sq, Sk), negative where dropped,
        which takes that much memory.

    Raises:
        ValueError: as tilewise.attention; an argument that cannot be honoured.

    Example:
        >>> from tilewise.compat.flash_attn import flash_attn_func
        >>> q, k = torch.randn(2, 10, 8, 64), torch.randn(2, 30, 2, 64)
        >>> flash_attn_func(q, k, k, causal=True, window_size=(15, 0), softcap=30.0).shape
        torch.Size([2, 10, 8, 64])
    """
    return dense(
        q,
        k,
        v,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
        **extras,
    )


@also_takes(dense, options_of)
def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **extras: Any,
) -> Any:
    """`flash_attn_func` of q (B, Sq, Hq, D) and kv (B, Sk, 2, Hkv, D).

    Example:
        >>> from tilewise.compat.flash_attn import flash_attn_kvpacked_func
        >>> flash_attn_kvpacked_func(torch.randn(2, 5, 8, 64), torch.randn(2, 9, 2, 2, 64)).shape
        torch.Size([2, 5, 8, 64])
    """
    k, v = _unpacked("kv", kv, "(B, S, 2, H, D)")
    shared = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    return flash_attn_func(q, k, v, *shared, return_attn_probs, **extras)


@also_takes(dense, options_of)
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    num_heads_q: int | None = None,
    **extras: Any,
) -> Any:
    """`flash_attn_func` of qkv (B, S, 3, H, D), or of (B, S, Hq + 2 Hkv, D) with num_heads_q = Hq.

    num_heads_q may be given with the first too: it is H.

    Example:
        >>> from tilewise.compat.flash_attn import flash_attn_qkvpacked_func
        >>> flash_attn_qkvpacked_func(torch.randn(2, 9, 3, 8, 64), causal=True).shape
        torch.Size([2, 9, 8, 64])
    """
    if num_heads_q is None or (isinstance(qkv, Tensor) and qkv.ndim == 5):
        q, k, v = _unpacked("qkv", qkv, "(B, S, 3, H, D)")
        if num_heads_q is not None and not (is_count(num_heads_q) and num_heads_q == q.shape[2]):
            raise ValueError(
                f"num_heads_q must be the H of qkv (B, S, 3, H, D), {q.shape[2]}, got {num_heads_q!r}"
            )
    else:
        check_tensor("qkv", qkv, "(B, S, Hq + 2 Hkv, D) where num_heads_q is given")
        heads_k, rest = divmod(qkv.shape[2] - num_heads_q, 2) if is_count(num_heads_q) else (0, 1)
        if rest or heads_k < 1 or not num_heads_q:
            raise ValueError(
                f"num_heads_q must be the Hq of qkv (B, S, Hq + 2 Hkv, D), got {num_heads_q!r} and "
                f"{tuple(qkv.shape)}"
            )
        q, k, v = qkv.split([num_heads_q, heads_k, heads_k], 2)
    shared = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    return flash_attn_func(q, k, v, *shared, return_attn_probs, **extras)


@also_takes(packed, options_of)
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | Tensor | None,
    max_seqlen_k: int | Tensor | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    **extras: Any,
) -> Any:
    """Attention of sequences laid end to end.

    Args:
        q: (total_q, Hq, D).
        k: (total_k, Hkv, D); with a block_table pages, (num_blocks, page_size, Hkv, D), for inference.
        v: as k, head dim Dv.
        cu_seqlens_q, cu_seqlens_k: (B + 1,), int32 or int64. With a block_table cu_seqlens_k may be None,
            given seqused_k.
        max_seqlen_q, max_seqlen_k: hints; a wrong one changes no number.
        block_table: (B, max_blocks), int32 or int64: where the keys of each sequence lie.
        **extras: seqused_q, seqused_k (B,): how many tokens of each sequence count, the first ones; the
            rest, and those of `flash_attn_func`, as there.

    Returns:
        out (total_q, Hq, Dv), 0 for tokens that do not count; softmax_lse (Hq, total_q), −inf there;
        S_dmask (B, Hq, max_seqlen_q, max_seqlen_k) with dropout.

    Raises:
        ValueError: as tilewise.attention_varlen; an argument that cannot be honoured.

    Example:
        >>> from tilewise.compat.flash_attn import flash_attn_varlen_func
        >>> q, cu = torch.randn(10, 8, 64), torch.tensor([0, 3, 10])
        >>> flash_attn_varlen_func(q, q, q, cu, cu, 7, 7, causal=True).shape
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
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
        block_table=block_table,
        **extras,
    )


@also_takes(packed, options_of)
def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None,
    max_seqlen_k: int | Tensor | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **extras: Any,
) -> Any:
    """`flash_attn_varlen_func` of q (total_q, Hq, D) and kv (total_k, 2, Hkv, D).

    Example:
        >>> from tilewise.compat.flash_attn import flash_attn_varlen_kvpacked_func
        >>> q, kv, cu = torch.randn(10, 8, 64), torch.randn(10, 2, 2, 64), torch.tensor([0, 3, 10])
        >>> flash_attn_varlen_kvpacked_func(q, kv, cu, cu, 7, 7).shape
        torch.Size([10, 8, 64])
    """
    k, v = _unpacked("kv", kv, "(total, 2, H, D)")
    shared = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        *shared,
        return_attn_probs,
        **extras,
    )


@also_takes(packed, options_of)
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | Tensor | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **extras: Any,
) -> Any:
    """`flash_attn_varlen_func` of qkv (total, 3, H, D).

    Example:
        >>> from tilewise.compat.flash_attn import flash_attn_varlen_qkvpacked_func
        >>> qkv, cu = torch.randn(10, 3, 8, 64), torch.tensor([0, 3, 10])
        >>> flash_attn_varlen_qkvpacked_func(qkv, cu, 7).shape
        torch.Size([10, 8, 64])
    """
    q, k, v = _unpacked("qkv", qkv, "(total, 3, H, D)")
    shared = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        *shared,
        return_attn_probs,
        **extras,
    )


@also_takes(with_kvcache, options_of)
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = NO_WINDOW,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    **extras: Any,
) -> Any:
    """Attention to a cache, after writing new tokens to it in place; for inference.

    Args:
        q: (B, Sq, Hq, D); with cu_seqlens_q (total_q, Hq, D).
        k_cache: (B_cache, S_cache, Hkv, D); with a block_table pages (num_blocks, page_size, Hkv, D).
        v_cache: as k_cache, head dim Dv.
        k, v: new tokens (B, S_new, Hkv, D), written behind the cache_seqlens tokens that are there.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2): turn k at positions cache_seqlens, + 1, …, and q
            too if causal or a window is asked for; else all of q at cache_seqlens. Only with k and v.
        cache_seqlens: int, or (B,) int32 or int64: tokens in the cache before this call; None: all slots.
        cache_batch_idx: (B,): which entry of the cache each q has; None is 0, 1, ….
        cache_leftpad: (B,): keys before it are hidden.
        block_table: (B, max_blocks), int32 or int64; page_table is FlashAttention-3's name.
        rotary_interleaved: pairs are channels (0, 1), (2, 3), …; else those of the two halves.
        num_splits: 0 chooses; changes no number.
        return_softmax_lse: return (out, softmax_lse).
        **extras: rotary_seqlens (B,): positions start there instead of at cache_seqlens; cu_seqlens_q,
            cu_seqlens_k_new: q, or k and v, are packed; max_seqlen_q: a hint; learnable_sink, s_aux,
            attention_chunk, qv and what only schedules: see the module.

    Returns:
        out, laid out like q; softmax_lse (B, Hq, Sq), packed (Hq, total_q).

    Raises:
        ValueError: as tilewise.attention_paged; new tokens that do not fit; an input that requires grad
            under grad mode; an argument that cannot be honoured. The cache is then as it was.

    Example:
        >>> from tilewise.compat.flash_attn import flash_attn_with_kvcache
        >>> k_cache, v_cache = torch.zeros(2, 16, 2, 64), torch.zeros(2, 16, 2, 64)
        >>> q, new = torch.randn(2, 1, 8, 64), torch.randn(2, 1, 2, 64)
        >>> lengths = torch.tensor([3, 9], dtype=torch.int32)
        >>> flash_attn_with_kvcache(q, k_cache, v_cache, new, new, cache_seqlens=lengths).shape
        torch.Size([2, 1, 8, 64])
        >>> torch.equal(k_cache[1, 9], new[1, 0])
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
        block_table,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        rotary_interleaved=rotary_interleaved,
        alibi_slopes=alibi_slopes,
        num_splits=num_splits,
        return_softmax_lse=return_softmax_lse,
        **extras,
    )


def _unpacked(name: str, t: Tensor, shape: str) -> tuple[Tensor, ...]:
    """The two or three tensors that `t`, of kv or qkv, holds side by side before heads and channels."""
    if not isinstance(t, Tensor) or t.ndim != shape.count(",") + 1 or t.shape[-3] != len(name):
        got = tuple(t.shape) if isinstance(t, Tensor) else type(t).__name__
        raise ValueError(f"{name} must have shape {shape}, got {got}")
    return t.unbind(-3)


if __name__ == "__main__":
    main()
