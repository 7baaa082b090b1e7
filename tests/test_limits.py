"""At the limits: products past float32, scales and windows without end, derivatives of derivatives."""

import sys

import pytest
import torch
from dense64 import attention64, close
from inputs import draw, draw_qkv

import tilewise

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
