"""FlashAttention as a course would teach it: one head, plain PyTorch, the names of the papers.

Read top-down; each function adds one idea to the one before.

1. :func:`online_softmax_stats`: the maximum and the denominator of a softmax in one pass.
2. :func:`standard_attention`: attention as it is usually written, with the n×m matrices S and P.
3. :func:`flash_attention_forward`: the same numbers, tile by tile; S and P never exist as a whole.
4. :func:`flash_attention_backward`: the gradients; P is computed again instead of kept.
5. :class:`FlashAttention`: the two together, for ``loss.backward()``.

The names: Q (n, d) queries, K (m, d) keys, V (m, dv) values, S = QKᵀ/√d scores, P = softmax(S) by
row, O = PV output, L = logsumexp(S) by row, and, while a row is being computed, m its running
maximum and l its running denominator. dX is the gradient of the loss with respect to X, and
D = rowsum(dO ∘ O). ``causal=True`` lets query i see the keys j ≤ i.

Nothing here comes from the rest of the library, and nothing is tuned: it is meant to be read.

Sources: Milakov & Gimelshein 2018, "Online normalizer calculation for softmax" (arXiv 1805.02867);
Dao et al. 2022, "FlashAttention" (arXiv 2205.14135); Dao 2023, "FlashAttention-2" (arXiv
2307.08691).
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = [
    "FlashAttention",
    "flash_attention_backward",
    "flash_attention_forward",
    "online_softmax_stats",
    "standard_attention",
]

INF = float("inf")


# ------------------------------------------------------------------ 1. softmax in a single pass


def online_softmax_stats(x: Tensor, block: int = 4) -> tuple[Tensor, Tensor]:
    """The maximum m = max(x) and the denominator l = Σ exp(x − m), in one pass over x.

    A softmax that does not overflow subtracts the maximum first, so it seems to need two passes:
    one to find m, one to sum exp(x − m). One pass is enough: keep the sum relative to the maximum
    *so far*, and when a block raises the maximum from m to m_new, multiply the old sum by
    exp(m − m_new), because exp(x − m) · exp(m − m_new) = exp(x − m_new).

    Afterwards softmax(x) = exp(x − m) / l and logsumexp(x) = m + log l.

    Args:
        x: numbers, shape (n,), a floating dtype. −inf is allowed (a key that is hidden) and n may
            be 0.
        block: how many elements are read at a time; it need not divide n.

    Returns:
        (m, l), both of shape (); float64 for float64 input, otherwise float32. With no element
        above −inf, m = −inf and l = 0.

    Raises:
        ValueError: x is not a 1-D tensor of a floating dtype, or block is not a positive integer.

    Source: Milakov & Gimelshein 2018 (arXiv 1805.02867), Algorithm 3.

    >>> x = torch.tensor([1.0, 3.0, 2.0, 5.0, 4.0])
    >>> m, l = online_softmax_stats(x, block=2)
    >>> m.item()
    5.0
    >>> torch.allclose(torch.exp(x - m) / l, torch.softmax(x, dim=0))
    True
    """
    _check_tensor("x", x)
    if x.dim() != 1:
        raise ValueError(f"x must have shape (n,), got {tuple(x.shape)}")
    _check_block("block", block)

    x = x.to(_accumulation_dtype(x))
    m = x.new_full((), -INF)
    l = x.new_zeros(())
    for start in range(0, len(x), block):
        x_block = x[start : start + block]
        m_new = torch.maximum(m, x_block.amax())
        base = _finite_base(m_new)
        l = l * torch.exp(m - base) + torch.exp(x_block - base).sum()
        m = m_new
    return m, l


def _finite_base(m: Tensor) -> Tensor:
    """m, or 0 where m is still −inf.

    Until a number above −inf has come, exp(−inf − (−inf)) would be NaN; exp(−inf − 0) = 0 is the
    right contribution of a hidden key.
    """
    return torch.where(m == -INF, 0.0, m)


# ------------------------------------------------------------------ 2. the usual way


def standard_attention(Q: Tensor, K: Tensor, V: Tensor, causal: bool = False) -> Tensor:
    """O = softmax(QKᵀ/√d) V with S and P written out: n·m numbers each. The comparison.

    Args:
        Q: queries, shape (..., n, d); float16, bfloat16, float32 or float64.
        K: keys, shape (..., m, d).
        V: values, shape (..., m, dv). All three agree in dtype, device and leading dimensions.
        causal: query i sees only the keys j ≤ i.

    Returns:
        O of shape (..., n, dv) in the dtype of Q, computed in float32 (float64 for float64). A row
        that sees no key is 0.

    Raises:
        ValueError: a shape, a dtype or a device does not fit.

    >>> Q, K, V = torch.randn(3, 5, 8).unbind()
    >>> O = standard_attention(Q, K, V, causal=True)
    >>> torch.allclose(O[0], V[0])  # the first query sees the first key only
    True
    """
    _check_inputs(Q, K, V, causal)
    n, m, acc = Q.shape[-2], K.shape[-2], _accumulation_dtype(Q)

    S = Q.to(acc) @ K.to(acc).mT * _scale(Q)
    if causal:
        S = S.masked_fill(_future(0, n, 0, m, Q.device), -INF)
    # A row of −inf (or of no key at all) has no softmax: its P is 0, not 0/0.
    no_key = (S == -INF).all(dim=-1, keepdim=True)
    P = torch.softmax(S.masked_fill(no_key, 0.0), dim=-1).masked_fill(no_key, 0.0)
    return (P @ V.to(acc)).to(Q.dtype)


# ------------------------------------------------------------------ 3. forward, tile by tile


def flash_attention_forward(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    causal: bool = False,
    block_q: int = 16,
    block_k: int = 16,
) -> tuple[Tensor, Tensor]:
    """The same O as :func:`standard_attention`, with one (block_q, block_k) tile of S at a time.

    Every row of attention is a softmax, so the online softmax applies; and since O is a sum over
    keys too, the partial output is re-based by the same factor as the partial denominator. The
    division by l waits until the end.

    Args:
        Q: queries, shape (..., n, d); float16, bfloat16, float32 or float64.
        K: keys, shape (..., m, d).
        V: values, shape (..., m, dv). All three agree in dtype, device and leading dimensions.
        causal: query i sees only the keys j ≤ i. Keys in the future of a whole tile are not read.
        block_q: rows of a tile; need not divide n.
        block_k: columns of a tile; need not divide m.

    Returns:
        O of shape (..., n, dv) in the dtype of Q, and L = logsumexp(S) of shape (..., n) in
        float32 (float64 for float64). A row that sees no key has O = 0 and L = −inf.

    Raises:
        ValueError: a shape, a dtype, a device or a block size does not fit.

    PyTorch can differentiate this function, but it would keep every tile for that, which is all of
    P again: use :class:`FlashAttention` for training. A NaN in a value reaches the rows of the
    tile on the diagonal that may not see it (0 · NaN is NaN), but no tile before.

    Source: Dao 2023 (arXiv 2307.08691), Algorithm 1.

    >>> Q, K, V = torch.randn(3, 50, 8).unbind()
    >>> O, L = flash_attention_forward(Q, K, V, causal=True)
    >>> torch.allclose(O, standard_attention(Q, K, V, causal=True), atol=1e-6)
    True
    >>> L.shape
    torch.Size([50])
    """
    _check_inputs(Q, K, V, causal)
    _check_block("block_q", block_q)
    _check_block("block_k", block_k)
    *leading, n, _ = Q.shape
    num_keys, dv = V.shape[-2:]
    scale, acc = _scale(Q), _accumulation_dtype(Q)

    O = Q.new_empty(*leading, n, dv)
    L = Q.new_empty(*leading, n, dtype=acc)
    for i0 in range(0, n, block_q):
        i1 = min(i0 + block_q, n)
        Q_i = Q[..., i0:i1, :].to(acc)
        O_i = Q_i.new_zeros(*leading, i1 - i0, dv)  # not yet divided by l
        m = Q_i.new_full((*leading, i1 - i0, 1), -INF)
        l = Q_i.new_zeros(*leading, i1 - i0, 1)

        # The last row of the tile, i1 − 1, sees the most keys: stop there.
        visible = min(num_keys, i1) if causal else num_keys
        for j0 in range(0, visible, block_k):
            j1 = min(j0 + block_k, visible)
            K_j, V_j = K[..., j0:j1, :].to(acc), V[..., j0:j1, :].to(acc)

            S = Q_i @ K_j.mT * scale
            if causal and j1 - 1 > i0:  # the tile touches the diagonal; others need no mask
                S = S.masked_fill(_future(i0, i1, j0, j1, Q.device), -INF)

            m_new = torch.maximum(m, S.amax(dim=-1, keepdim=True))
            base = _finite_base(m_new)
            P = torch.exp(S - base)
            rescale = torch.exp(m - base)
            l = l * rescale + P.sum(dim=-1, keepdim=True)
            O_i = O_i * rescale + P @ V_j
            m = m_new

        # l ≥ 1 once a key was seen, since the largest score adds exp(0); l = 0 means no key.
        O[..., i0:i1, :] = O_i / torch.where(l == 0, 1.0, l)
        L[..., i0:i1] = (m + torch.log(l)).squeeze(-1)
    return O, L


# ------------------------------------------------------------------ 4. backward, by recomputation


def flash_attention_backward(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    O: Tensor,
    L: Tensor,
    dO: Tensor,
    causal: bool = False,
    block_q: int = 16,
    block_k: int = 16,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients dQ, dK, dV, from the inputs, O, L and dO; no P is kept from the forward.

    One number per row is all that is needed to have P back: P = exp(S − L). Then

        dV = Pᵀ dO        dP = dO Vᵀ        dS = P ∘ (dP − D)        dQ = dS K/√d    dK = dSᵀ Q/√d

    The softmax's own gradient is dS_ij = P_ij (dP_ij − Σ_k P_ik dP_ik), a sum over the whole row.
    It is known before the first tile: Σ_k P_ik (dO_i · V_k) = dO_i · O_i, which is D_i.

    The outer loop runs over keys, so that dK and dV of a block are finished in one go; dQ collects
    a part from each block.

    Args:
        Q: queries, shape (..., n, d).
        K: keys, shape (..., m, d).
        V: values, shape (..., m, dv).
        O: output of :func:`flash_attention_forward`, shape (..., n, dv).
        L: its logsumexp, shape (..., n), float32 (float64 for float64).
        dO: gradient of the loss with respect to O, shape (..., n, dv); any strides.
        causal: as in the forward.
        block_q: rows of a tile; need not divide n, nor be that of the forward.
        block_k: columns of a tile; likewise.

    Returns:
        dQ, dK, dV with the shapes and dtypes of Q, K, V. A query that sees no key and a key that no
        query sees have gradient 0.

    Raises:
        ValueError: a shape, a dtype, a device or a block size does not fit.

    P is as exact as L: where the scores are so large that one float32 cannot hold m + log l, use
    float64.

    Source: Dao 2023 (arXiv 2307.08691), Algorithm 2; Dao et al. 2022 (arXiv 2205.14135),
    Algorithm 4.

    >>> Q, K, V = torch.randn(3, 50, 8).unbind()
    >>> O, L = flash_attention_forward(Q, K, V)
    >>> dQ, dK, dV = flash_attention_backward(Q, K, V, O, L, dO=torch.ones_like(O))
    >>> torch.allclose(dV.sum(dim=0), torch.full((8,), 50.0))  # each query hands out weight 1
    True
    """
    _check_inputs(Q, K, V, causal)
    _check_block("block_q", block_q)
    _check_block("block_k", block_k)
    n, num_keys, scale, acc = Q.shape[-2], K.shape[-2], _scale(Q), _accumulation_dtype(Q)
    _check_like("O", O, (*Q.shape[:-1], V.shape[-1]), Q.dtype, Q.device)
    _check_like("L", L, Q.shape[:-1], acc, Q.device)
    _check_like("dO", dO, O.shape, Q.dtype, Q.device)

    dQ = torch.zeros_like(Q, dtype=acc)
    dK = torch.zeros_like(K, dtype=acc)
    dV = torch.zeros_like(V, dtype=acc)
    D = (dO.to(acc) * O.to(acc)).sum(dim=-1, keepdim=True)
    L = _finite_base(L).unsqueeze(-1)

    visible = min(num_keys, n) if causal else num_keys  # the keys that some query sees
    for j0 in range(0, visible, block_k):
        j1 = min(j0 + block_k, visible)
        K_j, V_j = K[..., j0:j1, :].to(acc), V[..., j0:j1, :].to(acc)

        first = j0 if causal else 0  # the queries before see nothing of this block
        for i0 in range(first, n, block_q):
            i1 = min(i0 + block_q, n)
            Q_i, dO_i = Q[..., i0:i1, :].to(acc), dO[..., i0:i1, :].to(acc)

            S = Q_i @ K_j.mT * scale
            if causal and j1 - 1 > i0:
                S = S.masked_fill(_future(i0, i1, j0, j1, Q.device), -INF)
            P = torch.exp(S - L[..., i0:i1, :])

            dV[..., j0:j1, :] += P.mT @ dO_i
            dP = dO_i @ V_j.mT
            dS = P * (dP - D[..., i0:i1, :])
            dQ[..., i0:i1, :] += dS @ K_j * scale
            dK[..., j0:j1, :] += dS.mT @ Q_i * scale
    return dQ.to(Q.dtype), dK.to(K.dtype), dV.to(V.dtype)


