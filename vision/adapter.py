"""Vision for the trainer: data, views, a framework and its evaluation."""

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor, nn

from dipole.core.evaluation.probes import measuring_device
from dipole.core.objectives.encoded_batch import EncodedBatch
from dipole.core.train.adapter import Adapter, Context, Sketch
from dipole.core.train.class_blocks import BlockShape
from dipole.core.train.config import Settings
from dipole.core.train.exports import write_card
from dipole.core.train.inference import chosen_features
from dipole.core.utils.errors import ConfigError, DataError
from dipole.core.utils.extras import check_drawing
from dipole.core.utils.freezing import frozen, in_mode
from dipole.core.utils.memory import check_fits
from dipole.core.utils.seeding import Seeds
from dipole.core.utils.text import counted
from dipole.core.utils.transfer import prefetched, to_device
from dipole.vision import artifacts
from dipole.vision.augment import AugmentConfig, random_views
from dipole.vision.captions import CaptionBranch
from dipole.vision.config import VisionConfig
from dipole.vision.data import DataConfig, Parts, expected
from dipole.vision.decoding import Encoded
from dipole.vision.encoders import Encoder
from dipole.vision.evaluation import FrameworkEvaluation, named, transformed
from dipole.vision.export import FORMATS, TrainedModel
from dipole.vision.frameworks import FRAMEWORKS, carriers, example
from dipole.vision.frameworks.base import Batch, Branch, Framework, Setup
from dipole.vision.frameworks.clip import CLIP
from dipole.vision.frameworks.queue import Queue
from dipole.vision.image_ops import centre
from dipole.vision.image_set import ImageSet, Order
from dipole.vision.inference import FEATURES, ImageEmbedder
from dipole.vision.pairs import PairedSet, kind_of
from dipole.vision.probes import OnlineProbe, ProbeConfig, check_probe_labels, count_classes

COPY = "a copy"  # in messages: an image is copied when it is cropped, resized or sent
EXAMPLE = 512  # images of the batch that an objective is tried on in a plan, at most


