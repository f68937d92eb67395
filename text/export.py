"""A trained encoder as a folder for sentence-transformers.

What that library's own modules can compute is written with them and loads anywhere by `SentenceTransformer(folder)`:
a transformer with one side and its own tokenizer, and bags of words whose vector is scaled to unit length as a whole.
Everything else (GRUs, f and g scaled apart, sums that are not scaled) is a model of transformers whose code lies in the
folder: `SentenceTransformer(folder, trust_remote_code=True)`. Neither needs dipole. In a program that imports this
module the type is known, and no flag is needed.
"""

import tempfile
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast

from dipole.core.ground.errors import TrainingError
from dipole.core.ground.extras import install_line
from dipole.core.ground.lora import merged
from dipole.text.encode import SentenceEncoder
from dipole.text.encoders import BagOfWords, Channels, Part, Projected, SentenceModel, Transformer, architecture
from dipole.text.encoders.modeling_dipole import DipoleSentenceConfig, DipoleSentenceModel
from dipole.text.vocabulary import Tokens

CODE = ("modeling_dipole.py", "networks.py", "batch.py", "recurrent.py")  # what a folder needs to compute by itself
BLANK = " "  # before every sentence: the words' tokenizer reads a blank one as a full stop, but never sees an empty one
PROBE = ["A sentence.", "", "A somewhat longer sentence, to see whether padding is left out !", "unheardofword"]

AutoConfig.register(DipoleSentenceConfig.model_type, DipoleSentenceConfig, exist_ok=True)
AutoModel.register(DipoleSentenceConfig, DipoleSentenceModel, exist_ok=True)


def export_sentence_transformer(encoder: SentenceEncoder, folder: Path) -> None:
    """Write a folder that sentence-transformers loads, and check that it gives the same vectors.

    Raises:
        TrainingError: sentence-transformers is not installed, or the written folder gives other vectors.
    """
    library = _library()
    model = projected(encoder)
    options: dict[str, Any] = {}
    if isinstance(_last(model.f), Transformer) and model.g is None and _closed(encoder.tokens):
        modules = _own_transformer(library, encoder, model)
    elif (table := _word_table(encoder, model)) is not None:
        tokenizer = Tokenizer.from_str(encoder.tokens.tokenizer.to_str())
        if encoder.max_length is not None:
            tokenizer.enable_truncation(encoder.max_length)
        modules = [library.StaticEmbedding(tokenizer, embedding_weights=table), library.Normalize()]
        # encode_query and encode_document take prompts of their own.
        options = {"prompts": dict.fromkeys(("blank", "query", "document"), BLANK), "default_prompt_name": "blank"}
    else:
        modules = _with_code(library, encoder, model)
    library.SentenceTransformer(modules=modules, device="cpu", **options).save(str(folder))
    if isinstance(getattr(modules[0], "auto_model", None), DipoleSentenceModel):
        for name in CODE:
            (folder / name).write_text((files("dipole.text.encoders") / name).read_text(encoding="utf-8"))
    again = library.SentenceTransformer(str(folder), device="cpu").encode(PROBE)
    off = float(np.abs(again - encoder.encode(PROBE)).max())
    if not off < 1e-5:
        raise TrainingError(f"the exported folder {folder} gives vectors that differ by {off:.2g} from the run's")


def _library() -> SimpleNamespace:
    """The classes of sentence-transformers that are used, from where its version has them."""
    try:
        from sentence_transformers import SentenceTransformer

        try:
            from sentence_transformers.sentence_transformer import modules
        except ImportError:  # before 5.5
            from sentence_transformers import models as modules  # type: ignore[no-redef, attr-defined]
    except ImportError as error:
        raise TrainingError(
            f"the export needs sentence-transformers; install it with: {install_line('sentence-transformers')}"
        ) from error
    names = ("Dense", "Normalize", "Pooling", "StaticEmbedding", "Transformer")
    return SimpleNamespace(SentenceTransformer=SentenceTransformer, **{name: getattr(modules, name) for name in names})


def _last(part: Part) -> Part:
    """The encoder itself, below a learned projection."""
    return part.part if isinstance(part, Projected) else part


def _closed(tokens: Tokens) -> bool:
    """Whether every sentence is closed by marks ([CLS], [SEP]): without them an empty one has no token at all."""
    return bool(tokens.tokenizer.num_special_tokens_to_add(False))


