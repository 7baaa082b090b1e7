"""Which tile sizes a kernel gets: an override, else the device's table, else a heuristic."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

TABLES = Path(__file__).parent / "tables"
OPERATIONS = ("forward", "queries", "keys", "bias")
HOPPER_OPERATIONS = ("hopper_forward",)
MASKS = ("full", "band", "general")
# Up to this many rows or keys a problem is "short".
SHORT = 1024


@dataclass(frozen=True)
class Config:
    """The sides of a tile of scores, warps per program, and loads in flight per loop."""

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int


class Key(NamedTuple):
    """What a configuration depends on.

    Attributes:
        operation: one of OPERATIONS or HOPPER_OPERATIONS; "queries" is the kernel of dq, "keys" that of
            dk and dv.
        bits: of the dtype of q, k, v, see product_bits.
        head_dim: the power of two that holds the larger of D and Dv, at least 16.
        mask: "full", "band" (causal, window), or "general": anything that is looked at entry by entry
            (for Hopper's: logits that are more than scaled products).
        length: "short" or "long".
    """

    operation: str
    bits: int
    head_dim: int
    mask: str
    length: str


def mask_kind(banded: bool, general: bool) -> str:
    return "general" if general else "band" if banded else "full"


def product_bits(dtype: torch.dtype, capability: int) -> int:
    """The bits of a key on that compute capability (90 for 9.0; 0 is no NVIDIA GPU).

    Before 8.0 Triton uses no tensor cores: what has 16 bits is multiplied as float32, by tiles of float32.
    """
    bits = 8 * dtype.itemsize
    return max(bits, 32) if 0 < capability < 80 else bits


def length_bucket(length: int) -> str:
    return "short" if length <= SHORT else "long"


_overrides: ContextVar[dict[str, Config] | None] = ContextVar("overrides", default=None)


@contextmanager
def override(**configs: Config) -> Iterator[None]:
    """Within the block, operations use the configurations given.

    Example:
        >>> with override(forward=Config(64, 64, 4, 2)):
        ...     config_for("some device", Key("forward", 16, 64, "full", "long")).block_q
        64
    """
    known = (*OPERATIONS, *HOPPER_OPERATIONS)
    unknown = set(configs) - set(known)
    if unknown:
        raise ValueError(f"operation must be one of {known}, got {sorted(unknown)}")
    token = _overrides.set({**(_overrides.get() or {}), **configs})
    try:
        yield
    finally:
        _overrides.reset(token)


def overridden() -> bool:
    """Whether this is inside of an `override`."""
    return bool(_overrides.get())


@functools.cache
def device_name(device: torch.device) -> str:
    """As tables name it: as its driver does, and without one by its type."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def config_for(device: str, key: Key) -> Config:
    """The configuration of a kernel on a device, which is named as its driver names it."""
    overrides = _overrides.get()
    if overrides and key.operation in overrides:
        return overrides[key.operation]
    return _looked_up(device, key)


@functools.cache
def _looked_up(device: str, key: Key) -> Config:
    return table(device).get(key) or heuristic(key)


@functools.cache
def table(device: str) -> dict[Key, Config]:
    """The tuned configurations of a device; empty for one that has no table."""
    return read_table(table_path(device))


def read_table(path: Path) -> dict[Key, Config]:
    """What `write_table` wrote; empty where there is no such file.

    Raises ValueError if the file holds something else.
    """
    if not path.exists():
        return {}
    try:
        entries: list[dict[str, Any]] = json.loads(path.read_text())["configs"]
        return {Key(**entry["key"]): Config(**entry["config"]) for entry in entries}
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} holds no table of tiles: {error!r}") from None


def table_path(device: str) -> Path:
    return TABLES / (device.lower().replace(" ", "-") + ".json")


def write_table(path: Path, configs: dict[Key, Config], about: dict[str, str]) -> None:
    """`about` says where the numbers come from: date, device, versions, command."""
    entries = [
        {"key": key._asdict(), "config": asdict(config)} for key, config in sorted(configs.items())
    ]
    lines = ",\n".join("  " + json.dumps(entry) for entry in entries)
    path.write_text(f'{{"about": {json.dumps(about)},\n"configs": [\n{lines}\n]}}\n')


# By the bits of a product and operation, for head dims up to 64, 128, 256 and 512.
_BY_WIDTH = {
    (16, "forward"): ((64, 64, 4, 3), (128, 64, 8, 2), (64, 32, 8, 2), (32, 32, 8, 1)),
    (16, "queries"): ((64, 64, 4, 2), (64, 64, 4, 1), (32, 32, 8, 1), (16, 16, 8, 1)),
    (16, "keys"): ((32, 64, 4, 2), (32, 64, 4, 1), (32, 32, 8, 1), (16, 16, 8, 1)),
    (16, "bias"): ((64, 64, 4, 1), (32, 64, 4, 1), (16, 32, 4, 1), (16, 16, 8, 1)),
    (32, "forward"): ((64, 32, 8, 2), (32, 32, 8, 2), (16, 16, 8, 1), (16, 16, 8, 1)),
    (32, "queries"): ((32, 32, 8, 2), (32, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
    (32, "keys"): ((32, 32, 8, 2), (32, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
    (32, "bias"): ((16, 32, 4, 1), (16, 32, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
    (64, "forward"): ((32, 32, 4, 1), (16, 16, 4, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
    (64, "queries"): ((32, 32, 8, 1), (16, 16, 4, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
    (64, "keys"): ((32, 32, 8, 1), (16, 16, 4, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
    (64, "bias"): ((32, 32, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
}


def heuristic(key: Key) -> Config:
    """What a device without a table gets: tiles that fit the 99 KB of shared memory of most GPUs (where
    any do, see least_shared_bytes), and that spill little: rows of float32 from 256 on fill the registers
    whatever the tile."""
    if key.operation == "hopper_forward":
        # Four warps load, and each 64 rows have four. A third 64 leave each thread fewer registers.
        if key.head_dim <= 64 and (
            key.mask == "full" or (key.mask, key.length) == ("band", "long")
        ):
            return Config(192, 128, 16, 2)
        return Config(128, 128 if key.head_dim <= 128 else 64, 12, 2)
    by_width = _BY_WIDTH[key.bits, key.operation]
    return Config(*by_width[max(0, (key.head_dim - 1).bit_length() - 6)])


def least_shared_bytes(dtype: torch.dtype, head_dim: int) -> int:
    """What the smallest tiles need, of 16 rows and 16 keys: in the backward pass q, k, v, dout and one of
    them transposed, and room for reductions."""
    return 5 * 16 * head_dim * dtype.itemsize + 2048
