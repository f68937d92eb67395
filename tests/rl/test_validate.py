"""An object that is no environment, or breaks gymnasium's interface, is one message with a name and what is allowed."""

import re
from contextlib import closing

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3 import A2C, SAC
from stable_baselines3.common.vec_env import DummyVecEnv

from dipole.core.utils.errors import CheckpointError, ConfigError, OptionError, TrainingError
from dipole.rl import CheckpointCallback, ContrastiveCallback, ContrastiveSAC, DotEnv, WorkerVecEnv, make_env
from dipole.rl.envs import registry
from dipole.rl.episodes.play import evaluate
from tests.rl.conftest import tiny
from tests.runs import refused

STEPS = 30
STATE = {"hidden": (16,), "batch_size": 8, "learning_starts": 10, "buffer_size": 100, "seed": 0, "device": "cpu"}


# Faults of an environment in its observation, of the answer of its step and of that of its reset.
SEEN = {
    "float": lambda x: x.astype(np.float32), "normalised": lambda x: (x / 255).astype(np.float32),
    "int16": lambda x: x.astype(np.int16), "NaN": lambda x: np.full(x.shape, np.nan), "list": lambda x: x.tolist(),
    "0..1": lambda x: (x > 9).astype(np.uint8), "None": lambda x: None, "shape": lambda x: x[:, :-1],
}  # fmt: skip
STEPPED = {
    "step is None": lambda *_: None,
    "old step": lambda seen, reward, ends, stops, info: (seen, reward, ends or stops, info),
    "flag": lambda seen, reward, ends, stops, info: (seen, reward, "no", stops, info),
    "steps": lambda *answer: (*answer[:4], {"environment_steps": -4}),
    "episode": lambda *answer: (*answer[:4], {"episode": 5}),
}
RESET = {"reset is None": lambda seen, info: None, "old reset": lambda seen, info: seen}


class Altered(DotEnv):
    """The dot task with answers of another kind, from a step of its life on."""

    def __init__(self, kind="", at=0):
        super().__init__()
        self.kind, self.at, self.life = kind, at, 0

    def reset(self, **settings):
        if self.kind == "reset raises":
            raise OSError("no world today")
        seen, info = super().reset(**settings)
        if self.at == 0 and self.kind in SEEN:
            return SEEN[self.kind](seen), info
        return RESET.get(self.kind, lambda *answer: answer)(seen, info)

    def step(self, action):
        seen, *rest = super().step(action)
        self.life += 1
        if self.life >= self.at and self.kind in SEEN:
            return SEEN[self.kind](seen), *rest
        return STEPPED.get(self.kind, lambda *answer: answer)(seen, *rest)

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
    "flag": r"step of the environment Altered returned 'no' as terminated: it must be True or False",
    "old step": r"returned a tuple of 4 \(ndarray, float, bool, dict\).*gym's API of before 2022",
}
BLIND = Altered("render is None")


def a_worker(kind):
    with closing(WorkerVecEnv([lambda: Altered(kind)])) as env:
        env.reset()


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("wrapped", [False, True])
def test_wrong_interface_is_refused_at_the_first_step(tiny_agent, kind, wrapped):
    env = gymnasium.wrappers.TimeLimit(Altered(kind), 20) if wrapped else Altered(kind)
    with pytest.raises(ConfigError, match=CASES[kind]) as raised:
        tiny_agent(env).learn(STEPS)
    assert "Altered" in str(raised.value)


def test_observations_that_change_later_are_refused_and_other_episodes_are_passed_over(tiny_agent):
    agent = tiny_agent(Altered("shape", at=17))
    refused(ConfigError, r"Altered gives an observation of the shape \(9, 27, 28\)", agent.learn, STEPS)
    assert len(agent.replay_buffer) == 16
    agent = tiny_agent(gymnasium.wrappers.TimeLimit(Altered("episode"), 9)).learn(STEPS)
    assert [each["l"] for each in agent.ep_info_buffer] == [9, 9, 9]  # those of SB3's Monitor


