"""Measure losses on a GPU.

    python -m dipole.benchmarks.speed.gpu [--minutes 7] [--device cuda] [--out FILE]

Time is between the device's own events around forward and backward pass, after a warm-up, with fresh inputs for every
repeat. The least time counts, and the median is kept. Losses are dipole's (with the device's engine, and with eager
tiles), plain PyTorch, the same compiled, and lightly, pytorch-metric-learning and siglip-kernel if they are installed.
A library that runs out of memory has that as its result. The floor follows from a matrix product and a copy on the same
device. The most telling measurements come first, and the ones that do not begin within `--minutes` are listed.
"""

import argparse
import gc
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from importlib.metadata import version
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import torch

import dipole
from dipole.benchmarks.report.table import markdown
from dipole.benchmarks.speed.subjects import BUILD, DTYPES, SHARP, TimedLoss, subjects
from dipole.benchmarks.speed.timing import RESULTS, floor, rates, time_and_memory
from dipole.benchmarks.studies.common import save
from dipole.core.cli.parser import positive
from dipole.core.objectives import engine
from dipole.core.objectives.similarity import fits
from dipole.core.utils.errors import DipoleError

LOSSES = ("infonce", SHARP, "infonce+dp(reduction=anchor_sum)")
PACKAGES = ("torch", "triton", "lightly", "pytorch_metric_learning", "siglip_kernel")
ROWS, WIDTHS = {"cuda": [65536, 16384, 4096], "cpu": [1280, 64]}, {"cuda": [128, 768], "cpu": [16]}


def ranked(cases: Sequence[TimedLoss], device: torch.device, only: str) -> list[tuple[TimedLoss, str]]:
    """Return all measurements, a case and a name in BUILD each, the most telling first."""

    def rank(measured: tuple[TimedLoss, str]) -> int:
        case, name = measured
        late = case.loss != cases[0].loss
        # Compiling takes longer than what it is compared with.
        return 2 * (case.dtype != "bf16") + 4 * late + 4 * (late and name.endswith("compiled"))

    found = ((case, name) for case in cases for name in subjects(case, device) if re.search(only, name))
    return sorted(found, key=rank)


def attempt(case: TimedLoss, name: str, device: torch.device) -> dict[str, Any]:
    """Return the numbers of a loss, or the error that it ended with."""
    try:
        generator = torch.Generator(device).manual_seed(0)
        loss, served = BUILD[name](case, device), engine.served()
        found: dict[str, Any] = time_and_memory(
            lambda: case.embeddings(device, generator, name), lambda views: loss(views).backward(), device
        )
        if name.startswith("dipole"):
            found["engine"] = "dense" if fits(case.rows, case.rows, device) else "tiles"
            if engine.served() > served:
                found["engine"] = "kernels"
        return found
    except torch.OutOfMemoryError:
        return {"error": "out of memory"}
    except Exception as error:  # an error of another library is a result
        return {"error": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"}
    finally:
        if torch.cuda.is_available():
            gc.collect()
            torch.cuda.empty_cache()


def measure(
    todo: Sequence[tuple[TimedLoss, str]], device: torch.device, minutes: float, out: Path | None
) -> dict[str, Any]:
    """Measure what begins within some minutes, and write the report after each measurement."""
    began = time.monotonic()
    packages = {name: version(name) if find_spec(name) else "not installed" for name in PACKAGES}
    report: dict[str, Any] = {"device": name_of(device), "date": date.today().isoformat(), "packages": packages}
    report |= {"minutes": minutes, "rates": rates(device), "losses": [], "left_out": []}
    for case, name in todo:
        text = f"{case.loss}, {case.rows}, {case.width}, {case.dtype}, {name}"
        if time.monotonic() - began > 60 * minutes:
            report["left_out"].append(text)
        else:
            row = asdict(case) | {"subject": name} | attempt(case, name, device)
            row["floor_ms"] = floor(case.rows, case.width, case.dtype, report["rates"])
            report["losses"].append(row)
            print(f"{text}: {row.get('error') or format(row['ms'], ',.3f') + ' ms'}", flush=True)
        if out is not None:
            save(out, report | {"seconds": time.monotonic() - began})
    return report


def name_of(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return "processor (a dry run)"


def table(report: dict[str, Any]) -> str:
    texts, rows = [f"{report['device']}, PyTorch {report['packages']['torch']}, {report['date']}"], []
    for row in report["losses"]:
        name = row["subject"]
        if "engine" in row:
            name += f" ({row['engine']})"
        numbers = [row.get("error", ""), "", ""]
        if "ms" in row:
            numbers = [f"{row['ms']:.3f}", f"{row['floor_ms'] / row['ms']:.2f}", f"{row.get('peak_mb', 0):.0f}"]
        rows.append([row["loss"], str(row["rows"]), str(row["width"]), row["dtype"], name, *numbers])
    if rows:
        texts.append(markdown(["loss", "rows", "d", "dtype", "by", "ms", "share of the floor", "peak MB"], rows))
    if report["left_out"]:
        texts.append("\n".join([f"Left out after {report['minutes']:g} minutes:", *report["left_out"]]))
    return "\n\n".join(texts)


def device_of(text: str) -> torch.device:
    try:
        device = torch.device(text)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ROWS:
        raise argparse.ArgumentTypeError(f"{text}: allowed are cuda, cuda:N and cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise argparse.ArgumentTypeError(f"{text}: torch sees {count} GPUs. --device cpu is a dry run.")
    return device


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, dtypes = parser.add_argument, list(DTYPES)
    add("--device", type=device_of, default="cuda", help="cuda, cuda:1, or cpu for a dry run (default cuda)")
    add("--losses", nargs="+", default=LOSSES, metavar="TEXT", help=f"default {', '.join(LOSSES)}")
    add("--rows", nargs="+", type=positive, help="embeddings of both views (default 65536 16384 4096)")
    add("--widths", nargs="+", type=positive, help="of the embeddings (default 128 768)")
    add("--dtypes", nargs="+", choices=dtypes, default=dtypes, help="default all")
    add("--only", default="", help="measure only the libraries that match this regular expression")
    add("--minutes", type=float, default=7.0, help="nothing begins after them (default 7)")
    add("--out", type=Path, help="JSON file (default results/gpu-DEVICE.json if a GPU is measured)")
    options = parser.parse_args(arguments)
    device, out = options.device, options.out
    rows, widths = options.rows or ROWS[device.type], options.widths or WIDTHS[device.type]
    if any(number % 2 for number in rows):
        parser.error("--rows: give even numbers, as two views share the rows")
    try:
        re.compile(options.only)
        for loss in options.losses:
            dipole.objective(loss, dim=widths[0])
    except (DipoleError, re.error) as error:
        parser.error(str(error))
    every = product(options.losses, options.dtypes, widths, rows)
    cases = [TimedLoss(loss, number, width, dtype) for loss, dtype, width, number in every]
    if out is None and device.type == "cuda":
        out = RESULTS / f"gpu-{re.sub(r'[^a-z0-9]+', '-', name_of(device).lower()).strip('-')}.json"
    if device.type == "cpu":
        torch.set_num_threads(1)
    report = measure(ranked(cases, device, options.only), device, options.minutes, out)
    print("\n" + table(report))
    if out is not None:
        print(f"\n{out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
