"""Tasks of the suite with distractions (Stone et al. 2021): colours, the camera and what is behind the scene."""

from glob import glob
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dipole.core.utils.errors import ConfigError
from dipole.rl.arguments import check_number
from dipole.rl.envs.control import DOMAINS, ControlEnv, split, suite_names
from dipole.rl.envs.registry import environment

_SHIFT = 0.3  # of the camera at full difficulty, as a share of its distance from the world's centre
_ROLL = np.pi / 6  # of the camera at full difficulty
# Strength of colour and of camera, and how many videos (Stone et al. 2021, sec. 4). None: all, 60 in DAVIS.
DIFFICULTIES: dict[str | None, tuple[float, float, int | None]] = {
    "easy": (0.1, 0.1, 4),
    "medium": (0.2, 0.2, 8),
    "hard": (0.3, 0.3, None),
    None: (0.1, 0.03, None),
}
_PICTURES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
_FLOORS = ("floor", "ground")


class DistractingControlEnv(ControlEnv):
    """`ControlEnv` whose colours, camera and background are drawn anew at each reset.

    Every colour of a material or body is moved by up to `colour` (0 to 1, by default that of the difficulty or 0.1) in
    each channel, uniformly. The camera moves by up to `camera_shift` (0 to 0.3, or 0.03) of its way from the centre in
    each direction, and is rolled by up to `camera_shift` / 0.3 of 30 degrees. Both stay for the episode. The draws come
    from the environment's own generator: the seed fixes them, and the task's start states stay those of `ControlEnv`.

    Args:
        task, settings: as `ControlEnv`.
        difficulty: "easy", "medium" or "hard" as the paper names them: 0.1, 0.2 or 0.3 for colour and camera, and the
            first 4, 8 or all videos of the folder.
        backgrounds: a folder of pictures, or of folders with the frames of a video each (DAVIS 2017, as the paper
            has). Without it the sky stays as it is.
        dynamic: whether a video advances by a frame with every step.
    """

    def __init__(
        self,
        task: str,
        *,
        colour: float | None = None,
        camera_shift: float | None = None,
        difficulty: Literal["easy", "medium", "hard"] | None = None,
        backgrounds: str | None = None,
        dynamic: bool = False,
        **settings: Any,
    ) -> None:
        if difficulty not in list(DIFFICULTIES):
            allowed = ", ".join(repr(each) for each in DIFFICULTIES if each)
            raise ConfigError(f"difficulty must be {allowed} or None, got {difficulty!r}.")
        if dynamic and backgrounds is None:
            raise ConfigError("dynamic=True moves backgrounds: give their folder, backgrounds=FOLDER.")
        if settings.get("inputs") == "state" and (backgrounds is not None or difficulty is not None):
            raise ConfigError('inputs="state" shows no image to distract from: take away difficulty and backgrounds.')
        usual_colour, usual_shift, most = DIFFICULTIES[difficulty]
        colour = usual_colour if colour is None else colour
        camera_shift = usual_shift if camera_shift is None else camera_shift
        self._videos = [] if backgrounds is None else videos_in(backgrounds, most)
        check_number(0, 1, colour=colour)
        check_number(0, _SHIFT, camera_shift=camera_shift)
        super().__init__(task, **settings)
        self.colour, self.camera_shift, self.dynamic = colour, camera_shift, dynamic
        model = self._physics.model
        names = ("mat_rgba", "geom_rgba", "cam_pos", "cam_quat")
        self._plain = {name: np.array(getattr(model, name)) for name in names}
        if self._videos:
            self._texture = self._sky()
            self._clear_floor()
            self._place = (0, 0, 1)  # video, frame, direction

    def _sky(self) -> int:
        """Return the number of the texture that backgrounds are shown on."""
        import mujoco

        kinds = np.asarray(self._physics.model.tex_type)
        found = np.flatnonzero(kinds == int(mujoco.mjtTexture.mjTEXTURE_SKYBOX))
        if not len(found):
            raise ConfigError(f"the task {split(self.task)[0]} has no sky to show backgrounds on.")
        return int(found[0])

    def _clear_floor(self) -> None:
        """Let the background be seen through the floor."""
        import mujoco

        model, opacity = self._physics.model, DOMAINS[split(self.task)[0]].get("floor", 0.3)
        for index in np.flatnonzero(np.asarray(model.geom_type) == int(mujoco.mjtGeom.mjGEOM_PLANE)):
            if str(model.id2name(index, "geom")) in _FLOORS:
                self._plain["geom_rgba"][index, 3] *= opacity
                material = int(model.geom_matid[index])
                if material >= 0:
                    self._plain["mat_rgba"][material, 3] *= opacity

    def _begin_episode(self) -> None:
        model, plain, random = self._physics.model, self._plain, self.np_random
        for name in ("mat_rgba", "geom_rgba"):
            colours = plain[name].copy()
            colours[:, :3] += random.uniform(-self.colour, self.colour, colours[:, :3].shape)
            getattr(model, name)[...] = colours.clip(0, 1)
        if self._videos:
            video = int(random.integers(len(self._videos)))
            self._show((video, int(random.integers(len(self._videos[video]))), 1))
        if not model.ncam:
            return
        distance = np.linalg.norm(plain["cam_pos"], axis=1, keepdims=True)
        moved = random.uniform(-self.camera_shift, self.camera_shift, plain["cam_pos"].shape)
        model.cam_pos[...] = plain["cam_pos"] + distance * moved
        half = random.uniform(-1, 1, model.ncam) * _ROLL * self.camera_shift / _SHIFT / 2
        model.cam_quat[...] = np.stack(list(map(_rolled, plain["cam_quat"], half)))
        import mujoco

        # MuJoCo moves its cameras in a step, and the first picture is drawn before one.
        mujoco.mj_camlight(model.ptr, self._physics.data.ptr)

    def step(self, action: NDArray[np.float32]) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._videos and self.dynamic and self._playing:
            video, frame, direction = self._place
            count = len(self._videos[video])
            if not 0 <= frame + direction < count:
                direction = -direction
            if count > 1:
                self._show((video, frame + direction, direction))
        return super().step(action)

    def _show(self, place: tuple[int, int, int]) -> None:
        """Show a frame. Raise ConfigError for an unreadable picture, or a missing frame (of another folder)."""
        import mujoco

        video, frame, _ = self._place = place
        if video >= len(self._videos) or frame >= len(self._videos[video]):
            raise ConfigError(f"backgrounds have no frame {frame} of video {video}: the folder is another one.")
        model, index, contexts = self._physics.model, self._texture, self._physics.contexts
        start, width, height = int(model.tex_adr[index]), int(model.tex_width[index]), int(model.tex_height[index])
        faces = np.tile(_picture(self._videos[video][frame], width), (height // width, 1, 1))
        model.tex_data[start : start + faces.size] = faces.ravel()
        with contexts.gl.make_current() as context:
            context.call(mujoco.mjr_uploadTexture, model.ptr, contexts.mujoco.ptr, index)

    def get_state(self) -> dict[str, Any]:
        camera = {name: np.array(getattr(self._physics.model, name)) for name in ("cam_pos", "cam_quat")}
        state = super().get_state() | {"camera": camera}
        if self._videos:
            state["background"] = self._place
        return state

    def set_state(self, state: dict[str, Any]) -> None:
        for name, value in state["camera"].items():
            getattr(self._physics.model, name)[...] = value
        if self._videos:
            self._show(tuple(state["background"]))
        super().set_state(state)


def _rolled(quaternion: NDArray[np.float64], half: float) -> NDArray[np.float64]:
    """Roll a camera about its line of sight before its own rotation: q (cos h, 0, 0, sin h)."""
    w, x, y, z = quaternion
    c, s = np.cos(half), np.sin(half)
    return np.array([w * c - z * s, x * c + y * s, y * c - x * s, z * c + w * s])


def videos_in(folder: str | Path, most: int | None) -> list[list[Path]]:
    """Return the first `most` videos of a folder: folders of pictures, and every loose picture by itself.

    Folders may lie in folders (DAVIS: JPEGImages/480p/bear/00000.jpg). Both are in the order of their names. Raise
    ConfigError for no folder, or one without pictures.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"backgrounds={str(folder)!r} is no folder. Allowed: one of pictures, or of folders of them.")
    found: dict[Path, list[Path]] = {}
    # glob follows links to folders and leaves out hidden files.
    for path in sorted(folder / name for name in glob("**/*", root_dir=folder, recursive=True)):
        if path.suffix.lower() not in _PICTURES or "__MACOSX" in path.parts or not path.is_file():
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


def _picture(path: Path, width: int) -> NDArray[np.uint8]:
    """The middle square of a picture (width, width, 3)."""
    from PIL import ImageOps

    from dipole.core.utils.pictures import open_rgb

    try:
        return np.asarray(ImageOps.fit(open_rgb(path.read_bytes()), (width, width)), np.uint8)
    except Exception as error:  # Pillow raises errors of many kinds for damaged files
        raise ConfigError(f"the background {path} cannot be read: {error}") from error


for _task in suite_names():
    environment(f"distracting:{_task}", task=_task)(DistractingControlEnv)
