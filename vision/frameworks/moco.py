"""MoCo: keys from a slowly moving copy of the network, negatives from a queue of past keys."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Self

import torch
from pydantic import Field
from torch import Tensor

from dipole.core.objectives.embedded import Embedded
from dipole.core.objectives.pairs import Pairs
from dipole.core.train.config import Settings
from dipole.core.utils.distributed import gather_rows, row_counts, world_size
from dipole.core.utils.transfer import to_device
from dipole.vision.encoders import Encoder
from dipole.vision.frameworks.base import Batch, Branch, Build, Method, Related, Setup, instances, register_framework
from dipole.vision.frameworks.queue import Queue, of_all_ranks

if TYPE_CHECKING:
    from dipole.vision.config import VisionConfig


class MoCoConfig(Settings):
    """The [vision.moco] table."""

    momentum: float = Field(0.999, ge=0, lt=1, description="of the key encoder")
    intra_batch: bool = Field(False, description="the other queries are negatives too (CACR App. C.2)")
    symmetric: bool = Field(False, description="every view is a query in turn (CACR Algorithm 3)")
    batch_negatives: bool | None = Field(
        None,
        description="the other images' keys are negatives besides the queue; He et al. and CACR: false. "
        "Default: true, and false with symmetric",
    )

    @property
    def keys_repel(self) -> bool:
        """Whether the other images' keys of the batch are negatives."""
        return not self.symmetric if self.batch_negatives is None else self.batch_negatives


@register_framework("moco")
class MoCo(Method):
    """MoCo-v2 (He et al. 2020; Chen et al. 2020): keys from a slowly moving copy, negatives from a queue of past keys.

    The first view is the query, the others are its keys, so K + 1 views give K positives; the last view's keys enter
    the queue (CACR Algorithm 3). intra_batch: the other queries are negatives too (CACR App. C.2). With several ranks
    the key batch is shuffled over them, so that batch norm gives no hint of who belongs together. The queue starts with
    random unit vectors, as in the authors' code.

    batch_negatives: the other images' keys are negatives besides the queue; the queue alone repels in He et al. 2020.
    symmetric: CACR Algorithm 3: every view is a query in turn and has the keys of the image's other views as positives;
    its negatives are the queue (alone, by default) and, with intra_batch, the other queries of its view, of all ranks.
    """

    table = MoCoConfig
    negatives_mean = "keys in the queue (default 65536)"
    default_negatives = 65_536

    def __init__(
        self,
        build: Build,
        channels: int,
        tap: str | None,
        size: int,
        momentum: float,
        intra_batch: bool,
        symmetric: bool = False,
        batch_negatives: bool = True,
    ) -> None:
        super().__init__()
        encoder, projector, self.embedding_dim = build(channels)
        self.query = Branch(encoder, projector, tap)
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.queue = Queue(size, self.embedding_dim)
        self.momentum = momentum
        self.intra_batch = intra_batch
        self.symmetric = symmetric
        self.batch_negatives = batch_negatives
        self._fresh: Tensor | None = None

    @classmethod
    def from_config(cls, config: VisionConfig, setup: Setup) -> Self:
        table: MoCoConfig = config.own_table
        size = config.negatives or 0  # the config has filled the default in
        return cls(
            setup.build,
            setup.images.channels,
            config.encoder.tap,
            size,
            table.momentum,
            table.intra_batch,
            table.symmetric,
            table.keys_repel,
        )

    @classmethod
    def samples(
        cls, views: int, images: int, rows: Callable[..., Tensor], labels: Tensor | None
    ) -> Iterator[tuple[str, Related]]:
        if views > 1:
            yield "moco", Pairs.cross(rows(images), rows(images, views - 1), rows(images), labels=labels)

    def forward(self, batch: Batch) -> Embedded:
        asked = batch.views if self.symmetric else batch.views[:1]
        answering = batch.views if self.symmetric else batch.views[1:]
        # A pass per view, as in the reference: batch norm sees one view at a time.
        queries = [self.query(view) for view in asked]
        with torch.no_grad():
            keys = [self._keys(view, batch.seed + n).to(queries[0].dtype) for n, view in enumerate(answering)]
        self._fresh = keys[-1]
        queue = self.queue.get_buffer("rows").to(queries[0].dtype)
        symmetric, intra_batch, batch_negatives = self.symmetric, self.intra_batch, self.batch_negatives

        def relate(rows: dict[str, Tensor]) -> Related:
            labels, index = rows.get("labels"), rows["index"]
            queries = [rows[f"query{number}"] for number in range(len(asked))]
            keys = [rows[f"key{number}"] for number in range(len(answering))]
            if symmetric:
                return every_view_in_turn(queries, keys, queue, intra_batch, labels, index, batch_negatives)
            several = torch.stack(keys, 1)
            return Pairs.cross(
                queries[0], several, queue, intra_batch, labels, batch_negatives=batch_negatives, index=index
            )

        rows = {f"query{number}": query for number, query in enumerate(queries)}
        rows |= {f"key{number}": key for number, key in enumerate(keys)}
        return Embedded({**rows, **instances(batch, queries[0])}, relate)

    def _keys(self, images: Tensor, seed: int) -> Tensor:
        if world_size() == 1:
            return self.key(images)
        # Shares of ranks may differ: each embeds as many as it brought, and takes its own back.
        sizes = row_counts(images)
        start = sum(sizes[: torch.distributed.get_rank()])
        mine = slice(start, start + len(images))
        # Drawn on the host: ranks with different devices must agree.
        order = to_device(torch.randperm(sum(sizes), generator=torch.Generator().manual_seed(seed)), images.device)
        keys = self.key(gather_rows(images, sizes)[order[mine]])
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return gather_rows(keys, sizes)[back[mine]]

    @torch.no_grad()
    def after_step(self) -> None:
        torch._foreach_lerp_(list(self.key.parameters()), list(self.query.parameters()), 1 - self.momentum)
        if self._fresh is not None:
            self.queue.push(*of_all_ranks(self._fresh))
            self._fresh = None

    def features(self, images: Tensor) -> Tensor:
        return self.query.features(images)

    def embedding(self, images: Tensor) -> Tensor:
        return self.query(images)

    def branches(self) -> list[Branch]:
        return [self.query]

    def trained_encoder(self) -> Encoder:
        return self.query.encoder


def every_view_in_turn(
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    queue: Tensor | None,
    intra_batch: bool,
    labels: Tensor | None = None,
    index: Tensor | None = None,
    batch_negatives: bool = False,
) -> tuple[Pairs, ...]:
    """Pairs of CACR Algorithm 3 for queries and keys, V of (B, d) each, and a queue (Q, d) of negatives: V of them.

    With two views, without a queue and with `batch_negatives` they are those of SimSiam, BYOL, MoCo v3 and NNCLR.

    Source: CACR Algorithm 3, which has no `batch_negatives`. There a rank's queries see those of the same rank; here
    those of the whole batch.
    """
    return tuple(
        Pairs.cross(
            query,
            torch.stack([key for other, key in enumerate(keys) if other != number], 1),
            queue,
            intra_batch,
            labels,
            batch_negatives=batch_negatives,
            index=index,
        )
        for number, query in enumerate(queries)
    )
