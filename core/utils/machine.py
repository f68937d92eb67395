"""Processors and memory of the machine, on Linux, macOS and Windows."""

import os
import platform
import sys
from contextlib import suppress
from pathlib import Path

import psutil


def processors() -> int:
    """Return the number of processors that this process may use."""
    # macOS has no affinity, neither in os nor in psutil.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor_name() -> str:
    """Return the model of the processor, as the system names it."""
    return processor_facts().get("model name") or platform.processor() or platform.machine()


def processor_facts() -> dict[str, str]:
    """Return /proc/cpuinfo of the last processor by name (`model name`, `flags`). It is {} on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return {}
    fields = (line.partition(":") for line in lines)
    return {name.strip(): value.strip() for name, colon, value in fields if colon}


def peak_memory() -> int:
    """Return the largest resident memory of this process so far, in bytes."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        # On Linux, getrusage includes the memory of the parent process.
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    try:
        import resource
    except ImportError:  # Windows
        return int(psutil.Process().memory_info().peak_wset)
    unit = {"darwin": 1}.get(sys.platform, 1024)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def free_memory() -> int:
    """Return the free memory of the machine, or of its control group if that is less, in bytes."""
    free = int(psutil.virtual_memory().available)
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return free
    if limit == "max":
        return free
    return min(free, max(int(limit) - used, 0))
