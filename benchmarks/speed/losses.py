"""Time and memory of the losses, forward and backward, ours against dense PyTorch and against other libraries.

    python -m dipole.benchmarks.speed.losses [--peers DIR] [--batches 16,64,256,1024,4096,8192] [--threads 1,all]
                                             [--out FILE]

Every measurement runs in a fresh process, float32, d = 128, two views of B points (2B rows). Memory is the peak above
what the process held after its imports. With one thread the time is processor time, otherwise wall time; the median
over rounds counts, and the rounds of different subjects alternate. `--peers DIR` names a folder filled by
`pip install --no-deps --target DIR lightly pytorch-metric-learning`; a peer that is installed is found without it.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results")
WIDTH = 128
PML_LIMIT = 256  # its NT-Xent is cubic in the batch
LIGHTLY = {
    "lightly NTXentLoss": ("lightly/loss/ntx_ent_loss.py", "NTXentLoss", {"temperature": 0.5}),
    "lightly DCLLoss": ("lightly/loss/dcl_loss.py", "DCLLoss", {"temperature": 0.5}),
}
PML = "pytorch-metric-learning NTXentLoss"
OURS = (
    "infonce",
    "infonce+dp",
    "dcl",
    "hcl",
    "align_uniform",
    "cacr",
    "cacr K=4",
    "triplet",
    "co2",
    "blocks",
    "swav(prototypes=300, dim=128)",
    "infonce+cllr(dim=128)",
)
DENSE_LIMIT = 4096  # above it only the plain InfoNCE is measured dense, above twice that nothing
SLOW = 5.0  # seconds; a slower step is measured once, without a warm-up


def subjects(batch: int, peers: Path | None) -> list[str]:
    """What is measured at a batch size."""
    from dipole.benchmarks.speed.dense import DENSE

    names = [f"dipole {name}" for name in OURS if batch <= DENSE_LIMIT or name != "co2"]
    if batch > 2 * DENSE_LIMIT:
        return names[:1] if batch > 8 * DENSE_LIMIT else names
    names += [f"dense {name}" for name in ((*DENSE, "cacr K=4") if batch <= DENSE_LIMIT else ("infonce",))]
    names += [name for name, (file, *_) in LIGHTLY.items() if _find(file, peers)]
    if batch <= PML_LIMIT and _find("pytorch_metric_learning/losses/__init__.py", peers):
        names.append(PML)
    return names


def _find(file: str, peers: Path | None) -> Path | None:
    return next((Path(p) / file for p in [peers, *sys.path] if p and (Path(p) / file).is_file()), None)


def load_lightly(name: str, peers: Path | None, options: dict[str, Any] | None = None) -> Any:
    """Load one loss file without its package, whose import needs torchvision; the loss with other options than ours."""
    import importlib.util
    import types

    file, cls, usual = LIGHTLY[name]
    path = _find(file, peers)
    assert path is not None
    for package in ("lightly", "lightly.loss", "lightly.models", "lightly.models.modules", "lightly.utils"):
        module = types.ModuleType(package)
        module.__path__ = [str(path.parents[1].joinpath(*package.split(".")[1:]))]
        sys.modules.setdefault(package, module)
    # Only gathering over ranks uses it, and it is the file that needs torchvision.
    sys.modules["lightly.models"].utils = sys.modules["lightly.models.utils"] = types.ModuleType("utils")  # type: ignore[attr-defined]
    spec = importlib.util.spec_from_file_location(f"lightly.loss.{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, cls)(**(usual | (options or {})))


def _build(name: str, batch: int, peers: Path | None) -> tuple[Callable[[list[Any]], Any], int, int]:
    """A function of views, the number of views, and the rows of each."""
    import torch

    library, _, what = name.partition(" ")
    views = 5 if what == "cacr K=4" else 2
    rows = 2 * batch // views
    if library == "dipole":
        import dipole

        objective = dipole.objective(what.removesuffix(" K=4"), dim=WIDTH)
        return lambda z: objective(*z).loss, views, rows
    if library == "dense":
        from dipole.benchmarks.speed.dense import DENSE

        return DENSE[what.removesuffix(" K=4")], views, rows
    if name == PML:
        if peers:
            sys.path.append(str(peers))
        from pytorch_metric_learning.losses import NTXentLoss

        loss = NTXentLoss(temperature=0.5)
        labels = torch.arange(batch).repeat(2)
        return lambda z: loss(torch.cat(z), labels), views, rows
    peer = load_lightly(name, peers)
    return lambda z: peer(z[0], z[1]), views, rows


def child(name: str, batch: int, threads: int, rounds: int, peers: Path | None) -> None:
    """Measure in this process, one round for each line read, and print {"ms", "mb"} as JSON lines."""
    import time

    import torch

    from dipole.core.utils.machine import peak_memory

    torch.set_num_threads(threads)
    function, views, rows = _build(name, batch, peers)
    clock = time.process_time if threads == 1 else time.perf_counter
    base = peak_memory()
    generator = torch.Generator().manual_seed(0)
    z = [torch.randn(rows, WIDTH, generator=generator).requires_grad_() for _ in range(views)]

    def step() -> None:
        for view in z:
            view.grad = None
        function(z).backward()

    start = clock()
    step()
    first = clock() - start
    if first < SLOW:
        start = clock()
        step()
    took = max(clock() - start, 1e-4)
    # At 16 pairs 50 steps are a few milliseconds, hardly more than what else a process does meanwhile.
    repeat = max(1, min(50, round(1.0 / took)), min(1000, round(0.2 / took)))
    print(json.dumps({"ready": True}), flush=True)
    for _ in range(rounds):
        sys.stdin.readline()
        start = clock()
        if first < SLOW:
            for _ in range(repeat):
                step()
        elapsed = ((clock() - start) / repeat if first < SLOW else first) * 1000
        peak = (peak_memory() - base) / 2**20
        print(json.dumps({"ms": elapsed, "mb": peak}), flush=True)


def measure(names: list[str], batch: int, threads: int, rounds: int, peers: Path | None) -> dict[str, dict[str, float]]:
    """Median time and peak memory of each subject; rounds alternate between subjects, one runs at a time."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    results: dict[str, dict[str, float]] = {}
    # Large matrices are measured a family at a time: more waiting processes would not fit memory together.
    families: dict[str, list[str]] = {}
    for name in names:
        families.setdefault("all" if batch <= 1024 else family(name), []).append(name)
    for group in families.values():
        workers = {}
        for name in group:
            command = [sys.executable, "-m", "dipole.benchmarks.speed.losses", "--child", name, str(batch)]
            command += [str(threads), str(rounds), *([str(peers)] if peers else [])]
            workers[name] = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
            )
            stdout = workers[name].stdout
            assert stdout is not None
            if not stdout.readline():
                print(f"  {name}: could not be measured (see above)", file=sys.stderr)
                workers.pop(name).wait()
        times: dict[str, list[float]] = {name: [] for name in group}
        for _ in range(rounds):
            for name, worker in workers.items():
                assert worker.stdin is not None
                assert worker.stdout is not None
                worker.stdin.write("\n")
                worker.stdin.flush()
                line = worker.stdout.readline()
                if line:
                    answer = json.loads(line)
                    times[name].append(answer["ms"])
                    results[name] = {"ms": statistics.median(times[name]), "mb": answer["mb"]}
        for worker in workers.values():
            worker.communicate()
    return results


