"""The adapter and objective of a configuration: build them, and save and load what was trained.

model/module.safetensors and model/objective.safetensors hold the weights. model/kept/ has what a domain needs in
addition so that the model can be used without its training data (`Adapter.keep`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_model, save_model
from torch import nn

from dipole.core.objectives.objective import Composite, objective
from dipole.core.train.adapter import Adapter
from dipole.core.train.config import RunConfig
from dipole.core.train.domains import adapter_class
from dipole.core.train.run_folder import RunFolder
from dipole.core.utils.errors import CheckpointError
from dipole.core.utils.files import disk_refusing, instead_of_file, replacing
from dipole.core.utils.seeding import Seeds, seed_everything

NARROW = 8  # width of the random rows


def build(
    config: RunConfig,
    folder: RunFolder,
    device: torch.device,
    rank: int = 0,
    world_size: int = 1,
    kept: Path | None = None,
) -> tuple[Adapter, Composite | None]:
    """Build the untrained adapter and objective of a configuration on a device.

    The objective has its own stream of the seed, so its weights do not depend on the encoder's draws.

    kept: the folder of a finished run's other files. The adapter is then built for use, without data.
    """
    seeds = Seeds(config.seed)
    seed_everything(seeds.model)
    domain = adapter_class(config.domain)
    validation = 0.0
    if domain.validates and config.train.part == "validation":
        validation = config.train.validation_share
    adapter = domain(
        config.settings,
        seed=seeds,
        device=device,
        workdir=folder.path,
        batch_size=config.train.batch_size,
        rank=rank,
        world_size=world_size,
        validation=validation,
        kept=kept,
    )
    adapter.reported = config.train.evaluate_on
    adapter.module.to(device)
    if config.objective == "none":
        return adapter, None
    seed_everything(seeds.stream("model", "objective"))
    built = objective(config.objective)
    on_features = any(term.on_features for _, _, term in built)
    built.build(adapter.embedding_dim, adapter.pass_features() if on_features else None)
    return adapter, built.to(device)


def construct(config: RunConfig, world_size: int = 1) -> None:
    """Build the encoder and objective of a run without its data or memory, to find errors early.

    The objective also gets random rows, paired like the run's. For a domain without `sketch`, only the objective's text
    is checked. Results are cached. Raise DipoleError if the run cannot start.
    """
    domain = adapter_class(config.domain)
    sketch = domain.sketch(config.settings, config.train.batch_size, world_size)
    if config.objective == "none":
        return
    _build_objective(config.objective, None if sketch is None else sketch.width)
    if sketch is not None:
        _try_pairs(config.objective, sketch.example, sketch.arguments)


@cache
def _build_objective(text: str, width: int | None) -> None:
    with torch.device("meta"):
        objective(text, width)


@cache
@torch.no_grad()
def _try_pairs(text: str, example: Callable[..., Any], arguments: tuple[Hashable, ...]) -> None:
    # A narrow model suffices to check the pairs. At full width, L and prototypes would be slow.
    with torch.random.fork_rng(devices=[]):
        built = objective(text, NARROW)
        built(example(built, NARROW, *arguments))


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
