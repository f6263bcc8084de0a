"""The trainer's table of the config."""

from typing import Any

import pytest

from polarlike.records import UsageError
from trainers.honours import parse
from trainers.settings import GrpoSettings


def parse_settings(table: dict[str, Any]) -> GrpoSettings:
    return parse("grpo", GrpoSettings, table)


def test_an_unknown_key_is_a_usage_error_with_its_nearest_name() -> None:
    with pytest.raises(UsageError, match=r"no setting 'clip_hi'; did you mean 'clip_high'\?"):
        parse_settings({"clip_hi": 0.3})


@pytest.mark.parametrize(
    "bad", [{"lr": 0}, {"epochs": 0}, {"advantage": "ppo"}, {"lr": float("nan")}, {"clip_low": 1.0}, {"lr": "much"}]
)
def test_a_wrong_value_is_a_usage_error_that_names_the_key(bad: dict[str, object]) -> None:
    [key] = bad
    with pytest.raises(UsageError, match=f"setting '{key}' is wrong"):
        parse_settings(bad)


def test_a_number_that_yaml_reads_as_text_is_a_number() -> None:
    assert parse_settings({"lr": "2e-4"}).lr == 2e-4


def test_dr_grpo_implies_a_constant_normaliser_unless_told_otherwise() -> None:
    assert GrpoSettings().effective_aggregation == "token"
    assert GrpoSettings(advantage="dr_grpo").effective_aggregation == "constant"
    assert GrpoSettings(advantage="dr_grpo", aggregation="rollout").effective_aggregation == "rollout"


def test_every_setting_says_what_it_does() -> None:
    assert all(field.description for field in GrpoSettings.model_fields.values())
