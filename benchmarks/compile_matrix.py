"""What the compiler makes of the Triton kernels, for GPUs that need not be here.

    python benchmarks/compile_matrix.py --arch 80 gfx942 --bits 16 32 --out matrix.csv

Every kernel with the tiles that a GPU without a table gets: registers a thread, shared memory and spills,
in bytes, and how long compiling takes; an error where it does not compile or does not fit. Rows are
written as they come; those of a file that exists are kept.
"""

from __future__ import annotations

import argparse
import csv
import functools
import multiprocessing
import time
from pathlib import Path

from tilewise.tuning import search
from tilewise.tuning.compiling import SHARED_KB, room, target
from tilewise.tuning.config import MASKS, OPERATIONS, Config, Key, heuristic, product_bits
from tilewise.tuning.workers import cores, start_worker

COLUMNS = ("arch", *Key._fields, "config", "registers", "shared", "spilled", "seconds", "error")


def compiled(job: tuple[str, Key]) -> list[object]:
    arch, key = job
    start = time.perf_counter()
    report = search.compiled(key, config_of(arch, key), target(arch))
    seconds = round(time.perf_counter() - start, 1)
    if isinstance(report, str):
        return [*identity(arch, key), "", "", "", seconds, report]
    needs = (report.registers, report.shared, report.spilled)
    error = f"more than {room_of(job)}" if report.shared > room_of(job) else ""
    return [*identity(arch, key), *needs, seconds, error]


def identity(arch: str, key: Key) -> tuple[str, ...]:
    """The first columns of a row: what need not be compiled again."""
    c = config_of(arch, key)
    tile = f"{c.block_q}x{c.block_k} w{c.num_warps} s{c.num_stages}"
    return (arch, *map(str, key), tile)


def config_of(arch: str, key: Key) -> Config:
    capability = int(arch) if arch.isdigit() else 0
    return heuristic(key._replace(bits=product_bits(search.DTYPES[key.bits], capability)))


def room_of(job: tuple[str, Key]) -> int:
    """Bytes of shared memory that it may need; 0 where no such GPU serves it."""
    arch, key = job
    without_double = arch in ("75", "gfx942") and key.bits == 64  # see backends/triton.py
    return 0 if without_double else room(arch, search.DTYPES[key.bits], key.head_dim)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    several = functools.partial(parser.add_argument, nargs="+")
    several("--arch", choices=list(SHARED_KB), default=list(SHARED_KB))
    several("--bits", type=int, default=[16, 32, 64])
    several("--head-dim", type=int, default=sorted(search.HEAD_DIMS))
    several("--mask", default=list(MASKS))
    several("--operation", default=list(OPERATIONS))
    parser.add_argument("--workers", type=int, default=cores())
    parser.add_argument("--out", type=Path, default=Path("compile-matrix.csv"))
    given = parser.parse_args()

    keys = search.keys(given.operation, given.bits, given.head_dim, given.mask, ("long",))
    jobs = [job for key in keys for arch in given.arch if room_of(job := (arch, key))]
    rows: dict[tuple[str, ...], list[str]] = {}
    if given.out.exists():
        with given.out.open(newline="") as file:
            rows = {tuple(row[:7]): row for row in list(csv.reader(file))[1:]}
    jobs = [(arch, key) for arch, key in jobs if identity(arch, key) not in rows]
    with (
        multiprocessing.get_context("spawn").Pool(given.workers, start_worker) as pool,
        given.out.open("w", newline="") as file,
    ):
        writer = csv.writer(file)
        writer.writerows([COLUMNS, *rows.values()])
        for number, row in enumerate(pool.imap_unordered(compiled, jobs), 1):
            writer.writerow(row)
            file.flush()
            print(f"[{number}/{len(jobs)}]", *row, flush=True)


if __name__ == "__main__":
    main()
