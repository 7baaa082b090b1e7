"""Runs kernels/hopper_walk.py in Triton's interpreter and compares it with the specification.

A module of its own, since TRITON_INTERPRET has to be set before kernels are imported.
"""

import itertools
import random

import torch
import triton
import triton.language as tl

from tilewise.arguments import problem_of
from tilewise.backends import hopper
from tilewise.kernels.hopper_walk import blocks_of, work_of

GROUP_ROWS, GROUPS, BLOCK_K = 8, 2, 16
FIELDS = 8 + 3 * GROUPS


@triton.jit
def walk_kernel(
    out, spec, walk, GROUP_ROWS: tl.constexpr, GROUPS: tl.constexpr, BLOCK_K: tl.constexpr
):
    number = tl.program_id(0)
    out += number * (8 + 3 * GROUPS)
    work = work_of(number, walk, spec, GROUP_ROWS * GROUPS, BLOCK_K)
    tl.store(out, work.at.batch)
    tl.store(out + 1, work.head)
    tl.store(out + 2, work.kv_head)
    tl.store(out + 3, work.at.tile_start)
    tl.store(out + 4, work.first)
    tl.store(out + 5, work.blocks)
    for group in tl.static_range(GROUPS):
        blocks = blocks_of(work.at.tile_start + group * GROUP_ROWS, work, spec, GROUP_ROWS, BLOCK_K)
        tl.store(out + 8 + 3 * group, blocks.full_first)
        tl.store(out + 9 + 3 * group, blocks.full_last)
        tl.store(out + 10 + 3 * group, blocks.last)


def check(b: int, sq: int, sk: int, hq: int, hkv: int, section: int, **options: object) -> None:
    q, k = torch.empty(b, sq, hq, 8), torch.empty(b, sk, hkv, 8)
    problem = problem_of(q, k, k, **options)
    first, _, _, last = problem.bounds(0, sq)
    if first >= last:
        return
    plan = hopper._Plan(GROUPS, BLOCK_K, 64, 64, 2, 1, False)
    spec, walk = hopper._order(problem, plan, GROUPS * GROUP_ROWS)
    walk = walk._replace(section=min(section, walk.heads), drawn=None)
    got = torch.full((walk.tiles, FIELDS), -1, dtype=torch.int32)
    walk_kernel[(walk.tiles,)](got, spec, walk, GROUP_ROWS, GROUPS, BLOCK_K)
    tiles = got.tolist()
    starts = range(0, sq, GROUPS * GROUP_ROWS)
    everywhere = set(itertools.product(range(b), range(hq), starts))
    assert sorted((x[0], x[1], x[3]) for x in tiles) == sorted(everywhere), "each tile once"
    lo, hi = (t[0] - first for t in problem.interval(0, sq))
    keys = torch.arange(last - first)
    for batch, head, kv_head, start, first_key, blocks, _, _, *edges in tiles:
        assert kv_head == head // (hq // hkv), (batch, head, kv_head)
        for group in range(GROUPS):
            rows = slice(start + group * GROUP_ROWS, min(sq, start + (group + 1) * GROUP_ROWS))
            full_first, full_last, end = edges[3 * group : 3 * group + 3]
            assert 0 <= full_first <= full_last <= end < blocks
            seen = (keys >= lo[rows, None]) & (keys < hi[rows, None])
            covered = (keys >= first_key) & (keys < first_key + BLOCK_K * (end + 1))
            assert not (seen & ~covered).any(), "every key that is seen is in a block"
            full = slice(first_key + BLOCK_K * full_first, first_key + BLOCK_K * full_last)
            # The last block is masked whatever it is, and so is one at either end where there is a band.
            assert full.start == full.stop or (full.stop <= last - first and seen[:, full].all())


def main() -> None:
    choice = random.Random(0)
    sides = (None, 0, 1, 7, 20, 200)
    for sq, sk in ((1, 1), (1, 50), (17, 17), (40, 75), (75, 40), (33, 33), (64, 130)):
        for align, left, right in itertools.product(("bottom-right", "top-left"), sides, sides):
            if choice.random() < 0.12 or (left, right, sq) == (None, 0, 40):
                check(1, sq, sk, 1, 1, 1, align=align, window_size=(left, right))
    for b, hq, hkv, section in ((3, 4, 2, 1), (2, 6, 3, 5), (1, 5, 1, 2), (2, 4, 4, 100)):
        check(b, 40, 40, hq, hkv, section, causal=True)


if __name__ == "__main__":
    main()
    print("ok")
