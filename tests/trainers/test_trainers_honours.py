"""What each trainer honours, with a second trainer that honours less."""

from pathlib import Path
from typing import Literal

import pytest
from pydantic import BaseModel, ConfigDict

from polarlike.records import UsageError
from trainers import honours
from trainers.settings import GrpoSettings


class Lesser(BaseModel):
    model_config = ConfigDict(extra="forbid")
    advantage: Literal["grpo", "rloo"] = "grpo"
    queue: int = 4


REAL = dict(honours.TRAINERS)


@pytest.fixture(autouse=True)
def _two_trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(honours, "TRAINERS", {"grpo": GrpoSettings, "lesser": Lesser})


def test_what_a_trainer_honours_passes() -> None:
    assert honours.parse("lesser", Lesser, {"advantage": "rloo"}).advantage == "rloo"


@pytest.mark.parametrize("table", [{"advantage": "per_agent"}, {"clip_low": 0.3}])
def test_an_option_or_value_that_only_another_trainer_honours_names_both(table: dict[str, object]) -> None:
    [(option, value)] = table.items()
    with pytest.raises(UsageError, match=rf"lesser does not honour '{option}: {value}'; grpo does\."):
        honours.parse("lesser", Lesser, table)


def test_what_no_trainer_honours_is_plainly_wrong() -> None:
    with pytest.raises(UsageError, match="there is no setting 'advantag'; did you mean 'advantage'"):
        honours.parse("lesser", Lesser, {"advantag": "grpo"})


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"per_agent": {"unit": "call"}}, r"'per_agent' does nothing with advantage: grpo; .*advantage: per_agent"),
        ({"constant_tokens": 8.0}, r"'constant_tokens' does nothing with aggregation: token"),
    ],
)
def test_an_option_without_effect_beside_the_others_is_an_error(table: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        honours.parse("grpo", GrpoSettings, table)


def test_an_unknown_key_of_a_nested_table_is_named_with_its_nearest() -> None:
    with pytest.raises(UsageError, match=r"no setting 'per_agent\.unti'; did you mean 'unit'"):
        honours.parse("grpo", GrpoSettings, {"advantage": "per_agent", "per_agent": {"unti": "call"}})


def test_the_table_has_a_column_a_trainer_and_its_values() -> None:
    lines = honours.table().splitlines()
    assert lines[0] == "| option | `grpo` | `lesser` |"
    assert "| `advantage` | **grpo**, dr_grpo, rloo, per_agent | **grpo**, rloo |" in lines
    assert "| `queue` |  | 4 |" in lines


def test_the_page_on_trainers_shows_the_table_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, run: python -m trainers.honours docs/trainers.md"""
    monkeypatch.setattr(honours, "TRAINERS", REAL)
    page = (Path(honours.__file__).parents[1] / "docs" / "trainers.md").read_text()
    assert honours.written(page) == page
    assert "| `advantage` |" in page
