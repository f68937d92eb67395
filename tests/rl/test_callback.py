"""An auxiliary objective for SB3's own agents."""

import warnings
from itertools import permutations

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.wrappers import TimeLimit, TransformObservation
from stable_baselines3 import A2C, DQN, PPO, SAC, TD3, HerReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback, EvalCallback, EveryNTimesteps
from stable_baselines3.common.callbacks import CallbackList as BaseCallbackList
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack, VecNormalize

import dipole
from dipole.core.utils.errors import ConfigError, DipoleError, TrainingError
from dipole.core.utils.freezing import in_mode
from dipole.rl import ContrastiveCallback, ContrastiveDrQ, DotEnv, FrameReplayBuffer, make_env
from dipole.rl.callbacks.contrastive import distinct, equal
from tests.rl.conftest import tiny, without_dipole
from tests.runs import Counts, refused

NET = {"net_arch": [8]}
REPLAY = {"buffer_size": 100, "learning_starts": 16, "batch_size": 8}
ROLLOUT = {"n_steps": 16}
USUAL = {SAC: REPLAY, TD3: REPLAY, DQN: REPLAY, A2C: ROLLOUT, PPO: {**ROLLOUT, "n_epochs": 1, "batch_size": 8}}


def made(algorithm, env=None, policy="CnnPolicy", **settings):
    if env is None:
        env = make_env("dot-discrete", size=36) if algorithm is DQN else DotEnv(size=36)
    usual = {"device": "cpu", "seed": 0, "policy_kwargs": dict(NET), **USUAL[algorithm]}
    return algorithm(policy, env, **{**usual, **settings})


def sac(**settings):
    return made(SAC, **{"buffer_size": 200, "learning_starts": 10, **settings})


def record_losses(callback):
    losses, step = [], callback._step
    callback._step = lambda images: losses.append(step(images)) or losses[-1]
    return losses


@pytest.mark.parametrize(
    "text", ["infonce(similarity=bilinear, temperature=1)", "infonce + dp + cllr(solver=proximal)"]
)
def test_sac_gains_the_objective_that_it_is_given(text):
    agent, given = sac(), dipole.objective(text)
    callback = ContrastiveCallback(given, batch_size=16, updates=2)
    encoder = agent.critic.features_extractor
    agent.learn(14, callback=callback)
    start = [p.detach().clone() for p in [*given.parameters(), *callback.keys.parameters()]]
    # Without the agent's own updates only the contrast moves the encoder.
    agent.gradient_steps = 0
    before = [p.detach().clone() for p in encoder.parameters()]
    agent.learn(2, callback=callback, reset_num_timesteps=False)
    assert (callback.encoder, callback.contrast) == (encoder, given)
    assert all(not torch.equal(a, b) for a, b in zip(before, encoder.parameters(), strict=True))
    moved = [*given.parameters(), *callback.keys.parameters()]
    assert all(not torch.equal(a, b) for a, b in zip(start, moved, strict=True))


def test_the_contrastive_loss_falls():
    agent, callback = sac(learning_starts=16), ContrastiveCallback(batch_size=16, updates=3, learning_rate=3e-3)
    losses = record_losses(callback)
    agent.gradient_steps = 0
    agent.learn(30, callback=callback)
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


def test_several_positives_are_several_views():
    agent, callback = sac(), ContrastiveCallback("cacr(k=3)", batch_size=16)
    views = []
    callback.augmentation = lambda images: views.append(len(images)) or images
    agent.learn(16, callback=callback)
    # A trial, then the anchors' view and three of the keys from each step on, of what is stored.
    assert views == [2] + [size for size in range(11, 17) for _ in range(4)]


def test_a_callback_belongs_to_one_agent_and_stops_before_a_step_that_is_not_finite():
    agent, callback = sac(), ContrastiveCallback("infonce", batch_size=16)
    agent.learn(12, callback=callback)
    agent.learn(2, callback=callback, reset_num_timesteps=False)
    refused(ConfigError, r"belongs to another agent.*make one for each", sac().learn, 12, callback=callback)
    sac().learn(12, callback=ContrastiveCallback(callback.contrast, batch_size=8))
    before = [p.detach().clone() for p in callback.encoder.parameters()]
    callback.augmentation = lambda images: images.float() * torch.nan
    refused(TrainingError, "term 'infonce'.*No step", callback._step, agent.replay_buffer.sample(8).observations)
    assert all(torch.equal(a, b) for a, b in zip(before, callback.encoder.parameters(), strict=True))


