"""Constructors of pairs of views: two encoders, several views or crops of each instance, columns of a table."""

from collections.abc import Sequence
from itertools import combinations
from typing import Literal, Self, get_args

import torch
from torch import Tensor

from dipole.core.objectives.checks import (
    as_views,
    check_alike,
    check_indices,
    check_matrix,
    check_queue,
    check_row_values,
    check_tensor,
    shape_of,
)
from dipole.core.objectives.indices import (
    PairLayout,
    joined,
    other_crops,
    other_views,
    own_side,
    partners_of_views,
    with_queue,
)
from dipole.core.objectives.pair_data import OfRows, PairData, constructor
from dipole.core.utils.errors import PairsError
from dipole.core.utils.text import counted

ViewNegatives = Literal["all", "queries", "view_pairs"]


class PairsOfViews(PairData):
    """The constructors of `Pairs` whose positives are views of the anchor's own instance."""

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
            A = V (V - 1) / 2 B anchors, C = V B candidates and K = 1. Two views are `cross(views[0], views[1])`. The
            attraction of `cacr` averages over all V views and their V - 1 positives. With "queries", A = B anchors,
            C = V B candidates (the other views, then the first ones) and K = V - 1.

        Raises:
            PairsError: there are fewer than two views, views differ in shape, dtype or device, labels or index are not
                (B,), or `negatives` is invalid.
        """
        views = as_views(views, "from_views needs a list of at least two views, each (B, d).")
        if negatives not in get_args(ViewNegatives):
            raise PairsError(f"negatives must be 'view_pairs', 'all' or 'queries', got {negatives!r}.")
        check_alike(views)
        if negatives == "view_pairs" and len(views) == 2:
            return cls.cross(views[0], views[1], labels=labels, index=index, weights=weights)
        if negatives == "queries":
            keys = torch.stack(list(views[1:]), 1)
            return cls.cross(views[0], keys, None, True, labels, batch_negatives=False, index=index, weights=weights)
        of_rows = OfRows(labels, index, weights)
        count, batch = len(views), len(views[0])
        z = torch.cat(views)  # (VB, d), view-major
        runs = tuple([(number, batch) for number in range(count)])
        if negatives == "view_pairs":
            first, partners = zip(*combinations(range(count), 2), strict=True)
            anchors = torch.cat([views[x] for x in first])
            anchor_runs = tuple([(x, batch) for x in first])
            layout = PairLayout(anchor_runs, runs, fewest=1, shared=count - 1, view_pairs=True, partners=partners)
            return cls._of_batch(batch, layout, anchors, z, *partners_of_views(count, batch, z.device), of_rows)
        layout = PairLayout(runs, runs, among=len(z), fewest=count - 1, mutual=True, shared=count - 1)
        own = torch.arange(count * batch, device=z.device)
        steps = own[batch::batch]  # to the same place of each other view
        own = own.unsqueeze(1)
        return cls._of_batch(batch, layout, z, z, (own + steps) % len(z), own, of_rows)

    @classmethod
    @constructor
    def cross(
        cls,
        queries: Tensor,
        keys: Tensor,
        queue: Tensor | None = None,
        intra_batch: bool = False,
        labels: Tensor | None = None,
        ignored: Tensor | None = None,
        *,
        batch_negatives: bool = True,
        queue_labels: Tensor | None = None,
        queue_of: Literal["queries", "keys"] = "queries",
        index: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> Self:
        """One direction between two encoders: MoCo, CMC, the CURL agent.

        Args:
            queries: (B, d), the anchors.
            keys: (B, d) with row b the positive of query b, or (B, K >= 1, d) for K positives each.
            queue: (Q, d) further negatives, for example the keys of earlier batches, the same on every rank. An empty
                queue counts as None.
            intra_batch: add the other queries to the negatives (CACR, App. C.2).
            labels: (B,) class of each query and its keys.
            ignored: (B, E) candidates that are not negatives, such as exact duplicates, padded with -1. Key k of query
                b is candidate k B + b, and the queue follows.
            batch_negatives: False leaves the keys of the other queries out. Negatives are then the queue and, with
                `intra_batch`, the other queries (CACR Algorithm 3, or a memory bank).
            queue_labels: (Q,) class of each row of the queue. A queue without them leaves all candidates without
                labels.
            queue_of: the encoder of the queue. "queries" means the encoder of the queries or a copy of it (MoCo).
                "keys" means another encoder (the other half's memory bank in CMC). Only objectives that compare rows
                within a side use it.
            index: (B,) index of each query in the data set.
            weights: (B,) of rows or (B, K) of pairs, see `Pairs`.

        Returns:
            Pairs of A = B anchors, C = K B + Q candidates (K B + Q + B with `intra_batch`) and K positives.

        Raises:
            PairsError: rows differ from the queries in number, width, dtype or device, labels, index or queue_labels
                have a wrong length, an index in `ignored` is out of range, or `queue_of` is invalid.
        """
        check_matrix("queries", queries)
        if queue_of not in ("queries", "keys"):
            raise PairsError(f"queue_of must be 'queries' or 'keys', got {queue_of!r}.")
        batch = len(queries)
        check_tensor("keys", keys, "(B, d) or (B, K, d)")
        if keys.ndim == 2:
            keys = keys.unsqueeze(1)
        if keys.ndim != 3 or len(keys) != batch or keys.shape[1] == 0:
            raise PairsError(f"keys must be (B, d) or (B, K, d) with B = {batch} like queries, got {shape_of(keys)}.")
        check_matrix("keys", keys[:, 0], ("queries", queries))
        behind = check_queue(queue, ("queries", queries))
        if queue is None or behind:
            check_row_values(queue_labels, behind, "queue_labels")
        count = keys.shape[1]
        own = torch.arange(batch, device=queries.device).unsqueeze(1)
        listed = ignored is not None
        if ignored is None:
            ignored = own[:, :0]
        check_indices("ignored", ignored, queries, count * batch + behind)
        layout = PairLayout(
            ((0, batch),),
            with_queue(tuple([(number + 1, batch) for number in range(count)]), behind),
            first_negative=0 if batch_negatives else count * batch,
            fewest=count,
            padded=listed,
            shared=1,
            queue=behind,
            queue_of_keys=behind > 0 and queue_of == "keys",
        )
        candidates = joined(keys.transpose(0, 1).flatten(0, 1), queue)
        positives = own + torch.arange(0, count * batch, batch, device=own.device)
        of_rows = OfRows(labels, index, weights)
        pairs = cls._of_batch(batch, layout, queries, candidates, positives, ignored, of_rows, behind, queue_labels)
        if intra_batch:
            return pairs.with_intra_batch()
        return pairs

    @classmethod
    @constructor
    def both(
        cls,
        a: Tensor,
        b: Tensor,
        labels: Tensor | None = None,
        index: Tensor | None = None,
        *,
        weights: Tensor | None = None,
    ) -> Self:
        """Two encoders in both directions (CLIP, Radford et al. 2021): match a with its b, and b with its a.

        Anchors are the rows of both sides, so a term averages over both directions. `infonce` on these pairs is CLIP's
        symmetric cross entropy. Rows of an anchor's own side are not negatives.

        Args:
            a: (B, d), for example images.
            b: (B, d), row i the partner of a's row i, for example captions.
            labels: (B,) class of each pair.
            index: (B,) index of each pair in the data set.
            weights: (B,) of rows or (B, K) of pairs, see `Pairs`.

        Returns:
            Pairs of A = C = 2 B rows, with the rows of a first, and K = 1. Each anchor ignores the B rows of its own
            side.

        Raises:
            PairsError: a and b differ in rows, width, dtype or device, or labels or index are not (B,).
        """
        check_matrix("a", a)
        check_matrix("b", b, ("a", a))
        if len(a) != len(b):
            raise PairsError(f"a and b must have as many rows, got {len(a)} and {len(b)}.")

        z, batch = torch.cat([a, b]), len(a)
        runs = ((0, batch), (1, batch))
        layout = PairLayout(runs, runs, among=2 * batch, fewest=1, mutual=True, shared=1, sides=True)
        positives, ignored = other_views(2, batch, z.device), own_side(batch, z.device)
        return cls._of_batch(batch, layout, z, z, positives, ignored, OfRows(labels, index, weights))

    @classmethod
    @constructor
    def from_columns(
        cls,
        anchor: Tensor,
        positive: Tensor,
        negatives: Tensor | Sequence[Tensor] | None = None,
        labels: Tensor | None = None,
        index: Tensor | None = None,
        *,
        negatives_of: Literal["batch", "own"] = "batch",
        batch_negatives: bool = True,
        ignored: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> Self:
        """Columns of a table (anchor, positive, negatives ...): hard negatives in addition to in-batch negatives.

        The candidates of every anchor are all positives and all hard negatives of the batch, as in
        sentence-transformers' MultipleNegativesRankingLoss. With several ranks the hard negatives are gathered with
        gradient, unlike a queue, which is the same on every rank.

        Args:
            anchor: (B, d), the anchors.
            positive: (B, d), row b the positive of anchor b.
            negatives: hard negatives: None, (B, d) for one per anchor, (B, n, d), or a sequence of n columns (B, d).
            labels: (B,) class of each anchor and its positive. The classes of the hard negatives are unknown.
            index: (B,) index of each anchor in the data set.
            negatives_of: "batch" uses the hard negatives of the whole batch for every anchor. "own" uses only the
                anchor's own hard negatives, in addition to the other anchors' positives.
            batch_negatives: False leaves the positives of the other anchors out, so only hard negatives count.
            ignored: (B, E) candidates that are not negatives, such as a copy of the positive, padded with -1. Candidate
                c B + b is row b of column c. Column 0 holds the positives.
            weights: (B,) of rows or (B, K) of pairs, see `Pairs`.

        Returns:
            Pairs of A = B anchors, C = (1 + n) B candidates and K = 1.

        Raises:
            PairsError: columns differ in rows, width, dtype or device, `batch_negatives=False` is given without
                negatives, an index in `ignored` is out of range, or `negatives_of` is invalid.
        """
        check_matrix("anchor", anchor)
        check_matrix("positive", positive, ("anchor", anchor))
        batch = len(anchor)
        hard = _columns(negatives, anchor)  # (B, n, d)
        count = hard.shape[1]
        if len(positive) != batch:
            raise PairsError(f"positive must have {counted(batch, 'row')} like anchor, got {len(positive)}.")
        if negatives_of not in ("batch", "own"):
            raise PairsError(f"negatives_of must be 'batch' or 'own', got {negatives_of!r}.")
        if not batch_negatives and not count:
            raise PairsError("from_columns(batch_negatives=False) needs negatives: nothing else would repel.")
        row = torch.arange(batch, device=anchor.device)
        own = row.unsqueeze(1)
        if ignored is None:
            ignored = own[:, :0]
        check_indices("ignored", ignored, anchor, (1 + count) * batch)
        if negatives_of == "own" and count:
            # The other rows of each column of hard negatives, which follow its own row in cyclic order.
            ahead = (own + row[1:]) % batch  # (B, B-1)
            starts = batch * (1 + torch.arange(count, device=row.device)).view(1, count, 1)
            ignored = torch.cat([ignored, (ahead.unsqueeze(1) + starts).flatten(1)], 1)
        behind = count * batch
        layout = PairLayout(
            ((0, batch),),
            with_queue(((1, batch),), behind),
            first_negative=0 if batch_negatives else batch,
            fewest=1,
            padded=ignored.shape[1] > 0,
            shared=1,
            queue=behind,
            queue_of_keys=count > 0,
        )
        candidates = joined(positive, hard.transpose(0, 1).flatten(0, 1))
        of_rows, unknown = OfRows(labels, index, weights), row.new_full((behind,), -1)
        return cls._of_batch(batch, layout, anchor, candidates, own, ignored, of_rows, behind, unknown)

    @classmethod
    @constructor
    def from_crops(
        cls,
        large: Sequence[Tensor],
        small: Sequence[Tensor] = (),
        queue: Tensor | None = None,
        labels: Tensor | None = None,
        index: Tensor | None = None,
        *,
        weights: Tensor | None = None,
    ) -> Self:
        """SwAV's multi-crop (Caron et al. 2020): every crop is an anchor, large crops and the queue are candidates.

        An anchor's positives are the other large crops of its image.

        Args:
            large: V >= 2 tensors (B, d), row b of each a large crop of image b.
            small: further crops, (B, d) each.
            queue: (Q, d) further candidates, negatives of every anchor, the same on every rank.
            labels: (B,) class of each image. With a queue the candidates have no labels.
            index: (B,) index of each image in the data set.
            weights: (B,) of rows or (B, K) of pairs, see `Pairs`.

        Returns:
            Pairs of A = (V + S) B anchors for S small crops, C = V B + Q candidates and K = V positives. A large crop
            has V - 1 positives and one entry of padding, -1.

        Raises:
            PairsError: there are fewer than two large crops, crops or queue differ in shape, dtype or device, or labels
                or index are not (B,).
        """
        large = as_views(large, "from_crops needs a list of at least two large crops, each (B, d).")
        small = as_views(small, "from_crops takes small crops as a list, each (B, d).", 0)
        check_alike([*large, *small], "crops")
        behind = check_queue(queue, ("crops[0]", large[0]))
        big, every = len(large), len(large) + len(small)
        batch = len(large[0])
        z = torch.cat([*large, *small])  # (V B, d), crop-major
        runs = tuple((number, batch) for number in range(every))
        layout = PairLayout(
            runs,
            with_queue(runs[:big], behind),
            among=big * batch,
            fewest=big - 1,
            padded=True,
            shared=every - 1,
            queue=behind,
        )
        candidates, of_rows = joined(z[: big * batch], queue), OfRows(labels, index, weights)
        return cls._of_batch(batch, layout, z, candidates, *other_crops(big, every, batch, z.device), of_rows, behind)


def _columns(negatives: Tensor | Sequence[Tensor] | None, anchor: Tensor) -> Tensor:
    """Convert hard negatives in any accepted form to (B, n, d)."""
    batch, width = anchor.shape
    if negatives is None:
        return anchor.new_empty(batch, 0, width)
    if isinstance(negatives, Tensor):
        check_tensor("negatives", negatives, "(B, d) or (B, n, d)")
        negatives = negatives.unbind(1) if negatives.ndim == 3 else [negatives]
    found = as_views(negatives, "negatives must be (B, d), (B, n, d) or a list of columns (B, d).", 0)
    for number, each in enumerate(found):
        check_matrix(f"negatives[{number}]", each, ("anchor", anchor))
        if len(each) != batch:
            raise PairsError(f"negatives[{number}] must have {counted(batch, 'row')} like anchor, got {len(each)}.")
    if found:
        return torch.stack(found, 1)
    return anchor.new_empty(batch, 0, width)
