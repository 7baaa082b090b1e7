"""How the cases of ``tilewise bench gpu`` are run, checked and timed.

All sides of a case compute on the same random numbers in one process. First each result is checked
against the formula in float32 on some heads; then those that are right are timed in turn, so that each
is timed before and after every other one.
"""

from __future__ import annotations

import math
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise import dense, spec
from tilewise.cli.bench_cpu import BACKWARD, FORWARD, pass_of
from tilewise.cli.gpu_cases import EAGER, Case, Inputs, random_inputs
from tilewise.cli.gpu_sides import PEERS, PLAIN, Make, Side, missing_peers, ours, reason, serving
from tilewise.dispatch import BACKENDS, gradients_by
from tilewise.results import zero_gradients
from tilewise.tuning.timing import graphed, host_medians, medians
from tilewise.tuning.workers import start_worker

# Largest ‖got − formula‖ / ‖formula‖ in bfloat16: two to three times what rounding gives. A scale that is
# wrong by a hundredth gives more.
TOLERANCE = 6e-3
# How long each side of a pass is timed.
MILLISECONDS = 100.0
# Calls that are made without waiting in between, where the clock is what counts.
CALLS = 50
# Scores of the formula that are in memory at once.
BLOCK_SCORES = 2**25
# Of all the time, what compiling ahead may take; and how long nothing may become ready.
COMPILING_SHARE, PATIENCE = 0.5, 90.0

Call = Callable[[], tuple[Tensor, ...]]


class Timing(NamedTuple):
    """What came of a side. Without milliseconds there is a reason.

    Attributes:
        error: the largest relative error of its results.
        eager: whether Python's calls were timed, and not the replay of a CUDA graph.
    """

    milliseconds: float | None = None
    error: float | None = None
    eager: bool = False
    reason: str = ""

    @property
    def wrong(self) -> bool:
        return self.error is not None and not self.error <= TOLERANCE


class Outcome(NamedTuple):
    """What came of a pass of a case: of tilewise's backends, and of their peers."""

    case: Case
    when: str
    ours: dict[str, Timing]
    peers: dict[str, Timing]

    @property
    def failed(self) -> bool:
        """Whether one of ours is wrong or does not run."""
        return any(timing.reason for timing in self.ours.values())

    @property
    def troubled(self) -> bool:
        """Whether anything is wrong or does not run."""
        return self.failed or any(timing.reason for timing in self.peers.values())


def run_all(
    cases: Sequence[Case],
    passes: Sequence[str],
    device: torch.device,
    seconds: float = math.inf,
    workers: int = 0,
    fa3: Path | None = None,
    say: Callable[[str], object] = print,
) -> Iterator[Outcome]:
    """The outcomes of the cases on a GPU. Nothing is begun after that many seconds.

    Args:
        workers: processes that compile ahead.
        fa3: a folder with FlashAttention-3's binary.
        say: is told what is missing, and what else there is to say.
    """
    deadline = time.monotonic() + seconds
    with compiling_ahead(cases, passes, device, workers, seconds) as wait:
        missing = missing_peers(fa3)
        for name, why in missing.items():
            say(f"without {name}: {why}")
        wait()
    for case in cases:
        outcomes = run(case, passes, missing, device)
        while time.monotonic() < deadline and (outcome := next(outcomes, None)) is not None:
            yield outcome
            if outcome.troubled and (why := silence(device)):
                say(f"the GPU no longer answers: {why}")
                return


def silence(device: torch.device) -> str:
    """Why the GPU does not answer, as after a kernel that wrote where it must not; empty if it does."""
    try:
        torch.cuda.synchronize(device)
    except Exception as error:  # what a driver says
        return reason(error)
    return ""


# ------------------------------------------------------------------ a case


def run(
    case: Case, passes: Sequence[str], missing: Mapping[str, str], device: torch.device
) -> Iterator[Outcome]:
    """The outcomes of a case's passes. Peers that are `missing` are left out."""
    torch.cuda.empty_cache()  # what the graphs of the case before held
    peers = [name for name in case.peers if name not in missing]
    try:
        inputs = random_inputs(case, device)
        names = serving(case, inputs)
        if not names:
            raise RuntimeError("no backend has kernels for it")
        makers = {name: ours(name) for name in names} | {name: PEERS[name] for name in peers}
        samples = formula(case, inputs)
        sides = {name: attempt(make, case, inputs) for name, make in makers.items()}
    except Exception as error:  # no room for the case
        for when in passes:
            yield Outcome(case, when, {"tilewise": Timing(reason=reason(error))}, {})
        return
    for when in passes:
        ran = [name for name in names if has(name, when, case, inputs)]
        timings = timed(case, inputs, samples, {n: sides[n] for n in (*ran, *peers)}, when)
        yield Outcome(case, when, *({n: timings[n] for n in group} for group in (ran, peers)))


