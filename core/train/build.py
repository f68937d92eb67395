"""The untrained adapter and objective of a configuration."""

from __future__ import annotations

import torch

from dipole.core.contrast.objective import Composite, objective
from dipole.core.ground.seeding import Seeds, seed_everything
from dipole.core.train.adapter import Adapter
from dipole.core.train.config import RunConfig
from dipole.core.train.domains import adapter_class
from dipole.core.train.run_folder import RunFolder


def build(
    config: RunConfig, folder: RunFolder, device: torch.device, rank: int = 0, world_size: int = 1
) -> tuple[Adapter, Composite | None]:
    """Build the untrained adapter and objective of a configuration on a device.

    The objective has its own stream of the seed: its weights do not depend on how many numbers the encoder drew.
    """
    seeds = Seeds(config.seed)
    seed_everything(seeds.model)
    adapter = adapter_class(config.domain)(
        config.settings,
        seed=seeds,
        device=device,
        workdir=folder.path,
        batch_size=config.train.batch_size,
        rank=rank,
        world_size=world_size,
    )
    adapter.module.to(device)
    if config.objective == "none":
        return adapter, None
    seed_everything(seeds.stream("model", "objective"))
    return adapter, objective(config.objective, dim=adapter.embedding_dim, ring=config.train.ring).to(device)
