"""The description of an agent inside its zip: everything that builds it again, as JSON instead of SB3's pickles.

`ContrastiveSAC.load` reads a file as SB3 does, code in it included. `open_agent` reads the description and the weights
alone, so that a file from anywhere can be played and continued.
"""

import json
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.save_util import load_from_zip_file
from stable_baselines3.common.vec_env import VecNormalize

from dipole.core.utils.errors import CheckpointError, ConfigError, DipoleError, ReceivedError, SpecError
from dipole.rl.replay import FrameReplayBuffer
from dipole.rl.seen import parts

FILE = "dipole.json"  # inside the zip
_FORMAT = 1
_LARGEST = 10_000_000  # bytes of a description
COUNTERS = ("num_timesteps", "_episode_num", "_n_updates", "environment_steps", "_current_progress_remaining")


def describe(agent: Any) -> dict[str, Any]:
    """Return what `open_agent` makes the agent from."""
    settings = dict(agent.settings)
    augmentation = agent.augmentation
    given = {name: getattr(agent, name) for name in ("learning_rate", "augmentation", "action_noise")}
    if agent.replay_buffer_class is not FrameReplayBuffer or agent.replay_buffer_kwargs:
        given["replay_buffer_class"] = agent.replay_buffer_class
        given["replay_buffer_kwargs"] = agent.replay_buffer_kwargs
    # Our files never hold code.
    code = [name for name, value in given.items() if not isinstance(value, int | float | str | None)]
    if "learning_rate" in code:
        settings["learning_rate"] = None
    if "augmentation" in code:
        augmentation = None
    return {
        "format": _FORMAT,
        "settings": settings,
        "augmentation": augmentation,
        "storage": agent.storage,
        "stats_window_size": agent._stats_window_size,
        "seed": agent.seed,
        **told_spaces(agent),
        "normalizer": _statistics(agent.get_vec_normalize_env()),
        "counters": {name: getattr(agent, name) for name in COUNTERS},
        "own_terms": list(agent.own_terms),
        "code": code,
        "task": agent.task,
    }


def read(path: Any) -> dict[str, Any]:
    """Read the description in a zip. Raise CheckpointError if the file is missing, damaged, or holds none.

    An open file is put back to its beginning.
    """
    if isinstance(path, str | Path) and not Path(path).exists():
        path = Path(f"{str(path).removesuffix('.zip')}.zip")  # as SB3 finds it
    try:
        with zipfile.ZipFile(path) as archive:
            if FILE not in archive.namelist():
                raise CheckpointError(
                    f"{path} holds no description by dipole: it is of stable-baselines3 alone, whose class loads it "
                    "(SAC.load). `dipole export` writes agent.zip for dipole."
                )
            if archive.getinfo(FILE).file_size > _LARGEST:
                raise ValueError(f"{FILE} is too large")
            told = json.loads(archive.read(FILE))
        if not isinstance(told, dict) or told.get("format") != _FORMAT:
            raise ValueError(f"{FILE} is of another format")
        if not isinstance(path, str | Path):
            path.seek(0)
        return told
    except (OSError, ValueError, zipfile.BadZipFile, RecursionError, NotImplementedError) as error:
        raise CheckpointError(f"the agent {path} cannot be read: {error}") from error


def told_spaces(agent: Any) -> dict[str, Any]:
    """Describe the spaces of an agent, as `make_networks` reads them."""
    return {
        "n_envs": agent.n_envs,
        "observation_space": _described(agent.observation_space),
        "action_space": _described(agent.action_space),
    }


def make_networks(agent: Any, told: Mapping[str, Any]) -> None:
    """Make the networks of an agent that was made without an environment, for what `told_spaces` says."""
    agent.observation_space, agent.action_space = map(_space, (told["observation_space"], told["action_space"]))
    agent.n_envs = int(told["n_envs"])
    size, agent.buffer_size = agent.buffer_size, agent.n_envs  # the smallest replay, which no setting allows
    agent._setup_model()
    vars(agent)["buffer_size"] = size


