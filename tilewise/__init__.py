"""Exact attention (FlashAttention) in O(n) memory, in pure Python.

`attention`, `attention_varlen` and `attention_paged` compute, the last from a `PagedKVCache`;
`explain` says which backend would; `cost` counts; `merge` joins partial results. `tilewise.nn` has a
module with projections and a cache. `tilewise.textbook` is the algorithm to read.
"""

import importlib
import warnings

with warnings.catch_warnings():
    # PyTorch says so where NumPy is not installed, which nothing here needs.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")
    importlib.import_module("torch")

from tilewise import nn
from tilewise.api import alibi_slopes, attention, attention_paged, attention_varlen, explain
from tilewise.cost import Cost, cost
from tilewise.dispatch import Choice
from tilewise.lazy import submodules
from tilewise.merge import merge
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
    "nn",
]

__getattr__ = submodules(__name__, "compat", "testing", "textbook")
