"""Measure losses, a SimCLR step and an agent's updates on a GPU.

    python -m dipole.benchmarks.speed.gpu [--minutes 7] [--device cuda] [--out FILE]

Time is between the device's own events around forward and backward pass, after a warm-up, with fresh inputs for every
repeat. The least time counts, and the median is kept. Losses are dipole's (with the device's engine, and with eager
tiles), plain PyTorch, the same compiled, and lightly, pytorch-metric-learning and siglip-kernel if they are installed.
A library that runs out of memory has that as its result. The floor follows from a matrix product and a copy on the same
device. The most telling measurements come first, and the ones that do not begin within `--minutes` are listed.

The numbers go to `benchmarks/speed/results/` under the device's name, and a table for the docs is printed. `--device
cpu` measures small sizes on a processor, which only shows that the script runs.
"""

import argparse
import gc
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import torch

import dipole
from dipole.benchmarks.speed.subjects import BUILD, DTYPES, SHARP, Case, subjects
from dipole.benchmarks.speed.timing import RESULTS, floor, rates, time_and_memory, write
from dipole.core.objectives import engine
from dipole.core.utils.errors import DipoleError

PARTS = ("losses", "simclr", "agent")
LOSSES = ("infonce", SHARP, "infonce+dp(reduction=anchor_sum)")
PACKAGES = ("torch", "triton", "lightly", "pytorch_metric_learning", "siglip_kernel")
SIZES: dict[str, dict[str, Any]] = {
    "cuda": {
        "rows": [65536, 16384, 4096],
        "widths": [128, 768],
        "simclr": {"encoder": "resnet50", "images": 64, "pixels": 224},
        "agent": {"transitions": 512, "stored": 1500, "hidden": (1024, 1024)},
    },
    "cpu": {
        "rows": [1280, 64],
        "widths": [16],
        "simclr": {"encoder": "small-conv", "images": 4, "pixels": 32},
        "agent": {"transitions": 4, "stored": 16, "hidden": (8,)},
    },
}


@dataclass(frozen=True)
class Job:
    """One measurement: its part of the results, its setting, and the function that returns its numbers."""

    part: str
    setting: dict[str, Any]
    run: Callable[[], dict[str, Any]]

    def __str__(self) -> str:
        return f"{self.part}: {', '.join(str(value) for value in self.setting.values())}"


def jobs(cases: Sequence[Case], device: torch.device, parts: Sequence[str], only: str) -> list[Job]:
    """Return all measurements, the most telling first."""
    ranked: list[tuple[int, Job]] = []
    for case in cases if "losses" in parts else ():
        late = case.loss != cases[0].loss
        for name in subjects(case, device):
            if re.search(only, name):
                # Compiling takes longer than what it is compared with.
                rank = 2 * (case.dtype != "bf16") + 4 * late + 4 * (late and name.endswith("compiled"))
                ranked.append((rank, loss_job(case, name, device)))
    sizes = SIZES[device.type]
    if "simclr" in parts:
        ranked.append((1, simclr_job(device, **sizes["simclr"])))
    if "agent" in parts:
        ranked += [(1, agent_job(device, precision=each, **sizes["agent"])) for each in ("float32", "bf16")]
    return [job for _, job in sorted(ranked, key=lambda each: each[0])]


def loss_job(case: Case, name: str, device: torch.device) -> Job:
    def run() -> dict[str, Any]:
        generator = torch.Generator(device).manual_seed(0)
        loss, served = BUILD[name](case, device), engine.served()
        found: dict[str, Any] = time_and_memory(
            lambda: case.embeddings(device, generator, name), lambda views: loss(views).backward(), device
        )
        if name.startswith("dipole"):
            found["engine"] = "kernels" if engine.served() > served else "tiles"
        return found

    return Job("losses", asdict(case) | {"subject": name}, run)


def simclr_job(device: torch.device, encoder: str, images: int, pixels: int) -> Job:
    def run() -> dict[str, Any]:
        from dipole.benchmarks.speed.vision import simclr

        calls = simclr(encoder, batch=images, size=pixels, device=device, bf16=True, compiles=False)
        alone, step = (time_and_memory(lambda: None, lambda _: call(), device) for call in calls.values())  # noqa: B023
        numbers = {"encoder_ms": alone["ms"], "share_outside_encoder": 1 - alone["ms"] / step["ms"]}
        return step | numbers | {"images_per_second": 1e3 * images / step["ms"]}

    return Job("simclr", {"encoder": encoder, "images": images, "pixels": pixels, "dtype": "bf16"}, run)


def agent_job(device: torch.device, transitions: int, stored: int, hidden: Sequence[int], precision: str) -> Job:
    def run() -> dict[str, Any]:
        from dipole.benchmarks.speed.rl import ours, sample

        agent = ours(transitions, str(device), stored, hidden=tuple(hidden), precision=precision)

        def two(batch: Any) -> None:
            """Update with and without an actor step."""
            for _ in range(2):
                agent.update(batch or sample(agent, transitions))

        pair = time_and_memory(lambda: sample(agent, transitions), two, device)
        sampled = time_and_memory(lambda: None, two, device)
        numbers = {"updates_per_second": 2e3 / pair["ms"], "updates_per_second_with_sampling": 2e3 / sampled["ms"]}
        return pair | numbers

    return Job("agent", {"transitions": transitions, "hidden": list(hidden), "precision": precision}, run)


