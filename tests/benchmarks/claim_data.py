"""Made-up data for the papers' claims: means of cells by linear programming, so that a claim is true, false or on its
bound. It reads the claims' data files alone and shares nothing with what judges them."""

import fnmatch
import json
import tomllib
from itertools import pairwise, product
from math import exp, inf, log
from pathlib import Path

import numpy as np
from scipy.optimize import linprog

PUBLISHED = Path(__file__).parents[2] / "benchmarks" / "published"
SLACK = 3.0  # points by which a true comparison is off its bound, where there is so much room


def read_claims():
    """Id -> (raw claim, its parts, tables by id) of every claim that has tests."""
    found = {}
    for path in sorted(PUBLISHED.glob("*.json")):
        raw = json.loads(path.read_text())
        readings = {c["id"]: c for c in tomllib.loads(path.with_suffix(".toml").read_text()).get("claims", ())}
        tables = {t["id"]: t for t in raw["tables"]}
        for claim in raw["claims"]:
            if claim.get("tests"):
                found[claim["id"]] = (claim, readings.get(claim["id"], {}).get("parts", []), tables)
    return found


def label(row):
    if isinstance(row, str):
        return row
    return f"{row['method']} / {row['group']}" if row.get("group") else row["method"]


class Grid:
    """A table of runs: values by seed for (row, column), and for the drop of it."""

    trials = None

    def __init__(self, table, values):
        self.columns = tuple(table["columns"])
        self.rows = [type("Row", (), {"label": label(row)}) for row in table["rows"]]
        self.cells = values

    def samples(self, row, column, kind="mean"):
        return None if kind == "std" else self.cells.get((row, column, kind))

    def value(self, row, column, kind="mean"):
        found = self.cells.get((row, column, "mean" if kind == "std" else kind))
        if found is None:
            return None
        return float(np.std(list(found.values()), ddof=1) if kind == "std" else np.mean(list(found.values())))


def comparisons(test, tables):
    """(label, [(cell, cell), ...], sign): the first is above the second where the sign is 1."""
    table = tables[test["table"]]
    rows, kind = [label(row) for row in table["rows"]], test.get("field", "mean")
    printed = {label(row): row["cells"] for row in table["rows"]}

    def cell(row, column, of=test["table"], what="mean"):
        return of, label(row), column, what

    columns = table["columns"] if test.get("columns", "all") == "all" else test["columns"]
    what = "mean" if kind == "std" else kind
    if test["kind"] == "compare":
        others = test["b"] if isinstance(test["b"], list) else [test["b"]]
        for b, c in product(others, columns):
            if printed[label(test["a"])][c]["mean"] is None or printed[label(b)][c]["mean"] is None:
                continue
            name = f"{label(b)} | {c}" if isinstance(test["b"], list) else c
            pair = cell(test["a"], c, what=what), cell(b, c, what=what)
            yield name, [pair], -1 if test["op"] == "<" else 1
    elif test["kind"] in ("difference", "ratio"):
        for c in columns:
            other = cell(test["b"], test.get("columns_b", {}).get(c, c), test.get("table_b", test["table"]))
            yield c, [(cell(test["a"], c), other)], 1
    elif test["kind"] == "along_columns":
        for before, after in pairwise(columns):
            yield f"{before} to {after}", [(cell(test["a"], after), cell(test["a"], before))], 1
    elif test["kind"] == "set_above":
        for c in columns:
            yield c, [(cell(a, c), cell(b, c)) for a, b in product(test["a"], test["b"])], 1
    elif test["kind"] == "spread":
        cells = [cell(row, c) for row, c in product(rows, columns)]
        yield "max - min", list(product(cells, cells)), 1
    elif test["kind"] == "column_difference":
        for row in test["published"]["difference"]:
            yield row, [(cell(row, test["column_a"]), cell(row, test["column_b"]))], 1
    elif test["kind"] == "best_minus_column":
        for row in test["published"]["difference"]:
            others = [c for c in table["columns"] if c != test["column"]]
            yield row, [(cell(row, c), cell(row, test["column"])) for c in others], 1


def region(part):
    kind, bound = part["kind"], part.get("bound", 0.0)
    if kind in ("within", "range"):
        width = part.get("margin", bound)
        return -width, width
    if kind == "about":
        low, high = part.get("low", part.get("amount")), part.get("high", part.get("amount"))
        return low - part["margin"], high + part["margin"]
    if kind == "ratio":
        return log(part["low"]), log(part["high"])
    if kind in ("between", "between on average"):
        return part["low"], part["high"]
    return (-inf, bound) if kind == "less than" else (bound, inf)


