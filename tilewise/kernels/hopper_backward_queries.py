"""dQ on Hopper where it is not summed in memory: P and dS computed again, queries first (arXiv 2205.14135).

With the kernel of dK and dV (hopper_backward_wide.py; or hopper_backward.py without dQ) that is 7 products
instead of 5, S and dP twice, and no sums in the L2 cache. Each gradient is added up by one program, in the order
of its blocks: the bits are the same in every run.

A program owns a tile of 128 queries, half of them each of two consumer warpgroups, and walks over the blocks of
keys that they see, which a producer has loaded ahead. dS is, in registers, the first operand of the product of
dQ. The consumers take turns at the tensor cores: what one computes of a step is under the other's products.

Where sinks or slopes have a gradient, each row leaves its share in it. delta comes from an output that was
rounded, which sums over many rows would show: what it should have been follows from Σ dS = Σ P ∘ dP − delta · Σ P.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewise.kernels.general import General
from tilewise.kernels.hopper_pipeline import (
    GROUP_ROWS,
    Part,
    Ring,
    add_product,
    anew,
    await_turn,
    barriers,
    close_turns,
    computed,
    give_back,
    line_buffer,
    load_tile,
    load_tile_and_line,
    open_turns,
    pack,
    partial_row_sums,
    pass_turn,
    product_layout,
    slot,
    split_columns,
    store_tile,
    tile_buffer,
    tile_ring,
    wait_empty,
    wait_full,
)
from tilewise.kernels.hopper_walk import blocks_of, tiles_per_head, work_of
from tilewise.kernels.score import LOG2E, NEG_INF, distance, interval, line, logits, probabilities

__all__ = ["Shares", "Tile", "queries_kernel"]

_GROUPS = gl.constexpr(2)
_ROWS = gl.constexpr(2 * GROUP_ROWS)


class Tile(NamedTuple):
    """All constexpr. Blocks of BLOCK_K keys beside 2 · 64 queries; D and DV columns; STAGES blocks of k, which are
    read to the end of a step, and of v one less. RAGGED: the last block of keys may be cut short. REGISTERS of
    a consumer's threads."""

    BLOCK_K: Any
    D: Any
    DV: Any
    STAGES: Any
    RAGGED: Any
    REGISTERS: Any


class Shares(NamedTuple):
    """Lines of what each row adds to the gradient of its head's slope, and of its sink but for what comes of dlse,
    and of dlse: None where there is none. WANTED, constexpr: whether there is one."""

    slopes: Any
    sinks: Any
    dlse: Any
    WANTED: Any


class Views(NamedTuple):
    """Descriptors: of 64 rows of q and dout, and of blocks of k and v; of base and delta, a line for each 64 of
    queries."""

    q: Any
    k: Any
    v: Any
    dout: Any
    base: Any
    delta: Any


class Shared(NamedTuple):
    """Rings of k and v; of each consumer's q with the line of base, and dout with that of delta, filled once."""

    k: Any
    v: Any
    q: Any
    base: Any
    dout: Any
    delta: Any


@gluon.jit
def _work(spec, walk, tile):
    per_head = tiles_per_head(walk, spec)
    within = gl.arange(0, _ROWS, gl.BlockedLayout([1], [32], [4], [0]))
    return work_of(gl.program_id(0), per_head, within, walk, spec, _ROWS, tile.BLOCK_K, 1, False)


@gluon.jit
def _is_a_tile(spec, walk):
    """Whether there is one: packed sequences may need fewer programs than there are."""
    return gl.program_id(0) < tiles_per_head(walk, spec) * walk.heads


# ------------------------------------------------------------------ the producer


@gluon.jit
def _produce(views, shared, spec, walk, tile):
    if _is_a_tile(spec, walk):
        work = _work(spec, walk, tile)
        at = work.at
        queries = Part(at.number, at.start_q, at.sq)
        keys = Part(at.number, at.start_k, at.sk)
        # As work_of_keys numbers blocks of queries.
        lines = (spec.sizes.sq + GROUP_ROWS - 1) // GROUP_ROWS
        if spec.packed is None:
            line = (at.number * spec.sizes.heads + work.head) * lines
        else:
            lines += spec.packed.count + 1
            line = work.head * lines + at.start_q // GROUP_ROWS + at.number
        line += at.tile_start // GROUP_ROWS
        for group in range(_GROUPS):
            # Of rows past the last the line may be another's: nothing comes of them.
            i = at.tile_start + group * GROUP_ROWS
            load_tile_and_line(
                views.q, queries, i, work.head, views.base, line + group, shared.q, shared.base, group
            )  # fmt: skip
            load_tile_and_line(
                views.dout, queries, i, work.head, views.delta, line + group, shared.dout,
                shared.delta, group,
            )  # fmt: skip
        for count in range(work.blocks):
            j = work.first + count * tile.BLOCK_K
            wait_empty(shared.k, count)
            load_tile(views.k, keys, j, work.kv_head, shared.k, count)
            wait_empty(shared.v, count)
            load_tile(views.v, keys, j, work.kv_head, shared.v, count)


