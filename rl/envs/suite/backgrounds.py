"""Pictures and videos behind the scene of a task, drawn as its sky."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dipole.core.utils.errors import ConfigError

_PICTURES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
# Opacity of the floor before the picture (google-research/distracting_control). The others have 0.3.
_FLOOR = {"reacher": 0.0, "walker": 1.0, "cheetah": 1.0}
_FLOORS = ("floor", "ground")


def videos_in(folder: str | Path, most: int | None) -> list[list[Path]]:
    """The videos of a folder, as the frames of each: folders of pictures, and every loose picture by itself.

    Folders may lie in folders (DAVIS: JPEGImages/480p/bear/00000.jpg). Both are in the order of their names.

    Args:
        folder: where to look.
        most: use the first ones, at most so many. None for all.

    Raises:
        ConfigError: there is no such folder, or no picture in it.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"backgrounds={str(folder)!r} is no folder. Allowed: one of pictures, or of folders of them.")
    found: dict[Path, list[Path]] = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() not in _PICTURES or not path.is_file():
            continue
        if path.parent == folder:
            found[path] = [path]
        else:
            found.setdefault(path.parent, []).append(path)
    if not found:
        raise ConfigError(
            f"backgrounds={str(folder)!r} holds no pictures ({', '.join(_PICTURES)}): put some there, or folders with "
            "the frames of a video each (such as DAVIS 2017, JPEGImages/480p)."
        )
    return list(found.values())[:most]


class Background:
    """The sky of a task's model, on which frames of a video are shown.

    Args:
        physics: of the task.
        domain: of dm_control, which sets the floor's opacity.
        videos: of `videos_in`.
        dynamic: whether an episode shows the frames of its video in turn, back and forth, or only one of them.

    Raises:
        ConfigError: the task has no sky.
    """

    def __init__(self, physics: Any, domain: str, videos: list[list[Path]], dynamic: bool) -> None:
        import mujoco

        model = physics.model
        kinds = np.flatnonzero(np.asarray(model.tex_type) == int(mujoco.mjtTexture.mjTEXTURE_SKYBOX))
        if not len(kinds):
            raise ConfigError(f"the task {domain} has no sky to show backgrounds on.")
        self._physics, self._texture = physics, int(kinds[0])
        self.videos, self.dynamic = videos, dynamic
        self.place = (0, 0, 1)  # video, frame, direction
        self.floors = [
            index
            for index in range(model.ngeom)
            if str(model.id2name(index, "geom")) in _FLOORS
            and model.geom_type[index] == int(mujoco.mjtGeom.mjGEOM_PLANE)
        ]
        self.floor = _FLOOR.get(domain, 0.3)

    def clear_floor(self, geoms: NDArray[Any], materials: NDArray[Any]) -> None:
        """Let the picture be seen through the floor: changes alphas of colours (n, 4), in place."""
        for index in self.floors:
            geoms[index, 3] *= self.floor
            material = int(self._physics.model.geom_matid[index])
            if material >= 0:
                materials[material, 3] *= self.floor

    def begin(self, random: np.random.Generator) -> None:
        """Draw a video and one of its frames."""
        video = int(random.integers(len(self.videos)))
        self.show((video, int(random.integers(len(self.videos[video]))), 1))

    def advance(self) -> None:
        """Show the next frame, where frames move."""
        video, frame, direction = self.place
        count = len(self.videos[video])
        if not self.dynamic or count == 1:
            return
        if not 0 <= frame + direction < count:
            direction = -direction
        self.show((video, frame + direction, direction))

    def show(self, place: tuple[int, int, int]) -> None:
        """Show a frame.

        Raises:
            ConfigError: the picture cannot be read, or there is no such frame (another folder than before).
        """
        import mujoco

        video, frame, _ = self.place = place
        if video >= len(self.videos) or frame >= len(self.videos[video]):
            raise ConfigError(f"backgrounds have no frame {frame} of video {video}: the folder is another one.")
        model, index = self._physics.model, self._texture
        start, width, height = int(model.tex_adr[index]), int(model.tex_width[index]), int(model.tex_height[index])
        faces = np.tile(_picture(self.videos[video][frame], width), (height // width, 1, 1))
        model.tex_data[start : start + faces.size] = faces.ravel()
        contexts = self._physics.contexts
        with contexts.gl.make_current() as context:
            context.call(mujoco.mjr_uploadTexture, model.ptr, contexts.mujoco.ptr, index)


def _picture(path: Path, width: int) -> NDArray[np.uint8]:
    """The middle square of a picture (width, width, 3)."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            return np.asarray(ImageOps.fit(image.convert("RGB"), (width, width)), np.uint8)
    except (OSError, UnidentifiedImageError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ConfigError(f"the background {path} cannot be read: {error}") from error
