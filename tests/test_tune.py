"""The search for tiles, without a GPU: what is tried, how winners are chosen, what is written."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tilewise.backends import reference
from tilewise.backends import triton as backend
from tilewise.cli import tune as cli
from tilewise.cli.__main__ import app
from tilewise.tuning import search, timing
from tilewise.tuning.compiling import Report, cuda_target
from tilewise.tuning.config import (
    MASKS,
    OPERATIONS,
    Config,
    Key,
    config_for,
    heuristic,
    read_table,
    write_table,
)

HOPPER_SHARED = 232448
KEY = Key("forward", 16, 128, "band", "long")
ALL_KEYS = search.keys(bits=tuple(search.DTYPES))


# ------------------------------------------------------------------ what there is to try


def test_keys_are_all_there_and_common_ones_come_first() -> None:
    # Of 4 operations and 3 masks all but the bias in the two masks without one.
    assert len(ALL_KEYS) == len(set(ALL_KEYS)) == 3 * 6 * 2 * (4 * 3 - 2)
    assert {key.mask for key in ALL_KEYS if key.operation == "bias"} == {"general"}
    assert ALL_KEYS[0] == Key("forward", 16, 128, "full", "long")
    last_common = max(i for i, key in enumerate(ALL_KEYS) if key[1:4] == (16, 256, "general"))
    assert last_common < ALL_KEYS.index(Key("forward", 16, 32, "full", "long"))
    assert search.keys(("keys",), (32,), (64,), ("band",), ("short",)) == [
        Key("keys", 32, 64, "band", "short")
    ]


@pytest.mark.parametrize("bits", search.DTYPES)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_candidates_are_few_and_fit(operation: str, bits: int) -> None:
    for key in search.keys((operation,), (bits,)):
        few_that_fit(key)


def few_that_fit(key: Key) -> None:
    found = search.candidates(key, HOPPER_SHARED)
    assert heuristic(key) in found
    assert len(found) == len(set(found)) <= 60
    for config in set(found) - {heuristic(key)}:
        assert search.shared_bytes(key, config) <= HOPPER_SHARED
        assert search.registers(key, config) <= 224
        assert (config.block_k if key.operation == "keys" else config.block_q) >= 32
    small = search.candidates(key, 100 * 1024)
    assert set(small) <= set(found)
    assert all(search.shared_bytes(key, c) <= 100 * 1024 for c in small if c != heuristic(key))


def test_candidates_know_what_spills() -> None:
    # From ptxas for sm_90: no spill, no spill, 3.5 KB of spills.
    assert Config(128, 128, 8, 3) in search.candidates(KEY, HOPPER_SHARED)
    queries, keys = KEY._replace(operation="queries"), KEY._replace(operation="keys")
    assert Config(64, 64, 4, 1) in search.candidates(queries, HOPPER_SHARED)
    assert Config(128, 128, 8, 1) not in search.candidates(keys, HOPPER_SHARED)


@pytest.mark.parametrize(
    ("operation", "config", "measured"),
    [
        ("forward", Config(128, 128, 8, 3), 230400),
        ("queries", Config(128, 128, 8, 3), 263168),
        ("keys", Config(128, 128, 8, 3), 264192),
        ("keys", Config(64, 64, 4, 1), 65536),
    ],
)
def test_shared_memory_is_foreseen(operation: str, config: Config, measured: int) -> None:
    assert abs(search.shared_bytes(KEY._replace(operation=operation), config) - measured) <= 2048


def test_registers_of_queries_and_keys_mirror_each_other() -> None:
    tall, wide = Config(128, 32, 4, 1), Config(32, 128, 4, 1)
    for operation, owner in (("queries", tall), ("keys", wide)):
        key = KEY._replace(operation=operation)
        other = wide if owner == tall else tall
        assert search.registers(key, owner) > search.registers(key, other)
    general = KEY._replace(mask="general")
    assert search.registers(general, tall) > search.registers(KEY, tall)


# ------------------------------------------------------------------ what is computed


def test_problems_are_looked_up_under_their_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Key] = []

    def recording(device: str, wanted: Key) -> Config:
        asked.append(wanted)
        return heuristic(wanted)

    monkeypatch.setattr(backend, "config_for", recording)
    for key in ALL_KEYS:
        backend._config(search.problem_for(key, torch.empty, "meta"), key.operation)
    assert asked == ALL_KEYS


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Problems of a few rows, computed by the reference; a "graph" is the call, timed by its tile."""
    monkeypatch.setattr(search, "TOKENS", 64)
    monkeypatch.setattr(search, "WIDTH", 32)
    monkeypatch.setattr(search, "LENGTHS", {"long": 32, "short": 16})
    monkeypatch.setattr(search, "LONGEST_BIAS", 24)
    monkeypatch.setattr(search, "graphed", lambda call: call)
    monkeypatch.setattr(search, "medians", lambda calls, _: [1.0 + i for i in range(len(calls))])


