"""Compare runs with undisturbed ones, and find what they left behind."""

import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load

from dipole.benchmarks.run_records import BENCH, read_records
from dipole.core.train.metrics import read_metrics

SHARED_MEMORY = Path("/dev/shm")
TIMES_AND_SIZES = {
    "started", "updated", "wall_seconds", "training_seconds", "peak_memory_bytes", "peak_device_bytes",
}  # fmt: skip
"""Fields of a record that differ between two equal runs."""


def differences(undisturbed: Path, runs: Path) -> Iterator[str]:
    """Yield a line for each record, metric or file that differs from the undisturbed folder."""
    wanted, found = read_records(undisturbed), read_records(runs)
    for problem in found.problems:
        yield f"{problem.path.name}: {problem.message[:300]}"
    if missing := wanted.records.keys() - found.records.keys():
        yield f"no record of {', '.join(sorted(missing))}"
    for name in sorted(wanted.records.keys() & found.records.keys()):
        ours, theirs = (each.records[name].model_dump(mode="json", exclude=TIMES_AND_SIZES) for each in (found, wanted))
        if different := sorted(key for key in theirs if ours[key] != theirs[key]):
            yield f"{name}: the record differs in {', '.join(different)}"
        if _metrics(runs / name) != _metrics(undisturbed / name):
            yield f"{name}: other lines of metrics"
        our_files, their_files = _digests(runs / name), _digests(undisturbed / name)
        for file in sorted(our_files.keys() | their_files.keys()):
            if file not in our_files:
                yield f"{name}: {file} is missing"
            elif file not in their_files:
                yield f"{name}: {file} should not exist"
            elif our_files[file] != their_files[file]:
                yield f"{name}: {file} has other contents"


def left_behind(runs: Path, temporary: Path, shared_before: set[str], pids: set[int]) -> Iterator[str]:
    """Yield a line for each temporary file, claim, checkpoint, socket and segment of shared memory that remains.

    Shared memory counts if it is new and its name has the id of one of our processes.
    """
    for path in sorted(runs.rglob("*")):
        place = path.relative_to(runs)
        is_temporary = ".tmp" in path.name or path.name == ".pid"
        is_claim = place.match(f"{BENCH}/claims/*.json") or place.match(f"{BENCH}/stops/*")
        is_checkpoint = place.parts[0] != BENCH and "checkpoints" in place.parts
        if is_temporary or is_claim or is_checkpoint or path.is_socket():
            yield f"left behind: {place}"
    yield from (f"left in TMPDIR: {name}" for name in sorted(os.listdir(temporary)))
    for name in sorted(shared_memory() - shared_before):
        if any(int(digits) in pids for digits in re.findall(r"\d{2,7}", name)):
            yield f"left in shared memory: {name}"


def shared_memory() -> set[str]:
    if not SHARED_MEMORY.is_dir():
        return set()
    return set(os.listdir(SHARED_MEMORY))


def _metrics(run: Path) -> list[dict[str, Any]]:
    """Read the metrics without their times."""
    return [
        {key: value for key, value in line.items() if key != "time"} for line in read_metrics(run / "metrics.jsonl")
    ]


def _digests(run: Path) -> dict[str, str]:
    """Hash every file of a run but its record, metrics and checkpoints."""
    found = {}
    for path in run.rglob("*"):
        place = path.relative_to(run)
        is_compared = path.name not in ("record.json", "metrics.jsonl") and not path.name.startswith(".")
        if is_compared and path.is_file() and "checkpoints" not in place.parts:
            found[place.as_posix()] = _digest(path)
    return found


def _digest(path: Path) -> str:
    """Hash the content of a file. Files of arrays hold times, so hash their names and values instead."""
    content = path.read_bytes()
    arrays: dict[str, Any] = {}
    if path.suffix == ".safetensors":
        arrays = load(content)
    elif path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
    if not arrays:
        return hashlib.sha256(content).hexdigest()
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].dtype} {arrays[name].shape}\n".encode())
        digest.update(arrays[name].tobytes())
    return digest.hexdigest()
