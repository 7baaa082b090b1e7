"""The Hopper backend on a GPU: is it right, and how fast is it beside FlashAttention-3 and cuDNN.

    python benchmarks/hopper_check.py [--parts compile,plain,gradients,odd,speed,backward,…] [--out FOLDER]

Parts run in processes of their own (checking.py): first `compile`, which fills Triton's cache by all
processors with what the parts beside it need, and needs no GPU; then the checks side by side; then what is
timed, one after the other. FlashAttention-3 is timed where the folder peers-fa3 holds it (fa3.so.xz,
libcudart.so.12). The log and a row of each check go to hopper-check.log and .csv in the folder (default: $OUT
or the current one), speeds to hopper_speed.json and hopper_backward.json; speeds and what is wrong are
printed. `variants` times other plans than the chosen ones.

`sanitize` and `sanitize-gradients` have one small case of each kind of kernel, to be run by themselves:

    compute-sanitizer --tool racecheck --kernel-name kns=forward_kernel --kernel-name kns=backward_kernel \\
        --kernel-name kns=wide_ --kernel-name kns=queries_kernel --kernel-name kns=schedule_kernel \\
        --kernel-name kns=ranges_kernel \\
        python benchmarks/hopper_check.py --inside sanitize
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from checking import PATIENCE, Check, Run, bits, run_part, say, short, watched
from torch import Tensor

import tilewise
from tilewise import testing
from tilewise.backends import hidden, hopper, reference, triton
from tilewise.cli.gpu_cases import USUAL
from tilewise.kernels import twins
from tilewise.results import accumulation_dtype
from tilewise.spec import Problem
from tilewise.testing import CASES, Call, Case, Maker, make_call
from tilewise.tuning import timing
from tilewise.tuning.search import poisoned
from tilewise.tuning.workers import start_worker

CHECKS = (
    *("plain", "features", "shapes", "packed"),
    *("gradients", "reach", "ranges", "deterministic", "probes", "odd"),
)
SANITIZED = ("sanitize", "sanitize-gradients")
OF_GRADIENTS = ("gradients", "reach", "ranges", "deterministic", "sanitize-gradients")
# Of the checks together, and of what is timed.
MOST_SECONDS = 600.0
# A case of `sanitize` may run in compute-sanitizer.
SANITIZED_PATIENCE = 1200.0
HALF = (torch.bfloat16, torch.float16)
# Few long sequences and many short ones, as in tilewise bench.
PACKED_LENGTHS = USUAL.packed


# ------------------------------------------------------------------ cases


def served(case: Case, dtype: torch.dtype) -> bool:
    """Whether the backend would serve a case on a GPU of its kind."""
    problem = make_call(case, dtype).problem()
    return not set(hopper.unsupported(problem)) - set(hopper._wrong_machine(problem.q.device))


def dense(name: str, options: Any = None, **shape: Any) -> Case:
    """A case, its value dim that of the others and its keys as many as its queries unless given."""
    shape.setdefault("value_dim", shape.setdefault("head_dim", 128))
    shape.setdefault("sk", shape.setdefault("sq", 512))
    return Case(name, options or (lambda make: {}), **shape)


def packed(name: str, options: Any, d: int, lengths: tuple[tuple[int, int], ...]) -> Case:
    """A case of packed sequences, so many of queries and of keys."""
    return dense(name, options, head_dim=d, layout="packed", lengths=lengths)


def causal(make: Maker) -> dict[str, Any]:
    return {"causal": True}


def documents(make: Maker) -> dict[str, Any]:
    """Rows that see the keys of their own document, of 150 keys."""
    start = torch.arange(make.case.sq, device=make.device) // 150 * 150
    return {"key_range": (start[None], start[None] + 150)}


def any_ranges(make: Maker) -> dict[str, Any]:
    c = make.case
    start = make.integers(-100, c.sk, c.batch, c.sq)
    return {"key_range": (start, start + make.integers(-50, c.sk, c.batch, c.sq))}


def repeatable(
    options: Callable[[Maker], dict[str, Any]] | None,
) -> Callable[[Maker], dict[str, Any]]:
    """The same options, and deterministic."""
    return lambda make: {**(options(make) if options else {}), "deterministic": True}


def sanitized_cases() -> Iterator[Case]:
    """One small case of each kind of kernel, for compute-sanitizer."""
    small = {"batch": 1, "heads": 2, "kv_heads": 1, "sq": 300}
    yield dense("causal", causal, **small)
    yield dense("three consumers", None, **{**small, "sq": 1100}, head_dim=64)
    yield dense("window, D256", lambda make: {"window_size": (70, 20)}, **small, head_dim=256)
    yield dense("ranges", any_ranges, **small)
    yield dense("D96, sinks and all", features()["all"], **small, head_dim=96)
    yield dense("few rows", causal, batch=17, sq=5, sk=150, heads=8, kv_heads=2)
    lengths = ((100, 100), (0, 7), (3, 0), (130, 257))
    for name, options in (("packed", None), ("packed, causal", causal)):
        yield dense(name, options, **small, layout="packed", lengths=lengths)


def plain_cases() -> Iterator[Case]:
    for d in (128, 64, 256):
        for options, mask in ((None, "full"), (causal, "causal")):
            yield dense(f"D{d} {mask} 512", options, head_dim=d)
            yield dense(f"D{d} {mask} 2048", options, head_dim=d, sq=2048, batch=1)
            yield dense(
                f"D{d} {mask} 4100, one head",
                options,
                head_dim=d,
                sq=4100,
                batch=1,
                heads=1,
                kv_heads=1,
            )
    yield from (case for case in CASES if case.layout == "dense")


def features() -> dict[str, Callable[[Maker], dict[str, Any]]]:
    return {
        "window 100, 20": lambda make: {"window_size": (100, 20)},
        "window 300, causal": lambda make: {"window_size": (300, None), "causal": True},
        "window 0, 0": lambda make: {"window_size": (0, 0)},
        "window None, 200": lambda make: {"window_size": (None, 200)},
        "top-left": lambda make: {"causal": True, "align": "top-left"},
        "softcap": lambda make: {"softcap": 2.0, "causal": True},
        "alibi": lambda make: {"alibi_slopes": make.normal(make.case.heads).abs(), "causal": True},
        "alibi of batch": lambda make: {
            "alibi_slopes": make.normal(make.case.batch, make.case.heads).abs()
        },
        "sinks": lambda make: {"sinks": make.normal(make.case.heads), "causal": True},
        "scale 3": lambda make: {"scale": 3.0},
        "scale -0.2": lambda make: {"scale": -0.2, "causal": True},
        "documents": documents,
        "documents, causal": lambda make: {**documents(make), "causal": True},
        "any ranges": any_ranges,
        "few": lambda make: {**any_ranges(make), "sinks": make.normal(make.case.heads)},
        "all": lambda make: {
            "causal": True,
            "window_size": (190, None),
            "key_range": any_ranges(make)["key_range"],
            "alibi_slopes": make.normal(make.case.heads).abs(),
            "softcap": 4.0,
            "sinks": make.normal(make.case.heads),
            "scale": 0.3,
        },
    }


def feature_cases() -> Iterator[Case]:
    for d in (128, 64, 256):
        for name, options in features().items():
            yield dense(f"{name}, D{d}", options, head_dim=d, sq=777, sk=1033)


def shape_cases() -> Iterator[Case]:
    for s in (1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 257, 384, 500, 1000, 1100):
        for d in (128, 64):
            yield dense(f"S {s}, D{d}", None, sq=s, head_dim=d)
            yield dense(f"S {s}, D{d}, causal", causal, sq=s, head_dim=d)
    for d, dv in (
        (96, 96),
        (192, 192),
        (192, 128),
        (64, 256),
        (256, 64),
        (40, 80),
        (8, 8),
        (72, 200),
        (128, 64),
    ):
        yield dense(f"D {d}, Dv {dv}", None, sq=300, head_dim=d, value_dim=dv)
        yield dense(f"D {d}, Dv {dv}, causal", causal, sq=300, sk=411, head_dim=d, value_dim=dv)
    for sq, sk in ((1, 1000), (1000, 1), (3, 129), (200, 70), (70, 200), (130, 1025)):
        yield dense(f"Sq {sq}, Sk {sk}", None, sq=sq, sk=sk)
        yield dense(f"Sq {sq}, Sk {sk}, causal", causal, sq=sq, sk=sk)
    for heads, kv_heads in ((8, 1), (6, 2), (5, 5), (32, 8)):
        yield dense(f"heads {heads}/{kv_heads}", causal, sq=321, heads=heads, kv_heads=kv_heads)
    few = {"batch": 70, "sk": 700, "heads": 8, "kv_heads": 2}
    for sq in (1, 7, 20, 30):
        yield dense(f"few rows, {sq}", causal, sq=sq, **few)
        yield dense(f"few rows, {sq}, window", lambda make: {"window_size": (50, 3)}, sq=sq, **few)
        yield dense(f"few rows, {sq}, all", features()["few"], sq=sq, **few, head_dim=64)
    yield dense("few rows, 64 heads", causal, sq=3, sk=300, batch=9, heads=64, kv_heads=1)
    yield dense("few rows, D256", causal, sq=9, **few, head_dim=256)
    yield dense("many heads", causal, sq=140, batch=50, heads=40, kv_heads=8, head_dim=64)


def equal(*lengths: int) -> tuple[tuple[int, int], ...]:
    return tuple((n, n) for n in lengths)


MIXED = equal(700, 1, 0, 128, 129, 1100, 64, 63, 0, 2)
EQUAL_KINDS = (MIXED, equal(*range(0, 90, 7)), equal(0, 5))
# Of queries and of keys.
PACKED_KINDS: dict[str, tuple[tuple[int, int], ...]] = {
    "mixed": MIXED,
    "crossed": ((5, 300), (0, 70), (400, 130), (33, 0), (128, 128), (1, 1), (257, 512)),
    "ramp": tuple((n, 300 - n) for n in range(0, 301, 20)),
    "many": tuple((n % 7, n % 5) for n in range(300)),
    "empty": ((0, 0), (0, 9), (4, 0)),
}


def packed_cases() -> Iterator[Case]:
    options: dict[str, Any] = {
        "": None,
        ", causal": causal,
        ", causal, top-left": lambda make: {"causal": True, "align": "top-left"},
        ", window": lambda make: {"window_size": (100, 20)},
        ", all": lambda make: {
            "causal": True,
            "window_size": (190, None),
            "alibi_slopes": make.normal(len(make.case.lengths), make.case.heads).abs(),
            "softcap": 4.0,
            "sinks": make.normal(make.case.heads),
        },
    }
    for kind, these in PACKED_KINDS.items():
        for name, given in options.items():
            for d in (128, 64, 256):
                yield packed(f"packed, {kind}{name}, D{d}", given, d, these)
    yield from (case for case in CASES if case.layout == "packed")


OF_SCORES = ("alibi", "alibi of batch", "sinks")


def gradient_cases() -> Iterator[Case]:
    """What the backward pass takes."""
    for d in (128, 64, 256):
        for options, mask in ((None, "full"), (causal, "causal")):
            for s in (1, 63, 64, 65, 127, 128, 129, 300, 512, 1100):
                yield dense(f"gradients, D{d}, S {s}, {mask}", options, head_dim=d, sq=s)
        for name in ("window 100, 20", "window 300, causal", "window 0, 0", "window None, 200"):
            given = features()[name]
            yield dense(f"gradients, D{d}, {name}", given, head_dim=d, sq=777, sk=1033)
            yield dense(f"gradients, D{d}, {name}, long", given, head_dim=d, sq=1033, sk=777)
        for name in ("top-left", "softcap", "scale 3", "scale -0.2", *OF_SCORES):
            yield dense(f"gradients, D{d}, {name}", features()[name], head_dim=d, sq=400, sk=555)
            yield dense(f"gradients, D{d}, {name}, long", features()[name], head_dim=d, sk=333)
        for heads, kv_heads in ((8, 1), (6, 2), (5, 5)):
            shape = {"sq": 321, "heads": heads, "kv_heads": kv_heads, "head_dim": d}
            yield dense(f"gradients, D{d}, heads {heads}/{kv_heads}", causal, **shape)
        for lengths in EQUAL_KINDS:
            for options, mask in (
                (None, "full"),
                (causal, "causal"),
                (features()["window 100, 20"], "window"),
            ):
                total = sum(n for n, _ in lengths)
                yield packed(f"gradients, packed {total}, D{d}, {mask}", options, d, lengths)
    # Enough of them for tiles of 256 keys.
    many = {"batch": 50, "heads": 8, "kv_heads": 4, "head_dim": 64}
    for options, mask in ((None, "full"), (causal, "causal"), (features()["top-left"], "top-left")):
        for sq, sk in ((1024, 1024), (777, 1280), (1500, 1024)):
            yield dense(f"gradients, many, {sq}×{sk}, {mask}", options, sq=sq, sk=sk, **many)
    wide = ((192, 192), (192, 128), (256, 64), (64, 256), (136, 200))
    for d, dv in ((40, 80), (96, 96), (128, 64), (64, 128), (8, 8), *wide):
        yield dense(f"gradients, D {d}, Dv {dv}", causal, sq=300, head_dim=d, value_dim=dv)


def reach_cases() -> Iterator[Case]:
    """What the backward pass has a way of its own for: gradients of slopes and sinks, and packed sequences
    of two lengths, of which some tokens see nothing or are seen by none."""
    plain: dict[str, Callable[[Maker], dict[str, Any]]] = {
        "": lambda make: {},
        ", causal": causal,
        ", window": features()["window 100, 20"],
    }
    for d in (128, 64, 256):
        for name, options in {**plain, ", softcap": features()["softcap"]}.items():
            given = with_sinks_of(options)
            for sq, sk in ((777, 1033), (1033, 777), (65, 65)):
                yield dense(f"D{d}, sinks{name}, {sq}×{sk}", given, head_dim=d, sq=sq, sk=sk)
        for heads, kv_heads in ((8, 1), (6, 2), (5, 5)):
            shape = {"sq": 321, "heads": heads, "kv_heads": kv_heads, "head_dim": d}
            yield dense(f"D{d}, sinks, {heads}/{kv_heads}", with_sinks_of(causal), **shape)
        ways = {
            **plain,
            ", top-left": features()["top-left"],
            ", sinks": with_sinks_of(causal),
            ", sinks, window": with_sinks_of(features()["window 300, causal"]),
            ", alibi": features()["alibi"],
        }
        if d <= 128:
            ways[", causal, deterministic"] = repeatable(causal)
        for name, options in ways.items():
            # Without sinks, those of equal lengths are among the other gradients.
            kinds = PACKED_KINDS.keys() - (() if "sinks" in name else {"mixed"})
            for kind in sorted(kinds):
                yield packed(f"D{d}, packed, {kind}{name}", options, d, PACKED_KINDS[kind])
    for d in (128, 64, 256):
        for name in ("alibi", "alibi of batch"):
            for sinks, given in (
                ("", features()[name]),
                (", sinks", with_sinks_of(features()[name])),
            ):
                yield dense(f"D{d}, {name}{sinks}", given, head_dim=d, sq=400, sk=555)
        yield packed(f"D{d}, packed, alibi of sequences", alibi_of_sequences, d, MIXED)
    for d, dv in ((40, 80), (192, 128)):
        yield dense(f"D {d}, Dv {dv}, sinks", with_sinks_of(causal), head_dim=d, value_dim=dv)


def alibi_of_sequences(make: Maker) -> dict[str, Any]:
    slopes = make.normal(len(make.case.lengths), make.case.heads).abs()
    return {"alibi_slopes": slopes, "causal": True}


def range_cases() -> Iterator[Case]:
    """Backward with a key_range."""
    names = ("documents", "documents, causal", "any ranges", "few", "all")
    for d in (128, 64, 256):
        for name in names:
            for ways, given in (
                ("", features()[name]),
                (", deterministic", repeatable(features()[name])),
            ):
                yield dense(f"D{d}, {name}{ways}", given, head_dim=d, sq=777, sk=1033)
        yield dense(
            f"D{d}, one row each", few_ranges, head_dim=d, sq=300, sk=200, heads=6, kv_heads=2
        )
        for sq, sk in ((1, 1), (64, 64), (65, 130), (1500, 70)):
            yield dense(f"D{d}, any ranges, {sq}×{sk}", any_ranges, head_dim=d, sq=sq, sk=sk)


def few_ranges(make: Maker) -> dict[str, Any]:
    """Of each batch entry one, as where keys are padded on both sides."""
    start = make.integers(0, 50, make.case.batch, 1)
    return {"key_range": (start, start + 100)}


def with_sinks_of(
    options: Callable[[Maker], dict[str, Any]],
) -> Callable[[Maker], dict[str, Any]]:
    """The same options, and sinks."""
    return lambda make: {**options(make), "sinks": make.normal(make.case.heads)}


def deterministic_cases() -> Iterator[Case]:
    """What has kernels of its own for that."""
    for d in (128, 64):
        yield from deterministic_cases_of(d)


def deterministic_cases_of(d: int) -> Iterator[Case]:
    few, name = {"head_dim": d, "heads": 12, "kv_heads": 2}, f"gradients, deterministic, D{d}"
    for options, mask in ((None, "full"), (causal, "causal")):
        yield dense(f"{name}, {mask}, 512", repeatable(options), head_dim=d)
    for kind, options in (
        ("full", None),
        ("causal", causal),
        *((kind, features()[kind]) for kind in ("top-left", "window 100, 20", "window None, 200")),
        ("window 20, None", lambda make: {"window_size": (20, None)}),
    ):
        given = repeatable(options)
        for sq, sk in ((65, 65), (300, 1100), (1100, 300), (1100, 1100)):
            yield dense(f"{name}, {kind}, {sq}×{sk}", given, head_dim=d, sq=sq, sk=sk)
        yield dense(f"{name}, {kind}, 12 heads of 2", given, sq=700, **few)
        for lengths in EQUAL_KINDS:
            total = sum(n for n, _ in lengths)
            yield packed(f"{name}, {kind}, packed {total}", given, d, lengths)
    for kind in ("softcap", "scale -0.2", *OF_SCORES):
        yield dense(f"{name}, {kind}", repeatable(features()[kind]), head_dim=d, sq=400, sk=555)
    for dv in (40, 64, 128):
        yield dense(f"{name}, Dv {dv}", repeatable(causal), sq=300, head_dim=d, value_dim=dv)


def sanitized_gradients() -> Iterator[Case]:
    small = {"batch": 1, "heads": 2, "kv_heads": 1, "sq": 200, "sk": 300}
    yield dense("gradients, causal", causal, **small)
    yield dense("gradients, window, D64", features()["window 100, 20"], **small, head_dim=64)
    yield dense("gradients, softcap, Dv 40", features()["softcap"], **small, value_dim=40)
    yield dense("gradients, causal, D256", causal, **small, head_dim=256)
    yield dense("gradients, deterministic", repeatable(causal), **small)
    lengths = equal(100, 0, 3, 130)
    for name, options in (("packed", causal), ("packed, deterministic", repeatable(causal))):
        yield dense(f"gradients, {name}", options, **small, layout="packed", lengths=lengths)
    lengths = ((100, 30), (0, 70), (33, 0), (130, 257))
    yield dense("gradients, packed, two lengths", causal, **small, layout="packed", lengths=lengths)
    yield dense("gradients, ranges, all", features()["all"], **small)
    yield dense("gradients, ranges, D64", any_ranges, **small, head_dim=64)
    yield dense("gradients, ranges, D256", repeatable(documents), **small, head_dim=256)


CASES_OF: dict[str, Callable[[], Iterator[Case]]] = {
    "packed": packed_cases,
    "sanitize": sanitized_cases,
    "plain": plain_cases,
    "features": feature_cases,
    "shapes": shape_cases,
    "gradients": gradient_cases,
    "reach": reach_cases,
    "ranges": range_cases,
    "deterministic": deterministic_cases,
    "sanitize-gradients": sanitized_gradients,
}


def served_cases(part: str) -> Iterator[tuple[Case, torch.dtype]]:
    """Both dtypes where they may differ, so not for every shape."""
    for case in CASES_OF[part]():
        for dtype in HALF if part in ("plain", "gradients") or "D128" in case.name else HALF[:1]:
            if served(case, dtype):
                yield case, dtype


def checks(part: str) -> Iterator[Check]:
    if part == "probes":
        yield from probes()
    elif part == "odd":
        yield from odd_checks()
    else:
        for case, dtype in served_cases(part):
            judge: Callable[[Case, torch.dtype], str] = case_judged
            if part in OF_GRADIENTS:
                judge = functools.partial(gradients_judged, wanted=scores_wanted(part))
            patience = SANITIZED_PATIENCE if part in SANITIZED else PATIENCE
            yield Check(f"{case}, {short(dtype)}", functools.partial(judge, case, dtype), patience)
    if part == "reach":
        yield Check("gradients beside NaN that lengths hide", gradients_beside_hidden_nan)
    if part == "ranges":
        yield Check("gradients beside NaN that ranges hide", gradients_beside_nan_out_of_range)
    if part == "deterministic":
        for cell in repeated_cells():
            yield Check(f"the same bits, {cell.name}", functools.partial(the_same_bits, cell))


# ------------------------------------------------------------------ judging


def run(call: Call) -> tuple[Tensor, Tensor]:
    with torch.no_grad(), poisoned():
        return call.function(**call.arguments, return_lse=True, backend="hopper")


def judged(call: Call, dtype: torch.dtype) -> str:
    """What is wrong with out and lse, by the closeness rule; also whether a rerun gives the same bits."""
    out, lse = run(call)
    again = run(call)
    torch.cuda.synchronize()
    gold = reference.forward(call.problem(lambda t: t.double()))
    peer = reference.forward(
        call.problem(), accumulation_dtype(dtype), lambda t: t.to(dtype).to(t.dtype)
    )
    verdicts = [
        testing.judge("out", out, gold.out, peer.out, dtype),
        testing.judge("lse", lse, gold.lse, peer.lse, dtype),
    ]
    wrong = [str(v) for v in verdicts if not v.passed]
    if not all(torch.equal(bits(a), bits(b)) for a, b in zip((out, lse), again, strict=True)):
        wrong.append("a rerun gave other bits")
    return "; ".join(wrong)


def case_judged(case: Case, dtype: torch.dtype) -> str:
    return judged(make_call(case, dtype, "cuda"), dtype)


def scores_wanted(part: str) -> tuple[str, ...]:
    """The scores that a part wants the gradients of, which have a kernel of its own."""
    of_scores = part in ("reach", "ranges", "sanitize-gradients")
    return ("alibi_slopes", "sinks") if of_scores else ()


def gradients_judged(case: Case, dtype: torch.dtype, wanted: tuple[str, ...]) -> str:
    """What is wrong with a case, forward and backward, in memory that is full of NaN. `wanted`: the scores
    whose gradients are, too."""
    call = gradient_call(case, dtype, "cuda")
    if hopper._backward_unsupported(call.problem()):
        return "left to the Triton backend"
    with poisoned():
        results = testing.evaluate(with_fixed_scores(call, wanted), "hopper")
    gold, peer = testing.expect(make_call(case, dtype, "cuda"))
    verdicts = (
        testing.judge(name, t, gold[name], peer[name], dtype) for name, t in results.items()
    )
    return "; ".join(str(v) for v in verdicts if not v.passed)


def with_fixed_scores(call: Call, wanted: tuple[str, ...]) -> Call:
    """A call whose slopes and sinks have no gradient but where it is wanted."""
    arguments = dict(call.arguments)
    names = {"alibi_slopes", "sinks"} & arguments.keys() - set(wanted)
    fixed = {name: arguments.pop(name) for name in sorted(names)}
    return Call(functools.partial(call.function, **fixed), arguments) if fixed else call


def gradient_call(case: Case, dtype: torch.dtype, device: str = "cpu") -> Call:
    """A case's call; of packed sequences with one tensor of lengths for q and k, where these are equal."""
    call = make_call(case, dtype, device)
    # Though poisoned memory is had by asking for the opposite.
    call.arguments.setdefault("deterministic", False)
    if case.layout == "packed" and all(a == b for a, b in case.lengths):
        call.arguments["cu_seqlens_k"] = call.arguments["cu_seqlens_q"]
    return call


