"""Do agents learn? Train cartpole balance with three objectives and compare the first training returns with the last.

    python -m dipole.benchmarks.studies.learning_rl [--runs runs] [--seeds 0,1,2] [--set train.precision=bf16-mixed]

The recipe is `cartpole-balance-small`. Finished runs are not repeated, and unfinished ones resume from their
checkpoint. `--out` writes a summary. Two calls with different `--seeds` may share the folder of runs.
"""

import argparse
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from dipole.benchmarks.studies.common import markdown, save
from dipole.core.record import RunRecord
from dipole.core.train.config import RunConfig
from dipole.core.train.metrics import read_metrics
from dipole.core.train.recipe import load
from dipole.core.train.run import train

RECIPE = "cartpole-balance-small"
OBJECTIVES = {
    "none": "none",
    "infonce": "infonce(similarity=bilinear, temperature=1)",
    "infonce+dp": "infonce(similarity=bilinear, temperature=1) + 0.1*dp",
}
WINDOW = 8000
"""Training returns are averaged over so many environment steps (a thousand agent steps)."""


def configuration(objective: str, seed: int, overrides: list[str]) -> RunConfig:
    """Return the recipe with an objective of `OBJECTIVES` and a seed."""
    return load(RECIPE, [f"objective={OBJECTIVES[objective]}", f"seed={seed}", "device=cpu", *overrides]).config


def summarise(record: RunRecord, metrics: Path) -> dict[str, Any]:
    """Return the mean training return of each window, the deterministic evaluations by step, and the seconds."""
    lines = read_metrics(metrics)
    training = [(line["step"], line["train/return"]) for line in lines if line.get("train/return") is not None]
    means = []
    for low in range(0, max(step for step, _ in training), WINDOW):
        returns = [value for step, value in training if low < step <= low + WINDOW]
        means.append(round(float(np.mean(returns or [np.nan])), 1))
    evaluation = {str(line["step"]): round(line["eval/return/mean"], 1) for line in lines if "eval/return/mean" in line}
    return {"training": means, "evaluation": evaluation, "seconds": round(record.wall_seconds)}


def table(runs: dict[str, dict[str, Any]]) -> str:
    """Return a Markdown table with a row for each objective and seed."""
    windows = max(len(run["training"]) for run in runs.values())
    head = [f"{(number + 1) * WINDOW // 1000}k" for number in range(windows)]
    rows = []
    for name, run in sorted(runs.items()):
        cells = [f"{value:.0f}" for value in run["training"]]
        first, *_, last = run["evaluation"].values()
        rows.append([name, *cells, f"{first:.0f} to {last:.0f}", f"{run['seconds'] / 60:.0f}"])
    return markdown(["objective, seed", *head, "evaluated", "minutes"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of all runs")
    parser.add_argument("--out", type=Path, help="JSON file of the summary")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    runs: dict[str, dict[str, Any]] = {}
    for seed, name in product(arguments.seeds.split(","), OBJECTIVES):
        record = train(configuration(name, int(seed), arguments.overrides), arguments.runs)
        runs[f"{name}, {seed}"] = summarise(record, arguments.runs / record.hash / "metrics.jsonl")
        print(f"{name}, {seed}: {runs[f'{name}, {seed}']}", flush=True)
        if arguments.out is not None:
            save(arguments.out, {"recipe": RECIPE, "set": arguments.overrides, "runs": runs})
    print(table(runs))


if __name__ == "__main__":
    main()
