"""Videos of episodes."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dipole.core.utils.errors import ConfigError, DataError
from dipole.core.utils.extras import quoted


def write_video(frames: Sequence[NDArray[np.uint8]], path: str | Path, fps: int = 25) -> Path:
    """Write frames (H, W, 3) as .gif, or as .mp4 where imageio has ffmpeg.

    Args:
        frames: one at least, (H, W, 3) uint8 each.
        path: NAME.gif or NAME.mp4.
        fps: frames a second, >= 1.

    Returns:
        The file.

    Raises:
        ConfigError: for another suffix, or .mp4 without ffmpeg.
        DataError: if there are no frames, or an environment without a render mode made them.
    """
    if not len(frames) or any(np.ndim(frame) != 3 for frame in frames):
        raise DataError("a video needs frames (H, W, 3): make the environment with render_mode='rgb_array'.")
    path = require_format(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".gif":
        from PIL import Image

        images = [Image.fromarray(frame) for frame in frames]
        images[0].save(path, save_all=True, append_images=images[1:], duration=max(round(1000 / fps), 20), loop=0)
    else:
        import imageio.v3

        imageio.v3.imwrite(path, np.stack(frames), fps=fps)
    return path


def require_format(path: str | Path) -> Path:
    """Return the path of a video. Raise ConfigError for another suffix, or .mp4 without ffmpeg."""
    path = Path(path)
    if path.suffix not in (".gif", ".mp4"):
        raise ConfigError(f"videos are written as .gif or .mp4, not {path.suffix or path.name!r}.")
    if path.suffix == ".mp4" and find_spec("imageio_ffmpeg") is None:
        raise ConfigError(f"{path} needs ffmpeg: pip install {quoted('imageio[ffmpeg]')}, or write a .gif instead.")
    return path
