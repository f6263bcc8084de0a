"""The game's policy: its teacher, its warm start in quick mode, and a training step in this process."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.two_roles.compare import configured, lines, simulated
from examples.two_roles.dialogue import Game, Teacher, said_by, sample, teacher_examples
from examples.two_roles.make_policy import main, training_names
from examples.two_roles.make_tasks import HERE, Item, sample_item
from polarlike.tasks import load_tasks
from polarlike.templates import load_template

ITEM = Item({"dalu": 8, "keto": 5, "mibo": 3}, "dalu")


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two_roles") / "model"
    main(["--quick", "--items", "2", "--threads", "1", "--out", str(folder)])
    return folder


def test_a_quick_policy_is_a_model_folder_with_its_recipe(quick: Path) -> None:
    recipe = json.loads((quick / "recipe.json").read_text())
    assert [stage["name"] for stage in recipe["stages"]] == ["copy", "sure checker"]
    assert recipe["parameters"] < 300_000
    assert set(recipe["played"]) == {"train", "heldout"}
    assert recipe["played"]["heldout"]["games"] == 16
    assert (quick / "model.safetensors").stat().st_size < 1_000_000


def test_a_name_after_a_space_is_two_tokens(quick: Path) -> None:
    template = load_template(quick)
    for name in training_names()[::97]:
        longer = template.render([{"role": "user", "content": f"Count {name}."}], None)
        assert longer.size == template.render([{"role": "user", "content": "Count."}], None).size + 2


def test_names_of_the_task_files_are_never_trained_on() -> None:
    names = set(training_names())
    for part in ("train", "heldout"):
        for task in load_tasks(str(HERE / f"{part}.jsonl")):
            assert not names & set(Item.of_text(task.instruction).counts)


def test_a_sure_teacher_wins_in_two_replies_of_which_all_tokens_count(quick: Path) -> None:
    template = load_template(quick)
    solver, checker = teacher_examples(random.Random(0), ITEM, Teacher(), template)
    counted = [template.decode(e.ids[e.weight > 0]) for e in (solver, checker)]
    assert counted == ["Count dalu 8<|im_end|>", "Count dalu 8 fine<|im_end|>"]


def test_a_teacher_is_right_as_often_as_it_is_told_to_be(quick: Path) -> None:
    template, rng = load_template(quick), random.Random(1)
    said = [said_by(Teacher(solver=0.4), rng, Game(ITEM, template)) for _ in range(500)]
    # 0.4 of 500, within four deviations of a binomial (4 * sqrt(500 * 0.24) = 44).
    assert 156 < said.count("Count dalu 8") < 244
    assert {"Count dalu 5", "Count dalu 3"} < set(said)


def test_a_replys_logprobs_are_the_models_own(quick: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(quick, dtype=torch.float64).eval()
    template = load_template(quick)
    items = [sample_item(random.Random(k), training_names()) for k in range(2)]
    prompts = [template.render([{"role": "user", "content": text}], None) for text in (items[0].text, "Count.")]
    for prompt, (ids, logprobs) in zip(
        prompts, sample(model, prompts, template.stop_ids, torch.Generator().manual_seed(0)), strict=True
    ):
        whole = torch.from_numpy(np.concatenate([prompt, ids]).astype(np.int64))[None]
        scores = model(whole).logits.detach()[0, prompt.size - 1 : -1].log_softmax(-1)
        expected = scores[torch.arange(ids.size), torch.from_numpy(ids.astype(np.int64))]
        np.testing.assert_allclose(logprobs, expected.numpy(), atol=1e-5)


def test_a_run_in_this_process_measures_steps_and_measures_again(quick: Path, tmp_path: Path) -> None:
    overrides = {"engine.spec": f"embedded:{quick}", "train.steps": 2, "train.eval_samples": 1, "samples": 4}
    result = simulated(configured("per_agent", 0, tmp_path, overrides))
    assert len(result.before) == len(result.after) == 24
    assert len(result.norms) == len(result.credits) == 2
    assert {rollout.task_id for rollout in result.before} == {f"heldout-{k:02d}" for k in range(24)}
    assert len(list(lines("per_agent", [result]))) == 2
