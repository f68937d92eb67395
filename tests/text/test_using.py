"""A trained text model without its corpus: the folder of a run is self-contained, and so is what is written from it."""

import gzip
import json
import shutil
import warnings

import numpy as np
import pandas
import pyarrow.parquet
import pytest
import torch
from huggingface_hub import ModelCard

from dipole.core.cli import main
from dipole.core.train.exports import write_onnx
from dipole.core.train.inference import embed
from dipole.core.train.model import evaluate_run, load_run
from dipole.core.train.run_folder import RunFolder
from dipole.core.utils.errors import CheckpointError, ConfigError, DataError, DipoleError, OptionError, TrainingError
from dipole.text.embed import FunctionEmbedder, read_sentences, sentence_embedder
from dipole.text.encode import SentenceEncoder
from dipole.text.encoders import networks as encoders
from dipole.text.export import export_as
from dipole.text.exported import open_folder
from dipole.text.model import small_transformer, trained_table
from dipole.text.vocabulary import words_vocabulary
from tests.runs import Record, commanded, refused
from tests.text.made import CPU, write_bert, write_rows

WORDS = [f"word{i}" for i in range(24)]
SENTENCES = ["word1 word2 word3 .", "word9 unheard word4", "", "word23 word0 word7 word8 word11 ."]


def write_corpus(path, documents=6, seed=0):
    draw, rows = np.random.default_rng(seed), []
    for d in range(documents):
        words = WORDS[4 * d % 24 :][:8]
        rows.append({"id": f"{seed}-{d}", "sentences": [" ".join(draw.choice(words, size=4)) for _ in range(16)]})
    with path.open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_transformer(folder):
    """A small checkpoint of a BERT and its tokenizer, as transformers writes them."""
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    words_vocabulary(WORDS).save(write_bert(folder, **none) / "tokenizer.json")
    return folder


KINDS = {
    "gru": {"direction": "bi"},
    "fixed beside trained words, expanded": {
        "encoder": "bow", "channels": "both", "vectors": "vectors.txt", "expand": True, "hidden_size": None,
    },
    "a checkpoint and its tokenizer": {
        "encoder": "transformer", "transformer": "bert", "tokenizer": "bert", "sides": 1, "normalize": "unit",
        "hidden_size": None, "word_size": None,
    },
    "pairs of columns": {"pairs": "columns", "corpus": "pairs.jsonl", "encoder": "bow", "hidden_size": None},
}  # fmt: skip


def trained(folder, objective="infonce", **settings):
    """A run of two steps on files of its own, and its folder."""
    folder.mkdir(exist_ok=True)
    write_corpus(folder / "corpus.jsonl")
    vectors = np.random.default_rng(1).normal(size=(len(WORDS) + 2, 5))
    words = zip((*WORDS, "unheard", "expanded"), vectors, strict=True)
    rows = "".join(" ".join([word, *(f"{value:.4f}" for value in vector)]) + "\n" for word, vector in words)
    (folder / "vectors.txt").write_text(rows)
    if settings.get("transformer"):
        write_transformer(folder / "bert")
    values = {"corpus": "corpus.jsonl", "hidden_size": 8, "word_size": 6, "held_out": 0.25} | settings
    for key in ("corpus", "vectors", "transformer", "tokenizer"):
        if key in values:
            values[key] = str(folder / values[key])
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items() if value is not None]
    recipe = folder / "recipe.toml"
    recipe.write_text(
        f'name = "tiny"\ndomain = "text"\nobjective = "{objective}"\n[train]\nsteps = 2\nbatch_size = 24\n'
        "learning_rate = 0.05\n[text]\n" + "\n".join(lines) + "\n"
    )
    return commanded(recipe, folder / "runs")


