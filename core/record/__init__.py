"""The record of a run (record.json), results added to it later (measured.json), and lists of runs.

A record has everything needed to compare, cite and repeat a run. It is validated on reading and written atomically.
"""

import json
import math
import os
import platform
import sys
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dipole.core.utils.errors import ConfigError, DataError, ReceivedError, RecordError
from dipole.core.utils.files import atomic_write, disk_refusing, is_file
from dipole.core.utils.machine import processor_name, processors
from dipole.core.utils.process import LONGEST_OWNER, OWNER, is_gone
from dipole.core.utils.received import parse_json, read_bytes, read_end, read_text, read_toml
from dipole.core.utils.text import shortened
from dipole.core.utils.version import __version__

CONFIG, RECORD, METRICS, MEASURED = "config.toml", "record.json", "metrics.jsonl", "measured.json"
UNREADABLE, UNRECORDED = "unreadable", "no record"
LAST_LINE = 2**16
"""Bytes at the end of metrics.jsonl that are searched for its last line."""
SCHEMA_VERSION = 1
SHOWN = 20
"""Largest number of problems in one message."""
LIBRARIES = (
    "torch",
    "accelerate",
    "numpy",
    "scipy",
    "scikit-learn",
    "safetensors",
    "transformers",
    "datasets",
    "gymnasium",
    "stable-baselines3",
    "dm-control",
    "mujoco",
)
ABANDONED = "its process has ended without a word. Repeat the command to continue from the last checkpoint."
"""Error of a run whose record says running but whose process is gone."""
Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
Number = float | None
"""A result. None replaces a value that is not finite."""

Model = TypeVar("Model", bound=BaseModel)


