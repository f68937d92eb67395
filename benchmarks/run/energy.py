"""Energy of a run, where the device tells: NVIDIA's counter (NVML) and Intel's and AMD's package counters (RAPL).

Both count the whole device: on a shared machine the figure includes what others did meanwhile, and says so by its name.
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from math import isfinite
from pathlib import Path

from dipole.core.utils.files import atomic_write
from dipole.core.utils.received import check_depth, read_text

COST = "energy.json"
RAPL = Path("/sys/class/powercap")


class Meter:
    """Reads the counters when made; `write` keeps the joules since then beside the run's record."""

    def __init__(self) -> None:
        self.start = counters()

    def joules(self) -> dict[str, float]:
        """Joules by device since the meter was made; a counter that wrapped around or vanished is left out."""
        now = counters()
        return {name: now[name] - before for name, before in self.start.items() if now.get(name, -1.0) >= before}

    def write(self, folder: Path) -> None:
        """Add the joules to those of earlier sessions of the same run."""
        joules = self.joules()
        for name, earlier in read(folder).items():
            joules[name] = joules.get(name, 0.0) + earlier
        if joules:
            with suppress(OSError):
                atomic_write(folder / COST, json.dumps({"whole_device_joules": joules}) + "\n")


def read(folder: Path) -> Mapping[str, float]:
    """Joules by device of a run, empty where nothing was measured."""
    try:
        text = read_text(folder / COST)
        check_depth(text)
        # A counter without a number leaves the others standing.
        found = json.loads(text)["whole_device_joules"]
        return {str(name): float(value) for name, value in found.items() if isfinite(value)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return {}


def counters() -> dict[str, float]:
    """Joules since some fixed time, by device."""
    return {**_rapl(), **_nvml()}


def _rapl() -> dict[str, float]:
    found = {}
    for path in sorted(RAPL.glob("intel-rapl:[0-9]*")):
        # Packages only ("intel-rapl:0"); their parts ("intel-rapl:0:1") are counted in them.
        if path.name.count(":") == 1:
            with suppress(OSError, ValueError):
                found[f"cpu:{path.name.partition(':')[2]}"] = int((path / "energy_uj").read_text()) * 1e-6
    return found


def _nvml() -> dict[str, float]:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:
        return {}
    found = {}
    try:
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        every = range(pynvml.nvmlDeviceGetCount())
        for index in every if shown is None else [int(i) for i in shown.split(",") if i.strip()]:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            found[f"gpu:{index}"] = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) * 1e-3
    except Exception:
        return {}
    finally:
        pynvml.nvmlShutdown()
    return found
