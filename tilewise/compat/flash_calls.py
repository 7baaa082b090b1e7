"""What flash_attn's functions ask for, in tilewise's words: dense, packed, or with keys in pages.

The functions of `flash_attn` and `flash_attn_3` are signatures; here each of their arguments is mapped,
refused by a ValueError that names it, or, where it only schedules, accepted.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from tilewise.api import attention, attention_paged, attention_varlen
from tilewise.arguments import autocast_is_on, checked_index
from tilewise.spec import checked_cu_seqlens

F = TypeVar("F", bound=Callable[..., Any])


def also_takes(*calls: Callable[..., Any]) -> Callable[[F], F]:
    """Shows in a function's signature the keywords that it passes on to `calls` by **extras.

    Callers such as transformers ask inspect.signature which arguments a flash_attn has.
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        parameters = [p for p in signature.parameters.values() if p.kind != p.VAR_KEYWORD]
        for call in calls:
            parameters += [
                p
                for p in inspect.signature(call).parameters.values()
                if p.kind == p.KEYWORD_ONLY
                and p.default is not p.empty
                and p.name not in signature.parameters
            ]
        function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return function

    return decorate


def options_of(
    *,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int | None, int | None],
    softcap: float,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    dropout_p: float = 0.0,
    learnable_sink: Tensor | None = None,
    s_aux: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    scheduler_metadata: Tensor | None = None,
) -> dict[str, Any]:
    """The options of `attention`. The last four arguments only schedule: no number depends on them."""
    if softcap is not None and (isinstance(softcap, bool) or not isinstance(softcap, (int, float))):
        raise ValueError(f"softcap must be a number, 0.0 for none, got {softcap!r}")
    if num_splits is not None and not is_count(num_splits):
        raise ValueError(f"num_splits must be an int of at least 0, got {num_splits!r}")
    descales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    for name, given in descales.items():
        if given is not None:
            raise ValueError(
                f"{name} must be None: it belongs to float8 inputs, which are not served"
            )
    if learnable_sink is not None and s_aux is not None:
        raise ValueError("learnable_sink and s_aux must not both be given: they are one argument")
    if isinstance(window_size, (tuple, list)):
        window_size = tuple(None if side == -1 else side for side in window_size)  # type: ignore[assignment]
    return {
        "scale": softmax_scale,
        "causal": causal,
        "window_size": window_size,
        "softcap": None if softcap is None or softcap <= 0 else softcap,
        "alibi_slopes": alibi_slopes,
        "sinks": s_aux if learnable_sink is None else learnable_sink,
        "dropout_p": dropout_p,
        "deterministic": deterministic or None,  # False asks for nothing
    }


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_attn_probs: bool = False,
    return_softmax_lse: bool = False,
    attention_chunk: int = 0,
    qv: Tensor | None = None,
    **spelled: Any,
) -> Any:
    """flash_attn_func."""
    options = options_of(**spelled)
    check_operands("(B, Sq, Hq, D)", "(B, Sk, Hkv, D)", q=q, k=k, v=v)
    q, k = absorbed(q, k, v, qv)
    if is_chunked(attention_chunk):
        position = torch.arange(q.shape[1], device=q.device) + k.shape[1] - q.shape[1]
        options["key_range"] = chunk_of(position, attention_chunk)
    probabilities = return_attn_probs and options["dropout_p"] > 0
    if probabilities:
        options["dropout_seed"] = _drawn_seed(q.device)
    out, lse = attention(q, k, v, return_lse=True, **options)
    if not return_attn_probs:
        return (out, lse) if return_softmax_lse else out
    if not probabilities:
        return out, lse, q.new_empty(0)
    b, sk, heads, _ = k.shape
    each_key = torch.eye(sk, max(sk, 1), dtype=q.dtype, device=q.device)
    values = each_key[None, :, None].expand(b, sk, heads, max(sk, 1))
    signed = _signed_probabilities(attention, q, k, values, **options)
    return out, lse, signed.transpose(1, 2)[..., :sk]


def packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | Tensor | None,
    max_seqlen_k: int | Tensor | None,
    *,
    return_attn_probs: bool = False,
    return_softmax_lse: bool = False,
    attention_chunk: int = 0,
    qv: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    **spelled: Any,
) -> Any:
    """flash_attn_varlen_func."""
    options = options_of(**spelled)
    probabilities = return_attn_probs and options["dropout_p"] > 0
    if probabilities and not (block_table is seqused_q is seqused_k is None):
        raise ValueError(
            "return_attn_probs must be False with dropout and a block_table, seqused_q or seqused_k"
        )
    keys_shape = "(total_k, Hkv, D)" if block_table is None else "(blocks, tokens, Hkv, D)"
    check_operands("(total_q, Hq, D)", keys_shape, q=q, k=k, v=v)
    hints = [
        checked_hint(name, hint)
        for name, hint in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k))
    ]
    q, k = absorbed(q, k, v, qv)
    if block_table is not None:
        if seqused_q is not None:
            raise ValueError(
                "seqused_q must be None with a block_table: cu_seqlens_q has the lengths"
            )
        checked_index("cu_seqlens_q", cu_seqlens_q, q.device, 1, "(B + 1,)")
        if cu_seqlens_k is not None:
            lengths = checked_index("cu_seqlens_k", cu_seqlens_k, q.device, 1, "(B + 1,)").diff()
            seqused_k = lengths if seqused_k is None else seqused_k
        if seqused_k is None:
            raise ValueError("cu_seqlens_k or seqused_k must be given with a block_table")
        checked_index("seqused_k", seqused_k, q.device, 1, "(B,)")
        options["attention_chunk"] = attention_chunk
        results = in_pages(q, k, v, block_table, seqused_k, cu_seqlens_q=cu_seqlens_q, **options)
        return _returned(*results, return_attn_probs, return_softmax_lse)
    if cu_seqlens_k is None:
        raise ValueError("cu_seqlens_k must be given where there is no block_table")
    if probabilities:
        options["dropout_seed"] = _drawn_seed(q.device)
    total, rows = q.shape[0], None
    if seqused_q is not None:
        rows, cu_seqlens_q = _used("seqused_q", seqused_q, cu_seqlens_q, q)
        q = q[rows]
    if seqused_k is not None:
        keys, cu_seqlens_k = _used("seqused_k", seqused_k, cu_seqlens_k, k)
        k, v = k[keys], v[keys]
    if is_chunked(attention_chunk):
        options["key_range"] = _packed_chunks(q, k, cu_seqlens_q, cu_seqlens_k, attention_chunk)
    sequences = (cu_seqlens_q, cu_seqlens_k)
    out, lse = attention_varlen(q, k, v, *sequences, *hints, return_lse=True, **options)
    if rows is not None:
        out = out.new_zeros(total, *out.shape[1:]).index_copy(0, rows, out)
        lse = lse.new_full((lse.shape[0], total), -torch.inf).index_copy(1, rows, lse)
    if not probabilities:
        return _returned(out, lse, return_attn_probs, return_softmax_lse)
    return out, lse, _packed_probabilities(q, k, cu_seqlens_q, cu_seqlens_k, hints, **options)


