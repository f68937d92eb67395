"""Preparation of downloaded archives of image sets, for `dipole data get`."""

from pathlib import Path

from dipole.core.utils.download import unpack
from dipole.core.utils.errors import DataError


def cifar10(downloads: Path, folder: Path) -> None:
    """Unpack CIFAR-10 in the version for Python."""
    _unpack(downloads / "cifar-10-python.tar.gz", folder, "cifar-10-batches-py/batches.meta")


def cifar100(downloads: Path, folder: Path) -> None:
    """Unpack CIFAR-100 in the version for Python."""
    _unpack(downloads / "cifar-100-python.tar.gz", folder, "cifar-100-python/meta")


def stl10(downloads: Path, folder: Path) -> None:
    """Unpack STL-10's binary version."""
    _unpack(downloads / "stl10_binary.tar.gz", folder, "stl10_binary/train_X.bin")


def _unpack(archive: Path, folder: Path, wanted: str) -> None:
    """Unpack an archive that has a file of this name."""
    unpack(archive, folder)
    if not (folder / wanted).is_file():
        raise DataError(f"{archive} holds no {wanted}: it is another version of the data.")
