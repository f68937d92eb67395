"""Does the agent learn? Cartpole balance at the small scale: objectives by seeds, first against last training returns.

    python -m dipole.benchmarks.studies.learning_rl [--runs runs] [--seeds 0,1,2] [--set train.precision=bf16-mixed]

Trains the recipe `cartpole-balance-small`, all objectives of a seed before the next seed. Every run resumes from its
checkpoint, and a finished one is not run again: an interrupted call goes on where it stopped. `--out` keeps a summary.
Two calls with different `--seeds` may share the folder of runs.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from dipole.core.record import RunRecord
from dipole.core.train.config import RunConfig
from dipole.core.train.recipe import load
from dipole.core.train.run import train
from dipole.core.utils.errors import DipoleError

RECIPE = "cartpole-balance-small"
OBJECTIVES = {
    "none": "none",
    "infonce": "infonce(similarity=bilinear, temperature=1)",
    "infonce+dp": "infonce(similarity=bilinear, temperature=1) + 0.1*dp",
}
WINDOW = 8000
"""Environment steps (a thousand agent steps) at either end whose training returns are compared."""


def configuration(objective: str, seed: int, overrides: list[str]) -> RunConfig:
    """The recipe with an objective of `OBJECTIVES` and a seed."""
    return load(RECIPE, [f"objective={OBJECTIVES[objective]}", f"seed={seed}", "device=cpu", *overrides]).config


def summarise(record: RunRecord, metrics: Path) -> dict[str, Any]:
    """Training returns per window, the deterministic evaluations, and what the run took."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    training = [(line["step"], line["train/return"]) for line in lines if line.get("train/return") is not None]
    windows = range(0, max(step for step, _ in training), WINDOW)
    means = [np.mean([value for step, value in training if low < step <= low + WINDOW] or [np.nan]) for low in windows]
    return {
        "training": [round(float(mean), 1) for mean in means],
        "evaluation": {
            str(line["step"]): round(line["eval/return/mean"], 1) for line in lines if "eval/return/mean" in line
        },
        "seconds": round(record.wall_seconds),
    }


def table(runs: dict[str, dict[str, Any]]) -> str:
    """Markdown: a row for each objective and seed."""
    windows = max(len(run["training"]) for run in runs.values())
    head = [f"{(number + 1) * WINDOW // 1000}k" for number in range(windows)]
    lines = ["| objective, seed | " + " | ".join(head) + " | evaluated | minutes |", "|---" * (windows + 3) + "|"]
    for name, run in sorted(runs.items()):
        cells = [f"{value:.0f}" for value in run["training"]]
        first, *_, last = run["evaluation"].values()
        lines.append(f"| {name} | {' | '.join(cells)} | {first:.0f} to {last:.0f} | {run['seconds'] / 60:.0f} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of all runs")
    parser.add_argument("--out", type=Path, help="JSON file of the summary")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    runs: dict[str, dict[str, Any]] = {}
    for seed in map(int, arguments.seeds.split(",")):
        for name in OBJECTIVES:
            config = configuration(name, seed, arguments.overrides)
            record = train(config, arguments.runs)
            runs[f"{name}, {seed}"] = summarise(record, arguments.runs / record.hash / "metrics.jsonl")
            print(f"{name}, {seed}: {runs[f'{name}, {seed}']}", flush=True)
            if arguments.out is not None:
                arguments.out.parent.mkdir(parents=True, exist_ok=True)
                kept = {"recipe": RECIPE, "set": arguments.overrides, "runs": runs}
                arguments.out.write_text(json.dumps(kept, indent=1) + "\n")
    print(table(runs))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except DipoleError as error:
        sys.exit(f"error: {error}")
