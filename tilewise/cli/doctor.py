"""``tilewise doctor``: what is installed here, what works, and whether the results are right."""

import importlib
import math
import multiprocessing
import platform
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import product
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from tilewise.cli.bench import environment
from tilewise.cli.demo import Screen
from tilewise.cli.messages import Language

if TYPE_CHECKING:
    from tilewise.testing import Verdict

DTYPES = ("float64", "float32", "bfloat16", "float16")
QUICK = 8  # every eighth case


def doctor(
    quick: Annotated[bool, typer.Option("--quick", help="A few cases, some seconds.")] = False,
) -> None:
    """Show versions and devices, and judge every backend on this machine.

    The cases of tilewise.testing run forward and backward; the closeness rule compares them with the
    formula. On a GPU kernels are compiled for each case, by as many processes as there are cores. Exit
    code 1 if one fails.
    """
    screen = Screen(Language.EN)
    for line in (*machine(), "", *backends()):
        screen.line(line)
    screen.announce("doctor.starts")
    checkups = examine_all(screen, QUICK if quick else 1)
    screen.table(
        ("cases", "passed", "error / allowed", "worst"),
        [checkup.row() for checkup in checkups],
    )
    wrong = [line for checkup in checkups for line in checkup.wrong()]
    for line in wrong:
        screen.line(line, style="bold red")
    if wrong:
        raise typer.Exit(1)
    screen.line("Every result is within what the closeness rule allows.", style="green")


# ------------------------------------------------------------------ what is here


def machine() -> Iterator[str]:
    """Versions, the CPU and the GPUs."""
    import torch

    names = ("tilewise", "torch", "triton", "numpy")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    yield f"Python {platform.python_version()}, {versions}"
    yield f"CPU: {environment()['cpu']}, threads: {torch.get_num_threads()}"
    gpus = range(torch.cuda.device_count())
    for i in gpus:
        major, minor = torch.cuda.get_device_capability(i)
        yield f"cuda:{i}: {torch.cuda.get_device_name(i)}, capability {major}.{minor}"
    if not gpus:
        yield "no CUDA device"


def version(name: str) -> str:
    try:
        return str(importlib.import_module(name).__version__)
    except ModuleNotFoundError:
        return "not installed"
    except Exception as error:  # installed and broken: a doctor says so and goes on
        return f"does not import ({first_line(error)})"


def devices() -> list[str]:
    import torch

    return ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]


def backends() -> Iterator[str]:
    """Of each backend on each device: in which dtypes it works and how, or why it does not."""
    from tilewise.dispatch import BACKENDS

    for name, device in product(BACKENDS, devices()):
        answers = {dtype: answer(name, device, dtype) for dtype in DTYPES}
        reasons = {dtype: why for dtype, (_, why) in answers.items() if why}
        works = [dtype for dtype in DTYPES if dtype not in reasons]
        if works:
            example = "float32" if "float32" in works else works[0]
            notes = ", ".join(answers[example][0])
            yield f"{name} on {device}: works in {', '.join(works)}" + f" ({notes})" * bool(notes)
            yield from (f"  - {dtype}: {line}" for dtype, why in reasons.items() for line in why)
        else:
            first, *others = reasons.values()
            always = [line for line in first if all(line in why for why in others)]
            elsewhere = any("kernels run on a GPU" in line for line in always)
            yield f"{name} on {device}: " + ("needs a GPU" if elsewhere else "does not work")
            yield from (f"  - {line}" for line in always or first)


def answer(name: str, device: str, dtype: str) -> tuple[list[str], list[str]]:
    """What a backend says of a plain call: notes on how, or reasons why not."""
    import torch

    from tilewise.dispatch import BACKENDS, ON_REQUEST
    from tilewise.testing import CASES, make_call

    try:
        problem = make_call(CASES[0], getattr(torch, dtype), device).problem()
        reasons = BACKENDS[name].unsupported(problem)
        config = {} if reasons else BACKENDS[name].config(problem)
    except Exception as error:  # a device that is there and broken
        return [], [first_line(error)]
    notes = [f"{key}={value}" for key, value in config.items()]
    return notes + ["when asked for by name"] * (name == ON_REQUEST), reasons


# ------------------------------------------------------------------ is it right


