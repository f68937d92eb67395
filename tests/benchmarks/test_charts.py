"""Charts: their data, their drawing by Vega and their files, against independent numbers."""

import csv
import io
import json
import re
from math import nan
from xml.etree import ElementTree

import numpy as np
import pytest
from scipy import stats

from dipole.benchmarks.manifest import ColumnEntry
from dipole.benchmarks.report import chart_types, charts
from dipole.benchmarks.report.chart import DRAWN, MOST_LINES, MOST_ROWS, NARROW, drawn_at_once, short, to_files, to_svg
from dipole.benchmarks.report.chart_types import ChartRow, Line, Tile, heat_map, interval_chart, line_chart, rank_chart
from dipole.benchmarks.report.charts import pictures
from dipole.benchmarks.report.table import Cell, ReportTable, to_csv, to_latex, to_markdown
from dipole.benchmarks.report.training_charts import Group, mean_line, paths
from dipole.benchmarks.report.write import make_report, write_report
from dipole.benchmarks.results_file import Curve, RunFiles
from dipole.benchmarks.statistics import number

altair = pytest.importorskip("altair")
converter = pytest.importorskip("vl_convert")
LINES = [Line("a", [1, 2, 3], [1.0, nan, 3.0], [0.5, nan, 2.5], [1.5, nan, 3.5]), Line("b", [1, 3], [2, 2])]
ONE_OF_EACH = [
    line_chart("lines", "step", "value", LINES),
    chart_types.histogram("histogram", "x", "y", [0.0, 0.5, 1.0], {"s": [2.0, 0.0]}),
    chart_types.scatter_chart("scatter", "x", "y", {"p": [(0, 0), (3, 1)], "q": [(1, nan)]}),
    interval_chart("intervals", "x", [ChartRow("one", 1.0, 0.5, 1.5, (0.9, 1.1))], 0.5),
    interval_chart("forest", "x", [ChartRow("r", 1, nan, nan, source=s) for s in ("printed", "ours")], None),
    rank_chart("ranks", "mean rank", [("a", 1.2), ("b", 1.8)], [(0, 1)], 0.9),
    heat_map("map", "x", "y", [Tile("r", "c", 1.0, "1.0"), Tile("r", "d", -1.0, "-1")], "v", 0.0),
    heat_map("levels", "x", "y", [Tile("r", "c", 1.0), Tile("q", "c", 2.0)], "v"),
]  # fmt: skip


@pytest.mark.parametrize("chart", ONE_OF_EACH, ids=lambda chart: chart.title)
def test_every_kind_is_valid_and_uses_named_colours(chart):
    """The schema of Vega-Lite accepts the spec. No fixed colour could be illegible in a theme."""
    spec = chart.spec
    altair.Chart.from_dict(spec, validate=True)
    assert spec["description"].startswith(chart.title)
    svg = to_svg(spec)
    if chart.table is None:  # a map has colours of its own
        assert not re.findall(r'(?:fill|stroke)="(?:#|rgb|black|white)', svg)
    assert "NaN" not in json.dumps(spec)
    for text in (chart.x_label, chart.y_label):
        assert not text or f">{text}<" in svg
    found = to_files(chart)
    assert "var(" not in found[".svg"]
    assert f">{chart.title}<" in found[".svg"]
    assert found[".pdf"].startswith(b"%PDF-")


@pytest.mark.parametrize("values", [[], [nan], [3.0], [2.0, 2.0]])
def test_charts_of_little_or_nothing(values):
    """Without data there is no picture. A single or constant value gets axes around it. A title may have emojis."""
    chart = line_chart(60 * "a\U0001f419", "x", "y", [Line("l", list(range(len(values))), values)])
    assert (chart is not None) == any(v == v for v in values)
    if chart is not None:
        assert "NaN" not in to_files(chart)[".svg"]
    intervals = interval_chart("t", "x", [ChartRow("a", v, nan, nan) for v in values])
    assert (intervals is not None) == any(v == v for v in values)


