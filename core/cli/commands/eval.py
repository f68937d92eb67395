"""`dipole eval`: evaluate a saved model again."""

import argparse
import json

from dipole.core.cli import Runner
from dipole.core.cli.output import stdout_to_stderr, write
from dipole.core.cli.parser import add_overrides, add_runs
from dipole.core.train.run_folder import find_run
from dipole.core.utils.received import read_text
from dipole.core.utils.text import number, printable, text_table


def configure(parser: argparse.ArgumentParser) -> Runner:
    """Evaluate the saved model of a run again."""
    add = parser.add_argument
    add("run", metavar="RUN", help="folder of a finished run, or the first digits of its hash")
    add_runs(parser)
    add("--device", help="auto, cpu, cuda, ... (default: that of the recipe)")
    text = "where the data are now, such as vision.data.source=FOLDER or text.senteval=FOLDER"
    add_overrides(parser, text)
    add("--json", action="store_true", help="print one JSON object")
    return run


def run(arguments: argparse.Namespace) -> int:
    folder = find_run(arguments.run, arguments.runs)
    before = folder.read_record()

    from dipole.core.train.model import evaluate_run

    with stdout_to_stderr(arguments.json):
        record, found = evaluate_run(folder, arguments.device, arguments.overrides)
    added = before is None or len(record.evaluations) > len(before.evaluations)
    agrees = added and record.evaluations[-1].agrees
    if arguments.json:
        print(json.dumps({"run": str(folder.path), "agrees": agrees, "results": found.results, "notes": found.remarks}))
        return 0
    write(f"run        {folder.path}\nobjective  {printable(record.objective, '')}")
    rows = [("", "now", "recorded")]
    recorded = {name: number(value) for name, value in record.results.items()}
    rows += [(name, number(value), recorded.get(name, "-")) for name, value in found.results.items()]
    write(f"\n{text_table(rows)}\n")
    for line in found.remarks:
        write(line)
    # Domains write nearest sentences and comparisons with the papers as text.
    for path in sorted(folder.path.glob("*.txt")):
        write(f"{path.name}\n\n{read_text(path)}")
    if not added:
        write("These data differ from the run's: the numbers are not added to its record.")
        return 0
    write("The numbers agree." if agrees else "The numbers differ; versions are in the record.")
    return 0
