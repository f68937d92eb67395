"""The terminal output of `dipole bench`: the plan, progress with the time left, results and failures."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Task as ProgressTask
from rich.table import Table
from rich.text import Text

from dipole.benchmarks.plan import Plan
from dipole.benchmarks.report import tables
from dipole.benchmarks.report.results import SuiteResults
from dipole.benchmarks.report.terminal_table import print_table
from dipole.benchmarks.run import reference
from dipole.benchmarks.run.tasks import Result
from dipole.benchmarks.suite import Sized
from dipole.core.utils.console import can_draw, console
from dipole.core.utils.progress import duration
from dipole.core.utils.text import are, counted


@dataclass(frozen=True)
class Summary:
    """How a suite ended."""

    done: int
    failed: tuple[Result, ...]
    skipped: int


def print_plan(console: Console, sized: Sized, plan: Plan) -> None:
    left = plan.jobs - plan.finished
    say(
        console,
        f"{sized.suite.name} ({sized.name}): {counted(plan.cells, 'cell')} from {counted(plan.jobs, 'run')}, "
        f"{plan.finished} finished, {left} to do.",
    )
    say(console, f"Estimated time with {plan.slots} at a time: {plan.time}.")
    if plan.time.reckoned:
        say(
            console, f"{plan.time.reckoned} of {counted(left, 'run')} {are(plan.time.reckoned)} reckoned: {reckoning()}"
        )
    print_cells(console, sized)
    title = "Seeds per arm for 80 % power (two-sided t-test at 0.05)"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("column", "difference", "spread", "spread from", "seeds", "planned"):
        table.add_column(name, justify="left" if name in ("column", "spread from") else "right", overflow="fold")
    for line in plan.seeds:
        seeds = "-" if line.seeds is None else str(line.seeds)
        spread = "-" if line.std != line.std else f"{line.std:.3g}"
        planned = str(len(sized.seeds))
        table.add_row(escape(line.column), f"{line.difference:.3g}", spread, line.source, seeds, planned)
    console.print(table)


def reckoning() -> str:
    """Return the basis of an estimated time."""
    here = reference.calibration()
    pace = reference.table()["steps"][0]["pace"]
    return (
        f"by short runs on {reference.machines()}, times {here / pace:.2g} for the pace of this machine's processor, "
        "idle; a GPU is faster, a machine that is shared slower. Earlier runs of the folder come first."
    )


def print_cells(console: Console, sized: Sized) -> None:
    """Print the rows and columns of a suite with the settings of each."""
    say(console, f"recipe {sized.scale.recipe or '-'}, seeds {', '.join(map(str, sized.seeds))}")
    if sized.scale.set:
        say(console, f"  every run: {' '.join(sized.scale.set)}")
    for kind, lines in (
        ("column", [(c.name, c.metric, [c.recipe or "", *c.set]) for c in sized.columns]),
        ("row", [(r.label, r.objective, [r.recipe or "", *r.set]) for r in sized.rows]),
    ):
        for name, what, settings in lines:
            say(console, f"  {kind} {name}: {'  '.join([what, *filter(None, settings)])}")


def print_results(console: Console, results: SuiteResults) -> None:
    """Ours beside the printed numbers, or the ranking and the results of a study."""
    if results.table is not None:
        claims = tables.short_claims_table(results)
        shown = [tables.beside_table(results), *([claims] if claims else [])]
        if results.protocol_notes:
            say(console, "Our protocol is not the paper's: " + "; ".join(results.protocol_notes) + ".")
    elif results.manifest.kind == "study":
        shown = [tables.ranking_table(results.manifest.name, results.ranks()), tables.results_table(results)]
    else:
        shown = [tables.results_table(results)]
    for found in shown:
        if not found.rows:
            continue
        print_table(console, found)
    for line in results.empty_columns:
        say(console, line)


def print_summary(console: Console, sized: Sized, summary: Summary, runs: Path) -> None:
    say(
        console,
        f"{sized.suite.name} ({sized.name}): {counted(summary.done, 'run')} done, {summary.skipped} "
        f"{'was' if summary.skipped == 1 else 'were'} finished before, {len(summary.failed)} failed.",
    )
    for result in summary.failed:
        say(console, f"  {result.task.hash}  {result.task.label}: {result.message}")
        say(console, f"    log: {result.log}")
        again = tables.repeat([*result.task.command, "--runs", str(runs)], result.task.processes)
        say(console, f"    again: {again}")


def say(console: Console, text: str) -> None:
    """One plain line, however wide the terminal: names are neither coloured nor read as markup."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _left(seconds: float | None) -> str:
    if seconds is None:
        return "time left unknown"
    return f"about {duration(seconds)} left" if seconds > 0 else "done any moment"


def consoles(given: Console | None) -> tuple[Console, Console]:
    """Return the consoles for results and for messages: stdout and stderr, or the given one for both."""
    return (given, given) if given is not None else (console(), console(stderr=True))


class _TimeLeft(ProgressColumn):
    """The estimate of when all will have ended, counted down between one ended run and the next."""

    def render(self, task: ProgressTask) -> Text:
        end = task.fields["end"]
        return Text(_left(None if end is None else end - time.monotonic()))


Report = Callable[[int, int, float | None, str], None]


class reporter:  # noqa: N801
    """A progress bar on a terminal, one plain line per ended run otherwise."""

    def __init__(self, console: Console, total: int) -> None:
        self.console, self.total = console, total
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            _TimeLeft(),
        )
        self.progress = Progress(*columns, console=console, transient=True) if can_draw(console.file) else None

    def __enter__(self) -> Report:
        if self.progress is not None:
            self.progress.start()
            self.bar = self.progress.add_task("runs", total=self.total, end=None)
        return self.report

    def __exit__(self, *details: object) -> None:
        if self.progress is not None:
            self.progress.stop()

    def report(self, done: int, failed: int, seconds: float | None, line: str) -> None:
        if self.progress is not None:
            description = f"runs ({failed} failed)" if failed else "runs"
            end = None if seconds is None else time.monotonic() + seconds
            self.progress.update(self.bar, completed=done + failed, description=description, end=end)
            if line:
                say(self.console, line)
        elif line:
            say(
                self.console,
                f"[{done + failed}/{self.total}] {line}"
                + (f"; {_left(seconds)}" if done + failed < self.total else ""),
            )
