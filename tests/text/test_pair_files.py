"""Files of pairs as others write them: tabs with plain quotation marks, JSON arrays."""

import csv
import json
import random

import pandas
import pytest

from dipole.core.utils import rows as reading
from dipole.core.utils.errors import DataError
from dipole.core.utils.rows import Asker, located_rows
from dipole.text.pair_table import read_pairs

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
    table = read_pairs(str(tmp_path / name), ["#1 String", "#2 String"])
    assert len(table) == 3
    assert table.texts[1] == '"No , " he said , " never .'


@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC])
def test_reads_quoted_tabs_as_they_were_written(tmp_path, quoting):
    cells = [["a", "b"], ['with "quotes"', "tab\there"], ["two\nlines", '"'], ['"all of it"', "plain"], ["x", ""]]
    with open(tmp_path / "t.tsv", "w", encoding="utf-8", newline="") as file:
        csv.writer(file, delimiter="\t", quoting=quoting).writerows(cells)
    assert [list(row.values()) for row in rows(tmp_path / "t.tsv")] == cells[1:]


def test_a_text_file_without_tabs_is_no_table(tmp_path):
    (tmp_path / "a.txt").write_text("only text\n")
    with pytest.raises(DataError, match=r"rows are read from .*tsv"):
        rows(tmp_path / "a.txt")


VALUES = [{"anchor": f"a{i} \\ud \u4f60", "positive": ["b]", "{", '"'], "n": [1.5, None, {"x": i}]} for i in range(30)]


@pytest.mark.parametrize("looked_at", [7, 1 << 16])
@pytest.mark.parametrize("written", ["lines", "array", "indented", "spread", "crlf"])
def test_reads_arrays_and_lines_alike(tmp_path, monkeypatch, written, looked_at):
    monkeypatch.setattr(reading, "LOOKED_AT", looked_at)
    text = {
        "lines": "".join(json.dumps(value) + "\n" for value in VALUES),
        "array": json.dumps(VALUES),
        "indented": json.dumps(VALUES, indent=2, ensure_ascii=False) + "\n",
        "spread": "\n [" + "\n,".join(json.dumps(value) for value in VALUES) + " ] \n",
        "crlf": json.dumps(VALUES, indent=1).replace("\n", "\r\n"),
    }[written]
    (tmp_path / "t.json").write_text(text, encoding="utf-8", newline="")
    assert rows(tmp_path / "t.json") == VALUES


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.json", b"[]", "holds no row. Choose"),
        ("a.json", b'{"data": [{"anchor": "a", "positive": "b"}]}', "items of 'data'. Write that array"),
        ("a.json", b'[["a", "b"], ["c", "d"]]', 'Write each row as an object, {"anchor"'),
        ("a.ndjson", '{"anchor": "\xe9"}'.encode("latin-1"), "not UTF-8 .* Save it as UTF-8"),
        ("a.csv", b'"anchor";"positive"\n"a";"b"\n', "line 1: not CSV .* Divide cells by commas"),
        ("a.parquet", b"", "0 bytes. If it is damaged, fetch or write it again"),
        ("a.parquet", None, "holds no row. Choose another file"),
    ],
)
def test_files_without_rows_say_what_to_do(tmp_path, capfd, name, data, message):
    if data is None:
        pandas.DataFrame({"anchor": [], "positive": []}).to_parquet(tmp_path / name)
    else:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=message):
        read_pairs(str(tmp_path / name))
    assert "Failed to read" not in capfd.readouterr().err


def test_lines_that_are_arrays_stay_lines(tmp_path):
    values = [["a sentence", "another " * random.Random(0).randrange(20_000, 30_000)], ["third"]]
    for part in (values, values[::-1], values[:1]):
        (tmp_path / "t.jsonl").write_text("".join(json.dumps(value) + "\n" for value in part))
        assert rows(tmp_path / "t.jsonl") == part


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[\n{"a": 1},\n{"a": 2}\n', "line 4: not JSON"),
        ('[\n{"a": 1}\n{"a": 2}]', "line 3: not JSON"),
        ('[\n{"a": 1}]\n{"b": 2}', "line 3: not JSON .*Extra data"),
        ('[\n{"a": tru}]', "line 2: not JSON"),
        ('{\n "data": [{"a": 1}]\n}', "line 1: not JSON .*one JSON value on each line, or make the file one array"),
    ],
)
def test_broken_arrays_name_the_line(tmp_path, text, message):
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(DataError, match=message):
        rows(tmp_path / "t.json")
