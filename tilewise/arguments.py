"""From the arguments of a call to a `Problem`: every check of shape, dtype, device and value.

A ValueError names the argument, what came and what is wanted.
"""

from __future__ import annotations

import numbers
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewise.spec import ALIGNMENTS, Band, Dropout, KeyRange, Packed, Paged, Problem, Scores

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INDEX_DTYPES = (torch.int32, torch.int64)
# A number that a double can hold, as opposed to inf or an int of any length.
_LARGEST = sys.float_info.max


def problem_of(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Problem:
    """The checked Problem of a call, dense, packed or paged by the keywords that are there."""
    if "cu_seqlens_q" in arguments or "cu_seqlens_k" in arguments:
        return packed_problem(q, k, v, **arguments)
    if "page_table" in arguments or "seqused_k" in arguments:
        return paged_problem(q, k, v, **arguments)
    return dense_problem(q, k, v, **arguments)


def _tuple(parts: Sequence[str]) -> str:
    return f"({parts[0]},)" if len(parts) == 1 else f"({', '.join(parts)})"


class _Shape:
    """What the other arguments must fit: (name, size) pairs, so that messages can say both."""

    def __init__(self, **sizes: int | None) -> None:
        self.names, self.sizes = tuple(sizes), tuple(sizes.values())

    def __str__(self) -> str:
        sizes = ["any" if n is None else str(n) for n in self.sizes]
        return f"{_tuple(self.names)} = {_tuple(sizes)}"

    def takes(self, t: Tensor) -> bool:
        """Whether t broadcasts to this shape; a size None takes any."""
        skipped = len(self.sizes) - t.ndim
        return skipped >= 0 and all(
            n == 1 or size is None or n == size
            for n, size in zip(t.shape, self.sizes[skipped:], strict=True)
        )


def dense_problem(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Problem:
    q, k, v = _operands(
        {"q": (q, "(B, Sq, Hq, D)"), "k": (k, "(B, Sk, Hkv, D)"), "v": (v, "(B, Sk, Hkv, Dv)")}, 4
    )
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise ValueError(
            f"q, k and v must have the same batch size, got {q.shape[0]}, {k.shape[0]}, {v.shape[0]}"
        )
    b, sq, hq, _ = q.shape
    rows, scores = _Shape(B=b, Sq=sq), _Shape(B=b, Hq=hq, Sq=sq, Sk=k.shape[1])
    return _with_options(Problem(q, k, v, Band(), Scores(1.0)), rows, scores, **options)


def packed_problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    **options: Any,
) -> Problem:
    q, k, v = _operands(
        {
            "q": (q, "(total_q, Hq, D)"),
            "k": (k, "(total_k, Hkv, D)"),
            "v": (v, "(total_k, Hkv, Dv)"),
        },
        3,
    )
    cu_q = checked_index("cu_seqlens_q", cu_seqlens_q, q.device, 1, "(sequences + 1,)")
    cu_k = checked_index("cu_seqlens_k", cu_seqlens_k, q.device, 1, "(sequences + 1,)")
    if not cu_q.shape[0] == cu_k.shape[0] >= 1:
        raise ValueError(
            "cu_seqlens_q and cu_seqlens_k must both have one entry more than there are sequences, "
            f"got {cu_q.shape[0]} and {cu_k.shape[0]} entries"
        )
    for name, hint in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if hint is not None and not _is_int(hint, 0):
            raise ValueError(f"{name} must be None or an int of at least 0, got {hint!r}")
    total, hq, _ = q.shape
    rows = _Shape(total_q=total)
    scores = _Shape(Hq=hq, total_q=total, max_seqlen_k=None)
    packed = Packed(cu_q, cu_k, max_seqlen_q, max_seqlen_k)
    problem = Problem(q, k, v, Band(), Scores(1.0), packed=packed)
    return _with_options(problem, rows, scores, **options)


def paged_problem(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor | None = None,
    seqused_k: Tensor | None = None,
    num_splits: int | None = None,
    **options: Any,
) -> Problem:
    q, k, v = _operands(
        {
            "q": (q, "(B, Sq, Hq, D)"),
            "k_pages": (k_pages, "(num_pages, page_size, Hkv, D)"),
            "v_pages": (v_pages, "(num_pages, page_size, Hkv, Dv)"),
        },
        4,
    )
    if k.shape[0] != v.shape[0] or k.shape[1] < 1:
        raise ValueError(
            "k_pages and v_pages must have the same pages of at least one slot, got "
            f"{tuple(k.shape)} and {tuple(v.shape)}"
        )
    b, sq, hq, _ = q.shape
    table = checked_index("page_table", page_table, q.device, 2, "(B, max_pages)")
    used = checked_index("seqused_k", seqused_k, q.device, 1, "(B,)")
    for name, index in (("page_table", table), ("seqused_k", used)):
        if index.shape[0] != b:
            raise ValueError(
                f"{name} must have B = {b} rows like q, got shape {tuple(index.shape)}"
            )
    if num_splits is not None and not _is_int(num_splits, 1):
        raise ValueError(f"num_splits must be None or an int of at least 1, got {num_splits!r}")
    rows = _Shape(B=b, Sq=sq)
    capacity = table.shape[1] * k.shape[1]
    scores = _Shape(B=b, Hq=hq, Sq=sq, **{"max_pages · page_size": capacity})
    problem = Problem(q, k, v, Band(), Scores(1.0), paged=Paged(table, used))
    problem = _with_options(problem, rows, scores, **options)
    s = problem.scores
    given: dict[str, Tensor | None] = {"q": q, "k_pages": k, "v_pages": v}
    given |= {"bias": s.bias, "alibi_slopes": s.alibi_slopes, "sinks": s.sinks}
    for name, t in given.items():
        if t is not None and t.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name} requires grad, but attention_paged is for inference: call it under "
                "torch.no_grad(), or use attention or attention_varlen"
            )
    return problem


