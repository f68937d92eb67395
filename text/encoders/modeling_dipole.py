"""A sentence encoder as a model of transformers, of the type "dipole_sentence".

An exported folder holds a copy of this file and of the two it imports, so that it loads without dipole:
`SentenceTransformer(folder, trust_remote_code=True)`.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from .batch import Chunk, TokenBatch
from .networks import from_architecture


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
        """Draw nothing, as all weights come from the file."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **ignored: Any) -> BaseModelOutput:
        """Encode padded token ids (B, T)."""
        ids = input_ids
        if attention_mask is None:
            attention_mask = torch.ones_like(ids)
        lengths = attention_mask.sum(1).cpu()
        if bool((lengths == 0).any()):
            ids = nn.functional.pad(ids, (0, 1))  # a copy, with a place for a token
            ids[(lengths == 0).to(ids.device), 0] = self.config.empty
            lengths = lengths.clamp_min(1)
        lengths, falling = lengths.sort(descending=True, stable=True)
        chunk = Chunk(ids[falling.to(ids.device)][:, : int(lengths[0])], lengths)
        vectors = self.encoder.represent(TokenBatch([chunk], falling.argsort().to(ids.device)))
        if self.config.halves:
            parts = vectors.view(len(vectors), self.config.halves, -1)
            vectors = nn.functional.normalize(parts, dim=2).view_as(vectors)
        return BaseModelOutput(last_hidden_state=vectors[:, None])
