"""Random inputs, the same in every run, backends that take them, and tiles small enough that few rows
need many."""

import pytest
import torch
from torch import Tensor

from tilewise.backends import bands, flash, products, tiles
from tilewise.dispatch import BACKENDS
from tilewise.testing import CASES, make_call


def cpu_backends() -> list[str]:
    """The backends that serve a plain call on CPU tensors."""
    problem = make_call(CASES[0]).problem()
    return [name for name, module in BACKENDS.items() if not module.unsupported(problem)]


def devices() -> list[str]:
    """The CPU, and the GPU where there is one."""
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def draw_qkv(
    b: int,
    sq: int,
    sk: int,
    heads: int | tuple[int, int] = 1,
    d: int = 16,
    dv: int | None = None,
    dtype: torch.dtype = torch.float32,
    head_major: bool = False,
) -> dict[str, Tensor]:
    """q (B, Sq, Hq, D), k and v; `head_major` ones are views of (B, H, S, D)."""
    hq, hkv = (heads, heads) if isinstance(heads, int) else heads
    sizes = {"q": (sq, hq, d), "k": (sk, hkv, d), "v": (sk, hkv, dv or d)}
    out = {}
    for seed, (name, (s, h, width)) in enumerate(sizes.items()):
        shape = (b, h, s, width) if head_major else (b, s, h, width)
        t = draw(*shape, dtype=dtype, seed=seed)
        out[name] = t.transpose(1, 2) if head_major else t
    return out


def draw_tokens(
    total_q: int, total_k: int, heads: tuple[int, int], d: int, dv: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Packed q (total_q, Hq, D), k and v."""
    return {n: t[0] for n, t in draw_qkv(1, total_q, total_k, heads, d, dv, dtype).items()}


def cumulative(lengths: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def set_tiles(patch: pytest.MonkeyPatch, rows: int, keys: int) -> None:
    """Tiles of the tiled backend of at most that size, and nothing but tiles."""
    sizes = {
        "TILE_SCORES": rows * keys,
        "TILE_SCORES_IN_BAND": rows * keys,
        "ROWS": rows,
        "ROWS_IN_BAND": rows,
    }
    for name, size in sizes.items():
        patch.setattr(tiles, name, size)
    patch.setattr(bands, "ROWS", max(1, rows // 4))
    patch.setattr(products, "CONVERTED", 4 * keys)
    patch.setattr(flash, "serves", lambda problem: False)
