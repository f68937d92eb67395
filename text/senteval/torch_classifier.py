"""SentEval's PyTorch classifier for many folds and weight decays at once: the same numbers, a fraction of the time."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from dipole.core.objectives.spec import check_whole
from dipole.core.utils.errors import OptionError, nearest
from dipole.core.utils.memory import check_fits

NAMES = ("Adadelta", "Adagrad", "Adam", "Adamax", "ASGD", "RMSprop", "Rprop", "SGD")
OPTIMIZERS = {name.lower(): getattr(torch.optim, name) for name in NAMES}
FUSED = ("cpu", "cuda", "mps", "xpu")  # devices on which one kernel is all of Adam's update
LEAST = {"nhid": 0, "tenacity": 0, "epoch_size": 1, "max_epoch": 0, "batch_size": 1}


@dataclass(frozen=True)
class Classifier:
    """Settings of SentEval's `classifier` dictionary. The defaults are its own (and the literature's)."""

    nhid: int = 0
    optim: str = "adam"
    tenacity: int = 5
    epoch_size: int = 4
    max_epoch: int = 200
    dropout: float = 0.0
    batch_size: int = 64

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            check_whole(f"classifier: {name}", getattr(self, name), least)
        if isinstance(self.dropout, bool) or not isinstance(self.dropout, int | float) or not 0 <= self.dropout < 1:
            raise OptionError(f"classifier: dropout must be a number from 0 to below 1, got {self.dropout!r}")
        if not isinstance(self.optim, str):
            raise OptionError(f"classifier: optim must be text such as 'adam' or 'sgd,lr=0.1', got {self.optim!r}")
        if self.optim not in OPTIMIZERS or self.optim == "sgd":  # building one takes a second the first time
            self.optimizer([torch.zeros(1)])

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> "Classifier":
        """Read the dictionary that SentEval scripts pass. An unknown key is an error that names the nearest one."""
        unknown = [key for key in params if key not in cls.__dataclass_fields__]
        if unknown:
            hint = nearest(str(unknown[0]), cls.__dataclass_fields__)
            raise OptionError(
                f"classifier has no setting {unknown[0]!r}; it has {', '.join(cls.__dataclass_fields__)}.{hint}"
            )
        return cls(**params)

    def optimizer(self, parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
        """Build the optimizer from SentEval's notation, for example "adam" or "sgd,lr=0.1"."""
        name, *options = self.optim.split(",")
        if name not in OPTIMIZERS:
            hint = nearest(name, OPTIMIZERS)
            raise OptionError(f"unknown optim {name!r} in classifier; allowed: {', '.join(OPTIMIZERS)}.{hint}")
        values: dict[str, Any] = {}
        for option in options:
            key, _, number = option.partition("=")
            if not re.fullmatch(r"[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?", number):
                raise OptionError(f"optim {self.optim!r}: expected name=number, found {option!r}")
            values[key] = float(number)
        if name == "sgd" and "lr" not in values:
            raise OptionError("optim 'sgd' needs a learning rate, for example 'sgd,lr=0.1'")
        try:
            if name == "adam" and parameters[0].device.type in FUSED:
                return torch.optim.Adam(list(parameters), fused=True, **values)
            return OPTIMIZERS[name](list(parameters), **values)
        except (TypeError, ValueError) as error:
            raise OptionError(f"optim {self.optim!r}: {error}") from None


@dataclass
class Fit:
    """One model to train: its rows, the rows it stops early on (None: 5 % of its own), its weight decays."""

    train: np.ndarray
    dev: np.ndarray | None
    decays: Sequence[float]


@dataclass
class Fitted:
    """Best accuracy on the early-stopping rows (R,), and weights (R, in, out) and biases (R, out) that reached it."""

    accuracy: np.ndarray
    layers: list[Tensor]  # in turn

    def predict(self, features: Tensor, decay: int = 0) -> np.ndarray:
        """Predicted labels (N,) of the model with this weight decay."""
        layers = [part[None, decay : decay + 1] for part in self.layers]
        return _logits(features[None], layers)[0, :, 0].argmax(-1).cpu().numpy()


def _logits(rows: Tensor, layers: Sequence[Tensor], mask: Tensor | None = None) -> Tensor:
    """Logits (F, B, R, K) of features (F, B, d), by weights (F, R, in, out) and biases (F, R, out) in turn."""
    hidden = torch.einsum("fbd,frdh->fbrh", rows, layers[0]) + layers[1][:, None]
    if len(layers) == 2:
        return hidden
    if mask is not None:
        hidden = hidden * mask[:, None]
    return torch.einsum("fbrh,frhk->fbrk", hidden.sigmoid(), layers[2]) + layers[3][:, None]


def fit_all(
    features: Tensor, labels: Tensor, classes: int, fits: Sequence[Fit], settings: Classifier, seed: int
) -> list[Fitted]:
    """Train every model on rows (N, d) and labels (N,) as SentEval's `MLP.fit` does. All list equally many decays.

    Models with equally many training rows are stepped together: as SentEval seeds every fit alike, they share initial
    weights and batches. Its rules (at 5d6dc11, tools/classifier.py): one loop is `epoch_size` passes. Loops without
    improvement are counted and never reset, the (tenacity + 1)-th ends the training. The loss is the mean over the
    batch. The weight decay holds for the intercept. Without early-stopping rows the first 5 % of
    one permutation are split off.
    """
    groups: dict[tuple[int, bool], list[int]] = {}
    for number, fit in enumerate(fits):
        groups.setdefault((len(fit.train), fit.dev is None), []).append(number)
    out: dict[int, Fitted] = {}
    for members in groups.values():
        group = _Group(features, labels, classes, [fits[i] for i in members], settings, seed)
        out |= zip(members, group.run(), strict=True)
    return [out[i] for i in range(len(fits))]


