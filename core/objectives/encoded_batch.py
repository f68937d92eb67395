"""Rows that belong together, and how to pair them. This is what a domain gives to the core."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Relation = Callable[[dict[str, Tensor]], Any]
"""From rows to `Pairs`, or to a tuple of `Pairs` whose losses are averaged."""


@dataclass(frozen=True)
class EncodedBatch:
    """What an encoder made of one rank's batch, before it is paired.

    Under several ranks the core gathers every matrix, with gradient, and pairs the global rows. So what is excluded,
    who is a neighbour and which blocks are negatives is decided once, on the same data as in one process.

    Args:
        rows: named tensors of this rank with the same first dimension, its instances in the order of the batch: views,
            queries and keys, f and g, blocks (n, b, d), and labels, documents and indices. Integer matrices are lists
            of indices, padded with -1. None is left out.
        relate: makes `Pairs` of the global rows, or several whose losses are averaged. It is a pure function and knows
            no rank. What every rank holds alike (a queue, a memory bank) comes from its closure.

    Raises:
        PairsError: raised by the objective: a row is no tensor, rows differ in number, or `relate` asks for a missing
            one.
    """

    rows: Mapping[str, Tensor | None]
    relate: Relation
