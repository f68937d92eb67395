"""Preparation of downloaded archives of image sets, for `dipole data get`."""

from functools import partial
from pathlib import Path

from dipole.core.utils.download import unpack
from dipole.core.utils.errors import DataError


def _unpack(archive: str, wanted: str, downloads: Path, folder: Path) -> None:
    """Unpack an archive that has a file of this name."""
    unpack(downloads / archive, folder)
    if not (folder / wanted).is_file():
        raise DataError(f"{downloads / archive} holds no {wanted}: it is another version of the data.")


cifar10 = partial(_unpack, "cifar-10-python.tar.gz", "cifar-10-batches-py/batches.meta")
cifar100 = partial(_unpack, "cifar-100-python.tar.gz", "cifar-100-python/meta")
stl10 = partial(_unpack, "stl10_binary.tar.gz", "stl10_binary/train_X.bin")