def test_points_and_lengths_follow_the_axes():
    """A histogram over 0 to 1: the corner at one half is in the middle of the axis, its height the axis' top."""
    svg = to_svg(ONE_OF_EACH[1].spec)
    width, height = NARROW
    (outline,) = re.findall(r'<path[^>]* d="(M[^"]+)"[^>]*stroke="var\(--c0\)"', svg)
    assert outline.startswith(f"M0,0L{width / 2:g},0L{width / 2:g},{height}")
    across, up = chart_types.equal_scales([0, 10], [0, 1])
    assert (across[1] - across[0]) / width == pytest.approx((up[1] - up[0]) / height)
    assert across[0] < 0 < 10 < across[1]
    assert [short(value) for value in (81.234567891, nan, None, 0.0, 1234567)] == [81.2346, None, None, 0.0, 1234567]


def test_missing_values_interrupt_lines_and_intervals_show_their_reference():
    svg = to_svg(line_chart("t", "x", "y", [Line("l", [0, 1, 2, 3, 4], [1, 2, nan, 2, 1])]).spec)
    (path,) = re.findall(r'<path[^>]* d="(M[^"]+)"[^>]*stroke="var\(--c0\)"', svg)
    assert path.count("M") == 2
    long = line_chart("t", "x", "y", [Line("l", range(40), [nan if i in (16, 18) else 1.0 for i in range(40)])])
    assert {row["x"] for row in long.rows if row["marker"]} == {*range(0, 40, 4), 17, 39}
    # One estimate of 0.75 against one half: the line at one half is inside the picture, left of the marker.
    chart = interval_chart("t", "x", [ChartRow("a", 0.75, nan, nan)], reference=0.5)
    svg = to_svg({**chart.spec, "width": 300})
    (rule,) = re.findall(r'<line[^>]*translate\(([0-9.]+),0\)"[^>]*stroke="var\(--soft\)" stroke-width="1.5"', svg)
    (marker,) = re.findall(r'<path[^>]*translate\(([0-9.]+),[^>]*fill="var\(--c0\)"', svg)
    assert 0 <= float(rule) < float(marker) <= 300


def test_doubling_values_get_a_logarithmic_axis():
    assert chart_types.doubles([16, 32, 64, 128])
    assert not chart_types.doubles([1, 2, 3, 4])
    assert not chart_types.doubles([0, 1, 2, 4, 8])
    assert not chart_types.doubles(range(1, 21))
    svg = to_svg(line_chart("t", "x", "y", [Line("l", [16, 32, 64, 128], [1, 2, 3, 4])]).spec)
    at = [float(x) for x in re.findall(r'<path[^>]*translate\(([0-9.]+),[^>]*fill="var\(--c0\)"', svg)]
    width = NARROW[0]
    assert at == pytest.approx([0, width / 3, 2 * width / 3, width], abs=0.01)
    rows = [ChartRow(name, value, nan, nan) for name, value in (("fast", 1.0), ("slow", 100.0))]
    for reference, kinds in ((None, {"log"}), (0.0, {None})):
        layers = interval_chart("t", "s", rows, reference).spec["layer"]
        assert {layer["encoding"]["x"]["scale"].get("type") for layer in layers} == kinds


def test_series_differ_in_colour_and_marker_and_long_names_keep_every_line():
    names = [f"infonce(temperature=0.1, a_long_option_of_number={i})" for i in range(8)]
    spec = line_chart("t", "x", "y", [Line(n, [1, 2], [i, i]) for i, n in enumerate(names)]).spec
    points = next(layer for layer in spec["layer"] if "shape" in layer["encoding"])
    for channel in ("color", "shape"):
        scale = (spec["encoding"] | points["encoding"])[channel]["scale"]
        assert (scale["domain"], len(set(scale["range"]))) == (names, 8)
    svg = to_svg(spec)
    for i in range(8):
        assert f"a_long_option_of_number={i})" in re.sub(r"</tspan><tspan[^>]*>", "", svg)


