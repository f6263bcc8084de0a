"""What is compared after weights were published, and when it is refused."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from trainers_builders import group, segment, trajectory

from polarlike.config import load_config
from polarlike.records import PolarError
from polarlike.templates import load_template
from trainers import rescore
from trainers.rescore import Limits, Sample

ENGINE: Any = SimpleNamespace(name="vllm", policy_version=3)


def test_the_shortest_recorded_segment_is_compared_from_its_first_sampled_token() -> None:
    long = segment(range(1, 12), range(4, 11))
    short = segment([1, 2, 3, 4, 5], [2, 4], logprobs=[-1.0, -3.0])
    masked = segment([9, 9], [])
    sample = rescore.recorded_sample([group([trajectory([long, masked, short], 1.0)])], 999)
    assert sample is not None
    assert (sample.ids.tolist(), sample.start) == ([1, 2, 3, 4, 5], 2)
    assert sample.recorded is not None
    np.testing.assert_array_equal(sample.recorded, [-1.0, np.nan, -3.0])


def test_what_was_sampled_at_another_temperature_is_no_measure_of_how_far_weights_moved() -> None:
    hot = segment([1, 2, 3, 4], [2, 3], temperature=0.7)
    sample = rescore.recorded_sample([group([trajectory([hot], 1.0)])], 999)
    assert sample is not None
    assert (sample.start, sample.recorded) == (2, None)


def test_no_more_than_256_tokens_are_compared() -> None:
    sample = rescore.recorded_sample([group([trajectory([segment(range(1, 600), range(100, 599))], 1.0)])], 999)
    assert sample is not None
    assert (sample.ids.size, sample.start) == (356, 100)


def test_the_sample_ends_where_the_engine_can_still_score_it() -> None:
    full = [group([trajectory([segment(range(1, 11), range(6, 10))], 1.0)])]
    sample = rescore.recorded_sample(full, 9)
    assert sample is not None and sample.recorded is not None
    assert (sample.ids.tolist(), sample.start, sample.recorded.size) == ([1, 2, 3, 4, 5, 6, 7, 8, 9], 6, 3)
    assert rescore.recorded_sample(full, 6) is None  # its first sampled token would be the one cut off


def test_without_a_trainable_token_there_is_nothing_recorded_to_compare() -> None:
    assert rescore.recorded_sample([group([trajectory([segment([1, 2], [])], 0.0)])], 999) is None


def test_the_fixed_sample_is_a_rendered_conversation(tiny_model: Path) -> None:
    template = load_template(tiny_model)
    sample = rescore.fixed_sample(template)
    assert sample.start == 1
    assert "careful assistant" in template.decode(sample.ids)


def test_differences_are_counted_by_their_largest_and_their_mean() -> None:
    sample = Sample(np.arange(5, dtype=np.int32), 2, np.array([-1.0, -2.5, np.nan], np.float32))
    ours, theirs = np.array([-1.0, -2.0, -3.0], np.float32), np.array([-1.0, -2.0, -3.3], np.float32)
    values = rescore.compare(sample, ours, theirs)
    assert values["rescore_max"] == pytest.approx(0.3, abs=1e-6)
    assert values["rescore_mean"] == pytest.approx(0.1, abs=1e-6)
    assert (values["rescore_tokens"], values["rescore_moved"]) == (3.0, 0.5)


def test_scores_that_are_not_finite_are_refused() -> None:
    nan = np.array([np.nan], np.float32)
    with pytest.raises(PolarError, match="not finite"):
        rescore.compare(Sample(np.arange(2, dtype=np.int32), 1), nan, np.zeros(1, np.float32))


@pytest.mark.parametrize(
    ("dtype", "settings", "values", "limit"),
    [
        ("float32", {}, (0.0009, 0.0009), None),
        ("float32", {}, (0.0011, 0.0001), "train.rescore_max"),
        ("float32", {"rescore_max": 0.01}, (0.0011, 0.0001), None),
        ("float32", {"rescore_mean": 1e-5}, (0.0009, 0.0001), "train.rescore_mean"),
        ("bfloat16", {}, (0.9, 0.09), None),
        ("bfloat16", {}, (0.2, 0.11), "train.rescore_mean"),
        ("bfloat16", {"rescore_max": 0.5}, (0.9, 0.09), "train.rescore_max"),
    ],
)
def test_the_limit_follows_the_precision_and_can_be_set(
    dtype: str, settings: dict[str, float], values: tuple[float, float], limit: str | None
) -> None:
    config = load_config(None, {"engine.dtype": dtype, **{f"train.{k}": v for k, v in settings.items()}})
    measured = {"rescore_max": values[0], "rescore_mean": values[1], "rescore_tokens": 8.0}
    if limit is None:
        rescore.check(measured, Limits.of(config), ENGINE)
        return
    with pytest.raises(PolarError, match=r"vllm does not serve what the trainer holds at policy version 3") as e:
        rescore.check(measured, Limits.of(config), ENGINE)
    assert limit in str(e.value)
