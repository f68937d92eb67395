"""Nested values as TOML text, which the standard library only reads."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from dipole.core.utils.errors import ConfigError


def toml_text(values: Mapping[str, Any], origins: Mapping[str, str] | None = None) -> str:
    """Write nested mappings of strings, numbers, booleans and lists as TOML, plain values before tables."""
    lines: list[str] = []
    _write_table(values, (), origins or {}, lines)
    return "\n".join(lines).strip("\n") + "\n"


def _write_table(
    values: Mapping[str, Any], prefix: tuple[str, ...], origins: Mapping[str, str], lines: list[str]
) -> None:
    for key, value in values.items():
        if not isinstance(value, Mapping):
            origin = origins.get(".".join((*prefix, key)))
            lines.append(f"{_key(key)} = {_value(value)}" + (f"  # {origin}" if origin else ""))
    for key, value in values.items():
        if isinstance(value, Mapping):
            path = (*prefix, key)
            lines.extend(["", f"[{'.'.join(map(_key, path))}]"])
            _write_table(value, path, origins, lines)


def _key(key: str) -> str:
    plain = key and all(char.isascii() and (char.isalnum() or char in "-_") for char in key)
    return key if plain else _string(key)


def _string(text: str) -> str:
    # JSON's escapes are TOML's, except that TOML also asks for DEL to be escaped and forbids surrogate pairs.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            return {math.inf: "inf", -math.inf: "-inf"}.get(value, "nan")
        return repr(value)
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)} = {_value(each)}" for key, each in value.items()) + "}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(map(_value, value)) + "]"
    raise ConfigError(f"a value of type {type(value).__name__} cannot be written as TOML: {value!r}")
