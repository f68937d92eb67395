"""`dipole list`: list names for recipes and objectives, and runs."""

import argparse
import sys
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dipole.core.cli.app import broken_plugins, by, listed_commands
from dipole.core.cli.output import print_result, write
from dipole.core.cli.parser import Runner, add_runs
from dipole.core.objectives.registry import Kind, registry
from dipole.core.record import is_run, run_folders, run_line
from dipole.core.train.domains import domains
from dipole.core.utils.errors import ConfigError
from dipole.core.utils.files import is_file, is_folder
from dipole.core.utils.plugins import SWITCH, shipped, switched_off
from dipole.core.utils.text import definitions, printable, text_table

REGISTERED = ("objectives", "regularizers", "diagnostics")
DECLARED_AS = dict.fromkeys(REGISTERED, "objectives")  # their entry points
KINDS = (*REGISTERED, "recipes", "suites", "domains", "commands")
RUNS = "runs"


def configure(parser: argparse.ArgumentParser) -> Runner:
    """List objectives, recipes, suites, domains, commands or runs."""
    text = f"one of {', '.join(KINDS)} (default: all of these), or {RUNS}"
    parser.add_argument("kind", nargs="?", choices=(*KINDS, RUNS), metavar="KIND", help=text)
    add_runs(parser, "folder of runs (default: runs)")
    parser.add_argument("--json", action="store_true", help="print one JSON object: kind -> list of entries")
    return run


def run(arguments: argparse.Namespace) -> int:
    kinds: tuple[str, ...] = KINDS
    if arguments.kind:
        kinds = (arguments.kind,)
    found = {kind: list_kind(kind, arguments.runs) for kind in kinds}
    lines = []
    for kind, entries in found.items():
        shown = [(entry["name"], f"{entry['summary']}{by(entry.get('package', ''))}") for entry in entries]
        # A run is a line. `print_result` wraps it on a terminal.
        width = 10_000 if kind == RUNS else 0
        lines += [f"{kind}:", definitions(shown, "  ", width) or "  (none)"]
    print_result(arguments.json, found, "\n".join(lines), indent=2)
    for declared in dict.fromkeys(DECLARED_AS.get(kind, kind) for kind in kinds):
        for error in broken_plugins(declared):
            write(f"cannot be used: {error}", sys.stderr)
    if switched_off():
        write(f"{SWITCH}=none: plug-ins of other packages are left out", sys.stderr)
    return 0


def list_kind(kind: str, runs: Path = Path(RUNS)) -> list[dict[str, Any]]:
    """Return name, summary and other facts of each entry of a kind. `runs` is the folder of runs."""
    if kind == RUNS:
        return _runs(runs)
    if kind in ("recipes", "suites"):
        return _files(kind)
    if kind == "domains":
        keys = ("name", "summary", "adapter", "package")
        return [{key: getattr(domain, key) for key in keys} for domain in domains().values()]
    if kind == "commands":
        return listed_commands()
    kinds: dict[str, Kind] = {"objectives": "objective", "regularizers": "regularizer", "diagnostics": "diagnostic"}
    facts = ("name", "aliases", "summary", "source", "weight", "package")
    return [{key: getattr(entry, key) for key in facts} for entry in registry.entries(kinds[kind])]


def _runs(folder: Path) -> list[dict[str, Any]]:
    wrong = ""
    if not is_folder(folder):
        wrong = "it is a file" if is_file(folder) else "no such folder"
    elif is_run(folder):
        wrong = "it is the folder of one run"
    if wrong and (folder != Path(RUNS) or folder.exists()):
        raise ConfigError(f"--runs {folder}: {wrong}. Give a folder that `dipole train` or `dipole bench` wrote.")
    found = [run_line(path) for path in run_folders(folder)]
    if not found:
        return []
    rows = [(r.status, r.run, f"seed {'-' if r.seed is None else r.seed}", f"step {r.steps}") for r in found]
    entries = []
    for r, line in zip(found, text_table(rows, words=range(4), width=10_000).split("\n"), strict=True):
        summary = printable(f"{line}  {r.objective}", keep="").rstrip()
        if r.problem:
            summary = f"{r.status}: {r.problem}"
        entries.append({"name": r.name, "summary": summary} | asdict(r))
    return entries


def _files(kind: str) -> list[dict[str, Any]]:
    entries = []
    for name, path in shipped(kind).items():
        try:
            facts = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:  # list the others all the same
            facts = {"title": f"cannot be read: {error}"}
        entry: dict[str, Any] = {"name": name, "summary": facts.get("title") or facts.get("description", "")}
        if kind == "recipes":
            entry["domain"] = facts.get("domain")
        else:
            entry["scales"] = list(facts.get("scale", ()))
        entries.append(entry | {"path": str(path)})
    return entries
