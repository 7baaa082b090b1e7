"""Kernels that are compiled once for numbers of any value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Triton compiles anew for numbers that are 1 or multiples of 16: these are neither, in 32 and 64 bits.
_SHORT, _LONG = 5, 2**40 + 5


class General:
    """A kernel of Triton's whose numbers say nothing to the compiler.

    `do_not_specialize` does this for an argument that is a number, but not for the numbers of a struct.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.__name__ = kernel.__name__

    def __getitem__(self, grid: tuple[int]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            compiled = self.warmup(*arguments, grid=grid, **options)
            compiled[grid[0], 1, 1](*arguments)
            return compiled

        return run

    def warmup(self, *arguments: Any, grid: tuple[int], **options: Any) -> Any:
        """The compiled kernel."""
        return self._kernel.warmup(*map(_general, arguments), grid=grid, **options)


def _general(argument: Any) -> Any:
    if isinstance(argument, tuple):
        parts = map(_general, argument)
        return type(argument)(*parts) if hasattr(argument, "_fields") else tuple(parts)
    if isinstance(argument, int) and not isinstance(argument, bool):
        return _SHORT if -(2**31) <= argument < 2**31 else _LONG
    return argument
