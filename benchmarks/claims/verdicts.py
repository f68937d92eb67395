"""Where a verdict is made: from an estimate to evidence, and from evidence to agrees, differs or undecided.

An estimate is tested against a region, `low` to `high`, either of them infinite: (0, inf) is a direction, (5, inf)
superiority by a margin, (-2, 2) equivalence by two one-sided tests. The two one-sided p-values are the evidence, and
`decide` makes the verdict of it: for a claim of a paper (`judge.py`) and for a printed number (`printed_numbers.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from scipy import special

from dipole.benchmarks.statistics import LEVEL, Summary
from dipole.benchmarks.statistics.differences import Estimate, tail

AGREES, DIFFERS, UNDECIDED, NOT_COMPARED = "agrees", "differs", "cannot be decided at this n", "other protocol"
NO_ROOM, NOT_LEARNT, NOT_DECIDABLE = "no room", "not learnt", "not decidable on this hardware"
NO_DATA, NO_TEST = "no data", "no machine-readable test"
OBSTACLES = (NO_ROOM, NOT_LEARNT)
"""Verdicts on claims that the numbers cannot show: neither agreement nor difference."""


@dataclass(frozen=True)
class Evidence:
    """Evidence on whether a quantity is in a region: two one-sided p-values from 0 to 1, where 1 is no evidence.

    `inside` is small if the quantity is shown to be in the region, `outside` if it is shown to be outside.
    """

    inside: float = 1.0
    outside: float = 1.0

    @property
    def p(self) -> float:
        """Two-sided: twice the smaller one, so that below 0.05 the 95 % interval is all inside, or all outside."""
        return min(1.0, 2 * min(self.inside, self.outside))

    @property
    def is_for(self) -> bool:
        """True if it speaks for the region."""
        return self.inside < self.outside


NOTHING = Evidence()


def decide(evidence: Evidence, p: float) -> str:
    """Return the verdict: undecided unless p, corrected or not, is below LEVEL. A p of nan is no test."""
    if not p < LEVEL:
        return UNDECIDED
    if evidence.is_for:
        return AGREES
    return DIFFERS


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