WRONG, BROKEN = Config(16, 16, 8, 1), Config(16, 16, 8, 2)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("factor", [1.1, float("nan")])
def test_a_workbench_leaves_out_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, operation: str, factor: float
) -> None:
    key = Key(operation, 32, 16, "general", "short")

    def spoiled(t: torch.Tensor, name: str) -> torch.Tensor:
        config = config_for("a device", key._replace(operation=name))
        if config == BROKEN:
            raise RuntimeError("out of resources")
        return t * factor if config == WRONG else t

    def forward(problem: Any) -> Any:
        result = reference.forward(problem)
        return result._replace(lse=spoiled(result.lse, "forward"))

    def backward(*arguments: Any, wanted: Any) -> Any:
        g = reference.backward(*arguments, wanted)
        assert (g.scores.bias is not None) == (operation == "bias")
        bias = g.scores.bias if g.scores.bias is None else spoiled(g.scores.bias, "bias")
        scores = g.scores._replace(bias=bias)
        return g._replace(q=spoiled(g.q, "queries"), v=spoiled(g.v, "keys"), scores=scores)

    monkeypatch.setattr(search, "backend", SimpleNamespace(forward=forward, backward=backward))
    reasons: dict[Config, str] = {}
    bench = search.Workbench(key, torch.device("cpu"), reasons.__setitem__)
    right, also_right = Config(32, 32, 4, 1), Config(32, 32, 4, 2)
    times = bench([WRONG, right, BROKEN, also_right], 1.0)
    assert times == {right: 1.0, also_right: 2.0}
    assert list(reasons) == [WRONG, BROKEN]
    assert "differs" in reasons[WRONG]
    assert "out of resources" in reasons[BROKEN]
    assert not torch.are_deterministic_algorithms_enabled()


def test_new_memory_is_poisoned() -> None:
    with search.poisoned():
        for t in (
            torch.empty(1000),
            torch.ones(1).new_empty(1000),
            torch.empty_like(torch.ones(9)),
        ):
            assert bool(t.isnan().all())


# ------------------------------------------------------------------ compiling


class Answer:
    def __init__(self, report: Report | str | None) -> None:
        self.report = report

    def ready(self) -> bool:
        return self.report is not None

    def get(self) -> Report | str:
        assert self.report is not None
        return self.report


class Pool:
    """Answers at once; None is an answer that never comes."""

    def __init__(self, answer: Callable[[Key, Config], Report | str | None]) -> None:
        self.answer = answer
        self.asked: list[tuple[Key, Config]] = []

    def apply_async(self, function: Any, job: tuple[Any, ...]) -> Answer:
        assert function is search.compiled
        key, config, target = job
        assert target.arch == 90
        self.asked.append((key, config))
        return Answer(self.answer(key, config))


def good(key: Key, config: Config) -> Report:
    return Report("kernel", 255, 1000, 0, ())


def test_a_compiler_drops_what_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "PATIENCE", 0.05)
    answers: dict[int, Report | str | None] = {
        1: good(KEY, Config(1, 1, 1, 1)),
        2: Report("kernel", 255, HOPPER_SHARED + 1, 0, ()),
        3: Report("kernel", 255, HOPPER_SHARED, 1025, ()),
        4: Report("kernel", 255, HOPPER_SHARED, 1024, ()),
        5: "CompilationError: no",
        6: None,
    }
    pool = Pool(lambda key, config: answers[config.num_stages])
    configs = [Config(16, 16, 4, n) for n in answers]
    compiler = search.Compiler(cuda_target(90), HOPPER_SHARED, pool)
    compiler.ask(KEY, configs[:2])
    compiler.ask(KEY, configs)
    assert pool.asked == [(KEY, config) for config in configs]  # each once
    assert [config.num_stages for config in compiler.usable(KEY, configs)] == [1, 4]


