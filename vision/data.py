"""The parts of an experiment as [vision.data] describes them: read, split, sampled and unbalanced."""

import hashlib
import math
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path
from typing import Any, Literal, Self
from unicodedata import normalize

import torch
from pydantic import Field, model_validator
from torch import Tensor

from dipole.core.train.config import Settings
from dipole.core.utils.errors import DataError
from dipole.core.utils.plugins import shipped
from dipole.core.utils.seeding import Seeds
from dipole.core.utils.text import counted
from dipole.vision.image_ops import centre
from dipole.vision.image_set import ImageSet, renumbered
from dipole.vision.sources import described, known, open_source, seen
from dipole.vision.sources.base import HELD_OUT, SHARDS, TRAINING, Decoding, Known, Source, first_split, split_names

IMBALANCE_BINS = 10
READ_AT_ONCE = 1000  # images that are resized together


class DataConfig(Settings):
    """The [vision.data] table."""

    source: str = Field("digits", description=described())
    test: str | None = Field(None, description="source of the test part, if it is another")
    train_split: str = Field("train", description="the source's split for training and probing")
    test_split: str = Field(
        "test",
        description="the source's split for testing; without 'test' its val, valid, dev, eval, holdout or alike; "
        "without these a seeded share of the training split",
    )
    pretrain: str | None = Field(None, description="source for pretraining, if it is another; for example WebVision v1")
    pretrain_split: str | None = Field(
        None, description="the split for pretraining, such as 'unlabeled' or 'train+unlabeled' (default train_split)"
    )
    pretrain_classes: str | None = Field(
        None, description="as classes, for the images of `pretrain`; labels are only used for imbalance and statistics"
    )
    image_column: str | None = Field(
        None, description="of a table: the column of images (default one called image or img, else the first of images)"
    )
    label_column: str | None = Field(
        None,
        description="of a table, or of the metadata.csv of a folder: the column of classes (default one called label, "
        "labels, class, target or y, or one of class labels)",
    )
    train_share: float = Field(0.6, gt=0, lt=1, description="share for training if the source has no test part")
    limit: int | None = Field(None, ge=2, description="at most this many training images, a seeded sample")
    labelled_per_class: int | None = Field(
        None, ge=1, description="probes are fitted on this many training images of each class, a seeded sample"
    )
    only_labelled: bool = Field(False, description="pretrain only on these, as a supervised objective would have to")
    imbalance: Literal["none", "linear", "exponential"] = Field("none", description="CACR's rule for pretraining")
    classes: str | None = Field(None, description="imagenet100, or a file of class names; other classes are left out")
    size: int | None = Field(None, ge=4, description="side in pixels of the centred square (default: as stored)")
    streaming: bool = Field(
        False, description="read a set of `datasets`, `pretrain` or else `source`, image by image, without a copy"
    )
    length: int | None = Field(None, ge=2, description="of a stream: its first images, without counting or labels")
    buffer: int = Field(4096, ge=1, description="of a stream: images that are shuffled at a time, shard after shard")
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
                f"{' and '.join(given)}: no effect without a stream. Set streaming = true, or name shards as "
                f"{SHARDS}PATTERN"
            )
        return self

    def decoding(self, streamed: bool) -> Decoding:
        """Return how images are read. streamed: whether the stream's settings apply to this source."""
        more: dict[str, Any] = {"image_column": self.image_column, "label_column": self.label_column}
        if streamed:
            more |= {"streaming": self.streaming, "length": self.length, "buffer": self.buffer}
        return Decoding(self.size, self.on_corrupt, self.memory * 1e9, **more)


@dataclass(frozen=True, eq=False)
class Parts:
    """Images to pretrain on, labelled images to fit probes, images to test them, and pairs to test retrieval."""

    pretrain: ImageSet
    train: ImageSet
    test: ImageSet
    test_pairs: ImageSet | None = None

    def info(self) -> dict[str, Any]:
        """Return the description for the record."""
        parts = {"pretrain": self.pretrain, "train": self.train, "test": self.test}
        if self.test_pairs is not None and self.test_pairs is not self.test:
            parts["held_out"] = self.test_pairs
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


