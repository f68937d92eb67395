"""The 26 Atari games of the 100k benchmark (Kaiser et al. 2020), through ale-py.

Straight on `ale_py.ALEInterface`: grey frames, the larger of the last two, frame stack, action repeat, random no-ops at
the start, the full state in and out for bit-exact resume.
"""

from collections import deque
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from dipole.core.utils.errors import ConfigError
from dipole.core.utils.extras import install_line
from dipole.rl.arguments import check_number, check_seed, check_whole
from dipole.rl.envs.registry import environment

# Returns of random actions and of a human tester (Wang et al. 2016, as DQN Zoo prints them).
GAMES = {
    "alien": (227.8, 7127.7),
    "amidar": (5.8, 1719.5),
    "assault": (222.4, 742.0),
    "asterix": (210.0, 8503.3),
    "bank_heist": (14.2, 753.1),
    "battle_zone": (2360.0, 37187.5),
    "boxing": (0.1, 12.1),
    "breakout": (1.7, 30.5),
    "chopper_command": (811.0, 7387.8),
    "crazy_climber": (10780.5, 35829.4),
    "demon_attack": (152.1, 1971.0),
    "freeway": (0.0, 29.6),
    "frostbite": (65.2, 4334.7),
    "gopher": (257.6, 2412.5),
    "hero": (1027.0, 30826.4),
    "jamesbond": (29.0, 302.8),
    "kangaroo": (52.0, 3035.0),
    "krull": (1598.0, 2665.5),
    "kung_fu_master": (258.5, 22736.3),
    "ms_pacman": (307.3, 6951.6),
    "pong": (-20.7, 14.6),
    "private_eye": (24.9, 69571.3),
    "qbert": (163.9, 13455.0),
    "road_runner": (11.5, 7845.0),
    "seaquest": (68.4, 42054.7),
    "up_n_down": (533.4, 11693.2),
}
_LONGEST = 108_000  # frames of an episode, as in the papers


