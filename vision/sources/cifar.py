"""CIFAR-10 and CIFAR-100 in the version for Python, as torchvision leaves it: cifar-10-batches-py, cifar-100-python."""

import pickle
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dipole.vision.sources.arrays import Arrays, of_arrays
from dipole.vision.sources.base import Classes, Decoding, Source, register_source

TEN = {"train": "data_batch_?", "test": "test_batch", "meta": "batches.meta"}
HUNDRED = {"train": "train", "test": "test", "meta": "meta"}


def files_in(folder: Path) -> dict[str, list[Path]]:
    """Return the files of each part, or {} if the folder and those that torchvision makes in it are not CIFAR's."""
    for place in (folder, folder / "cifar-10-batches-py", folder / "cifar-100-python"):
        names = TEN if (place / TEN["meta"]).is_file() else HUNDRED
        files = {part: sorted(filter(Path.is_file, place.glob(name))) for part, name in names.items()}
        if all(files.values()):
            return files
    return {}


@register_source("a folder of CIFAR's own files", matches=lambda _, path: bool(files_in(path)))
def open_cifar(source: str, options: Decoding, wanted: Classes) -> Source:
    """Open a folder of pickled batches. Their fine labels are the classes. Nothing that a pickle names is called."""
    path = Path(source).expanduser()
    files = files_in(path)
    arrays: Arrays = {}
    for split in ("train", "test"):
        arrays[f"{split}_images"] = partial(_images, files[split])
        arrays[f"{split}_labels"] = partial(_listed, files[split], b"labels", b"fine_labels")
    arrays["class_names"] = lambda: _listed(files["meta"], b"label_names", b"fine_label_names").astype(str)
    return of_arrays(path, arrays, wanted)


def _images(files: list[Path]) -> np.ndarray:
    """Return images (n, 32, 32, 3). A row of a file has 1,024 bytes each of red, green and blue."""
    rows = [np.frombuffer(_read(file)[b"data"].state[-1], np.uint8) for file in files]
    return np.concatenate(rows).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)


def _listed(files: list[Path], *names: bytes) -> np.ndarray:
    """Join the lists of one of these names."""
    return np.array([each for table in map(_read, files) for name in names for each in table.get(name, ())])


def _read(file: Path) -> dict[bytes, Any]:
    with file.open("rb") as opened:
        return dict(_OnlyData(opened, encoding="bytes").load())


class _Array:
    """An array of NumPy as it is pickled: (version, shape, type, order, bytes)."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state


class _OnlyData(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in ("_reconstruct", "ndarray", "dtype"):  # of NumPy
            return lambda *_: _Array()
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not called")
