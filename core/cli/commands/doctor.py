"""`dipole doctor`: what works on this machine."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from dipole.core.cli import Runner


def configure(parser: argparse.ArgumentParser) -> Runner:
    """Find out what is missing on this machine, and the cure."""
    parser.add_argument("--runs", type=Path, default=Path("runs"), metavar="DIR", help="folder of runs to look at")
    parser.add_argument("--json", action="store_true", help="print one JSON list")
    return run


def run(arguments: argparse.Namespace) -> int:
    from dipole.core.cli.doctor import examine

    findings = []
    for finding in examine(arguments.runs):
        findings.append(finding)
        if not arguments.json:
            print(f"{finding.state:<8} {finding.name}: {finding.detail}", flush=True)
            if finding.cure:
                print(f"{'':<8}   -> {finding.cure}", flush=True)
    if arguments.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    return 1 if any(finding.state == "broken" for finding in findings) else 0