def load(config: DataConfig, seed: Seeds, validation: float = 0.0) -> Parts:
    """Read the parts of a table. validation: share of the training images to test on, without reading the test part."""
    wanted = read_classes(config.classes)
    source = open_source(config.source, config.decoding(streamed=config.pretrain is None), wanted)
    columns = [name for name in ("image_column", "label_column") if getattr(config, name) is not None]
    if columns and not (source.has_columns or config.test or config.pretrain):
        raise DataError(f"vision.data.{columns[0]} has no effect: {source.name} is no table and has no metadata.csv.")
    split = _test_split(config, source)
    # Find wrong names before images are read.
    own = [config.train_split, None if config.test else split, None if config.pretrain else config.pretrain_split]
    for name in filter(None, own):
        split_names(source.name, name, source.splits)
    test = None
    if not validation and config.test is not None:
        other = open_source(config.test, config.decoding(streamed=False), wanted)
        test = _read(other, _test_split(config, other) or _only_split(other) or config.test_split, config.size)
    elif not validation and split is not None:
        test = _read(source, split, config.size)
    train = _read(source, config.train_split, config.size)
    if test is None and config.test is None and split is None:
        train, test = _cut(train, config.train_share, seed.torch("data", "split"))
    if validation:
        train, test = _cut(train, 1 - validation, seed.torch("data", "validation"))
    assert test is not None
    check_same_shape(("training images", train), ("test images", test))
    test = renumbered(test, train.class_names)
    if train.class_names and test.class_names and train.class_names != test.class_names:
        only = [sorted(set(a) - set(b))[:5] for a, b in permutations((train.class_names, test.class_names))]
        raise DataError(
            f"the training and test parts have different classes: only in training: {', '.join(only[0]) or 'none'}; "
            f"only in test: {', '.join(only[1]) or 'none'}. Set vision.data.test_split (or test) to a part with the "
            "same classes, or rename them. Or give the training part alone as vision.data.source."
        )
    if config.limit is not None and config.limit < len(train):
        train = _part(train, torch.randperm(len(train), generator=seed.torch("data", "limit"))[: config.limit])
    pretrain = train
    if config.pretrain is not None:
        other = open_source(config.pretrain, config.decoding(streamed=True), read_classes(config.pretrain_classes))
        pretrain = _read(other, config.pretrain_split or _only_split(other) or config.train_split, config.size)
        check_same_shape(("images for pretraining", pretrain), ("images of the probe", train))
    elif config.pretrain_split is not None and not (validation and config.pretrain_split == config.train_split):
        pretrain = _read(source, config.pretrain_split, config.size)
    if config.labelled_per_class is not None:
        train = few_of_each(train, config.labelled_per_class, seed.torch("data", "labelled"))
    if config.only_labelled:
        pretrain = train
    if config.imbalance != "none":
        pretrain = unbalance(pretrain, config.imbalance, seed.torch("data", "imbalance"))
    return Parts(pretrain, train, test)


def expected(config: DataConfig, seed: Seeds, side: int | None = None, looks: bool = False) -> ImageSet:
    """Return the pretraining images with their expected sizes, on the meta device, with labels. No image is read.

    A source of unknown size is taken for ImageNet's, with images of `side`. looks: count quickly what can be counted.
    """
    source, classes = config.source, config.classes
    if config.pretrain is not None:
        source, classes = config.pretrain, config.pretrain_classes
    split = config.pretrain_split or config.train_split
    told = seen(source, config.size) if looks else known(source)
    facts = told
    if facts is None:
        count = len(read_classes(classes) or range(1000))
        facts = Known(3, side or 256, count, {split: 1281 * count})
    pixels = config.size or facts.side

    def stand_in(split: str) -> ImageSet:
        total = facts.splits[split]
        labels = None if split in facts.unlabelled else torch.arange(total) % facts.classes
        images = torch.empty(total, facts.channels, pixels, pixels, dtype=torch.uint8, device="meta")
        return ImageSet(source, images, labels)

    images = Source(source, tuple(facts.splits), stand_in).read(split)
    if config.pretrain is None and config.pretrain_split is None:
        most = len(images)
        if config.test is None and config.test_split not in facts.splits and told is not None:
            most = round(config.train_share * most)
        images = images.take(torch.arange(min(config.limit or most, most)))
    if config.imbalance != "none":
        images = unbalance(images, config.imbalance, seed.torch("data", "imbalance"))
    vars(images)["statistics"] = [0.5] * images.channels, [0.25] * images.channels
    return images


