"""Playing whole episodes with an agent, one after another or several at a time, and showing them as a video."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from itertools import islice
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.preprocessing import is_image_space, is_image_space_channels_first
from stable_baselines3.common.vec_env import VecEnv, VecTransposeImage, unwrap_vec_normalize

from dipole.core.utils.errors import ConfigError, DataError, TrainingError
from dipole.core.utils.extras import quoted
from dipole.rl.arguments import check_integers, check_number, check_seed
from dipole.rl.envs.running.faults import PATIENCE, Guard, fault_message, guarded
from dipole.rl.envs.running.validate import rendered, rows_of, validate
from dipole.rl.envs.running.workers import WorkerVecEnv


def evaluate(
    agent: BaseAlgorithm,
    env: Any,
    episodes: int = 10,
    seed: int | None = None,
    frames: list[NDArray[np.uint8]] | None = None,
    observations: list[Any] | None = None,
    deterministic: bool = True,
) -> list[float]:
    """Return the returns of whole episodes. Deterministic actions use no random generator of training.

    An episode that a fault of the environment ends does not count and is played again. Five in a row raise an error.

    Args:
        agent: any SB3 agent.
        env: a gymnasium.Env other than the training environment, or a task's name. A VecEnv of SB3 plays its
            environments together. Its VecNormalize takes the means and variances of the agent's.
        episodes: how many, >= 1.
        seed: of the first episode. None draws one.
        frames: a list that collects the rendered frames, (H, W, 3), of the first episode, for a video.
        observations: collects every observation of the episodes that count, the agent's part of it. Not of a VecEnv.
        deterministic: take the mean action. False draws from the policy, with torch's global generator.

    Raises:
        ConfigError: if `env` is no environment with the agent's observations, `episodes` below 1, or for a wrong seed.
        TrainingError: if five episodes in a row end in a fault.
    """
    env, seed = validate(env), check_seed(seed)
    check_integers(episodes=episodes)
    if isinstance(env, VecEnv):
        if seed is not None:  # or SB3 draws one from a generator of training
            env.seed(seed)
        return _together(agent, env, episodes, frames, deterministic)
    seeds = {(0, 0): seed}  # by episode and attempt
    alone = _Single(guarded(env))
    return _play(agent, alone, episodes, lambda *begun: seeds.get(begun), frames, observations, deterministic)


def _together(
    agent: BaseAlgorithm, env: VecEnv, episodes: int, frames: list[NDArray[np.uint8]] | None, deterministic: bool
) -> list[float]:
    """Return the returns of episodes in all environments of a VecEnv, as SB3's `evaluate_policy` plays them."""
    of_training, own = agent.get_vec_normalize_env(), unwrap_vec_normalize(env)
    see = seeing(agent, env, is_normalized=own is not None)
    player: Any = SimpleNamespace(predict=lambda seen, **settings: agent.predict(see(seen), **settings))
    before = {}
    if own is not None:
        before = {"training": own.training, "norm_reward": own.norm_reward}
        own.training = own.norm_reward = False
        if of_training is not None and of_training.norm_obs:
            own.obs_rms = copy.deepcopy(of_training.obs_rms)

    def film(played: dict[str, Any], _: Any) -> None:
        if frames is not None and not played["episode_rewards"] and played["i"] == 0:
            frames.append(rendered(env))

    try:
        found: Any = evaluate_policy(
            player, env, episodes, deterministic, callback=film, return_episode_rewards=True, warn=False
        )
    finally:
        for name, value in before.items():
            setattr(own, name, value)
    return [float(each) for each in found[0]]


