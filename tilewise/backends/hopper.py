"""Hopper kernels (H100, H200) in Triton's Gluon: the forward pass at the speed of the tensor cores.

The TMA engine reads q, k and v as they lie: any strides that are multiples of 16 bytes, no copy. Programs
stay on their multiprocessors and draw tiles (kernels/hopper_forward.py), those of packed sequences in an
order that is made on the device (kernels/hopper_schedule.py). The backward pass adds up dQ in memory, in any
order (kernels/hopper_backward.py). Where it has to be deterministic, or head dims are above 128, dQ has a
kernel of its own (kernels/hopper_backward_queries.py; kernels/hopper_backward_wide.py has dK's and dV's):
nothing is added up in memory, and the bits of all gradients are the same in every run. It is also where the
gradients of slopes and sinks come from. Where packed q and k have lengths of their own, or rows a key_range,
the backward pass works on copies with zeros where nothing is seen (backends/hidden.py). What these kernels do
not take is left to the Triton backend.

As there, a NaN or Inf in a key or value that some rows see may reach rows that do not see it, here those
whose tile shares a block of keys with it; in the backward pass one in a row of q or dout may likewise reach
gradients of keys that the row does not see. One that no row sees reaches none. A row whose logits pass 2²⁸
may come out as NaN.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.backends import triton
from tilewise.backends.hidden import seen_intervals, seen_tokens, with_zeros
from tilewise.kernels import twins
from tilewise.kernels.launch import current, launch
from tilewise.results import SCORE_NAMES, Gradients, Result, nothing, result_shapes
from tilewise.spec import Problem, Scores
from tilewise.tuning.config import Key, config_for, device_name, length_bucket, mask_kind

SPLITS_LSE = ()

LARGEST_HEAD_DIM = 256
_ALIGNMENT = 16
_VERSIONS = ((3, 6), (3, 9))
_GROUP_ROWS = 64
# Shared memory of a block, and what of it barriers and numbers may take.
_SHARED_BYTES, _BARRIERS = 227 * 1024, 640
# By the number of consumers: registers of a thread at the start, which fill the multiprocessor, and those
# that a consumer's has once the producer's gave most of theirs away.
_REGISTERS = {2: (168, 240), 3: (128, 160)}
# What the keys and values may take of the heads that are worked on together: half of the 50 or 60 MB of L2
# may hold a copy of what the other half holds. Packed sequences need more tiles to choose from.
_L2_SHARE, _L2_SHARE_PACKED = 16 * 2**20, 32 * 2**20
# With fewer floating-point operations, some 15 µs, Triton's smaller tiles may fill the GPU better.
_FEWEST_OPERATIONS = 2**32
# How many multiprocessors a GPU has that is not here.
_MULTIPROCESSORS = 132
# Up to which registers hold the gradients of 128 keys in the backward pass.
_WIDE = 128
# Tiles of 256 keys for each multiprocessor, and keys, with which such tiles are the faster ones.
_FEWEST_TILES, _FEWEST_KEYS = 5, 1024
# Coordinates of packed tokens are 32-bit.
_LARGEST_COUNT = 2**30


def unsupported(problem: Problem) -> list[str]:
    q, k, v, s = problem.q, problem.k, problem.v, problem.scores
    reasons = [*_wrong_machine(q.device), *_wrong_triton(_TRITON)]
    if q.dtype not in (torch.bfloat16, torch.float16):
        reasons.append(f"the dtype must be bfloat16 or float16, got {_name(q.dtype)}")
    given = {
        "pages": problem.paged,
        "key_range of packed sequences": problem.packed and problem.key_range,
        "mask": s.mask,
        "bias": s.bias,
        "dropout": problem.dropout,
    }
    reasons += [f"{name}: not served" for name, value in given.items() if value is not None]
    if problem.paged is not None:
        return reasons
    widest = max(q.shape[-1], v.shape[-1])
    if widest > LARGEST_HEAD_DIM:
        reasons.append(f"head dims go up to {LARGEST_HEAD_DIM}, got {widest}")
    if v.shape[-1] * v.element_size() % _ALIGNMENT:
        reasons.append(f"the head dim of v must be a multiple of 8, got {v.shape[-1]}")
    for name, t in (("q", q), ("k", k), ("v", v)):
        reasons += _unaligned(name, t)
    if q.numel() == 0 or not _some_key_seen(problem):
        reasons.append("no row sees a key")
    tokens = max(q.shape[-3], k.shape[-3])
    if tokens > _LARGEST_COUNT:
        reasons.append(f"sequences go up to {_LARGEST_COUNT} tokens, got {tokens}")
    return reasons


def _some_key_seen(problem: Problem) -> bool:
    """As far as it is known on the host."""
    if problem.packed is not None:
        return problem.k.shape[0] > 0
    first, last = _seen_keys(problem)
    return first < last


def declined(problem: Problem) -> list[str]:
    """Why a call that these kernels could serve is better left to another backend."""
    q, k, v = problem.q, problem.k, problem.v
    pairs = q.shape[-3] * k.shape[-3]
    if problem.packed is None:
        pairs *= q.shape[0]
    else:
        pairs //= max(1, problem.packed.cu_seqlens_q.shape[0] - 1)
    operations = 2 * q.shape[-2] * pairs * (q.shape[-1] + v.shape[-1])
    if operations >= _FEWEST_OPERATIONS:
        return []
    return [f"too little to do for tiles of {_GROUP_ROWS * 2} rows: {operations:.1e} operations"]


def _wrong_machine(device: torch.device) -> list[str]:
    if device.type != "cuda" or torch.version.cuda is None:
        return [f"Hopper's kernels run on a GPU of compute capability 9.0, and q is on {device}"]
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) == (9, 0):
        return []
    return [f"the GPU must have compute capability 9.0, this one has {major}.{minor}"]


def _wrong_triton(version: str | None) -> list[str]:
    if version is not None:
        major, minor = (int(part) for part in version.split(".")[:2])
        if _VERSIONS[0] <= (major, minor) <= _VERSIONS[1]:
            return []
    low, high = (".".join(map(str, ends)) for ends in _VERSIONS)
    got = "the package is not installed" if version is None else f"got {version}"
    return [
        f"Triton must be of a version from {low} to {high}, whose Gluon the kernels are in: {got}"
    ]


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


_TRITON = _installed("triton")


def _unaligned(name: str, t: Tensor) -> list[str]:
    """What of a tensor's strides and start the TMA engine does not take."""
    size = t.element_size()
    reasons = []
    if t.stride(-1) != 1 and t.shape[-1] != 1:
        reasons.append(f"{name} must have stride 1 along the head dim, got {t.stride(-1)}")
    steps = [step for step, n in zip(t.stride()[:-1], t.shape[:-1], strict=True) if n > 1]
    if any(step == 0 or step * size % _ALIGNMENT for step in steps):
        reasons.append(
            f"{name} must have strides that are positive multiples of {_ALIGNMENT} bytes, "
            f"{_ALIGNMENT // size} elements, got {tuple(t.stride())}"
        )
    # What is compiled has no memory yet: `_readable` looks again.
    if not torch.compiler.is_compiling() and t.storage_offset() * size % _ALIGNMENT:
        reasons.append(
            f"{name} must start at a multiple of {_ALIGNMENT} bytes, got {t.storage_offset() * size} "
            "in its storage"
        )
    return reasons


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ------------------------------------------------------------------ how