def both():
    """Return the dot task as a dictionary of a picture and four numbers."""
    return make_env("dot", size=36, inputs="both")


def floating():
    space = gymnasium.spaces.Box(0, 1, (9, 36, 36), "float32")
    return TransformObservation(DotEnv(size=36), lambda image: (image / 255).astype("float32"), space)


FLOATS = {**NET, "normalize_images": False, "features_extractor_kwargs": {"normalized_image": True}}


@pytest.mark.parametrize("make", [
    lambda: made(SAC, both(), "MultiInputPolicy"),
    lambda: made(PPO, both(), "MultiInputPolicy"),
    lambda: made(SAC, floating(), policy_kwargs=FLOATS),
    lambda: sac(replay_buffer_class=FrameReplayBuffer),
    lambda: tiny(DotEnv(size=36), ContrastiveDrQ),
])  # fmt: skip
def test_images_in_a_dictionary_and_images_of_floats_are_augmented(make):
    agent, callback, shapes = make(), ContrastiveCallback("infonce", batch_size=8), []
    callback.augmentation = lambda images: shapes.append(tuple(images.shape)) or images
    losses = record_losses(callback)
    agent.learn(20, callback=callback)
    assert losses
    assert set(shapes) == {(2, 9, 36, 36), (8, 9, 36, 36)}  # two are tried before training


class Wrong(torch.nn.Linear):
    features_dim = 7


def stacked():
    return VecFrameStack(VecNormalize(DummyVecEnv([lambda: DotEnv(size=36, frame_stack=1)]), norm_obs=False), 3)


SEES = r"\(3, 36, 36\), and the agent sees .*\(9, 36, 36\).*Make VecNormalize the out"


@pytest.mark.parametrize(("make", "settings", "said"), [
    (sac, {"updates": 0}, "updates must be an integer >= 1, got 0"),
    (sac, {"objective": {}, "updates": {}}, "callback must be an instance, ContrastiveCallback"),
    (sac, {"objective": {}}, "objective must be a text .*got dict"),
    (sac, {"batch_size": 1}, "batch_size must be an integer >= 2, got 1"),
    (sac, {"learning_rate": -1}, "learning_rate must be a number from 0 to inf, got -1"),
    (sac, {"tau": 2}, "tau must be a number from 0 to 1, got 2"),
    (sac, {"augmentation": "crop"}, "augmentation must be a function"),
    (sac, {"encoder": lambda model: model.eyes}, "encoder finds no module in a SAC: .*'eyes'"),
    (sac, {"encoder": 3}, "encoder must be a function that finds a module"), (sac, {"objective": "infonse"}, "infonce"),
    (sac, {"objective": "none"}, "Leave the callback out"),
    (sac, {"objective": "tuple"}, r"tuple cannot run inside an agent: .*labels"),
    (lambda: made(SAC, "Pendulum-v1", "MlpPolicy", policy_kwargs={}), {}, "needs an agent that observes images"),
    (lambda: made(SAC, policy="MlpPolicy"), {}, "FlattenExtractor has nothing to train: give the agent one"),
    (lambda: made(SAC, floating(), "MlpPolicy"), {}, "FlattenExtractor has nothing to train: give the agent one"),
    (lambda: made(SAC, stacked()), {}, SEES),
    (sac, {"augmentation": lambda images: None}, "augmentation made a NoneType of two images"),
    (sac, {"augmentation": lambda images: images[:1]}, r"augmentation made \(1, 9, 36, 36\) of two images"),
    (sac, {"augmentation": lambda images: images[..., :5]}, "NatureCNN cannot see augmented observations"),
    (sac, {"encoder": lambda model: torch.nn.Linear(2, 2)}, "no features_dim"),
    (lambda: made(PPO), {"encoder": lambda model: Wrong(36, 5)}, r"makes \(2, 9, 36, 5\) of two obs.*, not \(2, 7\)"),
    (lambda: made(PPO), {"encoder": lambda model: Wrong(35, 5)}, "cannot see augmented observations of Box"),
    (lambda: made(PPO), {"encoder": lambda model: model.policy}, "makes a tuple of two observations"),
])  # fmt: skip
def test_wrong_arguments_and_errors_of_the_first_step_are_raised_before_training(make, settings, said):
    agent = make()
    with pytest.raises(DipoleError, match=said):
        agent.learn(1, callback=ContrastiveCallback(**{"objective": "infonce", **settings}))
    assert agent.num_timesteps == 0


