"""Environments: pixels, repeats, limits and seeds against dm_control itself, and both checkers."""

import functools
import os
import subprocess
import sys
import textwrap
import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env as check_gymnasium
from stable_baselines3.common.env_checker import check_env as check_sb3

import dipole.rl
from dipole.core.train.recipe import load_recipe
from dipole.core.train.run import train
from dipole.core.utils.errors import ConfigError, DipoleError, RegistryError
from dipole.rl import ControlEnv, DotEnv, environment, envs, make_env
from dipole.rl.adapter import RLConfig
from dipole.rl.envs import control, registry
from dipole.rl.envs.suite import rendering
from dipole.rl.envs.suite.rendering import INSTALL, PACKAGES, RenderingError, choose_backend, import_suite, osmesa_works
from tests.runs import refused

REPEATS = {
    "finger-spin": 2, "cartpole-swingup": 8, "reacher-easy": 4, "cheetah-run": 4, "walker-walk": 2,
    "ball_in_cup-catch": 4,
}  # fmt: skip


@pytest.mark.usefixtures("opengl")
def test_task_names_are_all_of_dm_control_and_a_mujoco_that_it_cannot_load_is_refused(monkeypatch):
    import mujoco
    from dm_control import suite

    assert control.suite_names() == [f"{domain}-{task}" for domain, task in suite.ALL_TASKS]
    assert control.split("ball-in-cup-catch") == ("ball_in_cup", "catch")
    monkeypatch.setattr(mujoco, "__version__", "4.0.0")
    refused(DipoleError, r"mujoco 4.0.0 does not work.*mujoco>=3.17,<4", import_suite)


@pytest.fixture(scope="module")
def pair(opengl):
    """Makes two environments of a task, once."""

    @functools.cache
    def make(task, inputs):
        settings = {"rendering": "fast", "inputs": inputs} if task != "dot" else {}
        return [gymnasium.make(f"dipole/{task}-v0", **settings).unwrapped for _ in range(2)]

    return make


CHECKED = ("finger-spin", "reacher-easy")
SLOW = [pytest.param(task, marks=pytest.mark.slow) for task in control.PAPER_TASKS if task not in CHECKED]


