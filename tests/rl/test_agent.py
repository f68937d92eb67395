"""The agent: every objective and augmentation, objectives that are modules, SB3's interface, and what stops it."""

import dataclasses
import re
from importlib.metadata import requires

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit, TransformObservation
from packaging.requirements import Requirement
from packaging.version import Version
from stable_baselines3 import SAC
from stable_baselines3.common.callbacks import CheckpointCallback, EvalCallback
from stable_baselines3.common.logger import configure
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv

import dipole
from dipole.core.objectives.objective import Composite, Objective
from dipole.core.objectives.pairs import Pairs
from dipole.core.objectives.registry import registry
from dipole.core.utils.errors import CheckpointError, ConfigError, SpecError, TrainingError
from dipole.rl import ContrastiveSAC, DotEnv, make_env, resume, snapshots
from dipole.rl import pixel_agent as agent_module
from dipole.rl.algorithms import open_agent
from dipole.rl.contrast import duplicates
from dipole.rl.networks import PixelEncoder
from dipole.rl.settings import CURL_OBJECTIVE, PRESETS
from tests.rl.conftest import same
from tests.runs import refused

# "blocks" has more negative blocks here than a small trial batch would have.
OBJECTIVES = [
    "none", "infonce(similarity=bilinear, temperature=1)", "infonce(similarity=bilinear) + 0.1*dp", "dcl",
    "hcl(similarity=cosine)", "align_uniform", "infonce + cllr(norm=nuclear)",
    "infonce + cllr(norm=l21, solver=proximal)", "cacr(k=3)", "co2", "triplet", "swav(prototypes=5)", "vicreg",
    "barlow_twins", "quickthoughts", "blocks(b=1, k=6)",
]  # fmt: skip


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_trains(tiny_agent, objective):
    agent = tiny_agent(objective=objective)
    agent.learn(14)
    assert agent._n_updates == 4
    assert agent._positives == {"none": 0, "cacr(k=3)": 3}.get(objective, 1)
    assert all(p.isfinite().all() for p in agent.policy.parameters())
    assert ("train/contrast_loss" in agent.logger.name_to_value) == (objective != "none")


@pytest.mark.parametrize("settings", [{"joint_backward": True}, {"encoder_steps": 1}, {"precision": "bf16"}])
def test_learned_parameters_of_the_objective_move(tiny_agent, settings):
    agent = tiny_agent(objective="infonce(similarity=bilinear) + cllr", **settings)
    W = agent.contrast.terms[0].W
    assert ((W >= 0) & (W < 1)).all()  # the repository's start
    before = [p.detach().clone() for p in agent.contrast.parameters()]
    agent.learn(12)
    assert all(not torch.equal(a, b) for a, b in zip(before, agent.contrast.parameters(), strict=True))


@pytest.mark.parametrize("augmentation", ["crop", "shift", "none", lambda images: images[..., 1:25, 1:25].float()])
def test_every_augmentation_trains_and_acts(tiny_agent, augmentation):
    agent = tiny_agent(augmentation=augmentation)
    agent.learn(13)
    observation, _ = make_env("dot").reset(seed=0)
    action, _ = agent.predict(observation, deterministic=True)
    assert action.shape == (2,)
    # Acting looks at the middle of the frame.
    other = observation.copy()
    other[:, :2] = other[:, -2:] = 255
    np.testing.assert_array_equal(agent.predict(other, deterministic=True)[0], action)


def test_presets_hold_the_published_settings():
    curl, paper = PRESETS["curl"], PRESETS["paper"]
    assert (curl.batch_size, curl.encoder_steps, curl.crop_inclusive, curl.twin_loss) == (128, 2, False, "sum")
    assert (paper.batch_size, paper.encoder_steps, paper.crop_inclusive, paper.twin_loss) == (512, 1, True, "half")
    for preset in (curl, paper):
        assert (preset.tau, preset.encoder_tau, preset.gamma, preset.initial_temperature) == (0.01, 0.05, 0.99, 0.1)
        assert (preset.learning_rate, preset.temperature_learning_rate, preset.temperature_beta) == (1e-3, 1e-4, 0.5)
        assert (preset.hidden, preset.features, preset.filters, preset.layers) == ((1024, 1024), 50, 32, 4)
        assert (preset.actor_every, preset.target_every, preset.contrast_every) == (2, 2, 1)
        assert preset.objective == CURL_OBJECTIVE == "infonce(similarity=bilinear, temperature=1)"


