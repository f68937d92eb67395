"""Streams of shards and of `datasets`, each image once in an order of the seed, and archives as they are downloaded."""

import gzip
import pickle
import tarfile
from functools import partial

import datasets
import numpy as np
import pytest
import torch

from dipole.core.utils.errors import ConfigError, DataError
from dipole.core.utils.seeding import Seeds
from dipole.vision import prepare
from dipole.vision.data import DataConfig, load
from dipole.vision.decoding import decode
from dipole.vision.image_set import ShardByShard, image_order
from dipole.vision.sources import Decoding, open_source
from dipole.vision.sources.streamed import Forward
from dipole.vision.sources.webdataset import braces
from tests.runs import refused, run_of
from tests.vision.made import image_table, make_adapter, opened, png, python2, tar

EACH, SHARDS = 8, 5


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("DIPOLE_CACHE", str(folder))
    return folder


@pytest.fixture
def shards(tmp_path):
    """Five tar files of eight images, numbered through, of classes 0 to 3."""
    folder = tmp_path / "shards"
    folder.mkdir()
    for s in range(SHARDS):
        members = []
        for i in range(s * EACH, (s + 1) * EACH):
            members += [(f"a/{i:04d}.png", png(i)), (f"a/{i:04d}.cls", str(i % 4).encode())]
        tar(folder / f"train-{s:03d}.tar", members)
    return folder


def pattern(folder):
    return f"wds:{folder}/train-{{000..{SHARDS - 1:03d}}}.tar"


def test_shards_are_read_by_file_folder_star_and_list(shards, tmp_path):
    images = opened(pattern(shards), size=8)
    assert len(images) == SHARDS * EACH
    assert images.labels.tolist() == [i % 4 for i in range(SHARDS * EACH)]
    index = torch.tensor([39, 0, 17])
    expected = np.stack([decode(png(int(i)), 8) for i in index]).transpose(0, 3, 1, 2)
    np.testing.assert_array_equal(images.images[index].numpy(), expected)
    whole = opened(pattern(shards), size=8).fingerprint
    two = "::".join(f"{shards}/train-{part}.tar" for part in ("00[0-2]", "{003..004}"))
    for source in (f"wds:{shards}", f"wds:{shards}/*.tar", f"wds:{two}"):
        assert opened(source, size=8).fingerprint == whole
    for path in list(shards.glob("*00[34].tar")):
        path.rename(shards / f"val-{path.stem[-1]}.tar")
    parts = load(DataConfig(source=f"wds:{shards}", size=8), Seeds(0))
    assert (len(parts.train), len(parts.test)) == (3 * EACH, 2 * EACH)
    members = [("x.mask.png", png(5)), ("x.png", png(0)), ("x.json", b'\xef\xbb\xbf{"label": "dog"}')]
    members += [("y.image.png", png(1)), ("y.label.cls", b"cat")]
    tar(tmp_path / "0.tar", [*members, ("z.v1.png", png(2)), ("z.v2.png", png(3))])
    said = r"2 images of wds:.* left out: .*x\.mask\.png \(a second image of the sample.*z\.v2\.png"
    with pytest.warns(UserWarning, match=said):
        images = opened(f"wds:{tmp_path}", size=8)
    assert (images.labels.tolist(), images.class_names) == ([1, 0, -1], ("cat", "dog"))
    assert torch.equal(images.images[torch.tensor([0])], torch.from_numpy(decode(png(0), 8)).permute(2, 0, 1)[None])
    links = [("b.png", tarfile.LNKTYPE, "x.png"), ("b.cls", tarfile.SYMTYPE, "./y.label.cls")]
    with tarfile.open(tmp_path / "0.tar", "a") as archive:
        for name, kind, target in [*links, ("c.png", tarfile.SYMTYPE, "../x.png")]:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, target
            archive.addfile(info)
    with pytest.warns(UserWarning, match=r"3 images .*: c\.png \(a link to \.\./x\.png, which is not before it\)"):
        images = opened(f"wds:{tmp_path}", size=8)
    assert images.labels.tolist() == [1, 0, -1, 0]
    assert torch.equal(*images.images[torch.tensor([0, 3])])


@pytest.mark.parametrize("names", [
    ("imagenet1k-train-0000", "imagenet1k-validation-00"), ("train/0", "val/0"), ("train/shard-0", "val/shard-0"),
    ("cifar10-train-0", "cifar10-test"), ("train-00000-of-00002 train-00001-of-00002", "test-00000-of-00001"),
])  # fmt: skip
def test_names_of_shards_and_of_their_folders_tell_the_splits(tmp_path, names):
    for part in names:
        for name in part.split():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            tar(tmp_path / f"{name}.tar", [("x.png", png(len(part)))])
    parts = load(DataConfig(source=f"wds:{tmp_path}{'/*' * ('/' in names[0])}/*.tar", size=8), Seeds(0))
    assert (len(parts.train), len(parts.test)) == (len(names[0].split()), 1)


