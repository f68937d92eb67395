"""The four named protocols: how a probe's folds are drawn, its regularisation chosen, and its classifier trained."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score
from sklearn.model_selection import KFold, StratifiedKFold
from sklearn.utils import shuffle as sklearn_shuffle

from dipole.core.evaluation.logistic import LARGEST, NotConverged, largest_value, predictions
from dipole.core.evaluation.probes import measuring_device
from dipole.core.train.launch import pick_device
from dipole.core.utils.errors import ConfigError, DataError, OptionError, nearest
from dipole.core.utils.text import counted
from dipole.text.scaling import halves_normalised
from dipole.text.senteval.task import Split, Task
from dipole.text.senteval.torch_classifier import Classifier, Fit, fit_all

PROTOCOLS = {
    "fast": "SentEval's folds and grid, logistic regression solved to convergence for all folds and values at once",
    "senteval-torch": "SentEval's PyTorch classifier: Adam, early stopping, weight decay 1e-5 to 1e-2",
    "senteval-sklearn": "SentEval's scikit-learn path: LogisticRegression at its defaults, refitted per fold and C",
    "skip-thoughts": "the scripts of the Quick-Thought rows: unit-norm halves, plain folds of seed 1234, C 1 to 256",
}
OUTER_SEED = 1111  # written into SentEval's nested cross-validation, whatever its `seed` is
SKIP_SEED = 1234
TOLERANCE = 1e-3  # of the converged solver: with 2e-3 a tie between values of C can fall otherwise


def check_protocol(name: str) -> str:
    """Return the name if a protocol has it."""
    if not isinstance(name, str) or name not in PROTOCOLS:
        raise OptionError(f"unknown protocol {name!r}; allowed: {', '.join(PROTOCOLS)}.{nearest(str(name), PROTOCOLS)}")
    return name


def check_device(device: torch.device | str) -> torch.device:
    """Where a classifier is to be trained: the device, if it is here; the processor for one without float64."""
    try:
        return measuring_device(pick_device(str(device)))
    except (RuntimeError, ConfigError) as error:
        said = str(error).splitlines()[0]
        raise OptionError(f"device must be one that is here, such as 'cpu', 'cuda' or 'auto': {said}") from None


def whole(value: Any, name: str, least: int, most: int | None = None) -> int:
    """The value if it is a whole number in its range."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least or value > (most or value):
        allowed = f"a whole number from {least} {'up' if most is None else f'to {most}'}"
        raise OptionError(f"{name} must be {allowed}, got {str(value)[:60]!r}")
    return int(value)


@dataclass(frozen=True)
class Settings:
    """What a probe depends on besides features and labels."""

    protocol: str = "fast"
    kfold: int = 10
    seed: int = 1111
    classifier: Classifier = field(default_factory=Classifier)
    device: torch.device | str = "cpu"  # where classifiers are trained, but scikit-learn's

    def __post_init__(self) -> None:
        check_protocol(self.protocol)
        whole(self.kfold, "kfold", 2)
        whole(self.seed, "seed", 0, 2**32 - 1)

    def grid(self, kind: str) -> list[float]:
        """Values tried: weight decay for the PyTorch classifier, inverse regularisation C elsewhere."""
        if self.protocol == "senteval-torch":
            return [10**t for t in range(-5, -1)]
        if self.protocol == "skip-thoughts":
            return [2**t for t in range(9)]
        return [2**t for t in range(-1, 6)] if kind == "holdout" else [2**t for t in range(-2, 4)]


@dataclass(frozen=True)
class Probe:
    """Accuracies in percent, and what they came from."""

    dev: float
    test: float
    folds: list[float]  # test accuracy of every outer fold
    chosen: list[float]  # the regularisation chosen in every outer fold
    predicted: np.ndarray  # of the last (or only) test part
    truth: np.ndarray
    unconverged: int = 0  # problems of the converged solver that met no tolerance


@dataclass(frozen=True)
class _Outer:
    """One final model: rows to train, to test and to stop early on, and the inner problems that choose."""

    train: np.ndarray
    test: np.ndarray
    dev: np.ndarray | None
    inner: list[tuple[np.ndarray, np.ndarray]]


Score = Callable[[np.ndarray, np.ndarray], float]


def accuracy(truth: np.ndarray, predicted: np.ndarray) -> float:
    """Share of equal labels."""
    return float(np.mean(truth == predicted))


def arrange(task: Task) -> tuple[dict[str, Split], bool]:
    """Splits of a task in SentEval's order (sorted by length); the flag says whether features are of pairs."""
    return {name: split.sorted() for name, split in task.splits.items()}, task.pairs


