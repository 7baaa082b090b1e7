"""Counter-based dropout bits: the same on every backend, for every tiling, layout and rank.

Philox-4x32 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") turns a counter and a
key into four 32-bit words. The key is the seed; the counter is (j // 4, i, head, sequence), and word
j % 4 decides about the probability of row i and key j. Seven rounds pass BigCrush.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 7
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: Tensor, rounds: int = ROUNDS
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four 32-bit words, as int64 in 0 … 2³² − 1, for counters (int64, broadcastable) and one seed.

    Example:
        >>> zero = torch.zeros(1, dtype=torch.int64)
        >>> [hex(int(word)) for word in philox((zero, zero, zero, zero), zero, rounds=10)]
        ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(rounds):
        # int64 products wrap modulo 2⁶⁴, which keeps all 64 bits of 32 × 32.
        left, right = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = ((right >> 32) & _LOW) ^ c1 ^ k0, right & _LOW
        c2, c3 = ((left >> 32) & _LOW) ^ c3 ^ k1, left & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def keep_mask(
    p: float, seed: Tensor, sequences: Tensor, heads: Tensor, rows: Tensor, keys: range
) -> Tensor:
    """True where dropout keeps P(i, j).

    Args:
        p: probability of dropping, 0 to 1.
        seed: int64 scalar tensor.
        sequences, heads, rows: int64, broadcastable against each other with a last dimension of 1.
        keys: the consecutive key positions along the last dimension.

    Returns:
        bool, the broadcast shape with the last dimension len(keys).
    """
    first = keys.start // 4
    quads = torch.arange(first, -(-keys.stop // 4), device=rows.device)
    words = torch.stack(torch.broadcast_tensors(*philox((quads, rows, heads, sequences), seed)), -1)
    start = keys.start - 4 * first
    return words.flatten(-2)[..., start : start + len(keys)] >= round(p * 2**32)


def keep_scale(p: float) -> float:
    """What a kept probability is multiplied by: 1 / (1 − p), and 0 where nothing is kept."""
    return 1.0 / (1.0 - p) if p < 1.0 else 0.0
