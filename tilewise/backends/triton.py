"""Triton kernels: every feature of dense and packed problems on any GPU that Triton compiles for.

What a kernel gets is made here from a Problem: the device twins of its values (kernels/score.py), tile
sizes (tuning/config.py) and a grid. Nothing is read back from the device: lengths of packed sequences are
looked up by the programs themselves.

Two things are looser than on a CPU. A NaN or Inf in a key or value that some rows of a tile see may reach
the other rows of that tile; one that no row sees reaches none. The backward pass rebuilds probabilities
from a float32 lse, so gradients are exact to its resolution: about |lse| · 6e-8 relative.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from tilewise.random import keep_scale
from tilewise.results import Gradients, Result, accumulation_dtype, result_shapes
from tilewise.spec import Problem, Scores
from tilewise.tuning.config import Config, Key, config_for, length_bucket, mask_kind

SPLITS_LSE = False
INSTALLED = importlib.util.find_spec("triton") is not None
LARGEST_HEAD_DIM = 512
_LOG2E = math.log2(math.e)
# Grids are one-dimensional and token counts 32-bit.
_LARGEST_COUNT = 2**30
_SHORTEST_TMA = 512


def unsupported(problem: Problem) -> list[str]:
    q, k, v = problem.q, problem.k, problem.v
    reasons = []
    if q.device.type != "cuda" and not (q.device.type == "cpu" and interpreted()):
        reasons.append(f"Triton's kernels run on a GPU, and q is on {q.device}")
    if not INSTALLED:
        reasons.append("the package triton is not installed (it comes with PyTorch for CUDA)")
    if problem.paged is not None:
        reasons.append("pages are not served")
    widest = max(q.shape[-1], v.shape[-1])
    if widest > LARGEST_HEAD_DIM:
        reasons.append(f"head dims go up to {LARGEST_HEAD_DIM}, got {widest}")
    tokens = max(t.shape[0] if problem.packed else t.shape[1] for t in (q, k))
    if tokens > _LARGEST_COUNT:
        reasons.append(f"sequences go up to {_LARGEST_COUNT} tokens, got {tokens}")
    single = problem.scores.mask is not None or problem.key_range is not None
    if q.dtype == torch.float64 and single and not interpreted():
        reasons.append("Triton's compiler fails on float64 with a mask or key_range")
    if q.dtype == torch.bfloat16 and interpreted():
        reasons.append("Triton's interpreter computes bfloat16 wrongly")
    if q.device.type == "cuda" and torch.version.cuda is not None:
        reasons += _too_old(torch.cuda.get_device_capability(q.device), q.dtype)
    return reasons


def interpreted() -> bool:
    """Whether Triton runs its kernels on the CPU, in Python (TRITON_INTERPRET=1).

    Read as Triton reads it, but without importing Triton: every call on a CPU asks.
    """
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def _too_old(capability: tuple[int, int], dtype: torch.dtype) -> list[str]:
    needs = (8, 0) if dtype in (torch.bfloat16, torch.float64) else (7, 5)
    if capability >= needs:
        return []
    name, (have, want) = str(dtype).removeprefix("torch."), (capability, needs)
    return [
        f"{name} needs compute capability {want[0]}.{want[1]}, this GPU has {have[0]}.{have[1]}"
    ]


def config(problem: Problem) -> dict[str, Any]:
    c = _config(problem, "forward")
    return {"rows": c.block_q, "keys": c.block_k, "warps": c.num_warps, "stages": c.num_stages}


def forward(problem: Problem) -> Result:
    """out, laid out like q, and lse."""
    from tilewise.kernels.forward import forward_kernel

    q = problem.q
    out_shape, lse_shape = result_shapes(problem)
    out = q.new_empty(out_shape)
    lse = q.new_empty(lse_shape, dtype=accumulation_dtype(q.dtype))
    if out.numel():
        chosen = _config(problem, "forward")
        grid = _tiles(problem, chosen.block_q, "q") * q.shape[-2]
        _launch(
            forward_kernel,
            grid,
            chosen,
            q.device,
            *map(_tokens, (q, problem.k, problem.v)),
            *_tmas(problem, chosen.block_k, problem.k, problem.v),
            _tokens(out),
            _lines(lse),
            _spec(problem),
            _tile(problem, chosen),
        )
    elif lse.numel():
        lse.fill_(float("-inf"))
    return Result(out, lse, lse.new_empty(0))


def backward(
    problem: Problem,
    result: Result,
    dout: Tensor,
    dlse: Tensor | None,
    bias_grad: bool = True,
) -> Gradients:
    """Gradients of q, k, v and of the bias (if wanted), slopes and sinks that there are."""
    from tilewise.kernels import backward as kernels
    from tilewise.kernels.score import constexpr

    q, k, v, s = problem.q, problem.k, problem.v, problem.scores
    dq, dk, dv = (t.new_empty(t.shape) for t in (q, k, v))
    lse = result.lse
    delta = torch.empty_like(lse)
    spec, device = _spec(problem), q.device
    if lse.numel():
        _delta(kernels.delta_kernel, result.out, dout, dlse, delta)
    operands = (*map(_tokens, (q, k, v, dout)), _lines(lse), _lines(delta))

    bias = s.bias if bias_grad else None
    per_row = bias is not None and bias.shape[-1] == 1
    per_key = bias is not None and not per_row and bias.shape[-2] == 1
    sums = {
        "bias": torch.empty_like(lse) if per_row else None,
        "slopes": None if s.alibi_slopes is None else torch.empty_like(lse),
        "sinks": None if s.sinks is None else torch.empty_like(lse),
    }
    if dq.numel():
        chosen = _config(problem, "queries")
        grid = _tiles(problem, chosen.block_q, "q") * q.shape[-2]
        given = {name: None if t is None else _lines(t) for name, t in sums.items()}
        wanted = constexpr(any(t is not None for t in sums.values()))
        rows = kernels.Sums(**given, dlse=None if dlse is None else _lines(dlse), WANTED=wanted)
        arguments = (*operands, *_tmas(problem, chosen.block_k, k, v), _tokens(dq), rows)
        _launch(
            kernels.queries_kernel, grid, chosen, device, *arguments, spec, _tile(problem, chosen)
        )
    key_sums = None
    if per_key:
        key_sums = lse.new_empty(*lse.shape[:-1], k.shape[0 if problem.packed else 1])
    if dk.numel():
        chosen = _config(problem, "keys")
        grid = _tiles(problem, chosen.block_k, "k") * k.shape[-2]
        lines = None if key_sums is None else _lines(key_sums)
        arguments = (
            *operands,
            *_tmas(problem, chosen.block_q, q, dout),
            _tokens(dk),
            _tokens(dv),
            lines,
        )
        _launch(kernels.keys_kernel, grid, chosen, device, *arguments, spec, _tile(problem, chosen))
    dbias = None
    if bias is not None:
        dbias = _bias_gradient(problem, bias, operands, sums["bias"], key_sums, spec)
    slopes, sinks = sums["slopes"], sums["sinks"]
    return Gradients(
        dq,
        dk,
        dv,
        Scores(
            s.scale,
            bias=dbias,
            alibi_slopes=None if slopes is None else _slope_gradient(problem, slopes),
            sinks=None if sinks is None else sinks.sum(-1).sum_to_size(sinks.shape[-2]),
        ),
    ).finished(problem)


# ------------------------------------------------------------------ launching


_compiled: ContextVar[list[Any] | None] = ContextVar("compiled", default=None)


@contextmanager
def compiled_only() -> Iterator[list[Any]]:
    """Within the block kernels are compiled and collected in the list it gives, and none is launched."""
    kernels: list[Any] = []
    token = _compiled.set(kernels)
    try:
        yield kernels
    finally:
        _compiled.reset(token)


def _launch(kernel: Any, grid: int, chosen: Config, device: torch.device, *arguments: Any) -> None:
    options = {"num_warps": chosen.num_warps, "num_stages": chosen.num_stages}
    compiled = _compiled.get()
    if compiled is not None:
        compiled.append(kernel.warmup(*arguments, grid=(grid,), **options))
        return
    with _current(device):
        kernel[(grid,)](*arguments, **options)


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Kernels are launched on the current device, so the tensors' has to be it."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def _config(problem: Problem, operation: str) -> Config:
    q, v, s = problem.q, problem.v, problem.scores
    general = s.mask is not None or s.bias is not None or problem.key_range is not None
    banded = problem.band.left is not None or problem.band.right is not None
    if problem.packed is None:
        length = max(q.shape[1], v.shape[1])
    else:
        hints = (problem.packed.max_seqlen_q, problem.packed.max_seqlen_k)
        length = max(q.shape[0] if n is None else n for n in hints)
    width = max(_power_of_two(q.shape[-1]), _power_of_two(v.shape[-1]))
    kind, bits = mask_kind(banded, general), 8 * q.element_size()
    return config_for(_name(q.device), Key(operation, bits, width, kind, length_bucket(length)))


@functools.cache
def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _tiles(problem: Problem, block: int, side: str) -> int:
    """Programs per head: tiles of all batch entries, or as many as packed sequences may need."""
    t = problem.q if side == "q" else problem.k
    if problem.packed is None:
        return -(-t.shape[1] // block) * t.shape[0]
    return -(-t.shape[0] // block) + problem.packed.cu_seqlens_q.shape[0]


def _delta(kernel: Any, out: Tensor, dout: Tensor, dlse: Tensor | None, delta: Tensor) -> None:
    heads, rows = delta.shape[-2:]
    width = _power_of_two(out.shape[-1])
    block = max(8, min(64, 8192 // width))
    grid = -(-rows // block) * delta.numel() // rows
    lines = (None if dlse is None else _lines(dlse), _lines(delta))
    sizes = (rows, heads, out.shape[-1], block, width)
    _launch(
        kernel, grid, Config(0, 0, 4, 1), out.device, _tokens(out), _tokens(dout), *lines, *sizes
    )


# ------------------------------------------------------------------ a Problem as kernels take it


def _power_of_two(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())


def _tile(problem: Problem, chosen: Config) -> Any:
    from tilewise.kernels.score import Tile, constexpr

    d, dv = problem.q.shape[-1], problem.v.shape[-1]
    sides = (chosen.block_q, chosen.block_k, d, dv, _power_of_two(d), _power_of_two(dv))
    return Tile(*map(constexpr, (*sides, _precision(problem.q))))


def _precision(q: Tensor) -> str:
    """How products of float32 are computed: "tf32" where torch is allowed to, else as exactly as float32,
    by three products of tf32 where there are tensor cores for it."""
    if q.dtype != torch.float32 or _architecture(q.device) < 80:
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3"


def _architecture(device: torch.device) -> int:
    """The compute capability, 90 for 9.0; 0 where there is none."""
    if interpreted():
        return 0
    if device.type == "cuda":
        return _capability(device)
    from triton.runtime import driver

    target = driver.active.get_current_target()  # compiled for a GPU that is not here
    return int(target.arch) if target.backend == "cuda" else 0


@functools.cache
def _capability(device: torch.device) -> int:
    if torch.version.cuda is None:
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _tmas(problem: Problem, block: int, *tensors: Tensor) -> tuple[Any, ...]:
    """Descriptors for loads of whole tiles (1, block, 1, width) by the tensor memory accelerator, or None.

    They need strides in multiples of 16 bytes, and a while to be made: short calls do without.
    """
    if problem.packed is not None or not (interpreted() or _architecture(problem.q.device) >= 90):
        return (None,) * len(tensors)
    return tuple(_tma(t, block) for t in tensors)


def _tma(t: Tensor, block: int) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    strides = t.stride()
    even = all(stride * t.element_size() % 16 == 0 and stride > 0 for stride in strides[:-1])
    if t.shape[1] < _SHORTEST_TMA or strides[-1] != 1 or t.data_ptr() % 16 or not even:
        return None
    return TensorDescriptor(
        t, list(t.shape), list(strides), [1, block, 1, _power_of_two(t.shape[-1])]
    )


def _spec(problem: Problem) -> Any:
    from tilewise.kernels import score

    q, k, packed = problem.q, problem.k, problem.packed
    tokens = 0 if packed else 1
    sq, sk = q.shape[tokens], k.shape[tokens]
    sizes = score.Sizes(sq, sk, q.shape[-2], k.shape[-2], problem.groups)
    # A side that reaches past every position hides nothing.
    left, right = (n if n is not None and n < sq + sk else None for n in problem.band[:2])
    band = score.Band(left, right, score.constexpr(problem.band.align == "bottom-right"))
    dropout = problem.dropout
    key_start, key_end = map(_row_lines, problem.key_range or (None, None))
    if dropout is not None and round(dropout.p * 2**32) == 0:
        dropout = None  # rarer than one in 2³²: nothing is dropped
    return score.Spec(
        sizes,
        band,
        _scores(problem),
        key_start,
        key_end,
        None if dropout is None else _dropout(dropout.p, dropout.seed, _number_for(q.dtype)),
        None if packed is None else _packed(*packed[:2]),
        score.constexpr(problem.scores.mask is not None or problem.scores.bias is not None),
    )


def _scores(problem: Problem) -> Any:
    from tilewise.kernels import score

    s = problem.scores
    plain = s.softcap is None and s.alibi_slopes is None and s.bias is None
    # Folded, unit · m is carried, which must not overflow where the logit itself does not.
    folded = plain and 0 < s.scale * _LOG2E <= 1
    number = _number_for(problem.q.dtype)
    return score.Scores(
        scale=number(s.scale),
        unit=number(s.scale * _LOG2E) if folded else score.LOG2E,
        softcap=None if s.softcap is None else number(s.softcap),
        slopes=None if s.alibi_slopes is None else _slopes(s.alibi_slopes),
        bias=None if s.bias is None else _grid(s.bias),
        mask=None if s.mask is None else _grid(s.mask),
        sinks=None if s.sinks is None else s.sinks.contiguous(),
        FOLDED=score.constexpr(folded),
    )


def _slopes(t: Tensor) -> Any:
    """(Hq,) or (B, Hq): one number per head, none per row."""
    from tilewise.kernels.score import Lines

    return Lines(t, t.stride(0) if t.ndim == 2 else 0, t.stride(-1), 0)


def _number_for(dtype: torch.dtype) -> Callable[[float], Any]:
    """How a number reaches a kernel: as an argument it is rounded to float32, so float64 compiles it in."""
    from tilewise.kernels.score import constexpr

    return constexpr if dtype == torch.float64 else float


def _dropout(p: float, seed: Tensor, number: Callable[[float], Any]) -> Any:
    from tilewise.kernels.score import Dropout

    return Dropout(seed, round(p * 2**32) - 1, number(keep_scale(p)))


def _packed(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Any:
    from tilewise.kernels.score import Packed, constexpr

    count = cu_seqlens_q.shape[0] - 1
    search = constexpr(min(1024, _power_of_two(max(1, count))))
    return Packed(cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous(), count, search)


def _tokens(t: Tensor) -> Any:
    from tilewise.kernels.score import Tokens

    batch = t.stride(0) if t.ndim == 4 else 0
    row, head, column = t.stride()[-3:]
    return Tokens(t, batch, row, head, column)


def _lines(t: Tensor) -> Any:
    """(B, H, S), packed (H, total)."""
    from tilewise.kernels.score import Lines

    return Lines(t, t.stride(0) if t.ndim == 3 else 0, t.stride(-2), t.stride(-1))


def _row_lines(t: Tensor | None) -> Any:
    """(B or 1, S or 1), packed (total or 1,)."""
    from tilewise.kernels.score import Lines

    if t is None:
        return None
    strides = [0 if n == 1 else stride for n, stride in zip(t.shape, t.stride(), strict=True)]
    return Lines(t, strides[0] if t.ndim == 2 else 0, 0, strides[-1])


def _grid(t: Tensor) -> Any:
    """(B, Hq, Sq, Sk), packed (Hq, total_q, columns), each or 1."""
    from tilewise.kernels.score import Grid, constexpr

    strides = [0 if n == 1 else stride for n, stride in zip(t.shape, t.stride(), strict=True)]
    batch = strides[0] if t.ndim == 4 else 0
    head, row, column = strides[-3:]
    by_row, by_column = (constexpr(n != 1) for n in t.shape[-2:])
    return Grid(t, batch, head, row, column, t.shape[-1], by_row, by_column)


# ------------------------------------------------------------------ gradients of what is shared


def _slope_gradient(problem: Problem, per_row: Tensor) -> Tensor:
    """From the shares of rows, (B, Hq, Sq) or packed (Hq, total), to the shape of alibi_slopes."""
    slopes = problem.scores.alibi_slopes
    assert slopes is not None
    if problem.packed is None or slopes.ndim == 1:
        return per_row.sum(-1).sum_to_size(slopes.shape)
    offsets = problem.packed.cu_seqlens_q.long().clamp(0, per_row.shape[-1]).cummax(0).values
    sums = torch.segment_reduce(
        per_row.double().T.contiguous(), "sum", offsets=offsets, unsafe=True
    )
    return sums.to(per_row.dtype)


def _bias_gradient(
    problem: Problem,
    bias: Tensor,
    operands: tuple[Any, ...],
    per_row: Tensor | None,
    per_key: Tensor | None,
    spec: Any,
) -> Tensor:
    if per_row is not None:
        return per_row.unsqueeze(-1).sum_to_size(bias.shape)
    if per_key is not None and problem.packed is None:
        return per_key.unsqueeze(-2).sum_to_size(bias.shape)
    if per_key is not None:
        return _by_column(problem, per_key, bias.shape[-1]).unsqueeze(-2).sum_to_size(bias.shape)
    from tilewise.kernels.backward import bias_kernel

    q, packed = problem.q, problem.packed
    dbias = torch.zeros_like(bias) if problem.k.numel() == 0 else torch.empty_like(bias)
    if not (dbias.numel() and problem.k.numel()):
        return dbias
    chosen = _config(problem, "bias")
    owners = math.prod(bias.shape[:-2])
    heads = q.shape[-2] if bias.shape[-3] == 1 else 1
    batches = q.shape[0] if packed is None and bias.shape[0] == 1 else 1
    rows = q.shape[0] if packed else q.shape[1]
    tiles = -(-rows // chosen.block_q) + (packed.cu_seqlens_q.shape[0] if packed else 0)
    grid = owners * tiles * -(-bias.shape[-1] // chosen.block_k)
    arguments = (*operands, _grid(dbias), batches, heads, spec, _tile(problem, chosen))
    _launch(bias_kernel, grid, chosen, q.device, *arguments)
    return dbias


def _by_column(problem: Problem, per_key: Tensor, columns: int) -> Tensor:
    """Shares of packed keys, (Hq, total_k), summed over the sequences: (Hq, columns)."""
    assert problem.packed is not None
    cu = problem.packed.cu_seqlens_k.long()
    tokens = torch.arange(per_key.shape[-1], device=per_key.device)
    sequence = torch.bucketize(tokens, cu[1:], right=True).clamp(max=max(0, cu.shape[0] - 2))
    column = tokens - cu[sequence]
    real = (tokens < cu[-1]) & (column >= 0) & (column < columns)
    values = per_key.where(real, 0).T
    sums = values.new_zeros(columns, per_key.shape[0])
    # Accumulating index_put sorts first: the order of the sum is the same in every run.
    sums.index_put_((column.clamp(0, columns - 1),), values, accumulate=True)
    return sums.T