# ------------------------------------------------------------------ consumers


@gluon.jit
def _consume(views, out, shares, shared, spec, walk, tile, GROUP: gl.constexpr):
    if _is_a_tile(spec, walk):
        BANDED: gl.constexpr = (spec.band.left is not None) or (spec.band.right is not None)
        EDGE: gl.constexpr = BANDED or (spec.key_start is not None) or tile.RAGGED
        LAYOUT: gl.constexpr = gl.SliceLayout(1, product_layout(tile.BLOCK_K))
        work = _work(spec, walk, tile)
        at = work.at
        i0 = at.tile_start + GROUP * GROUP_ROWS
        rows = interval(i0 + gl.arange(0, GROUP_ROWS, LAYOUT), at, spec)
        blocks = blocks_of(rows.number, at.tile_start, work, spec, _ROWS, tile.BLOCK_K)
        full_first = blocks.full_first if EDGE else 0
        full_last = blocks.full_last if EDGE else work.blocks
        dq = gl.zeros([GROUP_ROWS, tile.D], gl.float32, product_layout(tile.D))
        none = gl.zeros([GROUP_ROWS, tile.BLOCK_K], gl.float32, product_layout(tile.BLOCK_K))
        nothing = partial_row_sums(none)
        sums = ()
        if shares.slopes is not None:
            sums = (nothing, nothing, nothing)
        elif shares.WANTED:
            sums = (nothing,)
        wait_full(shared.q, GROUP)
        wait_full(shared.dout, GROUP)
        base = shared.base.index(GROUP).load(LAYOUT)
        delta = shared.delta.index(GROUP).load(LAYOUT)
        open_turns(GROUP, _GROUPS)
        if EDGE:
            for n in range(0, full_first):
                dq, sums = _step(
                    dq, sums, shared, n, rows, base, delta, work, spec, tile, GROUP, True
                )
        for n in range(full_first, full_last):
            dq, sums = _step(dq, sums, shared, n, rows, base, delta, work, spec, tile, GROUP, False)
        if EDGE:
            for n in range(full_last, work.blocks):
                dq, sums = _step(
                    dq, sums, shared, n, rows, base, delta, work, spec, tile, GROUP, True
                )
        close_turns(GROUP)
        if shares.WANTED:
            _store_shares(sums, shares, rows, base, delta, work, spec, LAYOUT)
        # dq takes the place of q.
        dq *= spec.scores.scale
        slot(shared.q, GROUP).store(dq.to(shared.q.data.dtype))
        queries = Part(at.number, at.start_q, at.sq)
        store_tile(out, queries, i0, work.head, 0, slot(shared.q, GROUP))
        tma.store_wait(0)


@gluon.jit
def _store_shares(sums, shares, rows, base, delta, work, spec, LAYOUT: gl.constexpr):
    """`sums`: what a row's threads have of Σ dS, and where slopes have a gradient, of Σ P and Σ dS by distance."""
    at = work.at
    head = work.head
    start = gl.cast(at.start_q, gl.int64)
    inside = rows.number < at.sq
    dead = base == float("inf")
    ds = _whole(sums[0], LAYOUT)
    p_sink = base * 0.0
    if spec.scores.sinks is not None:
        sink = gl.load(spec.scores.sinks + head).to(gl.float32)
        natural = base / LOG2E if spec.scores.FOLDED else base
        p_sink = gl.exp2((sink - natural) * LOG2E)
    if shares.sinks is not None:
        share = gl.where(dead, 0.0, -p_sink * (delta * (1.0 - p_sink) + ds))
        gl.store(line(shares.sinks, at, head, start, rows.number), share, mask=inside)
    if shares.slopes is not None:
        # By how much delta was too small.
        missing = ds - delta * p_sink
        if shares.dlse is not None:
            dlse = line(shares.dlse, at, head, start, rows.number)
            missing -= gl.load(dlse, mask=inside, other=0.0)
        far, ds_far = _whole(sums[1], LAYOUT), _whole(sums[2], LAYOUT)
        share = gl.where(dead, 0.0, missing * far - ds_far)
        gl.store(line(shares.slopes, at, head, start, rows.number), share, mask=inside)


