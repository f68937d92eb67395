"""The online linear probe: it learns, it is logged, and the encoder never notices."""

import copy
import math

import pytest
import torch
from safetensors.torch import load_file

from dipole.core.train.metrics import read_metrics
from dipole.core.train.recipe import load
from dipole.core.train.run import train
from dipole.core.utils.errors import ConfigError
from dipole.vision.encoders import EncoderConfig, build_encoder
from dipole.vision.frameworks.base import Branch
from dipole.vision.frameworks.predictor import spread
from dipole.vision.probes import OnlineConfig, OnlineProbe
from tests.ranks import from_ranks
from tests.vision.made import SHORT_RUN, make_adapter, random_framework, unlabelled_file

ONLINE = "vision.probe.online={learning_rate=1e-2}"
METHODS = {
    "simclr": [],
    "swav": ["vision.method=swav", "vision.swav.small_views=1", "vision.swav.small_size=8"],
    "blocks": ["vision.method=blocks", "vision.views=1", "train.batch_size=129", "objective=blocks"],
    "byol": ["vision.method=byol", "objective=regression"],
    "saving memory": ["train.microbatch=50", "train.activation_checkpointing=true"],
}


@pytest.mark.parametrize("settings", METHODS.values(), ids=METHODS)
def test_the_encoder_never_notices(tmp_path, settings):
    """Weights, running statistics and losses are those of a run without it, bit for bit."""
    runs = {}
    for name, more in (("with", [ONLINE]), ("without", [])):
        config = load("digits-simclr", [*SHORT_RUN, "vision.data.limit=520", *settings, *more]).config
        record = train(config, tmp_path, quiet=True)
        runs[name] = tmp_path / config.hash, record
    first, second = (load_file(folder / "model" / "module.safetensors") for folder, _ in runs.values())
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    lines = [read_metrics(folder / "metrics.jsonl") for folder, _ in runs.values()]
    lines = [[line for line in each if "train/loss" in line] for each in lines]
    assert [line["train/loss"] for line in lines[0]] == [line["train/loss"] for line in lines[1]]
    assert all({"train/online_accuracy", "train/online_loss"} <= line.keys() for line in lines[0])
    assert not any("train/online_loss" in line for line in lines[1])
    assert "online/accuracy" in runs["with"][1].results
    assert "online/accuracy" not in runs["without"][1].results


def test_it_learns_the_classes(tmp_path):
    config = load("digits-simclr", [*SHORT_RUN, ONLINE, "train.epochs=12", "train.evaluate_every=6"]).config
    record = train(config, tmp_path, quiet=True)
    lines = read_metrics(tmp_path / config.hash / "metrics.jsonl")
    logged = [line["train/online_accuracy"] for line in lines if "train/online_accuracy" in line]
    evaluated = [line["eval/online/accuracy"] for line in lines if "eval/online/accuracy" in line]
    assert logged[0] < 0.25
    assert logged[-1] > 0.5
    assert len(evaluated) == 2
    assert evaluated[-1] > 0.6
    # Curves are of the validation part, the result is of the test part.
    (tested,) = [line["test/online/accuracy"] for line in lines if "test/online/accuracy" in line]
    assert record.results["online/accuracy"] == pytest.approx(tested, rel=1e-6)


def branch(seed=0):
    torch.manual_seed(seed)
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


def test_its_steps_are_those_of_softmax_regression():
    """SGD with momentum and weight decay by hand in float64, on both views."""
    probe, found = learn(OnlineConfig(optimizer="sgd", learning_rate=0.5, momentum=0.8, weight_decay=0.01))
    part = branch()
    w, b = torch.zeros(3, 5, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    v, u = torch.zeros_like(w), torch.zeros_like(b)
    for (views, labels), logged in zip(zip(*batches(), strict=True), found, strict=True):
        x = part.encoder(torch.cat(list(views))).detach().double()
        y = torch.cat([labels, labels])
        shares = torch.softmax(x @ w.T + b, 1)
        assert logged["online_loss"] == pytest.approx(float(-shares[range(12), y].log().mean()), rel=1e-5)
        assert logged["online_accuracy"] == pytest.approx(float((shares.argmax(1) == y).double().mean()), rel=1e-6)
        gap = (shares - torch.eye(3, dtype=torch.float64)[y]) / 12
        v, u = 0.8 * v + gap.T @ x + 0.01 * w, 0.8 * u + gap.sum(0) + 0.01 * b
        w, b = w - 0.5 * v, b - 0.5 * u
    torch.testing.assert_close(probe.weight.detach().double(), w, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(probe.bias.detach().double(), b, atol=1e-6, rtol=1e-5)


def test_its_state_continues_it():
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


def test_a_probe_that_has_not_learnt_is_not_measured(tmp_path):
    """As in `dipole eval`, which has the encoder alone."""
    table = {"encoder": {"width": 4}, "data": {"limit": 64}, "probe": {"probes": ["knn"], "online": {}}}
    a = make_adapter(table, workdir=tmp_path)
    assert "online/accuracy" not in a.evaluate(None)
    a.embed(next(iter(a.batches(0))))
    a.after_step()
    assert "online/accuracy" in a.evaluate(None)
    assert set(a.metrics()) == {"online_accuracy", "online_loss"}


def test_probes_without_labels_or_effect_are_refused(tmp_path):
    source = unlabelled_file(tmp_path)["source"]
    settings = [*SHORT_RUN, ONLINE, f"vision.data.source={source}", "train.batch_size=16", "vision.probe.probes=[]"]
    config = load("digits-simclr", settings).config
    with pytest.raises(ConfigError, match=r"vision\.probe\.online: .*without a label.*leave the online probe out"):
        train(config, tmp_path, quiet=True)
    with pytest.raises(ConfigError, match=r"momentum has no effect with optimizer 'adam'"):
        load("digits-simclr", ["vision.probe.online.momentum=0.9"])


def test_both_halves_of_lab_stand_side_by_side():
    """CMC has two encoders, and the probe reads both."""
    table = {"method": "cmc", "encoder": {"name": "linear", "width": 8, "dim": 4}}
    module, batch = random_framework(table, dtype=torch.float32)
    probe = OnlineProbe(OnlineConfig(), [each.encoder for each in module.branches()], 2, torch.device("cpu"))
    (views,) = batch.views
    with probe.recorded():
        module.embedding(views)
    torch.testing.assert_close(probe._take(), module.features(views).detach())
