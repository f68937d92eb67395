"""Where a verdict is made: from an estimate to evidence, and from evidence to agrees, differs or undecided.

An estimate is tested against a region, `low` to `high`, either of them infinite: (0, inf) is a direction, (5, inf)
superiority by a margin, (-2, 2) equivalence by two one-sided tests. The two one-sided p-values are the evidence, and
`decide` makes the verdict of it: for a claim of a paper (`judge.py`) and for a printed number (`compare_printed`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite, nan

from scipy import special

from dipole.benchmarks.claims.published import PrintedCell
from dipole.benchmarks.statistics import LEVEL, Summary, holm, number
from dipole.benchmarks.statistics.differences import Estimate, of_one_more_trial, of_summaries, tail
from dipole.core.utils.errors import DataError
from dipole.core.utils.text import counted

AGREES, DIFFERS, UNDECIDED, NOT_COMPARED = "agrees", "differs", "cannot be decided at this n", "other protocol"
NO_ROOM, NOT_LEARNT, NOT_DECIDABLE = "no room", "not learnt", "not decidable on this hardware"
NO_DATA, NO_TEST = "no data", "no machine-readable test"
OBSTACLES = (NO_ROOM, NOT_LEARNT)  # verdicts on claims that the numbers cannot show: neither agreement nor difference


@dataclass(frozen=True)
class Evidence:
    """Evidence on whether a quantity is in a region: two one-sided p-values from 0 to 1, where 1 is no evidence."""

    inside: float = 1.0  # small if the quantity is shown to be in the region
    outside: float = 1.0  # small if it is shown to be outside

    @property
    def p(self) -> float:
        """Two-sided: twice the smaller one, so that below 0.05 the 95 % interval is all inside, or all outside."""
        return min(1.0, 2 * min(self.inside, self.outside))

    @property
    def is_for(self) -> bool:
        return self.inside < self.outside


NOTHING = Evidence()


def decide(evidence: Evidence, p: float) -> str:
    """Return the verdict: undecided unless p, corrected or not, is below LEVEL. A p of nan is no test."""
    if not p < LEVEL:
        return UNDECIDED
    return AGREES if evidence.is_for else DIFFERS


def against(found: Estimate, low: float, high: float) -> Evidence:
    """Test an estimate against a region with t-tests.

    Inside: two one-sided tests (Schuirmann 1987), p = max(P(T >= (x - low) / e), P(T >= (high - x) / e)).
    Outside: from the nearer bound, P(T >= d / e) + P(T >= (d + high - low) / e) with d the distance beyond it.
    """
    if not isfinite(found.error):
        return NOTHING
    above, below = (found.value - low) / found.error, (high - found.value) / found.error
    beyond = max(-above, -below)
    inside = max(tail(above, found.df), tail(below, found.df))
    outside = tail(beyond, found.df) + tail(beyond + (high - low) / found.error, found.df)
    return Evidence(inside, min(1.0, outside))


def smaller_spread(one: Summary, other: Summary) -> Evidence:
    """Test sigma_one < sigma_other with F = s_one^2 / s_other^2. Two spreads of 0 are no evidence."""
    if min(one.n, other.n) < 2 or not isfinite(one.std + other.std) or one.std == other.std == 0:
        return NOTHING
    if other.std == 0:
        return Evidence(1.0, 0.0)
    f, degrees = one.std**2 / other.std**2, (one.n - 1, other.n - 1)
    return Evidence(float(special.fdtr(*degrees, f)), float(special.fdtrc(*degrees, f)))


def at_least(evidence: Sequence[Evidence], least: int) -> Evidence:
    """Test that at least `least` of k statements are true, against the null that fewer are.

    Partial conjunction (Benjamini and Heller 2008), valid however the tests depend on each other: with p sorted,
    inside = (k - least + 1) p_(least). It is the largest p if all must be true (intersection-union), and
    Bonferroni's if one must. Outside: that k - least + 1 are false, by the same rule.

    A binomial test over tasks would ask whether tasks are drawn from a half-half population: with six it can never
    say that four of them gain. Here the tasks are those that are named, and each is tested by its own seeds.
    """
    k = len(evidence)
    if not 1 <= least <= k:
        return NOTHING
    false = k - least + 1
    inside = false * sorted(each.inside for each in evidence)[least - 1]
    outside = least * sorted(each.outside for each in evidence)[false - 1]
    return Evidence(min(1.0, inside), min(1.0, outside))


@dataclass(frozen=True)
class PrintedComparison:
    """One of our cells against the printed one: ours - printed, in the unit of the table, with its 95 % interval."""

    difference: float
    low: float
    high: float
    method: str  # how the interval was computed
    evidence: Evidence  # on the margin
    is_same_protocol: bool
    p_holm: float  # among a `family` of comparisons
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
    """Return the smallest difference that matters for a metric, in its own units: inside it two results agree."""
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
    """Compare our sample with a printed cell of n trials, or return None if it is empty.

    The interval is Welch's if both sides have a spread and at least two trials. If only one side has a spread, the
    other number counts as one more trial of the same spread. Equal values for every seed, which a coarse metric gives
    by chance, are no spread. The difference is tested against the margin.
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
