"""Experience replay that stores every frame once.

An observation is C indices into one ring of single channels, so that a transition costs what is new in its next
observation instead of the 2 C channels that storing observation and next observation takes: 100,000 transitions of
9x100x100 fit in about 3.1 GB instead of 18.
"""

import copy
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.buffers import BaseBuffer, ReplayBuffer
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from stable_baselines3.common.vec_env import VecNormalize
from torch import Tensor

from dipole.core.utils.errors import ConfigError, TrainingError
from dipole.core.utils.text import counted
from dipole.core.utils.transfer import to_device
from dipole.rl.arguments import check_number, check_seed, check_whole
from dipole.rl.augmentation import Augmentation
from dipole.rl.frames import STORES, digest
from dipole.rl.memory import available_bytes, gigabytes, has_room_for, require_bytes
from dipole.rl.seen import layout
from dipole.rl.settings import Storage

if TYPE_CHECKING:
    from dipole.rl.segments import Segment

# Room for the first frame of each episode; where episodes are shorter than 50 steps the ring grows.
_SLACK = 50
# A channel that was seen among so many observations' worth of new ones before is known again.
_MEMORY = 32
_STEPS = ("actions", "rewards", "dones", "ends", "valid", "stacks", "oldest_frame")  # (n_envs, steps, ...)
_PLACES = ("_head", "_tail", "_written", "_newest", "pos", "full")


