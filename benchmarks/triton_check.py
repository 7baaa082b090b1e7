"""The Triton backend on a GPU: is it right?

    python benchmarks/triton_check.py [--parts compile,float64,…] [--out FOLDER]

Every case of tilewise.testing and some more, in each dtype, forward and backward: by the closeness rule, in
memory that was full of NaN, twice with the same bits; and what no case can hold. `compile` fills Triton's
cache by all processors. A row of each check goes to triton-check.csv in the folder (default: $OUT or the
current one), all that is printed to triton-check.log; the exit code is 1 where something is wrong.

Without a GPU, Triton's interpreter may try the script itself: TRITON_INTERPRET=1, and a part or two.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from checking import Check, NotHere, Run, run_part, same, short
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import tilewise
from tilewise import testing
from tilewise.backends import triton as backend
from tilewise.kernels.launch import compiled_only
from tilewise.testing import CASES, Call, Case, Maker, evaluate, make_call
from tilewise.tuning.search import poisoned
from tilewise.tuning.timing import graphed
from tilewise.tuning.workers import cores, start_worker

DTYPES = {short(t): t for t in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP32 = torch.float32
LOW = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter's bfloat16 is wrong
# Seconds that compiling may take, the parts that wait for it, and the others.
COMPILING, CASES_TIME, OTHERS_TIME = 170.0, 150.0, 190.0


# ------------------------------------------------------------------ cases


def causal(make: Maker) -> dict[str, Any]:
    return {"causal": True}


def more_cases() -> Iterator[Case]:
    """Wide heads; lengths that tiles divide and that they do not, loaded by descriptors; many sequences."""
    for d, dv in ((8, 8), (64, 64), (128, 128), (192, 128), (16, 512), (512, 16), (512, 512)):
        shape = {"batch": 1, "sq": 150, "sk": 150, "head_dim": d, "value_dim": dv}
        yield Case(f"D {d}, Dv {dv}", causal, **shape)
    features: dict[str, Any] = {
        "full": lambda make: {},
        "causal": causal,
        "window": lambda make: {"window_size": (300, 20)},
        "bias": lambda make: {"bias": make.normal(4, make.case.sq, make.case.sk), **causal(make)},
    }
    for name, options in features.items():
        for sq, sk in ((1024, 1024), (777, 1033)):
            shape = {"batch": 1, "sq": sq, "sk": sk, "head_dim": 64, "value_dim": 64}
            yield Case(f"{name}, {sq}×{sk}", options, **shape)
    draw = random.Random(0)
    lengths = tuple((draw.randrange(70), draw.choice((0, 1, 64, 130))) for _ in range(1500))
    yield Case("packed, 1,500 sequences", causal, layout="packed", lengths=lengths)
    lengths = ((700, 513), (1, 64), (37, 0), (64, 65), (190, 1000), (0, 5), (65, 1))
    for name in ("full", "causal", "window"):
        shape = {"layout": "packed", "head_dim": 64, "value_dim": 64}
        yield Case(f"packed, long, {name}", features[name], **shape, lengths=lengths)


ALL_CASES = (*CASES, *more_cases())


def case_checks(dtype: torch.dtype) -> Iterator[Check]:
    for case in ALL_CASES:
        call = make_call(case, dtype, DEVICE)
        if reasons := backend.unsupported(call.problem()):
            yield Check(
                f"{case}: refused, served elsewhere",
                functools.partial(refused, call, dtype, reasons),
            )
            continue
        yield Check(str(case), functools.partial(judged, call, dtype))
        if case.name.startswith("packed, causal"):
            long = {name: t.long() for name, t in call.arguments.items() if "cu_seqlens" in name}
            other = Call(call.function, {**call.arguments, **long})
            yield Check(f"{case}, int64", functools.partial(judged, other, dtype))
    for sq, sk in ((65, 700), (300, 3000)):
        ramp = testing.ramp_call(sq, sk, dtype, DEVICE)
        yield Check(f"ramp, {sq}×{sk}", functools.partial(judged, ramp, dtype))
    for sq, sk in ((65, 300), (1024, 1024)) if dtype == FP32 else ():
        for name, call in testing.steep_calls(sq, sk, DEVICE).items():
            yield Check(f"{name}, {sq}×{sk}", functools.partial(judged, call, dtype))


def judged(call: Call, dtype: torch.dtype, name: str | None = "triton") -> str:
    """What the closeness rule refuses of the results in new memory, or whose bits differ in a rerun.

    From the third call on launches are replayed: those are reruns in other memory.
    """
    with poisoned():
        results = evaluate(call, name)
        again = [evaluate(moved(call), name) for _ in range(3)]
    gold, peer = testing.expect(call)
    verdicts = [testing.judge(n, t, gold[n], peer[n], dtype) for n, t in results.items()]
    wrong = [str(verdict) for verdict in verdicts if not verdict.passed]
    wrong += [same(rerun, results) for rerun in again]
    return "; ".join(filter(None, wrong))


def moved(call: Call) -> Call:
    arguments = {n: t.clone() if isinstance(t, Tensor) else t for n, t in call.arguments.items()}
    return call._replace(arguments=arguments)


def refused(call: Call, dtype: torch.dtype, reasons: list[str]) -> str:
    """It says why it does not serve, and what the call gets instead is right."""
    try:
        evaluate(call, "triton")
    except ValueError as error:
        missing = [reason for reason in reasons if reason not in str(error)]
        return f"does not say {missing}" if missing else judged(call, dtype, None)
    return "is served"


# ------------------------------------------------------------------ compiling ahead


def compile_all() -> None:
    """Compiles what the cases need, by all processors; what is not ready in time is compiled later."""
    jobs = [(number, name) for number in range(len(ALL_CASES)) for name in DTYPES]
    jobs.sort(key=lambda job: -ALL_CASES[job[0]].head_dim)  # the longest first
    deadline = time.monotonic() + COMPILING
    ready = kernels = 0
    with multiprocessing.get_context("spawn").Pool(cores(), start_worker) as pool:
        answers = pool.imap_unordered(compile_one, jobs)
        while ready < len(jobs) and (left := deadline - time.monotonic()) > 0:
            try:
                found, note = answers.next(left)
            except multiprocessing.TimeoutError:
                break
            ready, kernels = ready + 1, kernels + found
            if note:
                print(note, flush=True)
    print(f"{kernels} kernels, for {ready} of {len(jobs)} cases", flush=True)


def compile_one(job: tuple[int, str]) -> tuple[int, str]:
    """How many kernels were compiled for a case in a dtype, and why others were not."""
    case, dtype = ALL_CASES[job[0]], DTYPES[job[1]]
    problem = make_call(case, dtype, DEVICE).problem()
    if backend.unsupported(problem):
        return 0, ""
    with compiled_only() as kernels:
        try:
            result = backend.forward(problem)
            backend.backward(
                problem, result, torch.zeros_like(result.out), torch.zeros_like(result.lse)
            )
        except Exception as error:  # the case itself will say so
            return len(kernels), f"{case}, {job[1]}: {error!r:.300}"
    return len(kernels), ""


# ------------------------------------------------------------------ what no case can hold


def normal(*shape: int, dtype: torch.dtype = LOW) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=dtype)


def results(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, bias: Tensor | None = None, **options: Any
) -> dict[str, Tensor]:
    """out, lse and the gradients of q, k, v and the bias, if there is one."""
    leaves = {"q": q, "k": k, "v": v} | ({} if bias is None else {"bias": bias})
    leaves = {name: t.detach().requires_grad_() for name, t in leaves.items()}
    function = tilewise.attention_varlen if "cu_seqlens_q" in options else tilewise.attention
    out, lse = function(**leaves, **options, return_lse=True, backend="triton")
    grads = torch.autograd.grad(out, list(leaves.values()), dout)
    named = {f"d{name}": t for name, t in zip(leaves, grads, strict=True)}
    return {"out": out.detach(), "lse": lse.detach(), **named}


def cut(found: dict[str, Tensor], part: Any, part_of_lse: Any) -> dict[str, Tensor]:
    return {name: t[part_of_lse if name == "lse" else part] for name, t in found.items()}


def large() -> Iterator[Check]:
    yield Check("more than 65,535 batch entries", many_entries)
    yield Check("more than 65,535 heads", many_heads)
    yield Check("more than 65,535 sequences", many_sequences)
    yield Check("more than 2³¹ elements", functools.partial(far_entries, False))
    yield Check("more than 2³¹ elements, packed", functools.partial(far_entries, True))
    yield Check("more than 2³¹ elements of keys of one head", far_keys)
    yield Check("more than 2³¹ elements of a bias", far_bias)


def many_entries() -> str:
    q, dout = normal(70001, 20, 1, 64), normal(70001, 20, 1, 64)
    end = slice(-3, None)
    alone = results(q[end], q[end], q[end], dout[end], causal=True)
    return same(cut(results(q, q, q, dout, causal=True), end, end), alone)


def many_heads() -> str:
    q, dout = normal(1, 20, 70000, 64), normal(1, 20, 70000, 64)
    end = (slice(None), slice(None), slice(-4, None))
    alone = results(q[end], q[end], q[end], dout[end], causal=True)
    got = results(q, q, q, dout, causal=True)
    return same(cut(got, end, (slice(None), slice(-4, None))), alone)


def many_sequences() -> str:
    lengths = torch.arange(70001, device=DEVICE) % 5
    cu = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    q, dout = normal(int(cu[-1]), 2, 64), normal(int(cu[-1]), 2, 64)
    got = results(q, q, q, dout, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True)
    first = int(cu[-6])
    end, cu = slice(first, None), cu[-6:] - first
    alone = results(*[q[end]] * 3, dout[end], cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True)
    return same(cut(got, end, (slice(None), end)), alone)


def far_entries(packed: bool) -> str:
    """Of 16,500 · 1,024 · 128 elements the last two batch entries or sequences."""
    entries, length = 16500, 1024
    q = normal(1, length, 1, 128).expand(entries, -1, -1, -1).contiguous()
    q += torch.arange(entries, device=DEVICE).view(-1, 1, 1, 1) % 7
    dout = q.flip(1)
    if not packed:
        end = slice(-2, None)
        alone = results(q[end], q[end], q[end], dout[end], causal=True)
        return same(cut(results(q, q, q, dout, causal=True), end, end), alone)
    q, dout = q.flatten(0, 1), dout.flatten(0, 1)
    end = slice(-2 * length, None)
    cu = length * torch.arange(entries + 1, device=DEVICE, dtype=torch.int32)
    got = results(q, q, q, dout, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True)
    cu = cu[:3].clone()
    alone = results(*[q[end]] * 3, dout[end], cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True)
    return same(cut(got, end, (slice(None), end)), alone)


def far_keys() -> str:
    """Rows that see the last keys alone: the same as if there were no others."""
    q, dout = normal(1, 4096, 1, 128), normal(1, 4096, 1, 128)
    k = torch.ones(1, 2**24 + 4096, 1, 128, device=DEVICE, dtype=LOW)
    end = slice(-8192, None)
    k[:, end] = normal(1, 8192, 1, 128)
    window = {"window_size": (1000, 0)}
    got = results(q, k, k, dout, **window)
    alone = results(q, k[:, end], k[:, end], dout, **window)
    for name in ("dk", "dv"):
        if got[name][:, :-8192].count_nonzero():
            return f"{name} of keys that no row sees is not 0"
        got[name] = got[name][:, end]
    return same(got, alone)


def far_bias() -> str:
    q, dout = normal(130, 2048, 4, 32), normal(130, 2048, 4, 32)
    bias = normal(130, 4, 2048, 2048)
    end = slice(-1, None)
    alone = results(q[end], q[end], q[end], dout[end], bias[end])
    return same(cut(results(q, q, q, dout, bias), end, end), alone)


# ------------------------------------------------------------------ what does not show in random numbers


def probes() -> Iterator[Check]:
    windows = ((None, None), (0, 0), (5, 2), (None, 4), (100, None), (127, 1))
    for sq, sk in ((1, 1), (7, 19), (130, 65), (257, 900)):
        for align in tilewise.spec.ALIGNMENTS:
            for window in windows:
                options = {"window_size": window, "align": align}
                run = functools.partial(probe, sq, sk, options)
                yield Check(f"probe {sq}×{sk} {align} {window}", run)


def probe(sq: int, sk: int, options: dict[str, Any]) -> str:
    got, counts = testing.mask_probe(sq, sk, 64, "triton", torch.float16, DEVICE, **options)
    wrong = int((got.round() != counts).sum())
    return f"{wrong} counts differ" if wrong else ""


def hidden() -> Iterator[Check]:
    for dtype in (LOW, FP32):
        for value in (float("nan"), float("inf")):
            for name in hidden_keys():
                run = functools.partial(hidden_value, name, value, dtype)
                yield Check(f"{value} behind {name}, {short(dtype)}", run)
            run = functools.partial(hidden_tokens, value, dtype)
            yield Check(f"{value} in other sequences and past the last, {short(dtype)}", run)


def hidden_keys() -> dict[str, tuple[dict[str, Any], slice]]:
    """Options of 300 rows and 700 keys, and the keys that no row sees."""
    keys = torch.arange(700, device=DEVICE)
    gap = (keys >= 133) & (keys < 471)
    start, end = torch.tensor([[0]], device=DEVICE), torch.tensor([[350]], device=DEVICE)
    bias = torch.zeros(300, 700, device=DEVICE).masked_fill(gap, float("-inf"))
    return {
        "causal, top-left": ({"causal": True, "align": "top-left"}, slice(300, 700)),
        "window": ({"window_size": (50, 0)}, slice(0, 350)),
        "window, top-left": ({"window_size": (20, 30), "align": "top-left"}, slice(330, 700)),
        "key_range": ({"key_range": (start, end)}, slice(350, 700)),
        "mask": ({"mask": ~gap}, slice(133, 471)),
        "bias": ({"bias": bias}, slice(133, 471)),
    }


def hidden_value(name: str, value: float, dtype: torch.dtype) -> str:
    options, unseen = hidden_keys()[name]
    q, dout = normal(2, 300, 4, 64, dtype=dtype), normal(2, 300, 4, 64, dtype=dtype)
    k, v = normal(2, 700, 2, 64, dtype=dtype), normal(2, 700, 2, 64, dtype=dtype)
    found = []
    for filling in (0.0, value):
        k[:, unseen] = filling
        v[:, unseen] = filling
        found.append(results(q, k, v, dout, **options))
    return same(found[1], found[0])


def hidden_tokens(value: float, dtype: torch.dtype) -> str:
    cu = torch.tensor([0, 9, 9, 130, 400, 1000, 1037], device=DEVICE)
    number = torch.bucketize(torch.arange(1100, device=DEVICE), cu[1:], right=True)
    kept, spoilt = number % 2 == 0, (number % 2 == 1) | (number == 6)
    q, dout = normal(1100, 4, 64, dtype=dtype), normal(1100, 4, 64, dtype=dtype)
    found = []
    for filling in (0.0, value):
        q[spoilt] = filling
        dout[spoilt] = filling
        got = results(q, q, q, dout, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True)
        found.append(cut(got, kept, (slice(None), kept)))
    return same(found[1], found[0])


# ------------------------------------------------------------------ derivatives by differences


def derivatives() -> Iterator[Check]:
    for name in ("plain", "causal", "window", "all scores", "bias of keys", "dropout", "packed"):
        yield Check(f"gradcheck, {name}", functools.partial(differences, gradcheck, name))
        yield Check(f"gradgradcheck, {name}", functools.partial(differences, gradgradcheck, name))


def differences(check: Callable[..., bool], name: str) -> str:
    def leaf(*shape: int) -> Tensor:
        return normal(*shape, dtype=torch.float64).requires_grad_()

    packed = name == "packed"
    lead = (7,) if packed else (1, 5)
    given = {"q": leaf(*lead, 2, 3), "k": leaf(*lead, 1, 3), "v": leaf(*lead, 1, 2)}
    cu = torch.tensor([0, 3, 3, 6], device=DEVICE, dtype=torch.int32)
    more: dict[str, Any] = {
        "plain": {},
        "causal": {"causal": True, "align": "top-left"},
        "window": {"window_size": (2, 0)},
        "all scores": {
            "bias": leaf(2, 5, 5),
            "alibi_slopes": leaf(2),
            "sinks": leaf(2),
            "softcap": 2.0,
            "causal": True,
        },
        "bias of keys": {"bias": leaf(1, 1, 5)},
        "dropout": {"dropout_p": 0.3, "dropout_seed": 4},
        "packed": {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "causal": True},
    }[name]
    given |= more
    leaves = {name: t for name, t in given.items() if isinstance(t, Tensor) and t.requires_grad}
    function = tilewise.attention_varlen if packed else tilewise.attention

    def call(*values: Tensor) -> tuple[Tensor, Tensor]:
        named = dict(zip(leaves, values, strict=True))
        out, lse = function(**{**given, **named}, return_lse=True, backend="triton")
        return out, lse.masked_fill(lse == float("-inf"), 0)

    check(call, tuple(leaves.values()))  # raises where they differ
    return ""


# ------------------------------------------------------------------ how it is called


def calls() -> Iterator[Check]:
    yield Check("chosen without being asked for", chosen)
    yield Check("strides", strided)
    yield Check("large logits", large_logits)
    yield Check("replayed from a CUDA graph", functools.partial(replayed, False))
    yield Check("replayed from a CUDA graph, packed", functools.partial(replayed, True))
    yield Check("two streams at a time", two_streams)
    yield Check("many launches in a row", many_launches)
    yield Check("on another device than the current one", second_device)
    yield Check("torch.compile", compiled)


def chosen() -> str:
    q = normal(1, 200, 4, 128, dtype=FP32)
    choice = tilewise.explain(q, q, q, causal=True)
    return "" if choice.backend == "triton" else str(choice)


def strided() -> str:
    wrong = []
    projection = normal(2, 600, 3, 4, 64)
    for views in (
        [normal(2, 4, 600, 64).transpose(1, 2) for _ in range(3)],
        list(projection.unbind(2)),
        [projection[:, ::2, i, :, 3:50] for i in range(3)],
        [projection[:, :, i, :, ::2] for i in range(3)],
        [projection[:, :, 0, :1].expand(2, 600, 4, 64)] * 3,
    ):
        dense = [t.contiguous() for t in views]
        dout = torch.randn_like(dense[0])
        for options in ({}, {"window_size": (100, 5)}):
            wrong.append(same(results(*views, dout, **options), results(*dense, dout, **options)))
    return "; ".join(filter(None, wrong))


def large_logits() -> str:
    wrong = []
    for size in (30.0, 1000.0, 1e8):
        for scale in (None, 3.0):
            options = {"scale": scale, "causal": True}
            call = make_call(Case("", lambda make, o=options: o), FP32, DEVICE)
            call.arguments["q"] *= size
            with torch.no_grad():
                out = call.function(**call.arguments, backend="triton")
            gold, peer = testing.expect(call)
            verdict = testing.judge("out", out, gold["out"], peer["out"], FP32)
            wrong += [] if verdict.passed else [f"{size:g}, {scale}: {verdict}"]
    return "; ".join(wrong)


def on_a_gpu() -> None:
    if DEVICE == "cpu":
        raise NotHere("a GPU")


def replayed(packed: bool) -> str:
    """Forward and backward, then with other numbers, and other lengths, in the same memory."""
    on_a_gpu()
    shape = (1000, 4, 64) if packed else (2, 500, 4, 64)
    x = {name: normal(*shape) for name in ("q", "k", "v", "dout")}
    cu = torch.tensor([0, 300, 300, 900], device=DEVICE, dtype=torch.int32)
    options: dict[str, Any] = {"causal": True}
    options |= {"cu_seqlens_q": cu, "cu_seqlens_k": cu} if packed else {}
    kept: dict[str, Tensor] = {}
    replay = graphed(lambda: kept.update(results(**x, **options)))
    wrong = []
    for lengths in ([0, 300, 300, 900], [0, 1, 700, 1000]):
        cu.copy_(torch.tensor(lengths))
        for t in x.values():
            t.normal_()
        for t in kept.values():
            t.fill_(float("nan"))
        replay()
        torch.cuda.synchronize()
        wrong.append(same({n: t.clone() for n, t in kept.items()}, results(**x, **options)))
    return "; ".join(filter(None, wrong))


def two_streams() -> str:
    on_a_gpu()
    x = [normal(4, 1024, 8, 64) for _ in range(4)]
    wanted = results(*x, causal=True)
    torch.cuda.synchronize()
    found = []
    for stream in (torch.cuda.Stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            found += [results(*x, causal=True) for _ in range(10)]
    torch.cuda.synchronize()
    return "; ".join(sorted({line for got in found if (line := same(got, wanted))}))


def many_launches() -> str:
    wrong = set()
    for s in (64, 100, 1000):
        x = [normal(1, s, 4, 64) for _ in range(4)]
        wanted = results(*x, causal=True)
        wrong |= {same(results(*x, causal=True), wanted) for _ in range(100)}
    return "; ".join(filter(None, sorted(wrong)))


def second_device() -> str:
    if torch.cuda.device_count() < 2:
        raise NotHere("a second GPU")
    x = [normal(2, 600, 4, 64) for _ in range(4)]
    wrong = []
    with torch.cuda.device(0):
        for options in ({}, {"window_size": (100, 0)}, {"bias": normal(600, 600)}):
            there = {
                name: t.to("cuda:1") if isinstance(t, Tensor) else t for name, t in options.items()
            }
            got = results(*(t.to("cuda:1") for t in x), **there)
            wrong += [f"{name} is on {t.device}" for name, t in got.items() if t.device.index != 1]
            wrong.append(
                same({name: t.to("cuda:0") for name, t in got.items()}, results(*x, **options))
            )
    return "; ".join(filter(None, wrong))


def compiled() -> str:
    on_a_gpu()
    x = [normal(2, 300, 4, 64, dtype=FP32) for _ in range(3)]
    function = torch.compile(
        lambda q, k, v: tilewise.attention(q, k, v, causal=True, backend="triton"), fullgraph=True
    )
    leaves = [t.requires_grad_() for t in x]
    out = function(*leaves)
    got = dict(zip("qkv", torch.autograd.grad(out.sum(), leaves), strict=True))
    wanted = results(*x, torch.ones_like(out), causal=True)
    return same(
        {"out": out.detach(), **got}, {"out": wanted["out"], **{n: wanted[f"d{n}"] for n in got}}
    )


# ------------------------------------------------------------------ memory that is not its own


def memcheck() -> Iterator[Check]:
    yield Check("compute-sanitizer finds nothing", sanitized, CASES_TIME - 5)


def sanitized() -> str:
    on_a_gpu()
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(tool).exists():
        raise NotHere("compute-sanitizer")
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, __file__]
    command += ["--inside", "ragged"]
    # It does not see the borders of what PyTorch keeps for later.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    seconds = CASES_TIME - 10
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        raise NotHere(f"more time than {seconds:.0f} s") from None
    print(done.stdout[-20000:], done.stderr[-5000:], flush=True)
    clean = done.returncode == 0 and "ERROR SUMMARY: 0 errors" in done.stdout
    return "" if clean and "WRONG" not in done.stdout else done.stdout[-600:] + done.stderr[-600:]


def ragged() -> Iterator[Check]:
    """What the sanitizer looks at: odd lengths and widths, windows, grouped heads, biases, packed ones."""
    names = ("everything", "window", "head dim 17, value dim 96", "bias, full", "packed, bias")
    for case in CASES:
        if case.name in names:
            call = make_call(case, LOW, DEVICE)
            yield Check(str(case), functools.partial(ran, call))


def ran(call: Call) -> str:
    found = evaluate(call, "triton")
    return "" if all(not t.isnan().any() for t in found.values()) else "NaN"


# ------------------------------------------------------------------ running


OTHERS: dict[str, Callable[[], Iterator[Check]]] = {
    "large": large,
    "probes": probes,
    "hidden": hidden,
    "derivatives": derivatives,
    "calls": calls,
    "memcheck": memcheck,
}
# They start when `compile` has ended.
COMPILED_FOR = (*DTYPES, "memcheck")


def inside(part: str, skip: int) -> None:
    if part == "compile":
        compile_all()
    elif part in DTYPES:
        run_part(part, case_checks(DTYPES[part]), skip)
    else:
        run_part(part, {**OTHERS, "ragged": ragged}[part](), skip)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = ("compile", *DTYPES, *OTHERS)
    parser.add_argument("--parts", default=",".join(known), help=f"of {', '.join(known)}")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--skip", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        inside(given.inside, given.skip)
        return
    parts = given.parts.split(",")
    if unknown := set(parts) - set(known):
        parser.error(f"--parts must be of {', '.join(known)}, got {', '.join(sorted(unknown))}")
    run = Run(__file__, "triton-check", given.out)
    run.together([part for part in parts if part not in COMPILED_FOR], OTHERS_TIME)
    run.together([part for part in parts if part in COMPILED_FOR], CASES_TIME)
    print(run.summary())
    sys.exit(run.failed())


if __name__ == "__main__":
    main()
