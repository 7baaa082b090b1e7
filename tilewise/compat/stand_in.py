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
from collections.abc import Iterable, Sequence
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
    _refuse(_found_by_python())
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
        RuntimeError: a real flash_attn or its metadata is there, or is found by this Python.
    """
    _refuse([*_found_in(target), *_found_by_python()])
    for name in (PACKAGE, METADATA):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(SITE / name, target / name, ignore=ignored, dirs_exist_ok=True)


def uninstall_shim(target: Path) -> None:
    """Removes the stand-in, or what is left of it, from a directory.

    Raises:
        RuntimeError: there is none, or what is there is a real flash_attn.
    """
    left = [target / name for name in (PACKAGE, METADATA) if (target / name).exists()]
    if not left:
        raise RuntimeError(f"there is no {PACKAGE} in {target}")
    _refuse(left)
    for place in left:
        shutil.rmtree(place)


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
    except (RuntimeError, OSError) as error:
        parser.exit(1, f"{error}\n")
    print(f"tilewise's stand-in for flash-attn {done} {given.target}")


def _refuse(places: Iterable[Path]) -> None:
    """Raises if one of them is not this stand-in's."""
    for place in places:
        sign = place / ("METADATA" if place.suffix == ".dist-info" else "__init__.py")
        if not (sign.is_file() and "tilewise" in sign.read_text("utf-8")):
            raise RuntimeError(
                f"a {PACKAGE} that is not tilewise's is there, {place}; it is left alone: call "
                "tilewise.compat.flash_attn by its name, or uninstall flash-attn first"
            )


def _found_in(directory: Path) -> list[Path]:
    """Packages, modules of one file and metadata."""
    patterns = (PACKAGE, f"{PACKAGE}.*", f"{PACKAGE}-*")
    return [place for pattern in patterns for place in directory.glob(pattern)]


def _found_by_python() -> list[Path]:
    try:
        spec = importlib.util.find_spec(PACKAGE)
    except ValueError:  # a module that somebody made and put there has no spec
        return [Path("sys.modules") / PACKAGE]
    if spec is None:
        return []
    places = spec.submodule_search_locations
    return [Path(spec.origin or PACKAGE)] if places is None else [Path(place) for place in places]
