"""Makes the table of reference times (`times.json`) again: a short run of each kind that the shipped suites have.

    python -m dipole.benchmarks.run.measure_times [--only SUITE ...]

Processor seconds of one thread, so that a machine that is shared counts little of what others do. Of each suite and
recipe the first run is taken, at one and at three units of length; what lies between them is the time of a unit. Runs
of the papers' scale are measured on data that ship with scikit-learn and Python, in batches of `FEW`, and multiplied by
the rows of an epoch. What cannot be measured here is left out and said.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from dipole.benchmarks.run.reference import TABLE, calibration, kind_of, machine_name, rows_of
from dipole.benchmarks.suite import Job, read_suite, suites
from dipole.core.ground.errors import DipoleError
from dipole.core.ground.files import atomic_write
from dipole.core.train.loop import train
from dipole.core.train.recipe import load

FEW = 8
STAND_INS = {
    "vision": [
        "vision.data.source=digits", "vision.data.pretrain_split=", "vision.data.pretrain=", "vision.data.limit=64",
        "vision.data.classes=", "vision.probe.probes=['knn']", "vision.probe.baselines=false",
        "vision.data.test_split=test",
    ],
    "text": ["text.corpus=pydoc", "text.senteval=", "text.limit=400"],
}  # fmt: skip


def measured(job: Job, short: bool) -> dict[str, Any]:
    """Seconds of a unit of a run's length, and what does not depend on its length."""
    config = job.config
    unit = "epoch" if config.train.epochs is not None else "step"
    one = 1 if unit == "epoch" else max(1, round((config.train.steps or 1) * 0.05))
    every = config.train.evaluate_every or 0
    one = max(one, round(every)) if not short else 1
    settings = [*job.overrides, "train.warmup=0", "train.schedule=constant", "train.milestones="]
    rows = 1
    if short:
        settings += [*STAND_INS.get(config.domain, ()), "train.epochs=", f"train.batch_size={FEW}"]
        rows = rows_of(kind_of(config)) if unit == "epoch" else FEW
    seconds = []
    for length in (one, 3 * one):
        key = "steps" if short or unit == "step" else "epochs"
        with tempfile.TemporaryDirectory() as folder:
            began = time.process_time()
            train(load(job.recipe, [*settings, f"train.{key}={length}"]).config, Path(folder), quiet=True)
            seconds.append(time.process_time() - began)
    slope = max(seconds[1] - seconds[0], 0.02 * seconds[1]) / (2 * one) * (rows / FEW if short else 1)
    fixed = max(seconds[0] - slope * one, 0.0) if not short else 0.3 * slope * (1 if unit == "epoch" else 0)
    return {"kind": kind_of(config), "unit": unit, "fixed": round(fixed, 3), "per_unit": float(f"{slope:.4g}")} | (
        {"stand_in": True} if short else {}
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="SUITE", default=list(suites()), help="these suites")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no further run after this")
    parser.add_argument("--keep", action="store_true", help="add to the table what it has nothing of")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    entries: list[dict[str, Any]] = []
    if arguments.keep:
        entries = json.loads(TABLE.read_text(encoding="utf-8"))["entries"]
    end, seen = time.monotonic() + 60 * arguments.minutes, set()
    for scale in ("small", "paper"):
        for name in arguments.only:
            suite = read_suite(name)
            jobs = suite.at(scale).jobs() if scale in suite.scale else []
            for job in {job.recipe: job for job in reversed(jobs)}.values():
                kind = json.dumps([job.recipe if scale == "paper" else kind_of(job.config)], sort_keys=True)
                had = any(entry["suite"] == f"{name}-{scale}" and entry["recipe"] == job.recipe for entry in entries)
                if kind in seen or had or time.monotonic() > end:
                    continue
                seen.add(kind)
                try:
                    entry = measured(job, short=scale == "paper" and job.config.domain != "toy")
                except (DipoleError, KeyError, TypeError, OSError) as error:
                    print(
                        f"{name} {scale} {job.recipe}: left out: {' '.join(str(error).split())[:200]}", file=sys.stderr
                    )
                    continue
                entries.append({"suite": f"{name}-{scale}", "recipe": job.recipe, **entry})
                print(
                    f"{name} {scale} {job.recipe}: {entry['fixed']:.2f} + {entry['per_unit']:.4g} s per {entry['unit']}"
                )
                table = {"machine": machine_name(), "pace": calibration(), "entries": entries}
                atomic_write(TABLE, json.dumps(table, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
