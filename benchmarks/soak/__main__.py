"""Run a small suite under faults, and compare it with an undisturbed run. Exit with 1 if anything differs.

    python -m dipole.benchmarks.soak [--minutes 60] [--seed 0] [--into FOLDER] [--updates 10000] [--json]

docs/background/reliability.md describes the faults and what must hold. A full disk needs the right to mount a tmpfs, a
clock that jumps needs a C compiler. Without them these faults are left out.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from safetensors.numpy import load_file

from dipole.benchmarks.manifest import BENCH, read_records
from dipole.core.train.metrics import read_metrics
from dipole.core.utils.text import text_table

HERE = Path(__file__).parent
TOKEN = "DIPOLE_SOAK"  # environment variable of every process of a soak test, so that all of them can be found
# Most processor seconds of an attempt and of processes after their runner, and most seconds without progress.
CPU_SECONDS, ORPHAN_CPU_SECONDS, IDLE_SECONDS = 400.0, 15.0, 180.0
MAX_GROWTH = 8.0  # megabytes by which memory may grow from a run's middle fifth to its last. Allocators vary so much
# Fields of a record that differ between two equal runs.
TIMES_AND_SIZES = {"started", "updated", "wall_seconds", "training_seconds", "peak_memory_bytes", "peak_device_bytes"}
# Recipe and settings of the runs whose memory is watched.
LONG_RUNS = {
    "vision": ("digits-simclr", "train.epochs=", "train.batch_size=32", "vision.probe.baselines=false",
               "vision.probe.probes=['kmeans']", "train.warmup=0"),
    "text": ("pydoc-bow", "train.epochs=", "train.batch_size=32"),
    "rl": ("dot", "rl.learning_starts=200", "rl.buffer_size=500", "rl.episodes=1"),
}  # fmt: skip


class BrokenError(Exception):
    """A guarantee of docs/background/reliability.md does not hold."""


class Soak:
    """The processes of a soak test, its folders, and the random numbers of its faults and their moments."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.rng, self.token = folder.resolve(), random.Random(seed), f"{os.getpid()}-{time.time_ns()}"
        self.log, self.temporary, self.disk = (self.folder / name for name in ("soak.log", "tmp", "disk"))
        self.runs, clock = self.disk / "runs", self.folder / "clock.so"
        for path in (self.temporary, self.disk):
            path.mkdir(parents=True)
        self.can_fill = succeeds(["mount", "-t", "tmpfs", "-o", "size=128m", "tmpfs", str(self.disk)])
        self.clock: dict[str, str] = {}
        if succeeds(["cc", "-shared", "-fPIC", "-O1", "-o", str(clock), str(HERE / "clock.c")]):
            self.clock = {"LD_PRELOAD": str(clock)}

    def start(
        self, arguments: list[str], environment: dict[str, str] | None = None, before: Callable[[], None] | None = None
    ) -> "subprocess.Popen[bytes]":
        """Start `python -m ARGUMENTS`. `before` runs in the new process, before the program."""
        own = {
            TOKEN: self.token, "TMPDIR": str(self.temporary), "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "cache"),
            "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONFAULTHANDLER": "1",
        }  # fmt: skip
        with self.log.open("ab") as log:
            command, everything = [sys.executable, "-m", *arguments], {**os.environ, **own, **(environment or {})}
            return subprocess.Popen(command, env=everything, stdout=log, stderr=log, preexec_fn=before)

    def bench(self, runs: Path | None = None, **options: Any) -> "subprocess.Popen[bytes]":
        command = ["dipole", "bench", str(HERE / "suite.toml"), "--runs", str(runs or self.runs)]
        return self.start([*command, "--jobs", "2", "--threads", "1"], **options)

    def living(self) -> list[int]:
        """Return the ids of all processes with the token."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.environ().get(TOKEN) == self.token:
                    found.append(process.pid)
        return sorted(found)

    def end_all(self, which: signal.Signals | None = None) -> None:
        """Send all processes a signal, by default SIGKILL. After SIGABRT they write their stacks into the log."""
        for pid in self.living():
            with suppress(ProcessLookupError):
                os.kill(pid, which or signal.SIGKILL)

    def wait(
        self, *runners: "subprocess.Popen[bytes]", cpu_seconds: float = CPU_SECONDS, idle_seconds: float = IDLE_SECONDS
    ) -> list[int]:
        """Wait for all processes and return the runners' exit codes. Raise BrokenError if any does not end."""
        used: dict[int, float] = {}  # of processes that have ended as well
        before, since, is_over = 0.0, time.monotonic(), False
        while (running := [each for each in runners if each.poll() is None]) or self.living():
            for pid in self.living():
                with suppress(psutil.Error):
                    used[pid] = sum(psutil.Process(pid).cpu_times()[:2])
            total, now = sum(used.values()), time.monotonic()
            if not running and not is_over:
                is_over, cpu_seconds = True, total + ORPHAN_CPU_SECONDS
            if total > before + 1.0:
                before, since = total, now
            if total > cpu_seconds or now > since + idle_seconds:
                self.end_all(signal.SIGABRT)
                raise BrokenError(
                    f"an attempt does not end: {total:.0f} s of processor time, {now - since:.0f} s without progress, "
                    f"{len(running)} runners alive. Its stacks are in {self.log}"
                )
            time.sleep(0.2)
        return [each.returncode for each in runners]

    def pause(self, process: "subprocess.Popen[bytes]", least: float, most: float) -> None:
        """Wait some seconds, or until the process ends."""
        with suppress(subprocess.TimeoutExpired):
            process.wait(self.rng.uniform(least, most))


