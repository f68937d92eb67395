"""Projection and prediction heads with the layers that the papers name."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

from torch import nn

from dipole.core.objectives.spec import check_whole
from dipole.core.utils.errors import ConfigError, nearest
from dipole.vision.encoders.base import Norm, mlp

__all__ = ["prediction_head", "projection_head"]


class HeadLayers(NamedTuple):
    """The layers of a head. hidden and dim: None is the width of its input."""

    layers: int
    norm: Norm
    hidden: int | None
    dim: int | None


PROJECTION = {
    **dict.fromkeys(("simclr", "moco", "supcon"), HeadLayers(2, "none", None, 128)),
    "swav": HeadLayers(2, "hidden", 2048, 128),
    "byol": HeadLayers(2, "hidden", 4096, 256),
    "simsiam": HeadLayers(3, "all", 2048, 2048),
    "mocov3": HeadLayers(3, "all", 4096, 256),
    "nnclr": HeadLayers(3, "all", 2048, 256),
    "cmc": HeadLayers(1, "none", None, 128),
    "clip": HeadLayers(1, "none", None, 512),
}
PREDICTION = {
    "byol": HeadLayers(2, "hidden", 4096, None),
    "simsiam": HeadLayers(2, "hidden", 512, None),
    "mocov3": HeadLayers(2, "all", 4096, None),
    "nnclr": HeadLayers(2, "hidden", 4096, None),
}

Projection = Literal["simclr", "moco", "supcon", "swav", "byol", "simsiam", "mocov3", "nnclr", "cmc", "clip"]
Prediction = Literal["byol", "simsiam", "mocov3", "nnclr"]


def projection_head(name: Projection, width: int, hidden: int | None = None, dim: int | None = None) -> nn.Sequential:
    """Return the layers between a backbone and the objective, from features (n, width) to embeddings (n, dim).

        >>> projection_head("simclr", 512, 512, 128)
        Sequential(
          (0): Linear(in_features=512, out_features=512, bias=True)
          (1): ReLU(inplace=True)
          (2): Linear(in_features=512, out_features=128, bias=True)
        )

    | name | linear layers | batch norm | hidden | dim |
    |---|---|---|---|---|
    | `simclr`, `moco`, `supcon` (Chen et al. 2020, Sec. 2.1) | 2 | none | width | 128 |
    | `swav` (Caron et al. 2020, code) | 2 | after the hidden layer | 2048 | 128 |
    | `byol` (Grill et al. 2020, Sec. 3.3) | 2 | after the hidden layer | 4096 | 256 |
    | `simsiam` (Chen & He 2021, Sec. 3) | 3 | after each | 2048 | 2048 |
    | `mocov3` (Chen, Xie & He 2021, Sec. 4) | 3 | after each | 4096 | 256 |
    | `nnclr` (Dwibedi et al. 2021, Sec. 4.1) | 3 | after each | 2048 | 256 |
    | `cmc`, `clip` | 1 | none | | 128, 512 |

    Args:
        name: of the paper.
        width: of the backbone's features, >= 1.
        hidden: units of the hidden layers, >= 1. None is the paper's number.
        dim: width of the embedding, >= 1. None is the paper's number.

    Raises:
        ConfigError: no paper has this name.
        OptionError: a width is no integer >= 1.
    """
    return _head("projection_head", PROJECTION, name, width, hidden, dim)


def prediction_head(name: Prediction, dim: int, hidden: int | None = None) -> nn.Sequential:
    """Return the predictor after the projection head, from embeddings (n, dim) to (n, dim).

        >>> predictor = prediction_head("byol", 256, 1024)
        >>> [type(layer).__name__ for layer in predictor]
        ['Linear', 'BatchNorm1d', 'ReLU', 'Linear']

    Args:
        name: of the paper. "mocov3" has batch norm after its last layer as well, the others only after the hidden one.
        dim: width of the embedding, >= 1.
        hidden: units of the hidden layer, >= 1. None is the paper's number: 512 for "simsiam", else 4096.

    Raises:
        ConfigError: no paper with a predictor has this name.
        OptionError: a width is no integer >= 1.
    """
    return _head("prediction_head", PREDICTION, name, dim, hidden, None)


def _head(
    function: str, layouts: Mapping[str, HeadLayers], name: str, width: int, hidden: int | None, dim: int | None
) -> nn.Sequential:
    if name not in layouts:
        raise ConfigError(f"{function}: no paper {name!r}.{nearest(str(name), layouts)} Allowed: {', '.join(layouts)}.")
    layout = layouts[name]
    choices = (hidden, layout.hidden, width), (dim, layout.dim, width)
    units, last = (next(each for each in widths if each is not None) for widths in choices)
    for what, given in (("width", width), ("hidden", units), ("dim", last)):
        check_whole(what, given)
    return mlp([width, *[units] * (layout.layers - 1), last], layout.norm)