BOX = gymnasium.spaces.Box


class Spaces(gymnasium.Env):
    """An environment of given spaces, whose observations and rewards are given too."""

    def __init__(self, observation=None, action=None, answer=None):
        self.observation_space = observation or BOX(0, 255, (3, 28, 28), np.uint8)
        self.action_space = action or BOX(-1, 1, (2,), np.float32)
        self.answer = answer or (lambda step: (self.observation_space.sample(), 1.0))
        self.count = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.answer(0)[0], {}

    def step(self, action):
        self.count += 1
        return *self.answer(self.count), False, self.count % 10 == 0, {}


def of_action(space):
    return ContrastiveSAC("CnnPolicy", Spaces(action=space))


def discrete(count):
    return A2C("MlpPolicy", Spaces(BOX(-1, 1, (4,)), spaces.Discrete(count)), device="cpu")


def failing():
    agent = tiny()
    agent.policy.actor.forward = lambda *_: int("my network")
    return agent


def of_observation(space):
    return ContrastiveSAC("MultiInputPolicy", Spaces(space))


IMAGE = BOX(0, 255, (9, 28, 28), np.uint8)
BOUNDS = "needs continuous actions with finite bounds"
IMAGES = r"needs uint8 images \(C, H, W\), vectors, or a dictionary of both"
BLIND_SAID = "sees no image here.*objective='none'"
LISTS = {"pixels": [[[0]]], "state": [0.0] * 4}
NESTED = spaces.Dict({"a": spaces.Dict({"b": BOX(-1, 1, (3,))})})


