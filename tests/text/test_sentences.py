"""Corpora as ids: equal to a plain loop, on any number of processes, after kills and damage, and their cache."""

import gzip
import multiprocessing
import os
import shutil
import time
from collections import Counter

import numpy as np
import pytest
import torch

from dipole.core.utils import cache as core_cache
from dipole.core.utils.errors import ConfigError, DataError
from dipole.text import sentences as encoding
from dipole.text.cache import corpus_folder, load_or_build
from dipole.text.config import TextSettings
from dipole.text.corpus import Piece, read_pieces, split_sentences
from dipole.text.sentences import Cut, encode_pieces
from dipole.text.vocabulary import word_cutter, words_vocabulary
from tests.ranks import run_python, start_method
from tests.runs import refused
from tests.systems import was_killed
from tests.text.made import text_adapter, text_of, write_rows

FILES = {"tokens.bin", "offsets.bin", "document.bin", "index.json"}


@pytest.fixture
def books(tmp_path):
    """Eight books of some hundred words, one of them packed."""
    folder = tmp_path / "books"
    folder.mkdir()
    for number in range(7):
        (folder / f"{number}.txt").write_text(text_of(number, 400), encoding="utf-8")
    (folder / "7.txt.gz").write_bytes(gzip.compress(text_of(7, 400).encode()))
    return folder


def plain(folder, size, max_length, lower, limit):
    """The plain reader: whole files, a loop over sentences, a counter, a sort."""
    files = sorted(folder.iterdir())
    texts = [gzip.decompress(f.read_bytes()).decode() if f.suffix == ".gz" else f.read_text("utf-8") for f in files]
    flat = [(d, s) for d, text in enumerate(texts) for s in split_sentences(text)][:limit]
    cut, counts, parts = word_cutter(lower), Counter(), []
    for _, sentence in flat:
        parts.append(cut(sentence))
        counts.update(word for word in parts[-1] if word != "<unk>")
    best = sorted(counts, key=lambda word: (-counts[word], word))[:size]
    index = {"<unk>": 0} | {word: number for number, word in enumerate(best, 1)}
    full_stop = [index.get(".", 0)]  # for a sentence without words, such as a blank without width
    ids = [[index.get(word, 0) for word in words][:max_length] or full_stop for words in parts]
    return index, ids, [d for d, _ in flat]


def encoded(source, folder=None, processes=1, limit=None, lower=False, **options):
    options = {"folder": folder, "processes": processes, "limit": limit, "size": 1500} | options
    return encode_pieces(read_pieces(str(source)), Cut(9, lower), vocabulary_size=20, **options)


def ids_of(sentences):
    return [each.tolist() for each in sentences.ids(range(len(sentences)))]


@pytest.mark.parametrize(("processes", "limit", "lower"), [(1, 200, False), (3, None, True)])
def test_equals_a_plain_loop(books, tmp_path, processes, limit, lower):
    index, ids, owners = plain(books, 20, 9, lower, limit)
    for folder in (None, tmp_path / "ids"):
        tokens, sentences = encoded(books, folder, processes, limit, lower)
        assert tokens.index == index
        assert ids_of(sentences) == ids
        assert sentences.document.tolist() == owners
    assert np.diff(sentences.offsets).max() == 9
    assert sentences.unknown == sum(each.count(0) for each in ids)
    again, mapped = encode_pieces(iter(()), Cut(9, lower), folder=folder)  # complete: nothing is read
    assert (again.fingerprint, mapped.fingerprint) == (tokens.fingerprint, sentences.fingerprint)
    shutil.rmtree(books)
    shutil.rmtree(folder)  # both can be removed while they are used
    assert ids_of(mapped) == ids


def test_documents_are_encoded_once_by_a_given_tokenizer(tmp_path):
    pieces = [Piece("a", True, "One. Two."), Piece("a", False, "Three .", True), Piece("b", True, "Four.")]
    _, sentences = encode_pieces(pieces, Cut(9), size=1)
    assert sentences.document.tolist() == [0, 0, 0, 1]
    assert sentences.starts.tolist() == [0, 3, 4]
    tokens = words_vocabulary([f"w{i}" for i in range(12)])
    _, found = encode_pieces(read_pieces(DOCUMENTS), Cut(2, tokens=tokens))
    assert len(found) == sum(map(len, DOCUMENTS))
    assert ids_of(found)[:3] == [[1, 2], [2, 3], [2]]
    assert found.document.tolist()[:6] == [0, 1, 1, 2, 2, 2]
    assert np.diff(found.offsets).max() == 2
    cut = Cut(5, tokens=tokens)
    refused(DataError, "no sentence", encode_pieces, [], cut)
    _, made = encode_pieces(read_pieces(DOCUMENTS), cut, folder=tmp_path)
    (tmp_path / ".lock").unlink(missing_ok=True)
    (tmp_path / ".lock").mkdir()  # as in a folder that cannot be written
    refused(DataError, "cannot be cached in", load_or_build, tmp_path / "tokens.bin" / "cache", *[lambda _: None] * 2)
    assert encode_pieces([], cut, folder=tmp_path)[1].fingerprint == made.fingerprint


