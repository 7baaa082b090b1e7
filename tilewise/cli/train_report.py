"""What ``tilewise bench train`` shows and writes: a table, rows of a CSV file, a plot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table

from tilewise.cli import bench, gpu_report
from tilewise.cli.bench_train import (
    OURS,
    OUT_OF_MEMORY,
    STANDARD,
    STEPS,
    TOLERANCE,
    Outcome,
    Sizes,
)
from tilewise.cli.gpu_report import number
from tilewise.cli.measure import dtype_on


class Ratios:
    """How the outcomes of a length compare with each other; None where a figure is missing."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        self._by_name = {outcome.attention: outcome for outcome in outcomes}

    def speed_to_standard(self, outcome: Outcome) -> float | None:
        return _ratio(outcome.tokens_per_second, self._by_name[STANDARD].tokens_per_second)

    def memory_to_standard(self, outcome: Outcome) -> float | None:
        """Of steps of the same size."""
        standard = self._by_name[STANDARD]
        if outcome.batch != standard.batch:
            return None
        return _ratio(outcome.peak_bytes, standard.peak_bytes)

    def speed_to_best(self, outcome: Outcome) -> float | None:
        """Of tilewise to the fastest other."""
        if outcome.attention != OURS:
            return None
        others = (o.tokens_per_second for o in self._by_name.values() if o.attention != OURS)
        best = max((speed for speed in others if speed is not None), default=None)
        return _ratio(outcome.tokens_per_second, best)


def _ratio(ours: float | None, theirs: float | None) -> float | None:
    return ours / theirs if ours and theirs else None


# ------------------------------------------------------------------ a run


class Report:
    """What a run has found so far: writes rows at once, shows the table and the plot at the end."""

    def __init__(
        self, sizes: Sizes, device: torch.device, command: str, csv_file: Path | None
    ) -> None:
        here = gpu_report.environment() if device.type == "cuda" else bench.environment()
        self._sizes, self._dtype = sizes, dtype_on(device.type)
        self._here = here
        self._about = {
            **here,
            "command": command,
            "model": described(sizes),
            "dtype": str(self._dtype).removeprefix("torch."),
        }
        self._csv_file = csv_file
        self.say = bench.progress_lines()
        self._lengths: list[Sequence[Outcome]] = []

    @property
    def _outcomes(self) -> list[Outcome]:
        return [outcome for length in self._lengths for outcome in length]

    @property
    def failed(self) -> bool:
        """Whether losses differ, or tilewise's are not compared, or it does not run where there is room."""
        outcomes = self._outcomes
        ours = [outcome for outcome in outcomes if outcome.attention == OURS]
        return (
            any(outcome.wrong for outcome in outcomes)
            or all(outcome.difference is None for outcome in ours)
            or any(outcome.reason not in ("", OUT_OF_MEMORY) for outcome in ours)
        )

    def add(self, outcomes: Sequence[Outcome]) -> None:
        self._lengths.append(outcomes)
        for outcome in outcomes:
            self.say(f"n = {outcome.length}, tokens/s: {outcome.attention} {speed_cell(outcome)}")
        if self._csv_file is not None:  # at once: nothing is lost when a long run is interrupted
            for row in rows(outcomes, self._sizes):
                bench.append_csv(self._csv_file, {**self._about, **row})

    def show(self, plots: Path | None = None) -> None:
        """The table, notes below it, and a plot into a folder."""
        console = bench.tables()
        console.print(
            ", ".join(f"{name} {value}" for name, value in self._here.items() if name != "date")
        )
        console.print(
            f"{self._about['model']}, {self._about['dtype']}, AdamW, "
            f"{self._sizes.tokens} tokens a step where there is room"
        )
        console.print(table(self._lengths))
        outcomes = self._outcomes
        if any(outcome.difference is not None for outcome in outcomes):
            console.print(
                f"differs: largest relative difference to {STANDARD}'s losses in {STEPS} steps; "
                f"allowed: {TOLERANCE[self._dtype]}"
            )
        elif outcomes:
            console.print("losses were not compared")
        for outcome in outcomes:
            if note := note_of(outcome, self._sizes):
                console.print(f"{outcome.attention}, n = {outcome.length}: {note}")
        left = [str(n) for n in self._sizes.lengths[len(self._lengths) :]]
        if left:
            console.print(f"Not measured: n = {', '.join(left)}")
        if plots is not None and outcomes:
            plots.mkdir(parents=True, exist_ok=True)
            console.print(f"Written: {plot(plots / 'train.png', outcomes, self._about)}")


def gigabytes(count: int | None) -> float | None:
    return None if count is None else count / 1e9


def described(sizes: Sizes) -> str:
    shape = sizes.shape
    return f"GPT-2, {shape.layers} layers, {shape.heads} heads, width {shape.width}"


def note_of(outcome: Outcome, sizes: Sizes) -> str:
    """What there is to say of a row besides its figures."""
    if outcome.reason:
        return outcome.reason
    notes = []
    if outcome.wrong:
        notes.append(f"losses differ from {STANDARD}'s by {difference_cell(outcome)}")
    if outcome.batch < sizes.batch(outcome.length):
        failed = 2 * outcome.batch
        notes.append(f"{OUT_OF_MEMORY} with {failed} sequences a step, run with {outcome.batch}")
    return "; ".join(notes)


