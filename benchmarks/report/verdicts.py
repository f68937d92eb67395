"""How a statement of a paper is judged: its kind, with the parameters its sentence names, and what follows from data.

A kind is a region for every comparison and a way to put comparisons together. The region of `within` with margin 2 is
(-2, 2), that of `more than` with bound 5 is (5, inf); a comparison is judged by its distance from the region
(benchmarks/equivalence.py), and what is exactly on a bound is undecided.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, inf, isfinite, log, nan
from typing import Any

from dipole.benchmarks.equivalence import (
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
from dipole.benchmarks.report.comparison import AGREES, DIFFERS, UNDECIDED
from dipole.benchmarks.report.readings import LEVEL, Part
from dipole.benchmarks.report.table import number
from dipole.benchmarks.statistics import Summary

# Printed numbers have at most two decimals; their differences carry rounding noise far below that.
ROUNDING = 1e-9


@dataclass(frozen=True)
class Side:
    """One cell: values by seed where there are any, and mean, standard deviation and n, as far as known."""

    samples: Mapping[int, float] | None
    summary: Summary

    @property
    def logs(self) -> "Side":
        s, mean = self.summary, log(self.summary.mean)
        summary = Summary(s.n, mean, s.std / s.mean, nan, nan)
        samples = self.samples
        return Side({seed: log(value) for seed, value in samples.items()} if samples else None, summary)


@dataclass(frozen=True)
class Contrast:
    """One comparison before it is judged.

    `pairs` are what it compares, first minus second: one pair, or several of which all must hold (`every`) or one
    (`any_of`), each then with its name in `names`. `direction` is -1 where the first is to be the smaller one;
    `printed` is the printed difference. `subject` names the rows where a claim has more than one list of comparisons.
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

    def estimates(self) -> list[Estimate]:
        return [_minus(*(side.logs for side in pair) if self.is_log else pair) for pair in self.pairs]

    @property
    def gaps(self) -> dict[int, float]:
        """First minus second of its only pair, by seed."""
        one, other = (side.logs.samples if self.is_log else side.samples for side in self.pairs[0])
        return {} if not one or not other else {seed: one[seed] - other[seed] for seed in one.keys() & other}


