"""Launching kernels, or only compiling them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch

from tilewise.kernels.replay import note

_compiled: ContextVar[tuple[list[Any], str | None] | None] = ContextVar("compiled", default=None)


@contextmanager
def compiled_only(name: str | None = None) -> Iterator[list[Any]]:
    """Within the block kernels (or the one of that name) are compiled and collected in the list it gives,
    and none is launched."""
    kernels: list[Any] = []
    token = _compiled.set((kernels, name))
    try:
        yield kernels
    finally:
        _compiled.reset(token)


def launch(
    kernel: Any, programs: int, device: torch.device, *arguments: Any, **options: Any
) -> None:
    """Runs so many programs of a kernel on the current stream of a device."""
    if compiled := _compiled.get():
        kernels, name = compiled
        if name in (None, kernel.__name__):
            kernels.append(kernel.warmup(*arguments, grid=(programs,), **options))
        return
    with current(device):
        note(kernel[(programs,)](*arguments, **options), programs, arguments)


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Kernels are launched on the current device, so the tensors' has to be it."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)
