"""From the embeddings of a task's sentences to its result, in SentEval's keys, and tables with the published rows."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from dipole.core.evaluation.logistic import LARGEST, largest_value
from dipole.core.utils.errors import DataError
from dipole.core.utils.plugins import shipped
from dipole.core.utils.progress import Progress
from dipole.text.encode import halves_normalised
from dipole.text.senteval.protocols import Probe, ProbeSettings, arranged, classify, pair_features
from dipole.text.senteval.tasks import SIX_TASKS, Sentence, Split, Task

MEASURES = ("pearson", "spearman")
PUBLISHED = ("lmcl-table4", "cllr-table2")
EXCHANGED = (
    "SUBJ and MPQA stand as printed in the papers, where they look exchanged: encoders of this kind reach about 92-94 "
    "on SUBJ and 87-90 on MPQA. The column SUBJ* shows what is printed under MPQA, and the reverse."
)
LEARNED = ("pearson", "spearman", "mse", "yhat", "devpearson", "ndev", "ntest")  # keys of a learned similarity
BATCH = 64
PASSES = 50  # between two looks at the development set
PATIENCE = 3
MAX_PASSES = 1000
SMALLEST = 1e-30  # products of norms below it have lost digits in single precision


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

    splits = arranged(task, settings.protocol)
    if task.kind == "sts":
        result = _score_sts(task.name, splits, matrix, params.get("similarity") or cosine)
    else:
        x = {}
        for name, split in splits.items():
            sides = [matrix(side) for side in split.sentences]
            if settings.protocol == "skip-thoughts":
                sides = [halves_normalised(side, int(params.get("halves") or 1)) for side in sides]
            x[name] = pair_features(*sides) if task.pairs else sides[0]
        largest = max(map(largest_value, x.values()))
        if not largest <= LARGEST:
            raise DataError(f"{task.name}: features reach {largest:.3g}, the limit is {LARGEST:.0e}; scale the vectors")
        if task.kind == "relatedness":
            scores = {name: split.labels for name, split in splits.items()}
            result = Result(relatedness_result(x, scores, settings.seed))
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
    result.majority = round(100 * float(np.bincount(truth).max() / len(truth)), 2)
    result.standard_error = float(np.sqrt(probe.test * (100 - probe.test) / len(truth)))
    return result


def _score_sts(task: str, splits: dict[str, Split], matrix: Callable, similarity: Callable) -> Result:
    def number(value: Any) -> float:
        try:
            found = float(value)
        except (TypeError, ValueError, RuntimeError):
            found = math.nan
        if not math.isfinite(found):
            raise DataError(f"{task}: similarity returned {str(value)[:60]!r}; it must be a finite number")
        return found

    systems, golds = {}, {}
    for name, split in splits.items():
        left, right = (matrix(side) for side in split.sentences)
        systems[name] = [number(similarity(u, v)) for u, v in zip(left, right, strict=True)]
        golds[name] = split.labels
    return Result(sts_result(systems, golds))


def describe(name: str, result: Mapping[str, Any]) -> str:
    """Return one line with the numbers that papers print for a task.

    Args:
        name: of the task.
        result: its `Result`, or SentEval's own dictionary.
    """
    if "acc" in result:
        f1 = f"  F1 {result['f1']:.2f}" if "f1" in result else ""
        spread = majority = ""
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
    """Return the numbers of a record, "senteval/TASK/NAME" -> value, accuracies from 0 to 1.

    Learned similarities are on test, with "dev/pearson", those by cosine on "dev" and "test". Of a year of STS
    "pearson" and "spearman" are over all pairs, "_mean" and "_wmean" over its data sets.
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


def soft_targets(scores: Sequence[float], classes: int = 5) -> np.ndarray:
    """Spread each score over the two whole grades around it (Tai et al. 2015, Sec. 4.2): (N,) in [1, K] to (N, K)."""
    distance = np.abs(np.asarray(scores, dtype=np.float64)[:, None] - np.arange(1, classes + 1))
    return np.maximum(0, 1 - distance).astype(np.float32)


