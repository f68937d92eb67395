"""Two processes that evaluate an objective together. They are started once and used for all objectives.

`on_two_ranks` starts `python -m dipole.core.conformance.ranks RANK FILE` and talks to it through pipes.
"""

from __future__ import annotations

import atexit
import io
import os
import pickle
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from dipole.core.conformance.layouts import LAYOUTS, Leaves
from dipole.core.conformance.subjects import Result, parameters_of
from dipole.core.objectives.encoded_batch import EncodedBatch

COUNT = 2
PATIENCE = 60.0  # seconds for one objective
START = 180.0  # and for the first one, which waits for torch
Case = tuple[int, Any, Leaves]  # the layout's place in LAYOUTS, the objective, the whole batch
Found = Result | str  # what came out, or the error


class RanksError(RuntimeError):
    """The two processes cannot evaluate the objective."""


class _Processes:
    """The two processes. They end when this process closes their pipes."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="dipole-ranks-")
        path = os.pathsep.join(each for each in sys.path if each)
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            environment.pop(name, None)
        meeting = str(Path(self._folder.name, "meeting"))
        self._met = False
        self._errors = [Path(self._folder.name, f"errors.{rank}") for rank in range(COUNT)]
        self._each = [
            subprocess.Popen(
                [sys.executable, "-m", __name__, str(rank), meeting],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors.open("wb"),
                env=environment,
            )
            for rank, errors in enumerate(self._errors)
        ]

    def ask(self, question: bytes) -> list[Any]:
        """Return the answer of each process."""
        late = threading.Timer(PATIENCE if self._met else START, self.end)
        late.start()
        try:
            for each in self._each:
                _send(each.stdin, question)
            answers = [_receive(each.stdout) for each in self._each]
            self._met = True
            return answers
        except (EOFError, OSError) as error:
            self.end()
            last = [line for path in self._errors for line in path.read_text(errors="replace").splitlines()[-1:]]
            self.close()
            raise RanksError(f"the two processes ended: {' / '.join(last) or error}") from None
        finally:
            late.cancel()

    def end(self) -> None:
        """Kill the processes. A pending `ask` raises an error."""
        for each in self._each:
            for pipe in (each.stdin, each.stdout):
                if pipe is not None:
                    with suppress(OSError):
                        pipe.close()
            each.kill()
            each.wait()

    def close(self) -> None:
        self.end()
        self._folder.cleanup()


_running: list[_Processes] = []


def start() -> None:
    """Start the processes if they do not run. They import torch while other checks run."""
    if not _running:
        _running.append(_Processes())


@atexit.register
def _end() -> None:
    while _running:
        _running.pop().close()


def on_two_ranks(cases: Sequence[Case]) -> list[Found]:
    """Return loss and gradients of each case, with its batch divided unequally among two processes.

    Raises:
        RanksError: an objective cannot be sent to another process, or a process ended.
    """
    try:
        question = pickle.dumps([(number, instance, _plain(leaves)) for number, instance, leaves in cases])
    except Exception as error:
        raise RanksError(f"it cannot be sent to another process: {type(error).__name__}: {error}") from None
    start()
    try:
        # Send the search path, as it may have changed since the processes started.
        answers = _running[0].ask(pickle.dumps((sys.path, question)))
    except RanksError:
        _running.clear()
        raise
    if isinstance(answers[0], str):
        raise RanksError(answers[0])
    return [_joined(parts) for parts in zip(*answers, strict=True)]


def _plain(leaves: Leaves) -> Leaves:
    return {name: leaf.detach() for name, leaf in leaves.items()}


def _joined(parts: Sequence[Found]) -> Found:
    """Join the gradients of both shares as DistributedDataParallel averages them."""
    values: list[Result] = []
    for part in parts:
        if isinstance(part, str):
            return part
        values.append(part)
    if not torch.allclose(values[0].value, values[1].value, rtol=1e-9, atol=1e-12):
        return f"the loss is {values[0].value.item():.8g} on one rank and {values[1].value.item():.8g} on the other"
    joined: dict[str, Tensor | None] = {}
    for name in values[0].gradients:
        each = [value.gradients[name] for value in values]
        present = [g for g in each if g is not None]
        if not present:
            joined[name] = None
        elif name.startswith("rows."):
            joined[name.removeprefix("rows.")] = torch.cat(present) / COUNT
        else:
            joined[name] = torch.stack(present).sum(0) / COUNT
    return Result(values[0].value, {name.removeprefix("rows."): g for name, g in joined.items()})


def share(length: int, rank: int) -> slice:
    """Return the rows of a rank, in unequal parts."""
    first = length - max(1, length // 3)
    return slice(0, first) if rank == 0 else slice(first, length)


def evaluate(case: Case, rank: int) -> Found:
    """Return loss and gradients of a rank's share, or the error of the objective."""
    number, instance, leaves = case
    layout = LAYOUTS[number]
    rows = {
        name: leaf[share(len(leaf), rank)].clone().requires_grad_()
        for name, leaf in leaves.items()
        if name not in layout.shared
    }
    held = {name: leaf.clone().requires_grad_() for name, leaf in leaves.items() if name in layout.shared}
    try:
        outcome = instance(EncodedBatch(dict(rows), lambda gathered: layout.build(**gathered, **held)))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    wanted = {f"rows.{name}": leaf for name, leaf in rows.items()} | held | parameters_of(instance)
    found: tuple[Tensor | None, ...] = (None,) * len(wanted)
    if outcome.loss.requires_grad:
        found = torch.autograd.grad(outcome.loss, list(wanted.values()), allow_unused=True)
    zeros = [torch.zeros_like(w) if g is None else g for w, g in zip(wanted.values(), found, strict=True)]
    return Result(outcome.loss.detach().double(), dict(zip(wanted, zeros, strict=True)))


def _send(pipe: IO[bytes] | None, content: bytes) -> None:
    assert pipe is not None
    pipe.write(len(content).to_bytes(8, "big") + content)
    pipe.flush()


def _receive(pipe: IO[bytes] | None) -> Any:
    assert pipe is not None
    length = pipe.read(8)
    if len(length) < 8:
        raise EOFError("no answer")
    return pickle.load(io.BytesIO(pipe.read(int.from_bytes(length, "big"))))


def main(rank: int, meeting: str) -> None:
    """Answer questions until the pipe is closed."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # an objective may print
    torch.set_num_threads(1)
    group = torch.distributed
    group.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=COUNT, timeout=timedelta(seconds=PATIENCE)
    )
    while True:
        try:
            path, question = _receive(sys.stdin.buffer)
            sys.path += [each for each in path if each not in sys.path]
            cases = pickle.loads(question)
        except EOFError:
            break
        except Exception as error:
            _send(answers, pickle.dumps(f"it cannot be sent to another process: {type(error).__name__}: {error}"))
            continue
        _send(answers, pickle.dumps([evaluate(case, rank) for case in cases]))
    os._exit(0)  # skip the shutdown of the group: both processes end


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
