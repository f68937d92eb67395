"""State of wrappers: a resumed episode is the one that was interrupted, or resume says whose state is missing."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import wrappers
from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack, VecNormalize

from dipole.core.utils.errors import CheckpointError
from dipole.rl import DotEnv, resume, snapshots
from dipole.rl.envs.running.faults import guarded
from tests.rl.conftest import same


class Numbers(gymnasium.Env):
    """A walk on a line, seen as two numbers."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = self.np_random.normal(size=2)
        return self.at.astype(np.float32), {}

    def step(self, action):
        self.at = self.at + action[0] + 0.1 * self.np_random.normal(size=2)
        return self.at.astype(np.float32), float(self.at.sum()), bool(abs(self.at[0]) > 3), False, {}

    def get_state(self):
        return {"at": self.at, "random": self.np_random.bit_generator.state}

    def set_state(self, state):
        self.at = state["at"]
        self.np_random.bit_generator.state = state["random"]


WRAPPERS = {
    "TimeLimit": lambda env: wrappers.TimeLimit(env, 7),
    "NormalizeReward": lambda env: wrappers.NormalizeReward(env),
    "NormalizeObservation": lambda env: wrappers.NormalizeObservation(env),
    "FrameStackObservation": lambda env: wrappers.FrameStackObservation(env, 4),
    "FrameStackObservation padded": lambda env: wrappers.FrameStackObservation(env, 4, padding_type="zero"),
    "StickyAction": lambda env: wrappers.StickyAction(env, 0.5, (1, 4)),
    "RecordEpisodeStatistics": lambda env: wrappers.RecordEpisodeStatistics(wrappers.TimeLimit(env, 5)),
    "DelayObservation": lambda env: wrappers.DelayObservation(env, 3),
    "TimeAwareObservation": lambda env: wrappers.TimeAwareObservation(wrappers.TimeLimit(env, 9)),
    "MaxAndSkipObservation": lambda env: wrappers.MaxAndSkipObservation(env, 3),
    "Autoreset": lambda env: wrappers.Autoreset(wrappers.TimeLimit(env, 6)),
    "ClipReward": lambda env: wrappers.ClipReward(env, -1, 1),
    "Transformed": lambda env: wrappers.TransformReward(wrappers.RescaleObservation(env, -np.inf, np.inf), abs),
    "many": lambda env: wrappers.NormalizeReward(
        wrappers.FrameStackObservation(wrappers.NormalizeObservation(wrappers.TimeLimit(env, 8)), 2)
    ),
    "checked": lambda env: wrappers.OrderEnforcing(wrappers.PassiveEnvChecker(env)),
}
if "RepeatAction" in wrappers.__all__:  # since gymnasium 1.2
    WRAPPERS["RepeatAction"] = lambda env: wrappers.RepeatAction(env, 2)


def play(env, actions):
    seen = []
    for action in actions:
        observation, reward, terminated, truncated, info = env.step(action)
        episode = info.get("episode")
        seen.append((np.array(observation), reward, terminated, truncated, episode and (episode["r"], episode["l"])))
        if terminated or truncated:
            seen.append(np.array(env.reset()[0]))
    return seen


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_continues_where_it_was(name, tmp_path):
    from dipole.rl import plain_state

    actions = np.random.default_rng(0).uniform(-1, 1, (60, 1)).astype(np.float32)
    env = guarded(WRAPPERS[name](Numbers()))
    env.reset(seed=3)
    play(env, actions[:23])
    plain_state.write(tmp_path, "state", env.get_state())
    expected = play(env, actions[23:])
    again = guarded(WRAPPERS[name](Numbers()))
    again.reset(seed=99)
    assert again.set_state(plain_state.read(tmp_path, "state"))
    for one, two in zip(expected, play(again, actions[23:]), strict=True):
        np.testing.assert_equal(one, two)


@pytest.mark.parametrize("workers", [False, True])
def test_a_resumed_episode_keeps_its_limit_bit_for_bit(tiny_agent, tmp_path, workers, request):
    from functools import partial

    from dipole.rl import WorkerVecEnv

    def env():
        if not workers:
            return limited()
        made = WorkerVecEnv([partial(limited)])
        request.addfinalizer(made.close)
        return made

    straight = tiny_agent(env()).learn(40)
    first = tiny_agent(env()).learn(31)
    snapshots.save(first, tmp_path / "saved")
    again = resume(tmp_path / "saved", env(), device="cpu")
    again.learn(9, reset_num_timesteps=False)
    assert same(straight, again)
    assert [each["l"] for each in again.ep_info_buffer] == [each["l"] for each in straight.ep_info_buffer] == [13] * 3


def limited():
    return wrappers.NormalizeReward(wrappers.TimeLimit(DotEnv(), 13))


def test_vector_wrappers_continue_as_well(tiny_agent, tmp_path):
    def env():
        return VecNormalize(VecFrameStack(DummyVecEnv([lambda: DotEnv(frame_stack=1)] * 2), 3), norm_obs=False)

    straight = tiny_agent(env()).learn(48)
    snapshots.save(tiny_agent(env()).learn(36), tmp_path / "saved")
    again = resume(tmp_path / "saved", env(), device="cpu")
    again.learn(12, reset_num_timesteps=False)
    assert same(straight, again)
    assert again.env.ret_rms.count == straight.env.ret_rms.count


class Learned(gymnasium.RewardWrapper):
    """Holds what no file can."""

    def __init__(self, env):
        super().__init__(env)
        self.model = torch.nn.Linear(1, 1)
        self.lock = object()

    def reward(self, reward):
        return reward


class Told(Learned):
    def get_state(self):
        return {"scale": 2}

    def set_state(self, state):
        assert state == {"scale": 2}


def test_wrapper_that_cannot_be_saved_raises_an_error(tiny_agent, tmp_path):
    snapshots.save(tiny_agent(Learned(DotEnv())).learn(12), tmp_path / "saved")
    with pytest.raises(CheckpointError, match=r"the wrapper Learned is not in the checkpoint.*lock \(object\)"):
        resume(tmp_path / "saved", Learned(DotEnv()), device="cpu")
    with pytest.raises(CheckpointError, match=r"with the wrappers Monitor, Learned, Contract, this environment has"):
        resume(tmp_path / "saved", DotEnv(), device="cpu")
    snapshots.save(tiny_agent(Told(DotEnv())).learn(12), tmp_path / "told")
    assert resume(tmp_path / "told", Told(DotEnv()), device="cpu").num_timesteps == 12
