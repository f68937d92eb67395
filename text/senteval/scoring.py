"""From the embeddings of a task's sentences to its result, in SentEval's keys."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dipole.core.evaluation.logistic import LARGEST, largest_value
from dipole.core.utils.errors import DataError
from dipole.core.utils.progress import Progress
from dipole.text.encode import halves_normalised
from dipole.text.senteval.probe import Probe, classify, pair_features
from dipole.text.senteval.protocols import ProbeSettings, arranged
from dipole.text.senteval.relatedness import cosine, relatedness_result, sts_result
from dipole.text.senteval.tasks import Sentence, Split, Task

MEASURES = ("pearson", "spearman")
LEARNED = ("pearson", "spearman", "mse", "yhat", "devpearson", "ndev", "ntest")  # keys of a learned similarity


class Result(dict):
    """The result of a task: a dictionary with SentEval's keys, which `json.dumps` writes.

    Attributes:
        protocol: the name of the protocol, one of `PROTOCOLS`.
        folds: test accuracy of each outer fold, in percent.
        std: their standard deviation (0 for a single test).
        chosen: the regularisation chosen in each fold.
        majority: accuracy, in percent, of always answering with the most frequent class.
        standard_error: of the accuracy, in percentage points: sqrt(acc (100 - acc) / n) of n samples tested.
        changed: warnings about files that differ from the published ones.
        unconverged: problems whose solver did not reach its tolerance.
    """

    protocol: str
    folds: Sequence[float] = ()
    chosen: Sequence[float] = ()
    std = 0.0
    majority = 0.0
    standard_error = 0.0
    changed: Sequence[str] = ()
    unconverged = 0

    def __missing__(self, key: object) -> Any:
        if key in LEARNED and "test" in self:
            raise KeyError(
                f"{key!r}: this task is scored by cosine, as in SimCSE's SentEval. Read results['test']['pearson'][0], "
                f"or evaluate STSBenchmark-finetune or SICKRelatedness-finetune for SentEval's regression"
            )
        raise KeyError(key)

    def __repr__(self) -> str:
        return f"{super().__repr__()} [protocol {self.protocol}]"


def score(
    task: Task,
    embeddings: Mapping[Any, np.ndarray],
    settings: ProbeSettings,
    params: Mapping[str, Any],
    progress: Progress,
) -> Result:
    """Score a task from the embeddings of its sentences (keys: tuples of tokens)."""

    def matrix(sentences: list[Sentence]) -> np.ndarray:
        return np.stack([embeddings[tuple(sentence)] for sentence in sentences])

    if task.kind == "sts":
        result = _score_sts(task, matrix, params.get("similarity") or cosine)
    else:
        splits = arranged(task, settings.protocol)
        halves = int(params.get("halves") or 1)

        def features(split: Split) -> np.ndarray:
            sides = [matrix(side) for side in split.sentences]
            if settings.protocol == "skip-thoughts":
                sides = [halves_normalised(side, halves) for side in sides]
            if task.pairs:
                return pair_features(*sides)
            return sides[0]

        x = {name: features(split) for name, split in splits.items()}
        largest = max(map(largest_value, x.values()))
        if not largest <= LARGEST:
            raise DataError(f"{task.name}: features reach {largest:.3g}, the limit is {LARGEST:.0e}; scale the vectors")
        if task.kind == "relatedness":
            gold = {name: split.labels for name, split in splits.items()}
            result = Result(relatedness_result(x, gold, settings.seed))
        else:
            result = _classification(task, splits, classify(task, splits, x, settings))
    result.protocol, result.changed = settings.protocol, task.changed
    progress.note(f"{describe(task.name, result)}  [{settings.protocol}, kfold {settings.kfold}]")
    return result


def _classification(task: Task, splits: dict[str, Split], probe: Probe) -> Result:
    from sklearn.metrics import f1_score

    parts = list(splits.values())
    truth = np.asarray(parts[-1].labels, dtype=np.int64)
    result = Result({"devacc": probe.dev, "acc": probe.test})
    if task.f1:
        result["f1"] = round(100 * float(f1_score(truth, probe.predicted[-1], zero_division=0)), 2)
    result |= {"ndev": len(splits.get("dev", parts[0])), "ntest": len(truth)}
    result.folds, result.chosen, result.unconverged = probe.folds, probe.chosen, probe.unconverged
    result.std = float(np.std(probe.folds))
    counts = np.bincount(truth)
    result.majority = round(100 * float(counts.max() / counts.sum()), 2)
    result.standard_error = float(np.sqrt(probe.test * (100 - probe.test) / len(truth)))
    return result


def _score_sts(task: Task, matrix: Callable, similarity: Callable) -> Result:
    systems, golds = {}, {}
    for name, split in task.splits.items():
        split = split.sorted()
        left, right = (matrix(side) for side in split.sentences)
        systems[name] = [_number(similarity(u, v), task.name) for u, v in zip(left, right, strict=True)]
        golds[name] = split.labels
    return Result(sts_result(systems, golds))


def _number(value: Any, task: str) -> float:
    try:
        found = float(value)
    except (TypeError, ValueError, RuntimeError):
        found = math.nan
    if not math.isfinite(found):
        raise DataError(f"{task}: similarity returned {str(value)[:60]!r}; it must be a finite number")
    return found


def describe(name: str, result: Mapping[str, Any]) -> str:
    """Return one line with the numbers that papers print for a task.

    Args:
        name: of the task.
        result: its `Result`, or SentEval's own dictionary.
    """
    if "acc" in result:
        f1 = spread = majority = ""
        if "f1" in result:
            f1 = f"  F1 {result['f1']:.2f}"
        if isinstance(result, Result):
            spread, majority = f" +- {result.standard_error:.2f}", f"  majority {result.majority:.2f}"
        return f"{name:<6} acc {result['acc']:.2f}{spread}{f1}  dev {result['devacc']:.2f}{majority}"
    if "mse" in result:
        return f"{name}  Pearson {result['pearson']:.4f}  Spearman {result['spearman']:.4f}  MSE {result['mse']:.4f}"
    if "dev" in result:
        parts = [f"{split} {result[split]['spearman'][0]:.4f}" for split in ("dev", "test")]
        return f"{name}  Spearman {'  '.join(parts)}"
    lines = [
        f"{measure} all {values['all']:.4f} mean {values['mean']:.4f} weighted mean {values['wmean']:.4f}"
        for measure, values in result["all"].items()
    ]
    return f"{name}  " + "; ".join(lines)


def numbers_of(task: str, result: Result) -> dict[str, float]:
    """Return the numbers of a record: names "senteval/TASK/..." and values, accuracies from 0 to 1.

    A similarity that is learned is Pearson and Spearman on test, with "dev/pearson". One by cosine on given splits is
    both on "dev" and on "test". A year of STS is "pearson" and "spearman" over all pairs, and "_mean" and "_wmean" over
    its data sets.
    """
    if "acc" in result:
        found = {"accuracy": result["acc"] / 100, "dev": result["devacc"] / 100}
        if "f1" in result:
            found["f1"] = result["f1"] / 100
    elif "mse" in result:
        found = {measure: result[measure] for measure in MEASURES} | {"dev/pearson": result["devpearson"]}
    elif "dev" in result:
        found = {f"{split}/{measure}": result[split][measure][0] for split in ("dev", "test") for measure in MEASURES}
    else:
        found = {measure: result["all"][measure]["all"] for measure in MEASURES}
        found |= {f"{measure}_{way}": result["all"][measure][way] for measure in MEASURES for way in ("mean", "wmean")}
    return {f"senteval/{task}/{name}": float(value) for name, value in found.items()}
