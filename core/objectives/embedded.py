"""Rows that belong together, and how they are paired: what a domain hands to the core."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from dipole.core.objectives.pairs import Pairs

Relation = Callable[[dict[str, Tensor]], "Pairs | tuple[Pairs, ...]"]


@dataclass(frozen=True)
class Embedded:
    """What an encoder made of one rank's batch, before anybody is paired with anybody.

    Under several ranks the core gathers every matrix, with gradient, and pairs the global rows: what is excluded, who
    is a neighbour and which blocks are negatives is decided once, on the same data as in one process.

    Args:
        rows: named tensors of this rank with the same first dimension, its instances in the order of the batch: views,
            queries and keys, f and g, blocks (n, b, d); labels, documents and indices among them. Integer matrices are
            lists of indices that -1 pads; what is None is left out.
        relate: makes `Pairs` of the global rows, or several whose losses are averaged. It is pure and knows no rank;
            what every rank holds alike (a queue, a memory bank) it takes from its closure.

    Raises:
        PairsError: from the objective, as nothing is looked at before: a row is no tensor, rows differ in number, or
            `relate` asks for one that is not there.
    """

    rows: Mapping[str, Tensor | None]
    relate: Relation
