"""Vision as the trainer sees it: data, views, a framework and the probes."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

import torch
from torch import Tensor

from dipole.core.contrast.pairs import Pairs
from dipole.core.ground.errors import ConfigError, PairsError
from dipole.core.measure.probes import frozen
from dipole.core.train.adapter import Adapter, Context
from dipole.core.train.config import Settings
from dipole.core.train.sampling import ClassBlocks
from dipole.vision.augment import apply, centre, draw
from dipole.vision.carry import explain
from dipole.vision.config import BlocksConfig, VisionConfig
from dipole.vision.data import ImageSet, load
from dipole.vision.encoders import Encoder, build_encoder, build_projector
from dipole.vision.evaluation import probe
from dipole.vision.methods import CMC, Batch, Blocks, Method, MoCo, MultiCrop, SimCLR
from dipole.vision.picture import draw_query, neighbourhood, sharpness
from dipole.vision.stream import Encoded, ahead

if TYPE_CHECKING:
    from dipole.core.train.loop import Run

CHUNK = 512  # images per forward pass when features are extracted
SAMPLE = 2000  # images from which the statistics of Lab are taken
DRAWN = 512  # images of a mini-batch in a picture, at most


class VisionAdapter(Adapter):
    """Contrastive learning on images."""

    domain: ClassVar[str] = "vision"
    config_model: ClassVar[type[Settings]] = VisionConfig
    export_formats: ClassVar[tuple[str, ...]] = ("transformers", "detectron2", "picture")

    config: VisionConfig
    module: Method

    def __init__(self, config: VisionConfig, **context: Unpack[Context]) -> None:
        super().__init__(config, **context)
        self.parts = load(config.data, self.seed)
        pretrain = self.parts.pretrain
        self._blocks = None if config.blocks is None else self._draw_blocks(config.blocks, pretrain)
        self.steps_per_epoch = len(pretrain if self._blocks is None else self._blocks) // self.batch_size
        if self.steps_per_epoch < 1:
            raise ConfigError(
                f"train.batch_size: {self.batch_size} is more than the {len(pretrain)} images of {pretrain.name}; "
                f"give 2 to {len(pretrain)}."
                if self._blocks is None
                else f"train.batch_size: {self.batch_size} is more than the {len(self._blocks)} images of all blocks; "
                "give fewer, or raise vision.blocks.count."
            )
        self.size = config.augment.size or min(pretrain.images.shape[-2:])
        self.module = self._method()
        self.embedding_dim = self.module.embedding_dim
        if self.device.type == "cuda":
            self.module = self.module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if config.compile:
            self.module.compile_branches()
        # Baselines are probed on the encoder as it was before training.
        self._untrained = copy.deepcopy(self.module) if config.probe.baselines else None
        self._baselines: dict[str, float] | None = None
        self._step = 0  # of the batch that was handed out last, from 1

    def _draw_blocks(self, blocks: BlocksConfig, images: ImageSet) -> ClassBlocks:
        share = self.batch_size // self.world_size
        if share % blocks.size:
            whole = "" if self.world_size == 1 else f" in each of {self.world_size} processes"
            raise ConfigError(
                f"train.batch_size: {self.batch_size} is no whole number of blocks of vision.blocks.size = "
                f"{blocks.size} images{whole}; give a multiple of {blocks.size * self.world_size}."
            )
        if images.labels is None or bool((images.labels < 0).any()):
            raise ConfigError(
                f"vision.method: blocks are images of one class, and {images.name} has images without a label; take a "
                "labelled split, or method = 'simclr'."
            )
        return ClassBlocks(images.labels.numpy(), blocks.size, blocks.count, self.seed)

    def _order(self, epoch: int) -> Tensor:
        """Indices of the images of an epoch."""
        if self._blocks is not None:
            return torch.from_numpy(self._blocks.rows(epoch))
        return torch.randperm(len(self.parts.pretrain), generator=self.seed.torch("data", "order", epoch))

    def _method(self) -> Method:
        config, images = self.config, self.parts.pretrain
        channels, tap = images.channels, config.encoder.tap
        share = 1.0 if config.cmc is None else config.cmc.width

        def build(inputs: int) -> tuple[Encoder, torch.nn.Module, int]:
            encoder = build_encoder(config.encoder, inputs, self.size, share)
            if inputs == channels:
                encoder.set_statistics(*images.statistics)
            return encoder, *build_projector(config.encoder, encoder.taps[encoder.last])

        if config.moco is not None:
            moco = config.moco
            return MoCo(build, channels, tap, config.negatives or 0, moco.momentum, moco.intra_batch, moco.symmetric)
        if config.swav is not None:
            return MultiCrop(build, channels, tap, config.count, config.negatives or 0)
        if config.blocks is not None:
            return Blocks(build, channels, tap, config.blocks.size)
        if config.cmc is not None:
            if channels != 3:
                raise ConfigError(f"vision.method: cmc splits colour images, but those of {images.name} are grey.")
            bank = config.negatives
            if bank is not None and bank > len(images) - self.batch_size:
                raise ConfigError(
                    f"vision.negatives: {bank} of a memory bank and a batch of {self.batch_size} are more than the "
                    f"{len(images)} images of {images.name}; give at most {len(images) - self.batch_size}."
                )
            cmc = CMC(build, tap, len(images), bank, config.cmc.momentum)
            cmc.set_statistics(centre(images.images[slice(SAMPLE)], self.size))
            return cmc
        most = config.count * (self.batch_size - 1)
        if config.negatives is not None and config.negatives > most:
            raise ConfigError(
                f"vision.negatives: a batch of {self.batch_size} with {config.count} views has {most} negatives per "
                f"anchor, fewer than {config.negatives}; raise train.batch_size, or take method = 'moco' with a queue."
            )
        return SimCLR(build, channels, tap, config.negatives)

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        batches = self._batches(epoch, start)
        if isinstance(self.parts.pretrain.images, Encoded):
            batches = ahead(batches)
        for step, batch in enumerate(batches, epoch * self.steps_per_epoch + start + 1):
            self._step = step
            yield batch

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        images = self.parts.pretrain
        order = self._order(epoch)
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
            height, width = images.images.shape[-2:]
            views = [
                apply(recipe, pixels, draw(recipe, len(index), height, width, generator)[mine])
                for recipe in self.config.recipes()
            ]
            if self.device.type == "cuda":
                views = [view.contiguous(memory_format=torch.channels_last) for view in views]
            seed = self.seed.stream("augment", "negatives", epoch, step)
            yield Batch(views, None if labels is None else labels[index[mine]].to(self.device), index[mine], seed)

    def embed(self, batch: Batch) -> Pairs:
        pairs: Pairs = self.module(batch)
        return pairs

    def fit(self, run: "Run") -> None:
        """Train; where the framework cannot carry the objective, the error says which ones can."""
        try:
            run.loop()
        except PairsError as error:
            assert run.objective is not None
            method, views = self.config.method, self.config.count
            cure = explain(run.objective, method, views, self.embedding_dim, self.device)
            raise PairsError(f"{error} {cure}") from error

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
        if self.config.probe.picture and self._step:
            self.draw(self.workdir / "pictures" / f"step-{self._step}.png", objective, f"step {self._step}")
        return results

    def draw(self, path: Path, objective: Any, when: str, query: int = 0) -> None:
        """Write the picture of a query in a mini-batch: images with their weights, and a map of the batch.

        The same images and views for every call; two views where the framework has one (CMC splits it into its halves).
        """
        images, generator = self.parts.pretrain.images, self.seed.torch("probe", "picture")
        index = torch.randperm(len(images), generator=generator)[: min(self.batch_size, DRAWN)]
        pixels, (height, width) = images[index].to(self.device), images.shape[-2:]
        recipe = self.config.augment
        views = [
            apply(recipe, pixels, draw(recipe, len(index), height, width, generator))
            for _ in range(max(2, self.config.count))
        ]
        with frozen(self.module):
            found = [self.module.embedding(view) for view in views]
        if objective is not None:
            found = [objective.transform(z) for z in found]
        weights = sharpness(objective)
        name = "no objective" if objective is None else str(objective)
        draw_query(
            views,
            neighbourhood(found, query, *weights),
            path,
            title=f"{name}, {when}; weights with t_pos = {weights[0]:g}, t_neg = {weights[1]:g}",
            query=query,
            projection=self.config.probe.projection,
            seed=self.seed.probe,
        )

    def _probe(self, module: Method, objective: Any) -> dict[str, float]:
        embedding = self.config.probe.features == "embedding"

        def features(images: ImageSet) -> Tensor:
            x = self._extract(module, module.embedding if embedding else module.features, images)
            return x if objective is None or not embedding else objective.transform(x.to(self.device)).cpu()

        return probe(self.config.probe, *self._labelled(features), self.seed.probe)

    def _labelled(self, features: Any) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        train, test = self.parts.train, self.parts.test
        return features(train), train.labels, features(test), test.labels

    def _extract(self, module: Method, function: Any, images: ImageSet) -> Tensor:
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

    def export(self, to: str, folder: Path, record: Any, objective: Any = None) -> None:
        if to == "picture":
            self.draw(folder / "query.png", objective, f"{record.epochs:g} epochs")
            return
        from dipole.vision.export import export_transformers, trained_encoder

        if to == "transformers":
            export_transformers(self, folder, record)
            return
        from dipole.vision.detectron import export_detectron2

        export_detectron2(self, trained_encoder(self.module), folder, record)