class _Group:
    """Models with equally many training rows: F folds, R weight decays each."""

    def __init__(
        self, features: Tensor, labels: Tensor, classes: int, fits: list[Fit], settings: Classifier, seed: int
    ) -> None:
        device = features.device
        self.features, self.labels, self.settings = features, labels, settings
        self.stream = np.random.RandomState(seed)
        train: np.ndarray = np.stack([fit.train for fit in fits])
        dev: Any = [fit.dev for fit in fits]
        if fits[0].dev is None:
            order = self.stream.permutation(train.shape[1])
            cut = int(0.05 * len(order))
            train, dev = train[:, order[cut:]], train[:, order[:cut]]
        self.train = torch.as_tensor(train).to(device)  # (F, n)
        self.dev = [torch.as_tensor(rows).to(device) for rows in dev]
        self.decays = torch.tensor([list(fit.decays) for fit in fits]).to(device)  # (F, R)
        widths = [features.shape[1], classes]
        if settings.nhid:
            widths.insert(1, settings.nhid)
        size = sum((i + 1) * o for i, o in pairwise(widths))
        check_fits(f"classifiers of {settings.nhid} hidden units", (*self.decays.shape, size), features)
        self.masks = torch.Generator()
        with torch.random.fork_rng(devices=[]):  # all draws are the processor's
            torch.default_generator.manual_seed(seed)
            layers = [torch.nn.Linear(inputs, outputs) for inputs, outputs in pairwise(widths)]
            self.masks.set_state(torch.get_rng_state())
        shared = [part for layer in layers for part in (layer.weight.T, layer.bias)]
        copies = [part.detach().expand(*self.decays.shape, *part.shape).contiguous().to(device) for part in shared]
        self.layers = [part.requires_grad_() for part in copies]  # as `_logits` takes them
        self.optimizer = settings.optimizer(self.layers)

    def run(self) -> list[Fitted]:
        shape = self.decays.shape
        best = torch.full(shape, -1.0, dtype=torch.float64)
        failures = torch.zeros(shape, dtype=torch.long)
        stopped = torch.zeros(shape, dtype=torch.bool)
        models = [part.detach().clone() for part in self.layers]
        alive, epochs = list(range(len(best))), 0
        while alive and epochs <= self.settings.max_epoch:
            for _ in range(self.settings.epoch_size):
                self._pass()
            epochs += self.settings.epoch_size
            layers = [part.detach() for part in self.layers]
            for position, fold in enumerate(alive):
                dev = self.dev[fold]
                logits = _logits(self.features[dev][None], [part[position : position + 1] for part in layers])
                right = logits[0].argmax(-1) == self.labels[dev][:, None]  # (n, R)
                accuracy = right.sum(0).double().cpu() / len(dev)
                better = ~stopped[fold] & (accuracy > best[fold])
                missed = ~stopped[fold] & ~better
                best[fold][better] = accuracy[better]
                for model, part in zip(models, layers, strict=True):
                    model[fold, better] = part[position, better]
                stopped[fold] |= missed & (failures[fold] >= self.settings.tenacity)
                failures[fold] += missed
            keep = [position for position, fold in enumerate(alive) if not bool(stopped[fold].all())]
            if len(keep) < len(alive):
                alive = [alive[position] for position in keep]
                self._shrink(keep)
        return [Fitted(best[fold].numpy(), [part[fold] for part in models]) for fold in range(len(best))]

    def _pass(self) -> None:
        """One pass over the training rows, in the batches of SentEval."""
        order = torch.as_tensor(self.stream.permutation(self.train.shape[1])).to(self.train.device)
        rate = self.settings.dropout
        for picked in self.train[:, order].split(self.settings.batch_size, 1):
            x = self.features.index_select(0, picked.flatten()).view(*picked.shape, -1)  # (F, B, d)
            mask = None
            if self.settings.nhid and rate:  # all fits share torch's stream
                mask = torch.empty(x.shape[1], self.settings.nhid).bernoulli_(1 - rate, generator=self.masks)
                mask = (mask / (1 - rate)).to(x.device)
            logits = _logits(x, self.layers, mask)
            truth = self.labels[picked][:, :, None].expand(logits.shape[:3])  # (F, B, R)
            loss = functional.cross_entropy(logits.movedim(-1, 1), truth, reduction="sum") / x.shape[1]
            gradients = torch.autograd.grad(loss, self.layers)
            for part, gradient in zip(self.layers, gradients, strict=True):
                decay = self.decays.view(*self.decays.shape, *[1] * (part.ndim - 2))
                part.grad = (decay * part.detach()).add_(gradient)  # a fused Adam wants the strides of the part
            self.optimizer.step()

    def _shrink(self, keep: list[int]) -> None:
        """Take finished folds out of the weights and out of the optimizer's state."""
        for part in self.layers:
            state = self.optimizer.state[part]
            for key, value in state.items():
                if isinstance(value, Tensor) and value.shape == part.shape:
                    state[key] = value[keep]
            part.grad = None
            part.data = part.data[keep]
        self.decays, self.train = self.decays[keep], self.train[keep]
