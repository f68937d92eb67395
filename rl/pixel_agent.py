"""The base of the agents: settings, environments, replay, the contrastive objective, and saving.

`sac.py` and `drq.py` hold the algorithms: how to act, and how to update critic, actor and encoder.
"""

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor, nn

from dipole.core.objectives.gather import all_gather_pairs
from dipole.core.objectives.objective import Composite, Objective, Outcome
from dipole.core.objectives.pairs import Pairs
from dipole.core.objectives.term_values import without_autocast
from dipole.core.train.config import GRAPHED
from dipole.core.train.update import terms_with_bad_gradient
from dipole.core.utils.errors import ConfigError, TrainingError
from dipole.core.utils.memory import check_fits
from dipole.core.utils.transfer import to_device
from dipole.rl import saved_agent
from dipole.rl import settings as presets
from dipole.rl.arguments import check_seed, plain
from dipole.rl.contrast import (
    bf16_is_native,
    duplicates,
    fit,
    given_composite,
    largest,
    require_unlabelled,
    rollout_length,
    rollouts_left,
    unregistered,
)
from dipole.rl.inputs import CheckedEnvironments, require_policy, require_size, seen_by
from dipole.rl.networks import PixelEncoder
from dipole.rl.replay import FrameReplayBuffer
from dipole.rl.sampling import Augmentation, Centre, FrameBatch, choose, one_number
from dipole.rl.saved_agent import SavedAgent, check_passed_on
from dipole.rl.sb3_names import without_sb3_names
from dipole.rl.seen import parts

Logs = dict[str, Tensor]
"""Logged values of an update: name -> a detached scalar on the device."""


