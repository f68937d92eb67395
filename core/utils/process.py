"""The process that owns a folder, described so that other processes can see whether it has ended."""

import json
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock, Timeout

from dipole.core.utils.received import parse_json

OWNER = ".pid"
"""File in a run folder that describes the process that trains there."""
LONGEST_OWNER = 4096
"""Largest size of that file in bytes."""
PROCESSES = Path("/proc")
CLOCK_SET = 60.0
"""Seconds by which the clock may be adjusted while a process lives. A reused process id starts later than that."""


def describe_self() -> str:
    """Return this process as one line of JSON: id, host, boot, namespace of the ids, and start time."""
    return json.dumps({"pid": os.getpid(), **_here(), "began": _began(os.getpid())})


def read_owner(text: str) -> dict[str, Any]:
    """Return what `describe_self` wrote, {} if it cannot be read."""
    with suppress(ValueError, TypeError):
        return dict(parse_json(text))
    return {}


def is_gone(text: str) -> bool:
    """Return whether the process that `describe_self` described has certainly ended.

    All of earlier boots have. The answer is False for other hosts and containers, and for an unreadable file.
    """
    owner, here = read_owner(text), _here()
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
    """Return whether the process that `describe_self` described runs on this host, boot and namespace."""
    owner = read_owner(text)
    return isinstance(owner.get("pid"), int) and owner.items() >= _here().items() and not is_gone(text)


def is_locked(path: Path) -> bool:
    """Return whether a running process holds a lock file."""
    if not path.exists():
        return False
    try:
        with FileLock(path, blocking=False):
            return False
    except Timeout:
        return True


def boot() -> str:
    """Return the id of this boot of the machine, or "" if unknown."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _here() -> dict[str, str]:
    namespace = ""
    with suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return {"host": socket.gethostname(), "boot": boot(), "namespace": namespace}


def _began(pid: int) -> str | None:
    """Return the start time of a process, "" if the system does not tell, or None if there is no such process.

    It is in ticks since the boot on Linux, and elsewhere in seconds of the clock, which may have been adjusted.
    """
    # A zombie has ended: only its parent has not read its exit code yet.
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
        return began == told or not began  # ticks, or unknown
    try:
        return abs(float(began) - float(str(told))) < CLOCK_SET
    except ValueError:  # the system did not tell
        return True
