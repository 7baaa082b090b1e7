"""The backward pass on Hopper for head dims above 128, whose gradients of 128 keys registers do not hold.

A program owns 64 keys, and its two consumers each one gradient of theirs, all columns of it: one computes Sᵀ,
P and dV, the other dPᵀ, dS and dK. Pᵀ and dSᵀ are, in registers, the first operands of those products. What
dP − delta is multiplied by goes from the one to the other by shared memory, in float32. They take turns at
the tensor cores, so that what one computes of a step is under the other's products.

dQ of the step before is computed by both, a half of the columns each, from dS in shared memory, and summed as
in hopper_backward.py.
"""

from typing import Any, NamedTuple

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
from tilewise.kernels.hopper_backward import Views
from tilewise.kernels.hopper_pipeline import (
    GROUP_ROWS,
    Part,
    add_to,
    await_turn,
    close_turns,
    computed,
    give_back,
    hand_over,
    keep,
    load_tile,
    load_tile_and_line,
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
    unpack,
    wait_empty,
    wait_full,
)
from tilewise.kernels.hopper_walk import pairs_seen, work_of_keys
from tilewise.kernels.score import NEG_INF, logits, probabilities

__all__ = ["wide_backward_kernel"]

# Consumers, by what they own.
_DV, _DK, _GROUPS = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)


class Shared(NamedTuple):
    """k and v, a ring of one each; rings of q with the line of base, and of dout with that of delta; rings of
    dSᵀ, and of what dPᵀ − delta is multiplied by to give it."""

    k: Any
    v: Any
    q: Any
    base: Any
    dout: Any
    delta: Any
    ds: Any
    factor: Any


@gluon.jit
def _work(spec, walk, tile):
    return work_of_keys(gl.program_id(0), walk, spec, tile.BLOCK_Q, GROUP_ROWS, tile.RAGGED)


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
        for i in range(work.first, work.last, tile.BLOCK_Q):
            line = first_line + i // tile.BLOCK_Q
            wait_empty(shared.q, count)
            load_tile_and_line(
                views.q, queries, i, head, views.base, line, shared.q, shared.base, count
            )
            wait_empty(shared.dout, count)
            load_tile_and_line(
                views.dout, queries, i, head, views.delta, line, shared.dout, shared.delta, count
            )
            count += 1


# ------------------------------------------------------------------ consumers


@gluon.jit
def _consume(views, shared, dq, spec, walk, tile, GROUP: gl.constexpr):
    BANDED: gl.constexpr = (spec.band.left is not None) or (spec.band.right is not None)
    EDGE: gl.constexpr = BANDED or tile.RAGGED
    # Whether the last blocks of queries may be an edge.
    TAIL: gl.constexpr = (spec.band.left is not None) or (spec.packed is not None)
    COLUMNS: gl.constexpr = tile.DV if GROUP == _DV else tile.D
    work = _work(spec, walk, tile)
    at = work.at
    LAYOUT: gl.constexpr = gl.SliceLayout(1, product_layout(tile.BLOCK_Q))
    keys = at.tile_start + gl.arange(0, GROUP_ROWS, LAYOUT)
    total = gl.zeros([GROUP_ROWS, COLUMNS], gl.float32, product_layout(COLUMNS))
    if GROUP == _DV:
        wait_full(shared.k, 0)
    else:
        wait_full(shared.v, 0)
        wait_full(shared.k, 0)
    open_turns(GROUP, _GROUPS)

    head = work.kv_head * spec.sizes.groups
    first_tile = head * work.per_head + work.first_block
    i = work.first
    total, before = _step(
        total, 0, shared, 0, i, first_tile, keys, at, head, dq, spec, tile, GROUP, EDGE, True
    )
    i += tile.BLOCK_Q
    count = 1
    for _ in range(spec.sizes.groups):
        if EDGE:
            for block in range(i, work.full_first, tile.BLOCK_Q):
                total, before = _step(
                    total, before, shared, count, block, first_tile, keys, at, head, dq, spec, tile,
                    GROUP, True, False,
                )  # fmt: skip
                count += 1
            i = gl.maximum(i, work.full_first)
        for block in range(i, work.full_last, tile.BLOCK_Q):
            total, before = _step(
                total, before, shared, count, block, first_tile, keys, at, head, dq, spec, tile,
                GROUP, False, False,
            )  # fmt: skip
            count += 1
        if TAIL:
            for block in range(gl.maximum(i, work.full_last), work.last, tile.BLOCK_Q):
                total, before = _step(
                    total, before, shared, count, block, first_tile, keys, at, head, dq, spec, tile,
                    GROUP, True, False,
                )  # fmt: skip
                count += 1
        i = work.first
        head += 1
        first_tile += work.per_head
    close_turns(GROUP)
    wait_full(shared.ds, count - 1)
    part = _product_of_queries(shared, count - 1, tile, GROUP)
    _add_queries(warpgroup_mma_wait(0, [part]), dq, before, tile, GROUP)
    _store(total, views, shared, work, spec, GROUP)


