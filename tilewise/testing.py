"""How correctness is judged: cases, inputs, the closeness rule, probes. Users verify with it too.

gold is the reference in float64 on inputs already rounded to the dtype; peer is the reference with
scores, probabilities and results rounded to the dtype, as an implementation without tiles would have
them. With e(x) = |x − gold|, a result passes when

- float16, bfloat16: rms e ≤ 1.25 · rms e(peer) + ¼ eps · rms gold, max e ≤ 2 · max e(peer) + 2 eps ·
  max |gold|; for gradients the factors are 1.5 and 3;
- float32: rms e ≤ 10 · rms e(peer) + eps · rms gold;
- float64: max e ≤ 1e-12 · max |gold|;
- lse: |e| ≤ 2e-4 + 1e-6 |lse| (float64: 1e-12), and −inf in the same places.

A scale wrong by one per cent passes the usual "twice the largest error" in a third of cases; the rms
rule catches it in all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise import api
from tilewise.backends import reference
from tilewise.results import SCORE_NAMES, accumulation_dtype
from tilewise.spec import Problem

# The names of what comes out, forward and backward.
OUTPUTS = ("out", "lse")
OPERANDS = ("q", "k", "v", "bias", "alibi_slopes", "sinks")


class Case(NamedTuple):
    """A small call that hurts somewhere. `options` makes the keyword arguments from a `Maker`."""

    name: str
    options: Callable[[Maker], dict[str, Any]] = lambda make: {}
    batch: int = 2
    sq: int = 65
    sk: int = 83
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    value_dim: int = 32
    layout: str = "dense"
    lengths: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        return self.name


class Maker:
    """Makes a case's tensors from a seed: random in float32 on the CPU, then rounded and moved."""

    def __init__(
        self, case: Case, dtype: torch.dtype, device: str | torch.device, seed: int
    ) -> None:
        self.case, self.dtype, self.device = case, dtype, device
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator).to(self.device, self.dtype)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self._generator).to(self.device)

    def booleans(self, p: float, *shape: int) -> Tensor:
        return (torch.rand(shape, generator=self._generator) < p).to(self.device)


class Call(NamedTuple):
    """A public function with its arguments: a case made concrete."""

    function: Callable[..., Any]
    arguments: dict[str, Any]

    def problem(self, cast: Callable[[Tensor], Tensor] = lambda t: t) -> Problem:
        """The Problem that the call poses, its floating tensors cast."""
        arguments = {
            name: cast(t) if isinstance(t, Tensor) and t.is_floating_point() else t
            for name, t in self.arguments.items()
        }
        for name in ("k", "v"):
            if f"{name}_pages" in arguments:
                arguments[name] = arguments.pop(f"{name}_pages")
        return api.problem_of(**arguments)


def _varlen_bias(make: Maker) -> dict[str, Any]:
    case = make.case
    total, longest = sum(n for n, _ in case.lengths), max(n for _, n in case.lengths)
    return {"bias": make.normal(case.heads, total, longest), "causal": True}


def _documents(make: Maker) -> dict[str, Any]:
    """Rows that see their own document; some rows see nothing."""
    start = make.integers(0, make.case.sk, make.case.batch, make.case.sq)
    end = start + make.integers(-3, 20, make.case.batch, make.case.sq)
    return {"key_range": (start, end.int())}


def _padding(make: Maker) -> dict[str, Any]:
    """Keys past each batch entry's length are hidden by a range that broadcasts over rows."""
    end = make.integers(1, make.case.sk, make.case.batch, 1)
    return {"key_range": (torch.zeros_like(end), end)}


def _everything(make: Maker) -> dict[str, Any]:
    c = make.case
    return {
        "causal": True,
        "window_size": (37, None),
        "mask": make.booleans(0.8, c.batch, 1, c.sq, c.sk),
        "bias": make.normal(1, c.heads, 1, c.sk),
        "alibi_slopes": make.normal(c.batch, c.heads).abs(),
        "softcap": 3.0,
        "sinks": make.normal(c.heads),
        "dropout_p": 0.2,
        "dropout_seed": 11,
        "scale": 0.3,
    }


_RAGGED = ((5, 9), (0, 7), (64, 65), (3, 0), (1, 1), (70, 33))

