"""One job in a process of its own: lock it, train it as `dipole train` does, give the lock back.

    python -m dipole.benchmarks.run.worker RUNS HASH PROCESSES PARENT -- train RECIPE --set ...
    python -m dipole.benchmarks.run.worker --rank train RECIPE --set ...    one rank, started by torchrun

Exit codes are those of `dipole train`, and `TAKEN` if another living process has the job: several runners on one folder
never do the same job at the same time.

The lock is a lock file, which the operating system releases with its process, also after kill -9, and a file that names
the process: host, boot, process namespace, number, and start time. Another host or container may share the folder
without sharing the lock. There a lock counts while its process renews the file, and for `STALE_AFTER` seconds more.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from itertools import pairwise
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from dipole.benchmarks.manifest import BENCH, is_done
from dipole.core.utils.errors import ReceivedError
from dipole.core.utils.files import atomic_write, remove_scratch
from dipole.core.utils.process import LONGEST_OWNER, describe_self, is_gone, is_locked, read_owner
from dipole.core.utils.received import read_text

TAKEN = 79
GRACE = 60.0
RENEW_EVERY = 10.0
STALE_AFTER = 120.0
GLIMPSE = 0.5
_PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> int:
    if argv[0] == "--rank":
        # torchrun gives every rank a session of its own, which a kill of the runner's process group does not reach.
        follow(os.getppid())
        return _train(argv[1:])
    runs, name, processes, parent = Path(argv[0]), argv[1], int(argv[2]), int(argv[3])
    command = argv[argv.index("--") + 1 :]
    follow(parent)
    try:
        with locked(runs / BENCH / "claims", name), _stopped_by(runs / BENCH / "stops" / name):
            if is_done(runs / name):  # another runner may have finished it since its record was looked at
                return 0
            if not _is_that_run(command, name):
                return 1
            if processes == 1:
                return _train(command)
            return _torchrun(command, processes)
    except TakenError:
        return TAKEN


def ask_to_stop(runs: Path, name: str) -> None:
    """Ask the worker of a job, wherever it runs, to save a checkpoint and end."""
    path = runs / BENCH / "stops" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


@contextmanager
def _stopped_by(request: Path) -> Iterator[None]:
    """End the training inside the block as a scheduler would once a file of that name is there."""
    request.unlink(missing_ok=True)  # of an earlier attempt
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(1.0):
            if request.exists():
                _end()
                return

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        request.unlink(missing_ok=True)


def arguments(runs: Path, name: str, processes: int, parent: int, command: list[str]) -> list[str]:
    """Return the arguments of `main`. The worker ends with the process `parent`."""
    flags = ["--runs", str(runs), "--resume", "auto"]
    return [str(runs), name, str(processes), str(parent), "--", *command, *flags]


def _is_that_run(command: list[str], name: str) -> bool:
    """Return whether the command still means this run: recipes and defaults can be edited."""
    from dipole.core.train.recipe import load_recipe

    settings = [text for flag, text in pairwise(command) if flag == "--set"]
    if (found := load_recipe(command[1], settings).config.hash) == name:
        return True
    print(
        f"error: these settings are now run {found}, not {name}: a recipe or dipole itself was changed since the suite "
        "was expanded. Start `dipole bench` again."
    )
    return False


def _train(command: list[str]) -> int:
    from dipole.core.cli import main as dipole

    return dipole(command)


def _torchrun(command: list[str], processes: int) -> int:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    before = None
    if sys.platform == "linux":  # it tells the launcher to end, with its children, when this worker dies
        before = partial(ctypes.CDLL(None).prctl, _PR_SET_PDEATHSIG, signal.SIGTERM)
    child = subprocess.Popen([*launch, "-m", "dipole.benchmarks.run.worker", "--rank", *command], preexec_fn=before)
    try:
        return child.wait()
    finally:
        child.terminate()
        child.wait()


@cache
def follow(parent: int) -> None:
    """End this process soon after the one that started it. The next runner goes on from its checkpoint."""
    lives = _life_of(parent)

    def watch() -> None:
        while lives():
            time.sleep(1.0)
        # The trainer answers the signal with a checkpoint. Trainers that do not answer in time are ended.
        _end()
        time.sleep(GRACE)
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def _life_of(parent: int) -> Callable[[], bool]:
    """Return a function that says whether the process that started this one lives."""
    if os.name != "nt":
        return lambda: os.getppid() == parent
    # Windows gives an orphan no other parent, and the python of a virtual environment starts another, which is ours.
    try:
        return psutil.Process(parent).is_running
    except psutil.NoSuchProcess:
        return lambda: False


def _end() -> None:
    """Send this process the signal of a scheduler. On Windows `os.kill` would end it without asking."""
    if os.name == "nt":
        signal.raise_signal(signal.SIGTERM)
    else:
        os.kill(os.getpid(), signal.SIGTERM)


class TakenError(Exception):
    """Another living process holds the lock."""


@contextmanager
def locked(folder: Path, name: str) -> Iterator[None]:
    """Hold the lock `name` for the duration of the block. TakenError if a living process has it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    try:
        # `is_held` takes the lock for a moment to see whether it is free: that does not hold it.
        lock = FileLock(path.with_suffix(".lock")).acquire(timeout=GLIMPSE, poll_interval=0.01)
    except Timeout as error:
        raise TakenError(name) from error
    with lock:
        if _is_renewed_elsewhere(path):
            raise TakenError(name)
        remove_scratch(folder, f"{name}.*")  # of a runner that was killed while it wrote the same
        atomic_write(path, describe_self())
        stop = threading.Event()
        renewal = threading.Thread(target=_renew, args=(path, stop), daemon=True)
        renewal.start()
        try:
            yield
        finally:
            stop.set()
            renewal.join()
            path.unlink(missing_ok=True)


def is_held(path: Path) -> bool:
    """Return whether the lock FOLDER/NAME.json belongs to a living process."""
    return is_locked(path.with_suffix(".lock")) or _is_renewed_elsewhere(path)


def _is_renewed_elsewhere(path: Path) -> bool:
    """Return whether a process that may not share our locks renews this file every `RENEW_EVERY` seconds."""
    clock = path.parent / ".clock"  # ages are by the clock of the file system, and a date far ahead is no renewal
    try:
        clock.touch()
        return _may_live(path) and abs(clock.stat().st_mtime - path.stat().st_mtime) < STALE_AFTER
    except FileNotFoundError:
        return False


def _may_live(path: Path) -> bool:
    """Return whether the process that a file names may live, on another host or in another namespace."""
    try:
        text = read_text(path, LONGEST_OWNER)
    except ReceivedError:
        return False
    owner, here = read_owner(text), read_owner(describe_self())
    if not owner.keys() >= here.keys() or not isinstance(owner["pid"], int):
        return False
    if owner["host"] != here["host"]:
        return True
    if owner["boot"] != here["boot"]:
        with suppress(OSError, RuntimeError):
            return path.stat().st_mtime > psutil.boot_time()
        return True  # the machine does not say when it was started
    return owner["namespace"] != here["namespace"] or (owner["pid"] != os.getpid() and not is_gone(text))


def _renew(path: Path, stop: threading.Event) -> None:
    while not stop.wait(RENEW_EVERY):
        with suppress(OSError):
            os.utime(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
