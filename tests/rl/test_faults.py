"""Faults: environments that raise, workers that die, checkpoints that continue bit for bit or are refused."""

import os
import time
from functools import partial

import numpy as np
import pytest
import torch
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.noise import NormalActionNoise, OrnsteinUhlenbeckActionNoise

from dipole.core.utils.errors import CheckpointError, ConfigError, TrainingError
from dipole.rl import CheckpointCallback, DotEnv, WorkerVecEnv, make_env, resume, snapshots
from dipole.rl.envs.running.faults import PATIENCE, Guard
from tests.rl.conftest import same
from tests.rl.in_workers import Dying


class Failing(DotEnv):
    """Raises at chosen steps of its life."""

    def __init__(self, at=(), resets=()):
        super().__init__()
        self.at, self.resets, self.life, self.starts = set(at), set(resets), 0, 0

    def step(self, action):
        self.life += 1
        if self.life in self.at:
            raise FloatingPointError("the cart left the universe")
        return super().step(action)

    def reset(self, **kwargs):
        self.starts += 1
        if self.starts in self.resets:
            raise OSError("no reset today")
        return super().reset(**kwargs)


def test_a_step_that_raises_ends_the_episode_as_truncated():
    env = Guard(Failing(at={3}))
    env.reset(seed=11)
    last = [env.step(np.zeros(2))[0] for _ in range(2)][-1]
    observation, reward, terminated, truncated, info = env.step(np.zeros(2))
    np.testing.assert_array_equal(observation, last)
    assert (reward, terminated, truncated) == (0.0, False, True)
    error = "FloatingPointError: the cart left the universe"
    assert info["fault"] == {"error": error, "step": 3, "episode": 1, "seed": 11}
    env.reset()
    assert "fault" not in env.step(np.zeros(2))[4]


def test_training_counts_and_reports_faults_and_goes_on(tiny_agent):
    agent = tiny_agent(Failing(at={7, 15}, resets={3}))
    with pytest.warns(RuntimeWarning, match=r"environment 0 failed at its step 7 \(episode 1 after seed 0\)"):
        agent.learn(25)
    assert [fault["step"] for fault in agent.faults] == [7, 15]
    assert agent.logger.name_to_value["rollout/faults"] == 2
    valid = agent.replay_buffer.valid[0, :25]
    assert np.flatnonzero(~valid).tolist() == [6, 14]
    assert agent.replay_buffer.dones.sum() == 0


def test_an_environment_that_is_broken_for_good_stops_the_run(tiny_agent):
    agent = tiny_agent(Failing(at=range(10, 100)))
    with pytest.warns(RuntimeWarning), pytest.raises(TrainingError, match=f"fault number {PATIENCE} in a row"):
        agent.learn(40)


@pytest.fixture
def workers(request):
    """Environments in processes that end with the test."""

    def make(functions, **settings):
        env = WorkerVecEnv(functions, **settings)
        request.addfinalizer(env.close)
        return env

    return make


def test_a_dead_worker_is_restarted(tiny_agent, tmp_path, workers):
    env = workers([partial(Dying, str(tmp_path / "died"), 57), DotEnv])
    said = r"environment 0 failed at its step 57 \(episode 2 after seed 0\).*exit code 3"
    agent = tiny_agent(env)
    with pytest.warns(RuntimeWarning, match=said):
        agent.learn(120)
    assert (agent.num_timesteps, len(agent.faults), env.counters()["_episodes"][0]) == (120, 1, 3)
    assert not agent.replay_buffer.valid[0, 56]
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
    kill()
    env.close()
    assert not any(process.is_alive() for process in env.processes)


class Unmakeable(DotEnv):
    def __init__(self):
        raise OSError("no such world")


def test_environments_that_fail_in_workers_raise_one_error(tiny_agent, workers):
    with pytest.raises(ConfigError, match="could not be made in its worker process"):
        WorkerVecEnv([DotEnv, Unmakeable])
    env = workers([lambda: Failing(at=range(100))])
    with pytest.warns(RuntimeWarning), pytest.raises(TrainingError, match="5 faults in a row"):
        tiny_agent(env).learn(100)


