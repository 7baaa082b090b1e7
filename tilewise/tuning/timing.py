"""How long calls take on a GPU: CUDA graphs, events, a flushed L2 cache, medians of interleaved rounds."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

FLUSHED_BYTES = 2**28  # several times the largest L2 cache
FEWEST_ROUNDS, MOST_ROUNDS = 5, 200

Call = Callable[[], object]


def graphed(call: Call) -> Callable[[], None]:
    """A replay of what the call launches, without the time that Python takes.

    What the call holds and allocates is kept until the replay is dropped. Raises what capturing raises.
    """
    here, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(here)
    graph = torch.cuda.CUDAGraph()
    # torch.cuda.graph() would empty the allocator's cache first, which costs more than all the rest.
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
        torch.cuda.synchronize()
        graph.capture_begin()
        try:
            call()
        finally:
            graph.capture_end()
    here.wait_stream(side)
    return functools.partial(_replay, graph, call)


def _replay(graph: torch.cuda.CUDAGraph, call: Call) -> None:
    """The call is only held: what it reads has to stay."""
    graph.replay()


def medians(calls: Sequence[Call], milliseconds: float) -> list[float]:
    """Milliseconds of each call, which are made in turn for about that long each."""
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.int8, device="cuda")
    for call in calls:
        call()
    torch.cuda.synchronize()
    first = _rounds(calls, 1, flushed)
    longest = max((times[0] for times in first), default=0.0)
    times = _rounds(calls, rounds_within(milliseconds, longest), flushed)
    return [median(t) for t in times]


def host_medians(calls: Sequence[Call], milliseconds: float) -> list[float]:
    """Milliseconds of each call by the clock, in turn as in `medians`: from an idle GPU to an idle GPU.

    Where no GPU is in use the clock is all there is.
    """
    for call in calls:
        _clocked(call)
    longest = max((_clocked(call) for call in calls), default=0.0)
    times: list[list[float]] = [[] for _ in calls]
    order = list(range(len(calls)))
    for _ in range(rounds_within(milliseconds, longest)):
        for number in order:
            times[number].append(_clocked(calls[number]))
        order.reverse()
    return [median(t) for t in times]


def _clocked(call: Call) -> float:
    _wait_for_gpu()
    start = time.perf_counter()
    call()
    _wait_for_gpu()
    return 1e3 * (time.perf_counter() - start)


def _wait_for_gpu() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def rounds_within(milliseconds: float, longest: float) -> int:
    """How often to time calls of which the longest takes that many milliseconds."""
    wanted = int(milliseconds / longest) if longest > 0 else MOST_ROUNDS
    return min(max(wanted, FEWEST_ROUNDS), MOST_ROUNDS)


def _rounds(calls: Sequence[Call], rounds: int, flushed: torch.Tensor) -> list[list[float]]:
    """The times of each call in each round; every other round goes backwards."""
    pairs: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in calls]
    order = list(range(len(calls)))
    for _ in range(rounds):
        for number in order:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flushed.zero_()
            start.record()
            calls[number]()
            end.record()
            pairs[number].append((start, end))
        order.reverse()
    torch.cuda.synchronize()
    return [[start.elapsed_time(end) for start, end in events] for events in pairs]