def succeeds(command: list[str]) -> bool:
    return shutil.which(command[0]) is not None and subprocess.run(command, capture_output=True).returncode == 0


def _signal(soak: Soak, which: signal.Signals, is_for_worker: bool) -> str:
    process = soak.bench()
    while is_for_worker and process.poll() is None and soak.living() == [process.pid]:
        time.sleep(0.2)  # a busy machine starts the first worker late
    soak.pause(process, 1, 18)
    workers = [pid for pid in soak.living() if pid != process.pid]
    victim = soak.rng.choice(workers) if is_for_worker and workers else process.pid
    with suppress(ProcessLookupError):
        os.kill(victim, which)
    return f"exit code {soak.wait(process)[0]}"


def full_disk(soak: Soak) -> str:
    process, ballast = soak.bench(), soak.disk / "ballast"
    soak.pause(process, 2, 15)
    with suppress(OSError):
        ballast.write_bytes(bytes(psutil.disk_usage(str(soak.disk)).free))
    soak.pause(process, 2, 8)
    ballast.unlink(missing_ok=True)
    return f"exit code {soak.wait(process)[0]}"


def little_memory(soak: Soak) -> str:
    """Limit the addresses of each process to 150 to 1,100 MB above those that libraries reserve."""
    import resource  # Windows has none

    size = (3000 + soak.rng.randrange(150, 1100)) * 1024**2
    process = soak.bench(before=lambda: resource.setrlimit(resource.RLIMIT_AS, (size, size)))
    return f"{size >> 20} MB, exit code {soak.wait(process)[0]}"


def jumping_clock(soak: Soak) -> str:
    if soak.wait(soak.bench(environment=soak.clock)) != [0]:
        raise BrokenError("the suite failed under a clock that jumps")
    return "exit code 0"


def second_runner(soak: Soak) -> str:
    """Start two runners on one folder. Kill the first one in half of the cases."""
    first = soak.bench()
    soak.pause(first, 0, 4)
    second, is_killed = soak.bench(), soak.rng.random() < 0.5
    if is_killed:
        soak.pause(first, 2, 10)
        first.kill()
    codes = soak.wait(first, second)
    if codes[1] or (codes[0] and not is_killed):
        raise BrokenError(f"two runners on one folder ended with exit codes {codes}")
    return f"exit codes {codes}"


