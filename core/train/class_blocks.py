"""Blocks of similar points: rows of one class drawn together, as Arora et al. simulate their latent classes.

`block_losses` gives the two losses of their Figure 2 (c): unsupervised on held-out blocks, supervised of the mean
classifier.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from dipole.core.objectives.losses.blocks import Blocks, hinge, logistic
from dipole.core.objectives.objective import Composite
from dipole.core.objectives.pairs import Pairs
from dipole.core.utils.errors import DataError
from dipole.core.utils.seeding import Seeds
from dipole.core.utils.text import counted

BLOCKS = 2048  # of each part, at most a few more
TOGETHER = 64  # blocks among which negatives are drawn, at least


@dataclass(frozen=True)
class ClassBlocks:
    """Blocks of `size` different rows of one class: x and its b positives (Arora et al. 2019, Sec. 2 and 8.1).

    The class of each block is drawn independently, c ~ rho, uniform over the classes that have `size` rows. `labels`
    (n,) are the classes of rows. `count` is the number of different blocks of each class, drawn once (the amount of
    unlabelled data, M). With None, each epoch draws new ones from all rows. A class uses up its blocks, or its rows,
    before it repeats one within an epoch. Raise DataError if no class has `size` rows.
    """

    labels: np.ndarray
    size: int
    count: int | None
    seed: Seeds

    def __post_init__(self) -> None:
        if not self.members:
            most = int(np.unique(self.labels, return_counts=True)[1].max(initial=0))
            raise DataError(
                f"no class has {counted(self.size, 'member')} for a block, at most {most}. Choose a smaller block."
            )

    @cached_property
    def members(self) -> list[np.ndarray]:
        """Return the rows of each class that has enough of them."""
        order = np.argsort(self.labels, kind="stable")
        starts = np.unique(self.labels[order], return_index=True)[1][1:]
        return [rows for rows in np.split(order, starts) if len(rows) >= self.size]

    def __len__(self) -> int:
        """Return the number of rows of an epoch, in as many blocks as are distinct."""
        return self.size * sum(self.count or len(rows) // self.size for rows in self.members)

    def rows(self, epoch: int) -> np.ndarray:
        """Return the (len(self),) rows of an epoch, block after block."""
        blocks = len(self) // self.size
        draw = self.seed.numpy("data", "blocks", epoch)
        owner = draw.integers(len(self.members), size=blocks)
        order = np.argsort(owner, kind="stable")
        ends = np.cumsum(np.bincount(owner, minlength=len(self.members)))
        once = self.seed.numpy("data", "blocks")
        found = np.empty((blocks, self.size), dtype=np.int64)
        for members, places in zip(self.members, np.split(order, ends[:-1]), strict=True):
            if self.count is None:
                found[places] = _blocks(members, self.size, len(places), draw)
            else:
                mine = _blocks(members, self.size, self.count, once)
                found[places] = mine[_blocks(np.arange(self.count), 1, len(places), draw)[:, 0]]
        return found.ravel()


def _blocks(members: np.ndarray, size: int, count: int, draw: np.random.Generator) -> np.ndarray:
    """Return (count, size) blocks of a class. No row repeats before all rows are used."""
    filled = len(members) // size
    rounds = [draw.permutation(members)[: filled * size] for _ in range(-(-count // filled))]
    return np.concatenate([members[:0], *rounds]).reshape(-1, size)[:count]


@dataclass(frozen=True)
class BlockShape:
    """b positives, k negative blocks of b points each, and the loss of their margins."""

    b: int = 1
    k: int = 1
    loss: Literal["logistic", "hinge"] = "logistic"

    @classmethod
    def of(cls, objective: Composite | None, size: int) -> "BlockShape":
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

    `unsupervised` and `unsupervised_train`: Eq. 12 on 2,048 blocks of test and of training points (`ClassBlocks`).
    `supervised`: of the test points whose c^+ is none of c_1^-..c_k^-, l({f(x)^T (mu_c^+ - mu_c)}) over the distinct c
    among them (Sec. 6.1), with mu_c = E_{x ~ D_c} f(x) over all training points of the class (Definition 2.1). Rows are
    (n, d), and classes (n,) are negative where unknown.
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
    of_margins, joined = (logistic, torch.logsumexp) if shape.loss == "logistic" else (hinge, torch.amax)
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
        found.append((of_margins(joined(margins, 1)), of_margins(joined(towards, 1))[apart]))
    return found
