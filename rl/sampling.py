"""Drawing from replay: transitions, returns of several steps, and augmented views of their images."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from stable_baselines3.common.vec_env import VecNormalize
from torch import Tensor

from dipole.core.utils.errors import TrainingError
from dipole.core.utils.transfer import to_device
from dipole.rl.augmentation import Augmentation, Centre
from dipole.rl.frames import Frames
from dipole.rl.seen import ObservationShape


@dataclass(frozen=True)
class FrameBatch:
    """Transitions drawn for one update, their images augmented.

    Args:
        observations: (B, C, h, w) uint8, or float32 for "bilinear" views.
        next_observations: (B, C, h, w) likewise.
        positives: (B, K, C, h, w), K further views of the observations, or None for K = 0.
        actions: (B, A) float.
        rewards: (B, 1) float.
        dones: (B, 1) float, without time limits.
        stacks: (B, C) hashes of the observation's channels. Equal rows are exact duplicates.
        discounts: (B, 1) of the next observation's value, or None for returns of one step.
        states: (B, S) vectors of the observations, or None.
        next_states: (B, S) likewise.
    """

    observations: Tensor
    next_observations: Tensor
    positives: Tensor | None
    actions: Tensor
    rewards: Tensor
    dones: Tensor
    stacks: NDArray[Any]
    discounts: Tensor | None = None
    states: Tensor | None = None
    next_states: Tensor | None = None


class FrameSampler(ReplayBuffer):
    """The drawing half of `FrameReplayBuffer`, which stores what is drawn here."""

    layout: ObservationShape
    frames: Frames
    rng: np.random.Generator
    n_steps: int
    gamma: float
    starts: NDArray[Any]  # (n_envs, steps, 2): first plane of observation and next observation
    states: NDArray[Any]  # (n_envs, steps, 2, S)
    digests: NDArray[Any]  # (n_envs, planes)
    ends: NDArray[Any]
    valid: NDArray[Any]
    _ring: int
    _head: NDArray[Any]
    _tail: NDArray[Any]

    def draw(self, batch_size: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return environment (B,) and slot (B,) of transitions drawn uniformly, with replacement.

        Args:
            batch_size: B >= 1.

        Raises:
            TrainingError: nothing is stored, or hardly anything but steps that failed.
        """
        sizes = self._head - self._tail
        ends = np.cumsum(sizes)
        if ends[-1] == 0:
            raise TrainingError("the replay buffer is empty: nothing can be sampled from it yet.")
        env, slot = self._locate(self.rng.integers(0, ends[-1], batch_size), sizes, ends)
        for _ in range(100):
            faulty = np.flatnonzero(~self.valid[env, slot])
            if len(faulty) == 0:
                return env, slot
            env[faulty], slot[faulty] = self._locate(self.rng.integers(0, ends[-1], len(faulty)), sizes, ends)
        raise TrainingError(
            "the replay buffer holds hardly anything but steps that failed: nothing can be learned from it."
        )

    def _locate(self, flat: NDArray[Any], sizes: NDArray[Any], ends: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        env = np.searchsorted(ends, flat, side="right")
        offset = flat - (ends - sizes)[env]
        return env, (self._tail[env] + offset) % self.buffer_size

    def _outcomes(
        self, env: NDArray[Any], slot: NDArray[Any], normalizer: VecNormalize | None, n_steps: int, gamma: float
    ) -> tuple[NDArray[Any], NDArray[Any], Tensor | None]:
        """Rewards (B, 1), the slot (B,) of the step that each return ends with, and the discount of what follows.

        R = sum_{j < m} gamma^j r_{t+j}, discount gamma^m. m <= n_steps ends with the episode, the newest step, or
        before a step that failed.
        """
        if n_steps == 1:
            return self._normalize_reward(self.rewards[env, slot][:, None], normalizer), slot, None
        ahead = np.arange(n_steps)
        # Steps between the drawn one and the newest.
        left = (self._head[env] - 1 - slot) % self.buffer_size
        path = (slot[:, None] + ahead) % self.buffer_size  # (B, n)
        goes_on = self.valid[env[:, None], path] & (ahead <= left[:, None])
        goes_on[:, 1:] &= ~self.ends[env[:, None], path[:, :-1]]
        taken = np.logical_and.accumulate(goes_on, axis=1)
        rewards = self._normalize_reward(self.rewards[env[:, None], path], normalizer)
        powers = (gamma**ahead).astype(np.float32)
        count = taken.sum(1)
        return (
            (rewards * powers * taken).sum(1, keepdims=True).astype(np.float32),
            path[np.arange(len(slot)), count - 1],
            self._tensor((gamma ** count[:, None]).astype(np.float32)),
        )

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> ReplayBufferSamples:
        whole = Centre((self.layout.shape[1], self.layout.shape[2]))
        batch = self.sample_views(batch_size, whole, 0, env)
        seen, following = (
            self.layout.observation(*each)
            for each in ((batch.observations, batch.states), (batch.next_observations, batch.next_states))
        )
        return ReplayBufferSamples(seen, batch.actions, following, batch.dones, batch.rewards, batch.discounts)

    def sample_views(
        self,
        batch_size: int,
        augmentation: Augmentation,
        positives: int = 1,
        env: VecNormalize | None = None,
        times: tuple[int, int] = (1, 1),
        n_steps: int | None = None,
        gamma: float | None = None,
    ) -> FrameBatch:
        """Return transitions with augmented observations and further views of each.

        Offsets are drawn in the order observation, next observation, positives.

        Args:
            batch_size: B >= 1.
            augmentation: draws a view of each stack.
            positives: K >= 0 further views of each observation.
            env: normalises rewards and vectors, if given.
            times: M and N >= 1 views of each observation and next observation, one after the other: (M B, C, h, w).
            n_steps: rewards in a return. By default the buffer's.
            gamma: discount of the rewards in a return. By default the buffer's.
        """
        which, slot = self.draw(batch_size)
        if gamma is None:
            gamma = self.gamma
        rewards, last, discounts = self._outcomes(which, slot, env, n_steps or self.n_steps, gamma)
        before, after = self._planes(which, slot, 0), self._planes(which, last, 1)
        observations, next_observations = (
            torch.cat([augmentation.draw(self.frames, which, stacks, self.rng) for _ in range(count)])
            for stacks, count in zip((before, after), times, strict=True)
        )
        views = [augmentation.draw(self.frames, which, before, self.rng) for _ in range(positives)]
        states, next_states = self._drawn_states(which, slot, last, env)
        return FrameBatch(
            observations,
            next_observations,
            torch.stack(views, 1) if views else None,
            self._tensor(self.actions[which, slot]),
            self._tensor(rewards),
            self._tensor(self.dones[which, last][:, None]),
            self.digests[which[:, None], before],
            discounts,
            states,
            next_states,
        )

    def _planes(self, env: NDArray[Any], slot: NDArray[Any], side: int) -> NDArray[Any]:
        """Return the ring's slots (B, C) of observations (side 0) or next observations (1)."""
        return (self.starts[env, slot, side][:, None] + np.arange(self.layout.shape[0])) % self._ring

    def _drawn_states(
        self, env: NDArray[Any], slot: NDArray[Any], last: NDArray[Any], normalizer: VecNormalize | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return vectors (B, S) of observations and of those that returns end with, or None."""
        if not self.layout.width:
            return None, None
        found = (self.states[env, slot, 0], self.states[env, last, 1])
        if normalizer is not None:
            pixels = np.zeros((len(env), *self.layout.shape), np.uint8)
            parts = (normalizer.normalize_obs(self.layout.observation(pixels, each)) for each in found)
            found = tuple(self.layout.state(each).astype(np.float32) for each in parts)
        return self._tensor(found[0]), self._tensor(found[1])

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return to_device(torch.from_numpy(np.ascontiguousarray(array)), self.device)
