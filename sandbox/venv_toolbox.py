"""Toolboxes for boxes that see the host's files: one virtual environment a recipe, in the user's cache.

What holds: a folder that is not whole is never taken for one. The environment is made in its final place (it cannot be
moved), and a mark is written into it last; what has no mark is removed and made again. One process builds at a time.

Every toolbox, also those for containers, gets `quick_start.pth`: Python's garbage collector is told that a start makes
objects that stay. That takes a third off the start of an agent of many imports, and changes nothing else.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sandbox.base import SandboxError, ToolboxRecipe

MARK = ".polarlike-whole"
QUICK_START = Path(__file__).with_name("quick_start.pth")


def cache_dir() -> Path:
    """$XDG_CACHE_HOME/polarlike, or ~/.cache/polarlike."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "polarlike"


def recipe_key(recipe: ToolboxRecipe, *more: str) -> str:
    """Names the recipe's folder: its own name and a digest of all that goes into it."""
    text = "\n".join([recipe.name, *recipe.pip, *more])
    return f"{recipe.name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


@contextmanager
def locked(place: Path) -> Iterator[None]:
    """An advisory lock between processes, beside `place`; freed by the kernel when its holder dies."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.with_name(place.name + ".lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def install(recipe: ToolboxRecipe) -> Path:
    """The folder of the environment, made if need be. SandboxError where a package cannot be installed."""
    place = cache_dir() / "venv" / recipe_key(recipe, sys.version, QUICK_START.read_text())
    if (place / MARK).exists():
        return place
    with locked(place):
        if not (place / MARK).exists():
            shutil.rmtree(place, ignore_errors=True)
            _build(place, recipe)
            (place / MARK).touch()
    return place


def _build(place: Path, recipe: ToolboxRecipe) -> None:
    _call([sys.executable, "-m", "venv", "--symlinks", "--without-pip", str(place)], recipe)
    python = str(place / "bin" / "python")
    if recipe.pip:
        _call([*_installer(), "--python", python, *recipe.pip], recipe)
    for packages in place.glob("lib/python*/site-packages"):
        shutil.copy(QUICK_START, packages)
    _call([python, "-m", "compileall", "-q", "-j", "0", str(place / "lib")], None)


def _installer() -> list[str]:
    beside = Path(sys.executable).with_name("uv")
    uv = str(beside) if beside.exists() else shutil.which("uv")
    if uv:
        return [uv, "pip", "install", "--quiet"]
    return [sys.executable, "-m", "pip", "install", "--quiet"]


def _call(command: list[str], recipe: ToolboxRecipe | None) -> None:
    """Runs one step; without a recipe a failure is harmless (bytecode of files for another Python version)."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and recipe is not None:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
        raise SandboxError(f"the toolbox {recipe.name} could not be installed ({lines[-1]}); run {' '.join(command)}")
