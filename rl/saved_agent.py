"""Settings of agents as attributes, and their files: SB3's zip, written atomically, with a description in JSON.

The description has everything that builds the agent again, without SB3's pickles. `ContrastiveSAC.load` reads a file as
SB3 does, code in it included. `open_agent` reads the description and the weights alone, so that a file from anywhere
can be played and continued.
"""

import json
import tempfile
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.noise import ActionNoise
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.save_util import load_from_pkl, load_from_zip_file
from stable_baselines3.common.type_aliases import TrainFreq
from stable_baselines3.common.vec_env import VecNormalize
from torch import nn

from dipole.core.objectives.objective import Composite, Objective
from dipole.core.utils.errors import CheckpointError, ConfigError, DipoleError, ReceivedError, SpecError
from dipole.core.utils.files import disk_refusing, replacing
from dipole.rl import settings as presets
from dipole.rl.arguments import check_integers, check_seed, plain
from dipole.rl.contrast import given_composite
from dipole.rl.inputs import shown_to
from dipole.rl.replay import FrameReplayBuffer, require_device
from dipole.rl.sb3_names import without_sb3_names
from dipole.rl.seen import parts

CLASSES = "Use ContrastiveSAC for 'sac' and ContrastiveDrQ for 'drq'."


class SavedAgent(OffPolicyAlgorithm):
    """An algorithm of SB3 that stores each setting in one attribute, and can change it when it is loaded."""

    algorithm: ClassVar[presets.AlgorithmName]
    # SB3's keywords that are passed on unchanged.
    passed_on: ClassVar[tuple[str, ...]] = (
        "action_noise", "replay_buffer_class", "replay_buffer_kwargs", "stats_window_size", "tensorboard_log",
        "verbose", "seed", "device",
    )  # fmt: skip

    if TYPE_CHECKING:

        def __getattr__(self, setting: str) -> Any:
            """Each setting is an attribute (`settings.attributes`)."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse to assign a setting out of range, or one that the networks were made with."""
        name = presets.attributes(self.algorithm).get(name, name)
        setting = presets.by_attribute(self.algorithm).get(name)
        has_networks = "policy" in vars(self)
        if setting is not None and has_networks and not isinstance(value, TrainFreq):
            value = plain(value)
            if value != vars(self)[name]:
                presets.require_changeable([setting])
                if setting in presets.WHEN_LOADED:
                    raise ConfigError(
                        f"{setting} cannot be assigned, the agent was made with {vars(self)[name]!r}. Save it and load "
                        f"it with this setting, load(path, {setting}=...)."
                    )
                presets.from_preset(self.preset, {**dict(self.settings), setting: value})
        super().__setattr__(name, value)
        if name == "train_freq" and has_networks:
            self._convert_train_freq()

    @property
    def settings(self) -> presets.AgentSettings:
        """All settings, read from the attributes that store them."""
        found = {name: getattr(self, each) for name, each in presets.attributes(self.algorithm).items()}
        if isinstance(self.train_freq, TrainFreq):
            frequency, unit = int(self.train_freq.frequency), self.train_freq.unit.value
            found["train_freq"] = frequency if unit == "step" else (frequency, unit)
        if isinstance(found.get("ent_coef"), str):
            found["ent_coef"] = "auto"  # SB3 has "auto_0.1"
        return presets.AgentSettings.model_validate({"algorithm": self.algorithm, **found})

    def policy_keywords(self) -> dict[str, Any]:
        """Return keywords of the policy."""
        names = ("layers", "filters", "tanh", "channels_last", "chunk")
        critic_hidden = self.hidden if self.critic_hidden is None else self.critic_hidden
        return {
            "features_extractor_kwargs": {
                "features_dim": self.features,
                "image_size": self._augment.size,
                **{name: getattr(self, name) for name in names},
            },
            "net_arch": {"pi": list(self.hidden), "qf": list(critic_hidden)},
            "n_critics": self.n_critics,
            "activation_fn": getattr(nn, self.activation),
            "optimizer_kwargs": {"betas": (self.beta, 0.999), "fused": True},
        }

    def _get_torch_save_params(self) -> tuple[list[str], list[str]]:
        names, variables = super()._get_torch_save_params()
        own = [name for name in ("encoder_optimizer", "contrast_optimizer") if getattr(self, name) is not None]
        return names + own, variables

    def _excluded_save_params(self) -> list[str]:
        own = (
            "_augment", "_given", "seen", "outcome", "encoder_optimizer", "contrast_optimizer", "_is_guarded",
            "before_noise",
        )  # fmt: skip
        return [*super()._excluded_save_params(), *own]

    @classmethod
    def load(
        cls,
        path: Any,
        env: Any = None,
        device: torch.device | str = "auto",
        custom_objects: dict[str, Any] | None = None,
        print_system_info: bool = False,
        force_reset: bool = True,
        objective: Objective | Composite | None = None,
        **changes: Any,
    ) -> Self:
        """Return an agent that `save` wrote, with changed settings.

        SB3 runs code in the file. `resume` and `dipole play` do not.

        Args:
            path: as in SB3.
            env: as in SB3.
            device: as in SB3.
            custom_objects: as in SB3.
            print_system_info: as in SB3.
            force_reset: as in SB3.
            objective: for terms that are not registered: modules of the same classes, which get the saved weights.
            changes: settings that weights and optimizers do not depend on (tau, learning_rate, ...), augmentation,
                storage, and SB3's own keywords.

        Raises:
            ConfigError: a setting is unknown, out of range or fixed, or the objective is not that of the file.
        """
        if not isinstance(custom_objects, dict | None):
            raise ConfigError(
                f"custom_objects must be a dictionary of SB3's attributes, or None, got {custom_objects!r}."
            )
        own = {*presets.NAMES, *presets.by_attribute(cls.algorithm)}
        changes = {name: value for name, value in (custom_objects or {}).items() if name in own} | changes
        other = ("augmentation", "storage", *cls.passed_on)
        rest = without_sb3_names({name: value for name, value in changes.items() if name not in other})
        if objective == "none":
            rest["objective"] = objective  # which is no change that an agent can have
        presets.require_changeable(rest)
        passed = check_passed_on({"device": device, **{name: changes[name] for name in other if name in changes}})
        device = passed.pop("device")
        if "stats_window_size" in passed:
            passed["_stats_window_size"] = passed.pop("stats_window_size")
        if objective is not None:
            passed["_given"] = given_composite(objective)
        with readable(f"the agent {path} cannot be loaded"), explained(path, objective):
            told = read_description(path)
            saved = {name: value for name, value in told["settings"].items() if value is not None}
            kind = saved["algorithm"]
            if kind != cls.algorithm:
                raise ConfigError(f"{path} is an agent of {kind!r}, and {cls.__name__} is {cls.algorithm!r}. {CLASSES}")
            if env is not None:
                env = shown_to(cls.__name__, cls._wrap_env(env), saved["inputs"])
            chosen, stored = presets.from_preset(saved["preset"], {**saved, **rest}, other), presets.attributes(kind)
            changed = {stored[name]: getattr(chosen, name) for name in rest}
            agent = super().load(path, env, device, custom_objects, print_system_info, force_reset, **changed, **passed)
        if env is None:
            agent._vec_normalize_env = normalizer(told)
        elif told.get("normalizer") and agent.get_vec_normalize_env() is None:
            said = f"{path} has learned from normalised observations: put env into VecNormalize.load(...) as well."
            warnings.warn(said, RuntimeWarning, stacklevel=2)
        return agent

    def save(self, path: Any, exclude: Iterable[str] | None = None, include: Iterable[str] | None = None) -> None:
        # Replay and random generators are not in the file: `snapshots.save` writes them as well.
        if not isinstance(path, (str, Path)):  # an open file
            with tempfile.TemporaryDirectory() as folder:
                self.save(f"{folder}/agent.zip", exclude, include)
                path.write(Path(folder, "agent.zip").read_bytes())
            return
        with _written(path, ".zip") as temporary:
            super().save(temporary, exclude, include)
            with zipfile.ZipFile(temporary, "a") as archive:
                archive.writestr(FILE, json.dumps(describe(self), indent=1))

    def save_replay_buffer(self, path: Any) -> None:
        if not isinstance(path, (str, Path)):
            super().save_replay_buffer(path)
            return
        with _written(path, ".pkl") as temporary:
            super().save_replay_buffer(temporary)

    def load_replay_buffer(self, path: Any, truncate_last_traj: bool = True) -> None:
        with readable(f"the replay {path} cannot be loaded"):
            found = load_from_pkl(path, self.verbose)
        kinds = ("observation_space", "action_space", "n_envs")
        if not isinstance(found, FrameReplayBuffer) or any(getattr(found, k) != getattr(self, k) for k in kinds):
            raise ConfigError(f"the replay {path} is no FrameReplayBuffer of the agent's environments.")
        found.device = self.device
        self.replay_buffer = found


