"""Makes the table of reference times (`times.json`) again, or adds to it what it lacks.

    python -m dipole.benchmarks.run.measure_times [--only NAME ...] [--again]

Processor seconds of one thread, so that a machine that is shared counts little of what others do. Two kinds of entries:
`runs`, of each suite's small scale the first run of every recipe at one and at three units of length, what lies between
them being the time of a unit, and `steps`, a few steps of each encoder and image size that the suites have in batches
of two sizes, on data that ship with scikit-learn and Python, divided by the operations that are counted for them.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch

from dipole.benchmarks.run.reference import TABLE, kind_of, machine_name, measure_pace
from dipole.benchmarks.run.work import work_of
from dipole.benchmarks.suite import Job, read_suite, suites
from dipole.core.train.build import build
from dipole.core.train.config import RunConfig
from dipole.core.train.loss_module import LossModule, NoScatter
from dipole.core.train.memory_saving import Encoding
from dipole.core.train.optimizer import build_optimizer
from dipole.core.train.recipe import load
from dipole.core.train.run import train
from dipole.core.train.run_folder import RunFolder
from dipole.core.utils.errors import DipoleError
from dipole.core.utils.files import atomic_write

STEPS = 3  # timed steps of each batch, after an untimed first step
PLAYED = 40  # agent steps of random actions
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
    "agent": ("lmcl-table5", (), (32, 96)),
    "small-agent": ("lmcl-table5-small", ("rl.size=56", "rl.image_size=48"), (64, 192)),
}
"""Recipe, settings that put data at hand in place of its own, and two sizes of a batch."""


def run_entry(job: Job) -> dict[str, Any]:
    """Seconds of a unit of a run's length, and what does not depend on its length."""
    config = job.config
    unit = "epoch" if config.train.epochs is not None else "step"
    one = 1 if unit == "epoch" else max(1, round((config.train.steps or 1) * 0.05))
    one = max(one, round(config.train.evaluate_every or 0))
    seconds = []
    for length in (one, 3 * one):
        settings = [*job.overrides, *PLAIN[:3], f"train.{unit}s={length}"]
        seconds.append(_trained(load(job.recipe, settings).config))
    slope = max(seconds[1] - seconds[0], 0.02 * seconds[1]) / (2 * one)
    fixed = max(seconds[0] - slope * one, 0.0)
    return {"kind": kind_of(config), "unit": unit, "fixed": round(fixed, 3), "per_unit": float(f"{slope:.4g}")}


def step_entry(recipe: str, settings: Sequence[str], batches: tuple[int, int]) -> dict[str, Any]:
    """Seconds of a step that do not depend on its rows, and those of a billion operations."""
    given = [[*settings, f"train.batch_size={rows}"] for rows in batches]
    config = load(recipe, given[1]).config
    timed = _updates if config.domain == "rl" else _steps
    few, more = (timed(recipe, each) for each in given)
    work = work_of(config)
    assert work is not None
    row = max(more - few, 0.2 * more) / (batches[1] - batches[0])
    return {
        "family": work.family,
        "flops": work.flops,
        "per_step": float(f"{max(few - row * batches[0], 0.0):.3g}"),
        "per_gigaflop": float(f"{row / work.flops * 1e9:.4g}"),
    }


def _steps(recipe: str, settings: Sequence[str]) -> float:
    """Processor seconds of a step of the loop: the median of a few."""
    config = load(recipe, settings).config
    with tempfile.TemporaryDirectory() as folder:
        adapter, objective = build(config, RunFolder(Path(folder)), torch.device("cpu"))
        assert objective is not None
        parameters = [p for p in [*adapter.module.parameters(), *objective.parameters()] if p.requires_grad]
        optimizer = build_optimizer(config.train, parameters)
        step = LossModule(adapter, objective, Encoding(adapter.encoders(), config.train, False), config.train.precision)
        seconds = []
        batches = iter(adapter.batches(0))
        for _ in range(STEPS + 1):
            began = time.process_time()
            with suppress(StopIteration):
                loss = step(NoScatter(next(batches)))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                objective.after_step(1e-3, 1, 10)
                adapter.after_step()
                seconds.append(time.process_time() - began)
        return median(seconds[1:])


def _updates(recipe: str, settings: Sequence[str]) -> float:
    """Processor seconds of an agent's step in its environment and of an update: the median of a few."""
    config = load(recipe, settings).config
    with tempfile.TemporaryDirectory() as folder:
        adapter, objective = build(config, RunFolder(Path(folder)), torch.device("cpu"))
        agent: Any = adapter.agent  # type: ignore[attr-defined]
        agent.adopt(objective)
        began = time.process_time()
        agent.learn(PLAYED, log_interval=None)
        step = (time.process_time() - began) / PLAYED
        seconds = []
        for _ in range(STEPS + 1):
            began = time.process_time()
            agent.train(1, config.train.batch_size)
            seconds.append(time.process_time() - began)
    return step + median(seconds[1:])


def _trained(config: RunConfig) -> float:
    with tempfile.TemporaryDirectory() as folder:
        began = time.process_time()
        train(config, Path(folder), quiet=True)
        return time.process_time() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these suites, or encoders of the table of steps")
    parser.add_argument("--again", action="store_true", help="also what the table has")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    names = arguments.only or [*TYPICAL, *suites()]
    for name in names:
        wanted: dict[str, Any] = {}
        if name in TYPICAL:
            wanted = {name: (step_entry, TYPICAL[name])}
        elif "small" in read_suite(name).scale:
            jobs = {job.recipe: job for job in reversed(read_suite(name).at("small").jobs())}
            wanted = {f"{name} {recipe}": (run_entry, (job,)) for recipe, job in jobs.items()}
        for label, (make, given) in wanted.items():
            kept = "steps" if make is step_entry else "runs"
            known = [entry for entry in table[kept] if entry["name"] == label]
            alike = make is run_entry and any(entry["kind"] == kind_of(given[0].config) for entry in table["runs"])
            if (known or alike) and not arguments.again:
                continue
            try:
                pace = measure_pace()
                entry = make(*given)
            except (DipoleError, OSError) as error:
                print(f"{label}: left out: {' '.join(str(error).split())[:300]}", file=sys.stderr)
                continue
            today = datetime.now(UTC).date().isoformat()
            entry = {"name": label, "machine": machine_name(), "date": today, "pace": round(pace, 5), **entry}
            table[kept] = [each for each in table[kept] if each["name"] != label] + [entry]
            atomic_write(TABLE, json.dumps(table, indent=1) + "\n")
            print({key: value for key, value in entry.items() if key != "kind"}, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
