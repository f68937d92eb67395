"""Move the dot onto the dot: a pixel task of seconds, without a physics engine, for tests and the demo."""

from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from dipole.core.utils.errors import ConfigError
from dipole.rl.arguments import check_seed
from dipole.rl.envs.observed import StackedEnv
from dipole.rl.envs.registry import environment

_EPISODE = 50
_SPEED = 0.1
_DOT = 2.0  # radius in pixels
_SMALLEST = 12
# Velocities (row, column) of the discrete actions: stay, up, down, left, right.
_MOVES = np.array([(0, 0), (-1, 0), (1, 0), (0, -1), (0, 1)], np.float32)
_VELOCITIES = spaces.Box(-1.0, 1.0, (2,), np.float32)


@environment("dot")
class DotEnv(StackedEnv):
    """The action pushes a green dot. The reward is 1 on the red dot and falls to 0 at 5/6 of the square's side.

    Observations are (3 * frame_stack, size, size) uint8, actions two velocities in [-1, 1], episodes 50 steps
    (a time limit, so a truncation). Positions are uniform in the unit square.

        >>> env = DotEnv(size=28)
        >>> env.reset(seed=0)[0].shape
        (9, 28, 28)

    Args:
        size: height and width in pixels, at least 12.
        frame_stack: frames in an observation, >= 1, the first one repeated at reset.
        render_mode: "rgb_array" or None.
        inputs: "pixels", "state" (the positions of both dots, (4,) float32 in [0, 1]), or "both", a dictionary of
            "pixels" and "state".
        render_size: height and width of what `render` draws, at least 12. By default `size`.

    Raises:
        ConfigError: for a setting out of range, from `step` for an action that is not (2,), from `reset` for a seed
            out of range.
        gymnasium.error.ResetNeeded: from `step`, outside an episode.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012
    action_repeat = 1

    def __init__(
        self,
        size: int = 28,
        frame_stack: int = 3,
        render_mode: str | None = "rgb_array",
        inputs: str = "pixels",
        render_size: int | None = None,
    ) -> None:
        super().__init__(size, frame_stack, render_mode, inputs, render_size)
        least = min(size, self.render_size)
        if least < _SMALLEST:
            raise ConfigError(f"size must be at least {_SMALLEST}, so that two dots can be distinguished, got {least}.")
        self._set_space(0.0, 1.0, 4)
        self.action_space: spaces.Space[Any] = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self._dot = self._target = np.zeros(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=check_seed(seed))
        self._dot, self._target = self.np_random.uniform(size=(2, 2))
        self._steps = 0
        self._playing = True
        self._frames.extend([self._frame(self.size)] * self.frame_stack)
        return self._observation(), {"environment_steps": 0}

    def step(self, action: NDArray[np.float32]) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._require_playing(action, _VELOCITIES)
        self._dot = np.clip(self._dot + _SPEED * np.clip(np.asarray(action, np.float64), -1, 1), 0, 1)
        self._steps += 1
        self._playing = self._steps < _EPISODE
        self._frames.append(self._frame(self.size))
        reward = max(0.0, 1.0 - 1.2 * float(np.hypot(*(self._dot - self._target))))
        return self._observation(), reward, False, not self._playing, {"environment_steps": 1}

    def _observation(self) -> Any:
        return self._observed(np.concatenate([self._dot, self._target]))

    def _frame(self, size: int) -> NDArray[np.uint8]:
        frame = np.zeros((3, size, size), np.uint8)
        # The margin keeps both dots inside every crop of 24 out of 28 pixels.
        margin = size * 0.2
        rows, columns = np.mgrid[:size, :size]
        for channel, position in ((0, self._target), (1, self._dot)):
            row, column = margin + position * (size - 1 - 2 * margin)
            distance = np.hypot(rows - row, columns - column)
            frame[channel] = 255 * np.clip(_DOT * size / self.size + 0.5 - distance, 0, 1)
        return frame

    def get_state(self) -> dict[str, Any]:
        return {**super().get_state(), "dot": self._dot, "target": self._target}

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self._dot, self._target = state["dot"], state["target"]
        self._playing = self._steps < _EPISODE


@environment("dot-discrete")
class DiscreteDotEnv(DotEnv):
    """`DotEnv` whose actions are: stay, up, down, left, right at full speed."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.action_space = spaces.Discrete(len(_MOVES))

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if not self.action_space.contains(action):
            raise ConfigError(f"an action of this task is an integer from 0 to {len(_MOVES) - 1}, got {action!r}.")
        return super().step(_MOVES[int(action)])
