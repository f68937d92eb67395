"""Tables of pairs in files: beside a reading that holds everything, cut off, changed and large."""

import csv
import gzip
import json
import random
import subprocess
import sys
from collections import deque

import numpy as np
import pytest

from dipole.core.utils.errors import DataError
from dipole.text import filled_folder, spool
from dipole.text.columns import read_pairs
from dipole.text.pair_batches import PairBatches
from tests.systems import was_killed

pytestmark = pytest.mark.filterwarnings("ignore:.*rows")


@pytest.fixture
def small(monkeypatch):
    """Many blocks and shares of digests, of few texts."""
    monkeypatch.setattr(spool, "BLOCK", 200)
    monkeypatch.setattr(spool, "HELD", 70)
    monkeypatch.setattr("dipole.text.pair_table.READ", 64)
    monkeypatch.setattr("dipole.text.pair_batches.TOGETHER", 7)


def rows_of(seed, count=300):
    """Rows whose texts come again: among anchors, positives and negatives, in lists, with cells missing."""
    draw = random.Random(seed)
    texts = [
        "",
        " ",
        None,
        "caf\u00e9  noir",
        "\U0001f600",
        "nul \0 in it",
        *(f"text {i}  of" for i in range(200)),
    ]
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


def write(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def draw(epoch, tried, count):
    return np.random.default_rng((epoch, tried)).permutation(count)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kept", [False, True])
def test_numbers_and_batches_are_those_of_a_reading_that_holds_all(small, tmp_path, seed, kept):
    rows = rows_of(seed)
    table = read_pairs(write(tmp_path / "t.jsonl", rows), folder=tmp_path / "kept" if kept else None)
    texts, expected = plainly(rows)
    assert list(table.texts) == texts
    assert [table.texts[0], table.texts[-1], table.texts[3:9:2]] == [texts[0], texts[-1], texts[3:9:2]]
    found = [[number for number in row if number >= 0] for row in table.numbers_of(np.arange(len(table))).tolist()]
    assert found == expected
    batches = PairBatches(table, np.arange(len(table)), 4, draw, apart=True)
    for epoch in range(3):
        reference = batches_of(expected, draw(epoch, 0, len(table)).tolist(), 4)
        common = min(len(reference), batches.count)
        assert common > 10
        assert batches.epoch(epoch)[:common].tolist() == reference[:common]


def test_a_kept_table_is_not_read_again(small, tmp_path):
    source, kept = write(tmp_path / "t.jsonl", rows_of(0)), tmp_path / "kept"
    first = read_pairs(source, folder=kept)
    (tmp_path / "t.jsonl").unlink()
    with pytest.warns(UserWarning, match="of 300 rows .* are left out"):
        again = read_pairs(source, folder=kept)
    held = (again.fingerprint, again.texts_hash, again.incomplete, again.fewer, list(again.texts))
    assert held == (first.fingerprint, first.texts_hash, first.incomplete, first.fewer, list(first.texts))
    assert not (kept / "parts").exists()


def test_formats_are_kept_alike(small, tmp_path):
    rows = [{"anchor": f"a {i % 40}", "positive": f'"p", {i}', "negative": f"n {i % 9}"} for i in range(90)]
    write(tmp_path / "a.jsonl", rows)
    with gzip.open(tmp_path / "b.tsv.gz", "wt", newline="") as file:
        writer = csv.DictWriter(file, rows[0], delimiter="\t")
        writer.writeheader()
        writer.writerows(rows)
    one, other = (read_pairs(str(tmp_path / n), folder=tmp_path / n[0]) for n in ("a.jsonl", "b.tsv.gz"))
    assert (one.fingerprint, one.texts_hash) == (other.fingerprint, other.texts_hash)


def test_what_was_cut_off_or_changed_is_made_again(small, tmp_path, monkeypatch):
    source, kept = write(tmp_path / "t.jsonl", rows_of(1)), tmp_path / "kept"
    whole = read_pairs(source, folder=kept).held()
    for path in sorted(kept.glob("[a-z]*.*")):
        data = path.read_bytes()
        flipped = bytearray(data)
        flipped[len(data) // 2] ^= 1
        for damage in (data[: len(data) // 2], data[:-1], b"", *([bytes(flipped)] if path.suffix == ".bin" else [])):
            path.write_bytes(damage)
            table = read_pairs(source, folder=kept)
            assert (table.fingerprint, list(table.texts)) == (whole.fingerprint, list(whole.texts))
    # What is too large to be summed at the start is looked at meanwhile, and stops an epoch.
    monkeypatch.setattr(filled_folder, "SUMMED", 0)
    data = (kept / "texts.bin").read_bytes()
    (kept / "texts.bin").write_bytes(bytes([data[0] ^ 1]) + data[1:])
    damaged = read_pairs(source, folder=kept)
    damaged.watch.thread.join()
    with pytest.raises(DataError, match=r"damaged \(texts\.bin\)"):
        PairBatches(damaged, np.arange(len(damaged)), 4, draw, apart=False).epoch(0)
    assert read_pairs(source, folder=kept).fingerprint == whole.fingerprint


FILLING = """
import psutil, sys
from pathlib import Path
from dipole.text import spool
from dipole.text.columns import read_pairs

spool.BLOCK, spool.HELD = 200, 70
share_out, count = spool.Spool._share_out, iter(range(9))

def stopped(self):
    share_out(self)
    if next(count) == 2:
        psutil.Process().kill()

spool.Spool._share_out = stopped
read_pairs(sys.argv[1], folder=Path(sys.argv[2]))
"""


def test_a_spool_whose_writer_was_killed_is_made_again(small, tmp_path):
    source, kept = write(tmp_path / "t.jsonl", rows_of(2)), tmp_path / "kept"
    program = [sys.executable, "-c", FILLING, source, str(kept)]
    assert was_killed(subprocess.run(program, timeout=300, check=False).returncode)
    assert (kept / "parts").exists()
    assert not (kept / "index.json").exists()
    table = read_pairs(source, folder=kept)
    assert (list(table.texts), len(table)) == (plainly(rows_of(2))[0], len(plainly(rows_of(2))[1]))
    assert not (kept / "parts").exists()


def test_a_source_that_is_changed_while_it_is_read_is_not_kept(tmp_path):
    source = write(tmp_path / "t.jsonl", rows_of(3))
    with pytest.raises(DataError, match="was changed while it was read"):
        read_pairs(source, folder=tmp_path / "kept", same=lambda: False)
    assert {path.name for path in (tmp_path / "kept").iterdir()} <= {".lock"}


READING = """
import sys
from pathlib import Path
import numpy as np
from dipole.core.utils.machine import peak_memory
from dipole.text.columns import read_pairs
from dipole.text.pair_batches import PairBatches

before = peak_memory()
table = read_pairs(sys.argv[1], folder=Path(sys.argv[2]))
rows = np.arange(len(table))
PairBatches(table, rows, 64, lambda *asked: np.random.default_rng(0).permutation(asked[2]), apart=True).epoch(0)
print(peak_memory() - before)
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
