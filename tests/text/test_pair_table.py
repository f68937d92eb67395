"""Tables of pairs in files beside a plain reading, their labels, and files cut off, changed, large or no table."""

import csv
import json
import random
import re
import subprocess
import sys
import warnings
from collections import deque

import numpy as np
import pandas
import pytest
import torch

import dipole
from dipole.core.utils.errors import DataError
from dipole.core.utils.rows import Asker, located_rows
from dipole.text.config import TextSettings
from dipole.text.data import TableData
from dipole.text.pair_table import PairLabel, read_pairs
from dipole.text.pairs.columns import ColumnPairs
from tests.ranks import run_python
from tests.runs import refused
from tests.systems import was_killed
from tests.text.made import text_adapter, write_rows

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
    names = ("pos", "neg")
    return [{"query": draw.choice(texts), **{n: draw.choice(several)() for n in names}} for _ in range(count)]


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
    """Rows of a batch have no text in common. Rows that wait come first, in the order of what they wait for."""
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


class Drawn(ColumnPairs):
    def order(self, epoch, tried, count):
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
    config = TextSettings(pairs="columns", corpus="t.jsonl")
    pairs = Drawn(config, TableData(config, None, None, table), np.arange(len(table)), 4, None, None, 1)
    for epoch in range(3):
        reference = batches_of(expected, pairs.order(epoch, 0, len(table)).tolist(), 4)
        common = min(len(reference), pairs.steps_per_epoch)
        assert common > 10
        assert [pairs.rows_of(epoch)(place).tolist() for place in range(common)] == reference[:common]


