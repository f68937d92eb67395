"""A set of images with labels, in memory or encoded."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol, Self

import numpy as np
import torch
from torch import Tensor

from dipole.core.utils.errors import ConfigError, DataError
from dipole.core.utils.seeding import Seeds
from dipole.core.utils.text import counted
from dipole.vision.decoding import Encoded, Stream

SAMPLE = 2000  # images from which the statistics of an encoded set are taken
Images = Tensor | Encoded


def taken(images: Images, index: Tensor) -> Images:
    """Return the images of an index (k,)."""
    return images.take(index) if isinstance(images, Encoded) else images[index]


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images with their classes.

    Args:
        name: of the data set, for messages.
        images: (n, C, H, W) uint8, C >= 1, or encoded images, which are decoded on access.
        labels: (n,) long, -1 where missing. None if nothing is labelled.
        class_names: of classes 0, 1, ...
        skipped: unread files with the reason.

    Raises:
        DataError: if there are no images, or images or labels have a wrong shape or dtype.
    """

    name: str
    images: Images
    labels: Tensor | None = None
    class_names: tuple[str, ...] = ()
    skipped: tuple[str, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if self.images.ndim != 4 or self.images.dtype != torch.uint8 or 0 in self.images.shape[1:]:
            raise DataError(
                f"{self.name}: images must be uint8 of shape (n, channels, height, width), "
                f"got {self.images.dtype} of shape {tuple(self.images.shape)}."
            )
        if not len(self.images):
            raise DataError(f"{self.name} holds no images.")
        if self.labels is not None and self.labels.shape != (len(self.images),):
            raise DataError(
                f"{self.name}: {counted(len(self.images), 'image')} but labels of shape {tuple(self.labels.shape)}."
            )

    def __len__(self) -> int:
        return len(self.images)

    @property
    def columns(self) -> tuple[Images, ...]:
        """The images from which the first, second, ... view is made, in turn, (n, C, H, W) each."""
        return (self.images,)

    @property
    def channels(self) -> int:
        """Channels of the images."""
        return self.images.shape[1]

    @property
    def stream(self) -> Stream | None:
        """The order in which the images can be read. None if any image can be read at any time."""
        return self.images.stream if isinstance(self.images, Encoded) else None

    @property
    def all_labelled(self) -> bool:
        """Return whether every image has a label."""
        return self.labels is not None and bool((self.labels >= 0).all())

    def take(self, index: Tensor | Sequence[int]) -> Self:
        """Return the images of an index, in its order.

        Args:
            index: (k,) integers.
        """
        index = torch.as_tensor(index)
        labels = None if self.labels is None else self.labels[index]
        return replace(self, images=taken(self.images, index), labels=labels)

    def broken(self) -> tuple[str, ...]:
        """Return the files that could not be decoded so far."""
        if isinstance(self.images, Encoded):
            return (*self.skipped, *self.images.skipped.values())
        return self.skipped

    def counts(self) -> dict[str, int]:
        """Count the images of each class by name, with those without a label as 'unlabelled'."""
        if self.labels is None:
            return {"unlabelled": len(self)}
        values, counts = self.labels.unique(return_counts=True)
        return {self.class_name(int(v)): int(c) for v, c in zip(values, counts, strict=True)}

    def class_name(self, label: int) -> str:
        """Return the name of a class, or its number without one. Below 0 it is "unlabelled".

        Args:
            label: the class.
        """
        if label < 0:
            return "unlabelled"
        return self.class_names[label] if label < len(self.class_names) else str(label)

    @cached_property
    def statistics(self) -> tuple[list[float], list[float]]:
        """Mean and standard deviation of every channel in [0, 1]. An encoded set uses a sample."""
        sample = self.images
        if isinstance(sample, Encoded):
            sample = sample.sample(SAMPLE)
        levels = torch.arange(256, dtype=torch.float64) / 255
        mean, std = [], []
        for channel in sample.unbind(1):
            share = torch.bincount(channel.flatten(), minlength=256).double() / channel.numel()
            mean.append(float(share @ levels))
            std.append(max(float(share @ (levels - mean[-1]) ** 2) ** 0.5, 1 / 255))
        return mean, std

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of the shape, the pixels and the labels. For an encoded set see `Encoded.fingerprint`."""
        digest = hashlib.sha256(str(tuple(self.images.shape)).encode())
        if isinstance(self.images, Encoded):
            digest.update(self.images.fingerprint().encode())
        else:
            digest.update(self.images.contiguous().numpy().data)
        if self.labels is not None:
            digest.update(self.labels.contiguous().numpy().data)
        return digest.hexdigest()


def complete_labels(images: ImageSet, begin: str, otherwise: str) -> Tensor:
    """Return the labels (n,). Raise ConfigError if an image has none, with the begin and another fix of the message."""
    if images.labels is None or not images.all_labelled:
        raise ConfigError(f"{begin} {images.name} has images without a label. Take a labelled split, or {otherwise}.")
    return images.labels


def renumbered(images: ImageSet, names: tuple[str, ...]) -> ImageSet:
    """Return a set with the class numbers of another part of its data, if that has all its classes (`names`)."""
    if images.labels is None or images.class_names in ((), names) or not set(images.class_names) <= set(names):
        return images
    places = torch.tensor([*(names.index(name) for name in images.class_names), -1])
    labels = images.labels.clamp(min=-1)
    return replace(images, labels=places[labels], class_names=names)


def joined(parts: Sequence[ImageSet]) -> ImageSet:
    """Return the images of several splits, in their order. Those of a split without labels have the label -1."""
    first = parts[0]
    if len(parts) == 1:
        return first
    labelled = [part for part in parts if part.labels is not None]
    most = max(labelled, key=lambda each: len(each.class_names), default=first)
    parts = [renumbered(part, most.class_names) for part in parts]
    named = {part.class_names for part in parts if part.labels is not None}
    if len({part.images.shape[1:] for part in parts}) > 1 or len(named) > 1:
        raise DataError(f"{first.name}: its splits have different shapes or classes and cannot be joined. Choose one.")
    labels = None
    if named:
        each = [torch.full((len(part),), -1) if part.labels is None else part.labels for part in parts]
        labels = torch.cat(each)
    images = [part.images for part in parts]
    pixels = [each for each in images if isinstance(each, Tensor)]
    together: Images = torch.cat(pixels) if len(pixels) == len(images) else _encoded(first.name, images, labels)
    skipped = tuple(name for part in parts for name in part.skipped)
    return ImageSet(first.name, together, labels, next(iter(named), first.class_names), skipped)


def _encoded(name: str, parts: Sequence[Images], labels: Tensor | None) -> Encoded:
    """Return the encoded images of several splits one after another."""
    sets = [part for part in parts if isinstance(part, Encoded) and part.stream is None]
    if len(sets) < len(parts):
        raise DataError(
            f"{name}: splits that are read as a stream, or of which only some fit into memory, cannot be joined. "
            "Remove vision.data.streaming, or change vision.data.memory."
        )
    owners = torch.arange(len(sets)).repeat_interleave(torch.tensor([len(part) for part in sets]))
    rows = torch.cat([part.rows for part in sets])

    def read(place: int) -> bytes:
        found: bytes = sets[owners[place]].read(int(rows[place]))
        return found

    names = [part.names[row] for part in sets for row in part.rows.tolist()]
    return replace(sets[0], names=names, read=read, rows=torch.arange(len(names)), skipped={}, labels=labels)


class Order(Protocol):
    """The order of images in an epoch: `len(order)` rows, of which `rows(epoch)` are the indices of images (n,)."""

    def __len__(self) -> int: ...

    def rows(self, epoch: int) -> Tensor | np.ndarray:
        """Return the indices of images in the order of an epoch, (n,).

        Args:
            epoch: its number, from 0.
        """


@dataclass(frozen=True)
class Shuffled:
    """Each of `count` images once in an epoch, in an order from the seed."""

    count: int
    seed: Seeds

    def __len__(self) -> int:
        return self.count

    def rows(self, epoch: int) -> Tensor:
        return torch.randperm(self.count, generator=self.seed.torch("data", "order", epoch))


@dataclass(frozen=True)
class ShardByShard:
    """Each image of a stream once in an epoch, nearly in the order of reading.

    The shards (`shard`: (n,) of each image) follow one another in a seeded order. Images are shuffled within windows of
    `buffer` images, whose start differs from epoch to epoch.
    """

    shard: Tensor
    buffer: int
    seed: Seeds

    def __len__(self) -> int:
        return len(self.shard)

    def rows(self, epoch: int) -> Tensor:
        generator = self.seed.torch("data", "order", epoch)
        turn = torch.randperm(int(self.shard.max()) + 1, generator=generator)
        order = turn[self.shard].argsort(stable=True)
        window = (torch.arange(len(order)) + torch.randint(self.buffer, (), generator=generator)) // self.buffer
        chance = torch.rand(len(order), generator=generator, dtype=torch.float64)
        return order[(window + chance).argsort()]


def image_order(images: ImageSet, seed: Seeds) -> Order:
    """Return the order of an epoch: shuffled, or for a stream one in which it can be read."""
    if images.stream is None:
        return Shuffled(len(images), seed)
    assert isinstance(images.images, Encoded)
    shard = torch.searchsorted(images.stream.bounds, images.images.rows, right=True) - 1
    return ShardByShard(shard, images.stream.buffer, seed)
