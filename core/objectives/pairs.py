"""Who is an anchor, a candidate, a positive, or dropped: the only thing an objective sees."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from dipole.core.objectives.checks import (
    check_alike,
    check_classes,
    check_count,
    check_index_shape,
    check_indices,
    check_matrix,
    check_numbers,
    check_row_values,
    reads_at_once,
    shape_of,
)
from dipole.core.objectives.classes import same_label
from dipole.core.objectives.embedded import Embedded, Relation
from dipole.core.objectives.indices import (
    absolute,
    column,
    filled,
    instances_of,
    joined,
    numbers,
    other_views,
    own_side,
    padded,
    pads_last,
    relative,
    remembered,
    repeat,
    repeated_numbers,
    runs_of,
)
from dipole.core.utils.errors import PairsError
from dipole.core.utils.text import counted

NO_VIEW = -1
"""The view of a candidate that is no view of an instance of the batch (a queue's, the zero vector)."""


@dataclass(frozen=True)
class Structure:
    """What a constructor knows of its indices without reading them back from the device.

    Args:
        anchor_views: view of each run of anchors and its length; each run goes through the batch once.
        candidate_views: the same of the candidates.
        first_negative: candidates before it are positives of somebody and negatives of nobody.
        among: so many anchors, the first ones, are candidates already.
        fewest: positives that every anchor has (at the end of a document a neighbour may be missing); None where that
            is unknown.
        padded: -1 may stand among positives or dropped, or a candidate may be listed twice.
        partnered: every anchor has a positive, wherever else -1 may stand.
        mutual: anchors are candidates, and i excludes j exactly if j excludes i.
        shared: a candidate is a positive of so many anchors at most; None where that is unknown.
        queue: so many candidates are instances of their own, past embeddings of a queue or hard negatives; they stand
            behind those of the batch.
        queue_of_keys: the encoder of the keys made them; else that of the anchors, or a copy of it.
        sides: anchors and candidates are two views, each of an encoder of its own, and those of an anchor's own side
            are dropped.
        by_label: classes have told who is whose positive.
        of_block: so many anchors come from each block, block after block; 0 where there are no blocks.
        draw: the number that random choices among blocks depend on, the same on every rank.
    """

    anchor_views: tuple[tuple[int, int], ...]
    candidate_views: tuple[tuple[int, int], ...]
    first_negative: int = 0
    among: int = 0
    fewest: int | None = None
    padded: bool = False
    partnered: bool = False
    mutual: bool = False
    shared: int | None = None
    queue: int = 0
    queue_of_keys: bool = False
    sides: bool = False
    by_label: bool = False
    of_block: int = 0
    draw: int = 0


@dataclass(frozen=True, eq=False)
class Pairs:
    """Embeddings and their relations, as every objective receives them.

    The negatives of anchor i are all candidates that are neither its positives nor dropped for it.

    Args:
        anchors: (A >= 1, d) raw embeddings of a floating dtype, before normalisation.
        candidates: (C >= 1, d), of the same dtype and device; the very same tensor as `anchors` where every view is
            both (SimCLR).
        positives: (A, K) torch.long, indices into candidates, distinct in a row; -1 pads.
        dropped: (A, E) torch.long, candidates that are no negatives of the anchor besides its positives; -1 pads.
        labels: (A,) class of each anchor, for supervised references and diagnostics only; negative where unknown.
        views: True if positives are views of the anchor's own instance, False if they are other instances
            (neighbouring sentences, members of a block), which then count as pairs of distinct instances.
        candidate_labels: (C,) class of each candidate; `labels` where there are as many anchors.
        index: (A,) instance of each anchor: its index in the data set where the domain gives one, else its row in the
            batch of all ranks.
        candidate_index: (C,) the same of the candidates; -1 for what is no instance of the batch.
        structure: what a constructor knows of the indices, which it has made itself; None: they are checked.

    Under several ranks anchors are this rank's; candidates, with their labels, views and index, are all ranks'.

    Raises:
        PairsError: shapes, devices, dtypes or ranges of indices do not fit; the message names the argument. (That
            positives are distinct in a row, and what numbers labels are, is not looked at.)
    """

    anchors: Tensor
    candidates: Tensor
    positives: Tensor
    dropped: Tensor
    labels: Tensor | None = None
    views: bool = True
    candidate_labels: Tensor | None = None
    index: Tensor | None = None
    candidate_index: Tensor | None = None
    # None where the indices are somebody's own: they are checked, and nothing is known about them.
    structure: Structure | None = field(default=None, repr=False)
    # The rows that a constructor was given, to pair all ranks' rows alike; a changed copy has none.
    source: Embedded | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.structure is None:
            check_matrix("anchors", self.anchors)
            check_matrix("candidates", self.candidates, ("anchors", self.anchors))
            check_indices("positives", self.positives, self.anchors, len(self.candidates))
            check_indices("dropped", self.dropped, self.anchors, len(self.candidates))
            for name in ("labels", "index"):
                check_row_values(getattr(self, name), len(self.anchors), name)
            for name in ("candidate_labels", "candidate_index"):
                check_row_values(getattr(self, name), len(self.candidates), name, "candidate")
            object.__setattr__(self, "positives", pads_last(self.positives))
            # A constructor says whose labels they are: as many candidates may be others (small crops and a queue).
            if self.candidate_labels is None and len(self.anchors) == len(self.candidates):
                object.__setattr__(self, "candidate_labels", self.labels)
        if self.candidate_index is None and self.anchors is self.candidates:
            object.__setattr__(self, "candidate_index", self.index)

    # Constructors ----------------------------------------------------------------------------------------------------

    @classmethod
    def from_views(
        cls,
        views: Sequence[Tensor],
        labels: Tensor | None = None,
        index: Tensor | None = None,
        negatives: Literal["all", "queries"] = "all",
    ) -> "Pairs":
        """SimCLR with any number of views: the other views of a row's instance are its positives.

        Args:
            views: V >= 2 tensors (B, d) of one shape, dtype and device, row b of each a view of instance b.
            labels: (B,) class of each instance.
            index: (B,) index of each instance in the data set.
            negatives: "all": every row is an anchor, and all views of the other instances are its negatives,
                V (B - 1) of them; "queries": the first views alone are anchors, and those of the other instances their
                negatives, B - 1 of them (CACR Sec. 3.2).

        Returns:
            Pairs of A = V B anchors, which are the candidates, and K = V - 1 positives; with "queries" of A = B
            anchors, C = V B candidates (the other views, then the first ones) and K = V - 1.

        Raises:
            PairsError: fewer than two views, views that differ in shape, dtype or device, labels or index that are not
                (B,), or another word for `negatives`.
        """
        if isinstance(views, Tensor) or len(views) < 2:
            raise PairsError("from_views needs a list of at least two views, each (B, d).")
        if negatives not in ("all", "queries"):
            raise PairsError(f"negatives must be 'all' or 'queries', got {negatives!r}.")
        check_alike(views)
        if negatives == "queries":
            keys = torch.stack(list(views[1:]), 1)
            return cls.cross(views[0], keys, None, True, labels, batch_negatives=False, index=index)
        rows = {f"view{number}": view for number, view in enumerate(views)}

        def relate(rows: dict[str, Tensor]) -> "Pairs":
            each = [rows[f"view{number}"] for number in range(len(views))]
            count, batch = len(each), len(each[0])
            z = torch.cat(each)  # (VB, d), view-major
            classes = repeat(rows.get("labels"), count)
            given: dict[str, Tensor | None] = {"anchors": z, "candidates": z}
            if classes is not None:
                given |= {"labels": classes, "candidate_labels": classes}
            if "index" in rows:
                given["index"] = given["candidate_index"] = repeat(rows["index"], count)
            return fill(_of_views(count, batch, z.device), given)

        return _made(rows, relate, labels, index)

    @classmethod
    def cross(
        cls,
        queries: Tensor,
        keys: Tensor,
        queue: Tensor | None = None,
        intra_batch: bool = False,
        labels: Tensor | None = None,
        dropped: Tensor | None = None,
        *,
        batch_negatives: bool = True,
        queue_labels: Tensor | None = None,
        queue_of: Literal["queries", "keys"] = "queries",
        index: Tensor | None = None,
    ) -> "Pairs":
        """One direction between two encoders: MoCo, CMC, the CURL agent.

        Args:
            queries: (B, d), the anchors.
            keys: (B, d), row b the positive of query b; or (B, K >= 1, d) for K positives each.
            queue: (Q, d) further negatives, for example the keys of earlier batches; every rank holds the same. Of no
                rows it is none.
            intra_batch: add the other queries to the negatives (CACR, App. C.2).
            labels: (B,) class of each query and its keys.
            dropped: (B, E) candidates that are no negatives (exact duplicates, say): key k of query b is candidate
                k B + b, the queue follows; -1 pads.
            batch_negatives: False leaves the keys of the other queries out: negatives are the queue and, with
                `intra_batch`, the other queries (CACR Algorithm 3; a memory bank).
            queue_labels: (Q,) class of each row of the queue; without them candidates have no labels where there is a
                queue.
            queue_of: whose encoder made the queue: "queries", that of the queries or a copy of it (MoCo), or "keys",
                another one (the other half's memory bank in CMC). For objectives that look within a side.
            index: (B,) index of each query in the data set.

        Returns:
            Pairs of A = B anchors, C = K B + Q candidates (K B + Q + B with `intra_batch`) and K positives.

        Raises:
            PairsError: rows that do not fit the queries in number, width, dtype or device, labels, index or
                queue_labels of another length, an index in `dropped` out of range, or another word for `queue_of`.
        """
        check_matrix("queries", queries)
        if queue_of not in ("queries", "keys"):
            raise PairsError(f"queue_of must be 'queries' or 'keys', got {queue_of!r}.")
        batch = len(queries)
        if isinstance(keys, Tensor) and keys.ndim == 2:
            keys = keys.unsqueeze(1)
        if not isinstance(keys, Tensor) or keys.ndim != 3 or len(keys) != batch or keys.shape[1] == 0:
            got = tuple(keys.shape) if isinstance(keys, Tensor) else type(keys).__name__
            raise PairsError(f"keys must be (B, d) or (B, K, d) with B = {batch} like queries, got {got}.")
        check_matrix("keys", keys[:, 0], ("queries", queries))
        if queue is not None and not len(queue):
            queue = queue_labels = None
        if queue is not None:
            check_matrix("queue", queue, ("queries", queries))
        check_row_values(queue_labels, 0 if queue is None else len(queue), "queue_labels")
        count, behind = keys.shape[1], 0 if queue is None else len(queue)
        rows = {"queries": queries, "keys": keys if count > 1 else keys[:, 0]}
        if dropped is not None:
            check_indices("dropped", dropped, queries, count * batch + behind)
            rows |= relative(dropped, batch, count)

        def relate(rows: dict[str, Tensor]) -> "Pairs":
            q, k = rows["queries"], rows["keys"]
            mine = k if count == 1 else k.transpose(0, 1).reshape(count * len(q), -1)
            candidates = mine if queue is None else torch.cat([mine, queue])
            given: dict[str, Tensor | None] = {"anchors": q, "candidates": candidates}
            if "labels" in rows:
                classes = repeat(rows["labels"], count)
                if queue is not None:
                    classes = None if queue_labels is None else joined(classes, queue_labels.to(q.device), 0)
                given |= {"labels": rows["labels"], "candidate_labels": classes}
            if "index" in rows:
                given |= {"index": rows["index"], "candidate_index": padded(repeat(rows["index"], count), behind)}
            if dropped is not None:
                given["dropped"] = absolute(rows, len(q), count)
            known = _of_queries(
                len(q), count, behind, batch_negatives, queue_of == "keys", dropped is not None, q.device
            )
            pairs = fill(known, given)
            return pairs.with_intra_batch() if intra_batch else pairs

        return _made(rows, relate, labels, index)

    @classmethod
    def from_labels(
        cls,
        z: Tensor | Sequence[Tensor],
        labels: Tensor,
        index: Tensor | None = None,
        queue: Tensor | None = None,
        queue_labels: Tensor | None = None,
    ) -> "Pairs":
        """Supervised contrast (Khosla et al. 2020): all rows of an anchor's class but itself are its positives.

        Every row is an anchor, and the rows of other classes are its negatives. Classes may have any number of rows; a
        row without a partner in the batch of all ranks has no positive, so that means leave it out
        (`TermValue.left_out` says how many) while it stays a negative of the others.

        Args:
            z: (B, d); or V views (B, d) each, whose rows of one instance are positives of each other as well.
            labels: (B,) integers, the class of each instance; negative where unknown: no other instance is then a
                positive, and all are negatives.
            index: (B,) index of each instance in the data set.
            queue: (Q, d) further candidates, for example earlier batches; every rank holds the same.
            queue_labels: (Q,) their classes: rows of an anchor's class are positives as well.

        Returns:
            Pairs of A = V B anchors and C = V B + Q candidates; K is one width for all rows, and -1 pads.

        Raises:
            PairsError: no views, views that differ in shape, dtype or device, labels that are no integers (B,), a queue
                without queue_labels, or queue_labels without a queue.
        """
        views = [z] if isinstance(z, Tensor) else list(z)
        if not views:
            raise PairsError("from_labels needs embeddings (B, d), or a list of views (B, d) each.")
        check_alike(views, "z" if isinstance(z, Tensor) else "views")
        check_classes(labels, len(views[0]))
        if queue is not None and not len(queue):
            queue = queue_labels = None
        if queue is not None:
            check_matrix("queue", queue, ("z", views[0]))
            check_classes(queue_labels, len(queue), "queue_labels")
        elif queue_labels is not None:
            raise PairsError("queue_labels are of the rows of a queue, but from_labels has none: give queue=.")
        behind, count = 0 if queue is None else len(queue), len(views)

        def relate(rows: dict[str, Tensor]) -> "Pairs":
            each = [rows[f"view{number}"] for number in range(count)]
            batch = len(each[0])
            points = each[0] if count == 1 else torch.cat(each)  # (VB, d), view-major
            classes = rows["labels"].repeat(count)
            place = repeated_numbers(batch, count, points.device)
            # What is of no known class is a class of its own instance.
            told = torch.where(classes < 0, -1 - place, classes)
            others, candidate_labels = told, classes
            if queue is not None and queue_labels is not None:
                past = queue_labels.to(points.device)
                # A number that no row has.
                others = torch.cat([told, torch.where(past < 0, -1 - batch, past)])
                candidate_labels = torch.cat([classes, past])
            same = same_label(told, others)
            own = numbers(count * batch, points.device).unsqueeze(1)
            # Everybody is of its own class: one entry of each row is padding then.
            positives = pads_last(torch.where(same == own, -1, same))[:, :-1]
            instances = instances_of(rows, batch, points.device).repeat(count)
            runs = tuple((number, batch) for number in range(count))
            return cls(
                points,
                points if queue is None else torch.cat([points, queue]),
                positives=positives,
                dropped=own,
                labels=classes,
                views=False,
                candidate_labels=candidate_labels,
                index=instances,
                candidate_index=instances if queue is None else padded(instances, behind),
                structure=Structure(
                    runs,
                    (*runs, (NO_VIEW, behind)) if behind else runs,
                    among=count * batch,
                    padded=True,
                    mutual=queue is None,
                    queue=behind,
                    by_label=True,
                ),
            )

        return _made({f"view{number}": view for number, view in enumerate(views)}, relate, labels, index)

    @classmethod
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
        dropped: Tensor | None = None,
    ) -> "Pairs":
        """Columns of a table (anchor, positive, negatives ...): hard negatives beside those of the batch.

        Candidates of every anchor are all positives and all hard negatives of the batch, as in sentence-transformers'
        MultipleNegativesRankingLoss. Under several ranks the hard negatives are rows like the others: they are gathered
        with gradient, which a queue, held alike by every rank, is not.

        Args:
            anchor: (B, d), the anchors.
            positive: (B, d), row b the positive of anchor b.
            negatives: hard negatives: none, (B, d) one of each anchor, (B, n, d) or a sequence of n columns (B, d).
            labels: (B,) class of each anchor and its positive; those of the hard negatives are unknown.
            index: (B,) index of each anchor in the data set.
            negatives_of: "batch": the hard negatives of the whole batch repel every anchor; "own": its own ones alone,
                besides the other anchors' positives.
            batch_negatives: False leaves the positives of the other anchors out: hard negatives alone repel.
            dropped: (B, E) candidates that are no negatives (a second copy of the positive, say): candidate
                c B + b is row b of column c, of which the positives are column 0; -1 pads.

        Returns:
            Pairs of A = B anchors, C = (1 + n) B candidates and K = 1.

        Raises:
            PairsError: columns that differ in rows, width, dtype or device, `batch_negatives=False` without negatives,
                an index in `dropped` out of range, or another word for `negatives_of`.
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
        rows = {"anchor": anchor, "positive": positive}
        if count:
            rows["negatives"] = hard
        if dropped is not None:
            check_indices("dropped", dropped, anchor, (1 + count) * batch)
            rows |= relative(dropped, batch, 1 + count)

        def relate(rows: dict[str, Tensor]) -> "Pairs":
            a, p = rows["anchor"], rows["positive"]
            batch = len(a)
            own = numbers(batch, a.device).unsqueeze(1)
            columns = [p] if not count else [p, rows["negatives"].transpose(0, 1).reshape(count * batch, -1)]
            out = own[:, :0] if dropped is None else absolute(rows, batch, 1 + count)
            if negatives_of == "own" and count:
                # The other rows of each column of hard negatives, which follow its own row in cyclic order.
                ahead = (own + numbers(batch, a.device)[1:]) % batch  # (B, B-1)
                starts = batch * (1 + numbers(count, a.device)).view(1, count, 1)
                out = torch.cat([out, (ahead.unsqueeze(1) + starts).flatten(1)], 1)
            classes, instances = rows.get("labels"), instances_of(rows, batch, a.device)
            return cls(
                a,
                p if not count else torch.cat(columns),
                positives=own,
                dropped=out,
                labels=classes,
                candidate_labels=padded(classes, count * batch),
                index=instances,
                candidate_index=padded(instances, count * batch),
                structure=Structure(
                    ((0, batch),),
                    ((1, batch), (NO_VIEW, count * batch)) if count else ((1, batch),),
                    first_negative=0 if batch_negatives else batch,
                    fewest=1,
                    padded=out.shape[1] > 0,
                    shared=1,
                    queue=count * batch,
                    queue_of_keys=count > 0,
                ),
            )

        return _made(rows, relate, labels, index)

    @classmethod
    def both(cls, a: Tensor, b: Tensor, labels: Tensor | None = None, index: Tensor | None = None) -> "Pairs":
        """Two encoders in both directions (CLIP, Radford et al. 2021): a finds its b among all b, and b its a.

        Anchors are the rows of both sides, so that a term sees both directions, and its mean runs over both: the
        symmetric cross entropy of CLIP is `infonce` of them. Rows of an anchor's own side are no negatives.

        Args:
            a: (B, d), for example images.
            b: (B, d), row i the partner of a's row i, for example captions.
            labels: (B,) class of each pair.
            index: (B,) index of each pair in the data set.

        Returns:
            Pairs of A = C = 2 B rows, those of a first, and K = 1; the B rows of its own side are dropped for each
            anchor.

        Raises:
            PairsError: a and b differ in rows, width, dtype or device, or labels or index are not (B,).
        """
        check_matrix("a", a)
        check_matrix("b", b, ("a", a))
        if len(a) != len(b):
            raise PairsError(f"a and b must have as many rows, got {len(a)} and {len(b)}.")

        def relate(rows: dict[str, Tensor]) -> "Pairs":
            z = torch.cat([rows["a"], rows["b"]])
            given: dict[str, Tensor | None] = {"anchors": z, "candidates": z}
            for name in rows.keys() & {"labels", "index"}:
                given[name] = given[f"candidate_{name}"] = repeat(rows[name], 2)
            return fill(_of_sides(len(rows["a"]), z.device), given)

        return _made({"a": a, "b": b}, relate, labels, index)

    @classmethod
    def from_window(
        cls,
        f: Tensor,
        g: Tensor,
        document: Tensor,
        window: int = 1,
        self_logit: Literal["drop", "zero"] = "drop",
        labels: Tensor | None = None,
        index: Tensor | None = None,
    ) -> "Pairs":
        """Quick Thoughts (Logeswaran & Lee 2018): f(sentence) finds g(neighbours) among g of the batch.

        Args:
            f: (B, d) of consecutive sentences, the anchors.
            g: (B, d) of the same sentences by the other encoder, the candidates.
            document: (B,) long, the document of each sentence; neighbours never cross documents.
            window: sentences on each side that are positives, >= 1.
            self_logit: "drop" leaves the sentence itself out; "zero" keeps it as a negative whose logit is 0, as the
                authors' code does: one more candidate, the zero vector, whose similarity to everything is 0 (for terms
                that count pairs it is a pair at distance D = 0.5).
            labels: (B,) class of each sentence.
            index: (B,) index of each sentence in the corpus.

        Returns:
            Pairs of A = B anchors, C = B candidates (B + 1 with "zero") and K = 2 window positives; -1 pads at the ends
            of documents.

        Raises:
            PairsError: f, g and document differ in rows, f and g in width, dtype or device, window is no integer >= 1,
                or another word for `self_logit`.
        """
        check_matrix("f", f)
        check_matrix("g", g, ("f", f))
        batch = len(f)
        if len(g) != batch or not isinstance(document, Tensor) or document.shape != (batch,):
            raise PairsError(
                f"g and document must have {counted(batch, 'row')} like f, got {len(g)} and {shape_of(document)}."
            )
        check_count("window", window, 1)
        if self_logit not in ("drop", "zero"):
            raise PairsError(f"self_logit must be 'drop' or 'zero', got {self_logit!r}.")
        zero = self_logit == "zero"

        def relate(rows: dict[str, Tensor]) -> "Pairs":
            f, g, document = rows["f"], rows["g"], rows["document"]
            batch = len(f)
            own = torch.arange(batch, device=f.device).unsqueeze(1)
            steps = torch.arange(1, window + 1, device=f.device)
            near = own + torch.cat([-steps.flip(0), steps])  # (B, 2 window)
            inside = (near >= 0) & (near < batch)
            inside &= document[near.clamp(0, batch - 1)] == document.unsqueeze(1)
            classes, instances = rows.get("labels"), instances_of(rows, batch, f.device)
            return cls(
                f,
                torch.cat([g, torch.zeros_like(g[:1])]) if zero else g,
                positives=pads_last(torch.where(inside, near, -1)),
                dropped=own,
                labels=classes,
                views=False,
                candidate_labels=padded(classes, 1) if zero and classes is not None else classes,
                index=instances,
                candidate_index=padded(instances, 1) if zero else instances,
                structure=Structure(
                    ((0, batch),),
                    ((1, batch), (NO_VIEW, 1)) if zero else ((1, batch),),
                    fewest=2 * int(window),
                    padded=True,
                    shared=2 * int(window),
                ),
            )

        return _made({"f": f, "g": g, "document": document.to(f.device)}, relate, labels, index)

    @classmethod
    def from_blocks(
        cls,
        x: Tensor,
        anchors: Literal["first", "all"] = "first",
        candidates: Literal["points", "means"] = "points",
        labels: Tensor | None = None,
        index: Tensor | None = None,
        draw: int = 0,
    ) -> "Pairs":
        """Blocks of similar points (Arora et al., Sec. 6.3): a point finds the rest of its own block.

        A block of b in Eq. 12 is x and its b positives: b + 1 points here.

        Args:
            x: (n >= 1, b + 1, d), n blocks of 2 points or more.
            anchors: "first", the first point of each block is x, or "all", each point in turn.
            candidates: "points", all points; or "means", for each block the mean of its points other than the anchor
                (only with anchors="first").
            labels: (n,) class of each block.
            index: (n,) number of each block in the data set.
            draw: a whole number: what an objective that takes some of the other blocks draws them by (`blocks(k=4)`),
                another in every step, the same on every rank.

        Returns:
            Pairs of A = n anchors (n (b + 1) with "all"), C = n (b + 1) candidates and K = b positives; with "means" C
            = n and K = 1.

        Raises:
            PairsError: x is no floating tensor of this shape, another word for `anchors` or `candidates`, or means with
                anchors="all".
        """
        if not isinstance(x, Tensor) or x.ndim != 3 or not len(x) or x.shape[1] < 2 or not x.is_floating_point():
            raise PairsError(f"x must be floating-point blocks of shape (n >= 1, b + 1 >= 2, d), got {shape_of(x)}.")
        if anchors not in ("first", "all") or candidates not in ("points", "means"):
            raise PairsError(
                f"anchors must be 'first' or 'all' and candidates 'points' or 'means', got {anchors!r}, {candidates!r}."
            )
        if candidates == "means" and anchors != "first":
            raise PairsError("from_blocks(candidates='means') needs anchors='first'.")

        def relate(rows: dict[str, Tensor]) -> "Pairs":
            x, classes = rows["x"], rows.get("labels")
            n, size, width = x.shape
            instances = instances_of(rows, n, x.device)
            if candidates == "means":
                own = torch.arange(n, device=x.device).unsqueeze(1)
                structure = Structure(((0, n),), ((NO_VIEW, n),), fewest=1, shared=1, of_block=1, draw=draw)
                return cls(
                    x[:, 0],
                    x[:, 1:].mean(1),
                    own,
                    own[:, :0],
                    classes,
                    views=False,
                    candidate_labels=classes,
                    index=instances,
                    candidate_index=instances,
                    structure=structure,
                )
            points = x.reshape(n * size, width)
            own = torch.arange(n * size, device=x.device).view(n, size, 1)
            shifts = torch.arange(1, size, device=x.device)
            # Member m of a block has the other b members, in cyclic order, as positives.
            member = torch.arange(size, device=x.device).view(1, size, 1)
            positives = own - member + (member + shifts) % size  # (n, b+1, b)
            of_points = None if classes is None else classes.repeat_interleave(size)
            point_index = instances.repeat_interleave(size)
            run = ((0, n * size),)
            if anchors == "first":
                return cls(
                    x[:, 0],
                    points,
                    positives[:, 0],
                    own[:, 0],
                    classes,
                    views=False,
                    candidate_labels=of_points,
                    index=instances,
                    candidate_index=point_index,
                    structure=Structure(((0, n),), run, among=n, fewest=size - 1, shared=1, of_block=1, draw=draw),
                )
            return cls(
                points,
                points,
                positives.flatten(0, 1),
                own.flatten(0, 1),
                of_points,
                views=False,
                candidate_labels=of_points,
                index=point_index,
                structure=Structure(
                    run, run, among=n * size, fewest=size - 1, mutual=True, shared=size - 1, of_block=size, draw=draw
                ),
            )

        return _made({"x": x}, relate, labels, index)

    @classmethod
    def from_crops(
        cls,
        large: Sequence[Tensor],
        small: Sequence[Tensor] = (),
        queue: Tensor | None = None,
        labels: Tensor | None = None,
        index: Tensor | None = None,
    ) -> "Pairs":
        """SwAV's multi-crop (Caron et al. 2020): every crop is an anchor, large ones (and a queue) are candidates.

        An anchor's positives are the other large crops of its image.

        Args:
            large: V >= 2 tensors (B, d), row b of each a large crop of image b.
            small: further crops, (B, d) each.
            queue: (Q, d) further candidates, negatives of everybody; every rank holds the same.
            labels: (B,) class of each image; where there is a queue the candidates have none.
            index: (B,) index of each image in the data set.

        Returns:
            Pairs of A = (V + S) B anchors for S small crops, C = V B + Q candidates and K = V positives, of which a
            large crop has one padded with -1.

        Raises:
            PairsError: fewer than two large crops, crops or a queue of another shape, dtype or device, or labels or
                index that are not (B,).
        """
        if isinstance(large, Tensor) or len(large) < 2:
            raise PairsError("from_crops needs a list of at least two large crops, each (B, d).")
        check_alike([*large, *small], "crops")
        if queue is not None and not len(queue):
            queue = None
        if queue is not None:
            check_matrix("queue", queue, ("crops[0]", large[0]))
        big, every = len(large), len(large) + len(small)
        behind = 0 if queue is None else len(queue)
        rows = {f"crop{number}": crop for number, crop in enumerate([*large, *small])}

        def relate(rows: dict[str, Tensor]) -> "Pairs":
            each = [rows[f"crop{number}"] for number in range(every)]
            batch = len(each[0])
            z = torch.cat(each)  # (V B, d), crop-major
            targets = z[: big * batch]
            crop = torch.arange(every, device=z.device).view(every, 1, 1)
            image = torch.arange(batch, device=z.device).view(1, batch, 1)
            place = torch.arange(big, device=z.device)
            # A large crop's positives are the next large crops in cyclic order, and padding in its own place.
            turned = torch.where(place < big - 1, (crop + 1 + place) % big, -1)
            other = torch.where(crop < big, turned, place)  # (V, 1, big)
            positives = torch.where(other < 0, -1, other * batch + image).flatten(0, 1)
            own = torch.where(crop < big, crop * batch + image, -1).flatten(0, 1)
            classes, instances = rows.get("labels"), instances_of(rows, batch, z.device)
            target_instances = instances.repeat(big)
            return cls(
                z,
                targets if queue is None else torch.cat([targets, queue]),
                positives,
                own,
                repeat(classes, every),
                candidate_labels=None if queue is not None else repeat(classes, big),
                index=instances.repeat(every),
                candidate_index=target_instances if queue is None else padded(target_instances, behind),
                structure=Structure(
                    tuple((number, batch) for number in range(every)),
                    (*((number, batch) for number in range(big)), *([(NO_VIEW, behind)] if behind else [])),
                    among=big * batch,
                    fewest=big - 1,
                    padded=True,
                    shared=every - 1,
                    queue=behind,
                ),
            )

        return _made(rows, relate, labels, index)

    @classmethod
    def of_points(cls, points: Tensor) -> "Pairs":
        """All points as anchors and candidates without positives: each other point is a negative.

        Args:
            points: (n >= 1, d) of a floating dtype.

        Returns:
            Pairs of A = C = n and K = 0.

        Raises:
            PairsError: points are no such tensor.
        """
        check_matrix("points", points)

        def relate(rows: dict[str, Tensor]) -> "Pairs":
            points = rows["points"]
            own = torch.arange(len(points), device=points.device).unsqueeze(1)
            run = ((0, len(points)),)
            return cls(
                points,
                points,
                positives=own[:, :0],
                dropped=own,
                index=own.squeeze(1),
                structure=Structure(run, run, among=len(points), fewest=0, mutual=True, shared=0),
            )

        return _made({"points": points}, relate, None, None)

    # Changed copies --------------------------------------------------------------------------------------------------

    def with_intra_batch(self) -> "Pairs":
        """Add the anchors to the candidates: the other anchors become negatives (CACR, App. C.2).

        Anchors that are candidates already are not added twice, and no anchor repels another row of its own instance.

        Returns:
            Pairs of the same anchors; behind the C candidates stand the anchors that were none yet.
        """
        known, count = self.known, len(self.anchors)
        if known.sides:
            # Of the rows of its own side, which are dropped first of all, an anchor itself comes first.
            dropped = torch.cat([self.dropped[:, :1], self.dropped[:, len(self.candidates) // 2 :]], 1)
            return replace(self, dropped=dropped, structure=replace(known, sides=False))
        fresh = count - known.among
        if not fresh:
            return self
        runs = known.anchor_views
        batch = runs[0][1]
        row = torch.arange(count, device=self.anchors.device).unsqueeze(1)
        # Runs go through the batch in the same order: the same place of every run is the same instance.
        mates = row % batch + torch.arange(len(runs), device=row.device) * batch  # (A, runs)
        place = mates - known.among
        added = place + len(self.candidates)
        if known.among:
            added = torch.where(place >= 0, added, -1)
        both = self.labels is not None and self.candidate_labels is not None
        indexed = self.index is not None and self.candidate_index is not None
        return replace(
            self,
            candidates=torch.cat([self.candidates, self.anchors[known.among :]]),
            dropped=torch.cat([self.dropped, added], 1),
            candidate_labels=joined(self.candidate_labels, self.labels, known.among) if both else None,
            candidate_index=joined(self.candidate_index, self.index, known.among) if indexed else None,
            structure=replace(
                known,
                candidate_views=known.candidate_views + runs[known.among // batch :],
                among=count,
                padded=known.padded or known.among > 0,
                mutual=False,
            ),
        )

    def within_sides(self) -> tuple["Pairs", ...]:
        """Pairs of different instances within each side, where anchors and candidates come from two encoders.

        The first has the anchors and positives as they are; its negatives are the other anchors, and the rows of a
        queue of theirs, which are past embeddings of a copy of the anchors' encoder (Wang & Isola's code for MoCo; CACR
        App. C.2). The second, where there is no such queue, has the candidates as anchors, which repel each other and
        are repelled by a queue of their own encoder (the memory bank of the other half in CMC); it has no positives.
        Where one encoder made both sides they are these pairs alone. To be asked of all ranks' pairs.

        Returns:
            One or two Pairs.
        """
        known, count = self.known, len(self.anchors)
        if known.sides:
            return self._direction().within_sides()
        of_anchors = {view for view, _ in known.anchor_views}
        runs = tuple(run for run in known.candidate_views if run[0] != NO_VIEW and run[0] not in of_anchors)
        if not runs:
            return (self,)
        total = sum(length for _, length in runs)  # they stand before all other candidates
        behind = known.queue if known.queue_of_keys else 0
        widened = self.with_intra_batch()
        of_queries = known.queue > behind
        queries = replace(
            widened,
            views=True,  # neighbours are on the other side: the positives are no pairs of this one
            structure=replace(widened.known, first_negative=total if of_queries else len(widened.candidates) - count),
        )
        paired_rows = self.structure is not None and self.views  # key k of query b is candidate k B + b
        doubles = self.dropped if paired_rows and known.padded else self.dropped[:, :0]
        if doubles.shape[1]:
            # What is a duplicate of the instance on the other side is one on this side.
            first = len(widened.candidates) - count
            mates = torch.where((doubles >= 0) & (doubles < total), doubles % count + first, -1)
            queries = queries.without(mates)
        if of_queries:
            return (queries,)
        row = torch.arange(total, device=self.candidates.device).unsqueeze(1)
        own = row % count + torch.arange(len(runs), device=row.device) * count if paired_rows else row
        doubles = torch.where(doubles < total + behind, doubles, -1)
        doubles = doubles.repeat(total // count if doubles.shape[1] else 0, 1)
        keys = self.candidates[:total]
        index = self.candidate_index
        side = Pairs(
            keys,
            self.candidates[: total + behind] if behind else keys,
            positives=own[:, :0],
            dropped=torch.cat([own, doubles], 1) if doubles.shape[1] else own,
            index=None if index is None else index[:total],
            candidate_index=None if index is None else index[: total + behind],
            structure=Structure(
                runs,
                (*runs, (NO_VIEW, behind)) if behind else runs,
                among=total,
                fewest=0,
                padded=doubles.shape[1] > 0,
                mutual=not doubles.shape[1] and not behind,
                queue=behind,
            ),
        )
        return (queries,) if side.has_negatives is False else (queries, side)

    def _direction(self) -> "Pairs":
        """Of two sides the first as anchors and the second as candidates."""
        batch = self.known.anchor_views[0][1]
        more = self.dropped[:batch, batch:]  # besides its own side

        def half(values: Tensor | None, side: slice) -> Tensor | None:
            return None if values is None else values[side]

        first, second = slice(0, batch), slice(batch, 2 * batch)
        return Pairs(
            self.anchors[first],
            self.candidates[second],
            positives=torch.where(self.positives[first] < 0, -1, self.positives[first] - batch),
            dropped=torch.where(more < batch, -1, more - batch),
            labels=half(self.labels, first),
            views=self.views,
            candidate_labels=half(self.candidate_labels, second),
            index=half(self.index, first),
            candidate_index=half(self.candidate_index, second),
            structure=Structure(
                ((0, batch),), ((1, batch),), fewest=self.known.fewest, padded=self.known.padded or more.shape[1] > 0
            ),
        )

    def first_positives(self, count: int) -> "Pairs":
        """Keep some positives of each anchor, the first ones; the others are dropped, not made negatives.

        Args:
            count: how many, >= 0.

        Returns:
            Pairs of min(count, K) positives.

        Raises:
            PairsError: `count` is no integer >= 0.
        """
        check_count("count", count, 0)
        known = self.known
        fewest = None if known.fewest is None else min(count, known.fewest)
        return replace(
            self,
            positives=self.positives[:, :count],
            dropped=torch.cat([self.dropped, self.positives[:, count:]], 1),
            structure=replace(known, fewest=fewest),
        )

    def with_positives(self, positives: Tensor) -> "Pairs":
        """Other positives, told by something else than views; those before become negatives.

        Args:
            positives: (A, K) torch.long, indices of candidates, distinct in a row; -1 pads. Their values are not looked
                at.

        Raises:
            PairsError: positives of another shape, dtype or device.
        """
        check_index_shape("positives", positives, self.anchors)
        return replace(
            self,
            positives=pads_last(positives),
            views=False,
            structure=replace(
                self.known,
                fewest=None,
                padded=True,
                partnered=False,
                mutual=False,
                shared=None,
                by_label=False,
                of_block=0,
            ),
        )

    def without(self, dropped: Tensor, *, distinct: bool = False) -> "Pairs":
        """Drop more candidates, so that they are no negatives.

        Args:
            dropped: (A, E) torch.long, indices of candidates; -1 pads. Their values are not looked at.
            distinct: none of them is padding, listed twice or excluded already, which saves counting them.

        Returns:
            Pairs of the same anchors and candidates.

        Raises:
            PairsError: dropped of another shape, dtype or device.
        """
        check_index_shape("dropped", dropped, self.anchors)
        return replace(
            self,
            dropped=torch.cat([self.dropped, dropped], 1),
            structure=replace(self.known, padded=self.known.padded or not distinct, mutual=False, of_block=0),
        )

    def narrow(self, own: slice, total: int) -> "Pairs":
        """The anchors that come from some rows of a batch of `total` rows; the candidates stay.

        The anchors go through the batch run by run, as in `Structure`, with the same number of them for each row.

        Args:
            own: rows of the batch, start and stop.
            total: rows of the whole batch, which divides the anchors of each run.
        """
        known, runs = self.known, self.known.anchor_views
        share = len(self.anchors) // (len(runs) * total)
        rows = len(self.anchors) // len(runs)
        parts = [slice(n * rows + own.start * share, n * rows + own.stop * share) for n in range(len(runs))]

        def kept(values: Tensor) -> Tensor:
            return values[parts[0]] if len(parts) == 1 else torch.cat([values[part] for part in parts])

        mine = (own.stop - own.start) * share
        return replace(
            self,
            anchors=kept(self.anchors),
            positives=kept(self.positives),
            dropped=kept(self.dropped),
            labels=None if self.labels is None else kept(self.labels),
            index=None if self.index is None else kept(self.index),
            structure=replace(known, anchor_views=tuple((view, mine) for view, _ in runs), among=0, mutual=False),
        )

    # What is read off them -------------------------------------------------------------------------------------------

    @property
    def known(self) -> Structure:
        """What is known without reading an index; of indices that are somebody's own, nothing."""
        if self.structure is not None:
            return self.structure
        square = self.anchors is self.candidates
        anchors, candidates = len(self.anchors), len(self.candidates)
        return Structure(((0, anchors),), ((0 if square else 1, candidates),), among=anchors * square, padded=True)

    @property
    def mutual(self) -> bool:
        """Anchors are candidates, and i excludes j exactly if j excludes i: half of the matrix is enough."""
        return self.known.mutual

    @property
    def first_negative(self) -> int:
        """Number of candidates, the first ones, that are nobody's negatives."""
        return self.known.first_negative

    @cached_property
    def view(self) -> Tensor:
        """(A,) number of the view that each anchor is; for statistics of whole views take `candidate_view`.

        Under several ranks the anchors are one rank's share of a view.
        """
        return runs_of(self.known.anchor_views, self.anchors.device)

    @cached_property
    def candidate_view(self) -> Tensor:
        """(C,) number of the view that each candidate, of all ranks, is; NO_VIEW (-1) for a queue's.

        `with_intra_batch` puts anchors that are no candidates among them.
        """
        return runs_of(self.known.candidate_views, self.candidates.device)

    @cached_property
    def fewest(self) -> int:
        """Least number of positives of an anchor that has any; 0 where none has.

        Of `from_window` it is 2 window: anchors at the ends of a document, whose neighbours may be missing, do not
        count.
        """
        if self.known.fewest is not None:
            return self.known.fewest
        counts = (self.positives >= 0).sum(1)
        some = counts[counts > 0]
        return int(some.min()) if len(some) else 0

    def check_positives(self, count: int, problem: Callable[[int], str]) -> None:
        """Raise where an anchor that has positives has fewer than asked for.

        Anchors of `from_window` at the ends of a document are let through (`fewest`).

        Args:
            count: how many are asked for, >= 1.
            problem: makes the message of the least number that an anchor has.

        Raises:
            PairsError: `problem(fewest)`. Of indices that are somebody's own nothing is read back from CUDA: the device
                stops by itself, later, with a RuntimeError of that message.
        """
        if self.known.fewest is not None or reads_at_once(self.anchors):
            if self.fewest < count:
                raise PairsError(problem(self.fewest))
            return
        counts = (self.positives >= 0).sum(1)
        check_numbers(torch.where(counts > 0, counts, count), count, None, lambda low, high: problem(low))

    @cached_property
    def excluded(self) -> Tensor:
        """(A, K+E) candidates that are no negatives of the anchor; -1 pads."""
        return torch.cat([self.positives, self.dropped], 1)

    @cached_property
    def positive_mask(self) -> Tensor | None:
        """(A, K) True where `positives` is not padding; None where nothing is padded."""
        return self.positives >= 0 if self.known.padded else None

    @cached_property
    def negative_counts(self) -> Tensor:
        """(A,) number of negatives of each anchor."""
        first = self.first_negative
        free = len(self.candidates) - first
        if not self.known.padded:
            # Positives lie before the first negative, where there is such a border.
            listed = self.dropped.shape[1] if first else self.excluded.shape[1]
            return filled(len(self.anchors), free - listed, self.anchors.device)
        # A candidate may be listed twice (as a positive and as dropped): count distinct ones.
        order = self.excluded.sort(1).values
        fresh = torch.ones_like(order, dtype=torch.bool)
        fresh[:, 1:] = order[:, 1:] != order[:, :-1]
        return free - (fresh & (order >= first)).sum(1)

    @cached_property
    def has_negatives(self) -> bool | None:
        """True if any anchor has a negative; None if the shapes leave it open and reading would wait for a device."""
        first = self.first_negative
        free = len(self.candidates) - first
        # Positives lie before the first negative, where there is such a border.
        listed = (self.dropped if first else self.excluded).shape[1]
        if not self.known.padded or free == 0 or free > listed:
            return free > listed
        return bool((self.negative_counts > 0).any()) if reads_at_once(self.anchors) else None

    @cached_property
    def has_positives(self) -> bool | None:
        """True if any anchor has a positive; None if the shapes leave it open and reading would wait for a device."""
        mask = self.positive_mask
        if mask is None or not mask.shape[1] or self.known.partnered:
            return self.positives.shape[1] > 0
        return bool(mask.any()) if reads_at_once(mask) else None

    def negative_mask(self) -> Tensor:
        """(A, C) True at the negatives of each anchor: the whole matrix, for what cannot do without."""
        listed, count = self.excluded, len(self.candidates)
        mask = torch.ones(len(self.anchors), count + 1, dtype=torch.bool, device=self.anchors.device)
        mask[:, : self.first_negative] = False
        # Padding is written into a column that is cut off.
        return mask.scatter_(1, torch.where(listed < 0, count, listed), False)[:, :-1]


