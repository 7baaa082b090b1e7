"""The textbook algorithm against a dense reference that shares no code with it."""

import doctest
import math
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.autograd.graph import saved_tensors_hooks

from tilewise import textbook
from tilewise.textbook import (
    FlashAttention,
    flash_attention_backward,
    flash_attention_forward,
    online_softmax_stats,
    standard_attention,
)

INF = math.inf
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def dense_rows(Q: Tensor, K: Tensor, V: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """O and L of one head, a row at a time, from the definition and in float64."""
    outputs, logsumexps = [], []
    for i in range(len(Q)):
        seen = min(i + 1, len(K)) if causal else len(K)
        if seen == 0:
            outputs.append(V.new_zeros(V.shape[-1]))
            logsumexps.append(V.new_tensor(-INF))
            continue
        scores = (K[:seen] * Q[i]).sum(dim=-1) / math.sqrt(Q.shape[-1])
        shift = scores.detach().max()
        weights = (scores - shift).exp()
        outputs.append((weights[:, None] * V[:seen]).sum(dim=0) / weights.sum())
        logsumexps.append(weights.sum().log() + shift)
    if not outputs:
        return V.new_zeros(0, V.shape[-1]), V.new_zeros(0)
    return torch.stack(outputs), torch.stack(logsumexps)


def draw(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(math.prod(shape) for shape in shapes))
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes
    ]


def draw_qkv(
    n: int, m: int, d: int = 5, dv: int = 3, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    return draw((n, d), (m, d), (m, dv), dtype=dtype)


LENGTHS = [(1, 1), (16, 16), (37, 37), (50, 23), (23, 50), (1, 40), (40, 1)]
TILES = [(16, 16), (7, 5), (5, 7), (1, 1), (64, 64), (16, 3)]


# ------------------------------------------------------------------ online softmax


@pytest.mark.parametrize("block", [1, 2, 3, 4, 10, 64])
def test_online_softmax_is_softmax(block: int) -> None:
    (x,) = draw((10,))
    m, l = online_softmax_stats(x * 20, block=block)
    assert m == (x * 20).max()
    torch.testing.assert_close(torch.exp(x * 20 - m) / l, torch.softmax(x * 20, dim=0), **EXACT)
    torch.testing.assert_close(m + l.log(), torch.logsumexp(x * 20, dim=0), **EXACT)


def test_online_softmax_rebases_when_the_maximum_grows() -> None:
    x = torch.arange(12, dtype=torch.float64)
    _, l = online_softmax_stats(x, block=1)
    torch.testing.assert_close(l, (x - 11).exp().sum(), **EXACT)


@pytest.mark.parametrize(
    ("x", "m", "l"),
    [
        ([], -INF, 0.0),
        ([-INF] * 6, -INF, 0.0),
        ([-INF] * 4 + [2.0], 2.0, 1.0),  # a whole block hidden first
        ([2.0] + [-INF] * 7, 2.0, 1.0),  # and last
        ([1000.0, 1000.0, -1000.0], 1000.0, 2.0),
    ],
)
def test_online_softmax_of_hidden_elements(x: list[float], m: float, l: float) -> None:
    stats = online_softmax_stats(torch.tensor(x, dtype=torch.float32))
    assert [s.item() for s in stats] == [m, l]


def test_online_softmax_passes_nan_on() -> None:
    m, l = online_softmax_stats(torch.tensor([1.0, math.nan, 2.0]), block=1)
    assert m.isnan()
    assert l.isnan()


def test_online_softmax_of_16_bit_input_sums_in_float32() -> None:
    m, l = online_softmax_stats(torch.ones(5000, dtype=torch.bfloat16))
    assert m.dtype == l.dtype == torch.float32
    assert l == 5000  # bfloat16 would stop at 256


# ------------------------------------------------------------------ forward


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("n", "m"), LENGTHS)
def test_forward_matches_dense(n: int, m: int, causal: bool) -> None:
    Q, K, V = draw_qkv(n, m)
    O_dense, L_dense = dense_rows(Q, K, V, causal)
    torch.testing.assert_close(standard_attention(Q, K, V, causal), O_dense, **EXACT)
    for block_q, block_k in TILES:
        O, L = flash_attention_forward(Q, K, V, causal, block_q, block_k)
        torch.testing.assert_close(O, O_dense, **EXACT)
        torch.testing.assert_close(L, L_dense, **EXACT)