def test_seeds_are_dots_and_printed_numbers_have_a_series(runs_folder):
    rows = [("SimCLR (CL)", "infonce", None)]
    results = runs_folder.results("t", rows, ["CIFAR-10"], lambda r, c, s: 0.8 + 0.01 * s, published="cacr-table6")
    (picture,) = charts.measured(results)
    printed, ours = picture.chart.rows
    assert (printed["series"], ours["series"]) == ("printed", "ours")
    assert printed["x"] == results.table.value("SimCLR (CL)", "CIFAR-10")
    assert [row["x"] for row in picture.chart.datasets["dots"]] == [80, 81, 82]
    assert ours["x"] == 81
    # t of 0.975 at 2 degrees of freedom: 4.302653. Standard error: 1 / sqrt(3).
    assert ours["high"] - ours["x"] == pytest.approx(4.302653 / 3**0.5, abs=1e-4)


def test_grids_are_heat_maps_and_a_sweep_of_one_option_is_a_line(runs_folder):
    """Without missing cells, of one option over the other, with a logarithmic axis where values grow by factors."""
    rows = [("base", "infonce", None), ("hcl", "hcl", "base"), ("dcl", "dcl", "base")]
    value = {"base": 0.5, "hcl": 0.6, "dcl": 0.45}
    results = runs_folder.results("grid", rows, "ab", lambda r, c, s: None if (r, c) == ("dcl", "b") else value[r])
    (picture,) = charts.measured(results)
    found = {(t["row"], t["column"]): (t["value"], t["text"]) for t in picture.chart.rows}
    assert (found["hcl", "a"], found["dcl", "a"]) == ((pytest.approx(10), "60"), (pytest.approx(-5), "45"))
    assert ("dcl", "b") not in found
    assert len(found) == 5

    rows = [(f"hcl(temperature={t}, beta={b})",) * 2 + (None,) for t in (0.1, 1, 0.5) for b in (2, 10)]
    results = runs_folder.results("two", rows, "a", lambda r, c, s: 0.5 if "beta=10" in r else 0.6, seeds=(0,))
    (shown,) = charts.measured(results)
    assert (shown.chart.x_label, shown.chart.y_label) == ("temperature", "beta")
    expected = [(beta, t, text) for beta, text in (("10", "50.00"), ("2", "60.00")) for t in ("0.1", "0.5", "1")]
    assert [(t["row"], t["column"], t["text"]) for t in shown.chart.rows] == expected
    assert charts.varying(["a(x=1)", "a(x=2)", "a(x=3)", "a(x=4)"]) == (["x"], [(1,), (2,), (3,), (4,)])
    assert charts.varying(["a(x=1, y=1)", "a(x=1, y=2)", "b(x=2, y=1)", "a(x=2, y=2)"]) == ([], [])

    values = [0.01 * 1.4**i for i in range(20)]
    rows = [(f"infonce(temperature={t:.4g})",) * 2 + (None,) for t in reversed(values)]
    results = runs_folder.results("sweep", rows, ["digits"], lambda r, c, s: 0.5 + s / 100 + len(r) / 1000)
    chart = charts.measured(results)[0].chart
    assert (chart.x_label, {row["series"] for row in chart.rows}) == ("temperature", {"digits"})
    assert chart.spec["encoding"]["x"]["scale"]["type"] == "log"
    assert [row["x"] for row in chart.rows] == pytest.approx(values, rel=1e-3)
    assert chart.rows[0]["high"] - chart.rows[0]["y"] == pytest.approx(4.302653 / 3**0.5, abs=1e-4)