def test_a_worker_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    key = Key("forward", 16, 16, "full", "long")
    right, wrong = Config(16, 16, 4, 1), Config(16, 17, 4, 1)
    with search.compiler(cuda_target(90), HOPPER_SHARED, workers=1) as compiler:
        compiler.ask(key, [right, wrong])
        assert compiler.usable(key, [right, wrong]) == [right]
    assert len(list(tmp_path.rglob("forward_kernel.cubin"))) == 1


# ------------------------------------------------------------------ the choice


def timer(times: dict[Config, float], again: dict[Config, float] | None = None) -> search.Measure:
    """Times of a first, brief look and of the final one; what is not there does not run."""

    def measure(configs: Sequence[Config], milliseconds: float) -> dict[Config, float]:
        source = {**times, **(again or {})} if milliseconds == search.LONG else times
        return {config: source[config] for config in configs if config in source}

    return measure


def configs_of(count: int) -> list[Config]:
    return [Config(64, 64, 4, n) for n in range(1, count + 1)]


def test_the_final_round_decides() -> None:
    tried = configs_of(8)
    baseline = heuristic(KEY)
    times = {config: float(i) for i, config in enumerate(tried, 1)} | {baseline: 20.0}
    winner = search.fastest(KEY, tried, timer(times, {tried[0]: 3.5, tried[4]: 1.5, tried[5]: 0.1}))
    # The sixth was not among the best five of the first round.
    assert winner == search.Winner(KEY, tried[4], 1.5, 20.0, 8)
    assert winner.speedup == 20 / 1.5


def test_the_heuristic_may_win() -> None:
    tried = configs_of(3)
    times = dict.fromkeys(tried, 2.0) | {heuristic(KEY): 1.0}
    assert search.fastest(KEY, tried, timer(times)).config == heuristic(KEY)


def test_what_does_not_run_is_not_chosen() -> None:
    tried = configs_of(3)
    winner = search.fastest(KEY, tried, timer({tried[1]: 1.0, heuristic(KEY): 2.0}))
    assert (winner.config, winner.timed) == (tried[1], 1)
    with pytest.raises(RuntimeError, match="heuristic"):
        search.fastest(KEY, tried, timer({tried[1]: 1.0}))


def test_a_search_goes_on_after_a_failure_and_ends_in_time() -> None:
    keys = search.keys(head_dims=(64,), masks=("full",), lengths=("long",))
    tried = {key: [heuristic(key), Config(32, 64, 4, 1), Config(32, 64, 4, 2)] for key in keys}
    compiler = search.Compiler(cuda_target(90), HOPPER_SHARED, Pool(good))

    def workbench(key: Key) -> search.Measure:
        if key.operation == "queries":
            raise torch.OutOfMemoryError("no room")
        return timer({config: 1.0 + config.num_stages for config in tried[key]})

    done: list[int] = []
    outcomes = list(search.search(tried, compiler, workbench, done.append))
    assert [outcome.key for outcome in outcomes] == keys
    assert [outcome.winner is None for outcome in outcomes] == [False, True, False]
    assert "no room" in outcomes[1].note
    assert sum(done) == 6  # those of the key that failed are not counted
    # Heuristics are compiled first: every pass has them in it.
    assert compiler._pool.asked[:3] == [(key, heuristic(key)) for key in keys]
    assert list(search.search(tried, compiler, workbench, deadline=time.monotonic())) == []


def test_candidates_that_do_not_compile_are_not_timed() -> None:
    bad = configs_of(2)[1]
    pool = Pool(lambda key, config: "no" if config == bad else good(key, config))
    compiler = search.Compiler(cuda_target(90), HOPPER_SHARED, pool)
    times = {bad: 1.0, configs_of(1)[0]: 2.0, heuristic(KEY): 3.0}
    done: list[int] = []
    tried = {KEY: [heuristic(KEY), *configs_of(2)]}
    (outcome,) = search.search(tried, compiler, lambda key: timer(times), done.append)
    assert outcome.winner == search.Winner(KEY, configs_of(1)[0], 2.0, 3.0, 2)
    assert sum(done) == 3


