"""Distractions: other pictures, the same task; seeds and state."""

import numpy as np
import pytest

pytest.importorskip("dm_control")

from dipole.core.ground.errors import ConfigError
from dipole.rl import make_env
from dipole.rl.envs.distracting import _rolled

pytestmark = pytest.mark.usefixtures("opengl")
SMALL = {"size": 40, "rendering": "fast"}


def test_pictures_change_and_the_task_does_not():
    plain, env = make_env("cartpole-balance", **SMALL), make_env("distracting:cartpole-balance", colour=0.3, **SMALL)
    action = np.array([0.3], np.float32)
    first = []
    for seed in (3, 4):
        one, two = plain.reset(seed=seed)[0], env.reset(seed=seed)[0]
        assert np.abs(one.astype(int) - two).mean() > 5
        first.append(two)
        assert [plain.step(action)[1] for _ in range(5)] == [env.step(action)[1] for _ in range(5)]
    assert np.abs(first[0].astype(int) - first[1]).mean() > 2
    assert np.array_equal(env.reset(seed=3)[0], first[0])
    state = env.get_state()
    other = make_env("distracting:cartpole-balance", colour=0.3, **SMALL)
    other.reset(seed=9)
    other.set_state(state)
    assert np.array_equal(env.step(action)[0], other.step(action)[0])


def test_without_strength_nothing_changes():
    plain = make_env("cartpole-balance", **SMALL)
    env = make_env("distracting:cartpole-balance", colour=0.0, camera_shift=0.0, **SMALL)
    assert np.array_equal(plain.reset(seed=0)[0], env.reset(seed=0)[0])
    with pytest.raises(ConfigError, match="colour must be a number from 0 to 1"):
        make_env("distracting:cartpole-balance", colour=2)


def test_a_roll_is_a_rotation():
    quaternion = np.array([0.5, 0.5, -0.5, 0.5])
    rolled = _rolled(quaternion, 0.2)
    assert np.linalg.norm(rolled) == pytest.approx(1)
    assert quaternion @ rolled == pytest.approx(np.cos(0.2))
    assert _rolled(_rolled(quaternion, 0.2), -0.2) == pytest.approx(quaternion)
