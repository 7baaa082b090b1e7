"""The cases of ``tilewise bench cpu``, what they are compared with, and how they are timed.

Every ratio comes from one process and one thread: the two sides are called in turn on the same
random numbers, so that what slows the machine for a while slows both, and medians are compared.
Each side gets contiguous inputs in its own layout.
"""

import functools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import tilewise
from tilewise.cli.measure import measure

FORWARD, BACKWARD, BOTH = "forward", "backward", "both"
MASKS = ("full", "causal")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Largest ‖ours − theirs‖ / ‖theirs‖: room for rounding, the peer's too, and none for a wrong mask.
TOLERANCE = {"fp32": 1e-5, "bf16": 3e-2, "fp16": 4e-3}
FEWEST_PAIRS, MOST_PAIRS = 3, 1000
MEMORY_GOAL_MB = 120


@dataclass(frozen=True)
class Sizes:
    """How large the cases are, and how long each is timed at least."""

    lengths: tuple[int, ...] = (1024, 4096)
    head_dims: tuple[int, ...] = (64, 128)
    tokens: int = 4096
    window: int = 256
    window_in: int = 4096
    decode_keys: int = 16384
    passes: tuple[str, ...] = (FORWARD, BACKWARD, BOTH)
    short: tuple[int, ...] = (64, 128)
    short_tokens: int = 2048
    peers: tuple[str, ...] = ("SDPA flash", "SDPA math", "Flex")
    peers_at: int = 4096
    memory_length: int = 65536
    seconds: float = 1.0


USUAL = Sizes()
FULL = Sizes(lengths=(1024, 4096, 16384))
QUICK = Sizes(
    lengths=(1024,),
    head_dims=(64,),
    tokens=1024,
    passes=(FORWARD, BOTH),
    window_in=2048,
    short=(128,),
    short_tokens=1024,
    peers=(),
    memory_length=16384,
    seconds=0.3,
)


class Case(NamedTuple):
    """One comparison. `mask` is "full", "causal" or a causal window of that many keys."""

    name: str
    dtype: str
    when: str
    queries: int
    keys: int
    head_dim: int = 64
    batch: int = 1
    heads: int = 1
    kv_heads: int = 1
    mask: str | int = "full"
    peer: str = "SDPA"

    def __str__(self) -> str:
        return (
            f"{self.name} {self.dtype} {self.when} S={self.keys} D={self.head_dim} "
            f"{self.mask} {self.peer}"
        ).rstrip()

    @property
    def options(self) -> dict[str, Any]:
        """The mask as `attention` takes it."""
        if isinstance(self.mask, int):
            return {"window_size": (self.mask - 1, 0)}
        return {"causal": self.mask == "causal"}

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Those of q, k and v."""
        key_shape = (self.batch, self.keys, self.kv_heads, self.head_dim)
        return (self.batch, self.queries, self.heads, self.head_dim), key_shape, key_shape

    @property
    def flops(self) -> int:
        q, k, v = (torch.empty(s, dtype=DTYPES[self.dtype], device="meta") for s in self.shapes)
        cost = tilewise.cost(q, k, v, **self.options)
        return {
            FORWARD: cost.flops,
            BACKWARD: cost.flops_backward,
            BOTH: cost.flops + cost.flops_backward,
        }[self.when]


class Outcome(NamedTuple):
    """What came of a case; None where there is nothing to say. `wrong`: the check failed."""

    case: Case
    seconds: float | None = None
    peer_seconds: float | None = None
    megabytes: float | None = None
    wrong: bool = False
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """How many times faster than the peer."""
        if self.seconds is None or self.peer_seconds is None:
            return None
        return self.peer_seconds / self.seconds

    @property
    def gflops(self) -> float | None:
        """GFLOP/s by the visible pairs."""
        return None if self.seconds is None else self.case.flops / self.seconds / 1e9


def cases(sizes: Sizes) -> Iterator[Case]:
    for dtype, n, width in product(DTYPES, sizes.lengths, sizes.head_dims):
        heads = max(1, sizes.tokens // n)
        for mask, when in product(MASKS, sizes.passes):
            yield _square("dense", dtype, when, n, heads, mask=mask, head_dim=width)
    for dtype, when in product(("fp32", "bf16"), (FORWARD, BOTH)):
        yield _square("window", dtype, when, sizes.window_in, mask=sizes.window)
    for name, kv_heads in (("decode MHA", 8), ("decode MQA", 1)):
        yield Case(name, "bf16", FORWARD, 1, sizes.decode_keys, heads=8, kv_heads=kv_heads)
    for dtype, n in product(("fp32", "bf16"), sizes.short):
        batch = max(1, sizes.short_tokens // n)
        for mask, when in product(MASKS, sizes.passes):
            yield _square("short", dtype, when, n, 8, mask=mask, batch=batch)
    for peer, dtype, mask in product(sizes.peers, ("fp32", "bf16"), MASKS):
        for when in (FORWARD,) if peer == "Flex" else (FORWARD, BOTH):
            yield _square("peers", dtype, when, sizes.peers_at, mask=mask, peer=peer)
    yield _square("memory", "fp32", BOTH, sizes.memory_length, peer="")


def _square(name: str, dtype: str, when: str, n: int, heads: int = 1, **rest: Any) -> Case:
    """As many keys as queries, as many key heads as query heads."""
    return Case(name, dtype, when, n, n, heads=heads, kv_heads=heads, **rest)


def run(case: Case, seconds: float) -> Outcome:
    """The outcome of one case, timed for about that many seconds."""
    if case.name == "memory":
        return _memory(case)
    try:
        peer = PEERS[case.peer](case)
    except Unavailable as reason:
        return Outcome(case, note=f"{case.peer} skipped: {reason}")
    generator = torch.Generator()
    generator.seed()
    dtype = DTYPES[case.dtype]
    shapes = (*case.shapes, case.shapes[0])
    inputs = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    heads_first = [t.transpose(1, 2).contiguous() for t in inputs]
    ours = pass_of(functools.partial(tilewise.attention, **case.options), inputs, case.when)
    theirs = pass_of(peer, heads_first, case.when)

    pairs = zip(ours(), theirs(), strict=True)
    differences = [_difference(a.transpose(1, 2), b) for a, b in pairs]
    wrong = not all(difference <= TOLERANCE[case.dtype] for difference in differences)
    note = f"results differ from {case.peer} by {max(differences):.1e}" if wrong else ""
    return Outcome(case, *_medians(ours, theirs, seconds), wrong=wrong, note=note)


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread, here and in processes started meanwhile."""
    threads, inherited = torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if inherited is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = inherited


