"""A contrastive auxiliary objective for an SB3 agent that exists already, as a callback."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.preprocessing import preprocess_obs
from stable_baselines3.common.utils import obs_as_tensor
from torch import Tensor, nn

from dipole.core.contrast.gather import relate
from dipole.core.contrast.objective import Composite, Objective
from dipole.core.contrast.pairs import Pairs
from dipole.core.ground.errors import ConfigError, TrainingError
from dipole.core.ground.seeding import isolated
from dipole.core.ground.transfer import Fetched, sent
from dipole.core.train.nonfinite import terms_with_bad_gradient
from dipole.core.train.optimizer import skip_if
from dipole.rl.arguments import check_number, check_whole
from dipole.rl.augmentation import SHIFT, shift
from dipole.rl.contrast import as_composite, require_unlabelled

Seen = Tensor | dict[str, Tensor]
"""Observations: images (B, C, H, W), or a dictionary that holds some."""


def random_shift(images: Tensor) -> Tensor:
    """Move each image (B, C, H, W) by up to 4 pixels, repeating its border (DrQ); the size stays."""
    top, left = np.random.randint(0, 2 * SHIFT + 1, (2, len(images)))
    return shift(images, top, left, SHIFT)


def find_encoder(model: BaseAlgorithm) -> nn.Module:
    """The features extractor that an agent learns its values with (SAC, TD3, DDPG, DQN, QR-DQN, PPO, A2C)."""
    policy: Any = model.policy
    for name in ("critic", "q_net", "quantile_net"):
        encoder = getattr(getattr(policy, name, None), "features_extractor", None)
        if isinstance(encoder, nn.Module):
            return encoder
    if isinstance(getattr(policy, "features_extractor", None), nn.Module):
        return policy.features_extractor
    raise ConfigError(f"no features extractor was found in {type(policy).__name__}: give encoder=lambda model: ...")


class ContrastiveCallback(BaseCallback):
    """Adds steps of a contrastive objective on the agent's own encoder after each rollout.

    Anchors are the encoder's features of one random view of stored observations, positives those of another view by a
    momentum copy (of k views where the objective asks for k). Observations come from the replay buffer, or from the
    rollout buffer of an on-policy agent. Of a dictionary the images are augmented, and the encoder sees all of it.

    Args:
        objective: text such as "infonce(similarity=bilinear) + 0.1*dp"; an Objective or Composite is trained as it is.
        updates: contrastive steps after each rollout.
        batch_size: observations in a step.
        augmentation: function (B, C, H, W) uint8 -> the same shape; random shifts by default.
        encoder: finds the module to train in the agent; its features extractor by default.
        learning_rate: of the contrastive Adam, which is separate from the agent's.
        tau: share of the encoder in each step of its momentum copy.

    Raises:
        ConfigError: for an argument out of range, an agent without images or without an encoder of them, an objective
            that needs labels, a second agent.
        TrainingError: if loss or gradient is not finite, before the step; on a GPU the step is left out there, and the
            next one raises (or the end of training).
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
        self._owner: BaseAlgorithm | None = None
        self._unread: _Unread | None = None
        self._logged: Fetched | None = None

    def _init_callback(self) -> None:
        if self.contrast is not None:
            if self.model is not self._owner:
                raise ConfigError(
                    "this ContrastiveCallback belongs to another agent, whose encoder it trains: make one for each "
                    "(ContrastiveCallback(callback.contrast) takes over what the objective has learned)."
                )
            return  # a second learn() of the same agent goes on with what was learnt
        space = self.model.observation_space
        self._images = image_keys(space)
        if not self._images:
            raise ConfigError(f"ContrastiveCallback needs an agent that observes images (C, H, W), not {space}.")
        self.encoder = self.find(self.model)
        width = getattr(self.encoder, "features_dim", None)
        if width is None:
            raise ConfigError("the encoder has no features_dim: use a BaseFeaturesExtractor, or set the attribute.")
        if not any(parameter.requires_grad for parameter in self.encoder.parameters()):
            raise ConfigError(
                f"the agent's encoder {type(self.encoder).__name__} has nothing to train: give the agent one that has "
                "(CnnPolicy, or MultiInputPolicy for a dictionary), or find another with encoder=lambda model: ..."
            )
        self.keys = copy.deepcopy(self.encoder).requires_grad_(False)
        contrast = self.objective.build(int(width))
        self.positives = contrast.positives_wanted or 1
        require_unlabelled(contrast, int(width), self.positives, self.batch_size)
        self._try(int(width))
        self.contrast = contrast.to(self.model.device)
        self._owner = self.model
        self.optimizer = torch.optim.Adam(
            [*self.encoder.parameters(), *self.contrast.parameters()],
            lr=self.learning_rate,
            # Only the fused form can leave a step out without the host knowing.
            fused=True if self._reads_late else None,
        )

    def _try(self, width: int) -> None:
        """Say before training what the encoder cannot do with the agent's observations."""
        space = self.model.observation_space
        with isolated(0), torch.no_grad():
            rows = [space.sample() for _ in range(2)]
            trial = copy.deepcopy(self.keys)  # whose statistics may change
            try:
                seen = obs_as_tensor(_stacked(rows), self.model.device)
                found = self._features(trial, seen)
            except (RuntimeError, ValueError, TypeError, AssertionError, IndexError, KeyError) as error:
                raise ConfigError(
                    f"the encoder {type(self.encoder).__name__} cannot see observations of {space}: {error}"
                ) from error
        if found.shape != (2, width) or not found.is_floating_point():
            raise ConfigError(
                f"the encoder {type(self.encoder).__name__} makes {tuple(found.shape)} of two observations, not "
                f"{(2, width)} as its features_dim says."
            )

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        for _ in range(self.updates):
            seen = self._observations()
            if seen is None:
                return
            loss = self._step(seen)
        if not isinstance(loss, Tensor):
            self.logger.record("train/contrast_loss", loss)
            return
        if self._logged is not None:  # of the rollout before: it has arrived by now
            self.logger.record("train/contrast_loss", float(self._logged.read()))
        self._logged = Fetched(loss)

    def _on_training_end(self) -> None:
        self.settle()

    @property
    def _reads_late(self) -> bool:
        """Whether numbers stay on the device, and what is not finite is told a step late."""
        return self.model.device.type in ("cuda", "meta")

    def _observations(self) -> Seen | None:
        """A batch of stored observations, (B, C, H, W) or a dictionary of such; None while there are too few."""
        model: Any = self.model
        if getattr(model, "replay_buffer", None) is not None:
            ready = max(self.batch_size, getattr(model, "learning_starts", 0))
            if model.replay_buffer.size() * model.n_envs < ready:
                return None
            return model.replay_buffer.sample(self.batch_size).observations
        stored, space = model.rollout_buffer.observations, model.observation_space
        parts = stored if isinstance(stored, dict) else {"": stored}
        spaces_of = space.spaces if isinstance(stored, dict) else {"": space}
        flat = {key: each.reshape(-1, *spaces_of[key].shape) for key, each in parts.items()}
        rows = np.random.randint(0, len(next(iter(flat.values()))), self.batch_size)
        taken = {
            key: sent(torch.from_numpy(each[rows].astype(spaces_of[key].dtype)), model.device)
            for key, each in flat.items()
        }
        return taken if isinstance(stored, dict) else taken[""]

    def _augmented(self, seen: Seen) -> Seen:
        if isinstance(seen, Tensor):
            return self.augmentation(seen)
        return {key: self.augmentation(each) if key in self._images else each for key, each in seen.items()}

    def _features(self, encoder: nn.Module, seen: Seen) -> Tensor:
        normalise = getattr(self.model.policy, "normalize_images", True)
        return encoder(preprocess_obs(seen, self.model.observation_space, normalize_images=normalise))

    def _step(self, seen: Seen) -> float | Tensor:
        assert self.contrast is not None
        anchors = self._features(self.encoder, self._augmented(seen))
        with torch.no_grad():
            keys = [self._features(self.keys, self._augmented(seen)) for _ in range(self.positives)]
        pairs = Pairs.cross(anchors, torch.stack(keys, 1))
        outcome = self.contrast(pairs)
        self.optimizer.zero_grad()
        outcome.loss.backward()
        gradients = [p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack(torch._foreach_norm(gradients, float("inf"))).amax()
        values = torch.stack([*(term.value.detach() for term in outcome.terms.values()), outcome.loss.detach(), norm])
        self.settle()  # the step before, ahead of this one
        unread = _Unread(list(outcome.terms), pairs, self.num_timesteps, Fetched(values))
        if self._reads_late:
            self._unread = unread
            skip_if(self.optimizer, ~values.isfinite().all())
        else:
            self._require_finite(unread)
        self.optimizer.step()
        self.contrast.after_step(self.learning_rate)
        with torch.no_grad():
            torch._foreach_lerp_(list(self.keys.parameters()), list(self.encoder.parameters()), self.tau)
        return outcome.loss.detach() if self._reads_late else float(outcome.loss.detach())

    def settle(self) -> None:
        """Raise TrainingError if the last step was left out; at once, where a step tells nothing itself."""
        unread, self._unread = self._unread, None
        if unread is not None:
            self._require_finite(unread)

    def _require_finite(self, unread: "_Unread") -> None:
        assert self.contrast is not None
        *values, norm = unread.found.read().tolist()
        where = f"at agent step {unread.step}; no step was taken."
        for name, value in zip([*unread.terms, str(self.contrast)], values, strict=True):
            if not math.isfinite(value):
                raise TrainingError(f"the term {name} is {value} {where}")
        if not math.isfinite(norm):
            terms = ", ".join(terms_with_bad_gradient(relate(unread.pairs), self.contrast)) or str(self.contrast)
            raise TrainingError(f"the gradient of {terms} is not finite {where}")


@dataclass(frozen=True)
class _Unread:
    """A step whose numbers are on their way to the host: those of each term, of the loss, the largest gradient."""

    terms: list[str]
    pairs: Pairs
    step: int
    found: Fetched


def image_keys(space: spaces.Space[Any]) -> tuple[str, ...]:
    """Which parts of an observation are images (C, H, W): ("",) for one that is nothing else."""
    if isinstance(space, spaces.Dict):
        return tuple(key for key, each in space.spaces.items() if image_keys(each) == ("",))
    return ("",) if isinstance(space, spaces.Box) and len(space.shape) == 3 else ()


def _stacked(rows: list[Any]) -> Any:
    if isinstance(rows[0], dict):
        return {key: np.stack([row[key] for row in rows]) for key in rows[0]}
    return np.stack(rows)