@pytest.mark.parametrize("direction", [1.0, -1.0])
def test_forward_with_logits_that_grow_along_the_keys(direction: float) -> None:
    """Every tile raises the maximum: a rescale that is left out shows at once."""
    Q = torch.ones(20, 1, dtype=torch.float64)
    K = direction * torch.arange(40, dtype=torch.float64)[:, None]
    (V,) = draw((40, 3))
    for causal in (False, True):
        O, L = flash_attention_forward(Q, K, V, causal, block_q=8, block_k=4)
        O_dense, L_dense = dense_rows(Q, K, V, causal)
        torch.testing.assert_close(O, O_dense, **EXACT)
        torch.testing.assert_close(L, L_dense, **EXACT)


@pytest.mark.parametrize(("n", "m"), LENGTHS)
@pytest.mark.parametrize(("block_q", "block_k"), TILES)
def test_forward_sees_exactly_the_keys_up_to_the_query(
    n: int, m: int, block_q: int, block_k: int
) -> None:
    """With Q = 0 each visible key has the same weight, so O counts the keys that were seen."""
    Q, K = torch.zeros(n, 4, dtype=torch.float64), torch.ones(m, 4, dtype=torch.float64)
    V = torch.eye(m, dtype=torch.float64)
    O, L = flash_attention_forward(Q, K, V, True, block_q, block_k)
    visible = torch.ones(n, m, dtype=torch.float64).tril()
    counts = visible.sum(dim=-1)
    torch.testing.assert_close(O * counts[:, None], visible, **EXACT)
    torch.testing.assert_close(L, counts.log(), **EXACT)


