"""What `import tilewise` loads, and when."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tilewise

ROOT = Path(__file__).parent.parent


def python(program: str) -> str:
    """What a fresh process prints, in which torch is not loaded."""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_command_line_speaks_without_torch() -> None:
    output = python("""
import runpy, sys
for options in (["--help"], ["--version"], ["demo", "--help"], ["bench", "--help"]):
    sys.argv = ["tilewise", *options]
    try:
        runpy.run_module("tilewise", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        assert not end.code
assert "torch" not in sys.modules
""")
    assert f"tilewise {tilewise.__version__}\n" in output
    assert "doctor" in output


@pytest.mark.parametrize("name", tilewise.__all__)
def test_public_names(name: str) -> None:
    assert getattr(tilewise, name) is tilewise.__getattr__(name)


def test_public_names_are_those_that_type_checkers_see() -> None:
    tree = ast.parse(Path(tilewise.__file__).read_text(encoding="utf-8"))
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("tilewise."):
            module = importlib.import_module(node.module)
            found |= {alias.name: getattr(module, alias.name) for alias in node.names}
    assert found == {name: getattr(tilewise, name) for name in tilewise.__all__}


def test_no_module_has_the_name_of_a_public_function() -> None:
    # Importing it would put the module in the function's place.
    modules = {module.name for module in pkgutil.iter_modules(tilewise.__path__)}
    assert not modules & set(tilewise.__all__)


def test_other_names_are_not_there() -> None:
    with pytest.raises(AttributeError, match="'tilewise' has no attribute 'atention'"):
        tilewise.atention  # noqa: B018


def test_an_exported_program_finds_its_operator(tmp_path: Path) -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: torch.Tensor) -> torch.Tensor:
            return tilewise.attention(q, q, q, causal=True)

    q = torch.ones(1, 5, 2, 4)
    file = tmp_path / "layer.pt2"
    torch.export.save(torch.export.export(Layer(), (q,)), file)
    output = python(f"""
import torch, tilewise
print(torch.export.load({str(file)!r}).module()(torch.ones(1, 5, 2, 4)).sum().item())
""")
    assert output == "40.0\n"


def test_a_name_used_first_while_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(tilewise, "attention")

    @torch.compile(fullgraph=True, backend="aot_eager")
    def layer(q: torch.Tensor) -> torch.Tensor:
        return tilewise.attention(q, q, q, causal=True)

    q = torch.randn(1, 5, 2, 4)
    torch.testing.assert_close(layer(q), tilewise.attention(q, q, q, causal=True))
