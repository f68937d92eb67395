"""An agent's environments: the part of their observations that it sees, and checks of what they are and return."""

import inspect
import warnings
from collections import deque
from typing import Any, Self

import gymnasium
import numpy as np
from gymnasium import spaces
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.vec_env import (
    DummyVecEnv,
    VecEnv,
    VecEnvWrapper,
    VecExtractDictObs,
    VecNormalize,
    unwrap_vec_normalize,
)

from dipole.core.utils.errors import ConfigError, TrainingError
from dipole.core.utils.text import counted
from dipole.rl.arguments import check_integers
from dipole.rl.envs.running.faults import describe, fault_message, guarded, noise_state, require_width, set_noise_state
from dipole.rl.envs.running.validate import (
    image_keys,
    require_finite_observation,
    require_observation,
    rows_of,
    validate,
)
from dipole.rl.frames import Size, extents
from dipole.rl.networks import Encoders, map_side
from dipole.rl.seen import ObservationShape, layout, parts
from dipole.rl.settings import Inputs

_ALLOWED = (
    "Allowed: an image (uint8, 0 to 255), a vector (a Box or MultiBinary), or a Dict of one image and vectors. Stack "
    "frames in the channels (VecFrameStack)."
)
_FIX = "Make VecNormalize the outermost wrapper, of VecFrameStack(env, 3) or, for (H, W, C), VecTransposeImage(env)."


class VecKeepDictObs(VecEnvWrapper):
    """Observations with some entries of their dictionary."""

    def __init__(self, venv: VecEnv, keys: tuple[str, ...]) -> None:
        assert isinstance(venv.observation_space, spaces.Dict)
        self.keys = keys
        super().__init__(venv, spaces.Dict({key: venv.observation_space[key] for key in keys}))

    def reset(self) -> Any:
        return self._kept(self.venv.reset())

    def step_wait(self) -> Any:
        observations, rewards, dones, infos = self.venv.step_wait()
        for info in infos:
            if "terminal_observation" in info:
                info["terminal_observation"] = self._kept(info["terminal_observation"])
        return self._kept(observations), rewards, dones, infos

    def _kept(self, observation: Any) -> dict[str, np.ndarray]:
        return {key: observation[key] for key in self.keys}


def shown_to(learner: str, env: VecEnv, inputs: Inputs) -> VecEnv:
    """Return an environment with the part of its observations that `inputs` names. Raise ConfigError if it has none."""
    space = env.observation_space
    if isinstance(space, spaces.Dict):
        images = image_keys(space)
        vectors = tuple(key for key in space.spaces if key not in images)
        if len(images) > 1 and inputs != "state":
            raise ConfigError(
                f"{learner} learns from one image in a dictionary, this one has {len(images)} of them among "
                f"{', '.join(space.spaces)}: leave one (gymnasium.wrappers.FilterObservation)."
            )
        if inputs == "pixels" and images:
            env = VecExtractDictObs(env, images[0])
        if inputs == "state" and images and vectors:
            env = VecKeepDictObs(env, vectors)
    require_normalized_last(env)
    seen = seen_by(learner, env.observation_space)
    has_image, has_vectors = seen.image is not None, bool(seen.vectors)
    fits = {"pixels": has_image, "state": has_vectors and not has_image, "both": has_image and has_vectors}
    if not fits.get(inputs, True):
        words = {"pixels": "an image", "state": "a vector", "both": "an image and a vector, in a dictionary"}
        raise ConfigError(
            f"inputs={inputs!r} needs {words[inputs]}, but the environment gives {space}. Tasks of the suite and the "
            f"dot task have a keyword of that name: make_env(task, inputs={inputs!r})."
        )
    return env


def seen_by(learner: str, space: spaces.Space[Any]) -> ObservationShape:
    """Return the layout of an agent's observations. Raise ConfigError for other kinds."""
    try:
        return layout(space)
    except ValueError as error:
        raise ConfigError(
            f"{learner} needs uint8 images (C, H, W), vectors, or a dictionary of both as observations, got {space}: "
            f"{error}. {_ALLOWED}"
        ) from error


def require_policy(policy: Any, learner: str, seen: ObservationShape) -> None:
    """Raise ConfigError for a policy that does not fit the observations. All names mean one policy."""
    if isinstance(policy, type) and issubclass(policy, Encoders):
        return
    fits = ["CnnPolicy"]
    if seen.is_dictionary or seen.image is None:
        fits.append("MultiInputPolicy" if seen.is_dictionary else "MlpPolicy")
    if policy not in fits:
        known = " or ".join(map(repr, fits))
        raise ConfigError(f"policy must be {known}, got {policy!r}: {learner} learns from {named(seen)}.")


