"""What the Triton kernels compile to, for GPUs that are not here.

benchmarks/compile_matrix.py compiles every kernel for every one; these are those that matter most.
"""

from __future__ import annotations

from dataclasses import astuple

import pytest
import torch
from triton.backends.compiler import GPUTarget

from tilewise.arguments import problem_of
from tilewise.tuning import search
from tilewise.tuning.compiling import Report, compile_problem, cuda_target
from tilewise.tuning.config import (
    OPERATIONS,
    TABLES,
    Config,
    Key,
    heuristic,
    product_bits,
    read_table,
)

# Kilobytes of shared memory that a block may have, by compute capability.
SHARED = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227}
# What is compiled for 8.0 runs on 8.6 and 8.9 as well.
ROOM = {**SHARED, 80: SHARED[86]}
CAPABILITIES = {"nvidia-h200": 90}

# Bytes of stack: what spills in kernels that hold more than their registers.
SPILLED: dict[tuple[object, ...], int] = {
    (75, "forward", 16, 64, "band", 64, 32, 4, 2): 520,
    (75, "keys", 16, 64, "band", 32, 32, 4, 2): 584,
    (75, "queries", 16, 64, "band", 32, 32, 4, 2): 392,
    (80, "bias", 16, 64, "general", 64, 64, 4, 1): 24,
    (80, "forward", 16, 128, "general", 128, 64, 8, 2): 24,
    (80, "forward", 16, 256, "band", 64, 32, 4, 2): 168,
    (80, "forward", 32, 64, "band", 64, 32, 4, 2): 80,
    (80, "keys", 16, 64, "general", 32, 64, 4, 2): 48,
    (80, "keys", 16, 128, "general", 32, 64, 4, 1): 8,
    (80, "keys", 16, 256, "band", 32, 32, 4, 1): 40,
    (80, "queries", 16, 128, "general", 64, 64, 4, 1): 72,
    (90, "forward", 16, 128, "band", 128, 128, 8, 3): 8,
    (90, "forward", 16, 128, "full", 128, 64, 4, 2): 136,
    (90, "forward", 16, 256, "band", 128, 64, 8, 2): 40,
    (90, "keys", 16, 128, "band", 32, 64, 4, 1): 40,
    (90, "keys", 16, 128, "band", 64, 64, 4, 2): 128,
    (90, "keys", 16, 128, "full", 64, 64, 4, 2): 40,
    (90, "keys", 16, 128, "full", 64, 128, 8, 3): 40,
    (90, "keys", 16, 256, "band", 64, 64, 8, 2): 272,
    (90, "keys", 16, 256, "full", 64, 64, 8, 2): 80,
    (90, "queries", 16, 64, "band", 128, 64, 4, 3): 32,
    (90, "queries", 16, 256, "band", 128, 32, 8, 2): 48,
}

TUNED = list(
    {
        (CAPABILITIES[path.stem], key._replace(length="long"), config): None
        for path in sorted(TABLES.glob("*.json"))
        for key, config in read_table(path).items()
        if key.operation in OPERATIONS
    }
)


@pytest.fixture(autouse=True)
def _compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def compiles(key: Key, config: Config, capability: int) -> None:
    found = search.compiled(key, config, cuda_target(capability))
    assert isinstance(found, Report), found
    assert found.shared <= 1024 * ROOM[capability]
    assert found.spilled <= SPILLED.get((capability, *key[:4], *astuple(config)), 0)


@pytest.mark.parametrize(("capability", "key", "config"), TUNED, ids=str)
def test_tables(capability: int, key: Key, config: Config) -> None:
    compiles(key, config, capability)


LIKELY = [
    (16, 64, "band"),
    (16, 64, "general"),
    (16, 128, "band"),
    (16, 128, "general"),
    (16, 256, "band"),
    (32, 64, "band"),
]
WITHOUT_A_TABLE = [
    (capability, Key(operation, bits, head_dim, mask, "long"))
    for capability, likely in {
        75: [(16, 64, "band")],
        80: [*LIKELY, (64, 64, "band")],
        90: LIKELY[2:3],
        100: LIKELY[2:3],
    }.items()
    for bits, head_dim, mask in likely
    for operation in OPERATIONS
    if operation != "bias" or mask == "general"
]


@pytest.mark.parametrize(("capability", "key"), WITHOUT_A_TABLE, ids=str)
def test_without_a_table(capability: int, key: Key) -> None:
    bits = product_bits(search.DTYPES[key.bits], capability)
    compiles(key, heuristic(key._replace(bits=bits)), capability)


def test_every_tile_without_a_table_is_foreseen_to_fit() -> None:
    narrow = search.keys(bits=(32,), head_dims=(16, 32, 64, 128, 256))
    for key in (*search.keys(bits=(16,)), *narrow):
        assert search.shared_bytes(key, heuristic(key)) <= 1024 * SHARED[86], key


def test_for_another_maker() -> None:
    """AMD's MI300."""
    q, k = torch.empty(1, 64, 2, 64), torch.empty(1, 64, 1, 64)
    problem = problem_of(q.half(), k.half(), k.half(), causal=True)
    kernels = compile_problem(problem, GPUTarget("hip", "gfx942", 64))
    names = ["forward_kernel", "delta_kernel", "queries_kernel", "keys_kernel"]
    assert [kernel.name for kernel in kernels] == names
    assert all("amdgcn" in kernel.asm for kernel in kernels)
    assert all(kernel.metadata.shared <= 64 * 1024 for kernel in kernels)


def test_each_target_gets_its_own() -> None:
    q = torch.empty(1, 16, 1, 16)
    problem = problem_of(q, q, q)
    for capability in (80, 90):
        kernels = compile_problem(problem, cuda_target(capability), backward=False)
        assert [kernel.metadata.target.arch for kernel in kernels] == [capability]
