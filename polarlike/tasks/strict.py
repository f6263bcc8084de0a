"""Checks a table of the user's against a pydantic model and says what is wrong in one sentence.

Knows models and their errors; knows no file format. What holds: an unknown key is an error, never ignored, and names
the nearest key there is.
"""

from __future__ import annotations

import typing
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from polarlike.plugins import nearest
from polarlike.records import UsageError

Model = TypeVar("Model", bound=BaseModel)


class Strict(BaseModel):
    """A table of known keys whose values are not coerced (an integer may stand for a float)."""

    model_config = ConfigDict(extra="forbid", strict=True)


def check(model: type[Model], table: dict[str, Any], where: str) -> Model:
    """The table as a model. Raises UsageError with the first fault; `where` says which file (and line) it is in."""
    try:
        return model.model_validate(table)
    except ValidationError as e:
        first = e.errors()[0]
        raise UsageError(_sentence(model, first["type"], first["loc"], first["msg"], where)) from None


def _sentence(model: type[BaseModel], kind: str, loc: tuple[int | str, ...], message: str, where: str) -> str:
    path = ".".join(str(part) for part in loc if not _is_branch(part))
    if kind == "extra_forbidden":
        return f"{where}: there is no key {path!r}{nearest(str(loc[-1]), _keys(model, loc[:-1]))}".rstrip(".")
    if kind == "missing":
        return f"{where}: the key {path!r} is missing."
    message = message[:1].lower() + message[1:]
    return f"{where}: {path!r} is wrong: {message}." if path else f"{where}: {message}."


def _is_branch(part: int | str) -> bool:
    """Pydantic adds a union's branch to where an error is ("str", "dict[str,any]"); the user wrote no such key."""
    return part in ("str", "int") or str(part).startswith("dict[")


def _keys(model: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    """The keys that the table at `loc` may have."""
    for part in loc:
        field = model.model_fields.get(str(part))
        inner = _models(field.annotation) if field else []
        if inner:
            model = inner[0]
    return list(model.model_fields)


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [m for argument in typing.get_args(annotation) for m in _models(argument)]
