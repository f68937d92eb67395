"""Gather first, pair afterwards: the pairs of all ranks' rows, and which of their anchors are this rank's."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dipole.core.objectives.checks import reads_at_once, shape_of
from dipole.core.objectives.encoded_batch import EncodedBatch, Relation
from dipole.core.objectives.layout import NO_VIEW
from dipole.core.objectives.pairs import Pairs
from dipole.core.utils.distributed import all_numbers, gather_rows, rank, world_size
from dipole.core.utils.errors import PairsError
from dipole.core.utils.text import counted

Input = EncodedBatch | Pairs | Sequence[Pairs]


@dataclass(frozen=True)
class GlobalPairs:
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
        """The same pairs with this rank's anchors alone.

        Args:
            pairs: of all ranks' rows.

        Raises:
            PairsError: their anchors do not divide into the rows of the batch.
        """
        if self.own is None:
            return pairs
        if len(pairs.anchors) % self.total:
            raise PairsError(
                f"{counted(len(pairs.anchors), 'anchor')} were made of a batch of {counted(self.total, 'row')} over "
                "all ranks; a "
                "relation or a term that leaves anchors out must keep their rows and pad their positives with -1."
            )
        return pairs.narrow(self.own, self.total)

    @property
    def local_pairs(self) -> tuple[Pairs, ...]:
        """All of them, with this rank's anchors alone."""
        return tuple(map(self.local, self.pairs))


def all_gather_pairs(embedded: Input | GlobalPairs) -> GlobalPairs:
    """Gather the rows of all ranks and pair them; in a single process just pair them.

    Pairs that a constructor made of this rank's rows are made again of all ranks' rows. Of pairs whose indices are
    somebody's own, anchors and candidates are gathered and the indices moved.

    Args:
        embedded: what this rank gives; every rank must give the same kinds of rows.

    Raises:
        PairsError: if the rows do not fit together, on every rank, or on several ranks a constructor's pairs were
            changed afterwards.
    """
    if isinstance(embedded, GlobalPairs):
        return embedded
    if world_size() == 1:
        if isinstance(embedded, EncodedBatch):
            return GlobalPairs(_paired(embedded.relate, _rows(embedded)))
        return GlobalPairs(_several(embedded))
    parts, sizes = _agreed(embedded)
    start = sum(sizes[: rank()])
    pairs = tuple(each for part in parts for each in part.of_all(sizes))
    return GlobalPairs(pairs, slice(start, start + sizes[rank()]), sum(sizes))


@dataclass(frozen=True)
class _Part:
    """What this rank gives for one or several Pairs.

    Args:
        rows: of its instances.
        relate: pairs them.
        apart: rows that are counted for themselves, candidates that are not the anchors.
        indices: names of the rows that index `apart`, or the instances where there are none.
    """

    rows: Mapping[str, Tensor]
    relate: Relation
    apart: Mapping[str, Tensor]
    indices: tuple[str, ...] = ()

    @property
    def kinds(self) -> dict[str, str]:
        every = [*self.rows.items(), *self.apart.items()]
        return {name: f"{row.dtype} {'list' if _is_list(row) else tuple(row.shape[1:])}" for name, row in every}

    def of_all(self, sizes: list[int]) -> tuple[Pairs, ...]:
        """Pairs of the rows of all ranks."""
        lists = [name for name, row in self.rows.items() if _is_list(row)]
        counted = [self.rows[name].shape[1] for name in lists]
        counted += [len(next(iter(self.apart.values())))] if self.apart else []
        # Lists are as long on every rank, and the rows apart as many as there are.
        of_ranks = list(zip(*all_numbers(counted), strict=True)) if counted else []
        widest = dict(zip(lists, map(max, of_ranks), strict=False))
        apart = list(of_ranks[-1]) if self.apart else sizes
        found: dict[str, Tensor] = {}
        for name, row in [*self.rows.items(), *self.apart.items()]:
            if name in self.indices:
                row = torch.where(row < 0, row, row + sum(apart[: rank()]))
            if name in widest:
                row = torch.cat([row, row.new_full((len(row), widest[name] - row.shape[1]), -1)], 1)
            found[name] = gather_rows(row, apart if name in self.apart else sizes)
        pairs = _paired(self.relate, found)
        _check_queues(pairs)
        return pairs


QUEUE_ROWS_READ = 16


def _check_queues(pairs: Sequence[Pairs]) -> None:
    """Raise on every rank where ranks do not hold the same queue, as far as some of its rows tell; a collective.

    Raises:
        PairsError: with what to do about hard negatives, which are rows of the batch.
    """
    if not all(reads_at_once(each.anchors) for each in pairs):
        return  # an accelerator would have to wait
    marks = all_numbers([_mark(each) for each in pairs])
    if marks.count(marks[0]) < len(marks):
        other = next(number for number, mark in enumerate(marks) if mark != marks[0])
        raise PairsError(
            f"every rank must hold the same queue, but that of rank {other} is another than that of rank 0. Rows of "
            "the batch, hard negatives say, are no queue: pair them with Pairs.from_columns(anchor, positive, "
            "negatives), which gathers them (in EncodedBatch they are rows)."
        )