class Correlation(NamedTuple):
    """A coefficient and its p-value, under the names of SciPy's results. It is a tuple, too."""

    correlation: float
    pvalue: float

    @property
    def statistic(self) -> float:
        """Return the coefficient."""
        return self.correlation


def correlation(measure: str, left: ArrayLike, right: ArrayLike) -> Correlation:
    """Return coefficient and p-value of a measure in `MEASURES`. They are (0, 1) if one side is constant."""
    from scipy import stats

    x, y = np.asarray(left, dtype=np.float64), np.asarray(right, dtype=np.float64)
    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return Correlation(0.0, 1.0)
    found, pvalue = getattr(stats, f"{measure}r")(x, y)
    return Correlation(float(found), float(pvalue))


def relatedness_result(
    features: Mapping[str, np.ndarray], scores: Mapping[str, Sequence[float]], seed: int
) -> dict[str, Any]:
    """Train SentEval's softmax regression on |u-v|, u*v and return its result of SICK-R and STS-B.

    Squared error against `soft_targets`, Adam at its defaults, batches of 64. After every 50 passes the model is saved
    if the dev Pearson rose, and the fourth look without a rise ends the training (SentEval, tools/relatedness.py).
    Keys are "train", "dev" and "test", features (N, 2d), scores from 0 to 5.
    """
    stream = np.random.RandomState(seed)
    x = {split: torch.as_tensor(value).float() for split, value in features.items()}
    target = torch.as_tensor(soft_targets(scores["train"]))
    grades = np.arange(1, target.shape[1] + 1)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = nn.Sequential(nn.Linear(x["train"].shape[1], target.shape[1]), nn.Softmax(dim=-1))
    optimizer = torch.optim.Adam(model.parameters())

    def predict(rows: Tensor) -> np.ndarray:
        with torch.no_grad():
            return model(rows).numpy() @ grades

    best, kept, failures, passes = -1.0, {}, 0, 0
    while passes <= MAX_PASSES:
        for _ in range(PASSES):
            order = torch.as_tensor(stream.permutation(len(target)))
            for start in range(0, len(order), BATCH):
                rows = order[start : start + BATCH]
                loss = nn.functional.mse_loss(model(x["train"][rows]), target[rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        passes += PASSES
        found = correlation("pearson", predict(x["dev"]), scores["dev"])[0]
        if found > best:
            best, kept = found, {name: value.clone() for name, value in model.state_dict().items()}
        else:
            if failures >= PATIENCE:
                break
            failures += 1
    model.load_state_dict(kept)
    predicted = predict(x["test"])
    gold = np.asarray(scores["test"], dtype=np.float64)
    return {
        "devpearson": best,
        **{measure: correlation(measure, predicted, gold)[0] for measure in MEASURES},
        "mse": float(np.mean((predicted - gold) ** 2)),
        "yhat": predicted.tolist(),
        "ndev": len(scores["dev"]),
        "ntest": len(gold),
    }


def cosine(left: np.ndarray, right: np.ndarray) -> float:
    """Return the cosine of two vectors, and 0 if one is zero (SentEval returns NaN)."""
    with np.errstate(over="ignore", under="ignore"):
        norm = np.linalg.norm(left) * np.linalg.norm(right)
    if not SMALLEST < norm < np.inf:
        left, right = (np.asarray(each, dtype=np.float64) / (np.abs(each).max() or 1) for each in (left, right))
        norm = np.maximum(1, np.linalg.norm(left) * np.linalg.norm(right))  # 1 or more, or 0 of a zero vector
    return float(np.dot(left, right) / norm)


def sts_result(systems: Mapping[str, Sequence[float]], golds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Correlations per data set and over all of them, in SentEval's keys: "mean" and "wmean" over the data sets (plain
    and weighted by their sizes), and "all" of all pairs of all data sets, as in SimCSE.
    """
    results: dict[str, Any] = {}
    for name, scores in systems.items():
        results[name] = {measure: correlation(measure, scores, golds[name]) for measure in MEASURES}
        results[name]["nsamples"] = len(scores)
    sizes = [results[name]["nsamples"] for name in systems]
    system, gold = (np.concatenate([part[name] for name in systems]) for part in (systems, golds))
    overall = {}
    for measure in MEASURES:
        each = [results[name][measure][0] for name in systems]
        overall[measure] = {
            "mean": float(np.mean(each)),
            "wmean": float(np.average(each, weights=sizes)),
            "all": correlation(measure, system, gold)[0],
        }
    results["all"] = overall
    return results


def published_rows(table: str) -> list[tuple[str, dict[str, float | None]]]:
    """Return methods and printed accuracies of a table in `PUBLISHED`, MSRP called MRPC."""
    papers = (json.loads(path.read_text(encoding="utf-8")) for path in shipped("published", "*.json").values())
    rows = next(found["rows"] for paper in papers for found in paper["tables"] if found["id"] == table)
    return [
        (row["method"], {column.replace("MSRP", "MRPC"): cell["mean"] for column, cell in row["cells"].items()})
        for row in rows
    ]


def six_task_table(found: Mapping[str, Result], name: str = "this run") -> str:
    """Ours first (task -> result), then the published rows, accuracies in percent."""
    columns = [*SIX_TASKS, "SUBJ*", "MPQA*"]
    accuracies = {task: found[task]["acc"] for task in SIX_TASKS if task in found}
    accuracies |= {"SUBJ*": accuracies.get("SUBJ"), "MPQA*": accuracies.get("MPQA")}
    errors = {task: result.standard_error for task, result in found.items()}
    lines = [_head(columns), _line(name, columns, accuracies), _line("  standard error", columns, errors)]
    seen = []
    for table in PUBLISHED:
        for method, values in published_rows(table):
            if (method, values) not in seen:
                seen.append((method, values))
                lines.append(_line(method, columns, values | {"SUBJ*": values["MPQA"], "MPQA*": values["SUBJ"]}, table))
    protocols = ", ".join(sorted({result.protocol for result in found.values()})) or "unknown"
    return "\n".join([*lines, "", f"Protocol of our rows: {protocols}; the papers': skip-thoughts.", EXCHANGED])


STS_COLUMNS = {
    **{f"STS{year}": (f"STS{year}", "all") for year in range(12, 17)},
    "STS-B": ("STSBenchmark", "test"),
    "SICK-R": ("SICKRelatedness", "test"),
    "STS-B dev": ("STSBenchmark", "dev"),
}
"""Column -> task and part, in the order of SimCSE's tables. The dev split is for choosing and not part of the mean."""
COSINE = "-cosine"  # a name of two tasks may end so


def sts_table(given: Mapping[str, Any], name: str = "this run") -> str:
    """Spearman's correlation times 100, each column over all its pairs. The mean needs all seven test columns."""
    columns = [*STS_COLUMNS, "mean"]
    found = {task.removesuffix(COSINE): result for task, result in given.items()}
    values = {
        column: 100 * (found[task]["all"]["spearman"]["all"] if part == "all" else found[task][part]["spearman"][0])
        for column, (task, part) in STS_COLUMNS.items()
        if task in found
    }
    if all(column in values for column in columns[:7]):
        values["mean"] = sum(values[column] for column in columns[:7]) / 7
    return "\n".join([_head(columns, 11), _line(name, columns, values, width=11, digits=2)])


def written_tables(found: Mapping[str, Result]) -> dict[str, str]:
    """File name -> table of what one encoder reached, for its run's folder."""
    tables = {}
    names = {task.removesuffix(COSINE) for task in found}
    sts = any(task in names for task, _ in STS_COLUMNS.values())
    if not sts or any(task in found for task in SIX_TASKS):
        tables["senteval.txt"] = six_task_table(found)
    if sts:
        tables["sts.txt"] = sts_table(found)
    return tables


def _head(columns: list[str], width: int = 8) -> str:
    return f"{'':<28}" + "".join(column.rjust(width) for column in columns)


def _line(
    name: str, columns: list[str], values: Mapping[str, Any], source: str = "", width: int = 8, digits: int = 1
) -> str:
    shown = {column: f"{value:.{digits}f}" for column, value in values.items() if value is not None}
    cells = "".join(shown.get(column, "-").rjust(width) for column in columns)
    return f"{name:<28}{cells}  {source}".rstrip()
