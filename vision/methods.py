"""Frameworks: which networks see which views, and who is paired with whom."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dipole.core.pairs import Pairs
from dipole.vision.encoders import Encoder


class Method(nn.Module):
    """A framework: `forward(views)` gives the pairs of a batch, `features` and `embedding` what is used afterwards."""

    embedding_dim: int

    def forward(self, views: Sequence[Tensor], labels: Tensor | None = None) -> Pairs:
        """Pairs of views, each (B, C, H, W) in [0, 1], row b of each a view of image b."""
        raise NotImplementedError

    def features(self, images: Tensor) -> Tensor:
        """What probes see: the encoder's tap."""
        raise NotImplementedError

    def embedding(self, images: Tensor) -> Tensor:
        """What the objective sees: the projector's output."""
        raise NotImplementedError

    def after_step(self) -> None:
        """Update what follows the optimizer."""


class SimCLR(Method):
    """One encoder and one projector for all views; negatives are the rest of the batch (Chen et al. 2020)."""

    def __init__(self, encoder: Encoder, projector: nn.Module, embedding_dim: int, tap: str) -> None:
        super().__init__()
        self.encoder = encoder
        self.projector = projector
        self.embedding_dim = embedding_dim
        self.tap = tap

    def forward(self, views: Sequence[Tensor], labels: Tensor | None = None) -> Pairs:
        # One pass: batch norm sees all views together, as in the reference.
        z = self.projector(self.encoder(torch.cat(list(views))))
        return Pairs.from_views(list(z.chunk(len(views))), labels)

    def features(self, images: Tensor) -> Tensor:
        return self.encoder(images, self.tap)

    def embedding(self, images: Tensor) -> Tensor:
        return self.projector(self.encoder(images))
