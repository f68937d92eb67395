"""Checkpoints: replay writes what is new and shares the rest, state is plain values and never a pickle."""

import json
import os
import pickle
import shutil
from collections import deque

import numpy as np
import pytest
import torch

from dipole.core.utils.errors import CheckpointError, TrainingError
from dipole.rl import CheckpointCallback, DotEnv, make_env, resume, snapshots
from dipole.rl.replay import FrameReplayBuffer
from tests.rl.conftest import same, tiny
from tests.rl.test_replay import ACTION, episodes, fill, space
from tests.runs import refused
from tests.systems import links, posix

SPACE = space()


def filled(steps, buffer=None, n_envs=1, size=60):
    """A buffer of episodes of 8 steps of random frames, stacked by three."""
    if buffer is None:
        buffer = FrameReplayBuffer(size * n_envs, SPACE, ACTION, "cpu", n_envs, seed=1)
    fill(buffer, [episodes((env, int(buffer._head[0])), shortest=8) for env in range(n_envs)], steps, 1)
    return buffer


def kept(folder, buffer):
    folder.mkdir()
    written = snapshots.write_replay(folder, buffer)
    buffer.files = folder, written
    return written


def draw_alike(one, two):
    for _ in range(4):
        a, b = one.sample(32), two.sample(32)
        assert all(torch.equal(getattr(a, name), getattr(b, name)) for name in a._fields[:5])


@pytest.mark.parametrize("n_envs", [1, 2])
def test_a_chain_of_saves_is_the_buffer_through_every_turn_of_the_ring(tmp_path, n_envs):
    buffer = filled(0, n_envs=n_envs)
    for number in range(12):
        filled(17, buffer, n_envs)
        told = kept(tmp_path / str(number), buffer)
        other = FrameReplayBuffer(60 * n_envs, SPACE, ACTION, "cpu", n_envs, seed=9)
        snapshots.write_plain(tmp_path / str(number), "replay", buffer._counters())
        other._load_counters(snapshots.read_plain(tmp_path / str(number), "replay"))
        snapshots.read_replay(tmp_path / str(number), other, told)
        assert len(other) == len(buffer) == min(17 * (number + 1), 60) * n_envs
        twin = pickle.loads(pickle.dumps(buffer))
        draw_alike(other, twin)
        # Both go on alike: what is recognised and what is overwritten is the same.
        filled(9, other, n_envs)
        filled(9, twin, n_envs)
        draw_alike(other, twin)
        # A call of `filled` brings 60 planes, and planes may be recognised until the ring overwrites them.
        assert len(told) <= buffer._ring // 60 + 2 < 12
        shutil.rmtree(tmp_path / str(number - 1), ignore_errors=True)


def test_a_save_writes_the_new_steps_alone_and_links_the_others(tmp_path):
    buffer = filled(40, size=400)
    kept(tmp_path / "one", buffer)
    filled(10, buffer)
    second = kept(tmp_path / "two", buffer)
    assert [each["steps"] for each in second] == [(0, 40), (40, 50)]
    old, new = (tmp_path / "two" / each["file"] for each in second)
    assert old.stat().st_ino == (tmp_path / "one" / old.name).stat().st_ino
    assert new.stat().st_size < 0.5 * old.stat().st_size
    assert kept(tmp_path / "three", buffer) == second  # nothing is new
    # Nothing of the first folder is needed, and a ring beyond memory is refused before it is made.
    shutil.rmtree(tmp_path / "one")
    other = filled(0, size=400)
    refused(TrainingError, "needs", other._load_counters, buffer._counters() | {"ring": 10**15})
    other._load_counters(buffer._counters())
    snapshots.read_replay(tmp_path / "two", other, second)
    assert len(other) == 50


def test_missing_file_makes_save_write_everything_and_a_refused_link_copies(tmp_path, monkeypatch):
    buffer = filled(30)
    (tmp_path / "one" / kept(tmp_path / "one", buffer)[0]["file"]).write_bytes(b"other")
    filled(5, buffer)
    assert [each["steps"] for each in kept(tmp_path / "two", buffer)] == [(0, 35)]
    shutil.rmtree(tmp_path / "two")
    assert [each["steps"] for each in kept(tmp_path / "three", buffer)] == [(0, 35)]

    def refused(*paths):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(snapshots.os, "link", refused)
    filled(5, buffer)
    written = kept(tmp_path / "four", buffer)
    assert [each["steps"] for each in written] == [(0, 35), (35, 40)]
    assert (tmp_path / "four" / written[0]["file"]).stat().st_nlink == 1


def test_a_resumed_run_goes_on_sharing_and_is_bit_exact(tiny_agent, tmp_path):
    settings = {"buffer_size": 50, "train_freq": 10, "gradient_steps": 1}
    straight = tiny_agent(**settings).learn(130)
    tiny_agent(**settings).learn(95, callback=CheckpointCallback(tmp_path, every=20))
    again = resume(tmp_path / "agent-000000080", make_env("dot"), device="cpu")
    again.learn(50, reset_num_timesteps=False, callback=CheckpointCallback(tmp_path, every=20))
    assert same(straight, again)
    found = snapshots.checkpoints(tmp_path)
    assert [path.name for path in found] == ["agent-000000100", "agent-000000120"]
    shared = [{path.name for path in folder.glob("replay-*-*.npz")} for folder in found]
    assert len(shared[0] & shared[1]) >= 2
    assert all((found[0] / name).samefile(found[1] / name) for name in shared[0] & shared[1])


