"""Sources of images: how one is recognised, opened and read split by split."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dipole.core.utils.errors import DataError, nearest
from dipole.core.utils.plugins import Entries
from dipole.vision.decoding import OnCorrupt
from dipole.vision.image_set import ImageSet, joined

__all__ = ["Decoding", "Known", "Source", "register_source"]

TRAINING = ("train", "training")
# Names of test splits, in order of preference.
HELD_OUT = ("test", "testing", "val", "validation", "valid", "validate", "dev", "eval", "evaluation", "holdout")
CALLED = (*TRAINING, *HELD_OUT, "unlabeled", "unlabelled")

SHARDS = "wds:"  # before the names of tar files
LFS = "a pointer of Git LFS: git lfs pull"  # in messages of files that cannot be read
HUB = "hub:"  # before a data set that the library `datasets` finds: an id, or a folder

Classes = tuple[str, ...] | None  # names of the classes to read, in their order. None reads all


@dataclass(frozen=True)
class Decoding:
    """How encoded images are read.

    Args:
        size: side of the squares in pixels. None leaves images of one size unchanged.
        on_corrupt: "refuse" or "skip" damaged images.
        memory: limit of decoded images in bytes. Larger sets stay encoded.
        streaming: read a set of `datasets` one image after another.
        length: number of images of a stream to use. None uses all.
        buffer: images of a stream that are shuffled at a time, >= 1.
        image_column: column of a table. None finds it.
        label_column: column of a table. None finds it.
    """

    size: int | None = None
    on_corrupt: OnCorrupt = "refuse"
    memory: float = 4e9
    streaming: bool = False
    length: int | None = None
    buffer: int = 4096
    image_column: str | None = None
    label_column: str | None = None


@dataclass(frozen=True)
class Known:
    """Sizes of a data set, before it is read.

    Args:
        channels: of the images.
        side: of the images in pixels.
        classes: number of classes.
        splits: name -> number of images.
        unlabelled: splits without labels.
    """

    channels: int
    side: int
    classes: int
    splits: Mapping[str, int]
    unlabelled: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Source:
    """A data set with named splits.

    Args:
        name: for messages.
        splits: at least one.
        reader: name of a split -> its images.
        has_columns: whether it is a table, of which `Decoding` chooses columns.
    """

    name: str
    splits: tuple[str, ...]
    reader: Callable[[str], ImageSet]
    has_columns: bool = False

    def read(self, split: str) -> ImageSet:
        """Return the images of a split. A source without named splits has the one split "train".

        Args:
            split: its name, or several with plus signs, such as "train+unlabeled".

        Raises:
            DataError: there is no such split, it is named twice, or it is damaged.
        """
        names = split_names(self.name, split, self.splits)
        return joined([self.reader(name) for name in names])


def first_split(names: Iterable[str], known: Sequence[str]) -> str | None:
    """Return the first of some names that is a known split, as written there: TRAIN, train2017 or imagenet1k-train.

    Words before the name are allowed if no split is called train.
    """
    before = "" if any(each.lower() in TRAINING for each in known) else "(.*[^a-z])?"
    for name in names:
        if name in known:
            return name
        ending = re.compile(rf"{before}{re.escape(name)}[-_]?\d*", re.IGNORECASE)
        equal = [each for each in known if each.lower() == name.lower()]
        if len(found := equal[:1] or [each for each in known if ending.fullmatch(each)]) == 1:
            return found[0]
    return None


def by_split(files: Iterable[Path]) -> dict[str, list[Path]]:
    """Group files by the split in their names (train-00000-of-00002), or else in those of their folders (train/part-0).

    Files of one name that is no split's are "train".
    """
    groups: dict[str, list[Path]] = {}
    for file in files:
        name = re.sub(r"[-_.]?\d+(-of-\d+.*)?$|[-_.]\d{5}[-.].*$", "", file.stem)
        first, folder = file.stem.partition("-")[0], file.parent.name.removeprefix("split=")
        if first.lower() in CALLED:
            name = first
        elif folder.lower() in CALLED and not words_of(name):
            name = folder
        groups.setdefault(name or TRAINING[0], []).append(file)
    if len(groups) == 1 and not words_of(*groups):
        return {TRAINING[0]: list(*groups.values())}
    return groups


def words_of(name: str) -> set[str]:
    """Return the words of a name that name splits, such as train of train_images."""
    return set(re.findall("[a-z]+", name.lower())) & set(CALLED)


def split_names(source: str, split: str, known: Iterable[str]) -> list[str]:
    """Return the names in a text such as "train+unlabeled", as the source writes them (train, Train, Training)."""
    known = tuple(known)
    names = []
    for name in [split] if split in known else map(str.strip, split.split("+")):
        alike = TRAINING if name == TRAINING[0] else (name,)
        found = first_split(alike, known)
        if found is None:
            raise DataError(
                f"{source} has no split {name!r}.{nearest(name, known)} It has: {', '.join(known)}. "
                "Set vision.data.train_split, test_split or pretrain_split. Join splits with a plus sign: train+test."
            )
        names.append(found)
    if len(set(names)) < len(names):
        raise DataError(f"the split {split!r} of {source} names one split twice. Name each once.")
    return names


Opener = Callable[[str, Decoding, Classes], Source]


@dataclass(frozen=True)
class Reader:
    """A registered kind of source. See `register_source`."""

    open: Opener
    reads: str
    names: tuple[str, ...]
    matches: Callable[[str, Path], bool]
    general: bool
    known: Mapping[str, Known]
    quick: bool


READERS: Entries[Reader] = Entries("a source")


def register_source(
    reads: str = "",
    *,
    names: tuple[str, ...] = (),
    matches: Callable[[str, Path], bool] | None = None,
    general: bool = False,
    known: Mapping[str, Known] | None = None,
    quick: bool = False,
) -> Callable[[Opener], Opener]:
    """Return a decorator that registers a function which opens sources for vision.data.source.

        @register_source("files of mine", matches=lambda text, path: path.suffix == ".mine")
        def open(text: str, decoding: Decoding, classes: tuple[str, ...] | None) -> Source: ...

    `classes` are the names of the classes to keep, None for all. Decode nothing before a split of the `Source` is read.

    Args:
        reads: description for messages, such as "a folder of images".
        names: well-known data sets.
        matches: (text, the text as a path) -> whether it is such a source. By default the text is one of `names`.
        general: ask it after all others, because it also matches more specific sources.
        known: sizes of data sets in `names`.
        quick: plans read it to count images. With `Decoding(memory=0)` this must take seconds.

    Raises:
        RegistryError: from the decorator, if another function of that module and name is registered already.
    """

    def decorate(open_: Opener) -> Opener:
        own = matches or (lambda text, path: text in names)
        reader = Reader(open_, reads, names, own, general, known or {}, quick)
        READERS.register(f"{open_.__module__}.{open_.__qualname__}")(reader)
        return open_

    return decorate
