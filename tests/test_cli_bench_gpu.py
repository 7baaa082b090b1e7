"""``tilewise bench gpu`` without a GPU: its cases, what it compares with, checks, rows and tables.

The device is the CPU, the backend that stands for kernels is the tiled one, packages are stand-ins, and
clocks say what the tests want. No time is asserted anywhere.
"""

from __future__ import annotations

import csv
import ctypes
import dataclasses
import lzma
import math
import multiprocessing
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_peers
import pytest
import torch
from rich.console import Console
from torch import Tensor
from typer.testing import CliRunner

import tilewise
from tilewise import spec
from tilewise.backends import tiled
from tilewise.cli import bench, bench_gpu, gpu_cases, gpu_report, gpu_sides
from tilewise.cli.__main__ import app
from tilewise.cli.bench_gpu import Outcome, Timing
from tilewise.cli.gpu_cases import PASSES, QUICK, USUAL, Case, Inputs
from tilewise.cli.gpu_sides import PEERS, Side
from tilewise.dispatch import BACKENDS
from tilewise.tuning import timing

CPU = torch.device("cpu")
TINY = dataclasses.replace(
    QUICK,
    tokens=64,
    width=64,
    head_dims=(16, 8),
    lengths=(16, 32),
    feature_length=40,
    window=7,
    bias_length=24,
    packed=(13, 5, 1, 9),
    eager=((2, 16),),
)
CASES = list(gpu_cases.cases(TINY))
# What compiles for long, and what a CPU does not have.
NOT_HERE = ("Flex", "cuDNN", "efficient")
WITHOUT = dict.fromkeys(NOT_HERE, "not here")


def numbered(case: Case) -> gpu_cases.Inputs:
    """Inputs that are the same in every run: the bench's are not."""
    return gpu_cases.make_inputs(case, lambda *shape: torch.randn(shape, dtype=gpu_cases.DTYPE))


@pytest.fixture(scope="module", autouse=True)
def _fa3() -> Iterator[None]:
    with fake_peers.fa3_operators():
        yield


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_peers.install(monkeypatch)
    monkeypatch.setattr(gpu_sides, "PLAIN", ("reference",))
    monkeypatch.setattr(bench_gpu, "graphed", lambda call: call)
    monkeypatch.setattr(bench_gpu, "medians", lambda calls, _: [made(call) for call in calls])
    monkeypatch.setattr(bench_gpu, "host_medians", lambda calls, _: [made(call) for call in calls])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)


def made(call: Callable[[], object]) -> float:
    call()
    return 0.5


def case(name: str, mask: str | int = "causal") -> Case:
    return next(c for c in CASES if c.name == name and (c.mask == mask or name == "window"))


def run(
    chosen: Case, passes: Sequence[str] = PASSES, missing: dict[str, str] = WITHOUT
) -> list[Outcome]:
    return list(bench_gpu.run(chosen, passes, missing, CPU))


# ------------------------------------------------------------------ cases


@pytest.mark.parametrize("sizes", [USUAL, QUICK])
def test_cases_are_those_of_the_record(sizes: gpu_cases.Sizes) -> None:
    cases = list(gpu_cases.cases(sizes))
    assert len(cases) == len(set(map(str, cases)))
    dense = [c for c in cases if c.name == "dense"]
    assert {(c.head_dim, c.length, c.mask) for c in dense} == {
        (d, s, mask) for d in (64, 128, 256) for s in sizes.lengths for mask in ("full", "causal")
    }
    assert all(c.batch * c.length == 16384 and c.heads * c.head_dim == 2048 for c in dense)
    assert all(("math" in c.peers) == (sizes is USUAL and c.length <= 2048) for c in dense[:4])
    by_name = {c.name: c for c in cases}
    assert (by_name["GQA"].heads, by_name["GQA"].kv_heads) == (32, 8)
    assert (by_name["window"].mask, by_name["window"].length) == (1024, 16384)
    assert by_name["bias"].peers[0] == "efficient"
    packed = by_name["varlen"]
    assert sum(packed.lengths) == packed.length == 16384
    assert [(c.batch, c.length) for c in cases if c.name == "eager"] == [(4, 128), (8, 512)]
    assert all(set(c.peers) <= set(PEERS) for c in cases)