def in_pages(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    used: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    leftpad: Tensor | None = None,
    attention_chunk: int = 0,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """out and lse of dense q (B, Sq, Hq, D), or of packed q (total_q, Hq, D) with its cu_seqlens_q."""
    if cu_seqlens_q is None:
        if leftpad is not None or is_chunked(attention_chunk):
            options["key_range"] = _paged_range(q.shape[1], used, leftpad, attention_chunk)
        pages = (k_pages, v_pages, page_table, used)
        return attention_paged(q, *pages, return_lse=True, **options)
    cu = checked_index("cu_seqlens_q", cu_seqlens_q, q.device, 1, "(B + 1,)")
    table = checked_index("block_table", page_table, q.device, 2, "(B, max_blocks)")
    if q.ndim != 3 or not 1 <= cu.shape[0] - 1 == table.shape[0] == used.shape[0]:
        raise ValueError(
            "q must be (total_q, Hq, D) and cu_seqlens_q (B + 1,), with a block_table of B ≥ 1 rows and "
            f"as many lengths of keys, got {tuple(q.shape)}, {tuple(cu.shape)}, {tuple(table.shape)} and "
            f"{tuple(used.shape)}"
        )
    ends = checked_cu_seqlens("cu_seqlens_q", cu, q.shape[0])
    slopes = options.pop("alibi_slopes", None)
    per_entry = isinstance(slopes, Tensor) and slopes.ndim == 2
    if per_entry and slopes.shape[0] != table.shape[0]:
        raise ValueError(
            f"alibi_slopes must be (Hq,) or (B, Hq) with B = {table.shape[0]}, got {tuple(slopes.shape)}"
        )
    parts = [
        in_pages(
            q[None, ends[s] : ends[s + 1]],
            k_pages,
            v_pages,
            table[s : s + 1],
            used[s : s + 1],
            leftpad=None if leftpad is None else leftpad[s : s + 1],
            attention_chunk=attention_chunk,
            alibi_slopes=slopes[s : s + 1] if per_entry else slopes,
            **options,
        )
        for s in range(len(ends) - 1)
    ]
    rest = q.shape[0] - ends[-1]
    out = torch.cat([out[0] for out, _ in parts])
    lse = torch.cat([lse[0] for _, lse in parts], 1)
    pad = torch.nn.functional.pad
    return pad(out, (0, 0, 0, 0, 0, rest)), pad(lse, (0, rest), value=-torch.inf)


def absorbed(q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None) -> tuple[Tensor, Tensor]:
    """q and k such that their products are q kᵀ + qv vᵀ (MLA with absorbed weights)."""
    if qv is None:
        return q, k
    wanted = (*q.shape[:-1], v.shape[-1])
    if not isinstance(qv, Tensor) or qv.shape != wanted:
        got = tuple(qv.shape) if isinstance(qv, Tensor) else type(qv).__name__
        raise ValueError(f"qv must have q's shape with the head dim of v, {wanted}, got {got}")
    given = (q, k, v, qv)
    if len({(t.dtype, t.device) for t in given}) > 1 and not autocast_is_on(q.device):
        kinds = ", ".join(f"{t.dtype} on {t.device}" for t in given)
        raise ValueError(f"q, k, v and qv must have the same dtype and device, got {kinds}")
    return torch.cat((q, qv), -1), torch.cat((k, v), -1)


def check_operands(q_shape: str, k_shape: str, **given: Any) -> None:
    """q, k and v, by the names given, are tensors of that rank and fit each other so far."""
    for (name, t), shape in zip(given.items(), (q_shape, k_shape, k_shape), strict=True):
        check_tensor(name, t, shape)
    (q_name, q), (k_name, k), (v_name, v) = given.items()
    if not q.device == k.device == v.device:
        raise ValueError(
            f"{q_name}, {k_name} and {v_name} must be on the same device, got {q.device}, "
            f"{k.device}, {v.device}"
        )
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            f"{k_name} and {v_name} must have the same tokens and heads, got {tuple(k.shape)} and "
            f"{tuple(v.shape)}"
        )


def check_tensor(name: str, t: Any, shape: str) -> None:
    """t is a tensor with as many dimensions as `shape` names."""
    if not isinstance(t, Tensor) or t.ndim != shape.count(",") + 1:
        got = tuple(t.shape) if isinstance(t, Tensor) else type(t).__name__
        raise ValueError(f"{name} must be a tensor {shape}, got {got}")


def checked_hint(name: str, hint: Any) -> int | None:
    """A hint of a longest sequence; flash_attn takes it as a tensor too."""
    if isinstance(hint, Tensor) and hint.numel() == 1 and not hint.is_floating_point():
        hint = hint.item()
    if hint is not None and not is_count(hint):
        raise ValueError(f"{name} must be None or an int of at least 0, got {hint!r}")
    return hint


def is_count(n: Any) -> bool:
    return isinstance(n, int) and not isinstance(n, bool) and n >= 0


