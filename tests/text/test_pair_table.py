"""Tables of pairs in files: beside a reading that holds everything, cut off, changed and large."""

import json
import random
import subprocess
import sys
from collections import deque

import numpy as np
import pytest

from dipole.core.utils.errors import DataError
from dipole.text.pair_table import read_pairs
from dipole.text.pairs.columns import PairBatches
from tests.systems import was_killed
from tests.text.made import write_rows

FILES = {"texts.arrow", "anchor.npy", "positive.npy", "negatives.npy", "index.json"}
pytestmark = pytest.mark.filterwarnings("ignore:.*rows")


@pytest.fixture
def small(monkeypatch):
    """Read and look up few rows at a time."""
    monkeypatch.setattr("dipole.text.pair_table.TOGETHER", 7)
    monkeypatch.setattr("dipole.text.pairs.columns.TOGETHER", 7)


def rows_of(seed, count=300):
    """Rows whose texts come again: among anchors, positives and negatives, in lists, with cells missing."""
    draw = random.Random(seed)
    texts = ["", " ", None, "caf\u00e9  noir", "\U0001f600", "nul \0 in it", *(f"text {i}  of" for i in range(200))]
    several = [lambda: draw.choice(texts), lambda: draw.choices(texts, k=draw.randrange(4))]
    return [
        {"query": draw.choice(texts), "pos": draw.choice(several)(), "neg": draw.choice(several)()}
        for _ in range(count)
    ]


def plainly(rows):
    """Texts by number and rows of numbers, with everything held."""
    place, found = {}, []
    for row in rows:
        query, pos, neg = (
            [" ".join(each.split()) for each in (cell if isinstance(cell, list) else [cell]) if each and each.strip()]
            for cell in (row["query"], row["pos"], row["neg"])
        )
        if query and pos:
            numbers = [[place.setdefault(text, len(place)) for text in cell] for cell in (query, pos, neg)]
            found += [[numbers[0][0], positive, *numbers[2]] for positive in numbers[1]]
    return list(place), found


def batches_of(rows, order, size):
    """Rows of a batch have no text in common; those that wait come first, in the order of what they wait for."""
    waiting, rest, batches = {}, deque(order), []
    while True:
        batch, taken = [], set()

        def put(row, batch=batch, taken=taken):
            clash = next((text for text in dict.fromkeys(rows[row]) if text in taken), None)
            if clash is None:
                batch.append(row)
                taken.update(rows[row])
            else:
                waiting.setdefault(clash, deque()).append(row)

        for text in list(waiting):
            while len(batch) < size and text not in taken and waiting[text]:
                put(waiting[text].popleft())
            if not waiting[text] and len(batch) < size:
                del waiting[text]
        while len(batch) < size and rest:
            put(rest.popleft())
        if len(batch) < size:
            return batches
        batches.append(batch)


def draw(epoch, tried, count):
    return np.random.default_rng((epoch, tried)).permutation(count)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("cached", [False, True])
def test_numbers_and_batches_equal_a_plain_loop(small, tmp_path, seed, cached):
    rows = rows_of(seed)
    table = read_pairs(write_rows(tmp_path / "t.jsonl", rows), folder=tmp_path / "kept" if cached else None)
    texts, expected = plainly(rows)
    assert list(table.texts) == texts
    assert [table.texts[0], table.texts[-1], table.texts[3:9:2]] == [texts[0], texts[-1], texts[3:9:2]]
    found = [[number for number in row if number >= 0] for row in table.numbers_of(np.arange(len(table))).tolist()]
    assert found == expected
    batches = PairBatches(table, np.arange(len(table)), 4, draw, no_duplicates=True)
    for epoch in range(3):
        reference = batches_of(expected, draw(epoch, 0, len(table)).tolist(), 4)
        common = min(len(reference), batches.count)
        assert common > 10
        assert batches.epoch(epoch)[:common].tolist() == reference[:common]


