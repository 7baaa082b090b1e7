"""`import flash_attn` where flash-attn is not installed, and callers that look for it."""

import importlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from dense64 import attention64, close
from inputs import draw, draw_qkv
from torch import Tensor

import tilewise
from tilewise.compat import flash_attn, stand_in

torch.set_num_threads(1)

ROOT = Path(tilewise.__file__).parent.parent
NAMES = ["flash_attn", "flash_attn-2.8.3.dist-info"]


@pytest.fixture
def installed() -> Iterator[None]:
    flash_attn.install()
    yield
    flash_attn.uninstall()


def run(*arguments: str, path: Path | None = None) -> str:
    """A Python of its own, with tilewise and `path` to import from, and nothing written."""
    places = [str(ROOT), *([str(path)] if path else [])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(places),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_install_and_uninstall():
    path, modules = list(sys.path), set(sys.modules)
    assert importlib.util.find_spec("flash_attn") is None
    for _ in range(2):
        flash_attn.install()
        module = importlib.import_module("flash_attn")
        for name in flash_attn.__all__:
            if name not in ("install", "uninstall"):
                assert getattr(module, name) is getattr(flash_attn, name)
        assert module.__version__ == importlib.metadata.version("flash-attn") == "2.8.3"
        interface = importlib.import_module("flash_attn.flash_attn_interface")
        assert interface.flash_attn_func is flash_attn.flash_attn_func
        padding = importlib.import_module("flash_attn.bert_padding")
        assert callable(padding.unpad_input)
        assert callable(padding.pad_input)
        assert callable(padding.index_first_axis)
        assert importlib.metadata.packages_distributions()["flash_attn"] == ["flash_attn"]
    for _ in range(2):
        flash_attn.uninstall()
        assert importlib.util.find_spec("flash_attn") is None
        assert sys.path == path
        assert not [m for m in set(sys.modules) - modules if m.startswith("flash_attn")]
        with pytest.raises(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version("flash-attn")


SCRIPT = """
    import importlib.metadata, sys
    import flash_attn
    from flash_attn import flash_attn_func
    from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
    from flash_attn.flash_attn_interface import flash_attn_varlen_func
    import torch
    q = torch.randn(1, 4, 2, 8)
    assert flash_attn_func(q, q, q, causal=True).shape == q.shape
    assert importlib.metadata.version("flash_attn") == flash_attn.__version__ == "2.8.3"
    files = {str(f) for f in importlib.metadata.files("flash_attn")}
    from pathlib import Path
    there = {str(f.relative_to(sys.argv[1])) for f in Path(sys.argv[1]).rglob("*") if f.is_file()}
    assert files == there, files ^ there
    print(flash_attn.__file__)
"""


def test_install_shim_and_uninstall_shim(tmp_path):
    """By the command, into a directory of our own; the record lists every file, so pip can remove it."""
    said = run("-m", "tilewise.compat.flash_attn", "install-shim", "--target", str(tmp_path))
    assert str(tmp_path) in said
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(NAMES)
    place = run("-c", textwrap.dedent(SCRIPT), str(tmp_path), path=tmp_path)
    assert Path(place.strip()).parent == tmp_path / "flash_attn"
    stand_in.main(["install-shim", "--target", str(tmp_path)])  # a newer one over it
    stand_in.main(["uninstall-shim", "--target", str(tmp_path)])
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def real(tmp_path: Path) -> Path:
    """A directory with a flash_attn that is not ours."""
    package = tmp_path / "elsewhere" / "flash_attn"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("__version__ = '2.7.4'\n")
    return package.parent


def contents(place: Path) -> dict[str, str]:
    return {str(f.relative_to(place)): f.read_text() for f in place.rglob("*.py")}


@pytest.mark.parametrize("with_init", [True, False])
def test_a_real_one_is_never_put_aside(real, tmp_path, monkeypatch, with_init, capsys):
    if not with_init:
        (real / "flash_attn" / "__init__.py").rename(real / "flash_attn" / "cute.py")
    before = contents(real)
    with pytest.raises(RuntimeError, match="elsewhere"):
        stand_in.install_shim(real)
    with pytest.raises(RuntimeError, match="elsewhere"):
        stand_in.uninstall_shim(real)
    monkeypatch.syspath_prepend(str(real))
    with pytest.raises(RuntimeError, match="elsewhere"):
        flash_attn.install()
    with pytest.raises(RuntimeError, match="elsewhere"):
        stand_in.install_shim(tmp_path)
    with pytest.raises(SystemExit) as left:
        stand_in.main(["install-shim", "--target", str(tmp_path)])
    assert left.value.code == 1
    assert "left alone" in capsys.readouterr().err
    assert contents(real) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["elsewhere"]
    assert str(stand_in.SITE) not in sys.path


def test_a_real_one_that_was_imported_stays(installed, real, monkeypatch):
    monkeypatch.syspath_prepend(str(real))
    module = importlib.import_module("flash_attn")
    try:
        flash_attn.uninstall()
        assert sys.modules["flash_attn"] is module
        assert module.__version__ == "2.7.4"
    finally:
        del sys.modules["flash_attn"]


@pytest.mark.parametrize("name", ["flash_attn.py", "flash_attn.cpython-312-x86_64-linux-gnu.so"])
def test_a_module_of_one_file_is_never_put_aside(name, tmp_path, monkeypatch):
    """A package in the same directory would come before it, and one behind it would not be found."""
    (tmp_path / name).write_text("__version__ = '1.0'\n")
    with pytest.raises(RuntimeError, match=name):
        stand_in.install_shim(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [name]
    if name.endswith(".py"):
        monkeypatch.syspath_prepend(str(tmp_path))
        with pytest.raises(RuntimeError, match=name):
            flash_attn.install()
        with pytest.raises(RuntimeError, match=name):
            stand_in.install_shim(tmp_path / "other")
        assert not (tmp_path / "other").exists()
        assert str(stand_in.SITE) not in sys.path
    with pytest.raises(RuntimeError, match="no flash_attn in"):
        stand_in.uninstall_shim(tmp_path)


def test_a_module_that_somebody_made_is_never_put_aside(monkeypatch):
    made = ModuleType("flash_attn")
    monkeypatch.setitem(sys.modules, "flash_attn", made)
    with pytest.raises(RuntimeError, match=r"sys\.modules"):
        flash_attn.install()
    assert sys.modules["flash_attn"] is made


@pytest.mark.parametrize("name", ["flash_attn-2.8.3.dist-info", "flash_attn-2.7.0.dist-info"])
def test_metadata_of_a_real_one_is_left_alone(name, tmp_path):
    (tmp_path / name).mkdir()
    (tmp_path / name / "METADATA").write_text("Name: flash-attn\n")
    with pytest.raises(RuntimeError, match=name):
        stand_in.install_shim(tmp_path)
    with pytest.raises(RuntimeError, match=f"{name}|no flash_attn in"):
        stand_in.uninstall_shim(tmp_path)
    assert [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")] == [name, f"{name}/METADATA"]


@pytest.mark.parametrize("lost", NAMES)
def test_what_is_left_of_the_stand_in_is_removed(lost, tmp_path):
    stand_in.install_shim(tmp_path)
    shutil.rmtree(tmp_path / lost)
    stand_in.main(["uninstall-shim", "--target", str(tmp_path)])
    assert list(tmp_path.iterdir()) == []


def test_a_stand_in_goes_although_a_real_one_is_elsewhere(real, tmp_path, monkeypatch):
    place = tmp_path / "ours"
    stand_in.install_shim(place)
    monkeypatch.syspath_prepend(str(real))
    stand_in.uninstall_shim(place)
    assert list(place.iterdir()) == []
    assert (real / "flash_attn").exists()


def test_a_place_that_cannot_be_written_to(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for command in ("install-shim", "uninstall-shim"):
        with pytest.raises(SystemExit) as left:
            stand_in.main([command, "--target", str(tmp_path / "file")])
        assert left.value.code == 1
        assert "file" in capsys.readouterr().err


def test_there_may_be_nothing_to_uninstall(tmp_path):
    with pytest.raises(RuntimeError, match="no flash_attn"):
        stand_in.uninstall_shim(tmp_path)


# transformers, which asks importlib for the package and inspect for its arguments.


@pytest.fixture
def transformers(installed: None, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Its flash attention, as if there were a CUDA device, which alone it looks for besides."""
    utils = importlib.import_module("transformers.modeling_flash_attention_utils")
    asked = importlib.import_module("transformers.utils.import_utils")
    asked._package_distribution_mapping.cache_clear()
    assert asked._is_package_available("flash_attn", return_version=True) == (True, "2.8.3")
    assert asked.is_flash_attn_greater_or_equal.__wrapped__("2.4.1")
    monkeypatch.setattr(utils, "is_flash_attn_2_available", lambda **_: True)
    for name in vars(utils):
        if name.startswith(("_flash_", "_pad_fn", "_unpad_fn", "_process_", "_loaded_")):
            monkeypatch.setattr(utils, name, getattr(utils, name))
    monkeypatch.setattr(utils, "_loaded_implementation", None)
    yield utils
    asked._package_distribution_mapping.cache_clear()


def forward(
    utils: ModuleType, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any
) -> Tensor:
    given = {"attn_implementation": "flash_attention_2", "is_causal": True, **options}
    return utils._flash_attention_forward(q, k, v, mask, query_length=q.shape[1], **given)


def test_transformers(transformers):
    """Padding, packing, windows, caps, sinks and its paged cache reach us whole."""
    leaves = draw_qkv(2, 9, 9, (4, 2), 8, 8, torch.float64)
    plain = {"causal": True}
    close(forward(transformers, *leaves.values(), None), attention64(**leaves, **plain)[0])
    assert transformers._flash_fn is flash_attn.flash_attn_func

    sinks = draw(4, dtype=torch.float64)
    out = forward(
        transformers,
        *leaves.values(),
        None,
        sliding_window=4,
        softcap=2.0,
        softmax_scale=0.2,
        s_aux=sinks,
    )
    want, _ = attention64(
        **leaves, causal=True, window_size=(3, None), softcap=2.0, scale=0.2, sinks=sinks
    )
    close(out, want)

    padding = torch.tensor([[1] * 9, [0] * 4 + [1] * 5])
    own = (padding[:, None, None] & padding[:, None, :, None]).bool()
    out = forward(transformers, *leaves.values(), padding)
    close(out, attention64(**leaves, causal=True, mask=own)[0])

    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5]])
    one = {n: t[:1] for n, t in leaves.items()}
    out = forward(transformers, *one.values(), None, position_ids=positions)
    document = torch.tensor([0] * 3 + [1] * 6)
    close(out, attention64(**one, causal=True, mask=document == document[:, None])[0])


def test_transformers_paged_cache(transformers):
    """One new token of each sequence, written to its page and seen."""
    lengths, dtype = [5, 3], torch.float64
    k_cache, v_cache = (draw(4, 4, 2, 8, dtype=dtype, seed=i) for i in (1, 2))
    table = torch.tensor([[2, 0], [3, 1]], dtype=torch.int32)
    q = draw(1, 2, 4, 8, dtype=dtype, seed=3)
    k, v = (draw(1, 2, 2, 8, dtype=dtype, seed=i) for i in (4, 5))
    cu = torch.tensor([0, 6, 10], dtype=torch.int32)  # lengths with the new token
    out = forward(
        transformers,
        *(q, k, v, None),
        block_table=table,
        k_cache=k_cache,
        v_cache=v_cache,
        cu_seq_lens_q=torch.tensor([0, 1, 2], dtype=torch.int32),
        cu_seq_lens_k=cu,
        max_length_q=1,
        max_length_k=6,
    )
    for b, n in enumerate(lengths):
        keys, values = (t[table[b].long()].flatten(0, 1)[None, : n + 1] for t in (k_cache, v_cache))
        assert torch.equal(keys[0, n], k[0, b])
        close(out[:, b : b + 1], attention64(q[:, b : b + 1], keys, values)[0])
