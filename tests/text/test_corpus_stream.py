"""Corpora as a stream: the same numbers as a plain reader's, whatever cuts, kills or damages come between."""

import gzip
import json
import os
import random
import shutil
import subprocess
import sys
import zipfile
from collections import Counter

import numpy as np
import pytest
import torch

from dipole.core.utils import cache
from dipole.core.utils.errors import ConfigError, DataError
from dipole.core.utils.seeding import Seeds
from dipole.text import corpus as reading
from dipole.text import splitting
from dipole.text.adapter import TextAdapter
from dipole.text.config import TextSettings
from dipole.text.corpus import Piece, read_documents, read_pieces
from dipole.text.corpus_place import place_of
from dipole.text.counting import Counts
from dipole.text.encoded import encode_pieces
from dipole.text.shards import Numbering
from dipole.text.vocabulary import build_vocabulary, word_cutter, words_vocabulary
from tests.systems import was_killed

WORDS = (
    "The the cat can't n't 1,000.5 <unk> <unk>a <UNK> -- ... self-made <unk><unk> . Mr. etc. end. Then? na\u00efve "
    "e\u0301 x\u00b2 \u65e5\u672c \u1112\u1161 \u03a3\u0391\u03a3 \u0130 \u2019s it\u2019s \u200b \u24b6 u\u0308. "
    "_a\u203fb \U0001f600 \ufb01"
)
ODD = WORDS.split()


def text_of(seed, words):
    draw = random.Random(seed)
    return "".join(draw.choice(ODD) + draw.choice([" ", " ", " ", "\n", ". ", "\n\n", "\n \n"]) for _ in range(words))


@pytest.fixture
def folder(tmp_path):
    """Four books of some thousand words, one of them packed."""
    books = tmp_path / "books"
    books.mkdir()
    for number in range(3):
        (books / f"{number}.txt").write_text(text_of(number, 3000), encoding="utf-8")
    with gzip.open(books / "3.txt.gz", "wt", encoding="utf-8") as file:
        file.write(text_of(3, 2000))
    return books


@pytest.fixture
def leaflets(tmp_path):
    pages = tmp_path / "pages"
    pages.mkdir()
    for number in range(4):
        (pages / f"{number}.txt").write_text(text_of(number, 100), encoding="utf-8")
    return pages


def plain(folder, size, max_length, lower=False, limit=None):
    """The plain reader: whole files, a loop over sentences, a counter, a sort."""
    files = sorted(folder.iterdir())
    texts = [gzip.decompress(f.read_bytes()).decode() if f.suffix == ".gz" else f.read_text("utf-8") for f in files]
    documents = [splitting.split_sentences(text) for text in texts]
    if limit is not None:
        flat = [(d, s) for d, sentences in enumerate(documents) for s in sentences][:limit]
        documents = [[s for owner, s in flat if owner == d] for d in range(len(documents))]
    cut = word_cutter(lower)
    counts = Counter(word for sentences in documents for sentence in sentences for word in cut(sentence))
    best = sorted(counts, key=lambda word: (-counts[word], word))[:size]
    index = {"<unk>": 0} | {word: number for number, word in enumerate(best, 1)}
    ids, owners = [], []
    for number, sentences in enumerate(documents):
        for sentence in sentences:
            found = []
            for place, part in enumerate(sentence.split("<unk>")):  # the sign of an unknown word is one
                found += [0] if place else []
                found += [index.get(word, 0) for word in cut(part)] if part else []
            ids.append(found[:max_length])
            owners.append(number)
    return index, ids, owners


def encoded(folder, place=None, processes=1, size=3000, limit=None, lower=False, unit="documents"):
    return encode_pieces(
        read_pieces(str(folder), unit=unit), Numbering(9, lower), vocabulary_size=20, limit=limit, folder=place,
        processes=processes, size=size,
    )  # fmt: skip


