"""`dipole embed`: embed images or sentences with a trained model."""

import argparse
import sys
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from dipole.core.cli.output import print_result, stdout_to_stderr, write
from dipole.core.cli.parser import Runner, add_runs, to_path
from dipole.core.train.domains import domains
from dipole.core.train.run_folder import find_run
from dipole.core.utils.errors import ConfigError, OptionError

if TYPE_CHECKING:
    from dipole.core.train.inference import Embedder


def configure(parser: argparse.ArgumentParser) -> Runner:
    """Embed your own images or sentences with a trained model."""
    add = parser.add_argument
    add("run", metavar="RUN", help="folder of a finished run, the first digits of its hash, or an exported folder")
    text = (
        "a folder of images, one image, or what vision.data.source takes; a file of sentences (a line each, or "
        ".jsonl, .csv, .parquet); - for lines of standard input"
    )
    add("input", metavar="INPUT", type=lambda text: (text == "-" or to_path(text)) and text, help=text)
    text = ".parquet, or .npy with the rows' names in .ids.json (default: features.parquet)"
    add("-o", "--out", type=to_path, default=Path("features.parquet"), metavar="FILE", help=text)
    text = "encoder: features that probes use (default); embedding: output of the head, which the objective uses"
    add("--features", metavar="WHERE", help=text)
    text = "images that cannot be decoded: refuse (default), or skip and list them"
    add("--on-corrupt", choices=["refuse", "skip"], default="refuse", help=text)
    add("--column", metavar="NAME", help="column of a table that holds the inputs")
    add("--batch-size", type=int, metavar="N", help="rows at a time")
    add("--device", help="auto, cpu, cuda, ... (default: that of the recipe, or auto)")
    add_runs(parser)
    add("--quiet", action="store_true", help="no progress")
    add("--json", action="store_true", help="print one JSON object")
    return run


def run(arguments: argparse.Namespace) -> int:
    from dipole.core.train.inference import embed, writer_of

    writer_of(arguments.out)  # before the model is loaded
    with stdout_to_stderr(arguments.json):
        embedder = _open(arguments.run, arguments.runs, arguments.device, arguments.features)
        if embedder.on_corrupt is not None:
            embedder.on_corrupt = arguments.on_corrupt
        elif arguments.on_corrupt != "refuse":
            raise OptionError("--on-corrupt skip: only images can be skipped.")
        count, width = embed(
            embedder,
            arguments.input,
            arguments.out,
            batch_size=arguments.batch_size,
            column=arguments.column,
            quiet=arguments.quiet,
        )
    for line in embedder.skipped:
        write(f"skipped {line}", sys.stderr)
    facts = {"file": str(arguments.out), "rows": count, "width": width}
    if embedder.skipped:
        facts["skipped"] = embedder.skipped
    return print_result(arguments.json, facts, f"{arguments.out}: {count} x {width}")


def _open(name: str, runs: Path, device: str | None, features: str | None) -> "Embedder":
    """Load the model of a run, or of a folder that an export wrote (a folder without config.toml)."""
    from dipole.core.train.launch import pick_device
    from dipole.core.train.model import load_run

    folder = Path(name)
    if not folder.is_dir() or (folder / "config.toml").is_file():
        _, adapter, objective = load_run(find_run(name, runs), device)
        return adapter.embedder(features, objective)

    place = pick_device(device or "auto")
    for reader in filter(None, [domain.exported for domain in domains().values()]):
        embedder: Embedder | None = resolve_name(reader)(folder, place, features)
        if embedder is not None:
            return embedder
    raise ConfigError(
        f"{folder} is neither the folder of a run (it has no config.toml) nor a model that can be read here: "
        "sentence-transformers (modules.json), transformers (config.json and tokenizer or image processor) or ONNX "
        "(model.onnx and the same)."
    )
