"""Faults and wrappers: environments that raise, workers that die, checkpoints that continue or say why not."""

from collections import Counter
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import wrappers
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.noise import NormalActionNoise, OrnsteinUhlenbeckActionNoise
from stable_baselines3.common.vec_env import DummyVecEnv, VecExtractDictObs, VecFrameStack, VecNormalize

from dipole.core.utils.errors import CheckpointError, ConfigError, TrainingError
from dipole.rl import CheckpointCallback, ContrastiveSAC, DotEnv, WorkerVecEnv, make_env, resume, snapshots
from dipole.rl.envs.running.faults import PATIENCE, Guard, guarded
from tests.rl.conftest import assert_resumes, same
from tests.rl.in_workers import Dying, FailingAt, limited, unmakeable
from tests.runs import refused


def test_a_step_that_raises_ends_the_episode_as_truncated_and_training_goes_on(tiny_agent):
    env = Guard(FailingAt(at={3}))
    env.reset(seed=11)
    last = [env.step(np.zeros(2))[0] for _ in range(2)][-1]
    observation, reward, terminated, truncated, info = env.step(np.zeros(2))
    np.testing.assert_array_equal(observation, last)
    assert (reward, terminated, truncated) == (0.0, False, True)
    error = "FloatingPointError: the cart left the universe"
    assert info["fault"] == {"error": error, "step": 3, "episode": 1, "seed": 11}
    env.reset()
    assert "fault" not in env.step(np.zeros(2))[4]
    agent = tiny_agent(FailingAt(at={7, 15}, resets={3}))
    with pytest.warns(RuntimeWarning, match=r"environment 0 failed at its step 7 \(episode 1 after seed 0\)"):
        agent.learn(25)
    assert [fault["step"] for fault in agent.faults] == [7, 15]
    assert agent.logger.name_to_value["rollout/faults"] == 2
    assert np.flatnonzero(~agent.replay_buffer.valid[0, :25]).tolist() == [6, 14]
    assert agent.replay_buffer.dones.sum() == 0


@pytest.mark.parametrize("in_worker", [False, True])
def test_an_environment_that_is_broken_for_good_stops_the_run(tiny_agent, workers, in_worker):
    env = workers([partial(FailingAt, range(10, 200))]) if in_worker else FailingAt(at=range(10, 200))
    with pytest.warns(RuntimeWarning):
        refused(TrainingError, f"fault number {PATIENCE} in a row|5 faults in", tiny_agent(env).learn, 40)


@pytest.mark.parametrize(
    ("at", "episode", "hangs", "reason"),
    [(57, 2, False, "exit code 3"), (21, 1, True, r"no answer for 2 seconds \(timeout\)")],
)
def test_a_worker_that_dies_or_hangs_is_restarted(tiny_agent, tmp_path, workers, at, episode, hangs, reason):
    env = workers([partial(Dying, str(tmp_path / "died"), at, hangs), DotEnv], timeout=2 if hangs else 60)
    agent = tiny_agent(env, learning_starts=100)
    said = rf"environment 0 failed at its step {at} \(episode {episode} after seed 0\).*{reason}"
    with pytest.warns(RuntimeWarning, match=said):
        agent.learn(120)
    assert (agent.num_timesteps, len(agent.faults), env.counters()["_episodes"][0]) == (120, 1, episode + 1)
    assert not agent.replay_buffer.valid[0, at - 1]
    assert agent.replay_buffer.valid[1, :60].all()


def test_a_worker_that_dies_between_two_calls_is_restarted(tiny_agent, tmp_path, workers):
    env = workers([DotEnv, DotEnv])

    def kill():
        env.processes[0].kill()
        env.processes[0].join()

    agent = tiny_agent(env)
    agent.learn(20)
    kill()
    snapshots.save(agent, tmp_path / "saved")  # asks every environment for its state
    with pytest.warns(RuntimeWarning, match=r"environment 0 failed at its step 10 .*exit code -9"):
        agent.learn(20, reset_num_timesteps=False)
    assert (agent.num_timesteps, len(agent.faults)) == (40, 1)
    assert np.flatnonzero(~agent.replay_buffer.valid[0, :20]).tolist() == [10]
    kill()
    with pytest.warns(RuntimeWarning, match="environment 0 failed"):
        agent.learn(4)  # starts with a reset
    refused(ConfigError, "2 environments need an action each, got 1", env.step, np.zeros((1, 2)))
    kill()
    env.close()
    assert not any(process.is_alive() for process in env.processes)
    refused(ConfigError, "are closed: make new ones", env.reset)


