"""Corpora: documents stay apart, damage is refused with the file's name, an interrupted encoding goes on."""

import gzip
import json
import multiprocessing
import random
import time

import numpy as np
import pytest

from dipole.core.utils.errors import DataError
from dipole.text import splitting
from dipole.text.corpus import Document, pydoc_documents, read_documents, split_sentences
from dipole.text.encoded import encode_documents
from dipole.text.filled_folder import building
from dipole.text.shards import Numbering
from dipole.text.vocabulary import build_vocabulary, expand, load_tokens, read_vectors, words_vocabulary


def test_sentences():
    text = 'Mr. Smith went to St. Ives. "Did he?" she asked. He\ndid!\n\nA new paragraph, e.g. this one'
    assert split_sentences(text) == [
        "Mr. Smith went to St. Ives.",
        '"Did he?"',
        "she asked.",
        "He did!",
        "A new paragraph, e.g. this one",
    ]
    assert split_sentences(" \n\n ") == []


def test_a_line_of_ten_megabytes_is_read():
    line = "word " * 2_000_000 + "end. Next one."
    found = split_sentences(line)
    assert sum(len(s.split()) for s in found) == 2_000_003
    assert found[-1] == "Next one."


def test_sentences_are_those_of_punkt() -> None:
    from nltk.tokenize.punkt import PunktParameters, PunktSentenceTokenizer

    parameters = PunktParameters()
    parameters.abbrev_types = set(splitting.ABBREVIATIONS.split())
    punkt = PunktSentenceTokenizer(parameters)
    parts = [
        "Mr",
        "word",
        "J",
        "U.S",
        "e.g",
        "No",
        "end",
        "3",
        "x-Dr",
        "it's",
        "\u00e9t\u00e9",
        "A",
        ".",
        ".",
        ".",
        "!",
        "?",
    ]
    parts += [
        ". ",
        "! ",
        "? ",
        ".. ",
        "... ",
        " ",
        " ",
        '"',
        "'",
        "(",
        ")",
        "\u201d",
        " -- ",
        ",",
        ";",
        ": ",
        ". . . ",
        "[1]",
    ]
    rng = random.Random(0)
    for _ in range(1000):
        text = " ".join("".join(rng.choices(parts, k=rng.randint(1, 25))).split())
        assert split_sentences(text) == punkt.tokenize(text), text


def test_the_embedded_corpus_is_prose_by_topic():
    documents = list(pydoc_documents())
    assert len(documents) > 50
    assert sum(len(d.sentences) for d in documents) > 2500
    text = " ".join(s for d in documents for s in d.sentences)
    assert "::=" not in text
    assert ">>>" not in text
    assert [d.name for d in documents] == [d.name for d in pydoc_documents()]


def test_files_are_documents(tmp_path):
    (tmp_path / "b.txt").write_text("One. Two.")
    (tmp_path / "a.txt").write_text("Three.\n\nFour.")
    (tmp_path / "empty.txt").write_text("")
    with pytest.warns(UserWarning, match=r"empty\.txt"):
        found = list(read_documents(str(tmp_path)))
    assert found == [Document("a", ["Three.", "Four."]), Document("b", ["One.", "Two."])]
    assert next(read_documents(str(tmp_path / "a.txt"), unit="sentences")).sentences == ["Three.", "Four."]


