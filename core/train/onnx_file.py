"""A network as an ONNX file, checked by onnxruntime when it is written."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor, nn

from dipole.core.utils.errors import DataError, TrainingError
from dipole.core.utils.extras import needing
from dipole.core.utils.files import disk_error
from dipole.core.utils.hub import without_retry_messages

FILE = "model.onnx"
OUTPUT = "features"
TOLERANCE = 1e-4


def check_onnx() -> None:
    """Raise ConfigError where the packages are missing."""
    with needing("onnx", "--to onnx"):
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401


def write_onnx(
    folder: Path, module: nn.Module, tried: Sequence[Mapping[str, Tensor]], free: Mapping[str, Sequence[str]]
) -> None:
    """Write `FILE` into a folder and check it: onnxruntime must reproduce the module's output, named `OUTPUT`.

    The module maps named tensors to one tensor, in eval mode on the CPU. `tried` are inputs of several sizes to check,
    the first at least two long where it is free. `free` names the leading axes of each input that are not fixed, such
    as ("batch", "length"). Raise TrainingError if the module cannot be written or the outputs differ, OSError if the
    disk refused.
    """
    check_onnx()
    named = {name: dict(enumerate(names)) for name, names in free.items()}
    # `torch.export` unrolls recurrent networks, which takes a hundred times as long.
    first = any(isinstance(part, nn.RNNBase) for part in module.modules())
    errors = []
    for traced in (first, not first):
        try:
            _write(folder / FILE, module, tried[0], named, traced)
            off = _off(folder / FILE, module, tried)
            break
        except Exception as error:  # torch.export, torch.onnx, onnxscript and onnxruntime have no common base
            if refused := disk_error(error):
                raise refused from error
            errors.append(error)
    else:
        cause: BaseException = errors[0]
        while cause.__cause__ is not None:  # the exporter's own errors only say how to report them
            cause = cause.__cause__
        reason = str(cause).strip().partition("\n")[0]
        raise TrainingError(f"this network cannot be written as ONNX: {type(cause).__name__}: {reason}") from errors[0]
    if not off <= TOLERANCE:
        raise TrainingError(f"{FILE} would give features that differ by {off:.2g} from the run's; it is not written.")


@torch.no_grad()
def _off(path: Path, module: nn.Module, tried: Sequence[Mapping[str, Tensor]]) -> float:
    """Return the largest difference of a file's output, divided by the module's largest output if above 1."""
    found = []
    run = open_onnx(path)
    for inputs in tried:
        wanted = module(**inputs)
        off = float((run(inputs) - wanted).abs().max())
        found.append(off / max(1.0, float(wanted.abs().max())))
    return max(found, key=lambda each: (each != each, each))  # no number is the furthest off


def _write(
    path: Path, module: nn.Module, example: Mapping[str, Tensor], free: Mapping[str, Mapping[int, str]], traced: bool
) -> None:
    """Export by `torch.export`, or by tracing: `torch.export` fails on some shapes or fixes an axis that is free."""
    export = partial(torch.onnx.export, module, kwargs=dict(example), input_names=list(example), output_names=[OUTPUT])
    # If tracing fails, it would print thousands of lines.
    with _quiet(), mock.patch.object(torch._C, "_jit_onnx_log", create=True):
        if traced:
            axes = {name: dict(each) for name, each in free.items()} | {OUTPUT: {0: "batch"}}
            export(f=path, dynamo=False, dynamic_axes=axes)
            return
        dims = {axis: torch.export.Dim(axis) for names in free.values() for axis in names.values()}
        shapes = {name: {place: dims[axis] for place, axis in names.items()} for name, names in free.items()}
        program = export(dynamo=True, dynamic_shapes=shapes, verbose=False)
        assert program is not None  # with dynamo there is one
        program.save(path)


def open_onnx(path: Path) -> Callable[[Mapping[str, Tensor]], Tensor]:
    """Return the output of a file as a function of a batch, on the CPU."""
    from onnxruntime import InferenceSession

    try:
        session = InferenceSession(str(path), providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has a type for each state
        raise DataError(f"{path} cannot be read: {error}. Export it again, or fetch it (git lfs pull).") from error
    return lambda inputs: torch.from_numpy(session.run(None, {name: each.numpy() for name, each in inputs.items()})[0])


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence logs and warnings of the exporter."""
    with without_retry_messages("torch.onnx"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
