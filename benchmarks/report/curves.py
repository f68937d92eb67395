"""Learning curves out of metrics.jsonl: read once per run, thinned, averaged over seeds."""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import TypeGuard

import numpy as np

from dipole.benchmarks.report.kinds import Line
from dipole.core.utils.errors import ReceivedError
from dipole.core.utils.received import parse_json, read_lines

MOST_POINTS = 160


@dataclass(frozen=True)
class Curve:
    """One quantity of one run: values at steps.

    Args:
        steps: done when each value was measured, rising.
        values: as many.
    """

    steps: tuple[float, ...]
    values: tuple[float, ...]


def read_curves(path: Path, names: Iterable[str]) -> dict[str, Curve]:
    """Curves of the named quantities; damaged lines and values that are no numbers are left out."""
    wanted = list(names)
    points: dict[str, list[tuple[float, float]]] = defaultdict(list)
    marks = [json.dumps(name).encode() for name in wanted]
    for raw in _lines(path):
        if not any(mark in raw for mark in marks):
            continue
        try:
            line = parse_json(raw)
        except ValueError:
            continue
        step = line.get("step") if isinstance(line, dict) else None
        if not _is_number(step):
            continue
        for name in wanted:
            value = line.get(name)
            if _is_number(value):
                points[name].append((float(step), float(value)))
    return {name: _thinned(found) for name, found in points.items()}


def _lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, up to where it cannot be read; none where there is none."""
    with suppress(ReceivedError):
        yield from read_lines(path)


def _is_number(value: object) -> TypeGuard[float]:
    # A float from 1e999 on is infinite, an integer of that size fits no float.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def mean_line(label: str, curves: Sequence[Curve], factor: float = 1.0) -> Line:
    """Mean over runs, with a band of one standard deviation from two runs on.

    At every step that any of them has within the range that all of them have; in between a run is taken as linear.
    """
    curves = [curve for curve in curves if curve.steps]
    if not curves:
        return Line(label, [], [])
    low_end, high_end = max(min(curve.steps) for curve in curves), min(max(curve.steps) for curve in curves)
    steps = sorted({step for curve in curves for step in curve.steps if low_end <= step <= high_end})
    rows = [_at(curve, steps) for curve in curves]
    values = [[factor * value for value in column] for column in zip(*rows, strict=True)]
    means = [fmean(v) for v in values]
    if len(curves) < 2:
        return Line(label, steps, means)
    spread = [stdev(v) for v in values]
    low = [m - s for m, s in zip(means, spread, strict=True)]
    high = [m + s for m, s in zip(means, spread, strict=True)]
    return Line(label, steps, means, low, high)


def _at(curve: Curve, steps: Sequence[float]) -> list[float]:
    """Values of a curve at steps within its range; of a step that it has twice (a resumed run), the later one."""
    known = dict(zip(curve.steps, curve.values, strict=True))
    own = sorted(known)
    return [float(value) for value in np.interp(steps, own, [known[step] for step in own])]


def _thinned(points: Sequence[tuple[float, float]]) -> Curve:
    every = -(-len(points) // MOST_POINTS)
    kept = [p for i, p in enumerate(points) if i % every == 0 or i == len(points) - 1] if points else []
    return Curve(tuple(step for step, _ in kept), tuple(value for _, value in kept))
