"""Soft actor-critic from pixels with a contrastive auxiliary objective (CURL), as a subclass of SB3's SAC."""

import pathlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3 import SAC
from stable_baselines3.common.noise import ActionNoise
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecExtractDictObs
from torch import Tensor

from dipole.core.contrast.evaluate import without_autocast
from dipole.core.contrast.gather import relate
from dipole.core.contrast.objective import Composite, Objective, Outcome
from dipole.core.contrast.pairs import Pairs
from dipole.core.ground.errors import ConfigError, TrainingError
from dipole.core.ground.files import replacing
from dipole.core.ground.transfer import Fetched, sent
from dipole.core.train.nonfinite import terms_with_bad_gradient
from dipole.core.train.optimizer import skip_if
from dipole.rl import description
from dipole.rl import settings as presets
from dipole.rl.arguments import check_seed, check_whole, plain
from dipole.rl.augmentation import Augmentation, one_number, resolve
from dipole.rl.contrast import as_composite, require_unlabelled, unregistered
from dipole.rl.encoder import Maps, detached
from dipole.rl.envs.running.admission import admitted, image_keys, require_contained, require_observation
from dipole.rl.envs.running.faults import describe, fault_message, guarded
from dipole.rl.policy import ContrastivePolicy, q_values, sample_action
from dipole.rl.replay import FrameBatch, FrameReplayBuffer

# SB3's own keywords that are passed on as they are; the others are settings of ours or have no meaning here.
_SB3 = (
    "action_noise", "replay_buffer_class", "replay_buffer_kwargs", "stats_window_size", "tensorboard_log", "verbose",
    "seed", "device",
)  # fmt: skip

Logs = dict[str, float | Tensor]


@dataclass(frozen=True)
class Watched:
    """What must be finite: a loss (), or norms (n,) of the gradients of parameters, and the pairs they come from."""

    name: str
    values: Tensor
    parameters: list[Tensor] | None = None
    pairs: Pairs | None = None


@dataclass(frozen=True)
class Unread:
    """An update whose numbers are on their way to the host: whether any is bad, then the largest of each watched."""

    where: str
    watched: list[Watched]
    found: Fetched