def test_losses_keep_their_levels_histograms_have_one_scale_and_many_lines_become_a_heat_map(runs_folder):
    rows = [(f"m{i}", f"m{i}", None) for i in range(MOST_LINES + 2)]
    results = runs_folder.results("many", rows, "a", lambda r, c, s: 0.5, seeds=(0,))
    found = charts.pictures(results, RunFiles(folder=runs_folder.path))
    loss = found["Training loss"][0].chart
    logged = (runs_folder.path / results.jobs[0].hash / "metrics.jsonl").read_text().splitlines()
    logged = [json.loads(line) for line in logged]
    assert [row["y"] for row in loss.rows] == pytest.approx([line["train/loss"] for line in logged], rel=1e-5)
    (curve,) = found["Learning curves"]
    assert {t["row"] for t in curve.chart.rows} == {label for label, _, _ in rows}
    histograms = found["Distance histograms"]
    (top,) = {picture.chart.spec["encoding"]["y"]["scale"]["domain"][1] for picture in histograms}
    assert top == pytest.approx(max(row["y"] for p in histograms for row in p.chart.rows), rel=1e-5)


def test_runs_outside_suites_are_compared(runs_folder):
    values, seconds = {"infonce": (0.5, 0.6), "hcl": (0.7, 0.8)}, {"infonce": 10.0, "hcl": 40.0}
    for objective, of in values.items():
        for seed, value in enumerate(of):
            runs_folder.record(objective, seed, results={"knn/accuracy": value}, wall_seconds=seconds[objective])
    (section,) = make_report(runs_folder.path).sections
    (picture,) = section.pictures["Comparison"]
    dots = [(row["label"], row["x"]) for row in picture.chart.datasets["dots"]]
    assert dots == [(name, value) for name, of in values.items() for value in of]
    rows = {row[0].text: (row[1].sort, row[2].sort) for row in section.tables[0].rows}
    assert rows == {"infonce": (2, pytest.approx(0.55)), "hcl": (2, pytest.approx(0.75))}
    (time,) = section.pictures["Cost"]  # all took the same memory
    assert {row["label"]: row["x"] for row in time.chart.rows} == seconds


def test_the_first_lines_summarise_the_findings(runs_folder):
    noise = [0.00, 0.02, 0.01]
    rows = [("infonce", "infonce", None), ("hcl", "hcl", "infonce")]
    results = runs_folder.results(
        "a", rows, "a", lambda r, c, s: 0.8 + (0.005 + noise[s] if r == "hcl" else noise[-s]), title="Study"
    )
    rows = [("base", "base", None), ("start", "none", "base"), ("up", "up", "base")]
    value = {"base": 0.5, "up": 0.7, "start": 0.1}
    runs_folder.suite("b", rows, [("a", "vision")], lambda r, c, s: value[r] + 0.001 * s * (r != "base"))
    study, significant, machines = make_report(runs_folder.path).findings
    (cell,) = results.cells[1:]
    assert cell.against_base.difference == pytest.approx(0.5)
    assert study == (
        "Study: The difference from infonce is not significant: hcl leads by 0.500 points (a). With these seeds, "
        f"smaller differences than these would be missed: {number(cell.detectable)} points (a). "
        "Half of the tests have a power of at least 18 % for 1 point (Holm)."
    )
    assert machines == "Measured on Test processor (Linux x86_64), with dipole 0.1.0."
    # The untrained encoder comes last.
    named = "significant: up leads by 20.10 points (a), start trails by 39.90 points (a)"
    assert f"2 of 2 differences from base are {named}" in significant


