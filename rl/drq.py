"""DrQ-v2 with a contrastive auxiliary objective, as a subclass of SB3's TD3."""

from typing import Any, ClassVar

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3 import TD3
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.type_aliases import Schedule
from torch import Tensor, nn

from dipole.core.objectives.objective import Composite
from dipole.rl import settings as presets
from dipole.rl.encoder import CentredEncoder, Maps, detached
from dipole.rl.networks import DrQPolicy, with_noise
from dipole.rl.pixel_agent import Logs, PixelAgent
from dipole.rl.policy import Contrasted, compile_encoders, encoder_keywords, head_keywords, q_values
from dipole.rl.replay import FrameBatch
from dipole.rl.seen import joined


def noise_at(step: int, start: float, end: float, steps: int) -> float:
    """Standard deviation of the exploration noise, linear(start, end, steps) of Yarats et al. 2021.

    sigma_t = (1 - m) start + m end,  m = min(t / steps, 1)
    """
    mixed = min(step / steps, 1.0)
    return (1 - mixed) * start + mixed * end


class ContrastiveDrQPolicy(Contrasted, DrQPolicy):
    """Actor, critic, momentum critic and the contrastive objective; the momentum critic's encoder is the key encoder.

    Args:
        settings: all of `Settings`; SB3 passes spaces and schedule.
        image_size: what the network sees.
        contrast: the objective; by default it is built from the settings.
    """

    encoder_class = CentredEncoder

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Box,
        lr_schedule: Schedule,
        settings: presets.Settings,
        image_size: int | tuple[int, int],
        contrast: Composite | None = None,
    ) -> None:
        self.settings = settings
        super().__init__(
            observation_space,
            action_space,
            lr_schedule,
            encoder_keywords(settings, image_size),
            **head_keywords(settings),
        )
        self.hold(contrast)

    def compile_networks(self) -> None:
        """Let `torch.compile` fuse what an update calls; weights and their names stay as they are."""
        compile_encoders(self.settings, self.encoder, self.key_encoder, self.actor.features_extractor)


