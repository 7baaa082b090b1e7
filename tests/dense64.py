"""Attention by its definition, dense and in float64, written apart from the library.

It shares no code with `tilewise`, so a mistake in the library's own formula shows. Everything is
plain PyTorch that autograd can differentiate; hidden entries are replaced before the softmax, since
0 · NaN in its backward would make rows without a key NaN.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

INF = float("inf")
# The largest error, relative to the largest value (or to 1), that arithmetic in a dtype may leave.
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 2e-5,
    torch.bfloat16: 2e-2,
    torch.float16: 3e-3,
}


def visible(
    sq: int,
    sk: int,
    causal: bool = False,
    align: str = "bottom-right",
    window_size: tuple[int | None, int | None] = (None, None),
) -> Tensor:
    """Which keys each row sees by position, (Sq, Sk)."""
    left, right = window_size
    i = torch.arange(sq)[:, None] + (sk - sq if align == "bottom-right" else 0)
    j = torch.arange(sk)[None]
    seen = torch.ones(sq, sk, dtype=torch.bool)
    if causal:
        seen &= j <= i
    if right is not None:
        seen &= j <= i + right
    if left is not None:
        seen &= j >= i - left
    return seen


def in_range(start: Tensor, end: Tensor, b: int, sq: int, sk: int) -> Tensor:
    """start ≤ j < end, (B, 1, Sq, Sk)."""
    j = torch.arange(sk)
    start, end = start.expand(b, sq), end.expand(b, sq)
    return ((j >= start[..., None]) & (j < end[..., None]))[:, None]


@functools.cache
def keep64(p: float, seed: int, b: int, h: int, sq: int, sk: int, number: int = 0) -> Tensor:
    """What dropout multiplies probabilities by, (B, H, Sq, Sk): 0 or 1 / (1 − p).

    `number` is the first batch entry's number. Word j % 4 of Philox-4x32 with seven rounds at the
    counter (j // 4, i, head, sequence), in Python integers.
    """
    key = (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)
    kept = []
    for e, head, i in itertools.product(range(b), range(h), range(sq)):
        words: list[int] = []
        while len(words) < sk:
            words += philox((len(words) // 4, i, head, e + number), key, 7)
        kept += [word >= round(p * 2**32) for word in words[:sk]]
    return torch.tensor(kept, dtype=torch.float64).reshape(b, h, sq, sk) / (1 - p)


def philox(
    counter: tuple[int, int, int, int], key: tuple[int, int], rounds: int
) -> tuple[int, int, int, int]:
    """Philox-4x32 as Salmon et al. 2011 print it."""
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(rounds):
        left, right = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (
            (right >> 32) ^ b ^ k0,
            right & 0xFFFFFFFF,
            (left >> 32) ^ d ^ k1,
            left & 0xFFFFFFFF,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return a, b, c, d


def attention64(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    align: str = "bottom-right",
    window_size: tuple[int | None, int | None] = (None, None),
    key_range: tuple[Tensor, Tensor] | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    keep: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out (B, Sq, Hq, Dv) and lse (B, Hq, Sq) in float64 of q (B, Sq, Hq, D), k and v."""
    b, sq, hq, d = q.shape
    sk, hkv = k.shape[1:3]
    head = torch.arange(hq) // max(1, hq // max(1, hkv))
    q, k, v = q.double(), k.double()[:, :, head], v.double()[:, :, head]
    s = torch.einsum("bihd,bjhd->bhij", q, k) * (d**-0.5 if scale is None else scale)
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    if alibi_slopes is not None:
        offset = sk - sq if align == "bottom-right" else 0
        distance = (torch.arange(sq)[:, None] + offset - torch.arange(sk)).abs().double()
        s = s - alibi_slopes.double().expand(b, hq)[:, :, None, None] * distance
    if bias is not None:
        s = s + bias.double()
    seen = visible(sq, sk, causal, align, window_size).expand(b, hq, sq, sk)
    if key_range is not None:
        seen = seen & in_range(*key_range, b, sq, sk)
    if mask is not None:
        seen = seen & mask
    seen = seen & (s != -INF)
    s = s.masked_fill(~seen, -1.0)

    top = torch.full((b, hq, sq, 1), -INF, dtype=torch.float64)
    if sk:
        top = s.detach().masked_fill(~seen, -INF).amax(-1, keepdim=True)
    logit = torch.full((b, hq, sq, 1), -INF, dtype=torch.float64)
    if sinks is not None:
        logit = sinks.double()[:, None, None].expand(b, hq, sq, 1)
    top = torch.maximum(top, logit.detach())
    top = top.masked_fill(top == -INF, 0.0)
    weights = torch.where(seen, torch.exp(torch.where(seen, s - top, 0.0)), 0.0)
    total = weights.sum(-1, keepdim=True) + torch.exp(logit - top)
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    p = weights / total
    if keep is not None:
        p = p * keep
    out = torch.einsum("bhij,bjhv->bihv", p, v)
    lse = (top + torch.log(total)).masked_fill(empty, -INF).squeeze(-1)
    return out, lse


def varlen64(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Sequence[int],
    cu_k: Sequence[int],
    *,
    key_range: tuple[Tensor, Tensor] | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    keep: Sequence[Tensor] | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """out (total_q, Hq, Dv) and lse (Hq, total_q), one sequence at a time."""
    total, hq, _ = q.shape
    outs, lses = [], []
    for s in range(len(cu_q) - 1):
        rows, keys = slice(cu_q[s], cu_q[s + 1]), slice(cu_k[s], cu_k[s + 1])
        n, m = rows.stop - rows.start, keys.stop - keys.start

        def cut(t: Tensor | None, rows: slice = rows, m: int = m) -> Tensor | None:
            if t is None:
                return None
            t = t.reshape(1) if t.ndim == 0 else t
            return t.expand(hq, total, t.shape[-1])[None, :, rows, : max(m, 1)].expand(
                1, hq, rows.stop - rows.start, m
            )

        own = dict(options)
        if key_range is not None:
            own["key_range"] = tuple(t.expand(total)[None, rows] for t in key_range)
        if alibi_slopes is not None:
            own["alibi_slopes"] = alibi_slopes if alibi_slopes.ndim == 1 else alibi_slopes[s]
        if keep is not None:
            own["keep"] = keep[s]
        o, lse = attention64(
            q[None, rows], k[None, keys], v[None, keys], mask=cut(mask), bias=cut(bias), **own
        )
        assert o.shape[1] == n
        outs.append(o[0])
        lses.append(lse[0])
    rest = total - cu_q[-1]
    outs.append(torch.zeros(rest, hq, v.shape[-1], dtype=torch.float64))
    lses.append(torch.full((hq, rest), -INF, dtype=torch.float64))
    return torch.cat(outs), torch.cat(lses, 1)


def gathered(pages: Tensor, table: Sequence[int], length: int) -> Tensor:
    """The tokens of one batch entry, (1, length, H, D), looked up one by one."""
    size = pages.shape[1]
    tokens = [pages[table[j // size], j % size] for j in range(length)]
    return torch.stack(tokens)[None] if tokens else pages.new_zeros(1, 0, *pages.shape[2:])


def paged64(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, used: Sequence[int], **options: Any
) -> tuple[Tensor, Tensor]:
    """out and lse of a paged call, one batch entry at a time; options without a batch dimension."""
    parts = [
        attention64(
            q[b : b + 1],
            gathered(k, table[b].tolist(), n),
            gathered(v, table[b].tolist(), n),
            **options,
        )
        for b, n in enumerate(used)
    ]
    return torch.cat([o for o, _ in parts]), torch.cat([lse for _, lse in parts])


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype | None = None, factor: float = 1):
    """Asserts equal shapes, NaN and infinities in the same places, and the rest near."""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    tolerance = TOLERANCE[dtype or actual.dtype] * factor
    actual, expected = actual.detach().double(), expected.detach().double()
    strange = ~expected.isfinite()
    assert torch.equal(strange, ~actual.isfinite()), "NaN or infinity in other places"
    assert torch.equal(actual[strange].nan_to_num(7.0), expected[strange].nan_to_num(7.0))
    if actual.numel() == 0:
        return
    zero = torch.zeros((), dtype=torch.float64)
    error = (actual - expected).where(~strange, zero).abs().max().item()
    size = max(1.0, expected.where(~strange, zero).abs().max().item())
    assert error <= tolerance * size, f"off by {error:.3g} where values reach {size:.3g}"


Function = Callable[..., tuple[Tensor, Tensor]]


def gradients(
    function: Function,
    leaves: dict[str, Tensor],
    dout: Tensor | None,
    dlse: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """out, lse and the gradient of each leaf of function(**leaves, **options)."""
    fresh = {name: t.detach().requires_grad_() for name, t in leaves.items()}
    out, lse = function(**fresh, **options)
    loss = out.new_zeros((), dtype=torch.float64)
    if dout is not None:
        loss = loss + (out * dout.to(out.dtype)).double().sum()
    if dlse is not None:
        # A row without a key has lse −inf, and its gradient is 0 whatever arrives.
        loss = loss + (lse.masked_fill(lse == -INF, 0.0) * dlse.to(lse.dtype)).double().sum()
    if not loss.requires_grad:
        return out, lse, {name: torch.zeros_like(t) for name, t in leaves.items()}
    grads = torch.autograd.grad(loss, list(fresh.values()), allow_unused=True)
    named = zip(fresh.items(), grads, strict=True)
    return out, lse, {n: torch.zeros_like(t) if g is None else g for (n, t), g in named}


def check(
    ours: Function,
    theirs: Function,
    leaves: dict[str, Tensor],
    *,
    lse_gradient: bool = True,
    factor: float = 1,
    seed: int = 0,
    our_options: dict[str, Any] | None = None,
    their_options: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Asserts that out, lse and the gradients of all leaves are those of the float64 definition.

    The gradient of a low-precision leaf is wrong by a rounding of its largest terms, so gradients
    may be four times as far off as results. Returns what `ours` gave.
    """
    q, v = leaves["q"], leaves["v"]
    generator = torch.Generator().manual_seed(seed)
    shape = (*q.shape[:-1], v.shape[-1])
    dout = torch.randn(shape, generator=generator, dtype=torch.float64).to(q.dtype)
    lse_shape = (q.shape[0], q.shape[2], q.shape[1]) if q.ndim == 4 else (q.shape[1], q.shape[0])
    dlse = (
        torch.randn(lse_shape, generator=generator, dtype=torch.float64) if lse_gradient else None
    )
    got = gradients(ours, leaves, dout, dlse, **options, **(our_options or {}))
    want = gradients(
        theirs,
        {name: t.double() for name, t in leaves.items()},
        dout.double(),
        dlse,
        **options,
        **(their_options or {}),
    )
    close(got[0], want[0], factor=factor)
    # lse never passes through a low precision, but the products that make it may.
    close(got[1], want[1], torch.float64 if q.dtype == torch.float64 else torch.float32)
    assert got[0].dtype == q.dtype
    assert got[1].dtype == (torch.float64 if q.dtype == torch.float64 else torch.float32)
    for name, gradient in got[2].items():
        assert gradient.dtype == leaves[name].dtype
        coarser = max(q.dtype, leaves[name].dtype, key=TOLERANCE.__getitem__)
        try:
            close(gradient, want[2][name], coarser, 4 * factor)
        except AssertionError as error:
            raise AssertionError(f"gradient of {name}: {error}") from None
    return got
