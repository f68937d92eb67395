"""Encoders against sentence-by-sentence references. Words, their numbers and their vectors."""

import gzip
import json
from itertools import pairwise

import numpy as np
import pytest
import torch

from dipole.core.utils.errors import ConfigError, DataError, OptionError
from dipole.text import vocabulary
from dipole.text.config import TextSettings
from dipole.text.encode import Combined, SentenceEncoder
from dipole.text.encoders import networks as encoders
from dipole.text.encoders.batch import by_tokens, make_batch
from dipole.text.model import build_transformer, frozen_table, small_transformer, trained_table
from dipole.text.vocabulary import counted_vocabulary, load_tokens, read_vectors, word_cutter, words_vocabulary
from tests.runs import refused
from tests.text.made import TINY_BERT, text_of


def sentences(n=23, seed=0):
    draw = np.random.default_rng(seed)
    return [draw.integers(1, 40, size=draw.integers(1, 12)).tolist() for _ in range(n)]


def gru(direction, table=None):
    return encoders.WordGRU(table or trained_table(40, 5), 6, direction)


def one_by_one(module, ids):
    """Reference: each sentence alone, no padding, no packing."""
    with torch.no_grad():
        out = []
        for sentence in ids:
            words = module.table(torch.tensor(sentence))[:, None]
            out.append(torch.cat([side[0] for unit in module.recurrent for side in unit(words)[1]]))
        return torch.stack(out)


@pytest.mark.parametrize("direction", ["uni", "bi", "combine"])
@pytest.mark.parametrize("chunks", [1, 4, 50])
def test_words_are_encoded_without_a_trace_of_padding_and_chunks(direction, chunks):
    module, ids = gru(direction), sentences()
    found, _ = encoders.SentenceModel(module, None)(make_batch(ids, chunks))
    assert found.shape == (23, 12 if direction == "combine" else 6)
    assert torch.allclose(found, one_by_one(module, ids), atol=1e-6)
    bag = encoders.BagOfWords(trained_table(40, 5))
    found, _ = encoders.SentenceModel(bag, None)(make_batch(ids, chunks))
    expected = torch.stack([bag.table(torch.tensor(sentence)).sum(0) for sentence in ids])
    assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_transformer_ignores_padding(pooling):
    module = small_transformer(40, 8, 1, 2, pooling).eval()
    ids = sentences(9)
    found, _ = encoders.SentenceModel(module, None)(make_batch(ids, 2))
    for row, sentence in zip(found, ids, strict=True):
        hidden = module.model(input_ids=torch.tensor([sentence])).last_hidden_state[0]
        assert torch.allclose(row, hidden.mean(0) if pooling == "mean" else hidden[0], atol=1e-5)


def test_gradients_do_not_depend_on_chunks():
    torch.manual_seed(0)
    ids, gradients = sentences(), []
    module = gru("bi")
    for chunks in (1, 5):
        module.zero_grad()
        f, _ = encoders.SentenceModel(module, None)(make_batch(ids, chunks))
        (f**3).sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in module.parameters()]))
    assert torch.allclose(gradients[0], gradients[1], atol=1e-5)


def test_f_and_g_share_nothing_but_fixed_vectors():
    vectors = torch.randn(40, 3)
    fixed = frozen_table(vectors, torch.arange(40) != 7)
    sides = [encoders.Channels([gru("uni", fixed), gru("uni")]) for _ in range(2)]
    model = encoders.SentenceModel(*sides)
    f, g = model(make_batch(sentences()))
    assert f.shape == (23, 12)
    assert model.output_width == 24
    assert not torch.allclose(f, g)
    (f * g).sum().backward()
    assert fixed.weight.grad is None
    assert torch.equal(fixed.weight[8], vectors[8])
    assert 0 <= float(fixed.weight[7].min()) <= float(fixed.weight[7].max()) < 1
    assert {id(p) for p in sides[0].parameters()} & {id(p) for p in sides[1].parameters()} == {id(fixed.weight)}


def test_dropout_is_one_mask_for_both_sides():
    model = encoders.SentenceModel(gru("uni"), gru("uni"), dropout=0.5)
    torch.manual_seed(1)
    f, g = model(make_batch(sentences()))
    assert torch.equal((f == 0).all(0), (g == 0).all(0))
    assert 0 < int((f == 0).all(0).sum()) < 6
    full, _ = model.eval()(make_batch(sentences()))
    assert int((full == 0).all(0).sum()) == 0


