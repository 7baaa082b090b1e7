"""``tilewise bench train`` on the CPU, with a tiny model. No time is asserted anywhere."""

from __future__ import annotations

import csv
import functools
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_peers
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import tilewise
from tilewise.cli import bench, bench_train, gpt2, gpu_sides, measure, train_report
from tilewise.cli.__main__ import app
from tilewise.cli.bench_train import COMPARED, QUICK, STEPS, USUAL, Outcome, Training
from tilewise.cli.gpu_sides import Side

CPU = torch.device("cpu")
# Batches of 4 and 2.
TINY = QUICK._replace(lengths=(16, 32), tokens=64, milliseconds=0.0)
standard = functools.partial(measure.standard, causal=True)


@pytest.fixture(scope="module", autouse=True)
def _fa3() -> Iterator[None]:
    with fake_peers.fa3_operators():
        yield


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    fake_peers.install(monkeypatch)
    monkeypatch.setattr(measure, "device_here", lambda: "cpu")
    threads = torch.get_num_threads()
    yield
    assert torch.get_num_threads() == threads


@pytest.fixture
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_train, "QUICK", TINY)


def run(*options: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["bench", "train", *options])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def rows_of(file: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(file.open(encoding="utf-8")))


# ------------------------------------------------------------------ the command


def test_plots_without_a_place_are_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_train, "run_all", lambda *given: pytest.fail("measured"))
    file = tmp_path / "file"
    file.touch()
    for folder in (file / "plots", Path("/dev/null/plots")):
        with pytest.raises(ValueError, match=r"--plot: there can be no folder .*plots"):
            run("--quick", "--plot", str(folder))


