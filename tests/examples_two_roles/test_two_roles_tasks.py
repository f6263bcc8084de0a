"""The game's tasks and their grades, worked out by hand."""

import json
import subprocess
from pathlib import Path

import pytest

from examples.two_roles.make_tasks import HERE, Item, main
from examples.two_roles.verifier.check import components, reward
from polarlike.config import load_config
from polarlike.tasks import load_tasks
from polarlike.tasks.check import check_task
from sandbox.local_box import LocalProvider
from trainers.honours import parse
from trainers.settings import GrpoSettings

SOLVER_5, SOLVER_8, MUTE = ({"role": "solver", "number": n} for n in (5, 8, None))
FINE, HIGH, LOW = ({"role": "checker", "verdict": v} for v in ("fine", "high", "low"))


@pytest.mark.parametrize(
    ("answer", "value"),
    [("8", 1.0), (" 8\n", 1.0), ("08", 1.0), ("5", 0.0), ("88", 0.0), ("8 8", 0.0), ("", 0.0), (None, 0.0)],
)
def test_only_the_right_number_is_right(answer: str | None, value: float) -> None:
    assert reward(answer, 8) == value


def test_no_answer_is_better_than_a_wrong_one() -> None:
    assert reward("none", 8) == 0.25


@pytest.mark.parametrize(
    ("talk", "shares"),
    [
        ([SOLVER_8, FINE], {"solver": 1.0, "checker": 1.0}),
        ([SOLVER_5, LOW, SOLVER_8, FINE], {"solver": 0.5, "checker": 1.0}),
        ([SOLVER_8, HIGH, SOLVER_8], {"solver": 1.0, "checker": 0.0}),
        ([SOLVER_5, HIGH, SOLVER_8, FINE], {"solver": 0.5, "checker": 0.5}),
        ([SOLVER_5, FINE], {"solver": 0.0, "checker": 0.0}),
        ([MUTE, MUTE], {"solver": 0.0}),
        ([], {}),
    ],
)
def test_each_role_has_the_share_of_what_it_said_rightly(talk: list[dict], shares: dict[str, float]) -> None:
    assert components(json.dumps(talk), 8) == shares


@pytest.mark.parametrize("talk", [None, "{", "[1]", '[{"role": "solver"}]'])
def test_a_talk_that_cannot_be_read_gives_no_shares(talk: str | None) -> None:
    assert components(talk, 8) == {}


def test_the_script_writes_value_and_components(tmp_path: Path) -> None:
    (tmp_path / "verifier").mkdir()
    (tmp_path / "answer.txt").write_text("8")
    (tmp_path / "talk.json").write_text(json.dumps([SOLVER_5, LOW, SOLVER_8, FINE]))
    folders = {"POLAR_WORKDIR": tmp_path, "POLAR_LOGS": tmp_path, "POLAR_TESTS": HERE / "verifier"}
    env = {"RIGHT": "8", "PATH": "/usr/bin:/bin", **{name: str(folder) for name, folder in folders.items()}}
    subprocess.run(["bash", HERE / "verifier" / "test.sh"], env=env, check=True, timeout=60)
    found = json.loads((tmp_path / "verifier" / "reward.json").read_text())
    assert found == {"reward": 1.0, "solver": 0.5, "checker": 1.0}


async def test_a_task_grades_nothing_as_0_and_its_solution_as_1(tmp_path: Path) -> None:
    task = load_tasks(str(HERE / "heldout.jsonl"))[0]
    assert (await check_task(task, LocalProvider(tmp_path, "check"))).problems == []


def test_the_task_files_are_what_the_generator_writes(tmp_path: Path) -> None:
    main(["--out", str(tmp_path)])
    for part in ("train", "heldout"):
        assert (tmp_path / f"{part}.jsonl").read_bytes() == (HERE / f"{part}.jsonl").read_bytes()


def test_no_thing_of_a_held_out_item_is_in_a_training_item() -> None:
    def named(part: str) -> set[str]:
        return {n for task in load_tasks(str(HERE / f"{part}.jsonl")) for n in Item.of_text(task.instruction).counts}

    assert len(named("train")) > 50
    assert not named("train") & named("heldout")


def test_an_items_text_says_the_item() -> None:
    item = Item({"dalu": 8, "keto": 5, "mibo": 3}, "keto")
    assert item.text == "In stock: dalu 8, keto 5, mibo 3.\nCount keto."
    assert Item.of_text(item.text) == item
    assert item.right == 5


def test_the_config_is_one_that_a_run_takes() -> None:
    config = load_config(HERE / "train.yaml", {})
    settings = parse("grpo", GrpoSettings, config.trainer.settings)
    assert (settings.advantage, settings.per_agent.unit) == ("per_agent", "call")
    assert config.engine.spec == "embedded:examples/two_roles/model"
