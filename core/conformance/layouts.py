"""The batches of the checks: one for each way in which frameworks choose anchors and candidates."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from dipole.core.objectives.pairs import Pairs

WIDTH = 6
CLASSES = 5
Leaves = dict[str, Tensor]


@dataclass(frozen=True)
class Layout:
    """Named leaf tensors and how they become Pairs.

    Args:
        name: for messages.
        shapes: of the leaves.
        build: the Pairs of the leaves.
        of_rows: whether the leaves are rows of a batch, which can be divided among ranks.
        labels: (2B,) class of each row of both views, for losses that take labels.
        scores: (B,) score in [0, 1] of each row of a view, for losses that take scores.
    """

    name: str
    shapes: dict[str, tuple[int, ...]]
    build: Callable[..., Pairs]
    of_rows: bool = True
    labels: Tensor | None = None
    scores: Tensor | None = None

    def fitted(self, dim: int | None = None, classes: int | None = None) -> Self:
        """Return the batch with another width, or with labels below a number of classes.

        Args:
            dim: the width. None keeps it.
            classes: the number of classes. None keeps the labels.
        """
        made = self
        if dim is not None:
            made = replace(made, shapes={name: (*shape[:-1], dim) for name, shape in made.shapes.items()})
        if classes is not None:
            made = replace(made, build=lambda **leaves: _relabelled(self.build(**leaves), classes))
        return made

    @property
    def width(self) -> int:
        """Embedding width."""
        return next(iter(self.shapes.values()))[-1]

    def leaves(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> Leaves:
        """Return standard normal leaves, (...) by name, that require a gradient.

        Args:
            dtype: of all of them.
            seed: of the draw.
        """
        source = torch.Generator().manual_seed(seed)
        return {
            name: torch.randn(shape, generator=source, dtype=torch.float64).to(dtype).requires_grad_()
            for name, shape in self.shapes.items()
        }


def _relabelled(pairs: Pairs, classes: int) -> Pairs:
    labels = {name: getattr(pairs, name) for name in ("labels", "candidate_labels")}
    known: dict[str, Any] = {name: torch.where(y < 0, y, y % classes) for name, y in labels.items() if y is not None}
    return replace(pairs, **known)


def in_order(order: Tensor, width: int = WIDTH, classes: int = CLASSES) -> Layout:
    """Return two views of instances in any order. Neighbours in the first order share a class."""
    shape: tuple[int, ...] = (len(order), width)
    labels = (order // 2) % classes
    scores = (order + 1) * 0.6180339887498949 % 1.0  # distinct, and spread evenly
    shapes = {"a": shape, "b": shape}
    return Layout("views", shapes, lambda a, b: Pairs.from_views([a, b], labels), True, labels.repeat(2), scores)


def long_queue(count: int, width: int) -> Layout:
    """Return four queries with their keys and `count` negatives."""
    return Layout(
        "a long queue",
        {"queries": (4, width), "keys": (4, width), "queue": (count, width)},
        lambda queries, keys, queue: Pairs.cross(queries, keys, queue, labels=torch.tensor([0, 0, 1, 1])),
    )


def _listed(x: Tensor, y: Tensor) -> Pairs:
    """Ragged rows: an anchor without positives, a candidate both positive and ignored, padding in the middle."""
    return Pairs(
        x,
        y,
        positives=torch.tensor([[0, -1, 2], [-1, 1, -1], [-1, -1, -1], [4, 3, 5]]),
        ignored=torch.tensor([[1, -1], [-1, 1], [3, -1], [-1, 6]]),
        labels=torch.tensor([0, 0, 1, 1]),
    )


VIEWS = in_order(torch.arange(5))  # losses loss(a, b) run on this layout
LAYOUTS = (
    VIEWS,
    Layout(
        "four views",
        {"a": (3, WIDTH), "b": (3, WIDTH), "c": (3, WIDTH), "e": (3, WIDTH)},
        lambda a, b, c, e: Pairs.from_views([a, b, c, e], torch.tensor([0, 0, 1])),
    ),
    Layout(
        "view pairs",
        {"a": (3, WIDTH), "b": (3, WIDTH), "c": (3, WIDTH)},
        lambda a, b, c: Pairs.from_views([a, b, c], torch.tensor([0, 0, 1]), negatives="view_pairs"),
    ),
    Layout(
        "queue",
        {"queries": (4, WIDTH), "keys": (4, WIDTH), "queue": (5, WIDTH)},
        lambda queries, keys, queue: Pairs.cross(queries, keys, queue, labels=torch.tensor([0, 0, 1, 1])),
    ),
    Layout(
        "several keys",
        {"queries": (4, WIDTH), "keys": (4, 3, WIDTH)},
        lambda queries, keys: Pairs.cross(queries, keys, intra_batch=True, labels=torch.tensor([0, 0, 1, 1])),
    ),
    Layout(
        "queue alone",
        {"queries": (4, WIDTH), "keys": (4, 2, WIDTH), "queue": (5, WIDTH)},
        lambda queries, keys, queue: Pairs.cross(queries, keys, queue, batch_negatives=False),
    ),
    Layout(
        "bank of keys",
        {"queries": (4, WIDTH), "keys": (4, WIDTH), "bank": (5, WIDTH)},
        lambda queries, keys, bank: Pairs.cross(queries, keys, bank, batch_negatives=False, queue_of="keys"),
    ),
    Layout(
        "crops",
        {"a": (3, WIDTH), "b": (3, WIDTH), "c": (3, WIDTH), "queue": (4, WIDTH)},
        lambda a, b, c, queue: Pairs.from_crops([a, b], [c], queue),
    ),
    Layout(
        "window",
        {"f": (7, WIDTH), "g": (7, WIDTH)},
        lambda f, g: Pairs.from_window(f, g, torch.tensor([0, 0, 0, 1, 2, 2, 2]), window=2),
    ),
    Layout(
        "window with zero logit",
        {"f": (5, WIDTH), "g": (5, WIDTH)},
        lambda f, g: Pairs.from_window(f, g, torch.tensor([0, 0, 0, 1, 1]), self_logit="zero"),
    ),
    Layout("blocks", {"x": (3, 3, WIDTH)}, lambda x: Pairs.from_blocks(x, anchors="all")),
    Layout("first of a block", {"x": (4, 3, WIDTH)}, lambda x: Pairs.from_blocks(x)),
    Layout("block means", {"x": (4, 3, WIDTH)}, lambda x: Pairs.from_blocks(x, candidates="means")),
    Layout("listed", {"x": (4, WIDTH), "y": (8, WIDTH)}, _listed, of_rows=False),
)


def changed(leaves: Leaves, function: Callable[[Tensor], Tensor]) -> Leaves:
    """Return new leaves by a function of each."""
    return {name: function(leaf.detach()).requires_grad_() for name, leaf in leaves.items()}


def scaled(leaves: Leaves, times: float) -> Leaves:
    """Return rows of another length."""
    return changed(leaves, lambda x: x * times)


def hard_pairs(count: int, width: int, dtype: torch.dtype) -> Leaves:
    """Return far positives and near negatives of norms around 3. At a low temperature their exponentials overflow."""
    source = torch.Generator().manual_seed(1)
    noise = torch.randn((2, count, width), generator=source, dtype=torch.float64) * 0.3 / width**0.5
    first, second = torch.zeros(2, width, dtype=torch.float64)
    first[0], second[0], second[1] = 1.0, -0.5, 0.75**0.5
    a, b = 3 * (first + noise[0]), 3 * (second + noise[1])
    return {"a": a.to(dtype).requires_grad_(), "b": b.to(dtype).requires_grad_()}
