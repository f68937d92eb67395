"""Keywords of stable-baselines3: what they do here is what they do there, or they are refused by name."""

import numpy as np
import pytest
import torch
from stable_baselines3 import SAC
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from torch import nn

from dipole.core.utils.errors import ConfigError
from dipole.rl import CheckpointCallback, ContrastiveSAC, make_env, resume
from dipole.rl import snapshots as checkpoints
from dipole.rl.export import save_plain
from dipole.rl.sampling import FrameBatch
from tests.rl.conftest import same

STATE = {"objective": "none", "preset": "sb3", "batch_size": 16, "buffer_size": 300, "seed": 0, "device": "cpu"}
ARCHITECTURE = {"net_arch": {"pi": [16], "qf": [24, 12]}, "activation_fn": nn.Tanh, "n_critics": 3}


def state_agent(**settings):
    return ContrastiveSAC("MlpPolicy", make_env("dot", inputs="state"), **{**STATE, **settings})


@pytest.mark.parametrize("explores", [{"log_std_init": -2.0, "clip_mean": 0.0}, {"use_expln": True, "clip_mean": 0.1}])
def test_gsde_updates_are_those_of_sb3(explores):
    """The same weights and batches: after six updates of both, the same weights but for rounding."""
    kwargs = {**ARCHITECTURE, **explores}
    ours = state_agent(use_sde=True, ent_coef=0.2, n_steps=3, policy_kwargs=kwargs)
    more = {"buffer_size": 300, "batch_size": 16, "seed": 0, "device": "cpu", "policy_kwargs": kwargs}
    env = make_env("dot", inputs="state")
    theirs = SAC("MlpPolicy", env, use_sde=True, ent_coef=0.2, n_steps=3, **more)
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
        empty = torch.zeros(16, 0, 1, 1)
        rest = (actions, rewards, dones, np.zeros((16, 0)), discounts)
        batch = FrameBatch(empty, empty, None, *rest, states=seen, next_states=following)
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
    saved = checkpoints.checkpoints(tmp_path)
    assert saved
    for folder in saved:  # in the middle of `learn`, its noise drawn
        continued = resume(folder, make_env("dot", inputs="state"), device="cpu")
        continued.learn(40 - continued.num_timesteps, reset_num_timesteps=False)
        assert same(agent, continued)
    checkpoints.save(agent, tmp_path / "after")  # outside of `learn`
    agent.learn(16, reset_num_timesteps=False)
    continued = resume(tmp_path / "after", make_env("dot", inputs="state"), device="cpu")
    continued.learn(16, reset_num_timesteps=False)
    assert same(agent, continued)


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


@pytest.mark.parametrize(
    ("given", "said"),
    [
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
        ({"sde_sample_freq": -2}, "sde_sample_freq: must be an integer >= 1, or -1"),
        ({"use_sde": True, "sde_sample_freq": 0}, "sde_sample_freq"),
    ],
)
def test_keywords_without_meaning_are_refused_by_name(given, said):
    with pytest.raises(ConfigError, match=said):
        state_agent(**given)
