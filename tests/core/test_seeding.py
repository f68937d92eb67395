"""Streams of one seed."""

import random

import numpy as np
import torch

from dipole.core.utils.seeding import STREAMS, Seeds, isolated, rng_state, seed_everything, set_rng_state


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_streams_are_stable_and_differ():
    assert [getattr(Seeds(0), name) for name in STREAMS] == [1561419972, 1805441316, 1189083480, 199579254, 37680149]
    assert Seeds(0).stream("augment", 3, 7) == 1448436595
    found = {Seeds(root).stream(name, index) for root in range(20) for name in STREAMS for index in range(20)}
    assert len(found) == 20 * len(STREAMS) * 20
    assert all(0 <= seed < 2**31 for seed in found)
    assert Seeds(1).stream("data", 23) != Seeds(1).stream("data", 2, 3)
    seeds = Seeds(3)
    assert torch.equal(torch.rand(4, generator=seeds.torch("data", 1)), torch.rand(4, generator=seeds.torch("data", 1)))
    assert not torch.equal(torch.rand(4, generator=seeds.torch("data")), torch.rand(4, generator=seeds.torch("probe")))
    assert (seeds.numpy("env").random(4) == Seeds(3).numpy("env").random(4)).all()
    assert seeds.as_dict()["probe"] == seeds.probe


def test_global_state_is_restored_and_isolated():
    seed_everything(5)
    random.gauss(0, 1)
    np.random.randn()  # leaves a cached second normal
    state = rng_state()
    expected = (random.gauss(0, 1), float(np.random.randn()), *draw())
    set_rng_state(state)
    assert (random.gauss(0, 1), float(np.random.randn()), *draw()) == expected
    seed_everything(1)
    with isolated(9):
        inside = draw()
    after = draw()
    seed_everything(1)
    assert draw() == after
    with isolated(9):
        assert draw() == inside
