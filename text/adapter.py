"""Sentences for the trainer: running text in, pairs of neighbours or of block members out."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal, Unpack

import numpy as np
import torch
from torch import Tensor, nn

from dipole.core.contrast.embedded import Embedded
from dipole.core.contrast.objective import Composite
from dipole.core.contrast.pairs import Pairs
from dipole.core.ground.errors import ConfigError, DataError
from dipole.core.ground.transfer import ahead, sent
from dipole.core.measure.class_tasks import class_tasks
from dipole.core.measure.probes import knn_probe
from dipole.core.train.adapter import Adapter, Context, Sketch
from dipole.core.train.block_losses import BlockShape, block_losses
from dipole.core.train.sampling import ClassBlocks
from dipole.text import encoders, senteval
from dipole.text.batching import make_batch
from dipole.text.config import TextSettings
from dipole.text.corpus import Document, labelled_documents, read_documents
from dipole.text.document_classification import document_accuracy
from dipole.text.encode import SentenceEncoder
from dipole.text.encoded import Sentences, building, encode_documents, keep
from dipole.text.model import build_model, clip_each, expanded, fixed_table
from dipole.text.neighbours import nearest_sentences, neighbour_histogram, next_sentence
from dipole.text.senteval.tables import six_task_table
from dipole.text.vocabulary import Tokens, build_vocabulary, load_tokens

PROBED = 2000  # sentences of each split that probes and diagnostics look at
PAIRED = 1000  # of them whose distances to each other are shown, at most
VECTORS = 300  # width that word vectors are taken to have before they are read: GloVe's
# Settings that the encoders do not depend on, as they are by default.
_OF_THE_DATA = {
    name: TextSettings.model_fields[name].default
    for name in ("corpus", "split", "column", "cache", "limit", "held_out", "senteval", "labelled", "protocol")
}
SHOWN = 3  # sentences whose nearest ones are printed


@dataclass(frozen=True)
class TextBatch:
    """Consecutive sentences (or blocks of them) and the document of each."""

    batch: encoders.Batch
    document: Tensor  # (B,) long
    index: Tensor  # (B,) long, of each sentence in the corpus
    seed: int  # of this step's draws


class TextAdapter(Adapter):
    """Quick Thoughts and its relatives: neighbouring sentences, or the sentences of a block, are positives."""

    domain: ClassVar[str] = "text"
    config_model: ClassVar[type[TextSettings]] = TextSettings
    validates: ClassVar[bool] = True
    export_formats: ClassVar[tuple[str, ...]] = ("sentence-transformers",)

    config: TextSettings
    module: encoders.SentenceModel

    def __init__(self, config: TextSettings, **context: Unpack[Context]) -> None:
        super().__init__(config, **context)
        _check_blocks(config, self.batch_size, self.world_size)
        self.tokens, self.sentences = self._corpus()
        self.train_rows, self.held_rows = self._split()
        self.module = build_model(config, len(self.tokens), fixed_table(config, self.tokens))
        self.embedding_dim = self.module.width
        self._class_blocks: ClassBlocks | None = None
        if config.pairs == "blocks" and config.blocks == "random":
            documents = self.sentences.document[self.train_rows]
            self._class_blocks = ClassBlocks(documents, self._unit, config.block_count, self.seed)
        elif config.pairs == "blocks":
            self._block_starts = self._find_blocks()
        drawn = len(self.train_rows) if self._class_blocks is None else len(self._class_blocks)
        self.steps_per_epoch = drawn // self.batch_size
        if not self.steps_per_epoch:
            raise DataError(
                f"the corpus {config.corpus} leaves {drawn} sentences for training, fewer than "
                f"train.batch_size {self.batch_size}"
            )

    @classmethod
    def sketch(cls, config: Any, batch_size: int, world_size: int = 1) -> Sketch | None:
        _check_blocks(config, batch_size, world_size)
        if config.transformer is not None or config.tokenizer != "words":
            return None  # somebody's files say how wide it is
        blocks = _unit_of(config) if config.pairs == "blocks" else None
        arguments = (batch_size, blocks, config.window, config.self_logit)
        return Sketch(_width(config.model_copy(update=_OF_THE_DATA)), _example, arguments)

    # Data ------------------------------------------------------------------------------------------------------------

    def _documents(self) -> Iterator[Document]:
        c = self.config
        found = read_documents(c.corpus, unit=c.unit, column=c.column, split=c.split, encoding=c.encoding)
        left = c.limit
        for document in found:
            if left is None:
                yield document
                continue
            yield Document(document.name, document.sentences[:left])
            left -= len(document.sentences)
            if left <= 0:
                return

    def _corpus(self) -> tuple[Tokens, Sentences]:
        """Read the corpus twice, once for the vocabulary and once for the ids; a cache keeps both."""
        c = self.config
        if c.cache is None:
            tokens = self._new_tokens()
            return tokens, encode_documents(self._documents(), tokens, c.max_length)
        keys = ("corpus", "unit", "column", "split", "encoding", "limit", "tokenizer", "vocabulary_size", "lower")
        key = json.dumps({k: getattr(c, k) for k in (*keys, "max_length")} | {"state": _state_of(c.corpus)})
        folder = Path(c.cache) / hashlib.sha256(key.encode()).hexdigest()[:16]
        kept = folder / "tokenizer.json"
        with building(folder):
            if not kept.is_file():
                keep(kept, self._new_tokens().tokenizer.to_str(pretty=True))
            tokens = load_tokens(kept)
            return tokens, encode_documents(self._documents(), tokens, c.max_length, folder)

    def _new_tokens(self) -> Tokens:
        c = self.config
        if c.tokenizer != "words":
            return load_tokens(c.tokenizer)
        return build_vocabulary((s for d in self._documents() for s in d.sentences), c.vocabulary_size, c.lower)

    def _split(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows for training and for evaluation: the last sentences of each document are held out.

        Those before them may be kept for development: they are in neither, unless it is they that are evaluated.
        """
        document = self.sentences.document
        _, starts, count = np.unique(document, return_index=True, return_counts=True)
        trained, held = np.ones(len(document), dtype=bool), np.zeros(len(document), dtype=bool)
        for start, length in zip(starts, count, strict=True):
            kept = length - int(self.config.held_out * length)
            trained_on = max(0, kept - int((self.config.development or self.validation) * length))
            first, last = (trained_on, kept) if self.validation else (kept, length)
            held[start + first : start + last] = True
            trained[start + trained_on : start + length] = False
        return np.flatnonzero(trained), np.flatnonzero(held)

    def _find_blocks(self) -> list[np.ndarray]:
        """For each document that has a block, the positions in `train_rows` at which one starts."""
        size = self._unit
        document = self.sentences.document[self.train_rows]
        starts = np.flatnonzero(document[: max(0, len(document) - size + 1)] == document[size - 1 :])
        if not len(starts):
            raise DataError(
                f"no document of {self.config.corpus} has {size} sentences for a block; choose a smaller block_size"
            )
        return np.split(starts, np.flatnonzero(np.diff(document[starts])) + 1)

    @property
    def _unit(self) -> int:
        """Sentences that stay together: a block, which is a sentence and its b positives, or one."""
        return _unit_of(self.config)

    def _share(self) -> slice:
        """This rank's rows of a global batch: consecutive sentences, or whole blocks, as equally as they can be cut."""
        units = self.batch_size // self._unit
        start, end = (self._unit * (units * rank // self.world_size) for rank in (self.rank, self.rank + 1))
        return slice(start, end)

    def batches(self, epoch: int, start: int = 0) -> Iterator[TextBatch]:
        batches = self._batches(epoch, start)
        return ahead(batches, self.device) if self.device.type == "cuda" else batches

    def _batches(self, epoch: int, start: int) -> Iterator[TextBatch]:
        size, mine = self.batch_size, self._share()
        order = np.arange(self.steps_per_epoch)
        offset = 0
        blocks = None if self._class_blocks is None else self.train_rows[self._class_blocks.rows(epoch)]
        if self.config.order == "shuffled" and self.config.pairs == "window":
            draw = self.seed.numpy("data", epoch)
            order = draw.permutation(order)
            # Batches begin elsewhere in every epoch, so that no pair of neighbours is cut apart for good.
            offset = int(draw.integers(len(self.train_rows) - self.steps_per_epoch * size + 1))
        for place, step in enumerate(order[start:], start):
            if self.config.pairs == "window":
                rows = self.train_rows[offset + step * size : offset + (step + 1) * size][mine]
            elif blocks is not None:
                rows = blocks[step * size : (step + 1) * size][mine]
            else:
                rows = self._draw_blocks(epoch, step)[mine]
            batch = make_batch(self.sentences.ids(rows), self.config.chunks)
            yield TextBatch(
                (batch.pin_memory() if self.device.type == "cuda" else batch).to(self.device),
                sent(torch.from_numpy(self.sentences.document[rows].astype(np.int64)), self.device),
                sent(torch.from_numpy(rows.astype(np.int64)), self.device),
                self.seed.stream("data", "negatives", epoch, place),
            )

    def _draw_blocks(self, epoch: int, step: int) -> np.ndarray:
        """Rows of blocks of consecutive sentences: of each block first the document is drawn, then where it starts."""
        draw, found = self.seed.numpy("data", epoch, "blocks", step), self._block_starts
        owners = draw.integers(len(found), size=self.batch_size // self._unit)
        starts = np.array([draw.choice(found[owner]) for owner in owners])
        return self.train_rows[(starts[:, None] + np.arange(self._unit)).ravel()]

    def embed(self, batch: TextBatch) -> Embedded:
        f, g = self.module(batch.batch)
        c, size = self.config, self._unit
        if c.pairs == "blocks":
            blocks = {"x": f.view(-1, size, f.shape[1]), "labels": batch.document[::size], "index": batch.index[::size]}
            return Embedded(blocks, partial(_blocks, draw=batch.seed))
        rows = {"f": f, "g": g, "document": batch.document, "index": batch.index}
        return Embedded(rows, partial(_neighbours, window=c.window, self_logit=c.self_logit))

    def encoders(self) -> list[nn.Module]:
        return [side for side in (self.module.f, self.module.g) if side is not None]

    def remarks(self) -> Sequence[str]:
        found: Sequence[str] = getattr(self.module.f, "remarks", ())  # of g they are the same
        return found

    def before_step(self) -> None:
        if self.config.clip_per_tensor is not None:
            clip_each(self.module, self.config.clip_per_tensor)

    # Evaluation ------------------------------------------------------------------------------------------------------

    def encoder(self, objective: Any = None) -> SentenceEncoder:
        """The model as it is evaluated and exported: with its vocabulary expanded if the recipe says so."""
        c = self.config
        model, tokens = self.module, self.tokens
        if c.expand:
            assert c.vectors is not None  # the configuration has checked it
            model, tokens = expanded(model, tokens, c.vectors)
        limit = 512 if c.encoder == "transformer" else None
        transform = None if objective is None else objective.transform
        return SentenceEncoder(model, tokens, c.normalize, limit, transform)

    def _sides(self, rows: np.ndarray, objective: Any = None) -> tuple[Tensor, Tensor]:
        """f and g of sentences, raw, on the CPU."""
        encoder = SentenceEncoder(
            self.module, self.tokens, transform=None if objective is None else objective.transform
        )
        both = encoder.encode_ids(self.sentences.ids(rows), 4096).cpu()
        half = both.shape[1] // self.module.halves
        return both[:, :half], both[:, -half:]

    def _probe_rows(self, split: str) -> np.ndarray:
        rows = self.held_rows if split == "test" and len(self.held_rows) else self.train_rows
        if split == "train" and len(rows) > PROBED:
            rows = np.sort(self.seed.numpy("probe", "rows").permutation(rows)[:PROBED])
        return rows[:PROBED]

    def features(self, split: str) -> tuple[Tensor, Tensor | None]:
        rows = self._probe_rows(split)
        return self._sides(rows)[0], torch.from_numpy(self.sentences.document[rows].astype(np.int64))

    def held_out_pairs(self, objective: Any) -> Pairs | None:
        """Sentences and their neighbours among held-out sentences."""
        rows = self._probe_rows("test")[:PAIRED]
        document = torch.from_numpy(self.sentences.document[rows].astype(np.int64))
        if len(rows) < 2 or not bool((document[:-1] == document[1:]).any()):
            return None
        return Pairs.from_window(*self._sides(rows, objective), document)

    def evaluate(self, objective: Any) -> dict[str, float]:
        results: dict[str, float] = {}
        rows = self._probe_rows("test")
        document = torch.from_numpy(self.sentences.document[rows].astype(np.int64))
        f, g = self._sides(rows, objective)
        results.update(next_sentence(f, g, document))
        self._keep_pictures(f, g, document, rows)
        results.update(self._topics(rows, f, objective))
        if self.config.classifiers or self.config.losses:
            results.update(self._document_tasks(objective))
        if self.config.labelled is not None and not self.validation:
            labelled = labelled_documents(self.config.labelled, self.config.column)
            results.update(document_accuracy(self.encoder(objective).encode, labelled, self.config.labelled))
        c = self.config
        if c.senteval is not None:
            encoder = self.encoder(objective)
            found = senteval.evaluate(
                encoder.encode, c.tasks, c.senteval, protocol=c.protocol, kfold=c.kfold, halves=self.module.halves,
                progress=False,
            )  # fmt: skip
            for task, result in found.items():
                results.update(_numbers(task, result))
            if self.validation:  # what SentEval itself chooses by
                return {name: value for name, value in results.items() if _is_seen(name)}
            table = six_task_table({"this run": found}) + "\n"
            (self.workdir / "senteval.txt").write_text(table, encoding="utf-8")
        return results

    def _topics(self, rows: np.ndarray, f: Tensor, objective: Any) -> dict[str, float]:
        """Which document is this sentence from? Nearest neighbours among training sentences of the same documents."""
        train = self._probe_rows("train")
        labels, test_labels = self.sentences.document[train], self.sentences.document[rows]
        shared = np.isin(test_labels, labels)
        if len(np.unique(labels)) < 2 or not shared.any() or not len(self.held_rows):
            return {}
        known, _ = self._sides(train, objective)
        index = {int(label): i for i, label in enumerate(np.unique(labels))}
        result = knn_probe(
            known,
            torch.tensor([index[int(label)] for label in labels]),
            f[torch.from_numpy(shared)],
            torch.tensor([index[int(label)] for label in test_labels[shared]]),
        )
        return {"document/knn": float(result.accuracy)}

    def _document_tasks(self, objective: Any) -> dict[str, float]:
        """Which document is this sentence from? Arora's classifiers and losses on all sentences."""
        c, owner = self.config, self.sentences.document
        parts = [
            (self._sides(rows, objective)[0], torch.from_numpy(owner[rows]))
            for rows in (self.train_rows, self.held_rows)
        ]
        (train, labels), (test, test_labels) = parts
        found = class_tasks(
            train, labels, test, test_labels, classifiers=c.classifiers, solver=c.solver,
            labels_per_class=c.labels_per_class, seed=self.seed.probe,
        )  # fmt: skip
        results = {f"document/{name}": value for name, value in found.items()}
        if c.losses:
            shape = BlockShape.of(objective, self._unit - 1 or 1)
            losses = block_losses(train, labels, test, test_labels, shape, self.seed.probe)
            results |= {f"losses/{name}": value for name, value in losses.items()}
        return results

    def _keep_pictures(self, f: Tensor, g: Tensor, document: Tensor, rows: np.ndarray) -> None:
        """Write the histogram of neighbours' distances and the nearest sentences into the run's folder."""
        shown = neighbour_histogram(f[:PAIRED], g[:PAIRED], document[:PAIRED])
        values = {"edges": shown.edges, "correct": shown.correct, "incorrect": shown.incorrect}
        text = json.dumps({name: [round(float(v), 6) for v in value] for name, value in values.items()})
        (self.workdir / "neighbour_distances.json").write_text(text + "\n")
        text = self._examples(rows, torch.cat([f, g], 1)) + "\n"
        (self.workdir / "nearest_sentences.txt").write_text(text, encoding="utf-8")

    def _examples(self, rows: np.ndarray, vectors: Tensor) -> str:
        """A few held-out sentences with the sentences nearest to each."""
        words = self.tokens.words()
        joined = [" ".join(words[int(i)] for i in ids) for ids in self.sentences.ids(rows)]
        long = [i for i, ids in enumerate(self.sentences.ids(rows)) if 6 <= len(ids) <= 20] or list(range(len(rows)))
        step = max(1, len(long) // SHOWN)
        return nearest_sentences(long[::step][:SHOWN], vectors.numpy(), joined)

    def data_info(self) -> dict[str, Any]:
        unknown = self.tokens.words_only and float(np.mean(np.asarray(self.sentences.tokens) == 0))
        return {
            "name": self.config.corpus,
            "fingerprint": f"{self.sentences.fingerprint}-{self.tokens.fingerprint}",
            "sizes": {
                "train": len(self.train_rows),
                "test": len(self.held_rows),
                "documents": int(self.sentences.document[-1]) + 1,
                "tokens": len(self.sentences.tokens),
                "vocabulary": len(self.tokens),
            },
            "unknown_words": float(unknown),
            "encoder": {
                "width": self.module.output_width,
                "parameters": encoders.parameter_count(self.module),
                **(getattr(self.module.f, "described", None) or {}),
            },
        }

    def export(self, to: str, folder: Path, record: Any, objective: Any = None) -> None:
        from dipole.text.export import export_sentence_transformer

        export_sentence_transformer(self.encoder(objective), folder)


def _unit_of(config: TextSettings) -> int:
    """Sentences that are drawn together: x and its positives."""
    return config.block_size + 1 if config.pairs == "blocks" else 1


def _check_blocks(config: TextSettings, batch_size: int, world_size: int) -> None:
    unit = _unit_of(config)
    blocks, rest = divmod(batch_size, unit)
    if config.pairs == "blocks" and (rest or blocks < world_size):
        raise ConfigError(
            f"train.batch_size {batch_size} must be a multiple of {unit}, the sentences of a block "
            f"(text.block_size {config.block_size} and the one whose positives they are), with a block for each "
            f"of the {world_size} processes; the nearest: {unit * max(round(batch_size / unit), world_size)}"
        )


@cache
def _width(config: TextSettings) -> int:
    """Width of the embedding of encoders that are built for the largest vocabulary that the settings allow."""
    words = config.vocabulary_size + 1
    with torch.device("meta"):
        fixed = None if config.channels == "trained" else nn.Embedding(words, VECTORS)
        return build_model(config, words, fixed).width


def _example(
    objective: Composite, dim: int, count: int, size: int | None, window: int, self_logit: Literal["zero", "drop"]
) -> Pairs:
    """Random rows of so many sentences of two documents, paired as a batch; size: of a block."""
    rows = {"document": torch.arange(count) * 2 // count, "index": torch.arange(count)}
    if size is None:
        rows |= {"f": torch.randn(count, dim), "g": torch.randn(count, dim)}
        return _neighbours(rows, window, self_logit)
    rows = {name: values[::size] for name, values in rows.items()}
    rows = {name: values[: count // size] for name, values in rows.items()}
    return _blocks({**rows, "x": torch.randn(count // size, size, dim), "labels": rows["document"]}, draw=0)


def _blocks(rows: dict[str, Tensor], draw: int) -> Pairs:
    return Pairs.from_blocks(rows["x"], anchors="all", labels=rows["labels"], index=rows["index"], draw=draw)


def _neighbours(rows: dict[str, Tensor], window: int, self_logit: Literal["zero", "drop"]) -> Pairs:
    document = rows["document"]
    return Pairs.from_window(rows["f"], rows["g"], document, window, self_logit, labels=document, index=rows["index"])


def _state_of(corpus: str) -> list:
    """Names, sizes and dates of local files: a changed corpus is another one."""
    path = Path(corpus)
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else []
    return [(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in islice(files, 100_000)]


def _is_seen(name: str) -> bool:
    """Whether a number is none of a SentEval task's test part."""
    return not name.startswith("senteval/") or name.rpartition("/")[2].startswith("dev")


def _numbers(task: str, result: senteval.Result) -> dict[str, float]:
    if "acc" in result:
        values = {"accuracy": result["acc"] / 100, "dev": result["devacc"] / 100}
        return {f"senteval/{task}/{k}": v for k, v in values.items()} | (
            {f"senteval/{task}/f1": result["f1"] / 100} if "f1" in result else {}
        )
    if "mse" in result:
        return {f"senteval/{task}/{k}": result[k] for k in ("pearson", "spearman")}
    return {f"senteval/{task}/{k}": result["all"][k]["all"] for k in ("pearson", "spearman")}
