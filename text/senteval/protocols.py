"""The four named protocols: their settings, the order of the samples, and the folds."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dipole.core.evaluation.probes import measuring_device
from dipole.core.train.launch import pick_device
from dipole.core.utils.errors import ConfigError, DataError, OptionError, nearest
from dipole.core.utils.text import counted
from dipole.text.senteval.tasks import Split, Task
from dipole.text.senteval.torch_classifier import Classifier, check_whole

PROTOCOLS = {
    "fast": "SentEval's folds and grid, logistic regression solved to convergence for all folds and values at once",
    "senteval-torch": "SentEval's PyTorch classifier: Adam, early stopping, weight decay 1e-5 to 1e-2",
    "senteval-sklearn": "SentEval's scikit-learn path: LogisticRegression at its defaults, refitted per fold and C",
    "skip-thoughts": "the scripts of the Quick-Thought rows: unit-norm halves, plain folds of seed 1234, C 1 to 256",
}
OUTER_SEED = 1111  # written into SentEval's nested cross-validation, whatever its `seed` is
SKIP_SEED = 1234


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
        check_whole(self.kfold, "kfold", 2)
        check_whole(self.seed, "seed", 0, 2**32 - 1)

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
        order = np.arange(len(used))
        np.random.RandomState(SKIP_SEED).shuffle(order)
        return {"all": _take(split, [used[i] for i in order])}
    if task.shuffled == "rows":
        train = task.splits["train"]
        order = sklearn_shuffle(np.arange(len(train)), random_state=SKIP_SEED)
        return {"train": _take(train, order), "test": task.splits["test"]}
    return dict(task.splits)


def _take(split: Split, order: Sequence[int]) -> Split:
    return Split([[side[i] for i in order] for side in split.sentences], [split.labels[i] for i in order])


def problems_of(task: Task, splits: dict[str, Split], y: np.ndarray, settings: ProbeSettings) -> list[ProbeProblem]:
    """Divide the rows of a task, split after split in the labels `y` (N,), into problems."""
    rows: dict[str, np.ndarray] = {}
    start = 0
    for name, split in splits.items():
        rows[name] = np.arange(start, start + len(split))
        start += len(split)
    if task.kind == "nested":
        _check_kfold(task, y, settings.kfold)
        folds = _folds(settings, OUTER_SEED)
        problems = [ProbeProblem(train, test, None, _inner(folds, train, y)) for train, test in folds.split(y, y)]
    elif task.kind == "holdout":
        train = rows["train"]
        _check_kfold(task, y[train], settings.kfold)
        folds = _folds(settings, settings.seed, shuffled=task.shuffled == "folds")
        problems = [ProbeProblem(train, rows["test"], None, _inner(folds, train, y))]
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


def _inner(folds: Any, train: np.ndarray, y: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Divide training rows again."""
    return [(train[a], train[b]) for a, b in folds.split(train, y[train])]
