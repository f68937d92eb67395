"""Folders of image files."""

import mimetypes
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unicodedata import normalize

import torch
from PIL import Image

from dipole.core.utils.errors import DataError
from dipole.core.utils.rows import CSV, ends_with
from dipole.core.utils.text import warn
from dipole.vision.decoding import file_bytes, first_names
from dipole.vision.image_set import ImageSet
from dipole.vision.sources.base import CALLED, HELD_OUT, TRAINING, Classes, Decoding, Source, register_source, words_of
from dipole.vision.sources.huggingface import METADATA
from dipole.vision.sources.images import CONVERT, check_wanted, decode_all, select, warn_of_left_out
from dipole.vision.sources.tables import read_metadata

# Those that Pillow reads here: it can be built without AVIF.
SUFFIXES = Image.registered_extensions().keys() & {
    ".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".gif", ".webp", ".avif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm",
    ".pnm", ".jp2", ".j2k", ".jpx",
}  # fmt: skip
# Further image files that the system's list of types may not know, and shortcuts of Windows.
PICTURES = {".avif", ".heic", ".heif", ".jxl", ".dng", ".cr2", ".nef", ".arw", ".exr", ".psd", ".pfm", ".tga", ".lnk"}
JUNK = {"__MACOSX", "__pycache__", "@eaDir", "#recycle", "$RECYCLE.BIN", "System Volume Information", "lost+found"}
"""Folders that archives and file systems add."""

MASKS = re.compile(r"mask|segment|annotation|trimap|ground.?truth", re.IGNORECASE)
"""Names of folders of masks."""


@dataclass
class Tree:
    """A folder that was searched for images. Hidden files and folders are no part of it."""

    path: Path
    files: list[Path] = field(default_factory=list)  # images directly in it
    folders: dict[str, "Tree"] = field(default_factory=dict)  # by name, those with images somewhere in them
    empty: list[str] = field(default_factory=list)  # names of folders without images
    unread: list[str] = field(default_factory=list)  # images of an unread kind and links to nothing, with the reason
    metadata: list[Path] = field(default_factory=list)  # tables of its images
    tables: list[Path] = field(default_factory=list)  # other tables

    def walk(self) -> Iterator["Tree"]:
        """Iterate over the folder and those in it."""
        yield self
        for inner in self.folders.values():
            yield from inner.walk()

    def images(self) -> list[Path]:
        """Return the images of the folder and of those in it, sorted."""
        return sorted(file for each in self.walk() for file in each.files)


def scan(path: Path, parents: tuple[Path, ...] = ()) -> Tree:
    """Search a folder for images. Links to folders are followed, except to a parent."""
    tree, parents = Tree(path), (*parents, path.resolve())
    try:
        with os.scandir(path) as entries:
            found = sorted((entry.name, entry.is_symlink(), entry.is_dir(follow_symlinks=False)) for entry in entries)
    except OSError as error:
        raise DataError(f"the folder {path} cannot be read: {error.strerror or error}.") from error
    for name, is_link, is_folder in found:
        file = path / name
        if name.startswith(".") or name in JUNK:
            continue
        if is_folder or (is_link and file.is_dir()):
            if file.resolve() not in parents:
                _add_folder(tree, scan(file, parents))
        elif file.suffix.lower() in SUFFIXES:
            tree.files.append(file)
        elif name in METADATA:
            tree.metadata.append(file)
        elif ends_with(file, CSV):
            tree.tables.append(file)
        elif file.suffix.lower() in PICTURES or (mimetypes.guess_type(name)[0] or "").startswith("image/"):
            tree.unread.append(f"{file} (files {file.suffix} are not read)")
        elif is_link and not file.suffix and not file.exists():
            tree.unread.append(f"{file} (a link to {os.readlink(file)}, which is not there)")
    return tree


