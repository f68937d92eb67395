"""Corpora and their caches under somebody's hands: written to, moved, damaged, misnamed, read by any number at once."""

import gzip
import random
import shutil
import subprocess
import sys
import time
import warnings

import numpy as np
import pytest

from dipole.core.utils import progress
from dipole.core.utils.errors import DataError
from dipole.text import corpus as reading
from dipole.text import filled_folder
from dipole.text.corpus import read_documents, read_pieces
from dipole.text.encoded import encode_pieces
from dipole.text.shards import Numbering
from dipole.text.wiki3029 import build
from tests.systems import links

TEXT = "One here. Two there.\nThree caf\u00e9 now."


@pytest.fixture
def books(tmp_path):
    folder = tmp_path / "books"
    folder.mkdir()
    draw = random.Random(0)
    for number in range(6):
        words = (draw.choice(["cat", "dog.", "A", "saw", "it.", "\n\n"]) for _ in range(400))
        (folder / f"{number}.txt").write_text(" ".join(words))
    return folder


def encoded(source, folder=None, processes=1, limit=None, **options):
    return encode_pieces(
        read_pieces(str(source)), Numbering(9), vocabulary_size=20, folder=folder, processes=processes, size=900,
        limit=limit, **options,
    )  # fmt: skip


@pytest.mark.parametrize("limit", [None, 150])
def test_any_number_of_processes_gives_the_same(books, tmp_path, limit):
    found = [encoded(books, tmp_path / str(n), n, limit)[1] for n in (1, 2, 5)]
    assert {each.fingerprint for each in found} == {encoded(books, limit=limit)[1].fingerprint}
    assert len(found[0]) == 150 or limit is None


def test_a_corpus_that_changes_while_it_is_read_is_not_kept(books, tmp_path):
    place = tmp_path / "ids"
    with pytest.raises(DataError, match="changed while it was read"):
        encoded(books, place, same=lambda: False)
    assert not list(place.rglob("*.npz"))
    assert not (place / "index.json").exists()
    assert encoded(books, place)[1].fingerprint == encoded(books)[1].fingerprint


@pytest.mark.parametrize("kept", [False, True])
def test_a_file_that_goes_away_while_it_is_read_is_named(books, tmp_path, kept):
    def going():
        for number, piece in enumerate(read_pieces(str(books))):
            if number == 1:
                (books / "3.txt").unlink()
            yield piece

    with pytest.raises(DataError, match=r"the corpus cannot be read: .*3\.txt No such file"):
        encode_pieces(going(), Numbering(9), folder=tmp_path / "ids" if kept else None)


def test_what_is_mapped_stays_when_corpus_and_cache_are_removed(books, tmp_path):
    whole = encoded(books)[1]
    _, mapped = encoded(books, tmp_path / "ids")
    shutil.rmtree(books)
    shutil.rmtree(tmp_path / "ids")
    assert all(
        np.array_equal(a, b) for a, b in zip(mapped.ids(range(len(whole))), whole.ids(range(len(whole))), strict=True)
    )


def test_damage_in_large_arrays_is_found_while_they_are_used(books, tmp_path, monkeypatch):
    monkeypatch.setattr(filled_folder, "SUMMED", 0)
    place = tmp_path / "ids"
    whole = encoded(books)[1]
    encoded(books, place)
    _, intact = encoded(books, place)
    intact.watch.thread.join()
    assert len(intact.ids([0, 1])) == 2
    for name in ("tokens.bin", "offsets.bin", "document.bin"):
        data = bytearray((place / name).read_bytes())
        data[-3] ^= 1
        (place / name).write_bytes(data)
        _, damaged = encoded(books, place)
        damaged.watch.thread.join()
        with pytest.raises(DataError, match=f"damaged .{name}"):
            damaged.ids([0])
        assert encoded(books, place)[1].fingerprint == whole.fingerprint
        _, again = encoded(books, place)
        again.watch.thread.join()
        assert np.array_equal(again.tokens, whole.tokens)
    (place / "tokenizer.json").write_text("{}")
    assert encoded(books, place)[0].index == encoded(books)[0].index


@pytest.mark.parametrize(("codec", "said"), [("utf-16", "utf-16"), ("utf-32", "utf-32")])
@pytest.mark.parametrize(("name", "start"), [("a.txt", ""), ("a.csv", "text\n"), ("a.txt.gz", "")])
def test_wide_encodings_are_recognised_by_their_mark(tmp_path, codec, said, name, start):
    path = tmp_path / name
    data = (start + TEXT.replace("\n", " ")).encode(codec)
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    with pytest.raises(DataError, match=f"Set text.encoding = '{said}'"):
        list(read_documents(str(path)))
    (document,) = read_documents(str(path), encoding=codec)
    assert document.sentences == ["One here.", "Two there.", "Three caf\u00e9 now."]


