"""Measure held-out sentences and pairs, and classify labelled documents."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dipole.core.evaluation.arrays import finite_rows
from dipole.core.evaluation.probes import class_tasks, knn_probe, linear_probe
from dipole.core.objectives.pairs import Pairs
from dipole.core.objectives.similarity import normalize
from dipole.core.train.class_blocks import BlockShape, block_losses
from dipole.core.utils.errors import DataError
from dipole.core.utils.rows import located_rows, require_columns
from dipole.core.utils.seeding import Seeds
from dipole.text.corpus import Document, row_piece, sentences_of
from dipole.text.data import Probes
from dipole.text.pair_table import PairTable
from dipole.text.splitting import READER

SHOWN = 3  # sentences whose nearest sentences are written down
PAIRED = 1000  # sentences whose pairwise distances are shown, at most
CHUNK = 256  # anchors whose scores are held at once
TOGETHER = 1000  # documents whose sentences are encoded together


@dataclass(frozen=True)
class ProbeSentences(Probes):
    """The sentences that are looked at, and how they are encoded."""

    sides: Callable[[np.ndarray], tuple[Tensor, Tensor]]  # numbers of sentences -> f and g, (n, d) each, not scaled
    workdir: Path
    seed: Seeds

    def document(self, rows: np.ndarray) -> Tensor:
        return torch.from_numpy(self.data.owners(rows))


def text_results(probe: ProbeSentences) -> dict[str, float]:
    """Measure held-out running text: the next sentence and the document. Write nearest sentences into the folder."""
    f, g = probe.sides(probe.test)
    _write_nearest(probe, probe.test, torch.cat([f, g], 1))
    return next_sentence(f, g, probe.document(probe.test)) | _document_of_neighbours(probe, f)


def _document_of_neighbours(probe: ProbeSentences, f: Tensor) -> dict[str, float]:
    """Classify sentences by document, with nearest neighbours among training sentences of the same documents."""
    labels, test_labels = probe.document(probe.train), probe.document(probe.test)
    classes, labels = labels.unique(return_inverse=True)
    shared = torch.isin(test_labels, classes)
    if len(classes) < 2 or not shared.any() or not probe.has_held_out:
        return {}
    known, _ = probe.sides(probe.train)
    result = knn_probe(known, labels, f[shared], torch.searchsorted(classes, test_labels[shared]))
    return {"document/knn": float(result.accuracy)}


def document_results(
    probe: ProbeSentences, train: np.ndarray, test: np.ndarray, objective: Any, block_size: int
) -> dict[str, float]:
    """Classify all held-out sentences, not only the probe's, and compute the losses of Arora et al., Figure 2 (c)."""
    config = probe.data.config
    (x, labels), (test_x, test_labels) = ((probe.sides(rows)[0], probe.document(rows)) for rows in (train, test))
    chosen: Any = {name: getattr(config, name) for name in ("classifiers", "solver", "labels_per_class")}
    found = class_tasks(x, labels, test_x, test_labels, seed=probe.seed.probe, **chosen)
    results = {f"document/{name}": value for name, value in found.items()}
    if config.losses:
        shape = BlockShape.of(objective, block_size)
        losses = block_losses(x, labels, test_x, test_labels, shape, probe.seed.probe)
        results |= {f"losses/{name}": value for name, value in losses.items()}
    return results


def table_results(probe: ProbeSentences, table: PairTable) -> dict[str, float]:
    """Measure held-out rows of a table: which text is the positive of an anchor."""
    rows = probe.test
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


def held_out_pairs(probe: ProbeSentences) -> Pairs | None:
    """Return held-out sentences and their neighbours, or rows in which no text occurs twice on a side. None: too few"""
    rows, table = probe.test[:PAIRED], probe.data.table
    if table is None:
        if not probe.data.sentences.has_neighbours(rows):
            return None
        f, g = probe.sides(rows)
        return Pairs.from_window(f, g, probe.document(rows).to(f.device))
    for texts in (table.positive, table.anchor):
        rows = rows[_first(texts[rows])]
    if len(rows) < 2:
        return None
    return Pairs.from_columns(probe.sides(table.anchor[rows])[0], probe.sides(table.positive[rows])[1])