class Pictures(DotEnv):
    """So many pictures in turn, whatever happens."""

    def __init__(self, count):
        super().__init__(size=36)
        self.count = count

    def _frame(self, size):
        return 0 * super()._frame(size) + 100 * (self._steps % self.count)


@pytest.mark.parametrize(("make", "sizes"), [(lambda: DotEnv(size=36), {2, 3, 4, 5}), (lambda: Pictures(2), {2, 3, 4})])
def test_short_rollout_is_one_batch_of_different_observations(make, sizes):
    """Five stored observations, as A2C has by default, are five anchors. Equal ones are one."""
    agent = made(A2C, make(), n_steps=5, policy_kwargs={})
    callback = ContrastiveCallback(updates=3)
    seen, losses, step = [], [], callback._step
    callback._step = lambda batch: (seen.append(len(batch)), losses.append(step(batch)))[1] or losses[-1]
    agent.learn(60, callback=callback)
    assert set(seen) <= sizes
    assert max(seen) == max(sizes)
    assert all(0 <= loss < 30 for loss in losses)


def test_equal_observations_are_not_negatives_and_a_rollout_holds_each_once():
    images = torch.randint(0, 256, (6, 3, 8, 8), dtype=torch.uint8)
    images[4], images[5] = images[1], images[1]
    expected = torch.full((6, 12), -1)
    for one, other in permutations([1, 4, 5], 2):
        expected[one, other], expected[one, other + 6] = other, other + 6
    assert torch.equal(equal(images, 2), expected)
    parts = {"eye": images, "numbers": torch.arange(12.0).view(6, 2)}
    assert (equal(parts, 1) == -1).all()
    assert equal({**parts, "numbers": torch.zeros(6, 2)}, 1).ge(0).sum() == 6
    stored = np.zeros((4, 2, 3, 2, 2), np.uint8)
    stored[2, 1] = 7
    space = gymnasium.spaces.Box(0, 255, (3, 2, 2), np.uint8)
    assert [int(each.max()) for each in distinct(stored, space)[""]] == [0, 7]


_ALONE = """
import json, sys
import numpy as np
import stable_baselines3
def leaves(value):
    if type(value).__name__ in ("dict", "OrderedDict"):
        return set().union(*map(leaves, value.values()))
    return set().union(*map(leaves, value)) if type(value) in (list, tuple) else {type(value).__name__}
found = []
for algorithm in sys.argv[1:]:
    for name in "agent", "again", "best_model":
        agent = getattr(stable_baselines3, algorithm).load(f"{algorithm}/{name}", device="cpu")
        actions = agent.predict(np.load(f"{algorithm}/shown.npy"), deterministic=True)[0]
        found.append([sorted(leaves(agent.contrastive)), actions.tolist()])
print(json.dumps(found))
"""


