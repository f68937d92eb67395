"""Experience replay that stores every frame once.

A stack of k frames is k indices into one ring of frames, so that a transition costs one new frame instead of the 2k
that storing observation and next observation takes: 100,000 transitions of 9x100x100 fit in about 3.0 GB instead of 18.
"""

import hashlib
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from gymnasium import spaces
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from stable_baselines3.common.buffers import BaseBuffer, ReplayBuffer
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from stable_baselines3.common.vec_env import VecNormalize
from torch import Tensor

from dipole.core.ground.errors import ConfigError, TrainingError
from dipole.core.ground.transfer import sent
from dipole.rl.augmentation import Augmentation
from dipole.rl.memory import has_room_for, require_bytes

# Room for the first frame of each episode; episodes shorter than 50 steps leave room for a few transitions less.
_SLACK = 50
_STEPS = ("actions", "rewards", "dones", "valid", "stacks", "oldest_frame")  # (n_envs, steps, ...)
_PLACES = ("_head", "_tail", "_written", "_newest", "pos", "full")


class Frames:
    """A ring of frames (n_envs, F, c, H, W) in host memory."""

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self.shape = shape
        self.device = device
        # Not touched here: the system commits the pages as they are written.
        self.data = np.empty(shape, np.uint8)

    def write(self, env: int, slot: int, frame: NDArray[np.uint8]) -> None:
        self.data[env, slot] = frame

    def stacks(self, env: NDArray[Any], slots: NDArray[Any]) -> Tensor:
        """Return whole stacks (B, k*c, H, W)."""
        return self._merge(self.data[env[:, None], slots])

    def windows(
        self, env: NDArray[Any], slots: NDArray[Any], top: NDArray[Any], left: NDArray[Any], size: int
    ) -> Tensor:
        """Return a window of each stack (B, k*c, size, size); only its pixels are copied."""
        view = sliding_window_view(self.data, (size, size), axis=(-2, -1))
        return self._merge(view[env[:, None], slots, :, top[:, None], left[:, None]])

    def _merge(self, picked: NDArray[np.uint8]) -> Tensor:
        batch, k, channels, *size = picked.shape
        return sent(torch.from_numpy(picked.reshape(batch, k * channels, *size)), self.device)

    def used(self, rows: int) -> NDArray[np.uint8]:
        """The first `rows` slots of every environment, for saving."""
        return self.data[:, :rows]

    def restore(self, rows: NDArray[np.uint8]) -> None:
        self.data[:, : rows.shape[1]] = rows


class DeviceFrames(Frames):
    """The same ring in the memory of the training device: no copies from the host while training."""

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self.shape = shape
        self.device = device
        self.data = torch.empty(shape, dtype=torch.uint8, device=device)  # type: ignore[assignment]

    def write(self, env: int, slot: int, frame: NDArray[np.uint8]) -> None:
        self.data[env, slot] = sent(torch.from_numpy(np.ascontiguousarray(frame)), self.device)

    def stacks(self, env: NDArray[Any], slots: NDArray[Any]) -> Tensor:
        return self.data[self._index(env)[:, None], self._index(slots)].flatten(1, 2)

    def windows(
        self, env: NDArray[Any], slots: NDArray[Any], top: NDArray[Any], left: NDArray[Any], size: int
    ) -> Tensor:
        view: Any = self.data.unfold(-2, size, 1).unfold(-2, size, 1)  # type: ignore[attr-defined]
        index = [self._index(each) for each in (env[:, None], slots, top[:, None], left[:, None])]
        return view[index[0], index[1], :, index[2], index[3]].flatten(1, 2)

    def _index(self, values: NDArray[Any]) -> Tensor:
        return sent(torch.as_tensor(values, dtype=torch.long), self.device)

    def used(self, rows: int) -> NDArray[np.uint8]:
        return self.data[:, :rows].cpu().numpy()  # type: ignore[attr-defined]

    def restore(self, rows: NDArray[np.uint8]) -> None:
        self.data[:, : rows.shape[1]] = torch.from_numpy(rows).to(self.device)


def digest(frame: NDArray[np.uint8]) -> int:
    """64 bits that tell a frame from others: the same for the same pixels, in every process."""
    return int.from_bytes(
        hashlib.blake2b(np.ascontiguousarray(frame).data, digest_size=8).digest(), "little", signed=True
    )


