"""Image sets as the domain uses them: uint8 tensors with labels, their statistics, and the parts of an experiment."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from dipole.core.ground.errors import DataError
from dipole.core.ground.seeding import Seeds
from dipole.core.train.config import Settings
from dipole.core.train.shipped import shipped
from dipole.vision.stream import Encoded

if TYPE_CHECKING:
    from dipole.vision.sources import Decoding, Source

IMBALANCE_BINS = 10
SAMPLE = 2000  # images from which the statistics of an encoded set are taken


class DataConfig(Settings):
    """The [vision.data] table."""

    source: str = Field(
        "digits",
        description="digits, cifar10, cifar100, stl10, a Hub id, a folder of images, an .npz, parquet, a saved Dataset",
    )
    test: str | None = Field(None, description="where the test part lies, if not in the source itself")
    train_split: str = Field("train", description="the source's split for training and probing")
    test_split: str = Field(
        "test", description="the source's split for testing; absent: a seeded share of the training split"
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
    imbalance: Literal["none", "linear", "exponential"] = Field(
        "none", description="CACR's rule for the pretraining part"
    )
    classes: str | None = Field(
        None, description="imagenet100, or a file with one class name per line; only these are used"
    )
    size: int | None = Field(
        None, ge=4, description="short side after decoding, then a centred square; default: as stored"
    )
    memory: float = Field(4.0, gt=0, description="GB of decoded images; a larger set is decoded batch by batch")
    on_corrupt: Literal["refuse", "skip"] = Field("refuse", description="what to do with a file that cannot be decoded")


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images (n, C, H, W) uint8 with labels (n,) long, -1 where missing, or None where nothing is labelled."""

    name: str
    images: "Tensor | Encoded"
    labels: Tensor | None = None
    class_names: tuple[str, ...] = ()
    skipped: tuple[str, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if self.images.ndim != 4 or self.images.dtype != torch.uint8 or self.images.shape[1] not in (1, 3):
            raise DataError(
                f"{self.name}: images must be uint8 of shape (n, 1 or 3, height, width), "
                f"got {self.images.dtype} of shape {tuple(self.images.shape)}."
            )
        if not len(self.images):
            raise DataError(f"{self.name} holds no images.")
        if self.labels is not None and self.labels.shape != (len(self.images),):
            raise DataError(f"{self.name}: {len(self.images)} images but labels of shape {tuple(self.labels.shape)}.")

    def __len__(self) -> int:
        return len(self.images)

    @property
    def channels(self) -> int:
        return self.images.shape[1]

    def take(self, index: Tensor | Sequence[int]) -> "ImageSet":
        """The images of an index, in its order."""
        index = torch.as_tensor(index)
        labels = None if self.labels is None else self.labels[index]
        images = self.images.take(index) if isinstance(self.images, Encoded) else self.images[index]
        return replace(self, images=images, labels=labels)

    def broken(self) -> tuple[str, ...]:
        """Files that could not be decoded so far."""
        return (*self.skipped, *(self.images.skipped if isinstance(self.images, Encoded) else ()))

    def counts(self) -> dict[str, int]:
        """Images per class, by name; 'unlabelled' for those without."""
        if self.labels is None:
            return {"unlabelled": len(self)}
        values, counts = self.labels.unique(return_counts=True)
        return {self.class_name(int(v)): int(c) for v, c in zip(values, counts, strict=True)}

    def class_name(self, label: int) -> str:
        if label < 0:
            return "unlabelled"
        return self.class_names[label] if label < len(self.class_names) else str(label)

    def _sample(self) -> Tensor:
        images = self.images
        return images if isinstance(images, Tensor) else images[slice(None, None, max(1, len(images) // SAMPLE))]

    @cached_property
    def statistics(self) -> tuple[list[float], list[float]]:
        """Mean and standard deviation of every channel in [0, 1]; of a set that stays encoded, from a sample."""
        levels = torch.arange(256, dtype=torch.float64) / 255
        mean, std = [], []
        for channel in self._sample().unbind(1):
            share = torch.bincount(channel.flatten(), minlength=256).double() / channel.numel()
            mean.append(float(share @ levels))
            std.append(max(float(share @ (levels - mean[-1]) ** 2) ** 0.5, 1 / 255))
        return mean, std

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of the shape, the pixels and the labels; of a set that stays encoded, see `Encoded.fingerprint`."""
        digest = hashlib.sha256(str(tuple(self.images.shape)).encode())
        if isinstance(self.images, Encoded):
            digest.update(self.images.fingerprint().encode())
        else:
            digest.update(self.images.contiguous().numpy().data)
        if self.labels is not None:
            digest.update(self.labels.contiguous().numpy().data)
        return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class Parts:
    """What an experiment needs: images to pretrain on, labelled ones to fit probes, and ones to test them."""

    pretrain: ImageSet
    train: ImageSet
    test: ImageSet

    def info(self) -> dict[str, Any]:
        """The description that goes into the record."""
        parts = {"pretrain": self.pretrain, "train": self.train, "test": self.test}
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


def load(config: DataConfig, seed: Seeds) -> Parts:
    """Read the parts that a [vision.data] table describes; DataError says what is wrong with them."""
    from dipole.vision.sources import Decoding, open_source

    wanted = None if config.classes is None else read_classes(config.classes)
    decoding = Decoding(config.size, config.on_corrupt, config.memory * 1e9)
    source = open_source(config.source, decoding, wanted)
    test = None
    if config.test is not None:
        other = open_source(config.test, decoding, wanted)
        test = other.read(other.splits[0] if len(other.splits) == 1 else config.test_split)
    elif config.test_split in source.splits:
        test = source.read(config.test_split)
    train = source.read(config.train_split)
    if test is None:
        order = torch.randperm(len(train), generator=seed.torch("data", "split"))
        cut = round(config.train_share * len(train))
        if not 0 < cut < len(train):
            raise DataError(f"{train.name} has {len(train)} images, too few to hold some back for testing.")
        train, test = train.take(order[:cut]), train.take(order[cut:])
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
        train = train.take(torch.randperm(len(train), generator=seed.torch("data", "limit"))[: config.limit])
    pretrain = _pretrain(config, decoding, source, train)
    if config.imbalance != "none":
        pretrain = unbalance(pretrain, config.imbalance, seed.torch("data", "imbalance"))
    return Parts(pretrain, train, test)


def _pretrain(config: DataConfig, decoding: "Decoding", source: "Source", train: ImageSet) -> ImageSet:
    from dipole.vision.sources import open_source

    if config.pretrain is None:
        return train if config.pretrain_split is None else source.read(config.pretrain_split)
    wanted = None if config.pretrain_classes is None else read_classes(config.pretrain_classes)
    other = open_source(config.pretrain, decoding, wanted)
    split = config.pretrain_split or config.train_split
    pretrain = other.read(other.splits[0] if len(other.splits) == 1 else split)
    if pretrain.images.shape[1:] != train.images.shape[1:]:
        raise DataError(
            f"the images for pretraining have shape {tuple(pretrain.images.shape[1:])}, those of the probe "
            f"{tuple(train.images.shape[1:])}; set vision.data.size to bring both to one."
        )
    return pretrain


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


def shipped_classes() -> dict[str, Path]:
    """The class lists that come with the published tables, by name."""
    return {name.removesuffix("_classes"): path for name, path in shipped("published", "*_classes.txt").items()}


def read_classes(source: str) -> tuple[str, ...]:
    """The class names of a file, one per line, or of a shipped list such as imagenet100."""
    path = shipped_classes().get(source, Path(source))
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"the class list {path} cannot be read: {error}.") from error
    names = tuple(line for line in lines if line and not line.startswith("#"))
    if len(set(names)) != len(names) or not names:
        raise DataError(f"the class list {path} must hold one different class name per line, got {len(names)} lines.")
    return names


def _difference(a: Sequence[str], b: Sequence[str]) -> str:
    only_a, only_b = sorted(set(a) - set(b)), sorted(set(b) - set(a))
    return f"only in training: {', '.join(only_a[:5]) or 'none'}; only in test: {', '.join(only_b[:5]) or 'none'}"
