"""Heads of several layers: projectors, expanders, predictors."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from torch import nn

Norm = Literal["none", "hidden", "all"]
"""Behind which layers batch norm stands: none, all but the last, or all."""


def mlp(widths: Sequence[int], norm: Norm = "none") -> nn.Sequential:
    """Linear layers from width to width with ReLU between them.

    A layer before batch norm has no bias, and batch norm behind the last layer no scale and shift (SimSiam, MoCo v3).
    """
    layers: list[nn.Module] = []
    last = len(widths) - 2
    for number, (inputs, outputs) in enumerate(pairwise(widths)):
        normed = norm == "all" or (norm == "hidden" and number < last)
        layers.append(nn.Linear(inputs, outputs, bias=not normed))
        if normed:
            layers.append(nn.BatchNorm1d(outputs, affine=number < last))
        if number < last:
            layers.append(nn.ReLU(inplace=True))
    return nn.Sequential(*layers)
