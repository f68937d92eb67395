"""Measure time and memory, and keep the numbers in a JSON file."""

import ctypes
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

from dipole.benchmarks.studies.common import load, save
from dipole.core.utils.machine import processor_name

RESULTS = Path(__file__).with_name("results")
CPU = torch.device("cpu")

SECONDS, FEWEST, MOST = 0.5, 3, 30  # that a measurement repeats for, and the least and most times that it does
SLOW = 5.0  # a call that takes more seconds is repeated once
# Rows and columns of a product, and bytes of a copy, by kind of device.
PRODUCT = {"cuda": 8192, "cpu": 256}
COPY = {"cuda": 1 << 30, "cpu": 1 << 22}


def clock(device: torch.device = CPU) -> float:
    """Return seconds: processor time, or wall time once the GPU is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.process_time()


def interleaved(subjects: Mapping[str, Callable[[], Any]], rounds: int, device: torch.device = CPU) -> dict[str, float]:
    """Return the median milliseconds of each subject: one warm-up round, then rounds that alternate the subjects."""
    times: dict[str, list[float]] = {name: [] for name in subjects}
    for number in range(rounds + 1):
        for name, run in subjects.items():
            began = clock(device)
            run()
            if number:
                times[name].append(1e3 * (clock(device) - began))
    return {name: statistics.median(each) for name, each in times.items()}


def elapsed(run: Callable[[], Any], device: torch.device) -> float:
    """Return the milliseconds of a call: between two events on a GPU, by the wall clock elsewhere."""
    if device.type != "cuda":
        began = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - began)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    start.record()
    run()
    end.record()
    torch.cuda.synchronize(device)
    return float(start.elapsed_time(end))


def time_and_memory(fresh: Callable[[], Any], run: Callable[[Any], Any], device: torch.device) -> dict[str, float]:
    """Return the least and median milliseconds of `run(fresh())` without `fresh`, and a GPU's peak memory above that.

    The first call compiles and fills the allocator, so it only counts as `first_ms`.
    """
    given = fresh()
    found = {"first_ms": elapsed(lambda: run(given), device)}
    given = fresh()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    second = elapsed(lambda: run(given), device)
    if device.type == "cuda":
        found["peak_mb"] = (torch.cuda.max_memory_allocated(device) - before) / 1e6
    fewest = FEWEST if second < 1e3 * SLOW else 1
    times: list[float] = []
    for _ in range(max(fewest, min(MOST, round(1e3 * SECONDS / max(second, 1e-3))))):
        given = fresh()
        times.append(elapsed(lambda: run(given), device))  # noqa: B023
    return {"ms": min(times), "median_ms": statistics.median(times), "repeats": len(times)} | found


def rates(device: torch.device) -> dict[str, float]:
    """Return operations per second of a matrix product in bf16 and float32, and bytes per second of a copy."""
    side = PRODUCT[device.type]
    found = {}
    for name, dtype in (("bf16", torch.bfloat16), ("float32", torch.float32)):
        matrix = torch.randn(side, side, device=device, dtype=dtype)
        took = time_and_memory(matrix.clone, lambda given: given @ given, device)
        found[name] = 2 * side**3 / (1e-3 * took["ms"])
    target = torch.empty(COPY[device.type], dtype=torch.uint8, device=device)
    took = time_and_memory(lambda: torch.zeros_like(target), lambda given: target.copy_(given), device)
    return found | {"bytes": 2 * len(target) / (1e-3 * took["ms"])}  # read and written


def floor(rows: int, width: int, dtype: str, rate: dict[str, float]) -> float:
    """Return the least milliseconds of a loss of a symmetric matrix that is not stored, at measured rates.

    Half of the matrix forward, half backward, and dL/ds times the rows: 4 rows^2 d operations on rows read twice.
    """
    moved = 3 * rows * width * (2 if dtype == "bf16" else 4)
    return 1e3 * max(4 * rows**2 * width / rate[dtype], moved / rate["bytes"])


def keep_freed_memory() -> bool:
    """Let this process keep what it frees (glibc's MALLOC_MMAP_MAX_=0). Return False without glibc.

    glibc maps blocks above 32 MB anew each time, and every fresh page faults. A program that allocates the same large
    blocks in every step loses half of its time, so programs with different blocks cannot be compared.
    """
    trim_threshold, mmap_max = -1, -4  # malloc.h
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(mmap_max, 0) and mallopt(trim_threshold, 2**31 - 1))


def machine() -> dict[str, Any]:
    return {
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "load": round(psutil.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
    }


class Results:
    """Numbers by name in a JSON file, written after every measurement. Numbers of other settings are dropped."""

    def __init__(self, path: Path | None, setting: Mapping[str, Any]) -> None:
        self.path = path
        self.values: dict[str, Any] = {}
        if path is not None:
            self.values = load(path, {})
        if any(self.values.get(name) != value for name, value in setting.items()):
            self.values = dict(setting)

    def add(self, part: str, name: str, row: Mapping[str, Any]) -> None:
        rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}
        print(f"{part}, {name}: {json.dumps(rounded)}", flush=True)
        self.values.setdefault(part, {})[name] = rounded
        if self.path is not None:
            save(self.path, self.values)
