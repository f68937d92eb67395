"""Speed of training, encoding and probing text, beside a plain way to do the same.

    python -m dipole.benchmarks.speed.text [--only gru-train gru-encode transformer-train transformer-encode probes
        senteval]
        [--corpus FOLDER] [--senteval DATA] [--genuine CHECKOUT] [--tasks MR CR] [--torch-tasks TREC] [--width 300]
        [--vectors random hashed svd] [--share 1] [--rounds 3] [--out FILE]

One thread, float32, processor time. Rounds of the subjects alternate, and the medians are compared. The plain loop pads
every batch to its longest sentence, in the order of the text. The encoder of sentence-transformers is the same
transformer, exported. "probes" compares the probes with SentEval's own classes (from a checkout, `--genuine`), on its
data, with its documented settings: kfold 10, and for the PyTorch classifier nhid 0, adam, batch 64, tenacity 5, epoch
size 4. "senteval" compares `fast` with scikit-learn's fits of "senteval-sklearn" in one process. scikit-learn fits only
a `--share` of the outer folds, and its seconds are scaled up. Results are written as they are found, into a file that
may exist.
"""

import argparse
import contextlib
import io
import os
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

from dipole import Pairs, objective
from dipole.benchmarks.speed.timing import Results, interleaved
from dipole.text import encoders
from dipole.text.batching import make_batch, pad
from dipole.text.corpus import read_documents
from dipole.text.encode import SentenceEncoder, halves_normalised
from dipole.text.encoders import Batch
from dipole.text.sentences import Sentences, encode_documents
from dipole.text.senteval import protocols
from dipole.text.senteval.probe import classify, pair_features
from dipole.text.senteval.protocols import Settings, arranged
from dipole.text.senteval.tasks import load_task
from dipole.text.vocabulary import Tokens, build_vocabulary, load_tokens

