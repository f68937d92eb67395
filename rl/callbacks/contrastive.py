"""A contrastive auxiliary objective for an SB3 agent that exists already, as a callback."""

import copy
import hashlib
import math
import warnings
from collections.abc import Callable, Iterator
from itertools import count, takewhile
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback, EventCallback
from stable_baselines3.common.preprocessing import preprocess_obs
from stable_baselines3.common.utils import obs_as_tensor, update_learning_rate
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from dipole.core.objectives.gather import all_gather_pairs
from dipole.core.objectives.objective import Composite, Objective
from dipole.core.objectives.pairs import Pairs
from dipole.core.train.update import not_finite
from dipole.core.utils.errors import ConfigError, DipoleError, TrainingError
from dipole.core.utils.freezing import in_mode
from dipole.core.utils.memory import check_fits
from dipole.core.utils.seeding import isolated
from dipole.core.utils.transfer import to_device
from dipole.rl.arguments import check_integers, check_number
from dipole.rl.contrast import given_composite, largest, require_unlabelled, rollouts_left, twins
from dipole.rl.envs.running.validate import image_keys, stack
from dipole.rl.inputs import require_stored_as_seen
from dipole.rl.sampling import SHIFT, shift, shown
from dipole.rl.seen import parts

Seen = Tensor | dict[str, Tensor]
"""Observations: images (B, C, H, W), or a dictionary that holds some."""


def random_shift(images: Tensor) -> Tensor:
    """Move each image (B, C, H, W) by up to 4 pixels, repeating its border (DrQ). The size stays."""
    top, left = np.random.randint(0, 2 * SHIFT + 1, (2, len(images)))
    return shift(images, top, left, SHIFT)


def find_encoder(model: BaseAlgorithm) -> nn.Module:
    """The features extractor that an agent learns its values with (SAC, TD3, DDPG, DQN, QR-DQN, PPO, A2C)."""
    policy: Any = model.policy
    owners = [getattr(policy, name, None) for name in ("critic", "q_net", "quantile_net")]
    for owner in (*owners, policy):
        encoder = getattr(owner, "features_extractor", None)
        if isinstance(encoder, nn.Module):
            return encoder
    raise ConfigError(f"no features extractor was found in {type(policy).__name__}: give encoder=lambda model: ...")