class Part(BaseModel):
    """Base of the JSON files of a run: no unknown fields, finite numbers only."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Histogram(Part):
    """Counts of pair distances D in [0, 1], split by class and by held-out pairs.

    Attributes:
        edges: of the bins, bins + 1 increasing numbers.
        all: of all pairs, one count for each bin.
        same: of pairs of one class, or None without labels.
        different: of pairs of two classes, or None without labels.
        correct: of held-out anchors to their positives. None if the domain has no such pairs.
        incorrect: of held-out anchors to their negatives, or None.
    """

    edges: list[float]
    all: list[float]
    same: list[float] | None = None
    different: list[float] | None = None
    correct: list[float] | None = None
    incorrect: list[float] | None = None

    @model_validator(mode="after")
    def _fits(self) -> "Histogram":
        if len(self.edges) < 2 or self.edges != sorted(set(self.edges)):
            raise ValueError("the edges of the bins must grow")
        for name in ("all", "same", "different", "correct", "incorrect"):
            counts = getattr(self, name)
            if counts is not None and (len(counts) != len(self.edges) - 1 or min(counts) < 0):
                raise ValueError(f"{name!r} must hold a count of at least 0 for each of {len(self.edges) - 1} bins")
        return self


class Evaluation(Part):
    """One later `dipole eval` of the saved model."""

    time: str = Field(description="when, ISO 8601")
    results: dict[str, Number] = Field(description="by name")
    versions: dict[str, str] = Field(description="of packages, by name")
    agrees: bool = Field(description="whether every number equals the one recorded at the end of training")
    notes: list[str] = Field(default_factory=list, description="what was noticed, such as data files that have changed")


class Hardware(Part):
    """The machine of a run.

    Attributes:
        device: as of `torch.device`.
        device_name: of its maker.
        machine: architecture and operating system.
        processors: cores.
        threads: of torch.
        world_size: ranks.
    """

    device: str
    device_name: str
    machine: str
    processors: Count
    threads: Count
    world_size: Count = 1


class RunRecord(Part):
    """One run. Fields are only added, with a default."""

    schema_version: Literal[1] = Field(default=1, description="of this record")
    hash: str = Field(description="of what determines the result, and the name of the run's folder")
    name: str = Field(description="the recipe's name")
    domain: str = Field(description="the recipe's domain")
    objective: str = Field(description="its text, or none")
    seed: int = Field(description="that all others come from")
    status: Literal["running", "done", "failed", "interrupted"] = Field(description="how far it came")
    error: str | None = Field(default=None, description="what ended it, unless it is done")
    started: str = Field(description="when it began, ISO 8601")
    updated: str = Field(description="when this was written, ISO 8601")
    config: dict[str, Any] = Field(description="the complete configuration")
    identity: dict[str, Any] | None = Field(
        default=None, description="what of the configuration determines the result. Its hash names the run"
    )
    versions: dict[str, str] = Field(description="of packages, by name")
    hardware: Hardware = Field(description="where it was computed")
    seeds: dict[str, int] = Field(description="those that `seed` gave, by what they are for")
    data: dict[str, Any] = Field(description="what the data set is, with sizes and a fingerprint")
    parameters: Count = Field(description="trained numbers, those of the objective included")
    negatives_per_anchor: Number = Field(default=None, description="the mean, in the first batch")
    notes: list[str] = Field(
        default_factory=list,
        description="terms that were 0 at every step, and why. What became of a term, terms that dominate, a collapse",
    )
    steps: Count = Field(default=0, description="steps done")
    epochs: float = Field(default=0.0, description="passes through the data done")
    wall_seconds: float = Field(default=0.0, description="that it took, those before a resume included")
    training_seconds: float | None = Field(
        default=None, description="of the wall_seconds those of steps: without building, evaluating and saving"
    )
    peak_memory_bytes: Count = Field(default=0, description="largest resident memory of the process")
    peak_device_bytes: Count | None = Field(default=None, description="largest memory allocated on the GPU")
    evaluated_on: Literal["test", "validation"] = Field(default="test", description="the part that results are of")
    curves_on: Literal["test", "validation"] | None = Field(
        default=None, description="the part that eval/... and diag/... of metrics.jsonl are of. None: as evaluated_on"
    )
    results: dict[str, Number] = Field(default_factory=dict, description="evaluation at the end of training")
    chosen: dict[str, Any] | None = Field(
        default=None, description="result by which the kept weights are the best, their step, its value and its part"
    )
    diagnostics: dict[str, Number] = Field(
        default_factory=dict, description="geometry of the embeddings at the end, by name"
    )
    histogram: Histogram | None = Field(default=None, description="of the distances of pairs at the end")
    evaluations: list[Evaluation] = Field(default_factory=list, description="later ones, by `dipole eval`")


def read_record(path: Path) -> RunRecord:
    """Read and check a record.json. A running run whose process is gone is returned as interrupted."""
    try:
        record = read_part(path, RunRecord)
    except RecordError as error:
        raise RecordError(f"the record {error}") from error
    if record.status == "running":
        with suppress(ReceivedError):
            owner = read_bytes(path.with_name(OWNER), LONGEST_OWNER)
            if is_gone(owner.decode(errors="replace")):  # kill -9, a crash, a power cut
                return record.model_copy(update={"status": "interrupted", "error": ABANDONED})
    return record


def read_part(path: Path, model: type[Model]) -> Model:
    """Read a JSON file of a run. Raise RecordError, with its path first, if it does not follow `SCHEMA_VERSION`."""
    try:
        text = read_text(path)
        found = model.model_validate_json(text)
        parse_json(text)  # pydantic accepts duplicate names, and NaN under Any
    except ReceivedError as error:
        raise RecordError(str(error)) from error
    except ValidationError as error:
        raise RecordError(f"{str(path)[:300]} {schema_problem(error, SCHEMA_VERSION)}") from error
    except ValueError as error:
        raise RecordError(f"{str(path)[:300]} is damaged: {error}") from error
    return found


def schema_problem(error: ValidationError, version: int) -> str:
    """Describe why a file is invalid: damaged, of a newer schema than `version`, or not following it."""
    found = error.errors(include_url=False)
    if found[0]["type"] == "json_invalid":
        return f"is damaged: {found[0]['ctx']['error']}"
    written = next((each["input"] for each in found if each["loc"] == ("schema_version",)), None)
    if isinstance(written, int) and written > version:
        return f"has schema version {written}, this dipole reads up to {version}. Update dipole."
    lines = [
        f"  - {shortened('.'.join(map(str, each['loc'])), 100) or 'the file'}: "
        f"{shortened(each['msg'].removeprefix('Value error, '), 200)}"
        for each in found[:SHOWN]
    ]
    if len(found) > SHOWN:
        lines.append(f"  - and {len(found) - SHOWN} more")
    return f"does not follow schema {version}:\n" + "\n".join(lines)


def write_record(path: Path, record: RunRecord) -> None:
    """Replace record.json atomically. Raise RecordError if the disk refused. The old record is then intact."""
    with disk_refusing(f"cannot write the record {path}", RecordError):
        atomic_write(path, record.model_dump_json(indent=2) + "\n")


def finite(values: dict[str, float]) -> dict[str, Number]:
    """Replace numbers that JSON cannot hold by None."""
    return {name: float(value) if math.isfinite(value) else None for name, value in values.items()}


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def library_versions() -> dict[str, str]:
    """Return the versions of dipole, Python and the libraries that may affect a result."""
    found = {"dipole": __version__, "python": platform.python_version()}
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            # A loaded library names its build (2.13.0+cu130), its package metadata may not.
            found[name] = str(getattr(sys.modules.get(name), "__version__", "") or _installed_version(name))
    return found


# It takes 5 ms, and a process may write the records of many runs.
_installed_version = cache(version)


def hardware(device: Any, world_size: int) -> Hardware:
    """Describe the machine. `device` is a torch.device."""
    import torch

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()
    return Hardware(
        device=str(device),
        device_name=name,
        machine=f"{platform.system()} {platform.machine()}",
        processors=processors(),
        threads=torch.get_num_threads(),
        world_size=world_size,
    )


# Results that another program measured -------------------------------------------------------------------------------


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
    path = folder / MEASURED
    if not os.path.lexists(path):
        return Additions()
    try:
        return read_part(path, Additions)
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
    with disk_refusing(f"cannot write {folder / MEASURED}", RecordError):
        atomic_write(folder / MEASURED, json.dumps(found.model_dump(), indent=2) + "\n")
    return found


# Lists of runs -------------------------------------------------------------------------------------------------------


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
    try:
        if is_file(folder / RECORD):
            record = read_record(folder / RECORD)
            steps = record.steps
            if record.status != "done":
                steps = max(steps, last_step(folder))
            return RunLine(folder.name, record.status, record.name, record.objective, record.seed, steps)
        config = read_toml(folder / CONFIG)
    except (RecordError, ReceivedError) as error:
        return RunLine(folder.name, UNREADABLE, problem=shortened(" ".join(str(error).split()), 200))
    name, objective, seed = str(config.get("name", "")), str(config.get("objective", "")), config.get("seed", 0)
    if not isinstance(seed, int):
        seed = None
    return RunLine(folder.name, UNRECORDED, name, objective, seed, last_step(folder))


def last_step(folder: Path) -> int:
    """Return the step of the last complete line of metrics.jsonl, or 0."""
    with suppress(ReceivedError, ValueError, LookupError, TypeError):
        step = parse_json(read_end(folder / METRICS, LAST_LINE).split(b"\n")[-2])["step"]
        if isinstance(step, int):
            return step
    return 0