def saved_agents(algorithm, folder):
    """Write an agent, the agent loaded and saved again, and the one that EvalCallback saved. Return its actions."""

    def learner():
        return ContrastiveCallback("infonce(similarity=bilinear) + 0.1*dp", batch_size=8)

    agent, first = made(SAC, learning_starts=8, train_freq=4) if algorithm is SAC else made(algorithm), learner()
    best = EvalCallback(DotEnv(size=36), None, None, 1, 20, best_model_save_path=folder, verbose=0)
    agent.learn(32, callback=[first, best])
    agent.save(folder / "agent.zip")
    algorithm.load(folder / "agent.zip", device="cpu").save(folder / "again.zip")
    shown = np.stack([agent.observation_space.sample() for _ in range(3)])
    np.save(folder / "shown.npy", shown)
    actions = agent.predict(shown, deterministic=True)[0]
    # An agent that is trained further continues the callback's state.
    loaded, second = algorithm.load(folder / "agent.zip", env=DotEnv(size=36), device="cpu"), learner()
    loaded.learn(1 if algorithm is SAC else 16, callback=BaseCallbackList([second, Stop()]), reset_num_timesteps=False)
    for name in ("contrast", "keys", "optimizer"):
        one, two = (getattr(each, name).state_dict() for each in (first, second))
        torch.testing.assert_close(one, two, rtol=0, atol=0)
    with pytest.raises(ConfigError, match=r"trained with a callback of the objective 'infonce\(similarity=bilinear\)"):
        algorithm.load(folder / "agent.zip", env=DotEnv(size=36)).learn(1, callback=ContrastiveCallback("dcl"))
    return actions


def test_saved_agents_continue_the_callback_and_load_without_dipole(tmp_path):
    expected = [saved_agents(algorithm, tmp_path / algorithm.__name__) for algorithm in (SAC, PPO)]
    found = without_dipole(_ALONE, "SAC", "PPO", cwd=tmp_path)
    assert len(found) == 6
    assert set().union(*(kinds for kinds, _ in found)) <= {"Tensor", "str", "float", "int", "bool", "NoneType"}
    for first, wanted in zip((0, 3), expected, strict=True):
        for _, actions in found[first : first + 2]:
            np.testing.assert_array_equal(np.array(actions, wanted.dtype), wanted)


def every(steps):
    return lambda callback: EveryNTimesteps(steps, callback)


@pytest.mark.parametrize(("wrap", "settings", "steps", "expected"), [
    (None, {"buffer_size": 20, "learning_starts": 30}, 40, 10),
    (None, {"buffer_size": 40, "learning_starts": 40, "env": 3}, 60, 7),  # 13 x 3 < 40
    (None, {"buffer_size": 30, "learning_starts": 10, "batch": 500}, 40, 30),
    (None, {"buffer_size": 7, "learning_starts": 9, "env": 2, "train_freq": 3}, 30, 4),
    (every(5), {"buffer_size": 40, "learning_starts": 11}, 40, 6),
    (lambda callback: every(5)(BaseCallbackList([callback])), {"learning_starts": 11}, 40, 6),
    (lambda callback: every(10)(every(1)(callback)), {"learning_starts": 11}, 40, 3),
    (every(3), {"learning_starts": 0, "train_freq": 12}, 24, 8),
])  # fmt: skip
def test_off_policy_agents_step_whenever_they_learn(wrap, settings, steps, expected):
    batch, count = settings.pop("batch", 8), settings.pop("env", 1)
    agent = made(SAC, DummyVecEnv([lambda: DotEnv(size=36)] * count), gradient_steps=0, **settings)
    callback = ContrastiveCallback("infonce", batch_size=batch)
    losses = record_losses(callback)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        agent.learn(steps, callback=wrap(callback) if wrap else callback)
    assert len(losses) == expected
    assert np.isfinite(losses).all()
    agent.learn(12, callback=callback, reset_num_timesteps=False)  # without the EventCallback
    assert len(losses) == expected + 12 // (count * agent.train_freq.frequency)


def test_loaded_agents_step_at_once(tmp_path):
    made(SAC, learning_starts=20).learn(22).save(tmp_path / "agent")
    agent, callback = SAC.load(tmp_path / "agent", env=DotEnv(size=36), device="cpu"), ContrastiveCallback()
    losses = record_losses(callback)
    agent.learn(5, callback=callback, reset_num_timesteps=False)
    assert len(losses) == 4  # replay is empty again: from two transitions on


