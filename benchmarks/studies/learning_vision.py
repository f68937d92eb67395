"""Does training help on real images? The suite `cifar10-learning`, against untrained encoders and raw pixels.

    python -m dipole.benchmarks.studies.learning_vision --data DATA/cifar10 [--runs runs]
        [--out benchmarks/results/vision-learning.json]

All objectives of a seed are trained before the next seed. A finished run is not run again and an unfinished one resumes
from its checkpoint; the results are written after every run, each as mean with its 95 % t-interval and, against
InfoNCE on the common seeds, a paired t-test (Holm over the measurements of an objective).
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from dipole.benchmarks.manifest import manifest
from dipole.benchmarks.report.results import CellResult, SuiteResults
from dipole.benchmarks.run_records import read_records
from dipole.benchmarks.statistics import summarize
from dipole.benchmarks.suite import Sized, read_suite
from dipole.core.train.run import train

SUITE = "cifar10-learning"
BASELINES = ("untrained", "raw")
LEVEL = 0.05


def sized(data: Path) -> Sized:
    """The suite on the .npz files of a folder."""
    places = [f"vision.data.{part}={data / f'cifar10_{name}.npz'}" for part, name in FILES.items()]
    return read_suite(SUITE).at("small", places)


FILES = {"source": "train", "test": "test"}


def verdict(cell: CellResult) -> str:
    """What the paired test says at this number of seeds."""
    if cell.against_base is None or cell.against_base.n < 2:
        return ""
    if cell.p_holm >= LEVEL:
        return "cannot be decided at this n"
    return "better" if cell.against_base.difference > 0 else "worse"


def summary(found: SuiteResults) -> dict[str, Any]:
    """Measurement -> baseline or objective -> values by seed, mean, interval, test against InfoNCE, verdict."""
    table: dict[str, dict[str, Any]] = {}
    for column in found.manifest.columns:
        rows = table.setdefault(column.name, {})
        records = found.runs_of("infonce", column.name)
        for name in BASELINES:
            measured = {r.seed: r.results[f"{name}/{column.metric}"] for r in records}
            values = {seed: value * column.factor for seed, value in measured.items() if value is not None}
            if values:
                rows[name] = {"values": values, **asdict(summarize(list(values.values())))}
    for cell in found.cells:
        if cell.summary is not None:
            entry = {"objective": cell.row.objective, "values": dict(cell.samples), **asdict(cell.summary)}
            if cell.against_base is not None:
                entry |= {"against infonce": asdict(cell.against_base), "p_holm": cell.p_holm, "verdict": verdict(cell)}
            table[cell.column.name][cell.row.label] = entry
    return table


def markdown(table: dict[str, dict[str, Any]]) -> str:
    """Mean +- half the interval; in bold what differs from InfoNCE."""
    names = list(dict.fromkeys(name for rows in table.values() for name in rows))
    lines = ["| | " + " | ".join(table) + " |", "|---" * (len(table) + 1) + "|"]
    for name in names:
        cells = []
        for rows in table.values():
            entry = rows.get(name)
            text = "" if entry is None else f"{entry['mean']:.1f} +- {entry['high'] - entry['mean']:.1f}"
            verdict_there = entry.get("verdict") if entry is not None else None
            cells.append(f"**{text}** {verdict_there}" if verdict_there in ("better", "worse") else text)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write(out: Path, wanted: Sized, found: SuiteResults) -> dict[str, dict[str, Any]]:
    """Keep the summary and what it stands on."""
    table = summary(found)
    records = [record for record in found.records.values() if record.status == "done"]
    kept = {
        "suite": SUITE,
        "settings": list(wanted.scale.set),
        "hardware": sorted({record.hardware.device_name for record in records}),
        "torch": sorted({record.versions["torch"] for record in records}),
        "data": sorted({record.data["fingerprint"] for record in records}),
        "minutes": round(sum(record.wall_seconds for record in records) / 60, 1),
        "runs": len(records),
        "measurements": table,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of cifar10_train.npz and cifar10_test.npz")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of all runs")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/vision-learning.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    wanted = sized(arguments.data)
    jobs = wanted.jobs()
    table: dict[str, dict[str, Any]] = {}
    for job in sorted(jobs, key=lambda job: job.config.seed):
        record = train(job.config, arguments.runs)
        table = write(arguments.out, wanted, SuiteResults(manifest(wanted, jobs), read_records(arguments.runs).records))
        print(job.config.name, record.seed, record.results, f"{record.wall_seconds:.0f} s", flush=True)
    print(markdown(table))


if __name__ == "__main__":
    main()