def probes() -> Iterator[Check]:
    windows = ((None, None), (0, 0), (3, 0), (5, 2), (None, 4), (100, None), (64, 64), (127, 1))
    for sq, sk in (
        (1, 1),
        (7, 19),
        (64, 64),
        (65, 130),
        (130, 65),
        (300, 300),
        (257, 900),
        (129, 128),
    ):
        for align in tilewise.spec.ALIGNMENTS:
            for window in windows:
                for flag in (False, True):
                    options = {"causal": flag, "window_size": window, "align": align}
                    yield Check(
                        f"probe {sq}×{sk} {align} {window} {flag}",
                        lambda a=(sq, sk), o=options: probe(*a, o),
                    )
    for dtype in HALF:
        for sq, sk in ((65, 700), (300, 3000)):
            call = lambda a=(sq, sk), t=dtype: judged(testing.ramp_call(*a, t, "cuda"), t)  # noqa: E731
            yield Check(f"ramp {sq}×{sk} {short(dtype)}", call)


def probe(sq: int, sk: int, options: dict[str, Any]) -> str:
    x = torch.zeros(1, sq, 1, 64, dtype=torch.bfloat16, device="cuda")
    y = torch.zeros(1, sk, 1, 64, dtype=torch.bfloat16, device="cuda")
    if tilewise.api.problem_of(x, y, y, **options) and hopper.unsupported(
        tilewise.api.problem_of(x, y, y, **options)
    ):
        return ""
    got, counts = testing.mask_probe(sq, sk, 64, "hopper", torch.bfloat16, "cuda", **options)
    return (
        ""
        if torch.equal(got.round(), counts)
        else f"{int((got.round() != counts).sum())} counts differ"
    )


