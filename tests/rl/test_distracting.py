"""Distractions: other pictures, the same task, seeds and state."""

import itertools

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("dm_control")

from dipole.core.train.recipe import load_recipe
from dipole.core.utils.errors import ConfigError
from dipole.rl import make_env
from dipole.rl.envs.distracting import DIFFICULTIES, _picture, _rolled, videos_in

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


@pytest.fixture
def videos(tmp_path):
    """Two videos of three plain frames each, one of them linked, a loose picture, and files that are none."""
    for number, name in enumerate(("bear", "boat")):
        (tmp_path / "frames" / name).mkdir(parents=True)
        for frame in range(3):
            colour = (80 * frame + 40, 255 * number, 200)
            Image.new("RGB", (40, 30), colour).save(tmp_path / "frames" / name / f"{frame:05d}.png")
    Image.new("RGB", (8, 8), (250, 0, 0)).save(tmp_path / "red.jpg")
    for name in ("notes.txt", "._red.jpg", "frames/bear/._00000.png"):
        (tmp_path / name).write_text("none")
    (tmp_path / "frames/boat").rename(tmp_path / ".boat")
    (tmp_path / "frames/boat").symlink_to(tmp_path / ".boat")
    return tmp_path


def sky(observation):
    """The colour of the picture's upper corner, newest frame."""
    return observation[-3:, 1, 1].astype(int)


def test_strength_0_changes_nothing_a_roll_is_a_rotation_and_backgrounds_are_upright(tmp_path):
    plain = make_env("cartpole-balance", **SMALL)
    env = make_env("distracting:cartpole-balance", colour=0.0, camera_shift=0.0, **SMALL)
    assert np.array_equal(plain.reset(seed=0)[0], env.reset(seed=0)[0])
    quaternion = np.array([0.5, 0.5, -0.5, 0.5])
    rolled = _rolled(quaternion, 0.2)
    assert (np.linalg.norm(rolled), quaternion @ rolled) == pytest.approx((1, np.cos(0.2)))
    assert _rolled(_rolled(quaternion, 0.2), -0.2) == pytest.approx(quaternion)
    left_red = Image.fromarray(np.uint8([[[255, 0, 0]] * 8 + [[0, 0, 255]] * 8] * 16))
    for orientation in (1, 3, 6):
        exif = Image.Exif()
        exif[0x0112] = orientation
        left_red.save(tmp_path / f"{orientation}.png", exif=exif)
    shown = {orientation: _picture(tmp_path / f"{orientation}.png", 16) for orientation in (1, 3, 6)}
    assert np.array_equal(shown[3], shown[1][::-1, ::-1])
    assert np.array_equal(shown[6], np.rot90(shown[1], -1))


def test_videos_are_shown_behind_the_scene(videos):
    given = {"backgrounds": str(videos), "colour": 0.0, "camera_shift": 0.0, **SMALL}
    env, plain = make_env("distracting:finger-spin", dynamic=True, **given), make_env("finger-spin", **SMALL)
    action = np.zeros(2, np.float32)
    seen = set()
    for seed in (0, 1, 7):  # which draw each video once
        first, start = env.reset(seed=seed)[0], plain.reset(seed=seed)[0]
        assert np.abs(first.astype(int) - start).mean() > 5
        shown = [sky(first), *(sky(env.step(action)[0]) for _ in range(4))]
        video = env._place[0]
        seen.add(video)
        moves = [int(np.abs(one - two).max()) for one, two in itertools.pairwise(shown)]
        assert all(each < 8 for each in moves) if len(env._videos[video]) == 1 else min(moves) > 15
        if len(env._videos[video]) == 3:  # back and forth
            assert np.abs(shown[0] - shown[4]).max() < 8
    assert seen == {0, 1, 2}
    still = make_env("distracting:finger-spin", **given)
    assert np.array_equal(sky(still.reset(seed=1)[0]), sky(still.step(action)[0]))
    state = env.get_state()
    other = make_env("distracting:finger-spin", dynamic=True, **given)
    other.reset(seed=99)
    other.set_state(state)
    for _ in range(3):
        assert np.array_equal(env.step(action)[0], other.step(action)[0])


def test_recipes_name_the_papers_difficulties(videos):
    papers = {"easy": (0.1, 0.1, 4), "medium": (0.2, 0.2, 8), "hard": (0.3, 0.3, None)}
    assert papers | {None: (0.1, 0.03, None)} == DIFFICULTIES
    env = make_env("distracting:reacher-easy", difficulty="medium", backgrounds=str(videos), colour=0.5, **SMALL)
    assert (env.colour, env.camera_shift, len(env._videos), env.reset(seed=0)[0].shape) == (0.5, 0.2, 3, (9, 40, 40))
    assert [len(videos_in(videos, most)) for most in (None, 8, 2)] == [3, 3, 2]
    wanted = ["rl.task=distracting:walker-walk", "rl.difficulty=medium", f"rl.backgrounds={videos}", "rl.dynamic=true"]
    assert load_recipe("curl", wanted).config.rl.environment()["difficulty"] == "medium"


@pytest.mark.parametrize(("given", "said"), [
    *(({"difficulty": wrong}, "difficulty must be 'easy', 'medium', 'hard' or None") for wrong in ("extreme", [2])),
    ({"colour": 2}, "colour must be a number from 0 to 1"),
    ({"backgrounds": "ABSENT"}, "is no folder"), ({"dynamic": True}, "give their folder"),
    ({"difficulty": "easy", "inputs": "state"}, "no image to distract from"),
    ({"backgrounds": "EMPTY"}, "holds no pictures"), ({"backgrounds": "BROKEN"}, "cannot be read"),
])  # fmt: skip
def test_wrong_backgrounds_raise_errors(given, said, tmp_path):
    (tmp_path / "BROKEN").mkdir()
    (tmp_path / "BROKEN" / "one.png").write_bytes(b"no picture")
    (tmp_path / "EMPTY").mkdir()
    if "backgrounds" in given:
        given = given | {"backgrounds": str(tmp_path / given["backgrounds"])}
    with pytest.raises(ConfigError, match=said):
        make_env("distracting:finger-spin", **given, **SMALL).reset(seed=0)
