"""Tables and folders of images as people have them: columns, classes and splits, links, litter, metadata.csv."""

import base64
import datetime
import os
import warnings
from contextlib import nullcontext
from decimal import Decimal
from functools import partial
from pathlib import Path

import datasets
import numpy as np
import pandas
import pyarrow.parquet
import pytest
import torch

from dipole.core.utils.errors import DataError
from dipole.core.utils.seeding import Seeds
from dipole.vision.data import DataConfig, load
from dipole.vision.image_set import ImageSet, joined
from dipole.vision.sources import Decoding, open_source
from dipole.vision.sources.labels import class_labels
from tests.ranks import run_python
from tests.runs import refused
from tests.systems import posix
from tests.vision.made import image_folder, opened, png, read_images

ROWS = 6
IMAGE = datasets.Image()


@pytest.fixture(autouse=True)
def no_warnings(tmp_path, monkeypatch):
    monkeypatch.setenv("DIPOLE_CACHE", str(tmp_path / "cache"))
    with warnings.catch_warnings(action="error", category=UserWarning):
        yield


def picture(value):
    return {"bytes": png(np.full((8, 8, 3), value, np.uint8)), "path": None}


def table(path, columns, features=None, split="train"):
    """A parquet file of columns of cells. Columns of images are filled: image i has the value `start` + i."""
    columns = {name: [picture(cells + i) for i in range(ROWS)] if isinstance(cells, int) else cells
               for name, cells in columns.items()}  # fmt: skip
    made = datasets.Dataset.from_dict(columns)
    for name, feature in (features or {}).items():
        made = made.cast_column(name, feature)
    path.mkdir(exist_ok=True)
    made.to_parquet(path / f"{split}-00000-of-00001.parquet")
    return path


ENTRANCES = ("parquet", "saved", "stream", "hub")


def in_turn(*cases):
    """Give every case as parquet files and at another entrance in turn. The others are slow."""
    return [pytest.param(entrance, *case, marks=[pytest.mark.slow] * (place not in (0, 1 + number % 3)))
            for number, case in enumerate(cases) for place, entrance in enumerate(ENTRANCES)]  # fmt: skip


def read(path, entrance="parquet", **options):
    """Read a folder of parquet files, or what `datasets` makes of it."""
    source, streaming = str(path), entrance in ("stream", "saved")  # saved sets are read in place
    if entrance == "saved":
        saved = path.with_name(f"{path.name}-saved")
        datasets.load_dataset(str(path)).with_format("torch").save_to_disk(saved)
        source = str(saved)
    if entrance in ("stream", "hub"):
        source = f"hub:{path}"
    return opened(source, size=8, streaming=streaming, **options)


def first_pixels(images):
    return images.images[torch.arange(len(images))][:, 0, 0, 0].tolist()


@pytest.mark.parametrize("entrance", ENTRANCES)
@pytest.mark.parametrize("name", ["image", "img", "Image", "jpg"])
def test_a_column_called_image_wins_over_the_first(tmp_path, entrance, name):
    path = table(tmp_path / "t", {"mask": 0, name: 100}, {"mask": IMAGE, name: IMAGE})
    assert first_pixels(read(path, entrance)) == [100 + i for i in range(ROWS)]
    assert first_pixels(read(path, entrance, image_column="mask")) == list(range(ROWS))
    if entrance == "parquet":
        rows = read_images(path, "mask", 8).rows
        assert [int(image[0, 0, 0]) for _, image in rows] == list(range(ROWS))
        path = table(tmp_path / "u", {"left": 0, "right": 100}, {"left": IMAGE, "right": IMAGE})
        with pytest.warns(UserWarning, match=r"left, right. It reads 'left'.*image_column"):
            assert first_pixels(read(path)) == list(range(ROWS))


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_the_columns_of_the_recipe(tmp_path, entrance):
    kind = datasets.ClassLabel(names=["x", "y"])
    path = table(tmp_path / "t", {"image": 0, "photo": 50, "label": [0] * ROWS, "kind": [i % 2 for i in range(ROWS)]},
                 {"image": IMAGE, "photo": IMAGE, "kind": kind})  # fmt: skip
    found = read(path, entrance, image_column="photo", label_column="kind")
    assert (first_pixels(found)[0], found.labels.tolist(), found.class_names) == (50, [0, 1] * 3, ("x", "y"))
    for wrong in ({"image_column": "phto"}, {"label_column": "knd"}):
        refused(DataError, r"no column '(phto|knd)'.*Did you mean '(photo|kind)'", read, path, entrance, **wrong)
    refused(DataError, r"'kind' holds int64, not images", read, path, entrance, image_column="kind")


