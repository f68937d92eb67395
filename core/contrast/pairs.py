"""Who is an anchor, a candidate, a positive, or dropped: the only thing an objective sees."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Integral
from typing import Literal

import torch
from torch import Tensor

from dipole.core.ground.distributed import gather_rows, row_counts, world_size
from dipole.core.ground.errors import PairsError


def _matrix(name: str, x: Tensor, like: tuple[str, Tensor] | None = None) -> Tensor:
    if not isinstance(x, Tensor):
        raise PairsError(f"{name} must be a torch tensor of shape (rows, width), got {type(x).__name__}.")
    if x.ndim != 2 or not x.is_floating_point() or x.shape[0] == 0:
        raise PairsError(
            f"{name} must be floating-point embeddings of shape (rows >= 1, width), "
            f"got {x.dtype} of shape {tuple(x.shape)}."
        )
    if like is not None:
        other, y = like
        for what, mine, theirs in (
            ("width", x.shape[1], y.shape[1]),
            ("device", x.device, y.device),
            ("dtype", x.dtype, y.dtype),
        ):
            if mine != theirs:
                raise PairsError(f"{name} and {other} must have the same {what}, got {mine} and {theirs}.")
    return x


def _indices(name: str, index: Tensor, anchors: Tensor, candidates: int) -> None:
    if not isinstance(index, Tensor) or index.dtype != torch.long or index.ndim != 2 or len(index) != len(anchors):
        got = f"{index.dtype} of shape {tuple(index.shape)}" if isinstance(index, Tensor) else type(index).__name__
        raise PairsError(f"{name} must be torch.long of shape (anchors = {len(anchors)}, any), got {got}.")
    if index.device != anchors.device:
        raise PairsError(f"{name} and anchors must have the same device, got {index.device} and {anchors.device}.")
    if index.numel() and (int(index.min()) < -1 or int(index.max()) >= candidates):
        raise PairsError(
            f"{name} must index the {candidates} candidates (0 to {candidates - 1}, -1 pads), "
            f"got {int(index.min())} to {int(index.max())}."
        )


def _labels(labels: Tensor | None, rows: int) -> Tensor | None:
    if labels is not None and (not isinstance(labels, Tensor) or labels.shape != (rows,)):
        got = tuple(labels.shape) if isinstance(labels, Tensor) else type(labels).__name__
        raise PairsError(f"labels must be a tensor of shape ({rows},), one for each row, got {got}.")
    return labels


@dataclass(frozen=True, eq=False)
class Pairs:
    """Embeddings and their relations, as every objective receives them.

    The negatives of anchor i are all candidates that are neither its positives nor dropped for it.

    Args:
        anchors: (A, d) raw embeddings, before normalisation.
        candidates: (C, d); the very same tensor as `anchors` where every view is both (SimCLR).
        positives: (A, K) indices into candidates, distinct in a row; -1 pads.
        dropped: (A, E) candidates that are no negatives of the anchor besides its positives; -1 pads.
        labels: (A,) class of each anchor, for supervised references and diagnostics only.
        views: True if positives are views of the anchor's own instance, False if they are other instances
            (neighbouring sentences, members of a block), which then count as pairs of distinct instances.

    Raises:
        PairsError: if shapes, devices, dtypes or index ranges do not fit; the message names the argument.
    """

    anchors: Tensor
    candidates: Tensor
    positives: Tensor
    dropped: Tensor
    labels: Tensor | None = None
    views: bool = True
    # Constructors below build indices that are right by construction, so their ranges are not read back from the
    # device; `mutual` says that i drops j exactly if j drops i, which lets each tile serve both of its sides.
    trusted: bool = field(default=False, repr=False)
    mutual: bool = field(default=False, repr=False)
    padded: bool = field(default=True, repr=False)
    # Candidate rows [start, stop) that every rank holds alike (a queue): gather() keeps them once.
    shared: tuple[int, int] = field(default=(0, 0), repr=False)
    intra_batch: bool = field(default=False, repr=False)
    gathered: bool = field(default=False, repr=False)
    candidate_labels: Tensor | None = field(default=None, repr=False)  # (C,); `labels` where None

    def __post_init__(self) -> None:
        if self.trusted:
            return
        _matrix("anchors", self.anchors)
        _matrix("candidates", self.candidates, ("anchors", self.anchors))
        _indices("positives", self.positives, self.anchors, len(self.candidates))
        _indices("dropped", self.dropped, self.anchors, len(self.candidates))
        _labels(self.labels, len(self.anchors))
        object.__setattr__(self, "positives", pads_last(self.positives))

    @classmethod
    def from_views(cls, views: Sequence[Tensor], labels: Tensor | None = None) -> "Pairs":
        """SimCLR with any number of views: each row is an anchor, its other views are its positives.

        Args:
            views: V >= 2 tensors (B, d), row b of each a view of instance b.
            labels: (B,) class of each instance.
        """
        if isinstance(views, Tensor) or len(views) < 2:
            raise PairsError("from_views needs a list of at least two views, each (B, d).")
        _matrix("views[0]", views[0])
        for number, view in enumerate(views[1:], 1):
            _matrix(f"views[{number}]", view, ("views[0]", views[0]))
            if len(view) != len(views[0]):
                raise PairsError(f"views[{number}] must have {len(views[0])} rows like views[0], got {len(view)}.")
        count, batch = len(views), len(views[0])
        rows = torch.cat(list(views))  # (VB, d), view-major
        own = torch.arange(count * batch, device=rows.device).unsqueeze(1)  # (VB, 1)
        shifts = torch.arange(1, count, device=rows.device) * batch
        _labels(labels, batch)
        return cls(
            rows,
            rows,
            positives=(own + shifts) % (count * batch),  # (VB, V-1)
            dropped=own,
            labels=None if labels is None else labels.repeat(count),
            trusted=True,
            mutual=True,
            padded=False,
        )

    @classmethod
    def cross(
        cls,
        queries: Tensor,
        keys: Tensor,
        queue: Tensor | None = None,
        intra_batch: bool = False,
        labels: Tensor | None = None,
        dropped: Tensor | None = None,
    ) -> "Pairs":
        """One direction between two encoders: MoCo, CMC, the CURL agent.

        Args:
            queries: (B, d), the anchors.
            keys: (B, d), row b the positive of query b; or (B, K, d) for K positives each.
            queue: (Q, d) further negatives, for example the keys of earlier batches.
            intra_batch: add the other queries to the negatives (CACR, App. C.2).
            labels: (B,) class of each query.
            dropped: (B, E) candidates that are no negatives (exact duplicates, say); -1 pads.
        """
        _matrix("queries", queries)
        batch = len(queries)
        if isinstance(keys, Tensor) and keys.ndim == 2:
            keys = keys.unsqueeze(1)
        if not isinstance(keys, Tensor) or keys.ndim != 3 or len(keys) != batch or keys.shape[1] == 0:
            got = tuple(keys.shape) if isinstance(keys, Tensor) else type(keys).__name__
            raise PairsError(f"keys must be (B, d) or (B, K, d) with B = {batch} like queries, got {got}.")
        count = keys.shape[1]
        parts = [_matrix("keys", keys.transpose(0, 1).reshape(count * batch, -1), ("queries", queries))]
        if queue is not None and len(queue):
            parts.append(_matrix("queue", queue, ("queries", queries)))
        own = torch.arange(batch, device=queries.device).unsqueeze(1)  # (B, 1)
        if dropped is not None:
            _indices("dropped", dropped, queries, sum(map(len, parts)))
        pairs = cls(
            queries,
            torch.cat(parts) if len(parts) > 1 else parts[0],
            positives=own + torch.arange(count, device=queries.device) * batch,
            dropped=own[:, :0] if dropped is None else dropped,
            labels=_labels(labels, batch),
            trusted=True,
            padded=dropped is not None,
            shared=(count * batch, sum(map(len, parts))),
        )
        return pairs.with_intra_batch() if intra_batch else pairs

    @classmethod
    def from_window(
        cls,
        f: Tensor,
        g: Tensor,
        document: Tensor,
        window: int = 1,
        self_logit: Literal["drop", "zero"] = "drop",
    ) -> "Pairs":
        """Quick Thoughts: f(sentence) finds g(neighbours) among g of all sentences of the batch.

        Args:
            f: (B, d) of consecutive sentences, the anchors.
            g: (B, d) of the same sentences by the other encoder, the candidates.
            document: (B,) long, the document of each sentence; neighbours never cross documents.
            window: sentences on each side that are positives, >= 1.
            self_logit: "drop" leaves the sentence itself out; "zero" keeps it as a negative whose logit is 0, as the
                authors' code does: one more candidate, the zero vector, whose similarity to everything is 0 (for terms
                that count pairs it is a pair at distance D = 0.5).
        """
        _matrix("f", f)
        _matrix("g", g, ("f", f))
        batch = len(f)
        if len(g) != batch or not isinstance(document, Tensor) or document.shape != (batch,):
            raise PairsError(f"g and document must have {batch} rows like f, got {len(g)} and {_shape(document)}.")
        if isinstance(window, bool) or not isinstance(window, Integral) or window < 1:
            raise PairsError(f"window must be an integer >= 1, got {window!r}.")
        if self_logit not in ("drop", "zero"):
            raise PairsError(f"self_logit must be 'drop' or 'zero', got {self_logit!r}.")
        document = document.to(f.device)
        own = torch.arange(batch, device=f.device).unsqueeze(1)
        offsets = torch.tensor([o for o in range(-window, window + 1) if o], device=f.device)
        near = own + offsets  # (B, 2 window)
        inside = (near >= 0) & (near < batch)
        inside &= document[near.clamp(0, batch - 1)] == document.unsqueeze(1)
        candidates = torch.cat([g, torch.zeros_like(g[:1])]) if self_logit == "zero" else g
        return cls(
            f,
            candidates,
            positives=pads_last(torch.where(inside, near, -1)),
            dropped=own,
            views=False,
            trusted=True,
            shared=(batch, len(candidates)),
        )

    @classmethod
    def from_blocks(
        cls,
        x: Tensor,
        anchors: Literal["first", "all"] = "first",
        candidates: Literal["points", "means"] = "points",
        labels: Tensor | None = None,
    ) -> "Pairs":
        """Blocks of similar points (Arora et al., Sec. 6.3): a point finds the rest of its own block.

        Args:
            x: (n, b, d), n blocks of b >= 2 points.
            anchors: "first", one point of each block, or "all", each point in turn.
            candidates: "points", all points; or "means", for each block the mean of its points other than the anchor
                (only with anchors="first").
            labels: (n,) class of each block.
        """
        if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[1] < 2 or not x.is_floating_point():
            raise PairsError(f"x must be blocks of shape (n, b >= 2, d), got {_shape(x)}.")
        if anchors not in ("first", "all") or candidates not in ("points", "means"):
            raise PairsError(
                f"anchors must be 'first' or 'all' and candidates 'points' or 'means', got {anchors!r}, {candidates!r}."
            )
        n, b, width = x.shape
        _labels(labels, n)
        of_points = None if labels is None else labels.repeat_interleave(b)
        if candidates == "means":
            if anchors != "first":
                raise PairsError("from_blocks(candidates='means') needs anchors='first'.")
            own = torch.arange(n, device=x.device).unsqueeze(1)
            means = x[:, 1:].mean(1)
            return cls(x[:, 0], means, own, own[:, :0], labels, views=False, trusted=True, padded=False)
        rows = x.reshape(n * b, width)
        own = torch.arange(n * b, device=x.device).view(n, b, 1)
        shifts = torch.arange(1, b, device=x.device)
        # Member m of a block has the other b - 1 members, in cyclic order, as positives.
        member = torch.arange(b, device=x.device).view(1, b, 1)
        positives = own - member + (member + shifts) % b  # (n, b, b-1)
        if anchors == "first":
            return cls(
                x[:, 0],
                rows,
                positives[:, 0],
                own[:, 0],
                labels,
                views=False,
                trusted=True,
                padded=False,
                candidate_labels=of_points,
            )
        return cls(
            rows,
            rows,
            positives.reshape(n * b, b - 1),
            own.reshape(n * b, 1),
            of_points,
            views=False,
            trusted=True,
            mutual=True,
            padded=False,
        )

    def with_intra_batch(self) -> "Pairs":
        """Add the anchors to the candidates: the other anchors become negatives (CACR, App. C.2)."""
        if self.anchors is self.candidates or self.intra_batch:
            return self
        own = torch.arange(len(self.anchors), device=self.anchors.device).unsqueeze(1) + len(self.candidates)
        return replace(
            self,
            candidates=torch.cat([self.candidates, self.anchors]),
            dropped=torch.cat([self.dropped, own], 1),
            trusted=True,
            mutual=False,
            intra_batch=True,
        )

    def first_positives(self, count: int) -> "Pairs":
        """Keep `count` positives of each anchor; the others are dropped, not made negatives."""
        return replace(
            self,
            positives=self.positives[:, :count],
            dropped=torch.cat([self.dropped, self.positives[:, count:]], 1),
            trusted=True,
        )

    def gather(self) -> "Pairs":
        """Candidates of all ranks, with gradient; anchors stay local. The pairs themselves in a single process."""
        if world_size() == 1 or self.gathered:
            return self
        start, stop = self.shared
        mine = torch.cat([self.candidates[:start], self.candidates[stop:]])
        sizes = row_counts(mine)
        offset, total = sum(sizes[: torch.distributed.get_rank()]), sum(sizes)

        def moved(index: Tensor) -> Tensor:
            local = index + offset - (stop - start) * (index >= stop)
            local = torch.where((index >= start) & (index < stop), index - start + total, local)
            return torch.where(index < 0, index, local)

        gathered = gather_rows(mine, sizes)
        labels = self.candidate_labels
        if labels is None and self.labels is not None and len(self.labels) == len(self.candidates):
            labels = self.labels
        return replace(
            self,
            candidates=torch.cat([gathered, self.candidates[start:stop]]) if stop > start else gathered,
            positives=moved(self.positives),
            dropped=moved(self.dropped),
            trusted=True,
            mutual=False,
            shared=(total, total + stop - start),
            gathered=True,
            candidate_labels=None if labels is None else gather_rows(labels, sizes),
        )

    @cached_property
    def excluded(self) -> Tensor:
        """(A, K+E) candidates that are no negatives of the anchor; -1 pads."""
        return torch.cat([self.positives, self.dropped], 1)

    @cached_property
    def positive_mask(self) -> Tensor | None:
        """(A, K) True where `positives` is not padding; None where nothing is padded."""
        return self.positives >= 0 if self.padded else None

    @cached_property
    def negative_counts(self) -> Tensor:
        """(A,) number of negatives of each anchor."""
        listed = self.excluded.shape[1]
        if not self.padded:
            return torch.full((len(self.anchors),), len(self.candidates) - listed, device=self.anchors.device)
        # A candidate may be listed twice (as a positive and as dropped): count distinct ones.
        order = self.excluded.sort(1).values
        fresh = torch.ones_like(order, dtype=torch.bool)
        fresh[:, 1:] = order[:, 1:] != order[:, :-1]
        return len(self.candidates) - (fresh & (order >= 0)).sum(1)

    @cached_property
    def has_negatives(self) -> bool:
        """True if any anchor has a negative; asks the device only if the shapes leave it open."""
        if len(self.candidates) > self.excluded.shape[1]:
            return True
        return bool((self.negative_counts > 0).any())


def pads_last(index: Tensor) -> Tensor:
    """The same rows with -1 behind the real entries, so that the first positive is one."""
    return index.gather(1, (index < 0).long().argsort(dim=1, stable=True))


def _shape(x: object) -> str:
    return str(tuple(x.shape)) if isinstance(x, Tensor) else type(x).__name__
