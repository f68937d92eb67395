"""The state of a run in one file of safetensors: its tensors, and all else as JSON in the file's header.

The layout is that of https://huggingface.co/docs/safetensors (8 bytes of length, a header of JSON, the tensors' bytes),
written here piece by piece: safetensors' own writer makes two copies of everything, and hides the disk's own error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from dipole.core.utils.errors import CheckpointError
from dipole.core.utils.plain_values import decode, encode
from dipole.core.utils.received import parse_json

STATE = "state"
"""The entry of the header's metadata that holds the values."""
_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint64: "U64",
    torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_ALIGNED = 8  # bytes, as safetensors' own writer does


class Sink(Protocol):
    """What is written to."""

    def write(self, data: bytes | memoryview, /) -> int: ...


def write_state(sink: Sink, state: Any) -> None:
    """Write nested values (core/utils/plain_values.py); tensors that are one tensor are written once.

    Raises:
        CheckpointError: something in it is neither data nor a tensor that safetensors know. OSError: the disk refused.
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
    """Read what `write_state` wrote; an error of safetensors' or Python's where it is damaged."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        told = parse_json((file.metadata() or {})[STATE])
        return decode(told, _Tensors(file))


class _Tensors(Mapping[str, Tensor]):
    """The tensors of an open file, each read once: copies, as the file is mapped and may go."""

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
