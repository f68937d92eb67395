"""Checkpoints for a bit-equal continuation, in one folder that is written atomically.

agent.zip (networks and optimizers, SB3's format), replay and state (generators, environments, counters) as .json and
.npz each, replay-<first>-<last step>.npz, and manifest.json (sizes and checksums). No code in any of them is run.
"""

import json
import os
import re
import shutil
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecEnv

from dipole.core.objectives.objective import Composite, Objective
from dipole.core.utils.errors import CheckpointError, ConfigError
from dipole.core.utils.files import disk_refusing, file_hash, remove_scratch, replacing
from dipole.core.utils.plain_values import decode, encode
from dipole.core.utils.received import read_json
from dipole.core.utils.seeding import rng_state, set_rng_state
from dipole.rl import saved_agent
from dipole.rl.algorithms import open_agent
from dipole.rl.arguments import check_integers
from dipole.rl.callbacks.contrastive import learned_states
from dipole.rl.envs.running import faults
from dipole.rl.envs.running.validate import rows_of, validate
from dipole.rl.envs.running.workers import WorkerVecEnv
from dipole.rl.pixel_agent import PixelAgent
from dipole.rl.replay import FrameReplayBuffer

KEEP = 2
_FORMAT = 5
_PARTS = ("agent.zip", "replay.json", "replay.npz", "state.json", "state.npz")
_NAME = re.compile(r"agent-\d{9,}")
_REPLAY = re.compile(r"replay-\d+-\d+\.npz")
_COUNTERS = (
    *saved_agent.COUNTERS, "faults", "ep_info_buffer", "ep_success_buffer", "_last_episode_starts", "_total_timesteps",
)  # fmt: skip
Segment = dict[str, Any]
"""A file as the manifest has it: its name, bytes and sha256, and the steps and planes of each environment in it, from
the first to before the last."""


def save(agent: PixelAgent, folder: str | Path) -> Path:
    """Write the agent, its replay and the state of its environments and generators into a folder, atomically.

    Call it between rollouts (`CheckpointCallback` does): inside `on_step` SB3 has not stored the transition yet.

    Args:
        agent: what is saved.
        folder: where to. An existing one is replaced.

    Returns:
        The folder.

    Raises:
        CheckpointError: the disk refused, or an environment's `get_state` returns objects that cannot be saved. An
            existing folder stays untouched.
    """
    folder = Path(folder)
    with disk_refusing(f"cannot save the checkpoint {folder}", CheckpointError), replacing(folder) as temporary:
        temporary.mkdir()
        agent.save(temporary / "agent.zip")
        write_plain(temporary, "replay", agent.replay_buffer._counters())
        write_plain(temporary, "state", _state(agent))
        sizes = {name: (temporary / name).stat().st_size for name in _PARTS}
        written = write_replay(temporary, agent.replay_buffer)
        told = {"format": _FORMAT, "bytes": sizes, "replay": written}
        (temporary / "manifest.json").write_text(json.dumps(told))
    agent.replay_buffer.files = folder, written
    return folder


def resume(
    folder: str | Path,
    env: Any,
    device: str = "auto",
    cls: type[PixelAgent] | None = None,
    objective: Objective | Composite | None = None,
    **given: Any,
) -> PixelAgent:
    """Return an agent that continues as if it had never stopped: `agent.learn(rest, reset_num_timesteps=False)`.

        >>> agent = ContrastiveSAC("CnnPolicy", DotEnv(), preset="small", buffer_size=50, learning_starts=50)
        >>> agent = agent.learn(25, callback=CheckpointCallback(folder, every=20))
        >>> agent = resume(f"{folder}/agent-000000020", DotEnv()).learn(5, reset_num_timesteps=False)

    Args:
        folder: what `save` wrote.
        env: environments made like those of the first run: a gymnasium.Env, a VecEnv, or a task's name. An
            environment without get_state and set_state starts a new episode, with a warning. Training then continues,
            but not bit for bit.
        device: where to continue: "auto", "cpu", "cuda", ...
        cls: the agent's class, if you wrote it.
        objective: of an agent whose terms are not registered, as `ContrastiveSAC.load` takes it.
        given: keywords of the agent that no file can hold: a function as augmentation or learning_rate, action_noise,
            replay_buffer_class and its keywords, tensorboard_log. Changed settings. `seed` begins other draws in place
            of continuing those of the checkpoint (environments continue with theirs).

    Raises:
        CheckpointError: the folder is missing, incomplete or unreadable, or of another version.
        ConfigError: a keyword is needed that was not given, or the environments do not fit the agent.
        TrainingError: replay cannot fit into memory.
    """
    check(Path(folder))
    agent: PixelAgent = open_agent(Path(folder, "agent.zip"), cls, validate(env), device, objective, **given)
    restore(agent, folder)
    if given.get("seed") is not None:
        agent.set_random_seed(agent.seed)
    return agent


