"""The constructors of `Pairs` other than `from_views` and `cross`."""

from collections.abc import Sequence
from typing import Literal, Self

import torch
from torch import Tensor

from dipole.core.objectives import checks, indices
from dipole.core.objectives.pair_data import (
    NO_VIEW,
    PairData,
    PairLayout,
    constructor,
    other_views,
    with_queue,
)
from dipole.core.objectives.similarity import full_precision
from dipole.core.utils.errors import PairsError
from dipole.core.utils.text import counted

WIDEST = 10_000
"""Largest window. Positives take 2 window columns."""


class Constructors(PairData):
    """The constructors of `Pairs` other than `from_views` and `cross`."""

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
        if isinstance(z, Tensor):
            name, views = "z", [z]
        else:
            name = "views"
            views = checks.as_views(z, "from_labels needs embeddings (B, d), or a list of views (B, d) each.", 1)
        checks.check_alike(views, name)
        checks.check_classes(labels, len(views[0]))
        behind, count = checks.check_queue(queue, ("z", views[0])), len(views)
        if behind:
            checks.check_classes(queue_labels, behind, "queue_labels")
        elif queue is None and queue_labels is not None:
            raise PairsError("queue_labels are of the rows of a queue, but from_labels has none: give queue=.")

        batch = len(views[0])
        points = indices.joined(*views)  # (VB, d), view-major
        own = torch.arange(count * batch, device=points.device)
        # Each instance of unknown class gets its own class.
        told = labels.to(own.device).repeat(count)
        told = others = torch.where(told < 0, -1 - own % batch, told)
        if behind and queue_labels is not None:
            past = queue_labels.to(own.device)
            others = torch.cat([told, torch.where(past < 0, -1 - batch, past)])  # a class that no row has
        same = indices.same_label(told, others)
        own = own.unsqueeze(1)
        # A row is in its own class, so removing it leaves one entry of padding.
        positives = indices.pads_last(torch.where(same == own, -1, same))[:, :-1]
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
        pairs = layout, points, indices.joined(points, queue), positives, own
        return cls._of_batch(*pairs, labels, index, weights, views=False, outside_labels=queue_labels)

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
            document: (B,) long, the document of each sentence. Neighbours never cross documents.
            window: sentences on each side that are positives, 1 to 10,000.
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
                integer from 1 to 10,000, or `self_logit` is invalid.
        """
        checks.check_matrix("f", f)
        checks.check_matrix("g", g, ("f", f))
        batch = len(f)
        checks.check_row_values(document, batch, "document")
        if len(g) != batch or document is None:
            got = f"{len(g)} and {checks.shape_of(document)}"
            raise PairsError(f"g and document must have {counted(batch, 'row')} like f, got {got}.")
        checks.check_count("window", window, 1, WIDEST)
        checks.check_choice("self_logit", self_logit, "drop", "zero")
        zero, most = int(self_logit == "zero"), 2 * int(window)
        document = document.to(f.device)
        layout = PairLayout(((0, batch),), with_queue(((1, batch),), zero), fewest=most, padded=True, shared=most)
        candidates = indices.joined(g, g.new_zeros(zero, g.shape[1]))
        positives, own = indices.neighbours(document, int(window)), torch.arange(batch, device=f.device).unsqueeze(1)
        pairs = layout, f, candidates, positives, own
        return cls._of_batch(*pairs, labels, index, weights, views=False, outside_labels=-1)

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
            draw: integer seed >= 0 for objectives that sample other blocks (`blocks(k=4)`). Change it in every step,
                and use the same on every rank.
            weights: (n,) of rows or (n, K) of pairs, see `Pairs`.

        Returns:
            Pairs of A = n anchors (n (b + 1) with "all"), C = n (b + 1) candidates and K = b positives. With "means",
            C = n and K = 1.

        Raises:
            PairsError: x is not a floating tensor of this shape, `anchors` or `candidates` is invalid, or means are
                combined with anchors="all".
        """
        shape = "(n >= 1, b + 1 >= 2, d >= 1)"
        checks.check_tensor("x", x, shape)
        if x.ndim != 3 or 0 in x.shape or x.shape[1] < 2 or not x.is_floating_point():
            raise PairsError(f"x must be floating-point blocks of shape {shape}, got {checks.shape_of(x)}.")
        checks.check_choice("anchors", anchors, "first", "all")
        checks.check_choice("candidates", candidates, "points", "means")
        checks.check_count("draw", draw, 0)
        if candidates == "means" and anchors != "first":
            raise PairsError("from_blocks(candidates='means') needs anchors='first'.")

        n, size, width = x.shape
        first, instances = ((0, n),), (labels, index, weights)
        if candidates == "means":
            own = torch.arange(n, device=x.device).unsqueeze(1)
            layout = PairLayout(first, ((NO_VIEW, n),), fewest=1, shared=1, of_block=1, draw=draw)
            points, means = full_precision(x[:, 0]), full_precision(x[:, 1:]).mean(1)
            return cls._of_batch(layout, points, means, own, own[:, :0], *instances, views=False)
        points = x.reshape(n * size, width)
        own = torch.arange(n * size, device=x.device).view(n, size, 1)
        member = own % size
        positives = own - member + (member + torch.arange(1, size, device=x.device)) % size  # (n, b+1, b), cyclic
        run = ((0, n * size),)
        if anchors == "first":
            layout = PairLayout(first, run, among=n, fewest=size - 1, shared=1, of_block=1, draw=draw)
            return cls._of_batch(layout, x[:, 0], points, positives[:, 0], own[:, 0], *instances, views=False)
        most = size - 1
        layout = PairLayout(run, run, among=n * size, fewest=most, mutual=True, shared=most, of_block=size, draw=draw)
        positives, own = positives.flatten(0, 1), own.flatten(0, 1)
        return cls._of_batch(layout, points, points, positives, own, *instances, views=False)

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
        checks.check_matrix("points", points)

        own = torch.arange(len(points), device=points.device).unsqueeze(1)
        run = ((0, len(points)),)
        layout = PairLayout(run, run, among=len(points), fewest=0, mutual=True, shared=0)
        return cls._of_batch(layout, points, points, own[:, :0], own)

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
        checks.check_matrix("a", a)
        checks.check_matrix("b", b, ("a", a))
        if len(a) != len(b):
            raise PairsError(f"a and b must have as many rows, got {len(a)} and {len(b)}.")

        z, batch = torch.cat([a, b]), len(a)
        runs = ((0, batch), (1, batch))
        layout = PairLayout(runs, runs, among=2 * batch, fewest=1, mutual=True, shared=1, sides=True)
        own = torch.arange(2 * batch, device=z.device).unsqueeze(1)
        same_side = own - own % batch + (own + torch.arange(batch, device=z.device)) % batch  # (2B, B), itself first
        return cls._of_batch(layout, z, z, other_views(own, batch), same_side, labels, index, weights)

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
        checks.check_matrix("anchor", anchor)
        checks.check_rows("positive", positive, ("anchor", anchor))
        batch = len(anchor)
        hard = _columns(negatives, anchor)  # (B, n, d)
        count = hard.shape[1]
        checks.check_choice("negatives_of", negatives_of, "batch", "own")
        checks.check_flag("batch_negatives", batch_negatives)
        if not batch_negatives and not count:
            raise PairsError("from_columns(batch_negatives=False) needs negatives: nothing else would repel.")
        row = torch.arange(batch, device=anchor.device)
        own = row.unsqueeze(1)
        if ignored is None:
            ignored = own[:, :0]
        checks.check_indices("ignored", ignored, anchor, (1 + count) * batch)
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
        candidates = indices.joined(positive, hard.transpose(0, 1).flatten(0, 1))
        return cls._of_batch(layout, anchor, candidates, own, ignored, labels, index, weights, outside_labels=-1)

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
        large = checks.as_views(large, "from_crops needs a list of at least two large crops, each (B, d).")
        small = checks.as_views(small, "from_crops takes small crops as a list, each (B, d).", 0)
        checks.check_alike([*large, *small], "crops")
        behind = checks.check_queue(queue, ("crops[0]", large[0]))
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
        candidates, crops = indices.joined(z[: big * batch], queue), indices.other_crops(big, every, batch, z.device)
        return cls._of_batch(layout, z, candidates, *crops, labels, index, weights)


def _columns(negatives: Tensor | Sequence[Tensor] | None, anchor: Tensor) -> Tensor:
    """Convert hard negatives in any accepted form to (B, n, d)."""
    if negatives is None:
        negatives = ()
    if isinstance(negatives, Tensor):
        checks.check_tensor("negatives", negatives, "(B, d) or (B, n, d)")
        negatives = negatives.unbind(1) if negatives.ndim == 3 else [negatives]
    found = checks.as_views(negatives, "negatives must be (B, d), (B, n, d) or a list of columns (B, d).", 0)
    for number, each in enumerate(found):
        checks.check_rows(f"negatives[{number}]", each, ("anchor", anchor))
    if found:
        return torch.stack(found, 1)
    return anchor.new_empty(len(anchor), 0, anchor.shape[1])
