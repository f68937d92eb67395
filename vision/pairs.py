"""Kinds of pairs (vision.pairs): which images are positives of each other. Pairs of a table are read here."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from dipole.core.train.class_blocks import ClassBlocks
from dipole.core.utils.errors import ConfigError, DataError
from dipole.core.utils.files import is_file
from dipole.core.utils.rows import located_rows, require_columns, texts_in
from dipole.core.utils.seeding import Seeds
from dipole.core.utils.text import counted, warn
from dipole.vision.data import Parts, check_same_shape, load
from dipole.vision.decoding import attempt, decode, describe, in_parallel
from dipole.vision.image_set import Images, ImageSet, Order, complete_labels, image_order, taken
from dipole.vision.settings import VisionSettings
from dipole.vision.sources import missing
from dipole.vision.sources.base import Decoding
from dipole.vision.sources.images import decode_all
from dipole.vision.sources.tables import READER, UTF8, content, image_in

CAPTION_NAMES = ("caption", "captions", "text", "sentence", "description")
CLASS_SETTINGS = ("classes", "pretrain_classes", "pretrain_split", "imbalance", "only_labelled")
"""Settings of [vision.data] that choose or weight images by class or split, which pairs do not have."""


class PairKind:
    """A kind of pairs: by default the views of an image are positives."""

    def problems(self, config: VisionSettings) -> list[str]:
        """Describe settings that do not fit this kind."""
        return []

    def load(self, config: VisionSettings, seed: Seeds, validation: float = 0.0) -> Parts:
        """Read the images of a [vision] table. validation: share of those for training to test on instead."""
        return load(config.data, seed, validation)

    def order(self, config: VisionSettings, images: ImageSet, batch_size: int, world_size: int, seed: Seeds) -> Order:
        """Return the order of an epoch. batch_size: of all ranks."""
        return image_order(images, seed)

    def missing(self, config: VisionSettings) -> list[str]:
        """Describe the sources of a [vision] table that are not there."""
        data = config.data
        sources = dict.fromkeys(filter(None, (data.source, data.test, data.pretrain)))
        return [problem for source in sources if (problem := missing(source))]

    def labels(self, images: ImageSet) -> Tensor | None:
        """Return the labels (n,) for training, or None if they are incomplete."""
        # Unlabelled images would look like one more class.
        return images.labels if images.all_labelled else None


class LabelPairs(PairKind):
    """Images of one class."""

    def problems(self, config: VisionSettings) -> list[str]:
        if config.negatives is not None:
            return ["negatives has no effect with pairs 'labels': all views of other classes repel"]
        return []

    def labels(self, images: ImageSet) -> Tensor | None:
        return images.labels

    def order(self, config: VisionSettings, images: ImageSet, batch_size: int, world_size: int, seed: Seeds) -> Order:
        """Return a random order, or groups of `images_per_class` images of a class."""
        labels, per_class = images.labels, config.images_per_class
        if labels is None or bool((labels < 0).all()):
            raise ConfigError(
                f"vision.pairs: 'labels' makes all of a class positives, and {images.name} has no labels. Take a "
                "labelled split, or pairs = 'augmented'."
            )
        if per_class is None:
            return super().order(config, images, batch_size, world_size, seed)
        check_any_order(images, "vision.images_per_class: groups", "leave it out")
        complete_labels(images, "vision.images_per_class:", "leave it out")
        if batch_size // world_size % per_class:
            raise ConfigError(
                f"train.batch_size: {batch_size} is no whole number of vision.images_per_class = {per_class} for each "
                f"of {world_size} processes. Give a multiple of {per_class * world_size}."
            )
        return ClassBlocks(labels.numpy(), per_class, None, seed)


def check_any_order(images: ImageSet, what: str, fix: str) -> None:
    """Raise ConfigError if images can only be read one after another."""
    if images.stream is not None and images.stream.forward:
        raise ConfigError(
            f"{what} are drawn by class from all of {images.name}, which is read one image after another. Remove "
            f"vision.data.streaming, or {fix}."
        )


@dataclass(frozen=True, eq=False)
class PairedSet(ImageSet):
    """Images in rows. `images` is the first column, `others` are the further ones. captions: of each row, or empty.

    ids (n, columns): numbers of distinct images, and in their own column of distinct captions.
    """

    others: tuple[Images, ...] = ()
    captions: tuple[str, ...] = ()
    ids: Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.long))

    @property
    def columns(self) -> tuple[Images, ...]:
        return (self.images, *self.others)

    def take(self, index: Tensor | Sequence[int]) -> Self:
        index = torch.as_tensor(index)
        captions = self.captions
        if captions:
            captions = tuple(captions[row] for row in index.tolist())
        others = tuple(taken(column, index) for column in self.others)
        return replace(super().take(index), others=others, captions=captions, ids=self.ids[index])

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of the fingerprint of every column, and of the captions."""
        digest = hashlib.sha256("".join(ImageSet(self.name, column).fingerprint for column in self.columns).encode())
        for caption in self.captions:
            digest.update(caption.encode() + b"\0")
        return digest.hexdigest()


