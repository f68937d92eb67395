"""Drawing from replay: transitions, returns of several steps, and random views of their images.

Views are CURL's crop, DrQ's shift (also bilinear), the middle, or your own function. One offset per sample serves all
frames of its stack, so that motion inside the stack survives.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from stable_baselines3.common.vec_env import VecNormalize
from torch import Tensor

from dipole.core.utils.errors import ConfigError, TrainingError, nearest
from dipole.core.utils.transfer import to_device
from dipole.rl.arguments import check_integers
from dipole.rl.frames import STORES, Array, Frames, Size, extents
from dipole.rl.seen import ObservationShape

NAMES = ("crop", "shift", "bilinear", "none")
SHIFT = 4  # pixels, DrQ (Kostrikov et al. 2020)


class Centre:
    """The middle of the frame, always the same: no augmentation."""

    def __init__(self, size: Size) -> None:
        self.size = size

    def draw(self, frames: Frames, env: Array, slots: Array, rng: np.random.Generator) -> Tensor:
        """Return views (B, C, *size) of the stacks `slots` (B, k) of environments `env` (B,)."""
        room = np.subtract(frames.shape[-2:], extents(self.size))
        top, left = (self._offsets(int(each), len(env), rng) for each in room)
        return frames.windows(env, slots, top, left, self.size)

    def _offsets(self, room: int, count: int, rng: np.random.Generator) -> Array:
        return np.full(count, room // 2)


class Crop(Centre):
    """A random window at offsets 0..m, m = rendered size - size, or 0..m-1 as in the CURL repository."""

    def __init__(self, size: Size, inclusive: bool = True) -> None:
        super().__init__(size)
        self.inclusive = inclusive

    def _offsets(self, room: int, count: int, rng: np.random.Generator) -> Array:
        return rng.integers(0, max(room + self.inclusive, 1), count)


class Shift(Centre):
    """The middle of the frame moved by up to 4 pixels each way, its border repeated (DrQ)."""

    def draw(self, frames: Frames, env: Array, slots: Array, rng: np.random.Generator) -> Tensor:
        middle = super().draw(frames, env, slots, rng)  # (B, C, h, w)
        top, left = rng.integers(0, 2 * SHIFT + 1, (2, len(env)))
        return shift(middle, top, left, SHIFT)


class Bilinear(Centre):
    """`Shift` by any fraction of a pixel, interpolated between the four pixels around (Yarats et al. 2021, 3.1)."""

    def draw(self, frames: Frames, env: Array, slots: Array, rng: np.random.Generator) -> Tensor:
        middle = super().draw(frames, env, slots, rng)
        top, left = rng.uniform(0, 2 * SHIFT, (2, len(env)))
        return shift_bilinear(middle, top, left, SHIFT).round_().to(torch.uint8)


class Custom:
    """A function (B, C, H, W) uint8 -> (B, C, h, w), values 0..255. It may draw from torch's generator."""

    def __init__(self, function: Callable[[Tensor], Tensor], channels: int, rendered: Size) -> None:
        self.function = function
        self.square = isinstance(rendered, int)
        shape = (2, channels, *extents(rendered))
        probe = self._checked(torch.arange(math.prod(shape)).remainder(256).to(torch.uint8).view(shape))
        if probe.is_floating_point() and probe.max() <= 1:
            raise ConfigError(
                f"the augmentation function returns values from {float(probe.min()):g} to {float(probe.max()):g}, but "
                "the encoder divides by 255 itself: let it return 0..255, as uint8 or float."
            )
        self.size: Size = one_number(*probe.shape[-2:])

    def draw(self, frames: Frames, env: Array, slots: Array, rng: np.random.Generator) -> Tensor:
        return self._checked(frames.stacks(env, slots))

    def _checked(self, images: Tensor) -> Tensor:
        out = self.function(images)
        shape = tuple(getattr(out, "shape", ()))
        fits = len(shape) == 4 and shape[:2] == images.shape[:2] and (not self.square or shape[2] == shape[3])
        if not isinstance(out, Tensor) or not fits:
            raise ConfigError(
                f"the augmentation function must return a tensor (B, C, h, h) for its input {tuple(images.shape)}, "
                f"got {shown(out)}."
            )
        return out


Augmentation = Centre | Custom