def arrange_skip_thoughts(task: Task) -> dict[str, Split]:
    """Order splits as the skip-thoughts scripts do (eval_classification, eval_trec, eval_msrp): the folds follow."""
    if task.kind == "nested":
        split = task.splits["all"]
        kept = [i for i, sentence in enumerate(split.sentences[0]) if sentence or not task.drops_empty]
        order = np.arange(len(kept))
        np.random.RandomState(SKIP_SEED).shuffle(order)
        return {"all": _take(split, [kept[i] for i in order])}
    if task.shuffled == "rows":
        train = task.splits["train"]
        order = sklearn_shuffle(np.arange(len(train)), random_state=SKIP_SEED)
        return {"train": _take(train, order), "test": task.splits["test"]}
    return dict(task.splits)


def _take(split: Split, order: Sequence[int]) -> Split:
    return Split([[side[i] for i in order] for side in split.sentences], [split.labels[i] for i in order])


def pair_features(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """[|u - v|, u * v], (N, 2d)."""
    if left.dtype.kind != "f":  # whole numbers of few bits would wrap
        left, right = left.astype(np.float64), right.astype(np.float64)
    return np.concatenate([np.abs(left - right), left * right], 1)


def classify(
    task: Task, splits: dict[str, Split], features: dict[str, np.ndarray], settings: Settings, note: Callable = print
) -> Probe:
    """Probe the features (N, d) of every split by the protocol; `note` is told what is being done."""
    x = np.concatenate([features[name] for name in splits])
    largest = largest_value(x)
    if not np.isfinite(largest):
        wrong = int((~np.isfinite(x)).any(1).sum())
        raise DataError(
            f"{task.name}: the features of {counted(wrong, 'sentence')} hold NaN or infinity; look at the encoder"
        )
    if largest > LARGEST:
        raise DataError(
            f"{task.name}: features reach {largest:.3g} in size, and classifiers take up to {LARGEST:.0e}; scale them"
        )
    y = np.concatenate([np.asarray(split.labels, dtype=np.int64) for split in splits.values()])
    if task.linear and settings.classifier.nhid:
        settings = replace(settings, classifier=replace(settings.classifier, nhid=0))
    if task.kind != "split":
        _check_kfold(task, y[: len(next(iter(splits.values())))], settings.kfold)
    sizes = np.cumsum([0, *(len(split) for split in splits.values())])
    rows = {name: np.arange(start, end) for name, start, end in zip(splits, sizes, sizes[1:], strict=False)}
    if task.kind == "nested":
        outers = _nested_folds(x, y, settings)
    elif task.kind == "holdout":
        outers = [_holdout_folds(rows, y, settings, task)]
    else:
        train, dev = rows["train"], rows["dev"]
        outers = [_Outer(train, rows["test"], dev, [(train, dev)])]
    _check_folds(task, y, outers)
    score: Score = accuracy
    if settings.protocol == "skip-thoughts" and task.f1:
        score = f1_score
    solve = {"senteval-torch": _solve_torch, "senteval-sklearn": _solve_sklearn}.get(settings.protocol, _solve_together)
    note(
        f"{task.name}: {sum(len(o.inner) for o in outers)} inner and {len(outers)} final problems, {settings.protocol}"
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", NotConverged)
        probe = _report(*solve(x, y, outers, task, settings, score), y, outers)
    for each in caught:
        warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
    missed = sum(each.message.count for each in caught if isinstance(each.message, NotConverged))
    return replace(probe, unconverged=missed)


def _check_kfold(task: Task, y: np.ndarray, kfold: int) -> None:
    labels, counts = np.unique(y, return_counts=True)
    if counts.min() < kfold:
        raise DataError(
            f"{task.name}: class {labels[counts.argmin()]} has {counted(counts.min(), 'sample')}, fewer than the "
            f"{kfold} folds; use a kfold of {max(2, counts.min())} or less"
        )


def _nested_folds(x: np.ndarray, y: np.ndarray, settings: Settings) -> list[_Outer]:
    if settings.protocol == "skip-thoughts":
        folds: Any = KFold(settings.kfold)
    else:
        folds = StratifiedKFold(settings.kfold, shuffle=True, random_state=OUTER_SEED)
    blank = np.zeros(len(y))
    outers = []
    for train, test in folds.split(blank, y):
        inner = [(train[a], train[b]) for a, b in folds.split(blank[train], y[train])]
        outers.append(_Outer(train, test, None, inner))
    return outers


def _holdout_folds(rows: dict[str, np.ndarray], y: np.ndarray, settings: Settings, task: Task) -> _Outer:
    train = rows["train"]
    if settings.protocol != "skip-thoughts":
        folds: Any = StratifiedKFold(settings.kfold, shuffle=True, random_state=settings.seed)
    elif task.shuffled == "folds":
        folds = KFold(settings.kfold, shuffle=True, random_state=SKIP_SEED)
    else:
        folds = KFold(settings.kfold)
    inner = [(train[a], train[b]) for a, b in folds.split(train, y[train])]
    return _Outer(train, rows["test"], None, inner)


def _check_folds(task: Task, y: np.ndarray, outers: list[_Outer]) -> None:
    for outer in outers:
        for train, _ in [(outer.train, outer.test), *outer.inner]:
            if len(np.unique(y[train])) < 2:
                raise DataError(
                    f"{task.name}: a fold of {counted(len(train), 'training sample')} holds one class only; use a "
                    "smaller kfold"
                )


def _choose(scores: np.ndarray) -> tuple[int, float]:
    """First best of the rounded mean inner scores (R, inner folds), in percent, as SentEval rounds them."""
    means = [round(100 * float(np.mean(row)), 2) for row in scores]
    best = int(np.argmax(means))
    return best, means[best]


Solved = tuple[list[float], list[float], list[np.ndarray]]  # best inner scores, chosen values, test predictions


def _solve_together(
    x: np.ndarray, y: np.ndarray, outers: list[_Outer], task: Task, settings: Settings, score: Score
) -> Solved:
    """All inner and final problems as columns of one matrix, solved to convergence."""
    problems = [train for outer in outers for train, _ in outer.inner] + [outer.train for outer in outers]
    used = np.unique(np.concatenate([rows for o in outers for rows in (o.train, o.test, *(d for _, d in o.inner))]))
    subsets = np.zeros((len(y), len(problems)), dtype=bool)
    for column, train in enumerate(problems):
        subsets[train, column] = True
    grid = settings.grid(task.kind)
    if len(used) < len(y):
        x, subsets = x[used], subsets[used]
    predicted = predictions(x, y[used], subsets, grid, TOLERANCE, settings.device)
    place = np.zeros(len(y), dtype=np.int64)
    place[used] = np.arange(len(used))
    best, chosen, tests = [], [], []
    column = 0
    for number, outer in enumerate(outers):
        columns = range(column, column + len(outer.inner))
        column += len(outer.inner)
        scores = np.array(
            [
                [score(y[dev], p[place[dev], c]) for c, (_, dev) in zip(columns, outer.inner, strict=True)]
                for p in predicted
            ]
        )
        index, dev_score = _choose(scores)
        best.append(dev_score)
        chosen.append(grid[index])
        tests.append(predicted[index][place[outer.test], len(problems) - len(outers) + number].astype(np.int64))
    return best, chosen, tests


def _solve_sklearn(
    x: np.ndarray, y: np.ndarray, outers: list[_Outer], task: Task, settings: Settings, score: Score
) -> Solved:
    """One scikit-learn fit per fold and value, exactly as SentEval calls it."""
    grid = settings.grid(task.kind)

    def predict(c: float, train: np.ndarray, test: np.ndarray) -> np.ndarray:
        return LogisticRegression(C=c, random_state=settings.seed).fit(x[train], y[train]).predict(x[test])

    best, chosen, tests = [], [], []
    for outer in outers:
        scores = np.array([[score(y[dev], predict(c, train, dev)) for train, dev in outer.inner] for c in grid])
        index, dev_score = _choose(scores)
        best.append(dev_score)
        chosen.append(grid[index])
        tests.append(predict(grid[index], outer.train, outer.test))
    return best, chosen, tests


def _solve_torch(
    x: np.ndarray, y: np.ndarray, outers: list[_Outer], task: Task, settings: Settings, score: Score
) -> Solved:
    """SentEval's PyTorch classifier; the inner score is the accuracy its early stopping saw, as in SentEval."""
    grid = settings.grid(task.kind)
    rows = torch.as_tensor(np.ascontiguousarray(x), dtype=torch.float32).to(settings.device)
    labels = torch.as_tensor(y).to(settings.device)

    def fit(fits: list[Fit]) -> list:
        return fit_all(rows, labels, task.classes, fits, settings.classifier, settings.seed)

    inner = fit([Fit(train, dev, grid) for outer in outers for train, dev in outer.inner])
    best, chosen = [], []
    for outer in outers:
        members, inner = inner[: len(outer.inner)], inner[len(outer.inner) :]
        index, dev_score = _choose(np.stack([m.accuracy for m in members], 1))
        best.append(dev_score)
        chosen.append(grid[index])
    finals = fit([Fit(o.train, o.dev, [value]) for o, value in zip(outers, chosen, strict=True)])
    return best, chosen, [f.predict(rows[torch.as_tensor(o.test)]) for f, o in zip(finals, outers, strict=True)]


def _report(
    best: list[float], chosen: list[float], tests: list[np.ndarray], y: np.ndarray, outers: list[_Outer]
) -> Probe:
    folds = [round(100 * accuracy(y[o.test], p), 2) for o, p in zip(outers, tests, strict=True)]
    return Probe(
        dev=round(float(np.mean(best)), 2),
        test=round(float(np.mean(folds)), 2),
        folds=folds,
        chosen=chosen,
        predicted=tests[-1],
        truth=y[outers[-1].test],
    )


__all__ = [
    "PROTOCOLS",
    "Probe",
    "Settings",
    "arrange",
    "arrange_skip_thoughts",
    "check_protocol",
    "classify",
    "halves_normalised",
    "pair_features",
]
