"""List the runs of a folder without reading more than needed."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dipole.core.record import read_record
from dipole.core.utils.errors import DataError, ReceivedError, RecordError
from dipole.core.utils.files import disk_refusing, is_file
from dipole.core.utils.received import parse_json, read_end, read_toml
from dipole.core.utils.text import shortened

CONFIG, RECORD, METRICS = "config.toml", "record.json", "metrics.jsonl"
UNREADABLE, UNRECORDED = "unreadable", "no record"
LAST_LINE = 2**16
"""Bytes at the end of metrics.jsonl that are searched for its last line."""


@dataclass(frozen=True)
class RunLine:
    """One run of a list. `problem` is the error of its record."""

    name: str
    status: str
    run: str = ""
    objective: str = ""
    seed: int | None = None
    steps: int = 0
    problem: str = ""


def is_run(folder: Path) -> bool:
    """Return whether a folder holds a run. Hidden folders are leftovers of `dipole rm`."""
    there = any(is_file(folder / name) for name in (CONFIG, RECORD))
    return there and not folder.resolve().name.startswith(".")


def run_folders(runs: Path) -> list[Path]:
    """Return the run folders in a folder, sorted. Raise DataError if the folder cannot be read."""
    names: list[str] = []
    with disk_refusing(f"the folder {runs} cannot be read", DataError), suppress(FileNotFoundError, NotADirectoryError):
        names = os.listdir(runs)
    return [runs / name for name in sorted(names) if not name.startswith(".") and is_run(runs / name)]


def run_line(folder: Path) -> RunLine:
    """Summarise a run. The steps of an unfinished run are those of its last line of metrics."""
    if not is_file(folder / RECORD):
        return _unrecorded(folder)
    try:
        record = read_record(folder / RECORD)
    except RecordError as error:
        return RunLine(folder.name, UNREADABLE, problem=shortened(" ".join(str(error).split()), 200))
    steps = record.steps
    if record.status != "done":
        steps = max(steps, last_step(folder))
    return RunLine(folder.name, record.status, record.name, record.objective, record.seed, steps)


def _unrecorded(folder: Path) -> RunLine:
    try:
        config = read_toml(folder / CONFIG)
    except ReceivedError as error:
        return RunLine(folder.name, UNREADABLE, problem=shortened(str(error), 200))
    seed = config.get("seed", 0)
    return RunLine(
        folder.name,
        UNRECORDED,
        str(config.get("name", "")),
        str(config.get("objective", "")),
        seed if isinstance(seed, int) else None,
        last_step(folder),
    )


def last_step(folder: Path) -> int:
    """Return the step of the last complete line of metrics.jsonl, or 0."""
    try:
        step = parse_json(read_end(folder / METRICS, LAST_LINE).split(b"\n")[-2])["step"]
    except (ReceivedError, ValueError, LookupError, TypeError):
        return 0
    if isinstance(step, int):
        return step
    return 0
