"""Contrastive training makes the encoder better: the shipped digits recipe, short and whole."""

import pytest

from dipole.core.train.metrics import read_metrics
from dipole.core.train.recipe import load
from dipole.core.train.run import train


def results(tmp_path, *overrides):
    return train(load("digits-simclr", overrides).config, tmp_path, quiet=True).results


def test_a_short_run_beats_the_untrained_encoder(tmp_path):
    found = results(tmp_path, "train.epochs=8", "vision.encoder.width=8", "vision.probe.probes=['few_shot', 'kmeans']")
    assert found["few_shot/accuracy"] > found["untrained/few_shot/accuracy"] + 0.02
    assert found["kmeans/accuracy"] > found["untrained/kmeans/accuracy"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_the_digits_recipe_reaches_its_bars(tmp_path, seed):
    found = results(tmp_path, f"seed={seed}")
    assert found["linear/accuracy"] >= 0.985
    assert found["few_shot/accuracy"] >= found["untrained/few_shot/accuracy"] + 0.06
    assert found["kmeans/accuracy"] >= found["untrained/kmeans/accuracy"] + 0.10


@pytest.mark.slow
@pytest.mark.parametrize("method", ["simsiam", "byol", "mocov3", "nnclr", "vicreg", "barlow"])
def test_every_method_learns_and_none_collapses(tmp_path, method):
    config = load(f"digits-{method}").config
    found = train(config, tmp_path, quiet=True).results
    for probe in ("linear", "few_shot", "knn"):
        assert found[f"{probe}/accuracy"] > found[f"untrained/{probe}/accuracy"]
    assert found["online/accuracy"] > 0.9
    lines = [line for line in read_metrics(tmp_path / config.hash / "metrics.jsonl") if "train/loss" in line]
    if method in ("simsiam", "byol", "mocov3", "nnclr"):
        assert all(line["train/spread"] > 0.3 for line in lines)


@pytest.mark.slow
def test_training_helps_on_real_images(tmp_path, shared_data):
    """The first run of the suite `cifar10-learning`: InfoNCE above the untrained encoder and the raw pixels."""
    from dipole.benchmarks.suite import read_suite

    parts = {"source": "train", "test": "test"}
    files = [f"vision.data.{key}={shared_data}/cifar10/cifar10_{part}.npz" for key, part in parts.items()]
    jobs = read_suite("cifar10-learning").at("small", files).jobs()
    job = next(job for job in jobs if job.config.name.endswith("/infonce"))
    found = train(job.config, tmp_path, quiet=True).results
    for probe, margin in (("linear", 0.02), ("few_shot", 0.02), ("knn", 0.05)):
        rivals = (found[f"{name}/{probe}/accuracy"] for name in ("untrained", "raw"))
        assert found[f"{probe}/accuracy"] > max(rivals) + margin