class AtariEnv(gymnasium.Env[NDArray[np.uint8], np.int64]):
    """One game. Observations are (frame_stack, size, size) uint8, grey, the newest frame last, actions the minimal set.

    A step repeats the action and sums the rewards, as the game gives them. A lost life does not end the episode;
    `info["life_lost"]` says it, and replay takes it as an end, as the papers' agents do in training.
    `info["environment_steps"]` counts frames. 108,000 frames are a time limit, so a truncation.

    Args:
        game: "pong", "ms-pacman", ...
        size: height and width in pixels; frames are averaged over areas.
        frame_stack: frames in an observation, the first one repeated at reset.
        action_repeat: frames of an action.
        noops: an episode begins with 1 to so many frames without an action, drawn uniformly.
        sticky: probability that the game repeats the last action instead (Machado et al. 2018; 0.25 there).
        render_mode: "rgb_array" or None; `render()` returns the screen at its own size (210, 160, 3).

    Raises:
        ConfigError: for a setting out of range, or without ale-py, with the line that installs it.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 15}  # noqa: RUF012

    def __init__(
        self,
        game: str,
        *,
        size: int = 84,
        frame_stack: int = 4,
        action_repeat: int = 4,
        noops: int = 30,
        sticky: float = 0.0,
        render_mode: str | None = "rgb_array",
    ) -> None:
        check_whole(size=size, frame_stack=frame_stack, action_repeat=action_repeat)
        check_whole(0, noops=noops)
        check_number(0, 1, sticky=sticky)
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise ConfigError(f"render_mode must be 'rgb_array' or None, got {render_mode!r}.")
        try:
            from ale_py import ALEInterface, ALEState, LoggerMode, roms
        except ImportError as error:
            raise ConfigError(f"the task 'atari:{game}' needs ale-py: {install_line('atari')}") from error
        self.game, self.size, self.frame_stack, self.action_repeat = game, size, frame_stack, action_repeat
        self.noops, self.render_mode = noops, render_mode
        self.reference = GAMES[game.replace("-", "_")]  # (random, human), for normalised scores
        self._state = ALEState
        ALEInterface.setLoggerMode(LoggerMode.Error)
        self._ale = ALEInterface()
        self._ale.setFloat("repeat_action_probability", float(sticky))
        rom = roms.get_rom_path(game.replace("-", "_"))
        if rom is None:
            raise ConfigError(f"the task 'atari:{game}': ale-py has no such game here; install it anew.")
        self._rom = rom
        self._ale.loadROM(self._rom)
        self._actions = list(self._ale.getMinimalActionSet())
        self.action_space = spaces.Discrete(len(self._actions))
        self.observation_space = spaces.Box(0, 255, (frame_stack, size, size), np.uint8)
        self._frames: deque[NDArray[np.uint8]] = deque(maxlen=frame_stack)
        self._count = 0
        self._playing = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.uint8], dict[str, Any]]:
        seed = check_seed(seed)
        super().reset(seed=seed)
        if seed is not None:
            self._ale.setInt("random_seed", seed % 2**31)
            self._ale.loadROM(self._rom)
        self._ale.reset_game()
        for _ in range(int(self.np_random.integers(1, self.noops + 1)) if self.noops else 0):
            self._ale.act(0)
            if self._ale.game_over():
                self._ale.reset_game()
        self._count, self._playing = 0, True
        self._frames.extend([self._shrunk(self._screen())] * self.frame_stack)
        return self._observation(), {"environment_steps": 0}

    def step(self, action: Any) -> tuple[NDArray[np.uint8], float, bool, bool, dict[str, Any]]:
        if not self._playing:
            raise gymnasium.error.ResetNeeded("step() was called outside an episode: call reset() first.")
        if np.shape(action) or not self.action_space.contains(int(action)):
            raise ConfigError(f"an action of {self.game} is an integer from 0 to {len(self._actions) - 1}: {action!r}.")
        lives, reward, taken, screens = self._ale.lives(), 0.0, 0, []
        while taken < self.action_repeat and not self._ale.game_over():
            reward += self._ale.act(self._actions[int(action)])
            taken += 1
            screens.append(self._screen())
        self._count += taken
        self._frames.append(self._shrunk(np.maximum.reduce(screens[-2:])))
        terminated = bool(self._ale.game_over())
        truncated = not terminated and self._count >= _LONGEST
        self._playing = not (terminated or truncated)
        info = {"environment_steps": taken, "life_lost": 0 < self._ale.lives() < lives}
        return self._observation(), float(reward), terminated, truncated, info

    def render(self) -> NDArray[np.uint8] | None:
        return None if self.render_mode is None else np.asarray(self._ale.getScreenRGB())

    def _screen(self) -> NDArray[np.uint8]:
        return np.array(self._ale.getScreenGrayscale(), np.uint8)

    def _shrunk(self, screen: NDArray[np.uint8]) -> NDArray[np.uint8]:
        import torch

        image = torch.from_numpy(screen)[None, None].float()
        small = torch.nn.functional.interpolate(image, (self.size, self.size), mode="area")
        return small[0, 0].round().to(torch.uint8).numpy()

    def _observation(self) -> NDArray[np.uint8]:
        return np.stack(self._frames)

    def get_state(self) -> dict[str, Any]:
        """Everything a bit-exact continuation needs."""
        return {
            "game": self._ale.cloneState(include_rng=True).serialize(),
            "frames": list(self._frames),
            "count": self._count,
            "playing": self._playing,
            "np_random": self.np_random.bit_generator.state,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from what `get_state` returned."""
        self._ale.restoreState(self._state(state["game"]))
        self._frames = deque(state["frames"], maxlen=self.frame_stack)
        self._count, self._playing = state["count"], state["playing"]
        self.np_random.bit_generator.state = state["np_random"]


for _game in GAMES:
    environment(f"atari:{_game.replace('_', '-')}", game=_game)(AtariEnv)
