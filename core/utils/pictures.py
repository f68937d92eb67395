"""Pictures of files as viewers show them: upright, with 8 bits a channel."""

import io
from contextlib import suppress

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from dipole.core.utils.errors import OptionError
from dipole.core.utils.text import warn

MANY_PIXELS = 25_000_000
DENSE = 400  # pixels for a byte, of which photos have at most 100
TWELVE = 4095  # white of 12 bits
DARK = (
    f"the numbers of an image with 16 bits end below {TWELVE + 1}, and white is 65535: it is nearly black. If it has "
    "12 bits, save 16 times its numbers"
)
BITS, WHITE, CHANNELS = 258, 262, 277  # tags of a TIFF; WHITE is 0 where the number 0 is white


def open_rgb(data: bytes, size: int | None = None) -> Image.Image:
    """Open an image as RGB with 8 bits a channel, upright. A JPEG may be decoded smaller, to at least `size`."""
    with open_image(data) as image:
        if size is not None:
            image.draft("RGB", (size, size))
        picture = as_rgb(image)
        turn_upright(picture)
        return picture


def as_rgb(image: Image.Image) -> Image.Image:
    """Convert an image to RGB with 8 bits a channel."""
    is_deep = any(";16" in str(tile[3]) for tile in getattr(image, "tile", ()))  # Pillow takes the upper 8 of 16 bits
    picture = eight_bits(image)
    channels = getattr(image, "tag_v2", {}).get(CHANNELS, 3)
    if channels > 3 and image.mode in ("RGB", "RGBX"):
        warn(
            f"only the first three of the {channels} channels of a TIFF are read. To train on all, save them as "
            "`images` uint8 (n, H, W, C) in an .npz"
        )
    if picture.mode == "P" and "transparency" in picture.info:
        picture = picture.convert("RGBA")  # otherwise Pillow warns
    found = picture.convert("RGB")
    if is_deep and 0 < np.asarray(found).max() <= TWELVE >> 8:
        warn(DARK)
    return found


def open_image(data: bytes) -> Image.Image:
    """Open an image without decoding it. Raise ValueError if it cannot be one, or would take gigabytes of memory."""
    if not data:
        raise ValueError("the file is empty")
    if data.startswith(b"version https://git-lfs"):
        raise ValueError("a pointer of Git LFS in place of the image. Fetch it with: git lfs pull")
    try:
        image = Image.open(io.BytesIO(data))
    except UnidentifiedImageError:
        reason = f"cannot identify image file, which begins with {data[:16]!r}"
        if data[:4] in (b"II*\0", b"MM\0*"):
            reason = "a TIFF that Pillow does not read. Save it in 8-bit RGB, or all channels as `images` in an .npz"
        raise ValueError(reason) from None
    if image.format == "EPS":  # Pillow would run Ghostscript
        raise ValueError("PostScript is not read; save it as PNG")
    pixels = image.width * image.height
    if pixels > MANY_PIXELS and pixels > DENSE * len(data):
        shown = f"{image.width} x {image.height} pixels in {len(data)} bytes"
        raise ValueError(f"{shown} would take gigabytes of memory. Save it smaller")
    return image


def turn_upright(picture: Image.Image) -> None:
    """Turn a picture in place as its orientation tag (EXIF or XMP) says, as viewers do."""
    with suppress(Exception):  # damaged EXIF data say nothing, and the pixels are readable
        ImageOps.exif_transpose(picture, in_place=True)


def eight_bits(image: Image.Image) -> Image.Image:
    """Scale a grey image of 16 bits, or of floats in [0, 1], to 256 levels. Return other images unchanged.

    Pillow's own conversion clips such values at 255. Raise OptionError if the white level is unknown.
    """
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        values = np.asarray(image).astype(np.float64) / 65535
        tags = getattr(image, "tag_v2", {})  # of a TIFF
        if tags.get(BITS) == (12,):  # which Pillow does not scale
            values *= 65535 / TWELVE
        elif 0 < values.max() <= TWELVE / 65535:
            warn(DARK)
        if tags.get(WHITE) == 0:
            values = 1 - values
    elif image.mode == "I":
        raise OptionError(
            "whole numbers of 32 bits or with a sign do not say which value is white. Save it with 8 bits a channel"
        )
    elif image.mode == "F":
        values = np.asarray(image).astype(np.float64)
        if not (values.min() >= 0 and values.max() <= 1):
            raise OptionError(
                f"its numbers go from {values.min():g} to {values.max():g}, and floating-point pixels lie in [0, 1]; "
                "scale them, or save it with 8 or 16 bits a channel"
            )
    else:
        return image
    found = Image.fromarray(np.round(values.clip(0, 1) * 255).astype(np.uint8))
    found.info = dict(image.info)  # the orientation
    return found
