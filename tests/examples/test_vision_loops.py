"""The examples written after lightly's: their losses against loops from the formulas, and against dipole's trainer."""

import copy
import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dipole.core.train.recipe import load
from dipole.core.train.run import train
from dipole.vision.adapter import VisionAdapter
from tests.examples.test_examples import example

STEPS = 4


def backbone():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(4))


def batches(name):
    generator = torch.Generator().manual_seed(1)
    sides = [16, 16] + [8] * 6 * (name == "swav")
    return [([torch.rand(12, 1, side, side, generator=generator) for side in sides], None) for _ in range(STEPS)]


def follow(slow, fast, momentum):
    with torch.no_grad():
        for old, new in zip(slow.parameters(), fast.parameters(), strict=True):
            old.mul_(momentum).add_(new, alpha=1 - momentum)


def simclr_loop(net, head, data, model):
    optimizer = torch.optim.SGD([*net.parameters(), *head.parameters()], lr=0.06)
    for views, _ in data:
        z = F.normalize(head(net(torch.cat(views)).flatten(1)), dim=1)
        logits = (z @ z.T / 0.5).masked_fill(torch.eye(24, dtype=torch.bool), -torch.inf)
        yield optimizer, F.cross_entropy(logits, torch.arange(24).roll(12))


def moco_loop(net, head, data, model):
    bank = model.queue.rows.clone()  # lightly's memory bank starts with random unit vectors too
    slow_net, slow_head = copy.deepcopy(net), copy.deepcopy(head)
    optimizer = torch.optim.SGD([*net.parameters(), *head.parameters()], lr=0.06)
    for number, (views, _) in enumerate(data):
        follow(slow_net, net, 0.996)
        follow(slow_head, head, 0.996)
        query = F.normalize(head(net(views[0]).flatten(1)), dim=1)
        key = F.normalize(slow_head(slow_net(views[1]).flatten(1)), dim=1).detach()
        logits = torch.cat([(query * key).sum(1, keepdim=True), query @ bank.T], 1) / 0.5
        yield optimizer, F.cross_entropy(logits, torch.zeros(12, dtype=torch.long))
        bank[12 * number : 12 * (number + 1)] = key


def swav_loop(net, head, data, model):
    """Codes of each large crop: iterations of rows and columns, as in the paper's App. A."""
    prototypes = model.objective.terms[0].prototypes.detach().clone().requires_grad_()
    optimizer = torch.optim.Adam([*net.parameters(), *head.parameters(), prototypes], lr=0.001)
    for views, _ in data:
        passes = [head(net(torch.cat(part)).flatten(1)) for part in (views[:2], views[2:])]
        scores = F.normalize(torch.cat(passes), dim=1) @ F.normalize(prototypes, dim=1).T
        codes = torch.exp(scores[:24].detach().double() / 0.05).view(2, 12, -1)
        for _ in range(3):
            codes = codes / codes.sum(1, keepdim=True)
            codes = codes / codes.sum(2, keepdim=True)
        log_shares = torch.log_softmax(scores / 0.1, 1).chunk(8)
        targets = codes.float()
        parts = [-(targets[i] * log_shares[v]).sum(1).mean() for i in range(2) for v in range(8) if v != i]
        yield optimizer, sum(parts) / len(parts)


def byol_loop(net, head, data, model):
    slow_net, slow_head, predictor = copy.deepcopy(net), copy.deepcopy(head), copy.deepcopy(model.predictor)
    optimizer = torch.optim.SGD([*net.parameters(), *head.parameters(), *predictor.parameters()], lr=0.06)
    for number, (views, _) in enumerate(data):
        if number:
            follow(slow_net, net, 1 - 0.004 * (math.cos(math.pi * (number - 1) / STEPS) + 1) / 2)
            follow(slow_head, head, 1 - 0.004 * (math.cos(math.pi * (number - 1) / STEPS) + 1) / 2)
        z = [head(net(view).flatten(1)) for view in views]
        keys = [slow_head(slow_net(view).flatten(1)).detach() for view in views]
        cosine = [F.cosine_similarity(predictor(z[i]), keys[1 - i]).mean() for i in range(2)]
        yield optimizer, (2 - 2 * cosine[0]) + (2 - 2 * cosine[1])


