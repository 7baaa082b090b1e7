"""`import flash_attn` where flash-attn is not installed: for one process, or for good.

The directory `site` beside this file holds what site-packages would: the package and its metadata. To
install is to put it on sys.path, or to copy what is in it.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

SITE = Path(__file__).with_name("site")
PACKAGE, METADATA = "flash_attn", "flash_attn-2.8.3.dist-info"


def install() -> None:
    """Makes `import flash_attn` find tilewise in this process; importlib.metadata too.

    Call it before what looks for flash_attn is imported. A second call changes nothing.

    Raises:
        RuntimeError: a real flash_attn is there. It is never put aside.

    Example:
        >>> import importlib.metadata
        >>> from tilewise.compat.flash_attn import install, uninstall
        >>> install()
        >>> from flash_attn import flash_attn_func
        >>> importlib.metadata.version("flash-attn")
        '2.8.3'
        >>> uninstall()
    """
    _refuse_real_ones()
    if str(SITE) not in sys.path:
        sys.path.append(str(SITE))
        importlib.invalidate_caches()


def uninstall() -> None:
    """Undoes `install`: flash_attn is not found any more. Names that were imported stay usable."""
    if str(SITE) not in sys.path:
        return
    sys.path.remove(str(SITE))
    importlib.invalidate_caches()
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == PACKAGE and SITE in Path(module.__file__ or "").parents:
            del sys.modules[name]


def install_shim(target: Path) -> None:
    """Copies the stand-in into a directory that Python searches, such as site-packages.

    Raises:
        RuntimeError: a real flash_attn is there, or is found by this Python.
    """
    _refuse_real_ones(target)
    for name in (PACKAGE, METADATA):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(SITE / name, target / name, ignore=ignored, dirs_exist_ok=True)


def uninstall_shim(target: Path) -> None:
    """Removes the stand-in from a directory.

    Raises:
        RuntimeError: there is none, or what is there is a real flash_attn.
    """
    if not (target / PACKAGE).exists():
        raise RuntimeError(f"there is no {PACKAGE} in {target}")
    _refuse_real_ones(target)
    for name in (PACKAGE, METADATA):
        shutil.rmtree(target / name)


def main(arguments: Sequence[str] | None = None) -> None:
    """``python -m tilewise.compat.flash_attn install-shim|uninstall-shim [--target DIR]``."""
    parser = argparse.ArgumentParser(prog="python -m tilewise.compat.flash_attn")
    parser.add_argument("command", choices=("install-shim", "uninstall-shim"))
    parser.add_argument(
        "--target",
        type=Path,
        default=Path(sysconfig.get_path("purelib")),
        help="the directory to write to; this Python's site-packages unless given",
    )
    given = parser.parse_args(arguments)
    act, done = {
        "install-shim": (install_shim, "is now in"),
        "uninstall-shim": (uninstall_shim, "is no longer in"),
    }[given.command]
    try:
        act(given.target)
    except RuntimeError as error:
        parser.exit(1, f"{error}\n")
    print(f"tilewise's stand-in for flash-attn {done} {given.target}")


def _refuse_real_ones(target: Path | None = None) -> None:
    """Raises if there is a flash_attn that is not this stand-in, here or in the target."""
    places = [] if target is None else [target / PACKAGE]
    spec = importlib.util.find_spec(PACKAGE)
    if spec is not None:
        places += [Path(place) for place in spec.submodule_search_locations or ()]
    for place in places:
        first = place / "__init__.py"
        if place.exists() and not (first.exists() and "tilewise" in first.read_text("utf-8")):
            raise RuntimeError(
                f"a {PACKAGE} that is not tilewise's is in {place.parent}; it is left alone: call "
                "tilewise.compat.flash_attn by its name, or uninstall flash-attn first"
            )
