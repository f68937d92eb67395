"""Frameworks: which networks see which views, and who is paired with whom.

A framework knows nothing of the objective: it makes `Pairs`, and every registered objective that needs no more than
those runs in it.
"""

import copy
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dipole.core.contrast.pairs import Pairs
from dipole.core.ground.distributed import gather_rows, row_counts, world_size
from dipole.vision.encoders import Encoder

Build = Callable[[int], tuple[Encoder, nn.Module, int]]  # channels -> encoder, projector, width of the embedding


class Batch(NamedTuple):
    """views: each (B, C, H, W) in [0, 1]; labels (B,) or None; rows (B,) of the images; seed: of this step's draws."""

    views: list[Tensor]
    labels: Tensor | None
    rows: Tensor
    seed: int


class Branch(nn.Module):
    """An encoder and its projector; probes read the encoder at `tap`."""

    def __init__(self, encoder: Encoder, projector: nn.Module, tap: str | None) -> None:
        super().__init__()
        self.encoder = encoder
        self.projector = projector
        self.tap = encoder.check_tap(tap)

    def forward(self, images: Tensor) -> Tensor:
        return self.projector(self.encoder(images))

    def features(self, images: Tensor) -> Tensor:
        return self.encoder(images, self.tap)


class Method(nn.Module):
    """A framework: `forward(batch)` gives the pairs, `features` and `embedding` what is used after training."""

    embedding_dim: int

    def forward(self, batch: Batch) -> Pairs:
        raise NotImplementedError

    def features(self, images: Tensor) -> Tensor:
        """What probes see: the encoder's tap."""
        raise NotImplementedError

    def embedding(self, images: Tensor) -> Tensor:
        """What the objective sees."""
        raise NotImplementedError

    def after_step(self) -> None:
        """Update what follows the optimizer."""

    def compile_branches(self) -> None:
        """Compile every encoder in place; the names of the weights stay."""
        for part in self.modules():
            if isinstance(part, Encoder):
                part.compile()


class OneBranch(Method):
    """What the frameworks of one network share: what is used after training is that network's."""

    def __init__(self, build: Build, channels: int, tap: str | None) -> None:
        super().__init__()
        encoder, projector, self.embedding_dim = build(channels)
        self.branch = Branch(encoder, projector, tap)

    def features(self, images: Tensor) -> Tensor:
        return self.branch.features(images)

    def embedding(self, images: Tensor) -> Tensor:
        return self.branch(images)


class SimCLR(OneBranch):
    """One network for all views; negatives are the rest of the batch (Chen et al. 2020).

    With more than two views this is the K x (1 against M) form that CACR calls CMC. negatives: so many per anchor,
    drawn from the batch; None for all.
    """

    def __init__(self, build: Build, channels: int, tap: str | None, negatives: int | None = None) -> None:
        super().__init__(build, channels, tap)
        self.negatives = negatives

    def forward(self, batch: Batch) -> Pairs:
        # One pass: batch norm sees all views together, as in the reference.
        z = self.branch(torch.cat(batch.views))
        pairs = Pairs.from_views(list(z.chunk(len(batch.views))), batch.labels)
        return pairs if self.negatives is None else keep_negatives(pairs, self.negatives, batch.seed)


def keep_negatives(pairs: Pairs, count: int, seed: int) -> Pairs:
    """Drop random negatives of every anchor until `count` are left; LMCL and CLLR vary this number (Fig. 4)."""
    anchors, candidates = len(pairs.anchors), len(pairs.candidates)
    rank = torch.rand(anchors, candidates, generator=torch.Generator().manual_seed(seed)).to(pairs.anchors.device)
    for listed in (pairs.positives, pairs.dropped):
        rank.scatter_(1, listed, 2.0)  # behind all negatives
    order = rank.argsort(1)
    gone = order[:, count : candidates - pairs.positives.shape[1] - pairs.dropped.shape[1]]
    return Pairs(
        pairs.anchors, pairs.candidates, pairs.positives, torch.cat([pairs.dropped, gone], 1), pairs.labels, pairs.views
    )


class Blocks(OneBranch):
    """One network; the images of a block, all of one class, are each other's positives (Arora et al. 2019, Sec. 8.1).

    The batch is blocks of `size` images, one after another. Labels choose the blocks and are carried for supervised
    references; the block loss does not see them.
    """

    def __init__(self, build: Build, channels: int, tap: str | None, size: int) -> None:
        super().__init__(build, channels, tap)
        self.size = size

    def forward(self, batch: Batch) -> Pairs:
        (view,) = batch.views
        z = self.branch(view)
        labels = None if batch.labels is None else batch.labels[:: self.size]
        return Pairs.from_blocks(z.view(-1, self.size, z.shape[1]), anchors="all", labels=labels)