LOOPS = {"simclr": simclr_loop, "moco": moco_loop, "swav": swav_loop, "byol": byol_loop}


@pytest.mark.parametrize("name", LOOPS)
def test_losses_are_those_of_a_loop_from_the_formula(name):
    module = example(name)
    model = module.build(backbone(), *[STEPS] * (name == "byol")).cpu()
    module.DEVICE = "cpu"
    net, head = copy.deepcopy(model.backbone), copy.deepcopy(model.branch.projector)
    twin = copy.deepcopy(model)
    found = module.train(model, batches(name), epochs=1)
    expected = []
    for optimizer, loss in LOOPS[name](net, head, batches(name), twin):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert found[0] == pytest.approx(expected[0], abs=5e-6)
    assert found == pytest.approx(expected, abs=2e-4)  # rounding grows from step to step
    assert len(set(found)) == STEPS


RECIPES = {
    "simclr": ["objective=infonce(temperature=0.5)", "train.momentum=0"],
    "moco": ["train.momentum=0", "objective=infonce(temperature=0.5)", "vision.negatives=4096",
             "vision.moco.momentum=0.996", "vision.moco.batch_negatives=false"],
    "swav": ["objective=swav(prototypes=512)", "vision.encoder.hidden=2048", "vision.encoder.projector_norm=hidden",
             "vision.swav.small_views=2", "vision.swav.small_size=4", "train.optimizer=adam",
             "train.learning_rate=0.001"],
    "byol": ["train.momentum=0", "objective=2*regression", "vision.encoder.hidden=1024", "vision.encoder.dim=256"],
}  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
def test_losses_are_those_of_the_trainer_on_the_same_batches(name, tmp_path, monkeypatch):
    """A run of a recipe, and the example's loop on the batches and the first weights of that run."""
    started, fed = [], []

    def embed(self, batch):
        if not started:
            started.append(copy.deepcopy(self.module.state_dict()))
            started.append((copy.deepcopy(self.module.branches()[0].encoder), copy.deepcopy(self._run.objective)))
        fed.append(([view.clone() for view in batch.views], batch.labels))
        return original(self, batch)

    original = VisionAdapter.embed
    monkeypatch.setattr(VisionAdapter, "embed", embed)
    settings = [f"vision.method={name}", "train.epochs=", f"train.steps={STEPS}", "train.batch_size=32",
                "train.warmup=0", "train.optimizer=sgd", "vision.encoder.dim=128", "train.learning_rate=0.06",
                "train.schedule=constant",
                "train.weight_decay=0", "train.log_every=1", "vision.encoder.width=4", "vision.data.limit=64",
                "vision.probe.probes=['knn']", "vision.probe.baselines=false", *RECIPES[name]]  # fmt: skip
    config = load("digits-simclr", settings).config
    train(config, tmp_path, quiet=True)
    lines = (tmp_path / config.hash / "metrics.jsonl").read_text().splitlines()
    logged = [line["train/loss"] for line in map(json.loads, lines) if "train/loss" in line]

    state, (encoder, objective) = started
    module = example(name)
    model = module.build(encoder, *[STEPS, 64] if name == "byol" else []).cpu()
    module.DEVICE = "cpu"
    missing = model.load_state_dict(state, strict=False)
    assert not missing.unexpected_keys
    assert all(key == "step" or key.startswith("objective.") for key in missing.missing_keys)
    model.objective.load_state_dict(objective.state_dict())
    assert module.train(model, fed[:STEPS], epochs=1) == pytest.approx(logged, abs=1e-6)


@pytest.mark.parametrize("name", LOOPS)
def test_each_runs_as_it_is(name, capsys, monkeypatch):
    """On one batch of the digits. Each is no longer than lightly's, by its commit e8d317f of August 2026."""
    module = example(name)
    monkeypatch.setattr(module.Digits, "__len__", lambda self: 256)
    module.main(epochs=1)
    assert "epoch: 00" in capsys.readouterr().out
    with open(module.__file__) as file:
        assert len(file.readlines()) <= {"simclr": 69, "moco": 93, "swav": 82, "byol": 105}[name]
