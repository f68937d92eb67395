"""Who holds a folder: a process named so that its end can be told, also from another process and after a restart."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock, Timeout

from dipole.core.utils.received import parse_json

OWNER = ".pid"
"""Name of the file in a run folder that names the process that trains there."""
LONGEST_OWNER = 4096
"""Bytes of such a file."""
PROCESSES = Path("/proc")
CLOCK_SET = 60.0
"""Seconds by which a clock may be set while a process lives; another process of its number begins later than that."""


def describe_self() -> str:
    """This process as one line of JSON: number, host, boot, name space of the numbers, and when it began."""
    return json.dumps({"pid": os.getpid(), **_where(), "began": _began(os.getpid())})


def pid_in(text: str) -> str:
    """The number of the process that a file names, for a message."""
    return str(_read(text).get("pid") or "unknown")


def is_gone(text: str) -> bool:
    """Whether the process that `describe_self` described has certainly ended.

    Certain is what this host knows: its own processes of this boot, and that none of an earlier boot is left. Of
    another host or container, and of a file that cannot be read, nothing is known.
    """
    owner, here = _read(text), _where()
    pid = owner.get("pid")
    if not isinstance(pid, int) or not owner.get("host") or owner.get("host") != here["host"]:
        return False
    if owner.get("boot") != here["boot"]:
        return True
    if owner.get("namespace") != here["namespace"]:
        return False
    began = _began(pid)
    return began is None or not _same_beginning(began, owner.get("began"))


def lives_here(text: str) -> bool:
    """Whether the process that `describe_self` described is one of this host, boot and name space, and lives."""
    owner, here = _read(text), _where()
    return isinstance(owner.get("pid"), int) and all(owner.get(k) == v for k, v in here.items()) and not is_gone(text)


def host_in(text: str) -> str:
    """The host that a file names, for a message."""
    return str(_read(text).get("host") or "an unknown host")


def is_locked(path: Path) -> bool:
    """Whether a living process that shares our locks holds a lock file."""
    if not path.exists():
        return False
    try:
        with FileLock(path, blocking=False):
            return False
    except Timeout:
        return True


def _read(text: str) -> dict[str, Any]:
    try:
        found = parse_json(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _where() -> dict[str, str]:
    return {"host": socket.gethostname(), "boot": boot(), "namespace": _space()}


def boot() -> str:
    """What this start of the machine is called; empty where it does not say."""
    return _first_line("/proc/sys/kernel/random/boot_id")


def _space() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _began(pid: int) -> str | None:
    """When a process began ("" where the system does not say); None if there is none.

    On Linux in ticks since the boot, elsewhere in seconds of the clock, which may have been set since.
    """
    # A zombie trains nothing: only its parent has not asked for its code yet.
    if (PROCESSES / "self").exists():
        try:
            fields = (PROCESSES / f"{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        return None if fields[0] in ("Z", "X") else fields[19]
    try:
        found = psutil.Process(pid)
        return None if found.status() == psutil.STATUS_ZOMBIE else f"{found.create_time():.2f}"
    except psutil.NoSuchProcess:
        return None
    except psutil.AccessDenied:
        return ""


def _same_beginning(began: str, told: object) -> bool:
    if "." not in began:
        return began == told or not began  # ticks, or nothing known
    try:
        return abs(float(began) - float(str(told))) < CLOCK_SET
    except ValueError:  # the system did not tell
        return True