CASES: tuple[Case, ...] = (
    Case("plain"),
    Case("one", batch=1, sq=1, sk=1, heads=1, kv_heads=1),
    Case("long", batch=1, sq=300, sk=277, heads=2, kv_heads=1),
    Case("decode", sq=1, sk=200, heads=8),
    Case("multi-query", kv_heads=1, heads=5),
    Case("multi-head", kv_heads=4),
    Case("head dim 1", head_dim=1, value_dim=1),
    Case("head dim 80, value dim 40", head_dim=80, value_dim=40),
    Case("head dim 17, value dim 96", head_dim=17, value_dim=96),
    Case("head dim 256", head_dim=256, value_dim=256, sq=33),
    Case("no keys", sk=0),
    Case("no queries", sq=0),
    Case("causal", lambda make: {"causal": True}),
    Case("causal, top-left", lambda make: {"causal": True, "align": "top-left"}),
    Case("causal, more queries than keys", lambda make: {"causal": True}, sq=100, sk=40),
    Case("window", lambda make: {"window_size": (10, 3)}),
    Case("window of nothing but itself", lambda make: {"window_size": (0, 0)}),
    Case("causal window", lambda make: {"window_size": (16, None), "causal": True}),
    Case("window, top-left", lambda make: {"window_size": (5, 70), "align": "top-left"}),
    Case("documents", _documents),
    Case("padding", _padding),
    Case("padding, causal", lambda make: {**_padding(make), "causal": True}),
    Case(
        "mask of queries and keys",
        lambda make: {"mask": make.booleans(0.4, 1, 1, make.case.sq, make.case.sk)},
    ),
    Case(
        "mask of heads, sparse",
        lambda make: {"mask": make.booleans(0.02, 2, 4, make.case.sq, make.case.sk)},
    ),
    Case("mask of keys", lambda make: {"mask": make.booleans(0.5, 2, 1, 1, make.case.sk)}),
    Case("bias, full", lambda make: {"bias": make.normal(2, 4, make.case.sq, make.case.sk)}),
    Case("bias of heads", lambda make: {"bias": make.normal(4, make.case.sq, make.case.sk)}),
    Case("bias of keys", lambda make: {"bias": make.normal(2, 1, 1, make.case.sk)}),
    Case("bias of queries", lambda make: {"bias": make.normal(make.case.sq, 1)}),
    Case(
        "bias with −inf",
        lambda make: {
            "bias": make.normal(4, make.case.sq, make.case.sk).masked_fill(
                make.booleans(0.3, 1, make.case.sq, make.case.sk), float("-inf")
            ),
            "causal": True,
        },
    ),
    Case("alibi", lambda make: {"alibi_slopes": make.normal(4).abs(), "causal": True}),
    Case("alibi of batch and heads", lambda make: {"alibi_slopes": make.normal(2, 4).abs()}),
    Case("softcap", lambda make: {"softcap": 0.5}),
    Case("softcap, causal", lambda make: {"softcap": 5.0, "causal": True, "scale": 2.0}),
    Case("sinks", lambda make: {"sinks": make.normal(4)}),
    Case(
        "sinks, rows without a key",
        lambda make: {"sinks": 3 * make.normal(4), "causal": True},
        sq=90,
        sk=33,
    ),
    Case("dropout", lambda make: {"dropout_p": 0.3, "dropout_seed": 5}),
    Case("dropout, causal", lambda make: {"dropout_p": 0.1, "dropout_seed": 6, "causal": True}),
    Case("scale, negative", lambda make: {"scale": -0.4}),
    Case("scale, zero", lambda make: {"scale": 0.0, "causal": True}),
    Case("everything", _everything),
    Case("packed", layout="packed", lengths=_RAGGED),
    Case("packed, causal", lambda make: {"causal": True}, layout="packed", lengths=_RAGGED),
    Case(
        "packed, window",
        lambda make: {"window_size": (7, 2), "align": "top-left"},
        layout="packed",
        lengths=_RAGGED,
    ),
    Case("packed, bias", _varlen_bias, layout="packed", lengths=_RAGGED),
    Case(
        "packed, alibi, sinks, softcap, dropout",
        lambda make: {
            "alibi_slopes": make.normal(len(_RAGGED), make.case.heads).abs(),
            "sinks": make.normal(make.case.heads),
            "softcap": 2.0,
            "dropout_p": 0.2,
            "dropout_seed": 3,
        },
        layout="packed",
        lengths=_RAGGED,
    ),
    Case("paged", layout="paged", sq=3, sk=50),
    Case("paged, causal", lambda make: {"causal": True}, layout="paged", sq=3, sk=50),
    Case(
        "paged, window and sinks",
        lambda make: {"causal": True, "window_size": (7, 0), "sinks": make.normal(4)},
        layout="paged",
        sq=1,
        sk=50,
    ),
)


