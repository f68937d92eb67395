"""The device and the processes of a run, by Lightning Fabric."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch

from dipole.core.ground.errors import ConfigError
from dipole.core.train.config import RunConfig


def pick_device(text: str) -> torch.device:
    """Turn "auto", "cpu", "cuda", "cuda:1" or "mps" into a device that is there.

    Raises:
        ConfigError: it is not.
    """
    if text == "auto":
        return torch.device(
            "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
        )
    device = torch.device(text)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device: {text!r} is not here ({torch.cuda.device_count()} CUDA devices found). "
            'Use device = "auto" or "cpu"; `dipole doctor` says more.'
        )
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError('device: "mps" is not here. Use device = "auto" or "cpu".')
    return device


def launch(config: RunConfig) -> Any:
    """Make and launch Fabric for one process, or for the ranks that torchrun started."""
    from lightning_fabric import Fabric
    from lightning_fabric.strategies.ddp import DDPStrategy

    device = pick_device(config.device)
    ranks = int(os.environ.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1
    settings: dict[str, Any] = {"devices": 1 if device.index is None else [device.index]}
    if ranks > 1:
        local = int(os.environ["LOCAL_WORLD_SIZE"])
        # Evaluation runs on rank 0 while the others wait.
        settings = {
            "devices": local,
            "num_nodes": ranks // local,
            "strategy": DDPStrategy(timeout=timedelta(hours=12)),
        }
    # The step itself computes in half precision (core/train/step.py).
    fabric = Fabric(accelerator=device.type, precision="32-true", **settings)
    fabric.launch()
    return fabric
