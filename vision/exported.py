"""Image encoders that `dipole export` wrote, and any image model of transformers, for `dipole embed`."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from dipole.core.train.embedder import Embedder

PROCESSOR, CONFIG, ONNX = "preprocessor_config.json", "config.json", "model.onnx"
EARLIER = "dipole-vision"  # folders of earlier versions have no image processor


def open_folder(folder: Path, device: torch.device, features: str | None) -> Embedder | None:
    """Open a folder by what it holds; None where it is no image encoder that can be read."""
    if (folder / ONNX).is_file() and (folder / PROCESSOR).is_file():
        return _processed(folder, _onnx(folder), device, features)
    if not (folder / CONFIG).is_file():
        return None
    try:
        kind = json.loads((folder / CONFIG).read_text(encoding="utf-8")).get("model_type")
    except (ValueError, AttributeError):
        return None
    if kind == EARLIER or (kind is not None and (folder / PROCESSOR).is_file()):
        return _transformers(folder, kind == EARLIER, device, features)
    return None


def _onnx(folder: Path) -> Any:
    from dipole.core.train.onnx_file import check_onnx, run_onnx

    check_onnx()
    return lambda pixels: run_onnx(folder / ONNX, {"pixel_values": pixels.cpu()})


def _transformers(folder: Path, is_earlier: bool, device: torch.device, features: str | None) -> Embedder:
    from transformers import AutoConfig, AutoModel

    from dipole.core.utils.backbone import quietly
    from dipole.core.utils.errors import DataError
    from dipole.core.utils.pickles import refusal, safetensors_only
    from dipole.vision.encoders.hub import read_pooled
    from dipole.vision.export.transformers import DipoleVisionConfig, EarlierModel
    from dipole.vision.modeling_dipole_vision import DipoleVisionModel

    AutoConfig.register(DipoleVisionConfig.model_type, DipoleVisionConfig, exist_ok=True)
    AutoModel.register(DipoleVisionConfig, DipoleVisionModel, exist_ok=True)
    if refused := refusal(folder):
        raise DataError(f"{folder} cannot be loaded: {refused}.")
    try:
        library: Any = EarlierModel if is_earlier else AutoModel
        with quietly():
            found: Any = library.from_pretrained(folder, use_safetensors=safetensors_only())
    except Exception as error:  # transformers, safetensors and the model each raise their own
        raise DataError(f"{folder} cannot be loaded: {str(error).partition(chr(10))[0]}") from error
    model = found.eval().to(device)
    read = partial(read_pooled, model)
    if is_earlier:
        return _sized(read, model, device, features)
    return _processed(folder, read, device, features)


def _sized(read: Any, model: Any, device: torch.device, features: str | None) -> Embedder:
    from dipole.core.train.embedder import check_features
    from dipole.vision.embed import ImageEmbedder

    check_features(features, ("encoder",))
    return ImageEmbedder(read, model, model.config.image_size, model.config.channels, None, device)


def _processed(folder: Path, read: Any, device: torch.device, features: str | None) -> Embedder:
    from transformers import AutoImageProcessor

    from dipole.core.train.embedder import check_features
    from dipole.core.utils.errors import DataError
    from dipole.vision.embed import ProcessedEmbedder

    check_features(features, ("encoder",))
    try:
        processor = AutoImageProcessor.from_pretrained(folder)
    except Exception as error:  # as above
        raise DataError(f"{folder / PROCESSOR} cannot be read: {str(error).partition(chr(10))[0]}") from error
    return ProcessedEmbedder(processor, read, device)
