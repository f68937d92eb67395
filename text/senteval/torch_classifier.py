"""SentEval's PyTorch classifier for many folds and weight decays at once: the same numbers, a fraction of the time."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from dipole.core.utils.errors import OptionError, nearest
from dipole.core.utils.memory import check_fits

NAMES = ("Adadelta", "Adagrad", "Adam", "Adamax", "ASGD", "RMSprop", "Rprop", "SGD")
OPTIMIZERS = {name.lower(): getattr(torch.optim, name) for name in NAMES}
FUSED = ("cpu", "cuda", "mps", "xpu")  # devices on which one kernel is all of Adam's update
LEAST = {"nhid": 0, "tenacity": 0, "epoch_size": 1, "max_epoch": 0, "batch_size": 1}


def check_whole(value: Any, name: str, least: int, most: int | None = None) -> None:
    """Raise OptionError unless a value is a whole number in its range."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least or value > (most or value):
        upper = "up"
        if most is not None:
            upper = f"to {most}"
        raise OptionError(f"{name} must be a whole number from {least} {upper}, got {str(value)[:60]!r}")


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
            check_whole(getattr(self, name), f"classifier: {name}", least)
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
            hint = nearest(unknown[0], cls.__dataclass_fields__)
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
    """Best accuracy on the early-stopping rows (R,) and the weights that reached it, one list of layers per decay."""

    accuracy: np.ndarray
    layers: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # (R, in, out), (R, out)

    def predict(self, features: Tensor, decay: int = 0) -> np.ndarray:
        """Predicted labels (N,) of the model with this weight decay."""
        hidden = features
        for depth, (weight, bias) in enumerate(self.layers):
            if depth:
                hidden = torch.sigmoid(hidden)
            hidden = hidden @ weight[decay] + bias[decay]
        return hidden.argmax(-1).cpu().numpy()


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
    out: dict[int, Fitted] = {}
    for size in {len(fit.train) for fit in fits}:
        members = [i for i, fit in enumerate(fits) if len(fit.train) == size]
        group = _Group(features, labels, classes, [fits[i] for i in members], settings, seed)
        out |= zip(members, group.run(), strict=True)
    return [out[i] for i in range(len(fits))]


class _Group:
    """Models with equally many training rows: F folds, R weight decays each.

    `layers` are weights (F, R, in, out) and biases (F, R, out), of one layer or of two.
    """

    def __init__(
        self, features: Tensor, labels: Tensor, classes: int, fits: list[Fit], settings: Classifier, seed: int
    ) -> None:
        device = features.device
        self.features, self.labels, self.settings = features, labels, settings
        self.stream = np.random.RandomState(seed)
        rows, self.dev = [], []
        shuffled = None
        for fit in fits:
            train, dev = fit.train, fit.dev
            if dev is None:
                if shuffled is None:
                    shuffled = self.stream.permutation(len(train))
                cut = int(0.05 * len(train))
                train, dev = fit.train[shuffled[cut:]], fit.train[shuffled[:cut]]
            rows.append(train)
            self.dev.append(torch.as_tensor(dev).to(device))
        self.train = torch.as_tensor(np.stack(rows)).to(device)  # (F, n)
        self.decays = torch.tensor([list(fit.decays) for fit in fits]).to(device)  # (F, R)
        widths = [features.shape[1], classes]
        if settings.nhid:
            widths.insert(1, settings.nhid)
        size = sum((i + 1) * o for i, o in pairwise(widths))
        check_fits(f"classifiers of {settings.nhid} hidden units", (*self.decays.shape, size), self.features)
        with torch.random.fork_rng(devices=[]):  # all draws are the processor's
            torch.default_generator.manual_seed(seed)
            layers = [torch.nn.Linear(inputs, outputs) for inputs, outputs in pairwise(widths)]
            self.stream_state = torch.get_rng_state()
        shared = [part for layer in layers for part in (layer.weight.T, layer.bias)]
        copies = [part.detach().expand(*self.decays.shape, *part.shape).contiguous().to(device) for part in shared]
        self.layers = [part.requires_grad_() for part in copies]
        self.optimizer = settings.optimizer(self.layers)

    def run(self) -> list[Fitted]:
        folds, values = self.decays.shape
        best = torch.full((folds, values), -1.0, dtype=torch.float64)
        failures = torch.zeros(folds, values, dtype=torch.long)
        stopped = torch.zeros(folds, values, dtype=torch.bool)
        models = [part.detach().clone() for part in self.layers]
        alive, epochs = list(range(folds)), 0
        while alive and epochs <= self.settings.max_epoch:
            for _ in range(self.settings.epoch_size):
                self._pass()
            epochs += self.settings.epoch_size
            layers = [part.detach() for part in self.layers]
            for position, fold in enumerate(alive):
                accuracy = self._accuracy([part[position : position + 1] for part in layers], fold)
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
        of_layers = list(zip(models[::2], models[1::2], strict=True))
        return [Fitted(best[f].numpy(), [(weight[f], bias[f]) for weight, bias in of_layers]) for f in range(folds)]

    def _pass(self) -> None:
        """One pass over the training rows, in the batches of SentEval."""
        order = torch.as_tensor(self.stream.permutation(self.train.shape[1])).to(self.train.device)
        rows = self.train[:, order]  # (F, n)
        for start in range(0, len(order), self.settings.batch_size):
            picked = rows[:, start : start + self.settings.batch_size]
            x = self.features.index_select(0, picked.flatten()).view(*picked.shape, -1)  # (F, B, d)
            logits = self._forward(x, self.layers, self._dropout(x.shape[1]))
            truth = self.labels[picked][:, :, None].expand(logits.shape[:3])  # (F, B, R)
            loss = functional.cross_entropy(logits.movedim(-1, 1), truth, reduction="sum") / x.shape[1]
            gradients = torch.autograd.grad(loss, self.layers)
            for part, gradient in zip(self.layers, gradients, strict=True):
                decay = self.decays.view(*self.decays.shape, *[1] * (part.ndim - 2))
                part.grad = (decay * part.detach()).add_(gradient)  # a fused Adam wants the strides of the part
            self.optimizer.step()

    def _forward(self, rows: Tensor, layers: Sequence[Tensor], mask: Tensor | None = None) -> Tensor:
        """Logits (F, B, R, K) of features (F, B, d)."""
        hidden = torch.einsum("fbd,frdh->fbrh", rows, layers[0]) + layers[1][:, None]
        if len(layers) == 2:
            return hidden
        if mask is not None:
            hidden = hidden * mask[:, None]
        return torch.einsum("fbrh,frhk->fbrk", hidden.sigmoid(), layers[2]) + layers[3][:, None]

    def _dropout(self, batch: int) -> Tensor | None:
        """The mask (B, H) that every fit of this size draws at this step: they share torch's stream."""
        if not (self.settings.nhid and self.settings.dropout):
            return None
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.stream_state)
            mask = functional.dropout(torch.ones(batch, self.settings.nhid), self.settings.dropout)
            self.stream_state = torch.get_rng_state()
        return mask.to(self.features.device)

    def _accuracy(self, layers: Sequence[Tensor], fold: int) -> Tensor:
        """Accuracy (R,) of one fold's models on its early-stopping rows."""
        dev = self.dev[fold]
        predicted = self._forward(self.features[dev][None], layers)[0].argmax(-1)  # (n, R)
        return (predicted == self.labels[dev][:, None]).sum(0).double().cpu() / len(dev)

    def _shrink(self, keep: list[int]) -> None:
        """Take finished folds out of the weights and out of the optimizer's state."""
        for number, part in enumerate(self.layers):
            self.layers[number] = part.detach()[keep].requires_grad_()
            state = self.optimizer.state.pop(part, {})
            for key, value in state.items():
                if isinstance(value, Tensor) and value.shape == part.shape:
                    state[key] = value[keep]
            self.optimizer.state[self.layers[number]] = state
        self.optimizer.param_groups[0]["params"] = self.layers
        self.decays, self.train = self.decays[keep], self.train[keep]