def require_observed(agent: Any, told: Mapping[str, Any]) -> None:
    """Raise ConfigError for an agent whose environment shows other observations than those of the description."""
    if _described(agent.observation_space) != told["observation_space"]:
        seen, shown = _space(told["observation_space"]), agent.observation_space
        raise ConfigError(f"the agent has learned from {seen}, and this environment shows {shown}.")


def _statistics(env: VecNormalize | None) -> dict[str, Any] | None:
    """Return what VecNormalize has learned of observations."""
    if env is None or not env.norm_obs:
        return None
    moments = {key: [each.mean.tolist(), each.var.tolist()] for key, each in parts(env.obs_rms).items()}
    return {"moments": moments, "norm_obs_keys": env.norm_obs_keys, "clip_obs": env.clip_obs, "epsilon": env.epsilon}


def normalizer(told: Mapping[str, Any]) -> VecNormalize | None:
    """Return the VecNormalize of a description, for an agent that plays and has no environment."""
    given = told.get("normalizer")
    if given is None:
        return None
    learned = {key: RunningMeanStd() for key in given["moments"]}
    for key, moments in given["moments"].items():
        learned[key].mean, learned[key].var = map(np.asarray, moments)
    found = VecNormalize.__new__(VecNormalize)
    found.__setstate__({"norm_obs": True, "norm_reward": False, **given, "obs_rms": learned.get("", learned)})
    return found


def load_weights(agent: Any, path: str | Path) -> None:
    """Load the weights and optimizers of a zip into an agent with the same settings. Only tensors are read."""
    _, parameters, variables = load_from_zip_file(path, load_data=False, device=agent.device)
    agent.set_parameters(parameters, exact_match=True, device=agent.device)
    for name, value in (variables or {}).items():
        getattr(agent, name).data = value.data


@contextmanager
def readable(said: str, cure: str = "") -> Iterator[None]:
    """Raise CheckpointError for any error: a file may have anything at all in it. Our own errors stay."""
    try:
        yield
    except ReceivedError as error:
        raise CheckpointError(f"{said}: {error}{cure}") from error
    except DipoleError:
        raise
    except Exception as error:
        raise CheckpointError(f"{said}: {type(error).__name__}: {error}{cure}") from error


@contextmanager
def explained(path: Any, objective: Any) -> Iterator[None]:
    """Explain how to give the right objective if it is unknown or another one."""
    try:
        yield
    except SpecError as error:
        raise ConfigError(
            f"the objective of the agent {path} is not known here: {error}\nImport the module that registers it "
            "before loading, or give it: ContrastiveSAC.load(path, objective=...)."
        ) from error
    except CheckpointError as error:
        if objective is None or not isinstance(error.__cause__, RuntimeError):
            raise
        raise ConfigError(f"the agent {path} was saved with another objective than {objective}: {error}") from error


def unregistered_message(terms: Any) -> str:
    return (
        f"this agent was trained with an objective that is not registered ({', '.join(terms)}): give it when loading, "
        "ContrastiveSAC.load(path, objective=...)."
    )


def _described(space: Any) -> dict[str, Any]:
    if isinstance(space, spaces.Dict):
        return {"parts": {key: _described(each) for key, each in space.items()}}
    if isinstance(space, spaces.MultiBinary):
        return {"bits": list(space.shape)}
    if isinstance(space, spaces.Discrete):
        return {"n": int(space.n), "start": int(space.start)}
    # One number is enough for bounds that are the same everywhere, as for images.
    low, high = (
        side.flat[0].item() if (side == side.flat[0]).all() else side.tolist() for side in (space.low, space.high)
    )
    return {"low": low, "high": high, "shape": list(space.shape), "dtype": str(space.dtype)}


def _space(told: dict[str, Any]) -> spaces.Space[Any]:
    if "parts" in told:
        return spaces.Dict({key: _space(each) for key, each in told["parts"].items()})
    if "bits" in told:
        return spaces.MultiBinary(told["bits"])
    if "n" in told:
        return spaces.Discrete(int(told["n"]), start=int(told["start"]))
    dtype: Any = np.dtype(told["dtype"]).type
    shape = tuple(map(int, told["shape"]))
    low, high = (np.broadcast_to(np.asarray(told[side], dtype), shape) for side in ("low", "high"))
    return spaces.Box(low, high, shape, dtype)
