"""Exported encoders: sentence-transformers loads them with the same vectors, and MTEB runs on them."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from dipole.core.train.card import public_name
from dipole.core.utils.errors import TrainingError
from dipole.text import encoders
from dipole.text.encode import SentenceEncoder
from dipole.text.model import small_transformer
from dipole.text.vocabulary import load_tokens

sentence_transformers = pytest.importorskip("sentence_transformers")

from dipole.text.export import export_as  # noqa: E402
from dipole.text.export.sentence_transformers import export_sentence_transformer  # noqa: E402
from dipole.text.exported import open_folder  # noqa: E402
from tests.text.made import CPU  # noqa: E402
from tests.text.test_using import ENCODERS, SENTENCES, make_encoder  # noqa: E402
from tests.text.tiny_sentences import Record  # noqa: E402
from tests.without_dipole import WITHOUT_DIPOLE  # noqa: E402


def word_encoder(kind, normalize="halves"):
    return make_encoder(kind, normalize, words=WORDS)


WORDS = ["the", "film", "was", "good", "bad", "very", ".", "boring", "great"]
TEXTS = ["the film was good .", "", "very very bad", "unheard of", "great", "the film was very very boring ."]


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


ALONE = (
    WITHOUT_DIPOLE
    + """
import numpy, torch
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoTokenizer
folders, texts, plain_folders, sentences = json.loads(sys.argv[1])
said = {}
for folder in folders:
    flag = {}
    try:
        model = SentenceTransformer(folder, device="cpu")
    except ValueError as error:
        said[folder], flag = str(error), {"trust_remote_code": True}
        model = SentenceTransformer(folder, device="cpu", **flag)
    model.save(folder + "-again")
    again = SentenceTransformer(folder + "-again", device="cpu", **flag)
    numpy.save(folder + ".npy", numpy.stack([model.encode(texts), again.encode(texts)]))
for folder, code, mean in plain_folders:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, **({"trust_remote_code": True} if code else {})).eval()
    batch = tokenizer(sentences, padding=True, return_tensors="pt")
    mask = batch["attention_mask"]
    with torch.no_grad():
        states = model(input_ids=batch["input_ids"], attention_mask=mask).last_hidden_state
    vectors = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True) if mean else states[:, 0]
    numpy.save(folder + ".npy", vectors.numpy())
assert not any(name.partition(".")[0] == "dipole" for name in sys.modules)
print("", json.dumps(said), sep="\\n")  # behind the question whether to run the code
"""
)


def own_tokenizer(tmp_path):
    """Subwords that close a sentence with [SEP], as BERT has them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    frame = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    tokenizer.post_processor = frame
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return load_tokens(tmp_path)