@pytest.mark.parametrize("task", ["dot", "dot in a worker", "cheetah-run"])
def test_resume_in_the_middle_is_bit_exact(tiny_agent, tmp_path, task, request, workers):
    if task == "cheetah-run":
        request.getfixturevalue("opengl")

    def env():
        if task == "dot in a worker":
            return workers([partial(make_env, "dot")])
        return make_env(task, size=28, rendering="fast") if task == "cheetah-run" else make_env(task)

    used = env()
    straight = tiny_agent(used).learn(20)
    tiny_agent(used).learn(20, callback=CheckpointCallback(tmp_path, every=6))
    assert [path.name for path in snapshots.checkpoints(tmp_path)] == ["agent-000000012", "agent-000000018"]
    np.random.seed(99)
    torch.manual_seed(99)
    again = resume(tmp_path / "agent-000000012", env(), device="cpu")
    assert again.num_timesteps == 12
    again.learn(8, reset_num_timesteps=False)
    assert same(straight, again)
    assert again.environment_steps == straight.environment_steps
    one, two = (each.contrast_optimizer.state_dict()["state"] for each in (straight, again))
    assert all(torch.equal(one[k]["exp_avg_sq"], two[k]["exp_avg_sq"]) for k in one)
    a, b = (each.replay_buffer.sample(8) for each in (straight, again))
    assert torch.equal(a.observations, b.observations)


@pytest.mark.parametrize("envs", [1, 2])
def test_correlated_action_noise_resumes_bit_for_bit(tiny_agent, tmp_path, envs):
    def parts():
        env = make_vec_env(lambda: make_env("dot"), envs, seed=0)
        return env, OrnsteinUhlenbeckActionNoise(np.zeros(2), np.full(2, 0.3))

    (env, noise), (other, same_noise) = parts(), parts()
    straight = tiny_agent(env, action_noise=noise).learn(20 * envs)
    tiny_agent(other, action_noise=same_noise).learn(16 * envs, callback=CheckpointCallback(tmp_path, every=12 * envs))
    env, noise = parts()
    again = resume(snapshots.checkpoints(tmp_path)[0], env, device="cpu", action_noise=noise)
    again.learn(20 * envs - again.num_timesteps, reset_num_timesteps=False)
    assert same(straight, again)
    larger = OrnsteinUhlenbeckActionNoise(np.zeros(2), np.full(2, 0.5))
    again = resume(snapshots.checkpoints(tmp_path)[0], parts()[0], device="cpu", action_noise=larger)
    assert "sigma=[0.5 0.5]" in repr(again.action_noise)
    other = NormalActionNoise(np.zeros(2), np.ones(2))
    with pytest.raises(CheckpointError, match=r"written with the action_noise .*Noise, this agent has NormalAction"):
        resume(snapshots.checkpoints(tmp_path)[0], parts()[0], device="cpu", action_noise=other)


def test_files_of_a_killed_writer_are_removed_and_without_a_state_an_episode_starts(tmp_path, tiny_agent):
    left = tmp_path / ".agent-000000009.0123abcd.tmp"
    left.mkdir()
    (left / "agent.zip").write_bytes(b"half")
    others = tmp_path / ".episode.0123abcd.tmp.gif"
    others.write_bytes(b"somebody writes")
    tiny_agent().learn(2, callback=CheckpointCallback(tmp_path, every=100))
    assert [each.name for each in tmp_path.iterdir()] == [others.name]

    class Opaque(DotEnv):
        get_state = None
        set_state = None

    snapshots.save(tiny_agent(Opaque()).learn(15), tmp_path / "saved")
    with pytest.warns(RuntimeWarning, match="a new episode starts"):
        agent = resume(tmp_path / "saved", Opaque(), device="cpu")
    assert agent.learn(5, reset_num_timesteps=False).num_timesteps == 20


def test_a_failing_checkpoint_leaves_the_old_one(tiny_agent, tmp_path, monkeypatch):
    agent = tiny_agent().learn(12)
    folder = snapshots.save(agent, tmp_path / "saved")

    def full(*arguments, **arrays):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    refused(CheckpointError, "free some space", snapshots.save, agent, folder)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    assert resume(folder, make_env("dot"), device="cpu").num_timesteps == 12


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
    "NormalizeReward": wrappers.NormalizeReward,
    "NormalizeObservation": wrappers.NormalizeObservation,
    "FrameStackObservation": lambda env: wrappers.FrameStackObservation(env, 4),
    "FrameStackObservation padded": lambda env: wrappers.FrameStackObservation(env, 4, padding_type="zero"),
    "StickyAction": lambda env: wrappers.StickyAction(env, 0.5, (1, 4)),
    "RecordEpisodeStatistics": lambda env: wrappers.RecordEpisodeStatistics(wrappers.TimeLimit(env, 5)),
    "DelayObservation": lambda env: wrappers.DelayObservation(env, 3),
    "TimeAwareObservation": lambda env: wrappers.TimeAwareObservation(wrappers.TimeLimit(env, 9)),
    "MaxAndSkipObservation": lambda env: wrappers.MaxAndSkipObservation(env, 3),
    "Autoreset": lambda env: wrappers.Autoreset(wrappers.TimeLimit(env, 6)),
    "Transformed": lambda env: wrappers.TransformReward(wrappers.RescaleObservation(env, -np.inf, np.inf), abs),
    "many": lambda env: wrappers.NormalizeReward(
        wrappers.FrameStackObservation(wrappers.NormalizeObservation(wrappers.TimeLimit(env, 8)), 2)
    ),
    "checked": lambda env: wrappers.OrderEnforcing(wrappers.PassiveEnvChecker(env)),
}


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
    snapshots.write_plain(tmp_path, "state", env.get_state())
    expected = play(env, actions[23:])
    again.reset(seed=99)
    assert again.set_state(snapshots.read_plain(tmp_path, "state"))
    for one, two in zip(expected, play(again, actions[23:]), strict=True):
        np.testing.assert_equal(one, two)


