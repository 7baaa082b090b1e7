"""What `import tilewise` loads, and when."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


def test_it_loads_torch_and_no_kernels() -> None:
    output = python("""
import sys, torch
before = set(sys.modules)
import tilewise
tilewise.attention(*(torch.zeros(1, 3, 2, 4) for _ in range(3)))
new = {name.split(".")[0] for name in set(sys.modules) - before}
print(sorted(new & {"triton", "numpy", "rich", "typer", "transformers", "matplotlib"}))
""")
    assert output == "[]\n"


def test_the_command_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tilewise", "--version"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout == f"tilewise {tilewise.__version__}\n", done.stderr


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
