"""The public functions: arguments become a checked `Problem`, dispatch chooses, a backend runs."""

from __future__ import annotations

from typing import Any, Literal, TypedDict, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from tilewise import dispatch, ops, repeated
from tilewise.arguments import dense_problem, packed_problem, paged_problem, problem_of
from tilewise.spec import Problem


class Options(TypedDict, total=False):
    """What a call may ask for, by keyword, in every layout (see `attention`)."""

    causal: bool
    align: str
    window_size: tuple[int | None, int | None]
    key_range: tuple[Tensor | int, Tensor | int] | None
    mask: Tensor | None
    bias: Tensor | None
    alibi_slopes: Tensor | None
    softcap: float | None
    scale: float | None
    sinks: Tensor | None
    dropout_p: float
    dropout_seed: int | Tensor | None
    deterministic: bool | None


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = False,
    backend: str | None = None,
    **options: Unpack[Options],
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[True],
    backend: str | None = None,
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: bool,
    backend: str | None = None,
    **options: Unpack[Options],
) -> Any: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    align: str = "bottom-right",
    window_size: tuple[int | None, int | None] = (None, None),
    key_range: tuple[Tensor | int, Tensor | int] | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    backend: str | None = None,
) -> Any:
    """softmax(scale · q kᵀ) v by row, exactly, in O(n) memory (FlashAttention, arXiv 2205.14135).

    A logit comes about in this order: scale, softcap, alibi, bias, mask, sink. Row i sees the keys
    that causal, window_size, key_range and mask all let it see; a row that sees none gives 0.

    Args:
        q: (B, Sq, Hq, D), float64, float32, bfloat16 or float16. Any strides, so a transposed
            (B, H, S, D) tensor costs no copy.
        k: (B, Sk, Hkv, D), the dtype and device of q. Hq is a multiple of Hkv: query head h uses
            key head h // (Hq / Hkv).
        v: (B, Sk, Hkv, Dv).
        causal: row i sees keys up to its own position.
        align: where row i stands when Sq ≠ Sk: "bottom-right", i + Sk − Sq, as in flash_attn, or
            "top-left", i, as in F.scaled_dot_product_attention.
        window_size: (left, right): keys from position − left to position + right, inclusive; None is
            unbounded.
        key_range: (start, end), int32 or int64, broadcastable to (B, Sq), or an int for all rows:
            start ≤ j < end.
        mask: bool, broadcastable to (B, Hq, Sq, Sk); True may attend.
        bias: added to the logits; broadcastable to (B, Hq, Sq, Sk); float32 or q's dtype. −inf hides.
            Its gradient has the shape given.
        alibi_slopes: (Hq,) or (B, Hq), float32 or q's dtype: −slope · |position − j| is added.
        softcap: c > 0: logits become c · tanh(logit / c).
        scale: the default is 1 / √D.
        sinks: (Hq,), float32 or q's dtype: one more logit per head, in the sum alone.
        dropout_p: probability of dropping each probability, 0 to 1.
        dropout_seed: int or int64 tensor; None draws from torch's default generator of the device.
        return_lse: also return logsumexp of each row.
        deterministic: None follows torch.use_deterministic_algorithms. A CPU always is.
        backend: None chooses; a name insists.

    Returns:
        out (B, Sq, Hq, Dv) in q's dtype; with return_lse (out, lse), lse (B, Hq, Sq), natural
        logarithm, float32 (float64 for float64), −inf for an empty row. Both are differentiable, as
        often as one likes, in q, k, v, bias, alibi_slopes and sinks; forward mode and vmap work.

    Raises:
        ValueError: an argument's shape, dtype, device or value does not fit, or `backend` cannot
            serve; the message names the argument, what came and what is wanted.

    Example:
        >>> q = torch.randn(2, 100, 8, 64)
        >>> k, v = torch.randn(2, 120, 2, 64), torch.randn(2, 120, 2, 64)
        >>> tilewise.attention(q, k, v, causal=True, window_size=(31, 0)).shape
        torch.Size([2, 100, 8, 64])
    """
    signature = None
    if mask is key_range is bias is alibi_slopes is sinks is dropout_seed is None:
        signature = repeated.signature(
            *(q, k, v, dropout_p, window_size),
            *(causal, align, softcap, scale, deterministic, backend),
        )
    settled = repeated.find(signature)
    if settled is None:
        problem = dense_problem(
            q,
            k,
            v,
            causal=causal,
            align=align,
            window_size=window_size,
            key_range=key_range,
            mask=mask,
            bias=bias,
            alibi_slopes=alibi_slopes,
            softcap=softcap,
            scale=scale,
            sinks=sinks,
            dropout_p=dropout_p,
            dropout_seed=dropout_seed,
            deterministic=deterministic,
        )
        if signature is None:
            return _run(problem, return_lse, backend)
        settled = repeated.settle(signature, problem, dispatch.choose(problem, backend).backend)
    out, lse = repeated.attend(settled, q, k, v)
    return (out, lse) if return_lse else out


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    return_lse: Literal[False] = False,
    backend: str | None = None,
    **options: Unpack[Options],
) -> Tensor: ...


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    return_lse: Literal[True],
    backend: str | None = None,
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    return_lse: bool,
    backend: str | None = None,
    **options: Unpack[Options],
) -> Any: ...


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    return_lse: bool = False,
    backend: str | None = None,
    **options: Unpack[Options],
) -> Any:
    """Attention of each sequence of a packed batch to itself, without padding.

    Sequence s holds the query tokens cu_seqlens_q[s] … cu_seqlens_q[s + 1] − 1 and the key tokens
    cu_seqlens_k[s] … cu_seqlens_k[s + 1] − 1; positions, windows and ranges count inside it. The
    convention is flash_attn's.

    Args:
        q: (total_q, Hq, D).
        k: (total_k, Hkv, D).
        v: (total_k, Hkv, Dv).
        cu_seqlens_q, cu_seqlens_k: (sequences + 1,), int32 or int64, on q's device, from 0 upwards.
            Tokens past the last entry belong to no sequence: out 0, lse −inf.
        max_seqlen_q, max_seqlen_k: hints for scheduling; a missing or wrong one changes no number.
        return_lse, backend, **options: as in `attention`, but key_range is (total_q,); mask and bias
            broadcast to (Hq, total_q, max_seqlen_k), columns counted inside the row's own sequence;
            alibi_slopes is (Hq,) or (sequences, Hq).

    Returns:
        out (total_q, Hq, Dv); with return_lse also lse (Hq, total_q).

    Raises:
        ValueError: as `attention`; on a CPU also when cu_seqlens do not start at 0, fall, or pass the
            number of tokens.

    Example:
        >>> q, k, v = torch.randn(3, 30, 4, 32).unbind()
        >>> cu = torch.tensor([0, 10, 11, 30])
        >>> tilewise.attention_varlen(q, k, v, cu, cu, causal=True).shape
        torch.Size([30, 4, 32])
    """
    problem = packed_problem(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options
    )
    return _run(problem, return_lse, backend)


