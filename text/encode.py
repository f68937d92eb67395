"""Turn sentences into vectors with a trained encoder."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from dipole.core.objectives.spec import check_whole
from dipole.core.utils.errors import DataError, OptionError
from dipole.core.utils.freezing import in_mode
from dipole.core.utils.progress import Progress
from dipole.text.encoders.batch import TokenBatch, by_tokens, pad
from dipole.text.encoders.networks import SentenceModel

if TYPE_CHECKING:
    from dipole.text.vocabulary import Tokens

Normalize = Literal["halves", "unit", "none"]


class SentenceEncoder:
    """Turn sentences into vectors with a tokenizer and a model.

    Args:
        model: the encoders f and g.
        tokens: the tokenizer of their training.
        normalize: "halves" scales f(s) and g(s) to unit length each before they are joined (what the Quick-Thought
            evaluation does), "unit" the whole vector, "none" nothing.
        max_length: longer sentences are cut. None: no limit.
        transform: applied to f(s) and to g(s) before they are normalised, such as CLLR's L.
    """

    def __init__(
        self,
        model: SentenceModel,
        tokens: "Tokens",
        normalize: Normalize = "halves",
        max_length: int | None = None,
        transform: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.model, self.tokens, self.normalize, self.max_length = model, tokens, normalize, max_length
        self.transform = transform

    @property
    def width(self) -> int:
        """Length of the vectors."""
        return self.model.output_width

    def encode(
        self,
        sentences: str | Sequence[str],
        *,
        batch_tokens: int = 1024,
        output: Literal["numpy", "torch"] = "numpy",
        normalize: Normalize | None = None,
        progress: bool = False,
    ) -> Any:
        """Return vectors (n, width) in float32, in the order of the sentences. A single string gives (width,).

        Each distinct sentence is encoded once, in batches of similar length. An empty sentence is read as a full stop.

        Args:
            sentences: texts, or one text.
            batch_tokens: tokens of a batch at most, padding included, >= 1. Small batches are fastest on a CPU. Give a
                GPU 16,384 or more.
            output: "numpy" or "torch", on the model's device.
            normalize: as in the constructor, which is the default.
            progress: show how far it is.

        Raises:
            OptionError: another word for `output` or `normalize`, or `batch_tokens` below 1.
            DataError: a sentence is no text.
        """
        if isinstance(sentences, str):
            return self.encode([sentences], batch_tokens=batch_tokens, output=output, normalize=normalize)[0]
        if output not in ("numpy", "torch"):
            raise OptionError(f"output must be 'numpy' or 'torch', got {output!r}")
        how = normalize or self.normalize
        if how not in get_args(Normalize):
            raise OptionError(f"normalize must be 'halves', 'unit' or 'none', got {how!r}")
        check_whole("batch_tokens", batch_tokens)
        texts: list[Any] = list(sentences) if isinstance(sentences, Iterable) else [sentences]
        if wrong := [type(text).__name__ for text in texts if not isinstance(text, str)]:
            raise DataError(f"sentences must be strings, got {wrong[0]}")
        place = {text: number for number, text in enumerate(dict.fromkeys(texts))}
        found = self.encode_ids(self.tokens.encode(list(place), self.max_length), batch_tokens, progress)
        if len(place) < len(texts):
            found = found[torch.tensor([place[text] for text in texts])]
        if how != "none" and len(found):
            halves = {"halves": self.model.halves}.get(how, 1)
            found = torch.from_numpy(halves_normalised(found.cpu().numpy(), halves)).to(found.device)
        return found if output == "torch" else found.cpu().numpy()

    @torch.inference_mode()
    def encode_ids(
        self, ids: Sequence[Sequence[int] | np.ndarray], batch_tokens: int, progress: bool = False
    ) -> Tensor:
        """Return raw vectors (n, width) of sentences given as token ids.

        Args:
            ids: token ids (length,) of each sentence, one at least.
            batch_tokens: tokens of a batch at most, padding included, >= 1.
            progress: show how far it is.
        """
        device = next(self.model.parameters()).device
        out = torch.empty(len(ids), self.width, device=device)
        lengths = np.array([len(each) for each in ids], dtype=np.int64)
        bar = Progress(quiet=not progress)
        bar.start("encode (tokens)", int(lengths.sum()), 0)
        transform, done = self.transform or nn.Identity(), 0
        with in_mode(False, self.model), closing(bar):
            for group in by_tokens(lengths, batch_tokens):
                group = group[::-1].copy()  # longest first
                batch = TokenBatch([pad([ids[i] for i in group]).to(device)], torch.arange(len(group), device=device))
                sides = self.model(batch)[: self.model.halves]
                out[torch.from_numpy(group).to(device)] = torch.cat([transform(side.float()) for side in sides], 1)
                done += int(lengths[group].sum())
                bar.update(done)
            bar.close(done)
        return out


class Combined:
    """Several trained encoders, their vectors side by side: the authors' "combine" (uni and bi) and MC-QT models.

    Args:
        encoders: one at least.

    Raises:
        OptionError: there is no encoder.
    """

    def __init__(self, encoders: Sequence[SentenceEncoder]) -> None:
        if not encoders:
            raise OptionError("Combined needs one encoder at least, got none")
        self.encoders = list(encoders)

    @property
    def width(self) -> int:
        """Length of the vectors."""
        return sum(encoder.width for encoder in self.encoders)

    def encode(self, sentences: str | Sequence[str], **options: Any) -> Any:
        """Return vectors (n, width) in float32, those of the encoders side by side. A single string gives (width,).

        Args:
            sentences: texts, or one text.
            options: as in `SentenceEncoder.encode`, with its errors.
        """
        parts = [encoder.encode(sentences, **options) for encoder in self.encoders]
        return torch.cat(parts, -1) if options.get("output") == "torch" else np.concatenate(parts, -1)


def halves_normalised(features: np.ndarray, halves: int = 2) -> np.ndarray:
    """Scale each of `halves` equal parts of every row to unit length, (n, d). A zero part stays zero.

    Args:
        features: (n, d).
        halves: number of parts, >= 1.

    Raises:
        OptionError: `halves` does not divide d, or `features` are no matrix.
    """
    if features.ndim != 2 or halves < 1 or features.shape[1] % halves:
        raise OptionError(f"features {features.shape} cannot be cut into {halves} equal parts of each row")
    parts = features.reshape(len(features), halves, -1)
    norms = np.linalg.norm(parts, axis=2, keepdims=True)
    return (parts / np.where(norms > 0, norms, 1)).reshape(features.shape)