def distinct(texts: np.ndarray) -> np.ndarray:
    """Return each number once, in the order of its first occurrence."""
    return texts[_first(texts)]


def _first(texts: np.ndarray) -> np.ndarray:
    return np.sort(np.unique(texts, return_index=True)[1])


def _write_nearest(probe: ProbeSentences, rows: np.ndarray, vectors: Tensor) -> None:
    """Write a few held-out sentences with the sentences nearest to each into the run's folder."""
    words, ids = probe.data.tokens.words(), probe.data.sentences.ids(rows)
    texts = [" ".join(words[int(i)] for i in each) for each in ids]
    candidates = [i for i, each in enumerate(ids) if 6 <= len(each) <= 20] or list(range(len(rows)))
    step = max(1, len(candidates) // SHOWN)
    text = nearest_sentences(candidates[::step][:SHOWN], vectors, texts)
    (probe.workdir / "nearest_sentences.txt").write_text(text + "\n", encoding="utf-8")


def next_sentence(f: Tensor, g: Tensor, document: Tensor) -> dict[str, float]:
    """Rank the next sentence among all held-out ones by the cosine of f(sentence) and g(candidate), both (n, d).

    The last sentence of a document is no query, the sentence itself no candidate. Return "next@1" and "next@10", shares
    of queries whose next sentence ranks first or among ten, "next_mrr", the mean of 1 / rank, and "chance@1", means
    over all orders of equal scores. Raise DataError if a vector is not finite.
    """
    document = document.to(f.device)
    queries = torch.nonzero(document[:-1] == document[1:]).squeeze(1)
    if not len(queries):
        return {}
    scores = _unit(f)[queries] @ _unit(g).T
    scores[torch.arange(len(queries), device=f.device), queries] = -torch.inf
    truth = scores.gather(1, (queries + 1)[:, None])
    scores.scatter_(1, (queries + 1)[:, None], -torch.inf)
    return _rank_metrics("next", _ranks(scores, truth), len(f) - 1)


def find_positives(f: Tensor, g: Tensor, anchor: Tensor, positive: Tensor, negatives: Tensor) -> dict[str, float]:
    """Rank the positive of every row among all positives and negatives by cosine, in the metrics of `next_sentence`.

    `f` and `g` are (t, d), of distinct texts as anchors and as candidates. `anchor` and `positive` are (n,) numbers of
    texts, `negatives` (n, m), negative where a row has fewer. The anchor's own text and its other positives are no
    candidates. "triplet/accuracy" is the share of negatives that are farther from the anchor than the positive.
    """
    f, g = _unit(f), _unit(g)
    anchor, positive, negatives = (texts.to(f.device) for texts in (anchor, positive, negatives))
    there = negatives >= 0
    candidates = torch.cat([positive, negatives[there]]).unique()
    numbers = torch.arange(len(candidates), device=g.device)
    column = torch.full((len(g),), -1, device=g.device).index_copy(0, candidates, numbers)
    ranks, nearer = [], []
    for start in range(0, len(anchor), CHUNK):
        rows = slice(start, start + CHUNK)
        own, wanted = anchor[rows], column[positive[rows]]
        scores = f[own] @ g[candidates].T
        truth = scores.gather(1, wanted[:, None])
        triplet = (f[own][:, None] * g[negatives[rows].clamp_min(0)]).sum(2)
        nearer.append((truth > triplet)[there[rows]])
        # The anchor itself and its other positives are no wrong answers.
        same = own[:, None] == anchor
        line, other = same.nonzero(as_tuple=True)
        scores[line, column[positive[other]]] = -torch.inf
        itself = column[own]
        scores[itself >= 0, itself[itself >= 0]] = -torch.inf
        ranks.append(_ranks(scores, truth))
    results = _rank_metrics("positive", torch.cat(ranks), len(candidates))
    won = torch.cat(nearer)
    if len(won):
        results["triplet/accuracy"] = float(won.float().mean())
    return results


def _unit(vectors: Tensor) -> Tensor:
    return normalize(finite_rows(vectors.float(), "embeddings", "sentence"))


def _ranks(scores: Tensor, truth: Tensor) -> Tensor:
    """Return how many wrong candidates of each query score higher than the right one, and how many as high, (n, 2)."""
    return torch.stack([(scores > truth).sum(1), (scores == truth).sum(1)], 1)


def _rank_metrics(name: str, ranks: Tensor, candidates: int) -> dict[str, float]:
    """Return means over all orders of equal scores, so that equal vectors reach what chance does."""
    above, others = ranks.double().unbind(1)
    equal = others + 1
    reciprocal = (torch.digamma(above + equal + 1) - torch.digamma(above + 1)) / equal  # mean of 1 / rank
    return {
        f"{name}@1": float(((1 - above).clamp_min(0) / equal).mean()),
        f"{name}@10": float(((10 - above).clamp_min(0) / equal).clamp_max(1).mean()),
        f"{name}_mrr": float(reciprocal.mean()),
        "chance@1": 1 / candidates,
    }


def nearest_sentences(queries: Sequence[int], vectors: Tensor, texts: Sequence[str]) -> str:
    """Return text with the five sentences nearest to each query (an index into `texts`), by cosine."""
    x = _unit(vectors)
    lines = []
    for query in queries:
        scores = x @ x[query]
        scores[query] = -torch.inf
        best = scores.topk(min(5, len(texts) - 1))
        lines.append(texts[query])
        lines += [f"  {float(s):.3f}  {texts[int(i)]}" for s, i in zip(best.values, best.indices, strict=True)]
    return "\n".join(lines)


def labelled_documents(source: str, column: str | None = None) -> Iterator[tuple[Document, str, bool]]:
    """Yield documents with their class, and whether they are for testing.

    Rows have text, `label` and maybe `split`, train or test. Without one, every fifth of a class is for testing.
    """
    seen: Counter[str] = Counter()
    parts: tuple[str, ...] = ("train", "test") if source.startswith("hub:") else ("",)
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
            seen[label] += 1
            piece = row_piece(row, where, column, number)
            if sentences := sentences_of(piece.text, piece.is_lines):
                is_test = split == "test" or (split is None and seen[label] % 5 == 0)
                yield Document(piece.name, sentences), label, is_test


def document_vectors(encode: Callable[[list[str]], np.ndarray], documents: Iterable[Document]) -> Tensor:
    """Return the mean of the sentences' vectors of each document, (n, d)."""
    found, rest = [], iter(documents)
    while part := list(islice(rest, TOGETHER)):
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


def check_parts(documents: Iterable[tuple[Document, str, bool]], where: str) -> None:
    """Raise DataError unless there are documents for training and testing, and two classes for training."""
    kinds = {(label, tested) for _, label, tested in documents}
    trained = {label for label, tested in kinds if not tested}
    for part, is_test in (("training", False), ("testing", True)):
        if is_test not in {tested for _, tested in kinds}:
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
    check_parts(listed, where)
    classes = {label: number for number, label in enumerate(sorted({label for _, label, _ in listed}))}
    parts = []
    for is_test in (False, True):
        mine = [(document, classes[label]) for document, label, tested in listed if tested == is_test]
        vectors = document_vectors(encode, (d for d, _ in mine))
        parts += [vectors.to(device), torch.tensor([c for _, c in mine])]
    return {"labelled/accuracy": linear_probe(*parts).accuracy}
