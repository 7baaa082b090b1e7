"""The backward pass on Hopper: P = exp(S − lse), dS = P ∘ (dP − delta) (arXiv 2205.14135).

A program owns a tile of keys, half of them each of two consumer warpgroups, and walks over the blocks of
queries that see them, which a producer has loaded ahead. Sᵀ and dPᵀ of a consumer's keys are computed such
that Pᵀ and dSᵀ are, in registers, the first operands of the products of dV and dK. The consumers take turns
at the tensor cores: one computes exponentials while the other's products run. Where registers hold the gradients
of twice as many keys, each consumer has two parts of them, one after the other, and half as much is added to dQ.

The last block of queries comes first: under a causal mask all tiles of keys have it, so that programs which begin
at about the same time read, and add to, about the same blocks.

For dQ they exchange dS by shared memory, and each computes a half of dQ of the step before, for which the
other's part is there by then. dQ is summed in float32 by the L2 cache, straight from registers, since shared
memory is what the products are short of: in any order, into tiles that lie as registers hold them (`as_rows`).

dK and dV are added up in the order of the blocks: their bits are the same in every run. Where those of dQ have to
be, too, it is left to hopper_backward_queries.py, and nothing is exchanged or summed in memory.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewise.kernels.general import General
from tilewise.kernels.hopper_pipeline import (
    GROUP_ROWS,
    Part,
    add_to,
    anew,
    await_turn,
    close_turns,
    computed,
    give_back,
    hand_over,
    keep,
    line_buffer,
    load_pairs,
    load_tile,
    load_tile_and_line,
    marked,
    open_turns,
    pack,
    pass_turn,
    product_layout,
    ring_of,
    shared_layout,
    slot,
    split_columns,
    store_tile,
    tile_ring,
    unmarked,
    unpack,
    wait_empty,
    wait_full,
)
from tilewise.kernels.hopper_walk import (
    first_of_second_half,
    pairs_in_ranges,
    pairs_seen,
    work_of_keys,
)
from tilewise.kernels.score import NEG_INF, constexpr, logits, place, probabilities, tile_pointers

__all__ = ["Tile", "backward_kernel", "constexpr", "rows_kernel"]

_GROUPS = gl.constexpr(2)


class Tile(NamedTuple):
    """All constexpr. BLOCK_Q queries beside 2 · PARTS · 64 keys; D and DV columns; STAGES blocks of q and dout.
    RAGGED: the last tile of keys may be cut short. HELD: consumers hold their keys and values in registers.
    REGISTERS of a consumer's threads."""

    BLOCK_Q: Any
    PARTS: Any
    D: Any
    DV: Any
    STAGES: Any
    RAGGED: Any
    HELD: Any
    REGISTERS: Any


class Views(NamedTuple):
    """Descriptors: of tiles of q, k, v, dout, dk and dv; of base and delta, a line for each tile of queries."""

    q: Any
    k: Any
    v: Any
    dout: Any
    base: Any
    delta: Any
    dk: Any
    dv: Any


class Shared(NamedTuple):
    """k and v, a ring of one each; rings of q with the line of delta, and of dout with that of base; a ring of
    dSᵀ, of which each consumer fills its half, for dQ alone."""

    k: Any
    v: Any
    q: Any
    delta: Any
    dout: Any
    base: Any
    ds: Any


@gluon.jit
def _work(spec, walk, tile):
    BLOCK_K: gl.constexpr = _GROUPS * tile.PARTS * GROUP_ROWS
    return work_of_keys(gl.program_id(0), walk, spec, tile.BLOCK_Q, BLOCK_K, tile.RAGGED)


# ------------------------------------------------------------------ the producer


@gluon.jit
def _produce(views, shared, spec, walk, tile):
    work = _work(spec, walk, tile)
    at = work.at
    # Nothing is read of tokens that belong to no sequence.
    keys = Part(
        at.number, at.start_k, at.sk if spec.packed is None else gl.where(at.real, at.sk, 0)
    )
    queries = Part(at.number, at.start_q, at.sq)
    load_tile(views.k, keys, at.tile_start, work.kv_head, shared.k, 0)
    load_tile(views.v, keys, at.tile_start, work.kv_head, shared.v, 0)
    count = 0
    for member in range(spec.sizes.groups):
        head = work.kv_head * spec.sizes.groups + member
        first_line = head * work.per_head + work.first_block
        for i in range(work.last - tile.BLOCK_Q, work.first - 1, -tile.BLOCK_Q):
            line = first_line + i // tile.BLOCK_Q
            wait_empty(shared.q, count)
            load_tile_and_line(
                views.q, queries, i, head, views.delta, line, shared.q, shared.delta, count
            )
            wait_empty(shared.dout, count)
            load_tile_and_line(
                views.dout, queries, i, head, views.base, line, shared.dout, shared.base, count
            )
            count += 1


