"""Classifiers on frozen features, which all domains use to evaluate an encoder.

Features (n, d) and labels (n,) are NumPy arrays, lists or tensors. Labels are integers, and rows with a negative label
(unlabelled images) are ignored. Tensors stay on their device. All probes are seeded and deterministic.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Annotated, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dipole.core.evaluation import arrays
from dipole.core.evaluation.arrays import Array, ProbeData, in_range
from dipole.core.evaluation.logistic import Descent, ViewFeatures, descend, fit_softmax
from dipole.core.objectives.spec import Range, check_whole
from dipole.core.utils.errors import DataError, OptionError, nearest
from dipole.core.utils.text import counted, warn

Solver = Literal["convex", "sgd", "adam"]
Classifier = Literal["trained", "mean", "few"]
CLASSIFIERS: tuple[Classifier, ...] = ("trained", "mean", "few")
WAYS, RANKS = (2, 5, 10), (1, 5, 10)
Whole = Annotated[int, Range(at_least=1)]
Seed = Annotated[int, Range(at_least=0, at_most=2**32 - 1)]
AnyWhole = Annotated[int | None, Range(at_least=1)]
Positive = Annotated[float, Range(above=0)]
AnyPositive = Annotated[float | None, Range(above=0)]
ProbeDevice = Literal["auto", "cpu"]
PROBE_DEVICE_HELP = "device of features, probes and diagnostics: the run's device, or the processor"


@dataclass(frozen=True)
class ProbeResult:
    """The result of a probe.

    Attributes:
        accuracy: in [0, 1].
        top5: accuracy of the five best classes, or None with five classes or fewer.
        std: standard deviation over repeated draws, or None for a single fit.
        converged: whether the convex solver met its tolerance.
        classes: (C,) labels.
        scores: (n_test, C) of the last fit. Column j belongs to classes[j]. Clusters have none.
        ranks: (n_test x draws,) rank of the true class among the scores, from 1, with ties against it. Larger than C
            for a class that the training part lacks.

    Example:
        >>> result = dipole.evaluation.knn_probe([[0, 1], [1, 0]], [7, 3], [[0, 2], [1, 0], [1, 9]], [7, 3, 3], k=1)
        >>> result.predictions.tolist(), result.ranks.tolist()
        ([7, 3, 7], [1, 1, 2])
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
        """Return the predicted labels (n_test,).

        Raises:
            DataError: the result is of clusters.
        """
        if self.scores.ndim < 2:
            raise DataError("clusters have no predictions: k-means does not name the class of a point.")
        return self.classes[self.scores.argmax(1)]

    def top(self, rank: int) -> float:
        """Return the share of test points whose class is among the best ones.

        Args:
            rank: how many classes count as best, >= 0.

        Raises:
            OptionError: `rank` is no whole number.
        """
        check_whole("rank", rank, 0)
        return (self.ranks <= rank).double().mean().item()

    def average(self, ways: int) -> float:
        """Return the accuracy averaged over all tasks of `ways` classes (Arora et al. 2019, avg-k), exactly.

        A point of a class of rank r is right in a task with it if the k - 1 others come from the C - r behind it:
            avg-k = mean_x binom(C - r(x), k - 1) / binom(C - 1, k - 1)

        Args:
            ways: number k of classes of a task.

        Raises:
            OptionError: `ways` is no whole number, below 2 or above the number of classes.
        """
        if not isinstance(ways, Integral) or not 2 <= ways <= len(self.classes):
            raise OptionError(f"a task has 2 to {len(self.classes)} of the classes, got {ways!r}")
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


