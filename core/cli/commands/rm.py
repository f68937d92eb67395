"""`dipole rm`: runs taken away for good."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from dipole.core.cli import Runner


def configure(parser: argparse.ArgumentParser) -> Runner:
    """Remove runs from a folder of runs."""
    parser.add_argument("run", metavar="RUN", nargs="+", help="folder of a run in DIR, or the first digits of its hash")
    parser.add_argument("--runs", type=Path, default=Path("runs"), metavar="DIR", help="folder of runs (default: runs)")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return run


def run(arguments: argparse.Namespace) -> int:
    from dipole.core.ground.errors import ConfigError, TrainingError
    from dipole.core.ground.files import why

    folders = list(dict.fromkeys(_folder(name, arguments.runs) for name in arguments.run))
    if not arguments.yes:
        for path in folders:
            print(f"{path}  {_size(path) / 1e6:,.1f} MB", file=sys.stderr)
        if not sys.stdin.isatty():
            raise ConfigError("nobody is there to be asked; say --yes to remove them.")
        print(
            f"Remove {len(folders)} run{'' if len(folders) == 1 else 's'}? [y/N] ", end="", file=sys.stderr, flush=True
        )
        if input().strip().lower() not in ("y", "yes"):
            raise ConfigError("nothing was removed.")
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


def _folder(name: str, runs: Path) -> Path:
    """The folder of a run that lies in the folder of runs itself, and that nobody trains."""
    from dipole.core.ground.errors import ConfigError
    from dipole.core.train.run_folder import find_run

    path = find_run(name, runs).path
    if path.is_symlink() or path.resolve().parent != runs.resolve():
        raise ConfigError(f"{path} does not lie in {runs}/: only runs of that folder are removed. See --runs.")
    if _is_running(path):
        raise ConfigError(f"{path} is being trained; end that first.")
    return path


def _is_running(path: Path) -> bool:
    from dipole.core.ground.errors import RecordError
    from dipole.core.record import read_record

    if _is_locked(path):
        return True
    try:
        return read_record(path / "record.json").status == "running"
    except RecordError:
        return False


def _is_locked(path: Path) -> bool:
    from filelock import FileLock, Timeout

    if not (path / ".lock").exists():
        return False
    try:
        with FileLock(path / ".lock", blocking=False):
            return False
    except Timeout:
        return True
    except OSError:
        return False


def _remove(path: Path) -> None:
    """Rename it first: a run that is half removed is no run."""
    import shutil

    away = path.with_name(f".removed-{path.name}")
    path.rename(away)
    shutil.rmtree(away)


def _size(path: Path) -> int:
    return sum(each.lstat().st_size for each in path.rglob("*") if each.is_file())
