"""What this machine offers to jobs, and the environment of one that is given a part of it."""

import os
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def environment_for(threads: int, gpus: str | None) -> dict[str, str]:
    """The environment of a worker: this process's own, with the number of threads and the GPUs it may use."""
    environment = {**os.environ, **dict.fromkeys(THREAD_VARIABLES, str(threads)), "PYTHONUNBUFFERED": "1"}
    if gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpus
    return environment


def visible_gpus() -> list[str]:
    """GPUs this process may use, by the names CUDA_VISIBLE_DEVICES takes."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is not None:
        return [name.strip() for name in shown.split(",") if name.strip() and name.strip() != "-1"]
    try:
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return []
    return [str(index) for index, line in enumerate(listed.stdout.splitlines()) if line.startswith("GPU")]


class Places:
    """GPUs (or plain places without GPUs), handed out several at a time or not at all, so that nothing deadlocks."""

    def __init__(self, gpus: Sequence[str], slots: int) -> None:
        self._free = [gpus[i % len(gpus)] for i in range(max(slots, len(gpus)))] if gpus else [""] * slots
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, count: int) -> Iterator[list[str]]:
        """Wait for `count` different places and hold them."""
        with self._changed:
            self._changed.wait_for(lambda: len(set(self._free)) >= count)
            names = list(dict.fromkeys(self._free))[:count]
            for name in names:
                self._free.remove(name)
        try:
            yield names
        finally:
            with self._changed:
                self._free += names
                self._changed.notify_all()
