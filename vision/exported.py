"""Open exported image encoders, and any image model of transformers, for `dipole embed`."""

from pathlib import Path
from typing import Any

import torch

from dipole.core.train.exports import check_onnx, open_onnx
from dipole.core.train.inference import Embedder, chosen_features
from dipole.core.utils.backbone import open_exported
from dipole.core.utils.errors import DataError, ReceivedError
from dipole.core.utils.received import read_json

PROCESSORS, CONFIG, ONNX = ("preprocessor_config.json", "processor_config.json"), "config.json", "model.onnx"


def open_folder(folder: Path, device: torch.device, features: str | None) -> Embedder | None:
    """Open a folder as an encoder of image files. Return None if it holds no image encoder."""
    told = [folder / name for name in PROCESSORS if (folder / name).is_file()]
    if not told:
        return None
    is_onnx = (folder / ONNX).is_file()
    try:
        if not is_onnx and read_json(folder / CONFIG).get("model_type") is None:
            return None
    except (ReceivedError, AttributeError):
        return None

    from transformers import AutoImageProcessor

    # Imported here: they need Pillow, and the folder may hold a text model.
    from dipole.vision.encoders.hub import CHANNELS, read_pooled, register_exports, unmasked
    from dipole.vision.image_ops import centre
    from dipole.vision.inference import ImageEmbedder

    if is_onnx:
        check_onnx()
        run = open_onnx(folder / ONNX)
    else:
        register_exports()
        model = open_exported(folder, device, "pixel_values", unmasked)
    chosen_features(features, ("encoder",))
    try:
        settings = read_json(told[0])
        settings = settings.get("image_processor", settings)
        processor = AutoImageProcessor.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # transformers raises many types
        raise DataError(f"{told[0]} cannot be read: {str(error).partition(chr(10))[0]}") from error

    channels = settings.get(CHANNELS, 3)
    options: dict[str, Any] = {"return_tensors": "pt", "input_data_format": "channels_first"}
    if channels not in (1, 3):  # Pillow takes a channel for transparency, or resizes no such image
        options |= {"do_resize": False, "do_center_crop": False, "do_rescale": False}

    def embedded(images: torch.Tensor) -> torch.Tensor:
        if channels not in (1, 3):
            images = centre(images, processor.crop_size["height"])
        pixels = processor(list(images), **options)["pixel_values"].float()
        if is_onnx:
            return run({"pixel_values": pixels.cpu()})
        with torch.no_grad():
            return read_pooled(model, pixels.to(device))

    return ImageEmbedder(embedded, channels, batch_size=128)