def restore(agent: PixelAgent, folder: str | Path) -> None:
    """Put a checkpoint back into an agent of the same settings, in place."""
    folder = Path(folder)
    manifest = check(folder)
    with saved_agent.readable(f"the checkpoint {folder} cannot be read"):
        saved_agent.load_weights(agent, folder / "agent.zip")
        agent.replay_buffer._load_counters(read_plain(folder, "replay"))
        read_replay(folder, agent.replay_buffer, manifest["replay"])
        state = read_plain(folder, "state")
        for name, value in [*state["counters"].items(), *(state.get("contrastive") or {}).items()]:
            setattr(agent, name, value)
        agent._last_obs, agent._last_original_obs = state["last_obs"], state["last_original_obs"]
        agent.action_space.np_random.bit_generator.state = state["action_space"]
        agent.action_noise = faults.set_noise_state(agent.action_noise, state.get("action_noise"))
        if agent.env is not None:
            _restore_environments(agent, agent.env, state)
        set_rng_state(state["rng"])


def check(folder: Path) -> dict[str, Any]:
    """Return the manifest. Raise CheckpointError unless every part is there at its full size."""
    try:
        manifest: dict[str, Any] = read_json(folder / "manifest.json")
        known, sizes = manifest["format"], dict(manifest["bytes"])
        if known == _FORMAT:
            sizes |= {str(each["file"]): int(each["bytes"]) for each in manifest["replay"]}
            if not all(name in _PARTS or _REPLAY.fullmatch(name) for name in sizes):
                raise ValueError(f"it names other files than those of a checkpoint: {', '.join(sizes)}")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        newest = "".join(f" The newest one in it is {each}." for each in checkpoints(folder)[-1:])
        raise CheckpointError(
            f"{folder} is no checkpoint of an agent: its manifest.json is missing or damaged.{newest}"
        ) from error
    if known != _FORMAT:
        raise CheckpointError(
            f"the checkpoint {folder} was written by another version of dipole (format {known}, this one reads "
            f"{_FORMAT}). Finish the run with that version, or begin again (dipole train --resume never)."
        )
    for name, size in (dict.fromkeys(_PARTS) | sizes).items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else 0
        if found != size:
            raise CheckpointError(
                f"the checkpoint {folder} is incomplete: {name} has {found} of {size} bytes. Use another one."
            )
    return manifest


def write_replay(folder: Path, buffer: FrameReplayBuffer) -> list[Segment]:
    """Write a replay into a folder. Return its files, for `buffer.files` once the folder is in its place.

    Each file is written once, and later checkpoints have hard links to it (or copies): either folder can be removed.
    Overwritten parts of the ring are not linked any more.
    """
    (first, last), planes = buffer._extent
    source, written = buffer.files
    kept = []
    for each in written:
        newer = (last > least for (_, last), (least, _) in zip(each["planes"], planes, strict=True))
        if each["steps"][1] > first or any(newer):
            kept.append(each)
    places = [source / each["file"] for each in kept]
    sizes = [path.stat().st_size if path.is_file() else -1 for path in places]
    if sizes != [each["bytes"] for each in kept] or (kept and kept[0]["steps"][0] > first):
        kept = []  # a file was removed or changed: write everything again
    for each in kept:
        try:
            os.link(source / each["file"], folder / each["file"])
        except OSError:
            shutil.copyfile(source / each["file"], folder / each["file"])
    start = first
    if kept:
        start = kept[-1]["steps"][1]
        planes = tuple((done, end) for (_, done), (_, end) in zip(kept[-1]["planes"], planes, strict=True))
    if start < last or any(begin < end for begin, end in planes):
        path = folder / f"replay-{start:09d}-{last:09d}.npz"
        arrays: dict[str, Any] = buffer._part((start, last), planes)
        np.savez(path, **arrays)
        new = {"file": path.name, "bytes": path.stat().st_size, "sha256": file_hash(path)}
        kept.append({**new, "steps": (start, last), "planes": planes})
    return kept


def read_replay(folder: Path, buffer: FrameReplayBuffer, told: list[Segment]) -> None:
    """Put the files of a manifest into a replay after `_load_counters`. Raise CheckpointError for a damaged file."""
    for one, two in pairwise(told):
        if one["steps"][1] != two["steps"][0]:
            raise ValueError(f"{one['file']} and {two['file']} do not follow each other")
    for each in told:
        if file_hash(folder / each["file"]) != each["sha256"]:
            raise CheckpointError(
                f"the checkpoint {folder} is damaged: the content of {each['file']} does not match its checksum. Use "
                "another one."
            )
        with np.load(folder / each["file"], allow_pickle=False) as arrays:
            buffer._load_part(arrays, each["steps"], each["planes"])
    buffer.files = folder, told


def write_plain(folder: Path, name: str, value: Any) -> None:
    """Write nested Python values as NAME.json, their arrays as NAME.npz. Raise CheckpointError for others."""
    arrays: list[np.ndarray] = []

    def keep(array: Any) -> int:
        if isinstance(array, torch.Tensor):
            array = array.cpu().numpy()
        arrays.append(array)
        return len(arrays) - 1

    (folder / f"{name}.json").write_text(json.dumps(encode(value, keep, name)), encoding="utf-8")
    np.savez(folder / f"{name}.npz", **{str(index): array for index, array in enumerate(arrays)})  # type: ignore[arg-type]


