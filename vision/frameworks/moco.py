"""MoCo: keys from a slowly moving copy of the network, negatives from a queue of past keys."""

from collections.abc import Sequence
from typing import Any, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from dipole.core.objectives.encoded_batch import EncodedBatch
from dipole.core.objectives.pairs import Pairs
from dipole.core.train.config import Settings
from dipole.core.utils.distributed import gather_rows, rank, row_counts, world_size
from dipole.core.utils.transfer import to_device
from dipole.vision.frameworks.base import AnyObjective, AnyPairs, Batch, Draw, OneBranch, embedded, register_framework
from dipole.vision.frameworks.branch import Setup, placed_like
from dipole.vision.frameworks.queue import Queue, check_momentum, momentum_copy, momentum_update
from dipole.vision.settings import VisionSettings


class MoCoConfig(Settings):
    """The [vision.moco] table."""

    momentum: float = Field(0.999, ge=0, lt=1, description="of the key encoder")
    intra_batch: bool = Field(False, description="the other queries are negatives too (CACR App. C.2)")
    symmetric: bool = Field(False, description="every view is a query in turn (CACR Algorithm 3)")
    batch_negatives: bool | None = Field(
        None,
        description="the other images' keys are negatives in addition to the queue; He et al. and CACR: false. "
        "Default: true, and false with symmetric",
    )


@register_framework("moco")
class MoCo(OneBranch):
    """MoCo-v2 (He et al. 2020; Chen et al. 2020): keys from a slowly moving copy, negatives from a queue of past keys.

    The first view is the query and the others are its keys, so K + 1 views give K positives. The last view's keys enter
    the queue (CACR Algorithm 3), which starts with random unit vectors, as in the authors' code. With several ranks the
    key batch is shuffled over them, so that batch norm does not reveal the pairs.

        >>> backbone = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3, 2), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1))
        >>> model = MoCo(backbone, objective="infonce(temperature=0.2)", queue=4096, batch_negatives=False)
        >>> loss = model([torch.rand(8, 3, 32, 32), torch.rand(8, 3, 32, 32)])
        >>> loss.backward()  # then optimizer.step()
        >>> model.after_step()  # moves the copy and fills the queue

    Args:
        backbone: any module that maps images (n, C, H, W) to features (n, ...), which are flattened.
        objective: its text, an Objective or a Composite.
        head: the projection head. None is the paper's (`projection_head`), `nn.Identity()` is none.
        queue: number of keys in the queue.
        momentum: of the key encoder.
        intra_batch: the other queries are negatives too (CACR App. C.2).
        symmetric: every view is a query in turn, with the keys of the image's other views as positives (CACR Algorithm
            3). Its negatives are the queue and, with intra_batch, the other queries of its view, of all ranks.
        batch_negatives: the other images' keys are negatives too. None means unless symmetric. He et al. 2020: False.
    """

    table = MoCoConfig
    head_name = "moco"
    negatives_mean = "keys in the queue (default 65536)"
    default_negatives = 65_536

    def __init__(
        self,
        backbone: nn.Module,
        objective: AnyObjective | None,
        head: nn.Module | None = None,
        queue: int = 65_536,
        momentum: float = 0.999,
        intra_batch: bool = False,
        symmetric: bool = False,
        batch_negatives: bool | None = None,
    ) -> None:
        super().__init__(backbone, objective, head)
        check_momentum(momentum)
        self.key = momentum_copy(self.branch)
        self.queue = placed_like(Queue(queue, self.embedding_dim), self.backbone)
        self.momentum = momentum
        self.intra_batch = intra_batch
        self.symmetric = symmetric
        self.batch_negatives = not symmetric if batch_negatives is None else batch_negatives

    @classmethod
    def from_config(cls, config: VisionSettings, setup: Setup) -> Self:
        return cls(setup.branch(), None, queue=config.negatives or 0, **dict(config.own_table))

    @classmethod
    def sample(cls, views: int, rows: Draw, labels: Tensor | None) -> AnyPairs:
        return Pairs.cross(rows(), rows(views - 1), rows(), labels=labels)

    def embed(self, batch: Batch) -> EncodedBatch:
        queried, keyed = batch.views[:1], batch.views[1:]
        if self.symmetric:
            queried = keyed = batch.views
        # One pass per view, as in the reference: batch norm sees one view at a time.
        queries = [self.branch(view) for view in queried]
        with torch.no_grad():
            keys = [self._embed_keys(view, batch.seed + n).to(queries[0].dtype) for n, view in enumerate(keyed)]
        self._fresh.add(keys[-1])
        return embedded({"query": queries, "key": keys}, batch, self._pair)

    def _pair(self, rows: dict[str, Any], seed: int) -> AnyPairs:
        """Pair the rows of all ranks: "query" and "key", (B, d) for each view, and "index" and "labels" (B,)."""
        queries, keys = rows["query"], rows["key"]
        settings: dict[str, Any] = {
            "queue": self.queue.all(queries[0].dtype),
            "intra_batch": self.intra_batch,
            "batch_negatives": self.batch_negatives,
            "labels": rows.get("labels"),
            "index": rows.get("index"),
        }
        if self.symmetric:
            return every_view_in_turn(queries, keys, **settings)
        return Pairs.cross(queries[0], torch.stack(keys, 1), **settings)

    def _embed_keys(self, images: Tensor, seed: int) -> Tensor:
        """Return the keys of a view. With several ranks each embeds a random part of the batch of all ranks."""
        if world_size() == 1:
            return self.key(images)
        # Ranks may have different numbers of images: each embeds as many as it has.
        sizes = row_counts(images)
        start = sum(sizes[: rank()])
        mine = slice(start, start + len(images))
        # Drawn on the CPU: ranks with different devices must agree.
        order = to_device(torch.randperm(sum(sizes), generator=torch.Generator().manual_seed(seed)), images.device)
        keys = self.key(gather_rows(images, sizes)[order[mine]])
        return gather_rows(keys, sizes)[order.argsort()[mine]]

    def update(self) -> None:
        momentum_update(self.key, self.branch, self.momentum)
        super().update()


def every_view_in_turn(queries: Sequence[Tensor], keys: Sequence[Tensor], **settings: Any) -> tuple[Pairs, ...]:
    """Pair V queries (B, d) with the keys of the image's other views (with queue and intra_batch: CACR Algorithm 3)."""
    found = []
    for number, query in enumerate(queries):
        others = [key for other, key in enumerate(keys) if other != number]
        found.append(Pairs.cross(query, torch.stack(others, 1), **settings))
    return tuple(found)