NUMBERS = [0.2, 0.9, 0.2, 1.5, 3.0, 0.1]
MANY = [[0, 1], [1], [], [0], [2], [1]]


@pytest.mark.parametrize(("entrance", "cells", "labels", "names"), in_turn(
    (["b", "a", "b", None, " ", "c"], [1, 0, 1, -1, -1, 2], ("a", "b", "c")),
    ([1.0, 0.0, None, float("nan"), 2.0, 1.0], [1, 0, -1, -1, 2, 1], ()),
    ([True, False, None, True, True, False], [1, 0, -1, 1, 1, 0], ()),
    (["3", "10", "3", "2", None, "3"], [3, 10, 3, 2, -1, 3], ()),
    ([3, 10, 3, 2, None, 3], [3, 10, 3, 2, -1, 3], ()), ([None] * ROWS, None, ()),
    (["nan", "caf\u00e9", "cafe\u0301", "NaN", "<NA>", "a"], [-1, 1, 1, -1, -1, 0], ("a", "caf\u00e9")),
    ([b"b", b"a"] * 3, [1, 0] * 3, ("a", "b")),
    ([Decimal(1), Decimal(0), None, Decimal(1), Decimal(2), Decimal(1)], [1, 0, -1, 1, 2, 1], ()),
    ([[0], [1], [0], None, [2], [1]], [0, 1, 0, -1, 2, 1], ()),
    ([10**12, 5, None, 2**62, 5, -1], [1, 0, -1, 2, 0, -1], ("5", str(10**12), str(2**62))),
))  # fmt: skip
def test_values_that_are_classes(tmp_path, entrance, cells, labels, names):
    found = read(table(tmp_path / "t", {"image": 0, "label": cells}, {"image": IMAGE}), entrance)
    assert (None if found.labels is None else found.labels.tolist(), found.class_names) == (labels, names)


@pytest.mark.parametrize(("entrance", "cells", "why"), in_turn(
    (NUMBERS, r"not whole, such as"), ([f"{x}" for x in NUMBERS], r"not whole, such as"),
    ([f"{x}".replace(".", ",") for x in NUMBERS], r"not whole, such as"),
    (MANY, "holds list values such as"), ([{"x": 1}] * ROWS, "holds dict values such as"),
    ([datetime.date(2020, 1, 1)] * ROWS, "holds date values such as 2020-01-01"),
    ([Decimal("1.5")] * ROWS, "not whole, such as 1.5"),
    ([-5, -4, 0, 1, 2, 3], "holds negative numbers such as -[54], and only -1, no label, is allowed"),
))  # fmt: skip
def test_values_that_are_no_classes_are_said_and_the_images_read(tmp_path, entrance, cells, why):
    path = table(tmp_path / "t", {"image": 0, "label": cells}, {"image": IMAGE})
    with pytest.warns(UserWarning, match=rf"'label' .*{why}.*label_column"):
        found = read(path, entrance)
    assert (len(found), found.labels) == (ROWS, None)
    refused(DataError, rf"'label' .*{why}.*label_column", read, path, entrance, label_column="label")


