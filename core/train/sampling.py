"""Blocks of similar points: rows of one class drawn together, as Arora et al. simulate their latent classes."""

from dataclasses import dataclass

import numpy as np

from dipole.core.ground.errors import DataError
from dipole.core.ground.seeding import Seeds


@dataclass(frozen=True)
class ClassBlocks:
    """Blocks of `size` different rows of one class, in random order (Arora et al. 2019, Sec. 8.1).

    Args:
        labels: (n,) class of each row.
        size: rows of a block, b.
        count: blocks of each class, drawn once: the amount of unlabelled data, M. None: in every epoch anew, as many as
            the rows of the class fill, each row once.
        seed: blocks and their order depend on it alone.

    Raises:
        DataError: if no class has `size` rows. A class with fewer is left out.
    """

    labels: np.ndarray
    size: int
    count: int | None
    seed: Seeds

    def __post_init__(self) -> None:
        if not len(self):
            most = int(np.unique(self.labels, return_counts=True)[1].max(initial=0))
            raise DataError(f"no class has {self.size} members for a block, at most {most}; choose a smaller block.")

    def __len__(self) -> int:
        """Rows of an epoch."""
        filled = np.unique(self.labels, return_counts=True)[1] // self.size
        return self.size * int((filled > 0).sum() * self.count if self.count else filled.sum())

    def rows(self, epoch: int) -> np.ndarray:
        """(len(self),) rows of an epoch, block after block."""
        draw = self.seed.numpy("data", "blocks", *(() if self.count else (epoch,)))
        blocks = np.concatenate([self._of(np.flatnonzero(self.labels == c), draw) for c in np.unique(self.labels)])
        return blocks[self.seed.numpy("data", "blocks", "order", epoch).permutation(len(blocks))].ravel()

    def _of(self, members: np.ndarray, draw: np.random.Generator) -> np.ndarray:
        """(count, size) blocks of a class; its rows are used up before any is used again."""
        filled = len(members) // self.size
        if not filled:
            return np.empty((0, self.size), dtype=np.int64)
        wanted = self.count or filled
        rounds = [draw.permutation(members)[: filled * self.size] for _ in range(-(-wanted // filled))]
        return np.concatenate(rounds).reshape(-1, self.size)[:wanted]
