"""An auxiliary objective for SB3's own agents."""

import gymnasium
import pytest
import torch
from stable_baselines3 import A2C, DQN, PPO, SAC, TD3

from dipole.core.ground.errors import ConfigError, DipoleError, TrainingError
from dipole.rl import ContrastiveCallback, DotEnv

NET = {"net_arch": [8]}


class SwitchedDot(gymnasium.ActionWrapper):
    """The dot task with two actions, up and down."""

    def __init__(self):
        super().__init__(DotEnv(size=36))
        self.action_space = gymnasium.spaces.Discrete(2)

    def action(self, action):
        return self.env.action_space.high * (2 * int(action) - 1)


def sac(**settings):
    return SAC(
        "CnnPolicy",
        DotEnv(size=36),
        buffer_size=200,
        learning_starts=10,
        batch_size=8,
        device="cpu",
        seed=0,
        policy_kwargs=dict(NET),
        **settings,
    )


def record_losses(callback):
    losses, step = [], callback._step
    callback._step = lambda images: losses.append(step(images)) or losses[-1]
    return losses


@pytest.mark.parametrize(
    "objective", ["infonce(similarity=bilinear, temperature=1)", "infonce + dp + cllr(solver=proximal)"]
)
def test_sac_gains_an_objective(objective):
    agent, callback = sac(), ContrastiveCallback(objective, batch_size=16, updates=2)
    encoder = agent.critic.features_extractor
    agent.learn(20, callback=callback)
    start = [p.detach().clone() for p in [*callback.contrast.parameters(), *callback.keys.parameters()]]
    # Without the agent's own updates only the contrast moves the encoder.
    agent.gradient_steps = 0
    before = [p.detach().clone() for p in encoder.parameters()]
    agent.learn(5, callback=callback, reset_num_timesteps=False)
    assert callback.encoder is encoder
    assert all(not torch.equal(a, b) for a, b in zip(before, encoder.parameters(), strict=True))
    moved = [*callback.contrast.parameters(), *callback.keys.parameters()]
    assert all(not torch.equal(a, b) for a, b in zip(start, moved, strict=True))


def test_the_contrastive_loss_falls():
    agent, callback = sac(), ContrastiveCallback(batch_size=32, updates=3, learning_rate=3e-3)
    losses = record_losses(callback)
    agent.gradient_steps = 0
    agent.learn(50, callback=callback)
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


def test_ppo_gains_an_objective():
    agent = PPO("CnnPolicy", DotEnv(size=36), n_steps=16, batch_size=8, n_epochs=1, device="cpu", seed=0)
    callback = ContrastiveCallback("infonce", batch_size=8)
    losses = record_losses(callback)
    agent.learn(32, callback=callback)
    assert callback.encoder is agent.policy.features_extractor
    assert len(losses) == 2


def test_several_positives_are_several_views():
    agent, callback = sac(), ContrastiveCallback("cacr(k=3)", batch_size=16)
    views = []
    callback.augmentation = lambda images: views.append(len(images)) or images
    agent.learn(16, callback=callback)
    assert views == [16] * 4  # one step: the anchors' view and three of the keys


@pytest.mark.parametrize("algorithm", [TD3, DQN, A2C])
def test_other_agents_gain_an_objective(algorithm):
    settings = {"n_steps": 16} if algorithm is A2C else {"buffer_size": 100, "learning_starts": 16, "train_freq": 8}
    env = SwitchedDot() if algorithm is DQN else DotEnv(size=36)
    agent = algorithm("CnnPolicy", env, device="cpu", seed=0, policy_kwargs=dict(NET), **settings)
    callback = ContrastiveCallback("infonce", batch_size=8)
    losses = record_losses(callback)
    agent.learn(32, callback=callback)
    assert losses
    owner = {TD3: "critic", DQN: "q_net"}.get(algorithm)
    assert callback.encoder is (getattr(agent, owner) if owner else agent.policy).features_extractor


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"updates": 0}, "updates must be an integer >= 1, got 0"),
        ({"batch_size": 1}, "batch_size must be an integer >= 2, got 1"),
        ({"learning_rate": -1}, "learning_rate must be a number from 0 to inf, got -1"),
        ({"tau": 2}, "tau must be a number from 0 to 1, got 2"),
        ({"augmentation": "crop"}, "augmentation must be a function"),
        ({"objective": "infonse"}, "infonce"),
    ],
)
def test_wrong_arguments_are_named_before_training(arguments, said):
    with pytest.raises(DipoleError, match=said):
        ContrastiveCallback(**arguments)


def test_agents_and_objectives_that_do_not_fit_are_named():
    with pytest.raises(ConfigError, match=r"tuple cannot run inside an agent: .*labels"):
        sac().learn(1, callback=ContrastiveCallback("tuple"))
    with pytest.raises(ConfigError, match="needs an agent that observes images"):
        SAC("MlpPolicy", "Pendulum-v1", device="cpu").learn(1, callback=ContrastiveCallback())


def test_what_it_cannot_do_is_said():
    agent = sac()
    with pytest.raises(ConfigError, match="no features_dim"):
        agent.learn(1, callback=ContrastiveCallback(encoder=lambda model: torch.nn.Linear(2, 2)))
    callback = ContrastiveCallback("infonce", batch_size=16)
    agent.learn(20, callback=callback)
    before = [p.detach().clone() for p in callback.encoder.parameters()]
    callback.augmentation = lambda images: images.float() * torch.nan
    with pytest.raises(TrainingError, match="the term infonce is nan"):
        callback._step(agent.replay_buffer.sample(8).observations)
    assert all(torch.equal(a, b) for a, b in zip(before, callback.encoder.parameters(), strict=True))
