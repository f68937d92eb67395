"""An auxiliary objective for SB3's own agents."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.wrappers import TransformObservation
from stable_baselines3 import A2C, DQN, PPO, SAC, TD3
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.callbacks import CallbackList as BaseCallbackList

from dipole import Objective
from dipole.core.utils.errors import ConfigError, DipoleError, TrainingError
from dipole.rl import ContrastiveCallback, ContrastiveSAC, DotEnv, make_env
from dipole.rl.callbacks.contrastive import distinct, equal

NET = {"net_arch": [8]}


def sac(**settings):
    return SAC(
        "CnnPolicy", DotEnv(size=36), buffer_size=200, learning_starts=10, batch_size=8, device="cpu", seed=0,
        policy_kwargs=dict(NET), **settings,
    )  # fmt: skip


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


def test_several_positives_are_several_views():
    agent, callback = sac(), ContrastiveCallback("cacr(k=3)", batch_size=16)
    views = []
    callback.augmentation = lambda images: views.append(len(images)) or images
    agent.learn(16, callback=callback)
    assert views == [2] + [16] * 4  # a trial, then one step: the anchors' view and three of the keys


@pytest.mark.parametrize("algorithm", [TD3, DQN, A2C, PPO])
def test_other_agents_gain_an_objective(algorithm):
    settings = (
        {"n_steps": 16} if algorithm in (A2C, PPO) else {"buffer_size": 100, "learning_starts": 16, "train_freq": 8}
    )
    env = make_env("dot-discrete", size=36) if algorithm is DQN else DotEnv(size=36)
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
        ({"encoder": 3}, "encoder must be a function that finds a module"),
        ({"objective": "infonse"}, "infonce"),
    ],
)
def test_wrong_arguments_are_refused_before_training(arguments, said):
    with pytest.raises(DipoleError, match=said):
        ContrastiveCallback(**arguments)


def test_labelled_objectives_and_agents_without_images_are_refused():
    with pytest.raises(ConfigError, match=r"tuple cannot run inside an agent: .*labels"):
        sac().learn(1, callback=ContrastiveCallback("tuple"))
    with pytest.raises(ConfigError, match="needs an agent that observes images"):
        SAC("MlpPolicy", "Pendulum-v1", device="cpu").learn(1, callback=ContrastiveCallback())


def test_encoder_without_a_width_and_losses_that_are_not_finite_raise_errors():
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


def test_a_callback_belongs_to_one_agent():
    callback = ContrastiveCallback("infonce", batch_size=8)
    first = sac()
    first.learn(12, callback=callback)
    first.learn(2, callback=callback, reset_num_timesteps=False)
    with pytest.raises(ConfigError, match=r"belongs to another agent.*make one for each"):
        sac().learn(12, callback=callback)
    sac().learn(12, callback=ContrastiveCallback(callback.contrast, batch_size=8))


class Instruments(gymnasium.ObservationWrapper):
    """The dot task seen through a dictionary: a picture and two numbers."""

    def __init__(self):
        super().__init__(DotEnv(size=36))
        numbers = gymnasium.spaces.Box(-1, 1, (2,))
        self.observation_space = gymnasium.spaces.Dict({"eye": self.env.observation_space, "numbers": numbers})

    def observation(self, observation):
        return {"eye": observation, "numbers": self.unwrapped._dot.astype("float32")}


@pytest.mark.parametrize("algorithm", [SAC, PPO])
def test_images_in_a_dictionary_are_augmented(algorithm):
    settings = {"n_steps": 16, "n_epochs": 1} if algorithm is PPO else {"buffer_size": 100, "learning_starts": 16}
    agent = algorithm("MultiInputPolicy", Instruments(), batch_size=8, device="cpu", seed=0, **settings)
    callback = ContrastiveCallback("infonce", batch_size=8)
    shapes = []
    callback.augmentation = lambda images: shapes.append(tuple(images.shape)) or images
    losses = record_losses(callback)
    agent.learn(20, callback=callback)
    assert losses
    assert set(shapes) == {(2, 9, 36, 36), (8, 9, 36, 36)}  # two are tried before training


def floating():
    space = gymnasium.spaces.Box(0, 1, (9, 36, 36), "float32")
    return TransformObservation(DotEnv(size=36), lambda image: (image / 255).astype("float32"), space)


def test_agents_without_an_image_encoder_are_refused():
    for env in (DotEnv(size=36), floating()):
        agent = SAC("MlpPolicy", env, buffer_size=50, device="cpu", policy_kwargs=dict(NET))
        with pytest.raises(ConfigError, match="FlattenExtractor has nothing to train: give the agent one"):
            agent.learn(1, callback=ContrastiveCallback("infonce"))


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (36, r"makes \(2, 9, 36, 5\) of two observations, not \(2, 7\)"),
        (35, r"cannot see augmented observations of Box"),
    ],
)
def test_encoders_that_do_not_fit_the_observations_are_refused(size, said):
    class Wrong(torch.nn.Linear):
        features_dim = 7

    callback = ContrastiveCallback("infonce", encoder=lambda model: Wrong(size, 5))
    with pytest.raises(ConfigError, match=said):
        sac().learn(1, callback=callback)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"augmentation": lambda images: None}, "augmentation made a NoneType of two images"),
        ({"augmentation": lambda images: images[:1]}, r"augmentation made \(1, 9, 36, 36\) of two images"),
        ({"augmentation": lambda images: images[..., :5]}, "NatureCNN cannot see augmented observations"),
        ({"encoder": lambda model: model.policy}, "makes a tuple of two observations"),
        ({"batch_size": 10**9}, "a batch of images of 1000000000 x 9 x 36 x 36 takes"),
    ],
)
def test_errors_of_the_first_step_are_raised_before_training(settings, said):
    agent = PPO("CnnPolicy", DotEnv(size=36), n_steps=8, batch_size=8, device="cpu") if "encoder" in settings else sac()
    with pytest.raises(DipoleError, match=said):
        agent.learn(1, callback=ContrastiveCallback("infonce", **settings))
    assert agent.num_timesteps == 0


def test_batch_is_at_most_the_rollout():
    agent = PPO(
        "CnnPolicy", DotEnv(size=36), n_steps=8, batch_size=8, n_epochs=1, device="cpu", policy_kwargs=dict(NET)
    )
    callback = ContrastiveCallback("infonce", batch_size=10**9)
    losses = record_losses(callback)
    agent.learn(8, callback=callback)
    assert losses


def test_float_images_are_learned_from():
    kwargs = {**NET, "normalize_images": False, "features_extractor_kwargs": {"normalized_image": True}}
    agent = SAC(
        "CnnPolicy", floating(), buffer_size=50, learning_starts=10, batch_size=8, device="cpu", policy_kwargs=kwargs
    )
    callback = ContrastiveCallback("infonce", batch_size=8)
    losses = record_losses(callback)
    agent.learn(14, callback=callback)
    assert losses


def test_callback_steps_after_the_update_of_an_on_policy_agent():
    """With one whole-batch epoch the policy of the update is that of the rollout: its KL to itself is 0."""
    agent = PPO("CnnPolicy", DotEnv(size=36), n_steps=16, batch_size=16, n_epochs=1, device="cpu", seed=0)
    callback = ContrastiveCallback("infonce", batch_size=16, updates=10, learning_rate=1e-3)
    divergences, train = [], agent.train
    agent.train = lambda: (train(), divergences.append(agent.logger.name_to_value["train/approx_kl"]))
    agent.learn(64, callback=callback)
    assert len(divergences) == 4
    assert max(divergences) < 1e-6


class Blinking(DotEnv):
    """Two pictures in turn, whatever happens."""

    def _frame(self, size):
        return 0 * super()._frame(size) + 100 * (self._steps % 2)


@pytest.mark.parametrize("environment", [DotEnv, Blinking])
def test_short_rollout_is_one_batch_of_different_observations(environment):
    """Five stored observations, as A2C has by default, are five anchors; equal ones are one."""
    agent = A2C("CnnPolicy", environment(size=36), n_steps=5, device="cpu", seed=0)
    callback = ContrastiveCallback(updates=3)
    sizes, losses, step = [], [], callback._step
    callback._step = lambda seen: (sizes.append(len(seen)), losses.append(step(seen)))[1] or losses[-1]
    agent.learn(200, callback=callback)
    assert set(sizes) <= ({2, 3, 4, 5} if environment is DotEnv else {2, 3, 4})
    assert max(sizes) == (5 if environment is DotEnv else 4)
    assert all(0 <= loss < 30 for loss in losses)


def test_equal_observations_are_not_negatives():
    images = torch.randint(0, 256, (6, 3, 8, 8), dtype=torch.uint8)
    images[4], images[5] = images[1], images[1]
    found = equal(images, 2)
    expected = torch.full((6, 12), -1)
    for group in ([1, 4, 5],):
        for one in group:
            for other in group:
                if one != other:
                    expected[one, other], expected[one, other + 6] = other, other + 6
    assert torch.equal(found, expected)
    parts = {"eye": images, "numbers": torch.arange(12.0).view(6, 2)}
    assert (equal(parts, 1) == -1).all()
    assert equal({**parts, "numbers": torch.zeros(6, 2)}, 1).ge(0).sum() == 6


def test_a_rollout_holds_each_observation_once():
    stored = np.zeros((4, 2, 3, 2, 2), np.uint8)
    stored[2, 1] = 7
    space = gymnasium.spaces.Box(0, 255, (3, 2, 2), np.uint8)
    assert [int(each.max()) for each in distinct(stored, space)[""]] == [0, 7]


@pytest.mark.parametrize("algorithm", [SAC, PPO])
def test_callback_state_is_saved_with_the_agent(algorithm, tmp_path):
    def learner():
        return ContrastiveCallback("infonce(similarity=bilinear)", batch_size=8)

    settings = {"n_steps": 16, "n_epochs": 1} if algorithm is PPO else {"buffer_size": 100, "learning_starts": 16}
    env = DotEnv(size=36)
    agent = algorithm("CnnPolicy", env, batch_size=8, device="cpu", seed=0, policy_kwargs=dict(NET), **settings)
    agent.learn(32, callback=(first := learner()))
    agent.save(tmp_path / "agent.zip")
    loaded = algorithm.load(tmp_path / "agent.zip", env=env, device="cpu")
    second = learner()
    loaded.learn(1 if algorithm is SAC else 16, callback=BaseCallbackList([second, Stop()]), reset_num_timesteps=False)
    for name in ("contrast", "keys", "optimizer"):
        one, two = (getattr(each, name).state_dict() for each in (first, second))
        torch.testing.assert_close(one, two, rtol=0, atol=0)
    with pytest.raises(ConfigError, match=r"trained with a callback of the objective 'infonce\(similarity=bilinear\)'"):
        algorithm.load(tmp_path / "agent.zip", env=env, device="cpu").learn(1, callback=ContrastiveCallback("dcl"))


class Stop(BaseCallback):
    def _on_step(self):
        return False


class Counts(Objective):
    """Notes its steps."""

    needs_negatives = False

    def __init__(self):
        super().__init__("cosine")
        self.seen = []

    def loss(self, positive, rows):
        return -rows.over_positives(positive)

    def after_step(self, learning_rate, weight, step=None, total=None):
        self.seen.append((step, total))


def counted(first, last, total):
    return [(step, total) for step in range(first, last + 1)]


def test_a_callback_tells_step_and_total():
    term = Counts()
    agent, callback = sac(train_freq=2), ContrastiveCallback(term, batch_size=12, updates=3)
    agent.learn(21, callback=callback)  # 11 rollouts of 2 steps, the first 5 of which have fewer than 12 observations
    assert term.seen == counted(1, 18, 18)
    agent.learn(4, callback=callback, reset_num_timesteps=False)
    assert term.seen[18:] == counted(19, 24, 24)
    term = Counts()
    agent = PPO("CnnPolicy", DotEnv(size=36), n_steps=8, batch_size=8, n_epochs=1, policy_kwargs=dict(NET))
    agent.learn(20, callback=ContrastiveCallback(term, updates=2))
    assert term.seen == counted(1, 6, 6)
    term = Counts()
    sac(train_freq=(1, "episode")).learn(40, callback=ContrastiveCallback(term, batch_size=8))
    assert {total for _, total in term.seen} == {None}  # the number of episodes is unknown
    assert [step for step, _ in term.seen] == list(range(1, len(term.seen) + 1))


@pytest.mark.parametrize("every", [1, 2])
def test_an_agent_tells_step_and_total(every):
    term = Counts()
    agent = ContrastiveSAC(
        "CnnPolicy", DotEnv(size=36), objective=term, preset="small", buffer_size=100, learning_starts=10, batch_size=8,
        contrast_every=every, device="cpu", seed=0,
    )  # fmt: skip
    agent.learn(20)
    assert term.seen
    assert term.seen == counted(1, len(term.seen), len(term.seen))
