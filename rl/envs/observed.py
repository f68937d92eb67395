"""The base of the environments of this folder, which show pixels, their state as numbers, or both."""

from collections import deque
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.error import ResetNeeded
from numpy.typing import NDArray

from dipole.core.utils.errors import ConfigError, nearest
from dipole.rl.arguments import check_integers

INPUTS = ("pixels", "state", "both")


class StackedEnv(gymnasium.Env[Any, Any]):
    """Stacks frames (3, size, size), the newest last, and the first one repeated at reset."""

    def __init__(
        self, size: int, frame_stack: int, render_mode: str | None, inputs: str, render_size: int | None
    ) -> None:
        self.size, self.frame_stack, self.render_mode, self.inputs = size, frame_stack, render_mode, inputs
        self.render_size = size if render_size is None else render_size
        check_integers(size=size, frame_stack=frame_stack, render_size=self.render_size)
        if inputs not in INPUTS:
            near = nearest(str(inputs), INPUTS)
            raise ConfigError(f"inputs must be {', '.join(map(repr, INPUTS))}, got {inputs!r}.{near}")
        if render_mode not in (None, "rgb_array"):
            raise ConfigError(f"render_mode must be 'rgb_array' or None, got {render_mode!r}.")
        self._frames: deque[NDArray[np.uint8]] = deque(maxlen=frame_stack)
        self._steps = 0
        self._playing = False

    def _set_space(self, low: float, high: float, numbers: int) -> None:
        """Set the observations' space, for a state of `numbers` numbers between bounds."""
        parts: dict[str, spaces.Space[Any]] = {
            "pixels": spaces.Box(0, 255, (3 * self.frame_stack, self.size, self.size), np.uint8),
            "state": spaces.Box(low, high, (numbers,), np.float32),
        }
        self.observation_space = spaces.Dict(parts) if self.inputs == "both" else parts[self.inputs]

    def _observed(self, state: NDArray[Any]) -> Any:
        """Return the requested parts of the observation, as copies."""
        found: dict[str, Any] = {"state": state.astype(np.float32)}
        if self.inputs != "state":
            found["pixels"] = np.concatenate(self._frames)
        return {name: found[name] for name in ("pixels", "state")} if self.inputs == "both" else found[self.inputs]

    def render(self) -> NDArray[np.uint8] | None:
        if self.render_mode is None:
            return None
        if self._frames and self.render_size == self.size:
            frame = self._frames[-1]
        else:
            frame = self._frame(self.render_size)
        return np.ascontiguousarray(frame.transpose(1, 2, 0))

    def get_state(self) -> dict[str, Any]:
        """Everything a bit-exact continuation needs, also in another process."""
        return {"steps": self._steps, "frames": list(self._frames), "np_random": self.np_random.bit_generator.state}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from what `get_state` returned.

        Args:
            state: of an environment of the same task and settings.
        """
        self._steps, self._frames = state["steps"], deque(state["frames"], maxlen=self.frame_stack)
        self.np_random.bit_generator.state = state["np_random"]

    def _frame(self, size: int) -> NDArray[np.uint8]:
        """Draw the newest frame, (3, size, size)."""
        raise NotImplementedError

    def _require_playing(self, action: Any, space: spaces.Space[Any]) -> None:
        """Raise ResetNeeded outside an episode, ConfigError for an action of another shape."""
        if not self._playing:
            raise ResetNeeded("step() was called before reset(), or after the episode had ended: call reset() first.")
        if np.shape(action) != space.shape:
            raise ConfigError(f"an action of this task has the shape {space.shape}, got {np.shape(action)}.")
