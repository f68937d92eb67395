"""`dipole embed`: read inputs, compute vectors with a trained model, and write them to a file.

A domain implements `Embedder`, which reads inputs and computes vectors.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from dipole.core.utils.errors import DataError, OptionError, nearest
from dipole.core.utils.extras import needing
from dipole.core.utils.files import atomic_file, disk_refusing, replacing
from dipole.core.utils.progress import Progress
from dipole.core.utils.text import warn


@dataclass(frozen=True)
class Inputs:
    """Inputs of `dipole embed`.

    Args:
        key: name of the identifiers, "path" or "id".
        rows: its identifiers (all strings, or all whole numbers) and contents, in order.
        total: number of rows, None for a stream.
    """

    key: str
    rows: Iterable[tuple[Any, Any]]
    total: int | None = None


class Embedder(ABC):
    """A trained model with the preprocessing of its evaluation.

    Attributes:
        batch_size: default number of rows at a time.
        on_corrupt: "refuse" or "skip" inputs that cannot be decoded. None where that cannot be chosen.
    """

    batch_size: int
    on_corrupt: str | None = None

    @cached_property
    def skipped(self) -> list[str]:
        """The inputs that were skipped, each with the reason."""
        return []

    @abstractmethod
    def read(self, source: str, column: str | None = None) -> Inputs:
        """Return identifiers and contents of the rows of a file, a folder, or "-" (lines of standard input).

        Args:
            source: the path, or "-".
            column: of a table. By default the first usual name.

        Raises:
            DataError: nothing is there, or it cannot be read.
            OptionError: `column` where there are no columns.
        """

    @abstractmethod
    def vectors(self, rows: list[Any]) -> Tensor:
        """Return the features of rows, (n, d) float32 on the CPU.

        Args:
            rows: n contents from `read`.
        """


def chosen_features(asked: str | None, allowed: Iterable[str]) -> str:
    """Return the requested name of features, by default the first allowed one."""
    names = list(allowed)
    if asked is not None and asked not in names:
        raise OptionError(
            f"--features: {asked!r} is not known here.{nearest(asked, names)} Allowed: {', '.join(names)}."
        )
    return asked or names[0]


def embed(
    embedder: Embedder,
    source: str,
    out: Path,
    *,
    batch_size: int | None = None,
    column: str | None = None,
    quiet: bool = False,
) -> tuple[int, int]:
    """Write the vectors of inputs to a file atomically, and return their number and width.

    `out` is NAME.parquet, with a column of identifiers and one of lists of fixed size, or NAME.npy (n, d), with the
    identifiers in NAME.ids.json. Raise OptionError for another suffix or batch_size < 1, DataError without
    inputs, TrainingError if the disk refused.
    """
    writer = writer_of(out)
    size = embedder.batch_size if batch_size is None else batch_size
    if size < 1:
        raise OptionError(f"--batch-size must be 1 or more, got {size}.")
    inputs = embedder.read(source, column)
    progress = Progress(quiet)
    progress.start("embed", inputs.total or 0, 0)
    done = width = broken_rows = 0
    try:
        with disk_refusing(f"cannot write {out}", option="-o"), writer(out, inputs.key) as write:
            rows = iter(inputs.rows)
            while batch := list(islice(rows, size)):
                found = embedder.vectors([content for _, content in batch]).numpy()
                width = found.shape[1]
                broken_rows += int((~np.isfinite(found)).any(1).sum())
                write([name for name, _ in batch], found)
                done += len(batch)
                progress.update(done)
            if not done:
                broken = "".join(f"\n{each}" for each in embedder.skipped[:5])
                raise DataError(f"{source} holds nothing to embed.{broken}")
    finally:
        progress.close(done)
    if broken_rows:
        warn(
            f"{out}: {broken_rows} of {done} vectors are not finite (NaN or infinity): the encoder has diverged. Look "
            "at the run's loss."
        )
    return done, width


Write = Callable[[list[Any], np.ndarray[Any, Any]], None]
Writer = Callable[[Path, str], AbstractContextManager[Write]]


def writer_of(out: Path) -> Writer:
    """Return the writer of a suffix. Raise OptionError for another one."""
    if out.suffix not in WRITERS:
        raise OptionError(f"-o {out}: the suffix says the format, and must be one of {', '.join(WRITERS)}.")
    return WRITERS[out.suffix]


@contextmanager
def parquet(out: Path, key: str) -> Iterator[Write]:
    """Write columns `key` and "features", with one row group for each batch."""
    with needing("text", f"-o {out}: parquet (an .npy file needs no package)"):
        import pyarrow
        from pyarrow.parquet import ParquetWriter
    file: Any = None
    with replacing(out) as temporary, ExitStack() as stack:

        def write(names: list[Any], found: np.ndarray[Any, Any]) -> None:
            nonlocal file
            flat = pyarrow.array(np.ascontiguousarray(found, dtype=np.float32).ravel())
            lists = pyarrow.FixedSizeListArray.from_arrays(flat, found.shape[1])
            if isinstance(names[0], str):  # names of files may be no UTF-8
                names = [name.encode(errors="backslashreplace").decode() for name in names]
            table = pyarrow.table({key: pyarrow.array(names), "features": lists})
            if file is None:
                file = stack.enter_context(ParquetWriter(str(temporary), table.schema))
            file.write_table(table)

        yield write


@contextmanager
def npy(out: Path, key: str) -> Iterator[Write]:
    """Write an array (n, d) of float32, and the identifiers as a JSON list to NAME.ids.json."""
    rows = width = 0
    with atomic_file(out) as array, atomic_file(out.with_suffix(".ids.json")) as ids:

        def write_header() -> None:  # its length does not depend on the shape
            header = {"descr": "<f4", "fortran_order": False, "shape": (rows, width)}
            np.lib.format.write_array_header_1_0(array, header)

        def write(names: list[Any], found: np.ndarray[Any, Any]) -> None:
            nonlocal rows, width
            array.write(np.ascontiguousarray(found, dtype="<f4").tobytes())
            for name in names:
                ids.write((",\n" * (rows > 0) + json.dumps(name)).encode())
                rows += 1
            width = found.shape[1]

        write_header()
        ids.write(b"[")
        yield write
        ids.write(b"]\n")
        array.seek(0)
        write_header()


WRITERS: dict[str, Writer] = {".parquet": parquet, ".npy": npy}