def read_plain(folder: Path, name: str) -> Any:
    """Read what `write_plain` wrote. A damaged file raises Python's own errors."""
    told = read_json(folder / f"{name}.json")
    with np.load(folder / f"{name}.npz", allow_pickle=False) as arrays:
        return decode(told, arrays)


def named(folder: Path, name: Any) -> Path:
    """Return the checkpoint of a name in a folder. Raise CheckpointError for any other, or one that leads elsewhere."""
    path = folder / str(name)
    if not isinstance(name, str) or not _NAME.fullmatch(name) or path.is_symlink():
        raise CheckpointError(f"{name!r} is no checkpoint of an agent in {folder}: its name is agent-<agent steps>.")
    return path


def _state(agent: PixelAgent) -> dict[str, Any]:
    assert agent.env is not None
    innermost = agent.env.unwrapped
    return {
        "counters": {name: getattr(agent, name) for name in _COUNTERS},
        "last_obs": agent._last_obs,
        "last_original_obs": agent._last_original_obs,
        "action_space": agent.action_space.np_random.bit_generator.state,
        "environments": agent.env.env_method("get_state") if agent.env.has_attr("wrapper_names") else None,
        "vector": faults.wrappers_state(agent.env),
        "workers": innermost.counters() if isinstance(innermost, WorkerVecEnv) else None,
        "contrastive": learned_states(agent),
        "action_noise": faults.noise_state(agent.action_noise),
        "rng": agent.before_noise or rng_state(),
    }


def _restore_environments(agent: PixelAgent, env: VecEnv, state: dict[str, Any]) -> None:
    # Seeds set while loading would otherwise be used by the next reset.
    env._reset_seeds()
    states = state["environments"]
    faults.require_saved(state["vector"], faults.wrapper_names(env))
    faults.wrappers_set_state(env, state["vector"])
    restored = states is not None and len(states) == env.num_envs and env.has_attr("wrapper_names")
    if restored:
        for index, each in enumerate(states):
            faults.require_saved(each["wrappers"], env.env_method("wrapper_names", indices=index)[0])
        taken = [env.env_method("set_state", each, indices=index)[0] for index, each in enumerate(states)]
        restored = all(taken)
    if not restored:
        warnings.warn(
            "the environments cannot take their state back (no get_state / set_state, or a VecEnv of another kind than "
            "DummyVecEnv and WorkerVecEnv): a new episode starts, so the continuation is not bit for bit the same.",
            RuntimeWarning,
            stacklevel=4,
        )
        agent._last_obs = None
        return
    workers = env.unwrapped
    if isinstance(workers, WorkerVecEnv):
        workers._continue_from(rows_of(state["last_obs"]), state.get("workers"))


def checkpoints(folder: str | Path) -> list[Path]:
    """The checkpoints that `CheckpointCallback` wrote into a folder, oldest first."""
    return sorted(path for path in Path(folder).glob("agent-*") if path.is_dir())


def save_newest(agent: PixelAgent, folder: Path) -> Path:
    """Save an agent as `folder/agent-<agent steps>`, and remove all checkpoints there but the newest two."""
    found = save(agent, folder / f"agent-{agent.num_timesteps:09d}")
    for old in checkpoints(folder)[:-KEEP]:
        shutil.rmtree(old, ignore_errors=True)
    return found


class CheckpointCallback(BaseCallback):
    """Saves a folder every `every` agent steps, between rollouts, and keeps the newest two.

    The folder is named after the agent's steps, in nine digits: `folder/agent-000010000`. Unfinished
    files of a killed process are removed when training begins.

        >>> agent = ContrastiveSAC("CnnPolicy", DotEnv(), preset="small", buffer_size=50, learning_starts=50)
        >>> agent = agent.learn(25, callback=CheckpointCallback(folder, every=20))

    Args:
        folder: where to. It is created.
        every: agent steps between checkpoints, >= 1.

    Raises:
        ConfigError: `every` is no whole number >= 1.
        CheckpointError: from training, a checkpoint cannot be written.
    """

    def __init__(self, folder: str | Path, every: int = 10_000) -> None:
        super().__init__()
        check_integers(every=every)
        self.folder, self.every = Path(folder), every

    def _init_callback(self) -> None:
        if not isinstance(self.model, PixelAgent):
            raise ConfigError(f"CheckpointCallback saves agents of dipole, not {type(self.model).__name__}: use SB3's.")

    def _on_training_start(self) -> None:
        self._saved = self.num_timesteps // self.every
        remove_scratch(self.folder, "agent-*")

    def _on_rollout_start(self) -> None:
        agent: Any = self.model
        if agent.num_timesteps // self.every > self._saved:
            self._saved = agent.num_timesteps // self.every
            save_newest(agent, self.folder)

    def _on_step(self) -> bool:
        return True
