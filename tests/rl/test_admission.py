"""What is no environment, or breaks gymnasium's interface, is one message with a name and what is allowed."""

import re

import gymnasium
import numpy as np
import pytest

from dipole.core.ground.errors import ConfigError, TrainingError
from dipole.rl import ContrastiveSAC, DotEnv, WorkerVecEnv, make_env
from dipole.rl.envs import registry
from dipole.rl.episodes.play import evaluate

STEPS = 30


class Altered(DotEnv):
    """The dot task with answers of another kind, from a step of its life on."""

    def __init__(self, kind="", at=0):
        super().__init__()
        self.kind, self.at, self.life = kind, at, 0

    def reset(self, **settings):
        observation, info = super().reset(**settings)
        if self.kind == "reset raises":
            raise OSError("no world today")
        if self.kind == "reset is None":
            return None
        if self.kind == "old reset":
            return observation
        return (self.altered(observation) if self.at == 0 else observation), info

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        self.life += 1
        if self.life < self.at:
            return observation, reward, terminated, truncated, info
        if self.kind == "step is None":
            return None
        if self.kind == "old step":
            return observation, reward, terminated or truncated, info
        return self.altered(observation), reward, terminated, truncated, info

    def altered(self, observation):
        return {
            "float": lambda: observation.astype(np.float32),
            "normalised": lambda: (observation / 255).astype(np.float32),
            "int16": lambda: observation.astype(np.int16),
            "NaN": lambda: np.full(observation.shape, np.nan),
            "0..1": lambda: (observation > 9).astype(np.uint8),
            "None": lambda: None,
            "list": lambda: observation.tolist(),
            "shape": lambda: observation[:, :-1],
        }.get(self.kind, lambda: observation)()

    def render(self):
        return None if self.kind == "render is None" else super().render()


CASES = {
    "float": r"observation of float32 from 0 to 255, but its space is uint8\. Allowed: uint8 from 0 to 255",
    "normalised": r"float32 from 0 to 1, but its space is uint8.*\(255 \* x\)\.astype",
    "int16": r"int16 from 0 to 255, but its space is uint8",
    "NaN": r"float64 from nan to nan, but its space is uint8",
    "0..1": r"gives pixels of 0 and 1 in a space of 0 to 255",
    "None": r"gives None as an observation\. Allowed: Box",
    "list": r"gives a list as an observation\. Allowed: an array",
    "shape": r"shape \(9, 27, 28\), but its space says \(9, 28, 28\)",
    "reset is None": r"reset of the environment Altered returned None: gymnasium's reset returns \(observation, info\)",
    "old reset": r"reset of the environment Altered returned one ndarray.*gym's API of before 2022",
    "step is None": r"step of the environment Altered returned None: gymnasium's step returns",
    "old step": r"returned a tuple of 4 \(ndarray, float, bool, dict\).*gym's API of before 2022",
}


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("wrapped", [False, True])
def test_another_interface_is_refused_at_the_first_step(tiny_agent, kind, wrapped):
    env = gymnasium.wrappers.TimeLimit(Altered(kind), 20) if wrapped else Altered(kind)
    with pytest.raises(ConfigError, match=CASES[kind]) as raised:
        tiny_agent(env).learn(STEPS)
    assert "Altered" in str(raised.value)


def test_an_environment_that_changes_later_is_refused_then(tiny_agent):
    agent = tiny_agent(Altered("shape", at=17))
    with pytest.raises(ConfigError, match=r"Altered gives an observation of the shape \(9, 27, 28\)"):
        agent.learn(STEPS)
    assert len(agent.replay_buffer) == 16


def test_workers_tell_what_they_refuse():
    env = WorkerVecEnv([lambda: Altered("int16")])
    try:
        with pytest.raises(ConfigError, match=CASES["int16"]):
            env.reset()
    finally:
        env.close()


def test_a_reset_that_raises_is_one_message(tiny_agent):
    with pytest.raises(TrainingError, match=r"no world today.*reset of the environment Altered cannot be used"):
        tiny_agent(Altered("reset raises")).learn(STEPS)


def test_an_environment_that_draws_nothing_is_named(tiny_agent):
    agent = tiny_agent()
    with pytest.raises(ConfigError, match=r"render of the environment Altered returned None.*render_mode='rgb_array'"):
        evaluate(agent, Altered("render is None"), 1, frames=[])


class Many:
    possible_agents = ("one", "two")


class Old:
    def reset(self):
        return 0

    def step(self, action):
        return 0, 0, False, {}


class Spaceless(gymnasium.Env):
    pass


@pytest.mark.parametrize(
    ("env", "said"),
    [
        (None, r"an environment is needed, got None"),
        (DotEnv, r"DotEnv is a class and no environment: make one of it, DotEnv\(\.\.\.\)"),
        (Many(), r"Many is an environment of PettingZoo"),
        (Old(), r"Old is no gymnasium\.Env\. This is gym's API"),
        (make_env, r"make_env is no environment\. Call it"),
        ([DotEnv()], r"list is no environment"),
        (Spaceless(), r"Spaceless has no observation_space"),
        ("Nowhere-v0", r"unknown task 'Nowhere-v0'"),
        ("dott", r"unknown task 'dott'.*dot"),
        (gymnasium.vector.SyncVectorEnv([DotEnv]), r"SyncVectorEnv is a vector environment of gymnasium"),
    ],
)
def test_what_is_no_environment_is_named(env, said):
    with pytest.raises(ConfigError, match=said):
        ContrastiveSAC("CnnPolicy", env)
    if env not in ("Nowhere-v0", "dott"):
        with pytest.raises(ConfigError, match=said):
            evaluate(None, env, 1)


def test_a_name_is_an_environment(tiny_agent):
    assert tiny_agent("dot").learn(2).num_timesteps == 2
    assert tiny_agent("dipole/dot-v0").learn(2).num_timesteps == 2


def test_a_factory_that_makes_nothing_is_named(monkeypatch):
    monkeypatch.setattr(registry, "_environments", dict(registry._environments))
    registry.environment("nothing")(lambda: None)
    with pytest.raises(ConfigError, match=re.escape("the task 'nothing' made None, which is no gymnasium.Env")):
        make_env("nothing")