@pytest.mark.parametrize("column", ["Label", "CLASS", "cls", " label "])
def test_names_of_columns_of_labels(tmp_path, column):
    path = table(tmp_path / "t", {"image": 0, "n": list(range(ROWS)), column: ["b", "a"] * 3}, {"image": IMAGE})
    assert read(path).labels.tolist() == [1, 0] * 3
    kind = datasets.ClassLabel(names=["x", "y"])
    path = table(tmp_path / "u", {"image": 0, column: NUMBERS, "kind": [0, 1] * 3}, {"image": IMAGE, "kind": kind})
    with pytest.warns(UserWarning, match="not whole"):  # the next column of classes is taken
        assert read(path).class_names == ("x", "y")


def test_classes_of_text_have_one_number_in_all_parts_and_missing_labels_stay_missing(tmp_path):
    path = table(tmp_path / "t", {"image": 0, "label": list("abcabc")}, {"image": IMAGE})
    table(path, {"image": 0, "label": list("ccaaca")}, {"image": IMAGE}, "test")
    parts = load(DataConfig(source=str(path), size=8, train_split="train", pretrain_split="test+train"), Seeds(0))
    assert (parts.train.labels.tolist(), parts.test.labels.tolist()) == ([0, 1, 2] * 2, [2, 2, 0, 0, 2, 0])
    assert parts.pretrain.labels.tolist() == [2, 2, 0, 0, 2, 0, 0, 1, 2, 0, 1, 2]
    table(path, {"image": 0, "label": list("ccaadd")}, {"image": IMAGE}, "test")
    refused(DataError, "only in test: d", load, DataConfig(source=str(path), size=8), Seeds(0))
    pixels = torch.zeros(2, 1, 4, 4, dtype=torch.uint8)
    one = ImageSet("x", pixels, torch.tensor([1, -1]), ("a", "b"))
    other = ImageSet("x", pixels, torch.tensor([0, -1]), ("b",))
    assert joined([other, one]).labels.tolist() == [1, -1, 1, -1]
    for values in ([1e30, float("inf")], [float("-inf")]):
        refused(ValueError, "not whole", class_labels, values)
    assert class_labels([f"{i:06}x" for i in range(100_002)])[1][-1] == "100001x"


@pytest.mark.parametrize("entrance", ["parquet", "saved", "stream"])
@pytest.mark.parametrize("cell", [None, {"bytes": None, "path": None}, {"bytes": None, "path": "/nowhere/x.png"}])
def test_cells_without_an_image(tmp_path, entrance, cell):
    cells = [picture(i) for i in range(ROWS)]
    cells[2] = cell
    plain = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}
    path = table(tmp_path / "t", {"image": cells}, {"image": plain})
    why = "its file /nowhere/x.png" if cell and cell["path"] else "the cell is empty"
    refused(DataError, rf"\[2\] \({why}.*on_corrupt = 'skip'", lambda: first_pixels(read(path, entrance)))
    with pytest.warns(UserWarning, match=why):
        assert first_pixels(read(path, entrance, on_corrupt="skip"))[:2] == [0, 1]


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize(("cells", "feature", "fix"), [
    (["a/x.png"] * ROWS, None, r"holds text.*table\.cast_column\('image', datasets\.Image\(\)\) for paths.*b64decode"),
    ([[picture(0), picture(1)]] * ROWS, datasets.List(IMAGE), "holds lists of images. Make a row of each image"),
    ([np.zeros((4, 4), np.uint8).tolist()] * ROWS, None, r"holds arrays.*datasets\.Image\(\).*\.npz"),
    ([np.zeros((4, 4, 3), np.uint8)] * ROWS, datasets.Array3D((4, 4, 3), "uint8"), r"holds arrays.*\.npz"),
])  # fmt: skip
def test_columns_that_hold_something_else(tmp_path, explicit, cells, feature, fix):
    path = table(tmp_path / "t", {"image": cells, "id": list(range(ROWS))}, {"image": feature} if feature else None)
    refused(DataError, fix, read, path, image_column="image" if explicit else None)


