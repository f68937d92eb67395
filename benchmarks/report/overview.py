"""The overview of a report of many suites: a line for each suite, and the claims with a verdict."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dipole.benchmarks.claims.verdicts import AGREES, DIFFERS, UNDECIDED
from dipole.benchmarks.report import findings
from dipole.benchmarks.report.results import Claimed, SuiteResults
from dipole.benchmarks.report.table import Cell, ReportTable, number
from dipole.core.utils.text import are, counted

FEW = 5
"""Suites whose findings are read as sentences. Of more there is a table."""


def tables(suites: Sequence[SuiteResults]) -> list[ReportTable]:
    """The tables of the overview. Those that have a row."""
    return [table for table in (suites_table(suites), decided_table(suites)) if table.rows]


def suites_table(suites: Sequence[SuiteResults]) -> ReportTable:
    """Return a row for each suite: finished runs, significant differences from its base, the leader, and claims."""
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
    found = [each for each in _claims(suites) if each.verdict in (AGREES, DIFFERS)]
    rows = []
    for each in sorted(found, key=lambda one: one.verdict != DIFFERS):
        claim = each.claimed.ours.claim
        rows.append(
            (
                Cell(claim.statement, sub=claim.id),
                Cell(claim.where, sub=claim.paper),
                Cell(each.claimed.verdict, sub=each.claimed.why, mark="good" if each.verdict == AGREES else "bad"),
                Cell(number(each.claimed.p_holm), each.claimed.p_holm),
                Cell(each.suite.manifest.title, link=each.suite.manifest.name),
            )
        )
    note = (
        "What our numbers decide of what the papers state, against them as well as for them; p is Holm's among the "
        "claims of the suite. Where our protocol is not the paper's the verdict says so and speaks of our setting "
        "alone: it does not say that the paper's numbers are wrong."
    )
    head = ("claim", "where", "verdict", "p (Holm)", "suite")
    return ReportTable("decided", "Claims that are decided", head, rows, note)


@dataclass(frozen=True)
class _Found:
    claimed: Claimed
    suite: SuiteResults

    @property
    def verdict(self) -> str:
        return self.claimed.verdict_alone


def _claims(suites: Sequence[SuiteResults]) -> list[_Found]:
    """Every claim once: of one that several suites speak of, where its p among the suite's claims is smallest."""
    found: dict[str, _Found] = {}
    for suite in suites:
        for each in suite.claims(suites):
            name = each.ours.claim.id
            if each.ours.items and (name not in found or not found[name].claimed.p_holm <= each.p_holm):
                found[name] = _Found(each, suite)
    return list(found.values())


def in_a_sentence(suites: Sequence[SuiteResults]) -> str:
    """Return in one sentence how many differences are significant and how many claims have a verdict."""
    tested, decided = sum(len(findings.tested(s)) for s in suites), sum(len(findings.decided(s)) for s in suites)
    verdicts = Counter(each.verdict for each in _claims(suites))
    differences = counted(tested, "comparison")
    said = f"{len(suites)} suites: {decided} of {differences} with the baseline {are(decided)} significant"
    if verdicts:
        said += (
            f". Of {counted(verdicts.total(), 'claim')} of the papers {verdicts[AGREES]} agree, "
            f"{verdicts[DIFFERS]} differ and {verdicts[UNDECIDED]} are undecided"
        )
    return f"{said}."
