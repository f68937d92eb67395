"""The command line: finds the subcommand's module, and turns errors into one message and an exit code.

0 done, 1 failed, 2 wrong usage. A subcommand is "module:function"; the function gets an ArgumentParser, adds its
arguments and returns a callable that takes the parsed arguments and returns the exit code. Its module must load no
torch at import: `--help` answers at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, cast

from dipole import __version__
from dipole.core.ground.errors import ConfigError, DipoleError, OptionError, SpecError, nearest

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

Runner = Callable[[argparse.Namespace], int]
Configure = Callable[[argparse.ArgumentParser], Runner]

COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("dipole.benchmarks.commands:demo", "compare objectives on embedded data and show the result"),
    "train": ("dipole.core.cli.commands.train:configure", "train one recipe and record the result"),
    "eval": ("dipole.core.cli.commands.evaluate:configure", "evaluate the saved model of a run again"),
    "add": ("dipole.core.cli.commands.add:configure", "add a number that another program measured on a run's model"),
    "bench": ("dipole.benchmarks.commands:bench", "run a suite: recipes x objectives x seeds"),
    "report": ("dipole.benchmarks.commands:report", "write an HTML report of recorded runs"),
    "list": (
        "dipole.core.cli.commands.listing:configure",
        "list objectives, regularizers, recipes, suites, ...",
    ),
    "show": ("dipole.core.cli.commands.show:configure", "explain one of them: formula, options, source, cost"),
    "check": ("dipole.core.cli.commands.check:configure", "put an objective through the conformance kit"),
    "export": ("dipole.core.cli.commands.export:configure", "write a trained model for another library"),
    "doctor": ("dipole.core.cli.commands.doctor:configure", "find out what is missing on this machine, and the cure"),
}
GROUP = "dipole.commands"
USAGE_ERRORS = (ConfigError, SpecError, OptionError)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _main(arguments)
    except DipoleError as error:
        if os.environ.get("DIPOLE_TRACEBACK"):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, USAGE_ERRORS) else 1
    except KeyboardInterrupt:
        print("interrupted. Repeat the command to continue: finished runs and checkpoints are kept.", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader (head, less) has gone; nothing more can be written, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if os.environ.get("DIPOLE_TRACEBACK"):
            raise
        print(
            f"error: {type(error).__name__}: {error}\nThis is not a mistake that dipole knows; repeat the command with "
            "DIPOLE_TRACEBACK=1 in the environment to see where it happens.",
            file=sys.stderr,
        )
        return 1


def _main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        parser = _overview()
        parser.print_help(sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        print(f"dipole {__version__}")
        return 0
    name, rest = arguments[0], arguments[1:]
    configure, summary = _find(name)
    parser = argparse.ArgumentParser(prog=f"dipole {name}", description=f"{summary[0].upper()}{summary[1:]}.")
    runner = configure(parser)
    try:
        return runner(parser.parse_args(rest))
    except SystemExit as stop:
        # argparse has printed the help or what is wrong with the arguments.
        return int(stop.code or 0)


def _find(name: str) -> tuple[Configure, str]:
    if name in COMMANDS:
        target, summary = COMMANDS[name]
        module, _, function = target.partition(":")
        return cast(Configure, getattr(import_module(module), function)), summary
    plugins = _plugins()
    if name in plugins:
        found = cast(Configure, plugins[name].load())
        return found, (found.__doc__ or name).strip().splitlines()[0].rstrip(".")
    known = [*COMMANDS, *plugins]
    raise ConfigError(f"unknown command {name!r}.{nearest(name, known)} Commands: {', '.join(known)}.")


def _plugins() -> dict[str, EntryPoint]:
    from importlib.metadata import entry_points

    return {point.name: point for point in entry_points(group=GROUP)}


def _overview() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {summary}" for name, (_, summary) in COMMANDS.items()]
    return argparse.ArgumentParser(
        prog="dipole",
        usage="dipole COMMAND [...]",
        description="Contrastive objectives that run unchanged in vision, text and reinforcement learning.",
        epilog="commands:\n" + "\n".join(lines) + "\n\n`dipole COMMAND --help` explains one of them.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