class PixelAgent(SavedAgent, CheckedEnvironments):
    """An off-policy algorithm of SB3 on images and vectors, with any objective on its encoder.

    Every setting is an attribute (`settings.attributes`), which SB3's own code and ours both read. A subclass names its
    base of SB3 after this class, and defines `algorithm`, `policy_aliases` and `_update_networks`.

    Args:
        policy: as in `ContrastiveSAC`, and so for the others.
        env: of gymnasium, or its name.
        objective: text, Objective or Composite.
        preset: one of the algorithm's. Its own by default.
        augmentation: of the images.
        storage: of the replay buffer.
        settings: fields of `settings.AgentSettings`, and the keywords of SB3 in `passed_on`.

    Raises:
        ConfigError: for another algorithm than that of the class, and as in `ContrastiveSAC`.
    """

    policy: Any
    replay_buffer: FrameReplayBuffer
    task: dict[str, Any] | None = None  # the environment's name and keywords, where they are known
    outcome: Outcome | None = None
    encoder_optimizer: torch.optim.Adam | None = None
    contrast_optimizer: torch.optim.Adam | None = None
    before_noise: dict[str, Any] | None = None  # random states before gSDE drew for a rollout that has not begun
    _updates_left: int | None = None

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
        sb3 = check_passed_on({name: plain(settings.pop(name)) for name in self.passed_on if name in settings})
        self._given: Composite | None = None
        if objective is not None and not isinstance(objective, str):
            self._given = given_composite(objective)
            objective = str(self._given)
        # Terms that no text can name: loading asks for their modules.
        self.own_terms = unregistered(self._given)
        if objective is not None:
            settings["objective"] = objective
        if preset is None:
            preset = presets.DEFAULT[self.algorithm]
        asked = settings.setdefault("algorithm", self.algorithm)
        if asked != self.algorithm:
            told = f"{type(self).__name__} is an agent of {self.algorithm!r}, not {asked!r}."
            raise ConfigError(f"{told} {saved_agent.CLASSES}")
        chosen = presets.from_preset(preset, without_sb3_names(settings), (*self.passed_on, "augmentation", "storage"))
        self.inputs = chosen.inputs
        self.augmentation = presets.augmentation(preset) if augmentation is None else augmentation
        self.storage = storage
        self.faults: list[dict[str, Any]] = []
        if env is not None or _init_setup_model:
            env = self._shown(env, int(sb3.get("verbose", 0)))
            require_policy(policy, type(self).__name__, seen_by(type(self).__name__, env.observation_space))
        if isinstance(policy, str):
            policy = self.policy_aliases["CnnPolicy"]
        super().__init__(policy, env, **sb3, _init_setup_model=False)  # type: ignore[arg-type, call-arg]
        for name in presets.attributes(self.algorithm):
            setattr(self, name, getattr(chosen, name))
        if _init_setup_model:
            self._setup_model()

    def _setup_model(self) -> None:
        self.seen = seen_by(type(self).__name__, self.observation_space)
        some = torch.empty(0, device=self.device)
        check_fits("a batch of images", (self.batch_size, *self.seen.shape), some, "a copy")
        self._augment: Augmentation = Centre(1)
        if self.seen.image is not None:
            channels, height, width = self.seen.shape
            self._augment = choose(
                self.augmentation, channels, one_number(height, width), self.image_size, self.crop_inclusive
            )
            require_size(self._augment.size, self.layers)
        if self.precision == "bf16" and not bf16_is_native(self.device):
            warnings.warn(
                f"precision='bf16' is emulated on this {self.device.type} (neither avx512_bf16 nor AMX) and will be "
                "slower than 'float32'. Choose precision='float32'.",
                RuntimeWarning,
                stacklevel=2,
            )
        if self.own_terms and self._given is None:
            raise ConfigError(saved_agent.unregistered_message(self.own_terms))
        self.replay_buffer_class = self.replay_buffer_class or FrameReplayBuffer
        made = self.replay_buffer_class
        if not isinstance(made, type) or not issubclass(made, FrameReplayBuffer):
            raise ConfigError(f"replay_buffer_class must derive from FrameReplayBuffer, got {made!r}.")
        self.policy_kwargs = self.policy_keywords()
        replay_keywords = self.replay_buffer_kwargs
        with warnings.catch_warnings():
            # SB3 sets up returns of n steps for its own replay only. Ours gets n and gamma before each draw.
            warnings.filterwarnings("ignore", message="`n_steps=")
            try:
                self.replay_buffer_kwargs = {"storage": self.storage, **replay_keywords}
                super()._setup_model()
            except TypeError as error:
                if not replay_keywords:
                    raise
                said = f"replay_buffer_kwargs {replay_keywords!r} do not fit {made.__name__}: {error}."
                raise ConfigError(said) from error
        self.replay_buffer_kwargs = replay_keywords
        if self.n_envs > 1 and rollout_length(self) is None:
            raise ConfigError(f"train_freq counts episodes of one environment, here are {self.n_envs}: count steps.")
        contrast = given_composite(self.objective) if self._given is None else self._given
        if contrast is not None:
            contrast = fit(contrast, self.features, self.bilinear_init).to(self.device)
        self.policy.contrast = contrast
        if self.compile:
            self._compile_networks()
        self._setup_contrast()

    def _compile_networks(self) -> None:
        """Compile both halves of each encoder. Weights and their names stay."""
        for encoder in (self.policy.encoder, self.policy.key_encoder, self.policy.actor.features_extractor):
            encoder.convolve, encoder.head = self._compiled(encoder.convolve), self._compiled(encoder.head)

    def _compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        mode = self.compile if isinstance(self.compile, str) else None
        return torch.compile(function, dynamic=False, mode=mode)

    def _setup_contrast(self) -> None:
        """Set how many positives the objective gets, and make the optimizers of what it learns."""
        contrast = self.contrast
        self._positives = 0
        self.encoder_optimizer = self.contrast_optimizer = None
        if contrast is not None:
            if self.seen.image is None:
                raise ConfigError(
                    f"{type(self).__name__} sees no image here (a Box of uint8 with three dimensions, also if it is "
                    "grey: keep_dim=True), and the contrast is of images: objective='none' trains it on vectors alone "
                    "(--set objective=none)."
                )
            self._positives = self.positives or contrast.positives_wanted or 1
            require_unlabelled(contrast, self.features, self._positives, self.batch_size)
            self._setup_contrast_optimizers(list(contrast.parameters()), self._encoder_rate(1.0))

    def _setup_contrast_optimizers(self, own: list[nn.Parameter], rate: float) -> None:
        """Make an optimizer of the objective's own parameters. The critic's one steps the encoder."""
        if own:
            self.contrast_optimizer = torch.optim.Adam(own, rate, fused=True)

    def set_parameters(self, *arguments: Any, **settings: Any) -> None:
        with saved_agent.readable("these parameters do not fit the agent"):
            super().set_parameters(*arguments, **settings)

    def set_random_seed(self, seed: int | None = None) -> None:
        super().set_random_seed(check_seed(seed))
        if seed is not None and self.replay_buffer is not None:  # otherwise NumPy's global generator seeds it
            self.replay_buffer.rng = np.random.default_rng(seed)

    def parts(self) -> dict[str, nn.Module]:
        """Return the modules that a run saves."""
        policy = self.policy
        return {"actor": policy.actor, "critic": policy.critic, "critic_target": policy.critic_target}

    @property
    def contrast(self) -> Composite | None:
        """The contrastive objective, or None for "none"."""
        found: Composite | None = self.policy.contrast
        return found

    def _adopt(self, objective: Composite | None, **changes: Any) -> None:
        """Take another objective with its weights, and settings that no network depends on. Optimizers start anew."""
        vars(self)["objective"] = "none" if objective is None else str(objective)
        for name, value in changes.items():
            setattr(self, name, value)
        self.own_terms = unregistered(objective)
        self.policy.contrast = objective
        self._setup_lr_schedule()
        self._setup_contrast()

    def predict(self, observation: Any, *rest: Any, **settings: Any) -> tuple[np.ndarray, Any]:
        self._mark_step()
        try:
            return super().predict(observation, *rest, **settings)
        except (ValueError, AssertionError, AttributeError, KeyError) as error:
            shape, given = getattr(observation, "shape", type(observation).__name__), parts(observation)
            wanted = {key: each.shape or () for key, each in parts(self.observation_space).items()}
            if all(getattr(given.get(key), "shape", ())[-len(each) :] == each for key, each in wanted.items()):
                raise  # of the networks
            raise ConfigError(f"predict needs an observation of {self.observation_space}, got {shape}.") from error

    def _mark_step(self) -> None:
        """Let CUDA graphs overwrite what they returned before."""
        if self.compile in GRAPHED:
            torch.compiler.cudagraph_mark_step_begin()

    def train(self, gradient_steps: int, batch_size: int = 64) -> None:
        self.policy.set_training_mode(True)
        self._set_optimizers()
        found: dict[str, list[Tensor]] = {}
        later, rollouts, length = None, rollouts_left(self), rollout_length(self)  # updates of later rollouts
        if rollouts is not None and length is not None:
            later = rollouts * (self.gradient_steps if self.gradient_steps >= 0 else length)
        for number in range(gradient_steps):
            self._updates_left = None if later is None else later + gradient_steps - number - 1
            for name, value in self.update(self._sample(batch_size)).items():
                found.setdefault(name, []).append(value)
        self._updates_left = None
        if found:
            means = torch.stack([torch.stack(each).float().mean() for each in found.values()]).tolist()
            for name, value in zip(found, means, strict=True):
                self.logger.record(f"train/{name}", value)
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")

    def _sample(self, batch_size: int, times: tuple[int, int] = (1, 1)) -> FrameBatch:
        replay = self.replay_buffer
        replay.n_steps, replay.gamma = self.n_steps, self.gamma  # which can change
        return replay.sample_views(batch_size, self._augment, self._positives, self._vec_normalize_env, times)

    def peek(self, batch_size: int, rng: np.random.Generator | None = None) -> FrameBatch:
        """Return a batch with positives that no update gets, so that training is not disturbed.

        Args:
            batch_size: B >= 1.
            rng: draws it. By default a copy of replay's.
        """
        replay = self.replay_buffer
        own = replay.rng
        replay.rng = rng or copy.deepcopy(own)
        with torch.random.fork_rng(devices=[]):  # which an augmentation of the user may draw from
            batch = replay.sample_views(batch_size, self._augment, max(self._positives, 1))
        replay.rng = own
        return batch

    def _setup_lr_schedule(self) -> None:
        super()._setup_lr_schedule()
        self._rate(1.0)

    def _rate(self, progress: float) -> float:
        """Return the learning rate. Raise ConfigError if its function gives none, or a negative one."""
        try:
            rate = float(self.lr_schedule(progress))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"learning_rate is no function of the remaining progress, 1 to 0: {error}.") from error
        if not 0 <= rate <= 10:
            raise ConfigError(
                f"learning_rate must be a number from 0 to 10, and its function gives {rate:g} at a remaining progress "
                f"of {progress:g}."
            )
        return rate

    def _encoder_rate(self, progress: float) -> float:
        if self.encoder_learning_rate is None:
            return self._rate(progress)
        return float(self.encoder_learning_rate)

    def _set_optimizers(self) -> None:
        """Set the optimizers to the agent's settings, because a loaded state brings its own."""
        rate = self._rate(self._current_progress_remaining)
        encoder_rate = self._encoder_rate(self._current_progress_remaining)
        self.logger.record("train/learning_rate", rate)
        for optimizer in (self.policy.actor.optimizer, self.policy.critic.optimizer):
            set_adam(optimizer, rate, self.beta)
        for optimizer in (self.encoder_optimizer, self.contrast_optimizer):
            set_adam(optimizer, encoder_rate, self.beta)

    def update(self, batch: FrameBatch) -> Logs:
        """Return what one update logs, name -> a tensor () on the device.

        Args:
            batch: drawn by replay.

        Raises:
            TrainingError: a loss or gradient is not finite, before that optimizer step.
        """
        self._mark_step()
        contrasting = self.contrast is not None and self._n_updates % self.contrast_every == 0
        logs: Logs = {}
        device = self.device.type
        full = without_autocast(device) if self.precision != "bf16" else torch.autocast(device, torch.bfloat16)
        with full:
            self._update_networks(batch, contrasting, logs)
        self._n_updates += 1
        return logs

    def _update_networks(self, batch: FrameBatch, contrasting: bool, logs: Logs) -> None:
        """Step all networks on a batch, with the contrastive objective if `contrasting`. Add the losses to `logs`."""
        raise NotImplementedError

    def _returns(self, batch: FrameBatch, value: Tensor) -> Tensor:
        """Return y = R + (1 - done) discount value, (B, 1). The discount is gamma, or gamma^m of m rewards."""
        discount = self.gamma if batch.discounts is None else batch.discounts
        return batch.rewards + (1 - batch.dones) * discount * value

    def _minimise(
        self,
        losses: Mapping[str, Tensor],
        optimizers: Sequence[torch.optim.Optimizer | None],
        pairs: Pairs | None = None,
    ) -> None:
        """Step optimizers on a sum of losses () by name. Raise TrainingError before the step if one is not finite.

        A contrastive loss is called "contrastive", and was computed from `pairs`. Its objective hears of the step.
        """
        stepped = [each for each in optimizers if each is not None]
        parameters = list({id(p): p for o in stepped for g in o.param_groups for p in g["params"]}.values())
        for parameter in parameters:
            parameter.grad = None
        loss: Any = sum(losses.values())
        # Only these get a gradient: the actor's loss costs none of the critic.
        loss.backward(inputs=[parameter for parameter in parameters if parameter.requires_grad])
        wanted = [parameter for parameter in parameters if parameter.grad is not None]
        norms = largest([parameter.grad for parameter in wanted if parameter.grad is not None])
        if not bool(torch.cat([loss.detach().reshape(1), norms]).isfinite().all()):
            raise TrainingError(self._trouble(losses, wanted, norms, pairs))
        for optimizer in stepped:
            optimizer.step()
        if pairs is not None:
            assert self.contrast is not None
            done = self._n_updates // self.contrast_every + 1
            left = self._updates_left
            total = None if left is None else (self._n_updates + left) // self.contrast_every + 1
            self.contrast.after_step(self._encoder_rate(self._current_progress_remaining), done, total)

    def _step_critic(self, loss: Tensor, batch: FrameBatch, anchors: Tensor, contrasting: bool, logs: Logs) -> None:
        """Step encoder, Q functions and, if it takes part, the objective on the sum of their losses."""
        logs["critic_loss"] = loss.detach()
        if not contrasting:
            self._minimise({"critic": loss}, [self.policy.critic.optimizer])
            return
        pairs = self.make_pairs(batch, anchors)
        losses = {"critic": loss, "contrastive": self._contrastive_loss(pairs, logs)}
        self._minimise(losses, [self.policy.critic.optimizer, self.contrast_optimizer], pairs)

    def _trouble(
        self, losses: Mapping[str, Tensor], parameters: list[Tensor], norms: Tensor, pairs: Pairs | None
    ) -> str:
        """Say what is not finite, where it comes from, and what helps."""
        where = f"at update {self._n_updates} ({self.environment_steps} environment steps)"
        terms = self.outcome.terms if self.outcome is not None and pairs is not None else {}
        for name, value in [*((name, term.value) for name, term in terms.items()), *losses.items()]:
            if not bool(value.isfinite()):
                return (
                    f"the {name} loss is {float(value.detach())} {where}. The step was not taken. Lower the learning "
                    "rate, or look at the rewards and observations of the environment."
                )
        names = {id(parameter): label for label, parameter in self.policy.named_parameters()}
        first = names.get(id(parameters[norms.isfinite().tolist().index(False)]), "the temperature")
        source = ""
        if self.contrast is not None and pairs is not None:
            guilty = ", ".join(terms_with_bad_gradient(all_gather_pairs(pairs), self.contrast))
            if guilty:
                source = f" It comes from the term {guilty}."
        for parameter in parameters:
            parameter.grad = None
        return (
            f"the gradient of the {' and '.join(losses)} loss is not finite {where}, first in {first}. The step was "
            f"not taken.{source} Lower the learning rate, or use precision='float32'."
        )

    def anchors(self, images: Tensor) -> Tensor:
        """Return the embeddings (B, d) that the contrast compares.

        Args:
            images: views, (B, C, h, w).
        """
        encoder: PixelEncoder = self.policy.encoder
        return encoder.head(encoder.convolve(images))

    def make_pairs(self, batch: FrameBatch, anchors: Tensor) -> Pairs:
        """Return anchors (B, d) paired with the momentum encoder's keys (B, K, d).

        Args:
            batch: whose positives are encoded.
            anchors: (B, d).
        """
        assert batch.positives is not None
        size, count = batch.positives.shape[:2]
        with torch.no_grad():
            key_encoder = self.policy.key_encoder
            keys = key_encoder.head(key_encoder.convolve(batch.positives.flatten(0, 1))).view(size, count, -1)
        if self.compile in GRAPHED:
            anchors, keys = anchors.clone(), keys.clone()  # a CUDA graph overwrites what it returned
        ignored = duplicates(batch.stacks, count) if self.exclude_duplicates else None
        if ignored is not None:
            ignored = to_device(ignored, anchors.device)
        return Pairs.cross(anchors, keys, ignored=ignored)

    def _contrastive_loss(self, pairs: Pairs, logs: Logs) -> Tensor:
        """Return the objective's loss, (), computed in full precision. Add each term to `logs`."""
        assert self.contrast is not None
        with without_autocast(self.device.type):
            outcome: Outcome = self.contrast(pairs)
        logs |= {f"contrast/{name}": term.value.detach() for name, term in outcome.terms.items()}
        logs["contrast_loss"] = outcome.loss.detach()
        self.outcome = Outcome(outcome.loss.detach(), outcome.terms)
        return outcome.loss


def set_adam(optimizer: torch.optim.Optimizer | None, rate: float, beta: float) -> None:
    """Set the learning rate and the first decay of Adam, where there is an optimizer."""
    for group in optimizer.param_groups if optimizer is not None else ():
        group["lr"], group["betas"] = rate, (beta, 0.999)
