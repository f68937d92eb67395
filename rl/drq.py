"""DrQ-v2 with a contrastive auxiliary objective, as a subclass of SB3's TD3."""

import itertools
from typing import Any, ClassVar

import numpy as np
import torch
from stable_baselines3 import TD3
from stable_baselines3.common.policies import BasePolicy
from torch import Tensor

from dipole.rl import settings as presets
from dipole.rl.networks import DrQPolicy, Maps, detached, q_values, soft_update, with_noise
from dipole.rl.pixel_agent import Logs, PixelAgent
from dipole.rl.sampling import FrameBatch
from dipole.rl.seen import joined


class ContrastiveDrQ(PixelAgent, TD3):
    """DrQ-v2 (Yarats et al. 2021) with any contrastive objective on its encoder, as a sum with the critic's loss.

    One update (a bar marks momentum copies, n is the rewards in a return, f the convolutions):

        a'_k = clip(pi(x'_k) + clip(sigma_t e, -c, c)),  e ~ N(0, 1)
        y = sum_{j < n} gamma^j r_{t+j} + gamma^n (1 - done) 1/K sum_k min_i Qbar_i(f(x'_k), a'_k)
        critic + contrast:  1/M sum_m sum_i mean (Q_i(x_m, a) - y)^2
                            + objective(anchors = encoder(x_1), positives = encoder_bar(x+))    -> encoder, Q, W
        actor:   - mean min_i Q_i(x_1, clip(pi(x_1) + clip(sigma_t e, -c, c)))  -> pi, not the convolutions
        Qbar <- tau Q + (1 - tau) Qbar

    x_m, x'_k and each x+ are independent random shifts of the stored observations. K = M = 1 is DrQ-v2. More are the
    averages of DrQ (Kostrikov et al. 2020, Alg. 1). As in the authors' repository the convolutions have no momentum
    copy in the target. The copy that the positives need moves with encoder_tau. `objective="none"` is plain DrQ-v2.

    A return that the end of an episode or the newest step cuts short is used with its own discount. The repository
    never draws one.

        >>> agent = ContrastiveDrQ(
        ...     "CnnPolicy", DotEnv(), "infonce(temperature=0.1)", buffer_size=50, learning_starts=10, batch_size=4
        ... )
        >>> agent = agent.learn(16)
        >>> action, _ = agent.predict(DotEnv().reset()[0])

    Args:
        policy: as in `ContrastiveSAC`.
        env: as in `ContrastiveSAC`.
        objective: text, Objective or Composite, as in `ContrastiveSAC`.
        preset: "drqv2", the default.
        augmentation: "shift" by default: whole pixels, which equals the repository's grid sampling.
            "bilinear" draws shifts between pixels. Otherwise as in `ContrastiveSAC`.
        storage: as in `ContrastiveSAC`.
        settings: any other field of `settings.AgentSettings` that "drq" has, and SB3's keywords.

    Raises:
        ConfigError: for a setting or environment that does not fit.
        SpecError: for a wrong objective text.
        OptionError: a batch of images would not fit into memory.
        TrainingError: replay does not fit into memory. From `learn`: a loss or gradient is not finite.
    """

    algorithm: ClassVar[presets.AlgorithmName] = "drq"
    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {"CnnPolicy": DrQPolicy}
    policy: DrQPolicy

    @property
    def noise(self) -> float:
        """Standard deviation of the actions' noise after t agent steps, as Yarats et al. 2021.

        sigma_t = (1 - m) start + m end,  m = min(t / steps, 1)
        """
        mixed = min(self.num_timesteps / self.noise_steps, 1.0)
        return (1 - mixed) * self.noise_start + mixed * self.noise_end

    def predict(self, *arguments: Any, **settings: Any) -> tuple[np.ndarray, tuple[np.ndarray, ...] | None]:
        self.policy.actor.std = self.noise
        return super().predict(*arguments, **settings)

    def _noisy_action(self, maps: Maps, states: Tensor) -> Tensor:
        """Return clip(pi(x) + clip(sigma_t e, -c, c)), e ~ N(0, 1): (B, A)."""
        actor = self.policy.actor
        features = joined(actor.features_extractor.head(maps), states)  # type: ignore[operator]
        mean = actor.mu(features).to(features.dtype)
        return with_noise(mean, self.noise * torch.randn_like(mean), self.target_noise_clip)

    def _update_networks(self, batch: FrameBatch, contrasting: bool, logs: Logs) -> None:
        """Make one update: critic and contrast, then the actor, then the momentum copies."""
        maps = self._update_critic_and_contrast(batch, self.target(batch), contrasting, logs)
        if self._n_updates % self.policy_delay == 0:
            self._update_actor(first_rows(maps, len(batch.rewards)), batch.states, logs)
        if self._n_updates % self.target_every == 0:
            self._update_targets()
        logs["noise"] = torch.tensor(self.noise, device=self.device)

    @torch.no_grad()
    def target(self, batch: FrameBatch) -> Tensor:
        """Return y = R + gamma^n (1 - done) 1/K sum_k min_i Qbar_i(f(x'_k), a'_k), (B, 1).

        Args:
            batch: drawn by replay.
        """
        maps = self.policy.encoder.convolve(batch.next_observations)
        states = batch.next_states.repeat(self.target_views, 1)
        action = self._noisy_action(maps, states)  # (K B, A)
        q = q_values(self.critic_target, joined(self.policy.key_encoder.head(maps), states), action)
        value = q.min(1, keepdim=True).values.unflatten(0, (-1, len(batch.rewards))).mean(0)
        return self._returns(batch, value)

    def _update_critic_and_contrast(self, batch: FrameBatch, target: Tensor, contrasting: bool, logs: Logs) -> Maps:
        """Step encoder, Q functions and objective on the sum of both losses. Return the detached feature maps."""
        encoder, views = self.policy.encoder, self.value_views
        maps = encoder.convolve(batch.observations)
        features = encoder.head(maps)  # (M B, d)
        actions = batch.actions.to(features.dtype).repeat(views, 1)
        q = q_values(self.critic, joined(features, batch.states.repeat(views, 1)), actions)
        loss = (q - target.repeat(views, 1)).square().mean(0).sum()
        self._step_critic(loss, batch, features[: len(batch.rewards)], contrasting, logs)
        return detached(maps)

    def _update_actor(self, maps: Maps, states: Tensor, logs: Logs) -> None:
        """Step the policy on -mean min_i Q_i(x_1, a). The maps are detached: the gradient stops at the convolutions."""
        action = self._noisy_action(maps, states)
        with torch.no_grad():
            features = joined(self.policy.encoder.head(maps), states)
        loss = -q_values(self.critic, features, action).min(1).values.mean()
        self._minimise({"actor": loss}, [self.policy.actor.optimizer])
        logs["actor_loss"] = loss.detach()

    def _update_targets(self) -> None:
        """Move the momentum copies: Qbar and its head with tau, the key encoder's convolutions with encoder_tau."""
        online, copy = self.policy.encoder, self.policy.key_encoder
        heads = ([*self.critic.q_networks, online.fc, online.ln], [*self.critic_target.q_networks, copy.fc, copy.ln])
        soft_update(*heads, self.tau)
        soft_update([online.convs], [copy.convs], self.encoder_tau)

    def _sample(self, batch_size: int, times: tuple[int, int] | None = None) -> FrameBatch:
        return super()._sample(batch_size, times or (self.value_views, self.target_views))


def first_rows(maps: Maps, count: int) -> Maps:
    starts = itertools.accumulate((len(each) for each in maps), initial=0)
    return tuple(each[: count - start] for each, start in zip(maps, starts, strict=False) if start < count)
