"""Blocks of images of one class, as Arora et al. simulate their latent classes."""

from typing import Any, ClassVar, Self

from pydantic import Field
from torch import Tensor, nn

from dipole.core.objectives.encoded_batch import EncodedBatch
from dipole.core.objectives.pairs import Pairs
from dipole.core.train.class_blocks import ClassBlocks
from dipole.core.train.config import Settings
from dipole.core.utils.errors import ConfigError
from dipole.core.utils.seeding import Seeds
from dipole.vision.frameworks.base import AnyObjective, Batch, Draw, OneBranch, Setup, embedded, register_framework
from dipole.vision.image_set import ImageSet, Order, complete_labels
from dipole.vision.pairs import check_any_order
from dipole.vision.settings import VisionSettings


class BlocksConfig(Settings):
    """The [vision.blocks] table."""

    defaults_version: ClassVar[int] = 2  # 2: a block holds size + 1 images, each class drawn independently

    size: int = Field(2, ge=1, description="positives of an image, b; a block is b + 1 images of one class")
    count: int | None = Field(None, ge=1, description="blocks of a class, drawn once (default new ones in every epoch)")

    @property
    def images(self) -> int:
        """Images of a block: x and its b positives."""
        return self.size + 1


@register_framework("blocks")
class Blocks(OneBranch):
    """One network. The b + 1 `images` of a block, of one class, are positives (Arora et al. 2019, Sec. 8.1).

    Labels choose the images of a block, and each is x once. The loss does not use labels, but supervised references
    get them.
    """

    table = BlocksConfig
    single = "the images of a block are each other's positives"
    pairs = ("augmented",)
    without_negatives = "objectives take their own, as in blocks(k=4)"
    positives_key = "blocks.size"
    counts_anchor = False

    def __init__(
        self, backbone: nn.Module, objective: AnyObjective | None, head: nn.Module | None = None, images: int = 3
    ) -> None:
        super().__init__(backbone, objective, head)
        self.images = images

    @classmethod
    def from_config(cls, config: VisionSettings, setup: Setup) -> Self:
        return cls(setup.branch(), None, images=config.own_table.images)

    @classmethod
    def check_images(cls, images: ImageSet) -> None:
        complete_labels(images, "vision.method: blocks are images of one class, and", "method = 'simclr'")
        check_any_order(images, "vision.method: blocks", "take method = 'simclr'")

    @classmethod
    def order(cls, config: VisionSettings, images: ImageSet, batch_size: int, world_size: int, seed: Seeds) -> Order:
        table: BlocksConfig = config.own_table
        cls.check_images(images)
        if batch_size // world_size % table.images:
            where = f" in each of {world_size} processes" if world_size > 1 else ""
            raise ConfigError(
                f"train.batch_size: {batch_size} is not a multiple of blocks of {table.images} images (an image and "
                f"its vision.blocks.size = {table.size} positives){where}. Give a multiple of "
                f"{table.images * world_size}."
            )
        assert images.labels is not None
        blocks = ClassBlocks(images.labels.numpy(), table.images, table.count, seed)
        if len(blocks) < batch_size:
            raise ConfigError(
                f"train.batch_size: {batch_size} is more than the {len(blocks)} images of all blocks. "
                "Give fewer, or raise vision.blocks.count."
            )
        return blocks

    @classmethod
    def sample(cls, views: int, rows: Draw, labels: Tensor | None) -> Pairs:
        blocks = len(rows()) // views
        if labels is not None:
            labels = labels[: blocks * views : views]
        return Pairs.from_blocks(rows(views)[:blocks], anchors="all", labels=labels)

    def embed(self, batch: Batch) -> EncodedBatch:
        (view,) = batch.views
        z = self.branch(view)
        # A row is a block. Its index and label are those of its first image.
        labels, rows = (None if each is None else each[:: self.images] for each in (batch.labels, batch.rows))
        blocks = z.view(-1, self.images, z.shape[1])
        return embedded({"block": blocks}, batch._replace(labels=labels, rows=rows), self._pair)

    def _pair(self, rows: dict[str, Any], seed: int) -> Pairs:
        return Pairs.from_blocks(rows["block"], "all", labels=rows.get("labels"), index=rows.get("index"), draw=seed)
