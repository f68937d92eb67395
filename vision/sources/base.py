"""What a source of images is: how one is recognised, opened and read, split by split."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dipole.core.utils.errors import DataError, nearest
from dipole.vision.decoding import OnCorrupt
from dipole.vision.image_set import ImageSet
from dipole.vision.registry import Entries

__all__ = [
    "Decoding",
    "Known",
    "Source",
    "Streaming",
    "register_source",
]

HELD_OUT = ("test", "val", "validation", "valid", "dev")  # splits for testing by name, the first that is there
SPLITS = ("train", *HELD_OUT, "unlabeled")

SHARDS = "wds:"  # before the names of tar files
HUB = "hub:"  # before a data set that the library `datasets` finds: an id, or a folder

Classes = tuple[str, ...] | None  # names of the classes to keep, in their order; None keeps all


@dataclass(frozen=True)
class Streaming:
    """Whether a set is read one image after another.

    Args:
        on: it is.
        length: how many of its images; None: all.
        buffer: images that are shuffled at a time, >= 1.
    """

    on: bool = False
    length: int | None = None
    buffer: int = 4096


@dataclass(frozen=True)
class Decoding:
    """How encoded images are read.

    Args:
        size: side of the squares in pixels; None: as they are, where all are alike.
        on_corrupt: what is done with damaged ones, "refuse" or "skip".
        memory: bytes that decoded images may take; more stay encoded.
        stream: whether they are read one after another.
    """

    size: int | None = None
    on_corrupt: OnCorrupt = "refuse"
    memory: float = 4e9
    stream: Streaming = Streaming()


@dataclass(frozen=True)
class Known:
    """What is known of a data set before it is read.

    Args:
        channels: 1 or 3.
        side: of the images in pixels.
        classes: how many.
        splits: images of each.
        unlabelled: splits without labels.
    """

    channels: int
    side: int
    classes: int
    splits: Mapping[str, int]
    unlabelled: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Source:
    """A data set: the names of its splits, and how one is read.

    Args:
        name: for messages.
        splits: one at least.
        reader: name of a split -> its images.
    """

    name: str
    splits: tuple[str, ...]
    reader: Callable[[str], ImageSet]

    def read(self, split: str) -> ImageSet:
        """The images of a split; a source without named splits has the one split "train".

        Args:
            split: its name.

        Raises:
            DataError: there is no such split, or it is damaged.
        """
        if split not in self.splits:
            raise DataError(
                f"{self.name} has no split {split!r}.{nearest(split, self.splits)} It has: {', '.join(self.splits)}. "
                "Set vision.data.train_split, test_split or pretrain_split."
            )
        return self.reader(split)


Opener = Callable[[str, Decoding, Classes], Source]


@dataclass(frozen=True)
class Reader:
    """A kind of source; see `register_source`."""

    open: Opener
    reads: str
    names: tuple[str, ...]
    matches: Callable[[str, Path], bool]
    general: bool
    known: Mapping[str, Known] = field(default_factory=dict)
    glance: Callable[[Path], Known | None] = lambda path: None


READERS: Entries[Reader] = Entries("a source")


def register_source(
    reads: str = "",
    *,
    names: tuple[str, ...] = (),
    matches: Callable[[str, Path], bool] | None = None,
    general: bool = False,
    known: Mapping[str, Known] | None = None,
    glance: Callable[[Path], Known | None] = lambda path: None,
) -> Callable[[Opener], Opener]:
    """Make a function a reader of what vision.data.source may name.

        @register_source("files of mine", matches=lambda text, path: path.suffix == ".mine")
        def open(text: str, decoding: Decoding, classes: tuple[str, ...] | None) -> Source: ...

    `classes` are the names of the classes to keep; None keeps all. Nothing is decoded before a split of the `Source` is
    read.

    Args:
        reads: what it reads, for messages, such as "a folder of images".
        names: data sets that are known by name.
        matches: whether a text, which may be a path, is one of its own; by default one of `names`.
        general: asked after all others, because it would take what is more specifically theirs.
        known: of those names whose sizes are known without reading them.
        glance: the sizes of what lies at a path where they can be seen without reading the images, else None.

    Returns:
        A decorator that gives back what it decorates.

    Raises:
        RegistryError: from the decorator, if another function of that module and name is registered already.
    """

    def decorate(open_: Opener) -> Opener:
        own = matches or (lambda text, path: text in names)
        READERS.add(
            f"{open_.__module__}.{open_.__qualname__}", Reader(open_, reads, names, own, general, known or {}, glance)
        )
        return open_

    return decorate
