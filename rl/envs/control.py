"""Tasks of the DeepMind Control Suite seen through pixels, as Gymnasium environments.

They use `dm_control.suite` directly: channel-first uint8 frames, a frame stack, action repeat, the time limit as
truncation, and the full state in and out for a bit-equal resume.
"""

import tomllib
from pathlib import Path
from typing import Any, Literal

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from dipole.core.utils.errors import ConfigError, nearest
from dipole.rl.arguments import check_integers, check_seed
from dipole.rl.envs.observed import StackedEnv
from dipole.rl.envs.registry import environment, key_of

DOMAINS: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))

# The six tasks of the papers, in the order of their tables (Spin, Swingup, Easy, Run, Walk, Catch).
PAPER_TASKS = ("finger-spin", "cartpole-swingup", "reacher-easy", "cheetah-run", "walker-walk", "ball_in_cup-catch")

# Fields of the model that tasks change between episodes (targets, gains, terrain, colours).
_EPISODE_FIELDS = (
    "body_pos", "body_quat", "geom_pos", "geom_size", "geom_rgba", "site_pos", "site_size", "site_rgba", "light_pos",
    "mat_rgba", "dof_damping", "jnt_stiffness", "wrap_prm", "hfield_data",
)  # fmt: skip
# A bound this wide (the lqr tasks have 1e10) is no bound: actions are then used as they are.
_UNBOUNDED = 1e6
# The suite's episodes last 1000 control steps. The lqr tasks have no limit of their own.
_TIME_LIMIT = 1000
# Types of a task's attributes that are its state.
_PLAIN = (type(None), bool, int, float, str, np.ndarray, np.number)
# The lqr tasks draw the stiffness of their springs when they are loaded, before anything else.
_STIFFNESS = (15, 25)


def split(task: str) -> tuple[str, str]:
    """Split "cheetah-run" (or "cheetah/run", "ball-in-cup-catch") into dm_control's domain and task name."""
    known = suite_names()
    found = {key_of(name): name for name in known}.get(key_of(task))
    if found is None:
        raise ConfigError(f"unknown task {task!r}.{nearest(str(task), known)} Allowed: {', '.join(known)}.")
    domain, _, rest = found.partition("-")
    return domain, rest


def suite_names() -> list[str]:
    """All suite tasks as "domain-task"."""
    return [f"{domain}-{task}" for domain, told in DOMAINS.items() for task in told["tasks"]]


