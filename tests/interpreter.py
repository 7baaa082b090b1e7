"""Triton's kernels on the CPU: for a while, a second and interpreted copy of Triton and of our kernels."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
from triton.runtime.jit import mangle_type

import tilewise
from tilewise.tuning.config import OPERATIONS, Config, override

COPIED = ("triton", "tilewise.kernels", "bounds_probe")


@contextmanager
def interpreted() -> Iterator[None]:
    """Within the block backend="triton" serves CPU tensors, by Triton's interpreter.

    How Triton runs its own functions is settled when it is imported, and how it runs our kernels when they
    are: both are imported anew, and what was there before is put back.
    """
    # Triton's compiled part is shared, and keeps the classes that it finds when it is first asked for a
    # type: they have to be those of the copy that compiles.
    mangle_type(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setattr(tilewise, "kernels", tilewise.kernels)
        before = _modules()
        for name in before:
            del sys.modules[name]
        try:
            from triton.runtime import interpreter

            _hasten(interpreter)
            yield
        finally:
            for name in _modules():
                del sys.modules[name]
            sys.modules.update(before)


def _modules() -> dict[str, ModuleType]:
    """Those of Triton and our kernels that are loaded, but for Triton's compiled part, which cannot be
    loaded twice."""
    return {
        name: module
        for name, module in sys.modules.items()
        if any(name == copied or name.startswith(copied + ".") for copied in COPIED)
        and not name.startswith("triton._C")
    }


def _hasten(interpreter: ModuleType) -> None:
    """The language is patched for each module of functions once, not at every call of a function; sums of
    offsets are not looked at for overflows. That halves the time."""
    patch_language = interpreter._patch_lang
    patched: set[int] = set()

    def patch_once(function: Callable[..., Any]) -> Any:
        if id(function.__globals__) not in patched:
            patched.add(id(function.__globals__))
            patch_language(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_once
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


@contextmanager
def tiles(block_q: int, block_k: int) -> Iterator[None]:
    """Within the block every kernel has tiles of that size."""
    with override(**dict.fromkeys(OPERATIONS, Config(block_q, block_k, 4, 1))):
        yield
