"""Experience replay that stores every frame once.

An observation is a block of C consecutive planes (single channels) in a ring. The next observation of the same episode
moves on by one frame: it shares all planes but the newest. 100,000 transitions of 9x100x100 take about 3.1 GB instead
of 18.
"""

import copy
import hashlib
import tempfile
import warnings
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.buffers import BaseBuffer
from stable_baselines3.common.utils import get_device

from dipole.core.utils.errors import ConfigError
from dipole.core.utils.text import counted, size
from dipole.rl.arguments import check_integers, check_number, check_seed
from dipole.rl.frames import Array, available_bytes, require_bytes
from dipole.rl.sampling import FrameSampler
from dipole.rl.seen import layout
from dipole.rl.settings import Storage

# Room for the first stack of each episode: one frame in 32 steps. If episodes need more the ring grows.
_SLACK = 32
_STEPS = ("actions", "rewards", "dones", "ends", "valid", "starts", "states")  # (n_envs, steps, ...)
_COUNTERS = ("_head", "_tail", "_written", "_newest", "pos", "full")


class FrameReplayBuffer(FrameSampler):
    """Replay for stacked pixel observations, in place of SB3's ReplayBuffer (`replay_buffer_class=`).

    Frames are expected newest last, each step bringing one (`frame_stack`). Anything else is stored exactly as well, as
    whole observations: the ring then grows while memory allows. A time limit (`TimeLimit.truncated`) is not a
    termination. A step that a fault ended (`info["fault"]`), or whose reward, action or vectors are not finite, is
    never sampled.

        >>> from stable_baselines3 import SAC
        >>> agent = SAC("CnnPolicy", DotEnv(size=36), replay_buffer_class=FrameReplayBuffer, buffer_size=1000)

    Args:
        buffer_size: transitions over all environments, >= 1, rounded up to a multiple of `n_envs`. If memory does not
            suffice for their frames, a warning says how many fit.
        observation_space: a Box (C, H, W) of uint8, vectors (another Box), or a Dict of one such image and vectors,
            which are stored with it for every step.
        action_space: of the agent.
        device: where batches go, and frames of storage="device": "auto", "cpu", "cuda", ...
        n_envs: environments, >= 1.
        optimize_memory_usage: has no effect: every frame is stored once.
        handle_timeout_termination: False counts a time limit (`TimeLimit.truncated`) as a termination.
        frame_stack: frames in an observation, >= 1, of which each step is expected to bring one. By default C / 3 if C
            is a multiple of 3, otherwise C.
        storage: "host", "device" (the training device), "disk" (a file in the temporary folder TMPDIR, for more than
            memory holds), or "auto": the device if that is a GPU with twice the needed memory free, else the host.
        seed: of the sampler, from 0 to 2**32 - 1. By default drawn from NumPy's global generator, which SB3 seeds.
        n_steps: rewards in a return, >= 1. As in SB3's NStepReplayBuffer, returns end with the episode.
        gamma: discount of the rewards in a return, in [0, 1].

    Raises:
        TrainingError: if the frames cannot fit into memory, with the bytes, before anything is allocated.
        ConfigError: for observations that are no uint8 images or vectors, a stack that does not divide the channels,
            another word for `storage`, an unknown device, or a number out of range.
    """

    _device: torch.device

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
        storage: Storage = "host",
        seed: int | None = None,
        n_steps: int = 1,
        gamma: float = 0.99,
    ) -> None:
        check_integers(buffer_size=buffer_size, n_envs=n_envs, n_steps=n_steps)
        if frame_stack is not None:
            check_integers(frame_stack=frame_stack)
        seed = check_seed(seed)
        require_device(device)
        BaseBuffer.__init__(self, buffer_size, observation_space, action_space, device, n_envs=n_envs)
        try:
            self.layout = layout(observation_space)
        except ValueError as error:
            raise ConfigError(
                f"FrameReplayBuffer stores uint8 images (C, H, W) and vectors, not {observation_space}: {error}."
            ) from error
        if storage not in get_args(Storage):
            raise ConfigError(f"storage must be one of {', '.join(map(repr, get_args(Storage)))}, got {storage!r}.")
        check_number(0, 1, gamma=gamma)
        self.n_steps, self.gamma = n_steps, gamma
        channels, height, width = self.layout.shape
        if frame_stack is None and channels % 3 == 0:
            frame_stack = max(channels // 3, 1)
        self.frame_stack = frame_stack or channels
        if channels % self.frame_stack:
            raise ConfigError(
                f"frame_stack {self.frame_stack} does not divide the {channels} channels of the observation."
            )
        # Every frame is stored once whatever SB3 asks for, and its option would lose the time limits.
        self.optimize_memory_usage = False
        self.handle_timeout_termination = handle_timeout_termination
        self.buffer_size = -(-buffer_size // n_envs)  # steps, as SB3 counts
        self._frame_shape = (channels // self.frame_stack, height, width)
        self._ring = _ring(self.buffer_size, self._frame_shape[0], channels)
        needed = self.nbytes
        if storage == "auto":
            storage = "host"
            if self.device.type == "cuda" and 2 * needed <= available_bytes(self.device):
                storage = "device"
        self.storage = storage
        require_bytes(needed, self.buffer_size * n_envs, self._frame_shape, self._place)
        self._allocate()
        self.reset()
        if seed is None:
            seed = np.random.randint(2**31)
        self.rng = np.random.default_rng(seed)

    @property
    def _place(self) -> torch.device | Path:
        if self.storage == "disk":
            return Path(tempfile.gettempdir())
        return self.device if self.storage == "device" else torch.device("cpu")

    @property
    def nbytes(self) -> int:
        """Bytes of this buffer when full."""
        return self._bytes(self._ring)

    def _bytes(self, ring: int) -> int:
        per_step = 4 * self.action_dim + 4 + 4 + 1 + 1 + 16 + 8 * self.layout.width
        plane = int(np.prod(self.layout.shape[1:])) + 8
        return self.n_envs * (ring * plane + self.buffer_size * per_step)

    @property
    def capacity(self) -> int:
        """Transitions that it can hold. Fewer than `buffer_size` only if memory did not suffice (with a warning)."""
        return self.buffer_size * self.n_envs if self._room is None else self._room

    def reset(self) -> None:
        super().reset()
        self._head = np.zeros(self.n_envs, np.int64)  # transitions ever added
        self._tail = np.zeros(self.n_envs, np.int64)  # the oldest that is still whole
        self._written = np.zeros(self.n_envs, np.int64)  # planes ever stored
        self._newest: list[NDArray[np.uint8] | None] = [None] * self.n_envs  # next observation of the last step
        self._room: int | None = None
        self.files: tuple[Path, list[dict[str, Any]]] = Path(), []  # of the last checkpoint, see `snapshots`

    def size(self) -> int:
        return int((self._head - self._tail).max())

    def __len__(self) -> int:
        """Transitions stored, over all environments."""
        return int((self._head - self._tail).sum())

    def add(
        self,
        obs: Any,
        next_obs: Any,
        action: Array,
        reward: Array,
        done: Array,
        infos: list[dict[str, Any]],
    ) -> None:
        action = np.asarray(action).reshape(self.n_envs, self.action_dim)
        if self.layout.width:
            vectors = np.stack([self.layout.state(obs), self.layout.state(next_obs)], 1)  # (n_envs, 2, S)
            self.states[np.arange(self.n_envs), self._head % self.buffer_size] = vectors
        obs, next_obs = self.layout.pixels(obs), self.layout.pixels(next_obs)
        for env, info in enumerate(infos):
            starts = self._write_both(env, np.asarray(obs[env]), np.asarray(next_obs[env]))
            self._tail[env] = max(self._tail[env], self._head[env] - self.buffer_size + 1)
            slot = self._head[env] % self.buffer_size
            numbers = (reward[env], action[env], self.states[env, slot])
            finite = all(np.isfinite(each).all() for each in numbers)
            self.starts[env, slot] = starts
            self.actions[env, slot], self.rewards[env, slot] = 0.0, 0.0
            if finite:
                self.actions[env, slot], self.rewards[env, slot] = action[env], reward[env]
            timeout = self.handle_timeout_termination and info.get("TimeLimit.truncated", False)
            self.dones[env, slot], self.ends[env, slot] = bool(done[env]) and not timeout, bool(done[env])
            self.valid[env, slot] = "fault" not in info and finite
            self._head[env] += 1
        self.pos = int(self._head[0] % self.buffer_size)
        self.full = bool((self._head - self._tail >= self.buffer_size).all())

    def _write_both(self, env: int, obs: NDArray[np.uint8], following: NDArray[np.uint8]) -> tuple[int, int]:
        """Store what is new in an observation and the next one. Return the serial numbers of their first planes."""
        last = self._newest[env]
        if last is not None and np.array_equal(obs, last):
            before = int(self.starts[env, (self._head[env] - 1) % self.buffer_size, 1])
        else:
            before = self._write(env, obs)
        self._newest[env] = following.copy()
        if before + len(obs) == self._written[env]:  # the newest planes are those of `obs`
            for new in (1, self._frame_shape[0]):  # a grey frame, or a frame
                if new < len(obs) and np.array_equal(following[:-new], obs[new:]):
                    self._write(env, following[-new:])
                    return before, before + new
        return before, self._write(env, following)

    def _write(self, env: int, planes: NDArray[np.uint8]) -> int:
        """Store planes (n, H, W) and return the serial number of the first."""
        first = int(self._written[env])
        last = first + len(planes)
        if self._head[env] - self._tail[env] < self.buffer_size and self._loses(env, last):
            self._grow()
        serials = np.arange(first, last)
        self.frames.put(env, serials % self._ring, planes)
        names = b"".join(hashlib.blake2b(plane.tobytes(), digest_size=8).digest() for plane in planes)
        self.digests[env, serials % self._ring] = np.frombuffer(names, "<i8")
        self._written[env] = last
        while self._loses(env, last):  # a plane of the oldest transition is overwritten
            self._tail[env] += 1
        return first

    def _loses(self, env: int, written: int) -> bool:
        """Return whether the oldest transition loses a plane once `written` planes are written."""
        tail = self._tail[env]
        return bool(tail < self._head[env] and self.starts[env, tail % self.buffer_size, 0] < written - self._ring)

    def _grow(self) -> None:
        """Make the ring long enough for this stream's planes per transition, if memory allows."""
        if self._room is not None:
            return
        channels = self.layout.shape[0]
        rate = float((self._written / np.maximum(self._head, 1)).max())
        ring = max(_ring(self.buffer_size, rate, channels), int(1.25 * self._ring))
        needed, free = self._bytes(ring), available_bytes(self._place)
        if needed <= free:
            self._resize(ring)
            return
        self._room = max(int(self._ring / rate), 1) * self.n_envs
        warnings.warn(
            f"replay holds about {self._room:,} transitions instead of {self.buffer_size * self.n_envs:,}: each brings "
            f"{rate:.3g} new channels of its {channels}, so that all of them would need {size(needed)}, and "
            f"{size(free)} are free. Lower buffer_size, or free memory.",
            RuntimeWarning,
            stacklevel=4,
        )

    def _resize(self, ring: int) -> None:
        """Put what is stored into a ring of this length on the device."""
        kept = [(max(int(written) - min(self._ring, ring), 0), int(written)) for written in self._written]
        self.frames = self.frames.moved(ring, kept, self.device)
        digests = np.zeros((self.n_envs, ring), np.int64)
        for env, (first, last) in enumerate(kept):
            serials = np.arange(first, last)
            digests[env, serials % ring] = self.digests[env, serials % self._ring]
        self.digests, self._ring = digests, ring

    @property
    def _extent(self) -> tuple[tuple[int, int], tuple[tuple[int, int], ...]]:
        """Numbers of the stored steps, and of each environment's planes: the first, and one after the last."""
        planes = []
        for env, (tail, head, written) in enumerate(zip(self._tail, self._head, self._written, strict=True)):
            oldest = self.starts[env, tail % self.buffer_size, 0] if tail < head else written
            planes.append((int(oldest), int(written)))
        return (int(self._tail.min()), int(self._head[0])), tuple(planes)

    def _counters(self) -> dict[str, Any]:
        """Return counters, the newest observations and the sampler's generator."""
        return copy.deepcopy({**{name: getattr(self, name) for name in _COUNTERS}, "ring": self._ring, "rng": self.rng})

    def _load_counters(self, state: dict[str, Any]) -> None:
        """Continue from `_counters`, before `_load_part`. Raise an error for those of another buffer, or damage."""
        self.reset()
        head, tail, written = (np.asarray(state[name]) for name in ("_head", "_tail", "_written"))
        if not head.shape == tail.shape == written.shape == (self.n_envs,):
            raise ConfigError(f"the replay is of {counted(len(head), 'environment')}, got {self.n_envs}: give as many.")
        if (head - tail > self.buffer_size).any():
            raise ConfigError(f"the replay holds more transitions than buffer_size={self.buffer_size}: raise it.")
        if (tail < 0).any() or (tail > head).any():
            raise ValueError("the replay's counters contradict each other")
        ring = int(state["ring"])
        if ring != self._ring:
            needed = self._bytes(max(ring, 1))
            require_bytes(needed, self.buffer_size * self.n_envs, self._frame_shape, self._place)
            self._resize(max(ring, 1))
        for name in _COUNTERS:
            setattr(self, name, state[name])
        self.rng = state["rng"]

    def _part(self, steps: tuple[int, int], planes: tuple[tuple[int, int], ...]) -> dict[str, Array]:
        """Return arrays of steps, (n_envs, n, ...), and of planes, (sum of all environments, H, W), by name."""
        slots = np.arange(*steps) % self.buffer_size
        serials = [np.arange(*each) % self._ring for each in planes]
        return {
            **{name: getattr(self, name)[:, slots] for name in _STEPS},
            "frames": np.concatenate([self.frames.take(env, each) for env, each in enumerate(serials)]),
            "digests": np.concatenate([self.digests[env, each] for env, each in enumerate(serials)]),
        }

    def _load_part(self, part: Any, steps: tuple[int, int], planes: tuple[tuple[int, int], ...]) -> None:
        """Put back what `_part` returned for these steps and planes. Raise ValueError for another shape."""
        slots = np.arange(*steps) % self.buffer_size
        for name in _STEPS:
            stored, own = part[name], getattr(self, name)
            if stored.shape != (self.n_envs, len(slots), *own.shape[2:]) or stored.dtype != own.dtype:
                raise ValueError(f"replay {name} has the shape {stored.shape}, this agent's {own.shape}")
            own[:, slots] = stored
        frames, names, start = part["frames"], part["digests"], 0
        if frames.shape[1:] != self.frames.shape[2:] or frames.dtype != np.uint8 or len(frames) != len(names):
            raise ValueError(f"frames of the shape {frames.shape[1:]}, this agent's are {self.frames.shape[2:]}")
        for env, (first, last) in enumerate(planes):
            serials, stop = np.arange(first, last) % self._ring, start + last - first
            self.frames.put(env, serials, frames[start:stop])
            self.digests[env, serials] = names[start:stop]
            start = stop

    def __getstate__(self) -> dict[str, Any]:
        own = ("frames", "digests", "files", *_STEPS, *_COUNTERS)
        steps, planes = self._extent
        stored = {**self._counters(), "steps": steps, "planes": planes, **self._part(steps, planes)}
        return {name: value for name, value in self.__dict__.items() if name not in own} | {"stored": stored}

    def __setstate__(self, state: dict[str, Any]) -> None:
        stored = state.pop("stored")
        self.__dict__.update(state)
        if self._device.type == "cuda" and not torch.cuda.is_available():
            self._device = torch.device("cpu")
        self._allocate()
        self._load_counters(stored)
        self._load_part(stored, stored["steps"], stored["planes"])

    @property
    def device(self) -> torch.device:
        """The device of batches, and of frames with storage="device". SB3 sets it after loading."""
        return self._device

    @device.setter
    def device(self, device: torch.device) -> None:
        is_other = hasattr(self, "frames") and device != self._device
        self._device = device
        if is_other:
            self._resize(self._ring)


def require_device(device: Any) -> None:
    """Raise ConfigError for a device that PyTorch does not know."""
    try:
        get_device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device must be 'auto', 'cpu', 'cuda' or such, got {device!r}.") from error


def _ring(steps: int, planes: float, channels: int) -> int:
    """Return how many planes `steps` transitions of `planes` new ones need, with some for starts of episodes."""
    return max(int(planes * (steps + max(steps // _SLACK, 4))) + 4 * channels, 1)
