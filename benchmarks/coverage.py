"""`python -m dipole.benchmarks.coverage`: test how often the intervals of a report contain the true value.

It draws runs from known distributions, computes intervals with the code of reports (`dipole.benchmarks.statistics`),
and counts the intervals that contain the truth. It also counts false alarms without any effect.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from dipole.benchmarks.statistics import CONFIDENCE, estimates, holm
from dipole.core.evaluation.intervals import Array

SEEDS = (2, 3, 5, 10, 20)
REPEATS = 4000
LEAST = 0.93
"""Smallest acceptable coverage of a 95 % interval."""
GAIN = 1.0
"""Difference between a row and its base, in standard deviations."""
LEVEL = 20.0
"""Mean of the base in these units: a relative gain of 5 %."""
ROWS, COLUMNS = 5, 4
"""Size of the suite without effect in which false alarms are counted."""
SHARED = 0.8
"""Correlation between columns of the same runs."""
TRUTH = 400_000

Draw = Callable[[np.random.Generator, tuple[int, ...]], tuple[Array, Array]]


def _standard(spread: float, draw: Callable[[np.random.Generator, tuple[int, ...]], Array]) -> Draw:
    """Draw a row and its base from one distribution of mean 0. The row is multiplied by `spread`."""

    def both(generator: np.random.Generator, shape: tuple[int, ...]) -> tuple[Array, Array]:
        return spread * draw(generator, shape), draw(generator, shape)

    return both


DISTRIBUTIONS: Mapping[str, Draw] = {
    "normal": _standard(1.0, lambda g, shape: g.normal(size=shape)),
    "skewed (exponential)": _standard(1.0, lambda g, shape: g.exponential(size=shape) - 1),
    "heavy tails (t with 5)": _standard(1.0, lambda g, shape: g.standard_t(5, size=shape)),
    "rounded to one deviation": _standard(1.0, lambda g, shape: np.round(g.normal(size=shape))),
    "unequal (normal, 4 to 1)": _standard(4.0, lambda g, shape: g.normal(size=shape)),
    "skewed and unequal (2 to 1)": _standard(2.0, lambda g, shape: g.exponential(size=shape) - 1),
}


@dataclass(frozen=True)
class Line:
    """Shares by number of seeds: of intervals that contain the truth, and of repeats that have an interval."""

    what: str
    distribution: str
    holds: Mapping[int, float]
    given: Mapping[int, float]


@dataclass(frozen=True)
class Study:
    """The results. `alarms` are shares of suites without effect in which a difference is significant."""

    repeats: int
    lines: tuple[Line, ...]
    alarms: Mapping[str, Mapping[int, float]]


def study(repeats: int = REPEATS, seeds: Sequence[int] = SEEDS) -> Study:
    """Simulate everything. 4000 repeats take seconds."""
    lines = [
        Line(what, name, *_counted(intervals, draw, repeats, seeds))
        for what, intervals in INTERVALS.items()
        for name, draw in DISTRIBUTIONS.items()
    ]
    alarms = {name: {n: of(n, repeats) for n in seeds} for name, of in ALARMS.items()}
    return Study(repeats, tuple(lines), alarms)


Intervals = Callable[[Array, Array], tuple[Array, Array]]


def _counted(
    kind: "Kind", draw: Draw, repeats: int, seeds: Sequence[int]
) -> tuple[Mapping[int, float], Mapping[int, float]]:
    truth = kind.truth(*_drawn(draw, (TRUTH,), 1))
    holds, given = {}, {}
    for n in seeds:
        low, high = kind.bounds(*_drawn(draw, (repeats, 1, n), n))
        known = np.isfinite(low)
        given[n] = float(known.mean())
        holds[n] = float("nan")
        if known.any():
            holds[n] = float(((low <= truth) & (truth <= high))[known].mean())
    return holds, given


def _drawn(draw: Draw, shape: tuple[int, ...], seed: int) -> tuple[Array, Array]:
    """Draw runs of a row and of its base, with the effect."""
    row, base = draw(np.random.default_rng(seed), shape)
    return LEVEL + GAIN + row, LEVEL + base


@dataclass(frozen=True)
class Kind:
    """One kind of interval: its bounds from repeats (R, T, S) of a row and its base, and its true value."""

    bounds: Intervals
    truth: Callable[[Array, Array], float]


def _difference(row: Array, base: Array) -> tuple[Array, Array]:
    return estimates.differences(row[..., 0, :], base[..., 0, :]).bounds(CONFIDENCE)


def _welch(row: Array, base: Array) -> tuple[Array, Array]:
    """Use different seeds for a row and its base."""
    absent = np.full(row.shape, np.nan)
    ours, theirs = np.concatenate([row, absent], axis=-1), np.concatenate([absent, base], axis=-1)
    return estimates.relative_gains(ours, theirs, (0,)).bounds(CONFIDENCE)


def _middle(row: Array, base: Array) -> tuple[Array, Array]:
    return estimates.interquartile_means(row, (0,)).bounds(CONFIDENCE)


def _wins(row: Array, base: Array) -> tuple[Array, Array]:
    return estimates.binomial_bounds(*estimates.probabilities_of_improvement(row, base, (0,)), CONFIDENCE)


def _true_wins(row: Array, base: Array) -> float:
    ordered = np.sort(base)
    below = (np.searchsorted(ordered, row, "left") + np.searchsorted(ordered, row, "right")) / 2
    return float(below.mean() / len(base))


INTERVALS: Mapping[str, Kind] = {
    "difference from the base": Kind(_difference, lambda row, base: GAIN),
    "relative gain, common seeds": Kind(
        lambda row, base: estimates.relative_gains(row, base, (0,)).bounds(CONFIDENCE), lambda row, base: GAIN / LEVEL
    ),
    "relative gain, other seeds": Kind(_welch, lambda row, base: GAIN / LEVEL),
    "interquartile mean": Kind(_middle, lambda row, base: float(np.sort(row)[TRUTH // 4 : -(TRUTH // 4)].mean())),
    "probability of improvement": Kind(_wins, _true_wins),
}


def _without_effect(n: int, repeats: int) -> tuple[Array, Array]:
    """Draw suites of rows and one base without any difference, (R, rows, T, n). Columns of a run are correlated."""
    generator = np.random.default_rng(n)
    runs = generator.normal(size=(repeats, ROWS + 1, 1, n))
    values = np.sqrt(SHARED) * runs + np.sqrt(1 - SHARED) * generator.normal(size=(repeats, ROWS + 1, COLUMNS, n))
    return LEVEL + values[:, :-1], np.broadcast_to(LEVEL + values[:, -1:], values[:, :-1].shape)


def _decided(n: int, repeats: int) -> float:
    p_values = estimates.differences(*_without_effect(n, repeats)).p_values().reshape(repeats, -1)
    return float(np.mean([min(holm(each)) < 1 - CONFIDENCE for each in p_values.tolist()]))


def _gains(n: int, repeats: int) -> float:
    return _excluded(estimates.relative_gains(*_without_effect(n, repeats), (0,) * COLUMNS).bounds(CONFIDENCE), 0.0)


def _better(n: int, repeats: int) -> float:
    found = estimates.probabilities_of_improvement(*_without_effect(n, repeats), (0,) * COLUMNS)
    return _excluded(estimates.binomial_bounds(*found, CONFIDENCE), 0.5)


def _excluded(bounds: tuple[Array, Array], nothing: float) -> float:
    return float(((bounds[0] > nothing) | (bounds[1] < nothing)).mean())


ALARMS: Mapping[str, Callable[[int, int], float]] = {
    f"a suite of {ROWS} rows and {COLUMNS} columns decides something (Holm)": _decided,
    f"a gain over {COLUMNS} columns of the same runs is not 0": _gains,
    "its probability of improvement is not 1/2": _better,
}


def to_markdown(found: Study) -> str:
    """Return both tables in percent."""
    seeds = list(found.lines[0].holds)
    head = "".join(f" {n} seeds |" for n in seeds)
    lines = [f"| interval | runs |{head}", "|---|---|" + "---|" * len(seeds)]
    for line in found.lines:
        shares = ""
        for n in seeds:
            shares += f" {100 * line.holds[n]:.1f}"
            if line.given[n] < 0.995:
                shares += f" ({100 * (1 - line.given[n]):.0f} none)"
            shares += " |"
        lines.append(f"| {line.what} | {line.distribution} |{shares}")
    lines += ["", f"| false alarm |{head}", "|---|" + "---|" * len(seeds)]
    lines += [f"| {name} |" + "".join(f" {100 * of[n]:.1f} |" for n in seeds) for name, of in found.alarms.items()]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables. The exit code is 1 if a coverage is too small."""
    parser = argparse.ArgumentParser(prog="python -m dipole.benchmarks.coverage", description=__doc__)
    parser.add_argument("--repeats", type=_repeats, default=REPEATS, help=f"suites drawn (default {REPEATS})")
    parser.add_argument("--json", action="store_true", help="print the shares as JSON")
    given = parser.parse_args(arguments)
    found = study(given.repeats)
    if given.json:
        print(json.dumps(asdict(found), indent=1))
    else:
        print(to_markdown(found))
    # Three standard errors of a share of so many repeats.
    least = LEAST - 3 * float(np.sqrt(LEAST * (1 - LEAST) / found.repeats))
    short = [f"{line.what}, {line.distribution}" for line in found.lines if min(line.holds.values()) < least]
    if short:
        print(f"below {100 * LEAST:.0f} %: {'; '.join(short)}", file=sys.stderr)
    return int(bool(short))


def _repeats(text: str) -> int:
    if not text.isdecimal() or int(text) < 100:
        raise argparse.ArgumentTypeError(f"a whole number of at least 100, got {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
