"""Tokens that see nothing, or that nothing sees, where the device alone knows which: those of packed
sequences, and those that a key_range hides.

Kernels that work on blocks find them between others, where 0 · NaN would be NaN: they get zeros instead.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.kernels import twins
from tilewise.spec import Packed, Problem


def seen_tokens(problem: Problem) -> tuple[Tensor, Tensor] | None:
    """Which rows see a key, and which keys are seen, (B, S), packed (total,); None where the host knows: all
    do and all are, but for what a band hides, and for what belongs to no sequence."""
    if problem.key_range is not None:
        assert problem.packed is None
        return _seen_in_ranges(problem)
    return None if problem.packed is None else _seen_in_sequences(problem, problem.packed)


def seen_intervals(problem: Problem) -> tuple[Tensor, Tensor]:
    """The keys lo ≤ j < hi that rows of a dense problem see, within 0 … Sk: (B, Sq) each."""
    b, sk = problem.k.shape[:2]
    lo, hi = problem.interval(0, problem.q.shape[1])
    return lo.expand(b, -1).clamp(0, sk), hi.expand(b, -1).clamp(0, sk)


def _seen_in_ranges(problem: Problem) -> tuple[Tensor, Tensor]:
    lo, hi = seen_intervals(problem)
    rows = lo < hi
    # How many intervals begin at a key, less those that end.
    change = rows.new_zeros(len(rows), problem.k.shape[1] + 1, dtype=torch.int32)
    change = change.scatter_add(1, lo, rows.int()).scatter_add(1, hi, -rows.int())
    return rows, change.cumsum(1)[:, :-1] > 0


def _seen_in_sequences(problem: Problem, packed: Packed) -> tuple[Tensor, Tensor] | None:
    band = problem.band
    within = all(side is None or side >= 0 for side in (band.left, band.right))
    if packed.cu_seqlens_q is packed.cu_seqlens_k and within:
        return None
    left, right = twins.sides(problem)
    rows = _Tokens.of(packed.cu_seqlens_q, problem.q.shape[0])
    keys = _Tokens.of(packed.cu_seqlens_k, problem.k.shape[0])
    offset = keys.lengths - rows.lengths
    if band.align == "top-left":
        offset = torch.zeros_like(offset)
    return rows.facing(keys, offset, left, right), keys.facing(rows, -offset, right, left)


def with_zeros(
    problem: Problem, dout: Tensor, dlse: Tensor | None, rows: Tensor, keys: Tensor
) -> tuple[Problem, Tensor, Tensor | None]:
    """Operands of the backward pass with 0 where a row sees no key, or none sees the key."""
    rows_of, keys_of = rows[..., None, None], keys[..., None, None]
    problem = problem._replace(
        q=torch.where(rows_of, problem.q, 0),
        k=torch.where(keys_of, problem.k, 0),
        v=torch.where(keys_of, problem.v, 0),
    )
    dlse = None if dlse is None else torch.where(rows.unsqueeze(-2), dlse, 0)
    return problem, torch.where(rows_of, dout, 0), dlse


class _Tokens(NamedTuple):
    """Of packed tokens, the number of their sequence and theirs in it; the lengths of sequences, and of that
    of tokens which belong to none 0."""

    sequence: Tensor
    number: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, cu_seqlens: Tensor, total: int) -> _Tokens:
        ends = cu_seqlens.long().clamp(0, total).cummax(0).values
        tokens = torch.arange(total, device=ends.device)
        sequence = torch.bucketize(tokens, ends[1:], right=True)
        return cls(sequence, tokens - ends[sequence], torch.nn.functional.pad(ends.diff(), (0, 1)))

    def facing(
        self, others: _Tokens, offset: Tensor, before: int | None, after: int | None
    ) -> Tensor:
        """Which tokens have one of the others in their band: one at n has those at n + offset − before …
        n + offset + after."""
        position, length = self.number + offset[self.sequence], others.lengths[self.sequence]
        first = torch.zeros_like(position) if before is None else (position - before).clamp(min=0)
        last = length if after is None else torch.minimum(length, position + after + 1)
        return first < last
