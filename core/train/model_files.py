"""The trained weights of a run as safetensors: model/module.safetensors and model/objective.safetensors."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError
from safetensors.torch import load_model, save_model
from torch import nn

from dipole.core.ground.errors import CheckpointError
from dipole.core.ground.files import sync_folder, why

if TYPE_CHECKING:
    from dipole.core.contrast.objective import Composite


def save_weights(folder: Path, module: nn.Module, objective: Composite | None) -> None:
    """Write both files, each atomically. Tied weights are stored once and stay tied (`save_model`).

    Raises:
        CheckpointError: the disk refused.
    """
    for name, part in _parts(module, objective).items():
        path = folder / f"{name}.safetensors"
        temporary = folder / f".{name}.{os.getpid()}.tmp"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            save_model(part, str(temporary))
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except (OSError, SafetensorError) as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            reason = why(error) if isinstance(error, OSError) else str(error)
            raise CheckpointError(f"cannot save the model {path}: {reason}") from error
    sync_folder(folder)


def load_weights(folder: Path, module: nn.Module, objective: Composite | None) -> None:
    """Read both files into modules of the same configuration.

    Raises:
        CheckpointError: a file is missing, damaged or does not fit.
    """
    for name, part in _parts(module, objective).items():
        path = folder / f"{name}.safetensors"
        try:
            load_model(part, str(path))
        except FileNotFoundError as error:
            raise CheckpointError(
                f"the model {path} is missing; was the run finished? `dipole train` continues it."
            ) from error
        except (OSError, SafetensorError, RuntimeError) as error:
            raise CheckpointError(
                f"the model {path} cannot be loaded: {error}. Train again with --overwrite."
            ) from error


def _parts(module: nn.Module, objective: Composite | None) -> dict[str, nn.Module]:
    parts = {"module": module}
    if objective is not None and objective.state_dict():
        parts["objective"] = objective
    return parts
