"""The order of the tiles of packed sequences, made on the device: the host does not know their lengths."""

import triton
import triton.language as tl

from tilewise.kernels.score import span


@triton.jit
def schedule_kernel(schedule, packed, total_q, total_k, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Sequences by falling number of keys, which is what a tile takes; after them what belongs to none.

    schedule: int32, count + 2 first tiles of so many rows, the last of them their number, then the numbers
    of the count + 1 sequences; packed: Packed. Grid: one program for each BLOCK of sequences.
    """
    count = packed.count
    own = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keys, tiles = _sizes(own, packed, total_q, total_k, ROWS)
    rank = tl.zeros([BLOCK], tl.int32)
    first = tl.zeros([BLOCK], tl.int32)
    for chunk in range(0, count + 1, BLOCK):
        other = chunk + tl.arange(0, BLOCK)
        other_keys, other_tiles = _sizes(other, packed, total_q, total_k, ROWS)
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
def _sizes(numbers, packed, total_q, total_k, ROWS: tl.constexpr):
    """Keys and tiles of sequences; those of the number `count` are what belongs to none, and sees none."""
    numbers = tl.minimum(numbers, packed.count)
    real = numbers < packed.count
    _, sq = span(packed.cu_seqlens_q, numbers, real, total_q)
    _, sk = span(packed.cu_seqlens_k, numbers, real, total_k)
    return tl.where(real, sk, 0), (sq + ROWS - 1) // ROWS
