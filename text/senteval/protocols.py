"""The four named protocols: their settings, the order of the samples, the folds, and how classifiers are trained.

All problems are solved together, one by one, or as SentEval's PyTorch does.
"""

import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from dipole.core.evaluation.logistic import NotConverged, solve_subsets
from dipole.core.evaluation.probes import measuring_device
from dipole.core.objectives.spec import check_whole
from dipole.core.train.launch import pick_device
from dipole.core.utils.errors import ConfigError, DataError, OptionError, nearest
from dipole.core.utils.text import counted
from dipole.text.senteval.tasks import Split, Task, take
from dipole.text.senteval.torch_classifier import Classifier, Fit, Fitted, fit_all

PROTOCOLS = {
    "fast": "SentEval's folds and grid, logistic regression solved to convergence for all folds and values at once",
    "senteval-torch": "SentEval's PyTorch classifier: Adam, early stopping, weight decay 1e-5 to 1e-2",
    "senteval-sklearn": "SentEval's scikit-learn path: LogisticRegression at its defaults, refitted per fold and C",
    "skip-thoughts": "the scripts of the Quick-Thought rows: unit-norm halves, plain folds of seed 1234, C 1 to 256",
}
OUTER_SEED = 1111  # written into SentEval's nested cross-validation, whatever its `seed` is
SKIP_SEED = 1234
TOLERANCE = 1e-3  # of the converged solver: at 2e-3 a tie between values of C can fall otherwise
Score = Callable[[np.ndarray, np.ndarray], float]
Solved = tuple[list[np.ndarray], Callable[[list[int]], list[np.ndarray]], int]
"""Inner scores (values, folds) of each problem, a function from its chosen value to its labels, and the unconverged."""


def check_device(device: torch.device | str) -> torch.device:
    """Return the device if it is available, or the CPU instead of a device without float64."""
    try:
        return measuring_device(pick_device(str(device)))
    except (RuntimeError, ConfigError) as error:
        said = str(error).splitlines()[0]
        raise OptionError(f"device must be an available one, such as 'cpu', 'cuda' or 'auto': {said}") from None


@dataclass(frozen=True)
class ProbeSettings:
    """Settings of a probe. `classifier` is that of "senteval-torch". scikit-learn's classifiers stay on the CPU."""

    protocol: str = "fast"
    kfold: int = 10
    seed: int = 1111
    classifier: Classifier = field(default_factory=Classifier)
    device: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        name = self.protocol
        if not isinstance(name, str) or name not in PROTOCOLS:
            hint = nearest(str(name), PROTOCOLS)
            raise OptionError(f"unknown protocol {name!r}; allowed: {', '.join(PROTOCOLS)}.{hint}")
        check_whole("kfold", self.kfold, 2)
        check_whole("seed", self.seed, 0)
        if self.seed >= 2**32:
            raise OptionError(f"seed must be a whole number below 2**32, got {self.seed}.")

    def grid(self, kind: str) -> list[float]:
        """Return the values that are tried: weight decays of the PyTorch classifier, else inverse regularisation C."""
        if self.protocol == "senteval-torch":
            return [10**t for t in range(-5, -1)]
        if self.protocol == "skip-thoughts":
            return [2**t for t in range(9)]
        if kind == "holdout":
            return [2**t for t in range(-1, 6)]
        return [2**t for t in range(-2, 4)]


@dataclass(frozen=True)
class ProbeProblem:
    """A final classifier, and the inner problems (training rows, rows to score) that choose its regularisation."""

    train: np.ndarray
    test: np.ndarray
    dev: np.ndarray | None
    inner: list[tuple[np.ndarray, np.ndarray]]


def arranged(task: Task, protocol: str) -> dict[str, Split]:
    """Return the splits of a task in the order in which the protocol draws its folds.

    SentEval sorts by length. The skip-thoughts scripts (eval_classification, eval_trec, eval_msrp) shuffle or not.
    """
    from sklearn.utils import shuffle as sklearn_shuffle

    if protocol != "skip-thoughts" or task.kind not in ("nested", "holdout"):
        return {name: split.sorted() for name, split in task.splits.items()}
    if task.kind == "nested":
        split = task.splits["all"]
        used = [i for i, sentence in enumerate(split.sentences[0]) if sentence or not task.drops_empty]
        return {"all": take(split, sklearn_shuffle(used, random_state=SKIP_SEED))}
    if task.shuffled == "rows":
        train = task.splits["train"]
        order = sklearn_shuffle(range(len(train)), random_state=SKIP_SEED)
        return {**task.splits, "train": take(train, order)}
    return dict(task.splits)