def vectors(run):
    _, adapter, objective = load_run(RunFolder(run), "cpu")
    return adapter.encoder(objective).encode(SENTENCES)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_folder_needs_nothing_beside_itself(tmp_path, kind):
    there = tmp_path / "there"
    there.mkdir()
    rows = [(f"word{i % 24} word{i % 7} a", f"word{i % 24} b word{i % 5}", f"word{(i + 7) % 24} c") for i in range(60)]
    names = ("anchor", "positive", "negative")
    write_rows(there / "pairs.jsonl", [dict(zip(names, row, strict=True)) for row in rows])
    run = trained(there, objective="infonce + 0.1*cllr", **KINDS[kind])
    before = vectors(run)
    results = RunFolder(run).read_record().results
    write_corpus(there / "corpus.jsonl", documents=9, seed=7)  # another book
    assert np.array_equal(vectors(run), before)
    moved = tmp_path / "elsewhere"
    shutil.move(run, moved)
    shutil.rmtree(there)
    assert np.array_equal(vectors(moved), before)
    (tmp_path / "s.txt").write_text("\n".join(SENTENCES) + "\n")
    assert main(["embed", str(moved), str(tmp_path / "s.txt"), "-o", str(tmp_path / "f.npy"), "--quiet"]) == 0
    assert np.array_equal(np.load(tmp_path / "f.npy"), before)
    assert main(["export", str(moved), "--to", "transformers", "--out", str(tmp_path / "out")]) == 0
    record, found = evaluate_run(RunFolder(moved), "cpu")
    assert record.evaluations[-1].agrees
    assert found.results == results


