"""Faults of environments, and the state from which they continue.

After a fault the episode ends as truncated, the fault is reported, and training continues. The state of a wrapper is
read from its attributes, so that it needs no methods of its own. One with `get_state` and `set_state` is asked instead.
Arguments of its constructor, functions, spaces and drawing are not state. Of SB3's action noise, the state of
Ornstein-Uhlenbeck is correlated in time.
"""

import copy
import inspect
from collections import deque
from contextlib import suppress
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.wrappers import PassiveEnvChecker
from stable_baselines3.common import noise as noises
from stable_baselines3.common.env_util import is_wrapped
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper

from dipole.core.utils.errors import CheckpointError, ConfigError, TrainingError
from dipole.core.utils.plain_values import encode
from dipole.core.utils.seeding import isolated
from dipole.rl.envs.registry import shown
from dipole.rl.envs.running.validate import (
    LARGEST,
    require_finite_observation,
    require_full_range,
    require_observation,
    under_contract,
    validate,
)

# So many faults without a good step mean that the environment is broken.
PATIENCE = 5
REFUSED = "dipole refuses"  # key of an info


def describe(error: BaseException, step: int, episode: int, seed: int | None) -> dict[str, Any]:
    """Return the value of `info["fault"]`."""
    return {"error": f"{type(error).__name__}: {error}", "step": step, "episode": episode, "seed": seed}


def fault_message(environment: int, fault: dict[str, Any]) -> str:
    """One line for the log."""
    return (
        f"environment {environment} failed at its step {fault['step']} (episode {fault['episode']} after "
        f"seed {fault['seed']}): {fault['error']}. The episode ends as truncated and its last step is not learned from."
    )