def check_passed_on(given: dict[str, Any]) -> dict[str, Any]:
    """Return keywords of SB3 with a plain seed. Raise ConfigError for a value that SB3 cannot use."""
    noise, log = given.get("action_noise"), given.get("tensorboard_log")
    if noise is not None and not isinstance(noise, ActionNoise):
        raise ConfigError(f"action_noise must be an ActionNoise of SB3, or None, got {noise!r}.")
    if log is not None and not isinstance(log, str | Path):
        raise ConfigError(f"tensorboard_log must be a folder, or None, got {log!r}.")
    counts = {
        name: given[name] for name in ("verbose", "stats_window_size") if not isinstance(given.get(name, True), bool)
    }
    check_integers(0, **counts)
    taken = {"n_steps", "gamma"} & set(given.get("replay_buffer_kwargs") or {})
    if taken:
        raise ConfigError(f"replay_buffer_kwargs: {', '.join(taken)} is a setting of the agent: give it there.")
    require_device(given.get("device", "auto"))
    return {**given, "seed": check_seed(given["seed"])} if "seed" in given else given


@contextmanager
def _written(path: str | Path, suffix: str) -> Iterator[Path]:
    """Yield a temporary path for a file, which gets the suffix if its name has none."""
    path = Path(path)
    if not path.suffix:
        path = path.with_suffix(suffix)
    with disk_refusing(f"cannot write {path}", CheckpointError, ""), replacing(path) as temporary:
        yield temporary


