"""Suites and folders of runs that somebody else has made: a report, or one short error of ours, and soon."""

import json
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given

from dipole.benchmarks.manifest import read_manifests
from dipole.benchmarks.report.document import make_report
from dipole.benchmarks.report.html import to_html
from dipole.benchmarks.report.write import to_markdown, write_report
from dipole.benchmarks.run_records import read_records
from dipole.benchmarks.suite import read_suite, suites
from dipole.benchmarks.sweep.summary import read_summaries
from dipole.core.train.recipe import read_recipe
from tests.hostile import NO_FILES, ODD, answered, changed, places, settings_of, toml_contents

SUITE = read_recipe(suites()["demo"])


@settings_of(60, is_quick=True)
@given(toml_contents(SUITE))
def test_suites(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "suite.toml"
    path.write_bytes(content)
    answered(lambda: read_suite(path))


@pytest.mark.parametrize("name", ["a" * 5000, "a\0b", "/" * 300, ""])
def test_names_that_no_suite_has(name):
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
    found = read_records(runs)
    assert len(found.records) == (3 if name == "record.json" else 4)
    make_report(runs)
    assert time.process_time() - begin < 3


@pytest.mark.parametrize("kind", NO_FILES)
def test_what_is_no_file_is_no_suite_and_no_search(tmp_path, kind):
    for folder in (tmp_path / ".bench" / "suites", tmp_path / ".bench" / "sweeps"):
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
    to_html(report)
    to_markdown(report)


@pytest.mark.parametrize("text", ["\x1b[31m", "\x00", "\x9b", "\u2028", "a\x0bb\x0c"])
def test_control_characters_are_drawn_as_escapes(runs_folder, tmp_path, text):
    """In labels, columns, titles, objectives and names of metrics: every file is readable, and SVG is XML."""
    rows = [(f"info{text}", f"infonce{text}", None), (f"dcl{text}", "dcl", f"info{text}")]
    runs_folder.suite("mine", rows, [(f"digits{text}", "vision")], lambda *cell: 0.8 + cell[2] / 50, title=f"of {text}")
    run = runs_folder.record("cacr" + text, results={f"knn{text}/accuracy": 0.5}, name=f"named {text}")
    with (runs_folder.path / run / "metrics.jsonl").open("a") as lines:
        lines.writelines(json.dumps({"step": step, f"train/{text}": 0.1 * step}) + "\n" for step in range(101, 105))
    write_report(runs_folder.path, tmp_path / "out.html", tmp_path / "figures")
    drawn = list((tmp_path / "figures").glob("*.svg"))
    assert drawn
    for path in drawn:
        ElementTree.parse(path)
    shown = text.encode("unicode_escape").decode()
    files = [path for kind in ("csv", "tex", "svg", "vl.json", "html") for path in tmp_path.rglob(f"*.{kind}")]
    texts = [path.read_text(encoding="utf-8") for path in files]
    assert not [path for path, each in zip(files, texts, strict=True) if text in each]
    assert any(shown in each for each in texts)
