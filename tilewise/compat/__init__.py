"""The spellings of others: `sdpa`, `flash_attn`, `flash_attn_3`, `transformers`. They rename, and
tilewise computes.

Each is imported when it is named (``tilewise.compat.sdpa``). What an argument of another library means
is said in tilewise's own words, or refused by a ValueError that names it; nothing is dropped.
"""

from tilewise.lazy import submodules

__getattr__ = submodules(__name__, "flash_attn", "flash_attn_3", "sdpa", "transformers")
