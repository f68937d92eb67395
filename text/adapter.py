"""Sentences for the trainer: running text in, pairs of neighbours or of block members out."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Unpack

import numpy as np
import torch
from torch import Tensor, nn

from dipole.core.contrast.pairs import Pairs
from dipole.core.ground.errors import ConfigError, DataError
from dipole.core.measure.class_tasks import class_tasks
from dipole.core.measure.probes import knn_probe
from dipole.core.train.adapter import Adapter, Context
from dipole.core.train.sampling import ClassBlocks
from dipole.text import encoders, senteval
from dipole.text.batching import Batch, make_batch
from dipole.text.config import TextSettings
from dipole.text.corpus import Document, Sentences, encode_documents, labelled_documents, read_documents
from dipole.text.documents import tell_documents
from dipole.text.encode import SentenceEncoder
from dipole.text.evaluation import nearest_sentences, neighbour_histogram, next_sentence
from dipole.text.tables import six_task_table
from dipole.text.vocabulary import Tokens, build_vocabulary, expand, load_tokens, read_vectors, words_vocabulary

PROBED = 2000  # sentences of each split that probes and diagnostics look at
SHOWN = 3  # sentences whose nearest ones are printed


@dataclass(frozen=True)
class TextBatch:
    """Consecutive sentences (or blocks of them) and the document of each."""

    batch: Batch
    document: Tensor  # (B,) long


class TextAdapter(Adapter):
    """Quick Thoughts and its relatives: neighbouring sentences, or the sentences of a block, are positives."""

    domain: ClassVar[str] = "text"
    config_model: ClassVar[type[TextSettings]] = TextSettings
    export_formats: ClassVar[tuple[str, ...]] = ("sentence-transformers",)

    config: TextSettings
    module: encoders.SentenceModel

    def __init__(self, config: TextSettings, **context: Unpack[Context]) -> None:
        super().__init__(config, **context)
        if config.pairs == "blocks" and self.batch_size % (config.block_size * self.world_size):
            raise ConfigError(
                f"train.batch_size {self.batch_size} must be a multiple of text.block_size {config.block_size} times "
                f"the number of processes {self.world_size}"
            )
        self.tokens, self.sentences, self.names = self._corpus()
        self.train_rows, self.held_rows = self._split()
        self.module = self._model()
        self.embedding_dim = self.module.width
        self._class_blocks: ClassBlocks | None = None
        if config.pairs == "blocks" and config.blocks == "random":
            documents = self.sentences.document[self.train_rows]
            self._class_blocks = ClassBlocks(documents, config.block_size, config.block_count, self.seed)
        elif config.pairs == "blocks":
            self._block_starts = self._find_blocks()
        drawn = len(self.train_rows) if self._class_blocks is None else len(self._class_blocks)
        self.steps_per_epoch = drawn // self.batch_size
        if not self.steps_per_epoch:
            raise DataError(
                f"the corpus {config.corpus} leaves {drawn} sentences for training, fewer than "
                f"train.batch_size {self.batch_size}"
            )
        if config.clip_per_tensor is not None:
            self._clip_each(config.clip_per_tensor)

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

    def _corpus(self) -> tuple[Tokens, Sentences, list[str]]:
        """Read the corpus twice, once for the vocabulary and once for the ids; a cache keeps both."""
        c = self.config
        folder = None
        if c.cache is not None:
            keys = ("corpus", "unit", "column", "split", "encoding", "limit", "tokenizer", "vocabulary_size", "lower")
            key = json.dumps({k: getattr(c, k) for k in (*keys, "max_length")} | {"state": _state_of(c.corpus)})
            folder = Path(c.cache) / hashlib.sha256(key.encode()).hexdigest()[:16]
            folder.mkdir(parents=True, exist_ok=True)
        saved = folder / "tokenizer.json" if folder is not None else None
        if saved is not None and saved.is_file():
            tokens = load_tokens(saved)
        elif c.tokenizer == "words":
            tokens = build_vocabulary((s for d in self._documents() for s in d.sentences), c.vocabulary_size, c.lower)
        else:
            tokens = load_tokens(c.tokenizer)
        if saved is not None and not saved.is_file():
            tokens.save(saved)
        names: list[str] = []

        def named() -> Iterator[Document]:
            for document in self._documents():
                names.append(document.name)
                yield document

        return tokens, encode_documents(named(), tokens, c.max_length, folder), names

    def _split(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows for training and for evaluation: the last sentences of each document are held out."""
        document = self.sentences.document
        _, first, count = np.unique(document, return_index=True, return_counts=True)
        held = np.zeros(len(document), dtype=bool)
        for start, length in zip(first, count, strict=True):
            kept = length - int(self.config.held_out * length)
            held[start + kept : start + length] = True
        return np.flatnonzero(~held), np.flatnonzero(held)

    def _find_blocks(self) -> np.ndarray:
        """Positions in `train_rows` at which a block of one document starts."""
        b = self.config.block_size
        document = self.sentences.document[self.train_rows]
        starts = np.flatnonzero(document[: len(document) - b + 1] == document[b - 1 :])
        if not len(starts):
            raise DataError(
                f"no document of {self.config.corpus} has {b} sentences for a block; choose a smaller block_size"
            )
        return starts

    def batches(self, epoch: int, start: int = 0) -> Iterator[TextBatch]:
        size, share = self.batch_size, self.batch_size // self.world_size
        mine = slice(self.rank * share, (self.rank + 1) * share)
        order = np.arange(self.steps_per_epoch)
        offset = 0
        blocks = None if self._class_blocks is None else self.train_rows[self._class_blocks.rows(epoch)]
        if self.config.order == "shuffled" and self.config.pairs == "window":
            draw = self.seed.numpy("data", epoch)
            order = draw.permutation(order)
            # Batches begin elsewhere in every epoch, so that no pair of neighbours is cut apart for good.
            offset = int(draw.integers(len(self.train_rows) - self.steps_per_epoch * size + 1))
        for step in order[start:]:
            if self.config.pairs == "window":
                rows = self.train_rows[offset + step * size : offset + (step + 1) * size][mine]
            elif blocks is not None:
                rows = blocks[step * size : (step + 1) * size][mine]
            else:
                rows = self._draw_blocks(epoch, step)[mine]
            yield TextBatch(
                make_batch(self.sentences.ids(rows), self.config.chunks).to(self.device),
                torch.from_numpy(self.sentences.document[rows].astype(np.int64)).to(self.device),
            )

    def _draw_blocks(self, epoch: int, step: int) -> np.ndarray:
        """Rows of blocks of consecutive sentences, each block of another document where there are enough of them."""
        b = self.config.block_size
        draw = self.seed.numpy("data", epoch, "blocks", step)
        shuffled = draw.permutation(self._block_starts)
        owners = self.sentences.document[self.train_rows[shuffled]]
        _, first = np.unique(owners, return_index=True)
        rest = np.setdiff1d(np.arange(len(shuffled)), first, assume_unique=True)
        chosen = np.concatenate([draw.permutation(first), rest])[: self.batch_size // b]
        if len(chosen) < self.batch_size // b:
            chosen = np.concatenate([chosen, draw.integers(len(shuffled), size=self.batch_size // b - len(chosen))])
        return self.train_rows[(shuffled[chosen][:, None] + np.arange(b)).ravel()]

    # Model -----------------------------------------------------------------------------------------------------------

    def _model(self) -> encoders.SentenceModel:
        c = self.config
        fixed = self._fixed_table() if c.channels != "trained" else None

        def side() -> encoders.Part:
            if c.encoder == "transformer":
                if c.transformer is not None:
                    return encoders.build_transformer(c.transformer, c.pooling, len(self.tokens))
                return encoders.small_transformer(len(self.tokens), c.hidden_size, c.layers, c.heads, c.pooling)
            tables = [fixed] if fixed is not None else []
            if c.channels != "fixed":
                tables.append(encoders.trained_table(len(self.tokens), c.word_size))
            parts: list[encoders.Part] = [
                encoders.BagOfWords(table)
                if c.encoder == "bow"
                else encoders.WordGRU(table, c.hidden_size, c.direction)
                for table in tables
            ]
            return parts[0] if len(parts) == 1 else encoders.Channels(parts)

        # The members of a block are all the same kind of thing: one encoder, as in Arora et al.
        single = c.sides == 1 or c.pairs == "blocks"
        return encoders.SentenceModel(side(), None if single else side(), c.dropout)

    def _fixed_table(self) -> nn.Embedding:
        assert self.config.vectors is not None  # the configuration has checked it
        words, vectors = read_vectors(self.config.vectors, self.tokens.index)
        table = torch.zeros(len(self.tokens), vectors.shape[1])
        known = torch.zeros(len(self.tokens), dtype=torch.bool)
        rows = torch.tensor([self.tokens.index[word] for word in words], dtype=torch.long)
        table[rows] = torch.from_numpy(vectors)
        known[rows] = True
        if not bool(known.any()):
            raise DataError(f"{self.config.vectors} holds no word of the corpus {self.config.corpus}")
        return encoders.fixed_table(table, known)

    def _clip_each(self, limit: float) -> None:
        """Bound the gradient norm of each tensor by itself, as the authors' code does, not of all together."""

        def clip(parameter: Tensor) -> None:
            gradient = parameter.grad
            assert gradient is not None  # the hook runs after it was accumulated
            gradient.mul_(limit / torch.linalg.vector_norm(gradient).clamp_min(limit))

        for parameter in self.module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(clip)

    def embed(self, batch: TextBatch) -> Pairs:
        f, g = self.module(batch.batch)
        if self.config.pairs == "blocks":
            size = self.config.block_size
            return Pairs.from_blocks(f.view(-1, size, f.shape[1]), anchors="all", labels=batch.document[::size])
        return Pairs.from_window(f, g, batch.document, self.config.window, self.config.self_logit)

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

    def evaluate(self, objective: Any) -> dict[str, float]:
        results: dict[str, float] = {}
        rows = self._probe_rows("test")
        document = torch.from_numpy(self.sentences.document[rows].astype(np.int64))
        f, g = self._sides(rows, objective)
        results.update(next_sentence(f, g, document))
        self._keep_pictures(f, g, document, rows)
        results.update(self._topics(rows, f, objective))
        if self.config.classifiers:
            results.update(self._documents_told(objective))
        if self.config.labelled is not None:
            labelled = labelled_documents(self.config.labelled, self.config.column)
            results.update(tell_documents(self.encoder(objective).encode, labelled, self.config.labelled))
        c = self.config
        if c.senteval is not None:
            encoder = self.encoder(objective)
            found = senteval.evaluate(
                encoder.encode, c.tasks, c.senteval, protocol=c.protocol, kfold=c.kfold, halves=self.module.halves,
                progress=False,
            )  # fmt: skip
            for task, result in found.items():
                results.update(_numbers(task, result))
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

    def _documents_told(self, objective: Any) -> dict[str, float]:
        """Which document is this sentence from? Arora's classifiers on every training and every held-out sentence."""
        c, owner = self.config, self.sentences.document
        parts = [
            (self._sides(rows, objective)[0], torch.from_numpy(owner[rows]))
            for rows in (self.train_rows, self.held_rows)
        ]
        (train, labels), (test, test_labels) = parts
        found = class_tasks(
            train, labels, test, test_labels, classifiers=c.classifiers, solver=c.solver, seed=self.seed.probe
        )
        return {f"document/{name}": value for name, value in found.items()}

    def _keep_pictures(self, f: Tensor, g: Tensor, document: Tensor, rows: np.ndarray) -> None:
        """Write the histogram of neighbours' distances and the nearest sentences into the run's folder."""
        shown = neighbour_histogram(f[:1000], g[:1000], document[:1000])
        values = {"edges": shown.edges, "correct": shown.correct, "incorrect": shown.incorrect}
        text = json.dumps({name: [round(float(v), 6) for v in value] for name, value in values.items()})
        (self.workdir / "neighbour_distances.json").write_text(text + "\n")
        text = self.examples(rows, torch.cat([f, g], 1)) + "\n"
        (self.workdir / "nearest_sentences.txt").write_text(text, encoding="utf-8")

    def examples(self, rows: np.ndarray | None = None, vectors: Tensor | None = None) -> str:
        """A few held-out sentences with the sentences nearest to each."""
        rows = self._probe_rows("test") if rows is None else rows
        if vectors is None:
            vectors = torch.cat(self._sides(rows), 1)
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
            "encoder": {"width": self.module.output_width, "parameters": encoders.parameter_count(self.module)},
        }

    def export(self, to: str, folder: Path, record: Any, objective: Any = None) -> None:
        from dipole.text.export import export_sentence_transformer

        export_sentence_transformer(self.encoder(objective), folder)


def _state_of(corpus: str) -> list:
    """Names, sizes and dates of local files: a changed corpus is another one."""
    path = Path(corpus)
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else []
    return [(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in islice(files, 100_000)]


def _numbers(task: str, result: senteval.Result) -> dict[str, float]:
    if "acc" in result:
        values = {"accuracy": result["acc"] / 100, "dev": result["devacc"] / 100}
        return {f"senteval/{task}/{k}": v for k, v in values.items()} | (
            {f"senteval/{task}/f1": result["f1"] / 100} if "f1" in result else {}
        )
    if "mse" in result:
        return {f"senteval/{task}/{k}": result[k] for k in ("pearson", "spearman")}
    return {f"senteval/{task}/{k}": result["all"][k]["all"] for k in ("pearson", "spearman")}


def expanded(model: encoders.SentenceModel, tokens: Tokens, path: str) -> tuple[encoders.SentenceModel, Tokens]:
    """Copy model and vocabulary and add the words of a vector file, to each trained table by its own linear map."""
    import copy

    words, vectors = read_vectors(path)
    model = copy.deepcopy(model)
    old = tokens.words()
    lower = bool(tokens.tokenizer.normalizer and "Lowercase" in str(tokens.tokenizer.normalizer))
    added: list[str] = []
    for module in model.modules():
        table = getattr(module, "table", None)
        if not isinstance(table, nn.Embedding):
            continue
        if table.weight.requires_grad:
            added, rows = expand(tokens.index, table.weight.detach().numpy(), words, vectors)
        else:
            added = [w for w in words if w not in tokens.index and "_" not in w]
            place = {word: i for i, word in enumerate(words)}
            rows = vectors[[place[w] for w in added]]
        weight = torch.cat([table.weight.detach(), torch.from_numpy(np.ascontiguousarray(rows))])
        module.table = nn.Embedding.from_pretrained(weight, freeze=not table.weight.requires_grad)
    return model, words_vocabulary([*old[1:], *added], lower)
