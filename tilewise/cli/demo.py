"""``tilewise demo``: five demonstrations, each with a check that can fail."""

import shutil
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tilewise.cli.messages import Language, message

MAX_COLUMNS = 100
PICTURED = (2, 4)  # the demonstrations that have a plot


def demo(
    lang: Annotated[Language, typer.Option(help="Language of the text.")] = Language.EN,
    only: Annotated[
        int | None, typer.Option(min=1, max=5, help="Run this demonstration alone.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(file_okay=False, help="Also write plots (PNG) to this folder.")
    ] = None,
) -> None:
    """Show on this machine that it is exact, what it saves, and a language model that runs on it.

    1 online softmax, 2 forward, 3 backward, 4 memory, 5 a language model. Exit code 1 if a check
    fails.
    """
    if plot is not None and find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib, which is not installed: pip install matplotlib")
    if plot is not None and only not in (None, *PICTURED):
        drawn = " and ".join(map(str, PICTURED))
        raise ValueError(f"--plot draws demonstrations {drawn}, got --only {only}")
    from tilewise.cli.demonstrations import DEMONSTRATIONS

    screen = Screen(lang)
    numbers = range(1, len(DEMONSTRATIONS) + 1) if only is None else [only]
    outcomes = {number: DEMONSTRATIONS[number - 1](screen, number) for number in numbers}

    if plot is not None:
        measured = [usage for outcome in outcomes.values() for usage in outcome.measured]
        from tilewise.cli.plot import write

        for path in write(plot, outcomes, measured, lang):
            screen.say("plot.written", path=path)

    screen.line()
    for verdict in ("passed", "not run", "failed"):
        having = [str(n) for n, outcome in outcomes.items() if outcome.verdict == verdict]
        if having:
            screen.say("summary", verdict=screen.text(verdict), numbers=", ".join(having))
    if any(outcome.verdict == "failed" for outcome in outcomes.values()):
        raise typer.Exit(1)


class Screen:
    """Where a demonstration speaks: at most 100 columns, and plain text unless on a terminal."""

    def __init__(self, language: Language) -> None:
        columns = shutil.get_terminal_size(fallback=(MAX_COLUMNS, 24)).columns
        self.language = language
        self.console = Console(
            width=min(MAX_COLUMNS, columns),
            force_terminal=sys.stdout.isatty(),
            highlight=False,
            markup=False,
        )

    def text(self, key: str, **values: object) -> str:
        return message(self.language, key, **values)

    def line(self, text: str = "", style: str | None = None) -> None:
        self.console.print(text, style=style)

    def say(self, key: str, **values: object) -> None:
        self.line(self.text(key, **values))

    def announce(self, key: str) -> None:
        """One line of what takes long, where `progress` does not show."""
        if not self.console.is_terminal:
            self.say(key)

    def heading(self, number: int, title: str) -> None:
        self.line()
        self.line(self.text("demo", number=number, title=self.text(title)), style="bold cyan")

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """The first column is a name, the others are numbers."""
        table = Table(box=box.SIMPLE_HEAD, header_style="bold")
        for index, column in enumerate(columns):
            table.add_column(column, justify="right" if index else "left")
        for row in rows:
            table.add_row(*row)
        self.console.print(table)

    def check(self, passed: bool, key: str, **values: object) -> None:
        verdict = self.text("passed" if passed else "failed")
        style = "green" if passed else "bold red"
        self.line(self.text(key, verdict=verdict, **values), style=style)

    def progress(self) -> Progress:
        """A bar for long work; it leaves nothing behind, and shows on a terminal only."""
        return Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
