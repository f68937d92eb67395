"""Sentences for the trainer: running text in, pairs of neighbours or of block members out."""

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Unpack

import numpy as np
import torch
from torch import Tensor, nn

from dipole.core.evaluation.class_tasks import class_tasks
from dipole.core.evaluation.probes import knn_probe, measuring_device
from dipole.core.objectives.embedded import Embedded
from dipole.core.objectives.pairs import Pairs
from dipole.core.train.adapter import Adapter, Context, Sketch
from dipole.core.train.block_losses import BlockShape, block_losses
from dipole.core.train.config import EvaluatedPart
from dipole.core.train.sampling import ClassBlocks
from dipole.core.utils.errors import ConfigError, DataError
from dipole.core.utils.machine import processors
from dipole.core.utils.text import counted
from dipole.core.utils.transfer import prefetched, to_device
from dipole.text import encoders, pairing, senteval
from dipole.text.batching import make_batch
from dipole.text.cache import corpus_folder, file_stamps, reading_progress, table_folder
from dipole.text.config import TextSettings
from dipole.text.corpus import Piece, read_pieces
from dipole.text.document_classification import check_parts, document_accuracy, held_back, labelled_documents
from dipole.text.embed import SentenceEmbedder
from dipole.text.encode import SentenceEncoder
from dipole.text.encoders.head import evaluated
from dipole.text.kept import READ_BY, Kept, Probes, keep
from dipole.text.model import build_model, clip_each, expanded, fixed_table, limit_of, never_differs, positions_of
from dipole.text.neighbours import nearest_sentences, neighbour_histogram, next_sentence
from dipole.text.pair_batches import PairBatches
from dipole.text.pair_table import PairTable
from dipole.text.partners import find_partners
from dipole.text.read_pairs import read_pairs
from dipole.text.sentences import Cut, Sentences, encode_pieces
from dipole.text.senteval.numbers import numbers_of
from dipole.text.senteval.rows import task_names
from dipole.text.senteval.tables import written_tables
from dipole.text.vocabulary import Tokens, load_tokens

TOGETHER = 10_000  # texts of a table that are numbered together
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
    """The rows of a step: consecutive sentences, blocks of them, sentences twice (views), or the anchors of a table."""

    batch: encoders.Batch
    document: Tensor  # (B,) long
    index: Tensor  # (B,) long, of each sentence in the corpus, or of each row of the table
    seed: int  # of this step's draws
    masks: Tensor | None = None  # (k, B, d) dropout of each of a row's k vectors, 0 or 1 / (1 - rate)
    partners: "Partners | None" = None


@dataclass(frozen=True)
class Partners:
    """What stands beside the anchors of a table: their positives, and the negatives that there are."""

    batch: encoders.Batch  # B positives, then the negatives
    place: Tensor  # (k,) long, of each negative among B times `most`
    most: int  # negatives of a row of the global batch
    absent: Tensor | None  # (E,) long, places c B + b of the global batch without a negative; None where all are there


