"""Soft actor-critic from pixels with a contrastive auxiliary objective (CURL), as a subclass of SB3's SAC."""

from typing import Any, ClassVar

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3 import SAC
from stable_baselines3.common.policies import BasePolicy
from torch import Tensor, nn

from dipole.rl import settings as presets
from dipole.rl.encoder import Maps, detached
from dipole.rl.pixel_agent import Logs, PixelAgent, bf16_is_native, duplicates
from dipole.rl.policy import ContrastivePolicy, q_values, sample_action
from dipole.rl.replay import FrameBatch
from dipole.rl.seen import joined

__all__ = ["ContrastiveSAC", "bf16_is_native", "duplicates"]

_DRAWN = ("exploration_mat", "exploration_matrices")  # of gSDE


class ContrastiveSAC(PixelAgent, SAC):
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
        policy: "CnnPolicy"; of a dictionary also "MultiInputPolicy", of vectors "MlpPolicy", which are the same here.
        env: an environment (its id, an instance or a VecEnv) of uint8 images, vectors or a dictionary of both, with
            continuous actions.
        objective: text such as "infonce(similarity=bilinear) + 0.1*dp"; "none" trains on augmented images alone; by
            default the preset's. An Objective or a Composite is used as the very module that it is, with its weights.
        preset: "curl" (the repository; the default), "paper", "small" (two cores), or "sb3" (SB3's SAC).
        augmentation: "crop", "shift", "bilinear", "none", or a function (B, C, H, W) uint8 -> (B, C, h, w); by default
            the preset's.
        storage: where replay keeps its frames: "host", "device", "disk", or "auto" (on a GPU where they fit).
        settings: any other field of `settings.Settings` by name (batch_size, learning_rate, joint_backward, ...), and
            SB3's policy_kwargs, action_noise, replay_buffer_class, replay_buffer_kwargs, stats_window_size,
            tensorboard_log, verbose, seed, device.

    Raises:
        ConfigError: for a setting or environment that does not fit.
        SpecError: for a wrong objective text.
        OptionError: a batch of images would not fit into memory.
        TrainingError: replay cannot fit into memory; from `learn`, a loss or gradient is not finite.
    """

    algorithm: ClassVar[presets.AlgorithmName] = "sac"
    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {"CnnPolicy": ContrastivePolicy}
    policy: ContrastivePolicy

    @classmethod
    def _sb3_keywords(cls, chosen: presets.Settings) -> dict[str, Any]:
        return {"target_entropy": chosen.target_entropy, **presets.sac_keywords(chosen)}

    def _setup_model(self) -> None:
        # A fixed weight is a temperature that no optimizer steps: it is saved and exported like a learned one.
        self.ent_coef = "auto"
        super()._setup_model()
        chosen = self.settings
        assert self.log_ent_coef is not None
        weight = chosen.initial_temperature if chosen.ent_coef == "auto" else chosen.ent_coef
        self.log_ent_coef.data.copy_(torch.tensor([weight]).log())
        self.ent_coef_optimizer = self.policy.adam(
            [self.log_ent_coef], chosen.temperature_learning_rate, chosen.temperature_beta
        )
        self._fit_optimizers()

    def _setup_contrast_optimizers(self, own: list[nn.Parameter], rate: float) -> None:
        chosen, encoder = self.settings, list(self.policy.encoder.parameters())
        if chosen.joint_backward:
            # The critic's optimizer steps the encoder once, for the sum of both losses.
            super()._setup_contrast_optimizers(own, rate)
            return
        self.contrast_optimizer = self.policy.adam([*encoder, *own], rate)
        if chosen.encoder_steps == 2:
            self.encoder_optimizer = self.policy.adam(encoder, rate)

    def _store_transition(self, *step: Any) -> None:
        self.policy.actor.noise_is_new = False
        super()._store_transition(*step)

    def exploration_state(self) -> dict[str, Any] | None:
        """What gSDE has drawn, for a checkpoint; None without it."""
        if not self.use_sde:
            return None
        actor: Any = self.policy.actor
        drawn = {name: getattr(actor.action_dist, name).detach().cpu().numpy() for name in _DRAWN}
        return drawn | {"new": actor.noise_is_new}

    def set_exploration_state(self, state: dict[str, Any] | None) -> None:
        """Continue with what `exploration_state` returned; a rollout that has not begun keeps its noise.

        Args:
            state: what `exploration_state` returned; None, or of an agent without gSDE, changes nothing.
        """
        if state is None or not self.use_sde:
            return
        actor: Any = self.policy.actor
        for name in _DRAWN:
            setattr(actor.action_dist, name, torch.from_numpy(state[name]).to(self.device))
        actor.keeps_noise = bool(state["new"])

    def set_up_for_playing(self) -> None:
        if self.target_entropy == "auto":
            assert isinstance(self.action_space, spaces.Box)
            self.target_entropy = float(-np.prod(self.action_space.shape).astype(np.float32))
        super().set_up_for_playing()

    def parts(self) -> dict[str, nn.Module]:
        policy = self.policy
        return {
            "actor": policy.actor,
            "critic": policy.critic,
            "critic_target": policy.critic_target,
            "temperature": _Temperature(self.log_ent_coef),
        }

    def _steps(self, batch: FrameBatch, contrasting: bool, logs: Logs) -> None:
        chosen, number = self.settings, self._n_updates
        if self.use_sde:
            self.policy.actor.reset_noise()  # its deviation may have changed
            self.policy.actor.noise_is_new = False
        act = number % chosen.actor_every == 0
        target = self._target(batch)
        observations = self.policy.encoder.prepare(batch.observations)
        convolved: Maps | None
        features: Tensor | None
        if chosen.joint_backward:
            convolved = detached(self._joint_step(batch, observations, target, contrasting, logs))
            with torch.no_grad():  # the step has changed the head
                features = self.policy.encoder.head(convolved) if act else None
        else:
            self._critic_step(batch, observations, target, logs)
            # Nothing below changes the encoder before the contrast does: actor and contrast share its features.
            with torch.set_grad_enabled(contrasting):
                convolved = self.policy.encoder.convolve(observations) if act or contrasting else None
                features = self.policy.encoder.head(convolved) if convolved is not None else None
        if act:
            assert convolved is not None
            assert features is not None
            self._actor_step(detached(convolved), features.detach(), batch.states, logs)
        if number % chosen.target_every == 0:
            self._follow()
        if contrasting and not chosen.joint_backward:
            assert features is not None
            self._contrast_step(batch, features, logs)

    @torch.no_grad()
    def _target(self, batch: FrameBatch) -> Tensor:
        """The value y (B, 1) that both Q functions are pulled to."""
        assert self.log_ent_coef is not None
        actor, next_observations = self.policy.actor, self.policy.encoder.prepare(batch.next_observations)
        features = actor.features_extractor.head(self.policy.encoder.convolve(next_observations))  # type: ignore[operator]
        action, log_density = self._drawn_action(joined(features, batch.next_states))
        following = self.policy.key_encoder
        features = joined(following.head(following.convolve(next_observations)), batch.next_states)
        q = q_values(self.critic_target, features, action)
        value = q.min(1, keepdim=True).values - self.log_ent_coef.exp() * log_density
        return self._bootstrapped(batch, batch.rewards, value)

    def _drawn_action(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Actions (B, A) of the policy for features (B, d), and their log densities (B, 1)."""
        actor = self.policy.actor
        if self.use_sde:
            return actor.explored(features)
        mean, log_std = actor.distribution(features)
        return sample_action(mean, log_std, torch.randn_like(mean))

    def _critic_loss(self, features: Tensor, batch: FrameBatch, target: Tensor) -> Tensor:
        q = q_values(self.critic, joined(features, batch.states), batch.actions.to(features.dtype))
        loss = (q - target).square().mean(0).sum()
        return 0.5 * loss if self.settings.twin_loss == "half" else loss

    def _critic_step(self, batch: FrameBatch, observations: Maps, target: Tensor, logs: Logs) -> None:
        encoder = self.policy.encoder
        with torch.set_grad_enabled(not self.settings.detach_encoder):
            convolved = encoder.convolve(observations)
        loss = self._critic_loss(encoder.head(convolved), batch, target)
        self._descend({"critic": loss}, loss, [self.critic.optimizer])
        logs["critic_loss"] = loss.detach()

    def _actor_step(self, convolved: Maps, features: Tensor, states: Tensor | None, logs: Logs) -> None:
        assert self.log_ent_coef is not None
        assert isinstance(self.ent_coef_optimizer, torch.optim.Adam)
        assert isinstance(self.target_entropy, float)
        actor = self.policy.actor
        head = actor.features_extractor.head(convolved)  # type: ignore[operator]
        action, log_density = self._drawn_action(joined(head, states))
        alpha = self.log_ent_coef.detach().exp()
        q = q_values(self.critic, joined(features, states), action).min(1, keepdim=True).values
        loss = (alpha * log_density - q).mean()
        self._descend({"actor": loss}, loss, [actor.optimizer])
        logs["actor_loss"] = loss.detach()
        if self.settings.ent_coef == "auto":
            temperature = (self.log_ent_coef.exp() * (-log_density - self.target_entropy).detach()).mean()
            self._descend({"temperature": temperature}, temperature, [self.ent_coef_optimizer])
            logs["ent_coef_loss"] = temperature.detach()
        logs["ent_coef"], logs["entropy"] = alpha.squeeze(), -log_density.detach().mean()

    def _contrast_step(self, batch: FrameBatch, anchors: Tensor, logs: Logs) -> None:
        pairs = self._pairs(batch, anchors)
        outcome = self._outcome(pairs, logs)
        optimizers = [each for each in (self.encoder_optimizer, self.contrast_optimizer) if each is not None]
        self._descend({"contrastive": outcome.loss}, outcome.loss, optimizers, pairs)
        gradients = [p.grad for o in optimizers for g in o.param_groups for p in g["params"] if p.grad is not None]
        norms = torch.stack(torch._foreach_norm(gradients))
        logs["contrast_grad_norm_squared"] = norms.square().sum()
        self._after_contrast()

    def _joint_step(self, batch: FrameBatch, observations: Maps, target: Tensor, contrasting: bool, logs: Logs) -> Maps:
        encoder = self.policy.encoder
        convolved = encoder.convolve(observations)
        features = encoder.head(convolved)
        kept = encoder.head(detached(convolved)) if self.settings.detach_encoder else features
        loss = self._critic_loss(kept, batch, target)
        self._sum_step("critic", loss, [self.critic.optimizer], batch, features, contrasting, logs)
        return convolved

    def _follow(self) -> None:
        """Momentum copies: Qbar with tau, the encoder with encoder_tau."""
        self._lerp(self.critic.q_networks, self.critic_target.q_networks, self.settings.tau)
        self._lerp([self.policy.encoder], [self.policy.key_encoder], self.settings.encoder_tau)


class _Temperature(nn.Module):
    """The entropy temperature among the weights that a run saves; runs of earlier versions have none."""

    def __init__(self, log_ent_coef: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("log_ent_coef", log_ent_coef)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        if f"{prefix}log_ent_coef" in state_dict:
            super()._load_from_state_dict(state_dict, prefix, *rest)
