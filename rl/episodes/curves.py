"""Learning curves of several methods and seeds in one picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from dipole.core.utils.drawing import new_figure
from dipole.core.utils.errors import ConfigError, DataError
from dipole.core.utils.text import counted
from dipole.rl.episodes.history import Evaluation


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
        seeds, spread = f"{counted(len(values), 'seed')}", list(values.T)
        if len(values) == 1:
            seeds, spread = "1 seed", [np.array(each.returns) for each in common[0]]
        (line,) = axes.plot(steps, values.mean(0), label=f"{method} ({seeds})")
        low, high = [each.min() for each in spread], [each.max() for each in spread]
        axes.fill_between(steps, low, high, alpha=0.2, color=line.get_color())
    axes.set(xlabel="environment steps", ylabel="return of an episode", title=title)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path
