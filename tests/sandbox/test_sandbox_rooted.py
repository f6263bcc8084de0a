"""Files below another root: nothing leads out of it, and what is read is what a chroot there would read."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox import tree
from sandbox.base import SandboxError
from sandbox.rooted import RootedFiles
from sandbox.tree import Entry, TreeError, TreePatch


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "root"
    (made / "app").mkdir(parents=True)
    (tmp_path / "secret").write_text("of the host")
    return made


@pytest.fixture
def files(root: Path) -> Iterator[RootedFiles]:
    made = RootedFiles(str(root))
    yield made
    made.close()


def test_an_absolute_link_on_the_way_is_resolved_below_the_root(root: Path, tmp_path: Path, files: RootedFiles) -> None:
    (root / "etc").mkdir()
    (root / "etc" / "name").write_text("inside")
    (root / "link").symlink_to("/etc")
    (root / "out").symlink_to(tmp_path)
    (root / "up").symlink_to("../../../../../../..")
    assert files.read("/link/name") == b"inside"
    assert files.read("/out/secret") is None
    assert files.read(f"/up{tmp_path}/secret") is None
    assert files.read(f"/../../..{tmp_path}/secret") is None


def test_a_link_a_pipe_and_a_folder_are_no_file(root: Path, files: RootedFiles) -> None:
    (root / "app" / "link").symlink_to("/etc/passwd")
    os.mkfifo(root / "app" / "pipe")
    assert [files.read(f"/app/{name}") for name in ("link", "pipe", "", "none", "pipe/below")] == [None] * 5


def test_what_is_written_through_links_lands_below_the_root(root: Path, tmp_path: Path, files: RootedFiles) -> None:
    (root / "logs").symlink_to(tmp_path)
    (root / "app" / "file").symlink_to(tmp_path / "secret")
    files.write("/logs/deep", b"x", 0o644)  # the link's target is missing in here: a folder takes its place
    assert (root / "logs" / "deep").read_bytes() == b"x"
    assert not (tmp_path / "deep").exists()
    files.write("/app/file", b"new", 0o640)
    assert (tmp_path / "secret").read_text() == "of the host"
    assert (root / "app" / "file").read_bytes() == b"new"
    assert not (root / "app" / "file").is_symlink()
    assert (root / "app" / "file").stat().st_mode & 0o777 == 0o640


def test_a_folder_is_copied_over_links_that_stand_in_its_way(root: Path, tmp_path: Path, files: RootedFiles) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (root / "app" / "sub").symlink_to(outside)
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "run.sh").write_text("#!/bin/sh")
    (source / "sub" / "run.sh").chmod(0o750)
    (source / "link").symlink_to("sub/run.sh")
    files.put(source, "/app")
    assert list(outside.iterdir()) == []
    assert (root / "app" / "sub" / "run.sh").stat().st_mode & 0o777 == 0o750
    assert (root / "app" / "link").readlink() == Path("sub/run.sh")


def test_folders_on_the_way_are_made_with_mode_755_and_existing_ones_keep_theirs(
    root: Path, files: RootedFiles
) -> None:
    (root / "app").chmod(0o711)
    before = os.umask(0o077)
    files.write("/app/a/b/file", b"", 0o644)
    os.umask(before)
    modes = [(root / path).stat().st_mode & 0o777 for path in ("app", "app/a", "app/a/b", "app/a/b/file")]
    assert modes == [0o711, 0o755, 0o755, 0o644]


def test_a_walk_gives_the_items_of_a_plain_walk(root: Path, files: RootedFiles) -> None:
    app = root / "app"
    (app / "b" / "c").mkdir(parents=True)
    (app / "b" / "c" / "data.bin").write_bytes(b"\x00\xff")
    (app / "a").write_text("one")
    (app / "link").symlink_to("/etc")
    (app / ".git").mkdir()
    (app / "b" / "__pycache__").mkdir()
    os.mkfifo(app / "pipe")
    got = files.walk("/app", tree.manifest_of)
    assert got == tree.manifest_of(tree.walk_folder(app))
    assert set(got) == {"a", "b", "b/c", "b/c/data.bin", "link"}
    assert got["b/c/data.bin"].digest == hashlib.sha256(b"\x00\xff").digest()


def test_a_walk_never_follows_the_folder_itself_out(root: Path, tmp_path: Path, files: RootedFiles) -> None:
    (root / "app").rmdir()
    (root / "app").symlink_to(tmp_path)
    assert files.walk("/app", tree.manifest_of) == {}
    (root / "app").unlink()
    with pytest.raises(SandboxError, match="gone from the box"):
        files.walk("/app", tree.manifest_of)


def test_a_file_that_became_a_link_after_it_was_listed_reads_as_empty(
    root: Path, tmp_path: Path, files: RootedFiles
) -> None:
    (root / "app" / "file").write_text("mine")

    def swap(items: Iterator[tree.Item]) -> bytes:
        (item,) = list(items)
        (root / "app" / "file").unlink()
        (root / "app" / "file").symlink_to(tmp_path / "secret")
        return item.open().read()

    assert files.walk("/app", swap) == b""


def test_a_file_that_grows_while_it_is_read_gives_what_was_counted(root: Path, files: RootedFiles) -> None:
    (root / "app" / "file").write_text("four")

    def grow(items: Iterator[tree.Item]) -> bytes:
        (item,) = list(items)
        (root / "app" / "file").write_text("four and more")
        return item.open().read()

    assert files.walk("/app", grow) == b"four"


def test_a_tree_too_deep_to_name_is_its_makers_fault(root: Path, files: RootedFiles) -> None:
    at = os.open(root / "app", os.O_RDONLY)
    for _ in range(30):
        os.mkdir("d" * 200, dir_fd=at)
        below = os.open("d" * 200, os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)
    with pytest.raises(TreeError):
        files.walk("/app", tree.manifest_of)


def test_a_patch_replaces_links_in_its_way_and_deletes_nothing_through_them(
    root: Path, tmp_path: Path, files: RootedFiles
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    (root / "app" / "dir").symlink_to(outside)
    (root / "app" / "old").mkdir()
    (root / "app" / "old" / "x").write_text("x")
    patch = TreePatch(
        files={
            "dir": Entry(0o500),
            "dir/new.txt": Entry(0o755, data=b"new"),
            "link": Entry(0o777, link="/etc/passwd"),
            "old": Entry(0o644, data=b"now a file"),
        },
        deleted=["dir/kept", "none/at/all", "old/x"],
    )
    files.lay(patch, "/app")
    assert (outside / "kept").read_text() == "kept"
    assert sorted(path.name for path in (root / "app").iterdir()) == ["dir", "link", "old"]
    assert (root / "app" / "dir" / "new.txt").read_bytes() == b"new"
    assert (root / "app" / "dir").stat().st_mode & 0o777 == 0o500
    assert (root / "app" / "link").readlink() == Path("/etc/passwd")
    assert (root / "app" / "old").read_bytes() == b"now a file"


def test_after_close_nothing_is_read_and_what_runs_goes_on(root: Path, files: RootedFiles) -> None:
    (root / "app" / "file").write_text("mine")

    def close_first(items: Iterator[tree.Item]) -> bytes:
        files.close()
        (item,) = list(items)
        return item.open().read()

    assert files.walk("/app", close_first) == b"mine"
    with pytest.raises(SandboxError, match="stopped"):
        files.read("/app/file")