def test_the_advice_for_lists_and_paths_works_and_bytes_are_read(tmp_path):
    warnings.filterwarnings("ignore", "Downcasting array")
    files = [str(tmp_path / f"{i}.png") for i in range(ROWS)]
    for i, file in enumerate(files):
        Path(file).write_bytes(picture(i)["bytes"])
    lists = [np.full((4, 4, 3), i, np.uint8).tolist() for i in range(ROWS)]
    texts = {"image": [base64.b64encode(Path(file).read_bytes()).decode() for file in files]}
    decoded = datasets.Dataset.from_dict(texts).map(lambda row: {"image": base64.b64decode(row["image"])})
    made = [datasets.Dataset.from_dict({"image": cells}).cast_column("image", IMAGE) for cells in (lists, files)]
    for name, rows in zip("abc", [*made, decoded], strict=True):
        rows.to_parquet(tmp_path / f"{name}.parquet")
        assert first_pixels(read(tmp_path / f"{name}.parquet")) == list(range(ROWS))
    for kind in (pyarrow.binary(), pyarrow.large_binary(), pyarrow.binary_view(), pyarrow.binary(99)):
        cells = pyarrow.array([picture(i)["bytes"].ljust(99, b"\0") for i in range(ROWS)], kind)
        pyarrow.parquet.write_table(pyarrow.table({"jpg": cells}), tmp_path / "d.parquet")
        assert first_pixels(read(tmp_path / "d.parquet")) == list(range(ROWS))


@pytest.mark.parametrize("names", [
    ("train/0000", "test/0000"), ("split=train/part-0", "split=test/part-0"), ("my-train", "my-test"),
    ("train_1", "val_1"), ("train-00000-of-00001-0a1b", "validation-00000-of-00001-0a1b"), ("v2-train-0", "v2-val-0"),
])  # fmt: skip
def test_names_of_parquet_files_and_of_their_folders_tell_the_splits(tmp_path, names):
    for start, name in zip((0, 100), names, strict=True):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        made = table(tmp_path / "made", {"image": start}) / "train-00000-of-00001.parquet"
        made.rename(tmp_path / f"{name}.parquet")
    streaming = names[0].startswith(("split=", "my"))
    parts = load(DataConfig(source=str(tmp_path), size=8, streaming=streaming), Seeds(0))
    assert [first_pixels(part) for part in (parts.train, parts.test)] == [[*range(6)], [*range(100, 106)]]


def test_quiet_hides_the_progress_of_datasets(tmp_path):
    path = table(tmp_path / "t", {"image": 0, "label": [0, 1] * 3})
    arguments = ["train", "digits-simclr", "--quiet", "--set", f"vision.data.source={path}"]
    ended = run_python("-m", "dipole", *arguments, cwd=tmp_path, HF_DATASETS_CACHE=str(tmp_path / "cache"))
    # It reads the images, and ends before it trains.
    assert (ended.returncode, "batch_size" in ended.stderr, "Generating" in ended.stderr) == (2, True, False)


def test_a_file_without_rows(tmp_path):
    path = table(tmp_path / "t", {"image": 0})
    empty = datasets.load_dataset(str(path))["train"].select([])
    empty.to_parquet(path / "train-00001-of-00002.parquet")
    assert len(read(path)) == ROWS
    empty.to_parquet(path / "train-00000-of-00001.parquet")
    refused(DataError, r"holds no row\. Choose another file", read, path)
    twice = pyarrow.table({"jpg": [b""], "y": [0], "z": [0]}).rename_columns(["jpg", "y", "y"])
    pyarrow.parquet.write_table(twice, tmp_path / "twice.parquet")
    refused(DataError, r"twice\.parquet has several columns of one name: y\. Rename", read, tmp_path / "twice.parquet")


images = partial(image_folder, count=3)
STREAMS = ({}, {"streaming": True})