FILE = "dipole.json"  # inside the zip
_FORMAT = 1
_LARGEST = 10_000_000  # bytes of a description
COUNTERS = ("num_timesteps", "_episode_num", "_n_updates", "environment_steps", "_current_progress_remaining")


def describe(agent: Any) -> dict[str, Any]:
    """Return what `open_agent` makes the agent from."""
    given = {name: getattr(agent, name) for name in ("learning_rate", "augmentation", "action_noise")}
    if agent.replay_buffer_class is not FrameReplayBuffer or agent.replay_buffer_kwargs:
        given["replay_buffer_class"] = agent.replay_buffer_class
        given["replay_buffer_kwargs"] = agent.replay_buffer_kwargs
    # Our files never hold code.
    code = [name for name, value in given.items() if not isinstance(value, int | float | str | None)]
    return {
        "format": _FORMAT,
        "settings": {name: None if name in code else value for name, value in agent.settings},
        "augmentation": None if "augmentation" in code else agent.augmentation,
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


def read_description(path: Any) -> dict[str, Any]:
    """Read the description in a zip or an open file. Raise CheckpointError if it is missing or damaged."""
    if isinstance(path, str | Path) and Path(path).is_dir():
        raise CheckpointError(f"{path} is a folder and no agent. `dipole.rl.resume` continues from a checkpoint.")
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
        "observation_space": described_space(agent.observation_space),
        "action_space": described_space(agent.action_space),
    }


def make_networks(agent: Any, told: Mapping[str, Any]) -> None:
    """Make the networks of an agent that was made without an environment, for what `told_spaces` says."""
    agent.observation_space, agent.action_space = map(read_space, (told["observation_space"], told["action_space"]))
    agent.n_envs = int(told["n_envs"])
    size, agent.buffer_size = agent.buffer_size, agent.n_envs  # the smallest replay, which no setting allows
    agent._setup_model()
    vars(agent)["buffer_size"] = size


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


def described_space(space: Any) -> dict[str, Any]:
    if isinstance(space, spaces.Dict):
        return {"parts": {key: described_space(each) for key, each in space.items()}}
    if isinstance(space, spaces.MultiBinary):
        return {"bits": list(space.shape)}
    # One number is enough for bounds that are the same everywhere, as for images.
    low, high = (
        side.flat[0].item() if (side == side.flat[0]).all() else side.tolist() for side in (space.low, space.high)
    )
    return {"low": low, "high": high, "shape": list(space.shape), "dtype": str(space.dtype)}


def read_space(told: dict[str, Any]) -> spaces.Space[Any]:
    if "parts" in told:
        return spaces.Dict({key: read_space(each) for key, each in told["parts"].items()})
    if "bits" in told:
        return spaces.MultiBinary(told["bits"])
    dtype: Any = np.dtype(told["dtype"]).type
    shape = tuple(map(int, told["shape"]))
    low, high = (np.broadcast_to(np.asarray(told[side], dtype), shape) for side in ("low", "high"))
    return spaces.Box(low, high, shape, dtype)
