"""The tables of `docs/background/papers.md`: one row per table, figure, theorem and claim of the papers."""

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache

from dipole.benchmarks.claims import published
from dipole.benchmarks.claims.judge import judge_claim, says
from dipole.benchmarks.claims.protocol import Item, Paper, papers
from dipole.benchmarks.report import findings
from dipole.benchmarks.report.table import markdown
from dipole.benchmarks.suite import Suite, read_suite, suites
from dipole.core.evaluation.theory.theorems import ARORA, CLLR, LMCL, THEOREMS

SHORT = {ARORA: "arora", LMCL: "lmcl", CLLR: "cllr"}
CLAIM_HEAD = ("claim", "statement", "judged as", "how the sentence is read")
HEAD = ("", "what", "where", "what differs", "why", "how to run")


def order(item: Item) -> tuple[int, str, list[int]]:
    """Sort tables first, then figures, then the others by name, each by number."""
    numbers = [int(number) for number in re.findall(r"\d+", item.name)]
    for place, word in enumerate(("Table", "Figure")):
        if item.name.startswith(word):
            return place, "", numbers
    return 2, item.name, numbers


def items_table(name: str) -> str:
    return _table(HEAD, (dict(item).values() for item in sorted(lines_of(name), key=order)))


def claims_table(name: str) -> str:
    return _table(CLAIM_HEAD, map(_claim, published.claims_of(name)))


def _table(head: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    return markdown(head, [[" ".join(cell.replace("|", "\\|").split()) for cell in row] for row in rows])


def lines_of(name: str) -> Iterator[Item]:
    paper = papers()[name]
    for id_, label, what in _published(name):
        for suite in (each for each in _suites() if each.published == id_):
            part = suite.name.removeprefix(id_)  # "c" of the suite of Figure 2 (c)
            name_of_part = label if part in ("", suite.name) else f"{label} ({part})"
            yield _of_suite(paper, suite, name_of_part, what)
    for item in paper.items:
        if item.run:
            item = item.model_copy(update={"run": f"`{item.run}`"})
        yield item
    for theorem in THEOREMS:
        if SHORT[theorem.paper] == name:
            differs, reasons = "", [theorem.assumption]
            if theorem.free:
                differs = "free here: " + ", ".join(theorem.free)
                reasons.append("the paper gives no value")
            where = f"`dipole theory`, `{theorem.key}`: " + ", ".join(f"`{name}`" for name in theorem.functions)
            why = "<br>".join(filter(None, reasons))
            what, run = f"`{theorem.statement}`", f"`{theorem.run}`"
            yield Item(name=theorem.name, what=what, where=where, differs=differs, why=why, run=run)


def _claim(claim: published.Claim) -> tuple[str, ...]:
    """Return kind and bound of a claim, and how we read its sentence, or why it cannot be tested."""
    judged = says(judge_claim(claim, published.tables())) or f"not tested: {claim.not_tested}"
    reads = "<br>".join(dict.fromkeys(part.reads for part in claim.parts if part.reads))
    return claim.id, claim.statement, judged, reads


def _published(name: str) -> Iterator[tuple[str, str, str]]:
    """Yield id, name in the paper and content of its tables and figures."""
    for table in published.tables().values():
        if table.paper == name:
            yield table.id, table.paper_table, table.caption
    for figure, (paper, plotted) in published.figures().items():
        if paper == name:
            yield figure, "Figure " + figure.rpartition("figure")[2], plotted


@cache
def _suites() -> list[Suite]:
    return [read_suite(name) for name in suites()]


def _of_suite(paper: Paper, suite: Suite, label: str, what: str) -> Item:
    if "paper" in suite.scale:
        sized, said = suite.at("paper"), suite.scale["paper"].protocol
    else:
        sized, said = suite.at("small"), {"scale": "no scale `paper`"}
    measured = dict.fromkeys(f"`{column.metric_of(row)}`" for row, column, _ in sized.cells())
    where = f"suite `{suite.name}`: {', '.join(measured)}"
    seeds = {name: len(suite.at(name).seeds) for name in suite.scale}
    where += "".join(f", {count} seeds ({name})" for name, count in seeds.items() if count > 1)
    differs = "<br>".join(f"{key}: {value}" for key, value in said.items())
    why = "<br>".join(dict.fromkeys(f"{key}: {reason}" for key in said if (reason := paper.why(key))))
    options = {"small": "", "paper": " --scale paper"}
    run = " or ".join(f"`dipole bench {suite.name}{options[name]}`" for name in suite.scale)
    if "small" in suite.scale and (mark := suite.at("small").not_decidable):
        run += f"<br>{findings.of_mark(mark)}"
    return Item(name=label, what=what, where=where, differs=differs, why=why, run=run)
