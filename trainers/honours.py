"""What each trainer honours: the settings model of every trainer, and how a table of the config is checked against it.

A trainer declares what it honours by its model alone: an option it lacks, or a value its type does not allow, is a
UsageError that names the trainer, and the trainers that do have it. Knows settings; imports no torch, so a trainer's
settings model stands in a module that does not either.

`python -m trainers.honours docs/trainers.md` writes the table of that page anew.
"""

from __future__ import annotations

import json
import sys
import typing
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from polarlike.records import UsageError
from polarlike.strict import explain
from trainers.settings import WITHOUT_EFFECT, GrpoSettings
from trainers.trl_settings import SftSettings, TrlAsyncGrpoSettings, TrlGrpoSettings

Settings = TypeVar("Settings", bound=BaseModel)

TRAINERS: dict[str, type[BaseModel]] = {
    "grpo": GrpoSettings,
    "trl-grpo": TrlGrpoSettings,
    "trl-async-grpo": TrlAsyncGrpoSettings,
    "sft": SftSettings,
}
"""Settings models by the trainer's name in the config."""

MARKS = ("<!-- honours -->", "<!-- /honours -->")


def parse(trainer: str, model: type[Settings], table: dict[str, Any]) -> Settings:
    """The table as the trainer's settings. Raises UsageError with one sentence on the first thing that is wrong: an
    option unknown, not honoured by this trainer, of a wrong value, or without effect beside the others."""
    try:
        settings = model.model_validate(table)
    except ValidationError as error:
        option = str(error.errors()[0]["loc"][0]) if error.errors()[0]["loc"] else ""
        others = [name for name, other in TRAINERS.items() if name != trainer and _takes(other, table, option)]
        if others:
            raise UsageError(
                f"The trainer {trainer} does not honour '{option}: {table[option]}'; "
                f"{' and '.join(others)} {'do' if len(others) > 1 else 'does'}."
            ) from None
        raise UsageError(f"The trainer's settings: {explain(error, model, 'setting')}") from None
    for option in table:
        other, values = WITHOUT_EFFECT.get(option, ("", ()))
        now = getattr(settings, other, None)
        if now is not None and now not in values:
            name = other.removeprefix("effective_")
            raise UsageError(
                f"The trainer's setting '{option}' does nothing with {name}: {now}; "
                f"leave it out or set {name}: {' or '.join(values)}."
            )
    return settings


def _takes(model: type[BaseModel], table: dict[str, Any], option: str) -> bool:
    """Whether the model has the option and allows its value."""
    try:
        model.model_validate({option: table[option]})
    except (ValidationError, KeyError):
        return False
    return True


def table() -> str:
    """Markdown: a row an option, a column a trainer; a cell has the values, or the default where any value goes."""
    options = dict.fromkeys(option for model in TRAINERS.values() for option in model.model_fields)
    lines = [["option", *(f"`{name}`" for name in TRAINERS)], ["---"] * (len(TRAINERS) + 1)]
    lines += [[f"`{option}`", *(_cell(model, option) for model in TRAINERS.values())] for option in options]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(model: type[BaseModel], option: str) -> str:
    field = model.model_fields.get(option)
    if field is None:
        return ""
    choices = _literals(field.annotation)
    if choices:
        marked = [f"**{c}**" if c == field.get_default() else str(c) for c in choices]
        return ", ".join(marked)
    default = field.get_default()
    if isinstance(default, BaseModel | dict):
        return "a table"
    return "unset" if default is None else json.dumps(default).strip('"')


def _literals(annotation: Any) -> list[Any]:
    if typing.get_origin(annotation) is typing.Literal:
        return list(typing.get_args(annotation))
    return [value for argument in typing.get_args(annotation) for value in _literals(argument)]


def written(page: str) -> str:
    """The page with the table between its two marks as it is now."""
    before, _, rest = page.partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    return f"{before}{MARKS[0]}\n{table()}{MARKS[1]}{after}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(written(path.read_text()))