# ------------------------------------------------------------------ consumers


@gluon.jit
def _consume(views, shared, dq, spec, walk, tile, GROUP: gl.constexpr):
    BANDED: gl.constexpr = (spec.band.left is not None) or (spec.band.right is not None)
    RANGES: gl.constexpr = spec.key_start is not None
    EDGE: gl.constexpr = BANDED or RANGES or tile.RAGGED
    # Whether all blocks are taken for edges: with a loop for each end of a band, beside that of the others,
    # the instructions would not fit their cache. Those of D = 64 do.
    ALL_EDGE: gl.constexpr = (spec.band.left is not None) and tile.D > 64
    # Whether the last blocks of queries may be an edge.
    TAIL: gl.constexpr = (spec.band.left is not None) or RANGES or (spec.packed is not None)
    # Whether the first blocks of queries may see nothing of the second parts.
    HALVES: gl.constexpr = tile.PARTS == 2 and spec.band.right is not None
    work = _work(spec, walk, tile)
    at = work.at
    LAYOUT: gl.constexpr = gl.SliceLayout(1, product_layout(tile.BLOCK_Q))
    keys = at.tile_start + GROUP * GROUP_ROWS + gl.arange(0, GROUP_ROWS, LAYOUT)
    dk = gl.zeros([GROUP_ROWS, tile.D], gl.float32, product_layout(tile.D))
    dv = gl.zeros([GROUP_ROWS, tile.DV], gl.float32, product_layout(tile.DV))
    sums = (dk, dv)
    if tile.PARTS == 2:
        sums = (dk, dv, dk, dv)
    wait_full(shared.k, 0)
    wait_full(shared.v, 0)
    held = ()
    if tile.HELD:
        held = (load_pairs(slot(shared.k, 0), GROUP), load_pairs(slot(shared.v, 0), GROUP))
    full_first = work.full_first if EDGE else work.first
    full_last = work.first if ALL_EDGE else work.full_last
    half_last = work.first
    if HALVES:
        half_last = first_of_second_half(work, spec, tile.BLOCK_Q, _GROUPS * GROUP_ROWS)
        half_last = gl.minimum(half_last, full_first)
    open_turns(GROUP, _GROUPS)
    if GROUP == 1:
        # Its products of a step come after the first ones of the other's next step.
        await_turn(GROUP)
        pass_turn(GROUP, _GROUPS)

    head = work.kv_head * spec.sizes.groups
    first_tile = head * work.per_head + work.first_block
    i = work.last - tile.BLOCK_Q
    before = 0
    count = 0
    if dq is not None:
        sums, before = _step(
            sums, before, held, shared, count, i, first_tile, keys, at, head, dq, spec, walk, tile,
            GROUP, tile.PARTS, EDGE, True,
        )  # fmt: skip
        i -= tile.BLOCK_Q
        count = 1
    for _ in range(spec.sizes.groups):
        if TAIL:
            for block in range(i, full_last - 1, -tile.BLOCK_Q):
                sums, before = _step(
                    sums, before, held, shared, count, block, first_tile, keys, at, head, dq,
                    spec, walk, tile, GROUP, tile.PARTS, True, False,
                )  # fmt: skip
                count += 1
            i = gl.minimum(i, full_last - tile.BLOCK_Q)
        if not ALL_EDGE:
            for block in range(i, full_first - 1, -tile.BLOCK_Q):
                sums, before = _step(
                    sums, before, held, shared, count, block, first_tile, keys, at, head, dq,
                    spec, walk, tile, GROUP, tile.PARTS, False, False,
                )  # fmt: skip
                count += 1
        if EDGE and not ALL_EDGE:
            i = gl.minimum(i, full_first - tile.BLOCK_Q)
            for block in range(i, half_last - 1, -tile.BLOCK_Q):
                sums, before = _step(
                    sums, before, held, shared, count, block, first_tile, keys, at, head, dq,
                    spec, walk, tile, GROUP, tile.PARTS, True, False,
                )  # fmt: skip
                count += 1
        if HALVES:
            i = gl.minimum(i, half_last - tile.BLOCK_Q)
            for block in range(i, work.first - 1, -tile.BLOCK_Q):
                sums, before = _step(
                    sums, before, held, shared, count, block, first_tile, keys, at, head, dq,
                    spec, walk, tile, GROUP, 1, True, False,
                )  # fmt: skip
                count += 1
        i = work.last - tile.BLOCK_Q
        head += 1
        first_tile += work.per_head
    if GROUP == 0:
        await_turn(GROUP)
        pass_turn(GROUP, _GROUPS)
    close_turns(GROUP)
    if dq is not None:
        wait_full(shared.ds, count - 1)
        part = _product_of_queries(shared, count - 1, tile, GROUP)
        _add_queries(warpgroup_mma_wait(0, [part]), dq, before, tile, GROUP)
    _store(sums, views, shared, work, spec, tile, GROUP)


