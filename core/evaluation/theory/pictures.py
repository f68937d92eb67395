"""Pictures of the theorems: measured values and their bounds. The same numbers give the same file."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import torch

from dipole.core.evaluation.theory import arora
from dipole.core.evaluation.theory.latent import Latent
from dipole.core.utils.errors import ConfigError, OptionError
from dipole.core.utils.extras import new_figure
from dipole.core.utils.files import disk_refusing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dipole.core.evaluation.theory.report import Inequality, Report

MEASURED, BOUND, LOOSER, NEUTRAL = "#1f5a94", "#d1603d", "#e3a48c", "#777777"
BELOW: dict[str, Any] = {"fontsize": 7, "frameon": False, "loc": "upper center", "bbox_to_anchor": (0.5, -0.18)}
FORMATS = (".svg", ".png", ".pdf")
RADII = [0.25 * step for step in range(2, 17)]  # r of Figure 1


def check_name(path: Path) -> None:
    """Raise OptionError if the suffix is no format of pictures."""
    if path.suffix not in FORMATS:
        raise OptionError(f"a picture ends in {', '.join(FORMATS)}, got {path.name!r}.")


def _save(figure: Figure, path: Path, option: str) -> None:
    check_name(path)
    import matplotlib as mpl

    # No date and no random ids: the same numbers give the same bytes.
    settings: Any = {"svg.hashsalt": "dipole", "svg.fonttype": "none"}
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    metadata: dict[str, Any] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix, {})
    with disk_refusing(f"cannot write the picture {path}", ConfigError, option), mpl.rc_context(settings):
        figure.savefig(path, dpi=110, metadata=metadata)


def mean_is_bad(r: float) -> Latent:
    """Figure 1 (a): one point per class, (1, r) and (-1, 2r); s(f1) = 0, and L_un^!= is large.

    In (a) and (b) rho is uniform and F = {f0, f1}, with f0(x) = 0 for all points and f1 as here. Some W separates the
    classes under f1 without loss, and no W does under f0. Still L_un(f0) = 1, and L_un(f1) grows with r^2, so the loss
    selects f0. We chose the coordinates to have every property of the paper's caption and Section 5.1. Here the first
    coordinate separates the classes. The inner product sees the second: the mean classifier is bad as well.
    """
    return Latent.of(torch.tensor([[1.0, r], [-1.0, 2 * r]]), torch.tensor([0, 1]))


def high_variance(r: float) -> Latent:
    """Figure 1 (b): two points per class, (1, +-r) and (-1, +-r); the mean classifier has no loss, but s(f1) ~ r^2."""
    return Latent.of(torch.tensor([[1.0, r], [1.0, -r], [-1.0, r], [-1.0, -r]]), torch.tensor([0, 0, 1, 1]))


def draw_figure_1(path: Path) -> None:
    """Draw Figure 1 of Arora et al.: the points of f1, and the losses of f0 and f1 as r grows."""
    figure = new_figure(8.4, 6.2)
    grid = figure.subplots(2, 2)
    cases = (
        ("(a) the mean is bad: one point per class", mean_is_bad),
        ("(b) high variance: two points per class", high_variance),
    )
    for column, (title, make) in enumerate(cases):
        points, axes = make(2.0), grid[0][column]
        for span, colour, name in zip(points.spans, (MEASURED, BOUND), ("class 1", "class 2"), strict=True):
            x, y = points.features[span].T.tolist()
            axes.scatter(x, y, color=colour, s=60, label=name, zorder=3)
        means = points.means.T.tolist()
        axes.scatter(*means, marker="x", color="black", s=36, label="class means", zorder=4)
        axes.axvline(0, color=NEUTRAL, linestyle=":", label="a W without loss")
        axes.scatter([0], [0], color=NEUTRAL, s=30, marker="s", label="f0 of every point", zorder=2)
        axes.set(title=title, xlabel="first coordinate of f1(x), r = 2", ylabel="second coordinate")
        axes.set_xlim(-1.8, 4.2)  # room for the legend
        axes.margins(y=0.15)
        axes.legend(fontsize=7, frameon=False, loc="center right")
        grown = [make(r) for r in RADII]
        axes = grid[1][column]
        axes.plot(RADII, [arora.unsupervised_loss(each).whole for each in grown], color=BOUND, label="L_un(f1)")
        zero = arora.unsupervised_loss(points.scaled(0.0)).whole
        axes.axhline(zero, color=BOUND, linestyle="--", label="L_un(f0) = L_sup(f0)")
        axes.plot(RADII, [arora.mean_classifier_loss(each) for each in grown], color=MEASURED, label="L_sup^mu(f1)")
        best = [arora.trained_loss(each).loss for each in grown]
        axes.plot(RADII, best, color=MEASURED, linestyle=":", label="L_sup(f1)")
        axes.set(xlabel="r", ylabel="hinge loss", ylim=(-0.3, 8))
        axes.legend(fontsize=7, frameon=False, loc="upper left")
    _save(figure, path, "--figure1")


def draw_report(report: Report, path: Path, title: str = "") -> None:
    """Draw a run: the sides of Arora's inequalities, LMCL's error over delta+, CLLR's gradient over steps."""
    figure = new_figure(12, 4.2)
    figure.suptitle(title, fontsize=10)
    shown = [each for each in report.inequalities if each.theorem.paper.startswith("Arora")]
    numbers: dict[str, Any] = {"lemma_4_3": shown} | report.curves
    panels: tuple[tuple[str, str, Callable[..., None]], ...] = (
        ("lemma_4_3", "Arora et al.: measured (first) and bounds", _sides),
        ("lmcl_theorem_3", "LMCL, Theorem 3", _margins),
        ("cllr_theorem_2", "CLLR, Theorem 2", partial(_gradient, smoothness=report.choices.smoothness)),
    )
    for axes, (key, name, draw) in zip(figure.subplots(1, 3, width_ratios=(1.5, 1, 1)), panels, strict=True):
        axes.set_title(name, fontsize=9)
        if found := numbers.get(key):
            draw(axes, found)
        else:
            why = fill(report.missing.get(key, ""), 34)
            axes.text(0.5, 0.5, why, ha="center", va="center", fontsize=8, color=NEUTRAL, transform=axes.transAxes)
            axes.set(xticks=[], yticks=[])
    _save(figure, path, "--picture")


