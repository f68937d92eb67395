"""Runs: a validation part in place of the test images, recipes that learn, and the online linear probe."""

import copy
import math

import numpy as np
import pytest
import torch

from dipole.benchmarks.suite import read_suite
from dipole.core.train.recipe import load_recipe
from dipole.core.train.run import train
from dipole.core.utils.errors import ConfigError
from dipole.core.utils.seeding import Seeds
from dipole.vision.data import DataConfig, load
from dipole.vision.encoders import EncoderConfig, build_encoder
from dipole.vision.frameworks.base import Branch
from dipole.vision.frameworks.predictor import spread
from dipole.vision.probes import OnlineConfig, OnlineProbe
from tests.ranks import from_ranks
from tests.runs import assert_same_weights, logged, refused, run_of
from tests.vision.made import SHORT_RUN, image_folder, make_adapter, random_framework, unlabelled_file

SHORT = ["train.epochs=", "train.steps=2", "vision.probe.probes=['knn']", "vision.probe.baselines=false"]
FOLDERS = [f"{split}/{label}" for split in ("train", "test") for label in "ab"]


def rows(images) -> set[bytes]:
    return {bytes(np.ascontiguousarray(image)) for image in torch.as_tensor(images.images[:]).numpy()}


def test_validation_images_are_training_images_that_nothing_else_sees(tmp_path):
    whole, parts = load(DataConfig(), Seeds(3)), load(DataConfig(), Seeds(3), 0.25)
    assert len(parts.test) == len(whole.train) - round(0.75 * len(whole.train))
    assert len(parts.train) + len(parts.test) == len(whole.train)
    test = rows(whole.test) - rows(whole.train)  # some digits are there twice
    assert not test & (rows(parts.pretrain) | rows(parts.train) | rows(parts.test))
    assert not rows(parts.test) & rows(parts.train) - (rows(whole.train) - rows(parts.train))
    assert rows(parts.test) <= rows(whole.train)
    assert rows(parts.pretrain) == rows(parts.train)
    image_folder(tmp_path, *FOLDERS, count=24)
    parts = load(DataConfig(source=str(tmp_path), pretrain_split="train"), Seeds(0), 0.5)  # the same split by its name
    assert not rows(parts.pretrain) & rows(parts.test)


@pytest.fixture
def folder(tmp_path):
    """Training and test images in folders, and the settings of a short run on them."""
    image_folder(tmp_path / "images", *FOLDERS, count=24)
    return [*SHORT, f"vision.data.source={tmp_path / 'images'}", "train.batch_size=16"]


def damage_test_images(tmp_path):
    for path in (tmp_path / "images" / "test").rglob("*.png"):
        path.write_bytes(b"no image")


def test_the_test_images_are_not_looked_at_and_the_record_says_so(tmp_path, folder):
    damage_test_images(tmp_path)
    record = run_of("digits-simclr", tmp_path / "runs", *folder, "train.evaluate_on=validation")
    assert (record.evaluated_on, record.data["sizes"]) == ("validation", {"pretrain": 38, "train": 38, "test": 10})
    assert 0 <= record.results["knn/accuracy"] <= 1
    assert load_recipe("digits-simclr", folder).config.hash != record.hash
    refused(Exception, "decode", run_of, "digits-simclr", tmp_path / "runs", *folder)