def chunk_of(position: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The keys of the chunk that a position lies in."""
    start = position - position % size
    return start, start + size


def places(name: str, cu_seqlens: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """Of each token of packed t that is in a sequence: which sequence, and which place in it."""
    cu = checked_index(name, cu_seqlens, t.device, 1, "(B + 1,)")
    if not cu.shape[0]:
        raise ValueError(f"{name} must have one entry more than there are sequences, got none")
    checked_cu_seqlens(name, cu, t.shape[0])
    lengths = cu.diff()
    number = torch.arange(lengths.shape[0], device=t.device).repeat_interleave(lengths)
    return number, torch.arange(number.shape[0], device=t.device) - cu[number]


def _returned(out: Tensor, lse: Tensor, probabilities: bool, with_lse: bool) -> Any:
    """Without dropout flash_attn's S_dmask is empty."""
    if probabilities:
        return out, lse, out.new_empty(0)
    return (out, lse) if with_lse else out


def is_chunked(size: int) -> bool:
    if not is_count(size):
        raise ValueError(f"attention_chunk must be 0 (off) or the size of a chunk, got {size!r}")
    return size > 0


def _drawn_seed(device: torch.device) -> Tensor:
    return torch.randint(0, 2**63 - 1, (), dtype=torch.int64, device=device)


def _paged_range(
    rows: int, used: Tensor, leftpad: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor]:
    """Keys from leftpad on, and of the row's chunk, where chunks are counted from leftpad."""
    start = torch.zeros_like(used) if leftpad is None else leftpad
    start, end = start.unsqueeze(1), used.unsqueeze(1)
    if chunk:
        position = torch.arange(rows, device=used.device) + end - rows - start
        first, last = chunk_of(position, chunk)
        start, end = start + first.clamp(min=0), start + last
    return start, end


def _packed_chunks(
    q: Tensor, k: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, size: int
) -> tuple[Tensor, Tensor]:
    number, index = places("cu_seqlens_q", cu_seqlens_q, q)
    places("cu_seqlens_k", cu_seqlens_k, k)
    position = torch.zeros(q.shape[0], dtype=torch.int64, device=q.device)
    position[: number.shape[0]] = index + (cu_seqlens_k.diff() - cu_seqlens_q.diff())[number]
    return chunk_of(position, size)


def _used(name: str, used: Tensor, cu_seqlens: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens of t in use, the first `used` of each sequence, and their cu_seqlens."""
    number, index = places(f"cu_seqlens_{name[-1]}", cu_seqlens, t)
    lengths = cu_seqlens.diff()
    checked_index(name, used, t.device, 1, "(B,)")
    if used.shape != lengths.shape or bool(((used < 0) | (used > lengths)).any()):
        raise ValueError(f"{name} must hold for each sequence from 0 to its length, got {used}")
    tokens = (index < used[number]).nonzero().flatten()
    return tokens, torch.nn.functional.pad(used.cumsum(0), (1, 0))


def _packed_probabilities(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    hints: list[int | None],
    **options: Any,
) -> Tensor:
    """S_dmask of packed sequences: (sequences, Hq, max_seqlen_q, max_seqlen_k)."""
    number, row = places("cu_seqlens_q", cu_seqlens_q, q)
    _, key = places("cu_seqlens_k", cu_seqlens_k, k)
    most_rows, most_keys = (
        max([hint or 0, *cu.diff().tolist()])
        for hint, cu in zip(hints, (cu_seqlens_q, cu_seqlens_k), strict=True)
    )
    values = q.new_zeros(*k.shape[:2], max(most_keys, 1))
    values[: key.shape[0]] = torch.nn.functional.one_hot(key, values.shape[-1])[:, None].to(q.dtype)
    signed = _signed_probabilities(
        attention_varlen,
        q,
        k,
        values,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        **options,
    )
    padded = q.new_zeros(cu_seqlens_q.shape[0] - 1, q.shape[1], most_rows, values.shape[-1])
    padded[number, :, row] = signed[: number.shape[0]]
    return padded[..., :most_keys]


def _signed_probabilities(
    attend: Callable[..., Any], q: Tensor, k: Tensor, values: Tensor, **options: Any
) -> Tensor:
    """Each row's probabilities, negative where dropped. `values` gives each key a column of its own."""
    with torch.no_grad():
        kept = attend(q, k, values, **options)
        probabilities = attend(q, k, values, **{**options, "dropout_p": 0.0})
    return torch.where(kept == 0, -probabilities, probabilities)
