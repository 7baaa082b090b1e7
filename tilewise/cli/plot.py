"""The pictures of ``tilewise demo --plot DIR``: the tiles of a mask, and memory and traffic."""

from collections.abc import Container, Sequence
from pathlib import Path

import matplotlib
import torch
from matplotlib import font_manager
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from torch import Tensor

from tilewise.cli.demonstrations import HEAD_DIM, LENGTHS, cost_of, elements, size
from tilewise.cli.measure import Usage
from tilewise.cli.messages import Language, message
from tilewise.spec import Band, Problem, Scores

matplotlib.use("Agg")  # draws into files; needs no screen
import matplotlib.pyplot as plt

CHINESE_FONTS = (
    "Noto Sans CJK SC",
    "Source Han Sans SC",
    "Source Han Sans CN",
    "Microsoft YaHei",
    "PingFang SC",
    "Hiragino Sans GB",
    "WenQuanYi Micro Hei",
    "WenQuanYi Zen Hei",
    "SimHei",
    "Noto Sans CJK JP",  # a file with the fonts of all four languages is known by its first
)
RED, BLUE, ORANGE, GRAY = "#c8553d", "#3b77b5", "#f4b860", "#eef0f3"
GREEN = "#5b9a68"
ALGORITHM_COLORS = {"standard": RED, "tilewise": BLUE}
SKIPPED, EDGE, FULL = 0, 1, 2
TILE_COLORS = {SKIPPED: GRAY, EDGE: ORANGE, FULL: BLUE}


def write(
    folder: Path, numbers: Container[int], measured: Sequence[Usage], language: Language
) -> list[Path]:
    """Write the pictures of the demonstrations with these numbers and return their paths.

    Labels are English if no font has Chinese.
    """
    fonts = ["DejaVu Sans"]
    if language is Language.ZH:
        installed = set(font_manager.get_font_names())
        chinese = [name for name in CHINESE_FONTS if name in installed]
        fonts = chinese + fonts
        language = Language.ZH if chinese else Language.EN
    folder.mkdir(parents=True, exist_ok=True)
    with plt.rc_context({"font.family": fonts, "font.size": 11}):
        written = []
        if 2 in numbers:
            written.append(tile_map(folder / "tile_map.png", language))
        if 4 in numbers:
            path = folder / "memory_and_traffic.png"
            written.append(memory_and_traffic(path, measured, language))
    return written


# ------------------------------------------------------------------ memory and traffic


