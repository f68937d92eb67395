"""Train and test the classifiers of a task: all problems solved together, one by one, or as SentEval's PyTorch does."""

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from dipole.core.evaluation.logistic import NotConverged, solve_subsets
from dipole.text.senteval.protocols import ProbeProblem, ProbeSettings, problems_of
from dipole.text.senteval.tasks import Split, Task
from dipole.text.senteval.torch_classifier import Fit, fit_all

TOLERANCE = 1e-3  # of the converged solver: at 2e-3 a tie between values of C can fall otherwise
Score = Callable[[np.ndarray, np.ndarray], float]


@dataclass
class Probe:
    """What the problems of a task reached, in their order. Scores are in percent."""

    best: list[float] = field(default_factory=list)  # largest inner score
    chosen: list[float] = field(default_factory=list)  # the value of the grid that reached it
    predicted: list[np.ndarray] = field(default_factory=list)  # labels of the test part
    folds: list[float] = field(default_factory=list)  # their accuracy
    unconverged: int = 0  # logistic regressions that did not reach the tolerance

    @property
    def dev(self) -> float:
        return round(float(np.mean(self.best)), 2)

    @property
    def test(self) -> float:
        return round(float(np.mean(self.folds)), 2)

    def choose(self, scores: np.ndarray, grid: list[float]) -> int:
        """Add the first best value of the grid by the mean inner scores (values, folds), rounded as SentEval does."""
        means = [round(100 * float(np.mean(row)), 2) for row in scores]
        index = int(np.argmax(means))
        self.best.append(means[index])
        self.chosen.append(grid[index])
        return index

    def predict(self, labels: np.ndarray, truth: np.ndarray) -> None:
        """Add the predicted labels of the next problem."""
        self.predicted.append(labels)
        self.folds.append(round(100 * accuracy(truth, labels), 2))


def classify(task: Task, splits: dict[str, Split], features: dict[str, np.ndarray], settings: ProbeSettings) -> Probe:
    """Probe features (N, d) of each split by the protocol of the settings."""
    x = np.concatenate([features[name] for name in splits])
    y = np.concatenate([np.asarray(split.labels, dtype=np.int64) for split in splits.values()])
    if task.linear:
        settings = replace(settings, classifier=replace(settings.classifier, nhid=0))
    problems = problems_of(task, splits, y, settings)
    solvers = {"senteval-torch": _solve_torch, "senteval-sklearn": _solve_sklearn}
    return solvers.get(settings.protocol, _solve_together)(x, y, problems, task, settings)


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
) -> Probe:
    """Solve all inner and final problems as columns of one matrix, to convergence."""
    from sklearn.metrics import f1_score

    inner = [train for problem in problems for train, _ in problem.inner]
    columns = [*inner, *(problem.train for problem in problems)]
    subsets = np.zeros((len(y), len(columns)), dtype=bool)
    for column, train in enumerate(columns):
        subsets[train, column] = True
    grid = settings.grid(task.kind)
    found, converged = solve_subsets(x, y, subsets, grid, TOLERANCE, settings.device)  # labels (values, N, columns)
    score: Score = accuracy
    if settings.protocol == "skip-thoughts" and task.f1:
        score = f1_score
    probe = Probe(unconverged=int((~converged).sum()))
    if probe.unconverged:
        warnings.warn(NotConverged(probe.unconverged, converged.size), stacklevel=2)
    by_column = iter(np.moveaxis(found, 2, 0))  # (values, N) each
    for number, problem in enumerate(problems):
        scores = [[score(y[dev], labels[dev]) for labels in next(by_column)] for _, dev in problem.inner]
        value = probe.choose(np.transpose(scores), grid)
        labels = found[value, problem.test, len(inner) + number]
        probe.predict(labels.astype(np.int64), y[problem.test])
    return probe


def _solve_sklearn(
    x: np.ndarray, y: np.ndarray, problems: list[ProbeProblem], task: Task, settings: ProbeSettings
) -> Probe:
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

    probe = Probe()
    with threadpool_limits(1), ThreadPoolExecutor(torch.get_num_threads()) as threads:
        for problem in problems:
            scores = np.array(list(threads.map(inner_scores, problem.inner))).T
            value = probe.choose(scores, grid)
            (labels,) = predict(problem.train, problem.test, [grid[value]])
            probe.predict(labels, y[problem.test])
    return probe


def _solve_torch(
    x: np.ndarray, y: np.ndarray, problems: list[ProbeProblem], task: Task, settings: ProbeSettings
) -> Probe:
    """Train SentEval's PyTorch classifier. As there, the inner score is the accuracy that its early stopping saw."""
    grid = settings.grid(task.kind)
    rows = torch.as_tensor(np.ascontiguousarray(x), dtype=torch.float32).to(settings.device)
    labels = torch.as_tensor(y).to(settings.device)

    def fit(fits: list[Fit]) -> list:
        return fit_all(rows, labels, task.classes, fits, settings.classifier, settings.seed)

    inner = iter(fit([Fit(train, dev, grid) for problem in problems for train, dev in problem.inner]))
    probe = Probe()
    for problem in problems:
        probe.choose(np.stack([next(inner).accuracy for _ in problem.inner], 1), grid)
    finals = fit([Fit(p.train, p.dev, [value]) for p, value in zip(problems, probe.chosen, strict=True)])
    for problem, final in zip(problems, finals, strict=True):
        probe.predict(final.predict(rows[torch.as_tensor(problem.test)]), y[problem.test])
    return probe