def _mark(pairs: Pairs) -> int:
    """A number that tells some rows of a queue from others; 0 without a queue, and where the queue was gathered."""
    if not pairs.known.queue:
        return 0
    runs = pairs.known.candidate_views
    first = sum(length for _, length in runs[: next(n for n, (view, _) in enumerate(runs) if view == NO_VIEW)])
    rows = pairs.candidates.detach()[first : first + pairs.known.queue]
    some = rows[:: max(1, len(rows) // QUEUE_ROWS_READ)].double()
    return zlib.crc32(some.numpy().tobytes())


def _paired(relate: Relation, rows: dict[str, Tensor]) -> tuple[Pairs, ...]:
    try:
        return _several(relate(rows))
    except KeyError as error:
        if not error.args or not isinstance(error.args[0], str) or error.args[0] in rows:
            raise
        raise PairsError(
            f"relate asks for rows {error.args[0]!r}, but EncodedBatch.rows has {', '.join(map(repr, rows))} alone."
        ) from None


def _rows(embedded: EncodedBatch) -> dict[str, Tensor]:
    """What it holds, without what is None."""
    if not isinstance(embedded.rows, Mapping):
        raise PairsError(
            "EncodedBatch.rows must be a mapping of names to tensors that have a row for each instance, "
            f"got {type(embedded.rows).__name__}."
        )
    rows = {name: row for name, row in embedded.rows.items() if row is not None}
    found = ", ".join(f"{name} {shape_of(row)}" for name, row in rows.items()) or "none"
    if not rows or not all(isinstance(row, Tensor) and row.ndim for row in rows.values()):
        raise PairsError(f"EncodedBatch.rows must be tensors that have a row for each instance, got {found}.")
    if len({len(row) for row in rows.values()}) != 1:
        raise PairsError(f"EncodedBatch.rows must have the same number of rows on a rank, got {found}.")
    return rows


def _agreed(given: Input) -> tuple[list[_Part], list[int]]:
    """What this rank gives, and how many rows each rank has; a fault on one rank is an error on all, nobody waits."""
    fault: PairsError | None = None
    parts: list[_Part] = []
    try:
        parts = _parts(given)
    except PairsError as error:
        fault = error
    kinds = [part.kinds for part in parts]
    mine = [-1 if fault else _count(parts[0]), zlib.crc32(repr(kinds).encode())]
    sizes, kind_of = zip(*all_numbers(mine), strict=True)
    if fault:
        raise fault
    if min(sizes) < 1:
        wrong = next(number for number, size in enumerate(sizes) if size < 1)
        raise PairsError(f"the rows of rank {wrong} do not fit together, or it has none; every rank needs a row.")
    if len(set(kind_of)) > 1:
        shown = "; ".join(", ".join(f"{name} {kind}" for name, kind in each.items()) for each in kinds)
        raise PairsError(
            "every rank must give as many Pairs, made of the same rows in one order, of one dtype and width, but "
            f"they differ; rank {rank()} has {len(parts)}: {shown}."
        )
    return parts, list(sizes)


def _parts(given: Input) -> list[_Part]:
    if isinstance(given, EncodedBatch):
        return [_Part(_rows(given), given.relate, {})]
    parts = [
        _by_hand(pairs) if pairs.source is None else _Part(_rows(pairs.source), pairs.source.relate, {})
        for pairs in _several(given)
    ]
    if len({_count(part) for part in parts}) != 1:
        raise PairsError("a tuple of Pairs under several ranks must be made of batches of one size.")
    return parts


def _count(part: _Part) -> int:
    return len(next(iter(part.rows.values())))


def _several(pairs: Pairs | Sequence[Pairs]) -> tuple[Pairs, ...]:
    found = (pairs,) if isinstance(pairs, Pairs) else tuple(pairs) if isinstance(pairs, Sequence) else ()
    if not found or not all(isinstance(each, Pairs) for each in found):
        raise PairsError(
            f"an objective takes EncodedBatch, Pairs, a tuple of Pairs, or views; got {type(pairs).__name__}."
        )
    return found


def _is_list(row: Tensor) -> bool:
    return row.ndim == 2 and not row.is_floating_point()


def _by_hand(pairs: Pairs) -> _Part:
    """Anchors, their lists and the candidates of every rank; all candidates are taken for the rank's own."""
    if pairs.layout is not None:
        raise PairsError(
            "Pairs that were changed after a constructor made them are of this rank's rows alone; change them where "
            "all ranks' rows are seen: EncodedBatch(rows, lambda rows: Pairs.cross(...).without(...))."
        )
    square = pairs.anchors is pairs.candidates
    rows = {name: getattr(pairs, name) for name in ("anchors", "positives", "ignored", "labels", "index")}
    apart = {name: getattr(pairs, name) for name in ("candidates", "candidate_labels", "candidate_index")}
    if square:
        del apart["candidates"]

    def relate(rows: dict[str, Tensor]) -> Pairs:
        return Pairs(**{"candidates": rows["anchors"], **rows}, views=pairs.views)  # type: ignore[arg-type]

    return _Part(_there(rows), relate, _there(apart), ("positives", "ignored"))


def _there(rows: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: row for name, row in rows.items() if row is not None}
