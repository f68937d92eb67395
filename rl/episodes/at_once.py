"""Episodes with one seed each, played one after another or several at a time, with the same returns."""

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from stable_baselines3.common.base_class import BaseAlgorithm

from dipole.core.utils.errors import TrainingError
from dipole.rl.arguments import check_integers, check_seed
from dipole.rl.envs.running.faults import PATIENCE, fault_message
from dipole.rl.envs.running.validate import rows_of
from dipole.rl.envs.running.workers import WorkerVecEnv
from dipole.rl.episodes.play import evaluate, seeing


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
    if not isinstance(env, WorkerVecEnv):
        returns: list[float] = []
        for episode in range(episodes):
            returns += evaluate(agent, env, 1, observations=observations, seeds=partial(episode_seed, seed, episode))
        return returns
    return _Field(agent, env, episodes, seed).play(observations)


class _Field:
    """Episodes that are played side by side."""

    def __init__(self, agent: BaseAlgorithm, env: WorkerVecEnv, episodes: int, seed: int) -> None:
        self.agent, self.env, self.seed = agent, env, seed
        self.see = seeing(agent, env.observation_space)
        self.left = deque((episode, 0) for episode in range(episodes))
        self.playing: dict[int, tuple[int, int]] = {}  # environment -> episode, attempt
        self.shown: dict[int, Any] = {}
        self.totals: dict[int, float] = {}
        self.seen: dict[int, list[Any]] = {}
        self.returns: dict[int, float] = {}

    def play(self, observations: list[Any] | None) -> list[float]:
        for index in range(self.env.num_envs):
            self._begin(index)
        shape: Sequence[int] = self.env.action_space.shape or ()
        while self.playing:
            actions: list[Any] = [None] * self.env.num_envs
            for index, (episode, _) in self.playing.items():
                shown = self.see(self.shown[index])
                if observations is not None:
                    self.seen[episode].append(shown)
                actions[index] = self.agent.predict(shown, deterministic=True)[0]
            # Environments without an episode take another's action: zeros need not be in the space.
            actions = [actions[index] if each is None else each for each in actions]
            following, rewards, dones, infos = self.env.step(np.reshape(actions, (len(actions), *shape)))
            rows = rows_of(following)
            for index in list(self.playing):
                self.totals[index] += float(rewards[index])
                self.shown[index] = rows[index]
                if dones[index]:
                    self._end(index, infos[index])
        if observations is not None:
            observations.extend(each for episode in sorted(self.seen) for each in self.seen[episode])
        return [self.returns[episode] for episode in sorted(self.returns)]

    def _begin(self, index: int) -> None:
        self.playing.pop(index, None)
        if not self.left:
            return
        episode, attempt = self.left.popleft()
        self.shown[index] = self.env.begin(index, episode_seed(self.seed, episode, attempt))
        self.playing[index], self.totals[index], self.seen[episode] = (episode, attempt), 0.0, []

    def _end(self, index: int, info: dict[str, Any]) -> None:
        episode, attempt = self.playing[index]
        if "fault" not in info:
            self.returns[episode] = self.totals[index]
        elif attempt + 1 == PATIENCE:
            raise TrainingError(f"{PATIENCE} episodes in a row failed: {fault_message(index, info['fault'])}")
        else:
            self.left.appendleft((episode, attempt + 1))
        self._begin(index)
