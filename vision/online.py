"""A linear probe that is trained during the run on the encoder's features, without an effect on the encoder."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from dipole.core.train.config import Settings
from dipole.core.utils.distributed import all_sum
from dipole.core.utils.errors import ConfigError
from dipole.core.utils.uncompiled import uncompiled
from dipole.vision.encoders.base import Encoder
from dipole.vision.image_set import ImageSet


class OnlineConfig(Settings):
    """The [vision.probe.online] table: a linear probe that is trained with the encoder, on all views of every batch."""

    optimizer: Literal["sgd", "adam"] = Field("adam", description="the probe's own optimizer")
    learning_rate: float = Field(1e-3, gt=0, description="of the probe, constant")
    momentum: float | None = Field(None, ge=0, lt=1, description="sgd only; default 0.9")
    weight_decay: float = Field(0.0, ge=0, description="of the probe")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.optimizer == "adam" and self.momentum is not None:
            raise ValueError("momentum has no effect with optimizer 'adam'; use sgd")
        return self


class OnlineProbe:
    """Softmax regression W x + b from weights of zero, with one step of its own optimizer for each training step.

        loss = mean over all views and ranks of -log softmax(W x + b)_y

    It draws no random number, and x carries no gradient: the encoder's weights equal those of a run without it.

    Args:
        config: its optimizer.
        encoders: it reads their last features, concatenated.
        classes: number of classes C. Labels are 0 to C - 1.
        device: of the features.
    """

    def __init__(self, config: OnlineConfig, encoders: Sequence[Encoder], classes: int, device: torch.device) -> None:
        self.steps = 0
        width = sum(encoder.taps[encoder.last] for encoder in encoders)
        self.weight = torch.zeros(classes, width, device=device, requires_grad=True)
        self.bias = torch.zeros(classes, device=device, requires_grad=True)
        both, rate, decay = [self.weight, self.bias], config.learning_rate, config.weight_decay
        self.optimizer: torch.optim.Optimizer
        if config.optimizer == "adam":
            self.optimizer = torch.optim.Adam(both, lr=rate, weight_decay=decay)
        else:
            momentum = 0.9 if config.momentum is None else config.momentum
            self.optimizer = torch.optim.SGD(both, lr=rate, momentum=momentum, weight_decay=decay)
        self._features: list[list[Tensor]] = [[] for _ in encoders]
        self._recording = False
        for place, encoder in enumerate(encoders):
            encoder.register_forward_hook(partial(self._record, place))

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the encoders' features in a `with` block."""
        self._features = [[] for _ in self._features]
        self._recording = True
        try:
            yield
        finally:
            self._recording = False

    @uncompiled
    def _record(self, place: int, encoder: nn.Module, inputs: Any, features: Tensor) -> None:
        if self._recording:
            self._features[place].append(features.detach())

    def _take(self) -> Tensor:
        """Return the features (n, d) of the last block, encoders side by side, and forget them."""
        found = torch.cat([torch.cat(each).flatten(1).float() for each in self._features], 1)
        self._features = [[] for _ in self._features]
        return found

    def step(self, labels: Tensor) -> dict[str, Tensor | float]:
        """Train on the recorded features of images with labels (B,), each view of the batch after the other."""
        x = self._take()
        y = labels.repeat(len(x) // len(labels))
        with torch.enable_grad(), torch.autocast(x.device.type, enabled=False):
            logits = x @ self.weight.T + self.bias
            loss = F.cross_entropy(logits, y, reduction="sum")
            grads = torch.autograd.grad(loss, [self.weight, self.bias])
        count = all_sum(loss.new_full((), float(len(y))))
        for parameter, grad in zip((self.weight, self.bias), grads, strict=True):
            parameter.grad = all_sum(grad) / count
        self.optimizer.step()
        self.steps += 1
        correct = all_sum((logits.detach().argmax(1) == y).sum().to(loss.dtype))
        return {"online_loss": all_sum(loss.detach()) / count, "online_accuracy": correct / count}

    @torch.no_grad()
    def correct(self, labels: Tensor) -> Tensor:
        """Count the recorded images that are classified correctly, with labels (n,)."""
        return ((self._take() @ self.weight.T + self.bias).argmax(1) == labels).sum()

    def state_dict(self) -> dict[str, Any]:
        return {
            "weight": self.weight.detach(),
            "bias": self.bias.detach(),
            "steps": self.steps,
            "optimizer": self.optimizer.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        shapes = (state["weight"].shape, state["bias"].shape)
        if shapes != (self.weight.shape, self.bias.shape) or type(state["steps"]) is not int:
            raise ValueError("'online' is not what a run writes")
        self.weight.copy_(state["weight"])
        self.bias.copy_(state["bias"])
        self.steps = state["steps"]
        self.optimizer.load_state_dict(state["optimizer"])


def count_classes(images: ImageSet, test: ImageSet, shares_classes: bool) -> int:
    """Return the number of classes for an online probe.

    Raises:
        ConfigError: an image for training or testing has no label, or the two parts have different classes.
    """
    for part in (images, test):
        if not part.all_labelled:
            raise ConfigError(
                f"vision.probe.online: {part.name} has images without a label. Take a labelled split, or leave "
                "the online probe out (--set vision.probe.online=)."
            )
    if not shares_classes:
        raise ConfigError(
            "vision.probe.online: pretraining is on another source than the test part, and the probe would learn "
            "its classes. Remove it (--set vision.probe.online=)."
        )
    assert images.labels is not None
    assert test.labels is not None
    return int(max(images.labels.max(), test.labels.max())) + 1
