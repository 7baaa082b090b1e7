"""dK and dV on Hopper for head dims above 128, whose gradients of 128 keys registers do not hold.

With tiles of 64 keys the sums of dQ in the L2 cache would be twice those of hopper_backward.py, as many bytes
as are loaded, and it is the L2 cache that such kernels wait for. So dQ is left to hopper_backward_queries.py,
and nothing is summed in memory.

A program owns 64 keys, and its two consumers each one gradient of theirs, all columns of it: one computes Sᵀ,
P and dV, the other dPᵀ, dS and dK. What dP − delta is multiplied by goes from the one to the other by shared
memory, in float32.

Pᵀ and dSᵀ are, in registers, the first operands of the products of dV and dK. The consumers take turns at the
tensor cores: what one computes of a step is under the other's products.
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
from tilewise.kernels.hopper_pipeline import (
    GROUP_ROWS,
    Part,
    add_product,
    await_turn,
    close_turns,
    computed,
    give_back,
    hand_to_threads,
    line_buffer,
    load_tile,
    load_tile_and_line,
    marked,
    open_turns,
    pack,
    pass_turn,
    product_layout,
    ring_of,
    slot,
    split_columns,
    store_tile,
    tile_ring,
    unmarked,
    wait_empty,
    wait_full,
)
from tilewise.kernels.hopper_walk import pairs_in_ranges, pairs_seen, work_of_keys
from tilewise.kernels.score import NEG_INF, logits, probabilities

__all__ = ["Tile", "wide_keys_kernel"]

# Consumers, by what they own.
_DV, _DK, _GROUPS = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)


class Tile(NamedTuple):
    """All constexpr. D and DV columns; STAGES blocks of q and dout. RAGGED: the last tile of keys may be cut
    short. REGISTERS of a consumer's threads."""

    D: Any
    DV: Any
    STAGES: Any
    RAGGED: Any
    REGISTERS: Any


class Views(NamedTuple):
    """Descriptors: of tiles of 64 rows of q, k, v and dout; of base and delta, a line for each of queries."""

    q: Any
    k: Any
    v: Any
    dout: Any
    base: Any
    delta: Any


class Shared(NamedTuple):
    """Rings: k and v; q with the line of base, and dout with that of delta; and of what dPᵀ − delta is
    multiplied by to give dSᵀ."""

    k: Any
    v: Any
    q: Any
    base: Any
    dout: Any
    delta: Any
    factor: Any


@gluon.jit
def _load_queries(views, shared, queries, i, head, line, count):
    wait_empty(shared.q, count)
    load_tile_and_line(views.q, queries, i, head, views.base, line, shared.q, shared.base, count)
    wait_empty(shared.dout, count)
    load_tile_and_line(
        views.dout, queries, i, head, views.delta, line, shared.dout, shared.delta, count
    )


@gluon.jit
def _work_of_keys(spec, walk, tile):
    return work_of_keys(gl.program_id(0), walk, spec, GROUP_ROWS, GROUP_ROWS, tile.RAGGED)