@pytest.mark.parametrize("in_worker", [False, True])
def test_a_resumed_episode_keeps_its_limit_bit_for_bit(tiny_agent, tmp_path, in_worker, workers):
    env = (lambda: workers([limited])) if in_worker else limited
    straight, again = assert_resumes(tiny_agent, env, tmp_path, 13, 4)
    assert [each["l"] for each in again.ep_info_buffer] == [each["l"] for each in straight.ep_info_buffer] == [5] * 3


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
def test_replay_holds_what_wrappers_above_a_normalizer_give(tiny_agent, name, tmp_path):
    """Against what the agent saw, without normalisation, and the rewards of the environment."""
    shown, rewards = [], []

    def noting(env):
        agent = tiny_agent(env, image_size=None)
        add = agent.replay_buffer.add

        def noted(obs, following, action, reward, *rest):
            shown.append(agent._last_obs)
            rewards.append(reward)
            return add(obs, following, action, reward, *rest)

        agent.replay_buffer.add = noted
        return agent

    agent, again = assert_resumes(noting, NORMALIZED[name], tmp_path, 14, 4)
    assert again.env.ret_rms.count == agent.env.ret_rms.count
    replay = agent.replay_buffer
    eyes = np.stack([each["eye"] if isinstance(each, dict) else each for each in shown], 1)  # (environments, steps)
    for env in range(2):
        slots = np.arange(eyes.shape[1])
        stored = replay.frames.stacks(np.full(len(slots), env), replay._planes(np.full(len(slots), env), slots, 0))
        np.testing.assert_array_equal(stored, eyes[env])
        np.testing.assert_array_equal(replay.rewards[env, slots], np.array(rewards, np.float32)[:, env])
    if "dictionary" in name:
        assert np.abs(replay.states[:, : eyes.shape[1]]).max() <= 1  # positions, not normalised


def above(make):
    """Make an agent whose wrapper changes normalised observations."""
    return ContrastiveSAC("CnnPolicy", make(), objective="none", device="cpu")


CHANGES = r"changes normalised observations.* Make VecNormalize the outermost wrapper"
NUMBERS = {"norm_obs_keys": ["numbers"]}


@pytest.mark.parametrize(("make", "said"), [
    (lambda: WorkerVecEnv([DotEnv, unmakeable]), "could not be made in its worker process"),
    (lambda: WorkerVecEnv([DotEnv], timeout=0), "timeout must be a number"),
    (lambda: WorkerVecEnv([DotEnv], start_method="foo"), r"start_method must be one of '\w+', .*, got 'foo'"),
    (lambda: WorkerVecEnv([DotEnv()]), "functions that make one"),
    (lambda: WorkerVecEnv(DotEnv), "functions that make one"),
    (lambda: above(lambda: VecFrameStack(vector(lambda: Last(True), **NUMBERS), 3)), CHANGES),
    (lambda: above(lambda: VecFrameStack(vector(Numbers), 2)), CHANGES),
    (lambda: above(lambda: VecExtractDictObs(vector(lambda: Last(True), **NUMBERS), "numbers")), CHANGES),
])  # fmt: skip
def test_workers_and_wrappers_that_do_not_work_raise_one_error(make, said):
    refused(ConfigError, said, make)


class Learned(gymnasium.RewardWrapper):
    """Holds what no file can, or would give back as a plain dictionary."""

    def __init__(self, env):
        super().__init__(env)
        self.model = torch.nn.Linear(1, 1)
        self.locks = [object()]
        self.visits = {"of actions": Counter()}

    def reward(self, reward):
        return reward


class Told(Learned):
    def get_state(self):
        return {"scale": 2}

    def set_state(self, state):
        assert state == {"scale": 2}


def test_wrapper_that_cannot_be_saved_raises_an_error(tiny_agent, tmp_path):
    snapshots.save(tiny_agent(Learned(DotEnv())).learn(12), tmp_path / "saved")
    with pytest.raises(CheckpointError, match=r"Learned is not in the checkpoint.*locks \(object\), visits \(Coun"):
        resume(tmp_path / "saved", Learned(DotEnv()), device="cpu")
    with pytest.raises(CheckpointError, match=r"with the wrappers Monitor, Learned, Contract, this environment has"):
        resume(tmp_path / "saved", DotEnv(), device="cpu")
    snapshots.save(tiny_agent(Told(DotEnv())).learn(12), tmp_path / "told")
    assert resume(tmp_path / "told", Told(DotEnv()), device="cpu").num_timesteps == 12
