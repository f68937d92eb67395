"""`dipole theory`: evaluate both sides of the papers' inequalities on a finished run."""

import argparse
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from dipole.core.cli.output import print_result, say, stdout_to_stderr, write
from dipole.core.cli.parser import Runner, add_runs, checked_number, to_path
from dipole.core.evaluation.theory.theorems import LOSSES, THEOREMS, Choices
from dipole.core.objectives.spec import options_of
from dipole.core.train.run_folder import find_run
from dipole.core.utils.errors import ConfigError
from dipole.core.utils.text import counted, definitions, number, text_table

if TYPE_CHECKING:
    from dipole.core.evaluation.theory.report import Report

GROUPS = {
    "data": ("points", "prior", "seed"),
    "Arora et al.": ("k", "block", "draws", "tasks", "epsilon"),
    "LMCL": ("delta_pos", "delta_neg", "mu"),
    "constants that no paper gives": (
        "constant", "rademacher", "tuples", "gamma_constant", "smoothness", "data_constant",
    ),
}  # fmt: skip
"""Group of the help -> its options in `Choices`, which checks their ranges."""


def configure(parser: argparse.ArgumentParser) -> Runner:
    """Evaluate the theorems of the papers on a run."""
    add = parser.add_argument
    add("run", metavar="RUN", nargs="?", help="folder of a finished run, or the first digits of its hash")
    add_runs(parser)
    add("--device", help="auto, cpu, cuda, ... (default: that of the recipe)")
    add("--json", action="store_true", help="print one JSON object")
    add("--list", action="store_true", help="list every theorem, what it needs and its functions")
    about = "also draw a picture: .svg, .png or .pdf"
    add("-o", "--out", "--picture", dest="picture", type=to_path, metavar="FILE", help=about)
    add("--figure1", type=to_path, metavar="FILE", help="draw Figure 1 of Arora et al.; needs no run")

    groups = {title: parser.add_argument_group(title).add_argument for title in GROUPS}
    add = groups["data"]
    add("--split", choices=("train", "test"), default="test", help="default test")
    about = "given; blocks:N (N consecutive rows are a class); or a file"
    add("--labels", default="given", metavar="HOW", help=about)
    about = "raw, on the unit sphere, or (auto) as the objective's similarity takes them"
    add("--features", choices=("auto", "raw", "unit"), default="auto", help=about)
    add("--scale", type=float, default=1.0, help="factor of the features")
    groups["Arora et al."]("--loss", choices=("hinge", "logistic", "both"), default="both")
    about = "bounds hold with probability 1 - delta (default 0.05)"
    share = checked_number(float, lambda value: 0 < value < 1, "between 0 and 1")
    groups["constants that no paper gives"]("--delta", type=share, default=0.05, help=about)
    options = {option.name: option for option in options_of(Choices)}
    for title, names in GROUPS.items():
        for name in names:
            option = options[name]
            about, kind = option.help, (*option.kinds, str)[0]
            if option.default is not None:
                about += f" (default {option.default})"
            groups[title](
                f"--{name.replace('_', '-')}",
                type=kind,
                choices=option.choices or None,
                default=option.default,
                metavar="|".join(option.choices) or kind.__name__.upper(),
                help=about,
            )
    return run


def run(arguments: argparse.Namespace) -> int:
    if arguments.list:
        return _list(arguments.json)
    from dipole.core.evaluation.theory.pictures import check_name, draw_figure_1, draw_report
    from dipole.core.train.theory import theory_of_run

    if arguments.figure1 is not None:
        draw_figure_1(arguments.figure1)
        write(arguments.figure1, sys.stderr if arguments.json else sys.stdout)
    if arguments.run is None:
        if arguments.figure1 is None:
            raise ConfigError("give a RUN (its folder, or the first digits of its hash), --list, or --figure1 FILE.")
        if arguments.json:
            print(json.dumps({"figure1": str(arguments.figure1)}))
        return 0
    if arguments.picture is not None:
        check_name(arguments.picture)
    folder = find_run(arguments.run, arguments.runs)
    losses = tuple(loss for loss in LOSSES if arguments.loss in (loss, "both"))
    given = {name: getattr(arguments, name) for names in GROUPS.values() for name in names}
    choices = Choices(losses, confidence=1 - arguments.delta, **given)
    say(f"evaluating the theorems on {folder.path}. This can take a minute.", sys.stderr)
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
        draw_report(report, arguments.picture, folder.path.name)
    text = f"run  {folder.path}\n{_text(report)}"
    if arguments.picture is not None:
        text += f"\n{arguments.picture}"
    print_result(arguments.json, {"run": str(folder.path)} | report.as_dict(), text)
    for each in report.broken:
        name = f"{each.theorem.paper}, {each.theorem.name} ({each.case})"
        write(f"error: {name} must hold on any features but does not.", sys.stderr)
    return 1 if report.broken else 0


def _text(report: "Report") -> str:
    points, classes = report.chosen_from
    head = f"data {report.points} of {counted(points, 'point')}, "
    if classes:
        head += f"{report.classes} of {counted(classes, 'class', 'classes')}"
    else:
        head += "no labels"
    rows = []
    for q in report.quantities:
        value = number(q.value)
        if q.error > 0:
            value += f" +- {q.error:.2g}"
        rows.append((q.name, value, q.about))
    lines = [head, "", text_table(rows, words=(0, 2)), ""]
    table = [("holds", "inequality", "case", "sides, each at most the next")]
    assumed = {}
    for each in report.inequalities:
        sides = " <= ".join(f"{label} {number(value)}" for label, value in each.sides)
        if each.free:
            sides += f"  [free: {', '.join(f'{key} {value:g}' for key, value in each.free.items())}]"
        holds = ("no", "yes")[each.holds]
        name = f"{each.theorem.paper}, {each.theorem.name}"
        if not each.theorem.always:
            holds += " *"
            assumed[name] = each.theorem.assumption
        table.append((holds, name, each.case, sides))
    lines.append(text_table(table, words=range(4)))
    if assumed:
        lines += ["", "* assumptions that are not measured:"]
        lines.append(definitions(assumed.items(), "  "))
    if report.missing:
        names = {each.key: f"{each.paper}, {each.name}" for each in THEOREMS}
        lines += ["", "not computed:"]
        lines.append(definitions(((names.get(key, key), reason) for key, reason in report.missing.items()), "  "))
    return "\n".join(lines)


def _list(as_json: bool) -> int:
    parts = []
    for theorem in THEOREMS:
        kind = "holds on any features"
        if not theorem.always:
            kind = f"assumes: {theorem.assumption}"
        free = f"free: {', '.join(theorem.free)}" if theorem.free else ""
        lines = [theorem.statement, f"needs {', '.join(theorem.needs) or 'nothing'}; {kind}", free]
        lines += [", ".join(theorem.functions), theorem.run]
        parts.append(f"{theorem.paper}, {theorem.name}\n{definitions([('', *lines)])}")
    return print_result(as_json, [asdict(theorem) for theorem in THEOREMS], "\n".join(parts), indent=2)
