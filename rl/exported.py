"""Agents that `dipole export` wrote, for `dipole embed`. Nothing heavy is imported."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dipole.core.utils.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from dipole.core.train.inference import Embedder

AGENT = "agent.zip"
NO_VECTORS = "is an agent, which gives actions and no vectors of inputs: play it with `dipole play`."


def open_folder(folder: Path, device: torch.device, features: str | None) -> Embedder | None:
    """Refuse the folder of an agent, and return None for any other."""
    if (folder / AGENT).is_file():
        raise ConfigError(f"{folder} {NO_VECTORS}")
    return None