class Queue(nn.Module):
    """The last `size` rows of unit length, held once on the device, the oldest overwritten first."""

    def __init__(self, size: int, dim: int) -> None:
        super().__init__()
        self.register_buffer("rows", F.normalize(torch.randn(size, dim), dim=1))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))
        self.register_buffer("filled", torch.zeros((), dtype=torch.long))

    def push(self, rows: Tensor) -> None:
        """Add rows (n, d); of more than fit the last stay."""
        store, place = self.get_buffer("rows"), self.get_buffer("place")
        rows = F.normalize(rows.detach().to(store.dtype), dim=1)[-len(store) :]
        index = (place + torch.arange(len(rows), device=store.device)) % len(store)
        store[index] = rows
        place.copy_((place + len(rows)) % len(store))
        filled = self.get_buffer("filled")
        filled.copy_((filled + len(rows)).clamp_max(len(store)))


class MoCo(Method):
    """MoCo-v2 (He et al. 2020; Chen et al. 2020): keys from a slowly moving copy, negatives from a queue of past keys.

    The first view is the query, the others are its keys, so K + 1 views give K positives; the last view's keys enter
    the queue (CACR Algorithm 3). intra_batch: the other queries are negatives too (CACR App. C.2). With several ranks
    the key batch is shuffled over them, so that batch norm gives no hint of who belongs together. The queue starts with
    random unit vectors, as in the authors' code.

    symmetric: CACR Algorithm 3 to the letter: every view is a query in turn and has the keys of the image's other views
    as positives; its negatives are the queue alone and, with intra_batch, the other queries of its view on this rank.
    """

    def __init__(
        self,
        build: Build,
        channels: int,
        tap: str | None,
        size: int,
        momentum: float,
        intra_batch: bool,
        symmetric: bool = False,
    ) -> None:
        super().__init__()
        encoder, projector, self.embedding_dim = build(channels)
        self.query = Branch(encoder, projector, tap)
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.queue = Queue(size, self.embedding_dim)
        self.momentum = momentum
        self.intra_batch = intra_batch
        self.symmetric = symmetric
        self._fresh: Tensor | None = None

    def forward(self, batch: Batch) -> Pairs:
        queries = batch.views if self.symmetric else batch.views[:1]
        others = batch.views if self.symmetric else batch.views[1:]
        # A pass per view, as in the reference: batch norm sees one view at a time.
        q = torch.cat([self.query(view) for view in queries])
        with torch.no_grad():
            keys = [self._keys(view, batch.seed + n) for n, view in enumerate(others)]
        self._fresh = keys[-1]
        queue = self.queue.get_buffer("rows").to(q.dtype)
        if self.symmetric:
            return every_view_in_turn(q, torch.cat(keys).to(q.dtype), queue, len(keys), self.intra_batch, batch.labels)
        return Pairs.cross(
            q, torch.stack(keys, 1).to(q.dtype), queue, intra_batch=self.intra_batch, labels=batch.labels
        )

    def _keys(self, images: Tensor, seed: int) -> Tensor:
        if world_size() == 1:
            return self.key(images)
        sizes = row_counts(images)
        rank, share = torch.distributed.get_rank(), sizes[0]
        order = torch.randperm(sum(sizes), generator=torch.Generator().manual_seed(seed)).to(images.device)
        mine = self.key(gather_rows(images, sizes)[order[rank * share : (rank + 1) * share]])
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return gather_rows(mine, sizes)[back[rank * share : (rank + 1) * share]]

    @torch.no_grad()
    def after_step(self) -> None:
        for slow, fast in zip(self.key.parameters(), self.query.parameters(), strict=True):
            slow.lerp_(fast, 1 - self.momentum)
        if self._fresh is not None:
            fresh = self._fresh
            self.queue.push(fresh if world_size() == 1 else gather_rows(fresh, row_counts(fresh)))
            self._fresh = None

    def features(self, images: Tensor) -> Tensor:
        return self.query.features(images)

    def embedding(self, images: Tensor) -> Tensor:
        return self.query(images)


