"""One lock per job, so that several runners on one folder never do the same job at the same time.

It is a lock file, which the operating system releases with its process, also after kill -9, and a file that names
the process: host, boot, process namespace, number, and start time. Another host or container may share the folder
without sharing the lock. There a lock counts while its process renews the file, and for `STALE_AFTER` seconds more.
"""

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock, Timeout

from dipole.core.utils.files import atomic_write, remove_scratch
from dipole.core.utils.process import LONGEST_OWNER, describe_self, is_gone, is_locked
from dipole.core.utils.received import read_text

RENEW_EVERY = 10.0
STALE_AFTER = 120.0
GLIMPSE = 0.5


class TakenError(Exception):
    """Another living process holds the lock."""


@contextmanager
def locked(folder: Path, name: str) -> Iterator[None]:
    """Hold the lock `name` for the duration of the block. TakenError if a living process has it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    try:
        # `is_held` takes the lock for a moment to see whether it is free: that does not hold it.
        lock = FileLock(path.with_suffix(".lock")).acquire(timeout=GLIMPSE, poll_interval=0.01)
    except Timeout as error:
        raise TakenError(name) from error
    with lock:
        if _is_renewed_elsewhere(path):
            raise TakenError(name)
        remove_scratch(folder, f"{name}.*")  # of a runner that was killed while it wrote the same
        atomic_write(path, describe_self())
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
    """Return whether the lock FOLDER/NAME.json belongs to a living process."""
    return is_locked(path.with_suffix(".lock")) or _is_renewed_elsewhere(path)


def _is_renewed_elsewhere(path: Path) -> bool:
    """Return whether a process that may not share our locks renews this file.

    A file that is dated far in the future is not renewed: a living process dates it again every `RENEW_EVERY` seconds.
    """
    clock = path.parent / ".clock"  # ages are by the clock of the file system
    try:
        clock.touch()
        return _may_live(path) and abs(clock.stat().st_mtime - path.stat().st_mtime) < STALE_AFTER
    except FileNotFoundError:
        return False


def _may_live(path: Path) -> bool:
    """Return whether the process that a file names may live although its lock is free. Not for incomplete files.

    Of another name space or host it may, unless it was last renewed before this host's boot.
    """
    try:
        text = read_text(path, LONGEST_OWNER)
        owner: dict[str, Any] = json.loads(text)
        host, pid = str(owner["host"]), int(owner["pid"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return False
    here = json.loads(describe_self())
    if host != here["host"]:
        return True
    if "boot" not in owner or "namespace" not in owner:
        return False
    if owner["boot"] != here["boot"]:
        with suppress(OSError, RuntimeError):
            return path.stat().st_mtime > psutil.boot_time()
        return True  # the machine does not say when it was started
    return owner["namespace"] != here["namespace"] or (pid != os.getpid() and not is_gone(text))


def _renew(path: Path, stop: threading.Event) -> None:
    while not stop.wait(RENEW_EVERY):
        with suppress(OSError):
            os.utime(path)
