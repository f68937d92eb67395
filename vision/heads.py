"""Projectors and predictors of several linear layers."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from torch import nn

Norm = Literal["none", "hidden", "all"]
"""Layers that batch norm follows: none, all but the last, or all."""


def mlp(widths: Sequence[int], norm: Norm = "none") -> nn.Sequential:
    """Return linear layers from width to width with ReLU between them.

    A layer before batch norm has no bias. Batch norm after the last layer has no scale and shift (SimSiam, MoCo v3).
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