class _Plan(NamedTuple):
    """Tiles of a program: `groups` consumers of 64 rows; blocks of keys in `stages`, tiles of q in
    `q_stages`; the columns that hold D and Dv in memory, and those that products are made with. `dynamic`:
    programs draw tiles, which differ in length. `fenced`: see `compute_before` of the kernels. `heads` of
    one key head share a tile of few rows each."""

    groups: int
    block_k: int
    block_d: int
    block_dv: int
    d: int
    dv: int
    stages: int
    q_stages: int
    dynamic: bool
    fenced: bool = False
    heads: int = 1

    @property
    def rows(self) -> int:
        """Of one head in a tile."""
        return self.groups * _GROUP_ROWS // self.heads

    @property
    def shared_bytes(self) -> int:
        """Of q, k, v, and of out, 128 columns of which leave at a time."""
        q = self.q_stages * self.groups * _GROUP_ROWS * self.block_d
        kv = self.stages * self.block_k * (self.block_d + self.block_dv)
        return 2 * (q + kv + self.groups * _GROUP_ROWS * min(self.block_dv, 128)) + _BARRIERS


def config(problem: Problem) -> dict[str, Any]:
    plan = _plan(problem)
    left = "; ".join(_backward_unsupported(problem))
    return {
        "rows": plan.rows,
        "heads": plan.heads,
        "keys": plan.block_k,
        "stages": plan.stages,
        "q_stages": plan.q_stages,
        "tiles": "drawn" if plan.dynamic else "dealt",
        "gradients": f"by triton ({left})" if left else "by hopper",
    }


