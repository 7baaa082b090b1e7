"""The matrix products of the tiled backend, and which of them is faster on this CPU.

torch.mm goes to MKL, which on some AMD processors stays at half of the vector width; oneDNN's linear
layer does not. Which one wins is measured once per process, in about a millisecond.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

# Operands of a lower precision are converted so many elements at a time, which stay in the cache.
CONVERTED = 256 * 1024


class Product(Protocol):
    """Products of (N, rows, D) and (N, keys, D) stacks; `add` accumulates in place."""

    name: str

    def nt(self, a: Tensor, b: Tensor, scratch: Tensor) -> Tensor:
        """a @ bᵀ, perhaps in the flat buffer `scratch`; b may be of a lower precision."""

    def nn(self, a: Tensor, b: Tensor) -> Tensor:
        """a @ b; b may be of a lower precision."""

    def add_nn(self, acc: Tensor, a: Tensor, b: Tensor) -> None:
        """acc += a @ b."""

    def add_tn(self, acc: Tensor, a: Tensor, b: Tensor) -> None:
        """acc += aᵀ @ b."""


class TorchProduct:
    """torch.bmm, and torch.mm for stacks of one, where it is a little faster: any device and dtype."""

    name = "torch"

    def nt(self, a: Tensor, b: Tensor, scratch: Tensor) -> Tensor:
        n, rows, keys = a.shape[0], a.shape[1], b.shape[1]
        out = scratch[: n * rows * keys].view(n, rows, keys)
        for j0, j1, piece in _converted(b, a.dtype):
            if n == 1:
                torch.mm(a[0], piece[0].t(), out=out[0, :, j0:j1])
            else:
                torch.bmm(a, piece.mT, out=out[..., j0:j1])
        return out

    def nn(self, a: Tensor, b: Tensor) -> Tensor:
        if b.dtype == a.dtype:
            return torch.mm(a[0], b[0]).unsqueeze(0) if a.shape[0] == 1 else torch.bmm(a, b)
        acc = a.new_zeros((*a.shape[:2], b.shape[2]))
        self.add_nn(acc, a, b)
        return acc

    def add_nn(self, acc: Tensor, a: Tensor, b: Tensor) -> None:
        for j0, j1, piece in _converted(b, a.dtype):
            if a.shape[0] == 1:
                acc[0].addmm_(a[0, :, j0:j1], piece[0])
            else:
                acc.baddbmm_(a[..., j0:j1], piece)

    def add_tn(self, acc: Tensor, a: Tensor, b: Tensor) -> None:
        self.add_nn(acc, a.mT, b)


def _converted(t: Tensor, dtype: torch.dtype) -> Iterator[tuple[int, int, Tensor]]:
    """(j0, j1, keys j0 … j1 − 1) of a stack (N, keys, D) in that dtype: all at once if they have it."""
    keys = t.shape[1]
    if t.dtype == dtype:
        yield 0, keys, t
        return
    step = max(1, CONVERTED // (t.shape[0] * t.shape[2]))
    room = torch.empty_like(t[:, :step], dtype=dtype)
    for j0 in range(0, keys, step):
        j1 = min(j0 + step, keys)
        yield j0, j1, room[:, : j1 - j0].copy_(t[:, j0:j1])


class OneDnnProduct(TorchProduct):
    """oneDNN's linear layer, x @ wᵀ in float32, for stacks of one; others go to torch.bmm.

    It takes weights of any strides, but x must be contiguous: for aᵀ @ b the result is made
    transposed, (bᵀ @ a)ᵀ, so that the small operand is the one that is copied.
    """

    name = "oneDNN"

    def nt(self, a: Tensor, b: Tensor, scratch: Tensor) -> Tensor:
        if a.shape[0] != 1 or a.shape[2] == 0 or b.dtype != a.dtype:
            return super().nt(a, b, scratch)
        return _linear(a[0].contiguous(), b[0]).unsqueeze(0)

    def nn(self, a: Tensor, b: Tensor) -> Tensor:
        if a.shape[0] != 1 or a.shape[2] == 0 or b.dtype != a.dtype:
            return super().nn(a, b)
        return _linear(a[0].contiguous(), b[0].t()).unsqueeze(0)

    def add_nn(self, acc: Tensor, a: Tensor, b: Tensor) -> None:
        if b.dtype != a.dtype:
            super().add_nn(acc, a, b)
        else:
            acc.add_(self.nn(a, b))

    def add_tn(self, acc: Tensor, a: Tensor, b: Tensor) -> None:
        if a.shape[0] != 1 or a.shape[1] == 0:
            super().add_tn(acc, a, b)
        else:
            acc[0].add_(_linear(b[0].t().contiguous(), a[0].t()).t())


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, None, "none", [], "")


def product_for(dtype: torch.dtype, device: torch.device) -> Product:
    if device.type == "cpu":
        keep_freed_memory()
        if dtype == torch.float32 and onednn_wins():
            return OneDnnProduct()
    return TorchProduct()


@functools.cache
def keep_freed_memory() -> None:
    """One large allocation, freed, raises the size up to which the C library keeps freed memory, so
    that the tiles of every call are not faulted in page by page."""
    torch.empty(16 << 20, dtype=torch.uint8)


@functools.cache
def onednn_wins() -> bool:
    """Whether oneDNN's product, a private operator, is there, right, and clearly the faster one.

    Where it wins it is twice as fast, so that no disturbance of the clock turns the choice, and with
    it the last bits of results, from one process to the next.
    """
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    a, b = torch.ones(256, 64), torch.ones(512, 64)
    try:
        right = bool((_linear(a, b) == 64).all())
    except (AttributeError, RuntimeError):
        return False
    scratch = torch.empty(256, 512)
    theirs = _seconds(lambda: torch.mm(a, b.t(), out=scratch))
    return right and theirs > 1.4 * _seconds(lambda: _linear(a, b))


def _seconds(call: Callable[[], object]) -> float:
    """The fastest of a few calls: the one that nothing disturbed."""
    times = []
    for _ in range(12):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)