@pytest.mark.parametrize("chosen", CASES, ids=str)
def test_flops_are_those_of_visible_pairs(chosen: Case) -> None:
    pairs = 0
    for sequence in spec.sequences(numbered(chosen).problem(chosen)):
        batch, rows, _, _ = sequence.problem.q.shape
        lo, hi = sequence.problem.interval(0, rows)
        pairs += batch * int((hi - lo).sum())
    if chosen.mask == "causal" and not chosen.lengths:
        pairs = chosen.batch * chosen.length**2 // 2
    forward = 4 * chosen.heads * chosen.head_dim * pairs
    assert chosen.flops("forward") == forward
    assert chosen.flops("backward") == 2.5 * forward
    assert chosen.flops("both") == 3.5 * forward


def test_inputs_are_fresh() -> None:
    first, second = (gpu_cases.random_inputs(CASES[0], CPU) for _ in range(2))
    assert not torch.equal(first.q, second.q)
    assert not torch.equal(first.q, first.k)


# ------------------------------------------------------------------ what is right


def by_autograd(chosen: Case, inputs: Inputs) -> dict[str, Tensor]:
    """Results of the stand-ins' formula, which is not the library's."""
    leaves = {n: t.double().requires_grad_() for n, t in inputs.differentiated.items()}
    window = (chosen.mask - 1, 0) if isinstance(chosen.mask, int) else (None, None)
    out = fake_peers.attention(
        *(leaves[name] for name in "qkv"),
        causal=chosen.mask == "causal",
        window=window,
        softcap=chosen.softcap or 0.0,
        slopes=inputs.alibi_slopes,
        bias=leaves.get("bias"),
        cu_seqlens=inputs.cu_seqlens,
    )
    grads = torch.autograd.grad(out, list(leaves.values()), inputs.dout.double())
    return {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}


