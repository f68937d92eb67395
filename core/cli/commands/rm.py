"""`dipole rm`: remove runs."""

import argparse
import json
import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path

from dipole.core.cli.output import confirm, write
from dipole.core.cli.parser import Runner, add_runs
from dipole.core.record import read_record
from dipole.core.train.run_folder import find_run
from dipole.core.utils.errors import ConfigError, ReceivedError, RecordError
from dipole.core.utils.files import why
from dipole.core.utils.process import OWNER, is_gone, is_locked, lives_here, read_owner
from dipole.core.utils.received import read_text
from dipole.core.utils.text import counted, size


def configure(parser: argparse.ArgumentParser) -> Runner:
    """Remove runs from a folder of runs."""
    add = parser.add_argument
    add("run", metavar="RUN", nargs="+", help="folder of a run in DIR, or the first digits of its hash")
    add_runs(parser, "folder of runs (default: runs)")
    add("--yes", action="store_true", help="do not ask")
    text = "also remove runs that their record calls running, if their process cannot be checked here"
    add("--force", action="store_true", help=text)
    add("--json", action="store_true", help="print one JSON object")
    return run


def run(arguments: argparse.Namespace) -> int:
    folders = list(dict.fromkeys(_folder(name, arguments.runs, arguments.force) for name in arguments.run))
    if not arguments.yes:
        for path in folders:
            weight = sum(each.lstat().st_size for each in path.rglob("*") if each.is_file())
            write(f"{path}  {size(weight)}", sys.stderr)
        confirm(f"Remove {counted(len(folders), 'run')}?", "to remove them", "nothing was removed")
    removed: list[str] = []
    failed: dict[str, str] = {}
    for path in folders:
        if problem := _remove(path):
            failed[str(path)] = problem
            write(f"error: {problem}", sys.stderr)
            continue
        removed.append(str(path))
        if not arguments.json:
            write(f"removed {path}")
    if arguments.json:
        told = [{"run": path, "message": problem} for path, problem in failed.items()]
        print(json.dumps({"removed": removed, "failed": told}))
    return 1 if failed else 0


def _folder(name: str, runs: Path, force: bool) -> Path:
    """Return the folder of a run. It must be in `runs` itself and not be training."""
    given = find_run(name, runs).path
    if given.is_symlink():
        raise ConfigError(f"{given} is a link to {given.resolve()}. Remove the link with: rm {given}")
    real = given.resolve()
    if real.parent != runs.resolve():
        raise ConfigError(f"{given} is not in {runs}/. Give its folder of runs with --runs.")
    path = runs / real.name
    _check_idle(path, force)
    return path


def _check_idle(path: Path, force: bool) -> None:
    """Refuse a run that is training. Tell the user if its process was killed, as its record still says running."""
    owner, locked, running = "", False, False
    with suppress(ReceivedError):
        owner = read_text(path / OWNER)
    told = {"pid": "unknown", "host": "an unknown host"} | read_owner(owner)
    with suppress(OSError):
        locked = is_locked(path / ".lock")
    with suppress(RecordError):
        running = read_record(path / "record.json").status == "running"
    if locked or lives_here(owner):
        raise ConfigError(f"{path} is being trained by process {told['pid']}. End that first.")
    if is_gone(owner):  # an orderly end removes the file
        write(f"{path} was being trained when its process was killed.", sys.stderr)
    elif running and not force:
        raise ConfigError(
            f"{path} is running according to its record, and process {told['pid']} of {told['host']} cannot "
            "be checked from here. Add --force if that process has ended."
        )


def _remove(path: Path) -> str:
    """Rename a folder and remove it, so that no half-removed run is left. Return the problem, or ""."""
    away = path.with_name(f".removed-{path.name}")
    try:
        shutil.rmtree(away, ignore_errors=True)  # left by an interrupted attempt
        path.rename(away)
    except OSError as error:
        return f"cannot remove {path}: {why(error)} Nothing was changed."
    try:
        shutil.rmtree(away)
    except OSError as error:
        return (
            f"cannot remove all of {path}: {os.fspath(error.filename or away)}: {why(error)} The rest is in "
            f"{away}, which commands ignore. Remove that folder later."
        )
    return ""
