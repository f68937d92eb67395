"""Checks of environments and of what they return, with one message per mistake."""

import inspect
from collections.abc import Iterator
from contextlib import suppress
from numbers import Real
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecEnv

from dipole.core.utils.errors import ConfigError, DipoleError
from dipole.rl.envs.registry import find, shown
from dipole.rl.seen import parts

_RESET = "(observation, info), info a dictionary"
_STEP = "(observation, reward, terminated, truncated, info)"
LARGEST = float(np.finfo(np.float32).max)
"""Of a reward or an observation: networks and replay hold them as float32."""
_OLD = (
    " This is gym's API of before 2022: port the environment, or wrap it with shimmy (GymV21CompatibilityV0, "
    "GymV26CompatibilityV0)."
)


def validate(env: Any) -> Any:
    """Return the environment, and make it if it is a name. Raise ConfigError for anything else."""
    if isinstance(env, str):
        return validate(_made(env))
    if isinstance(env, VecEnv):
        return env
    allowed = "Allowed: a gymnasium.Env, a VecEnv of stable-baselines3, or a name (make_env)."
    wrong, what = "", shown(env)
    if env is None:
        wrong = "an environment is needed, got None."
    elif inspect.isclass(env):
        wrong = f"{what} is a class and no environment: make one of it, {env.__name__}(...)."
    elif isinstance(env, gymnasium.vector.VectorEnv):
        wrong = (
            f"{what} is a vector environment of gymnasium: use WorkerVecEnv([make, ...]) or stable-baselines3's "
            "DummyVecEnv."
        )
    elif hasattr(env, "possible_agents") or type(env).__module__.partition(".")[0] == "pettingzoo":
        wrong = f"{what} is an environment of PettingZoo, with several agents: wrap one agent of it as a gymnasium.Env."
    elif isinstance(env, gymnasium.Env):
        pass
    elif callable(getattr(env, "step", None)) and callable(getattr(env, "reset", None)):
        wrong = f"{what} is no gymnasium.Env.{_OLD}"
    elif callable(env):
        wrong = f"{what} is no environment. Call it, or give it to WorkerVecEnv([...])."
    else:
        wrong = f"{what} is no environment."
    if wrong:
        raise ConfigError(f"{wrong} {allowed}")
    for name in ("observation_space", "action_space"):
        if not isinstance(getattr(env, name, None), spaces.Space):
            raise ConfigError(f"the environment {what} has no {name}: set one of gymnasium.spaces in its __init__.")
    return env


def _made(task: str) -> Any:
    found = find(task)
    try:
        if found.factory is gymnasium.make:
            with suppress(TypeError):  # it knows no render_mode
                return found.make(render_mode="rgb_array")
        return found.make()
    except DipoleError:
        raise
    except Exception as error:  # whatever the code of an environment raises
        raise ConfigError(f"the environment {task!r} cannot be made: {type(error).__name__}: {error}") from error


