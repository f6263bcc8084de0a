import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from examples.make_tasks import operator_task, teacher_commands
from examples.policy.batches import Example, copy_batch, loss_and_hits, pad
from examples.policy.evaluation import SimulatedRollout, SimulatedTurn, figures, rollouts
from examples.policy.induction import write_induction_heads
from examples.policy.learn import trajectory
from examples.policy.make_policy import main
from examples.policy.prompts import MiniPrompts
from examples.policy.shell import Shell
from polarlike.engines.base import EngineOptions
from polarlike.engines.embedded import EmbeddedEngine
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


async def test_a_simulated_rollout_keeps_what_the_engine_sampled(prompts: MiniPrompts) -> None:
    engine = EmbeddedEngine(MODEL, EngineOptions(extra={"threads": 1}))
    await engine.start()
    [[one, other]] = await rollouts(engine, prompts, [TASK], samples=2, seed=5)
    groups = trajectory(one, "r", 1.0)
    assert [t.completion.tolist() for t in one.turns] != [t.completion.tolist() for t in other.turns]
    sampled = [int(i) for turn in one.turns for i in turn.completion]
    trained = [int(i) for segment in groups.segments for i in segment.ids[segment.loss_mask]]
    assert trained == sampled
    for segment in groups.segments:  # each logprob is the one of its token after all that stands before it
        scores = await engine.score(segment.ids, 1, 1.0)
        where = np.flatnonzero(segment.loss_mask)
        assert np.allclose(scores[where - 1], segment.logprobs[where], atol=1e-4)
    await engine.close()


def test_a_turn_after_a_malformed_reply_opens_a_new_segment() -> None:
    one = SimulatedRollout(TASK, Shell(dict(TASK.files)))
    ids = np.arange(9, dtype=np.int32)
    zeros = np.zeros(1, np.float32)
    for prompt, reply in ((ids[:3], 3), (ids[:5], 5), (ids[[0, 1, 2, 7]], 8)):
        one.turns.append(SimulatedTurn(prompt, np.array([reply], np.int32), zeros, np.zeros(1, np.int32)))
    first, second = trajectory(one, "r", 1.0).segments
    assert (first.ids.tolist(), first.loss_mask.nonzero()[0].tolist()) == ([0, 1, 2, 3, 4, 5], [3, 5])
    assert (second.ids.tolist(), second.loss_mask.nonzero()[0].tolist()) == ([0, 1, 2, 7, 8], [4])


def rollout(commands: list[str], replies: int) -> SimulatedRollout:
    shell = Shell(dict(TASK.files))
    for command in commands:
        shell.run(command)
    nothing = np.zeros(0, np.int32)
    turns = [SimulatedTurn(nothing, nothing, np.zeros(0, np.float32), nothing)] * replies
    return SimulatedRollout(TASK, shell, [], commands, turns)


def test_the_figures_are_shares_of_replies_rollouts_and_groups() -> None:
    right = rollout(teacher_commands(TASK), 4)
    wrong = rollout(["cat dazo.py", "sed -i 's| // | + |' dazu.py", "echo dazu > done.txt"], 6)
    found = figures([[right, wrong], [right, right]])
    assert found["well_formed"] == round(15 / 18, 3)
    assert found["copied"] == 0.75
    assert found["operator"] == 0.75
    assert found["reward"] == 0.75
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
