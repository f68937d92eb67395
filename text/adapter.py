"""The text domain for the trainer: `TextAdapter` joins data, pairs, encoders and evaluation."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, ClassVar, Unpack

import numpy as np
import torch
from torch import Tensor, nn

from dipole.core.evaluation.probes import measuring_device
from dipole.core.objectives.encoded_batch import EncodedBatch
from dipole.core.objectives.pairs import Pairs
from dipole.core.train.adapter import Adapter, Context, Sketch
from dipole.core.train.data_sets import how_to_get
from dipole.core.utils.download import offline_by
from dipole.core.utils.errors import ConfigError, DataError
from dipole.core.utils.text import warn
from dipole.core.utils.transfer import prefetched
from dipole.text import evaluation, senteval
from dipole.text.artifacts import READ_BY, Artifacts, save_artifacts
from dipole.text.cache import version_of
from dipole.text.config import TextSettings
from dipole.text.data import Data, Probes, load_data
from dipole.text.embed import FunctionEmbedder, sentence_embedder
from dipole.text.encode import SentenceEncoder
from dipole.text.encoders.networks import SentenceModel
from dipole.text.encoders.sentence_folder import FolderSettings, folder_settings
from dipole.text.model import build_model, clip_each, expanded, fixed_table, headless, limit_of, positions_of
from dipole.text.pairs import PAIR_KINDS, PairKind, TextBatch, check_blocks
from dipole.text.sentences import Sentences
from dipole.text.senteval.engine import task_names
from dipole.text.senteval.scoring import numbers_of, written_tables
from dipole.text.vocabulary import Tokens, load_tokens

PROBED = 2000  # sentences of each split that probes and diagnostics look at
GLOVE = 300  # assumed width of word vectors that are not read yet
BATCH_TOKENS = 4096  # of evaluation


class TextAdapter(Adapter):
    """Trains sentence encoders on neighbours, blocks, dropout views or pair tables (`dipole.text.pairs`)."""

    domain: ClassVar[str] = "text"
    config_model: ClassVar[type[TextSettings]] = TextSettings
    validates: ClassVar[bool] = True
    export_formats: ClassVar[tuple[str, ...]] = ("onnx", "sentence-transformers", "transformers")
    data_fields: ClassVar[frozenset[str]] = frozenset({*READ_BY, "cache", "senteval", "labelled"} - {"max_length"})
    built_from_data: ClassVar[bool] = True

    config: TextSettings
    module: SentenceModel
    tokens: Tokens
    pairs: PairKind
    positions: int | None  # most tokens that the transformer can read. None: no limit
    _artifacts: Artifacts | None = None
    _folder: FolderSettings | None = None  # of sentence-transformers
    _noticed: Sequence[str] = ()

    def __init__(self, config: TextSettings, **context: Unpack[Context]) -> None:
        super().__init__(config, **context)
        check_blocks(config, self.batch_size, self.world_size)
        self._measures = measuring_device(self.device, config.probe_device)
        if self.kept is not None:
            self._restore(Artifacts(self.kept))
            return
        if config.labelled is not None:  # before hours of training: data for the evaluation can be read
            documents = evaluation.labelled_documents(config.labelled, config.column)
            evaluation.check_parts(documents, config.labelled)
        _check_tasks(config)
        self.positions = positions_of(config)
        self._folder = folder_settings(config.transformer)
        tokens = load_tokens(config.tokenizer) if config.tokenizer != "words" else None
        if self._folder is not None and tokens is not None:
            tokens = self._folder.applied(tokens)
        self.data = load_data(config, tokens, self._max_length, self.rank)
        self.tokens = self.data.tokens
        self.data.check(self.batch_size, self.part, self.validation, is_loud=self.rank == 0)
        self.module = build_model(config, len(self.tokens), fixed_table(config, self.tokens))
        self.embedding_dim = self.module.width
        self.pairs = PAIR_KINDS[config.pairs](
            config, self.data, self.train_rows, self.batch_size, self.seed, self.device, self.embedding_dim
        )
        self.steps_per_epoch = self.pairs.steps_per_epoch
        if not self.steps_per_epoch:
            raise DataError(
                f"the corpus {config.corpus} leaves {self.pairs.available} {self.data.row}s for training, fewer than "
                f"train.batch_size {self.batch_size}"
            )
        for line in self.pairs.check(self.module):
            if self.rank == 0:
                warn(line)

    # A trained model without its corpus ------------------------------------------------------------------------------

    def keep(self, folder: Path) -> None:
        values = {"info": self.data_info(), "steps_per_epoch": self.steps_per_epoch}
        if self._folder is not None:
            values["folder"] = asdict(self._folder)
        save_artifacts(folder, self.config, self.module, self.tokens, self._looked_at, values)

    def _restore(self, artifacts: Artifacts) -> None:
        self._artifacts = artifacts
        self.tokens, self.module = artifacts.tokens, artifacts.build(self.config)
        if "folder" in artifacts.values:
            self._folder = FolderSettings(**artifacts.values["folder"])
            self.tokens = replace(self._folder, lower=False).applied(self.tokens)  # the saved one lower-cases
        self.embedding_dim, self.positions = self.module.width, limit_of(self.module)
        self.steps_per_epoch = artifacts.values["steps_per_epoch"]
        for line in self._cut_short():
            warn(line)

    @cached_property
    def _saved(self) -> Probes | None:
        """The sentences of evaluation in the run's folder. None: the corpus has to be read."""
        if self._artifacts is None or not self._artifacts.has_data_of(self.config):
            return None
        return self._artifacts.probes(self.config)

    @cached_property
    def data(self) -> Data:
        """The sentences in the run's folder, or those of a corpus in ids of the saved vocabulary."""
        if self._saved is not None:
            return self._saved.data
        return load_data(self.config, self.tokens, self._max_length, self.rank)

    @property
    def sentences(self) -> Sentences:
        return self.data.sentences

    @cached_property
    def train_rows(self) -> np.ndarray:
        return self.data.split("test", self.validation)[0]

    @property
    def held_rows(self) -> np.ndarray:
        """Rows of the part that is evaluated."""
        return self.data.split(self.part, self.validation)[1]

    def embedder(self, features: str | None = None, objective: Any = None) -> FunctionEmbedder:
        return sentence_embedder(self.encoder(objective), features)

    @classmethod
    def sketch(cls, config: Any, batch_size: int, world_size: int = 1) -> Sketch | None:
        check_blocks(config, batch_size, world_size)
        if config.transformer is not None or config.tokenizer != "words":
            return None  # files say how wide it is
        return Sketch(_width(config), PAIR_KINDS[config.pairs].example, (config, batch_size))

    @classmethod
    def missing_data(cls, config: Any) -> list[str]:
        sources = {"corpus": ("corpus", config.corpus), "labelled": ("labelled documents", config.labelled)}
        problems = [
            f"no {name} at {source}. Set text.{key} to a file or folder, or hub:NAME."
            + "".join(dict.fromkeys(how_to_get(part.partition(".")[0]) for part in Path(source).parts))
            for key, (name, source) in sources.items()
            if source and source != "pydoc" and not source.startswith("hub:") and not Path(source).exists()
        ]
        try:
            if config.corpus.startswith("hub:") and offline_by():
                version_of(config.corpus)
            _check_tasks(config)
        except DataError as error:
            problems.append(str(error))
        return problems

    # Training --------------------------------------------------------------------------------------------------------

    @property
    def _max_length(self) -> int:
        longest = self.config.max_length
        return min(longest, self.positions or longest)

    def _cut_short(self) -> list[str]:
        """Return a note if sentences are cut before text.max_length."""
        longest, limit = self.config.max_length, self.positions
        if limit is None or longest <= limit:
            return []
        return [f"text.max_length {longest}: the transformer has {limit} positions, longer sentences are cut there"]

    def batches(self, epoch: int, start: int = 0) -> Iterator[TextBatch]:
        rows_of, unit = self.pairs.rows_of(epoch), self.pairs.unit(self.config)
        # This rank's rows of a global batch: complete blocks, as equally as they can be divided.
        units = self.batch_size // unit
        first, after = (units * rank // self.world_size for rank in (self.rank, self.rank + 1))
        mine = slice(unit * first, unit * after)
        places = range(start, self.steps_per_epoch)
        batches = (self.pairs.batch(rows_of(place), mine, epoch, place) for place in places)
        return prefetched(batches, self.device) if self.device.type == "cuda" else batches

    def pass_features(self) -> int:
        if self.config.head != "none":
            raise ConfigError(
                "objective: a term acts on the encoder's features, and text.head puts a head behind them. Set "
                "text.head = 'none', so that the embeddings are the encoder's features."
            )
        return self.embedding_dim

    def embed(self, batch: TextBatch) -> EncodedBatch:
        return self.pairs.embed(self.module, batch)

    def encoders(self) -> list[nn.Module]:
        return [*self.module.sides()]

    def remarks(self) -> Sequence[str]:
        found: Sequence[str] = getattr(self.module.f, "remarks", ())  # those of g are the same
        if self.tokens.prompt:
            found = [*found, f"the prompt {self.tokens.prompt!r} of {self.config.transformer} precedes each sentence"]
        return [*found, *self._cut_short()]

    def before_step(self) -> None:
        if self.config.clip_per_tensor is not None:
            clip_each(self.module, self.config.clip_per_tensor)

    # Evaluation and export -------------------------------------------------------------------------------------------

    def encoder(self, objective: Any = None) -> SentenceEncoder:
        """Return the model as it is evaluated and exported, with the vocabulary of `expand`."""
        c = self.config
        model, tokens = headless(self.module), self.tokens
        if c.expand:
            vectors = c.vectors
            if self._artifacts is not None:
                vectors = str(self._artifacts.folder / "vectors.txt")
            assert vectors is not None  # the configuration has checked it
            model, tokens = expanded(model, tokens, vectors)
        limit = min(512, limit_of(model) or 512) if c.encoder == "transformer" else None
        if self._folder is not None:
            known = [each for each in (self._folder.max_length, limit_of(model)) if each is not None]
            limit = min(known, default=limit)
        return SentenceEncoder(model, tokens, c.normalize, limit, getattr(objective, "transform", None))

    @property
    def _looked_at(self) -> Probes:
        if self._saved is not None:
            return self._saved
        train, held = self.train_rows, self.held_rows
        test = held if len(held) else train
        if len(train) > PROBED:
            train = np.sort(self.seed.numpy("probe", "rows").permutation(train)[:PROBED])
        return Probes(self.data, train, test[:PROBED], bool(len(held)))

    def _probe(self, objective: Any = None) -> evaluation.ProbeSentences:
        encoder = SentenceEncoder(self.module, self.tokens, transform=getattr(objective, "transform", None))

        def sides(rows: np.ndarray) -> tuple[Tensor, Tensor]:
            both = encoder.encode_ids(self.sentences.ids(rows), BATCH_TOKENS).to(self._measures)
            half = both.shape[1] // self.module.halves
            return both[:, :half], both[:, -half:]

        return evaluation.ProbeSentences(**vars(self._looked_at), sides=sides, workdir=self.workdir, seed=self.seed)

    def features(self, split: str) -> tuple[Tensor, Tensor | None]:
        probe = self._probe()
        rows = {"train": probe.train, "test": probe.test}[split]
        if (table := self.data.table) is not None:
            return probe.sides(evaluation.distinct(table.anchor[rows]))[0], None
        return probe.sides(rows)[0], probe.document(rows)

    def held_out_pairs(self, objective: Any) -> Pairs | None:
        """Return held-out sentences and their neighbours, or held-out rows of a table. None for views."""
        if not PAIR_KINDS[self.config.pairs].has_held_out:
            return None
        return evaluation.held_out_pairs(self._probe(objective))

    def evaluate(self, objective: Any) -> dict[str, float]:
        c, probe = self.config, self._probe(objective)
        if self.data.table is None:
            results = evaluation.text_results(probe)
        else:
            results = evaluation.table_results(probe, self.data.table)
        if c.classifiers or c.losses:
            block_size = PAIR_KINDS[c.pairs].unit(c) - 1 or 1
            results |= evaluation.document_results(probe, self.train_rows, self.held_rows, objective, block_size)
        if c.labelled is not None:
            documents = evaluation.labelled_documents(c.labelled, c.column)
            if self.part == "validation":
                draw = self.seed.numpy("probe", "labelled")
                documents = evaluation.held_back(documents, self.validation, draw)
            encode = self.encoder(objective).encode
            results |= evaluation.document_accuracy(encode, documents, c.labelled, self._measures)
        if c.senteval is not None:
            results |= self._senteval(objective)
            if self.part == "validation":  # only what SentEval itself chooses by
                results = {name: value for name, value in results.items() if _is_development(name)}
        return results

    def _senteval(self, objective: Any) -> dict[str, float]:
        c = self.config
        assert c.senteval is not None  # the caller has checked it
        found = senteval.evaluate(
            self.encoder(objective).encode,
            c.tasks,
            c.senteval,
            protocol=c.protocol,
            kfold=c.kfold,
            halves=self.module.halves,
            progress=False,
            device=self._measures,
        )
        self._noticed = [f"{task}: {line}" for task, result in found.items() for line in result.changed]
        if self.part != "validation":
            for name, table in written_tables(found).items():
                (self.workdir / name).write_text(table + "\n", encoding="utf-8")
        return {name: value for task, result in found.items() for name, value in numbers_of(task, result).items()}

    def noticed(self) -> Sequence[str]:
        return self._noticed

    def data_info(self) -> dict[str, Any]:
        if self._artifacts is not None and self._saved is not None:
            return dict(self._artifacts.values["info"])
        info = self.data.info()
        sizes = {"train": len(self.train_rows), "test": len(self.held_rows), **info.pop("sizes")}
        sizes |= {"tokens": len(self.sentences.tokens), "vocabulary": len(self.tokens)}
        unknown = self.tokens.words_only and self.sentences.unknown / len(self.sentences.tokens)
        return {
            "name": self.config.corpus,
            "fingerprint": info.pop("fingerprint"),
            "sizes": sizes,
            **info,
            "unknown_words": float(unknown),
            "encoder": {
                "width": self.module.output_width,
                "parameters": sum(each.numel() for each in self.module.parameters()),
                **(getattr(self.module.f, "described", None) or {}),
            },
        }

    def export(self, to: str, folder: Path, record: Any, objective: Any = None) -> None:
        from dipole.text.export import export_as

        export_as(to, self.encoder(objective), folder, record)


@cache
def _width(config: TextSettings) -> int:
    """Return the width of encoders that are built for the largest vocabulary of the settings."""
    words = config.vocabulary_size + 1
    with torch.device("meta"):
        fixed = None if config.channels == "trained" else nn.Embedding(words, GLOVE)
        return build_model(config, words, fixed).width


def _check_tasks(config: TextSettings) -> None:
    if config.senteval is not None:
        for name in task_names(config.tasks):
            senteval.load_task(name, config.senteval)


def _is_development(name: str) -> bool:
    """Return False for numbers of the test part of a SentEval task."""
    return not name.startswith("senteval/") or "dev" in name.split("/")
