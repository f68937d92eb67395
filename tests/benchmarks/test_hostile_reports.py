"""Suites and folders of runs that a stranger has made: a report, or one short error of ours, and soon."""

import json
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given

from dipole.benchmarks.manifest import read_manifests, read_records
from dipole.benchmarks.report.write import make_report, to_markdown, to_pages, write_report
from dipole.benchmarks.suite import read_suite, suites
from dipole.benchmarks.sweep.study import read_summaries
from dipole.core.train.recipe import read_recipe
from dipole.core.utils.errors import DipoleError
from tests.benchmarks.conftest import JOB, damaged
from tests.hostile import NO_FILES, ODD, answered, changed, places, settings_of, toml_contents
from tests.systems import linux, posix

SUITE = read_recipe(suites()["demo"])


@settings_of(60, is_quick=True)
@given(toml_contents(SUITE))
def test_suites(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "suite.toml"
    path.write_bytes(content)
    answered(lambda: read_suite(path))


@pytest.mark.parametrize("name", ["a" * 5000, "a\0b", "/" * 300, ""])
def test_names_that_no_suite_has(name):
    with suppress(DipoleError):
        read_suite("no such suite")  # imports what names are compared with
    answered(lambda: read_suite(name))


def filled(runs_folder: Any) -> Path:
    """Two objectives, two seeds, one column."""
    rows = [("infonce", "infonce", None), ("dcl", "dcl", "infonce")]
    runs_folder.suite("mine", rows, [("digits", "vision")], lambda row, column, seed: 0.8 + seed / 50, seeds=(0, 1))
    return runs_folder.path


@pytest.mark.parametrize("kind", NO_FILES)
@pytest.mark.parametrize(
    "name", [f"{name}.json" for name in ("record", "measured", "points")] + ["metrics.jsonl", "config.toml", ".pid"]
)
def test_what_is_no_file_does_not_stop_a_report(runs_folder, name, kind):
    runs = filled(runs_folder)
    path = runs / f"{1:012x}" / name
    path.unlink(missing_ok=True)
    NO_FILES[kind](path)
    begin = time.process_time()
    assert len(read_records(runs).records) == (3 if name == "record.json" else 4)
    make_report(runs)
    assert time.process_time() - begin < 3


@pytest.mark.parametrize("kind", NO_FILES)
def test_what_is_no_file_is_no_suite_and_no_search(tmp_path, kind):
    for folder in (tmp_path / ".bench" / "suites", tmp_path / ".sweeps"):
        folder.mkdir(parents=True)
        NO_FILES[kind](folder / "x.json")
    answered(lambda: read_manifests(tmp_path))
    answered(lambda: read_summaries(tmp_path))
    assert len(read_manifests(tmp_path)[1]) == 1


def test_no_number_of_a_record_stops_a_report(runs_folder):
    """Every field of a record, in turn, is what no record of ours would hold: the other runs are reported."""
    runs = filled(runs_folder)
    path = runs / f"{1:012x}" / "record.json"
    record = json.loads(path.read_text())
    record["histogram"] = {"edges": [0.0, 0.5, 1.0], "all": [1, 2]}
    for number, place in enumerate(places(record, 2)):
        path.write_text(json.dumps(changed(record, place, ODD[number % len(ODD)] if number % 2 else 10**400)))
        report = make_report(runs)
        assert report.sections
    to_pages(report, "report")
    to_markdown(report)


def test_control_characters_are_drawn_as_escapes(runs_folder, tmp_path):
    """In labels, columns, titles, objectives and names of metrics: every file is readable, and SVG is XML."""
    odd = ["\x1b[31m", "\x00", "\x9b", "\u2028", "a\x0bb\x0c"]
    text = " ".join(odd)
    rows = [(f"info{text}", f"infonce{text}", None), (f"dcl{text}", "dcl", f"info{text}")]
    runs_folder.suite("mine", rows, [(f"digits{text}", "vision")], lambda *cell: 0.8 + cell[2] / 50, title=f"of {text}")
    more = {"name": f"named {text}", "domain": f"vision{text}"}
    run = runs_folder.record("cacr" + text, results={f"knn{text}/accuracy": 0.5}, **more)
    with (runs_folder.path / run / "metrics.jsonl").open("a") as lines:
        lines.writelines(json.dumps({"step": step, f"train/{text}": 0.1 * step}) + "\n" for step in range(101, 105))
    write_report(runs_folder.path, tmp_path / "out.html", tmp_path / "figures")
    write_report(runs_folder.path, tmp_path / "out.md")
    drawn = list((tmp_path / "figures").glob("*.svg"))
    assert drawn
    for path in drawn:
        ElementTree.parse(path)
    files = [path for kind in ("csv", "tex", "svg", "vl.json", "html", "md") for path in tmp_path.rglob(f"*.{kind}")]
    texts = [path.read_text(encoding="utf-8") for path in files]
    for each in odd:
        assert not [path for path, text in zip(files, texts, strict=True) if each in text]
        assert any(each.encode("unicode_escape").decode() in text for text in texts)


def test_what_is_no_record_is_reported_and_left_alone(runs_folder):
    good = runs_folder.record()
    foreign = {
        "notes.txt": "mine", "0123456789ab/record.json": '{"schema_version": 1, "hash": "0123', "a1/record.json": "[1]",
        "a2/record.json": '{"schema_version": 99}', "a3/record.json": b"\xff\xfe\x00", "a4/photo.jpg": "x",
        "a5/config.toml": "",
    }  # fmt: skip
    for name, content in foreign.items():
        path = runs_folder.path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    shutil.copytree(runs_folder.path / good, runs_folder.path / "copy-of-a-run")
    before = {p: p.read_bytes() for p in runs_folder.path.rglob("*") if p.is_file()}
    found = read_records(runs_folder.path)
    write_report(runs_folder.path, runs_folder.path.parent / "report.html")
    assert list(found.records) == [good]
    assert {p.path.name for p in found.problems} == {
        "notes.txt", "0123456789ab", "a1", "a2", "a3", "a4", "a5", "copy-of-a-run"
    }  # fmt: skip
    assert any("Update dipole" in p.message for p in found.problems)
    assert {p: p.read_bytes() for p in runs_folder.path.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize("damage", [
    lambda f: damaged(f, "000000000001/record.json", results={"linear/accuracy": float("nan")}),
    lambda f: damaged(f, "000000000001/record.json", histogram={"edges": [0, 1], "all": [1, 2]}),
    lambda f: damaged(f, "000000000001/record.json", name="\ud800"),
    lambda f: damaged(f, "000000000001/record.json", "[" * 200_000),
    pytest.param(lambda f: open(os.fsencode(f.path) + b"/\xff\xfe.txt", "w").close(), marks=linux),
    pytest.param(lambda f: os.mkfifo(f.path / "pipe"), marks=posix),
    pytest.param(lambda f: ((f.path / "a").mkdir(), os.mkfifo(f.path / "a" / "record.json")), marks=posix),
    lambda f: damaged(f, ".bench/suites/s-small.json", "[" * 200_000),
    lambda f: damaged(f, ".bench/suites/s-small.json", suite="../../../outside"),
    lambda f: damaged(f, ".bench/suites/s-small.json", schema_version=2),
    lambda f: damaged(f, ".bench/suites/s-small.json", columns=[]),
    lambda f: damaged(f, ".bench/suites/s-small.json", jobs=[JOB]),
    lambda f: shutil.copy(f.path / ".bench/suites/s-small.json", f.path / ".bench/suites/copy.json"),
])  # fmt: skip
def test_one_damaged_file_costs_one_line_of_the_report(runs_folder, tmp_path, damage):
    rows = [("a", "infonce", None), ("b", "dcl", "a")]
    runs_folder.suite("s", rows, [("A", "vision")], lambda r, c, s: 0.5 + s / 100, kind="study")
    damage(runs_folder)
    before = sorted(tmp_path.rglob("*"))
    report = write_report(runs_folder.path, tmp_path / "report.md")
    (problems,) = [sheet for sheet in report.tables if sheet.name == "problems"]
    assert len(problems.rows) == 1
    assert set(tmp_path.rglob("*")) - set(before) == {tmp_path / "report.md"}


@pytest.mark.parametrize(("name", "out"), [("../../../outside", "all"), ("\ud800", "v1.0")])
def test_no_name_leads_out_of_the_folder_of_a_report(runs_folder, tmp_path, name, out):
    """Not out of one with a dot in its name either."""
    runs_folder.suite("s", [("a", "infonce", None), ("b", "dcl", "a")], [("A", "vision")], lambda r, c, s: 0.5)
    damaged(runs_folder, ".bench/suites/s-small.json", suite=name)
    runs_folder.record(objective="*x* <b>", domain="<script>")
    (tmp_path / out).mkdir()
    before = set(tmp_path.rglob("*"))
    write_report(runs_folder.path, tmp_path / out)
    new = set(tmp_path.rglob("*")) - before
    assert {path.parent for path in new} == {tmp_path / out, tmp_path / out / "charts"}
    assert {"report.html", "report.md", "other-runs.csv"} <= {path.name for path in new}
    assert "<" not in (tmp_path / out / "report.md").read_text()
