"""Image sets: what is read, split and counted, and what is refused."""

import gzip
import os
import struct
import warnings
from dataclasses import replace

import datasets
import numpy as np
import pytest
import torch

from dipole.core.utils.errors import DataError
from dipole.core.utils.seeding import Seeds
from dipole.core.utils.transfer import prefetched
from dipole.vision.data import DataConfig, ImageSet, expected, load, read_classes, unbalance
from dipole.vision.image_set import joined
from dipole.vision.sources import Decoding, open_source, seen
from dipole.vision.sources.arrays import digits
from tests.runs import refused
from tests.systems import posix
from tests.vision.made import image_table, opened
from tests.vision.made import png as encoded

FOUR = np.zeros((2, 4, 4, 3), np.uint8)


def png(value=0, width=12, height=12):
    return encoded(np.full((height, width, 3), value, np.uint8))


def pictures(folder, values):
    folder.mkdir(parents=True, exist_ok=True)
    for i, value in enumerate(values):
        (folder / f"{i}.png").write_bytes(png(value))


@pytest.fixture
def folder(tmp_path):
    """Two classes of four images, value 10 c + i."""
    pictures(tmp_path / "cat", range(4))
    pictures(tmp_path / "dog", range(10, 14))
    return tmp_path


def read(path, **settings):
    return load(DataConfig(source=str(path), **settings), Seeds(0))


def test_digits_are_split_by_the_seed_and_fingerprints_see_pixels_and_labels():
    parts = load(DataConfig(), Seeds(0))
    assert (len(parts.train), len(parts.test)) == (1078, 719)
    assert parts.train.images.shape[1:] == (1, 8, 8)
    together = torch.cat([parts.train.images, parts.test.images]).flatten(1).float()
    torch.testing.assert_close(together.sum(0), digits().images.flatten(1).float().sum(0))
    assert load(DataConfig(), Seeds(0)).info()["fingerprint"] == parts.info()["fingerprint"]
    assert load(DataConfig(), Seeds(1)).info()["fingerprint"] != parts.info()["fingerprint"]
    images = ImageSet("x", torch.randint(0, 256, (20, 3, 5, 5), generator=torch.Generator().manual_seed(0)).byte())
    values = images.images.numpy() / 255
    np.testing.assert_allclose(images.statistics, [values.mean((0, 2, 3)), values.std((0, 2, 3))])
    x = digits()
    changed = x.images.clone()
    changed[0, 0, 0, 0] += 1
    assert replace(x).fingerprint == x.fingerprint
    assert replace(x, images=changed).fingerprint != x.fingerprint
    assert replace(x, labels=x.labels.flip(0)).fingerprint != x.fingerprint


@posix
@pytest.mark.parametrize("encoded", [False, True])
def test_pipes_devices_and_folders_are_no_images(folder, encoded):
    os.mkfifo(folder / "cat" / "5.png")
    (folder / "cat" / "6.png").symlink_to("/dev/zero")
    (folder / "cat" / "7.png").mkdir()
    refused(DataError, r"3 of 11 .*5\.png \(cannot be read: it is no regular file\)", opened, folder)
    skipping = Decoding(size=12, memory=100 if encoded else 4e9, on_corrupt="skip")
    with pytest.warns(UserWarning, match=r"6\.png \(cannot be read: it is no regular file\)"):
        found = list(open_source(str(folder), skipping).read("train").images.split(4))
    assert sum(map(len, found)) == (11 if encoded else 8)
    with warnings.catch_warnings(action="ignore"):
        assert len(open_source(str(folder), skipping).read("train").fingerprint) > 8


def test_size_brings_images_to_one_square(tmp_path):
    (tmp_path / "a.png").write_bytes(png(3, 20, 12))
    (tmp_path / "b.png").write_bytes(png(4, 9, 31))
    refused(DataError, r"b\.png has 9 x 31 pixels.*vision\.data\.size", opened, tmp_path)
    assert opened(tmp_path, size=8).images.shape == (2, 3, 8, 8)