def has(name: str, when: str, case: Case, inputs: Inputs) -> bool:
    """Whether a side has a pass of its own: a backend may leave the gradients of a case to another."""
    if when != BACKWARD or name not in BACKENDS:
        return True
    return gradients_by(name, inputs.problem(case)) == name


def attempt(make: Make, case: Case, inputs: Inputs) -> Side | Timing:
    try:
        return make(case, inputs)
    except Exception as error:  # a package of another version, a case that it does not know
        return Timing(reason=reason(error))


def timed(
    case: Case,
    inputs: Inputs,
    samples: Sequence[Sample],
    sides: Mapping[str, Side | Timing],
    when: str,
) -> dict[str, Timing]:
    """Checks every side and times those that are right."""
    timings: dict[str, Timing] = {}
    ready: dict[str, Callable[[], object]] = {}
    for name, side in sides.items():
        if isinstance(side, Timing):
            timings[name] = side
            continue
        try:
            timing = checked(side, inputs, samples, when)
            if not timing.reason:
                ready[name], eager = timeable(side, inputs, when, case.name == EAGER)
                timing = timing._replace(eager=eager)
        except Exception as error:  # whatever a kernel or a compiler comes up with
            timing = Timing(reason=reason(error))
        timings[name] = timing
    if not ready:
        return timings
    try:
        if case.name == EAGER:
            times = [t / CALLS for t in host_medians(list(ready.values()), MILLISECONDS)]
        else:
            times = medians(list(ready.values()), MILLISECONDS)
    except Exception as error:
        return timings | {name: Timing(reason=reason(error)) for name in ready}
    for name, milliseconds in zip(ready, times, strict=True):
        timings[name] = timings[name]._replace(milliseconds=milliseconds)
    return timings


def call_of(side: Side, inputs: Inputs, when: str) -> Call:
    """A pass of a side, on inputs that are contiguous in its own layout."""
    given = [*inputs.differentiated.values(), inputs.dout]
    if side.heads_first:
        given = [t if t is inputs.bias else t.transpose(1, 2).contiguous() for t in given]
    return pass_of(side.attend, given, when)


def checked(side: Side, inputs: Inputs, samples: Sequence[Sample], when: str) -> Timing:
    """The error of what a pass computes."""
    gradients = list(inputs.differentiated)
    names = ["out"] * (when != BACKWARD) + gradients * (when != FORWARD)
    call = call_of(side, inputs, when)
    # Memory that results may get: what a kernel does not write shows as NaN.
    poison = [torch.full_like(t, math.nan) for t in (inputs.q, *inputs.differentiated.values())]
    del poison
    with side.within():
        results = dict(zip(names, call(), strict=True))
    if not side.compiled():
        raise RuntimeError("it ran without being compiled")
    if side.heads_first:
        results = {n: t if n == "bias" else t.transpose(1, 2) for n, t in results.items()}
    error = error_of(samples, results)
    timing = Timing(error=error)
    return timing._replace(reason=f"differs from the formula by {error:.1e}" * timing.wrong)


def timeable(
    side: Side, inputs: Inputs, when: str, eager: bool
) -> tuple[Callable[[], object], bool]:
    """What to time, and whether it calls Python: a replay where the call can be captured.

    Each attempt has a call of its own: a backward pass runs on the stream of its forward pass.
    """
    if not eager:
        try:
            return graphed(held(side, call_of(side, inputs, when))), False
        except Exception:  # it reads from the GPU, or allocates in ways that a graph does not know
            torch.cuda.synchronize()
    return held(side, call_of(side, inputs, when), CALLS if eager else 1), True


def held(side: Side, call: Call, times: int = 1) -> Callable[[], None]:
    """The call, made that often, within what the side wants."""

    def calls() -> None:
        with side.within():
            for _ in range(times):
                call()

    return calls


# ------------------------------------------------------------------ what is right


class Sample(NamedTuple):
    """A key head of a batch entry or sequence, with its query heads, and what results should be there."""

    sequence: spec.Sequence
    batch: slice
    heads: slice
    kv_heads: slice
    expected: dict[str, Tensor]

    def of(self, name: str, t: Tensor) -> Tensor:
        if name == "bias":
            return t[self.batch, self.heads]
        if name in ("k", "v"):
            return self.sequence.of_k(t)[self.batch, :, self.kv_heads]
        return self.sequence.of_q(t)[self.batch, :, self.heads]


