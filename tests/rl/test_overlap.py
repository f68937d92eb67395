"""Updates beside the environments' steps: the order promised, resuming, faults, and that both happen at once."""

import time
from functools import partial

import numpy as np
import pytest
import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv

from dipole.core.utils.errors import TrainingError
from dipole.rl import CheckpointCallback, ContrastiveDQN, ContrastiveDrQ, ContrastiveSAC, DotEnv, WorkerVecEnv, resume
from dipole.rl.envs.dot_discrete import DiscreteDotEnv
from tests.rl.in_workers import Dying, Told

# Most of what follows is of the order, which is the same where nothing happens at once; workers are slow to start.
pytestmark = pytest.mark.filterwarnings("ignore:overlap=True gains nothing")


@pytest.fixture
def workers(request):
    def make(*makers):
        env = WorkerVecEnv(list(makers))
        request.addfinalizer(env.close)
        return env

    return make


def played(agent, steps):
    """The order of docs/rl.md as a plain loop; the agent itself knows nothing of an overlap.

    Environments do not see the weights: that an update runs beside a step, or just before it, is all the same to them.
    """
    _, callback = agent._setup_learn(steps)
    callback.on_training_start({}, {})
    owed = 0
    while agent.num_timesteps < steps:
        taken = 0
        while taken < agent.train_freq.frequency:
            agent.policy.set_training_mode(False)
            actions, stored = agent._sample_action(agent.learning_starts, None, agent.n_envs)
            if owed:
                agent.train(owed, agent.batch_size)
                owed = 0
            observations, rewards, dones, infos = agent.env.step(actions)
            agent.num_timesteps += agent.n_envs
            agent._update_info_buffer(infos, dones)
            agent._store_transition(agent.replay_buffer, stored, observations, rewards, dones, infos)
            agent._update_current_progress_remaining(agent.num_timesteps, agent._total_timesteps)
            agent._on_step()
            taken += 1
        if agent.num_timesteps > agent.learning_starts:
            owed = agent.gradient_steps if agent.gradient_steps >= 0 else taken * agent.n_envs
    agent.train(owed, agent.batch_size)
    return agent


def same(one, two):
    mine, other = one.policy.state_dict(), two.policy.state_dict()
    return mine.keys() == other.keys() and all(torch.equal(mine[name], value) for name, value in other.items())


def rate(remaining):
    """A schedule: an update that ran with another progress than it should would have another rate."""
    return 1e-3 * (0.2 + remaining)


@pytest.mark.parametrize(
    ("settings", "make", "count"),
    [
        ({"learning_rate": rate}, DotEnv, 2),
        ({"train_freq": 3, "gradient_steps": 2}, DotEnv, 1),
        ({"kind": ContrastiveDrQ}, DotEnv, 1),
        ({"kind": ContrastiveDQN, "architecture": "uniform"}, DiscreteDotEnv, 2),
    ],
    ids=["sac", "three steps", "drq", "dqn"],
)
def test_the_order_is_the_one_promised(tiny_agent, settings, make, count):
    def agent(env, **more):
        return tiny_agent(env, **settings, **more)

    plain = played(agent(DummyVecEnv([make] * count)), 24)
    overlapped = agent(DummyVecEnv([make] * count), overlap=True).learn(24)
    assert same(plain, overlapped)
    assert plain._n_updates == overlapped._n_updates > 0
    assert overlapped.owed == 0
    in_turn = agent(DummyVecEnv([make] * count)).learn(24)
    assert in_turn._n_updates == overlapped._n_updates  # as many, of other data
    if make is DotEnv:
        assert not same(in_turn, overlapped)