def test_a_quick_run(tmp_path: Path) -> None:
    file, folder = tmp_path / "train.csv", tmp_path / "plots"
    code, output = run("--quick", "--csv", str(file), "--plot", str(folder))
    assert code == 0, output
    rows = rows_of(file)
    columns = "date,machine,cpu,torch,tilewise version,command,model,dtype,n,attention,batch,ms"
    ratios = "tokens/s,to standard,to best peer,peak GB,GB to standard"
    assert ",".join(rows[0]) == f"{columns},{ratios},losses,difference,check,note"
    assert [(row["n"], row["attention"], row["batch"]) for row in rows] == [
        (str(n), name, str(QUICK.tokens // n)) for n in QUICK.lengths for name in COMPARED
    ]
    for row in rows:
        assert row["command"] == "tilewise bench train --quick"
        assert row["torch"] == torch.__version__
        assert float(row["tokens/s"]) > 0
        assert float(row["to standard"]) > 0
        assert (row["to best peer"] != "") == (row["attention"] == "tilewise")
        assert row["note"] == ""
        if row["n"] == str(min(QUICK.lengths)):
            losses = [float(loss) for loss in row["losses"].split()]
            assert len(losses) == STEPS
            assert losses[-1] < 0.9 * losses[0]
            assert float(row["difference"]) < bench_train.TOLERANCE[torch.float32]
            assert row["check"] == "ok"
        else:
            assert row["losses"] == row["difference"] == row["check"] == ""
    for name in COMPARED:
        assert output.count(f" {name} ") >= len(QUICK.lengths)
    assert "differs: largest relative difference to standard's losses in 20 steps" in output
    assert (folder / "train.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.usefixtures("_tiny")
def test_what_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    file = tmp_path / "train.csv"
    code, output = run("--quick", "--csv", str(file))
    assert code == 0, output
    assert "without FA3: not installed" in output
    assert "flash-attn" not in output  # which is not compared
    assert {row["attention"] for row in rows_of(file)} == {"standard", "SDPA", "tilewise"}


def test_all_of_it_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"bench train needs an NVIDIA GPU .*; with --quick"):
        run()


@pytest.mark.usefixtures("_tiny")
def test_an_interrupted_run_shows_what_it_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    everything = bench_train.run_all

    def interrupted(*arguments: Any) -> Iterator[list[Outcome]]:
        yield next(iter(everything(*arguments)))
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_train, "run_all", interrupted)
    file = tmp_path / "train.csv"
    code, output = run("--quick", "--csv", str(file))
    assert code != 0
    assert "Not measured: n = 32" in output
    assert len(rows_of(file)) == len(COMPARED)


def test_a_file_with_other_columns_is_left_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "figures.csv"
    for value in ("1", "2"):
        bench.append_csv(file, {"n": value, "ms": "0.5"})
    assert rows_of(file) == [{"n": "1", "ms": "0.5"}, {"n": "2", "ms": "0.5"}]
    before = file.read_bytes()
    for row in ({"ms": "0.5", "n": "1"}, {"n": "1"}):
        with pytest.raises(ValueError, match=r"figures\.csv holds rows with other columns"):
            bench.append_csv(file, row)
    assert file.read_bytes() == before


# ------------------------------------------------------------------ losses


def masked(visible: Callable[[Tensor], Tensor], scale: float = 1.0) -> gpt2.Attention:
    """The standard form where a row sees the keys at the visible distances."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i = torch.arange(q.shape[1])
        seen = visible(i.unsqueeze(1) - i)
        scores = torch.einsum("bihd,bjhd->bhij", q, k) * (scale * q.shape[-1] ** -0.5)
        p = scores.masked_fill(~seen, -math.inf).softmax(-1)
        return torch.einsum("bhij,bjhd->bihd", p.to(v.dtype), v)

    return attend


WRONG: dict[str, gpt2.Attention] = {
    "sees one key more": masked(lambda distance: distance >= -1),
    "sees one key less": masked(lambda distance: (distance > 0) | (distance.cumsum(0) == 0)),
    "sees all": masked(lambda distance: distance == distance),
    "a scale off by a twentieth": masked(lambda distance: distance >= 0, 1.05),
    "no gradient of k": lambda q, k, v: standard(q, k.detach(), v),
    "a mean of values": lambda q, k, v: standard(0 * q, k, v),
    "NaN": lambda q, k, v: standard(q, k, v) * math.nan,
}


@functools.cache
def losses(dtype: torch.dtype, attention: gpt2.Attention) -> tuple[float, ...]:
    """In QUICK's sizes. bfloat16 has to be what dtype_on says."""
    return bench_train.first_losses(QUICK, QUICK.lengths[0], 4, attention, CPU)


def judged(dtype: torch.dtype, attention: gpt2.Attention) -> Outcome:
    outcome = Outcome("", QUICK.lengths[0], 4, losses=losses(dtype, attention))
    return bench_train.judged(outcome, losses(dtype, standard), CPU)


@pytest.mark.parametrize("dtype", bench_train.TOLERANCE, ids=str)
@pytest.mark.parametrize("name", WRONG)
def test_losses_tell_a_wrong_attention(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_train, "dtype_on", lambda device: dtype)
    outcome = judged(dtype, WRONG[name])
    assert outcome.wrong, outcome.difference


@pytest.mark.parametrize("dtype", bench_train.TOLERANCE, ids=str)
def test_losses_of_what_is_right_agree(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_train, "dtype_on", lambda device: dtype)
    right = bench_train.make_attentions(QUICK, QUICK.lengths[0])
    for attention in (*right.values(), masked(lambda distance: distance >= 0)):
        outcome = judged(dtype, attention)
        assert not outcome.wrong, outcome.difference
        assert outcome.difference is not None


@pytest.mark.usefixtures("_tiny")
@pytest.mark.parametrize("side", ["tilewise", "SDPA", "FA3"])
def test_a_wrong_side_ends_with_1(
    side: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wrong = WRONG["sees one key more"]
    if side == "tilewise":
        monkeypatch.setattr(tilewise, "attention", lambda q, k, v, causal: wrong(q, k, v))
    else:
        monkeypatch.setitem(gpu_sides.PEERS, side, lambda case, inputs: Side(wrong))
    file = tmp_path / "train.csv"
    code, output = run("--quick", "--csv", str(file))
    assert code == 1
    assert "WRONG" in output
    assert f"{side}, n = 16: losses differ from standard's by" in output
    checks = {row["attention"]: row["check"] for row in rows_of(file) if row["n"] == "16"}
    assert checks == dict.fromkeys(COMPARED, "ok") | {side: "WRONG"}


def test_tokens_repeat_a_phrase() -> None:
    tokens = bench_train.draw_tokens(3, 21, torch.Generator().manual_seed(1))
    assert tokens.shape == (3, 22)
    assert torch.equal(tokens[:, 8:], tokens[:, :-8])
    assert int(tokens.max()) < QUICK.shape.vocabulary


# ------------------------------------------------------------------ out of memory, and other failures


def limited(most: Callable[[int], int], backward: bool = False) -> gpt2.Attention:
    """The standard form, with memory for that many sequences of a length."""

    def no_room(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
        batch, length = q.shape[:2]
        out = standard(q, k, v)
        if batch > most(length):
            if backward:
                out.register_hook(no_room)
            else:
                no_room()
        return out

    return attend


@pytest.mark.usefixtures("_tiny")
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_out_of_memory(backward: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Room for half the batch at n = 16, and none at n = 32."""
    attend = limited(lambda length: 2 if length == 16 else 0, backward)
    monkeypatch.setattr(bench_train, "standard", attend)
    file, folder = tmp_path / "train.csv", tmp_path / "plots"
    code, output = run("--quick", "--csv", str(file), "--plot", str(folder))
    assert code == 0, output
    assert "standard, n = 16: out of memory with 4 sequences a step, run with 2" in output
    assert "standard, n = 32: out of memory" in output
    shorter, longer = ([row for row in rows_of(file) if row["n"] == n] for n in ("16", "32"))
    assert [row["batch"] for row in shorter] == ["2", "4", "4", "4"]
    assert all(float(row["tokens/s"]) > 0 for row in shorter)
    assert "run with 2" in shorter[0]["note"]
    assert [row["check"] for row in shorter] == ["ok"] * 4  # of two sequences each
    assert longer[0]["tokens/s"] == longer[0]["note"] == "out of memory"
    assert longer[0]["ms"] == longer[0]["peak GB"] == ""
    for row in longer[1:]:
        assert float(row["tokens/s"]) > 0
        assert row["batch"] == "2"
        assert row["to standard"] == ""
    assert (folder / "train.png").exists()


@pytest.mark.usefixtures("_tiny")
def test_losses_that_nothing_can_be_compared_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_train, "standard", limited(lambda length: 0))
    code, output = run("--quick")
    assert code == 1
    assert "losses were not compared" in output


@pytest.mark.usefixtures("_tiny")
@pytest.mark.parametrize(("side", "code"), [("SDPA", 0), ("tilewise", 1)])
def test_a_side_that_does_not_run(
    side: str, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(q: Tensor, *rest: Any, **options: Any) -> Tensor:
        if q.shape[1] == 32:
            raise RuntimeError("no kernel\nmore of it")
        return standard(q, *rest)

    if side == "tilewise":
        monkeypatch.setattr(tilewise, "attention", fails)
    else:
        monkeypatch.setitem(gpu_sides.PEERS, side, lambda case, inputs: Side(fails))
    file = tmp_path / "train.csv"
    got, output = run("--quick", "--csv", str(file))
    assert got == code
    assert f"{side}, n = 32: RuntimeError: no kernel" in output
    for row in rows_of(file):
        failed = (row["attention"], row["n"]) == (side, "32")
        assert (row["tokens/s"] == "failed") == failed
        assert row["note"] == ("RuntimeError: no kernel" if failed else "")
        assert (row["check"] == "failed") == failed


def test_a_step_that_fails_leaves_no_gradients() -> None:
    training = Training(TINY, 16, CPU)
    tokens = bench_train.draw_tokens(4, 16, torch.Generator().manual_seed(1))
    with pytest.raises(torch.OutOfMemoryError):
        training.step(tokens, limited(lambda length: 0, backward=True))
    assert all(parameter.grad is None for parameter in training._model.parameters())
    fresh = Training(TINY, 16, CPU)
    for _ in range(2):
        assert torch.equal(training.step(tokens, standard), fresh.step(tokens, standard))


# ------------------------------------------------------------------ the model


def test_the_standard_form_is_causal_attention() -> None:
    q, k, v, dout = (torch.randn(2, 7, 3, 8, dtype=torch.float64) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    ours = tilewise.attention(*leaves, causal=True)
    theirs = measure.standard(*leaves, causal=True)
    torch.testing.assert_close(theirs, ours)
    for a, b in zip(
        torch.autograd.grad(theirs, leaves, dout),
        torch.autograd.grad(ours, leaves, dout),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_a_model_is_what_its_seed_says() -> None:
    first = gpt2.GPT2(QUICK.shape, 16, CPU, seed=3)
    torch.rand(5)
    again, other = (gpt2.GPT2(QUICK.shape, 16, CPU, seed) for seed in (3, 4))
    for a, b, c in zip(first.parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert a.dim() == 1 or not torch.equal(a, c)


def test_logits_depend_on_no_later_token() -> None:
    model = gpt2.GPT2(QUICK.shape, 16, CPU, seed=0)
    tokens = torch.randint(QUICK.shape.vocabulary, (1, 16))
    changed = tokens.clone()
    changed[0, 9] += 1
    changed %= QUICK.shape.vocabulary
    with torch.no_grad():
        same = (model(tokens, standard) == model(changed, standard)).all(-1)[0]
    assert same.tolist() == [True] * 9 + [False] * 7


def test_gpt2_small_has_124_million_parameters() -> None:
    shape = USUAL.shape
    model = gpt2.GPT2(shape._replace(layers=0), USUAL.lengths[0], CPU, seed=0)
    block = gpt2.Block(shape)
    count = sum(p.numel() for p in (*model.parameters(), *shape.layers * [*block.parameters()]))
    padding = (shape.vocabulary - 50257) * shape.width
    assert count - padding == 124_439_808  # as in the release of GPT-2


def test_memory_counts_weights_and_the_optimizers_state() -> None:
    training = Training(TINY, 16, CPU)
    weights = training.bytes
    tokens = bench_train.draw_tokens(4, 16, torch.Generator().manual_seed(1))
    training.step(tokens, standard)
    assert 3 * weights <= training.bytes < 3.1 * weights  # two moments of each
    outcome = bench_train.fitted(training, tokens, "standard", standard)
    assert outcome.peak_bytes is None or outcome.peak_bytes >= training.bytes


# ------------------------------------------------------------------ what is shown


def test_the_widest_table_fits(capsys: pytest.CaptureFixture[str]) -> None:
    report = train_report.Report(USUAL, CPU, "command", None)
    for n in USUAL.lengths:
        losses = tuple(11.75 - step / 10 for step in range(STEPS))
        wide = Outcome("standard", n, 16, 12.345, 123_456_789_012, losses, 0.00123, True)
        none = Outcome("SDPA", n, 0, reason=bench_train.OUT_OF_MEMORY)
        report.add([wide, none, wide._replace(attention="tilewise", milliseconds=1.0)])
    report.show()
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= bench.MAX_COLUMNS
    assert not any("…" in line for line in lines)
    row = next(line.split() for line in lines if line.split()[:2] == ["16384", "tilewise"])
    assert row[2:] == [
        "16",
        "262144000",
        "12.35",
        "12.35",
        "123.46",
        "1.00",
        "11.75",
        "→",
        "9.85",
        "WRONG",
    ]


def test_figures_of_a_gpu_say_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    file, folder = tmp_path / "train.csv", tmp_path / "plots"
    report = train_report.Report(USUAL, torch.device("cuda"), "the command", file)
    losses = (11.7, *(STEPS - 1) * (6.1,))
    standard = Outcome("standard", 1024, 16, 100.0, 20_000_000_000, losses, 0.0)
    ours = Outcome("tilewise", 1024, 16, 50.0, 15_000_000_000, losses, 1e-4)
    report.add([standard, ours])
    report.show(folder)
    assert not report.failed
    _, row = rows_of(file)
    assert ",".join(row).startswith("date,GPU,driver,torch,triton,tilewise,command,model,dtype,n,")
    assert (row["GPU"], row["command"], row["dtype"]) == ("a GPU", "the command", "bfloat16")
    assert row["model"] == "GPT-2, 12 layers, 12 heads, width 768"
    assert row["tokens/s"] == "327680"
    assert row["to standard"] == row["to best peer"] == "2.000"
    assert (row["peak GB"], row["GB to standard"]) == ("15.0000", "0.750")
    assert (folder / "train.png").exists()
