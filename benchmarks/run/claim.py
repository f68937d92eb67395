"""Who works on a job: a claim per job, so that several runners on one folder repeat nothing and lose nothing.

A claim is a lock file that the operating system gives back with its process, also after kill -9, and beside it a file
that names the process. Hosts that share a folder need not share locks: there the named process is believed as long as
it renews its file, and for `STALE_AFTER` seconds more.
"""

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from dipole.core.ground.files import atomic_write
from dipole.core.ground.process import LONGEST_OWNER
from dipole.core.ground.received import read_json

RENEW_EVERY = 10.0
STALE_AFTER = 120.0
GLIMPSE = 0.5


class TakenError(Exception):
    """Another living process holds the claim."""


@contextmanager
def claim(folder: Path, name: str) -> Iterator[None]:
    """Hold the claim `name` for the duration of the block; TakenError if a living process has it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    try:
        # Who asks whether a lock is held takes it for a moment (`is_held`): that is nobody's claim.
        lock = FileLock(_lock_of(path)).acquire(timeout=GLIMPSE, poll_interval=0.01)
    except Timeout as error:
        raise TakenError(name) from error
    with lock:
        if _is_renewed_elsewhere(path):
            raise TakenError(name)
        atomic_write(path, json.dumps({"host": socket.gethostname(), "pid": os.getpid()}))
        stop = threading.Event()
        renewal = threading.Thread(target=_renew, args=(path, stop), daemon=True)
        renewal.start()
        try:
            yield
        finally:
            stop.set()
            renewal.join()
            path.unlink(missing_ok=True)


def is_held(path: Path) -> bool:
    """Whether the claim of a file FOLDER/NAME.json belongs to a living process."""
    return is_locked(_lock_of(path)) or _is_renewed_elsewhere(path)


def _lock_of(path: Path) -> Path:
    return path.with_suffix(".lock")


def is_locked(path: Path) -> bool:
    """Whether a living process of this host holds a lock file."""
    if not path.exists():
        return False
    try:
        with FileLock(path, blocking=False):
            return False
    except Timeout:
        return True


def _is_renewed_elsewhere(path: Path) -> bool:
    """Whether a process of another host renews this file; an unreadable one (never written whole) is nobody's."""
    try:
        owner = read_json(path, LONGEST_OWNER)
        host, renewed = str(owner["host"]), path.stat().st_mtime
        int(owner["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return host != socket.gethostname() and _now(path.parent) - renewed < STALE_AFTER


def _renew(path: Path, stop: threading.Event) -> None:
    while not stop.wait(RENEW_EVERY):
        with suppress(OSError):
            os.utime(path)


def _now(folder: Path) -> float:
    """The clock of the file system, which the claim's own time comes from."""
    clock = folder / ".clock"
    clock.touch()
    return clock.stat().st_mtime
