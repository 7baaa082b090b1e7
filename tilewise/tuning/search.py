"""Search for the fastest tiles of a kernel: candidates by rules, compiled in parallel, then timed.

Most of the time goes into compiling, which needs no GPU. Worker processes compile ahead into Triton's
cache, while this process times what is ready.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

from tilewise.arguments import dense_problem
from tilewise.backends import triton as backend
from tilewise.results import Result, accumulation_dtype, result_shapes
from tilewise.spec import Problem
from tilewise.tuning.compiling import Report, compiling_for, summary
from tilewise.tuning.config import MASKS, OPERATIONS, Config, Key, heuristic, override
from tilewise.tuning.timing import graphed, medians
from tilewise.tuning.workers import start_worker

# In the order in which they are tuned, what matters most first.
HEAD_DIMS = (128, 64, 256, 32, 512, 16)
LENGTHS = {"long": 4096, "short": 1024}
DTYPES = {16: torch.bfloat16, 32: torch.float32, 64: torch.float64}
# Tensors of 64 MB: large enough to fill a GPU, and for a bias of every pair half the length is enough.
TOKENS, WIDTH, LONGEST_BIAS = 2**14, 2048, 2048

SIDES = (16, 32, 64, 128, 256)
FEWEST_ROWS, LARGEST_ASPECT = 32, 4
# Registers that a thread needs for tiles alone: with fewer there is too little work, with more they spill.
FEWEST_REGISTERS, MOST_REGISTERS = 56, 224
MOST_SPILLED = 1024
# Barriers and reductions, beside tiles.
SHARED_OVERHEAD = 2048

BRIEF, LONG = 10.0, 60.0
FINALISTS = 5
PATIENCE = 60.0
# ‖candidate − heuristic‖ / ‖heuristic‖: room for sums in another order, and none for a wrong tile.
TOLERANCE = {16: 1e-2, 32: 1e-4, 64: 1e-10}


class Winner(NamedTuple):
    """The fastest configuration of a key; milliseconds of its pass, and of that with the heuristic.

    Attributes:
        timed: how many candidates ran and were right.
    """

    key: Key
    config: Config
    milliseconds: float
    heuristic_milliseconds: float
    timed: int

    @property
    def speedup(self) -> float:
        return self.heuristic_milliseconds / self.milliseconds


class Outcome(NamedTuple):
    """What came of a key: a winner, or why there is none."""

    key: Key
    winner: Winner | None = None
    note: str = ""


# Milliseconds of those of the configurations that run and compute what they should, each timed for about
# that many milliseconds.
Measure = Callable[[Sequence[Config], float], dict[Config, float]]


def search(
    tried: Mapping[Key, Sequence[Config]],
    compiler: Compiler,
    workbench: Callable[[Key], Measure],
    advance: Callable[[int], object] = lambda count: None,
    deadline: float = float("inf"),
) -> Iterator[Outcome]:
    """The winner of each key among the configurations to be tried, one after the other.

    Args:
        advance: is told how many more candidates have been dealt with.
        deadline: of time.monotonic; nothing is begun after it.
    """
    for key in tried:  # every pass that is timed has a heuristic's kernel in it
        compiler.ask(key, [heuristic(key)])
    for key, configs in tried.items():
        compiler.ask(key, configs)
    for key, configs in tried.items():
        if time.monotonic() >= deadline:
            return
        usable = compiler.usable(key, configs)
        advance(len(configs) - len(usable))
        try:
            measure = workbench(key)
            winner = fastest(key, usable, measure, lambda: advance(1), deadline)
        except (
            Exception
        ) as error:  # out of memory, or of what a block may have: the next key may fit
            yield Outcome(key, note=f"{type(error).__name__}: {error}")
        else:
            yield Outcome(key, winner)


class Gpu(NamedTuple):
    """A GPU's name, what to compile for it, and bytes of shared memory that a block may have."""

    name: str
    target: GPUTarget
    shared: int


def gpu(device: torch.device) -> Gpu:
    driver = triton.runtime.driver.active
    shared = driver.utils.get_device_properties(device.index)["max_shared_mem"]
    return Gpu(torch.cuda.get_device_name(device), driver.get_current_target(), shared)


# ------------------------------------------------------------------ what there is to try


def keys(
    operations: Sequence[str] = OPERATIONS,
    bits: Sequence[int] = (16,),
    head_dims: Sequence[int] = HEAD_DIMS,
    masks: Sequence[str] = MASKS,
    lengths: Sequence[str] = tuple(LENGTHS),
) -> list[Key]:
    """The keys of those kinds, what matters most first. A bias has a gradient in general masks only."""
    chosen = [
        Key(operation, size, width, mask, length)
        for size, width, mask, operation, length in product(
            bits, head_dims, masks, operations, lengths
        )
        if operation != "bias" or mask == "general"
    ]
    rare = {width: width not in (64, 128, 256) for width in head_dims}
    return sorted(chosen, key=lambda key: (key.bits, rare[key.head_dim], key.mask == "general"))


