"""Evaluations in the order they were made: their file, the papers' scores, intervals over seeds, and curves."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dipole.core.evaluation.intervals import as_sample, bootstrap_interval, interquartile_mean
from dipole.core.utils.errors import ConfigError, DataError
from dipole.core.utils.extras import new_figure
from dipole.core.utils.text import counted
from dipole.rl.arguments import check_integers

# The papers' scores: the return after this many environment steps.
SCORES = {"100k": 100_000, "500k": 500_000}


@dataclass(frozen=True)
class Evaluation:
    """Returns of the episodes of one evaluation, and when it was made.

    Args:
        environment_steps: taken in training so far.
        agent_steps: likewise, a repeated action counted once.
        returns: of the episodes.
        seconds: that it took.
    """

    environment_steps: int
    agent_steps: int
    returns: tuple[float, ...]
    seconds: float = 0.0

    @property
    def mean(self) -> float:
        """Mean return of its episodes."""
        return float(np.mean(self.returns))


def read_evaluations(path: str | Path) -> list[Evaluation]:
    """Return the evaluations in a file.

    Args:
        path: of an evaluations.jsonl.

    Raises:
        DataError: it is missing or damaged.
    """
    try:
        lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
        return [Evaluation(**{**line, "returns": tuple(line["returns"])}) for line in lines]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path} holds no evaluations: {error}") from error


def score_at(history: Sequence[Evaluation], environment_steps: int) -> float | None:
    """Mean return of the first evaluation at or after a number of environment steps, or None if training was shorter.

    Args:
        history: evaluations of one run.
        environment_steps: >= 0.
    """
    later = [each for each in history if each.environment_steps >= environment_steps]
    return min(later, key=lambda each: each.environment_steps).mean if later else None


def scores(history: Sequence[Evaluation]) -> dict[str, float]:
    """Return the papers' scores that a run has reached, by "100k" and "500k".

    Args:
        history: evaluations of one run.
    """
    found = {name: score_at(history, steps) for name, steps in SCORES.items()}
    return {name: value for name, value in found.items() if value is not None}


def summary(returns: Sequence[float]) -> dict[str, float]:
    """Return mean, standard deviation, interquartile mean and range of returns."""
    found = {"mean": float(np.mean(returns)), "std": float(np.std(returns)), "iqm": interquartile_mean(returns)}
    return {**found, "min": min(returns), "max": max(returns)}


@dataclass(frozen=True)
class Aggregate:
    """Scores over seeds.

    Args:
        n: seeds.
        mean: of the scores.
        iqm: their interquartile mean.
        low: lower end of its bootstrap interval, or nan for one seed.
        high: upper end.
    """

    n: int
    mean: float
    iqm: float
    low: float
    high: float


def aggregate(values: Sequence[float], confidence: float = 0.95, draws: int = 10_000, seed: int = 0) -> Aggregate:
    """Return mean, interquartile mean and percentile bootstrap interval over seeds (Agarwal et al. 2021).

    Args:
        values: one score for each seed.
        confidence: of the interval, in (0, 1).
        draws: bootstrap samples, >= 1.
        seed: of the bootstrap.

    Raises:
        DataError: there are no scores, or one is not finite.
        ConfigError: `confidence` or `draws` lies outside its range.
    """
    sample = as_sample(values)
    check_integers(draws=draws)
    low, high = bootstrap_interval(sample, confidence, draws, seed)
    return Aggregate(len(sample), float(sample.mean()), interquartile_mean(sample), low, high)


def plot_curves(runs: Mapping[str, Sequence[Sequence[Evaluation]]], path: str | Path, title: str = "") -> Path:
    """Draw return over environment steps, one line for each method: mean over seeds, and their range.

    Of a method with one seed the range is that of the episodes.

    Args:
        runs: method -> the history of each seed.
        path: .png, .svg or .pdf.
        title: above the picture.

    Returns:
        The file.

    Raises:
        ConfigError: for another suffix, or without matplotlib.
        DataError: if there is nothing to draw: no method, or one whose seeds have no evaluation in common.
    """
    path = Path(path)
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"curves are drawn as .png, .svg or .pdf, not {path.suffix or path.name!r}.")
    if not runs:
        raise DataError("there are no runs to draw.")
    figure = new_figure(6, 4, "rl")
    axes = figure.subplots()
    for method, histories in runs.items():
        seen = [{each.environment_steps for each in history} for history in histories]
        steps = sorted(set.intersection(*seen)) if seen else []
        if not steps:
            raise DataError(
                f"the seeds of {method!r} have no evaluation at the same environment steps: nothing to draw."
            )
        common = [[each for each in history if each.environment_steps in steps] for history in histories]
        values = np.array([[each.mean for each in history] for history in common])
        spread = list(values.T)
        if len(values) == 1:
            spread = [np.array(each.returns) for each in common[0]]
        (line,) = axes.plot(steps, values.mean(0), label=f"{method} ({counted(len(values), 'seed')})")
        low, high = [each.min() for each in spread], [each.max() for each in spread]
        axes.fill_between(steps, low, high, alpha=0.2, color=line.get_color())
    axes.set(xlabel="environment steps", ylabel="return of an episode", title=title)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path
