"""The data of pairs: embeddings with indices of positives and ignored rows, and SimCLR's pairs of views."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, wraps
from itertools import combinations, takewhile
from typing import Any, Literal, Self, TypeVar, cast, get_args

import torch
from torch import Tensor

from dipole.core.objectives import checks, indices
from dipole.core.utils.errors import PairsError

Make = TypeVar("Make", bound=Callable[..., Any])
ViewNegatives = Literal["view_pairs", "all", "queries"]
VIEW_NEGATIVES = get_args(ViewNegatives)
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

    @property
    def outside(self) -> int:
        """Number of candidates that follow those of the batch."""
        view, length = self.candidate_views[-1]
        if view == NO_VIEW and len(self.candidate_views) > 1:
            return length
        return 0

    @property
    def past(self) -> slice:
        """Candidates of the queue."""
        first = sum(length for _, length in takewhile(lambda run: run[0] != NO_VIEW, self.candidate_views))
        return slice(first, first + self.queue)

    def of_rows(self, values: Tensor, outside: Tensor | int | None) -> tuple[Tensor, Tensor | None]:
        """Return values (B,) of the instances for the anchors and for the candidates.

        Candidates outside the batch have their own values, or a number. With None those of all candidates are unknown.
        """
        batch, runs, count = len(values), self.candidate_views, self.outside
        own = to_rows(values, self.anchor_views, batch)
        if runs == self.anchor_views:
            return own, own
        if not count:
            return own, to_rows(values, runs, batch)
        if outside is None:
            return own, None
        if isinstance(outside, int):
            outside = values.new_full((count,), outside)
        return own, torch.cat([to_rows(values, runs[:-1], batch), outside.to(values.device)])


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


@dataclass(frozen=True, eq=False)
class PairData:
    """The fields of `Pairs`, properties derived from them, and methods that return changed copies."""

    anchors: Tensor  # (A, d)
    candidates: Tensor  # (C, d), the same tensor where every row is both
    positives: Tensor  # (A, K) indices of candidates, padded with -1
    ignored: Tensor  # (A, E) candidates that are neither positives nor negatives, padded with -1
    labels: Tensor | None = None  # (A,)
    views: bool = True  # positives are views of the anchor's own instance
    candidate_labels: Tensor | None = None  # (C,)
    index: Tensor | None = None  # (A,) instances
    candidate_index: Tensor | None = None  # (C,)
    weights: Tensor | None = None  # (A,) or (A, K)
    layout: PairLayout | None = field(default=None, repr=False)
    # The layout, or one without special properties for user-defined indices.
    facts: PairLayout = field(init=False, repr=False)
    # The constructor's name and arguments. A changed copy has none.
    call: tuple[str, tuple[Any, ...], dict[str, Any]] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        facts = self._checked_indices() if self.layout is None else self.layout
        object.__setattr__(self, "facts", facts)
        if self.anchors is self.candidates and self.candidate_index is None:
            object.__setattr__(self, "candidate_index", self.index)

    def _checked_indices(self) -> PairLayout:
        """Check pairs that no constructor made, sort padding to the end, and return the layout of any indices."""
        checks.check_matrix("anchors", self.anchors)
        checks.check_matrix("candidates", self.candidates, ("anchors", self.anchors))
        anchors, candidates = len(self.anchors), len(self.candidates)
        checks.check_indices("positives", self.positives, self.anchors, candidates)
        checks.check_indices("ignored", self.ignored, self.anchors, candidates)
        for name in ("labels", "index"):
            checks.check_row_values(getattr(self, name), anchors, name)
        for name in ("candidate_labels", "candidate_index"):
            checks.check_row_values(getattr(self, name), candidates, name, "candidate")
        if self.weights is not None:
            shapes = {"(A,)": (anchors,), "(A, K)": tuple(self.positives.shape)}
            weights = checks.check_weights(self.weights, self.anchors, shapes)
            if weights.ndim == 2:
                weights = weights.gather(1, indices.real_first(self.positives))
            object.__setattr__(self, "weights", weights)
        object.__setattr__(self, "positives", indices.pads_last(self.positives))
        # Without a constructor, as many candidates as anchors have the anchors' labels.
        if self.candidate_labels is None and anchors == candidates:
            object.__setattr__(self, "candidate_labels", self.labels)
        square = self.anchors is self.candidates
        return PairLayout(((0, anchors),), ((int(not square), candidates),), among=anchors * square, padded=True)

    @classmethod
    @constructor
    def from_views(
        cls,
        views: Sequence[Tensor],
        labels: Tensor | None = None,
        index: Tensor | None = None,
        negatives: ViewNegatives = "all",
        *,
        weights: Tensor | None = None,
    ) -> Self:
        """SimCLR with any number of views: the other views of a row's instance are its positives.

        Args:
            views: V >= 2 tensors (B, d) of one shape, dtype and device, row b of each a view of instance b.
            labels: (B,) class of each instance.
            index: (B,) index of each instance in the data set.
            negatives: with "all" every row is an anchor, and all V (B - 1) views of the other instances are its
                negatives. With "view_pairs" the anchors are the rows of view x, for each pair of views x < y. The row
                of view y is the positive, and the B - 1 other rows of view y are the negatives (the code of CACR's
                authors). With "queries" only the first views are anchors, and the B - 1 first views of the other
                instances are negatives.
            weights: (B,) of rows or (B, K) of pairs, see `Pairs`. Where anchors have several positives, weight k of a
                row is that of the k-th next view in cyclic order.

        Returns:
            Pairs of A = V B anchors, which are also the candidates, and K = V - 1 positives. With "view_pairs",
            A = V (V - 1) / 2 B anchors, C = V B candidates and K = 1: two views are `cross(views[0], views[1])`. The
            attraction of `cacr` averages over all V views and their V - 1 positives. With "queries", A = B anchors,
            C = V B candidates (the other views, then the first ones) and K = V - 1.

        Raises:
            PairsError: there are fewer than two views, views differ in shape, dtype or device, labels or index are not
                (B,), or `negatives` is invalid.
        """
        views = checks.as_views(
            views, "from_views needs at least two views, each (B, d), such as z.unbind(1) of (B, V, d)."
        )
        checks.check_choice("negatives", negatives, *VIEW_NEGATIVES)
        checks.check_alike(views)
        instances = labels, index, weights
        if negatives == "queries":
            return cls._of_batch(*_of_queries(views), *instances)
        if negatives == "view_pairs":
            return cls._of_batch(*_of_view_pairs(views), *instances)
        count, batch = len(views), views[0].shape[0]
        z = torch.cat(views)  # (VB, d), view-major
        own = torch.arange(count * batch, device=z.device).unsqueeze(1)
        runs = tuple([(number, batch) for number in range(count)])
        layout = PairLayout(runs, runs, among=count * batch, fewest=count - 1, mutual=True, shared=count - 1)
        return cls._of_batch(layout, z, z, other_views(own, batch), own, *instances)

    @classmethod
    def _of_batch(
        cls,
        layout: PairLayout,
        anchors: Tensor,
        candidates: Tensor,
        positives: Tensor,
        ignored: Tensor,
        labels: Tensor | None = None,
        index: Tensor | None = None,
        weights: Tensor | None = None,
        *,
        views: bool = True,
        outside_labels: Tensor | int | None = None,
    ) -> Self:
        """Return pairs with the labels, indices and weights of the B instances, repeated by `PairLayout.of_rows`."""
        runs, device = len(layout.anchor_views), anchors.device
        batch = layout.anchor_views[0][1] // max(1, layout.of_block)
        checks.check_row_values(labels, batch, "labels")
        checks.check_row_values(index, batch, "index")
        candidate_labels = None
        if labels is not None:
            labels, candidate_labels = layout.of_rows(labels.to(device), outside_labels)
        index = torch.arange(batch, device=device) if index is None else index.to(device)
        index, candidate_index = layout.of_rows(index, -1)
        if weights is not None:
            # Padded positives that are other instances depend on the batch, so they cannot have weights of their own.
            most = positives.shape[1] if views or not layout.padded else None
            weights = checks.by_anchor(checks.by_instance(weights, anchors, most, runs, batch), len(anchors), runs)
        known = labels, views, candidate_labels, index, candidate_index, weights
        return cls(anchors, candidates, positives, ignored, *known, layout)

    # Derived properties -----------------------------------------------------------------------------------------------

    @property
    def first_negative(self) -> int:
        """Number of leading candidates that are never negatives."""
        return self.facts.first_negative

    @cached_property
    def view(self) -> Tensor:
        """(A,) view number of each anchor. For statistics of whole views use `candidate_view`.

        With several ranks the anchors are only one rank's share of a view.
        """
        return views_of(self.facts.anchor_views, self.anchors.device)

    @cached_property
    def candidate_view(self) -> Tensor:
        """(C,) view number of each candidate of all ranks, NO_VIEW (-1) for the queue.

        `with_intra_batch` adds the anchors that are not yet candidates.
        """
        return views_of(self.facts.candidate_views, self.candidates.device)

    def batch_views(self) -> tuple[Tensor, ...]:
        """Return the rows of each view, (B, d) each: the anchors' views, then further ones among the candidates.

        Candidates outside the batch, such as a queue, belong to no view.
        """
        found: dict[int, Tensor] = {}
        for rows, runs in ((self.anchors, self.facts.anchor_views), (self.candidates, self.facts.candidate_views)):
            for (view, _), part in zip(runs, rows.split([length for _, length in runs]), strict=True):
                if view != NO_VIEW:
                    found.setdefault(view, part)
        return tuple(found.values())

    @cached_property
    def fewest(self) -> int:
        """Smallest number of positives among anchors that have any, or 0 if none has.

        For `from_window` it is 2 window. Anchors at the ends of a document may have fewer.
        """
        if self.facts.fewest is not None:
            return self.facts.fewest
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
        if self.facts.fewest is not None or checks.reads_at_once(self.anchors):
            if self.fewest < count:
                raise PairsError(problem(self.fewest))
            return
        counts = (self.positives >= 0).sum(1)
        checks.check_numbers(torch.where(counts > 0, counts, count), count, None, lambda low, high: problem(low))

    @cached_property
    def excluded(self) -> Tensor:
        """(A, K+E) candidates that are not negatives of the anchor, padded with -1."""
        return torch.cat([self.positives, self.ignored], 1)

    @cached_property
    def positive_mask(self) -> Tensor | None:
        """(A, K) True where `positives` is not padding. None if nothing is padded."""
        if self.facts.padded:
            return self.positives >= 0
        return None

    @property
    def _free(self) -> tuple[int, int]:
        """The number of candidates that may be negatives, and of excluded ones listed among them."""
        first = self.facts.first_negative
        # Positives lie before the first negative, where there is such a border.
        listed = self.ignored if first else self.excluded
        return self.candidates.shape[0] - first, listed.shape[1]

    @cached_property
    def negative_counts(self) -> Tensor:
        """(A,) number of negatives of each anchor."""
        free, listed = self._free
        if not self.facts.padded:
            return torch.full((self.anchors.shape[0],), free - listed, device=self.anchors.device)
        # A candidate may be listed twice (as a positive and as ignored): count distinct ones.
        order = self.excluded.sort(1).values
        fresh = torch.ones_like(order, dtype=torch.bool)
        fresh[:, 1:] = order[:, 1:] != order[:, :-1]
        return free - (fresh & (order >= self.facts.first_negative)).sum(1)

    @cached_property
    def has_negatives(self) -> bool | None:
        """Return whether any anchor has a negative. None if the answer would need to wait for a device."""
        free, listed = self._free
        if not self.facts.padded or free == 0 or free > listed:
            return free > listed
        if checks.reads_at_once(self.anchors):
            return bool((self.negative_counts > 0).any())
        return None

    @property
    def all_have_negatives(self) -> bool:
        """Return whether every anchor surely has a negative. This reads nothing from a device."""
        return not self.facts.padded and self.has_negatives is True

    @cached_property
    def has_positives(self) -> bool | None:
        """Return whether any anchor has a positive. None if the answer would need to wait for a device."""
        mask = self.positive_mask
        if mask is None or not mask.shape[1]:
            return self.positives.shape[1] > 0
        if checks.reads_at_once(mask):
            return bool(mask.any())
        return None

    def negative_mask(self) -> Tensor:
        """Return the full (A, C) mask, True at the negatives of each anchor."""
        return ~self.excluded_mask()

    def excluded_mask(self) -> Tensor:
        """Return the full (A, C) mask, True at the candidates that are not negatives of the anchor."""
        mask = indices.mask_of(self.excluded, len(self.candidates))
        mask[:, : self.first_negative] = True
        return mask


Indexed = tuple[PairLayout, Tensor, Tensor, Tensor, Tensor]  # layout, anchors, candidates, positives, ignored


def _of_queries(views: Sequence[Tensor]) -> Indexed:
    """Return the pairs of `from_views(negatives="queries")`."""
    batch, keys = len(views[0]), (len(views) - 1) * len(views[0])
    z = torch.cat([*views[1:], views[0]])
    own = torch.arange(batch, device=z.device).unsqueeze(1)
    first, *others = [(number, batch) for number in range(len(views))]
    layout = PairLayout((first,), (*others, first), first_negative=keys, among=batch, fewest=len(others), shared=1)
    return layout, views[0], z, own + torch.arange(0, keys, batch, device=z.device), own + keys


def _of_view_pairs(views: Sequence[Tensor]) -> Indexed:
    """Return the pairs of `from_views(negatives="view_pairs")`."""
    count, batch = len(views), len(views[0])
    if count == 2:
        own = torch.arange(batch, device=views[0].device).unsqueeze(1)
        return PairLayout(((0, batch),), ((1, batch),), fewest=1, shared=1), views[0], views[1], own, own[:, :0]
    z = torch.cat(list(views))
    first, partners = zip(*combinations(range(count), 2), strict=True)
    anchors = torch.cat([views[x] for x in first])
    runs = tuple([(x, batch) for x in first]), tuple([(x, batch) for x in range(count)])
    layout = PairLayout(*runs, fewest=1, shared=count - 1, view_pairs=True, partners=partners)
    return layout, anchors, z, *indices.partners_of_views(count, batch, z.device)


def with_queue(runs: Runs, count: int) -> Runs:
    """Return the runs with a queue of `count` rows after them."""
    if not count:
        return runs
    return (*runs, (NO_VIEW, count))


def views_of(runs: Runs, device: torch.device) -> Tensor:
    """Return the view of each row of the runs."""
    return torch.cat([torch.full((rows,), view, device=device) for view, rows in runs])


def to_rows(values: Tensor, runs: Runs, batch: int) -> Tensor:
    """Return for each row of all runs, which are equally long, the value of its instance. `values` are (batch,)."""
    share = runs[0][1] // batch
    if share > 1:
        values = values.repeat_interleave(share)
    return torch.cat([values] * len(runs))  # takes a third of the time of `repeat`


def other_views(own: Tensor, batch: int) -> Tensor:
    """Return (V batch, V - 1), the rows of the other views of each row's instance. `own` are all rows, (V batch, 1)."""
    others = [own.roll(-start, 0) for start in range(batch, own.shape[0], batch)]
    if len(others) == 1:
        return others[0]
    return torch.cat(others, 1)
