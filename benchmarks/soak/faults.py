"""Faults. Each starts the suite once, disturbs it, waits for its end and returns a description of what happened."""

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dipole.benchmarks.soak.limits import Clock, Disk, Memory
from dipole.benchmarks.soak.processes import BrokenError, Processes, Watchdog, command_of

LITTLE_MEMORY_SECONDS = 90.0
"""The memory limit is lifted after so many seconds. The attempt must then end by itself."""
AFTER_RUNNER = {"cpu_seconds": 15.0, "idle_seconds": 100.0}
"""Limits for processes after their runner. A worker then saves a checkpoint and ends within a minute."""


@dataclass
class Scene:
    """The processes, the folder of runs, the limits and the random numbers of a round."""

    processes: Processes
    runs: Path
    disk: Disk
    memory: Memory
    clock: Clock
    rng: random.Random

    def wait(self, *runners: "subprocess.Popen[bytes]") -> list[int]:
        """Return the exit codes of runners after they and all their children have ended.

        Raises:
            BrokenError: a runner hangs, or a process outlives its runner.
        """
        codes = Watchdog(self.processes).wait(*runners)
        try:
            Watchdog(self.processes, **AFTER_RUNNER).wait_for_all()
        except BrokenError as error:
            raise BrokenError(f"a process outlived its runner: {error}") from None
        return codes

    def send(self, which: signal.Signals, worker_probability: float) -> str:
        """Send a signal to the runner or, with this probability, to a worker, after 1 to 18 seconds."""
        process = self.processes.bench(self.runs)
        begin = time.monotonic()
        is_worker = self.rng.random() < worker_probability
        while is_worker and process.poll() is None and not self._workers(process):
            _sleep(process, 0.2)  # a busy machine starts the first worker late
        _sleep(process, self.rng.uniform(1, 18))
        victim, what = process.pid, "the runner"
        if is_worker and (workers := self._workers(process)):
            victim = self.rng.choice(workers)
            words = command_of(victim)
            what = f"a worker ({' '.join(words[1:4])[:60]})"
            if "train" in words:
                what = f"a worker ({words[words.index('train') + 1]})"
        after = time.monotonic() - begin
        with suppress(ProcessLookupError):
            os.kill(victim, which)
        [code] = self.wait(process)
        return f"{what} after {after:.0f} s, exit code {code}"

    def _workers(self, runner: "subprocess.Popen[bytes]") -> list[int]:
        return sorted(pid for pid in self.processes.living() if pid != runner.pid)


def kill(scene: Scene) -> str:
    return scene.send(signal.SIGKILL, 0.0)


def kill_worker(scene: Scene) -> str:
    """Kill a process that the runner started. The runner must start it again."""
    return scene.send(signal.SIGKILL, 1.0)


def terminate(scene: Scene) -> str:
    return scene.send(signal.SIGTERM, 0.5)


def full_disk(scene: Scene) -> str:
    """Fill the disk for some seconds. If it cannot be mounted, limit the size of files instead."""
    if not scene.disk.is_mounted:
        size = int(10 ** scene.rng.uniform(3.5, 6))
        [code] = scene.wait(scene.processes.bench(scene.runs, before=scene.disk.limit_files(size)))
        return f"files of at most {size // 1024} KB, exit code {code}"
    process = scene.processes.bench(scene.runs)
    _sleep(process, scene.rng.uniform(2, 15))
    seconds = scene.rng.uniform(2, 8)
    with scene.disk.full():
        _sleep(process, seconds)
    [code] = scene.wait(process)
    return f"full for {seconds:.0f} s, exit code {code}"


def little_memory(scene: Scene) -> str:
    """Give the suite less memory than it needs."""
    megabytes = scene.rng.randrange(150, 1100)
    process = scene.processes.bench(scene.runs, before=scene.memory.limit(megabytes))
    _sleep(process, LITTLE_MEMORY_SECONDS)
    what = f"{megabytes} MB"
    if process.poll() is None:
        what += f" for {LITTLE_MEMORY_SECONDS:.0f} s"
    scene.memory.lift()
    [code] = scene.wait(process)
    return f"{what}, exit code {code}"


def jumping_clock(scene: Scene) -> str:
    [code] = scene.wait(scene.processes.bench(scene.runs, scene.clock.environment))
    if code:
        raise BrokenError(f"the suite failed under a clock that jumps (exit code {code})")
    return "exit code 0"


def second_runner(scene: Scene) -> str:
    """Start two runners on one folder. Kill the first one in half of the cases."""
    first = scene.processes.bench(scene.runs)
    _sleep(first, scene.rng.uniform(0, 4))
    second = scene.processes.bench(scene.runs)
    with_kill = scene.rng.random() < 0.5
    if with_kill:
        _sleep(first, scene.rng.uniform(2, 10))
        first.kill()
    codes = scene.wait(first, second)
    if codes[1] or (codes[0] and not with_kill):
        raise BrokenError(f"two runners on one folder ended with exit codes {codes[0]} and {codes[1]}")
    if with_kill:
        return "the first one killed, the second ended the suite"
    return "both ended with exit code 0"


HARMFUL: Mapping[str, Callable[[Scene], str]] = {
    "kill -9": kill,
    "kill -9 of a worker": kill_worker,
    "SIGTERM": terminate,
    "full disk": full_disk,
    "little memory": little_memory,
}
"""The suite may be unfinished after these."""
HARMLESS: Mapping[str, Callable[[Scene], str]] = {"clock jumps": jumping_clock, "second runner": second_runner}
"""The suite must be finished after these. They end a round."""
FAULTS = {**HARMFUL, **HARMLESS}


def _sleep(process: "subprocess.Popen[bytes]", seconds: float) -> None:
    """Wait so many seconds, or until the process ends."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
