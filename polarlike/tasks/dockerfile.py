"""Reads a task's Dockerfile: whether it only lays files over our own base image, so that nothing need be built.

Knows the few instructions that copies can stand for (FROM our base, ARG, WORKDIR, ENV, plain COPY) and refuses to
guess about the rest. Source of the rules: https://docs.docker.com/reference/dockerfile/.

What holds: a Dockerfile is `plain` only if laying the copies over the base image gives the tree that its build would.
"""

from __future__ import annotations

import json
import posixpath
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

BASE_IMAGE = "polarlike/base"
_VARIABLE = re.compile(r"\$\{?(\w+)\}?")


@dataclass(slots=True)
class Dockerfile:
    """plain: no build is needed. copies: (host path, path in the box). workdir: the last WORKDIR, None without one."""

    plain: bool
    workdir: str | None = None
    copies: list[tuple[str, str]] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)


def read_dockerfile(folder: Path) -> Dockerfile:
    """Reads folder/Dockerfile; `folder` is the build context."""
    got = Dockerfile(plain=not (folder / ".dockerignore").exists())
    args: dict[str, str] = {}
    stages = 0
    for name, rest in _instructions((folder / "Dockerfile").read_text()):
        if name == "FROM":
            stages += 1
            got.plain = got.plain and stages == 1 and _is_base(_expand(rest, args))
            got.workdir = None
        elif name == "ARG":
            key, _, value = rest.partition("=")
            args[key.strip()] = value.strip().strip("\"'")
        elif name == "WORKDIR":
            got.workdir = posixpath.join(got.workdir or "/", _expand(rest.strip("\"'"), args | got.env))
            got.plain = got.plain and "$" not in got.workdir
        elif name == "ENV":
            got.plain = _read_env(rest, got.env) and got.plain
        elif name == "COPY":
            got.plain = _read_copy(rest, folder, got) and got.plain
        else:
            got.plain = False
    return got


def _instructions(text: str) -> list[tuple[str, str]]:
    """(INSTRUCTION, the rest) with continued lines joined and comments gone."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\s*\n", " ", "\n".join(lines))
    parts = [line.strip().split(None, 1) for line in joined.splitlines() if line.strip()]
    return [(part[0].upper(), part[1].strip() if len(part) > 1 else "") for part in parts]


def _is_base(image: str) -> bool:
    return image.split(":")[0] == BASE_IMAGE


def _expand(text: str, values: dict[str, str]) -> str:
    return _VARIABLE.sub(lambda m: values.get(m.group(1), m.group(0)), text)


def _read_env(rest: str, env: dict[str, str]) -> bool:
    """ENV K=V ... or ENV K V. False where a value takes another variable, whose value only a build knows."""
    try:
        words = shlex.split(rest)
    except ValueError:
        return False
    if words and "=" not in words[0]:
        words = [f"{words[0]}={' '.join(words[1:])}"]
    pairs = [word.partition("=") for word in words]
    env.update({key: value for key, _, value in pairs})
    return all(key and "$" not in value for key, _, value in pairs)


def _read_copy(rest: str, folder: Path, got: Dockerfile) -> bool:
    """COPY SOURCE... DEST without flags, patterns or variables: what it copies goes into got.copies."""
    try:
        words = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
    except ValueError:
        return False
    if len(words) < 2 or any(re.match(r"--|<<", w) or re.search(r"[*?\[$]", w) for w in words):
        return False
    *sources, destination = words
    target = posixpath.normpath(posixpath.join(got.workdir or "/", destination))
    into_folder = len(sources) > 1 or destination.endswith("/") or destination in (".", "./") or target == got.workdir
    for source in sources:
        host = folder / source.lstrip("/")
        if not host.exists() or not host.resolve().is_relative_to(folder.resolve()):
            return False
        inside = posixpath.join(target, host.name) if host.is_file() and into_folder else target
        if host.is_file() and not into_folder and "." not in posixpath.basename(target):
            return False  # a file if nothing is there, a place in it if it is a folder: only the image knows
        got.copies.append((str(host), inside))
    return True
