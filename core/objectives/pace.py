"""Measure the speed of the row statistics on this machine, and report the engine."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

import torch

from dipole.core.objectives import engine
from dipole.core.objectives.engine import row_statistics
from dipole.core.objectives.pairs import Pairs
from dipole.core.objectives.statistics import AnyStatistic, LogSumExp

WIDTH = 128


@dataclass(frozen=True)
class Pace:
    """The engine, the result of its self-check, and the milliseconds of one forward and backward pass."""

    engine: str
    check: str
    failures: str
    rows: int
    width: int
    milliseconds: float


def measure() -> Pace:
    """Time the row statistics, forward and backward, after a warm-up.

    Raises:
        EngineError: the requested engine cannot run here.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    against = engine.reason_against(device)
    kernels = not against
    rows = 64 if kernels and engine.interpreter() else 16384 if device.type == "cuda" else 1024
    noted, served = len(engine.failures()), engine.served()
    times = [_pass(rows, device) for _ in range(2 if rows == 64 else 4)]
    failures = "; ".join(engine.failures()[noted:])
    kernels = kernels and engine.served() > served
    if kernels:
        how = "interpreted on the processor" if engine.interpreter() else f"on {torch.cuda.get_device_name(device)}"
        return Pace(
            f"triton {engine.triton_version()}, {how}", "self-check ok", "", rows, WIDTH, median(times[1:]) * 1e3
        )
    why = failures or against
    return Pace(f"eager tiles ({why})", "nothing to check", failures, rows, WIDTH, median(times[1:]) * 1e3)


def _pass(rows: int, device: torch.device) -> float:
    x = torch.nn.functional.normalize(torch.randn(rows, WIDTH, device=device), dim=1).requires_grad_()
    pairs = Pairs.of_points(x)
    wanted: list[AnyStatistic] = [LogSumExp(2.0)]
    _wait(device)
    start = time.perf_counter()
    found = row_statistics(
        x, x, pairs.excluded, wanted, counts=pairs.negative_counts, bound=1.0, symmetric=pairs.mutual
    )
    found[wanted[0]].sum().backward()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
