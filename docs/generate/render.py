"""Render the pages of docs/templates into docs: the numbers and tables that come from committed results.

    python docs/generate/render.py [--check]

Without --check the pages are written. With it, the program exits with 1 if a page differs. `make lint` runs this check.
A template contains places such as `{{ cross-domain: hcl @ pydoc: next sentence in ten }}`:

    SUITE: ROW @ COLUMN             difference from the row's baseline, 95 % interval, p (Holm, over the suite)
    SUITE: ROW - OTHER @ COLUMN     difference of two rows, p of this test alone
    SUITE: mean ROW @ COLUMN        mean over seeds
    SUITE: detectable COLUMN        smallest difference that its seeds show with 80 % power (Holm, over the suite)
    SUITE: diagnostic NAME ROW      mean of a diagnostic over the runs of a row
    SUITE: gain ROW                 gain over all columns in units of the baseline's mean, p of this test alone
    SUITE: decided                  how many of its comparisons are significant (Holm)
    SUITE: p                        range of p (Holm) of its comparisons
    SUITE: claim ID                 verdict on a claim of the paper, the comparison behind it, p (Holm, over its claims)
    SUITE: table                    its results: means, standard deviations, and the printed numbers
    all: decided                    the same count over all committed results
    polarization DOMAIN: KEY        gain of a setting over InfoNCE, p (Holm, over the domain's settings)
    polarization DOMAIN: KEY - KEY  difference of two settings' gains, p of this test alone
    polarization DOMAIN: mean KEY   value after training, mean over seeds. Of `untrained`, before
    polarization DOMAIN: pull KEY   gradient of lambda R over that of InfoNCE at the first step, mean over seeds
    polarization DOMAIN: decided    how many of its comparisons with InfoNCE are significant (Holm)
    table: NAME                     a table of `evidence.TABLES`
    papers: NAME                    a row for each table, figure and theorem of a paper
    claims: NAME                    a row for each claim of a paper
    install: EXTRA, EXTRA           shell lines that install dipole with these extras from a checkout. `none`: without
    install: extras                 the table of all extras
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from functools import cache
from math import floor, isfinite, log10
from pathlib import Path
from statistics import fmean

import committed
import evidence
import install

from dipole.benchmarks import papers
from dipole.benchmarks.claims.judge import JudgedClaim, why
from dipole.benchmarks.report import charts, findings
from dipole.benchmarks.report.ranking import ranks
from dipole.benchmarks.report.tables import results_table
from dipole.benchmarks.statistics import PairedTest, difference, number
from dipole.benchmarks.studies import polarization
from dipole.benchmarks.suite_results import SuiteResults

ROOT = Path(__file__).resolve().parents[2]
TEMPLATES = ROOT / "docs" / "templates"
README_LINES = re.compile(r"(<!-- install: (.+?) -->\n).*?(\n<!-- installed -->)", re.DOTALL)
PLACE = re.compile(r"\{\{ (.+?) \}\}", re.DOTALL)
UNITS = {"%": " points"}
SHOWN = ("mean ", "diagnostic ", "table")
"""Places for numbers of a suite that cannot decide anything."""
PICTURES = {
    "controlled.svg": ("controlled", "linear, tuned"),
    "controlled-labels.svg": ("controlled-labels", "linear"),
    "controlled-range.svg": ("controlled-range", "imbalance"),
    "cacr-weights.svg": ("cacr-table9", "ours beside the printed"),
    "cacr-positives.svg": ("cacr-figure9", "number of positives"),
    "class-means.svg": ("arora-table1-wiki3029", "avg-10: ours beside the printed"),
}
"""Pictures of committed results in docs/pictures: the suite, and how the title of the picture on its page ends."""


def filled(text: str) -> str:
    """Fill in the places of a template.

    Raises:
        LookupError: a place names an unknown suite, row, column, claim, setting or table.
    """
    return PLACE.sub(lambda found: value_of(" ".join(found[1].split())), text)


def value_of(place: str) -> str:
    """Return the text for one place."""
    where, _, what = place.partition(": ")
    if where == "table":
        return evidence.TABLES[what]()
    if where == "papers":
        return papers.items_table(what)
    if where == "claims":
        return papers.claims_table(what)
    if where == "install":
        extras = [] if what == "none" else what.split(", ")
        return install.extras() if what == "extras" else install.block(*extras)
    if where == "all":
        return committed.in_short()
    if where.startswith("polarization "):
        return _polarization(where.removeprefix("polarization "), what)
    suite = _suite(where)
    if suite.manifest.not_decidable and not what.startswith(SHOWN):
        raise LookupError(
            f"{place}: the suite cannot decide anything, so no page counts it. {suite.manifest.not_decidable}"
        )
    if what == "decided":
        return f"{len(findings.decided(suite))} of {len(suite.tested)}"
    if what == "table":
        shown = "\n\n".join(committed.narrow(results_table(suite)))
        return f"\n\n{shown}\n\n"
    if what == "p":
        found = [cell.p_holm for cell in suite.tested if isfinite(cell.p_holm)]
        return f"p {_p(min(found))} to {_p(max(found))}"
    if what.startswith("detectable "):
        column = what.removeprefix("detectable ")
        return number(suite.detectable(column)) + _unit(suite, column)
    if what.startswith("diagnostic "):
        name, _, row = what.removeprefix("diagnostic ").partition(" ")
        runs = {job.hash for job in suite.jobs for cell in job.cells if cell.row == row}
        return number(fmean(suite.records[run].diagnostics[name] for run in runs))
    if what.startswith("claim "):
        return _claim(suite, what.removeprefix("claim "))
    if what.startswith("gain "):
        rank = next(each for each in ranks(suite) if each.label == what.removeprefix("gain "))
        assert rank.gain is not None
        return (
            f"{number(100 * rank.gain.value)} % ({number(100 * rank.gain.low)} to {number(100 * rank.gain.high)}, "
            f"p = {_p(rank.gain.p)} alone)"
        )
    row, _, column = what.rpartition(" @ ")
    if row.startswith("mean "):
        return number(_cell(suite, row.removeprefix("mean "), column))
    one, minus, other = row.partition(" - ")
    unit = _unit(suite, column)
    if minus:
        values, base = suite.samples(one, column), suite.samples(other, column)
        if values is None or base is None:
            raise LookupError(f"{place}: no such rows or column")
        test = difference(base, values)
        return _shown(test, f"p = {_p(test.p_t)} alone", unit)
    cell = suite.cell(row, column)
    if cell is None or cell.against_base is None:
        raise LookupError(f"{place}: no such row or column, or no base")
    corrected = f" by Holm over {cell.family} tests" if cell.why_not_significant else ""
    return _shown(cell.against_base, f"p = {_p(cell.p_holm)}{corrected}", unit)


def _unit(suite: SuiteResults, column: str) -> str:
    unit = next((c.unit for c in suite.manifest.columns if c.name == column), None)
    if unit is None:
        raise LookupError(f"{suite.manifest.suite}: no column {column}")
    return UNITS.get(unit, f" {unit}" if unit else "")


def _suite(name: str) -> SuiteResults:
    for each in committed.suites():
        if each.manifest.suite == name:
            return each
    raise LookupError(f"{name}: no such suite among the kept results")


def _cell(suite: SuiteResults, row: str, column: str) -> float:
    value = suite.value(row, column)
    if value is None:
        raise LookupError(f"{suite.manifest.suite}: no cell {row} @ {column}")
    return value


def _claim(suite: SuiteResults, name: str) -> str:
    for each in _claims()[suite.manifest.name]:
        if each.claim.id == name:
            return f"{each.verdict}, {why(each)}" + (f", p = {_p(each.p_holm)}" if isfinite(each.p_holm) else "")
    raise LookupError(f"{suite.manifest.suite}: no claim {name}")


@cache
def _claims() -> dict[str, list[JudgedClaim]]:
    suites = committed.suites()
    return {suite.manifest.name: suite.claims(suites) for suite in suites}


@cache
def _study() -> polarization.Found:
    return polarization.kept(evidence.RESULTS / "polarization.json")[0]


def _polarization(domain: str, key: str) -> str:
    tests = polarization.tests(_study(), domain)
    if what_of := re.fullmatch("(mean|pull) (.*)", key):
        return _of_runs(_study()[domain], *what_of.groups())
    if key == "decided":
        return f"{sum(p < 0.05 for *_, p in tests.values())} of {len(tests)}"
    one, minus, other = key.partition(" - ")
    if minus:
        gains = _gains(domain, one), _gains(domain, other)
        test = difference(gains[1], gains[0])
        return _shown(test, f"p = {_p(test.p_t)} alone")
    _, test, p = tests[key]
    return _shown(test, f"p = {_p(p)}")


def _of_runs(cells: Mapping[str, Mapping[str, Mapping[str, float]]], what: str, key: str) -> str:
    name = "first pull" if what == "pull" else "untrained" if key == "untrained" else "trained"
    values = [cell[name] for cell in cells["infonce" if key == "untrained" else key].values()]
    return f"{fmean(values):.2g}" if what == "pull" else f"{fmean(values):.3f}"


def _gains(domain: str, key: str) -> Mapping[int, float]:
    setting = polarization.tests(_study(), domain)[key][0]
    ours, base = (polarization.trained(_study(), domain, each) for each in (setting, setting.base))
    return {seed: ours[seed] - base[seed] for seed in ours.keys() & base.keys()}


def _shown(test: PairedTest, p: str, unit: str = "") -> str:
    largest = max(map(abs, (test.low, test.high, test.difference)))
    digits = 1 if unit == " points" else max(0, 2 - floor(log10(largest)))
    low, high, value = (f"{each:.{digits}f}" for each in (test.low, test.high, test.difference))
    return f"{value}{unit} ({low} to {high}, {p})"


def _p(value: float) -> str:
    """Return two digits, or three near the level, which show on which side it is."""
    return f"{value:.3g}" if 0.04 < value < 0.06 else f"{value:.2g}"


def pages() -> dict[str, str]:
    """Return path and text of each rendered page, and of the README with its install lines."""
    found = {}
    for template in sorted(TEMPLATES.rglob("*.md")):
        path = f"docs/{template.relative_to(TEMPLATES).as_posix()}"
        found[path] = filled(template.read_text(encoding="utf-8"))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    found["README.md"] = README_LINES.sub(lambda match: f"{match[1]}{install.block(match[2])}{match[3]}", readme)
    return found


def picture(name: str) -> bytes:
    """Return a picture of committed results as SVG."""
    suite, ending = PICTURES[name]
    results = next(each for each in committed.suites() if each.manifest.name == f"{suite}-small")
    of_suite = charts.pictures(results, committed.gathered().files)
    drawn = [each.chart for of_kind in of_suite.values() for each in of_kind]
    return committed.svg(next(chart for chart in drawn if chart.title.endswith(ending)))


def main(arguments: list[str]) -> int:
    """Write the pages and pictures, or check the pages."""
    stale = {}
    for name, text in pages().items():
        page = ROOT / name
        if not page.is_file() or page.read_text(encoding="utf-8") != text:
            stale[page] = text
    if "--check" not in arguments:
        for page, text in stale.items():
            page.parent.mkdir(exist_ok=True)
            page.write_text(text, encoding="utf-8")
        for name in PICTURES:
            path = ROOT / "docs" / "pictures" / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(picture(name))
    elif stale:
        names = ", ".join(page.relative_to(ROOT).as_posix() for page in stale)
        print(f"{names}: differ from docs/templates or the install lines. Run `make pages`.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