def test_what_evaluation_needs_is_said_and_can_be_given(tmp_path):
    """Classifiers look at every sentence of the corpus, of which a run folder holds those of the probes."""
    run = trained(tmp_path / "there", classifiers=["mean"])
    corpus = tmp_path / "there" / "corpus.jsonl"
    content = corpus.read_text()
    corpus.unlink()
    with pytest.raises(DataError, match=r"(?s)corpus.jsonl.*model itself is complete.*--set KEY=PATH.*text\.corpus"):
        evaluate_run(RunFolder(run), "cpu")
    other = tmp_path / "other.jsonl"
    other.write_text(content)
    record, found = evaluate_run(RunFolder(run), "cpu", [f"text.corpus={other}"])
    assert found.results == record.results
    assert len(record.evaluations) == 1
    write_corpus(other, seed=3)
    record, found = evaluate_run(RunFolder(run), "cpu", [f"text.corpus={other}"])
    assert len(record.evaluations) == 1  # other data say nothing of this run
    refused(ConfigError, r"where data lie.*text\.corpus", load_run, RunFolder(run), "cpu", ["text.word_size=9"])


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A run that no test changes."""
    return trained(tmp_path_factory.mktemp("plain") / "there")


def test_damaged_models_and_formats_of_another_domain_are_refused(plain, tmp_path, capsys):
    run = shutil.copytree(plain, tmp_path / "run")
    kept = RunFolder(run).kept
    for name in ("tokenizer.json", "text.json", "probes.npz"):
        whole = (kept / name).read_bytes()
        (kept / name).write_bytes(whole[:20])
        refused(DipoleError, r"damaged|no tokenizer", evaluate_run, RunFolder(run), "cpu")
        (kept / name).write_bytes(whole)
    shutil.rmtree(kept)
    refused(CheckpointError, r"the model is incomplete: .*kept is missing\. Train again with", vectors, run)
    assert main(["export", str(plain), "--to", "timm"]) == 2
    assert "Formats: onnx, sentence-transformers, transformers." in capsys.readouterr().err
    assert main(["embed", str(tmp_path), "x.txt"]) == 2
    assert "neither the folder of a run" in capsys.readouterr().err


def test_sentences_are_read_from_every_kind_of_file(tmp_path):
    texts = ["one, two", 'a "quoted" one', "third"]
    table = pandas.DataFrame({"id": ["a", "b", "c"], "sentence": texts})
    (tmp_path / "s.txt").write_text("\n".join(texts))
    (tmp_path / "s.txt.gz").write_bytes(gzip.compress(("\r\n".join(texts) + "\r\n").encode()))
    table.to_csv(tmp_path / "s.csv", index=False)
    table.to_csv(tmp_path / "s.tsv", index=False, sep="\t")
    table.to_parquet(tmp_path / "s.parquet")
    table.to_json(tmp_path / "s.jsonl", orient="records", lines=True)
    (tmp_path / "s.json").write_text(json.dumps(texts))
    for name in ("s.txt", "s.txt.gz", "s.json"):
        assert list(read_sentences(str(tmp_path / name)).rows) == list(enumerate(texts))
    for name in ("s.csv", "s.tsv", "s.parquet", "s.jsonl"):
        assert list(read_sentences(str(tmp_path / name)).rows) == list(zip("abc", texts, strict=True))
        assert [text for _, text in read_sentences(str(tmp_path / name), "id").rows] == ["a", "b", "c"]
    (tmp_path / "s.txt").write_text("one\n\ntwo\n")
    assert list(read_sentences(str(tmp_path / "s.txt")).rows) == [(0, "one"), (1, ""), (2, "two")]


@pytest.mark.parametrize(("name", "content", "column", "message"), [
    ("a.pdf", b"%PDF", None, "no file of sentences"), ("a.txt", b"\xff\xfe\x00", None, "no text in UTF-8"),
    ("a.txt.gz", b"plain", None, "cannot be read"), ("a.jsonl", b'{"sentence": 1}\n', None, "holds int"),
    ("a.jsonl", b'{"words": "x"}\n', None, "it has words. Usual are sentence, text, content. Set --column"),
    ("a.csv", b"id,anchor,positive\n1,a,b\n", None, r"Set --column, such as --column anchor: one column at a time"),
    ("a.csv", b"x,y\n1,2\n", "z", "no column 'z'; it has x, y"),
])  # fmt: skip
def test_what_is_no_file_of_sentences_is_refused(tmp_path, name, content, column, message):
    (tmp_path / name).write_bytes(content)
    refused(DataError, message, lambda: list(read_sentences(str(tmp_path / name), column).rows))
    said = rf"a folder with these files of sentences: ({name}|none)\. Give one"
    refused(DataError, said, read_sentences, str(tmp_path))


def test_both_formats_hold_the_same_rows_and_nothing_of_inputs_that_end_in_an_error(tmp_path):
    rows = [{"id": f"s{i}", "text": f"word{i % 24} word{i % 5}"} for i in range(23)]
    given, encoder = write_rows(tmp_path / "s.jsonl", rows), make_encoder("bow")
    for suffix in ("npy", "parquet"):
        found = embed(sentence_embedder(encoder), given, tmp_path / f"o.{suffix}", batch_size=5, quiet=True)
        assert found == (23, encoder.width)
    array = np.load(tmp_path / "o.npy")
    assert array == pytest.approx(encoder.encode([row["text"] for row in rows]), abs=1e-6)
    table = pyarrow.parquet.read_table(tmp_path / "o.parquet")
    assert table["id"].to_pylist() == json.loads((tmp_path / "o.ids.json").read_text()) == [row["id"] for row in rows]
    assert str(table.schema.field("features").type) == f"fixed_size_list<element: float>[{encoder.width}]"
    assert np.array_equal(np.array(table["features"].to_pylist(), dtype=np.float32), array)
    (tmp_path / "s.txt").write_text("a\nb\nc\n")
    for value in (np.nan, -np.inf):
        encoder = FunctionEmbedder(lambda rows, value=value: [[1.0, value if row == "b" else 0.0] for row in rows])
        with pytest.warns(UserWarning, match="1 of 3 vectors are not finite"):
            embed(encoder, str(tmp_path / "s.txt"), tmp_path / "o.npy", batch_size=2, quiet=True)
    encoder, out = sentence_embedder(make_encoder("bow")), tmp_path / "out"
    out.mkdir()
    (tmp_path / "s.jsonl").write_text('{"text": "word1"}\n{"text": 3}\n')
    for suffix in ("npy", "parquet"):
        refused(DataError, "line 2", embed, encoder, given, out / f"o.{suffix}", batch_size=1, quiet=True)
    (tmp_path / "s.jsonl").write_text("")
    refused(DataError, "nothing to embed", embed, encoder, given, out / "o.npy", quiet=True)
    refused(OptionError, "batch-size", embed, encoder, given, out / "o.npy", batch_size=0)
    refused(OptionError, r"\.parquet, \.npy", embed, encoder, given, out / "o.txt")
    assert not list(out.iterdir())


def test_the_embedding_is_what_the_objective_sees(tmp_path):
    encoder = make_encoder("uni", transform=lambda z: 3 * z)
    raw = sentence_embedder(encoder, "embedding").vectors(SENTENCES).numpy()
    assert raw == pytest.approx(encoder.encode(SENTENCES, normalize="none"), abs=1e-6)
    assert np.linalg.norm(raw, axis=1) != pytest.approx(np.full(len(raw), 2**0.5), abs=1e-3)
    refused(OptionError, "Allowed: encoder, embedding", sentence_embedder, encoder, "head")


def make_encoder(kind, normalize="halves", transform=None, sides=2, words=WORDS):
    tokens = words_vocabulary(words)
    torch.manual_seed(0)

    def side():
        if kind == "bow":
            return encoders.BagOfWords(trained_table(len(tokens), 6))
        if kind in ("bert", "transformer"):
            return small_transformer(len(tokens), 8, 1, 2, "mean")
        return encoders.WordGRU(trained_table(len(tokens), 6), 8, kind)

    model = encoders.SentenceModel(side(), side() if sides == 2 else None)
    return SentenceEncoder(model, tokens, normalize, 512 if kind == "bert" else None, transform)


MATRIX = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
ENCODERS = {
    "gru": lambda: make_encoder("bi"), "three grus": lambda: make_encoder("combine", "unit", sides=1),
    "bow, not scaled": lambda: make_encoder("bow", "none"), "bert": lambda: make_encoder("bert", "unit", sides=1),
    "two berts": lambda: make_encoder("bert"), "projected": lambda: make_encoder("uni", transform=lambda z: z @ MATRIX),
}  # fmt: skip
TRACED = ("gru", "three grus", "projected")


@pytest.mark.parametrize("kind", [pytest.param(k, marks=[pytest.mark.slow][: k not in TRACED]) for k in ENCODERS])
def test_onnx_gives_the_same_vectors(tmp_path, kind):
    encoder = ENCODERS[kind]()
    with warnings.catch_warnings(action="error", category=UserWarning):
        export_as("onnx", encoder, tmp_path, Record())
    found = open_folder(tmp_path, CPU, None).vectors([*SENTENCES, *SENTENCES[:1]]).numpy()
    assert found == pytest.approx(encoder.encode([*SENTENCES, *SENTENCES[:1]]), abs=1e-5)


def test_a_network_without_onnx_prints_no_graph(tmp_path, capfd):
    bessel = torch.nn.Module()
    bessel.forward = lambda x: torch.special.bessel_j0(x)
    given = [{"x": torch.ones(3, 2)}], {"x": ["batch"]}
    refused(TrainingError, "cannot be written as ONNX", write_onnx, tmp_path, bessel, *given)
    assert "graph" not in capfd.readouterr().out


@pytest.mark.parametrize("to", ["sentence-transformers", "transformers", "onnx"])
def test_every_folder_has_a_card_that_the_hub_reads(tmp_path, to):
    export_as(to, make_encoder("uni"), tmp_path, Record())
    card = ModelCard.load(tmp_path / "README.md")
    assert (card.data.license, card.data.pipeline_tag) == ("unknown", "sentence-similarity")
    assert card.data.datasets == ["somebody/books"]
    assert {"dipole", "contrastive-learning"} <= set(card.data.tags)
    (result,) = card.data.eval_results
    assert (result.metric_name, result.metric_value, result.dataset_name) == ("next@1", 0.5, "hub:somebody/books")
    assert "0.1 x `dp`" in card.text
    assert "1 x `infonce`" in card.text
