"""Learning curves out of metrics.jsonl, thinned to what a picture shows."""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

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
    """Read the curves of the named quantities, without damaged lines and values that are no numbers."""
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
        if not isinstance(line, dict) or not _is_number(step := line.get("step")):
            continue
        for name in wanted:
            value = line.get(name)
            if _is_number(value):
                points[name].append((float(step), float(value)))
    return {name: _thinned(found) for name, found in points.items()}


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file up to the first that cannot be read."""
    with suppress(ReceivedError):
        yield from read_lines(path)


def _is_number(value: object) -> TypeGuard[float]:
    # A float from 1e999 on is infinite, an integer of that size fits no float.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _thinned(points: Sequence[tuple[float, float]]) -> Curve:
    every = -(-len(points) // MOST_POINTS)
    kept = [p for i, p in enumerate(points) if i % every == 0 or i == len(points) - 1]
    return Curve(tuple(step for step, _ in kept), tuple(value for _, value in kept))