# ------------------------------------------------------------------ what needs more than a case


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    with torch.no_grad():
        return tilewise.attention(q, k, v, backend="hopper", **options)


def same(a: Tensor, b: Tensor) -> str:
    return "" if torch.equal(bits(a), bits(b)) else "bits differ"


def odd_checks() -> Iterator[Check]:
    yield Check("chosen without being asked for", chosen)
    yield Check("strides of (B, H, S, D) and of slices", strided)
    yield Check("NaN in keys that no row sees", hidden_nan)
    yield Check("NaN in keys that a key_range hides", hidden_by_ranges)
    yield Check("packed like one by one, beside NaN", packed_beside_nan)
    yield Check("packed, strides of one tensor", packed_strides)
    yield Check("packed, replayed with other lengths", packed_replayed)
    yield Check("large logits", large_logits)
    yield Check("gradients, continued by Triton", gradients)
    yield Check("more than 65,535 heads", many_heads)
    yield Check("offsets beyond 2³¹", far_offsets)
    yield Check("replayed from a CUDA graph", graphed_twice)
    yield Check("two streams at a time", two_streams)
    yield Check("many launches in a row", many_launches)
    yield Check("torch.compile", compiled)
    yield Check("gradients of sums, and of tensors that lie anyhow", gradients_anyhow)
    yield Check("gradients beside NaN that no row sees", gradients_beside_nan)
    yield Check("gradients, more than 65,535 heads", gradients_of_many_heads)
    yield Check("gradients, offsets beyond 2³¹", gradients_far)
    yield Check("gradients, launches made again", gradients_again)
    yield Check("gradients, replayed from a CUDA graph", gradients_graphed)
    yield Check("keys shared by all samples of vmap", mapped)