@gluon.jit
def _produce_queries(views, shared, spec, walk, tile):
    work = _work_of_keys(spec, walk, tile)
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
        for i in range(work.last - GROUP_ROWS, work.first - 1, -GROUP_ROWS):
            _load_queries(views, shared, queries, i, head, first_line + i // GROUP_ROWS, count)
            count += 1


@gluon.jit
def _consume_queries(views, out, shared, spec, walk, tile, GROUP: gl.constexpr):
    BANDED: gl.constexpr = (spec.band.left is not None) or (spec.band.right is not None)
    RANGES: gl.constexpr = spec.key_start is not None
    EDGE: gl.constexpr = BANDED or RANGES or tile.RAGGED
    # Whether the last blocks of queries may be an edge.
    TAIL: gl.constexpr = (spec.band.left is not None) or RANGES or (spec.packed is not None)
    COLUMNS: gl.constexpr = tile.DV if GROUP == _DV else tile.D
    work = _work_of_keys(spec, walk, tile)
    at = work.at
    LAYOUT: gl.constexpr = gl.SliceLayout(1, product_layout(GROUP_ROWS))
    keys = at.tile_start + gl.arange(0, GROUP_ROWS, LAYOUT)
    total = gl.zeros([GROUP_ROWS, COLUMNS], gl.float32, product_layout(COLUMNS))
    full_first = work.full_first if EDGE else work.first
    wait_full(shared.k if GROUP == _DV else shared.v, 0)
    open_turns(GROUP, _GROUPS)
    head = work.kv_head * spec.sizes.groups
    count = 0
    for _ in range(spec.sizes.groups):
        if TAIL:
            for i in range(work.last - GROUP_ROWS, work.full_last - 1, -GROUP_ROWS):
                total = _queries_step(
                    total, shared, count, i, keys, at, head, spec, walk, tile, GROUP, True
                )
                count += 1
        for i in range(work.full_last - GROUP_ROWS, full_first - 1, -GROUP_ROWS):
            total = _queries_step(
                total, shared, count, i, keys, at, head, spec, walk, tile, GROUP, False
            )
            count += 1
        if EDGE:
            for i in range(full_first - GROUP_ROWS, work.first - 1, -GROUP_ROWS):
                total = _queries_step(
                    total, shared, count, i, keys, at, head, spec, walk, tile, GROUP, True
                )
                count += 1
        head += 1
    close_turns(GROUP)
    if GROUP == _DV:
        _store(total, out, work, shared.k, shared.v)
    else:
        _store(total * spec.scores.scale, out, work, shared.v, shared.k)


@gluon.jit
def _store(total, out, work, own, other):
    """A gradient takes the place of what it is of, once the other consumer, which alone reads that, is done."""
    give_back(own, 0)
    mbarrier.wait(other.empty.index(0), 0)
    slot(other, 0).store(total.to(other.data.dtype))
    rows = Part(work.at.number, work.at.start_k, work.at.sk)
    store_tile(out, rows, work.at.tile_start, work.kv_head, 0, slot(other, 0))
    tma.store_wait(0)


@gluon.jit
def _queries_step(
    total,
    shared,
    count,
    i,
    keys,
    at,
    head,
    spec,
    walk,
    tile,
    GROUP: gl.constexpr,
    EDGE: gl.constexpr,
):
    """The block of queries i …, use `count` of the rings. EDGE: not all pairs are seen."""
    if GROUP == _DV:
        pairs = _probabilities(shared, count, i, keys, at, head, spec, walk, tile, EDGE)
        wait_full(shared.dout, count)
        total = add_product(total, pairs, shared.dout, count, GROUP, _GROUPS)
    else:
        pairs = _derivatives(shared, count, i, keys, at, spec, tile, EDGE)
        wait_full(shared.q, count)
        total = add_product(total, pairs, shared.q, count, GROUP, _GROUPS)
    return total


@gluon.jit
def _probabilities(shared, count, i, keys, at, head, spec, walk, tile, EDGE: gl.constexpr):
    """Pᵀ, in pairs."""
    TRANSPOSED: gl.constexpr = product_layout(GROUP_ROWS)
    LINE: gl.constexpr = gl.SliceLayout(0, TRANSPOSED)
    none = gl.zeros([GROUP_ROWS, GROUP_ROWS], gl.float32, TRANSPOSED)
    RANGES: gl.constexpr = EDGE and spec.key_start is not None
    if RANGES:
        columns = gl.arange(0, GROUP_ROWS, LINE)
        marks = marked(pairs_in_ranges(keys, i, columns, at, walk), none)
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
    if RANGES:
        seen = unmarked(marks, s)
    elif EDGE:
        seen = pairs_seen(along, high, keys, at.sq - i - low, at, spec, tile.RAGGED)
    if EDGE:
        s = gl.where(seen, s, NEG_INF)
    p = probabilities(s, base[None, :], 0.0, spec)
    pairs = pack(p, shared.q.data.dtype)
    if spec.scores.softcap is not None:
        p = p * (1.0 - capped.tanh * capped.tanh)
    wait_empty(shared.factor, count)
    slot(shared.factor, count).store(p)
    hand_to_threads(shared.factor, count)
    return pairs


@gluon.jit
def _derivatives(shared, count, i, keys, at, spec, tile, EDGE: gl.constexpr):
    """dSᵀ, in pairs."""
    TRANSPOSED: gl.constexpr = product_layout(GROUP_ROWS)
    LINE: gl.constexpr = gl.SliceLayout(0, TRANSPOSED)
    none = gl.zeros([GROUP_ROWS, GROUP_ROWS], gl.float32, TRANSPOSED)
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
    # What a key_range hides is zeros, as is the factor there.
    if EDGE and spec.key_start is None:
        low, high = split_columns(ds)
        along = (keys - i)[:, None] - low
        seen = pairs_seen(along, high, keys, at.sq - i - low, at, spec, tile.RAGGED)
        ds = gl.where(seen, ds, 0.0)
    return pack(ds, shared.q.data.dtype)


@gluon.jit
def _wide_keys_kernel(q, k, v, dout, base, delta, dk, dv, spec, walk, tile):
    """q, k, v, dout, dk, dv: descriptors of tiles; base, delta: of lines; spec: Spec; walk: KeysWalk; tile:
    Tile. Grid: (tiles of keys · key heads · batch entries,)."""
    dtype: gl.constexpr = q.dtype
    views = Views(q, k, v, dout, base, delta)
    factor = gl.allocate_shared_memory(
        gl.float32, [1, GROUP_ROWS, GROUP_ROWS], gl.NVMMASharedLayout(128, 32, 2)
    )
    shared = Shared(
        tile_ring(dtype, 1, GROUP_ROWS, tile.D, 1),
        tile_ring(dtype, 1, GROUP_ROWS, tile.DV, 1),
        tile_ring(dtype, tile.STAGES, GROUP_ROWS, tile.D, _GROUPS),
        line_buffer(tile.STAGES, GROUP_ROWS),
        tile_ring(dtype, tile.STAGES, GROUP_ROWS, tile.DV, _GROUPS),
        line_buffer(tile.STAGES, GROUP_ROWS),
        ring_of(factor, 1, 1),
    )
    fence_async_shared()
    gl.warp_specialize(
        [
            (_produce_queries, (views, shared, spec, walk, tile)),
            (_consume_queries, (views, dv, shared, spec, walk, tile, 0)),
            (_consume_queries, (views, dk, shared, spec, walk, tile, 1)),
        ],
        [4, 4],
        [tile.REGISTERS, tile.REGISTERS],
    )


# Lengths and strides differ from call to call.
wide_keys_kernel = General(_wide_keys_kernel)
