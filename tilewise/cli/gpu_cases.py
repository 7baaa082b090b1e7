"""The cases of ``tilewise bench gpu``: what is computed, on what, and how many FLOPs that is."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

import tilewise
from tilewise.arguments import problem_of
from tilewise.cli.bench_cpu import BACKWARD, BOTH, FORWARD
from tilewise.spec import Problem

DTYPE = torch.bfloat16
PASSES = (FORWARD, BACKWARD, BOTH)
# Timed by the clock and without a CUDA graph: what a loop in Python sees.
EAGER = "eager"
# As many scores as an n×n implementation is asked to hold.
MOST_SCORES = 2**29
SOFTCAP = 5.0


@dataclass(frozen=True)
class Sizes:
    """How large the cases are, which passes there are, and what dense cases are compared with.

    Dense cases have B · S = `tokens` and H · D = `width`.
    """

    tokens: int = 16384
    width: int = 2048
    head_dims: tuple[int, ...] = (128, 64, 256)
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384)
    feature_length: int = 4096
    window: int = 1024
    bias_length: int = 2048
    # Few long sequences and many short ones, of lengths that fit no tile.
    packed: tuple[int, ...] = (
        6823,
        3519,
        2047,
        1313,
        1000,
        611,
        400,
        257,
        190,
        100,
        65,
        37,
        17,
        4,
        1,
    )
    # Batch sizes and lengths of calls that are short.
    eager: tuple[tuple[int, int], ...] = ((4, 128), (8, 512))
    passes: tuple[str, ...] = PASSES
    dense_peers: tuple[str, ...] = (
        *("cuDNN", "flash", "efficient", "math", "Flex"),
        *("flash-attn", "FA3", "FA4", "xformers"),
    )


USUAL = Sizes()
QUICK = Sizes(
    lengths=(1024, 4096, 16384),
    passes=(FORWARD, BACKWARD),
    dense_peers=("cuDNN", "Flex", "flash-attn", "FA3", "FA4", "xformers"),
)


class Case(NamedTuple):
    """One computation. `mask` is "full", "causal" or a causal window of that many keys.

    `lengths` are those of packed sequences; `batch` is then their number and `length` the number of tokens.
    """

    name: str
    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    mask: str | int = "full"
    peers: tuple[str, ...] = ()
    softcap: float | None = None
    alibi: bool = False
    bias: bool = False
    lengths: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.name} D={self.head_dim} S={self.length} {self.masked}"

    @property
    def masked(self) -> str:
        return f"window {self.mask}" if isinstance(self.mask, int) else self.mask

    @property
    def shape(self) -> tuple[int, ...]:
        """That of q: (B, S, H, D), or packed (total, H, D)."""
        tokens = (self.length,) if self.lengths else (self.batch, self.length)
        return *tokens, self.heads, self.head_dim

    def flops(self, when: str) -> float:
        """FLOPs of a pass by visible pairs; causal is half of full, as is the custom."""
        return {FORWARD: 1.0, BACKWARD: 2.5, BOTH: 3.5}[when] * _forward_flops(self)


@functools.cache
def _forward_flops(case: Case) -> float:
    half = case.mask == "causal" and not case.lengths
    # One number in place of all: only shapes are read, and lengths.
    inputs = make_inputs(case._replace(bias=False), lambda *shape: torch.zeros(1).expand(shape))
    options = inputs.options(case._replace(mask="full") if half else case)
    flops = tilewise.cost(*inputs.qkv, **options).flops
    return flops / 2 if half else float(flops)


class Inputs(NamedTuple):
    """What a case computes on, q, k, v and dout laid out (B, S, H, D) or (total, H, D)."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    cu_seqlens: Tensor | None = None

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    @property
    def differentiated(self) -> dict[str, Tensor]:
        """What has a gradient, by name."""
        leaves = {"q": self.q, "k": self.k, "v": self.v}
        return leaves if self.bias is None else {**leaves, "bias": self.bias}

    def options(self, case: Case) -> dict[str, Any]:
        """The rest of a call of `attention` or `attention_varlen`, but for the bias."""
        window = isinstance(case.mask, int)
        options: dict[str, Any] = {"causal": case.mask == "causal"}
        if window:
            options["window_size"] = (int(case.mask) - 1, 0)
        if case.softcap is not None:
            options["softcap"] = case.softcap
        if self.alibi_slopes is not None:
            options["alibi_slopes"] = self.alibi_slopes
        if self.cu_seqlens is not None:
            options |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), self.cu_seqlens)
            options |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), max(case.lengths))
        return options

    def problem(self, case: Case) -> Problem:
        return problem_of(*self.qkv, **self.options(case), bias=self.bias)