@pytest.mark.parametrize(("processes", "limit", "lower"), [(1, None, False), (3, None, True), (2, 500, False)])
def test_a_stream_gives_what_a_plain_loop_gives(folder, tmp_path, processes, limit, lower):
    index, ids, owners = plain(folder, 20, 9, lower, limit)
    for place in (None, tmp_path / "ids"):
        tokens, sentences = encoded(folder, place, processes, limit=limit, lower=lower)
        assert tokens.index == index
        assert [each.tolist() for each in sentences.ids(range(len(sentences)))] == ids
        assert sentences.document.tolist() == owners
    assert sentences.longest == 9
    assert sentences.unknown == sum(each.count(0) for each in ids)
    again, mapped = encode_pieces(iter(()), Numbering(9, lower), folder=place)  # full: nothing is read
    assert (again.fingerprint, mapped.fingerprint) == (tokens.fingerprint, sentences.fingerprint)


def test_the_vocabulary_is_the_one_of_the_tokenizers_library(folder):
    texts = [sentence for document in read_documents(str(folder)) for sentence in document.sentences]
    assert encoded(folder)[0].fingerprint == build_vocabulary(texts, 20).fingerprint


def test_counting_on_the_disk_is_exact(tmp_path):
    draw = random.Random(0)
    with Counts(tmp_path, most=10) as counts, Counts() as held:
        for _ in range(30):
            words = draw.sample([f"w{i}" for i in range(80)], 7)
            numbers = np.array([draw.randrange(5) for _ in words])
            counts.add(words, numbers)
            held.add(words, numbers)
        assert sorted(counts.items()) == sorted(held.items())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("alphabet", ["ab. \n", " \n", "a.\n\n b", "aaaaaaaab ", "a\t\x0b. \n\u2028\x1c"])
def test_sentences_of_a_stream_are_those_of_the_text(monkeypatch, alphabet):
    draw = random.Random(alphabet)
    monkeypatch.setattr(splitting, "PIECE", 40)
    for _ in range(200):
        monkeypatch.setattr(splitting, "BLOCK", draw.choice([1, 5, 30, 80, 200]))
        text = "".join(draw.choice(alphabet) for _ in range(draw.randrange(400)))
        cuts = sorted(draw.sample(range(len(text) + 1), min(len(text), draw.randrange(12))))
        chunks = [text[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)]
        found = [s for part in splitting.stretches(chunks) for s in splitting.split_sentences(part)]
        assert found == splitting.split_sentences(text)


def test_lines_of_a_file_are_sentences(folder, monkeypatch):
    monkeypatch.setattr("dipole.text.text_files.READ", 50)
    (document,) = reading.documents_of(folder / "0.txt", "sentences", None, "utf-8")
    lines = (folder / "0.txt").read_text("utf-8").split("\n")
    assert document.sentences == [" ".join(line.split()) for line in lines if line.strip()]


# Killed and damaged --------------------------------------------------------------------------------------------------

FILLING = """
import sys
from pathlib import Path
import psutil
from dipole.text.corpus import read_pieces
from dipole.text.encoded import encode_pieces
from dipole.text.shards import Numbering

told = []

def tell(characters, sentences):
    told.append(characters)
    if len(told) == 3:
        psutil.Process().kill()

encode_pieces(read_pieces(sys.argv[1]), Numbering(9), vocabulary_size=20,
              folder=Path(sys.argv[2]), processes=2, size=300, tell=tell)
"""


def test_a_killed_process_leaves_shards_that_the_next_goes_on_from(folder, tmp_path):
    place = tmp_path / "ids"
    program = [sys.executable, "-c", FILLING, str(folder), str(place)]
    assert was_killed(subprocess.run(program, timeout=300, check=False).returncode)
    done = {path: path.read_bytes() for path in place.glob("parts/[0-9]*.npz")}
    assert len(done) >= 3
    tokens, sentences = encoded(folder, place, processes=2, size=300)
    plainly = encoded(folder)
    assert (tokens.fingerprint, sentences.fingerprint) == (plainly[0].fingerprint, plainly[1].fingerprint)
    assert {path.name for path in place.iterdir()} == {
        ".lock", "tokens.bin", "offsets.bin", "document.bin", "tokenizer.json", "index.json"
    }  # fmt: skip


