"""``tilewise doctor``: what it prints, and that it notices what is wrong."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from inputs import cpu_backends
from rich.cells import cell_len
from typer.testing import CliRunner

import tilewise
from tilewise import dispatch
from tilewise.backends import reference, tiled
from tilewise.cli import doctor
from tilewise.cli.__main__ import app
from tilewise.dispatch import BACKENDS
from tilewise.testing import CASES, Verdict, make_call

FEW = len(CASES[:: doctor.QUICK])


def run() -> tuple[int, str]:
    result = CliRunner().invoke(app, ["doctor", "--quick"])
    assert "\x1b" not in result.output
    assert max(map(cell_len, result.output.splitlines())) <= 100
    return result.exit_code, result.output


def patch_forward(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], Any]) -> None:
    right = tiled.forward
    monkeypatch.setattr(tiled, "forward", lambda problem: change(right(problem)))


def test_all_is_well() -> None:
    code, output = run()
    assert code == 0, output
    for name in (f"tilewise {tilewise.__version__}", f"torch {torch.__version__}", "CPU: "):
        assert name in output
    assert "tiled on cpu: works in float64, float32, bfloat16, float16 (" in output
    assert "kernel=" in output or "product=" in output
    assert output.count(f" {FEW}/{FEW} ") >= len(cpu_backends()) * len(doctor.DTYPES)
    for name in set(BACKENDS) - set(cpu_backends()):
        assert f"{name} on cpu: needs a GPU\n  - " in output
        assert f"{name} on cpu, " not in output
    if not torch.cuda.is_available():
        assert "no CUDA device" in output


@pytest.mark.parametrize("dtypes", [("float32",), ("bfloat16", "float16")])
def test_a_wrong_case_is_shown(monkeypatch: pytest.MonkeyPatch, dtypes: tuple[str, ...]) -> None:
    monkeypatch.setattr(doctor, "DTYPES", dtypes)
    patch_forward(monkeypatch, lambda result: result._replace(out=1.03 * result.out))
    code, output = run()
    assert code == 1
    for dtype in dtypes:
        assert f"tiled on cpu, {dtype}, plain: out: WRONG, rms " in output
    assert output.count(f" {FEW}/{FEW} ") == len(dtypes)  # the reference's
    assert "Every result" not in output


def test_a_nan_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "DTYPES", ("float32",))
    patch_forward(monkeypatch, lambda result: result._replace(out=result.out * float("nan")))
    code, output = run()
    assert code == 1
    assert " inf " in output
    assert "tiled on cpu, float32, plain: out: WRONG, rms nan" in output


def test_an_error_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(result: Any) -> Any:
        raise RuntimeError("no such instruction\nmore of it")

    monkeypatch.setattr(doctor, "DTYPES", ("float32",))
    patch_forward(monkeypatch, fail)
    code, output = run()
    assert code == 1
    assert "tiled on cpu, float32, plain: RuntimeError: no such instruction\n" in output
    assert f" 0/{FEW} " in output


def test_what_is_not_served_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled, "unsupported", lambda problem: ["needs a GPU", "needs an even day"])
    monkeypatch.setattr(doctor, "DTYPES", ("float32",))
    code, output = run()
    assert code == 0
    assert "tiled on cpu: does not work\n  - needs a GPU\n  - needs an even day" in output
    assert "tiled on cpu, float32" not in output


def test_dtypes_that_are_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(problem: Any) -> list[str]:
        kind = problem.q.dtype
        wide = ["16 bits only"] * (kind.itemsize > 2)
        return wide + [f"not {kind}"] * (kind != torch.float16)

    monkeypatch.setattr(tiled, "unsupported", unsupported)
    lines = list(doctor.backends())
    start = next(i for i, line in enumerate(lines) if line.startswith("tiled on cpu"))
    assert lines[start].startswith("tiled on cpu: works in float16 (")
    assert lines[start + 1 : start + 6] == [
        "  - float64: 16 bits only",
        "  - float64: not torch.float64",
        "  - float32: 16 bits only",
        "  - float32: not torch.float32",
        "  - bfloat16: not torch.bfloat16",
    ]
    # Where it works in none, what holds in all of them says why.
    monkeypatch.setattr(tiled, "unsupported", lambda p: [f"not {p.q.dtype}", "needs a GPU"])
    lines = list(doctor.backends())
    start = lines.index("tiled on cpu: does not work")
    assert lines[start + 1] == "  - needs a GPU"
    assert not lines[start + 2].startswith("  - ")


def test_a_partly_served_backend_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled, "unsupported", lambda p: ["no window"] * (p.band.left is not None))
    monkeypatch.setattr(doctor, "DTYPES", ("float32",))
    code, output = run()
    assert code == 0
    count = sum(make_call(case).problem().band.left is not None for case in CASES[:: doctor.QUICK])
    assert count
    assert f" {FEW - count}/{FEW - count}, {count} not served" in output


def test_a_broken_device_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "devices", lambda: ["nowhere"])
    monkeypatch.setattr(doctor, "DTYPES", ("float32",))
    code, output = run()
    assert code == 1
    assert "tiled on nowhere: does not work\n  - " in output
    assert "tiled on nowhere, float32, plain: RuntimeError: " in output


def test_other_processes_examine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "compiles_on", lambda device: True)
    monkeypatch.setattr(doctor, "DTYPES", ("float32",))
    monkeypatch.setattr(dispatch, "BACKENDS", {"reference": reference})
    monkeypatch.setattr(doctor, "examine", examine_or_die)
    code, output = run()
    assert code == 1
    assert f" 0/{FEW} " in output
    assert output.count("reference on cpu, float32, plain: its process ended: ") == 1


def examine_or_die(number: int, *kind: str) -> None:
    os._exit(3)


def test_a_broken_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise OSError("libgpu.so: cannot open\nmore of it")

    assert doctor.version("no_such_package") == "not installed"
    monkeypatch.setattr(importlib, "import_module", broken)
    assert doctor.version("triton") == "does not import (libgpu.so: cannot open)"


@pytest.mark.parametrize(
    ("rms", "largest", "share"),
    [
        ((1.0, 4.0), (1.0, 2.0), 0.5),
        ((0.0, 0.0), (3.0, float("inf")), 0.0),
        ((2.0, 0.0), (0, 1), 1),
    ],
)
def test_used(rms: tuple[float, float], largest: tuple[float, float], share: float) -> None:
    assert doctor.used(Verdict("out", True, *rms, *largest)) == share


def test_a_verdict_says_what_was_allowed_where_something_was() -> None:
    inf = float("inf")
    assert (
        str(Verdict("out", True, 1, 2, 3, inf)) == "out: ok, rms 1.00e+00 of 2.00e+00, max 3.00e+00"
    )
    assert (
        str(Verdict("dq", False, 1, inf, 3, 2))
        == "dq: WRONG, rms 1.00e+00, max 3.00e+00 of 2.00e+00"
    )
