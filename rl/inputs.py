"""The part of an environment's observations that an agent sees (its setting `inputs`), and VecNormalize below it."""

from typing import Any

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.vec_env import (
    VecEnv,
    VecEnvWrapper,
    VecExtractDictObs,
    VecNormalize,
    unwrap_vec_normalize,
)

from dipole.core.utils.errors import ConfigError
from dipole.rl.envs.running.validate import image_keys
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
    """Return an environment with the part of its observations that an agent sees: pixels, state, both, or auto for all.

    Raise ConfigError if they are of another kind, or do not have that part.
    """
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


def require_kinds(learner: str, space: spaces.Space[Any]) -> None:
    """Raise ConfigError for observations that SB3 cannot hold: texts, sequences, dictionaries within each other."""
    held = spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary
    if not all(isinstance(part, held) for part in parts(space).values()):
        seen_by(learner, space)


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
    """Raise ConfigError if SB3's own replay would get observations of another shape than the agent's.

    An agent of dipole stores them as `original` returns them.
    """
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
    if isinstance(normalizer.observation_space, spaces.Dict):
        return set(normalizer.norm_obs_keys or ())
    return {""}