@gluon.jit
def _whole(sums, LAYOUT: gl.constexpr):
    return gl.convert_layout(gl.sum(sums, 1), LAYOUT)


@gluon.jit
def _step(
    dq,
    sums,
    shared,
    count,
    rows,
    base,
    delta,
    work,
    spec,
    tile,
    GROUP: gl.constexpr,
    EDGE: gl.constexpr,
):
    """Block `count` of the keys. EDGE: not all pairs are seen. `sums`: those that `_store_shares` takes; none where
    there are no shares."""
    PRODUCT: gl.constexpr = product_layout(tile.BLOCK_K)
    none = gl.zeros([GROUP_ROWS, tile.BLOCK_K], gl.float32, PRODUCT)
    j = work.first + count * tile.BLOCK_K
    wait_full(shared.k, count)
    dp = computed(none - delta[:, None])
    own = anew(GROUP, count)
    await_turn(GROUP)
    k = slot(shared.k, count).permute((1, 0))
    s = warpgroup_mma(slot(shared.q, own), k, none, use_acc=False, is_async=True)
    wait_full(shared.v, count)
    v = slot(shared.v, count).permute((1, 0))
    dp = warpgroup_mma(slot(shared.dout, own), v, dp, is_async=True)
    pass_turn(GROUP, _GROUPS)
    s = warpgroup_mma_wait(1, [s])
    low, high = split_columns(s)
    across = (rows.number - j)[:, None] - low
    capped = logits(s, work.at, work.head, across, high, None, spec)
    s = capped.s
    if EDGE:
        seen = high < (rows.hi - j)[:, None] - low
        if (spec.band.left is not None) or (spec.key_start is not None):
            seen = seen & (high >= (rows.lo - j)[:, None] - low)
        s = gl.where(seen, s, NEG_INF)
    p = probabilities(s, base[:, None], 0.0, spec)
    ds = p * warpgroup_mma_wait(0, [dp])
    give_back(shared.v, count)
    of_ds = partial_row_sums(ds)
    if len(sums) == 3:
        far = distance(work.at, across, high).to(gl.float32)
        of_p_far = sums[1] + partial_row_sums(p * far)
        sums = (sums[0] + of_ds, of_p_far, sums[2] + partial_row_sums(ds * far))
    elif len(sums) == 1:
        sums = (sums[0] + of_ds,)
    if spec.scores.softcap is not None:
        ds = ds * (1.0 - capped.tanh * capped.tanh)
    if EDGE:
        ds = gl.where(seen, ds, 0.0)
    pairs = pack(ds, shared.k.data.dtype)
    return add_product(dq, pairs, shared.k, count, GROUP, _GROUPS), sums


# ------------------------------------------------------------------ the kernel


@gluon.jit
def _queries_kernel(q, k, v, dout, base, delta, dq, shares, spec, walk, tile):
    """q, k, v, dout, dq: descriptors of tiles; base, delta: of lines; shares: Shares; spec: Spec; walk: Walk;
    tile: Tile. Grid: (tiles of 128 queries · heads · batch entries,), or more."""
    dtype: gl.constexpr = q.dtype
    views = Views(q, k, v, dout, base, delta)
    shared = Shared(
        tile_ring(dtype, tile.STAGES, tile.BLOCK_K, tile.D, _GROUPS),
        tile_ring(dtype, tile.STAGES - 1, tile.BLOCK_K, tile.DV, _GROUPS),
        Ring(tile_buffer(dtype, _GROUPS, GROUP_ROWS, tile.D), barriers(_GROUPS, 1), None),
        line_buffer(_GROUPS, GROUP_ROWS),
        Ring(tile_buffer(dtype, _GROUPS, GROUP_ROWS, tile.DV), barriers(_GROUPS, 1), None),
        line_buffer(_GROUPS, GROUP_ROWS),
    )
    fence_async_shared()
    gl.warp_specialize(
        [
            (_produce, (views, shared, spec, walk, tile)),
            (_consume, (views, dq, shares, shared, spec, walk, tile, 0)),
            (_consume, (views, dq, shares, shared, spec, walk, tile, 1)),
        ],
        [4, 4],
        [tile.REGISTERS, tile.REGISTERS],
    )


# Lengths and strides differ from call to call.
queries_kernel = General(_queries_kernel)