@dataclass(frozen=True)
class Item:
    """One comparison of a claim.

    Args:
        label: what is compared.
        value: its difference, ratio or gap.
        holds: whether the value is as claimed, chance aside.
        evidence: whether it is beyond chance.
        low: lower end of the 95 % interval of `shown`; nan where there is none.
        high: upper end.
        seeds: that would decide it; None where none are named.
        is_tested: whether there is a spread to judge by.
        subject: the rows, where a claim has more than one list of comparisons; else "".
        shown: of several pairs the difference of the one that the evidence hangs on; nan: `value` is shown.
        pair: the name of that pair; "" of one alone.
        is_on_bound: whether its estimate is exactly on the bound, which no number of seeds decides.
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
        """Two-sided; None where there is no spread to judge by."""
        return self.evidence.p if self.is_tested else None

    @property
    def words(self) -> str:
        """What is compared, with its value and interval, as text."""
        interval = f" ({number(self.low)} to {number(self.high)})" if isfinite(self.low + self.high) else ""
        label = ", ".join(filter(None, (self.subject, self.pair, self.label)))
        value = self.shown if isfinite(self.shown) else self.value
        return f"{label}: {number(value) if isfinite(value) else 'unknown'}{interval}"


@dataclass(frozen=True)
class Judged:
    """A part of a claim on one set of numbers.

    Args:
        part: what it says.
        items: its comparisons.
        missing: comparisons without data.
        evidence: of all of them together.
        item: the mean of all comparisons, where that is what is judged; else None.
        side: of its bound that the part speaks of: "above", "below", or "beyond" where comparisons differ.
    """

    part: Part
    items: tuple[Item, ...]
    missing: int
    evidence: Evidence
    item: Item | None = None  # the mean of all comparisons, where it is what is judged
    side: str = "above"

    @property
    def words(self) -> str:
        """What the part says, with its bound."""
        return KINDS[self.part.kind].words(self.part, len(self.items) + self.missing, self.side)

    @property
    def deciding(self) -> Item | None:
        """The comparison the verdict hangs on: the worst shown to be wrong, or the weakest of those that hold."""
        if not self.items:
            return self.item
        if not self.evidence.is_for and self.evidence.outside < 1:
            worst = min(self.items, key=lambda item: item.evidence.outside)
            if self.item is None:
                return worst
            by_mean = self.item.evidence.outside <= every([item.evidence for item in self.items]).outside
            return self.item if by_mean or not KINDS[self.part.kind].of_each else worst
        return self.item or max(self.items, key=lambda item: (not item.holds, item.evidence.inside))


@dataclass(frozen=True)
class Kind:
    """A kind of statement: the region of a comparison, how comparisons are put together, and its words."""

    region: Callable[[Part], tuple[float, float]]
    words: Callable[[Part, int, str], str]
    combine: Callable[[Part, Sequence[Evidence]], Evidence] = lambda part, evidence: every(evidence)
    is_closed: bool = False
    is_spread: bool = False
    of_mean: bool = False  # the mean over comparisons is what must be shown
    of_each: bool = True  # each estimate must be as claimed


def judge(part: Part, contrasts: Sequence[Contrast | None]) -> Judged:
    """Judge one part of a claim; None stands for a comparison without data, which shows nothing either way."""
    kind, known = KINDS[part.kind], [each for each in contrasts if each is not None]
    items = [_spread_item(part, each) if kind.is_spread else _item(part, kind, each) for each in known]
    missing = len(contrasts) - len(known)
    evidence = [*(item.evidence for item in items), *[NOTHING] * missing]
    found, mean = (kind.combine(part, evidence) if evidence else NOTHING), None
    directed = [each for each in known if _turn(part, each)]
    if kind.of_mean and directed and all(len(each.pairs) == 1 for each in directed):
        mean, estimate = _mean_item(part, kind, directed)
        is_shown = not missing and (not kind.of_each or all(item.holds for item in items))
        # It is false where the mean is shown to be, and, if each is to hold, where one of them is (Bonferroni).
        against_mean = 1.0 if missing else estimate.outside
        outside = min(1.0, 2 * min(found.outside, against_mean)) if kind.of_each and len(known) > 1 else against_mean
        found = Evidence(estimate.inside if is_shown else 1.0, outside)
    if kind is KINDS["significant"]:
        found = Evidence(min(1.0, found.inside * LEVEL / part.level), found.outside)
    turns = {_turn(part, each) for each in known} - {0}
    side = "beyond" if len(turns) > 1 else "below" if turns == {-1} else "above"
    return Judged(part, tuple(items), missing, found, mean, side)


def decide(evidence: Evidence, p: float) -> str:
    """The verdict where p, adjusted or not, is that of the evidence."""
    if not p < LEVEL:
        return UNDECIDED
    return AGREES if evidence.is_for else DIFFERS


def default_part(test: Mapping[str, Any]) -> Part:
    """The kind of comparisons that no reading speaks of: their sign, or what their own operator says."""
    if test["kind"] == "spread":
        return Part(kind="range", bound=test["published"]["spread"])
    if test.get("field") == "std":
        return Part(kind="spread")
    return Part(kind="sign", bound=float(test.get("min_diff", 0.0)))


def _minus(one: Side, other: Side) -> Estimate:
    if one.samples and other.samples:
        return of_pairs(one.samples, other.samples)
    return of_summaries(one.summary, other.summary)


def _turn(part: Part, contrast: Contrast) -> int:
    """-1 where the first is to be the smaller one; 0 where a sign as printed has no direction."""
    if part.kind == "sign" and contrast.printed is not None:
        return (contrast.printed > 0) - (contrast.printed < 0)
    return contrast.direction


def _region(part: Part, kind: Kind, contrast: Contrast) -> tuple[float, float]:
    """In the units of first minus second."""
    low, high = kind.region(part)
    turn = _turn(part, contrast)
    return (-inf, inf) if turn == 0 else (low, high) if turn > 0 else (-high, -low)


def _is_in(value: float, low: float, high: float, is_closed: bool) -> bool:
    slack = ROUNDING if is_closed else -ROUNDING
    return low - slack <= value <= high + slack


def _item(part: Part, kind: Kind, contrast: Contrast) -> Item:
    low, high = _region(part, kind, contrast)
    value = log(contrast.value) if contrast.is_log else contrast.value
    estimates = contrast.estimates()
    single = [against(each, low, high) for each in estimates]
    evidence = contrast.combine(single)
    telling = _telling(contrast, estimates, single, value)
    holds = _is_in(value, low, high, kind.is_closed or contrast.is_closed)
    tested = any(isfinite(each.error) for each in estimates)
    wanted = [seeds_to_decide(e, low, high) for e, found in zip(estimates, single, strict=True) if found.p >= LEVEL]
    on_bound = tested and None in wanted
    seeds = None if None in wanted else max((n for n in wanted if n), default=None)
    interval, several = _shown(estimates[telling], contrast.is_log), len(estimates) > 1
    return Item(
        contrast.label, contrast.value, holds, evidence, *interval, seeds, tested, contrast.subject,
        estimates[telling].value if several and tested else nan, contrast.names[telling] if several and tested else "",
        on_bound,
    )  # fmt: skip


def _telling(contrast: Contrast, estimates: Sequence[Estimate], single: Sequence[Evidence], value: float) -> int:
    """Which of its pairs a comparison's evidence hangs on; without evidence that of its value, but for the sign."""
    number_of = range(len(single))
    combined, turn = contrast.combine(single), 1 if contrast.combine is every else -1
    if combined.is_for:
        return max(number_of, key=lambda i: turn * single[i].inside)
    if combined.outside < 1:
        return min(number_of, key=lambda i: turn * single[i].outside)
    return min(number_of, key=lambda i: abs(abs(estimates[i].value) - abs(value)))