def formula(case: Case, inputs: Inputs) -> list[Sample]:
    """The first key head of the first entry and the last one of the last, by the formula in float32."""
    samples = []
    for sequence in spec.sequences(inputs.problem(case)):
        b, _, hkv, _ = sequence.problem.k.shape
        for entry, head in sorted({(0, 0), (b - 1, hkv - 1)}):
            batch, kv_heads = slice(entry, entry + 1), slice(head, head + 1)
            groups = sequence.problem.groups
            heads = slice(head * groups, (head + 1) * groups)
            part = sequence.problem.part(batch, kv_heads)
            dout = sequence.of_q(inputs.dout)[batch, :, heads]
            samples.append(Sample(sequence, batch, heads, kv_heads, _by_formula(part, dout)))
    return samples


def _by_formula(problem: spec.Problem, dout: Tensor) -> dict[str, Tensor]:
    """out and gradients of a dense problem, a block of rows at a time."""
    q, k, v = (t.float() for t in problem[:3])
    problem = problem._replace(q=q, k=k, v=v)
    step = max(1, BLOCK_SCORES // (q.shape[2] * k.shape[1]))
    out = torch.cat(
        [
            dense.forward(*dense.block(problem, torch.float32, *rows))[0].transpose(1, 2)
            for rows in dense.row_blocks(0, q.shape[1], step)
        ],
        dim=1,
    )
    grads = zero_gradients(problem)
    dense.backward_in_blocks(problem, dout, None, grads, torch.float32, step)
    expected = {"out": out, "q": grads.q, "k": grads.k, "v": grads.v}
    bias = grads.scores.bias
    return expected if bias is None else {**expected, "bias": bias}


def error_of(samples: Sequence[Sample], results: Mapping[str, Tensor]) -> float:
    """The largest ‖got − expected‖ / ‖expected‖ among results; infinite if one is not finite anywhere."""
    largest = 0.0
    for name, t in results.items():
        if not bool(t.isfinite().all()):
            return math.inf
        difference = size = 0.0
        for sample in samples:
            expected = sample.expected[name]
            got = sample.of(name, t).float()
            difference += float((got - expected).square().sum(dtype=torch.float64))
            size += float(expected.square().sum(dtype=torch.float64))
        largest = max(largest, math.sqrt(difference / size))
    return largest


# ------------------------------------------------------------------ compiling ahead


@contextmanager
def compiling_ahead(
    cases: Sequence[Case],
    passes: Sequence[str],
    device: torch.device,
    workers: int,
    seconds: float,
) -> Iterator[Callable[[], None]]:
    """Makes calls that compile something in worker processes, whose caches on disk this one reads.

    The function that it gives waits for them, until a share of the seconds has passed. What fails there
    will fail here again, and say why.
    """
    deadline = time.monotonic() + COMPILING_SHARE * seconds
    if not workers:
        yield lambda: None
        return
    jobs = [(case, name, passes, device) for case in cases for name in compiled_sides(case)]
    with multiprocessing.get_context("spawn").Pool(workers, start_worker) as pool:
        answers = [pool.apply_async(make_calls, job) for job in jobs]
        yield lambda: wait_for(answers, deadline)


def wait_for(answers: Sequence[Any], deadline: float) -> None:
    """Until all are ready, or the deadline has passed, or none has become ready for long."""
    left, changed = list(answers), time.monotonic()
    while left and time.monotonic() < min(deadline, changed + PATIENCE):
        time.sleep(0.02)
        before, left = left, [answer for answer in left if not answer.ready()]
        if len(left) < len(before):
            changed = time.monotonic()


def compiled_sides(case: Case) -> list[str]:
    """The sides of a case whose kernels are compiled when they are called."""
    return ["Flex"] * ("Flex" in case.peers) + [name for name in BACKENDS if name not in PLAIN]


def make_calls(case: Case, name: str, passes: Sequence[str], device: torch.device) -> None:
    """The passes of one side, once each."""
    inputs = random_inputs(case, device)
    if name in BACKENDS and name not in serving(case, inputs):
        return
    side = (PEERS[name] if name in PEERS else ours(name))(case, inputs)
    for when in passes:
        if has(name, when, case, inputs):
            with side.within():
                call_of(side, inputs, when)()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