# ------------------------------------------------------------------ rows


def rows(outcomes: Sequence[Outcome], sizes: Sizes) -> Iterator[dict[str, str]]:
    """The cells of each attention at a length; empty where there is no figure."""
    ratios = Ratios(outcomes)
    for outcome in outcomes:
        yield {
            "n": str(outcome.length),
            "attention": outcome.attention,
            "batch": str(outcome.batch),
            "ms": number(outcome.milliseconds, 2),
            "tokens/s": speed_cell(outcome),
            "to standard": number(ratios.speed_to_standard(outcome), 3),
            "to best peer": number(ratios.speed_to_best(outcome), 3),
            "peak GB": number(gigabytes(outcome.peak_bytes), 4),
            "GB to standard": number(ratios.memory_to_standard(outcome), 3),
            "losses": " ".join(f"{loss:.5f}" for loss in outcome.losses),
            "difference": difference_cell(outcome),
            "check": check_cell(outcome),
            "note": note_of(outcome, sizes),
        }


def speed_cell(outcome: Outcome) -> str:
    if outcome.tokens_per_second is None:
        return OUT_OF_MEMORY if outcome.reason == OUT_OF_MEMORY else "failed"
    return number(outcome.tokens_per_second, 0)


def difference_cell(outcome: Outcome) -> str:
    return "" if outcome.difference is None else f"{outcome.difference:.1e}"


def check_cell(outcome: Outcome) -> str:
    if outcome.difference is None:
        return "" if outcome.reason in ("", OUT_OF_MEMORY) else "failed"
    return "WRONG" if outcome.wrong else "ok"


# ------------------------------------------------------------------ the table


def table(lengths: Sequence[Sequence[Outcome]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("\nn", justify="right", no_wrap=True)
    table.add_column("\nattention", no_wrap=True)
    for header in (
        *("\nbatch", "\ntokens/s", "÷ stan-\ndard", "÷ best\npeer"),
        *("peak\nGB", "÷ stan-\ndard", f"losses\n1 → {STEPS}", "\ndiffers"),
    ):
        table.add_column(header, justify="right", no_wrap=True)
    for outcomes in lengths:
        ratios = Ratios(outcomes)
        for outcome in outcomes:
            losses = outcome.losses
            table.add_row(
                str(outcome.length),
                outcome.attention,
                str(outcome.batch or ""),
                speed_cell(outcome),
                number(ratios.speed_to_standard(outcome), 2),
                number(ratios.speed_to_best(outcome), 2),
                number(gigabytes(outcome.peak_bytes), 2),
                number(ratios.memory_to_standard(outcome), 2),
                f"{losses[0]:.2f} → {losses[-1]:.2f}" if losses else "",
                "WRONG" if outcome.wrong else difference_cell(outcome),
                style="bold red" if outcome.wrong else None,
                end_section=outcome is outcomes[-1],
            )
    return table


# ------------------------------------------------------------------ the plot


def plot(path: Path, outcomes: Sequence[Outcome], about: dict[str, str]) -> Path:
    """Tokens/s and peak memory against n, a line for each attention, and where it ran out of memory."""
    from tilewise.cli.plot import BLUE, GREEN, ORANGE, RED, plt

    figure, panels = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    lengths = sorted({outcome.length for outcome in outcomes})
    # Lines that lie on each other are told apart by width and by the shapes around their points.
    lines: dict[str, dict[str, Any]] = {
        STANDARD: {"color": RED, "marker": "o", "markersize": 6},
        "SDPA": {"color": ORANGE, "marker": "s", "markersize": 12},
        "FA3": {"color": GREEN, "marker": "^", "markersize": 8, "linestyle": "--"},
        OURS: {"color": BLUE, "marker": "o", "markersize": 6, "linewidth": 3, "zorder": 1.5},
    }
    figures: dict[str, Callable[[Outcome], float | None]] = {
        "tokens/s": lambda outcome: outcome.tokens_per_second,
        "peak memory, GB": lambda outcome: gigabytes(outcome.peak_bytes),
    }
    for axes, (label, figure_of) in zip(panels, figures.items(), strict=True):
        for name, line in lines.items():
            mine = [outcome for outcome in outcomes if outcome.attention == name]
            points = [(o.length, y) for o in mine if (y := figure_of(o)) is not None]
            if points:
                axes.plot(*zip(*points, strict=True), label=name, markerfacecolor="none", **line)
        axes.set_ylim(0, 1.1 * axes.dataLim.ymax)
        axes.set_ylabel(label)
        axes.set_xlabel("n")
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [str(n) for n in lengths])
        axes.grid(alpha=0.3)
    without = [f"{o.attention} at n = {o.length}" for o in outcomes if o.reason == OUT_OF_MEMORY]
    if without:
        panels[1].set_title(f"out of memory: {', '.join(without)}", fontsize=10)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    machine = about.get("GPU") or about["cpu"]
    figure.suptitle(f"Training steps of {about['model']}, {about['dtype']}, {machine}")
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path