def every_view_in_turn(
    queries: Tensor, keys: Tensor, queue: Tensor, views: int, intra_batch: bool, labels: Tensor | None
) -> Pairs:
    """Pairs of CACR Algorithm 3 for queries and keys (V B, d), view by view, and a queue (Q, d) of negatives.

    As there, a rank's loss is that of its own queries and keys: candidates are not gathered.
    """
    total, batch = len(queries), len(queries) // views
    row = torch.arange(total, device=queries.device)
    positives = (row[:, None] + row[batch::batch]) % total  # (VB, V-1)
    # Of the batch's keys only the positives take part.
    dropped = [(row[:, None] + row[(row % batch != 0) | (row == 0)]) % total]
    candidates = [keys, queue]
    if intra_batch:
        # The queries of other views take no part, nor does the query itself.
        first = sum(map(len, candidates))
        dropped += [first + (row[:, None] // batch * batch + row[batch:]) % total, first + row[:, None]]
        candidates.append(queries)
    return Pairs(
        queries,
        torch.cat(candidates),
        positives,
        torch.cat(dropped, 1),
        None if labels is None else labels.repeat(views),
        trusted=True,
        padded=False,
        intra_batch=intra_batch,
        gathered=True,
    )


# CIE 1976 L*a*b* of sRGB under D65: the matrix to XYZ and the white point (IEC 61966-2-1, CIE 15).
XYZ = ((0.412453, 0.357580, 0.180423), (0.212671, 0.715160, 0.072169), (0.019334, 0.119193, 0.950227))
WHITE = (0.950456, 1.0, 1.088754)


def lab(images: Tensor) -> Tensor:
    """CIE L*a*b* (n, 3, H, W) of RGB in [0, 1]: L in [0, 100], a and b about [-110, 110], each divided by 100."""
    linear = torch.where(images > 0.04045, ((images + 0.055) / 1.055).clamp_min(0) ** 2.4, images / 12.92)
    matrix = images.new_tensor(XYZ) / images.new_tensor(WHITE)[:, None]
    xyz = torch.einsum("ij,njhw->nihw", matrix, linear)
    f = torch.where(xyz > 0.008856, xyz.clamp_min(1e-8) ** (1 / 3), 7.787 * xyz + 16 / 116)
    x, y, z = f.unbind(1)
    return torch.stack([1.16 * y - 0.16, 5 * (x - y), 2 * (y - z)], 1)


class CMC(Method):
    """Contrastive multiview coding (Tian et al. 2020): L and ab of one view through two networks, in both directions.

    bank: so many negatives are drawn from a memory bank that holds a running mean of every image's embedding per half
    (bank momentum 0.5); None takes the batch's. Probes see both encoders' features side by side.
    """

    def __init__(self, build: Build, tap: str | None, images: int, bank: int | None, momentum: float) -> None:
        super().__init__()
        encoder, projector, self.embedding_dim = build(1)
        self.light = Branch(encoder, projector, tap)
        encoder, projector, _ = build(2)
        self.colour = Branch(encoder, projector, tap)
        self.bank = bank
        self.momentum = momentum
        if bank is not None:
            self.register_buffer("memory", F.normalize(torch.randn(2, images, self.embedding_dim), dim=2))
        self._fresh: tuple[Tensor, Tensor] | None = None

    def halves(self, images: Tensor) -> tuple[Tensor, Tensor]:
        converted = lab(images)
        return converted[:, :1], converted[:, 1:]

    def set_statistics(self, images: Tensor) -> None:
        """Mean and standard deviation of L, a and b from RGB images in [0, 1]."""
        for branch, half in zip((self.light, self.colour), self.halves(images), strict=True):
            std, mean = torch.std_mean(half, (0, 2, 3))
            branch.encoder.set_statistics(mean.tolist(), std.clamp_min(1e-3).tolist())

    def forward(self, batch: Batch) -> Pairs:
        (view,) = batch.views
        light, colour = self.halves(view)
        z = torch.cat([self.light(light), self.colour(colour)])  # (2B, d)
        count = len(view)
        memory = None if self.bank is None else self._draw(batch).to(z.dtype)
        self._fresh = (z.detach(), batch.rows)
        return both_directions(z, count, memory, batch.labels)

    def _draw(self, batch: Batch) -> Tensor:
        """(2, bank, d): the same random images of the bank for both halves, none of this batch."""
        memory = self.get_buffer("memory")
        order = torch.randperm(memory.shape[1], generator=torch.Generator().manual_seed(batch.seed))
        order = order[~torch.isin(order, batch.rows.cpu())][: self.bank]
        return memory[:, order.to(memory.device)]

    @torch.no_grad()
    def after_step(self) -> None:
        if self.bank is None or self._fresh is None:
            return
        z, index = self._fresh
        if world_size() > 1:
            z = torch.cat([gather_rows(half, row_counts(half)) for half in z.chunk(2)])
            index = gather_rows(index, row_counts(index))
        memory = self.get_buffer("memory")
        index = index.to(memory.device)
        fresh = F.normalize(z.to(memory.dtype), dim=1).unflatten(0, (2, -1))
        memory[:, index] = F.normalize(memory[:, index].lerp(fresh, 1 - self.momentum), dim=2)
        self._fresh = None

    def features(self, images: Tensor) -> Tensor:
        light, colour = self.halves(images)
        return torch.cat([self.light.features(light), self.colour.features(colour)], 1)

    def embedding(self, images: Tensor) -> Tensor:
        light, colour = self.halves(images)
        return F.normalize(self.light(light), dim=1) + F.normalize(self.colour(colour), dim=1)


def both_directions(z: Tensor, count: int, memory: Tensor | None, labels: Tensor | None) -> Pairs:
    """Pairs of two halves z (2B, d) that see only each other: an anchor's candidates lie in the other half.

    memory (2, Q, d): with it, negatives are the other half's memory instead of the batch.
    """
    first = torch.arange(2 * count, device=z.device) < count  # (2B,)
    row = torch.arange(2 * count, device=z.device)
    partner = (row + count) % (2 * count)
    halves = torch.stack([row[:count], row[count:]])  # (2, B)
    own = torch.where(first[:, None], halves[0], halves[1])  # (2B, B)
    if memory is None:
        return Pairs(z, z, partner[:, None], own, None if labels is None else labels.repeat(2))
    size = memory.shape[1]
    other = torch.where(first[:, None], halves[1], halves[0])
    other = other[other != partner[:, None]].view(2 * count, count - 1)
    places = torch.arange(2 * size, device=z.device).view(2, size) + 2 * count
    unseen = torch.where(first[:, None], places[0], places[1])  # the memory of the anchor's own half
    return Pairs(
        z,
        torch.cat([z, memory.flatten(0, 1)]),
        partner[:, None],
        torch.cat([own, other, unseen], 1),
        None if labels is None else labels.repeat(2),
        shared=(2 * count, 2 * count + 2 * size),
    )


class MultiCrop(OneBranch):
    """SwAV's framework (Caron et al. 2020): every crop is an anchor, the large crops (and a queue) are the candidates.

    An anchor's positives are the other large crops of its image. Made for the objective `swav`, whose codes are
    computed over all candidates, the queue included; any other objective sees the queue as negatives.
    """

    def __init__(self, build: Build, channels: int, tap: str | None, large: int, queue: int) -> None:
        super().__init__(build, channels, tap)
        self.large = large
        self.queue = Queue(queue, self.embedding_dim) if queue else None
        self._fresh: Tensor | None = None

    def forward(self, batch: Batch) -> Pairs:
        count = len(batch.views[0])
        big, small = batch.views[: self.large], batch.views[self.large :]
        parts = [self.branch(torch.cat(big))] + ([self.branch(torch.cat(small))] if small else [])
        z = torch.cat(parts)  # (V B, d), view-major
        targets = parts[0]
        self._fresh = targets.detach()
        queue = None
        if self.queue is not None:
            queue = self.queue.get_buffer("rows")[: int(self.queue.get_buffer("filled"))].to(z.dtype)
        return crops(z, targets, queue, count, self.large, batch.labels)

    @torch.no_grad()
    def after_step(self) -> None:
        if self.queue is not None and self._fresh is not None:
            fresh = self._fresh
            self.queue.push(fresh if world_size() == 1 else gather_rows(fresh, row_counts(fresh)))
        self._fresh = None


def crops(z: Tensor, targets: Tensor, queue: Tensor | None, count: int, large: int, labels: Tensor | None) -> Pairs:
    """Pairs of all crops z (V B, d), view by view, with the large ones among them, targets (large B, d), and a queue.

    count: images of the batch, B. large: how many of the views are large; they come first.
    """
    candidates = targets if queue is None else torch.cat([targets, queue])
    row = torch.arange(len(z), device=z.device)
    places = (row % count)[:, None] + count * torch.arange(large, device=z.device)
    own = (places == row[:, None]) & (row[:, None] < len(targets))
    # A large crop is no positive of itself: its place moves to `dropped`.
    positives = torch.where(own, -1, places)
    dropped = torch.where(own.any(1), row, -1)[:, None]
    return Pairs(
        z,
        candidates,
        positives,
        dropped,
        None if labels is None else labels.repeat(len(z) // count),
        shared=(len(targets), len(candidates)),
    )
