"""Which Dockerfiles need no build, and what they lay where."""

from __future__ import annotations

from pathlib import Path

import pytest

from polarlike.tasks.dockerfile import read_dockerfile


@pytest.fixture
def context(tmp_path: Path) -> Path:
    (tmp_path / "src/deep").mkdir(parents=True)
    (tmp_path / "src/deep/b.py").write_text("b = 1\n")
    (tmp_path / "one.cfg").write_text("x = 1\n")
    (tmp_path / "two.cfg").write_text("x = 2\n")
    return tmp_path


@pytest.mark.parametrize(
    ("text", "copies", "workdir", "env"),
    [
        ("FROM polarlike/base\nWORKDIR /app\n", [], "/app", {}),
        ("from polarlike/base:bookworm\nWORKDIR /app\nCOPY src /app\n", [("src", "/app")], "/app", {}),
        ("FROM polarlike/base\nWORKDIR /app\nCOPY src/ .\n", [("src/", "/app")], "/app", {}),
        ("FROM polarlike/base\nWORKDIR /app\nCOPY src lib\n", [("src", "/app/lib")], "/app", {}),
        ("FROM polarlike/base\nWORKDIR /a\nWORKDIR b\nCOPY one.cfg ./\n", [("one.cfg", "/a/b/one.cfg")], "/a/b", {}),
        ("FROM polarlike/base\nWORKDIR /app\nCOPY one.cfg /app\n", [("one.cfg", "/app/one.cfg")], "/app", {}),
        ("FROM polarlike/base\nCOPY one.cfg /etc/other.cfg\n", [("one.cfg", "/etc/other.cfg")], None, {}),
        (
            'FROM polarlike/base\nCOPY ["one.cfg", "two.cfg", "/app/"]\n',
            [("one.cfg", "/app/one.cfg"), ("two.cfg", "/app/two.cfg")],
            None,
            {},
        ),
        (
            "# a comment\nARG BASE=polarlike/base\nFROM ${BASE}\nENV A=1 \\\n    B='two words'\nENV C three words\n",
            [],
            None,
            {"A": "1", "B": "two words", "C": "three words"},
        ),
    ],
)
def test_what_only_lays_files_needs_no_build(
    context: Path, text: str, copies: list[tuple[str, str]], workdir: str | None, env: dict[str, str]
) -> None:
    (context / "Dockerfile").write_text(text)
    got = read_dockerfile(context)
    assert got.plain
    assert got.copies == [(str(context / source), path) for source, path in copies]
    assert (got.workdir, got.env) == (workdir, env)


@pytest.mark.parametrize(
    "text",
    [
        "FROM ubuntu:24.04\n",
        "FROM polarlike/base-extra\n",
        "FROM polarlike/base AS build\n",
        "ARG BASE\nFROM $BASE\n",
        "FROM polarlike/base\nRUN true\n",
        "FROM polarlike/base\nUSER bob\n",
        "FROM polarlike/base\nFROM polarlike/base\n",
        "FROM polarlike/base\nADD src /app\n",
        "FROM polarlike/base\nCOPY --chown=1 src /app\n",
        "FROM polarlike/base\nCOPY *.cfg /app/\n",
        "FROM polarlike/base\nCOPY missing /app/\n",
        "FROM polarlike/base\nCOPY ../other /app/\n",
        "FROM polarlike/base\nCOPY one.cfg /etc/place\n",  # a file or a folder: only the image knows
        "FROM polarlike/base\nENV PATH=/x:$PATH\n",
        "FROM polarlike/base\nWORKDIR $HOME\n",
        "FROM polarlike/base\nENV A='open\n",
    ],
)
def test_anything_else_is_left_to_a_build(context: Path, text: str) -> None:
    (context / "Dockerfile").write_text(text)
    assert not read_dockerfile(context).plain


def test_a_dockerignore_is_left_to_a_build(context: Path) -> None:
    (context / "Dockerfile").write_text("FROM polarlike/base\nCOPY src /app\n")
    (context / ".dockerignore").write_text("src/deep\n")
    assert not read_dockerfile(context).plain
