"""One of our numbers beside a printed one: difference, interval and verdict."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite, nan
from typing import Any

from dipole.benchmarks.equivalence import Estimate, against
from dipole.benchmarks.report.published import PrintedCell
from dipole.benchmarks.report.readings import LEVEL
from dipole.benchmarks.report.table import number
from dipole.benchmarks.statistics import Summary, against_single_value, holm, pooled_std, seeds_needed, welch
from dipole.core.utils.errors import DataError
from dipole.core.utils.text import counted

AGREES, DIFFERS, UNDECIDED, NOT_COMPARED = "agrees", "differs", "cannot be decided at this n", "other protocol"


@dataclass(frozen=True)
class Comparison:
    """One of our cells beside the printed one, in the unit of the table.

    Args:
        published: the printed cell.
        published_n: trials behind it; None where the paper does not say.
        ours: our sample.
        difference: ours - printed.
        low: lower end of its 95 % interval; nan where there is none.
        high: upper end.
        verdict: "agrees", "differs", "cannot be decided at this n", or "other protocol".
        basis: what the interval was made from, in words.
        seeds: of each side that would decide one comparison that is made alone; None where it is decided, or no number
            is known.
        p: of the verdict by itself, two-sided; nan where there is none.
    """

    published: PrintedCell
    published_n: int | None
    ours: Summary
    difference: float
    low: float
    high: float
    verdict: str
    basis: str
    seeds: int | None = field(default=None)
    p: float = nan


def margin(metric: str, value: float) -> float:
    """Smallest difference that matters for a metric, in its own units: inside it two results agree.

    One percentage point for accuracies and average precision, a tenth for run times, and 50 of the 1000 points an
    episode of the control suite can give.
    """
    if "%" in metric or "percent" in metric or "accuracy" in metric:
        return 1.0
    if "seconds" in metric:
        return 0.1 * abs(value)
    if "score" in metric:
        return 50.0
    raise DataError(f"no margin of agreement is known for the metric {metric!r}")


def compare(cell: PrintedCell, n: int | None, ours: Summary, metric: str, is_same_protocol: bool) -> Comparison | None:
    """Our sample beside a printed cell: difference (ours - printed), 95 % interval, verdict; None for an empty cell.

    The interval is Welch's where both sides have a spread and at least two trials. Where only one side has a spread,
    the other number counts as one more trial of the same spread. Equal values for every seed, as a coarse metric gives
    by chance, are no spread to judge by: there is no interval then, unless the other side has one.

    It `agrees` if the interval lies inside the margin (two one-sided tests), `differs` if it lies outside of it, and
    cannot be decided otherwise; then `seeds` says how many per arm would show a difference of the size of the margin
    with 80 % power.
    """
    if cell.mean is None:
        return None
    difference, low, high, spread, df = ours.mean - cell.mean, nan, nan, nan, nan
    basis = "no spread on either side: two seeds of ours would give one"
    theirs_has_spread = cell.std is not None and n is not None and n > 1
    if ours.n > 1 and theirs_has_spread:
        assert cell.std is not None
        assert n is not None
        test = welch(ours.mean, ours.std, ours.n, cell.mean, cell.std, n)
        low, high, basis, spread, df = test.low, test.high, "Welch", pooled_std(ours.std, cell.std), test.df
    elif ours.n > 1:
        test = against_single_value(ours.mean, ours.std, ours.n, cell.mean)
        low, high, basis, spread = test.low, test.high, "printed number taken as one trial of our spread", ours.std
        df = test.df
    elif theirs_has_spread:
        assert cell.std is not None
        assert n is not None
        test = against_single_value(cell.mean, cell.std, n, ours.mean)
        low, high, basis, spread = -test.high, -test.low, "our run taken as one trial of the printed spread", cell.std
        df = test.df
    width = margin(metric, cell.mean)
    if isfinite(spread) and not high - low > 1e-9 * abs(cell.mean):
        low, high, basis, spread = nan, nan, "every seed gave the same value", nan
    if not is_same_protocol:
        verdict = NOT_COMPARED
    elif not isfinite(low):
        verdict = UNDECIDED
    elif -width <= low and high <= width:
        verdict = AGREES
    elif low > width or high < -width:
        verdict = DIFFERS
    else:
        verdict = UNDECIDED
    seeds = seeds_needed(width, spread) if verdict in (UNDECIDED, NOT_COMPARED) and isfinite(spread) else None
    p = nan
    if isfinite(low) and is_same_protocol:
        p = against(Estimate.of_interval(difference, low, high, df), -width, width).p
    return Comparison(cell, n, ours, difference, low, high, verdict, basis, seeds, p)


def among(comparisons: Sequence[Comparison | None]) -> list[Comparison | None]:
    """The same comparisons as a family: a verdict that Holm over all of them does not leave standing is undecided."""
    adjusted = holm([nan if each is None else each.p for each in comparisons])
    family = sum(each is not None and isfinite(each.p) for each in comparisons)
    found = []
    for each, p in zip(comparisons, adjusted, strict=True):
        if each is not None and each.verdict in (AGREES, DIFFERS) and p >= LEVEL:
            among = counted(family, "printed number")
            basis = f"{each.basis}; alone it {each.verdict} (p = {number(each.p)}), not among {among}"
            each = replace(each, verdict=UNDECIDED, basis=basis)
        found.append(each)
    return found


def protocol_differences(paper: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """What our run did otherwise than the paper: one line per entry of `ours` that is not the paper's own."""
    lines = []
    for key, value in ours.items():
        theirs = paper.get(key)
        if theirs != value:
            lines.append(f"{key}: {value} (paper: {'not stated' if theirs is None else theirs})")
    return lines