# ------------------------------------------------------------------ 5. for loss.backward()


class FlashAttention(torch.autograd.Function):
    """Attention with gradients, in O(n) memory: ``O = FlashAttention.apply(Q, K, V, causal)``.

    ``causal`` may be left out (False). Shapes, dtypes and errors are those of
    :func:`flash_attention_forward`; the result is O alone. Between forward and backward exactly
    five tensors are kept: Q, K, V, O and L, nothing of size n×m. Gradients can be taken once, not
    differentiated again.

    Sources: Dao et al. 2022 (arXiv 2205.14135), Dao 2023 (arXiv 2307.08691).

    >>> Q, K, V = (torch.randn(50, 8, requires_grad=True) for _ in range(3))
    >>> O = FlashAttention.apply(Q, K, V, True)
    >>> O.square().sum().backward()
    >>> Q.grad.shape
    torch.Size([50, 8])
    """

    @staticmethod
    def forward(ctx: Any, Q: Tensor, K: Tensor, V: Tensor, causal: bool = False) -> Tensor:
        O, L = flash_attention_forward(Q, K, V, causal)
        ctx.save_for_backward(Q, K, V, O, L)
        ctx.causal = causal
        # L belongs to the scores of this precision, so the backward pass must compute the same ones.
        device = Q.device.type
        ctx.precision = torch.autocast(
            device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        )
        return O

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dO: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        Q, K, V, O, L = ctx.saved_tensors
        with ctx.precision:
            dQ, dK, dV = flash_attention_backward(Q, K, V, O, L, dO, ctx.causal)
        return dQ, dK, dV, None  # causal has no gradient


