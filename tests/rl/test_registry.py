"""An environment is one file: found, trained and made by gymnasium without being named anywhere else."""

import textwrap

import gymnasium
import pytest

from dipole.core.train.recipe import load
from dipole.core.train.run import train
from dipole.core.utils.errors import ConfigError, RegistryError
from dipole.rl import DotEnv, environment, envs, make_env
from dipole.rl.config import RLConfig
from dipole.rl.envs import registry
from dipole.rl.envs.suite import tasks

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
    config = load("dot", ["rl.task=My-Dot", *small]).config
    assert config.rl.task == "my_dot"
    assert config.rl.environment() == {"size": 24}
    assert train(config, tmp_path, quiet=True).data["sizes"]["observation"] == [6, 24, 24]


def test_environments_are_listed_once_and_ids_are_tasks():
    distracted = {f"distracting:{task}" for task in tasks.names()}
    assert set(registry.names()) == {*tasks.names(), *distracted, "dot", "dot-discrete"}
    for spelling in ("ball-in-cup-catch", "ball_in_cup/catch", "Ball_In_Cup-Catch"):
        assert registry.find(spelling).name == "ball_in_cup-catch"
    with pytest.raises(RegistryError, match=r"'dot' is already registered by dipole\.rl\.envs\.dot"):
        environment("dot")(make_env)
    assert RLConfig(task="dipole/dot-v0").environment() == {}
    assert make_env("dipole/dot-v0", size=20).observation_space.shape == (9, 20, 20)
    with pytest.raises(ConfigError, match=r"unknown task 'nothing:Here-v0': .*nothing"):
        make_env("nothing:Here-v0")


def test_code_of_an_environment_changes_the_run_id(tmp_path, monkeypatch):
    package = tmp_path / "somebodys_envs"
    package.mkdir()
    registering = "import gymnasium\ngymnasium.register('Their-v0', entry_point='somebodys_envs.task:Their')\n"
    (package / "__init__.py").write_text(registering)
    task = "import gymnasium\nclass Their(gymnasium.Env):\n    reward = 1\n"
    (package / "task.py").write_text(task)
    monkeypatch.syspath_prepend(tmp_path)
    found = load("dot", ["rl.task=somebodys_envs:Their-v0", "rl.image_size="]).config
    assert set(found.determining()["sources"]) == {"somebodys_envs"}
    before = found.hash
    (package / "task.py").write_text(task.replace("1", "10"))
    assert found.hash != before
    # Our own stand for themselves: their files change with dipole.
    assert load("dot").config.determining()["sources"] == {}
    assert load("dot", ["rl.task=dipole/dot-v0"]).config.determining()["sources"] == {}


def test_settings_without_effect_on_the_environment_are_refused():
    for name, value in (("camera", 1), ("rendering", "fast"), ("action_repeat", 2)):
        said = f"{name} has no effect on the task 'dot', whose settings are size, frame_stack"
        with pytest.raises(ValueError, match=said):
            RLConfig(task="dot", **{name: value})
    assert RLConfig(task="cheetah-run", camera=1).environment()["camera"] == 1
    assert DotEnv(size=20).observation_space.shape == (9, 20, 20)
