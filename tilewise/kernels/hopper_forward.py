"""The forward pass on Hopper: programs that stay, each a producer and two or three consumer warpgroups.

The producer has tiles of q and blocks of k and v loaded ahead. A consumer has 64 rows. It issues the
product of the next block's scores, then P V of the last one, and computes exponentials while the tensor
cores work (arXiv 2407.08608). Keys are walked from the last that a tile sees to the first.

A NaN or Inf in a value that no row of the sequence sees reaches no result. One that some rows see may
reach others whose tile shares a block with them: its share there is 0 · NaN.
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
    await_stored,
    await_turn,
    beside_zeros,
    close_turns,
    compute_before,
    give_back,
    keep,
    load_tile,
    number_ring,
    one_of,
    open_turns,
    pack,
    part_of,
    part_width,
    partial_row_sums,
    parts_of,
    pass_turn,
    product_layout,
    put_numbers,
    shared_layout,
    slot,
    split_columns,
    store_tile,
    take_numbers,
    tile_ring,
    unpack,
    wait_empty,
    wait_full,
)
from tilewise.kernels.hopper_walk import (
    Walk,
    Work,
    all_take_the_last,
    blocks_of,
    tiles_per_head,
    work_of,
)
from tilewise.kernels.score import (
    LN2,
    LOG2E,
    NEG_INF,
    Place,
    constexpr,
    interval,
    line,
    logits,
    probabilities,
)

__all__ = ["Tile", "Walk", "constexpr", "forward_kernel"]


class Tile(NamedTuple):
    """All constexpr. GROUPS consumers of 64 rows; STAGES blocks of BLOCK_K keys; BLOCK_D and BLOCK_DV
    columns in shared memory, D and DV of them in products; Q_STAGES tiles of q. DYNAMIC: programs draw
    tiles. RAGGED: the last block of keys may be cut short. ALIGNED: the band's right end is that
    of a block: it cuts a consumer's first block alone, and of one as long as two consumers have rows, the
    first one's rows see the first half. FENCED: see `compute_before`. REGISTERS of a
    consumer's threads. HEADS that share a tile, since each has few rows: row r of them all is row
    r // HEADS of head r % HEADS."""

    GROUPS: Any
    BLOCK_K: Any
    BLOCK_D: Any
    BLOCK_DV: Any
    D: Any
    DV: Any
    STAGES: Any
    Q_STAGES: Any
    DYNAMIC: Any
    RAGGED: Any
    ALIGNED: Any
    FENCED: Any
    REGISTERS: Any
    HEADS: Any


class Views(NamedTuple):
    """Descriptors of q, k, v and out."""

    q: Any
    k: Any
    v: Any
    out: Any


class Shared(NamedTuple):
    """Rings of q (one use per tile and consumer), k and v, a buffer of out per consumer, and a ring of what
    there is to do."""

    q: Any
    k: Any
    v: Any
    out: Any
    orders: Any


@gluon.jit
def _queries(at):
    return Part(at.number, at.start_q, at.sq)


@gluon.jit
def _keys(at):
    return Part(at.number, at.start_k, at.sk)


# ------------------------------------------------------------------ the producer


@gluon.jit
def _produce(views, shared, spec, walk, tile):
    ROWS: gl.constexpr = GROUP_ROWS // tile.HEADS
    count = 0
    turn = 0
    number = gl.program_id(0)
    per_head = tiles_per_head(walk, spec)
    # As many as a power of two that holds them.
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    within = gl.arange(0, 128 if tile.GROUPS == 2 else 256, layout)
    total = per_head * walk.heads
    work = _work(number, per_head, within, spec, walk, tile)
    while number < total:
        keys = _keys(work.at)
        j = work.first + (work.blocks - 1) * tile.BLOCK_K
        wait_empty(shared.k, count)
        load_tile(views.k, keys, j, work.kv_head, shared.k, count)
        for group in gl.static_range(tile.GROUPS):
            use = turn * tile.GROUPS + group
            row = work.at.tile_start + group * ROWS
            wait_empty(shared.q, use)
            load_tile(views.q, _queries(work.at), row, work.head, shared.q, use)
        put_numbers(shared.orders, turn, _order(work, spec))
        for _ in range(work.blocks - 1):
            wait_empty(shared.k, count + 1)
            load_tile(views.k, keys, j - tile.BLOCK_K, work.kv_head, shared.k, count + 1)
            wait_empty(shared.v, count)
            load_tile(views.v, keys, j, work.kv_head, shared.v, count)
            j -= tile.BLOCK_K
            count += 1
        # What comes next is found while consumers have two blocks to do, so that they need not wait; not
        # earlier, since who draws a tile long before its time may begin it after all others have ended.
        number += gl.num_programs(0)
        if tile.DYNAMIC:
            drawn = gl.atomic_add(walk.drawn, 1, sem="relaxed")
            # As many are drawn as there are tiles: after the last one the counter is as it was.
            gl.store(walk.drawn, 0, mask=drawn == total - 1)
            number = gl.num_programs(0) + drawn
        following = _work(gl.minimum(number, total - 1), per_head, within, spec, walk, tile)
        wait_empty(shared.v, count)
        load_tile(views.v, keys, j, work.kv_head, shared.v, count)
        count += 1
        turn += 1
        work = following
    put_numbers(shared.orders, turn, (0, 0))


