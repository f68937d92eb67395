"""Time and memory of the losses, forward and backward, against plain PyTorch and other libraries.

    python -m dipole.benchmarks.speed.losses [--batches 16,64,256,1024,4096,8192] [--threads 1,all] [--out FILE]

Float32, d = 128, two views of B points (2B rows). Every measurement runs in a fresh process, and the rounds of the
subjects alternate. With one thread the time is processor time, otherwise wall time, and the median over rounds counts.
Memory is the peak above what the process held after its imports. lightly and pytorch-metric-learning are measured if
they are installed.
"""

import argparse
import os
import re
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from multiprocessing import get_context
from pathlib import Path

import torch

from dipole.benchmarks.speed.subjects import BUILD, TimedLoss, subjects
from dipole.benchmarks.speed.timing import CPU, RESULTS, SLOW, machine
from dipole.benchmarks.studies.common import load, save
from dipole.core.utils.machine import peak_memory

WIDTH = 128
OURS = (
    "infonce", "infonce+dp(reduction=anchor_sum)", "dcl", "hcl", "align_uniform", "cacr", "cacr K=4", "triplet", "co2",
    "blocks", "swav(prototypes=300, dim=128)", "infonce+cllr(dim=128)",
)  # fmt: skip
DENSE_LIMIT = 4096  # Larger batches measure only InfoNCE in plain PyTorch, more than twice as large ones nothing.


def case_of(loss: str, batch: int) -> TimedLoss:
    """Return the case of a loss. "K=4" means five views with the same number of rows."""
    views = 5 if loss.endswith("K=4") else 2
    return TimedLoss(loss.removesuffix(" K=4"), 2 * batch // views * views, WIDTH, views=views)


def chosen(batch: int) -> list[tuple[str, str]]:
    """Return what is measured at a batch size: names of a library and of a loss."""
    found = []
    for loss in OURS:
        for library in subjects(case_of(loss, batch), CPU):
            is_linear = library == "dipole" and loss != "co2"
            fits = is_linear or batch <= DENSE_LIMIT or (loss == "infonce" and batch <= 2 * DENSE_LIMIT)
            if fits and library not in ("dipole, eager tiles", "dense PyTorch, compiled"):
                found.append((library, loss))
    return found


def measure_here(library: str, loss: str, batch: int, threads: int) -> tuple[float, float]:
    """Return the milliseconds and megabytes of one subject in this process."""
    torch.set_num_threads(threads)
    case = case_of(loss, batch)
    function = BUILD[library](case, CPU)
    clock = time.process_time if threads == 1 else time.perf_counter
    base = peak_memory()
    views = case.embeddings(CPU, torch.Generator().manual_seed(0))

    def seconds(repeats: int) -> float:
        began = clock()
        for _ in range(repeats):
            for view in views:
                view.grad = None
            function(views).backward()
        return (clock() - began) / repeats

    took = seconds(1)
    if took < SLOW:  # others are measured once, without a warm-up
        took = max(seconds(1), 1e-4)
        # 50 steps of 16 pairs are a few milliseconds, too few to measure.
        took = seconds(max(1, min(50, round(1.0 / took)), min(1000, round(0.2 / took))))
    return 1e3 * took, (peak_memory() - base) / 2**20


def measure(batch: int, threads: int, rounds: int, only: str) -> dict[str, dict[str, float]]:
    """Return the median time and the peak memory of each subject. Subjects alternate, one process at a time."""
    os.environ |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    found: dict[str, list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for library, loss in chosen(batch):
            name = f"{library} {loss}"
            if not re.search(only, name):
                continue
            try:
                with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                    row = pool.submit(measure_here, library, loss, batch, threads).result()
            except Exception as error:  # an error of another library, or a killed process
                print(f"  {name}: could not be measured: {error}", file=sys.stderr)
            else:
                found.setdefault(name, []).append(row)
    return {
        name: {"ms": statistics.median(ms for ms, _ in rows), "mb": max(mb for _, mb in rows)}
        for name, rows in found.items()
    }


def ratios(table: dict[str, dict[str, float]]) -> list[str]:
    lines = []
    for loss in OURS:
        mine = table.get(f"dipole {loss}")
        for name, row in table.items():
            if mine and name.endswith(f" {loss}") and not name.startswith("dipole"):
                speed, memory = row["ms"] / mine["ms"], row["mb"] / max(mine["mb"], 0.1)
                lines.append(f"{loss}: {speed:.2f} x the speed of {name}, 1/{memory:.1f} of its memory")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="16,64,256,1024,4096,8192", help="points per view, separated by commas")
    parser.add_argument("--threads", default="1,all", help="numbers of threads, separated by commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="measure only subjects that match this regular expression")
    parser.add_argument("--out", type=Path, default=RESULTS / "losses.json")
    options = parser.parse_args()
    tables = load(options.out, {"tables": []})["tables"]
    for word in options.threads.split(","):
        threads = os.cpu_count() or 1 if word == "all" else int(word)
        for batch in map(int, options.batches.split(",")):
            table = measure(batch, threads, options.rounds if batch <= 8192 else 1, options.only)
            entry = {"batch": batch, "threads": threads, "date": date.today().isoformat(), "machine": machine()}
            # A new measurement replaces the old one of its batch and threads.
            tables = [each for each in tables if (each["batch"], each["threads"]) != (batch, threads)]
            tables.append(entry | {"subjects": table, "ratios": ratios(table)})
            save(options.out, {"tables": tables})
            kind = "processor" if threads == 1 else "wall"
            print(f"\nB = {batch} ({2 * batch} rows), {threads} thread(s), {kind} time of forward + backward")
            for name, row in sorted(table.items(), key=lambda item: item[1]["ms"]):
                print(f"  {name:50s} {row['ms']:10.1f} ms {row['mb']:9.0f} MB")
            print("\n".join(f"  -> {line}" for line in ratios(table)))


if __name__ == "__main__":
    main()