def told(change):
    """Return a function that changes what the manifest of a checkpoint says."""

    def damage(folder):
        manifest = json.loads((folder / "manifest.json").read_text())
        change(manifest)
        (folder / "manifest.json").write_text(json.dumps(manifest))

    return damage


def a_pickle(folder, name):
    (folder / name).write_bytes(pickle.dumps(Trap()))
    told(lambda manifest: manifest["bytes"].update({name: (folder / name).stat().st_size}))(folder)


def a_pipe(path):
    path.unlink()
    os.mkfifo(path)


def flip(folder):
    (path,) = folder.glob("replay-*-*.npz")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


class Trap:
    def __reduce__(self):
        return os.abort, ()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return snapshots.save(tiny().learn(12), tmp_path_factory.mktemp("whole") / "agent-000000012")


@pytest.mark.parametrize(("damage", "said"), [
    (shutil.rmtree, "no checkpoint"),
    (lambda folder: os.truncate(folder / "replay.npz", 90), r"incomplete: replay.npz has 90 of \d+ bytes"),
    (lambda folder: next(folder.glob("replay-*-*.npz")).unlink(), r"incomplete: replay-\S+ has 0 of"),
    (flip, r"damaged: the content of replay-\S+ does not match its checksum"),
    (told(lambda found: found["replay"][0].update(file="../../elsewhere.npz")), "no checkpoint of an agent"),
    (told(lambda found: found.update(replay=7)), "no checkpoint of an agent"),
    (told(lambda found: found["replay"][0].update(steps=[5, 3])), "cannot be read"),
    (told(lambda found: found["replay"][0].update(planes=[[0, 10**12]])), "cannot be read"),
    (told(lambda found: found["replay"][0].pop("sha256")), "cannot be read"),
    (told(lambda found: found.update(format=1, bytes={})), r"another version of dipole.*--resume never"),
    (lambda folder: a_pickle(folder, "state.npz"), "cannot be read"),
    (lambda folder: a_pickle(folder, "replay.npz"), "cannot be read"),
    (lambda folder: a_pickle(folder, "state.json"), "cannot be read"),
    (lambda folder: a_pickle(folder, "agent.zip"), "cannot be read"),
    pytest.param(lambda folder: a_pipe(folder / "manifest.json"), "damaged|incomplete", marks=posix),
    pytest.param(lambda folder: a_pipe(folder / "state.json"), "damaged|incomplete", marks=posix),
])  # fmt: skip
def test_a_damaged_checkpoint_is_refused(checkpoint, tmp_path, damage, said):
    folder = shutil.copytree(checkpoint, tmp_path / "agent-000000012")
    damage(folder)
    refused(CheckpointError, said, resume, folder, make_env("dot"), device="cpu")


def test_values_come_back_as_they_were(tmp_path):
    value = {
        "nothing": None, "numbers": [True, 3, -0.1, 1e-300, 2**127, float("inf")], "text": "\u00e4\n",
        "bytes": b"\x00\xff", 3: (1, (2,), []), (1, "a"): {4, 5},
        "array": np.arange(6, dtype=np.uint8).reshape(2, 3)[:, ::2], "empty": np.zeros((0, 3), np.float32),
        "scalar": np.float32(0.1), "flag": np.bool_(True),
        "tensor": torch.tensor([[1.5, float("-inf")]], dtype=torch.float64), "deque": deque([{"r": 1.0}], maxlen=7),
        "dict": {"array": 0},
    }  # fmt: skip
    snapshots.write_plain(tmp_path, "state", value)
    assert repr(snapshots.read_plain(tmp_path, "state")) == repr(value)  # types, shapes and precisions too


@pytest.mark.parametrize("kind", [np.random.PCG64, np.random.MT19937, np.random.Philox])
def test_generators_go_on(tmp_path, kind):
    generator, old = np.random.Generator(kind(3)), np.random.RandomState(3)
    generator.integers(0, 9, 3), old.normal(size=3)
    snapshots.write_plain(tmp_path, "state", [generator, old])
    again, old_again = snapshots.read_plain(tmp_path, "state")
    assert (again.integers(0, 99, 9) == generator.integers(0, 99, 9)).all()
    assert (old_again.normal(size=9) == old.normal(size=9)).all()


def test_objects_are_refused_with_their_place(tiny_agent, tmp_path):
    for value in (lambda: 0, object(), np.array([{}]), open):
        with pytest.raises(CheckpointError, match=r"cannot save state\.env\[1\]\.goal, of type .*Let get_state return"):
            snapshots.write_plain(tmp_path, "state", {"env": [0, {"goal": value}]})

    class Closed(DotEnv):
        def get_state(self):
            return {**super().get_state(), "goal": self.step}

    with pytest.raises(CheckpointError, match=r"state\.environments\[0\]\.inner\.goal, of type method"):
        snapshots.save(tiny_agent(Closed()).learn(12), tmp_path / "saved")
    assert not list(tmp_path.iterdir())


@links
@pytest.mark.parametrize(
    "name", ["../agent-000000012", "/etc", "agent-000000012/../x", "agent-1", 3, None, "", "agent-000000012"]
)
def test_names_and_links_out_of_the_folder_are_refused(tmp_path, name):
    (tmp_path / "agent-000000012").symlink_to("/")
    refused(CheckpointError, "is no checkpoint of an agent", snapshots.named, tmp_path, name)
