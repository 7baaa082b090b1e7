"""Stand-ins for packages that `tilewise bench gpu` compares with: their signatures, and the formula."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

FA3_FORWARD = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(v_new!)? v_new=None, "
    "Tensor? q_v=None, Tensor(out!)? out=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
    "Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, Tensor? seqused_k=None, "
    "int? max_seqlen_q=None, int? max_seqlen_k=None, Tensor? page_table=None, "
    "Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, Tensor? rotary_cos=None, "
    "Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, Tensor? q_descale=None, "
    "Tensor? k_descale=None, Tensor? v_descale=None, float? softmax_scale=None, "
    "bool is_causal=False, int window_size_left=-1, int window_size_right=-1, "
    "int attention_chunk=0, float softcap=0.0, bool is_rotary_interleaved=False, "
    "Tensor? scheduler_metadata=None, int num_splits=0, bool? pack_gqa=None, int sm_margin=0) "
    "-> (Tensor(out!), Tensor, Tensor, Tensor)"
)
FA3_BACKWARD = (
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
    "Tensor(dq!)? dq=None, Tensor(dk!)? dk=None, Tensor(dv!)? dv=None, Tensor? cu_seqlens_q=None, "
    "Tensor? cu_seqlens_k=None, Tensor? seqused_q=None, Tensor? seqused_k=None, "
    "int? max_seqlen_q=None, int? max_seqlen_k=None, float? softmax_scale=None, "
    "bool is_causal=False, int window_size_left=-1, int window_size_right=-1, float softcap=0.0, "
    "bool deterministic=False, int sm_margin=0) "
    "-> (Tensor(dq!), Tensor(dk!), Tensor(dv!), Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    softcap: float = 0.0,
    slopes: Tensor | None = None,
    bias: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """(B, S, H, D), or packed (total, H, D), in float64; a side of the window that is −1 or None is open."""
    if cu_seqlens is not None:
        options = (scale, causal, window, softcap, slopes, bias)
        parts = (slice(a, b) for a, b in pairwise(cu_seqlens.tolist()))
        return torch.cat(
            [attention(q[None, p], k[None, p], v[None, p], *options)[0] for p in parts]
        )
    groups = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(groups, 2) for t in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), k.double())
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(q.shape[1]).unsqueeze(1) - torch.arange(k.shape[1])
    if slopes is not None:
        scores = scores - slopes.view(-1, 1, 1) * distance.abs()
    if bias is not None:
        scores = scores + bias
    left, right = (None if side in (None, -1) else side for side in window)
    right = 0 if causal else right
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left is not None:
        hidden |= distance > left
    if right is not None:
        hidden |= distance < -right
    p = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("bhij,bjhd->bihd", p, v.double()).to(q.dtype)


def flash_attn() -> ModuleType:
    module = ModuleType("flash_attn")

    def flash_attn_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
    ) -> Tensor:
        assert alibi_slopes is None or alibi_slopes.dtype == torch.float32
        return attention(q, k, v, softmax_scale, causal, window_size, softcap, alibi_slopes)

    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
    ) -> Tensor:
        check_packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return attention(q, k, v, softmax_scale, causal, window_size, cu_seqlens=cu_seqlens_q)

    module.__dict__.update(locals())
    return module


def check_packed(cu_q: Tensor, cu_k: Tensor, longest_q: int, longest_k: int) -> None:
    assert cu_q.dtype == torch.int32
    assert torch.equal(cu_q, cu_k)
    assert longest_q == longest_k == int(cu_q.diff().max())


def fa4() -> ModuleType:
    module = ModuleType("flash_attn.cute")

    def flash_attn_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int | None, int | None] = (None, None),
        learnable_sink: Tensor | None = None,
        softcap: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        out = attention(q, k, v, softmax_scale, causal, window_size, softcap)
        return out, out.new_zeros(1)

    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
    ) -> Tensor:
        return attention(q, k, v, softmax_scale, causal, cu_seqlens=cu_seqlens_q)

    module.__dict__.update(locals())
    return module


def xformers() -> ModuleType:
    module = ModuleType("xformers.ops")

    class BlockDiagonalMask:
        def __init__(self, lengths: list[int], causal: bool = False) -> None:
            assert isinstance(lengths, list)
            self.cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
            self.lengths, self.causal = lengths, causal

        @classmethod
        def from_seqlens(cls, q_seqlen: list[int]) -> BlockDiagonalMask:
            return cls(q_seqlen)

        def make_causal(self) -> BlockDiagonalMask:
            return BlockDiagonalMask(self.lengths, causal=True)

    class LocalAttentionFromBottomRightMask:
        def __init__(self, window_left: int, window_right: int) -> None:
            self.window = window_left, window_right

    class LowerTriangularMask:
        pass

    def memory_efficient_attention(
        query: Tensor, key: Tensor, value: Tensor, attn_bias: Any = None, p: float = 0.0
    ) -> Tensor:
        given = (query, key, value)
        if isinstance(attn_bias, BlockDiagonalMask):
            assert query.shape[0] == 1
            cu, packed = attn_bias.cu_seqlens, (t[0] for t in given)
            return attention(*packed, causal=attn_bias.causal, cu_seqlens=cu)[None]
        if isinstance(attn_bias, LocalAttentionFromBottomRightMask):
            return attention(*given, window=attn_bias.window)
        if isinstance(attn_bias, LowerTriangularMask):
            return attention(*given, causal=True)
        return attention(*given, bias=attn_bias)

    module.fmha = SimpleNamespace(attn_bias=SimpleNamespace(**locals()))  # type: ignore[attr-defined]
    module.memory_efficient_attention = memory_efficient_attention  # type: ignore[attr-defined]
    return module


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """torch.nn.attention.varlen's, which needs a GPU."""
    check_packed(cu_seq_q, cu_seq_k, max_q, max_k)
    return attention(query, key, value, scale, window=window_size, cu_seqlens=cu_seq_q)


