"""An objective that is a module: its weights are kept, trained, saved and exported, registered or not."""

import numpy as np
import pytest
import torch
from stable_baselines3 import SAC

import dipole
from dipole.core.objectives.objective import Composite, Objective
from dipole.core.objectives.registry import registry
from dipole.core.train.recipe import load
from dipole.core.train.run import train
from dipole.core.train.run_folder import RunFolder
from dipole.core.train.trained_run import load_run
from dipole.core.utils.errors import ConfigError
from dipole.rl import ContrastiveCallback, ContrastiveSAC, DotEnv, make_env, resume, snapshots
from tests.rl.conftest import QUICK, same


class Scaled(Objective):
    """Squared distance to the positive, times a learnt scale; registered nowhere."""

    needs_negatives = False

    def __init__(self, target: float = 1.0) -> None:
        super().__init__("cosine")
        self.target = target
        self.scale = torch.nn.Parameter(torch.tensor(3.0))

    def loss(self, positive, rows):
        return (self.scale * (1 - positive) - 0.1 * self.target).square().sum(1)


def test_composite_keeps_its_weights(tiny_agent, tmp_path):
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


def test_lazy_parameters_get_the_agents_width(tiny_agent):
    given = dipole.objective("infonce(similarity=bilinear)")
    agent = tiny_agent(objective=given, features=20)
    W = agent.contrast.terms[0].W
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
        with pytest.raises(ConfigError, match=r"not registered \(.*Scaled\): give it when loading.*objective="):
            load_again()
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


def test_wrong_objective_types_raise_errors(tiny_agent):
    with pytest.raises(ConfigError, match="objective must be a text"):
        tiny_agent(objective=torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="Leave the callback out"):
        ContrastiveCallback("none")


def test_the_callback_trains_the_module_it_is_given():
    term = Scaled()
    settings = {"buffer_size": 100, "learning_starts": 10, "batch_size": 8, "device": "cpu", "seed": 0}
    agent = SAC("CnnPolicy", DotEnv(size=36), policy_kwargs={"net_arch": [8]}, **settings)
    callback = ContrastiveCallback(term, batch_size=8)
    agent.learn(14, callback=callback)
    assert callback.contrast.terms[0] is term
    assert float(term.scale.detach()) != 3.0


def test_an_export_holds_the_trained_objective_and_the_runs_settings(tmp_path):
    settings = [*QUICK, "objective=infonce(similarity=bilinear) + 0.5*dp", "train.steps=120", "rl.beta=0.8"]
    config = load("dot", [*settings, "train.evaluate_every=60", "train.learning_rate=3e-4"]).config
    train(config, tmp_path / "runs", quiet=True)
    record, adapter, objective = load_run(RunFolder(tmp_path / "runs" / config.hash), "cpu")
    adapter.module.eval()
    adapter.export("sb3", tmp_path, record, objective)
    agent = ContrastiveSAC.load(tmp_path / "agent.zip", env=make_env("dot"), device="cpu")
    assert agent.settings.objective == config.objective == str(agent.contrast)
    assert (agent.learning_rate, agent.settings.learning_rate) == (3e-4, 3e-4)
    assert (agent.settings.batch_size, agent.settings.beta) == (16, 0.8)
    assert torch.equal(agent.contrast.terms[0].W, objective.terms[0].W)
    assert not torch.equal(agent.contrast.terms[0].W.detach().round(), torch.eye(50))
    seen = make_env("dot").reset(seed=0)[0]
    expected = adapter.agent.predict(seen, deterministic=True)[0]
    np.testing.assert_array_equal(agent.predict(seen, deterministic=True)[0], expected)
    temperature = float(agent.log_ent_coef.detach().exp())
    assert temperature != pytest.approx(config.rl.initial_temperature)  # trained, and carried
    assert (agent.num_timesteps, agent.environment_steps) == (120, 120)
    W = agent.contrast.terms[0].W.detach().clone()
    agent.learn(50)
    assert agent._n_updates > 0
    assert not torch.equal(W, agent.contrast.terms[0].W)