@remembered
def _of_views(count: int, batch: int, device: torch.device) -> "Pairs":
    """Pairs of so many views of a batch without embeddings, each row an anchor and a candidate."""
    nothing = torch.empty(count * batch, 0, device=device)
    runs = tuple((number, batch) for number in range(count))
    return _read(
        Pairs(
            nothing,
            nothing,
            positives=other_views(count, batch, device),  # (VB, V-1)
            dropped=column(count * batch, device),  # (VB, 1)
            index=repeated_numbers(batch, count, device),
            structure=Structure(runs, runs, among=count * batch, fewest=count - 1, mutual=True, shared=count - 1),
        )
    )


@remembered
def _of_sides(batch: int, device: torch.device) -> "Pairs":
    """Pairs of two encoders in both directions without embeddings, each row an anchor and a candidate."""
    nothing = torch.empty(2 * batch, 0, device=device)
    runs = ((0, batch), (1, batch))
    return _read(
        Pairs(
            nothing,
            nothing,
            positives=other_views(2, batch, device),
            dropped=own_side(batch, device),  # (2B, B)
            index=repeated_numbers(batch, 2, device),
            structure=Structure(runs, runs, among=2 * batch, fewest=1, mutual=True, shared=1, sides=True),
        )
    )


@remembered
def _of_queries(
    batch: int,
    count: int,
    behind: int,
    batch_negatives: bool,
    queue_of_keys: bool,
    padded_later: bool,
    device: torch.device,
) -> "Pairs":
    """Pairs of queries without embeddings, so many keys of each, and a queue behind them.

    `padded_later` leaves the places that are dropped to the caller.
    """
    own, runs = column(batch, device), tuple((number + 1, batch) for number in range(count))
    pairs = Pairs(
        torch.empty(batch, 0, device=device),
        torch.empty(count * batch + behind, 0, device=device),
        positives=own + torch.arange(count, device=device) * batch,
        dropped=own[:, :0],
        index=numbers(batch, device),
        candidate_index=padded(repeated_numbers(batch, count, device), behind),
        structure=Structure(
            ((0, batch),),
            (*runs, (NO_VIEW, behind)) if behind else runs,
            first_negative=0 if batch_negatives else count * batch,
            fewest=count,
            padded=padded_later,
            shared=1,
            queue=behind,
            queue_of_keys=behind > 0 and queue_of_keys,
        ),
    )
    return pairs if padded_later else _read(pairs)