def test_a_resumed_run_is_the_same_bit_for_bit(tiny_agent, tmp_path):
    straight = tiny_agent(overlap=True).learn(40)
    first = tiny_agent(overlap=True)
    first.learn(30, callback=CheckpointCallback(tmp_path, every=9))
    torch.manual_seed(99)
    again = resume(tmp_path / "agent-000000018", DotEnv(), device="cpu")
    assert (again.num_timesteps, again._n_updates, again.owed) == (18, 7, 1)
    again.learn(22, reset_num_timesteps=False)
    assert same(straight, again)
    assert again.replay_buffer.rng.random() == straight.replay_buffer.rng.random()
    again.owed = 1
    again.save(tmp_path / "agent.zip")  # holds no replay that an owed update could draw from
    assert ContrastiveSAC.load(tmp_path / "agent.zip", device="cpu").owed == 0


class Spans(BaseCallback):
    def __init__(self):
        super().__init__()
        self.steps = []

    def _on_step(self):
        self.steps.append(self.locals["infos"][0]["span"])
        return True


def test_updates_run_while_the_environments_step(tiny_agent, workers):
    agent, spans, updates = tiny_agent(workers(Told), overlap=True), Spans(), []
    update = agent.update

    def timed(batch):
        began = time.monotonic()
        logs = update(batch)
        updates.append((began, time.monotonic()))
        return logs

    agent.update = timed
    agent.learn(18, callback=spans)
    assert len(updates) == 8
    beside = [any(began < end and ended > start for start, end in spans.steps) for began, ended in updates]
    assert beside == [True] * 7 + [False]  # the last one has no step beside it any more
    with pytest.warns(RuntimeWarning, match="overlap=True gains nothing here.*WorkerVecEnv"):
        alone = tiny_agent(Told(), overlap=True).learn(18)
    assert same(alone, agent)


def test_a_rollout_keeps_its_noise_while_updates_draw_their_own(tiny_agent):
    class Noise(BaseCallback):
        def _on_step(self):
            matrices.append(self.model.policy.actor.action_dist.exploration_matrices.clone())
            return True

    matrices = []
    env = DummyVecEnv([DotEnv] * 2)
    tiny_agent(env, overlap=True, use_sde=True, train_freq=3).learn(36, callback=Noise())
    rollouts = torch.stack(matrices).unflatten(0, (-1, 3))  # (rollouts, steps, environments, hidden, actions)
    assert rollouts.shape[2] == 2
    assert torch.equal(rollouts, rollouts[:, :1].expand_as(rollouts))
    assert not torch.equal(rollouts[-1], rollouts[-2])


def spoil(agent, at):
    """One update of the agent gets a reward that is no number."""
    update = agent.update

    def spoilt(batch):
        if agent._n_updates == at:
            batch.rewards[0] = torch.nan
        return update(batch)

    agent.update = spoilt


@pytest.mark.parametrize("stops", [False, True])
def test_an_update_that_fails_leaves_no_step_under_way(tiny_agent, stops):
    class Stopping(BaseCallback):
        def _on_step(self):
            return not (stops and self.num_timesteps == 15)

    agent = tiny_agent(overlap=True)
    update = agent.update
    spoil(agent, at=3)
    with pytest.raises(TrainingError, match=r"the critic loss is nan at update 3"):
        agent.learn(20, callback=Stopping())
    assert agent.num_timesteps == 15  # the step that was under way came back, and is in replay if nobody stopped
    assert len(agent.replay_buffer) == 15 - stops
    agent.update = update
    agent.learn(10, reset_num_timesteps=False)
    assert agent.num_timesteps == 25


def test_a_worker_that_dies_beside_an_update_is_a_fault_as_in_sequence(tiny_agent, workers, tmp_path):
    env = workers(partial(Dying, str(tmp_path / "died"), 13))
    agent = tiny_agent(env, overlap=True)
    spoil(agent, at=6)
    with (
        pytest.warns(RuntimeWarning, match=r"environment 0 failed at its step 13 .*exit code 3"),
        pytest.raises(TrainingError, match="the critic loss is nan at update 6"),
    ):
        agent.learn(20)
    assert not env.waiting
    assert np.flatnonzero(~agent.replay_buffer.valid[0, :18]).tolist() == [12]
    assert [fault["step"] for fault in agent.faults] == [13]
