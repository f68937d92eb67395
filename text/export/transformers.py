"""A trained encoder as a folder that transformers loads, tokenizer included.

A transformer with one side and no learned projection is written as itself: `AutoModel.from_pretrained(folder)` reads it
without dipole (`T5EncoderModel` a T5), and its hidden states are pooled as the card says. Everything else is a model
whose code lies in the folder and whose output is the sentence's vector, as the state of a single token.
"""

from pathlib import Path
from typing import Any

from dipole.core.train.exports import Card, write_card
from dipole.core.utils.backbone import network_class, without_transformers_output
from dipole.text.encode import Normalize, SentenceEncoder
from dipole.text.encoders.networks import Transformer
from dipole.text.export import TASK, fast_tokenizer, projected, tokenizer_call, with_code
from dipole.text.exported import POOLED, check_vectors

# Pooling -> its code in the model card.
HOW = {
    "cls": "states[:, 0]",
    "mean": '(states * batch["attention_mask"][..., None]).sum(1) / batch["attention_mask"].sum(1, keepdim=True)',
    "lasttoken": 'states[range(len(states)), batch["attention_mask"].sum(1) - 1]',
}


@without_transformers_output()
def export(encoder: SentenceEncoder, folder: Path, record: Any) -> None:
    """Write model, tokenizer, README.md, and code where transformers has no such model."""
    model = projected(encoder)
    trust, network, note = ", trust_remote_code=True", "AutoModel", ""
    mode = "cls"
    scaling: Normalize | None = None
    if model.g is None and isinstance(model.f, Transformer):
        mode, scaling = model.f.pooling, "none"
        inner = model.f.model
        inner.config.update({POOLED: mode})  # such a model has no place of its own for it
        inner.save_pretrained(folder)
        trust, network = "", network_class(inner.config).__name__
        if encoder.normalize != "none":
            note = f"The run scales its vectors: {encoder.normalize!r} (whole ones to unit length)."
    else:
        with_code(encoder, model).save_pretrained(folder)
    fast_tokenizer(encoder.tokens, encoder.max_length).save_pretrained(folder)
    check_vectors(encoder, folder, scaling)
    usage = f"""
from transformers import AutoTokenizer, {network}

tokenizer, model = AutoTokenizer.from_pretrained("FOLDER"), {network}.from_pretrained("FOLDER"{trust})
batch = {tokenizer_call(encoder, "pt")}
states = model(batch["input_ids"], batch["attention_mask"]).last_hidden_state
vectors = {HOW[mode]}
"""
    card = Card("A sentence encoder.", usage, TASK, "transformers", ("feature-extraction",), note)
    write_card(folder, card, record, record.data)
