"""Where a verdict is made: from comparisons to agrees, differs or undecided.

Each comparison is a difference of two sides, tested against the region that its claim names (`equivalence.py`). The
tests of all comparisons together are the evidence on a part of the claim (`judge_part`). The verdict follows from the
evidence and its p-value (`decide`).
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, inf, isfinite, log, nan
from typing import Any

from scipy import special

from dipole.benchmarks.claims.claim_specs import LEVEL, ROUNDING, Part
from dipole.benchmarks.claims.equivalence import (
    NOTHING,
    Estimate,
    Evidence,
    against,
    average,
    count,
    every,
    of_pairs,
    of_summaries,
    reach,
    smaller_spread,
)
from dipole.benchmarks.statistics import Summary, number
from dipole.benchmarks.statistics.estimates import pairs_are_better

AGREES, DIFFERS, UNDECIDED, NOT_COMPARED = "agrees", "differs", "cannot be decided at this n", "other protocol"
NO_ROOM, NOT_LEARNT, NOT_DECIDABLE = "no room", "not learnt", "not decidable on this hardware"
ON_BOUND = 1e-3
"""An estimate is on its bound if it is nearer than this share of its standard error."""
OBSTACLES = (NO_ROOM, NOT_LEARNT)
"""Verdicts on claims that the numbers cannot show: neither agreement nor difference."""


def decide(evidence: Evidence, p: float) -> str:
    """Return the verdict: undecided unless p, corrected or not, is below LEVEL. A p of nan is no test."""
    if not p < LEVEL:
        return UNDECIDED
    if evidence.is_for:
        return AGREES
    return DIFFERS


@dataclass(frozen=True)
class Side:
    """One cell: values by seed if there are any, and mean, standard deviation and n, as far as known.

    `untrained` are the values of the same seeds before training, or None if they are not measured.
    """

    samples: Mapping[int, float] | None
    summary: Summary
    untrained: Mapping[int, float] | None = None

    def is_learnt(self, sign: int) -> bool:
        """Return whether the values are above those before training (one-sided t-test at LEVEL / 2), or unknown.

        sign: -1 if smaller values are better.
        """
        if not self.samples or not self.untrained:
            return True
        found = of_pairs(self.samples, self.untrained)
        if not isfinite(found.error):
            return sign * found.value > 0
        return sign * found.value > found.error * -float(special.stdtrit(found.df, LEVEL / 2))

    @property
    def logs(self) -> "Side":
        """The logarithms of the values."""
        s, mean = self.summary, log(self.summary.mean)
        summary = Summary(s.n, mean, s.std / s.mean, nan, nan)
        return Side({seed: log(value) for seed, value in (self.samples or {}).items()} or None, summary)


@dataclass(frozen=True)
class Contrast:
    """One comparison before it is judged: a pair of sides or several, each first minus second.

    `value` is its difference, ratio or gap. All pairs must hold (`every`), or one must (`any_of`).
    """

    label: str
    value: float
    pairs: Sequence[tuple[Side, Side]]
    combine: Callable[[Sequence[Evidence]], Evidence] = every
    direction: int = 1  # -1 if the first side has to be the smaller one
    printed: float | None = None  # the printed difference
    is_log: bool = False  # ratios are compared
    is_closed: bool = False  # the bound itself is as claimed
    subject: str = ""  # the rows, if a claim has several lists of comparisons
    names: Sequence[str] = ()  # of several pairs
    effect: float = nan  # the difference or ratio that the paper's own table has
    bounds: tuple[float, float] = (-inf, inf)  # of the metric
    sign: int = 1  # -1 if smaller values of the metric are better

    def sides(self) -> list[tuple[Side, Side]]:
        """Return the pairs, or their logarithms if ratios are compared."""
        if not self.is_log:
            return list(self.pairs)
        return [(one.logs, other.logs) for one, other in self.pairs]

    def estimates(self) -> list[Estimate]:
        """Return first minus second of each pair."""
        found = []
        for one, other in self.sides():
            if one.samples and other.samples:
                found.append(of_pairs(one.samples, other.samples))
            else:
                found.append(of_summaries(one.summary, other.summary))
        return found

    def gaps(self) -> dict[int, float]:
        """Return first minus second of the first pair by seed, or {} if its sides are compared as two samples."""
        one, other = (side.samples or {} for side in self.sides()[0])
        common = one.keys() & other
        if not pairs_are_better(len(common), len(one), len(other)):
            return {}
        return {seed: one[seed] - other[seed] for seed in common}

    def obstacle(self, pair: int, region: tuple[float, float]) -> str:
        """Return NO_ROOM or NOT_LEARNT if a pair cannot show the printed effect, or "".

        The base is the side that the paper's table has as the worse one. The printed effect, added to our base, has to
        stay within the bounds of the metric. So does the margin inside which two sides count as close.
        """
        if not isfinite(self.effect):
            return ""
        amount = self.effect - float(self.is_log)
        first, second = self.pairs[pair]
        base = second
        if self.sign * amount < 0:
            base = first
        if not base.is_learnt(self.sign):
            return NOT_LEARNT
        level, (low, high) = base.summary.mean, self.bounds
        size = abs(amount)
        if region[0] < 0 < region[1] < inf:  # the claim is that two sides are close
            size = max(size, region[1])
        reached = level + self.sign * size
        if self.is_log:
            reached = level * max(self.effect, 1 / self.effect) ** self.sign
        if low <= level <= high and not low <= reached <= high:
            return NO_ROOM
        return ""

    def turn(self, part: Part) -> int:
        """Return 1, -1 if the first side has to be the smaller one, or 0 if the printed difference is 0."""
        if part.kind == "sign" and self.printed is not None:
            return (self.printed > 0) - (self.printed < 0)
        return self.direction

    def region(self, part: Part) -> tuple[float, float]:
        """Return the region of the part in units of first minus second."""
        (low, high), turn = part.region, self.turn(part)
        return {1: (low, high), -1: (-high, -low), 0: (-inf, inf)}[turn]


@dataclass(frozen=True)
class Item:
    """One comparison of a claim, judged: its value with a 95 % interval (nan without one), as `words` too."""

    label: str
    value: float
    holds: bool  # the value is as claimed, chance aside
    evidence: Evidence  # it is beyond chance
    low: float
    high: float
    reach: float  # smallest distance from the bound that the seeds show (a log ratio if `is_log`), or nan
    is_tested: bool  # there is a spread to test with
    words: str
    is_log: bool = False
    is_on_bound: bool = False  # no number of seeds decides it
    obstacle: str = ""  # NO_ROOM or NOT_LEARNT: the comparison cannot show the printed effect

    @property
    def p(self) -> float | None:
        """Two-sided, or None without a spread to judge by."""
        return self.evidence.p if self.is_tested else None

    @property
    def verdict(self) -> str:
        """The verdict on this comparison alone."""
        return decide(self.evidence, self.evidence.p)


@dataclass(frozen=True)
class JudgedPart:
    """A part of a claim on one set of numbers: its comparisons, and the evidence of all of them together.

    `missing` comparisons have no data. `mean` is the mean of all if the part is about it. `side` is that of its bound
    that the part speaks of: "above", "below", or "beyond" if comparisons differ.
    """

    part: Part
    items: tuple[Item, ...]
    missing: int
    evidence: Evidence
    mean: Item | None = None
    side: str = "above"

    @property
    def words(self) -> str:
        """The statement with its bound."""
        return self.part.words(len(self.items) + self.missing, self.side)

    @property
    def deciding(self) -> Item | None:
        """The comparison the verdict hangs on: the worst shown to be wrong, or the weakest of those that hold."""
        if not self.items:
            return self.mean
        if self.evidence.is_for or self.evidence.outside == 1:
            return self.mean or max(self.items, key=lambda item: (not item.holds, item.evidence.inside))
        worst = min(self.items, key=lambda item: item.evidence.outside)
        # A part that is about the mean alone is shown to be wrong by the mean.
        refuted = every([item.evidence for item in self.items]).outside
        if self.mean and (not self.part.spec.of_each or self.mean.evidence.outside <= refuted):
            return self.mean
        return worst


def judge_part(part: Part, contrasts: Sequence[Contrast | None]) -> JudgedPart:
    """Judge one part of a claim. Comparisons without data are None."""
    spec, known = part.spec, [each for each in contrasts if each is not None]
    items = [_spread_item(each) if spec.is_spread else _item(part, each) for each in known]
    missing, mean = len(contrasts) - len(known), None
    evidence = count([*(item.evidence for item in items), *[NOTHING] * missing], part.at_least(len(contrasts)))
    directed = [each for each in known if each.turn(part)]
    if spec.of_mean and directed and all(len(each.pairs) == 1 for each in directed):
        mean = _mean_item(part, directed)
        inside, outside = mean.evidence.inside, mean.evidence.outside
        if missing:
            inside = outside = 1.0
        # If each comparison has to hold, one false comparison is enough against it.
        if spec.of_each and not all(item.holds for item in items):
            inside = 1.0
        if spec.of_each and len(items) > 1:
            outside = min(1.0, 2 * min(evidence.outside, outside))
        evidence = Evidence(inside, outside)
    if part.kind == "significant":
        evidence = replace(evidence, inside=min(1.0, evidence.inside * LEVEL / part.level))
    turns = {each.turn(part) for each in directed}
    side = "above"
    if len(turns) > 1:
        side = "beyond"
    elif turns == {-1}:
        side = "below"
    return JudgedPart(part, tuple(items), missing, evidence, mean, side)


def default_part(test: Mapping[str, Any]) -> Part:
    """Return the part of a test without a spec: a spread, a comparison of deviations, or the sign."""
    if test["kind"] == "spread":
        return Part(kind="range", bound=test["published"]["spread"])
    if test.get("field") == "std":
        return Part(kind="spread")
    return Part(kind="sign", bound=float(test.get("min_diff", 0.0)))


def _item(part: Part, contrast: Contrast) -> Item:
    region, value, estimates = contrast.region(part), contrast.value, contrast.estimates()
    single = [against(each, *region) for each in estimates]
    evidence = contrast.combine(single)
    places = range(len(single))
    # If all pairs must hold, the weakest decides. If one must, the strongest does.
    sign = 1 if contrast.combine is every else -1
    decider = min(places, key=lambda i: abs(abs(estimates[i].value) - abs(value)))
    if evidence.is_for:
        decider = max(places, key=lambda i: sign * single[i].inside)
    elif evidence.outside < 1:
        decider = min(places, key=lambda i: sign * single[i].outside)
    is_tested = any(isfinite(each.error) for each in estimates)
    names, shown = [contrast.subject, contrast.label], value
    if len(estimates) > 1 and is_tested:
        names.insert(1, contrast.names[decider])
        shown = estimates[decider].value
    low, high = estimates[decider].interval()
    if contrast.is_log:
        value, low, high = log(value), exp(low), exp(high)
    return Item(
        contrast.label,
        contrast.value,
        _is_in(value, region, part.spec.is_closed or contrast.is_closed),
        evidence,
        low,
        high,
        reach(estimates[decider]),
        is_tested,
        _words(names, shown, low, high),
        contrast.is_log,
        _is_on_bound(estimates[decider], region),
        contrast.obstacle(decider, region),
    )


def _spread_item(contrast: Contrast) -> Item:
    """Compare standard deviations: the first has to be the smaller one if the direction is -1."""
    pairs = [(second.summary, first.summary)[:: contrast.direction] for first, second in contrast.pairs]
    evidence = contrast.combine([smaller_spread(small, large) for small, large in pairs])
    holds, words = contrast.direction * contrast.value > ROUNDING, [contrast.subject, contrast.label]
    is_equal = all(abs(small.std - large.std) <= ON_BOUND * large.std for small, large in pairs)
    return Item(
        contrast.label, contrast.value, holds, evidence, nan, nan, nan, evidence != NOTHING,
        _words(words, contrast.value, nan, nan), is_on_bound=is_equal,
    )  # fmt: skip


def _mean_item(part: Part, known: Sequence[Contrast]) -> Item:
    """Judge the mean of several comparisons, each in its claimed direction."""
    turned, gaps = [], []
    for each in known:
        turn, (estimate,) = each.turn(part), each.estimates()
        turned.append(replace(estimate, value=turn * estimate.value))
        gaps.append({seed: turn * gap for seed, gap in each.gaps().items()})
    found, names = turned[0], [known[0].subject, known[0].label]
    if len(known) > 1:
        found, names[1] = average(turned, gaps), f"mean of {len(known)}"
    if len({each.subject for each in known}) > 1:
        names[0] = ""
    value, (low, high) = found.value, found.interval()
    if known[0].is_log:
        value, low, high = exp(value), exp(low), exp(high)
    evidence, holds = against(found, *part.region), _is_in(found.value, part.region, False)
    words, is_tested = _words(names, value, low, high), isfinite(found.error)
    obstacles = Counter(each.obstacle(0, each.region(part)) for each in known)
    is_on_bound, obstacle = _is_on_bound(found, part.region), obstacles.most_common(1)[0][0]
    least = reach(found)
    return Item(
        names[1], value, holds, evidence, low, high, least, is_tested, words, known[0].is_log, is_on_bound, obstacle
    )


def _is_on_bound(found: Estimate, region: tuple[float, float]) -> bool:
    distances = [abs(found.value - bound) for bound in region if isfinite(bound)]
    return isfinite(found.error) and min(distances, default=inf) <= ON_BOUND * found.error


def _is_in(value: float, region: tuple[float, float], is_closed: bool) -> bool:
    slack = ROUNDING if is_closed else -ROUNDING
    return region[0] - slack <= value <= region[1] + slack


def _words(names: Sequence[str], value: float, low: float, high: float) -> str:
    text = number(value) if isfinite(value) else "unknown"
    if isfinite(low + high):
        text += f" ({number(low)} to {number(high)})"
    return f"{', '.join(filter(None, names))}: {text}"
