"""`dipole check`: run the conformance checks on an objective."""

import argparse
import json

from dipole.core.cli import Runner
from dipole.core.cli.output import stdout_to_stderr
from dipole.core.train.recipe import parse_override


def configure(parser: argparse.ArgumentParser) -> Runner:
    """Check an objective: values, gradients, precision, ranks."""
    add = parser.add_argument
    add("target", nargs="?", metavar="TARGET", help="an objective as text, or package.module:Class of any loss(a, b)")
    add("--all", action="store_true", help="check every registered objective and regularizer")
    text = "constructor argument of package.module:Class"
    add("--option", metavar="NAME=VALUE", action="append", default=[], help=text)
    add("--reference", metavar="OBJECTIVE", help="objective that package.module:Class should equal, such as infonce")
    add("--only", metavar="CHECK", nargs="+", help="names of checks to run (default: all)")
    add("--slow", action="store_true", help="also the checks that take more than a few seconds")
    text = "engine of the row statistics: eager, or triton (on the GPU, or in its interpreter without one)"
    add("--engine", metavar="NAME", help=text)
    text = "loss(a, b) stops a gradient on purpose: somewhere inside, or of the inputs named"
    add("--detached", metavar="INPUT", nargs="*", help=text)
    add("--stateful", action="store_true", help="loss(a, b) depends on earlier calls on purpose")
    add("--dim", type=int, metavar="N", help="width of the embeddings, if the loss takes no other")
    text = "number of classes, for loss(z, labels), or loss(a, b, labels) if it takes three arguments"
    add("--labels", type=int, metavar="CLASSES", help=text)
    add("--scores", action="store_true", help="call loss(a, b, scores), a score in [0, 1] for each pair")
    add("--temperatures", metavar="NAME", nargs="+", default=[], help="constructor arguments that are temperatures")
    add("--flat", action="store_true", help="loss(a, b) ignores a range of cosines, as a margin does")
    text = "compare two processes with one, which takes some seconds to start (default: yes)"
    add("--ranks", action=argparse.BooleanOptionalAction, default=True, help=text)
    add("--json", action="store_true", help="print one JSON list")

    def run(arguments: argparse.Namespace) -> int:
        if arguments.all == (arguments.target is not None):
            parser.error("give either TARGET or --all")
        # First, because Triton chooses its interpreter when it is imported.
        from dipole.core.objectives import engine

        with engine.using(arguments.engine):
            return _run(arguments)

    return run


def _run(arguments: argparse.Namespace) -> int:
    from dipole.core.conformance.kit import all_subjects, check_objective

    given = [parse_override(text, "--option") for text in arguments.option]
    options = {".".join(keys): value for keys, value in given}
    same = ("reference", "slow", "only", "stateful", "flat", "temperatures", "dim", "labels", "scores", "ranks")
    settings = {name: getattr(arguments, name) for name in same}
    detached: bool | tuple[str, ...] = False
    if arguments.detached is not None:
        detached = tuple(arguments.detached) or True
    if arguments.ranks and arguments.only is None:
        from dipole.core.conformance.ranks import start

        start()  # both processes import torch while the other checks run
    reports = []
    targets = all_subjects() if arguments.all else [arguments.target]
    for target in targets:
        with stdout_to_stderr(arguments.json):
            report = check_objective(target, options=options or None, detached=detached, **settings)
        reports.append(report)
        if not arguments.json:
            print(report.table(), flush=True)
    if arguments.json:
        print(json.dumps([report.as_dict() for report in reports], indent=2))
    failed = [report.subject for report in reports if not report.ok]
    if len(reports) > 1 and not arguments.json:
        failing = f"; failing: {', '.join(failed)}" if failed else ""
        print(f"{len(reports) - len(failed)} of {len(reports)} pass{failing}")
    return 1 if failed else 0
