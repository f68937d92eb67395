"""SwAV's multi-crop: every crop is an anchor, the large ones and a queue are what it is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Self

import torch
from pydantic import Field
from torch import Tensor

from dipole.core.objectives.embedded import Embedded
from dipole.core.objectives.pairs import Pairs
from dipole.core.train.config import Settings
from dipole.vision.augment import AugmentConfig
from dipole.vision.frameworks.base import Batch, Build, OneBranch, Related, Setup, instances, register_framework
from dipole.vision.frameworks.queue import Queue, of_all_ranks

if TYPE_CHECKING:
    from dipole.vision.config import VisionConfig


class SwAVConfig(Settings):
    """The [vision.swav] table."""

    small_views: int = Field(0, ge=0, description="small crops per image besides the large ones")
    small_size: int = Field(96, ge=4, description="their side in pixels")
    small_scale: tuple[float, float] = Field((0.05, 0.14), description="their share of the area")


@register_framework("swav")
class MultiCrop(OneBranch):
    """SwAV's framework (Caron et al. 2020): every crop is an anchor, the large crops (and a queue) are the candidates.

    An anchor's positives are the other large crops of its image. Made for the objective `swav`, whose codes are
    computed over all candidates, the queue included; any other objective sees the queue as negatives.
    """

    table = SwAVConfig
    negatives_mean = "past embeddings in the queue"

    def __init__(self, build: Build, channels: int, tap: str | None, large: int, queue: int) -> None:
        super().__init__(build, channels, tap)
        self.large = large
        self.queue = Queue(queue, self.embedding_dim) if queue else None
        self._fresh: list[Tensor] = []

    @classmethod
    def from_config(cls, config: VisionConfig, setup: Setup) -> Self:
        return cls(setup.build, setup.images.channels, config.encoder.tap, config.count, config.negatives or 0)

    @classmethod
    def augmentations(cls, config: VisionConfig) -> list[AugmentConfig]:
        table: SwAVConfig = config.own_table
        small = {"size": table.small_size, "crop_scale": table.small_scale}
        smaller = config.augment.model_copy(update=small)
        behind = range(config.count + 1, config.count + table.small_views + 1)
        return [*super().augmentations(config), *(smaller.of_view(number) for number in behind)]

    @classmethod
    def samples(
        cls, views: int, images: int, rows: Callable[..., Tensor], labels: Tensor | None
    ) -> Iterator[tuple[str, Related]]:
        if views > 1:
            large = [rows(images) for _ in range(views)]
            yield "swav", Pairs.from_crops(large, labels=labels)
            yield "swav with a queue", Pairs.from_crops(large, queue=rows(images), labels=labels)

    def forward(self, batch: Batch) -> Embedded:
        big, small = batch.views[: self.large], batch.views[self.large :]
        large_crops = self.branch(torch.cat(big)).chunk(len(big))
        small_crops = self.branch(torch.cat(small)).chunk(len(small)) if small else ()
        self._fresh = [crop.detach() for crop in large_crops]
        queue = None if self.queue is None else self.queue.past().to(large_crops[0].dtype)

        def relate(rows: dict[str, Tensor]) -> Pairs:
            large = [rows[f"large{number}"] for number in range(len(big))]
            smaller = [rows[f"small{number}"] for number in range(len(small))]
            return Pairs.from_crops(large, smaller, queue, rows.get("labels"), rows["index"])

        rows = {f"large{number}": crop for number, crop in enumerate(large_crops)}
        rows |= {f"small{number}": crop for number, crop in enumerate(small_crops)}
        return Embedded({**rows, **instances(batch, large_crops[0])}, relate)

    @torch.no_grad()
    def after_step(self) -> None:
        if self.queue is not None and self._fresh:
            self.queue.push(torch.cat(of_all_ranks(*self._fresh)))
        self._fresh = []
