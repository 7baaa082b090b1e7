"""The order of the tiles of packed sequences, made on the device: the host does not know their lengths."""

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
