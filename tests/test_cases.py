"""Every backend runs every case, judged by the closeness rule."""

import pytest
import torch
from inputs import set_tiles

from tilewise import api, dense
from tilewise.backends import flash
from tilewise.dispatch import BACKENDS
from tilewise.testing import (
    CASES,
    Call,
    Case,
    evaluate,
    expect,
    judge,
    make_call,
    mask_probe,
    ramp_call,
    verify,
)

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_case(backend, case, dtype):
    reasons = BACKENDS[backend].unsupported(make_call(case, dtype).problem())
    if reasons:
        with pytest.raises(ValueError, match="cannot serve") as error:
            verify(case, backend, dtype)
        assert all(reason in str(error.value) for reason in reasons)
        return
    wrong = [str(v) for v in verify(case, backend, dtype) if not v.passed]
    assert not wrong


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_many_small_tiles(small_tiles, dtype):
    for case in CASES:
        wrong = [str(v) for v in verify(case, "tiled", dtype) if not v.passed]
        assert not wrong, case


@pytest.mark.parametrize(("sq", "sk"), [(1, 1), (7, 19), (19, 7), (64, 64), (65, 130), (130, 65)])
@pytest.mark.parametrize("align", ["bottom-right", "top-left"])
@pytest.mark.parametrize("window", [(None, None), (0, 0), (3, 0), (5, 2), (None, 4), (100, None)])
@pytest.mark.parametrize("causal", [False, True])
def test_mask_probe(small_tiles, backend, causal, window, align, sq, sk):
    got, counts = mask_probe(
        sq, sk, backend=backend, causal=causal, window_size=window, align=align
    )
    assert torch.equal(got.round(), counts)
    assert (got - counts).abs().max() < 1e-4


@pytest.mark.parametrize("window", [(None, 0), (40, 0), (3, 50), (0, None)])
def test_mask_probe_of_an_edge_over_many_tiles(monkeypatch, window):
    """Rows so many and keys so few to a tile that each edge crosses several, all of one shape."""
    set_tiles(monkeypatch, 64, 8)
    got, counts = mask_probe(130, 130, backend="tiled", window_size=window)
    assert torch.equal(got.round(), counts)
    assert (got - counts).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_ramp(small_tiles, backend, dtype):
    call = ramp_call(33, 200, dtype)
    results = evaluate(call, backend)
    gold, peer = expect(call)
    verdicts = [judge(name, t, gold[name], peer[name], dtype) for name, t in results.items()]
    assert all(v.passed for v in verdicts), verdicts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_ordinary_numbers_stay_on_the_fast_path(small_tiles, monkeypatch, dtype):
    """The exact formula is there for what tiles cannot do; a fault of theirs must not hide behind it."""

    def refuse(*arguments):
        raise AssertionError("computed again by the exact formula")

    monkeypatch.setattr(dense, "forward_in_blocks", refuse)
    monkeypatch.setattr(dense, "backward_in_blocks", refuse)
    falling = ramp_call(33, 200, dtype)
    falling.arguments["k"] = falling.arguments["k"].flip(1)
    negative = falling._replace(arguments={**falling.arguments, "scale": -8.0})
    for call in (*(make_call(case, dtype) for case in CASES), falling, negative):
        evaluate(call, "tiled")


@pytest.mark.parametrize("converted", [False, True])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_flash_kernel_by_the_same_rule(monkeypatch, dtype, converted):
    """Whatever this processor is: where the kernel serves at all, its results pass."""
    good_at = {torch.float32} if converted else set(DTYPES)
    monkeypatch.setattr(flash, "is_good_at", good_at.__contains__)
    monkeypatch.setattr(flash, "FEWEST_CONVERTED_ROWS", 1)
    monkeypatch.setattr(flash, "CONVERTED", 1024)
    monkeypatch.setattr(flash, "onednn_wins", lambda: False)
    monkeypatch.setattr(flash, "FEWEST_ROWS_OF_A_GROUP", 1)
    square = Case("causal, square", lambda make: {"causal": True}, sq=200, sk=200)
    served = [c for c in (*CASES, square) if flash.serves(make_call(c, dtype).problem())]
    assert len(served) >= 9
    for case in served:
        wrong = [str(v) for v in verify(case, "tiled", dtype) if not v.passed]
        assert not wrong, case
        # The kernel's backward pass serves where lse has no gradient.
        call = make_call(case, dtype)
        results = {n: t for n, t in evaluate(call, "tiled", dlse=False).items() if n != "lse"}
        gold, peer = expect(call, dlse=False)
        verdicts = [judge(n, t, gold[n], peer[n], dtype) for n, t in results.items()]
        assert all(v.passed for v in verdicts), (case, verdicts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_rule_refuses_one_per_cent(dtype):
    refused = 0
    for case in CASES[:8]:
        call = make_call(case, dtype)
        if call.function is not api.attention:
            continue
        scale = call.problem().scores.scale
        results = evaluate(Call(api.attention, {**call.arguments, "scale": 1.01 * scale}))
        gold, peer = expect(call)
        verdicts = [judge(n, t, gold[n], peer[n], dtype) for n, t in results.items()]
        refused += not all(v.passed for v in verdicts)
    assert refused >= 6
