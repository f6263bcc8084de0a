"""The trainer's table of the config."""

from typing import Any

import pytest
from pydantic import BaseModel

from polarlike.records import UsageError
from trainers.honours import parse
from trainers.settings import CorrectionSettings, GrpoSettings, LoraSettings, PerAgentSettings


def parse_settings(table: dict[str, Any]) -> GrpoSettings:
    return parse("grpo", GrpoSettings, table)


def test_an_unknown_key_is_a_usage_error_with_its_nearest_name() -> None:
    with pytest.raises(UsageError, match=r"no setting 'clip_hi'; did you mean 'clip_high'\?"):
        parse_settings({"clip_hi": 0.3})


@pytest.mark.parametrize(
    "bad", [{"lr": 0}, {"epochs": 0}, {"advantage": "ppo"}, {"lr": float("nan")}, {"clip_low": 1.5}, {"lr": "much"}]
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


@pytest.mark.parametrize("model", [GrpoSettings, PerAgentSettings, LoraSettings, CorrectionSettings])
def test_every_setting_says_what_it_does(model: type[BaseModel]) -> None:
    assert all(field.description for field in model.model_fields.values())


def test_a_correction_makes_ratios_start_from_the_trainer() -> None:
    assert GrpoSettings().effective_old == "engine"
    assert parse_settings({"correction": {"kind": "tis"}}).effective_old == "trainer"
    with pytest.raises(UsageError, match="a correction needs old: trainer"):
        parse_settings({"correction": {"kind": "tis"}, "old": "engine"})


def test_the_bounds_of_a_correction_are_those_of_its_authors_unless_set() -> None:
    assert CorrectionSettings(kind="tis").bounds == (0.0, 2.0)
    assert CorrectionSettings(kind="icepop").bounds == (0.5, 5.0)
    assert CorrectionSettings(kind="mis", low=0.1).bounds == (0.1, 3.0)


def test_icepop_by_sequence_is_an_error_that_names_what_to_use() -> None:
    with pytest.raises(UsageError, match="mis is what masks by sequence"):
        parse_settings({"correction": {"kind": "icepop", "level": "sequence"}})


def test_an_empty_table_of_lora_takes_its_defaults() -> None:
    assert parse_settings({"lora": {}}).lora == LoraSettings(rank=16, alpha=32)
