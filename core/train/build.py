"""The untrained adapter and objective of a configuration."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from dipole.core.objectives.objective import Composite, objective
from dipole.core.train.adapter import Adapter
from dipole.core.train.config import RunConfig
from dipole.core.train.domains import adapter_class
from dipole.core.train.run_folder import RunFolder
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
