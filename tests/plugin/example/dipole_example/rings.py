"""A domain: its settings, its data, its encoder, what belongs together, and how well it did."""

import hashlib
from collections.abc import Iterator
from typing import Any, ClassVar, Unpack

import torch
from pydantic import Field
from torch import Tensor, nn

from dipole import Adapter, Context, EncodedBatch, Pairs, Settings


class RingsConfig(Settings):
    """The [rings] table."""

    points: int = Field(64, ge=4, description="number of points")
    noise: float = Field(0.1, ge=0, description="deviation of a view")


class RingsAdapter(Adapter):
    """Views are noisy copies of a point of the plane. The radius is its class."""

    domain: ClassVar[str] = "rings"
    config_model: ClassVar[type[Settings]] = RingsConfig
    embedding_dim = 4

    def __init__(self, config: RingsConfig, **context: Unpack[Context]) -> None:
        super().__init__(config, **context)
        angle = torch.rand(config.points, generator=self.seed.torch("data")) * 2 * torch.pi
        self.labels = torch.arange(config.points) % 2
        self.points = (1 + self.labels).unsqueeze(1) * torch.stack([angle.cos(), angle.sin()], 1)  # (n, 2)
        self.module = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, self.embedding_dim))
        self.steps_per_epoch = config.points // self.batch_size

    def batches(self, epoch: int, start: int = 0) -> Iterator[Tensor]:
        order = torch.randperm(len(self.points), generator=self.seed.torch("order", epoch))
        share = self.batch_size // self.world_size
        for step in range(start, self.steps_per_epoch):
            chosen = self.points[order[step * self.batch_size : (step + 1) * self.batch_size]]
            noise = torch.randn(2, *chosen.shape, generator=self.seed.torch("augment", epoch, step))
            views = chosen + self.config.noise * noise  # (2, B, 2)
            yield views[:, self.rank * share : (self.rank + 1) * share].to(self.device)

    def embed(self, batch: Tensor) -> EncodedBatch:
        first, second = self.module(batch)
        rows = {"first": first, "second": second}
        return EncodedBatch(rows, lambda rows: Pairs.from_views([rows["first"], rows["second"]]))

    @torch.no_grad()
    def features(self, split: str) -> tuple[Tensor, Tensor | None]:
        return self.module(self.points.to(self.device)).cpu(), self.labels

    def evaluate(self, objective: Any) -> dict[str, float]:
        z, labels = self.features("test")
        means = torch.stack([z[labels == label].mean(0) for label in range(2)])
        return {"mean/accuracy": float((torch.cdist(z, means).argmin(1) == labels).float().mean())}

    def data_info(self) -> dict[str, Any]:
        content = hashlib.sha256(self.points.numpy().tobytes()).hexdigest()
        return {"name": "rings", "fingerprint": content, "sizes": {"test": len(self.points)}}
