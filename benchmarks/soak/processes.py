"""The processes of a soak: each carries its token, by which they are found whoever started them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

TOKEN = "DIPOLE_SOAK"
"""The variable in the environment of every process of a soak."""
LEAVE_WITHIN = 100.0  # seconds; a worker whose runner is gone saves a checkpoint, and is ended after a minute


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
        own = {
            TOKEN: self.token,
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
        """Wait for the last process of this soak; those that stay."""
        end = time.monotonic() + seconds
        while (left := self.living()) and time.monotonic() < end:
            time.sleep(0.2)
        return left

    def end_all(self) -> None:
        """Kill what is still there: the soak itself was interrupted, or has said what stayed."""
        for pid in self.living():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