def _result(data: ProbeData, scores: Tensor, **extra: Any) -> ProbeResult:
    if not bool(scores.isfinite().all()):  # the first class would be the answer to every point
        raise DataError("the probe's scores overflow: scale the features to unit length, or use a lower learning rate")
    top5 = None
    if len(data.classes) > 5:
        top5 = int((scores.topk(5, 1).indices == data.test_y[:, None]).sum()) / len(scores)
    accuracy = int((scores.argmax(1) == data.test_y).sum()) / len(scores)
    own = scores.gather(1, data.test_y.clamp_min(0)[:, None])
    ranks = torch.where(data.test_y >= 0, (scores >= own).sum(1), scores.shape[1] + 1).cpu()
    classes = data.classes.cpu()
    return ProbeResult(accuracy, top5, classes=classes, scores=scores.float().cpu(), ranks=ranks, **extra)


@in_range
def linear_probe(
    train_x: Array,
    train_y: Array,
    test_x: Array,
    test_y: Array,
    *,
    solver: Solver = "convex",
    l2: Annotated[float | None, Range(at_least=0)] = None,
    standardize: bool | None = None,
    epochs: Whole = 100,
    batch_size: AnyWhole = None,
    learning_rate: AnyPositive = None,
    schedule: Literal["step", "cosine"] = "step",
    milestones: tuple[int, ...] | None = None,
    decay: AnyPositive = None,
    seed: Seed = 0,
) -> ProbeResult:
    """Return the accuracy of a linear softmax classifier trained on frozen features.

    solver "convex": the minimum of mean cross-entropy + l2/2 ||W||^2 (the bias is free), see `fit_softmax`. l2 None
    takes 1/n, which is scikit-learn's C = 1.
    solver "adam", "sgd": the schedules of CACR App. C.1 and C.2, see `Descent`; l2 is their weight decay, 0 by default.
    standardize: features to zero mean and unit variance by the training part; None: for "convex" only, as the papers'
    schedules take features as they are.

    Returns:
        The accuracy in [0, 1] and the scores, see `ProbeResult`.

    Raises:
        DataError: for missing labels, a single class, features of another shape or that are not finite.
        OptionError: an unknown solver, or a setting that does not fit it.

    Example:
        >>> train, test = [[0, 1], [1, 0], [0, 2], [2, 0]], [[0.1, 1], [1, 0.1]]
        >>> dipole.evaluation.linear_probe(train, [0, 1, 0, 1], test, [0, 1]).accuracy
        1.0
    """
    stepwise = {"batch_size": batch_size, "learning_rate": learning_rate, "milestones": milestones, "decay": decay}
    given = [name for name, value in stepwise.items() if value is not None]
    if given and solver == "convex":
        raise OptionError(f"linear_probe: {given[0]} has no effect with solver 'convex'. Choose sgd or adam.")
    if milestones is not None and not isinstance(milestones, Sequence):
        raise OptionError(f"linear_probe: milestones must be epochs, such as (60, 80), got {milestones!r}.")
    data = arrays.split(train_x, train_y, test_x, test_y)
    if standardize or (standardize is None and solver == "convex"):
        data = arrays.standardized(data)
    data = arrays.single(data)
    if solver == "convex":
        weight, bias, converged = fit_softmax(data.train_x, data.train_y, len(data.classes), l2)
        return _result(data, data.test_x.double() @ weight.T + bias, converged=converged)
    how = Descent(solver, epochs, batch_size, learning_rate, l2 or 0.0, schedule, milestones, decay)
    x, y, classes = data.train_x, data.train_y, len(data.classes)
    layer = descend(lambda _, batches: (x[index.to(x.device)] for index in batches), y, classes, x.shape[1], how, seed)
    with torch.no_grad():
        return _result(data, layer(data.test_x))