def attempt(job: Job) -> dict[str, Any]:
    """Return the numbers of a job, or the error that it ended with."""
    try:
        return job.run()
    except torch.OutOfMemoryError:
        return {"error": "out of memory"}
    except Exception as error:  # an error of another library is a result
        return {"error": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"}
    finally:
        if torch.cuda.is_available():
            gc.collect()
            torch.cuda.empty_cache()


def measure(todo: Sequence[Job], device: torch.device, minutes: float, out: Path | None) -> dict[str, Any]:
    """Run the jobs that begin within some minutes, and write the report after each."""
    began = time.monotonic()
    packages = {name: version(name) if find_spec(name) else "not installed" for name in PACKAGES}
    report: dict[str, Any] = {"device": name_of(device), "date": date.today().isoformat(), "packages": packages}
    report |= {"minutes": minutes, "rates": rates(device), **{part: [] for part in PARTS}, "left_out": []}
    for job in todo:
        if time.monotonic() - began > 60 * minutes:
            report["left_out"].append(str(job))
            continue
        row = job.setting | attempt(job)
        if job.part == "losses":
            row["floor_ms"] = floor(row["rows"], row["width"], row["dtype"], report["rates"])
        report[job.part].append(row)
        print(f"{job}: {row.get('error') or format(row['ms'], ',.3f') + ' ms'}", flush=True)
        if out is not None:
            write(out, report | {"seconds": time.monotonic() - began})
    if out is not None:
        write(out, report | {"seconds": time.monotonic() - began})
    return report


def name_of(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return "processor (a dry run)"


def table(report: dict[str, Any]) -> str:
    """Return the report as text for the docs."""
    texts = [f"{report['device']}, PyTorch {report['packages']['torch']}, {report['date']}"]
    lines = ["| loss | rows | d | dtype | by | ms | share of the floor | peak MB |", "|" + "---|" * 8]
    for row in report["losses"]:
        name = row["subject"]
        if "engine" in row:
            name += f" ({row['engine']})"
        numbers = [row.get("error", ""), "", ""]
        if "ms" in row:
            numbers = [f"{row['ms']:.3f}", f"{row['floor_ms'] / row['ms']:.2f}", f"{row.get('peak_mb', 0):.0f}"]
        cells = [row["loss"], row["rows"], row["width"], row["dtype"], name, *numbers]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    if report["losses"]:
        texts.append("\n".join(lines))
    for row in report["simclr"]:
        found = row.get("error") or (
            f"{row['ms']:.1f} ms, {100 * row['share_outside_encoder']:.1f} % outside the encoder, "
            f"{row['images_per_second']:.0f} images/s"
        )
        size = f"2 x {row['images']} views of {row['pixels']} pixels"
        texts.append(f"SimCLR step, {row['encoder']}, {size}, bf16: {found}")
    for row in report["agent"]:
        found = row.get("error") or (
            f"{row['updates_per_second']:.0f} updates/s, {row['updates_per_second_with_sampling']:.0f} with sampling"
        )
        texts.append(f"agent, {row['transitions']} transitions, {row['precision']}: {found}")
    if report["left_out"]:
        texts.append("\n".join([f"Left out after {report['minutes']:g} minutes:", *report["left_out"]]))
    return "\n\n".join(texts)


def device_of(text: str) -> torch.device:
    try:
        device = torch.device(text)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in SIZES:
        raise argparse.ArgumentTypeError(f"{text}: allowed are cuda, cuda:N and cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise argparse.ArgumentTypeError(f"{text}: torch sees {count} GPUs. --device cpu is a dry run.")
    return device


def numbers_of(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise argparse.ArgumentTypeError(f"{text!r}: give numbers above 0, separated by commas")
    return [int(word) for word in words]


def words_of(allowed: Sequence[str]) -> Callable[[str], list[str]]:
    def words(text: str) -> list[str]:
        found = [word.strip() for word in text.split(",")]
        if unknown := [word for word in found if word not in allowed]:
            raise argparse.ArgumentTypeError(f"there is no {', '.join(unknown)}; allowed are {', '.join(allowed)}")
        return found

    return words


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m dipole.benchmarks.speed.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, dtypes = parser.add_argument, list(DTYPES)
    add("--device", type=device_of, default="cuda", help="cuda, cuda:1, or cpu for a dry run (default cuda)")
    add("--losses", nargs="+", default=LOSSES, metavar="TEXT", help=f"default {', '.join(LOSSES)}")
    add("--rows", type=numbers_of, help="embeddings of both views, separated by commas (default 65536,16384,4096)")
    add("--widths", type=numbers_of, help="of the embeddings, separated by commas (default 128,768)")
    add("--dtypes", type=words_of(dtypes), default=dtypes, help="default bf16,float32")
    add("--parts", type=words_of(PARTS), default=PARTS, help=f"of {', '.join(PARTS)} (default all)")
    add("--only", default="", help="measure only the libraries that match this regular expression")
    add("--minutes", type=float, default=7.0, help="nothing begins after them (default 7)")
    add("--out", type=Path, help="JSON file; default results/gpu-DEVICE.json if a GPU is measured")
    options = parser.parse_args(arguments)
    device, out = options.device, options.out
    rows, widths = (getattr(options, name) or SIZES[device.type][name] for name in ("rows", "widths"))
    if any(number % 2 for number in rows):
        parser.error("--rows: give even numbers, as two views share the rows")
    try:
        re.compile(options.only)
        for loss in options.losses:
            dipole.objective(loss, dim=widths[0])
    except (DipoleError, re.error) as error:
        parser.error(str(error))
    every = product(options.losses, options.dtypes, widths, rows)
    cases = [Case(loss, number, width, dtype) for loss, dtype, width, number in every]
    if out is None and device.type == "cuda":
        out = RESULTS / f"gpu-{re.sub(r'[^a-z0-9]+', '-', name_of(device).lower()).strip('-')}.json"
    if device.type == "cpu":
        torch.set_num_threads(1)
    report = measure(jobs(cases, device, options.parts, options.only), device, options.minutes, out)
    print("\n" + table(report))
    if out is not None:
        print(f"\n{out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
