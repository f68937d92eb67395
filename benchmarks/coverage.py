"""`python -m dipole.benchmarks.coverage`: test how often the intervals of a report contain the true value.

It draws runs from known distributions, computes intervals with the code of reports (`dipole.benchmarks.statistics`),
and counts the intervals that contain the truth. It also counts false alarms without any effect.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache

import numpy as np

from dipole.benchmarks.report.table import markdown
from dipole.benchmarks.statistics import aggregates, holm
from dipole.benchmarks.statistics.differences import CONFIDENCE, of_pairs
from dipole.core.cli.parser import positive
from dipole.core.evaluation.intervals import Array, interquartile_mean

SEEDS = (2, 3, 5, 10, 20)
REPEATS = 4000
LEAST = 0.93  # smallest acceptable coverage of a 95 % interval
GAIN = 1.0  # difference between a row and its base, in standard deviations
LEVEL = 20.0  # mean of the base in these units: a relative gain of 5 %
ROWS, COLUMNS = 5, 4  # size of the suite without effect in which false alarms are counted
SHARED = 0.8  # correlation between columns of the same runs
TRUTH = 400_000

Draw = Callable[[np.random.Generator, tuple[int, ...]], Array]
Bounds = tuple[float, float]

DISTRIBUTIONS: Mapping[str, tuple[float, Draw]] = {
    "normal": (1.0, lambda g, shape: g.normal(size=shape)),
    "skewed (exponential)": (1.0, lambda g, shape: g.exponential(size=shape) - 1),
    "heavy tails (t with 5)": (1.0, lambda g, shape: g.standard_t(5, size=shape)),
    "rounded to one deviation": (1.0, lambda g, shape: np.round(g.normal(size=shape))),
    "unequal (normal, 4 to 1)": (4.0, lambda g, shape: g.normal(size=shape)),
    "skewed and unequal (2 to 1)": (2.0, lambda g, shape: g.exponential(size=shape) - 1),
}
"""Distributions of mean 0, and the factor by which a row varies more than its base."""


@dataclass(frozen=True)
class CoverageRow:
    """Shares by number of seeds: of intervals that contain the truth, and of repeats that have an interval."""

    what: str
    distribution: str
    holds: Mapping[int, float]
    given: Mapping[int, float]


@dataclass(frozen=True)
class CoverageResults:
    """The results. `alarms` are shares of suites without effect in which a difference is significant."""

    repeats: int
    lines: tuple[CoverageRow, ...]
    alarms: Mapping[str, Mapping[int, float]]


def study(repeats: int = REPEATS) -> CoverageResults:
    """Simulate everything. 4000 repeats take two minutes."""
    lines = [_counted(what, name, repeats) for what in INTERVALS for name in DISTRIBUTIONS]
    alarms: dict[str, dict[int, float]] = {name: {} for name in ALARMS}
    for n in SEEDS:
        suite = _without_effect(n, repeats)
        for name, share in ALARMS.items():
            alarms[name][n] = share(*suite)
    return CoverageResults(repeats, tuple(lines), alarms)


def _counted(what: str, name: str, repeats: int) -> CoverageRow:
    bounds, truth = INTERVALS[what][0], _truth(what, name)
    holds, given = {}, {}
    for n in SEEDS:
        low, high = _all(bounds, *_drawn(name, (repeats, 1, n), n))
        known = np.isfinite(low)
        given[n], holds[n] = float(known.mean()), float("nan")
        if known.any():
            holds[n] = float(((low <= truth) & (truth <= high))[known].mean())
    return CoverageRow(what, name, holds, given)


@cache
def _truth(what: str, name: str) -> float:
    return INTERVALS[what][1](*_drawn(name, (TRUTH,), 1))


def _drawn(name: str, shape: tuple[int, ...], seed: int) -> tuple[Array, Array]:
    generator, (spread, draw) = np.random.default_rng(seed), DISTRIBUTIONS[name]
    row = spread * draw(generator, shape)
    return LEVEL + GAIN + row, LEVEL + draw(generator, shape)


def _all(bounds: Callable[[Array, Array], Bounds], rows: Array, base: Array) -> Array:
    """Return lower and upper ends (2, R) of all repeats (..., T, S)."""
    repeats = (each.reshape(-1, *each.shape[-2:]) for each in (rows, base))
    return np.array([bounds(*each) for each in zip(*repeats, strict=True)]).T


def _difference(row: Array, base: Array) -> Bounds:
    return of_pairs(*next(_by_seed(row, base))).interval()


def _by_seed(rows: Array, base: Array) -> Iterator[tuple[dict[int, float], dict[int, float]]]:
    seeds = rows.shape[-1]
    for one, other in zip(rows.reshape(-1, seeds).tolist(), base.reshape(-1, seeds).tolist(), strict=True):
        yield dict(enumerate(one)), dict(enumerate(other))


def _gain(row: Array, base: Array) -> Bounds:
    return aggregates.relative_gains(row, base, (0,) * len(row)).interval()


def _gain_of_other_seeds(row: Array, base: Array) -> Bounds:
    absent = np.full(row.shape, np.nan)
    return _gain(np.concatenate([row, absent], axis=-1), np.concatenate([absent, base], axis=-1))


def _wins(row: Array, base: Array) -> Bounds:
    return aggregates.binomial_bounds(*aggregates.probabilities_of_improvement(row, base, (0,) * len(row)))


def _true_wins(row: Array, base: Array) -> float:
    ordered = np.sort(base)
    below = (np.searchsorted(ordered, row, "left") + np.searchsorted(ordered, row, "right")) / 2
    return float(below.mean() / len(base))


INTERVALS: Mapping[str, tuple[Callable[[Array, Array], Bounds], Callable[[Array, Array], float]]] = {
    "difference from the base": (_difference, lambda row, base: GAIN),
    "relative gain, common seeds": (_gain, lambda row, base: GAIN / LEVEL),
    "relative gain, other seeds": (_gain_of_other_seeds, lambda row, base: GAIN / LEVEL),
    "interquartile mean": (
        lambda row, base: aggregates.interquartile_means(row, (0,)).interval(),
        lambda row, base: interquartile_mean(row),
    ),
    "probability of improvement": (_wins, _true_wins),
}
"""Bounds from a row and its base (T, S), and the true value."""


def _without_effect(n: int, repeats: int) -> tuple[Array, Array]:
    """Draw suites of rows and one base without any difference, (R, rows, T, n). Columns of a run are correlated."""
    generator = np.random.default_rng(n)
    runs = generator.normal(size=(repeats, ROWS + 1, 1, n))
    values = np.sqrt(SHARED) * runs + np.sqrt(1 - SHARED) * generator.normal(size=(repeats, ROWS + 1, COLUMNS, n))
    return LEVEL + values[:, :-1], np.broadcast_to(LEVEL + values[:, -1:], values[:, :-1].shape)


def _decided(rows: Array, base: Array) -> float:
    p_values = np.array([of_pairs(*each).p for each in _by_seed(rows, base)]).reshape(len(rows), -1)
    return float(np.mean([min(holm(each)) < 1 - CONFIDENCE for each in p_values.tolist()]))


def _excluded(bounds: Array, nothing: float) -> float:
    return float(((bounds[0] > nothing) | (bounds[1] < nothing)).mean())


ALARMS: Mapping[str, Callable[[Array, Array], float]] = {
    f"a suite of {ROWS} rows and {COLUMNS} columns decides something (Holm)": _decided,
    f"a gain over {COLUMNS} columns of the same runs is not 0": lambda *suite: _excluded(_all(_gain, *suite), 0.0),
    "its probability of improvement is not 1/2": lambda *suite: _excluded(_all(_wins, *suite), 0.5),
}


def to_markdown(found: CoverageResults) -> str:
    rows, seeds = [], [f"{n} seeds" for n in found.lines[0].holds]
    for line in found.lines:
        rows.append([line.what, line.distribution])
        for n, share in line.holds.items():
            none = f" ({100 * (1 - line.given[n]):.0f} none)" if line.given[n] < 0.995 else ""
            rows[-1].append(f"{100 * share:.1f}{none}")
    alarms = [[name, *(f"{100 * share:.1f}" for share in of.values())] for name, of in found.alarms.items()]
    return f"{markdown(['interval', 'runs', *seeds], rows)}\n\n{markdown(['false alarm', *seeds], alarms)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables. The exit code is 1 if a coverage is too small."""
    parser = argparse.ArgumentParser(prog="python -m dipole.benchmarks.coverage", description=__doc__)
    parser.add_argument("--repeats", type=positive, default=REPEATS, help=f"suites drawn (default {REPEATS})")
    parser.add_argument("--json", action="store_true", help="print the shares as JSON")
    given = parser.parse_args(arguments)
    found = study(given.repeats)
    print(json.dumps(asdict(found), indent=1) if given.json else to_markdown(found))
    # Three standard errors of a share of this number of repeats.
    least = LEAST - 3 * float(np.sqrt(LEAST * (1 - LEAST) / found.repeats))
    short = [f"{line.what}, {line.distribution}" for line in found.lines if min(line.holds.values()) < least]
    if short:
        print(f"below {100 * LEAST:.0f} %: {'; '.join(short)}", file=sys.stderr)
    return int(bool(short))


if __name__ == "__main__":
    sys.exit(main())