def test_save_load_and_predict(tiny_agent, tmp_path):
    agent, twin = (tiny_agent(objective="infonce(similarity=bilinear) + 0.1*dp").learn(14) for _ in range(2))
    assert same(agent, twin)  # of one seed
    agent.save(tmp_path / "agent-1.0.zip")
    loaded = ContrastiveSAC.load(tmp_path / "agent-1.0", device="cpu")
    assert str(loaded.contrast) == str(agent.contrast)
    observation, _ = make_env("dot").reset(seed=0)
    for deterministic in (True, False):
        torch.manual_seed(0)
        expected = agent.predict(observation, deterministic=deterministic)[0]
        torch.manual_seed(0)
        np.testing.assert_array_equal(loaded.predict(observation, deterministic=deterministic)[0], expected)
    assert torch.equal(loaded.contrast.terms[0].W, agent.contrast.terms[0].W)
    for name in ("encoder_optimizer", "contrast_optimizer", "ent_coef_optimizer"):
        one, two = (getattr(each, name).state_dict()["state"][0]["exp_avg"] for each in (agent, loaded))
        assert torch.equal(one, two)


def test_a_failing_save_leaves_the_old_file(tiny_agent, tmp_path, monkeypatch):
    agent = tiny_agent()
    agent.save(tmp_path / "agent.zip")
    before = (tmp_path / "agent.zip").read_bytes()

    def broken(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", broken)
    refused(CheckpointError, "cannot write .*agent.zip: disk full", agent.save, tmp_path / "agent.zip")
    assert (tmp_path / "agent.zip").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["agent.zip"]


def test_several_environments_update_once_for_each_transition_and_channels_last_are_transposed(tiny_agent):
    agent = tiny_agent(DummyVecEnv([DotEnv, DotEnv, DotEnv])).learn(30)
    assert agent._n_updates == 21  # three after each of the rollouts that end at 12, 15, ..., 30
    assert agent.environment_steps == len(agent.replay_buffer) == 30
    last = spaces.Box(0, 255, (36, 36, 9), np.uint8)
    env = TransformObservation(DotEnv(size=36), lambda image: image.transpose(1, 2, 0), last)
    agent = tiny_agent(env, image_size=30).learn(13)
    assert agent.observation_space.shape == (9, 36, 36)
    assert agent.replay_buffer.sample(2).observations.shape == (2, 9, 36, 36)


def test_callbacks_and_loggers_of_sb3_work(tiny_agent, tmp_path):
    agent = tiny_agent(TimeLimit(DotEnv(), 6))
    agent.set_logger(configure(str(tmp_path), ["csv"]))
    env = Monitor(TimeLimit(DotEnv(), 6))
    best = EvalCallback(env, n_eval_episodes=1, eval_freq=12, log_path=str(tmp_path), verbose=0)
    agent.learn(24, log_interval=1, callback=[best, CheckpointCallback(8, str(tmp_path), save_replay_buffer=True)])
    assert len(np.load(tmp_path / "evaluations.npz")["results"]) == 2
    loaded = ContrastiveSAC.load(tmp_path / "rl_model_24_steps.zip", device="cpu")
    loaded.load_replay_buffer(tmp_path / "rl_model_replay_buffer_24_steps.pkl")
    for other in (SAC("CnnPolicy", DotEnv(size=36), buffer_size=9), tiny_agent(DotEnv(size=36))):
        other.save_replay_buffer(tmp_path / "other")
        refused(ConfigError, "no FrameReplayBuffer of the agent's env", loaded.load_replay_buffer, tmp_path / "other")
    refused(CheckpointError, "cannot be loaded: .*No such file", loaded.load_replay_buffer, tmp_path / "nowhere")
    assert len(loaded.replay_buffer) == 23  # SB3 calls callbacks before it stores the step
    header = (tmp_path / "progress.csv").read_text().splitlines()[0].split(",")
    assert {"train/contrast_loss", "train/critic_loss", "train/ent_coef", "time/environment_steps"} <= set(header)


def test_duplicates_are_not_negatives():
    ignored = duplicates(np.array([[0, 1], [0, 2], [0, 1], [0, 3], [0, 1]]), positives=2)
    queries, keys = torch.randn(5, 4), torch.randn(5, 2, 4)
    pairs = Pairs.cross(queries, keys, ignored=ignored)
    twins = {0: {2, 4}, 2: {0, 4}, 4: {0, 2}}
    for anchor in range(5):
        expected = {twin + 5 * view for twin in twins.get(anchor, ()) for view in range(2)}
        assert set(pairs.ignored[anchor].tolist()) - {-1} == expected
    assert pairs.negative_counts.tolist() == [4, 8, 4, 8, 4]
    assert duplicates(np.arange(4)[:, None], 1) is None


@pytest.mark.parametrize("excludes", [True, False])
def test_same_pixels_of_two_environments_are_duplicates(tiny_agent, excludes):
    frames = np.random.default_rng(0).integers(0, 256, (2, 9, 28, 28), dtype=np.uint8)
    agent = tiny_agent(DummyVecEnv([DotEnv, DotEnv]), exclude_duplicates=excludes, augmentation="none")
    for step in range(6):  # two environments that each show picture A, then B, then A, ...
        seen = frames[[step % 2] * 2]
        agent.replay_buffer.add(seen, frames[[1 - step % 2] * 2], np.zeros((2, 2)), np.zeros(2), np.zeros(2), [{}, {}])
    batch = agent.replay_buffer.sample_views(32, agent._augment, 1)
    shows = [np.array_equal(each, frames[1][:, 2:-2, 2:-2]) for each in batch.observations.numpy()]
    alike = [shows.count(shown) if excludes else 1 for shown in shows]
    pairs = agent.make_pairs(batch, agent.policy.encoder(batch.observations))
    assert pairs.negative_counts.tolist() == [32 - each for each in alike]


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("term", ["critic", "dp"])
def test_a_loss_that_is_not_finite_stops_before_the_step(tiny_agent, term, joint):
    agent = tiny_agent(objective="infonce + dp", joint_backward=joint)
    agent.learn(12)
    batch = agent.replay_buffer.sample_views(8, agent._augment, 1)
    if term == "critic":
        batch.rewards[0] = torch.nan
    else:
        agent.contrast.terms[1].loss = lambda positive, rows: positive.sum() * torch.nan
    guarded = [*(agent.critic if term == "critic" else agent.contrast).parameters(), *agent.policy.encoder.parameters()]
    before, original = [], agent._contrastive_loss

    def snapshot(*given):
        before[:] = [p.detach().clone() for p in guarded]
        return original(*given)

    agent._contrastive_loss = snapshot
    if term == "critic":
        before = [p.detach().clone() for p in guarded]
    refused(TrainingError, rf"the {term} loss is nan at update \d+ \(12 environment steps\)", agent.update, batch)
    assert all(torch.equal(a, b) for a, b in zip(before, guarded, strict=True))


def test_a_gradient_that_is_not_finite_names_the_term_and_emulated_bf16_warns(tiny_agent, monkeypatch):
    agent = tiny_agent(objective="infonce + dp").learn(12)
    batch = agent.replay_buffer.sample_views(8, agent._augment, 1)
    # Of value 0 and infinite gradient.
    agent.contrast.terms[1].loss = lambda positive, rows: (positive - positive.detach()).sqrt().sum()
    refused(TrainingError, r"gradient of the contrastive loss is not finite.*the term dp", agent.update, batch)
    assert all(p.isfinite().all() for p in agent.policy.parameters())
    monkeypatch.setattr(agent_module, "bf16_is_native", lambda device: False)
    with pytest.warns(RuntimeWarning, match="emulated"):
        tiny_agent(precision="bf16")


@pytest.mark.parametrize(("settings", "said"), [
    ({"batch_sise": 8}, "no setting 'batch_sise'. Did you mean 'batch_size'"),
    ({"batch_size": 8.5}, "batch_size: should be a valid integer"),
    ({"batch_size": len}, "batch_size: should be a valid integer"),
    ({"joint_backward": 1}, "joint_backward: should be a valid boolean"),
    ({"layers": 12}, "too small for 12 convolutions: they need 47"),
    ({"batch_size": None}, "batch_size: should be a valid integer, got null"),
    ({"seed": -1}, "seed must be an integer from 0 to 2**32 - 1, or None, got -1"),
    ({"ent_coef": -1}, "ent_coef: must be 'auto' or a number >= 0, got -1"),
    ({"action_noise": 3}, "action_noise must be an ActionNoise of SB3"),
    ({"replay_buffer_class": "her"}, "replay_buffer_class must derive from FrameReplayBuffer, got 'her'"),
    ({"replay_buffer_kwargs": {"n_steps": 3}}, "n_steps is a setting of the agent: give it there"),
    ({"replay_buffer_kwargs": {"goals": 1}}, "replay_buffer_kwargs {'goals': 1} do not fit FrameReplayBuffer"),
    ({"device": "gpu"}, "device must be 'auto', 'cpu', 'cuda' or such, got 'gpu'"),
    ({"verbose": "yes"}, "verbose must be an integer >= 0, got 'yes'"),
    ({"stats_window_size": -1}, "stats_window_size must be an integer >= 0, got -1"),
    ({"tensorboard_log": 3}, "tensorboard_log must be a folder, or None, got 3"),
    ({"objective": "tuple"}, "the objective tuple cannot run inside an agent: tuple is supervised"),
    ({"objective": "cacr(k=4)", "positives": 1}, "the objective cacr(k=4) cannot run inside an agent"),
    ({"objective": "infonse"}, "infonce"), ({"objective": torch.nn.Linear(2, 2)}, "objective must be a text"),
    ({"image_size": None, "augmentation": lambda images: images / 255}, "returns values from 0 to 1, but"),
    ({"env": gymnasium.wrappers.DtypeObservation(DotEnv(), np.float32)}, "needs uint8 images"),
])  # fmt: skip
def test_wrong_settings_raise_errors_that_name_them(tiny_agent, settings, said):
    refused((ConfigError, SpecError), re.escape(said), tiny_agent, **settings)


def test_settings_may_be_numpy_numbers_schedules_and_policy_kwargs_of_sb3(tiny_agent):
    """SB3 and gymnasium take Python's alone: a temperature of np.float64 would be read out of its text."""
    numbers = {"batch_size": np.int64(8), "initial_temperature": np.float64(0.2), "learning_rate": np.float32(0.5)}
    agent = tiny_agent(**numbers, seed=np.int64(3))
    assert (agent.settings.batch_size, agent.settings.learning_rate, agent.seed) == (8, 0.5, 3)
    assert float(agent.log_ent_coef.detach().exp()) == pytest.approx(0.2)
    assert DotEnv(size=np.int64(20)).reset(seed=np.uint32(7))[0].shape == (9, 20, 20)
    agent = tiny_agent(learning_rate=lambda remaining: 1e-3 * remaining, encoder_learning_rate=5e-4).learn(20)
    rates = [each.param_groups[0]["lr"] for each in (agent.contrast_optimizer, agent.ent_coef_optimizer)]
    assert (agent.critic.optimizer.param_groups[0]["lr"] < 1e-3, *rates) == (True, 5e-4, 1e-4)
    kwargs = {"policy_kwargs": {"net_arch": [16, 8]}, "buffer_size": 50, "preset": "small", "device": "cpu"}
    assert ContrastiveSAC("CnnPolicy", "dot", **kwargs).settings.hidden == (16, 8)


def test_a_fixed_entropy_weight_stays(tiny_agent, tmp_path):
    for weight in (0.2, 0):
        agent = tiny_agent(ent_coef=weight).learn(16)
        agent.save(tmp_path / "agent.zip")
        for each in (agent, ContrastiveSAC.load(tmp_path / "agent.zip", device="cpu")):
            assert each.temperature().item() == pytest.approx(weight)
    assert tiny_agent(ent_coef="auto_0.3").log_ent_coef.exp().item() == pytest.approx(0.3)


def test_chunks_and_memory_format_do_not_change_the_embedding_nor_float_images():
    space = spaces.Box(0, 255, (9, 28, 28), np.uint8)
    images = torch.randint(0, 256, (7, 9, 28, 28), dtype=torch.uint8)
    kinds = [(0, False), (3, False), (3, True)]
    encoders = [PixelEncoder(space, image_size=24, chunk=chunk, channels_last=last) for chunk, last in kinds]
    for encoder in encoders[1:]:
        encoder.load_state_dict(encoders[0].state_dict())
    whole, chunked, last = (encoder(images) for encoder in encoders)
    assert torch.allclose(whole, chunked, atol=1e-5)
    assert torch.allclose(whole, last, atol=1e-4)
    images = torch.full((2, 9, 24, 24), 51.0)  # an augmentation may make floats
    (prepared,) = encoders[0].prepare(images)
    assert (images == 51).all()
    torch.testing.assert_close(prepared, torch.full_like(images, 0.2))


def test_returns_of_several_steps_reach_the_target(tiny_agent):
    agent = tiny_agent(n_steps=3, gamma=0.9).learn(30)
    batch = agent._sample(64)
    found = {round(float(each), 4) for each in batch.discounts}
    assert found <= {0.9, 0.81, 0.729}
    assert 0.729 in found
    torch.manual_seed(0)
    target = agent.target(batch)
    torch.manual_seed(0)
    single = agent.target(dataclasses.replace(batch, discounts=None))
    shares = batch.discounts / 0.9
    torch.testing.assert_close(target - batch.rewards, (single - batch.rewards) * shares)


def wide():
    """Return the dot task, its images cut to 28 x 20."""
    space = spaces.Box(0, 255, (9, 28, 20), np.uint8)
    return TransformObservation(DotEnv(), lambda image: image[:, :, 4:24].copy(), space)


@pytest.mark.parametrize("augmentation", ["crop", "shift", "none", lambda images: images[:, :, 2:-2]])
def test_images_need_not_be_square(tiny_agent, tmp_path, augmentation):
    agent = tiny_agent(wide(), image_size=None, augmentation=augmentation)
    agent.learn(14)
    seen = {"crop": (24, 17), "shift": (28, 20), "none": (28, 20)}.get(str(augmentation), (24, 20))
    assert agent.policy.encoder.image_size == seen
    observation = wide().reset(seed=0)[0]
    expected = agent.predict(observation, deterministic=True)[0]
    agent.save(tmp_path / "agent.zip")
    given = {"augmentation": augmentation} if callable(augmentation) else {}
    again = open_agent(tmp_path / "agent.zip", ContrastiveSAC, wide(), "cpu", **given)
    assert (again.predict(observation, deterministic=True)[0] == expected).all()


@pytest.mark.parametrize(
    ("joint", "mode"), [pytest.param(True, True, marks=pytest.mark.slow), (False, "reduce-overhead")]
)
def test_compiled_the_agent_is_the_same(tiny_agent, monkeypatch, joint, mode, tmp_path):
    """Traced by Dynamo and run as it was written. What Inductor fuses is rounded otherwise."""
    plain = tiny_agent(objective="infonce + dp", joint_backward=joint).learn(14)
    traced, marks, graphs = {}, [], []

    def backend(graph, inputs):
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    def compile_eagerly(function, mode, **options):
        traced[function.__name__] = mode
        return original(function, backend=backend, **options)

    def mark():
        marks.append(compiled.num_timesteps)
        begin()

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    original, begin = torch.compile, torch.compiler.cudagraph_mark_step_begin
    monkeypatch.setattr(torch, "compile", compile_eagerly)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", mark)
    compiled = tiny_agent(objective="infonce + dp", joint_backward=joint, compile=mode)
    compiled.learn(14)
    assert traced == dict.fromkeys(("convolve", "head", "distribution"), None if mode is True else mode)
    # Every call is one graph: a break would give a part back to Python.
    assert graphs
    if Version(torch.__version__) >= Version("2.12"):  # 2.11 cannot trace whether there is autocast
        assert not torch._dynamo.utils.counters["graph_break"]
    # A CUDA graph may write over what it returned before each action and each update, and never within one.
    assert len(marks) == (0 if mode is True else 4 + 4)
    for name, value in plain.policy.state_dict().items():
        assert torch.equal(compiled.policy.state_dict()[name], value), name
    compiled.save(tmp_path / "agent.zip")
    assert open_agent(tmp_path / "agent.zip", type(plain), device="cpu").settings.compile == mode


def asked(package: str, python: str, extra: str = "") -> dict[str, Requirement]:
    lines = [Requirement(each) for each in requires(package) or []]
    place = {"python_version": python, "extra": extra}
    return {each.name.lower(): each for each in lines if each.marker is None or each.marker.evaluate(place)}


def test_the_extra_asks_for_dm_control_and_from_3_13_for_its_dependencies_except_labmaze():
    assert asked("dipole", "3.12", "rl").keys() & {"dm-control", "dm-tree"} == {"dm-control"}
    for python in ("3.13", "3.14"):
        ours = asked("dipole", python, "rl")
        assert "dm-control" not in ours
        assert asked("dm-control", python).keys() - ours.keys() - {"labmaze"} == set()


class Scaled(Objective):
    """Squared distance to the positive, times a learnt scale. It is registered nowhere."""

    needs_negatives = False

    def __init__(self, target: float = 1.0) -> None:
        super().__init__("cosine")
        self.target = target
        self.scale = torch.nn.Parameter(torch.tensor(3.0))

    def loss(self, positive, rows):
        return (self.scale * (1 - positive) - 0.1 * self.target).square().sum(1)


def test_composite_keeps_its_weights_and_lazy_ones_get_the_agents_width(tiny_agent, tmp_path):
    given = dipole.objective("infonce(similarity=bilinear) + 0.5*swav(prototypes=5)", dim=50)
    with torch.no_grad():
        given.terms[0].W.fill_(0.25)
    start = [p.detach().clone() for p in given.parameters()]
    agent = tiny_agent(objective=given)
    assert agent.contrast is given
    assert all(torch.equal(a, b) for a, b in zip(start, given.parameters(), strict=True))
    agent.learn(14)
    assert all(not torch.equal(a, b) for a, b in zip(start, given.parameters(), strict=True))
    agent.save(tmp_path / "agent.zip")
    loaded = ContrastiveSAC.load(tmp_path / "agent.zip", device="cpu")
    assert loaded.settings.objective == str(given)
    assert same(agent, loaded)
    W = tiny_agent(objective=dipole.objective("infonce(similarity=bilinear)"), features=20).contrast.terms[0].W
    assert W.shape == (20, 20)
    assert ((W >= 0) & (W < 1)).all()
    assert not torch.equal(W.detach(), torch.eye(20))


@pytest.mark.parametrize(
    "wrap", [lambda term: term, lambda term: Composite([term, dipole.objective("dp").terms[0]], [1.0, 0.1])]
)
def test_unregistered_terms_train_and_load(tiny_agent, tmp_path, wrap):
    agent = tiny_agent(objective=wrap(Scaled(target=2.0)))
    agent.learn(14)
    term = agent.contrast.terms[0]
    assert float(term.scale.detach()) != 3.0
    folder = snapshots.save(agent, tmp_path / "saved")
    for load_again in (
        lambda **given: ContrastiveSAC.load(folder / "agent.zip", device="cpu", **given),
        lambda **given: resume(folder, make_env("dot"), device="cpu", **given),
    ):
        refused(ConfigError, r"not registered \(.*Scaled\): give it when loading.*objective=", load_again)
        again = load_again(objective=wrap(Scaled(target=2.0)))
        assert same(agent, again)
    again.learn(4, reset_num_timesteps=False)
    assert float(again.contrast.terms[0].scale.detach()) != float(term.scale.detach())
    other = dipole.objective("infonce(similarity=bilinear)")
    with pytest.raises(ConfigError, match="was saved with another objective"):
        ContrastiveSAC.load(folder / "agent.zip", device="cpu", objective=other)


def test_registered_term_that_is_not_imported_raises_an_error(tiny_agent, tmp_path):
    with registry.temporary():
        registry.register("scaled_once")(Scaled)
        tiny_agent(objective="scaled_once(target=2)").save(tmp_path / "agent.zip")
    with pytest.raises(ConfigError, match=r"(?s)'scaled_once'.*Import the module that registers it"):
        ContrastiveSAC.load(tmp_path / "agent.zip", device="cpu")
