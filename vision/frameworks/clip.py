"""CLIP: an image encoder and a text encoder, contrasted in both directions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, ClassVar, Self

from torch import Tensor

from dipole.core.objectives.embedded import Embedded
from dipole.core.objectives.pairs import Pairs
from dipole.core.utils.errors import ConfigError
from dipole.vision.captions import CaptionBranch, CaptionConfig
from dipole.vision.encoders import EncoderConfig
from dipole.vision.frameworks.base import (
    Batch,
    Build,
    OneBranch,
    PairKind,
    Related,
    Setup,
    instances,
    register_framework,
)

if TYPE_CHECKING:
    from dipole.vision.config import VisionConfig


@register_framework("clip")
class CLIP(OneBranch):
    """An image finds its caption among those of the batch, and a caption its image (Radford et al. 2021, Fig. 3).

    The image sees one augmentation. Both encoders have a projector of the same kind and width; what is used after
    training is the image's.
    """

    single = "its caption is the other view"
    without_negatives = "an image's negatives are the other captions of the batch, and the other way round"
    positives_key = ""
    reads_captions = True
    pairs: ClassVar[tuple[PairKind, ...]] = ("columns",)

    def __init__(
        self, build: Build, channels: int, tap: str | None, caption: CaptionConfig, heads: EncoderConfig
    ) -> None:
        super().__init__(build, channels, tap)
        self.caption = CaptionBranch(caption, heads)
        if self.caption.width != self.embedding_dim:
            raise ConfigError(
                f"vision.encoder.projector: images have {self.embedding_dim} numbers and captions "
                f"{self.caption.width}; projector = 'linear' or 'mlp' brings both to vision.encoder.dim."
            )

    @classmethod
    def from_config(cls, config: VisionConfig, setup: Setup) -> Self:
        assert config.caption is not None  # the configuration has checked it
        return cls(setup.build, setup.images.channels, config.encoder.tap, config.caption, config.encoder)

    @classmethod
    def samples(
        cls, views: int, images: int, rows: Callable[..., Tensor], labels: Tensor | None
    ) -> Iterator[tuple[str, Related]]:
        yield "clip", Pairs.both(rows(images), rows(images), labels)

    def forward(self, batch: Batch) -> Embedded:
        (view,) = batch.views
        assert batch.captions is not None
        image, caption = self.branch(view), self.caption(*batch.captions)

        def relate(rows: dict[str, Tensor]) -> Pairs:
            return Pairs.both(rows["image"], rows["caption"], rows.get("labels"), rows["index"])

        return Embedded({"image": image, "caption": caption, **instances(batch, image)}, relate)
