"""``tilewise cost`` and ``tilewise explain`` as a user types them."""

from __future__ import annotations

import itertools

import pytest
import torch
from typer.testing import CliRunner

import tilewise
from tilewise.cli.__main__ import app


def run(line: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, line.split(), env={"COLUMNS": "100"})
    return result.exit_code, result.output


def test_cost_prints_the_table() -> None:
    q = torch.empty(2, 300, 4, 16, dtype=torch.float16, device="meta")
    k = torch.empty(2, 500, 2, 16, dtype=torch.float16, device="meta")
    v = torch.empty(2, 500, 2, 8, dtype=torch.float16, device="meta")
    expected = tilewise.cost(
        q, k, v, causal=True, window_size=(100, None), block_q=64, block_k=32, sram_bytes=2048
    )
    code, output = run(
        "cost --batch 2 --heads 4 --kv-heads 2 --seqlen 300 --kv-seqlen 500 --head-dim 16 "
        "--value-dim 8 --dtype float16 --causal --window 100, --block-q 64 --block-k 32 --sram 2"
    )
    assert (code, output) == (0, f"{expected}\n")


def test_explain_prints_the_choice() -> None:
    assert run("explain --causal") == (
        0,
        f"{tilewise.explain(*[torch.empty(1, 4096, 8, 64, dtype=torch.bfloat16)] * 3, causal=True)}\n",
    )
    code, output = run("explain --backend reference --device cpu --seqlen 100")
    assert code == 0
    assert "reference" in output


@pytest.mark.parametrize("command", ["cost", "explain"])
@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("--window 3", "--window"),
        ("--window 3,x", "--window"),
        ("--window -1,0", "window_size"),
        ("--kv-heads 3", "3 heads"),
        ("--device nowhere", "nowhere"),
    ],
)
def test_bad_input_is_one_line(command: str, options: str, complaint: str) -> None:
    code, output = run(f"{command} {options}")
    assert code == 2
    assert output.startswith("tilewise: ")
    assert complaint in output
    assert output.count("\n") == 1


@pytest.mark.parametrize("line", ["", "bench"])
def test_no_command_is_a_wish_for_help(line: str) -> None:
    code, output = run(line)
    assert code == 0
    assert output.count("Usage: ") == 1
    assert "Commands" in output


@pytest.mark.parametrize(
    "command", ["demo", "doctor", "tune", "bench gpu", "bench cpu", "bench train"]
)
def test_paragraphs_of_a_help_fill_their_lines(command: str) -> None:
    """A line of a paragraph ends where the next word would not fit."""
    code, output = run(f"{command} --help")
    assert code == 0
    text = output[: output.index("╭")].splitlines()
    for line, after in itertools.pairwise(text):
        if line.strip() and after.strip():
            assert len(f"{line.rstrip()} {after.split()[0]} ") > 100, line


def test_a_backend_that_cannot_serve_is_no_call_to_count() -> None:
    assert run("cost --backend tiled") == run("cost")
    for backend, reason in (("hopper", "capability 9.0"), ("fastest", "'fastest'")):
        code, output = run(f"cost --backend {backend}")
        assert code == 2
        assert reason in output
        q = torch.empty(1, 8, 2, 16)
        with pytest.raises(ValueError, match=reason):
            tilewise.cost(q, q, q, backend=backend)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("--window 5,0", "window"),
        ("--causal --kv-seqlen 5000", "causal, lengths differ"),
        ("--value-dim 32", "Dv is not D"),
        ("--dtype float64", "float64"),
        ("--kv-seqlen 7", "few keys"),
    ],
)
def test_why_not_pytorchs_kernel(options: str, reason: str) -> None:
    code, output = run(f"explain {options}")
    assert code == 0
    assert f"PyTorch's kernel=no ({reason})" in output


def test_unknown_backend() -> None:
    code, output = run("explain --backend fastest")
    assert (code, output.count("\n")) == (2, 1)
    assert "'fastest'" in output