def test_studies_draw_differences_from_the_base_with_their_intervals(runs_folder):
    rows = [("base", "infonce", None), ("other", "dcl", "base"), ("start", "none", "base")]
    columns = [(f"{task}: {probe}", "vision") for probe in ("linear", "kNN") for task in ("even", "uneven")]
    gain = {"even: linear": [1, 2, 4], "uneven: linear": [5, 3, 3], "even: kNN": [0, -1, 1], "uneven: kNN": [9, 8, 6]}
    results = runs_folder.results(
        "s", rows, [name for name, _ in columns],
        lambda r, c, s: 0.5 + s / 10 + (r == "other") * gain[c][s] / 100, seeds=(0, 1, 2), kind="study",
    )  # fmt: skip
    drawn = charts.against_base(results)
    assert list(drawn) == ["linear", "kNN"]
    found = drawn["linear"].chart.rows
    assert [(row["label"], row["series"]) for row in found] == [("other", "even"), ("other", "uneven")]
    for row in found:
        gains = gain[f"{row['series']}: linear"]
        low, high = stats.ttest_1samp(gains, 0).confidence_interval()
        assert [row["x"], row["low"], row["high"]] == pytest.approx([np.mean(gains), low, high], rel=1e-4)


def test_twenty_models_of_many_seeds_are_readable(runs_folder, tmp_path):
    """No picture has too many lines or rows. Its note names the choice."""
    rows = [(f"m{i}", f"m{i}", None if i == 0 else "m0") for i in range(20)]
    more = {"values": lambda r, c, s: 0.5 + int(r[1:]) / 100 + (s * 7 % 50) / 1e3, "kind": "study"}
    runs_folder.suite("many", rows, [("a", "vision")], seeds=range(8), **more)
    (section,) = write_report(runs_folder.path, tmp_path / "report.html").sections
    for picture_ in (one for group in section.pictures.values() for one in group):
        for name, most in (("series", MOST_LINES), ("label", MOST_ROWS), ("row", MOST_ROWS)):
            assert len({row.get(name) for row in picture_.chart.rows}) <= most
    (losses,) = {one.note for one in section.pictures["Training loss"]}
    assert "10 of 20 models: the base and the best" in losses
    best = {f"m{i}" for i in range(11, 20)}
    assert {one.chart.rows[0]["series"] for one in section.pictures["Training loss"]} == {"m0", *best}
    html = (tmp_path / "report.html").read_text()
    assert losses in html
    assert len(html) < 3.5e6


def test_further_pictures_are_drawn_when_unfolded(runs_folder, tmp_path):
    rows = [(f"m{i}", f"m{i}", None) for i in range(3)]
    runs_folder.suite("wide", rows, [(f"c{i}", "vision") for i in range(6)], lambda r, c, s: 0.5, seeds=(0,))
    (section,) = write_report(runs_folder.path, tmp_path / "report.html").sections
    losses = section.pictures["Training loss"]
    assert (len(losses), drawn_at_once(losses)) == (18, DRAWN)
    html = (tmp_path / "report.html").read_text()
    assert all(text in html for text in ("Training loss: 6 more", *(one.caption for one in losses)))


@pytest.mark.parametrize("letter", ["m", "e", "i", "W"])
@pytest.mark.parametrize("kind", ["intervals", "ranks", "map"])
def test_names_of_rows_are_not_clipped_in_a_wider_font(letter, kind):
    """Without Liberation Sans a browser takes DejaVu Sans or the like."""
    font_manager = pytest.importorskip("matplotlib.font_manager")
    image_font = pytest.importorskip("PIL.ImageFont")
    labels = [letter * 24, f"{letter * 5} {letter * 6} {letter * 5}", "short"]
    chart = {
        "intervals": lambda: interval_chart("t", "x", [ChartRow(each, 1.0, 0.5, 1.5) for each in labels]),
        "ranks": lambda: rank_chart("t", "x", [(each, i + 1.0) for i, each in enumerate(labels)], [(0, 1)], 1.5),
        "map": lambda: heat_map("t", "x", "y", [Tile(each, "c", 1.0) for each in labels], "value"),
    }[kind]()
    font = image_font.truetype(font_manager.findfont("DejaVu Sans"), 115)  # ten times the size of labels
    left = {}

    def walk(node, x):
        for moved in re.findall(r"translate\(([-\d.]+)", node.get("transform", "")):
            x += float(moved)
        if node.tag.endswith("text") and node.get("text-anchor") == "end":
            left["".join(node.itertext())] = x - font.getlength("".join(node.itertext())) / 10
        for child in node:
            walk(child, x)

    walk(ElementTree.fromstring(to_svg(chart.spec)), 0.0)
    assert set(labels) <= left.keys()
    assert min(left[each] for each in labels) >= 0