def linear_probe_on_views(
    rows: ViewFeatures, train_y: Array, test_x: Array, test_y: Array, how: Descent, seed: int = 0
) -> ProbeResult:
    """Return the accuracy of a linear softmax classifier trained on features of random views, as the vision papers do.

    `rows` gives the features of numbered training points for an epoch. Unlabelled ones are never requested.
    """
    x = arrays.check_features(test_x, "test_x").float()
    p = arrays.check_labels(train_y, None, x.device, "train_y")
    q = arrays.check_labels(test_y, len(x), x.device, "test_y")
    asked = (p >= 0).nonzero().squeeze(1).cpu()
    known = arrays.known_classes(x[:0], p[p >= 0], x[q >= 0], q[q >= 0])

    def of_known(epoch: int, batches: Sequence[Tensor]) -> Iterator[Tensor]:
        return (
            arrays.check_features(seen, "train_x").float() for seen in rows(epoch, [asked[index] for index in batches])
        )

    layer = descend(of_known, known.train_y, len(known.classes), x.shape[1], how, seed)
    with torch.no_grad():
        return _result(known, layer(known.test_x))


@in_range
def few_shot_probe(
    train_x: Array,
    train_y: Array,
    test_x: Array,
    test_y: Array,
    *,
    labels_per_class: Whole = 5,
    draws: Whole = 5,
    seed: Seed = 0,
    l2: AnyPositive = None,
) -> ProbeResult:
    """Return the mean accuracy of the convex linear probe on a few labelled points per class, over seeded draws.

    Features are standardised by the complete training part, without labels. A class with fewer points uses all of them,
    with a warning.

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

    Example:
        >>> train, test = [[0, 1], [1, 0], [0, 2], [2, 0]], [[0.1, 1], [1, 0.1]]
        >>> dipole.evaluation.few_shot_probe(train, [0, 1, 0, 1], test, [0, 1], labels_per_class=1, draws=3).accuracy
        1.0
    """
    data = arrays.single(arrays.standardized(arrays.split(train_x, train_y, test_x, test_y)))

    def scores(x: Tensor, y: Tensor) -> Tensor:
        weight, bias, _ = fit_softmax(x, y, len(data.classes), l2)
        return data.test_x.double() @ weight.T + bias

    return _over_draws(data, labels_per_class, draws, seed, scores)


@in_range
def mean_classifier(
    train_x: Array,
    train_y: Array,
    test_x: Array,
    test_y: Array,
    *,
    labels_per_class: AnyWhole = None,
    draws: Whole = 5,
    seed: Seed = 0,
) -> ProbeResult:
    """Return the accuracy of the mean classifier, argmax_c f(x)^T mu_c (Arora et al. 2019, W^mu), on raw features.

    labels_per_class: points per class for each mean, repeated over seeded draws (mu-5 with 5). None takes all points.
    Features so large that products overflow are divided by their largest value, and so are the scores.

    Raises:
        DataError: as `linear_probe`.
        OptionError: `labels_per_class` or `draws` is below 1.

    Example:
        >>> train, test = [[0, 1], [1, 0], [0, 2], [2, 0]], [[0.1, 1], [1, 0.1]]
        >>> dipole.evaluation.mean_classifier(train, [0, 1, 0, 1], test, [0, 1]).accuracy
        1.0
    """
    data = arrays.split(train_x, train_y, test_x, test_y)
    largest = arrays.size(data.train_x)
    data = arrays.single(data.mapped(lambda x: arrays.moderate(x, largest)))

    def scores(x: Tensor, y: Tensor) -> Tensor:
        onehot = F.one_hot(y, len(data.classes)).to(x)
        return data.test_x @ ((onehot.T @ x) / onehot.sum(0)[:, None]).T

    if labels_per_class is None:
        return _result(data, scores(data.train_x, data.train_y))
    return _over_draws(data, labels_per_class, draws, seed, scores)


