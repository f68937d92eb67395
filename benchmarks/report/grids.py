"""Suites whose rows differ in one option or two: a line over its values, or a heat map of one over the other."""

import re
from collections.abc import Sequence

from dipole.benchmarks.report import kinds
from dipole.benchmarks.report.picture import Picture, pictured
from dipole.benchmarks.report.results import SuiteResults
from dipole.benchmarks.report.table import number

VALUE = re.compile(r"([A-Za-z_][\w.]*)\s*=\s*([-+]?[0-9.]+(?:e[-+]?[0-9]+)?)")


def options_of(texts: Sequence[str]) -> tuple[tuple[str, str], list[tuple[float, float]]] | None:
    """Names and values of the two options in which texts differ ("hcl(beta=1, temperature=0.5)"); None for others.

    It is a grid where both options have two values or more and half of their pairs are there, each once.
    """
    names, values = _varying(texts)
    if len(names) != 2:
        return None
    pairs = [(first, second) for first, second in values]
    sizes = [len({pair[i] for pair in pairs}) for i in (0, 1)]
    if len(set(pairs)) != len(pairs) or 2 * len(pairs) < sizes[0] * sizes[1]:
        return None
    return (names[0], names[1]), pairs


def option_of(texts: Sequence[str]) -> tuple[str, list[float]] | None:
    """Name and values of the only option in which texts differ, each value once; None for others."""
    names, values = _varying(texts)
    if len(names) != 1 or len(set(values)) != len(values):
        return None
    return names[0], [value for (value,) in values]


def _varying(texts: Sequence[str]) -> tuple[list[str], list[tuple[float, ...]]]:
    """The options in which four texts or more differ, and their values in each; none where something else differs."""
    found = [VALUE.findall(text) for text in texts]
    rests = {VALUE.sub(lambda m: m[1], text) for text in texts}
    if len(texts) < 4 or len(rests) != 1 or len({len(pairs) for pairs in found}) != 1:
        return [], []
    places = [i for i in range(len(found[0])) if len({pairs[i][1] for pairs in found}) > 1]
    return [found[0][i][0] for i in places], [tuple(float(pairs[i][1]) for i in places) for pairs in found]


def one_way(results: SuiteResults) -> list[Picture]:
    """A line of means with intervals over the option's values for each column, where the rows differ in one option."""
    rows = list(results.rows)
    sweep = option_of([row.label for row in rows]) or option_of([row.objective for row in rows])
    if sweep is None:
        return []
    name, values = sweep
    ordered = sorted(zip(values, (row.label for row in rows), strict=True))
    found = []
    for column in results.manifest.columns:
        cells = [(x, cell) for x, label in ordered if (cell := results.cell(label, column.name)) is not None]
        at = [(x, cell.summary) for x, cell in cells if cell.summary is not None]
        xs, means = [x for x, _ in at], [summary.mean for _, summary in at]
        low, high = [summary.low for _, summary in at], [summary.high for _, summary in at]
        named = f"{column.name} ({column.unit})" if column.unit else column.name
        lines = [kinds.Line(column.name, xs, means, low, high)]
        chart = kinds.line_chart(f"{column.name} over {name}", name, named, lines) if len(at) > 1 else None
        found += pictured(chart, f"{column.name} over {name}: mean over seeds, band of the 95 % interval.")
    return found


def two_way(results: SuiteResults) -> list[Picture]:
    """A heat map of means for each column, where the rows are a grid of two options."""
    rows = list(results.rows)
    grid = options_of([row.label for row in rows]) or options_of([row.objective for row in rows])
    if grid is None:
        return []
    (across, up), values = grid
    by = dict(zip((row.label for row in rows), values, strict=True))
    ordered = sorted(by, key=lambda label: (-by[label][1], by[label][0]))
    found = []
    for column in results.manifest.columns:
        tiles = []
        for label in ordered:
            if (mean := results.value(label, column.name)) is not None:
                x, y = by[label]
                tiles.append(kinds.Tile(f"{y:g}", f"{x:g}", mean, number(mean)))
        # Places in the order of the numbers, whichever tiles are missing.
        tiles.sort(key=lambda tile: (-float(tile.row), float(tile.column)))
        named = f"{column.name} ({column.unit})" if column.unit else column.name
        chart = kinds.heat_map(f"{column.name}: {up} by {across}", across, up, tiles, named)
        found += pictured(chart, f"{column.name}: means over seeds, {up} by {across}.")
    return found
