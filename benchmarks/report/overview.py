"""The overview of a report of many suites: a line for each suite, and the claims with a verdict."""

from collections import Counter
from collections.abc import Sequence

from dipole.benchmarks.claims.verdicts import AGREES, DIFFERS, NOT_DECIDABLE, OBSTACLES, UNDECIDED
from dipole.benchmarks.report import findings
from dipole.benchmarks.report.claim_tables import mark_of
from dipole.benchmarks.report.results import Claimed, SuiteResults
from dipole.benchmarks.report.table import EMPTY, Cell, ReportTable, count_cell, number_cell
from dipole.core.utils.text import are, counted

FEW = 5
"""Suites whose findings are read as sentences. Of more there is a table."""


def tables(suites: Sequence[SuiteResults]) -> list[ReportTable]:
    """Return the tables of the overview that have rows."""
    return [table for table in (suites_table(suites), decided_table(suites)) if table.rows]


def suites_table(suites: Sequence[SuiteResults]) -> ReportTable:
    """Return a row for each suite: finished runs, significant differences from its base, the leader, and claims."""
    rows = []
    for suite in suites:
        tested, decided = findings.tested(suite), findings.decided(suite)
        verdicts = Counter(each.verdict_alone for each in _counted_claims(suite, suites))
        done = sum(record.status == "done" for record in suite.records.values())
        name = Cell(suite.manifest.title, link=suite.manifest.name)
        runs = Cell(f"{done} of {len(suite.jobs)}", done / max(1, len(suite.jobs)))
        significant, counts = EMPTY, [EMPTY] * (len(VERDICTS) + 1)
        if tested:
            significant = Cell(f"{len(decided)} of {len(tested)}", len(decided))
        if verdicts:
            counts = [count_cell(verdicts[each]) for each in VERDICTS]
            counts.append(count_cell(sum(verdicts[each] for each in OBSTACLES)))
        rows.append((name, runs, significant, Cell(" ".join(findings.of_differences(suite))), *counts))
    note = (
        "Significant differences from the suite's base (Holm over all tests of the suite), and verdicts of our numbers "
        "on the paper's claims. A claim is without room if its printed effect does not fit between our base and the "
        "bound of the metric, or if our base is not above the untrained level. Suites that are not decidable on this "
        "hardware are listed with the reason, and counted nowhere."
    )
    head = (
        "suite", "runs", "significant differences", "finding", "claims agree", "claims differ", "claims undecided",
        "claims without room",
    )  # fmt: skip
    return ReportTable("overview", "Every suite", head, rows, note)


VERDICTS = (AGREES, DIFFERS, UNDECIDED)


def decided_table(suites: Sequence[SuiteResults]) -> ReportTable:
    """Return the claims with a verdict on our numbers, contradicted ones first."""
    found = [(claimed, suite) for claimed, suite in _claims(suites) if claimed.verdict_alone in (AGREES, DIFFERS)]
    rows = []
    for claimed, suite in sorted(found, key=lambda one: one[0].verdict_alone != DIFFERS):
        claim, link = claimed.ours.claim, Cell(suite.manifest.title, link=suite.manifest.name)
        verdict = Cell(claimed.verdict, sub=claimed.why, mark=mark_of(claimed.verdict_alone))
        about = Cell(claim.statement, sub=claim.id), Cell(claim.where, sub=claim.paper)
        rows.append((*about, verdict, number_cell(claimed.p_holm), link))
    note = (
        "Claims of the papers that our numbers support or contradict. p is corrected by Holm over the claims of the "
        "suite. If our protocol is not the paper's, the verdict names this and holds for our setting only. It does not "
        "mean that the paper's numbers are wrong."
    )
    head = ("claim", "where", "verdict", "p (Holm)", "suite")
    return ReportTable("decided", "Claims with a verdict", head, rows, note)


def _claims(suites: Sequence[SuiteResults]) -> list[tuple[Claimed, SuiteResults]]:
    """Return each claim once, with the suite in which its p (Holm) is smallest."""
    found: dict[str, tuple[Claimed, SuiteResults]] = {}
    for suite in suites:
        for each in _counted_claims(suite, suites):
            name = each.ours.claim.id
            if name not in found or not found[name][0].p_holm <= each.p_holm:
                found[name] = each, suite
    return list(found.values())


def _counted_claims(suite: SuiteResults, suites: Sequence[SuiteResults]) -> list[Claimed]:
    """Return the claims with numbers of ours, none of a suite that cannot decide anything."""
    if suite.not_decidable:
        return []
    return [each for each in suite.claims(suites) if each.ours.items]


def in_a_sentence(suites: Sequence[SuiteResults]) -> str:
    """Return in one sentence how many differences are significant and how many claims have a verdict."""
    tested, decided = sum(len(findings.tested(s)) for s in suites), sum(len(findings.decided(s)) for s in suites)
    verdicts = Counter(claimed.verdict_alone for claimed, _ in _claims(suites))
    differences = counted(tested, "comparison")
    unfit = sum(bool(suite.not_decidable) for suite in suites)
    said = f"{len(suites) - unfit} suites: {decided} of {differences} with the baseline {are(decided)} significant"
    if verdicts:
        said += (
            f". Of {counted(verdicts.total(), 'claim')} of the papers {verdicts[AGREES]} agree, "
            f"{verdicts[DIFFERS]} differ and {verdicts[UNDECIDED]} are undecided. For "
            f"{sum(verdicts[each] for each in OBSTACLES)} our numbers leave no room"
        )
    if unfit:
        said += f". {counted(unfit, 'further suite')} {are(unfit)} {NOT_DECIDABLE} and not counted"
    return f"{said}."
