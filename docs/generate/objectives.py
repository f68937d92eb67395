"""Build one page for each objective and regularizer from its registry entry."""

from __future__ import annotations

import inspect
import re
import tomllib
from pathlib import Path
from textwrap import dedent
from typing import Any

import committed
import drawing
import evidence
import toy

from dipole.core.objectives.registry import Entry, registry

ROOT = Path(__file__).resolve().parents[2]
ADDED = tomllib.loads(Path(__file__).with_name("objectives.toml").read_text(encoding="utf-8"))
TOLD = {
    "": "",
    "supervised": ", told which cloud each is of",
    "predicted": ", one of them behind a linear predictor, without a gradient through the other",
}


def entries() -> list[Entry]:
    """Return dipole's objectives, then its regularizers, sorted by name."""
    own = [entry for entry in registry.entries() if entry.kind != "diagnostic" and entry.package == "dipole"]
    return sorted(own, key=lambda entry: (entry.kind, entry.name))


def problems() -> list[str]:
    """Return problems of entries: no typeset formula, one that differs from the registry, or missing parts."""
    found, known = [], entries()
    for entry in known:
        if entry.name not in ADDED:
            found.append(f"{entry.name}: no table [{entry.name}] in docs/generate/objectives.toml")
        elif ADDED[entry.name]["of"] != entry.formula:
            found.append(f"{entry.name}: its formula is now {entry.formula!r}; typeset that one, and say so in `of`")
        elif ("option" in ADDED[entry.name]) == ("weighs" in ADDED[entry.name]):
            found.append(
                f"{entry.name}: give its `option` that is drawn, or say in `weighs` why it weighs no negatives"
            )
        if not _relations(entry):
            found.append(f"{entry.name}: its docstring has no paragraph 'Relations: ...'")
    return found + [f"{name}: a table, and no such entry" for name in ADDED if name not in {e.name for e in known}]


def page(entry: Entry) -> str:
    """Return the Markdown page of one entry."""
    added: dict[str, Any] = ADDED[entry.name]
    parts = [f"# `{entry.name}`", f"{entry.summary}", f"![{entry.formula}]({entry.name}-formula.svg)"]
    facts = [("kind", entry.kind), ("source", entry.source), ("cost", entry.cost)]
    facts += [("other names", ", ".join(f"`{each}`" for each in entry.aliases))] if entry.aliases else []
    facts += [("weight", f"{entry.weight:g} when none is written")] if entry.kind == "regularizer" else []
    parts.append(_table(("", ""), facts))
    written = f"infonce + {entry.weight:g}*{entry.name}" if entry.kind == "regularizer" else entry.name
    dim = ", dim=128" if entry.name in ("swav", "cllr", "cross_entropy") else ""
    parts.append(f'```python\nobjective = dipole.objective("{written}"{dim})\n```')
    if entry.options:
        rows = [
            (
                f"`{o.name}`",
                o.type,
                "required" if o.default is inspect.Parameter.empty else f"`{o.default}`",
                o.range,
                o.help,
            )
            for o in entry.options
        ]
        parts += ["## Options", _table(("option", "type", "default", "range", ""), rows)]
    if "option" in added:
        parts += [
            f"## What `{added['option']}` does",
            "The plot shows the gradient of a negative over its cosine: dL / ds of one anchor, with a positive at "
            "cosine 0.8 and 81 negatives from -1 to 1"
            + (f", and `{added['fixed']}`" if "fixed" in added else "")
            + ". Above 0 the negative is pushed away, below 0 it is attracted.",
            f"![Weight of a negative over its cosine]({entry.name}-weights.svg)",
        ]
    else:
        parts.append(f"It weighs no negatives: {added['weighs']}.")
    parts += [
        "## What it does to a toy set",
        f"{toy.CLOUDS * toy.EACH} points of three clouds, a colour each, in the plane after {toy.STEPS} steps of a "
        f"small encoder on two noisy views of each{TOLD[added.get('told', '')]}:",
        f"![The points in the plane, a panel for each setting]({entry.name}-toy.svg)",
    ]
    parts += ["## Relations", _relations(entry)]
    parts.append("## Differences from the papers, and open points")
    for paper, lines in entry.deviations.items():
        parts += [f"**{paper}**", *([f"- {line}" for line in lines] or ["- no differences"])]
    if not entry.deviations:
        parts.append("Nothing is noted.")
    suites = suites_of(entry)
    parts.append("## Suites that use it")
    parts.append("\n".join(f"- `dipole bench {name}`: {title}" for name, title in suites) or "None.")
    parts.append(
        "[Results](../results/index.md) has the runs and verdicts, [papers](../background/papers.md) the tables."
    )
    ran = [evidence.of_objective(entry.name), evidence.of_study(entry.name)]
    ran += [committed.of_objective({entry.name, *entry.aliases})]
    parts.append("## Our results")
    parts += [each for each in ran if each] or ["No committed suite or study uses it."]
    parts += [
        "## In code",
        f"::: {entry.target.__module__}.{entry.target.__qualname__}\n"
        "    options:\n      heading_level: 3\n      members: false",
    ]
    return "\n\n".join(parts) + "\n"


def toys(name: str) -> list[tuple[str, str]]:
    """Return title and text of each objective in the toy picture."""
    added = ADDED[name]
    if "toy" in added:
        return [(text, text) for text in added["toy"]]
    option, fixed = added["option"], added.get("fixed", "")
    return [(f"{option} = {value}", drawing.spelled(name, option, value, fixed)) for value in added["values"]]


def overview() -> str:
    """Return the overview table."""
    parts = ["# Objectives and regularizers", "A page each, from the registry that `dipole show NAME` prints."]
    for kind in ("objective", "regularizer"):
        rows = [(f"[`{e.name}`]({e.name}.md)", e.summary) for e in entries() if e.kind == kind]
        parts += [f"## {kind.capitalize()}s", _table(("name", ""), rows)]
    return "\n\n".join(parts) + "\n"


def suites_of(entry: Entry) -> list[tuple[str, str]]:
    """Return names and titles of the shipped suites that use the entry."""
    names = {entry.name, *entry.aliases}
    found = []
    for path in sorted((ROOT / "benchmarks" / "suites").glob("*.toml")):
        suite = tomllib.loads(path.read_text(encoding="utf-8"))
        if any(committed.terms(row.get("objective", "")) & names for row in suite.get("rows", ())):
            found.append((path.stem, suite["title"]))
    return found


def _relations(entry: Entry) -> str:
    match = re.search(
        r"^Relations: (.*?)(?:\n\n|\Z)", dedent(inspect.getdoc(entry.target) or ""), re.MULTILINE | re.DOTALL
    )
    return " ".join(match.group(1).split()) if match else ""


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    cells = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in cells)
