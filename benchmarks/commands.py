"""`dipole bench`, `report`, `results`, `sweep`, `demo`: arguments only. Nothing heavy is imported before they run."""

import argparse
import sys
from dataclasses import asdict
from math import inf
from pathlib import Path
from shlex import join, quote
from typing import Any

from dipole.core.cli.output import json_answer, print_result, write
from dipole.core.cli.parser import Runner, above_zero, add_overrides, positive, resumable, to_path, whole
from dipole.core.utils.text import counted, definitions

NEXT = """
Next steps:
  dipole train digits-simclr --set 'objective=hcl + 0.2*dp'       # train an objective of your own
  dipole list objectives                                          # `dipole show NAME` explains one
  dipole list runs{runs}  # the runs of the demo. `dipole compare RUN OTHER`
  dipole bench --plan                                             # the papers' tables with their times"""
RUNS = "folders of runs, results files and folders of them. `shipped`: the results that come with dipole"


def bench(parser: argparse.ArgumentParser) -> Runner:
    """Run a suite: recipes x objectives x seeds."""
    add = parser.add_argument
    add("suite", nargs="?", metavar="SUITE", help="a shipped suite or a suite file. Without it: list the suites")
    add("--scale", choices=("small", "paper"), help="small (default, if the suite has it) or the paper's")
    add_overrides(parser, "change settings of every run, such as text.senteval=FOLDER")
    _running(parser)
    add("--seeds", type=positive, metavar="N", help="seeds 0 to N-1 in place of the suite's own")
    text = "print jobs, estimated time and seeds needed, and stop. Without SUITE: a line for every suite"
    add("--plan", action="store_true", help=text)
    effect = above_zero("a number above 0, in units of the columns")
    add("--effect", type=effect, metavar="D", help="difference that the plan's seeds are to show")
    text = "do not repeat the runs of this results file, or of a folder of them. `shipped`: those that come with dipole"
    add("--known", metavar="PLACE", action="append", default=[], type=_place, help=text)
    add("--all", action="store_true", help="every shipped suite, the shortest first, on this machine")
    text = "with --all: leave out suites that take longer by the plan"
    add("--within", type=above_zero("a number of hours above 0"), default=inf, metavar="HOURS", help=text)
    _json(parser)

    def run(arguments: argparse.Namespace) -> int:
        a = arguments
        alone = {"--plan": a.plan, "--effect": a.effect, "--seeds": a.seeds, "--set": a.overrides}
        given = [option for option, value in alone.items() if value]
        if a.within < inf and not a.all:
            parser.error("--within belongs to --all")
        if a.all and a.suite:
            parser.error(f"--all runs every shipped suite: leave out {a.suite!r}, or --all")
        if a.all and a.engine != "local":
            parser.error("--all runs on this machine. Give --engine a SUITE at a time")
        if a.all and given:
            parser.error(f"{', '.join(given)} cannot be used with --all")
        if a.effect is not None and not (a.plan and a.suite):
            parser.error("--effect belongs to --plan of one suite")
        if not a.suite and not a.all and (a.overrides or a.seeds or a.engine != "local"):
            parser.error("--set, --seeds and --engine need a SUITE; without arguments `dipole bench` lists them")
        if a.suite or a.all or a.plan:
            return _bench(a)
        return _print_suites(a.json)

    return resumable(run)


def sweep(parser: argparse.ArgumentParser) -> Runner:
    """Search a space of settings, then train the winner's seeds."""
    add = parser.add_argument
    add("recipe", metavar="RECIPE", help="a shipped recipe or a .toml file")
    text = (
        "what varies: log(LOW, HIGH), uniform(LOW, HIGH), int(LOW, HIGH), logint(LOW, HIGH), choice(A, B, ...). "
        "KEY is as for --set, or objective.TERM.OPTION or objective.TERM.weight"
    )
    space: dict[str, Any] = {"nargs": "+", "action": "extend", "default": [], "required": True}
    add("--space", metavar="KEY=KIND(...)", help=text, **space)
    add("--trials", type=positive, default=20, metavar="N", help="of the whole search (default 20)")
    add("--metric", required=True, metavar="NAME", help="a number of the evaluation, such as linear/accuracy")
    add("--minimize", action="store_true", help="less is better")
    add("--seeds", type=positive, default=3, metavar="N", help="seeds 0 to N-1 of the winner, on the test part")
    add_overrides(parser, "change settings of every run")
    _running(parser)
    add("--name", metavar="NAME", help="of the search, by which it is continued (default: by content)")
    add("--seed", type=whole, default=0, metavar="N", help="of the proposals (default 0)")
    _json(parser)
    return resumable(_sweep)