BATCH = 400
PARTS = ("gru-train", "gru-encode", "transformer-train", "transformer-encode", "probes", "senteval")
PROBED = {"probes", "senteval"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument(
        "--corpus", default="pydoc", help="running text; the figures of the documentation are of novels"
    )
    parser.add_argument(
        "--senteval", type=Path, help="folder that holds downstream/; without it the probes are left out"
    )
    parser.add_argument("--genuine", type=Path, help="checkout of SentEval, compared with `fast` and `senteval-torch`")
    parser.add_argument("--tasks", nargs="*", default=["MR", "CR", "SUBJ", "MPQA"])
    parser.add_argument("--torch-tasks", nargs="*", default=["TREC", "MRPC"])
    parser.add_argument("--width", type=int, default=300, help="of the probed features")
    parser.add_argument("--halves", action="store_true", help="scale both halves of the probed features to unit length")
    parser.add_argument("--exact", action="store_true", help="also solve with scikit-learn in float64 to 1e-7 (long)")
    parser.add_argument("--vectors", nargs="+", choices=VECTORS, default=list(VECTORS), help="of the part senteval")
    parser.add_argument("--share", type=float, default=1.0, help="of the outer folds that scikit-learn fits")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = Results(arguments.out, {"torch": torch.__version__})
    if set(arguments.only) - PROBED:
        text = Text(arguments.corpus)
        for part in arguments.only:
            if part not in PROBED:
                found = getattr(text, part.replace("-", "_"))(arguments.rounds)
                results.add("speed", part, found | {"corpus": Path(arguments.corpus).name})
    if "probes" in arguments.only and arguments.senteval:
        probes(arguments, results)
    if "senteval" in arguments.only and arguments.senteval:
        against_scikit_learn(arguments, results)


def rates(milliseconds: dict[str, float], sentences: int) -> dict[str, float]:
    """Return sentences per second of each subject, and how many times as fast as the other dipole is."""
    ours, other = milliseconds.values()
    found = {name: 1e3 * sentences / value for name, value in milliseconds.items()}
    return found | {"ratio": other / ours}


class PaddedGRU(torch.nn.Module):
    """The plain loop: a batch is padded to its longest sentence, and the final states are at the end of the tensor."""

    def __init__(self, gru: encoders.WordGRU) -> None:
        super().__init__()
        self.table, self.recurrent = gru.table, gru.recurrent[0]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.cat(list(self.recurrent(self.table(ids).transpose(0, 1))[1]), 1)


class Text:
    """Consecutive sentences, and the encoders that are compared."""

    def __init__(self, corpus: str) -> None:
        documents = []
        for document in read_documents(corpus):
            documents.append(document)
            if sum(len(d.sentences) for d in documents) > 20_000:
                break
        self.texts = [s for d in documents for s in d.sentences]
        self.tokens = build_vocabulary(self.texts, 20_000)
        self.sentences = encode_documents(documents, self.tokens, 30)
        self.documents = documents

    def rows(self, start: int, count: int, sentences: Sentences | None = None) -> list[np.ndarray]:
        return (sentences or self.sentences).ids(np.arange(start, start + count))

    def gru(self) -> encoders.WordGRU:
        torch.manual_seed(0)
        table = encoders.trained_table(len(self.tokens), 300).requires_grad_(False)
        return encoders.WordGRU(table, 1200, "bi")

    def gru_train(self, rounds: int) -> dict[str, float]:
        """Forward, backward and Adam of f and g (2 x 600 units) on 400 consecutive sentences, words cut at 30."""
        sides = [self.gru(), self.gru()]
        model = encoders.SentenceModel(*sides)
        plain = [PaddedGRU(side) for side in sides]
        rows = self.rows(1000, BATCH)
        document = torch.zeros(BATCH, dtype=torch.long)

        def padded() -> Pairs:
            ids = whole(rows)
            return Pairs.from_window(plain[0](ids), plain[1](ids), document, self_logit="zero")

        def chunked() -> Pairs:
            return Pairs.from_window(*model(make_batch(rows, 4)), document, self_logit="zero")

        return self.train(model, padded, chunked, rounds)

    def train(
        self, model: torch.nn.Module, padded: Callable[[], Pairs], chunked: Callable[[], Pairs], rounds: int
    ) -> dict[str, float]:
        loss = objective("quickthoughts")
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=5e-4, fused=True)

        def step(pairs: Callable[[], Pairs]) -> None:
            loss(pairs()).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return rates(interleaved({"dipole": lambda: step(chunked), "padded": lambda: step(padded)}, rounds), BATCH)

    def gru_encode(self, rounds: int) -> dict[str, float]:
        """Encode 800 sentences with f alone, 400 per batch, against the padded loop."""
        side = self.gru()
        plain, encoder = PaddedGRU(side), SentenceEncoder(encoders.SentenceModel(side, None), self.tokens)
        rows = self.rows(1000, 2 * BATCH)

        @torch.inference_mode()
        def padded() -> None:
            for start in range(0, len(rows), BATCH):
                plain(whole(rows[start : start + BATCH]))

        subjects = {"dipole": lambda: encoder.encode_ids(rows, 4096), "padded": padded}
        return rates(interleaved(subjects, rounds), len(rows))

    def transformer(self) -> tuple[encoders.SentenceModel, Tokens]:
        """Return a BERT of 4 layers and width 256, with subwords trained on the text."""
        from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        tokenizer.train_from_iterator(
            self.texts, trainers.WordPieceTrainer(vocab_size=20_000, special_tokens=special, show_progress=False)
        )
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save(f"{folder}/tokenizer.json")
            tokens = load_tokens(folder)
        torch.manual_seed(0)
        model = encoders.small_transformer(len(tokens), 256, 4, 4, "mean")
        return encoders.SentenceModel(model, None), tokens

    def transformer_train(self, rounds: int) -> dict[str, float]:
        """Forward, backward and Adam on 400 consecutive sentences, 32 subwords."""
        model, tokens = self.transformer()
        rows = self.rows(1000, BATCH, encode_documents(self.documents, tokens, 32))
        document = torch.zeros(BATCH, dtype=torch.long)

        def padded() -> Pairs:
            f, _ = model(Batch([falling(rows)], torch.arange(BATCH)))
            return Pairs.from_window(f, f, document, self_logit="zero")

        def chunked() -> Pairs:
            return Pairs.from_window(*model(make_batch(rows, 8)), document, self_logit="zero")

        return self.train(model, padded, chunked, rounds)

    def transformer_encode(self, rounds: int) -> dict[str, float]:
        """`encode` of 1,200 sentences against `SentenceTransformer.encode` (batch 32) of the exported model."""
        from sentence_transformers import SentenceTransformer

        from dipole.text.export import export_sentence_transformer

        model, tokens = self.transformer()
        encoder = SentenceEncoder(model, tokens, normalize="unit", max_length=512)
        texts = self.texts[1000:2200]
        with tempfile.TemporaryDirectory() as folder:
            export_sentence_transformer(encoder, Path(folder))
            other = SentenceTransformer(folder, device="cpu")
        quiet = {"show_progress_bar": False}
        subjects = {
            "dipole": lambda: encoder.encode(texts),
            "sentence-transformers": lambda: other.encode(texts, **quiet),
        }
        return rates(interleaved(subjects, rounds), len(texts))


