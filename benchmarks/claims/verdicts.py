"""From comparisons to a verdict: agrees, differs or undecided.

Each comparison is a difference of two sides, tested against the region that its claim names (`equivalence.py`). The
tests of all comparisons together are the evidence on a part of the claim (`judge`). The verdict follows from the
evidence and its p-value (`decide`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, inf, isfinite, log, nan
from typing import Any

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
    seeds_to_decide,
    seeds_to_decide_spread,
    smaller_spread,
)
from dipole.benchmarks.report.table import number
from dipole.benchmarks.statistics import Summary

AGREES, DIFFERS, UNDECIDED, NOT_COMPARED = "agrees", "differs", "cannot be decided at this n", "other protocol"


def decide(evidence: Evidence, p: float) -> str:
    """Return the verdict: undecided unless p, adjusted or not, is below LEVEL."""
    if not p < LEVEL:
        return UNDECIDED
    if evidence.is_for:
        return AGREES
    return DIFFERS


@dataclass(frozen=True)
class Side:
    """One cell: values by seed if there are any, and mean, standard deviation and n, as far as known."""

    samples: Mapping[int, float] | None
    summary: Summary

    @property
    def logs(self) -> "Side":
        """The logarithms of the values."""
        s, mean = self.summary, log(self.summary.mean)
        summary = Summary(s.n, mean, s.std / s.mean, nan, nan)
        return Side({seed: log(value) for seed, value in (self.samples or {}).items()} or None, summary)


@dataclass(frozen=True)
class Contrast:
    """One comparison before it is judged: pairs of sides, each first minus second.

    Args:
        label: what is compared.
        value: its difference, ratio or gap.
        pairs: one pair, or several.
        combine: `every` if all pairs must hold, `any_of` if one must.
        direction: -1 if the first side has to be the smaller one.
        printed: the printed difference.
        is_log: whether ratios are compared.
        is_closed: whether the bound itself is as claimed.
        subject: the rows, if a claim has several lists of comparisons.
        names: of several pairs.
    """

    label: str
    value: float
    pairs: Sequence[tuple[Side, Side]]
    combine: Callable[[Sequence[Evidence]], Evidence] = every
    direction: int = 1
    printed: float | None = None
    is_log: bool = False
    is_closed: bool = False
    subject: str = ""
    names: Sequence[str] = ()

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
        """Return first minus second of the first pair by seed."""
        one, other = (side.samples or {} for side in self.sides()[0])
        return {seed: one[seed] - other[seed] for seed in one.keys() & other}

    def turn(self, part: Part) -> int:
        """Return 1, -1 if the first side has to be the smaller one, or 0 if the printed difference is 0."""
        if part.kind == "sign" and self.printed is not None:
            return (self.printed > 0) - (self.printed < 0)
        return self.direction

    def region(self, part: Part) -> tuple[float, float]:
        """Return the region of the part in units of first minus second."""
        (low, high), turn = part.region, self.turn(part)
        if turn == 0:
            return -inf, inf
        if turn > 0:
            return low, high
        return -high, -low


@dataclass(frozen=True)
class Item:
    """One comparison of a claim, judged.

    Args:
        label: what is compared.
        value: its difference, ratio or gap.
        holds: whether the value is as claimed, chance aside.
        evidence: whether it is beyond chance.
        low: lower end of the 95 % interval, or nan.
        high: upper end.
        seeds: number of seeds that would decide it, or None if unknown.
        is_tested: whether there is a spread to test with.
        subject: the compared rows if a claim has several lists of comparisons.
        shown: the difference of the deciding pair if there are several, else nan.
        pair: the name of that pair.
        is_on_bound: whether the estimate is exactly on the bound, so that no number of seeds decides.
    """

    label: str
    value: float
    holds: bool
    evidence: Evidence = NOTHING
    low: float = nan
    high: float = nan
    seeds: int | None = None
    is_tested: bool = False
    subject: str = ""
    shown: float = nan
    pair: str = ""
    is_on_bound: bool = False

    @property
    def p(self) -> float | None:
        """Two-sided, or None without a spread to judge by."""
        return self.evidence.p if self.is_tested else None

    @property
    def verdict(self) -> str:
        """The verdict on this comparison alone."""
        return decide(self.evidence, self.evidence.p)

    @property
    def words(self) -> str:
        """The comparison with its value and interval, as text."""
        text = ", ".join(filter(None, (self.subject, self.pair, self.label))) + ": "
        known = [value for value in (self.shown, self.value) if isfinite(value)]
        if known:
            text += number(known[0])
        else:
            text += "unknown"
        if isfinite(self.low + self.high):
            text += f" ({number(self.low)} to {number(self.high)})"
        return text


@dataclass(frozen=True)
class Judged:
    """A part of a claim on one set of numbers.

    Args:
        part: what it says.
        items: its comparisons.
        missing: comparisons without data.
        evidence: of all of them together.
        mean: the mean of all comparisons if the part is about it, or None.
        side: of its bound that the part speaks of: "above", "below", or "beyond" if comparisons differ.
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
        if self.mean is None:
            return worst
        # A part that is about the mean alone is shown to be wrong by the mean.
        by_mean = self.mean.evidence.outside <= every([item.evidence for item in self.items]).outside
        if by_mean or not self.part.spec.of_each:
            return self.mean
        return worst


