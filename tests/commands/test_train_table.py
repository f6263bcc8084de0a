"""What a training run's table lists, and how many rollouts its progress counts to."""

import io
from pathlib import Path

from rich.console import Console

from polarlike.commands.train import print_run, rollouts
from polarlike.config import load_config
from polarlike.rollouts.folder import RunFolder


def test_a_step_that_was_taken_again_is_listed_once_by_its_last_line(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for reward in (0.25, 0.75):
        folder.metric("step", step=0, policy_version=1, rollouts=8, reward_mean=reward, rollout_s=1, train_s=1)
        folder.metric("publish", step=1)
    out = io.StringIO()
    print_run(folder, Console(file=out, width=160))
    assert out.getvalue().count("step 0") == 1
    assert "0.750" in out.getvalue() and "0.250" not in out.getvalue()


def test_the_progress_counts_every_evaluation() -> None:
    train = {"train.steps": 7, "train.tasks_per_step": 4, "train.eval_samples": 2, "train.eval_greedy": True}
    config = load_config(None, {"samples": 5, **train, "train.eval_every": 3})
    # Seven steps of 3 tasks (there are no more) by 5; evaluated before steps 0, 3 and 6 and at the end, 10 tasks by 3.
    assert rollouts(config, 3, 10) == 105 + 120
    config = load_config(None, {"samples": 5, **train})
    assert rollouts(config, 9, 10) == 140 + 60