def lengths_of(data):
    return sorted({0, 1, 2, 10, len(data) // 3, len(data) // 2, len(data) - 5, len(data) - 1} - {len(data)})


def test_ids_that_were_cut_off_or_changed_are_made_again(leaflets, tmp_path):
    tokens, whole = encoded(leaflets)
    place = tmp_path / "ids"
    encoded(leaflets, place)
    for name in ("tokens.bin", "offsets.bin", "document.bin", "tokenizer.json", "index.json"):
        data = (place / name).read_bytes()
        flipped = bytearray(data)
        flipped[len(data) // 2] ^= 1
        for damage in [*(data[:length] for length in lengths_of(data)), bytes(len(data)), bytes(flipped)]:
            (place / name).write_bytes(damage)
            found, sentences = encoded(leaflets, place)
            assert sentences.fingerprint == whole.fingerprint
            assert np.array_equal(sentences.tokens, whole.tokens)
            assert found.fingerprint == tokens.fingerprint
        (place / name).unlink()
        assert encoded(leaflets, place)[1].fingerprint == whole.fingerprint


def test_shards_that_were_cut_off_are_made_again(leaflets, tmp_path):
    _, whole = encoded(leaflets)

    class StopError(Exception):
        pass

    told = []

    def stop(characters, sentences):
        told.append(sentences)
        if len(told) % 3 == 0:
            raise StopError

    for number in range(8):
        place = tmp_path / str(number)
        with pytest.raises(StopError):
            encode_pieces(
                read_pieces(str(leaflets)), Numbering(9), vocabulary_size=20, folder=place, size=400, tell=stop
            )
        shards = sorted(place.glob("parts/*.npz"))
        assert len(shards) > 1
        for shard in shards:
            data = shard.read_bytes()
            shard.write_bytes(data[: lengths_of(data)[number]])
        assert encoded(leaflets, place, size=400)[1].fingerprint == whole.fingerprint


def test_json_of_a_cache_that_was_cut_off_or_changed_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setenv("DIPOLE_CACHE", str(tmp_path))
    content = {"samples": [{"name": "a", "start": 512}], "left_out": []}
    made = []

    def make():
        made.append(1)
        return content

    assert cache.kept_json("shards", "ab12", make) == cache.kept_json("shards", "ab12", make) == content
    assert len(made) == 1
    path = tmp_path / "shards/ab12.json"
    data = path.read_bytes()
    for damage in [*(data[:length] for length in range(0, len(data), 9)), data.replace(b"512", b"513"), b"[]", b"\xff"]:
        path.write_bytes(damage)
        made.clear()
        assert cache.kept_json("shards", "ab12", make) == content
        assert made
        assert path.read_bytes() == data


@pytest.mark.parametrize("error", [zipfile.BadZipFile, json.JSONDecodeError, KeyError, EOFError, OSError, Exception])
def test_whatever_a_reader_of_a_cache_raises_the_file_is_of_no_use(error):
    def read():
        raise error("x", "", 0) if error is json.JSONDecodeError else error("x")

    assert cache.found(read) is None


# What a cache is asked for by ----------------------------------------------------------------------------------------


def test_ids_lie_below_a_name_of_contents_not_of_paths_and_dates(folder, tmp_path):
    settings = TextSettings(corpus=str(folder), cache=str(tmp_path / "cache"))
    first = place_of(settings, None, None)
    moved = shutil.copytree(folder, tmp_path / "moved")
    assert place_of(settings.model_copy(update={"corpus": str(moved)}), None, None) == first
    book = folder / "1.txt"
    before = book.stat()
    text = book.read_text("utf-8")
    with book.open("r+", encoding="utf-8") as file:
        file.write(text[1:2] + text[0:1])
    os.utime(book, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (book.stat().st_size, book.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert place_of(settings, None, None) != first


def test_a_changed_tokenizer_at_its_path_is_another_one(folder, tmp_path):
    path = tmp_path / "tokenizer.json"
    found = []
    for words in (["the", "cat"], ["cat", "the"]):
        words_vocabulary(words).save(path)
        adapter = make(folder, tmp_path, tokenizer=str(path), cache=str(tmp_path / "cache"))
        found.append(adapter.sentences.fingerprint)
        assert adapter.tokens.index["the"] == words.index("the") + 1
    assert found[0] != found[1]


def test_a_large_corpus_is_kept_in_files_though_no_folder_is_named(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("DIPOLE_CACHE", str(tmp_path / "cache"))
    small = make(folder, tmp_path)
    assert not (tmp_path / "cache").exists()
    monkeypatch.setattr("dipole.text.corpus_place.LARGE", 1000)
    large = make(folder, tmp_path, processes=2)
    assert len(list((tmp_path / "cache/corpora").iterdir())) == 1
    assert large.data_info() == small.data_info()
    for one, other in zip(small.batches(3), large.batches(3), strict=True):
        assert torch.equal(one.index, other.index)
        assert all(torch.equal(a.ids, b.ids) for a, b in zip(one.batch.chunks, other.batch.chunks, strict=True))


# What is read, and what is not ---------------------------------------------------------------------------------------


def make(corpus, tmp_path, batch_size=4, validation=0.0, **settings):
    values = {"corpus": str(corpus), "hidden_size": 8, "word_size": 6} | settings
    return TextAdapter(
        TextSettings(**values), seed=Seeds(0), device=torch.device("cpu"), workdir=tmp_path, batch_size=batch_size,
        validation=validation,
    )  # fmt: skip


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("name", "text", "column"),
    [
        ("a.csv", 'id,text\n1,"One. Two, with a comma."\n2,Three.\n', None),
        ("a.tsv", "id\ttext\n1\tOne. Two, with a comma.\n2\tThree.\n", None),
        ("a.csv", 'stars,review\n1,"One. Two, with a comma."\n2,Three.\n', None),
        ("a.csv", 'review\n"One. Two, with a comma."\nThree.\n', None),
        ("a.csv", 'title,review\nA,"One. Two, with a comma."\nB,Three.\n', "review"),
    ],
)
def test_tables_have_a_column_of_text(tmp_path, name, text, column, packed):
    path = tmp_path / (name + ".gz" * packed)
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    found = [document.sentences for document in read_documents(str(path), column=column)]
    assert found == [["One.", "Two, with a comma."], ["Three."]]


def test_packed_text_is_text(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress("\ufeffOne.\r\nTwo. Caf\u00e9.".encode()))
    assert next(read_documents(str(tmp_path / "a.txt.gz"))).sentences == ["One.", "Two.", "Caf\u00e9."]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.csv",
            b"title,review\nOne,Two\n",
            r"line 2: several columns may hold the text: title, review.*text\.column",
        ),
        ("a.csv", b"a,b\n1,2\n", r"no column holds text \(the file has a, b\)\. Say text\.column"),
        ("a.zip", b"PK\x03\x04 ...", r"a\.zip is not read as text: a corpus is read from \.txt"),
        ("a.png", b"\x89PNG", "not read as text"),
        ("a.md", b"One. Two.", "not read as text"),
        ("corpus", b"One. Two.", "not read as text"),
        ("a.tar.gz", gzip.compress(b"One.", mtime=0), "not read as text"),
        ("a.txt", gzip.compress(b"One. Two.", mtime=0), r"a\.txt holds no text: it is a gzip file"),
        ("a.txt", b"PK\x03\x04" + bytes(range(256)), "it is a zip archive"),
        ("a.txt", b"\x89PNG\r\n\x1a\n" + bytes(50), "it is an image"),
        ("a.txt", random.Random(0).randbytes(3000), "it is binary data"),
        ("a.txt.gz", gzip.compress(random.Random(0).randbytes(3000), mtime=0), "it is binary data"),
        ("a.txt.gz", b"One. Two.", "cannot be read: Not a gzipped file"),
        ("a.txt.gz", gzip.compress(b"One. Two." * 99, mtime=0)[:-9], "cannot be read"),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_what_is_no_text_is_not_read_as_text(tmp_path, name, content, message, encoding):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(read_documents(str(tmp_path / name), encoding=encoding))


def test_files_of_other_kinds_in_a_folder_are_left_out_and_said(folder):
    (folder / "cover.png").write_bytes(b"\x89PNG")
    with pytest.warns(UserWarning, match=r"left out \(\.png\)"):
        assert len(list(read_documents(str(folder)))) == 4


def test_a_wrong_byte_is_named_by_its_place_in_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr("dipole.text.text_files.READ", 7)
    (tmp_path / "a.txt").write_bytes("caf\u00e9 ".encode() * 5 + b"\xe9 noir")
    with pytest.raises(DataError, match="byte 30 is 0xe9"):
        list(read_documents(str(tmp_path / "a.txt")))


def test_a_folder_that_datasets_saved(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": ["One. Two.", "Three."]}).save_to_disk(tmp_path / "saved")
    assert [d.sentences for d in read_documents(str(tmp_path / "saved"))] == [["One.", "Two."], ["Three."]]
    datasets.Dataset.from_dict({"text": ["One. Two.", "Three."]}).to_parquet(tmp_path / "set/rows.parquet")
    found = [d.sentences for d in read_documents(f"hub:{tmp_path / 'set'}")]  # streamed
    assert found == [["One.", "Two."], ["Three."]]


# Neighbours ----------------------------------------------------------------------------------------------------------


def rows_of(path, documents):
    path.write_text("\n".join(json.dumps({"sentences": sentences}) for sentences in documents))
    return path


def test_a_corpus_without_neighbours_is_said_before_training(tmp_path):
    alone = rows_of(tmp_path / "alone.jsonl", [["A sentence."]] * 20)
    with pytest.raises(DataError, match=r"no two neighbouring sentences.*text\.unit = \"sentences\".*text\.pairs"):
        make(alone, tmp_path)
    make(alone, tmp_path, unit="sentences")
    make(alone, tmp_path, pairs="views", dropout=0.1, sides=1)
    pairs = rows_of(tmp_path / "pairs.jsonl", [["One.", "Two."]] * 20)
    make(pairs, tmp_path, held_out=0.0)
    with pytest.raises(DataError, match="no two neighbouring sentences"):
        make(pairs, tmp_path, held_out=0.5)
    with pytest.raises(ConfigError, match=r"train\.batch_size 1"):
        make(pairs, tmp_path, batch_size=1, held_out=0.0)


def test_a_share_that_is_too_small_is_said_before_training(tmp_path):
    corpus = rows_of(tmp_path / "a.jsonl", [["One.", "Two.", "Three."]] * 20)
    with pytest.raises(ConfigError, match=r"validation_share 1e-09 sets no sentence .* aside"):
        make(corpus, tmp_path, validation=1e-9)
    with pytest.warns(UserWarning, match="no two neighbouring sentences are held out"):
        make(corpus, tmp_path, held_out=1e-9)


def test_pieces_of_one_document_stay_together(tmp_path):
    pieces = [Piece("a", True, "One. Two."), Piece("a", False, ["Three ."]), Piece("b", True, "Four.")]
    _, sentences = encode_pieces(pieces, Numbering(9), size=1)
    assert sentences.document.tolist() == [0, 0, 0, 1]
    assert sentences.starts.tolist() == [0, 3, 4]
