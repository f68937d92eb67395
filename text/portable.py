"""Shared by the export formats: the model with its projection as a layer, its tokenizer, and its code."""

from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast

from dipole.core.utils.lora import merged
from dipole.text.encode import SentenceEncoder
from dipole.text.encoders import Part, Projected, SentenceModel, architecture
from dipole.text.encoders.modeling_dipole import DipoleSentenceConfig, DipoleSentenceModel
from dipole.text.vocabulary import Tokens

# Files that let a folder work without dipole.
CODE = ("modeling_dipole.py", "networks.py", "batch.py", "tail.py")
TASK = "sentence-similarity"

AutoConfig.register(DipoleSentenceConfig.model_type, DipoleSentenceConfig, exist_ok=True)
AutoModel.register(DipoleSentenceConfig, DipoleSentenceModel, exist_ok=True)


def last(part: Part) -> Part:
    """Return the encoder below a learned projection."""
    if isinstance(part, Projected):
        return part.part
    return part


def parts_scaled(encoder: SentenceEncoder, model: SentenceModel) -> int:
    """Return the number of equal parts of a vector that are scaled to unit length, or 0."""
    return {"halves": model.halves, "unit": 1, "none": 0}[encoder.normalize]


def with_code(encoder: SentenceEncoder, model: SentenceModel) -> DipoleSentenceModel:
    """Wrap the model as one of transformers, whose code `write_code` copies."""
    config = DipoleSentenceConfig(
        architecture(model), model.output_width, parts_scaled(encoder, model), encoder.tokens.empty, len(encoder.tokens)
    )
    module = CODE[0].removesuffix(".py")
    config.auto_map = {
        "AutoConfig": f"{module}.{DipoleSentenceConfig.__name__}",
        "AutoModel": f"{module}.{DipoleSentenceModel.__name__}",
    }
    wrapped = DipoleSentenceModel(config)
    wrapped.encoder.load_state_dict(model.state_dict())
    return wrapped.eval()


def write_code(folder: Path) -> None:
    """Copy the code of the model into a folder."""
    for name in CODE:
        (folder / name).write_text((files("dipole.text.encoders") / name).read_text(encoding="utf-8"))


def fast_tokenizer(tokens: Tokens, max_length: int | None) -> PreTrainedTokenizerFast:
    """Return the tokenizer for transformers. Padding is masked, so the unknown word can be the padding token."""
    found = {name: next((t for t in tries if t in tokens.index), None) for name, tries in {
        "unk_token": ("<unk>", "[UNK]"), "pad_token": ("[PAD]", "<pad>", "<unk>"),
        "cls_token": ("[CLS]", "<s>"), "sep_token": ("[SEP]", "</s>"), "mask_token": ("[MASK]", "<mask>"),
    }.items()}  # fmt: skip
    special: dict[str, Any] = {name: token for name, token in found.items() if token is not None}
    if max_length is not None:
        special["model_max_length"] = max_length
    return PreTrainedTokenizerFast(tokenizer_object=tokens.tokenizer, padding_side="right", **special)


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
    sides = [Projected(side, matrix) for side in model.sides()]
    return SentenceModel(*sides, dropout=model.dropout).eval()
