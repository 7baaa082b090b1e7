"""The values that say *what* is computed.

A backend receives one `Problem`. How the caller spelled it (causal or a window, one batch or many
packed sequences, contiguous keys or pages) is settled here; how it is computed is the backend's.

Layouts: dense q (B, Sq, Hq, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv), lse (B, Hq, Sq); packed
q (total_q, Hq, D), lse (Hq, total_q); pages (num_pages, page_size, Hkv, D).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple, overload

import torch
from torch import Tensor

ALIGNMENTS = ("bottom-right", "top-left")
ALL = slice(None)


class Band(NamedTuple):
    """Keys seen by position: row i, standing at p = i + offset, sees p − left … p + right.

    `None` leaves a side open; causal is right = 0. `align` says where rows stand when Sq ≠ Sk.
    """

    left: int | None = None
    right: int | None = None
    align: str = "bottom-right"

    def offset(self, sq: int, sk: int) -> int:
        return sk - sq if self.align == "bottom-right" else 0


class KeyRange(NamedTuple):
    """One interval start ≤ j < end per row: (B or 1, Sq or 1), packed (total_q or 1,)."""

    start: Tensor
    end: Tensor


class Scores(NamedTuple):
    """How a logit comes about, in this order: scale, softcap, alibi, bias, mask, sink.

    `bias` and `mask` keep their broadcast dimensions of size 1: (B, Hq, Sq, Sk), packed
    (Hq, total_q, max_seqlen_k). `alibi_slopes` is (Hq,) or (B, Hq); `sinks` is (Hq,).
    """

    scale: float
    softcap: float | None = None
    alibi_slopes: Tensor | None = None
    bias: Tensor | None = None
    mask: Tensor | None = None
    sinks: Tensor | None = None

    def part(self, batch: slice, heads: slice, rows: slice = ALL, keys: slice = ALL) -> Scores:
        """The views that a part of a dense problem reads."""
        slopes = self.alibi_slopes
        if slopes is not None:
            slopes = slopes[heads] if slopes.ndim == 1 else slopes[batch, heads]
        return self._replace(
            alibi_slopes=slopes,
            bias=part_of(self.bias, batch, heads, rows, keys),
            mask=part_of(self.mask, batch, heads, rows, keys),
            sinks=None if self.sinks is None else self.sinks[heads],
        )

    def of_sequence(self, number: int, queries: slice, sk: int) -> Scores:
        """The views that sequence `number` of a packed problem reads, as a dense batch of one."""
        slopes = self.alibi_slopes
        if slopes is not None and slopes.ndim == 2:
            slopes = slopes[number]
        bias, mask = (part_of(t, ALL, queries, slice(0, sk)) for t in (self.bias, self.mask))
        return self._replace(
            alibi_slopes=slopes,
            bias=None if bias is None else bias.unsqueeze(0),
            mask=None if mask is None else mask.unsqueeze(0),
        )


class Dropout(NamedTuple):
    """Keep probability 1 − p by a bit of (seed, sequence, head, row, key).

    `sequence` and `head` number the first batch entry and query head of a part of a problem.
    """

    p: float
    seed: Tensor
    sequence: int = 0
    head: int = 0


class Packed(NamedTuple):
    """Sequences laid end to end; sequence s holds tokens cu_seqlens[s] … cu_seqlens[s + 1] − 1."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None


class Paged(NamedTuple):
    """Keys in pages: token j of batch entry b is slot j % page_size of page page_table[b, j // page_size]."""

    page_table: Tensor
    seqused_k: Tensor


class Bounds(NamedTuple):
    """What a tile of rows sees: nothing outside [first, last), everything in [full_first, full_last)."""

    first: int
    full_first: int
    full_last: int
    last: int


