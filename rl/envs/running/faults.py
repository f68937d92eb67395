"""Faults of environments: the episode ends as truncated, the fault is reported, and training continues."""

from typing import Any

import gymnasium
import numpy as np
from stable_baselines3.common.env_util import is_wrapped
from stable_baselines3.common.monitor import Monitor

from dipole.core.utils.errors import ConfigError, TrainingError
from dipole.rl.envs.registry import shown
from dipole.rl.envs.running.state import has_state, wrapper_names, wrappers_set_state, wrappers_state
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
    outside its space, gym's old tuples) raises ConfigError at once.
    """

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
                return self._last, info
            except ConfigError:
                raise
            except Exception as error:
                self._count(error, "reset of the environment")

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self._step += 1
        try:
            observation, reward, terminated, truncated, info = self.env.step(action)
            if not (np.abs(np.asarray(reward, np.float64)) <= LARGEST).all():
                raise ValueError(f"the reward is {reward}")
            self._look_at(observation)
        except ConfigError:
            raise
        except Exception as error:
            self._count(error, "the environment")
            return self._last, 0.0, False, True, {"fault": describe(error, self._step, self._episode, self._seed)}
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

    def _count(self, error: Exception, what: str) -> None:
        self._in_a_row += 1
        if self._in_a_row >= PATIENCE:
            fault = describe(error, self._step, self._episode, self._seed)
            raise TrainingError(
                f"{fault_message(0, fault)} This was the fault number {PATIENCE} in a row: {what} {shown(self.env)} "
                "cannot be used as it is."
            ) from error

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