@dataclass(frozen=True)
class FrameBatch:
    """Transitions drawn for one update, their images augmented.

    Args:
        observations: (B, C, h, w) uint8; float32 of "bilinear" views.
        next_observations: (B, C, h, w) likewise.
        positives: (B, K, C, h, w), K further views of the observations; None for K = 0.
        actions: (B, A) float.
        rewards: (B, 1) float.
        dones: (B, 1) float, without time limits.
        stacks: (B, C) digests of the observation's channels; equal rows are exact duplicates, pixel for pixel.
        discounts: (B, 1) of the value of the next observation, where returns are of several steps; else None.
        states: (B, S) vectors of the observations beside their images, where they have such; else None.
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


class FrameReplayBuffer(ReplayBuffer):
    """Replay for stacked pixel observations; takes the place of SB3's ReplayBuffer (`replay_buffer_class=`).

    Any stacking is stored exactly: channels are recognised by their pixels, so grey or coloured frames, a repeated
    first frame, a zero-padded one (VecFrameStack), frames with a stride or no overlap at all need no declaration. A
    time limit (`TimeLimit.truncated`) is not a termination. A step that a fault ended (`info["fault"]`), or whose
    reward or action is not finite, is never sampled.

    Args:
        buffer_size: transitions over all environments, >= 1, rounded up to a multiple of `n_envs`. Where the stream
            needs more new channels for each than `frame_stack` says, the ring grows; where memory does not suffice for
            that, a warning says how many fit.
        observation_space: a Box (C, H, W) of uint8, vectors (another Box), or a Dict of one such image and vectors,
            which are stored beside it for every step.
        action_space: of the agent.
        device: where batches go, and frames of storage="device": "auto", "cpu", "cuda", ...
        n_envs: environments, >= 1.
        optimize_memory_usage: has no effect: every frame is stored once.
        handle_timeout_termination: False counts a time limit (`TimeLimit.truncated`) as a termination.
        frame_stack: frames in an observation, >= 1, of which each step is expected to bring one; by default C / 3 where
            C is a multiple of 3, otherwise C.
        storage: "host"; "device" to keep the frames on the training device; "disk" for more than memory holds, in a
            file of the temporary folder (TMPDIR); "auto": on the device, if that is a GPU whose free memory is twice
            what they need, else on the host.
        seed: of the sampler, from 0 to 2**32 - 1; drawn from NumPy's global generator (which SB3 seeds) if left out.
        n_steps: rewards in a return, >= 1; as SB3's NStepReplayBuffer, returns end where an episode does.
        gamma: discount of the rewards in a return, in [0, 1].

    Raises:
        TrainingError: if the frames cannot fit into memory, with the bytes, before anything is allocated.
        ConfigError: for observations that are no uint8 images or vectors, a stack that does not divide the channels,
            another word for `storage`, or a number out of range.
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
        check_whole(buffer_size=buffer_size, n_envs=n_envs, n_steps=n_steps)
        if frame_stack is not None:
            check_whole(frame_stack=frame_stack)
        seed = check_seed(seed)
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
        self.frame_stack = frame_stack or max(channels // 3 if channels % 3 == 0 else channels, 1)
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
            storage = "device" if has_room_for(needed, self.device) else "host"
        self.storage = storage
        require_bytes(needed, self.buffer_size * n_envs, self._frame_shape, self._place)
        self._allocate()
        self.reset()
        self.rng = np.random.default_rng(np.random.randint(2**31) if seed is None else seed)

    def _allocate(self) -> None:
        channels, height, width = self.layout.shape
        self.frames = STORES[self.storage]((self.n_envs, self._ring, height, width), self.device)
        size = (self.n_envs, self.buffer_size)
        self.actions = np.zeros((*size, self.action_dim), np.float32)
        self.rewards = np.zeros(size, np.float32)
        self.dones = np.zeros(size, np.float32)
        self.ends = np.zeros(size, bool)
        self.valid = np.zeros(size, bool)
        self.stacks = np.zeros((*size, 2, channels), np.int64)  # serial numbers of observation and next observation
        self.oldest_frame = np.zeros(size, np.int64)  # no serial number of a transition is below it
        self.digests = np.zeros((self.n_envs, self._ring), np.int64)
        self.states = np.zeros((*size, 2, self.layout.width), np.float32)  # of observation and next observation

    @property
    def _per_step(self) -> tuple[str, ...]:
        """The arrays that have an entry for each step."""
        return (*_STEPS, "states") if self.layout.width else _STEPS

    @property
    def _place(self) -> torch.device | Path:
        if self.storage == "disk":
            return Path(tempfile.gettempdir())
        return self.device if self.storage == "device" else torch.device("cpu")

    @staticmethod
    def bytes_needed(steps: int, n_envs: int, frame: tuple[int, ...], frame_stack: int, action_dim: int) -> int:
        """Bytes of a full buffer, of which each step brings one new frame.

        An episode's first observation is one frame more; episodes of 50 steps or longer are reckoned with.

        Args:
            steps: for each environment, >= 1.
            n_envs: environments, >= 1.
            frame: (c, H, W) of a new frame.
            frame_stack: frames in an observation, >= 1.
            action_dim: numbers of an action.
        """
        channels = frame[0] * frame_stack
        return _bytes(steps, n_envs, _ring(steps, frame[0], channels), frame[1:], channels, action_dim)

    @property
    def nbytes(self) -> int:
        """Bytes of this buffer when full."""
        channels, *size = self.layout.shape
        images = _bytes(self.buffer_size, self.n_envs, self._ring, tuple(size), channels, self.action_dim)
        return images + self.n_envs * self.buffer_size * 8 * self.layout.width

    @property
    def capacity(self) -> int:
        """Transitions that it can hold; fewer than `buffer_size` asks for only where memory ended (with a warning)."""
        if self._room is None:
            return self.buffer_size * self.n_envs
        return self._room

    def reset(self) -> None:
        """Forget every transition; the sampler goes on."""
        super().reset()
        self._head = np.zeros(self.n_envs, np.int64)  # transitions ever added
        self._tail = np.zeros(self.n_envs, np.int64)  # the oldest that is still whole
        self._written = np.zeros(self.n_envs, np.int64)  # planes ever stored
        self._newest: list[tuple[NDArray[np.uint8], list[int]] | None] = [None] * self.n_envs
        self._recent: list[dict[int, int]] = [{} for _ in range(self.n_envs)]  # digest -> serial number
        self._room: int | None = None
        # Where what is stored lies on a disk already, for the next checkpoint.
        self.segments: tuple[Segment, ...] = ()

    def size(self) -> int:
        """Steps stored (of the fullest environment), as SB3 counts."""
        return int((self._head - self._tail).max())

    def __len__(self) -> int:
        """Transitions stored, over all environments."""
        return int((self._head - self._tail).sum())

    def add(
        self,
        obs: Any,
        next_obs: Any,
        action: NDArray[Any],
        reward: NDArray[Any],
        done: NDArray[Any],
        infos: list[dict[str, Any]],
    ) -> None:
        """Store one step of every environment.

        Args:
            obs: (n_envs, C, H, W) uint8, or a dictionary of such and vectors (n_envs, S).
            next_obs: (n_envs, C, H, W) likewise.
            action: (n_envs, A).
            reward: (n_envs,).
            done: (n_envs,).
            infos: of each environment; `TimeLimit.truncated` and `fault` count.
        """
        action = np.asarray(action).reshape(self.n_envs, self.action_dim)
        if self.layout.width:
            self._put_states(obs, next_obs)
        obs, next_obs = self.layout.pixels(obs), self.layout.pixels(next_obs)
        for env, info in enumerate(infos):
            timeout = self.handle_timeout_termination and info.get("TimeLimit.truncated", False)
            self._append(
                env, np.asarray(obs[env]), np.asarray(next_obs[env]), action[env], float(reward[env]),
                bool(done[env]) and not timeout, bool(done[env]), "fault" not in info,
            )  # fmt: skip
        if self._head[0] == max(self.buffer_size // 100, _MEMORY):
            self._grow()  # while there is little to move
        self._count()

    def _put_states(self, obs: Any, next_obs: Any) -> None:
        """Store the vectors of the step that `_append` is about to store."""
        both = np.stack([self.layout.state(obs), self.layout.state(next_obs)], 1)  # (n_envs, 2, S)
        self.states[np.arange(self.n_envs), self._head % self.buffer_size] = both

    def _append(
        self,
        env: int,
        obs: NDArray[np.uint8],
        following: NDArray[np.uint8],
        action: NDArray[Any],
        reward: float,
        done: bool,
        ends: bool,
        valid: bool,
    ) -> None:
        oldest = max(int(self._written[env]) - self._window, 0)
        before = self._serials(env, obs)
        after = self._serials(env, following)
        self._newest[env] = (following.copy(), after)
        self._tail[env] = max(self._tail[env], self._head[env] - self.buffer_size + 1)
        slot = self._head[env] % self.buffer_size
        finite = bool(np.isfinite(reward) and np.isfinite(action).all() and np.isfinite(self.states[env, slot]).all())
        self.stacks[env, slot] = before, after
        self.oldest_frame[env, slot] = oldest
        self.actions[env, slot] = action if finite else 0.0
        self.rewards[env, slot] = reward if finite else 0.0
        self.dones[env, slot], self.ends[env, slot], self.valid[env, slot] = done, ends, valid and finite
        self._head[env] += 1

    def _count(self) -> None:
        self.pos = int(self._head[0] % self.buffer_size)
        self.full = bool((self._head - self._tail >= self.buffer_size).all())

    @property
    def _window(self) -> int:
        """So many planes back one is known again."""
        return _MEMORY * self.layout.shape[0]

    def _serials(self, env: int, obs: NDArray[np.uint8]) -> list[int]:
        """Serial numbers of an observation's channels: of planes that were seen lately, or new ones."""
        newest = self._newest[env]
        if newest is not None and np.array_equal(obs, newest[0]):
            return newest[1]
        recent = self._recent[env]
        serials = self._moved_on(env, obs)
        for plane in obs[len(serials) :]:
            name = digest(plane)
            known = recent.get(name, -1)
            if known < 0 or known < self._written[env] - self._window:
                known = recent[name] = self._write(env, plane, name)
            serials.append(known)
        if len(recent) > 4 * self._window:
            least = self._written[env] - self._window
            self._recent[env] = {name: serial for name, serial in recent.items() if serial >= least}
        return serials

    def _moved_on(self, env: int, obs: NDArray[np.uint8]) -> list[int]:
        """Serial numbers of the leading channels of a stack that has moved on by a frame: comparing is cheaper."""
        newest, new = self._newest[env], self._frame_shape[0]
        if newest is None or not np.array_equal(obs[:-new], newest[0][new:]):
            return []
        known = newest[1][new:]
        return known if min(known, default=0) >= self._written[env] - self._window else []

    def _write(self, env: int, plane: NDArray[np.uint8], name: int) -> int:
        serial = int(self._written[env])
        if self._head[env] - self._tail[env] < self.buffer_size and self._loses(env, serial):
            self._grow(int(1.25 * self._ring))
        self.frames.put(env, serial % self._ring, plane)
        self.digests[env, serial % self._ring] = name
        self._written[env] += 1
        # Transitions that used the plane just overwritten are whole no more.
        while self._loses(env, serial):
            self._tail[env] += 1
        return serial

    def _loses(self, env: int, serial: int) -> bool:
        """Whether writing the plane of this number overwrites one of the oldest transition."""
        tail = self._tail[env]
        return bool(tail < self._head[env] and self.oldest_frame[env, tail % self.buffer_size] <= serial - self._ring)

    def _grow(self, least: int = 0) -> None:
        """Make the ring long enough for the planes that a transition of this stream brings, if memory allows."""
        if self._room is not None:
            return
        channels = self.layout.shape[0]
        rate = float((self._written / np.maximum(self._head, 1)).max())  # planes for each transition
        ring = max(least, min(_ring(self.buffer_size, rate, channels), _ring(self.buffer_size, 2 * channels, channels)))
        if ring <= 1.05 * self._ring:
            return
        needed, free = self.n_envs * ring * int(np.prod(self.frames.shape[2:])), available_bytes(self._place)
        if needed > free:
            self._room = max(int((self._ring - self._window) / rate), 1) * self.n_envs
            warnings.warn(
                f"replay holds about {self._room:,} transitions instead of {self.buffer_size * self.n_envs:,}: each "
                f"brings {rate:.3g} new channels of its {channels}, so that all of them would need "
                f"{gigabytes(needed)}, and {gigabytes(free)} are free. Lower buffer_size, or free memory.",
                RuntimeWarning,
                stacklevel=4,
            )
            return
        self._resize(ring)

    def _resize(self, ring: int) -> None:
        """Put what is stored into a ring of another length."""
        kept = self._kept(ring)
        self.frames = self.frames.moved(ring, kept, self.device)
        digests = np.zeros((self.n_envs, ring), np.int64)
        for env, (first, last) in enumerate(kept):
            serials = np.arange(first, last)
            digests[env, serials % ring] = self.digests[env, serials % self._ring]
        self.digests, self._ring = digests, ring

    # Drawing ---------------------------------------------------------------------------------------------------------

    def draw(self, batch_size: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Draw transitions uniformly, with replacement.

        Args:
            batch_size: B >= 1.

        Returns:
            Environment (B,) and slot (B,) of each.

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
        self, env: NDArray[Any], slot: NDArray[Any], normalizer: VecNormalize | None
    ) -> tuple[NDArray[Any], NDArray[Any], Tensor | None]:
        """Rewards (B, 1), the slot (B,) of the step that each return ends with, and the discount of what follows.

        R = sum_{j < m} gamma^j r_{t+j}, discount gamma^m; m <= n_steps ends with the episode, the newest step, or
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
        return (
            (rewards * powers * taken).sum(1, keepdims=True).astype(np.float32),
            path[np.arange(len(slot)), count - 1],
            self._tensor((self.gamma ** count[:, None]).astype(np.float32)),
        )

    def sample(self, batch_size: int, env: VecNormalize | None = None) -> ReplayBufferSamples:
        """Draw transitions with whole observations, as SB3's own algorithms expect them.

        Args:
            batch_size: B >= 1.
            env: normalises rewards and vectors, if given.

        Returns:
            observations and next_observations (B, C, H, W) uint8, actions (B, A), rewards and dones (B, 1) float32,
            discounts (B, 1), None for n_steps = 1.

        Raises:
            TrainingError: as `draw`.
        """
        which, slot = self.draw(batch_size)
        rewards, last, discounts = self._outcomes(which, slot, env)
        states, following = self._drawn_states(which, slot, last, env)
        return ReplayBufferSamples(
            self.layout.observation(self.frames.stacks(which, self.stacks[which, slot, 0] % self._ring), states),
            self._tensor(self.actions[which, slot]),
            self.layout.observation(self.frames.stacks(which, self.stacks[which, last, 1] % self._ring), following),
            self._tensor(self.dones[which, last][:, None]),
            self._tensor(rewards),
            discounts,
        )

    def sample_views(
        self,
        batch_size: int,
        augmentation: Augmentation,
        positives: int = 1,
        env: VecNormalize | None = None,
        times: tuple[int, int] = (1, 1),
    ) -> FrameBatch:
        """Draw transitions with augmented observations and further views of each.

        Offsets are drawn in the order observation, next observation, positives.

        Args:
            batch_size: B >= 1.
            augmentation: draws a view of each stack.
            positives: K >= 0 further views of each observation.
            env: as in `sample`.
            times: M and N >= 1 views of each observation and next observation, one after the other: (M B, C, h, w), (N
                B, C, h, w).

        Returns:
            The batch; its `positives` are (B, K, C, h, w), None for K = 0.

        Raises:
            TrainingError: as `draw`.
        """
        which, slot = self.draw(batch_size)
        rewards, last, discounts = self._outcomes(which, slot, env)
        before, after = self.stacks[which, slot, 0] % self._ring, self.stacks[which, last, 1] % self._ring
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

    def _drawn_states(
        self, env: NDArray[Any], slot: NDArray[Any], last: NDArray[Any], normalizer: VecNormalize | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Vectors (B, S) of observations and of those that returns end with; None where there are none."""
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

    # Saving ----------------------------------------------------------------------------------------------------------

    @property
    def extent(self) -> tuple[tuple[int, int], tuple[tuple[int, int], ...]]:
        """Numbers of the steps, and for each environment of the planes, that are there: first and one after the last.

        Planes that nothing shows any more but that may be recognised are there.
        """
        planes = []
        for env, (tail, head, written) in enumerate(zip(self._tail, self._head, self._written, strict=True)):
            oldest = self.oldest_frame[env, tail % self.buffer_size] if tail < head else written
            planes.append((int(max(min(oldest, written - self._window), written - self._ring, 0)), int(written)))
        return (int(self._tail.min()), int(self._head[0])), tuple(planes)

    def places(self) -> dict[str, Any]:
        """What is known of the whole: counters, the newest observations and the sampler's generator."""
        return copy.deepcopy({**{name: getattr(self, name) for name in _PLACES}, "ring": self._ring, "rng": self.rng})

    def load_places(self, state: dict[str, Any]) -> None:
        """Begin to continue from what `places` returned; `load_part` brings the rest.

        Args:
            state: what `places` returned.

        Raises:
            ValueError: the state is of another buffer.
            KeyError: the state lacks something.
            TrainingError: memory is too small for it.
        """
        self.reset()
        head, tail, written = (np.asarray(state[name]) for name in ("_head", "_tail", "_written"))
        if not head.shape == tail.shape == written.shape == (self.n_envs,):
            raise ValueError(f"the replay of {counted(len(head), 'environment')} does not fit {self.n_envs}")
        if (tail < 0).any() or (tail > head).any() or (head - tail > self.buffer_size).any():
            raise ValueError("the replay's counters contradict each other")
        ring = int(state["ring"])
        if ring != self._ring:
            channels, *size = self.layout.shape
            steps = self.buffer_size
            needed = _bytes(steps, self.n_envs, max(ring, 1), tuple(size), channels, self.action_dim)
            require_bytes(needed, steps * self.n_envs, self._frame_shape, self._place)
            self._resize(max(ring, 1))
        for name in _PLACES:
            setattr(self, name, state[name])
        self.rng = state["rng"]

    def part(self, steps: tuple[int, int], planes: tuple[tuple[int, int], ...]) -> dict[str, NDArray[Any]]:
        """Arrays of steps, (n_envs, n, ...), and of planes, (sum of all environments, H, W), by name.

        Args:
            steps: number of the first and one after the last, as in `extent`.
            planes: the same for each environment.
        """
        slots = np.arange(*steps) % self.buffer_size
        serials = [np.arange(*each) % self._ring for each in planes]
        return {
            **{name: getattr(self, name)[:, slots] for name in self._per_step},
            "frames": np.concatenate([self.frames.take(env, each) for env, each in enumerate(serials)]),
            "digests": np.concatenate([self.digests[env, each] for env, each in enumerate(serials)]),
        }

    def load_part(self, part: Any, steps: tuple[int, int], planes: tuple[tuple[int, int], ...]) -> None:
        """Put back what `part` returned.

        Args:
            part: what `part` returned.
            steps: as in `part`.
            planes: as in `part`.

        Raises:
            ValueError: it is of a buffer of another shape.
        """
        slots = np.arange(*steps) % self.buffer_size
        for name in self._per_step:
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

    def settle(self) -> None:
        """Work out what follows from what was loaded; steps that are not finite are dropped, with a warning."""
        for env, written in enumerate(self._written):
            serials = range(max(int(written) - self._window, 0), int(written))
            self._recent[env] = {int(self.digests[env, serial % self._ring]): serial for serial in serials}
        bad = ~(np.isfinite(self.rewards) & np.isfinite(self.actions).all(-1))
        live = (
            [
                (env, number % self.buffer_size)
                for env, (tail, head) in enumerate(zip(self._tail, self._head, strict=True))
                for number in range(tail, head)
            ]
            if bad.any()
            else []
        )
        self._dropped(sum(bool(bad[each] and self.valid[each]) for each in live))
        self.rewards[bad], self.actions[bad], self.valid[bad] = 0.0, 0.0, False

    def _dropped(self, count: int) -> None:
        if count:
            warnings.warn(
                f"{count:,} of {len(self):,} transitions in this replay have a reward or an action that is not finite: "
                "they are dropped (never sampled).",
                RuntimeWarning,
                stacklevel=4,
            )

    def state_dict(self) -> dict[str, Any]:
        """What is stored, and the sampler's generator: arrays, numbers and lists."""
        steps, planes = self.extent
        return {**self.places(), "steps": steps, "planes": planes, **self.part(steps, planes)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned, in this version or in one that stored whole frames.

        Args:
            state: what `state_dict` returned.

        Raises:
            ValueError: the state is of a buffer of another shape.
            TrainingError: memory is too small for it.
        """
        if "planes" not in state:
            self._load_whole_frames(state)
            return
        self.load_places(state)
        self.load_part(state, state["steps"], state["planes"])
        self.settle()

    def _load_whole_frames(self, state: dict[str, Any]) -> None:
        """Take over the replay of an earlier version: frames (n_envs, F, c, H, W), and their slots as stacks."""
        self.reset()
        frames, stacks, size = state["frames"], state["stacks"], self.buffer_size
        shape = self.layout.shape
        found = (frames.shape[2] * stacks.shape[-1], *frames.shape[3:])
        if found != shape or len(frames) != self.n_envs or state["actions"].shape[1] > size:
            raise ValueError(
                f"the replay holds observations {found} of {counted(len(frames), 'environment')}, the agent's {shape}"
            )
        head, tail = state["_head"], state["_tail"]
        first, dropped = int(tail.min()), 0
        for number in range(first, int(head[0])):
            slot, following = number % size, (number + 1) % size
            for env in range(self.n_envs):
                before, after = (frames[env, stacks[env, slot, side]].reshape(shape) for side in (0, 1))
                done = bool(state["dones"][env, slot])
                ends = done or (number + 1 < head[0] and (stacks[env, slot, 1] != stacks[env, following, 0]).any())
                reward, action, valid = (state[name][env, slot] for name in ("rewards", "actions", "valid"))
                finite = np.isfinite(reward) and np.isfinite(action).all()
                dropped += int(valid and not finite and number >= tail[env])
                self._append(env, before, after, action, float(reward), done, bool(ends), bool(valid))
        self._tail = np.maximum(self._tail, tail - first)
        self._count()
        self.rng = state["rng"]
        self._dropped(dropped)

    def __getstate__(self) -> dict[str, Any]:
        own = ("frames", "digests", "segments", "_recent", "states", *_STEPS, *_PLACES)
        state = {name: value for name, value in self.__dict__.items() if name not in own}
        return state | {"stored": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        stored = state.pop("stored", None)
        if stored is None:  # of an earlier version
            stored = {name: state.pop(name) for name in (*_PLACES, "actions", "rewards", "dones", "valid", "stacks")}
            stored |= {"frames": state.pop("frames_used"), "rng": state.pop("rng")}
            state.pop("oldest_frame")
            state["_device"] = state.pop("device")
            channels = state["observation_space"].shape[0]
            state |= {"n_steps": 1, "gamma": 0.99, "_ring": _ring(state["buffer_size"], channels, channels)}
        self.__dict__.update({"layout": layout(state["observation_space"]), **state})
        if self._device.type == "cuda" and not torch.cuda.is_available():
            self._device = torch.device("cpu")
        self._allocate()
        self.load_state_dict(stored)

    @property
    def device(self) -> torch.device:
        """Where batches go, and where frames lie that are kept on the training device; SB3 sets it after loading."""
        return self._device

    @device.setter
    def device(self, device: torch.device) -> None:
        if hasattr(self, "frames") and device != self._device:
            self.frames = self.frames.moved(self._ring, self._kept(self._ring), device)
        self._device = device

    def _kept(self, ring: int) -> list[tuple[int, int]]:
        """Of each environment, the serial numbers of the planes that a ring of this length can take over."""
        return [(max(int(written) - min(self._ring, ring), 0), int(written)) for written in self._written]


def _ring(steps: int, planes: float, channels: int) -> int:
    """Planes that hold `steps` transitions, each of which brings so many new ones."""
    return max(int(planes * (steps + max(steps // _SLACK, 4))) + (_MEMORY + 4) * channels, 1)


def _bytes(steps: int, n_envs: int, ring: int, size: tuple[int, ...], channels: int, action_dim: int) -> int:
    plane = int(np.prod(size)) + 8
    return n_envs * (ring * plane + steps * (4 * action_dim + 4 + 4 + 1 + 1 + 16 * channels + 8))