def _own_transformer(library: SimpleNamespace, encoder: SentenceEncoder, model: SentenceModel) -> list[nn.Module]:
    last = _last(model.f)
    assert isinstance(last, Transformer)  # the caller has looked
    modules = [_saved(library, encoder, last.model), library.Pooling(last.width, pooling_mode=last.pooling)]
    if isinstance(model.f, Projected):
        dense = library.Dense(model.f.width, model.f.width, bias=False, activation_function=nn.Identity())
        dense.linear.weight = nn.Parameter(model.f.matrix.T.contiguous())
        modules.append(dense)
    return modules if encoder.normalize == "none" else [*modules, library.Normalize()]


def _with_code(library: SimpleNamespace, encoder: SentenceEncoder, model: SentenceModel) -> list[nn.Module]:
    halves = {"halves": model.halves, "unit": 1, "none": 0}[encoder.normalize]
    config = DipoleSentenceConfig(
        architecture(model), model.output_width, halves, encoder.tokens.empty, len(encoder.tokens)
    )
    module = CODE[0].removesuffix(".py")
    config.auto_map = {
        "AutoConfig": f"{module}.{DipoleSentenceConfig.__name__}",
        "AutoModel": f"{module}.{DipoleSentenceModel.__name__}",
    }
    wrapped = DipoleSentenceModel(config)
    wrapped.encoder.load_state_dict(model.state_dict())
    return [_saved(library, encoder, wrapped.eval()), library.Pooling(model.output_width, pooling_mode="cls")]


def _saved(library: SimpleNamespace, encoder: SentenceEncoder, model: nn.Module) -> nn.Module:
    """The library's `Transformer` around a model and its tokenizer; it takes them from a folder only."""
    with tempfile.TemporaryDirectory() as holder:
        model.save_pretrained(holder)  # type: ignore[operator]
        fast_tokenizer(encoder.tokens, encoder.max_length).save_pretrained(holder)
        limit = {"max_seq_length": encoder.max_length} if encoder.max_length else {}
        module: nn.Module = library.Transformer(holder, **limit)
        return module


def _word_table(encoder: SentenceEncoder, model: SentenceModel) -> Tensor | None:
    """Rows (V, width) whose mean over a sentence's words, at unit length, is its vector; None where there are none."""
    whole = encoder.normalize == "unit" or (encoder.normalize == "halves" and model.halves == 1)
    tokens = encoder.tokens
    if not whole or not tokens.words_only or _closed(tokens) or not tokens.tokenizer.encode(BLANK).ids:
        return None
    return _side_by_side([model.f] if model.g is None else [model.f, model.g])


def _side_by_side(parts: list[Part]) -> Tensor | None:
    tables = [_rows(part) for part in parts]
    return None if any(table is None for table in tables) else torch.cat(tables, 1)  # type: ignore[arg-type]


def _rows(part: Part) -> Tensor | None:
    match part:
        case BagOfWords():
            return part.table.weight.detach()
        case Channels():
            return _side_by_side([*part.parts])
        case Projected():
            rows = _rows(part.part)
            return None if rows is None else rows @ part.matrix
    return None


def fast_tokenizer(tokens: Tokens, max_length: int | None) -> PreTrainedTokenizerFast:
    """The tokenizer as transformers loads it; padding is masked, so the unknown word may stand for it."""
    found = {name: next((t for t in tries if t in tokens.index), None) for name, tries in {
        "unk_token": ("<unk>", "[UNK]"), "pad_token": ("[PAD]", "<pad>", "<unk>"),
        "cls_token": ("[CLS]", "<s>"), "sep_token": ("[SEP]", "</s>"), "mask_token": ("[MASK]", "<mask>"),
    }.items()}  # fmt: skip
    special = {name: token for name, token in found.items() if token is not None}
    limit = {"model_max_length": max_length} if max_length is not None else {}
    return PreTrainedTokenizerFast(tokenizer_object=tokens.tokenizer, padding_side="right", **special, **limit)


def projected(encoder: SentenceEncoder) -> SentenceModel:
    """The encoder's model on the CPU, with its linear `transform` (CLLR's L) as a layer of f and of g."""
    model = cast(SentenceModel, merged(encoder.model.cpu().eval()))
    if encoder.transform is None:
        return model
    with torch.no_grad():
        unit = torch.eye(model.width)
        matrix = encoder.transform(unit)  # rows: images of the unit vectors
    if torch.equal(matrix, unit):
        return model
    g = None if model.g is None else Projected(model.g, matrix)
    return SentenceModel(Projected(model.f, matrix), g, model.dropout).eval()
