"""Sentence encoders that `dipole export` wrote, and any of sentence-transformers, for `dipole embed`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch.nn.utils.rnn import pad_sequence

from dipole.core.train.exports import FILE, check_onnx, open_onnx
from dipole.core.train.inference import Embedder, chosen_features
from dipole.core.utils.backbone import open_exported, reads_images
from dipole.core.utils.errors import ConfigError, DataError, TrainingError
from dipole.core.utils.extras import needing
from dipole.core.utils.pickles import refusal
from dipole.core.utils.received import read_json
from dipole.text.encode import Normalize, SentenceEncoder
from dipole.text.encoders.networks import pooled

POOLED = "dipole_pooling"  # in the config.json of a plain transformer: how its run pools
BATCH = 32  # sentences at a time, of similar length
PROBE = ["A sentence.", "", "A somewhat longer sentence, to see whether padding is left out !", "unheardofword"]
LONG = 64  # words of a long sentence where nothing is cut


def open_folder(folder: Path, device: torch.device, features: str | None) -> Embedder | None:
    """Open a folder of a sentence encoder. Return None if it is none."""
    if (folder / "modules.json").is_file():
        encode, tokenizer = _sentence_transformer(folder, device)
    elif not (folder / "tokenizer.json").is_file():
        return None
    elif (folder / FILE).is_file():
        check_onnx()
        run = open_onnx(folder / FILE)
        encode, tokenizer = _tokenized(folder, lambda ids, mask: run({"input_ids": ids, "attention_mask": mask}))
    elif (folder / "config.json").is_file() and not reads_images(folder):
        encode, tokenizer = _tokenized(folder, _transformer(folder, device))
    else:
        return None
    from tokenizers import Tokenizer

    from dipole.text.embed import FunctionEmbedder
    from dipole.text.vocabulary import Tokens, copied

    chosen_features(features, ("encoder",))
    inner = getattr(tokenizer, "_tokenizer", tokenizer)
    if not isinstance(inner, Tokenizer):
        return FunctionEmbedder(encode)
    return FunctionEmbedder(encode, Tokens(copied(inner)))


def _sentence_transformer(folder: Path, device: torch.device) -> tuple[Any, Any]:
    import dipole.text.export  # noqa: F401  (makes models with our own code known)

    if refused := refusal(folder, deep=True):
        raise DataError(f"{folder} cannot be loaded: {refused}.")
    settings = folder / "config_sentence_transformers.json"
    if settings.is_file() and (kind := read_json(settings).get("model_type")) in ("CrossEncoder", "SparseEncoder"):
        raise ConfigError(f"{folder} is a {kind}. Load it with that class of sentence-transformers.")
    with needing("sentence-transformers", str(folder)):
        from sentence_transformers import SentenceTransformer
    try:
        model = SentenceTransformer(str(folder), device=str(device))
    except Exception as error:  # the library and what it is built on each raise their own
        raise DataError(f"{folder} cannot be loaded: {str(error).partition(chr(10))[0]}") from error
    return lambda sentences: model.encode(sentences, show_progress_bar=False), getattr(model, "tokenizer", None)


def _transformer(folder: Path, device: torch.device) -> Any:
    from dipole.text.export import DipoleSentenceModel

    model = open_exported(folder, device, "input_ids")

    @torch.no_grad()
    def read(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        states = model(input_ids=ids.to(device), attention_mask=mask.to(device)).last_hidden_state.cpu()
        mode = "cls" if isinstance(model, DipoleSentenceModel) else getattr(model.config, POOLED, "mean")
        return pooled(states, mask.bool(), mode)

    return read


def _tokenized(folder: Path, read: Any) -> tuple[Any, Any]:
    from transformers import AutoTokenizer

    from dipole.text.vocabulary import PROMPT

    tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    limit = tokenizer.model_max_length < 1_000_000  # a very large number means no limit
    prompt = tokenizer.init_kwargs.get(PROMPT, "")
    if prompt:
        _leave_prompt_out(tokenizer.backend_tokenizer, prompt)  # a normalizer adds none to an empty sentence
    # A sentence without a token is read as a full stop, as in `Tokens`. Metaspace would put a blank before it.
    empty = [tokenizer.get_vocab().get(".", tokenizer.unk_token_id or 0)]

    def encode(sentences: list[str]) -> torch.Tensor:
        order = sorted(range(len(sentences)), key=lambda i: len(sentences[i]))
        parts = []
        for start in range(0, len(order), BATCH):
            texts = [prompt + sentences[i] for i in order[start : start + BATCH]]
            ids = [torch.tensor(each or empty) for each in tokenizer(texts, truncation=limit)["input_ids"]]
            mask = pad_sequence([torch.ones_like(each) for each in ids], batch_first=True)
            parts.append(read(pad_sequence(ids, batch_first=True), mask))
        return torch.cat(parts)[torch.tensor(order).argsort()]

    return encode, tokenizer


def _leave_prompt_out(tokenizer: Any, prompt: str) -> None:
    """Take the normalizer that adds the prompt, which comes first, out of a tokenizer."""
    from tokenizers.normalizers import Prepend, Sequence

    own = tokenizer.normalizer
    parts = [*cast(Any, own)] if isinstance(own, Sequence) else [own]
    if parts and isinstance(parts[0], Prepend) and parts[0].prepend == prompt:
        tokenizer.normalizer = Sequence(parts[1:])


def check_vectors(
    encoder: SentenceEncoder, folder: Path, normalize: Normalize | None = None, most: float = 1e-5
) -> None:
    """Raise TrainingError if an exported folder gives other vectors than the run, also for a sentence that is cut."""
    words = [word for word in encoder.tokens.words() if word.isalpha()][:200] or ["word"]
    count = LONG + (encoder.max_length or LONG)
    texts = [*PROBE, " ".join(words[7 * i % len(words)] for i in range(count))]
    opened: Any = open_folder(folder, torch.device("cpu"), None)
    opened.tokens = None  # words of the check may be unknown
    wanted = torch.from_numpy(encoder.encode(texts, normalize=normalize))
    off = float((opened.vectors(texts) - wanted).abs().max() / wanted.abs().max().clamp_min(1))
    if not off < most:
        raise TrainingError(f"the exported folder would give vectors that differ by {off:.2g} from the run's.")
