"""The six SentEval tasks with the published rows, and the similarity tasks in a row."""

import json
from collections.abc import Mapping
from typing import Any

from dipole.core.utils.plugins import shipped
from dipole.text.senteval.engine import SIX_TASKS
from dipole.text.senteval.scoring import Result

PUBLISHED = ("lmcl-table4", "cllr-table2")
EXCHANGED = (
    "SUBJ and MPQA stand as printed in the papers, where they look exchanged: encoders of this kind reach about 92-94 "
    "on SUBJ and 87-90 on MPQA. The column SUBJ* shows what is printed under MPQA, and the reverse."
)


def published_rows(table: str) -> list[tuple[str, dict[str, float | None]]]:
    """Return methods and printed accuracies of a table in `PUBLISHED`, MSRP called MRPC."""
    papers = (json.loads(path.read_text(encoding="utf-8")) for path in shipped("published", "*.json").values())
    rows = next(found["rows"] for paper in papers for found in paper["tables"] if found["id"] == table)
    return [
        (row["method"], {column.replace("MSRP", "MRPC"): cell["mean"] for column, cell in row["cells"].items()})
        for row in rows
    ]


def six_task_table(results: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """Ours first (encoder -> task -> result), then the published rows, accuracies in percent."""
    columns = [*SIX_TASKS, "SUBJ*", "MPQA*"]
    lines = [f"{'':<28}" + "".join(f"{column:>8}" for column in columns)]
    protocols = set()
    for name, found in results.items():
        values = {task: found[task]["acc"] for task in SIX_TASKS if task in found}
        protocols |= {r.protocol for r in found.values() if isinstance(r, Result)}
        lines.append(_line(name, columns, values | {"SUBJ*": values.get("SUBJ"), "MPQA*": values.get("MPQA")}))
        errors = {task: r.standard_error for task, r in found.items() if isinstance(r, Result)}
        lines.append(_line("  standard error", columns, errors))
    seen = []
    for table in PUBLISHED:
        for name, values in published_rows(table):
            if (name, values) not in seen:
                seen.append((name, values))
                lines.append(_line(name, columns, values | {"SUBJ*": values["MPQA"], "MPQA*": values["SUBJ"]}, table))
    lines += [
        "",
        f"Protocol of our rows: {', '.join(sorted(protocols)) or 'unknown'}; the papers': skip-thoughts.",
        EXCHANGED,
    ]
    return "\n".join(lines)


STS_COLUMNS = {
    **{f"STS{year}": (f"STS{year}", "all") for year in range(12, 17)},
    "STS-B": ("STSBenchmark", "test"),
    "SICK-R": ("SICKRelatedness", "test"),
    "STS-B dev": ("STSBenchmark", "dev"),
}
"""Column -> task and part, in the order of SimCSE's tables. The dev split is for choosing and not part of the mean."""
COSINE = "-cosine"  # a name of two tasks may end so


def sts_table(results: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """Spearman's correlation times 100, each column over all its pairs. The mean needs all seven test columns."""
    columns = [*STS_COLUMNS, "mean"]
    lines = [f"{'':<28}" + "".join(f"{column:>11}" for column in columns)]
    for name, given in results.items():
        found = {task.removesuffix(COSINE): result for task, result in given.items()}
        values = {
            column: 100 * (found[task]["all"]["spearman"]["all"] if part == "all" else found[task][part]["spearman"][0])
            for column, (task, part) in STS_COLUMNS.items()
            if task in found
        }
        tested = [values.get(column) for column in columns[:7]]
        if None not in tested:
            values["mean"] = sum(filter(None, tested)) / len(tested)
        lines.append(_line(name, columns, values, width=11, digits=2))
    return "\n".join(lines)


def written_tables(found: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """File name -> table of what one encoder reached, for its run's folder."""
    tables = {}
    names = {task.removesuffix(COSINE) for task in found}
    sts = any(task in names for task, _ in STS_COLUMNS.values())
    if not sts or any(task in found for task in SIX_TASKS):
        tables["senteval.txt"] = six_task_table({"this run": found})
    if sts:
        tables["sts.txt"] = sts_table({"this run": found})
    return tables


def _line(
    name: str, columns: list[str], values: Mapping[str, Any], source: str = "", width: int = 8, digits: int = 1
) -> str:
    shown = {column: f"{value:.{digits}f}" for column, value in values.items() if value is not None}
    cells = "".join(shown.get(column, "-").rjust(width) for column in columns)
    return f"{name:<28}{cells}  {source}".rstrip()
