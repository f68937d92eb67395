"""SimSiam, BYOL, MoCo v3, NNCLR: losses and gradients against loops from the papers' formulas, in float64."""

import math
import signal

import pytest
import torch
from torch import Tensor

from dipole import objective
from dipole.core.train.metrics import read_metrics
from dipole.core.train.recipe import load
from dipole.core.train.run import RunInterruptedError, train
from dipole.vision.adapter import VisionAdapter
from dipole.vision.frameworks.predictor import nearest_in, spread
from dipole.vision.frameworks.queue import cosine_schedule
from tests.vision.made import SHORT_RUN, random_framework

IMAGES, SIDE = 6, 4


def framework(method, views=2, **table):
    """A framework on a linear encoder, with its batch norm, in float64; and a batch."""
    encoder = {"name": "linear", "width": 7, "hidden": 6, "dim": 5}
    return random_framework({"method": method, "views": views, method: table, "encoder": encoder}, IMAGES, SIDE)


def learnt(module):
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def gradients(loss: Tensor, module):
    found = torch.autograd.grad(loss, list(learnt(module).values()), allow_unused=True)
    return {name: torch.zeros_like(p) if g is None else g for (name, p), g in zip(learnt(module).items(), found)}  # noqa: B905


def agree(module, batch, text, paper, constant=0.0):
    """Loss and gradient of a framework under an objective are those of a loop over the branch and the predictor."""
    mine = objective(text, dim=5)(module.embed(batch)).loss
    theirs = paper(module, *batch.views)
    torch.testing.assert_close(mine - constant, theirs, atol=1e-12, rtol=1e-12)
    expected = gradients(theirs, module)
    found = gradients(mine, module)
    assert max(float(g.abs().max()) for g in expected.values()) > 1e-3
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-11, rtol=1e-9)


