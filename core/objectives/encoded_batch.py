"""The encoded rows of a batch and the function that pairs them. Domains pass this to the core."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Relation = Callable[[dict[str, Tensor]], Any]
"""A function from rows to `Pairs`, or to a tuple of `Pairs` whose losses are averaged."""


@dataclass(frozen=True)
class EncodedBatch:
    """The encoded rows of one rank's batch, before pairing.

    With several ranks the core gathers every matrix, with gradient, and pairs the global rows. The pairs are therefore
    the same as in one process.

    Args:
        rows: named tensors of this rank with the same first dimension, in the order of the batch: views, queries and
            keys, f and g, blocks (n, b, d), and labels, documents and indices. Integer matrices are lists of indices,
            padded with -1. Entries that are None are ignored.
        relate: makes `Pairs` from the global rows, or several `Pairs` whose losses are averaged. It must be a pure
            function that does not depend on the rank. Its closure provides data that is the same on every rank (a
            queue, a memory bank).
        features: names of the rows that are the encoder's features of each view, (B, H) or (B, n, H), if the embeddings
            are those of a head behind it. Terms that act on the encoder (`Objective.on_features`) read them.

    Raises:
        PairsError: from the objective. A row is not a tensor, rows differ in number, or `relate` asks for a missing
            row.

    Example:
        >>> rows = {"first": torch.randn(8, 4), "second": torch.randn(8, 4)}
        >>> batch = dipole.EncodedBatch(rows, lambda all: dipole.Pairs.from_views([all["first"], all["second"]]))
        >>> dipole.objective("infonce")(batch).loss.shape
        torch.Size([])
    """

    rows: Mapping[str, Tensor | None]
    relate: Relation
    features: tuple[str, ...] = ()
