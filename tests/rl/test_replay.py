"""Replay: what comes out is what went in, whatever the stacking, the borders, the wrapping and the storage."""

import itertools
import pathlib
import pickle
import shutil
import tempfile

import numpy as np
import pytest
import torch
from gymnasium import spaces

from dipole.core.utils.errors import ConfigError, TrainingError
from dipole.rl import frames, replay
from dipole.rl.replay import FrameReplayBuffer
from dipole.rl.sampling import Centre, Crop, Custom, Shift, choose, shift
from tests.runs import refused

SIZE = 12
ACTION = spaces.Box(-1, 1, (2,), np.float32)


def space(channels=9):
    return spaces.Box(0, 255, (channels, SIZE, SIZE), np.uint8)


def episodes(seed, stacking="repeat", shortest=1):
    """Yield transitions of episodes of up to 8 steps, stacked by a rule of its own."""
    rng = np.random.default_rng(seed)

    def frame():
        return rng.integers(0, 256, (3, SIZE, SIZE), dtype=np.uint8)

    while True:
        first = frame()
        before = [first if stacking == "repeat" else np.zeros_like(first)] * 2 + [first]
        for left in reversed(range(rng.integers(shortest, 9))):
            after = [frame() for _ in range(3)] if stacking == "none" else [*before[1:], frame()]
            truncated = left == 0 and bool(rng.integers(2))
            stacks = np.concatenate(before), np.concatenate(after)
            yield *stacks, rng.uniform(-1, 1, 2), rng.random(), left == 0, truncated
            before = after


def fill(buffer, streams, steps, keep):
    """Add steps of all streams and return the last `keep` transitions of each by reward."""
    kept = [{} for _ in streams]
    for _ in range(steps):
        rows = [next(stream) for stream in streams]
        obs, following, action, reward, done, truncated = (np.array(column) for column in zip(*rows, strict=True))
        buffer.add(obs, following, action, reward, done, [{"TimeLimit.truncated": bool(t)} for t in truncated])
        for index, row in enumerate(rows):
            kept[index][np.float32(row[3])] = row
            kept[index] = dict(list(kept[index].items())[-keep:])
    return {reward: row for each in kept for reward, row in each.items()}


@pytest.mark.parametrize("storage", ["host", "device", "disk"])
@pytest.mark.parametrize("stacking", ["repeat", "zeros", "none"])
@pytest.mark.parametrize("n_envs", [1, 3])
def test_samples_are_the_transitions_that_were_added(storage, stacking, n_envs):
    capacity = 40 * n_envs
    buffer = FrameReplayBuffer(capacity, space(), ACTION, "cpu", n_envs, storage=storage, seed=0)
    kept = fill(buffer, [episodes(seed, stacking) for seed in range(n_envs)], 110, 40)
    seen = set()
    for _ in range(32):
        batch = buffer.sample(16)
        for index in range(16):
            reward = np.float32(batch.rewards[index, 0].item())
            obs, following, action, _, done, truncated = kept[reward]
            assert np.array_equal(batch.observations[index].numpy(), obs)
            assert np.array_equal(batch.next_observations[index].numpy(), following)
            assert np.array_equal(batch.actions[index].numpy(), action.astype(np.float32))
            assert batch.dones[index, 0].item() == float(done and not truncated)
            seen.add(reward)
    assert len(seen) > 0.9 * len(buffer)
    if stacking == "repeat":  # episodes of 1 to 8 steps need up to one frame more for each step
        assert len(buffer) >= 0.6 * capacity


def test_sampling_is_uniform_and_time_limits_can_be_declared_terminations():
    buffer = FrameReplayBuffer(20, space(), ACTION, "cpu", seed=0)
    fill(buffer, [episodes(0)], 20, 20)
    counts = np.bincount(buffer._draw(40_000)[1], minlength=20)
    live = np.array([(buffer._tail[0] + i) % 20 for i in range(len(buffer))])
    expected = 40_000 / len(live)
    assert np.abs(counts[live] - expected).max() < 6 * np.sqrt(expected)
    assert counts.sum() == counts[live].sum()
    buffer = FrameReplayBuffer(20, space(), ACTION, "cpu", seed=0, handle_timeout_termination=False)
    refused(TrainingError, "empty", buffer.sample, 2)
    images = np.zeros((1, 9, SIZE, SIZE), np.uint8)
    buffer.add(images, images, np.zeros((1, 2)), np.zeros(1), np.array([True]), [{"TimeLimit.truncated": True}])
    assert buffer.sample(4).dones.tolist() == [[1.0]] * 4


