"""Claims and their verdicts in words: what is claimed, the comparison that decides it, and missing data."""

from collections.abc import Iterator, Sequence
from math import exp, inf, isfinite, nan
from typing import TypeVar

from dipole.benchmarks.claims.judge import JudgedClaim, JudgedComparison, JudgedPart
from dipole.benchmarks.claims.verdicts import (
    AGREES,
    DIFFERS,
    NO_ROOM,
    NOT_DECIDABLE,
    NOT_LEARNT,
    OBSTACLES,
    UNDECIDED,
    Evidence,
    decide,
)
from dipole.benchmarks.statistics import LEVEL, number, seeds_needed
from dipole.benchmarks.statistics.differences import Estimate
from dipole.benchmarks.statistics.power import least_shift
from dipole.core.utils.text import counted

ON_BOUND = 1e-3
"""An estimate is on its bound if it is nearer than this share of its standard error."""
WHY_NOT = {
    NO_ROOM: "The printed effect does not fit between our base and the bound of the metric",
    NOT_LEARNT: "Our base is not above the untrained level",
}


def says(judged: JudgedClaim) -> str:
    """Return the kind and the bound of every part."""
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
    if (verdict := claim.verdict) in OBSTACLES and found.obstacle != verdict:
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
    """Return the value of a comparison with its 95 % interval."""
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
    if judged.verdict == NOT_DECIDABLE:
        return judged.not_decidable
    if not judged.claim.tests:
        return judged.claim.not_tested
    found, verdict = deciding(judged), judged.verdict
    if found is None:
        return ""
    if verdict == AGREES and len(judged.items) > 1:
        return f"weakest {in_words(found)}"
    if verdict in (AGREES, DIFFERS):
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
    return decide(evidence, evidence.p) == UNDECIDED


def _is_on_bound(part: JudgedPart, item: JudgedComparison) -> bool:
    if part.part.spec.is_spread:
        sides = [sorted((one.summary.std, other.summary.std)) for one, other in item.comparison.pairs]
        return all(large - small <= ON_BOUND * large for small, large in sides)
    distances = [abs(item.estimate.value - bound) for bound in item.region if isfinite(bound)]
    return isfinite(item.estimate.error) and min(distances, default=inf) <= ON_BOUND * item.estimate.error


def reach(found: Estimate) -> float:
    """Return the smallest distance from a bound that the seeds show with 80 % power, nan without a spread."""
    return found.error * least_shift(found.df) if isfinite(found.error) else nan
