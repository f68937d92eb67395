"""Classifiers on frozen features, which all domains use to evaluate an encoder.

Features are (n, d) of numpy or torch, of any float type. Labels are (n,) integers, and rows with a negative label
(unlabelled images) are ignored. All probes are seeded and deterministic.
"""

import hashlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor, nn

from dipole.core.evaluation.descent import Descent, Rows, descend
from dipole.core.evaluation.logistic import fit_softmax
from dipole.core.utils.errors import DataError, OptionError, TrainingError, nearest
from dipole.core.utils.finite import finite_rows
from dipole.core.utils.text import counted

SOLVERS = ("convex", "sgd", "adam")

ProbeDevice = Literal["auto", "cpu"]
PROBE_DEVICE_HELP = "device of features, probes and diagnostics: the run's device, or the processor"


@dataclass(frozen=True)
class ProbeResult:
    """The result of a probe.

    Attributes:
        accuracy: in [0, 1].
        top5: accuracy of the five best classes; None with five classes or fewer.
        std: standard deviation over repeated draws; None for a single fit.
        converged: whether the convex solver met its tolerance.
        classes: (C,) labels.
        scores: (n_test, C) of the last fit. Column j belongs to classes[j].
        ranks: (n_test x draws,) rank of the true class among the scores, from 1, with ties against it. Larger than C
            for a class that the training part lacks.
    """

    accuracy: float
    top5: float | None = None
    std: float | None = None
    converged: bool = True
    classes: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long), repr=False)
    scores: Tensor = field(default_factory=lambda: torch.empty(0), repr=False)
    ranks: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long), repr=False)

    @property
    def predictions(self) -> Tensor:
        """Return the predicted labels (n_test,)."""
        return self.classes[self.scores.argmax(1)]

    def top(self, rank: int) -> float:
        """Return the share of test points whose class is among the best ones.

        Args:
            rank: how many classes count as best.
        """
        return (self.ranks <= rank).double().mean().item()

    def average(self, ways: int) -> float:
        """Return the accuracy averaged over all tasks of `ways` classes (Arora et al. 2019, avg-k), exactly.

        A point of a class of rank r is right in a task with it if the k - 1 others come from the C - r behind it:
            avg-k = mean_x binom(C - r(x), k - 1) / binom(C - 1, k - 1)

        Args:
            ways: number k of classes of a task.

        Raises:
            OptionError: `ways` is below 2 or above the number of classes.
        """
        if not 2 <= ways <= len(self.classes):
            raise OptionError(f"a task has 2 to {len(self.classes)} of the classes, got {ways}")
        behind, others = len(self.classes) - self.ranks.double(), len(self.classes) - 1
        share = torch.ones_like(behind)
        for drawn in range(ways - 1):
            share *= ((behind - drawn) / (others - drawn)).clamp_min(0)
        return share.mean().item()

    def metrics(self, prefix: str) -> dict[str, float]:
        """Return `prefix/accuracy`, `prefix/top5` and `prefix/std`, without those that are None.

        Args:
            prefix: name of the probe.
        """
        values = {"accuracy": self.accuracy, "top5": self.top5, "std": self.std}
        return {f"{prefix}/{name}": value for name, value in values.items() if value is not None}


def measuring_device(device: torch.device, asked: ProbeDevice = "auto") -> torch.device:
    """Return the device for features and probes: the run's device, or the CPU if `asked` is "cpu".

    Probes need double precision, which Apple's GPUs lack, so their features go to the CPU.
    """
    return torch.device("cpu") if asked == "cpu" or device.type == "mps" else device


# --- the data every probe starts from -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Labels:
    train_y: Tensor  # (n,) in 0..C-1
    test_y: Tensor  # -1 for a class that the training part lacks: always wrong
    classes: Tensor  # (C,) the labels behind 0..C-1


@dataclass(frozen=True)
class _Split(_Labels):
    train_x: Tensor  # (n, d) float32
    test_x: Tensor


def _features(x: Any, name: str) -> Tensor:
    tensor = torch.as_tensor(x).detach()
    if tensor.ndim != 2:
        raise DataError(f"{name} has shape {tuple(tensor.shape)}; a probe takes features of shape (n, d)")
    return finite_rows(tensor.float(), name)


def _labels(y: Any, rows: int | None, device: torch.device, name: str) -> Tensor:
    if y is None:
        raise DataError(f"{name} is missing: this probe needs labels; use a labelled split or switch the probe off")
    tensor = torch.as_tensor(y).detach()
    if tensor.is_floating_point() or tensor.ndim != 1 or rows not in (None, len(tensor)):
        count = "" if rows is None else f"{rows} "
        raise DataError(
            f"{name} must be {count}integers, one per row, got {tensor.dtype} of shape {tuple(tensor.shape)}"
        )
    return tensor.long().to(device)


