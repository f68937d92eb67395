"""Defaults of [train] and the domains' tables: runs are named by what differs. Running the file writes new ones."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from dipole.core.train.config import RunConfig, Settings, TrainConfig
from dipole.core.train.domains import adapter_class

WRITTEN = Path(__file__).with_suffix(".json")


def tables() -> dict[str, type[BaseModel]]:
    return {"train": TrainConfig} | {name: adapter_class(name).config_model for name in ("rl", "text", "toy", "vision")}


def defaults_of(table: type[BaseModel]) -> dict[str, Any]:
    """Field -> default as JSON. A table within is a mapping."""
    found: dict[str, Any] = {}
    for name, field in table.model_fields.items():
        if field.is_required():
            continue
        value = field.get_default(call_default_factory=True)
        found[name] = defaults_of(type(value)) if isinstance(value, Settings) else json.loads(json.dumps(value))
    return found | {"defaults_version": getattr(table, "defaults_version", 1)}


def changed(old: dict[str, Any], new: dict[str, Any], path: str) -> list[str]:
    """Settings that had another default at the same version of their table."""
    if old["defaults_version"] != new["defaults_version"]:
        return []
    lines = []
    for name in old.keys() & new.keys():
        here = f"{path}.{name}"
        if isinstance(old[name], dict) and isinstance(new[name], dict) and "defaults_version" in old[name]:
            lines += changed(old[name], new[name], here)
        elif old[name] != new[name]:
            lines.append(f"{here}: {old[name]!r} -> {new[name]!r}")
    return lines


@pytest.mark.parametrize("name", tables())
def test_a_changed_default_raises_the_version_of_its_table(name):
    written = json.loads(WRITTEN.read_text())[name]
    now = defaults_of(tables()[name])
    assert not changed(written, now, name), "raise defaults_version of the table, then run this file"
    assert written.keys() >= now.keys(), "a new setting: run this file to write its default down"
    assert RunConfig.defaults_version == 1


if __name__ == "__main__":
    WRITTEN.write_text(json.dumps({name: defaults_of(table) for name, table in tables().items()}, indent=1) + "\n")
