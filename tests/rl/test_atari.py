"""Atari games: their table, the message without ale-py, and with it episodes, seeds, state and lives."""

from importlib.util import find_spec

import numpy as np
import pytest

pytest.importorskip("stable_baselines3")

from dipole.benchmarks.suite import read_suite
from dipole.core.utils.errors import ConfigError
from dipole.rl import make_env
from dipole.rl.envs.atari import GAMES
from dipole.rl.replay import FrameReplayBuffer

played = pytest.mark.skipif(find_spec("ale_py") is None, reason="needs ale-py")


def test_the_suite_is_of_the_26_games():
    assert len(GAMES) == 26
    assert all(low < high for low, high in GAMES.values())
    columns = read_suite("atari-100k").columns
    assert [each.set for each in columns] == [(f"rl.task=atari:{game.replace('_', '-')}",) for game in GAMES]


@pytest.mark.skipif(find_spec("ale_py") is not None, reason="ale-py is here")
def test_a_missing_package_is_one_message():
    with pytest.raises(ConfigError, match=r"the task 'atari:pong' needs ale-py: pip install .*atari"):
        make_env("atari:pong")


def test_a_lost_life_is_an_end_for_what_is_learned():
    env = make_env("dot-discrete", size=12)
    buffer = FrameReplayBuffer(20, env.observation_space, env.action_space, "cpu", seed=0, n_steps=3, gamma=0.5)
    seen, _ = env.reset(seed=0)
    for step in range(6):
        following, _, _, _, info = env.step(step % 5)
        lost = {"life_lost": step == 2}
        buffer.add(seen[None], following[None], np.array([[0]]), np.array([1.0]), np.array([False]), [info | lost])
        seen = following
    assert buffer.dones[0, :6].tolist() == [0, 0, 1, 0, 0, 0]
    rewards, last, discounts = buffer._outcomes(np.zeros(6, int), np.arange(6), None)
    assert rewards.ravel().tolist() == [1.75, 1.5, 1.0, 1.75, 1.5, 1.0]
    assert last.tolist() == [2, 2, 2, 5, 5, 5]
    assert discounts.ravel().tolist() == [0.125, 0.25, 0.5, 0.125, 0.25, 0.5]


@played
def test_a_game_is_played_reproduced_and_continued():
    env, other = make_env("atari:breakout"), make_env("atari:breakout")
    actions = np.random.default_rng(0).integers(0, env.action_space.n, 400)
    first = [env.reset(seed=3)[0], *(env.step(action)[0] for action in actions[:40])]
    again = [other.reset(seed=3)[0], *(other.step(action)[0] for action in actions[:40])]
    assert first[0].shape == (4, 84, 84)
    assert first[0].dtype == np.uint8
    assert all(np.array_equal(one, two) for one, two in zip(first, again, strict=True))
    assert env.render().shape == (210, 160, 3)
    state = env.get_state()
    assert isinstance(state["game"], bytes)
    third = make_env("atari:breakout")
    third.reset(seed=9)
    third.set_state(state)
    lost = 0
    for action in actions[40:]:
        one, two = env.step(action), third.step(action)
        assert np.array_equal(one[0], two[0])
        assert one[1:] == two[1:]
        lost += one[4]["life_lost"]
        if one[2]:
            break
    assert lost >= 1


@played
def test_a_contrast_beside_a2c_stays_bounded():
    """Cosines at temperature 0.1 cannot give more than log(n) + 20; near copies of each other give about log(n)."""
    from stable_baselines3 import A2C
    from stable_baselines3.common.vec_env import DummyVecEnv

    from dipole.rl import ContrastiveCallback

    losses = []

    class Watched(ContrastiveCallback):
        def _step(self, seen):
            losses.append(float(super()._step(seen)))
            return losses[-1]

    env = DummyVecEnv([lambda: make_env("atari:pong", size=40)] * 4)
    A2C("CnnPolicy", env, seed=0, device="cpu").learn(400, callback=Watched(updates=4))
    assert len(losses) == 80
    assert max(losses) < np.log(20) + 1