def report(parser: argparse.ArgumentParser) -> Runner:
    """Write an HTML report of recorded runs."""
    add = parser.add_argument
    add("runs", type=_place, nargs="+", metavar="RUNS", help=RUNS)
    text = "NAME.html (default report.html), NAME.md, or a folder for both, the tables and the figures"
    add("-o", "--out", "--output", type=to_path, default=Path("report.html"), metavar="PATH", help=text)
    text = "every chart as SVG, PDF and Vega-Lite spec, with its numbers as a LaTeX table"
    add("--figures", type=to_path, metavar="FOLDER", help=text)
    _json(parser)
    return _report


def results(parser: argparse.ArgumentParser) -> Runner:
    """Keep finished runs in small files, or list such files."""
    add = parser.add_argument
    add("what", choices=("add", "list"), help="add the runs of folders to results files, or list what the files hold")
    add("places", nargs="+", type=_place, metavar="PLACE", help=RUNS)
    add("-o", "--out", "--to", type=to_path, metavar="DIR", help="folder of results files, one for each suite")
    text = "where DIR has other results of a run, or another suite, take the new"
    add("--replace", action="store_true", help=text)
    _json(parser)

    def run(arguments: argparse.Namespace) -> int:
        if (arguments.what == "add") != (arguments.out is not None):
            parser.error("`dipole results add PLACE --out DIR` adds, `dipole results list PLACE` lists")
        return _results(arguments)

    return run


def demo(parser: argparse.ArgumentParser) -> Runner:
    """Compare objectives on embedded data and show the result."""
    add = parser.add_argument
    text = "all (default): six objectives in vision, text and rl. vision: four objectives on digits"
    add("part", nargs="?", choices=("all", "vision"), default="all", help=text)
    _running(parser)
    text = "report (default demo.html)"
    add("-o", "--out", "--output", type=to_path, default=Path("demo.html"), metavar="PATH", help=text)
    _json(parser)
    names = ("engine", "slurm", "jobs", "threads", "out")
    defaults = {name: parser.get_default(name) for name in names}

    def run(arguments: argparse.Namespace) -> int:
        given = [name for name, default in defaults.items() if getattr(arguments, name) != default]
        if arguments.part == "vision" and given:
            odd = ", ".join(f"--{name}" for name in given)
            parser.error(f"`dipole demo vision` has only --runs and --json, not {odd}")
        return _demo(arguments)

    return resumable(run)


def _json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object (other messages go to stderr)")


