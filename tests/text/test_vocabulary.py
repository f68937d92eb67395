"""Vocabularies, word vectors and their expansion."""

from itertools import pairwise

import numpy as np
import pytest

from dipole.core.utils.errors import DataError
from dipole.text.vocabulary import (
    EMPTY,
    build_vocabulary,
    expand,
    load_tokens,
    number_words,
    read_vectors,
    word_cutter,
    words_vocabulary,
)
from tests.text.odd_text import text_of

CUT = "I can't -- he's 1,000.5 self-made...", ["I", "ca", "n't", "--", "he", "'s", "1,000.5", "self-made", "..."]


def test_vocabulary_by_frequency():
    tokens = build_vocabulary(["b b b a a c", "c b A"], size=2)
    assert len(tokens) == 3
    assert tokens.encode(["b a c zz"])[0][0] == tokens.index["b"] != 0
    assert tokens.encode(["zz"]) == [[0]]
    assert len(build_vocabulary(["A a"], lower=True)) == 2
    assert build_vocabulary(["A a"]).encode(["A"]) != build_vocabulary(["A a"]).encode(["a"])
    assert words_vocabulary(["a", "."]).encode(["", "  ", "a"]) == [[2], [2], [1]]


@pytest.mark.parametrize(("text", "words"), [CUT, ("ca n't `` it 's ''", ["ca", "n't", "``", "it", "'s", "''"])])
def test_treebank_words(text, words):
    assert word_cutter()(text) == words


@pytest.mark.parametrize("lower", [False, True])
def test_words_are_numbered_as_the_tokenizer_cuts_them(lower):
    sentences = ["", *(" ".join(line.split()) for line in text_of(0, 3000).split("\n"))]
    numbers, lengths, words = number_words(sentences, lower)
    tokens = words_vocabulary([word for word in words if word != "<unk>"], lower)
    tokens.tokenizer.add_special_tokens(["<unk>"])
    ids = [tokens.empty if number == EMPTY else tokens.index[words[number]] for number in numbers]
    ends = np.cumsum(lengths).tolist()
    assert [ids[start:end] for start, end in pairwise([0, *ends])] == tokens.encode(sentences)


def test_saved_and_loaded(tmp_path):
    tokens = build_vocabulary(["some words of text ."])
    tokens.save(tmp_path / "tokenizer.json")
    again = load_tokens(tmp_path)
    assert again.encode(["words , text", ""]) == tokens.encode(["words , text", ""])
    assert again.fingerprint == tokens.fingerprint
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(DataError, match="no tokenizer at"):
        load_tokens(tmp_path / "bad.json")


def test_word_vectors(tmp_path):
    path = tmp_path / "glove.txt"
    path.write_text("the 1 2 3\n. . . 4 5 6\nodd 7 8 9\n", "utf-8")
    words, vectors = read_vectors(path)
    assert words == ["the", ". . .", "odd"]
    assert vectors.tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    path.write_text("2 3\nthe 1 2 3\nodd 7 8 9\n")
    assert read_vectors(path, {"odd"})[0] == ["odd"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("the 1 2 3\nodd 7 8\n", "line 2: 2 numbers"),
        ("the 1 2 3\nodd 7 x 9\n", "line 2: the vector of 'odd'"),
        (None, "cannot be read"),
    ],
)
def test_rejects_damaged_word_vectors(tmp_path, content, message):
    if content is not None:
        (tmp_path / "glove.txt").write_text(content)
    with pytest.raises(DataError, match=message):
        read_vectors(tmp_path / "glove.txt")


def test_expansion_is_the_linear_map_of_the_shared_words():
    draw = np.random.default_rng(0)
    vectors = draw.normal(size=(30, 4)).astype(np.float32)
    matrix, shift = draw.normal(size=(4, 6)), draw.normal(size=6)
    names = [f"w{i}" for i in range(28)] + ["a_phrase", "w0new"]
    index = {"<unk>": 0} | {f"w{i}": i + 1 for i in range(20)}
    table = np.zeros((21, 6), dtype=np.float32)
    table[1:] = vectors[:20] @ matrix + shift
    added, rows = expand(index, table, names, vectors)
    assert added == [f"w{i}" for i in range(20, 28)] + ["w0new"]
    assert rows == pytest.approx(vectors[[*range(20, 28), 29]] @ matrix + shift, abs=1e-4)
    with pytest.raises(DataError, match="no word of the vector file"):
        expand({"<unk>": 0, "other": 1}, table[:2], names, vectors)
