"""One model for both doors: the keywords of an agent and the [rl] table of a recipe."""

import re
import subprocess
from pathlib import Path

import pytest
import torch

import dipole
from dipole.core.train.recipe import load, resolve
from dipole.core.utils.errors import ConfigError
from dipole.rl.config import RLConfig
from dipole.rl.settings import CURL_OBJECTIVE, DEFAULT, PRESETS, USERS, AgentSettings, AgentTable
from dipole.rl.settings import resolve as settings_of
from tests.rl.test_changed_settings import CHANGED as LATER

# What a recipe says in `objective` and [train].
ELSEWHERE = {"objective", "batch_size", "learning_rate", "precision"}
# Settings that cannot change once an agent is saved.
AT_FIRST = {
    "ent_coef": 0.2, "bilinear_init": "identity", "image_size": 24, "initial_temperature": 0.3, "encoder_steps": 1,
    "joint_backward": True, "hidden": [8, 9], "critic_hidden": (32, 8), "features": 20, "layers": 3, "filters": 8,
    "inputs": "pixels", "n_critics": 3, "use_sde": True, "log_std_init": -2.0, "tanh": True,
}  # fmt: skip
CHANGED = {name: value for name, value in LATER.items() if name not in (*ELSEWHERE, "log_std_bounds")} | AT_FIRST
OTHERWISE = {"drq": {"tanh": False}}
BILINEAR = re.compile(r"infonce\([^)]*similarity=bilinear[^)]*\)")
RECIPE = {"domain": "rl", "objective": "infonce", "train": {"steps": 100}}


def recipe(**table):
    return resolve({**RECIPE, "rl": table})


def changed_for(algorithm):
    """A value for every setting of an algorithm, other than its preset's."""
    own = {name: value for name, value in CHANGED.items() if algorithm in USERS.get(name, (algorithm,))}
    return own | OTHERWISE.get(algorithm, {})


@pytest.mark.parametrize("algorithm", DEFAULT)
def test_every_setting_works_in_python_and_recipes(algorithm):
    own = {name for name in AgentTable.model_fields if algorithm in USERS.get(name, (algorithm,))}
    changed = changed_for(algorithm)
    assert set(changed) == own - {"preset", "algorithm", "log_std_bounds"}  # of policies without use_sde
    assert set(AgentTable.model_fields) == set(AgentSettings.model_fields) - ELSEWHERE
    preset = DEFAULT[algorithm]
    given = settings_of(preset, changed)
    table = recipe(algorithm=algorithm, **changed).config.rl
    for name in changed:
        assert getattr(table, name) == getattr(given, name) != getattr(PRESETS[preset], name), name
    assert settings_of(preset, table.agent_settings()) == given


@pytest.mark.parametrize(
    ("algorithm", "given", "said"),
    [
        ("drq", {"ent_coef": 0.1}, "ent_coef has no effect on the algorithm 'drq': it is a setting of sac"),
        ("sac", {"noise_clip": 0.1}, "noise_clip has no effect on the algorithm 'sac': it is a setting of drq"),
        ("drq", {"preset": "curl"}, "the preset 'curl' is none of 'drq', whose are drqv2"),
    ],
)
def test_settings_of_another_algorithm_are_refused(algorithm, given, said):
    with pytest.raises(ConfigError) as keyword:
        settings_of(given.get("preset", DEFAULT[algorithm]), {"algorithm": algorithm, **given})
    with pytest.raises(ConfigError) as table:
        recipe(algorithm=algorithm, **given)
    assert said in str(keyword.value)
    assert said in str(table.value)