def seeing(agent: BaseAlgorithm, env: Any, is_normalized: bool = False) -> Callable[[Any], Any]:
    """Return a function that gives the agent's part of an observation, as the agent's VecNormalize normalises it.

    Observations that are normalised already stay. Raise ConfigError if there is no such part, or for other actions.
    """
    space, seen, normalizer = env.observation_space, agent.observation_space, agent.get_vec_normalize_env()
    select = _selecting(seen, transposed(space)) or _selecting(seen, space)
    if select is None:
        raise ConfigError(f"the agent was made for observations {seen}, but this environment has {space}.")
    acts, taken = agent.action_space, env.action_space
    are_boxes = isinstance(acts, spaces.Box) and isinstance(taken, spaces.Box)  # whose bounds may differ
    if acts.shape != taken.shape or (acts != taken and not are_boxes):
        raise ConfigError(f"the agent was made for actions {acts}, but this environment has {taken}.")
    if normalizer is None or is_normalized:
        return select
    if normalizer.norm_obs_keys is None:
        return lambda observation: normalizer.normalize_obs(select(observation))
    if isinstance(space, spaces.Dict):
        return lambda observation: select(normalizer.normalize_obs(observation))
    return select


def _selecting(seen: Any, space: Any) -> Callable[[Any], Any] | None:
    """Return a function that takes the part `seen` of an observation of `space`. None if it has no such part."""
    if seen == space:
        return lambda observation: observation
    if isinstance(space, spaces.Dict):
        for key, each in space.items():
            if each == seen:
                return itemgetter(key)
        if isinstance(seen, spaces.Dict) and all(space.spaces.get(key) == each for key, each in seen.items()):
            return lambda observation: {key: observation[key] for key in seen.spaces}
    return None


def transposed(space: Any) -> Any:
    """Return the channel-first space that SB3 makes of channel-last images, and other spaces unchanged."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: transposed(each) for key, each in space.items()})
    if is_image_space(space) and not is_image_space_channels_first(space):
        return VecTransposeImage.transpose_space(space)
    return space


def episode_seed(seed: int, episode: int, attempt: int = 0) -> int:
    """Return the seed of an episode. After a fault the next attempt has another one."""
    return int(np.random.SeedSequence([seed, episode, attempt]).generate_state(1)[0]) >> 1


def evaluate_each(
    agent: BaseAlgorithm,
    env: gymnasium.Env[Any, Any] | WorkerVecEnv,
    episodes: int = 10,
    seed: int = 0,
    observations: list[Any] | None = None,
) -> list[float]:
    """Return the returns of episodes with deterministic actions, each started with its own seed.

    The result of an episode depends only on its number, not on the environment that plays it. Actions are computed one
    observation at a time in this process, so that no bit depends on the other episodes.
    An environment must forget what was before its `reset(seed=...)`. Wrappers with running means do not. The arguments
    are those of `evaluate`, and `observations` are collected in the order of the episodes.
    """
    check_integers(episodes=episodes)
    seed = check_seed(seed) or 0
    played: Any = env
    if not isinstance(env, WorkerVecEnv):
        played = _Single(guarded(env))
    return _play(agent, played, episodes, partial(episode_seed, seed), observations=observations)


class _Single:
    """One guarded environment, played as those of a WorkerVecEnv are."""

    num_envs = 1

    def __init__(self, env: Guard) -> None:
        self.env, self.observation_space, self.action_space = env, env.observation_space, env.action_space

    def _begin(self, _: int, seed: int | None) -> Any:
        return self.env.reset(seed=seed)[0]

    def step(self, actions: NDArray[Any]) -> Any:
        observation, reward, terminated, truncated, info = self.env.step(actions[0])
        return [observation], [reward], [terminated or truncated], [info]


@dataclass
class _Episode:
    number: int
    attempt: int
    shown: Any
    is_new: bool = True
    seen: list[Any] = field(default_factory=list)
    memory: Any = None  # of a recurrent policy
    total: float = 0.0


def _play(
    agent: BaseAlgorithm,
    env: Any,
    episodes: int,
    seed_of: Callable[[int, int], int | None],
    frames: list[NDArray[np.uint8]] | None = None,
    observations: list[Any] | None = None,
    deterministic: bool = True,
) -> list[float]:
    """Return the returns of episodes in a WorkerVecEnv or a `_Single`. `seed_of` an episode's number and attempt."""
    see, left = seeing(agent, env), iter(range(episodes))
    playing: dict[int, _Episode] = {}  # by environment
    ended: dict[int, _Episode] = {}  # by number

    def begin(index: int, number: int, attempt: int = 0) -> None:
        playing[index] = _Episode(number, attempt, env._begin(index, seed_of(number, attempt)))

    for index, number in zip(range(env.num_envs), left, strict=False):
        begin(index, number)
    while playing:
        actions: dict[int, Any] = {}
        for index, episode in playing.items():
            if frames is not None and episode.number == 0:
                frames.append(rendered(env.env))
            part, starts = see(episode.shown), np.array([episode.is_new])
            if observations is not None:
                episode.seen.append(part)
            actions[index], episode.memory = agent.predict(part, episode.memory, starts, deterministic)
        # Environments without an episode take another's action: zeros need not be in the space.
        taken = [actions.get(index, actions[min(actions)]) for index in range(env.num_envs)]
        following, rewards, dones, infos = env.step(np.reshape(taken, (len(taken), *(env.action_space.shape or ()))))
        for index, row in enumerate(rows_of(following)):
            if index not in playing:
                continue
            episode = playing[index]
            episode.shown, episode.is_new, episode.total = row, False, episode.total + float(rewards[index])
            if not dones[index]:
                continue
            del playing[index]
            if "fault" not in infos[index]:
                ended[episode.number] = episode
                for number in islice(left, 1):
                    begin(index, number)
            elif episode.attempt + 1 < PATIENCE:
                begin(index, episode.number, episode.attempt + 1)
            else:
                fault = fault_message(index, infos[index]["fault"])
                raise TrainingError(f"{PATIENCE} episodes in a row failed: {fault}")
    in_order = [ended[number] for number in range(episodes)]
    if observations is not None:
        observations.extend(each for episode in in_order for each in episode.seen)
    return [episode.total for episode in in_order]


