"""``tilewise bench``: measured against what users have today, in one process."""

import csv
import datetime
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:
    import torch

    from tilewise.cli.bench_cpu import Outcome, Sizes

MAX_COLUMNS = 100

bench = typer.Typer(help="Measure speed and memory against PyTorch.")


def _in_a_folder(file: Path | None) -> Path | None:
    """Looked at before anything is measured."""
    if file is not None and not file.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no folder {file.absolute().parent}")
    return file


# Options that more than one command has.
CsvFile = Annotated[
    Path | None,
    typer.Option(
        "--csv", dir_okay=False, callback=_in_a_folder, help="Also append rows to this file."
    ),
]
PlotFolder = Annotated[
    Path | None, typer.Option(file_okay=False, help="Also write plots into this folder.")
]
FA3Folder = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        file_okay=False,
        help="FlashAttention-3: a folder with fa3.so.xz and libcudart.so.12.",
        show_default="the package flash_attn_interface",
    ),
]


def help_without_command(context: typer.Context) -> None:
    """The help of a group of commands that was called alone, which is no error."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@bench.callback(invoke_without_command=True)
def _benches(context: typer.Context) -> None:
    """Measure speed and memory against PyTorch."""
    help_without_command(context)


@bench.command()
def cpu(
    quick: Annotated[bool, typer.Option("--quick", help="A subset, about a minute.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Also S = 16k, which takes long.")] = False,
    only: Annotated[
        str, typer.Option(metavar="TEXT", help="Only cases whose description contains this.")
    ] = "",
    csv_file: CsvFile = None,
) -> None:
    """Ratios to F.scaled_dot_product_attention on one thread, and memory of a long sequence.

    Exit code 1 if a result differs from the peer's.
    """
    from tilewise.cli import bench_cpu

    if quick and full:
        raise typer.BadParameter("--quick and --full exclude each other")
    sizes = bench_cpu.QUICK if quick else bench_cpu.FULL if full else bench_cpu.USUAL
    options = ["--quick"] * quick + ["--full"] * full + [f"--only '{only}'"] * bool(only)
    command = " ".join(["tilewise bench cpu", *options])
    outcomes = []
    for outcome in run_cpu(sizes, only):
        outcomes.append(outcome)
        if csv_file is not None:  # at once: nothing is lost when a long run is interrupted
            append_csv(csv_file, {**environment(), "command": command, **figures(outcome)})
    show(outcomes)
    if any(outcome.wrong for outcome in outcomes):
        raise typer.Exit(1)


@bench.command()
def gpu(
    quick: Annotated[bool, typer.Option("--quick", help="A subset, some five minutes.")] = False,
    only: Annotated[
        str, typer.Option(metavar="TEXT", help="Only cases whose description contains this.")
    ] = "",
    passes: Annotated[
        str,
        typer.Option(
            metavar="PASS,…",
            help="Of forward, backward, both.",
            show_default="all; with --quick the first two",
        ),
    ] = "",
    csv_file: CsvFile = None,
    plot: PlotFolder = None,
    fa3: FA3Folder = None,
    seconds: Annotated[
        float, typer.Option(min=0, help="Begin nothing after this time.")
    ] = math.inf,
    workers: Annotated[
        int | None,
        typer.Option(min=0, help="Processes that compile ahead.", show_default="cores − 1"),
    ] = None,
) -> None:
    """TFLOP/s on this GPU beside PyTorch, FlexAttention and, where they are, other packages.

    Exit code 1 if a result of tilewise is wrong or a backend does not run.
    """
    from tilewise.cli import gpu_cases

    sizes = gpu_cases.QUICK if quick else gpu_cases.USUAL
    wanted = tuple(passes.replace(",", " ").split()) or sizes.passes
    for name in wanted:
        if name not in gpu_cases.PASSES:
            known = ", ".join(gpu_cases.PASSES)
            raise typer.BadParameter(f"must be of {known}; got {name!r}", param_hint="--passes")
    chosen = [case for case in gpu_cases.cases(sizes) if only in str(case)]
    if not chosen:
        raise typer.BadParameter(f"no case's description contains {only!r}", param_hint="--only")
    device = _gpu("tilewise bench gpu")
    _check_plot(plot)
    # Read when a compiler is imported: one thread in each process, and one cache for them all.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    os.environ.setdefault("TRITON_CACHE_DIR", str(Path.home() / ".triton" / "cache"))
    from tilewise.cli import bench_gpu, gpu_report
    from tilewise.tuning.workers import cores

    workers = max(1, cores() - 1) if workers is None else workers
    options = ["--quick"] * quick + [f"--only '{only}'"] * bool(only)
    options += [f"--passes {','.join(wanted)}"] * bool(passes)
    report = gpu_report.Report(chosen, wanted, " ".join(["tilewise bench gpu", *options]), csv_file)
    try:
        for outcome in bench_gpu.run_all(chosen, wanted, device, seconds, workers, fa3, report.say):
            report.add(outcome)
    finally:
        report.show(plot)
    if report.failed:
        raise typer.Exit(1)


@bench.command()
def train(
    quick: Annotated[
        bool, typer.Option("--quick", help="A tiny model, some seconds, without a GPU too.")
    ] = False,
    csv_file: CsvFile = None,
    plot: PlotFolder = None,
    fa3: FA3Folder = None,
) -> None:
    """Tokens/s and peak memory of training GPT-2 small (124M) with different attentions.

    These are the standard form, F.scaled_dot_product_attention, FlashAttention-3 where it is, and tilewise.
    Exit code 1 if losses differ from those with the standard form, or tilewise does not run.
    """
    import torch

    from tilewise.cli import bench_train, measure, train_report

    if quick:
        sizes, device = bench_train.QUICK, torch.device(measure.device_here())
    else:
        sizes, device = (
            bench_train.USUAL,
            _gpu("tilewise bench train", "; with --quick it runs on a CPU too"),
        )
    _check_plot(plot)
    command = " ".join(["tilewise bench train", *["--quick"] * quick])
    report = train_report.Report(sizes, device, command, csv_file)
    try:
        for outcomes in bench_train.run_all(sizes, device, fa3, report.say):
            report.add(outcomes)
    finally:
        report.show(plot)
    if report.failed:
        raise typer.Exit(1)


def _check_plot(folder: Path | None) -> None:
    """Before anything is measured: that plots can be drawn, and have a place."""
    if folder is None:
        return
    if find_spec("matplotlib") is None:
        raise ValueError("--plot needs the package matplotlib")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--plot: there can be no folder {folder}: {error.strerror}") from None


def _gpu(command: str, instead: str = "") -> "torch.device":
    import torch

    if torch.version.cuda is None or not torch.cuda.is_available():
        raise ValueError(f"{command} needs an NVIDIA GPU and PyTorch for CUDA{instead}")
    return torch.device("cuda", torch.cuda.current_device())


def tables() -> Console:
    """Where results are shown: on stdout, no wider than is read well. On a narrower terminal lines wrap:
    figures must not be cut."""
    return Console(width=MAX_COLUMNS, highlight=False, markup=False)


def progress_lines() -> Callable[[str], None]:
    """A function that prints a line to stderr, with the seconds since now."""
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    start = time.monotonic()
    return lambda line: console.print(f"{time.monotonic() - start:.0f} s: {line}")


def run_cpu(sizes: "Sizes", only: str = "") -> "Iterator[Outcome]":
    """Outcomes of the cases whose description contains `only`; progress goes to stderr."""
    from tilewise.cli import bench_cpu

    cases = [case for case in bench_cpu.cases(sizes) if only in str(case)]
    if not cases:
        raise typer.BadParameter(f"no case's description contains {only!r}", param_hint="--only")
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    with bench_cpu.one_thread(), _progress(console) as progress:
        task = progress.add_task("", total=len(cases))
        for number, case in enumerate(cases, 1):
            progress.update(task, description=str(case))
            outcome = bench_cpu.run(case, sizes.seconds)
            progress.advance(task)
            if not console.is_terminal:
                result = outcome.note or f"ratio {outcome.ratio:.2f}"
                console.print(f"[{number}/{len(cases)}] {case}: {result}")
            yield outcome


def _progress(console: Console) -> Progress:
    """A bar that leaves nothing behind, and shows on a terminal only."""
    return Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def show(outcomes: "Sequence[Outcome]") -> None:
    """The table of outcomes, and notes below it."""
    console = tables()
    here = environment()
    console.print(
        f"tilewise {here['tilewise version']}, torch {here['torch']}, {here['cpu']}, one thread"
    )
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for name in figures(outcomes[0]):
        if name != "MB":
            text = name in ("case", "dtype", "mask", "pass", "peer", "check")
            header = name.replace(" ", "\n")
            table.add_column(header, justify="left" if text else "right", no_wrap=True)
    for outcome in outcomes:
        row = figures(outcome)
        del row["MB"]
        table.add_row(*row.values(), style="bold red" if outcome.wrong else None)
    console.print(table)
    for outcome in outcomes:
        if outcome.note:
            console.print(f"{outcome.case}: {outcome.note}")


def append_csv(path: Path, row: dict[str, str]) -> None:
    """Adds a row; the names of the columns go before the first row of a file.

    Raises ValueError if the file has other columns.
    """
    with path.open("a+", newline="", encoding="utf-8") as file:
        file.seek(0)
        columns = next(csv.reader(file), None)
        writer = csv.DictWriter(file, list(row))
        if columns is None:
            writer.writeheader()
        elif columns != list(row):
            raise ValueError(f"{path} holds rows with other columns: another file is needed")
        writer.writerow(row)


def figures(outcome: "Outcome") -> dict[str, str]:
    """The cells of a row by the names of their columns; empty where there is no figure."""
    case = outcome.case

    def number(value: float | None, digits: int) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    def ms(seconds: float | None) -> str:
        return "" if seconds is None else f"{1e3 * seconds:.2f}"

    checked = outcome.ratio is not None
    return {
        "case": case.name,
        "dtype": case.dtype,
        "S": str(case.keys),
        "D": str(case.head_dim),
        "mask": str(case.mask),
        "pass": case.when,
        "tilewise ms": ms(outcome.seconds),
        "peer": case.peer,
        "peer ms": ms(outcome.peer_seconds),
        "ratio": number(outcome.ratio, 2),
        "GF/s": number(outcome.gflops, 1),
        "MB": number(outcome.megabytes, 1),
        "check": "WRONG" if outcome.wrong else "ok" if checked else "",
    }


def environment() -> dict[str, str]:
    """Where and when a figure was taken."""
    import torch

    import tilewise

    return {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        "cpu": f"{_cpu_name()} ({torch.backends.cpu.get_cpu_capability()})",
        "torch": torch.__version__,
        "tilewise version": tilewise.__version__,
    }


def _cpu_name() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