def test_a_corrupt_file_is_named_and_refused_or_skipped(folder):
    (folder / "cat" / "2.png").write_bytes(png(2)[:40])
    (folder / "dog" / "1.png").write_bytes(b"this is no image")
    refused(DataError, r"2 of 8 .*cat.2\.png.*dog.1\.png.*on_corrupt = 'skip'", opened, folder)
    with pytest.warns(UserWarning, match="skipped 2 of 8"):
        images = opened(folder, on_corrupt="skip")
    assert (images.labels.tolist(), len(images.skipped)) == ([0, 0, 0, 1, 1, 1], 2)
    (folder / "cat" / "2.png").write_bytes(b"this is no image")
    lazy = opened(folder, size=8, memory=100)
    refused(DataError, r"cat.2\.png.*on_corrupt", lazy.images.__getitem__, torch.tensor([2]))
    skipping = opened(folder, size=8, memory=100, on_corrupt="skip")
    with pytest.warns(UserWarning, match=r"cat.2\.png"):
        image = skipping.images[torch.tensor([2])]
    assert torch.equal(image, skipping.images[torch.tensor([3])])
    (folder / "cat" / "3.png").write_bytes(b"this is no image")
    with pytest.warns(UserWarning, match=r"cat.3\.png"):  # the last cat: another cat takes its place, no dog
        assert torch.equal(skipping.images[torch.tensor([3])], skipping.images[torch.tensor([0])])
    assert len(skipping.broken()) == 2


def test_sources_without_images_and_unknown_splits_are_refused(folder, tmp_path):
    for name in ("empty", "corrupt"):
        (folder / name).mkdir()
    (folder / "corrupt" / "x.png").write_bytes(b"")
    refused(DataError, r"1 of 1 image file .* or remove them\.$", opened, folder / "corrupt", on_corrupt="skip")
    refused(DataError, "holds no images", read, folder / "empty")
    refused(DataError, "Did you mean 'digits'", read, "digit")
    refused(DataError, r"no split 'trian'.*It has: train", read, folder, train_split="trian")
    image_table(map(png, range(3))).save_to_disk(str(tmp_path / "one"))
    (tmp_path / "one" / "state.json").write_text("damaged")
    refused(DataError, "cannot be read as a data set saved to disk", open_source, str(tmp_path / "one"), Decoding())


def npz(path, **arrays):
    np.savez(path, **arrays)
    return path


def test_npz(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (10, 6, 6, 3), dtype=np.uint8)
    path = npz(tmp_path / "a.npz", images=pixels, labels=np.arange(10) % 2, class_names=np.array([[b"x", b"y"]]))
    images = opened(path)
    assert images.images[3, 2].numpy().tolist() == pixels[3, :, :, 2].tolist()
    assert images.class_names == ("x", "y")
    parts = read(path, test=str(path))
    assert len(parts.train) == len(parts.test) == 10
    for labels in (np.arange(10.0)[:, None] % 2, np.array([7, 2**63] * 5, np.uint64), np.array(["x", "y"] * 5)):
        path = npz(tmp_path / "b.npz", images=pixels, labels=labels).rename(tmp_path / "C.NPZ")
        assert opened(path).labels.tolist() == [0, 1] * 5
    path.write_bytes(path.read_bytes()[:500])
    refused(DataError, "cannot be read as arrays", read, path)
    for kinds in (("{}_images", "{}_labels"), ("x_{}", "y_{}"), ("{}_data", "{}_target")):
        given = {kinds[0].format(part): pixels[:n] for part, n in (("train", 10), ("val", 2), ("test", 4))}
        parts = read(npz(tmp_path / "d.npz", **given, **{kinds[1].format("test"): np.arange(4)[:, None]}))
        assert (len(parts.train), parts.test.labels.tolist(), parts.train.labels) == (10, [0, 1, 2, 3], None)


def test_idx_files(tmp_path):
    (tmp_path / "raw").mkdir()
    for name, n, pack in (("train-%s-ubyte", 9, bytes), ("t10k-%s-ubyte.gz", 4, gzip.compress)):
        header, labels = struct.pack(">4I", 2051, n, 6, 5), struct.pack(">2I", 2049, n) + bytes([0, 1, 2] * 3)[:n]
        (tmp_path / "raw" / (name % "labels-idx1")).write_bytes(pack(labels))
        (tmp_path / "raw" / (name % "images-idx3")).write_bytes(pack(header + (bytes(range(150)) * 2)[: 30 * n]))
    parts = read(tmp_path)
    assert (parts.train.images.shape, parts.train.labels.tolist()) == ((9, 1, 6, 5), [0, 1, 2] * 3)
    assert (parts.test.images[0, 0, 1].tolist(), len(parts.test)) == ([5, 6, 7, 8, 9], 4)
    (tmp_path / "raw" / (name % "images-idx3")).write_bytes(pack(header))
    refused(DataError, "cannot be read as arrays: cannot reshape", read, tmp_path)


