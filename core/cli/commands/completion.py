"""`dipole completion`: what a shell needs to complete commands, options and names."""

from __future__ import annotations

import argparse
import json

from dipole.core.cli import Runner

SHELLS = ("bash", "zsh", "tcsh")


def configure(parser: argparse.ArgumentParser) -> Runner:
    """Print a completion script for bash, zsh or tcsh (extra `completion`).

    bash: dipole completion bash > ~/.local/share/bash-completion/completions/dipole
    """
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return run


def run(arguments: argparse.Namespace) -> int:
    from dipole.core.cli.app import whole_parser
    from dipole.core.ground.errors import ConfigError
    from dipole.core.ground.extras import install_line

    try:
        import shtab
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"completion scripts are written by shtab, which is missing: {install_line('completion')}"
        ) from error
    script = shtab.complete(whole_parser(), shell=arguments.shell)
    print(json.dumps({"shell": arguments.shell, "script": script}) if arguments.json else script)
    return 0
