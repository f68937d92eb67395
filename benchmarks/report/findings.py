"""The opening of a report: sentences on differences, claims and machines, and of many suites a table of them."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite, isnan
from statistics import fmean, median, median_high

from dipole.benchmarks.claims import published
from dipole.benchmarks.claims.judge import JudgedClaim, why
from dipole.benchmarks.claims.verdicts import AGREES, DIFFERS, NOT_COMPARED, NOT_DECIDABLE, OBSTACLES, UNDECIDED
from dipole.benchmarks.manifest import EFFECTS
from dipole.benchmarks.report.chart import first_of
from dipole.benchmarks.report.ranking import ranks
from dipole.benchmarks.report.table import EMPTY, NOTES, Cell, ReportTable, number_cell
from dipole.benchmarks.report.tables import mark_of
from dipole.benchmarks.statistics import LEVEL, PairedTest, number, power, seeds_needed, summarize
from dipole.benchmarks.statistics.differences import of_summaries
from dipole.benchmarks.suite_results import CellResult, SuiteResults, base_of, numbers
from dipole.core.record import RunRecord
from dipole.core.utils.errors import nearest
from dipole.core.utils.text import are, counted

NAMED = 3
ONE_POINT = 0.01  # embeddings with a mean distance D = (1 - cos) / 2 below this are practically one point
FEW = 5  # Suites whose findings are read as sentences. Of more there is a table.
MOST_SEEDS = 10_000
Claims = Mapping[str, Sequence[JudgedClaim]]  # the claims on each suite, by its name


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


def of_others(groups: Mapping[str, Mapping[str, Sequence[RunRecord]]]) -> list[str]:
    """Return, by task of runs outside suites, the objective with the largest first result, and its significance."""
    found = []
    for task, by in groups.items():
        every = [record.results for records in by.values() for record in records]
        name = next((name for results in every for name, value in results.items() if value is not None), "")
        known = {}
        for objective, records in by.items():
            if values := [value for record in records if (value := record.results.get(name)) is not None]:
                known[objective] = values
        if len(known) < 2:
            continue
        (best, top), (second, next_) = sorted(known.items(), key=lambda item: -fmean(item[1]))[:2]
        test = of_summaries(summarize(top), summarize(next_))
        said = f"{task}: {best} has the largest {name}, {number(fmean(top))}, {number(test.value)} above {second}"
        verdict = "significant" if test.p < LEVEL else "not significant"
        tested = f": {verdict} (Welch, p = {test.p:.2g}, {len(top)} and {counted(len(next_), 'run')})."
        if min(len(top), len(next_)) < 2:
            tested = ". One run of an objective allows no test."
        elif isnan(test.p):
            tested = ". Runs of an objective gave the same, which allows no test."
        found.append(said + tested)
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


def by_paper(suite: SuiteResults) -> tuple[bool, int, int, list[int], str]:
    """Sort studies first, then the suites of each paper: tables, figures and others, each by number."""
    manifest = suite.manifest
    of = manifest.published or manifest.suite
    names = list(dict.fromkeys((*published.PAPERS, *(table.paper for table in published.tables().values()))))
    place = next((i for i, name in enumerate(names) if of.startswith(f"{name}-")), -1)
    kind = next((i for i, word in enumerate(("-table", "-figure")) if word in of), 2)
    numbers = [int(part) for part in re.findall(r"\d+", of)]
    return place >= 0 or manifest.kind != "study", place, kind, numbers, manifest.name


def suites_table(suites: Sequence[SuiteResults], claims: Claims) -> ReportTable:
    """Return a row for each suite: its question, the answer, how many more seeds are needed, and verdicts on claims."""
    rows = []
    for suite in suites:
        done = sum(record.status == "done" for record in suite.records.values())
        name = Cell(suite.manifest.title, link=suite.manifest.name)
        if done < len(suite.jobs):
            name = replace(name, sub=f"{done} of {counted(len(suite.jobs), 'run')} finished")
        said = of_differences(suite) or of_suite(suite, claims[suite.manifest.name])
        answer = Cell(" ".join(said) or "No row is tested against another.")
        tests, verdicts = planned(suite), _verdicts(_counted_claims(suite, claims))
        rows.append((name, Cell(question(suite)), answer, power_cell(tests), more_seeds(tests), verdicts))
    effect = "effect"
    if any(suite.table for suite in suites):
        effect = "effect_of_papers"
    note = f"{NOTES['power']} {NOTES[effect]}"
    if any(suite.manifest.not_decidable for suite in suites):
        note += f" Suites that are {NOT_DECIDABLE} are listed with the reason, and counted nowhere."
    head = ("suite", "question", "answer", "power", "more seeds needed", "claims")
    return ReportTable("overview", "Every suite", head, rows, note).without_empty_columns()


def question(suite: SuiteResults) -> str:
    rows = [row for row in suite.rows if row.base]
    bases = list(dict.fromkeys(row.base for row in rows))
    where = counted(len(suite.columns), "measurement")
    if not rows and (
        compared := [column for column in suite.manifest.columns if column.base not in (None, column.name)]
    ):
        who = suite.rows[0].label if len(suite.rows) == 1 else counted(len(suite.rows), "method")
        where = counted(len(compared), "measurement")
        return f"How far {are(len(suite.rows))} {who} on {where} from {compared[0].base}?"
    if len(suite.rows) == 1:
        return f"What does {suite.rows[0].label} reach on {where}?"
    if not rows:
        return f"How do {counted(len(suite.rows), 'method')} compare on {where}?"
    if len(rows) == 1:
        return f"Does {rows[0].label} differ from {bases[0]} on {where}?"
    base = bases[0] if len(bases) == 1 else "their bases"
    return f"Do {len(rows)} methods differ from {base} on {where}?"


@dataclass(frozen=True)
class Planned:
    """A test against the base and the effect that it should show."""

    effect: float
    words: str
    test: PairedTest
    alpha: float  # at the first step of Holm's correction


def planned(suite: SuiteResults) -> list[Planned]:
    """Return the tests of a suite with the median effect that its paper prints, or else with a stated one."""
    cells = suite.tested
    printed = [gap for cell in cells if (gap := _printed_gap(suite, cell)) is not None]
    if not printed:  # units without an effect of their own count where there are no others
        cells = [cell for cell in cells if cell.column.unit in EFFECTS] or cells
    found = []
    for cell in cells:
        test, unit = cell.against_base, cell.column.unit
        if test is None or cell.summary is None:
            continue
        effect, words = cell.column.effect(cell.summary.mean - test.difference)
        if printed:
            effect = median(printed)
            words = f"the paper's median effect, {number(effect)} {unit.replace('%', 'points')}".strip()
        if test.spread > 0 and effect > 0:
            found.append(Planned(effect, words, test, LEVEL / cell.family))
    return found


def more_seeds(tests: Sequence[Planned]) -> Cell:
    """Return how many more seeds show the effect in half of a suite's tests."""
    if not tests:
        return EMPTY
    missing = []
    for each in tests:
        paired = each.test.method != "Welch"
        seeds = seeds_needed(each.effect, each.test.spread, alpha=each.alpha, is_paired=paired, limit=MOST_SEEDS)
        missing.append(max(0, (seeds or MOST_SEEDS) - each.test.n))
    more = median_high(missing)
    text = "none" if more == 0 else str(more)
    if more >= MOST_SEEDS // 2:
        text = "thousands"
    return Cell(text, more, f"for {_effects(tests)}")