def require_size(size: Size, layers: int) -> None:
    """Raise ConfigError for images that are too small for the convolutions."""
    try:
        map_side(min(extents(size)), layers)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def named(seen: ObservationShape) -> str:
    """Name the inputs in words."""
    if seen.image is None:
        return "vectors"
    return "pixels and vectors" if seen.vectors else "pixels"


def original(normalizer: VecNormalize, seen: Any) -> Any:
    """Return observations as replay stores them: without normalisation, but as the wrappers above leave them.

    SB3 stores what VecNormalize got, which has another shape if a wrapper above stacks, transposes or selects. `seen`
    are the observations (n_envs, ...) of the outermost wrapper, an array or a dictionary.
    """
    raw, names = parts(normalizer.get_original_obs()), _normalized(normalizer)
    found = {key: raw[key] if key in names else each for key, each in parts(seen).items()}
    return found.get("", found)


def require_normalized_last(env: VecEnv) -> None:
    """Raise ConfigError if a wrapper above VecNormalize changes what it normalises."""
    normalizer = unwrap_vec_normalize(env)
    if normalizer is None:
        return
    own, seen, names = parts(normalizer.observation_space), parts(env.observation_space), _normalized(normalizer)
    changed = [key for key in seen if key in names and seen[key] != own[key]]
    if "" in seen and "" not in own:
        changed += [key for key in names if own[key] == seen[""]]
    if changed:
        told = f"normalised observations {', '.join(changed)}".strip()
        raise ConfigError(f"a wrapper above VecNormalize changes {told}, which replay cannot undo. {_FIX}")


def require_stored_as_seen(model: BaseAlgorithm) -> None:
    """Raise ConfigError if SB3's own replay would get other shapes than the agent sees. Ours stores what it sees."""
    normalizer = model.get_vec_normalize_env()
    if normalizer is None or getattr(model, "replay_buffer", None) is None or hasattr(model, "environment_steps"):
        return
    own, seen = (
        {key: each.shape for key, each in parts(space).items()}
        for space in (normalizer.observation_space, model.observation_space)
    )
    if own != seen:
        raise ConfigError(
            f"stable-baselines3 stores observations of VecNormalize, {own.get('', own)}, and the agent sees those of a "
            f"wrapper above it, {seen.get('', seen)}: its replay cannot hold them. {_FIX}"
        )


def _normalized(normalizer: VecNormalize) -> set[str]:
    """Keys of the normalised observations, "" if they are no dictionary."""
    if not normalizer.norm_obs:
        return set()
    return set(normalizer.norm_obs_keys or [""])


