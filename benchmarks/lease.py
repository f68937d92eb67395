"""Who works on a job: a claim file per job, so that several runners on one folder repeat nothing and lose nothing.

A claim names the process (host, pid and its start time, since pids are reused) and is renewed while the process lives.
On the same host a claim ends with its process, at once and even after kill -9; on another host it ends when it has not
been renewed for `STALE_AFTER` seconds.
"""

import fcntl
import json
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

RENEW_EVERY = 10.0
STALE_AFTER = 120.0


class TakenError(Exception):
    """Another living process holds the claim."""


@contextmanager
def claim(folder: Path, name: str) -> Iterator[None]:
    """Hold the claim `name` for the duration of the block; TakenError if a living process has it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    with _exclusive(folder):
        if is_held(path):
            raise TakenError(name)
        _write(path)
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
    """Whether a claim file belongs to a living process; an unreadable one (never written whole) to none."""
    try:
        owner = json.loads(path.read_text(encoding="utf-8"))
        host, pid, started = str(owner["host"]), int(owner["pid"]), str(owner["started"])
        renewed = path.stat().st_mtime
    except (OSError, ValueError, KeyError, TypeError):
        return False
    if host == socket.gethostname():
        return process_start(pid) == started
    return _now(path.parent) - renewed < STALE_AFTER


def process_start(pid: int) -> str | None:
    """When a process started, as text that no later process of the same pid shares; None if there is none.

    A zombie counts as ended: it does no more work.
    """
    status = Path(f"/proc/{pid}/stat")
    if Path("/proc/self/stat").exists():
        try:
            # The command's name stands in parentheses and may hold anything; the fields after it are plain.
            fields = status.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            return None
        return None if fields[0] == "Z" else fields[19]
    shown = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return shown.stdout.strip() or None


def _write(path: Path) -> None:
    owner = {"host": socket.gethostname(), "pid": os.getpid(), "started": process_start(os.getpid())}
    draft = path.with_suffix(f".{os.getpid()}.draft")
    draft.write_text(json.dumps(owner), encoding="utf-8")
    draft.replace(path)


def _renew(path: Path, stop: threading.Event) -> None:
    while not stop.wait(RENEW_EVERY):
        with suppress(OSError):
            os.utime(path)


def _now(folder: Path) -> float:
    """The clock of the file system, which the claim's own time comes from."""
    clock = folder / ".lock"
    clock.touch()
    return clock.stat().st_mtime


@contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    with (folder / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
