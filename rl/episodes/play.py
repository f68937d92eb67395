"""Playing whole episodes with an agent, on an environment of their own."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.preprocessing import is_image_space, is_image_space_channels_first
from stable_baselines3.common.vec_env import VecEnv, VecTransposeImage

from dipole.core.ground.errors import ConfigError, TrainingError
from dipole.rl.arguments import check_whole
from dipole.rl.envs.running.admission import admitted, image_keys, rendered
from dipole.rl.envs.running.faults import PATIENCE, fault_message, guarded


def evaluate(
    agent: BaseAlgorithm,
    env: gymnasium.Env[Any, Any],
    episodes: int = 10,
    seed: int | None = None,
    frames: list[NDArray[np.uint8]] | None = None,
    observations: list[NDArray[np.uint8]] | None = None,
    deterministic: bool = True,
) -> list[float]:
    """Play whole episodes and return their returns; no generator of training is touched by deterministic actions.

    An episode that a fault of the environment ends does not count and is played again; five of them in a row stop.

    Args:
        agent: any SB3 agent.
        env: not the training environment.
        episodes: how many.
        seed: of the first episode.
        frames: collects the rendered frames of the first episode, for a video.
        observations: collects every observation.
        deterministic: take the mean action; False draws from the policy, with torch's global generator.

    Raises:
        ConfigError: if `env` is no single environment with the agent's observations, or `episodes` below 1.
        TrainingError: if every episode ends in a fault.
    """
    check_environment(env)
    check_whole(episodes=episodes)
    key = _seen_key(agent, env.observation_space)
    if key is None and agent.observation_space not in (env.observation_space, transposed(env.observation_space)):
        raise ConfigError(
            f"the agent was made for observations {agent.observation_space}, but this environment has "
            f"{env.observation_space}."
        )
    env = guarded(env)
    returns: list[float] = []
    observation, _ = env.reset(seed=seed)
    total, in_a_row = 0.0, 0
    while len(returns) < episodes:
        if frames is not None and not returns:
            frames.append(rendered(env))
        if key is not None:
            observation = observation[key]
        if observations is not None:
            observations.append(np.asarray(observation))
        action, _ = agent.predict(observation, deterministic=deterministic)
        observation, reward, terminated, truncated, info = env.step(action)
        total += float(reward)
        if terminated or truncated:
            in_a_row = in_a_row + 1 if "fault" in info else 0
            if in_a_row == 0:
                returns.append(total)
            elif in_a_row == PATIENCE:
                raise TrainingError(f"{PATIENCE} episodes in a row failed: {fault_message(0, info['fault'])}")
            total = 0.0
            observation, _ = env.reset()
    return returns


def _seen_key(agent: BaseAlgorithm, space: Any) -> str | None:
    """The image in a dictionary that an agent of pixels sees; None where it sees all there is."""
    if not isinstance(space, spaces.Dict) or isinstance(agent.observation_space, spaces.Dict):
        return None
    for key in image_keys(space):
        if agent.observation_space in (space[key], transposed(space[key])):
            return key
    return None


def check_environment(env: Any) -> None:
    """Raise ConfigError for what is not one gymnasium environment."""
    if isinstance(env, str | VecEnv) or not isinstance(admitted(env), gymnasium.Env):
        raise ConfigError(f"evaluation needs one gymnasium environment (make_env(...)), got {type(env).__name__}.")


def transposed(space: Any) -> Any:
    """The channel-first space that SB3 makes of images with their channels last; other spaces as they are."""
    if is_image_space(space) and not is_image_space_channels_first(space):
        return VecTransposeImage.transpose_space(space)
    return space
