"""Small agents and environments for the tests of the rl domain."""

import json

import pytest

pytest.importorskip("stable_baselines3")

import torch

from dipole.core.utils.errors import DipoleError
from dipole.rl import ContrastiveSAC, WorkerVecEnv, make_env, resume, snapshots
from dipole.rl.envs.suite.rendering import choose_backend
from tests.ranks import run_python, start_method

TINY = {
    "image_size": 24, "hidden": (32,), "filters": 8, "layers": 2, "batch_size": 8, "learning_starts": 10,
    "buffer_size": 400, "seed": 0, "device": "cpu",
}  # fmt: skip
QUICK = ("train.batch_size=8", "rl.learning_starts=20", "rl.episodes=2", "rl.filters=8", "device=cpu")
"""Settings of a short run of a recipe."""


def same(one, two):
    """Return whether two agents have the same weights, bit for bit."""
    found = two.policy.state_dict()
    return all(torch.equal(value, found[name]) for name, value in one.policy.state_dict().items())


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    start_method()  # or the first environment in a worker starts a server that has imported less
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def without_dipole(program, *arguments, cwd):
    """Return the JSON that a program prints where torch and stable-baselines3 are, and dipole seems not installed."""
    first = "import sys, torch\nsys.modules['dipole'] = None\ntorch.set_num_threads(1)\n"
    done = run_python("-c", first + program, *arguments, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="session")
def opengl():
    """Skips the test where nothing can be drawn."""
    try:
        return choose_backend()
    except DipoleError as error:
        pytest.skip(str(error))


def tiny(env=None, kind=ContrastiveSAC, **settings):
    """Return a contrastive agent of milliseconds, on the dot task if no other is given."""
    return kind("CnnPolicy", env if env is not None else make_env("dot"), **{**TINY, **settings})


@pytest.fixture
def tiny_agent():
    return tiny


def assert_resumes(make, env, folder, steps=14, more=4, callback=None, **given):
    """Check that a checkpoint continues as the agent that wrote it. Return both."""
    agent = make(env()).learn(steps, callback)
    snapshots.save(agent, folder / "saved")
    agent.learn(more, reset_num_timesteps=False)
    again = resume(folder / "saved", env(), device="cpu", **given).learn(more, reset_num_timesteps=False)
    assert same(agent, again)
    return agent, again


@pytest.fixture
def workers(request):
    """Environments in processes that end with the test."""

    def make(functions, **settings):
        env = WorkerVecEnv(functions, **settings)
        request.addfinalizer(env.close)
        return env

    return make
