"""Negative blocks: which are drawn, how often classes collide, and Equation 12 with them."""

import itertools

import numpy as np
import pytest
import torch

import dipole
from dipole.core.conformance.reference import Case, block_draw, blocks
from dipole.core.objectives.losses.blocks import distinct, drawn_blocks, scrambled
from dipole.core.objectives.pairs import Pairs
from dipole.core.train.class_blocks import ClassBlocks
from dipole.core.utils.errors import PairsError
from dipole.core.utils.seeding import Seeds

N, B, D = 7, 3, 4


def points(seed=0):
    source = torch.Generator().manual_seed(seed)
    return torch.randn(N, B + 1, D, dtype=torch.double, generator=source, requires_grad=True)


def equation_12(x, i, j, drawn, b, loss):
    """Arora et al., Eq. 12, with x the member j of block i and the blocks that were drawn for it."""
    positives = [x[i, (j + step) % (B + 1)] for step in range(1, b + 1)]
    v = []
    for m in drawn:
        difference = sum(positives) / b - sum(x[m, t] for t in range(1, b + 1)) / b
        v.append((x[i, j] * difference).sum())
    if loss == "logistic":
        return torch.log2(1 + sum(torch.exp(-one) for one in v))
    return torch.stack([torch.zeros_like(v[0]), *(1 - one for one in v)]).max()


@pytest.mark.parametrize(
    ("anchors", "k", "b", "loss"),
    [
        *(("all", k, b, "logistic") for k, b in ((1, 1), (4, 2), (N - 1, B), (None, 1))),
        *(("first", k, b, "hinge") for k, b in ((1, B), (4, 1), (N - 1, 2), (None, 2))),
    ],
)
def test_the_loss_is_equation_12_over_the_blocks_that_were_drawn(anchors, k, b, loss):
    x = points()
    members = B + 1 if anchors == "all" else 1
    drawn = drawn_blocks(torch.arange(N * members), N * members, members, k or N - 1, draw=5).tolist()
    spec = f"blocks(b={b}, loss={loss})" if k is None else f"blocks(b={b}, k={k}, loss={loss})"
    found = dipole.objective(spec)(Pairs.from_blocks(x, anchors, draw=5)).loss
    expected = torch.stack(
        [equation_12(x, i, j, drawn[i * members + j], b, loss) for i, j in itertools.product(range(N), range(members))]
    ).mean()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, x)[0], torch.autograd.grad(expected, x)[0])
    # The same by the loop of the conformance checks, told which blocks were drawn.
    case = Case.of(Pairs.from_blocks(x.detach(), anchors, draw=99))
    torch.testing.assert_close(blocks(case, b=b, k=k or N - 1, loss=loss, drawn=drawn), expected.detach())


def test_the_draw_is_that_of_whole_numbers():
    """Tensors of 64 bits wrap around as splitmix64 in unbounded integers does."""
    # The first numbers of splitmix64 from the seed 0 (its authors' test values).
    golden = torch.tensor([1, 2, 3]) * (0x9E3779B97F4A7C15 - 2**64)
    assert [n % 2**64 for n in scrambled(golden).tolist()] == [
        0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F
    ]  # fmt: skip
    for draw, of_block, count, k in [(0, 1, 5, 4), (7, 3, 9, 2), (2**62 + 11, 11, 40, 8), (-3, 2, 70, 50)]:
        found = drawn_blocks(torch.arange(count * of_block), count * of_block, of_block, k, draw)
        expected = [block_draw(draw, i, of_block, count, k) for i in range(count * of_block)]
        assert found.tolist() == expected
    own = torch.tensor([4, 11])
    assert torch.equal(drawn_blocks(own, 12, 2, 3, 8), drawn_blocks(torch.arange(12), 12, 2, 3, 8)[own])


@pytest.mark.parametrize(("among", "count"), [(5, 2), (6, 5), (4, 4), (9, 1)])
def test_every_set_of_blocks_is_equally_likely(among, count):
    rows = 1500
    for found in (
        distinct(torch.arange(rows), among, count, draw=3),
        torch.cat([distinct(torch.tensor([3]), among, count, draw) for draw in range(rows)]),
    ):
        sets, times = np.unique(found.sort(1).values.numpy(), axis=0, return_counts=True)
        possible = len(list(itertools.combinations(range(among), count)))
        assert len(sets) == possible
        assert (np.diff(sets, axis=1) > 0).all()
        chi2 = ((times - rows / possible) ** 2 / (rows / possible)).sum()
        assert chi2 < possible + 5 * (2 * possible) ** 0.5


def test_draws_of_two_points_and_of_two_steps_are_independent():
    first, second = (distinct(torch.arange(4000), 6, 2, draw).sort(1).values for draw in (0, 1))
    same = (first == second).all(1).double().mean()
    assert abs(float(same) - 1 / 15) < 4 * (1 / 15 / 4000) ** 0.5
    neighbours = (first[:-1] == first[1:]).all(1).double().mean()
    assert abs(float(neighbours) - 1 / 15) < 4 * (1 / 15 / 4000) ** 0.5


@pytest.mark.parametrize(("classes", "k"), [(4, 1), (4, 8), (20, 3)])
def test_class_collision_is_that_of_independent_classes(k, classes):
    """Arora et al., Sec. 6.1: tau_k = 1 - (1 - 1/C)^k, for blocks whose classes are independent draws."""
    sampler = ClassBlocks(np.repeat(np.arange(classes), 12), 2, None, Seeds(0))
    labels = np.concatenate([sampler.rows(epoch).reshape(-1, 2)[:, 0] // 12 for epoch in range(120)])
    batches = torch.from_numpy(labels[: len(labels) // 12 * 12].reshape(-1, 12))  # twelve blocks a step
    own = torch.arange(24)
    collided = torch.stack(
        [
            (classes_of[drawn_blocks(own, 24, 2, k, draw)] == classes_of[own // 2].unsqueeze(1)).any(1).double().mean()
            for draw, classes_of in enumerate(batches)
        ]
    )
    spread = float(collided.std()) / len(collided) ** 0.5
    assert abs(float(collided.mean()) - (1 - (1 - 1 / classes) ** k)) < 4 * spread
    assert spread < 0.02


def test_one_mean_of_each_block_is_looked_at():
    term = dipole.objective("blocks").terms[0]
    pairs = term.prepare(Pairs.from_blocks(points().detach(), "all"))
    assert pairs.negative_counts.tolist() == [N - 1] * N * (B + 1)
    assert len(pairs.candidates) - pairs.first_negative == N


def test_blocks_that_are_missing_or_ignored():
    with pytest.raises(PairsError, match="needs 7 other blocks, an anchor has only 6"):
        dipole.objective("blocks(k=7)")(Pairs.from_blocks(points(), "all"))
    with pytest.raises(PairsError, match="needs 4 positives"):
        dipole.objective("blocks(b=4)")(Pairs.from_blocks(points(), "all"))
    # Who leaves candidates out by hand says what a negative is; nothing is drawn past that.
    x = points().detach()
    pairs = Pairs.from_blocks(x)
    others = pairs.without(torch.tensor([[4 * ((i + 1) % N) + j for j in range(4)] for i in range(N)]))
    term = dipole.objective("blocks").terms[0]
    assert term.prepare(others).negative_counts.tolist() == [N - 2] * N