@pytest.mark.parametrize(
    "name", ["train", "test", "val", "valid", "validation", "dev", "unlabeled", "Training", "eval"]
)
@pytest.mark.parametrize("inner", ["", "images", "images/part"])
@pytest.mark.parametrize("stream", STREAMS)
def test_a_class_may_be_called_as_a_split_is(tmp_path, name, inner, stream):
    names = sorted(("bus", "car", name))
    images(tmp_path, *(f"{each}/{inner}" for each in names))
    found = opened(tmp_path, **stream)
    assert found.counts() == dict.fromkeys(names, 3)
    assert (found.class_names, found.labels.tolist()) == (tuple(names), [0] * 3 + [1] * 3 + [2] * 3)
    assert first_pixels(found) == [60 * c + i for c in range(3) for i in range(3)]
    if name == "dev" and inner == "":
        images(tmp_path, "test")  # two classes called as test splits
        assert set(opened(tmp_path, **stream).counts()) == {*names, "test"}


@pytest.mark.parametrize("name", ["blood_test", "test1"])
@pytest.mark.parametrize("inner", [["images"], ["images", "more"], ["0/a", "0/b"]])
def test_classes_with_folders_in_them_are_classes(tmp_path, inner, name):
    images(tmp_path, *(f"{name}/{each}" for name in ("cat", "dog") for each in inner))
    if len(inner) > 1 and "/" not in inner[0]:
        with pytest.warns(UserWarning, match="are read as classes: cat, dog"):
            assert opened(tmp_path).counts() == {"cat": 6, "dog": 6}
        assert opened(tmp_path, "dog").class_names == ("images", "more")  # a split, if it is named as one
        (tmp_path / "dog").rename(tmp_path / name)
        with pytest.warns(UserWarning, match=f"are read as classes: .*{name}"):
            assert load(DataConfig(source=str(tmp_path)), Seeds(0)).train.class_names == tuple(sorted(("cat", name)))
    else:
        assert opened(tmp_path).counts() == {"cat": 3 * len(inner), "dog": 3 * len(inner)}


@pytest.mark.parametrize(("places", "splits"), [
    (["train/a", "train/b", "test/a", "test/b"], {"train": {"a", "b"}, "test": {"a", "b"}}),
    (["train/a", "train/b", "val/a", "extra/a"], {"train": {"a", "b"}, "val": {"a"}, "extra": {"a"}}),
    (["train/a/x", "train/b/x", "test/a/x"], {"train": {"a", "b"}, "test": {"a"}}),
    (["train", "test"], {"train": {"unlabelled"}, "test": {"unlabelled"}}),
    (["Train/a\udcff", "Test/a\udcff"], {"Train": {"a\\xff"}, "Test": {"a\\xff"}}),
    (["set/train/a", "set/test/a"], {"train": {"a"}, "test": {"a"}}),
    (["set/a", "set/b"], {"train": {"a", "b"}, "set": {"a", "b"}}), (["test1", "test2"], {"train": {"test1", "test2"}}),
    (["x/y/a", "x/y/b"], {"train": {"a", "b"}, "x": {"y"}}), (["x/train/a", "x/train/b"], {"train": {"a", "b"}}),
    (["train/a", "holdout/a"], {"train": {"a"}, "holdout": {"a"}}),
    (["train2017", "val2017"], {"train2017": {"unlabelled"}, "val2017": {"unlabelled"}}),
    (["train/a", "test1"], {"train": {"a"}, "test1": {"unlabelled"}}),
    (["train/caf\u00e9", "train/cafe\u0301", "test/cafe\u0301"], {"train": {"caf\u00e9"}, "test": {"caf\u00e9"}}),
    (["train/train/a", "train/train/b", "test/test/a"], {"train": {"a", "b"}, "test": {"a"}}),
])  # fmt: skip
@pytest.mark.parametrize("stream", STREAMS)
def test_splits_are_splits(tmp_path, places, splits, stream):
    images(tmp_path, *places)
    source = open_source(str(tmp_path), Decoding(**stream))
    assert {split: set(source.read(split).counts()) for split in source.splits} == splits


