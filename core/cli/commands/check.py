"""`dipole check`: does a loss do what its formula says, in every precision and at every edge?"""

from __future__ import annotations

import argparse
import json

from dipole.core.cli import Runner
from dipole.core.cli.answer import aside


def configure(parser: argparse.ArgumentParser) -> Runner:
    """Put an objective through the conformance kit."""
    parser.add_argument(
        "target", nargs="?", metavar="TARGET", help="an objective as text, or package.module:Class of any loss(a, b)"
    )
    parser.add_argument("--all", action="store_true", help="check every registered objective and regularizer")
    parser.add_argument(
        "--option",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="constructor argument of package.module:Class",
    )
    parser.add_argument(
        "--reference", metavar="OBJECTIVE", help="what package.module:Class should equal, such as infonce"
    )
    parser.add_argument("--only", metavar="CHECK", nargs="+", help="names of checks to run (default: all)")
    parser.add_argument("--slow", action="store_true", help="also the checks that take more than a few seconds")
    parser.add_argument(
        "--engine",
        metavar="NAME",
        help="what serves the row statistics: eager, or triton (its kernels on the GPU, or interpreted without one)",
    )
    parser.add_argument(
        "--detached",
        metavar="INPUT",
        nargs="*",
        help="of loss(a, b): it stops a gradient on purpose, somewhere inside, or that of the inputs named",
    )
    parser.add_argument(
        "--stateful", action="store_true", help="of loss(a, b): its value depends on earlier calls on purpose"
    )
    parser.add_argument(
        "--ranks",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compare two processes with one; to start them takes some seconds, once for all (default: yes)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON list")

    def run(arguments: argparse.Namespace) -> int:
        if arguments.all == (arguments.target is not None):
            parser.error("give either TARGET or --all")
        # Before anything else: Triton's interpreter is chosen when Triton is imported.
        from dipole.core.objectives import engine

        with engine.using(arguments.engine):
            return _run(arguments)

    return run


def _run(arguments: argparse.Namespace) -> int:
    from dipole.core.conformance.kit import all_subjects, check_objective
    from dipole.core.train.recipe import parse_override

    options = {".".join(keys): value for keys, value in map(parse_override, arguments.option)}
    detached = tuple(arguments.detached) or True if arguments.detached is not None else False
    if arguments.ranks and arguments.only is None:
        from dipole.core.conformance.ranks import start

        start()  # they import torch while the other checks run
    reports = []
    for target in all_subjects() if arguments.all else [arguments.target]:
        with aside(arguments.json):
            report = check_objective(
                target,
                options=options or None,
                reference=arguments.reference,
                slow=arguments.slow,
                only=arguments.only,
                detached=detached,
                stateful=arguments.stateful,
                ranks=arguments.ranks,
            )
        reports.append(report)
        if not arguments.json:
            print(report.table(), flush=True)
    if arguments.json:
        print(json.dumps([report.as_dict() for report in reports], indent=2))
    failed = [report.subject for report in reports if not report.ok]
    if len(reports) > 1 and not arguments.json:
        print(
            f"{len(reports) - len(failed)} of {len(reports)} pass"
            + (f"; failing: {', '.join(failed)}" if failed else "")
        )
    return 1 if failed else 0
