"""The rl domain of a recipe: training, interruption and continuation, evaluation, recipes."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dipole import benchmarks
from dipole.benchmarks.suite import read_suite
from dipole.core.train.callbacks import Health
from dipole.core.train.metrics import read_metrics
from dipole.core.train.recipe import load_recipe
from dipole.core.train.run import Run, RunInterruptedError, train
from dipole.core.utils.errors import ConfigError
from dipole.core.utils.plugins import shipped
from dipole.rl import DotEnv
from dipole.rl.adapter import RLAdapter, RLConfig
from dipole.rl.envs import control, registry
from dipole.rl.episodes.history import SCORES
from dipole.rl.settings import CURL_OBJECTIVE as INFONCE
from tests.rl.conftest import QUICK
from tests.runs import assert_same_weights, interrupted

SHORT = [*QUICK, "rl.episodes=1", "train.steps=60", "train.evaluate_every=30", "train.checkpoint_every=25"]
SHORT += ["train.log_every=10"]


def short(*overrides):
    return load_recipe("dot", [*SHORT, *overrides]).config


OBJECTIVE = "objective=infonce(similarity=bilinear) + dp"
STRAIGHT = (OBJECTIVE, "rl.episodes=2")


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Folder of a run without interruption, and its record. A score is measured at step 30."""
    folder = tmp_path_factory.mktemp("straight")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SCORES, "100k", 30)
        return folder, train(short(*STRAIGHT), folder, quiet=True)


def test_a_run_records_returns_and_diagnostics(straight):
    folder, record = straight
    assert (record.status, record.steps) == ("done", 60)
    assert 0 <= record.results["return/min"] <= record.results["return/mean"] <= record.results["return/max"] <= 50
    assert {"alignment", "uniformity", "conditional_entropy", "rank"} <= set(record.diagnostics)
    assert record.data["environment_steps"] == record.data["agent_steps"] == 60
    assert record.data["faults"] == 0
    lines = read_metrics(folder / record.hash / "metrics.jsonl")
    named = {name for line in lines for name in line}
    training = ("critic_loss", "contrast_loss", "contrast/dp", "return")
    assert {*(f"train/{name}" for name in training), "eval/return/mean"} <= named
    assert not (folder / record.hash / "checkpoints").exists()
    # Curves are of validation episodes, results of test episodes.
    seen = [line for line in lines if "eval/return/mean" in line]
    assert [line["step"] for line in seen] == [30, 60]
    assert (record.curves_on, record.evaluated_on) == ("validation", "test")
    (last,) = [line for line in lines if "test/return/mean" in line]
    assert last["test/return/mean"] == pytest.approx(record.results["return/mean"], rel=1e-6)
    assert seen[-1]["eval/return/mean"] != pytest.approx(record.results["return/mean"], rel=1e-6)
    assert record.results["score/100k"] != pytest.approx(seen[0]["eval/return/mean"], rel=1e-6)


def test_a_run_evaluated_on_validation_episodes_ends_where_its_curve_does(straight, tmp_path):
    folder, record = straight
    other = train(short(*STRAIGHT, "train.evaluate_on=validation", "train.steps=30"), tmp_path, quiet=True)
    assert other.evaluated_on == "validation"
    curve = [line for line in read_metrics(folder / record.hash / "metrics.jsonl") if "eval/return/mean" in line]
    assert other.results["return/mean"] == pytest.approx(curve[0]["eval/return/mean"], rel=1e-6)


def test_terms_are_compared_without_changing_the_agent(tmp_path, monkeypatch):
    config = short("objective=infonce(similarity=bilinear) + 3000*dp(reduction=anchor_sum)", "train.steps=30")
    record = train(config, tmp_path / "with", quiet=True)
    lines = read_metrics(tmp_path / "with" / config.hash / "metrics.jsonl")
    found = {line["step"]: line["grad/dp"] for line in lines if "grad/dp" in line}
    assert 30 in found
    assert min(found) < 30  # after the first updates
    (note,) = [note for note in record.notes if "dominates" in note]
    assert note.startswith(f"the term 'dp' dominates: its gradient was {max(found.values()):.3g} times as long")
    monkeypatch.setattr(Health, "measure_own_loop", lambda *_, **__: None)
    train(config, tmp_path / "without", quiet=True)
    assert_same_weights(tmp_path / "with" / config.hash, tmp_path / "without" / config.hash)


