"""Roles of the two-role program: in the segments of a rollout through the proxy, and in the advantages."""

from pathlib import Path

import numpy as np
import pytest

from examples.two_roles.compare import scales
from examples.two_roles.dialogue import Game
from examples.two_roles.make_tasks import HERE, Item
from polarlike.config import load_config
from polarlike.records import Group, Trajectory
from polarlike.rollouts.collect import Wanted, collect
from polarlike.rollouts.evidence import audit
from polarlike.rollouts.folder import RunFolder
from polarlike.rollouts.stage import open_stage
from polarlike.tasks import load_tasks
from polarlike.templates import ChatTemplate, load_template
from trainers.credit import Credit, rows_with_advantages
from trainers.settings import CreditSettings

# The solver is wrong at first and right when it is told; the checker finds both out.
POLICY = """
import re

def policy(conversation):
    item = conversation.messages[0]["content"]
    counts = dict(re.findall(r"(\\w+) (\\d+)[,.]", item))
    asked = re.search(r"Count (\\w+)", item)[1]
    wrong = next(count for name, count in counts.items() if name != asked)
    if conversation.model == "solver":
        return f"Count {asked} {wrong if len(conversation.messages) == 1 else counts[asked]}"
    right, claim = int(counts[asked]), int(re.search(r"Claim (\\d+)", item)[1])
    return "fine" if claim == right else "high" if claim > right else "low"
"""


async def rolled_out(tmp_path: Path, model: Path) -> tuple[Trajectory, float]:
    """The rollout of a task whose first answer is refused, and the share of its tokens that the engine's log proves."""
    (tmp_path / "policy.py").write_text(POLICY)
    config = load_config(
        HERE / "train.yaml",
        {
            "out": tmp_path / "run",
            "engine.spec": f"scripted:{tmp_path / 'policy.py'}",
            "engine.model": model,
            "sandbox.kind": "local",
        },
    )
    folder = RunFolder(config.out)
    folder.open(config, "collect")
    try:
        async with open_stage(config, folder) as stage:
            task = load_tasks(str(HERE / "train.jsonl"))[0]
            groups = [group async for group in collect(stage, [Wanted(task, "g", 1)])]
            return groups[0].trajectories[0], audit(stage.store, folder.engine_log).share or 0.0
    finally:
        folder.close()


async def test_model_names_are_the_roles_of_a_rollouts_segments(tmp_path: Path, tiny_model: Path) -> None:
    trajectory, proven = await rolled_out(tmp_path, tiny_model)
    found = sorted((segment.role, len(segment.spans)) for segment in trajectory.segments)
    assert found == [("checker", 1), ("checker", 1), ("solver", 2)]
    assert proven == 1.0
    assert trajectory.score is not None
    assert trajectory.score.value == 1.0
    assert trajectory.score.components == {"solver": 0.5, "checker": 1.0}


# ---------------------------------------------------------------- advantages of one recorded group

ITEM = Item({"dalu": 8, "keto": 5, "mibo": 3}, "dalu")
GAMES = {  # name: what is said in turn
    "right": ["dalu 8", "fine"],  # R = 1: the solver once, the checker once
    "mended": ["dalu 5", "low", "dalu 8", "fine"],  # R = 1: twice and twice
    "wrong": ["dalu 3", "fine"],  # R = 0: once and once
    "mute": ["dalu", "keto"],  # R = 1/4: the solver twice, the checker never
}


@pytest.fixture(scope="module")
def group(tiny_model: Path) -> Group:
    template = load_template(tiny_model)
    return Group("g", "t", [recorded(name, replies, template) for name, replies in GAMES.items()])


def recorded(name: str, replies: list[str], template: ChatTemplate) -> Trajectory:
    game = Game(ITEM, template)
    for text in replies:
        ids = template.encode_reply(game.lane.prompt(), {"role": "assistant", "content": text})
        game.lane.logprobs.append(np.full(ids.size, -1.0, np.float32))
        game.reply(ids)
    assert game.over
    return game.trajectory(name, 0)


def credited(group: Group, **settings: object) -> Credit:
    return rows_with_advantages([group], CreditSettings.model_validate(settings))


def by_role(credit: Credit, role: str) -> list[float]:
    """One value a rollout in which the role spoke."""
    own = [[row for row in rows if row.role == role] for rows in credit.rows[0]]
    return [float(rows[0].advantages[0]) for rows in own if rows]


def test_rewards_are_the_verifiers(group: Group) -> None:
    assert [t.score.value for t in group.trajectories if t.score] == [1.0, 1.0, 0.0, 0.25]


def test_each_role_is_compared_with_itself_call_by_call(group: Group) -> None:
    credit = credited(group, advantage="per_agent", per_agent={"unit": "call"})
    # The solver's calls: 1, 1, 1, 0, 1/4, 1/4. Mean 7/12; squared deviations 3 (5/12)^2 + (7/12)^2 + 2 (1/3)^2 = 13/12.
    spread = (13 / 12 / 5) ** 0.5 + 1e-4
    np.testing.assert_allclose(
        by_role(credit, "solver"), np.array([5 / 12, 5 / 12, -7 / 12, -1 / 3]) / spread, rtol=1e-6
    )
    # The checker's calls: 1, 1, 1, 0. Mean 3/4; squared deviations 3/16 + 9/16 = 3/4, so the deviation is 1/2.
    np.testing.assert_allclose(by_role(credit, "checker"), np.array([1, 1, -3]) / 4 / 0.5001, rtol=1e-6)


def test_each_role_has_mean_0_and_unit_scale(group: Group) -> None:
    credit = credited(group, advantage="per_agent", per_agent={"unit": "call"})
    found = {role: (mean, deviation) for role, mean, deviation in scales(credit)}
    assert set(found) == {"solver", "checker"}
    for mean, deviation in found.values():
        assert abs(mean) < 1e-6
        assert 0.999 < deviation < 1.0  # short of 1 by eps


def test_grpo_gives_both_roles_one_scale_and_neither_mean_0(group: Group) -> None:
    credit = credited(group, advantage="grpo")
    # Rollouts: 1, 1, 0, 1/4. Mean 9/16; squared deviations 2 (7/16)^2 + (9/16)^2 + (5/16)^2 = 51/64.
    spread = (51 / 64 / 3) ** 0.5 + 1e-4
    np.testing.assert_allclose(by_role(credit, "solver"), np.array([7, 7, -9, -5]) / 16 / spread, rtol=1e-6)
    np.testing.assert_allclose(by_role(credit, "checker"), np.array([7, 7, -9]) / 16 / spread, rtol=1e-6)
    means = {role: mean for role, mean, _ in scales(credit)}
    # The solver's calls: (7 + 2 * 7 - 9 - 2 * 5) / 6 = 1/3 sixteenths; the checker's: (7 + 2 * 7 - 9) / 4 = 3.
    np.testing.assert_allclose([means["solver"], means["checker"]], np.array([1 / 3, 3]) / 16 / spread, rtol=1e-5)


def test_counted_by_rollout_a_role_that_always_speaks_learns_as_under_grpo(group: Group) -> None:
    per_agent = credited(group, advantage="per_agent")
    assert by_role(per_agent, "solver") == by_role(credited(group, advantage="grpo"), "solver")
    # The checker spoke in three: 1, 1, 0. Mean 2/3, deviation sqrt(1/3).
    np.testing.assert_allclose(by_role(per_agent, "checker"), np.array([1, 1, -2]) / 3 / (3**-0.5 + 1e-4), rtol=1e-6)
