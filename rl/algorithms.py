"""Agents by the name of their algorithm, and from files."""

from pathlib import Path
from typing import Any

from dipole.rl import description
from dipole.rl.drq import ContrastiveDrQ
from dipole.rl.pixel_agent import PixelAgent
from dipole.rl.sac import ContrastiveSAC

ALGORITHMS: dict[str, type[PixelAgent]] = {"sac": ContrastiveSAC, "drq": ContrastiveDrQ}


def open_agent(path: str | Path, cls: Any = None, *arguments: Any, **given: Any) -> Any:
    """Build an agent from its zip without running code in it.

    Args:
        path: what `ContrastiveSAC.save` wrote.
        cls: the agent's class. By default that of the algorithm in the file.
        arguments: as in `description.open_agent`.
        given: likewise.

    Raises:
        CheckpointError: the file is damaged or was not written here. ConfigError: the agent needs what was not given.
    """
    if cls is None:
        cls = ALGORITHMS.get(description.read(Path(path))["settings"].get("algorithm"), ContrastiveSAC)
    return description.open_agent(path, cls, *arguments, **given)
