"""What a report of many suites opens with: a line for each suite, and the claims of the papers that are decided."""

from collections import Counter
from collections.abc import Sequence

from dipole.benchmarks.report import findings
from dipole.benchmarks.report.comparison import AGREES, DIFFERS, UNDECIDED
from dipole.benchmarks.report.results import SuiteResults
from dipole.benchmarks.report.table import Cell, ReportTable, number
from dipole.core.ground.text import are, counted

FEW = 5
"""Suites whose findings are read as sentences; of more there is a table."""


def tables(suites: Sequence[SuiteResults]) -> list[ReportTable]:
    """The tables of the overview; those that have a row."""
    return [table for table in (suites_table(suites), decided_table(suites)) if table.rows]


def suites_table(suites: Sequence[SuiteResults]) -> ReportTable:
    """A row for each suite: finished runs, differences from its base that are decided, what leads, and claims."""
    rows = []
    for suite in suites:
        tested, decided = findings.tested(suite), findings.decided(suite)
        verdicts = Counter(each.verdict_alone for each in suite.claims(suites) if each.ours.items)
        done = sum(record.status == "done" for record in suite.records.values())
        rows.append(
            (
                Cell(suite.manifest.title, link=suite.manifest.name),
                Cell(f"{done} of {len(suite.jobs)}", done / max(1, len(suite.jobs))),
                Cell(f"{len(decided)} of {len(tested)}" if tested else "", len(decided) if tested else None),
                Cell(" ".join(findings.of_differences(suite))),
                *(Cell(str(verdicts[each]), verdicts[each]) if verdicts else Cell("") for each in VERDICTS),
            )
        )
    note = (
        "Differences from the suite's base that are decided among all of its tests (Holm), and its paper's claims on "
        "our numbers: shown to agree, shown to differ, undecided."
    )
    head = ("suite", "runs", "differences decided", "what", "claims agree", "claims differ", "claims undecided")
    return ReportTable("overview", "Every suite", head, rows, note)


VERDICTS = (AGREES, DIFFERS, UNDECIDED)


def decided_table(suites: Sequence[SuiteResults]) -> ReportTable:
    """The claims of the papers that our numbers decide, those that differ first."""
    found = [
        (each, suite) for suite in suites for each in suite.claims(suites) if each.verdict_alone in (AGREES, DIFFERS)
    ]
    rows = []
    for each, suite in sorted(found, key=lambda pair: pair[0].verdict_alone != DIFFERS):
        rows.append(
            (
                Cell(each.ours.claim.statement, sub=each.ours.claim.id),
                Cell(each.ours.claim.where, sub=each.ours.claim.paper),
                Cell(each.verdict, sub=each.why, mark="good" if each.verdict_alone == AGREES else "bad"),
                Cell(number(each.p_holm), each.p_holm),
                Cell(suite.manifest.title, link=suite.manifest.name),
            )
        )
    note = (
        "What our numbers decide of what the papers state, against them as well as for them; p is Holm's among the "
        "claims of the suite. Where our protocol is not the paper's the verdict says so and speaks of our setting "
        "alone: it does not say that the paper's numbers are wrong."
    )
    return ReportTable(
        "decided", "Claims that are decided", ("claim", "where", "verdict", "p (Holm)", "suite"), rows, note
    )


def in_a_sentence(suites: Sequence[SuiteResults]) -> str:
    """How much of all of it is decided."""
    tested, decided = sum(len(findings.tested(s)) for s in suites), sum(len(findings.decided(s)) for s in suites)
    verdicts = Counter(each.verdict_alone for s in suites for each in s.claims(suites) if each.ours.items)
    said = f"{len(suites)} suites: {decided} of {counted(tested, 'difference')} from their bases {are(decided)} decided"
    if verdicts:
        said += (
            f"; of {counted(verdicts.total(), 'claim')} of the papers {verdicts[AGREES]} shown to agree, "
            f"{verdicts[DIFFERS]} to differ, {verdicts[UNDECIDED]} undecided"
        )
    return f"{said}."