def write_video(frames: Sequence[NDArray[np.uint8]], path: str | Path, fps: int = 25) -> Path:
    """Write frames (H, W, 3) as .gif, or as .mp4 where imageio has ffmpeg.

    Args:
        frames: one at least, (H, W, 3) uint8 each.
        path: NAME.gif or NAME.mp4.
        fps: frames a second, >= 1.

    Returns:
        The file.

    Raises:
        ConfigError: for another suffix, .mp4 without ffmpeg, or `fps` below 1.
        DataError: if there are no frames, or an environment without a render mode made them.
    """
    check_number(1, 1000, fps=fps)
    if not len(frames) or any(np.shape(each)[2:] not in ((3,), (4,)) or each.dtype != np.uint8 for each in frames):
        raise DataError("a video needs frames (H, W, 3) of uint8: make the environment with render_mode='rgb_array'.")
    path = require_format(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".gif":
        from PIL import Image

        images = [Image.fromarray(frame) for frame in frames]
        images[0].save(path, save_all=True, append_images=images[1:], duration=max(round(1000 / fps), 20), loop=0)
    else:
        import imageio.v3

        imageio.v3.imwrite(path, np.stack(frames), fps=fps)
    return path


def require_format(path: str | Path) -> Path:
    """Return the path of a video. Raise ConfigError for another suffix, or .mp4 without ffmpeg."""
    path = Path(path)
    if path.suffix not in (".gif", ".mp4"):
        raise ConfigError(f"videos are written as .gif or .mp4, not {path.suffix or path.name!r}.")
    if path.suffix == ".mp4" and find_spec("imageio_ffmpeg") is None:
        raise ConfigError(f"{path} needs ffmpeg: pip install {quoted('imageio[ffmpeg]')}, or write a .gif instead.")
    return path