class ColumnPairs(PairKind):
    """The images, or image and caption, in each row of a table. Some rows, without a common image, test retrieval."""

    def problems(self, config: VisionSettings) -> list[str]:
        problems = []
        names, data, views = list(config.columns or ()), config.data, config.views
        named = [name for name in names if name.lower() in CAPTION_NAMES]
        if len(names) < 2 or len(set(names)) < len(names) or not all(names):
            problems.append(f"columns must name two or more, each once, such as ['image', 'positive'], got {names}")
        elif config.caption is not None and len(names) > 2:
            problems.append(f"columns with captions are one of images and one of captions, got {names}")
        elif config.caption is None and named:
            problems.append(f"columns: {named[0]!r} reads as captions, which need vision.caption.encoder = 'hub:...'")
        if config.caption is None and names and views is not None and views < len(names):
            problems.append(f"views = {views} leaves columns unused. Give {len(names)} or more, or remove it")
        defaults = type(data).model_fields
        if data.pretrain is None and data.source == defaults["source"].default:
            problems.append("columns need a table of pairs: set vision.data.source to a file (.csv, .jsonl, .parquet)")
        unused: tuple[str, ...] = CLASS_SETTINGS
        if not data.pretrain:
            unused = (*unused, "labelled_per_class", "image_column", "label_column")
        for name in unused:
            if getattr(data, name) != defaults[name].default:
                problems.append(f"data.{name} has no effect with pairs 'columns', whose rows have no classes")
        return problems

    def missing(self, config: VisionSettings) -> list[str]:
        data = config.data
        tables: list[str | None] = [data.source, data.test]
        own: list[str] = []
        if data.pretrain is not None:
            tables = [data.pretrain]
            own = super().missing(config.model_copy(update={"data": data.model_copy(update={"pretrain": None})}))
        absent = [each for each in tables if each and not each.startswith("hub:")]
        absent = [each for each in absent if not Path(each).expanduser().exists()]
        return [*(f"no table of pairs at {each}." for each in absent), *own]

    def load(self, config: VisionSettings, seed: Seeds, validation: float = 0.0) -> Parts:
        data = config.data
        options = Decoding(data.size, data.on_corrupt, data.memory * 1e9)
        columns, captioned = config.columns or (), config.caption is not None
        read = partial(read_pairs, columns=columns, captioned=captioned, decoding=options, split=data.train_split)
        pairs = read(data.pretrain or data.source)
        if data.pretrain is not None or data.test is None:
            pairs, test = split_rows(pairs, data.train_share, seed.torch("data", "pairs"))
        elif not validation:
            test = read(data.test)
        if validation:
            pairs, test = split_rows(pairs, 1 - validation, seed.torch("data", "validation", "pairs"))
        if data.pretrain is not None:
            own = load(data.model_copy(update={"pretrain": None}), seed, validation)
            check_same_shape(("images of pairs", pairs), ("images of the probe", own.train))
            return Parts(pairs, own.train, own.test, test)
        if data.limit is not None and data.limit < len(pairs):
            pairs = pairs.take(torch.randperm(len(pairs), generator=seed.torch("data", "limit"))[: data.limit])
        check_same_shape(("images of the pairs", pairs), ("images of the test pairs", test))
        return Parts(pairs, pairs, test, test)


PAIR_KINDS: dict[str, PairKind] = {"augmented": PairKind(), "labels": LabelPairs(), "columns": ColumnPairs()}


def kind_of(config: VisionSettings) -> PairKind:
    """Return the kind of pairs of a [vision] table."""
    return PAIR_KINDS[config.pairs]


