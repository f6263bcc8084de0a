"""Correction weights against values worked out by hand."""

import math

import numpy as np
import pytest

from trainers.correction import Kind, Level, correction_weights

RATIOS = [0.25, 1.0, 1.6, 4.0]  # their product is 1.6, the geometric mean 1.6^(1/4)
MEAN = 1.6**0.25


def weights(kind: Kind, level: Level, low: float, high: float) -> list[float]:
    found = correction_weights(np.log(np.array(RATIOS)), kind, level, low, high)
    assert found.dtype == np.float32
    return found.tolist()


@pytest.mark.parametrize(
    ("kind", "level", "low", "high", "expected"),
    [
        ("tis", "token", 0.0, 2.0, [0.25, 1.0, 1.6, 2.0]),
        ("tis", "token", 0.5, 2.0, [0.5, 1.0, 1.6, 2.0]),
        ("tis", "sequence", 0.0, 1.5, [1.5] * 4),
        ("tis", "geometric", 0.0, 2.0, [MEAN] * 4),
        ("icepop", "token", 0.5, 2.0, [0.0, 1.0, 1.6, 0.0]),
        ("mis", "token", 0.0, 2.0, [0.25, 1.0, 1.6, 0.0]),
        ("mis", "sequence", 0.0, 2.0, [1.6] * 4),
        ("mis", "sequence", 0.0, 1.5, [0.0] * 4),
        ("mis", "geometric", 0.9, 1.1, [0.0] * 4),
        ("mis", "geometric", 0.9, 1.2, [MEAN] * 4),
    ],
)
def test_weights_are_truncated_or_masked_as_they_say(
    kind: Kind, level: Level, low: float, high: float, expected: list[float]
) -> None:
    np.testing.assert_allclose(weights(kind, level, low, high), expected, rtol=1e-6)


def test_a_ratio_that_overflows_is_truncated_or_masked() -> None:
    huge = np.full(3, 500.0)
    assert correction_weights(huge, "tis", "sequence", 0.0, 2.0).tolist() == [2.0] * 3
    assert correction_weights(huge, "mis", "sequence", 0.0, 2.0).tolist() == [0.0] * 3


def test_where_trainer_and_engine_agree_every_weight_is_one() -> None:
    for kind in ("tis", "icepop", "mis"):
        assert correction_weights(np.zeros(5), kind, "token", 0.5, 2.0).tolist() == [1.0] * 5  # type: ignore[arg-type]


def test_truncated_weights_make_a_mean_under_the_engine_one_under_the_trainer() -> None:
    """Untruncated, the estimate has no bias: the sum over all outcomes, each as often as the engine samples it."""
    engine, trainer, value = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.4, 0.2]), np.array([1.0, 2.0, -1.0])
    found = correction_weights(np.log(trainer) - np.log(engine), "tis", "token", 0.0, math.inf)
    assert float(engine @ (found * value)) == pytest.approx(float(trainer @ value), rel=1e-6)
