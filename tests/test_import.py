"""What `import tilewise` loads, and when."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


def test_drop_in_names_load_no_compiler() -> None:
    """torch.nn.attention.bias, for one, has it imported, which takes seconds."""
    output = python("""
import sys, tilewise
tilewise.compat.sdpa, tilewise.compat.flash_attn, tilewise.compat.flash_attn_3
print(sorted({"torch._dynamo", "torch._inductor"} & set(sys.modules)))
""")
    assert output == "[]\n"


def test_modules_are_loaded_when_they_are_named() -> None:
    names = ["compat.flash_attn", "compat.flash_attn_3", "compat.sdpa", "testing", "textbook"]
    for name in names:
        output = python(f"import tilewise; print(tilewise.{name}.__name__)")
        assert output == f"tilewise.{name}\n"
