"""Folders of images as people have them: names of classes and splits, nested folders, links, litter, metadata.csv."""

import json
import os
import warnings
from functools import partial

import pytest

from dipole.core.utils.errors import DataError
from dipole.core.utils.seeding import Seeds
from dipole.vision.data import DataConfig, load
from dipole.vision.inference import read_images
from dipole.vision.sources import Decoding, open_source
from tests.systems import posix
from tests.vision.made import image_folder

images = partial(image_folder, count=3)
STREAMS = ({}, {"streaming": True})


def read(root, split="train", **options):
    return open_source(str(root), Decoding(**options)).read(split)


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


@pytest.mark.parametrize(
    "name", ["train", "test", "val", "valid", "validation", "dev", "unlabeled", "Training", "eval"]
)
@pytest.mark.parametrize("inner", ["", "images", "images/part"])
@pytest.mark.parametrize("stream", STREAMS)
def test_a_class_may_be_called_as_a_split_is(tmp_path, name, inner, stream):
    images(tmp_path, f"bus/{inner}", f"{name}/{inner}", f"car/{inner}")
    found = read(tmp_path, **stream)
    assert found.counts() == {"bus": 3, "car": 3, name: 3}
    assert found.class_names == tuple(sorted(("bus", "car", name)))


def test_two_classes_called_as_test_splits(tmp_path):
    images(tmp_path, "dev", "test", "prod")
    assert set(read(tmp_path).counts()) == {"dev", "test", "prod"}


@pytest.mark.parametrize("inner", [["images"], ["images", "more"], ["0/a", "0/b"]])
def test_classes_with_folders_in_them_are_classes(tmp_path, inner):
    images(tmp_path, *(f"{name}/{each}" for name in ("cat", "dog") for each in inner))
    if len(inner) > 1 and "/" not in inner[0]:
        with pytest.warns(UserWarning, match="are read as classes: cat, dog"):
            assert read(tmp_path).counts() == {"cat": 6, "dog": 6}
        assert read(tmp_path, "dog").class_names == ("images", "more")  # a split, if it is named as one
    else:
        assert read(tmp_path).counts() == {"cat": 3 * len(inner), "dog": 3 * len(inner)}


@pytest.mark.parametrize(
    ("places", "splits"),
    [
        (["train/a", "train/b", "test/a", "test/b"], {"train": {"a", "b"}, "test": {"a", "b"}}),
        (["train/a", "train/b", "val/a", "extra/a"], {"train": {"a", "b"}, "val": {"a"}, "extra": {"a"}}),
        (["train/a/x", "train/b/x", "test/a/x"], {"train": {"a", "b"}, "test": {"a"}}),
        (["train", "test"], {"train": {"unlabelled"}, "test": {"unlabelled"}}),
        (["Train/a", "Test/a"], {"Train": {"a"}, "Test": {"a"}}),
        (["set/train/a", "set/test/a"], {"train": {"a"}, "test": {"a"}}),
        (["set/a", "set/b"], {"train": {"a", "b"}, "set": {"a", "b"}}),
    ],
)
@pytest.mark.parametrize("stream", STREAMS)
def test_splits_are_splits(tmp_path, places, splits, stream):
    images(tmp_path, *places)
    source = open_source(str(tmp_path), Decoding(**stream))
    assert {split: set(source.read(split).counts()) for split in source.splits} == splits


def test_a_single_split_beside_folders_that_look_like_it_is_said(tmp_path):
    images(tmp_path, "train/a", "train/b", "pool/a", "pool/b")
    with pytest.warns(UserWarning, match=r"read as splits: pool, train\. If they are classes, rename 'train'"):
        assert read(tmp_path).counts() == {"a": 3, "b": 3}


def test_folders_beside_splits_are_named_with_all_their_images(tmp_path):
    images(tmp_path, "train", "test", "other", "more")
    with pytest.warns(UserWarning, match=r"6 images of train are left out: .*more.0\.png \(beside the folders of"):
        assert len(read(tmp_path)) == 3


