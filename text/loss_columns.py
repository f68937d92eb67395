"""Pair the columns of a data set: (anchor, positive, negative_1, ...), or one column and labels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from dipole.core.objectives.encoded_batch import EncodedBatch
from dipole.core.objectives.pairs import Pairs
from dipole.core.utils.errors import PairsError


def related_columns(
    embeddings: Sequence[Tensor], labels: Tensor | None, directions: Sequence[str] = ("query_to_doc",)
) -> EncodedBatch:
    """Pair the columns of a batch.

    Args:
        embeddings: of each column, (B, d).
        labels: (B,) class numbers. Floating-point labels are ignored if there are two columns or more.
        directions: as in `ContrastiveLoss`.

    Raises:
        PairsError: a single column without classes, columns of different lengths or widths.
    """
    batch = len(embeddings[0])
    classes = labels if labels is not None and labels.shape == (batch,) and not labels.is_floating_point() else None
    if len({each.shape for each in embeddings}) != 1:
        raise PairsError(
            f"columns must be alike, (B, d) each, got {', '.join(str(tuple(e.shape)) for e in embeddings)}."
        )
    if len(embeddings) == 1 and classes is None:
        raise PairsError(
            "one column of text and no labels: an objective needs (anchor, positive), (anchor, positive, negative_1, "
            "...), or one column and a column 'label' of class numbers. For two dropout masks of each sentence give "
            "its column twice."
        )
    rows = {f"column{number}": each for number, each in enumerate(embeddings)} | {"labels": classes}
    if len(embeddings) == 1:
        return EncodedBatch(rows, _of_classes)
    return EncodedBatch(rows, partial(_of_columns, count=len(embeddings), directions=frozenset(directions)))


def _of_classes(rows: dict[str, Tensor]) -> Pairs:
    return Pairs.from_labels(rows["column0"], rows["labels"])


def _of_columns(rows: dict[str, Tensor], count: int, directions: frozenset[str]) -> Pairs | tuple[Pairs, ...]:
    anchor, positive = rows["column0"], rows["column1"]
    hard = [rows[f"column{number}"] for number in range(2, count)]
    classes = rows.get("labels")
    pairs = Pairs.from_columns(anchor, positive, hard, classes)
    if "query_to_query" in directions:
        pairs = pairs.with_intra_batch()
    if "doc_to_query" in directions:
        return pairs, Pairs.from_columns(positive, anchor, labels=classes)
    return pairs
