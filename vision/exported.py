"""Open exported image encoders, and any image model of transformers, for `dipole embed`."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dipole.core.train.inference import Embedder

PROCESSOR, CONFIG, ONNX = "preprocessor_config.json", "config.json", "model.onnx"


def open_folder(folder: Path, device: torch.device, features: str | None) -> Embedder | None:
    """Open a folder as an encoder of image files. Return None if it holds no image encoder."""
    if not (folder / PROCESSOR).is_file():
        return None
    if (folder / ONNX).is_file():
        return _embedder(folder, _onnx(folder), device, features)
    try:
        kind = json.loads((folder / CONFIG).read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError):
        return None
    if kind is None:
        return None
    return _embedder(folder, _transformers(folder, device), device, features)


def _onnx(folder: Path) -> Callable[[Tensor], Tensor]:
    from dipole.core.train.onnx_file import check_onnx, run_onnx

    check_onnx()
    return lambda pixels: run_onnx(folder / ONNX, {"pixel_values": pixels.cpu()})


def _transformers(folder: Path, device: torch.device) -> Callable[[Tensor], Tensor]:
    from transformers import AutoConfig, AutoModel

    from dipole.core.utils.backbone import quietly
    from dipole.core.utils.errors import DataError
    from dipole.core.utils.pickles import refusal, safetensors_only
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
    return partial(read_pooled, model.eval().to(device))


def _embedder(folder: Path, read: Callable[[Tensor], Tensor], device: torch.device, features: str | None) -> Embedder:
    from transformers import AutoImageProcessor

    from dipole.core.train.inference import check_features
    from dipole.core.utils.errors import DataError
    from dipole.vision.inference import ProcessedEmbedder

    check_features(features, ("encoder",))
    try:
        processor = AutoImageProcessor.from_pretrained(folder)
    except Exception as error:  # transformers raises many types
        raise DataError(f"{folder / PROCESSOR} cannot be read: {str(error).partition(chr(10))[0]}") from error
    return ProcessedEmbedder(processor, read, device)
