"""Peak memory and time of one forward and backward, where no earlier work hides a peak."""

import ctypes
import gc
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import tilewise


class Usage(NamedTuple):
    """What forward and backward took beyond their inputs; peak_bytes is None if unknown."""

    algorithm: str
    n: int
    peak_bytes: int | None
    seconds: float


def device_here() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def dtype_on(device: str) -> torch.dtype:
    """What attention is trained in on a GPU; most CPUs have no fast 16-bit products."""
    return torch.bfloat16 if device == "cuda" else torch.float32


def measure(algorithm: str, n: int, d: int, device: str) -> Usage:
    """Forward and backward of one head: on a CPU in a fresh process, where no earlier work hides a peak.

    Raises RuntimeError if memory does not suffice, also if the system ends that process.
    """
    if device == "cuda":  # its counter starts anew in any process; a fresh one takes 10 s to start
        try:
            return _measure_here(algorithm, n, d, device)
        finally:
            torch.cuda.empty_cache()
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_measure_here, algorithm, n, d, device).result()


def memory_here(device: str) -> int:
    """Bytes that one measurement may take: half of the free GPU memory, a quarter of the RAM."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0] // 2
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
    return 2**32  # a system that does not say: 4 GiB


def _measure_here(algorithm: str, n: int, d: int, device: str) -> Usage:
    attention = ALGORITHMS[algorithm]
    if device == "cpu":
        # Several threads on a machine that is busy wait for each other: one shows the algorithms.
        torch.set_num_threads(1)
    # Libraries, threads and compiled kernels must be there before the clock starts; on a GPU
    # kernels are chosen by length, on a CPU a long warm-up would only take long.
    _forward_and_backward(attention, _inputs(n if device == "cuda" else 256, d, device))

    inputs = _inputs(n, d, device)
    with peak_memory(device) as peak:
        seconds = [_forward_and_backward(attention, inputs)]
    while sum(seconds) < 1.5:  # short ones are repeated: the least disturbed counts
        seconds.append(_forward_and_backward(attention, inputs))
    return Usage(algorithm, n, peak.bytes, min(seconds))


def _inputs(n: int, d: int, device: str) -> list[Tensor]:
    """q, k, v and dout of one head."""
    return [torch.randn(1, n, 1, d, device=device, dtype=dtype_on(device)) for _ in range(4)]


def _forward_and_backward(attention: Callable[..., Tensor], inputs: list[Tensor]) -> float:
    *qkv, dout = inputs
    leaves = [x.detach().requires_grad_() for x in qkv]
    start = _now(dout)
    attention(*leaves).backward(dout)
    return _now(dout) - start


def _now(x: Tensor) -> float:
    if x.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def standard(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """softmax(QKᵀ/√d)V as it is usually written, with as few n×n matrices as autograd allows."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    S = (q * q.shape[-1] ** -0.5) @ k.mT
    if causal:
        later = torch.ones(S.shape[-2:], dtype=torch.bool, device=S.device).triu(1)
        S.masked_fill_(later, -math.inf)
    return (torch.softmax(S, dim=-1) @ v).transpose(1, 2)


ALGORITHMS: dict[str, Callable[..., Tensor]] = {
    "standard": standard,
    "tilewise": tilewise.attention,
}


class Peak:
    """How far memory rose inside `peak_memory`; None where this system cannot say."""

    bytes: int | None = None


@contextmanager
def peak_memory(device: str) -> Iterator[Peak]:
    """Watch how far memory rises above what is in use now: on the GPU, or of this process."""
    peak = Peak()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield peak
        peak.bytes = torch.cuda.max_memory_allocated() - before
        return

    gc.collect()
    _return_freed_memory()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak so far is forgotten
    except OSError:
        with _sampled_rss(peak):
            yield peak
    else:
        before = _proc_status("VmRSS")
        yield peak
        peak.bytes = _proc_status("VmHWM") - before


def _return_freed_memory() -> None:
    """glibc keeps freed memory for later; then work that follows would seem to need none."""
    if sys.platform == "linux":
        with suppress(AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)


def _proc_status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    kilobytes = next(line.split()[1] for line in lines if line.startswith(field + ":"))
    return int(kilobytes) * 1024


@contextmanager
def _sampled_rss(peak: Peak) -> Iterator[None]:
    """Without a counter in the system, look every millisecond; without psutil, not at all."""
    try:
        import psutil
    except ImportError:
        yield
        return
    resident = psutil.Process().memory_info
    before = highest = resident().rss
    done = threading.Event()

    def watch() -> None:
        nonlocal highest
        while not done.wait(0.001):
            highest = max(highest, resident().rss)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
        peak.bytes = highest - before
