"""`python -m dipole.benchmarks.soak`: disturb a small suite until the time is up. Exit with 1 if anything differs."""

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from dipole.benchmarks.soak.faults import FAULTS, HARMFUL, HARMLESS, Scene
from dipole.benchmarks.soak.judge import differences, left_behind, shared_memory
from dipole.benchmarks.soak.limits import Clock, Disk, Memory
from dipole.benchmarks.soak.processes import MAX_CPU_SECONDS, BrokenError, Processes, Watchdog

HARMFUL_PER_ROUND = 2
LONG_RUNS: Mapping[str, tuple[str, ...]] = {
    "vision": ("digits-simclr", "train.epochs=", "train.batch_size=32", "vision.probe.baselines=false",
               "vision.probe.probes=['kmeans']", "train.warmup=0"),
    "text": ("pydoc-bow", "train.epochs=", "train.batch_size=32"),
    "rl": ("dot", "rl.learning_starts=200", "rl.buffer_size=500", "rl.episodes=1"),
}  # fmt: skip
"""Recipe and settings of the runs whose memory is watched."""
MAX_GROWTH = 8.0
"""Megabytes by which memory may grow from the middle fifth of a run to its last fifth. Allocators vary so much."""


@dataclass(frozen=True)
class Growth:
    """Resident megabytes in the middle and in the last fifth of a run."""

    domain: str
    updates: int
    middle: float
    last: float

    @property
    def is_flat(self) -> bool:
        return self.last - self.middle <= MAX_GROWTH


@dataclass
class Found:
    """The faults of each round, the growth of memory, and everything that broke."""

    seed: int
    how: dict[str, str] = field(default_factory=dict)
    minutes: float = 0.0
    events: list[dict[str, Any]] = field(default_factory=list)
    growth: list[Growth] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)


def soak(folder: Path, minutes: float, seed: int, updates: int, log: Console) -> Found:
    """Disturb the suite for at least one round.

    Args:
        folder: is made. Broken runs stay in it.
        minutes: no round begins after them.
        seed: of the faults, their order and their moments.
        updates: length of the runs whose memory is watched. 0 skips them.
        log: shows the progress.
    """
    processes = Processes(folder.resolve(), f"{os.getpid()}-{time.time_ns()}")
    processes.folder.mkdir(parents=True, exist_ok=True)
    found, begin, rng = Found(seed), time.monotonic(), random.Random(seed)
    disk, memory = Disk(processes.folder / "disk"), Memory(f"dipole-soak-{os.getpid()}")
    clock = Clock(processes.folder)
    found.how = {"full disk": disk.how, "little memory": memory.how, "clock jumps": clock.how}
    harmful = _shuffled(list(HARMFUL), rng)
    harmless = _shuffled([name for name in HARMLESS if name != "clock jumps" or clock.environment], rng)
    shared, undisturbed = shared_memory(), processes.folder / "undisturbed"
    try:
        log.print("An undisturbed run of the suite.")
        if Watchdog(processes).wait(processes.bench(undisturbed)) != [0]:
            raise BrokenError(f"the undisturbed suite failed. See {processes.log}")
        if updates:
            for domain in LONG_RUNS:
                _watch_memory(processes, domain, updates, found, log)
        number, end = 0, time.monotonic() + 60 * minutes
        while number == 0 or time.monotonic() < end:
            number += 1
            faults = [*islice(harmful, HARMFUL_PER_ROUND), next(harmless)]
            scene = Scene(processes, disk.folder / f"round-{number}", disk, memory, clock, rng)
            broken = list(_round(scene, faults, number, found, log))
            if not broken:
                broken = [
                    *differences(undisturbed, scene.runs),
                    *left_behind(scene.runs, processes.temporary, shared, processes.seen),
                ]
            for line in broken:
                found.broken.append(f"round {number}: {line}")
                log.print(f"round {number}: BROKEN: {line}")
            if broken and scene.runs.is_dir():
                shutil.copytree(scene.runs, processes.folder / f"broken-{number}", dirs_exist_ok=True)
            shutil.rmtree(scene.runs, ignore_errors=True)
    except BrokenError as error:
        found.broken.append(str(error))
    finally:
        processes.kill_all()
        memory.remove()
        disk.remove()
    found.minutes = (time.monotonic() - begin) / 60
    return found


def _shuffled(names: list[str], rng: random.Random) -> Iterator[str]:
    """Yield all names in random order, again and again."""
    while True:
        yield from rng.sample(names, len(names))


