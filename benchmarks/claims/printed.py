"""One of our numbers against a printed one: difference, interval and verdict."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite, nan
from typing import Any

from dipole.benchmarks.claims.claim_specs import LEVEL
from dipole.benchmarks.claims.equivalence import Estimate, against
from dipole.benchmarks.claims.published import PrintedCell
from dipole.benchmarks.claims.verdicts import AGREES, DIFFERS, NOT_COMPARED, UNDECIDED
from dipole.benchmarks.report.table import number
from dipole.benchmarks.statistics import Summary, WelchTest, against_single_value, holm, welch
from dipole.core.utils.errors import DataError
from dipole.core.utils.text import counted

NO_SPREAD = "no spread on either side (two seeds of ours would give one)"


@dataclass(frozen=True)
class Comparison:
    """One of our cells against the printed one, in the unit of the table.

    Args:
        difference: ours - printed.
        low: lower end of its 95 % interval, or nan without one.
        high: upper end.
        verdict: "agrees", "differs", "cannot be decided at this n", or "other protocol".
        basis: how the interval was computed, in words.
        p: two-sided p-value of the verdict by itself, or nan without one.
    """

    difference: float
    low: float
    high: float
    verdict: str
    basis: str
    p: float = nan


def margin(metric: str, value: float) -> float:
    """Return the smallest difference that matters for a metric, in its own units: inside it two results agree.

    One percentage point for accuracies and average precision, a tenth for run times, and 50 of the 1000 points of an
    episode of the control suite.
    """
    if "%" in metric or "percent" in metric or "accuracy" in metric:
        return 1.0
    if "seconds" in metric:
        return 0.1 * abs(value)
    if "score" in metric:
        return 50.0
    raise DataError(f"no margin of agreement is known for the metric {metric!r}")


def compare(cell: PrintedCell, n: int | None, ours: Summary, metric: str, is_same_protocol: bool) -> Comparison | None:
    """Compare our sample with a printed cell: difference (ours - printed), 95 % interval, verdict; None if it is empty.

    The interval is Welch's if both sides have a spread and at least two trials. If only one side has a spread, the
    other number counts as one more trial of the same spread. Equal values for every seed, which a coarse metric gives
    by chance, are no spread to judge by: there is no interval then, unless the other side has one.

    The verdict is `agrees` if the interval lies inside the margin (two one-sided tests), `differs` if it lies outside
    of it, and undecided otherwise.
    """
    if cell.mean is None:
        return None
    width, difference = margin(metric, cell.mean), ours.mean - cell.mean
    test, basis = _interval(cell, n, ours)
    low, high = test.low, test.high
    if basis != NO_SPREAD and not high - low > 1e-9 * abs(cell.mean):
        low, high, basis = nan, nan, "every seed gave the same value"
    verdict, p = NOT_COMPARED, nan
    if is_same_protocol:
        verdict = _verdict(low, high, width)
        if isfinite(low):
            p = against(Estimate.of_interval(difference, low, high, test.df), -width, width).p
    return Comparison(difference, low, high, verdict, basis, p)


def _verdict(low: float, high: float, width: float) -> str:
    if isfinite(low) and -width <= low and high <= width:
        return AGREES
    if isfinite(low) and (low > width or high < -width):
        return DIFFERS
    return UNDECIDED


def _interval(cell: PrintedCell, n: int | None, ours: Summary) -> tuple[WelchTest, str]:
    """Test ours - printed. Return the test, and its basis in words."""
    mean = cell.mean or 0.0
    if ours.n > 1 and cell.std is not None and n is not None and n > 1:
        test = welch(ours.mean, ours.std, ours.n, mean, cell.std, n)
        return test, "Welch"
    if ours.n > 1:
        test = against_single_value(ours.mean, ours.std, ours.n, mean)
        return test, "printed number taken as one trial of our spread"
    if cell.std is not None and n is not None and n > 1:
        test = against_single_value(mean, cell.std, n, ours.mean)
        turned = replace(test, difference=-test.difference, low=-test.high, high=-test.low)
        return turned, "our run taken as one trial of the printed spread"
    nothing = WelchTest(ours.mean - mean, nan, nan, nan, nan)
    return nothing, NO_SPREAD


def among(comparisons: Sequence[Comparison | None]) -> list[Comparison | None]:
    """Return the comparisons as a family: a verdict that does not pass Holm's test over all of them is undecided."""
    alone = [getattr(each, "p", nan) for each in comparisons]
    adjusted, family = holm(alone), sum(map(isfinite, alone))
    found = []
    for each, p in zip(comparisons, adjusted, strict=True):
        if each is not None and each.verdict in (AGREES, DIFFERS) and p >= LEVEL:
            numbers = counted(family, "printed number")
            basis = f"{each.basis}, {each.verdict} alone (p = {number(each.p)}) but not among {numbers}"
            each = replace(each, verdict=UNDECIDED, basis=basis)
        found.append(each)
    return found


def protocol_differences(paper: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """Return what our run did otherwise than the paper: a line per entry of `ours` that is not the paper's own."""
    lines = []
    for key, value in ours.items():
        theirs = paper.get(key)
        if theirs == value:
            continue
        if theirs is None:
            theirs = "not stated"
        lines.append(f"{key}: {value} (paper: {theirs})")
    return lines
