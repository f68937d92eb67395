"""A Rainbow-like DQN with a contrastive auxiliary objective, as a subclass of SB3's DQN."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from gymnasium import spaces
from stable_baselines3 import DQN
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.type_aliases import Schedule
from torch import Tensor, nn

from dipole.core.objectives.objective import Composite
from dipole.core.utils.errors import ConfigError
from dipole.rl import rainbow
from dipole.rl import settings as presets
from dipole.rl.augmentation import Centre
from dipole.rl.pixel_agent import Logs, PixelAgent
from dipole.rl.policy import Contrasted, compile_encoders
from dipole.rl.prioritized import PrioritizedFrameReplayBuffer
from dipole.rl.rainbow import RainbowPolicy
from dipole.rl.replay import FrameBatch, FrameReplayBuffer
from dipole.rl.seen import joined


def project(values: Tensor, chances: Tensor, support: Tensor) -> Tensor:
    """A distribution on other atoms, put back on the support (Bellemare et al. 2017, eq. 7).

        m_i = sum_j [1 - |clip(v_j) - z_i| / dz]_0^1 p_j

    Args:
        values: (B, N) v, where the mass lies.
        chances: (B, N) p.
        support: (N,) z, equally spaced.

    Returns:
        m (B, N).
    """
    distance = (values.clamp(float(support[0]), float(support[-1])).unsqueeze(2) - support).abs()  # (B, j, i)
    shares = (1 - distance / (support[1] - support[0])).clamp(0, 1)
    return (shares * chances.unsqueeze(2)).sum(1)


def quantile_loss(quantiles: Tensor, targets: Tensor) -> Tensor:
    """Huber quantile loss (Dabney et al. 2018, eq. 10), one for each row.

        sum_i 1/N' sum_j |tau_i - 1{u_ij < 0}| huber(u_ij),  u_ij = targets_j - quantiles_i,  tau_i = (i + 1/2) / N

    Args:
        quantiles: (B, N). targets: (B, N').

    Returns:
        (B,).
    """
    count = quantiles.shape[1]
    tau = (torch.arange(count, device=quantiles.device, dtype=quantiles.dtype) + 0.5) / count
    error = targets.unsqueeze(1) - quantiles.unsqueeze(2)  # (B, i, j)
    huber = torch.where(error.abs() <= 1, 0.5 * error.square(), error.abs() - 0.5)
    return ((tau.unsqueeze(1) - (error.detach() < 0).to(tau.dtype)).abs() * huber).mean(2).sum(1)


class BranchEncoder(rainbow.BranchEncoder):
    """See `rainbow.BranchEncoder`; ConfigError for images that are too small for the convolutions."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        try:
            super().__init__(*arguments, **settings)
        except ValueError as error:
            raise ConfigError(f"{error} Render larger ones, or choose architecture='uniform'.") from None


class ContrastiveDQNPolicy(Contrasted, RainbowPolicy):
    """The networks of `RainbowPolicy` and the contrastive objective.

    Args:
        settings: all of `Settings`; SB3 passes spaces and schedule.
        image_size: what the network sees.
        contrast: the objective; by default it is built from the settings.
    """

    encoder_class = BranchEncoder

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Discrete,
        lr_schedule: Schedule,
        settings: presets.Settings,
        image_size: int | tuple[int, int],
        contrast: Composite | None = None,
    ) -> None:
        self.settings = settings
        super().__init__(observation_space, action_space, lr_schedule, **policy_keywords(settings, image_size))
        self.hold(contrast)

    def compile_networks(self) -> None:
        """Let `torch.compile` fuse what an update calls; weights and their names stay as they are."""
        compile_encoders(self.settings, self.encoder, self.key_encoder)


def policy_keywords(settings: presets.Settings, image_size: int | tuple[int, int]) -> dict[str, Any]:
    """Keywords of `RainbowPolicy`."""
    return {
        "encoder": {
            "features_dim": settings.features,
            "image_size": image_size,
            "architecture": settings.architecture,
            "layers": settings.layers,
            "filters": settings.filters,
            "hidden": settings.hidden[0],
        },
        "values": {
            "hidden": list(settings.hidden),
            "distribution": settings.distribution,
            "atoms": settings.atoms,
            "v_min": settings.v_min,
            "v_max": settings.v_max,
            "dueling": settings.dueling,
            "noisy": settings.noisy,
            "activation": settings.activation,
        },
        "beta": settings.beta,
        "epsilon": settings.adam_epsilon,
    }