def _shown(found: Estimate, is_log: bool) -> tuple[float, float]:
    low, high = found.interval()
    return (exp(low), exp(high)) if is_log and isfinite(low) else (low, high)


def _spread_item(part: Part, contrast: Contrast) -> Item:
    pairs = [tuple(side.summary for side in pair[:: contrast.direction * -1]) for pair in contrast.pairs]
    evidence = contrast.combine([smaller_spread(one, other) for one, other in pairs])
    seeds = max((n for one, other in pairs if (n := seeds_to_decide_spread(one.std, other.std))), default=None)
    holds = contrast.direction * contrast.value > ROUNDING
    tested = evidence != NOTHING
    equal = tested and any(seeds_to_decide_spread(one.std, other.std) is None for one, other in pairs)
    return Item(
        contrast.label, contrast.value, holds, evidence, nan, nan, seeds, tested, contrast.subject, is_on_bound=equal
    )


def _mean_item(part: Part, kind: Kind, known: Sequence[Contrast]) -> tuple[Item, Evidence]:
    """The mean of several comparisons, each in the direction that is claimed of it."""
    turned, gaps = [], []
    for each in known:
        turn, (estimate,) = _turn(part, each), each.estimates()
        turned.append(replace(estimate, value=turn * estimate.value))
        gaps.append({seed: turn * gap for seed, gap in each.gaps.items()})
    found = turned[0] if len(turned) == 1 else average(turned, gaps)
    low, high = kind.region(part)
    evidence = against(found, low, high)
    label = known[0].label if len(known) == 1 else f"mean of {len(known)}"
    is_log = known[0].is_log
    value = exp(found.value) if is_log else found.value
    seeds, tested = seeds_to_decide(found, low, high), isfinite(found.error)
    holds = _is_in(found.value, low, high, False)
    subject = known[0].subject if len({each.subject for each in known}) == 1 else ""
    on_bound = tested and seeds is None
    shown = *_shown(found, is_log), seeds, tested, subject
    return Item(label, value, holds, evidence, *shown, is_on_bound=on_bound), evidence