Fault = Callable[[Soak], str]
# The suite may be unfinished after these.
HARMFUL: dict[str, Fault] = {
    "kill -9": lambda soak: _signal(soak, signal.SIGKILL, False),
    "kill -9 of a worker": lambda soak: _signal(soak, signal.SIGKILL, True),  # the runner must start it again
    "SIGTERM": lambda soak: _signal(soak, signal.SIGTERM, soak.rng.random() < 0.5),
    "full disk": full_disk,
    "little memory": little_memory,
}
# The suite must be finished after these. They end a round.
HARMLESS: dict[str, Fault] = {"clock jumps": jumping_clock, "second runner": second_runner}


def differences(undisturbed: Path, runs: Path) -> Iterator[str]:
    """Yield a line for each record, metric or file that differs from the undisturbed folder."""
    wanted, found = read_records(undisturbed), read_records(runs)
    yield from (f"{problem.path.name}: {problem.message[:300]}" for problem in found.problems)
    if missing := wanted.records.keys() - found.records.keys():
        yield f"no record of {', '.join(sorted(missing))}"
    for name in sorted(wanted.records.keys() & found.records.keys()):
        ours, theirs = (each.records[name].model_dump(mode="json", exclude=TIMES_AND_SIZES) for each in (found, wanted))
        if different := sorted(key for key in theirs if ours[key] != theirs[key]):
            yield f"{name}: the record differs in {', '.join(different)}"
        mine, other = _contents(runs / name), _contents(undisturbed / name)
        for file in sorted(mine.keys() | other.keys()):
            if mine.get(file) != other.get(file):
                yield f"{name}: {file} differs"


def _contents(run: Path) -> dict[str, Any]:
    """Return the content of every file of a run but its record and checkpoints, without times."""
    found: dict[str, Any] = {}
    for path in run.rglob("*"):
        place = path.relative_to(run)
        is_own = path.name in ("record.json", "metrics.jsonl") or path.name.startswith(".")
        if is_own or "checkpoints" in place.parts or not path.is_file():
            continue
        found[place.as_posix()] = path.read_bytes()
        if path.suffix == ".safetensors":
            found[place.as_posix()] = {name: array.tobytes() for name, array in load_file(path).items()}
    lines = read_metrics(run / "metrics.jsonl")
    return found | {"metrics.jsonl": [{key: line[key] for key in line if key != "time"} for line in lines]}


def left_behind(runs: Path, temporary: Path) -> Iterator[str]:
    """Yield a line for each temporary file, claim, checkpoint and socket that remains."""
    for path in sorted(runs.rglob("*")):
        place = path.relative_to(runs)
        is_claim = place.match(f"{BENCH}/claims/*.json") or place.match(f"{BENCH}/stops/*")
        is_checkpoint = place.parts[0] != BENCH and "checkpoints" in place.parts
        if is_claim or is_checkpoint or ".tmp" in path.name or path.name == ".pid" or path.is_socket():
            yield f"left behind: {place}"
    yield from (f"left in TMPDIR: {name}" for name in sorted(os.listdir(temporary)))


def growth(soak: Soak, domain: str, updates: int) -> tuple[float, float]:
    """Train for a number of updates. Return the resident megabytes in the middle fifth and in the last fifth."""
    runs, (recipe, *settings) = soak.folder / domain, LONG_RUNS[domain]
    command = ["dipole", "train", recipe, "--runs", str(runs), "--quiet", "--set", *settings, "train.log_every=10"]
    command += [f"train.steps={updates}", f"train.evaluate_every={updates}"]
    process = soak.start([*command, f"train.checkpoint_every={max(updates // 4, 1)}"])
    found: dict[int, list[float]] = {2: [], 4: []}
    while process.poll() is None:
        time.sleep(0.2)
        for path in runs.glob("*/metrics.jsonl"):
            with suppress(Exception):  # a line that is half written, or a process that has ended
                fifth = 5 * read_metrics(path)[-1]["step"] // updates
                found[fifth].append(psutil.Process(process.pid).memory_info().rss / 1e6)
    if process.returncode or not all(found.values()):
        raise BrokenError(f"{domain}: the run ended with exit code {process.returncode}. See {soak.log}")
    return median(found[2]), median(found[4])