def _over_draws(
    data: ProbeData, labels_per_class: int, draws: int, seed: int, fit: Callable[[Tensor, Tensor], Tensor]
) -> ProbeResult:
    counts = data.train_y.bincount()
    if short := int((counts < labels_per_class).sum()):
        warn(
            f"{short} of {counted(len(counts), 'class', 'classes')} have fewer than labels_per_class = "
            f"{labels_per_class} labelled points, the smallest {int(counts.min())}. All of them are used in each draw",
            stacklevel=4,
        )
    results = []
    for draw in range(draws):
        generator = torch.Generator().manual_seed(seed * 100_003 + draw)
        order = torch.randperm(len(data.train_y), generator=generator).to(data.train_y.device)
        label = data.train_y[order]
        rank = (F.one_hot(label, len(data.classes)).cumsum(0).gather(1, label[:, None]) - 1).squeeze(1)
        chosen = order[rank < labels_per_class]
        results.append(_result(data, fit(data.train_x[chosen], data.train_y[chosen])))
    accuracies = np.array([r.accuracy for r in results])
    top5 = None if results[0].top5 is None else float(np.mean([r.top5 for r in results]))
    std = float(accuracies.std(ddof=1)) if draws > 1 else None
    last, ranks = results[-1], torch.cat([r.ranks for r in results])
    return ProbeResult(float(accuracies.mean()), top5, std, classes=last.classes, scores=last.scores, ranks=ranks)


@in_range
def knn_probe(
    train_x: Array,
    train_y: Array,
    test_x: Array,
    test_y: Array,
    *,
    k: Whole = 20,
    temperature: Positive = 0.07,
    chunk: Whole = 1024,
) -> ProbeResult:
    """Return the accuracy of the k-nearest-neighbour vote with weights e^{cos/temperature} (Wu et al. 2018, Sec. 3.4).

    Args:
        train_x: features, (n, d).
        train_y: class of each, (n,) integers. Rows with a negative label are left out.
        test_x: features to classify, (m, d).
        test_y: class of each, (m,).
        k: neighbours, >= 1. If there are fewer training points, all of them vote, with a warning.
        temperature: of the weights, > 0.
        chunk: test points compared at a time, >= 1.

    Raises:
        DataError: labels are missing, there is one class only, or features are not finite or of another shape.
        OptionError: k or chunk is below 1, or the temperature is not above 0.

    Example:
        >>> train, test = [[0, 1], [1, 0], [0, 2], [2, 0]], [[0.1, 1], [1, 0.1]]
        >>> dipole.evaluation.knn_probe(train, [0, 1, 0, 1], test, [0, 0], k=2).accuracy
        0.5
    """
    data = arrays.split(train_x, train_y, test_x, test_y)
    data = arrays.single(data.mapped(arrays.moderate_rows))
    bank = F.normalize(data.train_x, dim=1)
    if k > len(bank):
        warn(f"k = {k} is more than the {counted(len(bank), 'labelled point')}: all of them vote", stacklevel=3)
    votes = []
    for part in F.normalize(data.test_x, dim=1).split(chunk):
        similarity, index = (part @ bank.T).topk(min(k, len(bank)), 1)
        weight = ((similarity - similarity[:, :1]) / temperature).exp()
        votes.append(weight.new_zeros(len(part), len(data.classes)).scatter_add_(1, data.train_y[index], weight))
    return _result(data, torch.cat(votes))


def class_tasks(
    train_x: Any,
    train_y: Any,
    test_x: Any,
    test_y: Any,
    *,
    classifiers: tuple[Classifier, ...] = CLASSIFIERS,
    solver: Solver = "convex",
    epochs: int = 100,
    labels_per_class: int = 5,
    draws: int = 5,
    seed: int = 0,
) -> dict[str, float]:
    """Return the accuracies of Arora et al. 2019, Table 1: `CLASSIFIER/avg-K` over all K-class tasks, and top-R.

    Classifiers: "trained", a linear layer on the frozen features (Tr; for a K-class task the layer's K rows); "mean",
    rows mu_c = E_{x ~ D_c} f(x) (mu); "few", means of `labels_per_class` points, averaged over `draws` (mu-5).
    K is 2, 5, 10 and R is 1, 5, 10, as far as there are classes. Values are shares in [0, 1]. `solver` and `epochs` are
    of the trained layer (`linear_probe`), `draws` and `labels_per_class` of "few".
    """
    data = (train_x, train_y, test_x, test_y)
    found: dict[str, float] = {}
    for name in classifiers:
        if name not in CLASSIFIERS:
            raise OptionError(
                f"unknown classifier {name!r}.{nearest(name, CLASSIFIERS)} Allowed: {', '.join(CLASSIFIERS)}."
            )
        if name == "trained":
            result = linear_probe(*data, solver=solver, epochs=epochs, seed=seed)
        elif name == "few":
            result = mean_classifier(*data, labels_per_class=labels_per_class, draws=draws, seed=seed)
        else:
            result = mean_classifier(*data)
        classes = len(result.classes)
        found |= {f"{name}/avg-{k}": result.average(k) for k in WAYS if k <= classes}
        found |= {f"{name}/top-{r}": result.top(r) for r in RANKS if r < classes}
    return found