class ContrastiveDrQ(PixelAgent, TD3):
    """DrQ-v2 (Yarats et al. 2021) with any contrastive objective on its encoder, as a sum with the critic's loss.

    One update (theta: encoder, Q, pi; bar: momentum copies; n: rewards in a return; f: convolutions):

        a'_k = clip(pi(x'_k) + clip(sigma_t e, -c, c)),  e ~ N(0, 1)
        y = sum_{j < n} gamma^j r_{t+j} + gamma^n (1 - done) 1/K sum_k min_i Qbar_i(f(x'_k), a'_k)
        critic + contrast:  1/M sum_m sum_i mean (Q_i(x_m, a) - y)^2
                            + objective(anchors = encoder(x_1), positives = encoder_bar(x+))    -> encoder, Q, W
        actor:   - mean min_i Q_i(x_1, clip(pi(x_1) + clip(sigma_t e, -c, c)))  -> pi; stops at the convolutions
        Qbar <- tau Q + (1 - tau) Qbar

    x_m, x'_k and each x+ are independent random shifts of the stored observations. K = M = 1 is DrQ-v2; more are the
    averages of DrQ (Kostrikov et al. 2020, Alg. 1). As in the authors' repository the convolutions have no momentum
    copy in the target; the copy that the positives need follows with encoder_tau. `objective="none"` is plain DrQ-v2.

    Here a return that the end of an episode, or the newest step, leaves with fewer rewards than n is used with the
    discount that belongs to it; the repository never draws such a one.

    Args:
        policy: "CnnPolicy"; of a dictionary also "MultiInputPolicy", of vectors "MlpPolicy", which are the same here.
        env: an environment (its id, an instance or a VecEnv) of uint8 images, vectors or a dictionary of both, with
            continuous actions.
        objective: text, Objective or Composite, as in `ContrastiveSAC`.
        preset: "drqv2", the default.
        augmentation: "shift" by default: whole pixels, which is what the repository's grid sampling comes to;
            "bilinear" draws shifts between pixels, or as in `ContrastiveSAC`.
        storage: where replay keeps its frames: "host", "device", "disk", or "auto" (on a GPU where they fit).
        settings: any other field of `settings.Settings` that "drq" has, and SB3's keywords, as in `ContrastiveSAC`.

    Raises:
        ConfigError: for a setting or environment that does not fit.
        SpecError: for a wrong objective text.
        OptionError: a batch of images would not fit into memory.
        TrainingError: replay cannot fit into memory; from `learn`, a loss or gradient is not finite.
    """

    algorithm: ClassVar[presets.AlgorithmName] = "drq"
    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {"CnnPolicy": ContrastiveDrQPolicy}
    policy: ContrastiveDrQPolicy

    @classmethod
    def _sb3_keywords(cls, chosen: presets.Settings) -> dict[str, Any]:
        return presets.sb3_keywords(chosen) | {
            "policy_delay": chosen.actor_every,
            "target_noise_clip": chosen.noise_clip,
        }

    def parts(self) -> dict[str, nn.Module]:
        policy = self.policy
        return {"actor": policy.actor, "critic": policy.critic, "critic_target": policy.critic_target}

    @property
    def noise(self) -> float:
        """Standard deviation of the actions' noise after the agent steps so far, from noise_start to noise_end."""
        chosen = self.settings
        return noise_at(self.num_timesteps, chosen.noise_start, chosen.noise_end, chosen.noise_steps)

    def predict(self, *arguments: Any, **settings: Any) -> tuple[np.ndarray, tuple[np.ndarray, ...] | None]:
        """As SB3: actions (B, A), or (A,) of one observation, and the state that was given.

        An action that is not deterministic has the noise of the schedule.

        Args:
            arguments: those of SB3.
            settings: those of SB3, by name.
        """
        self.policy.actor.std = self.noise
        return super().predict(*arguments, **settings)

    def _sample(self, batch_size: int) -> FrameBatch:
        return self.replay_buffer.sample_views(
            batch_size,
            self._augment,
            self._positives,
            env=self._vec_normalize_env,
            times=(self.settings.value_views, self.settings.target_views),
        )

    def _steps(self, batch: FrameBatch, contrasting: bool, logs: Logs) -> None:
        chosen, number, encoder = self.settings, self._n_updates, self.policy.encoder
        size = len(batch.rewards)
        target = self._target(batch)
        convolved = encoder.convolve(batch.observations)
        features = encoder.head(convolved)  # (M B, d)
        loss = self._critic_loss(joined(features, repeated(batch.states, chosen.value_views)), batch, target)
        self._sum_step("critic", loss, [self.critic.optimizer], batch, features[:size], contrasting, logs)
        if number % chosen.actor_every == 0:
            self._actor_step(first_rows(detached(convolved), size), batch.states, logs)
        if number % chosen.target_every == 0:
            self._follow()
        logs["noise"] = torch.tensor(self.noise, device=self.device)

    @torch.no_grad()
    def _target(self, batch: FrameBatch) -> Tensor:
        """The value y (B, 1) that both Q functions are pulled to."""
        convolved = self.policy.encoder.convolve(batch.next_observations)
        states = repeated(batch.next_states, self.settings.target_views)
        action = self._noisy_action(convolved, states)  # (K B, A)
        q = q_values(self.critic_target, joined(self.policy.key_encoder.head(convolved), states), action)
        value = q.min(1, keepdim=True).values.unflatten(0, (-1, len(batch.rewards))).mean(0)
        return self._bootstrapped(batch, batch.rewards, value)

    def _noisy_action(self, convolved: Maps, states: Tensor | None) -> Tensor:
        actor = self.policy.actor
        features = joined(actor.features_extractor.head(convolved), states)  # type: ignore[operator]
        mean = actor.mu(features).to(features.dtype)
        return with_noise(mean, self.noise * torch.randn_like(mean), self.settings.noise_clip)

    def _critic_loss(self, features: Tensor, batch: FrameBatch, target: Tensor) -> Tensor:
        views = self.settings.value_views
        q = q_values(self.critic, features, batch.actions.to(features.dtype).repeat(views, 1))
        return (q - target.repeat(views, 1)).square().mean(0).sum()

    def _actor_step(self, convolved: Maps, states: Tensor | None, logs: Logs) -> None:
        action = self._noisy_action(convolved, states)
        with torch.no_grad():
            features = joined(self.policy.encoder.head(convolved), states)
        loss = -q_values(self.critic, features, action).min(1).values.mean()
        self._descend({"actor": loss}, loss, [self.policy.actor.optimizer])
        logs["actor_loss"] = loss.detach()

    def _follow(self) -> None:
        """Momentum copies: Qbar and its head with tau, the convolutions of the key encoder with encoder_tau."""
        chosen, online, copy = self.settings, self.policy.encoder, self.policy.key_encoder
        heads = ([*self.critic.q_networks, online.fc, online.ln], [*self.critic_target.q_networks, copy.fc, copy.ln])
        self._lerp(*heads, chosen.tau)
        self._lerp([online.convs], [copy.convs], chosen.encoder_tau)


def repeated(states: Tensor | None, times: int) -> Tensor | None:
    """States (B, S) beside so many views of their images, one after the other: (times B, S)."""
    return states if states is None or times == 1 else states.repeat(times, 1)


def first_rows(maps: Maps, count: int) -> Maps:
    """The first rows of chunks of rows."""
    found, left = [], count
    for each in maps:
        if left <= 0:
            break
        found.append(each[:left])
        left -= len(each)
    return tuple(found)