def whole(rows: Sequence[np.ndarray]) -> torch.Tensor:
    """Return all sentences padded to the longest, (B, T), in their order."""
    ids = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = row
    return torch.from_numpy(ids)


def falling(rows: Sequence[np.ndarray]) -> Any:
    """Return all sentences as one chunk, the longest first."""
    return pad(sorted(rows, key=len, reverse=True))


# Probes --------------------------------------------------------------------------------------------------------------


def features(task: Any, width: int, halves: bool) -> dict[str, np.ndarray]:
    """Return features of a task from means of random word vectors, which are seeded by the words."""
    splits, pairs = arranged(task, "fast"), task.pairs
    out = {}
    for name, split in splits.items():
        sides = [random_words([" ".join(s) for s in side], width) for side in split.sentences]
        sides = [halves_normalised(side) for side in sides] if halves else sides
        out[name] = pair_features(*sides) if pairs else sides[0]
    return out


def random_words(sentences: list[str], width: int) -> np.ndarray:
    """Return means of random word vectors, which are seeded by the words."""
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
    """Return the truncated SVD of TF-IDF."""
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfVectorizer

    weighed = TfidfVectorizer(sublinear_tf=True, token_pattern=r"\S+").fit_transform(sentences)
    return np.asarray(TruncatedSVD(width, n_iter=2, random_state=0).fit_transform(weighed), dtype=np.float32)


VECTORS = {"random": random_words, "hashed": hashed_words, "svd": svd_of_words}


def against_scikit_learn(arguments: argparse.Namespace, results: Results) -> None:
    """Measure processor seconds of `fast` and of scikit-learn's fits, the least of the rounds."""
    from sklearn.exceptions import ConvergenceWarning

    warnings.simplefilter("ignore", ConvergenceWarning)
    whole_task = protocols._nested
    for name in arguments.tasks:
        task = load_task(name, arguments.senteval)
        splits, pairs = arranged(task, "fast"), task.pairs
        sentences = sorted({" ".join(s) for split in splits.values() for side in split.sentences for s in side})
        for kind in arguments.vectors:
            vectors = dict(zip(sentences, VECTORS[kind](sentences, arguments.width), strict=True))
            x = {}
            for part, split in splits.items():
                sides = [np.stack([vectors[" ".join(s)] for s in side]) for side in split.sentences]
                x[part] = pair_features(*sides) if pairs else sides[0]
            row: dict[str, Any] = {"load": round(os.getloadavg()[0], 1)}
            for protocol, key in (("fast", ""), ("senteval-sklearn", "scikit-learn ")) * arguments.rounds:
                scale = 1.0
                if key and task.kind == "nested" and arguments.share < 1:
                    folds = max(1, round(10 * arguments.share))
                    scale = 10 / folds
                    protocols._nested = lambda *given, n=folds: whole_task(*given)[:n]
                start = time.process_time()
                probe = classify(task, splits, x, Settings(protocol, 10))
                seconds = round(scale * (time.process_time() - start), 2)
                protocols._nested = whole_task
                row[f"{key}seconds"] = min(seconds, row.get(f"{key}seconds", seconds))
                row |= {f"{key}acc": probe.test, f"{key}folds": len(probe.folds)}
                if not key:
                    first = probe.folds
                elif len(probe.folds) < len(first):
                    row["acc of those folds"] = round(float(np.mean(first[: len(probe.folds)])), 2)
            row["ratio"] = round(row["scikit-learn seconds"] / row["seconds"], 1)
            results.add("senteval", f"{name} fast against scikit-learn, {kind}, d={arguments.width}", row)