class Contract(gymnasium.Wrapper[Any, Any, Any, Any]):
    """The innermost wrapper. Raises ConfigError if `reset` or `step` does not return what gymnasium's do."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        result: Any = self.env.reset(seed=seed, options=options)
        self._require("reset", _RESET, result, 2, is_old=not isinstance(result, tuple | None))
        return result

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        result: Any = self.env.step(action)
        self._require("step", _STEP, result, 5, is_old=isinstance(result, tuple) and len(result) == 4)
        for name, flag in (("terminated", result[2]), ("truncated", result[3])):
            is_one = hasattr(flag, "dtype") and getattr(flag, "shape", None) in ((), (1,))
            if not is_one and not isinstance(flag, Real | np.bool_):
                raise ConfigError(
                    f"step of the environment {shown(self.env)} returned {flag!r:.60} as {name}: it must be True or "
                    "False."
                )
        return result

    def _require(self, what: str, allowed: str, result: Any, count: int, is_old: bool) -> None:
        if isinstance(result, tuple) and len(result) == count and isinstance(result[-1], dict):
            return
        told = "None" if result is None else f"one {type(result).__name__}"
        if isinstance(result, tuple):
            told = f"a tuple of {len(result)} ({', '.join(type(each).__name__ for each in result)})"
        raise ConfigError(
            f"{what} of the environment {shown(self.env)} returned {told}: gymnasium's {what} returns {allowed}."
            f"{_OLD if is_old else ''}"
        )


def under_contract(env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
    """Put a `Contract` below all wrappers, which would only say that they cannot unpack."""
    if not isinstance(env, gymnasium.Wrapper):
        return Contract(env)
    lowest = env
    while isinstance(lowest.env, gymnasium.Wrapper):
        lowest = lowest.env
    if not isinstance(lowest, Contract):
        lowest.env = Contract(lowest.env)
    return env


def require_observation(name: str, space: spaces.Space[Any], observation: Any, bounds: bool = False) -> None:
    """Raise ConfigError for another kind or shape than the space says, with `bounds` for other values as well."""
    for key, each, part in _parts_of(name, space, observation):
        which = _gives(name, key)
        if part is None:
            raise ConfigError(f"{which} None as an observation. Allowed: {each}.")
        if not isinstance(each, spaces.Box):
            if not each.contains(part):
                raise ConfigError(f"{which} {_short(part)}, which is not in its space {each}.")
            continue
        if not isinstance(part, np.ndarray | np.generic):
            raise ConfigError(f"{which} a {type(part).__name__} as an observation. Allowed: an array of {each}.")
        if part.shape != each.shape:
            raise ConfigError(
                f"{which} an observation of the shape {part.shape}, but its space says {each.shape}: every observation "
                "must have that shape."
            )
        if each.dtype == np.uint8 and part.dtype != np.uint8:
            cure = "x.astype(np.uint8)"
            if part.dtype.kind == "f" and np.array_equal(np.clip(part, 0, 1), part):
                cure = "(255 * x).astype(np.uint8)"
            raise ConfigError(
                f"{which} an observation of {part.dtype} from {_short(np.min(part))} to {_short(np.max(part))}, but "
                f"its space is uint8. Allowed: uint8 from 0 to 255 ({cure})."
            )
        if not np.can_cast(part.dtype, each.dtype, "same_kind"):
            raise ConfigError(f"{which} an observation of {part.dtype}, but its space is {each}.")
        if bounds and np.isnan(part).any():
            raise ConfigError(f"{which} NaN as an observation. Allowed: {each}.")
        slack: Any = 0
        if np.issubdtype(each.dtype, np.floating):
            slack = 1e-3 * np.maximum(1, np.abs(part))  # allow rounding
        if bounds and ((part < each.low - slack).any() or (part > each.high + slack).any()):
            raise ConfigError(
                f"{which} observations from {_short(part.min())} to {_short(part.max())}, outside of its space {each}."
            )


def _parts_of(name: str, space: spaces.Space[Any], observation: Any) -> Iterator[tuple[str, spaces.Space[Any], Any]]:
    """Yield key, space and value of each part of an observation. Raise ConfigError for a missing part."""
    if not isinstance(space, spaces.Dict):
        yield "", space, observation
        return
    if observation is None:
        raise ConfigError(f"{_gives(name, '')} None as an observation. Allowed: {space}.")
    if not isinstance(observation, dict) or set(observation) != set(space.spaces):
        got = str(sorted(observation)) if isinstance(observation, dict) else type(observation).__name__
        raise ConfigError(f"{_gives(name, '')} {got}, but its space is a dictionary of {sorted(space.spaces)}.")
    for key, each in space.spaces.items():
        yield key, each, observation[key]


def _gives(name: str, part: str) -> str:
    return f"the environment {name} gives for {part!r}" if part else f"the environment {name} gives"


def rows_of(observations: Any) -> list[Any]:
    """The observation of each environment in a batch of them, which may be a dictionary of arrays."""
    if not isinstance(observations, dict):
        return list(observations)
    return [dict(zip(observations, row, strict=True)) for row in zip(*observations.values(), strict=True)]


def stack(rows: list[Any]) -> Any:
    """Single observations as a batch: an array, or a dictionary of arrays."""
    if isinstance(rows[0], dict):
        return {key: np.stack([row[key] for row in rows]) for key in rows[0]}
    return np.stack(rows)


def require_finite_observation(observation: Any) -> None:
    """Raise ValueError for an observation that is not finite as float32."""
    for part in parts(observation).values():
        if isinstance(part, np.ndarray) and part.dtype.kind == "f" and not (np.abs(part) <= LARGEST).all():
            raise ValueError("the observation is not finite")


def require_full_range(name: str, space: spaces.Space[Any], observations: list[Any]) -> None:
    """Raise ConfigError for pixels of 0 and 1 in a space of 0 to 255: a normalised image that was cast to uint8."""
    for key, each in parts(space).items():
        is_image = image_keys(each) == ("",) and each.dtype == np.uint8 and each.high.max() > 1
        if is_image and max(int(parts(shown)[key].max()) for shown in observations) == 1:
            raise ConfigError(
                f"the environment {name} gives pixels of 0 and 1 in a space of 0 to 255, which the networks divide by "
                "255. Allowed: uint8 from 0 to 255 (for an image x of 0..1: (255 * x).astype(np.uint8))."
            )


def rendered(env: Any) -> np.ndarray:
    """Render the environment, (H, W, 3) uint8. Raise ConfigError if it draws no picture."""
    picture = env.render()
    got = str(picture)
    if isinstance(picture, np.ndarray):
        if picture.ndim == 3 and picture.shape[2] in (1, 3, 4) and picture.dtype == np.uint8:
            return np.broadcast_to(picture[..., :3], (*picture.shape[:2], 3))
        got = f"{picture.dtype} {picture.shape}"
    elif picture is not None:
        got = _short(picture)
    raise ConfigError(
        f"render of the environment {shown(env)} returned {got}: a video needs pictures (H, W, 3) of uint8. Make it "
        "with render_mode='rgb_array'."
    )


def _short(value: Any) -> str:
    if isinstance(value, int | float | np.number):
        return f"{value:g}"
    return f"a {type(value).__name__}"


def image_keys(space: spaces.Space[Any]) -> tuple[str, ...]:
    """Which parts of an observation are images (C, H, W): ("",) for one that is nothing else."""
    if isinstance(space, spaces.Dict):
        return tuple(key for key, each in space.spaces.items() if image_keys(each) == ("",))
    if isinstance(space, spaces.Box) and len(space.shape) == 3:
        return ("",)
    return ()
