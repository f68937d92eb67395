"""Optimizers and schedules against their formulas."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from dipole.core.train.config import TrainConfig
from dipole.core.train.loop import learning_rate
from dipole.core.train.optimizer import LARS, build_optimizer
from dipole.core.utils.errors import ConfigError


def rates(total: int, spe: int = 1, **settings: object) -> list[float]:
    config = (
        TrainConfig(steps=total, learning_rate=2.0, **settings)
        if "epochs" not in settings
        else TrainConfig(learning_rate=2.0, **settings)
    )
    return [learning_rate(config, step, total, spe) for step in range(total)]


def test_schedules_are_their_formulas():
    assert rates(6, warmup=4.0) == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0, 2.0])
    found = rates(8, schedule="cosine", warmup=2.0)
    assert found[2] == pytest.approx(2.0)
    assert found[5] == pytest.approx(1.0)
    assert found[7] == pytest.approx(1 + torch.tensor(5 / 6 * torch.pi).cos().item())
    assert all(a > b for a, b in pairwise(found[2:]))
    found = rates(12, spe=3, epochs=4, schedule="step", milestones=(1.0, 3.0), decay=0.5)
    assert found == pytest.approx([2.0] * 3 + [1.0] * 6 + [0.5] * 3)


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("adam", lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.8, 0.9), weight_decay=0.01, foreach=False)),
        ("adamw", lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.8, 0.9), weight_decay=0.01, foreach=False)),
        ("sgd", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.7, weight_decay=0.01, foreach=False)),
    ],
)
def test_built_optimizers_are_pytorchs(name, reference):
    more = {"momentum": 0.7} if name == "sgd" else {"betas": (0.8, 0.9)}
    config = TrainConfig(steps=1, optimizer=name, learning_rate=0.1, weight_decay=0.01, **more)
    found, expected = nn.Parameter(torch.arange(4.0)), nn.Parameter(torch.arange(4.0))
    frozen = nn.Parameter(torch.ones(1), requires_grad=False)
    optimizer, plain = build_optimizer(config, [found, frozen]), reference([expected])
    for _ in range(5):
        for weight, each in ((found, optimizer), (expected, plain)):
            each.zero_grad()
            (weight**3).sum().backward()
            each.step()
    torch.testing.assert_close(found, expected)
    assert frozen == 1


def test_lars_against_the_formula():
    torch.manual_seed(0)
    matrix, bias = nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(3))
    w, b = matrix.detach().double().numpy().copy(), bias.detach().double().numpy().copy()
    optimizer = LARS([matrix, bias], lr=0.5, momentum=0.9, weight_decay=0.1, trust=0.01)
    v, u = 0 * w, 0 * b
    for step in range(4):
        gm, gb = torch.randn(3, 2), torch.randn(3)
        matrix.grad, bias.grad = gm.clone(), gb.clone()
        optimizer.step()
        g = gm.double().numpy() + 0.1 * w
        v = 0.9 * v + 0.5 * 0.01 * (w**2).sum() ** 0.5 / (g**2).sum() ** 0.5 * g
        u = 0.9 * u + 0.5 * gb.double().numpy()
        w, b = w - v, b - u
        assert torch.allclose(matrix.double(), torch.tensor(w), atol=1e-5), step
        assert torch.allclose(bias.double(), torch.tensor(b), atol=1e-5), step


def test_zero_weights_and_nothing_to_train():
    weight = nn.Parameter(torch.zeros(2, 2))
    weight.grad = torch.ones(2, 2)
    LARS([weight], lr=0.5).step()
    assert torch.equal(weight, torch.full((2, 2), -0.5))
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ConfigError, match="nothing to train"):
        build_optimizer(TrainConfig(steps=1), frozen.parameters())
