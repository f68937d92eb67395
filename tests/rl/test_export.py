"""A trained agent outside of its run: moved, exported, loaded in fresh processes, played, on the Hub."""

import json
import shutil
import zipfile

import numpy as np
import pytest
import torch
from stable_baselines3 import SAC
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor

from dipole.core.cli import main
from dipole.core.train.model import evaluate_run, load_run
from dipole.core.train.recipe import load_recipe
from dipole.core.train.run import train
from dipole.core.train.run_folder import RunFolder
from dipole.core.utils.errors import CheckpointError, ConfigError
from dipole.rl import ContrastiveSAC, DotEnv, make_env
from dipole.rl.algorithms import open_agent
from dipole.rl.episodes.play import evaluate
from dipole.rl.episodes.trial import trial
from dipole.rl.export import name_of
from dipole.rl.saved_agent import FILE
from tests.rl.conftest import QUICK, without_dipole
from tests.runs import refused

SETTINGS = [*QUICK, "objective=infonce(similarity=bilinear) + 0.5*dp", "train.steps=60", "train.evaluate_every=60"]
SETTINGS += ["train.checkpoint_every=60", "train.learning_rate=3e-4", "rl.hidden=[32]", "rl.beta=0.8"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run that was moved to another place, and its record."""
    folder = tmp_path_factory.mktemp("agent")
    config = load_recipe("dot", SETTINGS).config
    record = train(config, folder / "runs", quiet=True)
    return (folder / "runs" / config.hash).rename(folder / "elsewhere"), record


@pytest.fixture(scope="module")
def exported(run):
    assert main(["export", str(run[0]), "--to", "sb3", "--license", "mit"]) == 0
    return run[0] / "export-sb3"


@pytest.fixture(scope="module")
def seen():
    return np.random.default_rng(0).integers(0, 256, (8, 9, 28, 28), dtype=np.uint8)


def test_moved_run_loads_without_its_environment(run, monkeypatch):
    folder, record = run
    again, found = evaluate_run(RunFolder(folder), "cpu")
    assert again.evaluations[-1].agrees
    assert found.results["return/mean"] == record.results["return/mean"]
    monkeypatch.setattr("dipole.rl.envs.registry.Environment.make", lambda *_, **__: pytest.fail("an environment"))
    _, adapter, _ = load_run(RunFolder(folder), "cpu")
    assert adapter.agent.env is None
    assert adapter.data_info() == record.data
    assert adapter.agent.settings.buffer_size == adapter.agent.buffer_size > 1
    assert adapter.agent.replay_buffer.buffer_size == 1  # nothing is stored where nothing is learned


def test_damaged_run_raises_an_error_that_names_it(run, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(run[0], folder)
    kept = folder / "model" / "kept" / "agent.json"
    told = json.loads(kept.read_text())
    for wrong in ({}, {**told, "observation_space": {}}, {**told, "n_envs": "many"}, []):
        kept.write_text(json.dumps(wrong))
        refused(CheckpointError, r"is damaged.*--overwrite", load_run, RunFolder(folder), "cpu")


_PLAIN = """
import json, sys
import gymnasium, numpy as np
from stable_baselines3 import SAC
from stable_baselines3.common.evaluation import evaluate_policy

class World(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 255, (9, 28, 28), np.uint8)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 10
        return self.observation_space.sample(), {}
    def step(self, action):
        self.left -= 1
        return self.observation_space.sample(), 1.0, False, self.left == 0, {}

found = []
for source in "zip", "networks.py":
    objects = None
    if source == "networks.py":
        from networks import PixelPolicy
        objects = {"policy_class": PixelPolicy}
    agent = SAC.load(sys.argv[1], env=World(), device="cpu", custom_objects=objects, learning_starts=5)
    assert ("networks" in sys.modules) == (source == "networks.py")
    played = agent.predict(np.load(sys.argv[2]), deterministic=True)[0]
    mean, _ = evaluate_policy(agent, agent.get_env(), n_eval_episodes=2)
    convolutions = agent.critic.features_extractor.convs[0].weight
    before = convolutions.detach().clone()
    agent.learn(10)
    assert agent.actor.features_extractor.convs[0].weight is convolutions
    moved = float((convolutions - before).abs().max())
    found.append([played.tolist(), mean, moved, agent.policy.__class__.__name__])
print(json.dumps(found))
"""


def test_stable_baselines3_alone_plays_and_learns(run, exported, seen, tmp_path):
    """With the classes in the zip, and with those of networks.py."""
    np.save(tmp_path / "seen.npy", seen)
    _, adapter, _ = load_run(RunFolder(run[0]), "cpu")
    expected = adapter.agent.predict(seen, deterministic=True)[0]
    found = without_dipole(_PLAIN, exported / "sac.zip", tmp_path / "seen.npy", cwd=exported)
    assert len(found) == 2
    for played, mean, moved, name in found:
        np.testing.assert_array_equal(np.array(played, np.float32), expected)
        assert (mean, name) == (10, "PixelPolicy")
        assert moved > 0


def test_exported_agent_has_objective_and_settings_of_the_run_and_learns(run, exported, seen):
    card = (exported / "README.md").read_text()
    for line in ("license: mit", "library_name: stable-baselines3", "pipeline_tag: reinforcement-learning"):
        assert f"\n{line}\n" in card
    for part in ("- deep-reinforcement-learning", "- dot", "SAC.load", "make_env(", "return/mean", "0.5 x `dp`"):
        assert part in card
    agent = ContrastiveSAC.load(exported / "agent.zip", env=make_env("dot"), device="cpu")
    record, adapter, objective = load_run(RunFolder(run[0]), "cpu")
    assert agent.settings.objective == record.objective == str(agent.contrast)
    assert (agent.learning_rate, agent.settings.learning_rate) == (3e-4, 3e-4)
    assert (agent.settings.batch_size, agent.settings.beta, agent.num_timesteps) == (8, 0.8, 60)
    assert torch.equal(agent.contrast.terms[0].W, objective.terms[0].W)
    assert not torch.equal(agent.contrast.terms[0].W.detach().round(), torch.eye(50))
    played = [each.predict(seen, deterministic=True)[0] for each in (agent, adapter.agent)]
    np.testing.assert_array_equal(*played)
    temperature = float(agent.log_ent_coef.detach().exp())
    assert temperature != pytest.approx(adapter.agent.settings.initial_temperature)  # trained, and carried
    W = agent.contrast.terms[0].W.detach().clone()
    agent.learn(25)
    assert agent._n_updates > 0
    assert not torch.equal(W, agent.contrast.terms[0].W)


def test_exported_zips_draw_the_same_actions_by_their_seed(exported, seen):
    """The deviation is squashed into its range in both. SB3's own actor would clamp it."""
    ours = ContrastiveSAC.load(exported / "agent.zip", device="cpu")
    plain = SAC.load(exported / "sac.zip", device="cpu")
    drawn = []
    for agent in (ours, plain):
        torch.manual_seed(3)
        drawn.append(agent.predict(seen, deterministic=False)[0])
    np.testing.assert_array_equal(*drawn)
    assert float(plain.log_ent_coef.detach()) == float(ours.log_ent_coef.detach())
    torch.manual_seed(0)
    state = torch.get_rng_state()
    one = trial(exported, episodes=1, seed=2, deterministic=False)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(9)
    assert trial(exported, episodes=1, seed=2, deterministic=False) == one
    assert trial(exported, episodes=1, seed=2) != one


def test_played_returns_are_those_of_sb3(run, exported, capsys, tmp_path):
    assert main(["play", str(exported / "agent.zip"), "--episodes", "3", "--seed", "5", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    agent = ContrastiveSAC.load(exported / "agent.zip", device="cpu")
    env = agent._wrap_env(Monitor(DotEnv()))
    env.seed(5)
    expected, _ = evaluate_policy(agent, env, n_eval_episodes=3, return_episode_rewards=True)
    assert told["returns"] == pytest.approx(expected, abs=1e-5)
    assert told["mean"] == pytest.approx(np.mean(expected), abs=1e-5)
    assert (told["task"], told["deterministic"], told["episodes"]) == ("dot", True, 3)
    assert main(["play", str(run[0]), "--episodes", "3", "--seed", "5", "--video", str(tmp_path / "dot.gif")]) == 0
    shown = capsys.readouterr().out
    assert f"return {told['mean']:.2f} +- {told['std']:.2f} (3 episodes, deterministic, seed 5" in shown
    assert (tmp_path / "dot.gif").read_bytes().startswith(b"GIF89a")


def test_another_task_is_seen_as_the_agent_sees(tiny_agent, tmp_path):
    tiny_agent(make_env("dot", size=36, frame_stack=2)).save(tmp_path / "agent.zip")
    assert len(trial(tmp_path / "agent.zip", "dot", episodes=1).returns) == 1
    refused(ConfigError, "does not say what its task is: give --env", trial, tmp_path / "agent.zip")


@pytest.mark.parametrize(("command", "said"), [
    ("play EXPORT --episodes 0", "episodes must be an integer >= 1"),
    ("play EXPORT --seed -1", "seed must be an integer from 0"),
    ("play EXPORT --env cheeta", "Did you mean 'cheetah-run'"),
    ("play EXPORT --video dot.avi", "videos are written as .gif or .mp4, not '.avi'"),
    ("embed EXPORT x", "is an agent"), ("embed RUN x", "is an agent"),
])  # fmt: skip
def test_wrong_commands_raise_errors(run, exported, capsys, command, said):
    places = {"EXPORT": str(exported), "RUN": str(run[0])}
    assert main([places.get(word, word) for word in command.split()]) == 2
    assert said in capsys.readouterr().err


def test_no_code_of_a_received_file_is_run(exported, tmp_path):
    """SB3 would unpickle `data`. What is played is built from the description alone."""
    trap = tmp_path / "agent.zip"
    with zipfile.ZipFile(exported / "agent.zip") as good, zipfile.ZipFile(trap, "w") as bad:
        for name in good.namelist():
            bad.writestr(name, "{" if name == "data" else good.read(name))
    assert trial(trap, episodes=1).returns == trial(exported, episodes=1).returns
    for wrong in ("{", "[]", "{}", '{"format": 1}', '{"format": 1, "code": [], "own_terms": [], "settings": 3}'):
        with zipfile.ZipFile(trap, "w") as bad:
            bad.writestr(FILE, wrong)
        refused(CheckpointError, "cannot be read", open_agent, trap, ContrastiveSAC, device="cpu")
    refused(CheckpointError, "holds no description", open_agent, exported / "sac.zip", ContrastiveSAC, device="cpu")


def test_load_asks_for_settings_that_are_code(tiny_agent, tmp_path):
    halves = lambda images: images[..., 2:-2, 2:-2]  # noqa: E731
    agent = tiny_agent(augmentation=halves, learning_rate=lambda left: 1e-3 * left)
    agent.save(tmp_path / "agent.zip")
    with pytest.raises(ConfigError, match=r"not kept in a file \(learning_rate, augmentation\): give it again"):
        open_agent(tmp_path / "agent.zip", ContrastiveSAC, device="cpu")
    again = open_agent(tmp_path / "agent.zip", ContrastiveSAC, device="cpu", augmentation=halves, learning_rate=2e-4)
    assert evaluate(again, DotEnv(), 1, 0) == evaluate(agent, DotEnv(), 1, 0)


SHORT = ["train.steps=60", "train.evaluate_every=60", "train.checkpoint_every=60", "train.batch_size=8"]
SHORT += ["rl.learning_starts=40", "rl.episodes=2", "rl.hidden=[8]", "device=cpu"]


def test_the_folder_for_the_hub_is_that_of_huggingface_sb3(tmp_path):
    from huggingface_hub import ModelCard

    config = load_recipe("dot-state", SHORT).config
    train(config, tmp_path, quiet=True)
    assert main(["export", str(tmp_path / config.hash), "--to", "huggingface-sb3", "--license", "mit"]) == 0
    folder = tmp_path / config.hash / "export-huggingface-sb3"
    names = {path.name for path in folder.iterdir()}
    assert {"sac-dot.zip", "sac-dot", "config.json", "results.json", "README.md", "agent.zip"} <= names
    assert names & {"replay.mp4", "replay.gif"}
    files = {path.name for path in (folder / "sac-dot").iterdir()}
    assert {"data", "policy.pth", "_stable_baselines3_version"} <= files
    config = json.loads((folder / "config.json").read_text())
    assert config["policy_class"]["__module__"] == "dipole.rl.networks"
    assert "Stable-Baselines3" in config["system_info"]
    result = json.loads((folder / "results.json").read_text())
    agent, plain = open_agent(folder / "agent.zip", device="cpu"), SAC.load(folder / "sac-dot.zip", device="cpu")
    shown = np.random.default_rng(0).uniform(size=(3, 4)).astype(np.float32)
    assert np.array_equal(*(each.predict(shown, deterministic=True)[0] for each in (agent, plain)))
    assert len(evaluate(agent, make_env("dot", inputs="state"), 1)) == 1
    assert set(result) == {"mean_reward", "std_reward", "is_deterministic", "n_eval_episodes", "eval_datetime"}
    assert (result["n_eval_episodes"], result["is_deterministic"]) == (2, True)
    card = ModelCard.load(folder / "README.md")
    assert (card.data.library_name, card.data.license) == ("stable-baselines3", "mit")
    assert {"dot", "deep-reinforcement-learning", "reinforcement-learning", "stable-baselines3"} <= set(card.data.tags)
    first = card.data.eval_results[0]
    assert (first.metric_type, first.dataset_type, first.task_type) == ("mean_reward", "dot", "reinforcement-learning")
    assert first.metric_value == f"{result['mean_reward']:.2f} +/- {result['std_reward']:.2f}"
    assert name_of("td3", "dipole/dot-v0") == "td3-dipole-dot-v0"
    assert name_of("sac", "distracting:walker-walk") == "sac-distracting-walker-walk"