def cosine(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum() / (x * x).sum().sqrt() / (y * y).sum().sqrt()


def of_simsiam(module, x1, x2):
    """Chen & He 2021, Algorithm 1: L = D(p1, z2)/2 + D(p2, z1)/2, D = -(p . z), z detached."""
    z1, z2 = module.branch(x1), module.branch(x2)
    p1, p2 = module.predictor(z1), module.predictor(z2)

    def distance(p, z):
        return -sum(cosine(p[i], z[i].detach()) for i in range(IMAGES)) / IMAGES

    return distance(p1, z2) / 2 + distance(p2, z1) / 2


def of_byol(module, x1, x2):
    """Grill et al. 2020, Eq. 2, and its like with the views exchanged, added."""
    loss = 0.0
    for x, other in ((x1, x2), (x2, x1)):
        q, z = module.predictor(module.branch(x)), module.target(other).detach()
        for i in range(IMAGES):
            loss = loss + (2 - 2 * cosine(q[i], z[i])) / IMAGES
    return loss


def of_mocov3(module, x1, x2, tau=0.2):
    """Chen, Xie & He 2021, Algorithm 1: ctr(q1, k2) + ctr(q2, k1), ctr = 2 tau cross entropy."""
    loss = 0.0
    for x, other in ((x1, x2), (x2, x1)):
        q, k = module.predictor(module.branch(x)), module.target(other).detach()
        for i in range(IMAGES):
            shares = [(cosine(q[i], k[j]) / tau).exp() for j in range(IMAGES)]
            loss = loss - 2 * tau * (shares[i] / sum(shares)).log() / IMAGES
    return loss


def of_nnclr(module, x1, x2, tau=0.1):
    """Dwibedi et al. 2021, Eq. 4 and its pseudo-code: L(NN(z1), p2)/2 + L(NN(z2), p1)/2, a softmax over the p."""
    support = module.queue.rows.clone()
    z1, z2 = module.branch(x1), module.branch(x2)
    loss = 0.0
    for z, p in ((z1, module.predictor(z2)), (z2, module.predictor(z1))):
        for i in range(IMAGES):
            near = max(support, key=lambda q: float(cosine(q, z[i].detach())))
            shares = [(cosine(near, p[j]) / tau).exp() for j in range(IMAGES)]
            loss = loss - (shares[i] / sum(shares)).log() / IMAGES / 2
    return loss


@pytest.mark.parametrize(
    ("method", "text", "paper", "constant", "table"),
    [
        ("simsiam", "0.5*regression", of_simsiam, 1.0, {}),
        ("byol", "2*regression", of_byol, 0.0, {}),
        ("mocov3", "0.8*infonce(temperature=0.2)", of_mocov3, 0.0, {}),
        ("nnclr", "infonce(temperature=0.1)", of_nnclr, 0.0, {"support": 9}),
    ],
)
def test_loss_and_gradient_are_the_papers(method, text, paper, constant, table):
    module, batch = framework(method, **table)
    if method in ("byol", "mocov3"):
        with torch.no_grad():  # a target that has fallen behind
            for p in module.target.parameters():
                p.add_(torch.randn(p.shape, dtype=p.dtype, generator=torch.Generator().manual_seed(5)), alpha=0.1)
    agree(module, batch, text, paper, constant)


def test_simsiam_of_three_views_is_the_mean_over_ordered_pairs():
    module, batch = framework("simsiam", views=3)

    def paper(module, *views):
        z = [module.branch(x) for x in views]
        p = [module.predictor(each) for each in z]
        pairs = [(i, j) for i in range(3) for j in range(3) if i != j]
        return sum(2 - 2 * cosine(p[i][b], z[j][b].detach()) for i, j in pairs for b in range(IMAGES)) / 6 / IMAGES

    agree(module, batch, "regression", paper)


@pytest.mark.parametrize(
    ("method", "stopped", "free"),
    [*((name, "key", "anchor") for name in ("simsiam", "byol", "mocov3")), ("nnclr", "anchor", "key")],
)
def test_no_gradient_goes_through_the_targets(method, stopped, free):
    module, batch = framework(method)
    rows = module.embed(batch).rows
    assert all(rows[f"{free}{n}"].requires_grad and not rows[f"{stopped}{n}"].requires_grad for n in range(2))


def test_the_support_set_takes_the_first_views_projections_after_the_step():
    module, batch = framework("nnclr", support=9)
    before = module.queue.rows.clone()
    module.embed(batch)
    projected = module._fresh.clone()
    assert torch.equal(module.queue.rows, before)
    module.after_step()
    torch.testing.assert_close(module.queue.rows[:IMAGES], projected / projected.norm(dim=1, keepdim=True))
    assert torch.equal(module.queue.rows[IMAGES:], before[IMAGES:])
    assert torch.equal(nearest_in(module.queue.rows, 3 * module.queue.rows[2:4]), module.queue.rows[2:4])


def test_momentum_rises_along_a_cosine_and_spread_falls_in_a_collapse():
    """Grill et al. 2020, Sec. 3.3, by hand at the ends, a third and the middle."""
    assert cosine_schedule(0.0, 1.0, 0.996, 1.0) == pytest.approx(0.996, abs=1e-15)
    assert cosine_schedule(1 / 3, 1.0, 0.996, 1.0) == pytest.approx(1 - 0.004 * 0.75, abs=1e-15)
    assert cosine_schedule(0.5, 1.0, 0.99, 1.0) == pytest.approx(0.995, abs=1e-15)
    assert cosine_schedule(1.0, 1.0, 0.9, 1.0) == 1.0
    generator = torch.Generator().manual_seed(0)
    assert float(spread(torch.randn(4000, 64, generator=generator))) == pytest.approx(1.0, abs=0.02)
    assert float(spread(torch.randn(1, 64, generator=generator).expand(50, 64))) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(("schedule", "progress", "share"), [("cosine", 0.5, 0.05), ("constant", 0.5, 0.1)])
def test_the_target_follows(schedule, progress, share):
    module, _ = framework("byol", momentum=0.9, momentum_schedule=schedule)
    before = [p.clone() for p in module.target.parameters()]
    with torch.no_grad():
        for p in module.branch.parameters():
            p.add_(1)
    module.progress = progress
    module.after_step()
    for then, now in zip(before, module.target.parameters(), strict=True):
        torch.testing.assert_close(now, then + share)
    assert not any(p.requires_grad for p in module.target.parameters())


def test_heads_are_the_papers():
    """Layers, batch norm and biases that the papers name, where the recipe says nothing."""

    def shown(head):
        return [f"{type(layer).__name__}{'+' * bool(getattr(layer, 'bias', None) is not None)}" for layer in head]

    simsiam, byol, mocov3, nnclr = (framework(m)[0] for m in ("simsiam", "byol", "mocov3", "nnclr"))
    hidden, last = ["Linear", "BatchNorm1d+", "ReLU"], ["Linear", "BatchNorm1d"]
    assert shown(simsiam.branch.projector) == [*hidden, *hidden, *last]
    assert shown(simsiam.predictor) == [*hidden, "Linear+"]
    assert simsiam.predictor[0].out_features == 5 // 4
    assert shown(byol.branch.projector) == [*hidden, "Linear+"]
    assert shown(byol.predictor) == [*hidden, "Linear+"]
    assert shown(mocov3.branch.projector) == [*hidden, *hidden, *last]
    assert shown(mocov3.predictor) == [*hidden, *last]
    assert shown(nnclr.branch.projector) == [*hidden, *hidden, *last]
    assert shown(nnclr.predictor) == [*hidden, "Linear+"]


@pytest.mark.parametrize("name", ["digits-byol", "digits-nnclr"])
def test_a_recipe_stopped_and_continued_is_one_run(tmp_path, name, monkeypatch):
    """Momentum, support set, optimizer and online probe included: bit for bit."""
    config = load(name, [*SHORT_RUN, "train.checkpoint_every=1"]).config
    whole = train(config, tmp_path / "whole", quiet=True)
    done = []

    def stopping(self):
        after_step(self)
        done.append(1)
        if len(done) == 3:
            signal.raise_signal(signal.SIGTERM)

    after_step = VisionAdapter.after_step
    with monkeypatch.context() as patch:
        patch.setattr(VisionAdapter, "after_step", stopping)
        with pytest.raises(RunInterruptedError):
            train(config, tmp_path / "parts", quiet=True)
    parts = train(config, tmp_path / "parts", quiet=True)
    assert parts.results == whole.results
    lines = [read_metrics(tmp_path / folder / config.hash / "metrics.jsonl") for folder in ("whole", "parts")]
    for first, second in zip(*lines, strict=True):
        assert {k: v for k, v in first.items() if k != "time"} == {k: v for k, v in second.items() if k != "time"}
    logged = [line for line in lines[0] if "train/loss" in line]
    assert all(0 < line["train/spread"] < 1.5 and 0 <= line["train/online_accuracy"] <= 1 for line in logged)
    if name == "digits-byol":
        total = logged[-1]["step"]
        start = load(name).config.settings.own_table.momentum
        for line in logged:
            expected = 1 - (1 - start) * (math.cos(math.pi * (line["step"] - 1) / total) + 1) / 2
            assert line["train/momentum"] == pytest.approx(expected, abs=1e-6)
