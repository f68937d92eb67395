"""Sections of the report about searches (`dipole sweep`): trials spent, what mattered, the winner on both parts."""

from collections import Counter
from collections.abc import Mapping
from statistics import fmean, stdev

from dipole.benchmarks.report.chart import Picture, pictured
from dipole.benchmarks.report.chart_types import scatter_chart
from dipole.benchmarks.report.table import EMPTY, Cell, ReportTable
from dipole.benchmarks.sweep.study import SearchSummary, TrialLine
from dipole.core.record import RunRecord
from dipole.core.utils.text import counted


def search_tables(search: SearchSummary, records: Mapping[str, RunRecord]) -> list[ReportTable]:
    """Return the winner on both parts, the importance of the keys, and every trial."""
    found = [_winner(search, records)]
    if search.importance:
        rows = [(Cell(key), Cell(f"{100 * share:.0f}", share)) for key, share in search.importance.items()]
        note = "How much each key separates the best trials from the others (PED-ANOVA)."
        head = ("key", "share (%)")
        found.append(ReportTable(f"{search.name}-importance", "What mattered", head, rows, note, frozenset({"key"})))
    return [*found, _trials(search)]


def spent(search: SearchSummary) -> str:
    states = Counter(trial.state for trial in search.trials)
    ended = ", ".join(f"{count} {state}" for state, count in states.items())
    trials = counted(len(search.trials), "trial")
    return f"{search.recipe}: {trials} ({ended or 'none begun'}), compared by {search.metric}"


def notes(search: SearchSummary) -> list[str]:
    return [
        "Trials are measured on a validation part of the training data. The winner's value there is the best of many "
        "and so too optimistic. The result is its seeds on the test part, which no trial has seen.",
        f"Space: {', '.join(search.space)}.",
    ]


def _winner(search: SearchSummary, records: Mapping[str, RunRecord]) -> ReportTable:
    best = next((trial for trial in search.trials if trial.number == search.best), None)
    seeds = [records[run].results.get(search.metric) for run in search.winner if run in records]
    tested = [value for value in seeds if value is not None]
    rows = []
    if best is not None:
        value = Cell(_number(best.value), best.value)
        rows.append((Cell("validation"), value, Cell(f"trial {best.number}"), _values(best)))
    if tested:
        spread, many = "", "one seed"
        if len(tested) > 1:
            spread, many = f"+- {stdev(tested):.3g}", f"{len(tested)} seeds"
        rows.append((Cell("test"), Cell(_number(fmean(tested)), fmean(tested), spread), Cell(many), EMPTY))
    return ReportTable(f"{search.name}-winner", "The winner", ("part", search.metric, "of", "values"), rows)


def _trials(search: SearchSummary) -> ReportTable:
    sign = -1 if search.maximize else 1
    ordered = sorted(search.trials, key=lambda each: (each.value is None, sign * (each.value or 0.0), each.number))
    rows = [
        (
            Cell(str(trial.number), trial.number),
            Cell(trial.state),
            Cell(_number(trial.value), trial.value, mark="best" if trial.number == search.best else ""),
            _values(trial),
            Cell(trial.run),
        )
        for trial in ordered
    ]
    head = ("trial", "state", search.metric, "values", "run")
    return ReportTable(f"{search.name}-trials", "Trials", head, rows, "", frozenset({"run"}), is_folded=True)


def _values(trial: TrialLine) -> Cell:
    return Cell(", ".join(f"{key}={_number(value)}" for key, value in trial.values.items()))


def _number(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)


def slices(search: SearchSummary) -> list[Picture]:
    """Draw the metric over each numeric key, and over the trials in order."""
    done = [trial for trial in search.trials if trial.value is not None]
    places = [(f"{search.metric} by trial", "trial", {trial.number: float(trial.number) for trial in done})]
    for text in reversed(search.space):
        key, _, how = text.partition("=")
        label = key
        if how.startswith("log"):
            label += " (searched in its logarithm)"
        values = {trial.number: trial.values.get(key) for trial in done}
        numbers = {n: float(v) for n, v in values.items() if isinstance(v, int | float) and not isinstance(v, bool)}
        places.insert(0, (f"{search.metric} over {key}", label, numbers))
    found = []
    for title, label, at in places:
        points = [(at[trial.number], float(trial.value or 0.0)) for trial in done if trial.number in at]
        if len({x for x, _ in points}) > 1:
            chart = scatter_chart(title, label, search.metric, {"trials": points}, is_equal=False)
            found += pictured(chart, f"{title}, on the validation part.")
    return found
