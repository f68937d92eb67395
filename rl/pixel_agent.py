"""What every agent of dipole has in common, on stable-baselines3's off-policy algorithms.

Environments and replay, the contrastive objective on the encoder, the guard against what is not finite, saving. An
algorithm adds its networks (`policy_aliases`) and its steps (`_steps`).
"""

import pathlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Self

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.noise import ActionNoise
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.common.save_util import recursive_getattr
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv
from torch import Tensor, nn

from dipole.core.objectives.evaluate import without_autocast
from dipole.core.objectives.gather import relate
from dipole.core.objectives.objective import Composite, Objective, Outcome
from dipole.core.objectives.pairs import Pairs
from dipole.core.train import compiling
from dipole.core.train.nonfinite import terms_with_bad_gradient
from dipole.core.utils.errors import ConfigError, TrainingError
from dipole.core.utils.files import replacing
from dipole.core.utils.memory import check_fits
from dipole.core.utils.transfer import prefetched, to_device
from dipole.rl import description
from dipole.rl import settings as presets
from dipole.rl.arguments import check_seed, check_whole, plain
from dipole.rl.augmentation import Augmentation, Centre, Custom, one_number, resolve
from dipole.rl.contrast import as_composite, largest, require_unlabelled, unregistered
from dipole.rl.envs.running.admission import (
    admitted,
    require_contained,
    require_finite_observation,
    require_observation,
    rows_of,
)
from dipole.rl.envs.running.faults import describe, fault_message, guarded
from dipole.rl.inputs import require_image, require_kinds, require_part, require_policy, seen_by, shown_to
from dipole.rl.noise import noise_state, set_noise_state
from dipole.rl.replay import FrameBatch, FrameReplayBuffer
from dipole.rl.sb3_names import without_sb3_names

Logs = dict[str, Tensor]
"""What an update logs: name -> a detached scalar on the device."""


def _without_other_episodes(info: dict[str, Any]) -> dict[str, Any]:
    """An info whose "episode" is what SB3 takes it for, returns and lengths by its Monitor, or is not there."""
    episode = info.get("episode", {})
    if not episode or (isinstance(episode, dict) and {"r", "l"} <= episode.keys()):
        return info
    return {key: value for key, value in info.items() if key != "episode"}