def split_rows(pairs: PairedSet, share: float, generator: torch.Generator) -> tuple[PairedSet, PairedSet]:
    """Split rows in two parts without a common image. share: of the rows in the first part, as near as possible."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    count = pairs.ids.shape[1] - bool(pairs.captions)
    ids = pairs.ids[:, :count]
    one, other = ids[:, :1].expand_as(ids).flatten().numpy(), ids.flatten().numpy()
    links = coo_array(([True] * len(one), (one, other)), shape=[int(ids.max()) + 1] * 2)
    component = torch.from_numpy(connected_components(links, directed=False)[1])  # rows that share an image are linked
    group = component[ids[:, 0]].unique(return_inverse=True)[1]
    first = torch.zeros(len(pairs), dtype=torch.bool)
    _, sizes = group.unique(return_counts=True)
    wanted, total = round(share * len(pairs)), 0
    for number in torch.randperm(len(sizes), generator=generator).tolist():
        if total + int(sizes[number]) / 2 <= wanted:
            first[group == number] = True
            total += int(sizes[number])
    if not 0 < total < len(pairs):
        raise DataError(
            f"{pairs.name} has {counted(len(pairs), 'row')} in {counted(len(sizes), 'group')} without an image in "
            "common, too few to hold some back. Give pairs for testing as a separate table, vision.data.test."
        )
    return pairs.take(first.nonzero().flatten()), pairs.take((~first).nonzero().flatten())


def read_pairs(
    source: str, columns: Sequence[str], captioned: bool, decoding: Decoding, split: str = "train"
) -> PairedSet:
    """Read a table of pairs and its images.

    A cell of an image is a path, relative to the table, or the image itself (parquet). With captions the last column
    has them. A list of captions makes a row of each. Incomplete rows are left out, with a warning.
    """
    names = list(columns)
    path = Path(source).expanduser()
    folder = path if path.is_dir() else path.parent
    located = source if source.startswith("hub:") else str(path)
    places: dict[Path | bytes, str] = {}  # of each distinct image, the first that names it
    rows: list[list[Path | bytes]] = []
    captions: list[str] = []
    incomplete = total = 0
    for where, row in located_rows(located, split, UTF8, READER):
        total += 1
        require_columns(row, names, where, " Set vision.columns.")
        texts, cells = [""], names
        if captioned:
            texts, cells = texts_in(row[names[-1]], names[-1], where), names[:-1]
        images = [image_in(row[name], name, where, folder) for name in cells]
        found = [image for image in images if image is not None]
        if not texts or len(found) < len(images):
            incomplete += 1
            continue
        for image in found:
            places.setdefault(image, f"{where}: {image if isinstance(image, Path) else 'an image'}")
        rows += [found] * len(texts)
        captions += texts
    if not rows:
        raise DataError(f"{source}: none of its {counted(total, 'row')} has all of {', '.join(names)}.")
    if incomplete:
        warn(f"{source}: {incomplete} of {counted(total, 'row')} lack one of {', '.join(names)}, left out")
    number_of = {image: number for number, image in enumerate(places)}
    numbers = torch.tensor([[number_of[image] for image in row] for row in rows])
    return _decoded(path.name, list(places.items()), numbers, captions if captioned else [], decoding)


def _decoded(
    name: str, files: Sequence[tuple[Path | bytes, str]], rows: Tensor, captions: Sequence[str], decoding: Decoding
) -> PairedSet:
    """Decode the images of rows (n, C) of numbers of files. Leave out rows with a broken image, if that is allowed."""
    absent = [where for file, where in files if isinstance(file, Path) and not is_file(file)]
    if absent and decoding.on_corrupt == "refuse":
        more = f" (and {len(absent) - 1} more)" if len(absent) > 1 else ""
        raise DataError(
            f"{absent[0]}: no such image file{more}. Paths are relative to the table. Or set "
            "vision.data.on_corrupt = 'skip'. If the column holds captions, set vision.caption.encoder."
        )

    def problem(file: Path | bytes) -> str:
        return attempt(partial(content, file), lambda data: "" if decode(data, decoding.size).size else "empty")

    problems = [""] * len(files)
    if decoding.on_corrupt == "skip":
        # Try all: an image that replaces a broken one later does not belong to the row.
        problems = list(in_parallel(problem, (file for file, _ in files)))
    broken = [f"{where} ({found})" for (_, where), found in zip(files, problems, strict=True) if found]
    if broken:
        warn(f"skipped {describe(broken, len(files))}")
    is_readable = torch.tensor([not found for found in problems])
    complete = is_readable[rows].all(1).nonzero().flatten()
    if not len(complete):
        raise DataError(f"{name}: {describe(broken, len(files))}, and no row is left.")
    rows = ids = rows[complete]
    used, place = rows.unique(return_inverse=True)
    numbers = used.tolist()
    # An image may be in many rows, and the memory limit is for all rows.
    options = replace(decoding, memory=decoding.memory * len(used) / rows.numel())
    places = [files[n][1] for n in numbers]
    store = decode_all(name, places, lambda i: content(files[numbers[i]][0]), None, (), options)
    texts: tuple[str, ...] = ()
    if captions:
        texts = tuple(captions[row] for row in complete.tolist())
        number_of = {text: n for n, text in enumerate(dict.fromkeys(texts))}
        ids = torch.cat([rows, torch.tensor([[number_of[text]] for text in texts])], 1)
    first, *others = (taken(store.images, column) for column in place.unbind(1))
    return PairedSet(name, first, skipped=tuple(broken), others=tuple(others), captions=texts, ids=ids)