@pytest.mark.parametrize(
    ("wrap", "steps"),
    [(None, 8), (every(4), 4), (lambda each: EvalCallback(TimeLimit(DotEnv(size=36), 3), None, each, 1, 4), 4)],
)
def test_on_policy_agents_step_after_their_update(wrap, steps):
    """With one whole-batch epoch the policy of the update is that of the rollout: its KL to itself is 0."""
    agent = made(PPO, n_steps=8)
    callback = ContrastiveCallback(updates=2, batch_size=10**9, learning_rate=1e-3)  # at most the rollout
    losses, divergences, train = record_losses(callback), [], agent.train
    agent.train = lambda: (train(), divergences.append(agent.logger.name_to_value["train/approx_kl"]))
    agent.learn(24, callback=wrap(callback) if wrap else callback)
    assert len(losses) == 24 // steps * 2
    assert len(divergences) == 3
    assert max(divergences) < 1e-6


def hindsight():
    """SAC with hindsight replay, which cannot draw before the first episode ends, and no updates of its own."""
    env, goal = DotEnv(size=36), gymnasium.spaces.Box(-1, 1, (2,))
    names = {"observation": env.observation_space, "achieved_goal": goal, "desired_goal": goal}
    space = gymnasium.spaces.Dict(names)
    goals = TransformObservation(
        env, lambda seen: {**dict.fromkeys(names, np.zeros(2, np.float32)), "observation": seen}, space
    )
    settings = {"replay_buffer_class": HerReplayBuffer, "gradient_steps": 0, "learning_starts": 2}
    return SAC("MultiInputPolicy", goals, buffer_size=100, policy_kwargs={"net_arch": [8]}, device="cpu", **settings)


@pytest.mark.parametrize(("make", "steps", "said"), [
    (lambda each: (hindsight(), each), 8, "fewer than two different observations"),
    (lambda each: (made(PPO), each), 0, "in 0 timesteps. No rollout was complete"),
    (lambda each: (sac(), each), 10, "in 10 timesteps. The agent's learning_starts is 10: lower it"),
    (lambda each: (sac(), every(90)(each)), 20, "in 20 timesteps. It is inside an EventCallback that had no"),
    (lambda each: (sac(train_freq=50, learning_starts=0), BaseCallbackList([each, Stop()])), 20, "No rollout was"),
    (lambda each: (made(A2C, Pictures(1), n_steps=5), each), 10, "fewer than two different .*: raise n_steps"),
])  # fmt: skip
def test_training_without_a_step_ends_with_a_warning(make, steps, said):
    agent, callback = make(ContrastiveCallback())
    with pytest.warns(RuntimeWarning, match=f"ContrastiveCallback took no step.*{said}"):
        agent.learn(steps, callback=callback)


class Normed(BaseFeaturesExtractor):
    """Batch norm and dropout, as many encoders have. Notes the mode of every call."""

    def __init__(self, space):
        super().__init__(space, 8)
        self.norm, self.drop = torch.nn.BatchNorm2d(space.shape[0]), torch.nn.Dropout(0.5)
        self.head, self.modes = torch.nn.Linear(space.shape[0], 8), []

    def forward(self, images):
        self.modes.append((self.norm.training, self.drop.training))
        return self.head(self.drop(self.norm(images)).mean((2, 3)))


@pytest.mark.parametrize(
    ("algorithm", "owner"), [(SAC, "critic"), (TD3, "critic"), (DQN, "q_net"), (PPO, "policy"), (A2C, "policy")]
)
def test_both_sides_have_one_mode_and_the_copy_follows_buffers(algorithm, owner):
    steps = {"n_steps": 8} if algorithm in (PPO, A2C) else {"learning_starts": 8}
    if algorithm in (TD3, DQN):
        steps |= {"train_freq": 4}
    agent = made(algorithm, policy_kwargs={**NET, "features_extractor_class": Normed}, **steps)
    callback, seen = ContrastiveCallback(batch_size=8), []
    step = callback._step

    def noted(images):
        before, loss = len(callback.encoder.modes), step(images)
        seen.append(set(callback.encoder.modes[before:]) | set(callback.keys.modes[-1:]))
        same = zip(callback.keys.buffers(), callback.encoder.buffers(), strict=True)
        assert all(torch.equal(*each) for each in same)
        return loss

    callback._step = noted
    agent.learn(24, callback=callback)
    assert callback.encoder is getattr(agent, owner).features_extractor
    assert len(seen) >= 3  # the last step of an on-policy agent is taken when training has ended
    assert all(each == {(True, True)} for each in seen)
    assert int(callback.keys.norm.num_batches_tracked) > 0
    agent.policy.set_training_mode(False)
    callback._left = None
    with in_mode(True, callback.encoder, callback.keys):
        assert callback.encoder.norm.training
    assert not callback.encoder.norm.training