def candidates(key: Key, shared: int) -> list[Config]:
    """The configurations worth a try where a block has that many bytes of shared memory.

    The heuristic's is always there.
    """
    found = []
    for block_q, block_k, warps in product(SIDES, SIDES, (4, 8)):
        tile = Config(block_q, block_k, warps, 1)
        fits = FEWEST_REGISTERS <= registers(key, tile) <= MOST_REGISTERS
        narrow = max(block_q, block_k) > LARGEST_ASPECT * min(block_q, block_k)
        if not fits or narrow or _sides(key, tile)[0] < FEWEST_ROWS:
            continue
        for stages in (1, 2, 3, 4):
            config = Config(block_q, block_k, warps, stages)
            # Four stages pay with tiles so small that two blocks share a multiprocessor.
            room = shared if stages < 4 else shared // 2
            if shared_bytes(key, config) <= room and (stages == 1 or key.operation != "bias"):
                found.append(config)
    baseline = heuristic(key)
    return found if baseline in found else [baseline, *found]


def registers(key: Key, config: Config) -> int:
    """About how many 32-bit registers a thread needs for accumulators, scores and operands."""
    own, _ = _sides(key, config)
    sums, scores, operands = {
        "forward": (1, 1, 1),
        "queries": (1, 2, 1),
        "keys": (2, 2, 2),
        "bias": (0, 3, 0),
    }[key.operation]
    scores += key.mask == "general"
    tile = config.block_q * config.block_k
    wide = max(32, key.bits) * (sums * own * key.head_dim + scores * tile)
    return (wide + key.bits * operands * tile) // 32 // (32 * config.num_warps)


def shared_bytes(key: Key, config: Config) -> int:
    """About how many bytes of shared memory a block needs: what it keeps, and stages of what it reads."""
    own, other = _sides(key, config)
    kept = 1 if key.operation == "forward" else 2
    rows = kept * own + 2 * config.num_stages * other
    return key.bits // 8 * key.head_dim * rows + SHARED_OVERHEAD


def _sides(key: Key, config: Config) -> tuple[int, int]:
    """The side of a tile that a program owns, and the one that it walks along."""
    sides = config.block_q, config.block_k
    return (sides[1], sides[0]) if key.operation == "keys" else sides


# ------------------------------------------------------------------ what is computed


