"""Checkpoints: atomic, verified, without code in them (core/train/state_file.py), the last two kept.

A file is `step-00000120.<16 hex digits>.safetensors`; the digits are the start of the SHA-256 of its content, so that a
truncated or damaged file is recognised before anything is loaded from it. Earlier versions wrote `.pt`, which is a
pickle: it is read where `DIPOLE_PICKLES=restricted` allows it, and the next checkpoint is of the new form.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal

from torch import Tensor

from dipole.core.train.state_file import read_state, write_state
from dipole.core.utils.errors import CheckpointError, DipoleError
from dipole.core.utils.files import digest, is_file, put_in_place, scratch, why
from dipole.core.utils.pickles import SWITCH, allowed, read_pickle
from dipole.core.utils.text import shortened

KEEP = 2
FORMAT = 1
SUFFIX, EARLIER = ".safetensors", ".pt"
_NAME = re.compile(r"step-(\d+)\.([0-9a-f]{16})\.(safetensors|pt)")


class _HashingFile:
    """Passes bytes on and remembers their hash."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.hash = hashlib.sha256()

    def write(self, data: bytes | memoryview) -> int:
        written = self._file.write(data)
        self.hash.update(data)
        return written


class EarlierCheckpointError(CheckpointError):
    """A checkpoint is a pickle of an earlier version, which nobody has allowed to be read."""


def save_checkpoint(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Write the state after `step` steps and drop all but the newest two.

    Raises:
        CheckpointError: the disk refused, or there is something in it that is no data; earlier checkpoints are
            untouched.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with scratch(folder / f"step-{step:08d}{SUFFIX}") as temporary:
            with open(temporary, "wb") as file:
                sink = _HashingFile(file)
                write_state(sink, state)
            path = folder / f"step-{step:08d}.{sink.hash.hexdigest()[:16]}{SUFFIX}"
            put_in_place(temporary, path)
    except OSError as error:
        kept = list_checkpoints(folder)
        rest = f"The checkpoint of step {_step(kept[-1])} is intact." if kept else "There is no earlier checkpoint."
        raise CheckpointError(f"cannot save the checkpoint of step {step} in {folder}: {why(error)} {rest}") from error
    for old in list_checkpoints(folder)[:-KEEP]:
        old.unlink(missing_ok=True)
    return path


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, oldest first."""
    found = [path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(found, key=lambda path: (_step(path), path.stat().st_mtime_ns))


def _step(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read and verify one checkpoint; tensors come to the CPU.

    Raises:
        CheckpointError: the file is missing, truncated, damaged, or no checkpoint. EarlierCheckpointError: it is a
            pickle, and these are not allowed.
    """
    match = _NAME.fullmatch(path.name)
    if not is_file(path):
        raise CheckpointError(
            f"no checkpoint {shortened(str(path))}. Give the path of a step-*.safetensors file, or use --resume auto."
        )
    if match is None:
        raise CheckpointError(f"{path} is no checkpoint of a run: its name must be step-<number>.<hash>.safetensors.")
    if path.suffix == EARLIER and not allowed():
        raise EarlierCheckpointError(
            f"the checkpoint {path} is of an earlier version, which wrote pickles; these are not read unasked. If "
            f"nobody else has written it, repeat the command with {SWITCH}=restricted in the environment: PyTorch's "
            "restricted reader reads it, and the next checkpoint is safetensors. Or start again with --resume never."
        )
    try:
        if not digest(path).startswith(match[2]):
            raise CheckpointError(
                f"the checkpoint {path} is truncated or damaged ({path.stat().st_size} bytes do not match the hash in "
                "its name). Delete it; --resume auto takes the one before it."
            )
        state = read_pickle(path) if path.suffix == EARLIER else read_state(path)
    except OSError as error:
        raise CheckpointError(f"the checkpoint {path} cannot be read: {why(error)}") from error
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"the checkpoint {path} cannot be read: {shortened(str(error))}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} is no checkpoint of a run.")
    return state


