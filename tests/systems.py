"""Differences between systems: marks of tests of what only some of them have, and what is done otherwise on each."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

POSIX = hasattr(os, "mkfifo")
posix = pytest.mark.skipif(not POSIX, reason="Windows has no pipes in folders, limits of files, signals to others")
linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux alone has /proc, and names of files in any bytes")


def _links() -> bool:
    with tempfile.TemporaryDirectory() as folder, suppress(OSError, NotImplementedError):
        (Path(folder) / "link").symlink_to(folder)
        return True
    return False


links = pytest.mark.skipif(not _links(), reason="this user may make no symbolic links")
KILL_SELF = "__import__('psutil').Process().kill()"
"""The text of a program that ends as if by kill -9."""


def was_killed(code: int) -> bool:
    """Whether a process was killed. Windows does not tell this from other failures."""
    return code == -signal.SIGKILL if POSIX else code != 0


def kill(pid: int) -> None:
    """End a process at once, without an error if it has ended."""
    with suppress(psutil.NoSuchProcess):
        psutil.Process(pid).kill()


def kill_all(process: "subprocess.Popen[str]") -> None:
    """End a process that leads a session of its own, and what it has started."""
    if hasattr(os, "killpg"):
        os.killpg(process.pid, signal.SIGKILL)
        return
    with suppress(psutil.NoSuchProcess):
        for each in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
            kill(each.pid)


@contextmanager
def file_limit(size: int) -> Iterator[None]:
    """Every write beyond `size` bytes of a file fails, as on a full disk. For tests that are marked `posix`."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
