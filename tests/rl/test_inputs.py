"""Agents that see vectors, alone or beside an image: networks, replay, checkpoints, exports, recipes, errors."""

import copy
import dataclasses
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from stable_baselines3 import SAC, TD3
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from dipole.core.cli import main
from dipole.core.train.model import evaluate_run
from dipole.core.train.recipe import load_recipe
from dipole.core.train.run import train
from dipole.core.train.run_folder import RunFolder
from dipole.rl import ContrastiveDrQ, ContrastiveSAC, DotEnv, FrameReplayBuffer, make_env
from dipole.rl.algorithms import open_agent
from dipole.rl.envs.running.validate import stack
from dipole.rl.episodes.play import evaluate
from dipole.rl.episodes.trial import trial
from dipole.rl.export import save_plain
from dipole.rl.networks import PixelPolicy
from tests.rl.conftest import assert_resumes, same, without_dipole
from tests.rl.test_parity import batches

SMALL = {"hidden": (16,), "batch_size": 8, "learning_starts": 10, "buffer_size": 300, "seed": 0, "device": "cpu"}
SEEING = {"image_size": 24, "filters": 4, "layers": 2, **SMALL}
KINDS = {"sac": ContrastiveSAC, "drq": ContrastiveDrQ}


def made(kind="sac", inputs="both", env=None, **settings):
    given = {**(SMALL if inputs == "state" else SEEING), **settings}
    if inputs == "state":
        given = {"objective": "none", **given}
    return KINDS[kind]("CnnPolicy", env if env is not None else make_env("dot", inputs=inputs), **given)


def test_replay_stores_vectors_beside_their_images():
    """Against lists of whole observations, with several rewards in a return."""
    env = DotEnv(inputs="both", frame_stack=2)
    buffer = FrameReplayBuffer(40, env.observation_space, env.action_space, "cpu", seed=0, n_steps=3, gamma=0.9)
    before, after, rewards = [], [], []
    observation, _ = env.reset(seed=0)
    env.action_space.seed(0)
    for step in range(60):
        following, reward, _, truncated, _ = env.step(env.action_space.sample())
        batch = [{key: each[None] for key, each in seen.items()} for seen in (observation, following)]
        info = [{"TimeLimit.truncated": truncated}]
        buffer.add(*batch, np.zeros((1, 2)), np.array([reward]), np.array([truncated]), info)
        before.append(observation)
        after.append(following)
        rewards.append(reward)
        observation = env.reset(seed=step)[0] if truncated else following
    found = buffer.sample(200)
    starts = {row["state"].tobytes(): number for number, row in enumerate(before)}
    assert len(starts) == len(before)  # a point that waits in a corner would be two rows of one name
    for row in range(200):
        number = starts[found.observations["state"][row].numpy().tobytes()]
        assert number >= 20  # the ring holds the last forty
        last = min(number + 2, 49 if number < 50 else 59)
        assert np.array_equal(found.observations["pixels"][row], before[number]["pixels"])
        assert np.array_equal(found.next_observations["pixels"][row], after[last]["pixels"])
        assert np.array_equal(found.next_observations["state"][row], after[last]["state"])
        expected = sum(0.9**j * rewards[number + j] for j in range(last - number + 1))
        assert float(found.rewards[row]) == pytest.approx(expected, abs=1e-5)
    whole = FrameReplayBuffer(40, env.observation_space["pixels"], env.action_space, "cpu", frame_stack=2)
    assert buffer.nbytes - whole.nbytes == 40 * 2 * 4 * 4


def test_actor_and_critic_see_vectors_and_the_objective_images_only():
    agent = made(objective="infonce")
    encoder, observation = agent.policy.encoder, make_env("dot", inputs="both").reset(seed=0)[0]
    moved = {**observation, "state": observation["state"] + 0.5}
    seen = agent.policy.obs_to_tensor(observation)[0]
    features = encoder({key: each.float() for key, each in seen.items()})
    assert torch.equal(features[:, -4:], seen["state"])
    assert torch.equal(features[:, :-4], encoder.embed(seen))
    assert not np.array_equal(*(agent.predict(each, deterministic=True)[0] for each in (observation, moved)))
    agent.learn(20)
    batch = agent._sample(8)
    assert batch.states.shape == batch.next_states.shape == (8, 4)
    anchors = agent.anchors(batch.observations)
    assert anchors.shape == (8, agent.settings.features)
    assert agent.make_pairs(batch, anchors).candidates.shape[-1] == agent.settings.features


