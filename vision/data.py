"""The parts of an experiment: what is read, split, sampled and unbalanced, as [vision.data] says."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator

from dipole.core.train.config import Settings
from dipole.core.utils.errors import DataError
from dipole.core.utils.seeding import Seeds
from dipole.core.utils.text import counted
from dipole.vision.class_lists import read_classes
from dipole.vision.decoding import Encoded
from dipole.vision.image_set import ImageSet
from dipole.vision.sources import (
    HELD_OUT,
    SHARDS,
    Decoding,
    Known,
    Source,
    Streaming,
    described,
    known,
    open_source,
    seen,
)

IMBALANCE_BINS = 10


class DataConfig(Settings):
    """The [vision.data] table."""

    source: str = Field("digits", description=described())
    test: str | None = Field(None, description="where the test part lies, if not in the source itself")
    train_split: str = Field("train", description="the source's split for training and probing")
    test_split: str = Field(
        "test",
        description="the source's split for testing; without 'test' its val, validation, valid or dev; absent: a "
        "seeded share of the training split",
    )
    pretrain: str | None = Field(
        None, description="where the images for pretraining lie, if not in the source; for example WebVision v1"
    )
    pretrain_split: str | None = Field(
        None, description="the split for pretraining, such as 'unlabeled'; default train_split"
    )
    pretrain_classes: str | None = Field(
        None, description="as classes, for the images of `pretrain`; labels are used for imbalance and statistics alone"
    )
    train_share: float = Field(0.6, gt=0, lt=1, description="share for training where the source has no test part")
    limit: int | None = Field(None, ge=2, description="at most this many training images, a seeded sample")
    labelled_per_class: int | None = Field(
        None, ge=1, description="probes are fitted on so many training images of each class, a seeded sample"
    )
    only_labelled: bool = Field(False, description="pretrain on these alone, as a supervised objective would have to")
    imbalance: Literal["none", "linear", "exponential"] = Field(
        "none", description="CACR's rule for the pretraining part"
    )
    classes: str | None = Field(
        None, description="imagenet100, or a file with one class name per line; only these are used"
    )
    size: int | None = Field(
        None, ge=4, description="short side after decoding, then a centred square; default: as stored"
    )
    streaming: bool = Field(
        False,
        description="read a data set of the library `datasets` one image after another, without a copy of it; "
        "of `pretrain` where that is given, else of `source`",
    )
    length: int | None = Field(
        None, ge=2, description="images of a stream: its first so many, without counting or labels; default: all"
    )
    buffer: int = Field(
        4096, ge=1, description="of a stream: images among which the order is drawn anew, shard after shard"
    )
    memory: float = Field(4.0, gt=0, description="GB of decoded images; a larger set is decoded batch by batch")
    on_corrupt: Literal["refuse", "skip"] = Field("refuse", description="what to do with a file that cannot be decoded")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.only_labelled and (self.labelled_per_class is None or self.pretrain or self.pretrain_split):
            raise ValueError(
                "only_labelled pretrains on the images that labelled_per_class leaves: set that, and neither pretrain "
                "nor pretrain_split"
            )
        streams = self.streaming or (self.pretrain or self.source).startswith(SHARDS)
        given = [name for name in ("length", "buffer") if getattr(self, name) != type(self).model_fields[name].default]
        if given and not streams:
            raise ValueError(
                f"{' and '.join(given)}: no effect without a stream; set streaming = true, or name shards as "
                f"{SHARDS}PATTERN"
            )
        return self

    def decoding(self, streamed: bool) -> Decoding:
        """How images are read; streamed: where the stream lies that the settings are of."""
        stream = Streaming(self.streaming, self.length, self.buffer) if streamed else Streaming()
        return Decoding(self.size, self.on_corrupt, self.memory * 1e9, stream)


@dataclass(frozen=True, eq=False)
class Parts:
    """What an experiment needs: images to pretrain on, labelled ones to fit probes, and ones to test them."""

    pretrain: ImageSet
    train: ImageSet
    test: ImageSet
    held_out: ImageSet | None = None  # pairs that are not trained on

    def info(self) -> dict[str, Any]:
        """The description that goes into the record."""
        parts = {"pretrain": self.pretrain, "train": self.train, "test": self.test}
        if self.held_out is not None and self.held_out is not self.test:
            parts["held_out"] = self.held_out
        together = hashlib.sha256("".join(part.fingerprint for part in parts.values()).encode()).hexdigest()
        mean, std = self.pretrain.statistics
        return {
            "name": self.train.name,
            "fingerprint": together,
            "sizes": {name: len(part) for name, part in parts.items()},
            "shape": list(self.train.images.shape[1:]),
            "counts": {name: part.counts() for name, part in parts.items()},
            "mean": mean,
            "std": std,
            "skipped": sorted({name for part in parts.values() for name in part.broken()}),
        }


def expected(config: DataConfig, seed: Seeds, side: int | None = None, looks: bool = False) -> ImageSet:
    """The images of pretraining as far as they are known without them: on the meta device, with their labels.

    A source of unknown size is taken for ImageNet's: 1,281 images of each class.

    side: of the images where neither the settings nor the source say it.
    looks: also at what lies at the source, as far as its sizes are seen without reading images.
    """
    source = config.source if config.pretrain is None else config.pretrain
    classes = config.classes if config.pretrain is None else config.pretrain_classes
    split = config.pretrain_split or config.train_split
    count = len(read_classes(classes)) if classes else 1000
    told = seen(source) if looks else known(source)
    facts = told or Known(3, side or 256, count, {split: 1281 * count})

    def stand_in(split: str) -> ImageSet:
        total, pixels = facts.splits[split], config.size or facts.side
        images = torch.empty(total, facts.channels, pixels, pixels, dtype=torch.uint8, device="meta")
        labels = None if split in facts.unlabelled else torch.arange(total) % facts.classes
        return ImageSet(source, images, labels)

    images = Source(source, tuple(facts.splits), stand_in).read(split)
    if config.pretrain is None and config.pretrain_split is None:
        held_out = config.test is None and config.test_split not in facts.splits and told is not None
        most = min(config.limit or len(images), round(config.train_share * len(images)) if held_out else len(images))
        images = images.take(torch.arange(most)) if most < len(images) else images
    if config.imbalance != "none":
        images = unbalance(images, config.imbalance, seed.torch("data", "imbalance"))
    vars(images)["statistics"] = [0.5] * images.channels, [0.25] * images.channels
    return images


def load(config: DataConfig, seed: Seeds, validation: float = 0.0) -> Parts:
    """Read the parts that a [vision.data] table describes; DataError says what is wrong with them.

    validation: share of the training images that is tested on in place of the test images, which are not read then; it
        is taken from the training images before all else, so that nothing is trained on it.
    """
    wanted = None if config.classes is None else read_classes(config.classes)
    decoding = config.decoding(streamed=config.pretrain is None)
    source = open_source(config.source, decoding, wanted)
    test = None if validation else _own_test(config, source, wanted)
    train = source.read(config.train_split)
    if test is None and config.test is None and _held_out(config, source) is None:
        train, test = _cut(train, config.train_share, seed.torch("data", "split"))
    if validation:
        train, test = _cut(train, 1 - validation, seed.torch("data", "validation"))
    assert test is not None
    if train.images.shape[1:] != test.images.shape[1:]:
        raise DataError(
            f"the training images have shape {tuple(train.images.shape[1:])}, the test images "
            f"{tuple(test.images.shape[1:])}; set vision.data.size to bring both to one."
        )
    if train.class_names != test.class_names and train.class_names and test.class_names:
        raise DataError(
            f"the training and test parts have different classes: {_difference(train.class_names, test.class_names)}."
        )
    if config.limit is not None and config.limit < len(train):
        train = _part(train, torch.randperm(len(train), generator=seed.torch("data", "limit"))[: config.limit])
    if validation and config.pretrain is None and config.pretrain_split == config.train_split:
        config = config.model_copy(update={"pretrain_split": None})
    pretrain = _pretrain(config, source, train)
    if config.labelled_per_class is not None:
        train = few_of_each(train, config.labelled_per_class, seed.torch("data", "labelled"))
        pretrain = train if config.only_labelled else pretrain
    if config.imbalance != "none":
        pretrain = unbalance(pretrain, config.imbalance, seed.torch("data", "imbalance"))
    return Parts(pretrain, train, test)


def _own_test(config: DataConfig, source: Source, wanted: tuple[str, ...] | None) -> ImageSet | None:
    """The test images where they lie apart from the training images."""
    if config.test is not None:
        other = open_source(config.test, config.decoding(streamed=False), wanted)
        return other.read(other.splits[0] if len(other.splits) == 1 else _held_out(config, other) or config.test_split)
    split = _held_out(config, source)
    return None if split is None else source.read(split)


def _held_out(config: DataConfig, source: Source) -> str | None:
    """The split to test on: the one that is named, or what stands for 'test' in a source that has none."""
    if config.test_split in source.splits:
        return config.test_split
    names = HELD_OUT if config.test_split == HELD_OUT[0] else ()
    return next((name for name in names if name in source.splits and name != config.train_split), None)


def _cut(images: ImageSet, share: float, generator: torch.Generator) -> tuple[ImageSet, ImageSet]:
    order = torch.randperm(len(images), generator=generator)
    cut = round(share * len(images))
    if not 0 < cut < len(images):
        raise DataError(f"{images.name} has {counted(len(images), 'image')}, too few to hold some back for testing.")
    return _part(images, order[:cut]), _part(images, order[cut:])


def _part(images: ImageSet, index: torch.Tensor) -> ImageSet:
    """The images of an index; those of a stream in its order, as they cannot well be read in another."""
    streamed = isinstance(images.images, Encoded) and images.images.stream is not None
    return images.take(index.sort().values if streamed else index)


def _pretrain(config: DataConfig, source: Source, train: ImageSet) -> ImageSet:
    if config.pretrain is None:
        return train if config.pretrain_split is None else source.read(config.pretrain_split)
    wanted = None if config.pretrain_classes is None else read_classes(config.pretrain_classes)
    other = open_source(config.pretrain, config.decoding(streamed=True), wanted)
    split = config.pretrain_split or config.train_split
    pretrain = other.read(other.splits[0] if len(other.splits) == 1 else split)
    if pretrain.images.shape[1:] != train.images.shape[1:]:
        raise DataError(
            f"the images for pretraining have shape {tuple(pretrain.images.shape[1:])}, those of the probe "
            f"{tuple(train.images.shape[1:])}; set vision.data.size to bring both to one."
        )
    return pretrain


def few_of_each(images: ImageSet, count: int, generator: torch.Generator) -> ImageSet:
    """At most `count` images of each class, drawn by the generator; DataError where an image has no class."""
    labels = images.labels
    if labels is None or bool((labels < 0).any()):
        raise DataError(f"{images.name}: vision.data.labelled_per_class needs a label for every image; leave it out.")
    order = torch.randperm(len(labels), generator=generator)
    kept = [order[labels[order] == label][:count] for label in labels.unique()]
    return images.take(torch.cat(kept).sort().values)


def unbalance(images: ImageSet, rule: str, generator: torch.Generator) -> ImageSet:
    """Keep a share of every class that grows with its number, as CACR's imbalanced CIFAR sets.

    With C classes in ten bins, class i in bin j = floor(10 i / C) keeps (j + 1) / 10 of its images ("linear") or
    e^(j + 1) / e^10 ("exponential"), at least one. Source: CACR Sec. 5.1 and the authors' code.
    """
    labels = images.labels
    if labels is None or bool((labels < 0).any()):
        raise DataError(
            f"{images.name}: class imbalance needs a label for every image; set vision.data.imbalance = 'none'."
        )
    classes = max(len(images.class_names), int(labels.max()) + 1)
    kept = []
    for label in labels.unique().tolist():
        members = (labels == label).nonzero().flatten()
        step = IMBALANCE_BINS * label // classes + 1
        share = step / IMBALANCE_BINS if rule == "linear" else float(torch.tensor(float(step - IMBALANCE_BINS)).exp())
        order = torch.randperm(len(members), generator=generator)
        kept.append(members[order[: max(1, int(share * len(members) + 1e-9))]])
    return images.take(torch.cat(kept).sort().values)


def _difference(a: Sequence[str], b: Sequence[str]) -> str:
    only_a, only_b = sorted(set(a) - set(b)), sorted(set(b) - set(a))
    return f"only in training: {', '.join(only_a[:5]) or 'none'}; only in test: {', '.join(only_b[:5]) or 'none'}"
