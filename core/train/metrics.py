"""Write and read metrics.jsonl, one line of numbers per logged step."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from dipole.core.utils.files import disk_refusing
from dipole.core.utils.received import parse_json, read_lines


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
        with self._writing():
            self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read a metrics.jsonl. Lines that are not JSON objects are skipped, such as a last line cut off by a crash."""
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