def test_weights_and_options_are_scheduled_as_in_other_domains(tmp_path):
    moved = ("train.schedule.dp.weight=linear(0.5, 0.5)", "train.schedule.infonce.temperature=linear(1, 0.5)")
    weights, lines = {}, {}
    for name, overrides in {
        "moved": (OBJECTIVE, *moved),
        "weight alone": (OBJECTIVE, moved[0]),
        "fixed": (OBJECTIVE.replace("dp", "0.5*dp"),),
    }.items():
        config = short(*overrides, "train.steps=30")
        train(config, tmp_path, quiet=True)
        weights[name] = load_file(tmp_path / config.hash / "model" / "module.safetensors")
        lines[name] = read_metrics(tmp_path / config.hash / "metrics.jsonl")
    assert all(torch.equal(value, weights["fixed"][name]) for name, value in weights["weight alone"].items())
    assert not all(torch.equal(value, weights["fixed"][name]) for name, value in weights["moved"].items())
    name = "train/schedule.infonce.temperature"
    shown = [line[name] for line in lines["moved"] if name in line]
    assert len(shown) > 1
    assert shown == sorted(shown, reverse=True)


@pytest.mark.parametrize("workers", [(), ("rl.envs=2", "rl.workers=true", "rl.episodes=1")])
def test_an_interrupted_run_continues_bit_for_bit(straight, tmp_path, monkeypatch, workers):
    config = short(*STRAIGHT, *workers)
    if workers:
        folder, record = tmp_path / "straight", train(config, tmp_path / "straight", quiet=True)
    else:
        folder, record = straight
        monkeypatch.setitem(SCORES, "100k", 30)
    call = 19 if workers else 38  # two environments step at once
    with interrupted(Run, "advance", call), pytest.raises(RunInterruptedError):
        train(config, tmp_path / "broken", quiet=True)
    again = train(config, tmp_path / "broken", quiet=True)
    assert again.results == record.results
    assert again.diagnostics == record.diagnostics
    one, two = (read_metrics(each / config.hash / "metrics.jsonl") for each in (folder, tmp_path / "broken"))
    timed = {name for line in one for name in line if "time" in name or "second" in name}
    one, two = ([{k: v for k, v in line.items() if k not in timed} for line in lines] for lines in (one, two))
    assert one == two


def test_records_of_agents_without_an_objective_and_of_a_term_that_stays_0(tmp_path, monkeypatch):
    """Where every picture is the same and duplicates are left out, no anchor has a negative."""
    record = train(short("objective=none", "train.precision=bf16-mixed", "train.steps=30"), tmp_path, quiet=True)
    assert record.objective == "none"
    assert "conditional_entropy" not in record.diagnostics
    monkeypatch.setattr(registry, "_environments", dict(registry._environments))

    @registry.environment("still")
    class Still(DotEnv):
        def _frame(self, size):
            return 0 * super()._frame(size)

    config = short("rl.task=still", "rl.exclude_duplicates=true", "objective=infonce", "train.steps=30")
    record = train(config, tmp_path, quiet=True)
    assert any("'infonce'" in note and "no anchor has a negative" in note for note in record.notes)


