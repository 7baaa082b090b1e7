"""Narrow bands, which the tiled backend cuts into blocks: every row, both passes, what hurts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from inputs import draw, draw_qkv, set_tiles

import tilewise
from tilewise.backends import bands
from tilewise.testing import Call, evaluate, expect, judge, mask_probe

torch.set_num_threads(1)
CUTS = bands.pieces


@pytest.fixture(autouse=True)
def cut(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tiles of 32 × 64 and blocks of 8 rows; the number of blocks of every piece that is made."""
    set_tiles(monkeypatch, 32, 64)
    counts: list[int] = []

    def counted(*arguments: Any) -> list[bands.Piece]:
        made = CUTS(*arguments)
        counts.extend(piece.problem.q.shape[0] for piece in made)
        return made

    monkeypatch.setattr("tilewise.backends.tiled.pieces", counted)
    return counts


def agree(call: Call, dtype: torch.dtype, dlse: bool = True) -> None:
    results = evaluate(call, "tiled", dlse=dlse)
    gold, peer = expect(call, dlse=dlse)
    verdicts = [judge(name, t, gold[name], peer[name], dtype) for name, t in results.items()]
    assert all(v.passed for v in verdicts), [str(v) for v in verdicts if not v.passed]


WINDOWS = [(0, 0), (5, 0), (0, 4), (7, 9), (16, 0), (25, 25)]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("align", ["bottom-right", "top-left"])
def test_every_pair(cut: list[int], align: str, window: tuple[int, int]) -> None:
    for sq, sk in ((130, 130), (97, 130), (130, 97), (40, 300), (17, 18)):
        got, counts = mask_probe(sq, sk, backend="tiled", window_size=window, align=align)
        assert torch.equal(got.round(), counts)
        assert (got - counts).abs().max() < 1e-4
    assert max(cut) > 1


FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "sinks": {"sinks": draw(4, seed=5)},
    "softcap": {"softcap": 0.7},
    "negative scale": {"scale": -0.3},
}


@pytest.mark.parametrize(
    ("feature", "dtype"),
    [
        *(("plain", dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16)),
        *((feature, torch.float32) for feature in FEATURES if feature != "plain"),
    ],
)
@pytest.mark.parametrize("window", [(9, 0), (6, 5)], ids=str)
def test_both_passes(
    cut: list[int], window: tuple[int, int], feature: str, dtype: torch.dtype
) -> None:
    leaves = draw_qkv(2, 101, 93, (4, 2), 8, 12, dtype=dtype)
    options = {"window_size": window, **FEATURES[feature]}
    agree(Call(tilewise.attention, {**leaves, **options}), dtype)
    # Each of four parts, forward and backward: the rows before, the blocks, and perhaps rows after.
    assert len(cut) >= 2 * 4 * 2
    assert max(cut) > 1


def test_rows_of_many_heads(cut: list[int]) -> None:
    """More query heads than rows of a block."""
    leaves = draw_qkv(1, 60, 60, (12, 1), 4)
    agree(Call(tilewise.attention, {**leaves, "window_size": (4, 1)}), torch.float32)
    assert max(cut) > 1


def test_packed(cut: list[int]) -> None:
    leaves = {n: t[0] for n, t in draw_qkv(1, 200, 200, (4, 2), 8).items()}
    cu = torch.tensor([0, 3, 110, 110, 195])
    options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "window_size": (6, 0)}
    agree(Call(tilewise.attention_varlen, {**leaves, **options}), torch.float32)
    assert max(cut) > 1


def test_explain_says_so() -> None:
    x = draw_qkv(1, 120, 120, (8, 2), 8)
    config = tilewise.explain(**x, window_size=(9, 2), backend="tiled").config
    # Tiles of 2048 scores: blocks of two queries of four heads each.
    shape = {"blocks": 2048 // (8 * 13), "rows": 8, "keys": 13}
    assert {name: config[name] for name in shape} == shape


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e20])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_what_is_strange_stays_with_the_rows_that_see_it(
    cut: list[int], name: str, value: float
) -> None:
    leaves = draw_qkv(1, 120, 120, 1, 8)
    leaves[name][0, 70, 0, 3] = value
    options = {"window_size": (9, 2)}
    agree(Call(tilewise.attention, {**leaves, **options}), torch.float32)
    out = tilewise.attention(**leaves, **options, backend="tiled")
    rows = slice(70, 71) if name == "q" else slice(68, 80)
    others = torch.ones(120, dtype=torch.bool)
    others[rows] = False
    assert out[0, others].isfinite().all()


def test_large_logits(cut: list[int]) -> None:
    leaves = draw_qkv(1, 120, 120, 1, 8)
    leaves["q"][0, 40:44] *= 1e5
    agree(Call(tilewise.attention, {**leaves, "window_size": (9, 2)}), torch.float32)


@pytest.mark.parametrize(
    "options",
    [
        {"mask": torch.ones(1, dtype=torch.bool)},
        {"bias": torch.zeros(1)},
        {"alibi_slopes": torch.ones(1)},
        {"key_range": (torch.zeros(1, dtype=torch.int32), torch.full((1,), 99))},
        {"dropout_p": 0.5, "dropout_seed": 1},
        {"window_size": (5, None)},
        {"window_size": (28, 29)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_depends_on_the_position_is_not_cut(cut: list[int], options: dict[str, Any]) -> None:
    tilewise.attention(**draw_qkv(1, 120, 120, 1, 8), **{"window_size": (9, 2), **options})
    assert not cut