class Problem(NamedTuple):
    """One attention call, validated."""

    q: Tensor
    k: Tensor
    v: Tensor
    band: Band
    scores: Scores
    key_range: KeyRange | None = None
    dropout: Dropout | None = None
    packed: Packed | None = None
    paged: Paged | None = None
    deterministic: bool = False

    @property
    def groups(self) -> int:
        """Query heads per key head."""
        heads = self.k.shape[-2]
        return self.q.shape[-2] // heads if heads else 1

    def interval(self, i0: int, i1: int) -> tuple[Tensor, Tensor]:
        """lo and hi of rows i0 … i1 − 1 of a dense problem, each (B or 1, rows): lo ≤ j < hi.

        An empty row has hi ≤ lo; ends of such may lie outside 0 … Sk.
        """
        sq, sk = self.q.shape[1], self.k.shape[1]
        position = torch.arange(i0, i1, device=self.q.device).unsqueeze(0)
        position = position + self.band.offset(sq, sk)
        lo = torch.zeros_like(position)
        hi = torch.full_like(position, sk)
        if self.band.left is not None:
            lo = torch.maximum(lo, position - self.band.left)
        if self.band.right is not None:
            hi = torch.minimum(hi, position + self.band.right + 1)
        if self.key_range is not None:
            lo = torch.maximum(lo, rows_of(self.key_range.start, 1, i0, i1))
            hi = torch.minimum(hi, rows_of(self.key_range.end, 1, i0, i1))
        return lo, hi

    def bounds(self, i0: int, i1: int) -> Bounds:
        """The tile bounds of rows i0 … i1 − 1 of a dense problem (i0 < i1)."""
        sq, sk = self.q.shape[1], self.k.shape[1]
        offset = self.band.offset(sq, sk)
        first = full_first = 0
        last = full_last = sk
        if self.band.left is not None:
            first, full_first = i0 + offset - self.band.left, i1 - 1 + offset - self.band.left
        if self.band.right is not None:
            full_last, last = i0 + offset + self.band.right + 1, i1 + offset + self.band.right
        if self.key_range is not None and self.q.shape[0]:
            start = rows_of(self.key_range.start, 1, i0, i1)
            end = rows_of(self.key_range.end, 1, i0, i1)
            first, full_first = max(first, int(start.min())), max(full_first, int(start.max()))
            full_last, last = min(full_last, int(end.min())), min(last, int(end.max()))
        return Bounds(*(min(max(key, 0), sk) for key in (first, full_first, full_last, last)))

    def part(self, batch: slice, kv_heads: slice) -> Problem:
        """The dense problem of some batch entries and key heads (and their query heads), as views."""
        if (batch, kv_heads) == (slice(0, self.q.shape[0]), slice(0, self.k.shape[2])):
            return self
        heads = slice(kv_heads.start * self.groups, kv_heads.stop * self.groups)
        key_range = self.key_range and KeyRange(*(part_of(t, batch) for t in self.key_range))
        dropout = self.dropout and self.dropout._replace(
            sequence=self.dropout.sequence + batch.start, head=self.dropout.head + heads.start
        )
        return self._replace(
            q=self.q[batch, :, heads],
            k=self.k[batch, :, kv_heads],
            v=self.v[batch, :, kv_heads],
            scores=self.scores.part(batch, heads),
            key_range=key_range,
            dropout=dropout,
        )


@overload
def part_of(t: Tensor, *where: slice) -> Tensor: ...
@overload
def part_of(t: None, *where: slice) -> None: ...
def part_of(t: Tensor | None, *where: slice) -> Tensor | None:
    """t[where], but a dimension of size 1 broadcasts: it is kept whole."""
    if t is None:
        return None
    return t[tuple(ALL if n == 1 else w for n, w in zip(t.shape, where, strict=False))]


def rows_of(t: Tensor, dim: int, i0: int, i1: int) -> Tensor:
    """Rows i0 … i1 − 1 of t along dim, which may broadcast."""
    return t if t.shape[dim] == 1 else t.narrow(dim, i0, i1 - i0)


class Sequence(NamedTuple):
    """One dense problem inside a packed or paged one, and where its tensors lie in the whole.

    Packed: token slices `queries` and `keys`. Paged: the batch entry `number`. Dense: neither.
    """

    problem: Problem
    number: int | None = None
    queries: slice | None = None
    keys: slice | None = None

    def of_q(self, t: Tensor) -> Tensor:
        """The view of a tensor laid out like q or out."""
        if self.queries is not None:
            return t[self.queries].unsqueeze(0)
        return t if self.number is None else t[self.number : self.number + 1]

    def of_k(self, t: Tensor) -> Tensor:
        """The view of a tensor laid out like a dense or packed k or v."""
        return t if self.keys is None else t[self.keys].unsqueeze(0)

    def of_lse(self, t: Tensor) -> Tensor:
        if self.queries is not None:
            return t[:, self.queries].unsqueeze(0)
        return t if self.number is None else t[self.number : self.number + 1]

    def of_scores(self, scores: Scores) -> Scores:
        """The views of bias, slopes, sinks and mask, or of their gradients."""
        if self.queries is None or self.number is None:
            return scores
        return scores.of_sequence(self.number, self.queries, self.problem.k.shape[1])