@pytest.mark.parametrize("name", [name for name in shipped("recipes") if load_recipe(name).config.domain == "rl"])
def test_every_recipe_of_the_domain_is_complete(name):
    config = load_recipe(name).config
    assert config.name == name
    assert config.train.steps % config.train.evaluate_every == 0
    if name in ("lmcl-table5", "cllr-table4"):  # those of the papers train long enough for their score
        config = load_recipe(name, ["rl.task=ball-in-cup-catch"]).config
        assert (config.train.steps, config.train.batch_size, config.rl.task) == (100_000, 512, "ball_in_cup-catch")
        assert (config.rl.preset, config.rl.rendering, config.rl.episodes) == ("curl", "paper", 10)
        found = [load_recipe(name, [f"rl.task={task}"]).config.rl.task for task in control.PAPER_TASKS]
        assert found == list(control.PAPER_TASKS)


def test_recipes_have_settings_of_peers():
    config = load_recipe("curl").config
    assert (config.train.batch_size, config.train.learning_rate, config.rl.preset) == (128, 1e-3, "curl")
    assert config.rl.agent_settings() == RLConfig().agent_settings() == {}
    assert load_recipe("curl", ["rl.preset=paper"]).config.train.batch_size == 512  # the recipe gives none of its own
    assert RLConfig(encoder_steps=1, hidden=(8,)).agent_settings() == {"encoder_steps": 1, "hidden": (8,)}
    assert RLConfig(task="cheetah-run", rendering="fast").environment() == {"frame_stack": 3, "rendering": "fast"}
    assert RLAdapter.objective_optional


@pytest.mark.parametrize(("recipe", "setting", "said"), [
    ("dot", "rl.task=cheeta-run", r"unknown task 'cheeta-run'.*cheetah-run"),
    ("dot", "train.weight_decay=0.1", r"train.weight_decay: has no effect in the domain 'rl'"),
    ("dot", "train.schedule=cosine", r"train\.schedule: has no effect in the domain 'rl'"),
    ("dot", "rl.encoder_stepz=1", "encoder_stepz"), ("dot", "rl.evaluation_workers=4", "set evaluation_seeds = 'each'"),
    ("dot-state", "rl.frame_stack=2", "frame_stack has no effect with inputs='state'"),
    ("curl", "rl.difficulty=medium", "difficulty has no effect on the task"),
    ("dot", "rl.camera=1", "camera has no effect on the task 'dot', whose settings are size, frame_stack"),
])  # fmt: skip
def test_wrong_keys_of_a_recipe_are_named(recipe, setting, said):
    with pytest.raises(ConfigError, match=said):
        load_recipe(recipe, [setting])


STEPS = 1900


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


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["none", INFONCE, f"{INFONCE} + dp", "cacr(k=2)"])
def test_the_dot_task_is_learnt(objective, random_return, tmp_path):
    # Both evaluations play the same episodes.
    settings = [f"train.steps={STEPS}", f"train.evaluate_every={STEPS // 2}", "train.curves_on=test", "device=cpu"]
    # Seed 0 ends at the margin, with and without dp. Seeds 1 to 3 are 17 to 25 above random.
    config = load_recipe("dot", [f"objective={objective}", "seed=1", *settings]).config
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


@pytest.mark.slow
def test_drq_learns_the_dot_task(random_return, tmp_path):
    config = load_recipe("dot-drq", ["train.evaluate_every=5000", "device=cpu"]).config
    assert train(config, tmp_path, quiet=True).results["return/mean"] > random_return + 10


@pytest.mark.slow
@pytest.mark.usefixtures("opengl")
@pytest.mark.parametrize("job", range(9))
def test_cartpole_balance_improves(job, tmp_path):
    """Training return of the last thousand agent steps against the first. DIPOLE_RUNS keeps the runs."""
    study = Path(benchmarks.__file__).parent / "studies" / "cartpole-balance.toml"
    runs, config = Path(os.environ.get("DIPOLE_RUNS", tmp_path)), read_suite(study).at("small").jobs()[job].config
    assert train(config, runs, quiet=True).status == "done"
    lines = read_metrics(runs / config.hash / "metrics.jsonl")
    returns = [(line["step"], line["train/return"]) for line in lines if line.get("train/return") is not None]
    first, last = (np.mean([value for step, value in returns if low < step <= low + 8000]) for low in (0, 48_000))
    assert last > 1.3 * first