def power_cell(tests: Sequence[Planned]) -> Cell:
    """Return the power of half of a suite's tests."""
    if not tests:
        return EMPTY
    shown = []
    for each in tests:
        test = each.test
        shown.append(power(each.effect, test.spread, test.n, each.alpha, test.method != "Welch", test.larger))
    value = median(shown)
    return Cell(f"{100 * value:.0f} %", value)


def of_power(tests: Sequence[Planned]) -> list[str]:
    """Return a sentence on the power of a suite's tests, or [] without one."""
    if not tests:
        return []
    return [f"Half of the tests have a power of at least {power_cell(tests).text} for {_effects(tests)} (Holm)."]


def _effects(tests: Sequence[Planned]) -> str:
    return " and ".join(dict.fromkeys(each.words for each in tests))


def _printed_gap(suite: SuiteResults, cell: CellResult) -> float | None:
    """Return the size of the printed difference from the base, or None if it is 0 or not printed."""
    base = suite.cell(*base_of(cell.row, cell.column))
    sides = (cell.printed, getattr(base, "printed", None))
    means = [side.mean for side in sides if side is not None and side.mean is not None]
    if len(means) < 2:
        return None
    return abs(means[0] - means[1]) or None


def _verdicts(claims: Iterable[JudgedClaim]) -> Cell:
    verdicts = Counter(each.verdict for each in claims)
    if not verdicts:
        return EMPTY
    counts = {"agree": verdicts[AGREES], "differ": verdicts[DIFFERS], "undecided": verdicts[UNDECIDED]}
    counts["without room"] = sum(verdicts[each] for each in OBSTACLES)
    return Cell(", ".join(f"{count} {what}" for what, count in counts.items() if count))


