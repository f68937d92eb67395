"""Exported encoders: sentence-transformers loads them with the same vectors, and MTEB runs on them."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from dipole.core.ground.errors import TrainingError
from dipole.text import encoders
from dipole.text.encode import SentenceEncoder
from dipole.text.vocabulary import load_tokens, words_vocabulary

sentence_transformers = pytest.importorskip("sentence_transformers")

from dipole.text.export import export_sentence_transformer  # noqa: E402

WORDS = ["the", "film", "was", "good", "bad", "very", ".", "boring", "great"]
TEXTS = ["the film was good .", "", "very very bad", "unheard of", "great", "the film was very very boring ."]


def word_encoder(kind, normalize="halves"):
    tokens = words_vocabulary(WORDS)
    torch.manual_seed(0)

    def side():
        if kind == "bow":
            return encoders.BagOfWords(encoders.trained_table(len(tokens), 6))
        if kind == "transformer":
            return encoders.small_transformer(len(tokens), 8, 1, 2, "mean")
        return encoders.WordGRU(encoders.trained_table(len(tokens), 6), 8, kind)

    return SentenceEncoder(encoders.SentenceModel(side(), side()), tokens, normalize)


@pytest.mark.parametrize(
    ("kind", "normalize"), [("bi", "halves"), ("uni", "none"), ("bow", "unit"), ("transformer", "halves")]
)
def test_the_same_vectors_come_back(tmp_path, kind, normalize):
    encoder = word_encoder(kind, normalize)
    export_sentence_transformer(encoder, tmp_path / "out")
    model = sentence_transformers.SentenceTransformer(str(tmp_path / "out"), device="cpu")
    assert model.encode(TEXTS) == pytest.approx(encoder.encode(TEXTS), abs=1e-5)
    assert model.encode(TEXTS, batch_size=1) == pytest.approx(encoder.encode(TEXTS), abs=1e-5)


@pytest.mark.parametrize("kind", ["bi", "bow"])
def test_the_learned_projection_goes_with_the_export(tmp_path, kind):
    encoder = word_encoder(kind)
    plain = encoder.encode(TEXTS)
    matrix = torch.randn(encoder.model.width, encoder.model.width)
    encoder.transform = lambda features: features @ matrix.T
    assert np.abs(encoder.encode(TEXTS) - plain).max() > 0.1
    export_sentence_transformer(encoder, tmp_path / "out")
    model = sentence_transformers.SentenceTransformer(str(tmp_path / "out"), device="cpu")
    assert model.encode(TEXTS) == pytest.approx(encoder.encode(TEXTS), abs=1e-5)


@pytest.mark.parametrize("kind", ["bi", "bow", "transformer"])
def test_a_process_that_never_imports_dipole_loads_the_folder(tmp_path, kind):
    encoder = word_encoder(kind)
    export_sentence_transformer(encoder, tmp_path / "out")
    np.save(tmp_path / "vectors.npy", encoder.encode(TEXTS))
    # The entry point as an installed package declares it; importlib.metadata finds it on the path.
    declared = tmp_path / "site/dipole_declared-1.dist-info"
    declared.mkdir(parents=True)
    (declared / "METADATA").write_text("Metadata-Version: 2.1\nName: dipole-declared\nVersion: 1\n")
    (declared / "entry_points.txt").write_text("[torch.backends]\ndipole = dipole.text.autoload:register\n")
    script = (
        "import numpy, sys\n"
        "from sentence_transformers import SentenceTransformer\n"
        f"model = SentenceTransformer({str(tmp_path / 'out')!r}, device='cpu')\n"
        f"print(abs(model.encode({TEXTS!r}) - numpy.load({str(tmp_path / 'vectors.npy')!r})).max())"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), *sys.path])}
    found = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert float(found.stdout) < 1e-5


def test_importing_torch_imports_nothing_of_ours_but_the_watch():
    script = (
        "import sys\n"
        "from dipole.text.autoload import register\n"
        "register()\n"
        "register()\n"
        "import torch\n"
        "assert sum('_Watch' in type(each).__name__ for each in sys.meta_path) == 1\n"
        "print(sorted(name for name in sys.modules if name.startswith(('dipole', 'transformers'))))"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "['dipole', 'dipole.text', 'dipole.text.autoload']"


@pytest.mark.parametrize("projected", [False, True])
def test_a_transformer_with_its_own_tokenizer_needs_nothing_of_ours(tmp_path, projected):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokens = load_tokens(tmp_path)
    assert tokens.encode(["the film was good ."], max_length=4) == [[2, 4, 5, 3]]
    model = encoders.SentenceModel(encoders.small_transformer(len(tokens), 8, 1, 2, "cls"), None)
    matrix = torch.randn(8, 8)
    transform = (lambda features: features @ matrix.T) if projected else None
    encoder = SentenceEncoder(model, tokens, "unit", max_length=64, transform=transform)
    export_sentence_transformer(encoder, tmp_path / "out")
    modules = json.loads((tmp_path / "out/modules.json").read_text())
    assert all(module["type"].startswith("sentence_transformers.") for module in modules)
    assert json.loads((tmp_path / "out/config.json").read_text())["model_type"] == "bert"
    again = sentence_transformers.SentenceTransformer(str(tmp_path / "out"), device="cpu")
    assert again.encode(TEXTS) == pytest.approx(encoder.encode(TEXTS), abs=1e-5)


def test_an_export_that_differs_is_refused(tmp_path, monkeypatch):
    encoder = word_encoder("bow")
    right = encoder.encode
    monkeypatch.setattr(encoder, "encode", lambda texts: right(texts) + 0.1)
    with pytest.raises(TrainingError, match=r"differ by 0\.1"):
        export_sentence_transformer(encoder, tmp_path / "out")


def test_mteb_runs_on_the_exported_folder(tmp_path):
    mteb = pytest.importorskip("mteb")
    datasets = pytest.importorskip("datasets")
    from mteb.abstasks.classification import AbsTaskClassification
    from mteb.abstasks.task_metadata import TaskMetadata

    class Films(AbsTaskClassification):
        metadata = TaskMetadata(
            name="TinyFilms",
            description="good or bad",
            reference=None,
            dataset={"path": "local/none", "revision": "1"},
            type="Classification",
            category="t2c",
            modalities=["text"],
            eval_splits=["test"],
            eval_langs=["eng-Latn"],
            main_score="accuracy",
            date=None,
            domains=None,
            task_subtypes=None,
            license=None,
            annotations_creators=None,
            dialect=None,
            sample_creation=None,
            bibtex_citation=None,
        )
        samples_per_label = 4
        n_experiments = 2

        def load_data(self, **ignored):
            rows = {"text": ["the film was good .", "great", "very good", "good film"] * 4, "label": [1] * 16}
            rows["text"] += ["the film was bad .", "boring", "very bad", "bad film"] * 4
            rows["label"] += [0] * 16
            part = datasets.Dataset.from_dict(rows)
            self.dataset = datasets.DatasetDict({"train": part, "test": part})
            self.data_loaded = True

    export_sentence_transformer(word_encoder("bow"), tmp_path / "out")
    model = sentence_transformers.SentenceTransformer(str(tmp_path / "out"), device="cpu")
    result = mteb.evaluate(model, Films(), cache=None, show_progress_bar=False)
    score = result.task_results[0].scores["test"][0]["main_score"]
    assert score > 0.8
