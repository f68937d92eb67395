"""The two losses of Arora et al., Figure 2 (c): unsupervised on held-out blocks, supervised of the mean classifier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from dipole.core.objectives.losses.blocks import Blocks, hinge, logistic
from dipole.core.objectives.objective import Composite
from dipole.core.objectives.pairs import Pairs
from dipole.core.train.sampling import ClassBlocks
from dipole.core.utils.seeding import Seeds

BLOCKS = 2048  # of each part, at most a few more
TOGETHER = 64  # blocks among which negatives are drawn, at least


@dataclass(frozen=True)
class BlockShape:
    """b positives, k negative blocks of b points each, and the loss of their margins."""

    b: int = 1
    k: int = 1
    loss: Literal["logistic", "hinge"] = "logistic"

    @classmethod
    def of(cls, objective: Composite | None, size: int) -> BlockShape:
        """Return the shape of the first `blocks` term: b is its `size`, k is 1 by default. Without one: (size, 1)."""
        for _, _, term in objective if isinstance(objective, Composite) else ():
            if isinstance(term, Blocks):
                return cls(term.b or size, term.k or 1, term.kind)
        return cls(size)


@torch.no_grad()
def block_losses(
    train_x: Tensor, train_y: Tensor, test_x: Tensor, test_y: Tensor, shape: BlockShape, seed: int = 0
) -> dict[str, float]:
    """Return L_un and L_sup^mu (Arora et al. 2019) of raw frozen features.

    `unsupervised` and `unsupervised_train`: Eq. 12 on blocks of test and of training points that are drawn as for
    training (`ClassBlocks`), class collisions among them. `supervised`: for the same test points x and classes, where
    c^+ is none of c_1^-..c_k^-, l({f(x)^T (mu_c^+ - mu_c)}) over the distinct c among them (Sec. 6.1), with rows
    mu_c = E_{x ~ D_c} f(x) over all training points of the class (Definition 2.1). Both of the same l; 2,048 blocks.

    Args:
        train_x, test_x: (n, d); train_y, test_y: (n,) classes, negative where unknown.
        shape: b, k and l.
        seed: of the blocks and of the draws.

    Raises:
        DataError: if no class has b + 1 points in one of the parts.
    """
    train_y, test_y = train_y.to(train_x.device), test_y.to(train_x.device)
    classes = train_y[train_y >= 0].unique()
    known = torch.isin(test_y, classes)
    means = torch.stack([train_x[train_y == each].mean(0) for each in classes])  # (C, d)
    found: dict[str, float] = {}
    for name, x, y in (("", test_x[known], test_y[known]), ("_train", train_x[train_y >= 0], train_y[train_y >= 0])):
        place = torch.searchsorted(classes, y)
        unsupervised, supervised = zip(*_of_batches(x, place, means, shape, seed), strict=True)
        found[f"unsupervised{name}"] = float(torch.cat(unsupervised).mean())
        if not name and len(apart := torch.cat(supervised)):
            found["supervised"] = float(apart.mean())
    return found


def _of_batches(x: Tensor, y: Tensor, means: Tensor, shape: BlockShape, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Return both losses for each point of each batch. The supervised one skips points with a class collision."""
    sampler = ClassBlocks(y.cpu().numpy(), shape.b + 1, None, Seeds(seed))
    epochs = -(-BLOCKS * sampler.size // len(sampler))
    together = max(TOGETHER, shape.k + 1)
    rows = np.concatenate([sampler.rows(epoch) for epoch in range(epochs)]).reshape(-1, sampler.size)[:BLOCKS]
    rows = np.resize(rows, (max(len(rows), together), sampler.size))
    term = Blocks(k=shape.k, loss=shape.loss)
    of_margins = logistic if shape.loss == "logistic" else hinge
    found = []
    for number in range(len(rows) // together):
        block = torch.from_numpy(rows[number * together : (number + 1) * together])
        pairs = term.prepare(Pairs.from_blocks(x[block], "all", draw=number))
        drawn = term.negatives(pairs, shape.k)  # (A, k)
        own = y[block].flatten()  # (A,)
        margins = (pairs.anchors.unsqueeze(1) * (pairs.candidates[drawn] - pairs.candidates[pairs.positives])).sum(2)
        other = y[block[:, 0]][drawn - pairs.first_negative]  # (A, k) classes
        towards = (pairs.anchors.unsqueeze(1) * (means[other] - means[own].unsqueeze(1))).sum(2)
        # A class that was drawn twice is one class of the task.
        earlier = (other.unsqueeze(2) == other.unsqueeze(1)).tril(-1).any(2)
        towards = torch.where(earlier, -torch.inf, towards)
        apart = (other != own.unsqueeze(1)).all(1)
        found.append((of_margins(_joined(margins, shape)), of_margins(_joined(towards, shape))[apart]))
    return found


def _joined(against: Tensor, shape: BlockShape) -> Tensor:
    """Reduce margins (A, k) with opposite sign to the argument (A,) of the loss."""
    return torch.logsumexp(against, 1) if shape.loss == "logistic" else against.amax(1)