def _sides(axes: Axes, shown: list[Inequality]) -> None:
    for row, each in enumerate(shown):
        values = [value for _, value in each.sides]
        axes.plot([values[0], values[-1]], [row, row], color=NEUTRAL, linewidth=1, zorder=1)
        # A later side may lie exactly on an earlier one: it is drawn larger, and below it.
        for place, value in enumerate(values):
            measured = place == 0 or (place < len(values) - 1 and "L_s" in each.sides[place][0])
            colour = (BOUND, MEASURED)[measured]
            axes.scatter([value], [row], color=colour, s=18 + 26 * place, zorder=10 - place)
    axes.set_yticks(range(len(shown)), [f"{each.theorem.name}, {each.case}" for each in shown], fontsize=7)
    axes.invert_yaxis()
    axes.set_xscale("symlog", linthresh=1)  # some bounds are hundreds of times what they bound
    axes.set_xlim(left=-0.05)
    axes.set_xlabel("loss; blue is measured, orange bounds it (linear up to 1)")


def _margins(axes: Axes, curve: dict[str, list[float]]) -> None:
    x = curve["delta_pos"]
    axes.plot(x, curve["bound"], color=LOOSER, marker=".", label="4 (..)/lambda + K/C")
    axes.plot(x, curve["middle"], color=BOUND, marker=".", label="(delta- - delta+) R1 + K/C")
    axes.plot(x, curve["error"], color=MEASURED, marker=".", label="similarity error")
    axes.set(xlabel="delta+", yscale="log")
    axes.legend(**BELOW)


def _gradient(axes: Axes, curve: dict[str, list[float]], smoothness: float) -> None:
    axes.loglog(curve["step"], curve["least"], color=MEASURED, label="least ||grad F||^2 so far")
    bound = f"delta sqrt(2 S (F_0 - F*)/T), S = {smoothness:g} (free)"
    axes.loglog(curve["step"], curve["bound"], color=BOUND, label=bound)
    axes.xaxis.set_minor_formatter("")
    axes.set_xlabel("update T")
    axes.legend(**BELOW)
