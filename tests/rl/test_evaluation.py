"""Evaluation: returns by hand, alone and in workers, scores, intervals, curves and videos. Training stays the same."""

import json
import re
import sys

import numpy as np
import pytest
import torch
from gymnasium.wrappers import TimeLimit
from PIL import Image
from stable_baselines3 import PPO
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.noise import NormalActionNoise
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from dipole.core.train.model import build
from dipole.core.train.recipe import load_recipe
from dipole.core.train.run_folder import RunFolder
from dipole.core.utils.errors import CheckpointError, ConfigError, DataError, TrainingError
from dipole.core.utils.extras import install_line
from dipole.rl import DotEnv, EvaluationCallback, episodes, make_env
from dipole.rl.callbacks.evaluating import diagnose
from dipole.rl.envs.running.validate import rendered
from dipole.rl.envs.running.workers import WorkerVecEnv
from dipole.rl.episodes import Evaluation, aggregate, evaluate, score_at, scores
from dipole.rl.episodes.play import episode_seed, evaluate_each
from dipole.rl.episodes.trial import trial
from tests.rl.in_workers import Failing
from tests.runs import refused
from tests.systems import links


def test_the_callback_evaluates_on_time_and_training_does_not_notice(tiny_agent, tmp_path):
    plain = tiny_agent(learning_starts=30).learn(36)
    agent = tiny_agent(learning_starts=30)
    callback = EvaluationCallback(DotEnv(), every=15, episodes=1, folder=tmp_path, video_every=2)
    agent.learn(36, callback=callback)
    assert [each.environment_steps for each in callback.history] == [0, 15, 30]
    state = plain.policy.state_dict()
    assert all(torch.equal(state[name], value) for name, value in agent.policy.state_dict().items())
    assert episodes.read_evaluations(tmp_path / "evaluations.jsonl") == callback.history
    videos = sorted(path.name for path in tmp_path.glob("*.gif"))
    assert videos == ["episode-000000000.gif", "episode-000000030.gif"]
    with Image.open(tmp_path / videos[0]) as video:
        assert video.size == (28, 28)
        assert video.n_frames > 1


@links
def test_a_link_is_not_written_through_and_a_missing_matplotlib_is_named(tiny_agent, tmp_path, monkeypatch):
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "evaluations.jsonl").symlink_to(tmp_path / "mine.txt")
    callback = EvaluationCallback(DotEnv(), folder=tmp_path, episodes=1)
    refused(TrainingError, r"evaluations\.jsonl: it is not a regular file", tiny_agent().learn, 1, callback=callback)
    assert (tmp_path / "mine.txt").read_text() == "mine"
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    refused(ConfigError, re.escape(install_line("rl")), episodes.plot_curves, CURVES, tmp_path / "curve.svg")


def test_diagnostics_match_their_definitions(tiny_agent):
    """tests/benchmarks/test_studies.py compares the diagnostics of all domains with plain loops."""
    agent = tiny_agent()
    assert diagnose(agent) == {}
    agent.learn(30)
    before = agent.replay_buffer.rng.bit_generator.state
    found = diagnose(agent, batch_size=16)
    assert agent.replay_buffer.rng.bit_generator.state == before
    batch = agent.replay_buffer.sample_views(16, agent._augment, 1)
    with torch.no_grad():
        z = torch.nn.functional.normalize(agent.policy.encoder(batch.observations))
        keys = torch.nn.functional.normalize(agent.policy.key_encoder(batch.positives[:, 0]))
    assert found["alignment"] == pytest.approx(float((z - keys).square().sum(1).mean()), abs=1e-5)
    assert {"uniformity", "margin_occupancy", "rank", "mean_distance"} <= found.keys()
    assert found["conditional_entropy"] <= found["conditional_entropy_maximum"] + 1e-6


