"""Objectives ranked over tasks: mean rank, wins and losses against a base, probability of improvement, gain."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from dipole.benchmarks.statistics import Interval, holm, iqm_interval, paired, probability_of_improvement

Samples = Mapping[int, float]


@dataclass(frozen=True)
class Rank:
    """One objective over several tasks: mean rank (1 is best), wins and losses against the base, and two aggregates.

    `improvement` is the probability that a run beats a run of the base; `gain` the interquartile mean of the seeds'
    differences from the base's mean, in units of the base's mean: both with stratified bootstrap intervals.
    """

    label: str
    tasks: int
    mean_rank: float
    better: int
    worse: int
    improvement: Interval | None
    gain: Interval | None


def rank_objectives(
    tasks: Mapping[str, Mapping[str, Samples]], base: str | None, lower_is_better: Iterable[str] = ()
) -> list[Rank]:
    """Rank objectives over tasks, best mean rank first.

    Args:
        tasks: task -> objective -> value by seed. An objective is ranked on the tasks it was run on.
        base: the objective the others are compared with.
        lower_is_better: tasks whose values are costs; they enter with the sign turned.
    """
    turned = set(lower_is_better)
    signed = {
        task: {label: {s: -v if task in turned else v for s, v in by.items()} for label, by in rows.items() if by}
        for task, rows in tasks.items()
    }
    labels = dict.fromkeys(label for rows in signed.values() for label in rows)
    ranks: dict[str, list[float]] = defaultdict(list)
    for rows in signed.values():
        means = {label: fmean(by.values()) for label, by in rows.items()}
        for label, mean in means.items():
            above, level = sum(m > mean for m in means.values()), sum(m == mean for m in means.values())
            ranks[label].append(above + (level + 1) / 2)
    found = [_ranked(label, ranks[label], signed, base) for label in labels]
    return sorted(found, key=lambda r: (r.mean_rank, r.label))


def _ranked(label: str, ranks: Sequence[float], tasks: Mapping[str, Mapping[str, Samples]], base: str | None) -> Rank:
    mean_rank = fmean(ranks)
    if base is None or label == base:
        return Rank(label, len(ranks), mean_rank, 0, 0, None, None)
    common = [(rows[label], rows[base]) for rows in tasks.values() if label in rows and base in rows]
    if not common:
        return Rank(label, len(ranks), mean_rank, 0, 0, None, None)
    tests = [paired(theirs, ours) for ours, theirs in common]
    shown = [t for t, p in zip(tests, holm([t.p_t for t in tests]), strict=True) if p < 0.05]
    ours = [list(mine.values()) for mine, _ in common]
    theirs = [list(other.values()) for _, other in common]
    gains = [
        [(value - fmean(other.values())) / abs(fmean(other.values())) for value in mine.values()]
        for mine, other in common
        if fmean(other.values())
    ]
    return Rank(
        label,
        len(ranks),
        mean_rank,
        sum(t.difference > 0 for t in shown),
        sum(t.difference < 0 for t in shown),
        probability_of_improvement(ours, theirs),
        iqm_interval(gains) if gains else None,
    )
