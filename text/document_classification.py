"""Documents with a class, told by the mean of their sentences' vectors (Arora et al. 2019, IMDb)."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from dipole.core.evaluation.probes import linear_probe
from dipole.core.utils.errors import DataError
from dipole.text.corpus import Document

CHUNK = 1000  # documents whose sentences are encoded together


def document_vectors(encode: Callable[[list[str]], np.ndarray], documents: Iterable[Document]) -> Tensor:
    """(n, d) mean of the sentences' vectors of each document.

    Args:
        encode: sentences to (m, d) vectors.
    """
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
    """Whether documents, by class and whether they are for testing, can be classified.

    Raises:
        DataError: if either part is empty, or training has a single class.
    """
    kinds = set(documents)
    trained = {label for label, tested in kinds if not tested}
    for part, found in (("training", trained), ("testing", {label for label, tested in kinds if tested})):
        if not found:
            raise DataError(f"{where} has no documents for {part}.")
    if len(trained) == 1:
        raise DataError(f"{where} has one class alone for training, {trained.pop()!r}: there is nothing to tell apart.")


def document_accuracy(
    encode: Callable[[list[str]], np.ndarray],
    documents: Iterable[tuple[Document, str, bool]],
    where: str,
    device: torch.device | str = "cpu",
) -> dict[str, float]:
    """Test accuracy of a linear classifier on document vectors, "labelled/accuracy".

    Args:
        documents: each with its class and whether it is for testing; see `corpus.labelled_documents`.
        where: names the source in messages.
        device: where the classifier is trained.

    Raises:
        DataError: if either part is empty, or training has a single class.
    """
    listed = list(documents)
    classes = {label: number for number, label in enumerate(sorted({label for _, label, _ in listed}))}
    parts = []
    check_parts(((label, tested) for _, label, tested in listed), where)
    for is_test in (False, True):
        mine = [(document, classes[label]) for document, label, tested in listed if tested == is_test]
        vectors = document_vectors(encode, (d for d, _ in mine))
        parts += [vectors.to(device), torch.tensor([c for _, c in mine])]
    return {"labelled/accuracy": linear_probe(*parts).accuracy}
