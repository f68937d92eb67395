"""Settings of agents as attributes, and their files: SB3's zip, written atomically, with a description in JSON."""

import json
import pathlib
import tempfile
import warnings
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from stable_baselines3.common.noise import ActionNoise
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.save_util import load_from_pkl
from stable_baselines3.common.type_aliases import TrainFreq
from stable_baselines3.common.utils import get_device
from torch import nn

from dipole.core.objectives.objective import Composite, Objective
from dipole.core.utils.errors import CheckpointError, ConfigError
from dipole.core.utils.files import disk_refusing, replacing
from dipole.rl import description
from dipole.rl import settings as presets
from dipole.rl.arguments import check_integers, check_seed
from dipole.rl.contrast import given_composite
from dipole.rl.inputs import shown_to
from dipole.rl.replay import FrameReplayBuffer
from dipole.rl.sb3_names import without_sb3_names


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
        setting = presets.by_attribute(self.algorithm).get(name)
        has_networks = "policy" in vars(self)
        if setting is not None and has_networks and not isinstance(value, TrainFreq) and value != vars(self)[name]:
            presets.require_assignable(setting, vars(self)[name])
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
        with description.readable(f"the agent {path} cannot be loaded"), description.explained(path, objective):
            told = description.read(path)
            saved = {name: value for name, value in told["settings"].items() if value is not None}
            kind = saved["algorithm"]
            if kind != cls.algorithm:
                raise ConfigError(f"{path} is an agent of {kind!r}, and {cls.__name__} is {cls.algorithm!r}.")
            if env is not None:
                env = shown_to(cls.__name__, cls._wrap_env(env), saved["inputs"])
            chosen, stored = presets.from_preset(saved["preset"], {**saved, **rest}, other), presets.attributes(kind)
            changed = {stored[name]: getattr(chosen, name) for name in rest}
            agent = super().load(path, env, device, custom_objects, print_system_info, force_reset, **changed, **passed)
        if env is None:
            agent._vec_normalize_env = description.normalizer(told)
        elif told.get("normalizer") and agent.get_vec_normalize_env() is None:
            said = f"{path} has learned from normalised observations: put env into VecNormalize.load(...) as well."
            warnings.warn(said, RuntimeWarning, stacklevel=2)
        return agent

    def save(self, path: Any, exclude: Iterable[str] | None = None, include: Iterable[str] | None = None) -> None:
        # Replay and random generators are not in the file: `snapshots.save` writes them as well.
        if not isinstance(path, (str, pathlib.Path)):  # an open file
            with tempfile.TemporaryDirectory() as folder:
                self.save(f"{folder}/agent.zip", exclude, include)
                path.write(pathlib.Path(folder, "agent.zip").read_bytes())
            return
        with _written(path, ".zip") as temporary:
            super().save(temporary, exclude, include)
            with zipfile.ZipFile(temporary, "a") as archive:
                archive.writestr(description.FILE, json.dumps(description.describe(self), indent=1))

    def save_replay_buffer(self, path: Any) -> None:
        if not isinstance(path, (str, pathlib.Path)):
            super().save_replay_buffer(path)
            return
        with _written(path, ".pkl") as temporary:
            super().save_replay_buffer(temporary)

    def load_replay_buffer(self, path: Any, truncate_last_traj: bool = True) -> None:
        with description.readable(f"the replay {path} cannot be loaded"):
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
    if log is not None and not isinstance(log, str | pathlib.Path):
        raise ConfigError(f"tensorboard_log must be a folder, or None, got {log!r}.")
    counts = {
        name: given[name] for name in ("verbose", "stats_window_size") if not isinstance(given.get(name, True), bool)
    }
    check_integers(0, **counts)
    taken = {"n_steps", "gamma"} & set(given.get("replay_buffer_kwargs") or {})
    if taken:
        raise ConfigError(f"replay_buffer_kwargs: {', '.join(taken)} is a setting of the agent: give it there.")
    try:
        get_device(given.get("device", "auto"))
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device must be 'auto', 'cpu', 'cuda' or such, got {given['device']!r}.") from error
    return {**given, "seed": check_seed(given["seed"])} if "seed" in given else given


@contextmanager
def _written(path: str | pathlib.Path, suffix: str) -> Iterator[pathlib.Path]:
    """Yield a temporary path for a file, which gets the suffix if its name has none."""
    path = pathlib.Path(path)
    if not path.suffix:
        path = path.with_suffix(suffix)
    with disk_refusing(f"cannot write {path}", CheckpointError, ""), replacing(path) as temporary:
        yield temporary