def chosen() -> str:
    q = normal(4, 2000, 16, 128)
    choice = tilewise.explain(q, q, q, causal=True)
    return "" if choice.backend == "hopper" else str(choice)


def strided() -> str:
    wrong = []
    for flag in (False, True):
        base = [normal(2, 4, 333, 128).transpose(1, 2) for _ in range(3)]
        plain = attend(*(t.contiguous() for t in base), causal=flag)
        wrong.append(same(attend(*base, causal=flag), plain))
        packed = normal(2, 300, 3, 4, 128)
        q, k, v = packed.unbind(2)
        wrong.append(
            same(
                attend(q, k, v, causal=flag),
                attend(*(t.contiguous() for t in (q, k, v)), causal=flag),
            )
        )
        cache = normal(2, 1000, 4, 160)[:, 8:508, :, 16:144]
        wrong.append(
            same(
                attend(cache, cache, cache, causal=flag),
                attend(*[cache.contiguous()] * 3, causal=flag),
            )
        )
    return "; ".join(filter(None, wrong))


def hidden_nan() -> str:
    wrong = []
    for options, seen in (
        ({"causal": True, "align": "top-left"}, slice(0, 300)),
        ({"window_size": (50, 0)}, slice(350, 700)),
        ({"window_size": (20, 30), "align": "top-left"}, slice(0, 330)),
    ):
        q, k, v = normal(2, 300, 4, 128), normal(2, 700, 4, 128), normal(2, 700, 4, 128)
        clean = attend(q, k, v, **options)
        for t in (k, v):
            kept = t[:, seen].clone()
            t.fill_(float("nan"))
            t[:, seen] = kept
        wrong.append(same(attend(q, k, v, **options), clean))
    return "; ".join(filter(None, wrong))


def hidden_by_ranges() -> str:
    """Between documents that are seen lie others, of NaN."""
    wrong = []
    start = torch.arange(600, device="cuda") // 40 * 80
    ranges = (start[None], start[None] + 40)
    for options in ({}, {"causal": True}):
        q, k, v = normal(2, 600, 4, 128), normal(2, 1200, 4, 128), normal(2, 1200, 4, 128)
        clean = attend(q, k, v, key_range=ranges, **options)
        for t in (k, v):
            t.view(2, 15, 80, 4, 128)[:, :, 40:] = float("nan")
        wrong.append(same(attend(q, k, v, key_range=ranges, **options), clean))
    return "; ".join(filter(None, wrong))


def cumulative(
    lengths: Sequence[int], dtype: torch.dtype = torch.int32, device: str = "cuda"
) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], device=device, dtype=dtype)


def attend_packed(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, **options: Any) -> Tensor:
    with torch.no_grad():
        return tilewise.attention_varlen(q, k, v, cu, cu, backend="hopper", **options)


def packed_beside_nan() -> str:
    """Sequences on their own give the same; every other is NaN, and so are tokens past the last."""
    wrong = []
    lengths = (300, 17, 1000, 0, 64, 129, 513)
    cu = cumulative(lengths, torch.int64)
    bounds = cu.tolist()
    for options in ({}, {"causal": True}, {"window_size": (100, 7)}):
        q, k, v = (normal(bounds[-1] + 70, 4, 128) for _ in range(3))
        for i in range(1, len(lengths), 2):
            for t in (k, v):
                t[bounds[i] : bounds[i + 1]] = float("nan")
        for t in (q, k, v):
            t[bounds[-1] :] = float("nan")
        with poisoned():
            out = attend_packed(q, k, v, cu, **options)
        for i in range(0, len(lengths), 2):
            part = slice(bounds[i], bounds[i + 1])
            alone = attend(*(t[None, part].contiguous() for t in (q, k, v)), **options)
            off = (out[part].float() - alone[0].float()).norm() / alone.float().norm()
            if not off < 5e-3:
                wrong.append(f"{options}, sequence {i}: {off:.1e}")
        if out[bounds[-1] :].abs().max() != 0:
            wrong.append(f"{options}: tokens of no sequence are not 0")
    return "; ".join(wrong)


def packed_strides() -> str:
    cu = cumulative((100, 400, 30))
    q, k, v = normal(530, 3, 4, 128).unbind(1)
    plain = attend_packed(*(t.contiguous() for t in (q, k, v)), cu, causal=True)
    across = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (q, k, v)]
    return "; ".join(
        filter(
            None, (same(attend_packed(*ts, cu, causal=True), plain) for ts in ((q, k, v), across))
        )
    )


def packed_replayed() -> str:
    """Lengths are read on the device: a graph follows them."""
    q, k, v = (normal(2000, 8, 128) for _ in range(3))
    cu = cumulative((1000, 500, 500))
    replay, out = graphed(lambda: attend_packed(q, k, v, cu, causal=True))
    wrong = []
    for lengths in ((1000, 500, 500), (1, 1999, 0), (0, 100, 1200)):
        cu.copy_(cumulative(lengths))
        out.fill_(float("nan"))
        replay()
        torch.cuda.synchronize()
        wrong.append(same(out, attend_packed(q, k, v, cu, causal=True)))
    return "; ".join(filter(None, wrong))


def large_logits() -> str:
    """Right up to some 5e8; beyond, where a unit in the last place is worth more than an exponent holds,
    right or NaN."""
    wrong = []
    for size, scale in itertools.product((30.0, 1000.0, 1e6, 1e8, 1e9, 1e12), (None, 3.0)):
        call = make_call(
            dense("large", lambda make, s=scale: {"scale": s, "causal": True}),
            torch.bfloat16,
            "cuda",
        )
        call.arguments["q"] *= size
        if size * (scale or 0.1) < 1e8:
            wrong.append(judged(call, torch.bfloat16))
            continue
        got = attend(**call.arguments)
        want = reference.forward(call.problem(lambda t: t.double())).out
        off = (got - want).abs() > 0.05 * want.abs().max()
        if off.any():
            wrong.append(f"times {size:.0e}: {int(off.sum())} numbers wrong and not NaN")
    return "; ".join(filter(None, wrong))


def gradients() -> str:
    case = dense("gradients", causal, sq=200, sk=300, head_dim=256)
    wrong = [str(v) for v in testing.verify(case, "hopper", torch.bfloat16, "cuda") if not v.passed]
    return "; ".join(wrong)


def many_heads() -> str:
    q = normal(70001, 20, 1, 64)
    whole = attend(q, q, q, causal=True)
    return same(whole[-3:], attend(q[-3:], q[-3:], q[-3:], causal=True))