def _running(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--runs", type=to_path, default=Path("runs"), metavar="DIR", help="folder of runs (default: runs)")
    text = "processes here, a Ray cluster, or SLURM jobs"
    add("--engine", choices=("local", "ray", "slurm"), default="local", help=text)
    slurm: dict[str, Any] = {"nargs": "+", "action": "extend", "default": [], "type": _option}
    text = "options of sbatch with --engine slurm, such as partition=gpu time=600 gpus_per_node=1"
    add("--slurm", metavar="KEY=VALUE", help=text, **slurm)
    add("--jobs", type=positive, metavar="N", help="jobs at a time (default: one per GPU or core)")
    text = "computing threads of a job (default: OMP_NUM_THREADS, or one where runs share a process, or a job's cores)"
    add("--threads", type=positive, metavar="N", help=text)


def _named_options(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Return these options, by the names that the functions behind the commands give them."""
    return {name: getattr(arguments, name) for name in names}


def _print_suites(as_json: bool) -> int:
    from dipole.benchmarks.suite import read_suite, suites

    found = [read_suite(name) for name in suites()]
    facts = [{"name": each.name, "scales": list(each.scale), "title": each.title} for each in found]
    text = definitions((each.name, f"{each.title} ({', '.join(each.scale)})") for each in found)
    return print_result(as_json, facts, text)


def _bench(arguments: argparse.Namespace) -> int:
    from dipole.benchmarks.run.bench import bench, bench_all, plan_all

    a = arguments
    common = _named_options(a, "runs", "jobs", "threads", "known")
    with json_answer(a.json) as answer:
        if a.all:
            code = bench_all(a.scale or "small", **common, within=a.within, answer=answer)
        elif a.suite is None:
            code = plan_all(a.scale or "small", **common, answer=answer)
        else:
            own = _named_options(a, "engine", "effect", "overrides", "seeds")
            code = bench(a.suite, a.scale, **common, **own, plan_only=a.plan, slurm=dict(a.slurm), answer=answer)
    if not a.plan and not a.json:
        shipped = _place("shipped")
        places = join("shipped" if place == shipped else str(place) for place in [a.runs, *a.known])
        write(f"Report: dipole report {places} -o report.html")
    return code


def _results(arguments: argparse.Namespace) -> int:
    from dipole.benchmarks.results_command import add, contents
    from dipole.core.utils.progress import duration
    from dipole.core.utils.text import text_table

    a = arguments
    with json_answer(a.json) as answer:
        if a.what == "list":
            found = contents(a.places)
        else:
            found = add(a.places, a.out, a.replace)
        answer["suites"] = [{**asdict(each), "path": str(each.path)} for each in found]
    conflicts = [text for each in found for text in each.conflicts]
    left_out = [text for each in found for text in each.left_out]
    is_unchanged = bool(conflicts) and not a.replace
    if not a.json:
        rows = [("suite", "runs", "new", "computing time", "kB")]
        for e in found:
            rows.append((e.suite, f"{e.runs} of {e.wanted}", str(e.new), duration(e.seconds), f"{e.bytes / 1000:.0f}"))
        lines = [text_table(rows), *(f"conflict: {text}" for text in conflicts)]
        if is_unchanged:
            lines.append("The file keeps its results and its suite. Use --replace to take the new ones.")
        write("\n".join([*lines, *(f"left out: {text}" for text in left_out)]))
    return int(bool(left_out) or is_unchanged)


def _sweep(arguments: argparse.Namespace) -> int:
    from dipole.benchmarks.sweep.search import sweep

    a = arguments
    with json_answer(a.json) as answer:
        where = _named_options(a, "runs", "engine", "jobs", "threads")
        what = _named_options(a, "trials", "minimize", "seeds", "overrides", "name", "seed")
        code = sweep(a.recipe, a.space, a.metric, **what, **where, slurm=dict(a.slurm), answer=answer)
        answer |= {"runs": str(a.runs), "ok": code == 0}
    return code


def _demo(arguments: argparse.Namespace) -> int:
    a = arguments
    with json_answer(a.json) as answer:
        if a.part == "vision":
            from dipole.vision.demo import demo as vision_demo

            code, picture = 0, Path("demo.png")
            vision_demo(a.runs, picture)
            answer |= {"runs": str(a.runs), "picture": str(picture), "ok": True}
            text = f"Picture of the distances: {picture}"
        else:
            from dipole.benchmarks.report.write import check_output, write_report
            from dipole.benchmarks.run.bench import bench

            check_output(a.out)
            where = _named_options(a, "runs", "engine", "jobs", "threads")
            code = bench("demo", **where, slurm=dict(a.slurm), answer=answer, mentions_shipped=False)
            write_report(a.runs, a.out)
            answer |= {"report": str(a.out)}
            text = f"Report: {a.out}"
    if not a.json:
        write(text)
    if code == 0 and not a.json:
        write(_next(a.runs))
    return code


def _next(runs: Path) -> str:
    """Return the hints at the end of a demo, with aligned comments."""
    option = ""
    if runs != Path("runs"):
        option = f" --runs {quote(str(runs))}"
    return NEXT.format(runs=f"{option:<46}")


def _report(arguments: argparse.Namespace) -> int:
    from dipole.benchmarks.report.write import named_charts, write_report

    with json_answer(arguments.json) as answer:
        found = write_report(arguments.runs, arguments.out, arguments.figures)
        facts: dict[str, int | str] = dict(found.facts)
        facts |= {name: int(value) for name, value in found.facts.items() if value.isdecimal()}
        answer |= {"report": str(arguments.out), "facts": facts}
    is_unread = "problems" in found.facts and found.facts["runs"] == "0"
    if is_unread:
        write(f"nothing could be read: `Problems` in {arguments.out} says why", sys.stderr)
    if not arguments.json:
        write(f"{arguments.out}: " + ", ".join(f"{name}: {value}" for name, value in found.facts.items()))
    if not arguments.json and arguments.figures is not None:
        charts = counted(len(named_charts(found)), "chart")
        write(f"{arguments.figures}: {charts}, each as .svg, .pdf, .tex and .vl.json")
    return int(is_unread)


def _option(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key or not value:
        raise argparse.ArgumentTypeError(f"must be of the form KEY=VALUE, got {text!r}")
    return key, value


def _place(text: str) -> Path:
    """Return a path, that of the results that come with dipole for "shipped"."""
    if text != "shipped":  # SHIPPED_NAME, without what its module loads
        return to_path(text)
    from dipole.benchmarks.results_file import SHIPPED

    return SHIPPED