def test_replay_is_seen_as_the_agent_sees_it():
    """Vectors are normalised by the agent's VecNormalize, as in its own updates."""
    env = VecNormalize(DummyVecEnv([both]), norm_obs_keys=["state"])
    agent = made(SAC, env, "MultiInputPolicy", learning_starts=5, gradient_steps=0)
    callback, seen = ContrastiveCallback(batch_size=8), []
    step = callback._step
    callback._step = lambda batch: seen.append(batch["state"]) or step(batch)
    agent.learn(25, callback=callback)
    assert float(seen[-1].abs().max()) > 1.01  # of numbers in [0, 1], shown with unit variance


class Stop(BaseCallback):
    def _on_step(self):
        return False


def counted(first, last, total):
    return [(step, total) for step in range(first, last + 1)]


def test_a_callback_and_an_agent_tell_step_and_total(tiny_agent):
    for every_steps in (1, 2):
        term = Counts()
        tiny_agent(objective=term, contrast_every=every_steps).learn(15)
        assert term.seen
        assert term.seen == counted(1, len(term.seen), len(term.seen))
    term = Counts()
    agent, callback = sac(train_freq=2, gradient_steps=0), ContrastiveCallback(term, batch_size=12, updates=3)
    agent.learn(21, callback=callback)  # 11 rollouts of 2 steps, the first 5 of which have fewer than 12 observations
    assert term.seen == counted(1, 18, 18)
    agent.learn(4, callback=callback, reset_num_timesteps=False)
    assert term.seen[18:] == counted(19, 24, 24)
    term = Counts()
    made(PPO, n_steps=8).learn(20, callback=ContrastiveCallback(term, updates=2))
    assert term.seen == counted(1, 6, 6)
    term = Counts()
    sac(train_freq=(1, "episode"), gradient_steps=1).learn(40, callback=ContrastiveCallback(term, batch_size=8))
    assert {total for _, total in term.seen} == {None}  # the number of episodes is unknown
    assert [step for step, _ in term.seen] == list(range(1, len(term.seen) + 1))


def test_two_callbacks_of_an_agent_are_saved_one_by_one(tmp_path):
    """Each trains its own encoder, and continues with its own state."""
    settings = {"policy_kwargs": {**NET, "share_features_extractor": False}}

    def learners():
        first = ContrastiveCallback("infonce", batch_size=8, encoder=lambda agent: agent.policy.pi_features_extractor)
        other = ContrastiveCallback("dcl", batch_size=8, encoder=lambda agent: agent.policy.vf_features_extractor)
        return [first, other]

    agent, before = made(PPO, **settings), learners()
    agent.learn(16, callback=before)
    agent.learn(16, callback=before, reset_num_timesteps=False)
    agent.save(tmp_path / "agent")
    loaded, after = PPO.load(tmp_path / "agent", env=DotEnv(size=36), device="cpu"), learners()
    with pytest.warns(RuntimeWarning, match="No rollout was complete"):
        loaded.learn(0, callback=after, reset_num_timesteps=False)
    for one, two in zip(before, after, strict=True):
        assert one.optimizer.state_dict()["state"][0]["step"] == 2
        for name in ("contrast", "keys", "optimizer"):
            torch.testing.assert_close(getattr(two, name).state_dict(), getattr(one, name).state_dict())
    # One after the other they are one callback.
    last = learners()[0]
    last.learning_rate = 1e-5  # not that of the state
    agent.learn(16, callback=last, reset_num_timesteps=False)
    found = agent.contrastive.state()["optimizer"]
    assert (int(found["state"][0]["step"]), found["param_groups"][0]["lr"]) == (3, 1e-5)
