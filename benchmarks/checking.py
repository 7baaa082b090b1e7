"""Checks on a GPU in parts, each in a process of its own: one that fails or hangs takes no other along.

A script yields `Check`s by part and hands its command line to `main`. A check that raises is wrong; one
that takes too long, brings its process down or leaves the GPU unusable is wrong too, and the part goes on
after it in a new process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TextIO

import torch
from torch import Tensor

from tilewise.cli.bench import append_csv
from tilewise.cli.gpu_report import environment

PATIENCE = 120.0
UNUSABLE = 3  # how a process ends that cannot go on
_ROW, _SAID = "ROW ", "SAID "


class Check(NamedTuple):
    """`run` gives what is wrong, nothing if all is well; it raises NotHere where it cannot tell. It may
    take `patience` seconds."""

    name: str
    run: Callable[[], str]
    patience: float = PATIENCE


class NotHere(Exception):
    """A check that needs what this machine does not have."""


class Row(NamedTuple):
    """What came of a check. `result`: "ok", "WRONG" or "not run"."""

    part: str
    number: int
    check: str
    result: str
    seconds: float
    note: str


# ------------------------------------------------------------------ in the process of a part


def run_part(part: str, checks: Iterator[Check], skip: int = 0) -> None:
    """Runs the checks from number `skip` on and prints a row of each."""
    torch.manual_seed(0)
    for number, check in enumerate(checks):
        if number < skip:
            continue
        print(_ROW + json.dumps(Row(part, number, check.name, "begun", 0.0, "")), flush=True)
        started = time.monotonic()
        result = note = ""
        try:
            with watched(check.name, check.patience):
                note = check.run()
                if torch.cuda.is_initialized():
                    torch.cuda.synchronize()
        except NotHere as reason:
            result, note = "not run", str(reason)
        except Exception as error:
            note = f"{error!r:.600}"
            print(traceback.format_exc(limit=-4), flush=True)
        result = result or ("WRONG" if note else "ok")
        row = Row(part, number, check.name, result, round(time.monotonic() - started, 2), note)
        print(_ROW + json.dumps(row), flush=True)
        if "CUDA error" in note or "Triton Error" in note:  # nothing works after it
            sys.stdout.flush()
            os._exit(UNUSABLE)


def say(text: str) -> None:
    """Prints a line for the eyes of whoever started the script, not for the log alone."""
    print(_SAID + text, flush=True)


@contextmanager
def watched(name: str, patience: float = PATIENCE) -> Iterator[None]:
    """Ends the process when the block takes too long: a kernel that hangs cannot be interrupted."""

    def give_up() -> None:
        say(f"{name}: longer than {patience:.0f} s")
        os._exit(UNUSABLE)

    timer = threading.Timer(patience, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


# ------------------------------------------------------------------ in the process that starts them


class Run:
    """Parts of a script that run one after the other or side by side; what they print goes to a log, a
    row of each check to a CSV file."""

    def __init__(self, script: str, name: str, folder: Path, options: Sequence[str] = ()) -> None:
        """`options` are handed on to the processes of parts."""
        self._command = [sys.executable, script, *options]
        self._csv = folder / f"{name}.csv"
        self._csv.unlink(missing_ok=True)
        self._log: TextIO = (folder / f"{name}.log").open("w")
        self._about = environment() if torch.cuda.is_available() else {"GPU": "none"}
        self._about["command"] = " ".join(["python", *sys.argv])
        self._lock = threading.Lock()
        self.rows: list[Row] = []

    def together(self, parts: Sequence[str], seconds: float) -> None:
        """Runs those parts side by side, each for so long at most."""
        with ThreadPoolExecutor(max(1, len(parts))) as threads:
            list(threads.map(lambda part: self._part(part, time.monotonic() + seconds), parts))

    def summary(self) -> str:
        """A line for each part, then what was wrong or did not run."""
        lines = []
        for part in dict.fromkeys(row.part for row in self.rows):
            results = [row.result for row in self.rows if row.part == part]
            counts = {name: results.count(name) for name in ("ok", "WRONG", "not run")}
            lines.append(f"{part}: " + ", ".join(f"{n} {name}" for name, n in counts.items() if n))
        return "\n".join([*lines, *(told(row) for row in self.rows if row.result != "ok")])

    def failed(self) -> bool:
        return any(row.result == "WRONG" for row in self.rows)

    def _part(self, part: str, deadline: float) -> None:
        started, skip, code = time.monotonic(), 0, UNUSABLE
        while code and time.monotonic() < deadline:
            begun, code = self._process(part, skip, deadline)
            if code:
                late = time.monotonic() >= deadline
                why = "out of time" if late else f"the process ended with {code}"
                number, name = (skip, "start") if begun is None else (begun.number, begun.check)
                if begun is None or begun.result == "begun":
                    self._add(Row(part, number, name, "WRONG", 0.0, why))
                skip = number + 1
        self._say(f"{part}: {time.monotonic() - started:.0f} s")

    def _process(self, part: str, skip: int, deadline: float) -> tuple[Row | None, int]:
        """The last row that the process of a part printed, and how it ended."""
        command = [*self._command, "--inside", part, "--skip", str(skip)]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        timer = threading.Timer(max(0.0, deadline - time.monotonic()), process.kill)
        timer.start()
        last = None
        assert process.stdout is not None
        for line in process.stdout:
            with self._lock:
                self._log.write(f"[{part}] {line}")
                self._log.flush()
            if line.startswith(_SAID):
                self._say(line.removeprefix(_SAID).rstrip())
            elif line.startswith(_ROW):
                last = Row(*json.loads(line.removeprefix(_ROW)))
                if last.result != "begun":
                    self._add(last)
        code = process.wait()
        timer.cancel()
        return last, code

    def _add(self, row: Row) -> None:
        with self._lock:
            self.rows.append(row)
            cells = {n: str(value) for n, value in row._asdict().items() if n != "number"}
            append_csv(self._csv, {**self._about, **cells})
        if row.result != "ok":
            self._say(told(row))

    def _say(self, text: str) -> None:
        with self._lock:
            print(text, flush=True)


def told(row: Row) -> str:
    return f"{row.result} {row.part}: {row.check}: {row.note}"


# ------------------------------------------------------------------ comparing


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def bits(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.uint8)


def same(got: dict[str, Tensor], want: dict[str, Tensor]) -> str:
    """The names of those whose bits differ; NaN equals NaN of the same bits."""
    assert got.keys() == want.keys()
    names = [name for name in got if not torch.equal(bits(got[name]), bits(want[name]))]
    return f"bits of {', '.join(names)} differ" if names else ""
