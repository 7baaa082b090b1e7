"""Launching kernels, or only compiling them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch

_compiled: ContextVar[list[Any] | None] = ContextVar("compiled", default=None)


@contextmanager
def compiled_only() -> Iterator[list[Any]]:
    """Within the block kernels are compiled and collected in the list it gives, and none is launched."""
    kernels: list[Any] = []
    token = _compiled.set(kernels)
    try:
        yield kernels
    finally:
        _compiled.reset(token)


# Compiled kernels by what the caller says that they depend on. Past this many, all are forgotten.
_ready: dict[Hashable, Any] = {}
_MOST_READY = 4096


def launch(
    kernel: Any,
    programs: int,
    device: torch.device,
    *arguments: Any,
    key: Hashable = None,
    **options: Any,
) -> None:
    """Runs so many programs of a kernel on the current stream of a device.

    Triton looks at every argument to find the compiled kernel, which takes longer than a small kernel runs.
    A `key` tells it at once: equal keys promise equal arguments but for the addresses of tensors, and those
    equal modulo 16.
    """
    compiled = _compiled.get()
    if compiled is not None:
        compiled.append(kernel.warmup(*arguments, grid=(programs,), **options))
        return
    with current(device):
        ready = None if key is None else _ready.get(key)
        if ready is not None:
            ready[(programs, 1, 1)](*arguments)
            return
        ready = kernel[(programs,)](*arguments, **options)
    if key is not None and ready is not None:  # the interpreter gives None
        if len(_ready) >= _MOST_READY:
            _ready.clear()
        _ready[key] = ready


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Kernels are launched on the current device, so the tensors' has to be it."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)
