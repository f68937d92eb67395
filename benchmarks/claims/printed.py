"""One of our numbers against a printed one: difference, interval and verdict."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite, nan
from typing import Any

from dipole.benchmarks.claims.claim_specs import LEVEL
from dipole.benchmarks.claims.equivalence import NOTHING, Estimate, Evidence, against, of_one_more_trial, of_summaries
from dipole.benchmarks.claims.published import PrintedCell
from dipole.benchmarks.claims.verdicts import AGREES, DIFFERS, NOT_COMPARED, decide
from dipole.benchmarks.statistics import Summary, holm, number
from dipole.core.utils.errors import DataError
from dipole.core.utils.text import counted


@dataclass(frozen=True)
class Comparison:
    """One of our cells against the printed one: ours - printed, in the unit of the table, with its 95 % interval.

    `basis` says how the interval was computed. `p` is the two-sided p-value of the verdict by itself, or nan.
    """

    difference: float
    low: float
    high: float
    verdict: str
    basis: str
    p: float = nan
    evidence: Evidence = NOTHING


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

    The difference is tested against the margin (two one-sided tests): the verdict is `agrees` if it is shown to be
    inside, `differs` if it is shown to be outside, and undecided otherwise.
    """
    if cell.mean is None:
        return None
    width = margin(metric, cell.mean)
    found, basis = _difference(cell.mean, cell.std, n or 1, ours)
    verdict, p, evidence = NOT_COMPARED, nan, NOTHING
    if is_same_protocol:
        evidence = against(found, -width, width)
        if isfinite(found.error):
            p = evidence.p
        verdict = decide(evidence, p)
    return Comparison(found.value, *found.interval(), verdict, basis, p, evidence)


def _difference(mean: float, std: float | None, n: int, ours: Summary) -> tuple[Estimate, str]:
    """Return ours - printed, and in words how its interval is computed."""
    nothing, printed = Estimate(ours.mean - mean), Summary(n, mean, nan if std is None else std, nan, nan)
    if ours.n > 1 and std is not None and n > 1:
        found, basis = of_summaries(ours, printed), "Welch"
    elif ours.n > 1:
        found, basis = of_one_more_trial(ours, mean), "printed number taken as one trial of our spread"
    elif std is not None and n > 1:
        found = of_one_more_trial(printed, ours.mean)
        found, basis = replace(found, value=-found.value), "our run taken as one trial of the printed spread"
    else:
        return nothing, "no spread on either side (two seeds of ours would give one)"
    low, high = found.interval()
    if not high - low > 1e-9 * abs(mean):
        return nothing, "every seed gave the same value"
    return found, basis


def among(comparisons: Sequence[Comparison | None]) -> list[Comparison | None]:
    """Return the comparisons as a family: a verdict that does not pass Holm's test over all of them is undecided."""
    alone = [getattr(each, "p", nan) for each in comparisons]
    family, found = counted(sum(map(isfinite, alone)), "printed number"), []
    for each, p in zip(comparisons, holm(alone), strict=True):
        if each is not None and each.verdict in (AGREES, DIFFERS) and p >= LEVEL:
            basis = f"{each.basis}, {each.verdict} alone (p = {number(each.p)}) but not among {family}"
            each = replace(each, verdict=decide(each.evidence, p), basis=basis)
        found.append(each)
    return found


def protocol_differences(paper: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """Return what our run did otherwise than the paper: a line per entry of `ours` that is not the paper's own."""
    stated = {key: value for key, value in paper.items() if value is not None}
    differing = {key: value for key, value in ours.items() if stated.get(key) != value}
    return [f"{key}: {value} (paper: {stated.get(key, 'not stated')})" for key, value in differing.items()]
