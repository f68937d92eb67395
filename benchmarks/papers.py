"""Write `docs/background/papers.md`: one row per table, figure and theorem of the papers.

python -m dipole.benchmarks.papers            write the page
python -m dipole.benchmarks.papers --check    check whether it is current
"""

import argparse
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

from dipole.benchmarks.claims import published
from dipole.benchmarks.claims.judge import judge_claim, says
from dipole.benchmarks.claims.protocol import Item, Paper, papers
from dipole.benchmarks.report import findings
from dipole.benchmarks.report.table import markdown
from dipole.benchmarks.suite import Suite, read_suite, suites
from dipole.core.evaluation.theory.theorems import ARORA, CLLR, LMCL, THEOREMS
from dipole.core.utils.files import atomic_write

PAGE = Path("docs/background/papers.md")
TITLES = {
    "arora": "Arora et al. 2019: A Theoretical Analysis of Contrastive Unsupervised Representation Learning",
    "lmcl": "LMCL: Large-Margin Contrastive Learning with Distance Polarization Regularizer",
    "cacr": "CACR: Contrastive Attraction and Contrastive Repulsion for Representation Learning",
    "cllr": "CLLR: Learning Contrastive Embedding in Low-Dimensional Space",
}
SHORT = {ARORA: "arora", LMCL: "lmcl", CLLR: "cllr"}
CLAIM_HEAD = ("claim", "statement", "judged as", "how the sentence is read")
HEAD = ("", "what", "where", "what differs", "why", "how to run")
INTRODUCTION = """# The papers, row by row

This page lists every table, figure and theorem of the four papers. Each row names our suite, the differences, the
reasons and the command. The page is generated from the suites, from the settings that the papers state
(`benchmarks/published/*.toml`) and from the list of theorems (`core/evaluation/theory/theorems.toml`). Edit those
files and run `make pages`.

The column "what differs" compares scale `paper` with the paper. `dipole bench SUITE` runs scale `small`. Its
differences are in the suite (`dipole show SUITE`). Numbers of a suite with differences get no verdict against
printed numbers. An empty field means that no difference is known. Where scale `small` cannot decide anything on
this hardware, the last column says why. Its results are shown and counted nowhere.

The claims of each paper follow its table, with the kind of test and the bound ([benchmarks.md](benchmarks.md)
explains the kinds). "In each of 6" counts the comparisons that a sentence names."""


def order(item: Item) -> tuple[int, str, list[int]]:
    """Sort tables first, then figures, then the others by name, each by number."""
    numbers = [int(number) for number in re.findall(r"\d+", item.name)]
    for place, word in enumerate(("Table", "Figure")):
        if item.name.startswith(word):
            return place, "", numbers
    return 2, item.name, numbers


def page() -> str:
    parts = [INTRODUCTION]
    for name in (paper for paper in published.PAPERS if paper in papers()):
        rows = [dict(item).values() for item in sorted(lines_of(name), key=order)]
        parts.append(f"## {TITLES[name]}\n\n{_table(HEAD, rows)}")
        parts.append(f"### Claims\n\n{_table(CLAIM_HEAD, map(_claim, published.claims_of(name)))}")
    return "\n\n".join(parts) + "\n"


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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m dipole.benchmarks.papers", description="Write the page of the papers, or check it."
    )
    parser.add_argument("page", nargs="?", type=Path, default=PAGE, help=f"default {PAGE}")
    parser.add_argument("--check", action="store_true", help="exit with 1 if the page is not current")
    given = parser.parse_args(arguments)
    text = page()
    if not given.check:
        atomic_write(given.page, text)
        return 0
    if given.page.is_file() and given.page.read_text(encoding="utf-8") == text:
        return 0
    print(f"{given.page} differs from the suites. Run `make pages`.")
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
