"""Speed of training, encoding and probing text, compared with a plain way to do the same.

    python -m dipole.benchmarks.speed.text [--only gru-train gru-encode transformer-train transformer-encode probes]
        [--corpus FOLDER] [--senteval DATA] [--genuine CHECKOUT] [--tasks MR TREC] [--width 300]
        [--protocols fast senteval-sklearn senteval-torch] [--vectors random hashed svd] [--rounds 3] [--out FILE]

One thread, float32, processor time. Rounds of the subjects alternate. Medians are compared, of the probes the least
times. The plain loop pads every batch to its longest sentence, in the order of the text. The encoder of
sentence-transformers is the same transformer, exported. "probes" compares the protocols of the probes, and SentEval's
own classes (from a checkout, `--genuine`), on its data with its documented settings. Results are written as they are
found, into a file that may exist.
"""

import argparse
import contextlib
import inspect
import io
import sys
import tempfile
import time
import types
import warnings
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning

from dipole import Pairs, objective
from dipole.benchmarks.speed.timing import Results, interleaved
from dipole.text.corpus import documents_of, read_pieces
from dipole.text.encode import SentenceEncoder
from dipole.text.encoders.batch import TokenBatch, make_batch, pad
from dipole.text.encoders.networks import SentenceModel, WordGRU
from dipole.text.model import small_transformer, trained_table
from dipole.text.sentences import Cut, encode_pieces
from dipole.text.senteval.protocols import ProbeSettings, arranged, classify, pair_features
from dipole.text.senteval.tasks import load_task
from dipole.text.vocabulary import Tokens

BATCH = 400
PARTS = ("gru-train", "gru-encode", "transformer-train", "transformer-encode")


class PaddedGRU(torch.nn.Module):
    """The plain loop: a batch is padded to its longest sentence, and the final states are at the end of the tensor."""

    def __init__(self, gru: WordGRU) -> None:
        super().__init__()
        self.table, self.recurrent = gru.table, gru.recurrent[0]

    def forward(self, rows: Sequence[np.ndarray]) -> torch.Tensor:
        ids = torch.nn.utils.rnn.pad_sequence([torch.as_tensor(row, dtype=torch.long) for row in rows])
        return torch.cat(list(self.recurrent(self.table(ids))[1]), 1)


