"""Draw the pictures of the site: typeset formulas, and the gradient of a negative."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

import matplotlib
import torch
from matplotlib.figure import Figure
from torch import Tensor

from dipole import Pairs, objective

matplotlib.rcParams.update({"svg.hashsalt": "dipole", "mathtext.fontset": "cm", "svg.fonttype": "path"})
NEGATIVES, WIDTH = 81, 128


def svg(figure: Figure) -> bytes:
    """Return a figure as a reproducible SVG file."""
    written = io.BytesIO()
    figure.savefig(
        written, format="svg", bbox_inches="tight", pad_inches=0.05, transparent=True, metadata={"Date": None}
    )
    return written.getvalue()


def formula(lines: Sequence[str]) -> bytes:
    """Return lines of TeX as one SVG file."""
    figure = Figure(figsize=(0.1, 0.1))
    for number, line in enumerate(lines):
        figure.text(0, -7.5 * number, f"${line}$", fontsize=17)
    return svg(figure)


def negative_weights(text: str) -> tuple[Tensor, Tensor]:
    """Cosines of negatives, (81,), and d L_0 / d s_0j of each: how hard the loss of an anchor repels it, or attracts.

    One anchor among 82 of a batch, its positive at cosine 0.8, and the others' positives, its negatives, at cosines
    from -1 to 1, all of length 1; every instance is a class of its own.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        built = objective(text, dim=WIDTH).double()
    cosines = torch.linspace(-0.999, 0.999, NEGATIVES, dtype=torch.float64)
    sines = (1 - cosines.square()).sqrt()
    anchor, *directions = torch.eye(WIDTH, dtype=torch.float64)  # each instance leaves the anchor in its own direction
    negatives = cosines.unsqueeze(1) * anchor + sines.unsqueeze(1) * torch.stack(directions[:NEGATIVES])
    queries = torch.cat([anchor.unsqueeze(0), negatives]).requires_grad_()
    keys = torch.cat([(0.8 * anchor + 0.6 * directions[NEGATIVES]).unsqueeze(0), negatives])
    loss = built(Pairs.cross(queries, keys, labels=torch.arange(len(keys)))).loss
    (gradient,) = torch.autograd.grad(loss, queries)
    # Nothing but s_0j moves the anchor in the direction of instance j: by its sine. The loss is a mean over anchors.
    return cosines, len(keys) * gradient[0, 1 : NEGATIVES + 1] / sines


def spelled(name: str, option: str, value: Any, fixed: str = "") -> str:
    """An objective with one option set, as text."""
    return f"{name}({', '.join(filter(None, (f'{option}={value}', fixed)))})"


def weight_picture(name: str, option: str, values: Sequence[Any], fixed: str = "") -> bytes:
    """Weights over similarity, a line for each value of the option; over orders of magnitude on a scale of them."""
    figure = Figure(figsize=(6, 3))
    axes = figure.add_subplot()
    drawn = []
    for number, value in enumerate(values):
        cosines, weights = negative_weights(spelled(name, option, value, fixed))
        if int((weights.abs() > 1e-12).sum()) < 3:  # the nearest negative alone: a point
            cosines, weights = cosines[weights.abs() > 1e-12], weights[weights.abs() > 1e-12]
        colour = matplotlib.colormaps["viridis"](number / len(values))
        axes.plot(cosines, weights, "o" if len(weights) < 3 else "-", label=f"{option} = {value}", color=colour)
        drawn.append(weights)
    joined = torch.cat(drawn)
    if joined.min() > 0 and joined.max() > 20 * joined.min():
        axes.set_yscale("log")
    elif joined.min() < -1e-12:
        axes.axhline(0, color="grey", linewidth=0.6)
        axes.text(-1, 0, " repels above, attracts below", fontsize=7.5, color="grey", va="bottom")
        middle = float(joined[joined.abs() > 1e-12].abs().median())
        if joined.max() > 20 * middle:
            axes.set_yscale("symlog", linthresh=10 ** round(math.log10(middle)))
    axes.set_xlabel("cosine of a negative to the anchor (the positive's is 0.8)")
    axes.set_ylabel("dL / ds of that negative")
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))  # where no curve is
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return svg(figure)


def whole() -> bytes:
    """From text to an objective, to three domains, to one report."""
    figure = Figure(figsize=(11, 3.6))
    axes = figure.add_subplot()
    axes.set_xlim(-1, 91)
    axes.set_ylim(1, 31)
    axes.set_axis_off()
    boxes = {
        "text": (0, 11, 20, 10, '"infonce(temperature=0.5)\n+ 0.1*dp"', "#fff3d6"),
        "objective": (27, 11, 15, 10, "objective\none sweep over\nthe similarities", "#e4ecfb"),
        "vision": (50, 23, 18, 7, "vision\nviews of images", "#e3f4e6"),
        "text domain": (50, 12.5, 18, 7, "text\nneighbouring sentences", "#e3f4e6"),
        "rl": (50, 2, 18, 7, "rl\ncrops of observations", "#e3f4e6"),
        "report": (76, 11, 14, 10, "records,\ntables, verdicts:\none report", "#f7e1e6"),
    }
    for left, bottom, width, height, words, colour in boxes.values():
        axes.add_patch(
            matplotlib.patches.FancyBboxPatch(
                (left, bottom), width, height, boxstyle="round,pad=0.4", facecolor=colour, edgecolor="#667"
            )
        )
        axes.text(left + width / 2, bottom + height / 2, words, ha="center", va="center", fontsize=9.5, color="#223")
    for start, end in (
        ("text", "objective"),
        *(("objective", to) for to in ("vision", "text domain", "rl")),
        *((of, "report") for of in ("vision", "text domain", "rl")),
    ):
        left, bottom, width, height = boxes[start][:4]
        to_left, to_bottom, _, to_height = boxes[end][:4]
        axes.annotate(
            "",
            (to_left - 0.8, to_bottom + to_height / 2),
            (left + width + 0.8, bottom + height / 2),
            arrowprops={"arrowstyle": "->", "color": "#667"},
        )
    return svg(figure)
