"""A trained encoder as an ONNX file, from padded ids to the sentence's vector, with its tokenizer beside it."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dipole.core.train.card import Card, write_card
from dipole.core.train.onnx_file import FILE, OUTPUT, write_onnx
from dipole.core.utils.errors import ConfigError
from dipole.text.encode import SentenceEncoder
from dipole.text.encoders import BagOfWords, Channels, Part, Projected, SentenceModel, Transformer, WordGRU
from dipole.text.encoders.tail import Pooled, pooled
from dipole.text.portable import TASK, fast_tokenizer, parts_scaled, projected

AXES = ("batch", "length")


class PaddedSentences(nn.Module):
    """A sentence model on ids padded on the right: no packing and no sorting, which a graph cannot hold.

    Args:
        model: f and g. halves: parts of the vector that are scaled to unit length; 0 for none. empty: the id that a
            sentence without any token is read as.
    """

    def __init__(self, model: SentenceModel, halves: int, empty: int) -> None:
        super().__init__()
        self.sides = nn.ModuleList(map(_padded, model.sides()))
        self.halves, self.empty = halves, empty

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Ids and mask (B, T) -> vectors (B, width)."""
        first = torch.arange(input_ids.shape[1]) == 0
        nothing = (attention_mask.sum(1, keepdim=True) == 0) & first  # (B, T)
        ids = torch.where(nothing, self.empty, input_ids)
        mask = torch.where(nothing, 1, attention_mask)
        vectors = torch.cat([side(ids, mask) for side in self.sides], 1)
        if not self.halves:
            return vectors
        parts = vectors.unflatten(1, (self.halves, -1))
        return nn.functional.normalize(parts, dim=2).flatten(1)


def _padded(part: Part) -> nn.Module:
    """The part on ids and mask (B, T)."""
    match part:
        case BagOfWords():
            return _Sum(part)
        case WordGRU():
            return _Recurrent(part)
        case Channels():
            return _Beside([_padded(each) for each in part.parts])  # type: ignore[arg-type]
        case Projected():
            return _Mapped(_padded(part.part), part.matrix)
        case Transformer():
            return _Pooled(part)
        case Pooled():
            return _Behind(part)
    raise ConfigError(f"an encoder of the kind {type(part).__name__} cannot be exported to ONNX.")


class _Sum(nn.Module):
    def __init__(self, part: BagOfWords) -> None:
        super().__init__()
        self.table = part.table

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return (self.table(ids) * mask[..., None].to(self.table.weight.dtype)).sum(1)


class _Recurrent(nn.Module):
    """Every direction by itself: the one that reads backwards gets each sentence turned round."""

    def __init__(self, part: WordGRU) -> None:
        super().__init__()
        self.table = part.table
        self.turned = [bool(suffix) for gru in part.recurrent for suffix in _directions(gru)]
        self.grus = nn.ModuleList(_one_way(gru, suffix) for gru in part.recurrent for suffix in _directions(gru))

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        end = mask.sum(1, keepdim=True) - 1  # (B, 1)
        backwards = ids.gather(1, (end - torch.arange(ids.shape[1])).clamp_min(0))
        states = []
        for gru, turned in zip(self.grus, self.turned, strict=True):
            order = ids
            if turned:
                order = backwards
            found, _ = gru(self.table(order))  # (B, T, H)
            states.append(found.gather(1, end[..., None].expand(-1, -1, found.shape[2]))[:, 0])
        return torch.cat(states, 1)


def _directions(gru: Any) -> tuple[str, ...]:
    if gru.bidirectional:
        return ("", "_reverse")
    return ("",)


def _one_way(gru: Any, suffix: str) -> nn.GRU:
    one = nn.GRU(gru.input_size, gru.hidden_size, batch_first=True)
    names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
    one.load_state_dict({name: getattr(gru, f"{name}{suffix}") for name in names})
    return one


class _Beside(nn.Module):
    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return torch.cat([part(ids, mask) for part in self.parts], 1)


class _Mapped(nn.Module):
    def __init__(self, part: nn.Module, matrix: Tensor) -> None:
        super().__init__()
        self.part, self.matrix = part, nn.Parameter(matrix.detach().clone(), requires_grad=False)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.part(ids, mask) @ self.matrix


class _Pooled(nn.Module):
    def __init__(self, part: Transformer) -> None:
        super().__init__()
        self.model, self.pooling = part.model, part.pooling

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        hidden = self.model(input_ids=ids, attention_mask=mask).last_hidden_state
        if self.pooling == "cls":
            return hidden[:, 0]
        weight = mask[..., None].to(hidden.dtype)
        return (hidden * weight).sum(1) / weight.sum(1)


class _Behind(nn.Module):
    """Pooling and layers as sentence-transformers puts them behind a transformer."""

    def __init__(self, part: Pooled) -> None:
        super().__init__()
        self.model, self.pooling, self.layers = part.part.model, part.pooling, part.layers

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        hidden = self.model(input_ids=ids, attention_mask=mask).last_hidden_state
        found: Tensor = self.layers(torch.cat([pooled(hidden, mask.bool(), mode) for mode in self.pooling], 1))
        return found


def export(encoder: SentenceEncoder, folder: Path, record: Any) -> None:
    """Write model.onnx, the tokenizer and README.md. Check that onnxruntime gives the run's vectors.

    Raises:
        ConfigError: the encoder has a part that no graph is known for. TrainingError: see `write_onnx`.
    """
    model = projected(encoder)
    padded = PaddedSentences(model, parts_scaled(encoder, model), encoder.tokens.empty).eval()
    longest = encoder.max_length or 12
    tried = [_random(len(encoder.tokens), *shape) for shape in ((3, min(7, longest)), (1, 1), (5, min(12, longest)))]
    write_onnx(folder, padded, tried[0], {"input_ids": AXES, "attention_mask": AXES}, tried[1:])
    fast_tokenizer(encoder.tokens, encoder.max_length).save_pretrained(folder)
    usage = f"""
import onnxruntime
from transformers import AutoTokenizer

tokenizer, session = AutoTokenizer.from_pretrained("FOLDER"), onnxruntime.InferenceSession("FOLDER/{FILE}")
batch = tokenizer(["A sentence.", "Another one."], padding=True, return_tensors="np")
({OUTPUT},) = session.run(None, {{name: batch[name].astype("int64") for name in ("input_ids", "attention_mask")}})
"""
    card = Card("A sentence encoder as ONNX.", usage, TASK, "onnx", ("feature-extraction", "onnx"))
    write_card(folder, card, record, record.data)


def _random(words: int, count: int, length: int) -> dict[str, Tensor]:
    """Ids of sentences of all lengths up to `length`, padded, and their mask."""
    draw = torch.Generator().manual_seed(length)
    lengths = torch.arange(count) % length + 1
    lengths[0] = length
    mask = (torch.arange(length) < lengths[:, None]).long()
    return {"input_ids": torch.randint(words, (count, length), generator=draw) * mask, "attention_mask": mask}
