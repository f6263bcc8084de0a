"""Checkpoint folders under torn writes."""

from pathlib import Path

import pytest

from polarlike.records import PolarError
from trainers import checkpoints


def fill(text: str) -> object:
    def write_files(folder: Path) -> None:
        (folder / "model").mkdir()
        (folder / "model" / "weights").write_text(text)
        (folder / "state").write_text("state of " + text)

    return write_files


def write(folder: Path, text: str = "one") -> None:
    checkpoints.write(folder, fill(text))  # type: ignore[arg-type]


def test_a_written_checkpoint_is_whole_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    write(tmp_path / "out" / "step-1")
    checkpoints.check(tmp_path / "out" / "step-1")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["step-1"]


def test_a_checkpoint_of_the_same_name_is_replaced(tmp_path: Path) -> None:
    write(tmp_path / "step-1", "one")
    write(tmp_path / "step-1", "two")
    checkpoints.check(tmp_path / "step-1")
    assert (tmp_path / "step-1" / "model" / "weights").read_text() == "two"
    assert [p.name for p in tmp_path.iterdir()] == ["step-1"]


def test_a_write_that_dies_leaves_the_old_checkpoint_and_no_new_one(tmp_path: Path) -> None:
    def die(folder: Path) -> None:
        (folder / "state").write_text("half")
        raise KeyboardInterrupt

    write(tmp_path / "step-1", "one")
    for name in ("step-1", "step-2"):
        with pytest.raises(KeyboardInterrupt):
            checkpoints.write(tmp_path / name, die)
    checkpoints.check(tmp_path / "step-1")
    assert (tmp_path / "step-1" / "state").read_text() == "state of one"
    assert not (tmp_path / "step-2").exists()
    write(tmp_path / "step-2", "two")  # what the dead write left is no obstacle
    assert checkpoints.newest(tmp_path) == tmp_path / "step-2"


@pytest.mark.parametrize("tear", ["cut", "changed", "missing", "no manifest", "torn manifest"])
def test_a_torn_checkpoint_is_refused_and_an_earlier_one_is_the_newest(tmp_path: Path, tear: str) -> None:
    write(tmp_path / "step-1")
    write(tmp_path / "step-2")
    weights, manifest = tmp_path / "step-2" / "model" / "weights", tmp_path / "step-2" / checkpoints.MANIFEST
    {
        "cut": lambda: weights.write_text("on"),
        "changed": lambda: weights.write_text("onf"),
        "missing": weights.unlink,
        "no manifest": manifest.unlink,
        "torn manifest": lambda: manifest.write_text(manifest.read_text()[:20]),
    }[tear]()
    with pytest.raises(PolarError, match="resume from an earlier one"):
        checkpoints.check(tmp_path / "step-2")
    assert checkpoints.newest(tmp_path) == tmp_path / "step-1"


def test_a_whole_folder_whose_process_died_before_it_was_renamed_is_not_the_newest(tmp_path: Path) -> None:
    write(tmp_path / "step-1")
    (tmp_path / "step-1").rename(tmp_path / ".step-1.writing")
    assert checkpoints.newest(tmp_path) is None


def test_only_names_of_the_pattern_are_looked_at(tmp_path: Path) -> None:
    write(tmp_path / "step-1")
    write(tmp_path / "with-a-late-name")
    assert checkpoints.newest(tmp_path, "step-?") == tmp_path / "step-1"


def test_a_folder_without_checkpoints_has_no_newest(tmp_path: Path) -> None:
    assert checkpoints.newest(tmp_path) is None
    assert checkpoints.newest(tmp_path / "absent") is None


def test_a_disk_that_is_full_while_saving_is_one_sentence_and_the_old_checkpoint_stands(tmp_path: Path) -> None:
    checkpoints.write(tmp_path / "step-1", lambda folder: None)

    def fill(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise RuntimeError("PytorchStreamWriter failed: No space left on device\nat some line")

    with pytest.raises(PolarError, match=r"step-1 could not be saved \(.*No space left on device\); mend that") as got:
        checkpoints.write(tmp_path / "step-1", fill)
    assert "at some line" not in str(got.value)
    checkpoints.check(tmp_path / "step-1")
