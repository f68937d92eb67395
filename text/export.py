"""A trained encoder as a folder for sentence-transformers.

A transformer with one side and its own tokenizer is written with that library's own modules and loads anywhere.
Everything else (GRUs, bags of words, f beside g) is written as a Hugging Face model of the type "dipole_sentence".
Importing this module registers the type; `dipole.text.autoload` imports it wherever dipole is installed and
sentence-transformers is used, so that `SentenceTransformer(path)` knows it.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.modeling_outputs import BaseModelOutput

from dipole.core.ground.errors import TrainingError
from dipole.text.batching import Batch, Chunk
from dipole.text.encode import SentenceEncoder
from dipole.text.encoders import Projected, SentenceModel, Transformer, architecture, from_architecture
from dipole.text.vocabulary import Tokens

LOADER = "modeling_dipole.py"
PROBE = ["A sentence.", "", "A somewhat longer sentence, to see whether padding is left out !", "unheardofword"]


class DipoleSentenceConfig(PretrainedConfig):
    """Shape of a sentence encoder."""

    model_type = "dipole_sentence"

    def __init__(
        self,
        architecture: dict[str, Any] | None = None,
        hidden_size: int = 0,
        halves: int = 0,
        empty: int = 0,
        vocab_size: int = 1,
        **kwargs: Any,
    ) -> None:
        """halves: parts of the vector scaled to unit length; 0 for none. empty: id read for an empty sentence."""
        super().__init__(**kwargs)
        self.architecture = architecture
        self.hidden_size, self.halves, self.empty, self.vocab_size = hidden_size, halves, empty, vocab_size


class DipoleSentenceModel(PreTrainedModel):
    """Gives the sentence's vector as the state of a single token, (B, 1, width), for pooling by "cls"."""

    config_class = DipoleSentenceConfig
    base_model_prefix = "encoder"

    def __init__(self, config: DipoleSentenceConfig) -> None:
        super().__init__(config)
        self.encoder: Any = from_architecture(config.architecture) if config.architecture else nn.Identity()
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Weights come from the file; nothing is drawn."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **ignored: Any) -> BaseModelOutput:
        """Encode padded token ids (B, T)."""
        ids = input_ids
        lengths = torch.full((len(ids),), ids.shape[1]) if attention_mask is None else attention_mask.sum(1).cpu()
        if not ids.shape[1] or bool((lengths == 0).any()):
            ids = nn.functional.pad(ids, (0, 1)) if not ids.shape[1] else ids.clone()
            ids[(lengths == 0).to(ids.device), 0] = self.config.empty
            lengths = lengths.clamp_min(1)
        lengths, falling = lengths.sort(descending=True, stable=True)
        chunk = Chunk(ids[falling.to(ids.device)][:, : int(lengths[0])], lengths)
        vectors = self.encoder.represent(Batch([chunk], falling.argsort().to(ids.device)))
        if self.config.halves:
            parts = vectors.view(len(vectors), self.config.halves, -1)
            vectors = nn.functional.normalize(parts, dim=2).view_as(vectors)
        return BaseModelOutput(last_hidden_state=vectors[:, None])


AutoConfig.register(DipoleSentenceConfig.model_type, DipoleSentenceConfig, exist_ok=True)
AutoModel.register(DipoleSentenceConfig, DipoleSentenceModel, exist_ok=True)


def fast_tokenizer(tokens: Tokens, max_length: int | None) -> PreTrainedTokenizerFast:
    """The tokenizer as transformers loads it; padding is masked, so the unknown word may stand for it."""
    found = {name: next((t for t in tries if t in tokens.index), None) for name, tries in {
        "unk_token": ("<unk>", "[UNK]"), "pad_token": ("[PAD]", "<pad>", "<unk>"),
        "cls_token": ("[CLS]", "<s>"), "sep_token": ("[SEP]", "</s>"), "mask_token": ("[MASK]", "<mask>"),
    }.items()}  # fmt: skip
    special = {name: token for name, token in found.items() if token is not None}
    limit = {"model_max_length": max_length} if max_length is not None else {}
    return PreTrainedTokenizerFast(tokenizer_object=tokens.tokenizer, padding_side="right", **special, **limit)