def test_rows_are_documents(tmp_path):
    rows = [{"id": "x", "sentences": ["One .", "Two ."]}, {"id": "y", "text": "Three. Four."}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with gzip.open(tmp_path / "packed.jsonl.gz", "wt") as file:
        file.write("\n".join(map(json.dumps, rows)))
    expected = [Document("x", ["One .", "Two ."]), Document("y", ["Three.", "Four."])]
    for name in ("rows.jsonl", "packed.jsonl.gz"):
        assert list(read_documents(str(tmp_path / name))) == expected
    assert list(read_documents(rows)) == expected
    assert next(read_documents(["One.", "Two."], unit="sentences")).sentences == ["One.", "Two."]


def test_parquet(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": ["One. Two.", "Three."]}).to_parquet(tmp_path / "rows.parquet")
    assert [d.sentences for d in read_documents(str(tmp_path / "rows.parquet"))] == [["One.", "Two."], ["Three."]]
    (tmp_path / "bad.parquet").write_bytes(b"no parquet at all")
    with pytest.raises(DataError, match=r"bad\.parquet"):
        list(read_documents(str(tmp_path / "bad.parquet")))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("latin.txt", "caf\xe9 noir".encode("latin-1"), r"latin\.txt is not utf-8: byte 3 is 0xe9"),
        ("empty.txt", b"", r"empty\.txt is empty"),
        ("blank.txt", b" \n\n\t\n", r"blank\.txt is empty: it holds no sentence"),
        ("blank.jsonl", b"\n\n", r"blank\.jsonl is empty"),
        ("cut.jsonl", b'{"text": "a"}\n{"text": "b', r"cut\.jsonl, line 2: not JSON"),
        ("other.jsonl", b'{"titel": "a"}', r"other\.jsonl, row 1: no column 'text'; it has titel"),
        ("number.jsonl", b'{"text": 3}', r"number\.jsonl, row 1: expected a text"),
        ("bad.jsonl.gz", bytes([*gzip.compress(b"x", mtime=0)[:10], 255, 255, 0, 0]), r"bad\.jsonl\.gz, after line 0"),
        ("cut.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 500, mtime=0)[:-20], r"cut\.jsonl\.gz"),
        ("a.jsonl", b'{"text": "A b. C d."}\n{"text": "half \\ud83d"}\n', r"line 2: half a surrogate pair is no text"),
        ("a.csv", b"text;label\nA b. C d.;1\n", r"line 1: one column, 'text;label': .* divided by ';'"),
        ("a.tsv", b"text,label\nA b. C d.,1\n", r"line 1: one column, 'text,label': .* divided by ','"),
    ],
)
def test_damage_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(read_documents(str(tmp_path / name)))


def test_another_encoding_may_be_said(tmp_path):
    (tmp_path / "latin.txt").write_bytes("caf\xe9 noir".encode("latin-1"))
    assert next(read_documents(str(tmp_path / "latin.txt"), encoding="latin-1")).sentences == ["caf\xe9 noir"]


def test_a_byte_order_mark_is_no_word(tmp_path):
    (tmp_path / "book.txt").write_bytes("\ufeffOne. Two.".encode())
    assert next(read_documents(str(tmp_path / "book.txt"))).sentences == ["One.", "Two."]


def test_nothing_there(tmp_path):
    with pytest.raises(DataError, match="no corpus at"):
        list(read_documents(str(tmp_path / "absent")))
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match=r"holds no \.txt"):
        list(read_documents(str(tmp_path / "folder")))
    with pytest.raises(DataError, match="no sentence"):
        encode_documents([], words_vocabulary(["a"]), 10)


DOCUMENTS = [Document(str(i), [f"w{i} w{i + 1} .", f"w{i}", "never seen before"][: 1 + i % 3]) for i in range(9)]


def test_encoded_sentences_keep_words_and_documents():
    tokens = words_vocabulary([f"w{i}" for i in range(12)])
    found = encode_documents(DOCUMENTS, tokens, max_length=2)
    assert len(found) == sum(len(d.sentences) for d in DOCUMENTS)
    assert [list(ids) for ids in found.ids([0, 1, 2])] == [[1, 2], [2, 3], [2]]
    assert found.document.tolist()[:6] == [0, 1, 1, 2, 2, 2]
    assert found.lengths.max() == 2


def test_shards_give_the_same_and_an_interrupted_call_goes_on(tmp_path, monkeypatch):
    tokens = words_vocabulary([f"w{i}" for i in range(12)])
    whole = encode_documents(DOCUMENTS, tokens, 5)

    def until(stop):
        for i, document in enumerate(DOCUMENTS):
            if i == stop:
                raise KeyboardInterrupt
            yield document

    with pytest.raises(KeyboardInterrupt):
        encode_documents(until(6), tokens, 5, tmp_path, size=40)
    shards = sorted((tmp_path / "parts").glob("*.npz"))
    assert len(shards) >= 2
    made, shard = [], Numbering.shard
    monkeypatch.setattr(Numbering, "shard", lambda self, task: made.append(task.number) or shard(self, task))
    again = encode_documents(until(99), tokens, 5, tmp_path, size=40)
    assert made
    assert not {int(path.stem) for path in shards} & set(made)  # a finished shard is never made again
    assert again.fingerprint == whole.fingerprint
    third = encode_documents(iter(()), tokens, 5, tmp_path, size=40)  # complete: nothing is read
    assert third.fingerprint == whole.fingerprint
    (tmp_path / "tokens.bin").write_bytes(b"broken")
    assert encode_documents(DOCUMENTS, tokens, 5, tmp_path, size=40).fingerprint == whole.fingerprint


