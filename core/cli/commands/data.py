"""`dipole data`: fetch and prepare the data sets that recipes need."""

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from shlex import join
from typing import Any

from dipole.core.cli.output import confirm, json_answer, print_result, stdout_to_stderr, write
from dipole.core.cli.parser import Parser, Runner, resumable, to_path
from dipole.core.train.data_sets import Built, DataSet, data_sets, fetched_folder, find, get, is_prepared
from dipole.core.utils.download import BASE, Progress, RemoteFile, address, free_bytes
from dipole.core.utils.errors import DataError
from dipole.core.utils.files import file_hash
from dipole.core.utils.text import counted, definitions, size

EVERY = 2.0  # seconds between two lines of progress


def configure(parser: argparse.ArgumentParser) -> Runner:
    """Fetch and prepare the data sets that recipes need, or build one."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="list | get NAME | NAME")
    about = "List what can be fetched or built."
    listed = actions.add_parser("list", help="what can be fetched or built", description=about)
    listed.add_argument("--json", action="store_true", help="print one JSON list")
    runners: dict[str, Runner] = {"list": _list, "get": resumable(_get, "what was fetched is kept")}
    about = (
        "Show licence and size of a data set, ask, fetch it, compare its checksum and prepare it. Repeat the command "
        "to continue after an interruption. Files that you put into FOLDER.download are used."
    )
    fetched = actions.add_parser("get", help="fetch and prepare one", description=about)
    add = fetched.add_argument
    add("name", metavar="NAME", help="as in `dipole data list`")
    add("-o", "--out", "--to", type=to_path, metavar="FOLDER", help="folder to prepare (default: data/NAME)")
    add("--yes", action="store_true", help="do not ask")
    add("--url", metavar="URL", help=f"mirror to fetch from, URL/FILE (also ${BASE})")
    add("--json", action="store_true", help="print one JSON object (messages go to stderr)")
    if isinstance(parser, Parser):
        parser.meant = {name: f" Did you mean `dipole data get {name}`?" for name in data_sets()}
    for name, each in data_sets().items():
        if isinstance(each, Built):
            inner = actions.add_parser(name, help=each.summary, description=each.summary)
            runners[name] = resolve_name(each.configure)(inner)
    return lambda arguments: runners[arguments.action](arguments)


def _list(arguments: argparse.Namespace) -> int:
    found = data_sets()
    facts: list[dict[str, Any]] = []
    entries: list[tuple[str, ...]] = []
    for name, each in found.items():
        licence = getattr(each, "licence", None)
        facts.append({"name": name, "summary": each.summary, "built": isinstance(each, Built), "licence": licence})
        if isinstance(each, Built):
            entries.append((name, f"{each.summary} (built: `dipole data {name} --help`)"))
        else:
            size = "size asked when fetched"
            if not isinstance(each.files, str):
                size = _sizes(each.files)
            entries.append((name, each.summary, f"{size}, licence: {each.licence}"))
    return print_result(arguments.json, facts, definitions(entries), indent=2)


def _get(arguments: argparse.Namespace) -> int:
    name, data = arguments.name, find(arguments.name)
    folder = arguments.out or Path("data") / name
    with json_answer(arguments.json) as answer:
        answer |= {"name": name, "folder": str(folder), "licence": data.licence, "use": data.use.format(folder=folder)}
        if is_prepared(name, folder):
            write(f"{folder} exists already.\n{_use(data, folder)}")
            return 0
        files = data.remote()
        if arguments.url:
            base = arguments.url.rstrip("/")
            files = tuple(replace(file, url=f"{base}/{file.path}", name=file.path) for file in files)
        downloads = fetched_folder(folder)
        missing = [file for file in files if not (downloads / file.path).is_file()]
        unchecked = [file.path for file in files if file.checksum is None]
        asks = bool(missing) and not arguments.yes
        with stdout_to_stderr(asks):  # with the question
            write(f"{name}: {data.summary}\nlicence  {data.licence}\nsee      {data.page}")
            write(f"size     {_sizes(files)}, to {folder}")
            for file in missing:
                write(f"from     {address(file)}")
            if unchecked:
                shown = ", ".join(unchecked[:5])
                write(f"checked  no checksum is known of {shown}: compare those printed at the end")
        needed, free = sum(file.size or 0 for file in missing), free_bytes(folder.absolute())
        if needed > free:
            raise DataError(
                f"{size(needed)} are needed, and the disk of {folder} has {size(free)} left. Free some space, or "
                "choose another folder with --out."
            )
        if asks:
            confirm("Fetch it?", "to fetch it under that licence", "nothing was fetched")
        waiting = "another process is at work on the same folder: waiting for it"
        get(name, data, files, folder, _lines, lambda: write(waiting, sys.stderr))
        for path in unchecked:
            write(f"sha256   {file_hash(downloads / path)}  {path}")
        write(f"{folder} is ready. {downloads} is no longer needed.\n{_use(data, folder)}")
    return 0


def _use(data: DataSet, folder: Path) -> str:
    return f"use it by  --set {join([data.use.format(folder=folder)])}"


def _sizes(files: tuple[RemoteFile, ...]) -> str:
    known = [file.size for file in files if file.size is not None]
    if len(known) < len(files):
        return "size not published"
    return f"{size(sum(known))} in {counted(len(files), 'file')}"


def _lines(file: RemoteFile) -> Progress:
    told = time.monotonic()

    def progress(done: int, total: int | None) -> None:
        nonlocal told
        if time.monotonic() - told > EVERY:
            told = time.monotonic()
            shown = f"{file.path}: {size(done)}"
            if total is not None:
                shown += f" of {size(total)}"
            print(shown, file=sys.stderr, flush=True)

    return progress