def _plan(problem: Problem) -> _Plan:
    banded = _is_banded(problem)
    block_d, block_dv = (max(64, twins.power_of_two(t.shape[-1])) for t in (problem.q, problem.v))
    lengths: tuple[int | None, ...] = (None, None)
    if problem.packed is not None:
        lengths = problem.packed[2:]
    longest = max(
        t.shape[-3] if n is None else n
        for t, n in zip((problem.q, problem.k), lengths, strict=True)
    )
    length = length_bucket(longest)
    s = problem.scores
    kind = mask_kind(banded, general=s.softcap is not None or s.alibi_slopes is not None)
    key = Key("hopper_forward", 16, max(block_d, block_dv), kind, length)
    chosen = config_for(device_name(problem.q.device), key)
    groups, stages = chosen.block_q // _GROUP_ROWS, chosen.num_stages
    fenced = max(block_d, block_dv) != 128
    # Whose tiles are not all equally long.
    dynamic = banded or problem.packed is not None or problem.key_range is not None
    blocks = (block_d, block_dv)
    d, dv = (_columns(t.shape[-1], n) for t, n in zip((problem.q, problem.v), blocks, strict=True))
    plan = _Plan(groups, chosen.block_k, *blocks, d, dv, stages, 2, dynamic, fenced)
    # The queries of the next tile are loaded ahead, which gives 1 to 3 %; where products are made in parts,
    # it takes 4 % of long sequences.
    in_parts = (d, dv) != blocks
    if (in_parts and length == "long") or plan.shared_bytes > _SHARED_BYTES:
        plan = plan._replace(q_stages=1)
    return plan._replace(heads=_sharing_heads(problem, plan))


def _is_banded(problem: Problem) -> bool:
    """Whether tiles differ in length, as far as the host knows."""
    return any(side is not None for side in twins.sides(problem))


def _columns(width: int, block: int) -> int:
    """Of those in memory, how many products are made with: three quarters may do."""
    return block // 4 * 3 if block >= 128 and width <= block // 4 * 3 else block


