"""The opening sentences of a report: significant differences, verdicts on claims, and the machines."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from statistics import fmean, stdev

from dipole.benchmarks.claims.verdicts import AGREES, DIFFERS, NOT_COMPARED, UNDECIDED
from dipole.benchmarks.manifest import ColumnEntry, RowEntry
from dipole.benchmarks.report.ranking import LEVEL
from dipole.benchmarks.report.results import CellResult, SuiteResults
from dipole.benchmarks.report.table import number
from dipole.benchmarks.statistics import welch
from dipole.core.record import RunRecord
from dipole.core.utils.text import are, counted

NAMED = 3
ONE_POINT = 0.01
"""Mean distance D = (1 - cos) / 2 of the embeddings of a run, below which they lie at one point for all purposes."""


def of_suite(results: SuiteResults, others: Iterable[SuiteResults] = ()) -> list[str]:
    """One sentence each on the differences from the base, the printed numbers and the paper's claims.

    Missing runs come first.
    """
    done, asked = sum(r.status == "done" for r in results.records.values()), len(results.jobs)
    missing = [f"{asked - done} of {counted(asked, 'run')} {are(asked - done)} missing."] if done < asked else []
    return [*missing, *of_differences(results), *_with_printed(results), *_of_claims(results, others)]


def of_differences(results: SuiteResults) -> list[str]:
    """One sentence each on the differences from the base and, of a study, on the gains over all columns."""
    return [*_against_base(results), *_over_columns(results)]


def tested(results: SuiteResults) -> list[CellResult]:
    """Cells whose difference from the base is tested: of two seeds or more."""
    return [c for c in results.cells if c.against_base is not None and c.against_base.n > 1]


def decided(results: SuiteResults) -> list[CellResult]:
    """Return the tested cells whose difference is significant among all tests of the suite (Holm)."""
    return [c for c in tested(results) if isfinite(c.p_holm) and c.p_holm < LEVEL]


def of_learning(results: SuiteResults) -> list[str]:
    """Return warnings: runs whose embeddings lie at one point, and runs that are not above the untrained encoder.

    The second where the suite measured the untrained encoder too.
    """
    trained = [r for r in results.records.values() if r.status == "done" and r.objective != "none"]
    at_a_point = {r.hash for r in trained if (d := r.diagnostics.get("mean_distance")) is not None and d < ONE_POINT}
    said = []
    if at_a_point:
        of_rows = {row: len(at_a_point & hashes) for row, hashes in results.runs_by_row.items() if at_a_point & hashes}
        named = [f"{count} of {row}" for row, count in sorted(of_rows.items(), key=lambda each: -each[1])]
        said.append(
            f"{len(at_a_point)} of {counted(len(trained), 'run')} ended with all embeddings near one point (mean "
            f"distance below {ONE_POINT:g}): {', '.join(named[:NAMED])}{' and others' if len(named) > NAMED else ''}. "
            "Their numbers say little about the objectives."
        )
    for column in results.manifest.columns:
        gains = [gain for row in results.rows for gain in _over_untrained(results, row, column)]
        if gains and (below := sum(gain <= 0 for gain in gains)):
            said.append(f"{column.name}: {below} of {counted(len(gains), 'run')} not above the untrained encoder.")
    return said


def _over_untrained(results: SuiteResults, row: RowEntry, column: ColumnEntry) -> list[float]:
    metric = column.metric_of(row)
    pairs = [
        (r.results.get(metric), r.results.get(f"untrained/{metric}")) for r in results.runs_of(row.label, column.name)
    ]
    sign = 1 if column.higher_is_better else -1
    return [sign * (ours - start) for ours, start in pairs if ours is not None and start is not None]


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
        ahead = fmean(top) - fmean(next_)
        said = f"{task}: {best} has the largest {name}, {number(fmean(top))}, {number(ahead)} above {second}"
        if min(len(top), len(next_)) < 2:
            found.append(f"{said}; one run each is no test.")
            continue
        test = welch(fmean(top), stdev(top), len(top), fmean(next_), stdev(next_), len(next_))
        is_told = isfinite(test.p) and test.p < LEVEL and ahead > 0 and stdev([*top, *next_]) > 0
        verdict = "a difference" if is_told else "no difference that can be decided"
        found.append(f"{said}: {verdict} (Welch, p = {test.p:.2g}, {len(top)} and {counted(len(next_), 'run')}).")
    return found


def of_machines(records: Iterable[RunRecord]) -> str:
    """Return the machines of runs and the versions of libraries."""
    devices: Counter[str] = Counter()
    versions: dict[str, set[str]] = {}
    for record in records:
        devices[f"{record.hardware.device_name} ({record.hardware.machine})"] += 1
        for name, version in record.versions.items():
            versions.setdefault(name, set()).add(version)
    if not devices:
        return ""
    several = len(devices) > 1
    where = ", ".join(f"{name}: {counted(n, 'run')}" if several else name for name, n in devices.most_common(NAMED))
    more = f" and {len(devices) - NAMED} more" if len(devices) > NAMED else ""
    used = ", ".join(f"{name} {' and '.join(sorted(found))}" for name, found in sorted(versions.items(), key=_dipole))
    return f"Measured on {where}{more}; with {used}." if used else f"Measured on {where}{more}."


def _dipole(item: tuple[str, set[str]]) -> tuple[bool, str]:
    return item[0] != "dipole", item[0]


def _against_base(results: SuiteResults) -> list[str]:
    among, found = tested(results), decided(results)
    if not among:
        has_base = any(c.against_base is not None for c in results.cells)
        return ["One seed each: no difference can be tested; two would give intervals."] if has_base else []
    bases = list(dict.fromkeys(c.row.base for c in among))
    several = len(bases) > 1
    base = "their bases" if several else bases[0]
    if found:
        named = [_leads(c, several) for c in sorted(found, key=lambda c: -abs(_relative(c)))]
        count = f"{len(found)} of {counted(len(among), 'difference')} from {base} {are(len(found))} decided"
        return [f"{count}: {_first(named)}."]
    best = max(among, key=_lead)
    count = f"No difference of the {len(among)} from {base} can be decided"
    if len(among) == 1:
        count = f"The difference from {base} cannot be decided"
    if _lead(best) <= 0:
        return [f"{count}; no row leads {'its own' if several else base}."]
    seeds = f", {best.seeds_needed} seeds would show it" if best.seeds_needed else ""
    return [f"{count}; {_leads(best, several)}{seeds}."]


def _first(names: Sequence[str], separator: str = ", ") -> str:
    """The first of several findings, and how many more there are."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return separator.join(names[:NAMED]) + more


