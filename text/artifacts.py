"""Files in a run's folder that a trained text model needs in addition to its weights.

    kept/{tokenizer.json, text.json, probes.npz}, and if they are used transformer/config.json and vectors.txt

The corpus is not needed any more: word ids are those that the embeddings were trained for.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from torch import nn

from dipole.core.utils.errors import CheckpointError
from dipole.core.utils.received import read_json
from dipole.core.utils.rows import open_bytes
from dipole.text.config import TextSettings
from dipole.text.data import Data, Probes, RunningText, TableData
from dipole.text.encoders.networks import BagOfWords, Encoder, Pooled, SentenceModel, Transformer, WordGRU
from dipole.text.model import Headed, build_model
from dipole.text.pair_table import PairTable
from dipole.text.sentences import ARRAYS, Sentences
from dipole.text.vocabulary import Tokens, load_tokens

READ_BY = (
    "corpus", "unit", "column", "split", "encoding", "limit", "held_out", "development", "max_length", "columns",
    "label", "label_use", "label_from",
)  # fmt: skip
"""Settings that select the sentences of a corpus. If they differ from the run's own, the corpus is read."""
TABLE = ("anchor", "positive", "negatives")


def save_artifacts(
    folder: Path, config: TextSettings, module: SentenceModel, tokens: Tokens, probes: Probes, values: dict
) -> None:
    """Fill an empty folder. `values` are numbers that need the corpus."""
    tokens.save(folder / "tokenizer.json")
    tables: list[Any] = [part.table for part in module.modules() if isinstance(part, BagOfWords | WordGRU)]
    fixed = next((table.embedding_dim for table in tables if not table.weight.requires_grad), None)
    settings = {name: getattr(config, name) for name in READ_BY}
    end = next((part for part in module.modules() if isinstance(part, Pooled)), None)
    behind = None
    if end is not None:
        behind = {"pooling": end.pooling, "layers": end.described_layers, "similarity": end.similarity}
    text = json.dumps({"data": settings, "fixed": fixed, "behind": behind, **values}, indent=1)
    (folder / "text.json").write_text(text + "\n")
    used, places = np.unique(np.concatenate([probes.train, probes.test]), return_inverse=True)
    arrays = dict(zip(("train", "test"), np.split(places, [len(probes.train)]), strict=True))
    if probes.data.table is not None:
        table, used = probes.data.table.take(used)
        arrays |= {name: getattr(table, name) for name in TABLE}
    sentences = probes.data.sentences.take(used)
    arrays |= {name: getattr(sentences, name) for name in ARRAYS}
    np.savez(folder / "probes.npz", allow_pickle=False, held_out=np.bool_(probes.has_held_out), **arrays)
    if config.transformer is not None:
        inner = next(part.model for part in module.modules() if isinstance(part, Transformer))
        inner.config.save_pretrained(folder / "transformer")
    if config.expand:
        assert config.vectors is not None  # the configuration has checked it
        with open_bytes(Path(config.vectors)) as packed, (folder / "vectors.txt").open("wb") as plain:
            shutil.copyfileobj(packed, plain)


class Artifacts:
    """A folder of `save_artifacts`. Raise CheckpointError if a file is damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with self._damage():
            self.tokens = load_tokens(folder / "tokenizer.json")
            self.values: dict[str, Any] = read_json(folder / "text.json")

    @contextmanager
    def _damage(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
            raise CheckpointError(
                f"the model {self.folder} is damaged: {error}. Train again with --overwrite."
            ) from error

    def build(self, config: TextSettings) -> SentenceModel:
        """Return the untrained model in the shape of the trained one."""
        own = {"head": "none"}  # it is one of the layers behind, or on top of them
        if config.transformer is not None:
            own["transformer"] = str(self.folder / "transformer")
        blank, width, behind = None, self.values["fixed"], self.values["behind"]
        if width is not None:
            blank = nn.Embedding.from_pretrained(torch.zeros(len(self.tokens), width))
        model = build_model(config.model_copy(update=own), len(self.tokens), blank)

        def finish(side: Any) -> Encoder:
            if behind:
                side = Pooled(side, tuple(behind["pooling"]), behind["layers"], behind.get("similarity", "cosine"))
            return Headed(side) if config.head == "mlp_only_train" else side

        return SentenceModel(*map(finish, model.sides()), dropout=model.dropout)

    def has_data_of(self, config: TextSettings) -> bool:
        """Return whether the saved sentences suffice for a configuration."""
        asked = {name: getattr(config, name) for name in READ_BY}
        saved = {name: TextSettings.model_fields[name].default for name in READ_BY} | self.values["data"]
        return json.loads(json.dumps(asked)) == saved and not (config.classifiers or config.losses)

    def probes(self, config: TextSettings) -> Probes:
        with self._damage(), np.load(self.folder / "probes.npz") as file:
            found = dict(file)
        sentences = Sentences(*(found[name] for name in ARRAYS))
        data: Data = RunningText(config, self.tokens, sentences)
        if "anchor" in found:
            table = PairTable([], found["anchor"], found["positive"], found["negatives"], ())
            data = TableData(config, self.tokens, sentences, table)
        return Probes(data, found["train"], found["test"], bool(found["held_out"]))
