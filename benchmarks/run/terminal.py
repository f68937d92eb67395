"""The terminal output of `dipole bench`: the plan, progress with the time left, results and failures."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import nan
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Task as ProgressTask
from rich.text import Text

from dipole.benchmarks.plan import Plan
from dipole.benchmarks.report import claim_tables, findings, table, tables
from dipole.benchmarks.report.ranking import ranks
from dipole.benchmarks.report.table import ReportTable
from dipole.benchmarks.run import reference
from dipole.benchmarks.run.engine import TaskResult
from dipole.benchmarks.suite import Sized
from dipole.benchmarks.suite_results import SuiteResults
from dipole.core.utils.progress import can_draw, console, duration
from dipole.core.utils.text import are, counted, fitted, printable, text_table


@dataclass(frozen=True)
class SuiteSummary:
    """How a suite ended."""

    done: int
    failed: tuple[TaskResult, ...]
    skipped: int

    def as_dict(self) -> dict[str, Any]:
        """Return the summary for `--json`."""
        return {"done": self.done, "skipped": self.skipped, "failed": [each.as_dict() for each in self.failed]}


def print_plan(console: Console, sized: Sized, plan: Plan) -> None:
    left = plan.jobs - plan.finished
    say(
        console,
        f"{sized.suite.name} ({sized.name}): {counted(plan.cells, 'cell')} from {counted(plan.jobs, 'run')}, "
        f"{plan.finished} finished, {left} to do.",
    )
    say(console, f"Estimated time with {plan.slots} at a time: {plan.time}.")
    if count := plan.time.reckoned:
        say(console, f"{count} of {counted(left, 'run')} {are(count)} reckoned: {reference.basis()}")
    print_cells(console, sized)
    say(console, f"\nSeeds of each row for 80 % power (t-test at 0.05, Holm over {counted(plan.tests, 'test')})\n")
    rows = [("column", "spread from", "difference", "spread", "seeds", "planned", "detectable")]
    for line, column in zip(plan.seeds, sized.columns, strict=True):
        spread, seeds, words = "-", "-", line.words
        if line.difference is not None and not words.startswith(number := f"{line.difference:.3g}"):
            words = f"{number}, {words}"
        if line.std is not None:
            spread, seeds = f"{line.std:.3g}", str(line.seeds or "over 1,000,000")
        least = table.detectable_cell(line.detectable or nan, column.unit).text or "-"
        rows.append((line.column, line.source, words, spread, seeds, str(len(sized.seeds)), least))
    say(console, text_table(rows, words=(0, 1, 2)))


def print_cells(console: Console, sized: Sized) -> None:
    say(console, f"recipe {sized.scale.recipe or '-'}, seeds {', '.join(map(str, sized.seeds))}")
    if sized.not_decidable:
        say(console, findings.of_mark(sized.not_decidable))
    if sized.scale.set:
        say(console, f"  every run: {' '.join(sized.scale.set)}")
    for column in sized.columns:
        say(console, "  ".join(filter(None, [f"  column {column.name}: {column.metric}", column.recipe, *column.set])))
    for row in sized.rows:
        say(console, "  ".join(filter(None, [f"  row {row.label}: {row.objective}", row.recipe, *row.set])))


def print_results(console: Console, results: SuiteResults) -> None:
    """Print our numbers and the printed ones, or the ranking and the results of a study."""
    shown = [tables.results_table(results)]
    if results.table is not None:
        shown = [tables.beside_table(results)]
        if claims := claim_tables.claims_table(results.manifest.name, results.claims()):
            known = [row for row in claims.rows if row[claims.head.index("estimate")].text]
            shown.append(replace(claims, rows=known).only("claim", "kind", "estimate", "p (Holm)", "verdict on ours"))
        if results.protocol_notes:
            say(console, "Our protocol is not the paper's: " + "; ".join(results.protocol_notes) + ".")
    elif results.manifest.kind == "study" and not results.manifest.not_decidable:
        shown.insert(0, tables.ranking_table(results.manifest.name, ranks(results)))
    for found in shown:
        if found.rows:
            print_table(console, found)
    if results.manifest.not_decidable:
        say(console, findings.of_mark(results.manifest.not_decidable))
    for line in findings.empty_columns(results):
        say(console, line)


def print_table(console: Console, table: ReportTable) -> None:
    """Print a table, as wide as the console. The notes of its cells are lines below them."""
    shown = table.without_empty_columns()
    rows = [shown.head]
    for row in shown.rows:
        rows.append(tuple(cell.text for cell in row))
        if any(cell.sub for cell in row):
            rows.append(tuple(cell.sub for cell in row))
    words = [column for column, is_number in enumerate(shown.numeric) if not is_number]
    say(console, f"\n{shown.title}\n\n{text_table(rows, words, console.width)}")


def print_summary(console: Console, sized: Sized, summary: SuiteSummary, runs: Path) -> None:
    say(
        console,
        f"{sized.suite.name} ({sized.name}): {counted(summary.done, 'run')} done, {summary.skipped} finished before, "
        f"{len(summary.failed)} failed.",
    )
    for result in summary.failed:
        say(console, f"  {result.task.hash}  {result.task.label}: {result.message}")
        say(console, f"    log: {result.log}")
        again = tables.repeat([*result.task.command, "--runs", str(runs)], result.task.processes)
        say(console, f"    again: {again}")


def say(console: Console, text: str) -> None:
    """Print plain lines, wrapped on a terminal: names are neither coloured nor read as markup."""
    if os.environ.get("COLUMNS") or console.is_terminal:
        text = fitted(text, console.width)
    console.print(printable(text), highlight=False, markup=False, soft_wrap=True)


def _left(seconds: float) -> str:
    if seconds <= 0:
        return "done any moment"
    return f"about {duration(seconds)} left"


def consoles() -> tuple[Console, Console]:
    """Return the consoles for results and for messages: stdout and stderr."""
    return console(), console(stderr=True)


class _TimeLeft(ProgressColumn):
    """The estimated time left. It counts down between two ended runs."""

    def render(self, task: ProgressTask) -> Text:
        return Text(_left(task.fields["end"] - time.monotonic()))


@contextmanager
def reporter(console: Console, total: int) -> Iterator[Callable[[int, int, float, str], None]]:
    """Show a progress bar on a terminal, and one plain line per ended run elsewhere.

    Yields a function of the number of finished and of failed runs, the seconds left, and the line to print.
    """
    draws = can_draw(console.file)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), _TimeLeft())
    with Progress(*columns, console=console, transient=True, disable=not draws) as progress:
        bar = progress.add_task("runs", total=total, end=time.monotonic())

        def report(done: int, failed: int, seconds: float, line: str) -> None:
            ended, description = done + failed, "runs"
            if failed:
                description = f"runs ({failed} failed)"
            progress.update(bar, completed=ended, description=description, end=time.monotonic() + seconds)
            if line and not draws:
                line = f"[{ended}/{total}] {line}"
                if ended < total:
                    line += f"; {_left(seconds)}"
            if line:
                say(console, line)

        yield report
