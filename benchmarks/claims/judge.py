"""Claims of a paper on tables of numbers, the printed tables or ours: from comparisons to agrees, differs or undecided.

Each comparison (`comparisons.py`) is a difference of two sides, tested against the region that its claim names
(`verdicts.against`). The tests of all comparisons together are the evidence on a part of the claim, and those on all
parts the evidence on the claim. The verdict follows from the evidence and its p-value (`verdicts.decide`). `why` says
it in words.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import exp, inf, isfinite, log, nan
from typing import TypeVar

from dipole.benchmarks.claims import verdicts
from dipole.benchmarks.claims.comparisons import Comparison, NumberTable, comparisons
from dipole.benchmarks.claims.protocol import ROUNDING, ClaimPart
from dipole.benchmarks.claims.published import Claim
from dipole.benchmarks.claims.verdicts import NOTHING, Evidence, against, at_least, decide, smaller_spread
from dipole.benchmarks.statistics import LEVEL, holm, number, seeds_needed
from dipole.benchmarks.statistics.differences import Estimate, average
from dipole.benchmarks.statistics.power import least_shift
from dipole.core.utils.text import counted

ON_BOUND = 1e-3  # an estimate is on its bound if it is nearer than this share of its standard error
WHY_NOT = {
    verdicts.NO_ROOM: "The printed effect does not fit between our base and the bound of the metric",
    verdicts.NOT_LEARNT: "Our base is not above the untrained level",
}


@dataclass(frozen=True)
class JudgedComparison:
    """A comparison with the evidence that it is in its region."""

    comparison: Comparison
    estimate: Estimate  # of the pair that decides
    region: tuple[float, float]
    evidence: Evidence
    holds: bool  # the value is as claimed, chance aside
    is_tested: bool  # there is a spread to test with
    pair: int = 0  # number of the pair that decides
    obstacle: str = ""  # NO_ROOM or NOT_LEARNT: it cannot show the printed effect


@dataclass(frozen=True)
class JudgedPart:
    """A part of a claim on one set of numbers: its comparisons, and the evidence of all of them together."""

    part: ClaimPart
    items: tuple[JudgedComparison, ...]
    missing: int  # comparisons without data
    mean: JudgedComparison | None = None  # of all comparisons, if the part is about it

    @property
    def holds(self) -> bool:
        """Whether all is as claimed, chance aside."""
        return all(item.holds for item in self.items)

    @property
    def least(self) -> int:
        return self.part.required(len(self.items) + self.missing)

    @property
    def has_room(self) -> bool:
        """Whether enough comparisons are without an obstacle, so that more seeds could show the part to be true."""
        if self.mean is not None:
            return not self.mean.obstacle
        return sum(not item.obstacle for item in self.items) + self.missing >= self.least

    @cached_property
    def evidence(self) -> Evidence:
        return self._combined(lambda item: item.evidence)

    @cached_property
    def with_room(self) -> Evidence:
        return self._combined(lambda item: NOTHING if item.obstacle else item.evidence)

    def _combined(self, evidence_of: Callable[[JudgedComparison], Evidence]) -> Evidence:
        """Combine the evidence of all comparisons, or that of their mean if the part is about it."""
        spec = self.part.spec
        evidence = at_least([*map(evidence_of, self.items), *[NOTHING] * self.missing], self.least)
        if self.mean is not None:
            of_mean = NOTHING if self.missing else evidence_of(self.mean)
            inside, outside = of_mean.inside, of_mean.outside
            # If each comparison has to hold, one false comparison is enough against it.
            if spec.of_each and not self.holds:
                inside = 1.0
            if spec.of_each and len(self.items) > 1:
                outside = min(1.0, 2 * min(evidence.outside, outside))
            evidence = Evidence(inside, outside)
        if self.part.kind == "significant":
            evidence = replace(evidence, inside=min(1.0, evidence.inside * LEVEL / self.part.level))
        return evidence


@dataclass(frozen=True)
class JudgedClaim:
    """A claim on one set of tables, and how each part of it was judged."""

    claim: Claim
    parts: tuple[JudgedPart, ...]
    is_paper_protocol: bool = True
    p_holm: float = nan  # corrected over all claims that the suite can test
    not_decidable: str = ""  # why the suite cannot decide anything

    @property
    def items(self) -> tuple[JudgedComparison, ...]:
        return tuple(item for part in self.parts for item in part.items)

    @property
    def missing(self) -> int:
        """Number of comparisons without data. A dash in the paper's own table is none."""
        return sum(part.missing for part in self.parts)

    @property
    def is_tested(self) -> bool:
        """True if a comparison has a spread to judge by."""
        return any(item.is_tested for item in self.items)

    @property
    def evidence(self) -> Evidence:
        """Evidence that all parts are true (intersection-union test)."""
        return at_least([part.evidence for part in self.parts], len(self.parts))

    @property
    def p(self) -> float:
        """Two-sided p-value of the claim alone, or nan if nothing can be tested."""
        return self.evidence.p if self.is_tested else nan

    @property
    def has_room(self) -> bool:
        """Whether the evidence is as strong without the comparisons that have an obstacle, or could be if undecided."""
        if decide(self.evidence, self.p_holm) == verdicts.UNDECIDED:
            return all(part.has_room for part in self.parts)
        return at_least([part.with_room for part in self.parts], len(self.parts)).p == self.evidence.p

    @property
    def verdict(self) -> str:
        """The verdict, as one claim of several: agrees, differs, undecided, or what keeps the claim from a test."""
        if not self.claim.tests:
            return verdicts.NO_TEST
        if self.not_decidable:
            return verdicts.NOT_DECIDABLE
        if not self.items:
            return verdicts.NO_DATA
        obstacles = [item.obstacle for item in self.items if item.obstacle]
        if obstacles and not self.has_room:
            return obstacles[0]
        return decide(self.evidence, self.p_holm)

    @property
    def full_verdict(self) -> str:
        """The verdict, and whether the numbers are by another protocol."""
        if self.is_paper_protocol or self.verdict in (verdicts.NO_DATA, verdicts.NO_TEST, verdicts.NOT_DECIDABLE):
            return self.verdict
        return f"{self.verdict} ({verdicts.NOT_COMPARED})"


