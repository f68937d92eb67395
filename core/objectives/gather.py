"""Gather the rows of all ranks, pair them, and select the anchors of this rank."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature

import torch
from torch import Tensor

from dipole.core.objectives.checks import by_anchor, by_instance, check_tensor, reads_at_once, shape_of
from dipole.core.objectives.encoded_batch import EncodedBatch, Relation
from dipole.core.objectives.indices import absolute, relative
from dipole.core.objectives.pairs import OF_ANCHORS, OF_CANDIDATES, Pairs
from dipole.core.objectives.term_values import GlobalPairs
from dipole.core.utils.distributed import all_numbers, gather_rows, rank, world_size
from dipole.core.utils.errors import PairsError

Input = EncodedBatch | Pairs | Sequence[Pairs]
SHARED = ("queue", "queue_labels")
"""Arguments of constructors that are the same on every rank. All other tensors have a row for each instance."""


def all_gather_pairs(given: Input | GlobalPairs) -> GlobalPairs:
    """Gather the rows of all ranks and pair them. A single process only pairs its rows.

    Pairs from a constructor are built again from the rows of all ranks. For pairs with user-defined indices, the
    anchors and candidates are gathered and the indices are shifted. If rows do not fit together, or pairs from a
    constructor were changed before gathering, every rank raises PairsError.
    """
    if isinstance(given, GlobalPairs):
        return given
    if world_size() == 1:
        if isinstance(given, EncodedBatch):
            rows = _rows(given)
            return GlobalPairs(_paired(given.relate, rows), features=_features(given, rows))
        return GlobalPairs(_several(given))
    parts, sizes = _agreed(given)
    start = sum(sizes[: rank()])
    found = [part.gathered(sizes) for part in parts]
    pairs = tuple(each for part, rows in zip(parts, found, strict=True) for each in _paired(part.relate, rows))
    _check_queues(pairs)
    features = _features(given, found[0]) if isinstance(given, EncodedBatch) else ()
    return GlobalPairs(pairs, slice(start, start + sizes[rank()]), sum(sizes), features)


@dataclass(frozen=True)
class _Part:
    """The rows of this rank for one or several Pairs."""

    rows: Mapping[str, Tensor]  # one row per instance
    relate: Relation  # makes pairs from the rows
    # Candidates that are not the anchors. Their number may differ from the number of instances.
    apart: Mapping[str, Tensor]
    indices: tuple[str, ...] = ()  # names of the rows that index `apart`, or the instances if `apart` is empty
    listed: tuple[str, ...] = ()  # names of further rows with one entry for each index of a list, padded with 0

    def is_list(self, name: str) -> bool:
        """Return whether a row's width may differ between ranks."""
        row = self.rows.get(name)
        return name in self.listed or (row is not None and row.ndim == 2 and not row.is_floating_point())

    @property
    def kinds(self) -> dict[str, str]:
        every = [*self.rows.items(), *self.apart.items()]
        return {name: f"{row.dtype} {'list' if self.is_list(name) else tuple(row.shape[1:])}" for name, row in every}

    def gathered(self, sizes: list[int]) -> dict[str, Tensor]:
        """Return the rows of all ranks."""
        lists = [name for name in self.rows if self.is_list(name)]
        counted = [self.rows[name].shape[1] for name in lists]
        if self.apart:
            counted.append(len(next(iter(self.apart.values()))))
        # Index lists are padded to one width. The other rows keep the number that each rank has.
        of_ranks = list(zip(*all_numbers(counted), strict=True)) if counted else []
        widest = dict(zip(lists, map(max, of_ranks), strict=False))
        apart = list(of_ranks[-1]) if self.apart else sizes
        found: dict[str, Tensor] = {}
        for name, row in [*self.rows.items(), *self.apart.items()]:
            if name in self.indices:
                row = torch.where(row < 0, row, row + sum(apart[: rank()]))
            if name in widest:
                fill = 0 if name in self.listed else -1
                row = torch.cat([row, row.new_full((len(row), widest[name] - row.shape[1]), fill)], 1)
            found[name] = gather_rows(row, apart if name in self.apart else sizes)
        return found


QUEUE_ROWS_READ = 16


def _check_queues(pairs: Sequence[Pairs]) -> None:
    """Raise PairsError on every rank if the ranks hold different queues. A collective compares a sample of rows."""
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
    """Return a checksum of a sample of the queue's rows, or 0 without a queue."""
    if not pairs.facts.queue:
        return 0
    rows = pairs.candidates.detach()[pairs.facts.past]
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
    """Return the rows that are not None, after checking them."""
    if not isinstance(embedded.rows, Mapping):
        raise PairsError(
            "EncodedBatch.rows must be a mapping of names to tensors that have a row for each instance, "
            f"got {type(embedded.rows).__name__}."
        )
    rows = {name: row for name, row in embedded.rows.items() if row is not None}
    found = ", ".join(f"{name} {shape_of(row)}" for name, row in rows.items()) or "none"
    for name, row in rows.items():
        if isinstance(row, Tensor):
            check_tensor(f"the row {name!r} of EncodedBatch", row, "(B, ...)")
    if not rows or not all(isinstance(row, Tensor) and row.ndim for row in rows.values()):
        raise PairsError(f"EncodedBatch.rows must be tensors that have a row for each instance, got {found}.")
    if len({len(row) for row in rows.values()}) != 1:
        raise PairsError(f"EncodedBatch.rows must have the same number of rows on a rank, got {found}.")
    return rows