def test_csv_cannot_run_formulas_and_markdown_cannot_hold_markup():
    hostile = '=HYPERLINK("http://x")|<b>`*'
    sheet = ReportTable("s", "T", ("a", "=b"), [(Cell(hostile), Cell("-1.5", -1.5, "@x"))])
    head, row = csv.reader(io.StringIO(to_csv(sheet)))
    assert (head, row) == (["a", "'=b", "'=b: note"], ["'" + hostile, "-1.5", "'@x"])
    inert = ["-1.5", "+2e-05", "-1.50 to 2e-05", "-3 \N{PLUS-MINUS SIGN} 0.1", "x=1"]
    formulas = ["=1+1", "+1+1", "-1+1", "@SUM(A1)", "\t=1", "\n=1", "-", "-0.2+cmd|' /C calc'!A0", "-1 to 2;=1"]
    sheet_of_texts = ReportTable("s", "T", ("a",), [(Cell(text),) for text in [*inert, *formulas]])
    written = [row[0] for row in csv.reader(io.StringIO(to_csv(sheet_of_texts), newline=""))][1:]
    assert written == [*inert, *("'" + text for text in formulas)]
    assert Cell("\r=1").text == "\\r=1"  # control characters are escapes
    line = to_markdown(sheet).splitlines()[-1]
    assert line == r"""| =HYPERLINK("http://x")&#124;&#60;b&#62;\`\* | -1.5 (@x) |"""


def test_seeds_that_were_logged_at_other_steps_are_averaged_over_the_range_that_all_cover():
    line = mean_line("m", [Curve((1, 2, 3), (1, 2, 3)), Curve((2, 3, 4), (4, 5, 6))], factor=10)
    assert (line.x, line.y) == ([2, 3], [30, 40])
    assert line.high[0] - line.y[0] == pytest.approx(10 * 2**0.5)
    # By hand: the second is 10 at 2 and 30 at 6, so 15 at 3 and 25 at 5. The first is 2 at 1, 4 at 3, 8 at 5, 8 at 7.
    line = mean_line("m", [Curve((1, 3, 5, 7), (2, 4, 8, 8)), Curve((2, 6), (10, 30))])
    assert line.x == [2, 3, 5, 6]
    assert line.y == pytest.approx([(3 + 10) / 2, (4 + 15) / 2, (8 + 25) / 2, (8 + 30) / 2])
    assert line.high[0] - line.low[0] == pytest.approx(2 * (10 - 3) / 2**0.5)
    # Nothing is made up outside of what all have. A run that was told a step twice counts with the later value.
    assert mean_line("m", [Curve((1, 2), (0, 0)), Curve((3, 4), (0, 0))]).x == []
    assert mean_line("m", [Curve((1, 2, 2, 3), (1, 5, 2, 3)), Curve((1, 3), (1, 3))]).y == [1, 2, 3]
    assert mean_line("m", [Curve((), ()), Curve((1, 2), (1, 2))]).y == [1, 2]