def test_a_process_without_dipole_loads_every_kind_of_folder(tmp_path):
    """With the library's own modules where they can say it, else with code of the folder, where that is allowed."""
    tokens = own_tokenizer(tmp_path)
    bert = SentenceEncoder(encoders.SentenceModel(small_transformer(len(tokens), 8, 1, 2, "cls"), None), tokens)
    code = {"gru": word_encoder("combine"), "halves": word_encoder("bow"), "sides": word_encoder("transformer")}
    plain = {"bert": bert, "unit": word_encoder("bow", "unit")}
    folders = {name: tmp_path / name for name in code | plain}
    for name, encoder in (code | plain).items():
        export_sentence_transformer(encoder, folders[name])
    made, sentences = {name: make() for name, make in ENCODERS.items()}, [text for text in SENTENCES if text]
    for name, encoder in made.items():
        (tmp_path / "transformers" / name).mkdir(parents=True)
        export_as("transformers", encoder, tmp_path / "transformers" / name, Record())
        assert any((tmp_path / "transformers" / name).glob("*.py")) == (name != "bert")
    assert json.loads((tmp_path / "transformers/bert/config.json").read_text())["model_type"] == "bert"
    others = [[str(tmp_path / "transformers" / name), name != "bert", name == "bert"] for name in made]
    given = json.dumps([[str(folder) for folder in folders.values()], TEXTS, others, sentences])
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    found = subprocess.run([sys.executable, "-c", ALONE, given], env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    for name, encoder in (code | plain).items():
        first, again = np.load(f"{folders[name]}.npy")
        assert first == pytest.approx(encoder.encode(TEXTS), abs=1e-6), name
        assert np.array_equal(first, again), name
    said = json.loads(found.stdout.splitlines()[-1])
    assert set(said) == {str(folders[name]) for name in code}
    assert all("trust_remote_code=True" in message for message in said.values())
    for name, encoder in made.items():
        wanted = encoder.encode(sentences, normalize="none" if name == "bert" else None)
        assert np.load(tmp_path / "transformers" / f"{name}.npy") == pytest.approx(wanted, abs=1e-6), name
        again = open_folder(tmp_path / "transformers" / name, CPU, None).vectors(sentences).numpy()
        assert again == pytest.approx(wanted, abs=1e-6), name


def test_a_bag_of_words_of_one_piece_is_written_with_the_librarys_own_modules(tmp_path):
    """Fixed beside trained words, projected; the mean of rows at unit length is their sum at unit length."""
    encoder = word_encoder("bow")
    side = encoders.Channels([encoder.model.f, encoder.model.g])
    matrix = torch.randn(12, 12)
    model = encoders.SentenceModel(side, None)
    encoder = SentenceEncoder(model, encoder.tokens, "halves", 4, transform=lambda x: x @ matrix.T)
    export_sentence_transformer(encoder, tmp_path / "out")
    modules = json.loads((tmp_path / "out/modules.json").read_text())
    assert [module["type"].rpartition(".")[2] for module in modules] == ["StaticEmbedding", "Normalize"]
    assert not list((tmp_path / "out").glob("*.py"))
    again = sentence_transformers.SentenceTransformer(str(tmp_path / "out"), device="cpu")
    for encode in (again.encode, again.encode_query, again.encode_document):  # each has a prompt of its own
        assert encode(TEXTS) == pytest.approx(encoder.encode(TEXTS), abs=1e-5)


@pytest.mark.parametrize("projected", [False, True])
def test_a_transformer_with_its_own_tokenizer_needs_nothing_of_ours(tmp_path, projected):
    tokens = own_tokenizer(tmp_path)
    assert tokens.encode(["the film was good ."], max_length=4) == [[2, 4, 5, 3]]
    model = encoders.SentenceModel(small_transformer(len(tokens), 8, 1, 2, "cls"), None)
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


UNKNOWN = (
    "reference", "date", "domains", "task_subtypes", "license", "annotations_creators", "dialect", "sample_creation",
    "bibtex_citation",
)  # fmt: skip


def test_mteb_runs_on_the_exported_folder(tmp_path):
    mteb = pytest.importorskip("mteb")
    datasets = pytest.importorskip("datasets")
    from mteb.abstasks.classification import AbsTaskClassification
    from mteb.abstasks.task_metadata import TaskMetadata

    class Films(AbsTaskClassification):
        metadata = TaskMetadata(
            name="TinyFilms", description="good or bad", dataset={"path": "local/none", "revision": "1"},
            type="Classification", category="t2c", modalities=["text"], eval_splits=["test"], eval_langs=["eng-Latn"],
            main_score="accuracy", **dict.fromkeys(UNKNOWN),
        )  # fmt: skip
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


@pytest.mark.parametrize(
    ("name", "shown"),
    [("/home/me/books", "books"), ("../books/", "books"), (r"C:\me\books.txt", "books.txt"), ("cifar10", "cifar10"),
     ("hub:org/books", "hub:org/books"), ("hub:/home/me/books", "books"), ("/", "unknown")],
)  # fmt: skip
def test_the_name_of_data_for_readers_elsewhere(name, shown):
    assert public_name({"name": name}) == shown