def decided_table(suites: Sequence[SuiteResults], claims: Claims) -> ReportTable:
    """Return the claims with a verdict on our numbers, contradicted ones first."""
    found = [(claimed, suite) for claimed, suite in _each_once(suites, claims) if claimed.verdict in (AGREES, DIFFERS)]
    rows = []
    for claimed, suite in sorted(found, key=lambda one: one[0].verdict != DIFFERS):
        claim, link = claimed.claim, Cell(suite.manifest.title, link=suite.manifest.name)
        verdict = Cell(claimed.full_verdict, sub=why(claimed), mark=mark_of(claimed.verdict))
        about = Cell(claim.statement, sub=claim.id), Cell(claim.where, sub=claim.paper)
        rows.append((*about, verdict, number_cell(claimed.p_holm), link))
    head = ("claim", "where", "verdict", "p (Holm)", "suite")
    return ReportTable("decided", "Claims with a verdict", head, rows, NOTES["decided"])


def _each_once(suites: Sequence[SuiteResults], claims: Claims) -> list[tuple[JudgedClaim, SuiteResults]]:
    """Return each claim once, with the suite in which its p (Holm) is smallest."""
    found: dict[str, tuple[JudgedClaim, SuiteResults]] = {}
    for suite in suites:
        for each in _counted_claims(suite, claims):
            name = each.claim.id
            if name not in found or not found[name][0].p_holm <= each.p_holm:
                found[name] = each, suite
    return list(found.values())


def _counted_claims(suite: SuiteResults, claims: Claims) -> list[JudgedClaim]:
    """Return the claims with numbers of ours, none of a suite that cannot decide anything."""
    if suite.manifest.not_decidable:
        return []
    return [each for each in claims[suite.manifest.name] if each.items]


def in_a_sentence(suites: Sequence[SuiteResults], claims: Claims) -> str:
    """Return in one sentence how many differences are significant and how many claims have a verdict."""
    tested, found = sum(len(s.tested) for s in suites), sum(len(decided(s)) for s in suites)
    verdicts = Counter(claimed.verdict for claimed, _ in _each_once(suites, claims))
    differences = counted(tested, "comparison")
    unfit = sum(bool(suite.manifest.not_decidable) for suite in suites)
    can_decide = counted(len(suites) - unfit, "suite")
    said = f"{can_decide}: {found} of {differences} with the baseline {are(found)} significant"
    if verdicts:
        said += (
            f". Of {counted(verdicts.total(), 'claim')} of the papers our numbers support {verdicts[AGREES]} and "
            f"contradict {verdicts[DIFFERS]}. {verdicts[UNDECIDED]} {are(verdicts[UNDECIDED])} undecided"
        )
    if without_room := sum(verdicts[each] for each in OBSTACLES):
        said += f". {without_room} cannot be tested: our baseline is too high for the printed effect, or has not learnt"
    if unfit:
        said += f". {counted(unfit, 'further suite')} {are(unfit)} {NOT_DECIDABLE} and not counted"
    return f"{said}."