def test_rounds() -> None:
    assert timing.rounds_within(10.0, 1.0) == 10
    assert timing.rounds_within(10.0, 100.0) == timing.FEWEST_ROUNDS
    assert timing.rounds_within(10.0, 1e-3) == timing.MOST_ROUNDS
    assert timing.rounds_within(10.0, 0.0) == timing.MOST_ROUNDS


# ------------------------------------------------------------------ the table and the command


def test_a_table_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "a-gpu.json"
    assert read_table(path) == {}
    configs = {key: search.candidates(key, HOPPER_SHARED)[-1] for key in ALL_KEYS}
    write_table(path, configs, {"device": "a “GPU”"})
    assert read_table(path) == configs


@pytest.mark.parametrize(
    "content",
    ["", "no table", "[1]", "{}", '{"configs": 3}', '{"configs": [{"key": {"bits": 16}}]}'],
)
def test_a_file_that_is_no_table_is_refused_before_anything_is_tuned(
    tmp_path: Path, content: str
) -> None:
    path = tmp_path / "a-gpu.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"a-gpu\.json holds no table of tiles"):
        cli.Recorder(path, {})
    assert path.read_text() == content


def fake_run(path: Path, keys: Sequence[Key], measure: search.Measure) -> None:
    tried = {key: configs_of(4) for key in keys}
    compiler = search.Compiler(cuda_target(90), HOPPER_SHARED, Pool(good))
    recorder = cli.Recorder(path, cli.about("a GPU"))
    cli.run(tried, compiler, lambda key, failed: measure, recorder, float("inf"))


def test_a_run_writes_keeps_and_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new folder" / "a-gpu.json"
    key = Key("queries", 16, 128, "general", "short")
    times = {config: 1000.0 / config.num_stages for config in configs_of(4)}
    fake_run(path, [KEY], timer(times | {heuristic(KEY): 999.0}))
    fake_run(path, [key], timer(times | {heuristic(key): 12345.678}))
    assert read_table(path) == {KEY: Config(64, 64, 4, 4), key: Config(64, 64, 4, 4)}
    output = capsys.readouterr()
    lines = [line for line in output.out.splitlines() if not line.startswith("Written: ")]
    assert max(map(len, lines)) <= 100
    assert "64×64" in output.out
    assert "49.38" in output.out
    assert "[1/1] queries 16 bits D=128 general short" in output.err
    assert f"Written: {path}" in output.out


def test_an_interrupted_run_keeps_what_it_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a-gpu.json"
    usual = timer(dict.fromkeys((*configs_of(4), heuristic(KEY)), 1.0))
    calls: Iterator[int] = iter(range(100))

    def measure(configs: Sequence[Config], milliseconds: float) -> dict[Config, float]:
        if next(calls) == 7:
            raise KeyboardInterrupt
        return usual(configs, milliseconds)

    with pytest.raises(KeyboardInterrupt):
        fake_run(path, [KEY, KEY._replace(length="short")], measure)
    assert list(read_table(path)) == [KEY]
    assert "Not tuned: 1 of 2" in capsys.readouterr().out


def invoke(*options: str) -> tuple[int, str, BaseException | None]:
    result = CliRunner().invoke(app, ["tune", *options], env={"COLUMNS": "100"})
    return result.exit_code, result.output, result.exception


def test_help() -> None:
    code, output, _ = invoke("--help")
    assert code == 0
    for option in (
        "--operation",
        "--head-dim",
        "--mask",
        "--length",
        "--bits",
        "--seconds",
        "--out",
    ):
        assert option in output


@pytest.mark.parametrize(
    ("option", "value"),
    [("--operation", "sideways"), ("--head-dim", "48"), ("--mask", "causal"), ("--bits", "8")],
)
def test_bad_options(option: str, value: str) -> None:
    code, output, _ = invoke(option, value)
    assert code == 2
    assert option in output
    assert value in output


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, _, error = invoke("--mask", MASKS[0])
    assert code == 1
    assert isinstance(error, ValueError)
    assert "GPU" in str(error)
