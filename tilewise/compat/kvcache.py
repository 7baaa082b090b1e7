"""flash_attn_with_kvcache: turn the new tokens, write them to the cache in place, attend to it.

A call that fails, for whatever reason, leaves the cache as it was.

A dense cache is a paged one whose pages are whole entries, so there is one way for both.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.arguments import checked_index, paged_problem
from tilewise.compat.flash_calls import (
    absorbed,
    check_operands,
    check_tensor,
    checked_hint,
    in_pages,
    is_chunked,
    options_of,
    places,
)
from tilewise.compat.rotary import rotated


class _Cache(NamedTuple):
    """Token j of entry b is slot j % page_size of page table[b, j // page_size], for j < used[b]."""

    k: Tensor
    v: Tensor
    table: Tensor
    used: Tensor


class _Place(NamedTuple):
    """Of each token: its entry, and its offset among the tokens given of that entry.

    (B, S) for dense tokens, (tokens in sequences,) for packed ones.
    """

    entry: Tensor
    offset: Tensor


def with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    cache_seqlens: int | Tensor | None,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    block_table: Tensor | None,
    *,
    rotary_interleaved: bool,
    num_splits: int,
    return_softmax_lse: bool,
    attention_chunk: int = 0,
    qv: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    **spelled: Any,
) -> Any:
    """flash_attn_with_kvcache; page_table is FA3's name of block_table, max_seqlen_q a hint."""
    options = options_of(**spelled, num_splits=num_splits)
    options["num_splits"] = num_splits or None
    checked_hint("max_seqlen_q", max_seqlen_q)
    chunked = is_chunked(attention_chunk)
    together = {"k and v": (k, v), "rotary_cos and rotary_sin": (rotary_cos, rotary_sin)}
    for names, (one, other) in together.items():
        if (one is None) != (other is None):
            raise ValueError(f"{names} must be given together")
    if k is not None and cache_seqlens is None:
        raise ValueError("cache_seqlens must be given with k and v: it says where they go")
    if k is None and not (rotary_cos is rotary_seqlens is None):
        raise ValueError(
            "rotary_cos and rotary_seqlens must be given with k and v, new tokens to turn"
        )
    if block_table is not None and page_table is not None:
        raise ValueError("block_table and page_table must not both be given: they are one argument")
    rows_shape = "(B, Sq, Hq, D)" if cu_seqlens_q is None else "(total_q, Hq, D)"
    kept_shape = "(entries or blocks, tokens, Hkv, D)"
    check_operands(rows_shape, kept_shape, q=q, k_cache=k_cache, v_cache=v_cache)
    name, table = "block_table", block_table
    if page_table is not None:
        name, table = "page_table", page_table
    batch = q.shape[0]
    if cu_seqlens_q is not None:
        batch = checked_index("cu_seqlens_q", cu_seqlens_q, q.device, 1, "(B + 1,)").shape[0] - 1
    asked = _place("q", q, "cu_seqlens_q", cu_seqlens_q, batch)
    cache = _cache(k_cache, v_cache, name, table, cache_batch_idx, cache_seqlens, batch)
    for name, given in (("cache_leftpad", cache_leftpad), ("rotary_seqlens", rotary_seqlens)):
        if given is not None:
            _check_per_entry(name, given, batch, q.device)
    rows = q if cu_seqlens_q is None else q[:0].expand(batch, *q[:0].shape)
    asides = {"qv": qv, "rotary_cos": rotary_cos, "rotary_sin": rotary_sin}
    for name, given in asides.items():
        _check_for_inference(name, given)
    paged_problem(rows, *cache, **options)  # errors name what came, before it is turned or joined

    written: AbstractContextManager[_Cache] = nullcontext(cache)
    if k is not None and v is not None:
        new = _place("k", k, "cu_seqlens_k_new", cu_seqlens_k_new, batch)
        _check_new(cache, k, v)
        if rotary_cos is not None and rotary_sin is not None:
            first = cache.used if rotary_seqlens is None else rotary_seqlens
            local = options["causal"] or chunked or options["window_size"] != (None, None)
            at = first[asked.entry] + (asked.offset if local else 0)
            turning, rest = q[: at.shape[0]], q[at.shape[0] :]
            q = torch.cat((rotated(turning, rotary_cos, rotary_sin, at, rotary_interleaved), rest))
            at = first[new.entry] + new.offset
            k = rotated(k[: at.shape[0]], rotary_cos, rotary_sin, at, rotary_interleaved)
        written = _appended(cache, k, v, new)
    with written as cache:
        q, k_pages = absorbed(q, cache.k, cache.v, qv)
        out, lse = in_pages(
            q,
            k_pages,
            *cache[1:],
            cu_seqlens_q=cu_seqlens_q,
            leftpad=cache_leftpad,
            attention_chunk=attention_chunk,
            **options,
        )
    return (out, lse) if return_softmax_lse else out