def shift(images: Tensor, top: Array, left: Array, pad: int) -> Tensor:
    """Move images (B, C, h, w) by (top - pad, left - pad) pixels, integers (B,) in 0..2 pad. Borders are repeated."""
    height, width = images.shape[-2:]
    device = images.device
    rows = to_device(torch.as_tensor(top), device)[:, None] + torch.arange(height, device=device) - pad  # (B, h)
    columns = to_device(torch.as_tensor(left), device)[:, None] + torch.arange(width, device=device) - pad
    rows, columns = rows.clamp(0, height - 1), columns.clamp(0, width - 1)
    batch = torch.arange(len(images), device=device)[:, None]
    moved = images.transpose(1, 2)[batch, rows]  # (B, h, C, w)
    return moved.permute(0, 3, 2, 1)[batch, columns].permute(0, 2, 3, 1).contiguous()


def shift_bilinear(images: Tensor, top: Array, left: Array, pad: int) -> Tensor:
    """As `shift`, for real shifts: pixels of (B, C, h, w) float32 are interpolated between the four around them."""
    height, width = images.shape[-2:]
    device = images.device
    padded = torch.nn.functional.pad(images.float(), (pad,) * 4, "replicate")
    down, right = (to_device(torch.as_tensor(each, dtype=torch.float32), device)[:, None] for each in (top, left))
    rows = torch.arange(height, device=device) + down
    columns = torch.arange(width, device=device) + right
    # grid_sample's coordinates: -1 and 1 are the outer edges of the image, pixel i lies at (2 i + 1) / extent - 1.
    rows, columns = ((2 * places + 1) / (extent + 2 * pad) - 1 for places, extent in ((rows, height), (columns, width)))
    grid = torch.stack(torch.broadcast_tensors(columns[:, None, :], rows[:, :, None]), -1)  # (B, h, w, 2)
    return torch.nn.functional.grid_sample(padded, grid, padding_mode="border", align_corners=False)


def shown(value: Any) -> str:
    """Return the shape of a tensor, or the type of anything else, for a message."""
    return str(tuple(value.shape)) if isinstance(value, Tensor) else f"a {type(value).__name__}"


def one_number(height: int, width: int) -> Size:
    """Return the size of an image, as one number if it is square."""
    return height if height == width else (height, width)


