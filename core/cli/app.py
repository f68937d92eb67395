"""Find the command, run it, and turn errors into one message and an exit code.

Exit codes: 0 done, 1 failed, 2 wrong usage, 75 interrupted by a scheduler (to be queued again). With --json an error
is also an object on stdout.

A command is a function `configure(parser)`. It adds arguments to an ArgumentParser and returns a callable that takes
the parsed arguments and returns the exit code. Its docstring starts with the summary.
Each module of `commands/` has one, and packages declare theirs as entry points of the group `dipole.commands`. These
modules must not import torch when they are imported, so that `--help` is quick.
"""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.metadata import EntryPoint, PackageNotFoundError, metadata
from pathlib import Path
from pkgutil import iter_modules
from typing import cast

from dipole.core.cli import commands, output
from dipole.core.cli.parser import WORDS, Configure, Parser, UsageError
from dipole.core.objectives.registry import registry
from dipole.core.train.domains import broken_domains
from dipole.core.utils.errors import ConfigError, DipoleError, nearest
from dipole.core.utils.extras import source_folder
from dipole.core.utils.files import disk_error, why
from dipole.core.utils.launched import first_message
from dipole.core.utils.plugins import OURS, PluginError, broken_folders, distribution, is_ours, load, load_each, points
from dipole.core.utils.text import definitions, fitted, screen_width
from dipole.core.utils.version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command (None: those of `sys.argv`) and return its exit code. Errors are printed on stderr."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    as_json = output.asks_for_json(arguments)
    output.prepare()
    try:
        with output.plain_warnings():
            code = _main(arguments, as_json)
        output.finish()
        return code
    except UsageError as error:
        return _report(as_json, type(error).__name__, error.message, 2, error.shown)
    except DipoleError as error:
        if os.environ.get("DIPOLE_TRACEBACK"):
            raise
        return _report(as_json, type(error).__name__, str(error), error.exit_code)
    except KeyboardInterrupt as interrupted:
        message = " ".join(["interrupted.", *map(str, interrupted.args)])  # see `resumable`
        return _report(as_json, "KeyboardInterrupt", message, 1, message)
    except BrokenPipeError:
        # The reader (head, less) closed the pipe.
        output.silence(sys.stdout)
        return 1
    except Exception as error:
        if os.environ.get("DIPOLE_TRACEBACK"):
            raise
        kind = type(error).__name__
        if isinstance(error, OSError) and (message := output.cannot_write(error)):
            output.silence(sys.stdout)
            return _report(as_json, kind, message, 1)
        if isinstance(error, OSError) and error.filename is not None and disk_error(error) is error:
            return _report(as_json, kind, f"cannot use {os.fspath(error.filename)}: {why(error, '')}", 1)
        from dipole.core.utils.memory import is_out_of_memory  # PyTorch is imported only where a command needs it

        if is_out_of_memory(error):
            said = str(error).partition("DefaultCPUAllocator: ")[2] or str(error) or kind
            message = f"out of memory ({said:.300}). Choose smaller sizes (batches, widths, queues, images)."
            return _report(as_json, "OutOfMemory", message, 1)
        message = (
            f"{kind}: {error}\nThis is an unexpected error. Repeat the command with DIPOLE_TRACEBACK=1 in the "
            "environment to see where it happens."
        )
        return _report(as_json, kind, message, 1)


def _report(as_json: bool, kind: str, message: str, code: int, shown: str = "") -> int:
    """Print an error and return the exit code. Of several ranks only the first one that fails prints."""
    shown = shown or f"error: {message}"
    if first_message(shown) is None:
        output.say(shown, sys.stderr)
        if as_json:
            output.print_json_error(kind, message, code)
    try:
        output.finish()
    except (OSError, ValueError):
        output.silence(sys.stdout)
    return code


def _main(arguments: list[str], as_json: bool) -> int:
    if arguments[:1] == ["help"] and arguments[1:]:
        arguments = [arguments[1], "--help"]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_overview(), file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        print(json.dumps({"dipole": __version__}) if as_json else f"dipole {__version__}")
        return 0
    name, rest = arguments[0], arguments[1:]
    if "--quiet" in rest:  # read when these libraries are imported
        os.environ |= dict.fromkeys(("HF_DATASETS_DISABLE_PROGRESS_BARS", "HF_HUB_DISABLE_PROGRESS_BARS"), "1")
    if name.startswith("-"):
        if command := next((each for each in rest if each in names()), ""):
            words = [command, *(each for each in arguments if each != command)]
            raise ConfigError(f"the command comes first: dipole {shlex.join(words)}")
        raise ConfigError(
            f"unknown option {name!r}.{nearest(name, ('--help', '--version'))} Allowed: --help, --version."
        )
    try:
        configure = _find(name)
        parser = Parser(f"dipole {name}", configure.__doc__)
        runner = configure(parser)
        return runner(parser.parse_args(rest))
    except SystemExit as stop:
        # From argparse after --help, or from a plug-in.
        code = int(stop.code is not None)
        if isinstance(stop.code, int):
            code = stop.code
        said = f"{name} ended with the exit code {code}"
        if isinstance(stop.code, str):
            said = stop.code
            print(said, file=sys.stderr)
        if as_json and code:
            output.print_json_error("SystemExit", said, code)
        return code


