"""Tasks of the suite with distractions (Stone et al. 2021): colours, the camera and what is behind the scene."""

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dipole.core.utils.errors import ConfigError
from dipole.rl.arguments import check_number
from dipole.rl.envs.control import ControlEnv
from dipole.rl.envs.registry import environment
from dipole.rl.envs.suite import tasks
from dipole.rl.envs.suite.backgrounds import Background, videos_in

_SHIFT = 0.3  # of the camera at full difficulty, as a share of its distance from the world's centre
_ROLL = np.pi / 6  # of the camera at full difficulty
# Strength of colour and camera, and how many videos (Stone et al. 2021, sec. 4). None: all, 60 in DAVIS.
DIFFICULTIES: dict[str, tuple[float, int | None]] = {"easy": (0.1, 4), "medium": (0.2, 8), "hard": (0.3, None)}


class DistractingControlEnv(ControlEnv):
    """`ControlEnv` whose colours, camera and background are drawn anew at each reset.

    Colours and camera stay for the episode. A background stays too, or advances by a frame with every step (`dynamic`).

    Every colour of a material or body is moved by up to `colour` in each channel, uniformly. The camera moves by up to
    `camera_shift` of its way from the centre in each direction, and rolled by up to `camera_shift` / 0.3 of 30 degrees.
    The draws come from the environment's own generator: the seed fixes them, and the task's start states stay those of
    `ControlEnv`.

    Args:
        task, size, frame_stack, action_repeat, camera, rendering, seed, render_mode, task_kwargs, inputs, render_size:
            as `ControlEnv`.
        colour: 0 to 1. That of the difficulty by default, or 0.1.
        camera_shift: 0 to 0.3. That of the difficulty by default, or 0.03.
        difficulty: "easy", "medium" or "hard" as the paper names them: 0.1, 0.2 or 0.3 for colour and camera, and the
            first 4, 8 or all videos of the folder.
        backgrounds: a folder of pictures, or of folders with the frames of a video each (DAVIS 2017, as the paper
            has). Without it the sky stays as it is.
        dynamic: whether videos move.

    Raises:
        ConfigError: for a setting out of range, or a folder without pictures.
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
        size: int = 100,
        frame_stack: int = 3,
        action_repeat: int | None = None,
        camera: int | str | None = None,
        rendering: Literal["paper", "fast"] = "paper",
        seed: int | None = None,
        render_mode: str | None = "rgb_array",
        task_kwargs: dict[str, Any] | None = None,
        inputs: str = "pixels",
        render_size: int | None = None,
    ) -> None:
        if difficulty is not None and difficulty not in DIFFICULTIES:
            raise ConfigError(f"difficulty must be {', '.join(map(repr, DIFFICULTIES))} or None, got {difficulty!r}.")
        if dynamic and backgrounds is None:
            raise ConfigError("dynamic=True moves backgrounds: give their folder, backgrounds=FOLDER.")
        if inputs == "state" and (backgrounds is not None or difficulty is not None):
            raise ConfigError('inputs="state" shows no image to distract from: take away difficulty and backgrounds.')
        default_colour, default_shift, most = 0.1, 0.03, None
        if difficulty is not None:
            strength, most = DIFFICULTIES[difficulty]
            default_colour = default_shift = strength
        if colour is None:
            colour = default_colour
        if camera_shift is None:
            camera_shift = default_shift
        videos = None
        if backgrounds is not None:
            videos = videos_in(backgrounds, most)
        check_number(0, 1, colour=colour)
        check_number(0, _SHIFT, camera_shift=camera_shift)
        super().__init__(
            task,
            size=size,
            frame_stack=frame_stack,
            action_repeat=action_repeat,
            camera=camera,
            rendering=rendering,
            seed=seed,
            render_mode=render_mode,
            task_kwargs=task_kwargs,
            inputs=inputs,
            render_size=render_size,
        )
        self.colour, self.camera_shift = colour, camera_shift
        model = self._physics.model
        self._plain = {
            name: np.array(getattr(model, name)) for name in ("mat_rgba", "geom_rgba", "cam_pos", "cam_quat")
        }
        self._background: Background | None = None
        if videos is not None and inputs != "state":
            self._background = Background(self._physics, tasks.split(task)[0], videos, dynamic)
            self._background.clear_floor(self._plain["geom_rgba"], self._plain["mat_rgba"])

    def _begin_episode(self) -> None:
        model, plain, random = self._physics.model, self._plain, self.np_random
        for name in ("mat_rgba", "geom_rgba"):
            colours = plain[name].copy()
            colours[:, :3] += random.uniform(-self.colour, self.colour, colours[:, :3].shape)
            getattr(model, name)[...] = colours.clip(0, 1)
        if self._background is not None:
            self._background.begin(random)
        if not model.ncam:
            return
        distance = np.linalg.norm(plain["cam_pos"], axis=1, keepdims=True)
        moved = random.uniform(-self.camera_shift, self.camera_shift, plain["cam_pos"].shape)
        model.cam_pos[...] = plain["cam_pos"] + distance * moved
        half = random.uniform(-1, 1, model.ncam) * _ROLL * self.camera_shift / _SHIFT / 2
        model.cam_quat[...] = np.stack(
            [_rolled(each, angle) for each, angle in zip(plain["cam_quat"], half, strict=True)]
        )
        import mujoco

        # MuJoCo moves its cameras in a step, and the first picture is drawn before one.
        mujoco.mj_camlight(model.ptr, self._physics.data.ptr)

    def step(self, action: NDArray[np.float32]) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._background is not None and self._playing:
            self._background.advance()
        return super().step(action)

    def get_state(self) -> dict[str, Any]:
        camera = {name: np.array(getattr(self._physics.model, name)) for name in ("cam_pos", "cam_quat")}
        state = super().get_state() | {"camera": camera}
        if self._background is not None:
            state["background"] = self._background.place
        return state

    def set_state(self, state: dict[str, Any]) -> None:
        for name, value in state["camera"].items():
            getattr(self._physics.model, name)[...] = value
        if self._background is not None:
            self._background.show(tuple(state["background"]))
        super().set_state(state)


def _rolled(quaternion: NDArray[np.float64], half: float) -> NDArray[np.float64]:
    """Roll a camera about its line of sight before its own rotation: q (cos h, 0, 0, sin h)."""
    w, x, y, z = quaternion
    c, s = np.cos(half), np.sin(half)
    return np.array([w * c - z * s, x * c + y * s, y * c - x * s, z * c + w * s])


for _task in tasks.names():
    environment(f"distracting:{_task}", task=_task)(DistractingControlEnv)
