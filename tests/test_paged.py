"""PagedKVCache: what was appended is what attention sees, whatever was freed and taken in between."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from inputs import draw
from torch import Tensor

import tilewise
from tilewise import PagedKVCache

HQ, HKV, D, DV = 4, 2, 8, 6


def tokens(count: int, n: int, seed: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """k and v of n tokens of each sequence."""
    return [draw(count, n, HKV, w, dtype=dtype, seed=2 * seed + i) for i, w in enumerate((D, DV))]


def cache_of(num_pages: int, page_size: int, dtype: torch.dtype = torch.float64) -> PagedKVCache:
    """A cache whose pages hold NaN where nothing was written."""
    cache = PagedKVCache(num_pages, page_size, HKV, D, DV, dtype=dtype)
    cache.k_pages.fill_(torch.nan)
    cache.v_pages.fill_(torch.nan)
    return cache


def check(cache: PagedKVCache, held: dict[int, list[Tensor]]) -> None:
    """Attention from the cache is attention to the tokens held by each sequence."""
    names = list(held)
    dtype = cache.k_pages.dtype
    q = draw(len(names), 3, HQ, D, dtype=dtype)
    tables = cache.page_table(names), cache.seqused_k(names)
    out, lse = tilewise.attention_paged(
        q, cache.k_pages, cache.v_pages, *tables, causal=True, return_lse=True
    )
    for row, name in enumerate(names):
        want, want_lse = tilewise.attention(
            q[row : row + 1], *held[name], causal=True, return_lse=True
        )
        torch.testing.assert_close(out[row : row + 1], want)
        torch.testing.assert_close(lse[row : row + 1], want_lse)


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_steps_are_the_concatenation(page_size: int, dtype: torch.dtype) -> None:
    cache = cache_of(200 // page_size, page_size, dtype)
    names = [cache.allocate(), cache.allocate(tokens=40), cache.allocate()]
    held = {name: tokens(1, 0, 0, dtype) for name in names}
    for step, (who, n) in enumerate(
        [([0], 5), ([1, 2], 1), ([0, 1, 2], 3), ([2], 0), ([], 4), ([2, 0], 17), ([1], 2)]
    ):
        new = tokens(len(who), n, step, dtype)
        cache.append([names[i] for i in who], *new)
        for row, i in enumerate(who):
            pairs = zip(held[names[i]], new, strict=True)
            held[names[i]] = [torch.cat([old, t[row : row + 1]], 1) for old, t in pairs]
        check(cache, held)
    lengths = [held[name][0].shape[1] for name in names]
    assert cache.seqused_k(names).tolist() == lengths == [25, 6, 21]
    reserved = -(-40 // page_size)
    used = -(-25 // page_size) + reserved + -(-21 // page_size)
    assert cache.free_pages == 200 // page_size - used


def test_pages_are_used_again() -> None:
    """Any order of allocating, appending and freeing; no page is held twice, none is lost."""
    rng = random.Random(3)
    cache = cache_of(12, 4)
    held: dict[int, list[Tensor]] = {}
    refused = 0
    for step in range(120):
        action = rng.choice(["allocate", "append", "append", "append", "free"])
        if action == "allocate":
            held[cache.allocate()] = tokens(1, 0, 0)
        elif action == "free" and len(held) > 1:
            name = rng.choice(list(held))
            cache.free(name)
            del held[name]
        elif action == "append" and held:
            names = rng.sample(list(held), rng.randint(1, len(held)))
            n = rng.randint(1, 6)
            new = tokens(len(names), n, step)
            before = cache.free_pages, cache.seqused_k(held), cache.page_table(held)
            lengths = [held[name][0].shape[1] for name in names]
            if sum(-(-(m + n) // 4) - -(-m // 4) for m in lengths) > cache.free_pages:
                with pytest.raises(ValueError, match="too few free pages"):
                    cache.append(names, *new)
                after = cache.free_pages, cache.seqused_k(held), cache.page_table(held)
                assert before[0] == after[0]
                assert all(map(torch.equal, before[1:], after[1:]))
                refused += 1
                continue
            cache.append(names, *new)
            for row, name in enumerate(names):
                pairs = zip(held[name], new, strict=True)
                held[name] = [torch.cat([old, t[row : row + 1]], 1) for old, t in pairs]
        pages = [p for name in held for p in cache.page_table([name])[0].tolist()]
        assert len(set(pages)) == len(pages) == 12 - cache.free_pages
        if held and step % 5 == 0:
            check(cache, held)
    assert refused > 3


def test_sequences_without_a_token() -> None:
    cache = cache_of(2, 4)
    names = [cache.allocate(), cache.allocate()]
    assert cache.page_table(names).shape == (2, 0)
    q = draw(2, 1, HQ, D, dtype=torch.float64)
    tables = cache.page_table(names), cache.seqused_k(names)
    out, lse = tilewise.attention_paged(q, cache.k_pages, cache.v_pages, *tables, return_lse=True)
    assert not out.any()
    assert (lse == float("-inf")).all()
    assert cache.page_table([]).shape == (0, 0)


def test_nothing_is_recorded_for_autograd() -> None:
    cache = cache_of(2, 4, torch.float32)
    name = cache.allocate()
    k, v = (t.requires_grad_() for t in tokens(1, 2, 0, torch.float32))
    with torch.no_grad():
        cache.append([name], k, v)
    assert not cache.k_pages.requires_grad
    with torch.inference_mode():
        cache.append([name], *tokens(1, 2, 1, torch.float32))
    assert cache.seqused_k([name]).tolist() == [4]


K, V = tokens(1, 2, 0)
WRONG: list[tuple[Any, str]] = [
    (lambda c: PagedKVCache(0, 4, 1, 8), "num_pages must be an int of at least 1, got 0"),
    (lambda c: PagedKVCache(4, True, 1, 8), "page_size must be an int of at least 1, got True"),
    (lambda c: PagedKVCache(4, 4, 1, 8, 0), "value_dim must be an int of at least 1, got 0"),
    (
        lambda c: PagedKVCache(4, 4, 1, 8, dtype=torch.int8),
        "dtype must be one of .* got torch.int8",
    ),
    (lambda c: c.allocate(-1), "tokens must be an int of at least 0, got -1"),
    (
        lambda c: c.allocate(99),
        r"too few free pages: 25 are wanted \(of 4 tokens each\), 3 of 3 are free",
    ),
    (lambda c: c.append([0], K[0], V), r"k must have shape .* \(1, any, 2, 8\), got \(2, 2, 8\)"),
    (lambda c: c.append([0], K, K), r"v must have shape .* \(1, any, 2, 6\), got \(1, 2, 2, 8\)"),
    (lambda c: c.append([0, 1], K, V), r"k must have shape .* \(2, any, 2, 8\)"),
    (lambda c: c.append([0], K, V[:, :1]), "k and v must have the same tokens, got 2 and 1"),
    (lambda c: c.append([0], K.float(), V), "k must be torch.float64 on cpu, got torch.float32"),
    (lambda c: c.append([0], K, V.to("meta")), "v must be .* on cpu, got torch.float64 on meta"),
    (lambda c: c.append([0], [1.0], V), "k must be a tensor, got list"),
    (lambda c: c.append([0], K.clone().requires_grad_(), V), "k requires grad"),
    (lambda c: c.append([0, 0], *tokens(2, 1, 0)), r"name each sequence once, got \[0, 0\]"),
    (lambda c: c.append([2], K, V), r"a sequence must be an allocated one \(0, 1\), got 2"),
    (lambda c: c.page_table([True]), r"a sequence must be an allocated one \(0, 1\), got True"),
    (lambda c: c.seqused_k([[0]]), r"got \[0\]"),
    (lambda c: c.free(7), "got 7"),
    (lambda c: (c.free(0), c.free(0)), r"a sequence must be an allocated one \(1\), got 0"),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=[message for _, message in WRONG])
def test_what_does_not_fit_says_so(call: Any, message: str) -> None:
    cache = cache_of(3, 4)
    cache.allocate()
    cache.allocate()
    with pytest.raises(ValueError, match=message):
        call(cache)
    assert cache.free_pages == 3