def names() -> list[str]:
    """Return the names of all commands, sorted."""
    return sorted(_declared())


def _own() -> list[str]:
    return [module.name for module in iter_modules(commands.__path__)]


def _declared() -> dict[str, EntryPoint | None]:
    """Return the entry point of each command, None for those of `commands`. The first of a name counts."""
    declared: dict[str, EntryPoint | None] = {point.name: point for point in reversed(points("commands"))}
    return declared | dict.fromkeys(_own())


def _find(name: str) -> Configure:
    known = _declared()
    if point := known.get(name):
        return _load(point)
    if name in known:
        return cast(Configure, import_module(f"{commands.__name__}.{name}").configure)
    word = name.lower()
    hint = nearest(word, known)
    for what_to_type, others in WORDS["suggestions"].items():
        if word in others:
            hint = f" {what_to_type}."
    raise ConfigError(f"unknown command {name!r}.{hint} Commands: {', '.join(sorted(known))}.")


def _load(point: EntryPoint) -> Configure:
    configure = load(point)
    if not callable(configure):
        kind = type(configure).__name__
        raise PluginError(point, f"it is of type {kind}, not a function that adds arguments.")
    return cast(Configure, configure)


def broken_plugins(kind: str) -> list[PluginError]:
    """Load the plug-ins of one of `utils.plugins.GROUPS` and return what is wrong with them."""
    if kind == "objectives":
        return list(registry.broken.values())
    if kind == "domains":
        return broken_domains()
    if kind == "commands":
        return load_each("commands", _load, _own())[1]
    return broken_folders(kind)


def listed_commands() -> list[dict[str, str]]:
    """Return name, summary and package of every command.

    Other packages may be slow or broken, so they are not imported. Their commands get the package's summary.
    """
    found = []
    for name, point in sorted(_declared().items()):
        owner = OURS
        if point is None or is_ours(point):
            summary = (_find(name).__doc__ or "").strip().partition("\n")[0]
        else:
            owner = distribution(point)
            summary = (point.dist.metadata["Summary"] if point.dist else "") or "added"
        found.append({"name": name, "summary": summary, "package": owner})
    return found


def by(origin: str) -> str:
    """Return the suffix of a summary that names another package, or ""."""
    if origin in ("", OURS):
        return ""
    return f" (by {origin})"


def whole_parser() -> argparse.ArgumentParser:
    """Return one parser with every command as a subparser. Broken commands of other packages are left out."""
    parser = argparse.ArgumentParser(prog="dipole")
    parser.add_argument("-V", "--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(dest="command")
    for each in listed_commands():
        try:
            configure = _find(each["name"])
            configure(argparse.ArgumentParser(prog=f"dipole {each['name']}"))  # fails before anything is added
        except (Exception, SystemExit):
            if each["package"] == OURS:
                raise
            continue
        configure(commands.add_parser(each["name"], help=each["summary"], description=each["summary"]))
    return parser


def _overview() -> str:
    """Return the help of `dipole` itself."""
    found = {each["name"]: each for each in listed_commands()}
    width = max(map(len, found))
    grouped = {name for names in WORDS["groups"].values() for name in names}
    groups = {**WORDS["groups"], "other": [name for name in found if name not in grouped]}
    about = "Contrastive objectives that run unchanged in vision, text and reinforcement learning."
    parts = ["usage: dipole COMMAND [...]", fitted(about, screen_width())]
    parts.append("start here:\n" + definitions([*WORDS["start"].items(), ("docs", where_docs())], "  "))
    for title, names in groups.items():
        lines = [(f"{name:<{width}}", f"{found[name]['summary']}{by(found[name]['package'])}") for name in names]
        if lines:
            parts.append(f"{title}:\n{definitions(lines, '  ')}")
    ends = "exit codes: 0 done, 1 failed, 2 wrong usage, 75 interrupted: queue it again"
    parts.append(fitted(f"{ends}\n`dipole COMMAND --help` explains a command.", screen_width()))
    parts.append("examples:\n  dipole train --help\n  dipole show infonce")
    return "\n\n".join(parts)


def where_docs() -> str:
    """Return where the documentation is: the repository's address, else the folder of the checkout."""
    with suppress(PackageNotFoundError):
        for line in metadata("dipole").get_all("Project-URL") or []:
            return str(line.partition(", ")[2])
    folder = Path(source_folder() or Path(commands.__file__ or "").resolve().parents[3], "docs")
    if folder.is_dir():
        return f"read {folder / 'start'}, or build the site with `make docs`"
    return "the folder docs/ of dipole's source"