def test_scores_are_taken_at_the_papers_steps_and_aggregated():
    history = [Evaluation(steps, steps // 8, (float(steps),)) for steps in (0, 96_000, 104_000, 200_000)]
    assert score_at(history, 100_000) == 104_000
    assert scores(history) == {"100k": 104_000.0}
    assert score_at(history, 500_000) is None
    longer = [*history, *(Evaluation(steps, steps // 8, (float(steps),)) for steps in (496_000, 500_000, 504_000))]
    assert scores(longer) == {"100k": 104_000.0, "500k": 500_000.0}
    values = [0, 10, 20, 30, 40, 50, 60, 1000]
    found = aggregate(values)
    assert found.iqm == 35  # the middle four
    assert found.mean == pytest.approx(151.25)
    assert found.low < found.iqm < found.high
    assert aggregate(values) == found


def test_curves_and_videos_are_written(tmp_path):
    histories = [[Evaluation(s, s, (s + seed, s - seed)) for s in (0, 10, 20)] for seed in range(3)]
    drawn = episodes.plot_curves({"infonce": histories}, tmp_path / "curves.svg", "dot").read_text()
    assert all(f"<!-- {text} -->" in drawn for text in ("environment steps", "dot", "infonce (3 seeds)"))
    one = [Evaluation(0, 0, (1.0, 3.0)), Evaluation(9, 9, (2.0, 8.0))]
    alone = episodes.plot_curves({"none": [one]}, tmp_path / "one.svg")
    assert "<!-- none (1 seed) -->" in alone.read_text()
    (tmp_path / "evaluations.jsonl").write_text(json.dumps({"steps": 1}) + "\n")
    refused(DataError, "holds no evaluations", episodes.read_evaluations, tmp_path / "evaluations.jsonl")


WIDE = {"action_noise": NormalActionNoise(np.zeros(3), np.ones(3))}
WHITE = [np.zeros((8, 8, 3), np.uint8)]
CURVES = {"none": [[Evaluation(1, 1, (1.0,))], [Evaluation(2, 2, (1.0,))]]}


@pytest.mark.parametrize(("error", "said", "call"), [
    (ConfigError, "unknown task 'dott'", lambda a, _: evaluate(a, "dott")),
    (ConfigError, "episodes must be an integer >= 1, got 0", lambda a, _: evaluate(a, DotEnv(), 0)),
    (ConfigError, r"made for .*\(9, 28, 28\).*\(9, 36, 36\)", lambda a, _: evaluate(a, DotEnv(size=36))),
    (ConfigError, r"every must be .* got 'x+ ... x+'", lambda *_: EvaluationCallback(DotEnv(), every="x" * 99)),
    (ConfigError, "video_every must be .*>= 0, got -1", lambda *_: EvaluationCallback(DotEnv(), video_every=-1)),
    (ConfigError, "seed must be an integer from 0", lambda *_: EvaluationCallback(DotEnv(), seed=-1)),
    (ConfigError, "total_timesteps must be an integer >= 0", lambda a, _: a.learn(1e3)),
    (ConfigError, "tb_log_name must be a text, .* got 3", lambda a, _: a.learn(1, tb_log_name=3)),
    (ConfigError, r"shape \(3,\), and the actions are \(1, 2\)", lambda a, _: vars(a).update(WIDE) or a.learn(1)),
    (CheckpointError, "parameters do not fit the agent: .*foo", lambda a, _: a.set_parameters({"foo": {}})),
    (ConfigError, "A file is in the place", lambda a, _: a.learn(1, EvaluationCallback(DotEnv(), folder=__file__))),
    *((DataError, "frames .* of uint8", lambda _, path, wrong=wrong: episodes.write_video(wrong, path / "none.gif"))
      for wrong in ([], [WHITE[0][:, :, :1]], [np.zeros((4, 4, 3))])),
    (ConfigError, r"\.gif or \.mp4, not '\.avi'", lambda _, path: episodes.write_video(WHITE, path / "film.avi")),
    *((DataError, "finite numbers", lambda *_, wrong=wrong: aggregate(wrong)) for wrong in ([], [1, np.nan])),
    (DataError, "no evaluation at the same env", lambda _, path: episodes.plot_curves(CURVES, path / "c.png")),
    (ConfigError, r"drawn as \.png", lambda _, path: episodes.plot_curves({}, path / "curve.xyz")),
    (ConfigError, "confidence must lie between 0 and 1, got 95", lambda *_: aggregate([1, 2], confidence=95)),
    (ConfigError, "draws must be an integer >= 1, got 0", lambda *_: aggregate([1, 2], draws=0)),
    (ConfigError, "fps must be a number from 1", lambda _, path: episodes.write_video(WHITE, path / "film.gif", 0)),
    (ConfigError, "batch_size must be an integer >= 1, got -1", lambda a, _: a.replay_buffer.sample(-1)),
    (ConfigError, "an integer from 0 to 4, got 'up'", lambda *_: make_env("dot-discrete").step("up")),
])  # fmt: skip
def test_wrong_arguments_of_evaluation_and_learning_raise_errors(tiny_agent, tmp_path, error, said, call):
    refused(error, said, call, tiny_agent(), tmp_path)


def test_agents_of_sb3_are_evaluated_with_their_memory_and_steps_start_again_with_their_count(tiny_agent, tmp_path):
    env = DotEnv(size=36)
    agent = PPO("CnnPolicy", env, n_steps=8, batch_size=4, device="cpu", seed=0)
    callback = EvaluationCallback(DotEnv(size=36), every=8, episodes=1)
    agent.learn(16, callback=callback)
    assert [each.environment_steps for each in callback.history] == [0, 8, 16]
    refused(ConfigError, "is the training environment itself", agent.learn, 10, callback=EvaluationCallback(env))
    told, predict = [], agent.predict

    def recurrent(seen, memory, starts, _):
        told.append((memory, bool(starts[0])))
        return predict(seen)[0], (None if len(told) < 50 else len(told))

    env = DummyVecEnv([lambda: TimeLimit(DotEnv(size=36), 9)] * 2)
    env = VecNormalize(env, norm_obs=False)  # SB3 would give normalised rewards
    callback = EvaluationCallback(env, every=8, episodes=3, folder=tmp_path, video_every=1)
    agent.learn(8, callback=callback)
    env.training = env.norm_reward = False
    env.seed(10_000)
    assert callback.history[-1].returns == tuple(evaluate_policy(agent, env, 3, return_episode_rewards=True)[0])
    assert len(list(tmp_path.glob("*.gif"))) == 2
    refused(ConfigError, "is the training environment", agent.learn, 9, callback=EvaluationCallback(agent.get_env()))
    agent.predict = recurrent
    evaluate(agent, DotEnv(size=36), 2)
    assert told == [(step if step > 50 else None, step % 50 == 0) for step in range(100)]
    agent = tiny_agent().learn(12)
    for steps, is_new, expected in ((13, True, 13), (7, False, 20)):
        agent.learn(steps, reset_num_timesteps=is_new)
        assert agent.environment_steps == agent.num_timesteps == expected


@pytest.fixture(scope="module")
def workers():
    env = WorkerVecEnv([Failing] * 2)
    yield env
    env.close()


@pytest.mark.parametrize("fails", ["never", "some"])
def test_workers_give_the_returns_of_the_sequence(fails, workers, tiny_agent):
    agent = tiny_agent()
    shown = [], []
    one = evaluate_each(agent, Failing(fails), 3, 7, shown[0])
    workers.env_method("fail", fails)
    assert evaluate_each(agent, workers, 3, 7, shown[1]) == one
    assert all(map(np.array_equal, *shown))
    assert len(shown[0]) == len(shown[1]) == 150
    assert len(set(one)) == 3
    alone = [evaluate(agent, DotEnv(), 1, episode_seed(7, number))[0] for number in range(3)]
    assert (one == alone) == (fails == "never")


def test_five_faults_in_a_row_stop(workers, tiny_agent):
    workers.env_method("fail", "always")
    refused(TrainingError, r"lost|in a row", evaluate_each, tiny_agent(), workers, 2, 0)
    refused(TrainingError, r"5 episodes in a row failed: .*lost", evaluate, tiny_agent(), Failing("always"), 1)


def test_workers_of_an_evaluation_change_no_result(tmp_path):
    small = ["rl.evaluation_seeds=each", "rl.episodes=3", "device=cpu", "rl.filters=4", "rl.hidden=[8]"]
    configs = [load_recipe("dot", [*small, f"rl.evaluation_workers={count}"]).config for count in (1, 2)]
    assert configs[0].hash == configs[1].hash != load_recipe("dot", small[1:]).config.hash
    adapters = [build(each, RunFolder(tmp_path), torch.device("cpu"))[0] for each in configs]
    found = [each.evaluate(None) for each in adapters]
    adapters[1]._players.close()
    assert found[0] == found[1]


def test_videos_are_drawn_at_their_size(tiny_agent, tmp_path, opengl):
    env = DotEnv(render_size=112)
    env.reset(seed=0)
    large, small = env.render(), DotEnv()
    env.render = lambda: large[..., :1]
    assert rendered(env).shape == (112, 112, 3)  # grey pictures have three channels in a video
    small.reset(seed=0)
    assert large.shape == (112, 112, 3)
    drawn = np.asarray(small.render(), float)
    assert np.corrcoef(large.reshape(28, 4, 28, 4, 3).mean((1, 3)).ravel(), drawn.ravel())[0, 1] > 0.9
    assert len(np.unique(large)) > len(np.unique(np.kron(drawn, np.ones((4, 4, 1)))))  # not enlarged
    agent = tiny_agent()
    agent.task = {"name": "dot", "settings": {}}
    agent.save(tmp_path / "agent.zip")
    trial(tmp_path / "agent.zip", episodes=1, video=tmp_path / "dot.gif", size=96)
    with Image.open(tmp_path / "dot.gif") as image:
        assert image.size == (96, 96)
    refused(ConfigError, "give --video", trial, tmp_path / "agent.zip", episodes=1, size=96)
    with pytest.raises(ConfigError, match="at most 4096"):  # before the memory of a frame is asked for
        trial(tmp_path / "agent.zip", episodes=1, video=tmp_path / "dot.gif", size=100_000)
    walker = make_env("walker-walk", size=32, render_size=80, rendering="fast")
    walker.reset(seed=0)
    assert walker.render().shape == (80, 80, 3)
    assert walker.reset(seed=0)[0].shape == (9, 32, 32)
