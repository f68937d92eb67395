"""The faults: each is one attempt at the suite that something happens to. What it returns goes into the table."""

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
from dipole.benchmarks.soak.patience import BrokenError, Patience
from dipole.benchmarks.soak.processes import Place

SCARCE = 90.0  # seconds with little memory; what is not killed by then gets more, and has to end by itself


@dataclass
class Scene:
    """What a fault works with: place, folder of runs, limits, and the numbers it draws."""

    place: Place
    runs: Path
    disk: Disk
    memory: Memory
    clock: Clock
    rng: random.Random

    def wait(self, *runners: "subprocess.Popen[bytes]") -> list[int]:
        """The codes of runners that end by themselves, and the end of all that they started.

        Raises:
            BrokenError: they do not end, or leave a process.
        """
        codes = Patience(self.place).until_end(*runners)
        if left := self.place.wait_until_gone():
            self.place.write_stacks()
            raise BrokenError(
                f"{len(left)} processes outlived their runner: {_names(left)}; their stacks are in the log"
            )
        return codes


def kill(scene: Scene) -> str:
    """kill -9 of the runner."""
    return _struck(scene, signal.SIGKILL, 0.0)


def kill_worker(scene: Scene) -> str:
    """kill -9 of a process that the runner started, or that one of those did; the runner starts it once more."""
    return _struck(scene, signal.SIGKILL, 1.0)


def terminate(scene: Scene) -> str:
    """SIGTERM to the runner, or to a worker."""
    return _struck(scene, signal.SIGTERM, 0.5)


def full_disk(scene: Scene) -> str:
    """Nothing can be written for some seconds, or files end early."""
    if not scene.disk.is_own:
        most = int(10 ** scene.rng.uniform(3.5, 6))
        [code] = scene.wait(scene.place.bench(scene.runs, before=scene.disk.short_files(most)))
        return f"files of at most {most // 1024} KB, exit code {code}"
    process = scene.place.bench(scene.runs)
    _sleep(process, scene.rng.uniform(2, 15))
    seconds = scene.rng.uniform(2, 8)
    with scene.disk.full():
        _sleep(process, seconds)
    [code] = scene.wait(process)
    return f"full for {seconds:.0f} s, exit code {code}"


def little_memory(scene: Scene) -> str:
    """The suite gets less memory than it needs."""
    megabytes = scene.rng.randrange(150, 1100)
    process = scene.place.bench(scene.runs, before=scene.memory.limited(megabytes))
    _sleep(process, SCARCE)
    is_going = process.poll() is None
    scene.memory.lift()
    [code] = scene.wait(process)
    return f"{megabytes} MB{f' for {SCARCE:.0f} s' if is_going else ''}, exit code {code}"


def jumping_clock(scene: Scene) -> str:
    """The clock jumps all the time, which must not disturb anything."""
    [code] = scene.wait(scene.place.bench(scene.runs, scene.clock.environment))
    if code:
        raise BrokenError(f"the suite failed under a clock that jumps (exit code {code})")
    return "exit code 0"


def second_runner(scene: Scene) -> str:
    """Two runners on one folder, which share the work."""
    first = scene.place.bench(scene.runs)
    _sleep(first, scene.rng.uniform(0, 4))
    second = scene.place.bench(scene.runs)
    with_kill = scene.rng.random() < 0.5
    if with_kill:
        _sleep(first, scene.rng.uniform(2, 10))
        first.kill()
    codes = scene.wait(first, second)
    if codes[1] or (codes[0] and not with_kill):
        raise BrokenError(f"two runners on one folder ended with exit codes {codes[0]} and {codes[1]}")
    return "the first one killed, the second ended the suite" if with_kill else "both ended with exit code 0"


HARMFUL: Mapping[str, Callable[[Scene], str]] = {
    "kill -9": kill,
    "kill -9 of a worker": kill_worker,
    "SIGTERM": terminate,
    "full disk": full_disk,
    "little memory": little_memory,
}
"""After these the suite need not be finished."""
HARMLESS: Mapping[str, Callable[[Scene], str]] = {"clock jumps": jumping_clock, "second runner": second_runner}
"""Under these it must be: they come last in a round."""
FAULTS = {**HARMFUL, **HARMLESS}


def _struck(scene: Scene, which: signal.Signals, of_workers: float) -> str:
    """A signal at a random moment: to a worker with this probability, if there is one, else to the runner."""
    process = scene.place.bench(scene.runs)
    begin = time.monotonic()
    is_worker = scene.rng.random() < of_workers
    while is_worker and process.poll() is None and not _below(scene, process):
        _sleep(process, 0.2)  # a busy machine takes its time to start the first one
    _sleep(process, scene.rng.uniform(1, 18))
    found = _below(scene, process) if is_worker else []
    victim = scene.rng.choice(found) if found else process.pid
    what, after = _called(victim) if found else "the runner", time.monotonic() - begin
    with suppress(ProcessLookupError):
        os.kill(victim, which)
    [code] = scene.wait(process)
    return f"{what} after {after:.0f} s, exit code {code}"


def _below(scene: Scene, process: "subprocess.Popen[bytes]") -> list[int]:
    """All processes but the runner."""
    return sorted(pid for pid in scene.place.living() if pid != process.pid)


def _called(pid: int) -> str:
    """Which worker a process is: of the recipe that it trains, or what else it runs."""
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        trains = words[words.index("train") + 1] if "train" in words else " ".join(words[1:4])[:60]
        return f"a worker ({trains})"
    return "a worker"


def _sleep(process: "subprocess.Popen[bytes]", seconds: float) -> None:
    """Wait, less where the process ends before."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


def _names(pids: list[int]) -> str:
    found = []
    for pid in pids[:5]:
        with suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
            found.append(f"{pid} {' '.join(words)[:80]}")
    return "; ".join(found)
