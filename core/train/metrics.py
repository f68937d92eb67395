"""Write metrics.jsonl, one line of numbers per logged step, and average the values behind a line."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dipole.core.utils.files import disk_refusing
from dipole.core.utils.received import parse_json, read_lines


class Meter:
    """Means over the steps since the last line. Tensors are summed where they are: nothing waits for the device."""

    def __init__(self) -> None:
        self._sums: dict[str, Any] = {}
        self._counts: dict[str, int] = {}

    def add(self, values: Mapping[str, Tensor | float]) -> None:
        """Add one step's values: scalar tensors without a graph, or numbers."""
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0) + value
            self._counts[name] = self._counts.get(name, 0) + 1

    def take(self) -> dict[str, float]:
        """Return the means and reset. This waits for the device."""
        sums, counts = self._sums, self._counts
        self._sums, self._counts = {}, {}
        tensors = {name: value.double() for name, value in sums.items() if isinstance(value, Tensor)}
        if tensors:
            sums |= dict(zip(tensors, torch.stack([*tensors.values()]).tolist(), strict=True))
        return {name: value / counts[name] for name, value in sums.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"sums": dict(self._sums), "counts": dict(self._counts)}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        self._sums, self._counts = dict(state["sums"]), dict(state["counts"])
        for name, value in self._sums.items():
            if isinstance(value, Tensor):
                self._sums[name] = value.to(device)


class MetricsFile:
    """Append JSON lines. Each line is flushed before `write` returns."""

    def __init__(self, path: Path, keep_bytes: int = 0) -> None:
        """Open for appending after cutting the file back to `keep_bytes` (what a checkpoint had seen)."""
        self.path = path
        with self._writing():
            self._file = open(path, "ab")  # noqa: SIM115 (open as long as the run)
            self._file.truncate(min(keep_bytes, path.stat().st_size))
            self._file.seek(0, os.SEEK_END)

    def _writing(self) -> AbstractContextManager[None]:
        return disk_refusing(f"cannot write {self.path}")

    def write(self, values: Mapping[str, Any]) -> None:
        """Append one line. Numbers that JSON cannot represent become null."""
        line = json.dumps({key: _short(value) for key, value in values.items()})
        with self._writing():
            self._file.write(f"{line}\n".encode())
            self._file.flush()

    def position(self) -> int:
        """Return the size after putting everything on the disk."""
        with self._writing():
            os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read a metrics.jsonl. Lines that are not JSON objects are skipped, such as a last line cut off by a crash.

    Raises:
        DataError: it is not a regular file, or a line has megabytes.
    """
    lines = []
    for raw in read_lines(path):
        with suppress(ValueError):
            lines.append(parse_json(raw))
    return [line for line in lines if isinstance(line, dict)]


def _short(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return None
    return float(f"{value:.7g}")