def test_recipes_keep_their_run_id_and_the_papers_batch():
    assert "algorithm" not in RLConfig().determining()
    assert recipe(algorithm="sac").config.hash == recipe().config.hash
    assert RLConfig(algorithm="drq").determining() == RLConfig(preset="drqv2").determining()
    assert RLConfig(algorithm="drq").augmentation == "shift"
    assert recipe(preset="paper").config.train.batch_size == 512
    assert recipe(log_std_bounds=[-5, 1]).config.rl.log_std_bounds == (-5, 1)
    assert settings_of("curl", {"log_std_bounds": (-5, 1)}).log_std_bounds == (-5, 1)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("gamma", 2, "1"), ("beta", 1.0, "0.999999"), ("layers", 17, "16"), ("twin_loss", "third", "half"),
        ("twin_loss", "halff", "Did you mean 'half'?"), ("preset", "curls", "'curl'"),
        ("log_std_bounds", [2, -10], "(low, high) with low < high"),
        ("train_freq", [1, "week"], "must be an integer >= 1, or (an integer >= 1, 'step' or 'episode'), got"),
        ("target_entropy", "x", "must be 'auto' or a number, got 'x'"),
        ("hidden", 5, "must be a list of layer widths, integers >= 1, got 5"), ("gama", 0.9, "'gamma'"),
    ],
)  # fmt: skip
def test_python_and_recipes_refuse_the_same_values(name, value, said):
    given = {"preset": value} if name == "preset" else {"overrides": {name: value}}
    with pytest.raises(ConfigError) as keyword:
        settings_of(**{"preset": "curl", "overrides": {}, **given})
    with pytest.raises(ConfigError) as table:
        recipe(**{name: value})
    for error in (keyword, table):
        assert name in str(error.value)
        assert said in str(error.value)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_brings_its_batch_and_rate_unless_they_are_given(preset):
    found = recipe(preset=preset)
    assert found.config.train.batch_size == PRESETS[preset].batch_size
    assert found.config.train.learning_rate == PRESETS[preset].learning_rate
    assert found.origins["train.batch_size"] == "preset"
    marked = {name for name in AgentTable.model_fields if found.origins.get(f"rl.{name}") == "preset"}
    assert marked == RLConfig(preset=preset).determining().keys() & AgentTable.model_fields.keys()
    assert found.origins["rl.preset"] == "recipe"
    table = {**RECIPE, "train": {"steps": 100, "batch_size": 16}, "rl": {"preset": preset}}
    given = resolve(table, ["train.learning_rate=0.01"])
    assert (given.config.train.batch_size, given.config.train.learning_rate) == (16, 0.01)
    assert (given.origins["train.batch_size"], given.origins["train.learning_rate"]) == ("recipe", "--set")


def test_presets_and_their_values_are_one_run():
    small = {name: getattr(PRESETS["small"], name) for name in AgentTable.model_fields if name != "preset"}
    assert RLConfig(preset="small").determining() == RLConfig(**small).determining()
    assert RLConfig(preset="small").determining() != RLConfig().determining()
    assert RLConfig(workers=True, storage="device").determining() == RLConfig().determining()
    assert RLConfig(preset="paper").determining() == {"crop_inclusive": True, "encoder_steps": 1, "twin_loss": "half"}
    config = load("dot").config
    assert config.rl.hidden == (256,)
    assert config.rl.filters == PRESETS["small"].filters
    config.to_toml()
    small = {name: getattr(PRESETS["small"], name) for name in AgentTable.model_fields if name != "preset"}
    assert recipe(preset="small").config.hash != recipe().config.hash
    written = resolve({**RECIPE, "train": {"steps": 100, "batch_size": 64}, "rl": small | {"image_size": 84}})
    assert recipe(preset="small", image_size=84).config.hash == written.config.hash


def test_every_text_writes_the_loss_of_a_curl_agent_with_its_temperature():
    root = Path(__file__).resolve().parents[2]
    listed = subprocess.check_output(["git", "ls-files"], cwd=root, text=True).splitlines()
    found = {}
    for name in listed:
        path = root / name
        if not name.endswith((".py", ".md", ".toml", ".in")) or name.startswith("tests/") or not path.is_file():
            continue
        found |= {(name, each): each for each in BILINEAR.findall(path.read_text(encoding="utf-8"))}
    assert "README.md" in {name for name, _ in found}
    assert {key: text for key, text in found.items() if text != CURL_OBJECTIVE} == {}


def test_at_the_default_temperature_the_gradient_of_a_curl_agent_is_longer():
    draw = torch.Generator().manual_seed(0)
    z, k = (torch.randn(64, 8, generator=draw, dtype=torch.double) / 4 for _ in range(2))

    def length(text):
        anchors = z.clone().requires_grad_()
        loss = dipole.objective(text)(dipole.Pairs.cross(anchors, k)).loss
        return torch.autograd.grad(loss, anchors)[0].norm()

    logits = (leaf := z.clone().requires_grad_()) @ k.T  # the loss of a CURL agent, as the paper writes it
    by_hand = torch.autograd.grad(torch.nn.functional.cross_entropy(logits, torch.arange(64)), leaf)[0].norm()
    assert length(CURL_OBJECTIVE) == pytest.approx(by_hand)
    assert length("infonce(similarity=bilinear)") / by_hand > 1.5