def pass_of(
    attention: Callable[..., Tensor], inputs: list[Tensor], when: str
) -> Callable[[], tuple[Tensor, ...]]:
    """A call that makes the pass and returns what it computes: out, gradients, or all.

    `inputs` are what attention is called with, and dout. A backward pass makes its forward in the first
    call.
    """
    *operands, dout = inputs
    leaves = [t.detach().requires_grad_(when != FORWARD) for t in operands]
    made: list[Tensor] = []

    def backward() -> tuple[Tensor, ...]:
        if not made:
            made.append(attention(*leaves))
        return torch.autograd.grad(made[0], leaves, dout, retain_graph=True)

    def both() -> tuple[Tensor, ...]:
        out = attention(*leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, dout)

    calls = {FORWARD: lambda: (attention(*leaves),), BACKWARD: backward, BOTH: both}
    return calls[when]


def _difference(a: Tensor, b: Tensor) -> float:
    a, b = a.double(), b.double()
    return float((a - b).norm() / b.norm())


def _medians(
    ours: Callable[[], object], theirs: Callable[[], object], seconds: float
) -> tuple[float, float]:
    """Median seconds of both, called in turn, each first as often as second."""
    times: dict[Callable[[], object], list[float]] = {ours: [], theirs: []}
    order = [ours, theirs]
    end = time.perf_counter() + seconds
    pairs = 0
    while pairs < FEWEST_PAIRS or (pairs < MOST_PAIRS and time.perf_counter() < end):
        for call in order:
            start = time.perf_counter()
            call()
            times[call].append(time.perf_counter() - start)
        order.reverse()
        pairs += 1
    return median(times[ours]), median(times[theirs])


def _memory(case: Case) -> Outcome:
    """Growth of a fresh process by forward and backward of one head."""
    try:
        usage = measure("tilewise", case.queries, case.head_dim, "cpu")
    except RuntimeError as error:
        return Outcome(case, wrong=True, note=f"the process ended: {error}")
    if usage.peak_bytes is None:
        return Outcome(case, note="this system does not say how much memory a process took")
    grown = usage.peak_bytes / 1e6
    note = (
        f"the process grew by {grown:.0f} MB beyond its inputs, results included "
        f"(goal for n = 65,536: {MEMORY_GOAL_MB} MB)"
    )
    return Outcome(case, megabytes=grown, note=note)


class Unavailable(Exception):
    """A peer that does not run here; the message says why."""


def _sdpa(case: Case, backend: SDPBackend | None = None) -> Callable[..., Tensor]:
    """F.scaled_dot_product_attention as PyTorch chooses its backend, or by that one."""
    mask = None
    if isinstance(case.mask, int):
        distance = torch.arange(case.queries).unsqueeze(1) - torch.arange(case.keys)
        mask = (distance >= 0) & (distance < case.mask)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=case.mask == "causal", enable_gqa=case.heads != case.kv_heads
        )

    return attend if backend is None else sdpa_kernel(backend)(attend)


def _flex(case: Case) -> Callable[..., Tensor]:
    """FlexAttention, compiled before it is timed. It has no backward on a CPU."""

    def no_later_key(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j

    blocks = None
    if case.mask == "causal":
        blocks = create_block_mask(no_later_key, None, None, case.queries, case.keys, "cpu")
    zeros = (torch.zeros(shape, dtype=DTYPES[case.dtype]) for shape in case.shapes)
    try:
        attend = functools.partial(torch.compile(flex_attention, dynamic=False), block_mask=blocks)
        attend(*(t.transpose(1, 2).contiguous() for t in zeros))
    except Exception as error:  # whatever a compiler says
        raise Unavailable(f"torch.compile: {str(error).strip().splitlines()[0]}") from error
    return attend


PEERS: dict[str, Callable[[Case], Callable[..., Tensor]]] = {
    "SDPA": _sdpa,
    "SDPA flash": functools.partial(_sdpa, backend=SDPBackend.FLASH_ATTENTION),
    "SDPA math": functools.partial(_sdpa, backend=SDPBackend.MATH),
    "Flex": _flex,
}
