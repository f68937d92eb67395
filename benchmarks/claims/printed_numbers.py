"""Our numbers against the printed ones: the difference, its interval, and a verdict by the margin of the metric."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite, nan

from dipole.benchmarks.claims.published import PrintedCell
from dipole.benchmarks.claims.verdicts import NOT_COMPARED, NOT_DECIDABLE, NOTHING, Evidence, against, decide
from dipole.benchmarks.statistics import Summary, holm, number
from dipole.benchmarks.statistics.differences import Estimate, of_one_more_trial, of_summaries
from dipole.core.utils.errors import DataError
from dipole.core.utils.text import counted


@dataclass(frozen=True)
class PrintedComparison:
    """One of our cells against the printed one: ours - printed, in the unit of the table, with its 95 % interval.

    `evidence` is on the margin, `method` says how the interval was computed. `p_holm` is the p-value among a `family`
    of comparisons, and alone in a family of one.
    """

    difference: float
    low: float
    high: float
    method: str
    evidence: Evidence
    is_same_protocol: bool
    p_holm: float
    family: int = 1
    is_decidable: bool = True

    @property
    def p(self) -> float:
        """The two-sided p-value alone, or nan without a test."""
        return self.evidence.p if self.evidence != NOTHING else nan

    @property
    def verdict(self) -> str:
        """The verdict as one of the family."""
        if not self.is_decidable:
            return NOT_DECIDABLE
        if not self.is_same_protocol:
            return NOT_COMPARED
        return decide(self.evidence, self.p_holm)

    @property
    def basis(self) -> str:
        """How the interval was computed, and the verdict alone if the family takes it back."""
        alone = decide(self.evidence, self.p)
        if decide(self.evidence, self.p_holm) == alone:
            return self.method
        of = counted(self.family, "printed number")
        return f"{self.method}, {alone} alone (p = {number(self.p)}) but not among {of}"


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


def compare_printed(
    cell: PrintedCell, n: int | None, ours: Summary, metric: str, is_same_protocol: bool
) -> PrintedComparison | None:
    """Compare our sample with a printed cell: difference (ours - printed), 95 % interval, verdict; None if it is empty.

    The interval is Welch's if both sides have a spread and at least two trials. If only one side has a spread, the
    other number counts as one more trial of the same spread. Equal values for every seed, which a coarse metric gives
    by chance, are no spread to judge by: there is no interval then, unless the other side has one.

    The difference is tested against the margin (two one-sided tests): the verdict is `agrees` if it is shown to be
    inside, `differs` if it is shown to be outside, and undecided otherwise.
    """
    if cell.mean is None:
        return None
    std = nan if cell.std is None else cell.std
    printed = Summary(n or 1, cell.mean, std, nan, nan)
    found, basis = Estimate(ours.mean - cell.mean), "no spread on either side (two seeds of ours would give one)"
    is_spread = cell.std is not None and printed.n > 1
    if ours.n > 1 and is_spread:
        found, basis = of_summaries(ours, printed), "Welch"
    elif ours.n > 1:
        found, basis = of_one_more_trial(ours, cell.mean), "printed number taken as one trial of our spread"
    elif is_spread:
        found, basis = of_one_more_trial(printed, ours.mean), "our run taken as one trial of the printed spread"
        found = replace(found, value=-found.value)
    low, high = found.interval()
    if not high - low > 1e-9 * abs(cell.mean) and (ours.n > 1 or is_spread):
        found, basis = Estimate(found.value), "every seed gave the same value"
    evidence = NOTHING
    if is_same_protocol:
        width = margin(metric, cell.mean)
        evidence = against(found, -width, width)
    alone = PrintedComparison(found.value, *found.interval(), basis, evidence, is_same_protocol, nan)
    return replace(alone, p_holm=alone.p)


def as_family(comparisons: Sequence[PrintedComparison | None]) -> list[PrintedComparison | None]:
    """Return the comparisons as one family, with p-values by Holm's test over all of them."""
    alone = [nan if each is None else each.p for each in comparisons]
    family = sum(map(isfinite, alone))
    corrected = zip(comparisons, holm(alone), strict=True)
    return [each and replace(each, p_holm=p, family=family) for each, p in corrected]