def judge_claims(
    claims: Sequence[Claim], tables: Mapping[str, NumberTable], by_protocol: Collection[str], not_decidable: str = ""
) -> list[JudgedClaim]:
    """Judge a paper's claims as one family of tests. The tables `by_protocol` are filled by the paper's protocol."""
    judged = [judge_claim(claim, tables) for claim in claims]
    found = []
    for each, p in zip(judged, holm([nan if not_decidable else each.p for each in judged]), strict=True):
        is_paper = all(name in by_protocol for name in each.claim.tables if name in tables)
        found.append(replace(each, is_paper_protocol=is_paper, p_holm=p, not_decidable=not_decidable))
    return found


def judge_claim(claim: Claim, tables: Mapping[str, NumberTable]) -> JudgedClaim:
    """Judge a claim alone on the tables by table id. Comparisons of an absent table count as missing."""
    judged = (_judge_part(part, list(comparisons(claim, part, tables))) for part in claim.all_parts)
    alone = JudgedClaim(claim, tuple(judged))
    return replace(alone, p_holm=alone.p)


def _judge_part(part: ClaimPart, found: Sequence[Comparison | None]) -> JudgedPart:
    judge = _judge_spread if part.spec.is_spread else _judge
    items = tuple(judge(part, each) for each in found if each is not None)
    missing, mean = len(found) - len(items), None
    directed = [item for item in items if item.comparison.turn(part)]
    if part.spec.of_mean and directed and all(len(item.comparison.pairs) == 1 for item in directed):
        mean = _judge_mean(part, directed)
    return JudgedPart(part, items, missing, mean)


