"""Time and memory of something a device does, by the device's own clock."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

# A measurement repeats until it has taken so many seconds, within these numbers of times.
SECONDS, FEWEST, MOST = 0.5, 3, 30
# A call that takes more seconds is repeated once.
SLOW = 5.0
# Rows and columns of a product, and bytes that are copied, by kind of device.
PRODUCT = {"cuda": 8192, "cpu": 256}
COPIED = {"cuda": 1 << 30, "cpu": 1 << 22}


def elapsed(run: Callable[[], Any], device: torch.device) -> float:
    """Milliseconds of a call: between two events on a GPU, by the wall clock elsewhere."""
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
    """Least and median milliseconds of `run(fresh())`, without what `fresh` takes; peak memory of a GPU above that.

    Every repeat has inputs of its own. The first calls compile, choose blocks and fill the allocator: they are told
    apart, as `first_ms`, and count for nothing else.
    """
    given = fresh()
    first = elapsed(lambda: run(given), device)
    given = fresh()
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device) if cuda else 0
    second = elapsed(lambda: run(given), device)
    peak = {"peak_mb": (torch.cuda.max_memory_allocated(device) - before) / 1e6} if cuda else {}
    times: list[float] = []
    fewest = FEWEST if second < 1e3 * SLOW else 1
    for _ in range(max(fewest, min(MOST, round(1e3 * SECONDS / max(second, 1e-3))))):
        given = fresh()
        times.append(elapsed(lambda given=given: run(given), device))  # type: ignore[misc]
    found = {"ms": min(times), "median_ms": statistics.median(times), "first_ms": first, "repeats": len(times)}
    return found | peak


def rates(device: torch.device) -> dict[str, float]:
    """Floating-point operations per second of a matrix product in bf16 and float32, and bytes per second of a copy."""
    side = PRODUCT[device.type]
    found = {}
    for name, dtype in (("bf16", torch.bfloat16), ("float32", torch.float32)):

        def fresh(dtype: torch.dtype = dtype) -> Any:
            return [torch.randn(side, side, device=device, dtype=dtype) for _ in range(2)]

        found[name] = 2 * side**3 / (1e-3 * time_and_memory(fresh, lambda given: given[0] @ given[1], device)["ms"])
    copied = COPIED[device.type]
    target = torch.empty(copied, dtype=torch.uint8, device=device)
    took = time_and_memory(lambda: torch.zeros_like(target), lambda given: target.copy_(given), device)["ms"]
    return found | {"bytes": 2 * copied / (1e-3 * took)}  # read and written


def floor(rows: int, width: int, dtype: str, rate: dict[str, float]) -> float:
    """Milliseconds that a loss of a symmetric matrix takes at least at measured rates without keeping the matrix.

    Half of the matrix forward, half of it again backward, and one product of all of dL/ds with the rows: 4 rows^2 d
    operations. The rows are read by both passes and their gradient is written.
    """
    moved = 3 * rows * width * (2 if dtype == "bf16" else 4)
    return 1e3 * max(4 * rows**2 * width / rate[dtype], moved / rate["bytes"])
