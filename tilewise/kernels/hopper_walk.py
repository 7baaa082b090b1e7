"""The order in which programs on Hopper walk: tiles of queries, and the blocks of keys of each; or, in the
backward pass, tiles of keys and the blocks of queries of each.

Scalars, but for the rows of a key_range, so that kernels in Gluon and (to test them) in Triton can call
these functions alike.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tilewise.kernels.score import Bounds, Place, bounds, bounds_of_keys, spans, uniform, walks


class Walk(NamedTuple):
    """Tiles of `heads` heads (those of all batch entries; heads that share tiles count as one), in sections
    of heads whose keys fit the L2 cache together; in a section the last tiles of all heads first, which under a causal mask are the longest.

    Dense: `per_head` tiles of each head; `offset` of row 0's position. Packed: the sequences' own offsets,
    and a `schedule` (hopper_schedule.py) of their tiles, which are searched for in `steps` steps.

    `drawn` counts the tiles drawn beyond each program's first; it is 0 before and after a launch.
    """

    per_head: Any
    heads: Any
    section: Any
    offset: Any
    schedule: Any
    steps: Any
    drawn: Any


class Work(NamedTuple):
    """A tile: where it is, its heads, and its blocks of keys, of which number 0 begins at `first`."""

    at: Place
    head: Any
    kv_head: Any
    first: Any
    blocks: Any


class Blocks(NamedTuple):
    """The blocks 0 … last that some rows see; they see all of full_first … full_last − 1. No row sees more
    than `width` keys of the last."""

    full_first: Any
    full_last: Any
    last: Any
    width: Any


@triton.jit
def tiles_per_head(walk, spec):
    if spec.packed is None:
        tiles = walk.per_head
    else:
        tiles = tl.load(walk.schedule + spec.packed.count + 1)
    return tiles


@triton.jit
def work_of(
    number,
    per_head,
    within,
    walk,
    spec,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HEADS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Tile `number` of a walk, of ROWS rows of each of HEADS heads, `head` the first of them. `within`:
    0 … ROWS − 1 or more, for where there is a key_range. ALIGNED: blocks begin at multiples of BLOCK_K, which
    are no more than else where the right end of the band does."""
    sizes = spec.sizes
    in_section = walk.section * per_head
    first_head = number // in_section * walk.section
    heads = tl.minimum(walk.section, walk.heads - first_head)
    rest = number % in_section
    head = first_head + rest % heads
    tile = rest // heads
    if spec.packed is None:
        batch = head // (sizes.heads // HEADS)
        head = head % (sizes.heads // HEADS)
        start = (per_head - 1 - tile) * ROWS
        at = Place(start, True, batch, batch.to(tl.int64), 0, 0, sizes.sq, sizes.sk, walk.offset)
    else:
        at = _packed_place(tile, walk, spec, ROWS)
        start = at.tile_start
    rows = None
    if spec.key_start is not None:
        rows = start + within
    edges = bounds(start, tl.minimum(start + ROWS, at.sq), rows, at, spec)
    # A tile that sees nothing gets a block past the end, which reads as zeros.
    seen = edges.first < edges.last
    first = edges.first
    if ALIGNED:
        first = first // BLOCK_K * BLOCK_K
    first = tl.where(seen, first, at.sk)
    blocks = tl.where(seen, (edges.last - first + BLOCK_K - 1) // BLOCK_K, 1)
    return Work(at, head * HEADS, head * HEADS // sizes.groups, first, blocks)


@triton.jit
def _packed_place(tile, walk, spec, ROWS: tl.constexpr):
    """The place of a tile of packed sequences, the last of each sequence first. Keys past those that some
    row of the sequence sees do not count."""
    rank, number = _scheduled(tile, walk, spec)
    real = number < spec.packed.count
    start_q, sq, start_k, sk = spans(number, real, spec)
    sk = tl.where(real, sk, 0)
    offset = sk * 0
    if spec.band.bottom_right:
        offset = sk - sq
    if spec.band.right is not None:
        sk = tl.minimum(sk, tl.maximum(sq + offset + spec.band.right, 0))
    start = (tl.load(walk.schedule + rank + 1) - 1 - tile) * ROWS
    return Place(start, real, number, 0, start_q, start_k, sq, sk, offset)


@triton.jit
def _scheduled(tile, walk, spec):
    """The rank of the sequence that a tile is of, and its number."""
    count = spec.packed.count
    rank = tile * 0
    beyond = count + 1 + rank
    for _ in range(walk.steps):
        middle = (rank + beyond) // 2
        before = tl.load(walk.schedule + middle) <= tile
        rank = tl.where(before, middle, rank)
        beyond = tl.where(before, beyond, middle)
    return uniform(rank), uniform(tl.load(walk.schedule + count + 2 + rank))


@triton.constexpr_function
def all_take_the_last(rows, block_k, aligned):
    """Whether every consumer's rows see some of a tile's last block of keys, so that none has to pass it by:
    known where the right end of the band is that of a block, and a block is as long as the tile has rows."""
    return aligned and block_k >= rows


@triton.jit
def blocks_of(rows, i0, work, spec, ROWS: tl.constexpr, BLOCK_K: tl.constexpr):
    """The blocks that ROWS rows of a tile see, from row i0 on, which are `rows`; one at least."""
    at = work.at
    edges = bounds(i0, tl.minimum(i0 + ROWS, at.sq), rows, at, spec)
    last = work.blocks - 1
    full_first = 0
    full_last = last
    if (spec.band.right is not None) or (spec.key_start is not None):
        last = tl.minimum(last, (edges.last - work.first + BLOCK_K - 1) // BLOCK_K - 1)
        last = tl.maximum(last, 0)
        full_last = tl.maximum(tl.minimum((edges.full_last - work.first) // BLOCK_K, last), 0)
    if (spec.band.left is not None) or (spec.key_start is not None):
        full_first = (edges.full_first - work.first + BLOCK_K - 1) // BLOCK_K
        full_first = tl.minimum(tl.maximum(full_first, 0), full_last)
    width = edges.last - work.first - last * BLOCK_K
    return Blocks(full_first, full_last, last, width)


class KeysWalk(NamedTuple):
    """Tiles of keys. Dense: those of `heads` heads (those of all batch entries), one head after the other; but of
    the last `together` heads the first tiles of all come first, which under a causal mask are the longest, so
    that programs end at about the same time. `offset` of row 0's position. Where rows have a key_range: the
    `ends` of what each sees, band included, int32 [batch, 2, rows rounded up to blocks], the first key and the
    one after the last; and the `ranges` of blocks that see a tile (hopper_schedule.py). Packed: a `schedule` of
    tiles of keys, which are searched for in `steps` steps, of all heads before the next."""

    heads: Any
    together: Any
    offset: Any
    ends: Any
    ranges: Any
    schedule: Any
    steps: Any


class KeysWork(NamedTuple):
    """A tile of keys: where it is, its head, and the blocks of queries that see some of it: those that begin at
    `first`, … before `last`. All rows of those from full_first on and before full_last see all of it. All four
    are multiples of a block, in order.

    Blocks of queries are numbered, `per_head` of each head, those of this sequence from `first_block` on."""

    at: Place
    kv_head: Any
    first: Any
    full_first: Any
    full_last: Any
    last: Any
    per_head: Any
    first_block: Any


@triton.jit
def work_of_keys(
    number, walk, spec, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, RAGGED: tl.constexpr
):
    """Tile `number` of a walk. RAGGED: the last tile of keys may be cut short."""
    sizes = spec.sizes
    per_head = tl.cdiv(sizes.sq, BLOCK_Q)
    tiles = tl.cdiv(sizes.sk, BLOCK_K)
    if spec.packed is None:
        owner, tile = _tile_of_keys(number, tiles, walk)
        kv_head = owner % sizes.kv_heads
        batch = owner // sizes.kv_heads
        start = tile * BLOCK_K
        at = Place(start, True, batch, batch.to(tl.int64), 0, 0, sizes.sq, sizes.sk, walk.offset)
        first_block = batch * sizes.heads * per_head
    else:
        kv_head = number % sizes.kv_heads
        at = _packed_keys_place(number // sizes.kv_heads, walk, spec, BLOCK_K)
        per_head += spec.packed.count + 1
        first_block = at.start_q // BLOCK_Q + at.number
    if walk.ranges is None:
        blocks = _blocks_of_queries(at, spec, BLOCK_Q, BLOCK_K, RAGGED)
    else:
        found = walk.ranges + (at.batch * tiles + at.tile_start // BLOCK_K) * 4
        blocks = Bounds(tl.load(found), tl.load(found + 1), tl.load(found + 2), tl.load(found + 3))
    first, full_first, full_last, last = blocks
    return KeysWork(at, kv_head, first, full_first, full_last, last, per_head, first_block)


@triton.jit
def _blocks_of_queries(
    at, spec, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, RAGGED: tl.constexpr
):
    """Those that see some of a tile of keys, as the band has it."""
    edges = bounds_of_keys(at.tile_start, tl.minimum(at.tile_start + BLOCK_K, at.sk), at, spec)
    steps = walks(edges, BLOCK_Q, False)
    # Keys that no row sees get one block, in which all is hidden.
    first = tl.minimum(steps.first, tl.maximum(at.sq - 1, 0) // BLOCK_Q * BLOCK_Q)
    last = tl.maximum(steps.last, first + 1)
    full_first = steps.full_first
    full_last = steps.full_last
    if spec.packed is None:
        # Rows past the last are zeros, and add nothing.
        full_last = tl.where(edges.full_last < at.sq, full_last, last)
    if RAGGED:
        full_first = tl.where(at.tile_start + BLOCK_K > at.sk, last, full_first)
    full_first = tl.maximum(full_first, first)
    full_last = tl.maximum(full_last, full_first)
    full_first = tl.cdiv(full_first, BLOCK_Q) * BLOCK_Q
    full_last = tl.cdiv(full_last, BLOCK_Q) * BLOCK_Q
    last = tl.cdiv(last, BLOCK_Q) * BLOCK_Q
    return Bounds(first, full_first, full_last, last)


@triton.jit
def first_of_second_half(work, spec, BLOCK_Q: tl.constexpr, HALF: tl.constexpr):
    """The first of a tile's blocks of queries that may see keys beyond its first HALF, where the band has an
    end on the right."""
    first = work.at.tile_start + HALF - work.at.offset - spec.band.right
    return tl.maximum(work.first, first // BLOCK_Q * BLOCK_Q)


@triton.jit
def _tile_of_keys(number, tiles, walk):
    """The head that tile `number` of a walk is of, and which of the head's `tiles` it is."""
    alone = walk.heads - walk.together
    rest = number - alone * tiles
    head = tl.where(rest < 0, number // tiles, alone + rest % walk.together)
    tile = tl.where(rest < 0, number % tiles, rest // walk.together)
    return head, tile


@triton.jit
def _packed_keys_place(tile, walk, spec, BLOCK_K: tl.constexpr):
    """The place of a tile of keys. Tokens that belong to no sequence are seen by none; tiles past the last are
    past the end of those."""
    rank, number = _scheduled(tile, walk, spec)
    real = number < spec.packed.count
    start_q, sq, start_k, sk = spans(number, real, spec)
    sq = tl.where(real, sq, 0)
    offset = sk * 0
    if spec.band.bottom_right:
        offset = sk - sq
    start = (tile - tl.load(walk.schedule + rank)) * BLOCK_K
    return Place(start, real, number, 0, start_q, start_k, sq, sk, offset)


@triton.jit
def pairs_seen(along, high, keys, rows, at, spec, RAGGED: tl.constexpr):
    """Which pairs of a tile [keys, queries] are seen: `along`, `high` and `rows` are the numbers of keys and
    queries and the end of the sequence, less a common number, such that high is known at compile time."""
    seen = high >= 0
    if spec.packed is not None:
        seen = seen & (high < rows)
    if spec.band.right is not None:
        seen = seen & (high >= along - (at.offset + spec.band.right))
    if spec.band.left is not None:
        seen = seen & (high <= along - (at.offset - spec.band.left))
    if RAGGED:
        seen = seen & (keys < at.sk)[:, None]
    return seen


@triton.jit
def pairs_in_ranges(keys, i, columns, at, walk):
    """The same of the whole block of queries i …, which has so many columns, where rows have a key_range."""
    BLOCK_Q: tl.constexpr = columns.shape[0]
    room = tl.cdiv(at.sq, BLOCK_Q) * BLOCK_Q
    # Added one by one, since what is known at compile time needs no registers for addresses then.
    low = columns & 6
    high = columns & ~6
    ends = walk.ends + at.batch * (2 * room) + i
    lo = tl.load(ends + low + high)
    hi = tl.load(ends + room + low + high)
    return (keys[:, None] >= lo[None, :]) & (keys[:, None] < hi[None, :])
