"""Contrastive training makes the encoder better: the shipped digits recipe, short and whole."""

import pytest

from dipole.core.config import load
from dipole.core.trainer import train


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
