"""Make the table of reference times (`times.json`) again, or add what it lacks.

    python -m dipole.benchmarks.run.measure_times [--only NAME ...] [--again]

The table has processor seconds of one thread, which depend little on other work of the machine. Every entry is the
difference of a short run and one three times as long. `runs` are the first run of every recipe in each suite's small
scale. `steps` are the encoders and image sizes of the suites, in batches of two sizes, on data that come with
scikit-learn and Python. Their time is divided by the operations that `work_of` counts.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
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

PLAIN = ("train.warmup=0", "train.schedule=constant", "train.milestones=", "train.epochs=", "train.steps=8")
DIGITS = (
    *PLAIN, "vision.data.source=digits", "vision.data.pretrain_split=", "vision.data.pretrain=", "vision.data.limit=",
    "vision.data.classes=", "vision.data.test_split=test", "vision.data.size=", "vision.probe.baselines=false",
)  # fmt: skip
RESNET = ("vision.encoder.name=resnet50", "vision.encoder.tap=")
PYDOC = (
    *PLAIN, "text.corpus=pydoc", "text.unit=documents", "text.split=train", "text.senteval=", "text.labelled=",
    "text.vectors=", "text.channels=trained", "text.block_count=", "text.limit=4000",
)  # fmt: skip
TYPICAL: dict[str, tuple[str, tuple[str, ...], tuple[int, int]]] = {
    "small-conv": ("cifar10-simclr", (*DIGITS, "vision.augment.size=24"), (32, 128)),
    "alexnet": ("cacr-cifar", (*DIGITS, "vision.augment.size=32"), (8, 64)),
    "alexnet-64": ("cacr-cifar", (*DIGITS, "vision.augment.size=64"), (8, 32)),
    "vgg16": ("cifar100-blocks", (*DIGITS, "vision.augment.size=32"), (33, 66)),
    "resnet50": ("cacr-cifar", (*DIGITS, "vision.augment.size=32", *RESNET), (4, 12)),
    "resnet50-64": ("stl10-simclr", (*DIGITS, "vision.augment.size=64"), (2, 6)),
    "resnet50-224": ("imagenet100-moco", (*DIGITS, "vision.augment.size=224", "vision.negatives=64"), (2, 4)),
    "bow": ("pydoc-bow", PYDOC, (64, 256)),
    "gru-300": ("wiki3029-blocks", PYDOC, (110, 330)),
    "gru-1200": ("quick-thoughts", PYDOC, (32, 128)),
    "transformer": ("pydoc-transformer", PYDOC, (16, 64)),
    "agent": ("lmcl-table5", ("rl.learning_starts=2",), (32, 96)),
    "small-agent": ("lmcl-table5-small", ("rl.size=56", "rl.image_size=48", "rl.learning_starts=2"), (64, 192)),
}
"""Recipe, settings that put data at hand in place of its own, and two sizes of a batch."""


def slope(recipe: str, settings: Sequence[str], unit: str, length: int) -> tuple[float, float]:
    """Return the processor seconds of a unit of a run's length, and those that do not depend on its length."""
    seconds = []
    for count in (length, 3 * length):
        config = load_recipe(recipe, [*settings, *PLAIN[:3], f"train.{unit}s={count}"]).config
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


def step_entry(recipe: str, settings: Sequence[str], batches: tuple[int, int]) -> dict[str, Any]:
    """Return the seconds of a step that do not depend on its rows, and those of a billion operations."""
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
    for name in arguments.only or [*TYPICAL, *suites()]:
        part, wanted = "steps", {}
        if name in TYPICAL:
            wanted = {name: partial(step_entry, *TYPICAL[name])}
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
