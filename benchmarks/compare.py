"""`dipole compare`: two runs side by side. Heavy imports happen when it runs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dipole.core.cli.output import write
from dipole.core.cli.parser import Runner, add_runs
from dipole.core.utils.errors import ConfigError, RecordError
from dipole.core.utils.text import counted, number, printable, shortened, text_table

if TYPE_CHECKING:
    from dipole.core.record import RunRecord

LONGEST = 48  # Characters of a setting that are printed. --json prints all of them.
LEVEL = 0.05  # A verdict needs a smaller p value, after the correction for all numbers


def compare(parser: argparse.ArgumentParser) -> Runner:
    """Compare two runs: settings, numbers, intervals and verdicts.

    Other seeds of the same settings in the same folder are included. Seeds that both have are compared in pairs
    (paired t-test). Where too few are common, all seeds are two samples (Welch's test). p values are corrected for all
    numbers (Holm) at level 0.05. A verdict needs two seeds of each.
    """
    parser.add_argument("first", metavar="RUN", help="folder of a finished run, or the first digits of its hash")
    parser.add_argument("second", metavar="OTHER", help="the run to compare it with")
    add_runs(parser, "folder to look hashes up in")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return _compare


def _compare(arguments: argparse.Namespace) -> int:
    from dipole.core.train.run_folder import find_run

    one, other = (find_run(name, arguments.runs).path for name in (arguments.first, arguments.second))
    if one.resolve() == other.resolve():
        raise ConfigError(f"both are the run {one}. Give two different runs, see `dipole list runs`.")
    groups = _common_seeds(_with_siblings(one), _with_siblings(other))
    first, second = groups
    settings = _differences(_without(first[0].config), _without(second[0].config))
    known = {name for group in groups for record in group for name in record.results}
    shared = [name for name in first[0].results if name in second[0].results]
    # "untrained/knn/accuracy" is a baseline of "knn/accuracy", and no result of the training.
    baselines = [name for name in shared if name.partition("/")[2] in known]
    asked = [name for name in shared if name not in baselines]
    unknown = [name for name in asked if None in (_mean(name, first), _mean(name, second))]
    numbers = _compared([name for name in asked if name not in unknown], groups)
    means = {name: [_mean(name, group) for group in groups] for name in baselines}
    if arguments.json:
        runs = [[record.hash for record in group] for group in groups]
        answer = {"runs": runs, "settings": settings, "numbers": numbers, "baselines": means, "not_finite": unknown}
        print(json.dumps(answer | {"level": LEVEL, "correction": "Holm"}, indent=2))
    else:
        _print(groups, settings, numbers, means)
        if unknown:
            write(f"\nNot compared, as all values of one side are not finite: {', '.join(unknown)}.")
    return 0


def _common_seeds(first: list[RunRecord], second: list[RunRecord]) -> tuple[list[RunRecord], list[RunRecord]]:
    """Return the runs to compare. Two runs of one setting are compared alone, or on the seeds of both folders."""
    if _determining(first[0]) != _determining(second[0]):
        return first, second
    if first[0].seed != second[0].seed:
        return first[:1], second[:1]
    common = {each.seed for each in first} & {each.seed for each in second}
    return [each for each in first if each.seed in common], [each for each in second if each.seed in common]


def _print(
    groups: tuple[list[RunRecord], list[RunRecord]],
    settings: dict[str, tuple[Any, Any]],
    numbers: list[dict[str, Any]],
    means: dict[str, list[float | None]],
) -> None:
    first, second = groups
    for title, group in (("first", first), ("second", second)):
        seeds = ", ".join(map(str, sorted(record.seed for record in group)))
        line = f"{title:<6}  {group[0].hash}  {group[0].name}  {group[0].objective}  seeds {seeds}"
        write(printable(line, keep=""))
    is_repeated = first[0].seed == second[0].seed
    rows: list[tuple[str, ...]] = [("setting", "first", "second")]
    rows += [(key, shortened(_shown(a), LONGEST), shortened(_shown(b), LONGEST)) for key, (a, b) in settings.items()]
    alike = ("Only the seed differs.", "Settings and seed are the same.")[is_repeated]
    write("\n" + (text_table(rows, words=range(3)) if settings else alike))
    write("\n" + (_table(numbers) if numbers else "The runs have no result in common."))
    if means:
        rows = [("baseline", "first", "second")]
        rows += [(name, *("-" if each is None else f"{each:.4g}" for each in both)) for name, both in means.items()]
        write(f"\n{text_table(rows)}")
    tests = [each["test"] for each in numbers if each["p"] is not None]
    if tests:
        write(
            f"\nTests: {' and '.join(sorted(set(tests)))}, two-sided.\nVerdicts are at level {LEVEL} after Holm's "
            f"correction for {counted(len(tests), 'number')}. Intervals are 95 %, without correction.\nDetectable is "
            "the smallest difference that these seeds show with 80 % power, among as many numbers."
        )
    prints = [{each.seed: each.data.get("fingerprint") for each in group} for group in groups]
    if any(prints[0][seed] != prints[1][seed] for seed in prints[0].keys() & prints[1].keys()):
        write("\nThe runs read different data, by the fingerprints in their records.")
    elif not settings and is_repeated:
        write("\nThe same was trained twice. A difference comes from the machines or versions.")
    elif not settings:
        write("\nThese are two seeds of one setting. Their difference shows its spread.")
    elif len(first) < 2 or len(second) < 2:
        write("\nA verdict needs two seeds of each. Train more: --set seed=1.")


def _table(numbers: list[dict[str, Any]]) -> str:
    table = [("result", "first", "second", "second - first", "p (Holm)", "detectable", "verdict")]
    for each in numbers:
        gap = number(each["difference"])
        if each["interval"]:
            gap += " ({} to {})".format(*map(number, each["interval"]))
        p, least = ("-" if each[key] is None else number(each[key]) for key in ("p_holm", "detectable"))
        table.append((each["name"], number(each["first"]), number(each["second"]), gap, p, least, each["verdict"]))
    return text_table(table)


def _with_siblings(folder: Path) -> list[RunRecord]:
    """Return a run and one finished run of each other seed with the same settings, from the same folder."""
    from dipole.core.record import RECORD, read_record, run_folders, with_additions

    record = with_additions(read_record(folder / RECORD), folder)
    if record.status != "done":
        raise ConfigError(f"the run {folder} is {record.status}. Only finished runs can be compared.")
    found = {record.seed: record}
    for path in run_folders(folder.resolve().parent):
        try:
            other = with_additions(read_record(path / RECORD), path)
        except RecordError:
            continue
        if other.status == "done" and _determining(other) == _determining(record):
            found.setdefault(other.seed, other)
    return list(found.values())


def _determining(record: RunRecord) -> dict[str, Any]:
    """Return what determines the result besides the seed: not the device, for example."""
    return _without(record.identity or record.config)


def _without(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in ("seed", "name", "description")}


def _differences(first: dict[str, Any], second: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    from dipole.core.train.schedule import flat

    a, b = dict(flat(first)), dict(flat(second))
    return {key: (a.get(key), b.get(key)) for key in dict.fromkeys([*a, *b]) if a.get(key) != b.get(key)}


def _values(name: str, group: list[RunRecord]) -> dict[int, float]:
    return {each.seed: float(value) for each in group if (value := each.results.get(name)) is not None}


def _mean(name: str, group: list[RunRecord]) -> float | None:
    values = _values(name, group).values()
    return sum(values) / len(values) if values else None


def _compared(names: Sequence[str], groups: Sequence[list[RunRecord]]) -> list[dict[str, Any]]:
    """Return for each name the means over the compared seeds, the test of their difference, and the verdict."""
    from dipole.benchmarks.statistics import difference, holm, summarize
    from dipole.benchmarks.statistics.power import detectable_by

    sides = {name: [_values(name, group) for group in groups] for name in names}
    tests = {name: difference(*both) for name, both in sides.items() if min(map(len, both)) > 1}
    corrected = dict(zip(tests, holm([test.p_t for test in tests.values()]), strict=True))
    alpha = LEVEL / max(1, sum(map(isfinite, corrected.values())))
    found = []
    for name, (one, other) in sides.items():
        said, known, interval = "one seed", {}, None
        if name in tests:
            test, said = tests[name], f"Welch's t-test on {len(one)} and {len(other)} seeds"
            if test.method == "paired t":
                one, other = ({seed: side[seed] for seed in sorted(one.keys() & other.keys())} for side in (one, other))
                said = f"paired t-test on {len(one)} common seeds"
            known = {"p": test.p_t, "spread": test.spread, "detectable": detectable_by(test, alpha)}
            known = {key: value for key, value in (known | {"p_holm": corrected[name]}).items() if isfinite(value)}
            if isfinite(test.low):
                interval = [test.low, test.high]
        first, second = (summarize(list(side.values())).mean for side in (one, other))
        row = {"name": name, "first": first, "second": second, "seeds": [len(one), len(other)]}
        row |= {"difference": second - first, "p": None, "test": said, "interval": interval, "spread": None}
        row |= {"detectable": None, "p_holm": None, **known}
        found.append(row | {"verdict": _verdict(row)})
    return found


def _verdict(row: dict[str, Any]) -> str:
    if row["test"] == "one seed":
        return "one seed"
    if row["p"] is None:
        return "no spread"
    if row["interval"] is None and row["difference"] == 0:
        return "equal"
    if row["p_holm"] >= LEVEL:
        return "undecided"
    return "second is higher" if row["difference"] > 0 else "first is higher"


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else json.dumps(value)
