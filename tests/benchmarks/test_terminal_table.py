"""Tables on a terminal: nothing is wider than it, nothing is cut."""

import io

import pytest
from rich.console import Console

from dipole.benchmarks.report.table import Cell, ReportTable
from dipole.benchmarks.run.terminal import print_table


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