@pytest.mark.parametrize(("call", "error", "said"), [
    (lambda: a_worker("int16"), ConfigError, CASES["int16"]),  # raised in the parent
    (lambda: tiny(Altered("steps")).learn(STEPS), ConfigError, r"\['environment_steps'\] must be an integer >= 0"),
    (lambda: tiny(batch_size=10**9), OptionError, "a batch of images of 1000000000 x 9 x 28 x 28 takes .* GB"),
    (lambda: tiny(Altered("reset raises")).learn(1), TrainingError, "no world.*reset of .* Altered cannot be used"),
    (lambda: evaluate(tiny(), make_env("dot-discrete"), 1), ConfigError, r"for actions Box\(.*has Discrete\(5\)"),
    (lambda: evaluate(discrete(3), discrete(5).env, 1), ConfigError, r"actions Discrete\(3\).*has Discrete\(5\)"),
    (lambda: evaluate(discrete(3), discrete(3).env, 1, -1), ConfigError, "seed must be an integer from 0"),
    (lambda: evaluate(tiny(), BLIND, 1, frames=[]), ConfigError, "render of .* Altered returned None.*'rgb_array'"),
    (lambda: of_action(BOX(-1, 1, (0,))), ConfigError, BOUNDS),
    (lambda: of_action(BOX(-np.inf, np.inf, (2,))), ConfigError, BOUNDS),
    (lambda: of_action(spaces.Discrete(3)), ConfigError, f"{BOUNDS}.*no ClipAction"),
    (lambda: of_action(BOX(1, 1, (2,))), ConfigError, "low below high"),
    (lambda: of_action(BOX(0, 5, (2,), np.int32)), ConfigError, "a Box of floats"),
    (lambda: of_observation(spaces.Text(5)), ConfigError, IMAGES),
    (lambda: of_observation(NESTED), ConfigError, IMAGES),
    (lambda: of_observation(spaces.Dict(a=IMAGE, b=IMAGE)), ConfigError, "one image in a dict.*this one has 2"),
    (lambda: of_observation(spaces.Dict(a=IMAGE, b=spaces.Discrete(3))), ConfigError, r"'b' is Discrete\(3\)"),
    (lambda: tiny(make_env("dot", inputs="state"), objective="infonce"), ConfigError, BLIND_SAID),
    (lambda: ContrastiveSAC("MlpPolicy", make_env("dot")), ConfigError, "must be 'CnnPolicy', got 'MlpPolicy'"),
    (lambda: tiny().learn(1, callback="log"), ConfigError, "callback must be a callback of SB3, a list .*'log'"),
    (lambda: tiny().learn(1, callback=[3]), ConfigError, "callback must be a callback of SB3, a list .* got 3"),
    (lambda: tiny().learn(1, callback=ContrastiveCallback), ConfigError, "or a function, got <class .*Contrastive"),
    (lambda: tiny().predict(np.zeros((3, 4))), ConfigError, r"predict needs an observation of Box.*got \(3, 4\)"),
    (lambda: tiny().predict(None), ConfigError, "predict needs an observation of Box.*got NoneType"),
    (lambda: tiny(make_env("dot", inputs="both")).predict(LISTS), ConfigError, r"predict needs .* Dict\(.*got dict"),
    (lambda: failing().predict(np.zeros((2, 9, 28, 28))), ValueError, "^invalid literal .* 'my network'"),
    (lambda: tiny().set_env(DotEnv(size=40)), ConfigError, r"made for Box\(.*\(9, 28, 28\).* has Box\(.*\(9, 40, 40\)"),
    (lambda: CheckpointCallback("x").init_callback(SAC("MlpPolicy", "Pendulum-v1")), ConfigError, "of dipole, not SAC"),
    (lambda: tiny().set_env(DummyVecEnv([DotEnv] * 2)), ConfigError, r"for 1 environment, got 2.* load\(path, env="),
    (lambda: tiny(learning_rate=lambda left: left - 0.9).learn(20), ConfigError, "its function gives -.* progress of"),
    (lambda: tiny(learning_rate=lambda: 1), ConfigError, "no function of the remaining progress, 1 to 0: .*argument"),
    (lambda: tiny(preset=""), ConfigError, "preset: '' is not allowed"),
    (lambda: ContrastiveSAC.load("."), CheckpointError, "is a folder and no agent. `dipole.rl.resume` continues"),
    (lambda: ContrastiveSAC.load("nowhere.zip"), CheckpointError, "agent nowhere.zip cannot be read: .*No such file"),
    (lambda: tiny().learn(1, log_interval=0), ConfigError, "log_interval must be an integer >= 1, got 0"),
    (lambda: tiny(DummyVecEnv([DotEnv] * 2), train_freq=(1, "episode")), ConfigError, "here are 2: count steps"),
    (lambda: WorkerVecEnv([DotEnv, lambda: DotEnv(size=20)]), ConfigError, "environment 1 has the spaces .*20, 20"),
    (lambda: tiny(inputs="both"), ConfigError, "needs an image and a vector, in a dict"),
    (lambda: tiny(inputs="words"), ConfigError, "inputs: 'words' is not allowed. Allowed: auto, pixels, state"),
    (lambda: make_env("dot", inputs="stat"), ConfigError, "'pixels', 'state', 'both', got 'stat'.*Did you mean"),
])  # fmt: skip
def test_what_no_agent_can_learn_from_raises_one_error(call, error, said):
    refused(error, said, call)


class Poisoned(DummyVecEnv):
    """Gives the last environment a reward that is not finite at its 7th step."""

    count, value = 0, None

    def step_wait(self):
        observations, rewards, dones, infos = super().step_wait()
        self.count += 1
        if self.count == 7:
            rewards[-1] = self.value
        return observations, rewards, dones, infos