def test_a_class_without_test_images(tmp_path):
    images(tmp_path, "train/a", "train/b", "train/c", "test/a", "test/c")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parts = load(DataConfig(source=str(tmp_path)), Seeds(0))
    assert parts.test.class_names == ("a", "b", "c")
    assert parts.test.counts() == {"a": 3, "c": 3}
    (tmp_path / "test" / "b").mkdir()
    assert read(tmp_path, "test").class_names == ("a", "b", "c")
    images(tmp_path, "test/d")
    with pytest.raises(DataError, match="only in test: d"):
        load(DataConfig(source=str(tmp_path)), Seeds(0))


@pytest.mark.parametrize("split", ["", "train"])
def test_what_archives_and_systems_add_is_no_class(tmp_path, split):
    images(tmp_path / split, "cat", "dog", "__MACOSX/cat", "@eaDir", ".Trash", "cat/.thumbnails", "dog/__MACOSX")
    for litter in ("cat/._0.png", "dog/.hidden.png", "._stray.jpg"):
        (tmp_path / split / litter).write_bytes(b"no image")
    (tmp_path / "Thumbs.db").write_bytes(b"x")
    assert read(tmp_path).counts() == {"cat": 3, "dog": 3}
    assert read_images(str(tmp_path), None, None, 3).total == 6


def test_folders_without_images_are_named_and_no_classes(tmp_path):
    images(tmp_path, "cat", "dog")
    (tmp_path / "bird" / "deep").mkdir(parents=True)
    (tmp_path / "notes").mkdir()
    (tmp_path / "red\x1b[31m").mkdir()
    (tmp_path / "notes" / "x.txt").write_text("x")
    with pytest.warns(UserWarning, match=r"without images are no classes: bird, notes, red\\x1b\[31m"):
        found = read(tmp_path)
    assert (found.class_names, sorted(set(found.labels.tolist()))) == (("cat", "dog"), [0, 1])


@posix
def test_links_to_folders_are_followed(tmp_path):
    images(tmp_path / "pool", "a", "b/inner")
    root = tmp_path / "root"
    images(root, "cat")
    (root / "dog").symlink_to(tmp_path / "pool" / "a")
    (root / "cat" / "more").symlink_to(tmp_path / "pool" / "b")
    (root / "cat" / "3.png").symlink_to(tmp_path / "pool" / "a" / "2.png")
    assert read(root).counts() == {"cat": 7, "dog": 3}
    (tmp_path / "link").symlink_to(root)
    assert read(tmp_path / "link").counts() == {"cat": 7, "dog": 3}


@posix
def test_links_that_lead_nowhere_or_in_circles(tmp_path):
    images(tmp_path, "cat", "dog")
    (tmp_path / "cat" / "up").symlink_to(tmp_path)
    (tmp_path / "cat" / "self").symlink_to("self")
    (tmp_path / "bird").symlink_to("/nowhere/birds")
    with pytest.warns(UserWarning, match=r"bird \(a link to /nowhere/birds, which is not there\)"):
        assert read(tmp_path).counts() == {"cat": 3, "dog": 3}
    (tmp_path / "dog" / "9.png").symlink_to("/nowhere/9.png")
    (tmp_path / "bird").unlink()
    (tmp_path / "cat" / "self").unlink()
    with pytest.raises(DataError, match=r"1 of 7 .*9\.png"):
        read(tmp_path)


@posix
@pytest.mark.skipif(os.geteuid() == 0 if hasattr(os, "geteuid") else True, reason="root reads everything")
def test_a_folder_that_may_not_be_read_is_named(tmp_path):
    images(tmp_path, "cat", "dog")
    (tmp_path / "dog").chmod(0)
    with pytest.raises(DataError, match="dog cannot be read"):
        read(tmp_path)