class Text:
    """Consecutive sentences of a corpus, and the encoders that are compared. Each part returns milliseconds."""

    def __init__(self, corpus: str, rounds: int) -> None:
        self.documents, self.rounds, self.texts = [], rounds, list[str]()
        for document in documents_of(read_pieces(corpus)):
            self.documents.append(document.sentences)
            self.texts += document.sentences
            if len(self.texts) > 20_000:
                break
        self.tokens, _ = encode_pieces(read_pieces(self.documents), Cut(30), vocabulary_size=20_000)

    def rows(self, count: int, tokens: Tokens, longest: int = 30) -> list[np.ndarray]:
        _, sentences = encode_pieces(read_pieces(self.documents), Cut(longest, tokens=tokens))
        return sentences.ids(np.arange(1000, 1000 + count))

    def gru(self) -> WordGRU:
        torch.manual_seed(0)
        return WordGRU(trained_table(len(self.tokens), 300).requires_grad_(False), 1200, "bi")

    def transformer(self) -> tuple[SentenceModel, Tokens]:
        """Return a BERT of 4 layers and width 256, with subwords trained on the text."""
        from tokenizers import BertWordPieceTokenizer

        tokenizer = BertWordPieceTokenizer(lowercase=False)
        tokenizer.train_from_iterator(self.texts, 20_000, show_progress=False)
        tokens = Tokens(tokenizer._tokenizer)
        torch.manual_seed(0)
        return SentenceModel(small_transformer(len(tokens), 256, 4, 4, "mean"), None), tokens

    def train(
        self, model: torch.nn.Module, padded: Callable[[], Any], chunked: Callable[[], Any]
    ) -> tuple[dict[str, float], int]:
        """Time forward, backward and Adam on 400 consecutive sentences."""
        loss, document = objective("quickthoughts"), torch.zeros(BATCH, dtype=torch.long)
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=5e-4, fused=True)

        def step(sides: Callable[[], Any]) -> None:
            loss(Pairs.from_window(*sides(), document, self_logit="zero")).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return interleaved({"dipole": lambda: step(chunked), "padded": lambda: step(padded)}, self.rounds), BATCH

    def gru_train(self) -> tuple[dict[str, float], int]:
        """Train f and g with 2 x 600 units on sentences of at most 30 words."""
        sides = [self.gru(), self.gru()]
        model, plain, rows = SentenceModel(*sides), list(map(PaddedGRU, sides)), self.rows(BATCH, self.tokens)
        return self.train(model, lambda: [side(rows) for side in plain], lambda: model(make_batch(rows, 4)))

    def gru_encode(self) -> tuple[dict[str, float], int]:
        """Encode 800 sentences with f alone."""
        side, rows = self.gru(), self.rows(2 * BATCH, self.tokens)
        plain, encoder = PaddedGRU(side), SentenceEncoder(SentenceModel(side, None), self.tokens)

        @torch.inference_mode()
        def padded() -> None:
            for start in range(0, len(rows), BATCH):
                plain(rows[start : start + BATCH])

        return interleaved({"dipole": lambda: encoder.encode_ids(rows, 4096), "padded": padded}, self.rounds), len(rows)

    def transformer_train(self) -> tuple[dict[str, float], int]:
        """Train on sentences of at most 32 subwords."""
        model, tokens = self.transformer()
        rows = self.rows(BATCH, tokens, 32)
        falling = pad(sorted(rows, key=len, reverse=True))

        def padded() -> Any:
            f, _ = model(TokenBatch([falling], torch.arange(BATCH)))
            return f, f

        return self.train(model, padded, lambda: model(make_batch(rows, 8)))

    def transformer_encode(self) -> tuple[dict[str, float], int]:
        """`encode` of 1,200 sentences against `SentenceTransformer.encode` (batch 32) of the exported model."""
        from sentence_transformers import SentenceTransformer

        from dipole.text.export.sentence_transformers import export_sentence_transformer

        model, tokens = self.transformer()
        encoder, texts = SentenceEncoder(model, tokens, normalize="unit", max_length=512), self.texts[1000:2200]
        with tempfile.TemporaryDirectory() as folder:
            export_sentence_transformer(encoder, Path(folder))
            other = SentenceTransformer(folder, device="cpu")
        subjects = {
            "dipole": lambda: encoder.encode(texts),
            "sentence-transformers": lambda: other.encode(texts, show_progress_bar=False),
        }
        return interleaved(subjects, self.rounds), len(texts)


def random_words(sentences: list[str], width: int) -> np.ndarray:
    table: dict[str, np.ndarray] = {}
    for word in {word for sentence in sentences for word in sentence.split() or ["."]}:
        table[word] = np.random.RandomState(zlib.crc32(word.encode())).randn(width).astype(np.float32)
    return np.stack([np.mean([table[w] for w in s.split() or ["."]], 0) for s in sentences])


def hashed_words(sentences: list[str], width: int) -> np.ndarray:
    """Return counts of hashed words, scaled to unit length."""
    from sklearn.feature_extraction.text import HashingVectorizer

    counts = HashingVectorizer(n_features=width, token_pattern=r"\S+").transform(sentences)
    return np.asarray(counts.toarray(), dtype=np.float32)


def svd_of_words(sentences: list[str], width: int) -> np.ndarray:
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfVectorizer

    weighed = TfidfVectorizer(sublinear_tf=True, token_pattern=r"\S+").fit_transform(sentences)
    return np.asarray(TruncatedSVD(width, n_iter=2, random_state=0).fit_transform(weighed), dtype=np.float32)


VECTORS = {"random": random_words, "hashed": hashed_words, "svd": svd_of_words}


def features(task: Any, splits: Any, kind: str, width: int) -> dict[str, np.ndarray]:
    sentences = sorted({" ".join(s) for split in splits.values() for side in split.sentences for s in side})
    vectors = dict(zip(sentences, VECTORS[kind](sentences, width), strict=True))
    found = {}
    for name, split in splits.items():
        sides = [np.stack([vectors[" ".join(s)] for s in side]) for side in split.sentences]
        found[name] = pair_features(*sides) if task.pairs else sides[0]
    return found


