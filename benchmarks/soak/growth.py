"""Whether a run's memory grows with its updates: resident memory by step, of each domain's smallest recipe."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil

from dipole.benchmarks.soak.patience import WORK, Patience
from dipole.benchmarks.soak.processes import Place

MOST = 8.0
"""Megabytes that the last fifth of a run may have above the middle fifth: what an allocator's pieces come and go by."""
UPDATE = 1.0
"""Seconds of processors that an update may take."""


@dataclass(frozen=True)
class Growth:
    """Resident megabytes in the middle and in the last fifth of a run."""

    domain: str
    updates: int
    middle: float
    last: float

    @property
    def is_flat(self) -> bool:
        return self.last - self.middle <= MOST


def measure(place: Place, domain: str, recipe: str, settings: Sequence[str], updates: int) -> Growth:
    """Train so many updates and look at the process while they go on.

    Raises:
        RuntimeError: the run failed, or was over before it could be looked at. BrokenError: it does not end.
    """
    runs = place.folder / "growth" / domain
    length = (f"train.steps={updates}", "train.log_every=10", f"train.checkpoint_every={max(updates // 4, 1)}")
    sets = [text for each in (*settings, *length, f"train.evaluate_every={updates}") for text in ("--set", each)]
    process = place.start(["dipole", "train", recipe, *sets, "--runs", str(runs), "--quiet"])
    found: list[tuple[int, float]] = []
    patience = Patience(place, work=UPDATE * updates + WORK)
    while process.poll() is None:
        patience.look()
        step = _step(runs)
        if 0 < step < updates:
            found.append((step, _resident(process.pid)))
        time.sleep(0.1)
    middle = [size for step, size in found if 0.4 * updates <= step < 0.6 * updates and size]
    last = [size for step, size in found if 0.8 * updates <= step and size]
    if process.returncode or not middle or not last:
        raise RuntimeError(
            f"the run of {updates} updates in {domain} ended with code {process.returncode}; see {place.log}"
        )
    return Growth(domain, updates, median(middle), median(last))


def _step(runs: Path) -> int:
    """The step of the last whole line of metrics: of the file's end alone, as this is asked ten times a second."""
    for path in runs.glob("*/metrics.jsonl"):
        try:
            with open(path, "rb") as file:
                file.seek(max(0, path.stat().st_size - 20_000))
                lines = file.read().split(b"\n")[:-1]
            return int(json.loads(lines[-1])["step"]) if lines else 0
        except (OSError, ValueError, KeyError):
            continue
    return 0


def _resident(pid: int) -> float:
    try:
        return psutil.Process(pid).memory_info().rss / 1e6
    except psutil.Error:
        return 0.0
