"""Blocks: which are drawn, how often classes collide, Equation 12 with them, and the losses of Figure 2 (c)."""

import math
from functools import partial

import loops
import numpy as np
import pytest
import torch

import dipole
from dipole import DataError, Pairs, PairsError
from dipole.core.conformance.reference import Case, block_draw, blocks
from dipole.core.objectives.losses.blocks import distinct, drawn_blocks, scrambled
from dipole.core.train.class_blocks import BLOCKS, BlockShape, ClassBlocks, block_losses
from dipole.core.utils.seeding import Seeds
from tests.runs import refused

N, B, D = 7, 3, 4
LABELS = np.repeat([5, 0, 2, 9], [7, 4, 9, 2])
points = partial(loops.draw, N, B + 1, D)


@pytest.mark.parametrize(("anchors", "k", "b", "loss"), [
    *(("all", k, b, "logistic") for k, b in ((1, 1), (4, 2), (N - 1, B), (None, 1))),
    *(("first", k, b, "hinge") for k, b in ((1, B), (4, 1), (N - 1, 2), (None, 2))),
])  # fmt: skip
def test_the_loss_is_equation_12_over_the_blocks_that_were_drawn(anchors, k, b, loss):
    x, text = points(), f"blocks(b={b}, k={k or 'none'}, loss={loss})"
    pairs = Pairs.from_blocks(x, anchors, draw=5)
    found, expected = dipole.objective(text)(pairs).loss, blocks(Case.of(pairs), b=b, k=k or N - 1, loss=loss)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, x)[0], torch.autograd.grad(expected, x)[0])


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
    by_step = torch.cat([distinct(torch.tensor([3]), among, count, draw) for draw in range(rows)])
    for found in (distinct(torch.arange(rows), among, count, draw=3), by_step):
        sets, times = np.unique(found.sort(1).values.numpy(), axis=0, return_counts=True)
        possible = math.comb(among, count)
        assert len(sets) == possible
        assert (np.diff(sets, axis=1) > 0).all()
        chi2 = ((times - rows / possible) ** 2 / (rows / possible)).sum()
        assert chi2 < possible + 5 * (2 * possible) ** 0.5


def test_draws_of_two_points_and_of_two_steps_are_independent():
    first, second = (distinct(torch.arange(4000), 6, 2, draw).sort(1).values for draw in (0, 1))
    for one, other in ((first, second), (first[:-1], first[1:])):
        assert abs(float((one == other).all(1).double().mean()) - 1 / 15) < 4 * (1 / 15 / 4000) ** 0.5


def test_blocks_that_are_missing_or_ignored():
    for spec, said in (("k=7", "needs 7 other blocks, an anchor has only 6"), ("b=4", "needs 4 positives")):
        refused(PairsError, said, dipole.objective(f"blocks({spec})"), Pairs.from_blocks(points(), "all"))
    x, term = points().detach(), dipole.objective("blocks").terms[0]
    every = term.prepare(Pairs.from_blocks(x, "all"))
    assert every.negative_counts.tolist() == [N - 1] * N * (B + 1)
    assert len(every.candidates) - every.first_negative == N  # one mean of each block is looked at
    # Candidates that the caller leaves out are never drawn.
    others = Pairs.from_blocks(x).without(torch.tensor([[4 * ((i + 1) % N) + j for j in range(4)] for i in range(N)]))
    assert term.prepare(others).negative_counts.tolist() == [N - 2] * N


def points_of_classes(count, points, spread, seed):
    """Points around the means of `count` classes. The means are the same for every seed."""
    means = np.random.default_rng(0).standard_normal((count, 4))
    y = np.repeat(np.arange(count), points) * 7 + 3
    x = means.repeat(points, 0) + spread * np.random.default_rng(seed).standard_normal((len(y), 4))
    return torch.from_numpy(x), torch.from_numpy(y)