def _judge(part: ClaimPart, comparison: Comparison) -> JudgedComparison:
    region, estimates, value = comparison.region(part), comparison.estimates(), comparison.value
    single = [against(each, *region) for each in estimates]
    places = range(len(single))
    # If all pairs must hold, the weakest decides. If one must, the strongest does.
    least, sign = (1, -1) if comparison.one_is_enough else (len(single), 1)
    evidence = at_least(single, least)
    pair = min(places, key=lambda i: abs(abs(estimates[i].value) - abs(value)))
    if evidence.is_for:
        pair = max(places, key=lambda i: sign * single[i].inside)
    elif evidence.outside < 1:
        pair = min(places, key=lambda i: sign * single[i].outside)
    holds = _is_in(log(value) if comparison.is_log else value, region, part.spec.is_closed or comparison.is_closed)
    is_tested, obstacle = any(isfinite(each.error) for each in estimates), comparison.obstacle(pair, region)
    return JudgedComparison(comparison, estimates[pair], region, evidence, holds, is_tested, pair, obstacle)


def _judge_spread(part: ClaimPart, comparison: Comparison) -> JudgedComparison:
    """Compare standard deviations: the first has to be the smaller one if the direction is -1."""
    pairs = [(second.summary, first.summary)[:: comparison.direction] for first, second in comparison.pairs]
    evidence = at_least([smaller_spread(*pair) for pair in pairs], len(pairs))
    value, holds = Estimate(comparison.value), comparison.direction * comparison.value > ROUNDING
    return JudgedComparison(comparison, value, (-inf, inf), evidence, holds, evidence != NOTHING)


def _judge_mean(part: ClaimPart, items: Sequence[JudgedComparison]) -> JudgedComparison:
    """Judge the mean of several comparisons of one pair, each in its claimed direction."""
    found, shown = average([item.estimate.times(item.comparison.turn(part)) for item in items]), items[0].comparison
    if len(items) > 1:
        shown = replace(shown, label=f"mean of {len(items)}")
    if len({item.comparison.subject for item in items}) > 1:
        shown = replace(shown, subject="")
    shown = replace(shown, value=exp(found.value) if shown.is_log else found.value)
    evidence, holds = against(found, *part.region), _is_in(found.value, part.region, False)
    obstacle = Counter(item.obstacle for item in items).most_common(1)[0][0]
    return JudgedComparison(shown, found, part.region, evidence, holds, isfinite(found.error), obstacle=obstacle)


def _is_in(value: float, region: tuple[float, float], is_closed: bool) -> bool:
    slack = ROUNDING if is_closed else -ROUNDING
    return region[0] - slack <= value <= region[1] + slack


def says(judged: JudgedClaim) -> str:
    words = []
    for each in judged.parts:
        turns = {turn for item in each.items if (turn := item.comparison.turn(each.part))}
        side = {frozenset({-1}): "below", frozenset({1, -1}): "beyond"}.get(frozenset(turns), "above")
        text = each.part.words(len(each.items) + each.missing, side)
        if not text.startswith(each.part.kind):
            text = f"{each.part.kind}: {text}"
        words.append(text)
    return "; ".join(dict.fromkeys(words))


Judged = TypeVar("Judged", JudgedComparison, JudgedPart)


def deciding(claim: JudgedClaim) -> JudgedComparison | None:
    """Return the comparison that decides the verdict: one with an obstacle if the verdict is one. None without data."""
    parts = [part for part in claim.parts if part.items]
    if not parts:
        return None
    part = _decisive(parts, claim.evidence, len(parts))
    found = _decisive(part.items, part.evidence, part.least)
    if part.mean is not None:
        # Each comparison by its sign: a false one is named if it is clearer than the mean.
        refuted = len(part.items) * found.evidence.outside
        is_false = not part.evidence.is_for and part.evidence.outside < 1 and part.part.spec.of_each
        if not is_false or part.mean.evidence.outside <= refuted:
            found = part.mean
    if (verdict := claim.verdict) in verdicts.OBSTACLES and found.obstacle != verdict:
        return next(item for item in claim.items if item.obstacle == verdict)
    return found


def _decisive(judged: Sequence[Judged], evidence: Evidence, least: int) -> Judged:
    """Return what decides whether `least` of several are true: the weakest that has to be, or the worst."""
    if evidence.is_for:
        return sorted(judged, key=lambda each: each.evidence.inside)[min(least, len(judged)) - 1]
    if evidence.outside == 1:
        return max(judged, key=lambda each: (not each.holds, each.evidence.inside))
    return min(judged, key=lambda each: each.evidence.outside)


