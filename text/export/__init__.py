"""A trained encoder for other libraries: a file per format, and what they share.

A program that has imported this package knows the models with code of our own, and needs no flag to load them.
"""

import json
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import normalizers
from torch import nn
from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast

from dipole.core.train.finetuning import merged
from dipole.text.encode import SentenceEncoder
from dipole.text.encoders.modeling_dipole import DipoleSentenceConfig, DipoleSentenceModel
from dipole.text.encoders.networks import Projected, SentenceModel, architecture
from dipole.text.vocabulary import PROMPT, Tokens, copied

TASK = "sentence-similarity"

AutoConfig.register(DipoleSentenceConfig.model_type, DipoleSentenceConfig, exist_ok=True)
AutoModel.register(DipoleSentenceConfig, DipoleSentenceModel, exist_ok=True)
# `save_pretrained` copies the code, so that a folder works without dipole.
DipoleSentenceConfig.register_for_auto_class()
DipoleSentenceModel.register_for_auto_class("AutoModel")


def parts_scaled(encoder: SentenceEncoder, model: SentenceModel) -> int:
    """Return the number of equal parts of a vector that are scaled to unit length, or 0."""
    return {"halves": model.halves, "unit": 1, "none": 0}[encoder.normalize]


def with_code(encoder: SentenceEncoder, model: SentenceModel) -> DipoleSentenceModel:
    config = DipoleSentenceConfig(
        architecture(model), model.output_width, parts_scaled(encoder, model), encoder.tokens.empty, len(encoder.tokens)
    )
    wrapped = DipoleSentenceModel(config)
    wrapped.encoder.load_state_dict(model.state_dict())
    # Files hold a parameter that several modules share, such as T5's embeddings, under one name.
    seen: set[nn.Parameter] = set()
    for module in wrapped.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter in seen:
                setattr(module, name, nn.Parameter(parameter.detach().clone(), parameter.requires_grad))
            seen.add(parameter)
    return wrapped.eval()


def tokenizer_call(encoder: SentenceEncoder, tensors: str) -> str:
    """Return the code of a model card for two sentences, behind the prompt if the tokenizer does not add it."""
    prompt = "" if _prepends(encoder.tokens) else encoder.tokens.prompt
    sentences = [f"{prompt}A sentence.", f"{prompt}Another one."]
    cut = ", truncation=True" if encoder.max_length is not None else ""
    return f'tokenizer({json.dumps(sentences, ensure_ascii=False)}, padding=True{cut}, return_tensors="{tensors}")'


def _prepends(tokens: Tokens) -> bool:
    """Return whether a normalizer can add the prompt. It would spell special tokens in it, such as [Q], as text."""
    added = tokens.tokenizer.get_added_tokens_decoder().values()
    return not any(token.content in tokens.prompt for token in added if not token.normalized)


def fast_tokenizer(tokens: Tokens, max_length: int | None, *, with_prompt: bool = True) -> PreTrainedTokenizerFast:
    """Return the tokenizer for transformers, which puts the prompt before every sentence if it can."""
    found = {name: next((t for t in tries if t in tokens.index), None) for name, tries in {
        "unk_token": ("<unk>", "[UNK]"), "pad_token": ("[PAD]", "<pad>", "<unk>"),
        "cls_token": ("[CLS]", "<s>"), "sep_token": ("[SEP]", "</s>"), "mask_token": ("[MASK]", "<mask>"),
    }.items()}  # fmt: skip
    special: dict[str, Any] = {name: token for name, token in found.items() if token is not None} | tokens.options
    if "pad_token" not in special:
        # Padding is masked, so any special token can be the padding token.
        added = (str(token) for token in tokens.tokenizer.get_added_tokens_decoder().values() if token.special)
        special["pad_token"] = special.get("eos_token") or next(added, tokens.words()[0])
    if max_length is not None:
        special["model_max_length"] = max_length
    prompt = None
    if with_prompt and tokens.prompt:
        special[PROMPT] = tokens.prompt
        if _prepends(tokens):
            prompt = normalizers.Prepend(tokens.prompt)
    inner = copied(tokens.tokenizer, prompt)
    return PreTrainedTokenizerFast(tokenizer_object=inner, padding_side="right", **special)


def projected(encoder: SentenceEncoder) -> SentenceModel:
    """Return the encoder's model on the CPU, with its linear `transform` (CLLR's L) as a layer of f and of g."""
    model = cast(SentenceModel, merged(encoder.model.cpu().eval()))
    if encoder.transform is None:
        return model
    with torch.no_grad():
        unit = torch.eye(model.width)
        matrix = encoder.transform(unit)  # rows: images of the unit vectors
    if torch.equal(matrix, unit):
        return model
    return SentenceModel(*(Projected(side, matrix) for side in model.sides()), dropout=model.dropout).eval()


def export_as(to: str, encoder: SentenceEncoder, folder: Path, record: Any) -> None:
    """Write an encoder in one of the formats of `TextAdapter.export_formats` into an empty folder, card included."""
    import_module(f"{__name__}.{to.replace('-', '_')}").export(encoder, folder, record)
