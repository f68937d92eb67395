"""A trained encoder as an ONNX file, from padded ids to the sentence's vector, and its tokenizer."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dipole.core.train.exports import FILE, OUTPUT, TOLERANCE, Card, write_card, write_onnx
from dipole.core.utils.errors import ConfigError
from dipole.text.encode import SentenceEncoder
from dipole.text.encoders import networks
from dipole.text.export import TASK, fast_tokenizer, parts_scaled, projected, tokenizer_call
from dipole.text.exported import check_vectors

AXES = ("batch", "length")


class PaddedSentences(nn.Module):
    """A sentence model on ids padded on the right: no packing and no sorting, which a graph cannot hold.

    `halves` parts of the vector are scaled to unit length (0: none). A sentence without a token is read as `empty`.
    """

    def __init__(self, model: networks.SentenceModel, halves: int, empty: int) -> None:
        super().__init__()
        self.model, self.halves, self.empty = model, halves, empty
        parts: list[Any] = [part for part in model.modules() if isinstance(part, networks.WordGRU)]
        grus = (gru for part in parts for gru in part.recurrent)
        directions = ((gru, suffix) for gru in grus for suffix in ("", "_reverse")[: 1 + gru.bidirectional])
        self.one_way = nn.ModuleList(_one_way(gru, suffix) for gru, suffix in directions)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Ids and mask (B, T) -> vectors (B, width)."""
        first = torch.arange(input_ids.shape[1]) == 0
        nothing = (attention_mask.sum(1, keepdim=True) == 0) & first  # (B, T)
        ids = torch.where(nothing, self.empty, input_ids)
        mask = torch.where(nothing, 1, attention_mask)
        grus = iter(self.one_way)
        vectors = torch.cat([_vectors(side, ids, mask, grus) for side in self.model.sides()], 1)
        if not self.halves:
            return vectors
        parts = vectors.unflatten(1, (self.halves, -1))
        return nn.functional.normalize(parts, dim=2).flatten(1)


def _vectors(part: Any, ids: Tensor, mask: Tensor, grus: Iterator[nn.Module]) -> Tensor:
    """Compute a part on ids and mask (B, T). `grus` are those of all parts, each of one direction."""
    match part:
        case networks.BagOfWords():
            return (part.table(ids) * mask[..., None].to(part.table.weight.dtype)).sum(1)
        case networks.WordGRU():
            return _last_states(part, ids, mask, grus)
        case networks.Channels():
            return torch.cat([_vectors(each, ids, mask, grus) for each in part.parts], 1)
        case networks.Projected():
            return _vectors(part.part, ids, mask, grus) @ part.matrix
        case networks.Transformer():
            hidden = part.model(input_ids=ids, attention_mask=mask).last_hidden_state
            return networks.pooled(hidden, mask.bool(), part.pooling)
        case networks.Pooled():
            hidden = part.part.model(input_ids=ids, attention_mask=mask).last_hidden_state
            modes = [networks.pooled(hidden, mask.bool(), mode) for mode in part.pooling]
            found: Tensor = part.layers(torch.cat(modes, 1))
            return found
    raise ConfigError(f"an encoder of the kind {type(part).__name__} cannot be exported to ONNX.")


def _last_states(part: networks.WordGRU, ids: Tensor, mask: Tensor, grus: Iterator[nn.Module]) -> Tensor:
    """Read every direction by itself: the one that reads backwards gets each sentence turned round."""
    end = mask.sum(1, keepdim=True) - 1  # (B, 1)
    backwards = ids.gather(1, (end - torch.arange(ids.shape[1])).clamp_min(0))
    states = []
    recurrent: Any = part.recurrent
    for gru in recurrent:
        for order in (ids, backwards)[: 1 + gru.bidirectional]:
            found, _ = next(grus)(part.table(order))  # (B, T, H)
            states.append(found.gather(1, end[..., None].expand(-1, -1, found.shape[2]))[:, 0])
    return torch.cat(states, 1)


def _one_way(gru: Any, suffix: str) -> nn.GRU:
    one = nn.GRU(gru.input_size, gru.hidden_size, batch_first=True)
    names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
    one.load_state_dict({name: getattr(gru, f"{name}{suffix}") for name in names})
    return one


def export(encoder: SentenceEncoder, folder: Path, record: Any) -> None:
    """Write model.onnx, the tokenizer and README.md. Check that onnxruntime gives the run's vectors."""
    model = projected(encoder)
    padded = PaddedSentences(model, parts_scaled(encoder, model), encoder.tokens.empty).eval()
    longest = encoder.max_length or 12
    tried = [_random(len(encoder.tokens), *shape) for shape in ((3, min(7, longest)), (1, 1), (5, min(12, longest)))]
    write_onnx(folder, padded, tried, {"input_ids": AXES, "attention_mask": AXES})
    fast_tokenizer(encoder.tokens, encoder.max_length).save_pretrained(folder)
    check_vectors(encoder, folder, most=TOLERANCE)
    usage = f"""
import onnxruntime
from transformers import AutoTokenizer

tokenizer, session = AutoTokenizer.from_pretrained("FOLDER"), onnxruntime.InferenceSession("FOLDER/{FILE}")
batch = {tokenizer_call(encoder, "np")}
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
