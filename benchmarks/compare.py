"""`dipole compare`: two runs side by side. Heavy imports happen when it runs."""

from __future__ import annotations

import argparse
import json
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dipole.core.cli import Runner

if TYPE_CHECKING:
    from dipole.core.record import RunRecord

LONGEST = 48
"""Characters of a setting that are printed. --json prints all of them."""


def compare(parser: argparse.ArgumentParser) -> Runner:
    """Compare two runs: settings that differ, numbers with intervals, a verdict if there is one.

    Other seeds of the same settings in the same folders are included. A verdict needs two seeds of each.
    """
    parser.add_argument("first", metavar="RUN", help="folder of a finished run, or the first digits of its hash")
    parser.add_argument("second", metavar="RUN", help="the run to compare it with")
    parser.add_argument("--runs", type=Path, default=Path("runs"), metavar="DIR", help="folder to look hashes up in")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return _compare


def _compare(arguments: argparse.Namespace) -> int:
    from dipole.core.train.run_folder import find_run
    from dipole.core.utils.errors import ConfigError
    from dipole.core.utils.text import number, shortened, text_table

    one, other = (find_run(name, arguments.runs).path for name in (arguments.first, arguments.second))
    if one.resolve() == other.resolve():
        raise ConfigError(f"both are the run {one}. Give two different runs, see `dipole list runs`.")
    first, second = (_with_siblings(folder) for folder in (one, other))
    if _without(first[0].config) == _without(second[0].config):  # two seeds of one setting
        first, second = first[:1], second[:1]
    settings = _differences(_without(first[0].config), _without(second[0].config))
    shared = [name for name in first[0].results if name in second[0].results]
    numbers = [found for name in shared if (found := _compared(name, first, second))]
    if arguments.json:
        runs = [[record.hash for record in group] for group in (first, second)]
        print(json.dumps({"runs": runs, "settings": settings, "numbers": numbers}, indent=2))
        return 0
    for title, group in (("first", first), ("second", second)):
        seeds = ", ".join(str(record.seed) for record in group)
        print(f"{title:<6}  {group[0].hash}  {group[0].name}  {group[0].objective}  seeds {seeds}")
    rows = [("setting", "first", "second")]
    rows += [(key, shortened(_shown(a), LONGEST), shortened(_shown(b), LONGEST)) for key, (a, b) in settings.items()]
    table = [("number", "first", "second", "second - first", "verdict")]
    for each in numbers:
        gap = number(each["difference"])
        if each["interval"]:
            gap += " ({} to {})".format(*map(number, each["interval"]))
        table.append((each["name"], number(each["first"]), number(each["second"]), gap, each["verdict"]))
    print("\n" + (text_table(rows, words=range(3)) if settings else "Only the seed differs."))
    print("\n" + (text_table(table) if numbers else "The runs have no number in common."))
    if not settings:
        print("\nThese are two seeds of one setting. Their difference shows its spread.")
    elif len(first) < 2 or len(second) < 2:
        print("\nA verdict needs two seeds of each. Train more: --set seed=1.")
    return 0


def _with_siblings(folder: Path) -> list[RunRecord]:
    """Return a run and one finished run of each other seed with the same settings, from the same folder."""
    from dipole.core.record import read_record
    from dipole.core.record.listing import RECORD, run_folders
    from dipole.core.utils.errors import ConfigError, RecordError

    record = read_record(folder / "record.json")
    if record.status != "done":
        raise ConfigError(f"the run {folder} is {record.status}. Only finished runs can be compared.")
    found = {record.seed: record}
    for path in run_folders(folder.resolve().parent):
        try:
            other = read_record(path / RECORD)
        except RecordError:
            continue
        if other.status == "done" and _without(other.config) == _without(record.config):
            found.setdefault(other.seed, other)
    return list(found.values())


def _without(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in ("seed", "name", "description")}


def _differences(first: dict[str, Any], second: dict[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    found: dict[str, tuple[Any, Any]] = {}
    for key in dict.fromkeys([*first, *second]):
        a, b = first.get(key), second.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found |= _differences(a, b, f"{prefix}{key}.")
        elif a != b:
            found[prefix + key] = (a, b)
    return found


def _compared(name: str, first: list[RunRecord], second: list[RunRecord]) -> dict[str, Any] | None:
    """Return the means and their difference, with Welch's 95 % interval if both have two seeds or more."""
    from dipole.benchmarks.statistics import summarize, welch

    a, b = ([float(v) for r in group if (v := r.results.get(name)) is not None] for group in (first, second))
    if not a or not b:
        return None
    one, other = summarize(a), summarize(b)
    means = {"first": one.mean, "second": other.mean, "seeds": [one.n, other.n], "difference": other.mean - one.mean}
    interval, verdict = None, "one seed"
    if one.n > 1 and other.n > 1:
        found = welch(other.mean, other.std, other.n, one.mean, one.std, one.n)
        interval, verdict = [found.low, found.high], "undecided"
        if isnan(found.low):
            interval, verdict = None, "no spread"
        elif found.low > 0:
            verdict = "second is higher"
        elif found.high < 0:
            verdict = "first is higher"
    return {"name": name, **means, "interval": interval, "verdict": verdict}


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else json.dumps(value)
