"""Processes that make shards: a line of JSON in for each, a line out when its file is written.

Not `multiprocessing`: its processes run the main program of whoever imports dipole again, or inherit threads.
"""

import json
import os
import queue
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from dipole.core.utils.errors import DataError, DipoleError
from dipole.text.filled_folder import not_kept
from dipole.text.shards import Numbering, Task
from dipole.text.vocabulary import Tokens

# Of nltk's classifiers and drawings nothing is used; importing what they need costs a process 100 MB.
NOT_NEEDED = ("sklearn", "scipy", "matplotlib", "pandas", "torch", "tkinter")
# The modules that this process has found are found there too, wherever it was started.
BEGIN = """
import sys
del sys.path[0]
import json
sys.path[:] = json.loads(sys.argv[1])
from dipole.text.shard_worker import serve
serve()
"""


def file_of(folder: Path, number: int) -> Path:
    """Where a shard lies."""
    return folder / f"{number:05d}.npz"


def made_by(
    processes: int, numbering: Numbering, folder: Path, tasks: Iterable[Task], skip: Callable[[Task], int | None]
) -> Iterator[tuple[Task, int]]:
    """Make shards in so many processes, and yield each with the number of its sentences, in order.

    Args:
        skip: the sentences of a shard that is there already; None: it has to be made.

    Raises:
        DataError: a process failed.
    """
    workers = [_Worker(numbering, folder) for _ in range(processes)]
    idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
    for worker in workers:
        idle.put(worker)

    def run(task: Task) -> int:
        there = skip(task)
        if there is not None:
            return there
        worker = idle.get()
        try:
            return worker.make(task)
        finally:
            idle.put(worker)

    waiting: deque[tuple[Task, Future[int]]] = deque()
    with ThreadPoolExecutor(processes) as pool:
        try:
            for task in tasks:
                waiting.append((task, pool.submit(run, task)))
                if len(waiting) > processes:
                    first, future = waiting.popleft()
                    yield first, future.result()
            while waiting:
                first, future = waiting.popleft()
                yield first, future.result()
        finally:
            for _, future in waiting:
                future.cancel()
            for worker in workers:
                worker.end()


class _Worker:
    def __init__(self, numbering: Numbering, folder: Path) -> None:
        one = dict.fromkeys(("OMP_NUM_THREADS", "RAYON_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        self._process = subprocess.Popen(
            [sys.executable, "-c", BEGIN, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | one,
        )
        tokens = None if numbering.tokens is None else numbering.tokens.tokenizer.to_str()
        self._begun = {
            "max_length": numbering.max_length,
            "lower": numbering.lower,
            "tokens": tokens,
            "verbatim": numbering.verbatim,
            "folder": str(folder),
        }

    def make(self, task: Task) -> int:
        told = asdict(task) | self._begun
        self._begun = {}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(told).encode() + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError:
            line = b""
        if not line.endswith(b"\n"):
            code = self._process.wait()
            how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
            raise DataError(
                f"a process that read the corpus {how}. If memory ran out, set text.processes = 1; what was "
                f"finished is kept."
            )
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise DataError(answer["error"])
        return int(answer["sentences"])

    def end(self) -> None:
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        self._process.wait()


def serve() -> None:
    """Make the shards that are asked for on the standard input, until it ends."""
    for name in NOT_NEEDED:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    asked_by = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that asks ends this one
    numbering, folder = Numbering(1), Path()
    for line in sys.stdin.buffer:
        told = json.loads(line)
        if "folder" in told:
            tokens = None if told["tokens"] is None else Tokens(Tokenizer.from_str(told["tokens"]))
            numbering = Numbering(told["max_length"], told["lower"], tokens, told["verbatim"])
            folder = Path(told["folder"])
        pieces = tuple((starts, content) for starts, content in told["pieces"])
        try:
            shard = numbering.shard(Task(told["number"], told["before"], pieces, told["most"]))
            if os.getppid() != asked_by:  # it was killed, and another may have come
                return
            shard.save(file_of(folder, told["number"]))
            answer: dict[str, Any] = {"sentences": len(shard.lengths)}
        except DipoleError as error:
            answer = {"error": str(error)}
        except OSError as error:
            answer = {"error": str(not_kept(folder, error))}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
