"""At the limits: products past float32, scales and windows without end, derivatives of derivatives."""

import sys
from fractions import Fraction
from functools import partial

import pytest
import torch
from dense64 import attention64, close, gradients
from inputs import draw, draw_qkv

import tilewise
from tilewise.backends import products
from tilewise.testing import Call, evaluate, expect, judge

CU = torch.tensor([0, 3, 3, 6])


@pytest.mark.parametrize("side", [2**31, sys.maxsize, 2**70])
def test_a_window_past_everything_is_open(backend, side):
    x = draw_qkv(1, 5, 7, 2, 4)
    want = tilewise.attention(**x, backend=backend)
    assert torch.equal(tilewise.attention(**x, window_size=(side, side), backend=backend), want)
    causal = tilewise.attention(**x, causal=True, backend=backend)
    got = tilewise.attention(**x, causal=True, window_size=(side, None), backend=backend)
    assert torch.equal(got, causal)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize("keys", [2, 40])
def test_products_past_float32_with_a_small_scale(backend, dtype, sign, keys):
    """q · k leaves float32, scale · q · k does not: no overflow on the way may show."""
    q = torch.full((1, 3, 1, 4), 1e19, dtype=dtype)
    k = sign * torch.linspace(8e18, 9e18, keys).view(1, keys, 1, 1).expand(1, keys, 1, 4).to(dtype)
    v = draw(1, keys, 1, 4, dtype=dtype)
    got, lse = tilewise.attention(q, k, v, scale=1e-38, return_lse=True, backend=backend)
    want, want_lse = attention64(q.double(), k.double(), v.double(), scale=1e-38)
    close(got, want, dtype)
    assert torch.allclose(lse.double(), want_lse, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (20, 0)}])
@pytest.mark.parametrize("rows", [1, 7, 40, 300])
def test_terms_past_float32_that_cancel(backend, dtype, options, rows):
    """A sum that leaves float32 on the way is −inf there, whatever comes after: it ends at 0 here."""
    x = draw_qkv(1, rows, max(rows, 20), 2, 8, dtype=dtype)
    x["q"][..., :2] = torch.tensor([-1e20, 1e20], dtype=dtype)
    x["k"][..., :2] = 0
    x["k"][:, ::5, :, :2] = 1e19
    out, lse, grads = gradients(
        partial(tilewise.attention, return_lse=True, backend=backend),
        x,
        x["v"][:, :rows],
        None,
        **options,
    )
    wide = {name: t.double() for name, t in x.items()}
    want = gradients(attention64, wide, wide["v"][:, :rows], None, **options)
    close(out, want[0], dtype)
    assert torch.allclose(lse.double(), want[1], atol=1e-4)
    close(grads["v"], want[2]["v"], dtype, 4)


@pytest.mark.parametrize("sink", [1e4, -1e4])
def test_a_sink_far_from_all_logits(backend, sink):
    """exp(sink − m) leaves even float64, or vanishes: lse is the sink, or that of the keys alone."""
    x = draw_qkv(1, 20, 30, 2, 8)
    sinks = torch.full((2,), sink)
    out, lse = tilewise.attention(**x, sinks=sinks, return_lse=True, backend=backend)
    alone, lse_alone = tilewise.attention(**x, return_lse=True, backend=backend)
    close(out, torch.zeros_like(out) if sink > 0 else alone)
    close(lse, torch.full_like(lse, sink) if sink > 0 else lse_alone)


def test_what_was_summed_before_a_second_try_is_forgotten(backend):
    """A gradient that leaves float32 is computed again: bias, slopes and sinks count once."""
    x = draw_qkv(1, 20, 30, 2, 8)
    x["v"][:, 25:] = 3e38  # dP overflows there, where no row sees it
    x |= {"bias": draw(2, 20, 30), "alibi_slopes": draw(2), "sinks": draw(2)}
    mask = torch.ones(20, 30, dtype=torch.bool)
    mask[:, 25:] = False
    dout = draw(1, 20, 2, 8, seed=4)
    attend = partial(tilewise.attention, return_lse=True, backend=backend)
    _, _, got = gradients(attend, x, dout, None, mask=mask)
    wide = {name: t.double() for name, t in x.items()}
    _, _, want = gradients(attention64, wide, dout.double(), None, mask=mask)
    for name in ("bias", "alibi_slopes", "sinks"):
        close(got[name], want[name], factor=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 30])
