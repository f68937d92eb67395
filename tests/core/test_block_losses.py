"""The two losses of Arora et al., Figure 2 (c), against loops and against what Proposition 6.2 says of them."""

import numpy as np
import pytest
import torch

import dipole
from dipole.core.objectives.losses.blocks import drawn_blocks
from dipole.core.train.class_blocks import BLOCKS, BlockShape, ClassBlocks, block_losses
from dipole.core.utils.errors import DataError
from dipole.core.utils.seeding import Seeds


def classes(count, points, spread, seed):
    """Points around the means of `count` classes; the means are the same for every seed."""
    draw = np.random.default_rng(0)
    means = draw.standard_normal((count, 4))
    draw = np.random.default_rng(seed)
    y = np.repeat(np.arange(count), points) * 7 + 3
    x = means.repeat(points, 0) + spread * draw.standard_normal((len(y), 4))
    return torch.from_numpy(x), torch.from_numpy(y)


@pytest.mark.parametrize("loss", ["logistic", "hinge"])
@pytest.mark.parametrize(("b", "k"), [(1, 1), (3, 4)])
def test_both_losses_are_their_loops(loss, b, k):
    (train_x, train_y), (x, y) = classes(6, 9, 0.7, 1), classes(6, 12, 0.7, 2)
    found = block_losses(train_x, train_y, x, y, BlockShape(b, k, loss), seed=4)
    mean_of = {c: train_x[train_y == c].mean(0) for c in y.unique().tolist()}

    def of(v):
        return float(np.log2(1 + np.exp(-v).sum())) if loss == "logistic" else float(max(0.0, (1 - v).max()))

    sampler = ClassBlocks(torch.searchsorted(y.unique(), y).numpy(), b + 1, None, Seeds(4))
    rows = np.concatenate([sampler.rows(epoch) for epoch in range(-(-BLOCKS * (b + 1) // len(sampler)))])
    rows = rows.reshape(-1, b + 1)[:BLOCKS]
    unsupervised, supervised = [], []
    for number in range(3):  # the first batches of 64 blocks
        block = rows[64 * number : 64 * number + 64]
        drawn = drawn_blocks(torch.arange(64 * (b + 1)), 64 * (b + 1), b + 1, k, number).tolist()
        for i in range(64):
            for j in range(b + 1):
                f = x[block[i, j]]
                own = x[[r for t, r in enumerate(block[i]) if t != j]].mean(0)
                others = drawn[i * (b + 1) + j]
                unsupervised.append(of(np.array([float(f @ (own - x[block[m, 1:]].mean(0))) for m in others])))
                plus, minus = int(y[block[i, j]]), {int(y[block[m, 0]]) for m in others}
                if plus not in minus:
                    supervised.append(of(np.array([float(f @ (mean_of[plus] - mean_of[c])) for c in minus])))
    # All blocks against the first of them: equal up to what the rest of them varies.
    for name, loop in (("unsupervised", unsupervised), ("supervised", supervised)):
        assert found[name] == pytest.approx(np.mean(loop), abs=5 * np.std(loop) / (64 * 3) ** 0.5)


def test_the_losses_are_those_of_the_objective():
    """Trained by Eq. 12 on blocks of these classes, the unsupervised loss on new ones falls, and the other with it."""
    torch.manual_seed(0)
    (train_x, train_y), (x, y) = classes(5, 40, 1.0, 1), classes(5, 40, 1.0, 2)
    weight = torch.nn.Linear(4, 4).double()
    objective = dipole.objective("blocks(k=3)")
    shape = BlockShape.of(objective, 2)
    assert shape == BlockShape(2, 3)
    found = []
    optimizer = torch.optim.Adam(weight.parameters(), 0.02)
    sampler = ClassBlocks(train_y.numpy(), 3, None, Seeds(0))
    for step in range(61):
        if step % 30 == 0:
            with torch.no_grad():
                found.append(block_losses(weight(train_x), train_y, weight(x), y, shape))
        block = torch.from_numpy(sampler.rows(step).reshape(-1, 3)[:30])
        loss = objective(dipole.Pairs.from_blocks(weight(train_x[block]), "all", draw=step)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert found[0]["unsupervised"] > found[1]["unsupervised"] > found[2]["unsupervised"]
    assert found[0]["supervised"] > found[1]["supervised"] > found[2]["supervised"]
    assert found[2]["unsupervised_train"] == pytest.approx(float(loss.detach()), rel=0.2)


@pytest.mark.parametrize("loss", ["logistic", "hinge"])
@pytest.mark.parametrize("b", [1, 4])
@pytest.mark.parametrize("spread", [0.2, 1.0, 3.0])
def test_the_supervised_loss_is_below_its_bound(b, loss, spread):
    """Proposition 6.2 with k = 1: L_sup^mu <= (L_un^block - tau) / (1 - tau), tau = 1/C, on the points' own means."""
    x, y = classes(8, 30, spread, 3)
    found = block_losses(x, y, x, y, BlockShape(b, 1, loss))
    tau = 1 / 8
    assert found["supervised"] <= (found["unsupervised"] - tau) / (1 - tau) + 0.02
    assert found["unsupervised"] == found["unsupervised_train"]


def test_classes_that_are_too_small_or_unknown():
    x, y = classes(4, 3, 1.0, 0)
    with pytest.raises(DataError, match="no class has 5 members"):
        block_losses(x, y, x, y, BlockShape(4, 1))
    labels = torch.where(y == 3, -1, y)
    assert block_losses(x, labels, x, y, BlockShape(1, 2)) == block_losses(
        x[y != 3], y[y != 3], x[y != 3], y[y != 3], BlockShape(1, 2)
    )
    assert BlockShape.of(None, 3) == BlockShape.of(dipole.objective("infonce"), 3) == BlockShape(3, 1, "logistic")
