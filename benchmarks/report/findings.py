"""The opening sentences of a report: significant differences, verdicts on claims, and the machines."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite, isnan
from statistics import fmean

from dipole.benchmarks.claims.judge import JudgedClaim, why
from dipole.benchmarks.claims.verdicts import AGREES, DIFFERS, NOT_COMPARED, NOT_DECIDABLE, OBSTACLES, UNDECIDED
from dipole.benchmarks.report.chart import first_of
from dipole.benchmarks.report.ranking import ranks
from dipole.benchmarks.statistics import LEVEL, number, summarize
from dipole.benchmarks.statistics.differences import of_summaries
from dipole.benchmarks.suite_results import CellResult, SuiteResults, numbers
from dipole.core.record import RunRecord
from dipole.core.utils.errors import nearest
from dipole.core.utils.text import are, counted

NAMED = 3
ONE_POINT = 0.01
"""Embeddings with a mean distance D = (1 - cos) / 2 below this are practically one point."""


def of_suite(results: SuiteResults, claims: Sequence[JudgedClaim] = ()) -> list[str]:
    """Return sentences on missing runs, differences from the base, the printed numbers and the paper's claims."""
    said, asked = [], len(results.jobs)
    if missing := asked - sum(r.status == "done" for r in results.records.values()):
        failed = sum(r.status == "failed" for r in results.records.values())
        of_failed = f", {failed} of them failed" if failed else ""
        said.append(f"{missing} of {counted(asked, 'run')} {are(missing)} missing{of_failed}.")
    said += of_differences(results)
    if results.manifest.not_decidable:
        return said
    return [*said, *_with_printed(results), *_of_claims(claims)]


def of_differences(results: SuiteResults) -> list[str]:
    """Return sentences on the differences from the base and on a study's gains over all columns."""
    if results.manifest.not_decidable:
        return [of_mark(results.manifest.not_decidable)]
    return [*_against_base(results), *_over_columns(results)]


def of_mark(reason: str) -> str:
    """Return the sentence on a suite that cannot decide anything."""
    return f"{NOT_DECIDABLE.capitalize()}: {reason.rstrip('.')}."


def decided(results: SuiteResults) -> list[CellResult]:
    """Return the tested cells whose difference is significant among all tests of the suite (Holm)."""
    return [c for c in results.tested if c.p_holm < LEVEL]


def of_learning(results: SuiteResults) -> list[str]:
    """Return warnings: runs whose embeddings lie at one point, and runs not above a measured untrained encoder."""
    trained = [r for r in results.records.values() if r.status == "done" and r.objective != "none"]
    at_a_point = {r.hash for r in trained if (d := r.diagnostics.get("mean_distance")) is not None and d < ONE_POINT}
    said = []
    if at_a_point:
        pairs = dict.fromkeys((cell.row, job.hash) for job in results.jobs for cell in job.cells)
        of_rows = Counter(row for row, run in pairs if run in at_a_point)
        named = [f"{count} of {row}" for row, count in of_rows.most_common()]
        said.append(
            f"{len(at_a_point)} of {counted(len(trained), 'run')} ended with all embeddings near one point (mean "
            f"distance below {ONE_POINT:g}): {first_of(named, NAMED)}. Their numbers say little about the objectives."
        )
    for column in results.manifest.columns:
        gains = []
        for row in [row for row in results.rows if row.objective != "none"]:
            metric = column.metric_of(row)
            for record in results.runs_of(row.label, column.name):
                ours, start = record.results.get(metric), record.results.get(f"untrained/{metric}")
                if ours is not None and start is not None:
                    gains.append(column.sign * (ours - start))
        if gains and (below := sum(gain <= 0 for gain in gains)):
            said.append(f"{column.name}: {below} of {counted(len(gains), 'run')} not above the untrained encoder.")
    return said


