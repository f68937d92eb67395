"""Two processes that evaluate an objective together. They are started once and used for all objectives.

`on_two_ranks` starts `python -m dipole.core.conformance.ranks RANK FOLDER PIPE` and talks to it through the pipe.
"""

import atexit
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dipole.core.conformance.layouts import LAYOUTS, Leaves
from dipole.core.conformance.subjects import LossAndGradients, named
from dipole.core.objectives.encoded_batch import EncodedBatch

COUNT = 2
PATIENCE = 60.0  # seconds for one objective
START = 180.0  # and for the first one, which waits for torch
# The layout's place in LAYOUTS, the number of classes, the objective, the whole batch.
Case = tuple[int, int | None, Any, Leaves]
Found = LossAndGradients | str  # the result, or the error


class _Processes:
    """The two processes. They end when this process closes their pipes."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="dipole-ranks-")
        path = os.pathsep.join(each for each in sys.path if each)
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            environment.pop(name, None)
        self._patience = START
        self._pipes: list[Any] = []
        self._each: list[subprocess.Popen[bytes]] = []
        for rank in range(COUNT):
            ours, theirs = Pipe()
            command = [sys.executable, "-m", __name__, str(rank), self._folder.name, str(theirs.fileno())]
            with theirs, self._errors(rank).open("wb") as errors:
                self._each.append(
                    subprocess.Popen(command, stdout=errors, stderr=errors, env=environment, pass_fds=[theirs.fileno()])
                )
            self._pipes.append(ours)

    def _errors(self, rank: int) -> Path:
        return Path(self._folder.name, f"errors.{rank}")

    def ask(self, question: bytes) -> list[Any]:
        """Return the answer of each process."""
        end = time.monotonic() + self._patience
        try:
            for pipe in self._pipes:
                pipe.send_bytes(question)
            answers = []
            for pipe in self._pipes:
                if not pipe.poll(max(0.0, end - time.monotonic())):
                    raise EOFError("no answer")
                answers.append(pickle.loads(pipe.recv_bytes()))
            self._patience = PATIENCE
            return answers
        except (EOFError, OSError) as error:
            texts = [self._errors(rank).read_text(errors="replace") for rank in range(COUNT)]
            last = [line for text in texts for line in text.splitlines()[-1:]]
            self.end()
            raise RuntimeError(f"the two processes ended: {' / '.join(last) or error}") from None

    def end(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for each in self._each:
            each.kill()
            each.wait()
        self._folder.cleanup()


_running: list[_Processes] = []


def start() -> None:
    """Start the processes if they do not run. They import torch while other checks run."""
    if not _running:
        _running.append(_Processes())


@atexit.register
def _end() -> None:
    while _running:
        _running.pop().end()


def on_two_ranks(cases: Sequence[Case]) -> list[Found]:
    """Return loss and gradients of each case, with its batch divided unequally among two processes.

    Raises RuntimeError if an objective cannot be sent to another process, or a process ended.
    """
    plain = [
        (number, classes, instance, {name: leaf.detach() for name, leaf in leaves.items()})
        for number, classes, instance, leaves in cases
    ]
    try:
        question = pickle.dumps(plain)
    except Exception as error:
        raise RuntimeError(f"it cannot be sent to another process: {type(error).__name__}: {error}") from None
    start()
    try:
        # Send the search path, as it may have changed since the processes started.
        answers = _running[0].ask(pickle.dumps((sys.path, question)))
    except RuntimeError:
        _running.clear()
        raise
    if isinstance(answers[0], str):
        raise RuntimeError(answers[0])
    return [_joined(parts) for parts in zip(*answers, strict=True)]


def _joined(parts: Sequence[Found]) -> Found:
    """Join the gradients of both shares as DistributedDataParallel averages them."""
    values: list[LossAndGradients] = []
    for part in parts:
        if isinstance(part, str):
            return part
        values.append(part)
    if not torch.allclose(values[0].value, values[1].value, rtol=1e-9, atol=1e-12):
        return f"the loss is {values[0].value.item():.8g} on one rank and {values[1].value.item():.8g} on the other"
    joined: dict[str, Tensor | None] = {}
    for name in values[0].gradients:
        present = [g for value in values if (g := value.gradients[name]) is not None]
        if name.startswith("rows."):
            joined[name.removeprefix("rows.")] = torch.cat(present) / COUNT
        else:
            joined[name] = torch.stack(present).sum(0) / COUNT
    return LossAndGradients(values[0].value, joined)


def share(length: int, rank: int) -> slice:
    """Return the rows of a rank, in unequal parts."""
    first = length - max(1, length // 3)
    return (slice(0, first), slice(first, length))[rank]


def loss_on_rank(case: Case, rank: int) -> Found:
    """Return loss and gradients of a rank's share, or the error of the objective."""
    number, classes, instance, leaves = case
    layout = LAYOUTS[number].fitted(classes=classes)
    rows, held = {}, {}
    for name, leaf in leaves.items():
        if name in ("queue", "bank"):  # past embeddings, equal on all ranks
            held[name] = leaf.clone().requires_grad_()
        else:
            rows[name] = leaf[share(len(leaf), rank)].clone().requires_grad_()
    try:
        outcome = instance(EncodedBatch(dict(rows), lambda gathered: layout.build(**gathered, **held)))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    wanted = named({f"rows.{name}": leaf for name, leaf in rows.items()} | held, instance)
    found = tuple(map(torch.zeros_like, wanted.values()))
    if outcome.loss.requires_grad:
        found = torch.autograd.grad(outcome.loss, list(wanted.values()), materialize_grads=True)
    return LossAndGradients(outcome.loss.detach().double(), dict(zip(wanted, found, strict=True)))


def main(rank: int, folder: str, pipe: int) -> None:
    """Answer questions until the pipe is closed."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=COUNT, timeout=timedelta(seconds=PATIENCE)
    )
    with Connection(pipe) as questions:
        while True:
            try:
                path, question = pickle.loads(questions.recv_bytes())
                sys.path += [each for each in path if each not in sys.path]
                answer: Any = [loss_on_rank(case, rank) for case in pickle.loads(question)]
            except EOFError:
                os._exit(0)  # skip the shutdown of the group: both processes end
            except Exception as error:
                answer = f"it cannot be sent to another process: {type(error).__name__}: {error}"
            questions.send_bytes(pickle.dumps(answer))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
