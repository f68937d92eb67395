"""Blocks of images of one class, as Arora et al. simulate their latent classes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, ClassVar, Self

from pydantic import Field
from torch import Tensor

from dipole.core.objectives.embedded import Embedded
from dipole.core.objectives.pairs import Pairs
from dipole.core.train.config import Settings
from dipole.core.train.sampling import ClassBlocks
from dipole.core.utils.errors import ConfigError
from dipole.core.utils.seeding import Seeds
from dipole.vision.decoding import Encoded
from dipole.vision.frameworks.base import Batch, Build, OneBranch, Related, Setup, instances, register_framework
from dipole.vision.image_set import ImageSet

if TYPE_CHECKING:
    from dipole.vision.config import VisionConfig


class BlocksConfig(Settings):
    """The [vision.blocks] table."""

    defaults_version: ClassVar[int] = 2  # 2: a block holds size + 1 images, its class drawn by itself

    size: int = Field(
        2, ge=1, description="positives of an image, b; a block is it and they, b + 1 images of one class"
    )
    count: int | None = Field(
        None, ge=1, description="blocks of each class, drawn once; default: from all images, in every epoch anew"
    )

    @property
    def images(self) -> int:
        """Images of a block: x and its b positives."""
        return self.size + 1


@register_framework("blocks")
class Blocks(OneBranch):
    """One network; the images of a block, all of one class, are each other's positives (Arora et al. 2019, Sec. 8.1).

    The batch is blocks of `size` + 1 images, one after another, each of them x in turn and the others its positives.
    Labels choose the blocks and are carried for supervised references; the block loss does not see them.
    """

    table = BlocksConfig
    single = "the images of a block are each other's positives"
    pairs = ("augmented",)
    without_negatives = "objectives take their own, as in blocks(k=4)"
    positives_key = "blocks.size"
    counts_anchor = False

    def __init__(self, build: Build, channels: int, tap: str | None, images: int) -> None:
        super().__init__(build, channels, tap)
        self.images = images

    @classmethod
    def from_config(cls, config: VisionConfig, setup: Setup) -> Self:
        return cls(setup.build, setup.images.channels, config.encoder.tap, config.own_table.images)

    @classmethod
    def check_images(cls, images: ImageSet) -> None:
        if images.labels is None or bool((images.labels < 0).any()):
            raise ConfigError(
                f"vision.method: blocks are images of one class, and {images.name} has images without a label; take a "
                "labelled split, or method = 'simclr'."
            )
        if isinstance(images.images, Encoded) and images.images.stream is not None and images.images.stream.forward:
            raise ConfigError(
                f"vision.method: blocks are drawn by class from all of {images.name}, which is read one image after "
                "another; leave vision.data.streaming out, or take method = 'simclr'."
            )

    @classmethod
    def order(
        cls, config: VisionConfig, images: ImageSet, batch_size: int, world_size: int, seed: Seeds
    ) -> ClassBlocks:
        table: BlocksConfig = config.own_table
        cls.check_images(images)
        if batch_size // world_size % table.images:
            whole = "" if world_size == 1 else f" in each of {world_size} processes"
            raise ConfigError(
                f"train.batch_size: {batch_size} is no whole number of blocks of {table.images} images (an image and "
                f"its vision.blocks.size = {table.size} positives){whole}; give a multiple of "
                f"{table.images * world_size}."
            )
        assert images.labels is not None
        blocks = ClassBlocks(images.labels.numpy(), table.images, table.count, seed)
        if len(blocks) < batch_size:
            raise ConfigError(
                f"train.batch_size: {batch_size} is more than the {len(blocks)} images of all blocks; "
                "give fewer, or raise vision.blocks.count."
            )
        return blocks

    @classmethod
    def block_positives(cls, config: VisionConfig) -> int:
        size: int = config.own_table.size
        return size

    @classmethod
    def samples(
        cls, views: int, images: int, rows: Callable[..., Tensor], labels: Tensor | None
    ) -> Iterator[tuple[str, Related]]:
        if 1 < views <= images:
            blocks = images // views
            classes = None if labels is None else labels[: blocks * views : views]
            yield "blocks", Pairs.from_blocks(rows(blocks, views), anchors="all", labels=classes)

    def forward(self, batch: Batch) -> Embedded:
        (view,) = batch.views
        z = self.branch(view)
        # A row is a block; its index is that of its first image.
        rows = {name: values[:: self.images] for name, values in instances(batch, z).items()}

        def relate(rows: dict[str, Tensor]) -> Pairs:
            return Pairs.from_blocks(
                rows["block"], "all", labels=rows.get("labels"), index=rows["index"], draw=batch.seed
            )

        return Embedded({"block": z.view(-1, self.images, z.shape[1]), **rows}, relate)