@overload
def attention_paged(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    seqused_k: Tensor,
    *,
    num_splits: int | None = None,
    return_lse: Literal[False] = False,
    backend: str | None = None,
    **options: Unpack[Options],
) -> Tensor: ...


@overload
def attention_paged(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    seqused_k: Tensor,
    *,
    num_splits: int | None = None,
    return_lse: Literal[True],
    backend: str | None = None,
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention_paged(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    seqused_k: Tensor,
    *,
    num_splits: int | None = None,
    return_lse: bool,
    backend: str | None = None,
    **options: Unpack[Options],
) -> Any: ...


def attention_paged(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    seqused_k: Tensor,
    *,
    num_splits: int | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    **options: Unpack[Options],
) -> Any:
    """Attention to keys that lie in pages, as a cache keeps them; for inference.

    Token j of batch entry b is slot j % page_size of page page_table[b, j // page_size]. Slots that no
    row sees may hold anything.

    Args:
        q: (B, Sq, Hq, D).
        k_pages: (num_pages, page_size, Hkv, D).
        v_pages: (num_pages, page_size, Hkv, Dv).
        page_table: (B, max_pages), int32 or int64; entries past the tokens in use are not read.
        seqused_k: (B,), int32 or int64: how many tokens each batch entry has; its Sk.
        num_splits: into how many parts a kernel may split the keys; None chooses. Changes no meaning.
        return_lse, backend, **options: as in `attention`; mask and bias broadcast to
            (B, Hq, Sq, max_pages · page_size).

    Returns:
        out (B, Sq, Hq, Dv); with return_lse also lse (B, Hq, Sq).

    Raises:
        ValueError: as `attention`; an input requires grad under grad mode; on a CPU also for lengths
            past the table's room and page numbers that do not exist.

    Example:
        >>> pages = torch.randn(8, 16, 2, 64)
        >>> table = torch.tensor([[3, 1], [0, 7]])
        >>> q = torch.randn(2, 1, 8, 64)
        >>> tilewise.attention_paged(q, pages, pages, table, torch.tensor([20, 5])).shape
        torch.Size([2, 1, 8, 64])
    """
    problem = paged_problem(q, k_pages, v_pages, page_table, seqused_k, num_splits, **options)
    return _run(problem, return_lse, backend)


def explain(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> dispatch.Choice:
    """Which backend a call would use, how, and every reason why an earlier one does not serve.

    Computes nothing. Takes the arguments of `attention`, or of `attention_varlen` or
    `attention_paged` by keyword (cu_seqlens_q …, page_table …); tensors may be on the meta device.

    Returns:
        A Choice (backend, config, rejected), which prints as a table.

    Raises:
        ValueError: as the call would.

    Example:
        >>> q = k = v = torch.randn(1, 1024, 8, 64)
        >>> tilewise.explain(q, k, v, causal=True).backend
        'tiled'
    """
    arguments.pop("return_lse", None)
    backend = arguments.pop("backend", None)
    if arguments.get("dropout_seed") is None:
        arguments["dropout_seed"] = 0  # none is drawn: to explain changes nothing
    return dispatch.explain(problem_of(q, k, v, **arguments), backend)


def alibi_slopes(heads: int) -> Tensor:
    """The slopes of the ALiBi paper (Press et al. 2021, arXiv 2108.12409) for any number of heads.

    For a power of two n: 2^(−8 (h + 1) / n). For others, those of the power of two below, then every
    second one of its double.

    Args:
        heads: how many, at least 1.

    Returns:
        float32 (heads,).

    Raises:
        ValueError: heads < 1.

    Example:
        >>> tilewise.alibi_slopes(4)
        tensor([0.2500, 0.0625, 0.0156, 0.0039])
    """
    if heads < 1:
        raise ValueError(f"heads must be at least 1, got {heads}")
    below = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * (h + 1) / below) for h in range(below)]
    slopes += [2.0 ** (-4 * (h + 1) / below) for h in range(0, 2 * (heads - below), 2)]
    return torch.tensor(slopes)


def _run(problem: Problem, return_lse: bool, backend: str | None) -> Any:
    choice = dispatch.choose(problem, backend)
    out, lse = ops.attend(problem, choice.backend)
    return (out, lse) if return_lse else out
