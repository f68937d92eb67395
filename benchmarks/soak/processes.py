"""Processes of a soak test. Each has a token in its environment, so all of them can be found, with their children."""

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

TOKEN = "DIPOLE_SOAK"
"""Environment variable that every process of a soak test has."""
MAX_CPU_SECONDS = 400.0
"""Processor seconds of one attempt. Normal attempts use less than 100."""
IDLE_SECONDS = 180.0
"""An attempt hangs if it uses less than `MIN_CPU_SECONDS` of processor time in so many seconds."""
MIN_CPU_SECONDS = 1.0
# Windows has no SIGUSR2. There the soak test can be imported, but not run.
STACKS = getattr(signal, "SIGUSR2", signal.SIGTERM)
SITE = f"import faulthandler, signal\nfaulthandler.register(signal.{STACKS.name}, all_threads=True)\n"


class BrokenError(Exception):
    """A guarantee of docs/reliability.md does not hold."""


@dataclass
class Processes:
    """Start, find and end the processes of a soak test.

    Args:
        folder: holds their log, temporary files and caches.
        token: marks them.
        seen: the ids of all processes so far.
    """

    folder: Path
    token: str
    seen: set[int] = field(default_factory=set)

    @property
    def temporary(self) -> Path:
        """TMPDIR of every process."""
        return self.folder / "tmp"

    @property
    def log(self) -> Path:
        return self.folder / "soak.log"

    def start(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str] | None = None,
        before: Callable[[], object] | None = None,
    ) -> "subprocess.Popen[bytes]":
        """Start `python -m ARGUMENTS`. `before` runs in the new process, before the program."""
        self.temporary.mkdir(parents=True, exist_ok=True)
        site = self.folder / "site"
        site.mkdir(exist_ok=True)
        (site / "sitecustomize.py").write_text(SITE, encoding="ascii")
        own = {
            TOKEN: self.token,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH")))),
            "TMPDIR": str(self.temporary),
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "cache"),  # its default is in TMPDIR, which must end empty
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        with self.log.open("ab") as log:
            log.write(f"\n== {' '.join(arguments)}\n".encode())
            log.flush()
            return subprocess.Popen(
                [sys.executable, "-m", *arguments],
                env={**os.environ, **own, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=before,
            )

    def bench(
        self, runs: Path, environment: Mapping[str, str] | None = None, before: Callable[[], object] | None = None
    ) -> "subprocess.Popen[bytes]":
        """Start `dipole bench` with the suite of the soak test."""
        suite = Path(__file__).with_name("suite.toml")
        command = ["dipole", "bench", str(suite), "--runs", str(runs), "--jobs", "2", "--threads", "1"]
        return self.start(command, environment, before)

    def living(self) -> list[int]:
        """Return the ids of all processes with the token."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.environ().get(TOKEN) == self.token:
                    found.append(process.pid)
        self.seen.update(found)
        return found

    def write_stacks(self) -> None:
        """Write the stacks and the kernel's state of every process into the log."""
        for pid in self.living():
            lines = [f"\n== process {pid}"]
            for name in ("cmdline", "wchan", "stack", "status"):
                with suppress(OSError):
                    text = Path(f"/proc/{pid}/{name}").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    lines.append(f"{name}: {text}")
            with self.log.open("a", encoding="utf-8") as log:
                log.write("\n".join(lines))
            with suppress(ProcessLookupError):
                os.kill(pid, STACKS)
            time.sleep(0.2)  # so that the stacks of two processes do not mix

    def kill_all(self) -> None:
        for pid in self.living():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class Watchdog:
    """Notice processes that hang, by their processor time. Wall time would depend on the load of the machine.

    Args:
        processes: are watched from now on.
        cpu_seconds: the most processor seconds that they may use.
        idle_seconds: in so many seconds they must use at least `MIN_CPU_SECONDS`.
    """

    def __init__(
        self, processes: Processes, cpu_seconds: float = MAX_CPU_SECONDS, idle_seconds: float = IDLE_SECONDS
    ) -> None:
        self._processes, self._cpu_seconds, self._idle_seconds = processes, cpu_seconds, idle_seconds
        self._cpu: dict[int, float] = {}  # of processes that have ended as well
        self._readings: deque[tuple[float, float]] = deque()

    def check(self) -> None:
        """Read the processor time.

        Raises:
            BrokenError: the processes compute or wait without end. Their stacks are in the log.
        """
        for pid in self._processes.living():
            with suppress(psutil.Error):
                times = psutil.Process(pid).cpu_times()
                self._cpu[pid] = times.user + times.system
        now, used = time.monotonic(), sum(self._cpu.values())
        self._readings.append((now, used))
        while len(self._readings) > 1 and self._readings[1][0] <= now - self._idle_seconds:
            self._readings.popleft()
        begin, before = self._readings[0]
        how = ""
        if used > self._cpu_seconds:
            how = "computes"
        if begin <= now - self._idle_seconds and used - before < MIN_CPU_SECONDS:
            how = "waits"
        if how:
            self._processes.write_stacks()
            raise BrokenError(
                f"an attempt does not end: it {how} ({used - before:.1f} s of processor time in the last "
                f"{now - begin:.0f} s, {used:.0f} s in all). The log has its stacks"
            )

    def wait(self, *runners: "subprocess.Popen[bytes]") -> list[int]:
        """Wait for processes and return their exit codes."""
        while running := [runner for runner in runners if runner.poll() is None]:
            self.check()
            with suppress(subprocess.TimeoutExpired):
                running[0].wait(1.0)
        return [runner.returncode for runner in runners]

    def wait_for_all(self) -> None:
        """Wait until no process is left."""
        while self._processes.living():
            self.check()
            time.sleep(0.2)


def command_of(pid: int) -> list[str]:
    """Return the command line of a process, or [] after its exit."""
    with suppress(psutil.Error):
        return psutil.Process(pid).cmdline()
    return []
