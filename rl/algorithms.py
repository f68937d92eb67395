"""Agents by the name of their algorithm, and from files."""

from pathlib import Path
from typing import Any

from dipole.core.objectives.objective import Composite, Objective
from dipole.rl import description
from dipole.rl.drq import ContrastiveDrQ
from dipole.rl.pixel_agent import PixelAgent
from dipole.rl.sac import ContrastiveSAC

ALGORITHMS: dict[str, type[PixelAgent]] = {"sac": ContrastiveSAC, "drq": ContrastiveDrQ}


def open_agent(
    path: str | Path,
    cls: Any = None,
    env: Any = None,
    device: str = "auto",
    objective: Objective | Composite | None = None,
    **given: Any,
) -> Any:
    """Return an agent built from its zip without running code in it. Without an environment it can only play.

    The class is that of the algorithm by default. `given` are keywords that a file cannot hold (functions, SB3's
    objects). Raise CheckpointError for a damaged file or one that was not written here, ConfigError if something is
    not given.
    """
    told = description.read(Path(path))
    with description.readable(f"the agent {path} cannot be read"), description.explained(path, objective):
        cls = cls or ALGORITHMS[told["settings"]["algorithm"]]
        agent = description.build(cls, told, env, device, objective, **given)
        description.load_weights(agent, path)
        for name in description.COUNTERS:
            setattr(agent, name, told["counters"][name])
    return agent
