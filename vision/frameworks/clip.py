"""CLIP: an image encoder and a text encoder, contrasted in both directions."""

from __future__ import annotations

from typing import ClassVar, Self

from torch import Tensor, nn

from dipole.core.objectives.encoded_batch import EncodedBatch
from dipole.core.objectives.pairs import Pairs
from dipole.core.utils.errors import ConfigError
from dipole.vision.captions import CaptionBranch
from dipole.vision.frameworks.base import Batch, OneBranch, Rows, Setup, embedded, register_framework
from dipole.vision.settings import PairKind, VisionSettings


@register_framework("clip")
class CLIP(OneBranch):
    """An image finds its caption in the batch, and a caption its image (Radford et al. 2021, Fig. 3).

    The image has one augmentation. Both encoders have a projector of the same kind and width. The image encoder is used
    after training.

    Args:
        backbone, projector: as in `OneBranch`.
        caption: the text encoder with its projector.
    """

    single = "its caption is the other view"
    without_negatives = "an image's negatives are the other captions of the batch, and vice versa"
    positives_key = ""
    reads_captions = True
    pairs: ClassVar[tuple[PairKind, ...]] = ("columns",)

    def __init__(self, backbone: nn.Module, projector: nn.Module | None, caption: CaptionBranch) -> None:
        super().__init__(backbone, projector)
        self.caption = caption
        if caption.width != self.embedding_dim:
            raise ConfigError(
                f"vision.encoder.projector: images have {self.embedding_dim} numbers and captions "
                f"{caption.width}; projector = 'linear' or 'mlp' brings both to vision.encoder.dim."
            )

    @classmethod
    def from_config(cls, config: VisionSettings, setup: Setup) -> Self:
        assert config.caption is not None  # the configuration has checked it
        return cls(setup.branch(), None, CaptionBranch(config.caption, config.encoder))

    @classmethod
    def sample(cls, views: int, rows: Rows, labels: Tensor | None) -> Pairs:
        return Pairs.both(rows(), rows(), labels)

    def forward(self, batch: Batch) -> EncodedBatch:
        (view,) = batch.views
        assert batch.captions is not None
        return embedded({"image": self.branch(view), "caption": self.caption(*batch.captions)}, batch, self.pair)

    def pair(self, rows: dict[str, Tensor], seed: int) -> Pairs:
        return Pairs.both(rows["image"], rows["caption"], rows.get("labels"), rows["index"])
