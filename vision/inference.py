"""Features of image files from a trained encoder, with the preprocessing of its evaluation."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dipole.core.train.inference import Embedder, Inputs
from dipole.core.utils.backbone import quietly
from dipole.core.utils.errors import DataError, OptionError
from dipole.core.utils.pickles import refusal, safetensors_only
from dipole.vision.decoding import attempt, decode, file_bytes
from dipole.vision.sources.folder import SUFFIXES, image_files

FEATURES = ("encoder", "embedding")  # the values of vision.probe.features


class ImageEmbedder(Embedder):
    """Image files to features.

    Args:
        features: images (n, C, H, W) uint8 -> features.
        channels: C, 3, or 1 for grey images.
        decoded: short side after decoding, then a centred square (vision.data.size); None as stored.
        batch_size: images per forward pass; default as in the run's evaluation.
    """

    def __init__(
        self, features: Callable[[Tensor], Tensor], channels: int, decoded: int | None = None, batch_size: int = 512
    ) -> None:
        self.features, self.channels, self.decoded, self.batch_size = features, channels, decoded, batch_size

    def read(self, source: str, column: str | None = None) -> Inputs:
        return read_images(source, column, self.decoded, self.channels)

    def vectors(self, rows: list[Any]) -> Tensor:
        return by_shape(rows, lambda images: self.features(images).flatten(1).float().cpu())


def by_shape(rows: list[Tensor], function: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a function of batches to images (C, H, W) of any sizes, with images of one size together."""
    places: dict[torch.Size, list[int]] = {}
    for place, row in enumerate(rows):
        places.setdefault(row.shape, []).append(place)
    parts = [function(torch.stack([rows[place] for place in group])) for group in places.values()]
    order = torch.tensor([place for group in places.values() for place in group])
    return torch.cat(parts)[order.argsort()]


def read_images(source: str, column: str | None, decoded: int | None, channels: int) -> Inputs:
    """Read one image, or all of a folder and its subfolders in the order of their names, as uint8 (C, H, W)."""
    if column is not None:
        raise OptionError(f"--column {column}: image files have no columns.")
    path = Path(source).expanduser()
    if path.is_dir():
        files = image_files(path)
        names = [file.relative_to(path).as_posix() for file in files]
    elif path.is_file():
        files, names = [path], [path.name]
    else:
        raise DataError(f"{source} is neither an image nor a folder of images.")
    if not files:
        raise DataError(f"the folder {path} holds no images ({', '.join(sorted(SUFFIXES))}).")

    def rows() -> Iterator[tuple[str, Tensor]]:
        for name, file in zip(names, files, strict=True):
            found = attempt(partial(file_bytes, file), lambda data: decode(data, decoded))
            if isinstance(found, str):
                raise DataError(f"{file} cannot be decoded ({found}). Repair it or take it out of the folder.")
            yield name, to_tensor(found, channels)

    return Inputs("path", rows(), len(files))


def to_tensor(picture: np.ndarray, channels: int) -> Tensor:
    """Convert an RGB image (H, W, 3) uint8 to (C, H, W). One channel is its grey level (ITU-R BT.601), as in Pillow."""
    if channels == 1:
        return torch.from_numpy(np.array(Image.fromarray(picture).convert("L")))[None]
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)


def onnx_features(file: Path) -> Callable[[Tensor], Tensor]:
    """Return the features of an exported ONNX file as a function of pixels (n, C, H, W)."""
    from dipole.core.train.onnx_file import check_onnx, run_onnx

    check_onnx()
    return lambda pixels: run_onnx(file, {"pixel_values": pixels.cpu()})


def transformers_features(folder: Path, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return the features of a saved model of transformers as a function of its `pixel_values`."""
    from transformers import AutoConfig, AutoModel

    from dipole.vision.encoders.hub import read_pooled
    from dipole.vision.modeling_dipole_vision import DipoleVisionConfig, DipoleVisionModel

    AutoConfig.register(DipoleVisionConfig.model_type, DipoleVisionConfig, exist_ok=True)
    AutoModel.register(DipoleVisionConfig, DipoleVisionModel, exist_ok=True)
    if refused := refusal(folder):
        raise DataError(f"{folder} cannot be loaded: {refused}.")
    try:
        with quietly():
            model: Any = AutoModel.from_pretrained(folder, use_safetensors=safetensors_only())
    except Exception as error:  # transformers, safetensors and the model each raise their own
        raise DataError(f"{folder} cannot be loaded: {str(error).partition(chr(10))[0]}") from error
    model.eval().to(device)
    return lambda pixels: read_pooled(model, pixels.to(device))