@in_range
def kmeans_accuracy(
    features: Array,
    labels: Array,
    *,
    clusters: AnyWhole = None,
    inits: Whole = 10,
    steps: Whole = 300,
    normalize: bool = False,
    seed: Seed = 0,
) -> ProbeResult:
    """Return the accuracy of k-means clusters that are matched one to one with the classes (Hungarian algorithm).

    The run of least inertia among `inits` k-means++ starts counts. clusters: None takes the number of classes.
    normalize: project features on the unit sphere first.

    Raises:
        DataError: as `linear_probe`.
        OptionError: more clusters than points, or none.

    Example:
        >>> dipole.evaluation.kmeans_accuracy([[0, 1], [9, 0], [0, 2], [8, 0]], [0, 1, 0, 1]).accuracy
        1.0
    """
    x = arrays.check_features(features, "features")
    y = arrays.check_labels(labels, len(x), x.device, "labels")
    x, y = x[y >= 0], y[y >= 0]
    if not len(x):
        raise DataError("k-means accuracy needs labelled points; all labels are missing")
    classes, y = y.unique(return_inverse=True)
    if len(classes) < 2:
        raise DataError(f"k-means accuracy needs two classes or more; every label is {int(classes[0])}")
    if normalize:
        x = F.normalize(arrays.moderate_rows(x).float(), dim=1)
    x = arrays.moderate(x, arrays.size(x))
    assignment = kmeans(x, clusters or len(classes), inits, steps, seed)
    return ProbeResult(matched_accuracy(assignment, y), classes=classes.cpu())


def matched_accuracy(assignment: Tensor, labels: Tensor) -> float:
    """Return the best accuracy over one-to-one maps from clusters to classes, both (n,) from 0."""
    from scipy.optimize import linear_sum_assignment

    table = torch.zeros(int(assignment.max()) + 1, int(labels.max()) + 1, dtype=torch.long)
    table.index_put_((assignment.cpu(), labels.cpu()), torch.ones(len(labels), dtype=torch.long), accumulate=True)
    rows, columns = linear_sum_assignment(table.numpy(), maximize=True)
    return float(table.numpy()[rows, columns].sum()) / len(labels)


def kmeans(x: Tensor, clusters: int, inits: int = 10, steps: int = 300, seed: int = 0) -> Tensor:
    """Return the cluster of every point (n,) by scikit-learn, of the best of `inits` k-means++ starts."""
    from sklearn.cluster import KMeans  # a training process starts two seconds sooner without it
    from sklearn.exceptions import ConvergenceWarning

    if not 1 <= clusters <= len(x):
        raise OptionError(
            f"k-means of {counted(len(x), 'point')} takes 1 to {counted(len(x), 'cluster')}, got {clusters}"
        )
    fitted = KMeans(clusters, n_init=inits, max_iter=steps, random_state=seed)
    with warnings.catch_warnings(action="ignore", category=ConvergenceWarning):  # fewer distinct points than clusters
        return torch.from_numpy(fitted.fit_predict(x.cpu().numpy())).long()
