"""What a trained text model needs besides its weights: vocabulary, shapes, word vectors, the sentences it is probed on.

    kept/{tokenizer.json, text.json, probes.npz}, and where they are used transformer/config.json and vectors.txt

Nothing of it depends on the corpus any more: the ids of words are those that the embeddings were trained for.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from torch import nn

from dipole.core.utils.errors import CheckpointError
from dipole.core.utils.received import read_json
from dipole.text import encoders
from dipole.text.config import TextSettings
from dipole.text.encoders.head import with_head
from dipole.text.encoders.tail import Pooled
from dipole.text.model import build_model
from dipole.text.pair_table import PairTable
from dipole.text.sentences import Sentences
from dipole.text.vocabulary import Tokens, load_tokens

READ_BY = ("corpus", "unit", "column", "split", "encoding", "limit", "held_out", "development", "max_length", "columns")
"""Settings that say which sentences a corpus gives; with others than the run's own the corpus is read."""

TABLE = ("anchor", "positive", "negatives")


@dataclass(frozen=True)
class Probes:
    """The sentences that evaluation looks at.

    sentences: all of them; rows: of the splits "train" and "test", of the sentences or of the table; held_out: whether
    those of "test" were; table: of pairs, whose texts the sentences are.
    """

    sentences: Sentences
    rows: dict[str, np.ndarray]
    held_out: bool
    table: PairTable | None = None

    def taken(self) -> "Probes":
        """What the rows need of it, and no more."""
        every, cut = np.concatenate([self.rows["train"], self.rows["test"]]), len(self.rows["train"])
        used, places = np.unique(every, return_inverse=True)
        rows = {"train": places[:cut], "test": places[cut:]}
        if self.table is None:
            return Probes(self.sentences.take(used), rows, self.held_out)
        table, texts = self.table.take(used)
        return Probes(self.sentences.take(texts), rows, self.held_out, table)


def keep(
    folder: Path, config: TextSettings, module: encoders.SentenceModel, tokens: Tokens, probes: Probes, told: dict
) -> None:
    """Fill a folder; `told`: numbers that are not worked out again without the corpus."""
    tokens.save(folder / "tokenizer.json")
    fixed = next((table.embedding_dim for table in _tables(module) if not table.weight.requires_grad), None)
    settings = {name: getattr(config, name) for name in READ_BY}
    tail = next((part for part in module.modules() if isinstance(part, Pooled)), None)
    behind = None if tail is None else {"pooling": list(tail.pooling), "layers": list(tail.described_layers)}
    values = {"data": settings, "fixed": fixed, "behind": behind, **told}
    (folder / "text.json").write_text(json.dumps(values, indent=1) + "\n")
    taken = probes.taken()
    s, table = taken.sentences, taken.table
    arrays = {"tokens": s.tokens, "offsets": s.offsets, "document": s.document, **taken.rows}
    arrays |= {} if table is None else {name: getattr(table, name) for name in TABLE}
    np.savez(folder / "probes.npz", allow_pickle=False, held_out=np.bool_(taken.held_out), **arrays)
    if config.transformer is not None:
        inner = next(part.model for part in module.modules() if isinstance(part, encoders.Transformer))
        inner.config.save_pretrained(folder / "transformer")
    if config.expand:
        assert config.vectors is not None  # the configuration has checked it
        shutil.copyfile(config.vectors, folder / "vectors.txt")


def _tables(module: nn.Module) -> list[nn.Embedding]:
    """The word embeddings."""
    found = (getattr(part, "table", None) for part in module.modules())
    return [table for table in found if isinstance(table, nn.Embedding)]


class Kept:
    """What `keep` wrote, read back."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.tokens = load_tokens(folder / "tokenizer.json")
            self.told: dict[str, Any] = read_json(folder / "text.json")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"the model {folder} is damaged: {error}. Train again with --overwrite.") from error

    def build(self, config: TextSettings) -> encoders.SentenceModel:
        """The untrained model, in the shape of the trained one; no file beside the folder is read."""
        if config.transformer is not None:
            config = config.model_copy(update={"transformer": str(self.folder / "transformer")})
        head = config.head
        config = config.model_copy(update={"head": "none"})  # it stands over what is behind
        width = self.told["fixed"]
        blank = None if width is None else nn.Embedding.from_pretrained(torch.zeros(len(self.tokens), width))
        model = build_model(config, len(self.tokens), blank)
        behind = self.told["behind"]

        def whole(side: encoders.Part) -> encoders.Part:
            return with_head(Pooled(side, tuple(behind["pooling"]), behind["layers"]) if behind else side, head)

        return encoders.SentenceModel(whole(model.f), None if model.g is None else whole(model.g), model.dropout)

    @property
    def vectors(self) -> str:
        """The file of word vectors that the vocabulary is expanded by."""
        return str(self.folder / "vectors.txt")

    def has_data_of(self, config: TextSettings) -> bool:
        """Whether a configuration asks for the sentences that lie here, and for no others."""
        asked = {name: getattr(config, name) for name in READ_BY}
        return json.loads(json.dumps(asked)) == self.told["data"] and not (config.classifiers or config.losses)

    def probes(self) -> Probes:
        try:
            with np.load(self.folder / "probes.npz") as file:
                found = dict(file)
        except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
            raise CheckpointError(
                f"the model {self.folder} is damaged: {error}. Train again with --overwrite."
            ) from error
        rows = {split: found[split] for split in ("train", "test")}
        sentences = Sentences(found["tokens"], found["offsets"], found["document"])
        anchor, positive, negatives = (found.get(name) for name in TABLE)
        table = None
        if anchor is not None and positive is not None and negatives is not None:
            table = PairTable([], anchor, positive, negatives, ())
        return Probes(sentences, rows, bool(found["held_out"]), table)
