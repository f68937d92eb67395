"""Limits for processes: a full disk, little memory and a clock that jumps. `how` says how this system provides each."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

DISK_BYTES = 128 * 1024**2
CGROUPS = {
    "cgroup v2": (Path("/sys/fs/cgroup"), "memory.max", "max"),
    "cgroup v1": (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "-1"),
}
"""Root, file of the limit, and the value for no limit."""
LIBRARY_BYTES = 3000 * 1024**2
"""Addresses that libraries reserve and never touch."""
CLOCK_TEST = (
    "import time; a = time.time() - time.monotonic(); time.sleep(2.2); print(time.time() - time.monotonic() - a)"
)


class Disk:
    """A new folder on a tmpfs that can be filled. Without the right to mount one, files can be limited in size."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
        self.is_mounted = sys.platform == "linux" and shutil.which("mount") is not None and _succeeds(mount)
        self.how = "no right to mount: RLIMIT_FSIZE, files end early"
        if self.is_mounted:
            self.how = "a tmpfs that is filled"

    @contextmanager
    def full(self) -> Iterator[None]:
        """Fill the tmpfs within the block."""
        ballast = self.folder / ".ballast"
        try:
            with suppress(OSError), open(ballast, "wb", buffering=0) as file:
                for size in (1024**2, 4096, 1):
                    with suppress(OSError):
                        while file.write(bytes(size)) == size:
                            pass
            yield
        finally:
            ballast.unlink(missing_ok=True)

    def limit_files(self, size: int) -> Callable[[], None]:
        """Return a function that limits the files of the process that calls it to `size` bytes."""
        import resource  # Windows has none

        return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    def remove(self) -> None:
        if self.is_mounted:
            _succeeds(["umount", "-l", str(self.folder)])
        shutil.rmtree(self.folder, ignore_errors=True)


class Memory:
    """A memory limit by a cgroup. Without the right to make one, a limit of the address space of each process."""

    def __init__(self, name: str) -> None:
        self._group: Path | None = None
        self.how = "no right to make a cgroup: RLIMIT_AS"
        for how, (root, limit, unlimited) in CGROUPS.items():
            group = root / name
            try:
                group.mkdir()
            except OSError:
                continue
            if os.access(group / limit, os.W_OK):
                self._group, self.how = group, f"{how}, the kernel kills"
                self._limit, self._unlimited = group / limit, unlimited
                break
            with suppress(OSError):
                group.rmdir()

    def limit(self, megabytes: int) -> Callable[[], None]:
        """Return a function that limits the process that calls it. A cgroup counts its children as well."""
        group = self._group
        if group is None:
            import resource

            size = LIBRARY_BYTES + megabytes * 1024**2
            return lambda: resource.setrlimit(resource.RLIMIT_AS, (size, size))
        self._limit.write_text(str(megabytes * 1024**2))

        def join() -> None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

        return join

    def lift(self) -> None:
        """Remove the limit of the cgroup. A limit of addresses stays: it makes processes fail, but never wait."""
        if self._group is not None:
            self._limit.write_text(self._unlimited)

    def remove(self) -> None:
        for _ in range(50):
            if self._group is None:
                return
            try:
                self._group.rmdir()
                self._group = None
            except OSError:
                time.sleep(0.1)


class Clock:
    """A real-time clock that jumps, by a preloaded library (clock.c). File times do not jump."""

    def __init__(self, folder: Path) -> None:
        self.environment: dict[str, str] = {}
        self.how = "no C compiler: not tried"
        compilers = [found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))]
        if not compilers or sys.platform != "linux":
            return
        source, library = Path(__file__).with_name("clock.c"), folder / "clock.so"
        preload = {"LD_PRELOAD": str(library)}
        if _succeeds([compilers[0], "-shared", "-fPIC", "-O1", "-o", str(library), str(source)]) and _jumps(preload):
            self.environment = preload
            self.how = "LD_PRELOAD: every 2 s +25 h, -463 days, -1 min or right"
        else:
            self.how = "the library for it does not work here: not tried"


def _jumps(environment: dict[str, str]) -> bool:
    """Test whether the clock of a Python process jumps."""
    found = subprocess.run(
        [sys.executable, "-c", CLOCK_TEST], env={**os.environ, **environment}, capture_output=True, text=True
    )
    return found.returncode == 0 and abs(float(found.stdout)) > 30


def _succeeds(command: list[str]) -> bool:
    return subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL).returncode == 0