class ContrastiveCallback(BaseCallback):
    """Adds steps of a contrastive objective on the agent's own encoder, one or more for each rollout.

    Anchors are the encoder's features of one random view of stored observations, positives those of another view by a
    momentum copy (of k views where the objective asks for k). Observations come from the replay buffer, before the
    agent's own update, or from the rollout of an on-policy agent, after the update that it was collected for (the
    policy must not move between the two). Steps begin after the agent's `learning_starts`. No observation is the
    negative of an equal one. Of a dictionary the images are augmented, and the encoder sees all of it. Both encoders
    run in training mode. Buffers of the copy (batch norm) are the encoder's.

    Inside EveryNTimesteps or another EventCallback there are `updates` steps for each event, after the rollout that it
    happens in. The agent's file holds the objective's weights, the momentum copy and the optimizer as tensors and text,
    so that SB3 loads it without dipole. A loaded agent continues with them if it gets such a callback.

        >>> from stable_baselines3 import PPO
        >>> agent = PPO("CnnPolicy", DotEnv(size=36), n_steps=8, batch_size=8, n_epochs=1)
        >>> agent = agent.learn(8, callback=ContrastiveCallback("infonce(temperature=0.1)"))

    Args:
        objective: text such as "infonce(temperature=0.1) + 0.1*dp". An Objective or Composite is trained as it is.
            Cosines, the default, stay bounded. Raw products (similarity=bilinear or dot) of features that nothing else
            keeps small grow without bound, above all with an on-policy agent: use them with an encoder that ends in a
            normalisation.
        updates: contrastive steps for each rollout, >= 1.
        batch_size: observations in a step, >= 2. A replay or rollout with fewer gives as many as it has.
        augmentation: function (B, C, H, W) uint8 -> as many images, (B, C, H, W). Random shifts by default.
        encoder: finds the module to train in the agent. Its features extractor by default.
        learning_rate: of the contrastive Adam, which is separate from the agent's, >= 0.
        tau: share of the encoder in each step of its momentum copy, in [0, 1].

    Raises:
        SpecError: for a wrong objective text.
        ConfigError: for an argument out of range, an agent without images or without an encoder of them, an objective
            that needs labels, a second agent.
        OptionError: from training, a batch of images would not fit into memory.
        TrainingError: if loss or gradient is not finite, before the step.
    """

    def __init__(
        self,
        objective: str | Objective | Composite = "infonce(temperature=0.1)",
        updates: int = 1,
        batch_size: int = 128,
        augmentation: Callable[[Tensor], Tensor] = random_shift,
        encoder: Callable[[BaseAlgorithm], nn.Module] = find_encoder,
        learning_rate: float = 1e-3,
        tau: float = 0.05,
    ) -> None:
        super().__init__()
        if isinstance(updates, dict):  # SB3 calls a class as a function of its local and global names
            raise ConfigError("callback must be an instance, ContrastiveCallback(...), and not the class.")
        built = given_composite(objective)
        if built is None:
            raise ConfigError("ContrastiveCallback needs an objective. Leave the callback out for none.")
        check_integers(updates=updates)
        check_integers(2, batch_size=batch_size)
        check_number(0, math.inf, learning_rate=learning_rate)
        check_number(0, 1, tau=tau)
        if not callable(augmentation):
            raise ConfigError(f"augmentation must be a function of images (B, C, H, W), got {augmentation!r}.")
        if not callable(encoder):
            raise ConfigError(f"encoder must be a function that finds a module in the agent, got {encoder!r}.")
        self.objective, self.updates, self.batch_size = built, updates, batch_size
        self.augmentation, self.find = augmentation, encoder
        self.learning_rate, self.tau = learning_rate, tau
        self.contrast: Composite | None = None
        self._owner: BaseAlgorithm | None = None
        self._left: int | None = None  # steps until the end of `learn`
        self._events: int | None = None  # since the last steps, inside an EventCallback
        self._parents: list[EventCallback] = []
        self._stepped = self._few = False  # in this `learn`: any step, too few observations for one
        self._rollout: dict[str, NDArray[Any]] | None = None  # (N, ...), every observation once
        self._learned: Learned

    def _init_callback(self) -> None:
        self._stepped = False
        self._events = 0 if self._parents else None
        if self.contrast is not None:
            if self.model is not self._owner:
                raise ConfigError(
                    "this ContrastiveCallback belongs to another agent, whose encoder it trains: make one for each "
                    "(ContrastiveCallback(callback.contrast) takes over what the objective has learned)."
                )
            self._learned.training = self.model.start_time
            return  # a second learn() of the same agent goes on with what was learnt
        space = self.model.observation_space
        self._images = image_keys(space)
        if not self._images:
            raise ConfigError(f"ContrastiveCallback needs an agent that observes images (C, H, W), not {space}.")
        require_stored_as_seen(self.model)
        try:
            self.encoder = self.find(self.model)
        except (AttributeError, KeyError, IndexError, TypeError) as error:
            raise ConfigError(f"encoder finds no module in a {type(self.model).__name__}: {error}") from error
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
        model: Any = self.model
        buffer = model.rollout_buffer if getattr(model, "replay_buffer", None) is None else model.replay_buffer
        most = max(2, min(self.batch_size, buffer.buffer_size * model.n_envs))
        for key in self._images:
            some = torch.empty(0, device=model.device)
            check_fits("a batch of images", (most, *parts(space)[key].shape), some, "a copy")
        require_unlabelled(contrast, int(width), self.positives, most)
        self._try(int(width))
        self.contrast = contrast.to(self.model.device)
        self._owner = self.model
        trained = [*self.encoder.parameters(), *self.contrast.parameters()]
        self.optimizer = torch.optim.Adam(trained, lr=self.learning_rate)
        self._learned = Learned(self.contrast, self.keys, self.optimizer, model.start_time)
        began = model.start_time  # the first attribute that no other callback of this training has
        name = next(each for each in _places() if getattr(getattr(model, each, None), "training", None) != began)
        before = learned_states(model).get(name)
        if before is not None:
            self._learned.take(before, name)
        setattr(model, name, self._learned)

    def _follow_parents(self) -> None:
        """Hear of rollouts inside an EventCallback too. SB3 tells its child of nothing but the events."""
        parent = self.parent
        while parent is not None:
            if isinstance(parent, EventCallback) and parent not in self._parents:
                self._events = 0
                self._parents.append(parent)
                for name in ("_on_rollout_start", "_on_rollout_end", "_on_training_end"):
                    calls = getattr(parent, name), getattr(self, name)
                    setattr(parent, name, lambda calls=calls: [call() for call in calls])
            parent = parent.parent

    def _try(self, width: int) -> None:
        """Say before training what augmentation and encoder cannot do with the agent's observations."""
        space = self.model.observation_space
        with isolated(0), torch.no_grad():
            rows = [space.sample() for _ in range(2)]
            trial = copy.deepcopy(self.keys).train()  # whose statistics may change
            try:
                views = self._augmented(obs_as_tensor(stack(rows), self.model.device))
                for each in (parts(views)[key] for key in self._images):
                    if not isinstance(each, Tensor) or len(each) != 2:
                        raise ConfigError(
                            f"augmentation made {shown(each)} of two images. It must give as many, (B, C, H, W)."
                        )
                found: Any = self._features(trial, views)
            except DipoleError:
                raise
            except Exception as error:  # of the user's own code
                raise ConfigError(
                    f"the encoder {type(self.encoder).__name__} cannot see augmented observations of {space}: {error}"
                ) from error
        if not isinstance(found, Tensor) or found.shape != (2, width) or not found.is_floating_point():
            raise ConfigError(
                f"the encoder {type(self.encoder).__name__} makes {shown(found)} of two observations, not "
                f"{(2, width)} as its features_dim says."
            )

    def _on_training_start(self) -> None:
        self._follow_parents()  # SB3's CallbackList names a parent after `_init_callback`

    def _on_step(self) -> bool:
        self._follow_parents()
        if self._events is not None and self._agent_learns():
            self._events += 1
        return True

    def _agent_learns(self) -> bool:
        """Return whether SB3 would update the agent by now."""
        return self.model.num_timesteps > getattr(self.model, "learning_starts", 0)

    def on_rollout_start(self) -> None:
        """Take a step for every rollout. An EventCallback does not call this."""
        self._events = None
        super().on_rollout_start()

    def _on_rollout_start(self) -> None:
        # The steps of an on-policy agent, whose own update on the last rollout is done.
        if self._rollout is not None:
            self._learn()
            self._rollout = None

    def _on_training_end(self) -> None:
        self._on_rollout_start()
        if not self._stepped:
            warnings.warn(self._why_no_step(), RuntimeWarning, stacklevel=2)

    def _why_no_step(self) -> str:
        model: Any = self.model
        reason = "No rollout was complete: train for longer"
        if hasattr(model, "learning_starts") and not self._agent_learns():
            reason = f"The agent's learning_starts is {model.learning_starts}: lower it, or train for longer"
        elif self._few:
            reason = "There were fewer than two different observations: raise n_steps, train longer, or see the images"
        elif self._events == 0:
            reason = "It is inside an EventCallback that had no event: let it happen more often"
        return f"ContrastiveCallback took no step in {model.num_timesteps} timesteps. {reason}."

    def _on_rollout_end(self) -> None:
        model: Any = self.model
        if getattr(model, "replay_buffer", None) is None:  # its buffer is emptied before the next rollout begins
            self._rollout = distinct(model.rollout_buffer.observations, model.observation_space)
        elif self._agent_learns():
            self._learn()

    def _learn(self) -> None:
        updates, rollouts = self.updates, rollouts_left(self.model)
        if self._events is not None:
            updates, rollouts, self._events = updates * self._events, None, 0
        for number in range(updates):
            self._left = None if rollouts is None else updates * (rollouts + 1) - number - 1
            seen = self._drawn()
            self._few = seen is None
            if seen is not None:
                with in_mode(True, self.encoder, self.keys):
                    self.logger.record("train/contrast_loss", self._step(seen))
                self._stepped = True

    def _drawn(self) -> Seen | None:
        """Return different observations of the rollout, or a batch of the replay. None if there are fewer than two."""
        model: Any = self.model
        if self._rollout is not None:
            rows = np.random.permutation(len(next(iter(self._rollout.values()))))[: self.batch_size]
            seen = {key: to_device(torch.from_numpy(each[rows]), model.device) for key, each in self._rollout.items()}
            return seen.get("", seen) if len(rows) > 1 else None
        replay = model.replay_buffer
        count = min(self.batch_size, replay.size() * model.n_envs)
        if count < 2 or not np.any(getattr(replay, "ep_length", True)):  # HER draws from complete episodes alone
            return None
        return replay.sample(count, env=model._vec_normalize_env).observations

    def _augmented(self, seen: Seen) -> Seen:
        if isinstance(seen, Tensor):
            return self.augmentation(seen)
        return seen | {key: self.augmentation(seen[key]) for key in self._images}

    def _features(self, encoder: nn.Module, seen: Seen) -> Tensor:
        normalise = getattr(self.model.policy, "normalize_images", True)
        return encoder(preprocess_obs(seen, self.model.observation_space, normalize_images=normalise))

    def _step(self, seen: Seen) -> float:
        """Step the encoder and the objective, and return the loss."""
        assert self.contrast is not None
        anchors = self._features(self.encoder, self._augmented(seen))
        with torch.no_grad():
            keys = [self._features(self.keys, self._augmented(seen)) for _ in range(self.positives)]
        pairs = Pairs.cross(anchors, torch.stack(keys, 1), ignored=equal(seen, self.positives))
        outcome = self.contrast(pairs)
        self.optimizer.zero_grad()
        outcome.loss.backward()
        gradients = [p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = largest(gradients).amax()
        if not bool((outcome.loss.detach() + norm).isfinite()):
            said = not_finite(outcome, all_gather_pairs(pairs), self.contrast, norm)
            raise TrainingError(f"{said} No step was taken at agent step {self.num_timesteps}.")
        update_learning_rate(self.optimizer, self.learning_rate)  # a loaded state brings its own
        self.optimizer.step()
        # Adam counts the steps. Its state is saved with the agent.
        done = max(int(each["step"]) for each in self.optimizer.state.values())
        self.contrast.after_step(self.learning_rate, done, None if self._left is None else done + self._left)
        with torch.no_grad():
            torch._foreach_lerp_(list(self.keys.parameters()), list(self.encoder.parameters()), self.tau)
            for own, followed in zip(self.keys.buffers(), self.encoder.buffers(), strict=True):
                own.copy_(followed)
        return float(outcome.loss.detach())


LEARNED = "contrastive"
"""The attribute of a trained agent that holds `Learned`, or its state from a file. SB3's `save` writes it.

That of a second callback in one training is "contrastive_2".
"""


class Learned:
    """The state of a callback that is saved with the agent: weights, momentum copy, optimizer.

    It is pickled as a dictionary of text and CPU tensors, which loads without dipole.
    """

    __slots__ = ("_parts", "training")  # SB3 writes a __dict__ into its file as text

    def __init__(self, contrast: Composite, keys: nn.Module, optimizer: torch.optim.Optimizer, training: float) -> None:
        """`training` is the `start_time` of the agent's last training with the callback."""
        self.training = training
        self._parts: dict[str, Any] = {"contrast": contrast, "keys": keys, "optimizer": optimizer}

    def state(self) -> dict[str, Any]:
        """The objective's text, and a state_dict of each part."""
        return {"objective": str(self._parts["contrast"]), **{k: each.state_dict() for k, each in self._parts.items()}}

    def take(self, state: dict[str, Any], name: str) -> None:
        """Continue from `state`, the agent's attribute `name`. Raise ConfigError for another objective or encoder."""
        text = str(self._parts["contrast"])
        if state["objective"] != text:
            raise ConfigError(
                f"the agent was trained with a callback of the objective {state['objective']!r}, this one has {text!r}"
                f": use the same, or begin anew with `del agent.{name}`."
            )
        try:
            for name, part in self._parts.items():
                part.load_state_dict(state[name])
        except (RuntimeError, ValueError, KeyError) as error:
            raise ConfigError(f"what the agent's callback has learned does not fit its encoder: {error}") from error

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (tree_map_only(Tensor, lambda each: each.detach().cpu().clone(), self.state()),)


def _places() -> Iterator[str]:
    return (LEARNED if number == 1 else f"{LEARNED}_{number}" for number in count(1))


def learned_states(agent: BaseAlgorithm) -> dict[str, dict[str, Any]]:
    """Return what an agent's callbacks have learned, as text and tensors, by the name of their attribute."""
    found = {}
    for name in takewhile(lambda each: getattr(agent, each, None) is not None, _places()):
        learned = getattr(agent, name)
        found[name] = learned.state() if isinstance(learned, Learned) else learned
    return found


def distinct(stored: Any, space: spaces.Space[Any]) -> dict[str, NDArray[Any]]:
    """Return the different observations of a rollout (steps, environments, ...) by key, "" if it has no keys."""
    own = parts(space)
    flat = {key: each.reshape(-1, *own[key].shape).astype(own[key].dtype) for key, each in parts(stored).items()}
    seen: dict[bytes, int] = {}
    for row in range(len(next(iter(flat.values())))):
        content = b"".join(each[row].tobytes() for each in flat.values())
        seen.setdefault(hashlib.blake2b(content, digest_size=16).digest(), row)
    return {key: each[list(seen.values())] for key, each in flat.items()}


@torch.no_grad()
def equal(seen: Seen, positives: int) -> Tensor:
    """Return the candidates (B, B K) that show the same observation as the anchor, and -1 elsewhere.

    Observations are compared by a randomly weighted sum of their bytes, modulo 2^64, on their device.
    """
    names: Any = 0
    for part in parts(seen).values():
        content = part.contiguous().view(len(part), -1).view(torch.uint8)
        weights = torch.from_numpy(np.random.default_rng(content.shape[1]).integers(2**62, size=content.shape[1]))
        names = names * 31 + (content.long() * to_device(weights, part.device)).sum(1)
    return twins(names, positives)
