"""The overview of a report of many suites: a line for each suite, and the claims with a verdict."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median, median_high

from dipole.benchmarks.claims import published
from dipole.benchmarks.claims.judge import JudgedClaim, why
from dipole.benchmarks.claims.verdicts import AGREES, DIFFERS, NOT_DECIDABLE, OBSTACLES, UNDECIDED
from dipole.benchmarks.manifest import EFFECTS
from dipole.benchmarks.report import findings
from dipole.benchmarks.report.table import EMPTY, Cell, ReportTable, number_cell
from dipole.benchmarks.report.tables import mark_of
from dipole.benchmarks.statistics import LEVEL, PairedTest, number, power, seeds_needed
from dipole.benchmarks.suite_results import CellResult, SuiteResults, base_of
from dipole.core.utils.text import are, counted

FEW = 5
"""Suites whose findings are read as sentences. Of more there is a table."""


def by_paper(suite: SuiteResults) -> tuple[bool, int, int, list[int], str]:
    """Sort studies first, then the suites of each paper: tables, figures and others, each by number."""
    manifest = suite.manifest
    of = manifest.published or manifest.suite
    names = list(dict.fromkeys((*published.PAPERS, *(table.paper for table in published.tables().values()))))
    place = next((i for i, name in enumerate(names) if of.startswith(f"{name}-")), -1)
    kind = next((i for i, word in enumerate(("-table", "-figure")) if word in of), 2)
    numbers = [int(part) for part in re.findall(r"\d+", of)]
    return place >= 0 or manifest.kind != "study", place, kind, numbers, manifest.name


Claims = Mapping[str, Sequence[JudgedClaim]]
"""The claims on each suite, by its name."""


def suites_table(suites: Sequence[SuiteResults], claims: Claims) -> ReportTable:
    """Return a row for each suite: its question, the answer, how many more seeds are needed, and verdicts on claims."""
    rows = []
    for suite in suites:
        done = sum(record.status == "done" for record in suite.records.values())
        name = Cell(suite.manifest.title, link=suite.manifest.name)
        if done < len(suite.jobs):
            name = replace(name, sub=f"{done} of {counted(len(suite.jobs), 'run')} finished")
        said = findings.of_differences(suite) or findings.of_suite(suite, claims[suite.manifest.name])
        answer = Cell(" ".join(said) or "No row is tested against another.")
        verdicts = _verdicts(_counted_claims(suite, claims))
        rows.append((name, Cell(question(suite)), answer, power_cell(suite), more_seeds(suite), verdicts))
    note = (
        "Power: how likely half of the tests against the base show the named effect, among all tests of the suite "
        "(Holm). More seeds needed: so many more per row show it with 80 % power. "
    )
    if any(suite.table for suite in suites):
        note += (
            "The effect is the median difference that the paper prints, and without one a point of 100, 50 of a "
            "return, or a tenth of the base's mean. Claims are the paper's. A claim is without room if its printed "
            "effect does not fit between our base and the bound of the metric, or if our base is not above the "
            "untrained level. "
        )
    else:
        note += "The effect is a point of 100, 50 of a return, or a tenth of the base's mean. "
    if any(suite.manifest.not_decidable for suite in suites):
        note += f"Suites that are {NOT_DECIDABLE} are listed with the reason, and counted nowhere."
    head = ("suite", "question", "answer", "power", "more seeds needed", "claims")
    return ReportTable("overview", "Every suite", head, rows, note.strip()).without_empty_columns()


def question(suite: SuiteResults) -> str:
    """Return what a suite asks, in a sentence."""
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


MOST_SEEDS = 10_000


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


def more_seeds(suite: SuiteResults) -> Cell:
    """Return how many more seeds show the paper's median effect, or a stated one, in half of a suite's tests."""
    tests = planned(suite)
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


def power_cell(suite: SuiteResults) -> Cell:
    """Return the power of half of a suite's tests for the effect of `more_seeds`."""
    tests = planned(suite)
    if not tests:
        return EMPTY
    shown = []
    for each in tests:
        test = each.test
        shown.append(power(each.effect, test.spread, test.n, each.alpha, test.method != "Welch", test.larger))
    value = median(shown)
    return Cell(f"{100 * value:.0f} %", value)


def of_power(suite: SuiteResults) -> list[str]:
    """Return a sentence on the power of a suite's tests, or [] without a stated effect."""
    tests = planned(suite)
    if not tests:
        return []
    return [f"Half of the tests have a power of at least {power_cell(suite).text} for {_effects(tests)} (Holm)."]


def _effects(tests: Sequence[Planned]) -> str:
    return " and ".join(dict.fromkeys(each.words for each in tests))


def _printed_gap(suite: SuiteResults, cell: CellResult) -> float | None:
    """Return the size of the printed difference from the base, or None if it is 0 or not printed."""
    base = suite.cell(*base_of(cell.row, cell.column))
    sides = (cell.printed, base.printed if base else None)
    means = [side.mean for side in sides if side is not None and side.mean is not None]
    if len(means) < 2:
        return None
    return abs(means[0] - means[1]) or None


def _verdicts(claims: Iterable[JudgedClaim]) -> Cell:
    """Return how many claims agree, differ, are undecided and have no room."""
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
    note = (
        "Claims of the papers that our numbers support or contradict. p is corrected by Holm over the claims of the "
        "suite. If our protocol is not the paper's, the verdict names this and holds for our setting only. It does not "
        "mean that the paper's numbers are wrong."
    )
    head = ("claim", "where", "verdict", "p (Holm)", "suite")
    return ReportTable("decided", "Claims with a verdict", head, rows, note)


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
    tested, decided = sum(len(s.tested) for s in suites), sum(len(findings.decided(s)) for s in suites)
    verdicts = Counter(claimed.verdict for claimed, _ in _each_once(suites, claims))
    differences = counted(tested, "comparison")
    unfit = sum(bool(suite.manifest.not_decidable) for suite in suites)
    can_decide = counted(len(suites) - unfit, "suite")
    said = f"{can_decide}: {decided} of {differences} with the baseline {are(decided)} significant"
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
