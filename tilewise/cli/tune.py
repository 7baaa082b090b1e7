"""``tilewise tune``: the fastest tiles of each kernel on this GPU, written as a table."""

import datetime
import functools
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from typer import Option

if TYPE_CHECKING:
    from tilewise.tuning.config import Config, Key
    from tilewise.tuning.search import Compiler, Measure, Outcome, Winner

MAX_COLUMNS = 100


def tune(
    operation: Annotated[
        list[str] | None, Option(help="forward, queries, keys or bias; may be repeated.")
    ] = None,
    head_dim: Annotated[list[int] | None, Option(help="May be repeated.")] = None,
    mask: Annotated[
        list[str] | None, Option(help="full, band or general; may be repeated.")
    ] = None,
    length: Annotated[list[str] | None, Option(help="short or long; may be repeated.")] = None,
    bits: Annotated[list[int] | None, Option(help="16, 32 or 64; 16 if not given.")] = None,
    seconds: Annotated[float, Option(min=0, help="Begin nothing after this time.")] = math.inf,
    workers: Annotated[
        int | None, Option(min=1, help="Processes that compile.", show_default="cores − 1")
    ] = None,
    out: Annotated[
        Path | None, Option(dir_okay=False, help="The table.", show_default="that of this device")
    ] = None,
) -> None:
    """Search for the fastest tiles of each kernel on this GPU and write them to a table.

    Candidates are compiled by worker processes, checked and timed; the table is written after every
    kernel, so an interrupted search keeps what it has found. Entries that an existing table has for
    other kernels stay.
    """
    import torch

    if find_spec("triton") is None:
        raise ValueError("tilewise tune needs Triton, which comes with PyTorch for CUDA")
    from tilewise.tuning import config, search
    from tilewise.tuning.workers import cores

    options = {
        "operation": (operation, config.OPERATIONS),
        "head-dim": (head_dim, search.HEAD_DIMS),
        "mask": (mask, config.MASKS),
        "length": (length, tuple(search.LENGTHS)),
        "bits": (bits, tuple(search.DTYPES)),
    }
    for name, (given, known) in options.items():
        for value in given or ():
            if value not in known:
                wanted = f"must be one of {', '.join(map(str, known))}, got {value}"
                raise typer.BadParameter(wanted, param_hint=f"--{name}")
    if torch.version.cuda is None or not torch.cuda.is_available():
        raise ValueError("tilewise tune needs an NVIDIA GPU and PyTorch for CUDA")
    chosen = search.keys(
        operation or config.OPERATIONS,
        bits or (16,),
        head_dim or search.HEAD_DIMS,
        mask or config.MASKS,
        length or tuple(search.LENGTHS),
    )
    deadline = time.monotonic() + seconds
    device = torch.device("cuda", torch.cuda.current_device())
    gpu = search.gpu(device)
    recorder = Recorder(out or config.table_path(gpu.name), about(gpu.name))
    tried = {key: search.candidates(key, gpu.shared) for key in chosen}
    bench = functools.partial(search.Workbench, device=device)
    with search.compiler(gpu.target, gpu.shared, workers or max(1, cores() - 1)) as compiler:
        run(tried, compiler, bench, recorder, deadline)


def about(device: str) -> dict[str, str]:
    """Where the numbers of a table come from."""
    import torch
    import triton

    import tilewise

    return {
        "date": datetime.date.today().isoformat(),
        "device": device,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "tilewise": tilewise.__version__,
        "command": " ".join(["tilewise", *sys.argv[1:]]),
    }


def run(
    tried: "Mapping[Key, Sequence[Config]]",
    compiler: "Compiler",
    bench: "Callable[..., Measure]",
    recorder: "Recorder",
    deadline: float,
) -> None:
    """Searches and writes; what there is of the winners is shown even if it is interrupted."""
    from tilewise.tuning import search

    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)

    def workbench(key: "Key") -> "Measure":
        def failed(config: "Config", reason: str) -> None:
            console.print(f"{described(key)}: {spelled(config)}: {reason}")

        return bench(key, failed=failed)

    outcomes = recorder.outcomes
    try:
        with _progress(console) as progress:
            task = progress.add_task("", total=sum(map(len, tried.values())))
            for outcome in search.search(
                tried, compiler, workbench, lambda count: progress.advance(task, count), deadline
            ):
                recorder.add(outcome)
                progress.update(task, description=described(outcome.key))
                if not console.is_terminal or outcome.winner is None:
                    done = f"[{len(outcomes)}/{len(tried)}]"
                    console.print(f"{done} {described(outcome.key)}: {result(outcome)}")
    finally:
        winners = [outcome.winner for outcome in outcomes if outcome.winner is not None]
        if winners:
            show(winners)
            print(f"Written: {recorder.path}")
        if len(winners) < len(tried):
            print(f"Not tuned: {len(tried) - len(winners)} of {len(tried)} kernels")


class Recorder:
    """Writes a table anew with every winner; keeps the entries of an existing one for other keys."""

    def __init__(self, path: Path, about: dict[str, str]) -> None:
        from tilewise.tuning.config import read_table

        self.path, self._about = path, about
        self._configs: dict[Key, Config] = read_table(path)
        self.outcomes: list[Outcome] = []

    def add(self, outcome: "Outcome") -> None:
        from tilewise.tuning.config import write_table

        self.outcomes.append(outcome)
        if outcome.winner is not None:
            self._configs[outcome.key] = outcome.winner.config
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_table(self.path, self._configs, self._about)


def show(winners: "Sequence[Winner]") -> None:
    """The table of winners."""
    console = Console(highlight=False, markup=False)
    console.width = min(console.width, MAX_COLUMNS) if console.is_terminal else MAX_COLUMNS
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for name in ("operation", "bits", "D", "mask", "length", "tile", "warps", "stages"):
        text = name in ("operation", "mask", "length")
        table.add_column(name, justify="left" if text else "right", no_wrap=True)
    for name in ("timed", "ms", "heuristic ms", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    for winner in winners:
        config = winner.config
        table.add_row(
            *map(str, winner.key),
            f"{config.block_q}×{config.block_k}",
            *map(str, (config.num_warps, config.num_stages, winner.timed)),
            f"{winner.milliseconds:.3f}",
            f"{winner.heuristic_milliseconds:.3f}",
            f"{winner.speedup:.2f}",
        )
    console.print(table)


def described(key: "Key") -> str:
    return f"{key.operation} {key.bits} bits D={key.head_dim} {key.mask} {key.length}"


def result(outcome: "Outcome") -> str:
    winner = outcome.winner
    if winner is None:
        return outcome.note
    figures = f"{winner.milliseconds:.3f} ms, {winner.speedup:.2f} × the heuristic's speed"
    return f"{spelled(winner.config)}, {figures}"


def spelled(config: "Config") -> str:
    tile = f"{config.block_q}×{config.block_k}"
    return f"{tile}, {config.num_warps} warps, {config.num_stages} stages"


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
