"""CURL: soft actor-critic from pixels with a contrastive auxiliary objective, as a subclass of SB3's SAC."""

import math
from typing import Any, ClassVar

import torch
from stable_baselines3 import SAC
from stable_baselines3.common.policies import BasePolicy
from torch import Tensor, nn

from dipole.core.utils.seeding import rng_state
from dipole.rl import settings as presets
from dipole.rl.networks import Maps, PixelPolicy, detached, q_values, soft_update
from dipole.rl.pixel_agent import Logs, PixelAgent, set_adam
from dipole.rl.sampling import FrameBatch
from dipole.rl.seen import joined


class ContrastiveSAC(PixelAgent, SAC):
    """CURL (Laskin et al. 2020) with any contrastive objective, on SB3's learn / predict / save / load / callbacks.

    One update, in the repository's order (theta is encoder, Q and pi, a bar marks momentum copies):

        y = r + gamma (1 - done) (min_i Qbar_i(x', a') - alpha log pi(a'|x')),   a' ~ pi(x')
        critic:    sum_i mean (Q_i(x, a) - y)^2                                  -> encoder, Q
        every 2nd: mean (alpha log pi(a|x) - min_i Q_i(x, a)), a ~ pi(x)         -> pi, not the convolutions
                   mean alpha (-log pi - target entropy)                         -> alpha
                   Qbar <- tau Q + (1 - tau) Qbar, the encoder with its own tau
        contrast:  objective(anchors = encoder(x), positives = encoder_bar(x+))  -> encoder, W

    x, x' and each x+ are independent random views of the stored observation. With `joint_backward` critic and contrast
    are one loss, and its gradient steps the encoder once.

        >>> objective = "infonce(similarity=bilinear, temperature=1) + 0.1*dp"
        >>> agent = ContrastiveSAC(
        ...     "CnnPolicy", DotEnv(), objective, preset="small", buffer_size=50, learning_starts=10, batch_size=4
        ... )
        >>> agent = agent.learn(12)
        >>> action, _ = agent.predict(DotEnv().reset()[0])

    Args:
        policy: "CnnPolicy". "MultiInputPolicy" (dictionaries) and "MlpPolicy" (vectors) mean the same here.
        env: an environment (its id, an instance or a VecEnv) of uint8 images, vectors or a dictionary of both, with
            continuous actions.
        objective: text such as "infonce(similarity=bilinear, temperature=1) + 0.1*dp", CURL's loss with a regularizer.
            "none" trains on augmented images alone. By default the preset's. An Objective or a Composite is used as it
            is, with its weights.
        preset: "curl" (the repository, the default), "paper", "small" (two cores), or "sb3" (SB3's SAC).
        augmentation: "crop", "shift", "bilinear", "none", or a function (B, C, H, W) uint8 -> (B, C, h, w). By default
            the preset's.
        storage: where replay keeps its frames: "host", "device", "disk", or "auto" (on a GPU where they fit).
        settings: any other field of `settings.AgentSettings` by name (batch_size, learning_rate, ...), and SB3's
            policy_kwargs, action_noise, replay_buffer_class, replay_buffer_kwargs, stats_window_size,
            tensorboard_log, verbose, seed, device.

    Raises:
        ConfigError: for a setting or environment that does not fit.
        SpecError: for a wrong objective text.
        OptionError: a batch of images would not fit into memory.
        TrainingError: replay does not fit into memory. From `learn`: a loss or gradient is not finite.
    """

    algorithm: ClassVar[presets.AlgorithmName] = "sac"
    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {"CnnPolicy": PixelPolicy}
    policy: PixelPolicy

    def _update_networks(self, batch: FrameBatch, contrasting: bool, logs: Logs) -> None:
        """Make one update in the order of the CURL repository."""
        encoder = self.policy.encoder
        acting = self._n_updates % self.actor_every == 0
        if self.use_sde:
            self.policy.actor.reset_noise()
        target = self.target(batch)
        images = encoder.prepare(batch.observations)
        maps = self._update_critic(batch, images, target, contrasting and self.joint_backward, logs)
        if self.joint_backward:
            with torch.no_grad():  # the step has changed the head
                features = encoder.head(maps)
            contrasting = False
        else:
            # Until the contrast is stepped the encoder stays: actor and contrast share its features.
            with torch.set_grad_enabled(contrasting):
                maps = encoder.convolve(images) if acting or contrasting else ()
                features = encoder.head(maps) if maps else torch.empty(0)
        if acting:
            self._update_actor(detached(maps), features.detach(), batch.states, logs)
        if self._n_updates % self.target_update_interval == 0:
            self._update_targets()
        if contrasting:
            self._update_contrast(batch, features, logs)

    @torch.no_grad()
    def target(self, batch: FrameBatch) -> Tensor:
        """Return y = r + gamma (1 - done) (min_i Qbar_i(x', a') - alpha log pi(a'|x')), (B, 1).

        Args:
            batch: drawn by replay.
        """
        images = self.policy.encoder.prepare(batch.next_observations)
        maps = self.policy.encoder.convolve(images)
        features = joined(self.policy.actor.features_extractor.head(maps), batch.next_states)  # type: ignore[operator]
        action, log_density = self._draw_action(features)
        key_encoder = self.policy.key_encoder
        features = joined(key_encoder.head(key_encoder.convolve(images)), batch.next_states)
        q = q_values(self.critic_target, features, action).min(1, keepdim=True).values
        return self._returns(batch, q - self.temperature() * log_density)

    def _update_critic(self, batch: FrameBatch, images: Maps, target: Tensor, contrasting: bool, logs: Logs) -> Maps:
        """Step encoder and Q functions on sum_i mean (Q_i(x, a) - y)^2, for prepared images and y (B, 1).

        With `contrasting` the contrast is added, and the objective stepped as well. Return the detached feature maps.
        """
        encoder = self.policy.encoder
        with torch.set_grad_enabled(contrasting or not self.detach_encoder):
            maps = encoder.convolve(images)
        anchors = features = encoder.head(maps)
        if contrasting and self.detach_encoder:
            features = encoder.head(detached(maps))
        q = q_values(self.critic, joined(features, batch.states), batch.actions.to(features.dtype))
        loss = (q - target).square().mean(0).sum()
        if self.twin_loss == "half":
            loss = 0.5 * loss
        self._step_critic(loss, batch, anchors, contrasting, logs)
        return detached(maps)

    def _update_actor(self, maps: Maps, features: Tensor, states: Tensor, logs: Logs) -> None:
        """Step the policy on mean (alpha log pi(a|x) - min_i Q_i(x, a)), then the temperature.

        The feature maps are detached: the actor's gradient stops there. The Q functions see `features` (B, d) of them.
        """
        actor = self.policy.actor
        action, log_density = self._draw_action(joined(actor.features_extractor.head(maps), states))  # type: ignore[operator]
        alpha = self.temperature().detach()
        q = q_values(self.critic, joined(features, states), action).min(1, keepdim=True).values
        loss = (alpha * log_density - q).mean()
        self._minimise({"actor": loss}, [actor.optimizer])
        logs["actor_loss"] = loss.detach()
        if self.log_ent_coef is not None:
            loss = (self.log_ent_coef.exp() * (-log_density - self._wanted_entropy()).detach()).mean()
            self._minimise({"temperature": loss}, [self.ent_coef_optimizer])
            logs["ent_coef_loss"] = loss.detach()
        logs["ent_coef"], logs["entropy"] = alpha.squeeze(), -log_density.detach().mean()

    def _update_contrast(self, batch: FrameBatch, anchors: Tensor, logs: Logs) -> None:
        """Step encoder and objective on objective(encoder(x), encoder_bar(x+)). The anchors (B, d) have their graph."""
        pairs = self.make_pairs(batch, anchors)
        optimizers = [each for each in (self.encoder_optimizer, self.contrast_optimizer) if each is not None]
        self._minimise({"contrastive": self._contrastive_loss(pairs, logs)}, optimizers, pairs)
        gradients = [p.grad for o in optimizers for g in o.param_groups for p in g["params"] if p.grad is not None]
        logs["contrast_grad_norm_squared"] = torch.stack(torch._foreach_norm(gradients)).square().sum()

    def _update_targets(self) -> None:
        """Move the momentum copies: Qbar with tau, the encoder with encoder_tau."""
        soft_update(self.critic.q_networks, self.critic_target.q_networks, self.tau)
        soft_update([self.policy.encoder], [self.policy.key_encoder], self.encoder_tau)

    def _draw_action(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return drawn actions (B, A) of the policy for features (B, d), and their log densities (B, 1) (SAC, App. C).

        u = mean + exp(log_std) noise,  a = tanh(u),
        log pi = sum_d [ -noise^2 / 2 - log_std - log(2 pi) / 2 - log(1 - a^2 + 1e-6) ]
        """
        actor = self.policy.actor
        if self.use_sde:
            return actor.explored(features)
        mean, log_std = actor.distribution(features)
        noise = torch.randn_like(mean)
        action = torch.tanh(mean + log_std.exp() * noise)
        density = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
        return action, (density - torch.log(torch.relu(1 - action.square()) + 1e-6)).sum(-1, keepdim=True)

    def _wanted_entropy(self) -> float:
        if self.target_entropy == "auto":
            return -float(math.prod(self.action_space.shape or ()))
        return float(self.target_entropy)

    def temperature(self) -> Tensor:
        """Return alpha, the weight of the entropy: (1,), or () if it is fixed."""
        return self.ent_coef_tensor if self.log_ent_coef is None else self.log_ent_coef.exp()

    def policy_keywords(self) -> dict[str, Any]:
        found = super().policy_keywords() | {"log_std_bounds": self.log_std_bounds, "use_sde": self.use_sde}
        if self.use_sde:
            found |= {name: getattr(self, name) for name in ("log_std_init", "use_expln", "clip_mean")}
        return found

    def _setup_model(self) -> None:
        if self.ent_coef == "auto":
            self.ent_coef = f"auto_{self.initial_temperature!r}"
        self.target_entropy = self._wanted_entropy()  # SB3 would ask the environment, which not every agent has
        super()._setup_model()
        if self.log_ent_coef is not None:
            self.ent_coef_optimizer = torch.optim.Adam([self.log_ent_coef], fused=True)

    def _compile_networks(self) -> None:
        super()._compile_networks()
        self.policy.actor.distribution = self._compiled(self.policy.actor.distribution)  # type: ignore[method-assign]

    def _set_optimizers(self) -> None:
        super()._set_optimizers()
        set_adam(self.ent_coef_optimizer, self.temperature_learning_rate, self.temperature_beta)

    def _setup_contrast_optimizers(self, own: list[nn.Parameter], rate: float) -> None:
        encoder = list(self.policy.encoder.parameters())
        if self.joint_backward:
            super()._setup_contrast_optimizers(own, rate)
            return
        self.contrast_optimizer = torch.optim.Adam([*encoder, *own], rate, fused=True)
        if self.encoder_steps == 2:
            self.encoder_optimizer = torch.optim.Adam(encoder, rate, fused=True)

    def collect_rollouts(self, *arguments: Any, **settings: Any) -> Any:
        if self.use_sde:
            self.before_noise = rng_state()
        return super().collect_rollouts(*arguments, **settings)

    def _sample_action(self, *arguments: Any, **settings: Any) -> Any:
        self.before_noise = None
        return super()._sample_action(*arguments, **settings)

    def parts(self) -> dict[str, nn.Module]:
        temperature = self.log_ent_coef
        if temperature is None:
            temperature = self.ent_coef_tensor.log().reshape(1)
        holder = nn.Module()
        holder.register_buffer("log_ent_coef", temperature)
        return {**super().parts(), "temperature": holder}
