"""What is written for readers is true: examples run, links lead somewhere, commands exist."""

from __future__ import annotations

import ast
import doctest
import importlib
import pkgutil
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import tilewise
import tilewise.compat
from tilewise.cli.__main__ import app

ROOT = Path(__file__).parent.parent
READMES = [ROOT / "README.md", ROOT / "README.zh-CN.md"]
RUN = [*READMES, *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [*RUN, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "benchmarks" / "README.md"]
# The docstrings of the textbook have a test beside it.
MODULES = [m.name for m in pkgutil.iter_modules(tilewise.__path__) if m.name != "textbook"]
DROP_IN = [f"compat.{m.name}" for m in pkgutil.iter_modules(tilewise.compat.__path__)]


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(path: Path, *languages: str) -> list[tuple[str, str]]:
    """(language, text) of the fenced blocks in these languages, in order."""
    fence = re.compile(rf"^```({'|'.join(languages)})\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return fence.findall(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", RUN, ids=named)
def test_examples_run(path: Path) -> None:
    namespace: dict[str, Any] = {"__name__": path.stem}
    for number, (language, text) in enumerate(blocks(path, "python", "pycon"), 1):
        name = f"{path.name}, example {number}"
        if language == "python":
            exec(compile(text, name, "exec"), namespace)
        else:
            session = doctest.DocTestParser().get_doctest(text, namespace, name, name, 0)
            runner = doctest.DocTestRunner()
            runner.run(session, clear_globs=False)
            namespace.update(session.globs)
            assert not runner.summarize(verbose=False).failed, name


def test_both_readmes_have_the_same_examples() -> None:
    english, chinese = (
        [ast.dump(ast.parse(text)) for _, text in blocks(path, "python")] for path in READMES
    )
    assert english == chinese != []
    assert len(blocks(READMES[0], "sh")) == len(blocks(READMES[1], "sh"))


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        file, _, heading = target.partition("#")
        if "://" in file:
            continue
        page = path.parent / file if file else path
        assert page.exists(), target
        if heading:
            lines = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = [re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines]
            assert heading in anchors, target


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_commands_exist(path: Path) -> None:
    for _, text in blocks(path, "sh"):
        for line in text.splitlines():
            words = shlex.split(line, comments=True)
            if words and words[0].endswith("tilewise"):
                result = CliRunner().invoke(app, [*words[1:], "--help"])
                assert result.exit_code == 0, line
            elif words[:2] == ["python", "-m"] and words[2].startswith("tilewise."):
                with pytest.raises(SystemExit) as left:
                    importlib.import_module(words[2]).main([*words[3:], "--help"])
                assert left.value.code == 0, line


@pytest.mark.parametrize("name", [*MODULES, *DROP_IN])
def test_docstring_examples(name: str) -> None:
    module = importlib.import_module(f"tilewise.{name}")
    result = doctest.testmod(module, extraglobs={"tilewise": tilewise, "torch": torch})
    assert result.failed == 0


@pytest.mark.parametrize("name", tilewise.__all__)
def test_every_public_function_has_an_example(name: str) -> None:
    item = getattr(tilewise, name)
    assert isinstance(item, type) or ">>> " in (item.__doc__ or "")


@pytest.mark.parametrize("name", DROP_IN)
def test_every_drop_in_name_has_an_example(name: str) -> None:
    module = importlib.import_module(f"tilewise.{name}")
    for item in getattr(module, "__all__", []):
        assert ">>> " in (getattr(module, item).__doc__ or "") or item == "uninstall"
