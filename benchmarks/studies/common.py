"""Result files and means with intervals for all studies."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dipole.benchmarks.statistics import summarize
from dipole.core.utils.files import atomic_write


def load(path: Path, default: Any) -> Any:
    """Read a JSON file, or return the default if there is none."""
    if not path.is_file():
        return default
    return json.loads(path.read_text(encoding="utf-8"))


def save(path: Path, content: Any) -> None:
    """Write a JSON file atomically, and make its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, json.dumps(content, indent=1) + "\n")


def grouped(runs: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the runs with keys `name/seed` by name."""
    found: dict[str, list[dict[str, Any]]] = {}
    for key, run in sorted(runs.items(), key=lambda item: item[0].rpartition("/")[2]):
        found.setdefault(key.rpartition("/")[0], []).append(run)
    return found


def run_missing(path: Path, content: dict[str, Any], todo: Mapping[str, Callable[[], Any]]) -> None:
    """Make the runs that `content["runs"]` lacks, and save the content after each."""
    for key, run in todo.items():
        if key not in content["runs"]:
            content["runs"][key] = run()
            save(path, content)
            print(key, content["runs"][key], flush=True)


def half_width(values: Sequence[float]) -> float:
    """Return half of the 95 % t-interval of the mean, or 0 for a single value."""
    if len(values) < 2:
        return 0.0
    summary = summarize(list(values))
    return summary.high - summary.mean


def mean_and_interval(values: Sequence[float]) -> str:
    """Return `mean +- half_width`, a single value alone, or "" without values."""
    if not values:
        return ""
    mean = f"{sum(values) / len(values):.1f}"
    if len(values) < 2:
        return mean
    return f"{mean} +- {half_width(values):.1f}"
