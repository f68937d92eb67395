"""Batch norm over ranks: N ranks of B/N are one process of B in every framework, statistics included."""

import copy

import pytest
import torch
from torch import nn

from dipole.core.utils.sync_batch_norm import synchronize
from tests.ranks import from_ranks
from tests.vision.made import part_of, random_framework
from tests.vision.made import step as one_step

IMAGES, SIDE = 12, 8
FRAMEWORKS = {
    "simclr": {"method": "simclr"},
    "moco": {"method": "moco", "negatives": 9, "views": 3},
    "moco, symmetric": {"method": "moco", "negatives": 9, "moco": {"symmetric": True}},
    "cmc": {"method": "cmc", "negatives": 7},
    "swav": {"method": "swav", "swav": {"small_views": 1, "small_size": SIDE}},
    "blocks": {"method": "blocks", "blocks": {"size": 1}},
}
SHARES = {2: [(6, 6), (8, 4)], 3: [(6, 2, 4)]}
NORMS = {
    "running mean of all": lambda: nn.BatchNorm1d(5, momentum=None),
    "no weights": lambda: nn.BatchNorm1d(5, affine=False),
    "no statistics": lambda: nn.BatchNorm1d(5, track_running_stats=False),
}


def step(name, own=slice(None), sync=False, **train):
    """Loss, gradients and buffers after a step of a framework whose encoder has batch norm."""
    encoder = {"name": "small-conv", "width": 2, "hidden": 6, "dim": 5}
    module, batch = random_framework({**FRAMEWORKS[name], "encoder": encoder}, IMAGES, SIDE)
    if sync:
        assert synchronize(module) == sum(isinstance(each, nn.BatchNorm2d) for each in module.modules()) > 0
    found = one_step(module, part_of(batch, own), **train)
    found["gradients"] = [gradient for gradient in found["gradients"].values() if gradient is not None]
    return found | {"names": list(module.state_dict())}


def norm_alone(make, own=slice(None), sync=False):
    """Output, gradients and buffers of one norm under a loss of all ranks that is no sum of rows."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(IMAGES, 5, dtype=torch.float64, generator=generator) + 100
    weight = torch.randn(IMAGES, 5, dtype=torch.float64, generator=generator)
    norm = make().double()
    if sync:
        synchronize(norm)
        norm = copy.deepcopy(norm)  # what is synchronized is so in a copy
    for _ in range(2):
        mine = x[own].clone().requires_grad_()
        y = norm(mine)
        (y * weight[own]).pow(3).sum().backward()
    learnt = [torch.zeros(5) if p.grad is None else p.grad for p in norm.parameters()]
    return {"y": y.detach(), "x": mine.grad, "learnt": learnt, "buffers": dict(norm.named_buffers())}


def every_case(rank, world_size):
    found = {}
    for shares in SHARES[world_size]:
        own = slice(sum(shares[:rank]), sum(shares[: rank + 1]))
        for name in FRAMEWORKS:
            found[name, shares] = step(name, own, sync=True)
        found["recomputed", shares] = step("simclr", own, sync=True, activation_checkpointing=True)
        for name, make in NORMS.items():
            found[name, shares] = norm_alone(make, own, sync=True)
    return found | {"apart": step("simclr", own)}


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.slow), 3])
def many(request):
    return from_ranks(request.param, every_case, request.param)


def farthest(one, ranks):
    means = [torch.stack(each).mean(0) for each in zip(*(rank["gradients"] for rank in ranks), strict=True)]
    pairs = list(zip(one["gradients"], means, strict=True))
    pairs += [(one["loss"], rank["loss"]) for rank in ranks]
    pairs += [(value, rank["buffers"][name]) for rank in ranks for name, value in one["buffers"].items()]
    return max(float((a - b).abs().max()) for a, b in pairs)


@pytest.mark.parametrize("name", [*FRAMEWORKS, "recomputed"])
def test_ranks_are_one_process(many, name):
    one = step("simclr" if name == "recomputed" else name)
    for shares in SHARES[len(many)]:
        ranks = [rank[name, shares] for rank in many]
        assert farthest(one, ranks) < 1e-9
        assert all(rank["names"] == one["names"] for rank in ranks)  # weights are saved under the names they had


def test_without_it_they_are_not(many):
    assert farthest(step("simclr"), [rank["apart"] for rank in many]) > 1e-3


@pytest.mark.parametrize("name", NORMS)
def test_every_kind_of_norm(many, name):
    one = norm_alone(NORMS[name])
    for shares in SHARES[len(many)]:
        ranks = [rank[name, shares] for rank in many]
        for key in ("y", "x"):
            assert torch.allclose(torch.cat([rank[key] for rank in ranks]), one[key], rtol=0, atol=1e-9)
        for place, learnt in enumerate(one["learnt"]):
            assert torch.allclose(sum(rank["learnt"][place] for rank in ranks), learnt, rtol=0, atol=1e-9)
        for buffer, value in one["buffers"].items():
            assert all(torch.allclose(rank["buffers"][buffer], value, rtol=0, atol=1e-9) for rank in ranks), buffer


def test_alone_and_in_evaluation_nothing_changes():
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    own = copy.deepcopy(plain)
    synchronize(own)
    x = torch.randn(5, 3, 6, 6)
    assert torch.equal(plain(x), own(x))
    assert torch.equal(plain.eval()(x), own.eval()(x))
    assert plain.state_dict().keys() == own.state_dict().keys()
