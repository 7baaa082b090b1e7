"""Compile a backend's kernels for a GPU that need not be here, and read what the compiler says of them."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget

from tilewise import dispatch
from tilewise.kernels.launch import compiled_only
from tilewise.results import SCORE_NAMES
from tilewise.spec import Problem
from tilewise.tuning.config import least_shared_bytes


class Report(NamedTuple):
    """What a kernel needs: registers a thread, bytes of shared memory and of spills, notes of ptxas.

    Attributes:
        notes: what ptxas says of matrix instructions that it had to serialize (C75xx).
    """

    kernel: str
    registers: int
    shared: int
    spilled: int
    notes: tuple[str, ...]


class _Absent:
    """A driver for a GPU that is not here: it knows what to compile for, and nothing else."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> GPUTarget:
        return self._target  # Triton keeps compiled kernels by device: each target has its own

    def get_current_stream(self, device: GPUTarget) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextmanager
def compiling_for(target: GPUTarget, name: str | None = None) -> Iterator[list[Any]]:
    """Within the block kernels (or the one of that name) are compiled for the target and not launched;
    gives the list of them.

    The compiled kernels land in Triton's cache, where a process with such a GPU finds them.
    """
    active = triton.runtime.driver._active
    triton.runtime.driver.set_active(_Absent(target))
    try:
        with compiled_only(name) as kernels:
            yield kernels
    finally:
        triton.runtime.driver._active = active


def compile_problem(
    problem: Problem,
    target: GPUTarget,
    backward: bool = True,
    backend: str = "triton",
    wanted: Collection[str] = SCORE_NAMES,
) -> list[Any]:
    """Every kernel that a problem's forward and backward pass launch, compiled; `wanted` names the scores
    whose gradients are."""
    module = dispatch.backend(backend)
    with compiling_for(target) as kernels:
        result = module.forward(problem)
        if backward:
            module.backward(problem, result, torch.empty_like(result.out), None, wanted)
    return kernels


# Kilobytes of shared memory that a block may have, of the GPUs that run the code for an architecture: that
# for 8.0 runs on 8.6 and 8.9 too.
SHARED_KB = {
    "75": (64,),
    "80": (163, 99),
    "90": (227,),
    "100": (227,),
    "120": (99,),
    "gfx942": (64,),
}
# Columns of tensor memory, where there is one.
TENSOR_MEMORY = 512


def cuda_target(capability: int) -> GPUTarget:
    """The target of a compute capability: 90 for 9.0."""
    return GPUTarget("cuda", capability, 32)


def target(architecture: str) -> GPUTarget:
    """The target of an architecture's name in SHARED_KB."""
    if architecture.startswith("gfx"):
        return GPUTarget("hip", architecture, 64)
    return cuda_target(int(architecture))


def room(architecture: str, dtype: torch.dtype, head_dim: int) -> int:
    """Bytes of shared memory that a kernel may need to run on every GPU of an architecture that serves
    such heads at all; 0 where none does."""
    needs = least_shared_bytes(dtype, head_dim)
    return min((1024 * kb for kb in SHARED_KB[architecture] if needs <= 1024 * kb), default=0)


def report(kernel: Any, target: GPUTarget) -> Report:
    """What ptxas says of a compiled kernel."""
    architecture = f"sm_{target.arch}" + "a" * (int(target.arch) >= 90)
    ptxas = (
        triton.knobs.nvidia.ptxas_blackwell
        if int(target.arch) >= 100
        else triton.knobs.nvidia.ptxas
    )
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(kernel.asm["ptx"])
        command = [
            ptxas.path,
            "-v",
            f"--gpu-name={architecture}",
            str(source),
            "-o",
            f"{folder}/cubin",
        ]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", log)]
    spilled = [int(n) for n in re.findall(r"(\d+) bytes spill stores", log)]
    notes = tuple(sorted(set(re.findall(r"\(C75\d\d\)[^\n]*", log))))
    return Report(
        kernel.name, max(registers), kernel.metadata.shared, max(spilled, default=0), notes
    )


def summary(kernel: Any) -> Report:
    """What the binary of a compiled kernel needs, at once and without the notes: spills are its stack."""
    name, shared = kernel.name, kernel.metadata.shared
    if kernel.metadata.target.backend == "hip":
        says = {key: int(n) for key, n in re.findall(r"\.(\w+): *(\d+)", kernel.asm["amdgcn"])}
        return Report(name, says["vgpr_count"], shared, says["private_segment_fixed_size"], ())
    if (getattr(kernel.metadata, "tmem_size", 0) or 0) > TENSOR_MEMORY:
        raise ValueError(f"{name} needs {kernel.metadata.tmem_size} columns of tensor memory")
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(kernel.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(binary)]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (max(map(int, re.findall(rf"{n}:(\d+)", log))) for n in ("REG", "STACK"))
    return Report(name, registers, shared, stack, ())