def _read(source: Source, split: str, size: int | None) -> ImageSet:
    """Read the images of a split. Arrays become centred squares of `size`, as decoded files are already."""
    images = source.read(split)
    if size is None or images.images.shape[2:] == (size, size):
        return images
    parts = [(255 * centre(part, size)).round().byte() for part in images.images.split(READ_AT_ONCE)]
    return replace(images, images=torch.cat(parts))


def check_same_shape(one: tuple[str, ImageSet], other: tuple[str, ImageSet]) -> None:
    """Raise DataError if two named sets have images of different shapes."""
    (name, images), (other_name, other_images) = one, other
    if images.images.shape[1:] != other_images.images.shape[1:]:
        fix = "Set vision.data.size to bring both to one"
        if images.channels != other_images.channels:
            fix = "Give both the same channels"
        raise DataError(
            f"the {name} have shape {tuple(images.images.shape[1:])}, the {other_name} "
            f"{tuple(other_images.images.shape[1:])}. {fix}."
        )


def read_classes(source: str | None) -> tuple[str, ...] | None:
    """Return the class names of a file, one per line, or of a shipped list such as imagenet100. None gives None."""
    if source is None:
        return None
    lists = {name.removesuffix("_classes"): path for name, path in shipped("published", "*_classes.txt").items()}
    path = lists.get(source, Path(source))
    try:
        lines = [normalize("NFC", line.strip()) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"the class list {path} cannot be read: {error}.") from error
    names = tuple(line for line in lines if line and not line.startswith("#"))
    if len(set(names)) != len(names) or not names:
        raise DataError(f"the class list {path} must have one class name per line, each once, got {len(names)}.")
    return names


def _test_split(config: DataConfig, source: Source) -> str | None:
    """Return the split to test on: the given one, or the substitute for 'test' in a source that has none."""
    if config.test_split in source.splits or config.test_split != HELD_OUT[0]:
        return config.test_split
    train = first_split((config.train_split,), source.splits)
    return first_split(HELD_OUT, [name for name in source.splits if name != train or name.lower() in TRAINING])


def _only_split(source: Source) -> str | None:
    return source.splits[0] if len(source.splits) == 1 else None


def _cut(images: ImageSet, share: float, generator: torch.Generator) -> tuple[ImageSet, ImageSet]:
    order = torch.randperm(len(images), generator=generator)
    cut = round(share * len(images))
    if not 0 < cut < len(images):
        raise DataError(f"{images.name} has {counted(len(images), 'image')}, too few to hold some back for testing.")
    return _part(images, order[:cut]), _part(images, order[cut:])


def _part(images: ImageSet, index: Tensor) -> ImageSet:
    """Return the images of an index. Images of a stream stay in its order, for reading."""
    if images.stream is not None:
        index = index.sort().values
    return images.take(index)


def _labels(images: ImageSet, otherwise: str) -> Tensor:
    if images.labels is None or not images.all_labelled:
        raise DataError(f"{images.name}: {otherwise}")
    return images.labels


def few_of_each(images: ImageSet, count: int, generator: torch.Generator) -> ImageSet:
    """Keep at most `count` random images of each class. Raise DataError if an image has no label."""
    labels = _labels(images, "vision.data.labelled_per_class needs a label for every image. Remove it.")
    order = torch.randperm(len(labels), generator=generator)
    kept = [order[labels[order] == label][:count] for label in labels.unique()]
    return images.take(torch.cat(kept).sort().values)


def unbalance(images: ImageSet, rule: str, generator: torch.Generator) -> ImageSet:
    """Keep a share of every class that grows with its number, as CACR's imbalanced CIFAR sets.

    With C classes in ten bins, class i in bin j = floor(10 i / C) keeps (j + 1) / 10 of its images ("linear") or
    e^(j + 1) / e^10 ("exponential"), at least one. Source: CACR Sec. 5.1 and the authors' code.
    """
    labels = _labels(images, "class imbalance needs a label for every image. Set vision.data.imbalance = 'none'.")
    classes = max(len(images.class_names), int(labels.max()) + 1)
    kept = []
    for label in labels.unique().tolist():
        members = (labels == label).nonzero().flatten()
        step = IMBALANCE_BINS * label // classes + 1
        share = step / IMBALANCE_BINS
        if rule == "exponential":
            share = math.exp(step - IMBALANCE_BINS)
        order = torch.randperm(len(members), generator=generator)
        kept.append(members[order[: max(1, int(share * len(members) + 1e-9))]])
    return images.take(torch.cat(kept).sort().values)
