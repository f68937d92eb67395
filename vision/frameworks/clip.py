"""CLIP: an image encoder and a text encoder, contrasted in both directions."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from dipole.core.objectives.encoded_batch import EncodedBatch
from dipole.core.objectives.pairs import Pairs
from dipole.core.utils.errors import ConfigError
from dipole.vision.captions import CaptionBranch
from dipole.vision.frameworks.base import AnyObjective, Batch, Draw, OneBranch, Setup, embedded, register_framework
from dipole.vision.frameworks.branch import check_built, check_module, measured, placed_like, rows_of
from dipole.vision.settings import PairsName, VisionSettings


class TextBranch(nn.Module):
    """A text encoder with a row for each text, and its projection head, None for a linear layer to `dim`."""

    def __init__(self, encoder: nn.Module, head: nn.Module | None, dim: int) -> None:
        super().__init__()
        check_module("text_head", head)
        check_built(encoder)
        self.encoder = encoder
        if head is None:
            device = next((each.device for each in encoder.parameters()), None)
            tokens = [torch.zeros(1, length, dtype=torch.long, device=device) for length in (2, 8, 77)]
            found = measured(encoder, tokens, f"Give its head, such as text_head=torch.nn.Linear(WIDTH, {dim}).")
            head = placed_like(nn.Linear(found[0][1], dim), encoder)
        self.projector = head

    def forward(self, *texts: Any, **named: Any) -> Tensor:
        """Return the embeddings of texts, (n, dim)."""
        embeddings: Tensor = self.projector(rows_of(self.encoder(*texts, **named), self.encoder))
        return embeddings


@register_framework("clip")
class CLIP(OneBranch):
    """An image finds its caption in the batch, and a caption its image (Radford et al. 2021, Fig. 3).

    The image has one augmentation. By default both encoders have a linear head of one width. The image encoder is used
    after training.

        >>> images = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3, 2), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1))
        >>> texts = torch.nn.Sequential(torch.nn.EmbeddingBag(100, 16), torch.nn.Linear(16, 32))
        >>> model = CLIP(images, texts, objective="infonce(temperature=learned)")
        >>> loss = model([torch.rand(8, 3, 32, 32)], torch.randint(100, (8, 12)))

    Args:
        backbone: any module that maps images (n, C, H, W) to features (n, ...), which are flattened.
        text: any module from texts to features (n, ...). Models of transformers with a pooled output do as well.
        objective: its text, an Objective or a Composite.
        head: the projection head. None is the paper's (`projection_head`), `nn.Identity()` is none.
        text_head: the projection head of the texts. None is a linear layer to the width of the images.

    Raises:
        ConfigError: images and texts have embeddings of different widths, or a width is unknown.
    """

    single = "its caption is the other view"
    without_negatives = "an image's negatives are the other captions of the batch, and vice versa"
    positives_key = ""
    reads_captions = True
    pairs: ClassVar[tuple[PairsName, ...]] = ("columns",)
    head_name = "clip"
    caption: Any
    """A `CaptionBranch` in a run, else a `TextBranch`."""

    def __init__(
        self,
        backbone: nn.Module,
        text: nn.Module,
        objective: AnyObjective | None,
        head: nn.Module | None = None,
        text_head: nn.Module | None = None,
    ) -> None:
        super().__init__(backbone, objective, head)
        self.caption = text if isinstance(text, CaptionBranch) else TextBranch(text, text_head, self.embedding_dim)
        if isinstance(text, CaptionBranch) and text.width != self.embedding_dim:
            raise ConfigError(
                f"vision.encoder.projector: images have {self.embedding_dim} numbers and captions "
                f"{text.width}; projector = 'linear' or 'mlp' brings both to vision.encoder.dim."
            )

    def forward(  # type: ignore[override]
        self, views: Sequence[Tensor], texts: Any, labels: Tensor | None = None, index: Tensor | None = None
    ) -> Tensor:
        """Return the loss of a batch, (), with gradient. With several ranks, each gives its own images.

        Args:
            views: one batch of images, [(B, C, H, W)].
            texts: argument of the text encoder, such as tokens (B, T). A tuple holds several, a dictionary (a
                tokenizer's) names them.
            labels: (B,) class of each pair, for objectives that use labels.
            index: (B,) index of each pair in the data set.
        """
        return self._loss_of(views, labels, index, texts)

    @classmethod
    def from_config(cls, config: VisionSettings, setup: Setup) -> Self:
        assert config.caption is not None  # the configuration has checked it
        return cls(setup.branch(), CaptionBranch(config.caption, config.encoder), None)

    @classmethod
    def sample(cls, views: int, rows: Draw, labels: Tensor | None) -> Pairs:
        return Pairs.both(rows(), rows(), labels)

    def embed(self, batch: Batch) -> EncodedBatch:
        (view,) = batch.views
        image, texts = self.branch(view), batch.captions
        if isinstance(texts, Mapping):
            caption = self.caption(**texts)
        elif isinstance(texts, tuple):
            caption = self.caption(*texts)
        else:
            caption = self.caption(texts)
        return embedded({"image": image, "caption": caption}, batch, self._pair)

    def _pair(self, rows: dict[str, Tensor], seed: int) -> Pairs:
        return Pairs.both(rows["image"], rows["caption"], rows.get("labels"), rows.get("index"))
