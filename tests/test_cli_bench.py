"""``tilewise bench cpu`` at tiny sizes. No time is asserted anywhere."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import tilewise
from tilewise.cli import bench, bench_cpu
from tilewise.cli.__main__ import app

TINY = bench_cpu.Sizes(
    lengths=(32,),
    head_dims=(16,),
    tokens=64,
    window=8,
    window_in=48,
    decode_keys=40,
    short=(8,),
    short_tokens=16,
    peers=("SDPA flash", "SDPA math"),
    peers_at=24,
    memory_length=64,
    seconds=0.0,
)


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(bench_cpu, "USUAL", TINY)
    threads = torch.get_num_threads()
    yield
    assert torch.get_num_threads() == threads


def run(*options: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["bench", "cpu", *options])
    return result.exit_code, result.output


def test_every_case(tmp_path: Path) -> None:
    file = tmp_path / "figures.csv"
    code, output = run("--csv", str(file))
    assert code == 0, output
    rows = list(csv.DictReader(file.open(encoding="utf-8")))
    assert len(rows) == len(list(bench_cpu.cases(TINY)))
    expected = "date,machine,cpu,torch,tilewise version,command,case,dtype,S,D,mask,pass"
    assert ",".join(rows[0]) == f"{expected},tilewise ms,peer,peer ms,ratio,GF/s,MB,check"
    for row in rows:
        assert row["command"] == "tilewise bench cpu"
        assert row["torch"] == torch.__version__
        if row["case"] != "memory":
            assert row["check"] == "ok", row
            assert float(row["tilewise ms"]) > 0
    assert {row["case"] for row in rows} == {
        *("dense", "window", "decode MHA", "decode MQA", "short", "peers", "memory")
    }


def test_only_and_appending(tmp_path: Path) -> None:
    file = tmp_path / "figures.csv"
    for _ in range(2):
        code, output = run("--only", "decode MQA", "--csv", str(file))
        assert code == 0, output
    first, second = csv.DictReader(file.open(encoding="utf-8"))
    assert first["command"] == second["command"] == "tilewise bench cpu --only 'decode MQA'"


@pytest.mark.parametrize("factor", [1.05, float("nan")])
def test_a_wrong_result_is_marked(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    right = tilewise.attention

    def wrong(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return right(q, k, v, **options) * factor

    monkeypatch.setattr(tilewise, "attention", wrong)
    code, output = run("--only", "window fp32 forward")
    assert code == 1
    assert "WRONG" in output
    assert "differ" in output


def test_a_missing_compiler_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_nothing(*arguments: Any, **options: Any) -> Any:
        def fail(*inputs: Tensor, **more: Any) -> Tensor:
            raise RuntimeError("no compiler found\nmore of it")

        return fail

    monkeypatch.setattr(torch, "compile", compile_nothing)
    case = next(bench_cpu.cases(TINY))._replace(peer="Flex")
    outcome = bench_cpu.run(case, 0.0)
    assert outcome.note == "Flex skipped: torch.compile: no compiler found"
    assert outcome.ratio is None
    assert not outcome.wrong


def test_the_widest_table_fits(capsys: pytest.CaptureFixture[str]) -> None:
    case = bench_cpu.Case("decode MHA", "fp32", "backward", 1, 131072, 128, mask="causal")
    case = case._replace(peer="SDPA flash")
    bench.show([bench_cpu.Outcome(case, 12.3456, 123.456)])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100


@pytest.mark.parametrize("options", [("--quick", "--full"), ("--only", "no such case")])
def test_bad_options(options: tuple[str, ...]) -> None:
    code, output = run(*options)
    assert code == 2
    assert options[1] in output


@pytest.mark.parametrize("command", ["cpu", "gpu", "train"])
def test_a_file_without_a_folder_is_noticed_before_anything_is_measured(
    command: str, tmp_path: Path
) -> None:
    missing = tmp_path / "missing"
    given = ["bench", command, "--quick", "--csv", str(missing / "x.csv")]
    result = CliRunner(env={"COLUMNS": "300"}).invoke(app, given)
    assert result.exit_code == 2
    assert f"there is no folder {missing}" in result.output
