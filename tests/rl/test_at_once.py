"""Evaluations whose episodes have seeds of their own, in sequence and in workers, and videos of any size."""

import numpy as np
import pytest
import torch

from dipole.core.train.build import build
from dipole.core.train.recipe import load
from dipole.core.train.run_folder import RunFolder
from dipole.core.utils.errors import ConfigError, TrainingError
from dipole.rl import DotEnv, make_env
from dipole.rl.envs.running.workers import WorkerVecEnv
from dipole.rl.episodes.at_once import episode_seed, evaluate_each
from dipole.rl.episodes.play import evaluate
from dipole.rl.episodes.trial import trial
from tests.rl.in_workers import Failing


@pytest.fixture(scope="module")
def workers():
    env = WorkerVecEnv([Failing] * 2)
    yield env
    env.close()


@pytest.mark.parametrize("fails", ["never", "some"])
def test_workers_give_the_returns_of_the_sequence(fails, workers, tiny_agent):
    agent = tiny_agent()
    shown = [], []
    one = evaluate_each(agent, Failing(fails), 3, 7, shown[0])
    workers.env_method("fail", fails)
    assert evaluate_each(agent, workers, 3, 7, shown[1]) == one
    assert all(map(np.array_equal, *shown))
    assert len(shown[0]) == len(shown[1]) == 150
    assert len(set(one)) == 3
    alone = [evaluate(agent, DotEnv(), 1, episode_seed(7, number))[0] for number in range(3)]
    assert (one == alone) == (fails == "never")


def test_five_faults_in_a_row_stop(workers, tiny_agent):
    workers.env_method("fail", "always")
    with pytest.raises(TrainingError, match=r"lost|in a row"):
        evaluate_each(tiny_agent(), workers, 2, 0)
    with pytest.raises(TrainingError, match=r"5 episodes in a row failed: .*lost"):
        evaluate(tiny_agent(), Failing("always"), 1)
    with pytest.raises(ConfigError, match="made for observations"):
        evaluate_each(tiny_agent(), make_env("dot", size=36), 1)


def test_workers_of_an_evaluation_change_no_result():
    alone = load("dot", ["rl.evaluation_seeds=each"]).config
    several = load("dot", ["rl.evaluation_seeds=each", "rl.evaluation_workers=4"]).config
    assert alone.hash == several.hash != load("dot", []).config.hash
    with pytest.raises(ConfigError, match="set evaluation_seeds = 'each'"):
        load("dot", ["rl.evaluation_workers=4"])


def test_an_adapter_plays_in_workers_what_it_plays_alone(tmp_path):
    small = ["rl.evaluation_seeds=each", "rl.episodes=3", "device=cpu", "rl.filters=4", "rl.hidden=[8]"]
    configs = [load("dot", [*small, f"rl.evaluation_workers={count}"]).config for count in (1, 2)]
    adapters = [build(each, RunFolder(tmp_path), torch.device("cpu"))[0] for each in configs]
    found = [each.evaluate(None) for each in adapters]
    adapters[1]._players.close()
    assert found[0] == found[1]


def test_videos_are_drawn_at_their_size(tiny_agent, tmp_path, opengl):
    env = DotEnv(render_size=112)
    env.reset(seed=0)
    large, small = env.render(), DotEnv()
    small.reset(seed=0)
    assert large.shape == (112, 112, 3)
    drawn = np.asarray(small.render(), float)
    reduced = large.reshape(28, 4, 28, 4, 3).mean((1, 3))
    assert np.corrcoef(reduced.ravel(), drawn.ravel())[0, 1] > 0.9
    assert len(np.unique(large)) > len(np.unique(np.kron(drawn, np.ones((4, 4, 1)))))  # not enlarged
    agent = tiny_agent()
    agent.task = {"name": "dot", "settings": {}}
    agent.save(tmp_path / "agent.zip")
    trial(tmp_path / "agent.zip", episodes=1, video=tmp_path / "dot.gif", size=96)
    from PIL import Image

    with Image.open(tmp_path / "dot.gif") as image:
        assert image.size == (96, 96)
    with pytest.raises(ConfigError, match="give --video"):
        trial(tmp_path / "agent.zip", episodes=1, size=96)
    with pytest.raises(ConfigError, match="at most 4096"):  # before the memory of a frame is asked for
        trial(tmp_path / "agent.zip", episodes=1, video=tmp_path / "dot.gif", size=100_000)
    walker = make_env("walker-walk", size=32, render_size=80, rendering="fast")
    walker.reset(seed=0)
    assert walker.render().shape == (80, 80, 3)
    assert walker.reset(seed=0)[0].shape == (9, 32, 32)
