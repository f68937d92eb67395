"""Write a suite as TOML without grids, one line per row and column (`dipole show SUITE --expand`)."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dipole.benchmarks.grid import expand
from dipole.benchmarks.suite import read_suite
from dipole.core.train.config import toml_text

LISTS = ("columns", "rows")


def written_out(path: Path) -> str:
    """Return the text of a suite with the same cells and no grids. ConfigError if the file is not a suite."""
    read_suite(path)
    suite = _without_none(expand(tomllib.loads(path.read_text(encoding="utf-8"))))
    scales = suite.pop("scale", {})
    parts = [_table(suite)]
    for name, scale in scales.items():
        tables = {key: value for key, value in scale.items() if isinstance(value, Mapping)}
        plain = {key: value for key, value in scale.items() if key not in tables}
        parts += [
            f"[scale.{name}]\n{_table(plain)}",
            toml_text({"scale": {name: tables}}).partition(f"[scale.{name}]\n")[2],
        ]
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"


def _table(values: Mapping[str, Any]) -> str:
    plain = {key: value for key, value in values.items() if key not in LISTS}
    lists = [
        f"{key} = [\n" + "".join(f"    {_inline(entry)},\n" for entry in values[key]) + "]\n"
        for key in LISTS
        if key in values
    ]
    return toml_text(plain) + "".join(lists)


def _inline(entry: Mapping[str, Any]) -> str:
    return toml_text({"x": [entry]}).strip().removeprefix("x = [").removesuffix("]")


def _without_none(value: Any) -> Any:
    """Drop entries that are None, which TOML cannot write."""
    if isinstance(value, Mapping):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    if isinstance(value, list | tuple):
        return [_without_none(each) for each in value]
    return value
