"""The folder that the Hub shows as an agent: huggingface_sb3's files, read from a server on this machine."""

import hashlib
import json
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from stable_baselines3 import SAC

from dipole.core.cli import main
from dipole.core.train.recipe import load
from dipole.core.train.run import train
from dipole.rl.algorithms import open_agent
from dipole.rl.envs.registry import make_env
from dipole.rl.episodes.play import evaluate
from dipole.rl.hub import name_of

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
    assert {"data", "policy.pth", "_stable_baselines3_version"} <= {
        path.name for path in (folder / "sac-dot").iterdir()
    }
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


class Hub(BaseHTTPRequestHandler):
    """As much of the Hub as a download asks for."""

    def __init__(self, folder, *given):
        self.folder = folder
        super().__init__(*given)

    def do_GET(self):
        path = self.folder / self.path.rpartition("/resolve/main/")[2]
        content = path.read_bytes() if path.is_file() else b""
        self.send_response(200 if path.is_file() else 404)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", "0" * 40)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *_):
        pass


def test_agent_from_the_hub_loads(folder, tmp_path, monkeypatch):
    """By what `load_from_hub` calls; that the zip needs no dipole is in test_inputs.py."""
    from huggingface_hub import constants, hf_hub_download

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "*")
    try:
        endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        path = hf_hub_download("me/agent", "sac-dot.zip", endpoint=endpoint, cache_dir=tmp_path)
    finally:
        server.shutdown()
        server.server_close()
    shown = np.random.default_rng(0).uniform(size=(3, 4)).astype(np.float32)
    expected = open_agent(folder / "agent.zip", device="cpu").predict(shown, deterministic=True)[0]
    assert np.array_equal(SAC.load(path, device="cpu").predict(shown, deterministic=True)[0], expected)


def test_names_are_those_of_huggingface_sb3():
    assert name_of("sac", "cheetah-run") == "sac-cheetah-run"
    assert name_of("td3", "dipole/dot-v0") == "td3-dipole-dot-v0"
    assert name_of("sac", "distracting:walker-walk") == "sac-distracting-walker-walk"