@pytest.mark.parametrize(("arrays", "message"), [
    ({"pictures": np.zeros((2, 4, 4), np.uint8)}, "no array 'images', only 'pictures'"),
    ({"images": np.zeros((2, 4, 4, 3), np.float32)}, "must be uint8"),
    ({"images": np.zeros((0, 4, 4, 3), np.uint8)}, "holds no images"),
    ({"images": FOUR, "labels": np.zeros(3, int)}, "2 images but labels"),
    ({"images": FOUR, "labels": np.eye(2)}, r"holds list values.*argmax"),
    ({"images": FOUR, "labels": np.array([0, 0.5])}, "not whole, such as 0.5"),
    ({"images": FOUR, "labels": np.array(1)}, r"2 images but labels of shape \(1,\)"),
    ({"images": FOUR, "labels": np.array([0, 1]), "class_names": np.array("x")}, "label is 1, and 'class_names' has 1"),
    ({"images": FOUR, "labels": np.array([0, 1]), "class_names": np.array(["x", "x"])}, "a name twice: x, x"),
    ({"images": FOUR, "labels": np.array(["a", None])}, r"Save text as labels\.astype\(str\)"),
    ({"images": FOUR[:, :0]}, r"of shape \(2, 3, 0, 4\)"),
    *(({"images": np.zeros((2, c, h, 8), np.uint8)}, "channels first") for c, h in ((3, 8), (5, 8), (3, 6))),
])  # fmt: skip
def test_bad_arrays_are_named(tmp_path, arrays, message):
    refused(DataError, message, read, npz(tmp_path / "a.npz", **arrays))


def test_classes_of_a_list_are_picked_from_parquet(tmp_path):
    label = datasets.ClassLabel(names=["red", "green", "blue"])
    for split, n in (("train", 6), ("test", 3)):
        made = image_table(map(png, range(n)), label=[i % 3 for i in range(n)]).cast_column("label", label)
        made.to_parquet(tmp_path / f"{split}-00000-of-00001.parquet")
    (tmp_path / "classes.txt").write_text("blue\nred\n")
    parts = read(tmp_path, classes=str(tmp_path / "classes.txt"))
    assert (parts.train.class_names, parts.train.labels.tolist()) == (("blue", "red"), [1, 0, 1, 0])
    assert parts.train.images[:, 0, 0, 0].tolist() == [0, 2, 3, 5]
    assert parts.test.images[:, 0, 0, 0].tolist() == [0, 2]
    turned = made.cast_column("label", datasets.ClassLabel(names=["blue", "green", "red"]))  # 0 is blue here
    turned.to_parquet(tmp_path / "test-00000-of-00001.parquet")
    assert read(tmp_path).test.counts() == {"blue": 1, "green": 1, "red": 1}
    assert read(tmp_path).test.labels.tolist() == [2, 1, 0]


def stl10_files(path, counts):
    """Write STL-10's own format: pixels channel by channel and column by column, and labels from 1."""
    draw = np.random.default_rng(0)
    pixels = {split: draw.integers(0, 256, (n, 3, 96, 96), dtype=np.uint8) for split, n in counts.items()}
    for split, values in pixels.items():
        values.tofile(path / f"{split}_X.bin")
        if split != "unlabeled":
            (np.arange(len(values)) % 10 + 1).astype(np.uint8).tofile(path / f"{split}_y.bin")
    return {split: torch.from_numpy(values).transpose(2, 3) for split, values in pixels.items()}


def test_splits_of_stl10_are_joined_once_and_counted(tmp_path):
    pixels = stl10_files(tmp_path, {"train": 3, "test": 2, "unlabeled": 4})
    parts = read(tmp_path, pretrain_split="train+unlabeled")
    assert torch.equal(parts.pretrain.images, torch.cat([pixels["train"], pixels["unlabeled"]]))
    assert parts.pretrain.labels.tolist() == [0, 1, 2, -1, -1, -1, -1]
    assert torch.equal(parts.train.images, pixels["train"])
    assert torch.equal(parts.test.images, pixels["test"])
    swapped = read(tmp_path, pretrain_split="unlabeled+train").pretrain
    assert torch.equal(swapped.images, torch.cat([pixels["unlabeled"], pixels["train"]]))
    assert read(tmp_path, pretrain_split="unlabeled").pretrain.labels is None
    assert len(expected(DataConfig(source="stl10", pretrain_split="train+unlabeled"), Seeds(0))) == 105_000
    assert len(expected(DataConfig(source="stl10", pretrain_split="unlabeled"), Seeds(0))) == 100_000
    stl10_files(tmp_path, {"train": 2, "test": 2})
    refused(DataError, "names one split twice", read, tmp_path, pretrain_split="train+train")
    grey = ImageSet("x", torch.zeros(2, 1, 4, 4, dtype=torch.uint8))
    colour = replace(grey, images=torch.zeros(2, 3, 4, 4, dtype=torch.uint8))
    refused(DataError, "different shapes", joined, [grey, colour])