class ControlEnv(StackedEnv):
    """One task of the suite through pixels.

    The observation is (3 * frame_stack, size, size) uint8, the newest frame last, the first frame repeated at reset.
    Actions lie in [-1, 1] and are mapped affinely to the task's own bounds. A step repeats the action `action_repeat`
    control steps (environment steps, in the papers' counting) and sums their rewards. `info["environment_steps"]` says
    how many were taken. The time limit is a truncation. Only a task's own end is a termination.

    `inputs="state"` observes dm_control's own observation instead, put together in its order (S,), float32, and draws
    nothing. "both" is a dictionary of "pixels" and "state", the newest one.

        >>> env = ControlEnv("cartpole-swingup", inputs="state")
        >>> env.reset(seed=0)[0].shape
        (5,)

    Args:
        task: "cheetah-run", "ball_in_cup-catch", or any other task of the suite.
        size: rendered height and width in pixels, >= 1.
        frame_stack: frames in an observation, >= 1.
        action_repeat: control steps for each action, >= 1. The papers' value for the task by default.
        camera: camera number or name. 0 by default, 2 (which follows the body) for the quadruped.
        rendering: "paper" (pixels identical to dm_control's) or "fast" (no shadows, reflections or anti-aliasing:
            another look, the same information, more than ten times cheaper).
        seed: seed of the first episode, from 0 to 2**32 - 1. `reset(seed=...)` sets it as well.
        render_mode: "rgb_array" or None. `render()` returns the newest frame at full size (H, W, 3).
        task_kwargs: passed on to dm_control's task.
        inputs: "pixels", "state" or "both".
        render_size: height and width of what `render()` draws, >= 1. By default `size`.

    Raises:
        ConfigError: for an unknown task or a setting out of range, from `step` for an action of another shape, from
            `reset` for a seed out of range.
        gymnasium.error.ResetNeeded: from `step`, outside an episode.
        RenderingError: no OpenGL library works. The message has the line that installs one.
        DipoleError: mujoco or dm_control is not installed.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 25}  # noqa: RUF012

    def __init__(
        self,
        task: str,
        *,
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
        domain, name = split(task)
        super().__init__(size, frame_stack, render_mode, inputs, render_size)
        if action_repeat is not None:
            check_integers(action_repeat=action_repeat)
        seed = check_seed(seed)
        if rendering not in ("paper", "fast"):
            raise ConfigError(f"rendering must be 'paper' or 'fast', got {rendering!r}.")
        # Here, so that `python -m` of that module finds it not yet imported.
        from dipole.rl.envs.suite.rendering import close_at_exit, import_suite

        suite: Any = import_suite()
        self.task = f"{domain}-{name}"
        self.action_repeat = action_repeat or DOMAINS[domain].get("action_repeat", 4)
        try:
            self._control = suite.load(domain, name, task_kwargs={**(task_kwargs or {}), "random": seed})
        except TypeError as error:
            raise ConfigError(f"task_kwargs {task_kwargs!r} do not fit {self.task}: {error}.") from error
        self._physics = self._control.physics
        self._limit = self._control._step_limit if np.isfinite(self._control._step_limit) else _TIME_LIMIT
        self._rendering = rendering
        self._view = DOMAINS[domain].get("camera", 0) if camera is None else camera
        # One camera per drawn size, made at first use. MuJoCo reads these values with the first one.
        self._cameras: dict[int, Any] = {}
        visual, largest = self._physics.model.vis, max(size, self.render_size)
        visual.global_.offwidth = max(largest, visual.global_.offwidth)
        visual.global_.offheight = max(largest, visual.global_.offheight)
        if rendering == "fast":
            visual.quality.shadowsize = visual.quality.offsamples = 0
        if inputs != "state":
            self._camera(size)
        spec = self._control.action_spec()
        wide = np.maximum(np.abs(spec.minimum), np.abs(spec.maximum)) > _UNBOUNDED
        self._low = np.where(wide, -1.0, spec.minimum)
        self._span = np.where(wide, 2.0, spec.maximum - spec.minimum)
        self.action_space = spaces.Box(-1.0, 1.0, spec.shape, np.float32)
        numbers = sum(int(np.prod(each.shape)) for each in self._control.observation_spec().values())
        self._set_space(-np.inf, np.inf, numbers)
        self._vector = np.zeros(numbers, np.float32)
        close_at_exit(self)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        seed = check_seed(seed)
        super().reset(seed=seed)
        if seed is not None:
            self._control.task._random = random = np.random.RandomState(seed)
            if self.task.startswith("lqr-"):
                # A damping follows each stiffness in the generator's stream, always 0.
                self._physics.model.jnt_stiffness[:] = [
                    (random.uniform(*_STIFFNESS), random.uniform())[0] for _ in range(self._physics.model.njnt)
                ]
        self._keep(self._control.reset())
        self._begin_episode()
        self._steps = 0
        self._playing = True
        if self.inputs != "state":
            self._frames.extend([self._frame(self.size)] * self.frame_stack)
        return self._observed(self._vector), {"environment_steps": 0}

    def _begin_episode(self) -> None:
        """Change the model after the task has set up an episode (for subclasses)."""

    def step(self, action: NDArray[np.float32]) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._require_playing(action, self.action_space)
        control = self._low + (np.asarray(action, np.float64) + 1.0) * 0.5 * self._span
        reward, taken = 0.0, 0
        terminated = truncated = False
        while taken < self.action_repeat and not (terminated or truncated):
            step = self._control.step(control)
            reward += step.reward or 0.0
            taken += 1
            terminated = step.last() and step.discount == 0.0
            truncated = not terminated and (step.last() or self._steps + taken >= self._limit)
        self._steps += taken
        self._playing = not (terminated or truncated)
        self._keep(step)
        if self.inputs != "state":
            self._frames.append(self._frame(self.size))
        info = {"environment_steps": taken}
        return self._observed(self._vector), float(reward), terminated, truncated, info

    def close(self) -> None:
        self._physics.free()

    def _frame(self, size: int) -> NDArray[np.uint8]:
        return np.ascontiguousarray(self._camera(size).render().transpose(2, 0, 1))

    def _camera(self, size: int) -> Any:
        """Return the camera of a size, made once: physics.render() builds and frees a scene at every call."""
        if size in self._cameras:
            return self._cameras[size]
        import mujoco
        from dm_control.mujoco import engine
        from dm_control.mujoco.wrapper.core import Error as WrapperError

        try:
            view = engine.Camera(self._physics, height=size, width=size, camera_id=self._view)
        except (ValueError, WrapperError) as error:
            raise ConfigError(f"camera {self._view!r} does not exist in this task: {error}") from error
        if self._rendering == "fast":
            view.scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = 0
            view.scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = 0
            # Bodies are meshed once, with the camera's context, and tendons (the cup's string) at every frame.
            quality = self._physics.model.vis.quality
            quality.numslices, quality.numstacks = 10, 5
        self._cameras[size] = view
        return view

    def _keep(self, step: Any) -> None:
        """Store the task's own observation if it is shown."""
        if self.inputs != "pixels":
            self._vector = np.concatenate([np.ravel(each) for each in step.observation.values()]).astype(np.float32)

    def get_state(self) -> dict[str, Any]:
        import mujoco

        return {
            **super().get_state(),
            "physics": self._physics.get_state(mujoco.mjtState.mjSTATE_INTEGRATION),
            "model": {name: np.array(getattr(self._physics.model, name)) for name in _EPISODE_FIELDS},
            "task": {key: value for key, value in vars(self._control.task).items() if isinstance(value, _PLAIN)},
            "random": self._control.task.random.get_state(),
            "control": (self._control._step_count, self._control._reset_next_step),
            "vector": self._vector,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        import mujoco

        super().set_state(state)
        for name, value in state["model"].items():
            getattr(self._physics.model, name)[...] = value
        self._physics.set_state(state["physics"], mujoco.mjtState.mjSTATE_INTEGRATION)
        if self._physics.model.nhfield:
            # The terrain that is drawn is a copy in the rendering context.
            with self._physics.contexts.gl.make_current() as context:
                for terrain in range(self._physics.model.nhfield):
                    context.call(
                        mujoco.mjr_uploadHField, self._physics.model.ptr, self._physics.contexts.mujoco.ptr, terrain
                    )
        # dm_control steps with mj_step2 first: the position and velocity stage must have been computed.
        mujoco.mj_step1(self._physics.model.ptr, self._physics.data.ptr)
        vars(self._control.task).update(state["task"])
        self._control.task._random.set_state(state["random"])
        self._control._step_count, self._control._reset_next_step = state["control"]
        self._playing = not self._control._reset_next_step and self._steps < self._limit
        self._vector = state.get("vector", self._vector)


for _task in suite_names():
    environment(_task, task=_task)(ControlEnv)
