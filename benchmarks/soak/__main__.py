"""`python -m dipole.benchmarks.soak`: rounds of faults until the time is up; exit code 1 with what broke."""

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dipole.benchmarks.soak.faults import FAULTS, HARMFUL, HARMLESS, BrokenError, Scene
from dipole.benchmarks.soak.growth import Growth, measure
from dipole.benchmarks.soak.judge import differences, left_behind, shared_memory
from dipole.benchmarks.soak.limits import Clock, Disk, Memory
from dipole.benchmarks.soak.processes import Place
from dipole.benchmarks.soak.suite import LONG, SUITE

HARMFUL_A_ROUND = 2


@dataclass
class Found:
    """What happened, round by round, and what broke."""

    seed: int
    how: dict[str, str] = field(default_factory=dict)
    minutes: float = 0.0
    events: list[dict[str, Any]] = field(default_factory=list)
    growth: list[Growth] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    @property
    def rounds(self) -> int:
        return max((event["round"] for event in self.events), default=0)


def soak(folder: Path, minutes: float, seed: int, updates: int, say: Console) -> Found:
    """Disturb a suite in a folder for so many minutes, at least one round.

    Args:
        folder: is made; what broke stays in it.
        minutes: no round begins after them.
        seed: of the faults, their order and their moments.
        updates: of the run whose memory is watched; 0 leaves it out.
        say: is told what happens.
    """
    place = Place(folder.resolve(), f"{os.getpid()}-{time.time_ns()}")
    place.folder.mkdir(parents=True, exist_ok=True)
    (place.folder / "soak.toml").write_text(SUITE, encoding="utf-8")
    found, begin = Found(seed), time.monotonic()
    disk, memory, clock = Disk(place.folder / "disk"), Memory(f"dipole-soak-{os.getpid()}"), Clock(place.folder)
    found.how = {"full disk": disk.how, "little memory": memory.how, "clock jumps": clock.how}
    rng = random.Random(seed)
    harmful = _shuffled(list(HARMFUL), rng)
    harmless = _shuffled([name for name in HARMLESS if name != "clock jumps" or clock.environment], rng)
    shared, undisturbed = shared_memory(), place.folder / "undisturbed"
    try:
        say.print("An undisturbed run of the suite.")
        if place.bench(undisturbed).wait():
            raise BrokenError(f"the undisturbed suite failed; see {place.log}")
        for domain, (recipe, *settings) in LONG.items() if updates else ():
            try:
                grown = measure(place, domain, recipe, settings, updates)
            except RuntimeError as error:
                found.broken.append(str(error))
                continue
            found.growth.append(grown)
            say.print(
                f"{domain}: {grown.middle:.0f} MB in the middle of {updates} updates, {grown.last:.0f} at the end"
            )
            if not grown.is_flat:
                found.broken.append(f"{domain}: memory grew from {grown.middle:.0f} to {grown.last:.0f} MB")
        number, end = 0, time.monotonic() + 60 * minutes
        while number == 0 or time.monotonic() < end:
            number += 1
            runs = disk.folder / f"round-{number}"
            scene = Scene(place, runs, disk, memory, clock, rng)
            broken: list[str] = []
            try:
                for name in (*islice(harmful, HARMFUL_A_ROUND), next(harmless)):
                    what = FAULTS[name](scene)
                    found.events.append({"round": number, "fault": name, "what": what})
                    say.print(f"round {number}: {name}: {what}")
                [code] = scene.wait(place.bench(runs))
                if code:
                    broken.append(f"the suite was not finished after the faults (exit code {code})")
            except BrokenError as error:
                broken.append(str(error))
                place.end_all()
            else:
                broken += [*differences(undisturbed, runs), *left_behind(runs, place.temporary, shared, place.seen)]
            for line in broken:
                found.broken.append(f"round {number}: {line}")
                say.print(f"round {number}: BROKEN: {line}")
            if broken:
                shutil.copytree(runs, place.folder / f"broken-{number}", dirs_exist_ok=True)
            shutil.rmtree(runs, ignore_errors=True)
    except BrokenError as error:
        found.broken.append(str(error))
    finally:
        place.end_all()
        memory.remove()
        disk.remove()
    found.minutes = (time.monotonic() - begin) / 60
    return found


def _shuffled(names: list[str], rng: random.Random) -> Iterator[str]:
    """The names again and again, each as often as every other."""
    while True:
        yield from rng.sample(names, len(names))


def table(found: Found) -> Table:
    """How often each fault was made, and by what means."""
    shown = Table(title=f"{found.rounds} rounds in {found.minutes:.0f} minutes, seed {found.seed}")
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
        help="of the runs whose memory is watched, one per domain (default 10000; 0 leaves them out)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    arguments = parser.parse_args(argv)
    if arguments.into is not None and arguments.into.exists() and any(arguments.into.iterdir()):
        parser.error(f"--into {arguments.into} is not empty")
    folder = arguments.into or Path(tempfile.mkdtemp(prefix="dipole-soak-"))
    say = Console(stderr=True, highlight=False, soft_wrap=True)
    found = soak(folder, arguments.minutes, arguments.seed, arguments.updates, say)
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
        print(f"error: {len(found.broken)} promises broken; everything is in {folder}", file=sys.stderr)
        return 1
    if arguments.into is None:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
