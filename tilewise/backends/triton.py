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
LARGEST_HEAD_DIM = 512
_LOG2E = math.log2(math.e)
# Grids are one-dimensional and token counts 32-bit.
_LARGEST_COUNT = 2**30


def unsupported(problem: Problem) -> list[str]:
    q, k, v = problem.q, problem.k, problem.v
    reasons = []
    if q.device.type != "cuda" and not (q.device.type == "cpu" and interpreted()):
        reasons.append(f"Triton's kernels run on a GPU, and q is on {q.device}")
    if importlib.util.find_spec("triton") is None:
        reasons.append("the package triton is not installed (it comes with PyTorch for CUDA)")
    if problem.paged is not None:
        reasons.append("pages are not served")
    widest = max(q.shape[-1], v.shape[-1])
    if widest > LARGEST_HEAD_DIM:
        reasons.append(f"head dims go up to {LARGEST_HEAD_DIM}, got {widest}")
    tokens = max(t.shape[0] if problem.packed else t.shape[1] for t in (q, k))
    if tokens > _LARGEST_COUNT:
        reasons.append(f"sequences go up to {_LARGEST_COUNT} tokens, got {tokens}")
    if q.device.type == "cuda" and torch.version.cuda is not None:
        reasons += _too_old(torch.cuda.get_device_capability(q.device), q.dtype)
    return reasons


def interpreted() -> bool:
    """Whether Triton runs its kernels on the CPU, in Python (TRITON_INTERPRET=1)."""
    if importlib.util.find_spec("triton") is None:
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)


def _too_old(capability: tuple[int, int], dtype: torch.dtype) -> list[str]:
    needs = (8, 0) if dtype in (torch.bfloat16, torch.float64) else (7, 5)
    if capability >= needs:
        return []
    name, (have, want) = str(dtype).removeprefix("torch."), (capability, needs)
    return [f"{name} needs compute capability {want[0]}.{want[1]}, this GPU has {have[0]}.{have[1]}"]


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
        operands = (*map(_tokens, (q, problem.k, problem.v, out)), _lines(lse))
        _launch(forward_kernel, grid, chosen, q.device, *operands, _spec(problem), _tile(problem, chosen))
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
        wanted = kernels.constexpr(any(t is not None for t in sums.values()))
        rows = kernels.Sums(**given, dlse=None if dlse is None else _lines(dlse), WANTED=wanted)
        tile = _tile(problem, chosen)
        _launch(kernels.queries_kernel, grid, chosen, device, *operands, _tokens(dq), rows, spec, tile)
    key_sums = None
    if per_key:
        shape = lse.shape[:-1] + (k.shape[0 if problem.packed else 1],)
        key_sums = lse.new_empty(shape)
    if dk.numel():
        chosen = _config(problem, "keys")
        grid = _tiles(problem, chosen.block_k, "k") * k.shape[-2]
        tile = _tile(problem, chosen)
        lines = None if key_sums is None else _lines(key_sums)
        gradients = (_tokens(dk), _tokens(dv), lines)
        _launch(kernels.keys_kernel, grid, chosen, device, *operands, *gradients, spec, tile)
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
    _launch(kernel, grid, Config(0, 0, 4, 1), out.device, _tokens(out), _tokens(dout), *lines, *sizes)


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
    if q.dtype != torch.float32 or not _has_tf32(q.device):
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3"


@functools.cache
def _has_tf32(device: torch.device) -> bool:
    if device.type != "cuda":
        return not interpreted()  # compiled for a GPU that is not here
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (8, 0)


def _spec(problem: Problem) -> Any:
    from tilewise.kernels import score

    q, k, packed = problem.q, problem.k, problem.packed
    tokens = 0 if packed else 1
    sq, sk = q.shape[tokens], k.shape[tokens]
    sizes = score.Sizes(sq, sk, q.shape[-2], k.shape[-2], problem.groups)
    # A side that reaches past every position hides nothing.
    sides = (n if n is not None and n < sq + sk else None for n in problem.band[:2])
    band = score.Band(*sides, score.constexpr(problem.band.align == "bottom-right"))
    key_range, dropout = problem.key_range, problem.dropout
    return score.Spec(
        sizes,
        band,
        _scores(problem),
        *((None, None) if key_range is None else map(_row_lines, key_range)),
        None if dropout is None else _dropout(dropout.p, dropout.seed),
        None if packed is None else _packed(*packed[:2]),
        score.constexpr(problem.scores.mask is not None or problem.scores.bias is not None),
    )


def _scores(problem: Problem) -> Any:
    from tilewise.kernels import score

    s = problem.scores
    plain = s.softcap is None and s.alibi_slopes is None and s.bias is None
    # Folded, unit · m is carried, which must not overflow where the logit itself does not.
    folded = plain and 0 < s.scale * _LOG2E <= 1
    number: Callable[[float], Any] = float
    if problem.q.dtype == torch.float64:
        number = score.constexpr  # as an argument it would be rounded to float32
    slopes = s.alibi_slopes
    if slopes is not None:
        slopes = score.Lines(slopes, slopes.stride(0) if slopes.ndim == 2 else 0, slopes.stride(-1), 0)
    return score.Scores(
        scale=number(s.scale),
        unit=number(s.scale * _LOG2E) if folded else score.LOG2E,
        softcap=None if s.softcap is None else number(s.softcap),
        slopes=slopes,
        bias=None if s.bias is None else _grid(s.bias),
        mask=None if s.mask is None else _grid(s.mask),
        sinks=None if s.sinks is None else s.sinks.contiguous(),
        FOLDED=score.constexpr(folded),
    )


def _dropout(p: float, seed: Tensor) -> Any:
    from tilewise.kernels.score import Dropout

    return Dropout(seed, max(0, round(p * 2**32) - 1), keep_scale(p))


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


def _row_lines(t: Tensor) -> Any:
    """(B or 1, S or 1), packed (total or 1,)."""
    from tilewise.kernels.score import Lines

    strides = [0 if n == 1 else stride for n, stride in zip(t.shape, t.stride(), strict=True)]
    return Lines(t, strides[0] if t.ndim == 2 else 0, 0, strides[-1])


def _grid(t: Tensor) -> Any:
    """(B, Hq, Sq, Sk), packed (Hq, total_q, columns), each or 1."""
    from tilewise.kernels.score import Grid, constexpr

    strides = [0 if n == 1 else stride for n, stride in zip(t.shape, t.stride(), strict=True)]
    batch = strides[0] if t.ndim == 4 else 0
    by_row, by_column = (constexpr(n != 1) for n in t.shape[-2:])
    return Grid(t, batch, *strides[-3:], t.shape[-1], by_row, by_column)


# ------------------------------------------------------------------ gradients of what is shared


def _slope_gradient(problem: Problem, per_row: Tensor) -> Tensor:
    """From the shares of rows, (B, Hq, Sq) or packed (Hq, total), to the shape of alibi_slopes."""
    slopes = problem.scores.alibi_slopes
    assert slopes is not None
    if problem.packed is None or slopes.ndim == 1:
        return per_row.sum(-1).sum_to_size(slopes.shape)
    offsets = problem.packed.cu_seqlens_q.long().clamp(0, per_row.shape[-1]).cummax(0).values
    sums = torch.segment_reduce(per_row.double().T.contiguous(), "sum", offsets=offsets, unsafe=True)
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