def _features(embedded: EncodedBatch, rows: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """Return the rows that are the encoder's features."""
    for name in embedded.features:
        if name not in rows or rows[name].ndim < 2 or not rows[name].is_floating_point():
            raise PairsError(
                f"EncodedBatch.features names {name!r}, but there are no floating-point rows of that name."
            )
    return tuple(rows[name] for name in embedded.features)


def _agreed(given: Input) -> tuple[list[_Part], list[int]]:
    """Return the parts of this rank and the number of rows of each rank. An error on one rank raises on all."""
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
    parts = []
    for pairs in _several(given):
        source = source_of(pairs)
        parts.append(_Part(_rows(source), source.relate, {}) if source else _of_indices(pairs))
    if len({_count(part) for part in parts}) != 1:
        raise PairsError("a tuple of Pairs under several ranks must be made of batches of one size.")
    return parts


def _count(part: _Part) -> int:
    return len(next(iter(part.rows.values())))


def _several(pairs: Pairs | Sequence[Pairs]) -> tuple[Pairs, ...]:
    if isinstance(pairs, Pairs):
        return (pairs,)
    if not isinstance(pairs, Sequence) or not pairs or not all(isinstance(each, Pairs) for each in pairs):
        raise PairsError(
            f"an objective takes views as separate tensors (objective(z1, z2)), Pairs, a tuple of Pairs, or an "
            f"EncodedBatch, got {type(pairs).__name__}."
        )
    return tuple(pairs)


def _of_indices(pairs: Pairs) -> _Part:
    """Return the part for pairs with user-defined indices. Each rank's indices refer to its own candidates."""
    if pairs.layout is not None:
        raise PairsError(
            "Pairs that were changed after a constructor made them are of this rank's rows alone. Change them where "
            "all ranks' rows are seen: EncodedBatch(rows, lambda rows: Pairs.cross(...).without(...))."
        )
    rows, apart = (
        {name: values for name in names if (values := getattr(pairs, name)) is not None}
        for names in (OF_ANCHORS, OF_CANDIDATES)
    )
    if pairs.anchors is pairs.candidates:
        del apart["candidates"]

    def relate(rows: dict[str, Tensor]) -> Pairs:
        return Pairs(**{"candidates": rows["anchors"], **rows}, views=pairs.views)  # type: ignore[arg-type]

    listed = [name for name in ("weights",) if name in rows and rows[name].ndim == 2]
    return _Part(rows, relate, apart, ("positives", "ignored"), tuple(listed))


def source_of(pairs: Pairs) -> EncodedBatch | None:
    """Return the rows given to a constructor, to pair the rows of all ranks in the same way. None for other pairs."""
    if pairs.call is None:
        return None
    name, arguments, settings = pairs.call
    given = signature(getattr(type(pairs), name)).bind(*arguments, **settings).arguments
    shared = {key: given.pop(key) for key in SHARED if key in given}
    listed, weights, rows = given.pop("ignored", None), given.pop("weights", None), {}
    for key, value in given.items():
        if isinstance(value, Tensor):
            rows[key] = value.to(pairs.anchors.device)
        elif isinstance(value, tuple | list):
            rows |= {f"{key}.{number}": each for number, each in enumerate(value)}
        else:
            shared[key] = value
    batch, columns, runs = len(next(iter(rows.values()))), 0, len(pairs.facts.anchor_views)
    if listed is not None:
        others = [row for key, row in list(rows.items())[1:] if key not in ("labels", "index")]
        columns = sum(row.shape[1] if row.ndim == 3 else 1 for row in others)
        rows |= relative(listed, batch, columns)
    if pairs.weights is not None and weights is not None:
        rows["weights"] = by_instance(pairs.weights, pairs.anchors, pairs.positives.shape[1], runs, batch)

    def relate(rows: dict[str, Tensor]) -> Pairs:
        """Call the constructor again."""
        given, views = dict(shared), dict[str, list[Tensor]]()
        for key, row in rows.items():
            name_of, _, number = key.partition(".")
            if number:
                given[name_of] = views.setdefault(name_of, [])
                views[name_of].append(row)
            else:
                given[key] = row
        if listed is not None:
            given["ignored"] = absolute(given.pop("ignored_key"), given.pop("ignored_ahead"), columns)
        if "weights" in rows:
            given["weights"] = by_anchor(rows["weights"], len(rows["weights"].flatten(0, 1)), runs)
        made: Pairs = getattr(type(pairs), name)(**given)
        return made.added() if pairs.facts.added else made

    return EncodedBatch(rows, relate)