# ------------------------------------------------------------------ small things shared above


def _scale(Q: Tensor) -> float:
    """1/√d: keeps the variance of a score at 1 when the entries of Q and K have variance 1."""
    return float(Q.shape[-1] ** -0.5)


def _accumulation_dtype(x: Tensor) -> torch.dtype:
    """Sums of 16-bit numbers are kept in float32; float32 and float64 stay what they are."""
    return torch.promote_types(x.dtype, torch.float32)


def _future(i0: int, i1: int, j0: int, j1: int, device: torch.device) -> Tensor:
    """True where key j is in the future of query i, for i0 ≤ i < i1 and j0 ≤ j < j1."""
    i = torch.arange(i0, i1, device=device).unsqueeze(-1)
    j = torch.arange(j0, j1, device=device)
    return j > i


def _check_inputs(Q: Tensor, K: Tensor, V: Tensor, causal: bool) -> None:
    for name, x in (("Q", Q), ("K", K), ("V", V)):
        _check_tensor(name, x)
        if x.dim() < 2:
            raise ValueError(f"{name} must have shape (..., length, dim), got {tuple(x.shape)}")
    if Q.shape[-1] == 0:
        raise ValueError(f"Q must have a head dimension of at least 1, got {tuple(Q.shape)}")
    _check_like("K", K, (*Q.shape[:-2], K.shape[-2], Q.shape[-1]), Q.dtype, Q.device)
    _check_like("V", V, (*K.shape[:-1], V.shape[-1]), Q.dtype, Q.device)
    if not isinstance(causal, bool):
        raise ValueError(f"causal must be True or False, got {type(causal).__name__}")


def _check_tensor(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(f"{name} must be float16, bfloat16, float32 or float64, got {x.dtype}")


def _check_like(
    name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if x.shape != shape:
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(x.shape)}")
    if x.dtype != dtype:
        raise ValueError(f"{name} must have dtype {dtype}, got {x.dtype}")
    if x.device != device:
        raise ValueError(f"{name} must be on device {device}, got {x.device}")


def _check_block(name: str, block: int) -> None:
    if not isinstance(block, int) or block < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {block!r}")