def problem_for(
    key: Key,
    make: Callable[..., Tensor],
    device: str | torch.device,
    dtype: torch.dtype | None = None,
) -> Problem:
    """A problem whose kernels look that key up. `make` is torch.randn, or torch.empty to compile only."""
    length = LENGTHS[key.length]
    general = key.mask == "general"
    if general:
        length = min(length, LONGEST_BIAS)
    heads = max(1, WIDTH // key.head_dim)
    batch = max(1, TOKENS * 16 // key.bits // length)
    given = {"dtype": dtype or DTYPES[key.bits], "device": device}
    q, k, v = (make(batch, length, heads, key.head_dim, **given) for _ in range(3))
    bias = make(1, heads, length, length, **given) if general else None
    return dense_problem(q, k, v, causal=key.mask == "band", bias=bias, deterministic=False)


def outputs(key: Key, problem: Problem, result: Result | None, dout: Tensor) -> tuple[Tensor, ...]:
    """Runs the pass that has the kernel of the key, and gives what that kernel writes."""
    if key.operation == "forward":
        return tuple(backend.forward(problem)[:2])
    assert result is not None
    wanted = ("bias",) if key.operation == "bias" else ()
    gradients = backend.backward(problem, result, dout, None, wanted=wanted)
    if key.operation == "queries":
        return (gradients.q,)
    if key.operation == "keys":
        return gradients.k, gradients.v
    assert gradients.scores.bias is not None
    return (gradients.scores.bias,)


# ------------------------------------------------------------------ compiling


def compiled(key: Key, config: Config, target: GPUTarget) -> Report | str:
    """Compiles a candidate into Triton's cache: what its kernel needs, or why it does not compile."""
    old = target.backend == "cuda" and target.arch < 80 and key.bits == 16
    problem = problem_for(key, torch.empty, "cpu", torch.float16 if old else None)
    out, lse = result_shapes(problem)
    q = problem.q
    of_rows = q.new_empty(lse, dtype=accumulation_dtype(q.dtype))
    low = of_rows if q.dtype in backend.SPLITS_LSE else of_rows[:0]
    result = Result(q.new_empty(out), of_rows, low)
    name = f"{key.operation}_kernel"
    try:
        with override(**{key.operation: config}), compiling_for(target, name) as kernels:
            outputs(key, problem, result, torch.empty_like(result.out))
        (kernel,) = kernels
        return summary(kernel)
    except Exception as error:  # whatever a compiler says
        return f"{type(error).__name__}: {(str(error).strip() or '?').splitlines()[0]}"


class Compiler:
    """Worker processes that compile candidates in the order in which they are asked for."""

    def __init__(self, target: GPUTarget, shared: int, pool: Any) -> None:
        self._target, self._shared, self._pool = target, shared, pool
        self._pending: dict[tuple[Key, Config], Any] = {}

    def ask(self, key: Key, configs: Sequence[Config]) -> None:
        for config in configs:
            if (key, config) not in self._pending:
                answer = self._pool.apply_async(compiled, (key, config, self._target))
                self._pending[key, config] = answer

    def usable(self, key: Key, configs: Sequence[Config]) -> list[Config]:
        """Waits for those configurations, and gives those that compiled well.

        One that brought its worker down is never ready: it is given up when none has become ready
        for a while.
        """
        asked = {config: self._pending[key, config] for config in configs}
        changed, before = time.monotonic(), len(asked)
        while waiting := sum(not answer.ready() for answer in asked.values()):
            if waiting < before:
                changed, before = time.monotonic(), waiting
            if time.monotonic() - changed > PATIENCE:
                break
            time.sleep(0.02)
        reports = {config: answer.get() for config, answer in asked.items() if answer.ready()}
        return [config for config, report in reports.items() if self._fits(report)]

    def _fits(self, report: Report | str) -> bool:
        if isinstance(report, str):
            return False
        return report.shared <= self._shared and report.spilled <= MOST_SPILLED


@contextmanager
def compiler(target: GPUTarget, shared: int, workers: int) -> Iterator[Compiler]:
    """A Compiler of that many processes, which are ended with the block."""
    with multiprocessing.get_context("spawn").Pool(workers, start_worker) as pool:
        yield Compiler(target, shared, pool)


# ------------------------------------------------------------------ timing


def fastest(
    key: Key,
    configs: Sequence[Config],
    measure: Measure,
    advance: Callable[[], object] = lambda: None,
    deadline: float = float("inf"),
) -> Winner:
    """Times all candidates briefly, then the best few again, in turn with the heuristic's.

    After the deadline (of time.monotonic) no further candidates are timed.
    """
    baseline = heuristic(key)
    brief: dict[Config, float] = {}
    for config in configs:
        if time.monotonic() < deadline:
            brief |= measure([config], BRIEF)
        advance()
    finalists = sorted(brief, key=brief.__getitem__)[:FINALISTS]
    final = measure([baseline, *(c for c in finalists if c != baseline)], LONG)
    if baseline not in final:
        raise RuntimeError(f"the heuristic's {baseline} does not run")
    best = min(final, key=final.__getitem__)
    return Winner(key, best, final[best], final[baseline], len(brief))


class Workbench:
    """Measures configurations of a key on a GPU; one that is wrong or does not run is left out."""

    def __init__(
        self, key: Key, device: torch.device, failed: Callable[[Config, str], object]
    ) -> None:
        """`failed` is told which configuration was left out and why."""
        torch.cuda.empty_cache()  # what the graphs of the key before held
        self._key, self._failed = key, failed
        self._problem = problem_for(key, torch.randn, device)
        self._fixed = {name: heuristic(key._replace(operation=name)) for name in OPERATIONS}
        with override(**self._fixed):
            self._result = backend.forward(self._problem)
            self._dout = torch.randn_like(self._result.out)
            self._expected = self._outputs()

    def __call__(self, configs: Sequence[Config], milliseconds: float) -> dict[Config, float]:
        replays = {}
        for config in configs:
            try:
                replays[config] = self._replay(config)
            except Exception as error:  # a launch may fail in many ways: the candidate is out
                self._failed(config, f"{type(error).__name__}: {error}")
        times = medians(list(replays.values()), milliseconds)
        return dict(zip(replays, times, strict=True))

    def _replay(self, config: Config) -> Callable[[], None]:
        with override(**{**self._fixed, self._key.operation: config}):
            with poisoned():
                got = self._outputs()
            for ours, theirs in zip(got, self._expected, strict=True):
                error = float((ours.double() - theirs.double()).norm() / theirs.double().norm())
                if not error <= TOLERANCE[self._key.bits]:
                    raise ArithmeticError(f"differs from the heuristic's result by {error:.1e}")
            return graphed(self._outputs)

    def _outputs(self) -> tuple[Tensor, ...]:
        return outputs(self._key, self._problem, self._result, self._dout)


@contextmanager
def poisoned() -> Iterator[None]:
    """Within the block new memory is full of NaN, so that what a kernel does not write shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # which fills it
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