def far_offsets() -> str:
    q = normal(1, 1, 1, 128).expand(16500, 1024, 1, 128).contiguous()
    q += torch.arange(16500, device="cuda").view(-1, 1, 1, 1) % 7
    wrong = [
        same(attend(q, q, q, causal=f)[-2:], attend(q[-2:], q[-2:], q[-2:], causal=f))
        for f in (False, True)
    ]
    return "; ".join(filter(None, wrong))


def graphed_twice() -> str:
    q, k, v = (normal(2, 1000, 8, 128) for _ in range(3))
    wanted = attend(q, k, v, causal=True)
    replay, out = graphed(lambda: attend(q, k, v, causal=True))
    wrong = []
    for _ in range(3):
        out.fill_(float("nan"))
        replay()
        torch.cuda.synchronize()
        wrong.append(same(out, wanted))
    return "; ".join(filter(None, wrong))


def two_streams() -> str:
    q, k, v = (normal(4, 2048, 8, 128) for _ in range(3))
    wanted = attend(q, k, v, causal=True)
    torch.cuda.synchronize()
    outs = []
    for stream in (torch.cuda.Stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            outs += [attend(q, k, v, causal=True) for _ in range(20)]
    torch.cuda.synchronize()
    return "; ".join(filter(None, (same(out, wanted) for out in outs)))


def many_launches() -> str:
    wrong = []
    for s in (64, 100, 1000, 3000):
        q = normal(1, s, 4, 128)
        wanted = attend(q, q, q, causal=True)
        outs = [attend(q, q, q, causal=True) for _ in range(100)]
        wrong += [same(out, wanted) for out in outs]
    return "; ".join(sorted(set(filter(None, wrong))))


def compiled() -> str:
    q, k, v = (normal(4, 2000, 16, 128) for _ in range(3))
    f = torch.compile(lambda q, k, v: tilewise.attention(q, k, v, causal=True), fullgraph=True)
    with torch.no_grad():
        return same(f(q, k, v), attend(q, k, v, causal=True))


def gradients_of(*tensors: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """Of q, k and v, from those and dout."""
    *operands, dout = tensors
    leaves = [t.detach().requires_grad_() for t in operands]
    attend = tilewise.attention_varlen if "cu_seqlens_q" in options else tilewise.attention
    out = attend(*leaves, backend="hopper", **options)
    return torch.autograd.grad(out, leaves, dout)


def alike(got: Sequence[Tensor], want: Sequence[Tensor]) -> str:
    """What is wrong with gradients whose sums may be made in another order."""
    off = [distance(a, b) for a, b in zip(got, want, strict=True)]
    return "" if all(d < 5e-3 for d in off) else f"differences {off}"


def by_triton(*tensors: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """The gradients that Triton's kernels continue the same forward pass with."""
    *operands, dout = tensors
    problem = tilewise.api.problem_of(*operands, **options)
    result = hopper.forward(problem)
    return triton.backward(problem, result, dout, None, ())[:3]


def gradients_anyhow() -> str:
    wrong = []
    for d, flag in itertools.product((64, 128), (False, True)):
        q, k, v, dout = (normal(2, 333, 4, d) for _ in range(4))
        one = normal(1, 1, 1, 1)
        want = by_triton(q, k, v, one.expand(q.shape).contiguous(), causal=flag)
        wrong.append(alike(gradients_of(q, k, v, one.expand(q.shape), causal=flag), want))
        want = by_triton(q, k, v, dout, causal=flag)
        across = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v, dout)]
        wrong.append(alike(gradients_of(*across, causal=flag), want))
        columns = dout.transpose(2, 3).contiguous().transpose(2, 3)
        wrong.append(alike(gradients_of(q, k, v, columns, causal=flag), want))
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: t, lambda t: t.mT.contiguous().mT if t.ndim == 4 else t
        ):
            wrong.append(alike(gradients_of(q, k, v, dout, causal=flag), want))
    return "; ".join(filter(None, wrong))


def gradients_beside_nan() -> str:
    """Where nothing is seen gradients are 0, and elsewhere those without NaN."""
    wrong = []
    for sq, sk, options in (
        (300, 700, {"causal": True, "align": "top-left"}),
        (700, 300, {"causal": True}),
        (700, 300, {"window_size": (20, 30), "align": "top-left"}),
        (300, 700, {"window_size": (50, 0)}),
    ):
        q, k, v, dout = (normal(2, n, 4, 128) for n in (sq, sk, sk, sq))
        problem = tilewise.api.problem_of(q, k, v, **options)
        rows, keys, *_ = hopper._seen_part(problem)
        assert (rows, keys) != (slice(0, sq), slice(0, sk))
        want = by_triton(q, k, v, dout, **options)
        for t, part in ((q, rows), (dout, rows), (k, keys), (v, keys)):
            kept = t[:, part].clone()
            t.fill_(math.nan)
            t[:, part] = kept
        got = gradients_of(q, k, v, dout, **options)
        wrong.append(alike(got, want))
        for t, part in zip(got, (rows, keys, keys), strict=True):
            unseen = t.clone()
            unseen[:, part] = 0
            if unseen.count_nonzero():
                wrong.append(f"{options}: gradients of what is not seen are not 0")
    return "; ".join(filter(None, wrong))


def gradients_beside_hidden_nan() -> str:
    """The same where the device alone knows what is seen."""
    cu_q, cu_k = (cumulative(n) for n in ((100, 0, 33, 467), (300, 70, 0, 830)))
    window = {"window_size": (100, 20)}
    return "; ".join(
        beside_hidden_nan(d, (), {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, **options})
        for d, options in (
            *itertools.product((128, 64, 256), ({}, {"causal": True}, window)),
            *((d, {"causal": True, "deterministic": True}) for d in (128, 64)),
        )
    ).strip("; ")


def gradients_beside_nan_out_of_range() -> str:
    start = torch.tensor([[100], [0]], device="cuda")
    few = (start, torch.tensor([[900], [700]], device="cuda"))
    one_each = torch.arange(610, device="cuda")[None] * 2
    return "; ".join(
        beside_hidden_nan(d, (2,), {"key_range": key_range, **options})
        for d, key_range, options in itertools.product(
            (128, 64, 256),
            (few, (one_each, one_each + 1)),
            ({}, {"causal": True}, {"causal": True, "deterministic": True}),
        )
    ).strip("; ")


def beside_hidden_nan(d: int, batch: tuple[int, ...], given: dict[str, Any]) -> str:
    """Of 610 rows and 1,210 keys: gradients with NaN in all tokens that are hidden, and without."""
    q, k, v, dout = (normal(*batch, n, 4, d) for n in (610, 1210, 1210, 610))
    seen = hidden.seen_tokens(tilewise.api.problem_of(q, k, v, **given))
    assert seen is not None
    rows, keys = seen
    assert not keys.all()
    want = gradients_of(q, k, v, dout, **given)
    for t, there in ((q, rows), (dout, rows), (k, keys), (v, keys)):
        t[~there] = math.nan
    got = gradients_of(q, k, v, dout, **given)
    wrong = [alike(got, want)]
    for t, there in zip(got, (rows, keys, keys), strict=True):
        if t[~there].count_nonzero():
            wrong.append(f"D{d}, {given}: gradients of what is not seen are not 0")
    return "; ".join(filter(None, wrong))


def gradients_of_many_heads() -> str:
    q, dout = normal(70001, 20, 1, 64), normal(70001, 20, 1, 64)
    got = [t[-3:] for t in gradients_of(q, q, q, dout, causal=True)]
    last = q[-3:]
    return alike(got, by_triton(last, last, last, dout[-3:], causal=True))


def gradients_far() -> str:
    q = normal(1, 1024, 1, 128).expand(16500, 1024, 1, 128).contiguous()
    q += torch.arange(16500, device=q.device).view(-1, 1, 1, 1) % 7
    last = q[-2:]
    want = by_triton(last, last, last, last, causal=True)
    return alike([t[-2:] for t in gradients_of(q, q, q, q, causal=True)], want)


def gradients_again() -> str:
    """Of other numbers each time: sums begin with 0 whatever was in their place."""
    wrong = []
    for shape, options in (
        ((2, 300, 4, 128), {"causal": True}),
        ((3, 65, 2, 64), {}),
        ((1, 1000, 5, 96), {"window_size": (100, 100)}),
    ):
        for _ in range(5):
            given = [normal(*shape) for _ in range(4)]
            wrong.append(alike(gradients_of(*given, **options), by_triton(*given, **options)))
    return "; ".join(filter(None, wrong))