def _cache(
    k: Tensor,
    v: Tensor,
    table_name: str,
    table: Tensor | None,
    cache_batch_idx: Tensor | None,
    cache_seqlens: int | Tensor | None,
    batch: int,
) -> _Cache:
    if table is not None and cache_batch_idx is not None:
        raise ValueError(f"cache_batch_idx must be None with a {table_name}, which says the same")
    if table is None:
        entries = (
            torch.arange(batch, device=k.device) if cache_batch_idx is None else cache_batch_idx
        )
        _check_per_entry("cache_batch_idx", entries, batch, k.device)
        table = entries.unsqueeze(1)
    if checked_index(table_name, table, k.device, 2, "(B, max_blocks)").shape[0] != batch:
        raise ValueError(f"{table_name} must have B = {batch} rows, got {tuple(table.shape)}")
    if cache_seqlens is None:
        cache_seqlens = table.shape[-1] * k.shape[1]
    if isinstance(cache_seqlens, bool):
        raise ValueError(f"cache_seqlens must be an int or a tensor (B,), got {cache_seqlens}")
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=k.device)
    _check_per_entry("cache_seqlens", cache_seqlens, batch, k.device)
    return _Cache(k, v, table, cache_seqlens)


def _check_per_entry(name: str, t: Tensor, batch: int, device: torch.device) -> None:
    if checked_index(name, t, device, 1, "(B,)").shape != (batch,):
        raise ValueError(f"{name} must have shape (B,) = ({batch},), got {tuple(t.shape)}")


def _place(name: str, t: Tensor, cu_name: str, cu_seqlens: Tensor | None, batch: int) -> _Place:
    if cu_seqlens is not None:
        check_tensor(name, t, "(total, H, D)")
        if checked_index(cu_name, cu_seqlens, t.device, 1, "(B + 1,)").shape[0] != batch + 1:
            raise ValueError(
                f"{cu_name} must have B + 1 = {batch + 1} entries, got {cu_seqlens.shape[0]}"
            )
        return _Place(*places(cu_name, cu_seqlens, t))
    check_tensor(name, t, "(B, S, H, D)")
    if t.shape[0] != batch:
        raise ValueError(
            f"{name} must have shape (B, S, H, D) with B = {batch}, got {tuple(t.shape)}"
        )
    s = t.shape[1]
    entry, offset = torch.arange(batch, device=t.device), torch.arange(s, device=t.device)
    return _Place(entry.unsqueeze(1).expand(batch, s), offset.expand(batch, s))


def _check_new(cache: _Cache, k: Tensor, v: Tensor) -> None:
    """Whether the new tokens fit the cache."""
    for name, t, kept in (("k", k, cache.k), ("v", v, cache.v)):
        if not isinstance(t, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(t).__name__}")
        if (t.shape[-2:], t.dtype, t.device) != (kept.shape[-2:], kept.dtype, kept.device):
            raise ValueError(
                f"{name} must be new tokens of {name}_cache, {kept.dtype} {tuple(kept.shape)} on "
                f"{kept.device}, got {t.dtype} {tuple(t.shape)} on {t.device}"
            )
        _check_for_inference(name, t)
    if k.shape[:-2] != v.shape[:-2]:
        raise ValueError(
            f"k and v must have the same tokens, got {tuple(k.shape)}, {tuple(v.shape)}"
        )


def _check_for_inference(name: str, t: Any) -> None:
    if isinstance(t, Tensor) and t.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} requires grad, but a cache is for inference: use torch.no_grad()")


@contextmanager
def _appended(cache: _Cache, k: Tensor, v: Tensor, new: _Place) -> Iterator[_Cache]:
    """The cache with k and v written, in place, behind what each entry has; undone if the block raises."""
    size, batch = cache.k.shape[1], cache.used.shape[0]
    room = cache.table.shape[1] * size
    position = cache.used[new.entry] + new.offset
    if bool(((position < 0) | (position >= room)).any()):
        raise ValueError(
            f"cache_seqlens must leave room for the new tokens: the cache has {room} slots an entry, "
            f"got cache_seqlens {cache.used.tolist()}"
        )
    page = cache.table[new.entry, position // size].long()
    if bool(((page < 0) | (page >= cache.k.shape[0])).any()):
        raise ValueError(
            f"block_table or cache_batch_idx must name pages from 0 to {cache.k.shape[0] - 1} where "
            f"tokens go, got {page.unique().tolist()}"
        )
    slots = (page, position % size)
    k_before, v_before = cache.k[slots], cache.v[slots]
    count = torch.bincount(new.entry.flatten(), minlength=batch)
    try:
        cache.k[slots], cache.v[slots] = k[: page.shape[0]], v[: page.shape[0]]
        yield cache._replace(used=cache.used + count.to(cache.used.dtype))
    except BaseException:
        cache.k[slots], cache.v[slots] = k_before, v_before
        raise