def choose(choice: Any, channels: int, rendered: Size, size: int | None, inclusive: bool) -> Augmentation:
    """Build the augmentation for a name in NAMES, or a function.

    The network sees a square of `size`. By default 84 % of the rendered height and width for crops (84 of 100), the
    rendered size otherwise.
    """
    if callable(choice):
        custom = Custom(choice, channels, rendered)
        if size not in (None, custom.size):
            raise ConfigError(
                f"image_size is {size}, but the augmentation function returns images of size {custom.size}."
            )
        return custom
    if choice not in NAMES:
        hint = nearest(str(choice), NAMES)
        raise ConfigError(f"augmentation must be one of {', '.join(NAMES)} or a function, got {choice!r}.{hint}")
    height, width = extents(rendered)
    if size is not None and not 1 <= size <= min(height, width):
        raise ConfigError(f"image_size must be between 1 and the rendered size {min(height, width)}, got {size}.")
    if size is None and choice == "crop":
        height, width = round(0.84 * height), round(0.84 * width)
    seen = size or one_number(height, width)
    if choice == "crop":
        return Crop(seen, inclusive)
    return {"shift": Shift, "bilinear": Bilinear, "none": Centre}[choice](seen)


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
        states: (B, S) vectors of the observations.
        next_states: (B, S) likewise.
        discounts: (B, 1) of the next observation's value, or None for returns of one step.
    """

    observations: Tensor
    next_observations: Tensor
    positives: Tensor | None
    actions: Tensor
    rewards: Tensor
    dones: Tensor
    stacks: Array
    states: Tensor
    next_states: Tensor
    discounts: Tensor | None = None


class FrameSampler(ReplayBuffer):
    """The drawing half of `FrameReplayBuffer`, which stores what is drawn here."""

    layout: ObservationShape
    storage: str
    rng: np.random.Generator
    n_steps: int
    gamma: float
    _ring: int
    _head: Array
    _tail: Array

    def _allocate(self) -> None:
        height, width = self.layout.shape[1:]
        self.frames = STORES[self.storage]((self.n_envs, self._ring, height, width), self.device)
        size = (self.n_envs, self.buffer_size)
        self.actions = np.zeros((*size, self.action_dim), np.float32)
        self.rewards = np.zeros(size, np.float32)
        self.dones = np.zeros(size, np.float32)
        self.ends = np.zeros(size, bool)
        self.valid = np.zeros(size, bool)
        self.starts = np.zeros((*size, 2), np.int64)  # first plane of observation and next observation
        self.digests = np.zeros((self.n_envs, self._ring), np.int64)
        self.states = np.zeros((*size, 2, self.layout.width), np.float32)  # of observation and next observation

    def _draw(self, batch_size: int) -> tuple[Array, Array]:
        """Return environment (B,) and slot (B,) of transitions drawn uniformly, with replacement."""
        check_integers(batch_size=batch_size)
        sizes = self._head - self._tail
        ends = np.cumsum(sizes)
        if ends[-1] == 0:
            raise TrainingError("the replay buffer is empty: nothing can be sampled from it yet.")
        env, slot = np.zeros((2, batch_size), np.int64)
        missing = np.arange(batch_size)
        for _ in range(100):
            flat = self.rng.integers(0, ends[-1], len(missing))
            env[missing] = found = np.searchsorted(ends, flat, side="right")
            slot[missing] = (self._tail[found] + flat - (ends - sizes)[found]) % self.buffer_size
            missing = np.flatnonzero(~self.valid[env, slot])
            if len(missing) == 0:
                return env, slot
        raise TrainingError(
            "the replay buffer holds hardly anything but steps that failed: nothing can be learned from it."
        )

    def _outcomes(self, env: Array, slot: Array, normalizer: VecNormalize | None) -> tuple[Array, Array, Tensor | None]:
        """Rewards (B, 1), the slot (B,) of the step that each return ends with, and the discount of what follows.

        R = sum_{j < m} gamma^j r_{t+j}, discount gamma^m. m <= n_steps ends with the episode, the newest step, or
        before a step that failed.
        """
        if self.n_steps == 1:
            return self._normalize_reward(self.rewards[env, slot][:, None], normalizer), slot, None
        ahead = np.arange(self.n_steps)
        # Steps between the drawn one and the newest.
        left = (self._head[env] - 1 - slot) % self.buffer_size
        path = (slot[:, None] + ahead) % self.buffer_size  # (B, n)
        goes_on = self.valid[env[:, None], path] & (ahead <= left[:, None])
        goes_on[:, 1:] &= ~self.ends[env[:, None], path[:, :-1]]
        taken = np.logical_and.accumulate(goes_on, axis=1)
        rewards = self._normalize_reward(self.rewards[env[:, None], path], normalizer)
        powers = (self.gamma**ahead).astype(np.float32)
        count = taken.sum(1)
        returns = (rewards * powers * taken).sum(1, keepdims=True).astype(np.float32)
        discounts = self._tensor((self.gamma ** count[:, None]).astype(np.float32))
        return returns, path[np.arange(len(slot)), count - 1], discounts

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> ReplayBufferSamples:
        whole = Centre((self.layout.shape[1], self.layout.shape[2]))
        batch = self.sample_views(batch_size, whole, 0, env)
        seen = self.layout.observation(batch.observations, batch.states)
        following = self.layout.observation(batch.next_observations, batch.next_states)
        return ReplayBufferSamples(seen, batch.actions, following, batch.dones, batch.rewards, batch.discounts)

    def sample_views(
        self,
        batch_size: int,
        augmentation: Augmentation,
        positives: int = 1,
        env: VecNormalize | None = None,
        times: tuple[int, int] = (1, 1),
    ) -> FrameBatch:
        """Return transitions with augmented observations and further views of each.

        Offsets are drawn in the order observation, next observation, positives.

        Args:
            batch_size: B >= 1.
            augmentation: draws a view of each stack.
            positives: K >= 0 further views of each observation.
            env: normalises rewards and vectors, if given.
            times: M and N >= 1 views of each observation and next observation, one after the other: (M B, C, h, w).

        Raises:
            TrainingError: nothing is stored, or hardly anything but steps that failed.
            ConfigError: `batch_size` is no integer >= 1.
        """
        which, slot = self._draw(batch_size)
        rewards, last, discounts = self._outcomes(which, slot, env)
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
            states,
            next_states,
            discounts,
        )

    def _planes(self, env: Array, slot: Array, side: int) -> Array:
        """Return the ring's slots (B, C) of observations (side 0) or next observations (1)."""
        return (self.starts[env, slot, side][:, None] + np.arange(self.layout.shape[0])) % self._ring

    def _drawn_states(
        self, env: Array, slot: Array, last: Array, normalizer: VecNormalize | None
    ) -> tuple[Tensor, Tensor]:
        """Return vectors (B, S) of observations and of those that returns end with."""
        found = (self.states[env, slot, 0], self.states[env, last, 1])
        if normalizer is not None and self.layout.width:
            pixels = np.zeros((len(env), *self.layout.shape), np.uint8)
            parts = (normalizer.normalize_obs(self.layout.observation(pixels, each)) for each in found)
            found = tuple(self.layout.state(each).astype(np.float32) for each in parts)
        return self._tensor(found[0]), self._tensor(found[1])

    def _tensor(self, array: Array) -> Tensor:
        return to_device(torch.from_numpy(np.ascontiguousarray(array)), self.device)