def gradients_graphed() -> str:
    given = [normal(2, 1000, 8, 128) for _ in range(4)]
    replay, got = graphed(lambda: gradients_of(*given, causal=True))
    wrong = []
    for _ in range(3):
        for t in given:
            t.normal_()
        for t in got:
            t.fill_(math.nan)
        replay()
        wrong.append(alike(got, by_triton(*given, causal=True)))
    return "; ".join(filter(None, wrong))


def repeated_cells() -> Iterator[Cell]:
    """Of fewer tiles than there are multiprocessors, and of many more."""
    masks: dict[str, dict[str, Any]] = {
        "full": {},
        "causal": {"causal": True},
        "window": {"window_size": (300, 100)},
    }
    shapes = ((1, 500, 2, 2), (2, 4096, 16, 16), (1, 16001, 4, 1), (9, 1100, 12, 3))
    lengths = (3000, 1, 0, 129, 700, 5000, 64)
    for d, (mask, given) in itertools.product((64, 128, 256), masks.items()):
        options = {**given, "deterministic": True}
        for b, s, h, hkv in shapes:
            name = f"D{d}, {mask}, {b}×{s}×{h} of {hkv}"
            yield Cell(name, d, s, h, hkv, options, tokens=b * s)
        yield Cell(f"D{d}, {mask}, packed", d, 0, 8, 2, options, lengths=lengths)


def the_same_bits(cell: Cell) -> str:
    """Of gradients in 20 reruns; in half of them long-running kernels keep some of the multiprocessors, and
    leave them at any time."""
    arguments = cell.arguments("cuda")
    if hopper._backward_unsupported(tilewise.api.problem_of(**arguments)):
        return "left to the Triton backend"
    function = tilewise.attention_varlen if cell.lengths else tilewise.attention
    leaves = [arguments.pop(name).requires_grad_() for name in "qkv"]
    dout = torch.randn_like(leaves[0])

    def gradients() -> tuple[Tensor, ...]:
        out = function(*leaves, **arguments, backend="hopper")
        return torch.autograd.grad(out, leaves, dout)

    wanted = gradients()
    q, k = normal(1, 5000, 1, 128), normal(1, 100_000, 1, 128)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    wrong = set()
    for number in range(20):
        if number >= 10:
            with torch.cuda.stream(side):
                attend(q, k, k)
        pairs = zip("qkv", gradients(), wanted, strict=True)
        wrong |= {f"d{name} differs" for name, a, b in pairs if same(a, b)}
    torch.cuda.synchronize()
    return "; ".join(sorted(wrong))


def mapped() -> str:
    """Of which the batch has a stride of 0, once the samples are one batch."""
    q, k, v = normal(7, 1, 300, 4, 128), normal(1, 400, 2, 128), normal(1, 400, 2, 128)
    each = torch.stack([attend(one, k, v, causal=True) for one in q])
    together = torch.vmap(lambda one: attend(one, k, v, causal=True))(q)
    return alike([together], [each])


# ------------------------------------------------------------------ compiling ahead


# Of the scores those whose gradients are wanted; None: no gradients.
_jobs: list[tuple[Problem, Variant, tuple[str, ...] | None]] = []


def compile_all(parts: list[str]) -> None:
    """Compiles what the parts will need, by all processors."""
    distinct: dict[Any, Any] = {}
    for problem, variant in what_is_needed(parts):
        with varied(variant):
            if hopper._plan(problem).shared_bytes <= hopper._SHARED_BYTES:
                distinct[what_it_takes(problem)] = (problem, variant, None)
    for problem, wanted in gradients_needed(parts):
        distinct[what_gradients_take(problem, wanted)] = (problem, Variant(), wanted)
    say(f"compiling {len(distinct)} kernels, those of {', '.join(parts)}")
    started = time.monotonic()
    # Inherited: two tensors that are one would arrive as two.
    _jobs[:] = distinct.values()
    with multiprocessing.get_context("fork").Pool(os.cpu_count(), start_worker) as pool:
        lines = [line for line in pool.imap_unordered(compile_one, range(len(_jobs))) if line]
    for line in (*lines, f"compiled in {time.monotonic() - started:.0f} s"):
        say(line)
    if any("NOT COMPILED" in line for line in lines):
        sys.exit("some do not compile")


def what_is_needed(parts: list[str]) -> Iterator[tuple[Problem, Variant]]:
    for part in CASES_OF.keys() & set(parts) - set(OF_GRADIENTS):
        for case, dtype in served_cases(part):
            yield make_call(case, dtype).problem(), Variant()
    if "speed" in parts:
        for d, s, flag in cells():
            q = torch.empty(1, s, 2, d, dtype=torch.bfloat16)
            yield tilewise.api.problem_of(q, q, q, causal=flag), Variant()
    if "variants" in parts:
        for cell in variant_cells():
            problem = tilewise.api.problem_of(**cell.arguments("cpu"))
            for variant in cell.tried(problem).values():
                yield problem, variant


def gradients_needed(parts: list[str]) -> Iterator[tuple[Problem, tuple[str, ...]]]:
    """With the scores whose gradients are wanted."""
    for part in set(OF_GRADIENTS) & set(parts):
        for case, dtype in served_cases(part):
            yield gradient_call(case, dtype).problem(), scores_wanted(part)
    if "deterministic" in parts:
        for cell in repeated_cells():
            yield tilewise.api.problem_of(**cell.arguments("cpu")), ()
    if "backward" in parts:
        for cell in backward_cells():
            problem = tilewise.api.problem_of(**cell.arguments("cpu"))
            yield from ((problem, ()), (problem._replace(deterministic=True), ()))


def what_gradients_take(problem: Problem, wanted: tuple[str, ...]) -> tuple[Any, ...]:
    """As what_it_takes, and what the backward kernels depend on."""
    plan, ragged = hopper._backward_plan(problem, wanted), problem.packed is not None
    if problem.packed is None:
        first, last = hopper._seen_keys(problem)
        ragged = problem.key_range is None and (last - first) % plan.keys != 0
    widths = (problem.q.shape[-1], problem.v.shape[-1])
    return (
        what_it_takes(problem),
        plan,
        ragged,
        widths,
        problem.band.align,
        *hopper._wanted(problem, wanted),
    )


def what_it_takes(problem: Problem) -> tuple[Any, ...]:
    """What a compiled kernel depends on."""
    s, plan = problem.scores, hopper._plan(problem)
    rest = None
    if problem.packed is None:
        first, last = hopper._seen_keys(problem)
        rest = (last - first) % plan.block_k != 0
    tensors = (None if t is None else t.dtype for t in (problem.q, s.alibi_slopes, s.sinks))
    ends = (*twins.sides(problem), problem.key_range)
    structure = (end is None for end in ends)
    folded = s.softcap is None and s.alibi_slopes is None and 0 < s.scale * twins.LOG2E <= 1
    return plan, rest, *tensors, *structure, s.softcap is None, folded


def compile_one(number: int) -> str:
    from tilewise.tuning import compiling

    problem, variant, wanted = _jobs[number]
    given = (wanted is not None, "hopper", wanted or ())
    target = compiling.cuda_target(90)
    try:
        with varied(variant):
            kernels = compiling.compile_problem(problem, target, *given)
    except Exception as error:
        return f"NOT COMPILED {hopper.config(problem)}: {error!r:.500}"
    found = [compiling.report(kernel, target) for kernel in kernels]
    told = " ".join(str(report) for report in found if report.spilled or report.notes)
    return f"{told} {hopper.config(problem)}" if told else ""


# ------------------------------------------------------------------ speed


def cells() -> Iterator[tuple[int, int, bool]]:
    for d, lengths in (
        (128, (512, 1024, 2048, 4096, 8192, 16384)),
        (64, (1024, 4096, 16384)),
        (256, (1024, 4096, 16384)),
    ):
        for s in lengths:
            yield from ((d, s, False), (d, s, True))


def graphed(f: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """A replay of what a function launches, and where it leaves its result."""
    results: list[Any] = []

    def call() -> None:
        results[:] = [f()]

    return timing.graphed(call), results[0]


def milliseconds(f: Callable[[], Any]) -> float:
    import triton

    return triton.testing.do_bench(f, warmup=10, rep=50, return_mode="median")


def flash_attention_3() -> Any:
    """The operators of FlashAttention-3, if they were brought along."""
    folder = next(
        (p for p in (Path("peers-fa3"), Path(__file__).parents[1] / "peers-fa3") if p.exists()),
        None,
    )
    if folder is None:
        say("no peers-fa3: FlashAttention-3 is not timed")
        return None
    from tilewise.cli.gpu_sides import missing_peers

    if missing := missing_peers(folder, ("FA3",)):
        raise RuntimeError(missing["FA3"])
    return torch.ops.flash_attn_3


def cudnn(q: Tensor, k: Tensor, v: Tensor, flag: bool) -> Callable[[], Tensor]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (t.transpose(1, 2) for t in (q, k, v))

    def call() -> Tensor:
        with torch.no_grad(), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=flag)

    return call


