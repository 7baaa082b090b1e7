"""A cache of keys and values in pages, for `attention_paged` (Kwon et al. 2023, arXiv 2309.06180).

All sequences draw pages of one size from one pool, so that none needs room for the longest, and a
page is free for others as soon as its sequence is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewise.arguments import DTYPES


@dataclass
class _Sequence:
    pages: list[int]
    length: int = 0


class PagedKVCache:
    """Keys and values of any number of sequences, in pages.

    Attributes:
        k_pages: (num_pages, page_size, kv_heads, head_dim), as `attention_paged` takes it.
        v_pages: (num_pages, page_size, kv_heads, value_dim).

    Args:
        num_pages: pages in the pool, at least 1.
        page_size: tokens in a page, at least 1.
        kv_heads: key heads.
        head_dim: width of keys.
        value_dim: width of values; None is head_dim.
        dtype: float64, float32, bfloat16 or float16; None is PyTorch's default.
        device: where the pages are; None is PyTorch's default.

    Raises:
        ValueError: a size below 1, or another dtype.

    Example:
        >>> cache = tilewise.PagedKVCache(num_pages=8, page_size=16, kv_heads=2, head_dim=64)
        >>> one, other = cache.allocate(), cache.allocate()
        >>> cache.append([one], *torch.randn(2, 1, 20, 2, 64))  # a prompt
        >>> cache.append([one, other], *torch.randn(2, 2, 1, 2, 64))  # a token each
        >>> cache.seqused_k([one, other])
        tensor([21,  1], dtype=torch.int32)
        >>> tables = cache.page_table([one, other]), cache.seqused_k([one, other])
        >>> q = torch.randn(2, 1, 8, 64)
        >>> tilewise.attention_paged(q, cache.k_pages, cache.v_pages, *tables, causal=True).shape
        torch.Size([2, 1, 8, 64])
        >>> cache.free(one)
        >>> cache.free_pages
        7
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        value_dim = head_dim if value_dim is None else value_dim
        sizes = {"num_pages": num_pages, "page_size": page_size, "kv_heads": kv_heads}
        for name, size in {**sizes, "head_dim": head_dim, "value_dim": value_dim}.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{name} must be an int of at least 1, got {size!r}")
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if dtype not in DTYPES:
            names = ", ".join(str(known) for known in DTYPES)
            raise ValueError(f"dtype must be one of {names}, got {dtype}")
        shape = (num_pages, page_size, kv_heads)
        self.k_pages = torch.empty(*shape, head_dim, dtype=dtype, device=device)
        self.v_pages = torch.empty(*shape, value_dim, dtype=dtype, device=device)
        self._free = list(range(num_pages))
        self._sequences: dict[int, _Sequence] = {}
        self._next = 0

    @property
    def free_pages(self) -> int:
        """How many pages no sequence holds."""
        return len(self._free)

    def allocate(self, tokens: int = 0) -> int:
        """The number of a new sequence, empty, with pages for that many tokens set aside.

        Raises:
            ValueError: tokens is not an int of at least 0, or there are too few free pages.
        """
        if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 0:
            raise ValueError(f"tokens must be an int of at least 0, got {tokens!r}")
        number, pages = self._next, self._take(self._pages_of(tokens))
        self._next += 1
        self._sequences[number] = _Sequence(pages)
        return number

    def append(self, sequences: Iterable[int], k: Tensor, v: Tensor) -> None:
        """Puts n tokens at the end of each sequence, and takes the pages for them from the pool.

        Args:
            sequences: B numbers from `allocate`, each one once.
            k: (B, n, kv_heads, head_dim), the dtype and device of the pages.
            v: (B, n, kv_heads, value_dim).

        Raises:
            ValueError: an unknown or repeated sequence, a tensor that does not fit or requires grad
                under grad mode, or too few free pages. Then the cache is as it was.
        """
        numbers = list(sequences)
        grown = self._named(numbers)
        if len(set(numbers)) != len(numbers):
            raise ValueError(f"sequences must name each sequence once, got {numbers}")
        for name, t, pages in (("k", k, self.k_pages), ("v", v, self.v_pages)):
            _check_tokens(name, t, pages, len(numbers))
        n, size = k.shape[1], self.k_pages.shape[1]
        if v.shape[1] != n:
            raise ValueError(f"k and v must have the same tokens, got {n} and {v.shape[1]}")
        missing = [max(0, self._pages_of(s.length + n) - len(s.pages)) for s in grown]
        taken = self._take(sum(missing))
        slots = []
        for sequence, count in zip(grown, missing, strict=True):
            sequence.pages += [taken.pop() for _ in range(count)]
            # Counted from the start of the page that holds the first new token.
            token = torch.arange(n) + sequence.length % size
            held = torch.tensor(sequence.pages[sequence.length // size :], dtype=torch.int64)
            slots.append(held[token // size] * size + token % size)
            sequence.length += n
        if slots:
            where = torch.cat(slots).to(self.k_pages.device)
            for t, pages in ((k, self.k_pages), (v, self.v_pages)):
                pages.flatten(0, 1).index_copy_(0, where, t.detach().flatten(0, 1))

    def free(self, sequence: int) -> None:
        """Forgets a sequence; its pages go back to the pool.

        Raises:
            ValueError: there is no such sequence.
        """
        (freed,) = self._named([sequence])
        self._free += freed.pages
        del self._sequences[sequence]

    def page_table(self, sequences: Iterable[int]) -> Tensor:
        """The pages of each sequence, int32 (B, pages of the one with most); others' rows end in 0s.

        Raises:
            ValueError: there is no such sequence.
        """
        rows = [sequence.pages for sequence in self._named(sequences)]
        width = max(map(len, rows), default=0)
        table = [row + [0] * (width - len(row)) for row in rows]
        shape = (len(rows), width)
        return torch.tensor(table, dtype=torch.int32, device=self.k_pages.device).view(shape)

    def seqused_k(self, sequences: Iterable[int]) -> Tensor:
        """How many tokens each sequence has, int32 (B,).

        Raises:
            ValueError: there is no such sequence.
        """
        lengths = [sequence.length for sequence in self._named(sequences)]
        return torch.tensor(lengths, dtype=torch.int32, device=self.k_pages.device)

    def _named(self, numbers: Iterable[Any]) -> list[_Sequence]:
        found = []
        for number in numbers:
            known_type = isinstance(number, int) and not isinstance(number, bool)
            if not known_type or number not in self._sequences:
                known = ", ".join(map(str, self._sequences)) or "none"
                raise ValueError(f"a sequence must be an allocated one ({known}), got {number!r}")
            found.append(self._sequences[number])
        return found

    def _pages_of(self, tokens: int) -> int:
        return -(-tokens // self.k_pages.shape[1])

    def _take(self, count: int) -> list[int]:
        if count > len(self._free):
            raise ValueError(
                f"too few free pages: {count} are wanted (of {self.k_pages.shape[1]} tokens each), "
                f"{len(self._free)} of {self.k_pages.shape[0]} are free"
            )
        return [self._free.pop() for _ in range(count)]


def _check_tokens(name: str, t: Any, pages: Tensor, count: int) -> None:
    if not isinstance(t, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(t).__name__}")
    if t.ndim != 4 or t.shape[0] != count or t.shape[2:] != pages.shape[2:]:
        raise ValueError(
            f"{name} must have shape (B, n, kv_heads, width) = ({count}, any, {pages.shape[2]}, "
            f"{pages.shape[3]}), got {tuple(t.shape)}"
        )
    if (t.dtype, t.device) != (pages.dtype, pages.device):
        raise ValueError(
            f"{name} must be {pages.dtype} on {pages.device}, got {t.dtype} on {t.device}"
        )
    if t.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name} requires grad, but the cache is for inference: call it under torch.no_grad()"
        )