@pytest.mark.parametrize(("text", "names"), [
    ("t-{008..011}.tar", ["t-008.tar", "t-009.tar", "t-010.tar", "t-011.tar"]),
    ("{a,b}-{0..1}", ["a-0", "a-1", "b-0", "b-1"]), ("{9..11}", ["9", "10", "11"]), ("plain.tar", ["plain.tar"]),
])  # fmt: skip
def test_braces_are_the_shells(text, names):
    assert braces(text) == names


def test_what_is_no_shard_is_said(shards, tmp_path):
    read = partial(opened, size=8)
    refused(DataError, r"1 of 6 shards is missing: .*train-005\.tar", read, f"wds:{shards}/train-{{000..005}}.tar")
    refused(DataError, "no shards", read, f"wds:{tmp_path}/x*.tar")
    nested = tmp_path / "classes.tar"  # as ImageNet's training images
    tar(nested, [("n01.tar", b"x"), ("n02.tar", b"x")])
    refused(DataError, "no images in the 1 shard of .* Unpack archives in it", read, f"wds:{nested}")
    refused(DataError, "classes.tar is a file that .* shards as wds:FILE.tar", read, nested)
    refused(DataError, "have to lie on a disk", read, "wds:https://somewhere/train-{000..005}.tar")
    for many in ("{0..99999999}", "{0..9999}-{0..9999}"):
        refused(DataError, "expands to more than 1000000 shards", read, f"wds:{tmp_path}/{many}.tar")
    path = shards / "train-000.tar"
    (tmp_path / "a[1].tar.gz").write_bytes(gzip.compress(path.read_bytes()))
    refused(DataError, "gunzip", read, f"wds:{tmp_path}/a[1].tar.gz")
    whole = path.read_bytes()
    for cut in (9000, 512 * (len(whole.rstrip(b"\0")) // 512 + 1)):  # within an image, and before the mark at the end
        path.write_bytes(whole[:cut])
        refused(DataError, r"train-000\.tar is damaged .*: (unexpected end|it was cut off)", read, f"wds:{shards}")
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    refused(DataError, r"train-000\.tar is damaged.*git lfs pull", read, f"wds:{shards}")


def test_the_index_is_kept_and_made_again_where_it_is_damaged_or_old(shards, cache):
    source = open_source(pattern(shards), Decoding(size=8))
    images = source.read("train")
    kept = sorted(cache.rglob("*.json"))
    assert len(kept) == SHARDS
    before = [path.stat().st_mtime_ns for path in kept]
    source.read("train")
    assert [path.stat().st_mtime_ns for path in kept] == before
    kept[0].write_text(kept[0].read_text()[:50])
    assert source.read("train").fingerprint == images.fingerprint
    tar(shards / "train-000.tar", [("b/1.png", png(99)), ("b/1.cls", b"7")])
    refused(DataError, "has changed while it was in use", images.images.__getitem__, torch.tensor([3]))
    assert source.read("train").labels[0] == 7


def test_each_image_once_shard_after_shard_in_an_order_of_the_seed():
    shard_of = torch.arange(40) // 8
    order = ShardByShard(shard_of, 1, Seeds(0))
    rows = [order.rows(epoch) for epoch in range(2)]
    for each in rows:
        assert sorted(each.tolist()) == list(range(40))
        assert len(torch.unique_consecutive(shard_of[each])) == 5  # without a buffer no two shards mix
    assert not torch.equal(*rows)
    assert torch.equal(rows[0], ShardByShard(shard_of, 1, Seeds(0)).rows(0))
    mixed = ShardByShard(shard_of, 12, Seeds(0)).rows(0)
    assert sorted(mixed.tolist()) == list(range(40))
    sequence = rows[0].tolist()  # the order of the shards is that of the seed. The buffer moves no image further
    assert max(abs(sequence.index(int(row)) - place) for place, row in enumerate(mixed)) < 12 + 8


def adapter(source, rank=0, world_size=1, **data):
    data = {"source": source, "size": 10, **data}
    table = {"encoder": {"width": 4, "dim": 8}, "augment": {"size": 8}, "data": data, "probe": {"probes": []}}
    return make_adapter(table, 8, rank=rank, world_size=world_size)


@pytest.fixture
def parquet(tmp_path):
    """A folder as the Hub has them: two files of `train`, one of `test`."""
    names = datasets.ClassLabel(names=["a", "b", "c"])
    folder = tmp_path / "hub"
    folder.mkdir()
    files = {"train-00000-of-00002": range(18), "train-00001-of-00002": range(18, 30), "test-0": range(6)}
    for name, rows in files.items():
        made = image_table(map(png, rows), label=[i % 3 for i in rows]).cast_column("label", names)
        made.to_parquet(str(folder / f"{name}.parquet"))
    return folder


@pytest.fixture(params=["shards", "stream", "memory"])
def source(request, shards, parquet):
    return {
        "shards": {"source": pattern(shards), "buffer": 16},
        "stream": {"source": f"hub:{parquet}", "streaming": True, "buffer": 16},
        "memory": {"source": str(parquet)},
    }[request.param]


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.views, b.views, strict=True)) and torch.equal(a.rows, b.rows)


