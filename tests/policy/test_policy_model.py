import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from examples.make_tasks import operator_task, teacher_commands
from examples.policy.batches import Example, copy_batch, loss_and_hits, pad
from examples.policy.evaluation import SimulatedRollout, figures, sample
from examples.policy.induction import write_induction_heads
from examples.policy.make_policy import main
from examples.policy.shell import Shell
from polarlike.engines.tiny import build_tiny_model

MODEL = Path(__file__).resolve().parents[2] / "examples" / "policy" / "model"
TASK = operator_task("dazu", "nebi", "boza", "lebu", wrong="//", right="%", phrasing=0, issue=0)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory):
    from transformers import AutoModelForCausalLM

    folder = build_tiny_model(tmp_path_factory.mktemp("m"), hidden=128, layers=2, heads=2, head_dim=64, ff=64)
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")


def test_a_copy_batch_counts_only_what_looking_back_can_tell() -> None:
    batch = copy_batch(random.Random(3), 16, 64, 1_000_000_000)
    assert batch.ids.shape == batch.weight.shape == (16, 64)
    for ids, weight in zip(batch.ids.tolist(), batch.weight.tolist(), strict=True):
        pairs = {}
        for here, there, counts in zip(ids, ids[1:], weight[1:], strict=False):
            assert not counts or pairs.get(here) == there
            pairs[here] = there


def test_padding_counts_nothing() -> None:
    short = Example(np.array([5, 6], np.int32), np.array([0, 1], np.float32))
    long = Example(np.array([1, 2, 3], np.int32), np.array([0, 1, 1], np.float32))
    batch = pad([short, long], 9)
    assert batch.ids.tolist() == [[5, 6, 9], [1, 2, 3]]
    assert batch.weight.tolist() == [[0, 1, 0], [0, 1, 1]]


def test_the_loss_is_the_weighted_mean_of_the_counted_tokens(small) -> None:
    ids = torch.tensor([[3, 7, 11, 2]])
    weight = torch.tensor([[0.0, 1.0, 0.0, 3.0]])
    from examples.policy.batches import Batch

    loss, _ = loss_and_hits(small, Batch(ids, weight))
    logprobs = small(ids).logits[0].log_softmax(-1)
    wanted = -(1 * logprobs[0, 7] + 3 * logprobs[2, 2]) / 4
    assert torch.allclose(loss, wanted, atol=1e-5)


def test_the_written_head_looks_at_the_token_before(small) -> None:
    write_induction_heads(small)
    ids = torch.randint(0, 400, (1, 200), generator=torch.Generator().manual_seed(0))
    attention = small(ids, output_attentions=True).attentions[0][0, 0]  # layer 0, head 0: [query, key]
    assert attention[1:].argmax(-1).tolist() == list(range(199))


def test_sampling_left_of_nothing_is_the_same_in_a_batch_as_alone(small) -> None:
    prompts = [np.arange(3, 30, dtype=np.int32), np.arange(40, 52, dtype=np.int32)]
    settings = {"stops": (1,), "temperature": 0.0, "generator": torch.Generator()}
    together = sample(small, prompts, **settings)
    alone = [sample(small, [p], **settings)[0] for p in prompts]
    assert [a.tolist() for a in together] == [a.tolist() for a in alone]


def rollout(commands: list[str], replies: int) -> SimulatedRollout:
    shell = Shell(dict(TASK.files))
    for command in commands:
        shell.run(command)
    return SimulatedRollout(TASK, shell, np.zeros(0, np.int32), [], commands, replies)


def test_the_figures_are_shares_of_replies_rollouts_and_groups() -> None:
    right = rollout(teacher_commands(TASK), 4)
    wrong = rollout(["cat dazo.py", "sed -i 's| // | + |' dazu.py", "echo dazu > done.txt"], 6)
    found = figures([[right, wrong], [right, right]])
    assert found["well_formed"] == round(15 / 18, 3)
    assert found["copied"] == 0.75
    assert found["operator"] == 0.75
    assert found["reward"] == (1 + 0.5 + 1 + 1) / 4
    assert found["varied"] == 0.5
    assert found["submitted"] == 0.75


def test_the_committed_model_is_small_and_in_bfloat16() -> None:
    assert sum(file.stat().st_size for file in MODEL.iterdir()) < 8_000_000
    config = json.loads((MODEL / "config.json").read_text())
    assert (config["model_type"], config["max_position_embeddings"]) == ("qwen3", 32768)
    with safe_open(MODEL / "model.safetensors", "pt") as weights:
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"BF16"}  # noqa: SIM118


@pytest.mark.slow
def test_a_quick_run_writes_a_policy_that_copies(package: Path, tmp_path: Path) -> None:
    arguments = ["--quick", "--tasks", "0", "--out", str(tmp_path), "--mini-swe-agent", str(package), "--threads", "1"]
    assert main(arguments) == 0
    recipe = json.loads((tmp_path / "recipe.json").read_text())
    assert recipe["random_copy_accuracy_before"] < 0.05
    assert recipe["stages"][0]["hits"] > 0.5
    assert (tmp_path / "model.safetensors").is_file()