def test_a_product_past_float32_that_a_bias_brings_back(backend, dtype, rows):
    x = draw_qkv(1, rows, 30, 2, 8, dtype=dtype)
    x["q"][..., 0], x["k"][..., 0], x["k"][:, 3, :, 0] = 2.0**64, 0, -(2.0**65)
    bias = torch.zeros(30)
    bias[3] = 2.0**126
    out, lse = tilewise.attention(**x, scale=2.0**-3, bias=bias, return_lse=True, backend=backend)
    wide = {name: t.double() for name, t in x.items()}
    want, want_lse = attention64(**wide, scale=2.0**-3, bias=bias.double())
    close(out, want, dtype)
    assert torch.allclose(lse.double(), want_lse, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_scale_past_float32(backend, dtype):
    x = draw_qkv(1, 20, 20, 1, 4, dtype=dtype)
    out = tilewise.attention(**x, scale=1e39, backend=backend)
    logits = x["q"][0, :, 0].double() @ x["k"][0, :, 0].double().T
    assert torch.equal(out[0, :, 0], x["v"][0, logits.argmax(-1), 0])


@pytest.mark.parametrize("outer", [torch.func.jacfwd, torch.func.jacrev])
def test_hessians_nest(outer):
    q, k, v = draw_qkv(1, 4, 4, 2, 3, dtype=torch.float64).values()
    inner = torch.func.jacfwd if outer is torch.func.jacfwd else torch.func.jacrev

    def loss(attend):
        return lambda q: attend(q, k, v).pow(2).sum()

    got = outer(inner(loss(tilewise.attention)))(q)
    want = torch.func.hessian(loss(lambda q, k, v: attention64(q, k, v)[0]))(q)
    assert torch.allclose(got, want, atol=1e-12)


@pytest.mark.parametrize("shared", [False, True])
def test_derivatives_outside_of_vmap(shared):
    q, k, v = (draw(3, 1, 5, 2, 3, dtype=torch.float64, seed=seed) for seed in range(3))
    k, v = (k[:1].expand(3, -1, -1, -1, -1), v) if shared else (k, v)

    def mapped(q):
        return torch.vmap(lambda q, k, v: tilewise.attention(q, k, v, causal=True))(q, k, v)

    def looped(q):
        each = zip(q, k, v, strict=True)
        return torch.stack([attention64(*x, causal=True)[0] for x in each])

    def loss(f):
        return lambda q: f(q).pow(2).sum()

    leaf = q.clone().requires_grad_()
    loss(mapped)(leaf).backward()
    want = torch.func.grad(loss(looped))(q)
    assert torch.allclose(leaf.grad, want, atol=1e-12)
    assert torch.allclose(torch.func.grad(loss(mapped))(q), want, atol=1e-12)
    got, want = (torch.func.jvp(f, (q,), (q.cos(),)) for f in (mapped, looped))
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(got, want, strict=True))


def test_reverse_over_forward():
    q, k, v = draw_qkv(1, 4, 4, 2, 3, dtype=torch.float64).values()

    def loss(q):
        return tilewise.attention(q, k, v).pow(2).sum()

    got = torch.func.jacrev(torch.func.jacfwd(loss))(q)
    assert torch.allclose(got, torch.func.hessian(loss)(q), atol=1e-12)


def test_explain_draws_nothing():
    x = draw_qkv(1, 4, 4, 2, 3)
    state = torch.get_rng_state()
    tilewise.explain(**x, dropout_p=0.5)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_tensor_of_zeros_without_memory():
    q, k, _ = draw_qkv(1, 20, 20, 2, 8).values()
    assert not tilewise.attention(q, k, torch._efficientzerotensor((1, 20, 2, 8))).any()


def test_hessian_of_packed():
    q, k, v = (draw(7, 2, 3, dtype=torch.float64, seed=seed) for seed in range(3))

    def packed(q):
        return tilewise.attention_varlen(q, k, v, CU, CU, causal=True).pow(2).sum()

    def parts(q):
        pieces = [(0, 3), (3, 6)]
        return sum(
            tilewise.attention(*(t[None, a:b] for t in (q, k, v)), causal=True).pow(2).sum()
            for a, b in pieces
        )

    assert torch.allclose(torch.func.hessian(packed)(q), torch.func.hessian(parts)(q), atol=1e-12)


def test_autocast_takes_a_bias_of_the_other_low_precision():
    x = draw_qkv(1, 8, 8, 2, 4)
    bias = draw(8, 8, dtype=torch.float16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = tilewise.attention(**x, bias=bias)
    assert out.dtype == torch.bfloat16


def test_merge_wants_numbers():
    out, lse = torch.zeros(2, 3), torch.zeros(2)
    with pytest.raises(ValueError, match="out_b must be a floating-point tensor, got NoneType"):
        tilewise.merge(out, lse, None, lse)
    with pytest.raises(
        ValueError, match=r"lse_a must be a floating-point tensor, got torch\.int64"
    ):
        tilewise.merge(out, lse.long(), out, lse)


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_keys_are_converted_in_parts(monkeypatch, kv_heads, dtype):
    """Few rows on many keys of a low precision; the last part is shorter than the others."""
    monkeypatch.setattr(products, "CONVERTED", 16 * 8 * kv_heads)
    x = draw_qkv(2, 3, 100, (4, kv_heads), 8, 16, dtype=dtype)
    call = Call(tilewise.attention, {**x, "causal": True})
    results = evaluate(call, "tiled")
    gold, peer = expect(call)
    verdicts = [judge(name, t, gold[name], peer[name], dtype) for name, t in results.items()]
    assert all(v.passed for v in verdicts), verdicts


def test_numbers_of_other_libraries_are_numbers() -> None:
    """NumPy's scalars are numbers.Real, as a Fraction is."""
    q, k, v = (torch.randn(1, 5, 2, 8) for _ in range(3))
    given = {"scale": Fraction(1, 2), "softcap": Fraction(3, 2), "dropout_p": Fraction(0)}
    want = tilewise.attention(q, k, v, scale=0.5, softcap=1.5)
    assert torch.equal(tilewise.attention(q, k, v, **given), want)
