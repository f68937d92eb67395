"""How the rows of a batch are paired, for each value of `text.pairs`; every function is a relation of `Embedded`."""

from typing import Literal

import torch
from torch import Tensor

from dipole.core.objectives.objective import Composite
from dipole.core.objectives.pairs import Pairs

SelfLogit = Literal["zero", "drop"]


def blocks(rows: dict[str, Tensor], draw: int) -> Pairs:
    """Members of a block (Arora et al. 2019)."""
    return Pairs.from_blocks(rows["x"], anchors="all", labels=rows["labels"], index=rows["index"], draw=draw)


def neighbours(rows: dict[str, Tensor], window: int, self_logit: SelfLogit) -> Pairs:
    """Sentences of a window (Quick Thoughts)."""
    document = rows["document"]
    return Pairs.from_window(rows["f"], rows["g"], document, window, self_logit, labels=document, index=rows["index"])


def views(rows: dict[str, Tensor]) -> Pairs:
    """A sentence finds itself among the others' second passes (SimCSE, Gao et al. 2021, Eq. 4)."""
    return Pairs.cross(rows["first"], rows["second"], labels=rows["document"], index=rows["index"])


def columns(rows: dict[str, Tensor], absent: Tensor | None) -> Pairs:
    """Anchors find their positives among all positives and hard negatives (SimCSE, Eq. 5).

    Args:
        absent: (E,) places c B + b where row b has no text in column c, the positives being column 0.
    """
    dropped = None if absent is None else absent.expand(len(rows["anchor"]), -1)
    return Pairs.from_columns(
        rows["anchor"], rows["positive"], rows.get("negatives"), index=rows["index"], dropped=dropped
    )


def example(
    objective: Composite,
    dim: int,
    kind: Literal["window", "blocks", "views", "columns"],
    count: int,
    size: int,
    window: int,
    self_logit: SelfLogit,
) -> Pairs:
    """Random rows of so many sentences of two documents, paired as a batch.

    Args:
        size: sentences of a block, or negatives of a row.
    """
    rows = {"document": torch.arange(count) * 2 // count, "index": torch.arange(count)}
    if kind == "blocks":
        first = {name: values[::size][: count // size] for name, values in rows.items()}
        return blocks({**first, "x": torch.randn(count // size, size, dim), "labels": first["document"]}, draw=0)
    if kind == "columns":
        rows |= {"anchor": torch.randn(count, dim), "positive": torch.randn(count, dim)}
        return columns(rows | ({"negatives": torch.randn(count, size, dim)} if size else {}), None)
    sides = [torch.randn(count, dim) for _ in range(2)]
    if kind == "views":
        return views({**rows, "first": sides[0], "second": sides[1]})
    return neighbours({**rows, "f": sides[0], "g": sides[1]}, window, self_logit)