def in_words(item: JudgedComparison) -> str:
    (low, high), value, is_log = item.estimate.interval(), item.comparison.value, item.comparison.is_log
    names = [item.comparison.subject, item.comparison.label]
    if len(item.comparison.pairs) > 1 and item.is_tested:
        names.insert(1, item.comparison.names[item.pair])
        value = item.estimate.value
    text = number(value) if isfinite(value) else "unknown"
    if isfinite(low + high):
        if is_log:
            low, high = exp(low), exp(high)
        text += f" ({number(low)} to {number(high)})"
    return f"{', '.join(filter(None, names))}: {text}"


def why(judged: JudgedClaim) -> str:
    """Return the reason for the verdict of a claim, or what is missing for one."""
    if judged.verdict == verdicts.NOT_DECIDABLE:
        return judged.not_decidable
    if not judged.claim.tests:
        return judged.claim.not_tested
    found, verdict = deciding(judged), judged.verdict
    if found is None:
        return ""
    if verdict == verdicts.AGREES and len(judged.items) > 1:
        return f"weakest {in_words(found)}"
    if verdict in (verdicts.AGREES, verdicts.DIFFERS):
        return f"by {in_words(found)}"
    if verdict in WHY_NOT:
        return f"{in_words(found)}. {WHY_NOT[verdict]}"
    without = ""
    if judged.missing:
        without = f"{counted(judged.missing, 'comparison')} without data"
    return ". ".join(filter(None, [in_words(found), without, _why_undecided(judged)]))


def _why_undecided(judged: JudgedClaim) -> str:
    """Return which distance from the bound the seeds can show."""
    if not judged.is_tested:
        seeds = seeds_needed(1.0, 1.0, is_paired=True)
        counts = [side.summary.n for item in judged.items for pair in item.comparison.pairs for side in pair]
        if min(counts) > 1:
            return "All seeds gave the same value, so there is no spread to test with"
        return (
            "One seed each gives no spread to test with. "
            f"{seeds} seeds would show a distance of one spread from the bound"
        )
    if judged.p < LEVEL:
        return f"Significant alone (p = {number(judged.p)}), but not among all claims of the suite"
    undecided = list(_undecided(judged))
    if any(_is_on_bound(part, item) for part, item in undecided):
        return "The estimate is on its bound, so no number of seeds decides it"
    known = [(reach(item.estimate), item) for _, item in undecided if isfinite(item.estimate.error)]
    if not known:
        return ""
    least, item = max(known, key=lambda each: each[0])
    if item.comparison.is_log:
        return f"These seeds show a factor of {number(exp(least))} from the bound or more"
    return f"These seeds show a distance of {number(least)} from the bound or more"


def _undecided(judged: JudgedClaim) -> Iterator[tuple[JudgedPart, JudgedComparison]]:
    """Yield the undecided means and comparisons, with their parts."""
    for part in judged.parts:
        items: Sequence[JudgedComparison] = ()
        if part.mean and _is_undecided(part.mean.evidence):
            items = [part.mean]
        elif _is_undecided(part.evidence):
            items = [item for item in part.items if _is_undecided(item.evidence)]
            # If each of them is decided, data are missing, or the combined tests fall short.
            if not items and not part.missing:
                items = part.items
        yield from ((part, item) for item in items)


def _is_undecided(evidence: Evidence) -> bool:
    return decide(evidence, evidence.p) == verdicts.UNDECIDED


def _is_on_bound(part: JudgedPart, item: JudgedComparison) -> bool:
    if part.part.spec.is_spread:
        sides = [sorted((one.summary.std, other.summary.std)) for one, other in item.comparison.pairs]
        return all(large - small <= ON_BOUND * large for small, large in sides)
    distances = [abs(item.estimate.value - bound) for bound in item.region if isfinite(bound)]
    return isfinite(item.estimate.error) and min(distances, default=inf) <= ON_BOUND * item.estimate.error


def reach(found: Estimate) -> float:
    """Return the smallest distance from a bound that the seeds show with 80 % power, nan without a spread."""
    return found.error * least_shift(found.df) if isfinite(found.error) else nan