@pytest.mark.parametrize("chosen", CASES, ids=str)
def test_the_formula_of_a_case(chosen: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_gpu, "BLOCK_SCORES", 300)  # several blocks of rows
    inputs = numbered(chosen)
    samples = bench_gpu.formula(chosen, inputs)
    right = by_autograd(chosen, inputs)
    assert bench_gpu.error_of(samples, right) < 1e-5
    for name, t in right.items():
        assert bench_gpu.error_of(samples, {**right, name: 1.01 * t}) == pytest.approx(
            0.01, rel=0.01
        )
        spoiled = t.clone(memory_format=torch.contiguous_format)
        spoiled.view(-1)[t.numel() // 2] = math.nan  # wherever it is
        assert bench_gpu.error_of(samples, {name: spoiled}) == math.inf
        last = t.clone()
        last[-1][..., -1, :] = 0  # of the last entry's last head
        assert bench_gpu.error_of(samples, {name: last}) > 1e-3
        for sample in samples:
            zeroed = t.clone()
            sample.of(name, zeroed).zero_()
            assert bench_gpu.error_of(samples, {name: zeroed}) > 0


def test_a_scale_that_is_wrong_by_a_hundredth_shows() -> None:
    chosen = Case("dense", 1, 512, 2, 2, 64)
    inputs = numbered(chosen)
    samples = bench_gpu.formula(chosen, inputs)
    call = Side(lambda q, k, v: tilewise.attention(q, k, v, scale=1.01 / 8))
    timing = bench_gpu.checked(call, inputs, samples, "both")
    assert timing.wrong
    assert "differs from the formula" in timing.reason
    right = bench_gpu.checked(Side(tilewise.attention), inputs, samples, "both")
    assert not right.reason
    assert right.error is not None
    assert 0 < right.error < bench_gpu.TOLERANCE / 1.5


def test_memory_that_results_may_get_is_poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = case("bias", "full")
    inputs = numbered(chosen)
    filled: list[tuple[torch.Size, float]] = []
    full_like = torch.full_like

    def recording(t: Tensor, value: float) -> Tensor:
        filled.append((t.shape, value))
        return full_like(t, value)

    monkeypatch.setattr(torch, "full_like", recording)
    samples = bench_gpu.formula(chosen, inputs)
    bench_gpu.checked(gpu_sides.ours("tiled")(chosen, inputs), inputs, samples, "both")
    shapes = [shape for shape, value in filled if math.isnan(value)]
    assert shapes == [t.shape for t in (inputs.q, *inputs.differentiated.values())]


# ------------------------------------------------------------------ sides


@pytest.mark.parametrize("chosen", CASES[2:14], ids=str)
def test_sides_compute_the_case(chosen: Case) -> None:
    inputs = numbered(chosen)
    samples = bench_gpu.formula(chosen, inputs)
    names = [name for name in (*chosen.peers, "math") if name not in NOT_HERE]
    if chosen.name not in ("dense", "GQA", "eager"):
        names.remove("math")
    makers = {name: PEERS[name] for name in names} | {"ours": gpu_sides.ours("tiled")}
    for name, make in makers.items():
        side = make(chosen, inputs)
        for when in PASSES:
            assert not bench_gpu.checked(side, inputs, samples, when).reason, (name, when)


@pytest.fixture
def _traced_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Graphs are traced, and run as they are."""
    lookup = torch._dynamo.lookup_backend
    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: lookup("eager"))
    with torch._functorch.config.patch(donated_buffer=True):
        yield


@pytest.mark.usefixtures("_traced_only")
@pytest.mark.parametrize(
    "chosen",
    [
        Case("all", 2, 40, 4, 2, 16, 7, softcap=2.0, alibi=True, bias=True),
        Case("varlen", 4, 28, 2, 2, 16, "causal", lengths=(13, 5, 1, 9)),
    ],
    ids=str,
)
def test_flex_computes_the_case(chosen: Case) -> None:
    inputs = numbered(chosen)
    side = PEERS["Flex"](chosen, inputs)
    assert not side.compiled()
    samples = bench_gpu.formula(chosen, inputs)
    assert not bench_gpu.checked(side, inputs, samples, "forward").reason
    assert side.compiled()


def test_flex_that_runs_uncompiled_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[Any] = []

    def compile_nothing(function: Any, **options: Any) -> Any:
        order.append((options.get("dynamic"), options.get("fullgraph")))
        return function

    monkeypatch.setattr(torch, "compile", compile_nothing)
    monkeypatch.setattr(torch._dynamo, "reset", lambda: order.append("reset"))
    with torch._functorch.config.patch(donated_buffer=True):
        (outcome,) = run(CASES[0], ["forward"], dict.fromkeys(set(PEERS) - {"Flex"}, ""))
    # The recompile limit is never near, and where it is hit nothing runs uncompiled in silence.
    assert order[:2] == ["reset", (False, True)]
    assert outcome.peers["Flex"].reason == "RuntimeError: it ran without being compiled"
    assert not outcome.failed


def test_what_is_missing_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert gpu_sides.missing_peers() == {}
    for name in ("flash_attn", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, name, None)
    missing = gpu_sides.missing_peers(tmp_path)
    assert missing["flash-attn"] == "not installed"
    assert "libcudart.so.12" in missing["FA3"]
    assert set(missing) == {"flash-attn", "FA3"}
    assert gpu_sides.missing_peers()["FA3"] == "not installed"


def test_fa3_is_unpacked_and_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "fa3.so.xz").write_bytes(lzma.compress(b"a library"))
    loaded: list[Any] = []
    monkeypatch.setattr(ctypes, "CDLL", lambda path, mode: loaded.append(path))
    monkeypatch.setattr(
        torch.ops, "load_library", lambda path: loaded.append(Path(path).read_bytes())
    )
    assert "FA3" not in gpu_sides.missing_peers(tmp_path)
    assert loaded == [str(tmp_path / "libcudart.so.12"), b"a library"]


# ------------------------------------------------------------------ a run


def test_a_case_is_run() -> None:
    chosen = case("dense")
    outcomes = run(chosen)
    assert [outcome.when for outcome in outcomes] == list(PASSES)
    for outcome in outcomes:
        assert list(outcome.ours) == ["tiled"]
        assert list(outcome.peers) == [n for n in chosen.peers if n not in NOT_HERE]
        for t in (*outcome.ours.values(), *outcome.peers.values()):
            assert t.milliseconds == 0.5
            assert t.error is not None
            assert t.error < bench_gpu.TOLERANCE
        assert not outcome.failed


def test_a_backend_without_a_backward_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled, "gradients_left_to", lambda problem: "reference", raising=False)
    forward, backward, both = run(case("dense"))
    assert list(forward.ours) == list(both.ours) == ["tiled"]
    assert backward.ours == {}
    assert not backward.failed


def side_of(change: Callable[..., Tensor]) -> gpu_sides.Make:
    return lambda chosen, inputs: Side(
        lambda q, k, v: change(tilewise.attention(q, k, v, causal=True))
    )


def fails(out: Tensor) -> Tensor:
    raise RuntimeError("no such instruction\nmore of it")


def unavailable(chosen: Case, inputs: Inputs) -> Side:
    raise ImportError("another version")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (side_of(lambda out: 1.02 * out), "differs from the formula by 2."),
        (side_of(lambda out: out * math.nan), "differs from the formula by inf"),
        (side_of(fails), "RuntimeError: no such instruction"),
        (unavailable, "ImportError: another version"),
    ],
)
def test_a_side_that_is_wrong_or_does_not_run(
    make: gpu_sides.Make, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PEERS, "FA4", make)
    (outcome,) = run(case("dense"), ["both"])
    peer = outcome.peers["FA4"]
    assert peer.reason.startswith(reason)
    assert peer.milliseconds is None
    assert not outcome.failed
    assert outcome.ours["tiled"].milliseconds == 0.5
    rows = {row["peer"]: row for row in gpu_report.rows(outcome)}
    assert rows["FA4"]["check"] == "ok"
    assert rows["FA4"]["peer ms"] == rows["FA4"]["ratio"] == ""
    assert rows["FA4"]["note"] == f"FA4: {peer.reason}"
    assert rows["FA3"]["ratio"] == "1.000"

    monkeypatch.setattr(bench_gpu, "ours", lambda name: make)
    (outcome,) = run(case("dense"), ["both"])
    assert outcome.failed
    assert outcome.ours["tiled"].reason.startswith(reason)
    row = next(gpu_report.rows(outcome))
    assert row["check"] == ("WRONG" if "differs" in reason else "failed")
    assert row["ms"] == row["ratio"] == ""


def test_what_cannot_be_captured_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def graphed(call: Callable[[], object]) -> Callable[[], object]:
        if len(tried) == 1:
            tried.append(call)
            raise RuntimeError("operation not permitted when stream is capturing")
        tried.append(call)
        return call

    tried: list[Callable[[], object]] = []
    monkeypatch.setattr(bench_gpu, "graphed", graphed)
    (outcome,) = run(case("dense"), ["backward"])
    first, *others = outcome.peers
    assert outcome.peers[first].eager
    assert outcome.peers[first].milliseconds == 0.5
    assert not any(outcome.peers[name].eager for name in others)
    eager = [row["eager"] for row in gpu_report.rows(outcome)]
    assert eager == [first] + [""] * len(others)


def test_short_calls_are_never_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        calls.append(1)
        return tilewise.attention(q, k, v, causal=True)

    monkeypatch.setattr(bench_gpu, "graphed", None)
    monkeypatch.setitem(PEERS, "FA4", lambda chosen, inputs: Side(counted))
    (outcome,) = run(case("eager"), ["forward"])
    peer = outcome.peers["FA4"]
    assert peer.eager
    assert peer.milliseconds == 0.5 / bench_gpu.CALLS
    assert len(calls) == 1 + bench_gpu.CALLS
    row = next(gpu_report.rows(outcome))
    assert row["TFLOP/s"] == ""


def test_what_fails_while_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(calls: object, milliseconds: float) -> list[float]:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(bench_gpu, "medians", broken)
    (outcome,) = run(case("dense"), ["forward"])
    assert outcome.ours["tiled"].reason == "OutOfMemoryError: no room"
    monkeypatch.setattr(bench_gpu, "formula", broken)
    outcomes = run(case("dense"))
    assert [outcome.when for outcome in outcomes] == list(PASSES)
    assert all(outcome.failed for outcome in outcomes)


def test_a_run_ends_in_time_and_with_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def run_all(seconds: float = math.inf) -> list[Outcome]:
        cases = [c._replace(peers=("FA4", "FA3")) for c in CASES[:2]]
        return list(bench_gpu.run_all(cases, ["forward"], CPU, seconds, 0, None, said.append))

    assert run_all(0.0) == []
    assert len(run_all()) == 2
    assert said == []
    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)
    assert len(run_all()) == 2
    assert said == ["without FA4: not installed"] * 1

    def silent(device: object = None) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", silent)
    monkeypatch.setattr(bench_gpu, "ours", lambda name: side_of(fails))
    assert len(run_all()) == 1
    assert (
        said[-1]
        == "the GPU no longer answers: RuntimeError: an illegal memory access was encountered"
    )


# ------------------------------------------------------------------ compiling ahead


class Answer:
    def __init__(self, after: int) -> None:
        self.after = after

    def ready(self) -> bool:
        self.after -= 1
        return self.after < 0


def test_workers_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [Answer(n) for n in (0, 1, 3)]
    bench_gpu.wait_for(answers, math.inf)
    assert all(answer.after < 0 for answer in answers)
    bench_gpu.wait_for([Answer(10**9)], time.monotonic() + 0.05)
    monkeypatch.setattr(bench_gpu, "PATIENCE", 0.05)
    bench_gpu.wait_for([Answer(10**9), Answer(1)], math.inf)


def test_what_workers_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[Any] = []

    class Pool:
        def __init__(self, workers: int, initializer: object) -> None:
            assert workers == 3

        def __enter__(self) -> Pool:
            return self

        def __exit__(self, *error: object) -> None:
            jobs.append("ended")

        def apply_async(self, function: object, job: tuple[Any, ...]) -> Answer:
            assert function is bench_gpu.make_calls
            jobs.append(pickle.loads(pickle.dumps(job)))
            return Answer(0)

    context = SimpleNamespace(Pool=Pool)
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: context)
    chosen = [case("dense"), case("window")._replace(peers=("FA3",))]
    with bench_gpu.compiling_ahead(chosen, ("forward",), CPU, 3, 100.0) as wait:
        wait()
    kernels = [name for name in BACKENDS if name not in ("tiled", "reference")]
    assert {"triton"} <= set(kernels)
    names = [(0, "Flex"), *((n, name) for n in (0, 1) for name in kernels)]
    assert jobs == [*((chosen[n], name, ("forward",), CPU) for n, name in names), "ended"]


def test_what_workers_do(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def side(chosen: Case, inputs: Inputs) -> Side:
        return Side(lambda q, k, v: ran.append("call") or q * k * v)  # type: ignore[func-returns-value]

    monkeypatch.setitem(PEERS, "FA4", side)
    bench_gpu.make_calls(CASES[0], "FA4", ("forward", "backward"), CPU)
    assert ran == ["call", "call"]
    monkeypatch.setattr(bench_gpu, "ours", lambda name: ran.append(name) or side)
    bench_gpu.make_calls(CASES[0], "tiled", ("both",), CPU)
    bench_gpu.make_calls(CASES[0], "triton", ("both",), CPU)  # does not serve a CPU
    assert ran == ["call", "call", "tiled", "call"]
    monkeypatch.setattr(tiled, "gradients_left_to", lambda problem: "reference", raising=False)
    bench_gpu.make_calls(CASES[0], "tiled", ("backward",), CPU)  # is not its own
    assert ran[4:] == ["tiled"]


def test_the_clock_takes_calls_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    order: list[str] = []

    def call(name: str, seconds: float) -> Callable[[], None]:
        def made() -> None:
            nonlocal now
            now += seconds
            order.append(name)

        return made

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    times = timing.host_medians([call("a", 0.001), call("b", 0.002)], 12.0)
    assert times == pytest.approx([1.0, 2.0])
    assert "".join(order) == "ab" * 2 + "abba" * 3  # one to warm up, one to see how long it takes


# ------------------------------------------------------------------ what is shown


def outcome_of(chosen: Case, when: str, ours: Any, peers: Any) -> Outcome:
    sides = (
        {name: t if isinstance(t, Timing) else Timing(t, 2e-3) for name, t in side.items()}
        for side in (ours, peers)
    )
    return Outcome(chosen, when, *sides)


def shown(outcomes: Sequence[Outcome], capsys: pytest.CaptureFixture[str]) -> str:
    console = Console(width=bench.MAX_COLUMNS, highlight=False, markup=False)
    gpu_report.show(console, outcomes)
    return capsys.readouterr().out


def test_the_widest_tables_fit(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = case("dense")._replace(length=16384, head_dim=256, batch=1, heads=8, kv_heads=8)
    time_of_1040 = chosen.flops("backward") / 1040 / 1e9
    kernels = [name for name in BACKENDS if name not in ("tiled", "reference")]
    peers = [name for name in PEERS if name != "SDPA"]
    slow = Timing(time_of_1040, 2e-3, eager=True)
    outcomes = [
        outcome_of(chosen, when, dict.fromkeys(kernels, slow), dict.fromkeys(peers, slow))
        for when in PASSES
    ]
    eager = case("eager")
    times = dict.fromkeys(kernels, 0.1234), dict.fromkeys(eager.peers, 0.1234)
    outcomes.append(outcome_of(eager, "backward", *times))
    output = shown(outcomes, capsys)
    assert max(map(len, output.splitlines())) <= 100
    assert "…" not in output
    assert output.count("1040*") == len(kernels) + len(peers)
    assert output.count("123.4") == len(kernels) + len(eager.peers)
    assert "*: called from Python" in output


def test_tables_say_what_is_best_and_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    chosen, window = case("dense"), case("window")
    wrong, broken = Timing(error=0.5, reason="differs"), Timing(reason="RuntimeError: no")
    outcomes = [
        outcome_of(chosen, "forward", {"triton": 2.0, "hopper": 1.0}, {"FA3": 3.0, "Flex": 1.5}),
        outcome_of(window, "forward", {"triton": wrong}, {"FA3": 3.0, "Flex": broken}),
        outcome_of(chosen, "forward", {"triton": 1.0}, {"FA3": 3.0, "Flex": broken}),
    ]
    lines = shown(outcomes, capsys).splitlines()
    header = next(line.split() for line in lines if line.startswith("case"))
    assert header == ["case", "mask", "D", "S", "hopper", "triton", "Flex", "FA3", "ratio"]
    first, second, third = (
        line.split() for line in lines if line.split()[:1] in (["dense"], ["window"])
    )
    assert first[:4] == ["dense", "causal", "16", "16"]
    assert first[-1] == "1.50"
    assert second[:2] == ["window", "7"]
    assert second[4:] == ["WRONG", "–", second[-1]]
    assert third[-1] == "3.00"
    assert f"triton: differs ({window} forward)" in lines
    assert f"Flex: RuntimeError: no ({window} forward and 1 more)" in lines


def test_plots(tmp_path: Path) -> None:
    outcomes = [o for chosen in CASES[:4] for o in run(chosen, ["forward", "both"])]
    paths = gpu_report.write_plots(tmp_path / "new", outcomes)
    assert [path.name for path in paths] == ["forward.png", "both.png"]
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in paths)
    curves = gpu_report._curves(
        [o for o in outcomes if o.when == "forward" and o.case.mask == "full"]
    )
    assert {name: list(points) for name, points in curves.items()}["FA3"] == [16, 32]
    assert set(curves) == {"tiled", *CASES[0].peers} - set(NOT_HERE)


# ------------------------------------------------------------------ the command


@pytest.fixture
def _command(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHINDUCTOR_COMPILE_THREADS", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(bench, "_gpu", lambda command: CPU)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(gpu_cases, "QUICK", TINY)
    for name in NOT_HERE:
        monkeypatch.setitem(PEERS, name, unavailable)


def invoke(*options: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["bench", "gpu", *options])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


@pytest.mark.usefixtures("_command")
def test_a_command_writes_and_shows(tmp_path: Path) -> None:
    file, folder = tmp_path / "gpu.csv", tmp_path / "plots"
    options = ("--quick", "--only", "S=32 causal", "--workers", "0")
    code, output = invoke(*options, "--csv", str(file), "--plot", str(folder))
    assert code == 0, output
    rows = list(csv.DictReader(file.open(encoding="utf-8")))
    columns = (
        "date,GPU,driver,torch,triton,tilewise,command,case,dtype,B,S,H,Hkv,D,mask,pass,backend"
    )
    expected = f"{columns},ms,TFLOP/s,peer,peer ms,ratio,error,eager,check,note"
    assert ",".join(rows[0]) == expected
    assert len(rows) == 2 * 2 * len(TINY.dense_peers)  # two head dims, two passes
    for row in rows:
        assert row["command"] == "tilewise bench gpu --quick --only 'S=32 causal'"
        assert (row["GPU"], row["torch"]) == ("a GPU", torch.__version__)
        assert (row["case"], row["dtype"], row["mask"]) == ("dense", "bfloat16", "causal")
        assert (row["B"], row["S"], int(row["H"]) * int(row["D"])) == ("2", "32", 64)
        assert (row["backend"], row["ms"], row["check"]) == ("tiled", "0.5000", "ok")
        assert row["ratio"] == ("" if row["peer"] in NOT_HERE else "1.000")
        assert float(row["error"]) < bench_gpu.TOLERANCE
    assert "tilewise " in output
    assert "a GPU" in output
    assert "forward, TFLOP/s" in output
    assert "backward, TFLOP/s" in output
    assert f"Written: {folder / 'forward.png'}" in output.replace("\n", "")


@pytest.mark.usefixtures("_command")
def test_a_wrong_result_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_gpu, "ours", lambda name: side_of(lambda out: 1.02 * out))
    options = ("--quick", "--workers", "0", "--passes", "forward", "--only", "S=32 causal")
    code, output = invoke(*options)
    assert code == 1
    assert "WRONG" in output


@pytest.mark.usefixtures("_command")
def test_what_there_was_no_time_for() -> None:
    code, output = invoke("--quick", "--workers", "0", "--only", "window", "--seconds", "0")
    assert code == 1
    text = " ".join(output.split())
    assert f"Not measured, 2 of 2: {case('window')} forward; {case('window')} backward" in text


@pytest.mark.usefixtures("_command")
def test_an_interrupted_run_shows_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any) -> Iterator[Outcome]:
        yield run(case("dense"), ["forward"])[0]
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_gpu, "run_all", interrupted)
    code, output = invoke("--quick", "--only", "dense")
    assert code != 0
    assert "forward, TFLOP/s" in output
    assert "Not measured" in output


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--passes", "forward,sideways"), "sideways"),
        (("--only", "no such case"), "no such case"),
        (("--fa3", "no/such/folder"), "no/such/folder"),
    ],
)
def test_bad_options(options: tuple[str, str], named: str) -> None:
    code, output = invoke(*options)
    assert code == 2
    assert options[0] in output
    assert named in output


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="needs an NVIDIA GPU"):
        invoke("--quick")
