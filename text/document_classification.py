"""Documents with a class, told by the mean of their sentences' vectors (Arora et al. 2019, IMDb)."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from dipole.core.evaluation.probes import linear_probe
from dipole.core.utils.errors import DataError
from dipole.core.utils.rows import located_rows, require_columns
from dipole.text.corpus import Document, row_piece, sentences_of
from dipole.text.splitting import READER

CHUNK = 1000  # documents whose sentences are encoded together


def labelled_documents(source: str, column: str | None = None) -> Iterator[tuple[Document, str, bool]]:
    """Yield documents with their class, and whether they are for testing.

    The source is a file of rows with columns of the text and of `label`, or "hub:NAME" with the splits train and test.
    A row of a file can have a `split`, train or test. Otherwise every fifth document of a class is for testing.
    """
    seen: dict[str, int] = {}
    parts: tuple[str, ...] = ("",)
    if source.startswith("hub:"):
        parts = ("train", "test")
    for part in parts:
        for number, (where, row) in enumerate(located_rows(source, part or "train", "utf-8", READER), 1):
            if part:
                where = f"{where} of split {part}"
            require_columns(row, ["label"], where)
            if row["label"] is None:
                raise DataError(f"{where}: the column 'label' is empty. Fill it, or leave the row out.")
            split = part or row.get("split")
            if split not in ("train", "test", None):
                raise DataError(f"{where}: split must be train or test, got {split!r}.")
            label = str(row["label"])
            seen[label] = seen.get(label, 0) + 1
            piece = row_piece(row, where, column, number)
            sentences = sentences_of(piece.text, piece.is_lines)
            is_test = split == "test" or (split is None and seen[label] % 5 == 0)
            if sentences:
                yield Document(piece.name, sentences), label, is_test


def document_vectors(encode: Callable[[list[str]], np.ndarray], documents: Iterable[Document]) -> Tensor:
    """Return the mean of the sentences' vectors of each document, (n, d)."""
    found, rest = [], iter(documents)
    while part := list(islice(rest, CHUNK)):
        vectors = encode([sentence for document in part for sentence in document.sentences])
        starts = np.cumsum([0, *(len(document.sentences) for document in part[:-1])])
        counts = np.array([len(document.sentences) for document in part])
        found.append(torch.from_numpy(np.add.reduceat(vectors, starts) / counts[:, None]))
    return torch.cat(found)


def held_back(
    documents: Iterable[tuple[Document, str, bool]], share: float, generator: np.random.Generator
) -> Iterator[tuple[Document, str, bool]]:
    """The documents for training, a seeded share of them for testing in place of those that are for testing."""
    for document, label, tested in documents:
        if not tested:
            yield document, label, bool(generator.random() < share)


def check_parts(documents: Iterable[tuple[str, bool]], where: str) -> None:
    """Raise DataError unless there are documents for training and testing, and two classes for training."""
    kinds = set(documents)
    trained = {label for label, tested in kinds if not tested}
    for part, found in (("training", trained), ("testing", {label for label, tested in kinds if tested})):
        if not found:
            raise DataError(f"{where} has no documents for {part}.")
    if len(trained) == 1:
        raise DataError(f"{where} has one class alone for training, {trained.pop()!r}: a classifier needs two.")


def document_accuracy(
    encode: Callable[[list[str]], np.ndarray],
    documents: Iterable[tuple[Document, str, bool]],
    where: str,
    device: torch.device | str = "cpu",
) -> dict[str, float]:
    """Test accuracy of a linear classifier on document vectors, "labelled/accuracy"."""
    listed = list(documents)
    classes = {label: number for number, label in enumerate(sorted({label for _, label, _ in listed}))}
    parts = []
    check_parts(((label, tested) for _, label, tested in listed), where)
    for is_test in (False, True):
        mine = [(document, classes[label]) for document, label, tested in listed if tested == is_test]
        vectors = document_vectors(encode, (d for d, _ in mine))
        parts += [vectors.to(device), torch.tensor([c for _, c in mine])]
    return {"labelled/accuracy": linear_probe(*parts).accuracy}