def _sharing_heads(problem: Problem, plan: _Plan) -> int:
    """Query heads of one key head that share tiles: all, if their rows do not fill one and all heads' tiles
    are more than the multiprocessors take at once."""
    groups, together = problem.groups, plan._replace(heads=problem.groups)
    if (
        problem.packed is not None
        or problem.scores.alibi_slopes is not None
        or _GROUP_ROWS % groups
        or problem.q.shape[1] >= plan.rows
    ):
        return 1
    multiprocessors = _multiprocessors(problem.q.device)
    rounds = [-(-_most_tiles(problem, p) // multiprocessors) for p in (plan, together)]
    return groups if rounds[1] < rounds[0] else 1


def forward(problem: Problem) -> Result:
    """out, laid out like q, and lse."""
    from tilewise.kernels import hopper_forward as kernels

    q, k, v = problem.q, problem.k, problem.v
    out_shape, lse_shape = result_shapes(problem)
    out, lse = q.new_empty(out_shape), q.new_empty(lse_shape, dtype=torch.float32)
    plan = _plan(problem)
    ragged = True
    if problem.packed is None:
        first, last = _seen_keys(problem)
        k, v = k[:, first:last], v[:, first:last]
        seen = seen_tokens(problem)
        if seen is not None:
            # Between the keys that a tile sees may be some that no row sees, and 0 · NaN is NaN.
            v = torch.where(seen[1][..., None, None], v, 0)
        ragged = (last - first) % plan.block_k != 0
    view = _view if problem.packed is None else _clipped
    rows = _GROUP_ROWS // plan.heads
    views = (
        view(q, rows, plan.heads, plan.block_d),
        view(k, plan.block_k, 1, plan.block_d),
        view(v, plan.block_k, 1, plan.block_dv),
        view(out, rows, plan.heads, min(plan.block_dv, 128)),
    )
    maxnreg, registers = _REGISTERS[plan.groups]
    aligned = _aligned_band(problem, plan)
    sides = (*plan[:-2], ragged, aligned, plan.fenced, registers, plan.heads)
    tile = kernels.Tile(*map(kernels.constexpr, sides))
    with current(q.device):
        spec, walk = _order(problem, plan)
        programs = min(_most_tiles(problem, plan), _multiprocessors(q.device))
        values = (twins.lines(lse), spec, walk, tile)
        options = {"num_warps": 4, "maxnreg": maxnreg}
        launch(kernels.forward_kernel, programs, q.device, *views, *values, **options)
    return Result(out, lse, nothing(lse.device, lse.dtype))


def backward(
    problem: Problem,
    result: Result,
    dout: Tensor,
    dlse: Tensor | None,
    wanted: Collection[str] = SCORE_NAMES,
) -> Gradients:
    """Gradients of q, k, v, slopes and sinks."""
    if _backward_unsupported(problem):
        return triton.backward(problem, result, dout, dlse, wanted)
    plan, packed, whole_dlse = _backward_plan(problem, wanted), problem.packed, dlse
    seen = seen_tokens(problem)
    if seen is not None:
        problem, dout, dlse = with_zeros(problem, dout, dlse, *seen)
    rows, keys, spec, walk = _walk_of_keys(problem, plan)
    q, k, v = (t[..., part, :, :] for t, part in zip(problem[:3], (rows, keys, keys), strict=True))
    dout, out, lse = dout[..., rows, :, :], result.out[..., rows, :, :], result.lse[..., rows]
    # What is left out gets no gradient.
    dq, dk, dv = (
        whole.new_empty(whole.shape) if part.shape == whole.shape else whole.new_zeros(whole.shape)
        for whole, part in zip(problem[:3], (q, k, v), strict=True)
    )
    tiles = twins.most_tiles(problem, q, plan.block_q) * q.shape[-2]
    sums = None
    if plan.summed:
        sums = q.new_empty(tiles * plan.block_q * plan.d, dtype=torch.float32)
    shares = {name: lse.new_empty(lse.shape) for name in _wanted(problem, wanted)}
    room = tiles // lse.shape[:-1].numel() * plan.block_q
    base, delta = (lse.new_empty((*lse.shape[:-1], room)) for _ in "12")
    dlse = None if dlse is None else dlse[..., rows]
    triton.fill_stats(problem, spec, out, lse, dout, dlse, base, delta, plan.block_q, sums)
    view = _view if packed is None else _clipped
    operands = (
        view(q, plan.block_q, 1, plan.d),
        view(k, plan.keys, 1, plan.d),
        view(v, plan.keys, 1, plan.dv),
        view(dout, plan.block_q, 1, plan.dv),
        _line_view(base, plan.block_q),
        _line_view(delta, plan.block_q),
    )
    of_keys = (
        view(dk[..., keys, :, :], plan.keys, 1, plan.d),
        view(dv[..., keys, :, :], plan.keys, 1, plan.dv),
    )
    parts = _Parts(
        q,
        operands,
        of_keys,
        dq[..., rows, :, :],
        twins.most_tiles(problem, k, plan.keys) * k.shape[-2],
        packed is not None or (seen is None and k.shape[1] % plan.keys != 0),
        spec,
        walk,
    )
    _launch_keys(plan, parts, sums)
    if sums is None:
        _launch_queries(problem, plan, parts, shares, dlse)
    else:
        _launch_rows(plan, parts, sums)
    of_scores = Scores(problem.scores.scale)
    if "alibi_slopes" in shares:
        of_slopes = triton.slope_gradient(problem, shares["alibi_slopes"])
        of_scores = of_scores._replace(alibi_slopes=of_slopes)
    if "sinks" in shares:
        of_sinks = _sink_gradient(problem, shares["sinks"], result.lse, whole_dlse)
        of_scores = of_scores._replace(sinks=of_sinks)
    return Gradients(dq, dk, dv, of_scores).finished(problem)


def _sink_gradient(problem: Problem, shares: Tensor, lse: Tensor, dlse: Tensor | None) -> Tensor:
    """(Hq,), float32: the shares of rows that see a key, and of all rows what comes of dlse."""
    sinks = problem.scores.sinks
    assert sinks is not None
    total = shares.sum(-1).sum_to_size(sinks.shape)
    if dlse is not None:
        p = (sinks.float()[:, None] - lse).exp()
        # A row of no sequence has no sink.
        of_lse = torch.where(lse == float("-inf"), 0, p * dlse)
        total += of_lse.sum(-1).sum_to_size(sinks.shape)
    return total


class _Parts(NamedTuple):
    """What kernels of the backward pass work on: q, of the rows that are not left out; descriptors of the
    operands, and of dk and dv; dq of these rows; how many `programs` own keys, whose last tile may be
    `ragged`, if rows do not know where the keys end; Spec and KeysWalk."""

    q: Tensor
    operands: tuple[Any, ...]
    of_keys: tuple[Any, Any]
    dq: Tensor
    programs: int
    ragged: bool
    spec: Any
    walk: Any


def _launch_keys(plan: _BackwardPlan, parts: _Parts, sums: Tensor | None) -> None:
    """The kernel of dk and dv, which adds up dq where there are sums of it."""
    from tilewise.kernels import hopper_backward, hopper_backward_wide
    from tilewise.kernels.score import constexpr

    maxnreg, registers = _REGISTERS[2]
    columns = (plan.d, plan.dv, plan.stages, parts.ragged)
    views = (*parts.operands, *parts.of_keys)
    if plan.wide:
        kernel: Any = hopper_backward_wide.wide_keys_kernel
        tile: Any = hopper_backward_wide.Tile(*map(constexpr, (*columns, registers)))
        given = views
    else:
        kernel = hopper_backward.backward_kernel
        sides = (plan.block_q, plan.keys // (2 * _GROUP_ROWS), *columns, plan.held, registers)
        tile = hopper_backward.Tile(*map(constexpr, sides))
        given = (*views, sums)
    given = (*given, parts.spec, parts.walk, tile)
    options = {"num_warps": 4, "maxnreg": maxnreg}
    launch(kernel, parts.programs, parts.q.device, *given, **options)


def _launch_queries(
    problem: Problem,
    plan: _BackwardPlan,
    parts: _Parts,
    shares: dict[str, Tensor],
    dlse: Tensor | None,
) -> None:
    """The kernel of dq that sums nothing in memory; it fills the rows' `shares` in gradients of scores."""
    from tilewise.kernels import hopper_backward_queries as kernels
    from tilewise.kernels.score import constexpr

    maxnreg, registers = _REGISTERS[2]
    sides = (plan.keys, plan.d, plan.dv, plan.stages, parts.ragged, registers)
    tile = kernels.Tile(*map(constexpr, sides))
    programs, walk = _walk_of_queries(problem, parts.q, parts.spec, parts.walk.offset)
    view = _view if problem.packed is None else _clipped
    of_slopes, of_sinks = (shares.get(name) for name in ("alibi_slopes", "sinks"))
    of_lse = None if of_slopes is None else dlse
    lines = kernels.Shares(
        twins.lines(of_slopes), twins.lines(of_sinks), twins.lines(of_lse), constexpr(bool(shares))
    )
    results = (view(parts.dq, plan.block_q, 1, plan.d), lines)
    given = (*parts.operands, *results, parts.spec, walk, tile)
    options = {"num_warps": 4, "maxnreg": maxnreg}
    launch(kernels.queries_kernel, programs, parts.q.device, *given, **options)


def _launch_rows(plan: _BackwardPlan, parts: _Parts, sums: Tensor) -> None:
    """Makes dq of the sums."""
    from tilewise.kernels.hopper_backward import rows_kernel

    programs = sums.numel() // (plan.block_q * plan.d)
    given = (sums, twins.tokens(parts.dq), parts.spec, parts.dq.shape[-1], plan.block_q, plan.d)
    launch(rows_kernel, programs, parts.q.device, *given)


def _walk_of_keys(problem: Problem, plan: _BackwardPlan) -> tuple[slice, slice, Any, Any]:
    """The rows and keys that are not left out, Spec and KeysWalk of these."""
    from tilewise.kernels.hopper_walk import KeysWalk

    heads = problem.k.shape[-2]
    if problem.packed is None:
        rows, keys, spec, offset = _seen_part(problem)
        ends = ranges = None
        if problem.key_range is not None:
            ends = _ends(problem, plan)
            ranges = _ranges(problem, plan, ends)
        heads *= problem.k.shape[0]
        # As many as are worked on at once.
        at_once = _multiprocessors(problem.q.device) // -(-spec.sizes.sk // plan.keys)
        together = min(max(1, at_once), heads) if _is_banded(problem) else 1
        return rows, keys, spec, KeysWalk(heads, together, offset, ends, ranges, None, None)
    spec = twins.spec(problem)
    schedule = _schedule(problem.k, spec, plan.keys, of_keys=True)
    steps = spec.packed.count.bit_length()
    return slice(None), slice(None), spec, KeysWalk(heads, 1, 0, None, None, schedule, steps)


def _walk_of_queries(problem: Problem, q: Tensor, spec: Any, offset: int) -> tuple[int, Any]:
    """How many programs walk over tiles of 128 rows; packed, those of all heads before the next."""
    from tilewise.kernels.hopper_walk import Walk

    rows, heads = 2 * _GROUP_ROWS, q.shape[-2]
    programs = twins.most_tiles(problem, q, rows) * heads
    if problem.packed is not None:
        schedule, steps = _schedule(q, spec, rows), spec.packed.count.bit_length()
        return programs, Walk(0, heads, heads, 0, schedule, steps, None)
    all_heads, section = q.shape[0] * heads, 1
    if _is_banded(problem):
        read = spec.sizes.sk * (problem.k.shape[-1] + problem.v.shape[-1]) * q.element_size()
        section = _section(all_heads, problem.groups, read, _L2_SHARE)
    return programs, Walk(-(-q.shape[1] // rows), all_heads, section, offset, None, None, None)


def gradients_left_to(problem: Problem) -> str | None:
    """The backend that the gradients of a call are left to, if they are."""
    return "triton" if _backward_unsupported(problem) else None


def _backward_unsupported(problem: Problem) -> list[str]:
    """Why the gradients are left to the Triton backend."""
    widths = {"q": problem.q.shape[-1], "v": problem.v.shape[-1]}
    return [
        f"the head dim of {name} must be a multiple of 8, got {width}"
        for name, width in widths.items()
        if width % 8
    ]


def _wanted(problem: Problem, names: Collection[str] | None) -> list[str]:
    """Which of slopes and sinks there are and want a gradient: those of these names; None: those that require
    it."""
    given = {name: getattr(problem.scores, name) for name in ("alibi_slopes", "sinks")}
    return [
        name
        for name, t in given.items()
        if t is not None and (t.requires_grad if names is None else name in names)
    ]


class _BackwardPlan(NamedTuple):
    """Tiles of keys; blocks of queries, of which `stages` are loaded ahead; the columns that hold D and Dv;
    whether consumers hold their keys and values in registers, and whether dq is summed in memory."""

    keys: int
    block_q: int
    d: int
    dv: int
    stages: int
    held: bool
    summed: bool

    @property
    def wide(self) -> bool:
        """Whether registers hold no gradients of 128 keys."""
        return self.keys == _GROUP_ROWS


def _backward_plan(problem: Problem, wanted: Collection[str] | None = None) -> _BackwardPlan:
    d, dv = (max(64, twins.power_of_two(t.shape[-1])) for t in (problem.q, problem.v))
    # Two of each leave too little time to load, where the L2 cache is busy with sums of dq.
    stages = 3 if d + dv <= _WIDE + LARGEST_HEAD_DIM else 2
    wide = max(d, dv) > _WIDE
    keys = _GROUP_ROWS if wide else 2 * _GROUP_ROWS
    # Slopes and sinks take what kernels that sum nothing in memory have: sums of dS for each row.
    summed = not (wide or problem.deterministic or _wanted(problem, wanted))
    # Those kernels did hold them, and ptxas 12.8 had dS overwrite them in a loop.
    held = d == dv == 64 and summed
    if held and _many_keys(problem):
        # There are registers for these gradients, and none to hold anything.
        keys, stages, held = 4 * _GROUP_ROWS, 2, False
    return _BackwardPlan(keys, _GROUP_ROWS, d, dv, stages, held, summed)


def _many_keys(problem: Problem) -> bool:
    """Whether there are enough tiles of 256 keys, which halve what is added up in memory. Only of plain and
    causal logits and whole tiles: what else there is to do takes registers."""
    general = problem.packed or problem.key_range or twins.sides(problem)[0] is not None
    if general or not twins.folded(problem):
        return False
    first, last = _seen_keys(problem)
    if last - first < _FEWEST_KEYS or (last - first) % (4 * _GROUP_ROWS):
        return False
    tiles = (last - first) // (4 * _GROUP_ROWS) * problem.k.shape[0] * problem.k.shape[2]
    return tiles >= _FEWEST_TILES * _multiprocessors(problem.q.device)


def _seen_part(problem: Problem) -> tuple[slice, slice, Any, int]:
    """Of a dense problem: the rows that see a key and the keys that are seen, as far as the host knows, and
    the Spec of that part and the offset of its first row's position. With a key_range the part is all."""
    band, sq, sk = problem.band, problem.q.shape[1], problem.k.shape[1]
    offset, spec = band.offset(sq, sk), twins.spec(problem)
    if problem.key_range is not None:
        return slice(sq), slice(sk), spec, offset
    first = 0 if band.right is None else -offset - band.right
    last = sq if band.left is None else sk + band.left - offset
    rows, keys = slice(max(first, 0), min(last, sq)), slice(*_seen_keys(problem))
    sizes = spec.sizes._replace(sq=rows.stop - rows.start, sk=keys.stop - keys.start)
    return rows, keys, spec._replace(sizes=sizes), offset + rows.start - keys.start


def _ends(problem: Problem, plan: _BackwardPlan) -> Tensor:
    """The keys that rows with a key_range see, as KeysWalk has them."""
    ends = torch.stack(seen_intervals(problem), 1).int()
    return torch.nn.functional.pad(ends, (0, -ends.shape[-1] % plan.block_q))


def _ranges(problem: Problem, plan: _BackwardPlan, ends: Tensor) -> Tensor:
    """Which blocks of such rows see each tile of keys (ranges_kernel)."""
    from tilewise.kernels.hopper_schedule import ranges_kernel

    b, sk = problem.k.shape[:2]
    ranges = ends.new_empty(b, -(-sk // plan.keys), 4)
    sides = (problem.q.shape[1], sk, plan.block_q, plan.keys, 1024)
    launch(ranges_kernel, ranges.numel() // 4, ends.device, ranges, ends, *sides)
    return ranges


def _line_view(lines: Tensor, rows: int) -> Any:
    """How the TMA engine sees what there is of each row: by tiles, since it reads from multiples of 16 bytes
    on alone, and packed sequences begin anywhere."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout(0, 32, 2)
    return TensorDescriptor(lines, [lines.numel() // rows, rows], [rows, 1], [1, rows], layout)


def _seen_keys(problem: Problem) -> tuple[int, int]:
    """Keys first … last − 1 are all that rows see, and each is seen: the others are left out. What a
    key_range hides is not known on the host."""
    if problem.key_range is not None:
        return 0, problem.k.shape[1]
    first, _, _, last = problem.bounds(0, problem.q.shape[1])
    return first, last


def _aligned_band(problem: Problem, plan: _Plan) -> bool:
    """Whether the right end of the band cuts no block but the last that a consumer's rows see (Tile.ALIGNED):
    kernels that need not be ready for more are half as long, and fit the instruction cache."""
    band, packed = problem.band, problem.packed
    if problem.key_range is not None or plan.heads > 1 or band.right is None:
        return False
    if packed is not None:
        # Of lengths on the device it is known only whether they are the same.
        return packed.cu_seqlens_q is packed.cu_seqlens_k and band.right == 0
    first, last = _seen_keys(problem)
    sq, sk = problem.q.shape[1], problem.k.shape[1]
    begin = band.offset(sq, sk) - first + band.right
    return begin % plan.block_k == 0 and begin <= last - first - sq


def _view(t: Tensor, rows: int, heads: int, columns: int) -> Any:
    """How the TMA engine sees (B, S, H, D): in tiles of rows of so many heads, and columns."""
    t = _readable(t)
    # The stride of a dimension of size 1 may be anything, and means nothing.
    strides = [step if n > 1 else 8 for step, n in zip(t.stride()[:-1], t.shape[:-1], strict=True)]
    return _descriptor(t, list(t.shape), [*strides, 1], [1, rows, heads, columns])


def _clipped(t: Tensor, rows: int, heads: int, columns: int) -> Any:
    """How it sees packed (total, H, D): with two dimensions more, of strides that cancel out modulo 2⁶⁴
    bytes at the coordinates (END, start + length, END − length + row), which is row start + row. The
    hardware's check of the third, END long, then ends at the sequence's last row.
    """
    t = _readable(t)
    (total, all_heads, width), row = t.shape, t.stride(0) if t.shape[0] > 1 else 8
    assert total <= _LARGEST_COUNT
    far = 2**31 - 2**16
    strides = [2**35 // t.element_size() - row, row, row, t.stride(1) if all_heads > 1 else 8, 1]
    shape = [far, far, 2**30, all_heads, width]
    return _descriptor(t, shape, strides, [1, 1, rows, heads, columns])


def _readable(t: Tensor) -> Tensor:
    """t, or a copy of it that the TMA engine can read. What `unsupported` was asked about may have had no
    memory yet, and transforms and hooks of saved tensors lay it out anew."""
    if t.data_ptr() % _ALIGNMENT == 0 and not _unaligned("", t):
        return t
    width, step = t.shape[-1], _ALIGNMENT // t.element_size()
    return t.new_empty((*t.shape[:-1], -(-width // step) * step))[..., :width].copy_(t)


def _descriptor(t: Tensor, shape: list[int], strides: list[int], block: list[int]) -> Any:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from tilewise.kernels.hopper_pipeline import shared_layout

    return TensorDescriptor(t, shape, strides, block, shared_layout(len(block)))


def _most_tiles(problem: Problem, plan: _Plan) -> int:
    """Tiles of all heads, or as many as packed sequences may need."""
    return twins.most_tiles(problem, problem.q, plan.rows) * problem.q.shape[-2] // plan.heads


def _order(problem: Problem, plan: _Plan) -> tuple[Any, Any]:
    """What is computed of the keys that are seen, and in which order of tiles. Where all tiles are equally
    long, one head comes after the other."""
    from tilewise.kernels.hopper_walk import Walk

    q, k, v = problem.q, problem.k, problem.v
    spec = twins.spec(problem)
    drawn = _counter(q.device) if plan.dynamic else None
    bytes_per_key = (k.shape[-1] + v.shape[-1]) * k.element_size()
    if problem.packed is None:
        first, last = _seen_keys(problem)
        spec = spec._replace(sizes=spec.sizes._replace(sk=last - first))
        heads, per_head = q.shape[0] * q.shape[2] // plan.heads, -(-q.shape[1] // plan.rows)
        groups, kv_bytes = problem.groups // plan.heads, (last - first) * bytes_per_key
        section = _section(heads, groups, kv_bytes, _L2_SHARE)
        offset = problem.band.offset(q.shape[1], k.shape[1]) - first
        return spec, Walk(
            per_head, heads, section if plan.dynamic else 1, offset, None, None, drawn
        )
    heads, count = q.shape[1], spec.packed.count
    section = _section(heads, problem.groups, k.shape[0] * bytes_per_key, _L2_SHARE_PACKED)
    schedule = _schedule(q, spec, plan.rows)
    return spec, Walk(0, heads, section, 0, schedule, count.bit_length(), drawn)


def _section(heads: int, groups: int, kv_bytes: int, share: int) -> int:
    """How many heads are worked on together, of which each `groups` read so many bytes."""
    most = max(1, share // max(1, kv_bytes)) * groups
    return -(-heads // -(-heads // most))


def _schedule(t: Tensor, spec: Any, rows: int, of_keys: bool = False) -> Tensor:
    """Of tiles of so many rows of packed q, sequences with many keys first; or of k, with many queries."""
    from tilewise.kernels.hopper_schedule import schedule_kernel

    packed, sizes, block = spec.packed, spec.sizes, 64
    schedule = torch.empty(2 * packed.count + 3, dtype=torch.int32, device=t.device)
    sides = [(packed.cu_seqlens_q, sizes.sq), (packed.cu_seqlens_k, sizes.sk)]
    (tiled, total), (walked, other) = reversed(sides) if of_keys else sides
    arguments = (schedule, tiled, walked, packed.count, total, other, rows, block)
    launch(schedule_kernel, -(-(packed.count + 1) // block), t.device, *arguments)
    return schedule


# Of a device: one counter per stream, and many that launches in CUDA graphs have not used yet.
_counters: dict[tuple[torch.device, int], Tensor] = {}
_unused: dict[torch.device, list[Tensor]] = {}
_CAPTURED = 4096


def _counter(device: torch.device) -> Tensor:
    """A counter that no launch uses at the same time: one per stream, and one per launch in a CUDA graph,
    which may be replayed on any stream. A kernel leaves it at 0."""
    if device.type != "cuda":
        return torch.zeros(1, dtype=torch.int32)
    if torch.cuda.is_current_stream_capturing():
        # One made here would be cleared again in every replay, by a kernel of its own.
        unused = _unused.get(device)
        return unused.pop() if unused else torch.zeros(1, dtype=torch.int32, device=device)
    if device not in _unused:
        # 16 bytes each: to Triton another alignment would be another kernel.
        _unused[device] = list(torch.zeros(_CAPTURED, 4, dtype=torch.int32, device=device))
        torch.cuda.synchronize(device)
    key = (device, torch.cuda.current_stream(device).cuda_stream)
    if key not in _counters:
        _counters[key] = torch.zeros(1, dtype=torch.int32, device=device)
    return _counters[key]


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return _MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
