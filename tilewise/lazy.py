"""Modules that are imported when they are named."""

import importlib
from collections.abc import Callable
from typing import Any


def submodules(package: str, *names: str) -> Callable[[str], Any]:
    """The `__getattr__` of a package that has these modules."""

    def load(name: str) -> Any:
        if name in names:
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return load
