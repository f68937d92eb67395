"""Pictures of the site: typeset formulas, and the weight that an objective's gradient gives a negative."""

from __future__ import annotations

import io
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
    """A figure as the bytes of an SVG file, the same each time."""
    written = io.BytesIO()
    figure.savefig(
        written, format="svg", bbox_inches="tight", pad_inches=0.05, transparent=True, metadata={"Date": None}
    )
    return written.getvalue()


def formula(lines: Sequence[str]) -> bytes:
    """Lines of TeX, below each other."""
    figure = Figure(figsize=(0.1, 0.1))
    for number, line in enumerate(lines):
        figure.text(0, -6.5 * number, f"${line}$", fontsize=15, color="#555")
    return svg(figure)


def negative_weights(text: str) -> tuple[Tensor, Tensor]:
    """Cosines of negatives, (81,), and |d loss / d s| of each: how hard the loss moves it.

    One anchor, a positive at cosine 0.8, and negatives at cosines from -1 to 1, all of length 1.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        built = objective(text, dim=WIDTH)
    cosines = torch.linspace(-0.999, 0.999, NEGATIVES)
    directions = torch.eye(WIDTH)[1:]  # each negative leaves the anchor in a direction of its own
    anchor = torch.eye(WIDTH)[0]
    positive = 0.8 * anchor + 0.6 * directions[NEGATIVES]
    negatives = cosines.unsqueeze(1) * anchor + (1 - cosines.square()).sqrt().unsqueeze(1) * directions[:NEGATIVES]
    negatives.requires_grad_()
    pairs = Pairs.from_columns(anchor.unsqueeze(0), positive.unsqueeze(0), [row.unsqueeze(0) for row in negatives])
    (gradient,) = torch.autograd.grad(built(pairs).loss, negatives)
    # Along the sphere s grows in the direction a - s c, whose squared length is 1 - s^2.
    along = anchor - cosines.unsqueeze(1) * negatives.detach()
    return cosines, ((gradient * along).sum(1) / along.square().sum(1)).abs()


def spelled(name: str, option: str, value: Any, fixed: str = "") -> str:
    """An objective with one option set, as text."""
    return f"{name}({', '.join(filter(None, (f'{option}={value}', fixed)))})"


def weight_picture(name: str, option: str, values: Sequence[Any], fixed: str = "") -> bytes:
    """Weights over similarity, a line for each value of the option."""
    figure = Figure(figsize=(6, 3))
    axes = figure.add_subplot()
    for number, value in enumerate(values):
        cosines, weights = negative_weights(spelled(name, option, value, fixed))
        axes.plot(
            cosines, weights, label=f"{option} = {value}", color=matplotlib.colormaps["viridis"](number / len(values))
        )
    axes.set_xlabel("cosine of a negative to the anchor (the positive's is 0.8)")
    axes.set_ylabel("weight of its gradient")
    axes.legend(frameon=False)
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