class CheckedEnvironments(OffPolicyAlgorithm):
    """An algorithm of SB3 that guards its environments, counts their steps and reports their faults."""

    inputs: Inputs
    environment_steps = 0
    faults: list[dict[str, Any]]
    _is_guarded = False

    @classmethod
    def _wrap_env(cls, env: Any, verbose: int = 0, monitor_wrapper: bool = True) -> VecEnv:
        env = validate(env)
        held = spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary  # by SB3
        if not all(isinstance(part, held) for part in parts(env.observation_space).values()):
            seen_by(cls.__name__, env.observation_space)
        if isinstance(env, gymnasium.Env):
            env = guarded(env)
        elif isinstance(env.unwrapped, DummyVecEnv):
            env.unwrapped.envs = [guarded(each) for each in env.unwrapped.envs]
        wrapped = OffPolicyAlgorithm._wrap_env(env, verbose, monitor_wrapper)
        space: Any = wrapped.action_space
        floats = isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating) and 0 not in space.shape
        if not floats or not (np.isfinite(space.low) & np.isfinite(space.high) & (space.low < space.high)).all():
            raise ConfigError(
                f"{cls.__name__} needs continuous actions with finite bounds (a Box of floats, low below high, and no "
                f"ClipAction), got {space}."
            )
        return wrapped

    def _shown(self, env: Any, verbose: int = 0) -> VecEnv:
        """Return the environment as the agent sees it."""
        return shown_to(type(self).__name__, self._wrap_env(env, verbose), self.inputs)

    def set_env(self, env: Any, force_reset: bool = True) -> None:
        found = self._shown(env, self.verbose)
        for mine, its in ((self.observation_space, found.observation_space), (self.action_space, found.action_space)):
            if mine != its:
                raise ConfigError(f"the agent was made for {mine}, and this environment has {its}.")
        if found.num_envs != self.n_envs:
            raise ConfigError(
                f"the agent was made for {counted(self.n_envs, 'environment')}, got {found.num_envs}. Save it and "
                "load it with these, load(path, env=...)."
            )
        super().set_env(found, force_reset)

    def _update_info_buffer(self, infos: list[dict[str, Any]], dones: Any = None) -> None:
        super()._update_info_buffer([_with_sb3_episode(info) for info in infos], dones)
        for index, info in enumerate(infos):
            steps = info.get("environment_steps", 1)
            check_integers(0, **{"info['environment_steps']": steps})
            self.environment_steps += int(steps)
            if "fault" in info:
                self._count_fault(index, info["fault"])
        self.logger.record("time/environment_steps", self.environment_steps)

    def _count_fault(self, index: int, fault: dict[str, Any]) -> None:
        self.faults.append({"environment": index, "agent_step": self.num_timesteps, **fault})
        self.logger.record("rollout/faults", len(self.faults))
        warnings.warn(fault_message(index, fault), RuntimeWarning, stacklevel=3)

    def _store_transition(self, replay: Any, action: Any, new_obs: Any, reward: Any, dones: Any, infos: Any) -> None:
        # A VecEnv of the user's own has no Guard that checks rewards.
        for index in np.flatnonzero(~np.isfinite(reward)):
            if "fault" not in infos[index]:
                error = ValueError(f"the reward is {reward[index]}")
                self._count_fault(int(index), describe(error, self.num_timesteps, self._episode_num, self.seed))
        self._check_observations(new_obs)
        if self._vec_normalize_env is not None:  # SB3 stores them as the wrappers above VecNormalize leave them
            self._vec_normalize_env.old_obs = original(self._vec_normalize_env, new_obs)
        super()._store_transition(replay, action, new_obs, reward, dones, infos)

    def _check_observations(self, observations: Any, bounds: bool = False) -> None:
        """Refuse observations of an unguarded VecEnv that are not in their space."""
        if self._is_guarded or self.env is None:
            return
        name = type(self.env.unwrapped).__name__
        for index, each in enumerate(rows_of(observations)):
            require_observation(name, self.observation_space, each, bounds)
            try:
                require_finite_observation(each)
            except ValueError as error:
                raise TrainingError(
                    f"{error}: environment {index} of {name} at agent step {self.num_timesteps}. WorkerVecEnv ends the "
                    "episode there and goes on."
                ) from None

    def learn(self, total_timesteps: int, callback: Any = None, log_interval: Any = 4, *rest: Any, **more: Any) -> Self:
        if log_interval is not None:
            check_integers(log_interval=log_interval)
        return super().learn(total_timesteps, callback, log_interval, *rest, **more)

    def _setup_learn(
        self, total_timesteps: int, callback: Any = None, reset_num_timesteps: bool = True, *rest: Any, **settings: Any
    ) -> tuple[int, Any]:
        check_integers(0, total_timesteps=total_timesteps)
        if rest and not isinstance(rest[0], str):
            raise ConfigError(f"tb_log_name must be a text, the folder's name, got {rest[0]!r}.")
        if self.env is None:
            raise ConfigError("the agent has no environment: give one to load(path, env=...), or to set_env.")
        require_width(self.action_noise, (self.n_envs, *(self.action_space.shape or ())))
        several = isinstance(callback, list)
        for each in callback if several else [callback]:
            is_function = callable(each) and not inspect.isclass(each)
            if not (isinstance(each, BaseCallback) or (not several and (each is None or is_function))):
                raise ConfigError(f"callback must be a callback of SB3, a list of them, or a function, got {each!r}.")
        if reset_num_timesteps:
            self.environment_steps = 0
        self._setup_lr_schedule()  # of a rate that was assigned
        noise, before = noise_state(self.action_noise), self._last_obs
        prepared = super()._setup_learn(total_timesteps, callback, reset_num_timesteps, *rest, **settings)
        for name in ("ep_info_buffer", "ep_success_buffer"):  # those of a file may have another length
            setattr(self, name, deque(getattr(self, name), self._stats_window_size))
        if not reset_num_timesteps:  # SB3 resets it in every call of `learn`
            self.action_noise = set_noise_state(self.action_noise, noise)
        if self._vec_normalize_env is not None and self._last_obs is not before:  # after a reset
            self._last_original_obs = original(self._vec_normalize_env, self._last_obs)
        self._is_guarded = self.env.has_attr("wrapper_names")
        self._check_observations(self._last_obs, bounds=True)
        return prepared


def _with_sb3_episode(info: dict[str, Any]) -> dict[str, Any]:
    """Drop an info's "episode" unless it is what SB3 expects, the returns and lengths of its Monitor."""
    episode = info.get("episode", {})
    if not episode or (isinstance(episode, dict) and {"r", "l"} <= episode.keys()):
        return info
    return {key: value for key, value in info.items() if key != "episode"}