def speed(folder: Path) -> None:
    """Teraflops a second of each cell; medians of three interleaved medians of graph replays."""
    fa3 = flash_attention_3()
    rows: list[dict[str, Any]] = []
    for d, s, flag in cells():
        b, h = 16384 // s, 2048 // d
        q, k, v = (normal(b, s, h, d) for _ in range(3))
        ours = lambda: attend(q, k, v, causal=flag)  # noqa: E731, B023
        calls: dict[str, Callable[[], Tensor]] = {"tilewise": ours, "cudnn": cudnn(q, k, v, flag)}
        if fa3 is not None:
            options = {"softmax_scale": d**-0.5, "is_causal": flag, "num_splits": 1}
            calls["fa3"] = lambda: fa3.fwd(q, k, v, **options)[0]  # noqa: B023
        with watched(f"speed {d} {s} {flag}"):
            graphs = {name: graphed(call) for name, call in calls.items()}
            flops = 4.0 * b * h * s * s * d / (2 if flag else 1)
            rate = rates({name: replay for name, (replay, _) in graphs.items()}, flops)
        peer = graphs["fa3" if "fa3" in graphs else "cudnn"][1]
        peer = peer if "fa3" in graphs else peer.transpose(1, 2)
        mask = "causal" if flag else "full"
        rows.append(told(d, s, mask, rate, distance(graphs["tilewise"][1], peer)))
        (folder / "hopper_speed.json").write_text(json.dumps(rows))
    summarized(rows)


def backward_cells() -> Iterator[Cell]:
    lengths = {128: (512, 1024, 4096, 16384), 64: (1024, 4096, 16384), 256: (1024, 4096, 16384)}
    for d, of_d in lengths.items():
        heads = (2048 // d, 2048 // d)
        for s in of_d:
            yield Cell("full", d, s, *heads, {}, s * s)
            yield Cell("causal", d, s, *heads, {"causal": True}, s * s / 2)
    yield from (window_cell(128), window_cell(64), *packed_cells())


def window_cell(d: int) -> Cell:
    window = {"causal": True, "window_size": (1023, None)}
    pairs = 16384 * 1024 - 1024 * 1023 / 2
    return Cell("window 1024", d, 16384, 2048 // d, 2048 // d, window, pairs)


def packed_cells() -> Iterator[Cell]:
    pairs = sum(n * n for n in PACKED_LENGTHS)
    yield Cell("packed full", 128, 0, 16, 16, {}, pairs, PACKED_LENGTHS)
    yield Cell("packed causal", 128, 0, 16, 16, {"causal": True}, pairs / 2, PACKED_LENGTHS)


def backward_speed(folder: Path) -> None:
    """The same of the backward pass, beside the Triton backend's and FlashAttention-3's; of the deterministic
    form, too, where it is another. cuDNN's, of plain masks, is called by autograd, eagerly."""
    fa3 = flash_attention_3()
    rows: list[dict[str, Any]] = []
    for cell in backward_cells():
        arguments = cell.arguments("cuda")
        q, k, v = (arguments[name] for name in "qkv")
        dout = torch.randn_like(q)
        problem = tilewise.api.problem_of(**arguments)
        forms = {"tilewise": problem}
        if not hopper._backward_plan(problem).wide:
            forms["deterministic"] = problem._replace(deterministic=True)
        with watched(f"backward {cell.d} {cell.s} {cell.name}"):
            result, off = hopper.forward(problem), math.nan
            given = (result, dout, None)
            graphs = {
                name: graphed(functools.partial(hopper.backward, form, *given))
                for name, form in forms.items()
            }
            graphs["triton"] = graphed(functools.partial(triton.backward, problem, *given))
            if fa3 is not None:
                theirs = [torch.empty_like(t) for t in (q, k, v)]
                operands = (dout, q, k, v, result.out, result.lse, *theirs)
                options = cell.fa3_options()
                del options["num_splits"]
                options |= {name: arguments[name] for name in arguments if "seqlen" in name}
                call = functools.partial(fa3.bwd, *operands, **options)
                graphs["fa3"] = graphed(call)
                off = 0.0
                for replay, found in (graphs[name] for name in forms):
                    replay()
                    off = max(off, *map(distance, found[:3], theirs))
                if "deterministic" in forms:  # it refuses D = 256
                    again = functools.partial(call, deterministic=True)
                    graphs["fa3 deterministic"] = graphed(again)
            calls: dict[str, Callable[[], object]]
            calls = {name: replay for name, (replay, _) in graphs.items()}
            if cell.name in ("full", "causal"):
                calls["cudnn"] = cudnn_backward(q, k, v, dout, cell.name == "causal")
            rate = rates(calls, 2.5 * cell.flops)
        rows.append(told(cell.d, cell.s, cell.name, rate, off))
        (folder / "hopper_backward.json").write_text(json.dumps(rows))
    summarized([row for row in rows if row["mask"] in ("full", "causal")])


def cudnn_backward(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, flag: bool
) -> Callable[[], object]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    leaves = [t.transpose(1, 2).detach().requires_grad_() for t in (q, k, v)]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=flag)
    grad = dout.transpose(1, 2)
    return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)


def rates(calls: dict[str, Callable[[], object]], flops: float) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(3):
        for name, call in calls.items():
            times[name].append(milliseconds(call))
    return {name: flops / sorted(t)[1] * 1e-9 for name, t in times.items()}


def distance(a: Tensor, b: Tensor) -> float:
    """Of a from b, relative; infinite where a number is none."""
    off = float((a.float() - b.float()).norm() / b.float().norm())
    return math.inf if math.isnan(off) else off


def told(d: int, s: int, mask: str, rate: dict[str, float], off: float) -> dict[str, Any]:
    """A row of speeds and ratios, which is printed. `off`: the distance to a peer's result."""
    row: dict[str, Any] = {"D": d, "S": s, "mask": mask}
    row |= {name: round(value) for name, value in rate.items()}
    row |= {
        f"÷ {name}": round(rate["tilewise"] / value, 3)
        for name, value in rate.items()
        if name != "tilewise" and "deterministic" not in name
    }
    row |= {
        f"deterministic ÷ {name}": round(rate["deterministic"] / rate[name], 3)
        for name in ("tilewise", "triton", "fa3 deterministic")
        if "deterministic" in rate and name in rate
    }
    say(f"{row} difference {off:.1e}" + (" WRONG" if off > 5e-3 else ""))
    return row


def summarized(rows: list[dict[str, Any]]) -> None:
    against = ("tilewise", "triton", "fa3 deterministic")
    for name in ("÷ fa3", "÷ cudnn", *(f"deterministic ÷ {name}" for name in against)):
        ratios = [row[name] for row in rows if name in row]
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            say(f"geometric mean {name}: {mean:.3f} of {len(ratios)}")
    a = normal(8192, 8192)
    say(f"matmul 8192³: {2 * 8192**3 / milliseconds(lambda: a @ a) * 1e-9:.0f}")


class Cell(NamedTuple):
    """Sizes and options of a call whose speed is looked at."""

    name: str
    d: int
    s: int
    heads: int
    kv_heads: int
    options: dict[str, Any]
    pairs: float = math.nan  # of query and key that are seen, per head; of what is timed
    lengths: tuple[int, ...] = ()
    rows: int = 0  # queries, if not as many as keys
    tokens: int = 16384
    only: tuple[str, ...] = ()  # the variants of interest, if not all

    def tried(self, problem: Problem) -> dict[str, Variant]:
        every = variants_of(problem)
        return {name: every[name] for name in self.only or every if name in every}

    def shapes(self) -> Iterator[tuple[int, ...]]:
        batch = self.tokens // self.s if self.s else 0
        for h, n in ((self.heads, self.rows), (self.kv_heads, 0), (self.kv_heads, 0)):
            tokens = (sum(self.lengths),) if self.lengths else (batch, n or self.s)
            yield *tokens, h, self.d

    def arguments(self, device: str) -> dict[str, Any]:
        q, k, v = (torch.empty(shape, dtype=HALF[0], device=device) for shape in self.shapes())
        if device == "cuda":
            q, k, v = (normal(*shape) for shape in self.shapes())
        packed = {}
        if self.lengths:
            cu = cumulative(self.lengths, device=device)
            packed = {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
            packed |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), max(self.lengths))
        return {"q": q, "k": k, "v": v, **packed, **self.options}

    def fa3_options(self) -> dict[str, Any]:
        left, _ = self.options.get("window_size", (None, None))
        window = {} if left is None else {"window_size_left": left, "window_size_right": 0}
        return {
            "softmax_scale": self.d**-0.5,
            "is_causal": "causal" in self.options and not window,
            "num_splits": 1,
            **window,
        }

    @property
    def flops(self) -> float:
        times = 1 if self.lengths else self.tokens / self.s
        return 4.0 * times * self.heads * self.pairs * self.d


