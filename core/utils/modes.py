"""Training and evaluation mode of modules for the length of a block."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def in_mode(is_training: bool, *modules: nn.Module) -> Iterator[None]:
    """Set the mode of modules, and restore that of each submodule at the end of the block."""
    modes = [(part, part.training) for module in modules for part in module.modules()]
    for module in modules:
        module.train(is_training)
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode
