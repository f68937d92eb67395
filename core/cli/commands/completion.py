"""`dipole completion`: shell completion of commands, options and names."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from shlex import quote
from typing import Any

from dipole.core.cli import Runner

SHELLS = ("bash", "zsh", "tcsh")
# How an argument is completed, by its metavar or by command and metavar. Kinds are those of `dipole list`.
FOLDERS = ("AGENT", "DIR", "FOLDER")
FILES = ("FILE", "PATH", "INPUT", "RECIPE", "SUITE", "RUN", "RUNS", "PLACE", "auto|never|PATH", "dipole show NAME")
NAMES = {
    "RECIPE": ("recipes",),
    "SUITE": ("suites",),
    "dipole check TARGET": ("objectives", "regularizers"),
    "dipole show NAME": ("objectives", "regularizers", "diagnostics", "recipes", "suites", "domains", "parts"),
    "dipole data get NAME": ("data sets that are fetched",),
    "RUN": ("run folders",),
    "RUNS": ("kept",),
    "PLACE": ("kept",),
    "auto|never|PATH": ("beginnings",),
}
WORDS = {"kept": ("shipped",), "beginnings": ("auto", "never")}
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
    from dipole.core.utils.extras import needing

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
            yield _function(function, " ".join(listed), metavar in FILES, shell)
        elif metavar in FOLDERS:
            marked.complete = shtab.DIRECTORY
        elif metavar in FILES:
            marked.complete = shtab.FILE


def _function(name: str, words: str, files: bool, shell: str) -> str:
    """Return a shell function that offers words, and files if `files`."""
    lines = [f'compgen -W "{words}" -- "$1"', '_shtab_compgen_files "$1"']
    if shell == "zsh":
        lines = [f"compadd -- {words}", "_files"]
    return "\n".join([f"{name}() {{", *(f"  {line}" for line in lines[: 1 + files]), "}"])


def _names(kind: str) -> list[str]:
    if kind in WORDS:
        return list(WORDS[kind])
    if kind == "data sets that are fetched":
        from dipole.core.train.data_sets import fetched

        return list(fetched())
    if kind == "parts":
        from dipole.core.train.names import parts

        return [*parts(), "run", "train"]
    from dipole.core.cli.commands.list import list_kind

    return [entry["name"] for entry in list_kind(kind)]
