"""The smallest real domain: Gaussian blobs, a linear encoder with dropout, optionally a queue of old keys.

As a script it is `dipole` with this domain: python blobs_domain.py train RECIPE ... It runs the lines of
BLOBS_FIRST before and prints their exit codes.
"""

import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Unpack

import torch
from pydantic import Field
from torch import Tensor, nn

from dipole.core.objectives.pairs import Pairs
from dipole.core.train.adapter import Adapter, Context
from dipole.core.train.config import Settings
from dipole.core.train.domains import Domain, add_domain

RECIPE = """
name = "blobs"
description = "Gaussian blobs in the plane"
domain = "blobs"
objective = "infonce"

[train]
steps = 10
batch_size = 16
learning_rate = 0.01
checkpoint_every = 100
log_every = 3
"""


class BlobsConfig(Settings):
    """Blobs."""

    points: int = Field(64, ge=8, description="number of points")
    classes: int = Field(4, ge=2)
    noise: float = Field(0.3, ge=0, description="deviation of a view")
    dropout: float = Field(0.1, ge=0, lt=1)
    queue: int = Field(0, ge=0, description="old keys as further negatives")
    scales: tuple[float, ...] = (1.0, 1.0)


class BlobsAdapter(Adapter):
    """Views are noisy copies of points. Classes are blobs."""

    domain = "blobs"
    config_model = BlobsConfig
    export_formats = ("text",)
    embedding_dim = 8
    on_batch: ClassVar[Callable[[int], None]] = staticmethod(lambda index: None)
    spoil: ClassVar[Callable[[Tensor], Tensor]] = staticmethod(lambda z: z)

    def __init__(self, config: BlobsConfig, **context: Unpack[Context]) -> None:
        super().__init__(config, **context)
        generator = self.seed.torch("data")
        centers = torch.randn(config.classes, 6, generator=generator) * 3
        self.labels = torch.arange(config.points) % config.classes
        self.points = centers[self.labels] + torch.randn(config.points, 6, generator=generator)
        self.module = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(config.dropout), nn.Linear(16, 8))
        self.steps_per_epoch = config.points // self.batch_size
        self.queue = torch.randn(config.queue, 8, generator=generator)

    def batches(self, epoch: int, start: int = 0) -> Iterator[Any]:
        order = torch.randperm(len(self.points), generator=self.seed.torch("data", "order", epoch))
        share = self.batch_size // self.world_size
        for index in range(start, self.steps_per_epoch):
            type(self).on_batch(index)
            chosen = order[index * self.batch_size : (index + 1) * self.batch_size]
            noise = torch.randn(2, self.batch_size, 6, generator=self.seed.torch("augment", epoch, index))
            views = (self.points[chosen] + self.config.noise * noise)[:, self.rank * share : (self.rank + 1) * share]
            yield (
                views.to(self.device),
                self.labels[chosen][self.rank * share : (self.rank + 1) * share].to(self.device),
            )

    def embed(self, batch: Any) -> Pairs:
        views, labels = batch
        z1, z2 = type(self).spoil(self.module(views.flatten(0, 1))).chunk(2)
        self._keys = z2.detach()
        if self.config.queue:
            return Pairs.cross(z1, z2, queue=self.queue.to(z1), labels=labels)
        return Pairs.from_views([z1, z2], labels=labels)

    def after_step(self) -> None:
        if self.config.queue:
            self.queue = torch.cat([self._keys.to(self.queue), self.queue])[: self.config.queue]

    def evaluate(self, objective: Any) -> dict[str, float]:
        z, labels = self.features("test")
        z = objective.transform(z) if objective is not None else z
        means = torch.stack([z[labels == label].mean(0) for label in range(self.config.classes)])
        accuracy = (torch.cdist(z, means).argmin(1) == labels).float().mean()
        return {"mean/accuracy": float(accuracy), "random": float(torch.rand(()))}

    def features(self, split: str) -> tuple[Tensor, Tensor | None]:
        with torch.no_grad():
            return self.module(self.points.to(self.device)).cpu(), self.labels

    def data_info(self) -> dict[str, Any]:
        content = hashlib.sha256(self.points.numpy().tobytes()).hexdigest()
        return {"name": "blobs", "fingerprint": content, "sizes": {"test": len(self.points)}}

    def state_dict(self) -> dict[str, Any]:
        return {"queue": self.queue}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not isinstance(state["queue"], Tensor) or state["queue"].shape != self.queue.shape:
            raise ValueError("'queue' is not what a run writes")
        self.queue = state["queue"]

    def export(self, to: str, folder: Any, record: Any, objective: Any = None) -> None:
        (folder / "weights.txt").write_text(f"{record.objective}\n{self.module[0].weight.tolist()}")


BLOBS = Domain("blobs", "Gaussian blobs", "blobs_domain:BlobsAdapter", package="blobs")

if __name__ == "__main__":
    # Under its own name, as the tests import it: the source of a domain is part of what identifies a run.
    import blobs_domain

    from dipole.core.cli import main

    add_domain(blobs_domain.BLOBS)
    if "BLOBS_SECONDS" in os.environ:
        blobs_domain.BlobsAdapter.on_batch = staticmethod(lambda index: time.sleep(float(os.environ["BLOBS_SECONDS"])))
    for line in os.environ.get("BLOBS_FIRST", "").splitlines():
        print(main(line.split()), flush=True)
    sys.exit(main())
