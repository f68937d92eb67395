"""`dipole theory`: evaluate both sides of the papers' inequalities on a finished run."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from dipole.core.cli import Runner
from dipole.core.cli.output import stdout_to_stderr
from dipole.core.utils.text import counted

if TYPE_CHECKING:
    from dipole.core.evaluation.theory.report import Report


def configure(parser: argparse.ArgumentParser) -> Runner:
    """Evaluate the theorems of the papers on a run.

    Examples:
        dipole theory 3f2a --k 4 --block 5
        dipole theory 3f2a --picture theory.svg
        dipole theory --list
        dipole theory --figure1 figure1.svg
    """
    parser.add_argument(
        "run", metavar="RUN", nargs="?", help="folder of a finished run, or the first digits of its hash"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs"), metavar="DIR", help="where hashes are looked up")
    parser.add_argument("--device", help="auto, cpu, cuda, ... (default: that of the recipe)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--list", action="store_true", help="list every theorem, what it needs and its functions")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="also draw a picture: .svg, .png or .pdf")
    parser.add_argument("--figure1", type=Path, metavar="FILE", help="draw Figure 1 of Arora et al.; needs no run")

    data = parser.add_argument_group("data")
    data.add_argument("--split", choices=("train", "test"), default="test", help="default test")
    data.add_argument(
        "--labels", default="given", metavar="HOW", help="given; blocks:N (N consecutive rows are a class); or a file"
    )
    data.add_argument(
        "--features",
        choices=("auto", "raw", "unit"),
        default="auto",
        help="raw, on the unit sphere, or (auto) as the objective's similarity takes them",
    )
    data.add_argument("--scale", type=float, default=1.0, help="factor of the features")
    data.add_argument("--points", type=int, default=1000, help="largest number of points (default 1000)")
    data.add_argument("--prior", default="measured", help="class prior: measured (default) or uniform")
    data.add_argument("--seed", type=int, default=0, help="seed of drawn points, tasks and blocks")

    arora = parser.add_argument_group("Arora et al.")
    arora.add_argument("--loss", choices=("hinge", "logistic", "both"), default="both")
    arora.add_argument("--k", type=int, default=4, help="negatives of Theorem 6.1 (default 4)")
    arora.add_argument("--block", type=int, default=5, help="members of a block of Proposition 6.2 (default 5)")
    arora.add_argument("--draws", type=int, default=4, help="draws of the blocks (default 4)")
    arora.add_argument("--tasks", type=int, default=50, help="fitted tasks of the trained classifier (default 50)")
    arora.add_argument("--epsilon", type=float, default=0.1, help="eps of Lemma 5.1 (default 0.1)")

    margins = parser.add_argument_group("LMCL")
    margins.add_argument("--delta-pos", type=float, help="lower end of the margin (default: the run's, or 0.1)")
    margins.add_argument("--delta-neg", type=float, help="upper end of the margin (default: the run's, or 0.5)")
    margins.add_argument("--mu", type=float, help="slack of Theorem 3 (default: half the margin)")

    free = parser.add_argument_group("constants that no paper gives")
    free.add_argument(
        "--delta", type=_share, default=0.05, help="bounds hold with probability 1 - delta (default 0.05)"
    )
    free.add_argument("--constant", type=float, default=1.0, help="constant in the O of Gen_M (default 1)")
    free.add_argument("--rademacher", type=float, default=0.0, help="complexity of the class (default 0: left out)")
    free.add_argument("--tuples", type=int, help="M of Gen_M (default: the number of points)")
    free.add_argument("--gamma-constant", type=float, help="c' of Lemma 5.1 (default: the one derived in the docs)")
    free.add_argument("--smoothness", type=float, default=1.0, help="S of CLLR Theorem 2 (default 1)")
    free.add_argument("--data-constant", type=float, default=1.0, help="C(X) of CLLR Theorem 3 (default 1)")
    return run


def _share(text: str) -> float:
    with suppress(ValueError):
        if 0 < float(text) < 1:
            return float(text)
    raise argparse.ArgumentTypeError(f"must be between 0 and 1, got {text!r}")


def run(arguments: argparse.Namespace) -> int:
    from dipole.core.utils.errors import ConfigError

    if arguments.list:
        return _list(arguments.json)
    if arguments.figure1 is not None:
        from dipole.core.evaluation.theory.pictures import draw_figure_1

        draw_figure_1(arguments.figure1)
        if arguments.run is None:
            print(json.dumps({"figure1": str(arguments.figure1)}) if arguments.json else arguments.figure1)
            return 0
        print(arguments.figure1, file=sys.stderr if arguments.json else sys.stdout)
    if arguments.run is None:
        raise ConfigError("give a RUN (its folder, or the first digits of its hash), --list, or --figure1 FILE.")

    from dipole.core.train.run_folder import find_run

    if arguments.picture is not None:
        from dipole.core.evaluation.theory.pictures import check_name

        check_name(arguments.picture)
    folder = find_run(arguments.run, arguments.runs)

    from dipole.core.evaluation.theory.choices import LOSSES, Choices
    from dipole.core.train.theory import theory_of_run

    choices = Choices(
        losses=LOSSES if arguments.loss == "both" else (arguments.loss,),
        confidence=1 - arguments.delta,
        **{
            name: getattr(arguments, name)
            for name in (
                "k", "block", "draws", "tasks", "points", "prior", "seed", "epsilon", "mu", "delta_pos", "delta_neg",
                "constant", "rademacher", "tuples", "gamma_constant", "smoothness", "data_constant",
            )
        },
    )  # fmt: skip
    with stdout_to_stderr(arguments.json):
        report = theory_of_run(
            folder,
            choices,
            device=arguments.device,
            split=arguments.split,
            labels=arguments.labels,
            form=arguments.features,
            scale=arguments.scale,
        )
    if arguments.picture is not None:
        from dipole.core.evaluation.theory.pictures import draw_report

        draw_report(report, arguments.picture, folder.path.name)
    if arguments.json:
        print(json.dumps({"run": str(folder.path)} | report.as_dict()))
    else:
        print(f"run  {folder.path}\n{_text(report)}")
        if arguments.picture is not None:
            print(arguments.picture)
    for each in report.broken:
        print(
            f"error: {each.theorem.paper}, {each.theorem.name} ({each.case}) must hold on any features but does not.",
            file=sys.stderr,
        )
    return 1 if report.broken else 0


def _text(report: Report) -> str:
    from dipole.core.utils.text import number

    of = report.chosen_from
    head = f"{report.points} of {counted(of[0], 'point')}" + (
        f", {report.classes} of {counted(of[1], 'class', 'classes')}" if of[1] else ", no labels"
    )
    values = [number(q.value) + (f" +- {q.error:.2g}" if q.error > 0 else "") for q in report.quantities]
    name, width = (max(map(len, cells), default=0) for cells in ([q.name for q in report.quantities], values))
    lines = [f"data {head}", ""]
    lines += [
        f"{q.name:<{name}}  {value:>{width}}  {q.about}" for q, value in zip(report.quantities, values, strict=True)
    ]
    table = [("inequality", "case", "sides, each at most the next", "holds")]
    for each in report.inequalities:
        sides = " <= ".join(f"{label} {number(value)}" for label, value in each.sides)
        free = ", ".join(f"{key} {value:g}" for key, value in each.free.items())
        table.append(
            (
                f"{each.theorem.paper}, {each.theorem.name}",
                each.case,
                sides + (f"  [free: {free}]" if free else ""),
                ("yes" if each.holds else "no") + ("" if each.theorem.always else " *"),
            )
        )
    widths = [max(len(row[column]) for row in table) for column in range(2)]
    lines.append("")
    lines += [f"{row[3]:<6} {row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]}" for row in table]
    assumed = {each.theorem.key: each.theorem for each in report.inequalities if not each.theorem.always}
    if assumed:
        lines += ["", "* assumptions that are not measured:"]
        lines += [f"  {theorem.paper}, {theorem.name}: {theorem.assumption}" for theorem in assumed.values()]
    if report.missing:
        lines += ["", "not computed:"]
        lines += [f"  {_name(key)}: {reason}" for key, reason in report.missing.items()]
    return "\n".join(lines)


def _name(key: str) -> str:
    from dipole.core.evaluation.theory.theorems import THEOREMS

    return next((f"{each.paper}, {each.name}" for each in THEOREMS if each.key == key), key)


def _list(as_json: bool) -> int:
    from dataclasses import asdict

    from dipole.core.evaluation.theory.theorems import THEOREMS

    if as_json:
        print(json.dumps([asdict(theorem) for theorem in THEOREMS], indent=2))
        return 0
    for theorem in THEOREMS:
        kind = "holds on any features" if theorem.always else f"assumes: {theorem.assumption}"
        print(f"{theorem.paper}, {theorem.name}\n  {theorem.statement}")
        print(f"  needs {', '.join(theorem.needs) or 'nothing'}; {kind}")
        if theorem.free:
            print(f"  free: {', '.join(theorem.free)}")
        print(f"  {', '.join(theorem.functions)}\n  {theorem.run}")
    return 0