def _add_folder(tree: Tree, inner: Tree) -> None:
    # An archive that was unpacked into a folder of its name: training_set/training_set.
    while list(inner.folders) == [inner.path.name] and not (inner.files or inner.metadata or inner.unread):
        (inner,) = inner.folders.values()
    if inner.files or inner.folders:
        first = tree.folders.setdefault(normalize("NFC", _in_utf8(inner.path.name)), inner)
        if first is not inner:  # the same name in another form of Unicode
            first.folders[str(inner.path)] = inner
    elif inner.path.suffix.lower() in SUFFIXES:
        tree.files.append(inner.path)  # reported as an image that cannot be read
    else:
        tree.empty.append(inner.path.name)
        tree.unread += inner.unread


def _in_utf8(path: str | Path) -> str:
    """Return a path as records can hold it: bytes that are no UTF-8 become escapes, such as \\xe9."""
    return os.fsencode(path).decode(errors="backslashreplace")


FOLDER = "a folder of images (a folder for each class, or labels in metadata.csv)"


@register_source(FOLDER, matches=lambda text, path: path.is_dir(), general=True, quick=True)
def image_folder(source: str, options: Decoding, wanted: Classes) -> Source:
    """Open a folder of images per class, or such folders per split (train/CLASS/x.jpg). Loose images are unlabelled.

    The class is the first folder, as in torchvision: CLASS/more/x.jpg. `split_folders` says which folders are splits.
    Labels in a metadata file replace those of the folders.
    """
    path = Path(source).expanduser()
    outer = tree = scan(path)
    inner = tree
    while not split_folders(inner) and not inner.files and len(inner.folders) == 1:
        (inner,) = inner.folders.values()
    if len(inner.folders) > 1 or split_folders(inner):  # the folder that an archive was unpacked to
        tree = inner
    names = split_folders(tree)
    parts = {name: tree.folders[name] for name in names} or {"train": tree}
    beside = []
    if names:
        others = [each for name, each in tree.folders.items() if name not in names]
        files = [*tree.files, *(file for each in others for file in each.images())]
        beside = [*(f"{file} (next to the folders of the splits)" for file in files), *tree.unread]
    else:
        for each in (tree, outer):
            if all(inner.folders for inner in each.folders.values()) or _may_be_splits(each):
                parts = {key: part for key, part in each.folders.items() if _without_number(key) not in CALLED} | parts
    every = {name for part in parts.values() for name in part.folders}

    def read(split: str) -> ImageSet:
        part = parts[split]
        if part is tree and len(parts) > 1 and _may_be_splits(tree):
            warn(
                f"the folders of {path} are read as classes: {first_names(tree.folders)}. To read one as a split, name "
                "it as vision.data.train_split, and another as test_split"
            )
        called = [name for name in names if _without_number(name) in CALLED]
        if len(called) == 1 < len(names):
            warn(f"{path}: folders are read as splits: {first_names(names)}. If they are classes, rename {called[0]!r}")
        empty = [name for name in part.empty if names and name in every]
        tables = [file for each in part.walk() for file in each.metadata] or tree.metadata
        if not part.files and list(part.folders) == ["images"]:  # as in Tiny-ImageNet: no class
            (part,) = part.folders.values()
        images = _read_folder(part, empty, options, wanted, beside, tables)
        unread = [str(file) for each in outer.walk() for file in each.tables]
        if images.labels is None and unread:
            warn(
                f"no labels are read from {first_names(unread)}. If a column names the images, give the table as "
                f"vision.data.source, or call it {METADATA[0]} and the column file_name"
            )
        return images

    return Source(str(path), tuple(parts), read, any(each.metadata for each in outer.walk()))


def _may_be_splits(tree: Tree) -> bool:
    """Return whether folders look like splits: they hold folders, or are called cars_train and cars_test, or alike."""
    named = set().union(*map(words_of, tree.folders))
    inside = any(len(inner.folders) > 1 for inner in tree.folders.values())
    return inside or all(named & set(each) for each in (TRAINING, HELD_OUT))