def _split(train_x: Any, train_y: Any, test_x: Any, test_y: Any) -> _Split:
    a, b = _features(train_x, "train_x"), _features(test_x, "test_x")
    if a.shape[1] != b.shape[1]:
        raise DataError(f"train_x has {a.shape[1]} features and test_x {b.shape[1]}; both must come from one encoder")
    b = b.to(a.device)
    p, q = _labels(train_y, len(a), a.device, "train_y"), _labels(test_y, len(b), b.device, "test_y")
    a, p = a[p >= 0], p[p >= 0]
    b, q = b[q >= 0], q[q >= 0]
    known = _known(p, q)
    return _Split(known.train_y, known.test_y, known.classes, a, b)


def _known(train_y: Tensor, test_y: Tensor) -> _Labels:
    if not len(train_y) or not len(test_y):
        raise DataError(
            "a probe needs labelled points in both parts, "
            f"got {len(train_y)} for training and {len(test_y)} for testing"
        )
    classes, train_y = train_y.unique(return_inverse=True)
    if len(classes) < 2:
        raise DataError(f"a probe needs two classes or more; every training label is {int(classes[0])}")
    place = torch.searchsorted(classes, test_y).clamp_max(len(classes) - 1)
    return _Labels(train_y, torch.where(classes[place] == test_y, place, -1), classes)


def _standardize(split: _Split) -> _Split:
    """Scale each feature to zero mean and unit variance of the training part. Constant features become 0."""
    mean, std = split.train_x.mean(0), split.train_x.std(0, correction=0)
    scale = torch.where(std > 1e-6 * std.max().clamp_min(1e-30), 1 / std, 0)
    return replace(split, train_x=(split.train_x - mean) * scale, test_x=(split.test_x - mean) * scale)


def _result(split: _Labels, scores: Tensor, **extra: Any) -> ProbeResult:
    if not bool(scores.isfinite().all()):  # the first class would be the answer to every point
        raise DataError("the probe's scores overflow: scale the features to unit length, or use a lower learning rate")
    top5 = None
    if len(split.classes) > 5:
        top5 = (scores.topk(5, 1).indices == split.test_y[:, None]).any(1).float().mean().item()
    accuracy = (scores.argmax(1) == split.test_y).float().mean().item()
    own = scores.gather(1, split.test_y.clamp_min(0)[:, None])
    ranks = torch.where(split.test_y >= 0, (scores >= own).sum(1), scores.shape[1] + 1).cpu()
    classes = split.classes.cpu()
    return ProbeResult(accuracy, top5, classes=classes, scores=scores.float().cpu(), ranks=ranks, **extra)


# --- linear probe ---------------------------------------------------------------------------------------------------


def linear_probe(
    train_x: Any,
    train_y: Any,
    test_x: Any,
    test_y: Any,
    *,
    solver: str = "convex",
    l2: float | None = None,
    standardize: bool | None = None,
    epochs: int = 100,
    batch_size: int | None = None,
    learning_rate: float | None = None,
    schedule: str = "step",
    milestones: tuple[int, ...] | None = None,
    decay: float | None = None,
    seed: int = 0,
) -> ProbeResult:
    """Return the accuracy of a linear softmax classifier trained on frozen features.

    solver "convex": the minimum of mean cross-entropy + l2/2 ||W||^2 (the bias is free), see `fit_softmax`. l2 None
    takes 1/n, which is scikit-learn's C = 1.
    solver "adam", "sgd": the schedules of CACR App. C.1 and C.2, see `Descent`; l2 is their weight decay, 0 by default.
    standardize: features to zero mean and unit variance by the training part; None: for "convex" only, as the papers'
    schedules take features as they are.
    Raises DataError for missing labels, a single class or features that are not finite.
    """
    if solver not in SOLVERS:
        raise OptionError(
            f"unknown solver {solver!r} of the linear probe.{nearest(solver, SOLVERS)} Allowed: {', '.join(SOLVERS)}."
        )
    split = _split(train_x, train_y, test_x, test_y)
    if standardize or (standardize is None and solver == "convex"):
        split = _standardize(split)
    if solver == "convex":
        weight, bias, converged = fit_softmax(split.train_x, split.train_y, len(split.classes), l2)
        return _result(split, split.test_x.double() @ weight.T + bias, converged=converged)
    how = Descent(solver, epochs, batch_size, learning_rate, l2 or 0.0, schedule, milestones, decay)
    x = split.train_x
    layer = descend(
        lambda _, batches: (x[index.to(x.device)] for index in batches),
        split.train_y,
        len(split.classes),
        x.shape[1],
        how,
        seed,
    )
    with torch.no_grad():
        return _result(split, layer(split.test_x))


