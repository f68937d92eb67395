"""What lies beside a record, wherever that is: curves, points of a plane. In a run's folder, or a kept line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dipole.benchmarks.kept import KeptRun
from dipole.benchmarks.report.curves import Curve, read_curves
from dipole.core.utils.errors import ReceivedError
from dipole.core.utils.received import read_json


@dataclass(frozen=True)
class Beside:
    """Where each run's folder is, and which are kept without one.

    Args:
        folders: folder of a run by its name.
        kept: a run of a results file by its name.
        folder: where runs lie that neither names.
    """

    folders: Mapping[str, Path] = field(default_factory=dict)
    kept: Mapping[str, KeptRun] = field(default_factory=dict)
    folder: Path = Path("runs")

    @classmethod
    def of(cls, runs: Path | Beside) -> Beside:
        """Of a folder of runs, or what is one already.

        Args:
            runs: the folder.
        """
        return runs if isinstance(runs, Beside) else cls(folder=runs)

    def place(self, run: str) -> Path:
        """The folder of a run, as far as it has one.

        Args:
            run: its name.
        """
        return self.folders.get(run, self.folder / run)

    def curves(self, run: str, names: Iterable[str]) -> dict[str, Curve]:
        """Curves of the named quantities, those that there are.

        Args:
            run: its name.
            names: as metrics.jsonl has them.
        """
        if (found := self.kept.get(run)) is not None:
            return {name: found.curves[name] for name in names if name in found.curves}
        return read_curves(self.place(run) / "metrics.jsonl", names)

    def points(self, run: str) -> Any:
        """What points.json holds; None where it is absent or damaged.

        Args:
            run: its name.
        """
        if run in self.kept:
            return self.kept[run].points
        try:
            return read_json(self.place(run) / "points.json")
        except ReceivedError:
            return None
