"""The files of a run other than its record: curves and points. They are in the run's folder or in a results file."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dipole.benchmarks.report.curves import Curve, read_curves
from dipole.benchmarks.results_file import StoredRun
from dipole.core.utils.errors import ReceivedError
from dipole.core.utils.received import read_json


@dataclass(frozen=True)
class RunFiles:
    """The places of the files of each run.

    Args:
        folders: folder of a run by its name.
        kept: a run of a results file by its name.
        folder: the folder of all other runs.
    """

    folders: Mapping[str, Path] = field(default_factory=dict)
    kept: Mapping[str, StoredRun] = field(default_factory=dict)
    folder: Path = Path("runs")

    def place(self, run: str) -> Path:
        """Return the folder of a run. It need not exist.

        Args:
            run: hash of the run.
        """
        return self.folders.get(run, self.folder / run)

    def curves(self, run: str, names: Iterable[str]) -> dict[str, Curve]:
        """Return the curves of metrics.jsonl that exist.

        Args:
            run: hash of the run.
            names: names of the quantities.
        """
        if (found := self.kept.get(run)) is not None:
            return {name: found.curves[name] for name in names if name in found.curves}
        return read_curves(self.place(run) / "metrics.jsonl", names)

    def points(self, run: str) -> Any:
        """Return the content of points.json, or None if it is missing or damaged.

        Args:
            run: hash of the run.
        """
        if run in self.kept:
            return self.kept[run].points
        try:
            return read_json(self.place(run) / "points.json")
        except ReceivedError:
            return None
