"""`dipole eval`: evaluate a saved model again."""

import argparse

from dipole.core.cli.output import print_result, stdout_to_stderr, write
from dipole.core.cli.parser import Runner, add_overrides, add_runs
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
    facts = {"run": str(folder.path), "agrees": agrees, "results": found.results, "notes": found.remarks}
    rows = [("", "now", "recorded")]
    recorded = {name: number(value) for name, value in record.results.items()}
    rows += [(name, number(value), recorded.get(name, "-")) for name, value in found.results.items()]
    lines = [f"run        {folder.path}", f"objective  {printable(record.objective, '')}", "", text_table(rows), ""]
    print_result(arguments.json, facts, "\n".join([*lines, *found.remarks]))
    if arguments.json:
        return 0
    # Domains write nearest sentences and comparisons with the papers as text.
    for path in sorted(folder.path.glob("*.txt")):
        write(f"{path.name}\n\n{read_text(path)}")
    verdict = "The numbers agree."
    if not added:
        verdict = "These data differ from the run's: the numbers are not added to its record."
    elif not agrees:
        verdict = "The numbers differ; versions are in the record."
    write(verdict)
    return 0
