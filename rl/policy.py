"""The networks of the agent as an SB3 policy: one set of convolutions, two heads, twin Q functions, momentum copies."""

import math
from typing import Any

import torch
from gymnasium import spaces
from stable_baselines3.common.policies import ContinuousCritic
from stable_baselines3.common.type_aliases import PyTorchObs, Schedule
from stable_baselines3.sac.policies import Actor, SACPolicy
from torch import Tensor, nn

from dipole.core.contrast.objective import Composite
from dipole.rl.contrast import as_composite, fit
from dipole.rl.encoder import PixelEncoder, initialise
from dipole.rl.settings import Settings


class ContrastiveActor(Actor):
    """SB3's actor with the log standard deviation squashed into its range instead of clamped."""

    log_std_bounds: tuple[float, float]

    def distribution(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Features (B, d) -> mean and log standard deviation (B, A) of the Gaussian before the tanh."""
        latent = self.latent_pi(features)
        low, high = self.log_std_bounds
        raw = self.log_std(latent).to(features.dtype)  # type: ignore[operator]
        return self.mu(latent).to(features.dtype), low + 0.5 * (high - low) * (torch.tanh(raw) + 1)

    def get_action_dist_params(self, obs: PyTorchObs) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        mean, log_std = self.distribution(self.extract_features(obs, self.features_extractor))
        return mean, log_std, {}


def sample_action(mean: Tensor, log_std: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Squashed Gaussian action and its log density (SAC, App. C).

        u = mean + exp(log_std) noise,  a = tanh(u),
        log pi = sum_d [ -noise^2 / 2 - log_std - log(2 pi) / 2 - log(1 - a^2 + 1e-6) ]

    Args:
        mean, log_std, noise: (B, A).

    Returns:
        a (B, A) and log pi (B, 1).
    """
    action = torch.tanh(mean + log_std.exp() * noise)
    density = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
    return action, (density - torch.log(torch.relu(1 - action.square()) + 1e-6)).sum(-1, keepdim=True)


class ContrastivePolicy(SACPolicy):
    """Actor, critic, momentum critic and the contrastive objective.

    The actor's convolutions are the critic's own; its optimizer leaves them alone. The momentum critic's encoder is the
    key encoder.

    Args:
        settings: all of `Settings`; SB3 passes spaces and schedule.
        image_size: what the network sees.
        contrast: the objective; by default it is built from the settings.
    """

    actor: ContrastiveActor
    contrast: Composite | None

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Box,
        lr_schedule: Schedule,
        settings: Settings | None = None,
        image_size: int | None = None,
        contrast: Composite | None = None,
        use_sde: bool = False,
    ) -> None:
        assert not use_sde
        self.settings = settings or Settings()
        size = image_size or observation_space.shape[-1]  # type: ignore[index]
        super().__init__(
            observation_space,
            action_space,
            lr_schedule,
            net_arch=list(self.settings.hidden),
            features_extractor_class=PixelEncoder,
            features_extractor_kwargs={
                "features_dim": self.settings.features,
                "image_size": size,
                "layers": self.settings.layers,
                "filters": self.settings.filters,
                "tanh": self.settings.tanh,
                "channels_last": self.settings.channels_last,
                "chunk": self.settings.chunk,
            },
            normalize_images=False,  # the encoder divides by 255 itself, chunk by chunk
        )
        contrast = contrast if contrast is not None else as_composite(self.settings.objective)
        self.contrast = fit(contrast, self.settings) if contrast is not None else None

    def _build(self, lr_schedule: Schedule) -> None:
        self.actor = self.make_actor()
        self.critic = self.make_critic()
        self.critic_target = self.make_critic()
        for network in (self.actor.latent_pi, self.critic):
            network.apply(initialise)
        # One orthogonal matrix for mean and deviation, as a single output layer would have.
        outputs: list[Any] = [self.actor.mu, self.actor.log_std]
        joint = nn.init.orthogonal_(torch.empty(2 * len(outputs[0].weight), outputs[0].weight.shape[1]))
        with torch.no_grad():
            for layer, weight in zip(outputs, joint.chunk(2), strict=True):
                layer.weight.copy_(weight)
                layer.bias.zero_()
        self.critic_target.load_state_dict(self.critic.state_dict())
        self.critic_target.requires_grad_(False)
        self.critic_target.set_training_mode(False)
        self.actor.features_extractor.convs = self.encoder.convs
        rate = lr_schedule(1)
        shared = {id(parameter) for parameter in self.encoder.convs.parameters()}
        self.actor.optimizer = self.adam(
            [parameter for parameter in self.actor.parameters() if id(parameter) not in shared], rate
        )
        self.critic.optimizer = self.adam(self.critic.parameters(), rate)

    @property
    def encoder(self) -> PixelEncoder:
        """The critic's encoder: the anchors' encoder."""
        assert isinstance(self.critic.features_extractor, PixelEncoder)
        return self.critic.features_extractor

    @property
    def key_encoder(self) -> PixelEncoder:
        """The momentum critic's encoder: the positives' encoder."""
        assert isinstance(self.critic_target.features_extractor, PixelEncoder)
        return self.critic_target.features_extractor

    def adam(self, parameters: Any, rate: float, beta: float | None = None) -> torch.optim.Adam:
        """Adam in its fused form (a third of the time on a CPU, the same values)."""
        betas = (self.settings.beta if beta is None else beta, 0.999)
        return torch.optim.Adam(parameters, lr=rate, betas=betas, fused=True)

    def make_actor(self, features_extractor: Any = None) -> ContrastiveActor:
        kwargs = self._update_features_extractor(self.actor_kwargs, features_extractor)
        actor = ContrastiveActor(**kwargs).to(self.device)
        actor.log_std_bounds = self.settings.log_std_bounds
        return actor

    def _get_constructor_parameters(self) -> dict[str, Any]:
        return {
            "observation_space": self.observation_space,
            "action_space": self.action_space,
            "lr_schedule": self._dummy_schedule,
            "settings": self.settings,
            "image_size": self.encoder.image_size,
        }


def q_values(critic: ContinuousCritic, features: Tensor, actions: Tensor) -> Tensor:
    """Both Q functions on features (B, d) and actions (B, A): (B, 2), in the features' precision."""
    joint = torch.cat([features, actions], 1)
    return torch.cat([network(joint) for network in critic.q_networks], 1).to(features.dtype)