@gluon.jit
def _store(sums, views, shared, work, spec, tile, GROUP: gl.constexpr):
    """dv takes the place of v, of which each consumer has read its own half; dk that of k, of which both
    have read all. Then one of them stores dv, the other dk."""
    dtype: gl.constexpr = shared.k.data.dtype
    give_back(shared.k, 0)
    for part in gl.static_range(tile.PARTS):
        _own(slot(shared.v, 0), part, GROUP).store(sums[2 * part + 1].to(dtype))
    fence_async_shared()
    give_back(shared.v, 0)
    mbarrier.wait(shared.k.empty.index(0), 0)
    for part in gl.static_range(tile.PARTS):
        dk = sums[2 * part] * spec.scores.scale
        _own(slot(shared.k, 0), part, GROUP).store(dk.to(dtype))
    fence_async_shared()
    give_back(shared.k, 0)
    at = work.at
    rows = Part(at.number, at.start_k, at.sk)
    if GROUP == 0:
        mbarrier.wait(shared.v.empty.index(0), 0)
        store_tile(views.dv, rows, at.tile_start, work.kv_head, 0, slot(shared.v, 0))
    else:
        mbarrier.wait(shared.k.empty.index(0), 1)
        store_tile(views.dk, rows, at.tile_start, work.kv_head, 0, slot(shared.k, 0))
    tma.store_wait(0)


@gluon.jit
def _own(buffer, PART: gl.constexpr, GROUP: gl.constexpr):
    """Of a tile's keys part PART of a consumer's; between its parts lie the other's."""
    return buffer.slice((PART * _GROUPS + GROUP) * GROUP_ROWS, GROUP_ROWS)