@pytest.mark.parametrize("name", ["A.TXT.GZ", "A.CSV", "A.Tsv.gz", "A.JSONL.GZ"])
def test_suffixes_in_capitals_are_those_in_small_letters(tmp_path, name):
    kind = name.lower()
    text = {"t": "One. Two.", "c": "n,review\n1,One. Two.\n", "j": '{"text": "One. Two."}\n'}[
        "j" if "json" in kind else "c" if "sv" in kind else "t"
    ]
    text = text.replace(",", "\t") if "tsv" in kind else text
    (tmp_path / name).write_bytes(gzip.compress(text.encode()) if kind.endswith(".gz") else text.encode())
    assert [document.sentences for document in read_documents(str(tmp_path))] == [["One.", "Two."]]


@pytest.mark.parametrize("start", [b"\x1f\x8b\x08", b"PK\x03\x04", b"\x89PNG\r\n", b"PAR1"])
@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.txt"])
def test_what_is_no_text_is_refused_in_every_encoding(tmp_path, name, start):
    (tmp_path / name).write_bytes(start + bytes(range(1, 256)) * 4)
    with pytest.raises(DataError, match="holds no text: it is a"):
        list(read_documents(str(tmp_path / name), encoding="latin-1"))


def test_text_that_goes_on_as_something_else_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("dipole.text.text_files.READ", 1 << 16)
    (tmp_path / "a.txt").write_bytes(b"A b c. " * 20_000 + random.Random(0).randbytes(1 << 17))
    with pytest.raises(DataError, match="binary data"):
        list(read_pieces(str(tmp_path / "a.txt"), encoding="latin-1"))
    (tmp_path / "b.txt").write_bytes(b"A b c. " * 20_000 + b"\x00\x01 the end.")  # a stray one harms nobody
    assert list(read_pieces(str(tmp_path / "b.txt")))


def test_the_column_of_text_is_found_behind_empty_cells(tmp_path):
    (tmp_path / "a.csv").write_text("n,review\n1,\n2,7\n3,One. Two.\n")
    assert [d.sentences for d in read_documents(str(tmp_path / "a.csv"))] == [[], ["7"], ["One.", "Two."]]


def test_a_line_without_an_end_is_no_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "LINE", 1_000_000)
    (tmp_path / "a.txt").write_text("word " * 500_000)
    with pytest.raises(DataError, match="a line of more than 1,000,000 characters"):
        list(read_pieces(str(tmp_path / "a.txt"), unit="sentences"))
    assert list(read_pieces(str(tmp_path / "a.txt")))


@links
def test_links_that_lead_nowhere_are_said(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.txt").symlink_to(tmp_path / "b.txt")
    (tmp_path / "c.txt").symlink_to(tmp_path / "missing.txt")
    (tmp_path / "round").symlink_to(tmp_path)
    with pytest.warns(UserWarning, match=r"b\.txt leads nowhere and is left out \(2 such links"):
        assert len(list(read_documents(str(tmp_path)))) == 1


def test_articles_of_a_table(tmp_path):
    rows = (f'{n},"' + " ".join(f"Word{n} of number {m} here." for m in range(4)) + '"\n' for n in range(3))
    (tmp_path / "articles.csv").write_text("n,text\n" + "".join(rows))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert build(tmp_path, tmp_path / "out.jsonl", articles=3, sentences=4).taken == 3


def test_quiet_reaches_whatever_shows_progress(capsys):
    with progress.quietly():
        inner = progress.Progress()
        inner.note("a note")
        inner.warn("a warning")
    progress.Progress().note("another")
    assert capsys.readouterr().err == "a warning\nanother\n"


FILLING = """
import sys
from pathlib import Path
from dipole.text.corpus import read_pieces
from dipole.text.encoded import encode_pieces
from dipole.text.shards import Numbering
encode_pieces(read_pieces(sys.argv[1]), Numbering(9), vocabulary_size=20,
              folder=Path(sys.argv[2]), processes=2, size=900)
"""


@pytest.mark.slow
def test_ten_kills_at_random_moments_change_nothing(books, tmp_path):
    whole = encoded(books)[1]
    place, draw = tmp_path / "ids", random.Random(1)
    for _ in range(10):
        process = subprocess.Popen([sys.executable, "-c", FILLING, str(books), str(place)])
        deadline = time.monotonic() + 300
        while not (place / ".lock").exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 3))
        process.kill()
        process.wait()
        (place / "index.json").unlink(missing_ok=True)  # one that came to its end begins again at its shards
    _, sentences = encoded(books, place, processes=2)
    assert sentences.fingerprint == whole.fingerprint
    assert np.array_equal(sentences.tokens, whole.tokens)
    assert not list(place.rglob("*.tmp*"))