def disturb(soak: Soak, faults: list[str], undisturbed: Path) -> Iterator[tuple[str, str]]:
    """Yield each fault with its outcome, then let the suite finish, and yield what is wrong with it as "BROKEN"."""
    try:
        for name in faults:
            yield name, (HARMFUL | HARMLESS)[name](soak)
        if soak.wait(soak.bench()) != [0]:
            raise BrokenError("the suite was not finished after the faults")
        for line in (*differences(undisturbed, soak.runs), *left_behind(soak.runs, soak.temporary)):
            yield "BROKEN", line
    except BrokenError as error:
        yield "BROKEN", str(error)


def main(argv: list[str] | None = None) -> int:
    about = "of the runs whose memory is watched, one per domain (default 10000, 0 skips them)"
    parser = argparse.ArgumentParser(prog="python -m dipole.benchmarks.soak", description=str(__doc__).split("\n")[0])
    parser.add_argument("--minutes", type=float, default=60, metavar="N", help="of faults (default 60)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of faults and moments (default 0)")
    parser.add_argument("--into", type=Path, metavar="FOLDER", help="a new folder (default: a temporary one)")
    parser.add_argument("--updates", type=int, default=10_000, metavar="N", help=about)
    parser.add_argument("--json", action="store_true", help="print every event as JSON")
    arguments = parser.parse_args(argv)
    if arguments.into is not None and arguments.into.exists() and any(arguments.into.iterdir()):
        parser.error(f"--into {arguments.into} is not empty. Name a new folder")
    folder = arguments.into or Path(tempfile.mkdtemp(prefix="dipole-soak-"))
    soak, events = Soak(folder, arguments.seed), list[tuple[int, str, str]]()

    def note(number: int, name: str, what: str) -> None:
        events.append((number, name, what))
        print(f"round {number}: {name}: {what}", file=sys.stderr, flush=True)

    harmful = [name for name in HARMFUL if name != "full disk" or soak.can_fill]
    harmless = [name for name in HARMLESS if name != "clock jumps" or soak.clock]
    undisturbed, number = soak.folder / "undisturbed", 0
    try:
        if soak.wait(soak.bench(undisturbed)) != [0]:
            raise BrokenError(f"the undisturbed suite failed. See {soak.log}")
        for domain in LONG_RUNS if arguments.updates else ():
            middle, last = growth(soak, domain, arguments.updates)
            note(0, domain, f"{middle:.0f} MB in the middle of {arguments.updates} updates, {last:.0f} MB at the end")
            if last - middle > MAX_GROWTH:
                note(0, "BROKEN", f"memory grows in {domain}")
        end = time.monotonic() + 60 * arguments.minutes
        while number == 0 or time.monotonic() < end:
            number += 1
            faults = [*soak.rng.sample(harmful, 2), soak.rng.choice(harmless)]
            for name, what in disturb(soak, faults, undisturbed):
                note(number, name, what)
            soak.end_all()
            if any(event[:2] == (number, "BROKEN") for event in events) and soak.runs.is_dir():
                shutil.copytree(soak.runs, soak.folder / f"broken-{number}", dirs_exist_ok=True)
            shutil.rmtree(soak.runs, ignore_errors=True)
    except BrokenError as error:
        note(number, "BROKEN", str(error))
    finally:
        soak.end_all()
        if soak.can_fill:
            succeeds(["umount", "-l", str(soak.disk)])
    if arguments.json:
        print(json.dumps([{"round": number, "event": name, "what": what} for number, name, what in events], indent=1))
    else:
        times = Counter(name for _, name, _ in events)
        print(text_table([("event", "times"), *((name, str(count)) for name, count in times.items())]))
    if any(name == "BROKEN" for _, name, _ in events):
        print(f"error: something broke. See {folder}", file=sys.stderr)
        return 1
    if arguments.into is None:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
