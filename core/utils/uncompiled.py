"""`torch.compiler.disable` without its slow import."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def uncompiled(function: Callable[P, T]) -> Callable[P, T]:
    """Return the function as `torch.compiler.disable` gives it, once a process has loaded what compiles.

    torch.compiler.disable loads it at once, as long as torch itself takes: every command would wait for it, and those
    that say what is wrong with a command line never compile.

    Args:
        function: any; its own frames and all that it calls are run as written.
    """
    left_alone: list[Callable[P, T]] = []

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not left_alone:
            left_alone.append(torch.compiler.disable(function))
        return left_alone[0](*args, **kwargs)

    return call
