# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A regularizer in an agent that you already have
#
# You have an agent of stable-baselines3 that learns from pixels. A callback trains its own encoder with any objective
# beside what the agent does; nothing of the agent changes.

# %%
import sys

if "google.colab" in sys.modules:
    import subprocess

    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "dipole[rl]"], check=True)

# %% [markdown]
# ## The agent
#
# A small environment: a bright block in noise, and the reward says whether the action named its half.

# %%
import os

import gymnasium
import matplotlib.pyplot as plt
import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3 import DQN

SMALL = os.environ.get("DIPOLE_TUTORIAL") == "small"
STEPS, BATCH = (160, 16) if SMALL else (6000, 64)


class Blocks(gymnasium.Env):
    """A picture with a bright block; the reward says whether the action named its half."""

    observation_space = spaces.Box(0, 255, (3, 40, 40), np.uint8)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self.draw(), {}

    def step(self, action):
        reward, self.count = float(action == (self.left >= 16)), self.count + 1
        return self.draw(), reward, False, self.count >= 20, {}

    def draw(self):
        image = self.np_random.integers(0, 60, (3, 40, 40)).astype(np.uint8)
        self.left = int(self.np_random.integers(0, 32))
        image[:, 16:24, self.left : self.left + 8] = 255
        return image


def agent():
    return DQN(
        "CnnPolicy", Blocks(), buffer_size=5000, learning_starts=BATCH, train_freq=8, device="cpu", seed=0, verbose=0
    )


# %% [markdown]
# ## With and without
#
# The one line is `callback=ContrastiveCallback(...)`. It shows two crops of what the buffer holds to the agent's
# encoder, with a slow copy as key encoder.

# %%
from dipole.rl import ContrastiveCallback

OBJECTIVES = (None, "infonce(temperature=0.1)", "infonce(temperature=0.1) + 0.1*dp")
agents = {}
for text in OBJECTIVES:
    callback = None if text is None else ContrastiveCallback(text, batch_size=BATCH)
    agents[text or "the agent alone"] = agent().learn(STEPS, callback=callback)


# %% [markdown]
# ## What it did
#
# The return of deterministic episodes, and how far apart its encoder keeps different observations. (At the small
# setting the agents have hardly begun; the returns mean something after some thousand steps.)


# %%
def returns(model, episodes=2 if SMALL else 20):
    env, total = Blocks(), 0.0
    for number in range(episodes):
        observation, done = env.reset(seed=1000 + number)[0], False
        while not done:
            observation, reward, _, done, _ = env.step(model.predict(observation, deterministic=True)[0])
            total += reward
    return total / episodes


def distances(model, count=64):
    env = Blocks()
    env.reset(seed=7)
    images = torch.as_tensor(np.stack([env.draw() for _ in range(count)]))
    with torch.no_grad():
        z = model.q_net.features_extractor(images.float() / 255)
    z = torch.nn.functional.normalize(z, dim=1)
    return ((1 - z @ z.T) / 2)[~torch.eye(count, dtype=torch.bool)].numpy()


figure, axes = plt.subplots(figsize=(6, 3))
for name, model in agents.items():
    print(f"{name:36} return {returns(model):5.1f} of 20")
    axes.hist(distances(model), bins=40, histtype="step", label=name)
axes.set_xlabel("distance (1 - cos) / 2 of different observations")
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# [rl](../rl.md) has the callback's arguments, pixel environments of the DeepMind Control Suite, and `ContrastiveSAC`,
# where the objective is part of the agent's own update.