def _over_columns(results: SuiteResults) -> list[str]:
    """Gains of a study over all columns that are significant among its rows and among the tests of its cells."""
    if results.manifest.kind != "study" or len(results.columns) < 2:
        return []
    gains = [(rank.label, rank.gain) for rank in results.ranks() if rank.gain is not None and isfinite(rank.gain.p)]
    tests = sum(isfinite(cell.p_holm) for cell in results.cells) + len(gains)
    named = []
    for label, gain in sorted(gains, key=lambda each: each[1].p):
        if tests * gain.p < LEVEL:
            verb = "gains" if gain.value > 0 else "loses"
            interval = f"{number(100 * gain.low)} to {number(100 * gain.high)}"
            named.append(f"{label} {verb} {number(100 * abs(gain.value))} % ({interval})")
    if not named:
        return []
    return [f"Over all columns together, in units of the mean of {results.base}: {_first(named)}."]


def _lead(cell: CellResult) -> float:
    """By which share of its mean a cell is better than the base: columns have units of their own."""
    return _relative(cell) if cell.column.higher_is_better else -_relative(cell)


def _relative(cell: CellResult) -> float:
    level = abs(cell.summary.mean) if cell.summary else 0.0
    return _difference(cell) / (level or 1.0)


def _difference(cell: CellResult) -> float:
    return cell.against_base.difference if cell.against_base is not None else 0.0


def _leads(cell: CellResult, names_base: bool = False) -> str:
    words = [cell.row.label, "leads" if _lead(cell) > 0 else "trails"]
    if names_base:
        words.append(str(cell.row.base))
    words += ["by", number(abs(_difference(cell)))]
    if cell.column.unit:
        words.append("points" if cell.column.unit == "%" else cell.column.unit)
    return " ".join([*words, f"({cell.column.name})"])


def _with_printed(results: SuiteResults) -> Sequence[str]:
    verdicts = Counter(cell.comparison.verdict for cell in results.cells if cell.comparison is not None)
    if not verdicts:
        return []
    words = {AGREES: "agree", DIFFERS: "differ", NOT_COMPARED: "by another protocol"}
    counts = ", ".join(f"{n} {words.get(verdict, verdict)}" for verdict, n in verdicts.most_common())
    return [f"Compared with the {counted(verdicts.total(), 'printed number')}: {counts}."]


def _of_claims(results: SuiteResults, others: Iterable[SuiteResults]) -> Sequence[str]:
    """How many claims agree, differ and are undecided, and the first of those with a verdict."""
    found = [each for each in results.claims(others) if each.ours.items]
    if not found:
        return []
    counts = Counter(each.verdict_alone for each in found)
    claims = "claim" if len(found) == 1 else f"{len(found)} claims"
    protocol = "" if all(each.is_paper_protocol for each in found) else f" ({NOT_COMPARED} than its own)"
    summary = (
        f"Of the paper's {claims} on it{protocol}: {counts[AGREES]} shown to agree, {counts[DIFFERS]} to differ, "
        f"{counts[UNDECIDED]} undecided"
    )
    named = []
    for each in found:
        if each.verdict_alone in (AGREES, DIFFERS):
            named.append(f"{each.ours.claim.id} {each.verdict_alone}, {each.why}")
    return [f"{summary}: {_first(named, '; ')}." if named else f"{summary}."]
