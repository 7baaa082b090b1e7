"""``tilewise tune``: the fastest tiles of each kernel on this GPU, written as a table."""

import datetime
import math
import os
import sys
import time
from collections.abc import Sequence
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
    from tilewise.tuning.search import Outcome, Winner

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

    if find_spec("triton") is None or torch.version.cuda is None or not torch.cuda.is_available():
        raise ValueError(
            "tilewise tune needs an NVIDIA GPU, and PyTorch with CUDA and Triton for it"
        )
    import triton

    import tilewise
    from tilewise.tuning import config, search

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
                wanted = ", ".join(map(str, known))
                raise typer.BadParameter(
                    f"must be of {wanted}, got {value}", param_hint=f"--{name}"
                )
    chosen = search.keys(
        operation or config.OPERATIONS,
        bits or (16,),
        head_dim or search.HEAD_DIMS,
        mask or config.MASKS,
        length or tuple(search.LENGTHS),
    )
    deadline = time.monotonic() + seconds
    device = torch.device("cuda", torch.cuda.current_device())
    name = torch.cuda.get_device_name(device)
    driver = triton.runtime.driver.active
    shared = driver.utils.get_device_properties(device.index)["max_shared_mem"]
    path = out or config.table_path(name)
    about = {
        "date": datetime.date.today().isoformat(),
        "device": name,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "tilewise": tilewise.__version__,
        "command": " ".join(["tilewise", *sys.argv[1:]]),
    }
    recorder = Recorder(path, about)
    target = driver.get_current_target()

    def workbench(key: "Key") -> search.Workbench:
        torch.cuda.empty_cache()  # graphs of the key before
        return search.Workbench(key, device)

    tried = {key: search.candidates(key, shared) for key in chosen}
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    try:
        with (
            search.compiler(target, shared, workers or max(1, cores() - 1)) as compiler,
            _progress(console) as progress,
        ):
            task = progress.add_task("", total=sum(map(len, tried.values())))
            for outcome in search.search(
                tried, compiler, workbench, lambda n: progress.advance(task, n), deadline
            ):
                recorder.add(outcome)
                progress.update(task, description=described(outcome.key))
                if not console.is_terminal or outcome.winner is None:
                    done = f"[{len(recorder.outcomes)}/{len(chosen)}]"
                    console.print(f"{done} {described(outcome.key)}: {result(outcome)}")
    finally:
        show(recorder.winners())
        if len(recorder.outcomes) < len(chosen):
            print(f"{len(chosen) - len(recorder.outcomes)} of {len(chosen)} kernels were not tuned")
        if recorder.winners():
            print(f"Written: {path}")


class Recorder:
    """Writes a table anew with every winner; keeps the entries of an existing one for other keys."""

    def __init__(self, path: Path, about: dict[str, str]) -> None:
        from tilewise.tuning.config import read_table

        self._path, self._about = path, about
        self._configs: dict[Key, Config] = read_table(path)
        self.outcomes: list[Outcome] = []

    def add(self, outcome: "Outcome") -> None:
        from tilewise.tuning.config import write_table

        self.outcomes.append(outcome)
        if outcome.winner is not None:
            self._configs[outcome.key] = outcome.winner.config
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_table(self._path, self._configs, self._about)

    def winners(self) -> "list[Winner]":
        return [outcome.winner for outcome in self.outcomes if outcome.winner is not None]


def show(winners: "Sequence[Winner]") -> None:
    """The table of winners."""
    if not winners:
        return
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
    c = winner.config
    tile = f"{c.block_q}×{c.block_k}, {c.num_warps} warps, {c.num_stages} stages"
    return f"{tile}, {winner.milliseconds:.3f} ms, {winner.speedup:.2f} × the heuristic's speed"


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


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
