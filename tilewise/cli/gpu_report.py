"""What ``tilewise bench gpu`` shows and writes: tables, rows of a CSV file, plots."""

from __future__ import annotations

import datetime
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table

import tilewise
from tilewise.cli.bench import append_csv, progress_lines, tables
from tilewise.cli.bench_gpu import TOLERANCE, Outcome, Timing
from tilewise.cli.gpu_cases import DTYPE, EAGER, PASSES, Case
from tilewise.cli.gpu_sides import PEERS
from tilewise.dispatch import BACKENDS

# In the order of the tables' columns; a narrow header where the name is wide.
HEADERS = {name: name for name in (*BACKENDS, *PEERS)} | {
    "efficient": "effi-\ncient",
    "flash-attn": "flash-\nattn",
    "xformers": "xfor-\nmers",
}


def environment() -> dict[str, str]:
    """Where and when a figure was taken."""
    import triton

    return {
        "date": datetime.date.today().isoformat(),
        "GPU": torch.cuda.get_device_name(),
        "driver": _driver(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "tilewise": tilewise.__version__,
    }


def _driver() -> str:
    """Its version; empty where nothing says it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""
    return next(iter(answer.split()), "")


# ------------------------------------------------------------------ rows


def rows(outcome: Outcome) -> Iterator[dict[str, str]]:
    """The cells of each backend beside each peer; one row where there is no peer."""
    for backend, ours in outcome.ours.items():
        for peer, theirs in outcome.peers.items() or (("", Timing()),):
            yield _row(outcome, backend, ours, peer, theirs)


def _row(outcome: Outcome, backend: str, ours: Timing, peer: str, theirs: Timing) -> dict[str, str]:
    case = outcome.case
    notes = [f"{name}: {t.reason}" for name, t in ((backend, ours), (peer, theirs)) if t.reason]
    return {
        "case": case.name,
        "dtype": str(DTYPE).removeprefix("torch."),
        "B": str(case.batch),
        "S": str(case.length),
        "H": str(case.heads),
        "Hkv": str(case.kv_heads),
        "D": str(case.head_dim),
        "mask": case.masked,
        "pass": outcome.when,
        "backend": backend,
        "ms": number(ours.milliseconds, 4),
        "TFLOP/s": number(speed(outcome, ours), 1),
        "peer": peer,
        "peer ms": number(theirs.milliseconds, 4),
        "ratio": number(_ratio(ours.milliseconds, theirs.milliseconds), 3),
        "error": "" if ours.error is None else f"{ours.error:.1e}",
        "eager": " ".join(name for name, t in ((backend, ours), (peer, theirs)) if t.eager),
        "check": "WRONG" if ours.wrong else "failed" if ours.reason else "ok",
        "note": "; ".join(notes),
    }


def number(value: float | None, digits: int) -> str:
    """A cell; empty where there is no figure."""
    return "" if value is None else f"{value:.{digits}f}"


def _ratio(ours: float | None, theirs: float | None) -> float | None:
    return None if ours is None or theirs is None else theirs / ours


def speed(outcome: Outcome, timing: Timing) -> float | None:
    """TFLOP/s by visible pairs; None where launching is what takes the time."""
    if timing.milliseconds is None or outcome.case.name == EAGER:
        return None
    return outcome.case.flops(outcome.when) / timing.milliseconds / 1e9


# ------------------------------------------------------------------ a run


class Report:
    """What a run has found so far: writes rows at once, shows tables at the end."""

    def __init__(
        self, cases: Sequence[Case], passes: Sequence[str], command: str, csv_file: Path | None
    ) -> None:
        self._wanted = list(product(cases, passes))
        self._csv_file = csv_file
        self._about = {**environment(), "command": command}
        self.say = progress_lines()
        self._outcomes: list[Outcome] = []

    @property
    def failed(self) -> bool:
        """Whether anything of tilewise is wrong or does not run, or nothing was measured."""
        return not self._outcomes or any(outcome.failed for outcome in self._outcomes)

    def add(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)
        self.say(f"[{len(self._outcomes)}/{len(self._wanted)}] {summary(outcome)}")
        if self._csv_file is not None:  # at once: nothing is lost when a long run is interrupted
            for row in rows(outcome):
                append_csv(self._csv_file, {**self._about, **row})

    def show(self, plots: Path | None = None) -> None:
        """Tables, what is missing, and plots into a folder."""
        console = tables()
        about = self._about
        versions = ", ".join(f"{name} {about[name]}" for name in ("driver", "torch", "triton"))
        console.print(f"tilewise {about['tilewise']} on {about['GPU']}, {versions}")
        show(console, self._outcomes)
        done = {(outcome.case, outcome.when) for outcome in self._outcomes}
        left = [f"{case} {when}" for case, when in self._wanted if (case, when) not in done]
        if left:
            console.print(f"Not measured, {len(left)} of {len(self._wanted)}: {'; '.join(left)}")
        if plots is not None:
            for path in write_plots(plots, self._outcomes):
                console.print(f"Written: {path}")


# ------------------------------------------------------------------ tables


def show(console: Console, outcomes: Sequence[Outcome]) -> None:
    """A table of speeds for each pass, one of microseconds, and why figures are missing."""
    if not outcomes:
        return
    eager = [outcome for outcome in outcomes if outcome.case.name == EAGER]
    others = [outcome for outcome in outcomes if outcome.case.name != EAGER]
    for when in PASSES:
        chosen = [outcome for outcome in others if outcome.when == when]
        if chosen:
            console.print(f"\n{when}, TFLOP/s")
            console.print(_table(chosen, "case"))
    if eager:
        console.print("\nµs a call from Python, one after the other")
        console.print(_table(eager, "pass"))
    console.print("ratio: time of the fastest peer / time of the fastest backend")
    console.print(f"largest relative errors: {', '.join(_errors(outcomes))}; allowed: {TOLERANCE}")
    if any(t.eager for outcome in others for t in _timings(outcome).values()):
        console.print("*: called from Python, without a CUDA graph")
    for line in notes(outcomes):
        console.print(line)


def _table(outcomes: Sequence[Outcome], first: str) -> Table:
    """`first` names the first column, "case" or "pass"."""
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False, header_style="bold")
    for name in (first, "mask"):
        table.add_column(name, no_wrap=True)
    there = {name for outcome in outcomes for name in _timings(outcome)}
    names = sorted(there, key=[*HEADERS, "tilewise"].index)
    for header in ("D", "S", *(HEADERS.get(name, name) for name in names), "ratio"):
        table.add_column(header, justify="right", no_wrap=True)
    for outcome in outcomes:
        case, timings = outcome.case, _timings(outcome)
        table.add_row(
            case.name if first == "case" else outcome.when,
            case.masked.removeprefix("window "),
            str(case.head_dim),
            str(case.length),
            *(cell(outcome, timings[name]) if name in timings else "" for name in names),
            _best(outcome),
            style="bold red" if outcome.failed else None,
        )
    return table


def _timings(outcome: Outcome) -> dict[str, Timing]:
    return {**outcome.ours, **outcome.peers}


def cell(outcome: Outcome, timing: Timing) -> str:
    """A speed, or microseconds of an eager case; * where a call could not be captured."""
    if timing.milliseconds is None:
        return "WRONG" if timing.wrong else "–"
    tflops = speed(outcome, timing)
    if tflops is None:
        return f"{1e3 * timing.milliseconds:.1f}"
    return f"{tflops:.0f}" + "*" * timing.eager


def _errors(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """The largest error of each side."""
    largest: dict[str, float] = {}
    for outcome in outcomes:
        for name, timing in _timings(outcome).items():
            if timing.error is not None:
                largest[name] = max(timing.error, largest.get(name, 0.0))
    return (f"{name} {error:.1e}" for name, error in largest.items())


def _best(outcome: Outcome) -> str:
    ours, theirs = (
        min((t.milliseconds for t in side.values() if t.milliseconds is not None), default=None)
        for side in (outcome.ours, outcome.peers)
    )
    return number(_ratio(ours, theirs), 2)


def notes(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Why figures are missing: each reason once, with what it holds for."""
    found: dict[str, list[str]] = {}
    for outcome in outcomes:
        for name, timing in _timings(outcome).items():
            if timing.reason:
                where = f"{outcome.case} {outcome.when}"
                found.setdefault(f"{name}: {timing.reason}", []).append(where)
    for line, places in found.items():
        more = f" and {len(places) - 1} more" * (len(places) > 1)
        yield f"{line} ({places[0]}{more})"


def summary(outcome: Outcome) -> str:
    """An outcome in a line."""
    unit = "µs" if outcome.case.name == EAGER else "TFLOP/s"
    cells = (f"{name} {cell(outcome, t)}" for name, t in _timings(outcome).items())
    return f"{outcome.case} {outcome.when}, {unit}: {', '.join(cells)}"


# ------------------------------------------------------------------ plots


def write_plots(folder: Path, outcomes: Sequence[Outcome]) -> list[Path]:
    """A picture for each pass: speeds of the dense cases by S, for each D and mask."""
    paths = []
    for when in PASSES:
        dense = [o for o in outcomes if o.case.name == "dense" and o.when == when]
        if dense:
            folder.mkdir(parents=True, exist_ok=True)
            paths.append(_plot(folder / f"{when}.png", dense))
    return paths


def _plot(path: Path, outcomes: Sequence[Outcome]) -> Path:
    import matplotlib

    matplotlib.use("Agg")  # draws into files; needs no screen
    import matplotlib.pyplot as plt

    widths = sorted({outcome.case.head_dim for outcome in outcomes})
    masks = [mask for mask in ("full", "causal") if any(o.case.mask == mask for o in outcomes)]
    figure, panels = plt.subplots(
        len(masks),
        len(widths),
        figsize=(5 * len(widths), 4 * len(masks)),
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    twenty = plt.colormaps["tab20"].colors  # type: ignore[attr-defined]
    colors = [*twenty[::2], *twenty[1::2]]
    lines = {}
    for axes, (mask, width) in zip(
        panels.flat, ((m, w) for m in masks for w in widths), strict=True
    ):
        chosen = [o for o in outcomes if (o.case.mask, o.case.head_dim) == (mask, width)]
        for place, (name, points) in enumerate(_curves(chosen).items()):
            ours = name in BACKENDS
            (lines[name],) = axes.plot(
                list(points),
                list(points.values()),
                "o-" if ours else ".--",
                color=colors[list(HEADERS).index(name)],
                linewidth=2 if ours else 1,
                zorder=3 - place / 100,
            )
        axes.set_title(f"{outcomes[0].when}, D = {width}, {mask}")
        axes.set_xscale("log", base=2)
        lengths = sorted({outcome.case.length for outcome in chosen})
        axes.set_xticks(lengths, [str(n) for n in lengths])
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    for axes in panels[-1]:
        axes.set_xlabel("S")
    for axes in panels[:, 0]:
        axes.set_ylabel("TFLOP/s")
    figure.legend(
        lines.values(), lines, loc="outside lower center", ncols=len(lines), frameon=False
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def _curves(outcomes: Sequence[Outcome]) -> Mapping[str, dict[int, float]]:
    """Speeds by S of each side."""
    curves: dict[str, dict[int, float]] = {}
    for outcome in sorted(outcomes, key=lambda o: o.case.length):
        for name, timing in _timings(outcome).items():
            tflops = speed(outcome, timing)
            if tflops is not None:
                curves.setdefault(name, {})[outcome.case.length] = tflops
    return curves
