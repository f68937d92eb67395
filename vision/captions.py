"""Captions: the [vision.caption] table, tokens, and the text model of transformers."""

from collections.abc import Sequence
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from dipole.core.train.config import Settings
from dipole.core.train.finetuning import FREEZE_HELP, LORA_HELP, WEIGHTS_HELP, FreezeSetting, LoraTable, fine_tune
from dipole.core.utils import backbone
from dipole.core.utils.errors import ConfigError
from dipole.core.utils.freezing import fix_unused, in_mode, parameter_counts
from dipole.vision.encoders import EncoderConfig, build_projector
from dipole.vision.encoders.base import PREFIX

Pooling = Literal["mean", "cls", "last", "pooler"]
UNLIMITED = 1_000_000  # tokenizers without a limit have a larger number


class CaptionConfig(Settings):
    """The [vision.caption] table: the text model that reads the captions."""

    encoder: str = Field(description=f"{PREFIX}ID-or-folder of a text model of transformers with its tokenizer")
    pooling: Pooling | None = Field(
        None,
        description="mean of the tokens, cls (the first), last, or pooler (the architecture's own); default pooler for "
        "the text part of an image model (CLIP, SigLIP), else mean",
    )
    max_length: int | None = Field(None, ge=2, description="most tokens of a caption (default what the model reads)")
    freeze: FreezeSetting = Field("none", description=FREEZE_HELP)
    lora: LoraTable | None = Field(None, description=LORA_HELP)
    weights: backbone.Weights | None = Field(None, description=WEIGHTS_HELP)
    revision: str | None = Field(None, description="branch, tag or commit (default main)")
    prompt: str = Field("a photo of a {}.", description="caption of a class, for zero-shot classification")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.encoder.startswith(PREFIX) or self.encoder == PREFIX:
            raise ValueError(f"encoder must be {PREFIX}ID-or-folder, got {self.encoder!r}")
        if self.prompt.count("{}") != 1:
            raise ValueError(f"prompt must hold {{}} once, in place of the class name, got {self.prompt!r}")
        if self.revision is not None and self.source.path is not None:
            raise ValueError(f"revision: has no effect with a folder, {self.source.text!r}; it belongs to a Hub name")
        return self

    def determining(self) -> dict[str, Any]:
        """Identify a folder by its content, and a name on the Hub by the name and its revision."""
        found = super().determining()
        if content := self.source.content:
            found["encoder"] = [PREFIX + content, backbone.tokenizer_content(self.source)]
        return found

    @property
    def source(self) -> backbone.NetworkSource:
        """The location of the text model."""
        text = self.encoder.removeprefix(PREFIX)
        return backbone.NetworkSource(text, "vision.caption.encoder", self.weights, self.revision)


class CaptionBranch(nn.Module):
    """A text model and its projector, which is of the same kind as that of images (`heads`)."""

    def __init__(self, config: CaptionConfig, heads: EncoderConfig) -> None:
        super().__init__()
        source = config.source
        built = backbone.load(source, "input_ids")
        self.model: Any = built.model
        self.tokenizer = _tokenizer(source, self.model.config)
        self.limit = _limit(config, self.tokenizer, self.model)
        # SigLIP was trained on captions of one length and reads the last position.
        is_siglip = self.model.config.model_type.startswith("siglip")
        self._padding = "max_length" if is_siglip else "longest"
        features = self._inspect(config)
        fix_unused(self.model, features)
        fine_tune(self.model, config.freeze, config.lora, "vision.caption")
        self.projector, self.width = build_projector(heads, features.shape[1])
        self.remarks: tuple[str, ...] = tuple(built.remarks(source))
        sizes = {"max_length": self.limit, "width": features.shape[1], **parameter_counts(self.model)}
        self.described = {**built.described(source), "pooling": self.pooling, **sizes}

    def _inspect(self, config: CaptionConfig) -> Tensor:
        """Run one caption, choose the pooling and return the features."""
        ids = torch.zeros(1, 2, dtype=torch.long)
        try:
            with in_mode(False, self.model), torch.enable_grad():
                # Without a mask: models read its values, which meta tensors do not have.
                outputs = self.model(input_ids=ids)
                last = outputs.last_hidden_state
        except Exception as error:  # each architecture has its own
            reason = str(error).strip().partition("\n")[0]
            raise config.source.error(f"{type(self.model).__name__} gives no states of tokens ({reason})") from error
        if backbone.is_random(self.model, lambda: self.model(input_ids=ids).last_hidden_state):
            raise config.source.error(
                f"{type(self.model).__name__} is random in evaluation mode: one caption got two different vectors"
            )
        has_pooler = outputs.get("pooler_output") is not None
        if config.pooling == "pooler" and not has_pooler:
            raise ConfigError(
                f"vision.caption.pooling: {type(self.model).__name__} has no pooled output. Allowed: mean, cls, last."
            )
        of_images = hasattr(self.model.config, "projection_dim") or "siglip" in self.model.config.model_type
        default: Pooling = "pooler" if has_pooler and of_images else "mean"
        self.pooling: Pooling = config.pooling or default
        return pooled(last, outputs.get("pooler_output"), torch.ones_like(ids), self.pooling)

    def tokens(self, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return ids (B, T) of captions, each truncated to `limit` tokens, and a mask (B, T), 0 for padding."""
        found = self.tokenizer(
            list(captions), padding=self._padding, truncation=True, max_length=self.limit, return_tensors="pt"
        )
        ids = found["input_ids"]
        return ids, found.get("attention_mask", torch.ones_like(ids))

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        outputs = self.model(input_ids=ids, attention_mask=mask)
        return self.projector(pooled(outputs.last_hidden_state, outputs.get("pooler_output"), mask, self.pooling))


def pooled(hidden: Tensor, pooler: Tensor | None, mask: Tensor, pooling: Pooling) -> Tensor:
    """Pool states (b, T, d) of tokens with mask (b, T), padded on the right, to (b, d)."""
    if pooling == "pooler":
        assert pooler is not None
        return pooler
    if pooling == "cls":
        return hidden[:, 0]
    if pooling == "last":
        return hidden[torch.arange(len(hidden), device=hidden.device), mask.sum(1) - 1]
    weight = mask.to(hidden.dtype)
    return torch.bmm(weight[:, None], hidden)[:, 0] / weight.sum(1, keepdim=True)


def _tokenizer(source: backbone.NetworkSource, config: Any) -> Any:
    tokenizer = backbone.tokenizer(source)
    if len(tokenizer) > config.vocab_size:
        raise source.error(
            f"its tokenizer has {len(tokenizer)} tokens, {config.model_type} knows {config.vocab_size}. Give a model "
            "and a tokenizer that belong together"
        )
    tokenizer.padding_side = "right"
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise source.error("its tokenizer has no token to pad with (pad_token)")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _limit(config: CaptionConfig, tokenizer: Any, model: nn.Module) -> int:
    """Return the largest number of tokens of a caption."""
    known = [each for each in (tokenizer.model_max_length, backbone.positions(model)) if each and each < UNLIMITED]
    limit = min(known, default=512)
    if config.max_length is not None and known and config.max_length > limit:
        raise ConfigError(
            f"vision.caption.max_length: {config.max_length} tokens are more than {type(model).__name__} reads, "
            f"at most {limit}."
        )
    return config.max_length or limit
