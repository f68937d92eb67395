"""Pairs: anchors, candidates, positives and ignored rows. This is the input of every objective."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, Self

import torch
from torch import Tensor

from dipole.core.objectives.checks import (
    as_views,
    check_alike,
    check_classes,
    check_count,
    check_matrix,
    check_queue,
    check_row_values,
    check_tensor,
    shape_of,
)
from dipole.core.objectives.indices import (
    NO_VIEW,
    PairLayout,
    Runs,
    joined,
    neighbours,
    other_members,
    other_views,
    pads_last,
    same_label,
    with_queue,
)
from dipole.core.objectives.pair_data import OF_ANCHORS, OF_CANDIDATES, OfRows, constructor
from dipole.core.objectives.pair_views import PairsOfViews
from dipole.core.objectives.similarity import full_precision
from dipole.core.utils.errors import PairsError
from dipole.core.utils.text import counted


class Pairs(PairsOfViews):
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
    """

    @classmethod
    @constructor
    def from_labels(
        cls,
        z: Tensor | Sequence[Tensor],
        labels: Tensor,
        index: Tensor | None = None,
        queue: Tensor | None = None,
        queue_labels: Tensor | None = None,
        *,
        weights: Tensor | None = None,
    ) -> Self:
        """Supervised contrast (Khosla et al. 2020): all rows of an anchor's class but itself are its positives.

        Every row is an anchor, and the rows of other classes are its negatives. Classes may have any number of rows. A
        row without another row of its class on any rank has no positive. Means leave such a row out
        (`TermValue.left_out` counts them), but it remains a negative of the others.

        Args:
            z: (B, d), or V views (B, d) each. Views of one instance are also positives of each other.
            labels: (B,) integers, the class of each instance. Negative if unknown: all other instances are then
                negatives.
            index: (B,) index of each instance in the data set.
            queue: (Q, d) further candidates, for example earlier batches, the same on every rank.
            queue_labels: (Q,) classes of the queue. Rows of an anchor's class are also positives.
            weights: (B,) of rows, see `Pairs`. The positives depend on other rows, so weights of pairs are refused.

        Returns:
            Pairs of A = V B anchors and C = V B + Q candidates. Positives are padded with -1 to one width K.

        Raises:
            PairsError: there are no views, views differ in shape, dtype or device, labels are not integers (B,), or
                only one of queue and queue_labels is given.
        """
        views = [z] if isinstance(z, Tensor) else []
        if not isinstance(z, Tensor):
            views = as_views(z, "from_labels needs embeddings (B, d), or a list of views (B, d) each.", 1)
        check_alike(views, "z" if isinstance(z, Tensor) else "views")
        check_classes(labels, len(views[0]))
        behind, count = check_queue(queue, ("z", views[0])), len(views)
        if behind:
            check_classes(queue_labels, behind, "queue_labels")
        elif queue is None and queue_labels is not None:
            raise PairsError("queue_labels are of the rows of a queue, but from_labels has none: give queue=.")

        batch = len(views[0])
        points = joined(*views)  # (VB, d), view-major
        own = torch.arange(count * batch, device=points.device)
        # Each instance of unknown class gets its own class.
        told = labels.to(own.device).repeat(count)
        told = others = torch.where(told < 0, -1 - own % batch, told)
        if behind and queue_labels is not None:
            past = queue_labels.to(own.device)
            others = torch.cat([told, torch.where(past < 0, -1 - batch, past)])  # a class that no row has
        same = same_label(told, others)
        own = own.unsqueeze(1)
        # A row is in its own class, so removing it leaves one entry of padding.
        positives = pads_last(torch.where(same == own, -1, same))[:, :-1]
        runs = tuple((number, batch) for number in range(count))
        layout = PairLayout(
            runs,
            with_queue(runs, behind),
            among=count * batch,
            padded=True,
            mutual=not behind,
            queue=behind,
            by_label=True,
        )
        candidates, of_rows = joined(points, queue), OfRows(labels, index, weights, weighs_pairs=False)
        return cls._of_batch(
            batch, layout, points, candidates, positives, own, of_rows, behind, queue_labels, views=False
        )

    @classmethod
    @constructor
    def from_window(
        cls,
        f: Tensor,
        g: Tensor,
        document: Tensor,
        window: int = 1,
        self_logit: Literal["drop", "zero"] = "drop",
        labels: Tensor | None = None,
        index: Tensor | None = None,
        *,
        weights: Tensor | None = None,
    ) -> Self:
        """Quick Thoughts (Logeswaran & Lee 2018): match f(sentence) with g(neighbours) among g of the batch.

        Args:
            f: (B, d) of consecutive sentences, the anchors.
            g: (B, d) of the same sentences by the other encoder, the candidates.
            document: (B,) long, the document of each sentence; neighbours never cross documents.
            window: sentences on each side that are positives, >= 1.
            self_logit: "drop" leaves the sentence itself out. "zero" keeps it as a negative with logit 0, as in the
                authors' code, by adding the zero vector as a candidate. Terms that count pairs see it at distance
                D = 0.5.
            labels: (B,) class of each sentence.
            index: (B,) index of each sentence in the corpus.
            weights: (B,) of rows, see `Pairs`. The positives depend on other rows, so weights of pairs are refused.

        Returns:
            Pairs of A = B anchors, C = B candidates (B + 1 with "zero") and K = 2 window positives, padded with -1 at
            the ends of documents.

        Raises:
            PairsError: f, g and document differ in rows, f and g differ in width, dtype or device, window is not an
                integer >= 1, or `self_logit` is invalid.
        """
        check_matrix("f", f)
        check_matrix("g", g, ("f", f))
        batch = len(f)
        check_row_values(document, batch, "document")
        if len(g) != batch or document is None:
            raise PairsError(
                f"g and document must have {counted(batch, 'row')} like f, got {len(g)} and {shape_of(document)}."
            )
        check_count("window", window, 1)
        if self_logit not in ("drop", "zero"):
            raise PairsError(f"self_logit must be 'drop' or 'zero', got {self_logit!r}.")
        zero, most = int(self_logit == "zero"), 2 * int(window)
        document = document.to(f.device)
        layout = PairLayout(((0, batch),), with_queue(((1, batch),), zero), fewest=most, padded=True, shared=most)
        candidates = joined(g, g.new_zeros(zero, g.shape[1]))
        positives, own = neighbours(document, int(window)), torch.arange(batch, device=f.device).unsqueeze(1)
        of_rows, unknown = OfRows(labels, index, weights, weighs_pairs=False), document.new_full((1,), -1)
        return cls._of_batch(batch, layout, f, candidates, positives, own, of_rows, zero, unknown, views=False)

    @classmethod
    @constructor
    def from_blocks(
        cls,
        x: Tensor,
        anchors: Literal["first", "all"] = "first",
        candidates: Literal["points", "means"] = "points",
        labels: Tensor | None = None,
        index: Tensor | None = None,
        draw: int = 0,
        *,
        weights: Tensor | None = None,
    ) -> Self:
        """Blocks of similar points (Arora et al., Sec. 6.3): match a point with the rest of its block.

        A block of b in Eq. 12 is x and its b positives, so b + 1 points here.

        Args:
            x: (n >= 1, b + 1, d), n blocks of 2 points or more.
            anchors: "first" takes the first point of each block, "all" takes each point.
            candidates: "points" takes all points. "means" takes for each block the mean of its points other than the
                anchor (only with anchors="first").
            labels: (n,) class of each block.
            index: (n,) number of each block in the data set.
            draw: integer seed for objectives that sample other blocks (`blocks(k=4)`). Change it in every step, and use
                the same on every rank.
            weights: (n,) of rows or (n, K) of pairs, see `Pairs`.

        Returns:
            Pairs of A = n anchors (n (b + 1) with "all"), C = n (b + 1) candidates and K = b positives. With "means",
            C = n and K = 1.

        Raises:
            PairsError: x is not a floating tensor of this shape, `anchors` or `candidates` is invalid, or means are
                combined with anchors="all".
        """
        shape = "(n >= 1, b + 1 >= 2, d >= 1)"
        check_tensor("x", x, shape)
        if x.ndim != 3 or 0 in x.shape or x.shape[1] < 2 or not x.is_floating_point():
            raise PairsError(f"x must be floating-point blocks of shape {shape}, got {shape_of(x)}.")
        if anchors not in ("first", "all") or candidates not in ("points", "means"):
            raise PairsError(
                f"anchors must be 'first' or 'all' and candidates 'points' or 'means', got {anchors!r}, {candidates!r}."
            )
        if candidates == "means" and anchors != "first":
            raise PairsError("from_blocks(candidates='means') needs anchors='first'.")

        n, size, width = x.shape
        first, of_rows = ((0, n),), OfRows(labels, index, weights)
        if candidates == "means":
            own = torch.arange(n, device=x.device).unsqueeze(1)
            layout = PairLayout(first, ((NO_VIEW, n),), fewest=1, shared=1, of_block=1, draw=draw)
            points, means = full_precision(x[:, 0]), full_precision(x[:, 1:]).mean(1)
            return cls._of_batch(n, layout, points, means, own, own[:, :0], of_rows, views=False)
        points = x.reshape(n * size, width)
        own = torch.arange(n * size, device=x.device).view(n, size, 1)
        positives = other_members(n, size, x.device)  # (n, b+1, b)
        run = ((0, n * size),)
        if anchors == "first":
            layout = PairLayout(first, run, among=n, fewest=size - 1, shared=1, of_block=1, draw=draw)
            return cls._of_batch(n, layout, x[:, 0], points, positives[:, 0], own[:, 0], of_rows, views=False)
        most = size - 1
        layout = PairLayout(run, run, among=n * size, fewest=most, mutual=True, shared=most, of_block=size, draw=draw)
        positives, own = positives.flatten(0, 1), own.flatten(0, 1)
        return cls._of_batch(n, layout, points, points, positives, own, of_rows, views=False)

    @classmethod
    @constructor
    def of_points(cls, points: Tensor) -> Self:
        """Use all points as anchors and candidates, without positives. Each other point is a negative.

        Args:
            points: (n >= 1, d) of a floating dtype.

        Returns:
            Pairs of A = C = n and K = 0.

        Raises:
            PairsError: `points` is not such a tensor.
        """
        check_matrix("points", points)

        own = torch.arange(len(points), device=points.device).unsqueeze(1)
        run = ((0, len(points)),)
        layout = PairLayout(run, run, among=len(points), fewest=0, mutual=True, shared=0)
        return cls._of_batch(len(points), layout, points, points, own[:, :0], own, OfRows())

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
        known, count = self.known, len(self.anchors)
        if known.sides:
            return self._direction().within_sides()
        of_anchors = {view for view, _ in known.anchor_views}
        runs = tuple(run for run in known.candidate_views if run[0] != NO_VIEW and run[0] not in of_anchors)
        if not runs or known.view_pairs:
            return (self,)
        total = sum(length for _, length in runs)  # they come before all other candidates
        behind = known.queue if known.queue_of_keys else 0
        widened = self.with_intra_batch()
        of_queries = known.queue > behind
        queries = replace(
            widened,
            views=True,  # neighbours are on the other side, so positives are not pairs within this side
            layout=replace(widened.known, first_negative=total if of_queries else len(widened.candidates) - count),
        )
        paired_rows = self.layout is not None and self.views  # key k of query b is candidate k B + b
        doubles = self.ignored if paired_rows and known.padded else self.ignored[:, :0]
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
        """Whether one encoder made several views, so that `within_views` splits all rows and not only the keys."""
        known = self.known
        of_anchors = {view for view, _ in known.anchor_views}
        others = {view for view, _ in known.candidate_views} - of_anchors - {NO_VIEW}
        return self.views and not known.sides and (known.view_pairs or (len(of_anchors) > 1 and not others))

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
        known, z = self.known, self.candidates
        if not known.view_pairs:
            return self._each_view()
        runs = known.candidate_views
        own = torch.arange(len(z), device=z.device).unsqueeze(1)
        same = torch.cat([own, other_views(len(runs), runs[0][1], z.device)], 1)
        return self._apart(z, z[:0], same, self.candidate_index, runs, padded=False)._each_view()

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
        known, start, found = self.known, 0, []
        if len(known.anchor_views) == 1 and not self.positives.shape[1]:
            return (self,)
        # Otherwise more rows of the anchor's own view are excluded than itself.
        plain = not known.padded and self.excluded.shape[1] == len(known.anchor_views)
        first = sum(length for view, length in known.candidate_views if view != NO_VIEW)
        queue = slice(first, first + known.queue)
        for view, length in known.anchor_views:
            mine, runs = slice(start, start + length), ((view, length),)
            ignored = torch.arange(length, device=self.anchors.device).unsqueeze(1)
            if not plain:
                listed = self.excluded[mine]
                inside = (listed >= start) & (listed < start + length) & (start < known.among)
                past = (listed >= queue.start) & (listed < queue.stop)
                elsewhere = torch.where(past, listed - queue.start + length, -1)
                ignored = torch.cat([ignored, torch.where(inside, listed - start, elsewhere)], 1)
            index = None if self.index is None else self.index[mine]
            queued = self.candidates[queue]
            found.append(self._apart(self.anchors[mine], queued, ignored, index, runs, padded=not plain))
            start += length
        return tuple(found)

    def _direction(self) -> Self:
        """Return pairs with the first side as anchors and the second side as candidates."""
        known, batch = self.known, self.known.anchor_views[0][1]
        sides = slice(0, batch), slice(batch, 2 * batch)
        halves: dict[str, Any] = {
            name: values[side]
            for names, side in zip((OF_ANCHORS, OF_CANDIDATES), sides, strict=True)
            for name in names
            if (values := getattr(self, name)) is not None
        }
        halves["ignored"] = halves["ignored"][:, batch:]  # besides its own side
        padded = known.padded or halves["ignored"].shape[1] > 0
        for name in ("positives", "ignored"):
            halves[name] = (halves[name] - batch).clamp_min(-1)
        layout = PairLayout(((0, batch),), ((1, batch),), fewest=known.fewest, padded=padded)
        return type(self)(**halves, views=self.views, layout=layout)