def constraints(claim, parts, tables):
    """(part, cell, cell, low, high) of every pair that a claim compares, in the direction it claims."""
    for number, part in enumerate(parts):
        low, high = region(part)
        for i in part.get("tests", range(len(claim["tests"]))):
            for name, pairs, sign in comparisons(claim["tests"][i], tables):
                patterns = [p.replace("[", "[[]") for p in part.get("only", ["*"])]
                if any(fnmatch.fnmatchcase(name, p) for p in patterns):
                    for one, other in pairs:
                        if one != other:
                            yield number, *((one, other) if sign > 0 else (other, one)), low, high


def means(claim, parts, tables, want):
    """Means of all cells that make a claim true ("agrees"), false ("differs"), or leave one of its parts on a bound."""
    if want == "bound":  # parts may exclude that others are on their bounds
        found = (_solved(claim, parts, tables, want, number) for number in range(len(parts)))
        return next(each for each in found if each is not None)
    found = _solved(claim, parts, tables, want, 0)
    assert found is not None, f"the claim cannot be {want}"
    return found


def _solved(claim, parts, tables, want, on_bound):
    limits = list(constraints(claim, parts, tables))
    cells = sorted({cell for _, one, other, *_ in limits for cell in (one, other)})
    at = {cell: i for i, cell in enumerate(cells)}
    is_log = parts[0]["kind"] == "ratio"
    if parts[0]["kind"] == "range" and want != "agrees":
        # One cell apart from the others: by the bound exactly, or by much more.
        return {c: 80.0 + (parts[0]["bound"] * (1 if want == "bound" else 5) if i == 0 else 0.0)
                for i, c in enumerate(cells)}  # fmt: skip
    above, limit, equal, value = [], [], [], []
    for number, one, other, low, high in limits:
        gap = np.zeros(len(cells) + 1)
        gap[at[one]], gap[at[other]] = 1, -1
        slack = np.eye(len(cells) + 1)[-1] * min(1.0, (high - low) / 2 / SLACK)
        if want == "differs":
            if number == 0:  # all of the first part is far on its wrong side
                reach = 0.5 if is_log else 10.0
                above.append(-gap if np.isfinite(high) and low != 0 else gap)
                limit.append(-high - reach if np.isfinite(high) and low != 0 else low - reach)
        elif want == "bound" and number == on_bound:
            equal.append(gap)
            value.append(low if np.isfinite(low) else high)
        else:
            # low + slack <= gap <= high - slack
            if np.isfinite(low):
                above.append(slack - gap)
                limit.append(-low)
            if np.isfinite(high):
                above.append(gap + slack)
                limit.append(high)
    bounds = [(log(0.05), log(20.0)) if is_log else (-30.0, 30.0)] * len(cells) + [(0.0, SLACK)]
    goal = np.append(np.zeros(len(cells)), -1.0)
    found = linprog(goal, above or None, limit or None, equal or None, value or None, bounds)
    if not found.success or (want == "agrees" and found.x[-1] < 0.05):
        return None
    return {cell: exp(x) if is_log else x + 500.0 for cell, x in zip(cells, found.x, strict=False)}


def grids(claim, parts, tables, want, seeds=8):
    """Tables of runs: each cell has exactly its mean, and noise of its own of deviation 0.02."""
    generator = np.random.default_rng(7)
    values = {}
    if parts[0]["kind"] == "spread":
        limits = list(constraints(claim, parts, tables))
        wide = {cell for _, one, _, *_ in limits for cell in [one]}  # `one` is to have the larger spread
        factor = {"agrees": 20.0, "differs": 0.05, "bound": 1.0}[want]
        for cell in sorted({c for _, one, other, *_ in limits for c in (one, other)}):
            spread = 10.0 * (factor if cell in wide else 1.0)
            values[cell] = 500 + spread * _noise(generator, seeds)
    else:
        for cell, mean in means(claim, parts, tables, want).items():
            noise = 0.02 * _noise(generator, seeds)
            values[cell] = mean * np.exp(0.1 * noise) if parts[0]["kind"] == "ratio" else mean + noise
    found = {}
    for (table, row, column, kind), sample in values.items():
        found.setdefault(table, {})[row, column, kind] = dict(enumerate(map(float, sample)))
    return {name: Grid(tables[name], cells) for name, cells in found.items()}


def _noise(generator, n):
    """Mean exactly 0 and standard deviation exactly 1."""
    noise = generator.normal(size=n)
    noise -= noise.mean()
    return noise / noise.std(ddof=1)