def probes(arguments: argparse.Namespace, results: Results) -> None:
    genuine = load_genuine(arguments.genuine) if arguments.genuine else None
    plan = [(task, "fast", False) for task in arguments.tasks]
    plan += [(task, "senteval-torch", True) for task in arguments.torch_tasks]
    for name, protocol, usepytorch in plan:
        task = load_task(name, arguments.senteval)
        splits = arranged(task, "fast")
        x = features(task, arguments.width, arguments.halves)
        start = time.process_time()
        probe = classify(task, splits, x, Settings(protocol, 10))
        row: dict[str, Any] = {"dev": probe.dev, "acc": probe.test, "seconds": round(time.process_time() - start, 2)}
        key = f"{name} {protocol} d={arguments.width}{' halves' if arguments.halves else ''}"
        results.add("probes", key, row)
        if genuine is not None:
            start = time.process_time()
            dev, acc = run_genuine(genuine, task, splits, x, usepytorch)
            row |= {"genuine dev": dev, "genuine acc": acc, "genuine seconds": round(time.process_time() - start, 2)}
            row["ratio"] = round(row["genuine seconds"] / row["seconds"], 1)
            results.add("probes", key, row)
        if arguments.exact and not usepytorch:
            row["exact acc"] = exact(task, splits, x)
            results.add("probes", key, row)


def exact(task: Any, splits: Any, x: dict[str, np.ndarray]) -> float:
    """Return the test accuracy of the same folds and grid with scikit-learn in float64, to tolerance 1e-7."""
    from unittest.mock import patch

    from sklearn.linear_model import LogisticRegression

    def converged(**options: Any) -> Any:
        return LogisticRegression(**options, tol=1e-7, max_iter=10_000)

    double = {name: value.astype(np.float64) for name, value in x.items()}
    with patch.object(protocols, "LogisticRegression", converged):
        return classify(task, splits, double, Settings("senteval-sklearn", 10)).test


def load_genuine(checkout: Path) -> types.ModuleType:
    """Import SentEval's classes. Its PyTorch classifier asks for CUDA and gets a `torch` that only uses the CPU."""
    sys.path.insert(0, str(checkout))
    import inspect

    inspect.getargspec = inspect.getfullargspec  # type: ignore[attr-defined]
    import senteval.tools.classifier as classifier
    import senteval.tools.validation as validation

    class Here(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    here = Here("torch")
    here.device = lambda name: torch.device("cpu")  # type: ignore[attr-defined]
    here.cuda = types.SimpleNamespace(manual_seed=lambda seed: None, FloatTensor=torch.FloatTensor)  # type: ignore[attr-defined]
    classifier.torch = here
    torch.nn.Module.cuda = lambda self, device=None: self  # type: ignore[method-assign, assignment]
    torch.Tensor.cuda = lambda self, *a, **k: self  # type: ignore[method-assign]
    return validation


def run_genuine(
    validation: Any, task: Any, splits: Any, x: dict[str, np.ndarray], usepytorch: bool
) -> tuple[float, float]:
    config = {
        "nclasses": task.classes,
        "seed": 1111,
        "usepytorch": usepytorch,
        "classifier": {"nhid": 0, "optim": "adam", "batch_size": 64, "tenacity": 5, "epoch_size": 4},
        "kfold": 10,
        "nhid": 0,
    }
    y = {name: np.array(split.labels) for name, split in splits.items()}
    with contextlib.redirect_stdout(io.StringIO()):
        if task.kind == "nested":
            result = validation.InnerKFoldClassifier(x["all"], y["all"], config).run()
        else:
            data = [{"X": x[name], "y": y[name]} for name in ("train", "test")]
            result = validation.KFoldClassifier(*data, config).run()
    return float(result[0]), float(result[1])


if __name__ == "__main__":
    main()
