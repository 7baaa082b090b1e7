"""The spellings of others: `sdpa`, `flash_attn`, `flash_attn_3`, `transformers`. They rename, and
tilewise computes.

Each is imported when it is named (``tilewise.compat.sdpa``). What an argument of another library means
is said in tilewise's own words, or refused by a ValueError that names it; nothing is dropped.
"""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    if name in ("flash_attn", "flash_attn_3", "sdpa", "transformers"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