def variant_cells() -> Iterator[Cell]:
    for d, s, flag in (
        (128, 1024, True),
        (128, 4096, True),
        (128, 16384, True),
        (128, 4096, False),
        (128, 16384, False),
        (64, 4096, True),
        (256, 4096, True),
    ):
        name = f"D{d} S{s} {'causal' if flag else 'full'}"
        options = {"causal": True} if flag else {}
        yield Cell(name, d, s, 2048 // d, 2048 // d, options, s * s / (2 if flag else 1))
    for d in (96, 192):
        yield Cell(
            f"D{d} S4096 causal", d, 4096, 2048 // d, 2048 // d, {"causal": True}, 4096**2 / 2
        )
    some = ("chosen", "one warp loads", "one warp loads, fence", "fence", "section / 2", "q stages")
    yield Cell("GQA 32/8", 128, 4096, 32, 8, {"causal": True}, 4096**2 / 2, only=some)
    yield window_cell(128)._replace(only=some)
    pairs, few = 16.0 * 4096, ("chosen", "heads apart", "one warp loads")
    yield Cell("16 rows, 32/8", 128, 4096, 32, 8, {"causal": True}, pairs, (), 16, 2**17, few)
    yield from (cell._replace(only=some) for cell in packed_cells())


class Variant(NamedTuple):
    """What is changed of a plan, and of a walk's section (a factor)."""

    plan: dict[str, Any] | None = None
    section: float = 1.0


def variants_of(problem: Problem) -> dict[str, Variant]:
    plan = hopper._plan(problem)
    tried = {
        "chosen": Variant(),
        # exps that do not wait for P V: −2 … +3 %; D = 64 without: −5 %.
        "fence": Variant({"fenced": not plan.fenced}),
        # +2 % at 1k, ±0 above.
        "q stages": Variant({"q_stages": 3 - plan.q_stages}),
        # −2 % causal (uneven), ±0 full.
        "dealt or drawn": Variant({"dynamic": not plan.dynamic}),
    }
    if plan.dynamic:
        # Fewer heads at a time, whose keys each half of the L2 can hold: 16k +2 %, else 0.
        tried |= {"section / 2": Variant(section=0.5), "section · 2": Variant(section=2.0)}
    if (plan.d, plan.dv) != (plan.block_d, plan.block_dv):
        # A third more to multiply: D = 96 −10 %, 192 −20 %.
        tried["padded"] = Variant({"d": plan.block_d, "dv": plan.block_dv})
    if plan.heads > 1:
        # Four times the tiles, as much to load of each: −60 %.
        tried["heads apart"] = Variant({"heads": 1})
    if plan.block_d == 64:
        tried["groups"] = Variant({"groups": 5 - plan.groups})
        tried["groups, fence"] = Variant({"groups": 5 - plan.groups, "fenced": False})
    if plan.block_d == 128:
        # A third less is loaded, rescaled twice as often: −5 … +5 % at 16k, worse at 1k.
        tried["192 rows, 64 keys"] = Variant({"groups": 3, "block_k": 64, "stages": 3})
    return tried


@contextmanager
def varied(variant: Variant) -> Iterator[None]:
    """Within the block the backend computes in another way than the chosen one."""
    chosen_plan, chosen_order = hopper._plan, hopper._order

    def plan(problem: Problem) -> Any:
        return chosen_plan(problem)._replace(**(variant.plan or {}))

    def order(*arguments: Any) -> Any:
        spec, walk = chosen_order(*arguments)
        return spec, walk._replace(
            section=max(1, min(walk.heads, int(walk.section * variant.section)))
        )

    with mock.patch.multiple(hopper, _plan=plan, _order=order):
        yield


def prototypes() -> Any:
    """The forward prototype, if it was brought along: gfwd.py and gfwd2.py in a folder prototypes."""
    folder = Path(__file__).parents[1] / "prototypes"
    if not folder.exists():
        return None
    sys.path.insert(0, str(folder))
    import gfwd2

    return gfwd2


def variants(_: Path) -> None:
    """Other plans than the chosen one, by teraflops a second and ratio to FlashAttention-3."""
    fa3, other = flash_attention_3(), prototypes()
    for cell in variant_cells():
        try:
            with watched(f"variants of {cell.name}", PATIENCE):
                vary(cell, fa3, other)
        except Exception as error:
            say(f"WRONG variants of {cell.name}: {error!r:.600}")


def vary(cell: Cell, fa3: Any, other: Any) -> None:
    arguments = cell.arguments("cuda")
    q, k, v = (arguments[name] for name in ("q", "k", "v"))
    graphs = {}
    if fa3 is not None:
        options = cell.fa3_options()
        options |= {name: arguments[name] for name in arguments if "seqlen" in name}
        graphs["fa3"] = graphed(lambda: fa3.fwd(q, k, v, **options)[0])
    plain = not (cell.lengths or cell.rows or "window_size" in cell.options)
    if other is not None and plain and cell.d in (64, 128, 256):
        plan = other.config(cell.d, bool(cell.options), QBUF=2 if cell.s <= 1024 else 1)
        place = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
        given = (q, k, v, cell.d**-0.5, bool(cell.options), plan)
        graphs["prototype"] = graphed(lambda: other.fwd(*given, out=place)[0])
    problem = tilewise.api.problem_of(**arguments)
    for name, variant in cell.tried(problem).items():
        with varied(variant):
            if hopper._plan(problem).shared_bytes <= hopper._SHARED_BYTES:
                graphs[name] = graphed(lambda: hopper.forward(problem).out)
    found = rates({name: replay for name, (replay, _) in graphs.items()}, cell.flops)
    say(f"D{cell.d} variants of {cell.name}:")
    for name, rate in found.items():
        off = distance(graphs[name][1], graphs["chosen"][1])
        beside = f"{rate / found['fa3']:.3f}" if "fa3" in found else ""
        say(f"D   {name:20} {rate:5.0f} {beside}{'' if off < 5e-3 else f' WRONG {off:.1e}'}")


def launch_cost(_: Path) -> None:
    """Microseconds of the host per call, small inputs."""
    q, k, v = (normal(1, 128, 2, 128) for _ in range(3))
    calls = {
        "tilewise, full": lambda: attend(q, k, v),
        "tilewise, causal": lambda: attend(q, k, v, causal=True),
        "cudnn": cudnn(q, k, v, True),
    }
    for name, call in calls.items():
        times = []
        for _ in range(20):
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(100):
                call()
            times.append((time.perf_counter() - started) / 100 * 1e6)
        say(f"launch {name}: {sorted(times)[10]:.1f} µs")


# ------------------------------------------------------------------ running


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    timed: dict[str, Callable[[Path], None]] = {
        "speed": speed,
        "backward": backward_speed,
        "variants": variants,
        "launch": launch_cost,
    }
    checked = (*CHECKS, *SANITIZED)
    known = ("compile", *checked, *timed)
    usual = [part for part in known if part not in (*SANITIZED, "variants")]
    parser.add_argument("--parts", default=",".join(usual), help=f"of {', '.join(known)}")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--skip", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    parts = given.parts.split(",")
    if unknown := set(parts) - set(known):
        parser.error(f"--parts must be of {', '.join(known)}, got {', '.join(sorted(unknown))}")
    if given.inside in checked:
        run_part(given.inside, checks(given.inside), given.skip)
    elif given.inside is not None:
        # What failed once is not begun again.
        if given.skip == 0 and given.inside == "compile":
            compile_all(parts)
        elif given.skip == 0:
            timed[given.inside](given.out)
    else:
        run = Run(
            __file__, "hopper-check", given.out, ("--parts", given.parts, "--out", str(given.out))
        )
        run.together([part for part in parts if part == "compile"], MOST_SECONDS)
        run.together([part for part in parts if part in checked], MOST_SECONDS)
        for part in timed:
            run.together([part] if part in parts else [], MOST_SECONDS)
        print(run.summary())
        sys.exit(run.failed())


if __name__ == "__main__":
    main()
