"""The probes of a run and their settings."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from itertools import pairwise
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from dipole.core.evaluation.logistic import Descent
from dipole.core.evaluation.probes import PROBE_DEVICE_HELP, ProbeDevice
from dipole.core.train.config import Settings
from dipole.core.utils.distributed import all_sum
from dipole.core.utils.errors import ConfigError, DataError
from dipole.core.utils.uncompiled import uncompiled
from dipole.vision.augment import MOST_VIEWS, AugmentConfig, Probability, Range
from dipole.vision.encoders.base import Encoder
from dipole.vision.image_set import ImageSet, complete_labels
from dipole.vision.pictures import Projection

LABELS_HELP = (
    "Give labelled images as vision.data.source, vision.data.test or another vision.data.test_split, and those to "
    "pretrain on as vision.data.pretrain. For a table, name its column of labels as vision.data.label_column. In a "
    "folder, list files and labels in metadata.csv (file_name,label). Or train without probes: --set "
    "'vision.probe.probes=[]'."
)
Probe = Literal["linear", "few_shot", "kmeans", "knn", "mean", "tasks", "losses"]


class CropsConfig(Settings):
    """The [vision.probe.crops] table: the linear probe sees a new random crop of every image in every epoch."""

    scale: Range = Field((0.2, 1.0), description="range of the crop's share of the area; for ImageNet [0.08, 1]")
    ratio: Range = Field((3 / 4, 4 / 3), description="range of its width / height")
    flip: Probability = Field(0.5, description="probability of a horizontal flip")
    centre: float = Field(1.0, gt=0, le=1, description="share of the side of the tested square: 0.875 is 224 of 256")

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.augment(4)
        return self

    def augment(self, size: int) -> AugmentConfig:
        """Return the augmentation for views of `size` pixels."""
        crop: dict[str, Any] = {"size": size, "crop_scale": self.scale, "crop_ratio": self.ratio, "flip": self.flip}
        return AugmentConfig(**crop, jitter=0.0, grey=0.0, blur=0.0)


class OnlineConfig(Settings):
    """The [vision.probe.online] table: a linear probe that is trained with the encoder, on all views of every batch."""

    optimizer: Literal["sgd", "adam"] = Field("adam", description="the probe's own optimizer")
    learning_rate: float = Field(1e-3, gt=0, description="of the probe, constant")
    momentum: float | None = Field(None, ge=0, lt=1, description="sgd only (default 0.9)")
    weight_decay: float = Field(0.0, ge=0, description="of the probe")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.optimizer == "adam" and self.momentum is not None:
            raise ValueError("momentum has no effect with optimizer 'adam'. Use sgd")
        return self


class ProbeConfig(Settings):
    """The [vision.probe] table."""

    probes: tuple[Probe, ...] = Field(
        ("linear", "few_shot", "kmeans", "knn"),
        description="measured on the frozen encoder; tasks: Arora's classifiers on tasks of 2, 5, 10 classes and at "
        "ranks 1, 5, 10; "
        "losses: their unsupervised loss on test blocks and the supervised loss of the mean classifier",
    )
    features: Literal["encoder", "embedding"] = Field(
        "encoder", description="the encoder's tap, or the embedding after the objective's projection (CLLR: L Phi)"
    )
    solver: Literal["convex", "sgd", "adam"] = Field(
        "convex", description="of the linear probe and of the tasks' trained layer; sgd, adam: the papers'"
    )
    epochs: int = Field(100, ge=1, description="of the solvers sgd and adam")
    batch_size: int | None = Field(None, ge=1, description="of the linear probe (default 256 with sgd, 128 with adam)")
    learning_rate: float | None = Field(None, gt=0, description="of the same (default 30 with sgd, 1e-3 with adam)")
    weight_decay: float = Field(0.0, ge=0, description="of the same")
    schedule: Literal["step", "cosine"] = Field("step", description="of the same")
    milestones: tuple[int, ...] | None = Field(
        None, description="of the same: epochs at which the rate is multiplied by decay (default 60 % and 80 % of them)"
    )
    decay: float | None = Field(None, gt=0, le=1, description="of the same (default 0.1 with sgd, 0.2 with adam)")
    crops: CropsConfig | None = Field(None, description="train the linear probe on random crops, with sgd or adam")
    labels_per_class: int = Field(5, ge=1, description="of the few-shot probe and of the tasks' few-label means")
    draws: int = Field(5, ge=1, description="of the same two")
    neighbours: int = Field(20, ge=1, description="of the kNN probe")
    temperature: float = Field(0.07, gt=0, description="of the kNN probe")
    inits: int = Field(10, ge=1, description="starts of k-means; the best by inertia counts")
    picture: bool = Field(False, description="write pictures/step-N.png: a query with its neighbours (CACR Fig. 6, 7)")
    positives: int | None = Field(None, ge=1, le=MOST_VIEWS - 1, description="of its query (default as in training)")
    projection: Projection = Field("tsne", description="of that picture's map")
    online: OnlineConfig | None = Field(None, description="train a linear probe during the run and log its accuracy")
    device: ProbeDevice = Field("auto", description=PROBE_DEVICE_HELP)
    baselines: bool = Field(False, description="also probe the untrained encoder and the raw pixels")

    @model_validator(mode="after")
    def _check(self) -> Self:
        stepwise = ("batch_size", "learning_rate", "weight_decay", "schedule", "milestones", "decay", "crops")
        given = [name for name in stepwise if getattr(self, name) != type(self).model_fields[name].default]
        problems = []
        if given and self.solver == "convex":
            problems.append(
                f"{', '.join(given)}: no effect with solver 'convex'. Choose sgd or adam, or "
                f"--set vision.probe.{given[0]}="
            )
        if self.schedule == "cosine" and (self.milestones or self.decay):
            problems.append("milestones and decay have no effect with schedule 'cosine'. Use schedule 'step'")
        if self.milestones is not None and not all(a < b for a, b in pairwise((0, *self.milestones))):
            problems.append(f"milestones must be increasing epochs, such as [60, 80], got {list(self.milestones)}")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def descent(self) -> Descent:
        """The optimizer settings of the linear probe."""
        return Descent(**{each.name: getattr(self, each.name) for each in fields(Descent)})


def check_probe_labels(config: ProbeConfig, train: ImageSet, test: ImageSet) -> None:
    """Raise DataError if the probes would find no labels, or a single class."""
    fitted = [name for name in config.probes if name != "kmeans"]
    for part, images, probes in (("training", train, fitted), ("test", test, config.probes)):
        if probes and (images.labels is None or not bool((images.labels >= 0).any())):
            raise DataError(
                f"no image of the {part} part ({images.name}) has a label, as the probes {', '.join(probes)} need. "
                f"{LABELS_HELP}"
            )
    if fitted and train.labels is not None:
        classes = train.labels[train.labels >= 0].unique()
        if len(classes) < 2:
            raise DataError(
                f"all labelled images of the training part ({train.name}) are of one class, "
                f"{train.class_name(int(classes[0]))}, and the probes {', '.join(fitted)} need two or more. "
                f"{LABELS_HELP}"
            )


class OnlineProbe:
    """Softmax regression W x + b from weights of zero, with one step of its own optimizer for each training step.

        loss = mean over all views and ranks of -log softmax(W x + b)_y

    It draws no random number, and x, the last features of the encoders, carries no gradient.
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
        state = {"steps": self.steps, "optimizer": self.optimizer.state_dict()}
        return {"weight": self.weight.detach(), "bias": self.bias.detach(), **state}

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
    """Return the number of classes for an online probe. Every image for training and testing needs a label."""
    fix = "leave the online probe out (--set vision.probe.online=)"
    labels = [complete_labels(part, "vision.probe.online:", fix) for part in (images, test)]
    if not shares_classes:
        raise ConfigError(
            "vision.probe.online: pretraining is on another source than the test part, and the probe would learn "
            "its classes. Remove it (--set vision.probe.online=)."
        )
    return int(max(each.max() for each in labels)) + 1