def test_an_epoch_goes_on_in_its_middle_bit_for_bit(source):
    first = adapter(**source)
    whole = list(first.batches(1))
    assert len(whole) == first.steps_per_epoch
    rest = list(adapter(**source).batches(1, start=2))
    assert len(rest) == len(whole) - 2 >= 1
    assert all(equal(a, b) for a, b in zip(whole[2:], rest, strict=True))
    for other in (next(iter(first.batches(0))).views[0], whole[0].views[1]):
        assert not torch.equal(whole[0].views[0], other)


def test_the_global_batch_is_one_for_any_number_of_ranks(source):
    several = (adapter(rank=rank, world_size=4, **source).batches(0) for rank in range(4))
    for one, *parts in zip(adapter(**source).batches(0), *several, strict=True):
        for name in ("rows", "labels"):
            assert torch.equal(getattr(one, name), torch.cat([getattr(part, name) for part in parts]))
        for number, view in enumerate(one.views):
            assert torch.equal(view, torch.cat([part.views[number] for part in parts]))


def test_a_stream_is_counted_once_and_with_a_length_never(parquet, cache, shards):
    stream = open_source(f"hub:{parquet}", Decoding(size=8, streaming=True))
    assert sorted(stream.splits) == ["test", "train"]
    images, plain = stream.read("train"), opened(parquet, size=8)
    assert (images.class_names, images.labels.tolist()) == (plain.class_names, plain.labels.tolist())
    assert torch.equal(torch.cat(list(images.images.split(7))), plain.images)
    assert len(list(cache.rglob("*.json"))) == 1
    assert image_order(images, Seeds(0)).shard.tolist() == [0] * 18 + [1] * 12
    stream = partial(opened, f"hub:{parquet}", size=8, streaming=True)
    assert (len(stream(length=20)), stream(length=20).labels) == (20, None)
    assert len(list(cache.rglob("*.json"))) == 1  # that of the stream that was counted
    longer = stream(length=50).images
    refused(DataError, "ends after 30 images", longer.__getitem__, torch.tensor([40]))
    config = DataConfig(source=str(parquet), pretrain=pattern(shards), length=24, buffer=8, size=8)
    parts = load(config, Seeds(0))  # pretraining on a stream, with labelled probes
    assert (len(parts.pretrain), len(parts.train), len(parts.test)) == (24, 30, 6)
    assert isinstance(parts.train.images, torch.Tensor)


def test_rows_in_order_are_read_once_and_any_row_can_be_read():
    opened = []

    def begin(shard):
        opened.append(shard)
        return iter(range(shard * 10, shard * 10 + 10))

    reader = Forward(begin, [0, 10, 20, 30], 12, lambda row: bytes([row]), "x")
    assert [reader(row)[0] for row in (3, 1, 9, 0, 12, 15, 11, 10, 19, 25)] == [3, 1, 9, 0, 12, 15, 11, 10, 19, 25]
    assert opened == [0, 1, 2]
    assert [reader(row)[0] for row in (0, 29)] == [0, 29]
    assert opened == [0, 1, 2, 0]


def test_settings_without_a_stream_and_blocks_of_one_are_refused(shards, parquet):
    for data in ({"length": 20}, {"buffer": 9}):
        refused(ValueError, "no effect without a stream", DataConfig, **data)
    for source, message in ((pattern(shards), r"Leave vision\.data\.streaming out"), ("digits", "cannot be streamed")):
        refused(DataError, message, load, DataConfig(source=source, streaming=True), Seeds(0))
    table = {"data": {"source": f"hub:{parquet}", "streaming": True, "size": 8}}
    for given in ({"method": "blocks"}, {"pairs": "labels", "images_per_class": 2}):
        refused(ConfigError, "drawn by class .* one image after another", make_adapter, table | given, 6)
    assert isinstance(make_adapter(table | {"pairs": "labels"}, 6)._order, ShardByShard)


