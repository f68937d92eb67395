"""Texts on the disk: written as they come, equal ones found by digests, and each kept once.

Which texts are equal has to be known across all of them. What is held for it is a share of their digests at a time
(128 bits of SHA-256, by whose first bits they are put into files), so that memory grows by a sixty-fourth of 24 bytes a
text where a dictionary of the texts holds all of them.
"""

import hashlib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, overload

import numpy as np

BLOCK = 1 << 20  # bytes of texts that are written together
HELD = 300_000  # digests that are held before they are put into files
SHARES = 64
END = b"\0"  # behind each text, as hashes of texts have it


class Texts(Sequence[str]):
    """Texts in a file that is mapped: the bytes of text i, and `END`, lie between offsets i and i + 1."""

    def __init__(self, data: np.ndarray, offsets: np.ndarray) -> None:
        self._data, self._offsets = data, offsets

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> list[str]: ...
    def __getitem__(self, place: int | slice) -> str | list[str]:
        if isinstance(place, slice):
            start, stop, step = place.indices(len(self))
            return [self[each] for each in range(start, stop, step)] if step != 1 else self._between(start, stop)
        return self._between(range(len(self))[place], range(len(self))[place] + 1)[0]

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), 1000):
            yield from self[start : start + 1000]

    def _between(self, start: int, stop: int) -> list[str]:
        if stop <= start:
            return []
        bounds = self._offsets[start : stop + 1]
        data = self._data[bounds[0] : bounds[-1]].tobytes()
        places = (bounds - bounds[0]).tolist()
        return [data[a : b - 1].decode("utf-8", "surrogatepass") for a, b in pairwise(places)]


class Spool:
    """Takes texts one by one and tells afterwards which of them are the same.

    Args:
        folder: for files of its own; it has to be there.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = self._size = 0
        self._pending: list[bytes] = []
        self._blocks: list[int] = []  # texts of each
        self._digests: list[np.ndarray] = []
        self._held = 0
        self._shared = False
        self._texts, self._lengths = (folder / "texts.all").open("wb"), (folder / "lengths.all").open("wb")

    def __len__(self) -> int:
        return self._count

    def add(self, text: str) -> int:
        """The number of this text among all that were added; equal ones have numbers of their own."""
        data = text.encode("utf-8", "surrogatepass") + END
        self._pending.append(data)
        self._size += len(data)
        if self._size >= BLOCK:
            self._write()
        self._count += 1
        return self._count - 1

    def close(self) -> None:
        """Close the files; nothing is added any more."""
        self._texts.close()
        self._lengths.close()

    def _write(self) -> None:
        pending = self._pending
        self._texts.write(b"".join(pending))
        self._lengths.write(np.fromiter(map(len, pending), np.int64, len(pending)).tobytes())
        sha256 = hashlib.sha256
        digests = b"".join([sha256(data).digest()[:16] for data in pending])
        self._digests.append(np.frombuffer(digests, np.uint64).reshape(-1, 2))
        self._blocks.append(len(pending))
        self._held += len(pending)
        self._pending, self._size = [], 0
        if self._held >= HELD:
            self._share_out()

    def _records(self) -> np.ndarray:
        """(n, 3) uint64: the digests that are held, and the numbers of their texts."""
        digests = np.concatenate(self._digests) if self._digests else np.zeros((0, 2), np.uint64)
        written = sum(self._blocks)
        numbers = np.arange(written - len(digests), written, dtype=np.uint64)
        self._digests, self._held = [], 0
        return np.column_stack([digests, numbers])

    def _share_out(self) -> None:
        records = self._records()
        share = (records[:, 0] % SHARES).astype(np.int64)
        records = records[np.argsort(share, kind="stable")]
        ends = np.cumsum(np.bincount(share, minlength=SHARES))
        for number, part in enumerate(np.split(records, ends[:-1])):
            with open(self._share(number), "ab") as file:
                file.write(part.tobytes())
        self._shared = True

    def _share(self, number: int) -> Path:
        return self._folder / f"digests.{number:02d}"

    def _shares(self) -> Iterator[np.ndarray]:
        """Records of digests; equal ones are in the same share, and the numbers of each rise."""
        if not self._shared:
            yield self._records()
            return
        self._share_out()
        for number in range(SHARES):
            yield np.fromfile(self._share(number), np.uint64).reshape(-1, 3)
            self._share(number).unlink()

    def distinct(self, texts: BinaryIO, offsets: BinaryIO) -> tuple[np.ndarray, str]:
        """Write each different text once, in the order in which it comes first.

        Args:
            texts, offsets: files for `Texts`.

        Returns:
            (n,) int64, mapped: for each text that was added its number among the different ones; and the hash of these.
        """
        if self._pending:
            self._write()
        self.close()
        path = self._folder / "numbers.all"
        with open(path, "wb") as file:
            file.truncate(8 * max(1, self._count))
        # Where a text comes first, a number behind zero says; of one that came before, minus one less where it did.
        found: Any = np.memmap(path, np.int64, mode="r+", shape=(self._count,))
        for records in self._shares():
            again, first = _again(records)
            found[again] = -1 - first
        digest, before, end = hashlib.sha256(), 0, 0
        offsets.write(np.zeros(1, np.int64).tobytes())
        with open(self._folder / "texts.all", "rb") as file, open(self._folder / "lengths.all", "rb") as sizes:
            start = 0
            for count in self._blocks:
                part = found[start : start + count]
                lengths = np.frombuffer(sizes.read(8 * count), np.int64)
                data = np.frombuffer(file.read(int(lengths.sum())), np.uint8)
                new, old = np.flatnonzero(part >= 0), np.flatnonzero(part < 0)
                known = -1 - part[old]
                part[new] = before + np.arange(len(new))
                part[old] = found[known]
                kept = (data if not len(old) else data[np.repeat(_mask(new, count), lengths)]).tobytes()
                digest.update(kept)
                texts.write(kept)
                ends = end + np.cumsum(lengths[new])
                offsets.write(ends.tobytes())
                before, end, start = before + len(new), end + len(kept), start + count
        for name in ("texts.all", "lengths.all"):
            (self._folder / name).unlink()
        return found, digest.hexdigest()


def _again(records: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of the texts that came before, and where each did first."""
    order = np.lexsort((records[:, 1], records[:, 0]))  # stable: of equal ones the first stands first
    records = records[order]
    heads = np.ones(len(records), bool)
    heads[1:] = (records[1:, :2] != records[:-1, :2]).any(1)
    numbers = records[:, 2].astype(np.int64)
    first = numbers[heads][np.cumsum(heads) - 1]
    return numbers[~heads], first[~heads]


def _mask(places: np.ndarray, count: int) -> np.ndarray:
    found = np.zeros(count, bool)
    found[places] = True
    return found
