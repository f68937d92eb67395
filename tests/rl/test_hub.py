"""The folder that the Hub shows as an agent: huggingface_sb3's files."""

import json

import numpy as np
import pytest
from stable_baselines3 import SAC

from dipole.core.cli import main
from dipole.core.train.recipe import load
from dipole.core.train.run import train
from dipole.rl.algorithms import open_agent
from dipole.rl.envs.registry import make_env
from dipole.rl.episodes.play import evaluate
from dipole.rl.export import name_of

SHORT = ["train.steps=60", "train.evaluate_every=60", "train.checkpoint_every=60", "train.batch_size=8"]
SHORT += ["rl.learning_starts=40", "rl.episodes=2", "rl.hidden=[8]", "device=cpu"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    runs = tmp_path_factory.mktemp("hub")
    config = load("dot-state", SHORT).config
    train(config, runs, quiet=True)
    assert main(["export", str(runs / config.hash), "--to", "huggingface-sb3", "--license", "mit"]) == 0
    return runs / config.hash / "export-huggingface-sb3"


def test_the_folder_is_laid_out_as_that_of_huggingface_sb3(folder):
    from huggingface_hub import ModelCard

    names = {path.name for path in folder.iterdir()}
    assert {"sac-dot.zip", "sac-dot", "config.json", "results.json", "README.md", "agent.zip"} <= names
    assert names & {"replay.mp4", "replay.gif"}
    files = {path.name for path in (folder / "sac-dot").iterdir()}
    assert {"data", "policy.pth", "_stable_baselines3_version"} <= files
    config = json.loads((folder / "config.json").read_text())
    assert config["policy_class"]["__module__"] == "dipole.rl.networks"
    assert "Stable-Baselines3" in config["system_info"]
    result = json.loads((folder / "results.json").read_text())
    played = evaluate(open_agent(folder / "agent.zip", device="cpu"), make_env("dot", inputs="state"), 1)
    assert len(played) == 1
    assert set(result) == {"mean_reward", "std_reward", "is_deterministic", "n_eval_episodes", "eval_datetime"}
    assert (result["n_eval_episodes"], result["is_deterministic"]) == (2, True)
    card = ModelCard.load(folder / "README.md")
    assert (card.data.library_name, card.data.license) == ("stable-baselines3", "mit")
    assert {"dot", "deep-reinforcement-learning", "reinforcement-learning", "stable-baselines3"} <= set(card.data.tags)
    first = card.data.eval_results[0]
    assert (first.metric_type, first.dataset_type, first.task_type) == ("mean_reward", "dot", "reinforcement-learning")
    assert first.metric_value == f"{result['mean_reward']:.2f} +/- {result['std_reward']:.2f}"


def test_zip_for_the_hub_acts_like_the_agent(folder):
    shown = np.random.default_rng(0).uniform(size=(3, 4)).astype(np.float32)
    expected = open_agent(folder / "agent.zip", device="cpu").predict(shown, deterministic=True)[0]
    plain = SAC.load(folder / "sac-dot.zip", device="cpu")
    assert np.array_equal(plain.predict(shown, deterministic=True)[0], expected)


def test_names_are_those_of_huggingface_sb3():
    assert name_of("sac", "cheetah-run") == "sac-cheetah-run"
    assert name_of("td3", "dipole/dot-v0") == "td3-dipole-dot-v0"
    assert name_of("sac", "distracting:walker-walk") == "sac-distracting-walker-walk"