@dataclass(frozen=True)
class FrameBatch:
    """Transitions drawn for one update, their images augmented.

    Args:
        observations, next_observations: (B, C, h, w) uint8.
        positives: (B, K, C, h, w), K further views of the observations; None for K = 0.
        actions: (B, A) float; rewards, dones: (B, 1) float, `dones` without time limits.
        stacks: (B, k) digests of the observation's frames; equal rows are exact duplicates, pixel for pixel.
    """

    observations: Tensor
    next_observations: Tensor
    positives: Tensor | None
    actions: Tensor
    rewards: Tensor
    dones: Tensor
    stacks: NDArray[Any]


class FrameReplayBuffer(ReplayBuffer):
    """Replay for stacked pixel observations; takes the place of SB3's ReplayBuffer (`replay_buffer_class=`).

    Any stacking is stored exactly: frames are recognised by their pixels, so a repeated first frame, a zero-padded one
    (VecFrameStack) or no overlap at all need no declaration. A time limit (`TimeLimit.truncated`) is not a termination.
    A step that a fault ended (`info["fault"]`), or whose reward is not finite, is never sampled.

    Args:
        buffer_size: transitions over all environments.
        observation_space: a Box (C, H, W) of uint8.
        frame_stack: frames in an observation; by default C / 3 where C is a multiple of 3, otherwise C.
        storage: "host", or "device" to keep the frames on the training device; "auto": there, if that is a GPU whose
            free memory is twice what they need.
        seed: of the sampler; drawn from NumPy's global generator (which SB3 seeds) if left out.

    Raises:
        TrainingError: if the frames cannot fit into memory, with the bytes, before anything is allocated.
        ConfigError: for observations that are no uint8 images, or a stack that does not divide the channels.
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        frame_stack: int | None = None,
        storage: Literal["auto", "host", "device"] = "host",
        seed: int | None = None,
    ) -> None:
        BaseBuffer.__init__(self, buffer_size, observation_space, action_space, device, n_envs=n_envs)
        if (
            not isinstance(observation_space, spaces.Box)
            or observation_space.dtype != np.uint8
            or len(observation_space.shape) != 3
        ):
            raise ConfigError(f"FrameReplayBuffer stores uint8 images (C, H, W), not {observation_space}.")
        if storage not in ("auto", "host", "device"):
            raise ConfigError(f"storage must be 'auto', 'host' or 'device', got {storage!r}.")
        channels, height, width = observation_space.shape
        self.frame_stack = frame_stack or (channels // 3 if channels % 3 == 0 else channels)
        if channels % self.frame_stack:
            raise ConfigError(
                f"frame_stack {self.frame_stack} does not divide the {channels} channels of the observation."
            )
        # Every frame is stored once whatever SB3 asks for, and its option would lose the time limits.
        self.optimize_memory_usage = False
        self.handle_timeout_termination = handle_timeout_termination
        self.buffer_size = max(-(-buffer_size // n_envs), 1)  # steps, as SB3 counts
        self._frame_shape = (channels // self.frame_stack, height, width)
        self._ring = self.buffer_size + max(self.buffer_size // _SLACK, 4 * self.frame_stack)
        shape = (n_envs, self._ring, *self._frame_shape)
        needed = self.bytes_needed(self.buffer_size, n_envs, self._frame_shape, self.frame_stack, self.action_dim)
        if storage == "auto":
            storage = "device" if has_room_for(needed, self.device) else "host"
        self.storage = storage
        require_bytes(
            needed,
            self.buffer_size * n_envs,
            self._frame_shape,
            self.device if storage == "device" else torch.device("cpu"),
        )
        self.frames = (DeviceFrames if storage == "device" else Frames)(shape, self.device)
        size = (n_envs, self.buffer_size)
        self.actions = np.zeros((*size, self.action_dim), np.float32)
        self.rewards = np.zeros(size, np.float32)
        self.dones = np.zeros(size, np.float32)
        self.valid = np.zeros(size, bool)
        self.stacks = np.zeros((*size, 2, self.frame_stack), np.int32)  # slots of observation and next observation
        self.oldest_frame = np.zeros(size, np.int64)
        self.digests = np.zeros((n_envs, self._ring), np.int64)
        self.reset()
        self.rng = np.random.default_rng(np.random.randint(2**31) if seed is None else seed)

    @staticmethod
    def bytes_needed(steps: int, n_envs: int, frame: tuple[int, ...], frame_stack: int, action_dim: int) -> int:
        """Bytes of a full buffer of `steps` for each of `n_envs` environments."""
        ring = steps + max(steps // _SLACK, 4 * frame_stack)
        return n_envs * (ring * (int(np.prod(frame)) + 8) + steps * (4 * action_dim + 4 + 4 + 1 + 8 * frame_stack + 8))

    @property
    def nbytes(self) -> int:
        """Bytes of this buffer when full."""
        return self.bytes_needed(self.buffer_size, self.n_envs, self._frame_shape, self.frame_stack, self.action_dim)

    def reset(self) -> None:
        super().reset()
        self._head = np.zeros(self.n_envs, np.int64)  # transitions ever added
        self._tail = np.zeros(self.n_envs, np.int64)  # the oldest that is still whole
        self._written = np.zeros(self.n_envs, np.int64)  # frames ever stored
        self._newest: list[tuple[NDArray[np.uint8], list[int]] | None] = [None] * self.n_envs

    def size(self) -> int:
        """Steps stored (of the fullest environment), as SB3 counts."""
        return int((self._head - self._tail).max())

    def __len__(self) -> int:
        """Transitions stored, over all environments."""
        return int((self._head - self._tail).sum())

    def add(
        self,
        obs: NDArray[Any],
        next_obs: NDArray[Any],
        action: NDArray[Any],
        reward: NDArray[Any],
        done: NDArray[Any],
        infos: list[dict[str, Any]],
    ) -> None:
        """Store one step of every environment: obs, next_obs (n_envs, C, H, W), the others (n_envs, ...)."""
        action = np.asarray(action).reshape(self.n_envs, self.action_dim)
        for env, info in enumerate(infos):
            before = self._serials(env, np.asarray(obs[env]))
            after = self._next_serials(env, np.asarray(obs[env]), before, np.asarray(next_obs[env]))
            self._tail[env] = max(self._tail[env], self._head[env] - self.buffer_size + 1)
            slot = self._head[env] % self.buffer_size
            self.stacks[env, slot] = np.array([before, after]) % self._ring
            self.oldest_frame[env, slot] = min(*before, *after)
            self.actions[env, slot] = action[env]
            finite = bool(np.isfinite(reward[env]))
            self.rewards[env, slot] = reward[env] if finite else 0.0
            timeout = self.handle_timeout_termination and info.get("TimeLimit.truncated", False)
            self.dones[env, slot] = bool(done[env]) and not timeout
            self.valid[env, slot] = finite and "fault" not in info
            self._head[env] += 1
        self.pos = int(self._head[0] % self.buffer_size)
        self.full = bool(self._head[0] >= self.buffer_size)

    def _serials(self, env: int, obs: NDArray[np.uint8]) -> list[int]:
        """Serial numbers of an observation's frames: those of the last next observation, or new ones."""
        newest = self._newest[env]
        if newest is not None and np.array_equal(obs, newest[0]):
            return newest[1]
        serials: list[int] = []
        split = np.split(obs, self.frame_stack)
        for position, frame in enumerate(split):
            repeated = position > 0 and np.array_equal(frame, split[position - 1])
            serials.append(serials[-1] if repeated else self._write(env, frame))
        return serials

    def _next_serials(
        self, env: int, obs: NDArray[np.uint8], before: list[int], following: NDArray[np.uint8]
    ) -> list[int]:
        channels = self._frame_shape[0]
        if np.array_equal(following[:-channels], obs[channels:]):
            after = [*before[1:], self._write(env, following[-channels:])]
        else:
            self._newest[env] = None
            after = self._serials(env, following)
        self._newest[env] = (following.copy(), after)
        return after

    def _write(self, env: int, frame: NDArray[np.uint8]) -> int:
        serial = int(self._written[env])
        self.frames.write(env, serial % self._ring, frame)
        self.digests[env, serial % self._ring] = digest(frame)
        self._written[env] += 1
        # Transitions that used the frame just overwritten are whole no more.
        while self._tail[env] < self._head[env] and (
            self.oldest_frame[env, self._tail[env] % self.buffer_size] <= serial - self._ring
        ):
            self._tail[env] += 1
        return serial

    def draw(self, batch_size: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Draw transitions uniformly, with replacement: environment (B,) and slot (B,)."""
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

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> ReplayBufferSamples:
        """Draw transitions with whole observations, as SB3's own algorithms expect them."""
        which, slot = self.draw(batch_size)
        stacks = self.stacks[which, slot]  # (B, 2, k)
        rewards = self._normalize_reward(self.rewards[which, slot][:, None], env)
        return ReplayBufferSamples(
            self.frames.stacks(which, stacks[:, 0]),
            self._tensor(self.actions[which, slot]),
            self.frames.stacks(which, stacks[:, 1]),
            self._tensor(self.dones[which, slot][:, None]),
            self._tensor(rewards),
        )

    def sample_views(
        self,
        batch_size: int,
        augmentation: Augmentation,
        positives: int = 1,
        env: VecNormalize | None = None,
    ) -> FrameBatch:
        """Draw transitions with augmented observations and `positives` further views of each.

        Offsets are drawn in the order observation, next observation, positives.
        """
        which, slot = self.draw(batch_size)
        before, after = self.stacks[which, slot, 0], self.stacks[which, slot, 1]
        observations = augmentation.draw(self.frames, which, before, self.rng)
        next_observations = augmentation.draw(self.frames, which, after, self.rng)
        views = [augmentation.draw(self.frames, which, before, self.rng) for _ in range(positives)]
        rewards = self._normalize_reward(self.rewards[which, slot][:, None], env)
        return FrameBatch(
            observations,
            next_observations,
            torch.stack(views, 1) if views else None,
            self._tensor(self.actions[which, slot]),
            self._tensor(rewards),
            self._tensor(self.dones[which, slot][:, None]),
            self.digests[which[:, None], before],
        )

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return sent(torch.from_numpy(np.ascontiguousarray(array)), self.device)

    def state_dict(self) -> dict[str, Any]:
        """What is stored, and the sampler's generator: arrays, numbers and lists."""
        rows = int(min(self._written.max(), self._ring))
        steps = int(min(self._head.max(), self.buffer_size))
        return {
            **{name: getattr(self, name)[:, :steps] for name in _STEPS},
            **{name: getattr(self, name) for name in _PLACES},
            "frames": self.frames.used(rows),
            "rng": self.rng,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned. Steps whose reward is not finite are never sampled again.

        Raises:
            ValueError: the state is of a buffer of another shape.
        """
        for name in _STEPS:
            stored, own = state[name], getattr(self, name)
            if stored.shape[0] != self.n_envs or stored.shape[1] > own.shape[1] or stored.shape[2:] != own.shape[2:]:
                raise ValueError(f"replay {name} has the shape {stored.shape}, this agent's {own.shape}")
            own[:] = 0
            own[:, : stored.shape[1]] = stored
        used = state["frames"]
        if used.shape[2:] != self._frame_shape or used.shape[1] > self._ring or used.dtype != np.uint8:
            raise ValueError(f"frames of the shape {used.shape[2:]}, this agent's are {self._frame_shape}")
        for name in _PLACES:
            setattr(self, name, state[name])
        self.rng = state["rng"]
        self._fill(used)

    def _fill(self, used: NDArray[np.uint8]) -> None:
        """Put frames back, and work out what follows from the rest."""
        self.frames.restore(used)
        self.digests = np.zeros((self.n_envs, self._ring), np.int64)
        self.digests[:, : used.shape[1]] = [[digest(frame) for frame in each] for each in used]
        bad = ~np.isfinite(self.rewards)
        self.rewards[bad], self.valid[bad] = 0.0, False

    def __getstate__(self) -> dict[str, Any]:
        stored = self.state_dict()
        stored["frames_used"] = stored.pop("frames")
        state = {name: value for name, value in self.__dict__.items() if name not in ("frames", "digests")}
        return state | stored

    def __setstate__(self, state: dict[str, Any]) -> None:
        used = state.pop("frames_used")
        self.__dict__.update(state)
        if self.storage == "device" and self.device.type == "cuda" and not torch.cuda.is_available():
            self.device = torch.device("cpu")
        self.frames = (DeviceFrames if self.storage == "device" else Frames)(
            (self.n_envs, self._ring, *self._frame_shape), self.device
        )
        for name in _STEPS:
            stored = state[name]
            full = np.zeros((self.n_envs, self.buffer_size, *stored.shape[2:]), stored.dtype)
            full[:, : stored.shape[1]] = stored
            setattr(self, name, full)
        self._fill(used)