class Guard(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Turns an exception in `step`, or a reward that is not finite, into a truncated episode with `info["fault"]`.

    The observation of such a step is the last good one, the reward is 0, and replay leaves the step out. A failing
    `reset` is tried again. Five faults without a good step raise TrainingError. A wrong interface (an observation
    outside its space, gym's old tuples) raises ConfigError at once. A worker's process sends it to its parent instead.
    """

    is_in_worker = False

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self._first: list[Any] | None = []  # observations, until there are two: these are looked at closely
        self._last: Any = None
        self._seed: int | None = None
        self._episode = self._step = self._in_a_row = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self._seed, self._episode, self._step = seed, 0, 0
        self._episode += 1
        while True:
            try:
                observation, info = self.env.reset(seed=seed, options=options)
                self._look_at(observation)
                self._last = observation
                return observation, info
            except ConfigError as error:
                if not self.is_in_worker:
                    raise
                return self.observation_space.sample(), {REFUSED: str(error)}
            except Exception as error:
                self._count(error, "reset of the environment")

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self._step += 1
        try:
            observation, reward, terminated, truncated, info = self.env.step(action)
            if not (np.abs(np.asarray(reward, np.float64)) <= LARGEST).all():
                raise ValueError(f"the reward is {reward}")
            self._look_at(observation)
        except ConfigError as error:
            if not self.is_in_worker:
                raise
            return self.observation_space.sample(), 0.0, False, False, {REFUSED: str(error)}
        except Exception as error:
            return self._last, 0.0, False, True, {"fault": self._count(error, "the environment")}
        self._last, self._in_a_row = observation, 0
        return self._last, reward, terminated, truncated, info

    def _look_at(self, observation: Any) -> None:
        name, space = shown(self.env), self.env.observation_space
        require_observation(name, space, observation, bounds=self._first is not None)
        require_finite_observation(observation)
        if self._first is None:
            return
        self._first.append(observation)
        if len(self._first) == 2:
            require_full_range(name, space, self._first)
            self._first = None

    def _count(self, error: Exception, what: str) -> dict[str, Any]:
        """Return the description of a fault. Raise TrainingError if it is one too many."""
        fault = describe(error, self._step, self._episode, self._seed)
        self._in_a_row += 1
        if self._in_a_row >= PATIENCE:
            raise TrainingError(
                f"{fault_message(0, fault)} This was the fault number {PATIENCE} in a row: {what} {shown(self.env)} "
                "cannot be used as it is."
            ) from error
        return fault

    def get_state(self) -> dict[str, Any]:
        """Return the state of the environment (or None), of its wrappers and of this one."""
        inner: Any = self.unwrapped
        return {
            "inner": inner.get_state() if has_state(inner) else None,
            "wrappers": wrappers_state(self.env),
            "guard": (self._last, self._seed, self._episode, self._step, self._in_a_row),
        }

    def wrapper_names(self) -> list[str]:
        """Classes of the wrappers inside this one."""
        return wrapper_names(self.env)

    def set_state(self, state: dict[str, Any]) -> bool:
        """Restore `get_state`. Return False if the environment cannot take a state and must be reset.

        Running means of wrappers are restored in any case.
        """
        inner: Any = self.unwrapped
        if state["inner"] is None or not has_state(inner):
            wrappers_set_state(self.env, state["wrappers"])
            return False
        # Wrappers such as gymnasium's order check allow a step only after a reset.
        self.env.reset()
        inner.set_state(state["inner"])
        wrappers_set_state(self.env, state["wrappers"])
        self._last, self._seed, self._episode, self._step, self._in_a_row = state["guard"]
        self._first = None
        return True


def guarded(env: gymnasium.Env[Any, Any]) -> Guard:
    """Wrap in Monitor and Guard, unless it is. Raise ConfigError for what is no environment."""
    if isinstance(env, Guard):
        return env
    env = under_contract(validate(env))
    if not is_wrapped(env, Monitor):
        env = Monitor(env)
    return Guard(env)


# No state: links and descriptions, clocks and files of the old process, pending calls of the vector environment.
_NO_STATE = {
    "env", "venv", "class_attributes", "metadata", "_metadata", "_cached_spec", "_saved_kwargs", "num_envs",
    "render_mode", "t_start", "episode_start_time", "results_writer", "actions", "waiting", "reset_infos", "_seeds",
    "_options", "start_time", "spec",
}  # fmt: skip
_LIBRARIES = ("gymnasium", "stable_baselines3")
_DRAWING = ("pygame", "moviepy")
_State = dict[str, Any]


def wrapper_names(env: Any) -> list[str]:
    """Classes of the wrappers around an environment (or a VecEnv), outermost first."""
    return [type(each).__qualname__ for each in _wrappers(env)]


def wrappers_state(env: Any) -> list[_State]:
    """Return the state of each wrapper, outermost first. `unsaved` names attributes that cannot be saved."""
    return [_state_of(each) for each in _wrappers(env)]


def require_saved(states: list[_State], names: list[str]) -> None:
    """Raise CheckpointError unless wrappers of these names can continue from these states."""
    saved = [each["name"] for each in states]
    if saved != names:
        raise CheckpointError(
            f"the checkpoint was written with the wrappers {', '.join(saved) or '(none)'}, this environment has "
            f"{', '.join(names) or '(none)'}: wrap it as it was."
        )
    for each in states:
        if each["unsaved"]:
            raise CheckpointError(
                f"the state of the wrapper {each['name']} is not in the checkpoint: no file can hold its "
                f"{', '.join(each['unsaved'])}. Give it get_state() and set_state(state), or leave it out."
            )


def wrappers_set_state(env: Any, states: list[_State]) -> None:
    """Put back what `wrappers_state` returned."""
    for each, told in zip(_wrappers(env), states, strict=True):
        if has_state(each):
            each.set_state(told["state"])
        else:
            _restore(each, told["state"])


def _wrappers(env: Any) -> list[Any]:
    found = []
    while isinstance(env, gymnasium.Wrapper | VecEnvWrapper):
        found.append(env)
        env = env.venv if isinstance(env, VecEnvWrapper) else env.env
    return found


def has_state(wrapper: Any) -> bool:
    """Return whether a wrapper or environment has get_state and set_state."""
    return all(callable(getattr(type(wrapper), name, None)) for name in ("get_state", "set_state"))


def _state_of(wrapper: Any) -> _State:
    told: _State = {"name": type(wrapper).__qualname__, "state": {}, "unsaved": []}
    if has_state(wrapper):
        told["state"] = wrapper.get_state()
    elif not isinstance(wrapper, PassiveEnvChecker):  # its checks are no state of the task
        for name, value in _plain(_attributes(wrapper)).items():
            if odd := _not_held(value):
                told["unsaved"].append(f"{name} ({odd})")
            else:
                told["state"][name] = copy.deepcopy(value)
    return told


def _not_held(value: Any) -> str:
    """Return the type of a part that a checkpoint cannot hold, or would give back as a plain dictionary, or ""."""
    if type(value) is dict:
        value = [*value, *value.values()]
    if type(value) in (list, tuple, set, deque):
        return next(filter(None, map(_not_held, value)), "")
    with suppress(CheckpointError):
        if not isinstance(value, dict):
            encode(value, lambda array: 0, "")
            return ""
    return type(value).__name__


def _attributes(thing: Any) -> _State:
    given = inspect.signature(type(thing).__init__).parameters
    return {
        name: value for name, value in vars(thing).items() if name not in _NO_STATE and name.lstrip("_") not in given
    }


def _is_fixed(value: Any) -> bool:
    """Return whether a value is code, a space, an environment or drawing, so not state."""
    root = type(value).__module__.partition(".")[0]
    kinds = gymnasium.Space | EnvSpec | gymnasium.Env | VecEnv
    return callable(value) or inspect.ismodule(value) or isinstance(value, kinds) or root in _DRAWING


def _is_part(value: Any) -> bool:
    """Return whether a value is a small library object (running means, stacked frames) with state in attributes."""
    return type(value).__module__.partition(".")[0] in _LIBRARIES and hasattr(value, "__dict__")


def _plain(value: Any) -> Any:
    """Return library objects as dictionaries of their state."""
    if _is_part(value):
        value = _attributes(value)
    if type(value) is dict:
        return {key: _plain(each) for key, each in value.items() if not _is_fixed(each)}
    return value


def _restore(thing: Any, state: _State) -> None:
    for name, value in state.items():
        now = getattr(thing, name, None)
        if _is_part(now):
            _restore(now, value)
        elif isinstance(now, dict) and any(map(_is_part, now.values())):
            for key, each in value.items():
                _restore(now[key], each)
        else:
            setattr(thing, name, value)


def noise_state(noise: noises.ActionNoise | None) -> dict[str, Any] | None:
    """Return the class and what changes with each draw. Vectorised noise has one state per environment."""
    if noise is None:
        return None
    values = {name: copy.deepcopy(value) for name, value in vars(noise).items() if not callable(value)}
    if isinstance(noise, noises.VectorizedActionNoise):
        values = {"_noises": [noise_state(each) for each in noise.noises]}
    elif type(noise).__module__ == noises.__name__:  # the other attributes are arguments
        values = {name: value for name, value in values.items() if name == "noise_prev"}
    return {"name": type(noise).__qualname__, "values": values}


def require_width(noise: noises.ActionNoise | None, shape: tuple[int, ...]) -> None:
    """Raise ConfigError for noise that cannot be added to actions of the shape (n_envs, A)."""
    if noise is None:
        return
    with isolated(0):
        drawn = np.shape(copy.deepcopy(noise)())
    if len(drawn) > len(shape) or any(n not in (1, m) for n, m in zip(drawn[::-1], shape[::-1], strict=False)):
        raise ConfigError(f"action_noise draws numbers of the shape {drawn}, and the actions are {shape}.")


def set_noise_state(noise: noises.ActionNoise | None, state: dict[str, Any] | None) -> noises.ActionNoise | None:
    """Return noise that continues from a state, vectorised if the state is. Raise CheckpointError for another noise."""
    if state is None:
        return noise
    vectorised = noises.VectorizedActionNoise.__name__
    if noise is not None and state["name"] == vectorised and not isinstance(noise, noises.VectorizedActionNoise):
        noise = noises.VectorizedActionNoise(noise, len(state["values"]["_noises"]))  # as SB3 does when learning begins
    if noise is None or type(noise).__qualname__ != state["name"]:
        raise CheckpointError(
            f"the checkpoint was written with the action_noise {state['name']}, this agent has {noise!r}: give the "
            "same one."
        )
    for name, value in state["values"].items():
        if name == "_noises":
            for own, each in zip(noise.noises, value, strict=True):  # type: ignore[attr-defined]
                set_noise_state(own, each)
        else:
            setattr(noise, name, value)
    return noise