class TextAdapter(Adapter):
    """Quick Thoughts and its relatives (neighbours, blocks), SimCSE's two passes, and tables of pairs."""

    domain: ClassVar[str] = "text"
    config_model: ClassVar[type[TextSettings]] = TextSettings
    validates: ClassVar[bool] = True
    export_formats: ClassVar[tuple[str, ...]] = ("onnx", "sentence-transformers", "transformers")
    data_fields: ClassVar[frozenset[str]] = frozenset({*READ_BY, "cache", "senteval", "labelled"} - {"max_length"})
    built_from_data: ClassVar[bool] = True

    config: TextSettings
    module: encoders.SentenceModel
    _kept: Kept | None = None
    _noticed: Sequence[str] = ()

    def __init__(self, config: TextSettings, **context: Unpack[Context]) -> None:
        super().__init__(config, **context)
        _check_blocks(config, self.batch_size, self.world_size)
        self._measures = measuring_device(self.device, config.probe_device)
        self._class_blocks: ClassBlocks | None = None
        self._pair_batches: PairBatches | None = None
        if self.kept is not None:
            self._restore(Kept(self.kept))
            return
        _check_measured(config)
        self.tokens, self.sentences = self._corpus()
        self.train_rows, _ = self._split("test")
        self._check_rows()
        self.module = build_model(config, len(self.tokens), fixed_table(config, self.tokens))
        self.embedding_dim = self.module.width
        if config.pairs == "blocks" and config.blocks == "random":
            documents = self.sentences.document[self.train_rows]
            self._class_blocks = ClassBlocks(documents, self._unit, config.block_count, self.seed)
        elif config.pairs == "blocks":
            self._block_starts = self._find_blocks()
        drawn = len(self.train_rows) if self._class_blocks is None else len(self._class_blocks)
        self.steps_per_epoch = drawn // self.batch_size
        if not self.steps_per_epoch:
            what = "sentences" if self.table is None else "rows"
            raise DataError(
                f"the corpus {config.corpus} leaves {drawn} {what} for training, fewer than "
                f"train.batch_size {self.batch_size}"
            )
        if self.table is not None:
            self._pair_batches = PairBatches(
                self.table, self.train_rows, self.batch_size, self._order, apart=config.no_duplicates
            )
            self.steps_per_epoch = self._pair_batches.count
        if config.pairs == "views":
            self._check_masks()

    # Used without its corpus -----------------------------------------------------------------------------------------

    def keep(self, folder: Path) -> None:
        rows = {split: self._probe_rows(split) for split in ("train", "test")}
        probes = Probes(self.sentences, rows, bool(len(self.held_rows)), self.table)
        told = {"info": self.data_info(), "steps_per_epoch": self.steps_per_epoch}
        keep(folder, self.config, self.module, self.tokens, probes, told)

    def _restore(self, kept: Kept) -> None:
        self._kept = kept
        self.tokens, self.module = kept.tokens, kept.build(self.config)
        self.embedding_dim, self.steps_per_epoch = self.module.width, kept.told["steps_per_epoch"]
        for line in self._cut_short():
            warnings.warn(line, stacklevel=2)

    @cached_property
    def _probes(self) -> Probes | None:
        """The sentences of evaluation that the run's folder holds; None where the corpus has to be read for them."""
        if self._kept is None or not self._kept.has_data_of(self.config):
            return None
        return self._kept.probes()

    @cached_property
    def sentences(self) -> Sentences:
        """Of a model in use: those that its folder holds, or those of a corpus, in ids of the kept vocabulary."""
        if self._probes is not None:
            return self._probes.sentences
        return self._encoded(self.tokens)[1]

    @cached_property
    def train_rows(self) -> np.ndarray:
        return self._split("test")[0] if self._probes is None else self._probes.rows["train"]

    @property
    def held_rows(self) -> np.ndarray:
        """The rows of the part that is evaluated."""
        if self._probes is not None:
            return self._probes.rows["test"][: None if self._probes.held_out else 0]
        if self.part not in self._held:
            self._held[self.part] = self._split(self.part)[1]
        return self._held[self.part]

    @cached_property
    def _held(self) -> dict[str, np.ndarray]:
        return {}

    def embedder(self, features: str | None = None, objective: Any = None) -> SentenceEmbedder:
        return SentenceEmbedder(self.encoder(objective), features)

    @classmethod
    def sketch(cls, config: Any, batch_size: int, world_size: int = 1) -> Sketch | None:
        _check_blocks(config, batch_size, world_size)
        if config.transformer is not None or config.tokenizer != "words":
            return None  # somebody's files say how wide it is
        hard = 1 if config.columns is None else len(config.columns) - 2
        size = hard if config.pairs == "columns" else _unit_of(config)
        arguments = (config.pairs, batch_size, size, config.window, config.self_logit)
        return Sketch(_width(config.model_copy(update=_OF_THE_DATA)), pairing.example, arguments)

    # Data ------------------------------------------------------------------------------------------------------------

    @cached_property
    def table(self) -> PairTable | None:
        """The rows of pairs = "columns": those of the data, or those that the run's folder holds for evaluation."""
        c = self.config
        if self._kept is not None and self._probes is not None:
            return self._probes.table
        if c.pairs != "columns":
            return None
        with warnings.catch_warnings():
            if self.rank:  # all ranks read the same table, and one of them says what it lacks
                warnings.simplefilter("ignore")
            before = file_stamps(c)
            with reading_progress(c, mute=self.rank > 0) as tell:
                return read_pairs(
                    c.corpus, c.columns, split=c.split, encoding=c.encoding, limit=c.limit, folder=table_folder(c),
                    tell=tell, unchanged=lambda: file_stamps(c) == before,
                )  # fmt: skip

    def _pieces(self) -> Iterator[Piece]:
        c = self.config
        if self.table is not None:
            texts = self.table.texts
            for start in range(0, len(texts), TOGETHER):
                yield Piece("texts", not start, "\n".join(texts[start : start + TOGETHER]), is_lines=True)
            return
        with warnings.catch_warnings():
            if self.rank:  # all ranks read the same corpus, and one of them says what it lacks
                warnings.simplefilter("ignore")
            yield from read_pieces(c.corpus, unit=c.unit, column=c.column, split=c.split, encoding=c.encoding)

    @cached_property
    def positions(self) -> int | None:
        """The most tokens that the transformer can read; None where nothing bounds them."""
        return positions_of(self.config) if self._kept is None else limit_of(self.module)

    def _cut_short(self) -> list[str]:
        """One note where sentences are cut before text.max_length."""
        longest, limit = self.config.max_length, self.positions
        if limit is None or longest <= limit:
            return []
        return [f"text.max_length {longest}: the transformer has positions for {limit}, where longer sentences are cut"]

    def _corpus(self) -> tuple[Tokens, Sentences]:
        c = self.config
        return self._encoded(None if c.tokenizer == "words" else load_tokens(c.tokenizer))

    def _encoded(self, tokens: Tokens | None) -> tuple[Tokens, Sentences]:
        """Read the corpus, once; a cache keeps the ids."""
        c = self.config
        if self._cut_short():  # what is kept for later runs is named by where it was cut
            c = c.model_copy(update={"max_length": self.positions})
        texts_hash = None if self.table is None else self.table.texts_hash
        before = file_stamps(c)
        with reading_progress(c, mute=self.rank > 0) as tell:
            return encode_pieces(
                self._pieces(),
                Cut(c.max_length, c.lower, tokens),
                vocabulary_size=c.vocabulary_size,
                limit=None if texts_hash is not None else c.limit,
                folder=corpus_folder(c, None if tokens is None else tokens.fingerprint, texts_hash),
                processes=c.processes or processors(),
                tell=tell,
                unchanged=lambda: texts_hash is not None or file_stamps(c) == before,
            )

    def _split(self, part: EvaluatedPart) -> tuple[np.ndarray, np.ndarray]:
        """Rows for training and of a part for evaluation: the last sentences of each document are the test part.

        Those before them may be kept for development or validation. Of a table, the last rows are held out.
        """
        is_validation = part == "validation"
        if self.table is not None:
            rows = np.arange(len(self.table))
            end = len(rows) - int(self.config.held_out * len(rows))
            learnt = max(0, end - int(self.validation * len(rows)))
            return rows[:learnt], rows[learnt:end] if is_validation else rows[end:]
        bounds = self.sentences.starts
        start, length = bounds[:-1], np.diff(bounds)
        kept = length - (self.config.held_out * length).astype(np.int64)
        trained_on = np.maximum(0, kept - ((self.config.development or self.validation) * length).astype(np.int64))
        first, last = (trained_on, kept) if is_validation else (kept, length)
        return _ranges(start, start + trained_on), _ranges(start + first, start + last)

    def _check_rows(self) -> None:
        """Refuse, before an hour of training, what cannot be learnt from or evaluated."""
        c, what = self.config, "sentence" if self.table is None else "row"
        if self.validation and not len(self._split("validation")[1]):
            raise ConfigError(
                f"train.validation_share {self.validation:g} sets no {what} of {c.corpus} aside; raise it, or leave "
                f"train.evaluate_on out"
            )
        if c.pairs != "window" or self.table is not None:
            return
        if not self.sentences.has_neighbours(self.train_rows):
            raise DataError(
                f"the corpus {c.corpus} has no two neighbouring sentences for training: of its "
                f"{counted(len(self.sentences.starts) - 1, 'document')} with "
                f"{counted(len(self.sentences), 'sentence')} none leaves two. If "
                f'a row or line is a sentence of one long text, set text.unit = "sentences"; if each stands for '
                f'itself, text.pairs = "views"; else lower text.held_out and text.development.'
            )
        if self.batch_size < 2:
            raise ConfigError("train.batch_size 1 leaves a sentence without its neighbours; set it to 2 or more")
        if (c.held_out or self.validation) and not self.sentences.has_neighbours(self.held_rows) and not self.rank:
            warnings.warn(
                f"of {c.corpus} no two neighbouring sentences are held out: next sentences are not measured, or on "
                f"sentences of training; raise text.held_out",
                stacklevel=2,
            )

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
        return prefetched(batches, self.device) if self.device.type == "cuda" else batches

    def _batches(self, epoch: int, start: int) -> Iterator[TextBatch]:
        rows_of, mine = self._rows_of(epoch), self._share()
        for place in range(start, self.steps_per_epoch):
            rows = rows_of(place)
            yield TextBatch(
                self._sent_batch(self._ids(rows[mine])),
                to_device(torch.from_numpy(self._owners(rows[mine])), self.device),
                to_device(torch.from_numpy(rows[mine].astype(np.int64)), self.device),
                self.seed.stream("data", "negatives", epoch, place),
                *self._beside(rows, mine, epoch, place),
            )

    def _rows_of(self, epoch: int) -> Callable[[int], np.ndarray]:
        """Rows of the global batch of each place in an epoch."""
        size, pairs = self.batch_size, self.config.pairs
        if self._pair_batches is not None:
            return self._pair_batches.epoch(epoch).__getitem__
        if pairs == "blocks" and self._class_blocks is None:
            return partial(self._draw_blocks, epoch)
        order, offset = np.arange(self.steps_per_epoch), 0
        if self._class_blocks is not None:
            rows = self.train_rows[self._class_blocks.rows(epoch)]
        elif pairs == "views":
            drawn = self._order(epoch, 0, len(self.train_rows))
            return lambda place: self.train_rows[drawn[place * size : (place + 1) * size]]
        else:
            rows = self.train_rows
            if self.config.order == "shuffled":
                draw = self.seed.numpy("data", epoch)
                order = draw.permutation(order)
                # Batches begin elsewhere in every epoch, so that no pair of neighbours is cut apart for good.
                offset = int(draw.integers(len(rows) - self.steps_per_epoch * size + 1))
        return lambda place: rows[offset + order[place] * size : offset + (order[place] + 1) * size]

    def _order(self, epoch: int, tried: int, count: int) -> np.ndarray:
        """An order of single rows."""
        if self.config.order == "sequential":
            return np.arange(count)
        return self.seed.numpy("data", epoch, "rows", tried).permutation(count)

    def _ids(self, rows: np.ndarray) -> list[np.ndarray]:
        """Sentences that the first encoder sees: views see each twice, in one pass."""
        if self.table is not None:
            return self.sentences.ids(self.table.anchor[rows])
        return self.sentences.ids(rows) * (2 if self.config.pairs == "views" else 1)

    def _owners(self, rows: np.ndarray) -> np.ndarray:
        """The document of each row; a table has none."""
        owners = np.zeros(len(rows)) if self.table is not None else self.sentences.document[rows]
        return owners.astype(np.int64)

    def _sent_batch(self, ids: list[np.ndarray]) -> encoders.Batch:
        batch = make_batch(ids, self.config.chunks)
        return (batch.pin_memory() if self.device.type == "cuda" else batch).to(self.device)

    def _beside(self, rows: np.ndarray, mine: slice, epoch: int, place: int) -> tuple[Tensor | None, Partners | None]:
        """Masks and partners of this rank's rows of a global batch."""
        c, vectors, partners = self.config, 2, None
        if self.table is not None:
            partners = self._partners(self.table, rows, mine)
            vectors += partners.most
        if not c.rows_drop or not c.dropout or c.encoder == "transformer":
            return None, partners
        # Drawn for the rows of all ranks: each row has the mask that it has in one process.
        draw = torch.rand(
            vectors, len(rows), self.module.width, generator=self.seed.torch("augment", "dropout", epoch, place)
        )
        masks = (draw[:, mine] >= c.dropout).float() / (1 - c.dropout)
        return to_device(masks, self.device), partners

    def _partners(self, table: PairTable, rows: np.ndarray, mine: slice) -> Partners:
        there = table.negatives[rows] >= 0  # (B, m), rising to the left
        most = int(there.sum(1).max(initial=0))
        there, own = there[:, :most], rows[mine]
        found = table.negatives[own, :most]
        ids = np.concatenate([table.positive[own], found[found >= 0]])
        absent = np.flatnonzero(~there.T.ravel()) + len(rows)
        return Partners(
            self._sent_batch(self.sentences.ids(ids)),
            to_device(torch.from_numpy(np.flatnonzero(found >= 0)), self.device),
            most,
            to_device(torch.from_numpy(absent), self.device) if len(absent) else None,
        )

    def _check_masks(self) -> None:
        """Refuse views that no mask tells apart."""
        c = self.config
        if c.transformer is None:
            return  # the settings say how it drops
        ids = self.sentences.ids(self.train_rows[:8])
        if never_differs(self.module, make_batch(ids * 2, 1)):
            raise ConfigError(
                f"text.transformer = {c.transformer!r} has no dropout, and views differ by their dropout masks alone: "
                f"both would be the same. Set text.dropout, for example 0.1."
            )

    def _draw_blocks(self, epoch: int, step: int) -> np.ndarray:
        """Rows of blocks of consecutive sentences: of each block first the document is drawn, then where it starts."""
        draw, found = self.seed.numpy("data", epoch, "blocks", step), self._block_starts
        owners = draw.integers(len(found), size=self.batch_size // self._unit)
        starts = np.array([draw.choice(found[owner]) for owner in owners])
        return self.train_rows[(starts[:, None] + np.arange(self._unit)).ravel()]

    def embed(self, batch: TextBatch) -> Embedded:
        c, size = self.config, self._unit
        if batch.partners is not None:
            return self._embed_columns(batch, batch.partners)
        f, g = self.module(batch.batch)
        if c.pairs == "views":
            first, second = self._masked([*f.chunk(2)], batch)
            rows = {"first": first, "second": second, "document": batch.document, "index": batch.index}
            return Embedded(rows, pairing.views)
        if c.pairs == "blocks":
            blocks = {"x": f.view(-1, size, f.shape[1]), "labels": batch.document[::size], "index": batch.index[::size]}
            return Embedded(blocks, partial(pairing.blocks, draw=batch.seed))
        rows = {"f": f, "g": g, "document": batch.document, "index": batch.index}
        return Embedded(rows, partial(pairing.neighbours, window=c.window, self_logit=c.self_logit))

    def _embed_columns(self, batch: TextBatch, partners: Partners) -> Embedded:
        f, g = self.module.f, self.module.g
        anchor = _rows(f, batch.batch)
        others = _rows(f if g is None else g, partners.batch)
        count, most = len(anchor), partners.most
        hard = others.new_zeros(count * most, others.shape[1]).index_copy(0, partners.place, others[count:])
        vectors = [anchor, others[:count], *hard.view(count, most, others.shape[1]).unbind(1)]
        anchor, positive, *negatives = self._masked(vectors, batch)
        rows = {"anchor": anchor, "positive": positive, "index": batch.index}
        if negatives:
            rows["negatives"] = torch.stack(negatives, 1)
        return Embedded(rows, partial(pairing.columns, absent=partners.absent))

    def _masked(self, vectors: list[Tensor], batch: TextBatch) -> list[Tensor]:
        """Vectors (B, d) under the dropout masks of this step."""
        if batch.masks is None or not self.module.training:
            return vectors
        return [rows * mask.to(rows.dtype) for rows, mask in zip(vectors, batch.masks, strict=True)]

    def encoders(self) -> list[nn.Module]:
        return [side for side in (self.module.f, self.module.g) if side is not None]

    def remarks(self) -> Sequence[str]:
        found: Sequence[str] = getattr(self.module.f, "remarks", ())  # of g they are the same
        return [*found, *self._cut_short()]

    def before_step(self) -> None:
        if self.config.clip_per_tensor is not None:
            clip_each(self.module, self.config.clip_per_tensor)

    # Evaluation ------------------------------------------------------------------------------------------------------

    def encoder(self, objective: Any = None) -> SentenceEncoder:
        """The model as it is evaluated and exported: with its vocabulary expanded if the recipe says so."""
        c = self.config
        model, tokens = evaluated(self.module), self.tokens
        if c.expand:
            assert c.vectors is not None  # the configuration has checked it
            model, tokens = expanded(model, tokens, c.vectors if self._kept is None else self._kept.vectors)
        limit = min(512, limit_of(model) or 512) if c.encoder == "transformer" else None
        transform = None if objective is None else objective.transform
        return SentenceEncoder(model, tokens, c.normalize, limit, transform)

    def _sides(self, rows: np.ndarray, objective: Any = None) -> tuple[Tensor, Tensor]:
        """f and g of sentences, raw, where they are measured."""
        encoder = SentenceEncoder(
            self.module, self.tokens, transform=None if objective is None else objective.transform
        )
        both = encoder.encode_ids(self.sentences.ids(rows), 4096).to(self._measures)
        half = both.shape[1] // self.module.halves
        return both[:, :half], both[:, -half:]

    def _probe_rows(self, split: str) -> np.ndarray:
        if self._probes is not None:
            return self._probes.rows[split]
        rows = self.held_rows if split == "test" and len(self.held_rows) else self.train_rows
        if split == "train" and len(rows) > PROBED:
            rows = np.sort(self.seed.numpy("probe", "rows").permutation(rows)[:PROBED])
        return rows[:PROBED]

    def features(self, split: str) -> tuple[Tensor, Tensor | None]:
        rows = self._probe_rows(split)
        if self.table is not None:
            return self._sides(_distinct(self.table.anchor[rows]))[0], None
        return self._sides(rows)[0], torch.from_numpy(self.sentences.document[rows].astype(np.int64))

    def held_out_pairs(self, objective: Any) -> Pairs | None:
        """Held-out sentences and their neighbours, or held-out rows of a table; of views nothing is known."""
        rows = self._probe_rows("test")[:PAIRED]
        if self.config.pairs == "views":
            return None
        if self.table is not None:
            rows = rows[np.sort(np.unique(self.table.positive[rows], return_index=True)[1])]
            rows = rows[np.sort(np.unique(self.table.anchor[rows], return_index=True)[1])]
            sides = (
                self._sides(self.table.anchor[rows], objective)[0],
                self._sides(self.table.positive[rows], objective)[1],
            )
            return Pairs.from_columns(*sides) if len(rows) > 1 else None
        document = torch.from_numpy(self.sentences.document[rows].astype(np.int64))
        if len(rows) < 2 or not bool((document[:-1] == document[1:]).any()):
            return None
        return Pairs.from_window(*self._sides(rows, objective), document.to(self._measures))

    def evaluate(self, objective: Any) -> dict[str, float]:
        rows = self._probe_rows("test")
        results = self._of_text(rows, objective) if self.table is None else self._of_table(self.table, rows, objective)
        if self.config.labelled is not None:
            labelled = labelled_documents(self.config.labelled, self.config.column)
            if self.part == "validation":
                labelled = held_back(labelled, self.validation, self.seed.numpy("probe", "labelled"))
            encode = self.encoder(objective).encode
            results.update(document_accuracy(encode, labelled, self.config.labelled, self._measures))
        c = self.config
        if c.senteval is not None:
            encoder = self.encoder(objective)
            found = senteval.evaluate(
                encoder.encode, c.tasks, c.senteval, protocol=c.protocol, kfold=c.kfold, halves=self.module.halves,
                progress=False, device=self._measures,
            )  # fmt: skip
            self._noticed = [f"{task}: {line}" for task, result in found.items() for line in result.changed]
            for task, result in found.items():
                results.update(numbers_of(task, result))
            if self.part == "validation":  # what SentEval itself chooses by
                return {name: value for name, value in results.items() if _is_seen(name)}
            for name, table in written_tables(found).items():
                (self.workdir / name).write_text(table + "\n", encoding="utf-8")
        return results

    def noticed(self) -> Sequence[str]:
        return self._noticed

    def _of_text(self, rows: np.ndarray, objective: Any) -> dict[str, float]:
        """What held-out running text tells: neighbours and documents."""
        document = torch.from_numpy(self.sentences.document[rows].astype(np.int64))
        f, g = self._sides(rows, objective)
        results = next_sentence(f, g, document)
        self._keep_pictures(f, g, document, rows)
        results.update(self._topics(rows, f, objective))
        if self.config.classifiers or self.config.losses:
            results.update(self._document_tasks(objective))
        return results

    def _of_table(self, table: PairTable, rows: np.ndarray, objective: Any) -> dict[str, float]:
        """What held-out rows of a table tell: which text belongs to an anchor."""
        every = np.concatenate([table.anchor[rows], table.positive[rows], table.negatives[rows].ravel()])
        texts, place = np.unique(every, return_inverse=True)
        first = int((texts < 0).sum())  # -1, where a row has fewer negatives, stands first
        f, g = self._sides(texts[first:], objective)
        numbers = torch.from_numpy(place - first)
        anchor, positive, negatives = numbers.split([len(rows), len(rows), len(numbers) - 2 * len(rows)])
        asked = _distinct(table.anchor[rows])
        shown = torch.cat([f, g], 1)[torch.from_numpy(np.searchsorted(texts, asked) - first)]
        (self.workdir / "nearest_sentences.txt").write_text(self._examples(asked, shown) + "\n", encoding="utf-8")
        return find_partners(f, g, anchor, positive, negatives.view(len(rows), -1))

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
        return nearest_sentences(long[::step][:SHOWN], vectors, joined)

    def data_info(self) -> dict[str, Any]:
        if self._kept is not None and self._kept.has_data_of(self.config):
            info: dict[str, Any] = self._kept.told["info"]
            return info
        unknown = self.tokens.words_only and self.sentences.unknown / len(self.sentences.tokens)
        fingerprint = f"{self.sentences.fingerprint}-{self.tokens.fingerprint}"
        documents, read = {"documents": int(self.sentences.document[-1]) + 1}, {}
        if self.table is not None:
            fingerprint, documents = f"{self.table.fingerprint}-{fingerprint}", {"texts": len(self.table.texts)}
            read = {
                "columns": list(self.table.columns),
                "incomplete_rows": self.table.incomplete,
                "rows_with_fewer_negatives": self.table.fewer,
            }
        return {
            "name": self.config.corpus,
            "fingerprint": fingerprint,
            "sizes": {
                "train": len(self.train_rows),
                "test": len(self.held_rows),
                **documents,
                "tokens": len(self.sentences.tokens),
                "vocabulary": len(self.tokens),
            },
            **read,
            "unknown_words": float(unknown),
            "encoder": {
                "width": self.module.output_width,
                "parameters": encoders.parameter_count(self.module),
                **(getattr(self.module.f, "described", None) or {}),
            },
        }

    def export(self, to: str, folder: Path, record: Any, objective: Any = None) -> None:
        from dipole.text.export import export_as

        export_as(to, self.encoder(objective), folder, record)


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


def _distinct(texts: np.ndarray) -> np.ndarray:
    """Each number once, in the order in which it comes first."""
    return texts[np.sort(np.unique(texts, return_index=True)[1])]


def _ranges(first: np.ndarray, behind: np.ndarray) -> np.ndarray:
    """All numbers from each first to the one before its end, one range after another."""
    first, behind = first[behind > first], behind[behind > first]
    steps = np.ones(int((behind - first).sum()), dtype=np.int64)
    if len(first):
        steps[0] = first[0]
        steps[np.cumsum(behind - first)[:-1]] = first[1:] - behind[:-1] + 1
    return np.cumsum(steps, out=steps)


def _rows(part: encoders.Part, batch: encoders.Batch) -> Tensor:
    """Vectors (B, d) by one encoder, in the order of the batch."""
    return torch.cat([part(chunk) for chunk in batch.chunks])[batch.order]


def _check_measured(config: TextSettings) -> None:
    """Raise before hours of training for what would be read after them, and cannot be."""
    if config.labelled is not None:
        documents = labelled_documents(config.labelled, config.column)
        check_parts(((label, tested) for _, label, tested in documents), config.labelled)
    if config.senteval is not None:
        for name in task_names(config.tasks):
            senteval.load_task(name, config.senteval)


def _is_seen(name: str) -> bool:
    """Whether a number is none of a SentEval task's test part."""
    return not name.startswith("senteval/") or "dev" in name.split("/")
