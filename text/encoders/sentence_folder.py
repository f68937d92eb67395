"""A folder of sentence-transformers as an encoder: its transformer with the pooling and the layers behind it."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from tokenizers import normalizers
from torch import Tensor, nn

from dipole.core.utils.errors import ConfigError
from dipole.core.utils.pickles import UNASKED, allowed, read_pickle, refusal
from dipole.text.encoders.networks import POOLING, Pooled, Transformer
from dipole.text.vocabulary import Tokens, copied

NO_LIMIT = 1_000_000  # transformers writes a very large number where there is none
_MODEL_TYPES = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
_LEGACY = ("cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
_READ: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "Dense": lambda c: {
        "kind": "dense", "size": c["in_features"], "out": c["out_features"], "bias": c.get("bias", True),
        "activation": c.get("activation_function", "torch.nn.modules.activation.Tanh").rpartition(".")[2],
        "residual": c.get("use_residual", False),
    },
    "LayerNorm": lambda c: {"kind": "layer_norm", "size": c.get("dimension") or c["embedding_dimension"]},
    "Dropout": lambda c: {"kind": "dropout", "p": c.get("dropout", 0.0)},
    "Normalize": lambda c: {"kind": "normalize"},
}  # fmt: skip


def with_modules(part: Transformer, source: str | None, pooling: str = "mean") -> Pooled | Transformer:
    """Return the encoder with the modules behind the transformer of a sentence-transformers folder, or unchanged."""
    if source is None or not (modules := _modules(source)):
        return part
    modes = _modes(_config(source, modules[1][1]))
    if pooling not in ("mean", *modes):
        raise ConfigError(
            f"text.pooling = {pooling!r}, but the SentenceTransformer {source!r} pools by {' and '.join(modes)}: "
            "leave text.pooling out, or give the transformer alone."
        )
    layers = [_READ[kind](_config(source, path)) for kind, path in modules[2:]]
    unknown = [name for each in layers if not hasattr(nn, name := each.get("activation", "Identity"))]
    if unknown:
        raise ConfigError(f"text.transformer = {source!r}: the activation {unknown[0]} is none of torch.nn.")
    own = _json(source, "config_sentence_transformers.json")
    found = Pooled(part, modes, layers, own.get("similarity_fn_name") or "cosine")
    if width := own.get("truncate_dim"):
        found.remarks = (*found.remarks, f"text.transformer: truncate_dim {width} of the folder is not applied")
    for layer, (_, path) in zip(found.layers, modules[2:], strict=True):
        if any(True for _ in layer.parameters()):
            values = _weights(source, path)
            layer.load_state_dict({name.removeprefix("norm."): value for name, value in values.items()})
    return found


@dataclass(frozen=True)
class FolderSettings:
    """Settings of a sentence-transformers folder for the sentences that it encodes."""

    prompts: dict[str, str] = field(default_factory=dict)  # texts to put before a sentence, by name
    default_prompt: str | None = None  # name of the one that `encode` uses, or None
    max_length: int | None = None  # tokens of a sentence at most, if the folder names a limit
    lower: bool = False  # sentences are lower-cased

    def applied(self, tokens: Tokens) -> Tokens:
        """Return the tokenizer with the prompts, lower-casing if the folder does."""
        inner = copied(tokens.tokenizer, normalizers.Lowercase() if self.lower else None)
        return Tokens(inner, tokens.options, self.prompts, self.default_prompt)


def folder_settings(source: str | None) -> FolderSettings | None:
    """Read the settings of a sentence-transformers folder. None: of another library. Raise as `_modules` does."""
    if source is None or not _modules(source):
        return None
    own = _json(source, "config_sentence_transformers.json")
    names = (f"sentence_{kind}_config.json" for kind in _MODEL_TYPES)
    of_transformer = next(filter(None, (_json(source, name) for name in names)), {})
    limits = [of_transformer.get("max_seq_length"), _json(source, "tokenizer_config.json").get("model_max_length")]
    limit = next((int(each) for each in limits if each and each < NO_LIMIT), None)
    prompts = {name: text for name, text in (own.get("prompts") or {}).items() if text is not None}
    lower = bool(of_transformer.get("do_lower_case"))
    return FolderSettings(prompts, own.get("default_prompt_name"), limit, lower)


def _modules(source: str) -> list[tuple[str, str]]:
    """Return kind and folder of each module, none for a source of another library. Raise ConfigError for others."""
    told: Any = _json(source, "modules.json")
    modules = [(each["type"].rpartition(".")[2], each["path"]) for each in told]
    kinds = [kind for kind, _ in modules]
    if modules and (kinds[:2] != ["Transformer", "Pooling"] or not set(kinds[2:]) <= set(_READ)):
        raise ConfigError(
            f"text.transformer = {source!r} is a SentenceTransformer of {', '.join(kinds)}. dipole reads a "
            f"Transformer, its Pooling and then {', '.join(_READ)}. Load it with sentence-transformers and take "
            "dipole.text.ContrastiveLoss to train it."
        )
    if modules and modules[0][1]:
        raise ConfigError(
            f"text.transformer = {source!r} has its transformer in {modules[0][1]}, as old versions of "
            "sentence-transformers write it. Load it with SentenceTransformer and save it again."
        )
    return modules


def _json(source: str, name: str) -> dict[str, Any]:
    file = _file(source, name)
    return {} if file is None else json.loads(file.read_text(encoding="utf-8"))


def _file(source: str, name: str) -> Path | None:
    """Return the path of a file in a folder or a Hub repository. None if it is missing."""
    from transformers.utils import cached_file

    if Path(source).is_file():
        return None
    try:
        found = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
    except OSError:
        return None
    return None if found is None else Path(found)


def _config(source: str, path: str) -> dict[str, Any]:
    config = _json(source, f"{path}/config.json")
    inputs = {config.get("module_input_name"), config.get("module_output_name")} - {None, "sentence_embedding"}
    if inputs or config.get("include_prompt") is False:
        raise ConfigError(f"text.transformer = {source!r}: {path} reads or leaves out what is no whole sentence.")
    return config


def _modes(config: dict[str, Any]) -> tuple[str, ...]:
    given = config.get("pooling_mode")
    if given is None:
        given = [mode for mode, old in zip(POOLING, _LEGACY, strict=True) if config.get(f"pooling_mode_{old}")]
    if isinstance(given, str):
        return (given,)
    return tuple(given) or ("mean",)


def _weights(source: str, path: str) -> dict[str, Tensor]:
    if (found := _file(source, f"{path}/model.safetensors")) is not None:
        return load_file(found)
    if (found := _file(source, f"{path}/pytorch_model.bin")) is not None:
        if not allowed():
            raise ConfigError(f"text.transformer = {source!r}: {path}: {refusal(Path(source) / path) or UNASKED}.")
        return dict(read_pickle(found))
    raise ConfigError(f"text.transformer = {source!r}: {path} holds neither model.safetensors nor pytorch_model.bin.")