def problems_of(task: Task, splits: dict[str, Split], y: np.ndarray, settings: ProbeSettings) -> list[ProbeProblem]:
    """Divide the rows of a task, split after split in the labels `y` (N,), into problems."""
    bounds = np.cumsum([len(split) for split in splits.values()])
    rows = dict(zip(splits, np.split(np.arange(len(y)), bounds[:-1]), strict=True))

    def inner(folds: Any, train: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        return [(train[a], train[b]) for a, b in folds.split(train, y[train])]

    if task.kind == "nested":
        _check_kfold(task, y, settings.kfold)
        folds = _folds(settings, OUTER_SEED)
        problems = [ProbeProblem(train, test, None, inner(folds, train)) for train, test in folds.split(y, y)]
    elif task.kind == "holdout":
        train = rows["train"]
        _check_kfold(task, y[train], settings.kfold)
        folds = _folds(settings, settings.seed, shuffled=task.shuffled == "folds")
        problems = [ProbeProblem(train, rows["test"], None, inner(folds, train))]
    else:
        problems = [ProbeProblem(rows["train"], rows["test"], rows["dev"], [(rows["train"], rows["dev"])])]
    for problem in problems:
        for train in (problem.train, *(train for train, _ in problem.inner)):
            if len(np.unique(y[train])) < 2:
                raise DataError(
                    f"{task.name}: a fold of {counted(len(train), 'training sample')} holds one class only. Use a "
                    "smaller kfold"
                )
    return problems


def _check_kfold(task: Task, y: np.ndarray, kfold: int) -> None:
    labels, counts = np.unique(y, return_counts=True)
    if counts.min() < kfold:
        raise DataError(
            f"{task.name}: class {labels[counts.argmin()]} has {counted(counts.min(), 'sample')}, fewer than the "
            f"{kfold} folds. Use a kfold of {max(2, counts.min())} or less"
        )


def _folds(settings: ProbeSettings, seed: int, shuffled: bool = False) -> Any:
    """Return a splitter of scikit-learn. `shuffled` is of the skip-thoughts scripts."""
    from sklearn.model_selection import KFold, StratifiedKFold

    if settings.protocol != "skip-thoughts":
        return StratifiedKFold(settings.kfold, shuffle=True, random_state=seed)
    if shuffled:
        return KFold(settings.kfold, shuffle=True, random_state=SKIP_SEED)
    return KFold(settings.kfold)


@dataclass(frozen=True)
class Probe:
    """What the problems of a task reached, in their order. Scores are in percent."""

    best: list[float]  # largest inner score
    chosen: list[float]  # the value of the grid that reached it
    predicted: list[np.ndarray]  # labels of the test part
    folds: list[float]  # their accuracy
    unconverged: int  # logistic regressions that did not reach the tolerance

    @property
    def dev(self) -> float:
        return round(float(np.mean(self.best)), 2)

    @property
    def test(self) -> float:
        return round(float(np.mean(self.folds)), 2)


def classify(task: Task, splits: dict[str, Split], features: dict[str, np.ndarray], settings: ProbeSettings) -> Probe:
    """Probe features (N, d) of each split by the protocol of the settings."""
    x = np.concatenate([features[name] for name in splits])
    y = np.concatenate([np.asarray(split.labels, dtype=np.int64) for split in splits.values()])
    if task.linear:
        settings = replace(settings, classifier=replace(settings.classifier, nhid=0))
    problems = problems_of(task, splits, y, settings)
    solvers = {"senteval-torch": _solve_torch, "senteval-sklearn": _solve_sklearn}
    scores, final, unconverged = solvers.get(settings.protocol, _solve_together)(x, y, problems, task, settings)
    # The first best value by the mean over the folds, rounded as SentEval does.
    means = [[round(100 * float(np.mean(row)), 2) for row in each] for each in scores]
    chosen = [int(np.argmax(row)) for row in means]
    predicted = final(chosen)
    folds = [round(100 * accuracy(y[p.test], labels), 2) for p, labels in zip(problems, predicted, strict=True)]
    grid = settings.grid(task.kind)
    return Probe([max(row) for row in means], [grid[value] for value in chosen], predicted, folds, unconverged)


def accuracy(truth: np.ndarray, predicted: np.ndarray) -> float:
    """Return the share of equal labels."""
    return float(np.mean(truth == predicted))


def pair_features(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return [|u - v|, u * v], (N, 2d)."""
    if left.dtype.kind != "f":  # small integers would overflow
        left, right = left.astype(np.float64), right.astype(np.float64)
    return np.concatenate([np.abs(left - right), left * right], 1)


def _solve_together(
    x: np.ndarray, y: np.ndarray, problems: list[ProbeProblem], task: Task, settings: ProbeSettings
) -> Solved:
    """Solve all inner and final problems as columns of one matrix, to convergence."""
    from sklearn.metrics import f1_score

    inner = [train for problem in problems for train, _ in problem.inner]
    columns = [*inner, *(problem.train for problem in problems)]
    subsets = np.zeros((len(y), len(columns)), dtype=bool)
    for column, train in enumerate(columns):
        subsets[train, column] = True
    grid = settings.grid(task.kind)
    found, converged = solve_subsets(x, y, subsets, grid, TOLERANCE, settings.device)  # labels (values, N, columns)
    if not converged.all():
        warnings.warn(NotConverged(int((~converged).sum()), converged.size), stacklevel=2)
    score: Score = f1_score if settings.protocol == "skip-thoughts" and task.f1 else accuracy
    by_column = iter(np.moveaxis(found, 2, 0))  # (values, N) each
    scores = [
        np.transpose([[score(y[dev], labels[dev]) for labels in next(by_column)] for _, dev in problem.inner])
        for problem in problems
    ]

    def final(chosen: list[int]) -> list[np.ndarray]:
        places = range(len(inner), len(columns))
        parts = zip(problems, chosen, places, strict=True)
        return [found[value, problem.test, place].astype(np.int64) for problem, value, place in parts]

    return scores, final, int((~converged).sum())


def _solve_sklearn(
    x: np.ndarray, y: np.ndarray, problems: list[ProbeProblem], task: Task, settings: ProbeSettings
) -> Solved:
    """Fit scikit-learn's classifier for each fold and value, as SentEval calls it, a fold by one thread."""
    from sklearn import config_context
    from sklearn.linear_model import LogisticRegression

    grid = settings.grid(task.kind)

    def predict(train: np.ndarray, test: np.ndarray, values: list[float]) -> list[np.ndarray]:
        with config_context(assume_finite=True):  # features have been checked
            fitted, tested, truth = x[train], x[test], y[train]
            models = (LogisticRegression(C=value, random_state=settings.seed) for value in values)
            return [model.fit(fitted, truth).predict(tested) for model in models]

    def inner_scores(fold: tuple[np.ndarray, np.ndarray]) -> list[float]:
        return [accuracy(y[fold[1]], found) for found in predict(*fold, grid)]

    def side_by_side(function: Callable[..., Any], *items: Iterable[Any]) -> list[Any]:
        with threadpool_limits(1), ThreadPoolExecutor(torch.get_num_threads()) as threads:
            return list(threads.map(function, *items))

    def final(chosen: list[int]) -> list[np.ndarray]:
        return side_by_side(lambda p, value: predict(p.train, p.test, [grid[value]])[0], problems, chosen)

    return [np.transpose(side_by_side(inner_scores, problem.inner)) for problem in problems], final, 0


def _solve_torch(
    x: np.ndarray, y: np.ndarray, problems: list[ProbeProblem], task: Task, settings: ProbeSettings
) -> Solved:
    """Train SentEval's PyTorch classifier. As there, the inner score is the accuracy that its early stopping saw."""
    grid = settings.grid(task.kind)
    rows = torch.as_tensor(np.ascontiguousarray(x), dtype=torch.float32).to(settings.device)
    labels = torch.as_tensor(y).to(settings.device)

    def fit(fits: list[Fit]) -> list[Fitted]:
        return fit_all(rows, labels, task.classes, fits, settings.classifier, settings.seed)

    def final(chosen: list[int]) -> list[np.ndarray]:
        found = fit([Fit(p.train, p.dev, [grid[value]]) for p, value in zip(problems, chosen, strict=True)])
        return [each.predict(rows[torch.as_tensor(p.test)]) for p, each in zip(problems, found, strict=True)]

    inner = iter(fit([Fit(train, dev, grid) for problem in problems for train, dev in problem.inner]))
    return [np.stack([next(inner).accuracy for _ in problem.inner], 1) for problem in problems], final, 0
