"""From sentences to vectors by a function, a SentenceTransformer or a model of transformers."""

from collections.abc import Callable, Iterable, Sequence
from inspect import signature
from typing import Any, Literal, cast, get_args

import numpy as np
import torch
from torch import Tensor, nn

from dipole.core.evaluation.arrays import as_matrix, finite_rows
from dipole.core.objectives.similarity import full_precision
from dipole.core.utils.errors import DataError, OptionError
from dipole.core.utils.freezing import in_mode
from dipole.core.utils.text import counted
from dipole.text.senteval.torch_classifier import check_whole

Encode = Callable[[list[str]], Any]
Pooling = Literal["mean", "cls", "pooler"]
BATCH = 32  # sentences that a model sees at a time


def as_encode(encoder: Any, batch_size: int | None = None, tokenizer: Any = None, pooling: Pooling = "mean") -> Encode:
    """Return a function from sentences to vectors (n, d). Arguments are those of `evaluate`.

    Raise OptionError if the encoder is of another kind, an option is out of range, or there is no tokenizer.
    """
    if batch_size is not None:
        check_whole(batch_size, "batch_size", 1)
    method = getattr(encoder, "encode", None)
    # Texts and tokenizers have a method of this name too.
    is_other = isinstance(encoder, str | type) or hasattr(encoder, "convert_ids_to_tokens")
    if is_other or not (callable(method) or callable(encoder)):
        raise OptionError(
            f"the encoder must be a function from sentences to vectors (n, d), a SentenceTransformer or a model of "
            f"transformers, got {encoder!r:.60}"
        )
    if isinstance(encoder, nn.Module) and not callable(method):
        return _in_batches(_pooled_states(encoder, tokenizer, pooling), batch_size or BATCH)
    if tokenizer is not None or pooling != "mean":
        raise OptionError(f"tokenizer and pooling are of a model of transformers, and {type(encoder).__name__} is none")
    if not callable(method):
        return _in_batches(encoder, batch_size)
    known = signature(method).parameters
    given = {"batch_size": batch_size or BATCH, "show_progress_bar": False}
    options = {name: value for name, value in given.items() if name in known}
    if "batch_size" in options:
        return lambda sentences: method(sentences, **options)
    return _in_batches(lambda sentences: method(sentences, **options), batch_size)


def _in_batches(encode: Encode, size: int | None) -> Encode:
    if size is None:
        return encode

    def encode_all(sentences: list[str]) -> np.ndarray:
        batches = [sentences[start : start + size] for start in range(0, len(sentences), size)]
        return same_width([as_rows(encode(batch), len(batch), "encode") for batch in batches], "encode")

    return encode_all


def _pooled_states(model: nn.Module, tokenizer: Any, pooling: Pooling) -> Encode:
    config, base = getattr(model, "config", None), getattr(model, "base_model", None)
    if config is None or not isinstance(base, nn.Module):
        raise OptionError(
            f"{type(model).__name__} is no model of transformers and has no method `encode`: give a function from "
            "sentences to vectors (n, d)"
        )
    if pooling not in get_args(Pooling):
        raise OptionError(f"pooling must be one of {', '.join(get_args(Pooling))}, got {pooling!r}")
    from transformers import AutoTokenizer

    from dipole.core.utils.backbone import positions
    from dipole.text.model import is_first_token_blind  # it needs the packages of such models

    if getattr(config, "is_encoder_decoder", False):
        base = cast(Any, base).get_encoder()
    if pooling == "cls" and is_first_token_blind(base):
        raise OptionError(
            f"pooling='cls' takes the first token, which sees no other token in the causal model "
            f"{type(model).__name__}: sentences would have one vector. Take pooling='mean'"
        )
    name = getattr(model, "name_or_path", "")
    if tokenizer is None:
        try:
            tokenizer = AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError) as error:
            raise OptionError(
                f"no tokenizer is saved with {type(model).__name__} ({name or 'made in memory'}): give tokenizer=..."
            ) from error
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
    if not callable(tokenizer):
        raise OptionError(f"tokenizer must be one of transformers, such as AutoTokenizer gives, got {tokenizer!r}")
    if tokenizer.pad_token is None:
        raise OptionError("the tokenizer has no padding token: set tokenizer.pad_token = tokenizer.eos_token")
    limit = min(tokenizer.model_max_length, positions(base) or torch.inf)
    options: dict[str, Any] = {"padding": True, "padding_side": "right", "return_tensors": "pt"}
    if limit < 10**6:  # tokenizers without a limit say 10^30
        options |= {"truncation": True, "max_length": int(limit)}
    empty = ""
    if not tokenizer("")["input_ids"]:
        empty = "."

    @torch.inference_mode()
    def encode(sentences: list[str]) -> Tensor:
        tokens = tokenizer([sentence or empty for sentence in sentences], **options)
        tokens = tokens.to(next(model.parameters()).device)
        with in_mode(False, model):
            found = base(**tokens, return_dict=True)
        if pooling == "pooler":
            if getattr(found, "pooler_output", None) is None:
                raise OptionError(f"{type(model).__name__} has no pooler: take pooling='mean' or 'cls'")
            return found.pooler_output
        states = found.last_hidden_state.float()
        if pooling == "cls":
            return states[:, 0]
        mask = tokens["attention_mask"].unsqueeze(2)
        return (states * mask).sum(1) / mask.sum(1).clamp_min(1)

    return encode


def as_rows(value: Any, count: int, where: str) -> np.ndarray:
    """Return the vectors of `count` sentences, (n, d), finite, in float32 or float64. Raise DataError for others."""
    name = f"{where}: the vectors of {counted(count, 'sentence')}"
    if isinstance(value, Tensor):
        value = value.to_dense()
    elif hasattr(value, "toarray"):  # a sparse matrix of scipy
        value = value.toarray()
    found = full_precision(as_matrix(name, value, error=DataError))
    if len(found) != count:
        raise DataError(f"{name} have shape {tuple(found.shape)}: the encoder must return one each, (n, d).")
    return finite_rows(found, where, "vector").cpu().numpy()


def same_width(parts: Sequence[np.ndarray], where: str) -> np.ndarray:
    """One array of those of several batches."""
    widths = sorted({part.shape[1] for part in parts})
    if len(widths) > 1:
        raise DataError(f"{where}: the encoder returned vectors of {' and '.join(map(str, widths[:4]))} numbers")
    return np.concatenate(parts)


def task_names(tasks: Any) -> list[str]:
    """Names of tasks as a list, each once. Raise OptionError for anything else, and for none."""
    if isinstance(tasks, str):
        return [tasks]
    if isinstance(tasks, Iterable) and not isinstance(tasks, bytes):
        names = list(tasks)
        if isinstance(tasks, set | frozenset):
            names.sort(key=str)
        if names and all(isinstance(name, str) for name in names):
            return list(dict.fromkeys(names))
    raise OptionError(f"tasks must be names such as ['MR', 'CR'], got {str(tasks)[:60]!r}")
