"""Results of a run that another program measured, stored next to the record with their sources."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Literal

from pydantic import Field

from dipole.core.record import Part, RunRecord, now, read_part
from dipole.core.utils.errors import ConfigError, RecordError
from dipole.core.utils.files import atomic_write, disk_refusing

FILE = "measured.json"


class AddedResult(Part):
    """One number, who or what measured it, and when it was added (ISO 8601)."""

    value: float
    source: str
    time: str


class Additions(Part):
    """measured.json of a run folder. Fields are only ever added, with a default."""

    schema_version: Literal[1] = 1
    results: dict[str, AddedResult] = Field(default_factory=dict)


def read_additions(folder: Path) -> Additions:
    """Return the results added to a run. Raise RecordError if the file is damaged."""
    path = folder / FILE
    try:
        return read_part(path, Additions) if os.path.lexists(path) else Additions()
    except RecordError as error:
        raise RecordError(f"not what `dipole add` writes: {error}") from error


def with_additions(record: RunRecord, folder: Path) -> RunRecord:
    """Return the record with the added results."""
    added = read_additions(folder).results
    values = {name: each.value for name, each in added.items()}
    return record.model_copy(update={"results": values | record.results})


def add_results(folder: Path, record: RunRecord, values: dict[str, float], source: str) -> Additions:
    """Add results to a run, or replace added ones. The record itself does not change."""
    if own := sorted(values.keys() & record.results.keys()):
        raise ConfigError(
            f"{', '.join(own)} was measured by the run itself. Choose another name for another measurement."
        )
    new = {name: AddedResult(value=value, source=source, time=now()) for name, value in values.items()}
    found = Additions(results=read_additions(folder).results | new)
    with disk_refusing(f"cannot write {folder / FILE}", RecordError):
        atomic_write(folder / FILE, json.dumps(found.model_dump(), indent=2) + "\n")
    return found