def test_a_class_without_test_images(tmp_path):
    images(tmp_path, "train/a", "train/b", "train/c", "test/a", "test/c")
    with warnings.catch_warnings(action="ignore"):
        parts = load(DataConfig(source=str(tmp_path)), Seeds(0))
    assert (parts.test.class_names, parts.test.counts()) == (("a", "b", "c"), {"a": 3, "c": 3})
    (tmp_path / "test" / "b").mkdir()
    assert opened(tmp_path, "test").class_names == ("a", "b", "c")
    images(tmp_path, "test/d")
    refused(DataError, "only in test: d", load, DataConfig(source=str(tmp_path)), Seeds(0))


@pytest.mark.parametrize("split", ["", "train"])
def test_what_archives_and_systems_add_is_no_class(tmp_path, split):
    litter = ("__MACOSX/cat", "@eaDir", "#recycle", ".Trash", "cat/.thumbnails", "dog/__MACOSX")
    images(tmp_path / split, "cat", "dog", *litter)
    for litter in ("cat/._0.png", "dog/.hidden.png", "._stray.jpg"):
        (tmp_path / split / litter).write_bytes(b"no image")
    (tmp_path / "Thumbs.db").write_bytes(b"x")
    pyarrow.parquet.write_table(pyarrow.table({"features": [[0.5]]}), tmp_path / "features.parquet")
    assert opened(tmp_path).counts() == {"cat": 3, "dog": 3}
    assert read_images(tmp_path).total == 6


def test_folders_without_images_and_beside_splits_are_named(tmp_path):
    images(tmp_path, "cat", "dog")
    (tmp_path / "bird" / "deep").mkdir(parents=True)
    (tmp_path / "notes").mkdir()
    (tmp_path / "red\x1b[31m").mkdir()
    (tmp_path / "notes" / "x.txt").write_text("x")
    with pytest.warns(UserWarning, match=r"without images are no classes: bird, notes, red\\x1b\[31m"):
        found = opened(tmp_path)
    assert (found.class_names, sorted(set(found.labels.tolist()))) == (("cat", "dog"), [0, 1])
    images(tmp_path / "a", "train/a", "train/b", "pool/a", "pool/b")
    with pytest.warns(UserWarning, match=r"read as splits: pool, train\. If they are classes, rename 'train'"):
        assert opened(tmp_path / "a").counts() == {"a": 3, "b": 3}
    images(tmp_path / "c", "seg_train/seg_train/a", "seg_train/seg_train/b", "seg_pred/seg_pred")
    images(tmp_path / "e", "train_images", "test_images")
    for name, classes in (("c", {"seg_pred": 3, "seg_train": 6}), ("e", {"test_images": 3, "train_images": 3})):
        with pytest.warns(UserWarning, match=f"read as classes: {', '.join(classes)}. To read one as a split, name it"):
            assert opened(tmp_path / name).counts() == classes
    assert opened(tmp_path / "c", "seg_train").counts() == {"a": 3, "b": 3}
    assert opened(tmp_path / "e", "test_images").counts() == {"unlabelled": 3}
    images(tmp_path / "d", "images", "annotations/trimaps")
    with pytest.warns(UserWarning, match="look like masks of the other images: annotations"):
        assert opened(tmp_path / "d").counts() == {"annotations": 3, "images": 3}
    images(tmp_path / "b", "train", "test", "other", "more")
    with pytest.warns(UserWarning, match=r"6 images of train are left out: .*more.0\.png \(next to the folders of"):
        assert len(opened(tmp_path / "b")) == 3