def export_sentence_transformer(encoder: SentenceEncoder, folder: Path) -> None:
    """Write a folder that `SentenceTransformer(folder)` loads, and check that it gives the same vectors.

    Raises:
        TrainingError: sentence-transformers is not installed, or the written folder gives other vectors.
    """
    try:
        from sentence_transformers import SentenceTransformer

        try:
            from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling
            from sentence_transformers.sentence_transformer.modules import Transformer as Hugging
        except ImportError:  # before 5.5
            from sentence_transformers.models import Dense, Normalize, Pooling  # type: ignore[no-redef]
            from sentence_transformers.models import Transformer as Hugging  # type: ignore[no-redef]
    except ImportError as error:
        raise TrainingError(
            "the export needs sentence-transformers; install it with: pip install 'dipole[sentence-transformers]'"
        ) from error

    model = projected(encoder)
    # Without [CLS] and [SEP] an empty sentence has no token at all, which only our own model knows how to read.
    closed = bool(encoder.tokens.tokenizer.num_special_tokens_to_add(False))
    last = model.f.part if isinstance(model.f, Projected) else model.f
    native = last if isinstance(last, Transformer) and model.g is None and closed else None
    with tempfile.TemporaryDirectory() as holder:
        hugging = _wrap(encoder, model) if native is None else native.model
        hugging.save_pretrained(holder)
        fast_tokenizer(encoder.tokens, encoder.max_length).save_pretrained(holder)
        first = Hugging(holder, max_seq_length=encoder.max_length) if encoder.max_length else Hugging(holder)
        pooling = Pooling(model.output_width, pooling_mode="cls" if native is None else native.pooling)
        extra: list[nn.Module] = []
        if native is not None and isinstance(model.f, Projected):
            dense = Dense(model.f.width, model.f.width, bias=False, activation_function=nn.Identity())
            dense.linear.weight = nn.Parameter(model.f.matrix.T.contiguous())
            extra.append(dense)
        if native is not None and encoder.normalize != "none":
            extra.append(Normalize())
        SentenceTransformer(modules=[first, pooling, *extra], device="cpu").save(str(folder))
    if native is None:
        (folder / LOADER).write_text(
            '"""Loads the encoder; needs the package dipole with its text extra."""\n\n'
            "from dipole.text.export import DipoleSentenceConfig, DipoleSentenceModel\n\n"
            '__all__ = ["DipoleSentenceConfig", "DipoleSentenceModel"]\n'
        )
    again = SentenceTransformer(str(folder), device="cpu").encode(PROBE)
    off = float(np.abs(again - encoder.encode(PROBE)).max())
    if not off < 1e-5:
        raise TrainingError(f"the exported folder {folder} gives vectors that differ by {off:.2g} from the run's")


def projected(encoder: SentenceEncoder) -> SentenceModel:
    """The encoder's model on the CPU, with its linear `transform` (CLLR's L) as a layer of f and of g."""
    model = encoder.model.cpu().eval()
    if encoder.transform is None:
        return model
    with torch.no_grad():
        unit = torch.eye(model.width)
        matrix = encoder.transform(unit)  # rows: images of the unit vectors
    if torch.equal(matrix, unit):
        return model
    g = None if model.g is None else Projected(model.g, matrix)
    return SentenceModel(Projected(model.f, matrix), g, model.dropout).eval()


def _wrap(encoder: SentenceEncoder, model: SentenceModel) -> DipoleSentenceModel:
    halves = {"halves": model.halves, "unit": 1, "none": 0}[encoder.normalize]
    config = DipoleSentenceConfig(
        architecture(model), model.output_width, halves, encoder.tokens.empty, len(encoder.tokens)
    )
    module = LOADER.removesuffix(".py")
    config.auto_map = {
        "AutoConfig": f"{module}.{DipoleSentenceConfig.__name__}",
        "AutoModel": f"{module}.{DipoleSentenceModel.__name__}",
    }
    wrapped = DipoleSentenceModel(config)
    wrapped.encoder.load_state_dict(model.state_dict())
    return wrapped.eval()