def _operands(given: dict[str, tuple[Tensor, str]], ndim: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, checked against each other as far as all layouts agree, and autocast."""
    for name, (t, shape) in given.items():
        if not isinstance(t, Tensor):
            raise ValueError(f"{name} must be a tensor {shape}, got {type(t).__name__}")
        if t.ndim != ndim:
            raise ValueError(f"{name} must have shape {shape}, got {tuple(t.shape)}")
        if t.dtype not in DTYPES:
            raise ValueError(f"{name} must be one of {_names(DTYPES)}, got {t.dtype}")
    (q_name, k_name, v_name), (q, k, v) = given, (t for t, _ in given.values())
    if not q.device == k.device == v.device:
        raise ValueError(
            f"{q_name}, {k_name} and {v_name} must be on the same device, got {q.device}, "
            f"{k.device}, {v.device}"
        )
    q, k, v = _autocast(q, k, v)
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"{q_name}, {k_name} and {v_name} must have the same dtype, got {q.dtype}, {k.dtype}, "
            f"{v.dtype}"
        )
    if q.shape[-1] != k.shape[-1] or q.shape[-1] < 1 or v.shape[-1] < 1:
        raise ValueError(
            f"{q_name} and {k_name} must have the same head dim of at least 1, and {v_name} one of at "
            f"least 1, got {q.shape[-1]}, {k.shape[-1]}, {v.shape[-1]}"
        )
    tokens = slice(1 if ndim == 4 else 0, -1)  # batch sizes and pages are the layout's to compare
    if k.shape[tokens] != v.shape[tokens]:
        raise ValueError(
            f"{k_name} and {v_name} must have the same tokens and heads, got {tuple(k.shape)} and "
            f"{tuple(v.shape)}"
        )
    if not _is_multiple(q.shape[-2], k.shape[-2]):
        hint = ""
        if k_name == "k" and ndim == 4 and _is_multiple(q.shape[1], k.shape[1]):
            hint = "; tensors (B, H, S, D) are given as t.transpose(1, 2)"
        raise ValueError(
            f"{q_name} must have a multiple of the {k.shape[-2]} heads of {k_name}, got {q.shape[-2]} "
            f"heads{hint}"
        )
    return q, k, v


def _is_multiple(number: int, divisor: int) -> bool:
    return number % divisor == 0 if divisor else number == 0


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast as autocast casts the arguments of F.scaled_dot_product_attention."""
    device = tensors[0].device
    if not autocast_is_on(device):
        return tensors
    dtype = torch.get_autocast_dtype(device.type)
    return tuple(t if t.dtype == torch.float64 else t.to(dtype) for t in tensors)


def _autocast_beside(q: Tensor, t: Any) -> Any:
    """Under autocast, what is of another low precision than q becomes q's; float32 stays."""
    if not isinstance(t, Tensor) or not autocast_is_on(q.device):
        return t
    return t.to(q.dtype) if t.dtype in (torch.float16, torch.bfloat16) else t


def autocast_is_on(device: torch.device) -> bool:
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def autocast_changes(*tensors: Tensor) -> bool:
    """Whether autocast is on for their device, and casts one of them."""
    device = tensors[0].device
    if not autocast_is_on(device):
        return False
    dtype = torch.get_autocast_dtype(device.type)
    return any(t.dtype != dtype for t in tensors)


def checked_index(name: str, t: Any, device: torch.device, ndim: int, shape: str) -> Tensor:
    """An integer tensor of lengths or pages, checked."""
    if not isinstance(t, Tensor) or t.dtype not in INDEX_DTYPES or t.ndim != ndim:
        got = f"{t.dtype} {tuple(t.shape)}" if isinstance(t, Tensor) else type(t).__name__
        raise ValueError(f"{name} must be an int32 or int64 tensor {shape}, got {got}")
    _check_device(name, t, device)
    return t


def _check_device(name: str, t: Tensor, device: torch.device) -> None:
    if t.device != device:
        raise ValueError(f"{name} must be on q's device, {device}, got {t.device}")


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _with_options(
    problem: Problem,
    rows: _Shape,
    scores: _Shape,
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
    deterministic: bool | None = None,
    **unknown: Any,
) -> Problem:
    """The problem with the options that all layouts share, checked."""
    if unknown:
        raise TypeError(f"got an unexpected keyword argument {next(iter(unknown))!r}")
    q = problem.q
    for name, flag in (("causal", causal), ("deterministic", deterministic)):
        if not isinstance(flag, bool) and not (flag is None and name == "deterministic"):
            got = type(flag).__name__ if isinstance(flag, Tensor) else repr(flag)
            raise ValueError(f"{name} must be a bool, got {got}")
    if softcap is not None and not (_is_number(softcap) and 0 < softcap < _LARGEST):
        raise ValueError(f"softcap must be None or a number above 0, got {softcap!r}")
    if scale is not None and not (_is_number(scale) and abs(scale) < _LARGEST):
        raise ValueError(f"scale must be None or a finite number, got {scale!r}")
    if mask is not None:
        _check_tensor("mask", mask, (torch.bool,), q.device, scores)
        mask = _padded(mask, len(scores.sizes))
    bias, alibi_slopes, sinks = (_autocast_beside(q, t) for t in (bias, alibi_slopes, sinks))
    floats = (torch.float32, q.dtype)
    if bias is not None:
        _check_tensor("bias", bias, floats, q.device, scores)
        bias = _padded(bias, len(scores.sizes))
    if alibi_slopes is not None:
        count = problem.packed.cu_seqlens_q.shape[0] - 1 if problem.packed else q.shape[0]
        wanted = (_Shape(B=count, Hq=q.shape[-2]), _Shape(Hq=q.shape[-2]))
        _check_tensor("alibi_slopes", alibi_slopes, floats, q.device, *wanted, broadcast=False)
    if sinks is not None:
        _check_tensor("sinks", sinks, floats, q.device, _Shape(Hq=q.shape[-2]), broadcast=False)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    return problem._replace(
        band=_band(causal, align, window_size),
        scores=Scores(
            float(q.shape[-1] ** -0.5 if scale is None else scale),
            None if softcap is None else float(softcap),
            alibi_slopes,
            bias,
            mask,
            sinks,
        ),
        key_range=None if key_range is None else _key_range(key_range, q.device, rows),
        dropout=_dropout(dropout_p, dropout_seed, q.device),
        deterministic=deterministic,
    )


def _band(causal: bool, align: str, window_size: tuple[int | None, int | None]) -> Band:
    if align not in ALIGNMENTS:
        raise ValueError(f"align must be one of {ALIGNMENTS}, got {align!r}")
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ValueError(f"window_size must be a pair (left, right), got {window_size!r}")
    for side in window_size:
        if side is not None and not _is_int(side, 0):
            raise ValueError(
                "window_size must hold None (unbounded) or an int of at least 0 on each side, "
                f"got {tuple(window_size)!r}"
            )
    # What lies past every position is open; positions stay far from the ends of an int64.
    left, right = (None if side is None else min(side, 2**60) for side in window_size)
    return Band(left, 0 if causal else right, align)


def _key_range(pair: Any, device: torch.device, rows: _Shape) -> KeyRange:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise ValueError(f"key_range must be a pair (start, end), got {type(pair).__name__}")
    ends = []
    for name, end in zip(("key_range start", "key_range end"), pair, strict=True):
        t = end
        if _is_int(end, -(2**63)) and end < 2**63:
            t = torch.full((), end, dtype=torch.int64, device=device)
        elif not isinstance(end, Tensor):
            raise ValueError(f"{name} must be an int or a tensor, got {end!r}")
        _check_tensor(name, t, INDEX_DTYPES, device, rows)
        ends.append(_padded(t, len(rows.sizes)))
    return KeyRange(*ends)


def _dropout(p: float, seed: int | Tensor | None, device: torch.device) -> Dropout | None:
    if not (_is_number(p) and 0 <= p <= 1):
        raise ValueError(f"dropout_p must be a number from 0 to 1, got {p!r}")
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.numel() != 1:
            raise ValueError(
                "dropout_seed must be an int or an int64 tensor of one element, got "
                f"{seed.dtype} {tuple(seed.shape)}"
            )
        _check_device("dropout_seed", seed, device)
        seed = seed.reshape(())
    elif seed is not None and not (_is_int(seed, -(2**63)) and seed < 2**63):
        raise ValueError(
            f"dropout_seed must be an int from −2⁶³ to 2⁶³ − 1 or an int64 tensor, got {seed!r}"
        )
    if p == 0:
        return None
    if seed is None:
        seed = torch.randint(0, 2**63 - 1, (), dtype=torch.int64, device=device)
    elif not isinstance(seed, Tensor):
        seed = torch.tensor(seed, dtype=torch.int64, device=device)
    return Dropout(float(p), seed)


def _is_int(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)  # NumPy's too


def _check_tensor(
    name: str,
    t: Any,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
    *shapes: _Shape,
    broadcast: bool = True,
) -> None:
    if not isinstance(t, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(t).__name__}")
    if t.dtype not in dtypes:
        hint = "; a float mask is a bias" if name == "mask" and t.is_floating_point() else ""
        raise ValueError(f"{name} must be {_names(tuple(set(dtypes)))}, got {t.dtype}{hint}")
    _check_device(name, t, device)
    if not any(s.takes(t) if broadcast else s.sizes == tuple(t.shape) for s in shapes):
        verb = "broadcast to" if broadcast else "have shape"
        wanted = " or ".join(map(str, shapes))
        sizes, hint = shapes[0].sizes, ""
        if broadcast and len(sizes) == 4 and t.shape == (sizes[0], sizes[3]):
            hint = f"; one of keys for each batch entry is {name}[:, None, None, :]"
        raise ValueError(f"{name} must {verb} {wanted}, got {tuple(t.shape)}{hint}")


def _padded(t: Tensor, ndim: int) -> Tensor:
    """t with leading dimensions of size 1."""
    return t.view((1,) * (ndim - t.ndim) + tuple(t.shape)) if t.ndim < ndim else t