def linear_probe_on_views(
    rows: Rows, train_y: Any, test_x: Any, test_y: Any, how: Descent, seed: int = 0
) -> ProbeResult:
    """Return the accuracy of a linear softmax classifier trained on features of random views, as in the vision papers.

    Args:
        rows: returns the features of numbered training points for an epoch. Unlabelled points are never requested.
        train_y: (n,) labels of the training points.
        test_x: (m, d) features of the test points, on the device of those of `rows`.
        test_y: (m,) their labels.
        how: solver and schedule.
        seed: of order and first weights.

    Raises:
        DataError: for missing labels, a single class or features that are not finite.
    """
    x = _features(test_x, "test_x")
    p, q = _labels(train_y, None, x.device, "train_y"), _labels(test_y, len(x), x.device, "test_y")
    asked = (p >= 0).nonzero().squeeze(1).cpu()
    x, known = x[q >= 0], _known(p[p >= 0], q[q >= 0])

    def of_known(epoch: int, batches: Sequence[Tensor]) -> Iterator[Tensor]:
        return (_features(seen, "train_x") for seen in rows(epoch, [asked[index] for index in batches]))

    layer = descend(of_known, known.train_y, len(known.classes), x.shape[1], how, seed)
    with torch.no_grad():
        return _result(known, layer(x))


# --- probes with few or no trained weights --------------------------------------------------------------------------


def few_shot_probe(
    train_x: Any,
    train_y: Any,
    test_x: Any,
    test_y: Any,
    *,
    labels_per_class: int = 5,
    draws: int = 5,
    seed: int = 0,
    l2: float | None = None,
) -> ProbeResult:
    """Return the mean accuracy of the convex linear probe on a few labelled points per class, over seeded draws.

    Features are standardised by the complete training part, without labels. A class with fewer points uses all of them.

    Args:
        train_x: features, (n, d).
        train_y: class of each, (n,).
        test_x: features to classify, (m, d).
        test_y: class of each, (m,).
        labels_per_class: labelled points drawn from each class.
        draws: how many times points are drawn.
        seed: of the draws.
        l2: weight of ||W||^2 / 2 in the loss. None takes 1 / n.

    Raises:
        DataError: labels are missing, there is one class only, or features are not finite.
    """
    split = _standardize(_split(train_x, train_y, test_x, test_y))

    def scores(x: Tensor, y: Tensor) -> Tensor:
        weight, bias, _ = fit_softmax(x, y, len(split.classes), l2)
        return split.test_x.double() @ weight.T + bias

    return _over_draws(split, labels_per_class, draws, seed, scores)


def mean_classifier(
    train_x: Any,
    train_y: Any,
    test_x: Any,
    test_y: Any,
    *,
    labels_per_class: int | None = None,
    draws: int = 5,
    seed: int = 0,
) -> ProbeResult:
    """Return the accuracy of the mean classifier, argmax_c f(x)^T mu_c (Arora et al. 2019, W^mu), on raw features.

    labels_per_class: points per class for each mean, repeated over seeded draws (mu-5 with 5); None for all points.
    """
    split = _split(train_x, train_y, test_x, test_y)

    def scores(x: Tensor, y: Tensor) -> Tensor:
        onehot = F.one_hot(y, len(split.classes)).to(x)
        return split.test_x @ ((onehot.T @ x) / onehot.sum(0)[:, None]).T

    if labels_per_class is None:
        return _result(split, scores(split.train_x, split.train_y))
    return _over_draws(split, labels_per_class, draws, seed, scores)


def _over_draws(
    split: _Split, labels_per_class: int, draws: int, seed: int, fit: Callable[[Tensor, Tensor], Tensor]
) -> ProbeResult:
    if labels_per_class < 1 or draws < 1:
        raise OptionError(f"labels_per_class and draws must be at least 1, got {labels_per_class} and {draws}")
    results = []
    for draw in range(draws):
        generator = torch.Generator().manual_seed(seed * 100_003 + draw)
        order = torch.randperm(len(split.train_y), generator=generator).to(split.train_y.device)
        label = split.train_y[order]
        rank = (F.one_hot(label, len(split.classes)).cumsum(0).gather(1, label[:, None]) - 1).squeeze(1)
        chosen = order[rank < labels_per_class]
        results.append(_result(split, fit(split.train_x[chosen], split.train_y[chosen])))
    accuracies = np.array([r.accuracy for r in results])
    top5 = None if results[0].top5 is None else float(np.mean([r.top5 for r in results]))
    std = float(accuracies.std(ddof=1)) if draws > 1 else None
    last, ranks = results[-1], torch.cat([r.ranks for r in results])
    return ProbeResult(float(accuracies.mean()), top5, std, classes=last.classes, scores=last.scores, ranks=ranks)


