"""What compute-sanitizer's racecheck says of the least program in which one partition of warps waits for
another's number: one store, one arrival at a barrier object, one load.

    compute-sanitizer --tool racecheck python benchmarks/racecheck_least.py [two|one]

With two partitions it reports hazards (2025.3.1); with one that does the same it does not. In both the number
that arrives is right.
"""

import sys
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier


@gluon.constexpr_function
def all_in_each_thread() -> Any:
    return gl.BlockedLayout([8], [32], [4], [0])


@gluon.jit
def put(out, data, full):
    data.store(3 * gl.arange(0, 8, all_in_each_thread()))
    mbarrier.arrive(full)


@gluon.jit
def take(out, data, full):
    mbarrier.wait(full, 0)
    gl.store(out + gl.arange(0, 8, all_in_each_thread()), data.load(all_in_each_thread()))


@gluon.jit
def kernel(out, PARTITIONS: gl.constexpr):
    data = gl.allocate_shared_memory(gl.int32, [8], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    fence_async_shared()
    if PARTITIONS == 2:
        gl.warp_specialize([(put, (out, data, full)), (take, (out, data, full))], [4], [64])
    else:
        put(out, data, full)
        take(out, data, full)


def main() -> None:
    out = torch.zeros(8, dtype=torch.int32, device="cuda")
    kernel[(1,)](out, 1 if sys.argv[1:] == ["one"] else 2, num_warps=4)
    assert out.tolist() == list(range(0, 24, 3))


if __name__ == "__main__":
    main()