def probe(options: argparse.Namespace, task: Any, kind: str) -> dict[str, float]:
    """Return accuracy and least processor seconds of each protocol, and of SentEval's own classes."""
    splits = arranged(task, "fast")
    x = features(task, splits, kind, options.width)

    def accuracy(subject: str) -> float:
        if subject == "genuine":
            return run_genuine(load_genuine(options.genuine), task, splits, x, "senteval-torch" in options.protocols)
        return classify(task, splits, x, ProbeSettings(subject, 10)).test

    row: dict[str, float] = {}
    for subject in [*options.protocols, *["genuine"] * bool(options.genuine)] * options.rounds:
        start = time.process_time()
        row[f"{subject} acc"] = accuracy(subject)
        seconds = time.process_time() - start
        row[f"{subject} seconds"] = min(seconds, row.get(f"{subject} seconds", seconds))
    return row


def load_genuine(checkout: Path) -> types.ModuleType:
    """Import SentEval's classes. Its PyTorch classifier asks for CUDA and gets a `torch` that only uses the CPU."""
    sys.path.insert(0, str(checkout))
    inspect.getargspec = inspect.getfullargspec
    import senteval.tools.classifier as classifier
    import senteval.tools.validation as validation

    class Here(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    here = Here("torch")
    here.device = lambda name: torch.device("cpu")
    here.cuda = types.SimpleNamespace(manual_seed=lambda seed: None, FloatTensor=torch.FloatTensor)
    classifier.torch = here
    torch.nn.Module.cuda = lambda self, device=None: self
    torch.Tensor.cuda = lambda self, *a, **k: self
    return validation


def run_genuine(validation: Any, task: Any, splits: Any, x: dict[str, np.ndarray], torch_fits: bool) -> float:
    classifier = {"nhid": 0, "optim": "adam", "batch_size": 64, "tenacity": 5, "epoch_size": 4}
    config = {
        "nclasses": task.classes, "seed": 1111, "usepytorch": torch_fits, "classifier": classifier, "kfold": 10,
        "nhid": 0,
    }  # fmt: skip
    y = {name: np.array(split.labels) for name, split in splits.items()}
    with contextlib.redirect_stdout(io.StringIO()):
        if task.kind == "nested":
            return float(validation.InnerKFoldClassifier(x["all"], y["all"], config).run()[1])
        data = [{"X": x[name], "y": y[name]} for name in ("train", "test")]
        return float(validation.KFoldClassifier(*data, config).run()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=(*PARTS, "probes"), default=(*PARTS, "probes"))
    parser.add_argument("--corpus", default="pydoc", help="running text. The numbers in the docs are of novels")
    parser.add_argument("--senteval", type=Path, help="folder that holds downstream/. Without it there are no probes")
    parser.add_argument("--genuine", type=Path, help="checkout of SentEval, compared with the protocols")
    parser.add_argument("--tasks", nargs="+", default=["MR", "CR", "SUBJ", "MPQA", "TREC", "MRPC"])
    parser.add_argument("--protocols", nargs="+", default=["fast", "senteval-sklearn"])
    parser.add_argument("--vectors", nargs="+", choices=VECTORS, default=list(VECTORS), help="of the probes")
    parser.add_argument("--width", type=int, default=300, help="of the probed features")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = Results(options.out, {"torch": torch.__version__})
    if set(options.only) & set(PARTS):
        text = Text(options.corpus, options.rounds)
        for part in (part for part in PARTS if part in options.only):
            milliseconds, sentences = getattr(text, part.replace("-", "_"))()
            row = {name: 1e3 * sentences / value for name, value in milliseconds.items()}
            ours, other = row.values()
            results.add("sentences per second", part, row | {"ratio": ours / other})
    if "probes" in options.only and options.senteval:
        warnings.simplefilter("ignore", ConvergenceWarning)
        for name in options.tasks:
            for kind in options.vectors:
                row = probe(options, load_task(name, options.senteval), kind)
                results.add("probes", f"{name}, {kind}, d={options.width}", row)


if __name__ == "__main__":
    main()
