"""What a system lets us take away from processes: disk, memory, a clock to be trusted; each says how it does it."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

DISK = 128 * 1024**2  # bytes of the small file system
CGROUPS = {
    "cgroup v2": (Path("/sys/fs/cgroup"), "memory.max"),
    "cgroup v1": (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
}


class Disk:
    """A folder on a file system of its own that can be filled; without the right to mount one, a limit of file sizes.

    Args:
        folder: where it is; it is made.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(folder)]
        self.is_own = sys.platform == "linux" and shutil.which("mount") is not None and _does(mount)
        self.how = "a tmpfs that is filled" if self.is_own else "no right to mount: RLIMIT_FSIZE, files end early"

    @contextmanager
    def full(self) -> Iterator[None]:
        """Within the block nothing fits any more (a file system of its own only)."""
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

    def short_files(self, most: int) -> Callable[[], None]:
        """What a process calls so that none of its files grows beyond `most` bytes."""
        import resource  # Windows has none

        return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))

    def remove(self) -> None:
        if self.is_own:
            _does(["umount", "-l", str(self.folder)])
        shutil.rmtree(self.folder, ignore_errors=True)


class Memory:
    """A limit of memory for processes: a cgroup where one may be made, the address space where not."""

    def __init__(self, name: str) -> None:
        self._group: Path | None = None
        self._limit = ""
        self.how = "no right to make a cgroup: RLIMIT_AS"
        for how, (root, limit) in CGROUPS.items():
            group = root / name
            try:
                group.mkdir()
            except OSError:
                continue
            if (group / limit).exists() and os.access(group / limit, os.W_OK):
                self._group, self._limit, self.how = group, limit, f"{how}, the kernel kills"
                break
            with suppress(OSError):
                group.rmdir()

    def limited(self, megabytes: int) -> Callable[[], None]:
        """What a process calls so that it and its children get no more than this in all (each, where no cgroup)."""
        group = self._group
        if group is None:
            # Libraries reserve some gigabytes of addresses that they never touch.
            most = (3000 + megabytes) * 1024**2
            import resource

            return lambda: resource.setrlimit(resource.RLIMIT_AS, (most, most))
        (group / self._limit).write_text(str(megabytes * 1024**2))

        def join() -> None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

        return join

    def lift(self) -> None:
        """Take the limit away from those that live (a cgroup only; the address space is not what keeps one waiting)."""
        if self._group is not None:
            (self._group / self._limit).write_text("max" if self._limit == "memory.max" else "-1")

    def remove(self) -> None:
        for _ in range(50):
            if self._group is None:
                return
            try:
                self._group.rmdir()
                self._group = None
            except OSError:
                time.sleep(0.1)


CLOCK = r"""
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

/* Every two seconds another one: right, a day and an hour ahead, more than a year behind, a minute behind. */
static time_t jump(void) {
    static const time_t offsets[] = {0, 90000, -40000000, -60};
    struct timespec now;
    syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &now);
    return offsets[(now.tv_sec / 2) % 4];
}

int clock_gettime(clockid_t which, struct timespec *found) {
    int code = syscall(SYS_clock_gettime, which, found);
    if (code == 0 && (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE)) found->tv_sec += jump();
    return code;
}

int gettimeofday(struct timeval *found, void *zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    found->tv_sec = now.tv_sec;
    found->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *found) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (found) *found = now.tv_sec;
    return now.tv_sec;
}
"""


class Clock:
    """A clock that jumps for chosen processes: a library before the system's, compiled here.

    The times of files stay the file system's own.
    """

    def __init__(self, folder: Path) -> None:
        self.environment: dict[str, str] = {}
        self.how = "no C compiler: not tried"
        compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
        if compiler is None or sys.platform != "linux":
            return
        source, library = folder / "clock.c", folder / "clock.so"
        source.write_text(CLOCK, encoding="ascii")
        if _does([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source)]) and _jumps(library):
            self.environment = {"LD_PRELOAD": str(library)}
            self.how = "LD_PRELOAD: every 2 s +25 h, -463 days, -1 min or right"
        else:
            self.how = "the library for it does not work here: not tried"


def _jumps(library: Path) -> bool:
    """Whether a Python under the library sees its clock jump."""
    program = (
        "import time; a = time.time() - time.monotonic(); time.sleep(2.2); print(time.time() - time.monotonic() - a)"
    )
    environment = {**os.environ, "LD_PRELOAD": str(library)}
    found = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    return found.returncode == 0 and abs(float(found.stdout)) > 30


def _does(command: list[str]) -> bool:
    return subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL).returncode == 0
