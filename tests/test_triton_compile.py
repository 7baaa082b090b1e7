"""What the Triton kernels compile to, for GPUs that are not here.

benchmarks/compile_matrix.py compiles every kernel for every one, see benchmarks/compile-matrix-*.csv; these
are the tables' and those of the heuristic's that matter most.
"""

from __future__ import annotations

import csv
import subprocess
from dataclasses import astuple
from pathlib import Path

import pytest
import torch
import triton

from tilewise.arguments import problem_of
from tilewise.backends import triton as backend
from tilewise.tuning import search
from tilewise.tuning.compiling import (
    SHARED_KB,
    Report,
    compile_problem,
    cuda_target,
    report,
    room,
    target,
)
from tilewise.tuning.config import (
    OPERATIONS,
    TABLES,
    Config,
    Key,
    heuristic,
    least_shared_bytes,
    product_bits,
    read_table,
)

ARCHITECTURES = {"nvidia-h200": "90"}
MATRIX = Path(__file__).parents[1] / "benchmarks" / "compile-matrix-2026-11-30.csv"

# Bytes of stack: what spills in kernels that hold more than their registers. Much of it does so in the loop
# that reads no hidden key, which runs only where a NaN came out.
SPILLED: dict[tuple[object, ...], int] = {
    ("80", "bias", 16, 64, "general", 64, 64, 4, 1): 32,
    ("80", "forward", 16, 128, "band", 128, 64, 8, 2): 272,
    ("80", "keys", 16, 64, "general", 32, 64, 4, 2): 48,
    ("80", "queries", 16, 128, "band", 64, 64, 4, 1): 88,
    ("90", "bias", 16, 128, "general", 64, 64, 4, 1): 64,
    ("90", "forward", 16, 64, "band", 64, 128, 4, 3): 48,
    ("90", "forward", 16, 64, "band", 128, 64, 4, 3): 96,
    ("90", "forward", 16, 256, "band", 128, 64, 8, 2): 184,
    ("90", "keys", 16, 128, "band", 64, 64, 4, 2): 128,
    ("90", "keys", 16, 128, "full", 64, 64, 4, 2): 40,
    ("90", "keys", 16, 256, "band", 64, 64, 8, 2): 672,
    ("90", "keys", 16, 256, "full", 64, 64, 8, 2): 80,
    ("90", "queries", 16, 64, "band", 128, 64, 4, 3): 288,
    ("90", "queries", 16, 128, "band", 64, 64, 4, 2): 8,
    ("90", "queries", 16, 128, "general", 128, 64, 8, 3): 32,
    ("90", "queries", 16, 256, "band", 128, 32, 8, 2): 280,
}

TUNED = list(
    {
        (ARCHITECTURES[path.stem], key._replace(length="long"), config): None
        for path in sorted(TABLES.glob("*.json"))
        for key, config in read_table(path).items()
        if key.operation in OPERATIONS
    }
)


@pytest.fixture(autouse=True)
def _compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def compiles(architecture: str, key: Key, config: Config) -> None:
    found = search.compiled(key, config, target(architecture))
    assert isinstance(found, Report), found
    assert found.kernel == f"{key.operation}_kernel"
    assert found.registers > 16  # it was read, from a kernel that does something
    assert 0 < found.shared <= room(architecture, search.DTYPES[key.bits], key.head_dim)
    recorded = SPILLED.get((architecture, *key[:4], *astuple(config)), 0)
    assert found.spilled <= recorded, f"{found.spilled} bytes spilled, recorded are {recorded}"


@pytest.mark.parametrize(("architecture", "key", "config"), TUNED, ids=str)
def test_tables(architecture: str, key: Key, config: Config) -> None:
    compiles(architecture, key, config)


def of_heuristic(architecture: str, key: Key) -> Config:
    capability = int(architecture) if architecture.isdigit() else 0
    return heuristic(key._replace(bits=product_bits(search.DTYPES[key.bits], capability)))


WITHOUT_A_TABLE = [
    (architecture, Key(*key, "long"))
    for architecture, keys in {
        "75": (("keys", 16, 64, "band"),),
        "80": (
            ("forward", 16, 128, "band"),
            ("queries", 16, 128, "band"),
            ("keys", 16, 128, "band"),
            ("keys", 16, 64, "general"),
            ("bias", 16, 64, "general"),
            ("keys", 16, 256, "band"),
            ("keys", 32, 64, "band"),
            ("keys", 64, 64, "band"),
        ),
        "90": (("forward", 16, 128, "general"),),
        "100": (("keys", 16, 128, "band"),),
        "gfx942": (("forward", 16, 64, "band"), ("keys", 16, 64, "band")),
    }.items()
    for key in keys
]


@pytest.mark.parametrize(("architecture", "key"), WITHOUT_A_TABLE, ids=str)
def test_without_a_table(architecture: str, key: Key) -> None:
    compiles(architecture, key, of_heuristic(architecture, key))


def test_the_matrix_has_every_tile_of_the_heuristic_and_each_fits() -> None:
    with MATRIX.open(newline="") as file:
        rows = {
            (
                row["arch"],
                row["operation"],
                int(row["bits"]),
                int(row["head_dim"]),
                row["mask"],
            ): row
            for row in csv.DictReader(file)
        }
    widths, missing = (64, 128, 256, 512), []
    for architecture in SHARED_KB:
        for key in search.keys(bits=(16, 32, 64), head_dims=widths, lengths=("long",)):
            allowed = room(architecture, search.DTYPES[key.bits], key.head_dim)
            refused = key.bits == 64 and architecture in ("75", "gfx942")  # see backends/triton.py
            # What has no mask has less to do than what has a band.
            if refused or not allowed or key.mask == "full":
                continue
            row = rows.get((architecture, *key[:4]))
            c = of_heuristic(architecture, key)
            tile = f"{c.block_q}x{c.block_k} w{c.num_warps} s{c.num_stages}"
            if row is None or row["config"] != tile:
                missing.append((architecture, key, tile))
            else:
                assert not row["error"], row
                assert int(row["shared"]) <= allowed, row
    assert not missing, "run benchmarks/compile_matrix.py"


