"""The files of a run other than its record: curves and points. They are in the run's folder or in a results file."""

import json
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from dipole.benchmarks.results_file import Curve, StoredRun
from dipole.core.utils.errors import ReceivedError
from dipole.core.utils.received import parse_json, read_json, read_lines

MOST_POINTS = 160
"""Points of a curve that a picture shows."""


@dataclass(frozen=True)
class RunFiles:
    """The places of the files of each run: in its folder, or a run of a results file, by its name.

    `folder` is the folder of all other runs.
    """

    folders: dict[str, Path] = field(default_factory=dict)
    stored: dict[str, StoredRun] = field(default_factory=dict)
    folder: Path = Path("runs")

    def place(self, run: str) -> Path:
        """Return the folder of a run. It need not exist."""
        return self.folders.get(run, self.folder / run)

    def curves(self, run: str, names: Iterable[str]) -> dict[str, Curve]:
        """Return the curves of metrics.jsonl that exist."""
        if (found := self.stored.get(run)) is not None:
            return {name: found.curves[name] for name in names if name in found.curves}
        return read_curves(self.place(run) / "metrics.jsonl", names)

    def points(self, run: str) -> Any:
        """Return the content of points.json, or None if it is missing or damaged."""
        if run in self.stored:
            return self.stored[run].points
        try:
            return read_json(self.place(run) / "points.json")
        except ReceivedError:
            return None


def read_curves(path: Path, names: Iterable[str]) -> dict[str, Curve]:
    """Read the curves of the named quantities, without damaged lines and values that are no numbers."""
    marks = {name: json.dumps(name).encode() for name in names}
    points: dict[str, list[tuple[float, float]]] = defaultdict(list)
    with suppress(ReceivedError):  # from an unreadable line on, the file is ignored
        for raw in read_lines(path):
            if not any(mark in raw for mark in marks.values()):
                continue
            try:
                line = parse_json(raw)
            except ValueError:
                continue
            if isinstance(line, dict) and _is_number(step := line.get("step")):
                for name in marks:
                    if _is_number(value := line.get(name)):
                        points[name].append((float(step), float(value)))
    curves = {}
    for name, found in points.items():
        every = -(-len(found) // MOST_POINTS)
        kept = [p for i, p in enumerate(found) if i % every == 0 or i == len(found) - 1]
        curves[name] = Curve(tuple(step for step, _ in kept), tuple(value for _, value in kept))
    return curves


def _is_number(value: object) -> TypeGuard[float]:
    # A float from 1e999 on is infinite, an integer of that size fits no float.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
