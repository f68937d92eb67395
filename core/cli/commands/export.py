"""`dipole export`: write a trained model for another library."""

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dipole.core.cli.output import json_answer, write
from dipole.core.cli.parser import Runner, add_runs, to_path
from dipole.core.train.domains import adapter_class
from dipole.core.train.run_folder import find_run
from dipole.core.utils.errors import ConfigError, nearest
from dipole.core.utils.files import disk_refusing, is_scratch, remove_scratch, scratch


def configure(parser: argparse.ArgumentParser) -> Runner:
    """Write a trained model for another library."""
    add = parser.add_argument
    add("run", metavar="RUN", help="folder of a finished run, or the first digits of its hash")
    add("--to", metavar="FORMAT", required=True, help="such as transformers or sentence-transformers")
    add("-o", "--out", type=to_path, metavar="DIR", help="new folder to write (default: RUN/export-FORMAT)")
    text = "licence of the weights for the model card, such as apache-2.0 or cc-by-4.0"
    add("--license", "--licence", metavar="ID", help=text)
    add("--push", metavar="REPO", help="also upload the folder to the Hugging Face Hub as this model")
    add("--private", action="store_true", help="with --push: make a new repository private")
    add_runs(parser)
    add("--json", action="store_true", help="print one JSON object")
    return run


def run(arguments: argparse.Namespace) -> int:
    folder = find_run(arguments.run, arguments.runs)
    domain = folder.read_config().domain
    formats = adapter_class(domain).export_formats
    if arguments.to not in formats:
        raise ConfigError(
            f"runs of the domain {domain!r} cannot be exported to {arguments.to!r}.{nearest(arguments.to, formats)} "
            f"Formats: {', '.join(formats) or 'none'}."
        )
    out = arguments.out or folder.path / f"export-{arguments.to}"
    if arguments.private and arguments.push is None:
        raise ConfigError("--private needs --push REPO.")
    from dipole.core.train.exports import check_push, push, set_licence
    from dipole.core.train.model import load_run

    if arguments.push is not None:
        check_push(arguments.push)
    if out.exists() and (not out.is_dir() or not all(map(is_scratch, out.iterdir()))):
        raise ConfigError(f"{out} is not an empty folder. Choose another --out.")
    with json_answer(arguments.json) as answer:
        record, adapter, objective = load_run(folder, "cpu")
        with disk_refusing(f"cannot export to {out}", option="--out"), _filled(out) as temporary:
            adapter.export(arguments.to, temporary, record, objective)
            if arguments.license is not None:
                set_licence(temporary, arguments.license)
        write(out)
        answer |= {"folder": str(out), "format": arguments.to, "pushed": None}
        if arguments.push is not None:
            answer["pushed"] = push(out, arguments.push, arguments.private)
            write(answer["pushed"])
    return 0


@contextmanager
def _filled(out: Path) -> Iterator[Path]:
    """Yield a folder inside `out` to fill. Its files move to `out` at the end of the block, or are removed."""
    is_new = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    try:
        with scratch(out / "export") as temporary:
            temporary.mkdir()
            yield temporary
            for path in temporary.iterdir():
                os.replace(path, out / path.name)
        remove_scratch(out)
    except BaseException:
        if is_new:
            with suppress(OSError):
                out.rmdir()
        raise
