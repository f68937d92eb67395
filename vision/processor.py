"""The image processor that lies beside an exported encoder: transformers' own classes read its file."""

import json
from pathlib import Path
from typing import Any

from dipole.core.utils.files import atomic_write

FILE = "preprocessor_config.json"
BILINEAR = 2  # as Pillow counts


def write_processor(
    folder: Path, size: int, channels: int, mean: list[float] | None = None, std: list[float] | None = None
) -> None:
    """Resize the shorter side, take the centred square of `size` pixels, divide by 255; normalise where that is given.

    The same square as in evaluation; of images of another size it is resized before it is cut out, not after.
    """
    told: dict[str, Any] = {
        "image_processor_type": "BitImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": size},
        "resample": BILINEAR,
        "do_center_crop": True,
        "crop_size": {"height": size, "width": size},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": mean is not None,
        "do_convert_rgb": channels == 3,
    }
    if mean is not None:
        told |= {"image_mean": mean, "image_std": std}
    atomic_write(folder / FILE, json.dumps(told, indent=2) + "\n")
