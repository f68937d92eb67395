"""`dipole train`: train one recipe."""

import argparse
import json
from pathlib import Path

from dipole.core.cli.output import print_result, stdout_to_stderr, write
from dipole.core.cli.parser import Runner, add_overrides, add_runs, resumable, to_path
from dipole.core.train.recipe import load_recipe
from dipole.core.train.run_folder import RunFolder
from dipole.core.utils.launched import launched
from dipole.core.utils.text import results_table


def configure(parser: argparse.ArgumentParser) -> Runner:
    """Train one recipe and record the result."""
    add = parser.add_argument
    add("recipe", metavar="RECIPE", help="a shipped recipe (`dipole list recipes`) or a .toml file")
    text = "change settings, such as train.epochs=5 'objective=infonce + 0.1*dp'; KEY= goes back to the default"
    add_overrides(parser, text)
    add("--seed", type=int, help="same as --set seed=N")
    add_runs(parser, "folder of runs (default: runs)")
    text = (
        "auto (default): continue from the newest checkpoint; never: start again; PATH: from that checkpoint, or the "
        "newest of that run's folder"
    )
    add("--resume", type=_resume, default="auto", metavar="auto|never|PATH", help=text)
    add("--overwrite", action="store_true", help="run again even if this run is finished")
    add("--print-config", action="store_true", help="print the resolved settings and their origin, and stop")
    add("--quiet", action="store_true", help="show no progress")
    text = "also log to these trackers: tensorboard, wandb, mlflow, trackio"
    add("--log", metavar="TRACKER,...", nargs="+", action="extend", default=[], help=text)
    add("--tensorboard", action="append_const", dest="log", const="tensorboard", help="same as --log tensorboard")
    add("--json", action="store_true", help="print one JSON object")
    return resumable(run)


def _resume(text: str) -> str | Path:
    if text in ("auto", "never"):
        return text
    return to_path(text)


def run(arguments: argparse.Namespace) -> int:
    if arguments.seed is not None:
        arguments.overrides.append(f"seed={arguments.seed}")
    resolved = load_recipe(arguments.recipe, arguments.overrides)
    config = resolved.config
    if arguments.print_config:
        if launched().rank == 0 and arguments.json:
            print(json.dumps({"run": config.hash, "config": config.model_dump(mode="json")}))
        elif launched().rank == 0:
            write(f"# run {config.hash}\n{config.to_toml(resolved.origins).rstrip()}", wrap=False)
        return 0
    from dipole.core.train.launch import leave
    from dipole.core.train.run import train

    folder = RunFolder(arguments.runs / config.hash)
    already = not arguments.overwrite and getattr(folder.read_record(), "status", "") == "done"
    with stdout_to_stderr(arguments.json):
        record = train(
            config,
            arguments.runs,
            resume=arguments.resume,
            overwrite=arguments.overwrite,
            quiet=arguments.quiet,
            log=[name for text in arguments.log for name in text.split(",")],
        )
        leave()
    if launched().rank:
        return 0
    facts = record.model_dump(mode="json", include={"objective", "seed", "status", "steps", "results", "diagnostics"})
    facts = {"run": str(folder.path), "hash": record.hash, "already": already} | facts
    lines = [f"run        {folder.path}", f"objective  {config.objective}", ""]
    lines += [results_table(record.results), "", results_table(record.diagnostics), ""]
    if already:
        lines.append(f"(finished on {record.updated}; --overwrite runs it again)")
    return print_result(arguments.json, facts, "\n".join(lines))
