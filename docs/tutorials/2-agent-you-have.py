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
# You have an agent of stable-baselines3 that learns from pixels, saved as SB3 saves it. It is loaded as always, and a
# callback trains its own encoder with any objective beside what the agent does. Then seeds say what that was worth.
#
# Time on one core: 30 s with `DIPOLE_TUTORIAL=small`, 2 min without. Nothing is downloaded.

# %%
import importlib.util
import os
import subprocess
import sys

if importlib.util.find_spec("dipole") is None:  # on Colab, and in any environment without it
    source = os.environ.get("DIPOLE_SOURCE", "")  # git+URL or file:///CHECKOUT; empty: the package index
    wanted = "dipole[rl]" + f" @ {source}" * bool(source)
    command = [sys.executable, "-m", "pip", "install", "-q", wanted]
    if subprocess.run(command).returncode:
        raise RuntimeError("There is no release on the index yet. Set DIPOLE_SOURCE, and run this cell again.")

# %% [markdown]
# ## The agent
#
# A small environment: a bright block in noise, and the reward says whether the action named its half. A DQN has begun
# to learn it, and was saved.

# %%
import os

import gymnasium
import matplotlib.pyplot as plt
import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3 import DQN
from stable_baselines3.common.callbacks import BaseCallback

torch.set_num_threads(1)  # networks of this size are slower with more: from the shell, OMP_NUM_THREADS=1


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


agent = DQN("CnnPolicy", Blocks(), buffer_size=5000, learning_starts=32, train_freq=8, device="cpu", seed=0)
agent.learn(80).save("agent.zip")

# %% [markdown]
# ## What to look at
#
# The return of deterministic episodes (20 is the most, guessing gives 10), every 80 steps: how fast an agent learns is
# in the curve, not in its end.

# %%
from dipole.core.utils.progress import Progress

SMALL = os.environ.get("DIPOLE_TUTORIAL") == "small"
SEEDS, STEPS, EVERY = (range(3), 400, 80) if SMALL else (range(5), 1600, 80)


def returns(model, episodes=10):
    """The mean return of as many episodes, the same ones every time."""
    games, total = [Blocks() for _ in range(episodes)], 0.0
    seen = np.stack([game.reset(seed=1000 + number)[0] for number, game in enumerate(games)])
    for _ in range(20):
        actions, _ = model.predict(seen, deterministic=True)
        steps = [game.step(action) for game, action in zip(games, actions, strict=True)]
        seen, total = np.stack([step[0] for step in steps]), total + sum(step[1] for step in steps)
    return total / episodes


class Curve(BaseCallback):
    """Plays on the way, and shows how far the agent is."""

    def __init__(self, name):
        super().__init__()
        self.name, self.points = name, {}

    def _on_training_start(self):
        self.progress, self.first = Progress(), self.num_timesteps
        self.progress.start(self.name, STEPS, 0)
        self.points[0] = returns(self.model)

    def _on_step(self):
        step = self.num_timesteps - self.first
        if step % EVERY == 0:
            self.points[step] = returns(self.model)
            self.progress.values({"return": self.points[step]})
        self.progress.update(step)
        return True

    def _on_training_end(self):
        self.progress.note(f"{self.name}: return {self.points[STEPS]:.1f}")
        self.progress.close()


# %% [markdown]
# ## With and without
#
# The one line is `ContrastiveCallback(...)` among the callbacks. For each rollout it shows two random shifts of what
# the buffer holds to the agent's encoder, with a slow copy as key encoder. PPO, A2C, SAC and TD3 are loaded and
# continued in the same way.

# %%
from dipole.rl import ContrastiveCallback

OBJECTIVES = {"alone": None, "infonce": "infonce(temperature=0.1)", "with dp": "infonce(temperature=0.1) + 0.1*dp"}
curves, agents = {}, {}
for name, objective in OBJECTIVES.items():
    for seed in SEEDS:
        agent = DQN.load("agent.zip", env=Blocks(), device="cpu")
        agent.set_random_seed(seed)
        curve = Curve(f"{name}, seed {seed}")
        callbacks = [curve] if objective is None else [curve, ContrastiveCallback(objective, batch_size=32)]
        agents[name] = agent.learn(STEPS, callback=callbacks, reset_num_timesteps=False)
        curves[name, seed] = curve.points

# %% alt="Learning curves of three agents over the steps since they were loaded: mean and range of the seeds."
steps = list(range(0, STEPS + 1, EVERY))
figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
for name in OBJECTIVES:
    each = np.array([[curves[name, seed][step] for step in steps] for seed in SEEDS])
    (line,) = axes.plot(steps, each.mean(0), label=name)
    axes.fill_between(steps, each.min(0), each.max(0), color=line.get_color(), alpha=0.15)
axes.axhline(10, color="grey", linewidth=0.8, linestyle=":")
axes.set_xlabel("steps since the agent was loaded")
axes.set_ylabel("return of 20")
figure.legend(loc="outside right upper", frameon=False)
plt.show()

# %% [markdown]
# The line is the mean, the band goes from the worst seed to the best; dotted is guessing.

# %% [markdown]
# ## What it was worth
#
# One number for a curve: its mean, which is larger where an agent learned sooner. Mean and standard deviation over
# seeds, and the difference from the agent alone, paired by seed, with its 95 % interval.

# %%
from dipole.benchmarks.statistics import difference, summarize

level = {name: {seed: float(np.mean(list(curves[name, seed].values()))) for seed in SEEDS} for name in OBJECTIVES}
for name in OBJECTIVES:
    found, end = summarize(list(level[name].values())), np.mean([curves[name, seed][STEPS] for seed in SEEDS])
    line = f"{name:8} mean of the curve {found.mean:5.2f} +- {found.std:.2f}   at the end {end:5.2f}"
    if name != "alone":
        gain = difference(level["alone"], level[name])
        line += f"   against alone {gain.difference:+.2f} ({gain.low:+.2f} to {gain.high:+.2f})"
    print(line)

# %% [markdown]
# An interval that holds 0 says that so many seeds do not tell the two apart, whatever the picture looks like; one that
# does not holds for this task, this agent and this start. Three seeds are few: the default setting has five.

# %% [markdown]
# ## What it did to the encoder
#
# How far apart the agent's encoder keeps different observations, for the last seed of each.


# %% alt="Histograms of the distances of 64 observations in the encoders of the three agents."
def distances(model, count=64):
    env = Blocks()
    env.reset(seed=7)
    images = torch.as_tensor(np.stack([env.draw() for _ in range(count)]))
    with torch.no_grad():
        z = torch.nn.functional.normalize(model.q_net.features_extractor(images.float() / 255), dim=1)
    return ((1 - z @ z.T) / 2)[~torch.eye(count, dtype=torch.bool)].numpy()


figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
for name, model in agents.items():
    apart = distances(model)
    print(f"{name:8} mean distance {apart.mean():.3f}")
    axes.hist(apart, bins=40, histtype="step", label=name)
axes.set_xlabel("distance (1 - cos) / 2 of different observations")
axes.set_ylabel("pairs")
figure.legend(loc="outside right upper", frameon=False)
plt.show()

# %% [markdown]
# Save the agent as always: what the callback has learned is in the file, and the next callback goes on with it.
# [rl](../rl.md) has its arguments, pixel environments of the DeepMind Control Suite, and `ContrastiveSAC`, where the
# objective is part of the agent's own update.