def test_curves_are_of_the_validation_part_and_the_test_images_are_read_at_the_end_alone(tmp_path, folder):
    folder.append("train.evaluate_every=1")
    record = run_of("digits-simclr", tmp_path / "runs", *folder)
    assert (record.evaluated_on, record.curves_on) == ("test", "validation")
    assert record.data["sizes"] == {"pretrain": 38, "train": 38, "test": 48, "validation": 10}
    # Ten images: tenths. Forty-eight: others, for the most part.
    drawn = logged(tmp_path / "runs" / record.hash, "eval/knn/accuracy")
    assert [line["step"] for line in drawn] == [1, 2]
    assert all((10 * line["eval/knn/accuracy"]) % 1 == pytest.approx(0) for line in drawn)
    (last,) = logged(tmp_path / "runs" / record.hash, "test/knn/accuracy")
    assert last["test/knn/accuracy"] == pytest.approx(record.results["knn/accuracy"])
    # A run that draws its curves on the test part trains on everything.
    on_test = load_recipe("digits-simclr", [*folder, "train.curves_on=test"]).config
    assert on_test.hash != record.hash
    assert "curves_on" not in on_test.determining()["train"]
    assert train(on_test, tmp_path / "runs", quiet=True).data["sizes"]["pretrain"] == 48
    damage_test_images(tmp_path)
    refused(Exception, "decode", run_of, "digits-simclr", tmp_path / "again", *folder)
    assert [line["step"] for line in logged(tmp_path / "again" / record.hash, "eval/knn/accuracy")] == [1, 2]


@pytest.mark.parametrize(("overrides", "said"), [
    (["train.validation_share=0.3"], "no effect with evaluate_on 'test'"),
    (["train.curves_on=test"], "evaluate_every alone"), (["train.evaluate_on=test1"], "Allowed: test, validation"),
    (["vision.probe.online.momentum=0.9"], "momentum has no effect with optimizer 'adam'"),
    (["train.evaluate_on=validation", "train.validation_share=1.0"], "less than 1"),
])  # fmt: skip
def test_what_does_not_fit_is_said(overrides, said):
    refused(ConfigError, said, load_recipe, "digits-simclr", overrides)