def family(name: str) -> str:
    """Subjects that are compared with each other: `infonce` for NT-Xent of any library, `infonce+dp` and so on."""
    what = name.partition(" ")[2]
    return {"NTXentLoss": "infonce", "DCLLoss": "dcl"}.get(what, re.split(r"\W", what)[0])


def ratios(table: dict[str, dict[str, float]]) -> list[str]:
    """The comparisons that matter, from one table."""
    lines = []
    peers = {n: r for n, r in table.items() if not n.startswith(("dipole", "dense"))}
    ours = table.get("dipole infonce")
    ntxent = {n: r for n, r in peers.items() if "NTXent" in n}
    if ours and ntxent:
        best = min(ntxent, key=lambda n: ntxent[n]["ms"])
        lines.append(
            f"infonce: {ntxent[best]['ms'] / ours['ms']:.2f} x the speed of {best}, the fastest peer, "
            f"at 1/{ntxent[best]['mb'] / max(ours['mb'], 0.1):.1f} of its memory"
        )
    if "lightly DCLLoss" in peers and "dipole dcl" in table:
        peer, mine = peers["lightly DCLLoss"], table["dipole dcl"]
        lines.append(f"dcl: {peer['ms'] / mine['ms']:.2f} x the speed of lightly DCLLoss (a decoupled loss, no prior)")
    for name in OURS:
        if f"dense {name}" in table and f"dipole {name}" in table:
            dense, mine = table[f"dense {name}"], table[f"dipole {name}"]
            lines.append(
                f"{name}: {dense['ms'] / mine['ms']:.2f} x dense PyTorch, "
                f"1/{dense['mb'] / max(mine['mb'], 0.1):.1f} of its memory"
            )
    for name, base in (("infonce+dp", "infonce"), ("cacr K=4", "cacr")):
        if f"dipole {name}" in table and f"dipole {base}" in table:
            lines.append(
                f"{name}: {table[f'dipole {name}']['ms'] / table[f'dipole {base}']['ms']:.2f} x the time of {base}"
            )
    return lines


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        name, batch, threads, rounds, *peers = sys.argv[2:]
        child(name, int(batch), int(threads), int(rounds), Path(peers[0]) if peers else None)
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, help="folder with lightly and pytorch-metric-learning")
    parser.add_argument("--batches", default="16,64,256,1024,4096,8192", help="points per view, separated by commas")
    parser.add_argument("--threads", default="1,all", help="numbers of threads, separated by commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", help="measure only subjects whose name matches this regular expression")
    parser.add_argument("--out", type=Path, help="JSON file; default benchmarks/speed/results/losses.json")
    options = parser.parse_args()
    out = options.out or RESULTS / "losses.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    tables = json.loads(out.read_text())["tables"] if out.exists() else []
    for word in options.threads.split(","):
        threads = os.cpu_count() or 1 if word == "all" else int(word)
        for batch in map(int, options.batches.split(",")):
            names = [n for n in subjects(batch, options.peers) if not options.only or re.search(options.only, n)]
            rounds = options.rounds if batch <= 8192 else 1
            table = measure(names, batch, threads, rounds, options.peers)
            lines = ratios(table)
            entry = {"batch": batch, "threads": threads, "date": date.today().isoformat(), "machine": machine()}
            # A new measurement takes the place of the old one of its batch and threads; the others stay.
            tables = [t for t in tables if (t["batch"], t["threads"]) != (batch, threads)]
            tables.append(entry | {"subjects": table, "ratios": lines})
            out.write_text(json.dumps({"tables": tables}, indent=1) + "\n")
            kind = "processor" if threads == 1 else "wall"
            print(f"\nB = {batch} ({2 * batch} rows), {threads} thread(s), {kind} time of forward + backward")
            for name, row in sorted(table.items(), key=lambda item: item[1]["ms"]):
                print(f"  {name:42s} {row['ms']:10.1f} ms {row['mb']:9.0f} MB")
            for line in lines:
                print(f"  -> {line}")


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    import platform

    import psutil
    import torch

    from dipole.core.utils.machine import processor_name

    return {
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "load": round(psutil.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
    }


if __name__ == "__main__":
    main()
