"""pydantic's errors in words: the path of a setting, what is wrong, what is allowed, the nearest name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal, get_args

from pydantic import BaseModel, ValidationError

from dipole.core.utils.errors import nearest
from dipole.core.utils.text import shortened


def describe(error: ValidationError, model: type[BaseModel], skip: str | None = None) -> list[str]:
    """Turn pydantic's errors into lines "path: what is wrong, what is allowed, nearest name"."""
    lines: list[str] = []
    for each in error.errors(include_url=False):
        location = [str(part) for part in each["loc"]]
        if skip is not None and location[:1] == [skip]:
            continue
        path = shortened(".".join(location)) or "the recipe"
        context = each.get("ctx", {})
        got = each["input"]
        kind = each["type"]
        if kind == "extra_forbidden":
            lines.append(f"{path}: {_unknown_key(location, model)}")
        elif kind == "missing":
            lines.append(f"{path}: is required.")
        elif kind in ("literal_error", "enum"):
            allowed = _allowed_values(location, model) or [context["expected"]]
            near = nearest(got, allowed) if isinstance(got, str) else ""
            lines.append(
                f"{path}: {shortened(repr(got))} is not allowed.{near} Allowed: {', '.join(map(str, allowed))}."
            )
        elif kind == "value_error":
            lines.append(f"{path}: {context['error']}".replace("\n", "\n    "))
        else:
            message = each["msg"].removeprefix("Input ")
            lines.append(f"{path}: {message}, got {shortened(json.dumps(got, default=str))}.")
    return list(dict.fromkeys(lines))


def _unknown_key(location: Sequence[str], model: type[BaseModel]) -> str:
    table = _table_at(location[:-1], model)
    allowed = list(table.model_fields) if table else []
    text = f"no such setting.{nearest(location[-1], allowed)}"
    if table is not None and len(location) == 1:
        # A key of [train] at the top level is the usual slip.
        elsewhere = [
            f"{name}.{location[0]}"
            for name in table.model_fields
            if (inner := _table_at([name], model)) is not None and location[0] in inner.model_fields
        ]
        if elsewhere:
            return f"no such setting at the top level; did you mean {' or '.join(elsewhere)}?"
    return f"{text} Allowed: {', '.join(allowed)}."


def _table_at(location: Sequence[str], model: type[BaseModel]) -> type[BaseModel] | None:
    """Follow a path of field names to the model that holds the keys there."""
    for key in location:
        field = model.model_fields.get(key)
        if field is None:
            # The path through a tagged union contains the discriminator's tag, which is not a field.
            continue
        options = [field.annotation, *get_args(field.annotation)]
        tables = [each for each in options if isinstance(each, type) and issubclass(each, BaseModel)]
        if not tables:
            return None
        model = tables[0]
    return model


def _allowed_values(location: Sequence[str], model: type[BaseModel]) -> list[Any]:
    table = _table_at(location[:-1], model)
    field = table.model_fields.get(location[-1]) if table else None
    if field is None:
        return []
    values: list[Any] = []
    for each in [field.annotation, *get_args(field.annotation)]:
        if getattr(each, "__origin__", None) is Literal:
            values.extend(get_args(each))
    return values