@posix
def test_links_to_folders_are_followed_and_may_lead_nowhere_or_in_circles(tmp_path):
    images(tmp_path / "pool", "a", "b/inner")
    root = tmp_path / "root"
    images(root, "cat")
    (root / "dog").symlink_to(tmp_path / "pool" / "a")
    (root / "cat" / "more").symlink_to(tmp_path / "pool" / "b")
    (root / "cat" / "3.png").symlink_to(tmp_path / "pool" / "a" / "2.png")
    assert opened(root).counts() == {"cat": 7, "dog": 3}
    (tmp_path / "link").symlink_to(root)
    assert opened(tmp_path / "link").counts() == {"cat": 7, "dog": 3}
    other = images(tmp_path / "other", "cat", "dog")
    for name, to in (("cat/up", other), ("cat/self", "self"), ("bird", "/nowhere/birds")):
        (other / name).symlink_to(to)
    with pytest.warns(UserWarning, match=r"bird \(a link to /nowhere/birds, which is not there\)"):
        assert opened(other).counts() == {"cat": 3, "dog": 3}
    (other / "dog" / "9.png").symlink_to("/nowhere/9.png")
    (other / "bird").unlink()
    (other / "cat" / "self").unlink()
    refused(DataError, r"1 of 7 .*9\.png", opened, other)


@posix
@pytest.mark.skipif(os.geteuid() == 0 if hasattr(os, "geteuid") else True, reason="root reads everything")
def test_a_folder_that_may_not_be_read_is_named(tmp_path):
    images(tmp_path, "cat", "dog")
    (tmp_path / "dog").chmod(0)
    refused(DataError, "dog cannot be read", opened, tmp_path)


def metadata(folder, rows, kind="csv"):
    frame, path = pandas.DataFrame(rows), folder / f"metadata.{kind}"
    if kind == "csv":
        frame.to_csv(path, index=False)
    elif kind == "jsonl":
        frame.to_json(path, orient="records", lines=True)
    else:
        frame.to_parquet(path)


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_labels_of_a_metadata_file(tmp_path, kind):
    images(tmp_path, "", count=4)
    rows = [{"file_name": f"{i}.png", "label": ("dog", "cat", "dog", "bird")[i], "text": "x"} for i in range(4)]
    metadata(tmp_path, rows, kind)
    found = opened(tmp_path)
    assert [found.class_name(label) for label in found.labels.tolist()] == ["dog", "cat", "dog", "bird"]
    theirs = datasets.load_dataset("imagefolder", data_dir=str(tmp_path), split="train")
    assert theirs["label"][:] == ["dog", "cat", "dog", "bird"]
    (tmp_path / "list").write_text("cat\ndog\n")
    parts = load(DataConfig(source=str(tmp_path), classes=str(tmp_path / "list"), test=str(tmp_path)), Seeds(0))
    assert parts.train.counts() == {"cat": 1, "dog": 2}


def test_metadata_of_each_split_of_folders_and_of_no_labels(tmp_path):
    images(tmp_path, "train/x", "test")
    metadata(tmp_path / "train", [{"file_name": f"x/{i}.png", "label": i % 2} for i in range(3)])
    metadata(tmp_path / "test", [{"file_name": f"{i}.png", "label": 1} for i in range(3)])
    assert opened(tmp_path).labels.tolist() == [0, 1, 0]
    assert opened(tmp_path, "test").labels.tolist() == [1, 1, 1]
    alone = images(tmp_path / "alone", "", count=1)
    for again in ("0.png", "./0.png", "../alone/0.png", "..\\alone\\0.png"):
        first = {"file_name": "0.png", "label": "a"}
        metadata(alone, [first, {"file_name": again, "label": "a"}])
        assert opened(alone).counts() == {"a": 1}
        metadata(alone, [first, {"file_name": again, "label": "b"}])
        refused(DataError, r"another label than an earlier row: .*csv, line 3: '0\.png'", opened, alone)
    for rows in ([{"file_name": "cat/0.png", "caption": "a"}], [{"id": "7", "label": "x"}]):  # leaves the classes
        metadata(images(tmp_path / "classes", "cat", "dog"), rows)
        said = pytest.warns(UserWarning, match="without the column 'file_name', only id, label")
        with nullcontext() if "file_name" in rows[0] else said:
            assert opened(tmp_path / "classes").counts() == {"cat": 3, "dog": 3}


