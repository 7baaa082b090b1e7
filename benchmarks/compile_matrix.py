"""What the compiler makes of the Triton kernels, for GPUs that need not be here.

    python benchmarks/compile_matrix.py --arch 80 90 --bits 16 32 --out matrix.csv

Every kernel with the tiles that a GPU without a table gets: registers a thread, shared memory and spills,
in bytes, and how long compiling takes. Rows are written as they come; those of a file that exists are kept.
"""

from __future__ import annotations

import argparse
import csv
import functools
import multiprocessing
import time
from pathlib import Path

from tilewise.tuning import search
from tilewise.tuning.compiling import cuda_target
from tilewise.tuning.config import MASKS, OPERATIONS, Config, Key, heuristic, product_bits
from tilewise.tuning.workers import cores, start_worker

COLUMNS = ("arch", *Key._fields, "config", "registers", "shared", "spilled", "seconds", "error")


def compiled(job: tuple[int, Key]) -> list[object]:
    arch, key = job
    start = time.perf_counter()
    report = search.compiled(key, config_of(arch, key), cuda_target(arch))
    seconds = round(time.perf_counter() - start, 1)
    if isinstance(report, str):
        return [*identity(arch, key), "", "", "", seconds, report]
    needs = (report.registers, report.shared, report.spilled)
    return [*identity(arch, key), *needs, seconds, ""]


def identity(arch: int, key: Key) -> tuple[str, ...]:
    """The first columns of a row: what need not be compiled again."""
    c = config_of(arch, key)
    tile = f"{c.block_q}x{c.block_k} w{c.num_warps} s{c.num_stages}"
    return (str(arch), *map(str, key), tile)


def config_of(arch: int, key: Key) -> Config:
    bits = product_bits(search.DTYPES[key.bits], arch)
    return heuristic(key._replace(bits=bits))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    several = functools.partial(parser.add_argument, nargs="+")
    several("--arch", type=int, default=[75, 80, 90, 100], help="compute capabilities, 90 for 9.0")
    several("--bits", type=int, default=[16, 32, 64])
    several("--head-dim", type=int, default=sorted(search.HEAD_DIMS))
    several("--mask", default=list(MASKS))
    several("--operation", default=list(OPERATIONS))
    parser.add_argument("--workers", type=int, default=cores())
    parser.add_argument("--out", type=Path, default=Path("compile-matrix.csv"))
    given = parser.parse_args()

    keys = search.keys(given.operation, given.bits, given.head_dim, given.mask, ("long",))
    # float64 is served from 8.0 on.
    jobs = [(arch, key) for key in keys for arch in given.arch if key.bits < 64 or arch >= 80]
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
