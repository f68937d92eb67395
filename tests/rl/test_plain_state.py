"""Checkpoints without code: what they hold comes back as it was, and what is put into them is never run."""

import json
import os
import pickle
from collections import deque

import numpy as np
import pytest
import torch
from stable_baselines3.common.vec_env import DummyVecEnv

from dipole.core.utils.errors import CheckpointError
from dipole.rl import DotEnv, make_env, resume, snapshots
from dipole.rl.plain_state import read, write
from tests.systems import links, posix


def same(a, b):
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert list(a) == list(b)
        return all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple, deque)):
        assert getattr(a, "maxlen", None) == getattr(b, "maxlen", None)
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, (np.ndarray, np.generic)):
        return a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_values_come_back_as_they_were(tmp_path):
    value = {
        "nothing": None, "numbers": [True, 3, -0.1, 1e-300, 2**127, float("inf")], "text": "\u00e4\n",
        "bytes": b"\x00\xff", 3: (1, (2,), []), (1, "a"): {4, 5},
        "array": np.arange(6, dtype=np.uint8).reshape(2, 3)[:, ::2], "empty": np.zeros((0, 3), np.float32),
        "scalar": np.float32(0.1), "flag": np.bool_(True),
        "tensor": torch.tensor([[1.5, float("-inf")]], dtype=torch.float64), "deque": deque([{"r": 1.0}], maxlen=7),
        "dict": {"array": 0},
    }  # fmt: skip
    write(tmp_path, "state", value)
    assert same(read(tmp_path, "state"), value)


@pytest.mark.parametrize("kind", [np.random.PCG64, np.random.MT19937, np.random.Philox])
def test_generators_go_on(tmp_path, kind):
    generator, old = np.random.Generator(kind(3)), np.random.RandomState(3)
    generator.integers(0, 9, 3), old.normal(size=3)
    write(tmp_path, "state", [generator, old])
    again, old_again = read(tmp_path, "state")
    assert (again.integers(0, 99, 9) == generator.integers(0, 99, 9)).all()
    assert (old_again.normal(size=9) == old.normal(size=9)).all()


def test_objects_are_refused_with_their_place(tmp_path):
    for value in (lambda: 0, object(), np.array([{}]), open):
        with pytest.raises(CheckpointError, match=r"cannot save state\.env\[1\]\.goal, of type .*Let get_state return"):
            write(tmp_path, "state", {"env": [0, {"goal": value}]})


class Trap:
    def __reduce__(self):
        return os.abort, ()


def test_a_pickle_in_a_checkpoint_is_never_read(tiny_agent, tmp_path):
    folder = snapshots.save(tiny_agent().learn(12), tmp_path / "agent-000000012")
    trap = pickle.dumps(Trap())
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in ("state.npz", "replay.npz", "state.json", "agent.zip"):
        good = (folder / name).read_bytes()
        (folder / name).write_bytes(trap)
        sizes = manifest["bytes"] | {name: len(trap)}
        (folder / "manifest.json").write_text(json.dumps({**manifest, "bytes": sizes}))
        with pytest.raises(CheckpointError, match="cannot be read"):
            resume(folder, make_env("dot"), device="cpu")
        (folder / name).write_bytes(good)
    (folder / "manifest.json").write_text(json.dumps({"format": 1, "bytes": {}}))
    (folder / "state.pkl").write_bytes(trap)
    with pytest.raises(CheckpointError, match=r"another version of dipole.*--resume never"):
        resume(folder, make_env("dot"), device="cpu")


@posix
@pytest.mark.parametrize("name", ["manifest.json", "state.json"])
def test_a_pipe_in_a_checkpoint_is_refused_and_not_waited_for(tiny_agent, tmp_path, name):
    folder = snapshots.save(tiny_agent().learn(12), tmp_path / "agent-000000012")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(CheckpointError, match=r"damaged|incomplete"):
        resume(folder, make_env("dot"), device="cpu")


@pytest.mark.parametrize("name", ["../agent-000000012", "/etc", "agent-000000012/../x", "agent-1", 3, None, ""])
def test_names_outside_the_folder_are_refused(tmp_path, name):
    with pytest.raises(CheckpointError, match="is no checkpoint of an agent"):
        snapshots.named(tmp_path, name)


@links
def test_a_link_out_of_the_folder_is_no_checkpoint(tmp_path):
    (tmp_path / "agent-000000012").symlink_to("/")
    with pytest.raises(CheckpointError, match="is no checkpoint"):
        snapshots.named(tmp_path, "agent-000000012")


class Poisoned(DotEnv):
    """Gives a reward that is not finite at chosen steps of its life."""

    def __init__(self, at, value=float("nan")):
        super().__init__()
        self.at, self.value, self.life = at, value, 0

    def step(self, action):
        self.life += 1
        observation, reward, *rest = super().step(action)
        return (observation, self.value if self.life == self.at else reward, *rest)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), np.float32("-inf")])
def test_a_reward_that_is_not_finite_is_a_fault(tiny_agent, value):
    agent = tiny_agent(Poisoned(7, value))
    with pytest.warns(RuntimeWarning, match=r"environment 0 failed at its step 7 .*the reward is -?(nan|inf)"):
        agent.learn(30)
    assert len(agent.faults) == 1
    assert np.flatnonzero(~agent.replay_buffer.valid[0, :30]).tolist() == [6]
    assert np.isfinite(agent.replay_buffer.rewards).all()
    assert all(np.isfinite(each["r"]) for each in agent.ep_info_buffer)


def test_reward_of_a_custom_vecenv_that_is_not_finite_is_a_fault(tiny_agent):
    class Bare(DummyVecEnv):
        def step_wait(self):
            observations, rewards, dones, infos = super().step_wait()
            self.count = getattr(self, "count", 0) + 1
            if self.count == 4:
                rewards[1] = np.nan
            return observations, rewards, dones, infos

    agent = tiny_agent(Bare([DotEnv, DotEnv]))
    with pytest.warns(RuntimeWarning, match="environment 1 failed .*the reward is nan"):
        agent.learn(40)
    assert len(agent.faults) == 1
    assert np.argwhere(~agent.replay_buffer.valid[:, :20]).tolist() == [[1, 3]]


def test_state_with_objects_raises_an_error_when_saved(tiny_agent, tmp_path):
    class Closed(DotEnv):
        def get_state(self):
            return {**super().get_state(), "goal": self.step}

    with pytest.raises(CheckpointError, match=r"state\.environments\[0\]\.inner\.goal, of type method"):
        snapshots.save(tiny_agent(Closed()).learn(12), tmp_path / "saved")
    assert not list(tmp_path.iterdir())
