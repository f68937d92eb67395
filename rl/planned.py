"""How many rollouts an SB3 agent still plans."""

import math
from typing import Any

from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.type_aliases import TrainFrequencyUnit


def rollout_length(model: BaseAlgorithm) -> int | None:
    """Return the environment steps of a rollout over all environments. None if it ends with an episode."""
    agent: Any = model
    if hasattr(agent, "n_steps") and not hasattr(agent, "train_freq"):
        return int(agent.n_steps * agent.n_envs)
    every = agent.train_freq
    if every.unit != TrainFrequencyUnit.STEP:
        return None
    return int(every.frequency * agent.n_envs)


def rollouts_left(model: BaseAlgorithm) -> int | None:
    """Return the rollouts until the end of `learn`, without the current one. None if their length is unknown."""
    length = rollout_length(model)
    if length is None:
        return None
    return max(0, math.ceil((model._total_timesteps - model.num_timesteps) / length))
