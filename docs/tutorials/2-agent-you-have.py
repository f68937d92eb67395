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
# You have a saved agent of stable-baselines3 (SB3) that learns from pixels. In this
# tutorial you load it, add a callback that trains its encoder with a contrastive
# objective, and measure over several seeds whether that helps.
#
# Time on one core: 8 s with `DIPOLE_TUTORIAL=small`, 2 min without. Nothing is
# downloaded.

# %%
import importlib.util
import os
import subprocess
import sys

if importlib.util.find_spec("dipole") is None:  # on Colab, for example
    source = os.environ.get("DIPOLE_SOURCE", "")  # git+URL or file:///CHECKOUT
    if not source:
        raise RuntimeError("Set DIPOLE_SOURCE to git+URL or file:///CHECKOUT.")
    command = [sys.executable, "-m", "pip", "install", "-q"]
    packages = [f"dipole[rl] @ {source}"]
    if subprocess.run(command + packages).returncode:
        raise RuntimeError(f"pip cannot install dipole from {source}.")

# %% [markdown]
# ## The agent
#
# The environment is small. Each picture shows a bright block in noise. The reward is 1
# if the action names the half of the picture that the block is in. You train a DQN on
# it for a few steps and save it.

# %%
import os

import gymnasium
import matplotlib.pyplot as plt
import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3 import DQN
from stable_baselines3.common.callbacks import BaseCallback

torch.set_num_threads(
    1
)  # small networks are slower with more threads. In a shell: OMP_NUM_THREADS=1


class Blocks(gymnasium.Env):
    """Show a bright block in noise. The reward is 1 if the action names its half."""

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


agent = DQN(
    "CnnPolicy",
    Blocks(),
    buffer_size=5000,
    learning_starts=32,
    train_freq=8,
    device="cpu",
    seed=0,
)
agent.learn(80).save("agent.zip")

# %% [markdown]
# ## Measure how fast it learns
#
# Every 80 steps you measure the return of deterministic episodes. The best return is
# 20, and guessing gives 10. The whole curve shows how fast an agent learns. The last
# point alone does not.

# %%
SMALL = os.environ.get("DIPOLE_TUTORIAL") == "small"
SEEDS, STEPS, EVERY = (range(2), 240, 80) if SMALL else (range(5), 1600, 80)


def returns(model, episodes=10):
    """Return the mean return of the same episodes every time."""
    games, total = [Blocks() for _ in range(episodes)], 0.0
    seen = np.stack(
        [game.reset(seed=1000 + number)[0] for number, game in enumerate(games)]
    )
    for _ in range(20):
        actions, _ = model.predict(seen, deterministic=True)
        steps = [game.step(action) for game, action in zip(games, actions, strict=True)]
        seen, total = (
            np.stack([step[0] for step in steps]),
            total + sum(step[1] for step in steps),
        )
    return total / episodes


class Curve(BaseCallback):
    """Measure the return during training, and print it."""

    def __init__(self, name):
        super().__init__()
        self.name, self.points = name, {}

    def _on_training_start(self):
        self.first = self.num_timesteps
        self.points[0] = returns(self.model)

    def _on_step(self):
        step = self.num_timesteps - self.first
        if step % EVERY == 0:
            self.points[step] = returns(self.model)
        return True

    def _on_training_end(self):
        print(f"{self.name}: return {self.points[STEPS]:.1f}")


# %% [markdown]
# ## Train with and without the objective
#
# `ContrastiveCallback(...)` is the only line that you add. After each rollout it draws
# observations from the replay buffer and shifts them at random, twice. The agent's
# encoder sees one view, and a momentum copy of it sees the other. You can continue
# PPO, A2C, SAC and TD3 in the same way.

# %%
from dipole.rl import ContrastiveCallback

OBJECTIVES = {
    "alone": None,
    "infonce": "infonce(temperature=0.1)",
    "with dp": "infonce(temperature=0.1) + 0.1*dp",
}
curves, agents = {}, {}
for name, objective in OBJECTIVES.items():
    for seed in SEEDS:
        agent = DQN.load("agent.zip", env=Blocks(), device="cpu")
        agent.set_random_seed(seed)
        curve = Curve(f"{name}, seed {seed}")
        callbacks = (
            [curve]
            if objective is None
            else [curve, ContrastiveCallback(objective, batch_size=32)]
        )
        agents[name] = agent.learn(STEPS, callback=callbacks, reset_num_timesteps=False)
        curves[name, seed] = curve.points

# %% alt="Learning curves of three agents, with mean and range over the seeds."
steps = list(range(0, STEPS + 1, EVERY))
figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
for name in OBJECTIVES:
    each = np.array([[curves[name, seed][step] for step in steps] for seed in SEEDS])
    (line,) = axes.plot(steps, each.mean(0), label=name)
    axes.fill_between(
        steps, each.min(0), each.max(0), color=line.get_color(), alpha=0.15
    )
axes.axhline(10, color="grey", linewidth=0.8, linestyle=":")
axes.set_xlabel("steps since the agent was loaded")
axes.set_ylabel("return of 20")
figure.legend(loc="outside right upper", frameon=False)
plt.show()

# %% [markdown]
# Each line is the mean over seeds, and the band goes from the worst seed to the best.
# The dotted line is guessing.

# %% [markdown]
# ## Test whether it helps
#
# The mean of a curve sums it up in one number, which is larger if the agent learned
# sooner. The table has its mean and standard deviation over the seeds. It also has the
# difference from the agent alone, paired by seed, with a 95 % confidence interval.

# %%
from dipole.benchmarks.statistics import difference, summarize

level = {
    name: {seed: float(np.mean(list(curves[name, seed].values()))) for seed in SEEDS}
    for name in OBJECTIVES
}
for name in OBJECTIVES:
    found, end = (
        summarize(list(level[name].values())),
        np.mean([curves[name, seed][STEPS] for seed in SEEDS]),
    )
    line = f"{name:8} mean of the curve {found.mean:5.2f} +- {found.std:.2f}"
    line += f"   at the end {end:5.2f}"
    if name != "alone":
        gain = difference(level["alone"], level[name])
        interval = f"({gain.low:+.2f} to {gain.high:+.2f})"
        line += f"   against alone {gain.difference:+.2f} {interval}"
    print(line)

# %% [markdown]
# If the interval contains 0, the difference is not significant with this number of
# seeds. If it does not, the difference is significant for this task, this agent and
# this start. Two seeds are few, so the default is five.

# %% [markdown]
# ## Look at the encoder
#
# The histograms show the distances between the features of different observations, for
# the last seed of each agent.


# %% alt="Histograms of the distances of 64 observations in the encoders of the three agents."
def distances(model, count=64):
    env = Blocks()
    env.reset(seed=7)
    images = torch.as_tensor(np.stack([env.draw() for _ in range(count)]))
    with torch.no_grad():
        z = torch.nn.functional.normalize(
            model.q_net.features_extractor(images.float() / 255), dim=1
        )
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
# Save the agent as usual. The file includes the weights that the callback has learned,
# and a callback of the loaded agent continues with them. [The page on
# agents](../background/rl.md) describes the callback's arguments, the pixel
# environments of the DeepMind Control Suite, and `ContrastiveSAC`, which has the
# objective in its own update.