def judge(part: Part, contrasts: Sequence[Contrast | None]) -> Judged:
    """Judge one part of a claim. Comparisons without data are None."""
    spec, known = part.spec, [each for each in contrasts if each is not None]
    if spec.is_spread:
        items = [_spread_item(each) for each in known]
    else:
        items = [_item(part, each) for each in known]
    missing = len(contrasts) - len(known)
    evidence = count([*(item.evidence for item in items), *[NOTHING] * missing], part.at_least(len(contrasts)))
    mean = None
    directed = [each for each in known if each.turn(part)]
    if spec.of_mean and directed and all(len(each.pairs) == 1 for each in directed):
        mean = _mean_item(part, directed)
        evidence = _evidence_of_mean(part, mean.evidence, evidence, items, missing)
    if part.kind == "significant":
        evidence = Evidence(min(1.0, evidence.inside * LEVEL / part.level), evidence.outside)
    turns = {each.turn(part) for each in directed}
    side = "above"
    if len(turns) > 1:
        side = "beyond"
    elif turns == {-1}:
        side = "below"
    return Judged(part, tuple(items), missing, evidence, mean, side)


def _evidence_of_mean(
    part: Part, of_mean: Evidence, of_items: Evidence, items: Sequence[Item], missing: int
) -> Evidence:
    """Return the evidence on a part about a mean. If each comparison has to hold, one false comparison is enough."""
    of_each = part.spec.of_each
    inside, outside = of_mean.inside, of_mean.outside
    if missing:
        inside = outside = 1.0
    if of_each and not all(item.holds for item in items):
        inside = 1.0
    if of_each and len(items) > 1:
        outside = min(1.0, 2 * min(of_items.outside, outside))
    return Evidence(inside, outside)


def default_part(test: Mapping[str, Any]) -> Part:
    """Return the part of a test without a spec: a spread, a comparison of deviations, or the sign."""
    if test["kind"] == "spread":
        return Part(kind="range", bound=test["published"]["spread"])
    if test.get("field") == "std":
        return Part(kind="spread")
    return Part(kind="sign", bound=float(test.get("min_diff", 0.0)))


def _is_in(value: float, region: tuple[float, float], is_closed: bool) -> bool:
    slack = -ROUNDING
    if is_closed:
        slack = ROUNDING
    return region[0] - slack <= value <= region[1] + slack


def _item(part: Part, contrast: Contrast) -> Item:
    region = contrast.region(part)
    value = contrast.value
    if contrast.is_log:
        value = log(value)
    estimates = contrast.estimates()
    single = [against(each, *region) for each in estimates]
    tested = any(isfinite(each.error) for each in estimates)
    open_ones = [each for each, found in zip(estimates, single, strict=True) if found.p >= LEVEL]
    wanted = [seeds_to_decide(each, *region) for each in open_ones]
    decider = _decider(contrast, estimates, single, value)
    low, high = _shown(estimates[decider], contrast.is_log)
    item = Item(
        contrast.label,
        contrast.value,
        _is_in(value, region, part.spec.is_closed or contrast.is_closed),
        contrast.combine(single),
        low,
        high,
        is_tested=tested,
        subject=contrast.subject,
        is_on_bound=tested and None in wanted,
    )
    if None not in wanted:
        item = replace(item, seeds=max((n for n in wanted if n), default=None))
    if len(estimates) > 1 and tested:
        item = replace(item, shown=estimates[decider].value, pair=contrast.names[decider])
    return item


def _decider(contrast: Contrast, estimates: Sequence[Estimate], single: Sequence[Evidence], value: float) -> int:
    """Return the place of the deciding pair, or without evidence of the pair with the shown difference."""
    places = range(len(single))
    combined = contrast.combine(single)
    # If all pairs must hold, the weakest decides. If one must, the strongest does.
    sign = -1
    if contrast.combine is every:
        sign = 1
    if combined.is_for:
        return max(places, key=lambda i: sign * single[i].inside)
    if combined.outside < 1:
        return min(places, key=lambda i: sign * single[i].outside)
    return min(places, key=lambda i: abs(abs(estimates[i].value) - abs(value)))


def _shown(found: Estimate, is_log: bool) -> tuple[float, float]:
    low, high = found.interval()
    if is_log:
        return exp(low), exp(high)
    return low, high


def _spread_item(contrast: Contrast) -> Item:
    """Compare standard deviations: the first has to be the smaller one if the direction is -1."""
    pairs = []
    for one, other in contrast.pairs:
        small, large = other.summary, one.summary
        if contrast.direction < 0:
            small, large = large, small
        pairs.append((small, large))
    evidence = contrast.combine([smaller_spread(small, large) for small, large in pairs])
    seeds = [seeds_to_decide_spread(small.std, large.std) for small, large in pairs]
    tested = evidence != NOTHING
    return Item(
        contrast.label,
        contrast.value,
        contrast.direction * contrast.value > ROUNDING,
        evidence,
        seeds=max((n for n in seeds if n), default=None),
        is_tested=tested,
        subject=contrast.subject,
        is_on_bound=tested and None in seeds,
    )


def _mean_item(part: Part, known: Sequence[Contrast]) -> Item:
    """Judge the mean of several comparisons, each in its claimed direction."""
    turned, gaps = [], []
    for each in known:
        turn, (estimate,) = each.turn(part), each.estimates()
        turned.append(replace(estimate, value=turn * estimate.value))
        gaps.append({seed: turn * gap for seed, gap in each.gaps().items()})
    found, label, subject = turned[0], known[0].label, known[0].subject
    if len(known) > 1:
        found, label = average(turned, gaps), f"mean of {len(known)}"
    if len({each.subject for each in known}) > 1:
        subject = ""
    region, is_log = part.region, known[0].is_log
    value, seeds, tested = found.value, seeds_to_decide(found, *region), isfinite(found.error)
    holds, (low, high) = _is_in(value, region, False), _shown(found, is_log)
    if is_log:
        value = exp(value)
    on_bound = tested and seeds is None
    return Item(label, value, holds, against(found, *region), low, high, seeds, tested, subject, is_on_bound=on_bound)
