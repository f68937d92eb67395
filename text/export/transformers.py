"""A trained encoder as a folder that transformers loads, tokenizer included.

A transformer with one side and no learned projection is written as itself: `AutoModel.from_pretrained(folder)` reads it
without dipole (`T5EncoderModel` a T5), and its hidden states are pooled as the card says. Everything else is a model
whose code lies in the folder and whose output is the sentence's vector, as the state of a single token.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from dipole.core.train.card import Card, write_card
from dipole.core.utils.backbone import network_class, open_exported, without_transformers_output
from dipole.core.utils.errors import TrainingError
from dipole.text.encode import SentenceEncoder
from dipole.text.encoders.networks import Transformer, pooled
from dipole.text.exported import POOLED
from dipole.text.portable import (
    TASK,
    fast_tokenizer,
    probe_of,
    projected,
    prompted,
    shown,
    truncated,
    with_code,
)

HOW = {
    "cls": "states[:, 0]",
    "mean": '(states * batch["attention_mask"][..., None]).sum(1) / batch["attention_mask"].sum(1, keepdim=True)',
    "lasttoken": 'states[range(len(states)), batch["attention_mask"].sum(1) - 1]',
}
"""Pooling -> its code in the model card."""


@without_transformers_output()
def export(encoder: SentenceEncoder, folder: Path, record: Any) -> None:
    """Write model, tokenizer, README.md, and code where transformers has no such model."""
    model = projected(encoder)
    is_plain = model.g is None and isinstance(model.f, Transformer)
    texts = [text for text in probe_of(encoder) if text]  # plain models have no vector of an empty sentence
    mode = "cls"
    if is_plain:
        part: Any = model.f
        mode = part.pooling
        part.model.save_pretrained(folder)
        # Such a model has no place of its own for the pooling.
        told = json.loads((folder / "config.json").read_text(encoding="utf-8")) | {POOLED: mode}
        (folder / "config.json").write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
        wanted = encoder.encode(texts, normalize="none")
    else:
        with_code(encoder, model).save_pretrained(folder)
        wanted = encoder.encode(texts)
    fast_tokenizer(encoder.tokens, encoder.max_length).save_pretrained(folder)
    off = float(np.abs(_vectors(texts, encoder, folder, mode) - wanted).max())
    if not off < 1e-5:
        raise TrainingError(f"the exported folder would give vectors that differ by {off:.2g} from the run's")
    write_card(folder, _card(encoder, is_plain, HOW[mode]), record, record.data)


@torch.no_grad()
def _vectors(texts: list[str], encoder: SentenceEncoder, folder: Path, mode: str) -> np.ndarray:
    """Compute vectors as the model card describes. Vectors of plain models are not scaled."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    cut = encoder.max_length is not None
    batch = tokenizer(prompted(encoder, texts), padding=True, truncation=cut, return_tensors="pt")
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    states = open_exported(folder, torch.device("cpu"))(**inputs).last_hidden_state
    return pooled(states, inputs["attention_mask"].bool(), mode).numpy()


def _card(encoder: SentenceEncoder, is_plain: bool, how: str) -> Card:
    trust, note, network = ", trust_remote_code=True", "", "AutoModel"
    if is_plain:
        part: Any = encoder.model.f
        trust, network = "", network_class(part.model.config).__name__
        if encoder.normalize != "none":
            note = f"The run scales its vectors: {encoder.normalize!r} (whole ones to unit length)."
    usage = f"""
from transformers import AutoTokenizer, {network}

tokenizer, model = AutoTokenizer.from_pretrained("FOLDER"), {network}.from_pretrained("FOLDER"{trust})
batch = tokenizer({shown(encoder)}, padding=True{truncated(encoder)}, return_tensors="pt")
states = model(batch["input_ids"], batch["attention_mask"]).last_hidden_state
vectors = {how}
"""
    return Card("A sentence encoder.", usage, TASK, "transformers", ("feature-extraction",), note)
