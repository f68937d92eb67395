"""An objective beside the loss of an agent of stable-baselines3: a callback that trains the agent's own encoder.

python examples/sb3_agent.py --steps 20000
"""

import argparse

import gymnasium
import numpy as np
from gymnasium import spaces
from stable_baselines3 import DQN

from dipole.rl import ContrastiveCallback


class Blocks(gymnasium.Env):
    """A picture with a bright block; the reward says whether the action named its half."""

    observation_space = spaces.Box(0, 255, (3, 40, 40), np.uint8)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.left, self.count = 0, 0
        return self._draw(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        reward, self.count = float(action == (self.left >= 16)), self.count + 1
        return self._draw(), reward, False, self.count >= 20, {}

    def _draw(self) -> np.ndarray:
        image = self.np_random.integers(0, 60, (3, 40, 40)).astype(np.uint8)
        self.left = int(self.np_random.integers(0, 32))
        image[:, 16:24, self.left : self.left + 8] = 255
        return image


def main(steps: int = 20000, batch_size: int = 64) -> DQN:
    """Train, and give the agent."""
    agent = DQN("CnnPolicy", Blocks(), buffer_size=5000, learning_starts=batch_size, train_freq=8, device="cpu", seed=0)
    objective = "infonce(similarity=bilinear, temperature=1) + 0.1*dp"
    return agent.learn(steps, callback=ContrastiveCallback(objective, batch_size=batch_size))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20000)
    main(**vars(parser.parse_args()))
