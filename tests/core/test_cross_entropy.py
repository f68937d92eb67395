"""Cross entropy on labels against PyTorch's own, and what it says of labels it cannot take."""

import pytest
import torch
import torch.nn.functional as F

import dipole
from dipole.core.objectives.pairs import Pairs
from dipole.core.utils.errors import PairsError


def built(classes=5, dim=7):
    torch.manual_seed(0)
    return dipole.objective(f"cross_entropy(classes={classes})", dim=dim).double()


@pytest.mark.parametrize("layout", ["views", "cross", "blocks", "first"])
def test_loss_and_gradients_are_pytorchs(layout):
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(2, 6, 7, generator=draw, dtype=torch.double, requires_grad=True)
    labels = torch.tensor([0, 4, 2, 2, 1, 3])
    pairs, rows, target = {
        "views": lambda: (Pairs.from_views(list(x), labels), x.flatten(0, 1), labels.repeat(2)),
        "cross": lambda: (Pairs.cross(x[0], x[1], labels=labels), x[0], labels),
        "blocks": lambda: (
            Pairs.from_blocks(x.transpose(0, 1), anchors="all", labels=labels),
            x.transpose(0, 1).reshape(12, 7),
            labels.repeat_interleave(2),
        ),
        "first": lambda: (Pairs.from_blocks(x.transpose(0, 1), labels=labels), x[0], labels),
    }[layout]()
    objective = built()
    (vectors,) = objective.parameters()
    expected = F.cross_entropy(rows @ vectors.T, target)
    loss = objective(pairs).loss
    torch.testing.assert_close(loss, expected)
    for ours, theirs in zip(
        torch.autograd.grad(loss, [x, vectors], retain_graph=True),
        torch.autograd.grad(expected, [x, vectors]),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_half_precision_embeddings_are_taken():
    x = torch.randn(4, 7).bfloat16().requires_grad_()
    objective = built().float()
    loss = objective(Pairs.from_views([x, x], torch.tensor([0, 1, 2, 3]))).loss
    loss.backward()
    assert loss.dtype == torch.float32
    assert x.grad.isfinite().all()


def test_labels_that_do_not_fit_are_named():
    x = torch.randn(3, 7, dtype=torch.double)
    with pytest.raises(PairsError, match="needs labels"):
        built()(Pairs.from_views([x, x]))
    with pytest.raises(PairsError, match="set classes=8 or more"):
        built()(Pairs.from_views([x, x], torch.tensor([0, 1, 7])))
    with pytest.raises(PairsError, match="leave unlabelled rows out"):
        built()(Pairs.from_views([x, x], torch.tensor([0, -1, 2])))


def test_blocks_carry_labels_for_the_tuple_loss_too():
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(4, 3, 7, generator=draw, dtype=torch.double)
    labels = torch.tensor([0, 1, 0, 1])
    found = dipole.objective("tuple(temperature=1)")(Pairs.from_blocks(x, labels=labels)).loss
    points, of_points = F.normalize(x, dim=2).reshape(12, 7), labels.repeat_interleave(3).tolist()
    rows = []
    for block in range(4):
        anchor, mine = 3 * block, int(labels[block])
        scores = points @ points[anchor]
        rest = sum(float(scores[j].exp()) for j in range(12) if of_points[j] != mine)
        own = [float(scores[j].exp()) for j in range(12) if of_points[j] == mine and j != anchor]
        rows.append(sum(-torch.tensor(p / (p + rest)).log() for p in own) / len(own))
    torch.testing.assert_close(found, torch.stack(rows).mean().double(), atol=1e-6, rtol=0)
    with pytest.raises(PairsError, match="labels"):
        Pairs.from_blocks(x, labels=torch.zeros(3, dtype=torch.long))
