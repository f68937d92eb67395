"""`dipole add`: record results that another program measured."""

import argparse
from math import isfinite

from dipole.core.cli.output import print_result
from dipole.core.cli.parser import Runner, add_runs
from dipole.core.record import add_results, read_record
from dipole.core.train.run_folder import find_run
from dipole.core.utils.errors import ConfigError
from dipole.core.utils.text import number, printable, text_table


def configure(parser: argparse.ArgumentParser) -> Runner:
    """Add results that another program measured to a run."""
    parser.add_argument("run", metavar="RUN", help="folder of a finished run, or the first digits of its hash")
    parser.add_argument("values", metavar="NAME=VALUE", nargs="+", help="a result, such as detection/voc/AP50=0.824")
    parser.add_argument("--source", required=True, help="what measured it, such as 'detectron2 0.6, voc.yaml'")
    add_runs(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return run


def run(arguments: argparse.Namespace) -> int:
    values = dict(map(_value, arguments.values))
    if not arguments.source.strip():
        raise ConfigError("--source is empty. Say what measured it.")
    folder = find_run(arguments.run, arguments.runs)
    record = read_record(folder.record)
    if record.status != "done":
        raise ConfigError(f"the run {folder.path} is {record.status}. Only a finished run has a model to measure.")
    found = add_results(folder.path, record, values, arguments.source)
    facts = {"run": str(folder.path), "added": {name: each.value for name, each in found.results.items()}}
    rows = [("added", "", "by")]
    rows += [(name, number(each.value), each.source) for name, each in found.results.items()]
    text = f"run        {folder.path}\nobjective  {printable(record.objective, '')}\n\n{text_table(rows)}"
    return print_result(arguments.json, facts, text)


def _value(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        number = float(value)
    except ValueError:
        number = float("nan")
    if not name.strip() or not isfinite(number):
        raise ConfigError(f"{text!r} is not NAME=VALUE with a finite number, such as detection/voc/AP50=0.824.")
    return name.strip(), number
