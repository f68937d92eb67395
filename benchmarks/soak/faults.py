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
from dipole.benchmarks.soak.processes import Place

ATTEMPT = 1200.0  # seconds; an attempt of under a minute that takes longer hangs
SCARCE = 90.0  # seconds with little memory; what is not killed by then may read its own code from the disk for ever


class BrokenError(Exception):
    """A promise was not kept."""


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
        """The codes of runners that end by themselves, and the end of all that they started."""
        try:
            codes = [runner.wait(ATTEMPT) for runner in runners]
        except subprocess.TimeoutExpired:
            raise BrokenError(f"an attempt did not end within {ATTEMPT:.0f} s") from None
        if left := self.place.wait_until_gone():
            raise BrokenError(f"{len(left)} processes outlived their runner: {_names(left)}")
        return codes


def kill(scene: Scene) -> str:
    """kill -9 of the runner, or of a worker."""
    return _struck(scene, signal.SIGKILL)


def terminate(scene: Scene) -> str:
    """SIGTERM to the runner, or to a worker."""
    return _struck(scene, signal.SIGTERM)


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
    if is_going := process.poll() is None:
        scene.place.end_all()
    [code] = scene.wait(process)
    return f"{megabytes} MB, {f'killed after {SCARCE:.0f} s' if is_going else f'exit code {code}'}"


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
    "SIGTERM": terminate,
    "full disk": full_disk,
    "little memory": little_memory,
}
"""After these the suite need not be finished."""
HARMLESS: Mapping[str, Callable[[Scene], str]] = {"clock jumps": jumping_clock, "second runner": second_runner}
"""Under these it must be: they come last in a round."""
FAULTS = {**HARMFUL, **HARMLESS}


def _struck(scene: Scene, which: signal.Signals) -> str:
    process = scene.place.bench(scene.runs)
    begin = time.monotonic()
    _sleep(process, scene.rng.uniform(1, 18))
    after = time.monotonic() - begin
    found = [pid for pid in scene.place.living() if pid != process.pid]
    # The runner is one of many; half of the time it is the one.
    victim = process.pid if not found or scene.rng.random() < 0.5 else scene.rng.choice(found)
    with suppress(ProcessLookupError):
        os.kill(victim, which)
    what = "the runner" if victim == process.pid else "a worker"
    [code] = scene.wait(process)
    return f"{what} after {after:.0f} s, exit code {code}"


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
