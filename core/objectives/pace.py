"""Measure the speed of the row statistics on this machine, and report the engine."""

from __future__ import annotations

import time
from dataclasses import dataclass
from importlib.metadata import version
from statistics import median

import torch

from dipole.core.objectives import engine
from dipole.core.objectives.pairs import Pairs
from dipole.core.objectives.statistics import LogSumExp

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
    """Time the row statistics, forward and backward, after a warm-up."""
    device = engine.usual_device()
    against = engine.reason_against(device)
    interpreted = not against and engine.interpreter()
    rows = 1024 if device.type == "cpu" else 16384
    if interpreted:
        rows = 64
    noted, served = len(engine.failures()), engine.served()
    times = [_pass(rows, device) for _ in range(2 if interpreted else 4)]
    failures = "; ".join(engine.failures()[noted:])
    name, check = f"eager tiles ({failures or against})", "nothing to check"
    if not against and engine.served() > served:
        how = "interpreted on the processor" if interpreted else f"on {torch.cuda.get_device_name(device)}"
        name, check, failures = f"triton {version('triton')}, {how}", "self-check ok", ""
    return Pace(name, check, failures, rows, WIDTH, median(times[1:]) * 1e3)


def _pass(rows: int, device: torch.device) -> float:
    x = torch.nn.functional.normalize(torch.randn(rows, WIDTH, device=device), dim=1).requires_grad_()
    pairs, wanted = Pairs.of_points(x), LogSumExp(2.0)
    start = time.perf_counter()
    found = engine.statistics_of(pairs, x, x, [wanted], 1.0)
    found[wanted].sum().backward()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