def metadata(folder, rows, kind="csv"):
    path = folder / f"metadata.{kind}"
    if kind == "csv":
        lines = [",".join(rows[0]), *(",".join("" if x is None else str(x) for x in row.values()) for row in rows)]
        path.write_text("\n".join(lines))
    elif kind == "jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        pytest.importorskip("datasets").Dataset.from_list(rows).to_parquet(path)


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_labels_of_a_metadata_file(tmp_path, kind):
    datasets = pytest.importorskip("datasets")
    images(tmp_path, "", count=4)
    rows = [{"file_name": f"{i}.png", "label": ("dog", "cat", "dog", "bird")[i], "text": "x"} for i in range(4)]
    metadata(tmp_path, rows, kind)
    found = read(tmp_path)
    assert [found.class_name(label) for label in found.labels.tolist()] == ["dog", "cat", "dog", "bird"]
    theirs = datasets.load_dataset("imagefolder", data_dir=str(tmp_path), split="train")
    assert theirs["label"][:] == ["dog", "cat", "dog", "bird"]
    (tmp_path / "list").write_text("cat\ndog\n")
    parts = load(DataConfig(source=str(tmp_path), classes=str(tmp_path / "list"), test=str(tmp_path)), Seeds(0))
    assert parts.train.counts() == {"cat": 1, "dog": 2}


def test_metadata_of_each_split_and_of_folders(tmp_path):
    images(tmp_path, "train/x", "test")
    metadata(tmp_path / "train", [{"file_name": f"x/{i}.png", "label": i % 2} for i in range(3)])
    metadata(tmp_path / "test", [{"file_name": f"{i}.png", "label": 1} for i in range(3)])
    assert read(tmp_path).labels.tolist() == [0, 1, 0]
    assert read(tmp_path, "test").labels.tolist() == [1, 1, 1]


@pytest.mark.parametrize("rows", [[{"file_name": "cat/0.png", "caption": "a"}], [{"id": "7", "label": "x"}]])
def test_metadata_without_labels_or_files_leaves_the_classes(tmp_path, rows):
    images(tmp_path, "cat", "dog")
    metadata(tmp_path, rows)
    assert read(tmp_path).counts() == {"cat": 3, "dog": 3}


def test_columns_of_metadata(tmp_path):
    images(tmp_path, "", count=3)
    more = {"mask_file_name": "0.png"}
    rows = [{"file_name": f"{i}.png", "label": 0.5 * i, "kind": "ab"[i % 2], **more} for i in range(3)]
    metadata(tmp_path, rows)
    with pytest.warns(UserWarning, match=r"column 'label' holds numbers that are not whole, such as 0\.5"):
        assert read(tmp_path).labels is None
    assert read(tmp_path, label_column="kind").labels.tolist() == [0, 1, 0]
    with pytest.raises(DataError, match=r"no column 'knd'.*Did you mean 'kind'"):
        read(tmp_path, label_column="knd")
    with pytest.warns(UserWarning, match=r"2 images .*not in metadata"):
        assert len(read(tmp_path, label_column="kind", image_column="mask")) == 1
    with pytest.raises(DataError, match=r"label_column has no effect: .* has no metadata\.csv"):
        load(DataConfig(source="digits", label_column="kind"), Seeds(0))


def test_files_that_metadata_does_not_name_and_those_it_names_in_vain(tmp_path):
    images(tmp_path, "", count=3)
    metadata(tmp_path, [{"file_name": "0.png", "label": "a"}, {"file_name": "7.png", "label": "b"}])
    with pytest.raises(DataError, match=r"metadata\.csv, line 3: no file '7\.png'.*on_corrupt"):
        read(tmp_path)
    with pytest.warns(UserWarning, match=r"2 images .*1\.png \(not in metadata\.csv\)"):
        assert read(tmp_path, on_corrupt="skip").counts() == {"a": 1}
