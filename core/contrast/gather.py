"""Gather first, pair afterwards: the pairs of all ranks' rows, and which of their anchors are this rank's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dipole.core.contrast.embedded import Embedded
from dipole.core.contrast.pairs import Pairs
from dipole.core.ground.distributed import all_max, gather_rows, rank, row_counts, world_size
from dipole.core.ground.errors import PairsError

Input = Embedded | Pairs | Sequence[Pairs]


@dataclass(frozen=True)
class Related:
    """Pairs of the global batch, and the rows of it that are this rank's.

    Args:
        pairs: one or several, each of all ranks' rows.
        own: this rank's rows among `total`; None in a single process.
        total: rows of the global batch.
    """

    pairs: tuple[Pairs, ...]
    own: slice | None = None
    total: int = 0

    def local(self, pairs: Pairs) -> Pairs:
        """The same pairs with this rank's anchors alone."""
        if self.own is None:
            return pairs
        if len(pairs.anchors) % self.total:
            raise PairsError(
                f"{len(pairs.anchors)} anchors were made of a batch of {self.total} rows over all ranks; a term that "
                "leaves anchors out must keep their rows and pad their positives with -1."
            )
        return pairs.narrow(self.own, self.total)

    @property
    def local_pairs(self) -> tuple[Pairs, ...]:
        """All of them, with this rank's anchors alone."""
        return tuple(map(self.local, self.pairs))


def relate(embedded: Input | Related) -> Related:
    """Gather the rows of all ranks and pair them; in a single process just pair them.

    Pairs that a constructor made of this rank's rows are made again of all ranks' rows. Of pairs whose indices are
    somebody's own, anchors and candidates are gathered and the indices moved.

    Raises:
        PairsError: if the rows do not fit together.
    """
    if isinstance(embedded, Related):
        return embedded
    if isinstance(embedded, Sequence):
        return _joined([relate(each) for each in _several(embedded)])
    if world_size() == 1:
        return Related(_several(embedded.relate(embedded.rows) if isinstance(embedded, Embedded) else embedded))
    if isinstance(embedded, Pairs):
        embedded = embedded.source or _by_hand(embedded)
    rows = embedded.rows
    if len({len(row) for row in rows.values()}) != 1:
        found = ", ".join(f"{name} {len(row)}" for name, row in rows.items()) or "none"
        raise PairsError(f"Embedded.rows must have the same number of rows on a rank, got {found}.")
    sizes = row_counts(next(iter(rows.values())))
    start = sum(sizes[: rank()])
    gathered = {name: gather_rows(_equally_wide(row), sizes) for name, row in rows.items()}
    return Related(_several(embedded.relate(gathered)), slice(start, start + sizes[rank()]), sum(sizes))


def _several(pairs: Pairs | Sequence[Pairs]) -> tuple[Pairs, ...]:
    found = (pairs,) if isinstance(pairs, Pairs) else tuple(pairs) if isinstance(pairs, Sequence) else ()
    if not found or not all(isinstance(each, Pairs) for each in found):
        raise PairsError(f"an objective takes Embedded, Pairs, a tuple of Pairs, or views; got {type(pairs).__name__}.")
    return found


def _joined(parts: list[Related]) -> Related:
    if len({(part.total, part.own and part.own.start) for part in parts}) != 1:
        raise PairsError("a tuple of Pairs under several ranks must be made of batches of one size.")
    return replace(parts[0], pairs=tuple(pairs for part in parts for pairs in part.pairs))


def _equally_wide(row: Tensor) -> Tensor:
    """Lists of indices are as long on every rank, filled up with -1."""
    if row.is_floating_point() or row.ndim != 2:
        return row
    missing = all_max(row.shape[1], row.device) - row.shape[1]
    return torch.cat([row, row.new_full((len(row), missing), -1)], 1) if missing else row


def _by_hand(pairs: Pairs) -> Embedded:
    """Anchors, their lists and the candidates of every rank; all candidates are taken for the rank's own."""
    square = pairs.anchors is pairs.candidates
    sizes = row_counts(pairs.candidates)
    offset = sum(sizes[: rank()])
    candidates = pairs.candidates if square else gather_rows(pairs.candidates, sizes)
    labels = pairs.candidate_labels
    labels = labels if labels is None else gather_rows(labels, sizes)

    def moved(index: Tensor) -> Tensor:
        return torch.where(index < 0, index, index + offset)

    rows = {"anchors": pairs.anchors, "positives": moved(pairs.positives), "dropped": moved(pairs.dropped)}
    if pairs.labels is not None:
        rows["labels"] = pairs.labels

    def relate(rows: dict[str, Tensor]) -> Pairs:
        return Pairs(
            rows["anchors"],
            rows["anchors"] if square else candidates,
            rows["positives"],
            rows["dropped"],
            rows.get("labels"),
            pairs.views,
            candidate_labels=labels,
        )

    return Embedded(rows, relate)
