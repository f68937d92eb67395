"""Files of other programs and of earlier versions that are pickles: read only where the user says so.

PyTorch's restricted reader builds tensors, numbers, texts, lists and dictionaries alone, but it runs the pickle's
program to do so.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from dipole.core.ground.errors import ConfigError

SWITCH = "DIPOLE_PICKLES"


def allowed() -> bool:
    """Whether the environment allows PyTorch's restricted reader.

    Raises:
        ConfigError: for a value that is neither none nor restricted.
    """
    value = os.environ.get(SWITCH, "").strip().lower()
    if value not in ("", "none", "restricted"):
        raise ConfigError(
            f"{SWITCH} must be none or restricted (PyTorch's reader with weights_only=True may read pickles), got "
            f"{value[:80]!r}."
        )
    return value == "restricted"


def read_pickle(path: Path) -> Any:
    """What a file of `torch.save` holds, tensors on the CPU; for callers that asked `allowed`."""
    import torch

    return torch.load(path, map_location="cpu", weights_only=True)
