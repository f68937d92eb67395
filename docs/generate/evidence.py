"""Tables of our own measurements (benchmarks/results): `{{ table: NAME }}` in a template."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import committed

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
EVERYWHERE = {
    "simclr": "images: five labels per class",
    "window": "sentences: next one, mean reciprocal rank",
    "agent": "agent: own observation among 300",
}


def results(name: str) -> Any:
    """Read one file of benchmarks/results."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Return the mean, with the standard deviation if there are several seeds."""
    middle = f"{mean(values):.{digits}f}"
    return f"{middle} \N{PLUS-MINUS SIGN} {stdev(values):.{digits}f}" if len(values) > 1 else middle


def everywhere() -> str:
    """Return the table of every objective in three domains, with the untrained encoder."""
    found = results("learning-everywhere")
    first = next(iter(found["simclr"]))
    cells: dict[str, list[str]] = {"untrained": [f"{found[layout][first]['0'][0]:.2f}" for layout in EVERYWHERE]}
    for name in sorted(found["simclr"]):
        values = [found[layout].get(name, {}).get("0") for layout in EVERYWHERE]
        cells[f"[`{name}`](../objectives/{name.partition('(')[0]}.md)"] = [
            f"{value[1]:.2f}" if isinstance(value, list) else "refused" for value in values
        ]
    return table(["objective", *EVERYWHERE.values()], [[name, *values] for name, values in cells.items()])


def text() -> str:
    """Return the table of small SentEval runs: means over seeds."""
    runs = results("text-learning")["runs"]
    methods = list(dict.fromkeys(name.rpartition("/")[0] for name in runs))
    tasks = [task for task in next(iter(runs.values())) if task != "seconds"]
    of = {method: [run for name, run in runs.items() if name.rpartition("/")[0] == method] for method in methods}
    rows = [[method, *(spread([run[task] for run in of[method]]) for task in tasks)] for method in methods]
    return "\n\n".join(committed.split(table(["method", *tasks], rows).splitlines()))


def agents() -> str:
    """Return the table of cartpole balance: the return of the last evaluation."""
    runs = results("rl-balance")["runs"]
    rows = []
    for method in dict.fromkeys(name.rpartition(",")[0] for name in runs):
        found = [run["evaluation"] for name, run in runs.items() if name.rpartition(",")[0] == method]
        last = [list(each.values())[-1] for each in found]
        rows.append([method, spread(last, 0), ", ".join(f"{value:.0f}" for value in last)])
    return table(["objective beside SAC", "return at 56,000 steps", "of each seed"], rows)


def of_objective(name: str) -> str:
    """Return the results of one objective in three domains, or "" if it was not run."""
    found = results("learning-everywhere")
    lines = []
    for layout, title in EVERYWHERE.items():
        if values := found[layout].get(name):
            before_and_after = values["0"]  # or why it was refused
            if isinstance(before_and_after, list):
                untrained, trained = before_and_after
                lines.append(f"- {title}: **{trained:.2f}**, untrained {untrained:.2f}")
            else:
                lines.append(f"- {title}: refused")
    if not lines:
        return ""
    head = "Default options, 50 to 200 steps, one seed ([all objectives](../how-to/choosing.md)):"
    return "\n".join([f"{head}\n", *lines])


def of_study(name: str) -> str:
    """Return the result of the polarization study for `dp`, or "" for another objective."""
    from dipole.benchmarks.studies import polarization as study

    if name != study.TERM:
        return ""
    found, _ = study.kept(RESULTS / "polarization.json")
    lines = []
    for domain in found:
        tests = study.tests(found, domain).values()
        signs = [test.difference > 0 for _, test, p in tests if p < 0.05]
        lines.append(f"- {study.TITLES[domain]}: {sum(signs)} above InfoNCE, {len(signs) - sum(signs)} below it")
    return (
        f"We compared {len(tests)} settings of reduction, lambda, margin and number of negatives with InfoNCE in each "
        "domain, five seeds. Significant differences (Holm, p < 0.05, [the case of "
        "polarization](../results/polarization.md)):\n\n" + "\n".join(lines)
    )


def polarization() -> str:
    """Return the tables of polarization against InfoNCE, one per domain."""
    from dipole.benchmarks.studies import polarization as study

    found, _ = study.kept(RESULTS / "polarization.json")
    parts = []
    for domain in found:
        parts += [f"### {study.TITLES[domain]}", *committed.split(study.table(found, domain).strip().splitlines())]
    return "\n\n".join(parts)


TABLES: dict[str, Callable[[], str]] = {
    "everywhere": everywhere,
    "text": text,
    "agents": agents,
    "overview": committed.overview,
    "polarization": polarization,
    "cross_domain": lambda: committed.ranking("cross-domain-small"),
}