@pytest.mark.parametrize("settings", [
    {"train_split": "nothing"}, {"pretrain_split": "nothing"}, {"test_split": "nothing"},
    {"pretrain_split": "train+nothing"}, {"pretrain": "digits", "pretrain_split": "nothing"},
    {"test": "digits", "test_split": "nothing"},
])  # fmt: skip
def test_a_split_that_does_not_exist_is_refused(settings):
    refused(DataError, r"digits has no split 'nothing'.*It has: train", load, DataConfig(**settings), Seeds(0))


@pytest.mark.parametrize("memory", [4.0, 1e-6])  # GB: decoded, or left encoded
def test_splits_of_folders_are_joined(tmp_path, memory):
    for number, split in enumerate(("train", "val", "unlabeled")):
        for c, name in enumerate(("cat", "dog") if split != "unlabeled" else ("",)):
            pictures(tmp_path / split / name, [100 * number + 10 * c])
    pretrain = read(tmp_path, memory=memory, pretrain_split="train+val+unlabeled").pretrain
    assert pretrain.images[torch.arange(5)][:, 0, 0, 0].tolist() == [0, 10, 100, 110, 200]
    assert pretrain.labels.tolist() == [0, 1, 0, 1, -1]
    some = joined([pretrain.take([4, 2]), pretrain.take([1])])  # as a class list leaves them
    assert some.images[torch.arange(3)][:, 0, 0, 0].tolist() == [200, 100, 10]
    assert len(getattr(some.images, "names", some.labels)) == 3


def test_class_list_picks_and_orders_classes(folder, tmp_path):
    listed = tmp_path / "list"
    listed.write_text("dog\n")
    images = open_source(str(folder), Decoding(), read_classes(str(listed))).read("train")
    assert (images.class_names, images.images[:, 0, 0, 0].tolist()) == (("dog",), [10, 11, 12, 13])
    listed.write_text("dog\nbird\n")
    source = open_source(str(folder), Decoding(), read_classes(str(listed)))
    refused(DataError, r"lacks 1 class.*bird", source.read, "train")
    shipped = read_classes("imagenet100")
    assert (len(shipped), shipped[0]) == (100, "n02869837")
    refused(DataError, "cannot be read", read_classes, "imagenet99")


def balanced(classes=10, each=100):
    labels = torch.arange(classes).repeat_interleave(each)
    return ImageSet("b", torch.zeros(len(labels), 1, 4, 4, dtype=torch.uint8), labels)


