"""Make the table of reference times (`times.json`) again, or add what it lacks.

    python -m dipole.benchmarks.run.measure_times [--only NAME ...] [--again]

The table has processor seconds of one thread, which depend little on other work of the machine. Every entry is the
difference of a short run and one three times as long. `runs` are the first run of every recipe in each suite's small
scale. `steps` are the encoders and image sizes of the suites (`measured.toml`), in batches of two sizes, on data
that come with scikit-learn and Python. Their time is divided by the operations that `work_of` counts.
"""

import argparse
import json
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dipole.benchmarks.run.reference import TABLE, kind_of, measure_pace, work_of
from dipole.benchmarks.suite import Job, read_suite, suites
from dipole.core.train.recipe import load_recipe
from dipole.core.train.run import train
from dipole.core.utils.errors import DipoleError
from dipole.core.utils.files import atomic_write
from dipole.core.utils.machine import processor_name

MEASURED = tomllib.loads(Path(__file__).with_name("measured.toml").read_text(encoding="utf-8"))
CONSTANT = ("train.warmup=0", "train.schedule=constant", "train.milestones=")


def slope(recipe: str, settings: Sequence[str], unit: str, length: int) -> tuple[float, float]:
    """Return the processor seconds of a unit of a run's length, and those that do not depend on its length."""
    seconds = []
    for count in (length, 3 * length):
        config = load_recipe(recipe, [*settings, *CONSTANT, f"train.{unit}s={count}"]).config
        with tempfile.TemporaryDirectory() as folder:
            began = time.process_time()
            train(config, Path(folder), quiet=True)
            seconds.append(time.process_time() - began)
    per_unit = max(seconds[1] - seconds[0], 0.02 * seconds[1]) / (2 * length)
    return per_unit, max(seconds[0] - per_unit * length, 0.0)


def run_entry(job: Job) -> dict[str, Any]:
    train, unit, length = job.config.train, "epoch", 1
    if train.epochs is None:
        unit, length = "step", max(1, round((train.steps or 1) * 0.05))
    per_unit, fixed = slope(job.recipe, job.overrides, unit, max(length, round(train.evaluate_every or 0)))
    return {"kind": kind_of(job.config), "unit": unit, "fixed": round(fixed, 3), "per_unit": float(f"{per_unit:.4g}")}


def step_entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the seconds of a step that do not depend on its rows, and those of a billion operations."""
    recipe, batches = entry["recipe"], entry["batches"]
    settings = [*MEASURED["data"].get(entry.get("data"), ()), *entry.get("set", ())]
    given = [[*settings, f"train.batch_size={rows}"] for rows in batches]
    config = load_recipe(recipe, given[1]).config
    work = work_of(config)
    assert work is not None
    assert config.train.steps is not None
    repeat = round(config.train.steps / work.steps)  # an agent repeats its action
    few, more = (repeat * _step(recipe, each, repeat) for each in given)
    row = max(more - few, 0.2 * more) / (batches[1] - batches[0])
    return {
        "family": work.family,
        "flops": work.flops,
        "per_step": float(f"{max(few - row * batches[0], 0.0):.3g}"),
        "per_gigaflop": float(f"{row / work.flops * 1e9:.4g}"),
    }


def _step(recipe: str, settings: Sequence[str], repeat: int) -> float:
    """Return the seconds of a step, from runs in which the steps take at least a fifth of the rest."""
    for steps in (4, 32, 256):
        per_step, fixed = slope(recipe, settings, "step", steps * repeat)
        if 5 * per_step * steps * repeat > fixed:
            break
    return per_step


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these suites, or encoders of the table of steps")
    parser.add_argument("--again", action="store_true", help="also what the table has")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    for name in arguments.only or [*MEASURED["steps"], *suites()]:
        part, wanted = "steps", {}
        if name in MEASURED["steps"]:
            wanted = {name: partial(step_entry, MEASURED["steps"][name])}
        elif "small" in read_suite(name).scale:
            jobs = {job.recipe: job for job in reversed(read_suite(name).at("small").jobs())}
            part, kinds = "runs", [entry["kind"] for entry in table["runs"]]
            new = {recipe: job for recipe, job in jobs.items() if arguments.again or kind_of(job.config) not in kinds}
            wanted = {f"{name} {recipe}": partial(run_entry, job) for recipe, job in new.items()}
        for label, make in wanted.items():
            if any(entry["name"] == label for entry in table[part]) and not arguments.again:
                continue
            pace, machine = round(measure_pace(), 5), f"{processor_name()}, one thread"
            try:
                entry = make()
            except (DipoleError, OSError) as error:
                print(f"{label}: left out: {' '.join(str(error).split())[:300]}", file=sys.stderr)
                continue
            made = {"name": label, "machine": machine, "date": datetime.now(UTC).date().isoformat(), "pace": pace}
            table[part] = [each for each in table[part] if each["name"] != label] + [made | entry]
            atomic_write(TABLE, json.dumps(table, indent=1) + "\n")
            print({key: value for key, value in (made | entry).items() if key != "kind"}, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
