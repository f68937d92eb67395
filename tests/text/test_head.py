"""SimCSE's head: trained, then kept or dropped; and a transformer's own limit of tokens."""

import signal

import numpy as np
import pytest
import torch

from dipole.core.cli import main
from dipole.core.train.recipe import load
from dipole.core.train.run import train
from dipole.core.train.run_folder import RunFolder
from dipole.core.train.signals import RunInterruptedError
from dipole.core.train.trained_run import load_run
from dipole.core.utils.errors import CheckpointError
from dipole.text import senteval
from dipole.text.adapter import TextAdapter
from dipole.text.exported import open_folder
from dipole.text.model import limit_of
from dipole.text.vocabulary import words_vocabulary
from tests.text import test_using as using
from tests.text.made import write_bert, write_rows
from tests.text.test_using import CPU, SENTENCES, trained, vectors

BERT = {
    "encoder": "transformer", "transformer": "bert", "tokenizer": "bert", "sides": 1, "normalize": "none",
    "hidden_size": None, "word_size": None, "pooling": "cls",
}  # fmt: skip
FORMATS = ("sentence-transformers", "transformers", "onnx")


def states(adapter):
    """[CLS] of the sentences, by the transformer alone."""
    tokens = adapter.tokens.encode(SENTENCES, 50)
    model = adapter.module.f.part.model.eval()
    with torch.no_grad():
        return torch.cat([model(input_ids=torch.tensor([ids])).last_hidden_state[:, 0] for ids in tokens])


@pytest.mark.parametrize("head", [pytest.param("mlp", marks=pytest.mark.slow), "mlp_only_train"])
def test_the_head_is_trained_and_stays_only_where_it_should(tmp_path, head):
    run = trained(tmp_path / "there", head=head, **BERT)
    _, adapter, _ = load_run(RunFolder(run), "cpu")
    f = adapter.module.f
    assert f.linear.weight.shape == (8, 8)
    torch.manual_seed(0)
    fresh = torch.nn.Linear(8, 8).weight
    assert not torch.equal(f.linear.weight, fresh)
    plain = states(adapter)
    wanted = torch.tanh(plain @ f.linear.weight.T + f.linear.bias) if head == "mlp" else plain
    assert vectors(run) == pytest.approx(wanted.detach().numpy(), abs=1e-6)
    for to in FORMATS:
        assert main(["export", str(run), "--to", to, "--out", str(tmp_path / to)]) == 0
        found = open_folder(tmp_path / to, CPU, None).vectors(SENTENCES).numpy()
        assert found == pytest.approx(vectors(run), abs=1e-5), to


@pytest.mark.parametrize("pooling", ["cls", pytest.param("mean", marks=pytest.mark.slow)])
def test_adapters_are_merged_in_every_format(tmp_path, pooling):
    run = trained(tmp_path / "there", **BERT | {"pooling": pooling})
    recipe = tmp_path / "there" / "recipe.toml"
    recipe.write_text(recipe.read_text() + "lora = {rank = 2}\n")
    assert main(["train", str(recipe), "--runs", str(tmp_path / "runs"), "--quiet"]) == 0
    (adapted,) = (path for path in (tmp_path / "runs").iterdir() if path.is_dir())
    assert not np.allclose(vectors(adapted), vectors(run), atol=1e-4)
    for to in FORMATS:
        assert main(["export", str(adapted), "--to", to, "--out", str(tmp_path / to)]) == 0
        found = open_folder(tmp_path / to, CPU, None).vectors(SENTENCES).numpy()
        assert found == pytest.approx(vectors(adapted), abs=1e-5), to


def test_sentences_are_cut_where_the_positions_end(tmp_path):
    run = trained(tmp_path / "there", **BERT)
    assert limit_of(load_run(RunFolder(run), "cpu")[1].module) == 512
    shortened = torch.nn.Embedding(6, 8)
    holder = torch.nn.ModuleList([load_run(RunFolder(run), "cpu")[1].module])
    holder[0].f.model.embeddings.position_embeddings = shortened
    assert limit_of(holder) == 6


def test_long_sentences_end_where_the_positions_do(tmp_path, monkeypatch, capsys):
    def short(folder):
        words_vocabulary(using.WORDS).save(write_bert(folder, max_position_embeddings=128) / "tokenizer.json")
        return folder

    def long(number):
        return " ".join(using.WORDS[(number + i) % 24] for i in range(139))

    def longer_corpus(path):
        write_rows(path, [{"id": f"{d}", "sentences": [long(16 * d + i) for i in range(16)]} for d in range(6)])

    monkeypatch.setattr(using, "write_transformer", short)
    monkeypatch.setattr(using, "write_corpus", longer_corpus)
    note = "text.max_length 200: the transformer has 128 positions, longer sentences are cut there"
    run = trained(tmp_path / "there", max_length=200, **BERT)
    recipe = load(tmp_path / "there" / "recipe.toml", []).config
    train(recipe, tmp_path / "again", overwrite=True)
    assert capsys.readouterr().err.count(note) == 1
    with pytest.warns(UserWarning, match=note) as said:
        _, adapter, _ = load_run(RunFolder(run), "cpu")
    assert len(said) == 1
    encoder = adapter.encoder()
    with pytest.warns(UserWarning, match=note):
        assert main(["eval", str(run)]) == 0
    assert adapter.sentences.longest == 128
    head = " ".join(long(0).split()[:128])
    assert np.array_equal(*encoder.encode([long(0), head]))
    for to in FORMATS:
        assert main(["export", str(run), "--to", to, "--out", str(tmp_path / to)]) == 0
        found = open_folder(tmp_path / to, CPU, None).vectors([long(0), head]).numpy()
        assert found == pytest.approx(encoder.encode([long(0), head]), abs=1e-5), to
    probed = tmp_path / "downstream" / "CR"
    probed.mkdir(parents=True)
    for number, name in enumerate(("custrev.pos", "custrev.neg")):
        (probed / name).write_text("".join(long(20 * number + i) + "\n" for i in range(20)))
    result = senteval.evaluate(encoder.encode, ["CR"], tmp_path, kfold=2, halves=1, check=False, progress=False)
    assert 0 <= result["CR"]["acc"] <= 100


def test_a_run_does_not_go_on_with_another_corpus(tmp_path, monkeypatch):
    run = trained(tmp_path / "there")
    recipe, corpus = tmp_path / "there" / "recipe.toml", tmp_path / "there" / "corpus.jsonl"
    before, step = corpus.read_text(), TextAdapter.before_step

    def interrupted(self):
        step(self)
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(TextAdapter, "before_step", interrupted)
        with pytest.raises(RunInterruptedError):
            train(load(recipe, []).config, tmp_path / "runs", quiet=True)
    corpus.write_text(before.replace("word3 ", "word4 "))
    with pytest.raises(CheckpointError, match=r"have changed since its checkpoint.*--resume never"):
        train(load(recipe, []).config, tmp_path / "runs", quiet=True)
    corpus.write_text(before)
    assert train(load(recipe, []).config, tmp_path / "runs", quiet=True).results == RunFolder(run).read_record().results