@pytest.mark.parametrize("loss", ["logistic", "hinge"])
@pytest.mark.parametrize(("b", "k"), [(1, 1), (3, 4)])
def test_both_losses_are_their_loops(loss, b, k):
    (train_x, train_y), (x, y) = points_of_classes(6, 9, 0.7, 1), points_of_classes(6, 12, 0.7, 2)
    found = block_losses(train_x, train_y, x, y, BlockShape(b, k, loss), seed=4)
    mean_of = {c: train_x[train_y == c].mean(0) for c in y.unique().tolist()}

    def of(f, own, others):
        v = np.array([float(f @ (own - other)) for other in others])
        return np.log2(1 + np.exp(-v).sum()) if loss == "logistic" else max(0.0, (1 - v).max())

    sampler = ClassBlocks(torch.searchsorted(y.unique(), y).numpy(), b + 1, None, Seeds(4))
    rows = np.concatenate([sampler.rows(epoch) for epoch in range(-(-BLOCKS * (b + 1) // len(sampler)))])
    unsupervised, supervised = [], []
    for number, block in enumerate(rows.reshape(-1, b + 1)[: 3 * 64].reshape(3, 64, b + 1)):  # the first batches
        drawn = drawn_blocks(torch.arange(64 * (b + 1)), 64 * (b + 1), b + 1, k, number)
        for (i, j), row in np.ndenumerate(block):
            others = drawn[i * (b + 1) + j].tolist()
            own = x[np.delete(block[i], j)].mean(0)
            unsupervised.append(of(x[row], own, [x[block[m, 1:]].mean(0) for m in others]))
            plus, minus = int(y[row]), {int(y[block[m, 0]]) for m in others}
            if plus not in minus:
                supervised.append(of(x[row], mean_of[plus], [mean_of[c] for c in minus]))
    # All blocks against the first of them: equal up to what the rest of them varies.
    for name, loop in (("unsupervised", unsupervised), ("supervised", supervised)):
        assert found[name] == pytest.approx(np.mean(loop), abs=5 * np.std(loop) / (64 * 3) ** 0.5)


@pytest.mark.parametrize("loss", ["logistic", "hinge"])
@pytest.mark.parametrize("b", [1, 4])
@pytest.mark.parametrize("spread", [0.2, 1.0, 3.0])
def test_the_supervised_loss_is_below_its_bound(b, loss, spread):
    """Proposition 6.2 with k = 1: L_sup^mu <= (L_un^block - tau) / (1 - tau), tau = 1/C, on the points' own means."""
    x, y = points_of_classes(8, 30, spread, 3)
    found = block_losses(x, y, x, y, BlockShape(b, 1, loss))
    tau = 1 / 8
    assert found["supervised"] <= (found["unsupervised"] - tau) / (1 - tau) + 0.02
    assert found["unsupervised"] == found["unsupervised_train"]


def test_classes_that_are_too_small_or_unknown():
    x, y = points_of_classes(4, 3, 1.0, 0)
    refused(DataError, "no class has 5 members", block_losses, x, y, x, y, BlockShape(4, 1))
    labels, known = torch.where(y == 3, -1, y), (x[y != 3], y[y != 3])
    assert block_losses(x, labels, x, y, BlockShape(1, 2)) == block_losses(*known, *known, BlockShape(1, 2))
    assert BlockShape.of(None, 3) == BlockShape.of(dipole.objective("infonce"), 3) == BlockShape(3, 1, "logistic")
    assert BlockShape.of(dipole.objective("blocks(k=3)"), 2) == BlockShape(2, 3)
    assert set(LABELS[ClassBlocks(LABELS, 5, None, Seeds(0)).rows(0)]) == {5, 2}
    refused(DataError, "10 members for a block, at most 9", ClassBlocks, LABELS, 10, 3, Seeds(0))


@pytest.mark.parametrize("count", [None, 1, 5])
@pytest.mark.parametrize("size", [2, 3])
def test_a_block_is_different_rows_of_one_class(size, count):
    blocks = ClassBlocks(LABELS, size, count, Seeds(0))
    for epoch in range(3):
        rows = blocks.rows(epoch)
        assert len(rows) == len(blocks)
        for block in rows.reshape(-1, size):
            assert (len(set(LABELS[block])), len(set(block))) == (1, size)


def test_without_a_count_rows_are_used_up_before_they_come_again():
    blocks = ClassBlocks(LABELS, 2, None, Seeds(0))
    assert len(blocks) == 6 + 4 + 8 + 2
    left_out = set()
    for epoch in range(60):
        rows = blocks.rows(epoch).reshape(-1, 2)
        mine = rows[LABELS[rows[:, 0]] == 5].ravel().tolist()
        for start in range(0, len(mine), 6):
            # Three blocks of a class of 7 hold different rows and leave one out.
            held = mine[start : start + 6]
            assert len(set(held)) == len(held)
            left_out |= set(range(7)) - set(held) if len(held) == 6 else set()
    assert left_out == set(range(7))


def test_counted_blocks_are_drawn_once_and_use_rows_evenly():
    blocks = ClassBlocks(LABELS, 2, 6, Seeds(0))
    assert len(blocks) == 4 * 6 * 2
    epochs = [blocks.rows(epoch).reshape(-1, 2) for epoch in range(60)]
    assert not np.array_equal(epochs[0], epochs[1])
    for label in (5, 2):
        drawn = [[tuple(block) for block in rows if LABELS[block[0]] == label] for rows in epochs]
        kept = set().union(*drawn)
        assert len(kept) == 6
        used = np.bincount(np.ravel(list(kept)), minlength=len(LABELS))[label == LABELS]
        assert used.max() - used.min() <= 2
        assert all(len(set(one[start : start + 6])) == len(one[start : start + 6]) for one in drawn for start in (0, 6))
        others = ClassBlocks(LABELS, 2, 6, Seeds(1)).rows(0).reshape(-1, 2)
        assert kept != {tuple(block) for block in others if LABELS[block[0]] == label}


@pytest.mark.parametrize("count", [None, 1, 3])
def test_classes_are_drawn_independently_and_uniformly(count):
    blocks = ClassBlocks(LABELS, 2, count, Seeds(0))
    pairs = np.array([LABELS[blocks.rows(epoch).reshape(-1, 2)[:2, 0]] for epoch in range(3000)])
    shares = [(pairs == label).mean() for label in np.unique(LABELS)]
    np.testing.assert_allclose(shares, 0.25, atol=5 * np.sqrt(0.25 * 0.75 / 6000))
    collision = (pairs[:, 0] == pairs[:, 1]).mean()
    assert collision == pytest.approx(0.25, abs=5 * np.sqrt(0.25 * 0.75 / 3000))
