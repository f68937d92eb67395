"""`dipole rm`: runs taken away for good."""

from __future__ import annotations

import argparse
import json
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
    from dipole.core.ground.errors import TrainingError
    from dipole.core.ground.files import why
    from dipole.core.ground.text import counted

    folders = list(dict.fromkeys(_folder(name, arguments.runs, arguments.force) for name in arguments.run))
    if not arguments.yes:
        for path in folders:
            print(f"{path}  {_size(path) / 1e6:,.1f} MB", file=sys.stderr)
        ask(f"Remove {counted(len(folders), 'run')}?", "to remove them", "nothing was removed")
    for path in folders:
        try:
            _remove(path)
        except OSError as error:
            raise TrainingError(f"cannot remove {path}: {why(error)}") from error
    if arguments.json:
        print(json.dumps({"removed": [str(path) for path in folders]}))
    else:
        print(*(f"removed {path}" for path in folders), sep="\n")
    return 0


def _folder(name: str, runs: Path, force: bool) -> Path:
    """The folder of a run that lies in the folder of runs itself, and that nobody trains."""
    from dipole.core.ground.errors import ConfigError
    from dipole.core.train.run_folder import find_run

    path = find_run(name, runs).path
    if path.is_symlink() or path.resolve().parent != runs.resolve():
        raise ConfigError(f"{path} does not lie in {runs}/: only runs of that folder are removed. See --runs.")
    _check_idle(path, force)
    return path


def _check_idle(path: Path, force: bool) -> None:
    """Refuse a run that is trained; of one whose process is gone say so, as its record still calls it running."""
    from dipole.core.ground.errors import ConfigError
    from dipole.core.ground.process import OWNER, host_in, is_gone, lives_here, pid_in

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
    from dipole.core.ground.errors import RecordError
    from dipole.core.record import read_record

    try:
        return read_record(path / "record.json").status == "running"
    except RecordError:
        return False


def _is_locked(path: Path) -> bool:
    from dipole.core.ground.process import is_locked

    with suppress(OSError):
        return is_locked(path / ".lock")
    return False


def _remove(path: Path) -> None:
    """Rename it first: a run that is half removed is no run."""
    import shutil

    away = path.with_name(f".removed-{path.name}")
    shutil.rmtree(away, ignore_errors=True)  # of an attempt that was interrupted
    path.rename(away)
    shutil.rmtree(away)


def _size(path: Path) -> int:
    return sum(each.lstat().st_size for each in path.rglob("*") if each.is_file())
