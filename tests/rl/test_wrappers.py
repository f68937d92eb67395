"""State of wrappers: a resumed episode is the one that was interrupted, or resume says whose state is missing."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import wrappers
from stable_baselines3.common.vec_env import DummyVecEnv, VecExtractDictObs, VecFrameStack, VecNormalize

from dipole.core.utils.errors import CheckpointError, ConfigError
from dipole.rl import ContrastiveSAC, DotEnv, WorkerVecEnv, plain_state, resume, snapshots
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
    actions = np.random.default_rng(0).uniform(-1, 1, (60, 1)).astype(np.float32)
    env, again = (guarded(WRAPPERS[name](Numbers())) for _ in range(2))
    env.reset(seed=3)
    play(env, actions[:23])
    plain_state.write(tmp_path, "state", env.get_state())
    expected = play(env, actions[23:])
    again.reset(seed=99)
    assert again.set_state(plain_state.read(tmp_path, "state"))
    for one, two in zip(expected, play(again, actions[23:]), strict=True):
        np.testing.assert_equal(one, two)


@pytest.mark.parametrize("workers", [False, True])
def test_a_resumed_episode_keeps_its_limit_bit_for_bit(tiny_agent, tmp_path, workers, request):
    def env():
        if not workers:
            return limited()
        made = WorkerVecEnv([limited])
        request.addfinalizer(made.close)
        return made

    straight = tiny_agent(env()).learn(40)
    snapshots.save(tiny_agent(env()).learn(31), tmp_path / "saved")
    again = resume(tmp_path / "saved", env(), device="cpu").learn(9, reset_num_timesteps=False)
    assert same(straight, again)
    assert [each["l"] for each in again.ep_info_buffer] == [each["l"] for each in straight.ep_info_buffer] == [13] * 3


def limited():
    return wrappers.NormalizeReward(wrappers.TimeLimit(DotEnv(), 13))


def test_vector_wrappers_continue_as_well(tiny_agent, tmp_path):
    straight = tiny_agent(NORMALIZED["stacked"]()).learn(48)
    snapshots.save(tiny_agent(NORMALIZED["stacked"]()).learn(36), tmp_path / "saved")
    again = resume(tmp_path / "saved", NORMALIZED["stacked"](), device="cpu").learn(12, reset_num_timesteps=False)
    assert same(straight, again)
    assert again.env.ret_rms.count == straight.env.ret_rms.count


class Last(gymnasium.ObservationWrapper):
    """Pictures with their channels last, alone or in a dictionary with numbers."""

    def __init__(self, keyed):
        super().__init__(DotEnv(frame_stack=1))
        channels, height, width = self.env.observation_space.shape
        image = gymnasium.spaces.Box(0, 255, (height, width, channels), np.uint8)
        self.keyed, self.observation_space = keyed, image
        if keyed:
            numbers = gymnasium.spaces.Box(-9, 9, (2,), np.float32)
            self.observation_space = gymnasium.spaces.Dict({"eye": image, "numbers": numbers})

    def observation(self, seen):
        image = np.ascontiguousarray(seen.transpose(1, 2, 0))
        return {"eye": image, "numbers": self.unwrapped._dot.astype(np.float32)} if self.keyed else image


def vector(make, **settings):
    return VecNormalize(DummyVecEnv([make] * 2), **settings)


NORMALIZED = {
    "stacked": lambda: VecFrameStack(vector(lambda: DotEnv(frame_stack=1), norm_obs=False), 3),
    "stacked twice": lambda: VecFrameStack(
        VecFrameStack(vector(lambda: DotEnv(frame_stack=1), norm_obs=False), 2, "first"), 2, "first"
    ),
    "transposed": lambda: vector(lambda: Last(False), norm_obs=False),  # SB3 adds VecTransposeImage
    "stacked and transposed": lambda: VecFrameStack(vector(lambda: Last(False), norm_obs=False), 3),
    "in a dictionary": lambda: vector(lambda: Last(True), norm_obs_keys=["numbers"]),
    "selected": lambda: VecExtractDictObs(vector(lambda: Last(True), norm_obs_keys=["numbers"]), "eye"),
}


@pytest.mark.parametrize("name", NORMALIZED)
def test_replay_holds_what_wrappers_above_a_normalizer_give(name, tmp_path):
    """Against what the agent saw, without normalisation, and the rewards of the environment."""
    agent = ContrastiveSAC(
        "CnnPolicy", NORMALIZED[name](), preset="small", buffer_size=100, learning_starts=10, batch_size=8, seed=0,
        device="cpu",
    )  # fmt: skip
    shown, rewards, replay = [], [], agent.replay_buffer
    add = replay.add

    def noted(obs, following, action, reward, *rest):
        shown.append(agent._last_obs)
        rewards.append(reward)
        return add(obs, following, action, reward, *rest)

    replay.add = noted
    agent.learn(24)
    eyes = np.stack([each["eye"] if isinstance(each, dict) else each for each in shown], 1)  # (environments, steps)
    for env in range(2):
        slots = np.arange(eyes.shape[1])
        stored = replay.frames.stacks(np.full(len(slots), env), replay._planes(np.full(len(slots), env), slots, 0))
        np.testing.assert_array_equal(stored, eyes[env])
        np.testing.assert_array_equal(replay.rewards[env, slots], np.array(rewards, np.float32)[:, env])
    if "dictionary" in name:
        assert np.abs(replay.states[:, : eyes.shape[1]]).max() <= 1  # positions, not normalised
    snapshots.save(agent, tmp_path / "saved")
    agent.learn(6, reset_num_timesteps=False)
    again = resume(tmp_path / "saved", NORMALIZED[name](), device="cpu").learn(6, reset_num_timesteps=False)
    assert same(agent, again)


@pytest.mark.parametrize(
    "make",
    [
        lambda: VecFrameStack(vector(lambda: Last(True), norm_obs_keys=["numbers"]), 3),
        lambda: VecFrameStack(vector(Numbers), 2),
        lambda: VecExtractDictObs(vector(lambda: Last(True), norm_obs_keys=["numbers"]), "numbers"),
    ],
)
def test_wrappers_that_change_normalised_observations_are_refused(make):
    with pytest.raises(ConfigError, match=r"changes normalised observations.* Make VecNormalize the outermost wrapper"):
        ContrastiveSAC("CnnPolicy", make(), objective="none", device="cpu")


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
