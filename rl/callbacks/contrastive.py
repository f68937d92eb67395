"""A contrastive auxiliary objective for an SB3 agent that exists already, as a callback."""

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.preprocessing import preprocess_obs
from torch import Tensor, nn

from dipole.core.contrast.gather import relate
from dipole.core.contrast.objective import Composite, Objective
from dipole.core.contrast.pairs import Pairs
from dipole.core.ground.errors import ConfigError, TrainingError
from dipole.core.train.nonfinite import terms_with_bad_gradient
from dipole.rl.arguments import check_number, check_whole
from dipole.rl.augmentation import SHIFT, shift
from dipole.rl.contrast import as_composite, require_unlabelled


def random_shift(images: Tensor) -> Tensor:
    """Move each image (B, C, H, W) by up to 4 pixels, repeating its border (DrQ); the size stays."""
    top, left = np.random.randint(0, 2 * SHIFT + 1, (2, len(images)))
    return shift(images, top, left, SHIFT)


def find_encoder(model: BaseAlgorithm) -> nn.Module:
    """The features extractor that an agent learns its values with (SAC, TD3, DDPG, DQN, PPO, A2C)."""
    policy: Any = model.policy
    for owner in (getattr(policy, "critic", None), getattr(policy, "q_net", None), policy):
        encoder = getattr(owner, "features_extractor", None)
        if isinstance(encoder, nn.Module):
            return encoder
    raise ConfigError(f"no features extractor was found in {type(policy).__name__}: give encoder=lambda model: ...")


class ContrastiveCallback(BaseCallback):
    """Adds steps of a contrastive objective on the agent's own encoder after each rollout.

    Anchors are the encoder's features of one random view of stored observations, positives those of another view by a
    momentum copy (of k views where the objective asks for k). Observations come from the replay buffer, or from the
    rollout buffer of an on-policy agent.

    Args:
        objective: text such as "infonce(similarity=bilinear) + 0.1*dp"; an Objective or Composite is trained as it is.
        updates: contrastive steps after each rollout.
        batch_size: observations in a step.
        augmentation: function (B, C, H, W) uint8 -> the same shape; random shifts by default.
        encoder: finds the module to train in the agent; its features extractor by default.
        learning_rate: of the contrastive Adam, which is separate from the agent's.
        tau: share of the encoder in each step of its momentum copy.

    Raises:
        ConfigError: for an argument out of range, an agent without images, an objective that needs labels.
        TrainingError: if loss or gradient is not finite, before the step.
    """

    def __init__(
        self,
        objective: str | Objective | Composite = "infonce(similarity=bilinear, temperature=1)",
        updates: int = 1,
        batch_size: int = 128,
        augmentation: Callable[[Tensor], Tensor] = random_shift,
        encoder: Callable[[BaseAlgorithm], nn.Module] = find_encoder,
        learning_rate: float = 1e-3,
        tau: float = 0.05,
    ) -> None:
        super().__init__()
        check_whole(updates=updates)
        check_whole(2, batch_size=batch_size)
        check_number(0, math.inf, learning_rate=learning_rate)
        check_number(0, 1, tau=tau)
        if not callable(augmentation):
            raise ConfigError(f"augmentation must be a function of images (B, C, H, W), got {augmentation!r}.")
        built = as_composite(objective)
        if built is None:
            raise ConfigError("ContrastiveCallback needs an objective; leave the callback out for none.")
        self.objective = built
        self.updates = updates
        self.batch_size = batch_size
        self.augmentation = augmentation
        self.find = encoder
        self.learning_rate = learning_rate
        self.tau = tau
        self.contrast: Composite | None = None

    def _init_callback(self) -> None:
        if self.contrast is not None:
            return  # a second learn() of the same agent goes on with what was learnt
        space = self.model.observation_space
        if not isinstance(space, spaces.Box) or len(space.shape) != 3:
            raise ConfigError(f"ContrastiveCallback needs an agent that observes images (C, H, W), not {space}.")
        self.encoder = self.find(self.model)
        width = getattr(self.encoder, "features_dim", None)
        if width is None:
            raise ConfigError("the encoder has no features_dim: use a BaseFeaturesExtractor, or set the attribute.")
        self.keys = copy.deepcopy(self.encoder).requires_grad_(False)
        contrast = self.objective.build(int(width))
        self.positives = contrast.positives_wanted or 1
        require_unlabelled(contrast, int(width), self.positives, self.batch_size)
        self.contrast = contrast.to(self.model.device)
        self.optimizer = torch.optim.Adam(
            [*self.encoder.parameters(), *self.contrast.parameters()], lr=self.learning_rate
        )

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        for _ in range(self.updates):
            images = self._observations()
            if images is None:
                return
            loss = self._step(images)
        self.logger.record("train/contrast_loss", loss)

    def _observations(self) -> Tensor | None:
        """A batch of stored observations (B, C, H, W); None while there are too few."""
        model: Any = self.model
        if getattr(model, "replay_buffer", None) is not None:
            ready = max(self.batch_size, getattr(model, "learning_starts", 0))
            if model.replay_buffer.size() * model.n_envs < ready:
                return None
            return model.replay_buffer.sample(self.batch_size).observations
        stored = model.rollout_buffer.observations
        stored = stored.reshape(-1, *model.observation_space.shape)
        rows = np.random.randint(0, len(stored), self.batch_size)
        return torch.as_tensor(stored[rows].astype(model.observation_space.dtype), device=model.device)

    def _features(self, encoder: nn.Module, images: Tensor) -> Tensor:
        normalise = getattr(self.model.policy, "normalize_images", True)
        return encoder(preprocess_obs(images, self.model.observation_space, normalize_images=normalise))

    def _step(self, images: Tensor) -> float:
        assert self.contrast is not None
        anchors = self._features(self.encoder, self.augmentation(images))
        with torch.no_grad():
            keys = [self._features(self.keys, self.augmentation(images)) for _ in range(self.positives)]
        pairs = Pairs.cross(anchors, torch.stack(keys, 1))
        outcome = self.contrast(pairs)
        for name, term in outcome.terms.items():
            if not np.isfinite(float(term)):
                raise TrainingError(
                    f"the term {name} is {float(term)} at agent step {self.num_timesteps}; no step was taken."
                )
        self.optimizer.zero_grad()
        outcome.loss.backward()
        gradients = [p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not bool(torch.stack(torch._foreach_norm(gradients)).isfinite().all()):
            terms = ", ".join(terms_with_bad_gradient(relate(pairs), self.contrast)) or str(self.contrast)
            raise TrainingError(
                f"the gradient of {terms} is not finite at agent step {self.num_timesteps}; no step was taken."
            )
        self.optimizer.step()
        self.contrast.after_step(self.learning_rate)
        with torch.no_grad():
            torch._foreach_lerp_(list(self.keys.parameters()), list(self.encoder.parameters()), self.tau)
        return float(outcome.loss.detach())
