"""`torch.compiler.disable` without its slow import."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def uncompiled(function: Callable[P, T]) -> Callable[P, T]:
    """Return the function wrapped by `torch.compiler.disable`, where something is compiled.

    `disable` loads the compiler at once, which takes as long as importing torch. Most commands never compile.
    """
    left_alone: list[Callable[P, T]] = []

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.compiler.is_compiling():
            return function(*args, **kwargs)
        if not left_alone:
            left_alone.append(torch.compiler.disable(function))
        return left_alone[0](*args, **kwargs)

    return call