DOCUMENTS = [[f"w{i} w{i + 1} .", f"w{i}", "never seen before"][: 1 + i % 3] for i in range(9)]
FILLING = """
import sys
from pathlib import Path
import psutil
from dipole.text import sentences
from dipole.text.corpus import read_pieces

sentences.PART = 2
told = []

def tell(characters, count):
    told.append(characters)
    if len(told) == 3:
        psutil.Process().kill()

sentences.encode_pieces(read_pieces(sys.argv[1]), sentences.Cut(9), vocabulary_size=20,
                        folder=Path(sys.argv[2]), processes=2, size=100, tell=tell)
"""


@pytest.mark.slow
def test_a_killed_process_is_continued(books, tmp_path, monkeypatch):
    folder = tmp_path / "ids"
    assert was_killed(run_python("-c", FILLING, books, folder).returncode)
    assert len({path.name[:5] for path in folder.glob("parts/0*.arrow")}) >= 3
    damaged = sorted(folder.glob("parts/00001*.arrow"))[0]
    damaged.write_bytes(damaged.read_bytes()[:-200])
    monkeypatch.setattr(encoding, "PART", 2)
    cut_again = []
    monkeypatch.setattr(encoding, "_cut_apart", lambda block, cut, parent: cut_again.append(block) or cut(block))
    tokens, sentences = encoded(books, folder, size=100)
    plainly = encoded(books)
    assert (tokens.fingerprint, sentences.fingerprint) == (plainly[0].fingerprint, plainly[1].fingerprint)
    blocks = list(encoding.blocks_of(read_pieces(str(books)), 100))
    assert cut_again == blocks[2:4] + blocks[6:]  # finished parts are cut no second time, the damaged one is
    assert {path.name for path in folder.iterdir()} == FILES | {".lock", "tokenizer.json"}


