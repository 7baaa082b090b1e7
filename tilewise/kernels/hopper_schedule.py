"""What is made on the device since the host does not know it: the order of the tiles of packed sequences, and
the blocks of queries that see a tile of keys where rows have a key_range."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tilewise.kernels.score import span


class Lengths(NamedTuple):
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    sequences: Any
    total_q: Any
    total_k: Any


@triton.jit(do_not_specialize=["count", "total_q", "total_k"])
def schedule_kernel(
    schedule,
    cu_seqlens_q,
    cu_seqlens_k,
    count,
    total_q,
    total_k,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sequences by falling number of keys, which is what a tile takes; after them what belongs to none.

    schedule: int32, count + 2 first tiles of so many rows, the last of them their number, then the numbers
    of the count + 1 sequences. Grid: one program for each BLOCK of sequences.
    """
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, count, total_q, total_k)
    own = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keys, tiles = _sizes(own, lengths, ROWS)
    rank = tl.zeros([BLOCK], tl.int32)
    first = tl.zeros([BLOCK], tl.int32)
    for chunk in range(0, count + 1, BLOCK):
        other = chunk + tl.arange(0, BLOCK)
        other_keys, other_tiles = _sizes(other, lengths, ROWS)
        longer = other_keys[None, :] > keys[:, None]
        equal = other_keys[None, :] == keys[:, None]
        earlier = longer | (equal & (other[None, :] < own[:, None]))
        earlier = earlier & (other <= count)[None, :]
        rank += tl.sum(earlier.to(tl.int32), 1)
        first += tl.sum(tl.where(earlier, other_tiles[None, :], 0), 1)
    real = own <= count
    tl.store(schedule + rank, first, mask=real)
    tl.store(schedule + rank + 1, first + tiles, mask=real & (rank == count))
    tl.store(schedule + count + 2 + rank, own, mask=real)


@triton.jit
def _sizes(numbers, lengths, ROWS: tl.constexpr):
    """Keys and tiles of sequences; those of the number `count` are what belongs to none, and sees none."""
    numbers = tl.minimum(numbers, lengths.sequences)
    real = numbers < lengths.sequences
    _, sq = span(lengths.cu_seqlens_q, numbers, real, lengths.total_q)
    _, sk = span(lengths.cu_seqlens_k, numbers, real, lengths.total_k)
    return tl.where(real, sk, 0), (sq + ROWS - 1) // ROWS


@triton.jit(do_not_specialize=["rows", "keys"])
def ranges_kernel(
    ranges, ends, rows, keys, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr
):
    """Of each tile of keys four rows, multiples of BLOCK_Q in order: no row sees any of it before `first` or
    from `last` on, and all see all of it from `full_first` on and before `full_last`, where the last such
    blocks are.

    ranges: int32 [batch, tiles, (first, full_first, full_last, last)]; ends: as KeysWalk has them, of so many
    rows and keys. Grid: (tiles · batch,).
    """
    tiles = tl.cdiv(keys, BLOCK_K)
    start = tl.program_id(0) % tiles * BLOCK_K
    room = tl.cdiv(rows, BLOCK_Q) * BLOCK_Q
    ends += (tl.program_id(0) // tiles).to(tl.int64) * (2 * room)
    first = room
    last = tl.zeros([], tl.int32)
    full_last = tl.zeros([], tl.int32)
    for i in range(0, rows, CHUNK):
        begin, some, all = _blocks_that_see(ends, i, rows, room, start, BLOCK_Q, BLOCK_K, CHUNK)
        first = tl.minimum(first, tl.min(tl.where(some, begin, room), 0))
        last = tl.maximum(last, tl.max(tl.where(some, begin + BLOCK_Q, 0), 0))
        full_last = tl.maximum(full_last, tl.max(tl.where(all, begin + BLOCK_Q, 0), 0))
    # Of keys that no row sees, one block, in which all is hidden.
    first = tl.minimum(first, room - BLOCK_Q)
    last = tl.maximum(last, first + BLOCK_Q)
    full_first = first
    for i in range(0, full_last, CHUNK):
        begin, some, all = _blocks_that_see(ends, i, rows, room, start, BLOCK_Q, BLOCK_K, CHUNK)
        gap = (begin < full_last) & (all == 0)
        full_first = tl.maximum(full_first, tl.max(tl.where(gap, begin + BLOCK_Q, 0), 0))
    full_last = tl.maximum(full_last, full_first)
    ranges += tl.program_id(0).to(tl.int64) * 4
    tl.store(ranges, first)
    tl.store(ranges + 1, full_first)
    tl.store(ranges + 2, full_last)
    tl.store(ranges + 3, last)


@triton.jit
def _blocks_that_see(
    ends, i, rows, room, start, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr
):
    """Where blocks of rows begin, CHUNK rows from row i on, and whether some row of each sees some of keys
    start …, and all see all of them."""
    numbers = i + tl.arange(0, CHUNK)
    lo = tl.load(ends + numbers, mask=numbers < room, other=0)
    hi = tl.load(ends + room + numbers, mask=numbers < room, other=0)
    inside = numbers < rows
    some = inside & (lo < tl.minimum(hi, start + BLOCK_K)) & (hi > start)
    # Rows past the last are zeros, and add nothing.
    all = (inside == 0) | ((lo <= start) & (hi >= start + BLOCK_K))
    some = tl.max(tl.reshape(some.to(tl.int32), [CHUNK // BLOCK_Q, BLOCK_Q]), 1) > 0
    all = tl.min(tl.reshape(all.to(tl.int32), [CHUNK // BLOCK_Q, BLOCK_Q]), 1) > 0
    begin = i + tl.arange(0, CHUNK // BLOCK_Q) * BLOCK_Q
    return begin, some, all & (begin < rows)
