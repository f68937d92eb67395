"""Runs for tests of every domain: interrupt one, find its folder, and read what it logged."""

import signal
from contextlib import contextmanager

import pytest
from safetensors.torch import load_file

from dipole import Objective
from dipole.core.cli import main
from dipole.core.train.metrics import read_metrics
from dipole.core.train.recipe import load_recipe
from dipole.core.train.run import train


@contextmanager
def interrupted(owner, method, call, signum=signal.SIGINT):
    """Send a signal to this process at one call of a method, counted from 1."""
    original, calls = getattr(owner, method), []

    def stopping(self, *given):
        calls.append(1)
        if len(calls) == call:
            signal.raise_signal(signum)
        return original(self, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, method, stopping)
        yield calls


def run_of(recipe, runs, *settings):
    """Train a recipe without output and return its record."""
    return train(load_recipe(recipe, settings).config, runs, quiet=True)


def commanded(recipe, runs, *settings):
    """Train a recipe by the command line and return the folder of its run."""
    sets = ["--set", *settings] if settings else []
    assert main(["train", str(recipe), "--runs", str(runs), "--quiet", *sets]) == 0
    (run,) = (path for path in runs.iterdir() if path.is_dir())
    return run


def logged(run, key="train/loss"):
    """Return the lines of the metrics that hold a key."""
    return [line for line in read_metrics(run / "metrics.jsonl") if key in line]


def assert_same_weights(run, other):
    """Compare the weights of two runs bit for bit."""
    assert (run / "model").is_dir()
    for file in (run / "model").glob("*.safetensors"):
        one, two = load_file(file), load_file(other / "model" / file.name)
        assert one.keys() == two.keys()
        assert all(one[name].equal(two[name]) for name in one)


class Record:
    """A run's record as far as a model card reads it."""

    def __init__(self, **changes):
        values = {
            "name": "tiny", "objective": "infonce(temperature=0.2) + 0.1*dp", "seed": 0, "epochs": 1.0,
            "hash": "0" * 12, "results": {"next@1": 0.5, "lost": None}, "versions": {},
            "data": {"name": "hub:somebody/books", "sizes": {}},
        }  # fmt: skip
        self.__dict__ |= values | changes


class Counts(Objective):
    """Notes the place and the learning rate of its steps."""

    needs_negatives = False

    def __init__(self):
        super().__init__("cosine")
        self.seen, self.rates = [], []

    def loss(self, positive, rows):
        return -rows.over_positives(positive)

    def after_step(self, learning_rate, weight, step=None, total=None):
        self.seen.append((step, total))
        self.rates.append(learning_rate)


def refused(error, words, call, *given, **settings):
    """Check that a call raises an error whose message has these words."""
    with pytest.raises(error, match=words):
        call(*given, **settings)