class PixelAgent(OffPolicyAlgorithm):
    """An off-policy algorithm of SB3 that learns from images and vectors, with any objective on its encoder.

    A subclass names its base of SB3 after this class, and says `algorithm` (whose settings it has), `policy_aliases`,
    `_sb3_keywords` and `_steps`.

    Args:
        policy: as in `ContrastiveSAC`.
        env: as in `ContrastiveSAC`.
        objective: as in `ContrastiveSAC`.
        preset: of the algorithm; by default its own.
        augmentation: as in `ContrastiveSAC`.
        storage: as in `ContrastiveSAC`.
        settings: fields of `settings.Settings` by name, and SB3's keywords that `passed_on` names.

    Raises:
        ConfigError: for a setting or environment that does not fit.
        SpecError: for a wrong objective text.
        OptionError: a batch of images would not fit into memory.
        TrainingError: replay cannot fit into memory; from `learn`, a loss or gradient is not finite.
    """

    algorithm: ClassVar[presets.AlgorithmName]
    # SB3's own keywords that are passed on as they are; the others are settings of ours or have no meaning here.
    passed_on: ClassVar[tuple[str, ...]] = (
        "action_noise", "replay_buffer_class", "replay_buffer_kwargs", "stats_window_size", "tensorboard_log",
        "verbose", "seed", "device",
    )  # fmt: skip
    policy: Any
    replay_buffer: FrameReplayBuffer
    settings: presets.Settings

    def __init__(
        self,
        policy: Any,
        env: gymnasium.Env[Any, Any] | VecEnv | str | None,
        objective: str | Objective | Composite | None = None,
        preset: str | None = None,
        augmentation: str | Callable[[Tensor], Tensor] | None = None,
        storage: presets.Storage = "auto",
        _init_setup_model: bool = True,
        **settings: Any,
    ) -> None:
        sb3 = {name: plain(settings.pop(name)) for name in self.passed_on if name in settings}
        sb3["seed"] = check_seed(sb3.get("seed"))
        noise = sb3.get("action_noise")
        if noise is not None and not isinstance(noise, ActionNoise):
            raise ConfigError(f"action_noise must be an ActionNoise of SB3, or None, got {noise!r}.")
        self._given = as_composite(objective) if not isinstance(objective, str) else None
        # Terms that the text in `settings` cannot build again; loading asks for them.
        self.own_terms = unregistered(self._given) if self._given is not None else ()
        if objective is not None:
            settings["objective"] = objective if isinstance(objective, str) else str(self._given)
        settings = without_sb3_names(settings)
        preset = presets.DEFAULT[self.algorithm] if preset is None else preset
        self.settings = chosen = presets.resolve(
            preset, {**settings, "algorithm": self.algorithm}, (*self.passed_on, "augmentation", "storage")
        )
        self.augmentation = presets.augmentation(preset) if augmentation is None else augmentation
        self.storage = storage
        self.environment_steps = 0
        self.task: dict[str, Any] | None = None  # the name and the keywords of its environment, where these are known
        self.faults: list[dict[str, Any]] = []
        self.outcome: Outcome | None = None
        self._is_guarded = False
        self.encoder_optimizer: torch.optim.Adam | None = None
        self.contrast_optimizer: torch.optim.Adam | None = None
        if env is not None or _init_setup_model:
            env = self._shown(env, int(sb3.get("verbose", 0)))
            require_policy(policy, type(self).__name__, seen_by(type(self).__name__, env.observation_space))
        super().__init__(
            self.policy_aliases["CnnPolicy"] if isinstance(policy, str) else policy,
            env,  # type: ignore[arg-type]
            buffer_size=chosen.buffer_size,
            **self._sb3_keywords(chosen),
            **sb3,
            _init_setup_model=_init_setup_model,  # type: ignore[call-arg]
        )

    @classmethod
    def _sb3_keywords(cls, chosen: presets.Settings) -> dict[str, Any]:
        """What the base of SB3 is given of the settings."""
        return presets.sb3_keywords(chosen)

    # Setting up ------------------------------------------------------------------------------------------------------

    @classmethod
    def _wrap_env(cls, env: Any, verbose: int = 0, monitor_wrapper: bool = True) -> VecEnv:
        env = admitted(env)
        require_kinds(cls.__name__, env.observation_space)
        inner = env.unwrapped if isinstance(env, VecEnv) else env
        if isinstance(inner, DummyVecEnv):
            inner.envs = [guarded(each) for each in inner.envs]
        elif isinstance(inner, gymnasium.Env):
            env = guarded(env)
        wrapped = OffPolicyAlgorithm._wrap_env(env, verbose, monitor_wrapper)
        cls._require_actions(wrapped.action_space)
        return wrapped

    def _shown(self, env: Any, verbose: int = 0) -> VecEnv:
        """The environment as the agent sees it."""
        return shown_to(type(self).__name__, self._wrap_env(env, verbose), self.settings.inputs)

    def set_env(self, env: Any, force_reset: bool = True) -> None:
        """Take another environment, as SB3 does.

        Args:
            env: whose observations and actions are those of the first.
            force_reset: as in SB3.
        """
        super().set_env(self._shown(env, self.verbose), force_reset)

    @classmethod
    def _require_actions(cls, space: spaces.Space[Any]) -> None:
        """Raise ConfigError for actions that the algorithm does not have; continuous ones by default."""
        fits = False
        if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating) and 0 not in space.shape:
            fits = bool((np.isfinite(space.low) & np.isfinite(space.high) & (space.low < space.high)).all())
        if not fits:
            raise ConfigError(
                f"{cls.__name__} needs continuous actions with finite bounds (a Box of floats, low below high), got "
                f"{space}."
            )

    def _setup_model(self) -> None:
        chosen, name = self.settings, type(self).__name__
        self.seen = seen_by(name, self.observation_space)
        require_part(self.seen, self.observation_space, chosen.inputs)
        channels, height, width = self.seen.shape
        check_fits(
            "a batch of images", (chosen.batch_size, *self.seen.shape), torch.empty(0, device=self.device), "a copy"
        )
        self._augment: Augmentation = (
            Centre(1)
            if self.seen.image is None
            else resolve(
                self.augmentation, channels, one_number(height, width), chosen.image_size, chosen.crop_inclusive
            )
        )
        if self._given is not None or chosen.objective != "none":
            require_image(self.seen, name)
        if chosen.precision == "bf16":
            warn_if_emulated(self.device)
        if self.replay_buffer_class is None:
            self.replay_buffer_class, keywords = self._own_replay()
            self.replay_buffer_kwargs = {**keywords, **self.replay_buffer_kwargs}
        if not issubclass(self.replay_buffer_class, FrameReplayBuffer):
            raise ConfigError(
                f"replay_buffer_class must derive from FrameReplayBuffer, got {self.replay_buffer_class}."
            )
        if self.own_terms and self._given is None:
            raise ConfigError(description.unregistered_message(self.own_terms))
        self.policy_kwargs = {"settings": chosen, "image_size": self._augment.size}
        # Not kept among the keywords: its weights are saved with the policy's, and its text with the settings.
        self.policy_kwargs["contrast"] = self._given
        super()._setup_model()
        del self.policy_kwargs["contrast"]
        if chosen.compile:
            self.policy.compile_networks()
        self._setup_contrast()
        self._fit_optimizers()

    def _own_replay(self) -> tuple[type[FrameReplayBuffer], dict[str, Any]]:
        """The replay that the agent makes by itself, and its keywords."""
        keywords: dict[str, Any] = {"storage": self.storage}
        if self.settings.n_steps > 1:
            keywords |= {"n_steps": self.settings.n_steps, "gamma": self.settings.gamma}
        return FrameReplayBuffer, keywords

    def _setup_contrast(self) -> None:
        """How many positives the objective gets, and the optimizers of what it learns."""
        chosen, contrast = self.settings, self.policy.contrast
        self._positives = 0
        self.encoder_optimizer = self.contrast_optimizer = None
        if contrast is None:
            return
        require_image(self.seen, type(self).__name__)
        self._positives = chosen.positives or contrast.positives_wanted or 1
        require_unlabelled(contrast, chosen.features, self._positives, chosen.batch_size)
        self._setup_contrast_optimizers(list(contrast.parameters()), self._encoder_rate(1.0))

    def _setup_contrast_optimizers(self, own: list[nn.Parameter], rate: float) -> None:
        """One for what the objective itself learns; the encoder is stepped with the algorithm's own loss."""
        self.contrast_optimizer = self.policy.adam(own, rate) if own else None

    def _fit_optimizers(self) -> None:
        """On a GPU, let optimizers be part of a CUDA graph that somebody captures (Adam's `capturable`)."""
        for name in self._get_torch_save_params()[0]:
            found = recursive_getattr(self, name, None)
            for group in found.param_groups if isinstance(found, torch.optim.Adam) else ():
                group["capturable"] = self.device.type == "cuda"

    def set_parameters(self, *arguments: Any, **settings: Any) -> None:
        """As SB3; optimizers that were saved on another device are made to fit this one."""
        super().set_parameters(*arguments, **settings)
        self._fit_optimizers()

    @property
    def has_own_replay(self) -> bool:
        """Whether replay is what the agent makes by itself."""
        kind, keywords = self._own_replay()
        return self.replay_buffer_class is kind and set(self.replay_buffer_kwargs) <= set(keywords)

    def exploration_state(self) -> dict[str, Any] | None:
        """What the algorithm has drawn for its exploration, for a checkpoint."""
        return None

    def set_exploration_state(self, state: dict[str, Any] | None) -> None:
        """Continue with what `exploration_state` returned.

        Args:
            state: what it returned; None: nothing.
        """

    def set_up_for_playing(self) -> None:
        """Make the networks of an agent without an environment, and the smallest replay there is."""
        self.buffer_size = self.n_envs
        self._setup_model()
        self.buffer_size = self.settings.buffer_size

    def parts(self) -> dict[str, nn.Module]:
        """The modules that a run saves."""
        raise NotImplementedError

    def _encoder_rate(self, progress: float) -> float:
        chosen = self.settings.encoder_learning_rate
        return float(self.lr_schedule(progress)) if chosen is None else chosen

    def adopt(self, objective: Composite | None, **changes: Any) -> None:
        """Take another objective, with the weights that it has, and change settings; its optimizers start anew.

        Args:
            objective: built for embeddings of the agent's width; None for "none".
            changes: settings by name that no network depends on (learning_rate, precision, ...).
        """
        text = "none" if objective is None else str(objective)
        self.settings = presets.resolve(self.settings.preset, {**dict(self.settings), "objective": text, **changes})
        self.own_terms = unregistered(objective) if objective is not None else ()
        self.policy.settings = self.policy_kwargs["settings"] = self.settings
        self.policy.contrast = objective
        self.learning_rate = self.settings.learning_rate
        self._setup_lr_schedule()
        self._setup_contrast()
        self._fit_optimizers()

    @property
    def contrast(self) -> Composite | None:
        """The contrastive objective; None for "none"."""
        return self.policy.contrast

    # Acting -----------------------------------------------------------------------------------------------------------

    def predict(self, *arguments: Any, **settings: Any) -> tuple[np.ndarray, tuple[np.ndarray, ...] | None]:
        """As SB3: actions (B, A), or (A,) of one observation, and the state that was given.

        Args:
            arguments: those of SB3.
            settings: those of SB3, by name.
        """
        self._mark_step()
        return super().predict(*arguments, **settings)

    def _mark_step(self) -> None:
        """Tell CUDA graphs that what they returned before is not needed any more."""
        if self.settings.compile in compiling.GRAPHED:
            torch.compiler.cudagraph_mark_step_begin()

    def _update_info_buffer(self, infos: list[dict[str, Any]], dones: Any = None) -> None:
        super()._update_info_buffer([_without_other_episodes(info) for info in infos], dones)
        for index, info in enumerate(infos):
            steps = info.get("environment_steps", 1)
            check_whole(0, **{"info['environment_steps']": steps})
            self.environment_steps += int(steps)
            if "fault" in info:
                self._count_fault(index, info["fault"])
        self.logger.record("time/environment_steps", self.environment_steps)

    def _count_fault(self, index: int, fault: dict[str, Any]) -> None:
        self.faults.append({"environment": index, "agent_step": self.num_timesteps, **fault})
        self.logger.record("rollout/faults", len(self.faults))
        warnings.warn(fault_message(index, fault), RuntimeWarning, stacklevel=3)

    def _store_transition(self, replay: Any, action: Any, new_obs: Any, reward: Any, dones: Any, infos: Any) -> None:
        # Of environments in a VecEnv of the user's own, whose rewards no Guard has looked at.
        for index in np.flatnonzero(~np.isfinite(reward)):
            if "fault" not in infos[index]:
                error = ValueError(f"the reward is {reward[index]}")
                self._count_fault(int(index), describe(error, self.num_timesteps, self._episode_num, self.seed))
        self._look_at(new_obs)
        super()._store_transition(replay, action, new_obs, reward, dones, infos)

    def _look_at(self, observations: Any, closely: bool = False) -> None:
        """Refuse observations of a VecEnv of the user's own that are not in their space; nobody else has looked."""
        if self._is_guarded or self.env is None:
            return
        name = type(self.env.unwrapped).__name__
        for index, each in enumerate(rows_of(observations)):
            require_observation(name, self.observation_space, each)
            if closely:
                require_contained(name, self.observation_space, each)
            try:
                require_finite_observation(each)
            except ValueError as error:
                raise TrainingError(
                    f"{error}: environment {index} of {name} at agent step {self.num_timesteps}. WorkerVecEnv ends the "
                    "episode there and goes on."
                ) from None

    def _setup_learn(
        self, total_timesteps: int, callback: Any = None, reset_num_timesteps: bool = True, *rest: Any, **settings: Any
    ) -> tuple[int, Any]:
        check_whole(0, total_timesteps=total_timesteps)
        if reset_num_timesteps:
            self.environment_steps = 0
        noise = noise_state(self.action_noise)
        prepared = super()._setup_learn(total_timesteps, callback, reset_num_timesteps, *rest, **settings)
        if not reset_num_timesteps:  # SB3 begins it anew in every call of `learn`
            self.action_noise = set_noise_state(self.action_noise, noise)
        assert self.env is not None
        self._is_guarded = self.env.has_attr("wrapper_names")
        self._look_at(self._last_obs, closely=True)
        return prepared

    # Learning ---------------------------------------------------------------------------------------------------------

    def train(self, gradient_steps: int, batch_size: int = 64) -> None:
        """Sample and update; SB3 calls it after each rollout.

        Args:
            gradient_steps: how many updates, >= 1.
            batch_size: transitions of each, >= 1.
        """
        self.policy.set_training_mode(True)
        self._set_learning_rates()
        values: dict[str, list[Tensor]] = {}
        batches = (self._sample(batch_size) for _ in range(gradient_steps))
        for batch in prefetched(batches, self.device) if self._draws_ahead and gradient_steps > 1 else batches:
            for name, value in self.update(batch).items():
                values.setdefault(name, []).append(value)
        means = torch.stack([torch.stack(each).mean() for each in values.values()]) if values else torch.empty(0)
        for name, value in zip(values, means.tolist(), strict=True):
            self.logger.record(f"train/{name}", value)
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")

    def _sample(self, batch_size: int) -> FrameBatch:
        return self.replay_buffer.sample_views(batch_size, self._augment, self._positives, env=self._vec_normalize_env)

    @property
    def _draws_ahead(self) -> bool:
        """Whether a thread draws the next batch of a call of `train` while the device is at the one before.

        For a GPU whose replay is elsewhere, and where a draw depends on no update and on no generator of torch's.
        """
        return (
            self.device.type == "cuda"
            and self.replay_buffer.storage != "device"
            and self.has_own_replay
            and not isinstance(self._augment, Custom)
        )

    def _set_learning_rates(self) -> None:
        rate = float(self.lr_schedule(self._current_progress_remaining))
        encoder_rate = self._encoder_rate(self._current_progress_remaining)
        self.logger.record("train/learning_rate", rate)
        for optimizer, value in (
            *((each, rate) for each in self._optimizers()),
            (self.encoder_optimizer, encoder_rate),
            (self.contrast_optimizer, encoder_rate),
        ):
            for group in optimizer.param_groups if optimizer is not None else ():
                group["lr"] = value

    def _optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """Those of the algorithm itself."""
        return (self.actor.optimizer, self.policy.critic.optimizer)  # type: ignore[return-value]

    def learn(self, *arguments: Any, **settings: Any) -> Self:
        """Train as SB3 does.

        Args:
            arguments: those of SB3: total_timesteps, callback, log_interval, ...
            settings: those of SB3, by name.

        Returns:
            The agent itself.

        Raises:
            ConfigError: `total_timesteps` is no whole number >= 0, or an observation of a VecEnv of one's own is not in
                its space.
            TrainingError: a loss, gradient, reward or observation is not finite.
        """
        super().learn(*arguments, **settings)
        return self

    def update(self, batch: FrameBatch) -> Logs:
        """One update on a batch, and what it logs.

        Args:
            batch: drawn by replay.

        Returns:
            Name -> a scalar tensor on the device.

        Raises:
            TrainingError: if a loss or gradient is not finite, before the step that it would have spoilt.
        """
        self._mark_step()
        contrasting = self.policy.contrast is not None and self._n_updates % self.settings.contrast_every == 0
        logs: Logs = {}
        with self._autocast():
            self._steps(batch, contrasting, logs)
        self._n_updates += 1
        return logs

    def _steps(self, batch: FrameBatch, contrasting: bool, logs: Logs) -> None:
        """The algorithm's own steps on a batch, those of the contrast among them."""
        raise NotImplementedError

    @contextmanager
    def _autocast(self) -> Iterator[None]:
        device = self.device.type
        half = self.settings.precision == "bf16"
        with torch.autocast(device, torch.bfloat16) if half else without_autocast(device):
            yield

    def _bootstrapped(self, batch: FrameBatch, rewards: Tensor, value: Tensor) -> Tensor:
        """y = R + (1 - done) discount value: rewards (B, 1) as they count, values (B, N) or (N,) of what follows.

        The discount is gamma, or that of each return's own length.
        """
        discount = self.gamma if batch.discounts is None else batch.discounts
        return rewards + (1 - batch.dones) * discount * value

    def anchors(self, images: Tensor) -> Tensor:
        """Embeddings (B, d) that the contrast compares.

        Args:
            images: views, (B, C, h, w).
        """
        encoder = self.policy.encoder
        found: Tensor = encoder.head(encoder.convolve(images))
        return found

    def _pairs(self, batch: FrameBatch, anchors: Tensor) -> Pairs:
        """Anchors (B, d) against keys (B, K, d) of the momentum encoder."""
        assert batch.positives is not None
        size, count = batch.positives.shape[:2]
        with torch.no_grad():
            following = self.policy.key_encoder
            keys = following.head(following.convolve(batch.positives.flatten(0, 1))).view(size, count, -1)
        if self.settings.compile in compiling.GRAPHED:
            # Pairs may outlive the update (`Watched`), what a CUDA graph returns does not.
            anchors, keys = anchors.clone(), keys.clone()
        dropped = duplicates(batch.stacks, count) if self.settings.exclude_duplicates else None
        return Pairs.cross(anchors, keys, dropped=None if dropped is None else to_device(dropped, anchors.device))

    def _outcome(self, pairs: Pairs, logs: Logs) -> Outcome:
        assert self.policy.contrast is not None
        with without_autocast(self.device.type):
            outcome: Outcome = self.policy.contrast(pairs)
        logs |= {f"contrast/{name}": term.value.detach() for name, term in outcome.terms.items()}
        logs["contrast_loss"] = outcome.loss.detach()
        self.outcome = Outcome(outcome.loss.detach(), outcome.terms)
        return outcome

    def _after_contrast(self) -> None:
        assert self.policy.contrast is not None
        done = self._n_updates // self.settings.contrast_every + 1
        self.policy.contrast.after_step(self._encoder_rate(self._current_progress_remaining), done)

    def _sum_step(
        self,
        name: str,
        loss: Tensor,
        optimizers: Sequence[torch.optim.Optimizer],
        batch: FrameBatch,
        anchors: Tensor,
        contrasting: bool,
        logs: Logs,
    ) -> None:
        """One backward pass and one step of the encoder for the algorithm's own loss and the contrast."""
        logs[f"{name}_loss"] = loss.detach()
        if not contrasting:
            self._descend({name: loss}, loss, optimizers)
            return
        pairs = self._pairs(batch, anchors)
        outcome = self._outcome(pairs, logs)
        optimizers = [*optimizers, *([self.contrast_optimizer] if self.contrast_optimizer is not None else [])]
        self._descend({name: loss, "contrastive": outcome.loss}, loss + outcome.loss, optimizers, pairs)
        self._after_contrast()

    @staticmethod
    @torch.no_grad()
    def _lerp(online: Iterable[nn.Module], copies: Iterable[nn.Module], tau: float) -> None:
        """copy <- tau online + (1 - tau) copy."""
        pairs = zip(online, copies, strict=True)
        parameters = [(p, q) for a, b in pairs for p, q in zip(a.parameters(), b.parameters(), strict=True)]
        if parameters:
            torch._foreach_lerp_([q for _, q in parameters], [p for p, _ in parameters], tau)

    def _descend(
        self,
        losses: Mapping[str, Tensor],
        loss: Tensor,
        optimizers: Sequence[torch.optim.Optimizer],
        pairs: Pairs | None = None,
    ) -> None:
        """Backward and step; TrainingError before the step if a loss or gradient is not finite.

        Args:
            losses: the parts of the loss by name, for the message.
            loss: what is minimised.
            optimizers: whose parameters get the gradient.
            pairs: what a contrastive loss was computed from.
        """
        parameters = list({id(p): p for o in optimizers for g in o.param_groups for p in g["params"]}.values())
        for parameter in parameters:
            parameter.grad = None
        # Only these are asked for: the actor's loss costs no gradient of the critic.
        wanted = [parameter for parameter in parameters if parameter.requires_grad]
        loss.backward(inputs=wanted)
        wanted = [parameter for parameter in wanted if parameter.grad is not None]
        norms = largest([parameter.grad for parameter in wanted if parameter.grad is not None])
        if not bool(torch.cat([loss.detach().reshape(1), norms]).isfinite().all()):
            raise TrainingError(self._trouble(losses, wanted, norms, pairs))
        for optimizer in optimizers:
            optimizer.step()

    def _trouble(
        self, losses: Mapping[str, Tensor], parameters: list[Tensor], norms: Tensor, pairs: Pairs | None
    ) -> str:
        """Say what is not finite, where it comes from, and what helps."""
        where = f"at update {self._n_updates} ({self.environment_steps} environment steps)"
        terms = self.outcome.terms if self.outcome is not None and "contrastive" in losses else {}
        for name, value in ({name: term.value for name, term in terms.items()} | dict(losses)).items():
            if not bool(value.isfinite()):
                return (
                    f"the {name} loss is {float(value)} {where}; the step was not taken. Lower the learning rate, or "
                    "look at the rewards and observations of the environment."
                )
        names = {id(parameter): label for label, parameter in self.policy.named_parameters()}
        first = parameters[norms.isfinite().tolist().index(False)]
        source = ""
        if self.policy.contrast is not None and pairs is not None:
            guilty = ", ".join(terms_with_bad_gradient(relate(pairs), self.policy.contrast))
            source = f" It comes from the term {guilty}." if guilty else ""
        for parameter in parameters:
            parameter.grad = None
        return (
            f"the gradient of the {' and '.join(losses)} loss is not finite {where}, first in "
            f"{names.get(id(first), 'the temperature')}; the step was not taken.{source} Lower the learning rate, or "
            "use precision='float32'."
        )

    # Saving -----------------------------------------------------------------------------------------------------------

    def _get_torch_save_params(self) -> tuple[list[str], list[str]]:
        names, variables = super()._get_torch_save_params()
        own = ("encoder_optimizer", "contrast_optimizer")
        return names + [name for name in own if getattr(self, name) is not None], variables

    def _excluded_save_params(self) -> list[str]:
        own = ("_augment", "_given", "seen", "outcome", "encoder_optimizer", "contrast_optimizer")
        return [*super()._excluded_save_params(), *own, "_is_guarded"]

    @classmethod
    def load(cls, path: Any, *arguments: Any, objective: Objective | Composite | None = None, **settings: Any) -> Self:
        """The agent that `save` wrote, as SB3 reads it.

        Args:
            path: the file.
            arguments: those of SB3: env, device, custom_objects, ...
            objective: of an agent whose terms are not registered: modules of the same classes; their weights are those
                that were saved.
            settings: further keywords of SB3's.

        Raises:
            ConfigError: if the objective is not known here, or another one.
        """
        if objective is not None:
            settings["_given"] = as_composite(objective)
        env = arguments[0] if arguments else settings.get("env")
        if env is not None:
            shown = shown_to(cls.__name__, cls._wrap_env(env), description.inputs_of(path))
            arguments, settings = (shown, *arguments[1:]), {k: each for k, each in settings.items() if k != "env"}
        with description.explained(path, objective):
            return super().load(path, *arguments, **settings)

    def save(self, path: Any, exclude: Iterable[str] | None = None, include: Iterable[str] | None = None) -> None:
        """Save as SB3 does, but to a temporary file first: the old file stays until the new one is on the disk.

        Replay and generators are not in it; see `snapshots.save` for everything a bit-exact continuation needs.

        Args:
            path: NAME.zip, or an open file.
            exclude: as in SB3.
            include: as in SB3.
        """
        if not isinstance(path, (str, pathlib.Path)):
            super().save(path, exclude, include)
            return
        final = pathlib.Path(path)
        final = final if final.suffix else final.with_suffix(".zip")
        with replacing(final) as temporary:
            super().save(temporary, exclude, include)
            description.add_to(temporary, self)

    def save_replay_buffer(self, path: Any) -> None:
        """Save the replay buffer as SB3 does, atomically.

        Args:
            path: NAME.pkl, or an open file.
        """
        if not isinstance(path, (str, pathlib.Path)):
            super().save_replay_buffer(path)
            return
        final = pathlib.Path(path)
        final = final if final.suffix else final.with_suffix(".pkl")
        with replacing(final) as temporary:
            super().save_replay_buffer(temporary)