def memory_and_traffic(path: Path, measured: Sequence[Usage], language: Language) -> Path:
    """What is kept (bytes) and what is moved (elements) against n, both axes logarithmic."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5.5), layout="constrained")
    costs = [cost_of(n) for n in LENGTHS]

    kept = {
        "keeps": (RED, [cost.extra_bytes_standard for cost in costs]),
        "extra": (BLUE, [cost.extra_bytes_tiled for cost in costs]),
    }
    for key, (color, counts) in kept.items():
        left.plot(LENGTHS, counts, color=color, label=message(language, f"plot.{key}"))
    for algorithm, color in ALGORITHM_COLORS.items():
        points = [u for u in measured if u.algorithm == algorithm and u.peak_bytes]
        if points:
            label = message(language, f"plot.measured_{algorithm}")
            bytes_measured = [u.peak_bytes for u in points]
            left.plot([u.n for u in points], bytes_measured, "o--", color=color, label=label)
    _finish(left, language, "plot.memory", "plot.bytes")
    left.set_yscale("log", base=2)
    left.set_yticks([2.0**k for k in range(10, 37, 5)])
    left.yaxis.set_major_formatter(lambda count, _: size(int(count)))

    moved = {
        "standard": [elements(cost.hbm_bytes_standard) for cost in costs],
        "tilewise": [elements(cost.hbm_bytes_io_model) for cost in costs],
    }
    for algorithm, counts in moved.items():
        label = message(language, f"plot.moved_{algorithm}")
        right.plot(LENGTHS, counts, color=ALGORITHM_COLORS[algorithm], label=label)
    _finish(right, language, "plot.traffic", "plot.elements")
    right.set_yscale("log")

    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def _finish(axes: Axes, language: Language, title: str, y_label: str) -> None:
    axes.set_title(message(language, title, d=HEAD_DIM))
    axes.set_xlabel(message(language, "plot.length"))
    axes.set_ylabel(message(language, y_label))
    axes.set_xscale("log", base=2)
    axes.set_xticks(LENGTHS, [str(n) for n in LENGTHS])
    axes.grid(alpha=0.3)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, frameon=False)


# ------------------------------------------------------------------ the tiles of a mask


def tile_map(path: Path, language: Language) -> Path:
    """Which tiles a causal mask and a sliding window skip, need whole, or must mask inside."""
    n, block, window = 96, 8, 28
    masks = {
        message(language, "plot.causal"): Band(right=0),
        message(language, "plot.window", size=window): Band(left=window - 1, right=0),
    }
    figure, panels = plt.subplots(1, 2, figsize=(12, 7), layout="constrained")
    for axes, (title, band) in zip(panels, masks.items(), strict=True):
        lo, hi = intervals(band, n)
        tiles = classify(lo, hi, n, block, block)
        axes.imshow(
            tiles.tolist(),
            cmap=ListedColormap([TILE_COLORS[kind] for kind in (SKIPPED, EDGE, FULL)]),
            vmin=SKIPPED,
            vmax=FULL,
            extent=(0, n, n, 0),
        )
        # The outline of what each query sees: lo(i) ≤ j < hi(i).
        for bound in (lo, hi):
            axes.stairs(
                bound.tolist(),
                range(n + 1),
                orientation="horizontal",
                baseline=None,
                color="black",
                zorder=3,  # above the grid
            )
        ticks = range(0, n + 1, block)
        axes.set_xticks(ticks)
        axes.set_yticks(ticks)
        axes.grid(color="white", linewidth=1)
        axes.set_axisbelow(False)
        axes.tick_params(length=0, labelsize=9)
        counts = {kind: int((tiles == kind).sum()) for kind in TILE_COLORS}
        axes.set_title(
            message(
                language,
                "plot.tiles",
                mask=title,
                skipped=counts[SKIPPED],
                full=counts[FULL],
                edge=counts[EDGE],
            )
        )
        axes.set_xlabel(message(language, "plot.keys"))
        axes.set_ylabel(message(language, "plot.queries"))

    handles: list[Artist] = [
        Patch(facecolor=TILE_COLORS[kind], edgecolor="#999999", label=message(language, key))
        for kind, key in ((SKIPPED, "plot.skipped"), (FULL, "plot.full"), (EDGE, "plot.edge"))
    ]
    handles.append(Line2D([], [], color="black", label=message(language, "plot.seen")))
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def intervals(band: Band, n: int) -> tuple[Tensor, Tensor]:
    """lo and hi of each of n queries on n keys, from the library itself."""
    x = torch.empty(1, n, 1, 1)
    lo, hi = Problem(x, x, x, band, Scores(scale=1.0)).interval(0, n)
    return lo[0], hi[0]


def classify(lo: Tensor, hi: Tensor, keys: int, block_q: int, block_k: int) -> Tensor:
    """SKIPPED, EDGE or FULL for each tile, shape (query tiles, key tiles).

    Row i sees the keys lo[i] ≤ j < hi[i]. A tile is skipped if no row sees any of its keys, and
    full if every row sees all of them.
    """
    start = torch.arange(0, keys, block_k)
    end = (start + block_k).clamp(max=keys)
    kinds = []
    for rows in zip(lo.split(block_q), hi.split(block_q), strict=True):
        row_lo, row_hi = (bound.unsqueeze(-1) for bound in rows)
        any_seen = (torch.maximum(row_lo, start) < torch.minimum(row_hi, end)).any(dim=0)
        all_seen = ((row_lo <= start) & (end <= row_hi)).all(dim=0)
        kinds.append(any_seen.long() * EDGE + all_seen.long() * (FULL - EDGE))
    return torch.stack(kinds)
