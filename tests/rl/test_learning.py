"""Does it learn? On the dot task in CI; on cartpole balance where there is time (`-m slow`)."""

import os
from pathlib import Path

import numpy as np
import pytest

from dipole import benchmarks
from dipole.benchmarks.suite import read_suite
from dipole.core.train.metrics import read_metrics
from dipole.core.train.recipe import load
from dipole.core.train.run import train
from dipole.rl import DotEnv

pytestmark = pytest.mark.slow
STEPS, INFONCE = 1900, "infonce(similarity=bilinear, temperature=1)"


@pytest.fixture(scope="module")
def random_return():
    """Mean return of uniform actions over 50 episodes."""
    env = DotEnv()
    returns = []
    for seed in range(50):
        env.reset(seed=seed)
        env.action_space.seed(seed)
        returns.append(sum(env.step(env.action_space.sample())[1] for _ in range(50)))
    return float(np.mean(returns))


@pytest.mark.parametrize("objective", ["none", INFONCE, f"{INFONCE} + dp", "cacr(k=2)"])
def test_the_dot_task_is_learnt(objective, random_return, tmp_path):
    # Both evaluations play the same episodes.
    settings = [f"train.steps={STEPS}", f"train.evaluate_every={STEPS // 2}", "train.curves_on=test", "device=cpu"]
    config = load("dot", [f"objective={objective}", *settings]).config
    # Half of the steps are uniform actions: the first evaluation is that of an untrained agent.
    record = train(config, tmp_path, quiet=True)
    lines = read_metrics(tmp_path / config.hash / "metrics.jsonl")
    untrained, *_ = [line["eval/return/mean"] for line in lines if "eval/return/mean" in line]
    trained = record.results["return/mean"]
    assert 10 < random_return < 20
    assert trained > random_return + 10
    assert trained > untrained + 10
    losses = [line["train/contrast_loss"] for line in lines if line.get("train/contrast_loss") is not None]
    assert bool(losses) == (objective != "none")
    if objective.startswith("infonce"):
        assert losses[-1] < 0.6 * losses[0]


def test_drq_learns_the_dot_task(random_return, tmp_path):
    config = load("dot-drq", ["train.evaluate_every=5000", "device=cpu"]).config
    assert train(config, tmp_path, quiet=True).results["return/mean"] > random_return + 10


@pytest.mark.usefixtures("opengl")
@pytest.mark.parametrize("job", range(9))
def test_cartpole_balance_improves(job, tmp_path):
    """Training return of the last thousand agent steps against the first; DIPOLE_RUNS keeps the runs."""
    study = Path(benchmarks.__file__).parent / "studies" / "cartpole-balance.toml"
    runs, config = Path(os.environ.get("DIPOLE_RUNS", tmp_path)), read_suite(study).at("small").jobs()[job].config
    assert train(config, runs, quiet=True).status == "done"
    lines = read_metrics(runs / config.hash / "metrics.jsonl")
    returns = [(line["step"], line["train/return"]) for line in lines if line.get("train/return") is not None]
    first, last = (np.mean([value for step, value in returns if low < step <= low + 8000]) for low in (0, 48_000))
    assert last > 1.3 * first
