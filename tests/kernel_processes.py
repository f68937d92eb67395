"""Run kernels without a GPU: interpreted, or compiled for a GPU that is not there.

Triton decides at import whether it interprets, so each way needs a process of its own.
"""

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


def start() -> None:
    """Prepare a process. Its interpreter prepares Triton's language once, not at each call of a helper function."""
    torch.set_num_threads(1)
    if not os.environ.get("TRITON_INTERPRET"):
        return
    from triton.runtime import interpreter

    prepared: set[str] = set()

    def call(self: Any, *args: Any, **given: Any) -> Any:
        if self.fn.__module__ not in prepared:
            interpreter._patch_lang(self.fn)
            prepared.add(self.fn.__module__)
        return self.rewrite()(*args, **given)

    interpreter.InterpretedFunction.__call__ = call


@contextmanager
def process(environment: Mapping[str, str]) -> Iterator[Callable[..., Any]]:
    """Yield a function that calls functions of a test module in a process with these environment variables."""
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=start) as pool:
        with pytest.MonkeyPatch.context() as patch:
            for name in INTERPRETED:
                patch.delenv(name, raising=False)
            for name, value in environment.items():
                patch.setenv(name, value)
            pool.submit(os.getpid).result()
        yield lambda function, *args: pool.submit(function, *args).result()


@contextmanager
def compiling_for(architecture: int) -> Iterator[list[Any]]:
    """Compile every kernel that `kernels.fused` launches inside, for sm_80, sm_90 or sm_100, and yield them in a list.

    Nothing is run, so the results of a launch are arbitrary numbers.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    from dipole.core.objectives.kernels import fused, template

    class Driver:
        def get_current_target(self) -> Any:
            return GPUTarget("cuda", architecture, 32)

        def get_current_device(self) -> int:
            return architecture

        def get_current_stream(self, device: int) -> int:
            return 0

        def map_python_to_cpp_type(self, name: str) -> str:
            return name

    built: list[Any] = []

    class Kernel:
        def __init__(self, function: Any) -> None:
            self.function = function

        def __getitem__(self, grid: Any) -> Any:
            return lambda **arguments: built.append(self.function.warmup(grid=grid, **arguments))

    driver.set_active(Driver())
    with pytest.MonkeyPatch.context() as patch:
        for name in ("forward", "backward"):
            patch.setattr(template, name, Kernel(getattr(template, name)))
        patch.setattr(fused, "_processors", lambda x: 132)
        patch.setattr(fused, "_generation", lambda x: architecture // 10)
        yield built


def resources(cubin: bytes) -> dict[str, int]:
    """Return registers, stack and local memory of machine code, from the tool that comes with Triton."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", report)}
