"""Pairs of one's own: rows of a table that name images which belong together, or an image and its caption."""

import hashlib
import io
import os
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dipole.core.utils.errors import DataError, nearest
from dipole.core.utils.rows import Asker, located_rows
from dipole.core.utils.seeding import Seeds
from dipole.core.utils.text import counted
from dipole.vision.data import DataConfig, Parts, load
from dipole.vision.decoding import Encoded, attempt, decode, describe, file_bytes
from dipole.vision.image_set import ImageSet
from dipole.vision.sources import Decoding
from dipole.vision.sources.images import decode_all

if TYPE_CHECKING:
    from dipole.vision.config import VisionSettings

UTF8 = "utf-8"
READER = Asker("vision", "vision.data.train_split")
CAPTION_NAMES = ("caption", "captions", "text", "sentence", "description")
OF_ONE_SET = ("classes", "pretrain_classes", "pretrain_split", "imbalance", "only_labelled")
"""Settings of [vision.data] that choose or weigh images by class or split, which pairs have none of."""


@dataclass(frozen=True, eq=False)
class PairedSet(ImageSet):
    """Images that come in rows: `images` is the first column.

    others: the further columns of images, row by row. captions: of each row, where there are some. ids (n, columns):
    numbers of distinct images, and of distinct captions in their own column.
    """

    others: tuple[Tensor | Encoded, ...] = ()
    captions: tuple[str, ...] = ()
    ids: Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.long))

    @property
    def columns(self) -> tuple[Tensor | Encoded, ...]:
        """The columns of images."""
        return (self.images, *self.others)

    def take(self, index: Tensor | Sequence[int]) -> "PairedSet":
        index = torch.as_tensor(index)
        found = super().take(index)
        assert isinstance(found, PairedSet)
        return replace(
            found,
            others=tuple(_taken(column, index) for column in self.others),
            captions=tuple(self.captions[row] for row in index.tolist()) if self.captions else (),
            ids=self.ids[index],
        )

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of every column as of any set, row by row, and of the captions."""
        digest = hashlib.sha256("".join(ImageSet(self.name, column).fingerprint for column in self.columns).encode())
        for caption in self.captions:
            digest.update(caption.encode() + b"\0")
        return digest.hexdigest()


@dataclass(frozen=True)
class _File:
    """An image of a table: where it is named first, and its path or bytes."""

    where: str
    data: Path | bytes

    def read(self) -> bytes:
        return self.data if isinstance(self.data, bytes) else file_bytes(self.data)


def column_problems(columns: Sequence[str] | None, captioned: bool, views: int | None, data: DataConfig) -> list[str]:
    """What does not fit pairs of columns among the settings."""
    problems = []
    names = list(columns or ())
    if len(names) < 2 or len(set(names)) < len(names) or not all(names):
        problems.append(f"columns must name two or more columns, each once, got {names}; such as ['image', 'positive']")
    elif captioned and len(names) > 2:
        problems.append(f"columns with captions are one of images and one of captions, got {names}")
    elif not captioned and (named := [name for name in names if name.lower() in CAPTION_NAMES]):
        problems.append(f"columns: {named[0]!r} reads as captions, which need vision.caption.encoder = 'hub:...'")
    if not captioned and names and views is not None and views < len(names):
        problems.append(f"views = {views} leaves columns unused; give {len(names)} or more, or leave it out")
    if data.pretrain is None and data.source == type(data).model_fields["source"].default:
        problems.append("columns need a table of pairs: set vision.data.source to a file (.csv, .jsonl, .parquet)")
    for name in (*OF_ONE_SET, *(() if data.pretrain else ("labelled_per_class",))):
        if getattr(data, name) != type(data).model_fields[name].default:
            problems.append(f"data.{name} has no effect with pairs 'columns', whose rows have no classes")
    return problems


def load_parts(config: "VisionSettings", seed: Seeds, validation: float = 0.0) -> Parts:
    """Read what a [vision] table describes, columns included; DataError says what is wrong.

    A table of pairs is cut so that no image stands on both sides: a share is held out for retrieval, which
    `data.test` may give as a table of its own. With `data.pretrain` the table is that, and probes see `data.source`.
    """
    if config.pairs != "columns":
        return load(config.data, seed, validation)
    data = config.data
    read = partial(
        read_pairs,
        columns=config.columns or (),
        captioned=config.caption is not None,
        decoding=Decoding(data.size, data.on_corrupt, data.memory * 1e9),
        split=data.train_split,
    )
    pairs = read(data.pretrain or data.source)
    if data.pretrain is None and data.test is not None:
        held_out = pairs if validation else read(data.test)
    else:
        pairs, held_out = apart(pairs, data.train_share, seed.torch("data", "pairs"))
    if validation:
        pairs, held_out = apart(pairs, 1 - validation, seed.torch("data", "validation", "pairs"))
    if data.pretrain is not None:
        own = load(data.model_copy(update={"pretrain": None}), seed, validation)
        if own.train.images.shape[1:] != pairs.images.shape[1:]:
            raise DataError(
                f"the images of pairs have shape {tuple(pairs.images.shape[1:])}, those of the probe "
                f"{tuple(own.train.images.shape[1:])}; set vision.data.size to bring both to one."
            )
        return Parts(pairs, own.train, own.test, held_out)
    if data.limit is not None and data.limit < len(pairs):
        pairs = pairs.take(torch.randperm(len(pairs), generator=seed.torch("data", "limit"))[: data.limit])
    if held_out.images.shape[1:] != pairs.images.shape[1:]:
        raise DataError(
            f"the pairs have images of shape {tuple(pairs.images.shape[1:])}, those held out "
            f"{tuple(held_out.images.shape[1:])}; set vision.data.size to bring both to one."
        )
    return Parts(pairs, pairs, held_out, held_out)


def apart(pairs: PairedSet, share: float, generator: torch.Generator) -> tuple[PairedSet, PairedSet]:
    """Cut rows in two so that no image stands in both: rows that share one go together.

    share: of the rows in the first part, as near as such groups allow.
    """
    count = pairs.ids.shape[1] - bool(pairs.captions)
    group = _groups(pairs.ids[:, :count])
    first = torch.zeros(len(pairs), dtype=torch.bool)
    _, sizes = group.unique(return_counts=True)
    wanted, taken = round(share * len(pairs)), 0
    for number in torch.randperm(len(sizes), generator=generator).tolist():
        if taken + int(sizes[number]) / 2 <= wanted:
            first[group == number] = True
            taken += int(sizes[number])
    if not 0 < taken < len(pairs):
        raise DataError(
            f"{pairs.name} has {counted(len(pairs), 'row')} in {counted(len(sizes), 'group')} without an image in "
            "common, too few to hold some back; give pairs for testing as a table of their own, vision.data.test."
        )
    return pairs.take(first.nonzero().flatten()), pairs.take((~first).nonzero().flatten())


def _groups(ids: Tensor) -> Tensor:
    """(n,) numbers of groups, 0 to the last, of rows (n, C) that are linked by a number in common."""
    parent = list(range(int(ids.max()) + 1))

    def root(number: int) -> int:
        while parent[number] != number:
            parent[number] = parent[parent[number]]
            number = parent[number]
        return number

    for row in ids.tolist():
        for other in row[1:]:
            parent[root(other)] = root(row[0])
    return torch.tensor([root(row[0]) for row in ids.tolist()]).unique(return_inverse=True)[1]


def read_pairs(
    source: str, columns: Sequence[str], captioned: bool, decoding: Decoding, split: str = "train"
) -> PairedSet:
    """Read a table of pairs and its images.

    A cell of an image is a path, relative to the table, or the image itself (parquet). A caption may be a list of
    captions, each of which makes a row. Where a cell is missing or blank, its row is left out, with a warning.

    Args:
        source: a file of `core.utils.rows`.
        columns: of images; with captions the last one is theirs.
        split: of a data set.

    Raises:
        DataError: the table cannot be read, a column or an image is not there, or one cannot be decoded; the message
            names file and line.
    """
    names = list(columns)
    pictures = names[:-1] if captioned else names
    folder = Path(source).expanduser()
    folder = folder if folder.is_dir() else folder.parent
    place: dict[Any, int] = {}
    files: list[_File] = []
    rows: list[list[int]] = []
    captions: list[str] = []
    incomplete = total = 0
    place_of = source if source.startswith("hub:") else str(Path(source).expanduser())
    for where, row in located_rows(place_of, split, UTF8, READER):
        total += 1
        if not isinstance(row, dict):
            raise DataError(f"{where}: expected named columns, got {type(row).__name__}: {str(row)[:60]!r}")
        for name in names:
            if name not in row:
                raise DataError(
                    f"{where}: no column {name!r}; it has {', '.join(map(str, row))}."
                    f"{nearest(name, list(map(str, row)))} Set vision.columns."
                )
        texts = _captions(row[names[-1]], names[-1], where) if captioned else [""]
        cells = [_image(row[name], name, where, folder) for name in pictures]
        if not texts or any(cell is None for cell in cells):
            incomplete += 1
            continue
        numbers = []
        for cell in cells:
            assert cell is not None
            if cell not in place:
                place[cell] = len(files)
                shown = cell if isinstance(cell, Path) else "an image"
                files.append(_File(f"{where}: {shown}", cell))
            numbers.append(place[cell])
        rows += [numbers] * len(texts)
        captions += texts
    if not rows:
        raise DataError(f"{source}: none of its {counted(total, 'row')} has all of {', '.join(names)}.")
    if incomplete:
        warnings.warn(
            f"{source}: {incomplete} of {counted(total, 'row')} lack one of {', '.join(names)}, left out", stacklevel=2
        )
    return _decoded(Path(source).name, files, torch.tensor(rows), captions if captioned else [], decoding)


def _decoded(name: str, files: Sequence[_File], rows: Tensor, captions: Sequence[str], decoding: Decoding) -> PairedSet:
    """The images of rows (n, C) of numbers of files; rows with one that cannot be decoded are left out, if they may."""
    shown = [file.where for file in files]
    absent = [file.where for file in files if isinstance(file.data, Path) and not file.data.is_file()]
    if absent and decoding.on_corrupt == "refuse":
        more = f" (and {len(absent) - 1} more)" if len(absent) > 1 else ""
        raise DataError(
            f"{absent[0]}: no such image file{more}. Paths are relative to the table; or set "
            "vision.data.on_corrupt = 'skip'. If the column holds captions, set vision.caption.encoder."
        )
    # An image may stand in many rows: those decide whether the set fits.
    options = replace(decoding, memory=decoding.memory * len(files) / rows.numel())
    store = decode_all(name, shown, lambda i: files[i].read(), torch.arange(len(files)), (), options)
    assert store.labels is not None
    broken = list(store.skipped)
    kept = torch.full((len(files),), -1)
    kept[store.labels] = torch.arange(len(store))
    if isinstance(store.images, Encoded) and decoding.on_corrupt == "skip":
        # Another image in its place would stand beside the wrong one: each is tried now.
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            tried = list(pool.map(lambda file: attempt(file.read, lambda data: decode(data, decoding.size)), files))
        for number, found in enumerate(tried):
            if isinstance(found, str):
                kept[number] = -1
                broken.append(f"{shown[number]} ({found})")
        if broken:
            warnings.warn(f"skipped {describe(broken, len(files))}", stacklevel=2)
    whole = (kept[rows] >= 0).all(1).nonzero().flatten()
    if not len(whole):
        raise DataError(f"{name}: {describe(broken, len(files))}, and no row is left.")
    rows, places = rows[whole], kept[rows[whole]]
    texts = [captions[row] for row in whole.tolist()] if captions else []
    ids = rows
    if texts:
        number_of = {text: n for n, text in enumerate(dict.fromkeys(texts))}
        ids = torch.cat([rows, torch.tensor([[number_of[text]] for text in texts])], 1)
    first, *others = (_taken(store.images, column) for column in places.unbind(1))
    return PairedSet(name, first, skipped=tuple(broken), others=tuple(others), captions=tuple(texts), ids=ids)


def _taken(column: Tensor | Encoded, index: Tensor) -> Tensor | Encoded:
    return column.take(index) if isinstance(column, Encoded) else column[index]


def _captions(cell: Any, name: str, where: str) -> list[str]:
    """The captions of a cell, blanks made single; what is missing is none."""
    listed = cell if isinstance(cell, list | tuple) else [cell]
    for each in listed:
        if each is not None and not isinstance(each, str):
            raise DataError(
                f"{where}: column {name!r} holds {type(each).__name__}, expected a caption or a list of them"
            )
    return [text for each in listed if each is not None and (text := " ".join(each.split()))]


def _image(cell: Any, name: str, where: str, folder: Path) -> Path | bytes | None:
    """Where the image of a cell lies, or the image itself, encoded; None where it is missing."""
    if isinstance(cell, dict):
        cell = cell.get("bytes") or cell.get("path")
    if cell is None or isinstance(cell, bytes):
        return cell or None
    if isinstance(cell, str):
        return folder / Path(cell.strip()).expanduser() if cell.strip() else None
    if hasattr(cell, "save"):  # datasets decodes what it knows to be an image
        written = io.BytesIO()
        cell.save(written, format="PNG")
        return written.getvalue()
    raise DataError(f"{where}: column {name!r} holds {type(cell).__name__}, expected the path of an image")
