"""What a call costs: FLOPs, bytes moved, bytes kept. The only copy of the formulas.

Everything is a sum over visible (row, key) pairs or over tiles; `_count` counts those, `cost`
prices them. Of q, k and v only the shapes are read.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewise.api import problem_of
from tilewise.dispatch import choose
from tilewise.results import accumulation_dtype
from tilewise.spec import Problem, rows_of, sequences

# How many rows are counted in one go: a few MB.
ROWS_AT_ONCE = 1 << 15


class Cost(NamedTuple):
    """What one call costs. Prints as a table.

    Attributes:
        flops, flops_backward: of the products of visible (row, key) pairs; a multiply-add is two.
        flops_tiled, flops_tiled_backward: of whole computed tiles, hidden pairs included.
        hbm_bytes_standard, hbm_bytes_standard_backward: moved by the form that writes S and P.
        hbm_bytes_tiled, hbm_bytes_tiled_backward: moved by the tiles given.
        hbm_bytes_io_model: pairs · d² / M elements, the leading term of either pass.
        extra_bytes_standard: kept for the backward by the standard form besides inputs and output,
            S and P.
        extra_bytes_tiled: kept by tiles, lse.
        tiles_skipped, tiles_full, tiles_edge: tiles that are never loaded, computed without a mask,
            and computed with one.
    """

    flops: int
    flops_backward: int
    flops_tiled: int
    flops_tiled_backward: int
    hbm_bytes_standard: int
    hbm_bytes_standard_backward: int
    hbm_bytes_tiled: int
    hbm_bytes_tiled_backward: int
    hbm_bytes_io_model: int
    extra_bytes_standard: int
    extra_bytes_tiled: int
    tiles_skipped: int
    tiles_full: int
    tiles_edge: int

    def __str__(self) -> str:
        tiles = self.tiles_skipped + self.tiles_full + self.tiles_edge

        def of_tiles(count: int) -> str:
            return f"{count:,} tiles, {count / max(1, tiles):.1%}"

        lines = [
            ("", "forward", "backward"),
            ("FLOPs, visible pairs", _si(self.flops), _si(self.flops_backward)),
            ("FLOPs, computed tiles", _si(self.flops_tiled), _si(self.flops_tiled_backward)),
            (
                "HBM bytes, standard",
                _si(self.hbm_bytes_standard, "B"),
                _si(self.hbm_bytes_standard_backward, "B"),
            ),
            (
                "HBM bytes, tiled",
                _si(self.hbm_bytes_tiled, "B"),
                _si(self.hbm_bytes_tiled_backward, "B"),
            ),
            ("HBM bytes, model n²d²/M", *(_si(self.hbm_bytes_io_model, "B"),) * 2),
            ("kept, standard: S and P", _si(self.extra_bytes_standard, "B"), ""),
            ("kept, tiled: lse", _si(self.extra_bytes_tiled, "B"), ""),
            ("skipped", of_tiles(self.tiles_skipped), ""),
            ("full", of_tiles(self.tiles_full), ""),
            ("on an edge", of_tiles(self.tiles_edge), ""),
        ]
        widths = [max(len(line[column]) for line in lines) for column in range(3)]
        return "\n".join(
            f"{name:<{widths[0]}}  {forward:>{widths[1]}}  {backward:>{widths[2]}}".rstrip()
            for name, forward, backward in lines
        )

    def __repr__(self) -> str:
        return str(self)


def cost(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block_q: int = 128,
    block_k: int = 128,
    sram_bytes: int = 100 * 1024,
    **arguments: Any,
) -> Cost:
    """FLOPs, bytes to and from slow memory (HBM) and bytes kept, forward and backward, of a call.

    Counted, not measured, in O(n) memory, on shapes: q, k and v may be on the meta device.

    Standard (algorithms 0 and 3 of Dao et al. 2022, arXiv 2205.14135): Θ(nd + nm). The forward
    writes S and P and reads both; the backward moves n × m matrices seven times more.
    Tiled: the forward reads K and V for each tile that it computes, and q once. The backward reads
    q, dout, lse and delta for each tile and adds to dq there (a read and a write, in the
    accumulation dtype), reads K and V once for all query heads of a key head, and makes delta in
    a pass of its own over out and dout. A tile is skipped where it lies outside of what the
    intervals of its rows span, or where the mask hides all of it; tiles at the end are cut short.
    Model: theorem 2 of the paper, Θ(n m d² / M) elements where nd ≥ M, with M elements of on-chip
    memory, visible pairs for n m, and the mean of D and Dv for d.
    Bytes of a bias or mask come on top.

    Args:
        q, k, v: as in `attention`, or in `attention_varlen` or `attention_paged`.
        block_q, block_k: rows and keys of a tile.
        sram_bytes: on-chip memory, M elements of q's dtype.
        **arguments: those of `attention`, or of `attention_varlen` or `attention_paged` by keyword
            (cu_seqlens_q …, page_table …). A mask and key_range are read; a bias is not, so what it
            hides by −inf counts as visible.

    Returns:
        A Cost, which prints as a table; numbers are for all batch entries and heads.

    Raises:
        ValueError: as the call would, also where `backend` cannot serve; a size below 1; a mask, a range
            or lengths without values (on the meta device).

    Example:
        >>> q = k = v = torch.empty(1, 4096, 8, 64, dtype=torch.bfloat16, device="meta")
        >>> tilewise.cost(q, k, v).flops == 4 * 8 * 4096**2 * 64
        True
        >>> tilewise.cost(q, k, v, causal=True).tiles_skipped / (8 * 32 * 32)
        0.484375
    """
    for name, size in (("block_q", block_q), ("block_k", block_k), ("sram_bytes", sram_bytes)):
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} must be an int of at least 1, got {size!r}")
    arguments.pop("return_lse", None)
    backend = arguments.pop("backend", None)
    if arguments.get("dropout_seed") is None:
        arguments["dropout_seed"] = 0  # nothing is dropped here: do not draw from the generator
    problem = problem_of(q, k, v, **arguments)
    if backend is not None:
        choose(problem, backend)
    counts = [_count(s.problem, block_q, block_k) for s in sequences(_without_data(problem))]
    n = _Count(*map(sum, zip(*counts, strict=True))) if counts else _Count()

    d, dv = problem.q.shape[-1], problem.v.shape[-1]
    size, lse_size = problem.q.element_size(), accumulation_dtype(problem.q.dtype).itemsize
    flops, flops_backward = 2 * (d + dv), 2 * (3 * d + 2 * dv)
    once = (n.rows + n.keys) * (d + dv)
    return Cost(
        flops=n.pairs * flops,
        flops_backward=n.pairs * flops_backward,
        flops_tiled=n.tile_scores * flops,
        flops_tiled_backward=n.tile_scores * flops_backward,
        hbm_bytes_standard=(once + 4 * n.scores) * size,
        hbm_bytes_standard_backward=(2 * once + 7 * n.scores) * size,
        hbm_bytes_tiled=(n.rows + n.tile_keys) * (d + dv) * size + n.rows * lse_size,
        hbm_bytes_tiled_backward=(
            n.rows * (2 * dv * size + lse_size)
            + 2 * n.keys * (d + dv) * size
            + n.tile_rows * ((d + dv) * size + 2 * lse_size + 2 * d * lse_size)
        ),
        hbm_bytes_io_model=n.pairs * (d + dv) ** 2 * size**2 // (4 * sram_bytes),
        extra_bytes_standard=2 * n.scores * size,
        extra_bytes_tiled=n.rows * lse_size,
        tiles_skipped=n.tiles - n.tiles_computed,
        tiles_full=n.tiles_full,
        tiles_edge=n.tiles_computed - n.tiles_full,
    )


class _Count(NamedTuple):
    """What there is to price, summed over batch entries and query heads (keys: over key heads).

    `tile_rows`, `tile_keys` and `tile_scores` sum the sides and areas of computed tiles.
    """

    rows: int = 0
    keys: int = 0
    scores: int = 0
    pairs: int = 0
    tiles: int = 0
    tiles_computed: int = 0
    tiles_full: int = 0
    tile_rows: int = 0
    tile_keys: int = 0
    tile_scores: int = 0


def _without_data(problem: Problem) -> Problem:
    """The problem with q, k and v of width 0, which take no memory, on a device that has values."""
    device = problem.q.device
    if problem.q.is_meta:
        device = torch.device("cpu")
        read = {
            "mask": problem.scores.mask,
            "key_range": problem.key_range,
            "cu_seqlens_q": problem.packed,
            "page_table": problem.paged,
        }
        for name, given in read.items():
            if given is not None:
                raise ValueError(f"{name} must have values to count by, got a meta tensor")
    q, k, v = (torch.empty(*t.shape[:-1], 0, device=device) for t in problem[:3])
    return problem._replace(q=q, k=k, v=v)


def _count(problem: Problem, block_q: int, block_k: int) -> _Count:
    """The count of a dense problem."""
    b, sq, hq, _ = problem.q.shape
    _, sk, hkv, _ = problem.k.shape
    whole = _Count(
        rows=b * hq * sq,
        keys=b * hkv * sk,
        scores=b * hq * sq * sk,
        tiles=b * hq * math.ceil(sq / block_q) * math.ceil(sk / block_k),
    )
    if not whole.scores:
        return whole
    whole_rows = sq - sq % block_q
    count, step = (
        (_count_intervals, block_q * max(1, ROWS_AT_ONCE // block_q))
        if problem.scores.mask is None
        else (_count_masked, block_q)
    )
    ends = [*range(0, whole_rows, step), whole_rows, sq]
    parts = (
        count(problem, i0, i1, min(block_q, i1 - i0), block_k)
        for i0, i1 in pairwise(ends)
        if i0 < i1
    )
    return _Count(*map(sum, zip(whole, *parts, strict=True)))


def _count_intervals(problem: Problem, i0: int, i1: int, block_q: int, block_k: int) -> _Count:
    """The count of query rows i0 … i1 − 1, tiles of block_q rows, without a mask."""
    sk = problem.k.shape[1]
    lo, hi = (t.unflatten(1, (-1, block_q)) for t in problem.interval(i0, i1))
    (first, full_first), (full_last, last) = lo.aminmax(dim=-1), hi.aminmax(dim=-1)
    # Tiles from `start` to before `stop` are computed, those that begin and end inside of what all
    # rows see are full; the last tile may be cut short.
    start, stop = first // block_k, -(-last // block_k)
    full_stop = (full_last // block_k).where(full_last < sk, -(-sk // block_k))
    full = full_stop + -full_first // block_k
    keys = (stop * block_k).clamp(max=sk) - start * block_k
    heads = problem.q.shape[0] * problem.q.shape[2]

    def total(t: Tensor) -> int:
        return int(t.sum()) * (heads // t.shape[0])  # what all batch entries share is there once

    computed = first < last
    tiles_computed, tile_keys = total((stop - start) * computed), total(keys * computed)
    return _Count(
        pairs=total((hi - lo).clamp(min=0)),
        tiles_computed=tiles_computed,
        tiles_full=total(full.clamp(min=0)),
        tile_rows=tiles_computed * block_q,
        tile_keys=tile_keys,
        tile_scores=tile_keys * block_q,
    )


def _count_masked(problem: Problem, i0: int, i1: int, block_q: int, block_k: int) -> _Count:
    """The count of one row of tiles, query rows i0 … i1 − 1 against all keys, with a mask."""
    sk = problem.k.shape[1]
    mask = problem.scores.mask
    assert mask is not None
    # Flags of pairs are (B, Hq, rows, Sk) and of tiles (B, Hq, tiles); what is alike for all batch
    # entries or heads is there once.
    lo, hi = (t.unsqueeze(1) for t in problem.interval(i0, i1))
    start = torch.arange(0, sk, block_k, device=lo.device)
    stop = (start + block_k).clamp(max=sk)
    first, full_first = lo.amin(-1, keepdim=True), lo.amax(-1, keepdim=True)
    full_last, last = hi.amin(-1, keepdim=True), hi.amax(-1, keepdim=True)
    mask = rows_of(mask, 2, i0, i1).expand(-1, -1, -1, sk)
    keys = torch.arange(sk, device=lo.device)
    seen = mask & (keys >= lo.unsqueeze(-1)) & (keys < hi.unsqueeze(-1))
    computed = (first < last) & (start < last) & (stop > first) & _any_in_tiles(mask, block_k)
    full = (start >= full_first) & (stop <= full_last) & ~_any_in_tiles(~mask, block_k)
    heads = problem.q.shape[0] * problem.q.shape[2]

    def total(t: Tensor) -> int:
        return int(t.sum()) * (heads // (t.shape[0] * t.shape[1]))

    tiles_computed, tile_keys = total(computed), total(computed * (stop - start))
    return _Count(
        pairs=total(seen),
        tiles_computed=tiles_computed,
        tiles_full=total(full & computed),
        tile_rows=tiles_computed * block_q,
        tile_keys=tile_keys,
        tile_scores=tile_keys * block_q,
    )


def _any_in_tiles(t: Tensor, block_k: int) -> Tensor:
    """Whether a row of tiles (…, rows, Sk) has a True in each tile: (…, tiles)."""
    padded = F.pad(t, (0, -t.shape[-1] % block_k))
    return padded.unflatten(-1, (-1, block_k)).any(-1).any(-2)


def _si(number: int, unit: str = "") -> str:
    """Three digits and a decimal prefix: 1.23 GB."""
    power = min((len(str(number)) - 1) // 3, 6)
    scaled = number / 1000**power
    digits = max(0, 3 - len(str(int(scaled)))) if power else 0
    return f"{scaled:.{digits}f} {'kMGTPE'[power - 1] if power else ''}{unit}".rstrip()
