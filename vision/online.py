"""A linear probe that is trained beside the encoder, on what the encoder gives in every step, and never moves it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor

from dipole.core.train.config import Settings
from dipole.core.utils.distributed import all_sum
from dipole.core.utils.errors import ConfigError
from dipole.core.utils.uncompiled import uncompiled
from dipole.vision.frameworks.base import Branch
from dipole.vision.image_set import ImageSet


class OnlineConfig(Settings):
    """The [vision.probe.online] table: a linear probe that learns beside the encoder, on all views of every batch."""

    optimizer: Literal["sgd", "adam"] = Field("adam", description="of the probe alone")
    learning_rate: float = Field(1e-3, gt=0, description="of the probe, the same throughout")
    momentum: float | None = Field(None, ge=0, lt=1, description="sgd only; default 0.9")
    weight_decay: float = Field(0.0, ge=0, description="of the probe")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.optimizer == "adam" and self.momentum is not None:
            raise ValueError("momentum has no effect with optimizer 'adam'; use sgd")
        return self


class Seen:
    """What branches' encoders give while it is open, without gradient; nothing at other times."""

    def __init__(self, branches: Sequence[Branch]) -> None:
        self._rows: list[list[Tensor]] = []
        self._open = False
        for place, branch in enumerate(branches):
            branch.watch = _Watch(self, place)
        self._count = len(branches)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Forget what was seen, and keep what comes by in a block."""
        self._rows, self._open = [[] for _ in range(self._count)], True
        try:
            yield
        finally:
            self._open = False

    def add(self, place: int, features: Tensor) -> None:
        """Keep rows (n, d) of a branch if the block is open."""
        if self._open:
            self._rows[place].append(features.detach())

    def taken(self) -> Tensor:
        """The rows (n, d) of the last block, the branches side by side; they are handed over once."""
        rows, self._rows = self._rows, []
        return torch.cat([torch.cat(each).flatten(1).float() for each in rows], 1)


class _Watch:
    """What a branch tells its features to; a compiler leaves it alone."""

    def __init__(self, seen: Seen, place: int) -> None:
        self._seen, self._place = seen, place

    def __deepcopy__(self, memo: Any) -> None:
        """A copy of a branch is not the one that is watched."""
        return

    @uncompiled
    def __call__(self, features: Tensor) -> None:
        self._seen.add(self._place, features)


class OnlineProbe:
    """Softmax regression W x + b from weights of zero, a step of its own optimizer for each of the encoder's.

        loss = mean over all views and ranks of -log softmax(W x + b)_y

    It draws no random number, and x carries no gradient: the encoder's weights are those of a run without it.

    Args:
        config: its optimizer.
        branches: whose encoders it reads, side by side, at their last layer.
        classes: number of classes C; labels are 0 to C - 1.
        device: where the features are.
    """

    def __init__(self, config: OnlineConfig, branches: Sequence[Branch], classes: int, device: torch.device) -> None:
        self.seen = Seen(branches)
        self.steps = 0  # that it has made; it is not kept with a finished run
        width = sum(branch.encoder.taps[branch.encoder.last] for branch in branches)
        self.weight = torch.zeros(classes, width, device=device, requires_grad=True)
        self.bias = torch.zeros(classes, device=device, requires_grad=True)
        both, rate, decay = [self.weight, self.bias], config.learning_rate, config.weight_decay
        self.optimizer: torch.optim.Optimizer
        if config.optimizer == "adam":
            self.optimizer = torch.optim.Adam(both, lr=rate, weight_decay=decay)
        else:
            momentum = 0.9 if config.momentum is None else config.momentum
            self.optimizer = torch.optim.SGD(both, lr=rate, momentum=momentum, weight_decay=decay)

    @staticmethod
    def classes_of(images: ImageSet, test: ImageSet, shares_classes: bool) -> int:
        """The number of classes; ConfigError where the images that are trained on, or tested, do not have them."""
        for part in (images, test):
            if part.labels is None or bool((part.labels < 0).any()):
                raise ConfigError(
                    f"vision.probe.online: {part.name} has images without a label; take a labelled split, or leave "
                    "the online probe out (--set vision.probe.online=)."
                )
        if not shares_classes:
            raise ConfigError(
                "vision.probe.online: pretraining is on another source than the test part, and the probe would learn "
                "its classes; leave it out (--set vision.probe.online=)."
            )
        assert images.labels is not None
        assert test.labels is not None
        return int(max(images.labels.max(), test.labels.max())) + 1

    def step(self, labels: Tensor) -> dict[str, Tensor | float]:
        """Learn from what was seen of images with labels (B,), each view of a batch after the other."""
        x = self.seen.taken()
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
        right = all_sum((logits.detach().argmax(1) == y).sum().to(loss.dtype))
        return {"online_loss": all_sum(loss.detach()) / count, "online_accuracy": right / count}

    @torch.no_grad()
    def right(self, labels: Tensor) -> Tensor:
        """How many of the images that were seen last are told right; labels (n,)."""
        return ((self.seen.taken() @ self.weight.T + self.bias).argmax(1) == labels).sum()

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
