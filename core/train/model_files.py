"""A trained model on the disk: model/module.safetensors, model/objective.safetensors, and model/kept/.

`kept` is what a domain needs in addition to the weights so that the model can be used without its training data
(`Adapter.keep`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError
from safetensors.torch import load_model, save_model
from torch import nn

from dipole.core.train.adapter import Adapter
from dipole.core.utils.errors import CheckpointError
from dipole.core.utils.files import disk_refusing, instead_of_file, replacing

if TYPE_CHECKING:
    from dipole.core.objectives.objective import Composite


def save_kept(folder: Path, adapter: Adapter) -> None:
    """Write the files that a domain needs in addition to weights, atomically. No folder if it needs none."""
    if not keeps(type(adapter)):
        return
    with disk_refusing(f"cannot save the model {folder}", CheckpointError), replacing(folder) as temporary:
        temporary.mkdir()
        adapter.keep(temporary)


def keeps(adapter: type[Adapter]) -> bool:
    """Return whether a domain needs files other than weights and configuration."""
    return adapter.keep is not Adapter.keep


def save_weights(folder: Path, module: nn.Module, objective: Composite | None) -> None:
    """Write both files, each atomically. Tied weights are stored once and stay tied (`save_model`)."""
    for name, part in _parts(module, objective).items():
        path = folder / f"{name}.safetensors"
        with disk_refusing(f"cannot save the model {path}", CheckpointError), replacing(path) as temporary:
            save_model(part, str(temporary))


def load_weights(folder: Path, module: nn.Module, objective: Composite | None) -> None:
    """Read both files into modules of the same configuration."""
    for name, part in _parts(module, objective).items():
        path = folder / f"{name}.safetensors"
        if found := instead_of_file(path):
            raise CheckpointError(f"the model {path} cannot be loaded: it is {found}. Train again with --overwrite.")
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
