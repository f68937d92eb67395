"""Settings of an agent: in Python, recipes, Zoo files and SB3's keywords. They are honoured when loaded, or refused."""

import subprocess
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from stable_baselines3 import SAC
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from stable_baselines3.common.vec_env import DummyVecEnv
from torch import nn

from dipole.core.train.recipe import load_recipe, resolve
from dipole.core.utils.errors import CheckpointError, ConfigError
from dipole.rl import CheckpointCallback, ContrastiveDrQ, ContrastiveSAC, DotEnv, make_env, resume, snapshots
from dipole.rl.adapter import RLConfig
from dipole.rl.algorithms import open_agent
from dipole.rl.export import save_plain
from dipole.rl.sampling import FrameBatch
from dipole.rl.sb3_names import read_zoo
from dipole.rl.settings import CURL_OBJECTIVE, DEFAULT, FIXED, PRESETS, USERS, AgentSettings, AgentTable, attributes
from dipole.rl.settings import from_preset as settings_of
from tests.rl.conftest import assert_resumes, same, tiny
from tests.runs import refused

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
    found = {}
    for key, algorithm, more in (("sac", "sac", {}), ("drq", "drq", {}), ("sde", "sac", {"use_sde": True})):
        agent = tiny(kind=AGENTS[algorithm], **more).learn(14)
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
        for group in (rest[::2], rest[1::2], [name for name in names if name == "buffer_size"]):
            if group:
                yield key, algorithm, group


