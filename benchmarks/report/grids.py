"""Suites whose rows are a grid of two options: a heat map of one over the other for each column."""

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
    found = [VALUE.findall(text) for text in texts]
    rests = {VALUE.sub(lambda m: m[1], text) for text in texts}
    if len(texts) < 4 or len(rests) != 1 or len({len(pairs) for pairs in found}) != 1:
        return None
    varying = [i for i in range(len(found[0])) if len({pairs[i][1] for pairs in found}) > 1]
    if len(varying) != 2:
        return None
    first, second = varying
    values = [(float(pairs[first][1]), float(pairs[second][1])) for pairs in found]
    sizes = [len({pair[i] for pair in values}) for i in (0, 1)]
    if len(set(values)) != len(values) or 2 * len(values) < sizes[0] * sizes[1]:
        return None
    return (found[0][first][0], found[0][second][0]), values


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