def test_a_cached_table_is_not_read_again(small, tmp_path):
    source, kept = write_rows(tmp_path / "t.jsonl", rows_of(0)), tmp_path / "kept"
    first = read_pairs(source, folder=kept)
    (tmp_path / "t.jsonl").unlink()
    with pytest.warns(UserWarning, match="of 300 rows .* are skipped"):
        again = read_pairs(source, folder=kept)
    held = (again.fingerprint, again.texts_hash, again.incomplete, again.fewer, list(again.texts))
    assert held == (first.fingerprint, first.texts_hash, first.incomplete, first.fewer, list(first.texts))
    assert {path.name for path in kept.iterdir()} == FILES | {".lock"}


def test_damaged_tables_are_made_again(small, tmp_path):
    source, kept = write_rows(tmp_path / "t.jsonl", rows_of(1)), tmp_path / "kept"
    expected = read_pairs(source)
    read_pairs(source, folder=kept)
    for name in sorted(FILES):
        data = (kept / name).read_bytes()
        flipped = bytearray(data)
        flipped[len(data) // 2] ^= 1
        for damage in (data[: len(data) // 2], data[:-1], b"", bytes(flipped)):
            (kept / name).write_bytes(damage)
            table = read_pairs(source, folder=kept)
            assert (table.fingerprint, list(table.texts)) == (expected.fingerprint, list(expected.texts))


FILLING = """
import psutil, sys
from pathlib import Path
from dipole.text.pair_table import PairWriter
from dipole.text.pair_table import read_pairs

PairWriter.write = lambda *asked: psutil.Process().kill()
read_pairs(sys.argv[1], folder=Path(sys.argv[2]))
"""


def test_a_table_whose_writer_was_killed_is_made_again(small, tmp_path):
    source, kept = write_rows(tmp_path / "t.jsonl", rows_of(2)), tmp_path / "kept"
    program = [sys.executable, "-c", FILLING, source, str(kept)]
    assert was_killed(subprocess.run(program, timeout=300, check=False).returncode)
    assert not (kept / "index.json").exists()
    table = read_pairs(source, folder=kept)
    assert (list(table.texts), len(table)) == (plainly(rows_of(2))[0], len(plainly(rows_of(2))[1]))
    assert {path.name for path in kept.iterdir()} == FILES | {".lock"}


def test_a_source_that_changes_during_reading_is_not_cached(tmp_path):
    source = write_rows(tmp_path / "t.jsonl", rows_of(3))
    with pytest.raises(DataError, match="was changed while it was read"):
        read_pairs(source, folder=tmp_path / "kept", unchanged=lambda: False)
    assert {path.name for path in (tmp_path / "kept").iterdir()} <= {".lock"}


READING = """
import sys, tracemalloc
from pathlib import Path
import datasets
import numpy as np
from dipole.text.pair_table import read_pairs
from dipole.text.pairs.columns import PairBatches

tracemalloc.start()
table = read_pairs(sys.argv[1], folder=Path(sys.argv[2]))
rows = np.arange(len(table))
PairBatches(table, rows, 64, lambda *asked: np.random.default_rng(0).permutation(asked[2]), no_duplicates=True).epoch(0)
print(tracemalloc.get_traced_memory()[1])
"""


@pytest.mark.slow
def test_memory_is_bounded(tmp_path):
    """A table of 60 MB took 137 MB as lists and a dictionary; here it takes less than its own size."""
    with open(tmp_path / "t.jsonl", "w") as file:
        for i in range(150_000):
            row = {"anchor": f"anchor {i // 3} " * 8, "positive": f"positive {i} " * 9, "negative": f"other {i} " * 9}
            file.write(json.dumps(row) + "\n")
    program = [sys.executable, "-c", READING, str(tmp_path / "t.jsonl"), str(tmp_path / "kept")]
    found = subprocess.run(program, timeout=600, check=True, capture_output=True, text=True)
    assert int(found.stdout) < 60_000_000
