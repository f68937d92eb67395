"""The papers' claims as tables: kind and bound, what the printed numbers and ours show, and the verdict in words."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

from dipole.benchmarks.claims import published
from dipole.benchmarks.claims.explain import deciding, in_words, says, why
from dipole.benchmarks.claims.judge import JudgedClaim, judge_claim
from dipole.benchmarks.claims.verdicts import AGREES, DIFFERS, NO_DATA
from dipole.benchmarks.report.table import EMPTY, Cell, ReportTable, is_number, number_cell

KINDS = (
    "Each claim has a kind and a bound. Its test uses the seeds of both sides (docs/background/benchmarks.md). A claim "
    "agrees if all its parts are shown to be true, differs if one is shown to be false, and is undecided otherwise. It "
    "has no room if the printed effect does not fit between our base and the bound of the metric, and is not learnt if "
    "our base is not above the untrained level. "
    "p is two-sided. Holm's correction is over the claims of the suite."
)


def claims_table(suite: str, claims: Sequence[JudgedClaim]) -> ReportTable | None:
    """Return the paper's statements about the table of a suite, on its own numbers and on ours. None without claims."""
    if not claims:
        return None
    rows = []
    for each in claims:
        claim, printed = each.claim, judge_claim(each.claim, published.tables())
        verdict = Cell(each.full_verdict, sub=why(each), mark=mark_of(each.verdict))
        about = Cell(claim.id), Cell(claim.statement, sub=claim.note), Cell(says(printed), sub=_reads(claim))
        tested = _estimate(each), number_cell(each.p), number_cell(each.p_holm)
        rows.append((*about, verdict, *tested, _counts(each), _printed(printed), Cell(claim.where)))
    head = (
        "claim", "statement", "kind", "verdict on ours", "estimate", "p", "p (Holm)", "our numbers", "printed numbers",
        "where",
    )  # fmt: skip
    note = (
        "The table counts the comparisons of each claim that have the claimed sign or bound, and shows the comparison "
        f"that decides the verdict. {KINDS} If our protocol is not the paper's, the verdict names this and holds for "
        "our setting only."
    )
    return ReportTable(f"{suite}-claims", "The paper's claims", head, rows, note)


def every_claim_table(claims: Mapping[str, Sequence[JudgedClaim]]) -> ReportTable:
    """Return all statements of the papers, one by one, on the printed numbers and on the suites here, by their name."""
    ours: dict[str, list[tuple[str, JudgedClaim]]] = {}
    for suite, judged in claims.items():
        for each in judged:
            if each.items:
                ours.setdefault(each.claim.id, []).append((suite, each))
    rows = []
    for claim in published.claims():
        printed, found = judge_claim(claim, published.tables()), ours.get(claim.id, [])
        verdict = Cell("no runs here", sub=claim.not_tested, mark="open")
        if not claim.tests:
            verdict = replace(verdict, text="no test in numbers")
        if found:
            verdict = Cell(", ".join(f"{name}: {each.full_verdict}" for name, each in found))
        if len(found) == 1:
            verdict = replace(verdict, mark=mark_of(found[0][1].verdict))
        about = Cell(claim.id), Cell(claim.statement, sub=claim.note), Cell(claim.where, sub=claim.paper)
        kind = Cell(says(printed), sub=_reads(claim))
        rows.append((*about, Cell(claim.basis), kind, _printed(printed), verdict))
    head = ("claim", "statement", "where", "basis", "kind", "printed numbers", "verdict on ours")
    note = (
        "The printed numbers: how many comparisons of a claim they support, and a verdict if the paper prints spreads. "
        "Ours: the verdicts of the suites in this folder. The table of each suite lists the comparisons. Verdicts by "
        "another protocol than the paper's name it."
    )
    return ReportTable("every-claim", "Every claim of the papers", head, rows, note, is_folded=True)


def to_json(table: ReportTable) -> str:
    """A table as a list of objects: numbers as numbers, the smaller second line of a cell under `NAME: note`."""
    rows = []
    for row in table.rows:
        found: dict[str, str | float | None] = {}
        for name, cell in zip(table.head, row, strict=True):
            found[name] = cell.text
            if isinstance(cell.sort, int | float) and is_number(cell.text):
                found[name] = cell.sort
            if cell.sub:
                found[f"{name}: note"] = cell.sub
        rows.append(found)
    return json.dumps(rows, indent=1, ensure_ascii=False) + "\n"


def _reads(claim: published.Claim) -> str:
    return "; ".join(dict.fromkeys(part.reads for part in claim.parts if part.reads))


def _printed(outcome: JudgedClaim) -> Cell:
    """Counts, and the verdict where the paper prints a spread and says of how many trials."""
    found = _counts(outcome)
    if not outcome.claim.tests or not outcome.items:
        return found
    if outcome.is_tested:
        return replace(found, sub=f"{outcome.verdict}: {why(outcome)}")
    return replace(found, sub="not tested, because no spread is printed")


def _estimate(outcome: JudgedClaim) -> Cell:
    found = deciding(outcome)
    return EMPTY if found is None else Cell(in_words(found), number_cell(found.comparison.value).sort)


def _counts(outcome: JudgedClaim) -> Cell:
    if not outcome.claim.tests:
        return Cell("not testable by numbers")
    count = len(outcome.items)
    if not count:
        return Cell(NO_DATA)
    hold = sum(item.holds for item in outcome.items)
    text = f"{hold} of {count}"
    if outcome.missing:
        text += f", {outcome.missing} without data"
    return Cell(text, hold / count)


def mark_of(verdict: str) -> str:
    """Return the emphasis of a cell with this verdict."""
    return {AGREES: "good", DIFFERS: "bad"}.get(verdict, "open")