@pytest.mark.parametrize("inclusive", [True, False])
@pytest.mark.parametrize("storage", ["host", "device", "disk"])
def test_crops_are_windows_of_the_stored_stack(storage, inclusive):
    """Of the four offsets on each axis the last one is an option."""
    buffer = FrameReplayBuffer(60, space(), ACTION, "cpu", storage=storage, seed=0)
    kept = fill(buffer, [episodes(0)], 60, 60)
    batch = buffer.sample_views(32, Crop(9, inclusive), positives=4)
    assert batch.observations.shape == (32, 9, 9, 9)
    assert batch.positives.shape == (32, 4, 9, 9, 9)
    corners = list(itertools.product(range(3 + inclusive), repeat=2))
    offsets = set()
    for index in range(32):
        obs, following, *_ = kept[np.float32(batch.rewards[index, 0].item())]
        whole = {(top, left): [image[:, top : top + 9, left : left + 9] for image in (obs, following)]
                 for top, left in corners}  # fmt: skip
        found = [o for o, (a, _) in whole.items() if np.array_equal(a, batch.observations[index].numpy())]
        assert len(found) == 1
        offsets.update(found)
        assert any(np.array_equal(b, batch.next_observations[index].numpy()) for _, b in whole.values())
        for view in batch.positives[index]:
            assert any(np.array_equal(a, view.numpy()) for a, _ in whole.values())
    assert len(offsets) > len(corners) / 2
    for axis in zip(*offsets, strict=True):
        assert set(axis) == set(range(3 + inclusive))


def test_augmentations_by_name_and_shift_repeats_the_border():
    for name, size, crop, expected in (("crop", 100, Crop, 84), ("shift", 84, Shift, 84)):
        found = choose(name, 9, size, None, True)
        assert isinstance(found, crop)
        assert found.size == expected
    assert isinstance(choose("none", 9, 100, 84, True), Centre)
    custom = choose(lambda images: images[..., 2:10, 2:10], 9, SIZE, None, True)
    assert isinstance(custom, Custom)
    assert custom.size == 8
    refused(ConfigError, "Did you mean 'crop'", choose, "crops", 9, 100, None, True)
    refused(ConfigError, "must return a tensor", choose, lambda images: images[0], 9, 100, None, True)
    refused(ConfigError, "image_size must be between 1 and the rendered size 84", choose, "crop", 9, 84, 100, True)
    images = torch.arange(2 * 3 * 5 * 5).reshape(2, 3, 5, 5).to(torch.uint8)
    moved = shift(images, np.array([0, 4]), np.array([2, 3]), pad=2)
    for index, (top, left) in enumerate([(0, 2), (4, 3)]):
        padded = np.pad(images[index].numpy(), ((0, 0), (2, 2), (2, 2)), mode="edge")
        np.testing.assert_array_equal(moved[index].numpy(), padded[:, top : top + 5, left : left + 5])


@pytest.mark.parametrize("storage", ["host", "device", "disk"])
def test_a_pickled_buffer_goes_on_bit_for_bit(storage):
    one, two = episodes(3), itertools.islice(episodes(3), 15, None)
    buffer = FrameReplayBuffer(50, space(), ACTION, "cpu", storage=storage, seed=1)
    fill(buffer, [one], 15, 30)
    data = pickle.dumps(buffer)
    assert len(data) < 0.8 * buffer.nbytes  # only what is filled
    other = pickle.loads(data)
    fill(buffer, [one], 60, 30)
    fill(other, [two], 60, 30)
    for _ in range(3):
        a, b = buffer.sample_views(16, Crop(8), 1), other.sample_views(16, Crop(8), 1)
        for name in ("observations", "next_observations", "positives", "actions", "rewards", "dones"):
            assert torch.equal(getattr(a, name), getattr(b, name))


