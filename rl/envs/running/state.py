"""The state of wrappers, read from their attributes, so that a resumed wrapper needs no methods of its own.

A wrapper with `get_state` and `set_state` is asked instead. Arguments of its constructor, functions, spaces and drawing
are not state. And the state of SB3's action noise: that of Ornstein-Uhlenbeck is correlated in time.
"""

import copy
import inspect
from collections import deque
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.wrappers import PassiveEnvChecker
from stable_baselines3.common import noise as noises
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper

from dipole.core.utils.errors import CheckpointError, ConfigError
from dipole.core.utils.seeding import isolated

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
        if isinstance(env, VecEnvWrapper):
            env = env.venv
        else:
            env = env.env
    return found


def has_state(wrapper: Any) -> bool:
    """Return whether a wrapper or environment has get_state and set_state."""
    return all(callable(getattr(type(wrapper), name, None)) for name in ("get_state", "set_state"))


def _state_of(wrapper: Any) -> _State:
    told: _State = {"name": type(wrapper).__qualname__, "state": {}, "unsaved": []}
    if has_state(wrapper):
        told["state"] = wrapper.get_state()
    elif not isinstance(wrapper, PassiveEnvChecker):  # its checks are no state of the task
        for name, value in _attributes(wrapper).items():
            if _is_fixed(value):
                continue
            try:
                told["state"][name] = _plain(value)
            except TypeError as error:
                told["unsaved"].append(f"{name} ({error})")
    return told


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
    """Return a copy that a checkpoint can hold. Raise TypeError with the type otherwise."""
    if value is None or isinstance(
        value, bool | int | float | str | bytes | np.random.Generator | np.random.RandomState
    ):
        return copy.deepcopy(value)
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        return value.copy()
    if isinstance(value, deque):
        return deque((_plain(each) for each in value), value.maxlen)
    if type(value) in (list, tuple, set):
        return type(value)(_plain(each) for each in value)
    if type(value) is dict:
        return {_plain(key): _plain(each) for key, each in value.items() if not _is_fixed(each)}
    if _is_part(value):
        return {name: _plain(each) for name, each in _attributes(value).items() if not _is_fixed(each)}
    raise TypeError(type(value).__name__)


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
