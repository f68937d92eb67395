"""Blocks of similar points: rows of one class drawn together, as Arora et al. simulate their latent classes."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dipole.core.utils.errors import DataError
from dipole.core.utils.seeding import Seeds
from dipole.core.utils.text import counted


@dataclass(frozen=True)
class ClassBlocks:
    """Blocks of `size` different rows of one class (Arora et al. 2019, Sec. 2 and 8.1).

    The class of each block is drawn independently of all others, c ~ rho, and rho is uniform over the classes that have
    `size` rows: two blocks are of one class with probability 1/C, in a batch as in an epoch.

    Args:
        labels: (n,) class of each row.
        size: rows of a block: x and its b positives, b + 1.
        count: different blocks of each class, drawn once: the amount of unlabelled data, M. None: from all rows, in
            every epoch anew.
        seed: blocks and their order depend on it alone.

    A class uses up its blocks (without a count: its rows) before it uses one again, within an epoch.

    Raises:
        DataError: if no class has `size` rows. A class with fewer is left out.
    """

    labels: np.ndarray
    size: int
    count: int | None
    seed: Seeds

    def __post_init__(self) -> None:
        if not self.members:
            most = int(np.unique(self.labels, return_counts=True)[1].max(initial=0))
            raise DataError(
                f"no class has {counted(self.size, 'member')} for a block, at most {most}; choose a smaller block."
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
                found[places] = mine[_rounds(self.count, len(places), draw)]
        return found.ravel()


def _blocks(members: np.ndarray, size: int, count: int, draw: np.random.Generator) -> np.ndarray:
    """Return (count, size) blocks of a class. No row repeats before all rows are used."""
    filled = len(members) // size
    rounds = [draw.permutation(members)[: filled * size] for _ in range(-(-count // filled))]
    return np.concatenate([members[:0], *rounds]).reshape(-1, size)[:count]


def _rounds(blocks: int, count: int, draw: np.random.Generator) -> np.ndarray:
    """Return (count,) numbers below `blocks`. No number repeats before all are used."""
    return np.concatenate([np.arange(0), *(draw.permutation(blocks) for _ in range(-(-count // blocks)))])[:count]
