"""Exact attention (FlashAttention) in O(n) memory, in pure Python.

`attention`, `attention_varlen` and `attention_paged` compute, the last from a `PagedKVCache`;
`explain` says which backend would; `cost` counts; `merge` joins partial results.
`tilewise.textbook` is the algorithm to read.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilewise.api import alibi_slopes, attention, attention_paged, attention_varlen, explain
    from tilewise.costs import Cost, cost
    from tilewise.dispatch import Choice
    from tilewise.merging import merge
    from tilewise.paged import PagedKVCache

__version__ = "0.1.0"
__all__ = [
    "Choice",
    "Cost",
    "PagedKVCache",
    "alibi_slopes",
    "attention",
    "attention_paged",
    "attention_varlen",
    "cost",
    "explain",
    "merge",
]

# Where the names are that are not in `tilewise.api`.
_HOMES = {
    "Choice": "dispatch",
    "Cost": "costs",
    "PagedKVCache": "paged",
    "cost": "costs",
    "merge": "merging",
}


def __getattr__(name: str) -> Any:
    """A public name at its first use, so that the command line can speak without loading torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"tilewise.{_HOMES.get(name, 'api')}"), name)
    globals()[name] = value
    return value


if "torch" in sys.modules:
    import_module("tilewise.ops")  # the operators, which an exported program calls by name