def test_buffers_that_do_not_fit_are_refused_and_frames_are_on_the_gpu_if_they_fit(monkeypatch):
    monkeypatch.setattr(frames, "available_bytes", lambda device: 10**12)
    six, whole = spaces.Box(-1, 1, (6,), np.float32), spaces.Box(0, 255, (9, 100, 100), np.uint8)
    assert 3.0e9 < FrameReplayBuffer(100_000, whole, six, "cpu", seed=0).nbytes < 3.15e9
    needed = FrameReplayBuffer(60, space(), ACTION, "cpu", seed=0).nbytes
    monkeypatch.setattr(frames, "available_bytes", lambda device: 1_000_000_000)
    said = r"100,000 transitions.*needs 3,[01]\d\d,\d{3},\d{3} bytes.*1,000,000,000 bytes"
    refused(TrainingError, said, FrameReplayBuffer, 100_000, whole, ACTION, "cpu", seed=0)
    monkeypatch.setattr(FrameReplayBuffer, "_allocate", lambda self: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for free, device, kind in ((2 * needed, "cuda", "device"), (2 * needed - 1, "cuda", "host"), (1e9, "cpu", "host")):
        for module in (frames, replay):
            monkeypatch.setattr(module, "available_bytes", lambda place, free=free: free)
        assert FrameReplayBuffer(60, space(), ACTION, device, storage="auto", seed=0).storage == kind


def test_replay_on_disk_leaves_no_file_and_needs_free_space(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    buffer = FrameReplayBuffer(300, space(), ACTION, "cpu", storage="disk", seed=0)
    assert list(tmp_path.iterdir()) == []
    fill(buffer, [episodes(0)], 20, 20)
    mapped = pathlib.Path("/proc/self/maps")
    assert not mapped.is_file() or str(tmp_path) in mapped.read_text()
    monkeypatch.setattr(frames.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 5, 5))
    with pytest.raises(TrainingError, match=rf"5 bytes .* are free on {tmp_path}.*a larger disk \(TMPDIR\)"):
        FrameReplayBuffer(300, space(), ACTION, "cpu", storage="disk", seed=0)


@pytest.mark.parametrize(("given", "said"), [
    ({"observation_space": spaces.Box(0, 1, (3, 8, 8), np.float32)}, "stores uint8 images"),
    ({"frame_stack": 2}, "frame_stack 2 does not divide the 9 channels"),
    *(({name: number}, f"{name} must be an integer >= 1, got {number}") for name, number in (
        ("buffer_size", 0), ("buffer_size", -5), ("frame_stack", -3), ("frame_stack", 0), ("n_envs", 0))),
    ({"seed": -1}, "seed must be an integer from 0"), ({"device": "foo"}, "device must be .auto.* got .foo"),
])  # fmt: skip
def test_wrong_settings_of_replay_are_named(given, said):
    with pytest.raises(ConfigError, match=said):
        FrameReplayBuffer(**{"buffer_size": 10, "observation_space": space(), "action_space": ACTION, **given})


LAYOUTS = ["newest last", "9 grey", "stride 2", "stride 4", "newest first", "colours apart", "no overlap"]


def strided(seed, kind):
    """Observations (C, H, W) of one endless episode in an undeclared layout."""
    rng = np.random.default_rng(seed)
    past = [rng.integers(0, 256, (3, SIZE, SIZE), dtype=np.uint8) for _ in range(9)]
    while True:
        past = [*past[1:], rng.integers(0, 256, (3, SIZE, SIZE), dtype=np.uint8)]
        yield {
            "newest last": lambda past: np.concatenate(past[-3:]),
            "9 grey": lambda past: np.stack([frame[0] for frame in past]),
            "stride 2": lambda past: np.concatenate([past[-5], past[-3], past[-1]]),
            "stride 4": lambda past: np.concatenate([past[0], past[4], past[8]]),
            "newest first": lambda past: np.concatenate([past[-1], past[-2], past[-3]]),
            "colours apart": lambda past: np.concatenate(
                [np.stack([frame[c] for frame in past[-3:]]) for c in range(3)]
            ),
            "no overlap": lambda past, rng=rng: rng.integers(0, 256, (9, SIZE, SIZE), dtype=np.uint8),
        }[kind](past)


@pytest.mark.parametrize("storage", ["host", "device", "disk"])
@pytest.mark.parametrize("steps", [1, 1000])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_as_many_transitions_are_held_as_were_asked_for_in_any_layout(kind, steps, storage):
    buffer = FrameReplayBuffer(100, space(), ACTION, "cpu", storage=storage, seed=0)
    stream = strided(0, kind)
    obs, kept = next(stream), {}
    for step in range(240):
        following, ends = next(stream), step % steps == steps - 1
        buffer.add(obs[None], following[None], np.zeros((1, 2)), np.array([step]), np.array([ends]), [{}])
        kept[step] = (obs, following)
        obs = next(stream) if ends else following
        assert buffer.full == (len(buffer) == 100)
        assert len(buffer) == min(step + 1, 100)
    assert buffer.capacity == 100
    batch = buffer.sample(50)
    assert batch.rewards.min() >= 140
    for reward, image, following in zip(batch.rewards[:, 0], batch.observations, batch.next_observations, strict=True):
        assert np.array_equal(image.numpy(), kept[int(reward)][0])
        assert np.array_equal(following.numpy(), kept[int(reward)][1])
    if steps == 1000:  # one new plane a step for grey frames. Other layouts than "newest last" are stored whole
        planes = {"9 grey": 1, "newest last": 3}.get(kind, 9)
        assert buffer._written[0] < 1.1 * planes * 240 + 70


def test_full_memory_warns_with_the_true_capacity(monkeypatch):
    buffer = FrameReplayBuffer(600, space(), ACTION, "cpu", seed=0)
    monkeypatch.setattr(replay, "available_bytes", lambda device: 1000)
    stream = strided(0, "no overlap")

    def fill_up():
        for step in range(700):
            images = next(stream)[None], next(stream)[None]
            buffer.add(*images, np.zeros((1, 2)), np.array([step]), np.array([True]), [{}])

    with pytest.warns(RuntimeWarning, match=r"replay holds about [\d,]+ transitions instead of 600") as said:
        fill_up()
    assert len([each for each in said if "replay holds" in str(each.message)]) == 1
    assert not buffer.full
    assert len(buffer) == pytest.approx(buffer.capacity, rel=0.1)


@pytest.mark.parametrize("n_steps", [1, 3])
def test_returns_of_several_steps_are_those_of_sb3(n_steps):
    """Against a loop: rewards up to the episode's end, a failed step, or the newest step."""
    buffer = FrameReplayBuffer(30, space(), ACTION, "cpu", seed=0, n_steps=n_steps, gamma=0.5)
    stream, rng = strided(0, "stride 2"), np.random.default_rng(0)
    obs, rows = next(stream), []
    for _ in range(45):
        following, ends, limit, fault = next(stream), rng.random() < 0.2, rng.random() < 0.5, rng.random() < 0.1
        ends |= fault
        reward = np.float32(rng.random())
        info = {"TimeLimit.truncated": bool(ends and limit), **({"fault": {}} if fault else {})}
        buffer.add(obs[None], following[None], np.zeros((1, 2)), np.array([reward]), np.array([ends]), [info])
        rows.append((obs, following, reward, ends, ends and not limit, fault))
        obs = next(stream) if ends else following
    rows, seen = rows[-30:], set()
    for _ in range(20):
        batch = buffer.sample(16)
        for index in range(16):
            first = next(i for i, row in enumerate(rows) if np.array_equal(row[0], batch.observations[index].numpy()))
            seen.add(first)
            total, discount, last = 0.0, 1.0, first
            for at in range(first, min(first + n_steps, 30)):
                if rows[at][5]:
                    break
                total, discount, last = total + discount * rows[at][2], 0.5 * discount, at
                if rows[at][3]:
                    break
            assert batch.rewards[index, 0].item() == pytest.approx(total, rel=1e-5)
            assert n_steps == 1 or batch.discounts[index, 0].item() == pytest.approx(discount)
            assert bool(batch.dones[index, 0]) == rows[last][4]
            np.testing.assert_array_equal(batch.next_observations[index].numpy(), rows[last][1])
    assert len(seen) == sum(not row[5] for row in rows)


def test_windows_of_images_that_are_not_square():
    wide = spaces.Box(0, 255, (3, SIZE, 2 * SIZE), np.uint8)
    buffer = FrameReplayBuffer(10, wide, ACTION, "cpu", seed=0)
    images = np.random.default_rng(0).integers(0, 256, (1, 3, SIZE, 2 * SIZE), dtype=np.uint8)
    buffer.add(images, images, np.zeros((1, 2)), np.zeros(1), np.zeros(1), [{}])
    batch = buffer.sample_views(50, choose("crop", 3, (SIZE, 2 * SIZE), None, True), 1)
    assert batch.observations.shape == (50, 3, 10, 20)
    windows = [images[0, :, top : top + 10, left : left + 20] for top in range(3) for left in range(5)]
    for view in batch.observations.numpy():
        assert any(np.array_equal(view, window) for window in windows)
