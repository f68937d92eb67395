"""Measure held-out sentences and pairs."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dipole.core.evaluation.class_tasks import class_tasks
from dipole.core.evaluation.diagnostics import pair_histogram
from dipole.core.evaluation.probes import knn_probe
from dipole.core.objectives.pairs import Pairs
from dipole.core.train.block_losses import BlockShape, block_losses
from dipole.core.utils.seeding import Seeds
from dipole.text.config import TextSettings
from dipole.text.data import TableData
from dipole.text.retrieval import find_positives, nearest_sentences, next_sentence
from dipole.text.sentences import Sentences
from dipole.text.vocabulary import Tokens

SHOWN = 3  # sentences whose nearest sentences are written down
PAIRED = 1000  # sentences whose pairwise distances are shown, at most


@dataclass(frozen=True)
class Probe:
    """The sentences that are looked at, and how they are encoded.

    Args:
        train, test: rows that are looked at.
        has_held_out: False if `test` are training rows because nothing is held out.
        sides: numbers of sentences -> f and g, (n, d) each, not scaled.
    """

    config: TextSettings
    sentences: Sentences
    tokens: Tokens
    train: np.ndarray
    test: np.ndarray
    has_held_out: bool
    sides: Callable[[np.ndarray], tuple[Tensor, Tensor]]
    workdir: Path
    seed: Seeds

    def document(self, rows: np.ndarray) -> Tensor:
        return torch.from_numpy(self.sentences.document[rows].astype(np.int64))


# Running text ----------------------------------------------------------------------------------------------------


def text_results(probe: Probe) -> dict[str, float]:
    """Measure held-out running text: the next sentence and the document. Write example files into the run's folder."""
    rows = probe.test
    document = probe.document(rows)
    f, g = probe.sides(rows)
    _write_distances(probe, Pairs.from_window(f[:PAIRED], g[:PAIRED], document[:PAIRED].to(f.device)))
    _write_nearest(probe, rows, torch.cat([f, g], 1))
    return next_sentence(f, g, document) | _document_of_neighbours(probe, f)


def _write_distances(probe: Probe, pairs: Pairs) -> None:
    """Write the shares of the distances D = (1 - cos) / 2 of neighbours and of all other sentences (LMCL, Fig. 5)."""
    found = pair_histogram(pairs)
    values = {"edges": found.edges}
    for name, counts in (("correct", found.correct), ("incorrect", found.incorrect)):
        values[name] = counts / counts.sum().clamp_min(1)
    text = json.dumps({name: [round(float(v), 6) for v in value.numpy()] for name, value in values.items()})
    (probe.workdir / "neighbour_distances.json").write_text(text + "\n")


def _document_of_neighbours(probe: Probe, f: Tensor) -> dict[str, float]:
    """Classify sentences by document, with nearest neighbours among training sentences of the same documents."""
    owners = probe.sentences.document
    labels, test_labels = owners[probe.train], owners[probe.test]
    shared = np.isin(test_labels, labels)
    if len(np.unique(labels)) < 2 or not shared.any() or not probe.has_held_out:
        return {}
    known, _ = probe.sides(probe.train)
    index = {int(label): i for i, label in enumerate(np.unique(labels))}
    result = knn_probe(
        known,
        torch.tensor([index[int(label)] for label in labels]),
        f[torch.from_numpy(shared)],
        torch.tensor([index[int(label)] for label in test_labels[shared]]),
    )
    return {"document/knn": float(result.accuracy)}


def document_results(
    probe: Probe, train: np.ndarray, test: np.ndarray, objective: Any, block_size: int
) -> dict[str, float]:
    """Classify all held-out sentences by document, and compute the losses of Arora et al., Figure 2 (c).

    `train` and `test` are all rows, not only those of the probe. `block_size` counts the positives of a sentence.
    """
    config = probe.config
    (x, labels), (test_x, test_labels) = (
        (probe.sides(rows)[0], torch.from_numpy(probe.sentences.document[rows])) for rows in (train, test)
    )
    found = class_tasks(
        x,
        labels,
        test_x,
        test_labels,
        classifiers=config.classifiers,
        solver=config.solver,
        labels_per_class=config.labels_per_class,
        seed=probe.seed.probe,
    )
    results = {f"document/{name}": value for name, value in found.items()}
    if config.losses:
        shape = BlockShape.of(objective, block_size)
        losses = block_losses(x, labels, test_x, test_labels, shape, probe.seed.probe)
        results |= {f"losses/{name}": value for name, value in losses.items()}
    return results


def text_pairs(probe: Probe, device: torch.device | str) -> Pairs | None:
    """Return held-out sentences, paired with their neighbours, or None."""
    rows = probe.test[:PAIRED]
    document = probe.document(rows)
    if len(rows) < 2 or not bool((document[:-1] == document[1:]).any()):
        return None
    return Pairs.from_window(*probe.sides(rows), document.to(device))


# Pair tables -----------------------------------------------------------------------------------------------------


def table_results(probe: Probe, data: TableData) -> dict[str, float]:
    """Measure held-out rows of a table: which text is the positive of an anchor."""
    table, rows = data.table, probe.test
    every = np.concatenate([table.anchor[rows], table.positive[rows], table.negatives[rows].ravel()])
    texts, place = np.unique(every, return_inverse=True)
    first = int((texts < 0).sum())  # -1 comes first, if a row has fewer negatives
    f, g = probe.sides(texts[first:])
    numbers = torch.from_numpy(place - first)
    anchor, positive, negatives = numbers.split([len(rows), len(rows), len(numbers) - 2 * len(rows)])
    asked = distinct(table.anchor[rows])
    shown = torch.cat([f, g], 1)[torch.from_numpy(np.searchsorted(texts, asked) - first)]
    _write_nearest(probe, asked, shown)
    return find_positives(f, g, anchor, positive, negatives.view(len(rows), -1))


def table_pairs(probe: Probe, data: TableData) -> Pairs | None:
    """Return held-out rows in which no text occurs twice on a side, or None if there are fewer than two."""
    table, rows = data.table, probe.test[:PAIRED]
    for texts in (table.positive, table.anchor):
        rows = rows[np.sort(np.unique(texts[rows], return_index=True)[1])]
    if len(rows) < 2:
        return None
    return Pairs.from_columns(probe.sides(table.anchor[rows])[0], probe.sides(table.positive[rows])[1])


def distinct(texts: np.ndarray) -> np.ndarray:
    """Return each number once, in the order of its first occurrence."""
    return texts[np.sort(np.unique(texts, return_index=True)[1])]


def _write_nearest(probe: Probe, rows: np.ndarray, vectors: Tensor) -> None:
    """Write a few held-out sentences with the sentences nearest to each into the run's folder."""
    words = probe.tokens.words()
    ids = probe.sentences.ids(rows)
    texts = [" ".join(words[int(i)] for i in each) for each in ids]
    candidates = [i for i, each in enumerate(ids) if 6 <= len(each) <= 20] or list(range(len(rows)))
    step = max(1, len(candidates) // SHOWN)
    text = nearest_sentences(candidates[::step][:SHOWN], vectors, texts)
    (probe.workdir / "nearest_sentences.txt").write_text(text + "\n", encoding="utf-8")
