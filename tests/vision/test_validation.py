"""A validation part in place of the test images; and that recipes learn more than an untrained encoder has."""

import numpy as np
import pytest
import torch

from dipole.core.train.metrics import read_metrics
from dipole.core.train.recipe import load as load_recipe
from dipole.core.train.run import train
from dipole.core.utils.errors import ConfigError
from dipole.core.utils.seeding import Seeds
from dipole.vision.data import DataConfig, load
from tests.vision.made import image_folder

SHORT = ["train.epochs=", "train.steps=2", "vision.probe.probes=['knn']", "vision.probe.baselines=false"]
FOLDERS = [f"{split}/{label}" for split in ("train", "test") for label in "ab"]


def rows(images) -> set[bytes]:
    return {bytes(np.ascontiguousarray(image)) for image in torch.as_tensor(images.images[:]).numpy()}


def test_validation_images_are_training_images_that_nothing_else_sees():
    whole, parts = load(DataConfig(), Seeds(3)), load(DataConfig(), Seeds(3), 0.25)
    assert len(parts.test) == len(whole.train) - round(0.75 * len(whole.train))
    assert len(parts.train) + len(parts.test) == len(whole.train)
    test = rows(whole.test) - rows(whole.train)  # some digits are there twice
    assert not test & (rows(parts.pretrain) | rows(parts.train) | rows(parts.test))
    assert not rows(parts.test) & rows(parts.train) - (rows(whole.train) - rows(parts.train))
    assert rows(parts.test) <= rows(whole.train)
    assert rows(parts.pretrain) == rows(parts.train)


def test_the_test_images_are_not_looked_at_and_the_record_says_so(tmp_path):
    image_folder(tmp_path / "images", *FOLDERS, count=24)
    for path in (tmp_path / "images" / "test").rglob("*.png"):
        path.write_bytes(b"no image")
    overrides = [*SHORT, f"vision.data.source={tmp_path / 'images'}", "train.batch_size=16"]
    chosen = load_recipe("digits-simclr", [*overrides, "train.evaluate_on=validation"]).config
    record = train(chosen, tmp_path / "runs", quiet=True)
    assert (record.evaluated_on, record.data["sizes"]) == ("validation", {"pretrain": 38, "train": 38, "test": 10})
    assert 0 <= record.results["knn/accuracy"] <= 1
    plain = load_recipe("digits-simclr", overrides).config
    assert plain.hash != chosen.hash
    with pytest.raises(Exception, match="decode"):
        train(plain, tmp_path / "runs", quiet=True)


def test_curves_are_of_the_validation_part_and_the_test_images_are_read_at_the_end_alone(tmp_path):
    image_folder(tmp_path / "images", *FOLDERS, count=24)
    overrides = [*SHORT, f"vision.data.source={tmp_path / 'images'}", "train.batch_size=16", "train.evaluate_every=1"]
    config = load_recipe("digits-simclr", overrides).config
    record = train(config, tmp_path / "runs", quiet=True)
    assert (record.evaluated_on, record.curves_on) == ("test", "validation")
    assert record.data["sizes"] == {"pretrain": 38, "train": 38, "test": 48, "validation": 10}
    lines = read_metrics(tmp_path / "runs" / record.hash / "metrics.jsonl")
    # Ten images: tenths; forty-eight: others, for the most part.
    drawn = {line["step"]: line["eval/knn/accuracy"] for line in lines if "eval/knn/accuracy" in line}
    assert list(drawn) == [1, 2]
    assert all((10 * value) % 1 == pytest.approx(0) for value in drawn.values())
    (last,) = [line["test/knn/accuracy"] for line in lines if "test/knn/accuracy" in line]
    assert last == pytest.approx(record.results["knn/accuracy"])
    # A run that draws its curves on the test part trains on everything.
    on_test = load_recipe("digits-simclr", [*overrides, "train.curves_on=test"]).config
    assert on_test.hash != config.hash
    assert "curves_on" not in on_test.determining()["train"]
    assert train(on_test, tmp_path / "runs", quiet=True).data["sizes"]["pretrain"] == 48
    for path in (tmp_path / "images" / "test").rglob("*.png"):
        path.write_bytes(b"no image")
    with pytest.raises(Exception, match="decode"):
        train(config, tmp_path / "again", quiet=True)
    lines = read_metrics(tmp_path / "again" / record.hash / "metrics.jsonl")
    assert [line["step"] for line in lines if "eval/knn/accuracy" in line] == [1, 2]


def test_the_same_split_for_pretraining_by_name(tmp_path):
    image_folder(tmp_path, *FOLDERS, count=24)
    parts = load(DataConfig(source=str(tmp_path), pretrain_split="train"), Seeds(0), 0.5)
    assert not rows(parts.pretrain) & rows(parts.test)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["train.validation_share=0.3"], "no effect with evaluate_on 'test'"),
        (["train.curves_on=test"], "evaluate_every alone"),
        (["train.evaluate_on=test1"], "Allowed: test, validation"),
        (["train.evaluate_on=validation", "train.validation_share=1.0"], "less than 1"),
    ],
)
def test_what_does_not_fit_is_said(overrides, said):
    with pytest.raises(ConfigError, match=said):
        load_recipe("digits-simclr", overrides)


def results(tmp_path, *overrides):
    return train(load_recipe("digits-simclr", overrides).config, tmp_path, quiet=True).results


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
    config = load_recipe(f"digits-{method}").config
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
