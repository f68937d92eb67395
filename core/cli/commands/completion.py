"""`dipole completion`: shell completion of commands, options and names."""

import argparse
import json
from collections.abc import Iterator
from shlex import quote
from typing import Any

from dipole.core.cli import Runner
from dipole.core.cli.commands.list import KINDS, list_kind
from dipole.core.train.data_sets import fetched
from dipole.core.train.domains import parts
from dipole.core.utils.extras import needing

SHELLS = ("bash", "zsh", "tcsh")
# How an argument is completed, by its metavar or by command and metavar: kinds of `dipole list`, or words.
FOLDERS = ("AGENT", "DIR", "FOLDER")
NAMES = {
    "RECIPE": ("recipes",),
    "SUITE": ("suites",),
    "dipole check TARGET": ("objectives", "regularizers"),
    "dipole show NAME": (*KINDS[:-1], "parts", "run", "train"),
    "dipole data get NAME": ("data sets that are fetched",),
    "RUN": ("run folders",),
    "OTHER": ("run folders",),
    "RUNS": ("shipped",),
    "PLACE": ("shipped",),
    "auto|never|PATH": ("auto", "never"),
}
FILES = ("FILE", "PATH", "INPUT", *NAMES.keys() - {"dipole check TARGET", "dipole data get NAME"})
# The shell lists runs itself, because they change after the script was written.
RUN_FOLDERS = "$(cd runs 2>/dev/null && ls)"


def configure(parser: argparse.ArgumentParser) -> Runner:
    """Print a completion script for bash, zsh or tcsh.

    It needs the extra `completion`. It completes commands, options and files. In bash and zsh it also completes the
    names of recipes, suites, objectives and data sets that are installed when it is printed. zsh needs it in a folder
    of $fpath, and tcsh needs `source ~/.dipole.tcsh` in ~/.tcshrc.
    """
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return run


def run(arguments: argparse.Namespace) -> int:
    from dipole.core.cli.app import whole_parser

    with needing("completion", "dipole completion"):
        import shtab
    parser = whole_parser()
    functions = "\n".join(_marked(parser, arguments.shell))
    script = shtab.complete(parser, shell=arguments.shell, preamble=functions)
    if arguments.json:
        script = json.dumps({"shell": arguments.shell, "script": script})
    print(script)
    return 0


def _marked(parser: argparse.ArgumentParser, shell: str) -> Iterator[str]:
    """Set `complete` of each argument for shtab, and yield the shell functions that it names."""
    import shtab

    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _marked(inner, shell)
            continue
        metavar = str(action.metavar)
        if f"{parser.prog} {metavar}" in NAMES:
            metavar = f"{parser.prog} {metavar}"
        kinds = NAMES.get(metavar, ())
        marked: Any = action  # argparse declares no such attribute
        if kinds and shell in ("bash", "zsh"):
            function = "_dipole_" + "_".join((*parser.prog.split()[1:], action.dest))
            marked.complete = {shell: function}
            listed = [RUN_FOLDERS] * ("run folders" in kinds)
            listed += [quote(name) for kind in kinds if kind != "run folders" for name in _names(kind)]
            lines = [f'compgen -W "{" ".join(listed)}" -- "$1"', '_shtab_compgen_files "$1"']
            if shell == "zsh":
                lines = [f"compadd -- {' '.join(listed)}", "_files"]
            lines = [f"{function}() {{", *(f"  {line}" for line in lines[: 1 + (metavar in FILES)]), "}"]
            yield "\n".join(lines)
        elif metavar in FOLDERS:
            marked.complete = shtab.DIRECTORY
        elif metavar in FILES:
            marked.complete = shtab.FILE


def _names(kind: str) -> list[str]:
    if kind == "data sets that are fetched":
        return list(fetched())
    if kind == "parts":
        return [*parts()]
    if kind in KINDS:
        return [entry["name"] for entry in list_kind(kind)]
    return [kind]
