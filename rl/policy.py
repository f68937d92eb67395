"""The networks of the agent as an SB3 policy: one set of convolutions, two heads, twin Q functions, momentum copies."""

import math
from collections.abc import Callable
from typing import Any

import torch
from gymnasium import spaces
from stable_baselines3.common.policies import ContinuousCritic
from stable_baselines3.common.type_aliases import Schedule
from torch import Tensor

from dipole.core.objectives.objective import Composite
from dipole.rl.contrast import as_composite, fit
from dipole.rl.encoder import PixelEncoder
from dipole.rl.networks import PixelPolicy
from dipole.rl.seen import layout
from dipole.rl.settings import Settings


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


class Contrasted:
    """What the agents' policies hold besides their networks: all settings, and the contrastive objective."""

    settings: Settings
    contrast: Composite | None
    encoder: Any
    observation_space: spaces.Space[Any]
    action_space: Any
    _dummy_schedule: Any

    def hold(self, contrast: Composite | None) -> None:
        """Take an objective; None: the one that the settings name, where they name one."""
        contrast = contrast if contrast is not None else as_composite(self.settings.objective)
        self.contrast = fit(contrast, self.settings) if contrast is not None else None

    def _get_constructor_parameters(self) -> dict[str, Any]:
        return {
            "observation_space": self.observation_space,
            "action_space": self.action_space,
            "lr_schedule": self._dummy_schedule,
            "settings": self.settings,
            "image_size": self.encoder.image_size,
        }


class ContrastivePolicy(Contrasted, PixelPolicy):
    """Actor, critic, momentum critic and the contrastive objective; the momentum critic's encoder is the key encoder.

    Args:
        settings: all of `Settings`; SB3 passes spaces and schedule.
        image_size: what the network sees.
        contrast: the objective; by default it is built from the settings.
    """

    encoder_class = PixelEncoder

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Box,
        lr_schedule: Schedule,
        settings: Settings | None = None,
        image_size: int | tuple[int, int] | None = None,
        contrast: Composite | None = None,
        use_sde: bool = False,
    ) -> None:
        self.settings = settings or Settings()
        super().__init__(
            observation_space,
            action_space,
            lr_schedule,
            encoder_keywords(self.settings, image_size or layout(observation_space).shape[-1]),
            log_std_bounds=self.settings.log_std_bounds,
            sde=sde_keywords(self.settings),
            **head_keywords(self.settings),
        )
        self.hold(contrast)

    def compile_networks(self) -> None:
        """Let `torch.compile` fuse what an update calls; weights and their names stay as they are."""
        compile_encoders(self.settings, self.encoder, self.key_encoder, self.actor.features_extractor)
        self.actor.distribution = compiled(self.settings, self.actor.distribution)  # type: ignore[method-assign]


def compile_encoders(settings: Settings, *encoders: Any) -> None:
    """Let `torch.compile` fuse both halves of each encoder."""
    for encoder in encoders:
        for name in ("convolve", "head"):
            setattr(encoder, name, compiled(settings, getattr(encoder, name)))


def compiled(settings: Settings, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function as `torch.compile` makes it in the mode of the settings."""
    mode = settings.compile if isinstance(settings.compile, str) else None
    return torch.compile(function, dynamic=False, mode=mode)


def encoder_keywords(settings: Settings, image_size: int | tuple[int, int]) -> dict[str, Any]:
    """Keywords of `PixelEncoder`."""
    return {
        "features_dim": settings.features,
        "image_size": image_size,
        "layers": settings.layers,
        "filters": settings.filters,
        "tanh": settings.tanh,
        "channels_last": settings.channels_last,
        "chunk": settings.chunk,
    }


def head_keywords(settings: Settings) -> dict[str, Any]:
    """Keywords of actor and critic."""
    return {
        "hidden": list(settings.hidden),
        "critic_hidden": None if settings.critic_hidden is None else list(settings.critic_hidden),
        "critics": settings.n_critics,
        "activation": settings.activation,
        "beta": settings.beta,
    }


def sde_keywords(settings: Settings) -> dict[str, Any] | None:
    """Keywords of gSDE; None without it."""
    if not settings.use_sde:
        return None
    return {name: getattr(settings, name) for name in ("log_std_init", "use_expln", "clip_mean")}


def q_values(critic: ContinuousCritic, features: Tensor, actions: Tensor) -> Tensor:
    """All Q functions on features (B, d) and actions (B, A): (B, n_critics), in the features' precision."""
    joint = torch.cat([features, actions], 1)
    return torch.cat([network(joint) for network in critic.q_networks], 1).to(features.dtype)