def test_damaged_ids_are_made_again(tmp_path):
    leaflet, folder = tmp_path / "a.txt", tmp_path / "ids"
    leaflet.write_text(text_of(0, 100), encoding="utf-8")
    tokens, expected = encoded(leaflet)
    encoded(leaflet, folder)
    for name in sorted(FILES | {"tokenizer.json"}):
        data = (folder / name).read_bytes()
        flipped = bytearray(data)
        flipped[len(data) // 2] ^= 1
        cut = (data[:length] for length in sorted({0, 1, len(data) // 2, len(data) - 1} - {len(data)}))
        for damage in (*cut, bytes(len(data)), bytes(flipped)):
            (folder / name).write_bytes(damage)
            found, sentences = encoded(leaflet, folder)
            assert np.array_equal(sentences.tokens, expected.tokens)
            assert sentences.fingerprint == expected.fingerprint
            assert found.fingerprint == tokens.fingerprint


@pytest.mark.parametrize("cached", [False, True])
def test_a_corpus_that_changes_or_disappears_during_reading_is_not_cached(books, tmp_path, cached):
    folder = tmp_path / "ids" if cached else None
    if cached:
        refused(DataError, "changed while it was read", encoded, books, folder, unchanged=lambda: False)
        assert {path.name for path in folder.iterdir()} <= {".lock"}
        assert encoded(books, folder)[1].fingerprint == encoded(books)[1].fingerprint
        shutil.rmtree(folder)

    def pieces():
        for number, piece in enumerate(read_pieces(str(books))):
            if number == 1:
                (books / "2.txt").unlink()
            yield piece

    refused(DataError, r"cannot be read: .*2\.txt No such file", encode_pieces, pieces(), Cut(9), folder=folder)


def fill(folder, barrier, number):
    """One of several processes that start with an empty cache. It notes every document it reads."""
    tokens = words_vocabulary([f"w{i}" for i in range(12)])

    def read():
        for i, document in enumerate(DOCUMENTS):
            time.sleep(0.02)
            with (folder.parent / "read.txt").open("a") as notes:
                notes.write(f"{number} {i}\n")
            yield document

    barrier.wait(60)
    _, found = encode_pieces(read_pieces(read()), Cut(5, tokens=tokens), folder=folder)
    (folder.parent / f"{number}.txt").write_text(found.fingerprint)


def test_two_processes_read_a_corpus_once(tmp_path):
    context = multiprocessing.get_context(start_method())
    barrier, folder = context.Barrier(2), tmp_path / "cache"
    processes = [context.Process(target=fill, args=(folder, barrier, number)) for number in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    tokens = words_vocabulary([f"w{i}" for i in range(12)])
    _, expected = encode_pieces(read_pieces(DOCUMENTS), Cut(5, tokens=tokens))
    assert [(tmp_path / f"{number}.txt").read_text() for number in range(2)] == [expected.fingerprint] * 2
    read = [line.split() for line in (tmp_path / "read.txt").read_text().splitlines()]
    assert [int(i) for _, i in read] == list(range(len(DOCUMENTS)))
    assert len({number for number, _ in read}) == 1
    assert {path.name for path in folder.iterdir()} == FILES | {".lock"}


def test_damaged_json_of_a_cache_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setenv("DIPOLE_CACHE", str(tmp_path))
    content = {"samples": [{"name": "a", "start": 512}], "left_out": []}
    made = []

    def make():
        made.append(1)
        return content

    assert core_cache.kept_json("shards", "ab12", make) == core_cache.kept_json("shards", "ab12", make) == content
    assert len(made) == 1
    path = tmp_path / "shards/ab12.json"
    data = path.read_bytes()
    for damage in [*(data[:length] for length in range(0, len(data), 9)), data.replace(b"512", b"513"), b"[]", b"\xff"]:
        path.write_bytes(damage)
        made.clear()
        assert core_cache.kept_json("shards", "ab12", make) == content
        assert made
        assert path.read_bytes() == data


def make(corpus, tmp_path, batch_size=4, validation=0.0, **settings):
    settings = {"corpus": str(corpus), "hidden_size": 8, "word_size": 6} | settings
    return text_adapter(settings, batch_size, workdir=tmp_path, validation=validation)


def test_caches_are_named_by_content_not_by_path_and_date(books, tmp_path):
    settings = TextSettings(corpus=str(books), cache=str(tmp_path / "cache"))
    first = corpus_folder(settings, None)
    moved = shutil.copytree(books, tmp_path / "moved")
    assert corpus_folder(settings.model_copy(update={"corpus": str(moved)}), None) == first
    book = books / "1.txt"
    before, data = book.stat(), book.read_bytes()
    book.write_bytes(data[1:2] + data[:1] + data[2:])
    os.utime(book, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (book.stat().st_size, book.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert corpus_folder(settings, None) != first
    path = tmp_path / "tokenizer.json"
    found = []
    for words in (["the", "cat"], ["cat", "the"]):
        words_vocabulary(words).save(path)
        adapter = make(books, tmp_path, tokenizer=str(path), cache=str(tmp_path / "cache"))
        found.append(adapter.sentences.fingerprint)
        assert adapter.tokens.index["the"] == words.index("the") + 1
    assert found[0] != found[1]


def test_a_large_corpus_is_cached_even_if_no_folder_is_named(books, tmp_path, monkeypatch):
    monkeypatch.setenv("DIPOLE_CACHE", str(tmp_path / "cache"))
    small = make(books, tmp_path)
    assert not (tmp_path / "cache").exists()
    monkeypatch.setattr("dipole.text.cache.LARGE", 1000)
    large = make(books, tmp_path, processes=2)
    assert len(list((tmp_path / "cache/corpora").iterdir())) == 1
    assert large.data_info() == small.data_info()
    for one, other in zip(small.batches(3), large.batches(3), strict=True):
        assert torch.equal(one.index, other.index)
        assert all(torch.equal(a.ids, b.ids) for a, b in zip(one.batch.chunks, other.batch.chunks, strict=True))


def test_rejects_a_corpus_without_neighbours(tmp_path):
    alone = write_rows(tmp_path / "alone.jsonl", [{"sentences": ["A sentence."]}] * 40)
    refused(DataError, r"no two neighbouring sentences.*text\.unit = \"sentences\".*text\.pairs", make, alone, tmp_path)
    make(alone, tmp_path, unit="sentences")
    refused(DataError, "is one document.*leave both", make, alone, tmp_path, unit="sentences", losses=True)
    make(alone, tmp_path, pairs="views", dropout=0.1, sides=1)
    pairs = write_rows(tmp_path / "pairs.jsonl", [{"sentences": ["One.", "Two."]}] * 20)
    make(pairs, tmp_path, held_out=0.0)
    refused(DataError, "no two neighbouring sentences", make, pairs, tmp_path, held_out=0.5)
    refused(ConfigError, r"train\.batch_size 1", make, pairs, tmp_path, batch_size=1, held_out=0.0)
    corpus = write_rows(tmp_path / "a.jsonl", [{"sentences": ["One.", "Two.", "Three."]}] * 20)
    refused(ConfigError, r"validation_share 1e-09 sets no sentence .* aside", make, corpus, tmp_path, validation=1e-9)
    with pytest.warns(UserWarning, match="no two neighbouring sentences are held out"):
        make(corpus, tmp_path, held_out=1e-9)