@pytest.mark.parametrize("task", ["dot", "dot in a worker", "cheetah-run"])
def test_resume_in_the_middle_is_bit_exact(tiny_agent, tmp_path, task, request, workers):
    if task == "cheetah-run":
        request.getfixturevalue("opengl")

    def env():
        if task == "dot in a worker":
            return workers([partial(make_env, "dot")])
        return make_env(task, size=28, rendering="fast") if task == "cheetah-run" else make_env(task)

    straight = tiny_agent(env()).learn(40)
    first = tiny_agent(env())
    first.learn(30, callback=CheckpointCallback(tmp_path, every=9))
    assert [path.name for path in snapshots.checkpoints(tmp_path)] == ["agent-000000018", "agent-000000027"]
    np.random.seed(99)
    torch.manual_seed(99)
    again = resume(tmp_path / "agent-000000018", env(), device="cpu")
    assert again.num_timesteps == 18
    again.learn(22, reset_num_timesteps=False)
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

    env, noise = parts()
    straight = tiny_agent(env, action_noise=noise).learn(40 * envs)
    env, noise = parts()
    tiny_agent(env, action_noise=noise).learn(30 * envs, callback=CheckpointCallback(tmp_path, every=20 * envs))
    env, noise = parts()
    again = resume(snapshots.checkpoints(tmp_path)[0], env, device="cpu", action_noise=noise)
    again.learn(40 * envs - again.num_timesteps, reset_num_timesteps=False)
    assert same(straight, again)
    other = NormalActionNoise(np.zeros(2), np.ones(2))
    with pytest.raises(CheckpointError, match=r"written with the action_noise .*Noise, this agent has NormalAction"):
        resume(snapshots.checkpoints(tmp_path)[0], parts()[0], device="cpu", action_noise=other)


def test_files_of_a_killed_writer_are_removed(tiny_agent, tmp_path):
    left = tmp_path / ".agent-000000009.0123abcd.tmp"
    left.mkdir()
    (left / "agent.zip").write_bytes(b"half")
    others = tmp_path / ".episode.0123abcd.tmp.gif"
    others.write_bytes(b"somebody writes")
    tiny_agent().learn(2, callback=CheckpointCallback(tmp_path, every=100))
    assert [each.name for each in tmp_path.iterdir()] == [others.name]


def test_an_environment_without_a_state_starts_a_new_episode(tiny_agent, tmp_path):
    class Opaque(DotEnv):
        get_state = None
        set_state = None

    snapshots.save(tiny_agent(Opaque()).learn(15), tmp_path / "saved")
    with pytest.warns(RuntimeWarning, match="a new episode starts"):
        agent = resume(tmp_path / "saved", Opaque(), device="cpu")
    agent.learn(5, reset_num_timesteps=False)
    assert agent.num_timesteps == 20


def test_incomplete_checkpoints_are_refused(tiny_agent, tmp_path):
    folder = snapshots.save(tiny_agent().learn(12), tmp_path / "saved")
    data = (folder / "replay.npz").read_bytes()
    (folder / "replay.npz").write_bytes(data[:-10])
    with pytest.raises(CheckpointError, match=rf"incomplete: replay.npz has {len(data) - 10} of {len(data)} bytes"):
        resume(folder, make_env("dot"))
    (folder / "replay.npz").unlink()
    with pytest.raises(CheckpointError, match="incomplete"):
        resume(folder, make_env("dot"))
    with pytest.raises(CheckpointError, match="no checkpoint"):
        resume(tmp_path / "nothing", make_env("dot"))


def test_a_failing_checkpoint_leaves_the_old_one(tiny_agent, tmp_path, monkeypatch):
    agent = tiny_agent().learn(12)
    folder = snapshots.save(agent, tmp_path / "saved")

    def full(*arguments, **arrays):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(CheckpointError, match="free some space"):
        snapshots.save(agent, folder)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    assert resume(folder, make_env("dot"), device="cpu").num_timesteps == 12


class Hanging(DotEnv):
    """Does not answer at the 5th step of an episode, once."""

    def __init__(self, marker):
        super().__init__()
        self.marker = marker

    def step(self, action):
        if self._steps == 20 and not os.path.exists(self.marker):
            open(self.marker, "w").close()
            time.sleep(600)
        return super().step(action)


def test_an_environment_that_hangs_is_ended(tiny_agent, tmp_path, workers):
    agent = tiny_agent(workers([partial(Hanging, str(tmp_path / "hung")), DotEnv], timeout=2))
    with pytest.warns(RuntimeWarning, match=r"at its step 21 \(episode 1 .*no answer for 2 seconds \(timeout\)"):
        agent.learn(60)
    assert agent.num_timesteps == 60
    assert not agent.replay_buffer.valid[0, 20]
    with pytest.raises(ConfigError, match="timeout must be a number"):
        WorkerVecEnv([DotEnv], timeout=0)
    with pytest.raises(ConfigError, match=r"start_method must be one of '\w+', .*, got 'foo'"):
        WorkerVecEnv([DotEnv], start_method="foo")


@pytest.mark.parametrize("functions", [[], [DotEnv()], DotEnv])
def test_workers_refuse_what_is_not_a_function(functions):
    with pytest.raises((ConfigError, TypeError), match=r"functions that make one|has no len|not iterable"):
        WorkerVecEnv(functions)