# ------------------------------------------------------------------ what fits nowhere


@pytest.mark.parametrize(
    ("architecture", "dtype", "widest"),
    [
        ("75", torch.float16, 256),
        ("75", torch.float32, 128),
        ("80", torch.bfloat16, 512),
        ("80", torch.float32, 512),
        ("80", torch.float64, 256),
        ("90", torch.float64, 256),
        ("120", torch.float32, 256),
        ("120", torch.float64, 128),
        ("gfx942", torch.bfloat16, 256),
    ],
)
def test_the_widest_heads_that_fit(architecture: str, dtype: torch.dtype, widest: int) -> None:
    largest = 1024 * max(SHARED_KB[architecture])
    assert backend._too_wide(largest, dtype, widest) == []
    if widest < backend.LARGEST_HEAD_DIM:
        (reason,) = backend._too_wide(largest, dtype, widest + 1)
        assert f"head dim {widest + 1} needs" in reason
        assert f"this GPU may have {largest // 1024} KB" in reason


def test_float64_does_not_compile_for_another_maker() -> None:
    """Were it to compile one day, it should no longer be refused."""
    key = Key("forward", 64, 64, "full", "long")
    assert "PassManager" in str(search.compiled(key, heuristic(key), target("gfx942")))


@pytest.mark.parametrize("bits", [32, 64])
def test_the_smallest_tiles_need_what_is_foreseen(bits: int) -> None:
    """Were it less than they need, a launch would fail; were it much more, heads would be refused for
    nothing."""
    key = Key("keys", bits, 256 * 32 // bits, "band", "long")
    found = search.compiled(key, Config(16, 16, 8, 1), cuda_target(80))
    assert isinstance(found, Report), found
    least = least_shared_bytes(search.DTYPES[bits], key.head_dim)
    assert 0.9 * least <= found.shared <= least


def test_each_target_gets_its_own() -> None:
    q = torch.empty(1, 16, 1, 16)
    problem = problem_of(q, q, q)
    for capability in (80, 90):
        kernels = compile_problem(problem, cuda_target(capability), backward=False)
        assert [kernel.metadata.target.arch for kernel in kernels] == [capability]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ["80", "90"])
def test_a_bias_and_a_range_in_one_call(architecture: str, dtype: torch.dtype) -> None:
    """As T5 has them, in narrow heads: the compiler once failed on it."""
    q = torch.empty(2, 20, 4, 8, dtype=dtype)
    end = torch.full((2, 20), 14)
    bias = torch.empty(1, 4, 20, 20)
    problem = problem_of(q, q, q, bias=bias, key_range=(torch.zeros_like(end), end))
    kernels = compile_problem(problem, target(architecture))
    assert {"forward_kernel", "queries_kernel", "keys_kernel"} <= {k.name for k in kernels}


@pytest.mark.parametrize("head_dim", [64, 128])
def test_packed_sequences_need_what_dense_ones_do(head_dim: int, tmp_path: Path) -> None:
    """Products were serialized where tiles came by pointers; and where lengths may differ by thread for all
    that the assembler knows, every address of a product is moved to registers that threads share."""
    q = torch.empty(4096, 2, head_dim, dtype=torch.bfloat16)
    cu = torch.tensor([0, 1000, 4096])
    dense = problem_of(q.unsqueeze(0), q.unsqueeze(0), q.unsqueeze(0), causal=True)
    packed = problem_of(q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True)
    hopper, moves = cuda_target(90), {}
    for problem in (dense, packed):
        for kernel in compile_problem(problem, hopper):
            binary = tmp_path / "kernel.cubin"
            binary.write_bytes(kernel.asm["cubin"])
            command = [triton.knobs.nvidia.cuobjdump.path, "-sass", str(binary)]
            code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            moves.setdefault(kernel.name, []).append(code.count(" R2UR "))
            if kernel.name != "delta_kernel":
                assert report(kernel, hopper).notes == ()
                assert "cp.async.bulk.tensor" in kernel.asm["ptx"]
                assert "cp.async.ca" not in kernel.asm["ptx"]
    for name in ("forward_kernel", "queries_kernel", "keys_kernel"):
        of_dense, of_packed = moves[name]
        assert 0 < of_packed <= 1.4 * of_dense, name


def test_a_tile_that_is_too_large_is_found_out() -> None:
    key = Key("forward", 16, 128, "band", "long")
    with pytest.raises(AssertionError):
        compiles("80", key, Config(128, 128, 8, 3))  # 163 KB at least, and 8.6 has 99
    with pytest.raises(AssertionError, match="bytes spilled, recorded are 0"):
        compiles("80", key, Config(64, 128, 4, 1))


def test_a_process_that_compiles_needs_no_gpu_and_no_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the cache holds is what the compiler made of this source: a new cache says the same."""
    key, config = Key("forward", 16, 16, "band", "long"), Config(32, 32, 4, 1)
    kept = search.compiled(key, config, cuda_target(80))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert search.compiled(key, config, cuda_target(80)) == kept