def make_call(
    case: Case,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    seed: int = 0,
) -> Call:
    """The case as a call, its tensors rounded to dtype; k is a view of a (B, H, S, D) tensor."""
    make = Maker(case, dtype, device, seed)
    c = case
    if c.layout == "packed":
        queries, keys = (sum(n[i] for n in c.lengths) for i in (0, 1))
        cu_q, cu_k = (
            torch.tensor([0, *(n[i] for n in c.lengths)], device=device).cumsum(0) for i in (0, 1)
        )
        # Three tokens more than there are in sequences: they belong to none.
        arguments = {
            "q": make.normal(queries + 3, c.heads, c.head_dim),
            "k": make.normal(keys + 3, c.kv_heads, c.head_dim),
            "v": make.normal(keys + 3, c.kv_heads, c.value_dim),
            "cu_seqlens_q": cu_q.int(),
            "cu_seqlens_k": cu_k.int(),
        }
        if "bias" in (options := c.options(make)):
            options["bias"] = torch.nn.functional.pad(options["bias"], (0, 0, 0, 3))
        return Call(api.attention_varlen, {**arguments, **options})
    if c.layout == "paged":
        page_size, per_entry = 8, -(-c.sk // 8)
        table = torch.randperm(c.batch * per_entry, generator=torch.Generator().manual_seed(seed))
        used = torch.tensor([c.sk - 11 * entry for entry in range(c.batch)], device=device)
        pages = (c.batch * per_entry, page_size, c.kv_heads)
        arguments = {
            "q": make.normal(c.batch, c.sq, c.heads, c.head_dim),
            "k_pages": make.normal(*pages, c.head_dim),
            "v_pages": make.normal(*pages, c.value_dim),
            "page_table": table.view(c.batch, per_entry).int().to(device),
            "seqused_k": used.int(),
        }
        return Call(api.attention_paged, {**arguments, **c.options(make)})
    arguments = {
        "q": make.normal(c.batch, c.sq, c.heads, c.head_dim),
        "k": make.normal(c.batch, c.kv_heads, c.sk, c.head_dim).transpose(1, 2),
        "v": make.normal(c.batch, c.sk, c.kv_heads, c.value_dim),
    }
    return Call(api.attention, {**arguments, **c.options(make)})


def evaluate(
    call: Call, backend: str | None = None, seed: int = 1, dlse: bool = True
) -> dict[str, Tensor]:
    """out and lse of the public function, and the gradients of its operands (paged: none).

    The loss is Σ out · dout + Σ lse · dlse with random dout and dlse, over rows that see a key; the
    second sum only with `dlse`.
    """
    paged = "page_table" in call.arguments
    arguments = {
        name: t.detach().requires_grad_() if name in OPERANDS and not paged else t
        for name, t in call.arguments.items()
    }
    out, lse = call.function(**arguments, return_lse=True, backend=backend)
    results = {"out": out.detach(), "lse": lse.detach()}
    if not paged:
        operands = [name for name in OPERANDS if name in arguments]
        of_out, of_lse = _cotangents(out, lse, seed)
        loss = (out * of_out).sum()
        if dlse:
            loss = loss + (lse.masked_fill(lse == float("-inf"), 0) * of_lse).sum()
        grads = torch.autograd.grad(loss, [arguments[name] for name in operands])
        results |= {f"d{name}": g for name, g in zip(operands, grads, strict=True)}
    return results


def expect(
    call: Call, seed: int = 1, dlse: bool = True
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """gold and peer of `evaluate`."""
    dtype = call.problem().q.dtype

    def rounded(t: Tensor) -> Tensor:
        return t.to(dtype).to(t.dtype)

    gold = _by_formula(call.problem(lambda t: t.double()), dtype, lambda t: t, seed, dlse)
    peer = _by_formula(call.problem(), dtype, rounded, seed, dlse)
    return gold, peer


def _by_formula(
    problem: Problem,
    dtype: torch.dtype,
    rounded: Callable[[Tensor], Tensor],
    seed: int,
    dlse: bool,
) -> dict[str, Tensor]:
    arithmetic = accumulation_dtype(problem.q.dtype)
    result = reference.forward(problem, arithmetic, rounded)
    out, lse, _ = result
    results = {"out": out, "lse": lse}
    if problem.paged is not None:
        return results
    dout, of_lse = _cotangents(out.to(dtype), lse, seed)
    of_lse = of_lse.masked_fill(lse == float("-inf"), 0)
    dout, loss_of_lse = dout.to(out.dtype), of_lse if dlse else None
    g = reference.backward(problem, result, dout, loss_of_lse, SCORE_NAMES, arithmetic, rounded)
    grads = dict(
        zip(OPERANDS, (*g[:3], g.scores.bias, g.scores.alibi_slopes, g.scores.sinks), strict=True)
    )
    shapes = {name: t for name, t in grads.items() if t is not None}
    return results | {f"d{name}": t for name, t in shapes.items()}


def _cotangents(out: Tensor, lse: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    dout = torch.randn(out.shape, generator=generator).to(out.device, out.dtype)
    dlse = torch.randn(lse.shape, generator=generator).to(lse.device, lse.dtype)
    return dout, dlse


class Verdict(NamedTuple):
    """One result judged: its error and what was allowed, by rms and by maximum."""

    name: str
    passed: bool
    rms: float
    rms_allowed: float
    largest: float
    largest_allowed: float

    def __str__(self) -> str:
        parts = [f"{self.name}: {'ok' if self.passed else 'WRONG'}"]
        pairs = (
            ("rms", self.rms, self.rms_allowed),
            ("max", self.largest, self.largest_allowed),
        )
        for what, error, allowed in pairs:
            bound = f" of {allowed:.2e}" if math.isfinite(allowed) else ""
            parts.append(f"{what} {error:.2e}{bound}")
        return ", ".join(parts)


def judge(name: str, actual: Tensor, gold: Tensor, peer: Tensor, dtype: torch.dtype) -> Verdict:
    """The closeness rule for one result; shapes must agree, and NaN, Inf stand in the same places."""
    gold = gold.reshape(actual.shape).double()
    peer = peer.reshape(actual.shape).double()
    finite = gold.isfinite()
    same = torch.equal(
        actual.double().masked_fill(finite, 0).nan_to_num(nan=1.5),
        gold.masked_fill(finite, 0).nan_to_num(nan=1.5),
    )
    zero = torch.zeros((), dtype=torch.float64, device=gold.device)
    error, peer_error, size = (
        torch.where(finite, t, zero).abs() for t in (actual.double() - gold, peer - gold, gold)
    )
    rms, largest = _rms(error), _largest(error)
    rms_allowed, largest_allowed = _allowed(name, size, peer_error, dtype)
    passed = same and rms <= rms_allowed and largest <= largest_allowed
    return Verdict(name, bool(passed), rms, rms_allowed, largest, largest_allowed)


def _allowed(name: str, size: Tensor, peer: Tensor, dtype: torch.dtype) -> tuple[float, float]:
    eps = torch.finfo(dtype).eps
    if dtype == torch.float64:
        return float("inf"), 1e-12 * max(1.0, _largest(size))
    if name == "lse":
        return float("inf"), 2e-4 + 1e-6 * _largest(size)
    if dtype == torch.float32:
        return 10 * _rms(peer) + eps * _rms(size), float("inf")
    rms, largest = (1.5, 3.0) if name.startswith("d") else (1.25, 2.0)
    return (
        rms * _rms(peer) + 0.25 * eps * _rms(size),
        largest * _largest(peer) + 2 * eps * _largest(size),
    )


def _rms(t: Tensor) -> float:
    return float(t.square().mean().sqrt()) if t.numel() else 0.0


def _largest(t: Tensor) -> float:
    return float(t.max()) if t.numel() else 0.0


def verify(
    case: Case,
    backend: str | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    seed: int = 0,
) -> list[Verdict]:
    """A case through the public function, forward and backward, judged against the reference.

    Example:
        >>> from tilewise.testing import CASES, verify
        >>> all(verdict.passed for verdict in verify(CASES[0]))
        True
    """
    call = make_call(case, dtype, device, seed)
    results = evaluate(call, backend)
    gold, peer = expect(call)
    return [judge(name, t, gold[name], peer[name], dtype) for name, t in results.items()]


def mask_probe(
    sq: int,
    sk: int,
    width: int = 16,
    backend: str | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Counts of visible keys by j mod width, as computed and as they should be: (1, Sq, 1, width).

    With q = 0 and v = one_hot(j mod width), out × (number of visible keys) is an exact count: every
    off-by-one of a mask shows, which random data hides.
    """
    q = torch.zeros(1, sq, 1, width, dtype=dtype, device=device)
    k = torch.ones(1, sk, 1, width, dtype=dtype, device=device)
    one_hot = torch.eye(width, dtype=dtype, device=device)[torch.arange(sk, device=device) % width]
    v = one_hot.view(1, sk, 1, width)
    problem = api.problem_of(q, k, v, **options)
    lo, hi = problem.interval(0, sq)
    keys = torch.arange(sk, device=device)
    seen = (keys >= lo.unsqueeze(-1)) & (keys < hi.unsqueeze(-1))
    if problem.scores.mask is not None:
        seen = seen & problem.scores.mask[:, 0]
    counts = (seen.double() @ one_hot.double()).unsqueeze(2)
    out = api.attention(q, k, v, backend=backend, **options)
    return out.double() * counts.sum(-1, keepdim=True), counts


def ramp_call(sq: int, sk: int, dtype: torch.dtype, device: str | torch.device = "cpu") -> Call:
    """Logits that grow along the keys, so that every tile re-bases what came before."""
    make = Maker(Case("ramp"), dtype, device, 7)
    q = torch.ones(1, sq, 2, 8, device=device, dtype=dtype)
    heights = torch.linspace(-12, 12, sk, device=device).to(dtype)
    k = heights.view(1, sk, 1, 1).expand(1, sk, 2, 8) + 0.01 * make.normal(1, sk, 2, 8)
    return Call(api.attention, {"q": q, "k": k, "v": make.normal(1, sk, 2, 8)})


def steep_calls(sq: int, sk: int, device: str | torch.device = "cpu") -> dict[str, Call]:
    """Calls in float32 whose logits grow to about 700 along the keys and are exact; lse, which is rounded by
    3e-5 at that size, is not."""
    make = Maker(Case("steep"), torch.float32, device, 7)

    def eighths(*shape: int) -> Tensor:
        return make.integers(-8, 9, *shape) / 8

    x = {"q": eighths(sq, 2, 16), "k": eighths(sk, 1, 16), "v": make.normal(sk, 1, 16)}
    x["q"][..., 0] = 32
    x["k"][..., 0] = (700 - torch.arange(sk, device=device).flip(0).view(sk, 1) / 8) / 32
    dense = {name: t.unsqueeze(0) for name, t in x.items()}
    ends = {
        f"cu_seqlens_{name}": torch.tensor([0, n // 4, n]) for name, n in (("q", sq), ("k", sk))
    }
    packed = {**x, **{name: t.to(device, torch.int32) for name, t in ends.items()}}
    calls = {}
    for function, operands, columns in (
        (api.attention, dense, sk),
        (api.attention_varlen, packed, sk - sk // 4),
    ):
        options: dict[str, dict[str, Any]] = {
            "plain": {},
            "causal": {"causal": True},
            "sinks": {"sinks": torch.tensor([696.5, 703.25], device=device), "causal": True},
            "slopes": {"alibi_slopes": torch.tensor([0.25, 0.0625], device=device)},
            "bias of pairs": {"bias": eighths(2, sq, columns)},
            "bias of all heads": {"bias": eighths(1, sq, columns)},
            "bias of queries": {"bias": eighths(1, sq, 1)},
            "bias of keys": {"bias": eighths(1, 1, columns)},
        }
        for name, given in options.items():
            layout = "dense" if function is api.attention else "packed"
            arguments = {**operands, **given, "scale": 1.0}
            calls[f"steep, {layout}, {name}"] = Call(function, arguments)
    return calls


def failures(
    backend: str | None, dtype: torch.dtype, device: str | torch.device = "cpu"
) -> Iterator[tuple[Case, list[Verdict]]]:
    """Every case with a result that the rule refuses."""
    for case in CASES:
        wrong = [v for v in verify(case, backend, dtype, device) if not v.passed]
        if wrong:
            yield case, wrong
