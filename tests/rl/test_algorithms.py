"""`rl.algorithm` in recipes: trained, resumed, exported, loaded without dipole's classes, played."""

import json
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("stable_baselines3")

from dipole.core.cli import main
from dipole.core.train.recipe import load
from dipole.core.train.run import train
from dipole.core.train.run_folder import RunFolder
from dipole.core.train.trained_run import load_run
from dipole.rl import make_env
from dipole.rl.episodes.trial import trial

SETTINGS = [
    "train.steps=70",
    "train.evaluate_every=70",
    "train.checkpoint_every=70",
    "train.batch_size=8",
    "rl.learning_starts=40",
    "rl.buffer_size=200",
    "rl.episodes=1",
    "rl.filters=8",
    "rl.layers=2",
    "rl.hidden=[32]",
    "device=cpu",
]
_FRESH = """
import sys
import numpy as np
import stable_baselines3
agent = getattr(stable_baselines3, sys.argv[1]).load(sys.argv[2], device="cpu")
print(agent.predict(np.load(sys.argv[3]), deterministic=True)[0].tolist())
print(any(name.partition(".")[0] == "dipole" for name in sys.modules))
"""


def test_drq_recipe_trains_exports_and_plays(tmp_path):
    config = load("dot-drq", SETTINGS).config
    record = train(config, tmp_path, quiet=True)
    run = tmp_path / config.hash
    assert record.status == "done"
    assert "return/mean" in record.results
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert any(line.get("train/contrast_loss") is not None for line in lines)
    assert main(["export", str(run), "--to", "sb3", "--license", "mit"]) == 0
    folder = run / "export-sb3"
    seen = np.stack([make_env("dot").reset(seed=seed)[0] for seed in range(3)])
    np.save(tmp_path / "seen.npy", seen)
    _, adapter, _ = load_run(RunFolder(run))
    expected = adapter.agent.predict(seen, deterministic=True)[0]
    zipped = folder / "td3.zip"
    done = subprocess.run(
        [sys.executable, "-c", _FRESH, "TD3", zipped, tmp_path / "seen.npy"],
        capture_output=True, text=True, check=True, cwd=tmp_path,
    )  # fmt: skip
    actions, met = done.stdout.splitlines()
    assert np.allclose(json.loads(actions), expected, atol=1e-6)
    assert met == "False"
    one, two = (trial(place, episodes=1, seed=4) for place in (run, folder / "agent.zip"))
    assert one == two
    assert zipped.name in (folder / "README.md").read_text()