def test_a_short_run_beats_the_untrained_encoder(tmp_path):
    settings = ["train.epochs=8", "vision.encoder.width=8", "vision.probe.probes=['few_shot', 'kmeans']"]
    found = run_of("digits-simclr", tmp_path, *settings).results
    assert found["few_shot/accuracy"] > found["untrained/few_shot/accuracy"] + 0.02
    assert found["kmeans/accuracy"] > found["untrained/kmeans/accuracy"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_the_digits_recipe_reaches_its_bars(tmp_path, seed):
    found = run_of("digits-simclr", tmp_path, f"seed={seed}").results
    assert found["linear/accuracy"] >= 0.985
    assert found["few_shot/accuracy"] >= found["untrained/few_shot/accuracy"] + 0.06
    assert found["kmeans/accuracy"] >= found["untrained/kmeans/accuracy"] + 0.10


@pytest.mark.slow
@pytest.mark.parametrize("method", ["simsiam", "byol", "mocov3", "nnclr", "vicreg", "barlow"])
def test_every_method_learns_and_none_collapses(tmp_path, method):
    record = run_of(f"digits-{method}", tmp_path)
    found = record.results
    for probe in ("linear", "few_shot", "knn"):
        assert found[f"{probe}/accuracy"] > found[f"untrained/{probe}/accuracy"]
    assert found["online/accuracy"] > 0.9
    if method in ("simsiam", "byol", "mocov3", "nnclr"):
        assert all(line["train/spread"] > 0.3 for line in logged(tmp_path / record.hash))


@pytest.mark.slow
def test_training_helps_on_real_images(tmp_path, shared_data):
    """The first run of the suite `cifar10-learning`: InfoNCE above the untrained encoder and the raw pixels."""
    parts = {"source": "train", "test": "test"}
    files = [f"vision.data.{key}={shared_data}/cifar10/cifar10_{part}.npz" for key, part in parts.items()]
    jobs = read_suite("cifar10-learning").at("small", files).jobs()
    job = next(job for job in jobs if job.config.name.endswith("/infonce"))
    found = train(job.config, tmp_path, quiet=True).results
    for probe, margin in (("linear", 0.02), ("few_shot", 0.02), ("knn", 0.05)):
        rivals = (found[f"{name}/{probe}/accuracy"] for name in ("untrained", "raw"))
        assert found[f"{probe}/accuracy"] > max(rivals) + margin


ONLINE = "vision.probe.online={learning_rate=1e-2}"
METHODS = {
    "simclr": [], "swav": ["vision.method=swav", "vision.swav.small_views=1", "vision.swav.small_size=8"],
    "blocks": ["vision.method=blocks", "vision.views=1", "train.batch_size=63", "objective=blocks"],
    "byol": ["vision.method=byol", "objective=regression"],
    "saving memory": ["train.microbatch=50", "train.activation_checkpointing=true"],
}  # fmt: skip


@pytest.mark.parametrize("settings", METHODS.values(), ids=METHODS)
def test_the_encoder_never_notices(tmp_path, settings):
    """Weights, running statistics and losses are those of a run without it, bit for bit."""
    settings = [*SHORT_RUN, "vision.data.limit=130", "train.batch_size=64", *settings]
    records = [run_of("digits-simclr", tmp_path, *settings, *more) for more in ([ONLINE], [])]
    folders = [tmp_path / record.hash for record in records]
    assert_same_weights(*folders)
    first, second = map(logged, folders)
    assert [line["train/loss"] for line in first] == [line["train/loss"] for line in second]
    assert all({"train/online_accuracy", "train/online_loss"} <= line.keys() for line in first)
    assert not any("train/online_loss" in line for line in second)
    assert ["online/accuracy" in record.results for record in records] == [True, False]


def test_it_learns_the_classes(tmp_path):
    settings = [*SHORT_RUN, ONLINE, "train.epochs=10", "train.evaluate_every=5", "vision.data.limit=1024"]
    record = run_of("digits-simclr", tmp_path, *settings)
    keys = ("train/online_accuracy", "eval/online/accuracy", "test/online/accuracy")
    training, evaluated, tested = ([line[key] for line in logged(tmp_path / record.hash, key)] for key in keys)
    assert training[0] < 0.25
    assert training[-1] > 0.5
    assert len(evaluated) == 2
    assert evaluated[-1] > 0.6
    # Curves are of the validation part, the result is of the test part.
    assert tested == [pytest.approx(record.results["online/accuracy"], rel=1e-6)]


def branch(seed=0):
    torch.default_generator.manual_seed(seed)
    encoder = build_encoder(EncoderConfig(name="linear", width=5), 1, 3)
    return Branch(encoder, torch.nn.Linear(5, 4), None)


def batches(count=4, rows=6):
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(count, 2, rows, 1, 3, 3, generator=generator)  # two views
    return images, torch.randint(0, 3, (count, rows), generator=generator)


def learn(config, own=slice(None)):
    part = branch()
    probe = OnlineProbe(config, [part.encoder], 3, torch.device("cpu"))
    found = []
    for views, labels in zip(*batches(), strict=True):
        with probe.recorded():
            part(torch.cat(list(views[:, own])))
        found.append({name: float(value) for name, value in probe.step(labels[own]).items()})
    return probe, found


def test_its_steps_are_those_of_softmax_regression_and_its_state_continues_it():
    """SGD with momentum and weight decay by hand in float64, on both views."""
    probe, found = learn(OnlineConfig(optimizer="sgd", learning_rate=0.5, momentum=0.8, weight_decay=0.01))
    part = branch()
    w, b = torch.zeros(3, 5, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    v, u = torch.zeros_like(w), torch.zeros_like(b)
    for (views, labels), said in zip(zip(*batches(), strict=True), found, strict=True):
        x = part.encoder(torch.cat(list(views))).detach().double()
        y = torch.cat([labels, labels])
        shares = torch.softmax(x @ w.T + b, 1)
        assert said["online_loss"] == pytest.approx(float(-shares[range(12), y].log().mean()), rel=1e-5)
        assert said["online_accuracy"] == pytest.approx(float((shares.argmax(1) == y).double().mean()), rel=1e-6)
        gap = (shares - torch.eye(3, dtype=torch.float64)[y]) / 12
        v, u = 0.8 * v + gap.T @ x + 0.01 * w, 0.8 * u + gap.sum(0) + 0.01 * b
        w, b = w - 0.5 * v, b - 0.5 * u
    torch.testing.assert_close(probe.weight.detach().double(), w, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(probe.bias.detach().double(), b, atol=1e-6, rtol=1e-5)
    config = OnlineConfig()
    probe, _ = learn(config)
    again = OnlineProbe(config, [branch().encoder], 3, torch.device("cpu"))
    again.load_state_dict(copy.deepcopy(probe.state_dict()))
    x, y = torch.rand(6, 1, 3, 3), torch.tensor([0, 1, 2, 0, 1, 2])
    for each in (probe, again):
        each._features = [[branch().encoder(x).detach()]]
        each.step(y)
    assert torch.equal(probe.weight, again.weight)


def projected():
    """Rows that each rank alone would call collapsed, or nearly so."""
    z = torch.randn(2, 5, generator=torch.Generator().manual_seed(0)).repeat_interleave(3, 0)
    return z + 0.1 * torch.arange(6).unsqueeze(1)


def on_a_rank(rank, shares):
    mine = slice(sum(shares[:rank]), sum(shares[: rank + 1]))
    probe, found = learn(OnlineConfig(), mine)
    return {"weight": probe.weight.detach(), "found": found, "spread": float(spread(projected()[mine]))}


@pytest.mark.parametrize("shares", [pytest.param((3, 3), marks=pytest.mark.slow), (1, 3, 2)])
def test_ranks_are_one_process(shares):
    probe, found = learn(OnlineConfig())
    ranks = from_ranks(len(shares), on_a_rank, shares)
    z = torch.nn.functional.normalize(projected().double(), dim=1)
    expected = float(z.var(0, correction=0).sqrt().mean()) * math.sqrt(5)
    for rank in ranks:
        assert rank["spread"] == pytest.approx(expected, rel=1e-5)
        torch.testing.assert_close(rank["weight"], probe.weight.detach(), atol=1e-6, rtol=1e-4)
        assert torch.equal(rank["weight"], ranks[0]["weight"])
        for mine, one in zip(rank["found"], found, strict=True):
            assert mine == pytest.approx(one, rel=1e-4)


def test_a_probe_that_cannot_learn_is_refused_and_one_that_has_not_is_not_measured(tmp_path):
    """As in `dipole eval`, which has the encoder alone."""
    table = {"encoder": {"width": 4}, "data": {"limit": 64}, "probe": {"probes": ["knn"], "online": {}}}
    a = make_adapter(table, workdir=tmp_path)
    assert "online/accuracy" not in a.evaluate(None)
    a.embed(next(iter(a.batches(0))))
    a.after_step()
    assert "online/accuracy" in a.evaluate(None)
    assert set(a.metrics()) == {"online_accuracy", "online_loss"}
    source = unlabelled_file(tmp_path)["source"]
    settings = [*SHORT_RUN, ONLINE, f"vision.data.source={source}", "train.batch_size=16", "vision.probe.probes=[]"]
    said = r"vision\.probe\.online: .*without a label.*leave the online probe out"
    refused(ConfigError, said, run_of, "digits-simclr", tmp_path, *settings)


def test_both_halves_of_lab_stand_side_by_side():
    """CMC has two encoders, and the probe reads both."""
    table = {"method": "cmc", "encoder": {"name": "linear", "width": 8, "dim": 4}}
    module, batch = random_framework(table, dtype=torch.float32)
    probe = OnlineProbe(OnlineConfig(), [each.encoder for each in module.branches()], 2, torch.device("cpu"))
    (views,) = batch.views
    with probe.recorded():
        module.embedding(views)
    torch.testing.assert_close(probe._take(), module.features(views).detach())
