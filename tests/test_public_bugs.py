"""Faults that other attention libraries were reported to have, each as a whole kind.

Every test names its public report. Where a report used (B, H, S, D) tensors, so do the leaves here,
passed as transposed views.

What of these kinds waits for a feature:
- score functions of the caller (B30, B31): now by bias, scale and what is computed outside;
- block masks (B62): now by a mask of the wrong length;
- CUDA graphs and their replay (B64, B65): now by buffers that change between calls;
- several devices (B70): mixed devices alone, in test_errors.py;
- rings of ranks (B75, B76): now by `merge` in one process;
- tokens × heads past 2³¹ on a GPU (B42, B43): now by views of virtual memory;
- a build in a fresh environment (B79): now by imports in a bare interpreter.
"""

import functools
import math
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from dense64 import (
    INF,
    attention64,
    check,
    close,
    gradients,
    keep64,
    paged64,
    varlen64,
    visible,
)
from inputs import draw, draw_qkv, draw_tokens
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import tilewise

torch.set_num_threads(1)

NAN = math.nan
HALVES = [torch.bfloat16, torch.float16]
FLOATS = [torch.float32, *HALVES]
TRIANGLE = {"causal": True, "align": "top-left"}  # is_causal of scaled_dot_product_attention


def check_packed(
    packed: Callable[..., Any], cu_q: list[int], cu_k: list[int], leaves: Any, **options: Any
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    cu = {"cu_seqlens_q": torch.tensor(cu_q), "cu_seqlens_k": torch.tensor(cu_k)}
    theirs = functools.partial(varlen64, cu_q=cu_q, cu_k=cu_k)
    return check(packed, theirs, leaves, our_options=cu, **options)


# ---------------------------------------------------------------------------------------------
# Causal, windows, softcap, alibi, heads


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("lengths", [(3, 128), (2, 5), (1, 9), (65, 130), (63, 1)])
def test_b01_causal_is_bottom_right(attend, lengths, dtype, small_tiles):
    """https://github.com/NVIDIA/cutlass/issues/2336"""
    sq, sk = lengths
    mask = torch.arange(sk)[None] <= torch.arange(sq)[:, None] + sk - sq
    leaves = draw_qkv(1, sq, sk, dtype=dtype)
    theirs = functools.partial(attention64, mask=mask)
    check(functools.partial(attend, causal=True), theirs, leaves)


@pytest.mark.parametrize("lengths", [(1, 16), (2, 4), (4, 2), (16, 16)])
def test_b02_top_left_keeps_the_meaning_of_is_causal(attend, lengths):
    """https://github.com/pytorch/executorch/issues/22426"""
    sq, sk = lengths
    leaves = draw_qkv(1, sq, sk, 4, 64, head_major=True)
    out, lse, _ = check(attend, attention64, leaves, **TRIANGLE)
    q, k, v = (t.transpose(1, 2) for t in leaves.values())
    close(out.transpose(1, 2), scaled_dot_product_attention(q, k, v, is_causal=True))
    if sq == 1:
        assert torch.equal(out, leaves["v"][:, :1])
        close(lse, (q * k[:, :, :1]).sum(-1) / 8)
    if lengths == (2, 4):
        torch.compiler.reset()
        compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
        close(compiled(**leaves, **TRIANGLE)[0], out)


@pytest.mark.parametrize("sk", [8, 11, 5])
def test_b04_windows_are_inclusive(attend, sk):
    """https://github.com/huggingface/transformers/issues/39408"""
    s = 8
    q, k = torch.zeros(1, s, 1, 8), draw(1, sk, 1, 8)
    v = torch.eye(sk)[None, :, None]

    def weights(**options: Any) -> Tensor:
        return attend(q, k, v, **options)[0][0, :, 0]

    for causal, window in [
        (True, (2, 0)),
        (True, (0, 0)),
        (True, (s - 1, 0)),
        (True, (s, 0)),
        (True, (None, 0)),
        (True, (3, 2)),
        (False, (3, 2)),
        (False, (0, 0)),
        (False, (None, 1)),
        (False, (1, None)),
    ]:
        seen = visible(s, sk, causal, window_size=window).double()
        count = seen.sum(-1, keepdim=True)
        close(weights(causal=causal, window_size=window), (seen / count.clamp(min=1)).float())
    if sk == s:
        expected = torch.stack([torch.arange(8) <= i for i in range(8)]) & torch.stack(
            [torch.arange(8) >= i - 2 for i in range(8)]
        )
        n = torch.arange(1, 9).clamp(max=3)[:, None]
        close(weights(causal=True, window_size=(2, 0)), expected / n)
        assert torch.equal(weights(causal=True, window_size=(0, 0)), torch.eye(8))
    if sk <= s:
        plain = weights(causal=True)
        for window in [(s - 1, 0), (s, 0), (None, 0)]:
            close(weights(causal=True, window_size=window), plain)


@pytest.mark.parametrize("softcap", [0.5, 1.0, 50.0])
def test_b07_softcap_comes_before_masking(attend, softcap):
    """https://github.com/Dao-AILab/flash-attention/pull/1025"""
    leaves = draw_qkv(1, 4, 4, d=8)
    leaves["q"], leaves["k"] = leaves["q"] * 4, leaves["k"] * 4
    options = {"causal": True, "softcap": softcap}
    check(attend, attention64, leaves, **options)
    leaves["v"][:, -1] = 1e4
    out, _ = attend(**leaves, **options)
    close(out[:, 0], leaves["v"][:, 0])
    leaves["v"][:, -1] += 1e4
    assert torch.equal(attend(**leaves, **options)[0][:, :-1], out[:, :-1])


def test_b07_no_softcap_is_no_cap(attend):
    leaves = draw_qkv(1, 4, 4, d=8)
    for ours, theirs in zip(attend(**leaves, softcap=None), attend(**leaves), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_b09_softcap_backward(attend, dtype, masked, biased, small_tiles):
    """https://github.com/openxla/tokamax/pull/1121"""
    leaves = draw_qkv(1, 64, 64, 2, 32, dtype=dtype)
    q, k = leaves["q"].double(), leaves["k"].double()
    largest = torch.einsum("bihd,bjhd->bhij", q, k).abs().max().item()
    if biased:
        leaves["bias"] = draw(2, 64, 64)
    mask = None
    if masked:
        mask = torch.rand(2, 64, 64) < 0.5
        mask[:, 5:9] = False
    options = {"causal": True, "mask": mask, "softcap": 30.0, "scale": 168 / largest}
    _, _, grads = check(attend, attention64, leaves, **options)
    assert all(g.isfinite().all() for g in grads.values())


def test_b10_alibi_slopes_of_any_head_count():
    """https://github.com/ml-explore/mlx/pull/3071"""

    def slopes(n: int) -> list[float]:
        if n & (n - 1) == 0:
            return [2 ** (-8 * (h + 1) / n) for h in range(n)]
        lower = 1 << (n.bit_length() - 1)
        return slopes(lower) + slopes(2 * lower)[0::2][: n - lower]

    for n in (1, 2, 3, 5, 6, 8, 12, 40):
        close(tilewise.alibi_slopes(n), torch.tensor(slopes(n), dtype=torch.float64))
    twelve = [2.0**-i for i in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]
    close(tilewise.alibi_slopes(12), torch.tensor(twelve))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("align", ["bottom-right", "top-left"])
def test_b10_alibi_in_the_kernel(attend, causal, align, small_tiles):
    # One shape after another: nothing of an earlier one may linger.
    for sq, sk in [(6, 6), (6, 40), (20, 6), (33, 40)]:
        leaves = draw_qkv(2, sq, sk, 12, 8)
        leaves["alibi_slopes"] = tilewise.alibi_slopes(12)
        check(attend, attention64, leaves, causal=causal, align=align)
        leaves["alibi_slopes"] = draw(2, 12).abs()
        check(attend, attention64, leaves, causal=causal, align=align)
    offset = sk - sq if align == "bottom-right" else 0
    distance = (torch.arange(sq)[:, None] + offset - torch.arange(sk)).abs()
    slopes = tilewise.alibi_slopes(12)
    leaves.pop("alibi_slopes")
    options = {**leaves, "causal": causal, "align": align}
    ours = attend(**options, alibi_slopes=slopes)
    for a, b in zip(ours, attend(**options, bias=-slopes[:, None, None] * distance), strict=True):
        close(a, b)


@pytest.mark.parametrize("heads", [(9, 3), (12, 2), (15, 3), (7, 7)])
@pytest.mark.parametrize("sq", [1, 5, 17, 130])
def test_b12_any_number_of_heads_per_key_head(attend, heads, sq):
    """https://github.com/pytorch/pytorch/issues/143117"""
    leaves = draw_qkv(1, sq, max(5, sq), heads, 16, head_major=True)
    out, _, _ = check(attend, attention64, leaves)
    q, k, v = (t.transpose(1, 2) for t in leaves.values())
    close(out.transpose(1, 2), scaled_dot_product_attention(q, k, v, enable_gqa=True))


@pytest.mark.parametrize("heads", [(9, 3), (12, 2), (15, 3), (7, 7)])
def test_b12_decode_of_a_long_context(attend, heads):
    check(attend, attention64, draw_qkv(1, 1, 4096, heads, 16, head_major=True))


@pytest.mark.parametrize("hq", [16, 17, 33, 48, 128])
@pytest.mark.parametrize("sq", [1, 3])
def test_b13_many_query_heads_of_one_key_head(attend, paged, hq, sq):
    """https://github.com/vllm-project/vllm/pull/23424"""
    leaves = draw_qkv(2, sq, 70, (hq, 1), 128)
    check(attend, attention64, leaves, causal=True)
    q, k, v = leaves.values()
    pages = [t.reshape(2 * 7, 10, 1, 128) for t in (k, v)]
    table = torch.arange(14).reshape(2, 7)
    out, lse = paged(q, *pages, table, torch.tensor([70, 33]), causal=True)
    want, want_lse = paged64(q, *pages, table, [70, 33], causal=True)
    close(out, want)
    close(lse, want_lse)


# ---------------------------------------------------------------------------------------------
# NaN and infinity


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("lengths", [(128, 128), (130, 126)])
@pytest.mark.parametrize("spelling", ["mask", "bias", "key_range"])
def test_b15_leading_tiles_hidden_from_a_row(attend, dtype, lengths, spelling, small_tiles):
    """https://github.com/facebookresearch/xformers/issues/722"""
    n, s = lengths[0], sum(lengths)
    seen = torch.block_diag(*(torch.ones(n, n).tril() for n in lengths)).bool()
    start = torch.where(torch.arange(s) < n, 0, n)[None]
    options: dict[str, Any] = {
        "mask": {"mask": seen},
        "bias": {"bias": torch.zeros(s, s).masked_fill(~seen, -INF)},
        "key_range": {"key_range": (start, torch.arange(1, s + 1)[None])},
    }[spelling]
    leaves = draw_qkv(1, s, s, d=32, dtype=dtype, head_major=True)
    theirs = functools.partial(attention64, mask=seen)
    out, lse, grads = check(functools.partial(attend, **options), theirs, leaves)
    assert all(t.isfinite().all() for t in (out, lse, *grads.values()))
    for part in (slice(0, n), slice(n, s)):
        alone, alone_lse = attend(*(t[:, part] for t in leaves.values()), **TRIANGLE)
        close(out[:, part], alone)
        close(lse[:, :, part], alone_lse)


@pytest.mark.parametrize("where", ["key", "value", "both"])
@pytest.mark.parametrize("value", [1e10, NAN, INF, -INF])
def test_b16_hidden_keys_and_values_do_not_matter(attend, where, value):
    """https://github.com/pytorch/pytorch/issues/101967"""
    q = torch.arange(8.0).reshape(1, 2, 1, 4)
    mask = torch.tensor([[True, False], [True, False]])
    clean = gradients(attend, {"q": q, "k": q, "v": q}, torch.ones_like(q), None, mask=mask)
    k, v = q.clone(), q.clone()
    if where != "value":
        k[0, 1, 0, 0] = value
    if where != "key":
        v[0, 1] = value
    got = gradients(attend, {"q": q, "k": k, "v": v}, torch.ones_like(q), None, mask=mask)
    assert got[0].tolist() == [[[[0.0, 1, 2, 3]], [[0.0, 1, 2, 3]]]]
    assert torch.equal(got[0], clean[0])
    assert torch.equal(got[1], clean[1])
    for name, gradient in got[2].items():
        close(gradient, clean[2][name])
    assert (got[2]["k"][:, 1] == 0).all()
    assert (got[2]["v"][:, 1] == 0).all()


HIDING: dict[str, tuple[dict[str, Any], list[int]]] = {
    # Keys 0 … 23 of 4 rows: the options and the keys that no row sees.
    "causal": ({"causal": True, "align": "top-left"}, list(range(4, 24))),
    "window": ({"window_size": (3, 2)}, list(range(17))),
    "range": (
        {"key_range": (torch.full((1, 1), 3), torch.full((1, 1), 15))},
        [0, 1, 2, *range(15, 24)],
    ),
    "padding": ({"mask": torch.arange(24).view(1, 1, 1, 24) < 19}, list(range(19, 24))),
    "bias": (
        {"bias": torch.zeros(24).masked_fill(torch.arange(24) % 5 == 0, -INF)},
        [0, 5, 10, 15, 20],
    ),
}


@pytest.mark.parametrize("kind", HIDING)
@pytest.mark.parametrize("value", [1e10, NAN, INF])
def test_b16_however_they_are_hidden(attend, kind, value, small_tiles):
    options, hidden = HIDING[kind]
    leaves = draw_qkv(2, 4, 24, (4, 2))
    want = gradients(attend, leaves, torch.ones(2, 4, 4, 16), torch.ones(2, 4, 4), **options)
    leaves["k"][:, hidden] = leaves["v"][:, hidden] = value
    got = gradients(attend, leaves, torch.ones(2, 4, 4, 16), torch.ones(2, 4, 4), **options)
    close(got[0], want[0])
    close(got[1], want[1])
    for name in leaves:
        close(got[2][name], want[2][name])
    for name in ("k", "v"):
        assert (got[2][name][:, hidden] == 0).all()


@pytest.mark.parametrize("value", [1e10, NAN, INF])
def test_b16_past_the_length_of_a_cache(paged, value):
    q, k, v = draw_qkv(2, 3, 24, (4, 2)).values()
    table = torch.arange(12).reshape(2, 6)
    used = [13, 6]
    want = paged64(q, k.reshape(12, 4, 2, 16), v.reshape(12, 4, 2, 16), table, used, causal=True)
    for b, n in enumerate(used):
        k[b, n:] = v[b, n:] = value
    pages = (k.reshape(12, 4, 2, 16), v.reshape(12, 4, 2, 16))
    for num_splits in (None, 1, 3):
        got = paged(q, *pages, table, torch.tensor(used), causal=True, num_splits=num_splits)
        close(got[0], want[0])
        close(got[1], want[1])


@pytest.mark.parametrize("keys", [1, 2])
@pytest.mark.parametrize("sign", [1, -1])
def test_b19_huge_finite_inputs(attend, keys, sign):
    """https://github.com/pytorch/pytorch/issues/121558"""
    huge = torch.full((1, 1, 1, 64), 133120.0, dtype=torch.bfloat16)
    leaves = {"q": sign * huge, "k": huge.expand(1, keys, 1, 64), "v": huge.expand(1, keys, 1, 64)}
    out, lse, grads = gradients(attend, leaves, torch.ones_like(huge), None)
    assert (out == 133120).all()
    assert lse.isfinite().all()
    logit = sign * 133120.0**2 * 64 / 8
    assert lse.item() == pytest.approx(logit, rel=1e-6)
    assert (grads["v"] == 1 / keys).all()
    assert all(g.isfinite().all() for g in grads.values())
    assert (grads["q"] == 0).all()
    assert (grads["k"] == 0).all()


@pytest.mark.parametrize("spelling", ["mask", "bias", "key_range"])
def test_b21_rows_without_a_key(attend, spelling):
    """https://github.com/Xilinx/brevitas/pull/1591"""
    seen = torch.zeros(8, 8, dtype=torch.bool)
    seen[:4, :4] = True
    options: dict[str, Any] = {
        "mask": {"mask": seen},
        "bias": {"bias": torch.zeros(8, 8).masked_fill(~seen, -INF)},
        "key_range": {"key_range": (torch.zeros(1, 1, dtype=torch.int32), seen.sum(-1)[None])},
    }[spelling]
    leaves = draw_qkv(1, 8, 8, d=8, head_major=True)
    out, lse, grads = gradients(attend, leaves, torch.ones(1, 8, 1, 8), None, **options)
    small = {name: t[:, :4] for name, t in leaves.items()}
    out4, lse4, grads4 = gradients(attend, small, torch.ones(1, 4, 1, 8), None)
    close(out[:, :4], out4)
    close(lse[..., :4], lse4)
    assert (out[:, 4:] == 0).all()
    assert (lse[..., 4:] == -INF).all()
    for name, gradient in grads.items():
        close(gradient[:, :4], grads4[name])
        assert (gradient[:, 4:] == 0).all()


def test_b21_left_padding_and_causal(attend):
    padding = torch.tensor([[0, 0, 0, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]]).bool()
    leaves = draw_qkv(3, 5, 5, 2, 8)
    dout = torch.ones(3, 5, 2, 8)
    start = (~padding).sum(-1, keepdim=True)
    for options in (
        {"mask": padding[:, None, None]},
        {"key_range": (start, torch.full_like(start, 5))},
    ):
        out, lse, grads = gradients(attend, leaves, dout, None, causal=True, **options)
        for b in range(3):
            n = int(start[b])
            own = {name: t[b : b + 1, n:] for name, t in leaves.items()}
            o, m, g = gradients(attend, own, dout[:1, n:], None, causal=True)
            close(out[b : b + 1, n:], o)
            close(lse[b : b + 1, :, n:], m)
            assert (out[b, :n] == 0).all()
            for name, gradient in grads.items():
                close(gradient[b : b + 1, n:], g[name])
                assert (gradient[b, :n] == 0).all()


@pytest.mark.parametrize("d", [1, 2, 8, 16])
@pytest.mark.parametrize("dtype", FLOATS)
def test_b23_one_query_and_one_key(attend, d, dtype):
    """https://github.com/Dao-AILab/flash-attention/issues/334"""
    leaves = {n: 3 * t for n, t in draw_qkv(1, 1, 1, d=d, dtype=dtype).items()}
    out, lse, grads = gradients(attend, leaves, torch.ones_like(leaves["v"]), None)
    assert torch.equal(out, leaves["v"])
    close(grads["v"], torch.ones_like(leaves["v"]))
    assert grads["q"].abs().max() < 1e-2
    assert grads["k"].abs().max() < 1e-2
    close(lse, (leaves["q"].double() * leaves["k"].double()).sum(-1) * d**-0.5, torch.float32)


# ---------------------------------------------------------------------------------------------
# Strides


def upstream(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    b, s, h, d = shape
    if kind == "permuted":
        return draw(s, h, b, d, dtype=dtype).permute(2, 0, 1, 3)
    if kind == "head-major":
        return draw(b, h, s, d, dtype=dtype).transpose(1, 2)
    if kind == "slice":
        return draw(b, s, h, d + 32, dtype=dtype)[..., :d]
    if kind == "every second":
        return draw(b, s, h, 2 * d, dtype=dtype)[..., ::2]
    if kind == "backwards":
        return draw(d, h, s, b, dtype=dtype).permute(3, 2, 1, 0)
    return draw(1, 1, 1, 1, dtype=dtype).expand(shape)  # what sum() sends


@pytest.mark.parametrize(
    "kind", ["permuted", "head-major", "slice", "every second", "backwards", "expanded"]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_b25_upstream_gradient_of_any_strides(attend, kind, dtype):
    """https://github.com/Dao-AILab/flash-attention/issues/355"""
    leaves = draw_qkv(2, 4, 4, (32, 1), 128, dtype=dtype)
    dout = upstream(kind, (2, 4, 32, 128), dtype)
    got = gradients(attend, leaves, dout, None)[2]
    same = gradients(attend, leaves, dout.contiguous(), None)[2]
    wide = {name: t.double() for name, t in leaves.items()}
    want = gradients(attention64, wide, dout.double(), None)[2]
    for name in leaves:
        assert torch.equal(got[name], same[name])
        close(got[name], want[name], dtype, 4)


@pytest.mark.parametrize("compiled", [False, True])
def test_b26_length_sliced_keys_and_values(attend, compiled):
    """https://github.com/pytorch/pytorch/issues/146377"""
    torch.compiler.reset()
    run = torch.compile(attend, backend="aot_eager") if compiled else attend

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return run(*(t.transpose(1, 2) for t in (q, k, v)))[0]

    q, k, v = (draw(1, 2, 384, 16, seed=i).requires_grad_() for i in range(3))
    call(q, k, v).sum().backward()
    got = torch.autograd.grad(call(q, k[:, :, :-128], v[:, :, :-128]).sum(), (q, k, v))
    k2, v2 = (t.detach()[:, :, :-128].clone().requires_grad_() for t in (k, v))
    want = torch.autograd.grad(call(q, k2, v2).sum(), (q, k2, v2))
    close(got[0], want[0])
    for gradient, short in zip(got[1:], want[1:], strict=True):
        close(gradient[:, :, :-128], short)
        assert (gradient[:, :, -128:] == 0).all()
    assert got[2][:, :, :-128].mean().item() == pytest.approx(384 / 256, rel=1e-5)


def test_b39_strides_of_dimensions_of_size_one(attend):
    """https://github.com/pytorch/pytorch/issues/116333"""
    q = torch.tensor([[[[1.0, 2.0]]]]).transpose(-1, -2).transpose(1, 2)
    assert q.shape == (1, 2, 1, 1)
    one = torch.ones(1, 1, 1, 1)
    assert attend(q, one, one)[0].flatten().tolist() == [1.0, 1.0]
    for strides in [(2**40, 1, 2**40, 7), (0, 1, 0, 0), (1, 1, 1, 2**40)]:
        strange = q.contiguous().as_strided((1, 2, 1, 1), strides)
        key = one.as_strided((1, 1, 1, 1), strides)
        leaves = {"q": strange, "k": key, "v": key}
        out, _, grads = gradients(attend, leaves, torch.ones(1, 2, 1, 1), None)
        assert out.flatten().tolist() == [1.0, 1.0]
        assert grads["v"].item() == 2
        assert grads["q"].flatten().tolist() == [0, 0]
    row = draw(1, 1, 2, 8).as_strided((1, 1, 2, 8), (2**40, 2**40, 8, 1))
    keys = draw_qkv(1, 1, 5, 2, 8)
    close(attend(row, keys["k"], keys["v"])[0], attend(row.clone(), keys["k"], keys["v"])[0])


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    # Of a leaf (B, S, 2, D); all but "expand" keep its values.
    "expand": lambda t: t[:, :, :1].expand(-1, -1, 4, -1),
    "transpose": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "stride 2": lambda t: torch.stack([t, t + 1], -1).flatten(-2)[..., ::2],
    "inside out": lambda t: t.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    "slice": lambda t: torch.nn.functional.pad(t, (3, 5, 1, 0, 2, 2))[:, 2:-2, 1:, 3:-5],
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("sq", [1, 9])
def test_b44_views_of_keys_and_values(attend, view, dtype, sq, small_tiles):
    """https://github.com/pytorch/pytorch/issues/112577"""
    leaves = draw_qkv(1, sq, 21, (4, 2), 12, dtype=dtype)
    make = VIEWS[view]
    mask = torch.ones(1, 1, 1, 21, dtype=torch.bool)

    def through(prepare: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
        return lambda q, k, v: attend(q, prepare(make(k)), prepare(make(v)), mask=mask)

    dout = draw(1, sq, 4, 12, dtype=dtype)
    got = gradients(through(lambda t: t), leaves, dout, None)
    same = gradients(through(lambda t: t.contiguous()), leaves, dout, None)
    close(got[0], same[0])
    close(got[1], same[1])
    for name in leaves:
        close(got[2][name], same[2][name])
    k, v = make(leaves["k"]), make(leaves["v"])
    close(got[0], attention64(leaves["q"], k, v)[0], dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_b44_slices_of_one_fused_tensor(attend, dtype, small_tiles):
    fused = draw(2, 17, 3, 4, 8, dtype=dtype)
    leaf = fused.clone().requires_grad_()
    q, k, v = leaf.unbind(2)
    out, _ = attend(q, k, v, mask=torch.ones(17, dtype=torch.bool))
    dout = draw(2, 17, 4, 8, dtype=dtype)
    out.backward(dout)
    wide = fused.double().requires_grad_()
    want, _ = attention64(*wide.unbind(2))
    want.backward(dout.double())
    close(out, want, dtype)
    close(leaf.grad, wide.grad, dtype, 4)


# ---------------------------------------------------------------------------------------------
# Gradients


def lse_loss(kind: str, out: Tensor, lse: Tensor) -> Tensor:
    finite = torch.where(lse == -INF, 0.0, lse)
    if kind == "mean":
        return finite.mean()
    if kind == "both":
        return out.sum() + finite.sum()
    return (out * lse.exp().transpose(1, 2)[..., None].to(out.dtype)).sum()


@pytest.mark.parametrize("kind", ["mean", "both", "product"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [(16, 16), (20, 16)])
def test_b29_a_loss_of_lse(attend, kind, dtype, lengths, small_tiles):
    """https://github.com/Dao-AILab/flash-attention/issues/1817"""
    leaves = draw_qkv(2, *lengths, 2, 8, dtype=dtype)
    ours = {n: t.clone().requires_grad_() for n, t in leaves.items()}
    theirs = {n: t.double().requires_grad_() for n, t in leaves.items()}
    lse_loss(kind, *attend(**ours, causal=True)).backward()
    lse_loss(kind, *attention64(**theirs, causal=True)).backward()
    for name in leaves:
        gradient = ours[name].grad
        if kind == "mean" and name == "v":
            assert gradient is None or (gradient == 0).all()
        else:
            assert gradient.abs().max() > 0
            close(gradient, theirs[name].grad, dtype, 4)


def test_b29_lse_gradient_by_hand(attend):
    leaves = draw_qkv(1, 5, 7, d=8)
    dlse = draw(1, 1, 5, seed=9)
    grads = gradients(attend, leaves, None, dlse)[2]
    q, k = leaves["q"][0, :, 0], leaves["k"][0, :, 0]
    p = torch.softmax(q @ k.T * 8**-0.5, -1)
    close(grads["q"][0, :, 0], 8**-0.5 * (p @ k) * dlse[0, 0, :, None])
    close(grads["k"][0, :, 0], 8**-0.5 * (p * dlse[0, 0, :, None]).T @ q)
    assert (grads["v"] == 0).all()


def test_b29_empty_rows_that_say_sum(attend):
    leaves = {n: t.requires_grad_() for n, t in draw_qkv(1, 9, 4, d=8).items()}
    out, lse = attend(**leaves, causal=True)
    (out.sum() + lse.sum()).backward()
    assert all(t.grad.isfinite().all() for t in leaves.values())
    assert (leaves["q"].grad[:, :5] == 0).all()


BIAS_TABLES: dict[str, tuple[tuple[int, ...], Callable[[Tensor, int], Tensor]]] = {
    # The shape of a learnable table, and the bias (H, S, S) that it makes.
    "scalar": ((), lambda t, s: t),
    "head": ((2,), lambda t, s: t[:, None, None]),
    "relative": (
        (2, 256),
        lambda t, s: t[:, torch.arange(s)[:, None] - torch.arange(s) + s],
    ),
    "buckets": ((2, 4), lambda t, s: t[:, (torch.arange(s)[:, None] + torch.arange(s)) % 3]),
    "product": ((128,), lambda t, s: t[:s, None] * t[None, :s]),
}


@pytest.mark.parametrize(
    ("table", "dtype", "compiled"),
    [
        *(
            (table, dtype, False)
            for table in BIAS_TABLES
            for dtype in (torch.float32, torch.float16)
        ),
        ("scalar", torch.float32, True),
        ("relative", torch.float32, True),
    ],
)
def test_b30_learnable_tables(attend, table, dtype, compiled):
    """https://github.com/pytorch/pytorch/issues/145208"""
    shape, make = BIAS_TABLES[table]
    leaves = {**draw_qkv(1, 128, 128, 2, dtype=dtype, head_major=True), "t": draw(*shape, seed=5)}

    def ours(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        return attend(q, k, v, bias=make(t, 128))

    def theirs(q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        return attention64(q, k, v, bias=make(t, 128))

    torch.compiler.reset()
    run = torch.compile(ours, backend="aot_eager", fullgraph=True) if compiled else ours
    _, _, grads = check(run, theirs, leaves)
    assert grads["t"].shape == shape
    if table == "buckets":
        assert (grads["t"][:, 3] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_b30_a_learnable_factor(attend, dtype):
    leaves = {**draw_qkv(1, 64, 64, 2, dtype=dtype), "t": torch.tensor(1.0)}

    def scaled(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda q, k, v, t: function(q * t.to(q.dtype), k, v, causal=True)

    _, _, grads = check(scaled(attend), scaled(attention64), leaves)
    assert grads["t"].shape == ()


@pytest.mark.parametrize("way", ["scale", "zeros"])
@pytest.mark.parametrize("kind", ["linear", "hidden", "all hidden"])
def test_b31_scores_that_do_not_depend_on_the_product(attend, way, kind, small_tiles):
    """https://github.com/pytorch/pytorch/issues/145050"""
    s = 20
    i, j = torch.arange(s)[:, None], torch.arange(s)
    bias = -0.1 * (i - j).abs()
    if kind != "linear":
        bias = torch.zeros(s, s).masked_fill((i + j) % 3 == 0, -INF)
    if kind == "all hidden":
        bias[4:9] = -INF
    leaves = draw_qkv(1, s, s, 2)
    options: dict[str, Any] = {"scale": 0.0}
    if way == "zeros":
        leaves["q"], leaves["k"], options = leaves["q"] * 0, leaves["k"] * 0, {}
    out, lse, grads = check(attend, attention64, leaves, bias=bias, **options)
    assert (grads["q"] == 0).all()
    assert (grads["k"] == 0).all()
    if kind == "all hidden":
        assert (out[:, 4:9] == 0).all()
        assert (lse[:, :, 4:9] == -INF).all()


@pytest.mark.parametrize("heads", [(8, 2), (6, 3), (12, 4)])
@pytest.mark.parametrize("dims", [(32, 64), (64, 32), (96, 64), (192, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_b32_packed_heads_and_widths(packed, heads, dims, dtype):
    """https://github.com/XunhaoLai/native-sparse-attention-triton/issues/27"""
    cu = [0, 3, 133, 134]
    # Memory that holds NaN is handed out again, where results would show what is not written.
    poison = [torch.full((134, 12, 192), NAN) for _ in range(8)]
    del poison
    check_packed(packed, cu, cu, draw_tokens(134, 134, heads, *dims, dtype))


DIFFERENTIABLE: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "empty rows": {"causal": True, "window_size": (1, 0)},
    "softcap": {"softcap": 2.0},
    "mask": {"mask": torch.arange(30).reshape(5, 6) % 4 != 0},
    "dropout": {"dropout_p": 0.3, "dropout_seed": 5},
    "range": {"key_range": (torch.tensor([[0, 1, 2, 3, 4]]), torch.tensor([[3, 3, 3, 3, 3]]))},
}


@pytest.mark.parametrize("options", DIFFERENTIABLE)
def test_b33_second_derivatives(attend, options):
    """https://github.com/pytorch/pytorch/issues/116350"""
    given = DIFFERENTIABLE[options]
    sq = 5 if options in ("mask", "range") else 7
    leaves = draw_qkv(1, sq, 6, (2, 1), 3, 2, torch.float64)
    tensors = [t.requires_grad_() for t in leaves.values()]

    def call(*x: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = attend(*x, **given)
        return out, lse.masked_fill(lse == -INF, 0.0)

    fast = {"fast_mode": True, "atol": 1e-6}
    assert torch.autograd.gradcheck(call, tensors, check_forward_ad=True, **fast)
    assert torch.autograd.gradgradcheck(call, tensors, **fast)


def test_b33_second_derivatives_of_what_adds_to_scores(attend):
    leaves = draw_qkv(2, 4, 5, (2, 1), 3, 2, torch.float64)
    extra = {
        "bias": draw(2, 1, 5, dtype=torch.float64, seed=7),
        "alibi_slopes": draw(2, dtype=torch.float64, seed=8),
        "sinks": draw(2, dtype=torch.float64, seed=9),
    }
    names = [*leaves, *extra]
    tensors = [t.requires_grad_() for t in (leaves | extra).values()]

    def call(*x: Tensor) -> tuple[Tensor, Tensor]:
        return attend(**dict(zip(names, x, strict=True)), causal=True, softcap=3.0)

    fast = {"fast_mode": True, "atol": 1e-6}
    assert torch.autograd.gradcheck(call, tensors, check_forward_ad=True, **fast)
    assert torch.autograd.gradgradcheck(call, tensors, **fast)


def test_b33_packed_second_derivatives(packed):
    leaves = draw_tokens(7, 8, (2, 1), 3, 2, torch.float64)
    tensors = [t.requires_grad_() for t in leaves.values()]
    cu_q, cu_k = torch.tensor([0, 3, 3, 6]), torch.tensor([0, 4, 6, 7])

    def call(*x: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = packed(*x, cu_q, cu_k, causal=True)
        return out, lse.masked_fill(lse == -INF, 0.0)

    fast = {"fast_mode": True, "atol": 1e-6}
    assert torch.autograd.gradcheck(call, tensors, check_forward_ad=True, **fast)
    assert torch.autograd.gradgradcheck(call, tensors, **fast)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_b33_gradient_penalty(attend, dtype, small_tiles):
    leaves = draw_qkv(2, 16, 16, 2, 8, dtype=dtype, head_major=True)

    def penalty(function: Callable[..., Any], x: dict[str, Tensor]) -> tuple[Tensor, ...]:
        x = {n: t.detach().requires_grad_() for n, t in x.items()}
        out, _ = function(**x, causal=True)
        (g,) = torch.autograd.grad(out, x["q"], torch.ones_like(out), create_graph=True)
        return torch.autograd.grad(g.pow(2).sum(), tuple(x.values()))

    want = penalty(attention64, {n: t.double() for n, t in leaves.items()})
    for ours, theirs in zip(penalty(attend, leaves), want, strict=True):
        assert ours.abs().max() > 0
        close(ours, theirs, dtype, 4)


def test_b33_forward_mode(attend, small_tiles):
    leaves = draw_qkv(2, 9, 20, (4, 2), 8, 4, torch.float64)
    moves = tuple(
        draw(*t.shape, dtype=torch.float64, seed=50 + i) for i, t in enumerate(leaves.values())
    )
    options = {"causal": True, "softcap": 2.0}
    x = tuple(leaves.values())
    got = torch.func.jvp(lambda *a: attend(*a, **options), x, moves)
    want = torch.func.jvp(lambda *a: attention64(*a, **options), x, moves)
    for ours, theirs in zip((*got[0], *got[1]), (*want[0], *want[1]), strict=True):
        close(ours, theirs)


# ---------------------------------------------------------------------------------------------
# Shapes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("lengths", [(0, 0), (3, 0), (0, 5)])
@pytest.mark.parametrize("options", [{}, TRIANGLE, {"causal": True}], ids=str)
def test_b35_no_queries_or_no_keys(attend, dtype, lengths, options):
    """https://github.com/pytorch/pytorch/issues/141219"""
    sq, sk = lengths
    leaves = draw_qkv(7, sq, sk, 7, 7, 6, dtype, head_major=True)
    out, lse, grads = gradients(
        attend, leaves, torch.ones(7, sq, 7, 6), torch.ones(7, 7, sq), **options
    )
    assert out.shape == (7, sq, 7, 6)
    assert (out == 0).all()
    assert lse.shape == (7, 7, sq)
    assert (lse == -INF).all()
    for name, gradient in grads.items():
        assert gradient.shape == leaves[name].shape
        assert (gradient == 0).all()


def test_b35_head_counts_that_do_not_fit(attend):
    with pytest.raises(ValueError, match=r"q must have a multiple of the 7 heads of k, got 9"):
        attend(**draw_qkv(7, 0, 0, (9, 7), 7), causal=True)


WIDTHS = [(128, 64), (64, 128), (192, 128), (72, 40), (1, 16), (16, 1)]


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_b37_values_of_another_width(attend, widths, dtype):
    """https://github.com/pytorch/pytorch/issues/128348"""
    leaves = draw_qkv(2, 40, 40, (4, 2), *widths, dtype, head_major=True)
    out, _, grads = check(attend, attention64, leaves)
    assert out.shape[-1] == widths[1]
    assert grads["v"].shape == leaves["v"].shape
    theirs = functools.partial(attention64, scale=widths[0] ** -0.5)
    close(out, theirs(**leaves)[0], dtype)


@pytest.mark.parametrize("widths", WIDTHS)
def test_b37_at_every_entry(packed, paged, widths):
    d, dv = widths
    check_packed(packed, [0, 5, 20], [0, 9, 30], draw_tokens(20, 30, (4, 2), d, dv, torch.float32))
    q = draw(2, 3, 4, d)
    k, v = draw(6, 4, 2, d, seed=1), draw(6, 4, 2, dv, seed=2)
    table, used = torch.tensor([[5, 0, 2], [1, 4, 3]]), [11, 4]
    want = paged64(q, k, v, table, used)
    got = paged(q, k, v, table, torch.tensor(used))
    close(got[0], want[0])
    close(got[1], want[1])


def test_b37_compiled(attend):
    torch.compiler.reset()
    run = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for widths in WIDTHS[:2]:
        check(run, attention64, draw_qkv(2, 40, 40, 2, *widths))


@pytest.mark.parametrize(
    "shape",
    [(65535, 2, 1), (65536, 2, 1), (70000, 2, 1), (1, 2, 65536), (1, 3, 71280)],
    ids=str,
)
def test_b40_very_many_heads(attend, shape):
    """https://github.com/pytorch/pytorch/issues/146704"""
    b, s, h = shape
    leaves = draw_qkv(b, s, s, h, 4, dtype=torch.float16)
    dout = draw(b, s, h, 4, dtype=torch.float16)
    out, lse, grads = gradients(attend, leaves, dout, None)
    halves = (slice(0, b // 2), slice(b // 2, b)), (ALL,)
    if b == 1:
        halves = (ALL,), (slice(0, h // 2), slice(h // 2, h))
    for batch in halves[0]:
        for heads in halves[1]:
            part = {n: t[batch, :, heads] for n, t in leaves.items()}
            o, m, g = gradients(attend, part, dout[batch, :, heads], None)
            close(out[batch, :, heads], o)
            close(lse[batch, heads], m)
            for name in leaves:
                close(grads[name][batch, :, heads], g[name])


ALL = slice(None)


def virtual(elements: int, dtype: torch.dtype) -> Tensor:
    """Memory that is promised, and there only where it is written."""
    try:
        return torch.empty(elements, dtype=dtype)
    except RuntimeError:
        pytest.skip("the system promises no memory that it may not have")


@pytest.mark.parametrize("axis", ["row", "head", "batch", "key"])
def test_b42_masks_whose_offsets_pass_32_bits(attend, axis):
    """https://github.com/pytorch/pytorch/issues/187227"""
    leaves = draw_qkv(2, 3, 4, 2, 8)
    seen = draw(2, 2, 3, 4, seed=3) > -0.5
    dim = ["batch", "head", "row", "key"].index(axis)
    stride = 2**32 // (seen.shape[dim] - 1) + 1
    strides = [24, 12, 4, 1]
    strides[dim] = stride
    mask = virtual(2**32 + 2**8, torch.bool).as_strided(seen.shape, strides)
    mask.copy_(seen)
    for got, want in zip(attend(**leaves, mask=mask), attend(**leaves, mask=seen), strict=True):
        assert torch.equal(got, want)


def test_b43_token_offsets_that_pass_32_bits(packed):
    """https://github.com/sglang-project/sglang/issues/20389 (int32 token × heads × dim)"""
    leaves = draw_tokens(6, 6, (2, 1), 8, 8, torch.bfloat16)
    cu = torch.tensor([0, 2, 6])
    far = {}
    for name, t in leaves.items():
        stride = 2**31 // 5 + 1
        far[name] = virtual(2**31 + 2**8, t.dtype).as_strided(t.shape, (stride, 8, 1))
        far[name].copy_(t)
    cu_options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
    dout = draw(6, 2, 8, dtype=torch.bfloat16)

    def dense_grads(x: dict[str, Tensor]) -> list[Tensor]:
        x = {n: t.detach().requires_grad_() for n, t in x.items()}
        out, lse = packed(**x, **cu_options)
        # Gradients with respect to views: a leaf of these strides would want a gradient like it.
        return [out, lse, *torch.autograd.grad(out, list(x.values()), dout)]

    for got, want in zip(dense_grads(far), dense_grads(leaves), strict=True):
        assert torch.equal(got, want)


# ---------------------------------------------------------------------------------------------
# Packed sequences


def test_b46_more_queries_than_keys(packed):
    """https://github.com/Dao-AILab/flash-attention/issues/443"""
    cu_q, cu_k = [0, 76, 110, 256], [0, 1, 2, 3]
    for dtype in FLOATS:
        leaves = {n: 3 * t for n, t in draw_tokens(256, 3, (1, 1), 32, 32, dtype).items()}
        cu = {"cu_seqlens_q": torch.tensor(cu_q), "cu_seqlens_k": torch.tensor(cu_k)}
        hints = {"max_seqlen_q": 256, "max_seqlen_k": 3}
        dout = torch.ones(256, 1, 32, dtype=dtype)
        out, lse, grads = gradients(packed, leaves, dout, None, causal=True, **cu, **hints)
        last = [75, 109, 255]
        others = [i for i in range(256) if i not in last]
        assert torch.equal(out[last], leaves["v"])
        assert (out[others] == 0).all()
        assert (lse[:, others] == -INF).all()
        assert grads["q"].abs().max() < 1e-2
        assert grads["k"].abs().max() < 1e-2
        close(grads["v"], torch.ones_like(grads["v"]))


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_b48_sequences_without_queries_or_keys(packed, d, dtype, causal):
    """https://github.com/Dao-AILab/flash-attention/issues/2562"""
    cu_q, cu_k = [0, 0, 12, 20, 20], [0, 25, 42, 51, 81]
    leaves = draw_tokens(20, 81, (4, 1), d, d, dtype)
    _, _, grads = check_packed(packed, cu_q, cu_k, leaves, causal=causal)
    for name in ("k", "v"):
        assert (grads[name][:25] == 0).all()
        assert (grads[name][51:] == 0).all()
    leaves = draw_tokens(81, 20, (4, 1), d, d, dtype)
    out, lse, grads = check_packed(packed, cu_k, cu_q, leaves, causal=causal)
    for rows in (slice(0, 25), slice(51, 81)):
        assert (out[rows] == 0).all()
        assert (lse[:, rows] == -INF).all()
        assert (grads["q"][rows] == 0).all()


def test_b50_max_seqlen_is_a_hint(packed):
    """https://github.com/Dao-AILab/flash-attention/issues/1773"""
    leaves = draw_tokens(205, 205, (2, 1), 16, 16, torch.float32)
    cu = torch.tensor([0, 5, 205])
    dout = draw(205, 2, 16)
    results = []
    for longest in (None, 0, 1, 100, 200, 4096):
        hints = {"max_seqlen_q": longest, "max_seqlen_k": longest}
        options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "causal": True}
        out, lse, grads = gradients(packed, leaves, dout, None, **options, **hints)
        results.append((out, lse, *grads.values()))
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


def test_b51_cumulative_lengths_of_any_integer_kind(packed):
    """https://github.com/QwenLM/Qwen3-VL/issues/567"""
    leaves = draw_tokens(17, 17, (2, 1), 8, 8, torch.float32)
    wide = torch.nn.functional.pad(torch.tensor([5, 3, 9], dtype=torch.int32).cumsum(0), (1, 0))
    assert wide.dtype == torch.int64
    want = varlen64(**leaves, cu_q=[0, 5, 8, 17], cu_k=[0, 5, 8, 17])
    spread = torch.stack([wide, wide + 100], -1)[:, 0]
    assert not spread.is_contiguous()
    for cu in (wide, wide.int(), spread, spread.int().as_strided((4,), (1,))):
        out, lse = packed(**leaves, cu_seqlens_q=cu, cu_seqlens_k=wide)
        close(out, want[0], torch.float32)
        close(lse, want[1], torch.float32)


@pytest.mark.parametrize(
    ("cu", "words"),
    [
        ([0, 9, 5, 17], ["cu_seqlens_q", "9", "5"]),
        ([1, 5, 17], ["cu_seqlens_q", "start at 0", "1"]),
        ([0, 5, 18], ["cu_seqlens_q", "17", "18"]),
        ([0, -3, 17], ["cu_seqlens_q", "-3"]),
    ],
)
def test_b51_malformed_cumulative_lengths(packed, cu, words):
    leaves = draw_tokens(17, 17, (2, 1), 8, 8, torch.float32)
    good = torch.linspace(0, 17, len(cu)).long()
    for dtype in (torch.int32, torch.int64):
        with pytest.raises(ValueError, match="cu_seqlens_q") as error:
            packed(**leaves, cu_seqlens_q=torch.tensor(cu, dtype=dtype), cu_seqlens_k=good)
        assert all(word in str(error.value) for word in words)


def test_b51_cumulative_lengths_that_are_no_integer_tensor(packed):
    leaves = draw_tokens(17, 17, (2, 1), 8, 8, torch.float32)
    for bad in ([0, 5, 17], torch.tensor([0.0, 5, 17]), torch.tensor([[0, 17]])):
        with pytest.raises(ValueError, match=r"cu_seqlens_q .*int32 or int64"):
            packed(**leaves, cu_seqlens_q=bad, cu_seqlens_k=torch.tensor([0, 17]))


# ---------------------------------------------------------------------------------------------
# Pages


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("filler", [1e4, NAN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_b53_the_last_page_is_not_full(paged, causal, filler, dtype):
    """https://github.com/flashinfer-ai/flashinfer/issues/3716"""
    for n in (1, 15, 16, 17, 255, 257, 300):
        k, v = (draw(20, 16, 8, 128, dtype=dtype, seed=i) * 0.1 for i in range(2))
        k, v = k.flatten(0, 1), v.flatten(0, 1)
        k[n:] = v[n:] = filler
        k, v = (t.unflatten(0, (20, 16)) for t in (k, v))
        q = torch.zeros(1, 1, 8, 128, dtype=dtype)
        table = torch.arange(20)[None]
        out, lse = paged(q, k, v, table, torch.tensor([n]), causal=causal)
        close(out[0, 0], v.flatten(0, 1)[:n].double().mean(0), dtype)
        close(lse, torch.full((1, 8, 1), math.log(n), dtype=torch.float64), torch.float32)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("filler", [NAN, INF])
@pytest.mark.parametrize("num_splits", [None, 1, 4])
def test_b54_stale_pages_outside_the_window(paged, sinks, filler, num_splits):
    """https://github.com/vllm-project/vllm/pull/30887"""
    q = draw(1, 1, 4, 8)
    k, v = torch.full((2, 40, 2, 8), filler)
    k[30:38], v[30:38] = draw(8, 2, 8, seed=1), draw(8, 2, 8, seed=2)
    logits = draw(4, seed=3) if sinks else None
    order = torch.randperm(10)
    table = order.argsort()[None]
    pages = [t.unflatten(0, (10, 4))[order] for t in (k, v)]
    options = {"window_size": (7, 0), "causal": True, "sinks": logits}
    out, lse = paged(
        q, *pages, table, torch.tensor([38], dtype=torch.int32), num_splits=num_splits, **options
    )
    want, want_lse = attention64(q, k[None, 30:38], v[None, 30:38], sinks=logits)
    close(out, want, torch.float32)
    close(lse, want_lse, torch.float32)


# ---------------------------------------------------------------------------------------------
# Dropout and sinks


def test_b57_dropout_does_not_change_the_denominator(attend):
    """https://github.com/aws-neuron/nki-samples/pull/80"""
    s = 16
    q, k = torch.zeros(1, s, 1, s), draw(1, s, 1, s)
    v = torch.eye(s)[None, :, None]
    p = torch.ones(s, s).tril() / torch.arange(1, s + 1)[:, None]

    def dropped(probability: float, seed: int) -> tuple[Tensor, Tensor]:
        options = {"dropout_p": probability, "dropout_seed": seed}
        out, lse = attend(q, k, v, causal=True, **options)
        return out[0, :, 0], lse

    clean, lse = attend(q, k, v, causal=True)
    total, rows_dropped = torch.zeros(s, s), 0
    for seed in range(300):
        out, own = dropped(0.5, seed)
        assert (torch.isclose(out, 0 * p) | torch.isclose(out, 2 * p)).all()
        assert torch.equal(own, lse)
        rows_dropped += int((out == 0).all(-1).sum())
        total += out
    assert rows_dropped > 0
    # Each entry's mean over seeds has a standard error of P / √300; five of them are allowed.
    assert ((total / 300 - p).abs() <= 5 * p / 300**0.5 + 1e-6).all()
    kept = (total / (2 * p.clamp(min=1e-9)))[p > 0].sum() / (300 * (p > 0).sum())
    assert kept.item() == pytest.approx(0.5, abs=0.02)
    for a, b in zip(dropped(0.5, 3), dropped(0.5, 3), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(dropped(0.0, 3)[0], clean[0, :, 0])
    assert (dropped(1.0, 3)[0] == 0).all()
    nearly = dropped(0.999, 3)[0]
    assert nearly.isfinite().all()
    assert (nearly != 0).float().mean() < 0.05


@pytest.mark.parametrize("p", [0.25, 0.5, 0.999, 1.0])
def test_b57_gradients_belong_to_the_same_bits(attend, p, small_tiles):
    leaves = draw_qkv(2, 12, 20, (4, 2), 8)
    keep = torch.zeros(2, 4, 12, 20) if p == 1 else keep64(p, 77, 2, 4, 12, 20)
    check(
        functools.partial(attend, dropout_p=p, dropout_seed=77),
        functools.partial(attention64, keep=keep),
        leaves,
        causal=True,
        factor=1 / max(1 - p, 1e-3),
    )


SINKS = torch.tensor([2.0, -3.0, 30.0, -INF, 0.0, 1.5])


@pytest.mark.parametrize("n", [1, 8, 300])
def test_b59_sinks_share_the_denominator(attend, packed, paged, n):
    """https://github.com/modular/modular/issues/6198"""
    q, k = torch.zeros(1, 2, 6, 8), draw(1, n, 3, 8)
    v = torch.ones(1, n, 3, 8)
    want = (n / (n + SINKS.double().exp())).expand(1, 2, 6)[..., None].expand(1, 2, 6, 8)
    want_lse = torch.log(n + SINKS.double().exp())[None, :, None].expand(1, 6, 2)
    results = [attend(q, k, v, sinks=SINKS), attend(q, k, v, sinks=SINKS, scale=100.0)]
    cu_q, cu_k = torch.tensor([0, 2]), torch.tensor([0, n])
    out, lse = packed(q[0], k[0], v[0], cu_q, cu_k, sinks=SINKS)
    results.append((out[None], lse[None]))
    pages = [
        torch.nn.functional.pad(t[0], (0, 0, 0, 0, 0, -n % 10)).unflatten(0, (-1, 10))
        for t in (k, v)
    ]
    table = torch.arange(pages[0].shape[0])[None]
    for splits in (None, 1, 2, 5):
        results.append(paged(q, *pages, table, torch.tensor([n]), sinks=SINKS, num_splits=splits))
    for out, lse in results:
        close(out, want, torch.float32)
        close(lse, want_lse, torch.float32)
    if n == 8:
        assert results[0][0][0, 0, 0, 0].item() == pytest.approx(0.519850, abs=1e-6)
    # Part by part, the sink belongs to one of them.
    parts = [attend(q, k[:, j::2], v[:, j::2], sinks=SINKS if j else None) for j in range(2)]
    out, lse = tilewise.merge(*parts[0], *parts[1])
    close(out, want, torch.float32)
    close(lse, want_lse, torch.float32)


def test_b59_a_sink_and_no_key(attend, small_tiles):
    leaves = {**draw_qkv(1, 20, 6, (6, 3), 8), "sinks": SINKS}
    out, lse, grads = check(attend, attention64, leaves, causal=True)
    assert (out[:, :14] == 0).all()
    assert torch.equal(lse[0, :, :14], SINKS[:, None].expand(6, 14))
    assert all(g.isfinite().all() for g in grads.values())
    leaves["k"], leaves["v"] = leaves["k"][:, :0], leaves["v"][:, :0]
    out, lse, grads = gradients(attend, leaves, torch.ones(1, 20, 6, 8), torch.ones(1, 6, 20))
    assert (out == 0).all()
    assert torch.equal(lse[0], SINKS[:, None].expand(6, 20))
    close(grads["sinks"], torch.where(SINKS == -INF, 0.0, 20.0))


@pytest.mark.parametrize("sink_dtype", [torch.bfloat16, torch.float32])
def test_b60_precision_of_the_sinks_gradient(attend, sink_dtype):
    """https://github.com/jax-ml/jax/pull/40140"""
    leaves = draw_qkv(2, 512, 512, 4, 64, dtype=torch.bfloat16)
    leaves["sinks"] = draw(4, dtype=sink_dtype, seed=4)
    dout = draw(2, 512, 4, 64, dtype=torch.bfloat16, seed=5)
    grads = gradients(attend, leaves, dout, None, causal=True)[2]
    wide = {n: t.double() for n, t in leaves.items()}
    out, lse = attention64(**wide, causal=True)
    p = torch.exp(wide["sinks"][:, None] - lse)
    want = -(p * (dout.double() * out).sum(-1).transpose(1, 2)).sum((0, 2))
    assert grads["sinks"].dtype == sink_dtype
    assert ((grads["sinks"].double() - want).abs() <= 2e-2 * want.abs()).all()


# ---------------------------------------------------------------------------------------------
# Masks of a wrong length, buffers that change


def test_b62_a_mask_of_another_length(attend):
    """https://github.com/pytorch/pytorch/issues/136232"""
    long = torch.ones(512, 512, dtype=torch.bool).tril()
    for s in (192, 320, 64):
        leaves = draw_qkv(1, s, s, 2, 8)
        with pytest.raises(ValueError, match=rf"mask .*{s}, {s}.*\(512, 512\)"):
            attend(**leaves, mask=long)
        with pytest.raises(ValueError, match=rf"bias .*{s}, {s}.*\(512, 512\)"):
            attend(**leaves, bias=long.float())

        def loss(function: Callable[..., Any], x: dict[str, Tensor], s: int = s) -> Any:
            x = {n: t.detach().requires_grad_() for n, t in x.items()}
            out, lse = function(**x, mask=long[:s, :s])
            value = (out * lse.exp().transpose(1, 2)[..., None]).sum()
            return torch.autograd.grad(value, list(x.values()))

        want = loss(attention64, {n: t.double() for n, t in leaves.items()})
        for ours, theirs in zip(loss(attend, leaves), want, strict=True):
            close(ours, theirs, torch.float32, 4)


def test_b65_buffers_that_change_between_calls(packed, paged):
    """https://github.com/huggingface/transformers/pull/45323"""
    torch.compiler.reset()
    run = torch.compile(packed, backend="aot_eager", fullgraph=True)
    leaves = draw_tokens(8, 8, (2, 1), 8, 8, torch.float32)
    cu = torch.tensor([0, 4, 8], dtype=torch.int32)
    for pattern, longest in (([0, 4, 8], 4), ([0, 1, 8], 4), ([0, 0, 7], 64), ([0, 8, 8], 4)):
        cu.copy_(torch.tensor(pattern))
        hints = {"max_seqlen_q": longest, "max_seqlen_k": longest}
        want = varlen64(**leaves, cu_q=pattern, cu_k=pattern, causal=True)
        for call in (packed, run):
            out, lse = call(**leaves, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True, **hints)
            close(out, want[0], torch.float32)
            close(lse, want[1], torch.float32)
    q, k, v = draw(2, 1, 2, 8), draw(20, 4, 1, 8, seed=1), draw(20, 4, 1, 8, seed=2)
    table, used = torch.arange(20).reshape(2, 10), torch.tensor([4, 8])
    for pattern in ([4, 8], [37, 1], [0, 40]):
        used.copy_(torch.tensor(pattern))
        want = paged64(q, k, v, table, pattern)
        out, lse = paged(q, k, v, table, used)
        close(out, want[0], torch.float32)
        close(lse, want[1], torch.float32)


# ---------------------------------------------------------------------------------------------
# Parts of a sequence, merged


def orders(s: int, world: int, order: str) -> list[list[int]]:
    """The positions that each rank holds."""
    if order == "contiguous":
        return [t.tolist() for t in torch.arange(s).chunk(world)]
    if order == "striped":
        return [list(range(rank, s, world)) for rank in range(world)]
    chunks = [t.tolist() for t in torch.arange(s).tensor_split(2 * world)]
    return [chunks[rank] + chunks[2 * world - 1 - rank] for rank in range(world)]


def ring(attend: Any, q: Tensor, k: Tensor, v: Tensor, ranks: list[list[int]]) -> Any:
    """Causal attention, each rank's queries against each rank's keys, merged."""
    outs, lses = [], []
    for mine in ranks:
        rows = torch.tensor(mine, dtype=torch.long)
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        out = torch.zeros(1, len(mine), q.shape[2], v.shape[-1], dtype=dtype)
        lse = torch.full((1, q.shape[2], len(mine)), -INF, dtype=dtype)
        for theirs in ranks:
            keys = torch.tensor(theirs, dtype=torch.long)
            seen = keys <= rows[:, None]
            part = attend(q[:, rows], k[:, keys], v[:, keys], mask=seen)
            out, lse = tilewise.merge(out, lse, part[0].to(dtype), part[1])
        outs.append(out)
        lses.append(lse)
    back = torch.tensor([i for rank in ranks for i in rank], dtype=torch.long).argsort()
    return torch.cat(outs, 1)[:, back].to(q.dtype), torch.cat(lses, 2)[:, :, back]


@pytest.mark.parametrize("order", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_b76_parts_see_by_their_place_in_the_whole(attend, order, world, dtype):
    """https://github.com/zhuzilin/ring-flash-attention/issues/15"""
    leaves = draw_qkv(1, 16, 16, (4, 2), 8, dtype=dtype)
    ours = functools.partial(ring, attend, ranks=orders(16, world, order))
    theirs = functools.partial(attention64, causal=True)
    check(ours, theirs, leaves)


@pytest.mark.parametrize("order", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("s", [1, 3, 8, 11])
@pytest.mark.parametrize("world", [2, 4])
def test_b75_parts_of_uneven_length(attend, order, s, world):
    """https://github.com/jzhang38/EasyContext/issues/47"""
    leaves = draw_qkv(1, s, s, (4, 2), 8)
    ours = functools.partial(ring, attend, ranks=orders(s, world, order))
    check(ours, functools.partial(attention64, causal=True), leaves)


def test_b76_contiguous_parts_are_bands_with_an_offset(attend):
    # Rank r of two: earlier keys whole, its own causally; bottom-right alignment does both.
    leaves = draw_qkv(1, 16, 16, (4, 2), 8)
    q, k, v = leaves.values()
    own = attend(q[:, 8:], k[:, 8:], v[:, 8:], causal=True)
    earlier = attend(q[:, 8:], k[:, :8], v[:, :8])
    out, lse = tilewise.merge(*earlier, *own)
    want, want_lse = attention64(**leaves, causal=True)
    close(out, want[:, 8:], torch.float32)
    close(lse, want_lse[:, :, 8:], torch.float32)


# ---------------------------------------------------------------------------------------------
# Errors and installation


def test_b78_lengths_that_do_not_agree(attend, packed):
    """https://github.com/pytorch/pytorch/pull/193728"""

    def draws(*shapes: tuple[int, ...]) -> list[Tensor]:
        return [draw(*shape) for shape in shapes]

    bad: list[tuple[list[Tensor], dict[str, Any], list[str]]] = [
        (draws((1, 3, 1, 8), (1, 5, 1, 8), (1, 6, 1, 8)), {}, ["k", "v", "5", "6"]),
        (draws((1, 3, 1, 8), (1, 5, 1, 8), (1, 4, 1, 8)), {}, ["k", "v", "5", "4"]),
        (draws((2, 3, 1, 8), (3, 5, 1, 8), (3, 5, 1, 8)), {}, ["batch", "2", "3"]),
        (draws((2, 3, 1, 8), (2, 5, 1, 8), (1, 5, 1, 8)), {}, ["batch", "2", "1"]),
        (draws((1, 3, 4, 8), (1, 5, 4, 8), (1, 5, 2, 8)), {}, ["k", "v", "4", "2"]),
        (draws((1, 3, 1, 8), (1, 5, 1, 7), (1, 5, 1, 8)), {}, ["head dim", "8", "7"]),
        (draws((1, 3, 3, 8), (1, 5, 4, 8), (1, 5, 4, 8)), {}, ["heads", "3", "4"]),
        (draws((3, 1, 8), (1, 5, 1, 8), (1, 5, 1, 8)), {}, ["q", "(3, 1, 8)"]),
        (
            draws(*[(1, 3, 1, 8)] * 3),
            {"mask": torch.ones(2, 3, dtype=torch.bool)},
            ["mask", "(2, 3)", "3, 3"],
        ),
        (draws(*[(1, 3, 1, 8)] * 3), {"window_size": (-2, 0)}, ["window_size", "-2"]),
        (draws(*[(1, 3, 1, 8)] * 3), {"softcap": -1.0}, ["softcap", "-1.0"]),
        (draws(*[(1, 3, 1, 8)] * 3), {"dropout_p": 1.5}, ["dropout_p", "1.5"]),
        (draws(*[(1, 3, 1, 8)] * 3), {"dropout_p": -0.5}, ["dropout_p", "-0.5"]),
    ]
    for tensors, options, words in bad:
        with pytest.raises(ValueError, match="must") as error:
            attend(*tensors, **options)
        assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(("tokens_k", "tokens_v"), [(5, 6), (6, 5), (5, 2)])
def test_b78_packed_lengths_that_do_not_agree(packed, tokens_k, tokens_v):
    cu = torch.tensor([0, 3])
    with pytest.raises(ValueError, match="must have the same tokens and heads") as error:
        packed(draw(3, 1, 8), draw(tokens_k, 1, 8), draw(tokens_v, 1, 8), cu, cu)
    assert f"({tokens_k}, 1, 8)" in str(error.value)
    assert f"({tokens_v}, 1, 8)" in str(error.value)


ROOT = pathlib.Path(tilewise.__file__).parents[1]
BARE = """
import sys
for name in ("triton", "numpy", "matplotlib", "transformers"):
    sys.modules[name] = None
import torch, tilewise
q = torch.randn(1, 5, 2, 8, requires_grad=True)
out, lse = tilewise.attention(q, q, q, causal=True, return_lse=True)
out.sum().backward()
if not (q.grad.isfinite().all() and lse.isfinite().all()):
    raise SystemExit("wrong numbers")
try:
    tilewise.attention(q, q, q, softcap=0)
except ValueError:
    print("fine", tilewise.explain(q, q, q).backend)
"""


def test_b79_a_bare_interpreter_is_enough():
    """https://github.com/Dao-AILab/flash-attention/issues/1421"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-OO", "-W", "ignore", "-c", BARE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["fine", "tiled"], done.stderr


def test_b79_the_build_needs_no_torch():
    project = ROOT / "pyproject.toml"
    if not project.exists():
        pytest.skip("installed without its sources")
    text = project.read_text(encoding="utf-8")
    build = re.search(r"\[build-system\]\n(.*?)\n\[", text, re.DOTALL)
    assert build is not None
    assert "torch" not in build[1]
    assert "triton" not in re.search(r"\ndependencies = \[(.*?)\]", text, re.DOTALL)[1]
