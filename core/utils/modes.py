"""Training and evaluation mode of modules for the length of a block."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def in_mode(is_training: bool, *modules: nn.Module | None) -> Iterator[None]:
    """Set the mode of modules, and restore that of each submodule at the end of the block."""
    there = [module for module in modules if module is not None]
    modes = [(part, part.training) for module in there for part in module.modules()]
    for module in there:
        module.train(is_training)
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode
