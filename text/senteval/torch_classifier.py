"""SentEval's PyTorch classifier for many folds and weight decays at once: the same numbers, a fraction of the time."""

import math
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

OPTIMIZERS = {
    "adadelta": torch.optim.Adadelta,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamax": torch.optim.Adamax,
    "asgd": torch.optim.ASGD,
    "rmsprop": torch.optim.RMSprop,
    "rprop": torch.optim.Rprop,
    "sgd": torch.optim.SGD,
}
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
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise OptionError(f"classifier: {name} must be a whole number from {least} up, got {value!r}")
        if isinstance(self.dropout, bool) or not isinstance(self.dropout, int | float) or not 0 <= self.dropout < 1:
            raise OptionError(f"classifier: dropout must be a number from 0 to below 1, got {self.dropout!r}")
        if not isinstance(self.optim, str):
            raise OptionError(f"classifier: optim must be text such as 'adam' or 'sgd,lr=0.1', got {self.optim!r}")
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
    """Train every model as SentEval's `MLP.fit` does, models with equally many training rows stepped together.

    Every fit of SentEval seeds numpy and torch with the same number, so fits of one size share their initial weights
    and the order of their batches. Rows and weight decays are stacked in a leading dimension, and
    torch's own optimizer, which works element by element, steps the stack. Weight decay is added to the gradient as
    the optimizer itself would. A fold leaves the stack when all its weight decays have stopped.

    The rules followed (SentEval at 5d6dc11, tools/classifier.py): one loop is `epoch_size` passes. The count of loops
    without improvement is never reset and training stops at the (tenacity + 1)-th. The loss is the mean over the batch.
    The weight decay holds for the intercept, too. Without early-stopping rows the first 5 % of one permutation are
    split off.

    Args:
        features: (N, d) float32. labels: (N,) long, 0..classes-1.
        fits: the models. All of them must list equally many weight decays.
        seed: seed of every fit.
    """
    out: list[Fitted | None] = [None] * len(fits)
    for size in sorted({len(fit.train) for fit in fits}):
        members = [i for i, fit in enumerate(fits) if len(fit.train) == size]
        group = _Group(features, labels, classes, [fits[i] for i in members], settings, seed)
        for i, fitted in zip(members, group.run(), strict=True):
            out[i] = fitted
    return [fitted for fitted in out if fitted is not None]


class _Group:
    """Models with equally many training rows: F folds, R weight decays each.

    All parameters of a fold lie in one row of `flat` (F, S), so the optimizer steps a single tensor. `_unpack` gives
    the layers as views of it.
    """

    def __init__(
        self, features: Tensor, labels: Tensor, classes: int, fits: list[Fit], settings: Classifier, seed: int
    ) -> None:
        device = features.device
        self.features = torch.cat([features, torch.ones(len(features), 1, device=device)], 1)
        self.labels, self.settings = labels, settings
        self.widths = [features.shape[1], classes]
        if settings.nhid:
            self.widths.insert(1, settings.nhid)
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
        decays = torch.tensor([list(fit.decays) for fit in fits], dtype=torch.float32)  # (F, R)
        self.folds, self.values = decays.shape
        size = self.values * sum((i + 1) * o for i, o in pairwise(self.widths))
        check_fits(f"classifiers of {settings.nhid} hidden units", (self.folds, size), self.features)
        self.flat = torch.empty(self.folds, size, device=device)
        self.decay = torch.empty_like(self.flat)
        self._initialise(seed, decays)
        self.optimizer = settings.optimizer([self.flat])

    def _unpack(self, flat: Tensor) -> list[Tensor]:
        """Layers as views: (F, 1 + in, R, out), the intercept last; then (F, R, H, K) and (F, R, K) behind a hidden
        layer.

        The weight decays of a fold see the same rows, so the columns of its first layer lie side by side.
        """
        folds, values, (inputs, width, *outputs) = len(flat), self.values, self.widths
        shapes = [(inputs + 1, values, width), *(s for k in outputs for s in ((values, width, k), (values, k)))]
        sizes = [math.prod(shape) for shape in shapes]
        return [part.view(folds, *shape) for part, shape in zip(flat.split(sizes, 1), shapes, strict=True)]

    def _initialise(self, seed: int, decays: Tensor) -> None:
        """Copy one freshly seeded network to every fold and weight decay, and save torch's random state.

        All draws are the processor's, wherever the networks are trained.
        """
        decays = decays.to(self.flat.device)
        parts, spread = self._unpack(self.flat), self._unpack(self.decay)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            layers = [torch.nn.Linear(inputs, outputs) for inputs, outputs in pairwise(self.widths)]
            self.stream_state = torch.get_rng_state()
        first, *layers = (layer.to(self.flat.device) for layer in layers)
        parts[0].copy_(torch.cat([first.weight.detach().T, first.bias.detach()[None]])[:, None])
        spread[0].copy_(decays[:, None, :, None])
        for layer in layers:
            parts[1].copy_(layer.weight.detach().T)
            parts[2].copy_(layer.bias.detach())
            spread[1].copy_(decays[:, :, None, None])
            spread[2].copy_(decays[:, :, None])

    def _forward(self, rows: Tensor, layers: Sequence[Tensor], mask: Tensor | None = None) -> Tensor:
        """Logits (F, B, R, K) of features (F, B, d + 1)."""
        hidden = torch.bmm(rows, layers[0].flatten(2)).view(*rows.shape[:2], *layers[0].shape[2:])
        if len(layers) > 1:
            if mask is not None:
                hidden = hidden * mask[:, None]
            hidden = torch.sigmoid(hidden)
            hidden = (hidden.transpose(1, 2) @ layers[1] + layers[2][:, :, None]).transpose(1, 2)
        return hidden

    def _gradient(self, rows: Tensor, truth: Tensor) -> Tensor:
        """Gradient (F, S) of every model's mean cross-entropy on its batch."""
        if len(self.widths) == 2:
            residual = _residual(self._forward(rows, self._unpack(self.flat)), truth)
            return torch.bmm(rows.transpose(1, 2), residual.flatten(2)).flatten(1)
        leaves = [part.detach().requires_grad_() for part in self._unpack(self.flat)]
        logits = self._forward(rows, leaves, self._dropout(rows.shape[1]))
        gradients = torch.autograd.grad(logits, leaves, _residual(logits.detach(), truth))
        return torch.cat([g.flatten(1) for g in gradients], 1)

    def run(self) -> list[Fitted]:
        folds, values = self.folds, self.values
        best = torch.full((folds, values), -1.0, dtype=torch.float64)
        models = self.flat.clone()
        failures = torch.zeros(folds, values, dtype=torch.long)
        stopped = torch.zeros(folds, values, dtype=torch.bool)
        alive, epochs = list(range(folds)), 0
        while alive and epochs <= self.settings.max_epoch:
            for _ in range(self.settings.epoch_size):
                self._pass()
            epochs += self.settings.epoch_size
            layers = self._unpack(self.flat)
            for position, fold in enumerate(alive):
                accuracy = self._accuracy([part[position : position + 1] for part in layers], fold)
                better = ~stopped[fold] & (accuracy > best[fold])
                missed = ~stopped[fold] & ~better
                best[fold][better] = accuracy[better]
                for i, (kept, part) in enumerate(zip(self._unpack(models[fold : fold + 1]), layers, strict=True)):
                    if i:
                        kept[0, better] = part[position, better]
                    else:
                        kept[0, :, better] = part[position, :, better]
                stopped[fold] |= missed & (failures[fold] >= self.settings.tenacity)
                failures[fold] += missed
            keep = [position for position, fold in enumerate(alive) if not bool(stopped[fold].all())]
            if len(keep) < len(alive):
                alive = [alive[position] for position in keep]
                self._shrink(keep)
        first, *output = self._unpack(models)
        first = first.transpose(1, 2)  # (F, R, 1 + in, out)
        found = [Fitted(best[f].numpy(), [(first[f, :, :-1], first[f, :, -1])]) for f in range(folds)]
        if output:
            for fitted, weight, bias in zip(found, *output, strict=True):
                fitted.layers.append((weight, bias))
        return found

    def _pass(self) -> None:
        """One pass over the training rows, in the batches of SentEval."""
        order = torch.as_tensor(self.stream.permutation(self.train.shape[1])).to(self.train.device)
        rows = self.train[:, order]  # (F, n)
        truth = functional.one_hot(self.labels, self.widths[-1]).float()[rows][:, :, None]  # (F, n, 1, K)
        size, width = self.settings.batch_size, self.features.shape[1]
        buffer = self.features.new_empty(len(rows) * size, width)
        for start in range(0, len(order), size):
            batch = rows[:, start : start + size]  # (F, B)
            x = torch.index_select(self.features, 0, batch.flatten(), out=buffer[: batch.numel()])
            gradient = self._gradient(x.view(*batch.shape, width), truth[:, start : start + size])
            self.flat.grad = gradient.addcmul_(self.decay, self.flat)
            self.optimizer.step()

    def _dropout(self, batch: int) -> Tensor | None:
        """The mask (B, H) that every fit of this size draws at this step: they share torch's stream."""
        if not (self.settings.nhid and self.settings.dropout):
            return None
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.stream_state)
            mask = functional.dropout(torch.ones(batch, self.settings.nhid), self.settings.dropout)
            self.stream_state = torch.get_rng_state()
        return mask.to(self.flat.device)

    def _accuracy(self, layers: Sequence[Tensor], fold: int) -> Tensor:
        """Accuracy (R,) of one fold's models on its early-stopping rows."""
        dev = self.dev[fold]
        predicted = self._forward(self.features[dev][None], layers)[0].argmax(-1)  # (n, R)
        return (predicted == self.labels[dev][:, None]).sum(0).double().cpu() / len(dev)

    def _shrink(self, keep: list[int]) -> None:
        """Take finished folds out of the parameters and out of the optimizer's state."""
        flat = self.flat.detach()[keep]
        state = self.optimizer.state.pop(self.flat, {})
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == self.flat.shape:
                state[key] = value[keep]
        self.optimizer.state[flat] = state
        self.optimizer.param_groups[0]["params"] = [flat]
        self.flat, self.decay, self.train = flat, self.decay[keep], self.train[keep]


def _residual(logits: Tensor, truth: Tensor) -> Tensor:
    """Gradient (F, B, R, K) of the cross-entropy, mean over each batch: (softmax - one-hot) / B; truth (F, B, 1, K)."""
    if logits.shape[-1] == 2:  # softmax over two entries is a sigmoid, several times faster than a reduction
        second = (torch.sigmoid(logits[..., 1] - logits[..., 0]) - truth[..., 1]) / logits.shape[1]
        return torch.stack([-second, second], -1)
    # A reduction over a short last dimension is not vectorised. Over the first it is.
    share = torch.softmax(logits.movedim(-1, 0).contiguous(), 0).movedim(0, -1)
    return (share - truth).div_(logits.shape[1])