class ContrastiveSAC(SAC):
    """CURL (Laskin et al. 2020) with any contrastive objective, on SB3's learn / predict / save / load / callbacks.

    One update, in the repository's order (theta: encoder, Q, pi; bar: momentum copies):

        y = r + gamma (1 - done) (min_i Qbar_i(x', a') - alpha log pi(a'|x')),   a' ~ pi(x')
        critic:    sum_i mean (Q_i(x, a) - y)^2                                  -> encoder, Q
        every 2nd: mean (alpha log pi(a|x) - min_i Q_i(x, a)), a ~ pi(x)         -> pi; stops at the convolutions
                   mean alpha (-log pi - target entropy)                         -> alpha
                   Qbar <- tau Q + (1 - tau) Qbar, the encoder with its own tau
        contrast:  objective(anchors = encoder(x), positives = encoder_bar(x+))  -> encoder, W

    x, x' and each x+ are independent random views of the stored observation.

    Args:
        policy: "CnnPolicy".
        env: a pixel environment (its id, an instance or a VecEnv): uint8 images, continuous actions.
        objective: text such as "infonce(similarity=bilinear) + 0.1*dp"; "none" trains on augmented images alone; by
            default the preset's. An Objective or a Composite is used as the very module that it is, with its weights.
        preset: "curl" (the repository), "paper", or "small" (two cores).
        augmentation: "crop", "shift", "none", or a function (B, C, H, W) uint8 -> (B, C, h, w).
        storage: where replay keeps its frames: "host", "device", or "auto" (on a GPU where they fit).
        settings: any other field of `settings.Settings` by name (batch_size, learning_rate, joint_backward, ...), and
            SB3's action_noise, replay_buffer_class, replay_buffer_kwargs, stats_window_size, tensorboard_log, verbose,
            seed, device.

    Raises:
        ConfigError: for a setting or environment that does not fit; TrainingError if replay cannot fit into memory.
    """

    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {"CnnPolicy": ContrastivePolicy}
    policy: ContrastivePolicy
    replay_buffer: FrameReplayBuffer
    settings: presets.Settings

    def __init__(
        self,
        policy: str | type[ContrastivePolicy],
        env: gymnasium.Env[Any, Any] | VecEnv | str | None,
        objective: str | Objective | Composite | None = None,
        preset: str = "curl",
        augmentation: str | Callable[[Tensor], Tensor] = "crop",
        storage: Literal["auto", "host", "device"] = "auto",
        _init_setup_model: bool = True,
        **settings: Any,
    ) -> None:
        sb3 = {name: plain(settings.pop(name)) for name in _SB3 if name in settings}
        sb3["seed"] = check_seed(sb3.get("seed"))
        noise = sb3.get("action_noise")
        if noise is not None and not isinstance(noise, ActionNoise):
            raise ConfigError(f"action_noise must be an ActionNoise of SB3, or None, got {noise!r}.")
        self._given = as_composite(objective) if not isinstance(objective, str) else None
        # Terms that the text in `settings` cannot build again; loading asks for them.
        self.own_terms = unregistered(self._given) if self._given is not None else ()
        if objective is not None:
            settings["objective"] = objective if isinstance(objective, str) else str(self._given)
        settings = presets.without_sb3_names(settings)
        self.settings = chosen = presets.resolve(preset, settings, (*_SB3, "augmentation", "storage"))
        self.augmentation = augmentation
        self.storage = storage
        self.environment_steps = 0
        self.task: dict[str, Any] | None = None  # the name and the keywords of its environment, where these are known
        self.faults: list[dict[str, Any]] = []
        self.outcome: Outcome | None = None
        self._is_guarded = False
        self._watched: list[Watched] = []
        self._bad: Tensor | None = None
        self._unread: Unread | None = None
        self._logged: tuple[list[str], Fetched] | None = None
        self.encoder_optimizer: torch.optim.Adam | None = None
        self.contrast_optimizer: torch.optim.Adam | None = None
        if isinstance(policy, str) and policy != "CnnPolicy":
            raise ConfigError(f"policy must be 'CnnPolicy', got {policy!r}: ContrastiveSAC learns from pixels.")
        if env is not None or _init_setup_model:
            env = admitted(env)
        super().__init__(
            policy,
            env,  # type: ignore[arg-type]
            buffer_size=chosen.buffer_size,
            target_entropy=chosen.target_entropy,
            **presets.sac_keywords(chosen),
            **sb3,
            _init_setup_model=_init_setup_model,
        )

    # Setting up ------------------------------------------------------------------------------------------------------

    @staticmethod
    def _wrap_env(env: Any, verbose: int = 0, monitor_wrapper: bool = True) -> VecEnv:
        env = admitted(env)
        inner = env.unwrapped if isinstance(env, VecEnv) else env
        if isinstance(inner, DummyVecEnv):
            inner.envs = [guarded(each) for each in inner.envs]
        elif isinstance(inner, gymnasium.Env):
            env = guarded(env)
        wrapped = pixels_of(SAC._wrap_env(env, verbose, monitor_wrapper))
        space = wrapped.action_space
        if not isinstance(space, spaces.Box) or not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
            raise ConfigError(f"ContrastiveSAC needs continuous actions with finite bounds (a Box), got {space}.")
        return wrapped

    def _setup_model(self) -> None:
        space = self.observation_space
        if not isinstance(space, spaces.Box) or space.dtype != np.uint8 or len(space.shape) != 3:
            raise ConfigError(f"ContrastiveSAC needs uint8 images (C, H, W) as observations, got {space}.")
        channels, height, width = space.shape
        chosen = self.settings
        self._augment: Augmentation = resolve(
            self.augmentation, channels, one_number(height, width), chosen.image_size, chosen.crop_inclusive
        )
        if chosen.precision == "bf16":
            warn_if_emulated(self.device)
        if self.replay_buffer_class is None:
            self.replay_buffer_class = FrameReplayBuffer
            self.replay_buffer_kwargs.setdefault("storage", self.storage)
            if chosen.n_steps > 1:
                self.replay_buffer_kwargs |= {"n_steps": chosen.n_steps, "gamma": chosen.gamma}
        if not issubclass(self.replay_buffer_class, FrameReplayBuffer):
            raise ConfigError(
                f"replay_buffer_class must derive from FrameReplayBuffer, got {self.replay_buffer_class}."
            )
        if self.own_terms and self._given is None:
            raise ConfigError(description.unregistered_message(self.own_terms))
        self.policy_kwargs = {"settings": chosen, "image_size": self._augment.size}
        # Not kept among the keywords: its weights are saved with the policy's, and its text with the settings.
        self.policy_kwargs["contrast"] = self._given
        # A fixed weight is a temperature that no optimizer steps: it is saved and exported like a learned one.
        self.ent_coef = "auto"
        super()._setup_model()
        del self.policy_kwargs["contrast"]
        if chosen.compile:
            self.policy.compile_networks()
        assert self.log_ent_coef is not None
        weight = chosen.initial_temperature if chosen.ent_coef == "auto" else chosen.ent_coef
        self.log_ent_coef.data.copy_(torch.tensor([weight]).log())
        self.ent_coef_optimizer = self.policy.adam(
            [self.log_ent_coef], chosen.temperature_learning_rate, chosen.temperature_beta
        )
        self._setup_contrast()

    def _setup_contrast(self) -> None:
        """How many positives the objective gets, and the encoder's own optimizers on its gradient."""
        chosen, contrast = self.settings, self.policy.contrast
        self._positives = 0
        self.encoder_optimizer = self.contrast_optimizer = None
        if contrast is None:
            return
        self._positives = chosen.positives or contrast.positives_wanted or 1
        require_unlabelled(contrast, chosen.features, self._positives, chosen.batch_size)
        rate = self._encoder_rate(1.0)
        encoder, own = list(self.policy.encoder.parameters()), list(contrast.parameters())
        if chosen.joint_backward:
            # The critic's optimizer steps the encoder once, for the sum of both losses.
            self.contrast_optimizer = self.policy.adam(own, rate) if own else None
            return
        self.contrast_optimizer = self.policy.adam([*encoder, *own], rate)
        if chosen.encoder_steps == 2:
            self.encoder_optimizer = self.policy.adam(encoder, rate)

    @property
    def has_own_replay(self) -> bool:
        """Whether replay is what the agent makes by itself."""
        return self.replay_buffer_class is FrameReplayBuffer and set(self.replay_buffer_kwargs) <= {
            "storage",
            "n_steps",
            "gamma",
        }

    def set_up_for_playing(self) -> None:
        """Make the networks of an agent without an environment, and the smallest replay there is."""
        if self.target_entropy == "auto":
            assert isinstance(self.action_space, spaces.Box)
            self.target_entropy = float(-np.prod(self.action_space.shape).astype(np.float32))
        self.buffer_size = self.n_envs
        self._setup_model()
        self.buffer_size = self.settings.buffer_size

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

    @property
    def contrast(self) -> Composite | None:
        """The contrastive objective; None for "none"."""
        return self.policy.contrast

    # Acting ----------------------------------------------------------------------------------------------------------

    def _update_info_buffer(self, infos: list[dict[str, Any]], dones: Any = None) -> None:
        super()._update_info_buffer(infos, dones)
        for index, info in enumerate(infos):
            self.environment_steps += int(info.get("environment_steps", 1))
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
        for each in observations:
            require_observation(name, self.observation_space, each)
            if closely:
                require_contained(name, self.observation_space, each)

    def _setup_learn(
        self, total_timesteps: int, callback: Any = None, reset_num_timesteps: bool = True, *rest: Any, **settings: Any
    ) -> tuple[int, Any]:
        check_whole(0, total_timesteps=total_timesteps)
        if reset_num_timesteps:
            self.environment_steps = 0
        prepared = super()._setup_learn(total_timesteps, callback, reset_num_timesteps, *rest, **settings)
        assert self.env is not None
        self._is_guarded = self.env.has_attr("wrapper_names")
        self._look_at(self._last_obs, closely=True)
        return prepared

    # Learning --------------------------------------------------------------------------------------------------------

    def train(self, gradient_steps: int, batch_size: int = 64) -> None:
        """Sample and update `gradient_steps` times (SB3 calls it)."""
        self.policy.set_training_mode(True)
        self._set_learning_rates()
        values: dict[str, list[float | Tensor]] = {}
        for _ in range(gradient_steps):
            batch = self.replay_buffer.sample_views(
                batch_size, self._augment, self._positives, env=self._vec_normalize_env
            )
            for name, value in self.update(batch).items():
                values.setdefault(name, []).append(value)
        if not self._reads_late:
            for name, each in values.items():
                self.logger.record(f"train/{name}", float(np.mean(each)))  # type: ignore[arg-type]
        elif values:
            # Those of the call before: they have arrived by now.
            for name, value in (
                zip(self._logged[0], self._logged[1].read().tolist(), strict=True) if self._logged else ()
            ):
                self.logger.record(f"train/{name}", value)
            means = [torch.stack(each).mean() for each in values.values()]  # type: ignore[arg-type]
            self._logged = list(values), Fetched(torch.stack(means))
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")

    def _set_learning_rates(self) -> None:
        rate = float(self.lr_schedule(self._current_progress_remaining))
        encoder_rate = self._encoder_rate(self._current_progress_remaining)
        self.logger.record("train/learning_rate", rate)
        for optimizer, value in (
            (self.actor.optimizer, rate),
            (self.critic.optimizer, rate),
            (self.encoder_optimizer, encoder_rate),
            (self.contrast_optimizer, encoder_rate),
        ):
            for group in optimizer.param_groups if optimizer is not None else ():
                group["lr"] = value

    def learn(self, *arguments: Any, **settings: Any) -> Self:
        """Train as SB3 does."""
        super().learn(*arguments, **settings)
        self.settle()
        return self

    @property
    def _reads_late(self) -> bool:
        """Whether losses stay on the device, and what is not finite is told an update late."""
        return self.device.type in ("cuda", "meta")

    def settle(self) -> None:
        """Raise TrainingError if the last update left a step out; at once, where updates tell nothing themselves."""
        unread, self._unread = self._unread, None
        if unread is None:
            return
        bad, *norms = unread.found.read().tolist()
        if bad:
            for each, worst in zip(unread.watched, norms, strict=True):
                if not np.isfinite(worst):
                    raise TrainingError(self._trouble(each, unread.where))

    def update(self, batch: FrameBatch) -> dict[str, float | Tensor]:
        """One update on a batch; returns what it logs: numbers, on a GPU scalar tensors that nobody has waited for.

        Raises:
            TrainingError: if a loss or gradient is not finite; raised before the step it would have spoilt. On a GPU
                such a step is left out there, and the next update raises before its first step (or `settle` does).
        """
        chosen, number = self.settings, self._n_updates
        self._watched, self._bad = [], None
        act = number % chosen.actor_every == 0
        contrasting = self.policy.contrast is not None and number % chosen.contrast_every == 0
        logs: Logs = {}
        with self._autocast():
            target = self._target(batch)
            observations = self.policy.encoder.prepare(batch.observations)
            convolved: Maps | None
            if chosen.joint_backward:
                convolved = self._joint_step(batch, observations, target, contrasting, logs)
            else:
                self._critic_step(batch, observations, target, logs)
                # Nothing below changes the convolutions before the contrast does: actor and contrast share them.
                with torch.set_grad_enabled(contrasting):
                    convolved = self.policy.encoder.convolve(observations) if act or contrasting else None
            if act:
                assert convolved is not None
                self._actor_step(detached(convolved), logs)
            if number % chosen.target_every == 0:
                self._follow()
            if contrasting and not chosen.joint_backward:
                assert convolved is not None
                self._contrast_step(batch, self.policy.encoder.head(convolved), logs)
        if self._bad is not None:
            worst = [each.values.abs().amax().float() for each in self._watched]
            found = Fetched(torch.stack([self._bad.float(), *worst]))
            self._unread = Unread(self._where(), self._watched, found)
        self._n_updates += 1
        return logs

    @contextmanager
    def _autocast(self) -> Iterator[None]:
        device = self.device.type
        half = self.settings.precision == "bf16"
        with torch.autocast(device, torch.bfloat16) if half else without_autocast(device):
            yield

    @torch.no_grad()
    def _target(self, batch: FrameBatch) -> Tensor:
        """The value y (B, 1) that both Q functions are pulled to."""
        assert self.log_ent_coef is not None
        actor, next_observations = self.policy.actor, self.policy.encoder.prepare(batch.next_observations)
        features = actor.features_extractor.head(self.policy.encoder.convolve(next_observations))  # type: ignore[operator]
        mean, log_std = actor.distribution(features)
        action, log_density = sample_action(mean, log_std, torch.randn_like(mean))
        following = self.policy.key_encoder
        q = q_values(self.critic_target, following.head(following.convolve(next_observations)), action)
        value = q.min(1, keepdim=True).values - self.log_ent_coef.exp() * log_density
        discount = self.gamma if batch.discounts is None else batch.discounts
        return batch.rewards + (1 - batch.dones) * discount * value

    def _critic_loss(self, features: Tensor, batch: FrameBatch, target: Tensor) -> Tensor:
        q = q_values(self.critic, features, batch.actions.to(features.dtype))
        loss = (q - target).square().mean(0).sum()
        return 0.5 * loss if self.settings.twin_loss == "half" else loss

    def _critic_step(self, batch: FrameBatch, observations: Maps, target: Tensor, logs: Logs) -> None:
        encoder = self.policy.encoder
        with torch.set_grad_enabled(not self.settings.detach_encoder):
            convolved = encoder.convolve(observations)
        loss = self._critic_loss(encoder.head(convolved), batch, target)
        logs["critic_loss"] = self._descend("critic", loss, [self.critic.optimizer])

    def _actor_step(self, convolved: Maps, logs: Logs) -> None:
        assert self.log_ent_coef is not None
        assert isinstance(self.ent_coef_optimizer, torch.optim.Adam)
        assert isinstance(self.target_entropy, float)
        actor = self.policy.actor
        mean, log_std = actor.distribution(actor.features_extractor.head(convolved))  # type: ignore[operator]
        action, log_density = sample_action(mean, log_std, torch.randn_like(mean))
        with torch.no_grad():
            features = self.policy.encoder.head(convolved)
            alpha = self.log_ent_coef.exp()
        q = q_values(self.critic, features, action).min(1, keepdim=True).values
        loss = (alpha * log_density - q).mean()
        logs["actor_loss"] = self._descend("actor", loss, [actor.optimizer])
        if self.settings.ent_coef == "auto":
            temperature = (self.log_ent_coef.exp() * (-log_density - self.target_entropy).detach()).mean()
            logs["ent_coef_loss"] = self._descend("temperature", temperature, [self.ent_coef_optimizer])
        logs["ent_coef"], logs["entropy"] = self._read(alpha), -self._read(log_density.detach().mean())

    def _contrast_step(self, batch: FrameBatch, anchors: Tensor, logs: Logs) -> None:
        pairs = self._pairs(batch, anchors)
        outcome = self._outcome(pairs, logs)
        optimizers = [each for each in (self.encoder_optimizer, self.contrast_optimizer) if each is not None]
        self._descend("contrastive", outcome.loss, optimizers, pairs)
        gradients = [p.grad for o in optimizers for g in o.param_groups for p in g["params"] if p.grad is not None]
        norms = torch.stack(torch._foreach_norm(gradients))
        logs["contrast_grad_norm_squared"] = self._read(norms.square().sum())
        self._after_contrast()

    def _joint_step(self, batch: FrameBatch, observations: Maps, target: Tensor, contrasting: bool, logs: Logs) -> Maps:
        encoder = self.policy.encoder
        convolved = encoder.convolve(observations)
        features = encoder.head(convolved)
        kept = encoder.head(detached(convolved)) if self.settings.detach_encoder else features
        loss = self._critic_loss(kept, batch, target)
        logs["critic_loss"] = self._read(loss.detach())
        optimizers: list[torch.optim.Optimizer] = [self.critic.optimizer]
        pairs = None
        if contrasting:
            self._check_loss("critic", loss.detach())
            pairs = self._pairs(batch, features)
            loss = loss + self._outcome(pairs, logs).loss
            optimizers += [self.contrast_optimizer] if self.contrast_optimizer is not None else []
        self._descend("critic and contrastive" if contrasting else "critic", loss, optimizers, pairs)
        if contrasting:
            self._after_contrast()
        return convolved

    def _pairs(self, batch: FrameBatch, anchors: Tensor) -> Pairs:
        """Anchors (B, d) against keys (B, K, d) of the momentum encoder."""
        assert batch.positives is not None
        size, count = batch.positives.shape[:2]
        with torch.no_grad():
            following = self.policy.key_encoder
            keys = following.head(following.convolve(batch.positives.flatten(0, 1))).view(size, count, -1)
        dropped = duplicates(batch.stacks, count) if self.settings.exclude_duplicates else None
        return Pairs.cross(anchors, keys, dropped=None if dropped is None else sent(dropped, anchors.device))

    def _outcome(self, pairs: Pairs, logs: Logs) -> Outcome:
        assert self.policy.contrast is not None
        with without_autocast(self.device.type):
            outcome: Outcome = self.policy.contrast(pairs)
        for name, term in outcome.terms.items():
            self._check_loss(name, term.value)
            logs[f"contrast/{name}"] = self._read(term.value)
        logs["contrast_loss"] = self._check_loss("contrastive", outcome.loss.detach())
        self.outcome = Outcome(outcome.loss.detach(), outcome.terms)
        return outcome

    def _after_contrast(self) -> None:
        assert self.policy.contrast is not None
        done = self._n_updates // self.settings.contrast_every + 1
        self.policy.contrast.after_step(self._encoder_rate(self._current_progress_remaining), done)

    @torch.no_grad()
    def _follow(self) -> None:
        """Momentum copies: Qbar with tau, the encoder with encoder_tau."""
        for online, copy, tau in (
            (self.critic.q_networks, self.critic_target.q_networks, self.settings.tau),
            ([self.policy.encoder], [self.policy.key_encoder], self.settings.encoder_tau),
        ):
            pairs = zip(online, copy, strict=True)
            parameters = [(p, q) for a, b in pairs for p, q in zip(a.parameters(), b.parameters(), strict=True)]
            torch._foreach_lerp_([q for _, q in parameters], [p for p, _ in parameters], tau)

    def _descend(
        self, name: str, loss: Tensor, optimizers: Sequence[torch.optim.Optimizer], pairs: Pairs | None = None
    ) -> float | Tensor:
        """Backward and step, unless loss or gradient is not finite."""
        value = self._check_loss(name, loss.detach())
        parameters = list({id(p): p for o in optimizers for g in o.param_groups for p in g["params"]}.values())
        for parameter in parameters:
            parameter.grad = None
        # Only these are asked for: the actor's loss costs no gradient of the critic.
        wanted = [parameter for parameter in parameters if parameter.requires_grad]
        loss.backward(inputs=wanted)
        self._check_gradient(name, wanted, pairs)
        self.settle()  # the update before, ahead of the first step of this one
        for optimizer in optimizers:
            if self._bad is not None:
                skip_if(optimizer, self._bad)
            optimizer.step()
        return value

    def _where(self) -> str:
        return f"at update {self._n_updates} ({self.environment_steps} environment steps)"

    def _read(self, value: Tensor) -> float | Tensor:
        """The number, or on a GPU the tensor that nobody waits for."""
        return value.detach() if self._reads_late else float(value)

    def _watch(self, watched: Watched) -> None:
        """Raise if it is not finite; on a GPU let every step from here on leave itself out."""
        fine = watched.values.isfinite().all()
        if self._reads_late:
            self._watched.append(watched)
            self._bad = ~fine if self._bad is None else self._bad | ~fine
        elif not bool(fine):
            raise TrainingError(self._trouble(watched, self._where()))

    def _check_loss(self, name: str, loss: Tensor) -> float | Tensor:
        value = self._read(loss)
        if isinstance(value, Tensor) or not np.isfinite(value):
            self._watch(Watched(name, loss.detach()))
        return value

    def _check_gradient(self, name: str, parameters: list[Tensor], pairs: Pairs | None) -> None:
        having = [parameter for parameter in parameters if parameter.grad is not None]
        gradients = [parameter.grad for parameter in having if parameter.grad is not None]
        norms = torch.stack(torch._foreach_norm(gradients, float("inf")))
        self._watch(Watched(name, norms, having, pairs))

    def _trouble(self, watched: Watched, where: str) -> str:
        """What is not finite, where it comes from, and what helps; this runs once, so it may read."""
        if watched.parameters is None:
            return (
                f"the {watched.name} loss is {float(watched.values)} {where}; the step was not taken. Lower the "
                "learning rate, or look at the rewards and observations of the environment."
            )
        names = {id(parameter): label for label, parameter in self.policy.named_parameters()}
        fine = watched.values.isfinite().tolist()
        guilty = [
            names.get(id(p), "the temperature") for p, good in zip(watched.parameters, fine, strict=True) if not good
        ]
        terms: list[str] = []
        if self.policy.contrast is not None and watched.pairs is not None:
            terms = list(terms_with_bad_gradient(relate(watched.pairs), self.policy.contrast))
        source = f" It comes from the term {', '.join(terms)}." if terms else ""
        for parameter in watched.parameters:
            parameter.grad = None
        return (
            f"the gradient of the {watched.name} loss is not finite {where}, first in {guilty[0]}; the step was not "
            f"taken.{source} Lower the learning rate, or use precision='float32'."
        )

    # Saving ----------------------------------------------------------------------------------------------------------

    def _get_torch_save_params(self) -> tuple[list[str], list[str]]:
        names, variables = super()._get_torch_save_params()
        own = ("encoder_optimizer", "contrast_optimizer")
        return names + [name for name in own if getattr(self, name) is not None], variables

    def _excluded_save_params(self) -> list[str]:
        own = ("_augment", "_given", "outcome", "encoder_optimizer", "contrast_optimizer")
        unread = ("_watched", "_bad", "_unread", "_logged", "_is_guarded")
        return [*super()._excluded_save_params(), *own, *unread]

    @classmethod
    def load(cls, path: Any, *arguments: Any, objective: Objective | Composite | None = None, **settings: Any) -> Self:
        """Load what `save` wrote, as SB3 does.

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
        with description.explained(path, objective):
            return super().load(path, *arguments, **settings)

    def save(self, path: Any, exclude: Iterable[str] | None = None, include: Iterable[str] | None = None) -> None:
        """Save as SB3 does, but to a temporary file first: the old file stays until the new one is on the disk.

        Replay and generators are not in it; see `snapshots.save` for everything a bit-exact continuation needs.
        """
        self.settle()
        if not isinstance(path, (str, pathlib.Path)):
            super().save(path, exclude, include)
            return
        final = pathlib.Path(path)
        final = final if final.suffix else final.with_suffix(".zip")
        with replacing(final) as temporary:
            super().save(temporary, exclude, include)
            description.add_to(temporary, self)

    def save_replay_buffer(self, path: Any) -> None:
        """Save the replay buffer as SB3 does, atomically."""
        if not isinstance(path, (str, pathlib.Path)):
            super().save_replay_buffer(path)
            return
        final = pathlib.Path(path)
        final = final if final.suffix else final.with_suffix(".pkl")
        with replacing(final) as temporary:
            super().save_replay_buffer(temporary)


def pixels_of(env: VecEnv) -> VecEnv:
    """The images in an environment's dictionaries; other environments as they are.

    Raises:
        ConfigError: where not exactly one entry is an image.
    """
    space = env.observation_space
    if not isinstance(space, spaces.Dict):
        return env
    images = image_keys(space)
    if len(images) != 1:
        raise ConfigError(
            f"ContrastiveSAC learns from one image in a dictionary, this one has {len(images)} of them among "
            f"{', '.join(space.spaces)}: leave one (gymnasium.wrappers.FilterObservation)."
        )
    others = [key for key in space.spaces if key not in images]
    if others:
        warnings.warn(
            f"ContrastiveSAC learns from the image {images[0]!r} alone: it does not see {', '.join(others)}. "
            "stable_baselines3's SAC with a MultiInputPolicy and ContrastiveCallback sees all.",
            RuntimeWarning,
            stacklevel=4,
        )
    return VecExtractDictObs(env, images[0])


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
