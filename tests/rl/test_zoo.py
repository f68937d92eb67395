"""Hyper-parameter files of RL Baselines3 Zoo, and rates of single tasks, in recipes."""

import pytest

pytest.importorskip("stable_baselines3")

from dipole.core.train.recipe import resolve
from dipole.core.utils.errors import ConfigError
from dipole.rl import zoo

RECIPE = {"domain": "rl", "objective": "infonce", "train": {"steps": 100}}
FILE = """
default:
  policy: 'CnnPolicy'
  n_timesteps: !!float 1e6
  learning_rate: !!float 7.3e-4
  buffer_size: 300000
  batch_size: 256
  ent_coef: 'auto_0.2'
  train_freq: 8
  gradient_steps: 8
  learning_starts: 10000
  policy_kwargs: "dict(net_arch=[400, 300])"
cheetah-run:
  learning_rate: 0.0005
  tau: 0.02
odd:
  env_wrapper: x.y
code:
  policy_kwargs: "dict(net_arch=[__import__('os').getpid()])"
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "sac.yml"
    path.write_text(FILE)
    return str(path)


def recipe(overrides=(), train=None, **table):
    return resolve({**RECIPE, "train": {"steps": 100, **(train or {})}, "rl": table}, list(overrides)).config


def test_entry_sets_what_the_recipe_leaves_out(file):
    config = recipe(hyperparameters=file)
    assert (config.train.learning_rate, config.train.batch_size, config.train.steps) == (7.3e-4, 256, 100)
    found = config.rl
    assert (found.buffer_size, found.train_freq, found.gradient_steps, found.learning_starts) == (300_000, 8, 8, 10_000)
    assert (found.hidden, found.initial_temperature, found.ent_coef) == ((400, 300), 0.2, "auto")
    given = recipe(hyperparameters=file, buffer_size=5000, train={"learning_rate": 1e-2})
    assert (given.rl.buffer_size, given.train.learning_rate) == (5000, 1e-2)
    other = recipe([f"rl.hyperparameters={file}", "rl.task=cheetah-run"])
    assert (other.rl.tau, other.train.learning_rate, other.rl.buffer_size) == (0.02, 5e-4, 100_000)


def test_run_id_of_a_file_equals_that_of_its_values(file):
    written = {
        "buffer_size": 300_000, "train_freq": 8, "gradient_steps": 8, "learning_starts": 10_000, "hidden": [400, 300],
        "initial_temperature": 0.2,
    }  # fmt: skip
    one = recipe(hyperparameters=file)
    assert one.hash == recipe(train={"learning_rate": 7.3e-4, "batch_size": 256}, **written).hash


def test_unreadable_files_raise_errors(tmp_path, file):
    with pytest.raises(ConfigError, match="cannot be read"):
        recipe(hyperparameters=str(tmp_path / "none.yml"))
    (tmp_path / "list.yml").write_text("[1, 2]")
    with pytest.raises(ConfigError, match="must map tasks to hyper-parameters"):
        zoo.read(tmp_path / "list.yml", "dot")
    (tmp_path / "rate.yml").write_text("dot: {learning_rate: lin_1e-3}")
    with pytest.raises(ConfigError, match="is a schedule, and a recipe has a constant rate"):
        zoo.read(tmp_path / "rate.yml", "dot")
    (tmp_path / "other.yml").write_text("walker-walk: {tau: 0.1}")
    with pytest.raises(ConfigError, match=r"no entry 'dot' and no 'default'\. Entries: walker-walk"):
        zoo.read(tmp_path / "other.yml", "dot")
    with pytest.raises(ConfigError, match=r"env_wrapper has no meaning here\. Use the environment's own settings"):
        zoo.read(file, "odd")
    with pytest.raises(ConfigError, match=r"policy_kwargs = .* cannot be read"):
        zoo.read(file, "code")


def test_cheetah_has_its_own_learning_rate():
    assert recipe(task="cheetah-run").train.learning_rate == 2e-4
    assert recipe(task="walker-walk").train.learning_rate == 1e-3
    assert recipe(task="cheetah-run", preset="small").train.learning_rate == 1e-3
    assert recipe(task="cheetah-run", train={"learning_rate": 3e-4}).train.learning_rate == 3e-4