@gluon.jit
def _work(number, per_head, within, spec, walk, tile):
    ROWS: gl.constexpr = GROUP_ROWS // tile.HEADS * tile.GROUPS
    return work_of(
        number, per_head, within, walk, spec, ROWS, tile.BLOCK_K, tile.HEADS, tile.ALIGNED
    )


@gluon.jit
def _order(work, spec):
    """What consumers are told of the work, in numbers."""
    at = work.at
    if spec.packed is None:
        order = (work.blocks, work.first, at.tile_start, work.head, at.number)
    else:
        order = (
            work.blocks,
            work.first,
            at.tile_start,
            work.head,
            at.number,
            at.start_q,
            at.sq,
            at.sk,
            at.offset,
        )
    return order


@gluon.jit
def _ordered(order, spec, walk):
    """The work that consumers are told of; the keys' own place is not their business."""
    sizes = spec.sizes
    number = one_of(order, 4)
    start = one_of(order, 2)
    if spec.packed is None:
        batch = number.to(gl.int64)
        at = Place(start, True, number, batch, 0, 0, sizes.sq, sizes.sk, walk.offset)
    else:
        real = number < spec.packed.count
        start_q, sq, sk = one_of(order, 5), one_of(order, 6), one_of(order, 7)
        at = Place(start, real, number, 0, start_q, 0, sq, sk, one_of(order, 8))
    head = one_of(order, 3)
    return Work(at, head, head // sizes.groups, one_of(order, 1), one_of(order, 0))


# ------------------------------------------------------------------ consumers


@gluon.jit
def _consume(views, shared, lse, spec, walk, tile, GROUP: gl.constexpr):
    ROW: gl.constexpr = gl.SliceLayout(1, product_layout(tile.BLOCK_K))
    ROWS: gl.constexpr = GROUP_ROWS // tile.HEADS
    LEFT: gl.constexpr = (spec.band.left is not None) or (spec.key_start is not None)
    RIGHT: gl.constexpr = (spec.band.right is not None) or (spec.key_start is not None)
    EDGE: gl.constexpr = (LEFT or RIGHT) or tile.RAGGED
    TOGETHER: gl.constexpr = all_take_the_last(tile.GROUPS * ROWS, tile.BLOCK_K, tile.ALIGNED)
    # With three consumers there are too few registers for it.
    HALVES: gl.constexpr = RIGHT and tile.BLOCK_K == 2 * GROUP_ROWS and tile.GROUPS == 2
    count = 0
    turn = 0
    open_turns(GROUP, tile.GROUPS)
    order = take_numbers(shared.orders, turn)
    while one_of(order, 0) > 0:
        give_back(shared.orders, turn)
        work = _ordered(order, spec, walk)
        at = work.at
        i0 = at.tile_start + GROUP * ROWS
        rows = interval(i0 + gl.arange(0, GROUP_ROWS, ROW) // tile.HEADS, at, spec)
        blocks = blocks_of(rows.number, i0, work, spec, ROWS, tile.BLOCK_K)
        if RIGHT and not TOGETHER:
            for _ in range(blocks.last + 1, work.blocks):
                _skip(shared, count, GROUP, tile)
                count += 1

        use = turn * tile.GROUPS + GROUP
        wait_full(shared.q, use)
        q = slot(shared.q, use)
        o = _nothing(tile)
        if HALVES and not tile.ALIGNED:
            if blocks.width <= GROUP_ROWS:
                p, l, m = _first(
                    q, shared, count, rows, work, blocks.last, spec, tile, GROUP, True, EDGE
                )
            else:
                p, l, m = _first(
                    q, shared, count, rows, work, blocks.last, spec, tile, GROUP, False, EDGE
                )
        else:
            NARROW: gl.constexpr = HALVES and GROUP == 0
            p, l, m = _first(
                q, shared, count, rows, work, blocks.last, spec, tile, GROUP, NARROW, EDGE
            )
        full_last = blocks.last
        if RIGHT and not tile.ALIGNED:
            full_last = blocks.full_last
            for block in range(blocks.last - 1, full_last - 1, -1):
                o, p, l, m = _step(
                    o, p, l, m, q, shared, count, rows, work, block, spec, tile, GROUP, True
                )
                count += 1
        for block in range(full_last - 1, blocks.full_first - 1, -1):
            o, p, l, m = _step(
                o, p, l, m, q, shared, count, rows, work, block, spec, tile, GROUP, False
            )
            count += 1
        if LEFT:
            for block in range(blocks.full_first - 1, -1, -1):
                o, p, l, m = _step(
                    o, p, l, m, q, shared, count, rows, work, block, spec, tile, GROUP, True
                )
                count += 1
        give_back(shared.q, use)
        wait_full(shared.v, count)
        o = _landed(_add_values(o, p, shared.v, count, tile))
        give_back(shared.v, count)
        count += 1
        turn += 1
        _finish(o, l, m, rows, i0, work, views, shared.out.index(GROUP), lse, spec, tile)
        order = take_numbers(shared.orders, turn)
    tma.store_wait(0)
    close_turns(GROUP)


@gluon.jit
def _skip(shared, count, GROUP: gl.constexpr, tile):
    """A block that rows of another consumer see and none of these."""
    wait_full(shared.k, count)
    await_turn(GROUP)
    pass_turn(GROUP, tile.GROUPS)
    give_back(shared.k, count)
    wait_full(shared.v, count)
    give_back(shared.v, count)


@gluon.jit
def _first(
    q,
    shared,
    count,
    rows,
    work,
    block,
    spec,
    tile,
    GROUP: gl.constexpr,
    NARROW: gl.constexpr,
    EDGE: gl.constexpr,
):
    """The probabilities, their sums and the maximum of the first block. NARROW: no row sees its second half,
    whose probabilities are 0."""
    COLUMNS: gl.constexpr = tile.BLOCK_K // 2 if NARROW else tile.BLOCK_K
    none = _zeros(tile.BLOCK_K)
    l = partial_row_sums(none)
    wait_full(shared.k, count)
    await_turn(GROUP)
    s = _scores(q, shared.k, count, tile, COLUMNS)
    pass_turn(GROUP, tile.GROUPS)
    s = warpgroup_mma_wait(0, [s])
    give_back(shared.k, count)
    m = gl.full([GROUP_ROWS], NEG_INF, gl.float32, gl.SliceLayout(1, s.type.layout))
    p, m, _ = _softmax(s, m, rows, work, block, spec, tile, EDGE)
    l = gl.convert_layout(partial_row_sums(p), l.type.layout, assert_trivial=True)
    p = pack(p, shared.v.data.dtype)
    if NARROW:
        p = beside_zeros(p, pack(none, shared.v.data.dtype))
    return p, l, _beside(m, none)


@gluon.jit
def _scores(q, k, count, tile, COLUMNS: gl.constexpr):
    """The product q kᵀ with so many keys of block `count`, on its way."""
    s = _zeros(COLUMNS)
    keys = slot(k, count)
    if keys.shape[0] > COLUMNS:
        keys = keys.slice(0, COLUMNS)
    for i in gl.static_range(parts_of(tile.D)):
        part = part_of(keys, tile.D, i).permute((1, 0))
        s = warpgroup_mma(part_of(q, tile.D, i), part, s, use_acc=i > 0, is_async=True)
    return s


@gluon.jit
def _nothing(tile):
    """The sum of no values: [rows, columns] of each part of the columns."""
    # Kernels know no (*o, x).
    o = ()
    for i in gl.static_range(parts_of(tile.DV)):
        o = o + (_zeros(part_width(tile.DV, i)),)  # noqa: RUF005
    return o


@gluon.jit
def _zeros(COLUMNS: gl.constexpr):
    return gl.zeros([GROUP_ROWS, COLUMNS], gl.float32, product_layout(COLUMNS))


@gluon.jit
def _add_values(o, p, v, count, tile):
    """o + p v with block `count`, on its way."""
    values = slot(v, count)
    sums = ()
    for i in gl.static_range(parts_of(tile.DV)):
        part = part_of(values, tile.DV, i)
        operand = unpack(p, values.dtype, product_layout(part.shape[1]))
        sums = sums + (warpgroup_mma(operand, part, o[i], is_async=True),)  # noqa: RUF005
    return sums


@gluon.jit
def _landed(o):
    """o, when all products have been added."""
    if len(o) == 1:
        landed = (warpgroup_mma_wait(0, [o[0]]),)
    else:
        first, second = warpgroup_mma_wait(0, [o[0], o[1]])
        landed = (first, second)
    return landed


@gluon.jit
def _times(o, factor):
    """Each row of o times its factor."""
    scaled = ()
    for i in gl.static_range(len(o)):
        scaled = scaled + (o[i] * _beside(factor, o[i])[:, None],)  # noqa: RUF005
    return scaled


@gluon.jit
def _step(
    o,
    p,
    l,
    m,
    q,
    shared,
    count,
    rows,
    work,
    block,
    spec,
    tile,
    GROUP: gl.constexpr,
    EDGE: gl.constexpr,
):
    """The scores of block number `block`, which is use count + 1 of the rings, while the values of the one
    before, use count, are added. EDGE: not every row sees all of the block."""
    wait_full(shared.k, count + 1)
    await_turn(GROUP)
    s = _scores(q, shared.k, count + 1, tile, tile.BLOCK_K)
    wait_full(shared.v, count)
    o = _add_values(o, p, shared.v, count, tile)
    pass_turn(GROUP, tile.GROUPS)
    s = warpgroup_mma_wait(parts_of(tile.DV), [s])
    give_back(shared.k, count + 1)
    following, new, base = _softmax(s, m, rows, work, block, spec, tile, EDGE)
    fall = m - base
    if not spec.scores.FOLDED:
        fall = fall * LOG2E
    rebase = gl.exp2(fall)
    sums = partial_row_sums(following)
    if tile.FENCED:
        compute_before(sums)
    o = _landed(o)
    keep(p)
    give_back(shared.v, count)
    l = l * _beside(rebase, l)[:, None] + gl.convert_layout(
        sums, l.type.layout, assert_trivial=True
    )
    o = _times(o, rebase)
    return o, pack(following, shared.v.data.dtype), l, new


@gluon.jit
def _beside(x, tile):
    """One number per row, laid out like the rows of a tile."""
    return gl.convert_layout(x, gl.SliceLayout(1, tile.type.layout), assert_trivial=True)


@gluon.jit
def _softmax(s, m, rows, work, block, spec, tile, EDGE: gl.constexpr):
    """From the raw products of a block: probabilities, the new maximum, and the base that they are
    relative to. FOLDED: both in units of 2."""
    LEFT: gl.constexpr = (spec.band.left is not None) or (spec.key_start is not None)
    j = work.first + block * tile.BLOCK_K
    low, high = split_columns(s)
    row = _beside(rows.number - j, s)[:, None] - low
    s = logits(s, work.at, work.head, row, high, None, spec).s
    if EDGE:
        seen = _beside(rows.hi - j, s)[:, None] - low > high
        if LEFT:
            seen = seen & (_beside(rows.lo - j, s)[:, None] - low <= high)
        s = gl.where(seen, s, NEG_INF)
    highest = gl.max(s, 1)
    if spec.scores.FOLDED:
        highest = highest * spec.scores.unit
    new = gl.maximum(m, highest)
    # A row without a key so far has m = −inf; its terms, all 0, need any finite base.
    base = new
    if EDGE:
        base = gl.where(new == NEG_INF, 0.0, new)
    return probabilities(s, base[:, None], 0.0, spec), new, base


@gluon.jit
def _finish(o, l, m, rows, i0, work, views, buffer, lse, spec, tile):
    """Divides by the sums, and stores out and lse."""
    at = work.at
    l = gl.convert_layout(gl.sum(l, 1), m.type.layout)
    # The product with the unit is rounded, which beyond some 1e9 leaves any power of 2 instead of the 1 that
    # the largest logit has: too much of it is not made a number.
    exact = (l > 2.0**-100) & (l < 2.0**100)
    l = gl.where(exact | (m == NEG_INF), l, float("nan"))
    if spec.scores.FOLDED:
        m = m * LN2
    head = work.head
    if tile.HEADS > 1:
        head = work.head + gl.arange(0, GROUP_ROWS, m.type.layout) % tile.HEADS
    share = gl.full([GROUP_ROWS], 1.0, gl.float32, m.type.layout)
    if spec.scores.sinks is not None:
        sink = gl.load(spec.scores.sinks + head).to(gl.float32)
        if spec.packed is not None:
            sink = gl.where(at.real, sink, NEG_INF)
        total = gl.maximum(m, sink)
        base = gl.where(total == NEG_INF, 0.0, total)
        share = gl.exp2((m - base) * LOG2E)
        l = l * share + gl.exp2((sink - base) * LOG2E)
        m = total
    empty = m == NEG_INF
    share = share / gl.where(empty, 1.0, l)
    total = gl.where(empty, NEG_INF, m + gl.log(l))
    start = gl.cast(at.start_q, gl.int64)
    gl.store(line(lse, at, head, start, rows.number), total, mask=rows.number < at.sq)
    _store(_times(o, share), _queries(at), i0, work.head, views.out, buffer)


@gluon.jit
def _store(o, queries, i0, head, out, buffer):
    """Stores the parts of o by way of a buffer, one after the other if they do not fit together. Columns of
    the buffer that out does not have are not stored."""
    WIDTH: gl.constexpr = buffer.shape[1]
    if o[0].shape[1] > WIDTH:
        halves = gl.split(gl.permute(gl.reshape(o[0], [GROUP_ROWS, 2, WIDTH]), (0, 2, 1)))
        for i in gl.static_range(2):
            half = gl.convert_layout(halves[i], product_layout(WIDTH), assert_trivial=True)
            await_stored()
            buffer.store(half.to(buffer.dtype))
            store_tile(out, queries, i0, head, i * WIDTH, buffer)
    elif o[0].shape[1] == WIDTH:
        for i in gl.static_range(len(o)):
            await_stored()
            part_of(buffer, o[i].shape[1], 0).store(o[i].to(buffer.dtype))
            store_tile(out, queries, i0, head, i * WIDTH, buffer)
    else:
        await_stored()
        for i in gl.static_range(len(o)):
            part_of(buffer, WIDTH // 4 * 3, i).store(o[i].to(buffer.dtype))
        store_tile(out, queries, i0, head, 0, buffer)


# ------------------------------------------------------------------ the kernel


@gluon.jit
def _forward_kernel(q, k, v, out, lse, spec, walk, tile):
    """q, k, v, out: descriptors of tiles; lse: Lines; spec: Spec, whose sizes count the keys that the views
    show; walk: Walk; tile: Tile. Grid: (programs,)."""
    dtype: gl.constexpr = q.dtype
    G: gl.constexpr = tile.GROUPS
    views = Views(q, k, v, out)
    shared = Shared(
        tile_ring(dtype, tile.Q_STAGES * G, GROUP_ROWS, tile.BLOCK_D, 1),
        tile_ring(dtype, tile.STAGES, tile.BLOCK_K, tile.BLOCK_D, G),
        tile_ring(dtype, tile.STAGES, tile.BLOCK_K, tile.BLOCK_DV, G),
        gl.allocate_shared_memory(
            dtype, [G, GROUP_ROWS, min(tile.BLOCK_DV, 128)], shared_layout(2)
        ),
        number_ring(2, 8 if spec.packed is None else 16, G),
    )
    fence_async_shared()
    if G == 2:
        gl.warp_specialize(
            [
                (_produce, (views, shared, spec, walk, tile)),
                (_consume, (views, shared, lse, spec, walk, tile, 0)),
                (_consume, (views, shared, lse, spec, walk, tile, 1)),
            ],
            [4, 4],
            [tile.REGISTERS, tile.REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_produce, (views, shared, spec, walk, tile)),
                (_consume, (views, shared, lse, spec, walk, tile, 0)),
                (_consume, (views, shared, lse, spec, walk, tile, 1)),
                (_consume, (views, shared, lse, spec, walk, tile, 2)),
            ],
            [4, 4, 4],
            [tile.REGISTERS, tile.REGISTERS, tile.REGISTERS],
        )


# Lengths and strides differ from call to call.
forward_kernel = General(_forward_kernel)