def test_class_imbalance_follows_cacrs_rules_in_pretraining_alone():
    sizes = []
    for each, kind in ((100, "linear"), (1000, "exponential")):
        found = unbalance(balanced(each=each), kind, torch.Generator().manual_seed(0))
        sizes.append(torch.bincount(found.labels).tolist())
    exponential = [max(1, int(1000 * np.exp(i + 1 - 10))) for i in range(10)]
    assert sizes == [[10, 20, 30, 40, 50, 60, 70, 80, 90, 100], exponential]
    hundred = unbalance(balanced(classes=100, each=10), "linear", torch.Generator().manual_seed(0))
    assert torch.bincount(hundred.labels).tolist() == [i // 10 + 1 for i in range(100)]
    parts, again = (load(DataConfig(imbalance="linear"), Seeds(0)) for _ in range(2))
    assert len(parts.pretrain) < len(parts.train) == 1078
    assert parts.info()["counts"]["pretrain"] == parts.pretrain.counts()
    assert torch.equal(again.pretrain.images, parts.pretrain.images)
    bare = replace(balanced(), labels=None)
    refused(DataError, "needs a label for every image", unbalance, bare, "linear", torch.Generator())
    parts = load(DataConfig(limit=100), Seeds(0))
    assert (len(parts.train), len(parts.test)) == (100, 719)


def test_cifar10_subset(shared_data):
    parts = read(shared_data / "cifar10/cifar10_train.npz", test=str(shared_data / "cifar10/cifar10_test.npz"))
    assert parts.train.images.shape == (10_000, 3, 32, 32)
    assert parts.test.counts() == dict.fromkeys(parts.test.class_names, 200)
    np.testing.assert_allclose(parts.train.statistics, [(0.4934, 0.4831, 0.4470), (0.2460, 0.2441, 0.2616)], atol=1e-4)


def test_a_set_larger_than_memory_stays_encoded_and_gives_the_same_images(folder):
    whole = opened(folder, size=8)
    lazy = opened(folder, size=8, memory=100)
    assert not isinstance(lazy.images, torch.Tensor)
    index = torch.tensor([6, 1, 3])
    assert torch.equal(lazy.images[index], whole.images[index])
    assert torch.equal(torch.cat(list(lazy.images.split(3))), whole.images)
    part = lazy.take(index)
    assert torch.equal(part.images[torch.tensor([0, 2])], whole.images[index[[0, 2]]])
    assert part.labels.tolist() == [1, 0, 0]
    assert lazy.statistics == whole.statistics
    assert lazy.fingerprint != part.fingerprint
    assert lazy.fingerprint == opened(folder, size=8, memory=100).fingerprint


def test_an_error_of_a_batch_made_ahead_is_raised_in_its_turn():
    items = prefetched(1 // number for number in (1, 0))
    assert next(items) == 1
    refused(ZeroDivisionError, "by zero", next, items)


def test_pretraining_images_may_lie_elsewhere(folder, tmp_path_factory):
    """As CACR Table 4: pretrain on one collection (its own classes, long-tailed), probe on another."""
    elsewhere = tmp_path_factory.mktemp("web")
    for name, count in (("q1", 6), ("q2", 3), ("q3", 2)):
        pictures(elsewhere / "train" / name, range(50, 50 + count))
    (elsewhere / "names.txt").write_text("q3\nq1\n")
    parts = read(folder, pretrain=str(elsewhere), pretrain_classes=str(elsewhere / "names.txt"))
    assert parts.info()["counts"]["pretrain"] == {"q3": 2, "q1": 6}
    assert parts.train.class_names == ("cat", "dog")
    for image in (elsewhere / "train").rglob("*.png"):
        image.write_bytes(png(1, 20, 20))
    refused(DataError, r"vision\.data\.size", read, folder, pretrain=str(elsewhere))


@pytest.mark.parametrize(("shape", "labels", "size"), [((30, 12, 12, 3), 4, None), ((9, 9, 13), 0, 6)])
def test_a_plan_knows_the_sizes_of_an_npz(tmp_path, shape, labels, size):
    """The estimate for a file equals the estimate for its images once they are read."""
    arrays = {"images": np.zeros(shape, np.uint8)} | ({"labels": np.arange(shape[0]) % labels} if labels else {})
    np.savez_compressed(tmp_path / "a.npz", **arrays)
    config = DataConfig(source=str(tmp_path / "a.npz"), limit=6, size=size)
    images = expected(config, Seeds(0), looks=True)
    read = load(config, Seeds(0)).pretrain
    assert (images.images.shape, images.images.device.type) == (read.images.shape, "meta")
    assert (images.labels is None) == (labels == 0)
    assert seen(str(tmp_path / "a.npz")).classes == max(labels, 1)


@pytest.mark.parametrize("content", [b"", b"no archive", None])
def test_a_glance_at_damaged_files_and_folders_without_images_tells_nothing(tmp_path, content):
    if content is not None:
        (tmp_path / "a.npz").write_bytes(content)
    for name in ("a.npz", "", "absent"):
        assert seen(str(tmp_path / name)) is None


@pytest.mark.parametrize("splits", [("",), ("train", "test")])
@pytest.mark.parametrize("classes", [("cat", "dog", "emu"), ("",)])
def test_a_plan_counts_a_folder_and_decodes_one_image(tmp_path, splits, classes):
    for split in splits:
        for name in classes:
            place = tmp_path / split / name
            place.mkdir(parents=True, exist_ok=True)
            for i in range(5 if split == "test" else 8):
                (place / f"{i}.png").write_bytes(png() if i == 0 else b"not decoded")
            (place / "notes.txt").write_text("no image")
    found = seen(str(tmp_path))
    labelled = classes != ("",)
    assert found.splits == {split or "train": len(classes) * (5 if split == "test" else 8) for split in splits}
    assert (found.side, found.classes) == (12, len(classes))
    assert bool(found.unlabelled) != labelled
