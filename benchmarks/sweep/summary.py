"""The state of a search in one JSON file of the runs folder, which the report reads."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from dipole.benchmarks.run_records import Problem, read_parts
from dipole.core.record import Number, Part
from dipole.core.utils.files import atomic_write

SWEEPS = ".sweeps"
"""Folder of the searches inside a runs folder."""


class TrialLine(Part):
    """One trial: its values, its run, how it ended, and its metric on the validation part."""

    number: int
    state: Literal["complete", "pruned", "fail", "running"]
    values: dict[str, float | int | bool | str]
    value: Number
    run: str


class SearchSummary(Part):
    """A search: its space, its trials, the importance of keys, and the winner's runs on the test part."""

    name: str
    recipe: str
    metric: str
    maximize: bool
    space: list[str]
    trials: list[TrialLine]
    importance: dict[str, float] = Field(default_factory=dict)
    best: int | None = None
    winner: list[str] = Field(default_factory=list)


def write_summary(runs: Path, summary: SearchSummary) -> None:
    atomic_write(path_of(runs, summary.name), summary.model_dump_json(indent=1))


def path_of(runs: Path, name: str) -> Path:
    return runs / SWEEPS / f"{name}.json"


def read_summaries(runs: Path) -> tuple[list[SearchSummary], list[Problem]]:
    """Return the searches of a runs folder, and a problem for each unreadable file."""
    found, problems = read_parts(runs / SWEEPS, SearchSummary, "the search")
    return list(found.values()), problems
