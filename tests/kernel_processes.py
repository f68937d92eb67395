"""Kernels without a GPU: Triton decides when it is imported whether it interprets, so each way has a process."""

import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
INTERPRETED = {"TRITON_INTERPRET": "1", "DIPOLE_ENGINE": "triton"}


@contextmanager
def process(environment: Mapping[str, str]) -> Iterator[Callable[..., Any]]:
    """A function that calls functions of a test module in a process that was started with these variables."""
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        with pytest.MonkeyPatch.context() as patch:
            for name in INTERPRETED:
                patch.delenv(name, raising=False)
            for name, value in environment.items():
                patch.setenv(name, value)
            pool.submit(os.getpid).result()
        yield lambda function, *args: pool.submit(function, *args).result()


def resources(cubin: bytes) -> dict[str, int]:
    """Registers, stack and local memory of machine code, by the tool that comes with Triton."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", told)}
