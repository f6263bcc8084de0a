"""Tables of the user's against pydantic models: what is wrong, in one sentence.

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


def check(model: type[Model], table: Any, where: str) -> Model:
    """The table as a model. Raises UsageError with the first fault; `where` says which file (and line) it is in."""
    try:
        return model.model_validate(table)
    except ValidationError as e:
        raise UsageError(f"{where}: {explain(e, model, 'key')}") from None


def explain(error: ValidationError, model: type[BaseModel], noun: str) -> str:
    """The first fault as a sentence without its capital: there is no NOUN 'a.b'; did you mean 'c'?"""
    first = error.errors()[0]
    loc, message = first["loc"], first["msg"]
    path = ".".join(str(part) for part in loc if not _is_branch(part))
    if first["type"] == "extra_forbidden":
        return f"there is no {noun} {path!r}{nearest(str(loc[-1]), _keys(model, loc[:-1]))}"
    if first["type"] == "missing":
        return f"the {noun} {path!r} is missing."
    if first["type"] in ("model_type", "model_attributes_type") and path:
        return f"the {noun} {path!r} must be a table of {noun}s ({', '.join(_keys(model, loc))})."
    message = message[:1].lower() + message[1:]
    return f"the {noun} {path!r} is wrong: {message}." if path else f"{message}."


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
