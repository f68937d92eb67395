"""Checkpoints: atomic, verified by a hash, without code in them. A run keeps the last two.

A file is `step-00000120.<16 hex digits>.safetensors`. The digits are the start of the SHA-256 of its content, so a
truncated or damaged file is recognised before anything is loaded from it.

The file has the layout of safetensors (https://huggingface.co/docs/safetensors): 8 bytes of length, a header of JSON,
the bytes of the tensors. All other values are JSON in the header's metadata. dipole writes the file itself, because
safetensors' own writer makes two copies of everything and hides the error of a full disk.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

import torch
from torch import Tensor

from dipole.core.utils.errors import CheckpointError, DipoleError
from dipole.core.utils.files import digest, is_file, put_in_place, scratch, why
from dipole.core.utils.plain_values import decode, encode
from dipole.core.utils.received import parse_json
from dipole.core.utils.text import shortened

KEEP = 2
FORMAT = 1
SUFFIX = ".safetensors"
_NAME = re.compile(r"step-(\d+)\.([0-9a-f]{16})\.safetensors")


class _HashingFile:
    """Pass bytes on and hash them."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.hash = hashlib.sha256()

    def write(self, data: bytes | memoryview) -> int:
        written = self._file.write(data)
        self.hash.update(data)
        return written


def save_checkpoint(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Write the state after `step` steps and drop all but the newest two.

    Raises:
        CheckpointError: the disk cannot be written, or the state holds something that cannot be saved. Earlier
            checkpoints are untouched.
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
    """Read and verify one checkpoint, with tensors on the CPU.

    Raises:
        CheckpointError: the file is missing, truncated, damaged, or no checkpoint.
    """
    match = _NAME.fullmatch(path.name)
    if not is_file(path):
        raise CheckpointError(
            f"no checkpoint {shortened(str(path))}. Give the path of a step-*.safetensors file, or use --resume auto."
        )
    if match is None:
        raise CheckpointError(f"{path} is no checkpoint of a run: its name must be step-<number>.<hash>.safetensors.")
    try:
        if not digest(path).startswith(match[2]):
            raise CheckpointError(
                f"the checkpoint {path} is truncated or damaged ({path.stat().st_size} bytes do not match the hash in "
                "its name). Delete it; --resume auto takes the one before it."
            )
        state = read_state(path)
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
    """Return the newest readable checkpoint of a folder (None if there is none) and what was wrong with newer ones."""
    problems: list[str] = []
    for path in reversed(list_checkpoints(folder)):
        try:
            return load_checkpoint(path), problems
        except CheckpointError as error:
            problems.append(str(error))
    return None, problems


def starting_state(
    folder: Path, run_id: str, resume: Literal["auto", "never"] | Path, warn: Callable[[str], None]
) -> dict[str, Any] | None:
    """Return the checkpoint that a run continues from, or None to begin.

    Args:
        folder: the run's checkpoints.
        run_id: of the run.
        resume: "auto" takes the newest readable one, "never" none, a path that one.
        warn: called with the problem of each skipped checkpoint.

    Raises:
        CheckpointError: the path is not a readable checkpoint, or belongs to another run.
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
    if not is_ours or name != run_id:
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
    """Raise ValueError if a part of the state has the wrong type. Modules check their own states."""
    for name, is_right in PARTS.items():
        if not is_right(state[name]):
            raise ValueError(f"{name!r} is not what a run writes: {shortened(repr(state[name]), 80)}")


def _is_amount(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < 1e15


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 10**15


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict)


def _is_meter(value: Any) -> bool:
    sums, counts = value["sums"], value["counts"]
    scalar = [isinstance(each, float | int) or (isinstance(each, Tensor) and each.dim() == 0) for each in sums.values()]
    return sums.keys() == counts.keys() and all(scalar) and all(_is_count(each) and each for each in counts.values())


PARTS: Mapping[str, Callable[[Any], bool]] = {
    "step": _is_count,
    "elapsed": _is_amount,
    "training_seconds": _is_amount,
    "metrics_bytes": _is_count,
    "negatives": lambda value: value is None or _is_amount(value),
    **dict.fromkeys(("module", "objective", "optimizer", "scaler", "notes", "best"), _is_dict),
    "meter": _is_meter,
    "ranks": lambda value: isinstance(value, list) and bool(value) and all(isinstance(each, dict) for each in value),
}
"""The parts of every checkpoint that the loop itself reads, and what they are."""


# The file ------------------------------------------------------------------------------------------------------------

STATE = "state"
"""The entry of the header's metadata that holds the values."""
_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint64: "U64",
    torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_ALIGNED = 8  # bytes, as safetensors' own writer does


class Sink(Protocol):
    """A target for `write_state`, such as a file."""

    def write(self, data: bytes | memoryview, /) -> int: ...


def write_state(sink: Sink, state: Any) -> None:
    """Write nested values (core/utils/plain_values.py). A tensor that occurs several times is written once.

    Raises:
        CheckpointError: a value is neither plain data nor a tensor that safetensors supports. OSError: the disk cannot
            be written.
    """
    tensors: list[Tensor] = []
    known: dict[Any, int] = {}

    def keep(value: Any) -> int:
        tensor = value if isinstance(value, Tensor) else torch.from_numpy(value)
        if tensor.layout != torch.strided or tensor.dtype not in _NAMES:
            raise CheckpointError(f"cannot save a tensor of {tensor.layout} and {tensor.dtype} in a checkpoint.")
        same = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() == 0 or same not in known:
            known[same] = len(tensors)
            tensors.append(tensor)
        return known[same]

    told = encode(state, keep, "state")
    # The larger elements first: then each tensor begins where its elements may.
    order = sorted(range(len(tensors)), key=lambda index: (-tensors[index].element_size(), index))
    header: dict[str, Any] = {"__metadata__": {STATE: json.dumps(told, allow_nan=False)}}
    end = 0
    for index in order:
        tensor, begin = tensors[index], end
        end += tensor.numel() * tensor.element_size()
        header[str(index)] = {
            "dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]
        }  # fmt: skip
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED)
    sink.write(len(text).to_bytes(8, "little") + text)
    for index in order:
        flat = tensors[index].cpu().contiguous().reshape(-1)
        if flat.numel():
            sink.write(flat.view(torch.uint8).numpy().data)


def read_state(path: Path) -> Any:
    """Read a file of `write_state`. A damaged file raises an error of safetensors or Python."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        told = parse_json((file.metadata() or {})[STATE])
        return decode(told, _Tensors(file))


class _Tensors(Mapping[str, Tensor]):
    """Tensors of an open file, each read once. They are copies, as the mapped file may be deleted."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._read: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._read:
            self._read[name] = self._file.get_tensor(name).clone()
        return self._read[name]

    def __iter__(self) -> Any:
        return iter(self._file.keys())

    def __len__(self) -> int:
        return len(self._file.keys())