def install(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    modules = {"flash_attn": flash_attn(), "flash_attn.cute": fa4(), "xformers.ops": xformers()}
    for name, module in modules.items():
        patch.setitem(sys.modules, name, module)
    patch.setitem(sys.modules, "xformers", ModuleType("xformers"))
    patch.setitem(sys.modules, "flash_attn_interface", ModuleType("flash_attn_interface"))


def names_in(schema: str) -> list[str]:
    """The names of an operator's arguments. Those at the end that are left out are not handed over."""
    inside = schema[schema.index("(") + 1 : schema.index(") ->")]
    return [argument.split("=")[0].split()[-1] for argument in inside.split(", ")]


@contextmanager
def fa3_operators() -> Iterator[None]:
    """torch.ops.flash_attn_3 with the schemas of the real one."""

    defaults = {
        "is_causal": False,
        "window_size_left": -1,
        "window_size_right": -1,
        "softcap": 0.0,
        "cu_seqlens_q": None,
    }

    def named(schema: str, arguments: tuple[Any, ...]) -> dict[str, Any]:
        return {**defaults, **dict(zip(names_in(schema), arguments, strict=False))}

    def options(given: dict[str, Any]) -> dict[str, Any]:
        return {
            "scale": given["softmax_scale"],
            "causal": given["is_causal"],
            "window": (given["window_size_left"], given["window_size_right"]),
            "softcap": given["softcap"],
            "cu_seqlens": given["cu_seqlens_q"],
        }

    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        given = named(FA3_FORWARD, arguments)
        q, k, v = arguments[:3]
        if given["cu_seqlens_q"] is not None:
            names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
            check_packed(*(given[name] for name in names))
        return attention(q, k, v, **options(given)), *(q.new_zeros(1) for _ in range(3))

    def backward(*arguments: Any) -> tuple[Tensor, ...]:
        dout, q, k, v, _, _, *gradients = arguments[:9]
        given = named(FA3_BACKWARD, arguments)
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in (q, k, v)]
            made = torch.autograd.grad(attention(*leaves, **options(given)), leaves, dout)
        for t, gradient in zip(gradients, made, strict=True):
            t.copy_(gradient)
        return *gradients, *(q.new_zeros(1) for _ in range(5))

    library = torch.library.Library("flash_attn_3", "DEF")
    for schema, function in ((FA3_FORWARD, forward), (FA3_BACKWARD, backward)):
        library.define(schema)
        library.impl(schema.split("(")[0], function, "CPU")
    try:
        yield
    finally:
        library._destroy()
