"""Vision as the trainer sees it: data, views, a framework and the probes."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, cached_property
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

import torch
from torch import Tensor, nn

from dipole.core.evaluation.probes import ProbeResult, frozen, linear_probe_on_views, measuring_device
from dipole.core.objectives.embedded import Embedded
from dipole.core.train.adapter import Adapter, Context, Sketch
from dipole.core.train.block_losses import BlockShape
from dipole.core.train.config import Settings
from dipole.core.utils.drawing import check_drawing
from dipole.core.utils.errors import ConfigError, PairsError
from dipole.core.utils.memory import check_fits
from dipole.core.utils.seeding import Seeds
from dipole.core.utils.text import counted
from dipole.core.utils.transfer import prefetched, to_device
from dipole.vision.augment import AugmentConfig, apply, centre, draw
from dipole.vision.captions import CaptionBranch, Tokens
from dipole.vision.compatibility import example, explain
from dipole.vision.config import VisionConfig
from dipole.vision.crops import Crops, random_views
from dipole.vision.data import DataConfig, Parts, expected
from dipole.vision.decoding import Encoded
from dipole.vision.embed import ImageEmbedder
from dipole.vision.encoders import Encoder, build_encoder
from dipole.vision.export import FORMATS, export_as
from dipole.vision.frameworks.base import Batch, Branch, Method, Order, Setup
from dipole.vision.frameworks.clip import CLIP
from dipole.vision.image_set import ImageSet
from dipole.vision.kept import HUB, Kept, KnownImages, keep, read
from dipole.vision.online import OnlineProbe
from dipole.vision.pairing import PairedSet, load_parts
from dipole.vision.pictures import draw_query, neighbourhood, sharpness
from dipole.vision.probes import ProbeConfig, check_labels, probe
from dipole.vision.retrieval import recall, zero_shot

if TYPE_CHECKING:
    from dipole.core.train.run import Run

COPY = "a copy"  # which cropping, resizing or sending it makes
CHUNK = 512  # images per forward pass when features are extracted
EXAMPLE = 512  # images of the batch that an objective is tried on in a plan, at most
DRAWN = 1024  # images of a mini-batch in a picture, at most


class VisionAdapter(Adapter):
    """Contrastive learning on images."""

    domain: ClassVar[str] = "vision"
    config_model: ClassVar[type[Settings]] = VisionConfig
    validates: ClassVar[bool] = True
    export_formats: ClassVar[tuple[str, ...]] = FORMATS

    data_fields: ClassVar[frozenset[str]] = frozenset({"data"})

    config: VisionConfig
    module: Method
    _kept: Kept | None = None

    def __init__(self, config: VisionConfig, **context: Unpack[Context]) -> None:
        super().__init__(config, **context)
        if config.probe.picture:
            check_drawing()  # before the first epoch, not after it
        if self.kept is None:
            if config.data.size is not None:
                check_fits("an image", (config.data.size, config.data.size, 3), torch.empty(0, dtype=torch.uint8), COPY)
            images = self.parts.pretrain
            self.steps_per_epoch = len(self._order) // self.batch_size
            side = config.augment.size or config.data.size
            if side is not None:
                shape = (self.batch_size // self.world_size, images.channels, side, side)
                check_fits("a view of a batch", shape, torch.empty(0, device=self.device), COPY)
            if self._has_classes:
                check_labels(config.probe, self.parts.train, self.parts.test)
        else:
            self._kept = read(self.kept)
            config, images = self._kept.config(config), self._kept.images.stand_in()
            self.steps_per_epoch = self._kept.steps_per_epoch
        self.images = KnownImages.of(images)
        self.size, self.module = _module(config, images, self.batch_size)
        self.embedding_dim = self.module.embedding_dim
        self.compiles = config.compile
        last = config.encoder.channels_last
        last = self.device.type == "cuda" if last is None else last
        self._measures = measuring_device(self.device, config.probe.device)
        self._layout = torch.channels_last if last else torch.contiguous_format
        if last:
            self.module = self.module.to(memory_format=self._layout)  # type: ignore[call-overload]
        # Baselines are probed on the encoder as it was before training.
        # A network of transformers that is used has its configuration alone: it is not what it was.
        of_hub = config.encoder.name.startswith(HUB) or config.caption is not None
        was = config.probe.baselines and not (self._kept is not None and of_hub)
        self._untrained = copy.deepcopy(self.module) if was else None
        self._baselines: dict[str, dict[str, float]] = {}  # by part
        self._step = 0  # of the batch that was handed out last, from 1
        self._online: OnlineProbe | None = None
        if config.probe.online is not None and self._kept is None:
            shares = config.data.pretrain is None
            classes = OnlineProbe.classes_of(images, self.parts.test, shares)
            self._online = OnlineProbe(config.probe.online, self.module.branches(), classes, self.device)
        self._labels: Tensor | None = None  # of the batch that was embedded last
        self._metrics: dict[str, Tensor | float] = {}
        self._run: Run | None = None

    @cached_property
    def parts(self) -> Parts:
        """The images of training, and the validation part where one is set aside; of a model in use read when asked."""
        return load_parts(self.config, self.seed, self.validation)

    @cached_property
    def _with_test(self) -> Parts:
        whole = load_parts(self.config, self.seed)
        return replace(self.parts, test=whole.test, held_out=whole.held_out)

    @property
    def judged(self) -> Parts:
        """The same with the images of the part that is evaluated."""
        return self._with_test if self.validation and self.part == "test" else self.parts

    @cached_property
    def _order(self) -> Order:
        return _order(self.config, self.parts.pretrain, self.batch_size, self.world_size, self.seed)

    def keep(self, folder: Path) -> None:
        keep(folder, self.config, self.module, self.images, self.steps_per_epoch, self.data_info())

    def embedder(self, features: str | None = None, objective: Any = None) -> ImageEmbedder:
        return ImageEmbedder.of_run(self, features, objective)

    @classmethod
    def sketch(cls, config: Any, batch_size: int, world_size: int = 1) -> Sketch:
        if config.probe.picture:
            check_drawing()
        # What the networks do not depend on is left out, so that runs that differ in it alone share one.
        images = _expected(config.data, config.augment.size)
        _order(config, images, batch_size, world_size, Seeds(0))
        unasked = {"probe": ProbeConfig(), "augment": AugmentConfig(size=config.augment.size), "data": DataConfig()}
        width = _width(config.model_copy(update=unasked), images, batch_size)
        key = config.framework.positives_key or "views"
        views = config.count if key == "views" else attrgetter(key)(config) + (not config.framework.counts_anchor)
        by_label = config.pairs == "labels"
        return Sketch(width, example, (config.method, views, min(batch_size, EXAMPLE), by_label))

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
        labels = images.labels
        if labels is not None and self.config.pairs != "labels" and bool((labels < 0).any()):
            labels = None  # the unlabelled would look like one more class
        for step in range(start, self.steps_per_epoch):
            index = order[step * self.batch_size : (step + 1) * self.batch_size]
            generator = self.seed.torch("augment", epoch, step)
            recipes = list(self.config.framework.augmentations(self.config))
            views: list[Tensor] = [torch.empty(0)] * len(recipes)
            columns = images.columns if isinstance(images, PairedSet) else (images.images,)
            for place, column in enumerate(columns[: len(recipes)]):
                own = slice(place, None, len(columns))
                views[own] = random_views(column, index, recipes[own], generator, self.device, mine, self._layout)
            seed = self.seed.stream("augment", "negatives", epoch, step)
            classes = None if labels is None else to_device(labels[index[mine]], self.device)
            yield Batch(views, classes, to_device(index[mine], self.device), seed, self._tokens(images, index[mine]))

    def _tokens(self, images: ImageSet, index: Tensor) -> Tokens | None:
        """The captions of some images as their encoder takes them; None where there are none."""
        if not isinstance(self.module, CLIP):
            return None
        assert isinstance(images, PairedSet)
        tokens = self.module.caption.tokens([images.captions[row] for row in index.tolist()])
        return Tokens(*(to_device(each, self.device) for each in tokens))

    def embed(self, batch: Batch) -> Embedded:
        self._labels = batch.labels
        with nullcontext() if self._online is None else self._online.seen():
            embedded: Embedded = self.module(batch)
        return embedded

    def encoders(self) -> list[nn.Module]:
        return [part for part in self.module.modules() if isinstance(part, Branch | CaptionBranch)]

    def remarks(self) -> list[str]:
        found = [line for encoder in self._encoders() for line in encoder.remarks]
        found += self.module.caption.remarks if isinstance(self.module, CLIP) else ()
        return list(dict.fromkeys(found))

    def _encoders(self) -> list[Encoder]:
        return [part for part in self.module.modules() if isinstance(part, Encoder)]

    def fit(self, run: "Run") -> None:
        """Train; where the framework cannot carry the objective, the error says which ones can."""
        self._run = run
        try:
            run.loop()
        except PairsError as error:
            if self.config.pairs == "labels" or isinstance(self.module, CLIP):
                raise  # others would pair by something else
            assert run.objective is not None
            cure = explain(
                run.objective,
                self.config.method,
                self.config.count,
                self.embedding_dim,
                self.device,
                self.parts.pretrain,
                self.batch_size,
            )
            raise PairsError(f"{error} {cure}") from error

    def after_step(self) -> None:
        if self._run is not None:
            self.module.progress = self._run.step / self._run.total_steps
        self.module.after_step()
        self._metrics = self.module.metrics()
        if self._online is not None:
            assert self._labels is not None
            self._metrics |= self._online.step(self._labels)

    def metrics(self) -> dict[str, Tensor | float]:
        return self._metrics

    def state_dict(self) -> dict[str, Any]:
        return {} if self._online is None else {"online": self._online.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._online is not None:
            self._online.load_state_dict(state["online"])

    def evaluate(self, objective: Any) -> dict[str, float]:
        shape = BlockShape.of(objective, self.config.framework.block_positives(self.config))
        results = self._judged(self.module, objective, shape)
        if self._untrained is not None:
            if self.part not in self._baselines:
                if self._kept is not None:
                    _same_statistics(self._untrained, self.module)
                untrained = self._judged(self._untrained.to(self.device), None, shape)
                self._baselines[self.part] = {f"untrained/{k}": v for k, v in untrained.items()}
                if self._has_classes:
                    on_crops = self._on_crops(self.module, lambda view: view)
                    raw = probe(self.config.probe, *self._labelled(self._pixels), self.seed.probe, shape, on_crops)
                    self._baselines[self.part] |= {f"raw/{k}": v for k, v in raw.items()}
            results |= self._baselines[self.part]
        if self._online is not None and self._online.steps:
            results["online/accuracy"] = self._online_accuracy(self._online)
        if self.config.probe.picture and self._step:
            self.draw(self.workdir / "pictures" / f"step-{self._step}.png", objective, f"step {self._step}")
        return results

    @property
    def _has_classes(self) -> bool:
        """Whether there is something for probes; pairs of one's own need no classes."""
        return self.config.pairs != "columns" or self.parts.train.labels is not None

    def _judged(self, module: Method, objective: Any, shape: BlockShape) -> dict[str, float]:
        """What probes and held-out pairs say of a module."""
        results = self._probe(module, objective, shape) if self._has_classes else {}
        held_out = self.judged.held_out
        if isinstance(held_out, PairedSet):
            results |= self._retrieved(module, objective, held_out)
        return results

    def _retrieved(self, module: Method, objective: Any, pairs: PairedSet) -> dict[str, float]:
        """Who finds whom among held-out pairs; with captions also which class's caption is nearest to an image."""

        def embedded(images: ImageSet) -> Tensor:
            z = self._extract(module, module.embedding, images)
            return z if objective is None else objective.transform(z.to(self.device)).to(z.device)

        def read(captions: Sequence[str]) -> Tensor:
            assert isinstance(module, CLIP)
            with frozen(module):
                parts = [
                    module.caption(
                        *(each.to(self.device) for each in module.caption.tokens(captions[start : start + CHUNK]))
                    )
                    for start in range(0, len(captions), CHUNK)
                ]
                z = torch.cat([part.float() for part in parts])
                return (z if objective is None else objective.transform(z)).to(self._measures)

        first = embedded(pairs)
        second = read(pairs.captions) if pairs.captions else embedded(replace(pairs, images=pairs.others[0]))
        names = ("image", "caption") if pairs.captions else ("first", "second")
        ids, same = pairs.ids[:, :2], not pairs.captions
        found = {f"{names[0]}_to_{names[1]}": recall(first, second, ids, same)}
        found[f"{names[1]}_to_{names[0]}"] = recall(second, first, ids.flip(1), same)
        results = {f"retrieval/{way}/{k}": value for way, numbers in found.items() for k, value in numbers.items()}
        test = self.judged.test
        if self.config.caption is not None and test.labels is not None and test.class_names:
            prompts = [self.config.caption.prompt.format(name) for name in test.class_names]
            results["zero_shot/accuracy"] = zero_shot(embedded(test), read(prompts), test.labels)
        return results

    def _online_accuracy(self, probe: OnlineProbe) -> float:
        """Of the test part, read as it stands."""
        test, right = self.judged.test, 0
        assert test.labels is not None
        with frozen(self.module):
            for part, labels in zip(test.images.split(CHUNK), test.labels.split(CHUNK), strict=True):
                with probe.seen():
                    self.module.embedding(centre(part.to(self.device), self.size))
                right += int(probe.right(labels.to(self.device)))
        return right / len(test)

    def draw(self, path: Path, objective: Any, when: str, query: int = 0) -> None:
        """Write the picture of a query in a mini-batch: images with their weights, and a map of the batch.

        The same images and views for every call; two views where the framework has one (CMC splits it into its halves),
        and one more than vision.probe.positives where it is given.
        """
        images, generator = self.parts.pretrain.images, self.seed.torch("probe", "picture")
        index = torch.randperm(len(images), generator=generator)[: min(self.batch_size, DRAWN)]
        pixels, (height, width) = images[index].to(self.device), images.shape[-2:]
        recipe, positives = self.config.augment, self.config.probe.positives
        views = [
            apply(recipe, pixels, draw(recipe, len(index), height, width, generator))
            for _ in range(max(2, self.config.count) if positives is None else positives + 1)
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

    def _probe(self, module: Method, objective: Any, shape: BlockShape) -> dict[str, float]:
        embedding = self.config.probe.features == "embedding"

        def features(images: ImageSet) -> Tensor:
            x = self._extract(module, module.embedding if embedding else module.features, images)
            return x if objective is None or not embedding else objective.transform(x.to(self.device)).to(x.device)

        def read(view: Tensor) -> Tensor:
            if not embedding:
                return module.features(view)
            return module.embedding(view) if objective is None else objective.transform(module.embedding(view))

        on_crops = self._on_crops(module, read)
        return probe(self.config.probe, *self._labelled(features), self.seed.probe, shape, on_crops)

    def _on_crops(self, module: Method, read: Callable[[Tensor], Tensor]) -> Callable[[], ProbeResult] | None:
        """What trains a linear probe on random crops as a network reads them; None where that is not asked for."""
        config, crops = self.config.probe, self.config.probe.crops
        if crops is None:
            return None
        train, test = self.judged.train, self.judged.test
        rows = Crops(train.images, crops.augment(self.size), read, self.seed, self.device)

        def result() -> ProbeResult:
            with frozen(module):
                tested = [
                    read(centre(part.to(self.device), self.size, crops.centre)).flatten(1)
                    for part in test.images.split(CHUNK)
                ]
                x = torch.cat(tested)
                return linear_probe_on_views(rows, train.labels, x, test.labels, config.descent, self.seed.probe)

        return result

    def _labelled(self, features: Any) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        train, test = self.judged.train, self.judged.test
        return features(train), train.labels, features(test), test.labels

    def _extract(self, module: Method, function: Any, images: ImageSet) -> Tensor:
        with frozen(module):
            parts = [function(centre(part.to(self.device), self.size)) for part in images.images.split(CHUNK)]
        return torch.cat([part.float().to(self._measures) for part in parts])

    def _pixels(self, images: ImageSet) -> Tensor:
        parts = [centre(part, self.size).flatten(1) for part in images.images.split(CHUNK)]
        return torch.cat([part.to(self._measures) for part in parts])

    def features(self, split: str) -> tuple[Tensor, Tensor | None]:
        """The embeddings (what the objective sees) of the undistorted images."""
        images = {"train": self.judged.train, "test": self.judged.test}[split]
        return self._extract(self.module, self.module.embedding, images), images.labels

    def data_info(self) -> dict[str, Any]:
        if self._kept is not None and "parts" not in vars(self):
            return self._kept.info
        described = next((encoder.described for encoder in self._encoders() if encoder.described), None)
        found = {**self.judged.info(), "view_size": self.size}
        if self.judged is not self.parts:
            found["sizes"]["validation"] = len(self.parts.test)
        found |= {} if described is None else {"encoder": dict(described)}
        return found | ({"caption": self.module.caption.described} if isinstance(self.module, CLIP) else {})

    def export(self, to: str, folder: Path, record: Any, objective: Any = None) -> None:
        export_as(to, self, folder, record, objective)


def _same_statistics(module: nn.Module, other: nn.Module) -> None:
    """Give encoders the normalisation of those of another module of the same shape: it is the data's, not learned."""
    for mine, given in zip(module.modules(), other.modules(), strict=True):
        if isinstance(mine, Encoder):
            mine.set_statistics(given.get_buffer("mean"), given.get_buffer("std"))


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


def _module(
    config: VisionConfig, images: ImageSet, batch_size: int, make: Callable[..., Encoder] = build_encoder
) -> tuple[int, Method]:
    """Side of the views in pixels, and the framework with its networks."""
    size = config.augment.size or min(images.images.shape[-2:])
    return size, config.framework.from_config(config, Setup(images, size, batch_size, config.encoder, make))


@cache
def _expected(config: DataConfig, side: int | None) -> ImageSet:
    return expected(config, Seeds(0), side)


@cache
def _width(config: VisionConfig, images: ImageSet, batch_size: int) -> int:
    """Width of the embedding of networks that are built without memory for what is known of the data."""
    with torch.device("meta"):
        return _module(config, images, batch_size, _encoder)[1].embedding_dim


_encoder = cache(build_encoder)  # of plans alone: frameworks share what is never trained
