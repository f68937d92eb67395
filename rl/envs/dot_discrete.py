"""The dot task with five actions, for agents with discrete ones."""

from typing import Any

import numpy as np
from gymnasium import spaces

from dipole.core.utils.errors import ConfigError
from dipole.rl.envs.dot import DotEnv
from dipole.rl.envs.registry import environment

# Velocities (row, column): stay, up, down, left, right.
_MOVES = np.array([(0, 0), (-1, 0), (1, 0), (0, -1), (0, 1)], np.float32)


@environment("dot-discrete")
class DiscreteDotEnv(DotEnv):
    """`DotEnv` whose actions are: stay, up, down, left, right at full speed.

    Args:
        size, frame_stack, render_mode, inputs, render_size: as in `DotEnv`.
    """

    def __init__(
        self,
        size: int = 28,
        frame_stack: int = 3,
        render_mode: str | None = "rgb_array",
        inputs: str = "pixels",
        render_size: int | None = None,
    ) -> None:
        super().__init__(size, frame_stack, render_mode, inputs, render_size)
        self.action_space = spaces.Discrete(len(_MOVES))

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if np.shape(action) or not self.action_space.contains(int(action)):
            raise ConfigError(f"an action of this task is an integer from 0 to {len(_MOVES) - 1}, got {action!r}.")
        return super().step(_MOVES[int(action)])
