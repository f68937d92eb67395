"""The papers' claims as tables: kind and bound, what the printed numbers and ours show, and the verdict in words."""

import json
from collections.abc import Iterable, Sequence
from math import isfinite

from dipole.benchmarks.claims import published
from dipole.benchmarks.claims.evaluate import NO_DATA, Outcome, evaluate
from dipole.benchmarks.claims.verdicts import AGREES, DIFFERS
from dipole.benchmarks.report.results import Claimed, SuiteResults
from dipole.benchmarks.report.table import Cell, ReportTable, number

KINDS = (
    "A claim has a kind and a bound of its own, and the test of its kind on the seeds of both sides "
    "(docs/benchmarks.md). It agrees where all its parts are shown to be true, differs where one is shown to be false, "
    "and is undecided otherwise. p is two-sided; Holm is over the claims of the suite."
)


def claims_table(results: SuiteResults, others: Iterable[SuiteResults] = ()) -> ReportTable | None:
    """The paper's statements about this table, on its own numbers and on ours."""
    if not (found := results.claims(others)):
        return None
    rows = []
    for each in found:
        claim, ours = each.printed.claim, each.ours
        rows.append(
            (
                Cell(claim.id),
                Cell(claim.statement, sub=claim.note),
                Cell(each.printed.says, sub=_reads(claim)),
                Cell(each.verdict, sub=each.why, mark=_mark(each.verdict_alone)),
                _estimate(ours),
                _p(ours.p),
                _p(each.p_holm),
                Cell(_counts(ours), _share(ours)),
                _printed(each.printed),
                Cell(claim.where),
            )
        )
    head = (
        "claim", "statement", "kind", "verdict on ours", "estimate", "p", "p (Holm)", "our numbers", "printed numbers",
        "where",
    )  # fmt: skip
    note = f"How many of a statement's comparisons go as claimed, and the one its verdict hangs on. {KINDS} Where ours "
    note += "is not the paper's protocol verdicts say so, and speak of our setting alone."
    return ReportTable(f"{results.manifest.name}-claims", "The paper's claims", head, rows, note)


def short_claims_table(results: SuiteResults) -> ReportTable | None:
    """Return the claims for the terminal: kind, estimate, p and verdict."""
    found = [each for each in results.claims() if each.ours.items]
    if not found:
        return None
    rows = [
        (
            Cell(each.ours.claim.id),
            Cell(each.ours.says),
            _estimate(each.ours),
            _p(each.p_holm),
            Cell(each.verdict, sub=each.why),
        )
        for each in found
    ]
    head = ("claim", "kind", "estimate", "p (Holm)", "verdict")
    return ReportTable(f"{results.manifest.name}-short-claims", "The paper's claims", head, rows)


def every_claim_table(suites: Sequence[SuiteResults]) -> ReportTable:
    """All statements of the papers, one by one: on the printed numbers and on the suites here."""
    ours: dict[str, list[tuple[str, Claimed]]] = {}
    for suite in suites:
        for each in suite.claims(suites):
            if each.ours.items:
                ours.setdefault(each.ours.claim.id, []).append((suite.manifest.name, each))
    rows = []
    for claim in published.claims():
        printed = evaluate(claim, published.tables())
        found = ours.get(claim.id, [])
        verdict = Cell("no test in numbers" if not claim.tests else "no runs here", sub=claim.not_tested, mark="open")
        if found:
            text = "; ".join(f"{name}: {each.verdict}" for name, each in found)
            verdict = Cell(text, mark=_mark(found[0][1].verdict_alone) if len(found) == 1 else "")
        rows.append(
            (
                Cell(claim.id),
                Cell(claim.statement, sub=claim.note),
                Cell(claim.where, sub=claim.paper),
                Cell(claim.basis),
                Cell(printed.says, sub=_reads(claim)),
                _printed(printed),
                verdict,
            )
        )
    head = ("claim", "statement", "where", "basis", "kind", "printed numbers", "verdict on ours")
    note = (
        "How many of a statement's comparisons the printed numbers bear out, with a verdict where their spreads are "
        "printed, and what the suites of this folder say; the comparisons themselves stand with each suite. Another "
        "protocol than the paper's is named."
    )
    return ReportTable("every-claim", "Every claim of the papers", head, rows, note, is_folded=True)


def to_json(table: ReportTable) -> str:
    """A table as a list of objects: numbers as numbers, the smaller second line of a cell under `NAME: note`."""
    rows = []
    for row in table.rows:
        found: dict[str, str | float | None] = {}
        for name, cell in zip(table.head, row, strict=True):
            found[name] = cell.sort if isinstance(cell.sort, int | float) and _is_number(cell.text) else cell.text
            if cell.sub:
                found[f"{name}: note"] = cell.sub
        rows.append(found)
    return json.dumps(rows, indent=1, ensure_ascii=False) + "\n"


def _is_number(text: str) -> bool:
    try:
        return isfinite(float(text))
    except ValueError:
        return False


def _reads(claim: published.Claim) -> str:
    return "; ".join(dict.fromkeys(part.reads for part in claim.parts if part.reads))


def _printed(outcome: Outcome) -> Cell:
    """Counts, and the verdict where the paper prints a spread and says of how many trials."""
    if not outcome.claim.tests or not outcome.items:
        return Cell(_counts(outcome), _share(outcome))
    verdict = outcome.verdict
    sub = f"{verdict}: {outcome.why(verdict)}" if outcome.is_tested else "no spread is printed: not tested"
    return Cell(_counts(outcome), _share(outcome), sub)


def _estimate(outcome: Outcome) -> Cell:
    found = outcome.deciding
    return Cell("") if found is None else Cell(found.words, found.value if isfinite(found.value) else None)


def _p(p: float) -> Cell:
    return Cell(number(p), p) if isfinite(p) else Cell("")


def _counts(outcome: Outcome) -> str:
    if not outcome.claim.tests:
        return "not testable by numbers"
    if not outcome.items:
        return NO_DATA
    missing = f", {outcome.missing} without data" if outcome.missing else ""
    return f"{outcome.hold} of {len(outcome.items)}{missing}"


def _share(outcome: Outcome) -> float | None:
    return outcome.hold / len(outcome.items) if outcome.items else None


def _mark(verdict: str) -> str:
    return {AGREES: "good", DIFFERS: "bad"}.get(verdict, "open")