def test_token_groups_cover_everything_within_the_budget():
    lengths = [len(s) for s in sentences(200)]
    groups = list(by_tokens(lengths, 40))
    assert sorted(i for group in groups for i in group) == list(range(200))
    assert all(len(group) * max(lengths[i] for i in group) <= 40 or len(group) == 1 for group in groups)
    assert list(by_tokens([], 40)) == []
    assert [len(g) for g in by_tokens([100, 100], 40)] == [1, 1]


@pytest.fixture
def encoder():
    tokens = words_vocabulary(["a", "dog", "cat", "runs", "."])
    torch.manual_seed(0)
    sides = [encoders.WordGRU(trained_table(len(tokens), 5), 6, "bi") for _ in range(2)]
    return SentenceEncoder(encoders.SentenceModel(*sides), tokens)


TEXTS = ["a dog runs .", "", "cat", "a dog runs .", "unknown words", "a cat runs and runs and runs ."]


def test_encode_keeps_the_order_and_unit_halves_also_of_combined_encoders(encoder):
    found = encoder.encode(TEXTS)
    assert (found.shape, found.dtype) == ((6, 12), np.float32)
    assert found == pytest.approx(np.stack([encoder.encode(text) for text in TEXTS]), abs=1e-6)
    assert np.linalg.norm(found.reshape(6, 2, 6), axis=2) == pytest.approx(np.ones((6, 2)), abs=1e-5)
    assert found[1] == pytest.approx(encoder.encode("."), abs=1e-6)
    tensor = encoder.encode(TEXTS, output="torch", batch_tokens=1)
    assert torch.is_tensor(tensor)
    assert tensor.numpy() == pytest.approx(found, abs=1e-6)
    assert [encoder.encode(each).shape for each in ([], iter(["", " "]))] == [(0, 12), (2, 12)]
    refused(OptionError, "one encoder at least", Combined, [])
    both = Combined([encoder, encoder])
    assert both.encode(TEXTS) == pytest.approx(np.concatenate([encoder.encode(TEXTS)] * 2, 1))
    assert both.encode("cat", output="torch").shape == (24,)
    refused(ValueError, "hidden_size 5 cannot be halved", TextSettings, hidden_size=5)
    assert TextSettings(hidden_size=5, direction="uni").hidden_size == 5


def test_encode_normalises_transforms_and_shows_progress(encoder, capsys):
    raw = encoder.encode(TEXTS, normalize="none")
    unit = raw / np.linalg.norm(raw, axis=1, keepdims=True)
    assert encoder.encode(TEXTS, normalize="unit") == pytest.approx(unit, abs=1e-6)
    matrix = torch.randn(6, 6)
    encoder.transform = lambda side: side @ matrix
    sides = torch.tensor(raw).view(-1, 2, 6) @ matrix
    assert encoder.encode(TEXTS, normalize="none") == pytest.approx(sides.reshape(-1, 12).numpy(), abs=1e-5)
    for wrong, kind in ((["a", 3], "int"), ([None], "NoneType"), (None, "NoneType")):
        refused(DataError, f"must be strings, got {kind}", encoder.encode, wrong)
    refused(OptionError, "numpy", encoder.encode, ["a"], output="list")
    refused(OptionError, "batch_tokens must be .*'x'", encoder.encode, ["a"], batch_tokens="x")
    refused(OptionError, "'unit' or 'none', got 'l2'", encoder.encode, ["a"], normalize="l2")
    encoder.model.train()
    encoder.encode(["a"], progress=True)
    assert encoder.model.training


def test_transformers_that_cannot_be_loaded(tmp_path):
    config = TextSettings(encoder="transformer", transformer=str(tmp_path / "config.json"), pooling="cls")
    checkpoint = config.model_copy(update={"transformer": str(tmp_path / "checkpoint")})
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    refused(ConfigError, "cannot be loaded", build_transformer, config, 10)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "vocab_size": 12, **TINY_BERT}))
    module = build_transformer(config, 20)
    assert module.model.config.vocab_size == 20
    module.model.save_pretrained(tmp_path / "checkpoint")
    again = build_transformer(checkpoint, 20)
    assert torch.equal(again.model.embeddings.word_embeddings.weight, module.model.embeddings.word_embeddings.weight)
    refused(ConfigError, "knows 20 tokens", build_transformer, checkpoint, 21)


