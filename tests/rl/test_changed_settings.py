"""Each setting is honoured by `load` and `resume`, survives the next save and checkpoint, or is refused by name."""

import numpy as np
import pytest
import torch
from stable_baselines3.common.logger import Logger

from dipole.core.utils.errors import ConfigError
from dipole.rl import ContrastiveDrQ, ContrastiveSAC, DotEnv, resume, snapshots
from dipole.rl.algorithms import open_agent
from dipole.rl.settings import FIXED, attributes

AGENTS = {"sac": ContrastiveSAC, "drq": ContrastiveDrQ}
# "tanh" is the other one than the preset's.
CHANGED = {
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
        names = [name for name in attributes(algorithm) if name in CHANGED and (name in SDE) == (key == "sde")]
        rest = [name for name in names if name != "buffer_size"]
        for group in (rest[::3], rest[1::3], rest[2::3], [name for name in names if name == "buffer_size"]):
            if group:
                yield key, algorithm, group


def test_every_setting_is_in_one_of_the_two_lists():
    assert {name for _, name in NAMES} == set(CHANGED) | set(FIXED) - {"algorithm"}
    assert not set(CHANGED) & set(FIXED)


@pytest.mark.parametrize(("key", "algorithm", "names"), list(groups()))
def test_changed_settings_are_honoured_and_survive(saved, tmp_path, key, algorithm, names, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    path, folder, settings = saved[key]
    changed = {name: CHANGED[name] for name in names} | {name: not settings.tanh for name in names if name == "tanh"}
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
    for load in (
        lambda **given: AGENTS[algorithm].load(path, env=DotEnv(), device="cpu", **given),
        lambda **given: resume(folder, DotEnv(), device="cpu", **given),
    ):
        value = "infonce" if name == "objective" else 3
        with pytest.raises(ConfigError, match=rf"\b{name} cannot change when an agent is loaded|objective must be a"):
            load(**{name: value if name != "objective" else {"text": value}})


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