def _without_number(name: str) -> str:
    """Return the split that a name such as train2017 or Test_1 tells."""
    return re.sub(r"[-_]?\d+$", "", name.lower())


def split_folders(tree: Tree) -> tuple[str, ...]:
    """Return the names of the folders that are splits, or () if the folders are classes.

    Folders are splits if all are called so, or one is a training and one a test split. A single such folder is a class
    (train, bus, car), unless it holds classes and the others do not look the same.
    """
    names = tuple(tree.folders)
    plain = {name: _without_number(name) for name in names}
    if not all(set(plain.values()) & set(each) for each in (TRAINING, HELD_OUT)):
        plain = {name: name.lower() for name in names}
    training = [name for name in names if plain[name] in TRAINING]
    called = [name for name in names if plain[name] in CALLED]
    if not called or len(called) == len(names):
        return tuple(called)
    # Most of the images are in its folders.
    holding = [name for name, inner in tree.folders.items() if len(inner.images()) > 2 * len(inner.files)]
    if not training or len(training) == len(called):
        inside = {tuple(tree.folders[name].folders) for name in names}
        are_alike = len(inside) == 1 and len(inside.pop()) == 1  # CLASS/images/x.jpg
        if are_alike or not set(called) & set(holding):
            return ()
    return tuple(name for name in names if name in called or name in holding)


def _read_folder(
    tree: Tree, empty: Iterable[str], options: Decoding, wanted: Classes, beside: list[str], tables: list[Path]
) -> ImageSet:
    """Read the images of a split. empty: classes with images in another split. beside: what the splits leave out."""
    path = tree.path
    left_out = list(beside)
    told = read_metadata(tables, tree.images(), options)
    if told is not None:
        files, labels, names, unlisted = told
        left_out += unlisted
    else:
        names = _classes(tree, empty, wanted)
        files, labels = tree.files, None
        if names:
            left_out += [f"{file} (next to the folders of the classes)" for file in tree.files]
            groups = [tree.folders[name].images() if name in tree.folders else [] for name in names]
            files = [file for group in groups for file in group]
            labels = torch.tensor([label for label, group in enumerate(groups) for _ in group])
    left_out += [each for inner in tree.walk() for each in inner.unread]
    if not files:
        others = f" It holds others: {left_out[0]}." if left_out else ""
        raise DataError(
            f"the folder {path} holds no images ({', '.join(sorted(SUFFIXES))}).{others} "
            "Expected one folder per class (CLASS/file.jpg), split folders (train/CLASS/file.jpg), or loose images. "
            f"{CONVERT}."
        )
    warn_of_left_out(path.name, left_out)
    items, left_out = ([_in_utf8(at) for at in part] for part in (files, left_out))
    images = decode_all(path.name, items, lambda i: file_bytes(files[i]), labels, names, options, left_out)
    if told is not None:
        images = select(images, wanted)
    return images


def _classes(tree: Tree, empty: Iterable[str], wanted: Classes) -> tuple[str, ...]:
    """Return the names of the classes, in the order of their labels."""
    if not tree.folders:
        return ()
    # As in VOC and Pets: masks of the others' images have such names, and the same files.
    masks = {name for name, inner in tree.folders.items() if any(MASKS.search(each.path.name) for each in inner.walk())}
    stems = {name: {file.stem for file in inner.images()} for name, inner in tree.folders.items() if masks}
    images = set().union(*(stems[name] for name in stems.keys() - masks))
    if found := [name for name in sorted(masks) if stems[name] <= images]:
        warn(
            f"folders of {tree.path} are read as classes, and look like masks of the other images: "
            f"{first_names(found)}. If they are, give the folder of the images alone as vision.data.source"
        )
    classes = tuple(sorted({*tree.folders, *empty}))
    if wanted is not None:
        check_wanted(str(tree.path), (*classes, *tree.empty), wanted)
        classes = wanted
    if without := [name for name in tree.empty if name not in classes]:
        warn(f"folders of {tree.path} without images are no classes: {first_names(without)}")
    return classes
