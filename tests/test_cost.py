"""`tilewise.cost` against counting one pair and one tile at a time."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tilewise.api import problem_of
from tilewise.spec import sequences

B, HQ, HKV, SQ, SK, D, DV = 2, 4, 2, 23, 31, 8, 12
BLOCK_Q, BLOCK_K = 5, 7


def random_range() -> tuple[Tensor, Tensor]:
    start = torch.randint(-3, SK, (B, SQ))
    return start, start + torch.randint(-2, SK, (B, SQ))


DENSE: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "top-left": {"causal": True, "align": "top-left"},
    "window": {"window_size": (4, 2)},
    "left": {"window_size": (0, None), "align": "top-left"},
    "range": {"key_range": random_range()},
    "range of all rows": {"key_range": (torch.tensor([[2]]), torch.tensor([[9], [40]]))},
    "range in a band": {"key_range": random_range(), "causal": True, "window_size": (9, None)},
    "mask": {"mask": torch.rand(B, HQ, SQ, SK) < 0.05},
    "mask of keys": {"mask": torch.rand(B, 1, 1, SK) < 0.3},
    "mask of rows": {"mask": torch.rand(HQ, SQ, 1) < 0.5, "window_size": (8, 0)},
    "everything": {
        "mask": torch.rand(1, HQ, SQ, SK) < 0.8,
        "key_range": random_range(),
        "causal": True,
    },
}


def operands(sq: int = SQ, sk: int = SK, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    shapes = (B, sq, HQ, D), (B, sk, HKV, D), (B, sk, HKV, DV)
    return [torch.empty(shape, dtype=dtype) for shape in shapes]


def priced_by_hand(inputs: list[Tensor], **arguments: Any) -> dict[str, int]:
    """The fields of Cost by loops over batch entries, heads, tiles and pairs."""
    problem = problem_of(*inputs, **arguments)
    size = inputs[0].element_size()
    lse_size = 8 if inputs[0].dtype == torch.float64 else 4
    c = dict.fromkeys(tilewise.Cost._fields, 0)
    pairs = 0
    for sequence in sequences(problem):
        p = sequence.problem
        (b, sq, hq, d), (_, sk, hkv, dv) = p.q.shape, p.v.shape
        scores, keys = b * hq * sq * sk, b * hkv * sk
        once = (b * hq * sq + keys) * (d + dv)
        c["hbm_bytes_standard"] += (once + 4 * scores) * size
        c["hbm_bytes_standard_backward"] += (2 * once + 7 * scores) * size
        c["hbm_bytes_tiled_backward"] += 2 * keys * (d + dv) * size
        c["extra_bytes_standard"] += 2 * scores * size
        if not (b and hq):
            continue
        lo, hi = (t.expand(b, sq).tolist() for t in p.interval(0, sq))
        mask = torch.ones(1, dtype=torch.bool) if p.scores.mask is None else p.scores.mask
        mask = mask.expand(b, hq, sq, sk)
        for entry in range(b):
            for head in range(hq):
                allowed = mask[entry, head]
                for i0 in range(0, sq, BLOCK_Q):
                    rows = range(i0, min(i0 + BLOCK_Q, sq))
                    first = min(lo[entry][i] for i in rows)
                    last = max(hi[entry][i] for i in rows)
                    c["hbm_bytes_tiled"] += len(rows) * ((d + dv) * size + lse_size)
                    c["hbm_bytes_tiled_backward"] += len(rows) * (2 * dv * size + lse_size)
                    c["extra_bytes_tiled"] += len(rows) * lse_size
                    for j0 in range(0, sk, BLOCK_K):
                        tile = [(i, j) for i in rows for j in range(j0, min(j0 + BLOCK_K, sk))]
                        seen = sum(
                            lo[entry][i] <= j < hi[entry][i] and bool(allowed[i, j])
                            for i, j in tile
                        )
                        pairs += seen
                        spanned = any(first <= j < last for _, j in tile)
                        if not (spanned and any(bool(allowed[i, j]) for i, j in tile)):
                            assert not seen
                            c["tiles_skipped"] += 1
                            continue
                        c["tiles_full" if seen == len(tile) else "tiles_edge"] += 1
                        c["flops_tiled"] += 2 * (d + dv) * len(tile)
                        c["flops_tiled_backward"] += 2 * (3 * d + 2 * dv) * len(tile)
                        c["hbm_bytes_tiled"] += len(tile) // len(rows) * (d + dv) * size
                        c["hbm_bytes_tiled_backward"] += len(rows) * (
                            (d + dv) * size + 2 * lse_size + 2 * d * lse_size
                        )
    d, dv = inputs[0].shape[-1], inputs[2].shape[-1]
    c["flops"] = 2 * (d + dv) * pairs
    c["flops_backward"] = 2 * (3 * d + 2 * dv) * pairs
    c["hbm_bytes_io_model"] = int(pairs * ((d + dv) / 2) ** 2 / (4096 / size) * size)
    return c


def check(inputs: list[Tensor], **arguments: Any) -> tilewise.Cost:
    counted = tilewise.cost(*inputs, block_q=BLOCK_Q, block_k=BLOCK_K, sram_bytes=4096, **arguments)
    assert counted._asdict() == priced_by_hand(inputs, **arguments)
    return counted


@pytest.mark.parametrize("name", DENSE)
def test_dense(name: str) -> None:
    check(operands(), **DENSE[name])


@pytest.mark.parametrize("name", DENSE)
def test_rows_are_counted_in_parts(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(importlib.import_module("tilewise.cost"), "ROWS_AT_ONCE", 2 * BLOCK_Q + 1)
    check(operands(), **DENSE[name])


@pytest.mark.parametrize("name", [name for name in DENSE if "mask" not in DENSE[name]])
def test_a_mask_that_hides_nothing_changes_nothing(name: str) -> None:
    everything = torch.ones(SQ, 1, dtype=torch.bool)
    assert check(operands(), **DENSE[name]) == check(operands(), **DENSE[name], mask=everything)


def test_a_long_sequence() -> None:
    n, tiles = 128 << 15, 1 << 15
    q = torch.empty(1, n, 2, 64, device="meta")
    causal = tilewise.cost(q, q, q, causal=True)
    assert causal.flops == 2 * 4 * 64 * n * (n + 1) // 2
    assert causal.tiles_edge == 2 * tiles
    assert causal.tiles_full == causal.tiles_skipped == tiles * (tiles - 1)
    window = tilewise.cost(q, q, q, causal=True, window_size=(255, None))
    assert window.flops == 2 * 4 * 64 * (256 * n - 256 * 255 // 2)
    assert window.tiles_full == 2 * (tiles - 1)
    assert window.tiles_edge == 2 * (tiles + tiles - 2)


@pytest.mark.parametrize(("sq", "sk"), [(31, 23), (1, 31), (23, 1), (0, 5), (5, 0)])
@pytest.mark.parametrize("name", ["full", "causal", "top-left", "window", "left"])
def test_lengths(sq: int, sk: int, name: str) -> None:
    check(operands(sq, sk, torch.float64), **DENSE[name])


def test_no_batch() -> None:
    check([t[:0] for t in operands()], causal=True)


@pytest.mark.parametrize("name", ["full", "causal", "window"])
def test_packed(name: str) -> None:
    q, k, v = (t.flatten(0, 1) for t in operands())
    cu_q, cu_k = torch.tensor([0, 9, 9, 40]), torch.tensor([0, 20, 22, 55])
    counted = check([q, k, v], cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **DENSE[name])
    if name == "full":
        assert counted.flops == HQ * (9 * 20 + 31 * 33) * 2 * (D + DV)


def test_packed_mask_and_range() -> None:
    q, k, v = (t.flatten(0, 1) for t in operands())
    cu_q, cu_k = torch.tensor([0, 9, 9, 40]), torch.tensor([0, 20, 22, 55])
    start = torch.randint(0, 10, (len(q),))
    key_range = (start, start + torch.randint(0, 30, (len(q),)))
    mask = torch.rand(HQ, len(q), 33) < 0.2
    check([q, k, v], cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, mask=mask, key_range=key_range)


@pytest.mark.parametrize("name", ["full", "causal", "range", "mask of rows"])
def test_paged(name: str) -> None:
    q, _, _ = operands()
    pages = [torch.empty(6, 16, HKV, width, dtype=q.dtype) for width in (D, DV)]
    table, used = torch.tensor([[4, 1], [0, 5]]), torch.tensor([SK, 3])
    check([q, *pages], page_table=table, seqused_k=used, **DENSE[name])


@pytest.mark.parametrize("name", ["full", "causal", "top-left", "window", "left"])
def test_bands_need_no_data(name: str) -> None:
    inputs = operands()
    on_meta = [t.to("meta") for t in inputs]
    assert tilewise.cost(*on_meta, **DENSE[name]) == tilewise.cost(*inputs, **DENSE[name])


@pytest.mark.parametrize("name", ["causal", "window", "range"])
def test_skips_what_backends_skip(name: str) -> None:
    inputs, arguments = [t[:1] for t in operands()], dict(DENSE[name])
    if name == "range":
        arguments["key_range"] = tuple(t[:1] for t in arguments["key_range"])
    problem = problem_of(*inputs, **arguments)
    skipped = full = 0
    for i0 in range(0, SQ, BLOCK_Q):
        bounds = problem.bounds(i0, min(i0 + BLOCK_Q, SQ))
        for j0 in range(0, SK, BLOCK_K):
            j1 = min(j0 + BLOCK_K, SK)
            skipped += max(j0, bounds.first) >= min(j1, bounds.last)
            full += bounds.full_first <= j0 and j1 <= bounds.full_last
    counted = tilewise.cost(*inputs, block_q=BLOCK_Q, block_k=BLOCK_K, **arguments)
    assert (counted.tiles_skipped, counted.tiles_full) == (HQ * skipped, HQ * full)


def test_textbook_figures() -> None:
    """4·B·H·S²·D forward, 2.5 times that backward, half of it if causal."""
    q = torch.empty(2, 2048, 3, 64, dtype=torch.float16, device="meta")
    full, causal = tilewise.cost(q, q, q), tilewise.cost(q, q, q, causal=True)
    assert full.flops == 4 * 2 * 3 * 2048**2 * 64
    assert full.flops_backward == 2.5 * full.flops
    assert causal.flops == full.flops * (2048 + 1) // (2 * 2048)
    assert full.extra_bytes_standard == 2 * 6 * 2048**2 * 2
    assert full.extra_bytes_tiled == 6 * 2048 * 4


def test_linear_where_the_standard_form_is_quadratic() -> None:
    q, longer = (torch.empty(1, n, 1, 64, device="meta") for n in (1 << 14, 1 << 17))
    window = tilewise.cost(q, q, q, window_size=(255, 0))
    longer_window = tilewise.cost(longer, longer, longer, window_size=(255, 0))
    assert 7.9 < longer_window.hbm_bytes_tiled / window.hbm_bytes_tiled < 8.1
    assert longer_window.extra_bytes_tiled == 8 * window.extra_bytes_tiled
    assert longer_window.extra_bytes_standard == 64 * window.extra_bytes_standard


def test_draws_nothing_and_ignores_how_it_would_run() -> None:
    inputs, state = operands(), torch.get_rng_state()
    counted = tilewise.cost(*inputs, dropout_p=0.5, return_lse=True, backend="reference")
    assert counted == tilewise.cost(*inputs)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("n", [1, 4096, 1 << 24])
def test_prints_a_narrow_table(n: int) -> None:
    q = torch.empty(64, n, 128, 256, dtype=torch.float64, device="meta")
    k = q[:, :4096]
    text = str(tilewise.cost(q, k, k, block_q=max(128, n // 8)))
    assert max(map(len, text.splitlines())) <= 100
    assert all(word in text for word in ("forward", "backward", "FLOPs", "HBM", "lse", "skipped"))


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"block_q": 0}, "block_q"),
        ({"block_k": 1.5}, "block_k"),
        ({"sram_bytes": -1}, "sram_bytes"),
        ({"window_size": (-1, 0)}, "window_size"),
        ({"mask": torch.ones(3, dtype=torch.int32)}, "mask"),
    ],
)
def test_refuses(arguments: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        tilewise.cost(*operands(), **arguments)


def test_refuses_to_count_without_values() -> None:
    inputs = [t.to("meta") for t in operands()]
    with pytest.raises(ValueError, match="mask must have values"):
        tilewise.cost(*inputs, mask=torch.empty(SQ, SK, dtype=torch.bool, device="meta"))
    ends = torch.empty(SQ, dtype=torch.int32, device="meta")
    with pytest.raises(ValueError, match="key_range must have values"):
        tilewise.cost(*inputs, key_range=(ends, ends))
    packed = [t.flatten(0, 1) for t in inputs]
    with pytest.raises(ValueError, match="cu_seqlens_q must have values"):
        tilewise.cost(*packed, cu_seqlens_q=ends, cu_seqlens_k=ends)