@pytest.mark.parametrize("task", [*CHECKED, *SLOW])
def test_the_six_tasks_pass_both_checkers(task, pair):
    env = pair(task, "pixels")[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", DeprecationWarning)  # NumPy 2.5 has some for dm_control
        check_gymnasium(env)
        check_sb3(env)


@pytest.mark.parametrize("task", [*CHECKED, *SLOW])
def test_a_trajectory_is_dm_controls_pixel_for_pixel(task, opengl):
    """That of a seed, and that of the episode after it."""
    from dm_control import suite

    reference = suite.load(*task.split("-"), task_kwargs={"random": 7})
    env = ControlEnv(task)
    assert env.observation_space == gymnasium.spaces.Box(0, 255, (9, 100, 100), np.uint8)
    assert env.action_repeat == REPEATS[task]
    assert (env.action_space.low == -1).all()
    assert (env.action_space.high == 1).all()
    env.reset(seed=99)
    rng = np.random.default_rng(0)

    def picture():
        return reference.physics.render(100, 100, camera_id=0).transpose(2, 0, 1)

    for seed, steps in ((7, 2), (None, 0)):
        reference.reset()
        observation, info = env.reset(seed=seed)
        assert info == {"environment_steps": 0}
        frames = [picture()] * 3
        np.testing.assert_array_equal(observation, np.concatenate(frames))
        for _ in range(steps):
            action = rng.uniform(-1, 1, env.action_space.shape).astype(np.float32)
            expected = sum(reference.step(action.astype(np.float64)).reward for _ in range(env.action_repeat))
            observation, reward, terminated, truncated, info = env.step(action)
            frames = [*frames[1:], picture()]
            np.testing.assert_array_equal(observation, np.concatenate(frames))
            assert reward == pytest.approx(expected, abs=1e-12)
            assert (terminated, truncated, info["environment_steps"]) == (False, False, env.action_repeat)
    env.close()


@pytest.mark.usefixtures("opengl")
@pytest.mark.parametrize(("repeat", "steps", "last"), [(8, 125, 8), (300, 4, 100)])
def test_the_time_limit_truncates_after_1000_environment_steps(repeat, steps, last):
    env = ControlEnv("cartpole-balance", inputs="state", action_repeat=repeat, seed=0)
    env.reset()
    answers = [env.step(np.zeros(1, np.float32)) for _ in range(steps)]
    assert [each[2:4] for each in answers] == [(False, False)] * (steps - 1) + [(False, True)]
    assert answers[-1][4]["environment_steps"] == last
    longer = ControlEnv("cheetah-run", inputs="state", task_kwargs={"time_limit": 40.0})
    assert longer._limit == pytest.approx(4000)


@pytest.mark.usefixtures("opengl")
def test_actions_are_mapped_to_the_tasks_own_bounds():
    env = ControlEnv("quadruped-walk", size=16, rendering="fast")
    assert env._camera(16)._render_camera.fixedcamid == 2
    spec = env._control.action_spec()
    env.reset(seed=0)
    env.step(np.ones(12, np.float32))
    np.testing.assert_allclose(env._physics.data.ctrl, spec.maximum)
    env.step(-np.ones(12, np.float32))
    np.testing.assert_allclose(env._physics.data.ctrl, spec.minimum)


@pytest.mark.parametrize(("task", "inputs"), [
    *((task, "pixels") for task in (*CHECKED, "ball_in_cup-catch", "quadruped-escape", "dot")),
    *((task, "state") for task in ("cheetah-run", "lqr-lqr_2_1", "point_mass-hard")),
    *(pytest.param(task, "state", marks=pytest.mark.slow) for task in ("cartpole-swingup", "walker-walk")),
])  # fmt: skip
def test_the_state_continues_bit_for_bit_in_another_environment(task, inputs, pair):
    one, two = pair(task, inputs)
    one.reset(seed=1)
    actions = np.random.default_rng(1).uniform(-1, 1, (6, *one.action_space.shape)).astype(np.float32)
    for action in actions[:2]:
        one.step(action)
    two.reset(seed=2)
    two.set_state(one.get_state())
    for action in actions[2:]:
        a, b = one.step(action), two.step(action)
        np.testing.assert_array_equal(a[0], b[0])
        assert a[1:4] == b[1:4]
    np.testing.assert_array_equal(one.reset()[0], two.reset()[0])
    np.testing.assert_equal(one.get_state(), two.get_state())


@pytest.mark.slow
@pytest.mark.usefixtures("opengl")
@pytest.mark.parametrize("task", control.suite_names())
def test_every_task_of_the_suite_runs(task):
    env = gymnasium.make(f"dipole/{task}-v0", size=32, rendering="fast")
    first, _ = env.reset(seed=0)
    env.action_space.seed(0)
    second, reward, *_ = env.step(env.action_space.sample())
    assert first.shape == second.shape == (9, 32, 32)
    assert np.isfinite(reward)
    assert first.any()
    env.close()


def test_lqr_draws_its_springs_from_the_seed(opengl):
    from dm_control import suite

    env = ControlEnv("lqr-lqr_6_2", inputs="state")
    for seed in (3, 4):
        reference = suite.load("lqr", "lqr_6_2", task_kwargs={"random": seed})
        reference.reset()
        env.reset(seed=seed)
        np.testing.assert_array_equal(env._physics.model.jnt_stiffness, reference.physics.model.jnt_stiffness)
        np.testing.assert_array_equal(env._physics.data.qpos, reference.physics.data.qpos)


@pytest.mark.parametrize(("task", "settings", "said"), [
    ("dot", {"rendering": "fast"}, r"'dot' has no setting 'rendering'.*Settings: size, frame_stack, render_mode"),
    ("cheetah-run", {"sise": 3}, r"no setting 'sise'. Did you mean 'size'"),
    ("dot", {"size": 5}, "size must be at least 12"), ("dot", {"size": "28"}, "size must be an integer >= 1, got '28'"),
    ("dot", {"frame_stack": 0}, "frame_stack must be an integer >= 1"),
    ("dot", {"render_mode": "human"}, "render_mode must be 'rgb_array' or None"),
    ("cheetah-run", {"seed": -1}, "seed must be an integer from 0 to"),
    ("cheetah-run", {"task_kwargs": {"foo": 1}}, r"task_kwargs \{'foo': 1\} do not fit cheetah-run: .*'foo'"),
    ("cheetah-run", {"action_repeat": 0}, "action_repeat must be an integer >= 1"),
    ("cheetah-run", {"rendering": "best"}, "rendering must be 'paper' or 'fast'"),
    ("cheetah-run", {"camera": 17}, "camera 17 does not exist"),
    ("cheeta-run", {}, r"unknown task 'cheeta-run'.*Did you mean 'cheetah-run'"), (None, {}, "unknown task None"),
])  # fmt: skip
@pytest.mark.usefixtures("opengl")
def test_wrong_keywords_of_an_environment_raise_errors(task, settings, said):
    refused(ConfigError, said, make_env, task, **settings)


@pytest.mark.usefixtures("opengl")
@pytest.mark.parametrize("task", ["dot", "cartpole-swingup"])
def test_step_outside_an_episode_raises_an_error(task):
    env = DotEnv() if task == "dot" else ControlEnv(task, inputs="state", action_repeat=300)
    action = np.zeros(env.action_space.shape, np.float32)
    refused(gymnasium.error.ResetNeeded, r"call reset\(\) first", env.step, action)
    env.reset(seed=0)
    refused(ConfigError, r"has the shape \(\d,\), got \(7,\)", env.step, np.zeros(7))
    while not env.step(action)[3]:
        pass
    refused(gymnasium.error.ResetNeeded, None, env.step, action)
    env.reset()
    env.step(action)


def test_importing_the_domain_registers_and_loads_no_physics():
    code = (  # the module in front of the name imports what registers it
        "import sys, gymnasium; print(gymnasium.make('dipole.rl:dipole/dot-v0').reset(seed=0)[0].shape);"
        "assert 'dipole/cheetah-run-v0' in gymnasium.registry and 'dipole/ball-in-cup-catch-v0' in gymnasium.registry;"
        "assert not {'dm_control', 'mujoco', 'torch'} & set(sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).endswith("(9, 28, 28)\n")
    assert "ControlEnv" in dipole.rl.__all__


def test_egl_draws_on_the_first_visible_gpu_and_software_is_named(monkeypatch):
    devices = [rendering.Device(*each) for each in ((0, False, 1), (1, False, 0), (2, True, None))]
    found = [rendering.choose_device(devices, visible) for visible in ("0", "1,0", "7", "", "GPU-5f", "-1")]
    assert found == [1, 0, None, None, None, None]
    monkeypatch.setattr(rendering, "egl_devices", lambda: devices)
    monkeypatch.setattr(rendering, "BACKENDS", {"egl": lambda: True})
    monkeypatch.setenv("MUJOCO_GL", "egl")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    for given, said in [(None, "egl, device 1 (CUDA's GPU 0)"), ("2", "egl, in software"), ("5", "no device 5")]:
        monkeypatch.setenv("MUJOCO_EGL_DEVICE_ID", given or "")
        if given is None:
            monkeypatch.delenv("MUJOCO_EGL_DEVICE_ID")
        assert said in rendering.drawing()


def test_without_a_backend_the_error_names_the_packages(monkeypatch):
    monkeypatch.setattr(rendering, "BACKENDS", {"egl": lambda: False, "osmesa": lambda: False})
    for name in ("MUJOCO_GL", "DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RenderingError) as caught:
        choose_backend()
    assert INSTALL in str(caught.value)
    assert all(package in str(caught.value) for package in PACKAGES)
    monkeypatch.setattr(rendering, "BACKENDS", {"egl": lambda: False, "osmesa": lambda: True})
    for value, said in [("vulkan", "only egl, osmesa and glfw draw"), ("glfw", "no display"), ("egl", "does not work")]:
        monkeypatch.setenv("MUJOCO_GL", value)
        refused(RenderingError, f"MUJOCO_GL={value} is set.*{said}", choose_backend)
    monkeypatch.delenv("MUJOCO_GL")
    monkeypatch.setenv("PYOPENGL_PLATFORM", "")
    assert choose_backend() == "osmesa"
    assert os.environ["MUJOCO_GL"] == "osmesa"


@pytest.mark.skipif(not osmesa_works(), reason="no OSMesa on this machine")
def test_osmesa_draws_the_same_and_prints_nothing_at_exit(tmp_path, opengl):
    """An environment that is never closed: dm_control alone prints tracebacks when its thread is gone."""
    code = (
        "import numpy as np\nfrom dipole.rl import ControlEnv\nenv = ControlEnv('cartpole-swingup')\n"
        "np.save('frame.npy', env.reset(seed=0)[0])"
    )
    environ = {name: value for name, value in os.environ.items() if name != "PYOPENGL_PLATFORM"}
    environ["MUJOCO_GL"] = "osmesa"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    here, _ = ControlEnv("cartpole-swingup").reset(seed=0)
    assert np.abs(np.load(tmp_path / "frame.npy").astype(int) - here).mean() < 2  # another renderer may round otherwise


@pytest.mark.usefixtures("opengl")
def test_environment_in_a_thread_outlives_the_main_thread_and_triton_can_be_loaded():
    """PyTorch loads Triton with its first optimizer: after Mesa's LLVM that is a segmentation fault."""
    if choose_backend() == "osmesa":
        pytest.skip("dm_control draws with OSMesa on threads that end with the main one")
    code = (
        "import contextlib, threading, time\nfrom dipole.rl import ControlEnv\ndef play():\n"
        "    env = ControlEnv('cartpole-swingup', rendering='fast')\n    env.reset(seed=0)\n    ready.set()\n"
        "    threading.main_thread().join()\n    time.sleep(0.1)\n    print(env.step(env.action_space.high)[0].shape)\n"
        "ready = threading.Event()\nthreading.Thread(target=play).start()\nready.wait()\n"
        "with contextlib.suppress(ImportError):\n    import triton"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "(9, 100, 100)\n", "")


def test_the_dot_rewards_nearness():
    env = DotEnv()
    check_gymnasium(env)
    env.reset(seed=0)
    near, rewards = [], []
    for _ in range(50):
        step = np.clip((env._target - env._dot) / 0.1, -1, 1).astype(np.float32)
        _, reward, terminated, truncated, _ = env.step(step)
        near.append(np.hypot(*(env._target - env._dot)))
        rewards.append(reward)
    assert near[-1] < 1e-6
    assert rewards[-1] == pytest.approx(1)
    assert (terminated, truncated) == (False, True)


MINE = """
    from dipole.rl.envs.dot import DotEnv
    from dipole.rl.envs.registry import environment


    @environment("my_dot", loud=True)
    def mine(size: int = 20, loud: bool = False):
        assert loud
        return DotEnv(size=size, frame_stack=2)
"""


def test_a_file_in_the_folder_is_enough(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(textwrap.dedent(MINE))
    monkeypatch.setattr(envs, "__path__", [*envs.__path__, str(tmp_path)])
    monkeypatch.setattr(registry, "_environments", dict(registry._environments))
    registry.load.cache_clear()
    assert make_env("my-dot").observation_space.shape == (6, 20, 20)
    for spelling in ("my_dot", "my-dot"):
        assert gymnasium.make(f"dipole/{spelling}-v0", size=24).observation_space.shape == (6, 24, 24)
    small = ["train.steps=40", "train.evaluate_every=40", "train.batch_size=8", "device=cpu"]
    small += ["rl.learning_starts=20", "rl.episodes=1", "rl.size=24", "rl.image_size=20"]
    config = load_recipe("dot", ["rl.task=My-Dot", *small]).config
    assert config.rl.task == "my_dot"
    assert config.rl.environment() == {"size": 24}
    assert train(config, tmp_path, quiet=True).data["sizes"]["observation"] == [6, 24, 24]


def test_environments_are_listed_once_and_ids_are_tasks():
    distracted = {f"distracting:{task}" for task in control.suite_names()}
    assert set(registry.names()) == {*control.suite_names(), *distracted, "dot", "dot-discrete"}
    for spelling in ("ball-in-cup-catch", "ball_in_cup/catch", "Ball_In_Cup-Catch"):
        assert registry.find(spelling).name == "ball_in_cup-catch"
    for name in (make_env, "my dot", ""):  # `@environment` without a name
        refused(RegistryError, r"needs a name such as @environment\('mine'\)", environment, name)
    refused(RegistryError, "decorates a class or a function, got 3", environment("three"), 3)
    refused(RegistryError, r"'dot' is already registered by dipole\.rl\.envs\.dot", environment("dot"), make_env)
    assert RLConfig(task="dipole/dot-v0").environment() == {}
    assert RLConfig(task="cheetah-run", camera=1).environment()["camera"] == 1
    assert make_env("dipole/dot-v0", size=20).observation_space.shape == (9, 20, 20)
    refused(ConfigError, r"unknown task 'nothing:Here-v0': .*nothing", make_env, "nothing:Here-v0")


def test_code_of_an_environment_changes_the_run_id(tmp_path, monkeypatch):
    package = tmp_path / "somebodys_envs"
    package.mkdir()
    registering = "import gymnasium\ngymnasium.register('Their-v0', entry_point='somebodys_envs.task:Their')\n"
    (package / "__init__.py").write_text(registering)
    task = "import gymnasium\nclass Their(gymnasium.Env):\n    reward = 1\n"
    (package / "task.py").write_text(task)
    monkeypatch.syspath_prepend(tmp_path)
    found = load_recipe("dot", ["rl.task=somebodys_envs:Their-v0", "rl.image_size="]).config
    assert set(found.determining()["sources"]) == {"somebodys_envs"}
    before = found.hash
    (package / "task.py").write_text(task.replace("1", "10"))
    assert found.hash != before
    # Our own stand for themselves: their files change with dipole.
    assert load_recipe("dot").config.determining()["sources"] == {}
    assert load_recipe("dot", ["rl.task=dipole/dot-v0"]).config.determining()["sources"] == {}