def test_without_vectors_in_the_values_the_two_agents_are_one():
    """Weights of 0 for the vectors make the agent of both that of the image, update for update."""
    plain, both = made(inputs="pixels"), made()
    own, width = both.policy.state_dict(), plain.settings.features
    with torch.no_grad():
        for name, value in plain.policy.state_dict().items():
            if own[name].shape != value.shape:  # first layers: (features, vectors, actions)
                own[name].zero_()
                own[name][:, :width] = value[:, :width]
                own[name][:, width + 4 :] = value[:, width:]
            else:
                own[name].copy_(value)
    zeros = torch.zeros(8, 4)
    for seed, batch in enumerate(batches(2, 8)):
        torch.manual_seed(seed)
        plain.update(batch)
        torch.manual_seed(seed)
        both.update(dataclasses.replace(batch, states=zeros, next_states=zeros))
    for name, value in plain.policy.state_dict().items():
        mine = own[name]
        if mine.shape != value.shape:
            mine = torch.cat([mine[:, :width], mine[:, width + 4 :]], 1)
        assert torch.allclose(mine, value, atol=1e-6), name


@pytest.mark.parametrize("inputs", ["pixels", "both", "state"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_resumed_agent_is_the_undisturbed_one(kind, inputs, tmp_path):
    env = partial(make_env, "dot", inputs=inputs)
    agent, again = assert_resumes(lambda env: made(kind, inputs, env), env, tmp_path)
    assert type(again) is KINDS[kind]
    agent.save(tmp_path / "agent.zip")
    played = open_agent(tmp_path / "agent.zip", device="cpu")
    assert evaluate(played, env(), 1, seed=3) == evaluate(again, env(), 1, seed=3)
    assert same(KINDS[kind].load(tmp_path / "agent.zip", env=env(), device="cpu"), agent)


def test_workers_give_dictionaries_and_continue(tmp_path, workers):
    functions = [partial(make_env, "dot", inputs="both")] * 2
    assert_resumes(lambda env: made(env=env), lambda: workers(functions), tmp_path, 24, 12)


class Instruments(gymnasium.ObservationWrapper):
    """The dot task as a dictionary: a picture, its channels last, two vectors and two bits."""

    def __init__(self):
        super().__init__(make_env("dot"))
        box = gymnasium.spaces.Box
        parts = {"eye": box(0, 255, (28, 28, 9), np.uint8), "numbers": box(0, 1, (2,)), "grid": box(0, 1, (2, 1))}
        self.observation_space = gymnasium.spaces.Dict({**parts, "bits": gymnasium.spaces.MultiBinary(2)})

    def observation(self, observation):
        dot, target = self.unwrapped._dot.astype(np.float32), self.unwrapped._target.astype(np.float32)
        eye = np.ascontiguousarray(observation.transpose(1, 2, 0))
        return {"eye": eye, "numbers": dot, "grid": target[:, None], "bits": (dot > 0.5).astype(np.int8)}


def test_inputs_select_parts_of_a_dictionary(tmp_path):
    agent, _ = assert_resumes(lambda env: made(env=env), Instruments, tmp_path)
    assert agent.seen.width == 6
    batch = agent._sample(4)
    assert ((batch.states[:, agent.seen.widths[0] :] >= 0) & (batch.states <= 1).all()).all()
    filtered = ContrastiveSAC("CnnPolicy", Instruments(), inputs="pixels", **SEEING).learn(20)
    assert same(made(inputs="pixels").learn(20), filtered)
    vectors = ContrastiveSAC("MultiInputPolicy", Instruments(), inputs="state", objective="none", **SMALL).learn(20)
    assert set(vectors.observation_space.spaces) == {"numbers", "grid", "bits"}
    with (tmp_path / "vectors.zip").open("wb") as file:
        vectors.save(file)
    loaded = ContrastiveSAC.load(tmp_path / "vectors", env=Instruments(), device="cpu")
    assert evaluate(loaded, Instruments(), 1, seed=1) == evaluate(vectors, Instruments(), 1, seed=1)


def test_normalised_vectors_are_learned_from_as_they_are_acted_on(tmp_path):
    one = partial(make_env, "dot", inputs="both")
    env, other = (VecNormalize(DummyVecEnv([one]), norm_obs_keys=["state"]) for _ in range(2))
    agent = made(env=env).learn(30)
    other.obs_rms, other.training, other.norm_reward = env.obs_rms, False, False
    other.seed(3)
    expected = evaluate_policy(agent, other, 2, return_episode_rewards=True, warn=False)[0]
    played = evaluate(agent, one(), 2, seed=3)
    assert played == pytest.approx(expected, rel=1e-6)
    agent.save(tmp_path / "agent.zip")  # with what it was normalised by
    assert played == list(trial(tmp_path / "agent.zip", "dot", 2, 3).returns)
    ContrastiveSAC.load(tmp_path / "agent.zip", device="cpu").save(tmp_path / "again")
    assert played == evaluate(ContrastiveSAC.load(tmp_path / "again", device="cpu"), one(), 2, seed=3)
    with pytest.warns(RuntimeWarning, match="has learned from normalised observations"):
        ContrastiveSAC.load(tmp_path / "again", env=one(), device="cpu")
    agent.policy.save(tmp_path / "policy")
    shown = stack([agent.observation_space.sample()])
    acted = [each.predict(shown, deterministic=True)[0] for each in (agent, PixelPolicy.load(tmp_path / "policy"))]
    np.testing.assert_array_equal(*acted)
    raw = agent.replay_buffer.states[0, :30, 0]
    assert ((raw >= 0) & (raw <= 1)).all()  # stored as it came
    rows = copy.deepcopy(agent.replay_buffer)._draw(200)[1]
    batch = agent._sample(200)
    scale = np.sqrt(env.obs_rms["state"].var + env.epsilon)
    expected = np.clip((raw[rows] - env.obs_rms["state"].mean) / scale, -env.clip_obs, env.clip_obs)
    np.testing.assert_allclose(batch.states, expected, rtol=1e-5, atol=1e-6)


_ALONE = """
import json
import numpy as np
from networks import PixelPolicy
from stable_baselines3 import SAC, TD3
sac = SAC.load("sac.zip", device="cpu", custom_objects={"policy_class": PixelPolicy})
td3 = TD3.load("td3.zip", device="cpu")
shown = dict(np.load("shown.npz"))
print(json.dumps([agent.predict(shown, deterministic=True)[0].tolist() for agent in (sac, td3)]))
"""


def test_exports_act_alike_without_dipole(tmp_path):
    """By the code in the folder, and by that in the zip itself."""
    agents = made("drq").learn(20), made("sac").learn(20)
    for agent in agents:
        save_plain(agent, tmp_path)  # networks.py is the last one's
    shown = stack([agents[0].observation_space.sample() for _ in range(3)])
    np.savez(tmp_path / "shown.npz", **shown)
    for agent, found in zip(reversed(agents), without_dipole(_ALONE, cwd=tmp_path), strict=True):
        expected = agent.predict(shown, deterministic=True)[0]
        np.testing.assert_array_equal(np.array(found, expected.dtype), expected)


@pytest.mark.parametrize("recipe", ["dot-state", "dot-both", "dot-drq"])
def test_recipes_run_are_evaluated_and_exported(recipe, tmp_path):
    wanted = ["train.steps=60", "train.evaluate_every=60", "train.checkpoint_every=60", "train.batch_size=8"]
    wanted += ["rl.learning_starts=50", "rl.episodes=1", "rl.hidden=[16]", "device=cpu"]
    wanted += ["rl.filters=4"] if recipe != "dot-state" else []
    config = load_recipe(recipe, wanted).config
    record = train(config, tmp_path, quiet=True)
    _, found = evaluate_run(RunFolder(tmp_path / config.hash), "cpu")
    assert found.results["return/mean"] == record.results["return/mean"]
    assert main(["export", str(tmp_path / config.hash), "--to", "sb3"]) == 0
    base = {"sac": SAC, "drq": TD3}[config.rl.algorithm]
    plain = base.load(tmp_path / config.hash / "export-sb3" / f"{base.__name__.lower()}.zip", device="cpu")
    env = make_env("dot", inputs={"auto": "pixels"}.get(config.rl.inputs, config.rl.inputs))
    played = open_agent(tmp_path / config.hash / "export-sb3" / "agent.zip", device="cpu")
    assert evaluate(plain, env, 1, seed=4) == evaluate(played, env, 1, seed=4)
    assert main(["play", str(tmp_path / config.hash), "--episodes", "1"]) == 0


@pytest.mark.parametrize("inputs", ["state", "both"])
def test_the_suite_gives_its_own_observation(inputs, opengl):
    from dm_control import suite

    env = make_env("walker-walk", inputs=inputs, size=32, rendering="fast", action_repeat=1)
    other = suite.load("walker", "walk", task_kwargs={"random": 5})
    first, _ = env.reset(seed=5)
    steps, actions = [other.reset()], np.random.default_rng(0).uniform(-1, 1, (5, 6)).astype(np.float32)
    found = [first]
    for action in actions:
        found.append(env.step(action)[0])
        steps.append(other.step(action.astype(np.float64)))
    for mine, step in zip(found, steps, strict=True):
        expected = np.concatenate([np.ravel(each) for each in step.observation.values()])
        np.testing.assert_allclose(mine["state"] if inputs == "both" else mine, expected, rtol=1e-5, atol=1e-5)
    assert env.observation_space.contains(first)
    state = env.get_state()
    ahead = [env.step(action)[0] for action in actions]
    env.set_state(state)
    for one, two in zip(ahead, [env.step(action)[0] for action in actions], strict=True):
        assert all(map(np.array_equal, one.values(), two.values())) if inputs == "both" else np.array_equal(one, two)
    assert env.render().shape == (32, 32, 3)


def test_vectors_with_nan_are_never_sampled():
    space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    buffer = FrameReplayBuffer(10, space, space, "cpu", seed=0)
    for step in range(6):
        row = np.full((1, 2), np.nan if step == 3 else step, np.float32)
        buffer.add(row, row, np.zeros((1, 2)), np.zeros(1), np.zeros(1), [{}])
    assert set(buffer.sample(100).observations[:, 0].tolist()) == {0.0, 1.0, 2.0, 4.0, 5.0}
