"""Agents by the name of their algorithm, and from files."""

from pathlib import Path
from typing import Any

from dipole.core.objectives.objective import Composite, Objective
from dipole.core.utils.errors import ConfigError
from dipole.rl import saved_agent
from dipole.rl.drq import ContrastiveDrQ
from dipole.rl.pixel_agent import PixelAgent
from dipole.rl.sac import ContrastiveSAC
from dipole.rl.sb3_names import without_sb3_names
from dipole.rl.settings import require_changeable

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
    told = saved_agent.read_description(Path(path))
    with saved_agent.readable(f"the agent {path} cannot be read"), saved_agent.explained(path, objective):
        missing = [name for name in told["code"] if name not in given]
        if missing:
            raise ConfigError(
                f"the agent was made with code that is not kept in a file ({', '.join(missing)}): give it again, as in "
                f"resume(..., {missing[0]}=...)."
            )
        if told["own_terms"] and objective is None:
            raise ConfigError(saved_agent.unregistered_message(told["own_terms"]))
        given = without_sb3_names(given)
        require_changeable(given)
        settings = {name: told[name] for name in ("augmentation", "storage", "seed", "stats_window_size")}
        settings |= told["settings"] | given | {"device": device}
        if objective is not None:
            settings["objective"] = objective
        cls = cls or ALGORITHMS[told["settings"]["algorithm"]]
        agent = cls("CnnPolicy", env, _init_setup_model=env is not None, **settings)
        if env is None:
            saved_agent.make_networks(agent, told)
            agent._vec_normalize_env = saved_agent.normalizer(told)
        elif saved_agent.described_space(agent.observation_space) != told["observation_space"]:
            seen = saved_agent.read_space(told["observation_space"])
            raise ConfigError(
                f"the agent has learned from {seen}, and this environment shows {agent.observation_space}."
            )
        agent.task = told.get("task")
        saved_agent.load_weights(agent, path)
        for name in saved_agent.COUNTERS:
            setattr(agent, name, told["counters"][name])
    return agent
