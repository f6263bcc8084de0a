"""What becomes of a test script's reward: a value, or why there is none; never a 0 that nobody judged."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from polarlike.plugins import load
from polarlike.records import Environment, Limits, Score, Task, Unscored, UsageError
from polarlike.verifiers.harbor import GarbledReward, HarborVerifier, read_reward
from sandbox.base import SandboxError, SandboxSpec
from sandbox.local_box import LocalBox, LocalProvider

TXT = 'echo {} > "$POLAR_LOGS/verifier/reward.txt"'
JSON = "echo '{}' > \"$POLAR_LOGS/verifier/reward.json\""


@pytest.fixture
async def box(tmp_path: Path) -> AsyncIterator[LocalBox]:
    provider = LocalProvider(tmp_path / "boxes", "test")
    box = await provider.start(SandboxSpec(), "verify")
    yield box
    await box.stop()
    await provider.close()


async def judge(box: Any, tmp_path: Path, script: str, seconds: float = 20.0, **settings: Any) -> Score:
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "test.sh").write_text(script)
    (tests / "data.txt").write_text("beside the script\n")
    table = {"type": "harbor", "tests": str(tests)}
    task = Task("t", "i", Environment(), table, Limits(verifier_s=seconds))
    return await HarborVerifier({"tests": str(tests), **settings}).verify(task, box)


@pytest.mark.parametrize(
    ("script", "value", "components"),
    [
        (TXT.format("0.75"), 0.75, {}),
        (TXT.format("0") + "; exit 1", 0.0, {}),  # a judged failure: the script said so
        (TXT.format("-2e-1"), -0.2, {}),
        (JSON.format('{"reward": 0.5, "style": 1, "speed": 0}'), 0.5, {"style": 1.0, "speed": 0.0}),
        (JSON.format('{"a": 1, "b": 0, "c": 0.5}'), 0.5, {"a": 1.0, "b": 0.0, "c": 0.5}),
        (TXT.format("1") + "\n" + JSON.format('{"reward": 0.2, "a": 0.5}'), 1.0, {"reward": 0.2, "a": 0.5}),
        ('cmp "$POLAR_TESTS/data.txt" <(echo beside the script) && ' + TXT.format("1"), 1.0, {}),
        ('[ "$PWD" = "$POLAR_WORKDIR" ] && [ "$X" = "1 2" ] && ' + TXT.format("1"), 1.0, {}),
    ],
)
async def test_a_number_that_the_script_wrote_is_the_value(
    box: LocalBox, tmp_path: Path, script: str, value: float, components: dict[str, float]
) -> None:
    score = await judge(box, tmp_path, script, env={"X": "1 2"})
    assert (score.value, score.unscored, score.components) == (value, None, components)


async def test_output_code_and_seconds_are_kept_as_evidence(box: LocalBox, tmp_path: Path) -> None:
    script = f"head -c 9000 /dev/zero | tr '\\0' x; echo; echo last line; echo wrong >&2; {TXT.format('0')}; exit 3"
    score = await judge(box, tmp_path, script)
    assert score.evidence["exit_code"] == 3
    assert score.evidence["stdout"].endswith("x\nlast line\n") and len(score.evidence["stdout"]) == 4000
    assert score.evidence["stderr"] == "wrong\n"
    assert 0 <= score.evidence["seconds"] < 20


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("true", "wrote no reward (test.sh ended with code 0)"),
        ("exit 7", "wrote no reward (test.sh ended with code 7)"),
        ("if", "wrote no reward"),
        (TXT.format("good"), "reward.txt is no number: 'good'"),
        (TXT.format(""), "reward.txt is no number"),
        (TXT.format("nan"), "is nan"),
        (TXT.format("inf"), "is inf"),
        (JSON.format("{"), "reward.json is not JSON"),
        (JSON.format("[1]"), "no table of numbers"),
        (JSON.format("{}"), "no table of numbers"),
        (JSON.format('{"reward": "1"}'), "'reward' is no number"),
        (JSON.format('{"reward": true}'), "'reward' is no number"),
        (JSON.format('{"reward": null}'), "'reward' is no number"),
        (JSON.format('{"reward": 1, "parts": {"a": 1}}'), "'parts' is no number"),
        (JSON.format('{"reward": NaN}'), "is nan"),
        (TXT.format("1") + "\n" + JSON.format("{"), "reward.json is not JSON"),
        ('mkdir "$POLAR_LOGS/verifier/reward.txt"', "wrote no reward"),
    ],
)
async def test_a_missing_or_garbled_reward_is_discarded_and_not_zero(
    box: LocalBox, tmp_path: Path, script: str, words: str
) -> None:
    score = await judge(box, tmp_path, script)
    assert (score.value, score.unscored) == (None, Unscored.DISCARD)
    assert words in score.reason
    assert "exit_code" in score.evidence


async def test_a_timeout_is_run_again_even_if_a_reward_was_written_before(box: LocalBox, tmp_path: Path) -> None:
    score = await judge(box, tmp_path, TXT.format("1") + "\nsleep 60", seconds=0.5)
    assert (score.value, score.unscored) == (None, Unscored.RETRY)
    assert score.reason == "The verifier took longer than its 0.5 seconds."


async def test_a_fault_of_the_box_is_run_again(tmp_path: Path) -> None:
    class Broken:
        async def put(self, host: Path, path: str) -> None: ...

        async def run(self, command: list[str], **_: Any) -> None:
            raise SandboxError("the engine is gone")

    score = await judge(Broken(), tmp_path, "true")
    assert (score.value, score.unscored) == (None, Unscored.RETRY)
    assert "the engine is gone" in score.reason


async def test_tests_that_are_gone_from_the_host_are_no_verdict(box: LocalBox, tmp_path: Path) -> None:
    task = Task("t", "i", Environment(), {"type": "harbor"})
    score = await HarborVerifier({"tests": str(tmp_path / "gone")}).verify(task, box)
    assert (score.value, score.unscored) == (None, Unscored.RETRY)


@pytest.mark.parametrize(("table", "words"), [({}, "'tests' is missing"), ({"tests": "x", "envs": {}}, "'env'")])
def test_wrong_settings_are_refused(table: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        HarborVerifier(table)


def test_a_number_too_large_for_a_float_is_garbled() -> None:
    with pytest.raises(GarbledReward):
        read_reward(None, b'{"reward": 1' + b"0" * 400 + b"}")


def test_it_is_registered_under_its_name() -> None:
    assert load("verifiers", "harbor") is HarborVerifier
