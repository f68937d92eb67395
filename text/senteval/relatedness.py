"""Similarity of sentence pairs: SentEval's learned relatedness (SICK-R, STS-B) and the unsupervised STS tasks."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

BATCH = 64
PASSES = 50  # between two looks at the development set
PATIENCE = 3
MAX_PASSES = 1000
SMALLEST = 1e-30  # products of norms below it have lost digits in single precision


def soft_targets(scores: Sequence[float], classes: int = 5) -> np.ndarray:
    """Spread each score over the two whole grades around it (Tai et al. 2015, Sec. 4.2): (N,) in [1, K] to (N, K)."""
    y = np.asarray(scores, dtype=np.float64)
    low = np.floor(y)
    out = np.zeros((len(y), classes), dtype=np.float32)
    for grade in range(1, classes + 1):
        out[:, grade - 1] = np.where(low == grade, low - y + 1, np.where(low + 1 == grade, y - low, 0))
    return out


class Correlation(NamedTuple):
    """A coefficient and its p-value, under the names of SciPy's results. It is a tuple, too."""

    correlation: float
    pvalue: float

    @property
    def statistic(self) -> float:
        """Return the coefficient."""
        return self.correlation


def correlation(function: Callable, left: ArrayLike, right: ArrayLike) -> Correlation:
    """Return coefficient and p-value. They are (0, 1) if one side is constant."""
    x, y = np.asarray(left, dtype=np.float64), np.asarray(right, dtype=np.float64)
    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return Correlation(0.0, 1.0)
    result = function(x, y)
    return Correlation(float(result[0]), float(result[1]))


def fit_relatedness(
    features: Mapping[str, np.ndarray], scores: Mapping[str, Sequence[float]], seed: int
) -> tuple[float, np.ndarray]:
    """Train SentEval's softmax regression on |u-v|, u*v and return (best dev Pearson, test predictions).

    Squared error against `soft_targets`, Adam at its defaults, batches of 64. After every 50 passes the model is saved
    if the dev Pearson rose, and the fourth look without a rise ends the training (SentEval, tools/relatedness.py).
    Keys are "train", "dev" and "test", features (N, 2d), scores from 0 to 5.
    """
    from scipy.stats import pearsonr

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
        found = correlation(pearsonr, predict(x["dev"]), scores["dev"])[0]
        if found > best:
            best, kept = found, {name: value.clone() for name, value in model.state_dict().items()}
        else:
            if failures >= PATIENCE:
                break
            failures += 1
    model.load_state_dict(kept)
    return best, predict(x["test"])


def relatedness_result(
    features: Mapping[str, np.ndarray], scores: Mapping[str, Sequence[float]], seed: int
) -> dict[str, Any]:
    """SentEval's result of SICK-R and STS-B: Pearson on dev, correlations, squared error and predictions on test."""
    from scipy.stats import pearsonr, spearmanr

    dev, predicted = fit_relatedness(features, scores, seed)
    gold = np.asarray(scores["test"], dtype=np.float64)
    return {
        "devpearson": dev,
        "pearson": correlation(pearsonr, predicted, gold)[0],
        "spearman": correlation(spearmanr, predicted, gold)[0],
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
    """Correlations per data set and over all of them, in SentEval's keys.

    Papers sum up one STS year in three ways: "mean" and "wmean" over the data sets (plain and weighted by their sizes,
    as in SentEval), and "all" (one correlation of all pairs of all data sets, as in SimCSE).
    """
    from scipy.stats import pearsonr, spearmanr

    results: dict[str, Any] = {}
    for name, scores in systems.items():
        results[name] = {
            "pearson": correlation(pearsonr, scores, golds[name]),
            "spearman": correlation(spearmanr, scores, golds[name]),
            "nsamples": len(scores),
        }
    sizes = [results[name]["nsamples"] for name in systems]
    system = np.concatenate([np.asarray(s, dtype=np.float64) for s in systems.values()])
    gold = np.concatenate([np.asarray(golds[name], dtype=np.float64) for name in systems])
    overall = {}
    for measure, function in (("pearson", pearsonr), ("spearman", spearmanr)):
        each = [results[name][measure][0] for name in systems]
        overall[measure] = {
            "mean": float(np.mean(each)),
            "wmean": float(np.average(each, weights=sizes)),
            "all": correlation(function, system, gold)[0],
        }
    results["all"] = overall
    return results