def sequences(problem: Problem) -> Iterator[Sequence]:
    """The dense problems that a problem is made of; reads lengths from the device.

    Raises ValueError for lengths or page numbers that do not fit.
    """
    if problem.packed is not None:
        yield from _packed_sequences(problem, problem.packed)
    elif problem.paged is not None:
        yield from _paged_sequences(problem, problem.paged)
    else:
        yield Sequence(problem)


def _packed_sequences(problem: Problem, packed: Packed) -> Iterator[Sequence]:
    cu_q = checked_cu_seqlens("cu_seqlens_q", packed.cu_seqlens_q, problem.q.shape[0])
    cu_k = checked_cu_seqlens("cu_seqlens_k", packed.cu_seqlens_k, problem.k.shape[0])
    longest = max((b - a for a, b in pairwise(cu_k)), default=0)
    for name, t in (("mask", problem.scores.mask), ("bias", problem.scores.bias)):
        if t is not None and 1 != t.shape[-1] < longest:
            raise ValueError(
                f"{name} must have a column for each key of the longest sequence, {longest} "
                f"(or 1 column), got {t.shape[-1]}"
            )
    for number in range(len(cu_q) - 1):
        queries = slice(cu_q[number], cu_q[number + 1])
        keys = slice(cu_k[number], cu_k[number + 1])
        key_range = problem.key_range
        if key_range is not None:
            start, end = (t if t.shape[0] == 1 else t[queries] for t in key_range)
            key_range = KeyRange(start.unsqueeze(0), end.unsqueeze(0))
        yield Sequence(
            problem._replace(
                q=problem.q[queries].unsqueeze(0),
                k=problem.k[keys].unsqueeze(0),
                v=problem.v[keys].unsqueeze(0),
                scores=problem.scores.of_sequence(number, queries, keys.stop - keys.start),
                key_range=key_range,
                dropout=problem.dropout and problem.dropout._replace(sequence=number),
                packed=None,
            ),
            number,
            queries,
            keys,
        )


def checked_cu_seqlens(name: str, cu_seqlens: Tensor, total: int) -> list[int]:
    """The cumulative lengths as numbers; they rise from 0 to at most total."""
    cu: list[int] = cu_seqlens.tolist()
    if cu[0] != 0:
        raise ValueError(f"{name} must start at 0, got {cu[0]}")
    fall = next((i for i in range(1, len(cu)) if cu[i] < cu[i - 1]), None)
    if fall is not None:
        raise ValueError(f"{name} must not fall, got {cu[fall - 1]} followed by {cu[fall]}")
    if cu[-1] > total:
        raise ValueError(f"{name} must end within the {total} tokens given, got {cu[-1]}")
    return cu


def _paged_sequences(problem: Problem, paged: Paged) -> Iterator[Sequence]:
    page_size = problem.k.shape[1]
    capacity = paged.page_table.shape[1] * page_size
    lengths: list[int] = paged.seqused_k.tolist()
    for number, length in enumerate(lengths):
        if not 0 <= length <= capacity:
            raise ValueError(
                f"seqused_k[{number}] must be from 0 to {capacity}, the room in page_table, "
                f"got {length}"
            )
        entry = slice(number, number + 1)
        # Zeros are reserved, not written: the pages that no row sees stay untouched on both sides.
        alone = problem._replace(
            q=problem.q[entry],
            k=problem.k.new_zeros(1, length, *problem.k.shape[2:]),
            v=problem.v.new_zeros(1, length, *problem.v.shape[2:]),
            scores=problem.scores.part(entry, ALL, ALL, slice(0, length)),
            key_range=problem.key_range
            and KeyRange(*(part_of(t, entry) for t in problem.key_range)),
            dropout=problem.dropout and problem.dropout._replace(sequence=number),
            paged=None,
        )
        if alone.q.shape[1]:
            first, _, _, last = alone.bounds(0, alone.q.shape[1])
            if first < last:
                pages = paged.page_table[number, first // page_size : -(-last // page_size)]
                _check_pages(pages, problem.k.shape[0], number)
                used = slice(first % page_size, first % page_size + last - first)
                alone.k[0, first:last] = problem.k[pages.long()].flatten(0, 1)[used]
                alone.v[0, first:last] = problem.v[pages.long()].flatten(0, 1)[used]
        yield Sequence(alone, number)


def _check_pages(pages: Tensor, count: int, number: int) -> None:
    low, high = int(pages.min()), int(pages.max())
    if low < 0 or high >= count:
        wrong = low if low < 0 else high
        raise ValueError(
            f"page_table[{number}] must name pages from 0 to {count - 1} where tokens are, got {wrong}"
        )