def test_vocabulary_by_frequency_of_treebank_words_is_saved_and_loaded(tmp_path):
    tokens = counted_vocabulary([("c", 2), ("b", 4), ("a", 2), ("A", 1)], 2)
    assert len(tokens) == 3
    assert tokens.encode(["b a c zz"])[0][0] == tokens.index["b"] != 0
    assert tokens.encode(["zz"]) == [[0]]
    cased = words_vocabulary(["A", "a"])
    assert cased.encode(["A"]) != cased.encode(["a"])
    assert words_vocabulary(["a", "."]).encode(["", "  ", "a"]) == [[2], [2], [1]]
    cut = word_cutter()("I can't -- he's 1,000.5 self-made...")
    assert cut == ["I", "ca", "n't", "--", "he", "'s", "1,000.5", "self-made", "..."]
    assert word_cutter()("ca n't `` it 's ''") == ["ca", "n't", "``", "it", "'s", "''"]
    tokens.save(tmp_path / "tokenizer.json")
    again = load_tokens(tmp_path)
    assert again.encode(["a , b", ""]) == tokens.encode(["a , b", ""])
    assert again.fingerprint == tokens.fingerprint
    (tmp_path / "bad.json").write_text("{}")
    refused(DataError, "no tokenizer at", load_tokens, tmp_path / "bad.json")


@pytest.mark.parametrize("lower", [False, True])
def test_words_are_numbered_as_the_tokenizer_cuts_them(lower):
    sentences = ["", *(" ".join(line.split()) for line in text_of(0, 3000).split("\n"))]
    numbers, lengths, words = vocabulary.number_words(sentences, lower)
    tokens = words_vocabulary([word for word in words if word != "<unk>"], lower)
    tokens.tokenizer.add_special_tokens(["<unk>"])
    ids = [tokens.empty if number == vocabulary.EMPTY else tokens.index[words[number]] for number in numbers]
    ends = np.cumsum(lengths).tolist()
    assert [ids[start:end] for start, end in pairwise([0, *ends])] == tokens.encode(sentences)


def test_word_vectors(tmp_path):
    path = tmp_path / "glove.txt"
    (tmp_path / "cc.vec.gz").write_bytes(gzip.compress(b"\xef\xbb\xbfthe 1 2 3\n. . . 4 5 6\nodd 7 8 9\n"))
    words, vectors = read_vectors(tmp_path / "cc.vec.gz")
    assert (words, vectors.tolist()) == (["the", ". . .", "odd"], [[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    path.write_text("2 3\nthe 1 2 3\nodd 7 8 9\n\n")
    assert read_vectors(path, {"odd"})[0] == ["odd"]
    wrong = "2: the vector of 'odd'"
    for line, message in (("odd 7 8", "2: 2 numbers .* Give text"), ("odd 7 x 9", wrong), ("odd 7 nan 9", wrong)):
        path.write_text(f"the 1 2 3\n{line}\n")
        refused(DataError, message, read_vectors, path)
    path.write_text("\u00b2 \u00b3\n")
    refused(DataError, "1: the vector of '\u00b2'", read_vectors, path)
    refused(DataError, "cannot be read", read_vectors, tmp_path / "absent.txt")


def test_expansion_is_the_linear_map_of_the_shared_words():
    draw = np.random.default_rng(0)
    vectors = draw.normal(size=(30, 4)).astype(np.float32)
    matrix, shift = draw.normal(size=(4, 6)), draw.normal(size=6)
    names = [f"w{i}" for i in range(28)] + ["a_phrase", "w0new"]
    index = {"<unk>": 0} | {f"w{i}": i + 1 for i in range(20)}
    table = np.zeros((21, 6), dtype=np.float32)
    table[1:] = vectors[:20] @ matrix + shift
    added, rows = vocabulary.expand(index, table, names, vectors)
    assert added == [f"w{i}" for i in range(20, 28)] + ["w0new"]
    assert rows == pytest.approx(vectors[[*range(20, 28), 29]] @ matrix + shift, abs=1e-4)
    other = {"<unk>": 0, "other": 1}
    refused(DataError, "no word of the vector file", vocabulary.expand, other, table[:2], names, vectors)
