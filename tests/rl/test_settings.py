"""Settings of an agent: the same in Python, recipes and Zoo files; honoured after loading, or refused by name."""

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from stable_baselines3.common.logger import Logger

import dipole
from dipole.core.train.recipe import load, resolve
from dipole.core.utils.errors import ConfigError
from dipole.rl import ContrastiveDrQ, ContrastiveSAC, DotEnv, resume, snapshots, zoo
from dipole.rl.algorithms import open_agent
from dipole.rl.config import RLConfig
from dipole.rl.settings import CURL_OBJECTIVE, DEFAULT, FIXED, PRESETS, USERS, AgentSettings, AgentTable, attributes
from dipole.rl.settings import resolve as settings_of

AGENTS = {"sac": ContrastiveSAC, "drq": ContrastiveDrQ}
# "tanh" is the other one than the preset's.
LATER = {
    "learning_rate": 3e-4, "batch_size": 6, "precision": "bf16", "crop_inclusive": True, "positives": 2,
    "exclude_duplicates": True, "buffer_size": 300, "learning_starts": 7, "train_freq": 3, "gradient_steps": 2,
    "gamma": 0.5, "encoder_learning_rate": 5e-4, "beta": 0.8, "temperature_learning_rate": 2e-4,
    "temperature_beta": 0.7, "n_steps": 2, "target_entropy": -1.5, "actor_every": 3, "target_every": 3,
    "contrast_every": 2, "tau": 0.5, "encoder_tau": 0.25, "twin_loss": "half", "detach_encoder": True,
    "activation": "ELU", "sde_sample_freq": 4, "use_sde_at_warmup": True, "use_expln": True, "clip_mean": 1.0,
    "tanh": None, "log_std_bounds": (-5.0, 1.0), "target_views": 2, "value_views": 3, "noise_start": 0.5,
    "noise_end": 0.2, "noise_steps": 1000, "noise_clip": 0.2, "channels_last": False, "compile": True, "chunk": 3,
}  # fmt: skip
SDE = ("sde_sample_freq", "use_sde_at_warmup", "use_expln", "clip_mean")
NAMES = [(algorithm, name) for algorithm in AGENTS for name in attributes(algorithm)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A trained agent of each algorithm, and one with gSDE: its zip and a checkpoint."""
    from tests.rl.conftest import TINY

    found = {}
    for key, algorithm, more in (("sac", "sac", {}), ("drq", "drq", {}), ("sde", "sac", {"use_sde": True})):
        agent = AGENTS[algorithm]("CnnPolicy", DotEnv(), **TINY, **more).learn(14)
        folder = tmp_path_factory.mktemp(key)
        agent.save(folder / "agent.zip")
        found[key] = folder / "agent.zip", snapshots.save(agent, folder / "agent-000000014"), agent.settings
    return found


def groups():
    """Settings to change together: a few groups for each saved agent, and the length of the replay by itself."""
    for key in ("sac", "drq", "sde"):
        algorithm = "drq" if key == "drq" else "sac"
        names = [name for name in attributes(algorithm) if name in LATER and (name in SDE) == (key == "sde")]
        rest = [name for name in names if name != "buffer_size"]
        for group in (rest[::3], rest[1::3], rest[2::3], [name for name in names if name == "buffer_size"]):
            if group:
                yield key, algorithm, group


def test_every_setting_is_in_one_of_the_two_lists():
    assert {name for _, name in NAMES} == set(LATER) | set(FIXED) - {"algorithm"}
    assert not set(LATER) & set(FIXED)


@pytest.mark.parametrize(("key", "algorithm", "names"), list(groups()))
def test_changed_settings_are_honoured_and_survive(saved, tmp_path, key, algorithm, names, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    path, folder, settings = saved[key]
    changed = {name: LATER[name] for name in names} | {name: not settings.tanh for name in names if name == "tanh"}
    assert not [name for name, value in changed.items() if value == getattr(settings, name)]
    loaded = AGENTS[algorithm].load(path, env=DotEnv(), device="cpu", **changed)
    agents = [loaded, open_agent(path, env=DotEnv(), device="cpu", **changed)]
    if "buffer_size" not in names:  # the checkpoint's replay has another length
        agents.append(resume(folder, DotEnv(), device="cpu", **changed))
    loaded.save(tmp_path / "again.zip")
    agents.append(AGENTS[algorithm].load(tmp_path / "again.zip", env=DotEnv(), device="cpu"))
    checkpoint = snapshots.save(agents[-2], tmp_path / "checkpoint")
    agents += [open_agent(tmp_path / "again.zip", device="cpu"), resume(checkpoint, DotEnv(), device="cpu")]
    for agent in agents:
        for name, value in changed.items():
            assert getattr(agent.settings, name) == value, name
            assert_used(agent, name, value)


def assert_used(agent, name, value):
    """Look at what an update uses, where that is more than the attribute."""
    policy = agent.policy
    optimizers = {"beta": policy.critic.optimizer, "temperature_beta": getattr(agent, "ent_coef_optimizer", None)}
    if name in optimizers:
        assert {group["betas"][0] for group in optimizers[name].param_groups} == {value}
    elif name in ("learning_rate", "encoder_learning_rate", "temperature_learning_rate"):
        agent._logger = agent.__dict__.get("_logger") or Logger(None, [])
        agent._set_learning_rates()
        stepped = {
            "learning_rate": policy.critic.optimizer,
            "encoder_learning_rate": agent.contrast_optimizer,
            "temperature_learning_rate": getattr(agent, "ent_coef_optimizer", None),
        }[name]
        if stepped is not None:
            assert {group["lr"] for group in stepped.param_groups} == {value}
    elif name in ("tanh", "chunk"):
        assert getattr(policy.encoder, name) == value
    elif name == "channels_last":
        assert policy.encoder.format == torch.contiguous_format
    elif name == "activation":
        assert any(type(each).__name__ == value for each in policy.critic.modules())
    elif name == "log_std_bounds":
        assert tuple(policy.actor.log_std_bounds) == value
    elif name in ("use_expln", "clip_mean"):
        assert getattr(policy.actor, name) == value
    elif name == "positives":
        assert agent._positives == value
    elif name == "crop_inclusive" and agent.augmentation == "crop":
        assert agent._augment.inclusive is value
    elif name == "buffer_size" and agent.env is not None:
        assert agent.replay_buffer.buffer_size == value
    elif name == "train_freq":
        assert agent.train_freq.frequency == value


@pytest.mark.parametrize(("algorithm", "name"), [each for each in NAMES if each[1] in FIXED])
def test_fixed_setting_is_refused_by_name(saved, algorithm, name):
    path, folder, _ = saved[algorithm]
    for one in (
        lambda **given: AGENTS[algorithm].load(path, env=DotEnv(), device="cpu", **given),
        lambda **given: resume(folder, DotEnv(), device="cpu", **given),
    ):
        value = "infonce" if name == "objective" else 3
        with pytest.raises(ConfigError, match=rf"\b{name} cannot change when an agent is loaded|objective must be a"):
            one(**{name: value if name != "objective" else {"text": value}})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"taw": 0.5}, "there is no setting 'taw'"),
        ({"tau": 2}, "tau: should be less than or equal to 1, got 2"),
        ({"noise_clip": 0.1}, "noise_clip has no effect on the algorithm 'sac'"),
        ({"policy_kwargs": {"n_critics": 3}}, "n_critics cannot change"),
        ({"target_policy_noise": 0.1}, "target_policy_noise is no setting here"),
    ],
)
def test_wrong_keywords_of_load_are_named(saved, given, said):
    with pytest.raises(ConfigError, match=said):
        ContrastiveSAC.load(saved["sac"][0], device="cpu", **given)


@pytest.mark.parametrize("algorithm", AGENTS)
def test_changed_tau_and_gamma_change_an_update(saved, algorithm):
    """tau = 1 copies the Q functions; gamma = 0 makes the target the rewards."""
    given = {"tau": 1.0, "gamma": 0.0, "target_every": 1, "n_steps": 1}
    agent = AGENTS[algorithm].load(saved[algorithm][0], env=DotEnv(), device="cpu", **given).learn(12)
    batch = agent._sample(8)
    np.testing.assert_array_equal(agent.target(batch).numpy(), batch.rewards.numpy())
    for online, copy in zip(agent.critic.q_networks, agent.critic_target.q_networks, strict=True):
        assert all(map(torch.equal, online.parameters(), copy.parameters()))


def test_settings_given_to_load_are_used_under_both_names(saved):
    agent = ContrastiveSAC.load(saved["sac"][0], device="cpu", target_update_interval=5)
    assert agent.settings.target_every == agent.target_update_interval == 5
    assert ContrastiveDrQ.load(saved["drq"][0], device="cpu", policy_delay=4).settings.actor_every == 4
    agent = ContrastiveSAC.load(saved["sac"][0], env=DotEnv(), device="cpu", storage="disk", seed=5)
    assert (agent.replay_buffer.storage, agent.seed) == ("disk", 5)


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


def config_of(overrides=(), train=None, **table):
    return resolve({**RECIPE, "train": {"steps": 100, **(train or {})}, "rl": table}, list(overrides)).config


def test_entry_sets_what_the_recipe_leaves_out(file):
    config = config_of(hyperparameters=file)
    assert (config.train.learning_rate, config.train.batch_size, config.train.steps) == (7.3e-4, 256, 100)
    found = config.rl
    assert (found.buffer_size, found.train_freq, found.gradient_steps, found.learning_starts) == (300_000, 8, 8, 10_000)
    assert (found.hidden, found.initial_temperature, found.ent_coef) == ((400, 300), 0.2, "auto")
    given = config_of(hyperparameters=file, buffer_size=5000, train={"learning_rate": 1e-2})
    assert (given.rl.buffer_size, given.train.learning_rate) == (5000, 1e-2)
    other = config_of([f"rl.hyperparameters={file}", "rl.task=cheetah-run"])
    assert (other.rl.tau, other.train.learning_rate, other.rl.buffer_size) == (0.02, 5e-4, 100_000)


def test_run_id_of_a_file_equals_that_of_its_values(file):
    written = {
        "buffer_size": 300_000, "train_freq": 8, "gradient_steps": 8, "learning_starts": 10_000, "hidden": [400, 300],
        "initial_temperature": 0.2,
    }  # fmt: skip
    one = config_of(hyperparameters=file)
    assert one.hash == config_of(train={"learning_rate": 7.3e-4, "batch_size": 256}, **written).hash


def test_unreadable_files_raise_errors(tmp_path, file):
    with pytest.raises(ConfigError, match="cannot be read"):
        config_of(hyperparameters=str(tmp_path / "none.yml"))
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
    assert config_of(task="cheetah-run").train.learning_rate == 2e-4
    assert config_of(task="walker-walk").train.learning_rate == 1e-3
    assert config_of(task="cheetah-run", preset="small").train.learning_rate == 1e-3
    assert config_of(task="cheetah-run", train={"learning_rate": 3e-4}).train.learning_rate == 3e-4
