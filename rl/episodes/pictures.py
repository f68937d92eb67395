"""Pictures of episodes: learning curves of several methods and seeds, and videos."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dipole.core.utils.drawing import new_figure
from dipole.core.utils.errors import ConfigError, DataError
from dipole.core.utils.extras import quoted
from dipole.core.utils.text import counted
from dipole.rl.episodes.history import Evaluation


def plot_curves(runs: Mapping[str, Sequence[Sequence[Evaluation]]], path: str | Path, title: str = "") -> Path:
    """Draw return over environment steps, one line for each method: mean over seeds, and their range.

    Of a method with one seed the range is that of the episodes.

    Args:
        runs: method -> the history of each seed.
        path: .png, .svg or .pdf.
        title: above the picture.

    Returns:
        The file.

    Raises:
        ConfigError: for another suffix, or without matplotlib.
        DataError: if there is nothing to draw: no method, or one whose seeds have no evaluation in common.
    """
    path = Path(path)
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"curves are drawn as .png, .svg or .pdf, not {path.suffix or path.name!r}.")
    if not runs:
        raise DataError("there are no runs to draw.")
    figure = new_figure(6, 4, "rl")
    axes = figure.subplots()
    for method, histories in runs.items():
        seen = [{each.environment_steps for each in history} for history in histories]
        steps = sorted(set.intersection(*seen)) if seen else []
        if not steps:
            raise DataError(
                f"the seeds of {method!r} have no evaluation at the same environment steps: nothing to draw."
            )
        common = [[each for each in history if each.environment_steps in steps] for history in histories]
        values = np.array([[each.mean for each in history] for history in common])
        seeds, spread = f"{counted(len(values), 'seed')}", list(values.T)
        if len(values) == 1:
            seeds, spread = "1 seed", [np.array(each.returns) for each in common[0]]
        (line,) = axes.plot(steps, values.mean(0), label=f"{method} ({seeds})")
        low, high = [each.min() for each in spread], [each.max() for each in spread]
        axes.fill_between(steps, low, high, alpha=0.2, color=line.get_color())
    axes.set(xlabel="environment steps", ylabel="return of an episode", title=title)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


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