def newest_checkpoint(folder: Path) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the newest readable checkpoint of a folder (None if there is none) and what was wrong with newer ones.

    Raises:
        EarlierCheckpointError: it is a pickle. It is not passed over: what it has would be lost.
    """
    problems: list[str] = []
    for path in reversed(list_checkpoints(folder)):
        try:
            return load_checkpoint(path), problems
        except EarlierCheckpointError:
            raise
        except CheckpointError as error:
            problems.append(str(error))
    return None, problems


def starting_state(
    folder: Path, names: Container[str], resume: Literal["auto", "never"] | Path, warn: Callable[[str], None]
) -> dict[str, Any] | None:
    """Return the checkpoint that a run continues from, or None to begin.

    Args:
        folder: the run's checkpoints.
        names: hashes that the run goes by.
        resume: "auto" takes the newest readable one, "never" none, a path that one.
        warn: is told what is wrong with those that are passed over.

    Raises:
        CheckpointError: the path is no readable checkpoint, or one of another run.
    """
    if resume == "never":
        return None
    if isinstance(resume, Path):
        state = load_checkpoint(resume)
    else:
        found, problems = newest_checkpoint(folder)
        for problem in problems:
            warn(f"warning: {problem}")
        if found is None:
            if problems:
                warn("warning: no checkpoint is left to continue from; starting at step 0.")
            return None
        state = found
    name = state.get("hash")
    # The kinds first: a tensor compared is a tensor.
    is_ours = type(state.get("format")) is int and state["format"] == FORMAT
    if not is_ours or not isinstance(name, str) or name not in names:
        raise CheckpointError(
            f"the checkpoint belongs to another run ({shortened(str(name), 80)}), this configuration is "
            f"{folder.parent.name}. Use the configuration it was written with, or --resume never."
        )
    with fitting():
        _check(state)
    return state


@contextmanager
def fitting() -> Iterator[None]:
    """Turn whatever goes wrong while a checkpoint is taken over into one message: its content may be anybody's.

    Raises:
        CheckpointError: with the reason.
    """
    try:
        yield
    except DipoleError:
        raise
    except Exception as error:  # each part of a state has a reader of its own
        reason = str(error) if isinstance(error, ValueError | RuntimeError) else repr(error)
        raise CheckpointError(
            f"the checkpoint does not fit this run: {shortened(reason, 600)}. Use --resume never."
        ) from error


def _check(state: Mapping[str, Any]) -> None:
    """ValueError for a state whose own parts are not of their kinds; what modules hold they check themselves."""
    if odd := [name for name in ("best", "notes", "scaler") if not isinstance(state.get(name, {}), dict)]:
        raise ValueError(f"{odd[0]!r} is not what a run writes")
    for name, is_right in {**PARTS, **LATER}.items():
        if (name in state or name in PARTS) and not is_right(state[name]):
            raise ValueError(f"{name!r} is not what a run writes: {shortened(repr(state[name]), 80)}")


def _is_amount(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < 1e15


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 10**15


def _is_meter(value: Any) -> bool:
    sums, counts = value["sums"], value["counts"]
    scalar = [isinstance(each, float | int) or (isinstance(each, Tensor) and each.dim() == 0) for each in sums.values()]
    return sums.keys() == counts.keys() and all(scalar) and all(_is_count(each) and each for each in counts.values())


PARTS: Mapping[str, Callable[[Any], bool]] = {
    "step": _is_count,
    "elapsed": _is_amount,
    "metrics_bytes": _is_count,
    "negatives": lambda value: value is None or _is_amount(value),
    "module": lambda value: isinstance(value, dict),
    "objective": lambda value: isinstance(value, dict),
    "optimizer": lambda value: isinstance(value, dict),
    "meter": _is_meter,
    "ranks": lambda value: isinstance(value, list) and bool(value) and all(isinstance(each, dict) for each in value),
}
"""The parts of every checkpoint that the loop itself reads, and what they are."""
LATER: Mapping[str, Callable[[Any], bool]] = {"training_seconds": _is_amount}
"""The same of parts that checkpoints of earlier versions lack."""