def _round(scene: Scene, faults: list[str], number: int, found: Found, log: Console) -> Iterator[str]:
    """Disturb the suite, then let it finish. Yield what prevents that."""
    try:
        for name in faults:
            what = FAULTS[name](scene)
            found.events.append({"round": number, "fault": name, "what": what})
            log.print(f"round {number}: {name}: {what}")
        [code] = scene.wait(scene.processes.bench(scene.runs))
        if code:
            yield f"the suite was not finished after the faults (exit code {code})"
    except BrokenError as error:
        scene.processes.kill_all()
        yield str(error)


def _watch_memory(processes: Processes, domain: str, updates: int, found: Found, log: Console) -> None:
    try:
        growth = measure_growth(processes, domain, updates)
    except BrokenError as error:
        processes.kill_all()
        found.broken.append(str(error))
        return
    found.growth.append(growth)
    log.print(f"{domain}: {growth.middle:.0f} MB in the middle of {updates} updates, {growth.last:.0f} at the end")
    if not growth.is_flat:
        found.broken.append(f"{domain}: memory grew from {growth.middle:.0f} to {growth.last:.0f} MB")


def measure_growth(processes: Processes, domain: str, updates: int) -> Growth:
    """Train so many updates and read the resident memory of the process ten times a second.

    Raises:
        BrokenError: the run failed, hung, or ended before its memory was read.
    """
    runs = processes.folder / "growth" / domain
    recipe, *settings = LONG_RUNS[domain]
    settings += [
        f"train.steps={updates}", "train.log_every=10", f"train.checkpoint_every={max(updates // 4, 1)}",
        f"train.evaluate_every={updates}",
    ]  # fmt: skip
    command = ["dipole", "train", recipe, "--runs", str(runs), "--quiet"]
    for setting in settings:
        command += ["--set", setting]
    process = processes.start(command)
    middle: list[float] = []
    last: list[float] = []
    watchdog = Watchdog(processes, cpu_seconds=updates + MAX_CPU_SECONDS)  # an update takes less than a second
    while process.poll() is None:
        watchdog.check()
        fraction = _last_step(runs) / updates
        try:
            megabytes = psutil.Process(process.pid).memory_info().rss / 1e6
        except psutil.Error:
            megabytes = 0.0
        if megabytes and 0.4 <= fraction < 0.6:
            middle.append(megabytes)
        if megabytes and 0.8 <= fraction < 1:
            last.append(megabytes)
        time.sleep(0.1)
    if process.returncode or not middle or not last:
        raise BrokenError(
            f"the run of {updates} updates in {domain} ended with code {process.returncode}. See {processes.log}"
        )
    return Growth(domain, updates, median(middle), median(last))


def _last_step(runs: Path) -> int:
    """Read the step of the last complete line of metrics, without reading the whole file."""
    for path in runs.glob("*/metrics.jsonl"):
        try:
            with open(path, "rb") as file:
                file.seek(max(0, path.stat().st_size - 20_000))
                *_, line, _ = file.read().split(b"\n")
            return int(json.loads(line)["step"])
        except (OSError, ValueError, KeyError):
            continue
    return 0


def table(found: Found) -> Table:
    """Show how often each fault was made, and how."""
    rounds = max((event["round"] for event in found.events), default=0)
    shown = Table(title=f"{rounds} rounds in {found.minutes:.0f} minutes, seed {found.seed}")
    for head in ("fault", "times", "how"):
        shown.add_column(head)
    times = Counter(event["fault"] for event in found.events)
    for name in FAULTS:
        shown.add_row(name, str(times[name]), found.how.get(name, ""))
    return shown


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dipole.benchmarks.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60, metavar="N", help="of faults (default 60)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of faults and moments (default 0)")
    parser.add_argument("--into", type=Path, metavar="FOLDER", help="a new folder (default: a temporary one)")
    parser.add_argument(
        "--updates", type=int, default=10_000, metavar="N",
        help="of the runs whose memory is watched, one per domain (default 10000, 0 skips them)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    arguments = parser.parse_args(argv)
    if arguments.into is not None and arguments.into.exists() and any(arguments.into.iterdir()):
        parser.error(f"--into {arguments.into} is not empty. Name a new folder")
    folder = arguments.into or Path(tempfile.mkdtemp(prefix="dipole-soak-"))
    log = Console(stderr=True, highlight=False, soft_wrap=True)
    found = soak(folder, arguments.minutes, arguments.seed, arguments.updates, log)
    if arguments.json:
        print(json.dumps(asdict(found), indent=1))
    else:
        out = Console(highlight=False)
        out.print(table(found))
        for each in found.growth:
            out.print(f"{each.domain}: {each.updates} updates, {each.middle:.0f} -> {each.last:.0f} MB")
        for line in found.broken:
            out.print(f"BROKEN: {line}", markup=False)
    if found.broken:
        print(f"error: {len(found.broken)} differences or failures. See {folder}", file=sys.stderr)
        return 1
    if arguments.into is None:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
