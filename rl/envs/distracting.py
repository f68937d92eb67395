"""Tasks of the suite with distractions (Stone et al. 2021): colours and the camera change from episode to episode.

The videos behind the scene of the Distracting Control Suite are a data set of their own and not drawn here.
"""

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dipole.rl.arguments import check_number
from dipole.rl.envs.control import ControlEnv
from dipole.rl.envs.registry import environment
from dipole.rl.envs.suite import tasks

_SHIFT = 0.3  # of the camera at full difficulty, as a share of its distance from the world's centre
_ROLL = np.pi / 6  # of the camera at full difficulty


class DistractingControlEnv(ControlEnv):
    """`ControlEnv` whose colours and camera are drawn anew at each reset, and stay for the episode.

    Every colour of a material or body is moved by up to `colour` in each channel, uniformly; the camera by up to
    `camera_shift` of its way from the centre in each direction, and rolled by up to `camera_shift` / 0.3 of 30 degrees.
    The draws come from the environment's own generator: a seed says them, and the task's start states stay those of
    `ControlEnv`.

    Args:
        task, size, frame_stack, action_repeat, camera, rendering, seed, render_mode, task_kwargs: as `ControlEnv`.
        colour: 0 to 1; 0.1, 0.2 and 0.5 are about the easy, medium and hard levels of the suite.
        camera_shift: 0 to 0.3.

    Raises:
        ConfigError: for a setting out of range.
    """

    def __init__(
        self,
        task: str,
        *,
        colour: float = 0.1,
        camera_shift: float = 0.03,
        size: int = 100,
        frame_stack: int = 3,
        action_repeat: int | None = None,
        camera: int | str | None = None,
        rendering: Literal["paper", "fast"] = "paper",
        seed: int | None = None,
        render_mode: str | None = "rgb_array",
        task_kwargs: dict[str, Any] | None = None,
    ) -> None:
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
        )
        self.colour, self.camera_shift = colour, camera_shift
        model = self._physics.model
        self._plain = {
            name: np.array(getattr(model, name)) for name in ("mat_rgba", "geom_rgba", "cam_pos", "cam_quat")
        }

    def _begin_episode(self) -> None:
        model, plain, random = self._physics.model, self._plain, self.np_random
        for name in ("mat_rgba", "geom_rgba"):
            colours = plain[name].copy()
            colours[:, :3] += random.uniform(-self.colour, self.colour, colours[:, :3].shape)
            getattr(model, name)[...] = colours.clip(0, 1)
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

        # Where cameras are follows from the model only when asked, and the first picture is drawn before a step.
        mujoco.mj_camlight(model.ptr, self._physics.data.ptr)

    def get_state(self) -> dict[str, Any]:
        camera = {name: np.array(getattr(self._physics.model, name)) for name in ("cam_pos", "cam_quat")}
        return super().get_state() | {"camera": camera}

    def set_state(self, state: dict[str, Any]) -> None:
        for name, value in state["camera"].items():
            getattr(self._physics.model, name)[...] = value
        super().set_state(state)


def _rolled(quaternion: NDArray[np.float64], half: float) -> NDArray[np.float64]:
    """A rotation about the camera's own axis of sight before the camera's own: q (cos h, 0, 0, sin h)."""
    w, x, y, z = quaternion
    c, s = np.cos(half), np.sin(half)
    return np.array([w * c - z * s, x * c + y * s, y * c - x * s, z * c + w * s])


for _task in tasks.names():
    environment(f"distracting:{_task}", task=_task)(DistractingControlEnv)