@pytest.mark.parametrize("value", [float("nan"), float("inf"), np.float32("-inf")])
@pytest.mark.parametrize("count", [1, 2])
def test_a_reward_that_is_not_finite_is_a_fault(tiny_agent, count, value):
    env = Spaces(answer=lambda step: (Spaces().observation_space.sample(), value if step == 7 else 1.0))
    if count == 2:
        env = Poisoned([DotEnv, DotEnv])
        env.value = value
    agent = tiny_agent(env, learning_starts=24)
    with pytest.warns(RuntimeWarning, match=rf"environment {count - 1} failed .*the reward is -?(nan|inf)"):
        agent.learn(30)
    assert len(agent.faults) == 1
    assert np.argwhere(~agent.replay_buffer.valid[:, : 30 // count]).tolist() == [[count - 1, 6]]
    assert np.isfinite(agent.replay_buffer.rewards).all()
    assert all(np.isfinite(each["r"]) for each in agent.ep_info_buffer)


@pytest.mark.filterwarnings("ignore:environment 0 failed")
def test_numbers_that_only_float64_holds_are_faults(tiny_agent):
    vectors = BOX(-np.inf, np.inf, (4,), np.float64)
    large = Spaces(vectors, answer=lambda step: (np.full(4, 1e39 if step == 13 else 0.5), 1.0))
    agent = ContrastiveSAC("MlpPolicy", large, objective="none", **STATE)
    agent.learn(STEPS)
    assert [fault["agent_step"] for fault in agent.faults] == [13]
    with pytest.raises(TrainingError, match=r"the reward is 1e\+300.*fault number 5 in a row"):
        tiny_agent(Spaces(answer=lambda step: (Spaces().observation_space.sample(), 1e300))).learn(STEPS)


def test_observation_of_a_custom_vecenv_that_is_not_finite_raises_an_error():
    class Unseen(DummyVecEnv):
        """Environments without a wrapper, as they are in processes of their own."""

        @property
        def unwrapped(self):
            return object()

    vectors = BOX(-np.inf, np.inf, (4,), np.float32)
    env = Unseen([lambda: Spaces(vectors, answer=lambda step: (np.full(4, np.nan if step == 13 else 0.5, "f4"), 1.0))])
    agent = ContrastiveSAC("MlpPolicy", env, objective="none", **STATE)
    refused(TrainingError, r"the observation is not finite: environment 0 of .* at agent step 13", agent.learn, STEPS)


class Old:
    def reset(self):
        return 0

    def step(self, action):
        return 0, 0, False, {}


@pytest.mark.parametrize(("env", "said"), [
    (None, r"an environment is needed, got None"),
    (DotEnv, r"DotEnv is a class and no environment: make one of it, DotEnv\(\.\.\.\)"),
    (type("Many", (), {"possible_agents": ("one", "two")})(), r"Many is an environment of PettingZoo"),
    (Old(), r"Old is no gymnasium\.Env\. This is gym's API"), ("Nowhere-v0", r"unknown task 'Nowhere-v0'"),
    (make_env, r"make_env is no environment\. Call it"), ([DotEnv()], r"list is no environment"),
    (type("Spaceless", (gymnasium.Env,), {})(), r"Spaceless has no observation_space"),
    ("dott", r"unknown task 'dott'.*dot"),
    (gymnasium.vector.SyncVectorEnv([DotEnv]), r"SyncVectorEnv is a vector environment of gymnasium"),
])  # fmt: skip
def test_wrong_types_of_environments_raise_errors(env, said):
    refused(ConfigError, said, ContrastiveSAC, "CnnPolicy", env)
    if env not in ("Nowhere-v0", "dott"):
        refused(ConfigError, said, evaluate, None, env, 1)


def test_tasks_are_named_and_factories_checked(tiny_agent, monkeypatch):
    assert tiny_agent("dot").learn(2).num_timesteps == 2
    assert tiny_agent("dipole/dot-v0").learn(2).num_timesteps == 2
    monkeypatch.setattr(registry, "_environments", dict(registry._environments))
    registry.environment("nothing")(lambda: None)
    refused(ConfigError, re.escape("the task 'nothing' made None, which is no gymnasium.Env"), make_env, "nothing")