def _read(pairs: Pairs) -> Pairs:
    """The same with what can be read off its indices, which nobody may write to.

    Below some hundred rows to find the indices takes as long as the similarities themselves.
    """
    for name in ("excluded", "positive_mask", "negative_counts", "has_negatives", "has_positives"):
        getattr(pairs, name)  # which it keeps
    return pairs


def fill(known: Pairs, given: dict[str, Tensor | None]) -> Pairs:
    """Pairs that are known but for embeddings, with these, and with other rows where given."""
    if torch.compiler.is_compiling() or "dropped" in given:
        return replace(known, **given)  # type: ignore[arg-type]
    pairs = Pairs.__new__(Pairs)
    pairs.__dict__.update(vars(known), **given)  # with what was read off the indices
    return pairs


def _columns(negatives: Tensor | Sequence[Tensor] | None, anchor: Tensor) -> Tensor:
    """Hard negatives in any of their forms as (B, n, d)."""
    batch, width = anchor.shape
    if negatives is None:
        return anchor.new_empty(batch, 0, width)
    if isinstance(negatives, Tensor) and negatives.ndim == 3:
        found = list(negatives.unbind(1))
    else:
        found = [negatives] if isinstance(negatives, Tensor) else list(negatives)
    for number, each in enumerate(found):
        check_matrix(f"negatives[{number}]", each, ("anchor", anchor))
        if len(each) != batch:
            raise PairsError(f"negatives[{number}] must have {counted(batch, 'row')} like anchor, got {len(each)}.")
    if isinstance(negatives, Tensor) and negatives.ndim == 3:
        return negatives
    return torch.stack(found, 1) if found else anchor.new_empty(batch, 0, width)


def _made(rows: dict[str, Tensor], relate: Relation, labels: Tensor | None, index: Tensor | None) -> Pairs:
    """Pair the rows, and remember them for the case that other ranks have more."""
    count = len(next(iter(rows.values())))
    for name, values in (("labels", labels), ("index", index)):
        check_row_values(values, count, name)
        if values is not None:
            rows[name] = values.to(next(iter(rows.values())).device)
    pairs = relate(rows)
    assert isinstance(pairs, Pairs)
    object.__setattr__(pairs, "source", Embedded(rows, relate))
    return pairs
