"""Runs kernels/hopper_walk.py, and rows_kernel, in Triton's interpreter and compares them with the
specification:

    TRITON_INTERPRET=1 python walk_probe.py KEYS_IN_A_BLOCK

A module of its own, since TRITON_INTERPRET has to be set before kernels are imported.
"""

import itertools
import random
import sys

import torch
import triton
import triton.language as tl
from interpreter import _hasten
from triton.runtime import interpreter as runtime

from tilewise.arguments import problem_of
from tilewise.backends import hidden, hopper
from tilewise.backends.triton import fill_stats
from tilewise.kernels import twins
from tilewise.kernels.hopper_backward import rows_kernel
from tilewise.kernels.hopper_schedule import ranges_kernel
from tilewise.kernels.hopper_walk import (
    KeysWalk,
    all_take_the_last,
    blocks_of,
    pairs_in_ranges,
    pairs_seen,
    tiles_per_head,
    work_of,
    work_of_keys,
)
from tilewise.spec import Problem, sequences

# Fewer rows than any kernel has, for the interpreter's sake.
hopper._GROUP_ROWS = GROUP_ROWS = 8
GROUPS, BLOCK_K = 2, int(sys.argv[1])
FIELDS = 8 + 4 * GROUPS


@triton.jit
def walk_kernel(
    out,
    spec,
    walk,
    GROUP_ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HEADS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """out: (tiles or more, FIELDS)."""
    number = tl.program_id(0)
    per_head = tiles_per_head(walk, spec)
    if number >= per_head * walk.heads:
        return
    out += number * (8 + 4 * GROUPS)
    within = tl.arange(0, GROUP_ROWS * GROUPS)
    work = work_of(
        number, per_head, within, walk, spec, GROUP_ROWS * GROUPS, BLOCK_K, HEADS, ALIGNED
    )
    tl.store(out, work.at.number)
    tl.store(out + 1, work.head)
    tl.store(out + 2, work.kv_head)
    tl.store(out + 3, work.at.tile_start)
    tl.store(out + 4, work.first)
    tl.store(out + 5, work.blocks)
    tl.store(out + 6, work.at.start_q)
    tl.store(out + 7, work.at.start_k)
    for group in tl.static_range(GROUPS):
        i0 = work.at.tile_start + group * GROUP_ROWS
        rows = i0 + tl.arange(0, GROUP_ROWS)
        blocks = blocks_of(rows, i0, work, spec, GROUP_ROWS, BLOCK_K)
        tl.store(out + 8 + 4 * group, blocks.full_first)
        tl.store(out + 9 + 4 * group, blocks.full_last)
        tl.store(out + 10 + 4 * group, blocks.last)
        tl.store(out + 11 + 4 * group, blocks.width)


def plan_of(heads: int = 1) -> hopper._Plan:
    return hopper._Plan(GROUPS, BLOCK_K, 64, 64, 64, 64, 2, 1, False, heads=heads)


def walked(problem: Problem, section: int, heads: int = 1) -> list[list[int]]:
    """The fields of the tiles of a problem, in the order of the walk."""
    plan = plan_of(heads)
    spec, walk = hopper._order(problem, plan)
    walk = walk._replace(section=min(section, walk.heads), drawn=None)
    most = hopper._most_tiles(problem, plan)
    got = torch.full((most, FIELDS), -1, dtype=torch.int32)
    aligned = hopper._aligned_band(problem, plan)
    walk_kernel[(most,)](got, spec, walk, GROUP_ROWS // heads, GROUPS, BLOCK_K, heads, aligned)
    tiles: list[list[int]] = got.tolist()
    return [tile for tile in tiles if tile[0] >= 0]


def check(
    b: int, sq: int, sk: int, hq: int, hkv: int, section: int, heads: int = 1, **options: object
) -> None:
    q, k = torch.empty(b, sq, hq, 8), torch.empty(b, sk, hkv, 8)
    problem = problem_of(q, k, k, **options)
    first, last = hopper._seen_keys(problem)
    if first >= last:
        return
    tiles = walked(problem, section, heads)
    starts = range(0, sq, GROUPS * GROUP_ROWS // heads)
    everywhere = set(itertools.product(range(b), range(0, hq, heads), starts))
    assert sorted((x[0], x[1], x[3]) for x in tiles) == sorted(everywhere), "each tile once"
    for tile in tiles:
        check_tile(problem, tile, first, last, GROUP_ROWS // heads)
        if hopper._aligned_band(problem, plan_of(heads)):
            check_aligned_tile(problem, tile, first, last)


def check_tile(
    problem: Problem, tile: list[int], first: int, last: int, group_rows: int = GROUP_ROWS
) -> None:
    """Of a dense problem's tile, whose keys are counted from `first` and end at `last`: is every key that
    is seen in a block, and is all of a block seen that is not masked."""
    sq = problem.q.shape[1]
    batch, head, kv_head, start, first_key, blocks, _, _, *edges = tile
    lo, hi = (t[batch if t.shape[0] > 1 else 0] - first for t in problem.interval(0, sq))
    keys = torch.arange(last - first)
    assert kv_head == head // problem.groups
    for group in range(GROUPS):
        rows = slice(start + group * group_rows, min(sq, start + (group + 1) * group_rows))
        full_first, full_last, end, width = edges[4 * group : 4 * group + 4]
        assert 0 <= full_first <= full_last <= end < blocks
        seen = (keys >= lo[rows, None]) & (keys < hi[rows, None])
        last_key = first_key + BLOCK_K * end + min(width, BLOCK_K)
        covered = (keys >= first_key) & (keys < last_key)
        assert not (seen & ~covered).any(), "every key that is seen is in a block"
        full = slice(first_key + BLOCK_K * full_first, first_key + BLOCK_K * full_last)
        # The last block is masked whatever it is, and so is one at either end where there is a band.
        assert full.start == full.stop or (full.stop <= last - first and seen[:, full].all())


def check_aligned_tile(problem: Problem, tile: list[int], first: int, last: int) -> None:
    """The right end of the band cuts no block but a group's last. Of blocks as long as both groups have rows
    both take all, and the first group sees none of the second half of the last; and they are no more than of
    blocks that begin anywhere."""
    together = all_take_the_last(GROUPS * GROUP_ROWS, BLOCK_K, True)
    sq = problem.q.shape[1]
    _, _, _, start, first_key, blocks, _, _, *edges = tile
    lo, hi = (t[0] - first for t in problem.interval(0, sq))
    whole = start + GROUPS * GROUP_ROWS <= sq
    rows = slice(start, start + GROUPS * GROUP_ROWS)
    width = min(int(hi[rows].max()), last - first) - max(int(lo[rows].min()), 0)
    assert blocks <= max(1, -(-width // BLOCK_K)) + (not whole)
    for group in range(GROUPS):
        end, width = edges[4 * group + 2 : 4 * group + 4]
        if together:
            assert end == blocks - 1
            assert group > 0 or width <= BLOCK_K // 2
        ends = hi[start + group * GROUP_ROWS : start + (group + 1) * GROUP_ROWS]
        assert (ends >= first_key + BLOCK_K * end).all() or end == 0


@triton.jit
def keys_walk_kernel(
    out, spec, walk, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, RAGGED: tl.constexpr
):
    """out: (tiles, 11)."""
    number = tl.program_id(0)
    work = work_of_keys(number, walk, spec, BLOCK_Q, BLOCK_K, RAGGED)
    out += number * 11
    tl.store(out, work.at.number)
    tl.store(out + 1, work.kv_head)
    tl.store(out + 2, work.at.tile_start)
    tl.store(out + 3, work.first)
    tl.store(out + 4, work.full_first)
    tl.store(out + 5, work.full_last)
    tl.store(out + 6, work.last)
    tl.store(out + 7, work.at.start_q)
    tl.store(out + 8, work.at.start_k)
    tl.store(out + 9, work.per_head)
    tl.store(out + 10, work.first_block)


@triton.jit
def pairs_kernel(out, spec, walk, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr):
    """out: [keys, ROWS] and room for the last tile; as the kernel does it, in blocks of queries."""
    work = work_of_keys(tl.program_id(0), walk, spec, BLOCK_Q, BLOCK_K, True)
    keys = work.at.tile_start + tl.arange(0, BLOCK_K)
    columns = tl.arange(0, BLOCK_Q)
    for i in range(0, ROWS, BLOCK_Q):
        along = (keys - i)[:, None] - (columns & 6)[None, :]
        high = (columns & ~6)[None, :] + tl.zeros_like(along)
        rows = work.at.sq - i - (columns & 6)[None, :]
        seen = pairs_seen(along, high, keys, rows, work.at, spec, True)
        tl.store(out + keys[:, None] * ROWS + i + columns[None, :], seen.to(tl.int8))


@triton.jit
def range_pairs_kernel(
    out, spec, walk, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr
):
    """out: [batch, keys rounded up to tiles, ROWS]."""
    work = work_of_keys(tl.program_id(0), walk, spec, BLOCK_Q, BLOCK_K, False)
    keys = work.at.tile_start + tl.arange(0, BLOCK_K)
    columns = tl.arange(0, BLOCK_Q)
    out += work.at.batch * (tl.cdiv(work.at.sk, BLOCK_K) * BLOCK_K * ROWS)
    for i in range(0, ROWS, BLOCK_Q):
        seen = pairs_in_ranges(keys, i, columns, work.at, walk)
        tl.store(out + keys[:, None] * ROWS + i + columns[None, :], seen.to(tl.int8))


BLOCK_Q = 8


def seen_pairs(problem: Problem) -> torch.Tensor:
    """[rows, keys] of a dense problem without a batch."""
    lo, hi = (t[0] for t in problem.interval(0, problem.q.shape[1]))
    keys = torch.arange(problem.k.shape[1])
    return (keys >= lo[:, None]) & (keys < hi[:, None])


def check_blocks(seen: torch.Tensor, start: int, ends: list[int]) -> None:
    """Every pair that is seen of the tile of keys is in a block, and of what is not masked all is seen."""
    first, full_first, full_last, last = ends
    rows, keys = seen.shape
    assert sorted(ends) == ends
    assert 0 <= first < min(max(rows, 1), last)
    assert all(end % BLOCK_Q == 0 for end in ends)
    part = seen[:, start : start + BLOCK_K]
    assert not part[:first].any()
    assert not part[last:].any()
    assert part[full_first:full_last].all()
    assert full_first == full_last or start + BLOCK_K <= keys


def check_keys(
    b: int, sq: int, sk: int, kv_heads: int, together: int = 1, **options: object
) -> None:
    """The walk over the queries of each tile of keys; of so many heads together at the end."""
    heads = 2 * kv_heads
    q, k = torch.empty(b, sq, heads, 8), torch.empty(b, sk, kv_heads, 8)
    problem = problem_of(q, k, k, **options)
    if not hopper._some_key_seen(problem):
        return
    rows, keys, spec, offset = hopper._seen_part(problem)
    seen = seen_pairs(problem)
    assert torch.equal(seen.any(1).nonzero().squeeze(1), torch.arange(sq)[rows])
    assert torch.equal(seen.any(0).nonzero().squeeze(1), torch.arange(sk)[keys])
    seen = seen[rows, keys]
    n_rows, n_keys = seen.shape
    got = torch.full((-(-n_keys // BLOCK_K) * b * kv_heads, 11), -1, dtype=torch.int32)
    walk = KeysWalk(b * kv_heads, together, offset, None, None, None, None)
    keys_walk_kernel[(len(got),)](got, spec, walk, BLOCK_Q, BLOCK_K, n_keys % BLOCK_K != 0)
    wanted = set(itertools.product(range(b), range(kv_heads), range(0, n_keys, BLOCK_K)))
    assert sorted(map(tuple, got[:, :3].tolist())) == sorted(wanted), "each tile once"
    owners = (got[:, 0] * kv_heads + got[:, 1]).clamp(max=b * kv_heads - together)
    order = torch.stack((owners, got[:, 2]), 1).tolist()
    assert order == sorted(order), "the first tiles of all of the last heads first"
    tiles = -(-n_keys // BLOCK_K)
    room = -(-n_rows // BLOCK_Q) * BLOCK_Q
    pairs = torch.full((tiles * BLOCK_K, room), -1, dtype=torch.int8)
    pairs_kernel[(len(got),)](pairs, spec, walk, BLOCK_Q, BLOCK_K, room)
    assert torch.equal(pairs[:n_keys, :n_rows].T == 1, seen)
    assert not pairs[n_keys:].any()
    for batch, _, start, *ends, start_q, start_k, per_head, first_block in got.tolist():
        check_blocks(seen, start, ends)
        assert (start_q, start_k) == (0, 0)
        assert per_head == -(-n_rows // BLOCK_Q)
        assert first_block == batch * heads * per_head


def check_ranges(b: int, sq: int, sk: int, chunk: int, **options: object) -> None:
    """The walk over the queries of each tile of keys, where rows have a key_range."""
    q, k = torch.empty(b, sq, 4, 8), torch.empty(b, sk, 2, 8)
    problem = problem_of(q, k, k, **options)
    ends = torch.stack(hidden.seen_intervals(problem), 1).int()
    ends = torch.nn.functional.pad(ends, (0, -sq % BLOCK_Q))
    tiles = -(-sk // BLOCK_K)
    ranges = torch.full((b, tiles, 4), -1, dtype=torch.int32)
    ranges_kernel[(b * tiles,)](ranges, ends, sq, sk, BLOCK_Q, BLOCK_K, chunk)
    spec = twins.spec(problem)
    walk = KeysWalk(b * 2, 1, 0, ends, ranges, None, None)
    got = torch.full((tiles * b * 2, 11), -1, dtype=torch.int32)
    keys_walk_kernel[(len(got),)](got, spec, walk, BLOCK_Q, BLOCK_K, False)
    lo, hi = (t[:, :sq, None] for t in ends.unbind(1))
    seen = (torch.arange(sk) >= lo) & (torch.arange(sk) < hi)
    lines = -(-sq // BLOCK_Q)
    for number, (batch, head, start, *blocks) in enumerate(got[:, :7].tolist()):
        assert (batch, head, start) == (
            number // tiles // 2,
            number // tiles % 2,
            number % tiles * BLOCK_K,
        )
        check_blocks(seen[batch], start, blocks)
        first, full_first, full_last, last = blocks
        part = seen[batch, :, start : start + BLOCK_K]
        some = part.any(1).nonzero().flatten()
        if len(some):
            assert (first, last) == (
                some[0] // BLOCK_Q * BLOCK_Q,
                (some[-1] // BLOCK_Q + 1) * BLOCK_Q,
            )
        full = part.all(1) & (start + BLOCK_K <= sk)
        full = (
            torch.nn.functional.pad(full, (0, -sq % BLOCK_Q), value=True).view(-1, BLOCK_Q).all(1)
        )
        if full.any():
            assert full_last == (full.nonzero()[-1] + 1) * BLOCK_Q
            assert full_first == first or not full[full_first // BLOCK_Q - 1]
    room = lines * BLOCK_Q
    pairs = torch.full((b, tiles * BLOCK_K, room), -1, dtype=torch.int8)
    range_pairs_kernel[(len(got),)](pairs, spec, walk, BLOCK_Q, BLOCK_K, room)
    assert torch.equal(pairs[:, :sk, :sq].transpose(1, 2) == 1, seen)
    assert not pairs[:, sk:].any()


def check_packed_keys(
    lengths: tuple[int, ...], rows: tuple[int, ...], past: int, **options: object
) -> None:
    """The same of packed sequences of so many keys and rows, with tokens past the last."""
    cu_k, cu_q = (torch.tensor([0, *itertools.accumulate(n)]) for n in (lengths, rows))
    total, kv_heads = int(cu_q[-1]) + past, 2
    q, k = torch.empty(total, 4, 8), torch.empty(int(cu_k[-1]) + past, kv_heads, 8)
    problem = problem_of(q, k, k, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **options)
    spec = twins.spec(problem)
    schedule = hopper._schedule(k, spec, BLOCK_K, True)
    walk = KeysWalk(kv_heads, 1, 0, None, None, schedule, len(lengths).bit_length())
    most = twins.most_tiles(problem, k, BLOCK_K) * kv_heads
    got = torch.full((most, 11), -1, dtype=torch.int32)
    keys_walk_kernel[(most,)](got, spec, walk, BLOCK_Q, BLOCK_K, True)
    everywhere = {
        (number, head, start)
        for number, n in enumerate((*lengths, past))
        for head in range(kv_heads)
        for start in range(0, n, BLOCK_K)
    }
    tiles = [x for x in got.tolist() if x[2] < (*lengths, past)[x[0]]]
    assert sorted(tuple(x[:3]) for x in tiles) == sorted(everywhere), "each tile once"
    # The others see nothing, and are past the end of what they would be written to.
    assert all(x[0] == len(lengths) and x[6] == BLOCK_Q for x in got.tolist() if x not in tiles)
    parts = {part.number: part for part in sequences(problem)}
    blocks = set()
    for number, _, start, *ends, start_q, start_k, per_head, first_block in tiles:
        assert (start_q, start_k) == (cu_q[number], cu_k[number])
        assert per_head == -(-total // BLOCK_Q) + len(lengths) + 1
        if number == len(lengths):
            assert (ends[0], ends[-1]) == (0, BLOCK_Q)
            continue
        check_blocks(seen_pairs(parts[number].problem), start, ends)
        # A sequence without rows has a block, too: that of the keys that none sees.
        n_blocks = max(1, -(-rows[number] // BLOCK_Q))
        assert first_block + n_blocks <= per_head
        blocks |= {(first_block + i, number) for i in range(n_blocks)}
    assert len({block for block, _ in blocks}) == len(blocks), "no two share a block of sums"


def check_rows(width: int, block_d: int) -> None:
    """rows_kernel against where a warpgroup's instructions leave the numbers of a product (PTX ISA,
    wgmma.mma_async, matrix D), of which each consumer has half of the columns."""
    q = torch.empty(2, 70, 3, width)
    want = torch.randn(2, 128, 3, block_d)
    sums = torch.empty(2, 3, 2, 64 * block_d)
    row, column = torch.arange(64)[:, None], torch.arange(block_d)[None, :]
    half, column = column // (block_d // 2), column % (block_d // 2)
    thread = row // 16 * 32 + row % 8 * 4 + column % 8 // 2
    held = row // 8 % 2 * 2 + column % 2
    at = half * (32 * block_d) + (column // 8 * 128 + thread) * 4 + held
    for block in range(2):
        numbers = want[:, 64 * block : 64 * (block + 1)].transpose(1, 2)
        sums[:, :, block] = torch.empty(2, 3, 64 * block_d).index_copy_(
            2, at.flatten(), numbers.flatten(2)
        )
    dq = torch.full_like(q, float("nan"))
    spec = twins.spec(problem_of(q, q, q, scale=0.5))
    rows_kernel[(12,)](sums, twins.tokens(dq), spec, width, 64, block_d)
    assert torch.equal(dq, 0.5 * want[:, :70, :, :width])


def check_packed_rows(lengths: tuple[int, ...], past: int) -> None:
    """Which block of sums the rows of packed sequences come from: here all numbers of one are its own."""
    cu = torch.tensor([0, *itertools.accumulate(lengths)])
    total, heads, count = int(cu[-1]) + past, 2, len(lengths)
    q = torch.empty(total, heads, 64)
    tiles = -(-total // 64) + count + 1
    sums = torch.arange(heads * tiles).float().repeat_interleave(64 * 64)
    dq = torch.full_like(q, float("nan"))
    spec = twins.spec(problem_of(q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu, scale=1.0))
    rows_kernel[(heads * tiles,)](sums, twins.tokens(dq), spec, 64, 64, 64)
    for number, (start, end) in enumerate(itertools.pairwise([*cu.tolist(), total])):
        blocks = torch.arange(end - start) // 64 + start // 64 + number
        for head in range(heads):
            assert (dq[start:end, head] == (head * tiles + blocks)[:, None]).all()


def check_stats() -> None:
    """delta_kernel's tiles, which have numbers past a sequence's last row, of no probability. What the
    backward pass adds to is cleared in passing, all of it."""
    lengths, past, heads = (70, 0, 3, 130), 5, 3
    cu = torch.tensor([0, *itertools.accumulate(lengths)])
    total = int(cu[-1]) + past
    for packed in (False, True):
        shape, block = ((total, heads, 64) if packed else (2, 70, heads, 64)), 64
        q, dout = torch.randn(shape), torch.randn(shape)
        want = (q * dout).sum(-1).transpose(-1, -2)
        lse, dlse = torch.randn(want.shape), torch.randn(want.shape)
        options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu} if packed else {}
        problem = problem_of(q, q, q, **options)
        rows = (-(-total // 64) + len(lengths) + 1 if packed else 2) * block
        base, delta = (torch.full((*want.shape[:-1], rows), float("nan")) for _ in "12")
        sums = torch.full((base.numel() * 128,), float("nan"))
        fill_stats(problem, twins.spec(problem), q, lse, dout, dlse, base, delta, block, sums)
        assert not sums.any()
        places = torch.arange(70)
        if packed:
            ends = list(itertools.pairwise([*cu.tolist(), total]))
            starts = [(start // block + number) * block for number, (start, _) in enumerate(ends)]
            places = torch.cat(
                [at + torch.arange(b - a) for at, (a, b) in zip(starts, ends, strict=True)]
            )
        assert torch.equal(base[..., places], lse)
        assert torch.allclose(delta[..., places], want - dlse, atol=1e-4)
        others = torch.ones(rows, dtype=torch.bool).index_fill(0, places, False)
        assert (base[..., others] == float("inf")).all()
        assert not delta[..., others].any()


def check_packed(lengths_q, lengths_k, past: int, hq: int, section: int, **options: object) -> None:
    """Packed sequences, with tokens past the last that belong to none."""
    cu_q, cu_k = (
        torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int64)
        for n in (lengths_q, lengths_k)
    )
    if lengths_q == lengths_k:
        cu_k = cu_q
    q, k = torch.empty(int(cu_q[-1]) + past, hq, 8), torch.empty(int(cu_k[-1]) + past, hq, 8)
    problem = problem_of(q, k, k, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **options)
    tiles = walked(problem, section)
    rows = GROUPS * GROUP_ROWS
    places = {
        (number, head, start)
        for number, n in enumerate((*lengths_q, past))
        for head in range(hq)
        for start in range(0, n, rows)
    }
    assert sorted((x[0], x[1], x[3]) for x in tiles) == sorted(places), "each tile once"
    taken = [(*lengths_k, 0)[x[0]] for x in tiles if x[1] == 0]
    assert taken == sorted(taken, reverse=True), "long sequences first"
    parts = {part.number: part for part in sequences(problem)}
    for tile in tiles:
        number, *_, blocks, start_q, start_k = tile[:8]
        if number == len(lengths_q):
            assert (blocks, start_q) == (1, cu_q[-1])
            continue
        part = parts[number]
        assert (start_q, start_k) == (part.queries.start, part.keys.start)
        _, _, _, last = part.problem.bounds(0, part.problem.q.shape[1])
        check_tile(part.problem, tile, 0, last)
        if hopper._aligned_band(problem, plan_of()):
            check_aligned_tile(part.problem, tile, 0, last)


def main() -> None:
    choice = random.Random(0)
    torch.manual_seed(0)
    sides = (None, 0, 1, 7, 20, 200)
    for sq, sk in ((1, 1), (1, 50), (17, 17), (40, 75), (75, 40), (33, 33), (64, 130)):
        for align, left, right in itertools.product(("bottom-right", "top-left"), sides, sides):
            if choice.random() < 0.12 or (left, right, sq) == (None, 0, 40):
                check(1, sq, sk, 1, 1, 1, align=align, window_size=(left, right))
    aligned = cases = 0
    for sq, sk, right, left in itertools.product(
        (1, 16, 40, 75), (16, 33, 72, 107), (0, 16, 5), (None, 0, 31, 32, 35)
    ):
        for align in ("bottom-right", "top-left"):
            options = {"align": align, "window_size": (left, right)}
            check(1, sq, sk, 1, 1, 1, **options)
            q, k = torch.empty(1, sq, 1, 8), torch.empty(1, sk, 1, 8)
            aligned += hopper._aligned_band(problem_of(q, k, k, **options), plan_of())
            cases += 1
    assert cases // 10 < aligned < cases, "some are, some are not"
    for sq, sk, window, align in itertools.product(
        (1, 16, 40, 75),
        (1, 16, 33, 72, 107),
        ((None, None), (None, 0), (None, 5), (0, 0), (9, 0), (31, 3), (16, None)),
        ("bottom-right", "top-left"),
    ):
        check_keys(1, sq, sk, 1, window_size=window, align=align)
    for together in (1, 2, 4, 6):
        check_keys(2, 40, 75, 3, together, causal=True)
    for window in ((None, None), (None, 0), (9, 0), (20, 5)):
        for lengths, past in (((5,), 0), ((40, 1, 0, 100, 16, 17), 3), ((0, 0, 33), 20)):
            check_packed_keys(lengths, lengths, past, window_size=window)
    for window in ((None, None), (None, 0), (9, 0), (20, 5), (0, 0)):
        for align in ("bottom-right", "top-left"):
            options = {"window_size": window, "align": align}
            check_packed_keys((5, 40, 0), (9, 0, 0), 3, **options)
            check_packed_keys((40, 1, 0, 100, 16, 17), (7, 0, 9, 300, 40, 2), 0, **options)
    check_rows(64, 64)
    check_rows(200, 256)
    check_rows(96, 128)
    check_packed_rows((5, 0, 130, 64, 1), 70)
    check_stats()
    for b, hq, hkv, section in ((3, 4, 2, 1), (2, 6, 3, 5), (1, 5, 1, 2), (2, 4, 4, 100)):
        check(b, 40, 40, hq, hkv, section, causal=True)
    for b, hq, hkv, heads in ((2, 4, 2, 2), (1, 8, 2, 4), (3, 8, 1, 8), (1, 16, 1, 8)):
        check(b, 13, 40, hq, hkv, 2, heads, causal=True)
        check(b, 13, 40, hq, hkv, 2, heads, window_size=(5, 3), align="top-left")
    for b, sq, sk in ((1, 33, 90), (2, 35, 70), (3, 1, 50)):
        for rows, longest, options in (
            (sq, 12, {}),
            (sq, sk, {"causal": True}),
            (1, sk, {"window_size": (9, None)}),
            (sq, 1, {}),
        ):
            start = torch.randint(-5, sk, (b, rows))
            key_range = (start, start + torch.randint(-2, longest, (b, rows)))
            check(b, sq, sk, 1, 1, 2, key_range=key_range, **options)
            check_ranges(b, sq, sk, 16, key_range=key_range, **options)
    documents = torch.tensor([0] * 30 + [30] * 50 + [80] * 20 + [100] * 30)[None]
    ends = torch.tensor([30] * 30 + [80] * 50 + [100] * 20 + [130] * 30)[None]
    for chunk in (8, 32, 1024):
        check_ranges(1, 130, 130, chunk, key_range=(documents, ends))
        check_ranges(2, 130, 130, chunk, key_range=(documents, ends), causal=True)
        check_ranges(1, 40, 100, chunk, key_range=(torch.full((1, 40), 100), ends[:, :40]))
    for lengths_q, lengths_k, past in (
        ((5,), (5,), 0),
        ((40, 1, 0, 100, 17), (40, 1, 0, 100, 17), 3),
        ((40, 1, 0, 100, 16, 16), (7, 0, 9, 300, 16, 31), 0),
        ((0, 0, 33), (0, 5, 33), 20),
    ):
        for align, left, side in (
            ("top-left", None, None),
            ("bottom-right", 0, 0),
            ("bottom-right", None, 0),
            ("top-left", 40, 20),
        ):
            options = {"align": align, "window_size": (left, side)}
            check_packed(lengths_q, lengths_k, past, 2, 1, **options)
    check_packed((3,) * 70, (3,) * 70, 0, 1, 1)


if __name__ == "__main__":
    _hasten(runtime)
    main()
    print("ok")