def test_columns_and_file_names_of_metadata(tmp_path):
    images(tmp_path, "", count=3)
    masks = [{"mask_file_name": f"{i % 2}.png"} for i in range(3)]
    rows = [{"file_name": f"{i}.png", "label": 0.5 * i, "kind": "ab"[i % 2], **masks[i]} for i in range(3)]
    metadata(tmp_path, rows)
    with pytest.warns(UserWarning, match=r"column 'label' holds numbers that are not whole, such as 0\.5"):
        assert opened(tmp_path).labels is None
    assert opened(tmp_path, label_column="kind").labels.tolist() == [0, 1, 0]
    refused(DataError, r"no column 'knd'.*Did you mean 'kind'", opened, tmp_path, label_column="knd")
    with pytest.warns(UserWarning, match=r"1 image .*not in metadata"):
        assert len(opened(tmp_path, label_column="kind", image_column="mask")) == 2
    digits = DataConfig(source="digits", label_column="kind")
    refused(DataError, r"label_column has no effect: .* has no metadata\.csv", load, digits, Seeds(0))
    images(tmp_path, "", count=3)
    metadata(tmp_path, [{"file_name": f"{i}.png", "label": i, "split": ("train", "test")[i % 2]} for i in range(3)])
    with pytest.warns(UserWarning, match=r"column 'split' of .*csv \(test, train\) is not read"):
        assert opened(tmp_path).labels.tolist() == [0, 1, 2]
    metadata(tmp_path, [{"file_name": "0.png", "label": "a"}, {"file_name": "7.png", "label": "b"}])
    refused(DataError, r"metadata\.csv, line 3: no file '7\.png'.*on_corrupt", opened, tmp_path)
    with pytest.warns(UserWarning, match=r"2 images .*1\.png \(not in metadata\.csv\)"):
        assert opened(tmp_path, on_corrupt="skip").counts() == {"a": 1}


def test_tiny_imagenet_and_tables_of_others_and_of_pixels_that_are_not_read(tmp_path):
    images(tmp_path, "train/n1/images", "train/n2/images", "val/images", "test/images", count=3)
    (tmp_path / "val" / "val_annotations.txt").write_text("0.png\tn2\t0\t32\t44\t62\n1.png\tn1\n2.png\tn2\t1\n")
    parts = load(DataConfig(source=str(tmp_path), test_split="val"), Seeds(0))
    assert (parts.train.counts(), parts.test.labels.tolist()) == ({"n1": 3, "n2": 3}, [1, 0, 1])
    assert opened(tmp_path, "test").labels is None
    loose = images(tmp_path / "loose", "train", "test", count=3)
    for place in ("labels.csv", "train/annotations.tsv", "test/Train.CSV"):
        (loose / place).write_text("id,breed\n0,poodle\n")
        with pytest.warns(UserWarning, match=rf"no labels are read from .*{place}.*metadata\.csv"):
            assert opened(loose).labels is None
        (loose / place).unlink()
    (tmp_path / "coco.json").write_text('{"info": {}, "images": [], "annotations": [], "categories": []}')
    refused(DataError, "annotation file of COCO is not read. Give the folder", opened, tmp_path / "coco.json")
    wide = pandas.DataFrame({"label": [1], **{f"pixel{i}": [0] for i in range(784)}})
    wide.to_csv(tmp_path / "mnist.csv", index=False)
    wide.to_parquet(tmp_path / "mnist.parquet")
    (tmp_path / "fer.csv").write_text(f"emotion,pixels\n0,{'70 ' * 2304}\n")
    refused(DataError, "it has label, .{200,300}pixel783. .*Save pixels in columns as", opened, tmp_path / "mnist.csv")
    refused(DataError, "its columns are label, .{200,300}pixel783", opened, tmp_path / "mnist.parquet")
    refused(DataError, "holds '70 70 .*pixels as an .npz", opened, tmp_path / "fer.csv", image_column="pixels")
