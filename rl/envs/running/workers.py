"""Environments in worker processes that are restarted when they die."""

import multiprocessing
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from stable_baselines3.common.vec_env import CloudpickleWrapper, SubprocVecEnv, VecEnv
from stable_baselines3.common.vec_env.subproc_vec_env import _stack_obs, _worker

from dipole.core.utils.errors import ConfigError, TrainingError
from dipole.core.utils.text import counted
from dipole.rl.arguments import check_integers, check_number
from dipole.rl.envs.running.faults import PATIENCE, REFUSED, Guard, fault_message, guarded


class _HungError(EOFError):
    """A worker did not answer in time."""


# Raised by a pipe whose other end is gone.
_GONE = (EOFError, BrokenPipeError, ConnectionResetError)
_TO_BEGIN = 60.0  # seconds: a process imports its libraries first
START = next(name for name in ("forkserver", "spawn") if name in multiprocessing.get_all_start_methods())
_COUNTERS = ("_root_seeds", "_steps", "_episodes", "_deaths", "_in_a_row")

_Step = tuple[Any, float, bool, dict[str, Any], dict[str, Any]]
"""A worker's answer to a step: observation, reward, done, info, and the reset's info."""


class WorkerVecEnv(SubprocVecEnv):
    """Environments in worker processes, which alone make GL contexts. A dead worker is restarted.

    Its episode then ends as truncated, with `info["fault"]`, and a new one starts with a seed drawn for the restart.

        >>> envs = WorkerVecEnv([DotEnv, DotEnv])
        >>> envs.reset().shape
        (2, 9, 28, 28)
        >>> envs.close()

    Args:
        env_fns: functions, one at least, that make one environment each. They must be picklable by cloudpickle.
        start_method: "forkserver" or "spawn" (default: the first that the system has). "fork" breaks OpenGL and
            threads.
        timeout: seconds, 0.001 to 1e9, that an environment may take for a step or a reset. A slower one is ended
            and counts as dead. A process has at least a minute to start. None: no limit.
        restarts: dead workers to tolerate, >= 0, before TrainingError is raised. Five faults of a worker without a
            good step raise it as well.

    Raises:
        ConfigError: an argument is out of range, or an environment cannot be made. From a call: what an environment
            refuses (an action of another shape), another number of actions, or a call after `close`.
        TrainingError: from a call, no restarts are left, or five faults of a worker without a good step between them.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], gymnasium.Env[Any, Any]]],
        start_method: str = START,
        restarts: int = 100,
        timeout: float | None = 600.0,
    ) -> None:
        if callable(env_fns) or not env_fns or not all(map(callable, env_fns)):
            raise ConfigError(
                "WorkerVecEnv needs functions that make one environment each, as in WorkerVecEnv([lambda: "
                f"make_env('dot')]), got {env_fns!r}."
            )
        check_integers(0, restarts=restarts)
        if start_method not in multiprocessing.get_all_start_methods():
            allowed = ", ".join(map(repr, multiprocessing.get_all_start_methods()))
            raise ConfigError(f"start_method must be one of {allowed}, got {start_method!r}.")
        if timeout is not None:
            check_number(1e-3, 1e9, timeout=timeout)
        self._timeout, self._restarts_left = timeout, restarts
        self._make = [partial(_made, CloudpickleWrapper(make)) for make in env_fns]
        self._last_obs: list[Any] = [None] * len(env_fns)
        self._root_seeds: list[int | None] = [None] * len(env_fns)
        self._episodes = [1] * len(env_fns)
        self._steps, self._deaths, self._in_a_row = ([0] * len(env_fns) for _ in range(3))
        # Results of the next step for workers that died between two steps.
        self._pending: dict[int, _Step] = {}
        self._context: Any = multiprocessing.get_context(start_method)
        if start_method == "forkserver":
            # The server imports this once. Otherwise every worker would import torch itself.
            self._context.set_forkserver_preload([__name__])
        self.waiting = self.closed = False
        started = [self._start(make) for make in self._make]
        self.remotes: Any = [remote for remote, _ in started]
        self.processes = [process for _, process in started]
        try:
            for remote in self.remotes:
                remote.send(("get_spaces", None))
            found = [self._answer(index, _TO_BEGIN) for index in range(len(self.remotes))]
        except _GONE as error:
            for process in self.processes:
                process.terminate()
            late = f" in time (timeout={timeout:g})" if isinstance(error, _HungError) else ""
            raise ConfigError(
                f"an environment could not be made in its worker process{late}. The worker has printed why. Make it "
                "once without workers to see the error."
            ) from error
        for index, each in enumerate(found):
            if each != found[0]:
                self.close()
                raise ConfigError(f"environment {index} has the spaces {each}, and environment 0 {found[0]}.")
        VecEnv.__init__(self, len(self._make), *found[0])

    def reset(self) -> Any:
        for index, seed in enumerate(self._seeds):
            if seed is not None:
                self._root_seeds[index], self._steps[index], self._episodes[index] = seed, 0, 1
            elif self._last_obs[index] is not None:
                self._episodes[index] += 1
        self._revive()
        for remote, seed, options in zip(self.remotes, self._seeds, self._options, strict=True):
            with suppress(*_GONE):
                remote.send(("reset", (seed, options)))
        results = []
        for index in range(self.num_envs):
            try:
                results.append(self._answer(index))
            except _GONE as error:
                self._pending[index] = observation, *_, reset_info = self._restart(index, error)
                results.append((observation, reset_info))
        for index, (_, _, _, info, _) in self._pending.items():
            # No step is there to report it with.
            warnings.warn(fault_message(index, info["fault"]), RuntimeWarning, stacklevel=2)
        self._pending.clear()
        for _, info in results:
            _raise_refusal(info)
        observations, self.reset_infos = zip(*results, strict=True)  # type: ignore[assignment]
        self._last_obs = list(observations)
        self._reset_seeds()
        self._reset_options()
        return _stack_obs(observations, self.observation_space)

    def _begin(self, index: int, seed: int) -> Any:
        """Return the first observation of a new episode of one environment."""
        self._revive()
        self._pending.pop(index, None)
        self._root_seeds[index], self._steps[index], self._episodes[index] = seed, 0, 1
        try:
            self.remotes[index].send(("reset", (seed, {})))
            observation, info = self._answer(index)
        except _GONE as error:
            self._restart(index, error)
            return self._begin(index, seed)
        _raise_refusal(info)
        self._last_obs[index] = observation
        return observation

    def _get_target_remotes(self, indices: Any) -> list[Any]:
        # SB3 comes through here before it asks environments for attributes and methods.
        self._revive()
        return super()._get_target_remotes(indices)

    def _revive(self) -> None:
        """Restart workers that have died since the last step. Raise ConfigError after `close`."""
        if self.closed:
            raise ConfigError("these environments are closed: make new ones, WorkerVecEnv([...]).")
        for index, process in enumerate(self.processes):
            if not process.is_alive():
                self._pending[index] = self._restart(index, None)

    def step_async(self, actions: np.ndarray) -> None:
        if len(actions) != self.num_envs:  # SB3 would wait for an answer for ever
            raise ConfigError(f"{counted(self.num_envs, 'environment')} need an action each, got {len(actions)}.")
        for index, action in enumerate(actions):
            # A pipe that is closed here is closed in step_wait as well, which restarts the worker.
            if index not in self._pending:
                with suppress(*_GONE):
                    self.remotes[index].send(("step", action))
        self.waiting = True

    def step_wait(self) -> Any:
        results = [self._receive(index) for index in range(self.num_envs)]
        self.waiting = False
        obs, rewards, dones, infos, self.reset_infos = zip(*results, strict=True)  # type: ignore[assignment]
        self._last_obs = list(obs)
        return _stack_obs(obs, self.observation_space), np.stack(rewards), np.stack(dones), infos

    def close(self) -> None:
        if self.closed:
            return
        for index, remote in enumerate(self.remotes):
            with suppress(*_GONE):
                if self.waiting and index not in self._pending:
                    remote.recv()
                remote.send(("close", None))
        for process in self.processes:
            process.join()
        self.closed = True

    def _receive(self, index: int) -> _Step:
        self._steps[index] += 1
        if index in self._pending:
            return self._pending.pop(index)
        try:
            result: _Step = self._answer(index)
        except _GONE as error:
            return self._restart(index, error)
        _raise_refusal(result[3])
        _raise_refusal(result[4])
        self._episodes[index] += bool(result[2])
        self._in_a_row[index] = self._in_a_row[index] + 1 if "fault" in result[3] else 0
        return result

    def _answer(self, index: int, least: float = 0.0) -> Any:
        """Return what a worker sends. Raise _HungError if it sends nothing in time."""
        if self._timeout is not None and not self.remotes[index].poll(max(self._timeout, least)):
            raise _HungError
        return self.remotes[index].recv()

    def _start(self, make: Callable[[], Any]) -> tuple[Any, Any]:
        remote, work_remote = self._context.Pipe()
        process = self._context.Process(
            target=_worker, args=(work_remote, remote, CloudpickleWrapper(make)), daemon=True
        )
        process.start()
        work_remote.close()
        return remote, process

    def counters(self) -> dict[str, Any]:
        """Return seeds, steps, episodes and deaths of the workers."""
        return {name: list(getattr(self, name)) for name in _COUNTERS}

    def _continue_from(self, observations: list[Any], counters: dict[str, Any] | None) -> None:
        """Continue in the middle of episodes whose states the workers already have, with their newest observations."""
        self._last_obs = observations
        for name, values in (counters or {}).items():
            setattr(self, name, list(values))

    def _restart(self, index: int, error: BaseException | None) -> _Step:
        process = self.processes[index]
        if isinstance(error, _HungError):
            process.kill()
        process.join(timeout=5)
        reason = f"its process died (exit code {process.exitcode})"
        if isinstance(error, _HungError):
            reason = f"it gave no answer for {self._timeout:g} seconds (timeout)"
        root = self._root_seeds[index]
        fault = {"error": reason, "step": self._steps[index], "episode": self._episodes[index], "seed": root}
        self._episodes[index] += 1
        self._in_a_row[index] += 1
        if self._restarts_left == 0:
            raise TrainingError(f"{fault_message(index, fault)} No restarts are left.") from error
        if self._in_a_row[index] >= PATIENCE:
            raise TrainingError(f"{fault_message(index, fault)} {PATIENCE} faults in a row.") from error
        self._restarts_left -= 1
        self._deaths[index] += 1
        self.remotes[index].close()
        self.remotes[index], self.processes[index] = self._start(self._make[index])
        # The worker's generators died with it: a seed of its own for each restart keeps runs reproducible.
        seed = np.random.SeedSequence([root or 0, index, self._deaths[index]]).generate_state(1)[0]
        try:
            self.remotes[index].send(("reset", (int(seed) >> 1, {})))
            observation, reset_info = self._answer(index, _TO_BEGIN)
        except _GONE as again:
            return self._restart(index, again)
        _raise_refusal(reset_info)
        info = {"fault": fault, "TimeLimit.truncated": True, "terminal_observation": self._last_obs[index]}
        return observation, 0.0, True, info, reset_info


def _made(make: CloudpickleWrapper) -> Guard:
    """Make the user's environment inside Monitor and Guard."""
    env = guarded(make.var())
    env.is_in_worker = True
    return env


def _raise_refusal(info: Any) -> None:
    if info and REFUSED in info:
        raise ConfigError(info[REFUSED])