def _each(words: str) -> Callable[[Part, int, str], str]:
    def say(part: Part, n: int, side: str) -> str:
        numbers = {name: f"{value:g}" for name, value in part if isinstance(value, float)}
        return words.format(side=side, **numbers) + (f", in each of {n}" if n > 1 else "")

    return say


def _counted(part: Part, n: int, side: str) -> str:
    return f"{side} {part.bound:g} in at least {_least(part, n)} of {n}"


def _least(part: Part, n: int) -> int:
    return part.least if part.least is not None else int(part.share * n + ROUNDING) + 1


def _count(part: Part, evidence: Sequence[Evidence]) -> Evidence:
    return count(evidence, _least(part, len(evidence)))


def _about(part: Part) -> tuple[float, float]:
    low, high = (part.amount, part.amount) if part.amount is not None else (part.low, part.high)
    return (low or 0.0) - (part.margin or 0.0), (high or 0.0) + (part.margin or 0.0)


def _between(part: Part) -> tuple[float, float]:
    return part.low or 0.0, part.high or 0.0


def _logs(region: tuple[float, float]) -> tuple[float, float]:
    return log(region[0]), log(region[1])


def _above(part: Part) -> tuple[float, float]:
    return part.bound, inf


def _below(part: Part) -> tuple[float, float]:
    return -inf, part.bound


def _within(part: Part) -> tuple[float, float]:
    return -(part.margin or 0.0), part.margin or 0.0


def _sign_words(part: Part, n: int, side: str) -> str:
    return f"{side} {part.bound:g}" + (f", {n} by their sign and in the mean" if n > 1 else "")


def _mean_words(part: Part, n: int, side: str) -> str:
    said = f"{side} {part.bound:g}" if part.low is None else f"{part.low:g} to {part.high:g}"
    return f"{said} in the mean of {n}"


def _about_words(part: Part, n: int, side: str) -> str:
    low, high = _about(part)
    said = f"{part.amount:g}" if part.amount is not None else f"{part.low:g} to {part.high:g}"
    return f"about {said} ({low:g} to {high:g})" + (f", in each of {n}" if n > 1 else "")


KINDS: Mapping[str, Kind] = {
    "sign": Kind(_above, _sign_words, of_mean=True),
    "average": Kind(_above, _mean_words, of_mean=True, of_each=False),
    "all": Kind(_above, _each("{side} {bound}")),
    "significant": Kind(_above, _each("{side} {bound}, significant at {level}")),
    "most": Kind(_above, _counted, _count),
    "count": Kind(_above, _counted, _count),
    "at least": Kind(_above, _each("at least {bound}"), is_closed=True),
    "more than": Kind(_above, _each("more than {bound}")),
    "less than": Kind(_below, _each("less than {bound}")),
    "between": Kind(_between, _each("{low} to {high}")),
    "between on average": Kind(_between, _mean_words, of_mean=True, of_each=False),
    "within": Kind(_within, _each("within {margin} either way"), is_closed=True),
    "about": Kind(_about, _about_words, is_closed=True),
    "ratio": Kind(lambda part: _logs(_between(part)), _each("{low} to {high} times"), is_closed=True),
    "range": Kind(lambda part: (-part.bound, part.bound), _each("largest less smallest below {bound}")),
    "spread": Kind(_below, _each("smaller standard deviation"), is_spread=True),
}
