"""`dipole rm`: runs taken away for good."""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import suppress
from pathlib import Path

from dipole.core.cli import Runner
from dipole.core.cli.asking import ask


def configure(parser: argparse.ArgumentParser) -> Runner:
    """Remove runs from a folder of runs."""
    parser.add_argument("run", metavar="RUN", nargs="+", help="folder of a run in DIR, or the first digits of its hash")
    parser.add_argument("--runs", type=Path, default=Path("runs"), metavar="DIR", help="folder of runs (default: runs)")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument(
        "--force",
        action="store_true",
        help="also runs whose record says running, by a process of which nothing is known here",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return run


def run(arguments: argparse.Namespace) -> int:
    from dipole.core.utils.text import counted, size

    folders = list(dict.fromkeys(_folder(name, arguments.runs, arguments.force) for name in arguments.run))
    if not arguments.yes:
        for path in folders:
            print(f"{path}  {size(_bytes(path))}", file=sys.stderr)
        ask(f"Remove {counted(len(folders), 'run')}?", "to remove them", "nothing was removed")
    removed: list[str] = []
    failed: dict[str, str] = {}
    for path in folders:
        if problem := _remove(path):
            failed[str(path)] = problem
            print(f"error: {problem}", file=sys.stderr)
            continue
        removed.append(str(path))
        if not arguments.json:
            print(f"removed {path}")
    if arguments.json:
        told = [{"run": path, "message": problem} for path, problem in failed.items()]
        print(json.dumps({"removed": removed, "failed": told}))
    return 1 if failed else 0


def _folder(name: str, runs: Path, force: bool) -> Path:
    """The folder of a run that lies in the folder of runs itself, by its name there, and that nobody trains."""
    from dipole.core.train.run_folder import find_run
    from dipole.core.utils.errors import ConfigError

    given = find_run(name, runs).path
    if given.is_symlink():
        raise ConfigError(
            f"{given} is a link to {given.resolve()}, which is left alone; the link goes with: rm {given}"
        )
    real = given.resolve()
    if real.parent != runs.resolve():
        raise ConfigError(f"{given} does not lie in {runs}/: only runs of that folder are removed. See --runs.")
    path = runs / real.name
    _check_idle(path, force)
    return path


def _check_idle(path: Path, force: bool) -> None:
    """Refuse a run that is trained; of one whose process is gone say so, as its record still calls it running."""
    from dipole.core.utils.errors import ConfigError
    from dipole.core.utils.process import OWNER, host_in, is_gone, lives_here, pid_in

    try:
        owner = (path / OWNER).read_text(encoding="utf-8", errors="replace")
    except OSError:
        owner = ""
    if _is_locked(path) or lives_here(owner):
        raise ConfigError(f"{path} is being trained (process {pid_in(owner)}); end that first.")
    if is_gone(owner):  # a file that an orderly end takes away
        print(f"{path} was being trained when its process was killed.", file=sys.stderr)
    elif _says_running(path) and not force:
        raise ConfigError(
            f"{path} is running by its record, and whether process {pid_in(owner)} of {host_in(owner)} still trains it "
            "cannot be told from here. If it does not: --force."
        )


def _says_running(path: Path) -> bool:
    from dipole.core.record import read_record
    from dipole.core.utils.errors import RecordError

    try:
        return read_record(path / "record.json").status == "running"
    except RecordError:
        return False


def _is_locked(path: Path) -> bool:
    from dipole.core.utils.process import is_locked

    with suppress(OSError):
        return is_locked(path / ".lock")
    return False


def _remove(path: Path) -> str:
    """Remove a folder, renamed first, as a run half removed is no run; say what is in the way, "" for nothing."""
    import shutil

    from dipole.core.utils.files import why

    away = path.with_name(f".removed-{path.name}")
    try:
        shutil.rmtree(away, ignore_errors=True)  # of an attempt that was interrupted
        path.rename(away)
    except OSError as error:
        return f"cannot remove {path}: {why(error)} It is as it was."
    try:
        shutil.rmtree(away)
    except OSError as error:
        return (
            f"cannot remove all of {path}: {os.fspath(error.filename or away)}: {why(error)} What is left lies in "
            f"{away}, which no command takes for a run: remove that folder once this is cured."
        )
    return ""


def _bytes(path: Path) -> int:
    return sum(each.lstat().st_size for each in path.rglob("*") if each.is_file())