def test_a_cached_table_is_made_again_only_if_it_is_damaged_or_incomplete(small, tmp_path):
    source, kept = write_rows(tmp_path / "t.jsonl", rows_of(0)), tmp_path / "kept"

    def found(folder):
        with pytest.warns(UserWarning, match="of 300 rows .* are skipped"):
            table = read_pairs(source, folder=folder)
        return table.fingerprint, table.texts_hash, table.incomplete, table.fewer, list(table.texts)

    first = found(kept)
    moved = (tmp_path / "t.jsonl").rename(tmp_path / "moved.jsonl")
    assert found(kept) == first
    assert {path.name for path in kept.iterdir()} == FILES | {".lock"}
    moved.rename(source)
    for name in sorted(FILES):
        data = (kept / name).read_bytes()
        flipped = bytearray(data)
        flipped[len(data) // 2] ^= 1
        for damage in (data[: len(data) // 2], data[:-1], b"", bytes(flipped)):
            (kept / name).write_bytes(damage)
            assert found(kept) == first
    assert was_killed(run_python("-c", FILLING, source, tmp_path / "killed").returncode)
    assert not (tmp_path / "killed" / "index.json").exists()
    assert found(tmp_path / "killed") == first
    assert {path.name for path in (tmp_path / "killed").iterdir()} == FILES | {".lock"}
    changed = tmp_path / "changed"
    refused(DataError, "was changed while it was read", read_pairs, source, folder=changed, unchanged=lambda: False)
    assert {path.name for path in changed.iterdir()} <= {".lock"}


FILLING = """
import psutil, sys
from pathlib import Path
from dipole.text.pair_table import PairWriter, read_pairs

PairWriter.write = lambda *asked: psutil.Process().kill()
read_pairs(sys.argv[1], folder=Path(sys.argv[2]))
"""
READING = """
import sys, tracemalloc
from pathlib import Path
import datasets
import numpy as np
from dipole.text.pair_table import read_pairs
from dipole.core.utils.seeding import Seeds
from dipole.text.config import TextSettings
from dipole.text.data import TableData
from dipole.text.pairs.columns import ColumnPairs

config = TextSettings(pairs="columns", corpus="t.jsonl")
tracemalloc.start()
table = read_pairs(sys.argv[1], folder=Path(sys.argv[2]))
rows = np.arange(len(table))
ColumnPairs(config, TableData(config, None, None, table), rows, 64, Seeds(0), None, 1).rows_of(0)
print(tracemalloc.get_traced_memory()[1])
"""


@pytest.mark.slow
def test_memory_is_bounded(tmp_path):
    """A table of 60 MB took 137 MB as lists and a dictionary. Here it takes less than its own size."""
    rows = (
        {"anchor": f"anchor {i // 3} " * 8, "positive": f"positive {i} " * 9, "negative": f"other {i} " * 9}
        for i in range(150_000)
    )
    program = [sys.executable, "-c", READING, write_rows(tmp_path / "t.jsonl", rows), str(tmp_path / "kept")]
    found = subprocess.run(program, timeout=600, check=True, capture_output=True, text=True)
    assert int(found.stdout) < 60_000_000


def table_of(folder, labels, name="label", anchor="sentence1", positive="sentence2"):
    rows = [{"id": i, anchor: f"a{i} x", positive: f"b{i} y", name: label} for i, label in enumerate(labels)]
    return write_rows(folder / "pairs.jsonl", rows)


@pytest.mark.parametrize(("columns", "name", "labels"), [
    (("sentence1", "sentence2"), "label", [1, 0, 1]),  # QQP
    (("sentence1", "sentence2"), "score", [5.0, 3.8, 0.4]),  # STS-B
    (("premise", "entailment"), "gold_label", ["entailment", "neutral", "entailment"]),
    (("question", "answer"), "Similarity", ["0.9", "0.9", "0.1"]),
    (("text1", "text2"), "is_duplicate", [True, False, True]),
    (("question1", "question2"), "isDuplicate", [0, 1, 1]),
    (("Premise", "Hypothesis"), "label", [0, 2, -1]),  # SNLI
    (("#1 String", "#2 String"), "Quality", ["1", "0", "1"]),  # MRPC
    (("sentence_A", "sentence_B"), "relatedness score", [4.5, 3.2, 4.5]),  # SICK
    (("Query", "passage"), "Relevance", [1, 0, 1]),
])  # fmt: skip
def test_labels_that_vary_are_not_ignored(tmp_path, columns, name, labels):
    source = table_of(tmp_path, labels, name, *columns)
    refused(DataError, rf"line [23]: the column '{name}' .*text.label = '{name}'.*text.columns", read_pairs, source)
    with pytest.warns(UserWarning, match=f"the column '{name}' is unused.*Every row is trained .*text.label"):
        assert len(read_pairs(source, columns)) == 3
    with pytest.warns(UserWarning, match=f"Unused: 'id', '{name}'"):
        assert len(read_pairs(table_of(tmp_path, labels[:1], name, *columns))) == 1


@pytest.mark.parametrize(("labels", "start", "kept"), [
    ([1, 0, 1], None, [0, 2]), (["1", "0", "0"], None, [0]),
    ([True, None, False, "yes"], None, [0, 3]),
    ([5.0, 3.8, 0.4, float("nan"), "N/A", " "], 3.5, [0, 1]),
    ([0.0, -0.5, -1.0], 0, [0]),
    ([0, 2, -1, 1, 0], "0", [0, 4]),  # NLI as the Hub has it
    (["entailment", "neutral", "Entailment "], "entailment", [0, 2]),
])  # fmt: skip
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.filterwarnings("ignore:.*Unused")
def test_label_filters(tmp_path, labels, start, kept, cached):
    folder = tmp_path / "cache" if cached else None
    source = table_of(tmp_path, labels)
    for _ in range(2):  # the cache is read back
        table = read_pairs(source, label=PairLabel("label", "filter", start), folder=folder)
        assert [table.texts[i] for i in table.anchor] == [f"a{i} x" for i in kept]
        assert (table.filtered, table.weights) == (len(labels) - len(kept), None)


@pytest.mark.parametrize(("labels", "label", "message"), [
    ([1, 3.8], PairLabel("label"), r"line 2: the column 'label' holds 3\.8.*text.label_from.*'target'"),
    ([1, -1], PairLabel("label"), "line 2: .* holds -1"),
    (["neutral"], PairLabel("label"), "the label 'neutral' is no number.*text.label_from"),
    (["3,5"], PairLabel("label", "target"), "the label '3,5' is no number. Write it with a decimal point"),
    (["80%"], PairLabel("label", "target"), "'80%' is no number. Weights are numbers"),
    ([0, 0], PairLabel("label"), "none of 2 rows has a label of a pair in 'label'"),
    (["b", "a"], PairLabel("label", "filter", "c"), "in 'label', which holds 'a', 'b'. Set text.label_from"),
    ([-0.2], PairLabel("label", "target"), "the label -0.2 is negative"),
    ([0, 0], PairLabel("label", "target"), "all labels in the column 'label' are 0"),
    ([1], PairLabel("lable"), "no column 'lable'.*label"),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*Unused")
def test_wrong_labels_are_one_message(tmp_path, labels, label, message):
    refused(DataError, message, read_pairs, table_of(tmp_path, labels), label=label)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.filterwarnings("ignore:.*Unused")
def test_labels_weight_pairs(tmp_path, cached):
    """The loss is the mean of rows weighted by label / highest label."""
    scores = [5.0, 2.5, 0.0, 4.0]
    settings = {"label": "score", "label_use": "target", "cache": str(tmp_path / "cache") if cached else None}
    table = {"corpus": table_of(tmp_path, scores, "score"), "pairs": "columns", "encoder": "bow", "word_size": 4}
    adapter = text_adapter({**table, "held_out": 0, **settings}, 4, workdir=tmp_path)
    embedded = adapter.embed(next(iter(adapter.batches(0))))
    weights = np.array(scores)[embedded.rows["index"].numpy()] / 5
    assert embedded.rows["weights"].numpy() == pytest.approx(weights)
    objective = dipole.objective("infonce(temperature=0.5)")
    anchor, positive = (torch.nn.functional.normalize(embedded.rows[name].double()) for name in ("anchor", "positive"))
    scaled = anchor @ positive.T / 0.5
    losses = (scaled.logsumexp(1) - scaled.diagonal()).detach().numpy()
    assert objective(embedded).loss.item() == pytest.approx((weights * losses).sum() / weights.sum(), rel=1e-5)


def test_no_duplicates_says_what_it_leaves_out(tmp_path):
    rows = [{"anchor": f"a{i}", "positive": "the same" if i % 9 else f"b{i}"} for i in range(27)]
    corpus = write_rows(tmp_path / "pairs.jsonl", rows)
    settings = {"corpus": corpus, "pairs": "columns", "encoder": "bow", "word_size": 4, "held_out": 0}
    with pytest.warns(UserWarning, match=r"leaves out \d+ of 27 rows .*'the same' stands in 24 rows.*batch_size"):
        adapter = text_adapter(settings, 2, workdir=tmp_path)
    assert adapter.steps_per_epoch <= 4
    with warnings.catch_warnings(action="error"):
        warnings.filterwarnings("ignore", ".*tokens on average")
        text_adapter({**settings, "no_duplicates": False}, 2, workdir=tmp_path)


ASKER = Asker("text", "text.split", "text.encoding")
MRPC = (
    "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n"
    '1\t1\t2\tHe said "no" .\t"No , " he said , " never .\r\n'
    '0\t3\t4\t" It is , " she said .\tShe said so .\r\n'
    '1\t5\t6\t"Quoted"\tPlain 5" disk\r\n'
)


def rows(path):
    return [row for _, row in located_rows(str(path), "train", "utf-8", ASKER)]


@pytest.mark.parametrize("name", ["msr.tsv", "msr_paraphrase_train.txt", "pairs.tab"])
def test_reads_the_file_of_mrpc(tmp_path, name):
    (tmp_path / name).write_text(MRPC, encoding="utf-8", newline="")
    wanted = [line.split("\t") for line in MRPC.removeprefix("\ufeff").split("\r\n")[:-1]]
    assert [list(row.values()) for row in rows(tmp_path / name)] == wanted[1:]
    table = read_pairs(str(tmp_path / name), ["#1 String", "#2 String"], encoding="UTF8", label=PairLabel("Quality"))
    assert len(table) == 2
    assert table.texts[1] == '"No , " he said , " never .'


@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC])
def test_reads_quoted_tabs_as_they_were_written(tmp_path, quoting):
    cells = [["a", "b"], ['with "quotes"', "tab\there"], ["two\nlines", '"'], ['"all of it"', "plain"], ["x", ""]]
    with open(tmp_path / "t.tsv", "w", encoding="utf-8", newline="") as file:
        csv.writer(file, delimiter="\t", quoting=quoting).writerows(cells)
    assert [list(row.values()) for row in rows(tmp_path / "t.tsv")] == cells[1:]


@pytest.mark.parametrize("written", ["lines", "array", "indented", "spread", "crlf"])
def test_reads_arrays_and_lines_alike_and_lines_that_are_arrays(tmp_path, written):
    marks = ["b]", "{", '"']
    values = [{"anchor": f"a{i} \\ud \u4f60", "positive": marks, "n": [1.5, None, {"x": i}]} for i in range(30)]
    text = {
        "lines": "".join(json.dumps(value) + "\n" for value in values),
        "indented": json.dumps(values, indent=2, ensure_ascii=False) + "\n",
        "spread": "\n [" + "\n,".join(json.dumps(value) for value in values) + " ] \n",
        "array": json.dumps(values), "crlf": json.dumps(values, indent=1).replace("\n", "\r\n"),
    }[written]  # fmt: skip
    (tmp_path / "t.json").write_text(text, encoding="utf-8", newline="")
    assert rows(tmp_path / "t.json") == values
    values = [["a sentence", "another " * random.Random(0).randrange(20_000, 30_000)], ["third"]]
    for part in (values, values[::-1], values[:1]):
        assert rows(write_rows(tmp_path / "t.jsonl", part)) == part


ROW = '{"anchor": "a", "positive": "b"}'


@pytest.mark.parametrize(("name", "data", "message"), [
    ("t.csv", "anchor,positive\na,b\n\nc,d,e\n", r"t\.csv, line 4: 3 cells, the header names 2"),
    ("t.csv", 'anchor,positive\n"a\nb",c\nd\n', r"line 4: 1 cell,"),
    ("t.csv", 'anchor,positive\na,"b\n', r"t\.csv, line 2: not CSV"),
    ("t.csv", "anchor,anchor,,\n", "two columns are called 'anchor'. Rename one"),
    ("t.csv", "", "no header"),
    ("a.csv", "anchor;positive\na;b\n", "line 1: one column, 'anchor;positive'"),
    ("a.csv", '"anchor";"positive"\n"a";"b"\n', "line 1: not CSV .* Divide cells by commas"),
    ("t.csv", "anchor,positive\ncaf\u00e9,b\n".encode("latin-1"), r"not utf-8.*Say text\.encoding"),
    ("sts.csv", "a\tb\tc, d\n1\t2\t3\n", "line 1: one column, .* divided by '.t'"),
    *((name, b"\x1f\x8b\x08\x00", r"packed: unpack it.* \.gz") for name in ("g.csv", "g.jsonl")),
    ("u.txt", "anchor\tpositive\na\tb\n".encode("utf-16"), r"as UTF-16 does: say text\.encoding = 'utf-16'"),
    ("t.jsonl", f'{ROW}\n\n{{"anchor": \n', r"t\.jsonl, line 3: not JSON"),
    ("t.jsonl", '{"anchor": "a", "positive": 3}\n', "line 1: column 'positive' holds int"),
    ("t.jsonl", '{"anchor": ["a", "b"], "positive": "c"}\n', "the anchor 'anchor' holds 2 texts"),
    ("t.jsonl", '{"x": "a", "y": "b"}\n', r"no usual names among the columns x, y.*text\.columns.*line of names"),
    ("a.jsonl", '{"anchor": "a", "positive": "half \\ud83d"}\n', "line 1: half a surrogate pair"),
    ("a.jsonl", f'{ROW}\n{{"anchor": {"1" * 5000}}}\n', r"line 2: Exceeds the limit \(4300 digits\)"),
    ("a.json", "[" * 100_000, "line 1: maximum recursion depth"),
    ("a.ndjson", '{"anchor": "\xe9"}'.encode("latin-1"), "not UTF-8 .* Save it as UTF-8"),
    ("a.json", '{"anchor": ["a", "b"], "positive": ["c", "d"]}', "holds 2 texts; it must be one. Write one row"),
    ("a.json", '{"anchor": {"0": "a"}, "positive": {"0": "c"}}', "holds dict, .* Write one row on each line"),
    ("a.json", "[]", "holds no row. Choose"),
    ("a.jsonl", '{"chat": [{"role": "user", "content": "a"}]}', "'chat' holds conversations. Write their texts"),
    ("a.jsonl", '{"translation": {"en": "a"}}', "'translation' holds objects"),
    ("a.json", f'{{"data": [{ROW}]}}', "'data' holds objects.* if they are the rows, that array"),
    ("a.json", '[["a", "b"], ["c", "d"]]', 'Write each row as an object, {"anchor"'),
    ("a.json", f"[\n{ROW},\n{ROW}\n", "line 4: not JSON"),
    ("a.json", '{\n "data": [{"a": 1}]\n}', "line 1: not JSON .*one JSON value on each line, or make the file one arr"),
    ("t.txt", "only text\n", r"rows are read from .*tsv"),
    ("t.parquet", "PAR1 no", "not a readable parquet file"),
    ("a.parquet", "", "0 bytes. If it is damaged, fetch or write it again"),
    ("a.parquet", None, "holds no row. Choose another file"),
])  # fmt: skip
def test_what_is_no_table_of_pairs_is_named(tmp_path, capfd, name, data, message):
    if data is None:
        pandas.DataFrame({"anchor": [], "positive": []}).to_parquet(tmp_path / name)
    else:
        (tmp_path / name).write_bytes(data.encode() if isinstance(data, str) else data)
    refused(DataError, message, read_pairs, str(tmp_path / name))
    assert "Failed to read" not in capfd.readouterr().err
    if said := re.search("say text.encoding = '(.*)'", message.lower()):
        assert read_pairs(str(tmp_path / name), encoding=said[1]).texts == ["a", "b"]


@pytest.mark.parametrize("cell", ["['a', 'b']", 'b"It is"'])
def test_lists_and_bytes_as_text_are_told(tmp_path, cell):
    with pytest.warns(UserWarning, match="'positive' holds a list or bytes as text"):
        read_pairs(write_rows(tmp_path / "train.jsonl", [{"anchor": "a", "positive": cell}]))
    with warnings.catch_warnings(action="error"):
        read_pairs(write_rows(tmp_path / "test.jsonl", [{"anchor": ["a"], "positive": ["b", "c"]}]))
    with pytest.warns(UserWarning, match="every file is read, those called test too"):
        assert len(read_pairs(str(tmp_path))) == 3
    rows = [{"anchor": "a", "positive": "b", "split": part} for part in ("train", "dev")]
    with pytest.warns(UserWarning, match="every 'split' are trained, those of dev too"):
        read_pairs(write_rows(tmp_path / "a.jsonl", rows))
