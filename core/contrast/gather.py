"""Gather first, pair afterwards: the pairs of all ranks' rows, and which of their anchors are this rank's."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dipole.core.contrast.checks import shape_of
from dipole.core.contrast.embedded import Embedded
from dipole.core.contrast.pairs import Pairs
from dipole.core.ground.distributed import all_numbers, gather_rows, rank, world_size
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
                f"{len(pairs.anchors)} anchors were made of a batch of {self.total} rows over all ranks; a "
                "relation or a term that leaves anchors out must keep their rows and pad their positives with -1."
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
        PairsError: if the rows do not fit together, on every rank, or on several ranks a constructor's pairs were
            changed afterwards.
    """
    if isinstance(embedded, Related):
        return embedded
    if isinstance(embedded, Sequence):
        return _joined([relate(each) for each in _several(embedded)])
    if world_size() == 1:
        return Related(_several(embedded.relate(_rows(embedded)) if isinstance(embedded, Embedded) else embedded))
    if isinstance(embedded, Pairs):
        embedded = embedded.source or _by_hand(embedded)
    rows, sizes = _agreed(embedded)
    start = sum(sizes[: rank()])
    gathered = {name: gather_rows(_equally_wide(row), sizes) for name, row in rows.items()}
    return Related(_several(embedded.relate(gathered)), slice(start, start + sizes[rank()]), sum(sizes))


def _rows(embedded: Embedded) -> dict[str, Tensor]:
    """What it holds, without what is None."""
    rows = {name: row for name, row in embedded.rows.items() if row is not None}
    found = ", ".join(f"{name} {shape_of(row)}" for name, row in rows.items()) or "none"
    if not rows or not all(isinstance(row, Tensor) and row.ndim for row in rows.values()):
        raise PairsError(f"Embedded.rows must be tensors that have a row for each instance, got {found}.")
    if len({len(row) for row in rows.values()}) != 1:
        raise PairsError(f"Embedded.rows must have the same number of rows on a rank, got {found}.")
    return rows


def _agreed(embedded: Embedded) -> tuple[dict[str, Tensor], list[int]]:
    """Rows of this rank, and how many each rank has; a fault on one rank is an error on all, and nobody waits."""
    fault: PairsError | None = None
    try:
        rows = _rows(embedded)
    except PairsError as error:
        fault, rows = error, {name: row for name, row in embedded.rows.items() if isinstance(row, Tensor)}
        if not rows:
            raise
    like = next(iter(rows.values()))
    kinds = {name: f"{row.dtype} {'list' if _is_list(row) else tuple(row.shape[1:])}" for name, row in rows.items()}
    mine = [-1 if fault else len(like), zlib.crc32(repr(kinds).encode())]
    sizes, kind_of = zip(*all_numbers(mine, like.device), strict=True)
    if fault:
        raise fault
    if min(sizes) < 1:
        wrong = [number for number, size in enumerate(sizes) if size < 1]
        raise PairsError(f"the rows of rank {wrong[0]} do not fit together, or it has none; every rank needs a row.")
    if len(set(kind_of)) > 1:
        raise PairsError(
            "every rank must give the same rows, in one order, of one dtype and width, but they differ; "
            f"rank {rank()} has {', '.join(f'{name} {kind}' for name, kind in kinds.items())}."
        )
    return rows, list(sizes)


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
    if not _is_list(row):
        return row
    missing = max(width for (width,) in all_numbers([row.shape[1]], row.device)) - row.shape[1]
    return torch.cat([row, row.new_full((len(row), missing), -1)], 1) if missing else row


def _is_list(row: Tensor) -> bool:
    return row.ndim == 2 and not row.is_floating_point()


def _by_hand(pairs: Pairs) -> Embedded:
    """Anchors, their lists and the candidates of every rank; all candidates are taken for the rank's own."""
    if pairs.structure is not None:
        raise PairsError(
            "Pairs that were changed after a constructor made them are of this rank's rows alone; change them where "
            "all ranks' rows are seen: Embedded(rows, lambda rows: Pairs.cross(...).without(...))."
        )
    square = pairs.anchors is pairs.candidates
    whole = {"candidates": pairs.candidates, "labels": pairs.candidate_labels}
    held, sizes = _agreed(Embedded(whole, lambda rows: pairs))
    offset = sum(sizes[: rank()])
    candidates = pairs.candidates if square else gather_rows(pairs.candidates, sizes)
    labels = gather_rows(held["labels"], sizes) if "labels" in held else None

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