def duplicates(stacks: Any, positives: int) -> Tensor | None:
    """Candidates that show the same observation as another anchor, for `Pairs.cross(dropped=)`.

    Args:
        stacks: (B, n) integers; equal rows are the same observation.
        positives: K, keys of each observation; candidate j + c B is key c of observation j.

    Returns:
        (B, E) long, -1 pads; None where no two rows are equal.
    """
    size = len(stacks)
    _, group, counts = np.unique(stacks, axis=0, return_inverse=True, return_counts=True)
    largest = int(counts.max())
    if largest == 1:
        return None
    dropped = np.full((size, (largest - 1) * positives), -1, np.int64)
    for label in np.flatnonzero(counts > 1):
        members = np.flatnonzero(group == label)
        for member in members:
            others = members[members != member]
            keys = (others[:, None] + size * np.arange(positives)).ravel()
            dropped[member, : len(keys)] = keys
    return torch.from_numpy(dropped)


def bf16_is_native(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 in hardware; other processors emulate it, slower than float32."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    cpu = torch.cpu
    return bool(cpu._is_avx512_bf16_supported() or cpu._is_amx_tile_supported())


def warn_if_emulated(device: torch.device) -> None:
    """Warn that bf16 will be slow on this device."""
    if not bf16_is_native(device):
        warnings.warn(
            f"precision='bf16' is emulated on this {device.type} (neither avx512_bf16 nor AMX) and will be slower than "
            "'float32'; choose precision='float32'.",
            RuntimeWarning,
            stacklevel=3,
        )