def knn_probe(
    train_x: Any, train_y: Any, test_x: Any, test_y: Any, *, k: int = 20, temperature: float = 0.07, chunk: int = 1024
) -> ProbeResult:
    """Return the accuracy of the k-nearest-neighbour vote with weights e^{cos/temperature} (Wu et al. 2018, Sec. 3.4).

    k: neighbours, at most the number of training points. chunk: test points compared at a time.
    """
    if k < 1 or temperature <= 0:
        raise OptionError(f"the kNN probe needs k >= 1 and temperature > 0, got k = {k}, temperature = {temperature}")
    split = _split(train_x, train_y, test_x, test_y)
    bank = F.normalize(split.train_x, dim=1)
    votes = []
    for part in F.normalize(split.test_x, dim=1).split(chunk):
        similarity, index = (part @ bank.T).topk(min(k, len(bank)), 1)
        weight = ((similarity - similarity[:, :1]) / temperature).exp()
        votes.append(weight.new_zeros(len(part), len(split.classes)).scatter_add_(1, split.train_y[index], weight))
    return _result(split, torch.cat(votes))


# --- clustering -----------------------------------------------------------------------------------------------------


def kmeans_accuracy(
    features: Any,
    labels: Any,
    *,
    clusters: int | None = None,
    inits: int = 10,
    steps: int = 300,
    normalize: bool = False,
    seed: int = 0,
) -> ProbeResult:
    """Return the accuracy of k-means clusters that are matched one to one with the classes (Hungarian algorithm).

    The run of least inertia among `inits` k-means++ starts counts. clusters: None takes the number of classes.
    normalize: project features on the unit sphere first.
    """
    x = _features(features, "features")
    y = _labels(labels, len(x), x.device, "labels")
    x, y = x[y >= 0], y[y >= 0]
    if not len(x):
        raise DataError("k-means accuracy needs labelled points; all labels are missing")
    classes, y = y.unique(return_inverse=True)
    if normalize:
        x = F.normalize(x, dim=1)
    assignment = kmeans(x, clusters or len(classes), inits, steps, seed)
    return ProbeResult(matched_accuracy(assignment, y), classes=classes.cpu())


def matched_accuracy(assignment: Tensor, labels: Tensor) -> float:
    """Return the best accuracy over one-to-one maps from clusters to classes, both (n,) from 0."""
    table = torch.zeros(int(assignment.max()) + 1, int(labels.max()) + 1, dtype=torch.long)
    table.index_put_((assignment.cpu(), labels.cpu()), torch.ones(len(labels), dtype=torch.long), accumulate=True)
    rows, columns = linear_sum_assignment(table.numpy(), maximize=True)
    return float(table.numpy()[rows, columns].sum()) / len(labels)


def kmeans(x: Tensor, clusters: int, inits: int = 10, steps: int = 300, seed: int = 0) -> Tensor:
    """Return the cluster of every point (n,) by scikit-learn, of the best of `inits` k-means++ starts."""
    if not 1 <= clusters <= len(x):
        raise OptionError(
            f"k-means of {counted(len(x), 'point')} takes 1 to {counted(len(x), 'cluster')}, got {clusters}"
        )
    fitted = KMeans(clusters, n_init=inits, max_iter=steps, random_state=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer distinct points than clusters
        return torch.from_numpy(fitted.fit_predict(x.cpu().numpy())).long()


# --- frozen encoders ------------------------------------------------------------------------------------------------


def state_hash(module: nn.Module) -> str:
    """Return the sha256 of names, shapes and bytes of all parameters and buffers."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        if isinstance(tensor, Tensor):
            value = tensor.detach().cpu().contiguous()
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def frozen(module: nn.Module) -> Iterator[str]:
    """Set evaluation mode without gradients, yield the module's hash, and restore the mode of every submodule.

    Raises:
        TrainingError: a parameter or buffer changed inside the block.
    """
    modes = {part: part.training for part in module.modules()}
    before = state_hash(module)
    module.eval()
    try:
        with torch.no_grad():
            yield before
        if state_hash(module) != before:
            raise TrainingError("the encoder changed while it was evaluated: its parameters or buffers are not frozen")
    finally:
        for part, mode in modes.items():
            part.training = mode
