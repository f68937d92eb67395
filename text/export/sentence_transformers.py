"""A trained encoder as a folder for sentence-transformers.

If the library's own modules suffice, the folder uses them and loads anywhere by `SentenceTransformer(folder)`:
a transformer with one side and its own tokenizer, and bags of words whose vector is scaled to unit length as a whole.
Everything else (GRUs, f and g scaled apart, sums that are not scaled) is a model of transformers whose code lies in the
folder: `SentenceTransformer(folder, trust_remote_code=True)`. Neither needs dipole. In a program that imports this
module the type is known, and no flag is needed.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dipole.core.train.exports import Card, write_card
from dipole.core.utils.extras import needing
from dipole.text.encode import SentenceEncoder
from dipole.text.encoders.batch import make_batch
from dipole.text.encoders.networks import BagOfWords, Channels, Pooled, Projected, SentenceModel, Transformer
from dipole.text.export import TASK, fast_tokenizer, projected, with_code
from dipole.text.exported import check_vectors
from dipole.text.vocabulary import Tokens, copied

with needing("sentence-transformers", "the export"):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules as library

LINEAR = (SentenceModel, BagOfWords, Channels, Projected, nn.Embedding, nn.ModuleList)
"""Modules of encoders whose vector of a sentence is the sum of those of its words."""
BLANK = " "  # before every sentence: the words' tokenizer reads a blank one as a full stop, but never sees an empty one


def export(encoder: SentenceEncoder, folder: Path, record: Any) -> None:
    """Call `export_sentence_transformer` and write dipole's model card."""
    export_sentence_transformer(encoder, folder)
    trust = ", trust_remote_code=True" if any(folder.glob("*.py")) else ""
    usage = f"""
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("FOLDER"{trust})
vectors = model.encode(["A sentence.", "Another one."])
"""
    card = Card("A sentence encoder.", usage, TASK, "sentence-transformers", ("feature-extraction",))
    write_card(folder, card, record, record.data)


def export_sentence_transformer(encoder: SentenceEncoder, folder: Path) -> None:
    """Write a folder that sentence-transformers loads. Raise TrainingError if it gives other vectors."""
    model = projected(encoder)
    options: dict[str, Any] = {}
    if encoder.tokens.prompts:
        options |= {"prompts": encoder.tokens.prompts, "default_prompt_name": encoder.tokens.default_prompt}
    end: Any = model.f.part if isinstance(model.f, Projected) else model.f
    options["similarity_fn_name"] = getattr(end, "similarity", "cosine")
    if isinstance(end, Transformer | Pooled) and model.g is None and _closed(encoder.tokens):
        modules = _own_transformer(encoder, model, end)
    elif (table := _word_table(encoder, model)) is not None:
        tokenizer = copied(encoder.tokens.tokenizer)
        if encoder.max_length is not None:
            tokenizer.enable_truncation(encoder.max_length)
        modules = [library.StaticEmbedding(tokenizer, embedding_weights=table), library.Normalize()]
        # encode_query and encode_document take prompts of their own.
        options |= {"prompts": dict.fromkeys(("blank", "query", "document"), BLANK), "default_prompt_name": "blank"}
    else:
        pooling = library.Pooling(model.output_width, pooling_mode="cls")
        modules = [_transformer(encoder, with_code(encoder, model)), pooling]
    SentenceTransformer(modules=modules, device="cpu", **options).save(str(folder), create_model_card=False)
    check_vectors(encoder, folder)


def _closed(tokens: Tokens) -> bool:
    """Return whether the tokenizer adds [CLS] or [SEP]. Without them an empty sentence has no token."""
    return bool(tokens.tokenizer.num_special_tokens_to_add(False))


def _own_transformer(encoder: SentenceEncoder, model: SentenceModel, end: Transformer | Pooled) -> list[nn.Module]:
    inner: Any = end.part if isinstance(end, Pooled) else end
    modules = [_transformer(encoder, inner.model), library.Pooling(inner.width, pooling_mode=end.pooling)]
    if isinstance(end, Pooled):
        modules += [_layer(own, a) for own, a in zip(end.layers, end.described_layers, strict=True)]
    if isinstance(model.f, Projected):
        dense = library.Dense(model.f.width, model.f.width, bias=False, activation_function=nn.Identity())
        dense.linear.weight = nn.Parameter(model.f.matrix.T.contiguous())
        modules.append(dense)
    if encoder.normalize != "none":
        modules.append(library.Normalize())
    return modules


def _layer(own: nn.Module, a: dict[str, Any]) -> nn.Module:
    """A layer of `Pooled` as the library's module."""
    if a["kind"] == "normalize":
        return library.Normalize()
    if a["kind"] == "dropout":
        return library.Dropout(a["p"])
    if a["kind"] == "layer_norm":
        norm = library.LayerNorm(a["size"])
        norm.norm.load_state_dict(own.state_dict())
        return norm
    activation = getattr(nn, a["activation"])()
    dense = library.Dense(a["size"], a["out"], a["bias"], activation, use_residual=a["residual"])
    dense.load_state_dict(own.state_dict())
    return dense


def _transformer(encoder: SentenceEncoder, model: nn.Module) -> nn.Module:
    """Wrap a model and its tokenizer in the library's `Transformer`, which reads them from a folder."""
    with tempfile.TemporaryDirectory() as holder:
        model.save_pretrained(holder)  # type: ignore[operator]
        fast_tokenizer(encoder.tokens, encoder.max_length, with_prompt=False).save_pretrained(holder)
        options = {"max_seq_length": encoder.max_length} if encoder.max_length else {}
        return library.Transformer(holder, **options)


def _word_table(encoder: SentenceEncoder, model: SentenceModel) -> Tensor | None:
    """Return rows (V, width) whose mean over a sentence's words, at unit length, is its vector, or None."""
    whole = encoder.normalize == "unit" or (encoder.normalize == "halves" and model.halves == 1)
    tokens = encoder.tokens
    is_linear = all(isinstance(part, LINEAR) for part in model.modules())
    is_split = tokens.words_only and not _closed(tokens) and tokens.tokenizer.encode(BLANK).ids
    if not (whole and is_linear and is_split):
        return None
    with torch.no_grad():
        return model.represent(make_batch([[word] for word in range(len(tokens))]))
