"""Inputs on another GPU than the current one: on a machine that has two."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from inputs import cumulative, draw, draw_qkv, draw_tokens

from tilewise import attention, attention_varlen
from tilewise.dispatch import BACKENDS
from tilewise.testing import Call, evaluate

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

CU = cumulative([70, 0, 130])
CALLS = {
    "full": Call(attention, draw_qkv(2, 200, 300, (4, 2), 64)),
    "window": Call(attention, {**draw_qkv(2, 600, 600, 2, 64), "window_size": (100, 0)}),
    "bias": Call(attention, {**draw_qkv(1, 90, 90, 2, 64), "bias": draw(2, 90, 90)}),
    "packed": Call(
        attention_varlen,
        {
            **draw_tokens(200, 200, (4, 2), 64, 64, torch.float32),
            "cu_seqlens_q": CU,
            "cu_seqlens_k": CU,
        },
    ),
}


def on(device: str, call: Call, dtype: torch.dtype) -> Call:
    def moved(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.to(device, dtype if value.is_floating_point() else None)

    arguments = {name: moved(value) for name, value in call.arguments.items()}
    return call._replace(arguments={**arguments, "deterministic": True})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("backend", ["hopper", "triton", "tiled"])
def test_results_are_there_and_the_same(backend: str, name: str, dtype: torch.dtype) -> None:
    here, there = (on(device, CALLS[name], dtype) for device in ("cuda:0", "cuda:1"))
    if reasons := BACKENDS[backend].unsupported(there.problem()):
        with torch.cuda.device(0), pytest.raises(ValueError, match="cannot serve") as error:
            evaluate(there, backend)
        assert all(reason in str(error.value) for reason in reasons)
        return
    for _ in range(3):  # the third is a replay
        with torch.cuda.device(0):
            got, want = evaluate(there, backend), evaluate(here, backend)
            assert torch.cuda.current_device() == 0
        for key, t in got.items():
            assert t.device == torch.device("cuda:1"), key
            assert torch.equal(t.cpu(), want[key].cpu()), key
