"""Preparation of downloaded archives of image sets, for `dipole data get`."""

import shutil
from pathlib import Path

import numpy as np

from dipole.core.utils.download import unpack
from dipole.core.utils.errors import DataError
from dipole.core.utils.files import scratch

PIXELS = 3 * 32 * 32


def cifar10(downloads: Path, folder: Path) -> None:
    """Write train.npz and test.npz from CIFAR-10's binary version."""
    parts = {"train": [f"data_batch_{number}.bin" for number in range(1, 6)], "test": ["test_batch.bin"]}
    _cifar(downloads / "cifar-10-binary.tar.gz", folder, "cifar-10-batches-bin", parts, "batches.meta.txt", 1)


def cifar100(downloads: Path, folder: Path) -> None:
    """Write train.npz and test.npz from CIFAR-100's binary version, with its 100 fine classes."""
    parts = {"train": ["train.bin"], "test": ["test.bin"]}
    _cifar(downloads / "cifar-100-binary.tar.gz", folder, "cifar-100-binary", parts, "fine_label_names.txt", 2)


def stl10(downloads: Path, folder: Path) -> None:
    """Unpack the files of STL-10's binary version."""
    archive = downloads / "stl10_binary.tar.gz"
    with scratch(folder / "unpacked") as inner:
        unpack(archive, inner)
        found = sorted(inner.rglob("train_X.bin"))
        if not found:
            raise DataError(f"{archive} holds no train_X.bin: it is not STL-10's binary version.")
        for file in found[0].parent.iterdir():
            shutil.move(file, folder / file.name)


def _cifar(
    archive: Path, folder: Path, inside: str, parts: dict[str, list[str]], listed: str, label_bytes: int
) -> None:
    """Convert records: labels, the last of which is the finest, and 1,024 bytes each of red, green and blue."""
    with scratch(folder / "unpacked") as inner:
        unpack(archive, inner)
        try:
            names = (inner / inside / listed).read_text(encoding="ascii").split()
            for part, files in parts.items():
                raw = np.concatenate([np.fromfile(inner / inside / file, np.uint8) for file in files])
                if len(raw) % (PIXELS + label_bytes):
                    raise DataError(f"{archive}: {', '.join(files)} hold no whole number of images.")
                rows = raw.reshape(-1, PIXELS + label_bytes)
                images = rows[:, label_bytes:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
                labels = rows[:, label_bytes - 1].astype(np.int64)
                np.savez(folder / f"{part}.npz", images=images, labels=labels, class_names=np.array(names))
        except FileNotFoundError as error:
            missing = Path(error.filename).name
            raise DataError(f"{archive} holds no {inside}/{missing}: it is not the binary version of CIFAR.") from error
