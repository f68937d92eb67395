"""Exported encoders: sentence-transformers loads them with the same vectors, and MTEB runs on them."""

import json

import pytest
import torch

from dipole.core.errors import TrainingError
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


def test_a_transformer_with_its_own_tokenizer_needs_nothing_of_ours(tmp_path):
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
    encoder = SentenceEncoder(model, tokens, "unit", max_length=64)
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