class Outcome(NamedTuple):
    """A case that ran: its verdicts, or the error in which it ended."""

    case: str
    verdicts: "Sequence[Verdict]"
    error: str = ""


class Checkup(NamedTuple):
    """The cases of one backend on one device in one dtype; `unserved` of them it does not serve."""

    name: str
    outcomes: list[Outcome]
    unserved: int

    def row(self) -> tuple[str, ...]:
        passed = sum(not wrong_in(outcome) for outcome in self.outcomes)
        parts = [
            (used(verdict), f"{verdict.name}, {outcome.case}")
            for outcome in self.outcomes
            for verdict in outcome.verdicts
        ]
        share, where = max(parts, default=(math.nan, ""))
        return (
            self.name,
            f"{passed}/{len(self.outcomes)}"
            + f", {self.unserved} not served" * bool(self.unserved),
            f"{share:.2g}" if where else "",
            where,
        )

    def wrong(self) -> list[str]:
        return [
            f"{self.name}, {outcome.case}: {line}"
            for outcome in self.outcomes
            for line in wrong_in(outcome)
        ]


def wrong_in(outcome: Outcome) -> list[str]:
    lines = [str(verdict) for verdict in outcome.verdicts if not verdict.passed]
    return lines + [outcome.error] * bool(outcome.error)


def used(verdict: "Verdict") -> float:
    """The part of the allowed error that is used up: by rms or by maximum, whichever is more."""
    pairs = ((verdict.rms, verdict.rms_allowed), (verdict.largest, verdict.largest_allowed))
    return max(
        math.inf if math.isnan(error) else error / (allowed or error or 1.0)
        for error, allowed in pairs
    )


def examine_all(screen: Screen, every: int) -> list[Checkup]:
    """Every backend on every device in every dtype that it serves; a bar shows on a terminal."""
    from tilewise.dispatch import BACKENDS
    from tilewise.testing import CASES

    numbers, kinds = range(0, len(CASES), every), list(product(BACKENDS, devices(), DTYPES))
    checkups = []
    with screen.progress() as progress, processes() as pool:
        # Where kernels have to be compiled first, other processes do it meanwhile.
        elsewhere = {
            (kind, number): pool.submit(examine, number, *kind)
            for kind in kinds
            if compiles_on(kind[1])
            for number in numbers
        }
        task = progress.add_task("", total=len(kinds) * len(numbers))
        for kind in kinds:
            name = f"{kind[0]} on {kind[1]}, {kind[2]}"
            progress.update(task, description=name)
            outcomes = []
            for number in numbers:
                job = elsewhere.get((kind, number))
                outcomes.append(awaited(job, number) if job else examine(number, *kind))
                progress.advance(task)
            ran = [outcome for outcome in outcomes if outcome is not None]
            if ran:
                checkups.append(Checkup(name, ran, len(outcomes) - len(ran)))
    return checkups


@contextmanager
def processes() -> Iterator[ProcessPoolExecutor]:
    """As many as there are cores beside this one's; they start when there is work."""
    from tilewise.tuning.workers import cores, start_worker

    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(max(1, cores() - 1), context, start_worker)
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def compiles_on(device: str) -> bool:
    """Whether backends compile kernels for a device, which takes long."""
    return device.startswith("cuda")


def awaited(job: "Future[Outcome | None]", number: int) -> Outcome | None:
    """The outcome of a case that another process examines."""
    from tilewise.testing import CASES

    try:
        return job.result()
    except BrokenProcessPool as error:
        return Outcome(CASES[number].name, [], f"its process ended: {first_line(error)}")


def examine(number: int, backend: str, device: str, dtype: str) -> Outcome | None:
    """The outcome of a case, or None where the backend says that it does not serve it."""
    import torch

    from tilewise.dispatch import BACKENDS
    from tilewise.testing import CASES, make_call, verify

    case, kind = CASES[number], getattr(torch, dtype)
    try:
        if BACKENDS[backend].unsupported(make_call(case, kind, device).problem()):
            return None
        return Outcome(case.name, verify(case, backend, kind, device))
    except Exception as error:  # whatever a machine comes up with is a finding
        return Outcome(case.name, [], f"{type(error).__name__}: {first_line(error)}")


def first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
