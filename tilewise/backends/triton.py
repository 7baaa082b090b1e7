"""Triton kernels: every feature of dense and packed problems on any GPU that Triton compiles for.

What a kernel gets is made here from a Problem: the device twins of its values (kernels/score.py), tile
sizes (tuning/config.py) and a grid. Nothing is read back from the device: lengths of packed sequences are
looked up by the programs themselves.

What is looser than on a CPU:

- A NaN or Inf in a key or value that some rows of a tile see may reach the other rows of that tile; one
  that no row sees reaches none.
- In bfloat16 and float16 a row whose logits pass 2³⁰ may come out as NaN.
- In bfloat16 and float16 the backward pass rebuilds probabilities from a float32 lse, so gradients are exact
  to its resolution: about |lse| · 6e-8 relative. In float16, dS is rounded before it is multiplied, and may
  overflow.
- Lengths of packed sequences that do not fit are clipped, since refusing them would mean to wait for the
  device; keys without a column of mask or bias are hidden.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.kernels import twins
from tilewise.kernels.launch import launch
from tilewise.results import (
    SCORE_NAMES,
    Gradients,
    Result,
    accumulation_dtype,
    nothing,
    result_shapes,
)
from tilewise.spec import Problem, Scores
from tilewise.tuning.config import (
    Config,
    Key,
    config_for,
    device_name,
    least_shared_bytes,
    length_bucket,
    mask_kind,
    product_bits,
)

# Low precisions round more elsewhere, and float64 rounds too little to matter.
SPLITS_LSE = (torch.float32,)
INSTALLED = importlib.util.find_spec("triton") is not None
LARGEST_HEAD_DIM = 512
# Grids are one-dimensional and token counts 32-bit.
_LARGEST_COUNT = 2**30
_SHORTEST_TMA = 512
_LARGEST_COORDINATE = 2**31 - 1
# Of what a copy fills in shared memory, in bytes.
_SHARED_ALIGNMENT = 128


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
    if q.device.type == "cuda" and torch.version.hip is not None and q.dtype == torch.float64:
        reasons.append("Triton's compiler fails on products of float64 for AMD's GPUs")
    if q.device.type == "cuda" and widest <= LARGEST_HEAD_DIM:
        reasons += _too_wide(_shared_bytes(q.device), q.dtype, widest)
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


def _too_wide(shared: int, dtype: torch.dtype, widest: int) -> list[str]:
    needs = least_shared_bytes(dtype, twins.power_of_two(widest))
    if needs <= shared:
        return []
    name = str(dtype).removeprefix("torch.")
    return [
        f"{name} of head dim {widest} needs {needs // 1024} KB of shared memory for the smallest tile, "
        f"a block of this GPU may have {shared // 1024} KB"
    ]


@functools.cache
def _shared_bytes(device: torch.device) -> int:
    """Of shared memory that a block may have."""
    of = torch.cuda.get_device_properties(device)
    # The first is more than what a block has without asking; AMD's GPUs do not tell the two apart.
    return int(getattr(of, "shared_memory_per_block_optin", of.shared_memory_per_block))


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
    low = torch.empty_like(lse) if q.dtype in SPLITS_LSE else None
    if out.numel():
        plan = _planned(problem, "forward")
        _launch(
            forward_kernel,
            plan,
            *map(twins.tokens, (q, problem.k, problem.v)),
            *_tmas(problem, plan.chosen.block_k, problem.k, problem.v),
            _bias_tma(problem, plan.chosen),
            twins.tokens(out),
            twins.lines(lse),
            twins.lines(low),
            plan.spec,
            plan.tile,
        )
    elif lse.numel():
        lse.fill_(float("-inf"))
        if low is not None:
            low.zero_()
    return Result(out, lse, nothing(lse.device, lse.dtype) if low is None else low)


def backward(
    problem: Problem,
    result: Result,
    dout: Tensor,
    dlse: Tensor | None,
    wanted: Collection[str] = SCORE_NAMES,
) -> Gradients:
    """Gradients of q, k, v and of the bias, slopes and sinks that there are, of those if wanted."""
    from tilewise.kernels import backward as kernels
    from tilewise.kernels.score import constexpr

    q, k, v, s = problem.q, problem.k, problem.v, problem.scores
    dq, dk, dv = (t.new_empty(t.shape) for t in (q, k, v))
    lse, low = result.lse, result.lse_low if q.dtype in SPLITS_LSE else None
    assert low is None or low.shape == lse.shape, (low.shape, lse.shape)
    block = None if problem.packed is None else _config(problem, "keys").block_q
    base, delta = _base_and_delta(problem, result.out, lse, dout, dlse, block)
    of_base, of_delta, of_low = map(twins.lines, (base, delta, low))
    stats = kernels.Stats(of_base, of_delta, of_low, constexpr(block))
    operands = (*map(twins.tokens, (q, k, v, dout)), stats)

    bias, alibi_slopes, sinks = (
        getattr(s, name) if name in wanted else None for name in SCORE_NAMES
    )
    per_row = bias is not None and bias.shape[-1] == 1
    per_key = bias is not None and not per_row and bias.shape[-2] == 1
    sums = {
        "bias": torch.empty_like(lse) if per_row else None,
        "slopes": None if alibi_slopes is None else torch.empty_like(lse),
        "sinks": None if sinks is None else torch.empty_like(lse),
    }
    dpairs = None if bias is None else _gradient_of_pairs(problem, bias)
    if dq.numel():
        plan = _planned(problem, "queries")
        given = {name: twins.lines(t) for name, t in sums.items()}
        wanted = constexpr(any(t is not None for t in sums.values()))
        rows = kernels.Sums(**given, dlse=twins.lines(dlse if wanted else None), WANTED=wanted)
        tmas = (*_tmas(problem, plan.chosen.block_k, k, v), _bias_tma(problem, plan.chosen))
        pairs: tuple[Any, ...] = (None, None)
        if dpairs is not None:
            pairs = (twins.grid(dpairs), _bias_tma(problem, plan.chosen, dpairs))
        arguments = (*operands, *tmas, twins.tokens(dq), *pairs, rows, plan.spec, plan.tile)
        _launch(kernels.queries_kernel, plan, *arguments)
    key_sums = None
    if per_key:
        shape = (*lse.shape[:-1], k.shape[0 if problem.packed else 1])
        key_sums = lse.new_empty(shape)
    if dk.numel():
        plan = _planned(problem, "keys")
        tmas = (
            *_tmas(problem, plan.chosen.block_q, q, dout),
            *_line_tmas(problem, plan.chosen.block_q, base, delta),
            *_line_tmas(problem, plan.chosen.block_q, low if problem.packed is None else None),
            _bias_tma(problem, plan.chosen),
        )
        arguments = (*operands, *tmas, twins.tokens(dk), twins.tokens(dv), twins.lines(key_sums))
        _launch(kernels.keys_kernel, plan, *arguments, plan.spec, plan.tile)
    dbias = dpairs
    if bias is not None and dpairs is None:
        dbias = _bias_gradient(problem, bias, operands, sums["bias"], key_sums)
    of_slopes, of_sinks = sums["slopes"], sums["sinks"]
    return Gradients(
        dq,
        dk,
        dv,
        Scores(
            s.scale,
            bias=dbias,
            alibi_slopes=None if of_slopes is None else slope_gradient(problem, of_slopes),
            sinks=None if of_sinks is None else of_sinks.sum(-1).sum_to_size(of_sinks.shape[-2]),
        ),
    ).finished(problem)


# ------------------------------------------------------------------ launching


class _Plan(NamedTuple):
    """How a kernel is launched for a problem, and what it is told beside the operands."""

    programs: int
    chosen: Config
    spec: Any
    tile: Any


def _planned(problem: Problem, operation: str) -> _Plan:
    chosen = _config(problem, operation)
    own_keys = operation == "keys"
    t, block = (problem.k, chosen.block_k) if own_keys else (problem.q, chosen.block_q)
    programs = twins.most_tiles(problem, t, block) * t.shape[-2]
    return _Plan(programs, chosen, twins.spec(problem), _tile(problem, chosen))


def _launch(kernel: Any, plan: _Plan, *arguments: Any) -> None:
    options = {
        "num_warps": plan.chosen.num_warps,
        "num_stages": plan.chosen.num_stages,
        # In float32, where products are not fused sums themselves: of a huge logit, less itself, there would
        # remain what its scaling was rounded by.
        "enable_fp_fusion": plan.tile.PRECISION.value == "ieee",
    }
    launch(kernel, plan.programs, arguments[0].data.device, *arguments, **options)


def _config(problem: Problem, operation: str) -> Config:
    q, v, s = problem.q, problem.v, problem.scores
    general = s.mask is not None or s.bias is not None or problem.key_range is not None
    banded = problem.band.left is not None or problem.band.right is not None
    if problem.packed is None:
        length = max(q.shape[1], v.shape[1])
    else:
        hints = (problem.packed.max_seqlen_q, problem.packed.max_seqlen_k)
        length = max(q.shape[0] if n is None else n for n in hints)
    width = max(twins.power_of_two(q.shape[-1]), twins.power_of_two(v.shape[-1]))
    kind, bits = mask_kind(banded, general), product_bits(q.dtype, _architecture(q.device))
    return config_for(
        device_name(q.device), Key(operation, bits, width, kind, length_bucket(length))
    )


def _base_and_delta(
    problem: Problem, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, block: int | None
) -> tuple[Tensor, Tensor]:
    """What the backward pass needs of each row (kernels/backward.py, Stats), laid out as lse in lines of
    multiples of 16 bytes; packed, in tiles of `block` rows, with one of which every sequence begins."""
    rows = lse.shape[-1]
    if block is None:
        room = -(-rows // 4) * 4
        block = max(8, min(64, 8192 // twins.power_of_two(out.shape[-1])))
    else:
        room = rows = twins.most_tiles(problem, out, block) * block
    base, delta = (lse.new_empty((*lse.shape[:-1], room))[..., :rows] for _ in "12")
    fill_stats(problem, twins.spec(problem), out, lse, dout, dlse, base, delta, block)
    return base, delta


def fill_stats(
    problem: Problem,
    spec: Any,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    base: Tensor,
    delta: Tensor,
    block: int,
    cleared: Tensor | None = None,
) -> None:
    """Fills base and delta, `block` rows of out by a program; whole tiles where there is room for them.
    `cleared` becomes 0 in passing: an equal share, a power of two, by each program."""
    from tilewise.kernels.backward import delta_kernel

    programs = twins.most_tiles(problem, out, block) * out.shape[-2]
    if lse.numel() == 0:
        return
    width = twins.power_of_two(out.shape[-1])
    share = 0 if cleared is None else cleared.numel() // programs
    padded = base.numel() == programs * block
    launch(
        delta_kernel,
        programs,
        out.device,
        *(twins.tokens(out), twins.tokens(dout)),
        *map(twins.lines, (dlse, lse, base, delta)),
        *(cleared, spec, twins.folded(problem), out.shape[-1], block, width, share, padded),
    )


# ------------------------------------------------------------------ a Problem as kernels take it


def _tile(problem: Problem, chosen: Config) -> Any:
    from tilewise.kernels.score import Tile, constexpr

    d, dv = problem.q.shape[-1], problem.v.shape[-1]
    sides = (chosen.block_q, chosen.block_k, d, dv, twins.power_of_two(d), twins.power_of_two(dv))
    ragged: tuple[bool, ...] = (True, True)
    if problem.packed is None:
        lengths = (problem.q.shape[1], problem.k.shape[1])
        ragged = tuple(n % block != 0 for n, block in zip(lengths, sides[:2], strict=True))
    return Tile(*map(constexpr, (*sides, _precision(problem.q), *ragged)))


def _precision(q: Tensor) -> str:
    """How products of float32 are computed: "tf32" where torch is allowed to, else as exactly as float32,
    by three products of tf32 where there are tensor cores for it."""
    if q.dtype != torch.float32 or _architecture(q.device) < 80:
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3"


def _architecture(device: torch.device) -> int:
    """The compute capability, 90 for 9.0; 0 where there is none."""
    if interpreted() or device.type == "meta":
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
    if not _has_tma(problem):
        return (None,) * len(tensors)
    return tuple(_tma(t, block) for t in tensors)


def _has_tma(problem: Problem) -> bool:
    return interpreted() or _architecture(problem.q.device) >= 90


def _tma(t: Tensor, block: int) -> Any:
    """Of tokens (B, S, H, D), packed (total, H, D)."""
    if t.shape[-3] < _SHORTEST_TMA:
        return None
    return _descriptor(_batched(t, 4), [1, block, 1, twins.power_of_two(t.shape[-1])])


def _batched(t: Tensor, ndim: int) -> Tensor:
    """What is packed as one batch entry."""
    return t if t.ndim == ndim else t.unsqueeze(0)


def _line_tmas(problem: Problem, block: int, *lines: Tensor | None) -> tuple[Any, ...]:
    """Descriptors for loads of (1, 1, block) numbers of each line (B, H, S), packed (H, rows), or None.

    In shared memory, where one follows the other, copies begin at multiples of 128 bytes; in memory at
    multiples of 16.
    """
    short = problem.q.shape[-3] < _SHORTEST_TMA or block * 4 < _SHARED_ALIGNMENT
    if not _has_tma(problem) or short:
        return (None,) * len(lines)
    return tuple(None if t is None else _descriptor(_batched(t, 3), [1, 1, block]) for t in lines)


def _bias_tma(problem: Problem, chosen: Config, of: Tensor | None = None) -> Any:
    """A descriptor of the bias, or of what is laid out beside it, in tiles (1, 1, block_q, block_k); none
    where sequences are packed, whose rows have columns of their own sequence."""
    bias = problem.scores.bias if of is None else of
    if bias is None or not _has_tma(problem) or problem.packed is not None:
        return None
    if 1 in bias.shape[-2:] or problem.k.shape[1] < _SHORTEST_TMA:
        return None
    return _descriptor(bias, [1, 1, chosen.block_q, chosen.block_k])


def _descriptor(t: Tensor, block: list[int]) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    strides = [
        stride if n > 1 else 16 for n, stride in zip(t.shape, t.stride(), strict=True)
    ]  # of one there is no next
    even = all(stride * t.element_size() % 16 == 0 and stride > 0 for stride in strides[:-1])
    if t.stride(-1) != 1 or t.data_ptr() % 16 or not even or max(t.shape) > _LARGEST_COORDINATE:
        return None
    strides[-1] = 1
    return TensorDescriptor(t, list(t.shape), strides, block)


# ------------------------------------------------------------------ gradients of what is shared


def slope_gradient(problem: Problem, per_row: Tensor) -> Tensor:
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


def _gradient_of_pairs(problem: Problem, bias: Tensor) -> Tensor | None:
    """Where the kernel of dq leaves the gradient of a bias of which every entry is one pair's; else None."""
    q, k, packed = problem.q, problem.k, problem.packed
    batch = () if packed else (q.shape[0],)
    rows = q.shape[0 if packed else 1]
    if bias.shape[:-1] != (*batch, q.shape[-2], rows) or bias.shape[-1] == 1 or not q.numel():
        return None
    hidden = problem.key_range is not None or problem.scores.mask is not None
    every = packed is None and twins.sides(problem) == (None, None) and not hidden and k.numel()
    return torch.empty_like(bias) if every else torch.zeros_like(bias)


def _bias_gradient(
    problem: Problem,
    bias: Tensor,
    operands: tuple[Any, ...],
    per_row: Tensor | None,
    per_key: Tensor | None,
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
    plan = _planned(problem, "bias")
    owners = math.prod(bias.shape[:-2])
    heads = q.shape[-2] if bias.shape[-3] == 1 else 1
    batches = q.shape[0] if packed is None and bias.shape[0] == 1 else 1
    rows = q.shape[0] if packed else q.shape[1]
    tiles = -(-rows // plan.chosen.block_q) + (packed.cu_seqlens_q.shape[0] if packed else 0)
    plan = plan._replace(programs=owners * tiles * -(-bias.shape[-1] // plan.chosen.block_k))
    arguments = (*operands, twins.grid(dbias), batches, heads, plan.spec, plan.tile)
    _launch(bias_kernel, plan, *arguments)
    return dbias


def _by_column(problem: Problem, per_key: Tensor, columns: int) -> Tensor:
    """Shares of packed keys, (Hq, total_k), summed over the sequences: (Hq, columns)."""
    assert problem.packed is not None
    if columns == 0:
        return per_key.new_zeros(per_key.shape[0], 0)
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
