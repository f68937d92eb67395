"""Vision as the trainer sees it: data, views, a framework and the probes."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from dipole.core.adapter import Adapter
from dipole.core.config import Settings
from dipole.core.errors import ConfigError
from dipole.core.probes import frozen
from dipole.core.seeding import Seeds
from dipole.vision.augment import AugmentConfig, apply, centre, draw
from dipole.vision.data import DataConfig, ImageSet, load
from dipole.vision.encoders import EncoderConfig, build_encoder, build_projector
from dipole.vision.evaluation import ProbeConfig, probe
from dipole.vision.methods import SimCLR

CHUNK = 512  # images per forward pass when features are extracted


class VisionConfig(Settings):
    """The [vision] table."""

    method: Literal["simclr"] = "simclr"
    views: int = Field(2, ge=2, le=16, description="views per image, K + 1")
    data: DataConfig = DataConfig()
    encoder: EncoderConfig = EncoderConfig()
    augment: AugmentConfig = AugmentConfig()
    probe: ProbeConfig = ProbeConfig()


class Batch(NamedTuple):
    """views: per view (B, C, H, W) in [0, 1] on the device; labels: (B,) or None."""

    views: list[Tensor]
    labels: Tensor | None


class VisionAdapter(Adapter):
    """Contrastive learning on images."""

    domain: ClassVar[str] = "vision"
    config_model: ClassVar[type[Settings]] = VisionConfig

    config: VisionConfig

    def __init__(
        self,
        config: VisionConfig,
        *,
        seed: Seeds,
        device: torch.device,
        workdir: Path,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        super().__init__(
            config, seed=seed, device=device, workdir=workdir, batch_size=batch_size, rank=rank, world_size=world_size
        )
        self.parts = load(config.data, seed)
        pretrain = self.parts.pretrain
        self.steps_per_epoch = len(pretrain) // batch_size
        if self.steps_per_epoch < 1:
            raise ConfigError(
                f"train.batch_size: {batch_size} is more than the {len(pretrain)} images of {pretrain.name}; "
                f"give 2 to {len(pretrain)}."
            )
        height, width = pretrain.images.shape[-2:]
        self.size = config.augment.size or min(height, width)
        encoder = build_encoder(config.encoder, pretrain.channels, self.size)
        encoder.set_statistics(*pretrain.statistics)
        projector, self.embedding_dim = build_projector(config.encoder, encoder.taps[encoder.last])
        self.module = SimCLR(encoder, projector, self.embedding_dim, encoder.check_tap(config.encoder.tap))
        # Baselines are probed on the encoder as it was before training.
        self._untrained = copy.deepcopy(self.module) if config.probe.baselines else None
        self._baselines: dict[str, float] | None = None

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        images = self.parts.pretrain
        order = torch.randperm(len(images), generator=self.seed.torch("data", "order", epoch))
        share = self.batch_size // self.world_size
        mine = slice(self.rank * share, (self.rank + 1) * share)
        labels = images.labels
        if labels is not None and bool((labels < 0).any()):
            labels = None  # the unlabelled would look like one more class
        for step in range(start, self.steps_per_epoch):
            index = order[step * self.batch_size : (step + 1) * self.batch_size]
            # Parameters are drawn for the whole batch, so that any number of ranks sees the same views.
            generator = self.seed.torch("augment", epoch, step)
            pixels = images.images[index[mine]].to(self.device, non_blocking=True)
            size = images.images.shape[-2:]
            views = [
                apply(self.config.augment, pixels, draw(self.config.augment, len(index), *size, generator)[mine])
                for _ in range(self.config.views)
            ]
            yield Batch(views, None if labels is None else labels[index[mine]].to(self.device))

    def embed(self, batch: Batch) -> Any:
        return self.module(batch.views, batch.labels)

    def after_step(self) -> None:
        self.module.after_step()

    def evaluate(self, objective: Any) -> dict[str, float]:
        results = self._probe(self.module, objective)
        if self._untrained is not None:
            if self._baselines is None:
                untrained = self._probe(self._untrained.to(self.device), None)
                raw = probe(self.config.probe, *self._labelled(self._pixels), self.seed.probe)
                self._baselines = {f"untrained/{k}": v for k, v in untrained.items()}
                self._baselines |= {f"raw/{k}": v for k, v in raw.items()}
            results |= self._baselines
        return results

    def _probe(self, module: SimCLR, objective: Any) -> dict[str, float]:
        embedding = self.config.probe.features == "embedding"

        def features(images: ImageSet) -> Tensor:
            x = self._extract(module, module.embedding if embedding else module.features, images)
            return x if objective is None or not embedding else objective.transform(x.to(self.device)).cpu()

        return probe(self.config.probe, *self._labelled(features), self.seed.probe)

    def _labelled(self, features: Any) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        train, test = self.parts.train, self.parts.test
        return features(train), train.labels, features(test), test.labels

    def _extract(self, module: SimCLR, function: Any, images: ImageSet) -> Tensor:
        with frozen(module):
            parts = [function(centre(part.to(self.device), self.size)) for part in images.images.split(CHUNK)]
        return torch.cat([part.float().cpu() for part in parts])

    def _pixels(self, images: ImageSet) -> Tensor:
        return torch.cat([centre(part, self.size).flatten(1) for part in images.images.split(CHUNK)])

    def features(self, split: str) -> tuple[Tensor, Tensor | None]:
        """The embeddings (what the objective sees) of the undistorted images."""
        images = {"train": self.parts.train, "test": self.parts.test}[split]
        return self._extract(self.module, self.module.embedding, images), images.labels

    def data_info(self) -> dict[str, Any]:
        return {**self.parts.info(), "view_size": self.size}
