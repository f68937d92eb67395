"""Large arrays of a cache are checked while they are used: by a thread, and each batch asks what it found."""

import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import Thread

import numpy as np

from dipole.core.utils.errors import DataError

READ = 1 << 20  # numbers that are looked at together


class Watch:
    """Compares arrays with their check sums; where one differs, the file that calls them whole is removed.

    What is mapped is looked at, not the files: a folder that was removed meanwhile harms nobody.

    Args:
        index: without it the cache is made again.
        arrays: by name, each with its CRC-32.
    """

    def __init__(self, index: Path, arrays: Mapping[str, tuple[np.ndarray, int]]) -> None:
        self._index, self._arrays = index, arrays
        self._damaged: str | None = None
        self.thread = Thread(target=self._look, name="dipole-watch", daemon=True)
        self.thread.start()

    def _look(self) -> None:
        for name, (array, told) in self._arrays.items():
            check = 0
            for start in range(0, len(array), READ):
                check = zlib.crc32(array[start : start + READ].data, check)
            if check != told:
                with suppress(OSError):
                    self._index.unlink()
                self._damaged = name
                return

    def check(self) -> None:
        """Raise DataError where damage was found so far."""
        if self._damaged is not None:
            raise DataError(
                f"the ids of the corpus in {self._index.parent} are damaged ({self._damaged}.bin). They are made again "
                f"at the next start. What was learnt since this one may rest on wrong ids: train with --overwrite."
            )
