"""Work trees: what a difference holds, that it survives storage, and that nothing leaves its folder."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox import tree
from sandbox.base import SandboxError
from sandbox.tree import Entry, TreePatch


def write(root: Path, path: str, data: bytes, mode: int = 0o644) -> None:
    place = root / path
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(data)
    place.chmod(mode)


def difference(root: Path, start: tree.Manifest) -> TreePatch:
    return tree.compare(start, tree.walk_folder(root))


def test_an_untouched_tree_has_an_empty_patch(tmp_path: Path) -> None:
    write(tmp_path, "a/b.txt", b"one")
    patch = difference(tmp_path, tree.manifest_of(tree.walk_folder(tmp_path)))
    assert patch.empty
    assert patch.summary()["counts"] == {"added": 0, "modified": 0, "deleted": 0}


def test_every_kind_of_change_is_in_the_patch(tmp_path: Path) -> None:
    write(tmp_path, "kept", b"same")
    write(tmp_path, "changed", b"one")
    write(tmp_path, "gone", b"one")
    write(tmp_path, "mode", b"one")
    write(tmp_path, "becomes_folder", b"one")
    write(tmp_path, "becomes_file/inner", b"one")
    (tmp_path / "link").symlink_to("kept")
    start = tree.manifest_of(tree.walk_folder(tmp_path))

    write(tmp_path, "changed", b"\x00two")
    (tmp_path / "gone").unlink()
    (tmp_path / "mode").chmod(0o755)
    (tmp_path / "becomes_folder").unlink()
    write(tmp_path, "becomes_folder/new", b"new")
    (tmp_path / "becomes_file" / "inner").unlink()
    (tmp_path / "becomes_file").rmdir()
    write(tmp_path, "becomes_file", b"file")
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to("/etc/passwd")
    (tmp_path / "empty").mkdir(mode=0o700)

    patch = difference(tmp_path, start)
    assert patch.files == {
        "changed": Entry(0o644, data=b"\x00two"),
        "mode": Entry(0o755, data=b"one"),
        "becomes_folder": Entry(stat.S_IMODE((tmp_path / "becomes_folder").stat().st_mode)),
        "becomes_folder/new": Entry(0o644, data=b"new"),
        "becomes_file": Entry(0o644, data=b"file"),
        "link": Entry(0o777, link="/etc/passwd"),
        "empty": Entry(0o700),
    }
    assert patch.deleted == ["becomes_file/inner", "gone"]
    assert patch.summary()["added"] == ["becomes_folder/new", "empty"]
    assert patch.summary()["modified"] == ["becomes_file", "becomes_folder", "changed", "link", "mode"]
    assert patch.summary()["bytes"] == 4 + 3 + 3 + 4


def test_git_and_bytecode_folders_are_left_out_at_any_depth(tmp_path: Path) -> None:
    for path in (".git/config", "sub/.git/hooks/pre-commit", "a/__pycache__/m.pyc"):
        write(tmp_path, path, b"x")
    assert set(difference(tmp_path, {}).files) == {"a", "sub"}


def test_a_link_to_a_folder_is_not_walked(tmp_path: Path) -> None:
    write(tmp_path / "outside", "secret", b"secret")
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "out").symlink_to("../outside")
    assert difference(inside, {}).files == {"out": Entry(0o777, link="../outside")}


def test_setuid_bits_do_not_travel(tmp_path: Path) -> None:
    write(tmp_path, "tool", b"x", 0o4755)
    assert difference(tmp_path, {}).files["tool"].mode == 0o755


def test_pipes_and_sockets_are_left_out(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert difference(tmp_path, {}).empty


def test_too_much_changed_content_is_refused_with_a_sentence(tmp_path: Path) -> None:
    write(tmp_path, "big", b"x" * 3_000_000)
    with pytest.raises(SandboxError, match="more than 2 MiB"):
        tree.compare({}, tree.walk_folder(tmp_path), limit=2 << 20)


def test_large_unchanged_files_do_not_count(tmp_path: Path) -> None:
    write(tmp_path, "big", b"x" * 3_000_000)
    start = tree.manifest_of(tree.walk_folder(tmp_path))
    write(tmp_path, "small", b"y")
    assert set(tree.compare(start, tree.walk_folder(tmp_path), limit=1 << 20).files) == {"small"}


def archive_of(*members: tarfile.TarInfo) -> tarfile.TarFile:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as archive:
        for member in members:
            archive.addfile(member, io.BytesIO(b"x" * member.size))
    return tarfile.open(fileobj=io.BytesIO(raw.getvalue()))


def member(name: str, kind: bytes = tarfile.REGTYPE, size: int = 0, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.size, info.linkname = kind, size, link
    return info


def test_a_hard_link_comes_as_a_file_with_the_content() -> None:
    archive = archive_of(member("app/a", size=3), member("app/b", tarfile.LNKTYPE, link="app/a"))
    entries = tree.tree_of(tree.walk_tar(archive))
    assert entries["b"] == Entry(0o644, data=b"xxx")


@pytest.mark.parametrize("name", ["app/../etc/passwd", "app/a/../../b", "app//etc/passwd", "app/./x"])
def test_a_path_that_leaves_its_folder_is_refused(name: str) -> None:
    with pytest.raises(SandboxError, match="refused"):
        tree.tree_of(tree.walk_tar(archive_of(member(name))))


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../x", ""])
def test_unsafe_paths_are_refused_when_a_patch_is_applied(path: str, tmp_path: Path) -> None:
    for patch in (TreePatch(files={path: Entry(0o644, data=b"x")}), TreePatch(deleted=[path])):
        with pytest.raises(SandboxError, match="refused"):
            patch.apply_to(tmp_path)


def test_nothing_is_written_through_a_link_in_the_target(tmp_path: Path) -> None:
    outside, target = tmp_path / "outside", tmp_path / "target"
    write(outside, "file", b"kept")
    target.mkdir()
    (target / "folder").symlink_to(outside)
    (target / "file").symlink_to(outside / "file")
    files = {"folder": Entry(0o755), "folder/file": Entry(0o644, data=b"new"), "file": Entry(0o644, data=b"new")}
    TreePatch(files=files, deleted=["folder/other"]).apply_to(target)
    assert (outside / "file").read_bytes() == b"kept"
    assert (target / "folder" / "file").read_bytes() == b"new"
    assert not (target / "folder").is_symlink()


def test_other_bytes_are_refused() -> None:
    for data in (b"", b"not zstd", TreePatch().to_bytes()[:-4]):
        with pytest.raises(SandboxError, match="not a stored patch"):
            TreePatch.from_bytes(data)


def test_the_text_shows_lines_modes_links_and_names_binary_content() -> None:
    start = {
        "a.txt": Entry(0o644, data=b"one\ntwo\n"),
        "b.bin": Entry(0o644, data=b"\x00"),
        "gone.txt": Entry(0o644, data=b"bye\n"),
        "mode": Entry(0o644, data=b"\x00"),
    }
    patch = TreePatch(
        files={
            "a.txt": Entry(0o755, data=b"one\n2\n"),
            "b.bin": Entry(0o644, data=b"\x01\x00"),
            "link": Entry(0o777, link="a.txt"),
            "mode": Entry(0o755, data=b"\x00"),
        },
        deleted=["gone.txt"],
        modified=["a.txt", "b.bin", "mode"],
    )
    text = patch.diff(start)
    assert "-two\n+2\n" in text
    assert "mode 644 -> 755" in text
    assert "diff b.bin\nbinary content differs\n" in text
    assert "+-> a.txt" in text
    assert "-bye\n" in text
    assert "diff mode\nmode 644 -> 755\n" in text


NAMES = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=6).filter(
    lambda name: name not in (".", "..", ".git", "__pycache__")
)
FILES = st.dictionaries(
    st.lists(NAMES, min_size=1, max_size=3).map("/".join),
    st.tuples(st.binary(max_size=20), st.sampled_from([0o644, 0o755])),
)


def laid(root: Path, files: dict[str, tuple[bytes, int]]) -> Path:
    """A folder with these files; a file in the place of a folder gives way."""
    root.mkdir()
    for path, (data, mode) in sorted(files.items()):
        parents = (root.joinpath(*path.split("/")[:depth]) for depth in range(1, path.count("/") + 1))
        if not any(parent.is_file() for parent in parents) and not (root / path).is_dir():
            write(root, path, data, mode)
    return root


@settings(max_examples=60, deadline=None)
@given(FILES, FILES)
def test_a_stored_patch_turns_the_one_tree_into_the_other(
    tmp_path_factory: pytest.TempPathFactory, old: dict[str, tuple[bytes, int]], new: dict[str, tuple[bytes, int]]
) -> None:
    top = tmp_path_factory.mktemp("trees")
    before, after = laid(top / "before", old), laid(top / "after", new)
    patch = difference(after, tree.manifest_of(tree.walk_folder(before)))
    stored = TreePatch.from_bytes(patch.to_bytes())
    assert stored == patch
    assert stored.to_bytes() == patch.to_bytes()
    stored.apply_to(before)
    assert tree.tree_of(tree.walk_folder(before)) == tree.tree_of(tree.walk_folder(after))


def test_a_name_that_is_no_text_survives_storage(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9")
    write(tmp_path, name, b"x")
    patch = TreePatch.from_bytes(difference(tmp_path, {}).to_bytes())
    assert patch.files == {name: Entry(0o644, data=b"x")}