class VisionAdapter(Adapter):
    """Contrastive learning on images."""

    domain: ClassVar[str] = "vision"
    config_model: ClassVar[type[Settings]] = VisionConfig
    validates: ClassVar[bool] = True
    export_formats: ClassVar[tuple[str, ...]] = FORMATS

    data_fields: ClassVar[frozenset[str]] = frozenset({"data"})

    config: VisionConfig
    module: Framework

    def __init__(self, config: VisionConfig, **context: Unpack[Context]) -> None:
        super().__init__(config, **context)
        if config.probe.picture:
            check_drawing()  # before the first epoch, not after it
        self._artifacts = None if self.kept is None else artifacts.read(self.kept)
        if self._artifacts is None:
            self._check_data()
            images = self.parts.pretrain
            self.steps_per_epoch = len(self._order) // self.batch_size
        else:
            config, images = self._artifacts.config(config), self._artifacts.images
            self.steps_per_epoch = self._artifacts.steps_per_epoch
        self.images = images
        self.size, self.module = _build(config, images, self.batch_size)
        self.embedding_dim = self.module.embedding_dim
        self.compiles = config.compile
        channels_last = config.encoder.channels_last
        self._layout = torch.contiguous_format
        if channels_last or (channels_last is None and self.device.type == "cuda"):
            self._layout = torch.channels_last
            self.module = self.module.to(memory_format=self._layout)  # type: ignore[call-overload]
        # Baselines are probed on the encoder as it was before training.
        # A finished run has no pretrained weights of a model of transformers: there is no baseline then.
        self._untrained: Framework | None = None
        pretrained = config.encoder.is_hub or config.caption is not None
        if config.probe.baselines and not (self._artifacts is not None and pretrained):
            self._untrained = copy.deepcopy(self.module)
        self._baselines: dict[str, dict[str, float]] = {}  # by part
        self._step = 0  # of the last batch, from 1
        self._online: OnlineProbe | None = None
        if config.probe.online is not None and self._artifacts is None:
            classes = count_classes(images, self.parts.test, config.data.pretrain is None)
            used = [branch.encoder for branch in self.module.branches() if isinstance(branch.encoder, Encoder)]
            self._online = OnlineProbe(config.probe.online, used, classes, self.device)
        self._labels: Tensor | None = None  # of the last batch
        self._metrics: dict[str, Tensor | float] = {}  # of the online probe

    def _check_data(self) -> None:
        """Report data that do not fit before the networks are built."""
        config = self.config
        if config.data.size is not None:
            check_fits("an image", (config.data.size, config.data.size, 3), torch.empty(0, dtype=torch.uint8), COPY)
        images = self.parts.pretrain
        assert self._order is not None
        if (side := config.augment.size or config.data.size) is not None:
            shape = (self.batch_size // self.world_size, images.channels, side, side)
            check_fits("a view of a batch", shape, torch.empty(0, device=self.device), COPY)
        if config.pairs != "columns" or self.parts.train.labels is not None:
            check_probe_labels(config.probe, self.parts.train, self.parts.test)

    # Data

    @cached_property
    def parts(self) -> Parts:
        """The training images, and the validation part if there is one. A model in use reads them lazily."""
        found = kind_of(self.config).load(self.config, self.seed, self.validation)
        images, known = found.pretrain, self._artifacts
        if known is not None and known.images.channels != images.channels:
            has, reads = counted(images.channels, "channel"), known.images.channels
            raise DataError(f"{images.name}: the images have {has}, and the model reads {reads}.")
        return found

    @cached_property
    def _with_test(self) -> Parts:
        every = kind_of(self.config).load(self.config, self.seed)
        return replace(self.parts, test=every.test, test_pairs=every.test_pairs)

    @property
    def evaluated_parts(self) -> Parts:
        """The images with those of the part that is evaluated."""
        if self.validation and self.part == "test":
            return self._with_test
        return self.parts

    @cached_property
    def _order(self) -> Order:
        return _order(self.config, self.parts.pretrain, self.batch_size, self.world_size, self.seed)

    @classmethod
    def sketch(cls, config: Any, batch_size: int, world_size: int = 1) -> Sketch:
        if config.probe.picture:
            check_drawing()
        images = _expected(config.data, Seeds(0), config.augment.size)
        _order(config, images, batch_size, world_size, Seeds(0))
        # Settings that the networks do not depend on are left out, so that more runs share one result.
        unused = {"probe": ProbeConfig(), "augment": AugmentConfig(size=config.augment.size), "data": DataConfig()}
        width = _width(config.model_copy(update=unused), images, batch_size)
        rows = min(batch_size, EXAMPLE)
        return Sketch(width, example, (config.method, config.positives, rows, config.pairs == "labels"))

    @classmethod
    def missing_data(cls, config: Any) -> list[str]:
        return kind_of(config).missing(config)

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        batches = self._batches(epoch, start)
        if isinstance(self.parts.pretrain.images, Encoded) or self.device.type == "cuda":
            batches = prefetched(batches, self.device)
        for step, batch in enumerate(batches, epoch * self.steps_per_epoch + start + 1):
            self._step = step
            yield batch

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        images = self.parts.pretrain
        order = torch.as_tensor(self._order.rows(epoch))
        share = self.batch_size // self.world_size
        mine = slice(self.rank * share, (self.rank + 1) * share)
        labels = kind_of(self.config).labels(images)
        recipes = self.config.framework.augmentations(self.config)
        columns = images.columns[: len(recipes)]
        for step in range(start, self.steps_per_epoch):
            index = order[step * self.batch_size : (step + 1) * self.batch_size]
            generator = self.seed.torch("augment", epoch, step)
            views: list[Tensor] = [torch.empty(0)] * len(recipes)
            for place, column in enumerate(columns):
                # Columns take turns: the first, second, ... view is of the first, second, ... column.
                own = slice(place, None, len(columns))
                views[own] = random_views(column, index, recipes[own], generator, self.device, mine, self._layout)
            seed = self.seed.stream("augment", "negatives", epoch, step)
            rows = index[mine]
            classes = None if labels is None else to_device(labels[rows], self.device)
            yield Batch(views, classes, to_device(rows, self.device), seed, self._tokens(images, rows))

    def _tokens(self, images: ImageSet, rows: Tensor) -> tuple[Tensor, ...] | None:
        """Return the tokens of the images' captions with their mask, or None without captions."""
        if not isinstance(self.module, CLIP):
            return None
        assert isinstance(images, PairedSet)
        tokens = self.module.caption.tokens([images.captions[row] for row in rows.tolist()])
        return tuple(to_device(each, self.device) for each in tokens)

    def data_info(self) -> dict[str, Any]:
        if self._artifacts is not None and "parts" not in vars(self):
            return self._artifacts.info
        info = {**self.evaluated_parts.info(), "view_size": self.size}
        if self.evaluated_parts is not self.parts:
            info["sizes"]["validation"] = len(self.parts.test)
        for part in self._networks():
            name = "caption" if isinstance(part, CaptionBranch) else "encoder"
            if part.described:
                info.setdefault(name, dict(part.described))
        return info

    # Training

    def embed(self, batch: Batch) -> EncodedBatch:
        self._labels = batch.labels
        with nullcontext() if self._online is None else self._online.recorded():
            return self.module.embed_with_features(batch)

    def pass_features(self) -> int:
        return self.module.pass_features()

    def encoders(self) -> list[nn.Module]:
        return [part for part in self.module.modules() if isinstance(part, Branch | CaptionBranch)]

    def _networks(self) -> list[Encoder | CaptionBranch]:
        return [part for part in self.module.modules() if isinstance(part, Encoder | CaptionBranch)]

    def remarks(self) -> list[str]:
        found = [line for part in self._networks() for line in part.remarks]
        return list(dict.fromkeys([*found, *self._long_queues()]))

    def _long_queues(self) -> list[str]:
        """Warn of a queue with several rows of each image: its own past views would be its negatives."""
        images, setting = len(self.parts.pretrain), "vision.nnclr.support"
        if self.config.framework.negatives_mean:
            setting = "vision.negatives"
        few = max(1, images // 2 // self.batch_size) * self.batch_size
        return [
            f"warning: {setting}: the queue has {rows} rows, and there are {images} images. It holds past views of "
            f"every image, also of the one that is compared. Set {setting} = {few}"
            for part in self.module.modules()
            if isinstance(part, Queue) and (rows := len(part.get_buffer("rows"))) > images
        ]

    def instead_of(self, objective: Any) -> str:
        """Return the frameworks that can carry an objective."""
        if self.config.pairs == "labels" or isinstance(self.module, CLIP):
            return ""
        method, views = self.config.method, self.config.count
        found = carriers(objective, views, self.embedding_dim, self.device, self.parts.pretrain, self.batch_size)
        if not found:
            return f"No vision.method can carry {objective} on these images in batches of {self.batch_size}."
        listed = []
        for name, count in found.items():
            framework = FRAMEWORKS[name]
            key = framework.positives_key
            if key and (key, count) != ("views", views):  # the setting that gives it enough positives
                name = f"{name} ({key} = {count - (not framework.counts_anchor)})"
            listed.append(name)
        return f"vision.method = {method!r} cannot carry {objective} as it is set; these can: {', '.join(listed)}."

    def after_step(self) -> None:
        if self.total_steps is not None:
            self.module.progress = (self._step - 1) / self.total_steps
        self.module.update()
        if self._online is not None:
            assert self._labels is not None
            self._metrics = self._online.step(self._labels)

    def metrics(self) -> dict[str, Tensor | float]:
        return self.module.metrics() | self._metrics

    def state_dict(self) -> dict[str, Any]:
        return {} if self._online is None else {"online": self._online.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._online is not None:
            self._online.load_state_dict(state["online"])

    # Evaluation

    @property
    def evaluation(self) -> FrameworkEvaluation:
        """The evaluation on the part of the moment."""
        device = measuring_device(self.device, self.config.probe.device)
        return FrameworkEvaluation(self.config, self.evaluated_parts, self.size, self.seed, self.device, device)

    def evaluate(self, objective: Any) -> dict[str, float]:
        evaluation = self.evaluation
        shape = BlockShape.of(objective, self.config.block_positives)
        results = evaluation.results(self.module, objective, shape)
        if self._untrained is not None:
            if self.part not in self._baselines:
                self._baselines[self.part] = self._evaluate_baselines(evaluation, self._untrained, shape)
            results |= self._baselines[self.part]
        if self._online is not None and self._online.steps:
            results["online/accuracy"] = evaluation.online_accuracy(self.module, self._online)
        if self.config.probe.picture and self._step:
            self.draw(self.workdir / "pictures" / f"step-{self._step}.png", objective, f"step {self._step}")
        return results

    def _evaluate_baselines(
        self, evaluation: FrameworkEvaluation, untrained: Framework, shape: BlockShape
    ) -> dict[str, float]:
        if self._artifacts is not None:  # the normalisation is not learned
            for own, given in zip(untrained.modules(), self.module.modules(), strict=True):
                if isinstance(own, Encoder):
                    own.set_statistics(given.get_buffer("mean"), given.get_buffer("std"))
        found = named("untrained", evaluation.results(untrained.to(self.device), None, shape))
        if evaluation.has_classes:
            found |= named("raw", evaluation.probe(self.module, lambda views: views.flatten(1), shape))
        return found

    def features(self, split: str) -> tuple[Tensor, Tensor | None]:
        """Return the embeddings that the objective sees, of undistorted images, and their labels."""
        images = {"train": self.evaluated_parts.train, "test": self.evaluated_parts.test}[split]
        return self.evaluation.extract(self.module, self.module.embedding, images.images), images.labels

    def draw(self, path: Path, objective: Any, when: str) -> None:
        """Write the picture of a query in a mini-batch."""
        self.evaluation.draw(path, self.module, objective, self.batch_size, when)

    # Export

    def keep(self, folder: Path) -> None:
        artifacts.save(folder, self.config, self.module, self.images, self.steps_per_epoch, self.data_info())

    def embedder(self, features: str | None = None, objective: Any = None) -> ImageEmbedder:
        """Return a function of image files. features: "encoder" (the tap of the probes, default) or "embedding"."""
        read: Callable[[Tensor], Tensor] = self.module.features
        if chosen_features(features, FEATURES) == "embedding":
            read = transformed(self.module.embedding, objective)

        def centred(images: Tensor) -> Tensor:
            with frozen(self.module):
                return read(centre(images.to(self.device), self.size))

        return ImageEmbedder(centred, self.images.channels, self.config.data.size, self.size)

    def export(self, to: str, folder: Path, record: Any, objective: Any = None) -> None:
        model = TrainedModel(self.config, self.module, self.images.channels, self.size, self.data_info(), self.draw)
        card = import_module(f"dipole.vision.export.{to}").export(model, folder, record, objective)
        write_card(folder, card, record, model.info)


def _order(config: VisionConfig, images: ImageSet, batch_size: int, world_size: int, seed: Seeds) -> Order:
    order = config.framework.order(config, images, batch_size, world_size, seed)
    if len(images) < 2:
        raise ConfigError(f"{images.name} has {counted(len(images), 'image')} to pretrain on; a contrast needs two.")
    if len(order) < batch_size:
        raise ConfigError(
            f"train.batch_size: {batch_size} is more than the {len(images)} images of {images.name}; "
            f"give 2 to {len(images)}."
        )
    return order


def _build(config: VisionConfig, images: ImageSet, batch_size: int) -> tuple[int, Framework]:
    """Return the side of the views in pixels, and the framework with its networks."""
    size = config.augment.size or min(images.images.shape[-2:])
    module = config.framework.from_config(config, Setup(images, size, batch_size, config.encoder))
    sides = {each.size or size for each in config.framework.augmentations(config)} - {size}
    for encoder in (part for part in module.modules() if isinstance(part, Encoder)):
        for side in sides:
            _check_side(config, encoder, size, side)
    return size, module


def _check_side(config: VisionConfig, encoder: Encoder, size: int, side: int) -> None:
    """Raise ConfigError if an encoder that was built for views of `size` pixels cannot read views of `side`."""
    views = torch.zeros(2, len(encoder.get_buffer("mean")), side, side)
    try:
        with in_mode(False, encoder), torch.no_grad():
            encoder(views.to(encoder.get_buffer("mean").device))
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"vision.encoder.name: {config.encoder.name!r} reads images of {size} pixels alone, and views of method "
            f"{config.method!r} also have {side}. Make all views of one size (vision.augment.size, "
            "vision.swav.small_size, vision.swav.small_views = 0), or choose an encoder for any size, such as "
            "small-conv or resnet18."
        ) from error


_expected = cache(expected)


@cache
def _width(config: VisionConfig, images: ImageSet, batch_size: int) -> int:
    """Return the width of the embedding, from networks on the meta device."""
    with torch.device("meta"):
        return _build(config, images, batch_size)[1].embedding_dim
