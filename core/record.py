"""record.json: what is needed to compare, cite and repeat a run. Validated on reading, written atomically."""

from __future__ import annotations

import json
import math
import os
import platform
import resource
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dipole.core.errors import RecordError
from dipole.core.files import atomic_write, why

SCHEMA_VERSION = 1
LIBRARIES = (
    "torch",
    "numpy",
    "scipy",
    "scikit-learn",
    "lightning-fabric",
    "safetensors",
    "transformers",
    "datasets",
    "gymnasium",
    "stable-baselines3",
    "dm-control",
    "mujoco",
)
Number = float | None
"""A result; None stands for a value that was not finite."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Histogram(_Part):
    """Counts of pair distances D in [0, 1], split by class where labels exist."""

    edges: list[float]
    all: list[float]
    same: list[float] | None = None
    different: list[float] | None = None


class Evaluation(_Part):
    """One later `dipole eval` of the saved model."""

    time: str
    results: dict[str, Number]
    versions: dict[str, str]
    agrees: bool = Field(description="whether every number equals the one recorded at the end of training")


class Hardware(_Part):
    """Where the run was computed."""

    device: str
    device_name: str
    machine: str
    processors: int
    threads: int
    world_size: int = 1


class RunRecord(_Part):
    """One run. Fields are only ever added, with a default, so that old records stay readable."""

    schema_version: Literal[1] = 1
    hash: str
    name: str
    domain: str
    objective: str
    seed: int
    status: Literal["running", "done", "failed", "interrupted"]
    error: str | None = None
    started: str
    updated: str
    config: dict[str, Any]
    versions: dict[str, str]
    hardware: Hardware
    seeds: dict[str, int]
    data: dict[str, Any]
    parameters: int = Field(description="trained numbers, those of the objective included")
    negatives_per_anchor: Number = None
    steps: int = 0
    epochs: float = 0.0
    wall_seconds: float = 0.0
    peak_memory_bytes: int = Field(default=0, description="largest resident memory of the process")
    peak_device_bytes: int | None = Field(default=None, description="largest memory allocated on the GPU")
    results: dict[str, Number] = Field(default_factory=dict, description="evaluation at the end of training")
    diagnostics: dict[str, Number] = Field(default_factory=dict)
    histogram: Histogram | None = None
    evaluations: list[Evaluation] = Field(default_factory=list)


def read_record(path: Path) -> RunRecord:
    """Read and check a record.json.

    Raises:
        RecordError: the file is missing, no JSON, of a newer schema, or does not follow the schema (problems named).
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise RecordError(f"the record {path} cannot be read: {why(error)}") from error
    except UnicodeDecodeError as error:
        raise RecordError(f"the record {path} is damaged: {error}") from error
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise RecordError(f"the record {path} is damaged: {error}") from error
    written = found.get("schema_version") if isinstance(found, dict) else None
    if isinstance(written, int) and written > SCHEMA_VERSION:
        raise RecordError(
            f"the record {path} has schema version {written}, this dipole reads up to {SCHEMA_VERSION}. Update dipole."
        )
    try:
        return RunRecord.model_validate(found)
    except ValidationError as error:
        lines = [f"  - {'.'.join(map(str, each['loc'])) or 'the file'}: {each['msg']}" for each in error.errors()]
        raise RecordError(f"the record {path} does not follow schema {SCHEMA_VERSION}:\n" + "\n".join(lines)) from error


def write_record(path: Path, record: RunRecord) -> None:
    """Replace record.json atomically.

    Raises:
        RecordError: the disk refused; the old record is intact.
    """
    try:
        atomic_write(path, record.model_dump_json(indent=2) + "\n")
    except OSError as error:
        raise RecordError(f"cannot write the record {path}: {why(error)}") from error


def finite(values: dict[str, float]) -> dict[str, Number]:
    """Replace numbers that JSON cannot hold by None."""
    return {name: float(value) if math.isfinite(value) else None for name, value in values.items()}


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def library_versions() -> dict[str, str]:
    """Versions of dipole, Python and the libraries that a result may depend on."""
    import dipole

    found = {"dipole": dipole.__version__, "python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def hardware(device: Any, world_size: int) -> Hardware:
    """Describe the machine; `device` is a torch.device."""
    import torch

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor_name()
    return Hardware(
        device=str(device),
        device_name=name,
        machine=f"{platform.system()} {platform.machine()}",
        processors=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        world_size=world_size,
    )


def _processor_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def peak_memory() -> int:
    """Largest resident memory of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