@gluon.jit
def _step(
    total, before, shared, count, i, first_tile, keys, at, head, dq, spec, tile,
    GROUP: gl.constexpr, EDGE: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """The block of queries i …, use `count` of the rings; `before` is the tile of dq of the step before. EDGE:
    not all pairs are seen. FIRST: there was no step before."""
    if GROUP == _DV:
        pairs = _probabilities(shared, count, i, keys, at, head, spec, tile, EDGE)
        total = _products(total, pairs, shared.dout, before, shared, count, dq, tile, GROUP, FIRST)
    else:
        pairs = _derivatives(shared, count, i, keys, at, spec, tile, EDGE)
        total = _products(total, pairs, shared.q, before, shared, count, dq, tile, GROUP, FIRST)
    return total, first_tile + i // tile.BLOCK_Q


@gluon.jit
def _probabilities(shared, count, i, keys, at, head, spec, tile, EDGE: gl.constexpr):
    """Pᵀ, in pairs."""
    TRANSPOSED: gl.constexpr = product_layout(tile.BLOCK_Q)
    LINE: gl.constexpr = gl.SliceLayout(0, TRANSPOSED)
    none = gl.zeros([GROUP_ROWS, tile.BLOCK_Q], gl.float32, TRANSPOSED)
    wait_full(shared.q, count)
    await_turn(_DV)
    q = slot(shared.q, count).permute((1, 0))
    s = warpgroup_mma(slot(shared.k, 0), q, none, use_acc=False, is_async=True)
    pass_turn(_DV, _GROUPS)
    base = shared.base.index(count % tile.STAGES).load(LINE)
    s = warpgroup_mma_wait(0, [s])
    give_back(shared.q, count)
    low, high = split_columns(s)
    along = (keys - i)[:, None] - low
    capped = logits(s, at, head, high, along, None, spec)
    s = capped.s
    if EDGE:
        seen = pairs_seen(along, high, keys, at.sq - i - low, at, spec, tile.RAGGED)
        s = gl.where(seen, s, NEG_INF)
    p = probabilities(s, base[None, :], 0.0, spec)
    pairs = pack(p, shared.q.data.dtype)
    if spec.scores.softcap is not None:
        p = p * (1.0 - capped.tanh * capped.tanh)
    wait_empty(shared.factor, count)
    slot(shared.factor, count).store(p)
    # No matrix instruction reads it: there is nothing to fence.
    mbarrier.arrive(shared.factor.full.index(0))
    return pairs


@gluon.jit
def _derivatives(shared, count, i, keys, at, spec, tile, EDGE: gl.constexpr):
    """dSᵀ, in pairs and in shared memory."""
    TRANSPOSED: gl.constexpr = product_layout(tile.BLOCK_Q)
    LINE: gl.constexpr = gl.SliceLayout(0, TRANSPOSED)
    dtype: gl.constexpr = shared.q.data.dtype
    none = gl.zeros([GROUP_ROWS, tile.BLOCK_Q], gl.float32, TRANSPOSED)
    wait_full(shared.dout, count)
    dp = computed(none - shared.delta.index(count % tile.STAGES).load(LINE)[None, :])
    await_turn(_DK)
    dout = slot(shared.dout, count).permute((1, 0))
    dp = warpgroup_mma(slot(shared.v, 0), dout, dp, is_async=True)
    pass_turn(_DK, _GROUPS)
    wait_full(shared.factor, count)
    factor = slot(shared.factor, count).load(TRANSPOSED)
    ds = factor * warpgroup_mma_wait(0, [dp])
    give_back(shared.factor, count)
    give_back(shared.dout, count)
    if EDGE:
        low, high = split_columns(ds)
        along = (keys - i)[:, None] - low
        seen = pairs_seen(along, high, keys, at.sq - i - low, at, spec, tile.RAGGED)
        ds = gl.where(seen, ds, 0.0)
    pairs = pack(ds, dtype)
    wait_empty(shared.ds, count)
    rounded = unpack(pairs, dtype, TRANSPOSED)
    slot(shared.ds, count).store(gl.convert_layout(rounded, TRANSPOSED, assert_trivial=True))
    hand_over(shared.ds, count)
    return pairs


@gluon.jit
def _products(
    total, pairs, ring, before, shared, count, dq, tile, GROUP: gl.constexpr, FIRST: gl.constexpr
):
    """total + pairs · what is in a ring's slot; and a half of dQ of the step before, under which that runs."""
    wait_full(ring, count)
    await_turn(GROUP)
    if not FIRST:
        wait_full(shared.ds, count - 1)
        part = _product_of_queries(shared, count - 1, tile, GROUP)
    operand = unpack(pairs, ring.data.dtype, product_layout(total.shape[1]))
    total = warpgroup_mma(operand, slot(ring, count), total, is_async=True)
    pass_turn(GROUP, _GROUPS)
    if not FIRST:
        part = warpgroup_mma_wait(1, [part])
        give_back(shared.ds, count - 1)
        _add_queries(part, dq, before, tile, GROUP)
    total = warpgroup_mma_wait(0, [total])
    keep(pairs)
    give_back(ring, count)
    return total


@gluon.jit
def _product_of_queries(shared, count, tile, GROUP: gl.constexpr):
    """dS k, on its way, but for the half of the columns that is the other consumer's."""
    COLUMNS: gl.constexpr = tile.D // 2
    ds = slot(shared.ds, count).permute((1, 0))
    k = slot(shared.k, 0).slice(GROUP * COLUMNS, COLUMNS, 1)
    none = gl.zeros([tile.BLOCK_Q, COLUMNS], gl.float32, product_layout(COLUMNS))
    return warpgroup_mma(ds, k, none, use_acc=False, is_async=True)


@gluon.jit
def _add_queries(part, dq, number, tile, GROUP: gl.constexpr):
    """Adds a half to tile `number` of dq: [halves, columns / 8, threads, 4]."""
    NUMBERS: gl.constexpr = tile.BLOCK_Q * tile.D
    add_to(dq + gl.cast(number, gl.int64) * NUMBERS + GROUP * (NUMBERS // 2), part)


@gluon.jit
def _store(total, views, shared, work, spec, GROUP: gl.constexpr):
    """dv takes the place of v, dk that of k, once the other consumer has read what is there."""
    at = work.at
    rows = Part(at.number, at.start_k, at.sk)
    if GROUP == _DV:
        give_back(shared.k, 0)
        mbarrier.wait(shared.v.empty.index(0), 0)
        slot(shared.v, 0).store(total.to(shared.v.data.dtype))
        store_tile(views.dv, rows, at.tile_start, work.kv_head, 0, slot(shared.v, 0))
    else:
        give_back(shared.v, 0)
        mbarrier.wait(shared.k.empty.index(0), 0)
        total = total * spec.scores.scale
        slot(shared.k, 0).store(total.to(shared.k.data.dtype))
        store_tile(views.dk, rows, at.tile_start, work.kv_head, 0, slot(shared.k, 0))
    tma.store_wait(0)


# ------------------------------------------------------------------ the kernel


@gluon.jit
def _wide_backward_kernel(q, k, v, dout, base, delta, dk, dv, dq, spec, walk, tile):
    """As hopper_backward.py's, with tiles of 64 keys."""
    dtype: gl.constexpr = q.dtype
    LINES: gl.constexpr = gl.NVMMASharedLayout(0, 32, 1)
    views = Views(q, k, v, dout, base, delta, dk, dv)
    # dS of a step is written before that of the step before has been read.
    ds = gl.allocate_shared_memory(dtype, [2, GROUP_ROWS, tile.BLOCK_Q], shared_layout(2))
    factor = gl.allocate_shared_memory(
        gl.float32, [1, GROUP_ROWS, tile.BLOCK_Q], gl.NVMMASharedLayout(128, 32, 2)
    )
    shared = Shared(
        tile_ring(dtype, 1, GROUP_ROWS, tile.D, 1),
        tile_ring(dtype, 1, GROUP_ROWS, tile.DV, 1),
        tile_ring(dtype, tile.STAGES, tile.BLOCK_Q, tile.D, _GROUPS),
        gl.allocate_shared_memory(gl.float32, [tile.STAGES, tile.BLOCK_Q], LINES),
        tile_ring(dtype, tile.STAGES, tile.BLOCK_Q, tile.DV, _GROUPS),
        gl.allocate_shared_memory(gl.float32, [tile.STAGES, tile.BLOCK_Q], LINES),
        ring_of(ds, 2, _GROUPS),
        ring_of(factor, 1, 1),
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
wide_backward_kernel = General(_wide_backward_kernel)