def empty_columns(results: SuiteResults) -> list[str]:
    """Return a line for each column without numbers: a misspelled name, or a probe that was not run."""
    lines = []
    for column in results.manifest.columns:
        finished = [record for row in results.rows for record in results.runs_of(row.label, column.name)]
        if finished and not any(results.samples(row.label, column.name) for row in results.rows):
            known = sorted({name for record in finished for name in numbers(record)})
            asked = list(dict.fromkeys(column.metric_of(row) for row in results.rows))
            lines.append(
                f"Column {column.name!r} is empty: its finished runs hold no number "
                f"{' or '.join(map(repr, asked))}.{nearest(asked[0], known)} They hold: {', '.join(known)}."
            )
    return lines


def of_others(groups: Mapping[str, Sequence[RunRecord]]) -> list[str]:
    """Return, by task of runs outside suites, the objective with the largest first result, and its significance."""
    found = []
    for task, records in groups.items():
        name = next((name for record in records for name, value in record.results.items() if value is not None), None)
        by: dict[str, list[float]] = {}
        for record in records:
            if name is not None and (value := record.results.get(name)) is not None:
                by.setdefault(record.objective, []).append(value)
        if len(by) < 2:
            continue
        (best, top), (second, next_) = sorted(by.items(), key=lambda item: -fmean(item[1]))[:2]
        test = of_summaries(summarize(top), summarize(next_))
        said = f"{task}: {best} has the largest {name}, {number(fmean(top))}, {number(test.value)} above {second}"
        if min(len(top), len(next_)) < 2:
            found.append(f"{said}. One run of an objective allows no test.")
            continue
        if isnan(test.p):
            found.append(f"{said}. Runs of an objective gave the same, which allows no test.")
            continue
        verdict = "significant" if test.p < LEVEL else "not significant"
        found.append(f"{said}: {verdict} (Welch, p = {test.p:.2g}, {len(top)} and {counted(len(next_), 'run')}).")
    return found


def of_machines(records: Iterable[RunRecord]) -> str:
    devices: Counter[str] = Counter()
    versions: dict[str, set[str]] = {}
    for record in records:
        devices[f"{record.hardware.device_name} ({record.hardware.machine})"] += 1
        for name, version in record.versions.items():
            versions.setdefault(name, set()).add(version)
    if not devices:
        return ""
    names = list(devices)
    if len(devices) > 1:
        names = [f"{name}: {counted(n, 'run')}" for name, n in devices.most_common()]
    parts = [f"Measured on {first_of(names, NAMED)}"]
    if versions:
        ordered = sorted(versions, key=lambda name: (name != "dipole", name))
        parts.append("with " + ", ".join(f"{name} {' and '.join(sorted(versions[name]))}" for name in ordered))
    return ", ".join(parts) + "."


def _against_base(results: SuiteResults) -> list[str]:
    among, found = results.tested, decided(results)
    if not among:
        seeds = [c.against_base.n for c in results.cells if c.against_base is not None]
        if not seeds:
            return []
        if max(seeds) > 1:
            return ["All seeds of a row gave the same, which allows no test."]
        return ["One seed of a row allows no test. Two seeds would give intervals."]
    bases = list(dict.fromkeys(c.base for c in among))
    base, own_base, several = bases[0], bases[0], len(bases) > 1
    if several:
        base, own_base = "their bases", "its base"
    if found:
        named = [_leads(c, several) for c in sorted(found, key=lambda c: (c.row.objective == "none", -abs(_lead(c))))]
        count = f"{len(found)} of {counted(len(among), 'difference')} from {base} {are(len(found))} significant"
        return [f"{count}: {first_of(named, NAMED)}."]
    best = max(among, key=_lead)
    count, largest = f"None of the {len(among)} differences from {base} is significant", ". The largest gain"
    if len(among) == 1:
        count, largest = f"The difference from {base} is not significant", ""
    said = [f"{count}. No row leads {own_base}."]
    if _lead(best) > 0:
        said = [f"{count}{largest}: {_leads(best, several)}."]
    if excluded := sum(bool(c.why_not_significant) for c in among):
        said.append(
            f"The 95 % interval of {counted(excluded, 'difference')} excludes 0. Over {counted(len(among), 'test')} "
            "Holm's correction leaves none of them significant."
        )
    return [*said, *_reach(results)]


