"""The processes of a soak: each carries its token, by which they are found whoever started them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

TOKEN = "DIPOLE_SOAK"
"""The variable in the environment of every process of a soak."""
LEAVE_WITHIN = 100.0  # seconds; a worker whose runner is gone saves a checkpoint, and is ended after a minute
ENOUGH = 15.0  # seconds of processors for leaving, on a machine so busy that it
BUSY = 6  # times as long takes for them
# At which a process writes the stacks of all its threads into the log. Windows has neither this nor ticks of a clock:
# there the soak is imported, not run.
STACKS = getattr(signal, "SIGUSR2", signal.SIGTERM)
STACKS_OF = f"import faulthandler, signal\nfaulthandler.register(signal.{STACKS.name}, all_threads=True)\n"
TICK = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


class Spent:
    """Seconds of a processor that processes have used, those that are gone included.

    A machine with other work gives a process few of them: by these, not by the clock on the wall, it is told whether an
    attempt works, waits, or computes without end.
    """

    def __init__(self) -> None:
        self._each: dict[int, float] = {}

    def of(self, pids: Iterable[int]) -> float:
        """The sum after another look at those that live."""
        for pid in pids:
            with suppress(OSError, IndexError, ValueError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                used = (int(fields[11]) + int(fields[12])) / TICK
                self._each[pid] = max(used, self._each.get(pid, 0.0))
        return sum(self._each.values())


@dataclass
class Place:
    """Where a soak works: its folder, the token of its processes, and the numbers that these have had."""

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
        """Start `python -m ARGUMENTS` as a process of this soak; `before` runs in it, before the program."""
        self.temporary.mkdir(parents=True, exist_ok=True)
        site = self.folder / "site"
        site.mkdir(exist_ok=True)
        (site / "sitecustomize.py").write_text(STACKS_OF, encoding="ascii")
        own = {
            TOKEN: self.token,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH")))),
            "TMPDIR": str(self.temporary),
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "cache"),  # kept on purpose; else in TMPDIR
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
        """Start `dipole bench` of the soak's suite on a folder of runs."""
        command = ["dipole", "bench", str(self.folder / "soak.toml"), "--runs", str(runs)]
        return self.start([*command, "--jobs", "2", "--threads", "1"], environment, before)

    def living(self) -> list[int]:
        """Numbers of the processes that carry the token."""
        mark, found = f"{TOKEN}={self.token}".encode(), []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        self.seen.update(found)
        return found

    def wait_until_gone(self, seconds: float = LEAVE_WITHIN) -> list[int]:
        """Wait for the last process of this soak; those that stay, although they had the time and processors."""
        begin, spent = time.monotonic(), Spent()
        first = spent.of(left := self.living())
        while left:
            waited, used = time.monotonic() - begin, spent.of(left) - first
            if waited > seconds and (used > ENOUGH or waited > BUSY * seconds):
                break
            time.sleep(0.2)
            left = self.living()
        return left

    def write_stacks(self) -> None:
        """Have every process that lives write what it is at into the log: its stacks, state, and where it waits."""
        for pid in self.living():
            told = [f"\n== process {pid}"]
            for name in ("cmdline", "wchan", "stack", "status"):
                with suppress(OSError):
                    text = Path(f"/proc/{pid}/{name}").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    told.append(f"{name}: {text}")
            with self.log.open("a", encoding="utf-8") as log:
                log.write("\n".join(told))
            with suppress(ProcessLookupError):
                os.kill(pid, STACKS)
            time.sleep(0.2)  # one after another, so that their lines do not mix

    def end_all(self) -> None:
        """Kill what is still there: the soak itself was interrupted, or has said what stayed."""
        for pid in self.living():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
