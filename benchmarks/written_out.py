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
    suite = without_none(expand(tomllib.loads(path.read_text(encoding="utf-8"))))
    parts = [_table({key: value for key, value in suite.items() if key != "scale"})]
    for name, scale in suite.get("scale", {}).items():
        tables = {key: value for key, value in scale.items() if isinstance(value, Mapping)}
        parts.append(f"[scale.{name}]\n" + _table({key: value for key, value in scale.items() if key not in tables}))
        parts.append(toml_text({"scale": {name: tables}}).partition(f"[scale.{name}]\n")[2])
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"


def _table(values: Mapping[str, Any]) -> str:
    text = toml_text({key: value for key, value in values.items() if key not in LISTS})
    for key in LISTS:
        if key in values:
            entries = [
                toml_text({"x": [entry]}).strip().removeprefix("x = [").removesuffix("]") for entry in values[key]
            ]
            text += f"{key} = [\n" + "".join(f"    {entry},\n" for entry in entries) + "]\n"
    return text


def without_none(value: Any) -> Any:
    """Drop entries that are None, which TOML cannot write."""
    if isinstance(value, Mapping):
        return {key: without_none(each) for key, each in value.items() if each is not None}
    if isinstance(value, list | tuple):
        return [without_none(each) for each in value]
    return value
