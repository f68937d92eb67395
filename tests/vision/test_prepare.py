"""What `dipole data get` makes of archives in the layout of their authors."""

import numpy as np
import pytest
import torch

from dipole.core.utils.errors import DataError
from dipole.core.utils.seeding import Seeds
from dipole.vision import prepare
from dipole.vision.data import DataConfig, load
from tests.vision.made import tar


def packed(path, members):
    tar(path, members.items(), "w:gz")


@pytest.fixture
def folders(tmp_path):
    downloads, folder = tmp_path / "downloads", tmp_path / "folder"
    downloads.mkdir()
    folder.mkdir()
    return downloads, folder


def images(n, seed):
    return np.random.default_rng(seed).integers(0, 256, (n, 3, 32, 32), dtype=np.uint8)


def records(pixels, *labels):
    return b"".join(bytes(each) + row.tobytes() for *each, row in zip(*labels, pixels, strict=True))


def test_cifar10(folders):
    downloads, folder = folders
    names = [f"class{i}" for i in range(10)]
    inside = "cifar-10-batches-bin"
    members = {f"{inside}/data_batch_{i}.bin": records(images(4, i), [i, 0, 9, 3]) for i in range(1, 6)}
    members |= {f"{inside}/test_batch.bin": records(images(3, 9), [1, 2, 3])}
    packed(downloads / "cifar-10-binary.tar.gz", members | {f"{inside}/batches.meta.txt": "\n".join(names).encode()})
    prepare.cifar10(downloads, folder)
    assert sorted(path.name for path in folder.iterdir()) == ["test.npz", "train.npz"]
    parts = load(DataConfig(source=str(folder / "train.npz"), test=str(folder / "test.npz")), Seeds(0))
    assert torch.equal(parts.train.images[4:8], torch.from_numpy(images(4, 2)))
    assert parts.train.labels[4:8].tolist() == [2, 0, 9, 3]
    assert parts.test.class_names == tuple(names)


def test_cifar100_has_its_fine_classes(folders):
    downloads, folder = folders
    members = {
        "cifar-100-binary/train.bin": records(images(2, 0), [7, 8], [70, 81]),
        "cifar-100-binary/test.bin": records(images(1, 1), [1], [12]),
        "cifar-100-binary/fine_label_names.txt": "\n".join(f"f{i}" for i in range(100)).encode(),
    }
    packed(downloads / "cifar-100-binary.tar.gz", members)
    prepare.cifar100(downloads, folder)
    parts = load(DataConfig(source=str(folder / "train.npz"), test=str(folder / "test.npz")), Seeds(0))
    assert parts.train.labels.tolist() == [70, 81]
    assert parts.test.counts() == {"f12": 1}


def test_stl10(folders):
    downloads, folder = folders
    pixels = np.random.default_rng(0).integers(0, 256, (2, 3, 96, 96), dtype=np.uint8).tobytes()
    members = {f"stl10_binary/{split}_X.bin": pixels for split in ("train", "test", "unlabeled")}
    members |= {f"stl10_binary/{split}_y.bin": bytes([1, 10]) for split in ("train", "test")}
    packed(downloads / "stl10_binary.tar.gz", members | {"stl10_binary/class_names.txt": b"\n".join([b"a"] * 10)})
    prepare.stl10(downloads, folder)
    parts = load(DataConfig(source=str(folder), pretrain_split="unlabeled"), Seeds(0))
    assert (len(parts.pretrain), parts.train.labels.tolist()) == (2, [0, 9])


def test_another_archive_is_said(folders):
    downloads, folder = folders
    packed(downloads / "cifar-10-binary.tar.gz", {"cifar-10-batches-py/data_batch_1": b"x"})
    with pytest.raises(DataError, match=r"holds no cifar-10-batches-bin/batches\.meta\.txt"):
        prepare.cifar10(downloads, folder)
    packed(downloads / "stl10_binary.tar.gz", {"x": b"x"})
    with pytest.raises(DataError, match=r"no train_X\.bin"):
        prepare.stl10(downloads, folder)
