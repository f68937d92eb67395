"""Does training help on real images? Compare the suite `cifar10-learning` with untrained encoders and raw pixels.

    python -m dipole.benchmarks.studies.learning_vision --data DATA/cifar10 [--runs runs]
        [--out benchmarks/results/vision-learning.json]

Finished runs are not repeated, and unfinished ones resume from their checkpoint. The results are written after every
run. `dipole report` on the same folder of runs tests the differences from InfoNCE.
"""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from dipole.benchmarks.manifest import manifest
from dipole.benchmarks.report.results import SuiteResults
from dipole.benchmarks.run_records import read_records
from dipole.benchmarks.statistics import summarize
from dipole.benchmarks.studies.common import markdown, mean_and_interval, save
from dipole.benchmarks.suite import Sized, read_suite
from dipole.core.train.run import train

SUITE = "cifar10-learning"
BASELINES = ("untrained", "raw")


def sized(data: Path) -> Sized:
    """Return the suite with the .npz files of a folder as its data."""
    files = [f"vision.data.source={data / 'cifar10_train.npz'}", f"vision.data.test={data / 'cifar10_test.npz'}"]
    return read_suite(SUITE).at("small", files)


def summary(found: SuiteResults) -> dict[str, dict[str, Any]]:
    """Return measurement -> baseline or method -> values by seed, mean and 95 % t-interval."""
    measurements: dict[str, dict[str, Any]] = {}
    for column in found.manifest.columns:
        values: dict[str, dict[int, float]] = {}
        for name in BASELINES:
            for record in found.runs_of("infonce", column.name):
                value = record.results[f"{name}/{column.metric}"]
                if value is not None:
                    values.setdefault(name, {})[record.seed] = value * column.factor
        values |= {cell.row.label: dict(cell.samples) for cell in found.cells if cell.column.name == column.name}
        measurements[column.name] = {
            name: {"values": by_seed, **asdict(summarize(list(by_seed.values())))}
            for name, by_seed in values.items()
            if by_seed
        }
    return measurements


def table(measurements: dict[str, dict[str, Any]]) -> str:
    """Return a Markdown table of means and half intervals."""
    rows = []
    for name in dict.fromkeys(name for cells in measurements.values() for name in cells):
        values = [list(cells.get(name, {"values": {}})["values"].values()) for cells in measurements.values()]
        rows.append([name, *(mean_and_interval(each) for each in values)])
    return markdown(["", *measurements], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of cifar10_train.npz and cifar10_test.npz")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of all runs")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/vision-learning.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    suite = sized(arguments.data)
    jobs = suite.jobs()
    measurements: dict[str, dict[str, Any]] = {}
    for job in sorted(jobs, key=lambda job: job.config.seed):
        record = train(job.config, arguments.runs)
        measurements = summary(SuiteResults(manifest(suite, jobs), read_records(arguments.runs).records))
        save(arguments.out, {"suite": SUITE, "settings": list(suite.scale.set), "measurements": measurements})
        print(job.config.name, record.seed, record.results, f"{record.wall_seconds:.0f} s", flush=True)
    print(table(measurements))


if __name__ == "__main__":
    main()