class ContrastiveDQN(PixelAgent, DQN):
    """Rainbow (Hessel et al. 2018) for discrete actions, with any contrastive objective on its encoder (CURL, App. E).

    One update on a batch that is drawn by priority (w: importance weights):

        a* = argmax_a E Z(x', a)                          of the online network (double), or of the target network
        y = sum_{j < n} gamma^j r_{t+j} + gamma^n (1 - done) Zbar(x', a*)
        mean_b w_b loss(Z(x, a), y) + objective(anchors = encoder(x~), positives = encoder_bar(x+))  -> Z, encoder, W

    loss is the cross-entropy of the projected categories (c51; Bellemare et al. 2017, Eq. 7), the Huber quantile loss
    (Dabney et al. 2018, Eq. 10), or Huber's of expectations. Values see the stored observations; anchors x~ and
    positives x+ are independent random views of them. The target network is copied every `target_every` updates (with
    `tau`), the momentum encoder follows with `encoder_tau`.

    Args:
        policy: "CnnPolicy"; of a dictionary also "MultiInputPolicy", of vectors "MlpPolicy", which are the same here.
        env: an environment (its id, an instance or a VecEnv) of uint8 images, vectors or a dictionary of both, with
            discrete actions.
        objective: text, Objective or Composite, as in `ContrastiveSAC`; "none" is the agent without a contrast.
        preset: "rainbow", the data-efficient agent of CURL's table and the default.
        augmentation: of anchors and positives; "shift" by default.
        storage: where replay keeps its frames: "host", "device", "disk", or "auto" (on a GPU where they fit).
        settings: any other field of `settings.Settings` that "dqn" has (double, dueling, noisy, distribution,
            prioritized, n_steps, ...), and SB3's keywords but action_noise.

    Raises:
        ConfigError: for a setting or environment that does not fit.
        SpecError: for a wrong objective text.
        OptionError: a batch of images would not fit into memory.
        TrainingError: replay cannot fit into memory; from `learn`, a loss or gradient is not finite.
    """

    algorithm: ClassVar[presets.AlgorithmName] = "dqn"
    passed_on: ClassVar[tuple[str, ...]] = tuple(name for name in PixelAgent.passed_on if name != "action_noise")
    counted: ClassVar[tuple[str, ...]] = ("exploration_rate",)
    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {"CnnPolicy": ContrastiveDQNPolicy}
    policy: ContrastiveDQNPolicy

    @classmethod
    def _sb3_keywords(cls, chosen: presets.Settings) -> dict[str, Any]:
        return presets.sb3_keywords(chosen) | {
            "target_update_interval": chosen.target_every,
            "exploration_fraction": chosen.exploration_fraction,
            "exploration_initial_eps": chosen.exploration_start,
            "exploration_final_eps": chosen.exploration_end,
            "max_grad_norm": chosen.gradient_clip,
        }

    @classmethod
    def _require_actions(cls, space: spaces.Space[Any]) -> None:
        if not isinstance(space, spaces.Discrete):
            raise ConfigError(
                f"{cls.__name__} needs discrete actions, got {space}. For continuous ones: ContrastiveSAC or "
                "ContrastiveDrQ (rl.algorithm = 'sac' or 'drq')."
            )
        if space.start:
            raise ConfigError(
                f"{cls.__name__} needs actions that are counted from 0, got {space}: wrap the environment "
                f"(gymnasium.wrappers.TransformAction, action + {space.start}, spaces.Discrete({space.n}))."
            )

    def _own_replay(self) -> tuple[type[FrameReplayBuffer], dict[str, Any]]:
        chosen = self.settings
        kind, keywords = super()._own_replay()
        if not chosen.prioritized:
            return kind, keywords
        return PrioritizedFrameReplayBuffer, {
            **keywords,
            "exponent": chosen.priority_exponent,
            "beta": chosen.importance_start,
        }

    def parts(self) -> dict[str, nn.Module]:
        policy = self.policy
        return {"q_net": policy.q_net, "q_net_target": policy.q_net_target, "key_encoder": policy.key_encoder}

    def _optimizers(self) -> Sequence[torch.optim.Optimizer]:
        return (self.policy.optimizer,)

    @property
    def largest_gradient(self) -> float:
        """Gradients are scaled down to this norm."""
        return self.settings.gradient_clip

    def _on_step(self) -> None:
        """Noisy layers explore alone; without them random actions become rarer, as in SB3."""
        progress = self._current_progress_remaining
        self.exploration_rate = 0.0 if self.settings.noisy else float(self.exploration_schedule(progress))
        self.logger.record("rollout/exploration_rate", self.exploration_rate)

    def _sample(self, batch_size: int) -> FrameBatch:
        buffer, chosen = self.replay_buffer, self.settings
        if isinstance(buffer, PrioritizedFrameReplayBuffer):
            buffer.beta = 1 - (1 - chosen.importance_start) * self._current_progress_remaining
        return buffer.sample_views(
            batch_size,
            self._augment,
            self._positives + 1 if self._positives else 0,  # the first view is the anchors'
            env=self._vec_normalize_env,
            shown=Centre(self._augment.size),
        )

    def _steps(self, batch: FrameBatch, contrasting: bool, logs: Logs) -> None:
        chosen, encoder = self.settings, self.policy.encoder
        self.policy.q_net.draw_noise()
        self.policy.q_net_target.draw_noise()
        losses, errors = self._errors(batch)
        loss = (losses if batch.weights is None else batch.weights.squeeze(1) * losses).mean()
        anchors = losses
        if contrasting:
            assert batch.positives is not None
            anchors = encoder.head(encoder.convolve(batch.positives[:, 0]))
            batch = dataclasses.replace(batch, positives=batch.positives[:, 1:])
        self._sum_step("value", loss, [self.policy.optimizer], batch, anchors, contrasting, logs)
        if isinstance(self.replay_buffer, PrioritizedFrameReplayBuffer) and batch.drawn is not None:
            self.replay_buffer.set_errors(batch.drawn, errors.cpu().numpy())
        if self.policy.contrast is not None:
            self._lerp([encoder], [self.policy.key_encoder], chosen.encoder_tau)
        if (self._n_updates + 1) % chosen.target_every == 0:
            self._lerp([self.policy.q_net], [self.policy.q_net_target], chosen.tau)

    def _errors(self, batch: FrameBatch) -> tuple[Tensor, Tensor]:
        """The loss of each transition (B,), and what its priority comes from."""
        network, rows = self.policy.q_net, torch.arange(len(batch.rewards), device=self.device)
        outputs = network.outputs(joined(self.policy.encoder.convolve(batch.observations), batch.states))
        taken = outputs[rows, batch.actions.long().squeeze(1)]  # (B, N)
        values, chances = self._target(batch, rows)  # (B, N) each
        if network.distribution == "c51":
            losses = -(project(values, chances, network.support) * taken.log_softmax(1)).sum(1)
            return losses, losses.detach()
        if network.distribution == "quantile":
            losses = quantile_loss(taken, values)
        else:
            losses = nn.functional.smooth_l1_loss(taken, values, reduction="none").squeeze(1)
        return losses, (values.mean(1) - taken.detach().mean(1)).abs()

    @torch.no_grad()
    def _target(self, batch: FrameBatch, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Values (B, N) that a transition leads to, and their chances (B, N)."""
        network, target, chosen = self.policy.q_net, self.policy.q_net_target, self.settings
        encoder: Any = target.features_extractor
        outputs = target.outputs(joined(encoder.convolve(batch.next_observations), batch.next_states))
        choosing = outputs
        if chosen.double:
            maps = self.policy.encoder.convolve(batch.next_observations)
            choosing = network.outputs(joined(maps, batch.next_states))
        following = outputs[rows, network.expected(choosing).argmax(1)]
        rewards = batch.rewards.clamp(-chosen.reward_clip, chosen.reward_clip) if chosen.reward_clip else batch.rewards
        if network.distribution == "c51":
            return self._bootstrapped(batch, rewards, network.support), following.softmax(1)
        return self._bootstrapped(batch, rewards, following), torch.full_like(following, 1 / network.atoms)
