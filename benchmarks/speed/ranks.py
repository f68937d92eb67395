"""Time and memory of a loss over several ranks: candidates gathered on every rank, against candidates in a ring.

    python -m dipole.benchmarks.speed.ranks [--ranks 2,4] [--rows 1024,2048,4096] [--steps 3] [--out FILE]

InfoNCE, forward and backward, float32, d = 128, gloo on this machine with a thread per rank. `rows` counts those of one
rank: two views of half as many instances ("views", where anchors are the candidates) or as many queries and keys
("cross"). Every measurement runs in fresh processes. Memory is the peak of the largest rank above what it held before
the first step; time is processor time of a rank and wall time of a step, medians over steps.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results")
WIDTH = 128
KINDS = ("views", "cross")
WAYS = ("gather", "ring")


def child(rank: int, ranks: int, rows: int, kind: str, way: str, steps: int, file: str) -> None:
    """Measure as one rank and print {"mb", "cpu_ms", "ms"}."""
    import torch
    import torch.distributed as dist

    import dipole
    from dipole import Pairs

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)
    objective = dipole.objective("infonce", ring=way == "ring")
    generator = torch.Generator().manual_seed(rank)

    def step(count: int) -> None:
        half = count // 2 if kind == "views" else count
        one, two = torch.randn(2, half, WIDTH, generator=generator).requires_grad_()
        objective(Pairs.from_views([one, two]) if kind == "views" else Pairs.cross(one, two)).loss.backward()

    step(64)  # what is loaded and allocated at the first call is no matter of size
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmHWM")
    wall, cpu = [], []
    for _ in range(steps):
        dist.barrier()
        start, busy = time.perf_counter(), time.process_time()
        step(rows)
        wall.append(1e3 * (time.perf_counter() - start))
        cpu.append(1e3 * (time.process_time() - busy))
    peak = _status("VmHWM") - before
    dist.barrier()
    found = {"mb": peak / 1024, "cpu_ms": statistics.median(cpu), "ms": statistics.median(wall)}
    print(json.dumps({name: round(value, 1) for name, value in found.items()}))
    dist.destroy_process_group()


def _status(name: str) -> int:
    """A line of /proc/self/status, in kB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def measure(ranks: int, rows: int, kind: str, way: str, steps: int) -> dict[str, Any]:
    """The largest of the ranks' numbers."""
    with tempfile.TemporaryDirectory() as folder:
        given = [str(ranks), str(rows), kind, way, str(steps), str(Path(folder) / "meet")]
        command = [sys.executable, "-m", "dipole.benchmarks.speed.ranks", "--child"]
        processes = [
            subprocess.Popen(
                [*command, str(rank), *given],
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"},
            )
            for rank in range(ranks)
        ]
        found = [json.loads(process.communicate()[0].splitlines()[-1]) for process in processes]
    return {"ranks": ranks, "rows": rows, "kind": kind, "way": way} | {
        name: max(each[name] for each in found) for name in ("mb", "cpu_ms", "ms")
    }


def table(found: list[dict[str, Any]]) -> str:
    """Both ways side by side."""
    lines = [
        "| ranks | rows of a rank | pairs | gather MB | ring MB | gather CPU ms | ring CPU ms | gather ms | ring ms |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for one, two in zip(found[::2], found[1::2], strict=True):
        numbers = [f"{each[name]:.0f}" for name in ("mb", "cpu_ms", "ms") for each in (one, two)]
        lines.append(f"| {one['ranks']} | {one['rows']} | {one['kind']} | {' | '.join(numbers)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks")
    parser.add_argument("--rows", default="1024,2048,4096", help="rows of each rank")
    parser.add_argument("--steps", type=int, default=3, help="steps of a measurement")
    parser.add_argument("--out", type=Path, default=RESULTS / "ranks.json")
    parser.add_argument("--child", nargs=7, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        rank, ranks, rows, kind, way, steps, file = args.child
        return child(int(rank), int(ranks), int(rows), kind, way, int(steps), file)
    import torch

    about = {"date": date.today().isoformat(), "torch": torch.__version__, "cores": os.cpu_count(), "width": WIDTH}
    found: list[dict[str, Any]] = []
    for ranks in map(int, args.ranks.split(",")):
        for kind in KINDS:
            for rows in map(int, args.rows.split(",")):
                found += [measure(ranks, rows, kind, way, args.steps) for way in WAYS]
                args.out.write_text(json.dumps(about | {"objective": "infonce", "found": found}, indent=1) + "\n")
    print(table(found))


if __name__ == "__main__":
    main()