def test_forward_survives_large_logits() -> None:
    Q, K, V = draw_qkv(20, 20)
    O, L = flash_attention_forward(Q * 1e4, K * 1e4, V, block_k=3)
    O_dense, L_dense = dense_rows(Q * 1e4, K * 1e4, V, False)
    torch.testing.assert_close(O, O_dense, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(L, L_dense, **EXACT)


def test_nan_in_the_future_is_never_touched() -> None:
    """Keys past the last query are seen by nobody; key tiles of the future not by earlier rows."""
    Q, K, V = (x.requires_grad_() for x in draw_qkv(20, 50))
    with torch.no_grad():
        K[20:], V[20:] = math.nan, math.nan
    O = FlashAttention.apply(Q, K, V, True)
    O.square().sum().backward()
    assert O.isfinite().all()
    for x in (Q, K, V):
        assert x.grad.isfinite().all()
    assert not K.grad[20:].any()
    assert not V.grad[20:].any()

    with torch.no_grad():
        K[16:], V[16:] = math.nan, math.nan
    O, L = flash_attention_forward(Q, K, V, True)
    assert O[:16].isfinite().all()
    assert L[:16].isfinite().all()
    assert O[16:].isnan().all()  # where it is seen, it is not hidden


def test_nan_that_is_seen_propagates() -> None:
    Q, K, V = draw_qkv(8, 8)
    K[3] = math.nan
    assert standard_attention(Q, K, V).isnan().all()
    O, L = flash_attention_forward(Q, K, V, block_k=2)
    assert O.isnan().all()
    assert L.isnan().all()


@pytest.mark.parametrize(("n", "m"), [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("causal", [False, True])
def test_zero_lengths(n: int, m: int, causal: bool) -> None:
    Q, K, V = (x.requires_grad_() for x in draw_qkv(n, m))
    O, L = flash_attention_forward(Q, K, V, causal)
    assert O.shape == (n, 3)
    assert L.shape == (n,)
    assert not O.any()
    assert (L == -INF).all()
    assert torch.equal(standard_attention(Q, K, V, causal), O)
    FlashAttention.apply(Q, K, V, causal).sum().backward()
    for x in (Q, K, V):
        assert x.grad.shape == x.shape
        assert not x.grad.any()


def test_a_query_whose_scores_are_all_minus_infinity_sees_nothing() -> None:
    Q, K = torch.tensor([[-INF], [1.0]]), torch.ones(5, 1)
    V = torch.arange(5.0)[:, None]
    O, L = flash_attention_forward(Q, K, V, block_k=2)
    assert O.flatten().tolist() == [0.0, 2.0]
    assert L[0] == -INF
    assert torch.equal(standard_attention(Q, K, V), O)


# ------------------------------------------------------------------ backward


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("n", "m"), LENGTHS)
def test_backward_matches_dense(n: int, m: int, causal: bool) -> None:
    inputs = [x.requires_grad_() for x in draw_qkv(n, m)]
    (dO,) = draw((n, 3))
    O_dense, _ = dense_rows(*inputs, causal)
    expected = torch.autograd.grad(O_dense, inputs, dO, allow_unused=True, materialize_grads=True)
    with torch.no_grad():
        for block_q, block_k in TILES:
            O, L = flash_attention_forward(*inputs, causal)
            got = flash_attention_backward(*inputs, O, L, dO, causal, block_q, block_k)
            for x, x_dense in zip(got, expected, strict=True):
                torch.testing.assert_close(x, x_dense, **EXACT)


def test_backward_with_logits_that_grow_along_the_keys() -> None:
    Q = torch.ones(20, 1, dtype=torch.float64).requires_grad_()
    K = (torch.arange(40, dtype=torch.float64)[:, None] / 4).requires_grad_()
    V, dO = draw((40, 3), (20, 3))
    for causal in (False, True):
        expected = torch.autograd.grad(dense_rows(Q, K, V, causal)[0], (Q, K), dO)
        O, L = flash_attention_forward(Q, K, V, causal)
        got = flash_attention_backward(Q, K, V, O, L, dO, causal, block_q=8, block_k=4)
        for x, x_dense in zip(got, expected, strict=False):
            torch.testing.assert_close(x, x_dense, **EXACT)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("n", "m"), [(19, 19), (20, 7), (7, 20)])
def test_gradcheck(n: int, m: int, causal: bool) -> None:
    inputs = [x.requires_grad_() for x in draw_qkv(n, m, d=3, dv=2)]
    assert gradcheck(lambda *qkv: FlashAttention.apply(*qkv, causal), inputs)


def test_autograd_through_the_plain_forward_is_right_too() -> None:
    inputs = [x.requires_grad_() for x in draw_qkv(19, 19, d=3, dv=2)]
    assert gradcheck(lambda *qkv: flash_attention_forward(*qkv, True, 4, 4), inputs)


def test_causal_defaults_to_false() -> None:
    Q, K, V = (x.requires_grad_() for x in draw_qkv(6, 6))
    O = FlashAttention.apply(Q, K, V)
    assert torch.equal(O, FlashAttention.apply(Q, K, V, False))
    assert not torch.equal(O, FlashAttention.apply(Q, K, V, True))
    O.sum().backward()  # one gradient fewer is wanted here; and dO has zero strides
    dense = torch.autograd.grad(dense_rows(Q, K, V, False)[0], (Q, K, V), torch.ones_like(O))
    for x, expected in zip((Q, K, V), dense, strict=True):
        torch.testing.assert_close(x.grad, expected, **EXACT)


def test_second_gradient_is_refused() -> None:
    Q, K, V = (x.requires_grad_() for x in draw_qkv(6, 6))
    (dQ,) = torch.autograd.grad(FlashAttention.apply(Q, K, V).square().sum(), Q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dQ.sum().backward()


@pytest.mark.parametrize("leading", [(2,), (2, 3), (1, 2, 2), (0, 3)])
@pytest.mark.parametrize("causal", [False, True])
def test_leading_dimensions(leading: tuple[int, ...], causal: bool) -> None:
    Q, K, V = draw((*leading, 20, 4), (*leading, 33, 4), (*leading, 33, 6))
    inputs = [x.requires_grad_() for x in (Q, K, V)]
    O = FlashAttention.apply(*inputs, causal)
    grads = torch.autograd.grad(O.square().sum(), inputs)
    _, L = flash_attention_forward(*inputs, causal)
    assert O.shape == (*leading, 20, 6)
    assert L.shape == (*leading, 20)
    for index in product(*map(range, leading)):
        one = [x[index] for x in inputs]
        O_dense, L_dense = dense_rows(*one, causal)
        torch.testing.assert_close(O[index], O_dense, **EXACT)
        torch.testing.assert_close(L[index], L_dense, **EXACT)
        torch.testing.assert_close(standard_attention(*one, causal), O_dense, **EXACT)
        expected = torch.autograd.grad(O_dense.square().sum(), one)
        for x, x_dense in zip(grads, expected, strict=True):
            torch.testing.assert_close(x[index], x_dense, **EXACT)


def test_transposed_inputs() -> None:
    """A view with any strides is an input like another."""
    Q, K, V = (x.mT for x in draw((5, 20), (5, 20), (3, 20)))
    O, _ = flash_attention_forward(Q, K, V)
    torch.testing.assert_close(O, dense_rows(Q, K, V, False)[0], **EXACT)


# ------------------------------------------------------------------ dtypes and memory


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes(dtype: torch.dtype) -> None:
    inputs = [x.requires_grad_() for x in draw_qkv(64, 64, d=16, dv=16, dtype=dtype)]
    gold = [x.detach().double().requires_grad_() for x in inputs]
    eps = torch.finfo(dtype).eps

    O, L = flash_attention_forward(*inputs, causal=True)
    O_gold, L_gold = dense_rows(*gold, causal=True)
    assert O.dtype == dtype
    assert L.dtype == torch.float32  # 16 bits would not do: P = exp(S − L)
    torch.testing.assert_close(L.double(), L_gold, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(O.double(), O_gold, rtol=eps, atol=4e-7)

    FlashAttention.apply(*inputs, True).square().sum().backward()
    O_gold.square().sum().backward()
    for x, x_gold in zip(inputs, gold, strict=True):
        assert x.grad.dtype == dtype
        torch.testing.assert_close(x.grad.double(), x_gold.grad, rtol=20 * eps, atol=20 * eps)


def test_float64_stays_float64() -> None:
    O, L = flash_attention_forward(*draw_qkv(5, 5))
    assert O.dtype == L.dtype == torch.float64


@pytest.mark.parametrize("causal", [False, True])
def test_exactly_five_tensors_are_saved_and_none_is_n_by_m(causal: bool) -> None:
    n, m, d, dv = 90, 110, 4, 6
    Q, K, V = (x.requires_grad_() for x in draw_qkv(n, m, d, dv, dtype=torch.float32))
    saved: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    with saved_tensors_hooks(keep, lambda x: x):
        O = FlashAttention.apply(Q, K, V, causal)
    assert [tuple(x.shape) for x in saved] == [(n, d), (m, d), (m, dv), (n, dv), (n,)]
    for x, same in zip(saved, (Q, K, V, O), strict=False):
        assert x.data_ptr() == same.data_ptr()  # kept, not copied
    assert max(x.untyped_storage().nbytes() for x in saved) < n * m
    O.sum().backward()


@pytest.mark.parametrize("causal", [False, True])
def test_as_courses_on_systems_test_it(causal: bool) -> None:
    """Batches (b, n, d); among what is saved, L alone has shape (b, n)."""
    Q, K, V, dO = torch.randn(4, 3, 128, 32, generator=torch.Generator().manual_seed(0)).unbind()
    Q, K, V = (x.clone().requires_grad_() for x in (Q, K, V))
    S = Q @ K.mT / 32**0.5
    if causal:
        S = S.masked_fill(torch.ones(128, 128, dtype=torch.bool).triu(1), -torch.inf)
    O_want = torch.softmax(S, -1) @ V

    O = FlashAttention.apply(Q, K, V, causal)
    (L,) = (x for x in O.grad_fn.saved_tensors if x.shape == (3, 128))
    torch.testing.assert_close(O, O_want)
    torch.testing.assert_close(L, torch.logsumexp(S, -1))
    got = torch.autograd.grad(O, (Q, K, V), dO)
    want = torch.autograd.grad(O_want, (Q, K, V), dO)
    for gradient, wanted in zip(got, want, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-5)


def test_no_tensor_of_the_backward_is_n_by_m() -> None:
    """Not saved is not enough: nor is one made on the way."""
    n, m = 90, 110
    Q, K, V = draw_qkv(n, m)
    sizes: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor):
                sizes.append(result.numel())
            return result

    with Watch():
        O, L = flash_attention_forward(Q, K, V)
        flash_attention_backward(Q, K, V, O, L, torch.ones_like(O))
    assert max(sizes) == m * Q.shape[-1] < n * m


# ------------------------------------------------------------------ errors


def test_errors_name_the_argument_what_came_and_what_is_wanted() -> None:
    Q, K, V = draw_qkv(6, 7, d=4, dv=3)
    O, L = flash_attention_forward(Q, K, V)
    cases = [
        (lambda: flash_attention_forward(Q[0], K, V), r"Q .*\(\.\.\., length, dim\), got \(4,\)"),
        (lambda: flash_attention_forward(Q, K[:, :3], V), r"K .*\(7, 4\), got \(7, 3\)"),
        (lambda: flash_attention_forward(Q, K, V[:5]), r"V .*\(7, 3\), got \(5, 3\)"),
        (lambda: flash_attention_forward(Q, K[None], V), r"K .*\(7, 4\), got \(1, 7, 4\)"),
        (lambda: flash_attention_forward(Q, K.float(), V), r"K .*float64, got torch.float32"),
        (lambda: flash_attention_forward(Q, K, V.to("meta")), "V .*device cpu, got meta"),
        (lambda: flash_attention_forward(Q.long(), K, V), "Q .*float64, got torch.int64"),
        (lambda: flash_attention_forward(Q.tolist(), K, V), "Q .*torch.Tensor, got list"),
        (lambda: flash_attention_forward(Q[:, :0], K, V), r"Q .*at least 1, got \(6, 0\)"),
        (lambda: flash_attention_forward(Q, K, V, causal=1), "causal .*True or False, got int"),
        (lambda: flash_attention_forward(Q, K, V, block_q=0), "block_q .*at least 1, got 0"),
        (lambda: flash_attention_forward(Q, K, V, block_k=2.0), "block_k .*integer.*got 2.0"),
        (lambda: standard_attention(Q, K[:, :3], V), r"K .*\(7, 4\), got \(7, 3\)"),
        (lambda: FlashAttention.apply(Q, K, V[:5]), r"V .*\(7, 3\), got \(5, 3\)"),
        (lambda: flash_attention_backward(Q, K, V, O.T, L, O), r"O .*\(6, 3\), got \(3, 6\)"),
        (lambda: flash_attention_backward(Q, K, V, O, L[:, None], O), r"L .*\(6,\), got \(6, 1\)"),
        (lambda: flash_attention_backward(Q, K, V, O, L.float(), O), "L .*float64, got .*float32"),
        (lambda: flash_attention_backward(Q, K, V, O, L, O.half()), "dO .*float64, got .*float16"),
        (lambda: flash_attention_backward(Q, K, V, O, L, None), "dO .*Tensor, got NoneType"),
        (lambda: flash_attention_backward(Q, K, V, O, L, O, block_k=-1), "block_k .*got -1"),
        (lambda: online_softmax_stats(Q), r"x .*\(n,\), got \(6, 4\)"),
        (lambda: online_softmax_stats(Q[0].int()), "x .*float64, got torch.int32"),
        (lambda: online_softmax_stats(Q[0], block=0), "block .*at least 1, got 0"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=f"^{message}"):
            call()


def test_docstring_examples() -> None:
    torch.manual_seed(0)
    result = doctest.testmod(textbook)
    assert result.failed == 0
    assert result.attempted >= 5


def test_every_public_name_has_an_example() -> None:
    for name in textbook.__all__:
        assert ">>> " in (getattr(textbook, name).__doc__ or ""), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_probabilities_are_the_same_in_both_passes_under_autocast(dtype):
    """The sum of dV over keys, with dO = 1, is that of every row's probabilities: the number of rows."""
    Q, K, V = (torch.randn(n, 16, requires_grad=True) for n in (200, 300, 300))
    with torch.autocast("cpu", dtype):
        O = FlashAttention.apply(30 * Q, K, V)
    O.sum().backward()
    torch.testing.assert_close(V.grad.sum(0) / 200, torch.ones(16), rtol=0, atol=5e-3)
