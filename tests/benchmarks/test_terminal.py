"""What goes to stdout and what to stderr where a suite is run into a pipe, and what a demo says last."""

import io
import shlex
from pathlib import Path

import pytest
from rich.console import Console

from dipole.benchmarks import commands
from dipole.benchmarks.report.table import Cell, ReportTable
from dipole.benchmarks.run import bench
from dipole.benchmarks.run.terminal import print_table
from dipole.core.cli import main
from tests.benchmarks.conftest import Here

SUITE = """
name = "tiny"
title = "tiny"
[[columns]]
name = "of the neighbours"
metric = "knn/accuracy"
[[rows]]
method = "a name of a method that is too long for any column of eighty characters to have room for it"
objective = "infonce"
[scale.small]
recipe = "gaussian-classes"
seeds = [0]
set = ["train.steps=4", "train.batch_size=32", "toy.points=64", "toy.test_points=40"]
"""


def test_prints_results_on_stdout_and_progress_on_stderr(tmp_path, monkeypatch, capsys):
    (tmp_path / "tiny.toml").write_text(SUITE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(bench, "make_engine", lambda *_, **__: Here())
    command = ["bench", "tiny.toml", "--runs", "the runs", "--jobs", "1"]
    assert main(command) == 0
    done = capsys.readouterr()
    assert "[1/1] done" in done.err
    assert "done  " not in done.out
    assert "neighbours" in done.out
    assert "n = 1" in done.out
    assert not set("\x1b\u2502\u2503") & set(done.out + done.err)
    assert "Report: dipole report 'the runs' -o report.html" in done.out
    assert main([*command, "--plan"]) == 0
    plan = capsys.readouterr().out
    assert "1 finished, 0 to do" in plan
    assert "row a name of a method that is too long for any column of eighty characters to have room" in plan
    assert "\u2026" not in plan
    assert main(command) == 0
    again = capsys.readouterr()
    assert "1 of 1 run is finished already." in again.err
    assert again.out.splitlines()[:3] == done.out.splitlines()[:3]


def test_what_a_demo_says_last_can_be_typed_and_looks_where_it_ran():
    for runs in ("runs", "my runs"):
        lines = [line for line in commands._next(Path(runs)).splitlines() if line.startswith("  dipole ")]
        typed = [shlex.split(line, comments=True) for line in lines]
        assert [words[1] for words in typed] == ["train", "list", "list", "bench"]
        assert ("--runs" in typed[2], "my runs" in typed[2]) == ((runs != "runs",) * 2)
        assert len({line.index("#") for line in lines}) == 1


@pytest.mark.parametrize("command", [["demo", "-o", "x.pdf"], ["report", "nowhere", "-o", "x.pdf"]])
def test_a_name_that_no_report_can_have_is_said_before_anything_is_run(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(command) == 2
    assert "give a name ending in .html or .md" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("width", [80, 60, 132])
def test_twenty_columns_and_long_names_fit_with_every_word(width):
    names = [f"a measurement of number {i} (%)" for i in range(20)]
    labels = ["infonce(temperature=0.07, symmetric=true, a_very_long_option=1.0)", "hcl"]
    rows = [(Cell(label), *(Cell(f"{80 + i}.{i:02d}", 80.0 + i, "n = 3 of 5") for i in range(20))) for label in labels]
    out = io.StringIO()
    print_table(Console(file=out, width=width), ReportTable("s", "A title", ("method", *names), rows))
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= width
    for i in range(20):
        assert text.count(f"{80 + i}.{i:02d}") == 2
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    # Each block has the names of its rows.
    assert text.count("method") == text.count("hcl") > 1


def test_what_fits_is_one_block():
    out = io.StringIO()
    rows = [(Cell("infonce"), Cell("0.5", 0.5))]
    print_table(Console(file=out, width=80), ReportTable("s", "T", ("method", "value"), rows))
    assert out.getvalue().count("method") == 1