def _reach(results: SuiteResults) -> list[str]:
    """Return the smallest differences that the seeds can show, and the percentages that have no room for it."""
    shown, beyond = [], []
    for column in results.manifest.columns:
        least, name = results.detectable(column.name), column.name
        if column.unit == "%" and least > 100:
            beyond.append(name)
        elif isfinite(least):
            shown.append(f"{number(least)} {column.unit.replace('%', 'points')}".strip() + f" ({name})")
    said = []
    if shown:
        said.append(f"With these seeds, smaller differences than these would be missed: {first_of(shown, NAMED)}.")
    if beyond:
        said.append(f"Only a difference above 100 points would show in {first_of(beyond, NAMED)}.")
    return said or ["Every value is that of the base, so the detectable difference is unknown."]


def _over_columns(results: SuiteResults) -> list[str]:
    """Gains of a study over all columns that are significant among its rows and among the tests of its cells."""
    if results.manifest.kind != "study" or len(results.columns) < 2:
        return []
    gains = [(rank.label, rank.gain) for rank in ranks(results) if rank.gain is not None and rank.has_gain]
    named, untrained = [], {row.label for row in results.manifest.rows if row.objective == "none"}
    for label, gain in sorted(gains, key=lambda each: (each[0] in untrained, each[1].p)):
        verb, interval = "loses", f"{number(100 * gain.low)} to {number(100 * gain.high)}"
        if gain.value > 0:
            verb = "gains"
        named.append(f"{label} {verb} {number(100 * abs(gain.value))} % ({interval})")
    if not named:
        return []
    return [f"Over all columns together, in units of the mean of {results.base}: {first_of(named, NAMED)}."]


def _lead(cell: CellResult) -> float:
    """By which share of its mean a cell is better than the base. Shares make columns comparable."""
    assert cell.against_base is not None
    assert cell.summary is not None
    return cell.column.sign * cell.against_base.difference / (abs(cell.summary.mean) or 1.0)


def _leads(cell: CellResult, names_base: bool = False) -> str:
    assert cell.against_base is not None
    verb, base = "trails", ""
    if _lead(cell) > 0:
        verb = "leads"
    if names_base:
        base = cell.base
    unit = cell.column.unit.replace("%", "points")
    words = [cell.row.label, verb, base, "by", number(abs(cell.against_base.difference)), unit, f"({cell.column.name})"]
    return " ".join(filter(None, words))


def _with_printed(results: SuiteResults) -> Sequence[str]:
    verdicts = Counter(cell.comparison.verdict for cell in results.cells if cell.comparison is not None)
    if not verdicts:
        return []
    words = {AGREES: "agree", DIFFERS: "differ", NOT_COMPARED: "by another protocol"}
    counts = ", ".join(f"{n} {words.get(verdict, verdict)}" for verdict, n in verdicts.most_common())
    return [f"Compared with the {counted(verdicts.total(), 'printed number')}: {counts}."]


def _of_claims(judged: Sequence[JudgedClaim]) -> Sequence[str]:
    """How many claims agree, differ and are undecided, and the first of those with a verdict."""
    found = [each for each in judged if each.items]
    if not found:
        return []
    counts = Counter(each.verdict for each in found)
    claims, protocol = "claim", ""
    if len(found) > 1:
        claims = f"{len(found)} claims"
    if not all(each.is_paper_protocol for each in found):
        protocol = f" ({NOT_COMPARED} than its own)"
    verdicts = f"{counts[AGREES]} shown to agree, {counts[DIFFERS]} to differ, {counts[UNDECIDED]} undecided"
    verdicts += "".join(f", {counts[each]} {each}" for each in OBSTACLES if counts[each])
    summary = f"Of the paper's {claims} on it{protocol}: {verdicts}"
    if named := [f"{c.claim.id} {c.verdict}, {why(c)}" for c in found if c.verdict in (AGREES, DIFFERS)]:
        summary += f": {first_of(named, NAMED)}"
    return [f"{summary}."]