def test_a_run_on_shards(shards, tmp_path):
    settings = [f"data.source={pattern(shards)}", "data.size=10", "augment.size=8", "encoder.width=4"]
    settings = [f"vision.{each}" for each in [*settings, "probe.probes=['knn']"]]
    settings += ["train.epochs=", "train.steps=3", "train.batch_size=8"]
    record = run_of("digits-simclr", tmp_path / "runs", *settings)
    assert record.data["sizes"] == {"pretrain": 24, "train": 24, "test": 16}


def unpacked(work, tmp_path, archive, members):
    """Pack members as a downloaded archive, prepare them, and return the folder of the data set."""
    downloads, folder = tmp_path / "downloads", tmp_path / "folder"
    downloads.mkdir(parents=True, exist_ok=True)
    folder.mkdir(exist_ok=True)
    tar(downloads / archive, members.items(), "w:gz")
    work(downloads, folder)
    return folder


def pickled(table):
    return b"\x80\2" + python2(table) + b"."


def test_downloaded_archives_of_cifar_and_stl10(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (6, 5, 3072), dtype=np.uint8)
    batches = {}
    for name, rows in zip([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"], pixels, strict=True):
        batches[name] = {b"batch_label": name.encode(), b"labels": [0, 2, 1, 1, 0], b"data": rows}
    assert np.array_equal(pickle.loads(pickled(batches["test_batch"]), encoding="bytes")[b"data"], pixels[5])
    batches["batches.meta"] = {b"label_names": [b"cat", b"dog", b"owl"], b"num_vis": 9}
    inside = "cifar-10-batches-py"
    members = {f"{inside}/{name}": pickled(table) for name, table in batches.items()}
    folder = unpacked(prepare.cifar10, tmp_path, "cifar-10-python.tar.gz", members) / inside
    parts = load(DataConfig(source=str(folder)), Seeds(0))
    assert np.array_equal(parts.train.images[5:10], pixels[1].reshape(5, 3, 32, 32))
    assert (len(parts.train), parts.test.counts()) == (25, {"cat": 2, "dog": 2, "owl": 1})
    code = b"cos\nmkdir\n(U\4evilt R."
    for damaged, said in ((code, "asks for os.mkdir, which is not called"), (members[f"{inside}/test_batch"][:99], "")):
        (folder / "data_batch_3").write_bytes(damaged)
        refused(DataError, f"cannot be read as arrays: .*{said}", load, DataConfig(source=str(folder)), Seeds(0))
    labels = {b"coarse_labels": [0] * 5, b"fine_labels": [99, 0, 5, 5, 7]}
    tables = {split: labels | {b"data": rows} for split, rows in zip(("train", "test"), pixels[:2], strict=True)}
    tables["meta"] = {b"fine_label_names": [b"f%d" % i for i in range(100)], b"coarse_label_names": [b"x"]}
    members = {f"cifar-100-python/{name}": pickled(table) for name, table in tables.items()}
    folder = unpacked(prepare.cifar100, tmp_path / "100", "cifar-100-python.tar.gz", members)
    assert opened(folder).counts() == opened(folder / "cifar-100-python").counts()
    assert opened(folder).counts() == {"f99": 1, "f0": 1, "f5": 2, "f7": 1}
    pixels = np.random.default_rng(0).integers(0, 256, (2, 3, 96, 96), dtype=np.uint8).tobytes()
    members = {f"stl10_binary/{split}_X.bin": pixels for split in ("train", "test", "unlabeled")}
    members |= {f"stl10_binary/{split}_y.bin": bytes([1, 10]) for split in ("train", "test")}
    members |= {"stl10_binary/class_names.txt": b"a b c d e f g h i j"}
    folder = unpacked(prepare.stl10, tmp_path, "stl10_binary.tar.gz", members) / "stl10_binary"
    parts = load(DataConfig(source=str(folder), pretrain_split="unlabeled"), Seeds(0))
    assert (len(parts.pretrain), parts.train.labels.tolist()) == (2, [0, 9])
    other, said = {"cifar-10-batches-bin/data_batch_1.bin": b"x"}, r"holds no cifar-10-batches-py/batches\.meta"
    refused(DataError, said, unpacked, prepare.cifar10, tmp_path / "x", "cifar-10-python.tar.gz", other)
    said = r"no stl10_binary/train_X\.bin"
    refused(DataError, said, unpacked, prepare.stl10, tmp_path / "x", "stl10_binary.tar.gz", other)
