"""The data of pairs: embeddings with indices of positives and ignored rows, without constructors."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, wraps
from inspect import signature
from typing import Any, Self, TypeVar, cast

import torch
from torch import Tensor

from dipole.core.objectives.checks import (
    by_anchor,
    by_instance,
    check_count,
    check_index_shape,
    check_indices,
    check_matrix,
    check_numbers,
    check_row_values,
    check_weights,
    reads_at_once,
)
from dipole.core.objectives.encoded_batch import EncodedBatch
from dipole.core.objectives.indices import absolute, pads_last, real_first, relative
from dipole.core.utils.errors import PairsError

Make = TypeVar("Make", bound=Callable[..., Any])
OF_ANCHORS = ("anchors", "positives", "ignored", "labels", "index", "weights")
OF_CANDIDATES = ("candidates", "candidate_labels", "candidate_index")
SHARED = ("queue", "queue_labels")
"""Arguments of constructors that are the same on every rank. All other tensors have a row for each instance."""
NO_VIEW = -1  # the view number of candidates outside the batch, such as the rows of a queue
Runs = tuple[tuple[int, int], ...]  # view and length of each run of rows. Every run goes through the batch once


@dataclass(frozen=True)
class PairLayout:
    """Facts about the indices of `Pairs`, which its constructors know."""

    anchor_views: Runs  # runs of the anchors
    candidate_views: Runs  # runs of the candidates
    first_negative: int = 0  # candidates before this index are positives of some anchor and never negatives
    among: int = 0  # number of anchors, the first ones, that are also candidates
    fewest: int | None = None  # number of positives that every anchor has, except at the ends of documents
    padded: bool = False  # -1 may occur among positives or ignored, or a candidate may be listed twice
    mutual: bool = False  # anchors are candidates, and i excludes j exactly if j excludes i
    shared: int | None = None  # a candidate is a positive of at most this many anchors
    queue: int = 0  # number of past embeddings or hard negatives, which follow the candidates of the batch
    queue_of_keys: bool = False  # the encoder of the keys made the queue, and not that of the anchors or a copy of it
    sides: bool = False  # anchors and candidates are two views from two encoders, and an anchor's own side is ignored
    by_label: bool = False  # positives are rows of the same class
    of_block: int = 0  # number of anchors from each block, block after block
    draw: int = 0  # seed of random choices among blocks, the same on every rank
    view_pairs: bool = False  # anchors are view x of every pair of views x < y, and candidates are all views
    # View y of each run of anchors, if its negatives lie in this view alone. The other views' rows are ignored first.
    partners: tuple[int, ...] = ()
    added: bool = False  # the values of several Pairs of a batch are added instead of averaged


@dataclass(frozen=True)
class OfRows:
    """What a constructor is told of the B instances of its batch."""

    labels: Tensor | None = None  # (B,)
    index: Tensor | None = None  # (B,)
    weights: Tensor | None = None  # (B,), or (B, K) unless the positives depend on other rows
    weighs_pairs: bool = True


@dataclass(frozen=True, eq=False)
class PairData:
    """The fields of `Pairs`, properties derived from them, and methods that return changed copies."""

    anchors: Tensor
    candidates: Tensor
    positives: Tensor
    ignored: Tensor
    labels: Tensor | None = None
    views: bool = True
    candidate_labels: Tensor | None = None
    index: Tensor | None = None
    candidate_index: Tensor | None = None
    weights: Tensor | None = None
    layout: PairLayout | None = field(default=None, repr=False)
    # The layout, or one without special properties for user-defined indices.
    known: PairLayout = field(init=False, repr=False)
    # The constructor's name and arguments. A changed copy has none.
    call: tuple[str, tuple[Any, ...], dict[str, Any]] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        square = self.anchors is self.candidates
        known = self.layout
        if known is None:
            check_matrix("anchors", self.anchors)
            check_matrix("candidates", self.candidates, ("anchors", self.anchors))
            anchors, candidates = len(self.anchors), len(self.candidates)
            check_indices("positives", self.positives, self.anchors, candidates)
            check_indices("ignored", self.ignored, self.anchors, candidates)
            for name in ("labels", "index"):
                check_row_values(getattr(self, name), anchors, name)
            for name in ("candidate_labels", "candidate_index"):
                check_row_values(getattr(self, name), candidates, name, "candidate")
            if self.weights is not None:
                shapes = {"(A,)": (anchors,), "(A, K)": tuple(self.positives.shape)}
                weights = check_weights(self.weights, self.anchors, shapes)
                if weights.ndim == 2:
                    weights = weights.gather(1, real_first(self.positives))
                object.__setattr__(self, "weights", weights)
            object.__setattr__(self, "positives", pads_last(self.positives))
            # Without a constructor, as many candidates as anchors have the anchors' labels.
            if self.candidate_labels is None and anchors == candidates:
                object.__setattr__(self, "candidate_labels", self.labels)
            known = PairLayout(((0, anchors),), ((int(not square), candidates),), among=anchors * square, padded=True)
        object.__setattr__(self, "known", known)
        if square and self.candidate_index is None:
            object.__setattr__(self, "candidate_index", self.index)

    @property
    def source(self) -> EncodedBatch | None:
        """The rows given to the constructor, to pair the rows of all ranks in the same way. None for a changed copy."""
        if self.call is None:
            return None
        name, arguments, settings = self.call
        given = signature(getattr(type(self), name)).bind(*arguments, **settings).arguments
        shared = {key: given.pop(key) for key in SHARED if key in given}
        listed, weights, rows = given.pop("ignored", None), given.pop("weights", None), {}
        for key, value in given.items():
            if isinstance(value, Tensor):
                rows[key] = value.to(self.anchors.device)
            elif isinstance(value, tuple | list):
                rows |= {f"{key}.{number}": each for number, each in enumerate(value)}
            else:
                shared[key] = value
        batch, columns, runs = len(next(iter(rows.values()))), 0, len(self.known.anchor_views)
        if listed is not None:
            others = [row for key, row in list(rows.items())[1:] if key not in ("labels", "index")]
            columns = sum(row.shape[1] if row.ndim == 3 else 1 for row in others)
            rows |= relative(listed, batch, columns)
        if weights is not None:
            positives = self.positives.shape[1]
            rows["weights"] = by_instance(cast(Tensor, self.weights), self.anchors, positives, runs, batch)
        return EncodedBatch(rows, partial(_pair_again, type(self), name, shared, columns, runs))

    @classmethod
    def _of_batch(
        cls,
        batch: int,
        layout: PairLayout,
        anchors: Tensor,
        candidates: Tensor,
        positives: Tensor,
        ignored: Tensor,
        of_rows: OfRows,
        behind: int = 0,
        labels_behind: Tensor | None = None,
        *,
        views: bool = True,
    ) -> Self:
        """Return pairs with the labels, indices and weights of the instances of a batch.

        The last `behind` candidates are not in the batch. `labels_behind` are their classes, if they have any.
        """
        device, own, every = anchors.device, layout.anchor_views, layout.candidate_views
        if behind:
            every = every[:-1]
        labels, index, weights = of_rows.labels, of_rows.index, of_rows.weights
        check_row_values(labels, batch, "labels")
        check_row_values(index, batch, "index")
        candidate_labels = None
        if labels is not None:
            labels = labels.to(device)
            candidate_labels = spread(labels, every, batch)
            if labels_behind is not None and behind:
                candidate_labels = torch.cat([candidate_labels, labels_behind.to(device)])
            elif behind:
                candidate_labels = None
            labels = spread(labels, own, batch)
        if index is None:
            index = torch.arange(batch, device=device)
        index = index.to(device)
        candidate_index = spread(index, every, batch)
        index = candidate_index if every == own else spread(index, own, batch)
        if behind:
            candidate_index = torch.cat([candidate_index, index.new_full((behind,), -1)])
        if weights is not None:
            most = positives.shape[1] if of_rows.weighs_pairs else None
            weights = by_anchor(by_instance(weights, anchors, most, len(own), batch), len(anchors), len(own))
        return cls(
            anchors,
            candidates,
            positives,
            ignored,
            labels,
            views,
            candidate_labels,
            index,
            candidate_index,
            weights,
            layout=layout,
        )

    # Changed copies ---------------------------------------------------------------------------------------------------

    def first_positives(self, count: int) -> Self:
        """Keep the first positives of each anchor. The others are ignored and do not become negatives.

        Args:
            count: number of positives to keep, >= 0.

        Returns:
            Pairs with min(count, K) positives.

        Raises:
            PairsError: `count` is not an integer >= 0.
        """
        check_count("count", count, 0)
        known = self.known
        fewest = None if known.fewest is None else min(count, known.fewest)
        return replace(
            self,
            positives=self.positives[:, :count],
            weights=self.weights if self.weights is None or self.weights.ndim == 1 else self.weights[:, :count],
            ignored=torch.cat([self.ignored, self.positives[:, count:]], 1),
            layout=replace(known, fewest=fewest),
        )

    def with_positives(self, positives: Tensor) -> Self:
        """Replace the positives by others that are not views. The old positives become negatives.

        Args:
            positives: (A, K) torch.long, indices of candidates, distinct in a row, padded with -1. The values are not
                checked.

        Raises:
            PairsError: the positives have a wrong shape, dtype or device, or the pairs have weights (A, K), which
                belong to the old positives.
        """
        check_index_shape("positives", positives, self.anchors)
        if self.weights is not None and self.weights.ndim == 2:
            raise PairsError("with_positives: the weights (A, K) belong to the old positives. Give weights (A,).")
        return replace(
            self,
            positives=pads_last(positives),
            views=False,
            layout=replace(self.known, fewest=None, padded=True, mutual=False, shared=None, by_label=False, of_block=0),
        )

    def without(self, ignored: Tensor, *, distinct: bool = False) -> Self:
        """Ignore more candidates, so that they are not negatives.

        Args:
            ignored: (A, E) torch.long, indices of candidates, padded with -1. The values are not checked.
            distinct: promise that no index is padding, listed twice or already excluded. This saves counting them.

        Returns:
            Pairs with the same anchors and candidates.

        Raises:
            PairsError: `ignored` has a wrong shape, dtype or device.
        """
        check_index_shape("ignored", ignored, self.anchors)
        return replace(
            self,
            ignored=torch.cat([self.ignored, ignored], 1),
            layout=replace(self.known, padded=self.known.padded or not distinct, mutual=False, of_block=0),
        )

    def added(self) -> Self:
        """Return the same pairs, whose terms are added over the several Pairs of a batch instead of averaged.

        CMC's authors add the two directions. All Pairs of the batch must be marked.
        """
        return replace(self, layout=replace(self.known, added=True))

    def narrow(self, own: slice, total: int) -> Self:
        """Keep only the anchors from some rows of a batch of `total` rows. All candidates remain.

        The anchors are ordered run by run, as in `PairLayout`, with the same number of anchors for each row.

        Args:
            own: rows of the batch, start and stop.
            total: number of rows of the whole batch. It divides the number of anchors in each run.

        Returns:
            Pairs with fewer anchors and the same candidates.
        """
        known, runs = self.known, self.known.anchor_views
        share = len(self.anchors) // (len(runs) * total)
        rows = len(self.anchors) // len(runs)
        parts = [slice(n * rows + own.start * share, n * rows + own.stop * share) for n in range(len(runs))]
        mine = (own.stop - own.start) * share
        changes: dict[str, Any] = {
            name: torch.cat([values[part] for part in parts])
            for name in OF_ANCHORS
            if (values := getattr(self, name)) is not None
        }
        layout = replace(known, anchor_views=tuple((view, mine) for view, _ in runs), among=0, mutual=False)
        return replace(self, **changes, layout=layout)

    # Derived properties -----------------------------------------------------------------------------------------------

    @property
    def first_negative(self) -> int:
        """Number of leading candidates that are never negatives."""
        return self.known.first_negative

    @cached_property
    def view(self) -> Tensor:
        """(A,) view number of each anchor. For statistics of whole views use `candidate_view`.

        With several ranks the anchors are only one rank's share of a view.
        """
        return views_of(self.known.anchor_views, self.anchors.device)

    @cached_property
    def candidate_view(self) -> Tensor:
        """(C,) view number of each candidate of all ranks, NO_VIEW (-1) for the queue.

        `with_intra_batch` adds the anchors that are not yet candidates.
        """
        return views_of(self.known.candidate_views, self.candidates.device)

    def batch_views(self) -> tuple[Tensor, ...]:
        """Return the rows of each view, (B, d) each: the anchors' views, then further ones among the candidates.

        Candidates outside the batch, such as a queue, belong to no view.
        """
        found: dict[int, Tensor] = {}
        for rows, runs in ((self.anchors, self.known.anchor_views), (self.candidates, self.known.candidate_views)):
            for (view, _), part in zip(runs, rows.split([length for _, length in runs]), strict=True):
                if view != NO_VIEW:
                    found.setdefault(view, part)
        return tuple(found.values())

    @cached_property
    def fewest(self) -> int:
        """Smallest number of positives among anchors that have any, or 0 if none has.

        For `from_window` it is 2 window. Anchors at the ends of a document may have fewer.
        """
        if self.known.fewest is not None:
            return self.known.fewest
        counts = (self.positives >= 0).sum(1)
        some = counts[counts > 0]
        return min(some.tolist(), default=0)

    def check_positives(self, count: int, problem: Callable[[int], str]) -> None:
        """Raise if an anchor with positives has fewer than `count` of them.

        Anchors of `from_window` at the ends of a document may have fewer (see `fewest`).

        Args:
            count: required number of positives, >= 1.
            problem: makes the message from the smallest number found.

        Raises:
            PairsError: `problem(fewest)`. For user-defined indices on CUDA the device raises a RuntimeError later,
                because their values are not read back.
        """
        if self.known.fewest is not None or reads_at_once(self.anchors):
            if self.fewest < count:
                raise PairsError(problem(self.fewest))
            return
        counts = (self.positives >= 0).sum(1)
        check_numbers(torch.where(counts > 0, counts, count), count, None, lambda low, high: problem(low))

    @cached_property
    def excluded(self) -> Tensor:
        """(A, K+E) candidates that are not negatives of the anchor, padded with -1."""
        return torch.cat([self.positives, self.ignored], 1)

    @cached_property
    def positive_mask(self) -> Tensor | None:
        """(A, K) True where `positives` is not padding. None if nothing is padded."""
        if self.known.padded:
            return self.positives >= 0
        return None

    @property
    def _free(self) -> tuple[int, int]:
        """The number of candidates that may be negatives, and of excluded ones listed among them."""
        first = self.known.first_negative
        # Positives lie before the first negative, where there is such a border.
        listed = self.ignored if first else self.excluded
        return len(self.candidates) - first, listed.shape[1]

    @cached_property
    def negative_counts(self) -> Tensor:
        """(A,) number of negatives of each anchor."""
        free, listed = self._free
        if not self.known.padded:
            return torch.full((len(self.anchors),), free - listed, device=self.anchors.device)
        # A candidate may be listed twice (as a positive and as ignored): count distinct ones.
        order = self.excluded.sort(1).values
        fresh = torch.ones_like(order, dtype=torch.bool)
        fresh[:, 1:] = order[:, 1:] != order[:, :-1]
        return free - (fresh & (order >= self.known.first_negative)).sum(1)

    @cached_property
    def has_negatives(self) -> bool | None:
        """Whether any anchor has a negative. None if the answer would need to wait for a device."""
        free, listed = self._free
        if not self.known.padded or free == 0 or free > listed:
            return free > listed
        if reads_at_once(self.anchors):
            return bool((self.negative_counts > 0).any())
        return None

    @cached_property
    def has_positives(self) -> bool | None:
        """Whether any anchor has a positive. None if the answer would need to wait for a device."""
        mask = self.positive_mask
        if mask is None or not mask.shape[1]:
            return self.positives.shape[1] > 0
        if reads_at_once(mask):
            return bool(mask.any())
        return None

    def negative_mask(self) -> Tensor:
        """Return the full (A, C) mask, True at the negatives of each anchor."""
        listed, count = self.excluded, len(self.candidates)
        mask = torch.ones(len(self.anchors), count + 1, dtype=torch.bool, device=self.anchors.device)
        mask[:, : self.first_negative] = False
        # Padding writes into an extra column that is removed.
        return mask.scatter_(1, torch.where(listed < 0, count, listed), False)[:, :-1]


def with_queue(runs: Runs, count: int) -> Runs:
    """Return the runs with a queue of `count` rows after them."""
    if not count:
        return runs
    return (*runs, (NO_VIEW, count))


def views_of(runs: Runs, device: torch.device) -> Tensor:
    """Return the view of each row of the runs."""
    return torch.cat([torch.full((rows,), view, device=device) for view, rows in runs])


def spread(values: Tensor, runs: Runs, batch: int) -> Tensor:
    """Return the values (batch,) of the instances for the rows of all runs, which are equally long."""
    share = runs[0][1] // batch
    if share > 1:
        values = values.repeat_interleave(share)
    return torch.cat([values] * len(runs))  # takes a third of the time of `repeat`


def constructor(make: Make) -> Make:
    """Remember the call of a constructor, to pickle its pairs and to pair the rows of all ranks in the same way."""

    @wraps(make)
    def made(cls: Any, *arguments: Any, **settings: Any) -> Any:
        arguments = tuple([_kept(each) for each in arguments])
        settings = {name: _kept(each) for name, each in settings.items()}
        pairs = make(cls, *arguments, **settings)
        object.__setattr__(pairs, "call", (make.__name__, arguments, settings))
        return pairs

    return cast(Make, made)


def _kept(argument: Any) -> Any:
    """Return a list of views, which the caller may change, or an iterator over views, as a new list."""
    if isinstance(argument, list | Iterator):
        return list(argument)
    return argument


def _pair_again(cls: Any, name: str, shared: dict[str, Any], columns: int, runs: int, rows: dict[str, Tensor]) -> Any:
    """Call a constructor with the rows of all ranks, as `PairData.source` names them."""
    given, views = dict(shared), dict[str, list[Tensor]]()
    for key, row in rows.items():
        name_of, _, number = key.partition(".")
        if number:
            given[name_of] = views.setdefault(name_of, [])
            views[name_of].append(row)
        else:
            given[key] = row
    if "ignored_key" in rows:
        number, ahead = given.pop("ignored_key"), given.pop("ignored_ahead")
        given["ignored"] = absolute(number, ahead, columns)
    if "weights" in rows:
        given["weights"] = by_anchor(rows["weights"], len(rows["weights"].flatten(0, 1)), runs)
    return getattr(cls, name)(**given)
