"""Words counted exactly in bounded memory: what does not fit is put on the disk in order, and merged."""

import heapq
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import numpy as np

MOST = 1_000_000  # different words that are held; some 150 MB


class Counts:
    """How often each word comes. Nothing is pruned: what is held is written to a run in the order of the words.

    Args:
        folder: for runs; None holds all words.
    """

    def __init__(self, folder: Path | None = None, most: int = MOST) -> None:
        self._held: dict[str, int] = {}
        self._most = most if folder is not None else None
        self._runs: list[Path] = []
        self._scratch = None if folder is None else tempfile.TemporaryDirectory(dir=folder, prefix="words-")

    def __enter__(self) -> "Counts":
        return self

    def __exit__(self, *_: object) -> None:
        if self._scratch is not None:
            self._scratch.cleanup()

    def add(self, words: Sequence[str], counts: np.ndarray) -> None:
        """Count each word so many times more."""
        held = self._held
        for word, count in zip(words, counts.tolist(), strict=True):
            if count:
                held[word] = held.get(word, 0) + count
        if self._most is not None and len(held) > self._most:
            self._spill()

    def _spill(self) -> None:
        assert self._scratch is not None
        run = Path(self._scratch.name) / f"{len(self._runs)}"
        with open(run, "w", encoding="utf-8", errors="surrogatepass", newline="\n") as file:
            # A word holds neither blanks nor line breaks.
            file.writelines(f"{word} {self._held[word]}\n" for word in sorted(self._held))
        self._runs.append(run)
        self._held = {}

    def items(self) -> Iterator[tuple[str, int]]:
        """Each word once, with its count."""
        if not self._runs:
            return iter(self._held.items())
        return _summed(heapq.merge(*map(_read, self._runs), sorted(self._held.items())))


def _read(run: Path) -> Iterator[tuple[str, int]]:
    with open(run, encoding="utf-8", errors="surrogatepass", newline="\n") as file:
        for line in file:
            word, count = line.split(" ")
            yield word, int(count)


def _summed(sorted_counts: Iterable[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    for word, same in groupby(sorted_counts, key=itemgetter(0)):
        yield word, sum(count for _, count in same)
