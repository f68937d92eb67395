"""Pairs: anchors, candidates, positives and ignored rows. This is the input of every objective."""

from dataclasses import replace
from typing import Any, Literal, Self

import torch
from torch import Tensor

from dipole.core.objectives import checks
from dipole.core.objectives.constructors import Constructors
from dipole.core.objectives.indices import joined, pads_last
from dipole.core.objectives.pair_data import NO_VIEW, PairLayout, Runs, constructor, with_queue
from dipole.core.utils.errors import PairsError

OF_ANCHORS = ("anchors", "positives", "ignored", "labels", "index", "weights")
OF_CANDIDATES = ("candidates", "candidate_labels", "candidate_index")


class Pairs(Constructors):
    """Embeddings with the indices of positives and ignored candidates. This is the input of every objective.

    The negatives of anchor i are all candidates that are neither its positives nor ignored for it.

    Args:
        anchors: (A >= 1, d) raw embeddings of a floating dtype, before normalisation.
        candidates: (C >= 1, d), of the same dtype and device. Pass the same tensor as `anchors` if every view is both
            (SimCLR).
        positives: (A, K) torch.long, indices into candidates, distinct in a row, padded with -1.
        ignored: (A, E) torch.long, candidates that are neither positives nor negatives of the anchor, padded with -1.
        labels: (A,) class of each anchor, for supervised references and diagnostics only. Negative if unknown.
        views: True if positives are views of the anchor's own instance, False if they are other instances
            (neighbouring sentences, members of a block). Other instances count as pairs of distinct instances.
        candidate_labels: (C,) class of each candidate. The default is `labels` if there are as many anchors.
        index: (A,) instance of each anchor: its index in the data set if the domain gives one, else its row in the
            batch of all ranks.
        candidate_index: (C,) instance of each candidate. -1 for a candidate outside the batch.
        weights: (A,) weight of each anchor, or (A, K) weight or soft target of each positive, finite and >= 0. The
            constructors also take one row for each of the B instances, (B,) or (B, K), as they take labels. Means are
            then sum w L / sum w, so only ratios of weights matter. The negatives of an anchor have no weights. See
            `Objective.weighting`.
        layout: facts about the indices from a constructor. With None the indices are checked.

    With several ranks the anchors are this rank's. The candidates, with their labels, views and index, are from all
    ranks.

    Raises:
        PairsError: shapes, devices, dtypes or ranges of indices do not fit. The message names the argument. Label
            values, and whether positives are distinct in a row, are not checked.

    Example:
        >>> z = torch.randn(6, 4)
        >>> dipole.Pairs.from_labels(z, torch.tensor([0, 0, 1, 1, 2, 2])).positives.flatten().tolist()
        [1, 0, 3, 2, 5, 4]
    """

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
        checks.check_matrix("queries", queries)
        checks.check_choice("queue_of", queue_of, "queries", "keys")
        checks.check_flag("intra_batch", intra_batch)
        checks.check_flag("batch_negatives", batch_negatives)
        batch = len(queries)
        checks.check_tensor("keys", keys, "(B, d) or (B, K, d)")
        if keys.ndim == 2:
            keys = keys.unsqueeze(1)
        if keys.ndim != 3 or len(keys) != batch or keys.shape[1] == 0:
            got = checks.shape_of(keys)
            raise PairsError(f"keys must be (B, d) or (B, K, d) with B = {batch} like queries, got {got}.")
        checks.check_matrix("keys", keys[:, 0], ("queries", queries))
        behind = checks.check_queue(queue, ("queries", queries))
        if queue is None or behind:
            checks.check_row_values(queue_labels, behind, "queue_labels")
        count = keys.shape[1]
        own = torch.arange(batch, device=queries.device).unsqueeze(1)
        listed = ignored is not None
        if ignored is None:
            ignored = own[:, :0]
        checks.check_indices("ignored", ignored, queries, count * batch + behind)
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
        instances = labels, index, weights
        pairs = cls._of_batch(layout, queries, candidates, positives, ignored, *instances, outside_labels=queue_labels)
        if intra_batch:
            return pairs.with_intra_batch()
        return pairs

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
        checks.check_count("count", count, 0)
        facts = self.facts
        fewest = None if facts.fewest is None else min(count, facts.fewest)
        return replace(
            self,
            positives=self.positives[:, :count],
            weights=self.weights if self.weights is None or self.weights.ndim == 1 else self.weights[:, :count],
            ignored=torch.cat([self.ignored, self.positives[:, count:]], 1),
            layout=replace(facts, fewest=fewest, padded=True),  # ignored ones may lie before the first negative
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
        checks.check_index_shape("positives", positives, self.anchors)
        if self.weights is not None and self.weights.ndim == 2:
            raise PairsError("with_positives: the weights (A, K) belong to the old positives. Give weights (A,).")
        return replace(
            self,
            positives=pads_last(positives),
            views=False,
            layout=replace(self.facts, fewest=None, padded=True, mutual=False, shared=None, by_label=False, of_block=0),
        )

    def against(self, candidates: Tensor, positives: Tensor, ignored: Tensor, **layout: Any) -> Self:
        """Replace the candidates by others that belong to no view, such as class vectors or means of rows.

        Args:
            candidates: (C, d), in the precision of the anchors, at least float32.
            positives: (A, K) torch.long, indices of these candidates, padded with -1. The values are not checked.
            ignored: (A, E) torch.long, likewise.
            layout: further facts about the indices, fields of `PairLayout`.
        """
        return replace(
            self,
            candidates=candidates,
            positives=positives,
            ignored=ignored,
            candidate_labels=None,
            candidate_index=None,
            layout=PairLayout(self.facts.anchor_views, ((NO_VIEW, len(candidates)),), fewest=1, **layout),
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
        checks.check_index_shape("ignored", ignored, self.anchors)
        return replace(
            self,
            ignored=torch.cat([self.ignored, ignored], 1),
            layout=replace(self.facts, padded=self.facts.padded or not distinct, mutual=False, of_block=0),
        )

    def added(self) -> Self:
        """Return the same pairs, whose terms are added over the several Pairs of a batch instead of averaged.

        CMC's authors add the two directions. All Pairs of the batch must be marked.
        """
        marked = replace(self, layout=replace(self.facts, added=True))
        object.__setattr__(marked, "call", self.call)  # several ranks repeat it, and mark the result
        return marked

    def narrow(self, own: slice, total: int) -> Self:
        """Keep only the anchors from some rows of a batch of `total` rows. All candidates remain.

        The anchors are ordered run by run, as in `PairLayout`, with the same number of anchors for each row.

        Args:
            own: rows of the batch, start and stop.
            total: number of rows of the whole batch. It divides the number of anchors in each run.

        Returns:
            Pairs with fewer anchors and the same candidates.
        """
        facts, runs = self.facts, self.facts.anchor_views
        share = len(self.anchors) // (len(runs) * total)
        rows = len(self.anchors) // len(runs)
        parts = [slice(n * rows + own.start * share, n * rows + own.stop * share) for n in range(len(runs))]
        mine = (own.stop - own.start) * share
        changes: dict[str, Any] = {
            name: torch.cat([values[part] for part in parts])
            for name in OF_ANCHORS
            if (values := getattr(self, name)) is not None
        }
        layout = replace(facts, anchor_views=tuple((view, mine) for view, _ in runs), among=0, mutual=False)
        return replace(self, **changes, layout=layout)

    def with_intra_batch(self) -> Self:
        """Add the anchors to the candidates, so that the other anchors become negatives (CACR, App. C.2).

        Anchors that are already candidates are not added again. Rows of the same instance are never negatives.

        Returns:
            Pairs with the same anchors. The added anchors follow the C candidates.
        """
        facts, count = self.facts, len(self.anchors)
        if facts.sides or facts.partners:
            # The first ignored rows are those of the anchor's side or view, itself first.
            batch = facts.candidate_views[0][1]
            ignored = torch.cat([self.ignored[:, :1], self.ignored[:, batch:]], 1)
            return replace(self, ignored=ignored, layout=replace(facts, sides=False, partners=()))
        if count == facts.among or facts.view_pairs:
            return self
        runs = facts.anchor_views
        batch = runs[0][1]
        row = torch.arange(count, device=self.anchors.device).unsqueeze(1)
        # Runs have the same order, so the same position in every run is the same instance.
        mates = row % batch + torch.arange(len(runs), device=row.device) * batch  # (A, runs)
        place = mates - facts.among
        added = torch.where(place >= 0, place + len(self.candidates), -1)
        changes: dict[str, Any] = {}
        for of_candidates, of_anchors in zip(OF_CANDIDATES, ("anchors", "labels", "index"), strict=True):
            values, more = getattr(self, of_candidates), getattr(self, of_anchors)
            known_to_both = values is not None and more is not None
            changes[of_candidates] = torch.cat([values, more[facts.among :]]) if known_to_both else None
        return replace(
            self,
            **changes,
            ignored=torch.cat([self.ignored, added], 1),
            layout=replace(
                facts,
                candidate_views=facts.candidate_views + runs[facts.among // batch :],
                among=count,
                padded=facts.padded or facts.among > 0,
                mutual=False,
            ),
        )

    def within_sides(self) -> tuple[Self, ...]:
        """Return pairs of different instances within each side, if anchors and candidates come from two encoders.

        The first Pairs keep the anchors and positives. The negatives are the other anchors and the rows of the anchors'
        queue, if there is one. That queue holds past embeddings from a copy of the anchors' encoder (Wang & Isola's
        code for MoCo, and CACR App. C.2). Without such a queue there are second Pairs, whose anchors are the
        candidates. They have no positives. Their negatives are the other candidates and the queue of the candidates'
        encoder (the memory bank of the other half in CMC). If one encoder made both sides, the result is these pairs
        unchanged. Call it on the pairs of all ranks.

        Returns:
            One or two Pairs.
        """
        facts, count = self.facts, len(self.anchors)
        if facts.sides:
            return self._direction().within_sides()
        of_anchors = {view for view, _ in facts.anchor_views}
        runs = tuple(run for run in facts.candidate_views if run[0] != NO_VIEW and run[0] not in of_anchors)
        if not runs or facts.view_pairs:
            return (self,)
        total = sum(length for _, length in runs)  # they come before all other candidates
        behind = facts.queue if facts.queue_of_keys else 0
        widened = self.with_intra_batch()
        of_queries = facts.queue > behind
        queries = replace(
            widened,
            views=True,  # neighbours are on the other side, so positives are not pairs within this side
            layout=replace(widened.facts, first_negative=total if of_queries else len(widened.candidates) - count),
        )
        paired_rows = self.layout is not None and self.views  # key k of query b is candidate k B + b
        doubles = self.ignored if paired_rows and facts.padded else self.ignored[:, :0]
        if doubles.shape[1]:
            # A duplicate on the other side is also a duplicate on this side.
            first = len(widened.candidates) - count
            mates = torch.where((doubles >= 0) & (doubles < total), doubles % count + first, -1)
            queries = queries.without(mates)
        if of_queries:
            return (queries,)
        own = torch.arange(total, device=self.candidates.device).unsqueeze(1)
        if paired_rows:
            own = own % count + torch.arange(len(runs), device=own.device) * count
        listed = doubles.shape[1] > 0
        ignored = own
        if listed:
            doubles = torch.where(doubles < total + behind, doubles, -1)
            ignored = torch.cat([own, doubles.repeat(total // count, 1)], 1)
        keys = self.candidates[: total + behind]
        side = self._apart(keys[:total], keys[total:], ignored, self.candidate_index, runs, padded=listed)
        if paired_rows and self.weights is not None and self.weights.ndim == 1:
            side = replace(side, weights=self.weights.repeat(total // count))
        if side.has_negatives is False:
            return (queries,)
        return queries, side

    @property
    def split_by_view(self) -> bool:
        """Return whether one encoder made several views. Then `within_views` splits all rows and not only the keys."""
        facts = self.facts
        of_anchors = {view for view, _ in facts.anchor_views}
        others = {view for view, _ in facts.candidate_views} - of_anchors - {NO_VIEW}
        return self.views and not facts.sides and (facts.view_pairs or (len(of_anchors) > 1 and not others))

    def within_views(self) -> tuple[Self, ...]:
        """Return pairs of different instances within each view, in addition to those of `within_sides()[0]`.

        With several views from one encoder (`split_by_view`) there are Pairs for each view, without positives. Their
        negatives are the other instances of the view and the queue. With two encoders the second Pairs of
        `within_sides` are split into one for each view of the keys. Call it on the pairs of all ranks.

        Returns:
            Pairs for each view, or () if the first Pairs of `within_sides` are all.
        """
        if not self.split_by_view:
            return tuple(part for side in self.within_sides()[1:] for part in side._each_view())
        if not self.facts.view_pairs:
            return self._each_view()
        batch, index = self.facts.candidate_views[0][1], self.candidate_index
        assert index is not None  # a constructor made these pairs
        return type(self).from_views(self.candidates.split(batch), index=index[:batch])._each_view()

    def _apart(
        self, z: Tensor, queue: Tensor, ignored: Tensor, index: Tensor | None, runs: Runs, *, padded: bool
    ) -> Self:
        """Return pairs of rows (n, d) with one another and with a queue, without positives. `index` (>= n,)."""
        count, behind, candidate_index = len(z), len(queue), None
        if index is not None:
            index = index[:count]
            candidate_index = torch.cat([index, index.new_full((behind,), -1)])
        layout = PairLayout(
            runs,
            with_queue(runs, behind),
            among=count,
            fewest=0,
            padded=padded,
            mutual=not padded and not behind,
            queue=behind,
        )
        y, none = joined(z, queue), ignored[:, :0]
        return type(self)(z, y, none, ignored, index=index, candidate_index=candidate_index, layout=layout)

    def _each_view(self) -> tuple[Self, ...]:
        """Return the pairs of each run of anchors with itself and the queue, without positives."""
        facts, start, found = self.facts, 0, []
        if len(facts.anchor_views) == 1 and not self.positives.shape[1]:
            return (self,)
        # Otherwise more rows of the anchor's own view are excluded than itself.
        plain = not facts.padded and self.excluded.shape[1] == len(facts.anchor_views)
        queue = facts.past
        for view, length in facts.anchor_views:
            mine, runs = slice(start, start + length), ((view, length),)
            ignored = torch.arange(length, device=self.anchors.device).unsqueeze(1)
            if not plain:
                listed = self.excluded[mine]
                place = start + facts.queue * (start >= queue.start)  # of anchors behind the queue (`with_intra_batch`)
                inside = (listed >= place) & (listed < place + length) & (start < facts.among)
                past = (listed >= queue.start) & (listed < queue.stop)
                elsewhere = torch.where(past, listed - queue.start + length, -1)
                ignored = torch.cat([ignored, torch.where(inside, listed - place, elsewhere)], 1)
            index = None if self.index is None else self.index[mine]
            queued = self.candidates[queue]
            found.append(self._apart(self.anchors[mine], queued, ignored, index, runs, padded=not plain))
            start += length
        return tuple(found)

    def _direction(self) -> Self:
        """Return pairs with the first side as anchors and the second side as candidates."""
        facts, batch = self.facts, self.facts.anchor_views[0][1]
        sides = slice(0, batch), slice(batch, 2 * batch)
        halves: dict[str, Any] = {
            name: values[side]
            for names, side in zip((OF_ANCHORS, OF_CANDIDATES), sides, strict=True)
            for name in names
            if (values := getattr(self, name)) is not None
        }
        halves["ignored"] = halves["ignored"][:, batch:]  # after those of its own side
        padded = facts.padded or halves["ignored"].shape[1] > 0
        for name in ("positives", "ignored"):
            halves[name] = (halves[name] - batch).clamp_min(-1)
        layout = PairLayout(((0, batch),), ((1, batch),), fewest=facts.fewest, padded=padded)
        return type(self)(**halves, views=self.views, layout=layout)