def random_inputs(case: Case, device: torch.device) -> Inputs:
    """Fresh random numbers in every run."""
    # One of our own: a capture of a CUDA graph that fails may leave the default generator unusable.
    generator = torch.Generator(device)
    generator.seed()

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=DTYPE, device=device)

    return make_inputs(case, normal)


def make_inputs(case: Case, make: Any) -> Inputs:
    """Inputs of the case; `make` gives a tensor of a shape."""
    q = make(*case.shape)
    kv_shape = (*case.shape[:-2], case.kv_heads, case.head_dim)
    cumulative = list(accumulate(case.lengths, initial=0))
    return Inputs(
        q,
        make(*kv_shape),
        make(*kv_shape),
        make(*case.shape),
        make(case.batch, case.heads, case.length, case.length) if case.bias else None,
        tilewise.alibi_slopes(case.heads).to(q.device) if case.alibi else None,
        torch.tensor(cumulative, dtype=torch.int32, device=q.device) if case.lengths else None,
    )


def cases(sizes: Sizes) -> Iterator[Case]:
    """What matters most first."""
    first, *others = sizes.head_dims
    yield from _dense(sizes, first)
    yield from _features(sizes, first)
    for head_dim in others:
        yield from _dense(sizes, head_dim)


def _dense(sizes: Sizes, head_dim: int) -> Iterator[Case]:
    for length, mask in product(sizes.lengths, ("full", "causal")):
        case = _case(sizes, "dense", length, head_dim, mask)
        fits = case.batch * case.heads * length**2 <= MOST_SCORES
        yield case._replace(
            peers=tuple(name for name in sizes.dense_peers if fits or name != "math")
        )


def _features(sizes: Sizes, head_dim: int) -> Iterator[Case]:
    def causal(name: str, length: int, *peers: str, **rest: Any) -> Case:
        return _case(sizes, name, length, head_dim, "causal")._replace(peers=peers, **rest)

    n = sizes.feature_length
    flash = ("flash-attn", "FA3", "FA4")
    heads = 2 * max(4, sizes.width // head_dim)
    yield causal("GQA", n, "cuDNN", "flash", "Flex", *flash, heads=heads, kv_heads=heads // 4)
    longest = sizes.lengths[-1]
    yield causal("window", longest, "Flex", *flash, "xformers", mask=sizes.window)
    yield causal("softcap", n, "Flex", *flash, softcap=SOFTCAP)
    yield causal("ALiBi", n, "Flex", "flash-attn", alibi=True)
    biased = ("efficient", "cuDNN", "Flex", "xformers")
    yield causal("bias", sizes.bias_length, *biased, mask="full", bias=True)
    packed = {"lengths": sizes.packed, "batch": len(sizes.packed)}
    for mask in ("full", "causal"):
        peers = ("flash", "Flex", *flash, "xformers")
        yield causal("varlen", sum(sizes.packed), *peers, mask=mask, **packed)
    for batch, length in sizes.eager:
        yield causal(EAGER, length, "SDPA", "cuDNN", "flash", "Flex", *flash, batch=batch)


def _case(sizes: Sizes, name: str, length: int, head_dim: int, mask: str) -> Case:
    heads = max(1, sizes.width // head_dim)
    return Case(name, max(1, sizes.tokens // length), length, heads, heads, head_dim, mask)