def test_numbers_have_about_four_digits_and_a_table_in_latex_its_best_bold():
    values = [0.0, 2e-5, 0.0123, 1.5, -834.06, 84321.7, 1583392448.0]
    assert [number(v) for v in values] == ["0.000", "2e-05", "0.012", "1.50", "-834.1", "84322", "1.58e+09"]
    rows = [(Cell("a_b"), Cell("50 % & more", 50.0, mark="best")), (Cell("b"), Cell("missing", mark="open"))]
    rows += [(Cell(r"\x{1}"), Cell("1 \N{PLUS-MINUS SIGN} 2", 1.0))]
    sheet = ReportTable("s", "T", ("method", "x"), rows)
    assert sheet.numeric == (False, True)
    lines = to_latex(sheet).splitlines()
    assert (lines[1], lines[5]) == (r"\begin{tabular}{lr}", r"a\_b & \textbf{50 \% \& more} \\")
    assert lines[7] == r"\textbackslash{}x\{1\} & 1 $\pm$ 2 \\"


def test_embedded_points_are_drawn_by_class_with_true_angles(runs_folder):
    written = runs_folder.suite("planar", [("plane", "none", None)], [("bars", "toy")], lambda r, c, s: 0.5)
    results = runs_folder.read(written.model_copy(update={"show": ["scatter"]}))
    assert "Embedded points" not in pictures(results, RunFiles(folder=runs_folder.path))
    folder = runs_folder.path / written.jobs[0].hash
    corners = {"x": [0, 1, 1, 0], "y": [0, 0, 1, 1], "label": [0, 0, 1, 1]}
    (folder / "points.json").write_text(json.dumps(corners))
    (picture,) = pictures(results, RunFiles(folder=runs_folder.path))["Embedded points"]
    points = [(row["series"], row["x"], row["y"]) for row in picture.chart.rows]
    assert points == [("class 1", 0, 0), ("class 1", 1, 0), ("class 2", 1, 1), ("class 2", 0, 1)]
    assert (picture.chart.x_label, picture.chart.y_label) == ("first coordinate", "second coordinate")
    (folder / "points.json").write_text('{"x": [1], "y": []}')
    assert "Embedded points" not in pictures(results, RunFiles(folder=runs_folder.path))


def test_columns_of_different_data_are_pictures_of_their_own_and_one_measurement_is_no_curve(runs_folder):
    columns, files = [f"{data}/k={k}" for data in ("a", "b") for k in (1, 2, 4)], RunFiles(folder=runs_folder.path)
    results = runs_folder.results("curve", [("m", "infonce", None)], columns, lambda r, c, s: 0.5, (0,), kind="figure")
    found = pictures(results, files)
    assert [each.caption.partition(":")[0] for each in found["Measurements"]] == ["a", "b"]
    for each in found["Measurements"]:
        assert [(row["series"], row["x"], row["y"]) for row in each.chart.rows] == [("m", k, 50) for k in (1, 2, 4)]
    assert "Conditional entropy" in found
    line = {"step": 10, "diag/conditional_entropy": 5.0, "diag/conditional_entropy_maximum": 5.2}
    for job in results.jobs:
        (runs_folder.path / job.hash / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert "Conditional entropy" not in pictures(results, files)
    asked = runs_folder.read(results.manifest.model_copy(update={"show": ["entropy"]}))
    assert "Conditional entropy" in pictures(asked, files)


def test_a_path_is_one_column_over_another_at_common_steps():
    names = ("losses/unsupervised", "losses/supervised")
    columns = [ColumnEntry(name=n, metric=n, factor=1.0, higher_is_better=False, unit="bits") for n in names]
    over, of = Curve((10, 20, 30), (2.0, 1.5, 1.0)), Curve((10, 20, 30, 40), (0.9, 0.6, 0.5, 0.1))
    curves = {"m": [{"eval/losses/unsupervised": over, "eval/losses/supervised": of}]}
    (picture,) = paths(Group(tuple(columns), ""), curves)
    assert (picture.chart.x_label, picture.chart.y_label) == ("losses/unsupervised (bits)", "losses/supervised (bits)")
    # As training goes on, the loss falls. The step that only one column has is left out.
    assert [(row["x"], row["y"]) for row in picture.chart.rows] == [(2.0, 0.9), (1.5, 0.6), (1.0, 0.5)]
    assert paths(Group((columns[0],), ""), curves) == []