def fill(folder, barrier, number):
    """One of several processes that meet at a cold cache; notes every document it reads."""
    tokens = words_vocabulary([f"w{i}" for i in range(12)])

    def read():
        for i, document in enumerate(DOCUMENTS):
            time.sleep(0.02)
            with (folder.parent / "read.txt").open("a") as notes:
                notes.write(f"{number} {i}\n")
            yield document

    barrier.wait(60)
    with building(folder):
        found = encode_documents(read(), tokens, 5, folder, size=40)
    (folder.parent / f"{number}.txt").write_text(found.fingerprint)


def test_two_processes_on_a_cold_cache_read_it_once_and_both_end_right(tmp_path):
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    folder = tmp_path / "cache"
    processes = [context.Process(target=fill, args=(folder, barrier, number)) for number in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    whole = encode_documents(DOCUMENTS, words_vocabulary([f"w{i}" for i in range(12)]), 5)
    assert [(tmp_path / f"{number}.txt").read_text() for number in range(2)] == [whole.fingerprint] * 2
    read = [line.split() for line in (tmp_path / "read.txt").read_text().splitlines()]
    assert [int(i) for _, i in read] == list(range(len(DOCUMENTS)))
    assert len({number for number, _ in read}) == 1
    assert {path.name for path in folder.iterdir() if path.name != ".lock"} == {
        "tokens.bin", "offsets.bin", "document.bin", "index.json"
    }  # fmt: skip


def test_a_cache_that_cannot_be_written_is_one_message(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be kept in"), building(tmp_path / "file" / "cache"):
        pass


def test_vocabulary_by_frequency():
    tokens = build_vocabulary(["b b b a a c", "c b A"], size=2)
    assert len(tokens) == 3
    assert tokens.encode(["b a c zz"])[0][0] == tokens.index["b"] != 0
    assert tokens.encode(["zz"]) == [[0]]
    assert len(build_vocabulary(["A a"], lower=True)) == 2
    assert build_vocabulary(["A a"]).encode(["A"]) != build_vocabulary(["A a"]).encode(["a"])


def test_treebank_words():
    tokens = words_vocabulary(["x"])
    split = tokens.tokenizer.pre_tokenizer.pre_tokenize_str
    assert [w for w, _ in split("I can't -- he's 1,000.5 self-made...")] == [
        "I", "ca", "n't", "--", "he", "'s", "1,000.5", "self-made", "..."
    ]  # fmt: skip
    assert [w for w, _ in split("ca n't `` it 's ''")] == ["ca", "n't", "``", "it", "'s", "''"]


def test_empty_sentences_become_a_full_stop():
    tokens = words_vocabulary(["a", "."])
    assert tokens.encode(["", "  ", "a"]) == [[2], [2], [1]]


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
    path.write_text("the 1 2 3\nodd 7 8\n")
    with pytest.raises(DataError, match="line 2: 2 numbers"):
        read_vectors(path)
    path.write_text("the 1 2 3\nodd 7 x 9\n")
    with pytest.raises(DataError, match="line 2: the vector of 'odd'"):
        read_vectors(path)
    with pytest.raises(DataError, match="cannot be read"):
        read_vectors(tmp_path / "absent.txt")


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


def test_a_full_cache_is_read_where_no_lock_can_be_taken(tmp_path):
    tokens = build_vocabulary(["a b", "c"])
    made = encode_documents([Document("one", ["a b", "c"])], tokens, 5, tmp_path)
    (tmp_path / ".lock").unlink(missing_ok=True)
    (tmp_path / ".lock").mkdir()
    with building(tmp_path):
        assert encode_documents([], tokens, 5, tmp_path).fingerprint == made.fingerprint