@gluon.jit
def _step(
    sums, before, held, shared, count, i, first_tile, keys, at, head, dq, spec, walk, tile,
    GROUP: gl.constexpr, PARTS: gl.constexpr, EDGE: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """The block of queries i …, use `count` of the rings; `before` is the tile of dq of the step before. `sums`:
    dk and dv of each part, of which PARTS are seen. EDGE: not all pairs are seen. FIRST: there was no step
    before."""
    if PARTS < tile.PARTS:
        wait_empty(shared.ds, count)
        none = gl.zeros(
            [GROUP_ROWS, tile.BLOCK_Q], shared.q.data.dtype, product_layout(tile.BLOCK_Q)
        )
        _own(slot(shared.ds, count), 1, GROUP).store(none)
    found = _part_of_step(
        sums[0], sums[1], before, held, shared, count, i, keys, at, head, dq, spec, walk, tile,
        GROUP, 0, PARTS, EDGE, FIRST,
    )  # fmt: skip
    if PARTS == 2:
        others = _part_of_step(
            sums[2], sums[3], before, held, shared, count, i, keys + _GROUPS * GROUP_ROWS, at, head, dq, spec,
            walk, tile, GROUP, 1, PARTS, EDGE, FIRST,
        )  # fmt: skip
        found = (found[0], found[1], others[0], others[1])
    elif tile.PARTS == 2:
        found = (found[0], found[1], sums[2], sums[3])
    return found, first_tile + i // tile.BLOCK_Q


@gluon.jit
def _part_of_step(
    dk, dv, before, held, shared, count, i, keys, at, head, dq, spec, walk, tile,
    GROUP: gl.constexpr, PART: gl.constexpr, PARTS: gl.constexpr, EDGE: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    AFTER: gl.constexpr = PART == 0 and not FIRST and dq is not None
    LAST: gl.constexpr = PART == PARTS - 1
    TRANSPOSED: gl.constexpr = product_layout(tile.BLOCK_Q)
    LINE: gl.constexpr = gl.SliceLayout(0, TRANSPOSED)
    dtype: gl.constexpr = shared.q.data.dtype
    none = gl.zeros([GROUP_ROWS, tile.BLOCK_Q], gl.float32, TRANSPOSED)
    RANGES: gl.constexpr = EDGE and spec.key_start is not None
    if RANGES:
        columns = gl.arange(0, tile.BLOCK_Q, LINE)
        marks = marked(pairs_in_ranges(keys, i, columns, at, walk), none)
    wait_full(shared.q, count)
    # What is computed is dP − delta: a product begins with −delta, which takes fewer registers than to
    # subtract it.
    dp = computed(none - shared.delta.index(count % tile.STAGES).load(LINE)[None, :])
    await_turn(GROUP)
    q = slot(shared.q, count)
    operand = _operand(held, 0, shared.k, count, tile, GROUP, PART)
    s = warpgroup_mma(operand, q.permute((1, 0)), none, use_acc=False, is_async=True)
    wait_full(shared.dout, count)
    dout = slot(shared.dout, count)
    operand = _operand(held, 1, shared.v, count, tile, GROUP, PART)
    dp = warpgroup_mma(operand, dout.permute((1, 0)), dp, is_async=True)
    pass_turn(GROUP, _GROUPS)
    base = shared.base.index(count % tile.STAGES).load(LINE)
    s = warpgroup_mma_wait(1, [s])
    low, high = split_columns(s)
    along = (keys - i)[:, None] - low
    capped = logits(s, at, head, high, along, None, spec)
    s = capped.s
    if RANGES:
        seen = unmarked(marks, s)
    elif EDGE:
        seen = pairs_seen(along, high, keys, at.sq - i - low, at, spec, tile.RAGGED)
    if EDGE:
        s = gl.where(seen, s, NEG_INF)
    p = probabilities(s, base[None, :], 0.0, spec)
    pairs = pack(p, dtype)
    ds = p * warpgroup_mma_wait(0, [dp])
    if spec.scores.softcap is not None:
        ds = ds * (1.0 - capped.tanh * capped.tanh)
    if EDGE:
        ds = gl.where(seen, ds, 0.0)
    ds_pairs = pack(ds, dtype)
    if dq is not None:
        if PART == 0:
            wait_empty(shared.ds, count)
        rounded = unpack(ds_pairs, dtype, TRANSPOSED)
        rounded = gl.convert_layout(rounded, TRANSPOSED, assert_trivial=True)
        _own(slot(shared.ds, count), PART, GROUP).store(rounded)
        if LAST:
            hand_over(shared.ds, count)

    await_turn(GROUP)
    operand = unpack(pairs, dtype, product_layout(tile.DV))
    dv = warpgroup_mma(operand, dout, dv, is_async=True)
    if AFTER:
        wait_full(shared.ds, count - 1)
        part = _product_of_queries(shared, count - 1, tile, GROUP)
    operand = unpack(ds_pairs, dtype, product_layout(tile.D))
    dk = warpgroup_mma(operand, q, dk, is_async=True)
    pass_turn(GROUP, _GROUPS)
    dv = warpgroup_mma_wait(2 if AFTER else 1, [dv])
    keep(pairs)
    if LAST:
        give_back(shared.dout, count)
    if AFTER:
        part = warpgroup_mma_wait(1, [part])
        give_back(shared.ds, count - 1)
        _add_queries(part, dq, before, tile, GROUP)
    dk = warpgroup_mma_wait(0, [dk])
    keep(ds_pairs)
    if LAST:
        give_back(shared.q, count)
    return dk, dv


@gluon.jit
def _operand(held, WHICH: gl.constexpr, ring, count, tile, GROUP: gl.constexpr, PART: gl.constexpr):
    """A consumer's keys or values, the one of two that may be held."""
    if tile.HELD:
        operand = unpack(held[WHICH], ring.data.dtype, product_layout(tile.BLOCK_Q))
    else:
        operand = _own(ring.data.index(anew(0, count)), PART, GROUP)
    return operand


@gluon.jit
def _product_of_queries(shared, count, tile, GROUP: gl.constexpr):
    """dS k, on its way, but for the half of the columns that is the other consumer's."""
    COLUMNS: gl.constexpr = tile.D // 2
    ds = slot(shared.ds, count).permute((1, 0))
    k = shared.k.data.index(anew(0, count)).slice(GROUP * COLUMNS, COLUMNS, 1)
    none = gl.zeros([GROUP_ROWS, COLUMNS], gl.float32, product_layout(COLUMNS))
    return warpgroup_mma(ds, k, none, use_acc=False, is_async=True)


@gluon.jit
def _add_queries(part, dq, number, tile, GROUP: gl.constexpr):
    """Adds a half to tile `number` of dq: [halves, columns / 8, threads, 4]."""
    NUMBERS: gl.constexpr = tile.BLOCK_Q * tile.D
    add_to(dq + gl.cast(number, gl.int64) * NUMBERS + GROUP * (NUMBERS // 2), part)


# ------------------------------------------------------------------ the kernels


@gluon.jit
def _backward_kernel(q, k, v, dout, base, delta, dk, dv, dq, spec, walk, tile):
    """q, k, v, dout, dk, dv: descriptors of tiles; base, delta: of lines; dq: float32, as `as_rows` has it, or
    None; spec: Spec; walk: KeysWalk; tile: Tile. Grid: (tiles of keys · key heads · batch entries,)."""
    dtype: gl.constexpr = q.dtype
    BLOCK_K: gl.constexpr = _GROUPS * tile.PARTS * GROUP_ROWS
    views = Views(q, k, v, dout, base, delta, dk, dv)
    ds = None
    if dq is not None:
        # A consumer fills the next but one before the other has read that of the step before.
        ds = gl.allocate_shared_memory(dtype, [3, BLOCK_K, tile.BLOCK_Q], shared_layout(2))
    shared = Shared(
        tile_ring(dtype, 1, BLOCK_K, tile.D, _GROUPS),
        tile_ring(dtype, 1, BLOCK_K, tile.DV, _GROUPS),
        tile_ring(dtype, tile.STAGES, tile.BLOCK_Q, tile.D, _GROUPS),
        line_buffer(tile.STAGES, tile.BLOCK_Q),
        tile_ring(dtype, tile.STAGES, tile.BLOCK_Q, tile.DV, _GROUPS),
        line_buffer(tile.STAGES, tile.BLOCK_Q),
        None if ds is None else ring_of(ds, 3, _GROUPS, _GROUPS),
    )
    fence_async_shared()
    gl.warp_specialize(
        [
            (_produce, (views, shared, spec, walk, tile)),
            (_consume, (views, shared, dq, spec, walk, tile, 0)),
            (_consume, (views, shared, dq, spec, walk, tile, 1)),
        ],
        [4, 4],
        [tile.REGISTERS, tile.REGISTERS],
    )


# Lengths and strides differ from call to call.
backward_kernel = General(_backward_kernel)


@triton.jit
def rows_kernel(sums, dq, spec, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr):
    """dq: Tokens, from the sums that backward_kernel left. Grid: (blocks of queries · heads · batch entries,)."""
    tiles = tl.cdiv(spec.sizes.sq, BLOCK_Q)
    if spec.packed is not None:
        tiles += spec.packed.count + 1
    program = tl.program_id(0)
    head = program // tiles % spec.sizes.heads
    at = place(program % tiles, program // tiles // spec.sizes.heads, spec, BLOCK_Q, False)
    start = program.to(tl.int64) * (BLOCK_Q * BLOCK_D)
    numbers = tl.load(sums + start + tl.arange(0, BLOCK_Q * BLOCK_D))
    found = as_rows(numbers, BLOCK_Q, BLOCK_D) * spec.scores.scale
    i = at.tile_start + tl.arange(0, BLOCK_Q)
    columns = tl.arange(0, BLOCK_D)
    inside = (i < at.sq)[:, None] & (columns < D)[None, :]
    pointers = tile_pointers(dq, at, head, at.start_q, i, columns)
    tl.store(pointers, found.to(dq.data.dtype.element_ty), mask=inside)


@triton.jit
def as_rows(numbers, BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr):
    """A tile [64 rows, columns] from its numbers as registers hold them: [halves of the columns, 8 columns each,
    warps of 16 rows, 8 rows, 4, 2 rows, 2 columns]."""
    apart = tl.reshape(numbers, [2, BLOCK_D // 16, BLOCK_Q // 16, 8, 4, 2, 2])
    return tl.reshape(tl.permute(apart, (2, 5, 3, 0, 1, 4, 6)), [BLOCK_Q, BLOCK_D])