@pytest.mark.parametrize(("key", "algorithm", "names"), list(groups()))
def test_changed_settings_are_honoured_and_survive(saved, tmp_path, key, algorithm, names, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    path, folder, settings = saved[key]
    changed = {name: LATER[name] for name in names} | {name: not settings.tanh for name in names if name == "tanh"}
    assert not [name for name, value in changed.items() if value == getattr(settings, name)]
    loaded = AGENTS[algorithm].load(path, env=DotEnv(), device="cpu", **changed)
    if "buffer_size" in names:  # the checkpoint's replay has another length
        agents = [loaded, open_agent(path, env=DotEnv(), device="cpu", **changed)]
    else:
        agents = [loaded, resume(folder, DotEnv(), device="cpu", **changed)]
    loaded.save(tmp_path / "again.zip")
    agents.append(AGENTS[algorithm].load(tmp_path / "again.zip", env=DotEnv(), device="cpu"))
    checkpoint = snapshots.save(agents[-2], tmp_path / "checkpoint")
    agents += [open_agent(tmp_path / "again.zip", device="cpu"), resume(checkpoint, DotEnv(), device="cpu")]
    for agent in agents:
        for name, value in changed.items():
            assert getattr(agent.settings, name) == value, name
            assert_used(agent, name, value)


def groups_of(owner, optimizer, key):
    """Return the values of one key in the groups of an optimizer, once the rates are set."""
    owner._logger = owner.__dict__.get("_logger") or Logger(None, [])
    owner._set_optimizers()
    (value,) = {group[key] for group in optimizer.param_groups}
    return value


# The value that an update uses, where it is not the attribute alone.
USED = {
    "beta": lambda agent: groups_of(agent, agent.critic.optimizer, "betas")[0],
    "temperature_beta": lambda agent: groups_of(agent, agent.ent_coef_optimizer, "betas")[0],
    "learning_rate": lambda agent: groups_of(agent, agent.critic.optimizer, "lr"),
    "encoder_learning_rate": lambda agent: groups_of(agent, agent.contrast_optimizer, "lr"),
    "temperature_learning_rate": lambda agent: groups_of(agent, agent.ent_coef_optimizer, "lr"),
    "tanh": lambda agent: agent.policy.encoder.tanh,
    "chunk": lambda agent: agent.policy.encoder.chunk,
    "channels_last": lambda agent: agent.policy.encoder.format == torch.channels_last,
    "activation": lambda agent: type(agent.critic.q_networks[0][1]).__name__,
    "log_std_bounds": lambda agent: tuple(agent.actor.log_std_bounds),
    "use_expln": lambda agent: agent.actor.use_expln,
    "clip_mean": lambda agent: agent.actor.clip_mean,
    "positives": lambda agent: agent._positives,
    "train_freq": lambda agent: agent.train_freq.frequency,
}


def assert_used(agent, name, value):
    if name in USED:
        assert USED[name](agent) == value, name
    elif name == "crop_inclusive" and agent.augmentation == "crop":
        assert agent._augment.inclusive is value
    elif name == "buffer_size" and agent.env is not None:
        assert agent.replay_buffer.buffer_size == value


@pytest.mark.parametrize(("algorithm", "name"), [each for each in NAMES if each[1] in FIXED])
def test_fixed_setting_is_refused_by_name(saved, algorithm, name):
    path, folder, _ = saved[algorithm]
    for one in (
        lambda **given: AGENTS[algorithm].load(path, env=DotEnv(), device="cpu", **given),
        lambda **given: resume(folder, DotEnv(), device="cpu", **given),
        lambda **given: setattr(open_agent(path, device="cpu"), *given.popitem()),
    ):
        said = rf"\b{name} cannot change(,| when an agent is loaded)|objective must be a|objective than none"
        for value in ({"text": "infonce"}, "none") if name == "objective" else (3,):
            refused(ConfigError, said, one, **{name: value})


@pytest.mark.parametrize("algorithm", AGENTS)
def test_changed_tau_and_gamma_change_an_update(saved, algorithm):
    """tau = 1 copies the Q functions, gamma = 0 makes the target the rewards."""
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
    agent = ContrastiveSAC.load(saved["sac"][0], env=DotEnv(), stats_window_size=7, device="cpu")
    assert agent.learn(1, reset_num_timesteps=False).ep_info_buffer.maxlen == 7
    refused(ConfigError, "an agent of 'sac', and ContrastiveDrQ is 'drq'", ContrastiveDrQ.load, saved["sac"][0])
    refused(ConfigError, "action_noise must be", ContrastiveSAC.load, saved["sac"][0], action_noise=0.1)
    refused(ConfigError, r"environment shows Box.*30", open_agent, saved["sac"][0], env=DotEnv(size=30), device="cpu")
    assert resume(saved["drq"][1], DotEnv(), device="cpu", policy_delay=4).settings.actor_every == 4
    twins = [
        resume(saved["sac"][1], DotEnv(), device="cpu", seed=seed).learn(3, reset_num_timesteps=False)
        for seed in (5, 5, 6)
    ]
    assert [same(twins[0], each) for each in twins[1:]] == [True, False]
    refused(ConfigError, "more transitions than buffer_size=5", resume, saved["sac"][1], DotEnv(), buffer_size=5)
    refused(ConfigError, "an environment is needed, got None", resume, saved["sac"][1], None)
    refused(ConfigError, "of 1 environment, got 2: give as", resume, saved["sac"][1], DummyVecEnv([DotEnv] * 2))
    refused(CheckpointError, "newest one in it is .*agent-000000014", resume, saved["sac"][1].parent, DotEnv())
    agent = ContrastiveSAC.load(saved["sac"][0], env=DotEnv(), device="cpu", storage="disk", seed=5)
    refused(RuntimeError, "has a contrastive objective, .*load it with dipole.rl.Contr", SAC.load, saved["sac"][0])
    refused(ConfigError, "has no environment: give one to load", ContrastiveSAC.load(saved["sac"][0]).learn, 1)
    agent.learning_rate, agent.beta, agent.train_freq, agent.target_every = 7e-4, 0.3, np.int64(4), 6
    agent.target_entropy = "auto"
    group = agent.learn(12).critic.optimizer.param_groups[0]
    assert (group["lr"], group["betas"][0], agent._n_updates % 4, agent.settings.train_freq) == (7e-4, 0.3, 0, 4)
    assert (agent.replay_buffer.storage, agent.seed, agent.target_update_interval) == ("disk", 5, 6)


# The settings of a recipe in `objective` and [train].
ELSEWHERE = {"objective", "batch_size", "learning_rate", "precision"}
# Settings that cannot change once an agent is saved.
AT_FIRST = {
    "ent_coef": 0.2, "bilinear_init": "identity", "image_size": 24, "initial_temperature": 0.3, "encoder_steps": 1,
    "joint_backward": True, "hidden": [8, 9], "critic_hidden": (32, 8), "features": 20, "layers": 3, "filters": 8,
    "inputs": "pixels", "n_critics": 3, "use_sde": True, "log_std_init": -2.0, "tanh": True,
}  # fmt: skip
CHANGED = {name: value for name, value in LATER.items() if name not in (*ELSEWHERE, "log_std_bounds")} | AT_FIRST
OTHERWISE = {"drq": {"tanh": False}}
RECIPE = {"domain": "rl", "objective": "infonce", "train": {"steps": 100}}


def recipe(**table):
    return resolve({**RECIPE, "rl": table})


@pytest.mark.parametrize("algorithm", DEFAULT)
def test_every_setting_works_in_python_and_recipes(algorithm):
    assert {name for _, name in NAMES} == set(LATER) | set(FIXED) - {"algorithm"}
    assert not set(LATER) & set(FIXED)
    own = {name for name in AgentTable.model_fields if algorithm in USERS.get(name, (algorithm,))}
    changed = {name: value for name, value in CHANGED.items() if name in own} | OTHERWISE.get(algorithm, {})
    assert set(changed) == own - {"preset", "algorithm", "log_std_bounds"}  # of policies without use_sde
    assert set(AgentTable.model_fields) == set(AgentSettings.model_fields) - ELSEWHERE
    preset = DEFAULT[algorithm]
    given = settings_of(preset, changed)
    table = recipe(algorithm=algorithm, **changed).config.rl
    for name in changed:
        assert getattr(table, name) == getattr(given, name) != getattr(PRESETS[preset], name), name
    assert settings_of(preset, table.agent_settings()) == given


def test_recipes_keep_their_run_id_and_the_papers_rates():
    assert "algorithm" not in RLConfig().determining()
    assert recipe(algorithm="sac").config.hash == recipe().config.hash
    assert RLConfig(algorithm="drq").determining() == RLConfig(preset="drqv2").determining()
    assert RLConfig(algorithm="drq").augmentation == "shift"
    assert recipe(log_std_bounds=[-5, 1]).config.rl.log_std_bounds == (-5, 1)
    assert settings_of("curl", {"log_std_bounds": (-5, 1)}).log_std_bounds == (-5, 1)
    assert config_of(task="cheetah-run").train.learning_rate == 2e-4
    assert config_of(task="walker-walk").train.learning_rate == 1e-3
    assert config_of(task="cheetah-run", preset="small").train.learning_rate == 1e-3
    assert config_of(task="cheetah-run", train={"learning_rate": 3e-4}).train.learning_rate == 3e-4


@pytest.mark.parametrize(("given", "said"), [
    ({"gamma": 2}, "gamma 1"), ({"beta": 1.0}, "beta 0.999999"), ({"layers": 17}, "layers 16"),
    ({"twin_loss": "third"}, "twin_loss half"), ({"twin_loss": "halff"}, "twin_loss Did you mean 'half'?"),
    ({"preset": "curls"}, "preset 'curl'"), ({"gama": 0.9}, "gama 'gamma'"),
    ({"log_std_bounds": [2, -10]}, "log_std_bounds (low, high) with low < high"),
    ({"train_freq": [1, "week"]}, "train_freq must be an integer >= 1, or (an integer >= 1, 'step' or 'episode'),"),
    ({"target_entropy": "x"}, "target_entropy must be 'auto' or a number, got 'x'"),
    ({"hidden": 5}, "hidden must be a list of layer widths, integers >= 1, got 5"),
    ({"algorithm": "drq", "ent_coef": 0.1}, "ent_coef no effect on the algorithm 'drq': it is a setting of sac"),
    ({"noise_clip": 0.1}, "noise_clip has no effect on the algorithm 'sac': it is a setting of drq"),
    ({"algorithm": "drq", "preset": "curl"}, "preset 'curl' is no preset of 'drq'. Its presets: drqv2"),
])  # fmt: skip
def test_python_and_recipes_refuse_the_same_values(given, said):
    """`said` is a word and the text that stand in both messages."""
    preset = given.get("preset", DEFAULT[given.get("algorithm", "sac")])
    with pytest.raises(ConfigError) as keyword:
        settings_of(preset, {name: value for name, value in given.items() if name != "preset"})
    with pytest.raises(ConfigError) as table:
        recipe(**given)
    for error in (keyword, table):
        for part in said.split(" ", 1):
            assert part in str(error.value)


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
    config = load_recipe("dot").config
    assert config.rl.hidden == (256,)
    assert config.rl.filters == PRESETS["small"].filters
    config.to_toml()
    assert recipe(preset="small").config.hash != recipe().config.hash
    written = resolve({**RECIPE, "train": {"steps": 100, "batch_size": 64}, "rl": small | {"image_size": 84}})
    assert recipe(preset="small", image_size=84).config.hash == written.config.hash


def test_every_text_writes_the_loss_of_a_curl_agent_with_its_temperature():
    pattern, places = r"infonce\([^)]*similarity=bilinear[^)]*\)", ("*.py", "*.md", "*.toml", "*.in", ":!tests")
    command = ["git", "grep", "-oE", pattern, "--", *places]
    found = subprocess.check_output(command, cwd=Path(__file__).parents[2], text=True).splitlines()
    assert f"README.md:{CURL_OBJECTIVE}" in found
    assert [each for each in found if not each.endswith(f":{CURL_OBJECTIVE}")] == []


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


def config_of(overrides=(), train=None, **table):
    return resolve({**RECIPE, "train": {"steps": 100, **(train or {})}, "rl": table}, list(overrides)).config


def test_entry_of_a_file_sets_what_the_recipe_leaves_out(tmp_path):
    file = str(tmp_path / "sac.yml")
    (tmp_path / "sac.yml").write_text(FILE)
    config = config_of(hyperparameters=file)
    assert (config.train.learning_rate, config.train.batch_size, config.train.steps) == (7.3e-4, 256, 100)
    written = {
        "buffer_size": 300_000, "train_freq": 8, "gradient_steps": 8, "learning_starts": 10_000, "hidden": (400, 300),
        "initial_temperature": 0.2,
    }  # fmt: skip
    assert {name: getattr(config.rl, name) for name in written} == written
    assert config.rl.ent_coef == "auto"
    assert config.hash == config_of(train={"learning_rate": 7.3e-4, "batch_size": 256}, **written).hash
    given = config_of(hyperparameters=file, buffer_size=5000, train={"learning_rate": 1e-2})
    assert (given.rl.buffer_size, given.train.learning_rate) == (5000, 1e-2)
    other = config_of([f"rl.hyperparameters={file}", "rl.task=cheetah-run"])
    assert (other.rl.tau, other.train.learning_rate, other.rl.buffer_size) == (0.02, 5e-4, 100_000)


@pytest.mark.parametrize(("text", "task", "said"), [
    (None, "dot", "cannot be read"), ("[1, 2]", "dot", "must map tasks to hyper-parameters"),
    ("dot: {learning_rate: lin_1e-3}", "dot", "is a schedule, and a recipe has a constant rate"),
    ("walker-walk: {tau: 0.1}", "dot", r"no entry 'dot' and no 'default'\. Entries: walker-walk"),
    (FILE, "odd", r"env_wrapper has no meaning here\. Use the environment's own settings"),
    (FILE, "code", r"policy_kwargs = .* cannot be read"),
    ("dot: {policy_kwargs: 'dict([(\"n_critics\", 3)])'}", "dot", r"policy_kwargs = .* cannot be read"),
    ("dot: {batch_size: 64.5}", "dot", "batch_size must be a whole number, got 64.5"),
])  # fmt: skip
def test_unreadable_files_raise_errors(tmp_path, text, task, said):
    if text is not None:
        (tmp_path / "some.yml").write_text(text)
    refused(ConfigError, said, read_zoo, tmp_path / "some.yml", task)


STATE = {"objective": "none", "preset": "sb3", "batch_size": 16, "buffer_size": 300, "seed": 0, "device": "cpu"}
TAU = "tau: should be less than or equal to 1, got 2"
ARCHITECTURE = {"net_arch": {"pi": [16], "qf": [24, 12]}, "activation_fn": nn.Tanh, "n_critics": 3}


def state_agent(env=None, **settings):
    return ContrastiveSAC("MlpPolicy", env or make_env("dot", inputs="state"), **{**STATE, **settings})


@pytest.mark.parametrize("explores", [{"log_std_init": -2.0, "clip_mean": 0.0}, {"use_expln": True, "clip_mean": 0.1}])
def test_gsde_updates_are_those_of_sb3(explores):
    """The same weights and batches: after six updates of both, the same weights but for rounding."""
    kwargs = {**ARCHITECTURE, **explores}
    ours = state_agent(use_sde=True, ent_coef=0.2, n_steps=3, policy_kwargs=kwargs)
    more = {"buffer_size": 300, "batch_size": 16, "seed": 0, "device": "cpu", "policy_kwargs": kwargs, "n_steps": 3}
    theirs = SAC("MlpPolicy", make_env("dot", inputs="state"), use_sde=True, ent_coef=0.2, **more)
    for agent in (ours, theirs):
        agent.learning_rate = 1e-3
        agent._setup_lr_schedule()
        agent.set_logger(Logger(None, []))
    theirs.policy.load_state_dict(ours.policy.state_dict())
    rng = np.random.default_rng(0)
    start = [value.clone() for value in ours.policy.parameters()]
    for seed in range(6):
        seen, following, actions, rewards, dones, discounts = (
            torch.from_numpy(rng.uniform(size=(16, width)).astype(np.float32)) for width in (4, 4, 2, 1, 1, 1)
        )
        dones = (dones < 0.2).float()
        sample = ReplayBufferSamples(seen, actions, following, dones, rewards, discounts)
        theirs.replay_buffer.sample = lambda *_, _sample=sample, **__: _sample
        empty, names = torch.zeros(16, 0, 1, 1), np.zeros((16, 0))
        batch = FrameBatch(empty, empty, None, actions, rewards, dones, names, seen, following, discounts)
        ours._sample = lambda _, _batch=batch: _batch
        for agent in (ours, theirs):
            torch.manual_seed(seed)
            agent.train(1, 16)
    moved = zip(start, ours.policy.parameters(), strict=True)
    assert sum(not torch.equal(one, two) for one, two in moved) > 20
    for name, value in theirs.policy.state_dict().items():
        assert (value - ours.policy.state_dict()[name]).abs().max() < 1e-5, name


def test_gsde_explores_as_in_sb3_and_resumes_to_the_bit(tmp_path):
    agent = state_agent(use_sde=True, sde_sample_freq=4, use_sde_at_warmup=True, learning_starts=10, train_freq=8)
    torch.manual_seed(0)
    agent.actor.reset_noise(1)
    seen = np.random.default_rng(0).uniform(size=(5, 1, 4)).astype(np.float32)
    drawn = [agent.predict(each, deterministic=False)[0] for each in seen]
    again = [agent.predict(each, deterministic=False)[0] for each in seen]
    assert all(map(np.array_equal, drawn, again))  # a function of the state until it is drawn anew

    agent = state_agent(use_sde=True, learning_starts=10, train_freq=8)
    agent.learn(40, callback=CheckpointCallback(tmp_path, every=16))
    saved = snapshots.checkpoints(tmp_path)
    assert saved
    for folder in saved:  # in the middle of `learn`, its noise drawn
        continued = resume(folder, make_env("dot", inputs="state"), device="cpu")
        continued.learn(40 - continued.num_timesteps, reset_num_timesteps=False)
        assert same(agent, continued)
    settings = {"use_sde": True, "learning_starts": 10}  # outside of `learn`, after a rollout or inside of one
    for stop in (None, lambda seen, _: seen["self"].num_timesteps != 21):
        given = (lambda env: state_agent(env, **settings)), partial(make_env, "dot", inputs="state")
        assert_resumes(*given, tmp_path, 40, 16, stop)


def test_gsde_from_pixels_is_exported_and_learns(tmp_path, tiny_agent):
    agent = tiny_agent(use_sde=True, policy_kwargs={"n_critics": 1, "activation_fn": "ELU"}).learn(20)
    assert (agent.settings.n_critics, agent.settings.activation) == (1, "ELU")
    save_plain(agent, tmp_path)
    plain = SAC.load(tmp_path / "sac.zip", env=make_env("dot"), device="cpu", learning_starts=5)
    assert plain.use_sde
    plain.learn(10)


def test_architectures_equal_those_of_sb3():
    ours = state_agent(policy_kwargs=ARCHITECTURE)
    theirs = SAC("MlpPolicy", make_env("dot", inputs="state"), policy_kwargs=ARCHITECTURE, buffer_size=10, device="cpu")
    shapes = [{name: value.shape for name, value in each.policy.state_dict().items()} for each in (ours, theirs)]
    assert shapes[0] == shapes[1]
    assert [type(each) for each in ours.actor.latent_pi] == [type(each) for each in theirs.actor.latent_pi]
    assert ours.settings.critic_hidden == (24, 12)
    assert state_agent(policy_kwargs={"net_arch": None}).settings.hidden == PRESETS["sb3"].hidden


@pytest.mark.parametrize(("given", "said"), [
    ({"policy_kwargs": {"features_extractor_class": 3}}, "'features_extractor_class'.*ContrastiveCallback"),
    ({"policy_kwargs": {"share_features_extractor": True}}, "'share_features_extractor'.*share the convolutions"),
    ({"policy_kwargs": {"optimizer_class": torch.optim.SGD}}, "'optimizer_class'.*it is Adam"),
    ({"policy_kwargs": {"optimizer_kwargs": {"eps": 1e-5}}}, r"only betas=\(beta, 0.999\)"),
    ({"policy_kwargs": {"normalize_images": False}}, "always divided by 255"),
    ({"policy_kwargs": {"net_arch": {"pi": [8], "vf": [8]}}}, "net_arch must be a list of widths or"),
    ({"policy_kwargs": {"activation_fn": nn.Sigmoid}}, "activation: .* is not allowed.* Allowed: ReLU, Tanh"),
    ({"policy_kwargs": {"n_critics": 2}, "n_critics": 2}, "are the same setting"),
    ({"policy_kwargs": {"full_std": True}}, "it has net_arch, activation_fn"),
    ({"policy_kwargs": [8]}, "policy_kwargs must be a dictionary"),
    ({"log_std_init": -1.0}, "log_std_init has no effect with use_sde=False"),
    ({"use_sde": True, "log_std_bounds": (-5, 2)}, "log_std_bounds has no effect with use_sde=True"),
    *(({name: 10**400}, f"{name}: should be less than or equal to") for name in ("buffer_size", "batch_size", "chunk")),
    ({"sde_sample_freq": -2}, "sde_sample_freq: must be an integer >= 1, or -1"),
    ({"use_sde": True, "sde_sample_freq": 0}, "sde_sample_freq"),
    ({"algorithm": "drq"}, "ContrastiveSAC is an agent of 'sac', not 'drq'. Use .* ContrastiveDrQ for 'drq'"),
    ({"path": "sac", "taw": 0.5}, "there is no setting 'taw'"),
    ({"path": "sac", "custom_objects": 3}, "custom_objects must be a dictionary of SB3's attributes, or None, got 3"),
    ({"path": "sac", "custom_objects": {"filters": 3}}, "filters cannot change"),
    *(({"path": "sac", **two}, TAU) for two in ({"tau": 2}, {"custom_objects": {"tau": 2}})),
    ({"assigned": ("tau", 2)}, TAU),
    ({"assigned": ("crop_inclusive", True)}, r"made with False.* load\(path, crop_inclusive="),
    ({"assigned": ("augmentation", "shift")}, r"made with 'crop'.* load\(path, augmentation="),
    ({"assigned": ("device", "cuda")}, r"made with device\(type='cpu'\).* load\(path, device="),
    ({"path": "sac", "noise_clip": 0.1}, "noise_clip has no effect on the algorithm 'sac'"),
    ({"path": "sac", "policy_kwargs": {"n_critics": 3}}, "n_critics cannot change"),
    ({"path": "sac", "target_policy_noise": 0.1}, "target_policy_noise is no setting here"),
])  # fmt: skip
def test_keywords_without_meaning_are_refused_by_name(saved, given, said):
    if "assigned" in given:
        return refused(ConfigError, said, setattr, open_agent(saved["sac"][0], device="cpu"), *given["assigned"])
    if "path" in given:
        given = given | {"path": saved[given["path"]][0], "device": "cpu"}
    refused(ConfigError, said, ContrastiveSAC.load if "path" in given else state_agent, **given)
